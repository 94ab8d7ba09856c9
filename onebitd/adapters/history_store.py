"""Writes the file of past handoffs: one SQLite file, `history.db` in the state directory.

It has a write-ahead log, so that readers and the writer do not wait for each other. `synchronous`
is NORMAL: what is written survives the daemon, killed or not, without a call that waits for the
disk; after a power cut the file is whole, and misses at most what the kernel had not yet written
back, some thirty seconds by its default.

The records tell lengths, times and a provider's last words: mode 0600, for `-wal` and `-shm` too,
which SQLite makes like the file itself.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from onebitd.adapters import history_reading as reading
from onebitd.adapters import history_schema as schema
from onebitd.adapters.history_errors import (
    HistoryDamaged,
    HistoryDenied,
    HistoryFileError,
    HistoryGrown,
    HistoryNotOpen,
    HistoryTooNew,
    NoHistory,
    translated,
)
from onebitd.adapters.history_pruning import PRUNE_RECORDS, Keep, Pruning
from onebitd.adapters.history_reading import Row, read_records
from onebitd.core.handoff_filter import parse_time

__all__ = [
    "PRUNE_RECORDS",
    "HistoryDamaged",
    "HistoryDenied",
    "HistoryFileError",
    "HistoryGrown",
    "HistoryNotOpen",
    "HistoryStore",
    "HistoryTooNew",
    "Keep",
    "NoHistory",
    "read_records",
]

KEPT_DAMAGED: Final = 2
"""So many damaged files are kept for looking into, the newest."""
_BUSY_S: Final = 2.0
_LOG_BYTES: Final = 4 << 20
_LOOK_EVERY_S: Final = 600.0
_NEW_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_BESIDE: Final = ("-wal", "-shm")


class HistoryStore:
    """The one writer of a file. Calls may come from any thread; a second waits for the first.

    After an error it is closed; `open` it again.

    Args:
        path: its directory is made with it.

    Attributes:
        known_ms: from `open` on, a time that it was when its records were written; None without.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known_ms: int | None = None
        self._connection: sqlite3.Connection | None = None
        self._inode = 0
        self._log = (0, 0)
        self._last = 0
        self._pruning: Pruning
        self._looked_at = -math.inf
        self._is_over = False
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether it can be written to, as far as is known."""
        return self._inode != 0  # which comes last: another thread may be about to open it

    def open(self) -> int:
        """Open the file, make it or bring it up to date; return its last record's number, or 0.

        Raises:
            HistoryTooNew: it is left as it is.
            HistoryDamaged: see `set_aside`.
            HistoryFileError: it cannot be opened.
        """
        with self._lock, self._closed_on_error("opened"):
            if self._is_over:
                raise HistoryNotOpen(f"{self.path} has been closed")
            self._close()
            self._prepare()
            connection = self._connection = sqlite3.connect(
                self.path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            reading.check_version(connection, self.path)
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # counts for a new file only
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
            connection.execute("PRAGMA trusted_schema = OFF")
            schema.migrate(connection)
            self._pruning = Pruning(connection)
            self.known_ms = self._pruning.known_ms()
            self._last = _last_id(connection)
            self._log = self._log_now()
            self._inode = self.path.lstat().st_ino
            return self._last

    def _prepare(self) -> None:
        """Make sure that there is a file, and that nobody else may read it."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self.path, _NEW_FLAGS, 0o600))
        if not stat.S_ISREG(self.path.lstat().st_mode):
            raise HistoryFileError(f"{self.path} is no file; remove it")
        for file in (self.path, *self._beside()):
            with contextlib.suppress(FileNotFoundError):
                if stat.S_IMODE(file.stat().st_mode) != 0o600:
                    file.chmod(0o600)

    def last(self, keep: Keep) -> list[Row]:
        """Return the last records that are to be kept, newest last.

        Raises:
            HistoryDamaged, HistoryFileError: see `open`.
        """
        with self._lock, self._closed_on_error("read"):
            connection = self._opened()
            rows = connection.execute(
                # The plus keeps SQLite from sorting all that an index has found.
                "SELECT id, record FROM handoffs WHERE +time_ms >= ? OR id > ?"
                " ORDER BY id DESC LIMIT ?",
                (keep.oldest_ms, self._pruning.first_kept(keep), keep.records),
            ).fetchall()
            return [(key, reading.fields_of(str(self.path), text)) for key, text in rows[::-1]]

    def write(self, rows: Sequence[Row], keep: Keep) -> bool:
        """Add records, all or none, and delete some that are too many or too old.

        A record whose number is there already is left out: it was written by a call that nobody
        waited for. Return True when more are to be deleted.

        Raises:
            NoHistory: somebody has removed the file meanwhile, or spoilt its log.
            HistoryGrown: there are records of another program; nothing is written.
            HistoryDamaged, HistoryFileError: see `open`.
        """
        values = [_values(*row) for row in rows]
        with self._lock, self._closed_on_error("written"):
            connection = self._opened()
            if not self._is_in_place():
                raise NoHistory(f"{self.path}, or its log, is not there any more")
            reading.mend_index(self.path)
            added = 0
            if values:
                connection.execute("BEGIN IMMEDIATE")
                if _last_id(connection) > self._last:
                    raise HistoryGrown(f"{self.path} has records of another program")
                cursor = connection.executemany(
                    "INSERT OR IGNORE INTO handoffs VALUES (?, ?, ?, ?, ?, ?)", values
                )
                connection.execute("COMMIT")
                added = cursor.rowcount
                self._last = max(self._last, rows[-1][0])
            is_more = self._pruning.step(keep, added)
            self._prune_set_aside(keep)
            self._log = self._log_now()
            return is_more

    def _prune_set_aside(self, keep: Keep) -> None:
        """Remove the damaged files whose records are all too old, now and then."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        for file in self._set_aside():
            with contextlib.suppress(OSError):  # the next look may have more luck
                if _changed_ms(file) < keep.oldest_ms:
                    _remove(file)

    def close(self, *, for_good: bool = False) -> None:
        """Close the file; what its log holds goes into it.

        Args:
            for_good: a call that nobody waits for any more does not open it again.
        """
        with self._lock:
            self._is_over |= for_good
            self._close()

    def set_aside(self, stamp: str) -> Path:
        """Rename the damaged file and its log, and return its new name; the oldest such go.

        Args:
            stamp: what tells it from others, in their order.

        Raises:
            HistoryFileError: the directory does not allow it.
        """
        with self._lock, translated(self.path, "set aside"):
            self._close()
            aside = self.path.with_name(f"{self.path.name}.damaged-{stamp}")
            for suffix in ("", "-wal"):
                with contextlib.suppress(FileNotFoundError):
                    file = Path(f"{self.path}{suffix}")
                    file.chmod(0o600)
                    file.rename(f"{aside}{suffix}")
            Path(f"{self.path}-shm").unlink(missing_ok=True)
            for old in self._set_aside()[:-KEPT_DAMAGED]:
                _remove(old)
            return aside

    def remove(self) -> bool:
        """Remove the file and all that was set aside; return whether there was any.

        Raises:
            HistoryFileError: the directory does not allow it.
        """
        with self._lock, translated(self.path, "removed"):
            self._close()
            found = [file for file in (self.path, *self._set_aside()) if _remove(file)]
            return bool(found)

    def _set_aside(self) -> list[Path]:
        try:
            files = list(self.path.parent.glob(f"{self.path.name}.damaged-*"))
        except OSError:
            return []
        return sorted(file for file in files if not file.name.endswith(_BESIDE))

    def _beside(self) -> list[Path]:
        return [Path(f"{self.path}{suffix}") for suffix in _BESIDE]

    def _is_in_place(self) -> bool:
        """Whether what is open is what a later daemon will find.

        SQLite does not notice a log that is gone or cut; what it adds to that is lost with a kill,
        and what it copies out of it into the file is zeros.
        """
        try:
            if self.path.lstat().st_ino != self._inode:
                return False
        except FileNotFoundError:
            return False
        inode, size = self._log_now()
        return inode == self._log[0] and size >= min(self._log[1], _LOG_BYTES)

    def _log_now(self) -> tuple[int, int]:
        """Return inode and size of the log; zeros when there is none."""
        try:
            info = self._beside()[0].stat()
        except FileNotFoundError:
            return 0, 0
        return info.st_ino, info.st_size

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            raise HistoryNotOpen(f"{self.path} is not open")
        return self._connection

    @contextlib.contextmanager
    def _closed_on_error(self, verb: str) -> Iterator[None]:
        try:
            with translated(self.path, verb):
                yield
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        self._inode = 0
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):  # an open transaction ends with it
                connection.close()


def _last_id(connection: sqlite3.Connection) -> int:
    (last,) = connection.execute("SELECT max(id) FROM handoffs").fetchone()
    return int(last or 0)


def _changed_ms(file: Path) -> float:
    """Return when a file, or the log beside it, was last written."""
    names = (file, Path(f"{file}{_BESIDE[0]}"))
    return max((name.stat().st_mtime for name in names if name.exists()), default=math.inf) * 1000


def _remove(file: Path) -> bool:
    was_there = file.exists()
    for name in (file, *(Path(f"{file}{suffix}") for suffix in _BESIDE)):
        name.unlink(missing_ok=True)
    return was_there


def _values(key: int, fields: dict[str, Any]) -> tuple[Any, ...]:
    """Return the row of a record, in the order of the columns."""
    moment = reading.time_ms_of(parse_time(fields["time"]))
    words = (fields["outcome"], fields.get("reason"), fields.get("route"))
    return (key, moment, *words, json.dumps(fields, separators=(",", ":")))
