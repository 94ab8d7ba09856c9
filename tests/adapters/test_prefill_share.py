"""The writing end of the shared route: rows from a state file into a decoder's memory (memfds)."""

from __future__ import annotations

import copy
import errno
import fcntl
import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from onebitd import prefill_share
from onebitd.core import share_layout, state_file
from onebitd.core.errors import StateFileError
from onebitd.core.state_layout import Block, Channels, KvSection, type_name
from tests.core.state_files import BF16, F16, Q8_0, Kv, Recr, build
from tests.llama_builds import ROOT

IDS = [5, 7, 11, 13, 17]
FILL = 0xA5
PLAIN = Kv(layers=3, k_type=F16, v_type=Q8_0, width=64)
Header = dict[str, Any]


def header_of(state: bytes, *, n_cells: int = 8, regions: int = 1) -> Header:
    """Return a header for a state: tensors layer by layer, at pages, every second one elsewhere.

    Layers with a sliding window come after the others.
    """
    ends = [0] * regions
    tensors: list[Header] = []
    first = 0
    for section in state_file.parse(state).sections:
        n_layer = len(section.shape.k) if isinstance(section.shape, KvSection) else 0
        for index, block in sorted(enumerate(section.blocks), key=lambda e: (e[0] % n_layer, e[0])):
            region = len(tensors) % regions
            tensors.append(
                {
                    "name": f"cache_{'kv'[index // n_layer]}_l{first + index % n_layer}",
                    "type": type_name(block.tensor.type),
                    "row_size": block.tensor.data_bytes(1),
                    "region": region,
                    "offset": ends[region],
                }
            )
            if section.what != "attention":
                tensors[-1]["swa"] = True
            ends[region] += -(-n_cells * block.tensor.data_bytes(1) // 4096) * 4096
        first += n_layer
    sizes = [{"size": end} for end in ends]
    return {"share_id": 3, "layout": 1, "n_cells": n_cells, "regions": sizes, "tensors": tensors}


@dataclass
class Decoder:
    """A decoder's memory: memfds that are filled with one byte, and the header in a file."""

    header_file: Path
    fds: list[int] = field(default_factory=list)

    def export(self, header: Header, more_bytes: int = 0) -> None:
        """Make the memory that a header speaks of, and write the header."""
        self.header_file.write_text(json.dumps(header))
        for region in header["regions"]:
            self.fds.append(os.memfd_create("kv"))
            os.write(self.fds[-1], bytes([FILL]) * (region["size"] + more_bytes))

    def memory(self) -> list[bytes]:
        """Return what is in the memory now."""
        return [os.pread(fd, os.fstat(fd).st_size, 0) for fd in self.fds]

    def untouched(self) -> bool:
        """Tell whether not one byte was written."""
        return all(not data.strip(bytes([FILL])) for data in self.memory())

    def hand_over(self, state: bytes, ids: Sequence[int] = IDS) -> int:
        """Run the provider's end on a saved state; returns how often it said that it begins."""
        begun: list[None] = []
        share = prefill_share.open_share(str(self.header_file), self.fds, len(ids))
        state_fd = os.memfd_create("state")
        try:
            os.write(state_fd, state)
            prefill_share.write_state(share, state_fd, ids, lambda: begun.append(None))
        finally:
            os.close(state_fd)
            assert begun or self.untouched()
        return len(begun)


@pytest.fixture
def decoder(tmp_path: Path) -> Iterator[Decoder]:
    """A decoder whose memory is gone at the end."""
    found = Decoder(tmp_path / "header.json")
    yield found
    for fd in found.fds:
        os.close(fd)


def rows_of(state: bytes, block: Block) -> bytes:
    """Return the rows of a tensor one after another, element by element."""
    data = state[block.offset : block.offset + block.n_bytes]
    if not isinstance(block.tensor, Channels):
        return data
    size, cells = block.tensor.el_size, block.cells
    elements = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(b"".join(elements[cell::cells]) for cell in range(cells))


def expected(state: bytes, header: Header) -> list[bytes]:
    """Return the memory as it must be: the rows at their places, everything else as it was."""
    memory = [bytearray([FILL]) * region["size"] for region in header["regions"]]
    places = {entry["name"]: entry for entry in header["tensors"]}
    first = 0
    for section in state_file.parse(state).sections:
        assert isinstance(section.shape, KvSection)
        n_layer = len(section.shape.k)
        for index, block in enumerate(section.blocks):
            place = places[f"cache_{'kv'[index // n_layer]}_l{first + index % n_layer}"]
            rows = rows_of(state, block)
            at = place["offset"]
            memory[place["region"]][at : at + len(rows)] = rows
        first += n_layer
    return [bytes(data) for data in memory]


STATES = [
    pytest.param(build(IDS, [PLAIN]), id="two-types"),
    pytest.param(build(IDS, [replace(PLAIN, has_v=False)], version=4), id="mla"),
    pytest.param(build(IDS, [replace(PLAIN, v_type=F16, v_trans=1)], version=3), id="transposed-v"),
    pytest.param(
        build(IDS, [replace(PLAIN, ext_bytes=12)], version=4, packed=True), id="m-rope-packed"
    ),
    pytest.param(build(IDS, [PLAIN, Kv(layers=2, k_type=BF16)], version=4), id="sliding-window"),
]


@pytest.mark.parametrize("regions", [1, 2, 3])
@pytest.mark.parametrize("state", STATES)
def test_write_state_that_fits_puts_each_row_in_its_place_and_nothing_else(
    state: bytes, regions: int, decoder: Decoder
) -> None:
    """K and V of every layer are where the header says; all other bytes stay as they were."""
    header = header_of(state, regions=regions)
    decoder.export(header)
    assert decoder.hand_over(state) == 1
    assert decoder.memory() == expected(state, header)


@pytest.mark.parametrize("state", STATES)
def test_write_state_in_small_pieces_writes_the_same(
    state: bytes, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a piece ends makes no difference."""
    monkeypatch.setattr(prefill_share, "CHUNK_BYTES", 100)
    header = header_of(state)
    decoder.export(header)
    decoder.hand_over(state)
    assert decoder.memory() == expected(state, header)


def test_write_state_into_larger_memory_leaves_what_lies_behind(decoder: Decoder) -> None:
    """A descriptor may have more than its region; layers may have any numbers, in any order."""
    state = build(IDS, [PLAIN])
    header = header_of(state)
    usual = expected(state, header)
    for entry in header["tensors"]:
        head, _, number = entry["name"].rpartition("_l")
        entry["name"] = f"{head}_l{7 + 4 * int(number)}"
    header["tensors"].reverse()
    decoder.export(header, more_bytes=5000)
    decoder.hand_over(state)
    assert decoder.memory() == [usual[0] + bytes([FILL]) * 5000]


def test_write_state_of_as_many_tokens_as_cells_fills_them_all(decoder: Decoder) -> None:
    """The last cell is a cell too."""
    state = build(IDS, [PLAIN])
    header = header_of(state, n_cells=len(IDS))
    decoder.export(header)
    decoder.hand_over(state)
    assert decoder.memory() == expected(state, header)


# --- refusals: not one byte is written (Decoder.hand_over looks) --------------------------------


def put(header: Header, tensor: int, key: str, value: object) -> None:
    """Change one field of one tensor; the first ones are K and V of layer 0."""
    header["tensors"][tensor][key] = value


def drop(header: Header, *names: str) -> None:
    """Remove tensors."""
    header["tensors"] = [entry for entry in header["tensors"] if entry["name"] not in names]


def add(header: Header, name: str) -> None:
    """Add a tensor behind the last."""
    end = header["regions"][0]["size"]
    header["regions"][0]["size"] += 65536
    header["tensors"].append({**header["tensors"][0], "name": name, "offset": end})


MISMATCHES: list[tuple[str, Callable[[Header], object], str]] = [
    ("k-type", lambda h: put(h, 0, "type", "bf16"), "cache_k_l0: type bf16 in the header, f16 in"),
    ("v-type", lambda h: put(h, 5, "type", "f16"), "cache_v_l2: type f16 in the header, q8_0 in"),
    (
        "row-size",
        lambda h: put(h, 3, "row_size", 34),
        "cache_v_l1: row_size 34 in the header, 68 in the state",
    ),
    ("no-v", lambda h: drop(h, "cache_v_l1"), "cache_v_l1: the state has it, the header has not"),
    ("no-k", lambda h: drop(h, "cache_k_l2"), "cache_k_l2: the state has it, the header has not"),
    (
        "no-layer",
        lambda h: drop(h, "cache_k_l1", "cache_v_l1"),
        "layers: 2 in the header (the last is 2), 3 in the state",
    ),
    (
        "layer-too-many",
        lambda h: add(h, "cache_k_l9"),
        "layers: 4 in the header (the last is 9), 3 in the state",
    ),
    (
        "window",
        lambda h: [entry.update(swa=True) for entry in h["tensors"][4:]],
        "layers: 2 in the header (the last is 1), 3 in the state",
    ),
    ("n-cells", lambda h: h.update(n_cells=4), "n_cells: 4 in the header, the prompt has 5"),
    ("version", lambda h: h.update(layout=2), "layout 2 is not known, 1 is"),
    ("no-layout", lambda h: h.pop("layout"), "the header has no layout"),
    ("overlap", lambda h: put(h, 1, "offset", 0), "cache_k_l0 and cache_v_l0 overlap"),
]


@pytest.mark.parametrize(
    ("change", "said"), [entry[1:] for entry in MISMATCHES], ids=[entry[0] for entry in MISMATCHES]
)
def test_write_state_that_does_not_fit_names_both_values_and_writes_nothing(
    change: Callable[[Header], object], said: str, decoder: Decoder
) -> None:
    """Whatever differs is named, with what each side says."""
    state = build(IDS, [PLAIN])
    header = header_of(state)
    change(header)
    decoder.export(header)
    with pytest.raises(prefill_share.ShareMismatch) as refusal:
        decoder.hand_over(state)
    assert said in str(refusal.value)
    assert decoder.untouched()


def test_write_state_with_v_for_a_model_without_is_refused(decoder: Decoder) -> None:
    """MLA: a place for values that the state does not have is a mismatch."""
    header = header_of(build(IDS, [PLAIN]))
    decoder.export(header)
    with pytest.raises(prefill_share.ShareMismatch, match="cache_v_l0: the header has it"):
        decoder.hand_over(build(IDS, [replace(PLAIN, has_v=False)]))


def test_write_state_of_a_recurrent_model_is_refused(decoder: Decoder) -> None:
    """A recurrent state has no tensors in this layout."""
    decoder.export(header_of(build(IDS, [PLAIN])))
    with pytest.raises(prefill_share.ShareMismatch, match="recurrent state, for which layout 1"):
        decoder.hand_over(build(IDS, [PLAIN, Recr()]))


def test_write_state_with_part_of_a_sliding_window_is_refused(decoder: Decoder) -> None:
    """Rows that the state left out would stay what they were, so it is not written at all."""
    window = Kv(layers=2, k_type=BF16)
    decoder.export(header_of(build(IDS, [PLAIN, window])))
    with pytest.raises(prefill_share.ShareMismatch, match="the last 3 of 5 positions"):
        decoder.hand_over(build(IDS, [PLAIN, replace(window, last=3)]))


def test_write_state_with_a_window_that_the_header_does_not_mark_is_refused(
    decoder: Decoder,
) -> None:
    """Without the mark nothing says which layers a cache's layers are."""
    state = build(IDS, [PLAIN, Kv(layers=2)])
    header = header_of(state)
    for entry in header["tensors"]:
        entry.pop("swa", None)
    decoder.export(header)
    with pytest.raises(prefill_share.ShareMismatch, match="layers: 5 in the header"):
        decoder.hand_over(state)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        pytest.param(build([5, 7, 11, 13, 18], [PLAIN]), "token 4 is not the one", id="other-ids"),
        pytest.param(build(IDS[:4], [PLAIN]), "holds 4 tokens, 5", id="fewer-ids"),
        pytest.param(
            build(IDS, [replace(PLAIN, pos=[1, 2, 3, 4, 5])]), "position 1, 0", id="moved"
        ),
        pytest.param(build(IDS, [PLAIN])[:-1], "not a state of a known kind", id="cut"),
    ],
)
def test_write_state_that_is_not_of_these_ids_writes_nothing(
    state: bytes, said: str, decoder: Decoder
) -> None:
    """A saved slot that is not whole, or of other ids, reaches no memory."""
    decoder.export(header_of(build(IDS, [PLAIN])))
    with pytest.raises(StateFileError, match=said):
        decoder.hand_over(state)
    assert decoder.untouched()


def test_open_share_with_descriptors_that_do_not_fit_is_refused(decoder: Decoder) -> None:
    """Too few, too many, too small, and not open."""
    header = header_of(build(IDS, [PLAIN]), regions=2)
    decoder.export(header)
    path, fds = str(decoder.header_file), decoder.fds
    for some in (fds[:1], [*fds, fds[0]]):
        with pytest.raises(prefill_share.ShareMismatch, match=f"regions: 2 .*, {len(some)} in"):
            prefill_share.open_share(path, some, 5)
    size = header["regions"][1]["size"]
    os.ftruncate(fds[1], size - 1)
    said = rf"regions\[1\]: size {size} in the header, descriptor {fds[1]} has {size - 1} bytes"
    with pytest.raises(prefill_share.ShareMismatch, match=said):
        prefill_share.open_share(path, fds, 5)
    with pytest.raises(OSError, match="Bad file descriptor") as closed:
        prefill_share.open_share(path, [fds[0], 1_000_000], 5)
    assert (closed.value.errno, closed.value.filename) == (errno.EBADF, "1000000")


def test_open_share_of_a_huge_header_is_refused_unread(decoder: Decoder) -> None:
    """A header is at most as large as the daemon takes."""
    decoder.header_file.write_bytes(b" " * (2 << 20))
    with pytest.raises(prefill_share.ShareMismatch, match="more than 1048576 bytes"):
        prefill_share.open_share(str(decoder.header_file), [3], 5)


def test_write_state_into_read_only_memory_is_an_error_before_the_first_byte(
    decoder: Decoder, tmp_path: Path
) -> None:
    """Both descriptors must be writable before one of them is written."""
    state = build(IDS, [PLAIN])
    header = header_of(state, regions=2)
    decoder.export(header)
    os.close(decoder.fds[1])
    (tmp_path / "region").write_bytes(bytes([FILL]) * header["regions"][1]["size"])
    decoder.fds[1] = os.open(tmp_path / "region", os.O_RDONLY)
    with pytest.raises(PermissionError, match=f"descriptor {decoder.fds[1]}: "):
        decoder.hand_over(state)
    assert decoder.untouched()


def test_write_state_stopped_before_the_first_byte_writes_nothing(decoder: Decoder) -> None:
    """What `before_first_byte` raises is the end of it."""
    state = build(IDS, [PLAIN])
    decoder.export(header_of(state))
    share = prefill_share.open_share(str(decoder.header_file), decoder.fds, len(IDS))
    state_fd = os.memfd_create("state")
    os.write(state_fd, state)

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prefill_share.write_state(share, state_fd, IDS, stop)
    os.close(state_fd)
    assert decoder.untouched()


# --- dma-bufs -----------------------------------------------------------------------------------

START, END = 0 << 2 | 2 << 0, 1 << 2 | 2 << 0  # DMA_BUF_SYNC_START/END | DMA_BUF_SYNC_WRITE


@dataclass
class Ioctls:
    """Plays the kernel of a machine with dma-bufs; `fail` are the errors of the next calls."""

    decoder: Decoder
    calls: list[tuple[int, int, bool]] = field(default_factory=list)
    fail: list[int] = field(default_factory=list)

    def ioctl(self, fd: int, request: int, argument: bytes) -> int:
        """Note descriptor, flags, and whether nothing is written yet."""
        assert request == 1 << 30 | struct.calcsize("=Q") << 16 | ord("b") << 8 | 0
        if self.fail and (number := self.fail.pop(0)):
            raise OSError(number, os.strerror(number))
        self.calls.append((fd, *struct.unpack("=Q", argument), self.decoder.untouched()))
        return 0


@pytest.fixture
def ioctls(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> Ioctls:
    """The memory of `decoder` answers as dma-bufs do."""
    found = Ioctls(decoder)
    monkeypatch.setattr(fcntl, "ioctl", found.ioctl)
    return found


def test_write_state_into_dma_bufs_brackets_the_writing(decoder: Decoder, ioctls: Ioctls) -> None:
    """Each is told before the first byte and after the last, also when a call was interrupted."""
    state = build(IDS, [PLAIN])
    decoder.export(header_of(state, regions=2))
    ioctls.fail = [errno.EINTR, errno.EAGAIN]
    decoder.hand_over(state)
    one, two = decoder.fds
    assert ioctls.calls == [
        (one, START, True),
        (two, START, True),
        (two, END, False),
        (one, END, False),
    ]


def test_write_state_into_other_memory_is_not_told_twice(decoder: Decoder, ioctls: Ioctls) -> None:
    """ENOTTY: no dma-buf, and so no end either."""
    state = build(IDS, [PLAIN])
    header = header_of(state)
    decoder.export(header)
    ioctls.fail = [errno.ENOTTY]
    decoder.hand_over(state)
    assert ioctls.calls == []
    assert decoder.memory() == expected(state, header)


@pytest.mark.parametrize("good", [0, 1])
def test_write_state_whose_sync_fails_is_an_error(
    good: int, decoder: Decoder, ioctls: Ioctls
) -> None:
    """At the start nothing is written; at the end it must not count as done."""
    state = build(IDS, [PLAIN])
    decoder.export(header_of(state))
    ioctls.fail = [0] * good + [errno.EIO]
    with pytest.raises(OSError, match="DMA_BUF_IOCTL_SYNC"):
        decoder.hand_over(state)


def test_header_of_the_man_page_has_the_addresses_that_it_works_out() -> None:
    """The worked example of the page is a header that is taken, and its sums are right."""
    page = (ROOT / "man" / "onebit-provider.7").read_text()
    _, _, example = page.partition(".Ss Worked example\n")
    header = example[example.index('{"share_id"') : example.index("\n.Ed")]
    layout = share_layout.parse(header.encode())
    assert layout is not None
    tensors = {tensor.name: tensor for tensor in layout.tensors}
    for kind, tensor in (("K", tensors["cache_k_l1"]), ("V", tensors["cache_v_l1"])):
        at = tensor.offset + 41 * tensor.row_size
        assert f"{kind}:  {tensor.offset} + 41 * 384 = {at}  to {at + 383}\n" in example
    assert layout.tensors[3] is tensors["cache_v_l1"]


def test_header_of_the_tests_is_one_that_the_core_reads() -> None:
    """The headers here are of the format, not of the tests' own making."""
    header = header_of(build(IDS, [PLAIN]), regions=2)
    layout = share_layout.parse(json.dumps(copy.deepcopy(header)).encode())
    assert layout is not None
    assert [tensor.name for tensor in layout.tensors][:3] == [
        "cache_k_l0",
        "cache_v_l0",
        "cache_k_l1",
    ]
