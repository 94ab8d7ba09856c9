"""The end of what a program writes to a pipe: bounded memory and no disk, however much it says."""

from __future__ import annotations

import os
import threading
from typing import IO, Final

TAIL_BYTES: Final = 64 * 1024
_END_WAIT_S: Final = 1.0


class OutputTail:
    """Reads a pipe to its end in a thread, which closes it, and keeps the last `TAIL_BYTES`."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._tail = b""
        self._closed = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._pipe as pipe:
            while not self._closed and (data := os.read(pipe.fileno(), TAIL_BYTES)):
                self._tail = (self._tail + data)[-TAIL_BYTES:]

    def read(self) -> bytes:
        """Return the tail once the pipe has ended; what escaped may hold it open, so not later."""
        self._thread.join(_END_WAIT_S)
        return self._tail

    def close(self) -> None:
        """Read no more: whoever goes on writing gets SIGPIPE."""
        self._closed = True
