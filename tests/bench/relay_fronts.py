"""Who takes part in the relay's benchmark, and how each of them is loaded in turn."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.measure import median
from tests.bench.relay_designs import Front, running_design, running_nginx
from tests.bench.relay_load import get, load, post
from tests.harness import RunningDaemon, running_onebitd
from tests.llama_builds import ROOT, short_temporary_directory
from tests.standins import tiny_state

BACKEND = ROOT / "tests" / "bench" / "relay_backend.py"
RATE = 21
"""Chunks a second of a paced stream."""
STREAMS = (1, 8, 32, 128)


@dataclass(frozen=True)
class Extent:
    """How much is measured: repeats, seconds and numbers of each."""

    rounds: int = 3
    seconds: float = 2.0
    streams: Sequence[int] = STREAMS
    requests: int = 100
    leaves: int = 9
    idle_s: float = 20.0


QUICK = Extent(1, 0.4, (1, 8), 10, 2, idle_s=2.0)


@dataclass(frozen=True)
class Fronts:
    """Who answers: the backend itself, onebitd, and what it is compared with."""

    daemon: RunningDaemon
    direct: Front
    ours: Front
    plain: Front
    pump: Front
    nginx: Front | None

    @property
    def all(self) -> list[Front]:
        """Everybody that there is."""
        named = (self.direct, self.ours, self.plain, self.pump, self.nginx)
        return [front for front in named if front is not None]


def chat(rate: float = 0, count: int = 1, **more: object) -> str:
    """Return a streamed chat request, which takes the handoff's route, and is not handed off."""
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
    return post("/v1/chat/completions", body | {"rate": rate, "count": count} | more)


def passed(rate: float = 0, count: int = 1) -> str:
    """Return a request for a stream that is passed through."""
    return get(f"/events?rate={rate:g}&count={count}")


@contextlib.contextmanager
def running_relay(
    code: Path, *args: str, config: str = "", env: dict[str, str] | None = None, **more: Any
) -> Iterator[RunningDaemon]:
    """Run onebitd in front of the benchmark's backend.

    Args:
        code: where its package is.
        env: more environment; PYTHONPATH is `code` unless it says otherwise.
    """
    with short_temporary_directory() as home:
        model = home / "model.gguf"
        model.write_bytes(tiny_state.gguf(8192))
        environment = {"PYTHONPATH": os.fspath(code), **(env or {})}
        with running_onebitd(
            *args, model=model, llama_server=BACKEND, config=config, env=environment, **more
        ) as daemon:
            yield daemon


def front_of(daemon: RunningDaemon) -> Front:
    """Return the daemon as a front."""
    return Front("onebitd", ("127.0.0.1", daemon.port), (daemon.process.pid,))


def backend_of(daemon: RunningDaemon) -> Front:
    """Return its decoder, asked directly."""
    return Front("direct", os.fspath(daemon.runtime / "backend.sock"), ())


@contextlib.contextmanager
def running_fronts(code: Path) -> Iterator[Fronts]:
    """Run everybody."""
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(short_temporary_directory())
        daemon = stack.enter_context(running_relay(code))
        backend = daemon.runtime / "backend.sock"
        yield Fronts(
            daemon,
            backend_of(daemon),
            front_of(daemon),
            stack.enter_context(running_design("plain", backend)),
            stack.enter_context(running_design("pump", backend)),
            stack.enter_context(running_nginx(backend, home)),
        )


class Rounds:
    """Results by front and kind of load, of interleaved rounds."""

    def __init__(self, fronts: Sequence[Front], extent: Extent) -> None:
        self._fronts, self._extent = fronts, extent
        self._seen: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def measure(self, name: str, kind: str, request: str, **spec: Any) -> None:
        """Load each front in turn, in every round."""
        for number in range(self._extent.rounds):
            turns = self._fronts if number % 2 == 0 else reversed(self._fronts)
            for front in turns:
                result = load(kind, front.address, request, pids=front.pids, **spec)
                self._seen.setdefault((front.name, name), []).append(result)

    def of(self, front: Front, name: str, figure: Callable[[dict[str, Any]], float]) -> float:
        """Return the median of a figure over the rounds."""
        return median(map(figure, self._seen[front.name, name]))
