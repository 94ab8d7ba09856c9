"""The model file: whether the service's user can read it, and what its header says."""

from __future__ import annotations

import dataclasses
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Final

from onebitd.core import gguf_header
from onebitd.core.gguf_header import GgufError, GgufHeader, Metadata
from onebitd.doctor import sight
from onebitd.doctor.finding import Finding, failed, ok, warning
from onebitd.doctor.place import Place
from onebitd.surfaces.cli_text import mebibytes

_F16_BYTES: Final = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """What the header says.

    Attributes:
        bytes_per_token: of a state file as llama-server makes it without `-ctk` and `-ctv`; None
            where the header does not say enough.
    """

    header: GgufHeader
    bytes_per_token: int | None


def read(path: str) -> Model:
    """Read the header of a model.

    Raises:
        OSError, ValueError: the file cannot be read.
        GgufError: it is no GGUF.
    """
    with (
        open(path, "rb", opener=_open_at_once) as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
    ):
        return Model(gguf_header.read(mapped), bytes_per_token(gguf_header.read_metadata(mapped)))


def _open_at_once(path: str, flags: int) -> int:
    """Open a file as `open`'s opener; a FIFO does not hold it up."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def bytes_per_token(metadata: Metadata) -> int | None:
    """Return what one token takes in a state file of 16-bit K and V rows of every layer.

    A window's layers count in full: onebitd runs the decoder with `--swa-full`.
    """
    pairs = metadata.pairs
    architecture = str(next(iter(pairs.get("general.architecture", [""])), ""))
    layers = _number(pairs, f"{architecture}.block_count")
    heads = _numbers(pairs, f"{architecture}.attention.head_count")
    kv_heads = _numbers(pairs, f"{architecture}.attention.head_count_kv") or heads
    if not layers or not kv_heads:
        return None
    width = _number(pairs, f"{architecture}.embedding_length")
    per_head = width // heads[0] if width and heads and heads[0] else None
    key = _number(pairs, f"{architecture}.attention.key_length") or per_head
    value = _number(pairs, f"{architecture}.attention.value_length") or per_head
    if not key or not value:
        return None
    total = sum(kv_heads[:layers]) if len(kv_heads) > 1 else layers * kv_heads[0]
    return total * (key + value) * _F16_BYTES


def _numbers(pairs: Mapping[str, Sequence[object]], key: str) -> list[int]:
    return [int(value) for value in pairs.get(key, ()) if isinstance(value, int)]


def _number(pairs: Mapping[str, Sequence[object]], key: str) -> int | None:
    return next(iter(_numbers(pairs, key)), None)


def check(path: str, ctx_size: int | None, place: Place) -> tuple[list[Finding], Model | None]:
    """Look at the file as this process sees it.

    Args:
        ctx_size: model.ctx_size.
    """
    user = sight.own_name()
    step = sight.look(path)
    if step is not None:
        if sight.is_sandboxed(path, step):
            text = sight.hidden_sentence("the model", path)
            return [failed("model.file", text, sight.show_fix(place, path))], None
        text = sight.sentence("the model", path, step, user)
        fix = sight.access_fix(place, step, "r") or place.edit()
        return [failed("model.file", text, fix)], None
    try:
        model = read(path)
        size = os.stat(path).st_size
    except (OSError, ValueError, GgufError) as error:
        why = str(getattr(error, "strerror", None) or error)
        return [failed("model.file", f"the model {path}: {why}", place.edit())], None
    found = ok("model.file", f"{path}, {mebibytes(size)}, readable by {user}")
    return [found, judge(model.header, ctx_size, place)], model


def judge(header: GgufHeader, ctx_size: int | None, place: Place) -> Finding:
    """Say what the header tells, and what in it is in the way of handoffs."""
    name = "model.header"
    words = [header.architecture]
    if header.block_count:
        words.append(f"{header.block_count} layers")
    if header.context_length:
        words.append(f"trained on {header.context_length} tokens")
    if header.sliding_window:
        words.append(f"sliding window of {header.sliding_window}")
    text = ", ".join(words)
    if header.is_recurrent or header.is_hybrid:
        kind = "a recurrent state" if header.is_recurrent else "a recurrent part"
        return warning(name, f"{text}: it has {kind}, which not every provider can hand over")
    trained = header.context_length
    if trained and ctx_size and ctx_size > trained:
        return warning(
            name,
            f"{text}: model.ctx_size is {ctx_size}, and replies get worse beyond {trained}",
            place.edit(),
        )
    return ok(name, text)
