"""`onebitctl requests` and `cancel`: what a daemon is serving, and ending one of it."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from onebitd.surfaces.cli_service import say
from onebitd.surfaces.cli_text import clean, cut, duration

if TYPE_CHECKING:
    from onebitd.client import ControlClient

_COLUMNS: Final = (8, 11, 6, 6, 20)
_HEADINGS: Final = ("PHASE", "AGE", "PROMPT", "REPLY", "PATH")
_NUMBERS: Final = ("AGE", "PROMPT", "REPLY")
NOTHING: Final = "nothing is in flight"


def register(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    where: argparse.ArgumentParser,
) -> None:
    """Add the commands to a parser; `where` has the options that name a daemon."""
    summary = "the requests that are being served"
    requests = commands.add_parser(
        "requests",
        help=summary,
        description=f"Show {summary}, the oldest first.",
        parents=[where],
        allow_abbrev=False,
    )
    requests.add_argument("--json", action="store_true", help="stable output for programs")
    requests.set_defaults(run=run_requests)
    cancel = commands.add_parser(
        "cancel",
        help="end a request that is being served",
        description="End a request that is being served; its client gets an error.",
        parents=[where],
        allow_abbrev=False,
    )
    cancel.add_argument("id", metavar="ID", help="as `onebitctl requests` shows it")
    cancel.add_argument("--json", action="store_true", help="stable output for programs")
    cancel.set_defaults(run=run_cancel)


def run_requests(arguments: argparse.Namespace) -> int:
    """Print what is in flight."""
    found = _client(arguments).requests()
    for line in map(json.dumps, found) if arguments.json else requests_table(found):
        say(line)
    return 0


def run_cancel(arguments: argparse.Namespace) -> int:
    """End every request of an id; the client raises if there is none."""
    number = _client(arguments).cancel(arguments.id)
    words = f"cancelled {number} request{'' if number == 1 else 's'}"
    say(json.dumps({"cancelled": number}) if arguments.json else words)
    return 0


def requests_table(requests: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table, a request a line.

    The id stands last and is never cut, as `onebitctl cancel` takes it whole; a UUID fits into 100
    columns.
    """
    if not requests:
        return [NOTHING]
    lines = [_line(_HEADINGS, "ID")]
    for one in requests:
        counts = (one.get("prompt_tokens"), one.get("reply_tokens"))
        cells = (
            str(one.get("phase", "?")),
            duration(one.get("age_s")),
            *("-" if count is None else str(count) for count in counts),
            str(one.get("path", "?")),
        )
        lines.append(_line(cells, str(one.get("request_id", "?"))))
    return lines


def _line(cells: Sequence[str], request_id: str) -> str:
    shown = []
    for cell, name, wide in zip(cells, _HEADINGS, _COLUMNS, strict=True):
        text = cut(clean(cell), wide)
        shown.append(f"{text:>{wide}}" if name in _NUMBERS else f"{text:<{wide}}")
    return "  ".join([*shown, clean(request_id)])


def _client(arguments: argparse.Namespace) -> ControlClient:
    from onebitd.client import ControlClient, choose_socket

    path = arguments.socket or choose_socket(arguments.instance, os.environ, os.geteuid())
    return ControlClient(path)
