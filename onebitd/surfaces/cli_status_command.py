"""`onebitctl status`: asks the daemon and its listener, prints the page, goes on with --watch.

What it needs for one instance is imported at once, the rest where it is asked for: a status must
feel instant.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from onebitd import __version__, client
from onebitd.adapters import listener_probe
from onebitd.client import ClientError, ControlClient, NoDaemon
from onebitd.core.errors import UsageError
from onebitd.surfaces import cli_problems, cli_status, cli_terminal
from onebitd.surfaces.cli_text import clean

if TYPE_CHECKING:
    from onebitd.adapters.unit_states import UnitState

WATCH_S: Final = 2.0
"""Between two pages of --watch."""
WATCH_LEAST_S: Final = 0.1
WATCH_MOST_S: Final = 86_400.0

EXIT_NOT_FINE: Final = 1
NOT_OURS: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What comes of a field that is not what it is here: another version may have made it so."""


class Look(NamedTuple):
    """One look at one instance or at all.

    Args:
        page: what people see, for so many columns, in colour or not.
        documents: what programs see.
        exit_status: of a command that looks once.
        error: where there was nobody to ask.
    """

    page: Callable[[int, bool], str]
    documents: Sequence[dict[str, Any]]
    exit_status: int
    error: ClientError | None = None


def register(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    where: argparse.ArgumentParser,
) -> None:
    """Add the command to a parser; `where` has the options that name a daemon."""
    summary = "the page to look at first: what is wrong, and all that is known"
    parser = commands.add_parser(
        "status",
        help=summary,
        description="Show what is wrong and what helps; then the state, what the last handoffs "
        "were worth, provider, decoder, lock and counters.",
        parents=[where],
        allow_abbrev=False,
    )
    parser.add_argument(
        "--all", action="store_true", help="every instance that runs or should, a few lines each"
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        metavar="SECONDS",
        type=_seconds,
        const=WATCH_S,
        help=f"again every SECONDS (default {WATCH_S:g}), until Ctrl-C",
    )
    parser.add_argument("--json", action="store_true", help="stable output for programs")
    parser.set_defaults(run=run_status)


def run_status(arguments: argparse.Namespace) -> int:
    """Print the page; 0 if the daemon is ready, its listener answers and nothing is wrong."""
    if arguments.all and (arguments.instance or arguments.socket):
        raise UsageError("--all is about every instance: leave out -i and --socket")
    if arguments.all:
        from onebitd.surfaces import cli_status_all

        look = cli_status_all.look
    else:
        look = _Watched(arguments).look
    if arguments.watch is not None:
        from onebitd.surfaces import cli_watch

        return cli_watch.run(look, arguments.watch, as_json=arguments.json)
    found = look()
    if found.error is not None:
        raise found.error
    if arguments.json:
        import json

        for document in found.documents:
            cli_terminal.write(json.dumps(document) + "\n")
    else:
        page = found.page(cli_terminal.size().columns, cli_terminal.has_colour())
        cli_terminal.write(page + "\n")
    return found.exit_status


def ask(socket: str, timeout_s: float = client.TIMEOUT_S) -> dict[str, Any]:
    """Return `/v1/status` with `probe`: what the public listener answers, null if there is none.

    Raises:
        ClientError: nobody answers on the socket.
    """
    asked = ControlClient(socket, timeout_s=timeout_s)
    status = asked.status()
    probe = _probe(status, timeout_s)
    if probe and probe["status"] == 503 and status.get("state") in cli_problems.SERVING:
        status = asked.status()  # it may have become another one between the two
    return {**status, "probe": probe}


def look_of(status: dict[str, Any], now: dt.datetime) -> Look:
    """Return the look at a daemon that has answered."""

    def page(columns: int, colour: bool) -> str:
        try:
            return cli_status.status_page(status, now, colour=colour, columns=columns)
        except NOT_OURS:
            return not_ours(status)

    return Look(page, [status], 0 if is_fine(status, now) else EXIT_NOT_FINE)


def is_fine(status: dict[str, Any], now: dt.datetime) -> bool:
    """Say whether nothing is wrong with a daemon, as far as what it says can be understood."""
    try:
        return cli_problems.is_fine(status, now)
    except NOT_OURS:
        return False


def not_ours(status: dict[str, Any]) -> str:
    """Return what is to be said of an answer that cannot be shown."""
    version = clean(str(status.get("version", "of no known version")))
    return (
        f"This onebitctl {__version__} does not understand what onebitd {version} says of itself:"
        " use the onebitctl of that version, or --json."
    )


class _Watched:
    """Looks at the one instance that the command line names, once or again and again."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._name: str | None = arguments.instance
        self._pid: int | None = None

    def look(self) -> Look:
        """Ask; who does not answer is a page, too."""
        now = dt.datetime.now(dt.UTC)
        try:
            try:
                status = ask(self._socket())
            except NoDaemon as error:
                raise self._explained(error, now) from None
        except ClientError as error:
            page = f"{error}"
            document = {"instance": self._name, "state": None, "error": page}
            return Look(lambda columns, colour: page, [document], error.exit_status, error)
        pid, name = status.get("pid"), status.get("instance")
        self._pid = pid if isinstance(pid, int) else None
        self._name = self._name or (name if isinstance(name, str) else None)
        return look_of(status, now)

    def _socket(self) -> str:
        if self._arguments.socket:
            return str(self._arguments.socket)
        if self._pid is not None and not _is_alive(self._pid):
            self._leave_asleep()
        return client.choose_socket(self._name, os.environ, os.geteuid())

    def _leave_asleep(self) -> None:
        """Raise NoDaemon when the service rests: watching it must not start it again."""
        if any(unit.is_asleep for unit in _units_of(self._name)):
            raise NoDaemon(f"no onebitd runs for the instance {self._name}")

    def _explained(self, error: NoDaemon, now: dt.datetime) -> NoDaemon:
        if self._arguments.socket:
            return error
        units = _units_of(self._name)
        if not units:
            return error
        from onebitd.surfaces import cli_units_words

        return NoDaemon(cli_units_words.why_nobody_runs(self._name, units, now.timestamp()))


def _units_of(name: str | None) -> list[UnitState]:
    """Return what systemd knows of the instance, or of all that should run."""
    from onebitd.adapters import systemd_tools

    if not systemd_tools.is_booted():
        return []
    from onebitd.adapters import unit_states

    scopes = [False] if os.geteuid() == 0 else [False, True]
    found = [unit for of_user in scopes for unit in unit_states.find_units(of_user=of_user)]
    if name is None:
        return [unit for unit in found if unit.is_missing or unit.is_asleep]
    return [unit for unit in found if unit.instance == name]


def _probe(status: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
    """Ask each address; return the first that does not answer well, else the first."""
    listen = status.get("listen")
    timeout_s = min(timeout_s, listener_probe.TIMEOUT_S)
    asked = [
        listener_probe.ask_health(address, timeout_s)
        for address in (listen if isinstance(listen, list) else ())
        if isinstance(address, str)
    ]
    for answer in asked:
        if answer.status != 200 and answer.tried:
            return answer._asdict()
    return asked[0]._asdict() if asked else None


def _is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not WATCH_LEAST_S <= seconds <= WATCH_MOST_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of seconds from {WATCH_LEAST_S:g} to {WATCH_MOST_S:g}"
        )
    return seconds
