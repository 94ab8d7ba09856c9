"""hypercorn's HTTP/1.1 protocol, with nothing to switch to and with errors that say something."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

import h11
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, Updated
from hypercorn.protocol.events import Body, EndBody, Request, Response, StreamClosed
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ASGIFramework, ConnectionState

from onebitd.core.errors import RequestError
from onebitd.core.refusal import refusal

log = logging.getLogger("hypercorn.error")

MAX_HEAD_BYTES: Final = 64 * 1024
MAX_HEADER_FIELDS: Final = 100

_TOO_LARGE: Final = 431
LATE: Final = 408
_EVENTS_A_TURN: Final = 64
"""Others get their turn after so many: what one read brings may be ten thousand chunks of a byte,
and a fifth of a second's work."""
_BUSY: Final = Updated(idle=False)
_END_OF_BODY: Final = EndBody(stream_id=STREAM_ID)


def refusal_of_head(status: int, why: str = "") -> bytes:
    """Return the whole reply to a request that is not even read to the end of its head."""
    if status == LATE:
        message = "the head of the request did not come whole in time; send it again"
    elif status == _TOO_LARGE:
        message = (
            "the head of the request is too large; send at most"
            f" {MAX_HEADER_FIELDS} header fields, {MAX_HEAD_BYTES >> 10} KiB in all"
        )
    else:
        message = f"not a request of HTTP/1.1 ({why}); this port speaks neither TLS nor HTTP/2"
    return refusal(RequestError(status, message))


class Inbox:
    """What a client sends, on its way to the application: pieces of a body, and its leaving."""

    _PIECES: Final = 10

    def __init__(self) -> None:
        self._pieces: deque[Any] = deque()
        self._gone: Any = None
        self._unread = trio.lowlevel.ParkingLot()
        self._room = trio.lowlevel.ParkingLot()

    async def put(self, message: Any) -> None:  # noqa: ANN401 - ASGI's, hypercorn's business
        """Add a message of ASGI. Never waits; who reads more from a client does, see wait_room."""
        if message["type"] == "http.disconnect":
            self._gone = message
            self._room.unpark_all()
        else:
            self._pieces.append(message)
        if self._unread:
            self._unread.unpark_all()

    async def receive(self) -> Any:  # noqa: ANN401 - see put
        """Return the next message; that the client has left, again and again."""
        while not self._pieces:
            if self._gone is not None:
                return self._gone
            await self._unread.park()
        if self._room:
            self._room.unpark_all()
        return self._pieces.popleft()

    @property
    def has_room(self) -> bool:
        """True while the application keeps up, or needs no more."""
        return len(self._pieces) < self._PIECES or self._gone is not None

    async def wait_room(self) -> None:
        """Wait until more may be read for it."""
        while not self.has_room:
            await self._room.park()


class Requests:
    """Runs the application on each request of one connection; hypercorn calls it a task group.

    Attributes:
        inbox: of the last request.
        nursery: to be set before the first one.
    """

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.nursery: trio.Nursery

    async def spawn_app(
        self,
        app: Any,  # noqa: ANN401 - an ASGI application; hypercorn's type is a wrapper's
        config: object,
        scope: Any,  # noqa: ANN401
        send: Callable[[Any], Awaitable[None]],
    ) -> Callable[[Any], Awaitable[None]]:
        """Start it; return what takes the messages that it receives."""
        self.inbox = inbox = Inbox()
        self.nursery.start_soon(self._serve, app, scope, inbox.receive, send)
        return inbox.put

    async def _serve(
        self,
        app: Any,  # noqa: ANN401
        scope: Any,  # noqa: ANN401
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        try:
            await app(scope, receive, send)
        except* Exception:
            log.exception("the application failed")
        finally:
            await send(None)


class Http1(H11Protocol):
    """One connection's HTTP/1.1.

    No HTTP/2: hypercorn's lets a client that opens no window hold a reply, and with it the slot,
    for ever. No WebSocket: nothing here speaks it. Who asks for either gets HTTP/1.1.

    Handing on what was read never waits: neither for the application (see Inbox) nor for the end
    of the reply before it, so that one task can go on reading.

    Args:
        write: sends bytes to the client.
        note: is told everything else, see hypercorn.events.
    """

    def __init__(
        self,
        app: ASGIFramework,
        config: Config,
        context: WorkerContext,
        requests: Requests,
        addresses: tuple[tuple[str, int] | None, tuple[str, int] | None],
        write: Callable[[bytes], Awaitable[None]],
        note: Callable[[Event], Awaitable[None]],
    ) -> None:
        super().__init__(
            app,  # type: ignore[arg-type]
            config,
            context,
            requests,  # type: ignore[arg-type]
            ConnectionState({}),
            False,
            *addresses,
            note,
        )
        self._write = write

    @property
    def is_mid_request(self) -> bool:
        """True while a part of a request is still to come, or what came was none."""
        return self.connection.their_state not in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED)

    @property
    def waiting_bytes(self) -> int:
        """How much has come behind the request that is being served, or of the next one's head."""
        return len(self.connection.trailing_data[0])

    async def take(self, data: bytes) -> None:
        """Hand on what was read."""
        self.connection.receive_data(data)
        await self.go_on()

    async def go_on(self) -> None:
        """Hand on what there is, up to the end of a request."""
        for number in itertools.count(1):
            if number % _EVENTS_A_TURN == 0:
                await trio.lowlevel.cancel_shielded_checkpoint()
            if self.connection.they_are_waiting_for_100_continue:
                await self._send_h11_event(h11.InformationalResponse(status_code=100, headers=[]))
            try:
                event = self.connection.next_event()
            except h11.RemoteProtocolError as error:
                await self._refuse(error)
                return
            if type(event) is h11.Request:
                await self.send(_BUSY)
                beyond = _beyond_us(event)
                if beyond is not None:
                    await self._refuse(beyond)
                    return
                await self._begin(event)
            elif self.stream is not None and type(event) is h11.Data:
                await self.stream.handle(Body(stream_id=STREAM_ID, data=event.data))
            elif self.stream is not None and type(event) is h11.EndOfMessage:
                await self.stream.handle(_END_OF_BODY)
            else:
                return

    async def stream_send(self, event: StreamEvent) -> None:
        """Take what the application sends."""
        if isinstance(event, Body):  # first: there are many
            await self._send_h11_event(h11.Data(data=event.data))
        elif isinstance(event, Response):
            await self._send_h11_event(
                h11.Response(status_code=event.status_code, headers=event.headers)
            )
        elif isinstance(event, EndBody):
            await self._send_h11_event(h11.EndOfMessage())
        elif isinstance(event, StreamClosed):
            await self._maybe_recycle()

    async def _begin(self, request: h11.Request) -> None:
        """Start the application on a request."""
        self.stream = HTTPStream(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            STREAM_ID,
        )
        await self.stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=[(name.lower(), value) for name, value in request.headers.raw_items()],
                http_version=request.http_version.decode("ascii"),
                method=request.method.decode("ascii").upper(),
                raw_path=request.target,
                state=self.connection_state,
            )
        )

    async def _send_h11_event(self, event: Any) -> None:  # noqa: ANN401 - any of h11's
        try:
            data = self.connection.send(event)
        except h11.LocalProtocolError:
            if self.connection.their_state is not h11.ERROR:
                raise
        else:
            await self._write(data)

    async def _refuse(self, error: h11.RemoteProtocolError) -> None:
        """Say what is wrong, where that can still be said, and close."""
        if self.connection.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            why, _, _ = str(error).partition(": bytearray")  # and no word of what it quotes
            await self._write(refusal_of_head(error.error_status_hint, why[:200]))
        await self.send(Closed())


def _beyond_us(request: h11.Request) -> h11.RemoteProtocolError | None:
    """Return what h11 lets pass and we do not."""
    if request.http_version not in (b"1.1", b"1.0"):
        version = request.http_version.decode("ascii")
        return h11.RemoteProtocolError(f"its version is {version}", error_status_hint=400)
    if len(request.headers) > MAX_HEADER_FIELDS:
        return h11.RemoteProtocolError("too many header fields", error_status_hint=_TOO_LARGE)
    return None
