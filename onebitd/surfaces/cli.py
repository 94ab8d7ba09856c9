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
from typing import TYPE_CHECKING, Any, Final, NoReturn

from onebitd import __version__
from onebitd.client import ClientError, ControlClient, Refused, choose_socket
from onebitd.core import paths
from onebitd.core.errors import OnebitError
from onebitd.surfaces import cli_terminal

EXIT_NOT_FINE: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]
    _Register = Callable[[_Commands, argparse.ArgumentParser], None]


class _HelpFormatter(argparse.HelpFormatter):
    """Breaks lines at blanks only: a path that was cut at a hyphen cannot be copied."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        import textwrap

        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _Parser(argparse.ArgumentParser):
    """A parser that does not import shutil: a tenth of a status, only to know the width of help."""

    def _get_formatter(self) -> argparse.HelpFormatter:
        return _HelpFormatter(self.prog, width=cli_terminal.size().columns - 2)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        lines = cli_terminal.fitting(f"{self.prog}: error: {message}")
        self.exit(EXIT_USAGE, "\n".join(lines) + "\n")


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
        from onebitd.core.python_packages import install_hint

        hint = install_hint("numpy", "apt install python3-numpy")
        _tell(f"this command needs numpy, which is not installed: {hint}")
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
    parser: argparse.ArgumentParser = _Parser(
        prog="onebitctl",
        description="Show what onebitd is doing, and install and stop its services.",
        epilog="`onebitctl COMMAND --help` has the options of a command, onebitctl(1) examples,"
        " onebitd(8) the outcomes and reasons. Exit status: 0 fine; 1 it answered, and is not ready"
        " or something is wrong; 2 usage; 3 no daemon there; 4 permission denied.",
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
    from onebitd.surfaces import cli_status_command

    cli_status_command.register(commands, where)


def _register_handoffs(commands: _Commands, where: argparse.ArgumentParser) -> None:
    from onebitd.surfaces import cli_handoffs

    cli_handoffs.register(commands, where)


def _register_requests(commands: _Commands, where: argparse.ArgumentParser) -> None:
    from onebitd.surfaces import cli_requests

    cli_requests.register(commands, where)


def _register_config(commands: _Commands, where: argparse.ArgumentParser) -> None:
    config = _command(commands, "config", "the effective settings and their sources", where)
    config.set_defaults(run=run_config)


def _register_reload(commands: _Commands, where: argparse.ArgumentParser) -> None:
    summary = "have the daemon read its configuration again"
    description = f"{summary.capitalize()}, and show what has changed; running replies go on."
    reload = _command(commands, "reload", summary, where, description=description)
    reload.set_defaults(run=run_reload)


def _register_lock(commands: _Commands, where: argparse.ArgumentParser) -> None:
    lock = _command(commands, "lock", "who holds the NPU device lock; needs no daemon", where)
    lock.add_argument(
        "--path",
        metavar="PATH",
        help=f"lock file (default: the daemon's, or {paths.DEVICE_LOCK} when none answers)",
    )
    lock.set_defaults(run=run_lock)


def _register_advise(commands: _Commands, where: argparse.ArgumentParser) -> None:
    from onebitd.surfaces import cli_advise

    cli_advise.register(commands, where)


def _register_bench(commands: _Commands, where: argparse.ArgumentParser) -> None:
    from onebitd.surfaces import cli_bench

    cli_bench.register(commands, where)


def _register_try(commands: _Commands, where: argparse.ArgumentParser) -> None:
    from onebitd.surfaces import cli_try

    cli_try.register(commands, where)


def _register_provider(commands: _Commands, where: argparse.ArgumentParser) -> None:
    from onebitd.surfaces import cli_provider

    cli_provider.register(commands, where)


def _register_state(commands: _Commands, _where: argparse.ArgumentParser) -> None:
    from onebitd.surfaces import cli_state

    cli_state.register(commands)


def _register_doctor(commands: _Commands, _where: argparse.ArgumentParser) -> None:
    from onebitd.surfaces import cli_doctor

    cli_doctor.register(commands, _instance_parser(argparse.SUPPRESS))


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
    (("bench",), _register_bench),
    (("try",), _register_try),
    (("doctor",), _register_doctor),
    (("provider",), _register_provider),
    (("state",), _register_state),
    (("stop", "disable", "install-units", "uninstall-units"), _register_units),
)
"""The commands that each function adds, in the order of the help page."""


def run_config(arguments: argparse.Namespace) -> int:
    """Print the effective settings."""
    from onebitd.surfaces import cli_pages as pages

    config = _client(arguments).config()
    if arguments.json:
        _print_json(config)
    else:
        columns = cli_terminal.size().columns if sys.stdout.isatty() else None
        _print(pages.config_page(config, columns))
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
        for line in pages.lock_page(lock).split("\n"):
            _print("\n".join(cli_terminal.fitting(line, sys.stdout)))
    return EXIT_NOT_FINE if lock["problem"] else 0


def _where_parser(default: str | None) -> argparse.ArgumentParser:
    """Return the options that stand before or after the command, which must not undo each other."""
    parser = _instance_parser(default)
    parser.add_argument(
        "--socket", metavar="PATH", default=default, help="control socket, instead of a search"
    )
    return parser


def _instance_parser(default: str | None) -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False)
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


def _print(text: str) -> None:
    cli_terminal.write(text + "\n")


def _print_json(value: dict[str, Any]) -> None:
    _print(json.dumps(value))


def _tell(message: str) -> None:
    cli_terminal.tell(message)


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
