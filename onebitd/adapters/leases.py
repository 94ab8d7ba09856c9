"""Read leases (fcntl(2), F_SETLEASE): granted only while nobody has a file open for writing.

Who wants to open it for writing then waits until the lease is given back, or for
/proc/sys/fs/lease-break-time. File systems without leases, and files of other users, have none.
"""

from __future__ import annotations

import fcntl
import signal


def take(descriptor: int) -> None:
    """Take a read lease on a file that is open for reading only.

    Raises:
        BlockingIOError: somebody has it open for writing, or is about to.
        OSError: no lease is to be had here.
    """
    # SIGIO's default would end the process if somebody opened the file just now.
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # type: ignore[attr-defined,unused-ignore]
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)


def is_held(descriptor: int) -> bool:
    """Tell whether nobody has asked for the file to write to since `take`."""
    return fcntl.fcntl(descriptor, fcntl.F_GETLEASE) == fcntl.F_RDLCK


def give_back(descriptor: int) -> None:
    """Give the lease back; who waits for it goes on."""
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def has_writer(descriptor: int) -> bool:
    """Say whether anybody has the file of this read-only descriptor open for writing.

    A lease is granted only when nobody has; it is given back at once. Where there are none, no.
    """
    try:
        take(descriptor)
        give_back(descriptor)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
