"""Where the tensors of a GGUF model file are: the list behind its metadata.

Format: the GGUF specification in ggml (`docs/gguf.md`), little endian, for each tensor

    string name, u32 n_dims, u64 dims[n_dims] (a row's length first), u32 type, u64 offset

and then, at the next multiple of `general.alignment` (32 without the key), the data, from which
the offsets count. What a type's bytes mean is ggml's affair, not this module's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from onebitd.core.gguf_header import GgufError, Metadata, Reader

if TYPE_CHECKING:
    import mmap

_MAX_TENSORS: Final = 1 << 18
_MAX_DIMS: Final = 4
_MAX_NAME_BYTES: Final = 256
_LEAST_BYTES: Final = 32  # of a description
_ALIGNMENT_KEY: Final = "general.alignment"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor.

    Attributes:
        shape: values in each dimension, the longest run in memory first: a matrix that maps `n`
            values to `m` is (n, m).
        type: ggml's number.
        offset: of its first byte, from the beginning of the file.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


def read_tensors(buf: bytes | memoryview | mmap.mmap, metadata: Metadata) -> dict[str, TensorInfo]:
    """Read the list of tensors.

    Args:
        buf: the file, or a beginning of it that holds the whole list.
        metadata: what `read_metadata` found in it.

    Raises:
        GgufError: the list is cut, or says what cannot be. Whether the data is all there is for
            whoever knows the types' sizes to see.
    """
    reader = Reader(buf, metadata.end)
    if metadata.n_tensors > min(_MAX_TENSORS, reader.left // _LEAST_BYTES):
        raise GgufError(f"{metadata.n_tensors} tensors do not fit the {len(buf)} bytes there are")
    found = [_read_one(reader) for _ in range(metadata.n_tensors)]
    alignment = metadata.pairs.get(_ALIGNMENT_KEY, (32,))[0]
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
        raise GgufError(f"{_ALIGNMENT_KEY}: {alignment} cannot be")
    start = -(-reader.at // alignment) * alignment
    return {
        name: TensorInfo(name, shape, type_, start + offset) for name, shape, type_, offset in found
    }


def _read_one(reader: Reader) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.string("a tensor's name", _MAX_NAME_BYTES)
    n_dims = reader.u32(name)
    if not 1 <= n_dims <= _MAX_DIMS:
        raise GgufError(f"tensor {name}: {n_dims} dimensions cannot be")
    shape = tuple(reader.u64(name) for _ in range(n_dims))
    return name, shape, reader.u32(name), reader.u64(name)
