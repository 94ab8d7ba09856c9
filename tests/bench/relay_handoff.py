"""What the daemon itself adds to a handoff: its backend and its provider take no time here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.bench import relay_provider
from tests.bench.measure import median
from tests.bench.relay_designs import Front
from tests.bench.relay_fronts import Extent, backend_of, front_of, running_relay
from tests.bench.relay_leave import seen_by
from tests.bench.relay_load import connect, first_event_ns, post
from tests.bench.relay_rows import Row, at_most, ms, told
from tests.bench.relay_traced import counting_environment, explain, per_piece, python_calls
from tests.harness import RunningDaemon, wait_until
from tests.llama_builds import short_temporary_directory
from tests.standins import tiny_state

SHORT, LONG = 100, 4000
"""Prompt tokens, one for each byte of the text."""
WARMED = 40


@dataclass(frozen=True)
class Route:
    """A daemon whose handoffs take no time but its own."""

    daemon: RunningDaemon
    shelf: relay_provider.Shelf
    provider: str

    def prepare(self, text: str) -> str:
        """Have the next handoff of this prompt ready, and return its request."""
        tokens = list(text.encode())[:-1]
        if not self.shelf.kept(tokens).exists():
            self.shelf.kept(tokens).write_bytes(tiny_state.build(tokens))
        self.shelf.offer(tokens)
        return request(text)

    def check_used(self, count: int) -> None:
        """See that so many were handed off since the start; AssertionError else."""

        def are_used() -> bool:
            outcomes = [record["outcome"] for record in self.daemon.handoffs()]
            assert set(outcomes) <= {"used", "skipped"}, self.daemon.handoffs()
            return outcomes.count("used") == count

        wait_until(are_used, f"{count} handoffs")


@contextmanager
def running_route(code: Path, env: dict[str, str] | None = None) -> Iterator[Route]:
    """Run a daemon with a provider that takes no time, state files in memory if there is room."""
    with ExitStack() as stack:
        home = stack.enter_context(short_temporary_directory())
        shelf = relay_provider.Shelf(home)
        program, name = relay_provider.install(home)
        config = f'[handoff]\nstate_dir = "{home}/slots"\n{shelf.settings()}'
        daemon = stack.enter_context(running_relay(code, config=config, env=env, provider=program))
        yield Route(daemon, shelf, name)


def request(text: str, *lines: str) -> str:
    """Return a streamed chat of one token."""
    body = {"messages": [{"role": "user", "content": text}], "stream": True, "max_tokens": 1}
    return post("/v1/chat/completions", body, *lines)


def text_of(tokens: int, number: int) -> str:
    """Return a prompt of so many tokens; two with different numbers share no start."""
    return (f"{number:04}" + " word" * tokens)[:tokens]


def first_ns(front: Front, asked: str) -> int:
    """Ask on a new connection; return the time from the send to the first event."""
    with connect(front.address) as sock:
        return first_event_ns(sock, asked)


def handoff_rows(code: Path, extent: Extent) -> list[Row]:
    """Measure the first event against relay alone, and count requests and calls."""
    with running_route(code) as route:
        rows = [_first_row(route, extent), requests_row(route)]
    with counting_environment(code) as (env, counts), running_route(code, env) as route:
        for number in range(WARMED):  # what is learned from each must not count for the other
            for length in (SHORT, LONG):
                first_ns(front_of(route.daemon), route.prepare(text_of(length, 7000 + number)))
        calls = [_calls(route, counts, length) for length in (SHORT, LONG)]
    explain("handoff", calls[0])
    grown = {name: count - calls[0].get(name, 0.0) for name, count in calls[1].items()}
    grown = dict(sorted(grown.items(), key=lambda item: -item[1]))
    explain(f"handoff more at {LONG} tokens than at {SHORT}", grown)
    short, long = (sum(one.values()) for one in calls)
    note = f"{short:.0f}, {long:.0f}"
    what = f"Python calls of a handoff, {LONG} / {SHORT} tokens"
    return [*rows, at_most(what, long / short, 1.1, "x", note)]


def _first_row(route: Route, extent: Extent) -> Row:
    direct, relay, handed = [], [], []
    ours, backend = front_of(route.daemon), backend_of(route.daemon)
    for number in range(extent.requests // 2):
        asked = route.prepare(text_of(SHORT, number))
        handed.append(first_ns(ours, asked))
        plain = text_of(SHORT, 5000 + number)
        # In between: what the daemon does when a handoff is over counts for neither of the two.
        direct.append(first_ns(backend, request(plain)))
        relay.append(first_ns(ours, request(plain, "X-Onebit-Handoff: never")))
    route.check_used(len(handed))
    added, alone = (median(values) - median(direct) for values in (handed, relay))
    what = f"handoff, {route.provider}: added first event / relay alone"
    return at_most(what, added / alone, 5, "x", f"{ms(added)}, {ms(alone)}")


def requests_row(route: Route) -> Row:
    asked = route.prepare(text_of(SHORT, 9000))
    before = seen_by(backend_of(route.daemon))["requests"]
    first_ns(front_of(route.daemon), asked)
    sent = seen_by(backend_of(route.daemon))["requests"] - before
    return at_most("handoff: requests to the decoder", sent, 4)


def _calls(route: Route, counts: Path, length: int) -> dict[str, float]:
    """Return the Python calls of one handoff, the most frequent first."""
    ours = front_of(route.daemon)

    def run(times: int) -> int:
        for number in range(times):
            first_ns(ours, route.prepare(text_of(length, number)))
        return times

    calls = per_piece(partial(python_calls, route.daemon.process.pid, counts), run)
    assert route.daemon.last_handoff()["outcome"] == "used"
    return calls


def parts_rows(route: Route, extent: Extent) -> list[Row]:
    """Return what the daemon itself counts for the parts of a handoff."""
    for number in range(extent.leaves):
        first_ns(front_of(route.daemon), route.prepare(text_of(SHORT, number)))
    records = route.daemon.handoffs()[-extent.leaves :]
    names = ("queue", "template", "tokenize", "lock", "provider_wall", "check", "restore")
    return [
        told(f"handoff: {name}", median(record.get(f"{name}_ms", 0.0) for record in records), " ms")
        for name in names
    ]
