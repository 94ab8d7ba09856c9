"""Heads and bodies of HTTP/1.1: the same however they arrive, and as h11 reads them."""

from __future__ import annotations

import itertools

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebitd.core.http1 import (
    BodyReader,
    ChunkedReader,
    FramingError,
    HeadError,
    HeadReader,
    LengthReader,
    ReplyHead,
    UntilCloseReader,
    body_reader,
    request_head,
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


SIZE_LINES = (b"%x", b"%X", b"000%x", b"%x ", b"%x;name=value", b"+%x", b"0x%x", b"1_%x", b" %x")


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([b"d" * 40, b"\r\n", b"a\r\n2\r\nbc", b"\r", b"1"]), max_size=4),
    st.sampled_from(SIZE_LINES),
    st.integers(0, 60),
    st.integers(0, 6000),
)
def test_chunked_many_at_once_are_what_they_are_little_by_little(
    odd: list[bytes], line: bytes, place: int, cut: int
) -> None:
    """A piece of many chunks is read as small pieces are, with line ends in the chunks or not."""
    chunks = [b"0123456789" * 10] * 60
    chunks[place:place] = odd
    sizes = [b"%x" % len(chunk) for chunk in chunks]
    sizes[min(place, len(sizes) - 1)] = line % len(chunks[min(place, len(sizes) - 1)])
    pairs = zip(sizes, chunks, strict=True)
    wire = b"".join(b"%b\r\n%b\r\n" % pair for pair in pairs) + b"0\r\n\r\n"

    def outcome(pieces: list[bytes]) -> tuple[bytes, bool] | None:
        reader = ChunkedReader()
        try:
            return feed_all(reader, pieces), reader.done
        except FramingError:
            return None

    little_by_little = outcome([wire[at : at + 99] for at in range(0, len(wire), 99)])
    assert outcome([wire]) == little_by_little
    assert outcome(split(wire, [cut])) == little_by_little


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


@pytest.mark.parametrize(
    "headers",
    [
        [(b"content-length", b"-3")],
        [(b"content-length", b"+3")],
        [(b"content-length", b"")],
        [(b"content-length", b"3, 3")],
        [(b"content-length", b"1" * 19)],
        [(b"content-length", b"3"), (b"content-length", b"3")],
        [(b"content-length", b"3"), (b"transfer-encoding", b"chunked")],
        [(b"transfer-encoding", b"chunked"), (b"transfer-encoding", b"chunked")],
        [(b"transfer-encoding", b"gzip, chunked")],
        [(b"transfer-encoding", b"identity")],
    ],
)
@pytest.mark.parametrize(("method", "status"), [(b"GET", 200), (b"HEAD", 200), (b"GET", 204)])
def test_body_reader_length_that_can_be_read_in_two_ways_is_refused(
    method: bytes, status: int, headers: list[tuple[bytes, bytes]]
) -> None:
    """Even where no body follows: whoever says such a thing is not to be believed."""
    with pytest.raises(FramingError):
        body_reader(method, status, headers)


OK_HEAD = b"HTTP/1.1 200 OK\r\nServer: x\r\n\r\n"


def by_us(pieces: list[bytes]) -> tuple[ReplyHead, bytes] | None:
    """Read a head that comes in these pieces; the rest is what was not taken."""
    reader = HeadReader()
    for number, piece in enumerate(pieces):
        if (head := reader.feed(piece)) is not None:
            return head, reader.rest + b"".join(pieces[number + 1 :])
    return None


def by_h11(data: bytes) -> tuple[ReplyHead, bytes] | None:
    """Have h11 read it as the answer to a GET."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=64 * 1024)
    connection.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(data)
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Response):
            headers = [(bytes(name), bytes(value)) for name, value in event.headers]
            return ReplyHead(event.status_code, headers), bytes(connection.trailing_data[0])
        if event is h11.NEED_DATA:
            return None
        assert isinstance(event, h11.InformationalResponse)


NAME_LETTERS = "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
names = st.text(NAME_LETTERS, min_size=1, max_size=9).map(str.encode)
VISIBLE = "".join(map(chr, [*range(0x21, 0x7F), *range(0x80, 0x100)]))
words = st.text(VISIBLE, min_size=1, max_size=9)
values = st.lists(words, max_size=3).map(lambda found: " \t".join(found).encode("latin-1"))
fields = st.lists(
    st.tuples(names, values).filter(
        lambda field: field[0].lower() not in (b"content-length", b"transfer-encoding")
    ),
    max_size=6,
)
framings = st.sampled_from(
    [[], [(b"Content-Length", b"5")], [(b"TRANSFER-Encoding", b"chunked")]],
)
reasons = st.sampled_from([b"", b" ", b" OK", b" I'm a\tteapot", b" gr\xfc\xdfe"])
interims = st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 X\r\nA: b\r\n\r\n"])


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    """The bytes of a head that keeps to the rules."""
    wire = draw(interims) + b"HTTP/1.1 %d%b\r\n" % (draw(st.integers(200, 599)), draw(reasons))
    for name, value in draw(fields) + draw(framings):
        blank = draw(st.sampled_from([b"", b" ", b"\t ", b"   "]))
        wire += name + b":" + blank + value + blank + b"\r\n"
    return wire + b"\r\n"


@settings(max_examples=60)
@given(heads(), st.binary(max_size=20), cuts)
def test_head_valid_in_any_pieces_is_what_h11_reads(
    head: bytes, rest: bytes, where: list[int]
) -> None:
    """Status, fields, their order, and where the body begins."""
    assert by_us(split(head + rest, where)) == by_h11(head + rest)


DAMAGES = [b"", b"\r\n", b"\n", b"\r", b"\0", b"\x0b", b" ", b"\t", b":", b"A", b"1", b"HTTP/"]
DAMAGES += [b"\r\nContent-Length: 7", b"\r\nTransfer-Encoding: chunked", b"\r\n folded"]


@settings(max_examples=60)
@given(
    heads(),
    st.lists(
        st.tuples(
            st.integers(0, 400),
            st.integers(0, 3),
            st.sampled_from(DAMAGES),
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_head_damaged_is_never_taken_where_h11_refuses(
    head: bytes, damages: list[tuple[int, int, bytes]]
) -> None:
    """Refused, or incomplete, or read alike: never understood in a way of our own."""
    for at, length, put in damages:
        head = head[:at] + put + head[at + length :]
    try:
        found = by_us([head])
        if found is not None:
            body_reader(b"GET", found[0].status, found[0].headers)
    except (HeadError, FramingError):
        return
    if found is not None:
        assert found == by_h11(head)


@pytest.mark.parametrize(
    "wire",
    [
        b"\x16\x03\x01",
        b"SSH-2.0-OpenSSH",
        b"\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.2 200 OK\r\n\r\n",
        b"HTTP/1.1  200 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 099 OK\r\n\r\n",
        b"HTTP/1.1 600 OK\r\n\r\n",
        b"HTTP/1.1 200 O\0K\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\nContent-Length: 7 7\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n: no name\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA : space\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\r\n folded: c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\tfolded: c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\nC: d\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\rC\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA\x80: b\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"b" * 70_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 4000,
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 201 + b"\r\n",
    ],
)
def test_head_that_breaks_a_rule_is_refused(wire: bytes) -> None:
    """At once, where the rule is broken at once; and none is read with a guess."""
    with pytest.raises(HeadError):
        by_us([wire])


def test_head_incomplete_is_waited_for() -> None:
    """No byte too few."""
    for length in range(len(OK_HEAD)):
        assert by_us([OK_HEAD[:length]]) is None
    assert by_us([OK_HEAD + b"rest"]) == (ReplyHead(200, [(b"server", b"x")]), b"rest")


@settings(max_examples=60)
@given(names, st.lists(st.tuples(names, values), max_size=4))
def test_request_head_is_what_h11_reads(method: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    """Method, target and fields as they were given."""
    own = (b"host", b"content-length", b"transfer-encoding")
    kept = [(name, value) for name, value in headers if name.lower() not in own]
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(request_head(method, b"/a?b=%20", [(b"host", b"x"), *kept]))
    event = connection.next_event()
    assert isinstance(event, h11.Request)
    assert (event.method, event.target) == (method, b"/a?b=%20")
    lowered = [(name.lower(), value) for name, value in kept]
    assert list(event.headers) == [(b"host", b"x"), *lowered]


@pytest.mark.parametrize("bad", [b"\r", b"\n", b"\0", b"\r\nx: y", b"\x0b", b"\x7f"])
@pytest.mark.parametrize("place", ["method", "target", "name", "value"])
def test_request_head_that_would_break_out_of_its_line_is_refused(place: str, bad: bytes) -> None:
    """In every place of it; and what is refused is not quoted where it may be a secret."""
    parts = {"method": b"GET", "target": b"/x", "name": b"x-key", "value": b"secret"}
    parts[place] += bad
    with pytest.raises(HeadError) as caught:
        request_head(parts["method"], parts["target"], [(parts["name"], parts["value"])])
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("method", "target", "name"),
    [
        (b"", b"/", b"a"),
        (b"G T", b"/", b"a"),
        (b"GET", b"", b"a"),
        (b"GET", b"/ /", b"a"),
        (b"GET", b"/\xe4", b"a"),
        (b"GET", b"/", b""),
        (b"GET", b"/", b"a b"),
        (b"GET", b"/", b"a:"),
    ],
)
def test_request_head_with_a_part_that_is_none_is_refused(
    method: bytes, target: bytes, name: bytes
) -> None:
    """Empty ones, and ones with a blank in the middle."""
    with pytest.raises(HeadError):
        request_head(method, target, [(name, b"v")])
