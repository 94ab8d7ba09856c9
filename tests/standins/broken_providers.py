#!/usr/bin/env python3
"""Providers that look right and are not, for the conformance kit to find out.

A wrapper around onebit-prefill-llama: it has that make a real state file and then does what
BROKEN_PROVIDER says. Models of the llama architecture only, and an f16 cache.

    one_short               the file holds one token less than was handed over
    no_rope                 every K as it was before RoPE
    swapped_kv              K and V of layer 3 exchanged
    head_scaled             head 1 of layer 7's V is 1 % too large
    early_exit              ends with status 0 while a child still writes the file
    in_place                writes under the file's own name, in two pieces
    leaves_temporary        leaves the file it renamed a copy of
    ignores_sigterm         goes on after SIGTERM: the script that starts it sees to that
    leaves_child            leaves a sleeping child in its process group
    any_ids                 takes any ids file for a prompt
    no_file                 ends with status 0 and writes nothing
    hangs                   sleeps, with a child
    dithers                 the lowest bits of a few values differ from run to run
    honest                  nothing is wrong
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from onebitd.core import gguf_header, state_file, state_values
from onebitd.core.state_layout import Block, StateFile

EARLY_S = 0.6
ROPE_BASE = 100000.0
"""Of SmolLM2."""


def main() -> int:
    """Run the provider that BROKEN_PROVIDER names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--elfs")
    options = parser.parse_args()
    mode = os.environ["BROKEN_PROVIDER"]
    if mode == "no_file":
        return 0
    if mode in ("leaves_child", "hangs"):
        subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if mode == "hangs":
        time.sleep(60)
    work = options.out.parent / ".work"
    work.mkdir(exist_ok=True)
    good, ids = work / "good", work / "ids"
    words = options.tokens.read_text().split()
    words = words[:-1] if mode == "one_short" else words
    ids.write_text("".join(f"{word}\n" for word in words))
    done = prefill(ids, good, options.model)
    if done.returncode and mode == "any_ids":
        ids.write_text("1\n")
        done = prefill(ids, good, options.model)
    if done.returncode:
        shutil.rmtree(work)
        sys.stderr.write(done.stderr)
        return done.returncode
    if mode in SPOILERS:
        spoil(good, options.model, SPOILERS[mode])
    deliver(mode, good, options.out)
    shutil.rmtree(work, ignore_errors=mode == "early_exit")
    sys.stdout.write(done.stdout)
    return 0


def prefill(ids: Path, out: Path, model: Path) -> subprocess.CompletedProcess[str]:
    """Run onebit-prefill-llama."""
    command = [sys.executable, "-m", "onebitd.prefill_llama", "--tokens", str(ids)]
    command += ["--out", str(out), "--model", str(model)]
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def deliver(mode: str, good: Path, out: Path) -> None:
    """Bring the file to its place."""
    if mode == "early_exit":
        whole = good.read_bytes()
        if os.fork() == 0:
            for stream in (0, 1, 2):
                os.close(stream)
            time.sleep(EARLY_S)
            out.write_bytes(whole)
            os._exit(0)
        return
    if mode == "in_place":
        whole = good.read_bytes()
        with out.open("wb") as file:
            file.write(whole[: len(whole) // 2])
            file.flush()
            file.write(whole[len(whole) // 2 :])
        return
    if mode == "leaves_temporary":
        shutil.copyfile(good, out.with_name("prefill.tmp"))
    good.replace(out)


def spoil(path: Path, model: Path, how: Callable[[Spoiled], None]) -> None:
    """Change the values of a state file."""
    data = bytearray(path.read_bytes())
    how(Spoiled(data, state_file.parse(bytes(data)), model))
    path.write_bytes(data)


class Spoiled:
    """A state file in memory, whose tensors can be read and replaced."""

    def __init__(self, data: bytearray, state: StateFile, model: Path) -> None:
        self.data = data
        self.blocks = state.sections[0].blocks
        self.header = gguf_header.read(model.read_bytes())

    def block(self, part: str, layer: int) -> Block:
        """Return the place of a tensor."""
        return next(one for one in self.blocks if (one.part, one.layer) == (part, layer))

    def raw(self, block: Block) -> bytes:
        """Return its bytes."""
        return bytes(self.data[block.offset : block.offset + block.n_bytes])

    def put(self, block: Block, data: bytes) -> None:
        """Replace its bytes."""
        assert len(data) == block.n_bytes
        self.data[block.offset : block.offset + block.n_bytes] = data

    def swap(self, one: Block, other: Block) -> None:
        """Exchange the bytes of two tensors."""
        first, second = self.raw(one), self.raw(other)
        self.put(one, second)
        self.put(other, first)

    def values(self, block: Block) -> np.typing.NDArray[np.float32]:
        """Return its values, (cells, width)."""
        return np.array(state_values.decode(block.tensor, self.raw(block), block.cells))

    def put_values(self, block: Block, values: np.typing.NDArray[np.float32]) -> None:
        """Replace its values."""
        self.put(block, state_values.encode(block.tensor.type, values))


def no_rope(state: Spoiled) -> None:
    """Turn every pair of every K back by its angle."""
    head = state.header.head_dim
    assert head is not None
    for block in state.blocks:
        if block.part != "K":
            continue
        rows = state.values(block)
        pairs = rows.reshape(len(rows), -1, head // 2, 2)
        speeds = ROPE_BASE ** (-2 * np.arange(head // 2) / head)
        angles = np.arange(len(rows))[:, None] * speeds
        turn = np.exp(-1j * angles)[:, None, :]
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
        back = np.stack([turned.real, turned.imag], axis=-1).reshape(rows.shape)
        state.put_values(block, back.astype(np.float32))


def scale_head(state: Spoiled) -> None:
    """Multiply one head of V by 1.01."""
    head = state.header.head_dim
    assert head is not None
    block = state.block("V", 7)
    rows = state.values(block)
    rows[:, head : 2 * head] *= 1.01
    state.put_values(block, rows)


def dither(state: Spoiled) -> None:
    """Change the lowest bits of a few values, by chance."""
    start, chance = state.block("V", 0).offset, time.monotonic_ns()
    for value in range(8):
        state.data[start + 2 * value] ^= chance >> (2 * value) & 3


SPOILERS: dict[str, Callable[[Spoiled], None]] = {
    "no_rope": no_rope,
    "swapped_kv": lambda state: state.swap(state.block("K", 3), state.block("V", 3)),
    "head_scaled": scale_head,
    "dithers": dither,
}

if __name__ == "__main__":
    sys.exit(main())
