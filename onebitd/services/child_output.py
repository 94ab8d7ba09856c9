"""What a child program says, on its way to the log: each line at its level, a flood cut short.

Limited here, at the source, because the journal's own limit counts all lines of a service alike:
a flood would take the room of the lines about handoffs, and then that of the whole journal.
"""

from __future__ import annotations

import logging
import time
from typing import Final, Literal, TypeAlias

import structlog

from onebitd.core.line_budget import LineBudget

Level: TypeAlias = Literal["debug", "warning", "error"]

BURST_LINES: Final = 500
"""A model that loads at log level debug says about 300 lines."""
LINES_PER_S: Final = 20.0
_DEBUG: Final = logging.DEBUG
_NUMBERS: Final = {"debug": logging.DEBUG, "warning": logging.WARNING, "error": logging.ERROR}


class ChildOutput:
    """The lines of one source. A line below the log's level costs neither budget nor time.

    Two budgets, so that an error is not lost behind a thousand details.

    Args:
        event: the event word of its lines.
        prefix: what stands before each line, such as `llama-server`.
        source: what the note about lost lines calls it, such as `decoder`.
    """

    def __init__(self, event: str, prefix: str, source: str) -> None:
        self._log = structlog.get_logger().bind()  # bound once; see logsetup
        self._event = event
        self._prefix = prefix
        self._source = source
        self._details = LineBudget(BURST_LINES, LINES_PER_S)
        self._problems = LineBudget(BURST_LINES, LINES_PER_S)

    def write(self, level: Level, line: bytes, **fields: str) -> None:
        """Log a line, unless there have been too many."""
        number = _NUMBERS[level]
        if not self._log.is_enabled_for(number):
            return
        budget = self._details if number == _DEBUG else self._problems
        if not budget.admits(time.monotonic(), len(line)):
            return
        if budget.left_out:
            self._note(budget)
        text = f"{self._prefix}: {line.decode('utf-8', 'replace')}"
        self._log.log(number, self._event, **fields, line=text)

    def end(self) -> None:
        """Say what was left out and has not been told yet; for the end of a program."""
        for budget in (self._details, self._problems):
            if budget.left_out:
                self._note(budget)

    def _note(self, budget: LineBudget) -> None:
        count = budget.take_left_out()
        number = _DEBUG if budget is self._details else logging.WARNING
        lines = "1 line" if count == 1 else f"{count} lines"
        were = "was" if count == 1 else "were"
        self._log.log(
            number,
            "output_suppressed",
            source=self._source,
            count=count,
            line=f"{lines} of the {self._source} {were} left out",
        )
