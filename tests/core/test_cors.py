"""What browsers are told: preflights, and who may read a reply."""

from __future__ import annotations

import pytest

from onebitd.core import cors

ORIGIN = b"http://localhost:3000"
ASKING = {b"origin": ORIGIN, b"access-control-request-method": b"POST"}


def test_readable_by_takes_the_decoders_words_out_and_keeps_the_rest() -> None:
    """Its echo of any origin and its credentials must not widen what we allow."""
    reply = [
        (b"content-type", b"application/json"),
        (b"Access-Control-Allow-Origin", b"*"),
        (b"access-control-allow-credentials", b"true"),
        (b"vary", b"Accept-Encoding"),
    ]
    found = cors.readable_by(ORIGIN, reply)
    assert found[:2] == [reply[0], reply[3]]
    assert dict(found[2:]).keys() == {
        b"access-control-allow-origin",
        b"access-control-expose-headers",
        b"vary",
    }
    assert (b"access-control-allow-origin", ORIGIN) in found
    assert (b"vary", b"Origin") in found
    exposed = dict(found)[b"access-control-expose-headers"].decode().lower().split(", ")
    assert {"x-request-id", "x-onebit-handoff", "x-onebit-reason"} < set(exposed)
    assert {"server-timing", "retry-after"} < set(exposed)


@pytest.mark.parametrize(
    ("method", "missing", "is_one"),
    [
        ("OPTIONS", b"", True),
        ("OPTIONS", b"origin", False),
        ("OPTIONS", b"access-control-request-method", False),
        ("GET", b"", False),
    ],
)
def test_is_preflight_needs_method_and_both_headers(
    method: str, missing: bytes, is_one: bool
) -> None:
    """Any other OPTIONS is the decoder's to answer, a proxy's health check for one."""
    head = {name: value for name, value in ASKING.items() if name != missing}
    assert cors.is_preflight(method, head) is is_one


def test_preflight_reply_names_what_was_asked_for_and_no_credentials() -> None:
    """`*` would not cover Authorization, so the names that were asked for are repeated."""
    wanted = b"authorization, content-type,x-onebit-handoff"
    reply = dict(cors.preflight_reply({**ASKING, b"access-control-request-headers": wanted}))
    assert reply[b"access-control-allow-origin"] == ORIGIN
    assert reply[b"access-control-allow-headers"] == wanted
    assert b"POST" in reply[b"access-control-allow-methods"].split(b", ")
    assert int(reply[b"access-control-max-age"]) > 0
    assert b"Origin" in reply[b"vary"].split(b", ")
    assert b"access-control-allow-credentials" not in reply
    assert b"access-control-allow-private-network" not in reply


@pytest.mark.parametrize("wanted", [b"", b"a b", b"x\xe9", b"a,,b", b"a;b", b"a: b", b",", b"a,"])
def test_preflight_reply_what_is_no_list_of_names_is_not_repeated(wanted: bytes) -> None:
    """Nothing that a client writes gets into our headers but tokens."""
    reply = dict(cors.preflight_reply({**ASKING, b"access-control-request-headers": wanted}))
    assert b"access-control-allow-headers" not in reply


def test_preflight_reply_private_network_is_allowed_where_asked() -> None:
    """A browser asks before a public page may talk to a private address."""
    asked = {**ASKING, b"access-control-request-private-network": b"true"}
    assert dict(cors.preflight_reply(asked))[b"access-control-allow-private-network"] == b"true"
