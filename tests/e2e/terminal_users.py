"""Has one thread of the tests be another user, or of another group, for whom it connects to.

setgroups(2) and its like change the calling thread alone. The C library's functions, which Python
has, change every thread, which cannot be while some thread is somebody else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import socket
import struct
from collections.abc import Iterator
from typing import Any, Final

from onebitd.adapters.peers import peer_of

_SET_GROUPS, _SET_GID, _SET_UID = {
    "x86_64": (116, 119, 117),
    "aarch64": (159, 149, 147),
}.get(platform.machine(), (0, 0, 0))
"""The numbers of setgroups(2), setresgid(2) and setresuid(2)."""
_AS_IT_IS: Final = -1


def become_client(client: socket.socket) -> None:
    """Be whoever has connected from now on, in this thread; there is no way back."""
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, uid, gid = struct.unpack("=iII", credentials)
    if uid == os.geteuid():
        return
    groups = sorted(peer_of(client).gids)
    _call(_SET_GROUPS, len(groups), (ctypes.c_uint32 * len(groups))(*groups))
    _call(_SET_GID, _AS_IT_IS, gid, _AS_IT_IS)
    _call(_SET_UID, _AS_IT_IS, uid, _AS_IT_IS)


@contextlib.contextmanager
def of_group(gid: int) -> Iterator[None]:
    """Make files and start programs as one of this group, in this thread, as root."""
    before = os.getgid()
    _call(_SET_GID, gid, gid, _AS_IT_IS)
    try:
        yield
    finally:
        _call(_SET_GID, before, before, _AS_IT_IS)


def _call(number: int, *arguments: Any) -> None:
    if ctypes.CDLL(None, use_errno=True).syscall(number, *arguments) != 0:
        raise OSError(ctypes.get_errno(), "this thread cannot become somebody else")
