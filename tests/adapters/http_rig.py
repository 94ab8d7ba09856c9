"""A server on a port of its own, a tiny application, and a client that sees every byte."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio

from onebitd.adapters.http_server import HttpServer

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


def error_in(came: bytes) -> dict[str, Any]:
    """Return the error object of a whole reply, which must be well formed and the last one."""
    head, _, body = came.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert b"content-type: application/json; charset=utf-8" in lines
    assert b"connection: close" in lines
    assert b"content-length: %d" % len(body) in lines
    error = json.loads(body)["error"]
    assert isinstance(error, dict)
    assert error.keys() == {"message", "type", "code"}
    return error


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
        self._talks: list[Talk] = []

    async def connect(self, sent: bytes = b"", receive_buffer: int | None = None) -> Talk:
        """Open a connection and send something."""
        client = trio.socket.socket()
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await client.connect(self.address)
        talk = Talk(trio.SocketStream(client))
        self._talks.append(talk)
        await talk.stream.send_all(sent)
        return talk

    def hang_up(self) -> None:
        """Close whatever connections the test has left open."""
        for talk in self._talks:
            talk.stream.socket.close()

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
async def serving(app: App | None = None, **options: Any) -> AsyncIterator[Served]:
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
    served.hang_up()
    assert listener.fileno() == -1
