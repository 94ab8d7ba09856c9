"""Where the handoffs of an instance are while its daemon does not run: the search for the file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from onebitd.client import AccessDenied, NoDaemon
from onebitd.core import paths
from onebitd.core.errors import UsageError


class HistoryFile(NamedTuple):
    """A file of past handoffs; `readable` is False where even to look is not allowed."""

    instance: str
    path: str
    readable: bool


def choose_history(
    name: str | None, environ: Mapping[str, str], uid: int, no_daemon: NoDaemon
) -> str:
    """Return the history file of the instance `name`, or the only one there is.

    Of a service and a daemon of the user with the same name, the user's is taken.

    Args:
        name: the instance, or None.
        environ: as of `core.paths`.
        uid: the effective user.
        no_daemon: why there is no daemon to ask.

    Raises:
        NoDaemon: the one given; there is no file either.
        AccessDenied: there may be one that this user may not read.
        UsageError: several instances have one; the message lists them.
    """
    found = list(_find(name, environ, uid))
    readable = {one.instance: one for one in reversed(found) if one.readable}
    if len(readable) == 1:
        return readable.popitem()[1].path
    if readable:
        listed = ", ".join(f"{one.instance} ({one.path})" for _, one in sorted(readable.items()))
        raise UsageError(
            f"{no_daemon}; more than one has left a history: {listed}; name one with -i"
        )
    if found:
        raise AccessDenied(
            f"{no_daemon}; and this user may not look for its history in"
            f" {os.path.dirname(found[0].path)}: use sudo"
        )
    raise no_daemon


def _find(name: str | None, environ: Mapping[str, str], uid: int) -> Iterator[HistoryFile]:
    """Yield the files, the user's own before those of services."""
    for directory in dict.fromkeys(_directories(name, environ, uid)):
        path = paths.history_file(directory)
        try:
            os.stat(path)
        except PermissionError:
            yield HistoryFile(os.path.basename(directory), path, readable=False)
        except OSError:
            continue
        else:
            yield HistoryFile(os.path.basename(directory), path, readable=True)


def _directories(name: str | None, environ: Mapping[str, str], uid: int) -> Iterator[str]:
    """Yield the state directories to look into."""
    own = paths.state_dir(name or "any", environ, uid)
    if name is not None and environ.get("STATE_DIRECTORY"):
        yield own
    for root in dict.fromkeys((os.path.dirname(own), paths.SYSTEM_STATE)):
        if root == paths.fallback_root(uid) and not _is_private(root, uid):
            continue
        if name is not None:
            yield os.path.join(root, name)
            continue
        try:
            names = sorted(os.listdir(root))
        except PermissionError:
            yield os.path.join(root, "?")
        except OSError:
            continue
        else:
            yield from (os.path.join(root, entry) for entry in names)


def _is_private(root: str, uid: int) -> bool:
    try:
        info = os.lstat(root)
    except OSError:
        return False
    return paths.is_private(info.st_mode, info.st_uid, uid)
