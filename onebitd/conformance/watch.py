"""What a program does to the directory it works in, and who is in its process group."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from onebitd.adapters import directory_watch

_ENDED_STATES: Final = (b"Z", b"X")


class DirectoryWatch:
    """Records what happens to the names of one directory; `close` it.

    Where there is no inotify (none left for this user), it has seen nothing and `works` is False.
    """

    def __init__(self, directory: Path) -> None:
        self._watch = directory_watch.DirectoryWatch()
        mask = directory_watch.MODIFY | directory_watch.CLOSE_WRITE
        mask |= directory_watch.MOVED_TO | directory_watch.CREATE
        self.works = self._watch.add(directory, mask) is not None
        self._events: list[directory_watch.Event] = []

    def written_in_place(self, name: str) -> bool:
        """Say whether a file was written while it had this name.

        A rename or a link of a finished file is not; neither is a close without a write after one.
        """
        self._events += self._watch.read()
        created = False
        for _, mask, found in self._events:
            if found != name:
                continue
            closed = created and mask & directory_watch.CLOSE_WRITE
            if mask & directory_watch.MODIFY or closed:
                return True
            created = created or bool(mask & directory_watch.CREATE)
        return False

    def close(self) -> None:
        """Give the descriptor back."""
        self._watch.close()
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


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
