"""Who may use the public listener, and what may pass: pure rules on heads of requests.

A loopback server can be driven by any web page in the user's browser: by DNS rebinding (the Host
header then names the attacker's site) and by cross-site requests (the Origin header does, and where
there is none the Sec-Fetch headers do).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from onebitd.core.config_checks import is_loopback
from onebitd.core.errors import RequestError
from onebitd.core.origins import (
    Host,
    Origin,
    configured_host,
    configured_origin,
    parse_host,
    parse_origin,
)

METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
"""What is passed on. TRACE and CONNECT have no business behind a proxy, and the decoder knows none
but these."""

# A path is matched whole, line feeds included: the decoder's patterns take `/slots/0%0A` too.
_FORBIDDEN: Final = (
    ("POST", re.compile(r"/slots/.*", re.DOTALL), "slot actions belong to onebitd"),
    (
        "POST",
        re.compile(r"/props(/.*)?", re.DOTALL),
        "the decoder's settings come from onebitd's configuration",
    ),
    (
        "POST",
        re.compile(r"/lora-adapters(/.*)?", re.DOTALL),
        "LoRA adapters are shared by all clients",
    ),
    ("POST", re.compile(r"/(v1/)?models(/.*)?", re.DOTALL), "onebitd serves one model"),
    ("DELETE", re.compile(r"/(v1/)?models(/.*)?", re.DOTALL), "onebitd serves one model"),
    (
        "*",
        re.compile(r"/(v1/)?streams?(/.*)?", re.DOTALL),
        "another client's reply is not kept for anybody",
    ),
)
_SLOT_FREE_POSTS: Final = frozenset(
    {
        "/tokenize",
        "/detokenize",
        "/apply-template",
        "/v1/messages/count_tokens",
        "/chat/completions/input_tokens",
        "/v1/chat/completions/input_tokens",
        "/v1/chat/completions/control",  # it acts on the reply that has the slot
        "/responses/input_tokens",
        "/v1/responses/input_tokens",
        # Behind flags of their own; they run beside whatever the slot does.
        "/tools",
        "/cors-proxy",
    }
)
_ONCE_A_SECOND: Final = frozenset({"/slots", "/metrics"})
_PLAIN_PATH: Final = re.compile(rb"/(?:[\x21\x22\x24\x26-\x7e]|%(?!00)[0-9A-Fa-f]{2})*")
_SHOWN_LETTERS: Final = 100
_LONGEST: Final = 400
"""A host or an origin beyond this is none: names end at 253 letters."""

Head = Mapping[bytes, bytes]
"""The headers of a request, names in lower case."""


@dataclasses.dataclass(frozen=True, slots=True)
class Welcome:
    """Whose pages and names may be served, beyond loopback ones and addresses.

    Attributes:
        own: what `http.host` says.
        hosts, origins: of the configuration, in the form that can be compared.
    """

    own: str
    hosts: frozenset[Host]
    origins: frozenset[Origin]

    @classmethod
    def of(cls, own: str, hosts: Collection[str], origins: Collection[str]) -> Welcome:
        """Read the entries of the configuration; what is none has no effect."""
        return cls(
            own.lower(),
            frozenset(filter(None, map(configured_host, hosts))),
            frozenset(filter(None, map(configured_origin, origins))),
        )


def check_framing(headers: Sequence[tuple[bytes, bytes]], head: Head, version: str) -> None:
    """Refuse a head that two readers in a row could understand differently.

    Args:
        headers: names in lower case, repeated ones included.
        head: the same as a mapping.
        version: of HTTP, `1.1`.

    Raises:
        RequestError: 400; the connection must be closed after that answer.
    """
    if b"transfer-encoding" in head and b"content-length" in head:
        raise RequestError(400, "a request has Content-Length or Transfer-Encoding, not both")
    if b"transfer-encoding" in head and version == "1.0":
        raise RequestError(400, "HTTP/1.0 has no Transfer-Encoding; use HTTP/1.1")
    if len(head) != len(headers):
        names = [name for name, _ in headers]
        for name in (b"host", b"origin"):
            if names.count(name) > 1:
                raise RequestError(400, f"a request has one {name.decode().title()} header")


def check_page(head: Head, welcome: Welcome) -> None:
    """Refuse what a web page sends that has no business here.

    Raises:
        RequestError: 403, naming the setting that would let it in.
    """
    host = head.get(b"host", b"").decode("latin-1")
    if not host_allowed(host, welcome):
        raise _forbidden(f"host {host[:_SHOWN_LETTERS]!r} is not served here (http.allowed_hosts)")
    raw = head.get(b"origin")
    if raw is not None:
        origin = raw.decode("latin-1")
        if not origin_allowed(origin, welcome):
            raise _forbidden(
                f"pages of {origin[:_SHOWN_LETTERS]!r} may not use this API (http.allowed_origins)"
            )
    elif is_cross_site(head):
        raise _forbidden("pages of other sites may link to this server, and nothing else")


def check_request(method: str, target: bytes, path: str) -> None:
    """Refuse what must not reach the decoder, whoever asks.

    Args:
        method: as sent.
        target: the request target as sent.
        path: percent-decoded, as the decoder decodes it.

    Raises:
        RequestError: 400, 403 or 405.
    """
    if method not in METHODS:
        raise RequestError(405, f"the method {method[:20]} is not served here")
    if not target_is_plain(target):
        raise RequestError(400, "the request target must be a plain path")
    why = forbidden(method, path)
    if why is not None:
        raise _forbidden(f"{method} {path[:_SHOWN_LETTERS]} is not allowed: {why}")


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


@functools.lru_cache(256)
def host_allowed(text: str, welcome: Welcome) -> bool:
    """Judge a Host header: address literals, loopback names, our own and configured names pass.

    A page that rebinds a name of its own to 127.0.0.1 still sends that name. A configured name
    without a port stands for all ports.
    """
    if not text:
        return True  # HTTP/1.0
    host = parse_host(text) if len(text) <= _LONGEST else None
    if host is None:
        return False
    if host.is_address or is_loopback(host.name) or host.name == welcome.own:
        return True
    return host in welcome.hosts or Host(host.name, "") in welcome.hosts


@functools.lru_cache(256)
def origin_allowed(text: str, welcome: Welcome) -> bool:
    """Judge an Origin header: loopback pages and configured origins pass, `null` never."""
    origin = parse_origin(text) if len(text) <= _LONGEST else None
    if origin is None:
        return False
    if origin in welcome.origins:
        return True
    return origin.scheme in ("http", "https") and is_loopback(origin.name)


def is_cross_site(head: Head) -> bool:
    """Say whether a browser sends this for a page of another site that says no Origin.

    An image, a script, a prefetch: the page cannot read the answer, but the request has been
    carried out. A link that the user follows is a navigation, and passes.
    """
    return (
        head.get(b"sec-fetch-site", b"").lower() == b"cross-site"
        and head.get(b"sec-fetch-mode", b"").lower() != b"navigate"
    )


def _forbidden(message: str) -> RequestError:
    return RequestError(403, message, kind="permission_error")


_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


def request_id_of(headers: Mapping[bytes, bytes]) -> str | None:
    """Return the client's X-Request-Id if it is one word of printable ASCII, else None."""
    text = headers.get(b"x-request-id", b"").decode("latin-1")
    return text if _REQUEST_ID.fullmatch(text) else None
