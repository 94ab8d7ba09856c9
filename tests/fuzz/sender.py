"""Sends the bytes of many connections at once, and reads what comes back strictly."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tests.fuzz.malformed import WHOLE

AT_ONCE = 48
QUIET_S = 0.15
"""A server that says nothing for so long waits for more of the request: it is told that there is
none."""
HANG_S = 30.0


class NotHttp(AssertionError):
    """What came back is no HTTP/1.1 reply."""


@dataclass(frozen=True)
class Answer:
    """One reply of a connection."""

    status: int
    body: bytes

    @property
    def reason(self) -> str:
        """The message of its error object, empty when it has none."""
        try:
            return str(json.loads(self.body)["error"]["message"])
        except (ValueError, LookupError, TypeError):
            return ""


@dataclass
class _Connection:
    sock: socket.socket
    way: str
    sent: bytes
    to_send: memoryview
    received: bytearray = field(default_factory=bytearray)
    since: float = field(default_factory=time.monotonic)
    half_closed: bool = False


def exchange(
    connect: Callable[[], socket.socket], requests: Iterable[tuple[str, bytes]]
) -> Iterator[tuple[str, bytes, list[Answer]]]:
    """Send each on a connection of its own; yield (way, what was sent, replies) as they end.

    Raises:
        NotHttp: a reply that is none.
        AssertionError: a connection that stays open after its client has said all.
    """
    waiting = iter(requests)
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        while True:
            while len(selector.get_map()) < AT_ONCE and (one := next(waiting, None)) is not None:
                sock = stack.enter_context(connect())
                sock.setblocking(False)
                connection = _Connection(sock, one[0], one[1], memoryview(one[1]))
                selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
            if not selector.get_map():
                return
            ready = selector.select(0.02)
            for key, events in ready:
                if _advance(selector, key.data, events):
                    yield key.data.way, key.data.sent, answers_in(bytes(key.data.received))
            for key in list(selector.get_map().values()):
                _hurry(key.data)


def _advance(selector: selectors.BaseSelector, connection: _Connection, events: int) -> bool:
    """Write and read what can be; True when the server has closed."""
    sock = connection.sock
    try:
        if events & selectors.EVENT_WRITE and connection.to_send:
            connection.to_send = connection.to_send[sock.send(connection.to_send) :]
            connection.since = time.monotonic()
        if not connection.to_send and events & selectors.EVENT_WRITE:
            selector.modify(sock, selectors.EVENT_READ, connection)
        if not events & selectors.EVENT_READ:
            return False
        data = sock.recv(1 << 16)
    except BlockingIOError:
        return False
    except (ConnectionResetError, BrokenPipeError):
        data = b""  # it was refused in the middle of being sent
    connection.received += data
    connection.since = time.monotonic()
    if data:
        return False
    selector.unregister(sock)
    sock.close()
    return True


def _hurry(connection: _Connection) -> None:
    quiet_s = time.monotonic() - connection.since
    if quiet_s > HANG_S:
        raise AssertionError(f"held open ({connection.way}): {connection.sent[:500]!r}")
    said_all = connection.half_closed or connection.to_send or connection.way in WHOLE
    if quiet_s > QUIET_S and not said_all:
        connection.half_closed = True
        connection.sock.shutdown(socket.SHUT_WR)


def answers_in(received: bytes) -> list[Answer]:
    """Split what a connection received into its replies; the last may be cut off.

    Raises:
        NotHttp: bytes that are none.
    """
    found = []
    while received:
        head, separator, rest = received.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        words = lines[0].split(b" ", 2)
        if not separator or words[0] != b"HTTP/1.1" or not words[1].isdigit():
            raise NotHttp(received[:300])
        fields = {}
        for line in lines[1:]:
            name, colon, value = line.partition(b":")
            if not colon or not name.strip():
                raise NotHttp(line)
            fields[name.lower()] = value.strip()
        status = int(words[1])
        if b"chunked" in fields.get(b"transfer-encoding", b""):
            body, received = _chunked(rest)
        elif status < 200 or status in (204, 304):
            body, received = b"", rest
        else:
            length = int(fields.get(b"content-length", len(rest)))
            # The reply to HEAD tells the length of a body that does not follow.
            body, received = (
                (b"", rest)
                if rest[:9] == b"HTTP/1.1 "
                else (
                    rest[:length],
                    rest[length:],
                )
            )
        if status >= 200:
            found.append(Answer(status, body))
    return found


def _chunked(data: bytes) -> tuple[bytes, bytes]:
    body = bytearray()
    while data:
        line, separator, rest = data.partition(b"\r\n")
        if not separator:
            break
        try:
            size = int(line, 16)
        except ValueError:
            raise NotHttp(line) from None
        if size == 0:
            return bytes(body), rest.removeprefix(b"\r\n")
        body += rest[:size]
        data = rest[size + 2 :]
    return bytes(body), b""
