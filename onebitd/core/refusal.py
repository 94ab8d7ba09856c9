"""The whole reply to a client that gets no further: one too many, too slow, or no HTTP at all."""

from __future__ import annotations

import json
from typing import Final

from onebitd.core.errors import RequestError

_PHRASES: Final = {
    400: "Bad Request",
    403: "Forbidden",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


def refusal(error: RequestError) -> bytes:
    """Return a reply as it goes over the wire; the connection is to be closed behind it.

    The body has the shape of every other error: `{"error": {"message", "type", "code"}}`.
    """
    body = json.dumps(error.body()).encode()
    lines = [
        f"HTTP/1.1 {error.status} {_PHRASES.get(error.status, 'Error')}",
        "content-type: application/json; charset=utf-8",
        f"content-length: {len(body)}",
        "connection: close",
    ]
    if error.retry_after_s is not None:
        lines.append(f"retry-after: {error.retry_after_s}")
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body
