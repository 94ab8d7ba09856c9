"""Open files as `core.state_cursor.Source`: read by pread, never mapped.

A page that somebody truncates away under a mapping is a SIGBUS, which no program survives.
"""

from __future__ import annotations

import os


class PreadSource:
    """An open file; its size is that of the beginning.

    Args:
        descriptor: stays the caller's.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: slice) -> bytes:
        start, stop, _ = index.indices(self.size)
        return os.pread(self.descriptor, max(0, stop - start), start)
