"""Says which devices this process may not open, and how much memory it may lock, with what to do.

For a provider that was refused something: it runs with the daemon's user, groups and limits. The
truth is access(2)'s, which knows of access lists and capabilities; owner, group and mode are there
to explain it. Nothing is opened.
"""

from __future__ import annotations

import contextlib
import os
import resource
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from onebitd.adapters.accounts import group_name, user_name
from onebitd.core.failure_class import is_about_memory_lock

SMALL_BYTES: Final = 64 << 20
"""What one buffer of the NPU takes: amdxdna maps its heap of this size at once. The kernel's own
default limit is 8 MiB."""
_NODES: Final = ("accel/accel*", "dri/renderD*", "kfd")
_CAP_IPC_LOCK: Final = 14
_NOT_ABOUT_DEVICES: Final = ("program ", "status 126")
"""Words of a program that could not be executed in the first place; 126 is setpriv's for that."""


def _can_open(node: Path) -> bool:
    return os.access(node, os.R_OK | os.W_OK, effective_ids=True)


def refusal(
    detail: str,
    *,
    dev: Path = Path("/dev"),
    can_open: Callable[[Path], bool] = _can_open,
    groups: Sequence[int] | None = None,
    memlock_bytes: int | None = None,
) -> str | None:
    """Return one sentence on what this process lacks, None when that is nothing we know of.

    Args:
        detail: what the provider said; devices that it names are the only ones told then.
        dev: in the place of `/dev`.
        can_open: says whether a node may be opened for reading and writing.
        groups: of this process; its own by default.
        memlock_bytes: how much it may lock, negative for any amount; its own limit by default.
    """
    if detail.startswith(_NOT_ABOUT_DEVICES):
        return None
    if is_about_memory_lock(detail):
        return _memory_sentence(memlock_bytes, small_only=False)
    closed = [
        node
        for pattern in _NODES
        for node in sorted(dev.glob(pattern))
        if not can_open(node) and _is_there(node)
    ]
    named = [node for node in closed if os.fspath(node) in detail]
    if closed:
        return _device_sentence(named or closed, _own_groups() if groups is None else groups)
    return _memory_sentence(memlock_bytes, small_only=True)


def _is_there(node: Path) -> bool:
    with contextlib.suppress(OSError):
        node.stat()
        return True
    return False


def _own_groups() -> list[int]:
    return [os.getegid(), *os.getgroups()]


def _device_sentence(nodes: Sequence[Path], groups: Sequence[int]) -> str:
    told = ", ".join(f"{node} ({_owner_of(node)})" for node in nodes)
    helpful = list(dict.fromkeys(name for node in nodes if (name := _group_to_join(node, groups))))
    who = f"this process (user {user_name(os.geteuid())}) may not open {told}"
    if not helpful:
        return f"{who}: no group would help, a udev rule has to give the device to one"
    names = " ".join(helpful)
    return (
        f"{who}: add its user to the {'group' if len(helpful) == 1 else 'groups'} {names},"
        f" or SupplementaryGroups={names} to its service, and restart it"
    )


def _owner_of(node: Path) -> str:
    found = node.stat()
    mode = stat.S_IMODE(found.st_mode)
    return f"{user_name(found.st_uid)}:{group_name(found.st_gid)}, mode {mode:04o}"


def _group_to_join(node: Path, groups: Sequence[int]) -> str | None:
    """Return the group whose members may open the node; None if there is none to join."""
    found = node.stat()
    both = stat.S_IRGRP | stat.S_IWGRP
    if found.st_mode & both != both or found.st_gid == 0 or found.st_gid in groups:
        return None
    return group_name(found.st_gid)


def _memory_sentence(limit: int | None, *, small_only: bool) -> str | None:
    if limit is None:
        limit = memlock_limit()
    if limit < 0 or (small_only and limit >= SMALL_BYTES):
        return None
    size = f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit >> 10} KiB"
    return (
        f"this process may lock {size} of memory (RLIMIT_MEMLOCK):"
        " set LimitMEMLOCK=infinity in its service and restart it"
    )


def memlock_limit() -> int:
    """Return how much memory this process may lock, -1 for any amount."""
    return -1 if _may_lock_any_amount() else resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def _may_lock_any_amount() -> bool:
    """Look for CAP_IPC_LOCK among the effective capabilities, to which no limit applies."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False
