"""The HTTP listener: accepts on sockets of ours, up to a limit, and ends in bounded time."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import trio
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework

from onebitd.adapters.http_connection import Connection, Limits
from onebitd.adapters.http_protocol import MAX_HEAD_BYTES, log
from onebitd.adapters.http_writing import HeldHeads
from onebitd.adapters.listeners import set_options
from onebitd.core.errors import RequestError
from onebitd.core.refusal import refusal

_LINGER_S: Final = 0.4
"""After a stop: replies that are complete may still leave the building."""
_ANSWER_S: Final = 1.0
"""After a stop: a request that was cut off may still be told so. A provider that has to be killed
takes half of it."""
_NO_ROOM_S: Final = 0.1
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_RETRY_AFTER_S: Final = 5
_TURNING_AWAY_MAX: Final = 64
_TURNING_AWAY_S: Final = 1.0
_READ_BYTES: Final = 64 * 1024


class HttpServer:
    """Serves one ASGI application on listening sockets.

    Args:
        app: the application.
        listeners: bound and listening; closed when serving ends.
        admit: looks at a socket that was just accepted; returns the only answer that its client
            gets, or None to serve it.
        max_connections: beyond these a client gets a 503. Kept connections that do nothing are
            closed first, the one that has done nothing for the longest time before the others.
            May be set at any time.
        keep_alive_s: an idle connection lives this long.
        head_timeout_s: a request's head must come whole within this time, or its client gets a
            408: from its first byte, the first one of a connection from the accept.
        write_timeout_s: a client that does not take one write (64 KiB at most) within this time
            is cut off.
    """

    def __init__(
        self,
        app: ASGIFramework,
        listeners: Sequence[socket.socket],
        *,
        admit: Callable[[socket.socket], RequestError | None] = lambda sock: None,
        max_connections: int = 512,
        keep_alive_s: float = 75.0,
        head_timeout_s: float = 30.0,
        write_timeout_s: float = 60.0,
    ) -> None:
        self._listeners = listeners
        self._admit = admit
        self.max_connections = max_connections
        self._context = WorkerContext(None)
        self._connections: set[Connection] = set()
        self._all_gone = trio.Event()
        self._turning_away = 0
        self._accepting = trio.CancelScope()
        self._heads = HeldHeads()
        config = Config()
        config.h11_max_incomplete_size = MAX_HEAD_BYTES
        config.accesslog = None
        config.errorlog = log  # or it writes to stderr itself
        self._connection = partial(
            Connection,
            app,
            config,
            self._context,
            limits=Limits(keep_alive_s, head_timeout_s, write_timeout_s),
            heads=self._heads,
            on_end=self._forget,
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; then let the last of replies leave, and cut off what is left."""
        async with trio.open_nursery() as nursery:
            connections = await nursery.start(self._hold_connections)
            try:
                with self._accepting:
                    await self._accept_all(connections, task_status)
                await trio.sleep_forever()  # stop_accepting: the replies go on
            finally:
                await self._context.terminated.set()  # a connection closes after its reply
                with trio.CancelScope(shield=True):
                    await self._end_connections()
                connections.cancel_scope.cancel()

    def stop_accepting(self) -> None:
        """Close the listeners and go on with the connections that there are.

        Whoever connects to a socket that a service manager holds as well waits in its backlog.
        """
        self._accepting.cancel()

    async def _hold_connections(self, *, task_status: trio.TaskStatus[trio.Nursery]) -> None:
        """Keep the connections' tasks out of the reach of the cancel that stops the server."""
        async with trio.open_nursery() as connections:
            connections.cancel_scope.shield = True
            task_status.started(connections)
            await self._heads.run()

    async def _end_connections(self) -> None:
        for connection in tuple(self._connections):
            connection.close_unless_busy()
        began = trio.current_time()
        await self._wait_gone(began + _LINGER_S)
        for connection in tuple(self._connections):
            if connection.is_stalled:
                connection.abort()
        await self._wait_gone(began + _ANSWER_S)
        for connection in tuple(self._connections):
            connection.abort()

    async def _wait_gone(self, deadline: float) -> None:
        if self._connections:
            with trio.CancelScope(deadline=deadline):
                await self._all_gone.wait()

    def _forget(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections and self._context.terminated.is_set():
            self._all_gone.set()

    async def _accept_all(
        self, connections: trio.Nursery, task_status: trio.TaskStatus[None]
    ) -> None:
        try:
            for listener in self._listeners:
                listener.setblocking(False)
                set_options(listener)
            async with trio.open_nursery() as nursery:
                for listener in self._listeners:
                    nursery.start_soon(self._accept, listener, connections)
                task_status.started()
        finally:
            for listener in self._listeners:
                listener.close()

    async def _accept(self, listener: socket.socket, connections: trio.Nursery) -> None:
        told = False
        while True:
            await trio.lowlevel.wait_readable(listener)
            try:
                sock, address = listener.accept()
            except OSError as error:
                if error.errno in _NO_ROOM and not self._make_room():
                    if not told:
                        log.error("no connection can be accepted: %s", os.strerror(error.errno))
                    told = True
                    await trio.sleep(_NO_ROOM_S)
                continue  # somebody else's process took it, or the client has left again
            told = False
            sock.setblocking(False)
            refused = self._admit(sock) or self._full()
            if refused is not None:
                self._turn_away(sock, refused, connections)
                continue
            connection = self._connection(sock, _client_address(address))
            self._connections.add(connection)
            connections.start_soon(connection.run)

    def _full(self) -> RequestError | None:
        surplus = len(self._connections) - self.max_connections + 1
        if surplus <= 0 or self._make_room(surplus) == surplus:
            return None
        return RequestError(
            503,
            f"all {self.max_connections} connections are in use; try again later, or raise"
            " http.max_connections",
            kind="unavailable_error",
            retry_after_s=_RETRY_AFTER_S,
        )

    def _make_room(self, wanted: int = 1) -> int:
        """Close the kept connections that have done nothing for the longest time.

        Returns:
            how many, at most `wanted`; more than one when the limit was lowered.
        """
        closed = 0
        for connection in sorted(self._connections, key=lambda one: one.idle_since):
            if closed == wanted:
                break
            if connection.is_spare:
                connection.close()
                closed += 1
        return closed

    def _turn_away(
        self, sock: socket.socket, error: RequestError, connections: trio.Nursery
    ) -> None:
        with contextlib.suppress(OSError):
            sock.send(refusal(error))
            sock.shutdown(socket.SHUT_WR)
        if self._turning_away < _TURNING_AWAY_MAX:
            self._turning_away += 1
            connections.start_soon(self._see_off, sock)
        else:
            sock.close()

    async def _see_off(self, sock: socket.socket) -> None:
        """Read what the client sends: closed with bytes unread, its reply might not reach it."""
        try:
            with trio.move_on_after(_TURNING_AWAY_S), contextlib.suppress(OSError):
                while True:
                    await trio.lowlevel.wait_readable(sock)
                    if not sock.recv(_READ_BYTES):
                        return
        finally:
            self._turning_away -= 1
            sock.close()


def _client_address(address: Any) -> tuple[str, int] | None:  # noqa: ANN401 - the family decides
    """Return what hypercorn passes on as the client's address."""
    return (address[0], address[1]) if isinstance(address, tuple) else None
