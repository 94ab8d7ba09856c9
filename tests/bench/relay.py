"""`python -m tests.bench relay`: what passing a reply on costs, beside nginx and plainer designs.

One backend (relay_backend) feeds all of them over one Unix socket, rounds are interleaved, and
every figure with a goal is a ratio or a count: the machine cancels out.
"""

from __future__ import annotations

from typing import Any

from tests.bench.relay_fronts import RATE, Extent, Fronts, Rounds, chat, passed
from tests.bench.relay_load import get
from tests.bench.relay_rows import Row, at_least, at_most, missing, ms, told
from tests.bench.relay_traced import SMALL

LATENCY_GOALS = {1: 1.6, 8: 1.6, 32: 1.6, 128: 2.0}
"""By streams."""


def cpu_per_chunk(result: dict[str, Any]) -> float:
    """Processor time for each chunk, nanoseconds."""
    return float(result["cpu_ns"] / result["chunks"])


def paced_rows(fronts: Fronts, extent: Extent) -> list[Row]:
    """Measure paced streams: processor time, latency, gaps."""
    rounds = Rounds(fronts.all, extent)
    own = Rounds([fronts.ours, fronts.plain, fronts.pump], extent)
    own.measure("chat", "streams", chat(RATE, 0), streams=1, seconds=extent.seconds)
    for number in extent.streams:
        name = str(number)
        rounds.measure(name, "streams", passed(RATE, 0), streams=number, seconds=extent.seconds)
    rows = cpu_rows(own, "chat", "CPU per chunk, 1 chat", fronts)
    for number in extent.streams:
        rows += cpu_rows(rounds, str(number), f"CPU per chunk, {number} streams", fronts)
    for number in extent.streams:
        rows += latency_rows(rounds, number, fronts)
    return rows


def cpu_rows(rounds: Rounds, name: str, what: str, fronts: Fronts) -> list[Row]:
    """Return processor time against the two designs."""
    spent, plain, pump = (
        rounds.of(front, name, cpu_per_chunk) for front in (fronts.ours, fronts.plain, fronts.pump)
    )
    return [
        at_most(f"{what} / plain's", spent / plain, 0.75, "x", f"{ms(spent)}, {ms(plain)}"),
        at_most(f"{what} / pump's", spent / pump, 2.2, "x", f"{ms(spent)}, {ms(pump)}"),
    ]


def latency_rows(rounds: Rounds, number: int, fronts: Fronts) -> list[Row]:
    """Return latency added to direct, against nginx's, and the gaps between chunks."""
    name = str(number)
    what = f"added chunk latency p50, {number} streams"
    latency = added_row(what, rounds, name, "latency_p50", fronts, LATENCY_GOALS[number])
    gap, gap_direct = (
        rounds.of(front, name, lambda seen: seen["gap_p95"])
        for front in (fronts.ours, fronts.direct)
    )
    what = f"gap between chunks p95, {number} streams / direct's"
    return [latency, told(what, gap / gap_direct, "x", f"{ms(gap)}, {ms(gap_direct)}")]


def added_row(
    what: str, rounds: Rounds, name: str, figure: str, fronts: Fronts, goal: float | None
) -> Row:
    """Return what onebitd adds to a time of the backend itself, against what nginx adds."""
    what += " / nginx's"
    if fronts.nginx is None:
        return missing(what, "nginx is not installed")
    direct, ours, theirs, pump = (
        rounds.of(front, name, lambda seen: float(seen[figure]))
        for front in (fronts.direct, fronts.ours, fronts.nginx, fronts.pump)
    )
    note = f"{ms(ours - direct)}, {ms(theirs - direct)}; pump {ms(pump - direct)}"
    note += f", direct {ms(direct)}"
    if theirs <= direct:
        return missing(what, f"the machine is too busy ({note})")
    ratio = (ours - direct) / (theirs - direct)
    if goal is None:
        return told(what, ratio, "x", note)
    return at_most(what, ratio, goal, "x", note)


def speed_rows(fronts: Fronts, extent: Extent) -> list[Row]:
    """Measure the most chunks, the first event and the most small requests."""
    rounds = Rounds(fronts.all, extent)
    seconds = extent.seconds / 2
    rounds.measure("flood", "flood", get("/flood"), seconds=seconds)
    rounds.measure("first", "first", passed(0, 1), count=extent.requests, fresh=False)
    rounds.measure("fresh", "first", passed(0, 1), count=extent.requests, fresh=True)
    rounds.measure("small", "small", SMALL, connections=8, seconds=seconds)
    what = "added first event p50"
    return [
        *rate_rows("max relay throughput", "flood", rounds, fronts, nginx_goal=0.7),
        added_row(what, rounds, "first", "first_p50", fronts, 4),
        added_row(f"{what}, new connection", rounds, "fresh", "first_p50", fronts, None),
        *rate_rows("small requests, 8 connections", "small", rounds, fronts, plain_goal=1.3),
    ]


def rate_rows(
    what: str,
    name: str,
    rounds: Rounds,
    fronts: Fronts,
    *,
    plain_goal: float | None = None,
    nginx_goal: float | None = None,
) -> list[Row]:
    """Return a rate against the plain design's and nginx's."""
    rows = []
    ours = rounds.of(fronts.ours, name, lambda seen: seen["per_s"])
    cpu = rounds.of(fronts.ours, name, lambda seen: seen["cpu_ns_each"])
    for front, goal in ((fronts.plain, plain_goal), (fronts.nginx, nginx_goal)):
        if front is None:
            rows.append(missing(f"{what} / nginx's", "nginx is not installed"))
            continue
        theirs = rounds.of(front, name, lambda seen: seen["per_s"])
        their_cpu = rounds.of(front, name, lambda seen: seen["cpu_ns_each"])
        against, note = f"{what} / {front.name}'s", f"{ours:.0f}/s, {theirs:.0f}/s"
        note += f"; CPU each {ms(cpu)}, {ms(their_cpu)}"
        ratio = ours / theirs
        if goal is None:
            rows.append(told(against, ratio, "x", note))
        else:
            rows.append(at_least(against, ratio, goal, "x", note))
    return rows
