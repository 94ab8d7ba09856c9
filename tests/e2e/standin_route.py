"""One onebitd on the stand-in decoder and provider, told anew for each test how they behave."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.harness import (
    STANDINS,
    HttpReply,
    RunningDaemon,
    clean_environ,
    onebitd_argv,
    running_onebitd,
    wait_until,
    with_sockets,
)
from tests.standins import share_front, tiny_decoder, tiny_state

DECODER = STANDINS / "llama_server.py"
PROVIDER = STANDINS / "provider.py"
# The stand-ins' `env python3` is then this interpreter, without a version manager's shim.
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def quick_provider(directory: Path) -> Path:
    """Return the provider stand-in without site-packages: it starts in a quarter of the time."""
    program = directory / "provider"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S {PROVIDER} "$@"\n')
    program.chmod(0o755)
    return program


def said(prompt: str, count: int = 8) -> str:
    """Return what the stand-in decoder says to a prompt, by its model's definition."""
    digest = tiny_state.digests(tiny_decoder.tokenize(prompt))[-1]
    words = []
    for _ in range(count):
        token = tiny_decoder.said_after(digest)
        words.append(tiny_decoder.piece(token))
        digest = tiny_state.next_digest(digest, token)
    return "".join(words)


def chat_prompt(content: str) -> str:
    """Return the templated prompt of a chat of one user message."""
    return tiny_decoder.template([{"role": "user", "content": content}])


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON lines of a file, none when it is not there."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


@dataclass
class Route:
    """A running daemon and what its stand-ins have written down since the test began."""

    daemon: RunningDaemon
    home: Path
    slots_dir: Path
    _marks: dict[str, int] = field(default_factory=dict)
    _before: dict[str, Any] = field(default_factory=dict)
    quiet: dict[str, Any] = field(default_factory=dict)
    """What an idle daemon has; see left_over."""

    @property
    def lock_path(self) -> Path:
        """The device lock of this daemon."""
        return self.home / "npu.lock"

    def behave(self, *, provider: str = "", decoder: str = "", front: str = "") -> None:
        """Set the provider's modes, the decoder's knobs and those of the front from now on."""
        (self.home / "mode").write_text(provider)
        # In one step: a decoder that is busy reads them all the time.
        (self.home / "knobs.new").write_text(decoder)
        (self.home / "knobs.new").replace(self.home / "knobs")
        for counter in self.home.glob("front-knobs.*"):
            counter.unlink()
        (self.home / "front-knobs").write_text(front)

    def begin(self) -> None:
        """Forget what came before, the daemon too; both stand-ins behave well."""
        self.behave()
        self.daemon.reset_provider()
        self.forget()

    def forget(self) -> None:
        """Forget what has been recorded and counted so far."""
        self._marks = {name: len(read_lines(self.home / name)) for name in _RECORDS}
        self._before = self.daemon.status()["handoffs"]

    def _new(self, name: str) -> list[dict[str, Any]]:
        return read_lines(self.home / name)[self._marks.get(name, 0) :]

    def backend(self, *targets: str) -> list[dict[str, Any]]:
        """Return the requests that reached the decoder, those of some paths if named."""
        found = self._new("record")
        return [one for one in found if not targets or one["target"].split("?")[0] in targets]

    def backend_end(self, request: Mapping[str, Any]) -> float:
        """Return when the decoder was done with a request."""
        wanted = (request["pid"], request["n"])

        def ended() -> float | None:
            return next(
                (one["end"] for one in self._new("record.end") if (one["pid"], one["n"]) == wanted),
                None,
            )

        return float(wait_until(ended, "the end of a request"))

    def runs(self) -> list[dict[str, Any]]:
        """Return the provider's runs."""
        return self._new("provider")

    def counted(self) -> Counter[str]:
        """Return how the counters of outcomes and reasons have moved."""
        now = self.daemon.status()["handoffs"]
        moved: Counter[str] = Counter()
        for name, value in now.items():
            if name != "by_reason":
                moved[name] = value - self._before[name]
        for name, value in now["by_reason"].items():
            moved[name] = value - self._before["by_reason"].get(name, 0)
        return +moved

    def record_of(self, reply: HttpReply | str) -> dict[str, Any]:
        """Return the record of a reply or request id, the same in the log and on the socket."""
        request_id = reply if isinstance(reply, str) else reply.headers["x-request-id"]

        def find() -> list[dict[str, Any]]:
            shown = [one for one in self.daemon.handoffs() if one["request_id"] == request_id]
            logged = self.daemon.log_records("handoff")
            return shown if any(one["request_id"] == request_id for one in logged) else []

        found = wait_until(find, f"the record of {request_id}")
        lines = self.log_lines(request_id)
        assert len(found) == len(lines) == 1
        assert {name: lines[0].get(name) for name in found[0]} == found[0]
        return dict(found[0])

    def log_lines(self, request_id: str) -> list[dict[str, Any]]:
        """Return the handoff lines of a request in the log."""
        logged = self.daemon.log_records("handoff")
        return [one for one in logged if one["request_id"] == request_id]

    def line_of(self, reply: HttpReply) -> str:
        """Return the human text of a reply's handoff."""
        return str(self.log_lines(reply.headers["x-request-id"])[0]["line"])

    @property
    def example(self) -> Path:
        """The state file of the decoder's own that is there while it runs."""
        return self.slots_dir / "example.state"

    def left_over(self) -> dict[str, Any]:
        """Return what a request could have left behind."""
        status = self.daemon.status()
        kinds = Counter(name.split(":")[0] for name in self.daemon.open_files())
        return {
            "files": sorted(path.name for path in self.slots_dir.iterdir() if path != self.example),
            "processes": len(self.daemon.children()),
            "descriptors": kinds,
            "slot": status["slot"]["busy"],
            "pending": status["queue"]["pending"],
            "provider": status["provider"]["state"],
            "lock": is_locked(self.lock_path),
        }


_RECORDS = ("record", "record.end", "provider", "provider.end")


def is_locked(path: Path) -> bool:
    """Say whether some process holds a lock file; a missing one nobody holds."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextlib.contextmanager
def running_route(
    *args: str,
    config: str = "",
    lock: str = "wait_s = 1",
    state_dir: Path | None = None,
    decoder: Sequence[str] = (),
    provider: bool | Path = True,
    env: Mapping[str, str] | None = None,
    wait_ready: bool = True,
    passed: Mapping[str, socket.socket] | None = None,
    front_regions: int | None = None,
    log_level: str = "info",
) -> Iterator[Route]:
    """Run onebitd on both stand-ins.

    Args:
        args: more flags.
        config: more TOML, without [lock], [log], [model], provider.env and handoff.state_dir.
        lock: what [lock] holds besides its path.
        state_dir: handoff.state_dir.
        decoder: more arguments of the stand-in decoder.
        provider: whether one is named, or another than the stand-in.
        env: more environment.
        wait_ready, passed, log_level: see running_onebitd.
        front_regions: the decoder stands behind tests/standins/share_front.py, which shares so many
            descriptors; what reaches the front is recorded as the decoder's requests.
    """
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        (home / "tiny.gguf").write_bytes(tiny_state.gguf())
        toml = config
        if state_dir is not None:
            toml += f'\n[handoff]\nstate_dir = "{state_dir}"\n'
        toml += f'\n[lock]\npath = "{home / "npu.lock"}"\n{lock}\n'
        toml += f'[provider.env]\nFAKE_PREFILL_MODE = "@{home / "mode"}"\n'
        toml += f'FAKE_PREFILL_LOG = "{home / "provider"}"\n'
        toml += f'FAKE_PREFILL_LOCK = "{home / "npu.lock"}"\n'
        knobs = ("--record", str(home / "record"), "--knobs", str(home / "knobs"))
        program = DECODER
        if front_regions is not None:
            knobs = ("--record", str(home / "inner"), *knobs[2:])
            program = share_front.launcher(
                home,
                DECODER,
                knobs=home / "front-knobs",
                record=home / "record",
                SHARE_FRONT_REGIONS=str(front_regions),
            )
        with running_onebitd(
            *args,
            model=home / "tiny.gguf",
            llama_server=program,
            provider=PROVIDER if provider is True else provider or None,
            backend_args=(*knobs, *decoder),
            config=toml,
            env={"PATH": PATH, **(env or {})},
            wait_ready=wait_ready,
            passed=passed,
            log_level=log_level,
        ) as daemon:
            slots = daemon.runtime / "slots" if state_dir is None else state_dir / "test"
            route = Route(daemon, home, slots)
            if wait_ready:
                route.begin()
                route.quiet = route.left_over()
            yield route


@contextlib.contextmanager
def leaves_nothing(route: Route) -> Iterator[Route]:
    """Begin a test on a shared daemon, and see at its end that it left nothing."""
    route.begin()
    yield route
    route.behave()
    left: dict[str, Any] = {}

    def is_clean() -> bool:
        left.update(route.left_over())
        return _is_as(left, route.quiet)

    try:
        wait_until(is_clean, "nothing is left", 10.0)
    except AssertionError:
        raise AssertionError(f"left: {left}, a quiet daemon has: {route.quiet}") from None


def _is_as(left: dict[str, Any], quiet: dict[str, Any]) -> bool:
    """Compare two looks; a socket or two may still be closing, a third one is a leak."""
    sockets = left["descriptors"]["socket"] - quiet["descriptors"]["socket"]
    others = [Counter(look["descriptors"]) for look in (left, quiet)]
    for counter in others:
        del counter["socket"]
    return sockets <= 2 and others[0] == others[1] and _others(left) == _others(quiet)


def _others(look: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in look.items() if name != "descriptors"}


class Background:
    """A request in a thread of its own; `join()` returns its reply or raises its error."""

    def __init__(self, send: Any, *args: Any, **kwargs: Any) -> None:
        self._reply: HttpReply | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(send, args, kwargs))
        self._thread.start()

    def _run(self, send: Any, args: Any, kwargs: Any) -> None:
        try:
            self._reply = send(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - raised again by join()
            self._error = error

    def join(self) -> HttpReply:
        """Wait for the reply."""
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        assert self._reply is not None
        return self._reply


def run_onebitd(
    *args: str,
    runtime: Path,
    env: Mapping[str, str] | None = None,
    passed: Mapping[str, socket.socket] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run onebitd to its end; for what ends by itself. `passed`: see running_onebitd."""
    with with_sockets(onebitd_argv(*args), passed or {}) as (argv, more, fds):
        return subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=clean_environ(runtime, PATH=PATH, **(env or {}), **more),
            cwd="/",
            pass_fds=fds,
        )


def printed_backend(*args: str, runtime: Path, env: Mapping[str, str] | None = None) -> list[str]:
    """Return the words that --print-backend prints; AssertionError unless it exits 0."""
    done = run_onebitd("--print-backend", *args, runtime=runtime, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    return shlex.split(done.stdout)
