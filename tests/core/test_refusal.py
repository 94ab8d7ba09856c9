"""onebitd.core.refusal: a reply without a server behind it."""

from __future__ import annotations

import json

import pytest

from onebitd.core.errors import RequestError
from onebitd.core.refusal import refusal


@pytest.mark.parametrize(
    ("error", "first", "retry"),
    [
        (RequestError(503, "full", retry_after_s=5), b"HTTP/1.1 503 Service Unavailable", True),
        (RequestError(408, 'say "x"\r\nX: y'), b"HTTP/1.1 408 Request Timeout", False),
        (RequestError(418, "t\u00e9"), b"HTTP/1.1 418 Error", False),
    ],
)
def test_refusal_is_one_whole_reply_in_the_public_shape(
    error: RequestError, first: bytes, retry: bool
) -> None:
    """Status line, length, the end of the connection; nothing of a message gets into the head."""
    head, _, body = refusal(error).partition(b"\r\n\r\n")
    line, *fields = head.split(b"\r\n")
    assert line == first
    found = dict(field.split(b": ") for field in fields)
    assert int(found.pop(b"content-length")) == len(body)
    assert found.pop(b"connection") == b"close"
    assert found.pop(b"content-type").startswith(b"application/json")
    assert found == ({b"retry-after": b"5"} if retry else {})
    assert json.loads(body) == error.body()
