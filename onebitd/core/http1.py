"""Sans-I/O HTTP/1.1 towards the decoder: the head of a request, and a reply's head and body.

A relay must change no byte of a body and spend next to nothing on each chunk of it: a library that
makes an object of every chunk costs forty times what this may (DECISIONS.md). Stricter than most:
whatever two parties could read in two ways is refused. Source of the format: RFC 9112, sections
2 to 7; the tests hold the heads against h11.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Protocol

_MAX_HEAD_BYTES: Final = 64 * 1024
"""All heads of one reply, interim ones included."""
_MAX_FIELDS: Final = 200
_MAX_LINE: Final = 16 * 1024
"""Longest chunk-size or trailer line taken; llama-server's are under 20 bytes."""
_VERSION: Final = b"HTTP/1."
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: [\t\x20-\x7e\x80-\xff]*)?")
_TOKEN: Final = re.compile(rb"[-!#$%&'*+.^_`|~0-9a-zA-Z]+")
_TARGET: Final = re.compile(rb"[\x21-\x7e]+")
_NOT_IN_VALUE: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_FRAMING: Final = (b"content-length", b"transfer-encoding")
_CHUNK_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")
_PLAIN_SIZE: Final = re.compile(rb"[0-9A-Fa-f]{1,15}")
_MANY_BYTES: Final = 4 * 1024
"""So much in hand at once is a reply that comes faster than it is passed on: its chunks are worth
an attempt to tell them apart all at once."""

Headers = Sequence[tuple[bytes, bytes]]


class HeadError(ValueError):
    """A head that HTTP/1.1 does not allow: one that came, or one that was to be written."""


class FramingError(ValueError):
    """The body does not follow its framing."""


def request_head(method: bytes, target: bytes, headers: Headers) -> bytes:
    """Return the head of a request, its blank line included.

    Raises:
        HeadError: a part of it would break out of its place; never quotes a value.
    """
    if not _TOKEN.fullmatch(method):
        raise HeadError(f"not a method: {method[:40]!r}")
    if not _TARGET.fullmatch(target):
        raise HeadError("a character that no request target may have")
    lines = [b"%b %b HTTP/1.1" % (method, target)]
    for name, value in headers:
        if not _TOKEN.fullmatch(name):
            raise HeadError(f"not a header name: {name[:40]!r}")
        if _NOT_IN_VALUE.search(value):
            raise HeadError(f"a control character in the header {name[:40].decode()}")
        lines.append(b"%b: %b" % (name, value))
    return b"\r\n".join(lines) + b"\r\n\r\n"


class ReplyHead(NamedTuple):
    """Status and header fields, names in lower case, in the order in which they came."""

    status: int
    headers: list[tuple[bytes, bytes]]


class HeadReader:
    """Reads the head of one reply; interim ones (1xx) before it are passed over.

    Attributes:
        rest: what came behind the head; belongs to the body.
    """

    def __init__(self) -> None:
        self.rest = b""
        self._held = b""
        self._passed_bytes = 0

    def feed(self, data: bytes) -> ReplyHead | None:
        """Take bytes as they arrived; return the head once it is complete.

        Raises:
            HeadError: no head of a reply, or one beyond all bounds.
        """
        held = self._held + data
        while True:
            end = held.find(b"\r\n\r\n")
            if self._passed_bytes + (len(held) if end < 0 else end) > _MAX_HEAD_BYTES:
                raise HeadError(f"its head is over {_MAX_HEAD_BYTES >> 10} KiB")
            if not held.startswith(_VERSION[: len(held)]):
                raise HeadError(f"it begins with {held[:20]!r}")
            if end < 0:
                self._held = held
                return None
            head = _parsed_head(held[:end])
            held = held[end + 4 :]
            self._passed_bytes += end + 4
            if head.status >= 200:
                self.rest = held
                return head
            if head.status == 101:
                raise HeadError("it switches protocols, which nobody asked for")
            if any(name in _FRAMING for name, _ in head.headers):
                raise HeadError("an interim reply with a length")


def _parsed_head(head: bytes) -> ReplyHead:
    first, *lines = head.split(b"\r\n")
    status_line = _STATUS_LINE.fullmatch(first)
    if status_line is None:
        raise HeadError(f"not a status line: {first[:40]!r}")
    if len(lines) > _MAX_FIELDS:
        raise HeadError(f"over {_MAX_FIELDS} header fields")
    headers = []
    for line in lines:
        name, colon, value = line.partition(b":")
        # A line that continues the one before (obs-fold) has no name either.
        if not colon or not _TOKEN.fullmatch(name) or _NOT_IN_VALUE.search(value):
            raise HeadError(f"not a header field: {line[:40]!r}")
        headers.append((name.lower(), value.strip(b" \t")))
    if status_line[1] == b"0" and any(name == b"transfer-encoding" for name, _ in headers):
        raise HeadError("HTTP/1.0 knows no Transfer-Encoding")
    return ReplyHead(int(status_line[2]), headers)


class BodyReader(Protocol):
    """What the three framings have in common."""

    done: bool
    """True once the last byte of the body has been fed."""

    def feed(self, data: bytes) -> bytes:
        """Take bytes as they arrived; return the body bytes among them, in order.

        Raises:
            FramingError: the bytes break the framing, or come after its end.
        """

    def feed_eof(self) -> None:
        """Take the end of the connection.

        Raises:
            FramingError: the body is not complete.
        """


class LengthReader:
    """A body of Content-Length bytes."""

    def __init__(self, length: int) -> None:
        self._left = length
        self.done = length == 0

    def feed(self, data: bytes) -> bytes:
        """See BodyReader."""
        if len(data) > self._left:
            raise FramingError(f"{len(data) - self._left} bytes after the end of the body")
        self._left -= len(data)
        self.done = self._left == 0
        return data

    def feed_eof(self) -> None:
        """See BodyReader."""
        if not self.done:
            raise FramingError(f"the connection ended {self._left} bytes before the body did")


class UntilCloseReader:
    """A body that ends with the connection."""

    def __init__(self) -> None:
        self.done = False

    def feed(self, data: bytes) -> bytes:
        """See BodyReader."""
        return data

    def feed_eof(self) -> None:
        """See BodyReader."""
        self.done = True


class ChunkedReader:
    """A body with Transfer-Encoding: chunked; trailers are read and dropped."""

    def __init__(self) -> None:
        self._held = b""  # the start of a line whose end has not come
        self._left = 0  # bytes of the current chunk still to come, its CRLF not counted
        self._after_data = False  # the CRLF behind a chunk is due
        self._in_trailers = False
        self.done = False

    def feed(self, data: bytes) -> bytes:
        """See BodyReader."""
        if self._held:
            data = self._held + data
            self._held = b""
        out: list[bytes] = []
        at, end = 0, len(data)
        may_be_plain = end >= _MANY_BYTES
        # No calls of ours in here: it runs for every chunk of every stream.
        while at < end and not self.done:
            if self._left:
                piece = data[at : at + self._left]
                out.append(piece)
                at += len(piece)
                self._left -= len(piece)
                self._after_data = not self._left
            elif self._after_data:
                if end - at < 2:
                    break
                if data[at : at + 2] != b"\r\n":
                    raise FramingError("a chunk is longer than its size says")
                at += 2
                self._after_data = False
            elif self._in_trailers:
                line_end = data.find(b"\n", at)
                if line_end < 0:
                    break
                line = data[at : line_end + 1]
                if line[-2:] != b"\r\n":
                    raise FramingError(f"not a trailer: {line[:40]!r}")
                self.done = len(line) == 2
                at += len(line)
            else:
                size = _CHUNK_SIZE.match(data, at)
                if size is None:
                    if data.find(b"\n", at) >= 0:
                        raise FramingError(f"not a chunk size: {data[at : at + 40]!r}")
                    break
                length = int(size[1], 16)
                if may_be_plain:
                    may_be_plain = False
                    if length <= (end - at) >> 3:
                        found, n_bytes = _plain_chunks(data[at:])
                        if n_bytes:
                            out += found
                            at += n_bytes
                            continue
                at = size.end()
                behind = at + length
                if length and data[behind : behind + 2] == b"\r\n":
                    out.append(data[at:behind])
                    at = behind + 2
                else:
                    self._left, self._in_trailers = length, not length
        if at < end:
            self._hold(data[at:])
        return out[0] if len(out) == 1 else b"".join(out)

    def _hold(self, rest: bytes) -> None:
        if self.done:
            raise FramingError(f"{len(rest)} bytes after the end of the body")
        if self._after_data and rest != b"\r":
            raise FramingError("a chunk is longer than its size says")
        if len(rest) > _MAX_LINE:
            raise FramingError("a chunk-size line without an end")
        self._held = rest

    def feed_eof(self) -> None:
        """See BodyReader."""
        if not self.done:
            raise FramingError("the connection ended before the last chunk")


def _plain_chunks(data: bytes) -> tuple[list[bytes], int]:
    """Return what is in the whole chunks that `data` begins with, and how many bytes they take.

    All of them or none: for a size line with more than a size, or a line end within a chunk, which
    puts what is behind it out of step, there is the exact way. A third of its time for a chunk.
    """
    parts = data.split(b"\r\n")
    many = (len(parts) - 1) // 2 * 2
    sizes, found = parts[:many:2], parts[1:many:2]
    lengths = {}
    for size in set(sizes):
        if not _PLAIN_SIZE.fullmatch(size):
            return [], 0
        lengths[size] = int(size, 16)
    wanted = [lengths[size] for size in sizes]
    if 0 in wanted:  # the last one, whose end is not that of a chunk
        last = wanted.index(0)
        del sizes[last:], found[last:], wanted[last:]
    if list(map(len, found)) != wanted:
        return [], 0
    return found, sum(wanted) + sum(map(len, sizes)) + 4 * len(sizes)


def body_reader(method: bytes, status: int, headers: Iterable[tuple[bytes, bytes]]) -> BodyReader:
    """Choose the reader for a reply's body (RFC 9112, section 6.3).

    Args:
        method: of the request.
        status: of the reply.
        headers: of the reply, names in lower case.

    Raises:
        FramingError: its length is said twice, in two ways, or in one that is unknown.
    """
    framing = [field for field in headers if field[0] in _FRAMING]
    if len(framing) > 1:
        raise FramingError("its length is said more than once")
    reader: BodyReader = UntilCloseReader()
    for name, value in framing:
        if name == b"transfer-encoding":
            if value.lower() != b"chunked":
                raise FramingError(f"not a Transfer-Encoding that is known: {value[:40]!r}")
            reader = ChunkedReader()
        elif not value.isdigit() or len(value) > 18:
            raise FramingError(f"not a Content-Length: {value[:40]!r}")
        else:
            reader = LengthReader(int(value))
    if method == b"HEAD" or status in (204, 304) or 100 <= status < 200:
        return LengthReader(0)
    return reader
