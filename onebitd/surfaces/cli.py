"""`onebitctl`: asks a daemon over its control socket and prints the answer.

Imports the standard library, core, the client and the lock's probe, and nothing of the daemon; what
one command needs is imported for that one: `status` must feel instant. Data goes to stdout,
messages to stderr. Exit status: see `onebitctl(1)`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from onebitd import __version__
from onebitd.client import ClientError, ControlClient, Refused, choose_socket
from onebitd.core import paths
from onebitd.core.errors import OnebitError
from onebitd.surfaces import cli_text

MAX_RECORDS: Final = 1000
LISTED_RECORDS: Final = 20
FOLLOWED_RECORDS: Final = 10
"""Records of the past that `handoffs --follow` starts with."""

EXIT_NOT_FINE: Final = 1
EXIT_USAGE: Final = 2
EXIT_NO_DAEMON: Final = 3
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]
    _Register = Callable[[_Commands, argparse.ArgumentParser], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `onebitctl` and return its exit status."""
    _open_missing_streams()
    try:
        try:
            words = sys.argv[1:] if argv is None else argv
            arguments = build_parser(_command_of(words)).parse_args(words)
            status: int = arguments.run(arguments)
        finally:
            sys.stdout.flush()
    except OnebitError as exc:
        _tell(str(exc))
        return exc.exit_status
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return EXIT_BROKEN_PIPE
    except ModuleNotFoundError as exc:
        if exc.name != "numpy":
            raise
        _tell("this command needs numpy, which is not installed: pip install numpy")
        return EXIT_USAGE
    except OSError as exc:
        _drop_stdout()
        _tell(f"cannot write the answer: {exc}")
        return EXIT_NOT_FINE
    return status


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line; the man page is held against it.

    Args:
        command: leave out what only the others need; None or an unknown one: all of them.
    """
    where = _where_parser(argparse.SUPPRESS)
    parser = argparse.ArgumentParser(
        prog="onebitctl",
        description="Show what onebitd is doing, and install and stop its services.",
        epilog="Exit status: 0 fine; 1 it answered, and is not ready or something is wrong;"
        " 2 usage; 3 no daemon there; 4 permission denied.",
        allow_abbrev=False,
        parents=[_where_parser(None)],
    )
    parser.add_argument("--version", action="version", version=f"onebitctl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    known = any(command in names for names, _ in _REGISTRARS)
    for names, register in _REGISTRARS:
        if not known or command in names:
            register(commands, where)
    return parser


def _command_of(words: Sequence[str]) -> str | None:
    """Return the command of a command line, or None where only a parser can tell."""
    rest = iter(words)
    for word in rest:
        if word in ("-i", "--instance", "--socket"):
            next(rest, None)
        elif not word.startswith("-"):
            return word
        elif word == "--":
            break
    return None


def _register_status(commands: _Commands, where: argparse.ArgumentParser) -> None:
    status = _command(commands, "status", "state, decoder, provider, lock and counters", where)
    status.set_defaults(run=run_status)


def _register_handoffs(commands: _Commands, where: argparse.ArgumentParser) -> None:
    from onebitd.core.handoff import Outcome

    handoffs = _command(commands, "handoffs", "the last handoffs, and those to come", where)
    handoffs.add_argument(
        "-n",
        dest="number",
        metavar="N",
        type=_number,
        help=f"show the last N (0 to {MAX_RECORDS}; default {LISTED_RECORDS},"
        f" with -f {FOLLOWED_RECORDS})",
    )
    handoffs.add_argument(
        "-f", "--follow", action="store_true", help="go on with each new one, until Ctrl-C"
    )
    handoffs.add_argument(
        "--outcome",
        metavar="OUTCOME",
        choices=[outcome.value for outcome in Outcome],
        help=f"only those that ended so: {', '.join(Outcome)}",
    )
    handoffs.set_defaults(run=run_handoffs)


def _register_requests(commands: _Commands, where: argparse.ArgumentParser) -> None:
    from onebitd.surfaces import cli_requests

    cli_requests.register(commands, where)


def _register_config(commands: _Commands, where: argparse.ArgumentParser) -> None:
    config = _command(commands, "config", "the effective settings and their sources", where)
    config.set_defaults(run=run_config)


def _register_reload(commands: _Commands, where: argparse.ArgumentParser) -> None:
    summary = "have the daemon read its configuration again"
    reload = _command(commands, "reload", summary, where, description=f"{summary.capitalize()}.")
    reload.set_defaults(run=run_reload)


def _register_lock(commands: _Commands, where: argparse.ArgumentParser) -> None:
    lock = _command(commands, "lock", "who holds the NPU device lock; needs no daemon", where)
    lock.add_argument(
        "--path",
        help=f"lock file (default: the daemon's, or {paths.DEVICE_LOCK} when none answers)",
    )
    lock.set_defaults(run=run_lock)


def _register_advise(commands: _Commands, where: argparse.ArgumentParser) -> None:
    from onebitd.surfaces import cli_advise

    cli_advise.register(commands, where)


def _register_provider(commands: _Commands, where: argparse.ArgumentParser) -> None:
    from onebitd.surfaces import cli_provider

    cli_provider.register(commands, where)


def _register_state(commands: _Commands, _where: argparse.ArgumentParser) -> None:
    from onebitd.surfaces import cli_state

    cli_state.register(commands)


def _register_units(commands: _Commands, _where: argparse.ArgumentParser) -> None:
    from onebitd.surfaces import cli_units

    cli_units.register(commands, _instance_parser(argparse.SUPPRESS))


_REGISTRARS: Final[Sequence[tuple[Sequence[str], _Register]]] = (
    (("status",), _register_status),
    (("handoffs",), _register_handoffs),
    (("requests", "cancel"), _register_requests),
    (("config",), _register_config),
    (("reload",), _register_reload),
    (("lock",), _register_lock),
    (("advise",), _register_advise),
    (("provider",), _register_provider),
    (("state",), _register_state),
    (("stop", "disable", "install-units", "uninstall-units"), _register_units),
)
"""The commands that each function adds, in the order of the help page."""


def run_status(arguments: argparse.Namespace) -> int:
    """Print the status page; 0 if the daemon is ready and nothing is wrong."""
    import datetime as dt

    from onebitd.surfaces import cli_status

    status = _client(arguments).status()
    now = dt.datetime.now(dt.UTC)
    if arguments.json:
        _print_json(status)
    else:
        _print(cli_status.status_page(status, now, colour=_has_colour()))
    return 0 if cli_status.is_fine(status, now) else EXIT_NOT_FINE


def run_handoffs(arguments: argparse.Namespace) -> int:
    """Print the last handoffs, and with --follow each new one until the daemon ends."""
    client = _client(arguments)
    printer = _HandoffPrinter(as_json=arguments.json)
    if not arguments.follow:
        number = LISTED_RECORDS if arguments.number is None else arguments.number
        for record in client.handoffs(number, outcome=arguments.outcome):
            printer.print(record)
        return 0
    number = FOLLOWED_RECORDS if arguments.number is None else arguments.number
    try:
        for record in client.follow(number, outcome=arguments.outcome):
            printer.print(record)
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 0  # the way to end it
    _tell("onebitd has ended the connection")
    return EXIT_NO_DAEMON


def run_config(arguments: argparse.Namespace) -> int:
    """Print the effective settings."""
    from onebitd.surfaces import cli_pages as pages

    config = _client(arguments).config()
    if arguments.json:
        _print_json(config)
    else:
        _print(pages.config_page(config))
    return 0


def run_reload(arguments: argparse.Namespace) -> int:
    """Have the daemon read its configuration again; 1 if that is bad, and nothing has changed."""
    from onebitd.surfaces import cli_pages as pages

    try:
        answer = _client(arguments).reload()
    except Refused as refused:
        for problem in refused.problems:
            _tell(problem)
        _tell("the configuration was not reloaded, nothing has changed")
        return EXIT_NOT_FINE
    if arguments.json:
        _print_json(answer)
        return 0
    _print(pages.reload_line(answer))
    for line in pages.reload_remarks(answer):
        _tell(line)
    return 0


def run_lock(arguments: argparse.Namespace) -> int:
    """Print who holds the device lock; 1 if something is wrong with its file."""
    import dataclasses

    from onebitd.adapters import lock_probe
    from onebitd.surfaces import cli_pages as pages

    lock = dataclasses.asdict(lock_probe.probe(arguments.path or _lock_path(arguments)))
    if arguments.json:
        _print_json(lock)
    else:
        _print(pages.lock_page(lock))
    return EXIT_NOT_FINE if lock["problem"] else 0


class _HandoffPrinter:
    """Prints records as lines of a table under one heading, or as JSON."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._width = _columns()
        self._colour = _has_colour()
        self._headed = False

    def print(self, record: dict[str, Any]) -> None:
        """Print one record, or that records were lost."""
        from onebitd.surfaces import cli_pages as pages

        if self._as_json:
            _print_json(record)
            return
        if "lost" in record:
            _tell(
                f"{record['lost']} handoffs are missing here: they came faster than they were read"
            )
            return
        if not self._headed:
            _print(cli_text.paint(pages.handoffs_header(self._width), "bold", self._colour))
            self._headed = True
        _print(pages.handoff_row(record, self._width, colour=self._colour))


def _where_parser(default: str | None) -> argparse.ArgumentParser:
    """Return the options that stand before or after the command, which must not undo each other."""
    parser = _instance_parser(default)
    parser.add_argument(
        "--socket", metavar="PATH", default=default, help="control socket, instead of a search"
    )
    return parser


def _instance_parser(default: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(
        "-i", "--instance", default=default, help="name of the instance (default: the only one)"
    )
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    where: argparse.ArgumentParser,
    description: str = "",
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=description or f"Show {summary}.",
        parents=[where],
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="stable output for programs")
    return parser


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) <= MAX_RECORDS):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to {MAX_RECORDS}")
    return int(text)


def _client(arguments: argparse.Namespace) -> ControlClient:
    path = arguments.socket or choose_socket(arguments.instance, os.environ, os.geteuid())
    return ControlClient(path)


def _lock_path(arguments: argparse.Namespace) -> str:
    """Return the daemon's lock file, or the default when there is no daemon to ask."""
    try:
        return str(_client(arguments).status()["lock"]["path"])
    except (OnebitError, KeyError, TypeError) as exc:
        if arguments.instance or arguments.socket or not isinstance(exc, ClientError):
            _tell(f"{exc}; this is the default lock file")
        return paths.DEVICE_LOCK


def _columns() -> int | None:
    """Return the terminal's width, or $COLUMNS where the output goes elsewhere, or None."""
    if sys.stdout.isatty():
        try:
            return os.get_terminal_size(sys.stdout.fileno()).columns or cli_text.PAGE_COLUMNS
        except OSError:
            return cli_text.PAGE_COLUMNS
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else None


def _has_colour() -> bool:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain


def _print(text: str) -> None:
    encoding = sys.stdout.encoding or "ascii"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding) + "\n")


def _print_json(value: dict[str, Any]) -> None:
    _print(json.dumps(value))


def _tell(message: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"onebitctl: {cli_text.clean(message)}\n")


def _open_missing_streams() -> None:
    """Give what a shell closed (`>&-`) somewhere to go; Python has None for it."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - to the end


def _drop_stdout() -> None:
    """Keep the interpreter from writing what is left to a stdout that takes nothing."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


if __name__ == "__main__":
    sys.exit(main())
