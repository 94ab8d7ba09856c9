"""How soon the decoder is rid of a reply that nobody reads, and the daemon of such a client."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench.measure import median
from tests.bench.relay_designs import Front
from tests.bench.relay_fronts import (
    RATE,
    Extent,
    Fronts,
    backend_of,
    chat,
    front_of,
    passed,
    running_relay,
)
from tests.bench.relay_load import connect, get
from tests.bench.relay_rows import Row, at_most
from tests.harness import wait_until
from tests.llama_builds import UnixConnection

STALL_S = 0.2
"""All that lies between a flood and its reader is full by then."""
GRACE_S = 1
WAYS = {
    "a passed stream": passed(RATE, 0),
    "a chat": chat(RATE, 0),
    "a silent stream": passed(0, 0),
}


def leave_rows(fronts: Fronts, code: Path, extent: Extent) -> list[Row]:
    """Measure the time from a client's leaving to the close of the upstream connection."""
    rows = []
    for what, request in WAYS.items():
        took = [close_ms(fronts, request, 0.0) for _ in range(extent.leaves)]
        rows.append(
            at_most(f"upstream closed after the client left {what}", median(took), 10, " ms")
        )
    for what, request in (("passed", get("/flood")), ("chat", chat(flood=True))):
        took = [close_ms(fronts, request, STALL_S) for _ in range(extent.leaves)]
        what = f"upstream closed after a stalled reader left, {what}"
        rows.append(at_most(what, median(took), 50, " ms"))
    return [*rows, exit_row(code)]


def close_ms(fronts: Fronts, request: str, stall_s: float) -> float:
    """Begin a stream, read no more of it than its first bytes, leave."""
    with begun(fronts.ours, request):
        wait_until(lambda: seen_by(fronts.direct)["streams"] == 1, "the stream runs")
        time.sleep(stall_s)
        left = time.monotonic()
    wait_until(lambda: seen_by(fronts.direct)["streams"] == 0, "the upstream connection closes")
    return (float(seen_by(fronts.direct)["given_up_at"]) - left) * 1000


@contextlib.contextmanager
def begun(front: Front, request: str) -> Iterator[socket.socket]:
    """Yield a connection on which a stream has begun."""
    with connect(front.address) as sock:
        sock.sendall(request.encode())
        head = sock.recv(1 << 12)
        assert head.startswith(b"HTTP/1.1 200"), head
        yield sock


def seen_by(backend: Front) -> dict[str, Any]:
    """Return what the backend says of itself."""
    connection = UnixConnection(Path(os.fspath(str(backend.address))), 10.0)
    with contextlib.closing(connection):
        connection.request("GET", "/seen")
        return dict(json.loads(connection.getresponse().read()))


def exit_row(code: Path) -> Row:
    """Measure how long SIGTERM takes when a client holds a stream that it does not read."""
    config = f"[http]\ndrain_timeout_s = {GRACE_S}\n"
    with running_relay(code, config=config) as daemon, begun(front_of(daemon), get("/flood")):
        wait_until(lambda: seen_by(backend_of(daemon))["streams"] == 1, "the stream runs")
        time.sleep(STALL_S)
        told = time.monotonic()
        daemon.process.send_signal(signal.SIGTERM)
        daemon.process.wait(30)
        took_s = time.monotonic() - told
    return at_most(f"exit with a stalled client, grace {GRACE_S} s", took_s, GRACE_S + 0.5, " s")
