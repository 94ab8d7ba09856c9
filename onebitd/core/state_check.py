"""Whether a state file may be given to a decoder: its layout, tokens, positions and values.

Why check at all: a file that is one byte short aborts llama-server, and some well-formed nonsense
(a negative position, a missing first cell, a NaN) makes it answer wrongly until it is restarted.

`plan` reads what describes the data and lists the pieces of the data; `Plan.judge` looks at one of
them, so that threads may share them. `check` does it all by itself.

Cost: every byte is read once, at most `CHUNK_BYTES` at a time. Most of the time is the kernel's
copy out of tmpfs; `python -m tests.bench check` measures all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onebitd.core.state_cursor import Source, read_slice
from onebitd.core.state_data import CHUNK_BYTES, Baseline, HeaderDiffers, Piece, judge, pieces_of
from onebitd.core.state_layout import Layout
from onebitd.core.state_walk import Walk, expect_cells, expect_tokens

__all__ = ["CHUNK_BYTES", "Plan", "check", "expect_cells", "expect_tokens", "plan"]


def check(
    buf: Source,
    layout: Layout,
    tokens: Sequence[int],
    *,
    swa_window: int | None = None,
    baseline: Baseline | None = None,
) -> None:
    """Refuse a file unless the decoder with this layout can be given it.

    It must hold exactly these tokens at positions 0..N-1 in order (a sliding window's tail of
    them may start anywhere in its ring), every field must be the layout's, it must end where its
    last section (or its context checkpoints) ends, and every value must be finite.

    Args:
        buf: the whole file. The walk reads each byte once and keeps none.
        layout: what `learn_layout` made of the decoder's own file.
        tokens: the N ids that were handed over: the prompt less its last.
        swa_window: the model's sliding window in tokens. An SWA section may then hold just the
            last min(N, window) cells or more, which is what llama-server saves. Without it, the
            section must hold all N: a tail that is too short would be silently wrong.
        baseline: what `state_baseline.learn_baseline` made of the decoder's own file. With it, no
            cell may be all zero, and no tensor's values far from the size of the decoder's own,
            unless the decoder's own are so too.

    Raises:
        StateFileError: a sentence that names section, layer and offset.
    """
    made = plan(buf, layout, tokens, swa_window=swa_window, baseline=baseline)
    for piece in made.pieces:
        made.judge(piece, read_slice(buf, piece.offset, piece.n_bytes))


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What is left to look at in a file whose description is in order.

    Attributes:
        pieces: in file order. They may be judged in any order, and by several threads at once if
            the source can be read so.
    """

    pieces: tuple[Piece, ...]
    _walk: Walk

    def judge(self, piece: Piece, data: bytes | bytearray | memoryview) -> None:
        """Refuse a piece; `data` are its bytes.

        Raises:
            StateFileError: as `check` does.
        """
        try:
            judge(self._walk.source, piece, data)
        except HeaderDiffers:
            self._walk.runs()
            raise  # only if the file was changed meanwhile: that has said it better


def plan(
    buf: Source,
    layout: Layout,
    tokens: Sequence[int],
    *,
    swa_window: int | None = None,
    baseline: Baseline | None = None,
) -> Plan:
    """Do the part of `check` that does not look at the data; see there.

    Raises:
        StateFileError: as `check` does.
    """
    walk = Walk(buf, layout, tokens, swa_window, baseline)
    runs = walk.quick_runs()
    if runs is None:
        runs = walk.runs()
    return Plan(tuple(piece for run in runs for piece in pieces_of(run)), walk)
