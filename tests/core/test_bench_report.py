"""Medians, spreads and verdicts of `onebitctl bench`, from runs written by hand."""

from __future__ import annotations

import dataclasses
import itertools
import random
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from onebitd.core.bench_plan import DECODER, Run, exact_ids, nonsense, schedule
from onebitd.core.bench_report import (
    HOPELESS_RUNS,
    Judged,
    Report,
    Sample,
    Spread,
    Verdict,
    compare,
    is_hopeless,
    report,
    spread,
)

WAYS = (DECODER, "file", "shared")


def sample(
    tokens: int,
    way: str,
    first_byte_ms: float,
    *,
    number: int = 1,
    others: bool = False,
    **more: Any,
) -> Sample:
    """Return a run that went well, unless `more` says otherwise."""
    record: dict[str, Any] = {"first_byte_ms": first_byte_ms, "queue_ms": 0.01}
    if way == DECODER:
        record |= {"outcome": "skipped", "reason": "policy"}
    else:
        record |= {"outcome": "used", "route": way, "lock_ms": 1.0, "provider_wall_ms": 50.0}
        record |= {"restore_ms": 5.0} if way == "file" else {"share_ms": 2.0, "adopt_ms": 1.0}
    return Sample(Run(tokens, way, number), record | more, first_byte_ms + 1, others)


def runs(tokens: int, way: str, times: Sequence[float]) -> list[Sample]:
    """Return a run for each time, after one to warm up that is far off."""
    warm = sample(tokens, way, 9999.0, number=0)
    return [warm, *(sample(tokens, way, ms, number=at) for at, ms in enumerate(times, 1))]


def measured(decoder: Mapping[int, Sequence[float]], file: Mapping[int, Sequence[float]]) -> Judged:
    """Return how the file route is judged by times by length."""
    samples = [one for tokens, times in decoder.items() for one in runs(tokens, DECODER, times)]
    samples += [one for tokens, times in file.items() for one in runs(tokens, "file", times)]
    (judged,) = report(samples, sorted({*decoder, *file}), (DECODER, "file")).routes
    return judged


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([], None),
        ([7.0], Spread(1, 7.0, 7.0, 7.0, 7.0, 7.0)),
        ([4.0, 8.0], Spread(2, 6.0, 5.0, 7.0, 4.0, 8.0)),
        ([50.0, 10.0, 30.0, 20.0, 40.0], Spread(5, 30.0, 20.0, 40.0, 10.0, 50.0)),
    ],
)
def test_spread_of_values_has_median_and_quartiles(
    values: list[float], wanted: Spread | None
) -> None:
    """In any order, of any number."""
    assert spread(values) == wanted


@pytest.mark.parametrize(
    ("decoder", "route", "verdict"),
    [
        ([100, 101, 102], [50, 51, 52], Verdict.WINS),
        ([50, 51, 52], [100, 101, 102], Verdict.LOSES),
        # The difference of 10 is less than what lies between the quartiles of one of them.
        ([80, 100, 120], [90, 90, 90], Verdict.UNCLEAR),
        ([90, 90, 90], [80, 100, 120], Verdict.UNCLEAR),
        ([100, 100, 100], [100, 100, 100], Verdict.UNCLEAR),
        # One slow run among five moves nothing.
        ([100, 101, 102, 103, 900], [50, 51, 52, 53, 54], Verdict.WINS),
        # One run of each shows no spread.
        ([100], [50], Verdict.UNCLEAR),
    ],
)
def test_compare_difference_within_the_spread_is_unclear(
    decoder: list[float], route: list[float], verdict: Verdict
) -> None:
    """A difference counts when it is larger than the middle half of either."""
    found = spread(decoder), spread(route)
    assert found[0] is not None
    assert found[1] is not None
    assert compare(found[0], found[1]) is verdict


def test_judge_route_that_wins_later_breaks_even_between() -> None:
    """Interpolated on the medians: 60 ms lost at 100 and 20 saved at 200 meet at 175."""
    judged = measured({100: [40] * 3, 200: [120] * 3}, {100: [100] * 3, 200: [100] * 3})
    assert judged.even_tokens == (175,)
    assert [pair.verdict for pair in judged.pairs] == [Verdict.LOSES, Verdict.WINS]
    assert judged.pairs[1].saved_ms == 20
    assert judged.beyond_tokens is None


def test_judge_unclear_length_between_is_a_point_of_the_line() -> None:
    """It says where the lines cross, though nothing by itself."""
    decoder = {100: [50] * 3, 200: [95, 101, 107], 400: [200] * 3}
    judged = measured(decoder, {100: [100] * 3, 200: [100] * 3, 400: [100] * 3})
    assert [pair.verdict for pair in judged.pairs] == [
        Verdict.LOSES,
        Verdict.UNCLEAR,
        Verdict.WINS,
    ]
    assert judged.even_tokens == (198,)


def test_judge_unclear_length_at_the_end_gives_no_break_even() -> None:
    """Noise crosses the line without meaning it."""
    judged = measured({100: [50] * 3, 200: [90, 101, 112]}, {100: [100] * 3, 200: [100] * 3})
    assert judged.even_tokens == ()
    assert judged.beyond_tokens is None


def test_judge_route_that_wins_and_loses_again_breaks_even_twice() -> None:
    """Both crossings are told."""
    decoder = {100: [100] * 3, 200: [100] * 3, 300: [100] * 3}
    judged = measured(decoder, {100: [150] * 3, 200: [50] * 3, 300: [150] * 3})
    assert judged.even_tokens == (150, 250)


@pytest.mark.parametrize(
    ("file", "beyond"),
    [
        # 50 ms behind at 100, 25 behind at 200: level at 300.
        ({100: [100] * 3, 200: [125] * 3}, 300),
        # Further and further behind.
        ({100: [100] * 3, 200: [180] * 3}, None),
        ({100: [100] * 3, 200: [150] * 3}, None),
    ],
)
def test_judge_route_that_always_loses_looks_beyond(
    file: dict[int, Sequence[float]], beyond: int | None
) -> None:
    """Where both meet if they go on as they end; nowhere when they part."""
    judged = measured({100: [50] * 3, 200: [100] * 3}, file)
    assert judged.verdicts == {Verdict.LOSES}
    assert judged.beyond_tokens == beyond


def seeded(text: str) -> random.Random:
    """Return chance that can be had again."""
    return random.Random(text)  # noqa: S311 - words, no secrets


def by_way(found: Report, tokens: int, name: str) -> Any:
    """Return one row."""
    return next(way for way in found.ways if (way.tokens, way.name) == (tokens, name))


def test_report_parts_are_medians_of_what_counts() -> None:
    """The run to warm up is in none of them, and the parts add up."""
    samples = [one for way in WAYS for one in runs(128, way, [100, 110, 120])]
    samples += [sample(128, "file", 130, reply_tokens=16, decode_ms=400.0)]
    found = report(samples, [128, 512], WAYS)
    file, shared = by_way(found, 128, "file"), by_way(found, 128, "shared")
    assert (file.first_byte.count, file.first_byte.median, file.decode_per_s) == (4, 115, 40.0)
    assert (file.provider_ms, file.restore_ms) == (51.0, 5.0)
    assert shared.restore_ms == 3.0
    assert shared.rest_ms == 110 - 51 - 3
    decoder = by_way(found, 128, DECODER)
    assert (decoder.provider_ms, decoder.restore_ms, decoder.rest_ms) == (None, None, 110)
    assert by_way(found, 512, "file").first_byte is None
    assert [judged.route for judged in found.routes] == ["file", "shared"]


@pytest.mark.parametrize(
    ("way", "record", "why"),
    [
        ("file", {}, None),
        (DECODER, {}, None),
        (
            "file",
            {"outcome": "fallback", "reason": "provider_exit", "detail": "status 3"},
            "provider_exit: status 3",
        ),
        ("file", {"outcome": "skipped", "reason": "breaker_open"}, "breaker_open"),
        (
            "file",
            {"outcome": "wasted", "evaluated_tokens": 99},
            "wasted: the decoder evaluated 99 tokens again",
        ),
        # What a daemon does that does not know the header.
        ("shared", {"route": "file"}, "used: it went by the file route"),
        (
            DECODER,
            {"outcome": "used", "reason": None, "route": "file"},
            "used: it went by the file route",
        ),
        ("file", {"first_byte_ms": None, "outcome": "failed", "reason": "internal"}, "internal"),
    ],
)
def test_sample_that_went_another_way_is_no_figure(
    way: str, record: dict[str, Any], why: str | None
) -> None:
    """A fallback is never timed as if it were a handoff."""
    good = sample(128, way, 100)
    found = dataclasses.replace(good, record={**good.record, **record})
    assert found.failure == why


def test_report_failures_are_counted_by_reason_and_not_timed() -> None:
    """Whatever each of them says exactly; the first sentence stands for all."""
    bad: dict[str, Any] = {"outcome": "fallback", "reason": "provider_exit"}
    samples = [*runs(64, DECODER, [10, 10]), *runs(64, "file", [5])]
    samples += [sample(64, "file", 1, detail=f"pid {n}", **bad) for n in (7, 8)]
    samples += [sample(128, "file", 1, number=0, detail="pid 9", **bad)]
    found = report(samples, [64, 128], (DECODER, "file"))
    (failure,) = found.failures
    assert (failure.way, failure.why) == ("file", "provider_exit: pid 7")
    assert (failure.count, failure.lengths) == (3, (64, 128))
    assert by_way(found, 64, "file").first_byte.count == 1


def test_report_runs_beside_others_are_counted() -> None:
    """Those alone that count themselves."""
    samples = [
        sample(64, DECODER, 10, others=True),
        sample(64, DECODER, 10),
        sample(64, "file", 10, number=0, others=True),
    ]
    assert report(samples, [64], (DECODER, "file")).beside_others == 1


def test_is_hopeless_way_that_failed_from_the_start_is() -> None:
    """One success, or fewer runs, and there is hope."""
    bad = [sample(64, "file", 1, outcome="fallback")] * HOPELESS_RUNS
    assert is_hopeless("file", bad)
    assert not is_hopeless("file", bad[1:])
    assert not is_hopeless("file", [sample(64, "file", 1), *bad])
    assert not is_hopeless("shared", bad)


def test_schedule_every_way_comes_first_in_turn() -> None:
    """Each round has every length and way once, in the opposite order of the last."""
    found = list(schedule([64, 128], ["decoder", "file"], 2))
    assert len(found) == 2 * 2 * 3
    assert [(run.tokens, run.way) for run in found if run.round == 0] == [
        (64, "decoder"),
        (64, "file"),
        (128, "decoder"),
        (128, "file"),
    ]
    assert [run.way for run in found if run.tokens == 64] == [
        *("decoder", "file"),
        *("file", "decoder"),
        *("decoder", "file"),
    ]


def test_schedule_of_any_number_of_rounds_begins_at_once() -> None:
    """A repeat without an end in sight, to be ended by Ctrl-C, takes neither time nor memory."""
    found = schedule([64], ["decoder", "file"], (1 << 31) - 1)
    assert [run.round for run in itertools.islice(found, 5)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("tokens", [1, 2, 17, 300])
def test_exact_ids_have_the_length_and_never_repeat(tokens: int) -> None:
    """However few tokens a word is worth, and whatever was asked before."""
    chance = seeded("seed")
    prompts = [exact_ids(tokens, chance, one_id_for_two_words) for _ in range(20)]
    assert {len(prompt) for prompt in prompts} == {tokens}
    for one, other in itertools.pairwise(prompts):
        same = [a == b for a, b in zip(one, other, strict=True)]
        assert (same.index(False) if False in same else len(same)) <= 2


def one_id_for_two_words(text: str) -> list[int]:
    """Return ids as a tokenizer would that begins each prompt with the same token."""
    return [1, *(zlib.crc32(word.encode()) % 50_000 for word in text.split()[::2])]


def test_nonsense_words_are_different_each_time() -> None:
    """Two letters of one word alike are chance; a sentence is not."""
    chance = seeded("seed")
    assert nonsense(30, chance) != nonsense(30, chance)
    assert len(nonsense(30, chance).split()) == 30
    assert nonsense(30, seeded("a")) == nonsense(30, seeded("a"))
