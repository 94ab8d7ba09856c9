"""Clients that mean harm or know no better: each was a way to break an earlier onebitd."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest

from tests.e2e.standin_route import Route, running_route, said
from tests.harness import send_raw, wait_until

PROMPT = "a prompt of some length"


@pytest.fixture(scope="module")
def shared() -> Iterator[Route]:
    """One daemon on the stand-ins."""
    with running_route() as route:
        yield route


@pytest.fixture
def route(shared: Route) -> Iterator[Route]:
    """The shared daemon, whose next handoff must be good again at the end."""
    shared.begin()
    yield shared
    shared.behave()
    reply = shared.daemon.completion(PROMPT)
    assert reply.text == said(PROMPT)
    assert reply.headers["x-onebit-handoff"] == "file"


def exchange(route: Route, wire: bytes) -> bytes:
    """Send raw bytes and return all that comes back until the server closes."""
    return send_raw(route.daemon.port, wire)


@pytest.mark.parametrize(
    "target",
    [
        "/%u0073lots/0?action=erase",
        "/slots/0?action=erase",
        "/%73lots/0?action=save",
        "/lora-adapters#x",
        "/props#x",
        "/slots/0%00?action=erase",
        "/a%zz",
        "/v1/stream/c?from=0",
        "/v1/streams/lookup",
    ],
)
def test_target_that_reaches_behind_onebitd_never_reaches_the_decoder(
    route: Route, target: str
) -> None:
    """Whatever the spelling, it is refused here: 400 or 403."""
    wire = f"POST {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    answer = exchange(route, wire.encode() + b"Content-Length: 2\r\n\r\n{}")
    assert answer.split(b" ")[1] in (b"400", b"403")
    assert route.backend() == []


def test_http2_client_is_told_no_and_holds_nothing(route: Route) -> None:
    """HTTP/2 with prior knowledge, and with an upgrade, is answered in HTTP/1.1."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    assert exchange(route, preface).startswith(b"HTTP/1.1 400")
    upgrade = (
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings, close\r\n"
        b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAAAAAAIAAAAA\r\n\r\n"
    )
    assert exchange(route, upgrade).startswith(b"HTTP/1.1 200")


def test_conversation_id_does_not_reach_the_decoder(route: Route) -> None:
    """With it, llama-server goes on generating for a client that has left."""
    reply = route.daemon.completion(PROMPT, headers={"X-Conversation-Id": "c"}, stream=True)
    assert reply.text == said(PROMPT)
    for request in route.backend("/v1/completions"):
        assert "x-conversation-id" not in {name.lower() for name in request["headers"]}


@pytest.mark.parametrize("number", ["1e999", "NaN", "-Infinity"])
def test_number_that_is_none_goes_on_as_it_came_and_blames_nobody(
    route: Route, number: str
) -> None:
    """Python reads what the decoder's parser refuses; no provider runs for it."""
    body = f'{{"prompt": "{PROMPT}", "max_tokens": 4, "x": {number}}}'.encode()
    reply = route.daemon.request("POST", "/v1/completions", body)
    record = route.record_of(reply)
    assert (record["outcome"], record["reason"]) == ("skipped", "not_text")
    assert route.runs() == []
    assert route.backend("/v1/completions")[0]["body"] == body.decode()


def test_http_1_0_without_a_host_is_served(route: Route) -> None:
    """An old client need not name a host; the decoder's library wants one."""
    answer = exchange(route, b"GET /v1/models HTTP/1.0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")


def test_slots_polled_by_many_spellings_reach_the_decoder_once_a_second(route: Route) -> None:
    """A query or HEAD is no way around the rule that lets the decoder notice who left."""
    started = time.monotonic()
    for target in ("/slots", "/slots?_=1", "/slots?_=2"):
        assert route.daemon.request("GET", target).status == 200
    assert route.daemon.request("HEAD", "/slots").status == 200
    seconds = time.monotonic() - started
    assert len(route.backend("/slots")) <= seconds + 1


def test_unfinished_json_shows_no_prompt_above_debug(route: Route) -> None:
    """What the decoder cannot parse it quotes; that must not reach log, record or client's line."""
    word = "SECRETWORD"
    body = b'{"prompt": "' + word.encode()
    reply = route.daemon.request("POST", "/v1/completions", body)
    route.record_of(reply)
    assert word not in route.daemon.log_path.read_text()


def test_pipelined_megabyte_then_gone_frees_the_slot_at_once(route: Route) -> None:
    """Unread bytes behind a running request do not hide that its client has left."""
    route.behave(decoder="--token-delay 0.2")
    body = json.dumps({"prompt": PROMPT, "max_tokens": 200}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", route.daemon.port)) as connection:
        connection.sendall(head % len(body) + body)
        wait_until(lambda: route.backend("/v1/completions"), "the request has begun")
        connection.setblocking(False)
        big = head % (1 << 20) + b" " * (1 << 20)
        sent = 0
        deadline = time.monotonic() + 1.0
        while sent < len(big) and time.monotonic() < deadline:
            try:
                sent += connection.send(big[sent:])
            except BlockingIOError:
                time.sleep(0.01)
    wait_until(lambda: not route.daemon.status()["slot"]["busy"], "the slot is free", 5.0)


def test_state_dir_removed_meanwhile_is_made_again(route: Route) -> None:
    """The next handoff has its directory, and nobody sees an error."""
    for entry in route.slots_dir.iterdir():
        entry.unlink()
    route.slots_dir.rmdir()
    reply = route.daemon.completion(PROMPT)
    assert reply.text == said(PROMPT)
    assert route.record_of(reply)["outcome"] in ("used", "fallback")


def test_refused_after_the_restore_is_no_waste(route: Route) -> None:
    """A 400 of the decoder's is the client's fault; the handoff's record says so."""
    reply = route.daemon.completion(PROMPT, stream="true")
    record = route.record_of(reply)
    if reply.status >= 400:
        assert (record["outcome"], record["reason"]) == ("failed", "backend_refused")


def test_preflight_needs_no_key_and_secrets_are_hidden(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A browser asks without its key; and `config` shows no token of backend.args."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("sk-test\n")
    with running_route(config=f'[http]\napi_key_file = "{keys}"\n') as route:
        headers = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
        assert route.daemon.request("OPTIONS", "/v1/models", headers=headers).status != 401
        assert route.daemon.request("GET", "/v1/models").status == 401
        shown = json.dumps(route.daemon.control("/v1/config"))
        assert "sk-test" not in shown
