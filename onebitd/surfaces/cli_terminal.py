"""Where `onebitctl` writes to: how wide it is, whether it has colours, and writing there."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Final, NamedTuple, TextIO

from onebitd.surfaces.cli_text import PAGE_COLUMNS, clean, wrap

_LEAST_COLUMNS: Final = 20


class Size(NamedTuple):
    """Of the place that is written to; `lines` is None where there is no screen."""

    columns: int
    lines: int | None


def size() -> Size:
    """Return the terminal's size; elsewhere $COLUMNS, or 80, and no lines."""
    if sys.stdout.isatty():
        try:
            found = os.get_terminal_size(sys.stdout.fileno())
        except OSError:
            return Size(PAGE_COLUMNS, None)
        return Size(found.columns or PAGE_COLUMNS, found.lines or None)
    text = os.environ.get("COLUMNS", "")
    if text.isascii() and text.isdigit() and 0 < int(text) < 10_000:
        return Size(int(text), None)
    return Size(PAGE_COLUMNS, None)


def has_colour(stream: TextIO | None = None) -> bool:
    """Tell whether somebody sees colours on a stream, or stdout, and did not say no."""
    return can_move(stream) and not os.environ.get("NO_COLOR")


def can_move(stream: TextIO | None = None) -> bool:
    """Tell whether a stream, or stdout, is a terminal where a line can be written over."""
    return (stream or sys.stdout).isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")


def tell(message: str) -> None:
    """Write a message to stderr, after what stdout has; on a terminal its lines end at words.

    Where nobody reads stderr any more the exit status has to say it all.
    """
    sys.stdout.flush()
    text = f"onebitctl: {clean(message)}"
    with contextlib.suppress(OSError):
        write("\n".join(fitting(text)) + "\n", sys.stderr)
        sys.stderr.flush()


def fitting(text: str, stream: TextIO | None = None) -> list[str]:
    """Return lines of a text for a stream, or stderr: they fit a terminal, elsewhere it is one."""
    stream = stream or sys.stderr
    if not stream.isatty():
        return [text]
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except OSError:
        columns = 0
    return wrap(text, "", "  ", columns) if columns >= _LEAST_COLUMNS else [text]


def write(text: str, stream: TextIO | None = None) -> None:
    """Write text to a stream, or stdout; what its encoding does not have as `?`."""
    stream = stream or sys.stdout
    encoding = stream.encoding or "ascii"
    stream.write(text.encode(encoding, "replace").decode(encoding))
