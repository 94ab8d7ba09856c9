"""Guards of the public listener."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebitd.core import guards
from onebitd.core.errors import RequestError

LLAMA_SERVER = {
    # What llama-server routes, by method: p(asses), s(lot: waits in the line), r(efused).
    "/": "GET p",
    "/index.html": "GET p",
    "/health": "GET p, POST s",
    "/v1/health": "GET p",
    "/metrics": "GET p, HEAD p",
    "/props": "GET p, HEAD p, POST r",
    "/models": "GET p, POST r, DELETE r",
    "/models/load": "POST r",
    "/models/unload": "POST r",
    "/models/sse": "GET p",
    "/v1/models": "GET p, HEAD p, POST r, DELETE r",
    "/v1/models/load": "POST r",
    "/completion": "POST s",
    "/completions": "POST s",
    "/v1/completions": "POST s",
    "/chat/completions": "POST s",
    "/v1/chat/completions": "POST s, OPTIONS p",
    "/v1/chat/completions/control": "POST p",
    "/v1/responses": "POST s",
    "/responses": "POST s",
    "/v1/messages": "POST s",
    "/v1/audio/transcriptions": "POST s",
    "/infill": "POST s",
    "/embedding": "POST s",
    "/embeddings": "POST s",
    "/v1/embeddings": "POST s",
    "/rerank": "POST s",
    "/reranking": "POST s",
    "/v1/rerank": "POST s",
    "/v1/reranking": "POST s",
    "/tokenize": "POST p",
    "/detokenize": "POST p",
    "/apply-template": "POST p",
    "/chat/completions/input_tokens": "POST p",
    "/v1/chat/completions/input_tokens": "POST p",
    "/responses/input_tokens": "POST p",
    "/v1/responses/input_tokens": "POST p",
    "/v1/messages/count_tokens": "POST p",
    "/lora-adapters": "GET p, POST r",
    "/slots": "GET p, HEAD p, POST s",
    "/slots/0": "GET p, POST r",
    "/v1/stream/c": "GET r, DELETE r",
    "/v1/streams": "GET r, POST r",
    "/v1/streams/lookup": "POST r",
    "/cors-proxy": "GET p, POST p",
    "/tools": "GET p, POST p",
    "/api/chat": "POST s",
    "/api/tags": "GET p",
    "/something/new": "GET p, POST s",
}


def _verdict(method: str, path: str) -> str:
    if guards.forbidden(method, path):
        return "r"
    return "s" if guards.needs_slot(method, path) else "p"


@pytest.mark.parametrize("path", LLAMA_SERVER)
def test_verdict_each_endpoint_of_llama_server_is_passed_queued_or_refused(path: str) -> None:
    """Slots, settings, adapters and models are shut; what may use the slot waits for it."""
    wanted = dict(word.split() for word in LLAMA_SERVER[path].split(", "))
    assert {method: _verdict(method, path) for method in wanted} == wanted


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/slots/"),
        ("POST", "/slots/0/"),
        ("POST", "/slots/0\n"),
        ("POST", "/slots/\n0"),
        ("POST", "/slots/0\r\n"),
        ("POST", "/slots/0;x=1"),
        ("POST", "/slots/0\u2028"),
        ("POST", "/slots/-1"),
        ("POST", "/slots/0/../0"),
        ("POST", "/props/"),
        ("POST", "/props/\n"),
        ("POST", "/lora-adapters/"),
        ("POST", "/models/load\n"),
        ("DELETE", "/models/x"),
        ("DELETE", "/v1/models"),
        ("GET", "/v1/stream/c\n"),
        ("GET", "/v1/streams"),
        ("HEAD", "/v1/stream/c"),
    ],
)
def test_forbidden_no_spelling_of_a_path_gets_by(method: str, path: str) -> None:
    """The decoder's patterns take a slash, a parameter or a line feed more; so do ours."""
    assert guards.forbidden(method, path)


@pytest.mark.parametrize("method", ["TRACE", "CONNECT", "FOO", "PRI", "post", ""])
def test_check_request_unknown_method_is_405(method: str) -> None:
    """What is no request to an API is not passed on."""
    with pytest.raises(RequestError) as caught:
        guards.check_request(method, b"/v1/models", "/v1/models")
    assert caught.value.status == 405


@pytest.mark.parametrize("method", guards.METHODS)
def test_check_request_known_method_passes(method: str) -> None:
    """All that llama-server's library routes."""
    guards.check_request(method, b"/v1/nothing?x=1", "/v1/nothing")


ALLOWED = guards.Welcome.of(
    "Box", ["box.lan", "Chat.LAN:8443", "b\u00fccher.lan", "no such host/"], []
)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1:8000", True),
        ("127.0.0.1", True),
        ("localhost:8000", True),
        ("localhost:", True),
        ("LOCALHOST", True),
        ("localhost.", True),
        ("app.localhost", True),
        ("[::1]:8000", True),
        ("[::1]", True),
        ("[2001:DB8::7]:8000", True),
        ("192.168.1.5", True),
        ("0.0.0.0:8000", True),
        ("box", True),
        ("BOX:8000", True),
        ("box.lan:8000", True),
        ("box.lan.", True),
        ("Box.Lan", True),
        ("chat.lan:8443", True),
        ("xn--bcher-kva.lan:80", True),
        ("", True),
        ("chat.lan", False),
        ("chat.lan:8000", False),
        ("evil.example", False),
        ("evil.example:8000", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False),
        ("notlocalhost", False),
        ("box.lan.evil.example", False),
        ("evilbox.lan", False),
        ("[::1].evil.example", False),
        ("[::1]evil", False),
        ("[::1", False),
        ("::1", False),
        ("localhost@evil.example", False),
        ("evil.example@localhost", False),
        ("localhost:80:80", False),
        ("localhost:x", False),
        ("localhost:123456", False),
        ("localhost/", False),
        ("localhost evil.example", False),
        ("localhost,evil.example", False),
        ("localhost#", False),
        ("b\xfccher.lan", False),
        ("localho\xdft", False),
        (".", False),
        ("127.0.0.1\t", False),
        ("a" * 300, False),
        ("a" * 60_000, False),
    ],
)
def test_host_allowed_a_rebound_name_is_refused(host: str, allowed: bool) -> None:
    """A page's own name in Host means that its DNS points here."""
    assert guards.host_allowed(host, ALLOWED) is allowed


PAGES = guards.Welcome.of(
    "127.0.0.1",
    [],
    [
        "https://chat.lan",
        "http://desk.lan:3000",
        "https://Paste.lan:443/",
        "https://b\u00fccher.lan",
        "chrome-extension://abcdef",
        "app://obsidian.md",
        "null",
        "*",
        "https://*.lan",
        "plain.lan",
    ],
)


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://127.0.0.1", True),
        ("http://127.8.9.1:1", True),
        ("https://localhost", True),
        ("http://localhost:3000", True),
        ("http://LocalHost:3000", True),
        ("HTTP://localhost:3000", True),
        ("http://app.localhost:3000", True),
        ("http://[::1]:3000", True),
        ("http://[0:0:0:0:0:0:0:1]", True),
        ("https://chat.lan", True),
        ("https://CHAT.lan", True),
        ("https://chat.lan:443", True),
        ("http://desk.lan:3000", True),
        ("https://paste.lan", True),
        ("https://xn--bcher-kva.lan", True),
        ("chrome-extension://abcdef", True),
        ("app://obsidian.md", True),
        ("null", False),
        ("NULL", False),
        ("", False),
        ("*", False),
        ("https://*.lan", False),
        ("https://a.lan", False),
        ("plain.lan", False),
        ("http://plain.lan", False),
        ("http://chat.lan", False),
        ("https://chat.lan:8443", False),
        ("https://chat.lan.evil.example", False),
        ("https://evilchat.lan", False),
        ("http://desk.lan", False),
        ("http://desk.lan:300", False),
        ("http://evil.example", False),
        ("http://localhost.evil.example", False),
        ("http://127.0.0.1.evil.example", False),
        ("http://evil.localhost.example", False),
        ("http://notlocalhost", False),
        ("http://localhost.", False),
        ("http://127.1", False),
        ("http://2130706433", False),
        ("http://0.0.0.0", False),
        ("http://192.168.1.5", False),
        ("http://[2001:db8::7]", False),
        ("http://[::1].evil.example", False),
        ("http://[::1", False),
        ("http://[", False),
        ("http://evil.example@localhost", False),
        ("http://localhost@evil.example", False),
        ("http://localhost:80@evil.example", False),
        ("http://localhost:3000:80", False),
        ("http://localhost:3000/", False),
        ("http://localhost/x", False),
        ("http://localhost?", False),
        ("http://localhost#", False),
        ("http://localhost:", False),
        ("http://localhost:x", False),
        ("http://localhost http://evil.example", False),
        ("http://localhost, http://evil.example", False),
        ("http:localhost", False),
        ("//localhost", False),
        ("localhost", False),
        ("file://", False),
        ("file:///localhost", False),
        ("ftp://localhost", False),
        ("chrome-extension://localhost", False),
        ("data:text/html,x", False),
        ("https://b\xfccher.lan", False),
        ("http://localhost\n", False),
        ("http://" + "a" * 300, False),
        ("http://localhost" + ":" * 60_000, False),
    ],
)
def test_origin_allowed_foreign_pages_are_refused(origin: str, allowed: bool) -> None:
    """A web page elsewhere must not drive a server on loopback."""
    assert guards.origin_allowed(origin, PAGES) is allowed


@pytest.mark.parametrize(
    ("head", "passes"),
    [
        ({}, True),
        ({b"sec-fetch-site": b"cross-site", b"sec-fetch-mode": b"no-cors"}, False),
        ({b"sec-fetch-site": b"Cross-Site", b"sec-fetch-mode": b"cors"}, False),
        ({b"sec-fetch-site": b"cross-site"}, False),
        ({b"sec-fetch-site": b"cross-site", b"sec-fetch-mode": b"navigate"}, True),
        ({b"sec-fetch-site": b"same-site", b"sec-fetch-mode": b"no-cors"}, True),
        ({b"sec-fetch-site": b"same-origin", b"sec-fetch-mode": b"cors"}, True),
        ({b"sec-fetch-site": b"none", b"sec-fetch-mode": b"navigate"}, True),
        (
            {
                b"origin": b"http://localhost:3000",
                b"sec-fetch-site": b"cross-site",
                b"sec-fetch-mode": b"cors",
            },
            True,
        ),
        ({b"origin": b"null", b"sec-fetch-site": b"none"}, False),
        (
            {
                b"origin": b"http://evil.example",
                b"sec-fetch-site": b"cross-site",
                b"sec-fetch-mode": b"navigate",
            },
            False,
        ),
        ({b"host": b"evil.example", b"origin": b"http://localhost"}, False),
    ],
)
def test_check_page_another_sites_page_may_link_here_and_nothing_else(
    head: dict[bytes, bytes], passes: bool
) -> None:
    """Images and scripts of other sites carry no Origin; Sec-Fetch-Site says whose they are."""
    if passes:
        guards.check_page(head, PAGES)
        return
    with pytest.raises(RequestError) as caught:
        guards.check_page(head, PAGES)
    assert (caught.value.status, caught.value.kind) == (403, "permission_error")


@pytest.mark.parametrize(
    ("headers", "version", "words"),
    [
        ([("host", "a"), ("x", "1"), ("x", "2")], "1.1", ""),
        ([("host", "a"), ("transfer-encoding", "chunked")], "1.1", ""),
        ([("content-length", "3")], "1.0", ""),
        ([("transfer-encoding", "chunked"), ("content-length", "3")], "1.1", "not both"),
        ([("transfer-encoding", "chunked")], "1.0", "no Transfer-Encoding"),
        ([("host", "a"), ("host", "a")], "1.1", "one Host"),
        ([("origin", "a"), ("host", "a"), ("origin", "b")], "1.1", "one Origin"),
    ],
)
def test_check_framing_ambiguous_head_is_refused(
    headers: list[tuple[str, str]], version: str, words: str
) -> None:
    """Where a proxy could see another end, host or page than we do, there is no answer but 400."""
    pairs = [(name.encode(), value.encode()) for name, value in headers]
    if not words:
        guards.check_framing(pairs, dict(pairs), version)
        return
    with pytest.raises(RequestError, match=words) as caught:
        guards.check_framing(pairs, dict(pairs), version)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"abc-1", "abc-1"),
        (b"", None),
        (b"a b", None),
        (b"a\xe9", None),
        (b"a\r\nx: y", None),
        (b"a\n", None),
        (b"x" * 129, None),
    ],
)
def test_request_id_of_only_one_printable_word(value: bytes, expected: str | None) -> None:
    """A client's id goes into headers and logs, so it must be harmless there."""
    assert guards.request_id_of({b"x-request-id": value}) == expected


@pytest.mark.parametrize(
    ("target", "plain"),
    [
        (b"/v1/models", True),
        (b"/", True),
        (b"/a%20b?q=1&r=%zz", True),
        (b"/a;b,c@d:e!$&'()*+=~-._", True),
        (b"/%73lots/0", True),
        (b"/%u0073lots/0", False),
        (b"/%U0073lots/0", False),
        (b"/slots%", False),
        (b"/slots%0", False),
        (b"/slots%00", False),
        (b"/slots#x", False),
        (b"/slots?a#x", False),
        (b"/a b", False),
        (b"/\xc3\xa9", False),
        (b"*", False),
        (b"http://localhost/slots/0", False),
        (b"localhost:80", False),
        (b"\\slots", False),
        (b"", False),
    ],
)
def test_target_is_plain_only_what_both_sides_read_alike(target: bytes, plain: bool) -> None:
    """The path that is judged must be the path that the decoder acts on."""
    assert guards.target_is_plain(target) is plain


@given(st.text(max_size=60) | st.text("htps:/localv.i[]@#?127.0:3\x00\r\n ", max_size=30))
def test_guards_judge_any_text_without_an_error(text: str) -> None:
    """What a client writes into a head is judged, whatever it is; only what is one word of a host
    can be one.
    """
    assert guards.host_allowed(text, PAGES) in (True, False)
    if guards.origin_allowed(text, PAGES):
        assert re.fullmatch(r"[a-z+-]+://[a-z0-9.\-:\[\]]+", text.lower())
    if text and guards.host_allowed(text, PAGES):
        assert re.fullmatch(r"[A-Za-z0-9.\-:\[\]]+", text)
    guards.forbidden("POST", text)
    guards.target_is_plain(text.encode("utf-8", "replace"))
    guards.request_id_of({b"x-request-id": text.encode("utf-8", "replace")})
