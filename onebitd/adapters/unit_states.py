"""What systemd knows of the instances' units. For `onebitctl`: blocking, bounded in time.

Without systemd, or where systemctl does not answer, nothing is known of any.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from onebitd.adapters import systemd_tools

TIMEOUT_S: Final = 2.0
"""For each systemctl."""

_PATTERNS: Final = ("onebitd@*.service", "onebitd@*.socket")
_PROPERTIES: Final = (
    *("Id", "LoadState", "ActiveState", "SubState", "UnitFileState", "Result", "NRestarts"),
    *("ExecMainCode", "ExecMainStatus", "ExecMainExitTimestamp"),
)


class UnitState(NamedTuple):
    """The service of one instance.

    Args:
        instance: its name.
        of_user: it belongs to the user's own service manager.
        active: `active`, `inactive`, `failed`, `activating`, `deactivating`...
        sub: systemd's finer word.
        enabled: it is started at boot.
        result: why it failed, systemd's word.
        killed: the last main process ended by a signal, whose number is `exit_status`.
        exit_status: of the last main process, None when none has ended.
        exit_time: when, seconds since the epoch.
        listens: its control socket is there, and who connects starts it.
    """

    instance: str
    of_user: bool = False
    active: str = "inactive"
    sub: str = "dead"
    enabled: bool = False
    result: str = "success"
    killed: bool = False
    exit_status: int | None = None
    exit_time: float | None = None
    listens: bool = False

    @property
    def is_asleep(self) -> bool:
        """It does not run, and who asks starts it."""
        return self.listens and self.active in ("inactive", "failed")

    @property
    def is_missing(self) -> bool:
        """It should run and does not, or not yet."""
        return self.active != "active" and (self.enabled or self.active != "inactive")


def find_units(*, of_user: bool, timeout_s: float = TIMEOUT_S) -> list[UnitState]:
    """Return the instances that a service manager has in memory: enabled ones are, at least."""
    listed = _systemctl(
        of_user, "list-units", "--all", "--output=json", *_PATTERNS, timeout_s=timeout_s
    )
    try:
        rows: list[Mapping[str, Any]] = json.loads(listed or "[]")
        active = {str(row["unit"]): str(row["active"]) for row in rows}
    except (ValueError, KeyError, TypeError):
        return []
    names = {instance_of(unit) for unit in active}
    listening = {
        instance_of(unit)
        for unit in active
        if unit.endswith(".socket") and active[unit] == "active"
    }
    return describe_units(sorted(names), listening, of_user=of_user, timeout_s=timeout_s)


def describe_units(
    names: Iterable[str],
    listening: Iterable[str] = (),
    *,
    of_user: bool,
    timeout_s: float = TIMEOUT_S,
) -> list[UnitState]:
    """Return what a service manager knows of these instances; nothing of those it does not."""
    units = [f"onebitd@{name}.service" for name in names]
    if not units:
        return []
    shown = _systemctl(
        of_user,
        *("show", "--timestamp=unix", f"--property={','.join(_PROPERTIES)}", *units),
        timeout_s=timeout_s,
    )
    listening = set(listening)
    found = [parse_unit(block, of_user=of_user) for block in (shown or "").split("\n\n")]
    return [unit._replace(listens=unit.instance in listening) for unit in found if unit is not None]


def parse_unit(text: str, *, of_user: bool) -> UnitState | None:
    """Read one unit of `systemctl show`; None when it is not loaded."""
    lines = (line.partition("=") for line in text.splitlines())
    shown = {key: value for key, equals, value in lines if equals}
    if shown.get("LoadState") != "loaded" or "@" not in shown.get("Id", ""):
        return None
    code = shown.get("ExecMainCode", "0")
    status, stamp = shown.get("ExecMainStatus", ""), shown.get("ExecMainExitTimestamp", "")
    return UnitState(
        instance_of(shown["Id"]),
        of_user,
        shown.get("ActiveState", "?"),
        shown.get("SubState", "?"),
        shown.get("UnitFileState", "").startswith("enabled"),
        shown.get("Result", "success"),
        code in ("2", "3"),  # CLD_KILLED, CLD_DUMPED
        int(status) if code != "0" and status.isdigit() else None,
        float(stamp[1:]) if stamp.startswith("@") and stamp[1:].isdigit() else None,
    )


def instance_of(unit: str) -> str:
    """Return the name between @ and the type of a unit."""
    return unit.partition("@")[2].rpartition(".")[0]


def _systemctl(of_user: bool, *arguments: str, timeout_s: float) -> str | None:
    if not systemd_tools.is_booted():
        return None
    scope = ["--user"] if of_user else []
    done = systemd_tools.run("systemctl", *scope, "--no-pager", *arguments, timeout_s=timeout_s)
    return done.stdout if done.status == 0 else None
