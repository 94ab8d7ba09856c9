#!/usr/bin/env python3
"""The relay benchmark's clients: a program of its own, so that what it costs is nobody else's.

It reads one JSON object from standard input and prints one. `address` is ["127.0.0.1", PORT] or
the path of a Unix socket; `request` a whole request, text. By `kind`:

    streams    `streams` of them at once, for `seconds` after each has its first event: chunks,
               cpu_ns of the processes `pids` meanwhile, and in nanoseconds latency_p50 and
               latency_p95 (from the stamp in the event), gap_p50, gap_p95
    flood      one stream for `seconds`: chunks per_s, and cpu_ns_each of the processes `pids`
    first      `count` requests one after the other, on one connection or each on a new one
               (`fresh`): first_p50, from the send to the first event, in nanoseconds
    small      `connections` that ask again and again for `seconds`: requests per_s, cpu_ns_each

Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

_STAMP = re.compile(rb'"at":(\d{19})')
_READ_BYTES = 1 << 18
_LIMIT_S = 60.0
Address = str | Sequence[Any]


def connect(address: Address) -> socket.socket:
    """Open a connection."""
    if isinstance(address, str):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(address)
    else:
        sock = socket.create_connection(tuple(address), _LIMIT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(_LIMIT_S)
    return sock


def cpu_ns(pids: Sequence[int]) -> int:
    """Return the processor time of these processes, threads that have ended included."""
    # The number of a process's clock, see clock_getcpuclockid(3), which Python does not offer.
    return sum(time.clock_gettime_ns(~pid << 3 | 2) for pid in pids)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of them does not pass."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


class Stream:
    """One streamed reply as it comes in."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._tail = b""
        self.last = 0

    def take(self) -> tuple[int, list[int]]:
        """Read; return when, and the stamps of the events that are whole now."""
        data = self._sock.recv(_READ_BYTES)
        now = time.monotonic_ns()
        assert data, "the stream ended"
        data = self._tail + data
        stamps = []
        end = 0
        for found in _STAMP.finditer(data):
            stamps.append(int(found.group(1)))
            end = found.end()
        self._tail = data[end:]
        return now, stamps


@contextlib.contextmanager
def opened(spec: dict[str, Any], count: int) -> Iterator[tuple[list[socket.socket], select.epoll]]:
    """Yield so many connections on which the request was sent, and what waits for them."""
    with contextlib.ExitStack() as stack:
        epoll = stack.enter_context(select.epoll())
        socks = [stack.enter_context(connect(spec["address"])) for _ in range(count)]
        for sock in socks:
            sock.sendall(spec["request"].encode())
            epoll.register(sock, select.EPOLLIN)
        yield socks, epoll


def run_streams(spec: dict[str, Any]) -> dict[str, Any]:
    """See the module."""
    latencies: list[int] = []
    gaps: list[int] = []
    with opened(spec, spec["streams"]) as (socks, epoll):
        streams = {sock.fileno(): Stream(sock) for sock in socks}
        waiting = set(streams)
        while waiting:
            found = epoll.poll(_LIMIT_S)
            assert found, "no first event"
            for fd, _ in found:
                now, stamps = streams[fd].take()
                if stamps:
                    waiting.discard(fd)
                    streams[fd].last = now
        before = cpu_ns(spec["pids"])
        until = time.monotonic() + spec["seconds"]
        while (left := until - time.monotonic()) > 0 or not latencies:
            for fd, _ in epoll.poll(max(0.0, left)):
                now, stamps = streams[fd].take()
                latencies += [now - stamp for stamp in stamps]
                if stamps:
                    gaps += [now - streams[fd].last] + [0] * (len(stamps) - 1)
                    streams[fd].last = now
        seen = {"chunks": len(latencies), "cpu_ns": cpu_ns(spec["pids"]) - before}
    for name, values in (("latency", latencies), ("gap", gaps)):
        for percent in (50, 95):
            seen[f"{name}_p{percent}"] = int(quantile(values, percent / 100))
    return seen


def run_flood(spec: dict[str, Any]) -> dict[str, Any]:
    """See the module."""
    with opened(spec, 1) as ((sock,), _):
        tail = sock.recv(_READ_BYTES)
        assert tail.startswith(b"HTTP/1.1 200"), tail
        chunks = 0
        before, began = cpu_ns(spec["pids"]), time.monotonic()
        while time.monotonic() < began + spec["seconds"] or not chunks:
            data = sock.recv(_READ_BYTES)
            assert data, "the stream ended"
            chunks += (tail[-5:] + data).count(b"data: ")
            tail = data
        spent = cpu_ns(spec["pids"]) - before
        return {"per_s": chunks / (time.monotonic() - began), "cpu_ns_each": spent / chunks}


def run_first(spec: dict[str, Any]) -> dict[str, Any]:
    """See the module."""
    firsts: list[int] = []
    for _ in range(spec["count"] if spec["fresh"] else 1):
        with connect(spec["address"]) as sock:
            times = 1 if spec["fresh"] else spec["count"]
            firsts += [first_event_ns(sock, spec["request"]) for _ in range(times)]
    return {"first_p50": int(statistics.median(firsts))}


def first_event_ns(sock: socket.socket, request: str) -> int:
    """Ask for a stream and read it to its end; return the time from the send to the first event."""
    sent = time.monotonic_ns()
    sock.sendall(request.encode())
    first, reply = 0, b""
    while not reply.endswith(b"\r\n0\r\n\r\n"):
        data = sock.recv(_READ_BYTES)
        now = time.monotonic_ns()
        assert data, f"the reply broke off: {reply[-300:]!r}"
        reply += data
        if not first and b"\ndata: " in reply:
            first = now
    assert reply.startswith(b"HTTP/1.1 200"), reply
    return first - sent


def run_small(spec: dict[str, Any]) -> dict[str, Any]:
    """See the module."""
    request = spec["request"].encode()
    done = 0
    with opened(spec, spec["connections"]) as (found, epoll):
        socks = {sock.fileno(): sock for sock in found}
        replies = dict.fromkeys(socks, b"")
        before, began = cpu_ns(spec["pids"]), time.monotonic()
        while time.monotonic() < began + spec["seconds"] or not done:
            for fd, _ in epoll.poll(_LIMIT_S):
                data = socks[fd].recv(_READ_BYTES)
                assert data, f"a connection ended: {replies[fd]!r}"
                replies[fd] += data
                if is_whole(replies[fd]):
                    assert replies[fd].startswith(b"HTTP/1.1 200"), replies[fd]
                    replies[fd] = b""
                    done += 1
                    socks[fd].sendall(request)
        spent = cpu_ns(spec["pids"]) - before
        return {"per_s": done / (time.monotonic() - began), "cpu_ns_each": spent / done}


def is_whole(reply: bytes) -> bool:
    """Say whether a reply with a Content-Length has arrived."""
    head, found, body = reply.partition(b"\r\n\r\n")
    if not found:
        return False
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return length is not None and len(body) >= int(length.group(1))


KINDS = {"streams": run_streams, "flood": run_flood, "first": run_first, "small": run_small}


def load(kind: str, address: Address, request: str, **spec: Any) -> dict[str, Any]:
    """Run this program; see the module for the arguments and what comes back."""
    whole = {"kind": kind, "address": address, "request": request, **spec}
    done = subprocess.run(
        [sys.executable, "-ISB", __file__],
        input=json.dumps(whole),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=_LIMIT_S * 2,
    )
    return dict(json.loads(done.stdout))


def get(target: str, *lines: str) -> str:
    """Return the text of a GET request."""
    return "\r\n".join([f"GET {target} HTTP/1.1", "Host: localhost", *lines, "", ""])


def post(target: str, body: object, *lines: str) -> str:
    """Return the text of a POST request with a JSON body."""
    data = json.dumps(body)
    head = [f"POST {target} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    return "\r\n".join([*head, f"Content-Length: {len(data)}", *lines, "", data])


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    json.dump(KINDS[asked["kind"]](asked), sys.stdout)
