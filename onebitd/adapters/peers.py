"""Who is at the other end of the control socket, as the kernel vouches for it (unix(7)).

The socket's mode keeps others out at `connect`. This is the second lock: a mode or a directory that
somebody has opened up since lets nobody in who was not meant.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
import stat
import struct
from collections.abc import Collection

from onebitd.adapters.accounts import group_name

_PEERCRED = struct.Struct("=iII")
_SO_PEERGROUPS = 59
"""socket(7); Linux 4.13. Python has no name for it."""
_GROUPS_BYTES = 1024
"""Python's own limit: 256 groups. Somebody in more of them counts with the first, effective one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """A process, as it was when it connected: effective user, and all its groups."""

    uid: int
    gids: frozenset[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """Who is served on a Unix socket: root, the daemon's own user, and one group.

    Attributes:
        uid: the daemon's user.
        gid: the group that the socket is open to, None where it is open to no group.
    """

    uid: int
    gid: int | None

    def why_not(self, peer: Peer) -> str | None:
        """Return why this peer is refused, naming the group to join; None when it is served."""
        if peer.uid in (0, self.uid) or self.gid in peer.gids:
            return None
        if not self.gid:  # the group root is nobody's to join
            return f"user {peer.uid} may not use this socket: it serves its owner and root"
        group = group_name(self.gid)
        return (
            f"user {peer.uid} may not use this socket, which is for the group {group}: join it with"
            f" `sudo usermod -aG {group} $USER` and log in again, or use sudo"
        )


def peer_of(sock: socket.socket) -> Peer:
    """Return who connected.

    Raises:
        OSError: it is no Unix socket, or not connected.
    """
    if sock.family != socket.AF_UNIX:
        raise OSError(errno.EOPNOTSUPP, "it is no Unix socket")
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    _, uid, gid = _PEERCRED.unpack(raw)
    try:
        groups = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError:
        groups = b""
    return Peer(uid, frozenset([gid, *struct.unpack(f"={len(groups) // 4}I", groups)]))


def served_on(listeners: Collection[socket.socket]) -> Served:
    """Return who is to be served on listening Unix sockets, by their files' groups and modes now.

    A file that cannot be looked at is open to no group.
    """
    gids: set[int] = set()
    for listener in listeners:
        name = listener.getsockname()
        try:
            found = os.stat(name)
        except (OSError, ValueError):
            continue
        if found.st_mode & stat.S_IWGRP:
            gids.add(found.st_gid)
    return Served(os.geteuid(), gids.pop() if len(gids) == 1 else None)


def loose_mode(listener: socket.socket) -> str | None:
    """Say that everybody may connect to a listening Unix socket, and what to do; None if not so."""
    name = listener.getsockname()
    try:
        mode = stat.S_IMODE(os.stat(name).st_mode)
    except (OSError, ValueError):
        return None
    if not mode & stat.S_IWOTH:
        return None
    return (
        f"every user may connect to the control socket {name} (mode {mode:04o}), and is then"
        " refused; set SocketMode=0660 in its unit"
    )
