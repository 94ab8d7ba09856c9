"""The last send of a reply finishes, and the connection with it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import trio
from quart_trio import QuartTrio

from onebitd.surfaces.asgi_shield import shield_final_send
from tests.surfaces.control_server import read_reply, serve_unix, talk


@contextlib.asynccontextmanager
async def serve_hello(path: Path) -> AsyncGenerator[None]:
    """Serve `GET /` -> hello behind the shield."""
    app = QuartTrio("hello")
    app.asgi_app = shield_final_send(app.asgi_app)  # type: ignore[method-assign, assignment]

    @app.get("/")
    async def hello() -> str:
        return "hello"

    async with serve_unix(app, path):
        yield


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.0\r\n\r\n",
    ],
    ids=["connection-close", "http-1.0"],
)
async def test_shield_final_send_connection_that_must_close_is_closed_by_the_server(
    tmp_path: Path, request_bytes: bytes
) -> None:
    """The client sees the end of the stream after the reply (it hung before the shield)."""
    with trio.fail_after(20):
        async with serve_hello(tmp_path / "s"):
            stream = await talk(tmp_path / "s", request_bytes)
            async with stream:
                assert (await read_reply(stream))[2] == b"hello"
                assert await stream.receive_some() == b""


async def test_shield_final_send_keep_alive_connection_serves_the_next_request(
    tmp_path: Path,
) -> None:
    """A kept connection answers again, and can still be closed on request."""
    with trio.fail_after(20):
        async with serve_hello(tmp_path / "s"):
            stream = await talk(tmp_path / "s", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            async with stream:
                assert (await read_reply(stream))[2] == b"hello"
                for _ in range(2):
                    await stream.send_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                    assert (await read_reply(stream))[2] == b"hello"
                await stream.send_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                assert (await read_reply(stream))[2] == b"hello"
                assert await stream.receive_some() == b""


async def test_shield_final_send_only_the_last_message_is_shielded() -> None:
    """A cancel stops an earlier send, and does not stop the last one."""
    sent: list[str] = []

    async def app(scope: object, receive: object, send: object) -> None:
        for more in (True, False):
            with trio.CancelScope() as inner:
                inner.cancel()
                await send(  # type: ignore[operator]
                    {"type": "http.response.body", "body": b"", "more_body": more}
                )

    async def slow_send(message: dict[str, object]) -> None:
        await trio.lowlevel.checkpoint()
        sent.append("more" if message["more_body"] else "last")

    shielded = shield_final_send(app)
    await shielded({"type": "http"}, None, slow_send)  # type: ignore[arg-type]
    assert sent == ["last"]
