"""The benchmark's arithmetic; its runs are `make bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from onebitd.core.share_layout import ShareLayout, ShareTensor
from tests.bench import __main__ as bench
from tests.bench import records, routes
from tests.bench.measure import Streamed
from tests.llama_builds import ROOT

TWO_LAYERS = ShareLayout(
    n_cells=4096,
    regions=(1 << 24,),
    tensors=tuple(
        ShareTensor(f"cache_{kind}_l{layer}", layer, kind, "f16", size, 0, 0)
        for layer in range(2)
        for kind, size in (("k", 384), ("v", 128))
    ),
)
SEEN = Streamed(first_byte_ms=1000.0, total_ms=1100.0, chunks=2, timings={"prompt_ms": 30.0})
BY_FILE = {"outcome": "used", "route": "file", "prompt_tokens": 301, "handed_tokens": 300}
BY_FILE |= {"state_bytes": 400_000, "provider_wall_ms": 900.0, "check_ms": 2.0, "restore_ms": 6.0}
SHARED = {"outcome": "used", "route": "shared", "prompt_tokens": 301, "handed_tokens": 300}
SHARED |= {"provider_wall_ms": 950.0, "share_ms": 1.0, "adopt_ms": 3.0}


def test_history_record_is_as_small_as_the_pages_say(tmp_path: Path) -> None:
    """With every field of a handoff by file; so an administrator knows what max_records takes."""
    some = records.records(500)
    trio.run(records.kept_us, tmp_path, some)
    assert records.bytes_per_record(tmp_path, len(some)) < 1024
    for name in ("etc/onebitd.toml", "man/onebitd.toml.5"):
        assert "below 1 KiB each" in (ROOT / name).read_text()


def test_file_bytes_count_the_write_and_both_reads() -> None:
    """The provider writes the file, the check and the restore each read all of it."""
    assert routes.file_bytes(400_000) == 1_200_000


@pytest.mark.parametrize(
    ("n_tokens", "marked"), [(1, 1), (2, 2), (8, 8), (300, 8)], ids=["one", "two", "eight", "many"]
)
def test_shared_bytes_count_the_rows_and_the_marks(n_tokens: int, marked: int) -> None:
    """Each row once, each mark as it is written and as it is read; never the whole memory."""
    position = 2 * (384 + 128)
    assert routes.shared_bytes(TWO_LAYERS, n_tokens) == position * (n_tokens + 2 * marked)


def test_figures_of_each_route_read_its_own_fields() -> None:
    """Tax is what is left of the first byte without the provider's and the decoder's own work."""
    by_file = routes.figures_of(BY_FILE, SEEN, TWO_LAYERS)
    shared = routes.figures_of(SHARED, SEEN, TWO_LAYERS)
    assert by_file == routes.Figures(301, 1_200_000, 2.0, 6.0, 70.0, 1000.0)
    assert shared == routes.Figures(301, 1024 * 316, 1.0, 3.0, 20.0, 1000.0)


@pytest.mark.parametrize(
    "record",
    [SHARED | {"outcome": "wasted"}, BY_FILE | {"share_ms": 0.0}],
    ids=["wasted", "refused"],
)
def test_figures_of_a_handoff_that_went_wrong_are_refused(record: dict[str, Any]) -> None:
    """A share that ended on the file route must not pass for either."""
    with pytest.raises(AssertionError):
        routes.figures_of(record, SEEN, TWO_LAYERS)


def test_comparison_is_medians_and_their_ratios_side_by_side() -> None:
    """One slow round moves no figure."""

    def figures(first_byte_ms: float) -> routes.Figures:
        return routes.Figures(301, 3_000_000, 2.0, 6.0, 10.0, first_byte_ms)

    by_file = [figures(ms) for ms in (100.0, 9000.0, 110.0)]
    shared = [routes.Figures(301, 1_000_000, 1.0, 3.0, 5.0, 55.0)]
    rows = routes.comparison(by_file, shared)
    assert rows == [
        [" 301 moved, MB", "3.00", "1.00", "0.333"],
        [" 301 check | share, ms", "2.00", "1.00", "0.500"],
        [" 301 restore | adopt, ms", "6.00", "3.00", "0.500"],
        [" 301 both of these, ms", "8.00", "4.00", "0.500"],
        [" 301 tax, ms", "10.0", "5.0", "0.500"],
        [" 301 tax without adopt, ms", "4.0", "2.0", "0.500"],
        [" 301 first byte, ms", "110.0", "55.0", "0.500"],
    ]
    lines = routes.comparison_table(rows).split("\n")
    assert {len(line) for line in lines[-9:]} == {len(lines[-1])}


def test_comparison_of_different_prompts_is_refused() -> None:
    """Figures of two prompts say nothing side by side."""
    with pytest.raises(ValueError, match="too many values"):
        routes.comparison(
            [routes.Figures(301, 1, 1.0, 1.0, 1.0, 1.0)],
            [routes.Figures(302, 1, 1.0, 1.0, 1.0, 1.0)],
        )


def test_comparison_table_says_that_the_fronts_adopt_is_an_upper_bound() -> None:
    """Who reads the figures alone must not take the front's copying for the route's."""
    text = " ".join(routes.comparison_table([]).split())
    assert "The front copies at adopt" in text
    assert "is an upper bound here" in text


def test_arguments_name_parts_and_without_any_all_run() -> None:
    """`make bench` measures everything; a part by itself takes less."""
    of_handoffs = ("handoff", "streaming", "shared", "check", "records")
    assert tuple(bench.read_arguments([]).parts) == ("relay", "idle", "tax", *of_handoffs)
    assert bench.read_arguments(["shared", "--rounds", "1"]).parts == ["shared"]
    with pytest.raises(SystemExit):
        bench.read_arguments(["all"])
