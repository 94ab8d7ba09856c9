"""Copies of real GGUF models whose layers hold float32: what an exact engine is measured against.

llama.cpp multiplies a quantized matrix with activations that it rounds to 8 bits. With float32
weights it rounds nothing, so two engines that compute the same agree to the rounding of the cache.
The token embedding stays as it is: both engines look rows up there, and looking up is exact.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import gguf
import gguf.quants
import numpy as np
import numpy.typing as npt

from onebitd.core.gguf_header import read_metadata
from onebitd.core.gguf_tensors import TensorInfo, read_tensors
from tests.llama_builds import LlamaModel

_ALIGNMENT = 32
_EMBEDDING = "token_embd.weight"


def write_float_copy(model: LlamaModel, path: Path) -> LlamaModel:
    """Write a copy of a model with float32 layers, its metadata byte for byte, to `path`."""
    with model.path.open("rb") as file, path.open("wb") as out:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        metadata = read_metadata(data)
        tensors = list(read_tensors(data, metadata).values())
        out.write(data[: metadata.end])
        offset = 0
        for tensor in tensors:
            type_ = tensor.type if tensor.name == _EMBEDDING else gguf.GGMLQuantizationType.F32
            name = tensor.name.encode()
            out.write(struct.pack(f"<Q{len(name)}sI", len(name), name, len(tensor.shape)))
            out.write(struct.pack(f"<{len(tensor.shape)}QIQ", *tensor.shape, type_, offset))
            offset += -(-_bytes_of(tensor, type_) // _ALIGNMENT) * _ALIGNMENT
        for tensor in tensors:
            out.write(bytes(-out.tell() % _ALIGNMENT))
            raw = _raw(data, tensor)
            if tensor.name == _EMBEDDING:
                raw.tofile(out)
            else:
                type_ = gguf.GGMLQuantizationType(tensor.type)
                gguf.quants.dequantize(raw.reshape(1, -1), type_).astype("<f4").tofile(out)
    return LlamaModel(f"{model.name}-f32", path, model.swa)


def _bytes_of(tensor: TensorInfo, type_: int) -> int:
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type_)]
    return int(np.prod(tensor.shape)) // values * size


def _raw(data: mmap.mmap, tensor: TensorInfo) -> npt.NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8, _bytes_of(tensor, tensor.type), tensor.offset)
