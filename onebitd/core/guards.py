"""Who may use the public listener, and what may pass: pure rules on heads of requests.

A loopback server can be driven by any web page in the user's browser: by DNS rebinding (the Host
header then names the attacker's site) and by cross-site posts (the Origin header does).
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

from onebitd.core.config_checks import is_loopback

_FORBIDDEN: Final = (
    ("POST", re.compile(r"/slots/.*"), "slot actions belong to onebitd"),
    ("POST", re.compile(r"/props/?"), "the decoder's settings come from onebitd's configuration"),
    ("POST", re.compile(r"/lora-adapters/?"), "LoRA adapters are shared by all clients"),
    ("POST", re.compile(r"/(v1/)?models/.+"), "onebitd serves one model"),
    ("DELETE", re.compile(r"/(v1/)?models/?.*"), "onebitd serves one model"),
    ("*", re.compile(r"/(v1/)?streams?/.*"), "another client's reply is not kept for anybody"),
)
_SLOT_FREE_POSTS: Final = frozenset(
    {
        "/tokenize",
        "/detokenize",
        "/apply-template",
        "/v1/messages/count_tokens",
        "/v1/chat/completions/input_tokens",
        "/v1/chat/completions/control",  # it acts on the reply that has the slot
        "/v1/responses/input_tokens",
    }
)
_ONCE_A_SECOND: Final = frozenset({"/slots", "/metrics"})
_PLAIN_PATH: Final = re.compile(rb"/(?:[\x21\x22\x24\x26-\x7e]|%(?!00)[0-9A-Fa-f]{2})*")
_IP_LITERAL: Final = re.compile(r"\[[0-9a-fA-F:.]+\]|\d{1,3}(\.\d{1,3}){3}")


def forbidden(method: str, path: str) -> str | None:
    """Return why a request must not reach the decoder, None when it may.

    Args:
        method: as sent.
        path: percent-decoded, as the decoder decodes it.
    """
    for name, pattern, why in _FORBIDDEN:
        if name in (method, "*") and pattern.fullmatch(path):
            return why
    return None


def target_is_plain(target: bytes) -> bool:
    """Say whether the decoder reads the path of this request target as we do.

    llama-server's HTTP library also decodes `%uXXXX` and drops what follows a `#`: with those, the
    path that `forbidden` judges would not be the path that it acts on.

    >>> target_is_plain(b"/a%20b?x"), target_is_plain(b"/%u0073lots/0"), target_is_plain(b"/a#b")
    (True, False, False)
    """
    path = target.partition(b"?")[0]
    return _PLAIN_PATH.fullmatch(path) is not None and b"#" not in target


def needs_slot(method: str, path: str) -> bool:
    """Say whether a request may occupy the slot; what is not known not to does."""
    return method == "POST" and path not in _SLOT_FREE_POSTS


def asked_once_a_second(method: str, path: str) -> bool:
    """Say whether polling this would keep the decoder from noticing that a client left."""
    return method in ("GET", "HEAD") and path in _ONCE_A_SECOND


def host_allowed(host: str, own_host: str, allowed_hosts: Collection[str]) -> bool:
    """Judge a Host header: address literals, loopback names, our own and configured names pass.

    A page that rebinds a name of its own to 127.0.0.1 still sends that name.
    """
    if not host:
        return True  # HTTP/1.0
    name = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
    name = name.lower().rstrip(".")
    if _IP_LITERAL.fullmatch(name) or is_loopback(name) or name == own_host.lower():
        return True
    return any(
        name == allowed.lower() or host.lower() == allowed.lower() for allowed in allowed_hosts
    )


def origin_allowed(origin: str | None, allowed_origins: Collection[str]) -> bool:
    """Judge an Origin header: none, loopback pages and configured origins pass, `null` never."""
    if origin is None:
        return True
    if origin in allowed_origins:
        return True
    try:
        found = urlsplit(origin)
        name = found.hostname or ""
    except ValueError:
        return False
    return found.scheme in ("http", "https") and is_loopback(name)


def key_allowed(headers: Mapping[bytes, bytes], keys: Sequence[bytes]) -> bool:
    """Judge the API key of a request, in constant time; no keys configured means all may pass.

    Args:
        headers: names in lower case.
        keys: the configured ones.
    """
    if not keys:
        return True
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    given = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
    # Every key is compared, so that the time does not tell which one came close.
    matches = [hmac.compare_digest(given, key) for key in keys]
    return any(matches)


_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


def request_id_of(headers: Mapping[bytes, bytes]) -> str | None:
    """Return the client's X-Request-Id if it is one word of printable ASCII, else None."""
    text = headers.get(b"x-request-id", b"").decode("latin-1")
    return text if _REQUEST_ID.fullmatch(text) else None
