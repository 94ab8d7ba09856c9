"""API keys: which are let in, and that they show nowhere."""

from __future__ import annotations

import hmac
import pickle

import pytest

from onebitd.core.api_keys import ApiKeys

SECRET = bytes(range(32))
KEYS = ApiKeys(("secret", "other key", "schl\u00fcssel", "\u9375"), SECRET)


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ([("authorization", b"Bearer secret")], True),
        ([("authorization", b"bearer  secret ")], True),
        ([("authorization", b"BEARER secret")], True),
        ([("authorization", b"Bearer other key")], True),
        ([("x-api-key", b"secret")], True),
        ([("x-api-key", b" secret ")], True),
        ([("x-api-key", "schl\u00fcssel".encode())], True),
        ([("x-api-key", "schl\u00fcssel".encode("latin-1"))], True),
        ([("x-api-key", "\u9375".encode())], True),
        ([("authorization", b"Bearer wrong"), ("x-api-key", b"secret")], True),
        ([("authorization", b"Bearer secret"), ("x-api-key", b"wrong")], True),
        ([("authorization", b"Basic eDp5"), ("x-api-key", b"secret")], True),
        ([("authorization", b"Bearer x"), ("authorization", b"Bearer secret")], True),
        ([("x-api-key", b"secret"), ("x-api-key", b"x")], True),
        ([], False),
        ([("authorization", b"Bearer wrong")], False),
        ([("authorization", b"Bearer Secret")], False),
        ([("authorization", b"Basic secret")], False),
        ([("authorization", b"secret")], False),
        ([("authorization", b"Bearer")], False),
        ([("authorization", b"Bearer ")], False),
        ([("authorization", b"Bearersecret")], False),
        ([("authorization", b"Bearer secret, Bearer secret")], False),
        ([("authorization", b"Bearer \xff\xfe")], False),
        ([("x-api-key", b"secre")], False),
        ([("x-api-key", b"secrets")], False),
        ([("x-api-key", b"Bearer secret")], False),
        ([("x-api-key", b"&#37749;")], False),
        ([("x-api-key", b"")], False),
        ([("proxy-authorization", b"Bearer secret")], False),
        ([("cookie", b"secret")], False),
    ],
)
def test_allow_only_a_configured_key_opens(headers: list[tuple[str, bytes]], allowed: bool) -> None:
    """Either header may carry it, as with llama-server; of several one right one is enough."""
    assert KEYS.allow([(name.encode(), value) for name, value in headers]) is allowed


def test_allow_without_keys_everybody_passes() -> None:
    """No keys configured: a private loopback server."""
    keys = ApiKeys((), SECRET)
    assert not keys
    assert keys.allow([])
    assert keys.allow([(b"x-api-key", b"anything")])


def test_allow_compares_whole_digests_of_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the length of a guess nor which key it is near to changes what is compared."""
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def seen(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return real(one, other)

    monkeypatch.setattr(hmac, "compare_digest", seen)
    keys = ApiKeys(("a", "b" * 500), SECRET)
    for guess in (b"a", b"b" * 500, b"x", b"y" * 5000):
        keys.allow([(b"x-api-key", guess)])
    assert compared == [(32, 32)] * 8


def test_repr_and_attributes_hold_no_key() -> None:
    """Whatever prints or dumps the object shows no key."""
    assert repr(KEYS) == "<ApiKeys>"
    assert b"other key" not in pickle.dumps(KEYS)


def test_digests_of_another_process_are_other_ones() -> None:
    """With a secret of its own nobody can prepare a guess."""
    one, other = ApiKeys(("a",), SECRET), ApiKeys(("a",), b"x" * 32)
    assert pickle.dumps(one).replace(SECRET, b"x" * 32) != pickle.dumps(other)
