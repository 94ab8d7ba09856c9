"""Who connects to a Unix socket, by the real kernel, and who is served."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onebitd.adapters import peers
from onebitd.adapters.peers import Peer, Served

NOBODY, SOME_GROUP, OTHER_GROUP = 65534, 54321, 54322
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")


@contextlib.contextmanager
def listening(directory: Path, mode: int, gid: int | None = None) -> Iterator[socket.socket]:
    """Listen on a socket file with this mode and group."""
    path = directory / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(mode)
        if gid is not None:
            os.chown(path, -1, gid)
        listener.listen()
        yield listener


@pytest.mark.parametrize(
    ("peer", "gid", "served"),
    [
        (Peer(0, frozenset({0})), None, True),
        (Peer(0, frozenset({5})), 700, True),
        (Peer(1000, frozenset({1000})), None, True),
        (Peer(1001, frozenset({700})), 700, True),
        (Peer(1001, frozenset({1001, 27, 700})), 700, True),
        (Peer(1001, frozenset({1001, 27})), 700, False),
        (Peer(1001, frozenset({0})), None, False),
        (Peer(1001, frozenset({1000})), None, False),
        (Peer(65534, frozenset({65534})), 700, False),
    ],
)
def test_why_not_root_the_own_user_and_the_group_are_served(
    peer: Peer, gid: int | None, served: bool
) -> None:
    """Nobody else is, whatever the socket's mode lets the kernel pass."""
    assert (Served(1000, gid).why_not(peer) is None) is served


def test_why_not_names_the_group_to_join() -> None:
    """By its name where it has one; where there is none to join, it says whose the socket is."""
    stranger = Peer(1001, frozenset())
    assert "is for the group 54321: join it with" in str(Served(0, SOME_GROUP).why_not(stranger))
    assert "its owner and root" in str(Served(0, None).why_not(stranger))
    assert "its owner and root" in str(Served(0, 0).why_not(stranger))


def test_peer_of_own_process_has_our_user_and_groups(tmp_path: Path) -> None:
    """As the kernel knows them, the supplementary ones included."""
    with listening(tmp_path, 0o600) as listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            found = peers.peer_of(accepted)
    assert found.uid == os.geteuid()
    assert found.gids == {os.getegid(), *os.getgroups()}


def test_peer_of_a_tcp_socket_is_an_error() -> None:
    """The kernel vouches for nobody there; its zeros must not pass for root."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
        pytest.raises(OSError, match="Unix"),
    ):
        peers.peer_of(client)


@needs_root
@pytest.mark.parametrize(("groups", "served"), [([SOME_GROUP], True), ([OTHER_GROUP], False)])
def test_peer_of_another_users_process_counts_its_groups(
    tmp_path: Path, groups: list[int], served: bool
) -> None:
    """A member by a supplementary group is served, another user is not, on a socket for all."""
    connect = (
        f"import os, socket; os.setgroups({groups}); os.setgid({NOBODY}); os.setuid({NOBODY});"
        "s = socket.socket(socket.AF_UNIX); s.connect('s'); s.recv(1)"
    )
    tmp_path.chmod(0o755)
    with listening(tmp_path, 0o666, SOME_GROUP) as listener:
        listener.settimeout(30)
        with subprocess.Popen([sys.executable, "-I", "-S", "-c", connect], cwd=tmp_path) as child:
            accepted, _ = listener.accept()
            with accepted:
                found = peers.peer_of(accepted)
            assert child.wait(30) == 0
        assert found == Peer(NOBODY, frozenset({NOBODY, *groups}))
        assert (peers.served_on([listener]).why_not(found) is None) is served


@pytest.mark.parametrize(
    ("mode", "open_to_group", "loose"),
    [(0o600, False, False), (0o660, True, False), (0o666, True, True), (0o606, False, True)],
)
def test_served_on_and_loose_mode_follow_the_files_mode(
    tmp_path: Path, mode: int, open_to_group: bool, loose: bool
) -> None:
    """The group counts where the mode opens the socket to it; one open to all is told."""
    with listening(tmp_path, mode) as listener:
        found = peers.served_on([listener])
        gid = (tmp_path / "s").stat().st_gid
        assert found == Served(os.geteuid(), gid if open_to_group else None)
        line = peers.loose_mode(listener)
    assert (line is not None) is loose
    assert not loose or "SocketMode=0660" in str(line)


def test_served_on_a_socket_without_a_file_is_no_groups(tmp_path: Path) -> None:
    """Removed, or in the abstract name space: nobody's group may be assumed."""
    with listening(tmp_path, 0o660) as listener:
        assert stat.S_ISSOCK((tmp_path / "s").stat().st_mode)
        (tmp_path / "s").unlink()
        assert peers.served_on([listener]).gid is None
        assert peers.loose_mode(listener) is None
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(b"\0onebitd-test-%d" % os.getpid())
        assert peers.served_on([listener]).gid is None
        assert peers.loose_mode(listener) is None
