"""The tensors of a GGUF model file, as float32.

The file is mapped; a tensor is taken out of its quantization when it is asked for, and kept by
nobody. The `gguf` package knows the block formats. Its GGUFReader is not used: it makes an array
of each string of the vocabulary, which takes seconds, where `core.gguf_header` walks past them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from onebitd.core.gguf_header import GgufError, read_metadata
from onebitd.core.gguf_tensors import TensorInfo, read_tensors
from onebitd.core.python_packages import install_hint
from onebitd.prefill_llama import EXIT_START, EXIT_USAGE, PrefillError

Floats: TypeAlias = npt.NDArray[np.float32]

PIECE_VALUES: Final = 1 << 16
"""Values that are taken out of their quantization at a time: the temporaries stay in the cache."""


class ModelFile:
    """A GGUF, mapped for as long as the object lives.

    Raises:
        PrefillError: status 2, no GGUF that can be read; 3, the gguf package is missing.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._gguf = _import_gguf()
        try:
            with open(path, "rb") as file:
                if not os.fstat(file.fileno()).st_size:
                    raise GgufError("the file is empty, not a GGUF; fetch it again")
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._metadata = read_metadata(self._data)
            self._tensors = read_tensors(self._data, self._metadata)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise PrefillError(EXIT_USAGE, f"model {path}: {reason}") from error
        except GgufError as error:
            raise PrefillError(EXIT_USAGE, f"model {path}: {error}") from error

    @property
    def names(self) -> Sequence[str]:
        """The tensors' names, in the file's order."""
        return tuple(self._tensors)

    def dims(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, the longest run in memory first; PrefillError without it."""
        return self._info(name).shape

    def words(self, key: str) -> Sequence[int | float | bool | str]:
        """Return the values of a metadata key; empty without the key."""
        return self._metadata.pairs.get(key, ())

    def tensor(self, name: str) -> Floats:
        """Return a whole tensor.

        A matrix that maps n values to m has shape (m, n): `x @ tensor.T` applies it.
        """
        info = self._info(name)
        rows = self._floats(info, self._raw(info))
        return rows.reshape(info.shape[::-1])

    def rows(self, name: str, numbers: Sequence[int]) -> Floats:
        """Return some rows of a matrix, without the cost of the others."""
        info = self._info(name)
        return self._floats(info, self._raw(info)[list(numbers)])

    def _info(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise PrefillError(
                EXIT_START, f"model {self.path}: it has no tensor {name}; is it a whole model?"
            )
        return self._tensors[name]

    def _raw(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        """Return a tensor's bytes, shape (rows, bytes of a row); a view of the file."""
        try:
            values, size = self._gguf.GGML_QUANT_SIZES[self._type(info)]
        except (KeyError, ValueError) as error:
            raise self._unreadable(info) from error
        width, n_rows = info.shape[0], int(np.prod(info.shape[1:], dtype=np.int64))
        row_bytes = width // values * size
        if width % values or info.offset + n_rows * row_bytes > len(self._data):
            raise PrefillError(
                EXIT_USAGE,
                f"model {self.path}: tensor {info.name} does not fit the file; fetch it again",
            )
        flat = np.frombuffer(self._data, np.uint8, n_rows * row_bytes, info.offset)
        return flat.reshape(n_rows, row_bytes)

    def _floats(self, info: TensorInfo, raw: npt.NDArray[np.uint8]) -> Floats:
        """Take rows out of their quantization; shape (rows, values of a row)."""
        type_, width = self._type(info), info.shape[0]
        found = np.empty((len(raw), width), np.float32)
        step = max(1, PIECE_VALUES // width)
        try:
            for at in range(0, len(raw), step):
                # As one long row: the package goes through rows in small groups.
                piece = raw[at : at + step].reshape(1, -1)
                values = self._gguf.quants.dequantize(piece, type_)
                found[at : at + step] = values.reshape(-1, width)
        except NotImplementedError as error:
            raise self._unreadable(info) from error
        return found

    def _type(self, info: TensorInfo) -> Any:  # noqa: ANN401 - an enumeration of the package
        return self._gguf.GGMLQuantizationType(info.type)

    def _unreadable(self, info: TensorInfo) -> PrefillError:
        return PrefillError(
            EXIT_START,
            f"model {self.path}: tensor {info.name} is of ggml's type {info.type}, which the "
            "installed gguf package cannot read; take a newer one or another quantization",
        )


def _import_gguf() -> Any:  # noqa: ANN401 - a module
    """Return the gguf package; it is an extra, for this program alone."""
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        hint = install_hint("gguf", "onebit-provider(7), WORKED EXAMPLE, says how to get it")
        raise PrefillError(
            EXIT_START, f"the Python package gguf is not installed: {hint}"
        ) from error
    return gguf
