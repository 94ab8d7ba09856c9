"""The page's own rules: what it answers, and what a viewer gets who reads slowly or not at all."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import socket
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from onebitd.adapters.http_server import HttpServer
from onebitd.adapters.lock_probe import LockStatus
from onebitd.core.costs import Costs
from onebitd.core.handoff import HandoffRecord, Outcome
from onebitd.services.in_flight import InFlight
from onebitd.surfaces import page as page_module
from onebitd.surfaces.page import MAX_VIEWERS, Page, Sources
from tests.core.test_page_view import STATUS

COSTS = {"costs": Costs().to_json(), "ctx_size": 512, "provider": None}


@pytest.fixture(name="clock")
def fixture_clock(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> trio.testing.MockClock:
    """Return a clock that jumps; it would also jump over what a thread works out."""

    async def run_here(work: Any, *args: Any) -> Any:
        return work(*args)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_here)
    return autojump_clock


class Rig:
    """A page on made-up sources, and requests to it without a network."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.in_flight = InFlight()
        self.asked = 0
        nothing = LockStatus("/l", False, False, None, None)
        self.shown, self.costs = STATUS, COSTS
        self._began = int(time.time())
        sources = Sources(self.status, lambda: nothing, lambda: self.costs, self.in_flight)
        self.page = Page(sources, enabled=enabled)

    def status(self, lock: LockStatus) -> Any:
        """Return what the daemon would say, and count that it was asked."""
        self.asked += 1
        return dataclasses.replace(self.shown, uptime_s=time.time() - self._began)

    def finish(self, name: str = "r") -> HandoffRecord:
        """Have a handoff end."""
        record = HandoffRecord(
            name, "2026-01-31T12:00:00.000Z", "i", "m", "/v1/completions", False, Outcome.USED
        )
        self.page.note(record)
        return record

    async def ask(
        self, method: str = "GET", path: str = "/onebit/", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of a reply that ends by itself."""
        viewer = Viewer(self, method, path, **headers)
        with trio.fail_after(30):
            await viewer.run()
        return viewer.status, viewer.headers, viewer.body


class Viewer:
    """One request; `gate` keeps its client from taking more, `leave` ends it."""

    def __init__(
        self, rig: Rig, method: str = "GET", path: str = "/onebit/events", **headers: str
    ) -> None:
        self._rig = rig
        self.status, self.headers, self.body = 0, cast("dict[str, str]", {}), b""
        self.sends = 0
        self.gate = trio.Event()
        self.gate.set()
        self.leave = trio.Event()
        self.ended = trio.Event()
        self.scope: Any = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [
                (name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()
            ],
        }

    async def run(self) -> None:
        """Serve it to its end."""
        await self._rig.page.serve(self.scope, cast("Any", self._receive), self._send)
        self.ended.set()

    async def _receive(self) -> Any:
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.gate.wait()
        self.sends += 1
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {n.decode(): v.decode() for n, v in message["headers"]}
        else:
            self.body += message["body"]

    def events(self, kind: str) -> list[Any]:
        """Return the data of the events of a kind so far."""
        found = re.findall(rf"event: {kind}\ndata: (.*)\n\n", self.body.decode())
        return [json.loads(one) for one in found]

    @property
    def last_id(self) -> str:
        """The id of the last handoff so far."""
        return str(re.findall(r"id: (.*)\n", self.body.decode())[-1])


async def test_page_is_one_file_whose_policy_lets_its_own_script_and_style_alone_run() -> None:
    """Nothing of another host, nothing that was put in: the hashes are those of the file."""
    status, headers, body = await Rig().ask()
    assert status == 200
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    policy = dict(one.partition(" ")[::2] for one in headers["content-security-policy"].split("; "))
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", body.decode(), re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for name in ("base-uri", "form-action", "frame-ancestors", "trusted-types"):
        assert policy[name] == "'none'"
    html = body.decode()
    assert "innerHTML" not in html
    assert not re.search(r"\bstyle=|\bon[a-z]+=", html), "an inline style or handler never works"
    hosts = set(re.findall(r"https?://([^/'\"\s]+)", html))
    assert hosts == {"www.w3.org"}, "the namespace of SVG, which nobody asks"


@pytest.mark.parametrize(
    ("method", "path", "status", "more"),
    [
        ("HEAD", "/onebit/", 200, {}),
        ("GET", "/onebit", 308, {"location": "onebit/"}),
        ("POST", "/onebit/", 405, {"allow": "GET, HEAD"}),
        ("HEAD", "/onebit/events", 405, {"allow": "GET"}),
        ("GET", "/onebit/other", 404, {}),
    ],
)
async def test_page_answers_what_it_has_and_nothing_else(
    method: str, path: str, status: int, more: dict[str, str]
) -> None:
    """Whatever it has not is an error of ours."""
    found, headers, body = await Rig().ask(method, path)
    assert found == status
    assert {name: headers.get(name) for name in more} == more
    if status >= 400:
        assert json.loads(body)["error"]["code"] == status


@pytest.mark.parametrize("path", ["/onebit", "/onebit/", "/onebit/events"])
async def test_page_that_is_off_is_a_404_that_names_the_setting(path: str) -> None:
    """All of it."""
    status, _, body = await Rig(enabled=False).ask(path=path)
    assert status == 404
    assert "http.page" in json.loads(body)["error"]["message"]


async def test_viewer_gets_everything_once_and_then_only_what_is_new(
    clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    """A page that stays open costs a few bytes."""
    rig = Rig()
    rig.finish("a")
    viewer = Viewer(rig)
    nursery.start_soon(viewer.run)
    await trio.sleep(5.5)
    assert viewer.headers["content-type"] == "text/event-stream"
    assert viewer.body.startswith(b"retry: ")
    kinds = ("status", "handoff", "requests", "costs")
    assert [len(viewer.events(kind)) for kind in kinds] == [1, 1, 1, 1]
    rig.finish("b")
    await trio.sleep(0.5)
    assert [one["n"] for one in viewer.events("handoff")] == [1, 2]
    sent = len(viewer.body)
    await trio.sleep(40)
    assert viewer.body[sent:].count(b": still here\n\n") == 2
    viewer.leave.set()
    await viewer.ended.wait()
    assert rig.in_flight.entries() == []


async def test_viewer_who_comes_back_gets_no_handoff_twice(
    clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    """By the id of the last one; an id of an earlier daemon's life counts for nothing."""
    rig = Rig()
    rig.finish("a")
    first = Viewer(rig)
    nursery.start_soon(first.run)
    await trio.sleep(0.1)
    rig.page.reconfigure(enabled=True)
    await first.ended.wait()
    rig.finish("b")
    back = Viewer(rig, last_event_id=first.last_id)
    stranger = Viewer(rig, last_event_id="00000000-1")
    nursery.start_soon(back.run)
    nursery.start_soon(stranger.run)
    await trio.sleep(0.1)
    assert [one["n"] for one in back.events("handoff")] == [2]
    assert [one["n"] for one in stranger.events("handoff")] == [1, 2]
    [requests] = stranger.events("requests")
    assert stranger.last_id == f"{requests['boot']}-2", "its requests are of the same life"
    nursery.cancel_scope.cancel()


async def test_costs_are_told_anew_once_there_is_another_provider_or_context(
    clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    """Without a handoff: the first viewer may have come while the model was loading."""
    rig = Rig()
    viewer = Viewer(rig)
    nursery.start_soon(viewer.run)
    for changed, now in (
        ({}, {}),
        ({"model": dataclasses.replace(STATUS.model, ctx_size=512)}, {"ctx_size": 9000}),
        ({"provider": dataclasses.replace(STATUS.provider, program="/new")}, {"provider": "/new"}),
    ):
        before = len(viewer.events("costs"))
        rig.shown = dataclasses.replace(STATUS, **changed)
        rig.costs = COSTS | now
        await trio.sleep(7)
        assert len(viewer.events("costs")) == before + 1
    await trio.sleep(30)
    assert len(viewer.events("costs")) == 3
    nursery.cancel_scope.cancel()


async def test_viewer_who_reads_nothing_costs_no_memory(
    clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    """The next write waits for the last; what is too old by then is not sent any more."""
    rig = Rig()
    viewer = Viewer(rig)
    nursery.start_soon(viewer.run)
    await trio.sleep(0.5)
    viewer.gate = trio.Event()
    for number in range(page_module.RECENT * 3):
        rig.finish(str(number))
        await trio.sleep(0.3)
    sends = viewer.sends
    viewer.gate.set()
    await trio.sleep(0.01)
    assert viewer.sends <= sends + 2
    await trio.sleep(0.5)
    numbers = [one["n"] for one in viewer.events("handoff")]
    assert len(numbers) <= page_module.RECENT + 2
    assert numbers[-1] == page_module.RECENT * 3
    nursery.cancel_scope.cancel()


async def test_viewers_beyond_the_limit_get_a_503_until_one_leaves(
    clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    """And all of them together ask the daemon once a second."""
    rig = Rig()
    viewers = [Viewer(rig) for _ in range(MAX_VIEWERS)]
    for viewer in viewers:
        nursery.start_soon(viewer.run)
    await trio.sleep(10)
    assert rig.asked <= 12
    status, headers, _ = await rig.ask(path="/onebit/events")
    assert (status, headers["retry-after"]) == (503, "10")
    viewers[0].leave.set()
    await viewers[0].ended.wait()
    late = Viewer(rig)
    nursery.start_soon(late.run)
    await trio.sleep(0.1)
    assert late.status == 200
    nursery.cancel_scope.cancel()


async def test_page_without_viewers_asks_nobody_anything(
    clock: trio.testing.MockClock,
) -> None:
    """No task, no timer, no question."""
    rig = Rig()
    rig.finish()
    await trio.sleep(60)
    assert rig.asked == 0


async def test_viewer_is_ended_by_a_stop_like_any_request(
    clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    """It is in flight, and its reply ends whole."""
    rig = Rig()
    viewer = Viewer(rig)
    nursery.start_soon(viewer.run)
    await trio.sleep(0.1)
    (entry,) = rig.in_flight.entries()
    assert (entry.path, entry.phase) == ("/onebit/events", "page")
    assert viewer.events("requests")[0]["requests"] == [], "nobody wants to see the page itself"
    rig.in_flight.cancel_all("draining")
    with trio.fail_after(1):
        await viewer.ended.wait()


async def test_request_in_flight_keeps_its_number_as_a_handoff(
    clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    """The number stands for the id that a client may have chosen."""
    rig = Rig()
    viewer = Viewer(rig)
    nursery.start_soon(viewer.run)
    await trio.sleep(0.1)
    record = HandoffRecord("mine", "2026-01-31T12:00:00.000Z", "i", "m", "/v1/completions", False)
    exchange = SimpleNamespace(record=record, phase="prefill", reply_tokens=None)
    with rig.in_flight.open("POST", "/v1/models", "x"):
        with rig.in_flight.open("POST", "/v1/completions", "mine") as entry:
            entry.exchange = cast("Any", exchange)
            await trio.sleep(2.5)
            record.outcome = Outcome.USED
            rig.page.note(record)
        await trio.sleep(1)
        shown = {one["path"]: one["n"] for one in viewer.events("requests")[1]["requests"]}
        assert shown == {"/v1/models": 1, "/v1/completions": 2}
        assert [one["n"] for one in viewer.events("handoff")] == [2]
        assert "mine" not in viewer.body.decode()
    nursery.cancel_scope.cancel()


async def test_viewer_who_takes_nothing_is_dropped_by_the_listener(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the listener's time for one write; its place is free then."""
    monkeypatch.setattr(page_module, "_PAUSE_S", 0.01)
    rig = Rig()
    listener = socket.create_server(("127.0.0.1", 0))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await rig.page.serve(scope, receive, send)

    async with trio.open_nursery() as nursery:
        server = HttpServer(cast("Any", app), [listener], write_timeout_s=0.3)
        await nursery.start(server.run)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(listener.getsockname())
            sock.sendall(b"GET /onebit/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            with trio.fail_after(30):
                while not rig.in_flight.entries():  # noqa: ASYNC110 - a kernel's buffer tells nobody
                    await trio.sleep(0.01)
                while rig.in_flight.entries():
                    for _ in range(page_module.RECENT):
                        rig.finish()
                    await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
