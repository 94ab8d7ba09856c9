"""Where state files live: in memory or on a disk, and with room for the longest prompt's or not."""

from __future__ import annotations

import dataclasses
import os
import shlex
from pathlib import PurePosixPath
from typing import Final

from onebitd.doctor.finding import Finding, failed, ok, skipped, warning
from onebitd.doctor.place import Place

NAME: Final = "state.space"
_IN_MEMORY: Final = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
_UNESCAPES: Final = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\"))


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """A directory's file system.

    Attributes:
        kind: as mountinfo calls it, "" if it does not say.
        mount: where it is mounted.
        free_bytes, size_bytes: what this user may still write, and all there is.
    """

    directory: str
    kind: str
    mount: str
    free_bytes: int
    size_bytes: int


def mount_of(path: str, mountinfo: str) -> tuple[str, str]:
    """Return mount point and type of the file system that holds a path (proc_pid_mountinfo(5)).

    The last line of several for one place counts: it lies on top. Where that is a part of a file
    system, which a sandbox has mounted over itself, it is the point of the whole that is returned.
    """
    best = ("", "", "")
    wholes: dict[str, str] = {}
    for line in mountinfo.splitlines():
        head, separator, tail = line.partition(" - ")
        words, types = head.split(), tail.split()
        if not separator or len(words) < 5 or not types:
            continue
        device, root, point = words[2:5]
        for escaped, letter in _UNESCAPES:
            point = point.replace(escaped, letter)
        if root == "/":
            wholes.setdefault(device, point)
        if PurePosixPath(path).is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, types[0], "" if root == "/" else device)
    point, kind, part_of = best
    return wholes.get(part_of, point), kind


def look(directory: str) -> Room | None:
    """Return what there is at a directory, or at the first of its parents that exists."""
    here = PurePosixPath(directory)
    while not os.path.isdir(here) and here != here.parent:
        here = here.parent
    try:
        info = os.statvfs(here)
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            mount, kind = mount_of(os.path.realpath(here), file.read())
    except OSError:
        return None
    return Room(
        directory, kind, mount, info.f_bavail * info.f_frsize, info.f_blocks * info.f_frsize
    )


def check(
    directory: str, ctx_size: int | None, bytes_per_token: float | None, place: Place
) -> Finding:
    """Look at the directory; see `judge`."""
    room = look(directory)
    if room is None:
        return failed(NAME, f"{directory} cannot be looked at", place.edit())
    return judge(room, ctx_size, bytes_per_token, place)


def judge(room: Room, ctx_size: int | None, bytes_per_token: float | None, place: Place) -> Finding:
    """Hold the room against the state of a prompt that fills the context.

    Args:
        ctx_size: tokens.
        bytes_per_token: of a state file.
    """
    where = f"{room.directory} ({room.kind or 'unknown file system'})"
    free = f"{room.free_bytes >> 20} MiB free"
    if not ctx_size or not bytes_per_token:
        return skipped(NAME, f"{where}: {free}; how much a state takes is not known")
    need = int(ctx_size * bytes_per_token)
    longest = f"the state of {ctx_size} tokens takes {max(need >> 20, 1)} MiB"
    if room.free_bytes < need:
        text = f"{where}: {free}, and {longest}: longer prompts than that fall back (no_space)"
        return warning(NAME, text, _fix(room, need, place))
    if room.kind not in _IN_MEMORY:
        text = f"{where} is on a disk: {longest}, written and read for each handoff"
        return warning(NAME, f"{text}; set handoff.state_dir to a tmpfs", place.edit())
    return ok(NAME, f"{where}: {free}, and {longest}")


def _fix(room: Room, need: int, place: Place) -> str:
    if room.kind != "tmpfs":
        return place.edit()
    size = (room.size_bytes - room.free_bytes + 2 * need >> 20) + 64
    return f"{place.sudo}mount -o remount,size={size}M {shlex.quote(room.mount)}"
