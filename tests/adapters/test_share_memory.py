"""Marks in shared memory: what a provider did not write is found, and nothing of them stays."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from onebitd.adapters.share_memory import SharedMemory
from onebitd.core import share_layout

CELLS = 40
ROW = 8
GOOD = b"\x00\x3c" * (ROW // 2)
"""Ones in f16."""
TENSORS = [(f"cache_{kind}_l{layer}", layer) for layer in range(2) for kind in "kv"]


@dataclass
class Regions:
    """Two memfds, a layer in each, full of one byte."""

    layout: share_layout.ShareLayout
    fds: tuple[int, int]

    def write(self, n_tokens: int, *, but: tuple[str, int] | None = None) -> None:
        """Write every row, as a provider does, but one."""
        for tensor in self.layout.tensors:
            for position in range(n_tokens):
                if (tensor.name, position) != but:
                    os.pwrite(self.fds[tensor.region], GOOD, tensor.offset + position * ROW)

    def data(self) -> list[bytes]:
        """Return all of it."""
        return [os.pread(fd, 1 << 20, 0) for fd in self.fds]


@pytest.fixture
def regions() -> Iterator[Regions]:
    """Memory of a cache of two layers."""
    tensors = [
        {"name": name, "type": "f16", "row_size": ROW, "region": layer}
        | {"offset": 4096 * "kv".index(name[6])}
        for name, layer in TENSORS
    ]
    header = {"layout": 1, "n_cells": CELLS, "regions": [{"size": 8192}] * 2, "tensors": tensors}
    layout = share_layout.parse(json.dumps(header).encode())
    assert layout is not None
    fds = os.memfd_create("one"), os.memfd_create("two")
    for fd in fds:
        os.write(fd, b"\xa5" * 8192)
    yield Regions(layout, fds)
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("n_tokens", [1, 2, 7, 8, 9, CELLS])
def test_memory_all_rows_written_is_good(regions: Regions, n_tokens: int) -> None:
    """Marks are in the prompt's rows only, and writing them is what ends them."""
    before = regions.data()
    memory = SharedMemory(regions.fds, regions.layout, n_tokens)
    assert memory.mark()
    marked = regions.data()
    end = n_tokens * ROW
    for old, new in zip(before, marked, strict=True):
        assert new[end:4096] == old[end:4096]
        assert new[4096 + end :] == old[4096 + end :]
        assert new[:ROW] == new[end - ROW : end] == b"\xff" * ROW
    regions.write(n_tokens)
    assert memory.fault() is None


@pytest.mark.parametrize(("name", "layer"), TENSORS)
@pytest.mark.parametrize("position", [0, CELLS - 1])
def test_memory_a_row_left_out_is_named(
    regions: Regions, name: str, layer: int, position: int
) -> None:
    """The first and the last row of each tensor are among those that are looked at."""
    memory = SharedMemory(regions.fds, regions.layout, CELLS)
    assert memory.mark()
    regions.write(CELLS, but=(name, position))
    wanted = f"layer {layer} {name[6].upper()}, position {position}: it was not written"
    assert memory.fault() == wanted


@pytest.mark.parametrize("value", [b"\x00\x7c", b"\x01\x7e"], ids=["infinity", "nan"])
def test_memory_a_row_that_is_no_number_is_named(regions: Regions, value: bytes) -> None:
    """What is not finite reaches every later token."""
    memory = SharedMemory(regions.fds, regions.layout, CELLS)
    assert memory.mark()
    regions.write(CELLS)
    os.pwrite(regions.fds[1], value, 4096 + (CELLS - 1) * ROW + 2)
    assert memory.fault() == f"layer 1 V, position {CELLS - 1}: it holds a value that is not finite"


def test_memory_cleared_holds_zeros_for_the_prompt_and_all_else_as_it_was(regions: Regions) -> None:
    """No mark and nothing half written stays; what is behind the prompt is not touched."""
    memory = SharedMemory(regions.fds, regions.layout, 10)
    assert memory.mark()
    regions.write(4)
    assert memory.clear()
    part = bytes(10 * ROW) + b"\xa5" * (4096 - 10 * ROW)
    assert regions.data() == [part * 2] * 2


@pytest.mark.parametrize("what", ["pipe", "full", "read-only"])
def test_memory_that_takes_no_pwrite_is_left_unmarked(regions: Regions, what: str) -> None:
    """Then nothing is found, and nothing fails."""
    if what == "pipe":
        fds = os.pipe2(os.O_CLOEXEC)
    elif what == "full":
        fds = os.open("/dev/full", os.O_RDWR), os.open("/dev/full", os.O_RDWR)
    else:
        paths = [f"/proc/self/fd/{fd}" for fd in regions.fds]
        fds = os.open(paths[0], os.O_RDONLY), os.open(paths[1], os.O_RDONLY)
    try:
        memory = SharedMemory(fds, regions.layout, CELLS)
        assert not memory.mark()
        assert memory.fault() is None
        assert not memory.clear()
    finally:
        for fd in fds:
            os.close(fd)


def test_memory_of_which_one_region_takes_no_pwrite_is_looked_at_in_the_other(
    regions: Regions,
) -> None:
    """Rows that were marked are found, even where others could not be; and it is not all clear."""
    sealed = os.open(f"/proc/self/fd/{regions.fds[1]}", os.O_RDONLY)
    try:
        memory = SharedMemory((regions.fds[0], sealed), regions.layout, CELLS)
        assert not memory.mark()
        fault = memory.fault()
        assert fault is not None
        assert fault.endswith("it was not written")
        assert not memory.clear()
        regions.write(CELLS)
        assert memory.fault() is None
    finally:
        os.close(sealed)


def test_memory_that_was_cut_off_under_us_is_not_written(regions: Regions) -> None:
    """A short read is no reason to die, as it would be under a mapping."""
    memory = SharedMemory(regions.fds, regions.layout, CELLS)
    assert memory.mark()
    regions.write(CELLS)
    os.truncate(regions.fds[1], 16)
    assert memory.fault() == "layer 1 K, position 6: it was not written"
