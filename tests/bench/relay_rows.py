"""Rows of the relay's benchmark: a figure, the goal it is held against, and whether that is met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One figure, as text; `met` is None where there is no goal, or nothing to measure with."""

    what: str
    seen: str
    goal: str = ""
    met: bool | None = None


def at_most(what: str, value: float, goal: float, unit: str = "", note: str = "") -> Row:
    """Return the row of a figure that should not pass its goal."""
    return _row(what, value, f"<= {goal:g}{unit}", value <= goal, unit, note)


def at_least(what: str, value: float, goal: float, unit: str = "", note: str = "") -> Row:
    """Return the row of a figure that should reach its goal."""
    return _row(what, value, f">= {goal:g}{unit}", value >= goal, unit, note)


def told(what: str, value: float, unit: str = "", note: str = "") -> Row:
    """Return the row of a figure without a goal."""
    return _row(what, value, "", None, unit, note)


def missing(what: str, why: str) -> Row:
    """Return the row of a figure that cannot be had here."""
    return Row(what, f"not measured: {why}")


def _row(what: str, value: float, goal: str, met: bool | None, unit: str, note: str) -> Row:
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3
    return Row(what, f"{value:.{digits}f}{unit}" + (f"  ({note})" if note else ""), goal, met)


def ms(nanoseconds: float) -> str:
    """Return a time as text."""
    return f"{nanoseconds / 1e6:.{3 if abs(nanoseconds) > 1e5 else 4}f} ms"


def rows_table(title: str, rows: Sequence[Row]) -> str:
    """Return the table, and how many goals are met."""
    verdicts = {True: "ok", False: "MISSED", None: ""}
    cells = [(row.what, row.seen, row.goal, verdicts[row.met]) for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    judged = [row for row in rows if row.met is not None]
    met = sum(bool(row.met) for row in judged)
    return "\n".join([title, *lines, f"{met} of {len(judged)} goals met"])
