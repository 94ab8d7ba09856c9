"""`make bench-gate`: is `auto` as fast as the better of the two ways, prompt by prompt?

Three traces (tests/bench/traces.py) are replayed on real decoders through the four policies: never,
always, auto, and an oracle that was told what both ways take. The provider is a second device that
is paced to a quarter of the decoder's own rate, the same, and four times it
(tests/standins/paced_provider.py).

Each policy and pace has a daemon and a decoder of its own. They take turns request by request, so
that whatever the machine does meanwhile happens to all of them; figures are medians of the rounds
of each request. Never runs twice: the second one's ratio to the first is what noise alone does.

Not counted are the learning of `auto` and one pass of never and always, by which the oracle chooses
(as it goes on, by all that was measured so far). By choice: what the choices would have taken if
each request had taken its way's median, so that chance does not decide.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench import client, traces
from tests.bench.measure import median, table
from tests.bench.traces import Reference, Sizes, Trace
from tests.harness import RunningDaemon, running_onebitd
from tests.llama_builds import CPU_ONLY, DEMO_PROGRAM, MODELS, running_program
from tests.standins import paced_provider

PACES = {"0.25x": 0.25, "1x": 1.0, "4x": 4.0}
FIXED_MS = 60.0
"""What a run of the provider takes for no token at all."""
DECODER = ("-c", "2048", "-t", "1", *CPU_ONLY)
LEARNING = 20
ORACLE_BAR = 1.05
NEVER_BAR = 1.02
SLOW = "0.25x"
NEVER, AGAIN = ("never", ""), ("never again", "")

Seat = tuple[str, str]
"""A policy and a pace; never has no pace."""
Key = tuple[int, int]


@dataclass
class Daemons:
    """The daemons of one trace, by seat."""

    by_seat: dict[Seat, RunningDaemon]

    def replay(self, seat: Seat, unit: traces.Unit, ways: Sequence[str | None]) -> list[client.Seen]:
        """Run one unit on a seat's daemon; `ways` is each request's X-Onebit-Handoff."""
        return client.replay(self.by_seat[seat], unit, ways)


@dataclass
class Measured:
    """What was measured of one trace.

    Attributes:
        tried: every time to first byte by seat and request, the uncounted pass included.
        counted: those of the counted rounds.
        requests: the ids of `auto`'s counted requests, by pace.
        records: of `auto`'s requests, by id.
    """

    trace: Trace
    tried: dict[Seat, dict[Key, list[float]]] = field(default_factory=dict)
    counted: dict[Seat, dict[Key, list[float]]] = field(default_factory=dict)
    requests: dict[str, list[tuple[Key, str]]] = field(default_factory=dict)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    oddities: collections.Counter[str] = field(default_factory=collections.Counter)

    def note(self, seat: Seat, unit: int, seen: Sequence[client.Seen], *, counts: bool) -> None:
        """Keep the times of one unit."""
        for into in (self.tried, self.counted) if counts else (self.tried,):
            for place, one in enumerate(seen):
                times = into.setdefault(seat, {}).setdefault((unit, place), [])
                times.append(one.first_byte_ms)
        if counts and seat[0] == "auto":
            ids = self.requests.setdefault(seat[1], [])
            ids += [((unit, place), one.request_id) for place, one in enumerate(seen)]

    def best_ways(self, pace: str, unit: int) -> list[str]:
        """Return the oracle's choice for each request of a unit."""
        never, always = self.tried[NEVER], self.tried["always", pace]
        keys = [key for key in self.trace.keys if key[0] == unit]
        return [
            "never" if median(never[key]) <= median(always[key]) else "always" for key in keys
        ]

    def medians(self, seat: Seat) -> list[float]:
        """Return the median of each request, in order."""
        # Always at the slow pace is not run again and again: it takes longest and decides nothing.
        times = self.counted.get(seat) or self.tried[seat]
        return [median(times[key]) for key in self.trace.keys]

    def by_choice(self, pace: str) -> float:
        """Return what auto's choices take, over the least that any choices take."""
        way = {
            "decoder": {key: median(times) for key, times in self.tried[NEVER].items()},
            "provider": {key: median(t) for key, t in self.tried["always", pace].items()},
        }
        chosen = sum(way[self.way_of(id_)][key] for key, id_ in self.requests[pace])
        least = sum(min(one[key] for one in way.values()) for key, _ in self.requests[pace])
        return chosen / least

    def way_of(self, request_id: str) -> str:
        """Return which way an auto request really went."""
        record = self.records[request_id]
        return "provider" if record["outcome"] in ("used", "wasted") else "decoder"


def nearest_rank(values: Iterable[float], percent: float) -> float:
    """Return a percentile that is one of the values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def word_for(record: Mapping[str, Any]) -> str:
    """Return what became of a request, in a word or two."""
    reason = record.get("reason")
    word = record["outcome"] if reason is None else f"{record['outcome']} {reason}"
    return f"{word} (explored)" if record.get("explored") else word


@contextlib.contextmanager
def running_daemons(
    home: Path, states: Path, ms_per_token: float, paces: Sequence[str]
) -> Iterator[Daemons]:
    """Run a daemon for each seat; everything they keep is new and below `home`."""
    program = Path(paced_provider.install(str(home)))
    seats = [NEVER, AGAIN]
    seats += [(policy, pace) for pace in paces for policy in ("always", "auto", "oracle")]
    with contextlib.ExitStack() as stack:
        found: dict[Seat, RunningDaemon] = {}
        for number, (policy, pace) in enumerate(seats):
            own = home / str(number)
            own.mkdir()
            variables = {
                "PACED_STATES": str(states),
                "PACED_FIXED_MS": str(FIXED_MS),
                "PACED_MS_PER_TOKEN": str(ms_per_token / PACES.get(pace, 1.0)),
            }
            env = ", ".join(f"{name} = {json.dumps(value)}" for name, value in variables.items())
            configured = {"oracle": "always", "never again": "never"}.get(policy, policy)
            found[policy, pace] = stack.enter_context(
                running_onebitd(
                    model=MODELS[0].path,
                    llama_server=DEMO_PROGRAM,
                    provider=program,
                    backend_args=DECODER,
                    config=f'[handoff]\npolicy = "{configured}"\nstate_dir = "{own}/slots"\n'
                    f"[provider]\nenv = {{ {env} }}\n",
                    env={"XDG_STATE_HOME": str(own / "state")},
                    wait_ready=False,
                )
            )
        for daemon in found.values():
            daemon.wait_ready()
        yield Daemons(found)


def learn(daemons: Daemons, found: Measured, paces: Sequence[str], learning: int) -> None:
    """Run what is not counted: never and always once, and so many requests of `auto`."""
    trace = found.trace
    for number, unit in enumerate(trace.units):
        for seat in (NEVER, *(("always", pace) for pace in paces)):
            progress(f"{trace.name}: {' '.join(seat)}, once, {number + 1} of {len(trace.units)}")
            seen = daemons.replay(seat, unit, [None] * len(unit))
            found.note(seat, number, seen, counts=False)
    for pace in paces:
        asked = 0
        while asked < learning:
            for unit in trace.units:
                if asked < learning:
                    progress(f"{trace.name}: auto at {pace} learns, {asked} of {learning}")
                    daemons.replay(("auto", pace), unit, [None] * len(unit))
                    asked += len(unit)


def measure(daemons: Daemons, found: Measured, paces: Sequence[str], rounds: int) -> None:
    """Run the counted rounds, all seats in turn at each unit, each time another one first."""
    seats = [NEVER, AGAIN]
    for pace in paces:
        seats += [(policy, pace) for policy in ("auto", "oracle")]
        seats += [("always", pace)] if pace != SLOW else []
    for round_ in range(rounds):
        for number, unit in enumerate(found.trace.units):
            progress(f"{found.trace.name}: round {round_ + 1}, {number + 1}")
            seats = [*seats[1:], seats[0]]
            for seat in seats:
                ways: list[str | None] = [None] * len(unit)
                if seat[0] == "oracle":
                    ways = [*found.best_ways(seat[1], number)]
                found.note(seat, number, daemons.replay(seat, unit, ways), counts=True)


def collect(daemons: Daemons, found: Measured) -> None:
    """Get the records of all daemons; whatever did not go as it was told is an oddity."""
    for (policy, pace), daemon in daemons.by_seat.items():
        for record in daemon.handoffs():
            if policy == "auto":
                found.records[record["request_id"]] = record
            if record["outcome"] not in ("used", "skipped"):
                found.oddities[f"{policy} {pace}: {word_for(record)}: {record.get('detail')}"] += 1


def replay_trace(
    trace: Trace, states: Path, ms_per_token: float, args: argparse.Namespace
) -> Measured:
    """Measure one trace at all paces."""
    found = Measured(trace)
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=states.parent)))
        progress(f"{trace.name}: starting the daemons")
        daemons = stack.enter_context(
            running_daemons(home, states, ms_per_token, args.paces)
        )
        learn(daemons, found, args.paces, args.learning)
        measure(daemons, found, args.paces, args.rounds)
        collect(daemons, found)
    return found


def cell_row(found: Measured, pace: str) -> list[str]:
    """Return the table's row of one pace: ratios to the oracle."""
    oracle = found.medians(("oracle", pace))
    others = [found.medians(seat) for seat in (NEVER, ("always", pace), ("auto", pace))]
    row = [pace, f"{sum(oracle) / 1000:.2f}"]
    row += [f"{sum(one) / sum(oracle):.3f}" for one in others]
    row.append(f"{found.by_choice(pace):.3f}")
    for percent in (50, 95):
        base = nearest_rank(oracle, percent)
        row += [f"{nearest_rank(one, percent) / base:.2f}" for one in others]
    return row


HEAD = (
    *("provider", "oracle, s", "never", "always", "auto", "by choice"),
    *("p50 never", "always", "auto", "p95 never", "always", "auto"),
)


def noise_of(found: Measured) -> float:
    """Return never's second run over its first."""
    return sum(found.medians(AGAIN)) / sum(found.medians(NEVER))


def losses(found: Measured, pace: str, most: int = 3) -> list[str]:
    """Return what auto's worst choices were, by what the better way takes."""
    lines = []
    for key, id_ in found.requests[pace]:
        took = {
            "decoder": median(found.tried[NEVER][key]),
            "provider": median(found.tried["always", pace][key]),
        }
        way, record = found.way_of(id_), found.records[id_]
        lost = took[way] - min(took.values())
        if lost > 0:
            said = [
                f"{name} estimated {record[f'{name}_estimate_ms']:.0f}"
                for name in took
                if f"{name}_estimate_ms" in record
            ]
            lines.append(
                (
                    lost,
                    f"    {lost:.0f} ms: {record.get('prompt_tokens', '?')} tokens,"
                    f" {record.get('slot_tokens', '?')} in the slot: {word_for(record)};"
                    f" decoder {took['decoder']:.0f} ms, provider {took['provider']:.0f} ms;"
                    f" {', '.join(said) or 'nothing estimated'}",
                )
            )
    return [line for _, line in sorted(lines, reverse=True)[:most]]


def page(found: Measured, paces: Sequence[str]) -> str:
    """Return all that is printed of one trace."""
    trace = found.trace
    title = (
        f"{trace.name}: {len(trace.keys)} requests, {trace.prompt_tokens} prompt tokens;"
        f" time to first byte, ratios to the oracle's: sum, p50, p95"
    )
    lines = [table(title, HEAD, [cell_row(found, pace) for pace in paces])]
    lines.append(f"never again / never: {noise_of(found):.3f} (what noise alone does to a sum)")
    for pace in paces:
        words = collections.Counter(word_for(found.records[id_]) for _, id_ in found.requests[pace])
        did = ", ".join(f"{count} {word}" for word, count in words.most_common())
        lines.append(f"auto at {pace}: {did}")
        worst = losses(found, pace)
        lines += ["  worst choices, by the medians of both ways:", *worst] if worst else []
    lines += [f"not as told: {count} x {what}" for what, count in found.oddities.items()]
    return "\n".join(lines)


@dataclass(frozen=True)
class Bar:
    """One thing that must be so."""

    what: str
    ratio: float
    limit: float
    by_choice: float

    @property
    def is_met(self) -> bool:
        """By what was measured."""
        return self.ratio <= self.limit

    def line(self) -> str:
        """Return a line for the reader."""
        word = "met   " if self.is_met else "MISSED"
        return f"{word} {self.what}: {self.ratio:.3f}, at most {self.limit} (by choice {self.by_choice:.3f})"


def bars_of(found: Measured, paces: Sequence[str]) -> list[Bar]:
    """Judge one trace."""
    bars = []
    for pace in paces:
        auto, choice = sum(found.medians(("auto", pace))), found.by_choice(pace)
        where = f"{found.trace.name}, {pace}: auto"
        oracle = sum(found.medians(("oracle", pace)))
        bars.append(Bar(f"{where} / oracle", auto / oracle, ORACLE_BAR, choice))
        if pace == SLOW:
            never = sum(found.medians(NEVER))
            bars.append(Bar(f"{where} / never", auto / never, NEVER_BAR, choice))
    return bars


def progress(text: str) -> None:
    """Say on stderr where it is."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def prepare(
    directory: Path, names: Sequence[str], sizes: Sizes
) -> tuple[list[Trace], float]:
    """Run the reference pass; return the traces and the decoder's milliseconds a token."""
    arguments = ("-m", str(MODELS[0].path), "-np", "1", "--cache-ram", "0", *DECODER)
    with running_program(DEMO_PROGRAM, arguments) as plain:
        reference = Reference(plain, directory)
        found = []
        for name in names:
            progress(f"reference pass: {name}")
            found.append(traces.TRACES[name](reference, sizes))
    return found, reference.ms_per_token


def run(args: argparse.Namespace, sizes: Sizes) -> list[Bar]:
    """Measure and print everything; return the bars."""
    shared = Path(tempfile.mkdtemp(prefix="onebitd-gate-", dir="/dev/shm"))
    states = shared / "states"
    states.mkdir()
    bars: list[Bar] = []
    try:
        found, ms_per_token = prepare(states, args.traces, sizes)
        print(
            f"decoder: {1000 / ms_per_token:.0f} tokens/s; provider: {FIXED_MS:.0f} ms and as many"
            f" tokens/s times {', '.join(args.paces)}; {args.learning} requests of learning,"
            f" medians of {args.rounds} rounds",
            end="\n\n",
            flush=True,
        )
        for trace in found:
            measured = replay_trace(trace, states, ms_per_token, args)
            print(page(measured, args.paces), end="\n\n", flush=True)
            bars += bars_of(measured, args.paces)
            if args.records is not None:
                with args.records.open("a") as file:
                    file.writelines(json.dumps(one) + "\n" for one in measured.records.values())
    finally:
        shutil.rmtree(shared, ignore_errors=True)
    return bars


def read_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench gate", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="counted repeats of each request")
    parser.add_argument("--learning", type=int, default=LEARNING, help="requests before that")
    parser.add_argument("--quick", action="store_true", help="few short requests, for a look")
    parser.add_argument("--traces", nargs="+", choices=list(traces.TRACES), default=list(traces.TRACES))
    parser.add_argument("--paces", nargs="+", choices=list(PACES), default=list(PACES))
    parser.add_argument("--records", type=Path, help="append auto's records to this file, as JSON")
    args = parser.parse_args(words)
    if args.quick:
        args.rounds, args.learning = 1, 8
    return args


def main(words: Sequence[str]) -> int:
    """Run the gate; 1 when a bar is missed."""
    args = read_arguments(words)
    bars = run(args, traces.SHORT if args.quick else traces.Sizes())
    print("\n".join(bar.line() for bar in bars))
    return 0 if all(bar.is_met for bar in bars) else 1
