"""The tables of the history file, by version: `PRAGMA user_version` says which it has."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final

Steps = Sequence[Sequence[str]]

STEPS: Final[Steps] = (
    (
        # `id` counts up and is never given twice, so the order of ids is the order of ends.
        "CREATE TABLE handoffs (id INTEGER PRIMARY KEY, time_ms INTEGER NOT NULL,"
        " outcome TEXT NOT NULL, reason TEXT, route TEXT, record TEXT NOT NULL)",
        "CREATE INDEX handoffs_time ON handoffs (time_ms)",
    ),
)
"""What makes each version out of the one before it, version 1 out of an empty file.

`time_ms` is the record's `time` as milliseconds since 1970, `record` its fields as JSON; the other
columns are there to be searched.
"""
VERSION: Final = len(STEPS)


def version_of(connection: sqlite3.Connection) -> int:
    """Return the version of an open file, 0 for an empty one."""
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    return int(found)


def migrate(connection: sqlite3.Connection, steps: Steps = STEPS) -> None:
    """Bring a file up to the version of the last step; each step happens whole or not at all.

    Args:
        connection: in autocommit mode; its version is not above that of the last step.
        steps: see `STEPS`.
    """
    for number in range(version_of(connection), len(steps)):
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in steps[number]:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number + 1}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
