"""onebitd.adapters.http_writing: what leaves when, on sockets that keep each write apart."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from onebitd.adapters.http_writing import HeldHeads, Outgoing

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class Written:
    """An `Outgoing` and the client's end of its socket."""

    def __init__(self, nursery: trio.Nursery, kind: socket.SocketKind, timeout_s: float) -> None:
        ours, self.client = socket.socketpair(socket.AF_UNIX, kind)
        self.sock = ours
        for sock in (ours, self.client):
            sock.setblocking(False)
        self.lost = 0
        self.stalled = False
        heads = HeldHeads()
        nursery.start_soon(heads.run)
        self.out = Outgoing(
            ours, heads, timeout_s, on_lost=self._lose, on_stalled=self._note_stalled
        )

    async def _lose(self) -> None:
        self.lost += 1

    def _note_stalled(self) -> None:
        self.stalled = True

    def came(self) -> list[bytes]:
        """Return what has arrived, one item for each write (of a stream: in one)."""
        found = []
        try:
            while data := self.client.recv(1 << 20):
                found.append(data)
        except BlockingIOError:
            pass
        return found


@asynccontextmanager
async def written(
    kind: socket.SocketKind = socket.SOCK_SEQPACKET, timeout_s: float = 60.0
) -> AsyncIterator[Written]:
    """Open both ends."""
    async with trio.open_nursery() as nursery:
        pair = Written(nursery, kind, timeout_s)
        with pair.sock, pair.client:
            yield pair
        nursery.cancel_scope.cancel()


async def test_outgoing_head_leaves_with_the_body_that_follows() -> None:
    """One write for both, whether there is a body or only the end of an empty one."""
    async with written() as pair:
        for body in (b"body", b""):
            await pair.out.write(HEAD)
            assert pair.came() == []
            await pair.out.write(body)
            await pair.out.write(b"more")
            assert pair.came() == [HEAD + body, b"more"]


async def test_outgoing_head_that_nothing_follows_leaves_at_the_next_turn() -> None:
    """A stream's head is not held back until its first event, which may be minutes away."""
    async with written() as pair:
        for _ in range(2):
            await pair.out.write(HEAD)
            await trio.testing.wait_all_tasks_blocked()
            assert pair.came() == [HEAD]


async def test_outgoing_writes_that_never_wait_let_others_have_their_turn() -> None:
    """An application that always has something to send starves nobody."""
    async with written(socket.SOCK_STREAM) as pair, trio.open_nursery() as nursery:
        turn = trio.Event()

        async def other() -> None:
            turn.set()

        nursery.start_soon(other)
        for _ in range(50):
            await pair.out.write(b"x")
        assert turn.is_set()
        nursery.cancel_scope.cancel()


async def test_outgoing_to_a_client_that_is_gone_can_be_cancelled() -> None:
    """Each write says so, and none of them keeps a cancel away (the bug: a loop without end)."""
    async with written() as pair:
        pair.client.close()
        with trio.move_on_after(0.05) as scope:
            while True:
                await pair.out.write(b"x")
        assert scope.cancelled_caught
        assert pair.lost > 0


async def test_outgoing_cancelled_write_leaves_whole_and_later_ones_behind_it() -> None:
    """Half a chunk never stays on a live connection, and the order is that of the writes."""
    async with written(socket.SOCK_STREAM) as pair, trio.open_nursery() as nursery:
        big = b"a" * 300_000

        async def write_and_be_cancelled() -> None:
            with trio.CancelScope() as scope:
                scope.cancel()
                await pair.out.write(big)

        nursery.start_soon(write_and_be_cancelled)
        await trio.testing.wait_all_tasks_blocked()
        for later in (b"b" * 1000, HEAD):
            nursery.start_soon(pair.out.write, later)
            await trio.testing.wait_all_tasks_blocked()
        found = b""
        with trio.fail_after(10):
            while len(found) < len(big) + 1000 + len(HEAD):
                await trio.lowlevel.wait_readable(pair.client)
                found += b"".join(pair.came())
        assert found == big + b"b" * 1000 + HEAD


@pytest.mark.parametrize("closed", [False, True], ids=["stalled", "closed_meanwhile"])
async def test_outgoing_client_that_takes_nothing_is_lost(closed: bool) -> None:
    """After its time, or at once when the socket is closed meanwhile."""
    async with written(socket.SOCK_STREAM, 3600.0 if closed else 0.05) as pair:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pair.out.write, b"x" * 300_000)
            await trio.testing.wait_all_tasks_blocked()
            if closed:
                trio.lowlevel.notify_closing(pair.sock)
                pair.sock.close()
        assert pair.lost == 1
        assert pair.stalled is not closed
