"""nginx and HAProxy, with the shipped configurations, before two instances on stand-ins."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.front_proxies import Front, held_port, running_front
from tests.e2e.standin_route import Background, Route, running_route
from tests.harness import HttpReply, wait_until
from tests.llama_builds import UnixConnection

NAMES = ("nginx", "haproxy")
KEY = "sk-front"
CONFIG = """
[http]
api_key_file = "{keys}"
allowed_hosts = ["llm.example.net"]
max_body_mib = 1
max_pending = 1
keepalive_s = 60
drain_timeout_s = 30
"""
CHAT = "/v1/chat/completions"
HEADERS = {"Authorization": f"Bearer {KEY}", "Host": "llm.example.net"}
HELD = "--hold-on token"
SAID = 2
"""Tokens that a decoder has said when it holds."""


def body(content: str = "Hello there", **more: Any) -> dict[str, Any]:
    """Return the body of a greedy chat."""
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "temperature": 0, "max_tokens": 8, **more}


@contextlib.contextmanager
def instance(home: Path, port: int, **more: Any) -> Iterator[Route]:
    """Run one of the instances."""
    keys = home / "keys"
    if not keys.exists():
        keys.touch(0o600)
        keys.write_text(f"{KEY}\n")
    config = CONFIG.format(keys=keys)
    with running_route("--port", str(port), "--alias", "tiny", config=config, **more) as route:
        yield route


class Pair:
    """Two instances, the second of which can be stopped and started."""

    def __init__(self, home: Path, one: Route, second_port: int) -> None:
        self._home = home
        self.one = one
        self.second_port = second_port
        self._stack = contextlib.ExitStack()
        self.two = self.start()

    def start(self, **more: Any) -> Route:
        """Start the second one."""
        self.two = self._stack.enter_context(instance(self._home, self.second_port, **more))
        return self.two

    def close(self) -> None:
        """Stop the second one, and see that it left nothing."""
        self._stack.close()

    def holder(self, request_id: str) -> Route | None:
        """Return the instance in whose slot a request is."""
        for route in (self.one, self.two):
            if route.daemon.status()["slot"]["request_id"] == request_id:
                return route
        return None

    def other(self, route: Route) -> Route:
        """Return the instance that is not this one."""
        return self.one if route is self.two else self.two


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both instances of the module."""
    home = tmp_path_factory.mktemp("pair")
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(held_port()) for _ in range(2)]
        one = stack.enter_context(instance(home, ports[0]))
        yield stack.enter_context(contextlib.closing(Pair(home, one, ports[1])))


@pytest.fixture(scope="module")
def fronts(pair: Pair) -> Iterator[dict[str, Front]]:
    """Both proxies, each before both instances."""
    ports = {8001: pair.one.daemon.port, 8002: pair.second_port}
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(running_front(name, ports, HEADERS)) for name in NAMES}


@pytest.fixture(params=NAMES)
def front(request: pytest.FixtureRequest, fronts: dict[str, Front], pair: Pair) -> Iterator[Front]:
    """Each proxy in turn; both instances are behind it, with nothing in them."""
    name: str = request.param
    wait_served(fronts[name], pair.one, pair.two)
    for route in (pair.one, pair.two):
        wait_until(partial(is_idle, route), "a free slot")
        route.begin()
    yield fronts[name]
    for route in (pair.one, pair.two):
        route.behave()


def is_idle(route: Route) -> bool:
    """Say whether nobody has the slot."""
    return not route.daemon.status()["slot"]["busy"]


def is_full(route: Route) -> bool:
    """Say whether the one place in the line is taken."""
    return bool(route.daemon.status()["queue"]["pending"])


def has_full_lines(pair: Pair, count: int) -> bool:
    """Say whether so many of the two lines are full."""
    return is_full(pair.one) + is_full(pair.two) == count


def request_ids(route: Route) -> set[str]:
    """Return the ids of the requests that have had an end on the handoff route."""
    return {str(record["request_id"]) for record in route.daemon.handoffs()}


def quick(front: Front) -> HttpReply:
    """Post a chat of one token, which no provider runs for."""
    return front.ask(CHAT, body(max_tokens=1), {"X-Onebit-Handoff": "never"})


def wait_served(front: Front, *routes: Route) -> None:
    """Wait until chats reach each of these instances through the proxy."""
    seen: set[int] = set()

    def served() -> bool:
        reply = quick(front)
        name = reply.headers.get("x-request-id")
        seen.update(index for index, one in enumerate(routes) if name in request_ids(one))
        return len(seen) == len(routes)

    wait_until(served, "all instances are used")


def without_times(data: bytes) -> bytes:
    """Return a reply's bytes without what differs from one request to the next."""
    data = re.sub(rb'("created":|_ms":|_per_second":)[\d.e-]+', rb"\1", data)
    return re.sub(rb"chatcmpl-\w+", b"", data)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_front_reply_is_the_instances_byte_for_byte(front: Front, pair: Pair, stream: bool) -> None:
    """Status, body and our headers arrive as they would without the proxy."""
    asked = body(stream=stream, cache_prompt=True)
    cold = {"prompt": [7, 8, 9], "max_tokens": 1}
    pair.two.daemon.request("POST", "/v1/completions", cold, {**HEADERS})
    direct = pair.one.daemon.request("POST", CHAT, asked, {**HEADERS})
    pair.one.daemon.request("POST", "/v1/completions", cold, {**HEADERS})
    through = front.ask(CHAT, asked, {"X-Request-Id": f"front-{stream}"})
    assert (direct.status, through.status) == (200, 200)
    assert without_times(through.body) == without_times(direct.body)
    assert through.headers["x-request-id"] == f"front-{stream}"
    for name in ("content-type", "x-onebit-handoff"):
        assert through.headers[name] == direct.headers[name]
    assert "restore;dur=" in through.headers["server-timing"]


class Streamed:
    """A streamed chat through the proxy, read event by event."""

    def __init__(self, front: Front, request_id: str, **more: Any) -> None:
        self.id = request_id
        asked = body(request_id, stream=True, **more)
        self.connection, self._response = front.open(CHAT, asked, {"X-Request-Id": request_id})
        assert self._response.status == 200

    def line(self) -> str:
        """Return the next line that is not empty; "" at the end."""
        while raw := self._response.readline():
            if text := raw.decode().rstrip("\n"):
                return text
        return ""

    def rest(self) -> bytes:
        """Return what is left; http.client.IncompleteRead when it was cut."""
        return self._response.read()


@contextlib.contextmanager
def streamed(front: Front, request_id: str, **more: Any) -> Iterator[Streamed]:
    """Yield a stream whose first event is there; at the end its client leaves."""
    stream = Streamed(front, request_id, **more)
    with contextlib.closing(stream.connection):
        assert stream.line().startswith("data: ")
        yield stream


def let_go(*routes: Route) -> None:
    """Have the decoders go on."""
    for route in routes:
        route.behave()


def hold(*routes: Route, decoder: str = HELD, **more: str) -> None:
    """Have the decoders stop in their third token, or do whatever is asked for."""
    for route in routes:
        route.behave(decoder=decoder, **more)


def test_front_passes_each_event_on_as_it_comes(front: Front, pair: Pair) -> None:
    """What the decoder has said is there while it waits with the rest."""
    hold(pair.one, pair.two)
    name = f"{front.name}-prompt"
    with streamed(front, name) as stream:
        for _ in range(SAID):
            assert stream.line().startswith("data: ")
        route = pair.holder(name)
        assert route is not None
        let_go(route)
        rest = stream.rest()
    assert rest.count(b"data: ") == 8 - SAID + 2
    assert rest.endswith(b"data: [DONE]\n\n")
    assert route.record_of(name)["outcome"] == "used"


def test_front_passes_comments_on_before_the_first_event(
    front: Front, pair: Pair, tmp_path: Path
) -> None:
    """A stream that waits for its provider is kept alive through the proxy, too."""
    for route in (pair.one, pair.two):
        route.behave(provider=f"linger:{tmp_path / 'go'}")
        reconfigure(route, "keepalive_s = 60", "keepalive_s = 0.2")
    stream = Streamed(front, "kept")
    with contextlib.closing(stream.connection):
        assert stream.line() == ": waiting for the prompt"
        (tmp_path / "go").touch()
        rest = stream.rest()
    assert rest.endswith(b"data: [DONE]\n\n")
    for route in (pair.one, pair.two):
        reconfigure(route, "keepalive_s = 0.2", "keepalive_s = 60")


def reconfigure(route: Route, old: str, new: str) -> None:
    """Change a line of an instance's configuration and have it read again."""
    path = route.daemon.log_path.with_name("test.toml")
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    route.daemon.control("/v1/reload", "POST")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_front_client_that_leaves_frees_the_slot(front: Front, pair: Pair, stream: bool) -> None:
    """The proxy hangs up on the instance when its client does, before and in a reply."""
    hold(pair.one, pair.two)
    name = f"{front.name}-left-{stream}"
    if stream:
        with streamed(front, name):
            route = pair.holder(name)
    else:
        waiting = http.client.HTTPConnection("127.0.0.1", front.port, timeout=60)
        with contextlib.closing(waiting):
            data = json.dumps(body(name)).encode()
            waiting.request("POST", CHAT, data, {**HEADERS, "X-Request-Id": name})
            route = wait_until(lambda: pair.holder(name), "a slot")
            wait_until(lambda: len(route.backend(CHAT)) > 0, "the decoder has it")
    assert route is not None
    assert route.record_of(name)["outcome"] == "cancelled"
    wait_until(partial(is_idle, route), "the slot is free")
    assert len(pair.one.backend(CHAT)) + len(pair.two.backend(CHAT)) == 1


def test_front_second_request_goes_to_the_free_instance(front: Front, pair: Pair) -> None:
    """Two slots are two replies at a time."""
    hold(pair.one, pair.two)
    with streamed(front, "first"), streamed(front, "second"):
        first, second = pair.holder("first"), pair.holder("second")
        assert first is not None
        assert second is pair.other(first)


def test_front_body_above_our_limit_gets_our_413(front: Front) -> None:
    """The error names the setting: it is onebitd's, not the proxy's own page."""
    reply = front.ask(CHAT, body("a" * (1 << 20)))
    assert reply.status == 413
    assert "http.max_body_mib" in reply.json["error"]["message"]


def test_front_passes_a_body_of_nearly_the_limit(front: Front, pair: Pair) -> None:
    """A long request reaches the decoder whole."""
    asked = body(max_tokens=1, metadata={"pad": "b" * 900_000})
    assert front.ask(CHAT, asked).status == 200
    (got,) = pair.one.backend(CHAT) or pair.two.backend(CHAT)
    assert json.loads(got["body"])["metadata"] == asked["metadata"]


def test_front_passes_the_key_and_the_host_on(front: Front) -> None:
    """Keys and names are judged by the instance, as without a proxy."""
    assert front.ask("/v1/models").status == 200
    without = front.ask("/v1/models", headers={"Authorization": ""})
    assert (without.status, without.json["error"]["type"]) == (401, "authentication_error")
    strange = front.ask("/v1/models", headers={"Host": "rebound.example.com"})
    assert (strange.status, strange.json["error"]["type"]) == (403, "permission_error")
    foreign = front.ask("/v1/models", headers={"Origin": "https://elsewhere.example.com"})
    assert foreign.status == 403
    assert front.ask("/v1/models", headers={"Host": f"127.0.0.1:{front.port}"}).status == 200
    assert front.ask("/health", headers={"Authorization": ""}).json == {"status": "ok"}


def settled(front: Front) -> list[HttpReply]:
    """Return what eight chats in a row get, once the proxy knows who can take them.

    nginx moves a request on at once. HAProxy asks the instances once a second: until then a client
    is told to come again.
    """
    replies: list[HttpReply] = []

    def asked() -> bool:
        reply = quick(front)
        replies.append(reply)
        if reply.status != 200:
            assert front.name == "haproxy"
            assert (reply.status, "retry-after" in reply.headers) == (503, True)
            replies.clear()
        return len(replies) == 8

    wait_until(asked, "eight replies in a row")
    return replies


def assert_served_by(replies: list[HttpReply], route: Route) -> None:
    """See that every reply is one instance's."""
    assert {reply.headers["x-request-id"] for reply in replies} <= request_ids(route)


@contextlib.contextmanager
def direct_stream(route: Route) -> Iterator[http.client.HTTPResponse]:
    """Yield a stream that the proxies know nothing of, once its head is there."""
    with contextlib.closing(route.daemon.connect()) as connection:
        data = json.dumps(body(stream=True)).encode()
        connection.request("POST", CHAT, data, HEADERS)
        with connection.getresponse() as response:
            yield response


def test_fronts_send_nothing_new_to_an_instance_that_stops_or_loads(
    fronts: dict[str, Front], pair: Pair
) -> None:
    """It finishes what it has, nobody is sent to it until it is ready, and then it is used."""
    two = pair.two
    hold(two)
    with direct_stream(two) as running:
        two.daemon.process.send_signal(signal.SIGTERM)
        wait_until(lambda: two.daemon.status()["state"] == "draining", "it drains")
        for front in fronts.values():
            assert_served_by(settled(front), pair.one)
        let_go(two)
        assert running.read().endswith(b"data: [DONE]\n\n")
    assert two.daemon.process.wait(30) == 0
    for front in fronts.values():
        assert_served_by(settled(front), pair.one)
    pair.close()
    again = pair.start(decoder=("--load-delay", "1"), wait_ready=False)
    wait_until(lambda: is_loading(again), "it loads")
    replies = []
    while is_loading(again):
        replies += [quick(front) for front in fronts.values()]
    assert {reply.status for reply in replies} == {200}
    again.daemon.wait_ready()
    for front in fronts.values():
        wait_served(front, pair.one, again)


def is_loading(route: Route) -> bool:
    """Say whether an instance listens and cannot serve yet."""
    with contextlib.suppress(OSError):
        return bool(route.daemon.status()["state"] == "loading")
    return False


def test_front_instance_that_is_killed_ends_its_requests_and_no_other(
    front: Front, pair: Pair
) -> None:
    """A reply is cut so that it is seen, and what was sent to it once is not sent again."""
    hold(pair.one, pair.two)
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(streamed(front, f"{front.name}-s{n}")) for n in range(2)]
        streams.sort(key=lambda stream: pair.holder(stream.id) is pair.two)
        waiting = []
        for n in range(2):  # one by one: of two at once both may go to the same instance
            headers = {"X-Request-Id": f"{front.name}-w{n}"}
            waiting.append(Background(front.ask, CHAT, body(f"w{n}"), headers))
            wait_until(partial(has_full_lines, pair, n + 1), "a full line")
        pair.two.daemon.kill()
        with pytest.raises(http.client.IncompleteRead):
            streams[1].rest()
        let_go(pair.one)
        assert streams[0].rest().endswith(b"data: [DONE]\n\n")
        replies = [one.join() for one in waiting]
    assert sorted(reply.status for reply in replies) == [200, 502]
    (good,) = [reply for reply in replies if reply.status == 200]
    assert good.headers["x-request-id"] in request_ids(pair.one)
    assert len(pair.one.backend(CHAT)) == 2
    pair.close()
    assert_served_by(settled(front), pair.one)
    pair.start()
    wait_served(front, pair.one, pair.two)


NGINX_FAIL_TIMEOUT_S = 2.1
"""`fail_timeout` of the sample, and a little."""


def test_front_full_instance_sends_clients_to_the_other_or_to_later(
    front: Front, pair: Pair
) -> None:
    """nginx tries the other instance; where both are full, the instance's own words arrive."""
    hold(pair.one, pair.two)
    with contextlib.ExitStack() as stack:
        fill(stack, pair.two)
        let_go(pair.one)
        replies = [quick(front) for _ in range(4)]
        refused = [reply for reply in replies if reply.status != 200]
        assert len(refused) < 4
        assert not (refused and front.name == "nginx")
        hold(pair.one)
        fill(stack, pair.one)
        # nginx leaves out for so long who has refused, and with nobody left has words of its own.
        time.sleep(NGINX_FAIL_TIMEOUT_S)
        refused.append(quick(front))
        for reply in refused:
            assert (reply.status, reply.headers["retry-after"]) == (503, "2")
            assert "http.max_pending" in reply.json["error"]["message"]
    let_go(pair.one, pair.two)


def fill(stack: contextlib.ExitStack, route: Route) -> None:
    """Take all places of an instance, with streams that the proxy knows nothing of."""
    stack.enter_context(direct_stream(route))
    waiting = stack.enter_context(contextlib.closing(route.daemon.connect()))
    waiting.request("POST", CHAT, json.dumps(body()).encode(), HEADERS)
    wait_until(partial(is_full, route), "a full line")


def test_front_request_that_an_operator_cancelled_is_not_tried_again(
    front: Front, pair: Pair
) -> None:
    """Neither proxy begins at the other instance what was ended on purpose."""
    hold(pair.one, pair.two)
    name = f"{front.name}-unwanted"
    asked = Background(front.ask, CHAT, body(name), {"X-Request-Id": name})
    route = wait_until(lambda: pair.holder(name), "a slot")
    wait_until(lambda: route.backend(CHAT), "the decoder has it")
    document = json.dumps({"request_id": name}).encode()
    connection = UnixConnection(route.daemon.runtime / "control.sock", 10.0)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/requests/cancel", document, {"Host": "localhost"})
        assert json.loads(connection.getresponse().read()) == {"cancelled": 1}
    reply = asked.join()
    assert (reply.status, "retry-after" in reply.headers) == (503, False)
    assert "cancelled" in reply.json["error"]["message"]
    assert not pair.other(route).backend(CHAT)
