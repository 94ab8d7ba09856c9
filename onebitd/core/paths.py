"""Where an instance's directories are: one search, shared by the daemon and `onebitctl`.

Pure: the environment and the user are arguments. Paths are strings, as `onebitctl` would wait for
pathlib. Relative values of the XDG variables are ignored,
as the XDG base directory specification asks.

    runtime   $RUNTIME_DIRECTORY (systemd), else for root /run/onebitd/NAME,
              else $XDG_RUNTIME_DIR/onebitd/NAME, else /tmp/onebitd-UID/NAME
    state     $STATE_DIRECTORY (systemd), else for root /var/lib/onebitd/NAME,
              else $XDG_STATE_HOME or ~/.local/state, onebitd/NAME in it
"""

from __future__ import annotations

import posixpath
import stat
from collections.abc import Mapping
from typing import Final

SYSTEM_RUNTIME: Final = "/run/onebitd"
SYSTEM_STATE: Final = "/var/lib/onebitd"
CONTROL_SOCKET: Final = "control.sock"
HISTORY_FILE: Final = "history.db"
DEVICE_LOCK: Final = "/tmp/1bit-npu-device.lock"  # noqa: S108 - the fleet's path
"""Default of `lock.path`, for a command line that must not read the settings table."""


def runtime_dir(instance: str, environ: Mapping[str, str], uid: int) -> str:
    """Return the directory of an instance's sockets and state files.

    Args:
        instance: its name; checked elsewhere.
        environ: RUNTIME_DIRECTORY may list several directories with colons (systemd.exec(5)): the
            one named like the instance counts, else the first.
        uid: the effective user.
    """
    given = _of_systemd(environ.get("RUNTIME_DIRECTORY"), instance)
    return given or posixpath.join(_user_runtime_root(environ, uid), instance)


def state_dir(instance: str, environ: Mapping[str, str], uid: int) -> str:
    """Return the directory of what an instance keeps over restarts.

    Without a home directory this is the runtime directory, which does not outlive a boot.
    """
    given = _of_systemd(environ.get("STATE_DIRECTORY"), instance)
    if given is not None:
        return given
    if uid == 0:
        return posixpath.join(SYSTEM_STATE, instance)
    root = _absolute(environ.get("XDG_STATE_HOME"))
    if root is None:
        home = _absolute(environ.get("HOME"))
        if home is None:
            return posixpath.join(_user_runtime_root(environ, uid), instance)
        root = posixpath.join(home, ".local/state")
    return posixpath.join(root, "onebitd", instance)


def history_file(state_dir: str) -> str:
    """Return the file of past handoffs in an instance's state directory."""
    return posixpath.join(state_dir, HISTORY_FILE)


def runtime_roots(environ: Mapping[str, str], uid: int) -> list[str]:
    """Return the directories whose entries are instances, in the order a client looks.

    The last may be `fallback_root`, which counts only if `is_private` says so of it.
    """
    roots = [SYSTEM_RUNTIME]
    session = _absolute(environ.get("XDG_RUNTIME_DIR"))
    if session is not None:
        roots.append(posixpath.join(session, "onebitd"))
    roots.append(fallback_root(uid))
    return roots


def fallback_root(uid: int) -> str:
    """Return the runtime root of a user without a session directory.

    Its parent is everybody's: whoever makes it or looks into it must check `is_private` first.
    """
    return f"/tmp/onebitd-{uid}"  # noqa: S108 - checked with is_private


def is_private(mode: int, owner: int, uid: int) -> bool:
    """Tell from `lstat` of a directory whether nobody but `uid` could have put things into it."""
    return stat.S_ISDIR(mode) and owner == uid and stat.S_IMODE(mode) & 0o777 == 0o700


def _user_runtime_root(environ: Mapping[str, str], uid: int) -> str:
    if uid == 0:
        return SYSTEM_RUNTIME
    session = _absolute(environ.get("XDG_RUNTIME_DIR"))
    return fallback_root(uid) if session is None else posixpath.join(session, "onebitd")


def _of_systemd(value: str | None, instance: str) -> str | None:
    found = [path for part in (value or "").split(":") if (path := _absolute(part)) is not None]
    named = [path for path in found if posixpath.basename(path) == instance]
    return next(iter(named or found), None)


def _absolute(value: str | None) -> str | None:
    if value is None or not posixpath.isabs(value):
        return None
    return value.rstrip("/") or "/"
