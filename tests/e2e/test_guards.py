"""Who may ask: pages, names, keys, in the real daemon on the stand-in decoder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.standin_route import Route, running_route, said
from tests.harness import HttpReply, send_raw
from tests.llama_builds import UnixConnection

KEY, SECOND_KEY = "sk-one-of-the-keys", "sk-schl\u00fcssel"
HERE = "http://localhost:3000"
CHAT = "https://chat.lan"
EXTENSION = "chrome-extension://abcdef"
EVERYWHERE = [
    ("GET", "/health"),
    ("HEAD", "/v1/health"),
    ("GET", "/"),
    ("GET", "/v1/models"),
    ("GET", "/slots"),
    ("GET", "/no/such/path"),
    ("OPTIONS", "/v1/chat/completions"),
    ("OPTIONS", "/health"),
    ("DELETE", "/v1/models"),
    ("POST", "/tokenize"),
    ("POST", "/v1/completions"),
]
BAD_HEADS = {
    "rebound": {"Host": "evil.example"},
    "page": {"Origin": "http://evil.example"},
    "null": {"Origin": "null"},
    "image": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
}


@pytest.fixture(scope="module")
def shared() -> Iterator[Route]:
    """One daemon with keys in a file that others may read, that logs all it has to say."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        Path(directory).chmod(0o755)
        keys = Path(directory) / "keys"
        text = f"\ufeff# of the house\r\n\r\n{KEY}\r\n  {SECOND_KEY} \r\n"
        keys.write_bytes(text.encode())
        keys.chmod(0o644)
        config = (
            f'[http]\napi_key_file = "{keys}"\nmax_body_mib = 1\n'
            f'allowed_origins = ["{CHAT}/", "{EXTENSION}"]\nallowed_hosts = ["llm.lan"]\n'
        )
        with running_route(config=config, provider=False, log_level="debug") as route:
            yield route


@pytest.fixture
def route(shared: Route) -> Route:
    """The shared daemon, whose decoder has not been asked anything yet."""
    shared.forget()
    return shared


def ask(
    route: Route, method: str, path: str, body: object = None, key: str | None = KEY, **head: str
) -> HttpReply:
    """Send a request; underscores in the names of headers stand for dashes."""
    headers = {name.replace("_", "-"): value for name, value in head.items()}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    return route.daemon.request(method, path, body, headers)


def raw(route: Route, wire: bytes) -> bytes:
    """Send raw bytes and return all that comes back until the server closes."""
    return send_raw(route.daemon.port, wire)


def cors_of(reply: HttpReply) -> dict[str, str]:
    """Return what a reply says to browsers."""
    return {
        name: value for name, value in reply.headers.items() if name.startswith("access-control-")
    }


@pytest.mark.parametrize("why", BAD_HEADS)
def test_page_of_another_site_is_refused_everywhere(route: Route, why: str) -> None:
    """Whatever method and path, health checks too, with a key or without; the decoder is not asked,
    and no such page may read why.
    """
    for method, path in EVERYWHERE:
        for key in (KEY, None):
            body = b"{}" if method == "POST" else None
            reply = route.daemon.request(
                method,
                path,
                body,
                {**BAD_HEADS[why], **({"X-Api-Key": key} if key else {})},
            )
            assert reply.status == 403, (method, path, reply)
            assert method == "HEAD" or reply.json["error"]["type"] == "permission_error"
            assert cors_of(reply) == {}
    assert route.backend() == []


def test_websocket_is_held_against_the_same_rules_and_never_opened(route: Route) -> None:
    """A page's WebSocket needs no CORS, so its handshake is looked at, and answered as a GET."""
    handshake = (
        "GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade, close\r\n"
        "Upgrade: websocket\r\nOrigin: {origin}\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nX-Api-Key: {KEY}\r\n\r\n"
    )
    for host, origin in (("localhost", "http://evil.example"), ("evil.example", HERE)):
        answer = raw(route, handshake.format(host=host, origin=origin).encode())
        assert answer.startswith(b"HTTP/1.1 403"), answer
    assert route.backend() == []
    answer = raw(route, handshake.format(host="localhost", origin=HERE).encode())
    assert not answer.startswith(b"HTTP/1.1 101")
    assert all("upgrade" not in one["headers"] for one in route.backend())


@pytest.mark.parametrize(
    "wire",
    [
        b"GET /health HTTP/1.0\r\n\r\n",
        b"GET /health HTTP/1.0\r\nHost: \r\n\r\n",
        b"OPTIONS / HTTP/1.0\r\n\r\n",
        b"HEAD /health HTTP/1.1\r\nHost: 10.0.0.7:8000\r\nConnection: close\r\n\r\n",
        b"GET /v1/health HTTP/1.1\r\nHost: llm.lan\r\nConnection: close\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost:\r\nConnection: close\r\n\r\n",
    ],
)
def test_health_check_of_a_proxy_needs_neither_key_nor_name(route: Route, wire: bytes) -> None:
    """What HAProxy and nginx send: HTTP/1.0 without Host, an address, or a configured name."""
    assert raw(route, wire).startswith(b"HTTP/1.1 200")


def test_link_from_another_site_may_be_followed(route: Route) -> None:
    """A navigation is the user's doing, and the page that has the link learns nothing."""
    reply = ask(route, "GET", "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")
    assert reply.status == 200


@pytest.mark.parametrize("origin", [HERE, CHAT, EXTENSION, "http://127.0.0.1:8000"])
def test_allowed_page_reads_every_reply_whoever_wrote_it(route: Route, origin: str) -> None:
    """The decoder's reply, its error, a stream, and ours: health, 401, 403, 404, 413."""
    replies = [
        ask(route, "GET", "/v1/models", Origin=origin),
        ask(route, "GET", "/slots", Origin=origin),
        ask(route, "GET", "/no/such/path", Origin=origin),
        ask(route, "POST", "/v1/completions", {"prompt": "a b"}, Origin=origin),
        ask(route, "POST", "/v1/completions", {"prompt": "a b", "stream": True}, Origin=origin),
        ask(route, "GET", "/health", key=None, Origin=origin),
        ask(route, "GET", "/v1/models", key="wrong", Origin=origin),
        ask(route, "POST", "/slots/0?action=erase", {}, Origin=origin),
        ask(route, "POST", "/v1/completions", b"x" * (1 << 21), Origin=origin),
        ask(route, "TRACE", "/", Origin=origin),
    ]
    assert [one.status for one in replies] == [200, 200, 404, 200, 200, 200, 401, 403, 413, 405]
    for reply in replies:
        assert reply.headers["access-control-allow-origin"] == origin
        assert "access-control-allow-credentials" not in reply.headers
        exposed = reply.headers["access-control-expose-headers"].lower()
        assert "x-request-id" in exposed
        assert "server-timing" in exposed
        assert "origin" in reply.headers["vary"].lower()
    assert replies[3].headers["x-onebit-handoff"]
    assert all("origin" not in one["headers"] for one in route.backend())


def test_allow_origin_is_said_once_and_to_whoever_asks(route: Route) -> None:
    """An answer that is kept for a second has no other page's origin in it."""
    for origin in (HERE, CHAT, HERE):
        head = f"GET /slots HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: {KEY}\r\nOrigin: {origin}\r\n"
        answer = raw(route, f"{head}Connection: close\r\n\r\n".encode()).lower()
        assert answer.count(b"access-control-allow-origin") == 1
        assert f"access-control-allow-origin: {origin}\r\n".encode() in answer


def test_request_without_origin_has_the_decoders_headers(route: Route) -> None:
    """What is no page's gets nothing added for browsers, and nothing taken away."""
    reply = ask(route, "GET", "/v1/models")
    assert cors_of(reply) == {"access-control-allow-origin": ""}
    assert "vary" not in reply.headers


def test_preflight_is_answered_here_and_needs_no_key(route: Route) -> None:
    """A browser asks without its key; the names it asks for are allowed, credentials are not."""
    wanted = {"Access_Control_Request_Method": "POST"}
    names = "authorization,content-type,x-onebit-handoff"
    for path in ("/v1/chat/completions", "/health", "/no/such/path", "/"):
        reply = ask(
            route,
            "OPTIONS",
            path,
            key=None,
            Origin=CHAT,
            Access_Control_Request_Headers=names,
            **wanted,
        )
        assert reply.status == 204
        assert reply.headers["access-control-allow-origin"] == CHAT
        assert reply.headers["access-control-allow-headers"] == names
        assert "POST" in reply.headers["access-control-allow-methods"]
        assert "access-control-allow-credentials" not in reply.headers
        assert reply.body == b""
    assert ask(route, "OPTIONS", "/", key=None, Origin="null", **wanted).status == 403
    assert route.backend() == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([f"Authorization: Bearer {KEY}"], 200),
        ([f"authorization: bearer {KEY}"], 200),
        ([f"X-Api-Key: {KEY}"], 200),
        (["X-Api-Key: wrong", f"Authorization: Bearer {KEY}"], 200),
        ([f"X-Api-Key: {KEY}", "Authorization: Bearer wrong"], 200),
        ([f"X-Api-Key: {SECOND_KEY}"], 200),
        ([], 401),
        (["X-Api-Key: # of the house"], 401),
        (["X-Api-Key: "], 401),
        ([f"X-Api-Key: {KEY[:-1]}"], 401),
        ([f"Authorization: {KEY}"], 401),
        ([f"Authorization: Basic {KEY}"], 401),
    ],
)
def test_key_opens_and_nothing_else_does(route: Route, headers: list[str], status: int) -> None:
    """In either header, in any order; a 401 says how to show one, and the decoder sees none."""
    lines = ["GET /v1/models HTTP/1.1", "Host: localhost", "Connection: close", *headers, "", ""]
    answer = raw(route, "\r\n".join(lines).encode())
    assert answer.startswith(b"HTTP/1.1 %d" % status), answer
    assert (b"\r\nwww-authenticate: bearer\r\n" in answer.lower()) is (status == 401)
    for one in route.backend():
        assert not {"authorization", "x-api-key"} & one["headers"].keys()


def test_key_file_that_every_user_may_read_is_a_warning(route: Route) -> None:
    """Once, at the start, with the way to shut it; the keys work all the same."""
    [record] = route.daemon.log_records("api_keys_exposed")
    assert record["level"] == "warning"
    file = route.daemon.control("/v1/config")["http.api_key_file"]["value"]
    assert record["line"].endswith(f"(mode 0644); chmod o-rwx {file}")


def test_large_body_without_a_key_gets_its_401(route: Route) -> None:
    """Not a connection that breaks while the client still writes."""
    connection = route.daemon.connect(20.0)
    try:
        connection.request("POST", "/v1/completions", b"x" * (8 << 20))
        assert connection.getresponse().status == 401
    finally:
        connection.close()


def test_reload_of_a_key_file_gone_bad_keeps_the_old_keys(route: Route) -> None:
    """A file that is empty, gone, a directory or not text is refused; nobody is let in by it."""
    file = Path(route.daemon.control("/v1/config")["http.api_key_file"]["value"])
    before = file.read_bytes()

    def reload() -> int:
        connection = UnixConnection(route.daemon.runtime / "control.sock", 30.0)
        try:
            connection.request("POST", "/v1/reload")
            return connection.getresponse().status
        finally:
            connection.close()

    try:
        for spoil in (
            lambda: file.write_text("# all gone\n"),
            lambda: file.write_bytes(b"sk-\xff\n"),
            lambda: file.write_bytes(b"sk-\x01\n"),
            file.unlink,
            file.mkdir,
        ):
            spoil()
            assert reload() == 422
            assert ask(route, "GET", "/v1/models").status == 200
            assert ask(route, "GET", "/v1/models", key=None).status == 401
    finally:
        if file.is_dir():
            file.rmdir()
        file.write_bytes(before)
    assert reload() == 200


def test_control_socket_refuses_what_a_page_sends(route: Route) -> None:
    """With any origin, on any path; what is no page's is answered."""
    for origin in (HERE, "null"):
        for path in ("/v1/status", "/nothing"):
            connection = UnixConnection(route.daemon.runtime / "control.sock", 30.0)
            try:
                connection.request("GET", path, headers={"Origin": origin})
                response = connection.getresponse()
                assert response.status == 403
                assert "web pages" in json.loads(response.read())["error"]["message"]
            finally:
                connection.close()


def test_keys_and_prompts_show_nowhere(route: Route) -> None:
    """Neither in the log, at any level, nor in the configuration or the status."""
    word = "zyzzyva"
    reply = ask(route, "POST", "/v1/completions", {"prompt": word, "max_tokens": 4})
    assert reply.text == said(word, 4)
    ask(route, "POST", "/v1/completions", {"prompt": word}, key="sk-almost")
    raw(route, f"GET /v1/models HTTP/1.1\r\nX-Api-Key {KEY}\r\n\r\n".encode())
    shown = route.daemon.log_path.read_text(errors="replace")
    shown += json.dumps(route.daemon.control("/v1/config")) + json.dumps(route.daemon.status())
    shown += json.dumps(route.daemon.handoffs())
    for secret in (KEY, SECOND_KEY, "sk-almost", json.dumps(SECOND_KEY).strip('"'), word):
        assert secret not in shown


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize(("groups", "status"), [([0], 200), ([], 403)])
def test_control_socket_opened_to_all_still_serves_its_group_only(
    route: Route, groups: list[int], status: int
) -> None:
    """Somebody has loosened the modes: another user is refused in JSON, and a member is served."""
    runtime = route.daemon.runtime
    opened = [(runtime / "control.sock", 0o666), (runtime, 0o755)]
    before = [path.stat().st_mode for path, _ in opened]
    for path, mode in opened:
        path.chmod(mode)
    ask_as_nobody = (
        f"import os, socket; os.setgroups({groups}); os.setgid(65534); os.setuid(65534);"
        "s = socket.socket(socket.AF_UNIX); s.connect('control.sock');"
        "s.sendall(b'GET /v1/status HTTP/1.0\\r\\n\\r\\n');"
        "f = s.makefile('rb'); os.write(1, f.read())"
    )
    try:
        answer = subprocess.run(
            [sys.executable, "-I", "-S", "-c", ask_as_nobody],
            cwd=runtime,
            stdout=subprocess.PIPE,
            check=True,
            timeout=60,
        ).stdout
    finally:
        for (path, _), mode in zip(opened, before, strict=True):
            path.chmod(mode)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    if status == 403:
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error["type"] == "permission_error"
        assert "may not use this socket" in error["message"]
