"""The HTTP listener: hypercorn's HTTP/1.1, on sockets of ours, with bounded writes.

hypercorn's own `serve` opens sockets by itself, lets a client that stopped reading hold a stop for
ever, and stops reading while a reply runs (so a client that left after pipelining a request is
noticed late). `Connection` is its `TCPServer` with those three changed; it uses hypercorn's
internals, so the version is pinned and `tests/adapters/test_http_server.py` fails when they move.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework, ConnectionState
from hypercorn.utils import wrap_app

_log = logging.getLogger("hypercorn.error")

_READ_BYTES: Final = 64 * 1024
_READ_AHEAD_CHUNKS: Final = 4
_FULL_S: Final = 2.0
_LINGER_S: Final = 1.0
"""After a stop: replies that are complete may still leave the building."""


class Connection(TCPServer):
    """One client's connection.

    Args:
        write_timeout_s: a client that does not take one write (64 KiB at most) within this time
            is cut off.
        connections: the set it is in while it lives, so that a stop can cut it off.
    """

    def __init__(
        self,
        app: Any,  # noqa: ANN401 - hypercorn's wrapper type is a union it keeps to itself
        config: Config,
        context: WorkerContext,
        stream: trio.SocketStream,
        *,
        write_timeout_s: float,
        connections: set[Connection],
    ) -> None:
        super().__init__(app, config, context, ConnectionState({}), stream)  # type: ignore[arg-type]
        self._write_timeout_s = write_timeout_s
        self._connections = connections
        self._ended = False

    async def run(self) -> None:
        """Serve until the client or we close; one connection's fault is nobody else's."""
        self._connections.add(self)
        try:
            await super().run()
        except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client is gone
        except* Exception:  # noqa: BLE001 - what a client sends must not end the server
            _log.exception("a connection failed")
        finally:
            self._connections.discard(self)

    def abort(self) -> None:
        """Cut the client off; whatever waits to be written is dropped."""
        self.stream.socket.close()

    async def protocol_send(self, event: Event) -> None:
        """Write bounded in time; everything else is hypercorn's."""
        if not isinstance(event, RawData):
            if not (self._ended and isinstance(event, Updated)):
                await super().protocol_send(event)
            return
        gone = False
        async with self.send_lock:
            # Shielded so that a cancelled reply does not leave half a chunk on a live connection.
            with trio.CancelScope(
                shield=True, deadline=trio.current_time() + self._write_timeout_s
            ) as scope:
                try:
                    await self.stream.send_all(event.data)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    gone = True
            if scope.cancelled_caught:
                self.abort()
                gone = True
        if gone:
            await self.protocol.handle(Closed())

    async def _read_data(self) -> None:
        """Go on reading while the protocol is busy: that is how a leaving client is noticed."""
        arrived, queue = trio.open_memory_channel[bytes](_READ_AHEAD_CHUNKS)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._hand_on, queue)
            while data := await self._receive():
                if not await self._pass_on(arrived, data):
                    break
            nursery.cancel_scope.cancel()
        # Or the idle task would keep a connection that its client has closed for keep_alive_s.
        self._ended = True
        await self.idle_task.stop()
        await self.protocol.handle(Closed())

    async def _pass_on(self, queue: trio.MemorySendChannel[bytes], data: bytes) -> bool:
        """Queue what was read; False if there was no room for it too long.

        Somebody who pipelines so much behind a running reply may have left already: the end of
        the stream lies behind bytes that we do not read. Nobody honest does.
        """
        with trio.move_on_after(_FULL_S):
            await queue.send(data)
            return True
        return False

    async def _receive(self) -> bytes:
        try:
            return bytes(await self.stream.receive_some(_READ_BYTES))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return b""

    async def _hand_on(self, queue: trio.MemoryReceiveChannel[bytes]) -> None:
        # HTTP/1.1 only. hypercorn's HTTP/2 lets a client that opens no window hold a reply, and
        # with it the slot, for ever; and nobody needs it to talk to one slot.
        self.protocol.protocol._check_protocol = _stay_with_http1  # type: ignore[union-attr,method-assign]
        async for data in queue:
            await self.protocol.handle(RawData(data))


async def _stay_with_http1(event: object) -> None:
    """Replace H11Protocol._check_protocol, which switches to HTTP/2 when a client asks."""


class HttpServer:
    """Serves one ASGI application on listening sockets.

    Args:
        app: the application.
        listeners: bound and listening; closed when serving ends.
        keep_alive_s: an idle connection lives this long.
        write_timeout_s: see Connection.
    """

    def __init__(
        self,
        app: ASGIFramework,
        listeners: Sequence[socket.socket],
        *,
        keep_alive_s: float = 75.0,
        write_timeout_s: float = 60.0,
    ) -> None:
        self._listeners = listeners
        self._context = WorkerContext(None)
        self._connections: set[Connection] = set()
        self._accepting = trio.CancelScope()
        config = Config()
        config.keep_alive_timeout = keep_alive_s
        config.keep_alive_max_requests = 1_000_000
        config.h11_max_incomplete_size = 64 * 1024
        config.include_date_header = False  # a relayed reply carries its backend's headers only
        config.include_server_header = False
        config.accesslog = None
        config.errorlog = _log  # or it writes to stderr itself
        self._serve = partial(
            Connection,
            wrap_app(app, config.wsgi_max_body_size, "asgi"),
            config,
            self._context,
            write_timeout_s=write_timeout_s,
            connections=self._connections,
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; then let the last of replies leave, and cut off what is left."""
        async with trio.open_nursery() as nursery:
            connections = await nursery.start(self._hold_connections)
            try:
                with self._accepting:
                    await self._accept(connections, task_status)
                await trio.sleep_forever()  # stop_accepting: the replies go on
            finally:
                await self._context.terminated.set()  # idle keep-alive connections close
                with trio.CancelScope(shield=True):
                    with trio.move_on_after(_LINGER_S):
                        while self._connections:  # noqa: ASYNC110 - hypercorn has no event for it
                            await trio.sleep(0.01)
                    for connection in tuple(self._connections):
                        connection.abort()
                connections.cancel_scope.cancel()

    def stop_accepting(self) -> None:
        """Close the listeners and go on with the connections that there are.

        Whoever connects to a socket that a service manager holds as well waits in its backlog.
        """
        self._accepting.cancel()

    @staticmethod
    async def _hold_connections(*, task_status: trio.TaskStatus[trio.Nursery]) -> None:
        """Keep the connections' tasks out of the reach of the cancel that stops the server."""
        async with trio.open_nursery() as connections:
            connections.cancel_scope.shield = True
            task_status.started(connections)
            await trio.sleep_forever()

    async def _accept(self, connections: trio.Nursery, task_status: trio.TaskStatus[None]) -> None:
        listeners = [
            trio.SocketListener(trio.socket.from_stdlib_socket(listener))
            for listener in self._listeners
        ]
        task_status.started()
        await trio.serve_listeners(self._handle, listeners, handler_nursery=connections)

    async def _handle(self, stream: trio.SocketStream) -> None:
        with contextlib.suppress(OSError):  # TCP only
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await self._serve(stream).run()
