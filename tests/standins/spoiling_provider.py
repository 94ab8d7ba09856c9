"""A prefill provider that spoils what another one has computed: a device that corrupts silently.

It runs the program SPOIL_PROGRAM with its own arguments, and then, in every SPOIL_EVERY-th run
(counted in SPOIL_COUNT, a file; SPOIL_FIRST is the first that is bad), does SPOIL_HOW to one layer
(`@FILE` reads that anew each time):

    zero_row     one position's K is zero: the check refuses that
    stale_row    one position's K is that of the one before
    shift_layer  each position has the K and V of the one before
    scale_head   the first head's K is one percent too large

The state file's shape stays right, and but for zero_row every check of it passes. Rows must be f16,
with flash attention. SPOIL_LAYER and SPOIL_HEAD_DIM say which layer and how wide its head is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from onebitd.core import state_file
from onebitd.core.state_layout import Block

HOWS = ("zero_row", "stale_row", "shift_layer", "scale_head")


def spoil(data: bytearray, how: str, layer: int, head_dim: int) -> None:
    """Damage a state in place."""
    state = state_file.parse(bytes(data))
    blocks = [block for block in state.sections[0].blocks if block.layer == layer]
    assert blocks, f"no layer {layer}"
    for block in blocks:
        rows = _rows(data, block)
        if how == "shift_layer":
            rows[1:] = rows[:-1].copy()
        elif block.part == "K" and how == "zero_row":
            rows[len(rows) // 2] = 0
        elif block.part == "K" and how == "stale_row":
            rows[len(rows) // 2] = rows[len(rows) // 2 - 1]
        elif block.part == "K":
            head = rows[:, :head_dim]
            rows[:, :head_dim] = (head.astype(np.float32) * 1.01).astype(np.float16)


def _rows(data: bytearray, block: Block) -> npt.NDArray[np.float16]:
    found = np.frombuffer(data, np.float16, block.n_bytes // 2, block.offset)
    return found.reshape(block.cells, -1)


def install(directory: Path) -> Path:
    """Write a program that runs this module with the calling interpreter."""
    path = directory / "spoiling-provider"
    root = Path(__file__).resolve().parents[2]
    path.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(root)!r})\n"
        "from tests.standins.spoiling_provider import main\nsys.exit(main())\n"
    )
    path.chmod(0o755)
    return path


def is_due(count_file: Path, first: int, every: int) -> bool:
    """Count this run and say whether it is a bad one."""
    run = int(count_file.read_text()) if count_file.exists() else 0
    count_file.write_text(str(run + 1))
    return run % every == first


def main() -> int:
    """Run the other provider, then spoil; return the exit status."""
    environ = os.environ
    done = subprocess.run([environ["SPOIL_PROGRAM"], *sys.argv[1:]], check=False)
    every, first = int(environ.get("SPOIL_EVERY", "1")), int(environ.get("SPOIL_FIRST", "0"))
    due = is_due(Path(environ["SPOIL_COUNT"]), first, every)  # a run that failed counts too
    if due and done.returncode == 0:
        how = environ["SPOIL_HOW"]
        if how.startswith("@"):
            how = Path(how[1:]).read_text()
        out = Path(sys.argv[sys.argv.index("--out") + 1])
        data = bytearray(out.read_bytes())
        if how in HOWS:
            layer, head_dim = environ.get("SPOIL_LAYER", "0"), environ.get("SPOIL_HEAD_DIM", "2")
            spoil(data, how, int(layer), int(head_dim))
        out.write_bytes(data)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
