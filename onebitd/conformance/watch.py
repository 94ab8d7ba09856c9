"""What the kernel tells about a directory while a program works in it (inotify(7)), and a group.

Polling would miss a file that was written in place within a millisecond; the kernel's queue does
not.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import struct
from pathlib import Path
from typing import Final

_MODIFY: Final = 0x2
_CLOSE_WRITE: Final = 0x8
_MOVED_TO: Final = 0x80
_CREATE: Final = 0x100
_HEAD: Final = struct.Struct("iIII")
_READ_BYTES: Final = 64 * 1024
_ENDED_STATES: Final = (b"Z", b"X")


class DirectoryWatch:
    """Records what happens to the names of one directory; `close` it.

    Where there is no inotify (none left for this user), it has seen nothing and `works` is False.
    """

    def __init__(self, directory: Path) -> None:
        self._events: list[tuple[int, str]] = []
        library = ctypes.CDLL(None, use_errno=True)
        self._descriptor = library.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        self.works = self._descriptor >= 0
        if self.works:
            mask = _MODIFY | _CLOSE_WRITE | _MOVED_TO | _CREATE
            added = library.inotify_add_watch(
                self._descriptor, os.fsencode(directory), ctypes.c_uint32(mask)
            )
            self.works = added >= 0

    def written_in_place(self, name: str) -> bool:
        """Say whether a file was written while it had this name.

        A rename or a link of a finished file is not; neither is a close without a write after one.
        """
        self._read()
        created = False
        for mask, found in self._events:
            if found != name:
                continue
            if mask & _MODIFY or (created and mask & _CLOSE_WRITE):
                return True
            created = created or bool(mask & _CREATE)
        return False

    def _read(self) -> None:
        while self.works:
            try:
                data = os.read(self._descriptor, _READ_BYTES)
            except BlockingIOError:
                return
            at = 0
            while at < len(data):
                _, mask, _, length = _HEAD.unpack_from(data, at)
                at += _HEAD.size
                name = os.fsdecode(data[at : at + length].rstrip(b"\0"))
                self._events.append((mask, name))
                at += length

    def close(self) -> None:
        """Give the descriptor back."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self.works = False


def group_members(group: int) -> list[int]:
    """Return the pids of a process group's members that run: no zombies (proc_pid_stat(5))."""
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError, ValueError):
            stat = Path(f"/proc/{pid}/stat").read_bytes()
            state, _, its_group, *_ = stat.rpartition(b")")[2].split()
            if int(its_group) == group and state not in _ENDED_STATES:
                found.append(pid)
    return found


def processes_with(word: str) -> list[int]:
    """Return the pids of running processes of this user whose first environment has a word in it.

    Descendants inherit it: so one that left its process group and session is found, too.
    """
    needle, me = os.fsencode(word), os.getpid()
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError):
            if pid != me and needle in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


def describe(pid: int) -> str:
    """Return `pid 123 (sleep)`."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        name = "gone by now"
    return f"pid {pid} ({name})"


def has_writer(descriptor: int) -> bool:
    """Say whether anybody has the file of this read-only descriptor open for writing.

    A read lease is granted only when nobody has (fcntl(2)); it is given back at once. File systems
    without leases say no.
    """
    try:
        # SIGIO's default would end this process if somebody opened the file just now.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # type: ignore[attr-defined,unused-ignore]
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
