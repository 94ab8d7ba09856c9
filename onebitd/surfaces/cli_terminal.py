"""Where `onebitctl` writes to: how wide it is, whether it has colours, and writing there."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from onebitd.surfaces.cli_text import PAGE_COLUMNS


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


def has_colour() -> bool:
    """Tell whether somebody sees colours there, and did not say no."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain


def write(text: str) -> None:
    """Write text, what the encoding does not have as `?`."""
    encoding = sys.stdout.encoding or "ascii"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
