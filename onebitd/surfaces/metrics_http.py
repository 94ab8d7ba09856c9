"""The listener of `metrics.listen`: `GET /metrics` for scrapers, and nothing else.

What it says is about counts and times: no prompt, path or request id. So there are no keys; web
pages are kept out all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, HTTPScope, Scope

from onebitd.core import guards
from onebitd.core.config import Config
from onebitd.core.errors import RequestError
from onebitd.core.origins import parse_listen
from onebitd.surfaces.relay import Client, Headers

METRICS_PATH: Final = "/metrics"
MAX_CONNECTIONS: Final = 32
"""Scrapers are few; they keep their connections."""

MakeExposition = Callable[[str | None], tuple[str, bytes]]
"""Accept header in; content type and body out. Does not wait."""


class MetricsApp:
    """The ASGI application.

    Args:
        exposition: makes what is served.
        config: returns the effective configuration: its `http.allowed_hosts` are names that a
            scraper may use, beyond loopback ones, addresses and that of `metrics.listen`.
    """

    def __init__(self, exposition: MakeExposition, config: Callable[[], Config]) -> None:
        self._exposition = exposition
        self._config = config

    async def __call__(
        self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        """Answer one request; there are no others than HTTP's."""
        if scope["type"] != "http":
            return
        client = Client(scope, receive, send)
        head = dict(client.headers)
        try:
            guards.check_framing(client.headers, head, scope["http_version"])
        except RequestError as error:
            # Whatever follows on this connection, nobody can tell where it begins.
            await client.send_error(error, [(b"connection", b"close")])
            return
        try:
            self._check(scope, head)
            content_type, body = self._exposition(accept_of(client.headers))
        except RequestError as error:
            await client.discard_body()
            await client.send_error(error, _ALLOW if error.status == 405 else [])
            return
        await client.send_whole(200, [(b"content-type", content_type.encode())], body)

    def _check(self, scope: HTTPScope, head: guards.Head) -> None:
        if b"origin" in head:
            raise RequestError(403, "web pages may not read the metrics", kind="permission_error")
        config = self._config()
        where = parse_listen(config.metrics.listen or "")
        own = "" if where is None else where[0]
        guards.check_page(head, guards.Welcome.of(own, config.http.allowed_hosts, ()))
        if scope["path"] != METRICS_PATH:
            raise RequestError(
                404, f"here is nothing but {METRICS_PATH} (metrics.listen)", kind="not_found_error"
            )
        if scope["method"] not in ("GET", "HEAD"):
            raise RequestError(405, f"{METRICS_PATH} is only read: use GET")


_ALLOW: Final[Headers] = [(b"allow", b"GET, HEAD")]


def accept_of(headers: Headers) -> str | None:
    """Return what a request accepts, repeated headers joined; None where it does not say."""
    found = [value.decode("latin-1") for name, value in headers if name == b"accept"]
    return ", ".join(found) if found else None
