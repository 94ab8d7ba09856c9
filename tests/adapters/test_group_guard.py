"""The guard as it is run: a script by path, isolated, with a pipe for standard input."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from onebitd.adapters import group_guard

SCRIPT = Path(group_guard.__file__)


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start three leaders of process groups of their own."""
    with ExitStack() as stack:
        started = [
            stack.enter_context(subprocess.Popen(["sleep", "3600"], start_new_session=True))
            for _ in range(3)
        ]
        for one in started:
            stack.callback(one.kill)
        yield started


def start() -> subprocess.Popen[bytes]:
    """Run the script as the daemon does."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(SCRIPT)], stdin=subprocess.PIPE, env={}, cwd="/"
    )


def test_group_guard_end_of_input_kills_the_listed_groups_only(
    sleepers: list[subprocess.Popen[bytes]],
) -> None:
    """Added and not removed: killed. Removed, or never added: not."""
    killed, removed, stranger = sleepers
    with start() as guard:
        lines = f"+{killed.pid}\n+{removed.pid}\n-{removed.pid}\n-{stranger.pid}\n"
        guard.communicate(lines.encode(), timeout=20)
    assert guard.returncode == 0
    assert killed.wait(10) == -signal.SIGKILL
    assert removed.poll() is None
    assert stranger.poll() is None


def test_group_guard_group_that_is_gone_does_not_keep_it_from_the_others(
    sleepers: list[subprocess.Popen[bytes]],
) -> None:
    """A group that ended by itself is passed over."""
    gone, *others = sleepers
    gone.kill()
    gone.wait()
    with start() as guard:
        lines = "".join(f"+{one.pid}\n" for one in sleepers)
        guard.communicate(lines.encode(), timeout=20)
    assert guard.returncode == 0
    assert [one.wait(10) for one in others] == [-signal.SIGKILL] * 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_group_guard_signal_that_stops_the_daemon_does_not_stop_it(
    sleepers: list[subprocess.Popen[bytes]], number: signal.Signals
) -> None:
    """A service manager that signals the whole cgroup must not disarm it."""
    with start() as guard:
        assert guard.stdin is not None
        guard.stdin.write(f"+{sleepers[0].pid}\n".encode())
        guard.stdin.flush()
        _wait_signals_ignored(guard.pid)
        guard.send_signal(number)
        guard.communicate(timeout=20)
    assert guard.returncode == 0
    assert sleepers[0].wait(10) == -signal.SIGKILL


def _wait_signals_ignored(pid: int) -> None:
    """Wait until the script has got as far as ignoring the last of them; /proc tells."""
    while True:
        for line in Path(f"/proc/{pid}/status").read_text("ascii").splitlines():
            name, _, mask = line.partition(":")
            if name == "SigIgn" and int(mask, 16) >> (signal.SIGHUP - 1) & 1:
                return
