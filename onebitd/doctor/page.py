"""The report as people read it: groups of checks, a mark each, 80 columns. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from onebitd.doctor.finding import GROUPS, Finding, State, in_order, summary, worst_first
from onebitd.surfaces.cli_text import clean, paint, wrap

_MARKS: Final = {
    State.OK: ("ok", "green"),
    State.WARNING: ("!", "yellow"),
    State.FAILED: ("x", "red"),
    State.SKIPPED: ("-", "dim"),
}
_MARK_COLUMNS: Final = 5
_INDENT: Final = " " * _MARK_COLUMNS


def page(where: str, findings: Sequence[Finding], *, colour: bool) -> str:
    """Return the report.

    Args:
        where: a sentence on where the checks ran, its first line.
        findings: in any order.
        colour: paint the marks.
    """
    lines = [*wrap(clean(where), "", ""), *_summary_lines(findings, colour), ""]
    for group, members in itertools.groupby(in_order(findings), key=_group_of):
        lines.append(paint(GROUPS.get(group, group), "bold", colour))
        for one in members:
            lines += _lines_of(one, colour)
    return "\n".join(lines)


def _group_of(finding: Finding) -> str:
    return finding.name.partition(".")[0]


def _summary_lines(findings: Sequence[Finding], colour: bool) -> list[str]:
    worst = worst_first(findings)[0].state if findings else State.OK
    paints = {State.FAILED: "red", State.WARNING: "yellow"}
    lines = wrap(clean(summary(findings)), "", "")
    return [paint(line, paints.get(worst, "green"), colour) for line in lines]


def _lines_of(finding: Finding, colour: bool) -> list[str]:
    mark, name = _MARKS[finding.state]
    first, *rest = wrap(clean(finding.message), f"  {mark}".ljust(_MARK_COLUMNS), _INDENT)
    lines = [first.replace(mark, paint(mark, name, colour), 1), *rest]
    if finding.fix is not None and finding.state is not State.OK:
        # As it is, line by line: whoever copies it gets what a shell takes.
        lines += [f"{_INDENT}  {clean(line)}" for line in finding.fix.splitlines()]
    return lines
