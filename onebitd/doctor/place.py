"""Where the checks run, and how a command that puts something right is written there. Pure."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

Scope = Literal["system", "user", "none"]
_COMMAND_COLUMNS: Final = 72


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Who looks at which instance, and from where.

    Attributes:
        instance: its name.
        scope: whose service manager has its unit, `none` without one.
        inside: the checks run as the service does.
        is_root: whoever asked is root, so that commands need no sudo.
        config_file: of the instance.
    """

    instance: str
    scope: Scope = "none"
    inside: bool = False
    is_root: bool = False
    config_file: str = ""

    @property
    def unit(self) -> str:
        """The unit of the service."""
        return f"onebitd@{self.instance}.service"

    @property
    def sudo(self) -> str:
        """What stands before a command that only root can run."""
        return "" if self.is_root else "sudo "

    @property
    def manager(self) -> str:
        """The service manager's own sudo: a user's own needs none."""
        return "" if self.scope == "user" else self.sudo

    @property
    def systemctl(self) -> str:
        """How the service manager of the unit is told something."""
        return "systemctl --user" if self.scope == "user" else f"{self.sudo}systemctl"

    @property
    def as_root(self) -> str:
        """The command that sees everything, as the service does."""
        return f"sudo onebitctl -i {self.instance} doctor"

    @property
    def restart(self) -> str:
        """The command that starts the daemon afresh."""
        if self.scope == "none":
            return f"onebitd --instance {shlex.quote(self.instance)}"
        return f"{self.systemctl} restart {self.unit}"

    def drop_in(self, name: str, *lines: str) -> str:
        """Return the commands that add lines to [Service] of the unit, and restart it.

        Args:
            name: of the file, without `.conf`.
            lines: `Key=value`.
        """
        directory = "/etc/systemd/system"
        if self.scope == "user":
            directory = "~/.config/systemd/user"
        file = f"{directory}/{self.unit}.d/zz-{name}.conf"  # the last one counts
        reload = folded([f"{self.systemctl} daemon-reload &&", self.restart])
        return f"{_written(file, self.manager, lines)}\n{reload}"

    def users_limit(self, line: str) -> str:
        """Return the commands that set a limit of every user's service manager.

        A user's own unit cannot go beyond those.
        """
        file = "/etc/systemd/system/user@.service.d/zz-onebitd.conf"
        return (
            f"{_written(file, self.sudo, [line])}\n{self.sudo}systemctl daemon-reload\n"
            f'{self.sudo}loginctl terminate-user "$USER"  # ends every session: log in again'
        )

    def join(self, group: str, user: str) -> str:
        """Return the commands that put the daemon's user into a group."""
        if self.inside and self.scope == "system":
            return self.drop_in(f"groups-{plain(group)}", f"SupplementaryGroups={group}")
        return f"{self.sudo}usermod -aG {group} {shlex.quote(user)}  # then log in again"

    def edit(self) -> str:
        """Return the command that opens the configuration."""
        file = shlex.quote(self.config_file or f"/etc/onebitd/{self.instance}.toml")
        return f"{'${EDITOR:-vi}' if self.is_root or self.scope == 'user' else 'sudoedit'} {file}"

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict."""
        return dataclasses.asdict(self)


def from_json(found: Mapping[str, Any]) -> Place:
    """Read what `to_json` made."""
    return Place(**found)


def plain(text: str) -> str:
    """Return a text as a part of a file's name.

    >>> plain("/srv/my models")
    '-srv-my-models'
    """
    return re.sub(r"[^A-Za-z0-9]+", "-", text)


def _written(file: str, sudo: str, lines: Sequence[str]) -> str:
    """Return the command that makes a drop-in with lines of [Service]."""
    made = folded(["printf '%s\\n'", *map(shlex.quote, ("[Service]", *lines)), "|"])
    return f"{made}\n  {folded([f'{sudo}install -D -m 644 /dev/stdin', file])}"


def folded(pieces: Sequence[str]) -> str:
    """Return a command in lines of at most 72 columns, if its pieces are no longer.

    >>> print(folded(["echo", "a" * 40, "b" * 40]))
    echo aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa \\
      bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb
    """
    lines = [pieces[0]]
    for piece in pieces[1:]:
        if len(lines[-1]) + len(piece) > _COMMAND_COLUMNS - 4:
            lines[-1] += " \\"
            lines.append(f"  {piece}")
        else:
            lines[-1] += f" {piece}"
    return "\n".join(lines)
