"""The public HTTP surface: guards, the handoff route, and everything else passed through."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable
from functools import partial

import structlog
import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, HTTPScope, Scope

from onebitd.adapters.llama_server import Reply
from onebitd.core import guards, page_view, request
from onebitd.core.backend_state import BackendState
from onebitd.core.config import HttpConfig, Policy
from onebitd.core.errors import BackendError, RequestError
from onebitd.core.handoff import Route
from onebitd.core.http1 import HeadError, Headers, request_head
from onebitd.services.handoff import Handoffs
from onebitd.services.in_flight import Entry
from onebitd.services.supervisor import BackendFacts
from onebitd.surfaces.gate import Gate, asks_for_health
from onebitd.surfaces.page import Page
from onebitd.surfaces.relay import JSON_TYPE, Client, ClientGone, end_to_end

log = structlog.get_logger()

_OWN_HEADERS = (b"x-onebit-handoff", b"x-onebit-route", b"x-request-id", b"origin")
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
    gate: Gate


class PublicApp:
    """The ASGI application of the public listener.

    Args:
        handoffs: the pipeline, with its decoder and line.
        config: `[http]`.
        api_keys: the keys, empty when none are needed.
        is_draining: True once the daemon is stopping.
        page: what is below /onebit/.
    """

    def __init__(
        self,
        handoffs: Handoffs,
        config: HttpConfig,
        api_keys: tuple[str, ...],
        is_draining: Callable[[], bool],
        page: Page,
    ) -> None:
        self._handoffs = handoffs
        self._page = page
        self._rules = _Rules(config, Gate(config, api_keys))
        self._is_draining = is_draining
        self._polled: dict[bytes, _Polled] = {}
        self._polling = trio.Lock()

    def reconfigure(self, config: HttpConfig, api_keys: tuple[str, ...]) -> None:
        """Hold the requests to come against these; those that run keep theirs."""
        self._rules = _Rules(config, Gate(config, api_keys))
        self._page.reconfigure(enabled=config.page)

    async def __call__(
        self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        """Serve one request (ASGI)."""
        assert scope["type"] == "http"  # noqa: S101 - the listener speaks nothing else
        admitted = await self._rules.gate.admit(scope, receive, send)
        if admitted is not None:
            await self._serve(scope, receive, admitted)

    async def _serve(
        self, scope: HTTPScope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        if asks_for_health(scope):
            await self._answer_health(Client(scope, receive, send))
            return
        if page_view.shows(scope["path"]):
            await self._page.serve(scope, receive, send)
            return
        rules = self._rules
        client = Client(scope, receive, send)
        headers = dict(client.headers)
        request_id = guards.request_id_of(headers) or _new_id()
        added = client.early_headers = [(b"x-request-id", request_id.encode("latin-1"))]
        head = (scope["method"], client.path, request_id)
        with self._handoffs.in_flight.open(*head, lambda: client.gone) as entry:
            try:
                entry.phase = "body"
                body = await client.read_body(rules.config.max_body_mib << 20)
                entry.phase = "pass"
                await self._route(rules, client, body, entry)
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
        if entry.scope.cancelled_caught:
            await client.send_error(_why_cancelled(entry), added)

    async def _route(self, rules: _Rules, client: Client, body: bytes, entry: Entry) -> None:
        method = client.method.decode()
        keys = (b"authorization", b"x-api-key") if rules.gate.has_keys else ()
        headers = client.forwarded_headers(drop=(*_OWN_HEADERS, *keys))
        if method == "POST" and client.path in request.HANDOFF_PATHS:
            if len(body) > _PARSE_INLINE_BYTES:
                parsed = await trio.to_thread.run_sync(request.parse, client.path, body)
            else:
                parsed = request.parse(client.path, body)
            client.keepalive_s = rules.config.keepalive_s if parsed.stream else 0.0
            await self._hand_off(client, headers, body, parsed, entry)
        elif guards.asked_once_a_second(method, client.path):
            await client.run(partial(self._answer_polled, client, headers))
        elif guards.needs_slot(method, client.path):
            await client.run(partial(self._pass_with_slot, client, headers, body, entry))
        else:
            await client.run(partial(self._pass, client, headers, body, entry))

    async def _hand_off(
        self,
        client: Client,
        headers: Headers,
        body: bytes,
        parsed: request.ParsedRequest,
        entry: Entry,
    ) -> None:
        _check_head(client, headers)
        wanted = (client.path, parsed, _wanted_policy(client), entry.request_id)
        exchange = entry.exchange = self._handoffs.exchange(
            *wanted,
            lambda: client.gone,
            lambda: entry.cancelled_by == "operator",
            _wanted_route(client, may_share=self._handoffs.config.handoff.share),
        )

        async def send(reply: Reply) -> BackendError | None:
            with entry.releasing(exchange.free_slot):
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
        entry: Entry,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        facts = await self._handoffs.supervisor.wait_ready_for_client()
        reply = await self._open(facts, client, headers, body)

        def release() -> None:
            reply.close()
            on_end()

        try:
            with entry.releasing(release):
                await client.send_reply(reply, [], on_end=on_end)
        finally:
            reply.close()

    async def _open(
        self, facts: BackendFacts, client: Client, headers: Headers, body: bytes
    ) -> Reply:
        vitals = self._handoffs.vitals
        in_slot = guards.needs_slot(client.method.decode(), client.path)
        try:
            reply = await facts.server.open(client.method, client.target, headers, body)
        except BackendError:
            if in_slot:
                vitals.note_status(facts, 502)
            raise
        if in_slot:
            kind = dict(reply.headers).get(b"content-type", b"")
            # A stream's head says nothing about how it goes on.
            generated = not kind.startswith(b"text/event-stream")
            vitals.note_status(facts, reply.status, generated=generated)
        return reply

    async def _pass_with_slot(
        self, client: Client, headers: Headers, body: bytes, entry: Entry
    ) -> None:
        ticket = entry.ticket = self._handoffs.admission.enter(entry.request_id)
        try:
            await self._handoffs.supervisor.wait_ready_for_client()
            await ticket.wait_slot()
            await self._handoffs.vitals.make_sure(await self._handoffs.supervisor.wait_ready())
            await self._handoffs.audits.put_slot_back()
            self._handoffs.outlooks.memory.forget()  # nobody tells us what it leaves there
            ticket.phase = "decode"
            await self._pass(client, headers, body, entry, on_end=ticket.leave)
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
        return _Polled(trio.current_time(), reply.status, end_to_end(reply.headers), body)

    async def _answer_health(self, client: Client) -> None:
        """Say whether a request would be served now, in the decoder's own words."""
        supervisor = self._handoffs.supervisor
        status, answer = 200, b'{"status":"ok"}'
        if self._is_draining() or supervisor.state is not BackendState.READY:
            message = "Loading model"
            if self._is_draining():
                message = "onebitd is stopping"
            elif supervisor.last_exit is not None:
                # Its last words are for the operator alone: they may quote a request.
                message = f"the decoder is restarting: {supervisor.last_exit.brief}"
            error = RequestError(503, message, kind="unavailable_error")
            status, answer = error.status, json.dumps(error.body()).encode()
        await client.send_whole(status, [(b"content-type", JSON_TYPE)], answer)


PATIENCE_RETRY_S = 5


def _new_id() -> str:
    """Return a name for a request: no secret, and so no system call."""
    return f"{random.getrandbits(64):016x}"


def _said(client: Client, name: bytes) -> str:
    """Return a header's text; of one that was sent twice both values: they are no word then."""
    values = [value for header, value in client.headers if header == name]
    return b", ".join(values).decode("latin-1").strip().lower()


def _check_head(client: Client, headers: Headers) -> None:
    """See that the decoder will get this head: else a provider would run for nothing."""
    try:
        request_head(client.method, client.target, headers)
    except HeadError as error:
        raise RequestError(400, "the request cannot be passed on", quoted=str(error)) from error


def _wanted_policy(client: Client) -> Policy | None:
    text = _said(client, b"x-onebit-handoff")
    if not text:
        return None
    try:
        return Policy(text)
    except ValueError:
        raise RequestError(
            400, f"X-Onebit-Handoff: {text[:40]!r} is none of {', '.join(Policy)}"
        ) from None


def _wanted_route(client: Client, *, may_share: bool) -> Route | None:
    text = _said(client, b"x-onebit-route")
    if not text:
        return None
    try:
        route = Route(text)
    except ValueError:
        raise RequestError(
            400, f"X-Onebit-Route: {text[:40]!r} is none of {', '.join(Route)}"
        ) from None
    if route is Route.SHARED and not may_share:
        raise RequestError(
            400, "X-Onebit-Route: shared: this onebitd does not share; set handoff.share = true"
        )
    return route


def _why_cancelled(entry: Entry) -> RequestError:
    if entry.cancelled_by == "operator":
        message = "the request was cancelled by the operator"
        return RequestError(503, message, kind="cancelled_error")
    return RequestError(
        503, "onebitd stopped", kind="unavailable_error", retry_after_s=PATIENCE_RETRY_S
    )


def _bad_gateway(error: BackendError) -> RequestError:
    return RequestError(502, str(error), kind="server_error")
