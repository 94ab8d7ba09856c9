"""onebitd.adapters.systemd against a real datagram socket and a real exec."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onebitd.adapters.systemd import ServiceManager
from onebitd.core.errors import ConfigError

VARIABLES = (
    "NOTIFY_SOCKET",
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
)


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=["path", "abstract"])
def manager_socket(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[socket.socket]:
    """Play systemd's end, bound to a path and to an abstract name."""
    if request.param == "path":
        address = variable = str(tmp_path / "notify")
    else:
        address = f"\0onebitd-test-{os.getpid()}"
        variable = "@" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(address)
        sock.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", variable)
        yield sock


@pytest.fixture
def manager(manager_socket: socket.socket) -> Iterator[ServiceManager]:
    del manager_socket
    made = ServiceManager()
    yield made
    made.close()


def drain(sock: socket.socket) -> list[str]:
    """Return every datagram that waits there."""
    found = []
    while True:
        try:
            found.append(sock.recv(65536).decode())
        except BlockingIOError:
            return found


def test_manager_notifications_arrive_as_written(
    manager_socket: socket.socket, manager: ServiceManager
) -> None:
    """Each method sends its one datagram, in UTF-8, a status in one line."""
    assert manager.present
    manager.status("loading\nqwen: 50 % läuft …")
    manager.extend_timeout(2.5)
    manager.ready("serving")
    manager.stopping()
    assert drain(manager_socket) == [
        "STATUS=loading qwen: 50 % läuft …",
        "EXTEND_TIMEOUT_USEC=2500000",
        "READY=1\nSTATUS=serving",
        "STOPPING=1",
    ]


def test_manager_takes_its_variables_out_of_the_environment(
    manager_socket: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No child can inherit any of the six."""
    del manager_socket
    for name in VARIABLES[1:]:
        monkeypatch.setenv(name, "1")
    manager = ServiceManager()
    manager.close()
    assert not [name for name in VARIABLES if name in os.environ]
    shown = subprocess.run(["env"], stdout=subprocess.PIPE, check=True).stdout.decode()
    assert "NOTIFY_SOCKET" not in shown


def test_manager_absent_every_call_is_a_no_op() -> None:
    """Without systemd nothing is sent, nothing is open, nothing raises."""
    before = sorted(os.listdir("/proc/self/fd"))
    manager = ServiceManager()
    assert not manager.present
    manager.ready()
    manager.status("x")
    manager.stopping()
    manager.extend_timeout(1)
    manager.watchdog()
    manager.close()
    assert manager.listen_fds() == {}
    assert manager.watchdog_interval_s is None
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_manager_socket_gone_is_a_no_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NOTIFY_SOCKET that nobody listens on neither raises nor leaks a descriptor."""
    before = sorted(os.listdir("/proc/self/fd"))
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "none"))
    manager = ServiceManager()
    manager.ready()
    assert not manager.present
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert "NOTIFY_SOCKET" not in os.environ


def test_manager_queue_full_does_not_block_and_ready_arrives_later(
    manager_socket: socket.socket, manager: ServiceManager
) -> None:
    """A manager that does not read costs status lines, never a wait; READY goes out first later."""
    for number in range(10_000):
        manager.status(f"line {number}")
    manager.ready()
    manager.stopping()
    waiting = drain(manager_socket)
    assert 0 < len(waiting) < 10_000
    assert "READY=1" not in waiting
    manager.status("now")
    assert drain(manager_socket) == ["READY=1", "STOPPING=1", "STATUS=now"]


def test_manager_closed_is_silent(manager_socket: socket.socket, manager: ServiceManager) -> None:
    """After close nothing is sent and nothing raises."""
    manager.close()
    manager.ready()
    assert drain(manager_socket) == []


@pytest.mark.parametrize(
    ("pid", "usec", "expected"),
    [
        ("own", "30000000", 15.0),
        ("", "30000000", 15.0),
        ("1", "30000000", None),
        ("own", "", None),
        ("own", "0", None),
        ("own", "x", None),
    ],
)
def test_watchdog_interval_is_half_the_limit_if_meant_for_us(
    pid: str, usec: str, expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interval is half of WATCHDOG_USEC, and None when the watchdog is another process's."""
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()) if pid == "own" else pid)
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    assert ServiceManager().watchdog_interval_s == expected


def test_watchdog_pings_only_when_asked_for(
    manager_socket: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WATCHDOG=1 is sent when the manager watches, and not otherwise."""
    address = os.environ["NOTIFY_SOCKET"]
    unwatched = ServiceManager()
    unwatched.watchdog()
    unwatched.close()
    assert drain(manager_socket) == []
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    monkeypatch.setenv("WATCHDOG_USEC", "2000000")
    watched = ServiceManager()
    watched.watchdog()
    watched.close()
    assert drain(manager_socket) == ["WATCHDOG=1"]


PASSED = """
import json, os, subprocess, sys
from onebitd.adapters.systemd import ServiceManager
manager = ServiceManager()
fds = manager.listen_fds()
inheritable = [os.get_inheritable(fd) for group in fds.values() for fd in group]
print(json.dumps([fds, inheritable, "LISTEN_FDS" in os.environ]))
"""


def run_with_passed(
    *, count: int, names: str | None, pid: str = "$$"
) -> subprocess.CompletedProcess[bytes]:
    """Exec a Python with sockets on 3 and 4, as systemd does."""
    with socket.socket() as one, socket.socket() as two:
        script = (
            f"exec 3<&{one.fileno() + 100} 4<&{two.fileno() + 100}; "
            f'export LISTEN_PID={pid} LISTEN_FDS={count}; exec "$0" -c "$1"'
        )
        high = [os.dup2(sock.fileno(), sock.fileno() + 100) for sock in (one, two)]
        env = dict(os.environ)
        if names is not None:
            env["LISTEN_FDNAMES"] = names
        try:
            return subprocess.run(
                ["bash", "-c", script, sys.executable, PASSED],
                env=env,
                pass_fds=high,
                capture_output=True,
                check=False,
            )
        finally:
            for fd in high:
                os.close(fd)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("http:control", {"http": [3], "control": [4]}),
        ("http:http", {"http": [3, 4]}),
        ("http", {"http": [3], "unknown": [4]}),
        (None, {"unknown": [3, 4]}),
    ],
)
def test_listen_fds_passed_by_exec_are_named_and_not_inheritable(
    names: str | None, expected: dict[str, list[int]]
) -> None:
    """Descriptors from 3 on come by name, close-on-exec, the variables gone."""
    done = run_with_passed(count=2, names=names)
    assert json.loads(done.stdout) == [expected, [False, False], False], done.stderr.decode()


def test_listen_fds_for_another_process_are_ignored() -> None:
    """A LISTEN_PID that is not ours (an inherited environment) means no sockets."""
    done = run_with_passed(count=2, names="http:control", pid="1")
    assert json.loads(done.stdout)[0] == {}, done.stderr.decode()


@pytest.mark.parametrize("count", ["900", "x"])
def test_listen_fds_that_are_not_there_are_a_config_error(
    count: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A count that does not fit what is open is refused with a sentence."""
    # 3 up to some number may be this process's own files: only closed numbers may be touched.
    monkeypatch.setattr("onebitd.adapters.systemd.FIRST_PASSED_FD", 5000)
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", count)
    with pytest.raises(ConfigError, match="LISTEN_FDS"):
        ServiceManager()
