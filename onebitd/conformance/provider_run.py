"""One run of a provider as onebitd runs it, and everything about it that can be seen from outside.

A run has a directory of its own with the ids file, an environment, a session, and an end: by
itself, by a signal that the kit sends, or by its time limit. Its group is empty afterwards.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from onebitd import prefill_llama
from onebitd.adapters import leases
from onebitd.adapters.pread import PreadSource
from onebitd.adapters.state_reader import OPEN_FLAGS
from onebitd.conformance import watch
from onebitd.conformance.output_tail import OutputTail
from onebitd.core import provider_contract

TERM_GRACE_S: Final = 2.0
"""Between SIGTERM and SIGKILL, as onebitd has it for a run past its time limit."""
CANCEL_GRACE_S: Final = 0.4
"""The same when a client has left."""
_KILL_WAIT_S: Final = 5.0
_LINGER_S: Final = 0.2
"""A child that ends so soon after its parent was on its way out."""
_POLL_S: Final = 0.01


@dataclass(frozen=True)
class Ended:
    """What one run did.

    Attributes:
        status: exit status, a signal as a negative number.
        timed_out: it did not end within its time limit, or within the grace after SIGTERM.
        wall_s: from its start to its end.
        grace_s: from the signal to its end, None if it was sent none.
        signalled: the signal reached it while it ran.
        was_there: the state file had its name when the program ended.
        in_place: it was written under that name instead of being renamed to it.
        left_running: what of its process group still ran, described.
        escaped: what runs on in another group.
        leftovers: names in its directory beside the ids file and the state file.
        stdout, stderr: the last 64 KiB of each.
        directory_problem: what it did to its directory that nobody may do.
    """

    status: int
    timed_out: bool
    wall_s: float
    grace_s: float | None
    signalled: bool
    was_there: bool
    in_place: bool
    left_running: tuple[str, ...]
    escaped: tuple[str, ...]
    leftovers: tuple[str, ...]
    stdout: bytes
    stderr: bytes
    directory_problem: str | None = None

    @property
    def last_words(self) -> str:
        """What onebitd would take as the detail of a failure."""
        return provider_contract.last_line(self.stderr)


@dataclass(frozen=True)
class Invocation:
    """What the kit runs, the same for every run.

    Attributes:
        program: the provider, an absolute path.
        elfs: passed as `--elfs` when it is not None.
        environ: of the provider; its ONEBIT_STATE_EXAMPLE has `mark` in it.
        mark: a word that finds every descendant by its environment.
    """

    program: str
    model: str
    elfs: str | None
    environ: Mapping[str, str]
    mark: str
    timeout_s: float


class ProviderRun:
    """One run. `directory` is made by the constructor; `remove` takes it away with all in it.

    Args:
        ids: text of the ids file.
        model: another model than the invocation's.
        out: another place for the state file than in the directory.
    """

    def __init__(
        self,
        invocation: Invocation,
        directory: Path,
        ids: bytes,
        *,
        model: str | None = None,
        out: Path | None = None,
    ) -> None:
        self.directory = directory
        directory.mkdir(mode=0o700)
        self.tokens = directory / provider_contract.TOKENS_FILE
        self.tokens.write_bytes(ids)
        self.out = out or directory / provider_contract.STATE_FILE
        self._known = {path.name for path in directory.iterdir()} | {self.out.name}
        if out is not None and out.parent != directory:
            self._known.add(out.parent.name)
        self._invocation = invocation
        self._argv = provider_contract.file_route_argv(
            invocation.program,
            tokens_file=str(self.tokens),
            state_file=str(self.out),
            model=model or invocation.model,
            elfs=invocation.elfs,
        )
        self._popen: subprocess.Popen[bytes] | None = None
        self._outputs: list[OutputTail] = []
        self._watch: watch.DirectoryWatch | None = None
        self._started = 0.0

    @property
    def command(self) -> Sequence[str]:
        """The command line."""
        return self._argv

    def start(self, signals: prefill_llama.StopSignals) -> None:
        """Start it; OSError when the program cannot be started."""
        self._watch = watch.DirectoryWatch(self.directory)
        with signals.held():
            self._started = time.monotonic()
            self._popen = subprocess.Popen(
                [*prefill_llama.death_signal_prefix(), *self._argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(self._invocation.environ),
                cwd="/",
                start_new_session=True,
                umask=0o077,
            )
            pipes = (self._popen.stdout, self._popen.stderr)
            self._outputs = [OutputTail(pipe) for pipe in pipes if pipe is not None]

    def output(self) -> dict[str, bytes]:
        """Return the last of what it wrote, by `stdout` and `stderr`; nothing before `start`."""
        return dict(
            zip(("stdout", "stderr"), (tail.read() for tail in self._outputs), strict=False)
        )

    def finish(self, *, signum: int | None = None, after_s: float = 0.0) -> Ended:
        """Wait for its end, or bring that about after some seconds, and look at what is there.

        Args:
            signum: sent to the whole group `after_s` seconds after the start if it still runs.
        """
        popen = self._popen
        assert popen is not None  # noqa: S101 - start() came first
        signalled, timed_out, sent_at = False, False, None
        if signum is not None:
            left_s = self._started + after_s - time.monotonic()
            if not self._wait(popen, max(0.0, left_s)):
                signalled, sent_at = True, time.monotonic()
                self._signal(popen, signum)
        limit_s = self._invocation.timeout_s if sent_at is None else TERM_GRACE_S
        since = self._started if sent_at is None else sent_at
        if not self._wait(popen, max(0.0, since + limit_s - time.monotonic())):
            timed_out = True
            self._signal(popen, signal.SIGKILL)
        popen.wait()
        ended_at = time.monotonic()
        was_there = os.path.lexists(self.out)
        left_running = self._linger(popen.pid)
        self._signal(popen, signal.SIGKILL)
        self._wait_group(popen.pid)
        escaped = tuple(map(watch.describe, watch.processes_with(self._invocation.mark)))
        assert self._watch is not None  # noqa: S101 - start() came first
        in_place = self._watch.written_in_place(self.out.name)
        found, problem = _names_in(self.directory)
        return Ended(
            status=popen.returncode,
            timed_out=timed_out,
            wall_s=ended_at - self._started,
            grace_s=None if sent_at is None else ended_at - sent_at,
            signalled=signalled,
            was_there=was_there,
            in_place=in_place,
            left_running=left_running,
            escaped=escaped,
            leftovers=tuple(sorted(found - self._known)),
            directory_problem=problem,
            **self.output(),
        )

    def _wait(self, popen: subprocess.Popen[bytes], timeout_s: float) -> bool:
        """Wait without polling; Popen.wait would add up to 50 ms to every time measured."""
        if popen.poll() is not None:
            return True
        descriptor = os.pidfd_open(popen.pid)
        try:
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            poller.poll(timeout_s * 1000.0)
        finally:
            os.close(descriptor)
        return popen.poll() is not None

    def _signal(self, popen: subprocess.Popen[bytes], signum: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(popen.pid, signum)

    def _linger(self, group: int) -> tuple[str, ...]:
        """Return what of the group does not end by itself right away."""
        deadline = time.monotonic() + _LINGER_S
        while (members := watch.group_members(group)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return tuple(map(watch.describe, members))

    def _wait_group(self, group: int) -> None:
        deadline = time.monotonic() + _KILL_WAIT_S
        while watch.group_members(group) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Kill what still runs and close what is open; the directory stays."""
        if self._popen is not None:
            self._signal(self._popen, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(_KILL_WAIT_S)
        if self._watch is not None:
            self._watch.close()
        for output in self._outputs:
            output.close()


class OpenState(PreadSource):
    """A state file of a provider, opened without following or waiting. `close` it."""

    def __init__(self, path: Path) -> None:
        super().__init__(os.open(path, OPEN_FLAGS))

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.descriptor)


def file_problem(path: Path) -> str | None:
    """Return why onebitd would not take what lies at a path as a state file, None if it would."""
    try:
        info = path.lstat()
    except OSError as error:
        return f"cannot be looked at: {error.strerror}"
    if stat.S_ISLNK(info.st_mode):
        return "is a symbolic link"
    if not stat.S_ISREG(info.st_mode):
        return "is not a regular file"
    if info.st_nlink != 1:
        return f"has {info.st_nlink} names; move it instead of linking it"
    try:
        opened = OpenState(path)
    except OSError as error:
        return f"cannot be opened: {error.strerror}"
    try:
        is_written = leases.has_writer(opened.descriptor)
    finally:
        opened.close()
    return "is still open for writing in some process" if is_written else None


def _names_in(directory: Path) -> tuple[set[str], str | None]:
    """Return the names in a run's directory, and what the provider did to it, if anything."""
    try:
        if not stat.S_ISDIR(directory.lstat().st_mode):
            return set(), "it put something else in the place of its run directory"
        return set(os.listdir(directory)), None
    except FileNotFoundError:
        return set(), "it removed its run directory; leave that to onebitd"
    except OSError as error:
        return set(), f"its run directory cannot be read any more: {error.strerror}"
