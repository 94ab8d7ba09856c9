"""`onebitctl doctor`: what keeps an instance from working. See `onebitctl(1)`.

What the checks need is imported when they run: the other commands start without it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib

from onebitd.core.errors import UsageError


def register(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    where: argparse.ArgumentParser,
) -> None:
    """Add the command to a parser; `where` has the option that names an instance."""
    doctor = commands.add_parser(
        "doctor",
        help="find out what keeps an instance from working, and how to put it right",
        description="Check everything that an instance needs, from inside its service where there"
        " is one and one may: with its user, its limits and its sandbox. It says what is wrong, and"
        " the commands that put it right.",
        epilog="Exit status: 0 nothing has failed; 1 something has; 2 usage; 4 permission denied.",
        parents=[where],
        allow_abbrev=False,
    )
    add = doctor.add_argument
    add("--config", metavar="FILE", help="check this configuration, instead of the instance's")
    add("--here", action="store_true", help="check as this user, not as the service")
    add("--quick", action="store_true", help="load no model, and run no provider")
    add("--json", action="store_true", help="stable output for programs")
    doctor.set_defaults(run=run_doctor)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Run the checks and print the report; 1 if something has failed."""
    if arguments.socket:
        raise UsageError("doctor: a service is named by its instance: use -i, not --socket")
    config = None if arguments.config is None else _absolute(arguments.config)
    if config is not None and not os.path.isfile(config):
        raise UsageError(f"--config {arguments.config}: no such file")
    instance = _instance(arguments.instance, config)

    from onebitd.doctor import command

    return command.run(
        command.Options(
            instance=instance,
            config=config,
            here=arguments.here,
            quick=arguments.quick,
            json=arguments.json,
        )
    )


def _absolute(file: str) -> str:
    try:
        return os.path.abspath(file)
    except OSError as error:  # this directory has been removed
        raise UsageError(f"--config {file}: {error.strerror}: {os.curdir}") from None


def _instance(name: str | None, config: str | None) -> str:
    """Return the instance that was named, the only configured one, or the only one that runs."""
    from onebitd.surfaces.cli_service import checked_instance

    if name is not None:
        return checked_instance(name)
    if config is not None:
        return checked_instance(pathlib.PurePath(config).stem)
    names = _configured()
    if len(names) == 1:
        return checked_instance(names[0])
    from onebitd.client import NoDaemon, choose_socket

    try:
        socket = choose_socket(None, os.environ, os.geteuid())
    except NoDaemon:
        listed = f": {', '.join(names)}" if names else ", or a file with --config"
        raise UsageError(f"no instance runs: name one with -i{listed}") from None
    return pathlib.PurePath(socket).parent.name


def _configured() -> list[str]:
    """Return the names of the instances that have a configuration file."""
    home = os.environ.get("XDG_CONFIG_HOME") or f"{os.environ.get('HOME', '')}/.config"
    found: dict[str, None] = {}
    for directory in (f"{home}/onebitd", "/etc/onebitd"):
        with contextlib.suppress(OSError):
            names = sorted(os.listdir(directory))
            found |= dict.fromkeys(name[:-5] for name in names if name.endswith(".toml"))
    return list(found)
