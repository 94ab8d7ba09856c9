"""What the check of a state file costs, as a ratio to the decoder's restore of the same file.

The states are real rows, repeated to the number of tokens: neither the check nor the restore looks
at what the numbers mean. Check and restore take turns, so that both see the same machine; the check
includes its way to another thread and back, the restore is the decoder's own figure. In a handoff
less is left of the check, see `handoff`: it begins before the provider has ended. The least of
all rounds counts: what else the machine does can only add to it. Processor time says what both cost
on a machine that is busy, where threads gain nothing.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from onebitd.adapters.slot_files import SlotFiles
from onebitd.core import state_baseline, state_file
from onebitd.core.state_layout import Block, Rows, StateFile
from onebitd.core.state_write import write_state
from tests.bench.measure import table
from tests.llama_builds import CPU_ONLY, DEMO_PROGRAM, LlamaClient, running_program

LENGTHS = (300, 3500, 30000)
KINDS = {
    "f16": ("-fa", "on"),
    "f16, -fa off": ("-fa", "off"),
    "q8_0": ("-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0"),
}
PROBE = [1, 2, 3]
_HEAD = ("cache, tokens", "MB", "check", "restore", "ratio", "check cpu", "restore cpu", "ratio")
_SOURCE_TOKENS = 300
_CONTEXT = 32768


@dataclass(frozen=True)
class Learned:
    """A decoder, its own states of three and of some tokens."""

    client: LlamaClient
    probe: bytes
    state: bytes
    ids: list[int]


def repeated(block: Block, data: bytes, cells: int) -> bytes:
    """Return the data of a tensor whose cells are repeated to so many."""
    own = data[block.offset : block.offset + block.n_bytes]
    times = math.ceil(cells / block.cells)
    if isinstance(block.tensor, Rows):
        return (own * times)[: block.tensor.data_bytes(cells)]
    size, length = block.tensor.el_size, block.tensor.el_size * block.cells
    channels = (own[at : at + length] for at in range(0, len(own), length))
    return b"".join((channel * times)[: size * cells] for channel in channels)


def tiled(learned: Learned, tokens: Sequence[int], path: Path) -> None:
    """Write a state of these tokens from the rows of the learned one."""
    source: StateFile = state_file.parse(learned.state)

    def tensors() -> Iterator[bytes]:
        for section in source.sections:
            for block in section.blocks:
                yield repeated(block, learned.state, len(tokens))

    with path.open("wb") as file:
        write_state(file.write, source.layout, tokens, tensors())


@dataclass(frozen=True)
class Cost:
    """Milliseconds by the clock, and of all processors together."""

    wall_ms: float
    cpu_ms: float


def check_cost(slots: SlotFiles, state: Path, learned: Learned, tokens: Sequence[int]) -> Cost:
    """Return what the daemon's check of a file takes; the file stays where it is."""
    layout = state_file.learn_layout(learned.probe, PROBE)
    baseline = state_baseline.learn_baseline(learned.probe, state_file.parse(learned.probe))

    async def take() -> Cost:
        await once()  # the first of an event loop starts its thread
        return await once()

    async def once() -> Cost:
        run = slots.new_run([])
        os.rename(state, run.state_path)
        started, used = time.perf_counter(), time.process_time()
        name, _ = await run.take_state(layout, tokens, None, baseline)
        cost = Cost((time.perf_counter() - started) * 1000.0, (time.process_time() - used) * 1000.0)
        run.remove()
        os.rename(slots.path / name, state)
        return cost

    return trio.run(take)


def restore_cost(client: LlamaClient, n_tokens: int) -> Cost:
    """Have the decoder restore the linked file, and return what that took."""
    used = cpu_ms(client.process.pid)
    reply = client.slot_action("restore", "link")
    assert (reply.status, reply.json["n_restored"]) == (200, n_tokens), reply.body
    return Cost(reply.json["timings"]["restore_ms"], cpu_ms(client.process.pid) - used)


def cpu_ms(pid: int) -> float:
    """Return the processor time of all threads of a process so far."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e6


def saved(client: LlamaClient, ids: list[int]) -> bytes:
    """Return the state that the decoder saves of these ids."""
    client.slot_action("erase", "")
    client.complete(ids, 0)
    assert client.slot_action("save", "own").status == 200
    return (client.slots_dir / "own").read_bytes()


def rows_of(
    name: str, client: LlamaClient, tmpfs: Path, lengths: Sequence[int], rounds: int
) -> list[list[str]]:
    """Measure one kind of cache at each length."""
    text = "The quick brown fox jumps over the lazy dog and runs into the deep green forest. "
    ids = client.tokenize(text * (_SOURCE_TOKENS // 10))[:_SOURCE_TOKENS]
    learned = Learned(client, saved(client, PROBE), saved(client, ids), ids)
    slots = SlotFiles(tmpfs / "slots")
    rows = []
    for length in lengths:
        tokens = (ids * math.ceil(length / len(ids)))[:length]
        path = tmpfs / "state"
        tiled(learned, tokens, path)
        (client.slots_dir / "link").unlink(missing_ok=True)
        (client.slots_dir / "link").symlink_to(path)
        checks: list[Cost] = []
        restores: list[Cost] = []
        for number in range(rounds):
            what = f"check, {name}, {length} tokens, round {number + 1} of {rounds}"
            print(what, file=sys.stderr, flush=True)
            checks.append(check_cost(slots, path, learned, tokens))
            restores.append(restore_cost(client, length))
        figures = [f"{path.stat().st_size / 1e6:.1f}"]
        for of in (lambda cost: cost.wall_ms, lambda cost: cost.cpu_ms):
            check, restore = min(map(of, checks)), min(map(of, restores))
            figures += [f"{check:.2f}", f"{restore:.2f}", f"{check / restore:.2f}"]
        rows.append([f"{name}, {length}", *figures])
        path.unlink()
    shutil.rmtree(slots.path)
    return rows


def check_table(model: Path, tmpfs: Path, rounds: int) -> str:
    """Measure all kinds and lengths and return the table."""
    rows = []
    for name, kind in KINDS.items():
        arguments = ["-m", str(model), "-np", "1", "--cache-ram", "0", "-c", str(_CONTEXT)]
        # The slot's context is cut to the model's own, which is shorter.
        arguments += ["--override-kv", f"llama.context_length=int:{_CONTEXT}"]
        with running_program(DEMO_PROGRAM, (*arguments, "-t", "1", *CPU_ONLY, *kind)) as client:
            rows += rows_of(name, client, tmpfs, LENGTHS, rounds)
    cores = len(os.sched_getaffinity(0))
    return table(
        f"The check of a state file and its restore, least of {rounds} rounds, {cores} cores",
        _HEAD,
        rows,
    )
