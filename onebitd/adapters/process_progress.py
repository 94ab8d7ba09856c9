"""What a process and its descendants have done so far, read from /proc (proc(5))."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import trio

from onebitd.core.vitals import Progress

_PROC: Final = Path("/proc")
_MOST_PROCESSES: Final = 256
_DEVICES: Final = (b"/dev/dri/", b"/dev/accel/")
_TICKS_S: Final = 1.0 / os.sysconf("SC_CLK_TCK")
_READ_S: Final = 2.0
"""It takes a millisecond, unless a GPU's driver hangs that is asked for its share."""


class ProgressReader:
    """Reads progress in a thread, which is left behind if a driver never answers."""

    def __init__(self) -> None:
        self._silent_pid: int | None = None

    async def read(self, pid: int) -> Progress | None:
        """See `read_progress`; a driver that did not answer once is not asked again."""
        with trio.move_on_after(_READ_S):
            return await trio.to_thread.run_sync(
                lambda: read_progress(pid, gpu=pid != self._silent_pid), abandon_on_cancel=True
            )
        self._silent_pid = pid
        return None


def read_progress(pid: int, *, gpu: bool = True, proc: Path = _PROC) -> Progress | None:
    """Read the progress of a process tree; None when the first process is gone or hidden.

    Args:
        pid: of the first process; a script that runs the decoder as its child does not hide it.
        gpu: read the engines' times too. The GPU's driver is asked for them: it may block where
            that hangs, so call this from a thread that can be left behind.
        proc: where the proc file system is.
    """
    try:
        state, first_s = _read_stat(proc / str(pid))
    except (OSError, ValueError):
        return None
    cpu_s = {pid: first_s}
    disk_bytes: dict[int, int] = {}
    engines: dict[str, int] = {}
    for one in _tree(proc, pid):
        directory = proc / str(one)
        with contextlib.suppress(OSError, ValueError):  # it ended just now, or is somebody else's
            cpu_s[one] = _read_stat(directory)[1]
        with contextlib.suppress(OSError, ValueError):
            disk_bytes[one] = _read_disk(directory)
        if gpu:
            with contextlib.suppress(OSError):
                for engine, busy in _read_engines(directory):
                    engines[engine] = max(busy, engines.get(engine, 0))
    return Progress(cpu_s, disk_bytes, engines, state)


def _tree(proc: Path, pid: int) -> list[int]:
    """Return a process and its descendants."""
    found = [pid]
    for one in found:
        if len(found) >= _MOST_PROCESSES:
            break
        with contextlib.suppress(OSError):
            for task in os.listdir(proc / str(one) / "task"):
                with contextlib.suppress(OSError, ValueError):
                    children = (proc / str(one) / "task" / task / "children").read_bytes()
                    found += [int(word) for word in children.split()]
    return found


def _read_stat(directory: Path) -> tuple[str, float]:
    """Return the state's letter and the processor time of all threads, in seconds."""
    fields = (directory / "stat").read_bytes().rpartition(b")")[2].split()
    if len(fields) < 13:
        raise ValueError("a short stat file")
    return fields[0].decode("ascii"), (int(fields[11]) + int(fields[12])) * _TICKS_S


def _read_disk(directory: Path) -> int:
    total = 0
    for line in (directory / "io").read_bytes().splitlines():
        name, _, value = line.partition(b":")
        if name in (b"read_bytes", b"write_bytes"):
            total += int(value)
    return total


def _read_engines(directory: Path) -> Iterator[tuple[str, int]]:
    """Yield the busy times of a GPU's or NPU's engines, for each client of the driver.

    The fields are those of the kernel's drm-usage-stats: nanoseconds, or cycles where a driver
    counts those. Several descriptors may be one client's, and show the same.
    """
    for name in os.listdir(directory / "fd"):
        with contextlib.suppress(OSError, ValueError):
            if not os.readlink(os.fsencode(directory / "fd" / name)).startswith(_DEVICES):
                continue
            fields = _fields((directory / "fdinfo" / name).read_bytes())
            device, client = fields.get("drm-pdev", ""), fields.get("drm-client-id", name)
            for field, value in fields.items():
                is_time = field.startswith("drm-engine-") and "capacity" not in field
                if is_time or field.startswith("drm-cycles-"):
                    yield f"{device}/{client}/{field}", int(value.split()[0])


def _fields(text: bytes) -> dict[str, str]:
    found = {}
    for line in text.decode("utf-8", "replace").splitlines():
        name, colon, value = line.partition(":")
        if colon and value.strip():
            found[name] = value.strip()
    return found
