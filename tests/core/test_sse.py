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
    assert watch.events == 4


def test_event_watch_comments_are_no_start() -> None:
    """Only data says that the decoder has begun to answer."""
    watch = sse.EventWatch()
    watch.feed(b": waiting for the prompt\n\n")
    before = watch.started
    assert watch.events == 0
    watch.feed(b"data: {}\n\n")
    assert (before, watch.started) == (False, True)
    assert watch.timings() is None


def test_event_watch_overlong_event_is_passed_over() -> None:
    """An event beyond all bounds takes no memory, and the next one is seen again."""
    watch = sse.EventWatch()
    watch.feed(b"data: 1\n\n")
    for _ in range(80):
        watch.feed(b"x" * 65536)
    watch.feed(b'y\ndata: {"timings":{"cache_n":1}}\n\n')
    assert watch.timings() == {"cache_n": 1}
    assert watch.events == 2


@given(cuts)
def test_json_watch_any_cuts_find_the_timings(where: list[int]) -> None:
    """A JSON reply is read whole."""
    watch = sse.JsonWatch()
    assert watch.events == 0
    for piece in split(json.dumps({"a": 1, "timings": TIMINGS}).encode(), where):
        watch.feed(piece)
    assert watch.timings() == TIMINGS
    assert watch.events == 1


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


def event(document: object) -> bytes:
    """Return one event of a stream."""
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def chunk(**delta: object) -> bytes:
    """Return one event of a chat's stream."""
    return event({"choices": [{"index": 0, "delta": delta}]})


DONE = b"data: [DONE]\n\n"
USAGE = event({"choices": [], "usage": {"prompt_tokens": 4}, "timings": TIMINGS})


@pytest.mark.parametrize(
    ("stream", "text"),
    [
        (chunk(role="assistant", content=None) + chunk(content="Hé"), "Hé"),
        (chunk(content="a") + chunk(content="b") + chunk() + USAGE + DONE, "ab"),
        (event({"choices": [{"text": "x"}]}) + event({"choices": [{"text": ""}]}) + DONE, "x"),
        (b": hello\n\nevent: x\n" + chunk(content="a").replace(b"\n\n", b"\r\n\r\n"), "a"),
        (chunk(content="a") + chunk(tool_calls=[{"index": 0}]), None),
        (chunk(content="a") + chunk(function_call={"name": "f"}), None),
        (chunk(reasoning_content="hm") + chunk(content="a"), None),
        (chunk(reasoning_content=None, tool_calls=[], content="a"), "a"),
        (event({"choices": [{"delta": {"content": "a"}}, {"delta": {}}]}), None),
        (chunk(content="a") + event({"error": {"message": "no"}}), None),
        (chunk(content=["a"]), None),
        (event({"choices": [3]}), None),
        (event({"content": "of /completion"}), None),
        (b"data: {\n\n", None),
        (b"data: \xff\n\n", None),
        (DONE, ""),
    ],
)
def test_event_watch_text_is_what_the_next_turn_repeats(stream: bytes, text: str | None) -> None:
    """The pieces of one plain reply, and None for what is more or other than that."""
    watch = sse.EventWatch()
    watch.feed(stream)
    assert watch.text() == text


@given(cuts)
def test_event_watch_any_cuts_give_the_text(where: list[int]) -> None:
    """Letters of several bytes included."""
    watch = sse.EventWatch()
    data = b"".join(event({"choices": [{"text": piece}]}) for piece in ("dé", "jà", " vu")) + DONE
    for piece in split(data.replace(b"\\u00e9", "é".encode()), where):
        watch.feed(piece)
    assert watch.text() == "déjà vu"


def test_event_watch_text_of_a_stream_too_long_is_not_kept() -> None:
    """Nor is its memory; the timings are still found."""
    watch = sse.EventWatch()
    for _ in range(40):
        watch.feed(chunk(content="x" * 65536))
    watch.feed(USAGE + DONE)
    assert (watch.text(), watch.timings()) == (None, TIMINGS)


def test_event_watch_text_with_an_event_too_long_in_it_is_unknown() -> None:
    """An event that was passed over is missing from the text."""
    watch = sse.EventWatch()
    watch.feed(chunk(content="before") + b"data: " + b"x" * (4 * 1024 * 1024 + 1))
    watch.feed(b"\n\n" + chunk(content="after") + DONE)
    assert watch.text() is None


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"choices": [{"message": {"role": "assistant", "content": "hi"}}]}, "hi"),
        ({"choices": [{"text": "hi", "logprobs": None}]}, "hi"),
        ({"choices": [{"message": {"content": None, "tool_calls": [{"id": "1"}]}}]}, None),
        ({"choices": [{"message": {"content": "a", "reasoning_content": "b"}}]}, None),
        ({"choices": [{"text": "a"}, {"text": "b"}]}, None),
        ({"error": {"message": "no"}}, None),
        ([], None),
    ],
)
def test_json_watch_text_is_what_the_next_turn_repeats(document: object, text: str | None) -> None:
    """The same of a reply in one piece."""
    watch = sse.JsonWatch()
    watch.feed(json.dumps(document).encode())
    assert watch.text() == text


def test_json_watch_text_of_a_reply_too_long_is_unknown() -> None:
    """Only its tail is kept."""
    watch = sse.JsonWatch()
    watch.feed(json.dumps({"choices": [{"text": "x" * (4 * 1024 * 1024)}]}).encode())
    assert watch.text() is None


@pytest.mark.parametrize(
    ("timings", "found", "ms"),
    [
        ({"predicted_n": 7, "predicted_ms": 3, "prompt_ms": 2}, (7, 3.0), 2.0),
        ({"predicted_n": 0, "predicted_ms": 0.0, "prompt_ms": 0}, (0, 0.0), 0.0),
        ({"predicted_n": -1, "predicted_ms": 1.0, "prompt_ms": -1}, None, None),
        ({"predicted_n": 7, "predicted_ms": float("nan"), "prompt_ms": float("nan")}, None, None),
        ({"predicted_n": 7.5, "predicted_ms": 1.0, "prompt_ms": "2"}, None, None),
        ({}, None, None),
        (None, None, None),
    ],
)
def test_predicted_and_prompt_ms_are_the_decoders_words(
    timings: dict[str, object] | None, found: tuple[int, float] | None, ms: float | None
) -> None:
    """What cannot be a measurement is none."""
    assert (sse.predicted(timings), sse.prompt_ms(timings)) == (found, ms)


def test_reply_counts_one_that_is_missing_leaves_the_other() -> None:
    """A decoder may say how many and not how long."""
    assert sse.reply_counts({"predicted_n": 7}) == (7, None)
    assert sse.reply_counts({"predicted_n": True, "predicted_ms": 3}) == (None, 3.0)


@pytest.mark.parametrize(
    ("stream", "whole"),
    [
        (b'data: {"choices": []}\n\ndata: [DONE]\n\n', True),
        (b"data: [DONE]\n\n: a comment\n\n", True),
        (b'data: {"content": "data: [DONE]"}\n\n', False),
        (b'data: {"content": "x"}\n\n', False),
        (b": data: [DONE]\n\n", False),
        (b"", False),
    ],
)
def test_event_watch_is_whole_after_its_last_event(stream: bytes, whole: bool) -> None:
    """However it is cut; words of the model that look like the end are none."""
    for size in (1, 5, 1000):
        watch = sse.watch_for(b"text/event-stream")
        for begin in range(0, len(stream), size):
            watch.feed(stream[begin : begin + size])
        assert watch.is_whole == whole
