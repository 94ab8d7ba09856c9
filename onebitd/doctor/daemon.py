"""The running daemon: what its own status says is wrong."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any

from onebitd.doctor.finding import Finding, ok, skipped, warning
from onebitd.doctor.place import Place


def judge(status: Mapping[str, Any] | None, why_not: str, place: Place) -> list[Finding]:
    """Say what the daemon says.

    Args:
        status: `/v1/status`, None where no daemon has answered, and then `why_not` says why.
    """
    from onebitd.surfaces.cli_problems import find_problems

    if status is None:
        return [skipped("daemon", why_not)]
    problems = find_problems(status, dt.datetime.now(dt.UTC))
    if problems:
        look = f"onebitctl -i {place.instance} status"
        return [warning("daemon", problem, look) for problem in problems]
    detail = status.get("state_detail")
    text = f"{status.get('state', '?')}{f' ({detail})' if detail else ''}"
    text += f", pid {status.get('pid', '?')}, version {status.get('version', '?')}"
    return [ok("daemon", text)]
