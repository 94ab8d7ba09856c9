"""Which service of systemd a process belongs to, by its control group. Pure."""

from __future__ import annotations

from typing import NamedTuple


class OwnUnit(NamedTuple):
    """A service.

    Attributes:
        name: of its unit.
        of_user: a user's own service manager has it, and its log: `systemctl --user`.
    """

    name: str
    of_user: bool


def unit_in(cgroup: str) -> OwnUnit | None:
    """Read `/proc/self/cgroup`; None where the process is no service's.

    >>> unit_in("0::/system.slice/system-onebitd.slice/onebitd@qwen.service\\n")
    OwnUnit(name='onebitd@qwen.service', of_user=False)
    >>> unit_in("0::/user.slice/user-7.slice/user@7.service/app.slice/onebitd@qwen.service\\n")
    OwnUnit(name='onebitd@qwen.service', of_user=True)
    >>> unit_in("0::/user.slice/user-7.slice/user@7.service/app.slice/terminal.scope\\n")
    """
    lines = (line.split(":", 2) for line in cgroup.splitlines())
    paths = {tuple(line[:2]): line[2] for line in lines if len(line) == 3}
    path = next((paths[key] for key in sorted(paths) if key[1] in ("", "name=systemd")), "")
    units = [part for part in path.split("/") if part.endswith((".service", ".scope"))]
    if not units or units[-1].endswith(".scope") or units[-1].startswith("user@"):
        return None
    return OwnUnit(units[-1], any(unit.startswith("user@") for unit in units[:-1]))
