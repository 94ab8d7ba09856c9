"""Handoffs as CSV, for spreadsheets."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from onebitd.core.handoff import FIELDS
from onebitd.surfaces.cli_text import clean

_FORMULA_STARTS: Final = tuple("=+-@\uff1d\uff0b\uff0d\uff20")
"""What a spreadsheet would take for the start of a formula; some do so of the wide ones, too."""


def csv_lines(records: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield CSV by RFC 4180: the names of all fields of a record, then a line for each record.

    What is absent is empty, truth is `true` or `false`. Clients choose request ids, and details
    quote other programs: control characters become blanks or `?`, and a text that a spreadsheet
    would take for a formula gets an apostrophe in front. `--json` has them as they are.
    """
    written: list[str] = []
    writer = csv.writer(_Lines(written))
    for row in _rows(FIELDS, records):
        writer.writerow(row)
        yield written.pop()


class _Lines:
    """What a CSV writer writes to."""

    def __init__(self, written: list[str]) -> None:
        self._written = written

    def write(self, text: str) -> None:
        self._written.append(text)


def _rows(names: Iterable[str], records: Iterable[Mapping[str, Any]]) -> Iterator[list[str]]:
    columns = list(names)
    yield columns
    for record in records:
        yield [_csv_cell(record.get(name)) for name in columns]


def _csv_cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        text = clean(value)
        return f"'{text}" if text.lstrip().startswith(_FORMULA_STARTS) else text
    return json.dumps(value)
