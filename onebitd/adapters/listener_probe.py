"""Does the public listener answer: one `GET /health`, as a client sends it.

For `onebitctl`: blocking, and written by hand like `onebitd.client`, because http.client takes as
long to import as all the rest of a status.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Final, NamedTuple

TIMEOUT_S: Final = 2.0
"""For connecting and the status line together."""

_REQUEST: Final = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_LINE_BYTES: Final = 4096
_EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - to ask, not to listen


class Answered(NamedTuple):
    """What came of it.

    Args:
        url: that was asked; of a Unix socket `unix:` and its path.
        status: of the answer, None when there was none.
        ms: until it was there.
        error: why there was none.
        tried: False when this user may not, or cannot, connect: that says nothing of the daemon.
    """

    url: str
    status: int | None
    ms: float | None
    error: str | None
    tried: bool = True


def ask_health(address: str, timeout_s: float = TIMEOUT_S) -> Answered:
    """Ask a listener for its health.

    Args:
        address: `HOST:PORT`, `[HOST]:PORT` or `unix:PATH`, as `/v1/status` has it.
        timeout_s: bound on all of it.
    """
    url = _url_of(address)
    try:
        family, where = _where(address)
    except ValueError:
        return Answered(url, None, None, "it is no address to connect to from here", False)
    began = time.monotonic()
    try:
        status = _status_from(family, where, began + timeout_s)
    except TimeoutError:
        return Answered(url, None, None, f"no answer within {timeout_s:g} s")
    except PermissionError:
        return Answered(url, None, None, "this user may not connect to it", False)
    except (ValueError, OverflowError) as error:  # the latter: of a port that cannot be
        return Answered(url, None, None, str(error))
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        return Answered(url, None, None, reason[:1].lower() + reason[1:])
    return Answered(url, status, round((time.monotonic() - began) * 1000.0, 3), None)


def _status_from(family: int, where: str | tuple[str, int], deadline: float) -> int:
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(_left_s(deadline))
        connection.connect(where)
        connection.sendall(_REQUEST)
        held = b""
        while b"\n" not in held:
            connection.settimeout(_left_s(deadline))
            data = connection.recv(_LINE_BYTES)
            if not data:
                raise ValueError("it closed the connection without an answer")
            held += data
            if len(held) > _LINE_BYTES:
                break
    version, _, rest = held.partition(b" ")
    if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
        raise ValueError("what it answers is not HTTP")
    return int(rest[:3])


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _url_of(address: str) -> str:
    if address.startswith("unix:"):
        return address
    return f"http://{address.removeprefix('http://')}/health"


def _where(address: str) -> tuple[int, str | tuple[str, int]]:
    """Return family and address to connect to; ValueError when there is none."""
    if address.startswith("unix:"):
        return socket.AF_UNIX, address.removeprefix("unix:")
    host, _, port = address.removeprefix("http://").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    host = _EVERYWHERE.get(host, host)
    if not host or host.startswith("fe80:"):  # of which link, the address does not say
        raise ValueError(address)
    return socket.AF_INET6 if ":" in host else socket.AF_INET, (host, int(port))
