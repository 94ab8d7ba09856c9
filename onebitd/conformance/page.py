"""How the kit's findings are shown: a line each, then the verdict; or one JSON object."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, Final

from onebitd.conformance.cases import CASES
from onebitd.conformance.judge import Finding, Verdict
from onebitd.surfaces import cli_text

_CASE_COLUMNS: Final = max(map(len, CASES)) + 2
_CHECK_COLUMNS: Final = 11
_VERDICT_COLUMNS: Final = 6
_INDENT: Final = " " * (_CASE_COLUMNS + _CHECK_COLUMNS + _VERDICT_COLUMNS)
_LEAST_TEXT_COLUMNS: Final = 30
_WORDS: Final = {Verdict.OK: ("ok", "green"), Verdict.FAIL: ("FAIL", "red"),
                 Verdict.NOTE: ("note", "yellow")}  # fmt: skip


def columns() -> int | None:
    """Return the width of the terminal that standard output is, None where it goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def has_colour() -> bool:
    """Say whether standard output takes colour, and nobody objects."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain


def row(finding: Finding, width: int | None, *, colour: bool) -> str:
    """Return one finding as lines: case, check, verdict, and the sentence, which is never cut."""
    word, paint = _WORDS[finding.verdict]
    head = f"{finding.case:<{_CASE_COLUMNS}}{finding.check:<{_CHECK_COLUMNS}}"
    head += cli_text.paint(word, paint, colour) + " " * (_VERDICT_COLUMNS - len(word))
    text = cli_text.clean(finding.text)
    if width is None or width < len(_INDENT) + _LEAST_TEXT_COLUMNS:
        return head + text
    lines = textwrap.wrap(text, width - len(_INDENT), break_on_hyphens=False)
    return head + f"\n{_INDENT}".join(lines)


def verdict_line(program: str, findings: Sequence[Finding]) -> str:
    """Return the last line: does the provider conform, and how many checks say so.

    >>> verdict_line("p", [Finding("short", "exit", Verdict.OK, "status 0")])
    'p conforms: 1 check is ok'
    """
    counts = {verdict: sum(one.verdict is verdict for one in findings) for verdict in Verdict}
    failed, fine, notes = counts[Verdict.FAIL], counts[Verdict.OK], counts[Verdict.NOTE]
    words = f"{failed} failed, {fine} ok" if failed else f"{_checks(fine)} ok"
    words += f", {notes} note{'s'[: notes != 1]}" if notes else ""
    if failed:
        cases = list(dict.fromkeys(one.case for one in findings if one.verdict is Verdict.FAIL))
        return f"{program} does NOT conform: {words}; see {', '.join(cases)}"
    return f"{program} conforms: {words}"


def _checks(count: int) -> str:
    return f"{count} check is" if count == 1 else f"{count} checks are"


def as_json(facts: dict[str, Any], findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the object that --json prints; its names are those of onebitctl(1)."""
    failed = sum(one.verdict is Verdict.FAIL for one in findings)
    notes = sum(one.verdict is Verdict.NOTE for one in findings)
    return facts | {
        "conforming": conforming(findings),
        "failed": failed,
        "notes": notes,
        "checks": [one.as_json() for one in findings],
    }


def conforming(findings: Sequence[Finding]) -> bool:
    """Say whether there are findings and none is a failure."""
    return bool(findings) and all(one.verdict is not Verdict.FAIL for one in findings)
