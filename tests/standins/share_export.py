"""What the front exports: memory that is laid out as a decoder's cache, and the handshake.

Each thing that a decoder can do wrong in the handshake has a name; share_front lists them.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onebitd.core import gguf_header, share_wire
from onebitd.core.share_layout import ALIGNMENT, LAYOUT
from onebitd.core.state_layout import KvSection, Layout, Rows, type_name
from onebitd.core.state_sections import MAGIC

SWA_PATTERNS = {"gemma3": 6}
"""Of so many layers the last has no sliding window (llama.cpp, set_swa_pattern)."""
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Place:
    """One tensor: where it lies in the memory, and what it is."""

    name: str
    rows: Rows
    region: int
    offset: int
    swa: bool


class Memory:
    """The regions of one cache and what lies where in them.

    Args:
        layout: of the decoder's states; nothing but attention, nothing transposed.
        layers: the model's layers of each section, in order.
    """

    def __init__(
        self, layout: Layout, layers: Sequence[Sequence[int]], n_cells: int, n_regions: int
    ) -> None:
        self.layout = layout
        self.n_cells = n_cells
        self.sections: list[list[tuple[Place, Place | None]]] = []
        found: dict[int, tuple[int, Rows, Rows | None]] = {}
        for number, (section, of_section) in enumerate(zip(layout.sections, layers, strict=True)):
            assert isinstance(section, KvSection)
            for index, layer in enumerate(of_section):
                v = section.v[index] if section.v else None
                assert v is None or isinstance(v, Rows)
                found[layer] = (number, section.k[index], v)
            self.sections.append([])
        sizes = [0] * n_regions
        self.places: list[Place] = []
        for index, layer in enumerate(sorted(found)):
            number, k, v = found[layer]
            region = index * n_regions // len(found)
            pair = [
                self._place(f"cache_{kind}_l{layer}", rows, region, sizes, swa=number == 1)
                for kind, rows in (("k", k), ("v", v))
                if rows is not None
            ]
            self.sections[number].append((pair[0], pair[1] if v else None))
        self.sizes = sizes
        self.fds = [self._region(size) for size in sizes]
        self._maps = [mmap.mmap(fd, size) for fd, size in zip(self.fds, sizes, strict=True)]

    def _place(self, name: str, rows: Rows, region: int, sizes: list[int], *, swa: bool) -> Place:
        place = Place(name, rows, region, sizes[region], swa)
        end = place.offset + rows.row_size * self.n_cells
        sizes[region] = -(-end // ALIGNMENT) * ALIGNMENT
        self.places.append(place)
        return place

    @staticmethod
    def _region(size: int) -> int:
        fd = os.memfd_create("share-front", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.truncate(fd, size)
        # Nobody who gets it may pull the pages from under our mapping.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return fd

    def header(self, share_id: int) -> dict[str, Any]:
        """Return the message's JSON."""
        tensors = [
            {
                "name": place.name,
                "type": type_name(place.rows.type),
                "row_size": place.rows.row_size,
                "region": place.region,
                "offset": place.offset,
                **({"swa": True} if place.swa else {}),
            }
            for place in self.places
        ]
        return {
            "share_id": share_id,
            "layout": LAYOUT,
            "n_cells": self.n_cells,
            "regions": [{"size": size} for size in self.sizes],
            "tensors": tensors,
            "exporter": "share_front",
        }

    def state(self, tokens: Sequence[int], window: int | None) -> bytes:
        """Return the sequence state whose cells are the first rows of each tensor.

        Args:
            tokens: one for each cell.
            window: the sliding window; its section gets the last so many cells, as llama-server
                saves them.
        """
        n = len(tokens)
        parts = [struct.pack(f"<III{n}i", MAGIC, self.layout.version, n, *tokens)]
        for number, section in enumerate(self.layout.sections):
            assert isinstance(section, KvSection)
            first = max(0, n - window) if number == 1 and window else 0
            parts.append(struct.pack("<II", 1, n - first))
            for pos in range(first, n):
                ext = (pos, pos, tokens[pos])[: section.ext_bytes // 4]
                parts.append(struct.pack(f"<iI{len(ext)}ii", pos, 1, *ext, 0))
            parts.append(struct.pack("<II", 0, len(section.k)))
            if section.n_rot_k is not None:
                parts.append(struct.pack("<II", section.n_rot_k, section.n_rot_v or 0))
            pairs = self.sections[number]
            tensors = [k for k, _ in pairs] + [v for _, v in pairs if v is not None]
            for place in tensors:
                size = place.rows.row_size
                parts.append(struct.pack("<iQ", place.rows.type, size))
                start = place.offset + first * size
                parts.append(self._maps[place.region][start : place.offset + n * size])
        return b"".join(parts)


def layer_numbers(
    header: gguf_header.GgufHeader, sections: Sequence[KvSection]
) -> list[list[int]] | None:
    """Return which of the model's layers each section holds, None if that is not known."""
    counts = [len(section.k) for section in sections]
    n_layer = header.block_count or counts[0]
    every = range(n_layer)
    if len(sections) == 1:
        found = [list(every)]
    else:
        step = SWA_PATTERNS.get(header.architecture, 0)
        if not step:
            return None
        full = [layer for layer in every if layer % step == step - 1]
        found = [full, [layer for layer in every if layer not in full]]
    return found if [len(layers) for layers in found] == counts else None


def hand_over(
    path: str, header: Mapping[str, Any], fds: Sequence[int], mode: str, client: socket.socket
) -> None:
    """Connect to the client's socket and send the message, or what `mode` makes of it; OSError."""
    if mode == "silent":
        return
    if mode == "never":
        wait_hang_up(client)
    if mode in ("child", "stranger", "stranger-first"):
        helper(path, share_wire.encode(header), fds, detached=mode != "child")
    if mode not in ("child", "stranger"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.connect(path)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                speak(peer, header, fds, mode)


def speak(peer: socket.socket, header: Mapping[str, Any], fds: Sequence[int], mode: str) -> None:
    """Send the message, well or badly."""
    wire = share_wire.encode(header)
    half = len(wire) // 2
    if mode == "stall":
        wait_hang_up(peer)
    elif mode == "stall-half":
        socket.send_fds(peer, [wire[:half]], fds)
        wait_hang_up(peer)
    elif mode == "garbage":
        socket.send_fds(peer, [b"\r\n\r\n" * 99], fds)
    elif mode == "close-after-length":
        socket.send_fds(peer, [wire[:4]], fds)
    elif mode == "no-fds":
        peer.sendall(wire)
    elif mode == "no-id":
        anonymous = {key: value for key, value in header.items() if key != "share_id"}
        socket.send_fds(peer, [share_wire.encode(anonymous)], fds)
    elif mode == "no-json":
        socket.send_fds(peer, [wire[:4] + b"x" * (len(wire) - 4)], fds)
    elif mode == "many-fds":
        socket.send_fds(peer, [wire[:half]], [fds[0]] * 150)
        socket.send_fds(peer, [wire[half:]], [fds[0]] * 150)
    elif mode == "late-fds":
        socket.send_fds(peer, [wire[:half]], fds)
        socket.send_fds(peer, [wire[half:]], fds)
    elif mode == "trailing":
        socket.send_fds(peer, [wire + b"more"], fds)
    elif mode != "close":
        socket.send_fds(peer, [wire], fds)


def wait_hang_up(end: socket.socket) -> None:
    """Wait until the other side has closed."""
    with contextlib.suppress(ConnectionResetError):
        while end.recv(_READ_BYTES, socket.MSG_PEEK):
            time.sleep(0.01)


_HELPER = """
import contextlib, os, socket, sys, time
path, detached, fds = sys.argv[1], sys.argv[2] == "1", list(map(int, sys.argv[3:]))
parent = os.getpid()
if detached:
    if os.fork():
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(0.002)
wire = sys.stdin.buffer.read()
with socket.socket(socket.AF_UNIX) as peer, contextlib.suppress(OSError):
    peer.connect(path)
    socket.send_fds(peer, [wire], fds)
    peer.recv(1)
"""


def helper(path: str, wire: bytes, fds: Sequence[int], *, detached: bool) -> None:
    """Have another process send the message, and wait until it was hung up on and has ended."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _HELPER, path, str(int(detached)), *map(str, fds)],
        input=wire,
        stdout=subprocess.PIPE,  # at its end the detached one has ended too
        pass_fds=fds,
        check=False,
    )
    if done.returncode != 0:
        raise OSError(done.returncode, "the helper failed")
