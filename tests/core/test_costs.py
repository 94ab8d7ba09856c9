"""onebitd.core.costs: what is estimated after what was measured, on devices that are made up."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebitd.core.costs import Costs
from onebitd.core.handoff import Route

NOW = 1.8e9
DAY = 86400.0
Device = Callable[[float], float]


def proportional(tokens: float) -> float:
    """Half a millisecond a token."""
    return 0.5 * tokens


def linear(tokens: float) -> float:
    """A program that starts in 200 ms."""
    return 200.0 + tokens


def bending(tokens: float) -> float:
    """Attention over a long prompt."""
    return 100.0 + 0.5 * tokens + 0.0004 * tokens * tokens


def waiting(tokens: float) -> float:
    """Nearly all of it does not depend on the prompt."""
    return 5000.0 + 0.1 * tokens


def run(
    costs: Costs, tokens: int, ms: float, *, overlapped: bool = False, cold: bool = False, at: float
) -> None:
    """Note one whole run by file."""
    costs.note_provider(Route.FILE, tokens, ms, overlapped=overlapped, cold=cold, now=at)


def estimate(costs: Costs, tokens: int, *, overlapped: bool = False) -> float:
    """Return the estimate of a run by file."""
    found = costs.provider_ms(Route.FILE, tokens, overlapped=overlapped)
    assert found is not None
    return found


def lengths(seed: int, count: int, low: int = 64, high: int = 4096) -> list[int]:
    """Return lengths as they come, evenly over the octaves."""
    draw = random.Random(seed)  # noqa: S311
    return [int(2 ** draw.uniform(math.log2(low), math.log2(high))) for _ in range(count)]


def learned(
    device: Device, seen: Iterable[int], *, noise: float = 0.0, outliers: float = 0.0, seed: int = 1
) -> Costs:
    """Return costs that saw runs of these lengths, some with noise, some ten times too slow."""
    draw = random.Random(seed)  # noqa: S311
    costs = Costs()
    for index, tokens in enumerate(seen):
        ms = device(tokens) * draw.lognormvariate(0.0, noise)
        run(costs, tokens, ms * (10 if draw.random() < outliers else 1), at=NOW + index)
    return costs


def test_costs_of_nothing_know_nothing() -> None:
    """Before the first figure every estimate is None, and all of a slot is reused."""
    costs = Costs()
    for route in Route:
        assert costs.provider_ms(route, 100, overlapped=False) is None
        assert costs.provider_age_s(route, NOW) is None
        assert costs.provider_samples(route) == 0
    assert costs.restore_ms(1 << 20) is costs.adopt_ms() is costs.lock_ms() is None
    assert costs.decoder_ms(0, 100, overlapped=False) is None
    assert costs.front_ms(9) is costs.reply_ms(9) is costs.reply_tokens() is None
    assert costs.bytes_per_token() is costs.decoder_age_s(NOW) is None
    assert costs.decoder_samples() == 0
    assert costs.reuse_share() == 1.0


@pytest.mark.parametrize("device", [proportional, linear, bending, waiting])
@pytest.mark.parametrize(
    ("noise", "outliers", "within"), [(0.0, 0.0, 0.06), (0.1, 0.0, 0.25), (0.1, 0.1, 0.3)]
)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_provider_after_twenty_runs_is_known_at_their_lengths(
    device: Device, noise: float, outliers: float, within: float, seed: int
) -> None:
    """Noise and runs that were ten times too slow leave the estimates of seen lengths right."""
    costs = learned(device, lengths(seed, 20), noise=noise, outliers=outliers, seed=seed)
    for tokens in (100, 250, 600, 1500, 3500):
        assert estimate(costs, tokens) == pytest.approx(device(tokens), rel=within), tokens


@pytest.mark.parametrize("device", [proportional, linear, bending, waiting])
def test_provider_far_beyond_what_was_seen_follows_the_curve(device: Device) -> None:
    """Lengths four times longer, and shorter, than any seen come from the shape of the others."""
    costs = learned(device, [256, 4096, 300, 3000, 500, 2000, 700, 1000])
    for tokens in (60, 16000):
        assert estimate(costs, tokens) == pytest.approx(device(tokens), rel=0.12)


@pytest.mark.parametrize(
    ("runs", "asked", "expected"),
    [
        ([(500, 1000.0)], 1000, 2000.0),
        ([(500, 1000.0), (510, 1020.0)], 2000, 4000.0),
        ([(500, 700.0), (1000, 1200.0)], 4000, 4200.0),
        ([(500, 700.0), (1000, 1200.0)], 100, 300.0),
        ([(500, 500.0), (1000, 1100.0)], 4000, 4200.0),
        ([(500, 700.0), (1000, 650.0)], 4000, 2600.0),
    ],
    ids=["one", "one length", "fixed cost", "fixed cost, shorter", "no fixed cost", "no rate"],
)
def test_provider_after_one_or_two_runs_scales_them(
    runs: list[tuple[int, float]], asked: int, expected: float
) -> None:
    """One length gives a rate, two a fixed cost and a rate, if neither would be negative."""
    costs = Costs()
    for tokens, ms in runs:
        run(costs, tokens, ms, at=NOW)
    assert estimate(costs, asked) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("factor", [0.25, 4.0])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_provider_that_changed_speed_is_believed_after_two_runs(factor: float, seed: int) -> None:
    """Two runs that agree win against sixty old ones, at their length; far off nothing changes."""
    costs = learned(linear, lengths(seed, 60), noise=0.05, seed=seed)
    for second in (1, 2):
        run(costs, 1000, factor * linear(1000), at=NOW + 100 + second)
    assert estimate(costs, 1000) == pytest.approx(factor * linear(1000), rel=0.4)
    assert estimate(costs, 64) == pytest.approx(linear(64), rel=0.15)


@pytest.mark.parametrize("before", [2, 3, 20])
@pytest.mark.parametrize("at_length", [500, 2000])
def test_provider_one_slow_run_among_others_moves_nothing(before: int, at_length: int) -> None:
    """A run ten times too slow is an outlier until a second one agrees."""
    seen = [500, 2000, 1000, *lengths(1, before - 2, 400, 2500)]
    costs = learned(linear, [*seen, at_length] if before < 4 else seen)
    run(costs, at_length, 10 * linear(at_length), at=NOW + 100)
    for tokens in (500, 1000, 2000):
        assert estimate(costs, tokens) == pytest.approx(linear(tokens), rel=0.2)


def test_provider_many_runs_of_one_length_leave_the_others_known() -> None:
    """A thousand short prompts do not push out what is known of long ones."""
    costs = learned(bending, [4000, 4100, 2000, *([100] * 1000)])
    for tokens in (100, 2000, 4000):
        assert estimate(costs, tokens) == pytest.approx(bending(tokens), rel=0.1)
    assert len(costs.to_json()["provider"]["file"]) == 3 + 6


def test_provider_first_run_of_a_length_that_hung_is_no_evidence_yet() -> None:
    """Where the others lie on one curve, a first slow run far from them is held for an outlier."""
    costs = learned(linear, [100, 150, 200, 300, 250, 120, 180])
    run(costs, 6000, 10 * linear(6000), at=NOW + 10)
    assert estimate(costs, 6000) == pytest.approx(linear(6000), rel=0.2)
    run(costs, 6000, 10 * linear(6000), at=NOW + 11)
    assert estimate(costs, 6000) == pytest.approx(10 * linear(6000), rel=0.2)


def test_provider_cold_run_counts_only_until_there_is_another() -> None:
    """A cold first run is what is known at first; then it is not counted, nor its time used."""
    costs = Costs()
    run(costs, 500, 9000.0, cold=True, at=NOW)
    assert costs.provider_samples(Route.FILE) == 1
    assert estimate(costs, 500) == pytest.approx(9000.0)
    assert costs.provider_age_s(Route.FILE, NOW + 30) == 30.0
    run(costs, 500, 600.0, at=NOW + 10)
    assert costs.provider_samples(Route.FILE) == 1
    assert estimate(costs, 500) == pytest.approx(600.0)
    run(costs, 500, 9000.0, cold=True, at=NOW + 20)
    assert costs.provider_samples(Route.FILE) == 1
    assert estimate(costs, 500) == pytest.approx(600.0)
    assert costs.provider_age_s(Route.FILE, NOW + 30) == 20.0


def test_provider_routes_are_learned_apart() -> None:
    """A run on the shared route writes no file; its time says nothing about the other route."""
    costs = learned(linear, [500, 1000])
    costs.note_provider(Route.SHARED, 500, 50.0, overlapped=False, cold=False, now=NOW)
    shared = costs.provider_ms(Route.SHARED, 500, overlapped=False)
    assert shared == pytest.approx(50.0)
    assert estimate(costs, 500) == pytest.approx(linear(500), rel=0.01)


def test_provider_overlapped_is_slower_by_a_guess_and_then_by_what_was_seen() -> None:
    """1.15 until it is known; three runs at other lengths teach the ratio for all lengths."""
    costs = learned(linear, [300, 600, 1200, 2400])
    assert estimate(costs, 600, overlapped=True) == pytest.approx(1.15 * linear(600), rel=0.02)
    for index, tokens in enumerate((700, 900, 1100)):
        run(costs, tokens, 1.5 * linear(tokens), overlapped=True, at=NOW + 10 + index)
    for tokens in (300, 1000, 2400):
        assert estimate(costs, tokens, overlapped=True) == pytest.approx(
            1.5 * linear(tokens), rel=0.06
        )
        assert estimate(costs, tokens) == pytest.approx(linear(tokens), rel=0.06)


def test_provider_seen_only_overlapped_is_taken_to_be_faster_alone() -> None:
    """With nothing else known both estimates come from overlapped runs."""
    costs = Costs()
    for tokens in (500, 1000, 2000):
        run(costs, tokens, linear(tokens), overlapped=True, at=NOW)
    assert estimate(costs, 1000, overlapped=True) == pytest.approx(linear(1000), rel=0.02)
    assert estimate(costs, 1000) == pytest.approx(linear(1000) / 1.15, rel=0.02)


def test_provider_one_overlapped_run_that_hung_does_not_set_the_ratio() -> None:
    """The guess stands against a single outlier."""
    costs = learned(linear, [300, 600, 1200, 2400])
    run(costs, 600, 10 * linear(600), overlapped=True, at=NOW + 10)
    assert estimate(costs, 600, overlapped=True) == pytest.approx(1.15 * linear(600), rel=0.1)


def test_provider_stopped_runs_raise_the_estimate_until_one_ends() -> None:
    """Two runs that were stopped late are believed; one that then ends well corrects it."""
    costs = learned(linear, [300, 600, 1000, 1000, 2000, 4000])
    for second in (10, 20):
        costs.note_provider_at_least(Route.FILE, 1000, 3600.0, overlapped=False, now=NOW + second)
    assert estimate(costs, 1000) > 3000.0
    assert estimate(costs, 300) == pytest.approx(linear(300), rel=0.2)
    assert costs.provider_samples(Route.FILE) == 6
    run(costs, 1000, 1.1 * linear(1000), at=NOW + 30)
    assert estimate(costs, 1000) == pytest.approx(linear(1000), rel=0.15)


@pytest.mark.parametrize("ms", [0.0, 10.0, 1100.0])
def test_provider_runs_stopped_early_say_nothing(ms: float) -> None:
    """That a run takes longer than less than is known changes no estimate."""
    costs = learned(linear, [300, 600, 1000, 1000, 2000, 4000])
    before = [estimate(costs, tokens) for tokens in (100, 1000, 5000)]
    for second in range(5):
        at = NOW + second
        costs.note_provider_at_least(Route.FILE, 1000, ms / 1.25, overlapped=False, now=at)
    assert [estimate(costs, tokens) for tokens in (100, 1000, 5000)] == pytest.approx(before)


def test_provider_known_from_stopped_runs_alone_takes_at_least_that() -> None:
    """An estimate, so that a run that never ends is not tried for ever; but no sample."""
    costs = Costs()
    costs.note_provider_at_least(Route.FILE, 1000, 5000.0, overlapped=False, now=NOW)
    assert estimate(costs, 1000) >= 4999.9
    assert costs.provider_samples(Route.FILE) == 0
    assert costs.provider_age_s(Route.FILE, NOW) is None


def test_provider_old_runs_yield_to_one_that_is_new() -> None:
    """After a month a single new figure wins, whichever way it went."""
    costs = Costs()
    for day in range(6):
        run(costs, 1000, 4000.0, at=NOW - (40 - day) * DAY)
    assert estimate(costs, 1000) == pytest.approx(4000.0)
    run(costs, 1000, 900.0, at=NOW)
    assert estimate(costs, 1000) == pytest.approx(900.0, rel=0.05)


@pytest.mark.parametrize("jump", [-50 * 365 * DAY, -DAY, 5 * 365 * DAY])
def test_costs_clock_that_jumped_for_a_while_does_no_harm(jump: float) -> None:
    """Figures with a wrong time are figures: newer ones win as ever, ages are never negative."""
    costs = Costs()
    times = [NOW, NOW + 1, NOW + jump, NOW + jump + 1, NOW + 2, NOW + 3]
    for at, ms in zip(times, (500.0, 500.0, 1000.0, 1000.0, 2000.0, 2000.0), strict=True):
        run(costs, 800, ms, at=at)
        costs.note_decoder(0, 800, ms, overlapped=False, now=at)
    assert estimate(costs, 800) == pytest.approx(2000.0, rel=0.05)
    assert costs.provider_age_s(Route.FILE, NOW + 13) == 10.0
    assert costs.provider_age_s(Route.FILE, NOW - DAY) == 0.0
    assert costs.decoder_age_s(NOW + 13) == 10.0
    run(costs, 800, 9000.0, at=NOW + 4)
    assert estimate(costs, 800) == pytest.approx(2000.0, rel=0.05)


def decoder(cached: int, evaluated: int) -> float:
    """Many tokens cost arithmetic, one the memory's bandwidth."""
    if evaluated == 1:
        return 15.0 + 0.002 * cached
    return 20.0 + evaluated + 0.0002 * evaluated * (cached + evaluated / 2)


def test_decoder_single_tokens_and_whole_prompts_are_both_right() -> None:
    """Each used handoff shows one evaluated token; a mix of both spoils neither."""
    draw = random.Random(1)  # noqa: S311
    costs = Costs()
    for second in range(80):
        depth = draw.choice([0, 500, 1000, 2000, 4000])
        seen = [(depth, 1)]
        if second % 4 == 0:
            seen.append((draw.choice([0, 0, 1000, 3000]), draw.choice([30, 100, 600, 2000])))
        for cached, evaluated in seen:
            ms = decoder(cached, evaluated) * draw.lognormvariate(0, 0.05)
            costs.note_decoder(cached, evaluated, ms, overlapped=False, now=NOW + second)
    asked = [(3000, 1), (0, 1000), (3000, 1000), (3000, 50), (0, 4000), (0, 100)]
    for cached, evaluated in asked:
        found = costs.decoder_ms(cached, evaluated, overlapped=False)
        assert found == pytest.approx(decoder(cached, evaluated), rel=0.25), (cached, evaluated)
    assert costs.decoder_samples() == 20


def test_decoder_that_showed_only_single_tokens_is_unknown_for_prompts() -> None:
    """A rate of one token at a time would make every prompt look dear."""
    costs = Costs()
    costs.note_decoder(3000, 1, 20.0, overlapped=False, now=NOW)
    assert costs.decoder_ms(0, 1000, overlapped=False) is None
    assert costs.decoder_ms(3000, 1, overlapped=False) == pytest.approx(20.0)
    assert costs.decoder_ms(0, 1, overlapped=False) == pytest.approx(20.0)
    assert (costs.decoder_samples(), costs.decoder_age_s(NOW)) == (0, None)
    costs.note_decoder(0, 15, 60.0, overlapped=False, now=NOW)
    assert costs.decoder_samples() == 0
    costs.note_decoder(0, 16, 64.0, overlapped=False, now=NOW)
    assert costs.decoder_samples() == 1


def test_decoder_first_single_token_costs_as_much_as_one_that_is_generated() -> None:
    """Before the first handoff the reply's rate says what its one token will cost."""
    costs = Costs()
    costs.note_decoder(0, 1000, 500.0, overlapped=False, now=NOW)
    costs.note_reply(100, 2500.0, NOW)
    found = costs.decoder_ms(999, 1, overlapped=False)
    assert found == pytest.approx(25.0, rel=0.05)
    assert costs.decoder_ms(0, 1000, overlapped=False) == pytest.approx(500.0, rel=0.05)


def test_decoder_beside_a_provider_is_as_fast_until_it_was_seen_slower() -> None:
    """On a box where they share something, that is learned."""
    costs = Costs()
    for tokens in (200, 400, 800):
        costs.note_decoder(0, tokens, 1.0 * tokens, overlapped=False, now=NOW)
    assert costs.decoder_ms(0, 400, overlapped=True) == pytest.approx(400.0, rel=0.02)
    for tokens in (200, 400, 800):
        costs.note_decoder(0, tokens, 1.4 * tokens, overlapped=True, now=NOW)
    assert costs.decoder_ms(0, 400, overlapped=True) == pytest.approx(560.0, rel=0.05)
    assert costs.decoder_ms(0, 400, overlapped=False) == pytest.approx(400.0, rel=0.05)


def test_costs_other_parts_are_learned_by_their_own_measure() -> None:
    """Restore by bytes, front and reply by tokens, adopt and lock by nothing."""
    costs = Costs()
    for mib in (1, 8, 20, 40):
        costs.note_restore(mib << 20, 2.0 + 0.5 * mib, NOW)
    for tokens in (100, 1000, 3000):
        costs.note_front(tokens, 1.0 + 0.002 * tokens, NOW)
        costs.note_reply(tokens, 20.0 * tokens, NOW)
        costs.note_state(tokens, 20_000 * tokens + 500)
    for ms in (3.0, 3.2, 90.0, 2.9):
        costs.note_adopt(ms)
    assert costs.restore_ms(100 << 20) == pytest.approx(52.0, rel=0.03)
    assert costs.front_ms(2000) == pytest.approx(5.0, rel=0.1)
    assert costs.reply_ms(500) == pytest.approx(10_000.0, rel=0.05)
    assert costs.reply_tokens() == 1000
    assert costs.bytes_per_token() == pytest.approx(20_000, rel=0.001)
    adopt = costs.adopt_ms()
    assert adopt is not None
    assert adopt < 3.5


def test_lock_wait_that_comes_and_goes_is_expected_in_part() -> None:
    """A lock that others have half of the time costs half of their time; a single hang nothing."""
    costs = Costs()
    for index in range(12):
        costs.note_lock(400.0 * (index % 2))
    assert costs.lock_ms() == pytest.approx(200.0, rel=0.2)
    quiet = Costs()
    for ms in (0.1, 0.1, 0.1, 30_000.0, 0.1, 0.1):
        quiet.note_lock(ms)
    assert quiet.lock_ms() == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("seen", "low", "high"),
    [
        ([(1000, 1000)] * 3, 1.0, 1.0),
        ([(1000, 1200)], 1.0, 1.0),
        ([(1000, 0)] * 3, 0.0, 0.0),
        ([(1000, 1000)] * 5 + [(1000, 0)], 1.0, 1.0),
        ([(1000, 1000), (1000, 0)] * 6, 0.35, 0.65),
        ([(0, 0), (-5, 3), (5, -1)], 1.0, 1.0),
    ],
    ids=["all", "more", "none", "once not", "now and then", "no figures"],
)
def test_reuse_share_is_what_the_decoder_really_took(
    seen: list[tuple[int, int]], low: float, high: float
) -> None:
    """A share from 0 to 1 that one exception does not move."""
    costs = Costs()
    for expected, actual in seen:
        costs.note_reuse(expected, actual)
    assert low <= costs.reuse_share() <= high


def test_costs_forget_provider_keeps_everything_else() -> None:
    """Another provider is another device; the decoder is the same one."""
    costs = learned(linear, [100, 1000])
    costs.note_decoder(0, 500, 100.0, overlapped=False, now=NOW)
    costs.forget_provider()
    assert costs.provider_samples(Route.FILE) == 0
    assert costs.provider_ms(Route.FILE, 10, overlapped=False) is None
    assert costs.decoder_samples() == 1


ANY_TOKENS = st.integers(-(2**70), 2**70) | st.integers(0, 40_000)
ANY_MS = st.floats() | st.floats(0, 1e5)
ANY_NOTE = st.tuples(
    st.sampled_from(["provider", "stopped", "decoder", "restore", "front", "reply", "other"]),
    ANY_TOKENS,
    ANY_TOKENS,
    ANY_MS,
    st.booleans(),
    st.booleans(),
    st.floats() | st.floats(1e9, 2e9),
)


def note_anything(costs: Costs, note: tuple[Any, ...]) -> None:
    """Learn a figure, sensible or not."""
    kind, tokens, more, ms, overlapped, cold, now = note
    if kind == "provider":
        costs.note_provider(Route.FILE, tokens, ms, overlapped=overlapped, cold=cold, now=now)
    elif kind == "stopped":
        costs.note_provider_at_least(Route.FILE, tokens, ms, overlapped=overlapped, now=now)
    elif kind == "decoder":
        costs.note_decoder(more, tokens, ms, overlapped=overlapped, now=now)
        costs.note_decoder(more, 1, ms, overlapped=overlapped, now=now)
    elif kind == "restore":
        costs.note_restore(tokens, ms, now)
    elif kind == "front":
        costs.note_front(tokens, ms, now)
    elif kind == "reply":
        costs.note_reply(tokens, ms, now)
    else:
        costs.note_state(tokens, more)
        costs.note_reuse(tokens, more)
        costs.note_adopt(ms)
        costs.note_lock(ms)


def all_estimates(costs: Costs, tokens: int, depth: int) -> list[float | None]:
    """Return every estimate there is, those that grow with the length first."""
    found: list[float | None] = []
    for overlapped in (False, True):
        found += [
            costs.provider_ms(Route.FILE, tokens, overlapped=overlapped),
            costs.decoder_ms(depth, tokens, overlapped=overlapped),
            costs.decoder_ms(tokens, depth, overlapped=overlapped),
        ]
    found += [costs.restore_ms(tokens), costs.front_ms(tokens)]
    found += [costs.reply_ms(tokens), costs.adopt_ms(), costs.lock_ms()]
    return [*found, costs.reply_tokens(), costs.reuse_share(), costs.bytes_per_token()]


@settings(max_examples=150, deadline=None)
@given(st.lists(ANY_NOTE, max_size=30))
def test_costs_of_anything_are_finite_never_fall_and_survive_the_file(
    notes: list[tuple[Any, ...]],
) -> None:
    """Whatever was noted: no NaN, nothing negative, longer is never cheaper, and JSON keeps all."""
    costs = Costs()
    for note in notes:
        note_anything(costs, note)
    sizes = [0, 1, 2, 3, 17, 300, 1000, 1001, 9000, 2**20, 2**31, 2**60]
    rows = [all_estimates(costs, size, 100) for size in sizes]
    for row in rows:
        assert all(v is None or (math.isfinite(v) and 0 <= v <= 1e9) for v in row)
    for column in zip(*rows, strict=True):
        known = [value for value in column if value is not None]
        assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(known))
    document = costs.to_json()
    again = Costs.from_json(json.loads(json.dumps(document, allow_nan=False)))
    assert again.to_json() == document
    assert [all_estimates(again, size, 100) for size in sizes] == rows


def test_costs_of_many_figures_stay_small() -> None:
    """Ten thousand requests of all lengths leave some tens of KiB at most."""
    draw = random.Random(1)  # noqa: S311
    costs = Costs()
    kinds = ["provider", "stopped", "decoder", "restore", "front", "reply", "other"]
    for index in range(7000):
        tokens, more = (int(2 ** draw.uniform(0, 31)) for _ in range(2))
        note = (kinds[index % 7], tokens, more, 1e6 * draw.random(), index % 2, index % 3, NOW)
        note_anything(costs, note)
    assert len(json.dumps(costs.to_json())) < 40_000


def damaged(path: list[str | int], value: object) -> object:
    """Return a good document with one thing in it replaced."""
    costs = learned(linear, [100, 1000])
    for name in ("decoder", "restore", "front", "reply", "other"):
        note_anything(costs, (name, 100, 200, 5.0, False, False, NOW))
    document: Any = costs.to_json()
    place = document
    for key in path[:-1]:
        place = place[key]
    if value is KeyError:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return document


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["version"], 2),
        (["version"], None),
        (["provider"], []),
        (["provider", "file"], KeyError),
        (["provider", "shared"], {}),
        (["provider", "file"], [[1, 0, 1.0, 1, 0]] * 65),
        (["decoder"], KeyError),
        (["decoder", 0], "x"),
        (["decoder", 0], [1, 2, 3]),
        (["decoder", 0, 0], 0),
        (["decoder", 0, 0], 1.5),
        (["decoder", 0, 0], True),
        (["decoder", 0, 0], 2**51),
        (["decoder", 0, 0], 10**400),
        (["decoder", 0, 1], -1),
        (["decoder", 0, 2], math.nan),
        (["decoder", 0, 2], math.inf),
        (["decoder", 0, 2], -1.0),
        (["decoder", 0, 2], 0.0),
        (["decoder", 0, 2], 1e10),
        (["decoder", 0, 2], "5"),
        (["decoder", 0, 2], None),
        (["decoder", 0, 3], -1),
        (["decoder", 0, 3], 10**15),
        (["decoder", 0, 4], 8),
        (["lock", 0], [1.0]),
        (["lock", 0, 0], -1.0),
        (["lock", 0, 1], 0.0),
        (["lock"], [[1.0, 1.0]] * 13),
    ],
)
def test_costs_from_a_damaged_document_raise_value_error(
    path: list[str | int], value: object
) -> None:
    """A sentence that names the part, and nothing is learned from the rest."""
    document = damaged(path, value)
    with pytest.raises(ValueError, match=str(path[0])):
        Costs.from_json(document)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)
PARTS = sorted(Costs().to_json())


@settings(max_examples=150, deadline=None)
@given(JSON, st.sampled_from([*PARTS, ""]), JSON)
def test_costs_from_any_json_are_costs_or_a_value_error(
    document: object, part: str, value: object
) -> None:
    """No other error, and what is accepted can be used."""
    for found in (document, {**Costs().to_json(), part: value}):
        with contextlib.suppress(ValueError):
            all_estimates(Costs.from_json(found), 100, 100)
