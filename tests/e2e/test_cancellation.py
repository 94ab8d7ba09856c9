"""A request that ends before its reply does, wherever it is: its client leaves, or it is cancelled.

Within a second the decoder works for nobody, the provider's group is dead and the slot is the next
one's, which is waiting and gets its own handoff and the right reply. Nothing is left, and the one
line says who ended it, and where.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import http.client
import itertools
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import pytest

from tests.e2e.standin_route import (
    Background,
    Route,
    chat_prompt,
    leaves_nothing,
    quick_provider,
    running_route,
    said,
)
from tests.harness import HttpReply, is_alive, wait_until
from tests.llama_builds import UnixConnection
from tests.standins import tiny_decoder

CONFIG = """
[http]
keepalive_s = 0
[provider]
timeout_s = 20
"""
COMMENTS = CONFIG.replace("keepalive_s = 0", "keepalive_s = 0.05")
SLOWLY = "--token-delay 0.05"
TOKENS = 300
"""With SLOWLY for longer than any test takes; `behave()` lets go of them."""
PROMPT_S = 5.0
"""A busy machine's second; what is not ended goes on for longer."""
CHAT = "/v1/chat/completions"
ASK, ADOPT, RESTORE = (f"/slots/0?action={action}" for action in ("share", "adopt", "restore"))
CANCELLED = {
    "message": "the request was cancelled by the operator",
    "type": "cancelled_error",
    "code": 503,
}


@pytest.fixture(scope="module")
def by_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Route]:
    """A daemon that hands over by state files."""
    program = quick_provider(tmp_path_factory.mktemp("provider"))
    with running_route(config=CONFIG, provider=program, lock="wait_s = 20") as route:
        yield route


@pytest.fixture(scope="module")
def by_share(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Route]:
    """One whose decoder shares its memory, and whose streams get comments while they wait."""
    program = quick_provider(tmp_path_factory.mktemp("provider"))
    with running_route(
        config=COMMENTS, provider=program, env={"ONEBIT_KV_SHARE": "1"}, front_regions=2
    ) as route:
        yield route


@pytest.fixture
def route(by_file: Route) -> Iterator[Route]:
    """The first daemon; afterwards nothing may be left."""
    with leaves_nothing(by_file) as fresh:
        yield fresh


class Client:
    """A client with a request of its own, which it may leave at any moment."""

    def __init__(
        self,
        route: Route,
        request_id: str,
        *,
        path: str = CHAT,
        whole: bool = True,
        buffer_bytes: int | None = None,
        more: Mapping[str, Any] | None = None,
        **body: Any,
    ) -> None:
        self.socket = socket.socket()
        if buffer_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self.socket.settimeout(30)
        self.socket.connect(("127.0.0.1", route.daemon.port))
        body |= more or {}
        if path == CHAT:
            body = {"messages": [{"role": "user", "content": request_id}], "seed": 1, **body}
        data = json.dumps(body).encode()
        head = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(data)}"]
        head += ["Content-Type: application/json", f"X-Request-Id: {request_id}"]
        lines = "\r\n".join([*head, "Connection: close", "", ""]).encode()
        self.socket.sendall(lines + (data if whole else data[: len(data) // 2]))
        self._reply: http.client.HTTPResponse | None = None

    def head(self) -> http.client.HTTPResponse:
        """Return the reply once its head has come."""
        if self._reply is None:
            self._reply = http.client.HTTPResponse(self.socket)
            self._reply.begin()
        return self._reply

    def wait_event(self) -> None:
        """Return once an event of the stream has come."""
        while not self.head().readline().startswith(b"data: "):
            pass

    def rest(self) -> HttpReply:
        """Return the reply, less what was read of it already; its body may be cut short."""
        reply = self.head()
        headers = {name.lower(): value for name, value in reply.getheaders()}
        try:
            return HttpReply(reply.status, headers, reply.read())
        except http.client.IncompleteRead as short:
            return HttpReply(reply.status, headers | {"cut": "short"}, short.partial)

    def leave(self) -> None:
        """Close the connection."""
        if self._reply is not None:
            self._reply.close()
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()


def in_flight(route: Route) -> dict[str, dict[str, Any]]:
    """Return what `requests` shows, by id."""
    return {one["request_id"]: one for one in route.daemon.control("/v1/requests")["requests"]}


def phase_of(route: Route, request_id: str) -> str | None:
    """Return the phase of a request, None when it is not in flight."""
    return in_flight(route).get(request_id, {}).get("phase")


def cancel(route: Route, request_id: str) -> tuple[int, Any]:
    """Ask for a cancel; return status and JSON of the answer."""
    connection = UnixConnection(route.daemon.runtime / "control.sock", 10.0)
    try:
        connection.request("POST", "/v1/requests/cancel", json.dumps({"request_id": request_id}))
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


def ended(route: Route, target: str, words: str) -> bool:
    """Say whether the decoder is done with the last request of a path that holds these words."""
    found = [one for one in route.backend(target) if words in one["body"]]
    ends = {(one["pid"], one["n"]) for one in route._new("record.end")}
    return (found[-1]["pid"], found[-1]["n"]) in ends


@contextlib.contextmanager
def lock_taken(route: Route) -> Iterator[None]:
    """Somebody else has the device lock."""
    with route.lock_path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def slot_taken(route: Route) -> Iterator[None]:
    """Somebody else has the slot, until the knob that keeps the decoder at it is gone."""
    with Client(route, "holder", stream=True, max_tokens=TOKENS) as holder:
        holder.wait_event()
        yield
        route.behave()
        assert b"[DONE]" in holder.rest().body


@dataclasses.dataclass(frozen=True)
class Moment:
    """Where a request is when it ends, and how it is kept there.

    Attributes:
        phase: as `requests` shows it, and as the line names it.
        decoder, provider, front: knobs with which the request begins.
        once: they are read once, so they are taken back before the request ends.
        around: what surrounds it.
        reached: True once it is there, besides its phase; takes the route and the id.
        path, body: of the request.
        asked: the path under which the decoder works for it meanwhile, "" when it does not.
        shared: on the shared route.
        held: it cannot end before what it does there has ended.
        heads: of a streamed reply, the head has been sent; of its events, too, with `events`.
    """

    name: str
    phase: str
    decoder: str = ""
    provider: str = ""
    front: str = ""
    once: bool = False
    around: Callable[[Route], AbstractContextManager[None]] = lambda route: nullcontext()
    reached: Callable[[Route, str], Any] = lambda route, request_id: True
    path: str = CHAT
    body: dict[str, Any] = dataclasses.field(default_factory=dict)
    asked: str = ""
    shared: bool = False
    held: bool = False
    heads: bool = False
    events: bool = False


def is_asked(target: str) -> Callable[[Route, str], bool]:
    """Return a condition: the decoder has got this request."""
    return lambda route, _: any(one["target"] == target for one in route.backend())


def runs(route: Route, request_id: str) -> list[dict[str, Any]]:
    """Return the provider's runs."""
    return route.runs()


MOMENTS = [
    Moment("body", "body"),
    Moment(
        "queued",
        "queued",
        decoder=SLOWLY,
        around=slot_taken,
        reached=lambda route, _: (
            len(route.runs()) == 2
            and [name.partition("-")[0] for name in route.daemon.slot_files()] == ["state"]
        ),
    ),
    Moment("template", "template", decoder="--hold-on apply-template", asked="/apply-template"),
    Moment("tokenize", "tokenize", decoder="--hold-on tokenize", asked="/tokenize"),
    Moment("lock", "lock", around=lock_taken),
    Moment("provider", "prefill", provider="hang", once=True, reached=runs),
    Moment("provider-deaf", "prefill", provider="ignore_term", once=True, reached=runs),
    Moment(
        "restore",
        "restore",
        decoder="--hold-on restore",
        reached=is_asked(RESTORE),
        held=True,
    ),
    Moment("share", "share", front="--share-mode never:1", reached=is_asked(ASK), shared=True),
    Moment(
        "shared-provider", "prefill", provider="half,hang", once=True, reached=runs, shared=True
    ),
    Moment(
        "adopt",
        "adopt",
        front="--adopt-delay 0.25:1",
        reached=is_asked(ADOPT),
        shared=True,
        held=True,
    ),
    Moment("head", "decode", decoder="--hold-on completion", reached=is_asked(CHAT), asked=CHAT),
    Moment(
        "first-byte",
        "decode",
        decoder="--prefill-delay-per-token 5",
        reached=is_asked(CHAT),
        asked=CHAT,
        heads=True,
    ),
    Moment(
        "generating",
        "decode",
        decoder=SLOWLY,
        reached=is_asked(CHAT),
        body={"max_tokens": TOKENS},
        asked=CHAT,
        heads=True,
        events=True,
    ),
    Moment(
        "passed-on",
        "pass",
        decoder="--hold-on tokenize",
        reached=is_asked("/tokenize"),
        path="/tokenize",
        body={"content": "victim"},
        asked="/tokenize",
    ),
    Moment(
        "passed-on-with-slot",
        "decode",
        decoder=SLOWLY,
        reached=is_asked("/completion"),
        path="/completion",
        body={"prompt": "victim", "n_predict": TOKENS},
        asked="/completion",
        heads=True,
        events=True,
    ),
]
NUMBERS = itertools.count()
ENDS = ("leaves", "cancelled")
SHAPES = ("whole", "streamed")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.name)
def test_request_ends_early_nothing_of_it_is_left_and_the_next_is_served(
    moment: Moment, end: str, shape: str, request: pytest.FixtureRequest
) -> None:
    """In every phase; the client that is told is told so in a form that it understands."""
    streamed, name = shape == "streamed", f"victim-{next(NUMBERS)}"
    daemon = request.getfixturevalue("by_share" if moment.shared else "by_file")
    with leaves_nothing(daemon) as route, contextlib.ExitStack() as stack:
        route.behave(decoder=moment.decoder, provider=moment.provider, front=moment.front)
        stack.enter_context(moment.around(route))
        victim = Client(
            route,
            name,
            path=moment.path,
            whole=moment.name != "body",
            stream=streamed,
            more={key: name if value == "victim" else value for key, value in moment.body.items()},
        )
        stack.enter_context(victim)
        wait_until(
            lambda: phase_of(route, name) == moment.phase and moment.reached(route, name),
            f"phase {moment.phase}",
        )
        if moment.once:
            route.behave()
        begun = streamed and (moment.heads or moment.shared)
        if begun:
            assert victim.head().status == 200
        if streamed and moment.events:
            victim.wait_event()
        follower = Background(route.daemon.chat, "follower")
        wait_until(lambda: len(in_flight(route)) >= 2, "the next one")
        before = {run["pid"] for run in route.runs()} if moment.phase == "prefill" else set()

        if end == "leaves":
            victim.leave()
        else:
            assert cancel(route, name) == (200, {"cancelled": 1})
        if moment.held:
            assert phase_of(route, name) in ("ending", moment.phase)
            others = [one for one in route.backend() if "action=" in one["target"]]
            assert others[-1]["target"] in (RESTORE, ADOPT)
            route.behave()
        wait_until(lambda: phase_of(route, name) is None, "the end of it", PROMPT_S)
        if moment.asked:
            wait_until(lambda: ended(route, moment.asked, name), "the decoder is done", PROMPT_S)
        assert not any(map(is_alive, before))
        if end == "cancelled":
            assert_told(victim.rest(), begun)
        stack.close()
        route.behave()

        reply = follower.join()
        assert (reply.status, reply.text) == (200, said(chat_prompt("follower")))
        record = route.record_of(reply)
        assert (record["outcome"], record["evaluated_tokens"]) == ("used", 1), record
        if moment.path == CHAT and moment.name != "body":
            assert_recorded(route.record_of(name), end, moment.phase)
        if moment.phase != "decode":
            assert not any(name in one["body"] for one in route.backend(CHAT))
        if moment.phase == "lock":
            assert len(route.runs()) == 1
        if moment.held:
            assert_order(route)


def assert_told(reply: HttpReply, begun: bool) -> None:
    """The client of a cancelled request has got the error, and nothing that looks complete."""
    if begun:
        assert reply.headers["content-type"] == "text/event-stream"
        assert reply.events[-1] == {"error": CANCELLED}
        assert reply.body.endswith(b"}\n\n")
        assert b"[DONE]" not in reply.body
        assert "cut" not in reply.headers
    else:
        assert (reply.status, reply.json) == (503, {"error": CANCELLED})
        assert reply.headers["x-request-id"].startswith("victim")


def assert_recorded(record: dict[str, Any], end: str, phase: str) -> None:
    """The one record says who ended it, and where."""
    reason = "client_gone" if end == "leaves" else "operator"
    assert (record["outcome"], record["reason"]) == ("cancelled", reason), record
    who = "the client left" if end == "leaves" else "the operator cancelled it"
    assert record["detail"] == f"{who} in phase {phase}"


def assert_order(route: Route) -> None:
    """Two restores or adoptions, the second after the end of the first."""
    first, second = (one for one in route.backend() if one["target"] in (RESTORE, ADOPT))
    assert route.backend_end(first) <= second["at"]


# --- what `requests` and `cancel` say -------------------------------------------------------------


def test_requests_show_how_far_a_reply_is_and_the_line_behind_it(route: Route) -> None:
    """The oldest first; what does not apply, or is not known yet, is null."""
    assert in_flight(route) == {}
    route.behave(decoder=SLOWLY)
    with (
        Client(route, "reads", stream=True, max_tokens=TOKENS) as reads,
        Client(route, "waits", max_tokens=1) as waits,
    ):
        reads.wait_event()
        wait_until(lambda: phase_of(route, "waits") == "queued", "the second one in the line")
        with Client(route, "asks", path="/tokenize", whole=False, content="x" * 100):
            wait_until(lambda: phase_of(route, "asks") == "body", "the third one")
            first, second, third = in_flight(route).values()
        assert first["age_s"] >= second["age_s"] >= third["age_s"] >= 0
        assert {name: first[name] for name in first if name not in ("age_s", "reply_tokens")} == {
            "request_id": "reads",
            "method": "POST",
            "path": CHAT,
            "phase": "decode",
            "stream": True,
            "prompt_tokens": len(tiny_decoder.tokenize(chat_prompt("reads"))),
        }
        assert (second["stream"], second["reply_tokens"]) == (False, None)
        assert [third[name] for name in ("stream", "prompt_tokens", "reply_tokens")] == [None] * 3
        wait_until(lambda: in_flight(route)["reads"]["reply_tokens"] > 3, "tokens")
        route.behave()
        assert b"[DONE]" in reads.rest().body
        assert waits.rest().status == 200
    wait_until(lambda: in_flight(route) == {}, "nothing is in flight")


def test_cancel_of_what_is_not_in_flight_is_a_404(route: Route) -> None:
    """A request that has just ended, too; and a body that names none is refused."""
    reply = route.daemon.chat("ended")
    name = reply.headers["x-request-id"]
    status, answer = cancel(route, name)
    assert (status, answer["error"]["code"]) == (404, 404)
    assert f"'{name}'" in answer["error"]["message"]
    assert route.record_of(reply)["outcome"] == "used"
    assert cancel(route, "")[0] == 400


def test_cancel_ends_every_request_of_an_id(route: Route) -> None:
    """Clients choose their ids; two with the same one are both ended, and counted."""
    route.behave(decoder=SLOWLY)
    with (
        Client(route, "same", stream=True, max_tokens=TOKENS) as first,
        Client(route, "same", max_tokens=TOKENS) as second,
        Client(route, "other", max_tokens=2) as other,
    ):
        first.wait_event()
        wait_until(lambda: route.daemon.status()["queue"]["pending"] == 2, "two in the line")
        assert cancel(route, "same") == (200, {"cancelled": 2})
        assert first.rest().events[-1] == {"error": CANCELLED}
        assert second.rest().json == {"error": CANCELLED}
        assert other.rest().text == said(chat_prompt("other"), 2)


def test_cancel_twice_in_a_restore_is_one_cancel(route: Route) -> None:
    """The slot is the next one's only when the restore is over; nothing is decoded from it."""
    route.behave(decoder="--hold-on restore")
    with Client(route, "twice") as client:
        wait_until(lambda: is_asked(RESTORE)(route, ""), "the restore")
        assert cancel(route, "twice") == (200, {"cancelled": 1})
        assert phase_of(route, "twice") == "ending"
        assert route.daemon.status()["slot"]["phase"] == "restore"
        client.leave()
        assert cancel(route, "twice") == (200, {"cancelled": 1})
        route.behave()
        wait_until(lambda: phase_of(route, "twice") is None, "its end")
    assert_recorded(route.record_of("twice"), "cancelled", "restore")
    assert route.backend(CHAT) == []


# --- clients that do not cooperate ----------------------------------------------------------------


def test_client_pipelines_and_leaves_it_is_noticed(route: Route) -> None:
    """A second request in the pipe does not hide that the client has left."""
    route.behave(decoder=SLOWLY)
    with Client(route, "pipelined", stream=True, max_tokens=TOKENS) as client:
        client.wait_event()
        client.socket.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
    wait_until(lambda: ended(route, CHAT, "pipelined"), "the decoder is done", PROMPT_S)
    assert_recorded(route.record_of("pipelined"), "leaves", "decode")


def test_cancel_of_a_reply_that_its_client_does_not_take_frees_the_slot(route: Route) -> None:
    """What waits to be written to it holds up nobody but itself."""
    route.behave(decoder="--token-delay 0")
    wide = {"model": "m" * 100_000, "max_tokens": 500}  # each event repeats it
    with Client(route, "stalled", buffer_bytes=4096, stream=True, more=wide) as stalled:
        stalled.wait_event()
        counts: list[int] = []

        def stands_still() -> bool:
            counts.append(in_flight(route)["stalled"]["reply_tokens"])
            return counts[-1] > 1 and counts[-3:] == [counts[-1]] * 3

        wait_until(stands_still, "its connection is full")
        follower = Background(route.daemon.chat, "follower", model="m")
        wait_until(lambda: len(in_flight(route)) == 2, "the next one")
        assert cancel(route, "stalled") == (200, {"cancelled": 1})
        wait_until(lambda: ended(route, CHAT, "stalled"), "the decoder is done", PROMPT_S)
        assert follower.join().text == said(chat_prompt("follower"))
        assert phase_of(route, "stalled") == "ending"
    assert_recorded(route.record_of("stalled"), "cancelled", "decode")


def test_cancel_of_a_body_that_has_begun_cuts_it(route: Route) -> None:
    """JSON has no room for an error in its middle: it ends short of its length."""
    ids = [1_000_000_000] * 400_000
    with Client(route, "cut", path="/tokenize", buffer_bytes=4096, content=ids) as client:
        assert client.head().status == 200
        assert cancel(route, "cut") == (200, {"cancelled": 1})
        wait_until(lambda: ended(route, "/tokenize", "1000000000"), "the decoder is done", PROMPT_S)
        reply = client.rest()
    assert reply.headers["cut"] == "short"
    assert b"error" not in reply.body


# --- all at once ----------------------------------------------------------------------------------

HOWS = ("stays", "leaves", "cancelled", "cancelled", "both")


def end_somehow(route: Route, name: str, chance: random.Random, odd: list[str]) -> None:
    """Send a request and end it at some moment; what should not be goes into `odd`."""
    how, streamed = chance.choice(HOWS), chance.random() < 0.5
    with Client(route, name, stream=streamed, max_tokens=4, n=1) as client:
        time.sleep(chance.choice((0.0, 0.01, 0.05, 0.1)) * chance.random())
        other = threading.Thread(target=client.leave)
        if how in ("leaves", "both"):
            other.start()
        if how in ("cancelled", "both"):
            cancel(route, name)
        if how in ("leaves", "both"):
            other.join()
            return
        reply = client.rest()
        if how == "cancelled" and reply.status == 503:
            good = reply.json == {"error": CANCELLED}
        elif how == "cancelled" and b'"error"' in reply.body:
            good = reply.events[-1] == {"error": CANCELLED} and b"[DONE]" not in reply.body
        else:
            good = (reply.status, reply.text) == (200, said(chat_prompt(name), 4))
        if not good or "cut" in reply.headers:
            odd.append(f"{how} {streamed}: {reply}")


def test_requests_that_end_at_any_moment_leave_nothing_and_harm_nobody(route: Route) -> None:
    """Right replies, well-formed errors, one record each, and no fault in the log."""
    route.behave(decoder="--token-delay 0.003")
    odd: list[str] = []
    before = len(route.daemon.handoffs())

    def some(worker: int) -> None:
        chance = random.Random(worker)  # noqa: S311 - seeded, so that it can be had again
        for number in range(12):
            try:
                end_somehow(route, f"storm-{worker}-{number}", chance, odd)
            except Exception as error:  # noqa: BLE001 - told below
                odd.append(repr(error))

    workers = [threading.Thread(target=some, args=(worker,)) for worker in range(3)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    assert odd == []
    wait_until(lambda: in_flight(route) == {}, "nothing is in flight")
    records = route.daemon.handoffs()[before:]
    assert {record["outcome"] for record in records} <= {"used", "cancelled"}, records
    assert len({record["request_id"] for record in records}) == len(records)
    faults = [line for line in route.daemon.log_records() if line["level"] == "error"]
    assert faults == []


def test_cancel_during_a_drain_ends_it() -> None:
    """A daemon that waits for one last reply is done when that is cancelled."""
    with running_route(config=CONFIG, provider=False) as route:
        route.behave(decoder=SLOWLY)
        with Client(route, "last", stream=True, max_tokens=TOKENS) as client:
            client.wait_event()
            route.daemon.process.terminate()
            wait_until(lambda: route.daemon.status()["state"] == "draining", "the drain")
            assert cancel(route, "last") == (200, {"cancelled": 1})
            assert client.rest().events[-1] == {"error": CANCELLED}
            assert route.daemon.process.wait(20) == 0
        (record,) = route.daemon.log_records("handoff")
        assert_recorded(record, "cancelled", "decode")
