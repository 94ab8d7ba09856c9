"""Progress of real processes, and of a GPU's clients in a made-up /proc."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from onebitd.adapters import process_progress
from onebitd.adapters.process_progress import ProgressReader, read_progress
from onebitd.core.vitals import Progress
from tests.harness import wait_until

BUSY = "while True: pass"
IDLE = "import time; time.sleep(600)"


@contextlib.contextmanager
def python(program: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program in a group of its own, which is killed at the end."""
    argv = [sys.executable, "-I", "-S", "-c", program]
    with subprocess.Popen(argv, start_new_session=True) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def read(pid: int) -> Progress:
    """Read the progress of a process that is there."""
    found = read_progress(pid)
    assert found is not None
    return found


def test_read_progress_of_a_busy_thread_grows() -> None:
    """All threads count, not only the first."""
    program = f"import threading\ndef work():\n {BUSY}\nthreading.Thread(target=work).start()\n"
    with python(program + IDLE) as process:
        wait_until(lambda: sum(read(process.pid).cpu_s.values()) > 0.3, "processor time")


def test_read_progress_of_a_script_holds_its_child() -> None:
    """The decoder may be started by a shell that waits for it."""
    program = "import subprocess, sys\n"
    program += f"subprocess.run([sys.executable, '-I', '-S', '-c', {BUSY!r}])"
    with python(program) as process:

        def works() -> bool:
            found = read(process.pid).cpu_s
            return any(spent > 0.2 for pid, spent in found.items() if pid != process.pid)

        wait_until(works, "processor time of the child")


def test_read_progress_of_a_stopped_process_stands_still_and_says_so() -> None:
    """SIGSTOP is seen in its state."""
    with python(BUSY) as process:
        wait_until(lambda: read(process.pid).cpu_s[process.pid] > 0.05, "it runs")
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: read(process.pid).state == "T", "it is stopped")
        before = read(process.pid)
        time.sleep(0.1)
        assert read(process.pid).cpu_s == before.cpu_s


def test_read_progress_counts_what_is_written_to_a_disk(tmp_path: Path) -> None:
    """The kernel's own accounting, where it shows it."""
    before = read(os.getpid()).disk_bytes
    if os.getpid() not in before:
        pytest.skip("/proc/PID/io cannot be read here")
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    if subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True).stdout == b"tmpfs\n":
        pytest.skip("there is no disk under the temporary directory")
    assert read(os.getpid()).disk_bytes[os.getpid()] >= before[os.getpid()] + (1 << 20)


def test_read_progress_of_no_process_is_none() -> None:
    """Nothing follows from it."""
    with python(IDLE) as process:
        pid = process.pid
    assert read_progress(pid) is None


STAT = "7 (llama server) x) {state} 1 7 7 0 -1 4194304 1 2 3 4 {user} {system} 0 0 20 0 9\n"
AMD = """pos:	0
drm-driver:	amdgpu
drm-client-id:	{client}
drm-pdev:	0000:c4:00.0
drm-memory-vram:	100 KiB
drm-engine-gfx:	{gfx} ns
drm-engine-compute:	{compute} ns
"""
INTEL = (
    "drm-driver:	xe\ndrm-client-id:	3\ndrm-cycles-ccs:	77\ndrm-total-cycles-ccs:	9999\n"
)
NPU = (
    "drm-driver:	amdxdna_accel_driver\ndrm-client-id:	9\ndrm-engine-npu-amdxdna:	5000 ns\n"
)


class FakeProc:
    """A proc file system with one process, 7."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._process = path / "7"
        (self._process / "fd").mkdir(parents=True)
        (self._process / "fdinfo").mkdir()
        hundred = os.sysconf("SC_CLK_TCK")
        stat = STAT.format(state="D", user=2 * hundred, system=hundred)
        (self._process / "stat").write_text(stat)

    def open(self, number: int, device: str, info: str) -> None:
        """Give it a descriptor."""
        (self._process / "fd" / str(number)).symlink_to(device)
        (self._process / "fdinfo" / str(number)).write_text(info)


def test_read_progress_engines_are_counted_once_for_each_client(tmp_path: Path) -> None:
    """A driver shows one client's times on each of its descriptors; files are none of its."""
    proc = FakeProc(tmp_path)
    for number in (3, 4):
        device = "/dev/dri/renderD128"
        proc.open(number, device, AMD.format(client=5, gfx=10 + number, compute=20))
    proc.open(5, "/dev/dri/renderD128", AMD.format(client=6, gfx=1, compute=2))
    proc.open(6, "/dev/dri/renderD129", INTEL)
    proc.open(7, "/dev/accel/accel0", NPU)
    proc.open(8, "/tmp/model.gguf", "pos:	0\ndrm-engine-gfx:	3 ns\n")
    proc.open(9, "/dev/dri/renderD130", "pos:	0\nbroken\ndrm-engine-gfx:	many ns\n")
    found = read_progress(7, proc=tmp_path)
    assert found is not None
    assert found.gpu == {
        "0000:c4:00.0/5/drm-engine-gfx": 14,
        "0000:c4:00.0/5/drm-engine-compute": 20,
        "0000:c4:00.0/6/drm-engine-gfx": 1,
        "0000:c4:00.0/6/drm-engine-compute": 2,
        "/3/drm-cycles-ccs": 77,
        "/9/drm-engine-npu-amdxdna": 5000,
    }
    without = read_progress(7, gpu=False, proc=tmp_path)
    assert without is not None
    assert without.gpu == {}


def test_read_progress_program_name_does_not_confuse_it(tmp_path: Path) -> None:
    """A name may hold brackets and spaces; user and system time are both counted."""
    FakeProc(tmp_path)
    found = read_progress(7, proc=tmp_path)
    assert found is not None
    assert (found.state, found.cpu_s) == ("D", {7: 3.0})


async def test_progress_reader_driver_that_hangs_is_asked_once_and_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its process is then known by what else it does; the next process is asked again."""
    asked: list[tuple[int, bool]] = []
    hangs = threading.Event()

    def read(pid: int, *, gpu: bool) -> Progress:
        asked.append((pid, gpu))
        if gpu and pid == 7:
            hangs.wait(30)
        return Progress({}, {}, {})

    monkeypatch.setattr(process_progress, "read_progress", read)
    monkeypatch.setattr(process_progress, "_READ_S", 0.1)
    reader = ProgressReader()
    assert await reader.read(7) is None
    monkeypatch.setattr(process_progress, "_READ_S", 30)
    assert await reader.read(7) is not None
    assert await reader.read(8) is not None
    hangs.set()
    assert asked == [(7, True), (7, False), (8, True)]
