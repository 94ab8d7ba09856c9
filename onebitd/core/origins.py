"""Hosts and origins as web clients write them, in one form that can be compared.

A Host header is a name or an address with or without a port (RFC 9110, section 7.2); an Origin is a
scheme before that (RFC 6454, section 6.2) and nothing behind it: no user, no path.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Final

_NAME: Final = r"\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._~-]{1,253}"
_HOST: Final = re.compile(rf"({_NAME})(?::([0-9]{{0,5}}))?")
_ORIGIN: Final = re.compile(rf"([A-Za-z][A-Za-z0-9+.-]{{0,63}})://({_NAME})(?::([0-9]{{1,5}}))?")
_DEFAULT_PORTS: Final = {"http": "80", "https": "443"}
_LAST_PORT: Final = 65535
_ADDRESS: Final = re.compile(r"\[[0-9a-f:.]+\]|\d{1,3}(\.\d{1,3}){3}")


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """A name in lower case without the root's dot, or an address; the port's digits, or none."""

    name: str
    port: str

    @property
    def is_address(self) -> bool:
        """True for an address literal: nobody's DNS stands behind it."""
        return _ADDRESS.fullmatch(self.name) is not None


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Scheme and name in lower case; the port's digits, none where it is the scheme's own."""

    scheme: str
    name: str
    port: str


def parse_host(text: str) -> Host | None:
    """Read a Host header; None when it is not one.

    >>> parse_host("Box.LAN.:8000")
    Host(name='box.lan', port='8000')
    >>> parse_host("user@localhost") is parse_host("[::1].evil.example") is None
    True
    """
    found = _HOST.fullmatch(text)
    if found is None:
        return None
    name = found[1].lower()
    return Host(name.removesuffix("."), found[2] or "")


def parse_origin(text: str) -> Origin | None:
    """Read an Origin header, of any scheme; None when it is not one, as `null` is not.

    >>> parse_origin("HTTPS://Chat.LAN:443")
    Origin(scheme='https', name='chat.lan', port='')
    >>> parse_origin("http://evil.example@localhost") is parse_origin("null") is None
    True
    """
    found = _ORIGIN.fullmatch(text)
    if found is None:
        return None
    scheme, port = found[1].lower(), (found[3] or "").lstrip("0")
    return Origin(scheme, found[2].lower(), "" if port == _DEFAULT_PORTS.get(scheme) else port)


def configured_host(text: str) -> Host | None:
    """Read an entry of `http.allowed_hosts`: a Host header whose name may be in any script."""
    return parse_host(_in_ascii(text.strip()))


def configured_origin(text: str) -> Origin | None:
    """Read an entry of `http.allowed_origins`: an origin whose name may be in any script.

    A slash at its end is forgiven: people paste what the address bar shows.
    """
    scheme, separator, rest = text.strip().partition("://")
    return parse_origin(scheme + separator + _in_ascii(rest.removesuffix("/")))


def parse_listen(text: str) -> tuple[str, int] | None:
    """Read an address or a name with a port to listen on; None when it is not one.

    >>> parse_listen("127.0.0.1:9464"), parse_listen("[::1]:0")
    (('127.0.0.1', 9464), ('::1', 0))
    >>> parse_listen("9464") is parse_listen("::1:9464") is parse_listen("localhost:65536") is None
    True
    """
    host = parse_host(text)
    if host is None or not host.port or int(host.port) > _LAST_PORT:
        return None
    return host.name.strip("[]"), int(host.port)


def _in_ascii(name: str) -> str:
    """Return a name as browsers send it: what is beyond ASCII in Punycode."""
    if name.isascii():
        return name
    try:
        return name.encode("idna").decode("ascii")
    except UnicodeError:
        return name
