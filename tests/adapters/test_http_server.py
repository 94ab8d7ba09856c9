"""onebitd.adapters.http_server: real sockets, a tiny application, clients of every manner."""

from __future__ import annotations

import importlib.metadata
import inspect
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import trio
import trio.testing
from hypercorn.events import Closed, Updated
from hypercorn.protocol import events
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.worker_context import WorkerContext

from onebitd.adapters.http_protocol import Http1, Requests
from onebitd.adapters.http_server import HttpServer
from tests.adapters.http_rig import Echo, Served, error_in, reply, serving


async def test_http_server_get_and_post_reach_the_application() -> None:
    """Method, path, query and body arrive; the reply's own headers are all there are."""
    async with serving() as served:
        talk = await served.connect(b"GET /a%20b?c=d HTTP/1.1\r\nHost: x\r\n\r\n")
        async with talk.stream:
            status, headers, body = await talk.reply()
            assert (status, body) == (200, b"GET /a b c=d ")
            assert headers == {"content-length": str(len(body))}, "no date, no server"
            await talk.stream.send_all(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhe")
            await talk.stream.send_all(b"llo")
            assert (await talk.reply())[2] == b"POST /  hello"


async def test_http_server_big_body_is_taken_whole() -> None:
    """More than all read-ahead buffers, chunked."""
    body = b"y" * 3_000_000
    async with serving() as served:
        talk = await served.connect(
            b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        async with talk.stream:
            await talk.stream.send_all(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
            assert (await talk.reply())[2] == b"POST /  " + body


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 1\r\n\r\nz",
    ],
    ids=["close", "http_1_0", "post"],
)
async def test_http_server_connection_that_must_close_is_closed_by_the_server(
    request_bytes: bytes,
) -> None:
    """The client reads the reply and then the end."""
    async with serving() as served:
        talk = await served.connect(request_bytes)
        async with talk.stream:
            assert (await talk.reply())[0] == 200
            assert await talk.rest() == b""


async def test_http_server_idle_connection_is_closed_after_its_time() -> None:
    """keep_alive_s ends it, used before or not."""
    async with serving(keep_alive_s=0.1) as served:
        for sent in (b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"):
            talk = await served.connect(sent)
            async with talk.stream:
                if sent:
                    assert (await talk.reply())[0] == 200
                assert await talk.rest() == b""


async def test_http_server_connection_with_a_running_reply_is_not_idle() -> None:
    """A reply that takes longer than keep_alive_s is not cut."""
    async with serving(keep_alive_s=0.05) as served:
        talk = await served.connect(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        async with talk.stream:
            await talk.until(b"\r\n\r\n")
            await trio.sleep(0.15)
            served.app.go.set()
            assert (await talk.reply())[2] == b"12345"


async def test_http_server_pipelined_requests_are_answered_in_order() -> None:
    """Two in one write: two replies."""
    async with serving() as served:
        one, two = (b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % number for number in (1, 2))
        talk = await served.connect(one + two)
        async with talk.stream:
            assert [(await talk.reply())[2] for _ in range(2)] == [b"GET /1  ", b"GET /2  "]


@pytest.mark.parametrize("more", [b"", b"GET /second HTTP/1.1\r\nHost: x\r\n\r\n"])
@pytest.mark.parametrize("reset", [False, True])
async def test_http_server_client_that_leaves_during_a_reply_is_noticed(
    more: bytes, reset: bool
) -> None:
    """The application sees the disconnect at once, pipelined request or not."""
    async with serving() as served:
        talk = await served.connect(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n" + more)
        await talk.until(b"begun")
        if reset:
            talk.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await talk.stream.aclose()
        with trio.fail_after(10):
            await served.app.disconnected.wait()
        assert "/second" not in served.app.ended


async def test_http_server_client_that_pipelined_and_left_holds_no_later_request() -> None:
    """A request that begins when its client has left is never told so: it must not begin."""
    async with serving() as served:
        for _ in range(20):
            talk = await served.connect(
                b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET /wait HTTP/1.1\r\nHost: x\r\n\r\n"
            )
            await talk.stream.send_eof()
        with trio.fail_after(10):
            while len(served.app.ended) < 20 or served.server._connections:  # noqa: ASYNC110
                await trio.sleep(0.01)


async def test_http_server_client_that_stops_reading_is_cut_off() -> None:
    """After write_timeout_s the application sees a disconnect; others are served meanwhile."""
    async with serving(write_timeout_s=0.2) as served:
        talk = await served.connect(b"GET /flood HTTP/1.1\r\nHost: x\r\n\r\n", 4096)
        await served.app.started.wait()
        assert b"200" in await served.get("/")
        with trio.fail_after(20):
            await served.app.disconnected.wait()
        await talk.stream.aclose()


async def test_http_server_stop_with_a_stalled_client_ends() -> None:
    """A client that reads nothing does not hold a stop for its write_timeout_s (the bug)."""
    async with serving(write_timeout_s=3600.0) as served:
        talk = await served.connect(b"GET /flood HTTP/1.1\r\nHost: x\r\n\r\n", 4096)
        await served.app.started.wait()
        await trio.sleep(0.1)  # until the buffers are full
        await served.stop()
        await talk.stream.aclose()


async def test_http_server_that_stopped_accepting_goes_on_with_its_connections() -> None:
    """The listener is closed for newcomers; a running reply, and the next request, are served."""
    async with serving() as served:
        talk = await served.connect(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        async with talk.stream:
            await served.app.started.wait()
            served.server.stop_accepting()
            await trio.testing.wait_all_tasks_blocked()
            with trio.socket.socket() as late, pytest.raises(OSError, match="refused"):
                await late.connect(served.address)
            served.app.go.set()
            assert (await talk.reply())[0] == 200
            await talk.stream.send_all(b"GET /next HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await talk.reply())[2] == b"GET /next  "


async def test_http_server_stop_closes_idle_connections() -> None:
    """Kept, fresh, or in the middle of a head: none of them holds it."""
    async with serving(keep_alive_s=3600.0) as served:
        talks = [
            await served.connect(sent)
            for sent in (b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / HT")
        ]
        await talks[1].reply()
        await served.stop()
        for talk in talks:
            assert await talk.rest() == b""
            await talk.stream.aclose()


async def test_http_server_stop_lets_a_reply_that_ends_soon_leave() -> None:
    """Its last bytes arrive although the server was told to stop (the bug: it was cut at once)."""
    async with serving() as served, trio.open_nursery() as nursery:
        talk = await served.connect(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await talk.until(b"\r\n\r\n")
        nursery.start_soon(served.stop)
        await trio.sleep(0.7)  # whoever kills a provider that does not listen needs as long
        served.app.go.set()
        assert (await talk.reply())[2] == b"12345"
        await talk.stream.aclose()


async def test_http_server_stop_cuts_a_reply_that_goes_on() -> None:
    """After a moment the rest is cut off, and its application is cancelled."""
    async with serving() as served:
        talk = await served.connect(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        await talk.until(b"begun")
        await served.stop()
        assert "/wait" in served.app.ended
        await talk.rest()
        await talk.stream.aclose()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 200_000 + b"\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nHo st: x\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 100 + b"\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 30_000, b"431"),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", b"400"),
    ],
    ids=["big", "bad_header", "no_host", "tls", "negative_length", "fields", "endless", "http_2"],
)
async def test_http_server_request_that_is_none_is_refused_and_others_are_served(
    request_bytes: bytes, status: bytes
) -> None:
    """An error status and the end of the connection; the next client notices nothing."""
    async with serving() as served:
        talk = await served.connect()
        with suppress(trio.BrokenResourceError):
            await talk.stream.send_all(request_bytes)
        came = await talk.rest()
        await talk.stream.aclose()
        assert came.startswith(b"HTTP/1.1 " + status)
        error = error_in(came)
        assert error["type"] == "invalid_request_error"
        assert error["code"] == int(status)
        assert b"200" in await served.get("/")
        assert served.app.ended == ["/"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/broken", b"HTTP/1.1 500"), ("/broken_later", b"HTTP/1.1 200")],
)
async def test_http_server_application_that_fails_is_logged_and_others_are_served(
    path: str, expected: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """500 when nothing was sent yet, else an end that is seen as broken; the server lives on."""
    async with serving() as served:
        came = await served.get(path)
        assert came.startswith(expected)
        assert b"planted" not in came
        assert not came.endswith(b"0\r\n\r\n")
        assert b"200" in await served.get("/")
    assert any("planted" in str(record.exc_info) for record in caplog.records)
    assert {record.name for record in caplog.records} == {"hypercorn.error"}


H2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
H2_SETTINGS = b"\0\0\0\4\0\0\0\0\0"


@pytest.mark.parametrize(
    "sent",
    [
        H2_PREFACE + b"\xff" * 100,
        H2_PREFACE + H2_SETTINGS + b"\0\0\4\1\5\0\0\0\1\x82\x87\x44\x01",
        # GET of the path /<0xff>: no ASCII, and hypercorn's decode() fails on it
        H2_PREFACE + H2_SETTINGS + b"\0\0\x0b\1\5\0\0\0\1\x82\x86D\x84c\xff\xff\xeeA\x81\xf3",
        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n\xff\xff",
        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n\xff\xff",
        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\n"
        b"HTTP2-Settings: !!!\r\n\r\n",
    ],
    ids=["h2_noise", "h2_bad_hpack", "h2_path", "websocket", "h2c_noise", "h2c_bad_settings"],
)
async def test_http_server_client_that_breaks_a_protocol_ends_only_its_own_connection(
    sent: bytes,
) -> None:
    """What hypercorn trips over must not reach the other connections, let alone the daemon."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await reply(send, b"well")

    async with serving(app) as served:
        talk = await served.connect(sent)
        with trio.move_on_after(0.1):
            await talk.rest()
        await talk.stream.aclose()
        assert b"well" in await served.get("/")


async def test_http_server_every_listener_is_served() -> None:
    """One application, two addresses."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    addresses = [listener.getsockname() for listener in listeners]
    server = HttpServer(Echo(), listeners)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        for address in addresses:
            served = Served(address, Echo(), server)
            assert b"200" in await served.get("/")
        nursery.cancel_scope.cancel()


def test_http_protocol_hypercorns_internals_are_where_they_are_used() -> None:
    """Fails when hypercorn moves what `Http1` overrides or calls: read its changes then."""
    version = importlib.metadata.version("hypercorn")
    assert version.split(".")[:2] == ["0", "18"], f"hypercorn {version} is outside of the pin"
    parts = ["app", "config", "context", "task_group"]
    sides = ["ssl", "client", "server", "send"]
    signatures: dict[Callable[..., Any], list[str]] = {
        H11Protocol.__init__: ["self", *parts, "connection_state", *sides],
        H11Protocol.handle: ["self", "event"],
        H11Protocol.stream_send: ["self", "event"],
        H11Protocol._send_h11_event: ["self", "event"],
        H11Protocol._maybe_recycle: ["self"],
        H11Protocol._close_stream: ["self"],
        HTTPStream.__init__: ["self", *parts, *sides, "stream_id"],
        HTTPStream.handle: ["self", "event"],
        HTTPStream.app_send: ["self", "message"],
        TaskGroup.spawn_app: ["self", "app", "config", "scope", "send"],
        WorkerContext.__init__: ["self", "max_requests"],
        events.Request: ["stream_id", "headers", "http_version", "method", "raw_path", "state"],
        events.Response: ["stream_id", "headers", "status_code"],
        events.Body: ["stream_id", "data"],
        events.EndBody: ["stream_id"],
        events.StreamClosed: ["stream_id"],
        Updated: ["idle"],
        Closed: [],
    }
    for function, names in signatures.items():
        found = list(inspect.signature(function).parameters)
        assert found == names, f"hypercorn {version}: {function.__qualname__} takes {found}"
    ours = inspect.signature(Requests.spawn_app).parameters.keys()
    assert ours == inspect.signature(TaskGroup.spawn_app).parameters.keys()
    sources: dict[Callable[..., Any], list[str]] = {
        H11Protocol.__init__: ["context.event_class()", "h11.Connection(", "self.stream: "],
        H11Protocol.handle: ["isinstance(event, Closed)", "self._close_stream()"],
        H11Protocol._maybe_recycle: [
            "self._close_stream()",
            "self.context.terminated.is_set()",
            "self.connection.start_next_cycle()",
            "self.send(Updated(idle=True))",
            "self.send(Closed())",
        ],
        H11Protocol._close_stream: ["self.stream.handle(StreamClosed(", "self.stream = None"],
        HTTPStream.handle: ["self.task_group.spawn_app(", "self.app_put(", '"http.disconnect"'],
    }
    for method, words in sources.items():
        source = inspect.getsource(method)
        for word in words:
            assert word in source, f"hypercorn {version}: {method.__qualname__} has no {word}"
    assert set(Http1.__dict__) & set(H11Protocol.__dict__) >= {"stream_send", "_send_h11_event"}
