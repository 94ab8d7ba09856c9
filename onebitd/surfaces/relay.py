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
JSON_TYPE: Final = b"application/json; charset=utf-8"
_END_S: Final = 60.0
"""How long the last send of a reply may take: it cannot be cancelled."""
_PIECE_S: Final = 60.0
"""How long a client may take between two pieces of its request's body, and to begin with it."""
_SLOWEST_BYTES_PER_S: Final = 1024
"""After the first minute a body must have come faster than this on the average."""
_DISCARD_S: Final = 2.0
_NO_CONTENT: Final = 204
_BLANK_LINES: Final = (b"\n\n", b"\r\n\r\n")
_COMMENT: Final = b": waiting for the prompt\n\n"

Headers = list[tuple[bytes, bytes]]


class Client:
    """The client's side of one request: its head, its body, and what it is sent.

    Attributes:
        keepalive_s: set before `run`: a stream silent this long before its first byte gets SSE
            comments; 0: never.
        early_headers: set before `run`: what is ours in the head that comes with a first comment.
        gone: True once the client has left.
    """

    def __init__(
        self, scope: HTTPScope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        self._receive = receive
        self._send = send
        self._head_sent = False
        self._open_stream = False  # a 200 event stream has begun and not ended: errors are events
        # The last bytes of such a stream; None while some are being sent.
        self._last_sent: bytes | None = b""
        self._comments_held = False  # something that matters is being sent, or has begun
        self._commenting: trio.Event | None = None  # one is being sent right now
        self._watching: trio.CancelScope | None = None
        self.keepalive_s = 0.0
        self.early_headers: Headers = []
        self.gone = False
        self.method = scope["method"].encode("ascii")
        query = scope["query_string"]
        self.path: str = scope["path"]
        self.target: bytes = scope["raw_path"] + (b"?" + query if query else b"")
        self.headers: Headers = [(name.lower(), value) for name, value in scope["headers"]]

    def forwarded_headers(self, *, drop: Sequence[bytes] = ()) -> Headers:
        """Return the headers that go on to the decoder."""
        fields = [value for name, value in self.headers if name == b"connection"]
        named = b",".join(fields).lower().split(b",")
        dropped = _NOT_FORWARDED.union(drop, (token.strip() for token in named)) - {b"host"}
        return [(name, value) for name, value in self.headers if name not in dropped]

    async def read_body(self, limit_bytes: int) -> bytes:
        """Return the request's body.

        Raises:
            RequestError: 413 when it is larger than the limit, 408 when it does not go on.
            ClientGone: the client left before it was complete.
        """
        fields = dict(self.headers)
        declared = fields.get(b"content-length")
        if declared in (None, b"0") and b"transfer-encoding" not in fields:
            return b""
        if declared is not None and declared.isdigit() and int(declared) > limit_bytes:
            await self.discard_body()
            raise _too_large(limit_bytes)
        body = bytearray()
        more = True
        with trio.CancelScope() as patience:
            started = trio.current_time()
            while more:
                fair_s = max(_PIECE_S, len(body) / _SLOWEST_BYTES_PER_S)
                patience.deadline = min(trio.current_time() + _PIECE_S, started + fair_s)
                message: Any = await self._receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                body += message.get("body", b"")
                if len(body) > limit_bytes:
                    break
                more = message.get("more_body", False)
        if patience.cancelled_caught:
            raise RequestError(
                408,
                f"the request's body did not go on for {_PIECE_S:g} s,"
                f" or came slower than {_SLOWEST_BYTES_PER_S} bytes a second",
            )
        if more:
            body.clear()
            await self.discard_body()
            raise _too_large(limit_bytes)
        return bytes(body)

    async def discard_body(self) -> None:
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
        failure: Exception | None = None
        self._watching = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, self._watching, nursery.cancel_scope)
            if self.keepalive_s > 0:
                nursery.start_soon(self._comment)
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - raised again outside the nursery
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _watch(self, watching: trio.CancelScope, work: trio.CancelScope) -> None:
        """Await the disconnect for as long as the reply runs."""
        with watching:
            while True:
                message: Any = await self._receive()
                if message["type"] == "http.disconnect":
                    self.gone = True
                    work.cancel()
                    return

    async def _comment(self) -> None:
        """Let a client that waits for its stream hear that it is still there."""
        while True:
            await trio.sleep(self.keepalive_s)
            if self._comments_held:
                continue
            self._commenting = trio.Event()
            try:
                if not self._head_sent:
                    headers = [(b"content-type", b"text/event-stream"), *self.early_headers]
                    await self._send_head(200, headers, is_stream=True)
                await self._send(
                    {"type": "http.response.body", "body": _COMMENT, "more_body": True}
                )
            finally:
                self._commenting.set()
                self._commenting = None

    async def _hold_comments(self) -> None:
        """From here on only the caller sends."""
        self._comments_held = True
        if self._commenting is not None:
            await self._commenting.wait()

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
        is_stream = _is_stream(reply)
        data: bytes | None = None
        await self._hold_comments()
        if not is_stream:
            if self._open_stream:
                error = await _error_of(reply)
                on_end()
                await self._send_error_event(*error)
                return None
            try:
                # Its head waits for its first byte: a decoder that dies now can be replaced.
                data = await reply.read()
            except BackendError:
                self._comments_held = False
                raise
        if not self._head_sent:
            await self._send_head(
                reply.status, end_to_end(reply.headers) + added, is_stream=is_stream
            )
        if data is None:
            self._comments_held = False  # a decoder may begin a stream long before it says a word
            data = await reply.read()
            await self._hold_comments()
        # What is sent now is sent once a token: no lock, no scope, no call that is not needed.
        send, read = self._send, reply.read
        while data:
            on_data(data)
            if reply.ended:
                break
            self._last_sent = None
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._last_sent = data
            try:
                data = await read()
            except BackendError as broken:
                on_end()
                await self._break_off(broken)
                return broken
        on_end()
        await self._send_end(data)
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
            headers = [(b"content-type", JSON_TYPE), *added]
            if error.retry_after_s is not None:
                headers.append((b"retry-after", str(error.retry_after_s).encode()))
            await self.send_whole(error.status, headers, json.dumps(error.body()).encode())

    async def send_whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer with a body that is there already."""
        kept = [(name, value) for name, value in headers if name != b"content-length"]
        if status != _NO_CONTENT:
            kept.append((b"content-length", b"%d" % len(body)))
        await self._hold_comments()
        # Shielded: a stop must not come between a head and its body.
        with _bounded():
            await self._send_head(status, kept, is_stream=False)
            await self._send_end(body)

    async def _send_error_event(self, message: str, status: int, kind: str) -> None:
        await self._hold_comments()
        event = sse.error_event(message, status, kind)
        # What the decoder left half an event must not swallow this one; blank lines say nothing.
        if self._last_sent != b"" and not (self._last_sent or b"").endswith(_BLANK_LINES):
            event = b"\n\n" + event
        await self._send_end(event)

    async def _send_head(self, status: int, headers: Headers, *, is_stream: bool) -> None:
        """Begin the reply; shielded, for what can still be sent depends on whether it has begun."""
        self._head_sent, self._open_stream = True, is_stream
        with _bounded():
            await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send_end(self, data: bytes = b"") -> None:
        """Send the last of the body. The watcher stops first and the send is shielded: hypercorn,
        inside it, reports a disconnect of its own making, which must not cancel what it still has
        to do.
        """
        self._open_stream = False
        if self._watching is not None:
            self._watching.cancel()
        with _bounded():
            await self._send({"type": "http.response.body", "body": data, "more_body": False})


class ClientGone(Exception):
    """The client left before its request was complete."""


def end_to_end(headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    """Return the headers of a reply that are for the client, not for one connection."""
    return [(name, value) for name, value in headers if name not in HOP_BY_HOP]


def _bounded() -> trio.CancelScope:
    """A scope for a send that a cancel must not interrupt, and that ends nevertheless."""
    return trio.CancelScope(shield=True, deadline=trio.current_time() + _END_S)


def _too_large(limit_bytes: int) -> RequestError:
    return RequestError(
        413, f"the request body is larger than {limit_bytes >> 20} MiB (http.max_body_mib)"
    )


async def _error_of(reply: Reply) -> tuple[str, int, str]:
    """Return message, status and type of an error reply: the decoder's own where it names them."""
    status = reply.status if reply.status >= 400 else 502
    try:
        raw = await reply.read_all()
    except BackendError:
        return f"the decoder answered with status {reply.status}", status, "server_error"
    try:
        error = json.loads(raw)["error"]
        return str(error["message"]), status, str(error["type"])
    except (ValueError, RecursionError, TypeError, LookupError):
        return raw[:500].decode("utf-8", "replace"), status, "server_error"


def _is_stream(reply: Reply) -> bool:
    content_type = dict(reply.headers).get(b"content-type", b"")
    return reply.status == 200 and content_type.startswith(b"text/event-stream")
