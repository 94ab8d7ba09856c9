"""The public HTTP surface: guards, the handoff route, and everything else passed through."""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog
import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, HTTPScope, Scope
from quart import Response
from quart_trio import QuartTrio

from onebitd.adapters.llama_server import Headers, Reply
from onebitd.core import guards, request
from onebitd.core.backend_state import BackendState
from onebitd.core.config import HttpConfig, Policy
from onebitd.core.errors import BackendError, RequestError
from onebitd.services.handoff import Handoffs
from onebitd.surfaces.asgi_shield import shield_final_send
from onebitd.surfaces.relay import Client, ClientGone

log = structlog.get_logger()

_OWN_HEADERS = (b"x-onebit-handoff", b"x-request-id")
_POLL_CACHE_S = 1.0
_PARSE_INLINE_BYTES = 1 << 20
"""A larger body is parsed off the event loop."""


@dataclasses.dataclass(slots=True)
class _Polled:
    """The last answer to a GET that the decoder is asked at most once a second."""

    at: float
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class _Rules:
    """What a request is held against, from its head to its end: `[http]` and the API keys."""

    config: HttpConfig
    keys: tuple[bytes, ...]


class PublicApp:
    """The ASGI application of the public listener.

    Args:
        handoffs: the pipeline, with its decoder and line.
        config: `[http]`.
        api_keys: the keys, empty when none are needed.
        is_draining: True once the daemon is stopping.
    """

    def __init__(
        self,
        handoffs: Handoffs,
        config: HttpConfig,
        api_keys: tuple[str, ...],
        is_draining: Callable[[], bool],
    ) -> None:
        self._handoffs = handoffs
        self._rules = _Rules(config, tuple(key.encode() for key in api_keys))
        self._is_draining = is_draining
        self._health: Any = shield_final_send(self._health_app())
        self._polled: dict[bytes, _Polled] = {}
        self._polling = trio.Lock()
        self._running: set[trio.CancelScope] = set()

    def reconfigure(self, config: HttpConfig, api_keys: tuple[str, ...]) -> None:
        """Hold the requests to come against these; those that run keep theirs."""
        self._rules = _Rules(config, tuple(key.encode() for key in api_keys))

    async def __call__(
        self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        """Serve one request (ASGI)."""
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1002, "reason": "HTTP only"})
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)

    def stop_running(self) -> None:
        """Cancel every request that still runs: the drain's time is over."""
        for scope in self._running:
            scope.cancel()

    async def _serve(
        self, scope: HTTPScope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        path = scope["path"]
        if path in ("/health", "/v1/health") and scope["method"] in ("GET", "HEAD"):
            await self._health(scope, receive, send)
            return
        rules = self._rules
        client = Client(scope, receive, send)
        headers = dict(client.headers)
        request_id = guards.request_id_of(headers) or secrets.token_hex(8)
        added = [(b"x-request-id", request_id.encode("latin-1"))]
        with trio.CancelScope() as running:
            self._running.add(running)
            try:
                _check_access(rules, client, headers)
                body = await client.read_body(rules.config.max_body_mib << 20)
                await self._route(rules, client, body, request_id)
            except RequestError as error:
                await client.send_error(error, added)
            except BackendError as error:
                await client.send_error(_bad_gateway(error), added)
            except ClientGone:
                return
            except Exception:
                log.exception("internal_error", path=client.path, request_id=request_id)
                await client.send_error(
                    RequestError(500, "onebitd failed; its log says why", kind="server_error"),
                    added,
                )
            finally:
                self._running.discard(running)
        if running.cancelled_caught:
            stopping = RequestError(
                503, "onebitd stopped", kind="unavailable_error", retry_after_s=PATIENCE_RETRY_S
            )
            await client.send_error(stopping, added)

    async def _route(self, rules: _Rules, client: Client, body: bytes, request_id: str) -> None:
        method = client.method.decode()
        keys = (b"authorization", b"x-api-key") if rules.keys else ()
        headers = client.forwarded_headers(drop=(*_OWN_HEADERS, *keys))
        if method == "POST" and client.path in request.HANDOFF_PATHS:
            if len(body) > _PARSE_INLINE_BYTES:
                parsed = await trio.to_thread.run_sync(request.parse, client.path, body)
            else:
                parsed = request.parse(client.path, body)
            client.keepalive_s = rules.config.keepalive_s if parsed.stream else 0.0
            await self._hand_off(client, headers, body, parsed, request_id)
        elif guards.asked_once_a_second(method, client.path):
            await client.run(partial(self._answer_polled, client, headers))
        elif guards.needs_slot(method, client.path):
            await client.run(partial(self._pass_with_slot, client, headers, body, request_id))
        else:
            await client.run(partial(self._pass, client, headers, body))

    async def _hand_off(
        self,
        client: Client,
        headers: Headers,
        body: bytes,
        parsed: request.ParsedRequest,
        request_id: str,
    ) -> None:
        exchange = self._handoffs.exchange(
            client.path, parsed, _wanted_policy(client), request_id, lambda: client.gone
        )

        async def send(reply: Reply) -> BackendError | None:
            return await client.send_reply(
                reply, exchange.reply_headers(), exchange.observe, exchange.free_slot
            )

        async def work() -> None:
            async with exchange:
                reply = await exchange.open(client.method, client.target, headers, body)
                try:
                    broken = await send(reply)
                except BackendError as error:
                    broken = await send(await exchange.reopen(error))
                if broken is not None:
                    exchange.note_broken_off(broken)

        try:
            await client.run(work)
        except RequestError as error:
            await client.send_error(error, exchange.reply_headers())
        except BackendError as error:
            await client.send_error(_bad_gateway(error), exchange.reply_headers())

    async def _pass(
        self,
        client: Client,
        headers: Headers,
        body: bytes,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        facts = await self._handoffs.supervisor.wait_ready_for_client()
        reply = await facts.server.open(client.method, client.target, headers, body)
        try:
            await client.send_reply(reply, [], on_end=on_end)
        finally:
            reply.close()

    async def _pass_with_slot(
        self, client: Client, headers: Headers, body: bytes, request_id: str
    ) -> None:
        ticket = self._handoffs.admission.enter(request_id)
        try:
            await self._handoffs.supervisor.wait_ready_for_client()
            await ticket.wait_slot()
            await self._handoffs.audits.put_slot_back()
            self._handoffs.outlooks.memory.forget()  # nobody tells us what it leaves there
            ticket.phase = "decode"
            await self._pass(client, headers, body, on_end=ticket.leave)
        finally:
            ticket.leave()

    async def _answer_polled(self, client: Client, headers: Headers) -> None:
        """Answer from the last answer to this target, or ask; the decoder once a second at most.

        The rule is one for a path, whatever the query: other targets wait for their turn.
        """
        async with self._polling:
            polled = self._polled.get(client.target)
            if polled is None or trio.current_time() - polled.at >= _POLL_CACHE_S:
                last = max((one.at for one in self._polled.values()), default=-math.inf)
                await trio.sleep_until(min(last + _POLL_CACHE_S, trio.current_time() + 1.0))
                polled = await self._poll(client, headers)
                # Every query string is a target of its own; only the last few are worth keeping.
                if len(self._polled) >= 8:
                    self._polled.clear()
                self._polled[client.target] = polled
        await client.send_whole(polled.status, polled.headers, polled.body)

    async def _poll(self, client: Client, headers: Headers) -> _Polled:
        facts = await self._handoffs.supervisor.wait_ready_for_client()
        reply = await facts.server.open(b"GET", client.target, headers, b"")
        try:
            body = await reply.read_all()
        finally:
            reply.close()
        return _Polled(trio.current_time(), reply.status, list(reply.headers), body)

    def _health_app(self) -> QuartTrio:
        app = QuartTrio("onebitd.public")

        @app.get("/health")
        @app.get("/v1/health")
        async def health() -> tuple[dict[str, Any], int] | Response:
            supervisor = self._handoffs.supervisor
            if supervisor.state is BackendState.READY and not self._is_draining():
                return {"status": "ok"}, 200
            message = "Loading model"
            if self._is_draining():
                message = "onebitd is stopping"
            elif supervisor.last_exit is not None:
                # Its last words are for the operator alone: they may quote a request.
                message = f"the decoder is restarting: {supervisor.last_exit.brief}"
            error = {"message": message, "type": "unavailable_error", "code": 503}
            return {"error": error}, 503

        return app


PATIENCE_RETRY_S = 5


def _check_access(rules: _Rules, client: Client, headers: dict[bytes, bytes]) -> None:
    config = rules.config
    host = headers.get(b"host", b"").decode("latin-1")
    if not guards.host_allowed(host, config.host, config.allowed_hosts):
        raise RequestError(
            403,
            f"host {host[:100]!r} is not served here (http.allowed_hosts)",
            kind="permission_error",
        )
    raw = headers.get(b"origin")
    origin = None if raw is None else raw.decode("latin-1")
    if not guards.origin_allowed(origin, config.allowed_origins):
        raise RequestError(
            403,
            f"pages of {str(origin)[:100]!r} may not use this API (http.allowed_origins)",
            kind="permission_error",
        )
    # A browser asks without its key whether it may ask with it.
    if client.method != b"OPTIONS" and not guards.key_allowed(headers, rules.keys):
        raise RequestError(401, "Invalid API Key", kind="authentication_error")
    if not guards.target_is_plain(client.target):
        raise RequestError(400, "the request target must be a plain path")
    why = guards.forbidden(client.method.decode(), client.path)
    if why is not None:
        raise RequestError(
            403,
            f"{client.method.decode()} {client.path[:100]} is not allowed: {why}",
            kind="permission_error",
        )


def _wanted_policy(client: Client) -> Policy | None:
    text = dict(client.headers).get(b"x-onebit-handoff", b"").decode("latin-1").strip().lower()
    if not text:
        return None
    try:
        return Policy(text)
    except ValueError:
        raise RequestError(
            400, f"X-Onebit-Handoff: {text[:40]!r} is none of {', '.join(Policy)}"
        ) from None


def _bad_gateway(error: BackendError) -> RequestError:
    return RequestError(502, str(error), kind="server_error")
