"""Child processes: the one door through which the daemon starts programs.

A child gets its own session and process group, dies with the daemon (parent-death signal for the
child itself, the guard for its whole group), and is waited for through a pidfd. `Popen` runs on
the trio thread on purpose: a parent-death signal fires when the *thread* that forked ends, and
trio's worker threads end after ten idle seconds. No preexec_fn, so CPython uses vfork.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import trio

from onebitd.adapters import descriptors
from onebitd.core.errors import OnebitError

_GUARD_PROGRAM: Final = Path(__file__).with_name("group_guard.py")
_MAX_LINE_BYTES: Final = 8 * 1024
"""A longer line is cut there; the rest of it is dropped."""
_READ_BYTES: Final = 64 * 1024
_LINES_A_TURN: Final = 200
"""Others get their turn after so many lines: a read may hold 32000 of them, 50 ms of the loop."""
_OOM_SCORE_ADJ: Final = "/proc/self/oom_score_adj"
_SETPRIV_TIMEOUT_S: Final = 10.0
_GONE_FIRST_POLL_S: Final = 0.005
_GONE_LAST_POLL_S: Final = 0.5


class SpawnError(OnebitError):
    """A program could not be started; the message names it and why."""


class Guard:
    """The daemon's end of the guard process; see group_guard.

    One for the daemon's life. `close()` ends it; groups still listed are killed by it.

    Attributes:
        death_signal: words in front of a command line with which the program gets a parent-death
            signal; none where that cannot be had.
    """

    def __init__(self) -> None:
        self.death_signal: Final = _death_signal_prefix()
        read_end, self._write_end = os.pipe2(os.O_CLOEXEC)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_GUARD_PROGRAM)],
                stdin=read_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                env={},
            )
        finally:
            os.close(read_end)

    def add(self, group: int) -> None:
        """Have `group` killed when the daemon dies."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """The group is gone: its number may be given to somebody else."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        # A dead guard is no reason to stop serving: the parent-death signal is still there.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._write_end, line.encode())

    def close(self) -> None:
        """End the guard and reap it."""
        os.close(self._write_end)
        self._process.wait()


def _death_signal_prefix() -> list[str]:
    """Return setpriv's words for a parent-death signal if it works here, else none.

    setpriv(1) sets its capabilities whatever it is asked for (measured, util-linux 2.38), and a
    system call filter may refuse capset(2); the unit's lets it believe that it did. The guard, and
    the service manager, then end the children without it.
    """
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return []
    words = [setpriv, "--pdeathsig", "KILL", "--"]
    try:
        done = subprocess.run(
            [*words, sys.executable, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_SETPRIV_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return words if done.returncode == 0 else []


def find_program(name: str, path: str | None = None) -> str:
    """Return the absolute path of a program, looked up on PATH when it has no slash.

    Raises:
        SpawnError: naming what is missing, or not executable.
    """
    found = shutil.which(name, path=path)
    if found is not None:
        return str(Path(found).absolute())
    if "/" not in name:
        raise SpawnError(f"program {name} is not on PATH; install it or name its full path")
    if not Path(name).exists():
        raise SpawnError(f"program {name} does not exist")
    raise SpawnError(f"program {name} is not an executable file; check its mode")


def _is_program(path: str) -> bool:
    return "/" in path and os.path.isfile(path) and os.access(path, os.X_OK)


class Child:
    """A running program, leader of its own process group.

    Made by `spawn`. Whoever has it must see it end: `wait()`, or `stop()`.
    """

    def __init__(self, popen: subprocess.Popen[bytes], guard: Guard) -> None:
        self._popen = popen
        self._guard = guard
        self._guarded = True
        self._reaped = trio.Lock()
        self.pid = popen.pid
        self._pidfd = os.pidfd_open(popen.pid)
        guard.add(popen.pid)

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._popen.returncode

    @property
    def stdout(self) -> trio.abc.ReceiveStream:
        """Standard output; the caller reads and closes it. To be taken once."""
        assert self._popen.stdout is not None  # noqa: S101 - spawn() always makes the pipe
        return trio.lowlevel.FdStream(os.dup(self._popen.stdout.fileno()))

    @property
    def stderr(self) -> trio.abc.ReceiveStream | None:
        """Standard error, None when it goes where stdout goes. To be taken once."""
        if self._popen.stderr is None:
            return None
        return trio.lowlevel.FdStream(os.dup(self._popen.stderr.fileno()))

    async def wait(self) -> int:
        """Wait until the leader has ended; return its exit status. Cancelling leaves it running."""
        if self._popen.returncode is None:
            try:
                self._reaped.acquire_nowait()  # `async with` gives others a turn: nobody is there
            except trio.WouldBlock:
                await self._reaped.acquire()
            try:
                await self._reap()
            finally:
                self._reaped.release()
        return self._popen.returncode or 0

    async def _reap(self) -> None:
        if self._popen.returncode is None:
            await trio.lowlevel.wait_readable(self._pidfd)
            self._popen.wait()
            self._close_pipes()

    def _close_pipes(self) -> None:
        os.close(self._pidfd)
        for pipe in (self._popen.stdout, self._popen.stderr):
            if pipe is not None:
                pipe.close()

    def signal(self, number: int) -> None:
        """Send a signal to the whole group; nothing happens when it is gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def group_is_gone(self) -> bool:
        """Say whether no process of the group runs any more.

        A zombie does not run: where process 1 reaps nobody (a container without an init), a killed
        grandchild stays one for ever.
        """
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return not _has_running_member(self.pid)

    async def stop(self, *, term_grace_s: float, kill_grace_s: float) -> bool:
        """End the whole group: SIGTERM, a grace, SIGKILL, another grace.

        Shielded: a cancel does not leave it half done; it takes at most both graces.

        Returns:
            True when leader and group are gone; False when something survived SIGKILL (a process
            in uninterruptible sleep); then the caller decides what that means.
        """
        if self._popen.returncode is not None and self.group_is_gone():
            self._unguard()
            return True
        with trio.CancelScope(shield=True):
            for number, grace_s in ((signal.SIGTERM, term_grace_s), (signal.SIGKILL, kill_grace_s)):
                if grace_s <= 0 and number == signal.SIGTERM:
                    continue
                self.signal(number)
                with trio.move_on_after(grace_s):
                    await self.wait_gone()
                    return True
        return False

    async def wait_gone(self) -> None:
        """Wait until the leader has been reaped and its group is empty; then drop the guard."""
        await self.wait()
        pause_s = _GONE_FIRST_POLL_S
        while not self.group_is_gone():  # the kernel has no event for it
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, _GONE_LAST_POLL_S)
        self._unguard()

    def _unguard(self) -> None:
        if self._guarded:
            self._guarded = False
            self._guard.remove(self.pid)


def _has_running_member(group: int) -> bool:
    """Look through /proc for a process of this group that is no zombie (proc_pid_stat(5))."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, _, its_group, *_ = file.read().rpartition(b")")[2].split()
        except (OSError, ValueError):
            continue  # it ended just now
        if int(its_group) == group and state not in (b"Z", b"X"):
            return True
    return False


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    guard: Guard,
    merge_output: bool = False,
    pass_fds: Sequence[int] = (),
    cwd: str = "/",
    oom_score_adj: int | None = None,
) -> Child:
    """Start a program; must be called on the trio thread (see the module's docstring).

    Args:
        argv: the program's absolute path and its arguments.
        env: its whole environment.
        guard: kills its group when the daemon dies.
        merge_output: standard error goes into the same pipe as standard output.
        pass_fds: descriptors it inherits; nothing else is inherited.
        cwd: its working directory.
        oom_score_adj: at least this much does the kernel add to its badness when memory runs out,
            in thousandths of all memory (proc_pid_oom_score_adj(5)); more, where we have more.

    Raises:
        SpawnError: the program cannot be started.
    """
    if not _is_program(argv[0]):
        find_program(argv[0])  # setpriv's own way of saying it is an exit status
    try:
        with _likelier_victim(oom_score_adj):
            popen = subprocess.Popen(
                [*guard.death_signal, *argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if merge_output else subprocess.PIPE,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
                umask=0o077,
                pass_fds=pass_fds,
            )
    except OSError as error:
        reason = os.strerror(error.errno or errno.EIO)
        raise SpawnError(f"program {argv[0]} cannot be started: {reason}") from error
    descriptors.give_back(popen.pid)
    return Child(popen, guard)


@contextlib.contextmanager
def _likelier_victim(oom_score_adj: int | None) -> Iterator[None]:
    """Let what is started inside inherit at least this oom_score_adj.

    Written to the child itself it came too late for what a script had forked by then (measured).
    So it is ours for these milliseconds; raising takes no privilege, and neither does going back:
    the kernel's floor is what was last set with privilege. A /proc that is not there or is
    read-only is no reason not to start anything.
    """
    score = None if oom_score_adj is None else _open_oom_score_adj()
    if score is None or oom_score_adj is None:
        yield
        return
    try:
        before = _number_in(score)
        is_raised = before < oom_score_adj and _wrote(score, oom_score_adj)
        try:
            yield
        finally:
            if is_raised:
                _wrote(score, before)
    finally:
        os.close(score)


def _open_oom_score_adj() -> int | None:
    with contextlib.suppress(OSError):
        return os.open(_OOM_SCORE_ADJ, os.O_RDWR | os.O_CLOEXEC)
    return None


def _number_in(descriptor: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(os.pread(descriptor, 16, 0))
    return sys.maxsize


def _wrote(descriptor: int, number: int) -> bool:
    with contextlib.suppress(OSError):
        return os.pwrite(descriptor, b"%d" % number, 0) > 0
    return False


async def pump_lines(stream: trio.abc.ReceiveStream, on_line: Callable[[bytes], None]) -> None:
    """Hand each line to `on_line` until the pipe ends; memory stays bounded; closes the stream.

    However fast a child writes, other tasks get their turn: after each read, and within one. A
    cancel comes between two reads, and what is in the pipe by then is still handed over: a child's
    last words are what a reason is made of, however late this loop gets to them.
    """
    lines = _Lines()
    try:
        while data := await _receive(stream):
            ready = lines.feed(data)
            for start in range(0, len(ready), _LINES_A_TURN):
                for line in ready[start : start + _LINES_A_TURN]:
                    on_line(line)
                await trio.lowlevel.cancel_shielded_checkpoint()
    except trio.Cancelled:
        for line in [*lines.feed(_read_what_is_there(stream)), *lines.end()]:
            on_line(line)
        raise
    finally:
        if isinstance(stream, trio.lowlevel.FdStream):
            stream.close()
        else:
            await trio.aclose_forcefully(stream)
    for line in lines.end():
        on_line(line)


async def _receive(stream: trio.abc.ReceiveStream) -> bytes:
    try:
        if not isinstance(stream, trio.lowlevel.FdStream):
            return bytes(await stream.receive_some(_READ_BYTES))
        while True:  # a stream would try first, and give others a turn, where nothing is there yet
            await trio.lowlevel.wait_readable(stream.fileno())
            with contextlib.suppress(BlockingIOError):
                return os.read(stream.fileno(), _READ_BYTES)
    except (OSError, trio.BrokenResourceError):
        return b""


def _read_what_is_there(stream: trio.abc.ReceiveStream) -> bytes:
    """Return what a pipe holds at the moment, at most one pipe full."""
    if isinstance(stream, trio.lowlevel.FdStream):
        with contextlib.suppress(OSError, trio.ClosedResourceError):
            return os.read(stream.fileno(), _READ_BYTES)
    return b""


class _Lines:
    """Makes lines of pieces: cut to _MAX_LINE_BYTES, without their ends."""

    def __init__(self) -> None:
        self._held = b""
        self._overlong = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are whole by now, and the head of one that is too long."""
        *found, self._held = (self._held + data).split(b"\n")
        if found and self._overlong:
            del found[0]  # the rest of one whose head came out before
            self._overlong = False
        if len(self._held) > _MAX_LINE_BYTES:
            if not self._overlong:
                found.append(self._held)
            self._overlong = True
            self._held = b""
        return [line[:_MAX_LINE_BYTES].rstrip(b"\r") for line in found]

    def end(self) -> list[bytes]:
        """Return the last line, if it had no end."""
        held, self._held = self._held, b""
        return [held] if held and not self._overlong else []


def describe_exit(returncode: int) -> str:
    """Return `status 3` or `signal 6 (SIGABRT)`."""
    if returncode >= 0:
        return f"status {returncode}"
    with contextlib.suppress(ValueError):
        return f"signal {-returncode} ({signal.Signals(-returncode).name})"
    return f"signal {-returncode}"
