"""What keeps an instance to itself: its lock file, and directories that only it may write."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat

from onebitd.core.errors import ConfigError, InstanceTaken


class InstanceLock:
    """One onebitd per instance: a flock on a file in the runtime directory.

    Args:
        path: the lock file; made with mode 0600, stays when the lock is released.
        instance: the name for messages; the name of the file's directory by default.
    """

    def __init__(self, path: str | os.PathLike[str], instance: str | None = None) -> None:
        self.path = os.fspath(path)
        self.instance = instance or os.path.basename(os.path.dirname(os.path.abspath(self.path)))
        self._fd: int | None = None

    @property
    def held(self) -> bool:
        """True between `acquire` and `release`."""
        return self._fd is not None

    def acquire(self) -> None:
        """Take the lock without waiting and write our pid into the file.

        Raises:
            InstanceTaken: another onebitd has it; names its pid.
            ConfigError: the file cannot be used.
        """
        while self._fd is None:
            try:
                self._fd = self._try_once()
            except OSError as exc:
                raise ConfigError(
                    [f"cannot use the lock file {self.path}: {exc.strerror}; remove what is there"]
                ) from exc

    def release(self) -> None:
        """Empty the file and give the lock back; does nothing if it is not held."""
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
        os.close(fd)

    def _try_once(self) -> int | None:
        """Return the locked descriptor, None if the file was replaced meanwhile."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(self.path, flags, 0o600)
        try:
            here = os.fstat(fd)
            if not stat.S_ISREG(here.st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._taken(os.pread(fd, 32, 0)) from None
            there = stat_or_none(self.path)
            if there is None or (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino):
                os.close(fd)
                return None
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _taken(self, content: bytes) -> InstanceTaken:
        word = content.split(b"\n")[0].decode("ascii", "replace")
        pid = f" (pid {word})" if word.isdigit() else ""
        directory = os.path.dirname(os.path.abspath(self.path))
        if os.path.basename(directory) != self.instance:
            # RUNTIME_DIRECTORY names one directory for all: the other may be of any instance.
            return InstanceTaken(
                f"another onebitd{pid} uses the runtime directory {directory}, which instance"
                f" {self.instance} would use too; stop it, or give this one a directory of its own"
                " in RUNTIME_DIRECTORY"
            )
        return InstanceTaken(
            f"another onebitd{pid} serves instance {self.instance}; stop it, or give this one"
            " another name with --instance"
        )


def ensure_private_dir(path: str | os.PathLike[str], mode: int) -> None:
    """Make a directory, or check that what is there may be trusted.

    Missing parents are made with mode 0755 less the umask; the directory itself gets exactly
    `mode`. One that exists keeps its mode.

    Raises:
        ConfigError: it is a symbolic link or not a directory, belongs to somebody other than us
            or root, can be written by its group or by all, cannot be written by us, or cannot be
            made.
    """
    name = os.fspath(path)
    try:
        os.makedirs(os.path.dirname(os.path.abspath(name)), 0o755, exist_ok=True)
        try:
            os.mkdir(name, mode & 0o700)
        except FileExistsError:
            wrong = _distrust(name, os.stat(name, follow_symlinks=False))
        else:
            os.chmod(name, mode)
            return
    except OSError as exc:
        raise ConfigError([f"cannot make the directory {name}: {exc.strerror}"]) from exc
    if wrong is not None:
        raise ConfigError([f"the directory {name} {wrong}"])


def _distrust(name: str, info: os.stat_result) -> str | None:
    if stat.S_ISLNK(info.st_mode):
        return "is a symbolic link; remove it or name its target"
    if not stat.S_ISDIR(info.st_mode):
        return "is not a directory; remove it"
    if info.st_uid not in (os.geteuid(), 0):
        return f"belongs to uid {info.st_uid}, not to uid {os.geteuid()} or root; choose another"
    if info.st_mode & 0o022:
        writable = stat.S_IMODE(info.st_mode)
        return f"can be written by others (mode {writable:04o}); chmod go-w it or choose another"
    if not os.access(name, os.W_OK | os.X_OK):
        return f"cannot be written by uid {os.geteuid()}; choose another"
    return None


def stat_or_none(name: str) -> os.stat_result | None:
    """Return what is at the path, a link not followed; None if nothing is.

    Raises:
        ConfigError: it may not be looked at.
    """
    try:
        return os.stat(name, follow_symlinks=False)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise ConfigError([f"cannot look at {name}: {exc.strerror}"]) from exc
