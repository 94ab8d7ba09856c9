"""systemd's command-line programs, for `onebitctl`. Blocking; standard library only."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from typing import Final

BOOTED: Final = "/run/systemd/system"
"""A directory exactly where systemd runs the machine (sd_booted(3))."""

_ALSO_SEARCHED: Final = ("/usr/local/sbin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
_NOT_FOUND: Final = 127
_TOO_LATE: Final = 124


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """How a program ended, and what it said."""

    status: int
    stdout: str
    stderr: str

    @property
    def said(self) -> str:
        """What it said to stderr, or else to stdout, without blank ends; never empty on failure."""
        return self.stderr.strip() or self.stdout.strip() or f"status {self.status}"


def is_booted() -> bool:
    """Tell whether systemd runs this machine."""
    return os.path.isdir(BOOTED)


def find(program: str) -> str | None:
    """Return the path of a program: in PATH, or where administrators' programs are."""
    return shutil.which(program, path=os.pathsep.join([*os.get_exec_path(), *_ALSO_SEARCHED]))


def run(program: str, *arguments: str, stdin: str = "", timeout_s: float | None = None) -> Done:
    """Run one of systemd's programs to its end.

    Args:
        program: its name.
        arguments: its arguments.
        stdin: what it reads.
        timeout_s: after which it is killed.

    Returns:
        How it ended; status 127 when there is no such program, 124 when it took too long.
    """
    path = find(program)
    if path is None:
        return Done(_NOT_FOUND, "", f"{program} is not installed")
    try:
        done = subprocess.run(
            [path, *arguments],
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=timeout_s,
        )
    except OSError as error:
        return Done(_NOT_FOUND, "", f"{path} cannot be run: {error.strerror}")
    except subprocess.TimeoutExpired:
        return Done(_TOO_LATE, "", f"{program} has not ended within {timeout_s:g} s")
    return Done(done.returncode, done.stdout, done.stderr)
