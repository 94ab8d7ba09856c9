"""Sans-I/O reading of an HTTP/1.1 reply's body, for a relay that must change no byte of it.

h11 parses heads; bodies are unframed here because one event object a chunk costs forty times what
the relay of a token stream may cost (DECISIONS.md). Source of the format: RFC 9112, sections 6, 7.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

_MAX_LINE: Final = 16 * 1024
"""Longest chunk-size or trailer line taken; llama-server's are under 20 bytes."""


class FramingError(ValueError):
    """The body does not follow its framing."""


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
        self._held = bytearray()
        self._left = 0  # bytes of the current chunk still to come, its CRLF not counted
        self._after_data = False  # the CRLF behind a chunk is due
        self._in_trailers = False
        self.done = False

    def feed(self, data: bytes) -> bytes:
        """See BodyReader."""
        held = self._held
        held += data
        out: list[bytes] = []
        position = 0
        while not self.done:
            if self._left:
                piece = bytes(held[position : position + self._left])
                if not piece:
                    break
                out.append(piece)
                position += len(piece)
                self._left -= len(piece)
                self._after_data = not self._left
                continue
            end = held.find(b"\n", position)
            if end < 0:
                if len(held) - position > _MAX_LINE:
                    raise FramingError("a chunk-size line without an end")
                break
            self._take_line(bytes(held[position:end]).rstrip(b"\r"))
            position = end + 1
        del held[:position]
        if self.done and held:
            raise FramingError(f"{len(held)} bytes after the end of the body")
        return out[0] if len(out) == 1 else b"".join(out)

    def _take_line(self, line: bytes) -> None:
        if self._after_data:
            if line:
                raise FramingError("a chunk is longer than its size says")
            self._after_data = False
        elif self._in_trailers:
            self.done = not line
        else:
            digits = line.partition(b";")[0].strip()
            if not digits or len(digits) > 15 or digits.strip(b"0123456789abcdefABCDEF"):
                raise FramingError(f"not a chunk size: {line[:40]!r}")
            self._left = int(digits, 16)
            self._in_trailers = self._left == 0

    def feed_eof(self) -> None:
        """See BodyReader."""
        if not self.done:
            raise FramingError("the connection ended before the last chunk")


def body_reader(method: bytes, status: int, headers: Iterable[tuple[bytes, bytes]]) -> BodyReader:
    """Choose the reader for a reply's body (RFC 9112, section 6.3).

    Args:
        method: of the request.
        status: of the reply.
        headers: of the reply, names in lower case.

    Raises:
        FramingError: a Content-Length that is no number.
    """
    fields = dict(headers)
    if method == b"HEAD" or status in (204, 304) or 100 <= status < 200:
        return LengthReader(0)
    if fields.get(b"transfer-encoding", b"").lower().endswith(b"chunked"):
        return ChunkedReader()
    length = fields.get(b"content-length")
    if length is None:
        return UntilCloseReader()
    if not length.isdigit():
        raise FramingError(f"not a Content-Length: {length[:40]!r}")
    return LengthReader(int(length))
