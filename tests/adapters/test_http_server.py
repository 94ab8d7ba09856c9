"""onebitd.adapters.http_server: real sockets, a tiny application, clients of every manner."""

from __future__ import annotations

import importlib.metadata
import inspect
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trio
import trio.testing
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import TrioSingleTask, WorkerContext

from onebitd.adapters.http_server import Connection, HttpServer

App = Callable[[Any, Any, Any], Awaitable[None]]
PIECE = b"x" * 65536


class Echo:
    """Answers with method, target and body; `/stream`, `/flood` and others misbehave."""

    def __init__(self) -> None:
        self.disconnected = trio.Event()
        self.started = trio.Event()
        self.go = trio.Event()
        self.ended: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        assert scope["type"] == "http"
        path = scope["path"]
        self.started.set()
        try:
            await getattr(self, path.strip("/"), self.echo)(scope, receive, send)
        finally:
            self.ended.append(path)

    async def echo(self, scope: Any, receive: Any, send: Any) -> None:
        """Say what came."""
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        text = f"{scope['method']} {scope['path']} {scope['query_string'].decode()} ".encode()
        await reply(send, text + body)

    async def wait(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the head, then wait for the client to leave."""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        self.disconnected.set()

    async def flood(self, scope: Any, receive: Any, send: Any) -> None:
        """Send until the client has left."""

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.disconnected.set()
            nursery.cancel_scope.cancel()

        await send({"type": "http.response.start", "status": 200, "headers": []})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            while True:
                await send({"type": "http.response.body", "body": PIECE, "more_body": True})

    async def slow(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the head, and the rest when told to."""
        await send({"type": "http.response.start", "status": 200, "headers": [LENGTH]})
        await self.go.wait()
        await send({"type": "http.response.body", "body": b"12345", "more_body": False})

    async def broken(self, scope: Any, receive: Any, send: Any) -> None:
        """Fail before the reply."""
        raise RuntimeError("planted")

    async def broken_later(self, scope: Any, receive: Any, send: Any) -> None:
        """Fail in the middle of the reply."""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError("planted")


LENGTH = (b"content-length", b"5")


async def reply(send: Any, body: bytes) -> None:
    """Send a whole reply."""
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class Served:
    """A running server: `connect` to it, `stop` it."""

    def __init__(self, address: tuple[str, int], app: Echo, server: HttpServer) -> None:
        self.app = app
        self.server = server
        self.scope = trio.CancelScope()
        self.stopped = trio.Event()
        self.address = address

    async def connect(self, sent: bytes = b"", receive_buffer: int | None = None) -> Talk:
        """Open a connection and send something; the caller closes it."""
        client = trio.socket.socket()
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await client.connect(self.address)
        talk = Talk(trio.SocketStream(client))
        await talk.stream.send_all(sent)
        return talk

    async def get(self, path: str) -> bytes:
        """GET on a connection of its own; return everything that came until it was closed."""
        talk = await self.connect(
            f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
        )
        async with talk.stream:
            return await talk.rest()

    async def stop(self) -> None:
        """Cancel the server and wait for its end."""
        self.scope.cancel()
        with trio.fail_after(10):
            await self.stopped.wait()


class Talk:
    """A client's connection."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._held = b""

    async def reply(self) -> tuple[int, dict[str, str], bytes]:
        """Read one reply that has a Content-Length."""
        with trio.fail_after(10):
            while b"\r\n\r\n" not in self._held:
                self._held += await self._some()
            head, _, self._held = self._held.partition(b"\r\n\r\n")
            first, *lines = head.decode().split("\r\n")
            headers = dict(line.lower().split(": ") for line in lines)
            length = int(headers.get("content-length", "0"))
            while len(self._held) < length:
                self._held += await self._some()
        body, self._held = self._held[:length], self._held[length:]
        return int(first.split()[1]), headers, body

    async def until(self, wanted: bytes) -> None:
        """Read until these bytes came."""
        with trio.fail_after(10):
            while wanted not in self._held:
                self._held += await self._some()

    async def rest(self) -> bytes:
        """Read until the server closes."""
        with trio.fail_after(10):
            try:
                while data := bytes(await self.stream.receive_some()):
                    self._held += data
            except trio.BrokenResourceError:
                pass
        return self._held

    async def _some(self) -> bytes:
        data = bytes(await self.stream.receive_some())
        assert data, f"the server closed the connection after {self._held!r}"
        return data


@asynccontextmanager
async def serving(app: App | None = None, **options: float) -> AsyncIterator[Served]:
    """Run a server on a port of its own."""
    listener = socket.create_server(("127.0.0.1", 0))
    echo = Echo()
    server = HttpServer(app or echo, [listener], **options)
    served = Served(listener.getsockname(), echo, server)

    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        with served.scope:
            await server.run(task_status=task_status)
        served.stopped.set()

    async with trio.open_nursery() as nursery:
        await nursery.start(run)
        yield served
        await served.stop()
    assert listener.fileno() == -1


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
        await trio.sleep(0.05)
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
    ],
    ids=["big_headers", "bad_header", "no_host", "tls", "negative_length"],
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
        assert came.startswith(b"HTTP/1.1 " + status) or (not came and status == b"431")
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


def test_connection_hypercorns_internals_are_where_they_are_used() -> None:
    """Fails when hypercorn moves what `Connection` overrides or calls: read its changes then."""
    version = importlib.metadata.version("hypercorn")
    assert version.split(".")[:2] == ["0", "18"], f"hypercorn {version} is outside of the pin"
    signatures: dict[Callable[..., Any], list[str]] = {
        TCPServer.__init__: ["self", "app", "config", "context", "state", "stream"],
        TCPServer.run: ["self"],
        TCPServer.protocol_send: ["self", "event"],
        TCPServer._read_data: ["self"],
        TCPServer._close: ["self"],
        TCPServer._idle_timeout: ["self"],
        H11Protocol.handle: ["self", "event"],
        TrioSingleTask.stop: ["self"],
        WorkerContext.__init__: ["self", "max_requests"],
        TaskGroup.spawn_app: ["self", "app", "config", "scope", "send"],
    }
    for function, names in signatures.items():
        found = list(inspect.signature(function).parameters)
        assert found == names, f"hypercorn {version}: {function.__qualname__} takes {found}"
    for name in ("run", "protocol_send", "_read_data"):
        ours, theirs = getattr(Connection, name), getattr(TCPServer, name)
        assert ours is not theirs
        assert (
            inspect.signature(ours).parameters.keys() == inspect.signature(theirs).parameters.keys()
        )
    assert "send_lock" in inspect.getsource(TCPServer.__init__)
    assert "self._read_data()" in inspect.getsource(TCPServer.run)
    assert "self.protocol_send" in inspect.getsource(TCPServer.run)
    assert "terminated" in inspect.getsource(TCPServer._idle_timeout)
