#!/usr/bin/env python3
"""Plays llama-server for the relay's benchmark: nothing in it takes time, and what paces is exact.

    relay_backend.py --host SOCKET --slot-save-path DIRECTORY -m MODEL ...

Beside what onebitd needs of a decoder (template, tokenize, slot actions and completions of the
stand-ins' tiny model, all of them at once) it serves

    GET /events?rate=R&count=N    a stream of events, R a second, the first at once (0: then nothing
                                  more); N of them, or for ever; each tells when it was sent:
                                  `"at":` and 19 digits, CLOCK_MONOTONIC in nanoseconds
    GET /flood                    events as fast as the client takes them
    GET /seen                     requests so far (but for those of this kind), streams that run,
                                  and when the last one was given up by its client

A chat body may hold `rate`, `count` and `flood` too. One thread; standard library only.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.bench import relay_slot

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Type: text/event-stream\r\n"
    b"Transfer-Encoding: chunked\r\nAccess-Control-Allow-Origin: \r\n\r\n"
)
EVENT = (
    b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"content":" w"}}],'
    b'"created":1700000000,"id":"chatcmpl-0","model":"bench","system_fingerprint":"b0",'
    b'"object":"chat.completion.chunk","at":%019d}\n\n'
)
_END = b"data: [DONE]\n\n"
_CTX_SIZE = 8192
_COMPLETIONS = ("/completion", "/v1/completions", "/v1/chat/completions")
_FLOOD_CHUNKS = 256
_FOR_EVER = 1 << 40


def chunk(data: bytes) -> bytes:
    """Frame a piece of a body; b"" is its end."""
    return b"%x\r\n%s\r\n" % (len(data), data)


FLOOD = chunk(EVENT % 0) * _FLOOD_CHUNKS


class Peer:
    """One connection: what it sent, what it has not taken yet, and the stream it is sent."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received = bytearray()
        self.unsent = memoryview(b"")
        self.streams = False
        self.period_s = 0.0
        self.left = 0
        self.tail = b""
        self.closes = False


class Backend:
    """The listener, its peers, and the slot.

    Args:
        path: of the Unix socket.
        slots_dir: where state files are.
        model: the model's file, as the properties name it.
    """

    def __init__(self, path: str, slots_dir: Path, model: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self._slot, self._model = relay_slot.Slot(slots_dir), model
        self._peers: dict[int, Peer] = {}
        self._due: list[tuple[float, int, Peer]] = []
        self._order = 0
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._requests = 0
        self._streams = 0
        self._given_up_at = 0.0

    def serve(self) -> None:
        """Serve for ever."""
        listener = self._listener.fileno()
        while True:
            wait_s = -1.0 if not self._due else max(0.0, self._due[0][0] - time.monotonic())
            for fd, events in self._epoll.poll(wait_s):
                if fd == listener:
                    self._accept()
                elif fd in self._peers:
                    self._attempt(self._peers[fd], partial(self._take, events))
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                due, _, peer = heapq.heappop(self._due)
                if peer.streams:
                    self._attempt(peer, partial(self._send_event, due))

    def _attempt(self, peer: Peer, work: Callable[[Peer], None]) -> None:
        try:
            work(peer)
        except OSError:
            self._drop(peer)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            sock.setblocking(False)
            self._peers[sock.fileno()] = Peer(sock)
            self._epoll.register(sock, select.EPOLLIN | select.EPOLLRDHUP)

    def _take(self, events: int, peer: Peer) -> None:
        if events & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR):
            self._drop(peer)
        elif events & select.EPOLLIN:
            peer.received += peer.sock.recv(1 << 20)
            while not peer.streams and self._next_request(peer):
                pass
        elif events & select.EPOLLOUT:
            self._flush(peer)

    def _drop(self, peer: Peer) -> None:
        if peer.streams:
            self._given_up_at = time.monotonic()
            self._streams -= 1
            peer.streams = False
        self._peers.pop(peer.sock.fileno(), None)
        peer.sock.close()

    def _next_request(self, peer: Peer) -> bool:
        head, found, _ = peer.received.partition(b"\r\n\r\n")
        if not found:
            return False
        first, *lines = bytes(head).split(b"\r\n")
        fields = [line.partition(b":") for line in lines]
        headers = {name.lower(): value.strip() for name, _, value in fields}
        whole = len(head) + 4 + int(headers.get(b"content-length", b"0"))
        if len(peer.received) < whole:
            return False
        body = bytes(peer.received[len(head) + 4 : whole])
        del peer.received[:whole]
        peer.closes = headers.get(b"connection", b"").lower() == b"close" or first.endswith(b"1.0")
        target = urlsplit(first.decode().split()[1])
        self._answer(peer, target.path, parse_qs(target.query), body)
        return peer.sock.fileno() >= 0

    def _answer(self, peer: Peer, path: str, query: dict[str, list[str]], body: bytes) -> None:
        self._requests += path != "/seen"
        document: dict[str, Any] = json.loads(body) if body.startswith(b"{") else {}
        if path == "/events":
            rate, count = (float(query.get(name, ["0"])[0]) for name in ("rate", "count"))
            self._begin(peer, rate, int(count), b"")
        elif path == "/flood":
            self._begin(peer, -1.0, 0, b"")
        elif path in _COMPLETIONS and document.get("stream"):
            self._chat(peer, document)
        else:
            self._send_json(peer, self._whole_answer(path, query, document))

    def _whole_answer(
        self, path: str, query: dict[str, list[str]], document: dict[str, Any]
    ) -> dict[str, Any]:
        if path == "/props":
            settings = {"params": {}, "n_ctx": _CTX_SIZE}
            found = {"default_generation_settings": settings, "total_slots": 1}
            return found | {"model_path": self._model, "build_info": "b0-bench"}
        if path == "/seen":
            return {
                "requests": self._requests,
                "streams": self._streams,
                "given_up_at": self._given_up_at,
            }
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "bench", "object": "model"}]}
        if path == "/apply-template":
            return {"prompt": relay_slot.template(document)}
        if path == "/tokenize":
            return {"tokens": relay_slot.ids_of(document["content"])}
        if path.startswith("/slots/"):
            return self._slot.act(query["action"][0], document.get("filename", ""))
        if path in _COMPLETIONS:
            timings = self._slot.evaluate(document)
            return {"content": "w", "choices": [], "timings": timings}
        return {"status": "ok"}

    def _chat(self, peer: Peer, document: dict[str, Any]) -> None:
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
        tail = (
            b"data: "
            + json.dumps(last | {"timings": self._slot.evaluate(document)}).encode()
            + b"\n\n"
        )
        rate = -1.0 if document.get("flood") else float(document.get("rate", 0))
        self._begin(peer, rate, int(document.get("count", 1)), chunk(tail) + chunk(_END))

    def _begin(self, peer: Peer, rate: float, count: int, tail: bytes) -> None:
        self._send(peer, STREAM_HEAD)
        peer.streams, peer.tail = True, tail
        self._streams += 1
        if rate < 0:
            self._flush(peer)
            return
        peer.left, peer.period_s = count or _FOR_EVER, 1 / rate if rate else 0.0
        self._order += 1
        # Streams of one rate do not fall into step with each other.
        phase_s = self._order * 0.618 % 1 * peer.period_s
        self._send_event(time.monotonic() - phase_s, peer)

    def _send_event(self, due: float, peer: Peer) -> None:
        self._send(peer, chunk(EVENT % time.monotonic_ns()))
        peer.left -= 1
        if not peer.left:
            peer.streams = False
            self._streams -= 1
            self._send(peer, peer.tail + chunk(b""))
            if peer.closes:
                self._drop(peer)
            return
        if peer.period_s:
            self._order += 1
            heapq.heappush(self._due, (due + peer.period_s, self._order, peer))

    def _send_json(self, peer: Peer, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self._send(
            peer,
            b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Type: application/json; charset=utf-8"
            b"\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data),
        )
        if peer.closes:
            self._drop(peer)

    def _send(self, peer: Peer, data: bytes) -> None:
        """Send; all but floods is small and read at once, so that a full socket is a fault."""
        if peer.sock.send(data) != len(data):
            raise OSError("the client does not read")

    def _flush(self, peer: Peer) -> None:
        self._epoll.modify(peer.sock, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLOUT)
        try:
            if not peer.unsent:
                peer.unsent = memoryview(FLOOD)
            peer.unsent = peer.unsent[peer.sock.send(peer.unsent) :]
        except BlockingIOError:
            pass


def main(words: list[str]) -> int:
    """Serve until SIGTERM."""
    if "--list-devices" in words:
        print("Available devices:")
        return 0
    args = dict(itertools.pairwise(words))
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    Backend(args["--host"], Path(args["--slot-save-path"]), args["-m"]).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
