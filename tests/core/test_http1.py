"""Bodies of HTTP/1.1 replies: the same bytes, however they arrive."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebitd.core.http1 import (
    BodyReader,
    ChunkedReader,
    FramingError,
    LengthReader,
    UntilCloseReader,
    body_reader,
)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    """Cut `data` at these places."""
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


def feed_all(reader: BodyReader, pieces: list[bytes]) -> bytes:
    return b"".join(reader.feed(piece) for piece in pieces)


chunks_of_bytes = st.lists(st.binary(min_size=1, max_size=300), max_size=8)
cuts = st.lists(st.integers(0, 3000), max_size=20)


@given(chunks_of_bytes, cuts, st.sampled_from([b"", b";name=value"]), st.booleans())
def test_chunked_any_cuts_give_the_same_body(
    chunks: list[bytes], where: list[int], extension: bytes, trailer: bool
) -> None:
    """The body does not depend on how the bytes were split on their way."""
    wire = b"".join(b"%X%s\r\n%s\r\n" % (len(chunk), extension, chunk) for chunk in chunks)
    wire += b"0\r\n" + (b"X-Trailer: 1\r\n" if trailer else b"") + b"\r\n"
    reader = ChunkedReader()
    assert feed_all(reader, split(wire, where)) == b"".join(chunks)
    assert reader.done
    reader.feed_eof()


@given(chunks_of_bytes, st.integers(0, 4000))
def test_chunked_cut_short_is_an_error_at_the_end(chunks: list[bytes], length: int) -> None:
    """A body that ends early is never taken for a whole one."""
    wire = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    cut = wire[: min(length, len(wire) - 1)]
    reader = ChunkedReader()
    found = reader.feed(cut)
    assert b"".join(chunks).startswith(found)
    assert not reader.done
    with pytest.raises(FramingError):
        reader.feed_eof()


@given(st.binary(max_size=200), cuts)
def test_chunked_any_bytes_give_a_body_or_a_framing_error(data: bytes, where: list[int]) -> None:
    """Nonsense is an error of one kind."""
    reader = ChunkedReader()
    try:
        feed_all(reader, split(data, where))
        reader.feed_eof()
    except FramingError:
        return
    assert reader.done


@pytest.mark.parametrize(
    "wire",
    [
        b"xyz\r\n",
        b"-1\r\n",
        b"\r\n",
        b"1\r\nab\r\n",
        b"ffffffffffffffffff\r\n",
        b"0\r\n\r\nmore",
        b"1" * 20_000,
    ],
)
def test_chunked_bad_framing_is_refused(wire: bytes) -> None:
    """Sizes that are none, chunks longer than their size, bytes after the end."""
    with pytest.raises(FramingError):
        ChunkedReader().feed(wire)


def test_length_exact_is_done() -> None:
    """A body of Content-Length bytes ends by itself."""
    reader = LengthReader(5)
    assert reader.feed(b"abc") == b"abc"
    with pytest.raises(FramingError):
        reader.feed_eof()
    assert reader.feed(b"de") == b"de"
    assert reader.done
    reader.feed_eof()
    with pytest.raises(FramingError):
        reader.feed(b"x")


def test_until_close_ends_with_the_connection() -> None:
    """Without a length the end of the connection is the end of the body."""
    reader = UntilCloseReader()
    assert reader.feed(b"abc") == b"abc"
    assert not reader.done
    reader.feed_eof()
    assert reader.done


@pytest.mark.parametrize(
    ("method", "status", "headers", "kind"),
    [
        (b"GET", 200, [(b"content-length", b"3")], LengthReader),
        (b"GET", 200, [(b"transfer-encoding", b"chunked")], ChunkedReader),
        (
            b"GET",
            200,
            [(b"transfer-encoding", b"chunked"), (b"content-length", b"3")],
            ChunkedReader,
        ),
        (b"GET", 200, [], UntilCloseReader),
        (b"HEAD", 200, [(b"content-length", b"3")], LengthReader),
        (b"GET", 204, [], LengthReader),
        (b"GET", 304, [(b"content-length", b"3")], LengthReader),
    ],
)
def test_body_reader_follows_the_head(
    method: bytes, status: int, headers: list[tuple[bytes, bytes]], kind: type
) -> None:
    """RFC 9112, section 6.3, row by row."""
    reader = body_reader(method, status, headers)
    assert isinstance(reader, kind)
    assert reader.done == (method == b"HEAD" or status in (204, 304))


def test_body_reader_length_that_is_none_is_refused() -> None:
    """A negative or signed length is not a length."""
    with pytest.raises(FramingError):
        body_reader(b"GET", 200, [(b"content-length", b"-3")])
