"""One client's connection: hypercorn's HTTP/1.1 on a non-blocking socket of ours.

hypercorn's own connection lets a client that stopped reading hold a stop for ever, stops reading
while a reply runs (so a client that left is noticed late), knows no limit for a head's time, and
takes a lock, a cancel scope and a turn of the event loop for each piece of a reply. The parts of
hypercorn that remain are internals of it, so the version is pinned, and
`tests/adapters/test_http_server.py` fails when they move.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import socket
import struct
from collections.abc import Callable
from typing import Final

import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, Updated
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework

from onebitd.adapters.http_protocol import LATE, Http1, Requests, log, refusal_of_head
from onebitd.adapters.http_writing import HeldHeads, Outgoing

_READ_BYTES: Final = 64 * 1024
_READ_AHEAD_BYTES: Final = 256 * 1024
_FULL_S: Final = 2.0
_DISCARD_S: Final = 2.0
"""How long what a client still sends is read and dropped after the last reply it gets."""
_RESET: Final = struct.pack("ii", 1, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """How long a client may take, in seconds.

    Attributes:
        keep_alive_s: between two requests.
        head_s: for a request's head, from its first byte; for the first one from the accept.
        write_s: to take one write, 64 KiB at most.
    """

    keep_alive_s: float = 75.0
    head_s: float = 30.0
    write_s: float = 60.0


class _Phase(enum.Enum):
    FRESH = enum.auto()  # nothing came yet
    HEAD = enum.auto()  # a part of a request's head came
    BUSY = enum.auto()  # a request is being served
    IDLE = enum.auto()  # a reply has ended and nothing came since
    ENDED = enum.auto()  # the last reply was sent, what still comes is dropped


class Connection:
    """One client's connection.

    Args:
        app: the ASGI application.
        config: hypercorn's.
        context: hypercorn's; its `terminated` says that no further request is served.
        sock: connected and non-blocking; this closes it.
        client: its peer's address.
        limits: times.
        heads: of the server.
        on_end: told once when the socket is closed.

    Attributes:
        idle_since: when its last reply ended; the loop's clock, infinite before that.
    """

    def __init__(
        self,
        app: ASGIFramework,
        config: Config,
        context: WorkerContext,
        sock: socket.socket,
        client: tuple[str, int] | None,
        *,
        limits: Limits,
        heads: HeldHeads,
        on_end: Callable[[Connection], None],
    ) -> None:
        self._sock = sock
        self._limits = limits
        self._on_end = on_end
        self._out = Outgoing(sock, heads, limits.write_s, on_lost=self._lose, on_stalled=self.abort)
        self._requests = Requests()
        addresses = client, _own_address(sock)
        self._protocol = Http1(
            app, config, context, self._requests, addresses, self._out.write, self._note
        )
        now = trio.current_time()
        self._phase = _Phase.FRESH
        self._head_due = now + limits.head_s
        self._reading = trio.CancelScope(deadline=now + min(limits.head_s, limits.keep_alive_s))
        self._moved_on = trio.lowlevel.ParkingLot()  # from one pipelined request to the next
        self.idle_since: float = math.inf

    async def run(self) -> None:
        """Serve until the client or we close; one connection's fault is nobody else's."""
        try:
            async with trio.open_nursery() as self._requests.nursery:
                await self._read()
        except* OSError:
            pass  # the client is gone
        except* Exception:  # noqa: BLE001 - what a client sends must not end the server
            log.exception("a connection failed")
        finally:
            self.close()

    @property
    def is_spare(self) -> bool:
        """True when closing it loses nothing: no request runs, has begun, or waits to be read."""
        if self._phase is _Phase.IDLE:
            with contextlib.suppress(OSError):
                return not self._sock.recv(1, socket.MSG_PEEK)
            return True
        return self._phase is _Phase.ENDED

    @property
    def is_stalled(self) -> bool:
        """True while the client does not take what it is sent."""
        return self._out.is_waiting

    def close_unless_busy(self) -> None:
        """Close it when no request is being served; part of a head is none."""
        if self._phase is not _Phase.BUSY:
            self.close()

    def close(self) -> None:
        """Close the socket; what the kernel holds still leaves. Nothing happens the second time."""
        if self._sock.fileno() < 0:
            return
        trio.lowlevel.notify_closing(self._sock)
        self._sock.close()
        self._phase = _Phase.ENDED
        self._on_end(self)

    def abort(self) -> None:
        """Cut the client off: it sees a reset, and what waits to be written is dropped."""
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.close()

    async def _read(self) -> None:
        """Go on reading while a request is served: that is how a leaving client is noticed."""
        while True:
            with self._reading:
                while (data := await self._receive()) and await self._hand_on(data):
                    pass
            if self._phase is not _Phase.BUSY or not self._reading.cancelled_caught:
                break
            self._reading = trio.CancelScope()  # it was idle, or a head was late, but no more
        if self._phase is _Phase.HEAD and self._reading.cancelled_caught:
            await self._refuse_late_head()
        if self._phase is not _Phase.ENDED:
            self._phase = _Phase.ENDED
            await self._lose()

    async def _receive(self) -> bytes:
        """Return what came, b"" at the end; nothing any more once the last reply was sent."""
        while self._sock.fileno() >= 0:
            try:
                await trio.lowlevel.wait_readable(self._sock)
                data = self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                continue
            except (OSError, trio.ClosedResourceError):
                break
            if self._phase is not _Phase.ENDED or not data:
                return data
        return b""

    async def _hand_on(self, data: bytes) -> bool:
        """Return False when the client sends what nobody takes, for too long.

        Somebody who pipelines so much behind a running reply may have left already: the end of
        the stream lies behind bytes that we do not read. Nobody honest does.
        """
        if self._phase is _Phase.IDLE:
            self._head_due = trio.current_time() + self._limits.head_s
        if self._phase is not _Phase.BUSY:
            self._phase = _Phase.HEAD
        await self._protocol.take(data)
        if self._phase is _Phase.HEAD:
            self._reading.deadline = self._head_due
        elif self._phase is _Phase.BUSY and not self._has_room:
            return await self._wait_room()
        return True

    @property
    def _has_room(self) -> bool:
        return self._requests.inbox.has_room and self._protocol.waiting_bytes <= _READ_AHEAD_BYTES

    async def _wait_room(self) -> bool:
        """Return False when nothing of what has come is taken for too long."""
        while not self._has_room:
            with trio.move_on_after(_FULL_S) as patience:
                if self._requests.inbox.has_room:
                    await self._moved_on.park()
                else:
                    await self._requests.inbox.wait_room()
            if patience.cancelled_caught:
                return False
        return True

    async def _note(self, event: Event) -> None:
        """Take hypercorn's word: a head has come whole, a reply has left, or this is the end."""
        if type(event) is not Updated:
            self._end()
            await self._lose()
        elif self._phase is _Phase.ENDED:
            return
        elif not event.idle:
            self._phase = _Phase.BUSY  # whose deadline means nothing, see _read
        elif self._protocol.waiting_bytes:
            self._phase = _Phase.HEAD
            self._head_due = self._reading.deadline = trio.current_time() + self._limits.head_s
            self._requests.nursery.start_soon(self._go_on)
        else:
            self.idle_since = trio.current_time()
            self._phase = _Phase.IDLE
            self._reading.deadline = self.idle_since + self._limits.keep_alive_s

    async def _go_on(self) -> None:
        # Its client may have left since: it would never be told so, that has been done.
        if self._phase is not _Phase.ENDED:
            await self._protocol.go_on()
        self._moved_on.unpark_all()

    async def _refuse_late_head(self) -> None:
        await self._out.write(refusal_of_head(LATE))
        self._end()
        with trio.move_on_after(_DISCARD_S):
            await self._receive()

    def _end(self) -> None:
        """No more replies: close, once the client has sent the rest of what nobody wants.

        A socket that is closed with bytes unread resets the connection, and may take the reply
        away from the client before it was read.
        """
        self._out.flush()
        if not self._protocol.is_mid_request:
            self.close()
            return
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        self._phase = _Phase.ENDED
        self._reading.deadline = trio.current_time() + _DISCARD_S

    async def _lose(self) -> None:
        """Tell the request that is being served, if there is one, that its client has left."""
        await self._protocol.handle(Closed())


def _own_address(sock: socket.socket) -> tuple[str, int] | None:
    """Return what hypercorn passes on as the server's address."""
    name = sock.getsockname()
    return (name[0], name[1]) if isinstance(name, tuple) else None
