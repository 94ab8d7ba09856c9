"""What is read of systemd's words, with a systemctl that says what the test wants."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from onebitd.adapters import systemd_tools, unit_states
from onebitd.adapters.unit_states import UnitState

SHOWN = """\
Id=onebitd@qwen.service
LoadState=loaded
ActiveState=failed
SubState=failed
UnitFileState=enabled
Result=exit-code
NRestarts=5
ExecMainCode=1
ExecMainStatus=4
ExecMainExitTimestamp=@1777630000

Id=onebitd@rests.service
LoadState=loaded
ActiveState=inactive
SubState=dead
UnitFileState=disabled
Result=success
NRestarts=0
ExecMainCode=0
ExecMainStatus=0
ExecMainExitTimestamp=

Id=onebitd@killed.service
LoadState=loaded
ActiveState=activating
SubState=auto-restart
UnitFileState=enabled-runtime
Result=oom-kill
NRestarts=1
ExecMainCode=2
ExecMainStatus=9
ExecMainExitTimestamp=@1777630001

Id=onebitd@gone.service
LoadState=not-found
ActiveState=inactive
"""
LISTED = [
    {"unit": "onebitd@killed.service", "active": "activating"},
    {"unit": "onebitd@qwen.service", "active": "failed"},
    {"unit": "onebitd@rests.service", "active": "inactive"},
    {"unit": "onebitd@rests.socket", "active": "active"},
    {"unit": "onebitd@gone.service", "active": "inactive"},
]
QWEN = UnitState(
    *("qwen", False, "failed", "failed", True, "exit-code", False, 4, 1777630000.0, False)
)
RESTS = UnitState("rests", listens=True)
KILLED = UnitState(
    *("killed", False, "activating", "auto-restart", True, "oom-kill", True, 9, 1777630001.0)
)


def systemctl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str, status: int = 0
) -> Path:
    """Put a systemctl in the path and systemd on the machine; return the log of its arguments."""
    log = tmp_path / "asked"
    program = tmp_path / "systemctl"
    program.write_text(
        f'#!/bin/sh\necho "$*" >> {log}\ncase "$*" in\n'
        f"*list-units*) printf %s {shlex.quote(listed)} ;;\n"
        f"*) printf %s {shlex.quote(SHOWN)} ;;\nesac\nexit {status}\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(systemd_tools, "is_booted", lambda: True)
    return log


def test_find_units_are_those_that_are_loaded_with_their_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One list and one show, whatever their number; a unit without a file is none."""
    log = systemctl(tmp_path, monkeypatch, json.dumps(LISTED))
    assert unit_states.find_units(of_user=False) == [QWEN, RESTS, KILLED]
    listing, showing = log.read_text().splitlines()
    assert listing.endswith("--all --output=json onebitd@*.service onebitd@*.socket")
    assert showing.endswith(
        "onebitd@gone.service onebitd@killed.service onebitd@qwen.service onebitd@rests.service"
    )
    (first, *_) = unit_states.find_units(of_user=True)
    assert first == QWEN._replace(of_user=True)
    assert log.read_text().splitlines()[-1].startswith("--user ")


@pytest.mark.parametrize(
    ("listed", "status"), [("", 0), ("[]", 0), ("no json", 0), ("{}", 0), ("[1]", 0), ("[]", 1)]
)
def test_find_units_where_systemctl_says_nothing_of_use_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str, status: int
) -> None:
    """An old one, or one that may not be asked."""
    systemctl(tmp_path, monkeypatch, listed, status)
    assert unit_states.find_units(of_user=False) == []


def test_find_units_without_systemd_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemctl may be installed in a container all the same."""
    log = systemctl(tmp_path, monkeypatch, json.dumps(LISTED))
    monkeypatch.setattr(systemd_tools, "is_booted", lambda: False)
    assert unit_states.find_units(of_user=False) == []
    assert not log.exists()


def test_find_units_systemctl_that_hangs_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A status is no hostage of a bus that does not answer."""
    systemctl(tmp_path, monkeypatch, "")
    (tmp_path / "systemctl").write_text("#!/bin/sh\nexec sleep 600\n")
    assert unit_states.find_units(of_user=False, timeout_s=0.1) == []


@pytest.mark.parametrize(
    ("unit", "missing", "asleep"),
    [
        (QWEN, True, False),
        (RESTS, False, True),
        (KILLED, True, False),
        (UnitState("a", enabled=True), True, False),
        (UnitState("a"), False, False),
        (UnitState("a", active="active", enabled=True, listens=True), False, False),
        (QWEN._replace(listens=True), True, True),
    ],
)
def test_unit_state_missing_should_run_and_asleep_can(
    unit: UnitState, missing: bool, asleep: bool
) -> None:
    """What was stopped on purpose and is not enabled is neither."""
    assert (unit.is_missing, unit.is_asleep) == (missing, asleep)
