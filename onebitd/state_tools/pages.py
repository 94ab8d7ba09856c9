"""What `onebitctl state` prints: pure functions to lines of text and to objects for --json."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

from onebitd.core.state_compare import StateDiff, TensorDiff
from onebitd.core.state_layout import (
    Channels,
    KvSection,
    ReadSection,
    StateFile,
    Tensor,
    type_name,
)
from onebitd.state_tools.values import Range

_HEADINGS: Final = ("MAX ABS", "MEAN ABS", "COSINE", "ROW ERR", "AT", "OFF FROM")
_WIDTHS: Final = (9, 9, 9, 8, 7, 9)


def state_page(path: str, state: StateFile, *, ids: bool) -> Iterator[str]:
    """Yield what a state file holds, line by line."""
    yield f"{path}: state version {state.version}, {state.size} bytes"
    packed = "packed" if state.packed else "plain"
    yield _entry("tokens", f"{len(state.tokens)}, listed {packed}")
    if ids:
        yield _entry("ids", " ".join(map(str, state.tokens.tolist())))
    if state.n_checkpoints is not None:
        yield _entry("checkpoints", str(state.n_checkpoints))
    for section in state.sections:
        stream = f", stream {section.stream}" if section.stream else ""
        n_bytes = section.shape.bytes_for(len(section.cells.pos))
        yield f"{section.what}{stream}: {section.shape.describe()}"
        yield _entry("cells", f"{_cells(section)}, {n_bytes} bytes")
        for part, tensors in _by_part(section).items():
            for tensor in dict.fromkeys(tensors):
                yield _entry(part, f"{tensors.count(tensor)} of {_tensor(tensor)}")


def state_object(path: str, state: StateFile, *, ids: bool) -> dict[str, Any]:
    """Return the same as one object."""
    found: dict[str, Any] = {
        "file": path,
        "version": state.version,
        "bytes": state.size,
        "tokens": len(state.tokens),
        "packed_tokens": state.packed,
        "checkpoints": state.n_checkpoints,
        "sections": [_section_object(section) for section in state.sections],
    }
    return found | ({"ids": state.tokens.tolist()} if ids else {})


def range_lines(ranges: Sequence[Range]) -> Iterator[str]:
    """Yield a table of ranges."""
    width = max((len(found.what) for found in ranges), default=6)
    heads = ("MINIMUM", "MAXIMUM", "RMS", "ZERO ROWS", "NOT FINITE")
    yield "TENSOR".ljust(width) + "".join(head.rjust(11) for head in heads)
    for found in ranges:
        numbers = (found.minimum, found.maximum, found.rms)
        counts = (found.zero_rows, found.not_finite)
        yield found.what.ljust(width) + "".join(f"{x:11.4g}" for x in (*numbers, *counts))


def diff_page(
    diff: StateDiff, tolerance: float, scale_tolerance: float, *, every: bool
) -> Iterator[str]:
    """Yield the tensors that are off and the worst one, or every one, and a line that sums up."""
    worst = diff.worst
    shown = [t for t in diff.tensors if every or not t.within or t is worst]
    width = max((len(tensor.what) for tensor in shown), default=6)
    yield "TENSOR".ljust(width) + _cells_of(_HEADINGS)
    for tensor in shown:
        yield tensor.what.ljust(width) + _cells_of(_numbers(tensor))
        if abs(tensor.head_scale - 1) > scale_tolerance:
            yield f"  head {tensor.head} has {tensor.head_scale:.4g} times the reference's size"
        if not tensor.within:
            yield f"  suspected: {tensor.cause or 'no known cause fits'}"
    yield summary(diff, tolerance)


def summary(diff: StateDiff, tolerance: float) -> str:
    """Return one line that says how the files compare."""
    worst, n_off = diff.worst, sum(not tensor.within for tensor in diff.tensors)
    if worst is None:
        return "nothing could be compared"
    positions = max(tensor.positions for tensor in diff.tensors)
    n_tensors = len(diff.tensors)
    line = f"{n_tensors} tensor{'s'[: n_tensors != 1]} at {positions} position"
    line += f"{'s'[: positions != 1]}, worst row error {worst.row_error:.3g} ({worst.what}): "
    if n_off:
        return f"{line}{n_off} not within {tolerance:g}"
    if not diff.within:
        return f"{line}within {tolerance:g}, but not everything could be compared"
    return f"{line}within {tolerance:g}"


def diff_object(
    diff: StateDiff, a: str, b: str, tolerance: float, scale_tolerance: float
) -> dict[str, Any]:
    """Return a comparison as one object; what is infinite or no number is null."""
    return {
        "file": a,
        "reference": b,
        "within": diff.within,
        "tolerance": tolerance,
        "scale_tolerance": scale_tolerance,
        "compared_values": diff.compared_values,
        "notes": list(diff.notes),
        "worst": diff.worst.what if diff.worst else None,
        "tensors": [finite(dataclasses.asdict(tensor)) for tensor in diff.tensors],
    }


def finite(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with null for floats that JSON does not have."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in fields.items()
    }


def _entry(name: str, text: str) -> str:
    return f"  {name:<12} {text}"


def _cells(section: ReadSection) -> str:
    pos = section.cells.pos
    if not len(pos):
        return "0"
    return f"{len(pos)}, positions {pos.min()} to {pos.max()}"


def _by_part(section: ReadSection) -> dict[str, list[Tensor]]:
    parts: dict[str, list[Tensor]] = {}
    for block in section.blocks:
        parts.setdefault(block.part, []).append(block.tensor)
    return parts


def _tensor(tensor: Tensor) -> str:
    if isinstance(tensor, Channels):
        return (
            f"{type_name(tensor.type)}, {tensor.n_embd_v_gqa} channels of "
            f"{tensor.el_size}-byte elements"
        )
    return f"{type_name(tensor.type)}, {tensor.row_size} bytes a row"


def _section_object(section: ReadSection) -> dict[str, Any]:
    pos = section.cells.pos
    shape = section.shape
    kv = (
        {"v_trans": shape.v_trans, "ext_bytes": shape.ext_bytes}
        if isinstance(shape, KvSection)
        else {}
    )
    rot = (
        {"n_rot_k": shape.n_rot_k, "n_rot_v": shape.n_rot_v} if isinstance(shape, KvSection) else {}
    )
    return {
        "section": section.what,
        "stream": section.stream,
        "cells": len(pos),
        "first_position": int(pos.min()) if len(pos) else None,
        "last_position": int(pos.max()) if len(pos) else None,
        "bytes": shape.bytes_for(len(pos)),
        **kv,
        **rot,
        "tensors": [
            {
                "what": block.what,
                "part": block.part,
                "layer": block.layer,
                "offset": block.offset,
                "bytes": block.n_bytes,
                **dataclasses.asdict(block.tensor),
            }
            | {"type": type_name(block.tensor.type)}
            for block in section.blocks
        ],
    }


def _cells_of(texts: Sequence[str]) -> str:
    return "".join(text.rjust(width) for text, width in zip(texts, _WIDTHS, strict=True))


def _numbers(tensor: TensorDiff) -> tuple[str, ...]:
    return (
        f"{tensor.max_abs:.3g}",
        f"{tensor.mean_abs:.3g}",
        f"{tensor.cosine:.5f}",
        f"{tensor.row_error:.3g}",
        str(tensor.worst_pos),
        "-" if tensor.first_off is None else str(tensor.first_off),
    )
