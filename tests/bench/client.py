"""Clients that overlap: streamed requests of which each begins at the first byte of the last."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.bench.traces import Ask, Unit
from tests.harness import RunningDaemon

_LIMIT_S = 600.0


@dataclass(frozen=True)
class Seen:
    """What a client saw of one request; the moments are time.time() seconds."""

    request_id: str
    asked: float
    first_byte: float
    ended: float
    tokens: int

    @property
    def first_byte_ms(self) -> float:
        """From the send of the request to the first piece of text."""
        return (self.first_byte - self.asked) * 1000.0


def ask(
    daemon: RunningDaemon, wanted: Ask, way: str | None, on_first_byte: threading.Event
) -> Seen:
    """Post one streamed request on a new connection and read the reply to its end.

    Args:
        way: the value of X-Onebit-Handoff, None for the configured policy.
        on_first_byte: set when the first piece of text is there, or none will come.

    Raises:
        AssertionError: the reply is an error.
    """
    request_id = uuid.uuid4().hex
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    if way is not None:
        headers["X-Onebit-Handoff"] = way
    connection = daemon.connect(_LIMIT_S)
    first = 0.0
    tokens = 0
    try:
        body = json.dumps({**wanted.body, "stream": True})
        asked = time.time()
        connection.request("POST", wanted.path, body, headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        while line := response.readline():
            if line.startswith(b"data: {"):
                now = time.time()
                if _has_text(json.loads(line[5:])):
                    tokens += 1
                    first = first or now
                    on_first_byte.set()
        ended = time.time()
    finally:
        on_first_byte.set()
        connection.close()
    return Seen(request_id, asked, first or ended, ended, tokens)


def _has_text(event: dict[str, Any]) -> bool:
    assert "error" not in event, event
    return any(
        choice.get("text") or choice.get("delta", {}).get("content")
        for choice in event.get("choices", [])
    )


def replay(daemon: RunningDaemon, unit: Unit, ways: Sequence[str | None]) -> list[Seen]:
    """Run one unit: each request is sent when the one before has its first byte."""
    running: list[Future[Seen]] = []
    with ThreadPoolExecutor(len(unit)) as pool:
        for wanted, way in zip(unit, ways, strict=True):
            first_byte = threading.Event()
            running.append(pool.submit(ask, daemon, wanted, way, first_byte))
            first_byte.wait(_LIMIT_S)
    return [one.result() for one in running]
