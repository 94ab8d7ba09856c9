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
import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.bench import client, traces, verdict
from tests.bench.seats import (
    AGAIN,
    FIXED_MS,
    NEVER,
    PACES,
    SLOW,
    Daemons,
    Seat,
    progress,
    reference_pass,
    running_daemons,
    state_directory,
)
from tests.bench.traces import Sizes, Trace
from tests.bench.verdict import Bar, Measured

LEARNING = 20


def learn(daemons: Daemons, found: Measured, paces: Sequence[str], learning: int) -> None:
    """Run what is not counted: never and always once, and so many requests of `auto`."""
    trace = found.trace
    slow = [("always", pace) for pace in paces if pace == SLOW]
    others = [NEVER, *(("always", pace) for pace in paces if pace != SLOW)]
    # The slow provider's requests mostly sleep, for a minute and more: they may do so beside.
    with ThreadPoolExecutor(1) as beside:
        for number, unit in enumerate(trace.units):
            progress(f"{trace.name}: never and always, {number + 1} of {len(trace.units)}")
            for seat in others:
                found.note(seat, number, daemons.replay(seat, unit), counts=False)
        running = [(seat, beside.submit(_pass, daemons, seat, trace)) for seat in slow]
        for pace in paces:
            asked = 0
            while asked < learning:
                for unit in trace.units:
                    if asked < learning:
                        progress(f"{trace.name}: auto at {pace} learns, {asked} of {learning}")
                        daemons.replay(("auto", pace), unit)
                        asked += len(unit)
        for seat, one in running:
            for number, seen in enumerate(one.result()):
                found.note(seat, number, seen, counts=False)


def _pass(daemons: Daemons, seat: Seat, trace: Trace) -> list[list[client.Seen]]:
    return [daemons.replay(seat, unit) for unit in trace.units]


def measure(daemons: Daemons, found: Measured, paces: Sequence[str], rounds: int) -> None:
    """Run the counted rounds, all seats one after the other at each unit, in changing order."""
    seats = [NEVER, AGAIN]
    for pace in paces:
        seats += [(policy, pace) for policy in ("auto", "oracle")]
        seats += [("always", pace)] if pace != SLOW else []
    for round_ in range(rounds):
        for number, unit in enumerate(found.trace.units):
            progress(f"{found.trace.name}: round {round_ + 1}, {number + 1}")
            # By lot: a machine is faster after a rest, and whoever came after the same neighbour
            # each time would have that for its own.
            random.Random(f"{round_} {number}").shuffle(seats)  # noqa: S311
            for seat in seats:
                ways = found.best_ways(seat[1], number) if seat[0] == "oracle" else None
                found.note(seat, number, daemons.replay(seat, unit, ways), counts=True)


def collect(daemons: Daemons, found: Measured) -> None:
    """Get the records of all daemons; whatever did not go as it was told is an oddity."""
    for (policy, pace), daemon in daemons.by_seat.items():
        for record in daemon.handoffs():
            if policy == "auto":
                found.records[record["request_id"]] = record
            if record["outcome"] not in ("used", "skipped"):
                what = f"{verdict.word_for(record)}: {record.get('detail')}"
                found.oddities[f"{policy} {pace}: {what}"] += 1


def replay_trace(
    trace: Trace, directory: Path, ms_per_token: float, args: argparse.Namespace
) -> Measured:
    """Measure one trace at all paces."""
    found = Measured(trace)
    seats = [NEVER, AGAIN]
    seats += [(policy, pace) for pace in args.paces for policy in ("always", "auto", "oracle")]
    progress(f"{trace.name}: starting the daemons")
    with running_daemons(directory, directory / "states", ms_per_token, seats) as daemons:
        learn(daemons, found, args.paces, args.learning)
        measure(daemons, found, args.paces, args.rounds)
        collect(daemons, found)
    return found


def run(args: argparse.Namespace, sizes: Sizes) -> list[Bar]:
    """Measure and print everything; return the bars."""
    bars: list[Bar] = []
    with state_directory() as directory:
        with reference_pass(directory / "states") as reference:
            found = []
            for name in args.traces:
                progress(f"reference pass: {name}")
                found.append(traces.TRACES[name](reference, sizes))
        say(
            f"decoder: {1000 / reference.ms_per_token:.0f} tokens/s; provider: {FIXED_MS:.0f} ms"
            f" and as many tokens/s times {', '.join(args.paces)};\n{args.learning} requests of"
            f" learning, medians of {args.rounds} rounds",
        )
        for trace in found:
            measured = replay_trace(trace, directory, reference.ms_per_token, args)
            say(verdict.page(measured, args.paces))
            bars += verdict.bars_of(measured, args.paces)
            if args.raw is not None:
                with args.raw.open("a") as file:
                    file.writelines(json.dumps(one) + "\n" for one in measured.raw())
    return bars


def say(text: str) -> None:
    """Print a paragraph."""
    print(text, end="\n\n", flush=True)


def read_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench gate", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="counted repeats of each request")
    parser.add_argument("--learning", type=int, default=LEARNING, help="requests before that")
    parser.add_argument("--quick", action="store_true", help="few short requests, for a look")
    known = list(traces.TRACES)
    parser.add_argument("--traces", nargs="+", choices=known, default=known)
    parser.add_argument("--paces", nargs="+", choices=list(PACES), default=list(PACES))
    parser.add_argument("--raw", type=Path, help="append all times and auto's records to this file")
    args = parser.parse_args(words)
    if args.quick:
        args.rounds, args.learning = 1, 8
    return args


def main(words: Sequence[str]) -> int:
    """Run the gate; 1 when a bar is missed."""
    args = read_arguments(words)
    bars = run(args, traces.SHORT if args.quick else Sizes())
    print("\n".join(bar.line() for bar in bars))
    return 0 if all(bar.is_met for bar in bars) else 1
