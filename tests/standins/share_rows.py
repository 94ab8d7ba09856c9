"""The rows of the tiny model, written into memory that a decoder shares; for provider.py.

Standard library only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.standins import tiny_state


def open_descriptors() -> list[int]:
    """Return the numbers of this process's descriptors."""
    with os.scandir("/proc/self/fd") as entries:
        found = {int(entry.name) for entry in entries}
    # The directory's own one is among them, and closed by now.
    return sorted(fd for fd in found if _is_open(fd))


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


class Rows:
    """What is to be written, and where.

    Args:
        header_file: the decoder's message.
        fds: the regions.
        ids: the prompt, less its last token.

    Exits with status 6 where the header is not that of the tiny model.
    """

    def __init__(self, header_file: str, fds: Sequence[int], ids: Sequence[int]) -> None:
        header: dict[str, Any] = json.loads(Path(header_file).read_text())
        self._tensors: list[dict[str, Any]] = header["tensors"]
        self._fds = fds
        self._rows = [tiny_state.row(digest) for digest in tiny_state.digests(ids)]
        wanted = {f"cache_{kind}_l{layer}" for layer in range(tiny_state.LAYERS) for kind in "kv"}
        for tensor in self._tensors:
            if tensor["row_size"] != tiny_state.ROW_BYTES or tensor["name"] not in wanted:
                raise SystemExit(6)

    def write(self, modes: Mapping[str, str]) -> None:
        """Write all of it, or what the modes leave; the last tensor comes last."""
        count = len(self._rows)
        positions = list(range(count // 2 if "half" in modes else count))
        if "nothing" in modes:
            return
        if "but" in modes:
            del positions[int(modes["but"])]
        for tensor in self._tensors:
            for position in positions:
                row = self._rows[position]
                if "nan" in modes and tensor is self._tensors[-1] and position == count - 1:
                    row = row[:-2] + b"\xff\x7e"
                place = tensor["offset"] + position * tensor["row_size"]
                os.pwrite(self._fds[tensor["region"]], row, place)
