"""Both routes on the same prompts: what a handoff costs by state file and through shared memory.

Both daemons have the same decoder behind the same front (tests/standins/share_front.py), so that
what the front adds to each request is on both sides.

How bytes are counted: those of the cache that the daemon, the decoder and what the provider hands
over must move, from sizes that are known, not from the kernel's counters, which would count the
inside of each program too.

- By file: the state file's size three times: the provider writes it, the daemon's check reads every
  byte, the decoder's restore reads it.
- Shared: the rows of the handed positions once, as the provider writes them, and the rows that the
  daemon marks before and looks at after. The decoder reads nothing, its cells are the memory.

Not counted: how a provider comes by its rows (the reference one has its own llama-server save
them, on both routes), and what the front copies to adopt.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onebitd.adapters import share_memory
from onebitd.core import share_layout, share_wire
from onebitd.core.backend_args import SHARE_VARIABLE
from onebitd.core.share_layout import ShareLayout
from tests.bench.measure import Streamed, median, stream, table
from tests.harness import RunningDaemon, running_onebitd
from tests.llama_builds import (
    CPU_ONLY,
    DEMO_PROGRAM,
    LlamaClient,
    running_program,
    short_temporary_directory,
)
from tests.standins import share_front

FILE_COPIES = 3
PATH = "/v1/chat/completions"
_HEAD = ("prompt, figure", "file", "shared", "shared/file")
_WARM_UP_TOKENS = 100
_READ_BYTES = 1 << 16
_HANDSHAKE_S = 60.0

TITLE = """\
State file against shared memory, the same prompts, both through the same front.
Moved: the state file, written and read twice (check, restore) | rows written, and marks.
The front copies at adopt: it writes a state file of the shared rows and has llama-server restore
it. So adopt, and tax and first byte with it, is an upper bound here: a decoder that exports its
own cells copies nothing.
Tax: first byte less provider run and the decoder's own prompt time; without adopt: and less
restore | adopt."""


@dataclass(frozen=True)
class Figures:
    """What one handoff cost.

    Attributes:
        moved_bytes: see the module's docstring.
        before_ms, after_ms: check and restore, or share and adopt.
        tax_ms: what the client waits for beyond the provider's run and the decoder's own
            evaluation.
        first_byte_ms: as the client saw it.
    """

    prompt_tokens: int
    moved_bytes: int
    before_ms: float
    after_ms: float
    tax_ms: float
    first_byte_ms: float


def file_bytes(state_bytes: int) -> int:
    """Return the bytes moved for a state file of this size."""
    return FILE_COPIES * state_bytes


def shared_bytes(layout: ShareLayout, n_tokens: int) -> int:
    """Return the bytes moved for so many positions in shared memory."""
    position_bytes = sum(tensor.row_size for tensor in layout.tensors)
    marked = len(share_memory.marked_positions(n_tokens))
    return position_bytes * (n_tokens + 2 * marked)


def figures_of(record: Mapping[str, Any], seen: Streamed, layout: ShareLayout) -> Figures:
    """Read one handoff's record and reply; AssertionError when it did not go as it should."""
    assert record["outcome"] == "used", record
    if record["route"] == "shared":
        moved = shared_bytes(layout, record["handed_tokens"])
        before, after = record["share_ms"], record["adopt_ms"]
    else:
        assert "share_ms" not in record, record
        moved = file_bytes(record["state_bytes"])
        before, after = record["check_ms"], record["restore_ms"]
    return Figures(
        prompt_tokens=record["prompt_tokens"],
        moved_bytes=moved,
        before_ms=before,
        after_ms=after,
        tax_ms=seen.first_byte_ms - record["provider_wall_ms"] - seen.timings["prompt_ms"],
        first_byte_ms=seen.first_byte_ms,
    )


def comparison(by_file: Sequence[Figures], shared: Sequence[Figures]) -> list[list[str]]:
    """Return the rows of one prompt length: medians of both routes and their ratio."""
    both = (by_file, shared)
    (prompt_tokens,) = {one.prompt_tokens for route in both for one in route}

    def row(name: str, digits: int, figure: Callable[[Figures], float]) -> list[str]:
        file, memory = (median(map(figure, route)) for route in both)
        figures = [f"{value:.{digits}f}" for value in (file, memory)]
        return [f"{prompt_tokens:4} {name}", *figures, f"{memory / file:.3f}"]

    return [
        row("moved, MB", 2, lambda one: one.moved_bytes / 1e6),
        row("check | share, ms", 2, lambda one: one.before_ms),
        row("restore | adopt, ms", 2, lambda one: one.after_ms),
        row("both of these, ms", 2, lambda one: one.before_ms + one.after_ms),
        row("tax, ms", 1, lambda one: one.tax_ms),
        row("tax without adopt, ms", 1, lambda one: one.tax_ms - one.after_ms),
        row("first byte, ms", 1, lambda one: one.first_byte_ms),
    ]


def comparison_table(rows: Sequence[Sequence[str]]) -> str:
    """Return the table of all prompt lengths, with what must be known to read it."""
    return table(TITLE, _HEAD, rows)


def exported_layout(client: LlamaClient) -> ShareLayout:
    """Have a front share its memory and return the layout; the descriptors are closed."""
    with short_temporary_directory() as home, socket.socket(socket.AF_UNIX) as listener:
        path = home / "share.sock"
        listener.bind(os.fspath(path))
        listener.listen(1)
        listener.settimeout(_HANDSHAKE_S)
        client.post("/slots/0?action=share", {"socket": os.fspath(path)})  # waits in the backlog
        peer, _ = listener.accept()
        receiver = share_wire.ShareReceiver()
        message = None
        with peer:
            while message is None:
                data, fds, _, _ = socket.recv_fds(peer, _READ_BYTES, share_wire.MAX_FDS)
                for fd in fds:
                    os.close(fd)
                message = receiver.feed(data, fds)
    layout = share_layout.parse(message.header)
    assert layout is not None
    return layout


def hand_off(daemon: RunningDaemon, content: str, layout: ShareLayout, route: str) -> Figures:
    """Send one chat that must take this route."""
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "temperature": 0}
    before = len(daemon.handoffs())
    seen = stream(daemon.connect(600.0), PATH, body)
    record = daemon.last_handoff(before + 1)
    assert record["route"] == route, record
    return figures_of(record, seen, layout)


@contextlib.contextmanager
def _running(
    front: Path, model: Path, decoder: Sequence[str], handoff: str
) -> Iterator[RunningDaemon]:
    """Run a daemon whose decoder has the front."""
    with running_onebitd(
        model=model,
        llama_server=front,
        provider=Path(sys.executable).with_name("onebit-prefill-llama"),
        backend_args=decoder,
        config=f"[handoff]\n{handoff}\n",
        env={
            "ONEBIT_PREFILL_LLAMA_SERVER": str(DEMO_PROGRAM),
            "ONEBIT_PREFILL_LLAMA_ARGS": " ".join(("-t", "1", *CPU_ONLY)),
        },
    ) as daemon:
        yield daemon


def compare_routes(
    model: Path,
    decoder: Sequence[str],
    state_dir: Path,
    chat_of: Callable[[LlamaClient, int], str],
    lengths: Sequence[int],
    rounds: int,
) -> list[list[str]]:
    """Measure both routes, interleaved, and return the rows of the table.

    Args:
        decoder: arguments of the decoders.
        state_dir: for state files.
        chat_of: makes a user message of about so many tokens.
        lengths: of the prompts, in tokens.
        rounds: repeats of each figure.
    """
    with short_temporary_directory() as home:
        front = share_front.launcher(home, DEMO_PROGRAM)
        arguments = ("-m", str(model), "-np", "1", "--cache-ram", "0", *decoder)
        sharing = os.environ | {SHARE_VARIABLE: "1"}
        with running_program(front, arguments, sharing) as client:
            layout = exported_layout(client)
            messages = {length: chat_of(client, length) for length in lengths}
            warm_up = chat_of(client, _WARM_UP_TOKENS)
        with (
            _running(front, model, decoder, f'state_dir = "{state_dir}"') as by_file,
            _running(front, model, decoder, "share = true") as shared,
        ):
            routes = [("file", by_file), ("shared", shared)]
            for route, daemon in routes:  # a front learns its layout at its first share
                hand_off(daemon, warm_up, layout, route)
            rows = []
            for length, message in messages.items():
                found: dict[str, list[Figures]] = {"file": [], "shared": []}
                for number in range(rounds):
                    what = f"both routes, {length} tokens, round {number + 1} of {rounds}"
                    print(what, file=sys.stderr, flush=True)
                    content = f"Round {number} of {length}. {message}"
                    for route, daemon in routes:
                        found[route].append(hand_off(daemon, content, layout, route))
                    routes.reverse()
                rows += comparison(found["file"], found["shared"])
            return rows
