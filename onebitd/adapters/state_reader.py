"""Looks at every byte of one state file, by pread, with as many threads as help.

By pread, not by mapping: a page that somebody truncates away under a mapping is a SIGBUS, which no
daemon survives. Populating a fresh mapping was no faster either than the copy of pread.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

from onebitd.adapters.pread import PreadSource
from onebitd.core import state_check
from onebitd.core.errors import StateFileError
from onebitd.core.state_data import CHUNK_BYTES, Baseline, Piece
from onebitd.core.state_layout import Layout

OPEN_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
"""Whatever a provider left under a state file's name, it is opened without following or waiting."""
_MAX_THREADS: Final = 4
_AT_ONCE_BYTES: Final = 1 << 20
"""A file of up to so many bytes takes less than a millisecond, about what a thread costs."""
_BYTES_FOR_A_THREAD: Final = 16 << 20
"""A small file gains tenths of a millisecond by a second thread and may lose several: the kernel
may take the processor from the one that holds the interpreter's lock."""


def has_one_name(info: os.stat_result) -> bool:
    """Tell whether this is a regular file that nobody can reach by a second name."""
    return stat.S_ISREG(info.st_mode) and info.st_nlink == 1


def is_small(n_bytes: int) -> bool:
    """Tell whether a check takes no longer than another thread would need to begin with it."""
    return n_bytes <= _AT_ONCE_BYTES


class OpenFile(PreadSource):
    """An open state file, which `check` reads, a big one in some other thread.

    That thread takes the descriptor and closes it; a cancel may keep the thread from starting.

    Args:
        descriptor: of the file; it is the taker's to close.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self._untaken = [descriptor]  # list.pop is atomic: one of the two gets it
        self._left: deque[Piece] = deque()
        self._unwanted = False

    def take(self) -> int | None:
        """Return the descriptor, which is the taker's to close; None when it was taken before."""
        with contextlib.suppress(IndexError):
            return self._untaken.pop()
        return None

    def give_up(self) -> None:
        """Nobody waits for `check` any more: close the file, or have it end soon."""
        descriptor = self.take()
        if descriptor is not None:
            os.close(descriptor)
        self._unwanted = True
        self._left.clear()

    def check(
        self,
        layout: Layout,
        tokens: Sequence[int],
        swa_window: int | None,
        baseline: Baseline | None,
    ) -> None:
        """Do what `state_check.check` does; blocks for as long as the reading takes.

        Raises:
            StateFileError: the refusal that comes first in the file.
            OSError: it cannot be read.
        """
        descriptor = self.take()
        if descriptor is None:
            return  # a cancel came first; nobody looks at this answer
        try:
            plan = state_check.plan(self, layout, tokens, swa_window=swa_window, baseline=baseline)
            self._judge_all(plan)
        finally:
            os.close(descriptor)

    def _judge_all(self, plan: state_check.Plan) -> None:
        left = self._left = deque(plan.pieces)
        if self._unwanted:
            return
        refusals: list[tuple[int, Exception]] = []

        def work() -> None:
            buffer = memoryview(bytearray(CHUNK_BYTES))
            while True:
                try:
                    piece = left.popleft()  # atomic, and in file order
                except IndexError:
                    return
                try:
                    self._judge(plan, piece, buffer[: piece.n_bytes])
                except (StateFileError, OSError, MemoryError) as error:
                    refusals.append((piece.offset, error))
                    left.clear()  # what comes before it in the file is in somebody's hands

        threads = [threading.Thread(target=work, daemon=True) for _ in range(_helpers(self.size))]
        started = []
        with contextlib.suppress(RuntimeError):  # no more threads to be had: fewer will do
            for thread in threads:
                thread.start()
                started.append(thread)
        work()
        for thread in started:
            thread.join()
        if refusals:
            raise min(refusals, key=lambda refusal: refusal[0])[1]

    def _judge(self, plan: state_check.Plan, piece: Piece, buffer: memoryview) -> None:
        if os.preadv(self.descriptor, [buffer], piece.offset) != piece.n_bytes:
            raise StateFileError("the file became shorter while it was checked")
        plan.judge(piece, buffer)


def _helpers(n_bytes: int) -> int:
    """Return how many threads to start beside the one that asks."""
    wanted = min(_MAX_THREADS, len(os.sched_getaffinity(0)), n_bytes // _BYTES_FOR_A_THREAD)
    return max(0, wanted - 1)
