"""onebitd.adapters.listeners on the real kernel."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from onebitd.adapters import listeners
from onebitd.core.errors import ConfigError, InstanceTaken

RunChild = Callable[..., tuple[subprocess.Popen[bytes], str]]

LISTEN = """
import socket, sys
sock = socket.socket()
sock.bind(("127.0.0.1", 0))
sock.listen()
print(sock.getsockname()[1], flush=True)
sys.stdin.read()
"""
LISTEN_UNIX = """
import socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.bind(sys.argv[1])
sock.listen(int(sys.argv[2]))
print("listening", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run_child() -> Iterator[RunChild]:
    """Start Python scripts, give back (process, its first line), end them all."""
    started: list[subprocess.Popen[bytes]] = []

    def run(script: str, *args: object) -> tuple[subprocess.Popen[bytes], str]:
        process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().decode().strip()

    yield run
    for process in started:
        process.kill()
        process.communicate()


def close_all(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


def has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_open_tcp_port_zero_listens_and_is_not_inheritable() -> None:
    """Port 0 gives a free one that accepts connections and that no child inherits."""
    sockets = listeners.open_tcp("127.0.0.1", 0, 16)
    try:
        assert len(sockets) == 1
        address = sockets[0].getsockname()
        assert address[1] > 0
        assert not sockets[0].get_inheritable()
        with socket.create_connection(address, timeout=5):
            pass
    finally:
        close_all(sockets)


def test_open_tcp_localhost_has_one_port_for_every_family() -> None:
    """A name gives one socket an address, all on the same port."""
    sockets = listeners.open_tcp("localhost", 0, 16)
    try:
        families = [sock.family for sock in sockets]
        assert socket.AF_INET in families
        assert len(set(families)) == len(families)
        assert len({sock.getsockname()[1] for sock in sockets}) == 1
    finally:
        close_all(sockets)


@pytest.mark.skipif(not has_ipv6_loopback(), reason="no IPv6 loopback here")
def test_open_tcp_ipv6_leaves_ipv4_alone() -> None:
    """An IPv6 socket takes no IPv4 connections, so both families can share the port."""
    sockets = listeners.open_tcp("::", 0, 16)
    try:
        port = sockets[0].getsockname()[1]
        others = listeners.open_tcp("127.0.0.1", port, 16)
        close_all(others)
    finally:
        close_all(sockets)


def test_open_tcp_taken_names_port_and_holder(run_child: RunChild) -> None:
    """A port in use is InstanceTaken (exit 3) and names the process that listens there."""
    process, port = run_child(LISTEN)
    with pytest.raises(InstanceTaken) as caught:
        listeners.open_tcp("127.0.0.1", int(port))
    message = str(caught.value)
    assert f"port {port} on 127.0.0.1 is taken by pid {process.pid} (" in message
    assert sys.executable in message
    assert "--port" in message
    assert caught.value.exit_status == 3


def test_open_tcp_taken_by_the_wildcard_names_the_holder(run_child: RunChild) -> None:
    """A listener on all addresses is found as the holder of one of them."""
    process, port = run_child(LISTEN.replace("127.0.0.1", ""))
    with pytest.raises(InstanceTaken, match=f"pid {process.pid} "):
        listeners.open_tcp("127.0.0.1", int(port))


def test_open_tcp_half_taken_leaves_nothing_open() -> None:
    """When the second address of a name is taken, the socket of the first is closed again."""
    with socket.socket() as other:
        other.bind(("127.0.0.2", 0))
        other.listen()
        port = other.getsockname()[1]
        addresses = [(socket.AF_INET, (ip, port)) for ip in ("127.0.0.1", "127.0.0.2")]
        before = sorted(os.listdir("/proc/self/fd"))
        with pytest.raises(InstanceTaken, match=f"port {port} on 127.0.0.2 is taken"):
            # A name with two addresses of which one is taken; no resolver here gives one.
            listeners._bind_all("name", port, addresses, 8)
        assert sorted(os.listdir("/proc/self/fd")) == before
    close_all(listeners.open_tcp("127.0.0.1", port))


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("192.0.2.1", 0, "http.host: cannot listen on 192.0.2.1"),
        ("no-such-host.invalid", 0, "http.host: 'no-such-host.invalid' cannot be resolved"),
        ("a" * 70 + ".invalid", 0, "cannot be resolved"),
    ],
)
def test_open_tcp_impossible_host_is_a_config_error(host: str, port: int, words: str) -> None:
    """An address that is not here or a name that is none is said in a sentence."""
    with pytest.raises(ConfigError) as caught:
        listeners.open_tcp(host, port)
    assert words in str(caught.value)


def test_open_tcp_privileged_port_is_a_config_error() -> None:
    """A port below 1024 without the right to it says what to do."""
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    script = (
        "import os\n"
        "from onebitd.adapters import listeners\n"
        "from onebitd.core.errors import ConfigError\n"
        "listeners.open_tcp('127.0.0.1', 0)\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try:\n"
        "    listeners.open_tcp('127.0.0.1', 81)\n"
        "except ConfigError as exc:\n"
        "    print(exc)\n"
        "else:\n"
        "    print('open to all')\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], stdout=subprocess.PIPE, check=True
    )
    if done.stdout == b"open to all\n":
        pytest.skip("net.ipv4.ip_unprivileged_port_start lets everybody")
    assert b"may not listen on port 81" in done.stdout
    assert b"above 1023" in done.stdout


@pytest.mark.parametrize("mode", [0o600, 0o660])
@pytest.mark.parametrize("umask", [0o000, 0o027, 0o077])
def test_open_unix_mode_is_exact_whatever_the_umask(tmp_path: Path, mode: int, umask: int) -> None:
    """The socket has exactly the mode asked for, accepts, and is not inheritable."""
    path = tmp_path / "control.sock"
    old = os.umask(umask)
    try:
        with listeners.open_unix(path, mode) as sock:
            assert stat.S_IMODE(path.stat().st_mode) == mode
            assert not sock.get_inheritable()
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
    finally:
        os.umask(old)


def test_open_unix_mode_is_never_wider_between_bind_and_chmod(tmp_path: Path) -> None:
    """The kernel makes the file with the descriptor's mode, so that no moment is open to all."""
    path = tmp_path / "s"
    old = os.umask(0)
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            os.fchmod(sock.fileno(), 0o600)
            sock.bind(str(path))
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(old)


def test_open_unix_stale_socket_is_replaced(tmp_path: Path) -> None:
    """A socket file that a killed daemon left behind does not keep the next one from starting."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(path))
        old.listen()
    with socket.socket(socket.AF_UNIX) as client:
        with pytest.raises(ConnectionRefusedError):
            client.connect(str(path))
        with listeners.open_unix(path, 0o600):
            client.connect(str(path))


@pytest.mark.parametrize("backlog", [8, 0])
def test_open_unix_live_socket_is_kept(tmp_path: Path, run_child: RunChild, backlog: int) -> None:
    """A socket that somebody serves is InstanceTaken and stays, even if its backlog is full."""
    path = tmp_path / "s"
    process, _ = run_child(LISTEN_UNIX, path, backlog)
    inode = path.stat().st_ino
    clients = []
    if backlog == 0:
        for _ in range(2):
            client = socket.socket(socket.AF_UNIX)
            client.setblocking(False)
            clients.append(client)
            if client.connect_ex(str(path)) != 0:
                break
        else:
            pytest.fail("the backlog does not fill")
    with pytest.raises(InstanceTaken) as caught:
        listeners.open_unix(path, 0o600)
    close_all(clients)
    assert str(path) in str(caught.value)
    if backlog:
        assert f"pid {process.pid} " in str(caught.value)
    assert path.stat().st_ino == inode


@pytest.mark.parametrize("kind", ["file", "directory", "symlink"])
def test_open_unix_something_else_there_is_kept(tmp_path: Path, kind: str) -> None:
    """A path that names no socket is a ConfigError, and what is there stays."""
    path = tmp_path / "s"
    if kind == "file":
        path.write_text("keep")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="something else is there"):
        listeners.open_unix(path, 0o600)
    assert path.is_symlink() or path.exists()


def test_open_unix_path_length_limit_is_named(tmp_path: Path) -> None:
    """107 bytes work; one more is refused with the limit, before anything is touched."""
    room = listeners.UNIX_PATH_BYTES - len(os.fsencode(tmp_path)) - 1
    assert room > 0
    with listeners.open_unix(tmp_path / ("x" * room), 0o600):
        pass
    with pytest.raises(ConfigError, match="has 108 bytes and the kernel takes at most 107"):
        listeners.open_unix(tmp_path / ("x" * (room + 1)), 0o600)


def test_open_unix_no_directory_is_a_config_error(tmp_path: Path) -> None:
    """A missing directory is said, and no descriptor stays open."""
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="No such file or directory"):
        listeners.open_unix(tmp_path / "none" / "s", 0o600)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_unlink_unix_removes_sockets_only(tmp_path: Path) -> None:
    """A socket goes; a file stays; nothing there is fine."""
    path = tmp_path / "s"
    with listeners.open_unix(path, 0o600):
        listeners.unlink_unix(path)
    assert not path.exists()
    listeners.unlink_unix(path)
    path.write_text("keep")
    listeners.unlink_unix(path)
    assert path.read_text() == "keep"


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_adopt_listening_socket_is_taken_over(tmp_path: Path, family: socket.AddressFamily) -> None:
    """A passed listener becomes a socket of ours, close-on-exec."""
    with socket.socket(family) as made:
        made.bind(("127.0.0.1", 0) if family == socket.AF_INET else str(tmp_path / "s"))
        made.listen()
        fd = os.dup(made.fileno())
    os.set_inheritable(fd, True)
    with listeners.adopt(fd) as sock:
        assert sock.fileno() == fd
        assert sock.family == family
        assert not sock.get_inheritable()


@pytest.mark.parametrize("kind", ["pipe", "closed", "datagram", "not listening"])
def test_adopt_anything_else_is_refused_and_left_open(kind: str) -> None:
    """What is not a listening stream socket is a ConfigError; the descriptor is not closed."""
    if kind == "pipe":
        fd, other = os.pipe()
        os.close(other)
    else:
        sock = socket.socket(
            socket.AF_INET, socket.SOCK_DGRAM if kind == "datagram" else socket.SOCK_STREAM
        )
        fd = sock.detach()
    if kind == "closed":
        os.close(fd)
    with pytest.raises(ConfigError, match=f"the passed descriptor {fd} "):
        listeners.adopt(fd)
    if kind != "closed":
        os.close(fd)  # raises if adopt had closed it


def test_port_holder_of_a_free_port_is_none() -> None:
    """A port that nobody uses has no holder."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    assert listeners.port_holder(port) is None


def test_turn_away_silent_clients_keep_nobody_waiting() -> None:
    """Every connection is answered and closed, whoever stands in front of it and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as clients:
        address = listener.getsockname()
        silent = [clients.enter_context(socket.create_connection(address, 10)) for _ in range(15)]
        asking = clients.enter_context(socket.create_connection(address, 10))
        asking.sendall(b"GET /v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n")
        listeners.turn_away([listener.fileno()], "the reason")
        for client in (asking, *silent):
            reply = b""
            while data := client.recv(65536):
                reply += data
            assert reply.startswith(b"HTTP/1.1 503 ")
            assert b"the reason" in reply
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
