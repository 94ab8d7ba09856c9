"""The one slot on stand-ins: order, overlap, limits, guards, and what waits for a prompt."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pytest

from tests.e2e.standin_route import (
    Background,
    Route,
    chat_prompt,
    leaves_nothing,
    running_route,
    said,
)
from tests.harness import raw_connection, wait_until

MAX_PENDING = 3
CONFIG = f"""
[http]
keepalive_s = 0.1
max_body_mib = 1
max_pending = {MAX_PENDING}
allowed_hosts = ["onebit.example"]
allowed_origins = ["https://page.example"]
"""
SLOWLY = "--token-delay 0.02"
TOKENS = 1000
"""With SLOWLY for longer than any test takes; `behave()` lets go of them."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Route]:
    """One daemon for the tests that do not break it."""
    with running_route(config=CONFIG) as route:
        yield route


@pytest.fixture
def route(daemon: Route) -> Iterator[Route]:
    """The shared daemon, with nothing in it; afterwards nothing may be left."""
    with leaves_nothing(daemon) as fresh:
        yield fresh


class Stream:
    """A streamed reply read as it comes; the client leaves with the `with` block."""

    def __init__(
        self, route: Route, content: str, headers: Mapping[str, str] | None = None, **more: Any
    ) -> None:
        self._connection = route.daemon.connect()
        body = {"messages": [{"role": "user", "content": content}], "stream": True, **more}
        head = {"Content-Type": "application/json", **(headers or {})}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), head)
        self.reply: http.client.HTTPResponse = self._connection.getresponse()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def wait_event(self) -> None:
        """Return once the first event has come; comments may come before it."""
        while not (line := self.reply.readline()).startswith(b"data: "):
            assert line in (b": waiting for the prompt\n", b"\n")

    def rest(self) -> bytes:
        """Return what is left of it."""
        return self.reply.read()

    def close(self) -> None:
        """Leave."""
        self.reply.close()
        self._connection.close()


def texts(route: Route, target: str) -> list[str]:
    """Return the user messages or prompts of the requests of a path, in their order."""
    bodies = [json.loads(one["body"]) for one in route.backend(target)]
    return [body["messages"][0]["content"] for body in bodies]


def wait_pending(route: Route, count: int) -> None:
    """Return once so many requests wait for the slot."""
    wait_until(
        lambda: route.daemon.status()["queue"]["pending"] == count, f"{count} requests in the line"
    )


def test_next_prompt_is_prefilled_while_this_one_is_decoded_and_restored_after_it(
    route: Route,
) -> None:
    """The overlap two devices are for; the slot is only touched when it is free, in order."""
    route.behave(decoder=SLOWLY)
    with Stream(route, "first", max_tokens=TOKENS) as first:
        first.wait_event()
        second = Background(route.daemon.chat, "second")
        wait_pending(route, 1)
        third = Background(route.daemon.chat, "third")
        wait_pending(route, 2)
        wait_until(lambda: len(route.runs()) == 2, "the second prompt is prefilled")
        wait_until(lambda: len(route.backend("/tokenize")) == 3, "the third prompt is known")
        wait_until(lambda: len(route.daemon.children()) == route.quiet["processes"], "its end")
        time.sleep(0.3)  # what must not come could come now: the third run
        assert len(route.daemon.children()) == route.quiet["processes"]
        route.behave()
        assert b"[DONE]" in first.rest()
        replies = [second.join(), third.join()]
        assert [reply.text for reply in replies] == [
            said(chat_prompt(x)) for x in ("second", "third")
        ]
        assert texts(route, "/v1/chat/completions") == ["first", "second", "third"]
        chats = route.backend("/v1/chat/completions")
        restores = route.backend("/slots/0")
        runs = route.runs()
        ends = [route.backend_end(one) for one in chats]
        assert len(restores) == len(runs) == 3
        # The second run falls into the first reply, and only the run of the next in line does.
        assert chats[0]["at"] < runs[1]["start"] < ends[0] <= runs[2]["start"]
        # Restore, reply, restore, reply, restore, reply: never two at once.
        assert ends[0] <= restores[1]["at"] <= chats[1]["at"]
        assert ends[1] <= restores[2]["at"] <= chats[2]["at"]
        assert all(route.record_of(reply)["outcome"] == "used" for reply in replies)
        wait_until(lambda: route.counted() == {"used": 3}, "three handoffs used")


def test_request_without_a_handoff_waits_for_its_turn_too(route: Route) -> None:
    """Every path that uses the slot stands in the one line; what does not use it passes by."""
    route.behave(decoder=SLOWLY)
    with Stream(route, "first", max_tokens=TOKENS) as first:
        first.wait_event()
        raw = Background(
            route.daemon.request, "POST", "/completion", {"prompt": [5, 6, 7], "n_predict": 1}
        )
        wait_pending(route, 1)
        asked = route.daemon.request("POST", "/tokenize", {"content": "ab"})
        template = {"messages": [{"role": "user", "content": "x"}]}
        assert route.daemon.request("POST", "/apply-template", template).status == 200
        assert asked.json == {"tokens": [100, 101]}
        assert route.daemon.request("GET", "/v1/models").json["data"][0]["id"] == "test"
        assert route.daemon.status()["slot"]["phase"] == "decode"
        route.behave()
        assert b"[DONE]" in first.rest()
        assert raw.join().status == 200
        chat, completion = (
            route.backend(path)[0] for path in ("/v1/chat/completions", "/completion")
        )
        assert route.backend_end(chat) <= completion["at"]


def test_request_too_many_is_refused_at_once(route: Route) -> None:
    """503 with Retry-After and `queue_full`; those who wait are served in order."""
    route.behave(decoder=SLOWLY)
    with Stream(route, "first", max_tokens=TOKENS) as first:
        first.wait_event()
        never = {"X-Onebit-Handoff": "never"}
        waiting = []
        for index in range(MAX_PENDING):
            waiting.append(Background(route.daemon.chat, f"waiting {index}", headers=never))
            wait_pending(route, index + 1)
        refused = route.daemon.chat("one more")
        error = refused.json["error"]
        assert (refused.status, error["code"], error["type"]) == (503, 503, "unavailable_error")
        assert "http.max_pending" in error["message"]
        assert int(refused.headers["retry-after"]) > 0
        record = route.record_of(refused)
        assert (record["outcome"], record["reason"]) == ("failed", "queue_full")
        first.close()
        assert [one.join().status for one in waiting] == [200] * MAX_PENDING
        served = texts(route, "/v1/chat/completions")
        assert served == ["first", *(f"waiting {index}" for index in range(MAX_PENDING))]
        expected = {"cancelled": 1, "client_gone": 1, "failed": 1, "queue_full": 1}
        expected |= {"skipped": MAX_PENDING, "policy": MAX_PENDING}
        wait_until(lambda: route.counted() == expected, "all counted")


def test_stream_that_waits_for_its_prompt_gets_comments_then_its_reply(route: Route) -> None:
    """SSE comments keep proxies and clients from giving up; the events follow unchanged."""
    route.behave(provider="sleep:1")
    with Stream(route, "slow", max_tokens=8) as stream:
        assert stream.reply.status == 200
        assert stream.reply.headers["Content-Type"] == "text/event-stream"
        body = stream.rest().decode()
        comments, _, events = body.partition("data: ")
        assert comments.count(": waiting for the prompt\n\n") >= 3
        assert comments.replace(": waiting for the prompt\n\n", "") == ""
        documents = [json.loads(line) for line in re.findall(r"data: (\{.*\})", "data: " + events)]
        content = [one["choices"][0]["delta"].get("content") or "" for one in documents]
        assert "".join(content) == said(chat_prompt("slow"))
        assert body.endswith("data: [DONE]\n\n")
        wait_until(lambda: route.counted() == {"used": 1}, "used")


def test_error_after_comments_is_an_event_of_the_stream(route: Route) -> None:
    """The status is sent already, so the error comes as llama-server's own later ones do."""
    route.behave(provider="sleep:0.6,exit:3")
    with Stream(route, "slow", {"X-Onebit-Handoff": "strict"}) as stream:
        assert stream.reply.status == 200
        comments, _, event = stream.rest().decode().partition("data: ")
        assert ": waiting" in comments
        error = json.loads(event)["error"]
        assert (error["code"], error["type"]) == (502, "handoff_error")
        assert "provider_exit" in error["message"]
        wait_until(lambda: route.counted() == {"failed": 1, "provider_exit": 1}, "failed")


def test_reply_that_is_no_stream_gets_no_comments(route: Route) -> None:
    """A JSON body has no room for them."""
    route.behave(provider="sleep:0.5")
    reply = route.daemon.chat("slow")
    assert reply.json["object"] == "chat.completion"
    assert reply.headers["content-type"].startswith("application/json")


def test_body_over_the_limit_is_a_413_that_names_the_limit(route: Route) -> None:
    """By its Content-Length, or counted as it comes; the reply is there before the body is."""
    body = b'{"prompt":"' + b"a" * (1 << 20) + b'"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    by_length = b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    in_chunks = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    for rest in (by_length, in_chunks):
        with raw_connection(route.daemon.port) as connection:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(head + rest)
            with http.client.HTTPResponse(connection) as reply:
                reply.begin()
                error = json.loads(reply.read())["error"]
        assert (reply.status, error["code"]) == (413, 413)
        assert "1 MiB (http.max_body_mib)" in error["message"]
    assert route.backend() == []


@pytest.mark.parametrize("path", ["/slots", "/metrics"])
def test_page_that_clients_poll_is_asked_of_the_decoder_once_a_second(
    route: Route, path: str
) -> None:
    """All clients share one answer; polling would keep the decoder from noticing who left."""
    replies = [route.daemon.request("GET", path) for _ in range(8)]
    assert len({(reply.status, reply.body) for reply in replies}) == 1
    assert replies[0].status == (200 if path == "/slots" else 501)
    asked = [one["at"] for one in route.backend(path)]
    assert 1 <= len(asked) < len(replies)
    assert all(after - before > 0.9 for before, after in itertools.pairwise(asked))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost"}, 200),
        ({"Host": "onebit.example"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Origin": "https://page.example"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_host_and_origin_of_strangers_are_refused(
    route: Route, headers: dict[str, str], status: int
) -> None:
    """A web page elsewhere can neither post here nor rebind its name to here."""
    reply = route.daemon.completion([5, 6, 7], headers=headers)
    assert reply.status == status
    assert bool(route.backend()) is (status == 200)
    if status == 403:
        assert reply.json["error"]["type"] == "permission_error"
        assert "http.allowed_" in reply.json["error"]["message"]


def test_everything_else_is_passed_through_as_it_came(route: Route) -> None:
    """Web page, unknown paths, the decoder's own errors: status, headers and bytes."""
    page = route.daemon.request("GET", "/")
    assert page.body == b"<!doctype html><title>llama.cpp</title>"
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["server"] == "llama.cpp"
    lost = route.daemon.request("GET", "/no/such%2Fpath?a=b%20c&d")
    assert (lost.status, lost.json["error"]["message"]) == (404, "File Not Found")
    assert route.backend("/no/such%2Fpath")[0]["target"] == "/no/such%2Fpath?a=b%20c&d"
    assert route.daemon.request("GET", "/health").json == {"status": "ok"}
    assert route.daemon.request("GET", "/v1/health").status == 200
    assert route.backend("/health", "/v1/health") == []


def test_api_key_is_asked_of_clients_and_kept_from_the_decoder(tmp_path: Path) -> None:
    """401 without it; both ways to show it; /health needs none."""
    keys = tmp_path / "keys"
    keys.write_text("first-key\nsecond-key\n")
    keys.chmod(0o600)
    with running_route(config=f'[http]\napi_key_file = "{keys}"\n') as route:

        def status(**headers: str) -> int:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return route.daemon.completion([5, 6, 7], headers=named).status

        assert status() == status(Authorization="Bearer nonsense") == 401
        assert status(Authorization="Basic first-key") == 401
        assert route.backend() == []
        assert status(Authorization="Bearer first-key") == 200
        assert status(X_Api_Key="second-key") == 200
        assert route.daemon.request("GET", "/health").status == 200
        assert route.daemon.request("GET", "/v1/models").status == 401
        for one in route.backend("/v1/completions"):
            assert not {"authorization", "x-api-key"} & one["headers"].keys()
        assert "first-key" not in route.daemon.log_path.read_text()
