"""Who holds the NPU device lock: looks, never touches.

Only the standard library, so that `onebitctl lock` starts fast. Nothing here takes the lock, even
for a moment: a probe that did could make another program's non-blocking attempt fail.

Two kinds of holder exist. The engine and onebitd flock the file. Some of the fleet's scripts do
not: they write `NAME pid=N start=TIME` into it while it is empty and empty it when they leave.
Both count, a declaration only while its process lives.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import stat
import time
from collections.abc import Iterator
from typing import Final

from onebitd.adapters.accounts import group_name, user_name

OPEN_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
"""What every open of the lock file carries: no link followed, no fifo waited for, no child."""

OWNER_LINE_BYTES = 256
"""How much of the file is read; owner lines are about 50 bytes long."""

_OWNER = re.compile(r"^(?P<name>\S.*?)\s+pid=(?P<pid>[1-9][0-9]{0,9})(?=\s|$)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
_CLOCK_SLACK_S = 2.0
_COMMAND_CHARS = 200


@dataclasses.dataclass(frozen=True, slots=True)
class LockHolder:
    """The process that has the lock.

    `command` is its command line, or its short name where that is all that can be seen, or "" if
    the process is not visible from here. `owner_line` is what the lock file holds at the moment,
    which need not be this holder's own (the engine writes none).
    """

    pid: int
    command: str
    owner_line: str | None

    def describe(self) -> str:
        """Return `pid 123 (name)`: short, without arguments, fit for a client's eyes."""
        owner = parse_owner_line(self.owner_line or "")
        if owner is not None and owner[1] == self.pid:
            return f"pid {self.pid} ({owner[0]})"
        name = os.path.basename(self.command.split(" ", 1)[0])
        return f"pid {self.pid} ({name})" if name else f"pid {self.pid}"


@dataclasses.dataclass(frozen=True, slots=True)
class LockStatus:
    """What can be seen of the lock from outside.

    `held` is True for a flock and for a living declared owner; `declared_only` tells the second.
    `holder` is None when the lock is free, and also when it is held by a process that this one
    cannot see. `problem` is a sentence about the file itself, None when nothing is wrong with it;
    `usable` is False when that keeps the caller from taking the lock.
    """

    path: str
    exists: bool
    held: bool
    holder: LockHolder | None
    problem: str | None
    declared_only: bool = False
    usable: bool = True


NOT_LOOKED_AT: Final = LockStatus("", exists=False, held=False, holder=None, problem=None)
"""For those to whom the lock does not matter."""


def probe(path: str | os.PathLike[str]) -> LockStatus:
    """Look at the lock file without opening it for locking; needs no privilege.

    Never blocks and never raises for what it finds there: a missing file that can be created is a
    free lock, anything odd is a `problem`.
    """
    name = os.fspath(path)
    try:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return _unusable(name, _missing_problem(name), exists=False)
    except PermissionError:
        return _unusable(name, f"it {why_denied(name)}", exists=False)
    except OSError as exc:
        return _unusable(name, f"cannot look at it: {_say(exc)}", exists=False)
    try:
        info = os.fstat(fd)
        problem = _shape_problem(info)
        if problem is not None:
            return _unusable(name, problem, exists=True)
        return _probe_regular(name, fd, info)
    finally:
        os.close(fd)


def why_denied(path: str) -> str:
    """Say why this user cannot open or create the lock file, and what to do, as a predicate.

    Owner, group and mode decide: a group that may read is enough, since flock needs no more. The
    group of root is nobody's to join.
    """
    user = user_name(os.geteuid())
    try:
        info = os.stat(path, follow_symlinks=False)
    except OSError:
        directory = os.path.dirname(os.path.abspath(path))
        return (
            f"may not be created or reached in {directory} by the user {user}; let root create it"
            " for all, see onebitd(8), DEVICE LOCK, or set lock.path"
        )
    group = group_name(info.st_gid)
    facts = f"{user_name(info.st_uid)}:{group} with mode {stat.S_IMODE(info.st_mode):04o}"
    may_join = info.st_mode & stat.S_IRGRP and info.st_gid != 0 and info.st_gid not in _own_groups()
    advice = (
        f"join the group {group}"
        if may_join
        else "let root remove it while nothing uses it, or create it for all, see onebitd(8),"
        " DEVICE LOCK"
    )
    return f"may not be opened by the user {user}: it belongs to {facts}; {advice}"


def parse_owner_line(text: str) -> tuple[str, int] | None:
    """Return (name, pid) of `NAME pid=N ...`, None for anything else."""
    found = _OWNER.match(text.strip())
    return (found["name"], int(found["pid"])) if found else None


def read_owner_line(fd: int) -> str:
    """Return the first line of the open lock file, control characters made blanks; "" if empty."""
    first = os.pread(fd, OWNER_LINE_BYTES, 0).split(b"\n", 1)[0]
    return _CONTROL.sub(" ", first.decode("utf-8", "replace")).strip()


def living_owner(line: str, written_at: float) -> tuple[str, int] | None:
    """Return (name, pid) if the process that wrote `line` still runs, else None.

    Args:
        line: the owner line.
        written_at: the file's mtime, seconds since the epoch. A process that started after it
            only has the number of the one that wrote the line, which is gone.
    """
    owner = parse_owner_line(line)
    if owner is None or not _is_alive(owner[1]):
        return None
    started = _started_at(owner[1])
    if started is not None and started > written_at + _CLOCK_SLACK_S:
        return None
    return owner


def _unusable(name: str, problem: str | None, *, exists: bool) -> LockStatus:
    """Return what is to be said of a path without a lock file; no problem: one can be created."""
    return LockStatus(name, exists, held=False, holder=None, problem=problem, usable=not problem)


def _missing_problem(name: str) -> str | None:
    directory = os.path.dirname(os.path.abspath(name))
    if not os.path.isdir(directory):
        return f"its directory {directory} does not exist: create it, or set lock.path"
    if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        return f"it {why_denied(name)}"
    return None


def _probe_regular(name: str, fd: int, info: os.stat_result) -> LockStatus:
    line, problem = _owner_line_of(name)
    usable = problem is None
    if problem is None:
        problem = _foreign_problem(name, info)
    try:
        pid = _flock_pid(_devices(fd, info), info.st_ino)
    except OSError as exc:
        pid = None
        problem = problem or f"cannot tell who holds it: /proc/locks: {_say(exc)}"
    if pid is not None:
        if not _is_alive(pid):
            # The lock outlives the process that took it in a child that inherited the descriptor.
            pid = _inheritor(info) or pid
        return LockStatus(
            name,
            exists=True,
            held=True,
            holder=_holder(pid, line),
            problem=problem,
            usable=usable,
        )
    owner = living_owner(line or "", info.st_mtime)
    return LockStatus(
        name,
        exists=True,
        held=owner is not None,
        holder=_holder(owner[1], line) if owner else None,
        problem=problem,
        declared_only=owner is not None,
        usable=usable,
    )


def _shape_problem(info: os.stat_result) -> str | None:
    mode = info.st_mode
    if stat.S_ISLNK(mode):
        return "it is a symbolic link, and a lock must not be one: remove it"
    if stat.S_ISDIR(mode):
        return "it is a directory: remove it"
    if stat.S_ISFIFO(mode):
        return "it is a fifo: remove it"
    if not stat.S_ISREG(mode):
        return "it is not a regular file: remove it"
    if info.st_nlink > 1:
        return f"it is a hard link ({info.st_nlink} names for one file): remove it"
    return None


def _foreign_problem(name: str, info: os.stat_result) -> str | None:
    """Say who could take the lock from under its holder, or cannot take it at all.

    Root may do as it likes, and so may this user; the file can be used all the same.
    """
    parent = os.path.dirname(os.path.abspath(name))
    directory = os.stat(parent)
    trusted = (0, os.geteuid())
    risk = "and then two would hold the lock"
    if directory.st_uid not in trusted:
        return (
            f"its directory {parent} belongs to {user_name(directory.st_uid)}, who can replace it,"
            f" {risk}: set lock.path to a file in a directory of root's"
        )
    if directory.st_mode & stat.S_IWOTH and not directory.st_mode & stat.S_ISVTX:
        return (
            f"its directory {parent} lets everybody replace it, {risk}: chmod +t {parent},"
            " or set lock.path"
        )
    if not directory.st_mode & stat.S_ISVTX:
        return None
    protected = _protected_problem(info, directory)
    if protected is None and info.st_uid not in trusted:
        return (
            f"it belongs to {user_name(info.st_uid)}, who can remove it, {risk}:"
            " make root its owner (tmpfiles.d)"
        )
    return protected


def _protected_problem(info: os.stat_result, directory: os.stat_result) -> str | None:
    """Say when fs.protected_regular keeps other users' engines, which open with O_CREAT, out.

    The kernel's exception is "the file's owner owns the directory", so root's file in /tmp is fine.
    """
    if info.st_uid == directory.st_uid:
        return None
    try:
        with open("/proc/sys/fs/protected_regular", "rb") as file:
            level = int(file.read())
    except (OSError, ValueError):
        return None
    if level < 1:
        return None
    return (
        f"it belongs to uid {info.st_uid}: with fs.protected_regular = {level} an engine of another"
        " user cannot open it and runs without the lock; make root its owner (tmpfiles.d)"
    )


def _owner_line_of(name: str) -> tuple[str | None, str | None]:
    """Return (owner line or None, problem or None)."""
    try:
        fd = os.open(name, os.O_RDONLY | OPEN_FLAGS)
    except PermissionError:
        return None, f"it {why_denied(name)}"
    except OSError as exc:
        return None, f"cannot read its owner line: {_say(exc)}"
    try:
        return read_owner_line(fd) or None, None
    except OSError as exc:
        return None, f"cannot read its owner line: {_say(exc)}"
    finally:
        os.close(fd)


def _devices(fd: int, info: os.stat_result) -> set[tuple[int, int]]:
    """Return every (major, minor) by which /proc/locks may know the file.

    stat gives a btrfs subvolume a number of its own; /proc/locks and mountinfo give the file
    system's.
    """
    found = {(os.major(info.st_dev), os.minor(info.st_dev))}
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="utf-8") as file:
            mount = next(line.split()[1] for line in file if line.startswith("mnt_id:"))
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                number, _, device = line.split(" ", 3)[:3]
                if number == mount:
                    major, minor = device.split(":")
                    found.add((int(major), int(minor)))
    except (OSError, ValueError, StopIteration):
        pass  # /proc without them: the number of stat is right on every other file system
    return found


def _flock_pid(devices: set[tuple[int, int]], inode: int) -> int | None:
    """Return the pid in /proc/locks that holds a flock on the file.

    Lines look like `3: FLOCK  ADVISORY  WRITE 1234 00:1f:5678 0 EOF`, device numbers in
    hexadecimal; one that waits has `->` after its number (proc(5)).
    """
    with open("/proc/locks", encoding="utf-8", errors="replace") as file:
        for line in file:
            words = line.split()
            if len(words) < 6 or words[1] != "FLOCK":
                continue
            major, minor, number = words[5].split(":")
            if int(number) == inode and (int(major, 16), int(minor, 16)) in devices:
                return int(words[4])
    return None


def _inheritor(info: os.stat_result) -> int | None:
    """Return a living process that has the file open and locked; own processes only, unless root.

    fdinfo shows a flock on every descriptor that shares the open file (proc(5), `lock:`).
    """
    for pid in _pids():
        base = f"/proc/{pid}"
        try:
            for number in os.listdir(f"{base}/fd"):
                there = os.stat(f"{base}/fd/{number}")
                if (there.st_dev, there.st_ino) != (info.st_dev, info.st_ino):
                    continue
                with open(f"{base}/fdinfo/{number}", encoding="utf-8", errors="replace") as file:
                    if "FLOCK" in file.read():
                        return pid
        except OSError:
            continue  # gone meanwhile, or another user's
    return None


def _pids() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def _holder(pid: int, line: str | None) -> LockHolder:
    return LockHolder(pid, command_of(pid), line)


def command_of(pid: int) -> str:
    """Return the command line of a process, its name, or "".

    At most 200 characters; an ellipsis stands for what was cut off.
    """
    for name in ("cmdline", "comm"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                raw = file.read(4096)
        except OSError:
            return ""
        text = _CONTROL.sub(" ", raw.decode("utf-8", "replace")).strip()
        if text:
            cut = len(text) > _COMMAND_CHARS
            return f"{text[: _COMMAND_CHARS - 1].rstrip()}…" if cut else text
    return ""


def _is_alive(pid: int) -> bool:
    """Tell whether the process exists; signal 0 sees what a hidden /proc does not show."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OverflowError:
        return False
    except PermissionError:
        return True
    return _state(pid) != "Z"


def _stat_fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the third on; the second may hold blanks."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def _state(pid: int) -> str | None:
    fields = _stat_fields(pid)
    return fields[0] if fields else None


def _started_at(pid: int) -> float | None:
    """Return when the process started, seconds since the epoch; None if /proc hides it."""
    fields = _stat_fields(pid)
    if fields is None or len(fields) < 20:
        return None
    after_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + after_boot_s


def _own_groups() -> set[int]:
    return {os.getegid(), *os.getgroups()}


def _say(exc: OSError) -> str:
    word = os.strerror(exc.errno) if exc.errno else str(exc)
    return f"{word} ({errno.errorcode.get(exc.errno or 0, '?')})"
