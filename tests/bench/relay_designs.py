#!/usr/bin/env python3
"""What the relay is measured against, in the same run and in front of the same backend.

    relay_designs.py DESIGN DESCRIPTOR SOCKET

serves a listening TCP socket that it inherits. DESIGN is

    plain    an ASGI application under hypercorn as it is, h11 over a trio stream upstream: what one
             writes first
    pump     bytes from one socket to the other and back: the least that trio can do
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import h11
import hypercorn.trio
import trio
from hypercorn.config import Config

from tests.harness import descendants, wait_until
from tests.llama_builds import stop_process

NGINX = "/usr/sbin/nginx"
_READ_BYTES = 64 * 1024
_NGINX_CONF = """
{user}daemon off; master_process on; worker_processes 1; pid {home}/pid; error_log {home}/error.log;
events {{ worker_connections 1024; }}
http {{
    access_log off; keepalive_requests 1000000; proxy_buffering off; proxy_http_version 1.1;
    client_body_temp_path {home}/body; proxy_temp_path {home}/proxy; fastcgi_temp_path {home}/fcgi;
    uwsgi_temp_path {home}/uwsgi; scgi_temp_path {home}/scgi; proxy_read_timeout 300s;
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://unix:{backend}; }}
    }}
}}
"""


@dataclass(frozen=True)
class Front:
    """Something that answers: its name, its address (see relay_load), and whose time it takes."""

    name: str
    address: str | tuple[str, int]
    pids: tuple[int, ...]


@contextlib.contextmanager
def running_design(
    name: str, backend: Path, env: Mapping[str, str] | None = None
) -> Iterator[Front]:
    """Run one of the designs here."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        address = listener.getsockname()
        descriptor = listener.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, name, str(descriptor), os.fspath(backend)],
            pass_fds=[descriptor],
            env={**os.environ, **(env or {})},
            cwd=Path(__file__).parents[2],
        )
    try:
        yield Front(name, address, (process.pid,))
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def running_nginx(backend: Path, home: Path) -> Iterator[Front | None]:
    """Run nginx, unbuffered, with one worker; None where it is not installed."""
    program = shutil.which("nginx") or shutil.which(NGINX)
    if program is None:
        yield None
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = home / "nginx.conf"
    user = "user root; " if os.geteuid() == 0 else ""  # it gives root up, and the socket is private
    config.write_text(_NGINX_CONF.format(user=user, home=home, port=port, backend=backend))
    argv = [program, "-p", str(home), "-e", str(home / "error.log"), "-c", str(config)]
    process = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
    try:
        workers = wait_until(lambda: _listens(port) and descendants(process.pid), "nginx's worker")
        yield Front("nginx", ("127.0.0.1", port), tuple(workers))
    finally:
        stop_process(process)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


async def plain_app(backend: str, scope: Any, receive: Any, send: Any) -> None:
    """Pass one request on, and its reply back event by event (ASGI)."""
    if scope["type"] == "lifespan":
        while True:
            await send({"type": f"{(await receive())['type']}.complete"})
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message["more_body"]:
            break
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watch, receive, nursery.cancel_scope)
        await _relay_plainly(backend, scope, body, send)
        nursery.cancel_scope.cancel()


async def _watch(receive: Any, work: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    work.cancel()


async def _relay_plainly(backend: str, scope: Any, body: bytes, send: Any) -> None:
    target = scope["raw_path"]
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    headers = [*scope["headers"], (b"connection", b"close")]
    async with await trio.open_unix_socket(backend) as stream:
        connection = h11.Connection(h11.CLIENT)
        head = connection.send(h11.Request(method=scope["method"], target=target, headers=headers))
        await stream.send_all((head or b"") + body)
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await stream.receive_some(_READ_BYTES))
            elif isinstance(event, h11.Response):
                kept = [pair for pair in event.headers if pair[0] != b"transfer-encoding"]
                start = {"type": "http.response.start", "status": event.status_code}
                await send(start | {"headers": kept})
            elif isinstance(event, h11.Data):
                data = bytes(event.data)
                await send({"type": "http.response.body", "body": data, "more_body": True})
            else:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return


async def serve_plain(descriptor: int, backend: str) -> None:
    """Serve `plain` for ever."""
    config = Config()
    config.bind = [f"fd://{descriptor}"]
    config.accesslog = config.errorlog = None
    config.keep_alive_max_requests = 1_000_000
    await hypercorn.trio.serve(partial(plain_app, backend), config, mode="asgi")


async def _pump(source: trio.SocketStream, sink: trio.SocketStream, both: trio.CancelScope) -> None:
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        while data := await source.receive_some(_READ_BYTES):
            await sink.send_all(data)
    both.cancel()


async def _pump_both(backend: str, client: trio.SocketStream) -> None:
    async with await trio.open_unix_socket(backend) as upstream, trio.open_nursery() as nursery:
        nursery.start_soon(_pump, client, upstream, nursery.cancel_scope)
        nursery.start_soon(_pump, upstream, client, nursery.cancel_scope)


async def serve_pump(descriptor: int, backend: str) -> None:
    """Serve `pump` for ever."""
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(socket.socket(fileno=descriptor)))
    await trio.serve_listeners(partial(_pump_both, backend), [listener])


DESIGNS = {"plain": serve_plain, "pump": serve_pump}


def main(words: Sequence[str]) -> None:
    """Serve until killed."""
    design, descriptor, backend = words
    trio.run(DESIGNS[design], int(descriptor), backend)


if __name__ == "__main__":
    main(sys.argv[1:])
