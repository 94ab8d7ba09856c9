"""What goes wrong around a daemon, from a seed: one fault after the other, each for a while."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.e2e.standin_route import Route
from tests.llama_builds import UnixConnection

CALM: Final = "nothing"
PROVIDER_MODES: Final = (
    *("exit:3", "crash", "hang", "sleep:0.2", "no_file", "empty", "half", "short_by:1"),
    *("wrong_tokens", "shifted", "nan", "symlink", "fifo", "flood", "grandchild", "trailing"),
)
KILLS_MOST: Final = 4
"""Each one in five minutes doubles the pause before the next start."""


@dataclass(frozen=True)
class Gust:
    """One fault while it lasted (CLOCK_MONOTONIC)."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Place:
    """What the storm may touch: the daemon, its configuration file, its little disk if any."""

    route: Route
    config: Path
    disk: Path | None


Fault = Callable[[Place, random.Random], AbstractContextManager[None]]


@contextlib.contextmanager
def provider_misbehaves(place: Place, rng: random.Random) -> Iterator[None]:
    """The provider crashes, hangs, dawdles or writes what is no good state."""
    place.route.behave(provider=rng.choice(PROVIDER_MODES))
    yield
    place.route.behave()


@contextlib.contextmanager
def lock_is_held(place: Place, rng: random.Random) -> Iterator[None]:
    """Another program has the device."""
    del rng
    with place.route.lock_path.open("a+b") as file:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.002)
        yield


@contextlib.contextmanager
def decoder_is_killed(place: Place, rng: random.Random) -> Iterator[None]:
    """The decoder dies."""
    del rng
    _signal_decoder(place, signal.SIGKILL)
    yield


@contextlib.contextmanager
def decoder_stops(place: Place, rng: random.Random) -> Iterator[None]:
    """The decoder gets no processor for a moment."""
    del rng
    _signal_decoder(place, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal_decoder(place, signal.SIGCONT)


@contextlib.contextmanager
def decoder_misbehaves(place: Place, rng: random.Random) -> Iterator[None]:
    """The decoder is slow, hangs up in a stream, or fails on what was restored."""
    knobs = ("--token-delay 0.02", "--truncate-stream 2", "--reply-500-after-restore")
    place.route.behave(decoder=rng.choice((*knobs, "--restore-short", "--restore-refuse")))
    yield
    place.route.behave()


@contextlib.contextmanager
def disk_is_full(place: Place, rng: random.Random) -> Iterator[None]:
    """There is no room for state files."""
    del rng
    if place.disk is None:
        yield
        return
    filler = place.disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    try:
        yield
    finally:
        filler.unlink()


@contextlib.contextmanager
def is_reloaded(place: Place, rng: random.Random) -> Iterator[None]:
    """The configuration changes, and changes back."""
    text = place.config.read_text()
    changed = (("wait_s = 0.3", "wait_s = 0.1"), ("max_pending = 64", "max_pending = 3"))
    place.config.write_text(text.replace(*rng.choice(changed)))
    _post(place, "/v1/reload")
    try:
        yield
    finally:
        place.config.write_text(text)
        _post(place, "/v1/reload")


@contextlib.contextmanager
def requests_are_cancelled(place: Place, rng: random.Random) -> Iterator[None]:
    """The operator ends some of what is in flight."""
    with contextlib.suppress(OSError):
        found = place.route.daemon.control("/v1/requests")["requests"]
        for one in rng.sample(found, min(2, len(found))):
            _post(place, "/v1/requests/cancel", {"request_id": one["request_id"]})
    yield


FAULTS: Final[Sequence[tuple[str, Fault]]] = (
    ("provider misbehaves", provider_misbehaves),
    ("provider misbehaves", provider_misbehaves),
    ("provider misbehaves", provider_misbehaves),
    ("lock is held", lock_is_held),
    ("decoder is killed", decoder_is_killed),
    ("decoder stops", decoder_stops),
    ("decoder misbehaves", decoder_misbehaves),
    ("disk is full", disk_is_full),
    ("reloaded", is_reloaded),
    ("requests are cancelled", requests_are_cancelled),
)


def _signal_decoder(place: Place, number: int) -> None:
    pid = place.route.daemon.status()["backend"]["pid"]
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _post(place: Place, path: str, document: object = None) -> None:
    connection = UnixConnection(place.route.daemon.runtime / "control.sock", 30.0)
    try:
        body = None if document is None else json.dumps(document)
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        connection.getresponse().read()
    finally:
        connection.close()


class Storm:
    """Faults one after the other until it is stopped; each has come before one comes twice.

    Attributes:
        gusts: what there was, in order.
        failure: why it ended by itself, None as it should be.
    """

    def __init__(self, place: Place, seed: int) -> None:
        self._place = place
        self._rng = random.Random(seed)  # noqa: S311 - the same storm each time
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._kills = 0
        self.gusts: list[Gust] = []
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Let the last fault pass."""
        self._over.set()
        self._thread.join(60)
        if self.failure is not None:
            raise AssertionError("the storm itself failed") from self.failure

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                for name, fault in self._rng.sample(FAULTS, len(FAULTS)):
                    self._blow(name, fault)
                    if self._over.wait(self._rng.uniform(0.1, 0.8)):
                        return
        except BaseException as error:  # noqa: BLE001 - raised again by stop()
            self.failure = error

    def _blow(self, name: str, fault: Fault) -> None:
        if fault is decoder_is_killed:
            self._kills += 1
            if self._kills > KILLS_MOST:
                return
        begin = time.monotonic()
        with fault(self._place, self._rng):
            self._over.wait(self._rng.uniform(0.2, 1.2))
        self.gusts.append(Gust(name, begin, time.monotonic()))
        # Or the breaker would keep the provider out of most of the storm.
        self._place.route.daemon.reset_provider()
