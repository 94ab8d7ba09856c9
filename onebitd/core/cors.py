"""What a reply tells the browser of another origin's page (CORS, in the Fetch standard).

llama-server repeats the Origin of whoever asks in `Access-Control-Allow-Origin`, and lets everybody
in on a preflight. Its words are taken out and ours put in, for origins that the guards let pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

Headers = list[tuple[bytes, bytes]]

MAX_AGE_S: Final = 600
"""How long a browser need not ask again: a reload that takes an origin away is effective then."""
METHODS: Final = b"GET, HEAD, POST, DELETE, OPTIONS"

_PREFIX: Final = b"access-control-"
_EXPOSED: Final = b"X-Request-Id, X-Onebit-Handoff, X-Onebit-Reason, Server-Timing, Retry-After"
_NAMES: Final = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?: ?, ?[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_VARY: Final = b"Origin, Access-Control-Request-Method, Access-Control-Request-Headers"


def is_preflight(method: str, headers: Mapping[bytes, bytes]) -> bool:
    """Say whether a browser asks here whether a page may send its request."""
    return (
        method == "OPTIONS" and b"origin" in headers and b"access-control-request-method" in headers
    )


def preflight_reply(headers: Mapping[bytes, bytes]) -> Headers:
    """Return the headers of the answer to a preflight of an origin that may use the API.

    No credentials are allowed: a key is a header that the page's script sets, never a cookie of
    whatever stands in front of onebitd.

    Args:
        headers: of the request, names in lower case.
    """
    wanted = headers.get(b"access-control-request-headers", b"").strip()
    reply = [
        (b"access-control-allow-origin", headers[b"origin"]),
        (b"access-control-allow-methods", METHODS),
        (b"access-control-max-age", b"%d" % MAX_AGE_S),
        (b"vary", _VARY),
    ]
    if _NAMES.fullmatch(wanted):
        reply.append((b"access-control-allow-headers", wanted))
    if headers.get(b"access-control-request-private-network", b"").lower() == b"true":
        reply.append((b"access-control-allow-private-network", b"true"))
    return reply


def readable_by(origin: bytes, headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return a reply's headers with which pages of `origin`, and no others, may read it."""
    kept = [(name, value) for name, value in headers if not name.lower().startswith(_PREFIX)]
    return [
        *kept,
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", _EXPOSED),
        (b"vary", b"Origin"),
    ]
