"""The metadata at the start of a GGUF model file, as far as onebitd needs it.

Format: the GGUF specification in ggml (`docs/gguf.md`), versions 2 and 3, little endian:

    "GGUF", u32 version, u64 n_tensors, u64 n_pairs, then n_pairs x (string key, u32 type, value)
    string: u64 n_bytes, the bytes; array: u32 type, u64 count, the values

Key names are llama.cpp's (`src/llama-arch.cpp`). Arrays are passed over, not built.

Cost: the strings of a vocabulary are walked one by one, as nothing says where they end: 262
thousand tokens take about 0.1 s. The caller opens and closes the file; an mmap of the whole of it
is cheap, as only the metadata is touched. No view of the buffer is kept.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from onebitd.core.errors import OnebitError

if TYPE_CHECKING:
    import mmap

_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_KEY_BYTES = 65535  # the specification's limit
_MAX_NAME_BYTES = 1 << 16
_MAX_PAIRS = 1 << 16  # real files have tens; the walk of a broken one must end soon
_MAX_STRINGS = 1 << 24  # of one array; the largest vocabularies have some 10**5
_KEPT_VALUES = 4096  # of an array of numbers; a per-layer pattern is as long as the model is deep

# Architectures whose whole memory is recurrent (llama.cpp, llm_arch_is_recurrent).
_RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
# Groups of keys that only models with a recurrent part have.
_RECURRENT_GROUPS = frozenset({"ssm", "wkv", "shortconv", "kda"})
# Windows that llama.cpp supplies where the file has no key (src/models/gemma2.cpp, llama4.cpp).
_SUPPLIED_WINDOWS = {"gemma2": 4096, "llama4": 8192}

_FETCH_AGAIN = "the file is cut off or damaged, fetch it again"

_Value: TypeAlias = int | float | bool | str
_Buffer: TypeAlias = "bytes | bytearray | memoryview | mmap.mmap"


@dataclass(frozen=True, slots=True)
class Metadata:
    """Every key of a GGUF, for whoever needs more than `GgufHeader` says.

    Attributes:
        version: of the file format.
        n_tensors: how many descriptions of tensors follow.
        pairs: the values by key, a scalar as a sequence of one; an array's first 4096 numbers, and
            of an array of strings none.
        counts: how many values each key has in the file.
        end: the first byte after the pairs.
    """

    version: int
    n_tensors: int
    pairs: dict[str, Sequence[_Value]]
    counts: dict[str, int]
    end: int


class GgufError(OnebitError):
    """The model file is not a GGUF that can be read; the message tells what is wrong with it."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF says about its model. Counts are None where the file does not say.

    Attributes:
        version: of the file format.
        architecture: `general.architecture`, e.g. `llama`, `gemma3`.
        name: `general.name`.
        block_count: layers, those of a multi-token head included.
        context_length: tokens the model was trained with.
        sliding_window: in tokens, the largest where it differs by layer; None without one.
        is_recurrent: the whole memory is a recurrent state.
        is_hybrid: recurrent state beside attention.
        n_vocab: length of the token list.
        nextn_predict_layers: layers of a multi-token prediction head, 0 without one.
        head_dim: values of one head of K, None where it is not said or differs by layer.
    """

    version: int
    architecture: str
    name: str | None
    block_count: int | None
    context_length: int | None
    sliding_window: int | None
    is_recurrent: bool
    is_hybrid: bool
    n_vocab: int | None
    nextn_predict_layers: int
    head_dim: int | None = None


def read(buf: _Buffer) -> GgufHeader:
    """Read the metadata of a GGUF.

    Args:
        buf: the file, or a beginning of it that holds all its metadata.

    Raises:
        GgufError: not a GGUF, another version or byte order, cut, or a field that cannot be.
            Never anything else, whatever the bytes.
    """
    found = read_metadata(buf)
    return _header(found.version, found.pairs, found.counts)


def read_metadata(buf: _Buffer) -> Metadata:
    """Read every pair of the metadata; see `read`."""
    reader = Reader(buf)
    version = _version(reader)
    n_tensors = reader.u64("the tensor count")
    n_pairs = reader.u64("the metadata count")
    if n_pairs > min(_MAX_PAIRS, reader.left // 13):
        raise GgufError(
            f"{n_pairs} metadata pairs do not fit the {len(buf)} bytes there are; {_FETCH_AGAIN}"
        )
    pairs: dict[str, Sequence[_Value]] = {}
    counts: dict[str, int] = {}
    for _ in range(n_pairs):
        key = reader.string("a metadata key", _MAX_KEY_BYTES)
        pairs[key], counts[key] = reader.values(key)
    return Metadata(version, n_tensors, pairs, counts, reader.at)


def _version(reader: Reader) -> int:
    start = reader.take(min(4, reader.left), "the magic")
    if start != b"GGUF":
        raise GgufError(f"not a GGUF file: starts with {start!r}, not b'GGUF'")
    version = reader.u32("the version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        why = "it is big-endian" if swapped in (2, 3) else "2 and 3 are known"
        raise GgufError(f"GGUF version {version} cannot be read: {why}")
    return version


def _header(version: int, pairs: dict[str, Sequence[_Value]], counts: dict[str, int]) -> GgufHeader:
    architecture = _text(pairs, "general.architecture")
    if not architecture:
        raise GgufError("the metadata has no general.architecture")
    prefix = f"{architecture}."
    groups = {key[len(prefix) :].partition(".")[0] for key in pairs if key.startswith(prefix)}
    recurrent = architecture in _RECURRENT
    windows = _numbers(pairs, f"{prefix}attention.sliding_window")
    if not windows:
        windows = [_SUPPLIED_WINDOWS.get(architecture, 0)]
    return GgufHeader(
        version=version,
        architecture=architecture,
        name=_text(pairs, "general.name"),
        block_count=_number(pairs, f"{prefix}block_count"),
        context_length=_number(pairs, f"{prefix}context_length"),
        sliding_window=max(0, *windows) or None,
        is_recurrent=recurrent,
        is_hybrid=not recurrent and bool(groups & _RECURRENT_GROUPS),
        n_vocab=counts.get("tokenizer.ggml.tokens", _number(pairs, f"{prefix}vocab_size")),
        nextn_predict_layers=max(0, _number(pairs, f"{prefix}nextn_predict_layers") or 0),
        head_dim=_head_dim(pairs, prefix),
    )


def _head_dim(pairs: dict[str, Sequence[_Value]], prefix: str) -> int | None:
    """Return `attention.key_length`, which llama.cpp takes to be this quotient where it is missing.

    A window's layers may have heads of their own (`key_length_swa`); then there is no one answer.
    """
    lengths = {
        *_numbers(pairs, f"{prefix}attention.key_length"),
        *_numbers(pairs, f"{prefix}attention.key_length_swa"),
    }
    if not lengths:
        heads = set(_numbers(pairs, f"{prefix}attention.head_count"))
        width = _number(pairs, f"{prefix}embedding_length")
        lengths = {width // count for count in heads if count > 0} if width else set()
    return lengths.pop() if len(lengths) == 1 and 0 not in lengths else None


def _text(pairs: dict[str, Sequence[_Value]], key: str) -> str | None:
    values = pairs.get(key, ())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else None


def _numbers(pairs: dict[str, Sequence[_Value]], key: str) -> list[int]:
    return [value for value in pairs.get(key, ()) if isinstance(value, int)]


def _number(pairs: dict[str, Sequence[_Value]], key: str) -> int | None:
    """Return a count; of one that differs by layer, the largest."""
    return max(_numbers(pairs, key), default=None)


class Reader:
    """A place in the buffer; reads are checked against the bytes left, or raise GgufError."""

    def __init__(self, buf: _Buffer, at: int = 0) -> None:
        self._buf = buf
        self._size = len(buf)
        self.at = at

    @property
    def left(self) -> int:
        return self._size - self.at

    def skip(self, n_bytes: int, what: str) -> int:
        start = self.at
        if n_bytes > self._size - start:
            raise GgufError(
                f"the metadata is cut: {what} at byte {start} needs {n_bytes} bytes, "
                f"{self._size - start} are there; {_FETCH_AGAIN}"
            )
        self.at = start + n_bytes
        return start

    def take(self, n_bytes: int, what: str) -> bytes:
        start = self.skip(n_bytes, what)
        return bytes(self._buf[start : start + n_bytes])

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def string(self, what: str, most_bytes: int) -> str:
        """Read a string; of one longer than `most_bytes`, the beginning."""
        n_bytes = self.u64(what)
        start = self.skip(n_bytes, what)
        text = bytes(self._buf[start : start + min(n_bytes, most_bytes)])
        return text.decode(errors="replace")

    def values(self, key: str) -> tuple[Sequence[_Value], int]:
        """Read a value: what is kept of it, and how long it is (1 for a scalar)."""
        type_, count = self.u32(key), 1
        if type_ == _ARRAY:
            type_, count = self.u32(key), self.u64(key)
            if type_ == _STRING:
                self._skip_strings(count, key)
                return (), count
        elif type_ == _STRING:
            return (self.string(key, _MAX_NAME_BYTES),), 1
        if type_ not in _SCALARS:
            raise GgufError(f"{key}: value type {type_} is not known")
        letter = _SCALARS[type_]
        start = self.skip(count * struct.calcsize(f"<{letter}"), key)
        kept = f"<{min(count, _KEPT_VALUES)}{letter}"
        return struct.unpack(kept, self._buf[start : start + struct.calcsize(kept)]), count

    def _skip_strings(self, count: int, key: str) -> None:
        """Pass over an array of strings, as fast as Python can: vocabularies are long."""
        if count > min(_MAX_STRINGS, self.left // 8):
            raise GgufError(
                f"{key}: {count} strings do not fit the {self.left} bytes left; {_FETCH_AGAIN}"
            )
        unpack, buf, at = struct.Struct("<Q").unpack_from, self._buf, self.at
        last = self._size - 8
        for number in range(count):
            if at > last:
                raise GgufError(f"{key}: cut at string {number} of {count}; {_FETCH_AGAIN}")
            at += 8 + unpack(buf, at)[0]
        self.at = min(at, self._size)
        self.skip(at - self.at, key)
