"""`onebitctl handoffs`: the last handoffs and those to come, or what they have in common.

From the daemon, or from its history file while it does not run. What it looks like is in
`cli_handoff_table` and `cli_handoff_summary`.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from onebitd.core.errors import UsageError
from onebitd.core.handoff_filter import MAX_LIMIT, WORDS, HandoffFilter
from onebitd.surfaces import cli_terminal

if TYPE_CHECKING:
    from onebitd.client import ControlClient, NoDaemon
    from onebitd.surfaces.cli_handoff_table import Layout

LISTED_RECORDS: Final = 20
FOLLOWED_RECORDS: Final = 10
"""Records of the past that `--follow` starts with."""

EXIT_NO_DAEMON: Final = 3


def register(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    where: argparse.ArgumentParser,
) -> None:
    """Add the command to a parser; `where` has the options that name a daemon."""
    summary = "the last handoffs, and those to come"
    parser = commands.add_parser(
        "handoffs",
        help=summary,
        description=f"Show {summary}; from the history file while no daemon runs.",
        parents=[where],
        allow_abbrev=False,
    )
    parser.add_argument(
        "-n",
        dest="number",
        metavar="N",
        type=_number,
        help=f"show the last N (0 to {MAX_LIMIT}; default {LISTED_RECORDS},"
        f" with -f {FOLLOWED_RECORDS}, with --since or --summary all)",
    )
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on with each new one, until Ctrl-C"
    )
    for name, words in WORDS.items():
        how = {"outcome": "that ended so", "reason": "with this reason", "route": "by this route"}
        listed = "one of onebitd(8)" if name == "reason" else ", ".join(words)
        parser.add_argument(
            f"--{name}",
            metavar=name.upper(),
            choices=tuple(map(str, words)),
            help=f"only those {how[name]}: {listed}",
        )
    parser.add_argument(
        "--since",
        metavar="WHEN",
        type=_since,
        help="only those from then on: 2h, yesterday, 14:30, 2026-01-31, ...",
    )
    parser.add_argument(
        "--summary", action="store_true", help="counts, and p50 and p95 of each part, instead"
    )
    stable = parser.add_mutually_exclusive_group()
    stable.add_argument("--json", action="store_true", help="stable output for programs")
    stable.add_argument("--csv", action="store_true", help="every field, for spreadsheets")
    parser.set_defaults(run=run_handoffs)


def run_handoffs(arguments: argparse.Namespace) -> int:
    """Print what is wanted; 3 when the daemon that is followed ends.

    Raises:
        OnebitError: there is nothing to ask or to read.
    """
    if arguments.summary and (arguments.follow or arguments.csv):
        what = "followed" if arguments.follow else "written as CSV"
        raise UsageError(f"a summary cannot be {what}: leave out --summary or the other")
    wanted = HandoffFilter(
        limit=_limit(arguments),
        outcome=arguments.outcome,
        reason=arguments.reason,
        route=arguments.route,
        since=arguments.since,
    )
    if arguments.summary:
        _print_summary(_summary(arguments, wanted), as_json=arguments.json)
        return 0
    if arguments.follow:
        return _follow(arguments, wanted)
    records = _recent(arguments, wanted)
    _print_records(records, arguments)
    if not records and not arguments.json and not arguments.csv:
        _say("no handoffs" if wanted == HandoffFilter(limit=wanted.limit) else "no such handoffs")
    return 0


def _limit(arguments: argparse.Namespace) -> int | None:
    """Return how many records are wanted; None for a summary of all."""
    if arguments.number is not None:
        return int(arguments.number)
    if arguments.summary:
        return None
    if arguments.since is not None:
        return MAX_LIMIT
    return FOLLOWED_RECORDS if arguments.follow else LISTED_RECORDS


def _recent(arguments: argparse.Namespace, wanted: HandoffFilter) -> list[dict[str, Any]]:
    from onebitd.client import NoDaemon

    try:
        return _client(arguments).handoffs(wanted)
    except NoDaemon as no_daemon:
        return _read_file(arguments, wanted, no_daemon)


def _summary(arguments: argparse.Namespace, wanted: HandoffFilter) -> dict[str, Any]:
    """Return the daemon's summary; of a number of records or of a file it is made here."""
    from onebitd.client import NoDaemon
    from onebitd.core.handoff_summary import summarise

    if wanted.limit is not None:
        return summarise(_recent(arguments, wanted))
    try:
        return _client(arguments).summary(wanted)
    except NoDaemon as no_daemon:
        return summarise(_read_file(arguments, wanted, no_daemon))


def _read_file(
    arguments: argparse.Namespace, wanted: HandoffFilter, no_daemon: NoDaemon
) -> list[dict[str, Any]]:
    """Return records of the file that the daemon has left, and say where they come from."""
    if arguments.socket is not None:
        raise no_daemon  # whose history that would be is not known
    from onebitd.adapters.history_store import read_records
    from onebitd.surfaces.cli_history_file import choose_history

    path = choose_history(arguments.instance, os.environ, os.geteuid(), no_daemon)
    records = read_records(path, wanted)
    _tell(f"{no_daemon}; this is from its history file, {path}")
    return records


def _follow(arguments: argparse.Namespace, wanted: HandoffFilter) -> int:
    try:
        _print_records(_client(arguments).follow(wanted), arguments)
    except KeyboardInterrupt:
        return 0  # the way to end it
    _tell("onebitd has ended the connection")
    return EXIT_NO_DAEMON


def _print_summary(summary: Mapping[str, Any], *, as_json: bool) -> None:
    from onebitd.surfaces.cli_handoff_summary import summary_page

    if as_json:
        _say(json.dumps(summary))
        return
    for line in summary_page(summary, _width(), colour=cli_terminal.has_colour()):
        _say(line)


def _print_records(records: Iterable[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Print records as they come; each is seen at once."""
    if arguments.json:
        for record in records:
            _say(json.dumps(record))
            if arguments.follow:
                sys.stdout.flush()
        return
    if arguments.csv:
        from onebitd.surfaces.cli_handoff_csv import csv_lines

        lines = csv_lines(_told(records))
    else:
        from onebitd.surfaces.cli_handoff_table import table

        today = dt.datetime.now().astimezone().date()
        at_first = _layout()  # while none is waited for, nobody changes it
        layout = _layout if arguments.follow else lambda: at_first
        lines = ("\n".join(some) + "\n" for some in table(_told(records), layout, today))
    for text in lines:
        cli_terminal.write(text)
        if arguments.follow:
            sys.stdout.flush()


def _told(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the records, and tell of those that were lost."""
    for record in records:
        if "lost" in record:
            _tell(
                f"{record['lost']} handoffs are missing here: they came faster than they were read"
            )
        else:
            yield record


def _layout() -> Layout:
    from onebitd.surfaces.cli_handoff_table import Layout

    try:
        "▏█…".encode(sys.stdout.encoding or "ascii")
        blocks = True
    except UnicodeEncodeError:
        blocks = False
    return Layout(_width(), colour=cli_terminal.has_colour(), blocks=blocks)


def _width() -> int | None:
    """Return the terminal's width, or $COLUMNS where the output goes elsewhere, or None."""
    if not sys.stdout.isatty() and not os.environ.get("COLUMNS"):
        return None
    return cli_terminal.size().columns


def _client(arguments: argparse.Namespace) -> ControlClient:
    from onebitd.client import ControlClient, choose_socket

    path = arguments.socket or choose_socket(arguments.instance, os.environ, os.geteuid())
    return ControlClient(path)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) <= MAX_LIMIT):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to {MAX_LIMIT}")
    return int(text)


def _since(text: str) -> dt.datetime:
    from onebitd.core.when import parse_when

    now = dt.datetime.now(dt.UTC)
    try:
        moment = parse_when(text, now)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None
    if moment > now:
        raise argparse.ArgumentTypeError(f"{text!r} is still to come")
    return moment


def _say(text: str) -> None:
    cli_terminal.write(f"{text}\n")


def _tell(message: str) -> None:
    cli_terminal.tell(message)
