"""What the daemon costs while nothing happens, how long it takes to be there, and its command."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.measure import median
from tests.bench.relay_fronts import Extent, running_relay
from tests.bench.relay_load import cpu_ns
from tests.bench.relay_rows import Row, at_most, told
from tests.harness import RunningDaemon, clean_environ
from tests.llama_builds import short_temporary_directory

HEAVY = ("trio", "httpx2", "quart", "hypercorn", "structlog")
STATUS = "from onebitd.surfaces.cli import main; status = main(['--socket', '{}', 'status'])"
STARTS = 5


def idle_rows(code: Path, extent: Extent) -> list[Row]:
    """Measure an idle daemon, `onebitctl status`, and starts."""
    with as_installed(code) as env, running_relay(code, env=env) as daemon:
        time.sleep(1.0)  # what a start leaves to do
        rows = quiet_rows(daemon, extent.idle_s)
        rows += status_rows(daemon, code, extent.leaves)
    starts = min(STARTS, extent.leaves)
    cpu = [listening_s(code, "cpu") for _ in range(starts)]
    hybrid = [listening_s(code, "hybrid") for _ in range(starts)]
    what = "listening after the start"
    asks = ", device hybrid: llama-server is asked for its devices first"
    note = f"{median(spent for _, spent in cpu):.2f} s of processor"
    return [
        *rows,
        at_most(what, median(took for took, _ in cpu), 0.5, " s", note),
        told(what + asks, median(took for took, _ in hybrid), " s"),
    ]


@contextlib.contextmanager
def as_installed(code: Path) -> Iterator[dict[str, str]]:
    """Yield an environment without what only the tools of development bring along.

    structlog imports `rich` where there is one; nothing of onebitd does, and 3 MiB are its own.
    """
    with short_temporary_directory() as hidden:
        (hidden / "rich.py").write_text('raise ImportError("no dependency of onebitd")\n')
        yield {"PYTHONPATH": f"{hidden}:{code}"}


def quiet_rows(daemon: RunningDaemon, seconds: float) -> list[Row]:
    """Measure wakeups, processor time and memory."""
    pid = daemon.process.pid
    before, spent = switches(pid), cpu_ns([pid])
    time.sleep(seconds)
    wakeups = sum(count - before.get(thread, 0) for thread, count in switches(pid).items())
    spent = cpu_ns([pid]) - spent
    status = Path(f"/proc/{pid}/status").read_text()
    rss = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert rss is not None
    return [
        at_most("idle: wakeups a second", wakeups / seconds, 1, note=f"{seconds:g} s"),
        told("idle: processor", spent / seconds / 1e7, " %"),
        at_most("idle: RSS", int(rss.group(1)) / 1024, 60, " MiB"),
    ]


def switches(pid: int) -> dict[str, int]:
    """Return how often each thread of a process has gone to sleep."""
    found = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            status = (thread / "status").read_text()
            match = re.search(r"\nvoluntary_ctxt_switches:\s+(\d+)", status)
            found[thread.name] = int(match.group(1)) if match else 0
    return found


def status_rows(daemon: RunningDaemon, code: Path, times: int) -> list[Row]:
    """Measure `onebitctl status` against an interpreter that does nothing, and look at imports."""
    env = clean_environ(daemon.runtime) | {"PYTHONPATH": os.fspath(code)}
    status = STATUS.format(daemon.runtime / "control.sock")

    def wall_ms(program: str) -> float:
        began = time.monotonic()
        argv = [sys.executable, "-c", program]
        done = subprocess.run(argv, env=env, cwd="/", capture_output=True, text=True, check=True)
        took_ms = (time.monotonic() - began) * 1000
        assert not done.stderr, done.stderr
        return took_ms

    pairs = [(wall_ms("pass"), wall_ms(status)) for _ in range(times)]
    bare, ours = (median(values) for values in zip(*pairs, strict=True))
    program = f"import sys; {status}; print(*sys.modules, file=sys.stderr)"
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, env=env, cwd="/", capture_output=True, text=True, check=True)
    heavy = sorted(set(HEAVY) & set(done.stderr.split()))
    note = f"{ours:.0f} ms, {bare:.0f} ms"
    return [
        at_most("onebitctl status / bare interpreter", ours / bare, 5, "x", note),
        at_most("onebitctl status: heavy imports", len(heavy), 0, note=", ".join(heavy)),
    ]


def listening_s(code: Path, device: str) -> tuple[float, float]:
    """Return how long a start takes until the public socket can be connected to.

    Beside it the processor time that the daemon has had by then, seconds too.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began = time.monotonic()
    with running_relay(code, "--port", str(port), "--device", device, wait_ready=False) as daemon:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert daemon.process.poll() is None, daemon.log_path.read_text()
            time.sleep(0.002)
        took_s, spent_s = time.monotonic() - began, cpu_ns([daemon.process.pid]) / 1e9
        daemon.wait_ready()
    return took_s, spent_s
