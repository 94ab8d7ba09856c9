"""How `onebitctl` shows values: durations, sizes, times, colours, lines of limited width."""

from __future__ import annotations

import datetime as dt
import re
import textwrap
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

PAGE_COLUMNS: Final = 80

_COMMAND: Final = re.compile("`[^`]*`")
_KEPT: Final = "\0"
"""Stands for a space at which no line may end; no text has it that went through `clean`."""

_PAINTS: Final = {"green": "32", "yellow": "33", "red": "31", "dim": "2", "bold": "1"}


def duration(seconds: float | None) -> str:
    """Return `2.1 s`, `3 min 20 s`, `2 h 5 min` or `4 d 3 h`."""
    if seconds is None:
        return "?"
    if seconds < 60:
        return f"{max(seconds, 0.0):.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    whole = int(seconds)
    for size, unit, part, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit} {rest} {small}" if rest else f"{whole // size} {unit}"
    rest = whole % 60
    return f"{whole // 60} min {rest} s" if rest else f"{whole // 60} min"


def mebibytes(size_bytes: int) -> str:
    """Return `812 MiB`, from 10 GiB on `12.3 GiB`."""
    size = size_bytes / 2**20
    return f"{size:.0f} MiB" if size < 10240 else f"{size / 1024:.1f} GiB"


def milliseconds(value: float | None) -> str:
    """Return `0.41 ms`, `88.1 ms`, `1.52 s` or `-`."""
    if value is None:
        return "-"
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def local_time(text: object) -> str:
    """Return a record's time as HH:MM:SS of the local zone, or `-`."""
    moment = moment_of(text)
    return "-" if moment is None else moment.astimezone().strftime("%H:%M:%S")


def ago(text: object, now: dt.datetime) -> str:
    """Return a record's time as `3 min 20 s ago`, or `at ?`."""
    moment = moment_of(text)
    return "at ?" if moment is None else f"{duration((now - moment).total_seconds())} ago"


def moment_of(text: object) -> dt.datetime | None:
    """Return a record's time in the local zone; None if it is none, of no zone, or of no year."""
    try:
        moment = dt.datetime.fromisoformat(str(text))
        return moment.astimezone() if moment.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None


def clean(text: str) -> str:
    """Return the text without what would move the cursor or break the line.

    Details quote other programs' output.
    """
    return "".join(
        letter if letter.isprintable() else " " if letter.isspace() else "?" for letter in text
    )


def cut(line: str, width: int | None) -> str:
    """Return the line, shortened to `width` columns with an ellipsis."""
    if width is None or len(line) <= width:
        return line
    return line[: max(width - 1, 0)].rstrip() + "…"


def paint(text: str, name: str, colour: bool) -> str:
    """Return the text in a colour, or as it is when `colour` is False."""
    return f"\x1b[{_PAINTS[name]}m{text}\x1b[0m" if colour and text else text


class Line(NamedTuple):
    """A line, and which parts of it have which colour: (from, to, name), in order."""

    text: str
    paints: tuple[tuple[int, int, str], ...] = ()

    def shown(self, colour: bool) -> str:
        """Return it with its colours, or as it is when `colour` is False."""
        text = self.text
        for start, end, name in reversed(self.paints):
            text = text[:start] + paint(text[start:end], name, colour) + text[end:]
        return text

    def beside(self, right: Line, column: int) -> Line:
        """Return this line with another one that begins at a column."""
        moved = tuple((start + column, end + column, name) for start, end, name in right.paints)
        return Line(f"{self.text:<{column}}{right.text}".rstrip(), (*self.paints, *moved))


def wrap(text: str, first: str, rest: str, columns: int = PAGE_COLUMNS) -> list[str]:
    """Return lines of at most `columns`; the first starts with `first`, others with `rest`.

    A command, between backticks, stays in one line if that is long enough.
    """
    whole = _COMMAND.sub(lambda found: found[0].replace(" ", _KEPT), text)
    lines = textwrap.wrap(
        whole,
        columns,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
    ) or [first.rstrip()]
    return [line.replace(_KEPT, " ") for line in lines]


def part_of(mapping: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the table under a key; an empty one if there is none, or something else is there."""
    found = mapping.get(key)
    return found if isinstance(found, Mapping) else {}
