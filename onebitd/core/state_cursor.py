"""Reading a state file from front to end, never past it, whatever it is read from.

Anything with `len()` and slices that yield bytes will do as a source: bytes, a memoryview, an
mmap. Nothing here keeps a view of it, so an mmap can be closed after a refusal too. Reading a file
that another process may still truncate through an mmap is a SIGBUS; a source that slices with
`os.pread` gets a `StateFileError` in that case.
"""

from __future__ import annotations

import struct
from typing import Protocol

from onebitd.core.errors import StateFileError


class Source(Protocol):
    """What a state file is read from: bytes, memoryview, mmap, or a pread wrapper."""

    def __len__(self) -> int:
        """Return the size in bytes; it must not change."""

    def __getitem__(self, index: slice, /) -> bytes | bytearray | memoryview:
        """Return those bytes, or fewer at the end."""


class Cursor:
    """A place in a source; nothing is read, skipped or allocated past the source's end.

    What would go past it raises StateFileError, which names `what` was being read.
    """

    def __init__(self, source: Source, at: int = 0) -> None:
        self._source = source
        self.size = len(source)
        self.at = at

    @property
    def left(self) -> int:
        """How many bytes are left."""
        return self.size - self.at

    def skip(self, n_bytes: int, what: str) -> int:
        """Pass over so many bytes and return the offset of the first."""
        if n_bytes > self.left:
            missing = n_bytes - self.left
            raise StateFileError(
                f"the file ends at byte {self.size}, {missing} byte{'s'[: missing != 1]} before "
                f"the end of {what}"
            )
        start = self.at
        self.at += n_bytes
        return start

    def take(self, n_bytes: int, what: str) -> bytes | bytearray | memoryview:
        """Return so many bytes and pass over them."""
        start = self.skip(n_bytes, what)
        return read_slice(self._source, start, n_bytes)

    def peek(self, n_bytes: int) -> bytes:
        """Return so many bytes and stay; there must be as many left."""
        return bytes(read_slice(self._source, self.at, n_bytes))

    def u32(self, what: str) -> int:
        """Return one little-endian number and pass over it."""
        return int(struct.unpack("<I", self.take(4, what))[0])

    def expect_end(self) -> None:
        """Refuse a source that goes on."""
        if self.left:
            raise StateFileError(
                f"{self.left} byte{'s'[: self.left != 1]} too many: the state ends at byte "
                f"{self.at}, the file at byte {self.size}"
            )


def read_slice(source: Source, start: int, n_bytes: int) -> bytes | bytearray | memoryview:
    """Return those bytes; a source that became shorter than it was raises StateFileError."""
    data = source[start : start + n_bytes]
    if len(data) != n_bytes:
        raise StateFileError(f"the file became shorter than {start + n_bytes} bytes meanwhile")
    return data
