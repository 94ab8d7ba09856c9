"""Why a path cannot be used, and by which of its directories; what a sandbox has to do with it.

`look` reads, the rest is pure.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import shlex
import stat
from pathlib import PurePosixPath
from typing import Final

from onebitd.adapters.accounts import group_name, user_name
from onebitd.doctor.place import Place, plain

_HOMES: Final = ("/home", "/root", "/run/user")
"""What ProtectHome= is about (systemd.exec(5))."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What stands in the way at one component of a path.

    Attributes:
        path: up to that component.
        why: `missing`, `denied`, or the system's own words.
        owner, group, mode: of the component; "" and 0 where it cannot be looked at.
        is_directory: it is one.
    """

    path: str
    why: str
    owner: str = ""
    group: str = ""
    mode: int = 0
    is_directory: bool = False


def look(path: str, wanted: int = os.R_OK) -> Step | None:
    """Return what keeps this process from a file, None when nothing does.

    Args:
        path: absolute; links are followed.
        wanted: os.R_OK, os.X_OK, ... of the last component.
    """
    parts = PurePosixPath(path)
    for parent in reversed(parts.parents):
        step = _step(str(parent), os.X_OK)
        if step is not None:
            return step
    return _step(path, wanted)


def _step(path: str, wanted: int) -> Step | None:
    try:
        info = os.stat(path)
    except FileNotFoundError:
        return Step(path, "missing")
    except OSError as error:
        denied = error.errno in (errno.EACCES, errno.EPERM)
        return Step(path, "denied" if denied else (error.strerror or "unreadable"))
    if os.access(path, wanted, effective_ids=True):
        return None
    return Step(
        path,
        "denied",
        user_name(info.st_uid),
        group_name(info.st_gid),
        stat.S_IMODE(info.st_mode),
        stat.S_ISDIR(info.st_mode),
    )


def sentence(what: str, path: str, step: Step, user: str) -> str:
    """Return why a user has no access to a file.

    >>> sentence("the model", "/m/x.gguf", Step("/m", "denied", "ann", "ann", 0o700, True), "bob")
    'the model /m/x.gguf: the directory /m (ann:ann, mode 0700) lets the user bob not in'
    >>> sentence("the model", "/m/x.gguf", Step("/m/x.gguf", "missing"), "bob")
    'the model /m/x.gguf does not exist'
    """
    if step.why == "missing":
        part = "" if step.path == path else f": there is no {step.path}"
        return f"{what} {path}{part or ' does not exist'}"
    if step.why != "denied":
        return f"{what} {path}: {step.path}: {step.why.lower()}"
    facts = f" ({step.owner}:{step.group}, mode {step.mode:04o})" if step.owner else ""
    if step.path == path and not step.is_directory:
        return f"{what} {path}{facts} may not be used by the user {user}"
    return f"{what} {path}: the directory {step.path}{facts} lets the user {user} not in"


def is_sandboxed(path: str, step: Step) -> bool:
    """Tell whether it is the unit's sandbox that hides a path below a home directory.

    ProtectHome=yes mounts an empty directory of root's with mode 0000 in the place of each, and
    `tmpfs` an empty one.
    """
    home = next((home for home in _HOMES if PurePosixPath(path).is_relative_to(home)), None)
    if home is None:
        return False
    return step.path == home and step.why == "denied" and step.mode == 0


def hidden_sentence(what: str, path: str) -> str:
    """Return that a file is there, and not for the service."""
    return f"{what} {path} is hidden from the service by its sandbox (ProtectHome=)"


def show_fix(place: Place, path: str) -> str:
    """Return the commands that let the service see the directory of a file, and only that."""
    directory = str(PurePosixPath(path).parent)
    name = "see" + plain(directory).rstrip("-")
    lines = [f"BindReadOnlyPaths={in_unit(directory)}"]
    if any(PurePosixPath(path).is_relative_to(home) for home in _HOMES):
        lines.insert(0, "ProtectHome=tmpfs")
    return place.drop_in(name, *lines)


def in_unit(path: str) -> str:
    """Return a path as it stands in a list of paths of a unit (systemd.syntax(7)).

    >>> in_unit("/srv/models"), in_unit("/srv/my 5% models")
    ('/srv/models', '"/srv/my 5%% models"')
    """
    text = path.replace("%", "%%").replace("\\", "\\\\").replace(":", "\\:")
    if not any(letter.isspace() or letter in "\"'" for letter in text):
        return text
    return '"' + text.replace('"', '\\"') + '"'


def access_fix(place: Place, step: Step, letters: str) -> str | None:
    """Return the command that lets the service pass a step; None where there is nothing to pass.

    A directory can then be passed through, not listed. Access lists would be finer, and setfacl(1)
    is not on every machine.

    Args:
        letters: what is needed of the last component, as in `r` or `rx`.
    """
    if step.why != "denied":
        return None
    wanted = "x" if step.is_directory else letters
    return f"{place.sudo}chmod o+{wanted} {shlex.quote(step.path)}"


def own_name() -> str:
    """Return the name of the user that this process is."""
    return user_name(os.geteuid())
