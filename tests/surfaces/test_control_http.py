"""The control API over a real socket."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import trio

from onebitd.adapters import lock_probe
from onebitd.core.config import HistoryConfig
from onebitd.core.control_api import ProviderReset, ReloadAnswer, RequestInFlight
from onebitd.core.errors import ConfigError, RequestError
from onebitd.core.handoff import Outcome, Reason, Route
from onebitd.core.handoff_summary import summarise
from onebitd.services.history import FOLLOWER_RECORDS
from onebitd.services.history_keeper import HistoryKeeper
from tests.surfaces.control_server import (
    FakeView,
    control_app,
    make_record,
    read_reply,
    serve_unix,
    talk,
)


class Control:
    """A served control app and its view."""

    def __init__(self, path: Path, view: FakeView, scope: trio.CancelScope) -> None:
        self.path = path
        self.view = view
        self.server_scope = scope

    async def ask(
        self, target: str, method: str = "GET", body: str = ""
    ) -> tuple[int, dict[str, str], Any]:
        """Send one request; return status, headers and the JSON of the reply."""
        head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        stream = await talk(self.path, (head + body).encode())
        async with stream:
            status, headers, answer = await read_reply(stream)
        assert headers["content-type"] == "application/json"
        return status, headers, json.loads(answer)

    async def follow(self, query: str = "") -> Follow:
        """Open a followed reply and wait for its head."""
        head = f"GET /v1/handoffs?follow=1{query} HTTP/1.0\r\n\r\n"
        follow = Follow(await talk(self.path, head.encode()))
        await follow.read_head()
        return follow


class Follow:
    """A followed reply; HTTP/1.0, so its body is the bare lines."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._data = b""

    async def _until(self, mark: bytes) -> bytes:
        while mark not in self._data:
            more = bytes(await self.stream.receive_some())
            if not more:
                raise EOFError
            self._data += more
        found, _, self._data = self._data.partition(mark)
        return found

    async def read_head(self) -> None:
        """Read up to the body."""
        head = await self._until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        assert b"application/x-ndjson" in head.lower()

    async def line(self) -> dict[str, Any]:
        """Read one line; EOFError when the reply has ended."""
        found: dict[str, Any] = json.loads(await self._until(b"\n"))
        return found


@pytest.fixture
async def control(tmp_path: Path) -> AsyncGenerator[Control]:
    """The control app on a socket."""
    view = FakeView()
    path = tmp_path / "control.sock"
    with trio.fail_after(60):
        async with serve_unix(control_app(view), path) as scope:
            yield Control(path, view, scope)


async def wait_followers(view: FakeView, number: int) -> None:
    """Wait until the history has so many followers."""
    while len(view.history._followers) != number:  # noqa: ASYNC110 - the history tells nobody
        await trio.sleep(0.005)


async def test_status_is_the_whole_of_the_dataclass_in_its_order(control: Control) -> None:
    """`/v1/status` says everything that the daemon knows, unsorted."""
    control.view.history.add(make_record(0, Outcome.FALLBACK, reason=Reason.LOCK_BUSY))
    status, _, body = await control.ask("/v1/status")
    assert status == 200
    assert body == control.view.status().to_json()
    assert list(body)[:5] == ["version", "instance", "pid", "uptime_s", "state"]
    assert body["handoffs"]["by_reason"] == {"lock_busy": 1}


async def test_status_while_the_kernel_is_slow_with_the_lock_others_are_answered(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is looked at off the event loop: replies were held up for as long as that took."""
    looking, answered = threading.Event(), threading.Event()

    def look() -> lock_probe.LockStatus:
        looking.set()
        assert answered.wait(30)
        return lock_probe.NOT_LOOKED_AT

    monkeypatch.setattr(control.view, "look_at_lock", look)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(control.ask, "/v1/status")
        await trio.to_thread.run_sync(looking.wait)
        assert (await control.ask("/v1/requests"))[0] == 200
        answered.set()


@pytest.mark.parametrize(
    ("accept", "content_type", "end"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8", ""),
        (
            "Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n",
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
            "# EOF",
        ),
    ],
)
async def test_metrics_are_in_the_format_that_is_asked_for(
    control: Control, accept: str, content_type: str, end: str
) -> None:
    """`/metrics` is no JSON; what the history gets is counted there."""
    control.view.history.add(make_record(0, Outcome.FALLBACK, reason=Reason.LOCK_BUSY))
    head = f"GET /metrics HTTP/1.1\r\nHost: x\r\n{accept}\r\n"
    async with await talk(control.path, head.encode()) as stream:
        status, headers, body = await read_reply(stream)
    assert (status, headers["content-type"]) == (200, content_type)
    told = body.decode().splitlines()
    labels = 'outcome="fallback",reason="lock_busy",route="none"'
    assert f"onebitd_handoffs_total{{{labels}}} 1.0" in told
    assert end in ("", told[-1])


async def test_requests_are_those_of_the_view_in_its_order(control: Control) -> None:
    """`/v1/requests` says what is known of each, null for the rest."""
    assert (await control.ask("/v1/requests"))[2] == {"requests": []}
    known = RequestInFlight("a", "POST", "/v1/completions", "decode", 1.5, True, 307, 12)
    control.view.serving = [known, RequestInFlight("b", "GET", "/v1/models", "pass", 0.1)]
    status, _, body = await control.ask("/v1/requests")
    assert status == 200
    assert body["requests"] == [one.to_json() for one in control.view.serving]
    assert list(body["requests"][0].values()) == [
        *("a", "POST", "/v1/completions", "decode", 1.5, True, 307, 12)
    ]
    assert body["requests"][1]["prompt_tokens"] is None


async def test_cancel_ends_what_has_the_id_and_counts_it(control: Control) -> None:
    """Two of the same id are two; the third stays; a second cancel finds none."""
    control.view.serving = [
        RequestInFlight(name, "POST", "/", "decode", 1.0) for name in ("a", "b", "a")
    ]
    asked = ("/v1/requests/cancel", "POST", '{"request_id": "a"}')
    status, _, body = await control.ask(*asked)
    assert (status, body) == (200, {"cancelled": 2})
    assert [one.request_id for one in control.view.serving] == ["b"]
    status, _, body = await control.ask(*asked)
    assert (status, body["error"]["code"], body["error"]["type"]) == (404, 404, "not_found_error")
    assert "'a'" in body["error"]["message"]


@pytest.mark.parametrize(
    "body", ["", "a", '"a"', "[]", "{}", '{"request_id": 1}', '{"request_id": ""}', "[" * 5000]
)
async def test_cancel_without_an_id_is_a_400_that_shows_the_body(
    control: Control, body: str
) -> None:
    """Nothing is ended by a typing error."""
    control.view.serving = [RequestInFlight("a", "POST", "/", "decode", 1.0)]
    status, _, answer = await control.ask("/v1/requests/cancel", "POST", body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert '{"request_id": ID}' in answer["error"]["message"]
    assert control.view.serving
    assert (await control.ask("/v1/requests/cancel"))[0] == 405


async def test_config_is_value_and_source_of_each_key(control: Control) -> None:
    """`/v1/config` relays the view's mapping in the order of the settings."""
    status, _, body = await control.ask("/v1/config")
    assert status == 200
    assert body == control.view.config()
    assert list(body) == list(control.view.config())


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", [f"r{number}" for number in range(5, 25)]),
        ("?limit=2", ["r23", "r24"]),
        ("?limit=0", []),
        ("?limit=1000&outcome=fallback", ["r0", "r10", "r20"]),
        ("?since=2026-05-01T12:00:23Z", ["r23", "r24"]),
        ("?reason=lock_busy", ["r0", "r20"]),
        ("?reason=lock_busy&limit=1", ["r20"]),
        ("?route=shared&limit=2", ["r22", "r24"]),
        ("?limit=1000000&route=file&outcome=fallback", []),
        ("?since=2026-05-01T14:00:23%2B02:00", ["r23", "r24"]),
        ("?since=2026-05-01T14:00:23+02:00", ["r23", "r24"]),
        ("?follow=0&limit=1", ["r24"]),
    ],
)
async def test_handoffs_with_parameters_returns_the_newest_that_match(
    control: Control, query: str, expected: list[str]
) -> None:
    """Twenty by default; each parameter narrows it; the newest is last."""
    for number in range(25):
        outcome = Outcome.USED if number % 10 else Outcome.FALLBACK
        reason = None if number % 20 else Reason.LOCK_BUSY
        route = None if number % 2 else Route.SHARED
        control.view.history.add(make_record(number, outcome, reason=reason, route=route))
    status, _, body = await control.ask(f"/v1/handoffs{query}")
    assert status == 200
    assert [record["request_id"] for record in body["handoffs"]] == expected


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("limit=-1", "limit=-1: must be a number from 0 to 1000000"),
        ("reason=slow", "reason=slow: must be one of no_provider, not_text, "),
        ("route=pipe", "route=pipe: must be one of file, shared"),
        ("limit=1000001", "limit=1000001: must be a number from 0 to 1000000"),
        ("limit=ten", "limit=ten"),
        ("limit=", "limit="),
        ("limit=%D9%A3", "must be a number"),
        ("limit=1&limit=2", "limit is given 2 times"),
        ("outcome=bad", "must be one of used, wasted, fallback, skipped, failed, cancelled"),
        ("since=yesterday", "'yesterday' is no RFC 3339 time such as"),
        ("since=2026-05-01T00:00:00", "no RFC 3339 time"),
        ("follow=yes", "follow=yes: must be 1 or 0"),
        ("follow=1&limit=x", "limit=x"),
        ("folow=1", "unknown parameter 'folow': there are limit, outcome, reason, route, since"),
    ],
)
async def test_handoffs_bad_parameter_is_a_400_that_names_it(
    control: Control, query: str, words: str
) -> None:
    """A value that cannot be meant is refused with a sentence, never replaced by a default."""
    status, _, body = await control.ask(f"/v1/handoffs?{query}")
    assert status == 400
    assert words in body["error"]["message"]
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["code"] == 400


@pytest.fixture
async def long_ago(control: Control, tmp_path: Path) -> AsyncGenerator[Control]:
    """The same with 1150 records, of which memory has the last 1000 and a file all."""
    keeper = HistoryKeeper(control.view.history, tmp_path / "state", HistoryConfig(10_000, 36_500))
    async with trio.open_nursery() as nursery:
        await nursery.start(keeper.run)
        for number in range(1150):
            control.view.history.add(make_record(number, path=f"/{number}", detail="x" * 300))
        while keeper._pending:  # noqa: ASYNC110 - the keeper tells nobody
            await trio.sleep(0.02)
        yield control
        nursery.cancel_scope.cancel()


async def read_whole(path: Path, target: str) -> tuple[bytes, Any]:
    """Return head and document of a reply of any length; HTTP/1.0, so it ends with the stream."""
    stream = await talk(path, f"GET {target} HTTP/1.0\r\n\r\n".encode())
    async with stream:
        data = b""
        while more := await stream.receive_some():
            data += more
    head, _, body = data.partition(b"\r\n\r\n")
    return head, json.loads(body)


@pytest.mark.parametrize(
    ("query", "first"),
    [("limit=1000000", 0), ("limit=1149", 1), ("limit=1000", 150), ("limit=60", 1090)],
)
async def test_handoffs_more_than_memory_has_come_from_the_file(
    long_ago: Control, query: str, first: int
) -> None:
    """File and memory join in one document, in order, whatever its length."""
    head, body = await read_whole(long_ago.path, f"/v1/handoffs?{query}")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"application/json" in head
    assert [one["path"] for one in body["handoffs"]] == [f"/{n}" for n in range(first, 1150)]


async def test_handoffs_follow_with_a_limit_beyond_memory_begins_in_the_file(
    long_ago: Control,
) -> None:
    """The past from the file, then memory, then what comes."""
    follow = await long_ago.follow("&limit=1100")
    async with follow.stream:
        assert [(await follow.line())["path"] for _ in range(1100)] == [
            f"/{n}" for n in range(50, 1150)
        ]
        long_ago.view.history.add(make_record(1, path="/new"))
        assert (await follow.line())["path"] == "/new"


async def test_handoffs_summary_is_of_all_that_is_kept(long_ago: Control) -> None:
    """What `summarise` makes of file and memory, filtered."""
    long_ago.view.history.add(make_record(1, Outcome.FALLBACK, reason=Reason.LOCK_BUSY))
    everything = long_ago.view.history.recent()
    _, _, body = await long_ago.ask("/v1/handoffs/summary")
    assert body["count"] == 1151
    assert set(body) == set(summarise(everything))
    _, _, body = await long_ago.ask("/v1/handoffs/summary?since=2026-05-01T12:19:00Z")
    assert body["count"] == 10
    _, _, body = await long_ago.ask("/v1/handoffs/summary?reason=lock_busy")
    assert (body["count"], body["reasons"]) == (1, {"lock_busy": 1})
    status, _, body = await long_ago.ask("/v1/handoffs/summary?follow=1")
    assert status == 400
    assert "unknown parameter 'follow'" in body["error"]["message"]


async def test_handoffs_client_that_leaves_a_long_answer_is_no_harm(long_ago: Control) -> None:
    """Nothing is read on for somebody who has left; the next one is served."""
    for _ in range(5):
        stream = await talk(long_ago.path, b"GET /v1/handoffs?limit=1150 HTTP/1.0\r\n\r\n")
        await stream.receive_some(100)
        await stream.aclose()
    _, body = await read_whole(long_ago.path, "/v1/handoffs?limit=1150")
    assert len(body["handoffs"]) == 1150


async def test_unknown_path_is_a_json_404_that_lists_what_there_is(control: Control) -> None:
    """A later version's endpoint gets a clear answer from this one."""
    status, _, body = await control.ask("/v1/restart", "POST")
    assert status == 404
    assert body["error"]["type"] == "not_found_error"
    assert "/v1/restart" in body["error"]["message"]
    assert "GET /v1/status" in body["error"]["message"]


@pytest.mark.parametrize(
    "target", ["http://[::1/v1/status", "http://x/v1/status", "*", "/v1/status#x", "/v1/%u0041"]
)
async def test_target_that_is_no_plain_path_is_a_json_400(control: Control, target: str) -> None:
    """The framework does not see it: an address that is none made it answer 500, without a word."""
    stream = await talk(control.path, f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    async with stream:
        status, _, body = await read_reply(stream)
    assert (status, json.loads(body)["error"]["code"]) == (400, 400)


async def test_wrong_method_is_a_json_405_that_says_which(control: Control) -> None:
    """Looking is GET; what changes something is POST."""
    status, headers, body = await control.ask("/v1/status", "POST")
    assert (status, body["error"]["code"]) == (405, 405)
    assert "use GET" in body["error"]["message"]
    assert "GET" in headers["allow"]
    status, headers, body = await control.ask("/v1/reload")
    assert (status, headers["allow"]) == (405, "OPTIONS, POST")
    assert "use POST" in body["error"]["message"]


async def test_body_that_is_too_large_is_the_clients_fault(control: Control) -> None:
    """A 413 with its type; nothing here takes so much."""
    status, _, body = await control.ask("/v1/requests/cancel", "POST", "x" * 70_000)
    assert (status, body["error"]["type"]) == (413, "invalid_request_error")


async def test_reload_good_is_the_answer_in_its_order(control: Control) -> None:
    """What has changed, what has not, and what will not work."""
    control.view.reloaded = ReloadAnswer(["log.level"], ["model.path"], ["provider.program: no"])
    status, _, body = await control.ask("/v1/reload", "POST")
    assert status == 200
    assert body == control.view.reloaded.to_json()
    assert list(body) == ["changed", "needs_restart", "warnings"]


async def test_provider_reset_says_what_it_cleared(control: Control) -> None:
    """It changes something, so it is a POST."""
    control.view.resets.append(ProviderReset(2, "open"))
    status, _, body = await control.ask("/v1/provider/reset", "POST")
    said = {"strikes": 2, "breaker": "open", "failures": 0, "route_off": None}
    assert (status, body) == (200, said)
    status, headers, _ = await control.ask("/v1/provider/reset")
    assert (status, headers["allow"]) == (405, "OPTIONS, POST")


async def test_reload_bad_configuration_is_a_422_with_every_problem(control: Control) -> None:
    """A client need not take a sentence apart to show them one by one."""
    control.view.reloaded = ConfigError(["x.toml: http.port: no", "x.toml: a: unknown key"])
    status, _, body = await control.ask("/v1/reload", "POST")
    error = body["error"]
    assert (status, error["code"], error["type"]) == (422, 422, "invalid_request_error")
    assert error["problems"] == ["x.toml: http.port: no", "x.toml: a: unknown key"]
    assert "nothing has changed: x.toml: http.port: no; x.toml: a:" in error["message"]


async def test_reload_while_stopping_is_a_503(control: Control) -> None:
    """The house's shape of an error, with the surface's own status."""
    control.view.reloaded = RequestError(503, "stopping", kind="unavailable_error")
    status, _, body = await control.ask("/v1/reload", "POST")
    assert status == 503
    wanted = {"message": "stopping", "type": "unavailable_error", "code": 503}
    assert body == {"error": wanted}


async def test_failing_view_is_a_json_500_that_does_not_tell_the_exception(
    control: Control, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug goes to the log, not to the client; the next request is served."""
    control.view.broken = True
    status, _, body = await control.ask("/v1/status")
    assert (status, body["error"]["type"]) == (500, "server_error")
    assert "planted" not in json.dumps(body)
    assert "planted" in caplog.text
    control.view.broken = False
    assert (await control.ask("/v1/status"))[0] == 200


async def test_follow_passes_each_record_as_it_comes(control: Control) -> None:
    """Nothing of the past without `limit`; then one JSON object a line, at once."""
    control.view.history.add(make_record(0))
    follow = await control.follow()
    async with follow.stream:
        await wait_followers(control.view, 1)
        for number in (1, 2):
            control.view.history.add(make_record(number))
            assert (await follow.line())["request_id"] == f"r{number}"


async def test_follow_with_a_limit_starts_with_the_last_records(control: Control) -> None:
    """The past and the present join without a gap or a repetition; the filter holds for both."""
    for number in range(6):
        outcome = Outcome.USED if number % 2 else Outcome.FALLBACK
        control.view.history.add(make_record(number, outcome))
    follow = await control.follow("&limit=2&outcome=used")
    async with follow.stream:
        assert [(await follow.line())["request_id"] for _ in range(2)] == ["r3", "r5"]
        control.view.history.add(make_record(6, Outcome.FALLBACK))
        control.view.history.add(make_record(7))
        assert (await follow.line())["request_id"] == "r7"


async def test_follow_since_without_a_limit_starts_there(control: Control) -> None:
    """A client that comes back says what it has seen."""
    for number in range(4):
        control.view.history.add(make_record(number))
    follow = await control.follow("&since=2026-05-01T12:00:02Z")
    async with follow.stream:
        assert [(await follow.line())["request_id"] for _ in range(2)] == ["r2", "r3"]


async def test_follow_client_that_leaves_is_forgotten(control: Control) -> None:
    """No follower and no task stays behind, idle or not."""
    follow = await control.follow()
    await wait_followers(control.view, 1)
    await follow.stream.aclose()
    await wait_followers(control.view, 0)


async def test_follow_client_that_does_not_read_loses_records_and_is_told(
    control: Control,
) -> None:
    """The daemon neither waits nor keeps everything: `{"lost": N}` stands where N are missing."""
    follow = await control.follow()
    async with follow.stream:
        await wait_followers(control.view, 1)
        for number in range(FOLLOWER_RECORDS + 3):
            control.view.history.add(make_record(number))
        kept = 0
        while "lost" not in (line := await follow.line()):
            assert line["request_id"] == f"r{kept}"
            kept += 1
    assert line == {"lost": FOLLOWER_RECORDS + 3 - kept}
    assert kept >= FOLLOWER_RECORDS


async def test_follow_history_closed_ends_the_reply(control: Control) -> None:
    """At a stop the stream ends after its last record, and the server closes the connection."""
    follow = await control.follow()
    async with follow.stream:
        await wait_followers(control.view, 1)
        control.view.history.add(make_record(1))
        control.view.history.close()
        assert (await follow.line())["request_id"] == "r1"
        with pytest.raises(EOFError):
            await follow.line()


async def test_follow_server_cancelled_ends_the_reply(tmp_path: Path) -> None:
    """A cancel of the server's task is enough; no follower outlives it."""
    view = FakeView()
    with trio.fail_after(30):
        async with serve_unix(control_app(view), tmp_path / "s") as scope:
            follow = await Control(tmp_path / "s", view, scope).follow()
            await wait_followers(view, 1)
        async with follow.stream:
            assert not view.history._followers
            with pytest.raises((EOFError, trio.BrokenResourceError)):
                await follow.line()


async def test_follow_stream_is_not_cut_by_the_response_timeout(tmp_path: Path) -> None:
    """A follower may be idle for longer than Quart gives a reply (60 s; here almost nothing)."""
    view = FakeView()
    app = control_app(view)
    app.config["RESPONSE_TIMEOUT"] = 0.01
    with trio.fail_after(30):
        async with serve_unix(app, tmp_path / "s") as scope:
            control = Control(tmp_path / "s", view, scope)
            follow = await control.follow()
            async with follow.stream:
                await wait_followers(view, 1)
                await trio.sleep(0.1)
                view.history.add(make_record(1))
                assert (await follow.line())["request_id"] == "r1"
