"""What the decoder's state files look like, and whether this engine can write one.

The file does not come from the GGUF alone: the state's version belongs to the decoder's build, the
types of K and V and the transposed V to its arguments. Whoever has a file that the decoder saved
(`ONEBIT_STATE_EXAMPLE`, `--like`) reads them there and guesses nothing.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from onebitd.core import state_file
from onebitd.core.errors import StateFileError
from onebitd.core.state_layout import (
    KV_NAMES,
    Channels,
    KvSection,
    Layout,
    Rows,
    Tensor,
    type_name,
)
from onebitd.core.state_values import F16, FLOAT_BYTES, decode, encode
from onebitd.prefill_llama import EXIT_LAYOUT, PrefillError, open_at_once
from onebitd.prefill_numpy.engine import LayerRows
from onebitd.prefill_numpy.shape import Shape

_EXAMPLE: Final = "the decoder's example (--like, ONEBIT_STATE_EXAMPLE)"
_WRITABLE: Final = ", ".join(map(type_name, FLOAT_BYTES))


def default_layout(shape: Shape, version: int) -> Layout:
    """Return what a decoder with f16 caches and flash attention writes.

    Args:
        version: LLAMA_STATE_SEQ_VERSION of its build.
    """
    n_rot = 0 if version >= 4 else None
    size = FLOAT_BYTES[F16]

    def section(n_layer: int) -> KvSection:
        k = (Rows(F16, size * shape.row_k),) * n_layer
        v = (Rows(F16, size * shape.row_v),) * n_layer
        return KvSection(0, False, n_rot, n_rot, k, v)

    sections = [section(len(layers)) for layers in _caches(shape)]
    return Layout(version, packed_tokens=False, sections=tuple(sections))


def _caches(shape: Shape) -> list[list[int]]:
    """Return the layers of each section of a state: those without a window come first."""
    windowed = shape.layers(sliding=True)
    return [shape.layers(sliding=False), *([windowed] if windowed else [])]


def read_layout(path: str, shape: Shape) -> Layout:
    """Return the layout of a decoder's state file, if a cache of this model can have it.

    Raises:
        PrefillError: status 6 and a sentence that names the tensor or field.
    """
    try:
        with open(path, "rb", opener=open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise StateFileError("not a regular file")
            layout = state_file.parse(file.read()).layout
    except OSError as error:
        raise PrefillError(EXIT_LAYOUT, f"{_EXAMPLE} {path}: {error.strerror}") from error
    except StateFileError as error:
        raise PrefillError(EXIT_LAYOUT, f"{_EXAMPLE} {path}: {error}") from error
    try:
        _check(layout, shape)
    except StateFileError as error:
        raise PrefillError(
            EXIT_LAYOUT, f"the decoder's cache ({path}) cannot be written: {error}"
        ) from error
    return layout


def _check(layout: Layout, shape: Shape) -> None:
    caches = _caches(shape)
    if len(layout.sections) != len(caches):
        raise StateFileError(
            f"it has {len(layout.sections)} sections, {shape.architecture} has {len(caches)}"
        )
    for name, section, layers in zip(KV_NAMES, layout.sections, caches, strict=False):
        if not isinstance(section, KvSection):
            raise StateFileError("it has a recurrent state, and this engine only attention")
        if len(section.k) != len(layers):
            raise StateFileError(
                f"section {name}: {len(section.k)} layers, the model has {len(layers)}"
            )
        if not section.v:
            raise StateFileError(f"section {name}: it has no V")
        if section.ext_bytes:
            raise StateFileError(f"section {name}: its cells hold more than a position")
        for number, (k, v) in enumerate(zip(section.k, section.v, strict=True)):
            _check_tensor(f"{name} layer {number} K", k, shape.row_k)
            _check_tensor(f"{name} layer {number} V", v, shape.row_v)
        if section.n_rot_k or section.n_rot_v:
            raise StateFileError(f"section {name}: its rows are rotated, which only llama.cpp does")


def _check_tensor(what: str, tensor: Tensor, width: int) -> None:
    size = FLOAT_BYTES.get(tensor.type)
    if size is None:
        raise StateFileError(
            f"{what} is {type_name(tensor.type)}; this engine writes {_WRITABLE}: start the "
            "decoder without -ctk and -ctv"
        )
    if tensor.data_bytes(1) != size * width:
        raise StateFileError(
            f"{what}: {tensor.data_bytes(1)} bytes a position, the model has {size * width}"
        )


def layer_types(layout: Layout, shape: Shape) -> list[tuple[int, int]]:
    """Return the types of K and V for each layer of the model."""
    types = {
        layer: (k.type, v.type)
        for section, layers in zip(layout.sections, _caches(shape), strict=True)
        if isinstance(section, KvSection)
        for layer, k, v in zip(layers, section.k, section.v, strict=True)
    }
    return [types[number] for number in range(shape.n_layer)]


def tensor_data(
    layout: Layout, shape: Shape, cache: Sequence[LayerRows], n_tokens: int, swa_cells: int | None
) -> Iterator[bytes | memoryview]:
    """Yield the data of each tensor in the file's order: K of a section's layers, then V of them.

    Args:
        cache: the rows of each layer of the model, one for each token.
        swa_cells: the last positions that the section with a sliding window holds; None: all.
    """
    for section, layers in zip(layout.sections, _caches(shape), strict=True):
        assert isinstance(section, KvSection)  # noqa: S101 - `_check` saw to it
        windowed = layers == shape.layers(sliding=True)
        cells = min(n_tokens, swa_cells) if windowed and swa_cells is not None else n_tokens
        for k, layer in zip(section.k, layers, strict=True):
            yield _last_cells(k, cache[layer].k, cells)
        for v, layer in zip(section.v, layers, strict=True):
            yield _last_cells(v, cache[layer].v, cells)


def _last_cells(tensor: Tensor, rows: bytes, cells: int) -> bytes | memoryview:
    """Return the data of the last cells, transposed if the tensor is."""
    n_bytes = tensor.data_bytes(cells)
    last = memoryview(rows)[len(rows) - n_bytes :]
    if isinstance(tensor, Channels):
        plain = Rows(tensor.type, tensor.data_bytes(1))
        return encode(tensor.type, np.ascontiguousarray(decode(plain, last, cells).T))
    return last
