"""A daemon that runs without a service: how it was started, from /proc (proc(5))."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping
from typing import Final

from onebitd.core import unit_sandbox

_ITS_OWN: Final = ("NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID", "WATCHDOG_USEC")
"""Variables that speak of descriptors and sockets which nobody else has."""


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """How a daemon was started.

    Attributes:
        argv: its command line, without the program.
        environ: its variables; empty where they may not be read.
        directory: it was started in; None where that may not be known.
    """

    pid: int
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    directory: str | None

    @property
    def config_file(self) -> str | None:
        """Its `--config`, absolute if the directory is known; None when it was given none."""
        for word, following in itertools.pairwise((*self.argv, "")):
            if word == "--":
                break
            name, equals, value = word.partition("=")
            if name == "--config":
                return os.path.join(self.directory or "", value if equals else following)
        return None


def started(pid: int, proc: str = "/proc") -> Started | None:
    """Return how a daemon was started; None if that is not a daemon of ours, or it is gone."""
    try:
        words = _strings(f"{proc}/{pid}/cmdline")
    except OSError:
        return None
    found = unit_sandbox.daemon_arguments(words)
    if found is None:
        return None
    environ: dict[str, str] = {}
    directory = None
    try:
        directory = os.readlink(f"{proc}/{pid}/cwd")
        pairs = (one.partition("=") for one in _strings(f"{proc}/{pid}/environ"))
        environ = {name: value for name, _, value in pairs if name not in _ITS_OWN}
    except OSError:
        pass  # another user's
    return Started(pid, tuple(found[1]), environ, directory)


def _strings(path: str) -> list[str]:
    with open(path, "rb") as file:
        return os.fsdecode(file.read()).rstrip("\0").split("\0")
