"""The running daemon: what its own status says is wrong."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Mapping
from typing import Any

from onebitd.client import AccessDenied, ClientError, ControlClient, NoDaemon, choose_socket
from onebitd.core import paths
from onebitd.core.errors import OnebitError, UsageError
from onebitd.doctor.finding import Finding, failed, ok, skipped, warning
from onebitd.doctor.place import Place


def ask(
    instance: str, environ: Mapping[str, str], socket: str | None
) -> tuple[dict[str, Any] | None, OnebitError | None]:
    """Return the daemon's status, or why there is none.

    Args:
        socket: its control socket; None: where this user's own would be, or else wherever one of
            this name runs, the system's service too.
    """
    runtime = paths.runtime_dir(instance, environ, os.geteuid())
    try:
        return ControlClient(socket or f"{runtime}/{paths.CONTROL_SOCKET}").status(), None
    except (ClientError, UsageError) as error:
        if socket is not None or not isinstance(error, NoDaemon):
            return None, error
    try:
        found = choose_socket(instance, environ, os.geteuid())
        return ControlClient(found).status(), None
    except (ClientError, UsageError) as error:
        return None, error


def judge(
    status: Mapping[str, Any] | None, why_not: OnebitError | None, place: Place
) -> list[Finding]:
    """Say what the daemon says.

    Args:
        status: `/v1/status`, None where no daemon has answered, and then `why_not` says why; None
            where none was asked.
    """
    from onebitd.surfaces.cli_problems import find_problems

    if status is None:
        if why_not is None or isinstance(why_not, NoDaemon):
            return [skipped("daemon", "it does not run")]
        if isinstance(why_not, AccessDenied | UsageError):
            return [skipped("daemon", str(why_not))]
        return [failed("daemon", str(why_not), place.restart)]
    problems = find_problems(status, dt.datetime.now(dt.UTC))
    if problems:
        look = f"onebitctl -i {place.instance} status"
        return [warning("daemon", problem, look) for problem in problems]
    detail = status.get("state_detail")
    text = f"{status.get('state', '?')}{f' ({detail})' if detail else ''}"
    text += f", pid {status.get('pid', '?')}, version {status.get('version', '?')}"
    return [ok("daemon", text)]
