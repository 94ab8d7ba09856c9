"""Keeps what was learned about costs over restarts: read at start, written soon after each change.

What was learned is about one model, one decoder and one provider, the subject. With another model
or decoder all of it is worthless, with another provider only what the provider's runs cost. The
daemon never fails because of the file: without it, it learns again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import structlog
import trio

from onebitd.adapters.cost_file import CostFile, CostFileError
from onebitd.core.costs import Costs
from onebitd.services.late_writes import LateWrites

log = structlog.get_logger()

_PROVIDER: Final = "provider"


class CostKeeper:
    """Has the costs, and their file.

    Args:
        path: of the file, read at once.
        subject: what the figures are about: `model`, `decoder`, `provider`. What is not known yet
            is left out, and compared when `set_subject` tells it.
    """

    def __init__(self, path: Path, subject: Mapping[str, str]) -> None:
        self._file = CostFile(path)
        self._subject: dict[str, str] = {}
        self._writes = LateWrites(self._write)
        self._failing = False
        self.costs = self._read()
        self.set_subject(subject)

    def touch(self) -> None:
        """Say that something was learned: it is written within a second."""
        self._writes.touch()

    def set_subject(self, subject: Mapping[str, str]) -> None:
        """Say what the figures are about from now on; forgets those that are about another one.

        `costs` is another object after all was forgotten. A key that is left out stays as it was.
        """
        changed = {
            key: before
            for key, value in subject.items()
            if (before := self._subject.get(key, value)) != value
        }
        if self._subject != (merged := {**self._subject, **subject}):
            self._subject = merged
            self.touch()
        if not changed:
            return
        if set(changed) == {_PROVIDER}:
            self.costs.forget_provider()
            what = "the provider's figures were"
        else:
            self.costs = Costs()
            what = "all figures were"
        names = ", ".join(sorted(changed))
        log.info("costs_forgotten", line=f"learned costs: {what} about another {names}; forgotten")

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write the file after each touch until cancelled, and then once more if it is due."""
        await self._writes.run(task_status=task_status)

    async def _write(self) -> bool:
        """Write what is there now; a failure is one warning until it works again."""
        self.costs.refit()  # or the next prompt would wait for it; see also Outlooks.refit
        document = {"subject": self._subject, "costs": self.costs.to_json()}
        data = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
        try:
            await trio.to_thread.run_sync(self._file.write, data, abandon_on_cancel=True)
        except CostFileError as error:
            if not self._failing:
                self._failing = True
                log.warning(
                    "costs_not_written",
                    line=f"{error}; what is learned will be lost with the daemon until it can",
                )
            return False
        if self._failing:
            self._failing = False
            log.info("costs_written_again", line=f"{self._file.path} can be written again")
        return True

    def _read(self) -> Costs:
        try:
            document = self._file.read()
            if document is None:
                return Costs()
            subject, costs = _parts(document)
        except CostFileError as error:
            log.warning("costs_not_read", line=f"{error}; costs are learned anew")
            return Costs()
        except ValueError as error:
            self._set_aside(error)
            return Costs()
        self._subject = subject
        return costs

    def _set_aside(self, why: ValueError) -> None:
        line = f"{self._file.path} is damaged: {why}; costs are learned anew"
        try:
            line += f", and the file is kept as {self._file.set_aside()}"
        except CostFileError as error:
            line += f"; {error}"
        log.warning("costs_damaged", line=line)


def _parts(document: object) -> tuple[dict[str, str], Costs]:
    if not isinstance(document, dict):
        raise ValueError("it is no object")
    subject = document.get("subject")
    if not isinstance(subject, dict):
        raise ValueError("it does not say what it is about")
    if not all(isinstance(value, str) for value in subject.values()):
        raise ValueError("it says what it is about in something else than words")
    return subject, Costs.from_json(document.get("costs"))
