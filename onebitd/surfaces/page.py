"""The page at /onebit/ for whoever runs this daemon, and the events that it lives on.

The page itself is one file without data, allowed nothing but its own script and style. What it
shows comes from /onebit/events as server-sent events; everything there is chosen by
`core.page_view`, for everybody who may use the API.

    event       data                                       when
    status      page_view.status_view                      changed, once a second at most
    requests    {"boot", "now", "requests": [...]}         changed, once a second at most
    handoff     page_view.handoff_view, with an id         as each ends; at first the last ones
    costs       page_view.costs_view                       changed, once in five seconds at most

`requests` has page_view.request_view of each and, as the ids of handoffs have, what tells this life
of the daemon from others: numbers of requests begin anew with each.

While nobody looks there is no task, and a finished handoff costs an entry in a list.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import datetime as dt
import hashlib
import itertools
import json
import re
import secrets
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, HTTPScope

from onebitd.adapters.lock_probe import LockStatus
from onebitd.core import page_view
from onebitd.core.control_api import Status
from onebitd.core.errors import RequestError
from onebitd.core.handoff import HandoffRecord
from onebitd.services.in_flight import Entry, InFlight
from onebitd.surfaces.relay import Client

MAX_VIEWERS: Final = 16
RECENT: Final = 100
"""Finished handoffs that a new viewer is told."""

_EVERY_S: Final = 1.0
_PAUSE_S: Final = 0.2
"""Between two writes to one viewer, however much happens."""
_COSTS_EVERY_S: Final = 5.0
_HEARTBEAT_S: Final = 15.0
_RETRY_MS: Final = 2000
_END_S: Final = 1.0
_HTML: Final = Path(__file__).with_name("page.html")
_PART: Final = "<{0}>(.*?)</{0}>"
_COMMON: Final = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)

Headers = list[tuple[bytes, bytes]]


@dataclasses.dataclass(frozen=True, slots=True)
class Sources:
    """Where the page's data comes from.

    Attributes:
        status: as the control socket has it; takes what was found of the lock.
        look_at_lock: asks the kernel, which may take twenty milliseconds: called in a thread.
        costs: as the control socket has them.
        in_flight: the requests that are being served.
    """

    status: Callable[[LockStatus], Status]
    look_at_lock: Callable[[], LockStatus]
    costs: Callable[[], Mapping[str, Any]]
    in_flight: InFlight


@dataclasses.dataclass(slots=True)
class _Viewer:
    """One stream of events, and what it was sent last; `seen` is the last finished handoff."""

    seen: int
    send: ASGISendCallable
    status: str = ""
    requests: str = ""
    costs: str = ""
    sent_at: float = 0.0
    ended: bool = False

    async def begin(self) -> None:
        headers = [
            *_COMMON,
            (b"content-type", b"text/event-stream"),
            (b"x-accel-buffering", b"no"),  # nginx would keep them until there is enough
        ]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.write(f"retry: {_RETRY_MS}\n\n")

    async def write(self, text: str) -> None:
        await self.send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        self.sent_at = trio.current_time()


@dataclasses.dataclass(frozen=True, slots=True)
class _Snapshot:
    """Status and requests as of a moment; one for all viewers."""

    at: float
    status: str
    requests: str
    costs_of: tuple[object, ...]  # what the costs depend on


class Page:
    """Serves everything below /onebit/.

    Args:
        sources: of the data.
        enabled: `http.page`; without, all of it is a 404.
    """

    def __init__(self, sources: Sources, *, enabled: bool) -> None:
        self._sources = sources
        self._enabled = enabled
        html = _HTML.read_bytes()
        self._html = html
        self._html_headers = html_headers(html.decode())
        self._boot = secrets.token_hex(4)
        self._records: collections.deque[tuple[int, HandoffRecord, int]] = collections.deque(
            maxlen=RECENT
        )
        self._finished = 0
        self._numbers = itertools.count(1)
        self._of_entry: weakref.WeakKeyDictionary[Entry, tuple[int, int]]
        self._of_entry = weakref.WeakKeyDictionary()
        self._viewers: list[_Viewer] = []
        self._news = trio.Event()
        self._snapshot: _Snapshot | None = None
        self._refreshing = trio.Lock()
        self._costs = ""
        self._costs_at = -_COSTS_EVERY_S
        self._costs_of: tuple[object, ...] | None = None

    def reconfigure(self, *, enabled: bool) -> None:
        """Take over a reload: viewers come back, and pass the gate as it is now."""
        self._enabled = enabled
        for viewer in self._viewers:
            viewer.ended = True
        self._wake()

    def note(self, record: HandoffRecord) -> None:
        """Take a finished handoff, for `History.listen`."""
        self._finished += 1
        entries = self._sources.in_flight.entries()
        entry = next((one for one in entries if _record_of(one) is record), None)
        number = next(self._numbers) if entry is None else self._number(entry)[0]
        self._records.append((self._finished, record, number))
        self._wake()

    async def serve(
        self, scope: HTTPScope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        """Serve one request below /onebit/ (ASGI)."""
        client = Client(scope, receive, send)
        try:
            await self._serve(scope, receive, send, client)
        except RequestError as error:
            methods = b"GET" if client.path == page_view.EVENTS_PATH else b"GET, HEAD"
            allow = [(b"allow", methods)] if error.status == 405 else []
            await client.send_error(error, allow)

    async def _serve(
        self,
        scope: HTTPScope,
        receive: ASGIReceiveCallable,
        send: ASGISendCallable,
        client: Client,
    ) -> None:
        path = client.path
        known = self._enabled and path in (*page_view.PAGE_PATHS, page_view.EVENTS_PATH)
        if not known:
            why = "no such page" if self._enabled else "the page is off (http.page)"
            raise RequestError(404, why, kind="not_found_error")
        is_events = path == page_view.EVENTS_PATH
        if scope["method"] != "GET" and (is_events or scope["method"] != "HEAD"):
            raise RequestError(405, f"{scope['method'][:20]} is not for this page")
        if is_events:
            await self._serve_events(scope, receive, send)
        elif path == page_view.PAGE_PATHS[0]:
            await client.send_whole(308, [*_COMMON, (b"location", b"onebit/")], b"")
        else:
            await client.send_whole(200, self._html_headers, self._html)

    async def _serve_events(
        self, scope: HTTPScope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        if len(self._viewers) >= MAX_VIEWERS:
            raise RequestError(
                503,
                f"{MAX_VIEWERS} viewers look at this page already",
                kind="unavailable_error",
                retry_after_s=10,
            )
        head = dict(scope["headers"])
        viewer = _Viewer(self._seen_by(head.get(b"last-event-id", b"")), send)
        self._viewers.append(viewer)
        request_id = f"page-{secrets.token_hex(4)}"
        try:
            in_flight = self._sources.in_flight
            with in_flight.open("GET", page_view.EVENTS_PATH, request_id) as entry:
                entry.phase = "page"
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_wait_gone, receive, nursery.cancel_scope)
                    await self._feed(viewer)
                    nursery.cancel_scope.cancel()
        finally:
            self._viewers.remove(viewer)
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _END_S):
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _feed(self, viewer: _Viewer) -> None:
        """Send a viewer what is new until it is ended, and a comment where nothing is for long.

        The next write waits for the last one: nothing is kept for a viewer who does not read.
        """
        await viewer.begin()
        while not viewer.ended:
            news = self._news  # what comes while this is sent is news for the next turn
            async with self._refreshing:
                await self._refresh()
            text = self._news_for(viewer)
            if not text and trio.current_time() - viewer.sent_at >= _HEARTBEAT_S:
                text = ": still here\n\n"
            if text:
                await viewer.write(text)
            await trio.sleep(_PAUSE_S)
            with trio.move_on_after(_EVERY_S - _PAUSE_S):
                await news.wait()

    def _news_for(self, viewer: _Viewer) -> str:
        """Return the events that bring a viewer up to date; what it missed too long ago is lost."""
        parts = []
        shot = self._snapshot
        if shot is not None and shot.status != viewer.status:
            viewer.status = shot.status
            parts.append(_event("status", shot.status))
        for number, record, shown in self._records:
            if number > viewer.seen:
                viewer.seen = number
                data = _compact(page_view.handoff_view(record, shown))
                parts.append(_event("handoff", data, f"{self._boot}-{number}"))
        if shot is not None and shot.requests != viewer.requests:
            viewer.requests = shot.requests
            now_ms = round(time.time() * 1000)
            boot = f'"boot":"{self._boot}"'
            data = f'{{{boot},"now":{now_ms},"requests":{shot.requests}}}'
            parts.append(_event("requests", data))
        if self._costs != viewer.costs:
            viewer.costs = self._costs
            parts.append(_event("costs", self._costs))
        return "".join(parts)

    async def _refresh(self) -> None:
        """See that what is shared by all viewers is new enough."""
        now = trio.current_time()
        if self._snapshot is None or now - self._snapshot.at >= _EVERY_S - _PAUSE_S / 2:
            lock = await trio.to_thread.run_sync(self._sources.look_at_lock)
            found = self._sources.status(lock)
            status = page_view.status_view(found, dt.datetime.now(dt.UTC))
            requests = self._requests()
            depend = (self._finished, found.model.ctx_size, found.provider.program)
            self._snapshot = _Snapshot(now, _compact(status), _compact(requests), depend)
        costs_of = self._snapshot.costs_of
        if self._costs_of != costs_of and now - self._costs_at >= _COSTS_EVERY_S:
            self._costs_at, self._costs_of = now, costs_of
            answer = self._sources.costs()
            # It is arithmetic for some ten milliseconds: replies go on meanwhile.
            self._costs = await trio.to_thread.run_sync(_costs_text, answer)

    def _requests(self) -> list[dict[str, Any]]:
        found = []
        for entry in self._sources.in_flight.entries():
            if entry.path == page_view.EVENTS_PATH:
                continue
            described = entry.describe()
            number, began_ms = self._number(entry, described.age_s)
            shown = page_view.request_view(described, _record_of(entry), number, began_ms)
            found.append(shown)
        return found

    def _number(self, entry: Entry, age_s: float = 0.0) -> tuple[int, int]:
        """Return the number that stands for a request's id, and when it began."""
        if entry not in self._of_entry:
            began_ms = round((time.time() - age_s) * 1000)
            self._of_entry[entry] = (next(self._numbers), began_ms)
        return self._of_entry[entry]

    def _seen_by(self, last_event_id: bytes) -> int:
        """Return the last handoff that a viewer has; 0 for a new one, or one of an earlier life."""
        boot, _, number = last_event_id.decode("latin-1").partition("-")
        is_ours = boot == self._boot and number.isascii() and number.isdigit() and len(number) < 19
        return int(number) if is_ours else 0

    def _wake(self) -> None:
        if self._viewers:
            self._news.set()
            self._news = trio.Event()


def html_headers(html: str) -> Headers:
    """Return the headers of the page, which let it run its own script and style and nothing else.

    Args:
        html: with one `<script>` and one `<style>`, both without attributes.
    """
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_digest(html, 'script')}'",
            f"style-src '{_digest(html, 'style')}'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )
    return [
        *_COMMON,
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-security-policy", policy.encode()),
        (b"cross-origin-opener-policy", b"same-origin"),
        (b"x-frame-options", b"DENY"),
    ]


def _digest(html: str, tag: str) -> str:
    (found,) = re.findall(_PART.format(tag), html, re.DOTALL)
    return "sha256-" + base64.b64encode(hashlib.sha256(found.encode()).digest()).decode()


def _event(kind: str, data: str, event_id: str = "") -> str:
    head = f"id: {event_id}\n" if event_id else ""
    return f"{head}event: {kind}\ndata: {data}\n\n"


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _costs_text(answer: Mapping[str, Any]) -> str:
    return _compact(page_view.costs_view(answer))


def _record_of(entry: Entry) -> HandoffRecord | None:
    return None if entry.exchange is None else entry.exchange.record


async def _wait_gone(receive: ASGIReceiveCallable, scope: trio.CancelScope) -> None:
    while True:
        message: Any = await receive()
        if message["type"] == "http.disconnect":
            scope.cancel()
            return
