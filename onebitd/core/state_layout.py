"""The shapes of llama.cpp sequence-state files: what a layout is, and a file as far as it was read.

The format is in the docstring of `state_file`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

_TYPE_NAMES = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 20: "iq4_nl",
    30: "bf16",
}  # fmt: skip

SLIDING = "sliding window"
KV_NAMES = ("attention", SLIDING)
"""What messages call the first kv section and the second."""
RECURRENT = "recurrent state"

Ints: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Rows:
    """One tensor as the file holds it: a header and one row of `row_size` bytes for each cell."""

    type: int
    row_size: int

    def data_bytes(self, cells: int) -> int:
        """Return the size of the rows of so many cells, without the 12 bytes of header."""
        return self.row_size * cells

    def header(self) -> bytes:
        """Return the 12 bytes that stand before the rows."""
        return struct.pack("<iQ", self.type, self.row_size)


@dataclass(frozen=True, slots=True)
class Channels:
    """A transposed V: for each of `n_embd_v_gqa` channels one element for each cell."""

    type: int
    el_size: int
    n_embd_v_gqa: int

    def data_bytes(self, cells: int) -> int:
        """Return the size of the data of so many cells, without the 12 bytes of header."""
        return self.el_size * self.n_embd_v_gqa * cells

    def header(self) -> bytes:
        """Return the 12 bytes that stand before the elements."""
        return struct.pack("<iII", self.type, self.el_size, self.n_embd_v_gqa)


Tensor: TypeAlias = Rows | Channels
Part: TypeAlias = Literal["K", "V", "R", "S"]


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
    """Where the data of one tensor lies in the file.

    Attributes:
        what: what messages call it, `sliding window layer 3 K`.
        offset: of its first byte in the file, behind the 12 bytes of its header.
        part: K or V of an attention layer, R or S row of a recurrent state.
        layer: counted from 0 within the section (for R and S within their rows): the file does
            not say which layer of the model that is.
    """

    what: str
    offset: int
    cells: int
    tensor: Tensor
    part: Part
    layer: int

    @property
    def n_bytes(self) -> int:
        """Return the size of the data."""
        return self.tensor.data_bytes(self.cells)


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The cells of one section, or of one stream of it.

    Attributes:
        pos: int32 positions, shape (count,).
        n_seq_id: 1 for each attention cell, 0 for a recurrent one; shape (count,).
        ext: int32, shape (count, ext_bytes / 4).
        seq_id: the slot's number in the decoder that saved it, which nobody looks at; shape
            (count,), of a recurrent cell, which has none, (0,).
    """

    pos: Ints
    n_seq_id: Ints
    ext: Ints
    seq_id: Ints


@dataclass(frozen=True, slots=True, eq=False)
class ReadSection:
    """One section of one file, or one stream of it.

    Attributes:
        what: what messages call the section, the same for all its streams.
        shape: the section's, also of a stream without cells.
        blocks: K of each layer, then V of each layer; R rows, then S rows. None without cells.
        stream: 0 unless the decoder keeps its slots apart (-np 2 or more, without -kvu). Then
            each section has a stream a slot, and the saved slot's alone has cells.
    """

    what: str
    shape: Section
    cells: Cells
    blocks: tuple[Block, ...]
    stream: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class StateFile:
    """A state file as far as it was read: everything but the data, which stays where it is.

    Attributes:
        size: of the file, in bytes.
        packed: the token list is of the packed kind.
        tokens: int32 ids, shape (n_tokens,).
        sections: one for each stream of each section, in file order.
        n_checkpoints: entries of the SCKP appendix, which is skipped; None without one.
        sections_end: where the appendix begins, or the file ends.
    """

    size: int
    version: int
    packed: bool
    tokens: Ints
    sections: tuple[ReadSection, ...]
    n_checkpoints: int | None
    sections_end: int

    @property
    def layout(self) -> Layout:
        """The part that does not depend on the prompt, nor on the number of streams."""
        shapes = tuple(part.shape for part in self.sections if part.stream == 0)
        return Layout(self.version, self.packed, shapes)

    @property
    def n_stream(self) -> int:
        """The number of streams of each attention section; 1 without one."""
        return 1 + max(part.stream for part in self.sections)


def section_names(kinds: Sequence[str]) -> list[str]:
    """Return what messages call sections of these kinds, `kv` or `recr`, in file order."""
    names = iter(KV_NAMES)
    return [RECURRENT if kind == "recr" else next(names) for kind in kinds]


def layout_names(sections: Sequence[Section]) -> list[str]:
    """Return what messages call these sections."""
    return section_names(["kv" if isinstance(part, KvSection) else "recr" for part in sections])


def tensor_places(name: str, shape: Section) -> Iterator[tuple[str, Part, int, Tensor]]:
    """Yield what, part, layer and tensor of each block of a section, in file order.

    Args:
        name: what messages call the section, behind the stream if there are several.
        shape: the section's.
    """
    if isinstance(shape, RecrSection):
        half = len(shape.rows) // 2
        for index, row in enumerate(shape.rows):
            part: Part = "R" if index < half else "S"
            layer = index if index < half else index - half
            yield f"{name}, {part} {layer}", part, layer, row
        return
    prefix = "" if name == KV_NAMES[0] else f"{name} "
    for layer, k in enumerate(shape.k):
        yield f"{prefix}layer {layer} K", "K", layer, k
    for layer, v in enumerate(shape.v):
        yield f"{prefix}layer {layer} V", "V", layer, v


def type_name(number: int) -> str:
    """Return ggml's name of a tensor type, or the number if it is no cache type."""
    return _TYPE_NAMES.get(number, str(number))


def _types(tensors: Sequence[Tensor]) -> str:
    return "/".join(dict.fromkeys(type_name(tensor.type) for tensor in tensors)) or "none"
