"""The control API: HTTP/1.1 over the control socket.

`GET /metrics` in Prometheus's formats, all else JSON:
`GET /v1/status`, `GET /v1/requests`, `GET /v1/handoffs`, `GET /v1/handoffs/summary`,
`GET /v1/config`, `GET /v1/costs`,
`POST /v1/requests/cancel`, `POST /v1/reload`, `POST /v1/provider/reset`. Errors have the shape
`{"error": {"message", "type", "code"}}`; a refused reload adds `problems`, a list of lines.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NoReturn, Protocol, Self, cast

import trio
from quart import Response, jsonify, request
from quart.wrappers.response import ResponseBody
from quart_trio import QuartTrio
from werkzeug.exceptions import BadRequest, HTTPException, MethodNotAllowed, NotFound

from onebitd.adapters.lock_probe import LockStatus
from onebitd.core.control_api import ProviderReset, ReloadAnswer, RequestInFlight, Status
from onebitd.core.errors import ConfigError, RequestError
from onebitd.core.handoff_filter import MAX_LIMIT, WORDS, HandoffFilter, parse_time
from onebitd.services.history import Follower, History, Reading, encoded
from onebitd.surfaces.asgi_shield import shield_final_send
from onebitd.surfaces.gate import guard_control
from onebitd.surfaces.metrics_http import METRICS_PATH, MakeExposition

DEFAULT_LIMIT: Final = 20

_WANTED: Final = ("limit", *WORDS, "since")
_MAX_BODY_BYTES: Final = 65536


class ControlView(Protocol):
    """What the control API shows; the daemon implements it."""

    @property
    def history(self) -> History:
        """The handoffs of the past, and those to come."""

    def look_at_lock(self) -> LockStatus:
        """Look at the device lock; any thread may, and it may take twenty milliseconds."""

    def status(self, lock: LockStatus | None) -> Status:
        """Return the whole of `/v1/status`, as of now.

        Args:
            lock: what `look_at_lock` found a moment ago.
        """

    def requests(self) -> Sequence[RequestInFlight]:
        """Return the requests that are being served, the oldest first."""

    def config(self) -> Mapping[str, Mapping[str, Any]]:
        """Return `{key: {"value", "source"}}` of every setting, secrets hidden."""

    def costs(self) -> Mapping[str, Any]:
        """Return `{"costs", "ctx_size", "provider", "share", "model"}`: what advice rests on."""


Reload = Callable[[], Awaitable[ReloadAnswer]]
ResetProvider = Callable[[], ProviderReset]
CancelRequest = Callable[[str], int]


def create_control_app(
    view: ControlView,
    reload: Reload,
    reset_provider: ResetProvider,
    cancel: CancelRequest,
    *,
    metrics: MakeExposition,
) -> QuartTrio:
    """Build the ASGI application of the control socket.

    Args:
        view: what it shows; nothing there waits.
        reload: reads the configuration again; raises ConfigError for a bad one and RequestError
            when it is not the time. It goes on when its client leaves.
        reset_provider: clears what is held against the provider, at once.
        cancel: ends every request of an id, and returns how many there were; does not wait.
        metrics: makes what a scraper gets.

    A client that follows ends when it leaves, when `view.history.close()` is called, or when the
    server's task is cancelled; it holds no task of its own.
    """
    app = QuartTrio("onebitd.control")
    app.config["MAX_CONTENT_LENGTH"] = _MAX_BODY_BYTES
    app.json.sort_keys = False  # type: ignore[attr-defined] # the default provider has it
    app.asgi_app = guard_control(shield_final_send(app.asgi_app))  # type: ignore[method-assign, assignment]
    app.register_error_handler(HTTPException, _render_error)
    app.register_error_handler(ConfigError, _render_refused)
    app.register_error_handler(RequestError, _render_not_now)

    @app.get("/v1/status")
    async def status() -> Response:
        lock = await trio.to_thread.run_sync(view.look_at_lock)
        return jsonify(view.status(lock).to_json())

    @app.get(METRICS_PATH)
    async def exposition() -> Response:
        content_type, body = metrics(request.headers.get("Accept"))
        return Response(body, content_type=content_type)

    @app.get("/v1/config")
    async def config() -> Response:
        return jsonify(view.config())

    @app.get("/v1/costs")
    async def costs() -> Response:
        return jsonify(view.costs())

    @app.get("/v1/requests")
    async def requests() -> Response:
        return jsonify({"requests": [one.to_json() for one in view.requests()]})

    @app.post("/v1/requests/cancel")
    async def cancel_request() -> Response:
        request_id = _request_id_in(await request.get_data())
        number = cancel(request_id)
        if not number:
            raise RequestError(
                404,
                f"no request {request_id[:128]!r} is in flight: `onebitctl requests` shows those"
                " that are",
                kind="not_found_error",
            )
        return jsonify({"cancelled": number})

    @app.post("/v1/reload")
    async def do_reload() -> Response:
        return jsonify((await reload()).to_json())

    @app.post("/v1/provider/reset")
    async def do_reset_provider() -> Response:
        return jsonify(reset_provider().to_json())

    @app.get("/v1/handoffs")
    async def handoffs() -> Response:
        query = _Query(request.args.to_dict(flat=False), (*_WANTED, "follow"), DEFAULT_LIMIT)
        await view.history.wait_loaded()
        if query.follow:
            response = Response(
                _FollowBody(view.history, query.wanted), mimetype="application/x-ndjson"
            )
        else:
            reading = view.history.reading(query.wanted)
            await reading.open()
            body = _ListBody(reading)
            whole = b"".join([part async for part in body]) if reading.is_short else None
            response = Response(body if whole is None else whole, mimetype="application/json")
        response.timeout = None  # or the stream is cut after RESPONSE_TIMEOUT, 60 s
        return response

    @app.get("/v1/handoffs/summary")
    async def handoffs_summary() -> Response:
        query = _Query(request.args.to_dict(flat=False), _WANTED, None)
        return jsonify(await view.history.summary(query.wanted))

    return app


def _request_id_in(body: bytes | str) -> str:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    request_id = found.get("request_id") if isinstance(found, dict) else None
    if not isinstance(request_id, str) or not request_id:
        _refuse('the body must be {"request_id": ID}')
    return request_id


class _Query:
    """The parameters of a question for handoffs, checked.

    Args:
        given: as they came.
        known: those that there are.
        limit: where none is given; who follows gets none of the past then, unless since a time.
    """

    def __init__(
        self, given: Mapping[str, list[str]], known: Sequence[str], limit: int | None
    ) -> None:
        for name, values in given.items():
            if name not in known:
                _refuse(f"unknown parameter {name!r}: there are {', '.join(known)}")
            if len(values) > 1:
                _refuse(f"{name} is given {len(values)} times")
        first = {name: values[0] for name, values in given.items()}
        self.follow = _follow_of(first.get("follow", "0"))
        since = _since_of(first.get("since"))
        if self.follow:
            limit = 0 if since is None else MAX_LIMIT
        words = {name: _word_of(name, first.get(name)) for name in WORDS}
        self.wanted = HandoffFilter(
            limit=_limit_of(first.get("limit"), limit), since=since, **words
        )


def _follow_of(text: str) -> bool:
    if text not in ("0", "1"):
        _refuse(f"follow={text}: must be 1 or 0")
    return text == "1"


def _word_of(name: str, text: str | None) -> str | None:
    if text is not None and text not in WORDS[name]:
        _refuse(f"{name}={text}: must be one of {', '.join(WORDS[name])}")
    return text


def _since_of(text: str | None) -> dt.datetime | None:
    if text is None:
        return None
    try:
        # A plus sign that was not escaped arrives as a blank.
        return parse_time(text.replace(" ", "+"))
    except ValueError as exc:
        _refuse(f"since: {exc}")


def _limit_of(text: str | None, default: int | None) -> int | None:
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) <= MAX_LIMIT):
        _refuse(f"limit={text}: must be a number from 0 to {MAX_LIMIT}")
    return int(text)


def _refuse(message: str) -> NoReturn:
    raise BadRequest(message)


_BEGIN: Final = b'{"handoffs": ['
_NEXT: Final = b",\n"
_END: Final = b"]}\n"


class _ListBody(ResponseBody):
    """Body of a long list of records, sent page by page as they are read."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._is_begun = self._has_ended = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        pass

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._has_ended:
            raise StopAsyncIteration
        page = await self._reading.page()
        before = _NEXT if self._is_begun else _BEGIN
        self._is_begun, self._has_ended = True, not page
        if page:
            return before + _NEXT.join(page)
        return _END if before is _NEXT else before + _END


class _FollowBody(ResponseBody):
    """Body of a followed reply: one JSON object a line.

    A class and not a generator: when the client leaves in the middle of a send, nothing but
    `__aexit__` is sure to run.
    """

    def __init__(self, history: History, wanted: HandoffFilter) -> None:
        self._history = history
        self._wanted = wanted
        self._past: Reading | None = None
        self._is_open = False
        self._follower: Follower | None = None

    async def __aenter__(self) -> Self:
        self._follower = await self._history.follow(self._wanted).__aenter__()
        self._past = self._history.reading(self._wanted)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._follower is not None:
            await self._follower.__aexit__(exc_type, exc, traceback)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        past = self._past
        if past is not None:
            if not self._is_open:
                self._is_open = True
                await past.open()
            if page := await past.page():
                return b"".join(line + b"\n" for line in page)
            self._past = None
        return encoded([await anext(cast("Follower", self._follower))])[0] + b"\n"


def _render_refused(error: ConfigError) -> Response:
    problems = list(error.problems)
    fault = {
        "message": f"the configuration is bad, nothing has changed: {'; '.join(problems)}",
        "type": "invalid_request_error",
        "code": 422,
        "problems": problems,
    }
    response = jsonify({"error": fault})
    response.status_code = 422
    return response


def _render_not_now(error: RequestError) -> Response:
    response = jsonify(error.body())
    response.status_code = error.status
    return response


def _render_error(error: HTTPException) -> Response:
    code = error.code or 500
    message = error.description or error.name
    if isinstance(error, NotFound):
        message = (
            f"no such endpoint: {request.path}; this onebitd has GET /v1/status,"
            " GET /v1/requests, GET /v1/handoffs, GET /v1/handoffs/summary, GET /v1/config,"
            " GET /v1/costs, GET /metrics,"
            " POST /v1/requests/cancel, POST /v1/reload and POST /v1/provider/reset"
        )
    elif isinstance(error, MethodNotAllowed):
        wanted = "POST" if "POST" in (error.valid_methods or ()) else "GET"
        message = f"{request.method} is not allowed on {request.path}: use {wanted}"
    elif code >= 500:
        message = "onebitd failed to answer; its log says why"
    kind = "server_error" if code >= 500 else "invalid_request_error"
    if code == 404:
        kind = "not_found_error"
    body = {"error": {"message": message, "type": kind, "code": code}}
    response = jsonify(body)
    response.status_code = code
    if isinstance(error, MethodNotAllowed) and error.valid_methods:
        response.headers["Allow"] = ", ".join(sorted(error.valid_methods))
    return response
