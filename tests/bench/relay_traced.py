"""What a daemon does for one chunk, one request, one handoff: system calls and Python calls.

Both come from the difference of a longer and a shorter run, so that what a request costs is no part
of what a chunk costs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from tests.bench.call_counter import installed_in
from tests.bench.relay_designs import Front
from tests.bench.relay_fronts import Fronts, chat, front_of, passed, running_relay
from tests.bench.relay_load import connect, get, is_whole
from tests.bench.relay_rows import Row, at_most, missing
from tests.harness import wait_until

SMALL = get("/v1/models")

Calls = Counter[str]
"""By name of the call or of the function."""


def stream_whole(front: Front, request: str) -> int:
    """Ask once on a new connection, and read a streamed reply to its end.

    Returns:
        In how many pieces it came: a daemon that is slow because it is traced passes on several
        chunks at once.
    """
    pieces = 0
    with connect(front.address) as sock:
        sock.sendall(request.encode())
        tail = b""
        while not tail.endswith(b"\r\n0\r\n\r\n"):
            data = sock.recv(1 << 16)
            assert data, f"the reply broke off: {tail!r}"
            tail = (tail + data)[-200:]
            pieces += 1
    return pieces


def ask_again(front: Front, request: str, times: int) -> int:
    """Ask so many times on one connection; return how many."""
    with connect(front.address) as sock:
        for _ in range(times):
            sock.sendall(request.encode())
            reply = b""
            while not is_whole(reply):
                data = sock.recv(1 << 16)
                assert data, f"the connection ended: {reply!r}"
                reply += data
    return times


def per_piece(
    count: Callable[[Callable[[], object]], Calls], run: Callable[[int], int]
) -> dict[str, float]:
    """Return the calls for one of what `run` does so many of, the most frequent first.

    Args:
        count: counts while its argument runs.
        run: returns how many it was; what is the same for many and for few is left out.
    """
    done: list[int] = []
    few, many = (
        count(lambda number=number: done.append(run(number)))  # type: ignore[misc]
        for number in (FEW, MANY)
    )
    many.subtract(few)
    pieces = done[1] - done[0]
    return {name: calls / pieces for name, calls in many.most_common() if calls}


def why_no_strace(pid: int) -> str | None:
    """Return why this process's system calls cannot be counted, None when they can be."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    try:
        system_calls(pid, lambda: None)
    except AssertionError as error:
        return f"strace does not work here: {error}"
    return None


def system_calls(pid: int, work: Callable[[], object]) -> Calls:
    """Return the system calls of a process and all its threads while `work` runs."""
    with tempfile.TemporaryDirectory() as home:
        out = Path(home) / "counts"
        argv = ["strace", "-f", "-c", "-p", str(pid), "-o", str(out)]
        with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as tracer:
            assert tracer.stderr is not None
            said = tracer.stderr.readline()
            if "attached" in said:
                work()
            tracer.send_signal(signal.SIGINT)
            said += tracer.communicate()[1]
        assert "attached" in said, said.strip()
        # % time, seconds, usecs/call, calls, errors (may be empty), name
        lines = re.findall(r"(?m)^ *[\d.]+ +[\d.]+ +\d+ +(\d+) +(?:\d+ +)?(\w+)$", out.read_text())
    return Calls({name: int(calls) for calls, name in lines if name != "total"})


def python_calls(pid: int, counts: Path, work: Callable[[], object]) -> Calls:
    """Return the Python functions that a process enters on its main thread while `work` runs.

    Args:
        counts: see call_counter.
    """
    counts.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR1)
    work()
    os.kill(pid, signal.SIGUSR1)
    wait_until(counts.exists, "the calls are counted")
    return Calls(json.loads(counts.read_text()))


@contextlib.contextmanager
def counting_environment(code: Path) -> Iterator[tuple[dict[str, str], Path]]:
    """Yield the environment of a program that counts its calls, and where it puts the counts."""
    with tempfile.TemporaryDirectory(prefix="onebitd-calls-") as home:
        yield installed_in(Path(home), code), Path(home) / "calls"


def call_rows(fronts: Fronts, code: Path) -> list[Row]:
    """Count system calls and Python calls for a chunk and for a small request."""
    rows = _system_call_rows(fronts)
    with counting_environment(code) as (env, counts), running_relay(code, env=env) as daemon:
        ours, pid = front_of(daemon), daemon.process.pid
        for what, work, _, goal in WORKS:
            calls = per_piece(partial(python_calls, pid, counts), partial(work, ours))
            rows.append(at_most(f"Python calls per {what}", sum(calls.values()), goal))
            explain(what, calls)
    return rows


def _system_call_rows(fronts: Fronts) -> list[Row]:
    pid = fronts.daemon.process.pid
    why_not = why_no_strace(pid)
    if why_not is not None:
        return [missing("system calls", why_not)]
    rows = []
    for what, work, goal, _ in WORKS:
        calls = per_piece(partial(system_calls, pid), partial(work, fronts.ours))
        most = ", ".join(f"{name} {count:.2f}" for name, count in list(calls.items())[:5])
        rows.append(at_most(f"system calls per {what}", sum(calls.values()), goal, note=most))
    return rows


def explain(what: str, calls: Mapping[str, float]) -> None:
    """Say on stderr where the calls go; the most frequent are first."""
    print(f"Python calls per {what}:", file=sys.stderr)
    for name, count in list(calls.items())[:EXPLAINED]:
        print(f"{count:8.2f}  {name}", file=sys.stderr)


def _passed(front: Front, count: int) -> int:
    return stream_whole(front, passed(RATE, count))


def _chat(front: Front, count: int) -> int:
    return stream_whole(front, chat(RATE, count))


def _small(front: Front, count: int) -> int:
    return ask_again(front, SMALL, count)


FEW, MANY = 20, 220
RATE = 60
"""Chunks a second: as fast as a daemon that is traced passes them on one by one."""
EXPLAINED = 25
WORKS = (
    ("streamed chunk, passed", _passed, 4.2, 120.0),
    ("streamed chunk, chat", _chat, 4.2, 120.0),
    ("small GET", _small, 16.0, 1300.0),
)
"""What is done how often on a front; the goals of system calls and Python calls."""
