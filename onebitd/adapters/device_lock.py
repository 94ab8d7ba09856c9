"""The NPU device lock: one flock on one file, shared with the engine and the fleet's scripts.

How the others use the file, and so how this one must (read in their sources):

- The engine opens it with `O_CREAT | O_RDONLY | O_NOFOLLOW | O_CLOEXEC`, mode 0644, tries
  `LOCK_EX | LOCK_NB`, then waits in `LOCK_EX` for as long as it takes. It writes nothing. When it
  cannot open the file it runs without the lock and says nothing.
- Scripts that declare a run take no flock: while the file is empty they write
  `NAME pid=N start=2026-01-31T12:00:00Z` into it, and empty it at exit if `NAME pid=N ` is there.

So onebitd flocks, writes such a line, and leaves the file empty; it also waits for a declared
owner that lives, and does so without the flock: the engine that the owner runs needs it. What is no
such line is left as it is: a lock.path that names somebody's file by mistake must not empty it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import AsyncIterator

import trio

from onebitd.adapters import lock_probe
from onebitd.core.errors import HandoffError
from onebitd.core.handoff import Reason

_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.1
_REOPENS = 16


class DeviceLock:
    """The lock on the device, taken by one task of this process at a time.

    Args:
        path: the lock file.
        owner_name: the first word of the owner line; one word.
        heed_declarations: wait for a living declared owner that holds no flock.
        create_mode: mode of the file if it has to be created, whatever the umask.

    The file stays where it is: removing a lock file lets two processes hold "the" lock.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        owner_name: str = "onebitd",
        *,
        heed_declarations: bool = True,
        create_mode: int = 0o660,
    ) -> None:
        self.path = os.fspath(path)
        self._owner_name = owner_name
        self._heed_declarations = heed_declarations
        self._create_mode = create_mode
        self._fd: int | None = None
        self._writable = False
        # A semaphore, not trio.Lock: whoever took the lock for the daemon's life need not be the
        # task that gives it back. First come, first served.
        self._turn = trio.Semaphore(1, max_value=1)

    @property
    def held(self) -> bool:
        """True between a successful `wait_acquired` and `release`."""
        return self._fd is not None

    async def wait_acquired(self, timeout_s: float) -> None:
        """Take the lock, waiting at most `timeout_s` seconds; 0 tries once.

        Polls with a non-blocking flock, so the loop never blocks. Among the tasks of this process
        the order is first come, first served; against other processes there is none: one that
        sleeps inside flock is served before one that polls.

        Raises:
            HandoffError: LOCK_BUSY when the time is up, naming the holder; LOCK_UNUSABLE when the
                file cannot serve as a lock, saying what to do.

        A cancel leaves nothing behind: no descriptor is open while this waits. The owner of a
        successful call must call `release`; `held_for` does it for you.
        """
        await trio.lowlevel.checkpoint()
        deadline = trio.current_time() + timeout_s
        await self._wait_turn(deadline, timeout_s)
        try:
            pause_s = _FIRST_PAUSE_S
            while not self._try_once():
                left_s = deadline - trio.current_time()
                if left_s <= 0:
                    raise self._busy(timeout_s)
                await trio.sleep(min(pause_s, left_s))
                pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
        except BaseException:
            self._turn.release()
            raise

    def release(self) -> None:
        """Empty the owner line and give the lock back; does nothing if it is not held."""
        fd = self._fd
        if fd is None:
            return
        self._fd = None
        try:
            self._clear_owner_line(fd)
            # Unlock rather than only close: a copy that escaped into a child would keep the lock.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)
            self._turn.release()

    @contextlib.asynccontextmanager
    async def held_for(self, timeout_s: float) -> AsyncIterator[None]:
        """Hold the lock for the body; waits and raises as `wait_acquired` does."""
        await self.wait_acquired(timeout_s)
        try:
            yield
        finally:
            self.release()

    def still_ours(self) -> bool:
        """Tell whether the path still names the locked file.

        False when the lock is not held, or when somebody removed the file: then the next comer
        locks a new one and both believe they own the device.
        """
        return self._fd is not None and self._is_at_path(self._fd)

    def clear_stale(self) -> str | None:
        """Empty a file that holds the line of a process which is gone, if nobody holds the lock.

        For the start: a declaration left by a crash says who has the device, and nobody has. Never
        waits, creates nothing, and leaves the line of a living process and any other text alone.

        Returns:
            The line that was cleared, None when nothing was.
        """
        if self._fd is not None:
            return None
        try:
            fd = os.open(self.path, os.O_RDWR | lock_probe.OPEN_FLAGS)
        except OSError:
            return None  # whoever takes the lock says what is wrong with the file
        try:
            info = os.fstat(fd)
            # Looked at first: even a moment's flock could fail somebody else's attempt.
            if not _is_plain(info) or self._stale_line(fd) is None:
                return None
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            line = self._stale_line(fd)
            if line is None or not self._is_at_path(fd):
                return None
            os.ftruncate(fd, 0)
        except OSError:
            return None
        else:
            return line
        finally:
            os.close(fd)

    def _stale_line(self, fd: int) -> str | None:
        """Return the owner line if its process is gone; our own number was an earlier process's."""
        line = lock_probe.read_owner_line(fd)
        owner = lock_probe.parse_owner_line(line)
        return line if owner is not None and not self._is_declared(fd) else None

    async def _wait_turn(self, deadline: float, timeout_s: float) -> None:
        try:
            self._turn.acquire_nowait()
        except trio.WouldBlock:
            with trio.move_on_at(deadline):
                await self._turn.acquire()
                return
            raise self._busy(timeout_s) from None

    def _try_once(self) -> bool:
        """Open, lock, check, and write the owner line; False when somebody else has the lock.

        Leaves no descriptor open unless it returns True.
        """
        for _ in range(_REOPENS):
            fd, writable = self._open()
            try:
                if self._heed_declarations and self._is_declared(fd):
                    return False
                if not self._flock(fd):
                    return False
                if not self._is_at_path(fd):
                    continue  # removed between open and flock: what we locked is nobody's lock
                if self._heed_declarations and self._is_declared(fd):
                    return False
                self._fd, self._writable = fd, writable
            finally:
                if self._fd != fd:
                    os.close(fd)
            self._write_owner_line(fd)
            return True
        return False

    def _open(self) -> tuple[int, bool]:
        """Return (descriptor, whether it can be written) of a regular file with one name."""
        try:
            fd, writable = self._open_or_create()
        except OSError as exc:
            raise HandoffError(Reason.LOCK_UNUSABLE, self._why_unusable(exc)) from exc
        info = os.fstat(fd)
        if _is_plain(info):
            return fd, writable
        os.close(fd)
        what = (
            f"has {info.st_nlink} names (hard links)"
            if stat.S_ISREG(info.st_mode)
            else "is not a regular file"
        )
        raise HandoffError(
            Reason.LOCK_UNUSABLE,
            f"the device lock {self.path} {what}; remove it, or set lock.path",
        )

    def _open_or_create(self) -> tuple[int, bool]:
        # Never O_CREAT on a file that may exist: fs.protected_regular refuses that for another
        # user's file in a sticky directory, where a plain open is fine.
        flags = lock_probe.OPEN_FLAGS
        for _ in range(_REOPENS):
            try:
                return os.open(self.path, os.O_RDWR | flags), True
            except FileNotFoundError:
                pass
            except OSError as exc:
                if exc.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
                # The engine makes the file 0644; flock(LOCK_EX) works on a read-only descriptor.
                return os.open(self.path, os.O_RDONLY | flags), False
            try:
                create = os.O_RDWR | os.O_CREAT | os.O_EXCL | flags
                fd = os.open(self.path, create, self._create_mode)
            except FileExistsError:
                continue
            # The umask of one daemon must not keep all other users out for ever. A file system
            # without modes refuses this, and has nothing to set.
            with contextlib.suppress(OSError):
                os.fchmod(fd, self._create_mode)
            return fd, True
        raise FileNotFoundError(errno.ENOENT, "somebody keeps removing it", self.path)

    def _flock(self, fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as exc:
            raise HandoffError(Reason.LOCK_UNUSABLE, self._why_unusable(exc)) from exc
        return True

    def _is_at_path(self, fd: int) -> bool:
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        here = os.fstat(fd)
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)

    def _is_declared(self, fd: int) -> bool:
        try:
            line = lock_probe.read_owner_line(fd)
        except OSError:
            return False
        owner = lock_probe.living_owner(line, os.fstat(fd).st_mtime)
        return owner is not None and owner[1] != os.getpid()

    def _write_owner_line(self, fd: int) -> None:
        if not self._writable:
            return
        start = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = f"{self._owner_prefix()}start={start}\n"
        # A full /tmp: the lock is the flock, the line a courtesy.
        with contextlib.suppress(OSError):
            if not _holds_only_a_line(fd):
                return
            os.ftruncate(fd, 0)
            os.pwrite(fd, line.encode(), 0)

    def _clear_owner_line(self, fd: int) -> None:
        """Empty the file unless somebody has written another line over ours."""
        if not self._writable:
            return
        with contextlib.suppress(OSError):
            if lock_probe.read_owner_line(fd).startswith(self._owner_prefix()):
                os.ftruncate(fd, 0)

    def _owner_prefix(self) -> str:
        # With the blank after the number: the scripts look for "NAME pid=N " to know their line.
        return f"{self._owner_name} pid={os.getpid()} "

    def _busy(self, timeout_s: float) -> HandoffError:
        if self._fd is not None:
            who = "another run of this daemon"
        else:
            holder = lock_probe.probe(self.path).holder
            who = holder.describe() if holder else "a process that cannot be seen from here"
        return HandoffError(
            Reason.LOCK_BUSY,
            f"the device lock {self.path} is held by {who}; waited {timeout_s:g} s (lock.wait_s)",
        )

    def _why_unusable(self, exc: OSError) -> str:
        if isinstance(exc, PermissionError):
            what = lock_probe.why_denied(self.path)
        else:
            what = _WHY.get(exc.errno or 0, f"cannot be used: {os.strerror(exc.errno or 0)}")
        return f"the device lock {self.path} {what}"


def _is_plain(info: os.stat_result) -> bool:
    return stat.S_ISREG(info.st_mode) and info.st_nlink <= 1


def _holds_only_a_line(fd: int) -> bool:
    """Tell an owner line, or nothing but blanks (a crash can leave NULs), from somebody's text."""
    if lock_probe.parse_owner_line(lock_probe.read_owner_line(fd)) is not None:
        return True
    text = os.pread(fd, lock_probe.OWNER_LINE_BYTES + 1, 0)
    return len(text) <= lock_probe.OWNER_LINE_BYTES and not text.strip(b"\0 \t\r\n")


_WHY = {
    errno.ELOOP: "is a symbolic link; remove it, or set lock.path",
    errno.EISDIR: "is a directory; remove it, or set lock.path",
    errno.ENXIO: "is a socket or a fifo; remove it, or set lock.path",
    errno.ENOTDIR: "is inside something that is not a directory; set lock.path",
    errno.ENOENT: "cannot be created, its directory does not exist; create it, or set lock.path",
    errno.EROFS: "cannot be created on a read-only file system; set lock.path",
    errno.ENOLCK: "is on a file system without locks; set lock.path to one with them (tmpfs)",
}
