"""What lies where in the memory that a decoder shares: the part of the header that tells.

    {"share_id": 3, "layout": 1, "n_cells": 8192,
     "regions": [{"size": 50331648}],
     "tensors": [{"name": "cache_k_l0", "type": "f16", "row_size": 384, "region": 0, "offset": 0},
                 {"name": "cache_v_l0", "type": "f16", "row_size": 384, "region": 0,
                  "offset": 3145728}, ...]}

One region for each descriptor, in their order. A tensor is position-major: the row of position p,
of `row_size` bytes as the cache type stores them, begins at `offset + p * row_size`. Tensors begin
at multiples of 4096 bytes. Keys are stored after RoPE. L counts the model's layers; those without a
cache have no tensors, and `cache_v_l<L>` is missing for a layer whose values are not kept (MLA).
`"swa": true` stands at the tensors of a layer with a sliding window, in whose cache every position
has a row too. Other keys are a decoder's own.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from onebitd.core.errors import OnebitError

LAYOUT: Final = 1
"""The version of this description."""
ALIGNMENT: Final = 4096
_MOST: Final = 1 << 48
_LARGEST_ROW: Final = 1 << 24
_ELEMENT_BYTES: Final = {"f32": 4, "f16": 2, "bf16": 2}
_SHOWN: Final = 60
_NAME: Final = re.compile(r"cache_([kv])_l(0|[1-9][0-9]{0,3})")


class ShareLayoutError(OnebitError):
    """The header describes no memory that can be written; the message names the field."""


@dataclass(frozen=True, slots=True)
class ShareTensor:
    """One tensor of the cache.

    Attributes:
        name: `cache_k_l<L>` or `cache_v_l<L>`.
        layer, kind: what the name says; kind is `k` or `v`.
        type: ggml's name of the type of its elements.
        row_size: bytes of one position.
        region: index of the descriptor.
        offset: of position 0, in bytes.
        swa: the layer has a sliding window.
    """

    name: str
    layer: int
    kind: str
    type: str
    row_size: int
    region: int
    offset: int
    swa: bool = False


@dataclass(frozen=True, slots=True)
class ShareLayout:
    """The memory that a decoder shares.

    Attributes:
        n_cells: positions for which every tensor has room.
        regions: size of each descriptor's memory, in bytes.
        tensors: in the header's order.
    """

    n_cells: int
    regions: tuple[int, ...]
    tensors: tuple[ShareTensor, ...]


def parse(header: bytes) -> ShareLayout | None:
    """Read the layout of a share message's JSON.

    Returns:
        None when the header has none: a decoder and its provider may have a language of their own.

    Raises:
        ShareLayoutError: it has one that cannot be, or of another version.
    """
    try:
        found = json.loads(header.decode())
    except (ValueError, RecursionError):
        raise ShareLayoutError("the header is no JSON") from None
    if not isinstance(found, dict):
        raise ShareLayoutError("the header is no JSON object")
    if "layout" not in found:
        return None
    if type(found["layout"]) is not int or found["layout"] != LAYOUT:
        raise ShareLayoutError(f"layout {_shown(found['layout'])} is not known, {LAYOUT} is")
    n_cells = _number(found, "n_cells", "the header", least=1)
    regions = tuple(
        _number(region, "size", f"regions[{index}]", least=1)
        for index, region in enumerate(_objects(found, "regions"))
    )
    tensors = tuple(
        _tensor(entry, index, n_cells, regions)
        for index, entry in enumerate(_objects(found, "tensors"))
    )
    _refuse_overlap(tensors, n_cells)
    return ShareLayout(n_cells, regions, tensors)


def _tensor(
    entry: Mapping[str, Any], index: int, n_cells: int, regions: tuple[int, ...]
) -> ShareTensor:
    where = f"tensors[{index}]"
    name = entry.get("name")
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None or not isinstance(name, str):
        raise ShareLayoutError(f"{where}: name {_shown(name)} is not cache_k_l<L> or cache_v_l<L>")
    where = f"{where} ({name})"
    element = entry.get("type")
    if not isinstance(element, str) or not element:
        raise ShareLayoutError(f"{where}: type is no name")
    row_size = _number(entry, "row_size", where, least=1)
    if row_size > _LARGEST_ROW or row_size % _ELEMENT_BYTES.get(element, 1):
        raise ShareLayoutError(f"{where}: row_size {row_size} cannot be that of {element[:16]}")
    region = _number(entry, "region", where)
    offset = _number(entry, "offset", where)
    swa = entry.get("swa", False)
    if not isinstance(swa, bool):
        raise ShareLayoutError(f"{where}: swa {_shown(swa)} is neither true nor false")
    if region >= len(regions):
        raise ShareLayoutError(f"{where}: region {region} of {len(regions)}")
    if offset % ALIGNMENT:
        raise ShareLayoutError(f"{where}: offset {offset} is no multiple of {ALIGNMENT}")
    if offset + n_cells * row_size > regions[region]:
        raise ShareLayoutError(
            f"{where}: {n_cells} rows of {row_size} bytes at {offset} do not fit into region"
            f" {region} of {regions[region]} bytes"
        )
    return ShareTensor(name, int(match[2]), match[1], element, row_size, region, offset, swa)


def _refuse_overlap(tensors: tuple[ShareTensor, ...], n_cells: int) -> None:
    if not tensors:
        raise ShareLayoutError("tensors: there is none")
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ShareLayoutError("tensors: a name stands there twice")
    placed = sorted(tensors, key=lambda tensor: (tensor.region, tensor.offset))
    for one, two in itertools.pairwise(placed):
        if one.region == two.region and one.offset + n_cells * one.row_size > two.offset:
            raise ShareLayoutError(f"tensors: {one.name} and {two.name} overlap")


def _objects(found: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    entries = found.get(key)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ShareLayoutError(f"{key}: is no list of objects")
    return entries


def _number(found: Mapping[str, Any], key: str, where: str, *, least: int = 0) -> int:
    value = found.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _MOST:
        raise ShareLayoutError(
            f"{where}: {key} {_shown(value)} is no whole number from {least} to {_MOST - 1}"
        )
    return value


def _shown(value: object) -> str:
    """Return a value for a message that stays a line, however large or deep the value is."""
    if isinstance(value, dict | list):
        return "of several values"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
