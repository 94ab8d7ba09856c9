"""Small files that only their owner may read: read whole, replaced whole.

A reader, and whoever comes after a kill or a power cut, finds the old one or the new one.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Final

_OPEN_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class NoFile(Exception):
    """There is something of that name, and it is no regular file."""


def read(path: Path, most_bytes: int) -> bytes | None:
    """Return what is in the file, None when there is none; a byte too many when it is too large.

    Raises:
        NoFile: it is a directory, a device, a pipe.
        OSError: it cannot be read; a link is not followed.
    """
    try:
        descriptor = os.open(path, _OPEN_FLAGS)
    except FileNotFoundError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NoFile
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(most_bytes + 1)
    finally:
        os.close(descriptor)


def replace(path: Path, data: bytes) -> None:
    """Put a new file, of mode 0600, in the place of the old one; its directory is made.

    Raises:
        OSError: the old file is as it was.
    """
    new = path.with_name(f"{path.name}.new")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new.unlink(missing_ok=True)  # of a daemon that was killed
    try:
        descriptor = os.open(new, _NEW_FLAGS, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            # Else the new name could survive a power cut, and what it names not.
            os.fdatasync(descriptor)
        new.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
