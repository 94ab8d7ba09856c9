"""One timed request, and the arithmetic of a benchmark: medians, ratios, a table."""

from __future__ import annotations

import http.client
import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Streamed:
    """A streamed reply as a client saw it. Times in milliseconds from the send of the request."""

    first_byte_ms: float
    total_ms: float
    chunks: int
    timings: dict[str, Any]

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first, over the time from the first byte to the last."""
        return (self.chunks - 1) / (self.total_ms - self.first_byte_ms) * 1000.0


def stream(
    connection: http.client.HTTPConnection,
    path: str,
    body: dict[str, Any],
    headers: Mapping[str, str] | None = None,
) -> Streamed:
    """Post a streamed request on a new connection and read it to its end; closes it."""
    started = time.perf_counter()
    connection.request(
        "POST",
        path,
        json.dumps({**body, "stream": True}),
        {"Content-Type": "application/json", **(headers or {})},
    )
    response = connection.getresponse()
    assert response.status == 200, response.read()
    first = 0.0
    chunks = 0
    timings: dict[str, Any] = {}
    while line := response.readline():
        if not line.startswith(b"data:"):
            continue
        now = (time.perf_counter() - started) * 1000.0
        first = first or now
        if line.strip() == b"data: [DONE]":
            continue
        event = json.loads(line[5:])
        assert "error" not in event, event
        chunks += bool(event.get("choices") and event["choices"][0].get("text"))
        timings = event.get("timings", timings)
    total = (time.perf_counter() - started) * 1000.0
    connection.close()
    return Streamed(first, total, chunks, timings)


def median(values: Iterable[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned table, first column left, the others right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "  ".join(cells)

    return "\n".join([title, line(head), line(["-" * width for width in widths]), *map(line, rows)])
