"""onebitd.adapters.share_listener on real sockets, with real descriptors and real processes."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest
import trio
import trio.testing

from onebitd.adapters.share_listener import (
    PeerCheck,
    Shared,
    ShareListener,
    decoder_or_descendant,
    is_descendant,
)
from onebitd.core.errors import HandoffError
from onebitd.core.handoff import Reason
from onebitd.core.share_wire import MAX_FDS, encode
from tests.harness import is_alive, wait_until
from tests.llama_builds import short_temporary_directory

WIRE = encode({"share_id": 7, "layout": 1})
LONG_S = 30.0
Says = Callable[[socket.socket], object]


def open_files() -> list[str]:
    """Return the numbers of this process's descriptors."""
    return sorted(os.listdir("/proc/self/fd"))


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory whose sockets have short paths; at the end no descriptor is left over."""
    with short_temporary_directory() as path:
        before = open_files()
        yield path
        assert open_files() == before


@pytest.fixture
def memory(home: Path) -> Iterator[int]:
    """A descriptor to hand over."""
    fd = os.memfd_create("cache")
    os.write(fd, b"rows")
    yield fd
    os.close(fd)


def anybody(pid: int, uid: int) -> bool:
    """Take every peer."""
    return True


def fds_with(fds: Sequence[int]) -> list[tuple[int, int, bytes]]:
    """Return the control message that carries descriptors."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))]


def says(*parts: tuple[bytes, Sequence[int]]) -> Says:
    """Return a peer that sends these parts and closes."""

    def send(peer: socket.socket) -> None:
        for data, fds in parts:
            peer.sendmsg([data], fds_with(fds) if fds else [])

    return send


def connected(path: Path) -> socket.socket:
    """Connect to a share socket; the caller closes."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.connect(os.fspath(path))
    return peer


async def handshake(
    home: Path,
    *peers: Says,
    is_peer: PeerCheck = anybody,
    timeout_s: float = LONG_S,
    hold: bool = False,
) -> Shared:
    """Let peers connect, speak and close (or hold on), in this order; return what came."""
    with contextlib.ExitStack() as stack, ShareListener(home / "share.sock") as listener:
        for speak in peers:
            peer = stack.enter_context(connected(home / "share.sock"))
            speak(peer)
            if not hold:
                peer.close()
        with trio.fail_after(LONG_S * 2):
            return await listener.receive(is_peer, timeout_s)


@contextlib.asynccontextmanager
async def refusing() -> AsyncIterator[list[str]]:
    """Expect a failed handshake; its detail is in the list afterwards."""
    detail: list[str] = []
    with pytest.raises(HandoffError) as caught:
        yield detail
    assert caught.value.reason is Reason.SHARE_HANDSHAKE
    assert not caught.value.slot_touched
    detail.append(caught.value.detail)


async def test_receive_message_with_descriptors_gives_both(home: Path, memory: int) -> None:
    """The very memory arrives, close-on-exec, and is closed with what owns it."""
    with await handshake(home, says((WIRE, [memory, memory]))) as shared:
        assert (shared.share_id, shared.header) == (7, WIRE[4:])
        assert [os.pread(fd, 9, 0) for fd in shared.fds] == [b"rows"] * 2
        assert not any(map(os.get_inheritable, shared.fds))
    assert len(shared.fds) == 0
    shared.close()


async def test_receive_message_in_pieces_is_whole(home: Path, memory: int) -> None:
    """The stream's cuts do not matter, nor when the pieces come."""
    path = home / "share.sock"
    with ShareListener(path) as listener, connected(path) as peer:

        async def dribble() -> None:
            for at in range(len(WIRE)):
                peer.sendmsg([WIRE[at : at + 1]], fds_with([memory]) if at == 0 else [])
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(dribble)
            with await listener.receive(anybody, LONG_S) as shared:
                assert shared.header == WIRE[4:]


async def test_receive_most_descriptors_all_come(home: Path, memory: int) -> None:
    """As many as are taken, none cut off."""
    with await handshake(home, says((WIRE, [memory] * MAX_FDS))) as shared:
        assert len(shared.fds) == MAX_FDS


@pytest.mark.parametrize(
    ("parts", "detail"),
    [
        ([(b"GET / HTTP/1.1\r\n\r\n", 1)], "its length is 542393671"),
        ([(struct.pack("<I", 9) + b"no JSON !", 1)], "it is no JSON"),
        ([(encode({"shareid": 1}), 1)], "has no share_id"),
        ([(WIRE, 0)], "no descriptor came with it"),
        ([(WIRE[:4], 1)], "it closed after 4 bytes"),
        ([(WIRE[:-1], 1)], f"it closed after {len(WIRE) - 1} bytes"),
        ([], "it closed after 0 bytes"),
        ([(WIRE[:1], 2), (WIRE[1:], 2)], "later than with the first byte"),
        ([(WIRE, MAX_FDS + 1)], f"it sent {MAX_FDS + 1} descriptors"),
        ([(WIRE, 253)], "it sent 253 descriptors"),
        ([(WIRE[:1], 150), (WIRE[1:], 150)], "it sent 150 descriptors"),
        ([(WIRE + b"xx", 1)], "2 bytes came behind"),
    ],
    ids=[
        "garbage", "no JSON", "no id", "no fds", "closed after the length", "closed early",
        "closed at once", "late fds", "65 fds", "253 fds", "300 fds", "trailing",
    ],
)  # fmt: skip
async def test_receive_bad_message_is_refused_and_everything_closed(
    home: Path, memory: int, parts: list[tuple[bytes, int]], detail: str
) -> None:
    """Each says what was wrong, and no descriptor that came stays open."""
    before = open_files()
    async with refusing() as found:
        await handshake(home, says(*((data, [memory] * count) for data, count in parts)))
    assert detail in found[0]
    assert open_files() == before


async def test_receive_first_descriptor_later_than_the_first_byte_is_refused(
    home: Path, memory: int
) -> None:
    """They belong to the message's beginning."""
    path = home / "share.sock"
    before = open_files()
    with ShareListener(path) as listener, connected(path) as peer:

        async def speak() -> None:
            says((WIRE[:1], []))(peer)
            await trio.testing.wait_all_tasks_blocked()
            says((WIRE[1:], [memory]))(peer)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(speak)
            async with refusing() as found:
                await listener.receive(anybody, LONG_S)
    assert "later than with the first byte" in found[0]
    assert open_files() == before


async def test_receive_more_than_may_be_open_is_refused_and_what_came_closed(
    home: Path, memory: int
) -> None:
    """The kernel cuts off what does not fit under the limit of open files (MSG_CTRUNC)."""
    before = open_files()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    path = home / "share.sock"
    async with refusing() as found:
        with ShareListener(path) as listener, connected(path) as peer:
            says((WIRE, [memory] * 40))(peer)
            free = [number for number in range(1024) if str(number) not in open_files()]
            resource.setrlimit(resource.RLIMIT_NOFILE, (free[12], hard))
            try:
                await listener.receive(anybody, LONG_S)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "could not give us every descriptor" in found[0]
    assert open_files() == before


async def test_receive_peer_that_resets_is_refused(home: Path) -> None:
    """A connection closed with bytes unread resets; that is no crash of ours."""
    path = home / "share.sock"
    async with refusing() as found:
        with ShareListener(path) as listener:
            peer = connected(path)

            def leave(pid: int, uid: int) -> bool:
                peer.close()
                return True

            await listener.receive(leave, LONG_S)
    assert "closed after 0 bytes" in found[0]


async def test_receive_nobody_connects_ends_in_time(home: Path) -> None:
    """A decoder that never comes holds up nothing for ever."""
    async with refusing() as found:
        await handshake(home, timeout_s=0.05)
    assert found == ["the decoder did not connect within 0.05 s"]


@pytest.mark.parametrize("length", [0, 1, 4, len(WIRE) - 1])
async def test_receive_peer_that_stalls_ends_in_time_and_everything_is_closed(
    home: Path, memory: int, length: int
) -> None:
    """Wherever it stalls, and with descriptors of its in our hands."""
    before = open_files()
    parts = [(WIRE[:length], [memory] * 3)] if length else []
    async with refusing() as found:
        await handshake(home, says(*parts), timeout_s=0.05, hold=True)
    assert f"connected and sent {length} bytes, no whole message, within" in found[0]
    assert open_files() == before


async def test_receive_cancelled_half_way_closes_everything(home: Path, memory: int) -> None:
    """A client that leaves during the handshake leaks nothing."""
    before = open_files()
    with trio.move_on_after(0.05) as scope:
        await handshake(home, says((WIRE[:5], [memory] * 3)), hold=True)
    assert scope.cancelled_caught
    assert open_files() == before
    assert not (home / "share.sock").exists()


async def test_receive_stranger_is_hung_up_on_unread_and_the_decoder_still_heard(
    home: Path, memory: int
) -> None:
    """Another process on the socket neither gets in nor keeps the decoder out."""
    asked: list[tuple[int, int]] = []

    def third_is_ours(pid: int, uid: int) -> bool:
        asked.append((pid, uid))
        return len(asked) == 3

    stranger = says((encode({"share_id": 666}), [memory] * 9))
    shared = await handshake(
        home, stranger, stranger, says((WIRE, [memory])), is_peer=third_is_ours
    )
    with shared:
        assert (shared.share_id, len(shared.fds)) == (7, 1)
    assert asked == [(os.getpid(), os.getuid())] * 3


async def test_receive_only_strangers_says_so_when_its_time_is_up(home: Path, memory: int) -> None:
    """Whoever reads the log learns who was there instead."""
    before = open_files()
    async with refusing() as found:
        await handshake(
            home,
            *[says((WIRE, [memory]))] * 2,
            is_peer=lambda pid, uid: False,
            timeout_s=0.1,
        )
    pid, uid = os.getpid(), os.getuid()
    assert found == [
        f"the decoder did not connect within 0.1 s; a connection of pid {pid} (user id {uid}) was"
        " refused, the last of 2"
    ]
    assert open_files() == before


async def test_receive_second_connection_of_the_decoder_does_not_count(
    home: Path, memory: int
) -> None:
    """What is wrong with the first one is told, not tried again."""
    async with refusing() as found:
        await handshake(home, says((WIRE, [])), says((WIRE, [memory])))
    assert "no descriptor came" in found[0]


async def test_listener_socket_is_ours_alone_and_there_only_while_entered(home: Path) -> None:
    """Mode 0600 whatever the umask; nothing left behind."""
    path = home / "share.sock"
    for mask in (0o000, 0o077, 0o777):
        before = os.umask(mask)
        try:
            with ShareListener(path):
                found = path.stat().st_mode
        finally:
            os.umask(before)
        assert (stat.S_ISSOCK(found), stat.S_IMODE(found)) == (True, 0o600)
        assert not path.exists()


async def test_listener_left_by_an_error_is_gone(home: Path) -> None:
    """Unlinked whatever happens."""

    def enter_and_fail() -> None:
        with ShareListener(home / "share.sock"):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        enter_and_fail()
    assert not (home / "share.sock").exists()


async def test_listener_replaces_a_stale_socket(home: Path, memory: int) -> None:
    """A killed onebitd leaves one; the next handshake works."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stale:
        stale.bind(os.fspath(home / "share.sock"))
    (await handshake(home, says((WIRE, [memory])))).close()


async def test_listener_in_the_way_of_something_else_is_a_failed_handshake(home: Path) -> None:
    """A file, a live socket, a missing directory, a path too long: a reason, and no harm done."""
    (home / "file").write_text("mine")
    with ShareListener(home / "live"):
        for name, detail in [
            ("file", "something else is there"),
            ("live", "is served"),
            ("no/where", "No such file"),
            ("x" * 120, "at most 107"),
        ]:
            async with refusing() as found:
                with ShareListener(home / name):
                    pass
            assert detail in found[0]
        assert (home / "live").is_socket()
    assert (home / "file").read_text() == "mine"


FAMILY = """
import os, sys, time
print(os.getpid(), flush=True)
depth = int(sys.argv[1])
while depth and not os.fork():
    depth -= 1
    if not depth:
        print(os.getpid(), flush=True)
time.sleep(3600)
"""
DETACHED = """
import os, time
parent = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    time.sleep(0.005)
print(os.getpid(), flush=True)
time.sleep(3600)
"""


@contextlib.contextmanager
def script(text: str, *args: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a Python script in a group of its own; all of it is gone at the end."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", text, *args],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process, process.stdout:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)


def test_is_descendant_self_child_and_grandchild_are_and_others_are_not(home: Path) -> None:
    """Down the line only."""
    with script(FAMILY, "3") as process:
        assert process.stdout is not None
        first, last = int(process.stdout.readline()), int(process.stdout.readline())
        us = os.getpid()
        assert last != first == process.pid
        assert is_descendant(us, us)
        assert is_descendant(first, us)
        assert is_descendant(last, us)
        assert is_descendant(last, first)
        assert not is_descendant(first, last)
        assert not is_descendant(us, first)
        assert not is_descendant(1, first)
        assert not is_descendant(0, first)
        assert not is_descendant(0, 0)
        assert decoder_or_descendant(first)(last, os.geteuid())
        assert not decoder_or_descendant(first)(last, os.geteuid() + 1)
        assert not decoder_or_descendant(first)(us, os.geteuid())
    wait_until(lambda: not is_alive(last), "the family is gone")
    assert not is_descendant(1 << 30, us)


def test_is_descendant_detached_helper_is_not(home: Path) -> None:
    """Its parent has ended: nobody can say any more whose it was."""
    with script(DETACHED) as process:
        assert process.stdout is not None
        helper = int(process.stdout.readline())
        assert is_alive(helper)
        assert not is_descendant(helper, process.pid)
