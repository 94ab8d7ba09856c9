"""The client's side of one request, with an ASGI server in memory and replies from a socket."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from onebitd.adapters.http_server import HttpServer
from onebitd.adapters.llama_server import Reply
from onebitd.core.errors import BackendError, BackendGone, RequestError
from onebitd.core.http1 import body_reader
from onebitd.surfaces.relay import Client, ClientGone, Headers, end_to_end

STREAM: Headers = [(b"content-type", b"text/event-stream"), (b"transfer-encoding", b"chunked")]
JSON: Headers = [(b"content-type", b"application/json"), (b"content-length", b"10")]
CHUNKED: Headers = [(b"transfer-encoding", b"chunked")]
COMMENT = b": waiting for the prompt\n\n"
MIB = 1 << 20
CANCELLED = RequestError(503, "the request was cancelled", kind="cancelled_error")


class Server:
    """Plays the ASGI server: `sent` is what the client would see; `leave` closes its end.

    `may_send` is replaced by a test whose client does not read. What is cancelled while it is being
    sent is lost, or with `sends_first` has been sent.
    """

    def __init__(self, headers: Headers | None = None, body: tuple[bytes, ...] = (b"",)) -> None:
        self.sent: list[Any] = []
        self.may_send = trio.Event()
        self.may_send.set()
        self.sends_first = False
        self._is_sending = False
        self.to_app, self._messages = trio.open_memory_channel[Any](100)
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
        self.to_app.send_nowait(message)

    async def _send(self, message: Any) -> None:
        assert not self._is_sending, "two sends at once"
        self._is_sending = True
        if self.sends_first:
            self.sent.append(message)
        try:
            await trio.lowlevel.checkpoint()
            await self.may_send.wait()
        finally:
            self._is_sending = False
        if not self.sends_first:
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


class Told:
    """A reply without a socket, for tests on a virtual clock: `say` is what `read` returns."""

    ended = False

    def __init__(self, status: int = 200, headers: Headers | None = None) -> None:
        self.status = status
        self.headers = STREAM if headers is None else headers
        self._say, self._said = trio.open_memory_channel[bytes | Exception](10)

    def say(self, data: bytes | Exception) -> None:
        """Let the next read return this, or fail with it."""
        self._say.send_nowait(data)

    async def read(self) -> bytes:
        """Return what comes next."""
        found = await self._said.receive()
        if isinstance(found, Exception):
            raise found
        return found

    async def read_all(self) -> bytes:
        """Return one piece."""
        return await self.read()


class Backend:
    """The decoder's end of one reply's connection."""

    def __init__(self, status: int, headers: Headers, method: bytes = b"POST") -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(theirs))
        reader = body_reader(method, status, headers)
        self.reply = Reply(ours, status, headers, reader, b"")
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
        (b"connection", b"X-Other"),
        (b"connection", b"keep-alive, X-Private"),
        (b"keep-alive", b"5"),
        (b"x-private", b"1"),
        (b"x-other", b"1"),
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
    server = Server(CHUNKED, body=(b"a" * MIB, b"", b"b"))
    assert await server.client.read_body(MIB + 1) == b"a" * MIB + b"b"


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ([(b"content-length", b"1048577")], (b"never read",)),
        (CHUNKED, (b"a" * MIB, b"b")),
        ([(b"content-length", b"1")], (b"a" * MIB, b"b")),
    ],
    ids=["declared", "counted", "lied"],
)
async def test_read_body_over_the_limit_is_413_naming_it(
    headers: Headers, body: tuple[bytes, ...], autojump_clock: trio.testing.MockClock
) -> None:
    """By its header, before anything is read, or by its bytes."""
    server = Server(headers, body)
    with pytest.raises(RequestError, match=r"larger than 1 MiB \(http\.max_body_mib\)") as caught:
        await server.client.read_body(MIB)
    assert caught.value.status == 413


async def test_read_body_client_that_leaves_before_its_end_is_gone() -> None:
    """Half a request is none."""
    server = Server(CHUNKED, body=(b"half", b"never"))
    server._messages.receive_nowait()
    server._messages.receive_nowait()
    server._put({"type": "http.request", "body": b"half", "more_body": True})
    server.leave()
    with pytest.raises(ClientGone):
        await server.client.read_body(MIB)


@pytest.mark.parametrize("headers", [[], [(b"content-length", b"0")]])
async def test_read_body_of_a_request_without_one_waits_for_nothing(headers: Headers) -> None:
    """Its head says so."""
    assert await Server(headers, body=()).client.read_body(MIB) == b""


@pytest.mark.parametrize(
    ("piece", "pause_s", "ends_after_s"),
    [
        (b"", math.inf, 60.0),
        (b"x", 25.0, 60.0),
        (b"x" * 1000, 1.0, 60.0),
        (b"x" * 100_000, 59.0, None),
        (b"x" * 1100, 1.0, None),
    ],
    ids=["silent", "a_byte_now_and_then", "too_slow", "in_bursts", "just_fast_enough"],
)
async def test_read_body_that_hardly_goes_on_is_408_after_a_minute(
    piece: bytes,
    pause_s: float,
    ends_after_s: float | None,
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Silence, or a mean under 1 KiB/s from the first minute on; nobody else is hurried."""
    server = Server(CHUNKED, body=())

    async def trickle() -> None:
        for number in range(100):
            more = number < 99
            await server.to_app.send({"type": "http.request", "body": piece, "more_body": more})
            await trio.sleep(pause_s)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trickle)
        if ends_after_s is None:
            assert await server.client.read_body(1 << 30) == piece * 100
            return nursery.cancel_scope.cancel()
        started = trio.current_time()
        with pytest.raises(RequestError, match="did not go on") as caught:
            await server.client.read_body(MIB)
        assert (caught.value.status, trio.current_time() - started) == (408, ends_after_s)
        nursery.cancel_scope.cancel()


async def _answer_with_the_body(scope: Any, receive: Any, send: Any) -> None:
    client = Client(scope, receive, send)
    try:
        await client.send_whole(200, [], await client.read_body(MIB))
    except RequestError as error:
        await client.send_error(error, [])


@pytest.mark.parametrize("last", [b"", b"a" * MIB], ids=["small", "over_the_limit"])
async def test_read_body_chunked_on_a_real_connection(last: bytes) -> None:
    """After 100 Continue where it is asked for, in pieces of any size, and never beyond the limit.

    A client that curl calls `--expect100-timeout` waits for its 100 before it sends a byte.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    async with trio.open_nursery() as nursery:
        await nursery.start(HttpServer(_answer_with_the_body, [listener]).run)
        stream = await trio.open_tcp_stream(*listener.getsockname())
        async with stream:
            await stream.send_all(
                b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
                b"Expect: 100-continue\r\n\r\n"
            )
            with trio.fail_after(20):
                assert (await stream.receive_some()).startswith(b"HTTP/1.1 100 ")
                for piece in filter(None, (b"hello ", b"world", last)):
                    await stream.send_all(b"%x;ext=1\r\n" % len(piece))
                    await stream.send_all(piece + b"\r\n")
                await stream.send_all(b"0\r\nX-Trailer: 1\r\n\r\n")
                reply = b""
                while not reply.endswith((b"hello world", b"}")):
                    reply += await stream.receive_some()
        assert reply.startswith(b"HTTP/1.1 413 " if last else b"HTTP/1.1 200 ")
        nursery.cancel_scope.cancel()


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
    assert len(server.sent) == 2, "a reply that is there whole is sent whole"
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
    reply = Told()

    async def work() -> None:
        await server.client.send_reply(reply, [])  # type: ignore[arg-type]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.client.run, work)
        await trio.sleep(35)
        assert server.body == COMMENT * 3
        reply.say(b"data: 1\n\n")
        await trio.sleep(100)
        assert server.body == COMMENT * 3 + b"data: 1\n\n"
        reply.say(b"")
    assert server.head == (200, [STREAM[0]])
    assert server.ended


async def test_run_first_comments_head_has_what_is_ours(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Before there is a reply; the reply's own head then comes too late and is left out."""
    server = Server()
    server.client.keepalive_s = 10.0
    server.client.early_headers = [(b"x-request-id", b"r1")]
    reply = Told()

    async def work() -> None:
        await trio.sleep(25)
        reply.say(b"data: 1\n\n")
        reply.say(b"")
        await server.client.send_reply(reply, [(b"x-late", b"1")])  # type: ignore[arg-type]

    await server.client.run(work)
    assert server.head == (200, [STREAM[0], (b"x-request-id", b"r1")])
    assert (server.body, server.ended) == (COMMENT * 2 + b"data: 1\n\n", True)


async def test_run_comment_that_the_client_does_not_take_is_waited_for(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Neither the reply's first words nor an error come between its head and itself."""
    for end in (b"data: 1\n\n", BackendGone("planted")):
        server = Server()
        server.client.keepalive_s = 10.0
        server.may_send = trio.Event()
        reply = Told()
        reply.say(b"data: 0\n\n")
        reply.say(end)
        reply.say(b"")

        async def work(server: Server = server, reply: Told = reply) -> None:
            await trio.sleep(11)
            await server.client.send_reply(reply, [])  # type: ignore[arg-type]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.client.run, work)
            await trio.sleep(50)
            assert server.sent == []
            server.may_send.set()
        assert server.head[0] == 200
        assert server.body.startswith(COMMENT + b"data: 0\n\ndata: ")
        assert server.ended


async def test_run_error_status_whose_words_are_late_is_the_real_one(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The decoder has answered: no comment takes the place of that (the bug: its JSON followed)."""
    server = Server()
    server.client.keepalive_s = 10.0
    reply = Told(400, JSON)

    async def work() -> None:
        await server.client.send_reply(reply, [])  # type: ignore[arg-type]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.client.run, work)
        await trio.sleep(35)
        assert server.sent == []
        reply.say(b"0123456789")
        reply.say(b"")
    assert (server.head, server.body, server.ended) == ((400, JSON), b"0123456789", True)


async def test_run_decoder_that_died_before_its_error_is_waited_for_with_comments(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The next decoder may take as long as the first one."""
    server = Server()
    server.client.keepalive_s = 10.0
    first, second = Told(500, JSON), Told()
    first.say(BackendGone("planted"))

    async def work() -> None:
        with pytest.raises(BackendGone):
            await server.client.send_reply(first, [])  # type: ignore[arg-type]
        await trio.sleep(25)
        second.say(b"data: 1\n\n")
        second.say(b"")
        await server.client.send_reply(second, [])  # type: ignore[arg-type]

    await server.client.run(work)
    assert (server.body, server.ended) == (COMMENT * 2 + b"data: 1\n\n", True)


@pytest.mark.parametrize(
    ("seconds", "reads"),
    [(5, True), (15, True), (15, False)],
    ids=["before_the_head", "after_a_comment", "while_the_head_is_sent"],
)
async def test_send_error_of_a_cancelled_request_that_has_no_reply_yet(
    seconds: float, reads: bool, autojump_clock: trio.testing.MockClock
) -> None:
    """503 as its status while that can be said, and as an event from then on."""
    server = Server()
    server.client.keepalive_s = 10.0
    async with trio.open_nursery() as nursery:
        if not reads:
            server.may_send = trio.Event()

        async def go_on() -> None:
            await trio.sleep(20)
            server.may_send.set()

        nursery.start_soon(go_on)
        with trio.move_on_after(seconds):
            await server.client.run(trio.sleep_forever)
    await server.client.send_error(CANCELLED, [(b"x-request-id", b"r1")])
    assert server.ended
    if seconds < 10:
        assert server.head[0] == 503
        assert dict(server.head[1])[b"x-request-id"] == b"r1"
        assert json.loads(server.body) == CANCELLED.body()
    else:
        assert server.head[0] == 200
        assert server.error_event == CANCELLED.body()["error"]


@pytest.mark.parametrize(
    ("reads", "sends_first"),
    [(True, False), (False, False), (False, True)],
    ids=["waiting", "sending", "sent"],
)
async def test_send_error_of_a_cancelled_stream_is_its_last_event(
    reads: bool, sends_first: bool, autojump_clock: trio.testing.MockClock
) -> None:
    """Well-formed, whatever the cancel came into, and nothing like [DONE] behind it."""
    server = Server()
    reply = Told()
    reply.say(b"data: 1\n\n")
    with trio.move_on_after(5):
        async with trio.open_nursery() as nursery:

            async def work() -> None:
                await server.client.send_reply(reply, [])  # type: ignore[arg-type]

            nursery.start_soon(server.client.run, work)
            await trio.sleep(1)
            server.sends_first = sends_first
            if not reads:
                server.may_send = trio.Event()
            reply.say(b'data: {"half": ')
    server.may_send.set()
    await server.client.send_error(CANCELLED, [])
    assert server.error_event == CANCELLED.body()["error"]
    assert b"[DONE]" not in server.body
    assert server.ended


async def test_send_error_of_a_cancelled_json_reply_is_no_end_of_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """What has begun is cut."""
    server = Server()
    reply = Told(200, JSON)
    reply.say(b"01234")

    async def work() -> None:
        await server.client.send_reply(reply, [])  # type: ignore[arg-type]

    with trio.move_on_after(5):
        await server.client.run(work)
    await server.client.send_error(CANCELLED, [])
    assert (server.body, server.ended) == (b"01234", False)


async def test_send_reply_stream_broken_inside_an_event_does_not_swallow_the_error() -> None:
    """A blank line ends what the decoder left half said."""
    server = Server()
    async with backend(200, STREAM) as decoder:
        await decoder.say(b'data: 1\n\ndata: {"choi')
        await decoder.hang_up()
        await server.client.send_reply(decoder.reply, [])
    assert server.body.startswith(b'data: 1\n\ndata: {"choi\n\ndata: ')
    assert server.error_event["type"] == "server_error"


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


async def test_send_whole_replaces_the_length() -> None:
    """A polled answer is framed by its own bytes."""
    server = Server()
    await server.client.send_whole(200, [(b"content-length", b"999"), (b"x-a", b"1")], b"abc")
    assert server.head == (200, [(b"x-a", b"1"), (b"content-length", b"3")])
    assert (server.body, server.ended) == (b"abc", True)


def test_end_to_end_leaves_out_the_headers_of_one_connection() -> None:
    """Whatever the decoder says about its connection is not about the client's."""
    headers = [(b"connection", b"close"), (b"x-a", b"1"), (b"transfer-encoding", b"chunked")]
    assert end_to_end(headers) == [(b"x-a", b"1")]
