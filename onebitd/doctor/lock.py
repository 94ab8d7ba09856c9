"""The device lock as the service sees it: there, usable, everybody's, and the same as outside."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from typing import Any, Final

from onebitd.adapters import lock_probe
from onebitd.core.config import LockConfig
from onebitd.core.paths import DEVICE_LOCK
from onebitd.doctor import sight
from onebitd.doctor.finding import Finding, failed, ok, skipped, warning
from onebitd.doctor.place import Place, folded
from onebitd.doctor.sight import Step

NAME: Final = "lock"
_SHARED: Final = "lock.shared"
_GROUP: Final = re.compile(r"join the group (\S+)$")
"""The end of what `lock_probe.why_denied` says where membership would do."""


def check(config: LockConfig, place: Place) -> Finding:
    """Look at the lock file; never takes it."""
    if not config.enabled:
        return skipped(NAME, "no device lock is taken (NPU_NO_DEVICE_LOCK is set)")
    closed = sight.look(os.path.dirname(config.path), os.X_OK)
    return judge(lock_probe.probe(config.path), place, closed)


def judge(found: lock_probe.LockStatus, place: Place, closed: Step | None = None) -> Finding:
    """Say what a probe of the lock file means.

    Args:
        closed: what keeps this process from its directory.
    """
    path = found.path
    if closed is not None and closed.why == "denied":
        step = None if sight.is_sandboxed(path, closed) else closed
        fix = None if step is None else sight.access_fix(place, step, "x")
        text = sight.sentence("the lock", path, closed, sight.own_name())
        return failed(NAME, text, fix or place.edit())
    if found.problem is not None:
        make = failed if not found.usable else warning
        return make(NAME, f"{path}: {found.problem}", _fix(path, found.problem, place))
    if not found.exists:
        text = (
            f"{path} does not exist yet: whoever takes it first makes it, and programs of another"
            " user may not be able to open it then"
        )
        return warning(NAME, text, make_fix(path, place))
    if found.holder is not None:
        return ok(NAME, f"{path}, held by {found.holder.describe()}")
    if found.held:
        return ok(NAME, f"{path}, held by a process that cannot be seen from here")
    return ok(NAME, f"{path}, free")


def _fix(path: str, problem: str, place: Place) -> str | None:
    """Return what puts a problem right, by the words that `lock_probe` has for each."""
    group = _GROUP.search(problem)
    directory = shlex.quote(os.path.dirname(path))
    file = shlex.quote(path)
    if group is not None:
        return place.join(group[1], sight.own_name())
    if problem.endswith(": remove it"):
        # Pasted without a thought: what is in a directory must survive that.
        remove = "rmdir" if problem.startswith("it is a directory") else "rm -f"
        return folded([f"{place.sudo}{remove} -- {file} &&", make_fix(path, place)])
    if "chmod +t" in problem:
        return f"{place.sudo}chmod +t {directory}"
    if place.scope == "system" and (
        problem.startswith("it belongs to ") or "may not be opened" in problem
    ):
        # The file stays the one that others may have locked.
        return folded([f"{place.sudo}chown root:render {file} &&", f"{place.sudo}chmod 660 {file}"])
    if "may not be created" in problem:
        return make_fix(path, place)
    if "/proc/locks" in problem:
        return None
    return place.edit()  # another lock.path


def make_fix(path: str, place: Place) -> str:
    """Return the command that makes the lock file root's, open to the group of the devices."""
    if path == DEVICE_LOCK and place.scope != "none":
        return f"{place.sudo}systemd-tmpfiles --create onebitd.conf"
    return f"{place.sudo}install -m 660 -g render /dev/null {shlex.quote(path)}"


def directory_of(config: LockConfig) -> list[Any] | None:
    """Return path, device and inode of the directory that the lock is in, None without one."""
    directory = os.path.dirname(os.path.abspath(config.path))
    try:
        info = os.stat(directory)
    except OSError:
        return None
    return [directory, info.st_dev, info.st_ino] if config.enabled else None


def compare(inside: Sequence[Any] | None, place: Place) -> Finding | None:
    """Hold the directory of the lock, as the service sees it, against what others see.

    Args:
        inside: what `directory_of` said in the service.

    Returns:
        None where there is nothing to compare.
    """
    if inside is None or len(inside) != 3:
        return None
    directory = str(inside[0])
    try:
        info = os.stat(directory)
    except OSError:
        return None
    if [info.st_dev, info.st_ino] == list(inside[1:]):
        return ok(_SHARED, f"the service sees the same {directory} as everybody else")
    return failed(
        _SHARED,
        f"the service sees a {directory} of its own (PrivateTmp= or DynamicUser=): its lock keeps"
        " nobody else off the device, and two programs would use it at once",
        place.drop_in("shared-tmp", "PrivateTmp=no", "DynamicUser=no"),
    )
