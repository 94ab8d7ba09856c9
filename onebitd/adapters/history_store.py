"""The file of past handoffs: being written."""

from __future__ import annotations

from typing import Any

from onebitd.core.errors import OnebitError
from onebitd.core.handoff_filter import HandoffFilter


class HistoryFileError(OnebitError):
    """The file cannot be read or written; the message names it and why."""


def read_records(path: str, wanted: HandoffFilter) -> list[dict[str, Any]]:
    """Read the records that are wanted, newest last; nothing is written or created."""
    raise HistoryFileError(f"{path} does not exist")
