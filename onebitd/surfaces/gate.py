"""The door of the public listener: who is let in, and what a browser is told about it.

Every request passes it before anything else is done for it, whatever its path. A refused one has
its answer from here: no body of it is kept, it has no place in a line, and the decoder never hears
of it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final

from hypercorn.typing import (
    ASGIFramework,
    ASGIReceiveCallable,
    ASGISendCallable,
    ASGISendEvent,
    HTTPScope,
    Scope,
)

from onebitd.core import cors, guards, page_view
from onebitd.core.api_keys import ApiKeys
from onebitd.core.config import HttpConfig
from onebitd.core.errors import RequestError
from onebitd.surfaces.relay import Client, Headers

HEALTH_PATHS: Final = ("/health", "/v1/health")
_SECRET_BYTES: Final = 32


def asks_for_health(scope: HTTPScope) -> bool:
    """Say whether this is a health check, which needs no key: proxies have none."""
    return scope["path"] in HEALTH_PATHS and scope["method"] in ("GET", "HEAD")


def asks_for_page(scope: HTTPScope) -> bool:
    """Say whether a browser asks for the page itself, where its reader then types the key.

    It holds no data; that comes from /onebit/events, which is asked with the key.
    """
    return scope["path"] in page_view.PAGE_PATHS and scope["method"] in ("GET", "HEAD")


class Gate:
    """Lets requests in, by `[http]` and the API keys as they are now.

    Args:
        config: `[http]`.
        api_keys: the keys, empty when none are needed.
    """

    def __init__(self, config: HttpConfig, api_keys: Sequence[str]) -> None:
        self._welcome = guards.Welcome.of(config.host, config.allowed_hosts, config.allowed_origins)
        self._keys = ApiKeys(api_keys, secrets.token_bytes(_SECRET_BYTES))

    @property
    def has_keys(self) -> bool:
        """True when a key is asked for: what a request shows as one is then for us alone."""
        return bool(self._keys)

    async def admit(
        self, scope: HTTPScope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> ASGISendCallable | None:
        """Return how to answer a request that may pass; None when it has its answer already."""
        headers: Headers = list(scope["headers"])
        head = dict(headers)
        try:
            guards.check_framing(headers, head, scope["http_version"])
        except RequestError as error:
            # Whatever follows on this connection, nobody can tell where it begins.
            await _answer(Client(scope, receive, send), error, [(b"connection", b"close")])
            return None
        try:
            guards.check_page(head, self._welcome)
        except RequestError as error:
            await _turn_away(Client(scope, receive, send), error)
            return None
        if cors.is_preflight(scope["method"], head):
            client = Client(scope, receive, send)
            await client.send_whole(204, cors.preflight_reply(head), b"")
            return None
        origin = head.get(b"origin")
        if origin is not None:
            send = _readable_by(origin, send)
        if asks_for_health(scope):
            return send
        try:
            if not asks_for_page(scope):
                self._check_key(scope["method"], headers)
            guards.check_request(scope["method"], _target_of(scope), scope["path"])
        except RequestError as error:
            await _turn_away(Client(scope, receive, send), error)
            return None
        return send

    def _check_key(self, method: str, headers: Headers) -> None:
        # A browser asks without its key whether it may ask with it.
        if method != "OPTIONS" and not self._keys.allow(headers):
            raise RequestError(401, "Invalid API Key", kind="authentication_error")


_SAID_WITH: Final[dict[int, Headers]] = {
    401: [(b"www-authenticate", b"Bearer")],
    405: [(b"allow", ", ".join(guards.METHODS).encode())],
}
"""What the status asks for (RFC 9110, sections 11.6.1 and 15.5.6)."""


async def _turn_away(client: Client, error: RequestError) -> None:
    """Answer with an error, once the client has finished writing."""
    await client.discard_body()
    await _answer(client, error, _SAID_WITH.get(error.status, []))


async def _answer(client: Client, error: RequestError, more: Headers) -> None:
    request_id = guards.request_id_of(dict(client.headers)) or secrets.token_hex(8)
    await client.send_error(error, [(b"x-request-id", request_id.encode("ascii")), *more])


def guard_control(app: ASGIFramework) -> ASGIFramework:
    """Return `app`, which then has a 403 for what web pages send, and a 400 for odd targets.

    For the control socket. No browser reaches a Unix socket by itself; a proxy that somebody put in
    front of one would let every page administer the daemon. A target that is no plain path, such as
    an absolute URL, is not for the framework to read: it fails on some.
    """

    async def guarded(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        if scope["type"] == "http":
            error = _why_not_control(dict(scope["headers"]), _target_of(scope))
            if error is not None:
                await _turn_away(Client(scope, receive, send), error)
                return
        await app(scope, receive, send)

    return guarded


def _why_not_control(head: guards.Head, target: bytes) -> RequestError | None:
    if b"origin" in head:
        return RequestError(
            403, "web pages may not use the control socket", kind="permission_error"
        )
    if not guards.target_is_plain(target):
        return RequestError(400, "the request target must be a plain path")
    return None


def _target_of(scope: HTTPScope) -> bytes:
    """Return the request target as it was sent."""
    query = scope["query_string"]
    return scope["raw_path"] + (b"?" + query if query else b"")


def _readable_by(origin: bytes, send: ASGISendCallable) -> ASGISendCallable:
    """Return `send`, which lets pages of this origin read each reply, whoever wrote it."""

    async def send_through(message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start":
            headers = cors.readable_by(origin, message["headers"])
            await send({"type": message["type"], "status": message["status"], "headers": headers})
        else:
            await send(message)

    return send_through
