"""A control socket with the real application behind the real server, for the tests."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import hypercorn.config
import hypercorn.trio
import trio
from hypercorn.typing import ASGIFramework
from quart_trio import QuartTrio

from onebitd.adapters import lock_probe
from onebitd.core.control_api import (
    BackendStatus,
    LockStatus,
    ModelStatus,
    ProviderReset,
    ProviderStatus,
    QueueStatus,
    ReloadAnswer,
    RequestInFlight,
    SlotStatus,
    Status,
)
from onebitd.core.costs import Costs
from onebitd.core.handoff import HandoffRecord, Outcome
from onebitd.services.history import History
from onebitd.services.metrics import Metrics
from onebitd.surfaces.control_http import create_control_app


def make_status(**changes: Any) -> Status:
    """Return the status of a daemon with nothing wrong."""
    fields: dict[str, Any] = {
        "version": "0.1.0",
        "instance": "qwen",
        "pid": 4242,
        "uptime_s": 7512.3,
        "state": "ready",
        "state_detail": None,
        "listen": [],  # nobody is there to be looked at
        "model": ModelStatus("qwen3-4b", "/models/qwen3-4b-q4_k_m.gguf", 8192, 2, "kv, 36 layers"),
        "backend": BackendStatus(4243, "ready", 0, None, "b10068", ["CPU"], 851_443_712),
        "provider": ProviderStatus("/usr/lib/onebit/npu-prefill", "idle", "closed", 0, None),
        "lock": LockStatus("/tmp/1bit-npu-device.lock", False, None, "handoff", None),
        "slot": SlotStatus(False, None, None, None),
        "queue": QueueStatus(0, 64),
    }
    history = changes.pop("history", None) or History()
    return Status(**(fields | changes), handoffs=history.counts())


def make_record(number: int = 0, outcome: Outcome = Outcome.USED, **more: Any) -> HandoffRecord:
    """Return a finished record of second `number`."""
    fields: dict[str, Any] = {
        "request_id": f"r{number}",
        "time": f"2026-05-01T12:{number // 60:02}:{number % 60:02}.000Z",
        "instance": "qwen",
        "model": "qwen3-4b",
        "path": "/v1/chat/completions",
        "stream": True,
        "outcome": outcome,
        "prompt_tokens": 307,
    }
    return HandoffRecord(**(fields | more))


class FakeView:
    """A daemon's view whose status is what the test put there."""

    def __init__(self) -> None:
        self.history = History()
        self.metrics = Metrics(self.status, lambda: len(self.serving))
        self.history.listen(self.metrics.count)
        self.changes: dict[str, Any] = {}
        self.broken = False
        self.reloaded: ReloadAnswer | Exception = ReloadAnswer([], [], [])
        self.resets = [ProviderReset(0, "closed")]
        self.learned = Costs()
        self.serving: list[RequestInFlight] = []

    def look_at_lock(self) -> lock_probe.LockStatus:
        """Return one of no interest; the status that the test makes has its own."""
        return lock_probe.NOT_LOOKED_AT

    def status(self, lock: lock_probe.LockStatus | None = None) -> Status:
        """Return a healthy status with the test's changes, or fail."""
        if self.broken:
            raise RuntimeError("planted")
        return make_status(history=self.history, **self.changes)

    async def reload(self) -> ReloadAnswer:
        """Answer, or raise, what the test put there."""
        if isinstance(self.reloaded, Exception):
            raise self.reloaded
        return self.reloaded

    def reset_provider(self) -> ProviderReset:
        """Answer what the test put there."""
        return self.resets[-1]

    def requests(self) -> list[RequestInFlight]:
        """Return what the test put there."""
        return self.serving

    def cancel(self, request_id: str) -> int:
        """Take the requests of this id away."""
        before = len(self.serving)
        self.serving = [one for one in self.serving if one.request_id != request_id]
        return before - len(self.serving)

    def config(self) -> dict[str, dict[str, Any]]:
        """Return four settings."""
        return {
            "model.path": {"value": "/models/qwen3-4b-q4_k_m.gguf", "source": "flag --model"},
            "http.port": {"value": 8000, "source": "default"},
            "backend.args": {"value": ["--threads", "4"], "source": "file"},
            "provider.elfs": {"value": None, "source": "default"},
        }

    def costs(self) -> dict[str, Any]:
        """Return what the test taught it, and whose it is."""
        return {
            "costs": self.learned.to_json(),
            "ctx_size": 8192,
            "provider": "/usr/lib/onebit/npu-prefill",
            "share": False,
            "model": "qwen3-4b",
        }


def control_app(view: FakeView) -> QuartTrio:
    """Return the control API of a daemon that is this view."""
    return create_control_app(
        *(view, view.reload, view.reset_provider, view.cancel), metrics=view.metrics.exposition
    )


@contextlib.asynccontextmanager
async def serve_unix(app: object, path: Path) -> AsyncGenerator[trio.CancelScope]:
    """Serve an ASGI application on a Unix socket at `path`; yield the server's cancel scope."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(os.fspath(path))
    config = hypercorn.config.Config()
    config.bind = [f"fd://{listener.detach()}"]
    config.graceful_timeout = 0.1
    config.errorlog = None
    serve = functools.partial(hypercorn.trio.serve, cast("ASGIFramework", app), config, mode="asgi")
    async with trio.open_nursery() as nursery:
        await nursery.start(serve)
        yield nursery.cancel_scope
        nursery.cancel_scope.cancel()


async def talk(path: Path, request: bytes) -> trio.SocketStream:
    """Connect, send a raw request and return the stream; the caller closes it."""
    stream = await trio.open_unix_socket(path)
    await stream.send_all(request)
    return stream


async def read_reply(stream: trio.SocketStream) -> tuple[int, dict[str, str], bytes]:
    """Read one reply that has a Content-Length: status, headers in lower case, body."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += await _some(stream)
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    while len(body) < int(headers.get("content-length", "0")):
        body += await _some(stream)
    return int(first.split()[1]), headers, body


async def _some(stream: trio.SocketStream) -> bytes:
    data = bytes(await stream.receive_some())
    assert data, "the server closed the connection in the middle of a reply"
    return data
