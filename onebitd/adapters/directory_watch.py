"""What the kernel tells about the names in directories (inotify(7)).

Polling would miss a file that was written in place within a millisecond; the kernel's queue does
not.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from typing import Final, NamedTuple

MODIFY: Final = 0x2
CLOSE_WRITE: Final = 0x8
MOVED_TO: Final = 0x80
CREATE: Final = 0x100
_HEAD: Final = struct.Struct("iIII")
_READ_BYTES: Final = 64 * 1024


class Event(NamedTuple):
    """Something that happened; `number` is what `add` returned for the directory."""

    number: int
    mask: int
    name: str


class DirectoryWatch:
    """Queues what happens to the names in some directories; `close` it.

    One for many directories in turn: the kernel takes 5 to 15 ms to close one (measured).
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        self._descriptor = -1

    def open(self) -> bool:
        """Take a descriptor, as `add` does; False where there is none to be had for this user."""
        if self._descriptor < 0:
            self._descriptor = self._library.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        return self._descriptor >= 0

    def add(self, directory: str | Path, mask: int) -> int | None:
        """Watch a directory.

        Args:
            directory: it may be removed later; that ends its watch.
            mask: which events, of the constants of this module.

        Returns:
            The number of the watch; None where there is none to be had for this user.
        """
        if not self.open():
            return None
        number: int = self._library.inotify_add_watch(
            self._descriptor, os.fsencode(directory), ctypes.c_uint32(mask)
        )
        return number if number >= 0 else None

    def remove(self, number: int) -> None:
        """Watch a directory no more."""
        self._library.inotify_rm_watch(self._descriptor, number)

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is something to `read`; after `add`."""
        return self._descriptor

    def read(self) -> list[Event]:
        """Return what happened since the last time; never waits."""
        events: list[Event] = []
        while self._descriptor >= 0:
            try:
                data = os.read(self._descriptor, _READ_BYTES)
            except BlockingIOError:
                break
            at = 0
            while at < len(data):
                number, mask, _, length = _HEAD.unpack_from(data, at)
                at += _HEAD.size
                name = os.fsdecode(data[at : at + length].rstrip(b"\0"))
                events.append(Event(number, mask, name))
                at += length
        return events

    def close(self) -> None:
        """Give the descriptor back; `add` would take a new one."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
