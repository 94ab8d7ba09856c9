"""What systemd says of the unit of an instance: its state, its times, its drop-ins."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from onebitd.doctor.finding import Finding, failed, ok, warning
from onebitd.doctor.place import Place

PROPERTIES: Final = (
    "LoadState", "UnitFileState", "ActiveState", "SubState", "Result", "NRestarts",
    "ExecMainStatus", "MainPID", "NeedDaemonReload", "FragmentPath", "DropInPaths",
    "WatchdogUSec", "TimeoutStopUSec", "TimeoutStartUSec",
)  # fmt: skip
STOP_MARGIN_S: Final = 10.0
"""After the drain: HTTP, the decoder and the providers are ended, one after the other."""
_PARTS: Final = {
    "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0,
    "month": 2629800.0, "y": 31557600.0,
}  # fmt: skip
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(us|ms|min|month|s|h|d|w|y)")
_NULL: Final = "/dev/null"
_SYSTEMS: Final = ("/etc/", "/run/systemd/")
"""Where drop-ins are root's, those for users' own units too."""


def parse(shown: str) -> dict[str, str]:
    """Return what `systemctl show` prints."""
    lines = (line.partition("=") for line in shown.splitlines())
    return {key: value for key, equals, value in lines if equals}


def seconds(text: str) -> float | None:
    """Return a time span as systemctl shows it, None for one without an end.

    >>> seconds("1min 30s"), seconds("0"), seconds("infinity")
    (90.0, 0.0, None)
    """
    if text == "infinity":
        return None
    return sum((float(number) * _PARTS[unit] for number, unit in _PART.findall(text)), 0.0)


def judge(
    shown: Mapping[str, str],
    masked: Iterable[str],
    facts: Mapping[str, Any],
    place: Place,
) -> list[Finding]:
    """Say what is wrong with the unit.

    Args:
        shown: PROPERTIES.
        masked: drop-ins that are put out of action.
        facts: of the configuration: `drain_timeout_s`, `load_timeout_s`; may lack them.
    """
    found = [_state(shown, place)]
    if shown.get("NeedDaemonReload") == "yes":
        text = "its files have changed since systemd read them, and the service runs by the old"
        found.append(warning("service.reload", text, f"{place.systemctl} daemon-reload"))
    for path in masked:
        text = f"the drop-in {path} is masked: what a file of this name says does not apply"
        sudo = place.sudo if path.startswith(_SYSTEMS) else place.manager
        remove = f"{sudo}rm {shlex.quote(path)} && {place.systemctl} daemon-reload"
        found.append(warning("service.drop-in", text, remove))
    return found + _times(shown, facts, place)


def _state(shown: Mapping[str, str], place: Place) -> Finding:
    name, unit = "service", place.unit
    if shown.get("LoadState") == "masked" or "masked" in shown.get("UnitFileState", ""):
        return failed(
            name, f"{unit} is masked and cannot start", f"{place.systemctl} unmask {unit}"
        )
    if shown.get("LoadState") != "loaded":
        text = f"{unit} cannot be loaded ({shown.get('LoadState', 'unknown')})"
        return failed(name, text, f"{place.systemctl} status {unit}")
    journal = "journalctl --user" if place.scope == "user" else f"{place.sudo}journalctl"
    look = f"{journal} -u {unit} -n 50"
    state, restarts = shown.get("ActiveState", "unknown"), shown.get("NRestarts", "0")
    if state == "failed":
        why = f"{shown.get('Result', 'unknown')}, exit status {shown.get('ExecMainStatus', '?')}"
        return failed(name, f"{unit} has failed ({why})", look)
    if restarts not in ("0", ""):
        return warning(name, f"{unit} is {state}, and was restarted {restarts} times", look)
    if shown.get("UnitFileState") not in ("enabled", "enabled-runtime", "linked", "static"):
        text = f"{unit} is {state}, and is not started at boot"
        return warning(name, text, f"{place.systemctl} enable {unit}")
    return ok(name, f"{unit} is {state}, and is started at boot")


def _times(shown: Mapping[str, str], facts: Mapping[str, Any], place: Place) -> list[Finding]:
    found = []
    drain, load = facts.get("drain_timeout_s"), facts.get("load_timeout_s")
    stop = seconds(shown.get("TimeoutStopUSec", "infinity"))
    if isinstance(drain, int | float) and stop is not None and stop < drain + STOP_MARGIN_S:
        wanted = int(drain + 2 * STOP_MARGIN_S)
        text = f"TimeoutStopSec is {stop:g} s and http.drain_timeout_s {drain:g} s:"
        text += " a stop may cut replies off"
        fix = place.drop_in("stop-time", f"TimeoutStopSec={wanted}s")
        found.append(warning("service.stop", text, fix))
    start = seconds(shown.get("TimeoutStartUSec", "infinity"))
    if isinstance(load, int | float) and start is not None and start < load:
        text = f"TimeoutStartSec is {start:g} s and backend.load_timeout_s {load:g} s:"
        text += " a long load may be killed"
        fix = place.drop_in("start-time", f"TimeoutStartSec={int(load) + 60}s")
        found.append(warning("service.start", text, fix))
    if seconds(shown.get("WatchdogUSec", "0")) == 0.0:
        text = "no watchdog (WatchdogSec=): a daemon that hangs is not restarted"
        found.append(
            warning("service.watchdog", text, place.drop_in("watchdog", "WatchdogSec=30s"))
        )
    return found


def masked_drop_ins(place: Place, directories: Sequence[Path]) -> list[str]:
    """Return the drop-ins of the unit that are links to /dev/null, below the unit directories."""
    found = []
    for directory in directories:
        for unit in ("onebitd@.service", place.unit):
            for path in sorted((directory / f"{unit}.d").glob("*.conf")):
                try:
                    is_masked = os.path.realpath(path) == _NULL
                except OSError:
                    continue
                if is_masked:
                    found.append(str(path))
    return found


def directories(place: Place, environ: Mapping[str, str]) -> list[Path]:
    """Return where an administrator's drop-ins are."""
    if place.scope == "user":
        home = environ.get("XDG_CONFIG_HOME") or f"{environ.get('HOME', '')}/.config"
        return [Path(home) / "systemd/user", Path("/etc/systemd/user")]
    return [Path("/etc/systemd/system"), Path("/run/systemd/system")]
