"""What `onebitctl` says of an instance whose daemon does not run: state, last exit, what helps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from onebitd.surfaces.cli_text import duration

if TYPE_CHECKING:
    from onebitd.adapters.unit_states import UnitState

_EXITS: Final = {
    2: "the command line or the configuration is wrong",
    3: "another onebitd has its name or its port",
    4: "the decoder could not be started or kept running",
}
"""The exit statuses of onebitd that say something, see onebitd(8)."""


def why_nobody_runs(name: str | None, units: Sequence[UnitState], now: float) -> str:
    """Return why there is nobody to ask, how to start one, and where the log is.

    Args:
        name: of the instance, None when none was named.
        units: its services, or those of all instances that could run; at least one.
        now: seconds since the epoch.
    """
    who = f" for the instance {name}" if name else " here"
    told = "; ".join(f"{unit_name(unit)} {unit_words(unit, now)}" for unit in units)
    one = units[0]
    helps = [f"start it with `{systemctl(one, 'start')}`", f"its log: `{journalctl(one)}`"]
    if one.active in ("activating", "active", "reloading"):
        helps = helps[1:]
    if len(units) > 1:
        told += f". For {one.instance}"
    return f"no onebitd runs{who}: {told}; {', '.join(helps)}"


def unit_words(unit: UnitState, now: float) -> str:
    """Return e.g. `failed 3 min ago: exit status 4, the decoder could not be started...`."""
    ended = _exit_words(unit, now)
    match unit.active:
        case "failed":
            return f"has failed{ended}"
        case "activating" if unit.sub == "auto-restart":
            return f"waits for its next start{ended}"
        case "activating":
            return "is starting"
        case "deactivating":
            return "is stopping"
        case "active" | "reloading":
            return "runs, and has no control socket that can be found"
    at_rest = "is stopped" if unit.enabled else "is stopped, and not enabled"
    if unit.listens:
        at_rest = "rests, and is started by the first request"
    return f"{at_rest}{ended}" if unit.exit_status else at_rest


def unit_name(unit: UnitState) -> str:
    """Return e.g. `onebitd@qwen.service`."""
    return f"onebitd@{unit.instance}.service"


def systemctl(unit: UnitState, verb: str) -> str:
    """Return the command that does something with it."""
    return f"systemctl {'--user ' if unit.of_user else ''}{verb} onebitd@{unit.instance}"


def journalctl(unit: UnitState) -> str:
    """Return the command that shows its log."""
    return f"journalctl {'--user ' if unit.of_user else ''}-u onebitd@{unit.instance}"


def _exit_words(unit: UnitState, now: float) -> str:
    when = "" if unit.exit_time is None else f" {duration(now - unit.exit_time)} ago"
    if unit.exit_status is None:
        return f" ({unit.result})" if unit.result != "success" else ""
    if unit.killed:
        return f"{when} (signal {unit.exit_status}, {unit.result})"
    why = _EXITS.get(unit.exit_status)
    reason = unit.result if unit.result not in ("exit-code", "success") else None
    words = filter(None, (f"exit status {unit.exit_status}", reason, why))
    return f"{when} ({', '.join(words)})"
