"""The page of `onebitctl bench`: its table, and its sentences word by word."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from onebitd.core.bench_plan import DECODER
from onebitd.core.bench_report import Sample, report
from onebitd.surfaces import bench_pages as pages
from onebitd.surfaces import bench_plot
from onebitd.surfaces.bench_pages import Bench
from tests.core.test_bench_report import runs, sample

BENCH = Bench(
    "qwen3-4b", "/usr/lib/onebit/npu-prefill", 8192, (128, 512), (DECODER, "file"), 3, 16, "s"
)
Times = dict[int, Sequence[float]]


def samples_of(decoder: Times, file: Times) -> list[Sample]:
    """Return the runs of both ways by length."""
    samples = [one for tokens, times in decoder.items() for one in runs(tokens, DECODER, times)]
    return samples + [one for tokens, times in file.items() for one in runs(tokens, "file", times)]


def page_of(samples: Sequence[Sample], bench: Bench = BENCH, *, colour: bool = False) -> str:
    """Return the page."""
    return pages.bench_page(bench, report(samples, bench.lengths, bench.ways), colour=colour)


def sentence(page: str, label: str) -> str:
    """Return the words behind a label, in one line."""
    found = re.search(rf"^{label} +(.*(?:\n {{9}}\S.*)*)", page, re.MULTILINE)
    assert found, page
    return re.sub(r"\s+", " ", found.group(1))


def test_page_is_whole_and_fits_80_columns() -> None:
    """Title, provider, table and sentences; the same on every terminal of 80 columns or more."""
    samples = samples_of({128: [60, 61, 62], 512: [250, 251, 252]}, {128: [97, 98, 99]})
    samples += runs(512, "file", [100, 101, 102])
    samples += [
        sample(512, "file", 1, outcome="fallback", reason="lock_busy", detail="held by pid 7")
    ]
    samples[-2:] = [
        dataclasses.replace(one, record={**one.record, "reply_tokens": 16, "decode_ms": 400.0})
        for one in samples[-2:]
    ]
    assert (
        page_of(samples)
        == """\
qwen3-4b, context of 8192 tokens, 3 runs of each way
provider /usr/lib/onebit/npu-prefill

Time to the first byte in ms and its parts, * the soonest:
TOKENS  WAY        MEDIAN  MIDDLE HALF  PROVIDER  RESTORE    REST  RATIO  TOK/S
   128  decoder     *61.0    60.5-61.5         -        -    61.0             -
        file         98.0    97.5-98.5      51.0     5.00    42.0   0.62      -
   512  decoder       251      250-252         -        -     251             -
        file         *101      100-102      51.0     5.00    45.0   2.49   40.0

file     breaks even near 204 tokens: it loses below and wins above; at 512
         tokens it saves 150.0 ms of the decoder's 251.0 ms (60%)
failed   file, 1 run at 512 tokens: lock_busy: held by pid 7"""
    )


@pytest.mark.parametrize(
    ("decoder", "file", "wanted"),
    [
        (
            {128: [100] * 3, 512: [400] * 3},
            {128: [50] * 3, 512: [90] * 3},
            "wins at every length measured, 128 to 512 tokens; at 512 tokens it saves 310.0 ms of"
            " the decoder's 400.0 ms (78%)",
        ),
        (
            {128: [50] * 3, 512: [90] * 3},
            {128: [100] * 3, 512: [1400] * 3},
            "loses at every length measured, 128 to 512 tokens; at 512 tokens it costs 1.31 s more"
            " than the decoder's 90.0 ms",
        ),
        (
            {128: [50] * 3, 512: [90] * 3},
            {128: [100] * 3, 512: [100] * 3},
            "loses at every length measured, 128 to 512 tokens (if both go on as they end, it"
            " breaks even near 608); at 512 tokens it costs 10.0 ms more than the decoder's"
            " 90.0 ms",
        ),
        # Level at a length that the context does not take is of no use to anybody.
        (
            {128: [50] * 3, 512: [51] * 3},
            {128: [100] * 3, 512: [100] * 3},
            "loses at every length measured, 128 to 512 tokens; at 512 tokens it costs 49.0 ms more"
            " than the decoder's 51.0 ms",
        ),
        (
            {128: [80, 100, 120], 512: [80, 100, 120]},
            {128: [99] * 3, 512: [90] * 3},
            "no difference that 3 runs of each way can show, at 128 and 512 tokens",
        ),
        (
            {128: [80, 100, 120], 512: [400] * 3},
            {128: [99] * 3, 512: [90] * 3},
            "wins at 512 tokens; no difference that 3 runs can show at 128 tokens; at 512 tokens it"
            " saves 310.0 ms of the decoder's 400.0 ms (78%)",
        ),
        (
            {128: [50] * 3, 512: [80, 100, 120]},
            {128: [99] * 3, 512: [90] * 3},
            "loses at 128 tokens; no difference that 3 runs can show at 512 tokens",
        ),
        (
            {128: [100] * 3, 512: [100] * 3},
            {128: [50] * 3, 512: [150] * 3},
            "breaks even near 320 tokens: it wins below and loses above; at 512 tokens it costs"
            " 50.0 ms more than the decoder's 100.0 ms",
        ),
        ({128: [100] * 3}, {128: [50] * 3}, "wins at 128 tokens; at 128 tokens it saves 50.0 ms of"
         " the decoder's 100.0 ms (50%)"),
        ({128: [100] * 3}, {}, "there is no figure of it"),
    ],
)  # fmt: skip
def test_page_route_sentence_says_where_it_pays(decoder: Times, file: Times, wanted: str) -> None:
    """Where it loses and breaks even, what the longest prompt gains, and what is not known."""
    assert sentence(page_of(samples_of(decoder, file)), "file") == wanted


def test_page_route_that_crosses_twice_names_both() -> None:
    """And which side the first is."""
    bench = dataclasses.replace(BENCH, lengths=(100, 200, 300))
    decoder: Times = {100: [100] * 3, 200: [100] * 3, 300: [100] * 3}
    file: Times = {100: [150] * 3, 200: [50] * 3, 300: [150] * 3}
    found = sentence(page_of(samples_of(decoder, file), bench), "file")
    assert found.startswith("breaks even near 150 and 250 tokens, and loses below the first;")


def test_page_one_run_of_each_shows_no_difference() -> None:
    """However far apart they are."""
    bench = dataclasses.replace(BENCH, repeat=1, lengths=(128,))
    found = page_of(samples_of({128: [500]}, {128: [5]}), bench)
    assert sentence(found, "file") == "no difference that 1 run of each way can show, at 128 tokens"


def test_page_decode_speed_is_that_of_the_longest_prompt() -> None:
    """With and without a handoff."""
    more: dict[str, Any] = {"reply_tokens": 16}
    samples = [
        sample(128, DECODER, 50, decode_ms=100.0, **more),
        sample(128, "file", 60, decode_ms=100.0, **more),
        sample(512, DECODER, 90, decode_ms=400.0, **more),
        sample(512, "file", 80, decode_ms=320.0, **more),
    ]
    assert sentence(page_of(samples), "decode") == (
        "40.0 tokens/s behind the decoder's own prefill, 50.0 behind a handoff (file)"
    )


def test_page_says_what_spoils_the_figures() -> None:
    """That it was interrupted, and that others were served."""
    samples = [sample(128, DECODER, 50, others=True), sample(128, "file", 60, others=True)]
    found = page_of(samples, dataclasses.replace(BENCH, interrupted=True))
    assert sentence(found, "but") == "it was interrupted; these are the runs until then"
    assert sentence(found, "others") == (
        "2 runs beside other requests, again and again; they count like the others"
    )


def test_page_largest_figures_keep_their_columns() -> None:
    """Minutes for a first byte, and a detail that would move the cursor."""
    bench = dataclasses.replace(BENCH, model="m\x1b[2J", lengths=(131071,))
    samples = samples_of({131071: [99990, 99995, 99999]}, {131071: [88880, 88885, 88889]})
    samples += [
        sample(131071, "file", 1, outcome="failed", reason="internal", detail="a\x1b[2Jb\nc")
    ]
    found = page_of(samples, bench)
    assert max(map(len, found.splitlines())) <= 80
    assert "\x1b" not in found
    assert "131071  decoder     99995  99992-99997" in found


def test_page_in_colour_marks_the_soonest() -> None:
    """Only colours are added."""
    samples = samples_of({128: [60, 61, 62]}, {128: [97, 98, 99]})
    found = page_of(samples, colour=True)
    assert re.sub(r"\x1b\[\d+m", "", found) == page_of(samples)
    assert re.search(r"\x1b\[32m +128  decoder +\*61\.0.*\x1b\[0m$", found, re.MULTILINE)


def test_object_has_every_run_and_is_json() -> None:
    """What the page rests on."""
    samples = samples_of({128: [60, 61, 62]}, {128: [97, 98, 99]})
    found = json.loads(
        json.dumps(pages.bench_object(BENCH, report(samples, (128,), BENCH.ways), samples))
    )
    assert (found["model"], found["seed"], found["interrupted"]) == ("qwen3-4b", "s", False)
    assert [one["counts"] for one in found["samples"]] == [False, True, True, True] * 2
    assert found["samples"][1]["record"]["outcome"] == "skipped"
    file = found["medians"][1]
    assert (file["way"], file["first_byte_ms"]["median"], file["provider_ms"]) == ("file", 98, 51)
    assert file["ratio"] == 61 / 98
    assert found["routes"]["file"]["lengths"] == [
        {"tokens": 128, "decoder_ms": 61, "route_ms": 98, "verdict": "loses", "saved_ms": -37}
    ]


@pytest.mark.parametrize("file", [{128: [97, 98, 99], 512: [100] * 3}, {}])
def test_plot_is_a_png_also_of_nothing(file: Times) -> None:
    """A route without figures has no line."""
    pytest.importorskip("matplotlib")
    samples = samples_of({128: [60, 61, 62], 512: [200] * 3}, file)
    found = report(samples, BENCH.lengths, BENCH.ways)
    assert bench_plot.draw(found, "title").startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("file", "label"),
    [
        ({128: [97] * 3, 512: [100] * 3}, "file route, breaks even near 230 tokens"),
        ({128: [10] * 3, 512: [100] * 3}, "file route, wins at every length measured"),
        ({128: [97] * 3, 512: [900] * 3}, "file route, loses at every length measured"),
        ({128: [50, 60, 70], 512: [900] * 3}, "file route"),
    ],
)
def test_plot_legend_says_where_a_route_pays(file: Times, label: str) -> None:
    """The verdict is in the picture."""
    samples = samples_of({128: [60, 61, 62], 512: [200] * 3}, file)
    assert bench_plot._label("file", report(samples, BENCH.lengths, BENCH.ways)) == label
