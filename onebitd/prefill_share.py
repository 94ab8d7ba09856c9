"""The shared route of a provider: the rows of a state file, written into a decoder's own memory.

`open_share` reads the header and looks at the descriptors, before anything is computed;
`write_state` finds the place of each tensor of a saved state, refuses the whole where one does not
fit, and only then writes. The format of the header is in `onebitd.core.share_layout`, the rules are
in onebit-provider(7).

A dma-buf wants to know when the CPU writes (linux/dma-buf.h, DMA_BUF_IOCTL_SYNC); other memory
does not know that ioctl and needs nothing.

Memory: a state is mapped, never read whole; rows go straight from one mapping to the other.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from onebitd.core import share_layout, state_file
from onebitd.core.share_layout import ShareLayout, ShareLayoutError, ShareTensor
from onebitd.core.share_wire import MAX_HEADER_BYTES
from onebitd.core.state_check import expect_cells, expect_tokens
from onebitd.core.state_layout import (
    KV_NAMES,
    SLIDING,
    Block,
    Channels,
    KvSection,
    ReadSection,
    Rows,
    StateFile,
    type_name,
)

CHUNK_BYTES: Final = 1 << 23

# linux/dma-buf.h: _IOW('b', 0, struct dma_buf_sync), whose one field is a u64 of flags; the number
# is that of every architecture with the generic ioctl encoding, x86 and ARM among them.
DMA_BUF_IOCTL_SYNC: Final = 0x40086200
DMA_BUF_SYNC_WRITE: Final = 2
DMA_BUF_SYNC_END: Final = 4


class ShareMismatch(Exception):
    """Header, descriptors and state do not fit together; not one byte was written.

    The message is a sentence that names the tensor or field with both values.
    """


@dataclass(frozen=True, slots=True)
class Share:
    """Memory that can be written: its layout, and one descriptor a region, owned by the caller."""

    layout: ShareLayout
    fds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """Rows of one tensor: where they lie in the state, and where they belong."""

    block: Block
    tensor: ShareTensor


def open_share(header_file: str, fds: Sequence[int], n_tokens: int) -> Share:
    """Read the header and check the descriptors against it.

    Args:
        header_file: the decoder's share message.
        fds: the inherited descriptors, in the header's order; none is closed here.
        n_tokens: of the prompt.

    Raises:
        OSError: the file cannot be read, or a descriptor is not open; the latter has EBADF and
            the descriptor's number as its filename.
        ShareMismatch: the header has no layout that can be written, or not for these.
    """
    with open(header_file, "rb") as file:
        header = file.read(MAX_HEADER_BYTES + 1)
    if len(header) > MAX_HEADER_BYTES:
        raise ShareMismatch(f"the header has more than {MAX_HEADER_BYTES} bytes")
    try:
        layout = share_layout.parse(header)
    except ShareLayoutError as error:
        raise ShareMismatch(str(error)) from error
    if layout is None:
        raise ShareMismatch("the header has no layout, so nothing says where the rows belong")
    if len(fds) != len(layout.regions):
        raise ShareMismatch(f"regions: {len(layout.regions)} in the header, {len(fds)} in --fds")
    for index, (fd, size) in enumerate(zip(fds, layout.regions, strict=True)):
        try:
            found = os.fstat(fd).st_size
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(fd)) from error
        if found < size:
            raise ShareMismatch(
                f"regions[{index}]: size {size} in the header, descriptor {fd} has {found} bytes"
            )
    if layout.n_cells < n_tokens:
        raise ShareMismatch(f"n_cells: {layout.n_cells} in the header, the prompt has {n_tokens}")
    return Share(layout, tuple(fds))


def write_state(
    share: Share, state_fd: int, ids: Sequence[int], before_first_byte: Callable[[], None]
) -> None:
    """Write every row of a saved state to its place.

    Args:
        share: where to.
        state_fd: the state file, which nobody changes any more.
        ids: the tokens that it must hold.
        before_first_byte: called once everything fits and is mapped; what it raises stops the run
            with nothing written.

    Raises:
        ShareMismatch: a tensor or a field is not the header's; nothing is written.
        StateFileError: it is no whole state of these ids; nothing is written.
        OSError: memory could not be mapped (nothing is written) or handed back.
    """
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(mmap.mmap(state_fd, 0, prot=mmap.PROT_READ))
        copies = match(share.layout, read_state(source, ids))
        regions = [
            stack.enter_context(_mapped(fd, size))
            for fd, size in zip(share.fds, share.layout.regions, strict=True)
        ]
        for fd in share.fds:
            stack.enter_context(cpu_writes(fd))
        before_first_byte()
        for copy in copies:
            write_rows(copy, source, regions[copy.tensor.region])


def _mapped(fd: int, size: int) -> mmap.mmap:
    """Return a shared mapping that can be written; OSError names the descriptor."""
    try:
        return mmap.mmap(fd, size, mmap.MAP_SHARED)
    except OSError as error:
        raise OSError(error.errno, f"descriptor {fd}: {error.strerror}") from error


def read_state(source: mmap.mmap, ids: Sequence[int]) -> StateFile:
    """Return the state, which must hold these ids in cells 0 to N-1.

    Raises:
        StateFileError: it does not.
        ShareMismatch: llama-server saves no more of a sliding window than it needs to go on, also
            with --swa-full; a row for each position is what the header wants.
    """
    state = state_file.parse(source)
    state_file.expect_single_stream(state)
    expect_tokens(state.tokens, ids)
    for section in state.sections:
        if section.what == SLIDING and len(section.cells.pos) < len(ids):
            raise ShareMismatch(
                f"layers with a sliding window: the state has the last {len(section.cells.pos)} of "
                f"{len(ids)} positions; a prompt longer than the window needs the file route"
            )
        expect_cells(section.what, section.shape, section.cells, state.tokens, len(ids))
    return state


def match(layout: ShareLayout, state: StateFile) -> list[Copy]:
    """Find the place of each tensor of the state, and a tensor of the state for each place.

    A state lists the layers of each cache without their numbers, in their order.

    Raises:
        ShareMismatch: there is not exactly one for each, of the same type and row size.
    """
    saved = {section.what: _layers(section) for section in state.sections}
    copies: list[Copy] = []
    for name, swa in zip(KV_NAMES, (False, True), strict=True):
        places = _places(layout, swa=swa)
        layers = saved.get(name, [])
        if len(layers) != len(places):
            kind = "layers with a sliding window" if swa else "layers"
            last = f" (the last is {max(places)})" if places else ""
            raise ShareMismatch(
                f"{kind}: {len(places)} in the header{last}, {len(layers)} in the state"
            )
        for number, layer in zip(sorted(places), layers, strict=True):
            for tensor_kind, block in zip("kv", layer, strict=True):
                tensor = places[number].get(tensor_kind)
                copies += _copy(f"cache_{tensor_kind}_l{number}", block, tensor)
    return copies


def _places(layout: ShareLayout, *, swa: bool) -> dict[int, dict[str, ShareTensor]]:
    """Return the tensors of the layers with a sliding window, or without, by layer and kind."""
    places: dict[int, dict[str, ShareTensor]] = {}
    for tensor in layout.tensors:
        if tensor.swa is swa:
            places.setdefault(tensor.layer, {})[tensor.kind] = tensor
    return places


def _layers(section: ReadSection) -> list[tuple[Block, Block | None]]:
    """Return K and V of the layers of a section; V is None in a model with MLA."""
    if not isinstance(section.shape, KvSection):
        raise ShareMismatch(
            f"the state has a {section.what}, for which layout {share_layout.LAYOUT} has no place"
        )
    n_layer = len(section.shape.k)
    return list(itertools.zip_longest(section.blocks[:n_layer], section.blocks[n_layer:]))


def _copy(name: str, block: Block | None, tensor: ShareTensor | None) -> list[Copy]:
    """Return what to do for one tensor; nothing where neither side has it."""
    if block is None and tensor is None:
        return []
    if tensor is None:
        raise ShareMismatch(f"{name}: the state has it, the header has not")
    if block is None:
        raise ShareMismatch(f"{name}: the header has it, the state has not")
    element = type_name(block.tensor.type)
    row_size = block.tensor.data_bytes(1)  # of a transposed V too: one element a channel
    if tensor.type != element:
        raise ShareMismatch(f"{name}: type {tensor.type} in the header, {element} in the state")
    if tensor.row_size != row_size:
        raise ShareMismatch(
            f"{name}: row_size {tensor.row_size} in the header, {row_size} in the state"
        )
    return [Copy(block, tensor)]


def write_rows(copy: Copy, source: mmap.mmap, region: mmap.mmap) -> None:
    """Write the rows of one tensor, a piece of `CHUNK_BYTES` at a time."""
    tensor = copy.block.tensor
    if isinstance(tensor, Channels):
        return _write_transposed(copy, tensor, source, region)
    return _write_run(copy, tensor, source, region)


def _write_run(copy: Copy, tensor: Rows, source: mmap.mmap, region: mmap.mmap) -> None:
    n_bytes = tensor.data_bytes(copy.block.cells)
    start, to = copy.block.offset, copy.tensor.offset
    with memoryview(source) as rows, memoryview(region) as target:
        for at in range(0, n_bytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, n_bytes - at)
            target[to + at : to + at + size] = rows[start + at : start + at + size]


def _write_transposed(copy: Copy, tensor: Channels, source: mmap.mmap, region: mmap.mmap) -> None:
    """Turn channels of cells into rows of channels: the header's memory is position-major."""
    cells, channels = copy.block.cells, tensor.n_embd_v_gqa
    element = f"V{tensor.el_size}"
    rows = np.ndarray((channels, cells), element, source, copy.block.offset).T
    target = np.ndarray((cells, channels), element, region, copy.tensor.offset)
    step = max(1, CHUNK_BYTES // copy.tensor.row_size)
    for at in range(0, cells, step):
        target[at : at + step] = rows[at : at + step]


@contextlib.contextmanager
def cpu_writes(fd: int) -> Iterator[None]:
    """Tell a dma-buf that the CPU writes to its mapping in the block; OSError if that fails."""
    known = _sync(fd, DMA_BUF_SYNC_WRITE)
    try:
        yield
    finally:
        if known:
            _sync(fd, DMA_BUF_SYNC_WRITE | DMA_BUF_SYNC_END)


def _sync(fd: int, flags: int) -> bool:
    """Return False for memory that is no dma-buf. The header asks to repeat EINTR and EAGAIN."""
    while True:
        try:
            fcntl.ioctl(fd, DMA_BUF_IOCTL_SYNC, struct.pack("=Q", flags))
        except OSError as error:
            if error.errno == errno.ENOTTY:
                return False
            if error.errno not in (errno.EINTR, errno.EAGAIN):
                raise OSError(
                    error.errno, f"descriptor {fd}: DMA_BUF_IOCTL_SYNC: {error.strerror}"
                ) from error
        else:
            return True
