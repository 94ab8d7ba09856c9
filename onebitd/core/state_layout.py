"""The shapes of llama.cpp sequence-state files: what a layout is, and a file as far as it was read.

The format is in the docstring of `state_file`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

_TYPE_NAMES = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 20: "iq4_nl",
    30: "bf16",
}  # fmt: skip

SLIDING = "sliding window"
KV_NAMES = ("attention", SLIDING)
"""What messages call the first kv section and the second."""

Ints: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Rows:
    """One tensor as the file holds it: a header and one row of `row_size` bytes for each cell."""

    type: int
    row_size: int

    def data_bytes(self, cells: int) -> int:
        """Return the size of the rows of so many cells, without the 12 bytes of header."""
        return self.row_size * cells


@dataclass(frozen=True, slots=True)
class Channels:
    """A transposed V: for each of `n_embd_v_gqa` channels one element for each cell."""

    type: int
    el_size: int
    n_embd_v_gqa: int

    def data_bytes(self, cells: int) -> int:
        """Return the size of the data of so many cells, without the 12 bytes of header."""
        return self.el_size * self.n_embd_v_gqa * cells


Tensor: TypeAlias = Rows | Channels


@dataclass(frozen=True, slots=True)
class KvSection:
    """The shape of an attention cache.

    Attributes:
        ext_bytes: 0, 8 (x, y) or 12 (x, y, token id) bytes more in each cell.
        v_trans: True without flash attention: V is stored as `Channels`.
        n_rot_k, n_rot_v: size of the rotation of quantized rows, 0 without; None before version 4,
            which does not record it.
        k, v: one tensor for each layer of this cache; `v` is empty in a model with MLA.
    """

    ext_bytes: int
    v_trans: bool
    n_rot_k: int | None
    n_rot_v: int | None
    k: tuple[Rows, ...]
    v: tuple[Tensor, ...]

    def bytes_for(self, cells: int) -> int:
        """Return the size of the section with so many cells."""
        if not cells:
            return 8
        head = 16 + (0 if self.n_rot_k is None else 8) + (12 + self.ext_bytes) * cells
        return head + sum(12 + tensor.data_bytes(cells) for tensor in (*self.k, *self.v))

    def describe(self) -> str:
        """Return e.g. `30 layers, K f16, V f16`."""
        words = [f"{len(self.k)} layers"]
        words += [f"K {_types(self.k)}"] if self.k else []
        words += [f"V {_types(self.v)}"] if self.v else ["no V"] if self.k else []
        words += ["V transposed"] if self.v_trans else []
        words += [f"{self.ext_bytes} bytes of position"] if self.ext_bytes else []
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class RecrSection:
    """The shape of a recurrent state: one cell.

    Attributes:
        n_layer: every layer of the model, with a state or without.
        rows: the R rows, then as many S rows, of the layers that have a state (which ones they are
            is not in the file).
    """

    n_layer: int
    rows: tuple[Rows, ...]

    def bytes_for(self, cells: int) -> int:
        """Return the size of the section, the same for any number of tokens but none."""
        return 20 + sum(12 + row.row_size for row in self.rows) if cells else 12

    def describe(self) -> str:
        """Return e.g. `36 rows, f32`."""
        return f"{len(self.rows)} rows, {_types(self.rows)}"


Section: TypeAlias = KvSection | RecrSection


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything in a decoder's state files that does not depend on the prompt.

    Attributes:
        version: LLAMA_STATE_SEQ_VERSION, 2 to 4.
        packed_tokens: the decoder writes, and so reads, the packed token block. Every decoder
            reads a plain one.
        sections: in file order.
    """

    version: int
    packed_tokens: bool
    sections: tuple[Section, ...]

    @property
    def may_have_checkpoints(self) -> bool:
        """True if builds of this version append context checkpoints for this kind of memory."""
        return self.version >= 4 and bool(self.partial)

    @property
    def partial(self) -> tuple[Section, ...]:
        """The sections that a context checkpoint holds: SWA cache and recurrent state."""
        kv = [section for section in self.sections if isinstance(section, KvSection)]
        recr = [section for section in self.sections if isinstance(section, RecrSection)]
        return (*kv[1:], *recr)

    def bytes_for(self, n_tokens: int) -> int:
        """Return the size of a state of so many tokens, plainly listed, without checkpoints.

        An SWA section may hold fewer cells, so this is the most such a file can take.
        """
        return 12 + 4 * n_tokens + sum(section.bytes_for(n_tokens) for section in self.sections)

    def describe(self) -> str:
        """Return one line for logs and status: `v2: attention 30 layers, K f16, V f16`."""
        parts = zip(layout_names(self.sections), self.sections, strict=True)
        return f"v{self.version}: " + "; ".join(f"{name} {part.describe()}" for name, part in parts)


@dataclass(frozen=True, slots=True)
class Block:
    """Where the data of one tensor lies in the file."""

    what: str
    offset: int
    cells: int
    tensor: Tensor

    @property
    def n_bytes(self) -> int:
        """Return the size of the data."""
        return self.tensor.data_bytes(self.cells)


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The cells of one section.

    Attributes:
        pos: int32 positions, shape (count,).
        n_seq_id: 1 for each attention cell, 0 for a recurrent one; shape (count,).
        ext: int32, shape (count, ext_bytes / 4).
    """

    pos: Ints
    n_seq_id: Ints
    ext: Ints


@dataclass(frozen=True, slots=True, eq=False)
class ReadSection:
    """One section of one file."""

    what: str
    shape: Section
    cells: Cells
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StateFile:
    """A state file as far as it was read: everything but the data, which stays where it is.

    Attributes:
        tokens: int32 ids, shape (n_tokens,).
        n_checkpoints: entries of the SCKP appendix, which is skipped; None without one.
    """

    size: int
    version: int
    packed: bool
    tokens: Ints
    sections: tuple[ReadSection, ...]
    n_checkpoints: int | None

    @property
    def layout(self) -> Layout:
        """The part that does not depend on the prompt."""
        return Layout(self.version, self.packed, tuple(part.shape for part in self.sections))


def section_names(kinds: Sequence[str]) -> list[str]:
    """Return what messages call sections of these kinds, `kv` or `recr`, in file order."""
    names = iter(KV_NAMES)
    return ["recurrent state" if kind == "recr" else next(names) for kind in kinds]


def layout_names(sections: Sequence[Section]) -> list[str]:
    """Return what messages call these sections."""
    return section_names(["kv" if isinstance(part, KvSection) else "recr" for part in sections])


def type_name(number: int) -> str:
    """Return ggml's name of a tensor type, or the number if it is no cache type."""
    return _TYPE_NAMES.get(number, str(number))


def _types(tensors: Sequence[Tensor]) -> str:
    return "/".join(dict.fromkeys(type_name(tensor.type) for tensor in tensors)) or "none"
