"""Names of users and groups, for messages."""

from __future__ import annotations

import grp
import pwd


def user_name(uid: int) -> str:
    """Return a user's name, its number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_name(gid: int) -> str:
    """Return a group's name, its number where it has none."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
