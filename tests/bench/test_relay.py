"""The HTTP side's benchmark in its smallest: rows come out, and they are about what they say."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.bench import relay, relay_fronts, relay_handoff, relay_leave, relay_traced
from tests.bench.relay_fronts import Extent, Fronts, front_of, passed, running_fronts
from tests.bench.relay_load import KINDS, Address, load, quantile
from tests.bench.relay_rows import at_least, at_most, missing, rows_table, told
from tests.llama_builds import ROOT

SMALLEST = Extent(rounds=1, seconds=0.1, streams=(1,), requests=3, leaves=1)


@pytest.fixture(scope="module")
def fronts() -> Iterator[Fronts]:
    """Everybody, once."""
    with running_fronts(ROOT) as found:
        yield found


def test_rows_table_says_ok_missed_or_nothing() -> None:
    """A figure meets its goal, misses it, or has none; what was not measured counts for nothing."""
    rows = [
        at_most("a", 1.5, 1.5, "x", "3, 2"),
        at_least("b", 0.97, 0.98),
        told("c", 1234.5, " ms"),
        missing("d", "no strace"),
    ]
    assert rows_table("Title", rows).split("\n") == [
        "Title",
        "a  1.50x  (3, 2)            <= 1.5x  ok",
        "b  0.970                    >= 0.98  MISSED",
        "c  1234 ms",
        "d  not measured: no strace",
        "1 of 2 goals met",
    ]


def test_quantile_of_few_values_is_one_of_them() -> None:
    """The median of many, and the last for all."""
    assert [quantile([3, 1, 2], share) for share in (0.0, 0.5, 0.95, 1.0)] == [1, 2, 3, 3]


def test_load_is_a_program_that_counts_chunks_and_times_them(fronts: Fronts) -> None:
    """Two streams of fifty chunks a second, a fifth of a second long."""
    ours = fronts.ours
    seen = load("streams", ours.address, passed(50, 0), streams=2, seconds=0.2, pids=ours.pids)
    assert seen["chunks"] >= 2
    assert 0 < seen["latency_p50"] <= seen["latency_p95"] < 60e9
    assert seen["cpu_ns"] > 0


def test_relay_rows_of_the_smallest_run_are_all_there(
    fronts: Fronts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row of the goals has a figure, whatever it is here."""

    def load_here(kind: str, address: Address, request: str, **spec: Any) -> dict[str, Any]:
        return KINDS[kind]({"address": address, "request": request, **spec})

    monkeypatch.setattr(relay_fronts, "load", load_here)  # an interpreter for each takes longer
    rows = relay.paced_rows(fronts, SMALLEST) + relay.speed_rows(fronts, SMALLEST)
    judged = [row for row in rows if row.met is not None or row.seen.startswith("not measured")]
    assert len(judged) == 4 + 1 + 1 + 1 + 1
    figures = [float(row.seen.partition("x")[0]) for row in rows if row.met is not None]
    assert len(figures) >= 6
    assert min(figures) > 0


def test_close_ms_is_the_time_from_leaving_to_the_close(fronts: Fronts) -> None:
    """The backend's clock and ours are one, and it does not close before the client has left."""
    assert 0 < relay_leave.close_ms(fronts, passed(50, 0), 0.0) < 10_000


def test_per_piece_leaves_out_what_the_number_does_not_change() -> None:
    """What a connection costs is no part of what a request costs."""
    counted: list[int] = []

    def count(work: object) -> relay_traced.Calls:
        assert callable(work)
        work()
        return relay_traced.Calls({"once": 1, "each": 3 * counted[-1]})

    def run(number: int) -> int:
        counted.append(number)
        return number

    assert relay_traced.per_piece(count, run) == {"each": 3.0}


def test_handoff_is_four_requests_and_its_python_calls_are_counted() -> None:
    """A handoff on the benchmark's backend is used, and the counter sees the daemon's functions."""
    with (
        relay_traced.counting_environment(ROOT) as (env, counts),
        relay_handoff.running_route(ROOT, env) as route,
    ):
        assert relay_handoff.requests_row(route).met
        work = partial(relay_traced.ask_again, front_of(route.daemon), relay_traced.SMALL)
        pid = route.daemon.process.pid
        calls = relay_traced.python_calls(pid, counts, partial(work, 1))
        assert any(name.startswith("surfaces/public_http.py:PublicApp.") for name in calls)
