"""The daemon's look at shared memory: rows that a provider must write, marked before it runs.

Nothing checks shared rows on their way, and the decoder believes them; after a provider that ended
with status 0 without having written all of its rows it would answer from what lay there. So some
rows of each tensor are filled with a pattern that no cache has (in every type it decodes to NaN),
and looked at again afterwards.

By pread and pwrite: a mapping dies with SIGBUS when the decoder truncates its memory. What takes
neither (a dma-buf has mappings only) is left unmarked.

When such a handoff fails, its rows are filled with zeros: llama.cpp zeroes a new cache to keep what
is no number out of the cells that it masks (llama-kv-cache.cpp), and an erase leaves them as they
are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from onebitd.core.share_layout import ShareLayout, ShareTensor

_MARKED_ROWS: Final = 8
_FLOATS: Final = {"f32": "<f4", "f16": "<f2"}
_ZEROS: Final = bytes(1 << 20)


class SharedMemory:
    """Marks rows and finds those that are still marked.

    Args:
        fds: of the regions, in their order; they stay the caller's.
        layout: what lies where in them.
        n_tokens: positions 0 to n_tokens - 1 are going to be written; at most `layout.n_cells`.
    """

    def __init__(self, fds: Sequence[int], layout: ShareLayout, n_tokens: int) -> None:
        self._fds = fds
        self._layout = layout
        self._n_tokens = n_tokens
        self._positions = marked_positions(n_tokens)
        self._marked: list[tuple[ShareTensor, int]] = []

    def mark(self) -> bool:
        """Fill the rows; False if not all of them can be reached so. Blocks for a millisecond."""
        for tensor, position in self._rows():
            place = tensor.offset + position * tensor.row_size
            mark = b"\xff" * tensor.row_size
            try:
                written = os.pwrite(self._fds[tensor.region], mark, place)
            except OSError:
                return False
            self._marked.append((tensor, position))
            if written != tensor.row_size:
                return False
        return True

    def clear(self) -> bool:
        """Fill the rows of all positions with zeros; False if not all of them could be filled.

        Blocks as long as a copy does.
        """
        cleared = [self._clear(tensor) for tensor in self._layout.tensors]  # all that can be
        return all(cleared)

    def _clear(self, tensor: ShareTensor) -> bool:
        place, end = tensor.offset, tensor.offset + self._n_tokens * tensor.row_size
        try:
            while place < end:
                written = os.pwrite(self._fds[tensor.region], _ZEROS[: end - place], place)
                if not written:
                    return False
                place += written
        except OSError:
            return False
        return True

    def fault(self) -> str | None:
        """Say which row was not written, or holds what is no number; None when all is well."""
        for tensor, position in self._marked:
            place = tensor.offset + position * tensor.row_size
            where = f"layer {tensor.layer} {tensor.kind.upper()}, position {position}"
            try:
                row = os.pread(self._fds[tensor.region], tensor.row_size, place)
            except OSError as error:
                return f"{where}: it cannot be read: {error.strerror}"
            if len(row) != tensor.row_size or row.count(0xFF) == len(row):
                return f"{where}: it was not written"
            element = _FLOATS.get(tensor.type)
            if element is not None and not np.isfinite(np.frombuffer(row, element)).all():
                return f"{where}: it holds a value that is not finite"
        return None

    def _rows(self) -> Iterator[tuple[ShareTensor, int]]:
        for tensor in self._layout.tensors:
            for position in self._positions:
                yield tensor, position


def marked_positions(n_tokens: int) -> list[int]:
    """Return the first position, the last, and some between them."""
    last = n_tokens - 1
    return sorted({round(last * step / (_MARKED_ROWS - 1)) for step in range(_MARKED_ROWS)})
