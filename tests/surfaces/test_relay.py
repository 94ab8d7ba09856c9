"""The client's side of one request, with an ASGI server in memory and replies from a socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from onebitd.adapters.llama_server import Reply
from onebitd.core.errors import BackendError, BackendGone, RequestError
from onebitd.core.http1 import body_reader
from onebitd.surfaces.relay import Client, ClientGone, Headers

STREAM: Headers = [(b"content-type", b"text/event-stream"), (b"transfer-encoding", b"chunked")]
JSON: Headers = [(b"content-type", b"application/json"), (b"content-length", b"10")]
COMMENT = b": waiting for the prompt\n\n"
MIB = 1 << 20


class Server:
    """Plays the ASGI server: `sent` is what the client would see; `leave` closes its end."""

    def __init__(self, headers: Headers | None = None, body: tuple[bytes, ...] = (b"",)) -> None:
        self.sent: list[Any] = []
        self._to_app, self._messages = trio.open_memory_channel[Any](100)
        for number, piece in enumerate(body):
            more = number + 1 < len(body)
            self._put({"type": "http.request", "body": piece, "more_body": more})
        self.client = Client(self._scope(headers or []), self._messages.receive, self._send)

    @staticmethod
    def _scope(headers: Headers) -> Any:
        return {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat completions",
            "raw_path": b"/v1/chat%20completions",
            "query_string": b"a=b",
            "headers": headers,
        }

    def _put(self, message: Any) -> None:
        self._to_app.send_nowait(message)

    async def _send(self, message: Any) -> None:
        await trio.lowlevel.checkpoint()
        self.sent.append(message)
        if message["type"] == "http.response.body" and not message["more_body"]:
            self.leave()  # as hypercorn does after a reply's end

    def leave(self) -> None:
        """The client closes its connection."""
        self._put({"type": "http.disconnect"})

    @property
    def head(self) -> tuple[int, Headers]:
        """The one head that was sent, first of all."""
        starts = [message for message in self.sent if message["type"] == "http.response.start"]
        assert self.sent[0] is starts[0]
        assert len(starts) == 1
        return starts[0]["status"], starts[0]["headers"]

    @property
    def body(self) -> bytes:
        """The body so far."""
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def ended(self) -> bool:
        """True once the body has been ended as a whole one."""
        return bool(self.sent) and self.sent[-1].get("more_body") is False

    @property
    def error_event(self) -> Any:
        """The error of the last event."""
        last = self.body.rstrip(b"\n").rpartition(b"\n\n")[2]
        assert last.startswith(b"data: "), self.body
        return json.loads(last[6:])["error"]


class Backend:
    """The decoder's end of one reply's connection."""

    def __init__(self, status: int, headers: Headers, method: bytes = b"POST") -> None:
        ours, theirs = trio.socket.socketpair()
        self._stream = trio.SocketStream(theirs)
        reader = body_reader(method, status, headers)
        self.reply = Reply(trio.SocketStream(ours), status, headers, reader, b"")
        self._chunked = isinstance(reader, type(body_reader(b"POST", 200, STREAM)))

    async def say(self, data: bytes) -> None:
        """Send a piece of the body."""
        await self._stream.send_all(b"%x\r\n%s\r\n" % (len(data), data) if self._chunked else data)
        await trio.testing.wait_all_tasks_blocked(0.001)

    async def end(self) -> None:
        """End the body, then the connection."""
        if self._chunked:
            await self._stream.send_all(b"0\r\n\r\n")
        await self.hang_up()

    async def hang_up(self) -> None:
        """Close without an end."""
        await self._stream.aclose()
        await trio.testing.wait_all_tasks_blocked(0.001)


@asynccontextmanager
async def backend(status: int, headers: Headers, method: bytes = b"POST") -> AsyncIterator[Backend]:
    """Yield a decoder's reply; both ends are closed afterwards."""
    made = Backend(status, headers, method)
    try:
        yield made
    finally:
        made.reply.close()
        await made._stream.aclose()


def test_client_reads_the_request_as_it_came() -> None:
    """Path decoded, target raw with its query, header names in lower case."""
    client = Server([(b"X-A", b"B")]).client
    assert (client.method, client.path) == (b"POST", "/v1/chat completions")
    assert client.target == b"/v1/chat%20completions?a=b"
    assert client.headers == [(b"x-a", b"B")]


def test_client_forwarded_headers_leave_out_what_is_of_one_connection() -> None:
    """Hop-by-hop fields, those that Connection names, framing, and what the caller drops."""
    headers = [
        (b"host", b"x"),
        (b"connection", b"keep-alive, X-Private"),
        (b"keep-alive", b"5"),
        (b"x-private", b"1"),
        (b"content-length", b"3"),
        (b"transfer-encoding", b"chunked"),
        (b"expect", b"100-continue"),
        (b"upgrade", b"h2c"),
        (b"http2-settings", b"x"),
        (b"authorization", b"secret"),
        (b"accept", b"a"),
        (b"accept", b"b"),
    ]
    found = Server(headers).client.forwarded_headers(drop=(b"authorization",))
    assert found == [(b"host", b"x"), (b"accept", b"a"), (b"accept", b"b")]


async def test_read_body_pieces_are_put_together() -> None:
    """However it was cut, up to the limit itself."""
    server = Server(body=(b"a" * MIB, b"", b"b"))
    assert await server.client.read_body(MIB + 1) == b"a" * MIB + b"b"


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ([(b"content-length", b"1048577")], (b"never read",)),
        ([], (b"a" * MIB, b"b")),
        ([(b"content-length", b"1")], (b"a" * MIB, b"b")),
    ],
    ids=["declared", "counted", "lied"],
)
async def test_read_body_over_the_limit_is_413_naming_it(
    headers: Headers, body: tuple[bytes, ...]
) -> None:
    """By its header, before anything is read, or by its bytes."""
    server = Server(headers, body)
    with pytest.raises(RequestError, match=r"larger than 1 MiB \(http\.max_body_mib\)") as caught:
        await server.client.read_body(MIB)
    assert caught.value.status == 413


async def test_read_body_client_that_leaves_before_its_end_is_gone() -> None:
    """Half a request is none."""
    server = Server(body=(b"half", b"never"))
    server._messages.receive_nowait()
    server._messages.receive_nowait()
    server._put({"type": "http.request", "body": b"half", "more_body": True})
    server.leave()
    with pytest.raises(ClientGone):
        await server.client.read_body(MIB)


async def test_send_reply_relays_status_headers_and_bytes() -> None:
    """All but the connection's own headers pass, ours are added, and the body ends."""
    headers: Headers = [*JSON, (b"connection", b"close"), (b"keep-alive", b"x"), (b"server", b"l")]
    server = Server()
    seen: list[bytes] = []

    async def work() -> None:
        async with backend(418, headers) as decoder:
            await decoder.say(b"0123456789")
            added = [(b"x-a", b"1")]
            assert await server.client.send_reply(decoder.reply, added, seen.append) is None

    await server.client.run(work)
    assert server.head == (418, [*JSON, (b"server", b"l"), (b"x-a", b"1")])
    assert (server.body, b"".join(seen), server.ended) == (b"0123456789",) * 2 + (True,)
    assert not server.client.gone, "the server's own disconnect at the end is not the client's"


async def test_send_reply_stream_is_passed_on_piece_by_piece() -> None:
    """Nothing is held back, and the head comes before the first piece."""
    server = Server()
    async with trio.open_nursery() as nursery, backend(200, STREAM) as decoder:

        async def work() -> None:
            await server.client.send_reply(decoder.reply, [])

        nursery.start_soon(server.client.run, work)
        await trio.testing.wait_all_tasks_blocked()
        assert server.head == (200, [STREAM[0]])
        for number in range(3):
            await decoder.say(b"data: %d\n\n" % number)
            assert server.body.endswith(b"data: %d\n\n" % number)
        await decoder.end()
        assert server.ended


async def test_send_reply_of_head_and_empty_bodies_end_at_once() -> None:
    """204, 304 and HEAD have no body to wait for."""
    for status, method in ((204, b"POST"), (304, b"GET"), (200, b"HEAD")):
        server = Server()
        async with backend(status, JSON, method) as decoder:
            with trio.fail_after(5):
                await server.client.send_reply(decoder.reply, [])
        assert (server.head[0], server.body, server.ended) == (status, b"", True)


async def test_run_silent_stream_gets_comments_until_its_first_byte_only(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """keepalive_s apart, after a 200 head of ours; none once the decoder speaks."""
    server = Server()
    server.client.keepalive_s = 10.0
    speak, go_on = trio.Event(), trio.Event()

    class Slow:
        """A reply without a socket: autojump cannot see those."""

        status, headers = 200, STREAM
        said = 0

        async def read(self) -> bytes:
            self.said += 1
            if self.said == 1:
                await speak.wait()
                return b"data: 1\n\n"
            if self.said == 2:
                await go_on.wait()
            return b""

    async def work() -> None:
        await server.client.send_reply(Slow(), [])  # type: ignore[arg-type]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.client.run, work)
        await trio.sleep(35)
        assert server.body == COMMENT * 3
        speak.set()
        await trio.sleep(100)
        assert server.body == COMMENT * 3 + b"data: 1\n\n"
        go_on.set()
    assert server.head == (200, [STREAM[0]])
    assert server.ended


async def test_run_status_that_comes_in_time_is_the_real_one(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """An error before the first comment keeps its status and headers."""
    server = Server()
    server.client.keepalive_s = 10.0

    async def work() -> None:
        await trio.sleep(9.9)
        raise RequestError(503, "wait", kind="unavailable_error", retry_after_s=7)

    with pytest.raises(RequestError) as caught:
        await server.client.run(work)
    await server.client.send_error(caught.value, [(b"x-request-id", b"r1")])
    status, headers = server.head
    assert status == 503
    assert dict(headers)[b"retry-after"] == b"7"
    assert dict(headers)[b"x-request-id"] == b"r1"
    assert dict(headers)[b"content-length"] == str(len(server.body)).encode()
    assert json.loads(server.body)["error"] == {
        "message": "wait",
        "type": "unavailable_error",
        "code": 503,
    }
    assert server.ended


async def test_run_without_keepalive_says_nothing_by_itself(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """0 means never."""
    server = Server()

    async def work() -> None:
        await trio.sleep(1000)
        raise RequestError(503, "late")

    with pytest.raises(RequestError):
        await server.client.run(work)
    assert server.sent == []


async def test_send_error_after_comments_is_an_event_of_the_stream(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The status is spent: the error comes as llama-server sends it inside a stream."""
    server = Server()
    server.client.keepalive_s = 10.0

    async def work() -> None:
        await trio.sleep(15)
        raise RequestError(503, "gone", kind="server_error")

    with pytest.raises(RequestError) as caught:
        await server.client.run(work)
    await server.client.send_error(caught.value, [])
    assert server.head[0] == 200
    assert server.body.startswith(COMMENT)
    assert server.error_event == {"message": "gone", "type": "server_error", "code": 503}
    assert server.ended


async def test_send_reply_error_status_after_comments_is_an_event_with_its_words() -> None:
    """The decoder refuses after all: its message and status reach the client as an event."""
    server = Server()
    server.client.keepalive_s = 0.01
    body = b'{"error":{"code":400,"message":"too long","type":"exceed_context_size_error"}}'
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]

    async def work() -> None:
        while not server.body:  # noqa: ASYNC110 - real sockets: no autojump
            await trio.sleep(0.005)
        async with backend(400, headers) as decoder:
            await decoder.say(body)
            await server.client.send_reply(decoder.reply, [])

    with trio.fail_after(10):
        await server.client.run(work)
    assert server.head[0] == 200
    assert server.error_event == json.loads(body)["error"]
    assert server.ended


@pytest.mark.parametrize("headers", [STREAM, JSON], ids=["stream", "json"])
async def test_send_reply_broken_before_its_first_byte_can_be_replaced(headers: Headers) -> None:
    """Nothing was said yet: another decoder's reply takes its place, under one head."""
    server = Server()
    async with backend(200, headers) as first, backend(200, headers) as second:
        await first.hang_up()
        with pytest.raises(BackendGone):
            await server.client.send_reply(first.reply, [])
        assert server.body == b""
        await second.say(b"data: ok\n\n")
        await second.end()
        assert await server.client.send_reply(second.reply, []) is None
    assert server.head[0] == 200
    assert (server.body, server.ended) == (b"data: ok\n\n", True)


async def test_send_reply_stream_broken_in_the_middle_ends_with_an_error_event() -> None:
    """The client sees what was said, an error it can read, and a clean end."""
    server = Server()
    async with backend(200, STREAM) as decoder:
        await decoder.say(b"data: 1\n\n")
        await decoder.hang_up()
        error = await server.client.send_reply(decoder.reply, [])
    assert isinstance(error, BackendError)
    assert server.body.startswith(b"data: 1\n\n")
    assert server.error_event["type"] == "server_error"
    assert server.ended


async def test_send_reply_json_broken_in_the_middle_ends_without_an_end() -> None:
    """Half a document must not look whole: the body stays open, and the server cuts it."""
    server = Server()
    async with backend(200, JSON) as decoder:
        await decoder.say(b"01234")
        await decoder.hang_up()
        error = await server.client.send_reply(decoder.reply, [])
    assert isinstance(error, BackendError)
    assert (server.body, server.ended) == (b"01234", False)
    await server.client.send_error(RequestError(502, "late"), [])
    assert (server.body, server.ended) == (b"01234", False), "no second answer"


async def test_run_client_that_leaves_cancels_the_work() -> None:
    """`gone` is set, and the work's cleanup runs."""
    server = Server(body=())
    cleaned = trio.Event()

    async def work() -> None:
        try:
            await trio.sleep_forever()
        finally:
            cleaned.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.client.run, work)
        await trio.testing.wait_all_tasks_blocked()
        assert not cleaned.is_set()
        server.leave()
    assert cleaned.is_set()
    assert server.client.gone
    assert server.sent == []


async def test_run_work_that_fails_comes_out_unwrapped_and_outer_cancels_pass() -> None:
    """The caller's except clauses see the error itself."""
    server = Server(body=())

    async def fail() -> None:
        await trio.lowlevel.checkpoint()
        raise BackendGone("planted")

    with pytest.raises(BackendGone, match="planted"):
        await server.client.run(fail)
    with trio.move_on_after(0.01) as scope:
        await server.client.run(trio.sleep_forever)
    assert scope.cancelled_caught
    assert not server.client.gone


async def test_send_whole_replaces_the_length_and_leaves_out_connection_headers() -> None:
    """A polled answer is framed by its own bytes."""
    server = Server()
    headers: Headers = [(b"content-length", b"999"), (b"connection", b"close"), (b"x-a", b"1")]
    await server.client.send_whole(200, headers, b"abc")
    assert server.head == (200, [(b"x-a", b"1"), (b"content-length", b"3")])
    assert (server.body, server.ended) == (b"abc", True)
