"""The writing side of one client's connection: at once what the kernel takes, bounded the rest."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import Final

import trio

_PIECE_BYTES: Final = 64 * 1024
_WRITES_A_TURN: Final = 16
"""Others get their turn after so many writes that did not have to wait; and who goes on writing to
nobody gets to know of its cancel."""
_HEAD_START: Final = b"HTTP/1.1 "


class HeldHeads:
    """Sends the heads of replies that their bodies do not follow at once; one for a server.

    hypercorn writes a head by itself, and a body that is there already right behind it. A head is
    held until its connection's next write, or until the loop's next turn, and leaves with either.
    """

    def __init__(self) -> None:
        self._holding: list[Outgoing] = []
        self._idle = trio.lowlevel.ParkingLot()

    def add(self, outgoing: Outgoing) -> None:
        """Look after the head that this one holds back."""
        self._holding.append(outgoing)
        if self._idle:
            self._idle.unpark()

    async def run(self) -> None:
        """Run for as long as there may be connections."""
        while True:
            if not self._holding:
                await self._idle.park()
            holding, self._holding = self._holding, []
            for outgoing in holding:
                outgoing.flush()


class Outgoing:
    """Writes to one client.

    Args:
        sock: connected and non-blocking; its owner closes it.
        heads: of the server.
        timeout_s: a client that does not take 64 KiB within this time is lost.
        on_lost: awaited after each write that the client does not get. Never told of a flush's.
        on_stalled: called before that, for a client that takes nothing: closes the socket.

    What waits here is never more than the one write that its caller waits for.
    """

    def __init__(
        self,
        sock: socket.socket,
        heads: HeldHeads,
        timeout_s: float,
        *,
        on_lost: Callable[[], Awaitable[None]],
        on_stalled: Callable[[], None],
    ) -> None:
        self._sock = sock
        self._heads = heads
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._on_stalled = on_stalled
        self._held = b""
        self._line = trio.Lock()  # held while somebody waits for the client
        self._unbroken = 0

    @property
    def is_waiting(self) -> bool:
        """True while the client does not take what was written."""
        return self._line.locked()

    async def write(self, data: bytes) -> None:
        """Write all of it; a head of a reply, with what comes next.

        A cancel comes out only between whole writes, so that no half chunk stays on a live
        connection.
        """
        if self._line.locked():
            await self._write_in_line(data)
            return
        if self._held:
            data, self._held = self._held + data, b""
        elif data.startswith(_HEAD_START):
            self._held = data
            self._heads.add(self)
            return
        sent = self._write_now(data) if data else 0
        if sent is None:
            await self._on_lost()
        elif sent < len(data):
            await self._write_in_line(data[sent:])
        self._unbroken += 1
        if self._unbroken >= _WRITES_A_TURN:
            self._unbroken = 0
            await trio.lowlevel.checkpoint()

    def flush(self) -> None:
        """Let a head leave that was held back, as far as the kernel takes it.

        What is left waits for the next write: hypercorn writes something behind every head.
        """
        if self._held:
            self._held = self._held[self._write_now(self._held) or 0 :]

    def _write_now(self, data: bytes) -> int | None:
        """Return how many bytes the kernel took, None when the client is gone."""
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return None

    async def _write_in_line(self, data: bytes) -> None:
        there = True
        with trio.CancelScope(shield=True) as scope:
            async with self._line:
                for start in range(0, len(data), _PIECE_BYTES):
                    scope.deadline = trio.current_time() + self._timeout_s
                    there = await self._write_piece(memoryview(data)[start : start + _PIECE_BYTES])
                    if not there:
                        break
        if scope.cancelled_caught:
            self._on_stalled()
        if scope.cancelled_caught or not there:
            await self._on_lost()

    async def _write_piece(self, data: memoryview) -> bool:
        """Return False when the client is gone."""
        while data:
            if self._sock.fileno() < 0:
                return False
            try:
                await trio.lowlevel.wait_writable(self._sock)
                data = data[self._sock.send(data) :]
            except BlockingIOError:
                pass
            except (OSError, trio.ClosedResourceError):
                return False
        return True
