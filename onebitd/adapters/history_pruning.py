"""Deletes from the file of past handoffs what is too much or too old, in small steps."""

from __future__ import annotations

import sqlite3
from typing import Final, NamedTuple

from onebitd.core.history_age import HOLD_MS, known_from

PRUNE_RECORDS: Final = 1000
"""So many are deleted at once: nobody waits long for the file."""
_SPARE_PAGES: Final = 512
_FREED_PAGES: Final = 256
_NO_END: Final = 1 << 62
_KEPT: Final = "time_ms BETWEEN ? AND ?"


class Keep(NamedTuple):
    """How much is kept: the newest records, of those that began at `oldest_ms` or later.

    One that says it began earlier, and was written after one that began between `oldest_ms` and
    `now_ms`, had a wrong clock: it is kept until that one goes.
    """

    records: int
    oldest_ms: int
    now_ms: int = _NO_END


class Pruning:
    """What is known of one open file, so that little has to be asked.

    Args:
        connection: of the one writer, in autocommit mode.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._count = 0
        self._version = -1
        self._front = 0

    def known_ms(self) -> int | None:
        """Return a time that it was when the records were written; None when there are none."""
        newest = self._ask("SELECT max(time_ms) FROM handoffs")
        if newest is None:
            return None
        day = newest - HOLD_MS
        first = self._ask("SELECT min(time_ms) FROM handoffs WHERE time_ms > ?", day)
        before = self._ask("SELECT max(time_ms) FROM handoffs WHERE time_ms <= ?", day)
        return known_from(newest, newest if first is None else first, before)

    def first_kept(self, keep: Keep) -> int:
        """Return the number below which all go that are too old; 0 when none are.

        What was found is kept: while a long file is pruned, it is not searched with each step.
        """
        oldest = self._ask("SELECT min(time_ms) FROM handoffs")
        if oldest is None or oldest >= keep.oldest_ms:
            return 0
        kept = keep[1:]
        if self._ask(f"SELECT 1 FROM handoffs WHERE {_KEPT} LIMIT 1", *kept) is None:  # noqa: S608
            self._front = 0
            return _NO_END
        # The plus keeps SQLite from sorting all that an index has found.
        search = f"SELECT id FROM handoffs WHERE id >= ? AND +{_KEPT} ORDER BY id LIMIT 1"  # noqa: S608
        found = self._ask(search, self._front, *kept) or self._ask(search, 0, *kept)
        self._front = found or 0
        return found or _NO_END

    def step(self, keep: Keep, added: int) -> bool:
        """Delete some; return True when more are to be deleted.

        Args:
            added: records that this connection has put into the file since the last step.
        """
        surplus = self._counted(added) - keep.records
        deleted = old = 0
        if surplus > 0:
            deleted = self._connection.execute(
                "DELETE FROM handoffs WHERE id IN (SELECT id FROM handoffs ORDER BY id LIMIT ?)",
                (min(surplus, PRUNE_RECORDS),),
            ).rowcount
        if first := self.first_kept(keep):
            old = self._connection.execute(
                "DELETE FROM handoffs WHERE id IN"
                " (SELECT id FROM handoffs WHERE time_ms < ? AND id < ? LIMIT ?)",
                (keep.oldest_ms, first, PRUNE_RECORDS),
            ).rowcount
        self._count -= deleted + old
        return self._count > keep.records or old == PRUNE_RECORDS or self._gives_back()

    def _counted(self, added: int) -> int:
        """Return how many there are: counted once, and again when somebody else wrote."""
        self._count += added
        version = self._ask("PRAGMA data_version")
        if version != self._version:
            self._count = self._ask("SELECT count(*) FROM handoffs") or 0
            self._version = version or 0
        return self._count

    def _gives_back(self) -> bool:
        """Give some room back to the file system; return True when there is more to give."""
        spare = self._ask("PRAGMA freelist_count") or 0
        if spare <= _SPARE_PAGES:  # a few are of use for the next records
            return False
        # One step of this statement gives one page; `execute` makes but one, as it has no rows.
        self._connection.executescript(f"PRAGMA incremental_vacuum({_FREED_PAGES})")
        left = self._ask("PRAGMA freelist_count") or 0
        return _SPARE_PAGES < left < spare  # a file made by other means may not shrink

    def _ask(self, question: str, *values: int) -> int | None:
        found = self._connection.execute(question, values).fetchone()
        return None if found is None or found[0] is None else int(found[0])
