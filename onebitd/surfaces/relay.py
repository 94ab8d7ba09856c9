"""From a reply of the decoder to a client: status, headers and bytes as they came.

A plain ASGI callable, not a Quart view: every layer between costs each chunk of each stream.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, HTTPScope

from onebitd.adapters.llama_server import Reply
from onebitd.core import sse
from onebitd.core.errors import BackendError, RequestError

HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Fields of one connection only (RFC 9110, section 7.6.1)."""

_NOT_FORWARDED: Final = HOP_BY_HOP | {
    b"content-length",
    b"expect",
    b"http2-settings",
    # llama-server goes on generating such a stream when its client has left, to replay it later:
    # the slot would be busy with nobody's reply.
    b"x-conversation-id",
}
_END_S: Final = 60.0
"""How long the last send of a reply may take: it cannot be cancelled."""
_PIECE_S: Final = 60.0
"""How long a client may take between two pieces of its request's body."""
_DISCARD_S: Final = 2.0
_COMMENT: Final = b": waiting for the prompt\n\n"

Headers = list[tuple[bytes, bytes]]


class Client:
    """The client's side of one request: its head, its body, and what it is sent.

    Attributes:
        keepalive_s: set before `run`: a stream silent this long before its first byte gets SSE
            comments; 0: never.
        gone: True once the client has left.
    """

    def __init__(
        self, scope: HTTPScope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        self._receive = receive
        self._send = send
        self._sending = trio.Lock()
        self._head_sent = False
        self._open_stream = False  # a 200 event stream has begun and not ended: errors are events
        self._spoken = False  # something that matters was sent: no more comments
        self._watching: trio.CancelScope | None = None
        self.keepalive_s = 0.0
        self.gone = False
        self.method = scope["method"].encode("ascii")
        query = scope["query_string"]
        self.path: str = scope["path"]
        self.target: bytes = scope["raw_path"] + (b"?" + query if query else b"")
        self.headers: Headers = [(name.lower(), value) for name, value in scope["headers"]]

    def forwarded_headers(self, *, drop: Sequence[bytes] = ()) -> Headers:
        """Return the headers that go on to the decoder."""
        named = dict(self.headers).get(b"connection", b"").lower().split(b",")
        dropped = _NOT_FORWARDED.union(drop, (token.strip() for token in named)) - {b"host"}
        return [(name, value) for name, value in self.headers if name not in dropped]

    async def read_body(self, limit_bytes: int) -> bytes:
        """Return the request's body.

        Raises:
            RequestError: 413 when it is larger than the limit, 408 when it does not go on.
            ClientGone: the client left before it was complete.
        """
        declared = dict(self.headers).get(b"content-length", b"")
        if declared.isdigit() and int(declared) > limit_bytes:
            await self._discard_body()
            raise _too_large(limit_bytes)
        body = bytearray()
        while True:
            message: Any = None
            with trio.move_on_after(_PIECE_S):
                message = await self._receive()
            if message is None:
                raise RequestError(408, f"the request's body did not go on for {_PIECE_S:g} s")
            if message["type"] == "http.disconnect":
                raise ClientGone
            body += message.get("body", b"")
            if len(body) > limit_bytes:
                body.clear()
                await self._discard_body()
                raise _too_large(limit_bytes)
            if not message.get("more_body", False):
                return bytes(body)

    async def _discard_body(self) -> None:
        """Let the client finish writing, for a while: many read no answer before that."""
        with trio.move_on_after(_DISCARD_S):
            while True:
                message: Any = await self._receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work, and cancel it when the client leaves.

        Returns when the work is done or was cancelled so; its errors come out unwrapped.
        """
        failure: list[Exception] = []

        async def guarded() -> None:
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - raised again outside the nursery
                failure.append(error)
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            await nursery.start(self._watch, nursery.cancel_scope)
            if self.keepalive_s > 0:
                nursery.start_soon(self._comment)
            nursery.start_soon(guarded)
        if failure:
            raise failure[0]

    async def _watch(self, work: trio.CancelScope, *, task_status: trio.TaskStatus[None]) -> None:
        """Await the disconnect for as long as the reply runs."""
        with trio.CancelScope() as self._watching:
            task_status.started()
            while True:
                message: Any = await self._receive()
                if message["type"] == "http.disconnect":
                    self.gone = True
                    work.cancel()
                    return

    async def _comment(self) -> None:
        while True:
            await trio.sleep(self.keepalive_s)
            async with self._sending:
                if self._spoken:
                    return
                if not self._head_sent:
                    await self._send_head(200, [(b"content-type", b"text/event-stream")])
                self._open_stream = True
                await self._send_data(_COMMENT)

    async def send_reply(
        self,
        reply: Reply,
        added: Headers,
        on_data: Callable[[bytes], None] = lambda data: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> BackendError | None:
        """Relay a reply to its end.

        Args:
            reply: its head has come; closed by its owner.
            added: headers of ours.
            on_data: sees each piece of the body before it is sent.
            on_end: called when the decoder is done, before the client has the end of it.

        Returns:
            What broke the body off in the middle, None when the client has all of it.

        Raises:
            BackendError: the decoder broke off before any of the body was sent; another reply may
                then be sent in its place. Later, a stream ends with an error event, and any other
                reply with the connection.
        """
        if self._open_stream and not _is_stream(reply):
            await self._send_error_event(*await _error_of(reply))
            return None
        data: bytes | None = None
        if not _is_stream(reply):
            # Its head waits for its first byte, so that a decoder that dies now can be replaced.
            data = await reply.read()
        async with self._sending:
            self._spoken = self._spoken or not _is_stream(reply)
            if not self._head_sent:
                headers = [(name, value) for name, value in reply.headers if name not in HOP_BY_HOP]
                await self._send_head(reply.status, headers + added)
            self._open_stream = _is_stream(reply)
        if data is None:
            data = await reply.read()
        while data:
            on_data(data)
            async with self._sending:
                self._spoken = True
                await self._send_data(data)
            try:
                data = await reply.read()
            except BackendError as error:
                on_end()
                await self._break_off(error)
                return error
        on_end()
        await self._send_end()
        return None

    async def _break_off(self, error: BackendError) -> None:
        """End a body in the middle. Any but a stream ends without its end, so that it is seen."""
        if self._open_stream:
            await self._send_error_event(str(error), 500, "server_error")

    async def send_error(self, error: RequestError, added: Headers) -> None:
        """Answer with an error in the public shape, in whatever way is still open."""
        if self._open_stream:
            await self._send_error_event(error.message, error.status, error.kind)
        elif not self._head_sent:
            headers = [(b"content-type", b"application/json; charset=utf-8"), *added]
            if error.retry_after_s is not None:
                headers.append((b"retry-after", str(error.retry_after_s).encode()))
            await self.send_whole(error.status, headers, json.dumps(error.body()).encode())

    async def send_whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer with a body that is there already."""
        kept = [
            (name, value)
            for name, value in headers
            if name not in HOP_BY_HOP and name != b"content-length"
        ]
        # Shielded: a stop must not come between a head and its body.
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _END_S):
            async with self._sending:
                self._spoken = True
                await self._send_head(status, [*kept, (b"content-length", str(len(body)).encode())])
                await self._send_data(body)
            await self._send_end()

    async def _send_error_event(self, message: str, status: int, kind: str) -> None:
        async with self._sending:
            self._spoken = True
            await self._send_data(sse.error_event(message, status, kind))
        await self._send_end()

    async def _send_head(self, status: int, headers: Headers) -> None:
        self._head_sent = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send_data(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _send_end(self) -> None:
        """End the body. The watcher stops first and the send is shielded: hypercorn, inside it,
        reports a disconnect of its own making, which must not cancel what it still has to do.
        """
        self._open_stream = False
        if self._watching is not None:
            self._watching.cancel()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _END_S):
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class ClientGone(Exception):
    """The client left before its request was complete."""


def _too_large(limit_bytes: int) -> RequestError:
    return RequestError(
        413, f"the request body is larger than {limit_bytes >> 20} MiB (http.max_body_mib)"
    )


async def _error_of(reply: Reply) -> tuple[str, int, str]:
    """Return message, status and type of an error reply: the decoder's own where it names them."""
    try:
        raw = await reply.read_all()
    except BackendError:
        return f"the decoder answered with status {reply.status}", reply.status, "server_error"
    try:
        error = json.loads(raw)["error"]
        return str(error["message"]), reply.status, str(error["type"])
    except (ValueError, RecursionError, TypeError, LookupError):
        return raw[:500].decode("utf-8", "replace"), reply.status, "server_error"


def _is_stream(reply: Reply) -> bool:
    content_type = dict(reply.headers).get(b"content-type", b"")
    return reply.status == 200 and content_type.startswith(b"text/event-stream")
