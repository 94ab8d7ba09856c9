"""What the kernel tells about the names in one directory (inotify(7)).

Polling would miss a file that was written in place within a millisecond; the kernel's queue does
not.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from typing import Final

MODIFY: Final = 0x2
CLOSE_WRITE: Final = 0x8
MOVED_TO: Final = 0x80
CREATE: Final = 0x100
_HEAD: Final = struct.Struct("iIII")
_READ_BYTES: Final = 64 * 1024


class DirectoryWatch:
    """Queues what happens to the names of a directory; `close` it.

    Where there is no inotify (none left for this user), nothing is seen and `works` is False.

    Args:
        directory: to be watched.
        mask: which events, of the constants of this module.
    """

    def __init__(self, directory: Path, mask: int) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self._descriptor: int = library.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        self.works = self._descriptor >= 0
        if self.works:
            added = library.inotify_add_watch(
                self._descriptor, os.fsencode(directory), ctypes.c_uint32(mask)
            )
            self.works = added >= 0

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is something to `read`."""
        return self._descriptor

    def read(self) -> list[tuple[int, str]]:
        """Return (mask, name) of what happened since the last time; never waits."""
        events: list[tuple[int, str]] = []
        while self.works:
            try:
                data = os.read(self._descriptor, _READ_BYTES)
            except BlockingIOError:
                break
            at = 0
            while at < len(data):
                _, mask, _, length = _HEAD.unpack_from(data, at)
                at += _HEAD.size
                events.append((mask, os.fsdecode(data[at : at + length].rstrip(b"\0"))))
                at += length
        return events

    def close(self) -> None:
        """Give the descriptor back."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self.works = False
