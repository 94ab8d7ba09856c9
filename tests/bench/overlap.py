"""`python -m tests.bench overlap`: what the overlap of provider and decoder is worth.

Two clients ask again and again, long prompts and long replies, with a provider that is as fast as
the decoder and on a processor of its own. Whoever hands off has the provider work for one client
while the decoder generates for the other; `never` does one after the other. Printed: throughput,
and how much of each provider run lay inside the other client's reply, by the records' own times
(the end of a reply is what its client saw).
"""

from __future__ import annotations

import argparse
import datetime as dt
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tests.bench import client, traces
from tests.bench.measure import median, table
from tests.bench.seats import (
    FIXED_MS,
    NEVER,
    PACES,
    Daemons,
    Seat,
    progress,
    reference_pass,
    running_daemons,
    state_directory,
)
from tests.bench.traces import Ask
from tests.harness import RunningDaemon

CLIENTS = ("Anna", "Otto")
Span = tuple[float, float]
"""From, to: time.time() seconds."""


@dataclass
class Looped:
    """What one policy did in all rounds.

    Attributes:
        seen: every request.
        lasted_s: the rounds together.
        prompt_tokens: of all requests.
    """

    seen: list[client.Seen] = field(default_factory=list)
    lasted_s: float = 0.0

    def per_minute(self) -> float:
        """Requests a minute."""
        return 60 * len(self.seen) / self.lasted_s


def loop(daemon: RunningDaemon, asks: Sequence[Sequence[Ask]]) -> tuple[list[client.Seen], float]:
    """Let each client ask its requests one after the other; return them and the seconds taken."""

    def one_client(own: Sequence[Ask]) -> list[client.Seen]:
        return [client.ask(daemon, wanted, None, threading.Event()) for wanted in own]

    started = time.monotonic()
    with ThreadPoolExecutor(len(asks)) as pool:
        seen = [one for own in pool.map(one_client, asks) for one in own]
    return seen, time.monotonic() - started


def run_span(record: Mapping[str, Any]) -> Span:
    """Return when the provider ran for a request: after the ids were there and the lock taken."""
    begin = dt.datetime.fromisoformat(record["time"]).timestamp()
    begin += sum(record.get(f"{part}_ms", 0.0) for part in ("template", "tokenize", "lock")) / 1000
    return begin, begin + record["provider_wall_ms"] / 1000


def inside(span: Span, others: Iterable[Span]) -> float:
    """Return which share of a span lies inside others that do not overlap each other."""
    covered = sum(max(0.0, min(span[1], to) - max(span[0], since)) for since, to in others)
    return covered / (span[1] - span[0])


def shares(seen: Sequence[client.Seen], records: Mapping[str, Mapping[str, Any]]) -> list[float]:
    """Return how much of each provider run lay inside other requests' replies."""
    found = []
    for one in seen:
        record = records[one.request_id]
        if record["outcome"] == "used":
            replies = [(other.first_byte, other.ended) for other in seen if other is not one]
            found.append(inside(run_span(record), replies))
    return found


def row_of(
    seat: Seat, looped: Looped, never: Looped, records: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Return one policy's row."""
    known = [records[one.request_id] for one in looped.seen]
    tokens = sum(record["prompt_tokens"] for record in known)
    tokens += sum(one.tokens for one in looped.seen)
    first = median(one.first_byte_ms for one in looped.seen)
    within = shares(looped.seen, records)
    return [
        seat[0],
        f"{looped.per_minute():.1f}",
        f"{looped.per_minute() / never.per_minute():.2f}",
        f"{tokens / looped.lasted_s:.0f}",
        f"{first:.0f}",
        f"{first / median(one.first_byte_ms for one in never.seen):.2f}",
        f"{len(within)} of {len(known)}",
        f"{median(within):.0%}" if within else "-",
        f"{min(within):.0%}" if within else "-",
        f"{sum(share > 0.99 for share in within)}",
    ]


HEAD = (
    *("policy", "requests/min", "ratio", "tokens/s", "first byte, ms", "ratio", "handed off"),
    *("inside: median", "least", "wholly"),
)


def measure(
    daemons: Daemons, seats: Sequence[Seat], asks: Sequence[Sequence[Ask]], rounds: int
) -> dict[Seat, Looped]:
    """Run all policies in turn, round by round."""
    found = {seat: Looped() for seat in seats}
    for number in range(rounds):
        for seat in seats if number % 2 == 0 else reversed(seats):
            progress(f"round {number + 1}: {seat[0]}")
            seen, lasted_s = loop(daemons.by_seat[seat], asks)
            found[seat].seen += seen
            found[seat].lasted_s += lasted_s
    return found


def read_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench overlap", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=4, help="of each client in a round")
    parser.add_argument("--prompt", type=int, default=180, help="tokens, roughly")
    parser.add_argument("--reply", type=int, default=140, help="tokens")
    parser.add_argument("--pace", choices=list(PACES), default="1x", help="of the provider")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    """Measure and print."""
    args = read_arguments(words)
    seats: list[Seat] = [NEVER, ("always", args.pace), ("auto", args.pace)]
    with state_directory() as directory:
        progress("reference pass")
        with reference_pass(directory / "states") as reference:
            asks = []
            for name in CLIENTS:
                own = [
                    traces.words(f"{name}{number}", args.prompt, number)
                    for number in range(args.requests)
                ]
                asks.append([reference.completion(text, args.reply)[0] for text in own])
        pace = reference.ms_per_token
        with running_daemons(directory, directory / "states", pace, seats) as daemons:
            progress("auto learns")
            for _ in range(3):
                loop(daemons.by_seat[seats[-1]], asks)
            found = measure(daemons, seats, asks, args.rounds)
            records = {
                record["request_id"]: record
                for daemon in daemons.by_seat.values()
                for record in daemon.handoffs()
            }
    title = (
        f"{len(CLIENTS)} clients, prompts of about {args.prompt} tokens, replies of {args.reply};"
        f" provider: {FIXED_MS:.0f} ms and {args.pace} the decoder's {1000 / pace:.0f} tokens/s"
    )
    rows = [row_of(seat, looped, found[NEVER], records) for seat, looped in found.items()]
    print(table(title, HEAD, rows))
    return 0
