"""`onebitctl stop` and `disable`: the service of an instance together with its sockets.

Stopping the service alone leaves sockets that start it again with the next connection.
"""

from __future__ import annotations

import argparse
import os
from pathlib import PurePosixPath
from typing import Final, Literal

from onebitd.core.errors import OnebitError, UsageError
from onebitd.surfaces import cli_terminal, cli_text

EXIT_FAILED: Final = 1
EXIT_DENIED: Final = 4
"""Also what systemctl ends with when the user may not do it."""

_AT_REST: Final = ("inactive", "failed")


def register(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    where: argparse.ArgumentParser,
) -> None:
    """Add the commands to a parser; `where` has the option that names an instance."""
    stop = commands.add_parser(
        "stop",
        help="stop the service of an instance and its sockets",
        description="Stop the service of an instance and its sockets, with systemctl.",
        parents=[where],
        allow_abbrev=False,
    )
    stop.set_defaults(run=run_stop)
    disable = commands.add_parser(
        "disable",
        help="stop them, and no longer start them at boot",
        description="Stop the service of an instance and its sockets, and no longer start them at"
        " boot, with systemctl.",
        parents=[where],
        allow_abbrev=False,
    )
    disable.set_defaults(run=run_disable)


def run_stop(arguments: argparse.Namespace) -> int:
    """Stop service and sockets; what systemctl says goes to stderr."""
    return _change(arguments, "stop")


def run_disable(arguments: argparse.Namespace) -> int:
    """Stop and disable service and sockets; what systemctl says goes to stderr."""
    return _change(arguments, "disable")


def _change(arguments: argparse.Namespace, verb: Literal["stop", "disable"]) -> int:
    from onebitd.adapters import systemd_tools
    from onebitd.core import unit_layout

    instance = _instance(arguments, verb)
    if not systemd_tools.is_booted():
        raise OnebitError(
            "no systemd runs this machine: end a daemon that was started by hand with Ctrl-C or"
            " kill"
        )
    units = unit_layout.unit_names(instance)
    scope: list[str] = []
    if os.geteuid() != 0 and _runs_for_user(units[0]):
        scope, units = ["--user"], units[:1]
    active = [unit for unit in units if _state(scope, unit)["ActiveState"] not in _AT_REST]
    now = ["--now"] if verb == "disable" else []
    done = systemd_tools.run("systemctl", *scope, "--quiet", verb, *now, *units)
    if done.stderr.strip():
        tell(done.stderr.strip())
    if done.status != 0:
        return EXIT_DENIED if done.status == EXIT_DENIED else EXIT_FAILED
    stopped = f"stopped {' '.join(active)}" if active else f"{units[0]} did not run"
    say(stopped + ("; it is started at boot no more" if verb == "disable" else ""))
    return 0


def _instance(arguments: argparse.Namespace, verb: str) -> str:
    """Return the instance that was named, or the only one that runs."""
    from onebitd.client import choose_socket

    if arguments.socket:
        raise UsageError(f"{verb}: a service is named by its instance: use -i, not --socket")
    if arguments.instance is not None:
        return checked_instance(arguments.instance)
    return PurePosixPath(choose_socket(None, os.environ, os.geteuid())).parent.name


def _runs_for_user(unit: str) -> bool:
    """Tell whether the user's own service manager runs a unit, or starts it at login."""
    state = _state(["--user"], unit)
    return state["ActiveState"] not in _AT_REST or state["UnitFileState"] == "enabled"


def _state(scope: list[str], unit: str) -> dict[str, str]:
    """Return what systemctl knows of a unit; of one that it cannot be asked for, that it rests."""
    from onebitd.adapters import systemd_tools

    done = systemd_tools.run(
        "systemctl", *scope, "show", "--property=ActiveState,UnitFileState", unit
    )
    lines = (line.partition("=") for line in done.stdout.splitlines())
    found = {key: value for key, equals, value in lines if equals}
    return {"ActiveState": "inactive", "UnitFileState": "", **found}


def checked_instance(name: str) -> str:
    """Return the name of an instance.

    Raises:
        UsageError: it is none.
    """
    from onebitd.core.config import INSTANCE_NAME

    if not INSTANCE_NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be an instance: letters, digits, and _ . - after the first"
        )
    return name


def say(text: str) -> None:
    """Print one line of what was done."""
    cli_terminal.write(f"{cli_text.clean(text)}\n")


def tell(text: str) -> None:
    """Print a message, each line of it, to stderr."""
    for line in text.splitlines():
        cli_terminal.tell(line)
