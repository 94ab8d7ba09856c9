"""The door of the public listener: who is let in, and what a browser is told about it.

Every request passes it before anything else is done for it, whatever its path. A refused one has
its answer from here: no body of it is kept, it has no place in a line, and the decoder never hears
of it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any, Final

import trio
from hypercorn.typing import (
    ASGIFramework,
    ASGIReceiveCallable,
    ASGISendCallable,
    ASGISendEvent,
    HTTPScope,
    Scope,
)

from onebitd.core import cors, guards
from onebitd.core.api_keys import ApiKeys
from onebitd.core.config import HttpConfig
from onebitd.core.errors import RequestError

HEALTH_PATHS: Final = ("/health", "/v1/health")
_DISCARD_S: Final = 2.0
_END_S: Final = 60.0
_SECRET_BYTES: Final = 32

Headers = list[tuple[bytes, bytes]]


def asks_for_health(scope: HTTPScope) -> bool:
    """Say whether this is a health check, which needs no key: proxies have none."""
    return scope["path"] in HEALTH_PATHS and scope["method"] in ("GET", "HEAD")


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
            await answer(send, error, head, [(b"connection", b"close")])
            return None
        try:
            guards.check_page(head, self._welcome)
        except RequestError as error:
            await _turn_away(receive, send, error, head)
            return None
        if cors.is_preflight(scope["method"], head):
            await _send_whole(send, 204, cors.preflight_reply(head), b"")
            return None
        origin = head.get(b"origin")
        if origin is not None:
            send = _readable_by(origin, send)
        if asks_for_health(scope):
            return send
        try:
            self._check_key(scope["method"], headers)
            guards.check_request(scope["method"], _target_of(scope), scope["path"])
        except RequestError as error:
            await _turn_away(receive, send, error, head)
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


async def _turn_away(
    receive: ASGIReceiveCallable, send: ASGISendCallable, error: RequestError, head: guards.Head
) -> None:
    """Let the client finish writing, for a while, since many read no answer before; then answer."""
    with trio.move_on_after(_DISCARD_S):
        while True:
            message: Any = await receive()
            if message["type"] == "http.disconnect":
                return
            if not message.get("more_body", False):
                break
    await answer(send, error, head, _SAID_WITH.get(error.status, []))


async def answer(
    send: ASGISendCallable, error: RequestError, head: guards.Head, more: Headers
) -> None:
    """Answer a request with an error in the public shape, its id, and more headers."""
    body = json.dumps(error.body()).encode()
    request_id = guards.request_id_of(head) or secrets.token_hex(8)
    headers = [
        (b"content-type", b"application/json; charset=utf-8"),
        (b"x-request-id", request_id.encode("ascii")),
        *more,
        (b"content-length", b"%d" % len(body)),
    ]
    await _send_whole(send, error.status, headers, body)


async def _send_whole(send: ASGISendCallable, status: int, headers: Headers, body: bytes) -> None:
    # Shielded: a stop must not come between a head and its body.
    with trio.CancelScope(shield=True, deadline=trio.current_time() + _END_S):
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


def guard_control(app: ASGIFramework) -> ASGIFramework:
    """Return `app`, which then has a 403 for what web pages send, and a 400 for odd targets.

    For the control socket. No browser reaches a Unix socket by itself; a proxy that somebody put in
    front of one would let every page administer the daemon. A target that is no plain path, such as
    an absolute URL, is not for the framework to read: it fails on some.
    """

    async def guarded(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        error = None
        head = {}
        if scope["type"] == "http":
            head = dict(scope["headers"])
            error = _why_not_control(head, _target_of(scope))
        if error is not None:
            await _turn_away(receive, send, error, head)
        else:
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
