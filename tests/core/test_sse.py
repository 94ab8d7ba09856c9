"""Watching replies go by: first data, timings, whatever the chunking."""

from __future__ import annotations

import json

import pytest
from hypothesis import given

from onebitd.core import sse
from tests.core.test_http1 import cuts, split

TIMINGS = {"cache_n": 42, "prompt_n": 1, "prompt_ms": 1.5}
STREAM = (
    b": waiting\n\n"
    b'data: {"choices":[{"delta":{"content":"say \\"timings\\""}}]}\n\n'
    b'data: {"choices":[],"timings":{"cache_n":0,"prompt_n":43}}\r\n\r\n'
    + b"data: "
    + json.dumps({"choices": [], "timings": TIMINGS}).encode()
    + b"\n\n"
    + b"data: [DONE]\n\n"
)


@given(cuts)
def test_event_watch_any_cuts_find_the_last_timings(where: list[int]) -> None:
    """The timings do not depend on how the stream was split, and the last ones count."""
    watch = sse.EventWatch()
    for piece in split(STREAM, where):
        watch.feed(piece)
    assert watch.timings() == TIMINGS
    assert watch.started


def test_event_watch_comments_are_no_start() -> None:
    """Only data says that the decoder has begun to answer."""
    watch = sse.EventWatch()
    watch.feed(b": waiting for the prompt\n\n")
    before = watch.started
    watch.feed(b"data: {}\n\n")
    assert (before, watch.started) == (False, True)
    assert watch.timings() is None


def test_event_watch_overlong_event_is_passed_over() -> None:
    """An event beyond all bounds takes no memory, and the next one is seen again."""
    watch = sse.EventWatch()
    for _ in range(80):
        watch.feed(b"x" * 65536)
    watch.feed(b'\ndata: {"timings":{"cache_n":1}}\n\n')
    assert watch.timings() == {"cache_n": 1}


@given(cuts)
def test_json_watch_any_cuts_find_the_timings(where: list[int]) -> None:
    """A JSON reply is read whole."""
    watch = sse.JsonWatch()
    for piece in split(json.dumps({"a": 1, "timings": TIMINGS}).encode(), where):
        watch.feed(piece)
    assert watch.timings() == TIMINGS


def test_json_watch_huge_reply_is_read_from_its_tail() -> None:
    """A reply larger than the bound still tells its timings, and memory stays bounded."""
    watch = sse.JsonWatch()
    watch.feed(b'{"text": "')
    for _ in range(100):
        watch.feed(b"x" * 65536)
    watch.feed(b'", "timings":' + json.dumps(TIMINGS).encode() + b"}")
    assert watch.timings() == TIMINGS


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"timings": 3}', b"\xff\xfe"])
def test_json_watch_reply_without_timings_is_none(body: bytes) -> None:
    """Nothing is invented."""
    watch = sse.JsonWatch()
    watch.feed(body)
    assert watch.timings() is None


@pytest.mark.parametrize(
    ("timings", "counts"),
    [
        (TIMINGS, (42, 1)),
        ({"cache_n": "x"}, (None, None)),
        ({}, (None, None)),
        (None, (None, None)),
    ],
)
def test_token_counts_are_the_decoders_words(
    timings: dict[str, object] | None, counts: tuple[int | None, int | None]
) -> None:
    """cache_n and prompt_n, or None."""
    assert sse.token_counts(timings) == counts


def test_watch_for_follows_the_content_type() -> None:
    """An event stream is watched as one, everything else as JSON."""
    assert isinstance(sse.watch_for(b"text/event-stream; charset=utf-8"), sse.EventWatch)
    assert isinstance(sse.watch_for(b"application/json"), sse.JsonWatch)


def test_error_event_has_the_public_shape() -> None:
    """One data line, JSON, and a blank line."""
    event = sse.error_event("it broke", 500, "server_error")
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert json.loads(event[6:]) == {
        "error": {"message": "it broke", "type": "server_error", "code": 500}
    }
