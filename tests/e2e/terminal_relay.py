"""A control socket of its own in front of a daemon's: the same answers, with fixed figures.

The daemon sees who really asks: each connection is made as the user, and with the groups, of the
client that it is made for. Whom the daemon would refuse is refused, in its own words.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.e2e import terminal_pins as pins
from tests.e2e.terminal_users import become_client
from tests.llama_builds import UnixConnection


class Relay:
    """Listens at `path` and asks `daemon_socket`; `shown` says which texts are shown as which."""

    def __init__(self, path: Path, daemon_socket: Path, shown: Mapping[str, str]) -> None:
        self.path = path
        self._daemon_socket = daemon_socket
        self._shown = shown
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._threads: list[threading.Thread] = []

    def serve(self) -> None:
        """Answer until the listener is shut down."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._answer, args=(connection,), daemon=True)
            thread.start()

    def close(self) -> None:
        """Listen no more; a connection that is open goes on until its client leaves."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.path.unlink()

    def _answer(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            head, body = _read_request(client)
            if not head:
                return  # only looked whether somebody is there
            become_client(client)
            method, target, _ = head.split("\r\n")[0].split(" ")
            daemon = UnixConnection(self._daemon_socket, 30.0)
            with contextlib.closing(daemon):
                daemon.request(method, target, body or None, {"Content-Type": "application/json"})
                reply = daemon.getresponse()
                start = f"HTTP/1.1 {reply.status} {reply.reason}\r\nConnection: close\r\n"
                if "follow=1" in target and reply.status == 200:
                    client.sendall(f"{start}\r\n".encode())
                    while line := reply.readline():
                        client.sendall(self._pinned(target, line) + b"\n")
                    return
                data = self._pinned(target, reply.read())
                client.sendall(f"{start}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    def _pinned(self, target: str, data: bytes) -> bytes:
        text = data.decode()
        for real, shown in self._shown.items():
            text = text.replace(real, shown)
        return json.dumps(pinned_document(target.partition("?")[0], json.loads(text))).encode()


def _read_request(client: socket.socket) -> tuple[str, bytes]:
    """Return head and body, empty ones when none comes."""
    held = b""
    while b"\r\n\r\n" not in held:
        data = client.recv(65536)
        if not data:
            return "", b""
        held += data
    head, _, body = held.partition(b"\r\n\r\n")
    text = head.decode("latin-1")
    fields = (line.partition(":") for line in text.lower().split("\r\n")[1:])
    length = next((int(value) for name, _, value in fields if name == "content-length"), 0)
    while len(body) < length:
        body += client.recv(65536)
    return text, body


def pinned_document(path: str, document: dict[str, Any]) -> dict[str, Any]:
    """Return the daemon's answer to a path, without its query, with its figures fixed."""
    now = dt.datetime.now(dt.UTC)
    if "error" in document and "state" not in document:
        return document
    match path:
        case "/v1/status":
            return pins.pinned_status(document, now)
        case "/v1/handoffs":
            if "handoffs" not in document:
                return pins.pinned_record(document)
            return {"handoffs": list(map(pins.pinned_record, document["handoffs"]))}
        case "/v1/handoffs/summary":
            return pins.pinned_summary(document)
        case "/v1/costs":
            return pins.pinned_costs(document, now)
        case "/v1/requests":
            return {"requests": list(map(pins.pinned_request, document["requests"]))}
    return document


@contextlib.contextmanager
def relayed(path: Path, daemon_socket: Path, shown: Mapping[str, str]) -> Iterator[Relay]:
    """Run a relay; `path`'s directory is made with it.

    Args:
        path: of the socket that it listens on.
        daemon_socket: of the daemon that is asked.
        shown: texts of the daemon, such as its directories, and what stands for each.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    relay = Relay(path, daemon_socket, shown)
    thread = threading.Thread(target=relay.serve, daemon=True)
    thread.start()
    try:
        yield relay
    finally:
        relay.close()
        thread.join(10)
