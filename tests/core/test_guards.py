"""Guards of the public listener."""

from __future__ import annotations

import pytest

from onebitd.core import guards


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/slots/0"),
        ("POST", "/slots/"),
        ("POST", "/props"),
        ("POST", "/lora-adapters"),
        ("POST", "/models/load"),
        ("POST", "/models/unload"),
        ("POST", "/v1/models/load"),
        ("DELETE", "/models/x"),
        ("GET", "/v1/stream/c"),
        ("DELETE", "/v1/stream/c"),
        ("POST", "/v1/streams/lookup"),
    ],
)
def test_forbidden_what_changes_the_decoder_has_a_reason(method: str, path: str) -> None:
    """Slots, settings, adapters and models are not a client's to change."""
    assert guards.forbidden(method, path)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/slots"),
        ("GET", "/props"),
        ("GET", "/lora-adapters"),
        ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"),
        ("GET", "/"),
    ],
)
def test_forbidden_everything_else_passes(method: str, path: str) -> None:
    """What only reads or completes is forwarded."""
    assert guards.forbidden(method, path) is None


@pytest.mark.parametrize(
    ("method", "path", "needs"),
    [
        ("POST", "/completion", True),
        ("POST", "/v1/messages", True),
        ("POST", "/something/new", True),
        ("POST", "/tokenize", False),
        ("POST", "/apply-template", False),
        ("POST", "/v1/messages/count_tokens", False),
        ("POST", "/v1/chat/completions/control", False),
        ("GET", "/v1/models", False),
    ],
)
def test_needs_slot_only_what_is_known_not_to_passes(method: str, path: str, needs: bool) -> None:
    """An endpoint nobody knows queues for the slot."""
    assert guards.needs_slot(method, path) is needs


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1:8000", True),
        ("localhost:8000", True),
        ("LOCALHOST", True),
        ("[::1]:8000", True),
        ("192.168.1.5", True),
        ("app.localhost", True),
        ("box.lan:8000", True),
        ("", True),
        ("evil.example", False),
        ("evil.example:8000", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False),
        ("box.lan.evil.example", False),
    ],
)
def test_host_allowed_a_rebound_name_is_refused(host: str, allowed: bool) -> None:
    """A page's own name in Host means that its DNS points here."""
    assert guards.host_allowed(host, "127.0.0.1", ["box.lan"]) is allowed


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        (None, True),
        ("http://127.0.0.1:8000", True),
        ("http://localhost:3000", True),
        ("https://chat.lan", True),
        ("null", False),
        ("", False),
        ("http://evil.example", False),
        ("http://localhost.evil.example", False),
        ("file://", False),
        ("http://[", False),
    ],
)
def test_origin_allowed_foreign_pages_are_refused(origin: str | None, allowed: bool) -> None:
    """A web page elsewhere must not drive a server on loopback."""
    assert guards.origin_allowed(origin, ["https://chat.lan"]) is allowed


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({b"authorization": b"Bearer secret"}, True),
        ({b"authorization": b"bearer  other "}, True),
        ({b"x-api-key": b"secret"}, True),
        ({}, False),
        ({b"authorization": b"Bearer wrong"}, False),
        ({b"authorization": b"Basic secret"}, False),
        ({b"authorization": b"Bearer "}, False),
        ({b"x-api-key": b"secre"}, False),
    ],
)
def test_key_allowed_only_a_configured_key_passes(
    headers: dict[bytes, bytes], allowed: bool
) -> None:
    """Either header may carry it, as with llama-server."""
    assert guards.key_allowed(headers, [b"secret", b"other"]) is allowed


def test_key_allowed_without_keys_everybody_passes() -> None:
    """No keys configured: a private loopback server."""
    assert guards.key_allowed({}, [])


@pytest.mark.parametrize(
    ("value", "expected"),
    [(b"abc-1", "abc-1"), (b"", None), (b"a b", None), (b"a\xe9", None), (b"x" * 129, None)],
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
        (b"/slots%", False),
        (b"/slots%0", False),
        (b"/slots%00", False),
        (b"/slots#x", False),
        (b"/slots?a#x", False),
        (b"/a b", False),
        (b"/\xc3\xa9", False),
        (b"*", False),
        (b"http://localhost/slots/0", False),
        (b"", False),
    ],
)
def test_target_is_plain_only_what_both_sides_read_alike(target: bytes, plain: bool) -> None:
    """The path that is judged must be the path that the decoder acts on."""
    assert guards.target_is_plain(target) is plain
