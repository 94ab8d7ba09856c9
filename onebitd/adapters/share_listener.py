"""The socket on which the decoder hands over its cache: one handshake, one connection, its fds.

The codec is `core.share_wire`; here are the socket, the check of who connects, and the descriptors,
which are closed whatever happens until a caller owns them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self, TypeAlias

import trio

from onebitd.adapters.listeners import open_unix, unlink_unix
from onebitd.core.errors import HandoffError, OnebitError
from onebitd.core.handoff import Reason
from onebitd.core.share_wire import ShareMessage, ShareReceiver
from onebitd.core.wording import Wording

PeerCheck: TypeAlias = Callable[[int, int], bool]
"""Says of a pid and a uid whether that is who may connect."""

_BACKLOG: Final = 8
_READ_BYTES: Final = 64 * 1024
_KERNEL_MAX_FDS: Final = 253
"""SCM_MAX_FD: more does no single sendmsg(2) carry."""
_CONTROL_BYTES: Final = socket.CMSG_SPACE(4 * _KERNEL_MAX_FDS)
_CREDENTIALS: Final = struct.Struct("=iII")
_MAX_ANCESTORS: Final = 64


class Shared:
    """What a decoder handed over; owns the descriptors until `close()`, also at the end of a with.

    Attributes:
        share_id: names the share in the adopt request.
        header: the message's JSON, as it came.
        fds: in the order in which they came; close-on-exec; none once closed.
    """

    def __init__(self, message: ShareMessage) -> None:
        self.share_id: Final = message.share_id
        self.header: Final = message.header
        self.fds = message.fds

    def close(self) -> None:
        """Close the descriptors; a second time does nothing."""
        fds, self.fds = self.fds, ()
        _close_all(fds)

    def __enter__(self) -> Self:
        """Give itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()


class ShareListener:
    """The instance's share socket, there only as long as this is entered.

    Args:
        path: of the socket; its directory is ours alone. One that a killed onebitd left is
            replaced. Mode 0600 from its first moment on.

    Entering raises HandoffError (SHARE_HANDSHAKE) when it cannot be opened. Leaving closes and
    unlinks it, whatever happens.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._socket: trio.socket.SocketType | None = None

    def __enter__(self) -> Self:
        """Listen."""
        try:
            opened = open_unix(self._path, 0o600, _BACKLOG)
        except OnebitError as error:
            raise _failed(error.wording) from error
        except OSError as error:
            raise _failed(f"{self._path} cannot be opened: {error.strerror}") from error
        self._socket = trio.socket.from_stdlib_socket(opened)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close and unlink."""
        listening, self._socket = self._socket, None
        if listening is not None:
            unlink_unix(self._path)
            listening.close()

    async def receive(self, is_peer: PeerCheck, timeout_s: float) -> Shared:
        """Wait for the decoder to connect and read its one message.

        Whoever else connects is hung up on, unread, and the wait goes on. The decoder's first
        connection counts: what is wrong with it is not mended by a second.

        Args:
            is_peer: is asked about each connection, see `decoder_or_descendant`. The kernel says
                who connected (SO_PEERCRED), as which user, at that moment; a pid of 0 is a process
                that cannot be seen from here.
            timeout_s: for all of it.

        Returns:
            what came; the caller closes it.

        Raises:
            HandoffError: SHARE_HANDSHAKE, its detail says what went wrong and who was refused.
                Then, and after a cancel, every descriptor that came is closed.
        """
        progress = _Progress()
        with trio.move_on_after(timeout_s):
            return await self._receive(is_peer, progress)
        raise _failed(f"{progress.stage} within {timeout_s:g} s{progress.refused()}")

    async def _receive(self, is_peer: PeerCheck, progress: _Progress) -> Shared:
        assert self._socket is not None, "not entered"  # noqa: S101 - a programming error
        while True:
            try:
                connection, _ = await self._socket.accept()
            except OSError as error:
                if error.errno == errno.ECONNABORTED:
                    continue
                raise _failed(f"cannot accept the decoder: {error.strerror}") from error
            with connection:
                pid, uid, _ = _CREDENTIALS.unpack(
                    connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                )
                if is_peer(pid, uid):
                    return await _read(connection, progress)
                progress.strangers.append((pid, uid))


class _Progress:
    """How far a handshake came, for the message when its time is up."""

    def __init__(self) -> None:
        self.stage = "the decoder did not connect"
        self.strangers: list[tuple[int, int]] = []

    def refused(self) -> str:
        """Return a clause about who else connected, empty if nobody did."""
        if not self.strangers:
            return ""
        pid, uid = self.strangers[-1]
        more = f", the last of {len(self.strangers)}" if len(self.strangers) > 1 else ""
        return f"; a connection of pid {pid} (user id {uid}) was refused{more}"


async def _read(connection: trio.socket.SocketType, progress: _Progress) -> Shared:
    """Read one message; on any way out but the good one, close every descriptor that came."""
    receiver = ShareReceiver()
    held: list[int] = []
    n_bytes = 0
    try:
        while True:
            progress.stage = f"the decoder connected and sent {n_bytes} bytes, no whole message,"
            try:
                data, control, flags, _ = await connection.recvmsg(
                    _READ_BYTES, _CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except OSError as error:
                raise _failed(f"the decoder's connection broke: {error.strerror}") from error
            came = _descriptors(control)
            held += came
            n_bytes += len(data)
            if flags & socket.MSG_CTRUNC:
                raise _failed(
                    f"the kernel could not give us every descriptor of the decoder's; {len(came)}"
                    " came, see the limit of open files (LimitNOFILE=)"
                )
            message = receiver.feed(data, came)
            if message is not None:
                return Shared(message)
    except BaseException:
        _close_all(held)
        raise


def _descriptors(control: list[tuple[int, int, bytes]]) -> list[int]:
    found: list[int] = []
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found += struct.unpack(f"={len(data) // 4}i", data[: len(data) // 4 * 4])
    return found


def _close_all(fds: tuple[int, ...] | list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):  # close(2) has let go of it all the same
            os.close(fd)


def _failed(detail: str | Wording) -> HandoffError:
    return HandoffError(Reason.SHARE_HANDSHAKE, detail)


def decoder_or_descendant(pid: int) -> PeerCheck:
    """Return the check for a decoder: it, or a process that it started, as the daemon's own user.

    Args:
        pid: of the decoder; it must not have been reaped, or its number may be another's.
    """
    return lambda peer, uid: uid == os.geteuid() and is_descendant(peer, pid)


def is_descendant(pid: int, ancestor: int) -> bool:
    """Say whether a process is `ancestor`, or descends from it over parents that are all there.

    A process whose parent has ended belongs to somebody else (to process 1, mostly), so a helper
    that was detached is no descendant; neither is one that has ended and been reaped.
    """
    for _ in range(_MAX_ANCESTORS):
        if pid <= 0:
            return False
        if pid == ancestor:
            return True
        pid = _parent_of(pid)
    return False


def _parent_of(pid: int) -> int:
    """Return the parent's pid, 0 if there is none to be seen (proc_pid_stat(5))."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0
