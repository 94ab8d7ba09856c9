"""Reads the file of past handoffs, for the daemon that writes it and for `onebitctl` without one.

Nothing here writes or creates a file. The standard library alone.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import math
import os
import sqlite3
import stat
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote

from onebitd.adapters import history_schema as schema
from onebitd.adapters.history_errors import (
    HistoryDamaged,
    HistoryFileError,
    NoHistory,
    damaged,
    too_new,
    translated,
)
from onebitd.core.handoff_filter import WORDS, HandoffFilter, parse_time

PAGE_RECORDS: Final = 500
_BUSY_S: Final = 2.0
_TRIES: Final = 5
_INDEX_BYTES: Final = 32 << 10
_NO_END: Final = 1 << 62

Row = tuple[int, dict[str, Any]]
"""A record's number in the file, and its fields."""
RawRow = tuple[int, str]
"""The same with the JSON that is in the file."""


def read_records(path: str, wanted: HandoffFilter) -> list[dict[str, Any]]:
    """Return the records that are wanted, newest last; without a limit all of them.

    For another process than the daemon's. It may run or not, or have been killed: what it had
    written then is in the files beside this one (`-wal`, `-shm`), and is read.

    Raises:
        NoHistory: there is no such file.
        HistoryDenied: this user may not read it.
        HistoryDamaged, HistoryTooNew, HistoryFileError: it cannot be read.
    """
    for tries_left in reversed(range(_TRIES)):
        try:
            with _opened_aside(path) as connection:
                found = list(_records(connection, path, wanted))
            if _is_as_it_was(path, connection):
                return [fields for _, fields in found]
        except HistoryDamaged:
            # A daemon that starts or ends changes what was opened as a file that nobody changes.
            if not tries_left:
                raise
    raise HistoryFileError(f"{path} cannot be read: it changes all the time; try again")


class _Aside(sqlite3.Connection):
    """A connection that knows how the file was when it was opened; `None`: it may change."""

    state: tuple[int, ...] | None = None


@contextlib.contextmanager
def _opened_aside(path: str) -> Iterator[_Aside]:
    """Open the file without leaving a trace, in another process than the daemon's."""
    with translated(path, "read"):
        _look_at(path)
        if not os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
            raise PermissionError
        has_log = os.path.exists(f"{path}-wal")
        # A log without its index cannot be read by somebody who may create nothing; a file
        # without a log is complete, and is not even locked.
        how = "mode=ro&readonly_shm=1" if has_log else "mode=ro&immutable=1"
        if has_log and not os.path.exists(f"{path}-shm"):
            raise HistoryFileError(
                f"{path} cannot be read: {path}-wal is there and {path}-shm is not;"
                " start the daemon, which makes it"
            )
    with _connected(path, how) as connection:
        connection.state = None if has_log else _state_of(path)
        yield connection


def _state_of(path: str) -> tuple[int, ...]:
    try:
        info = os.stat(path)
    except OSError:
        return ()
    has_log = os.path.exists(f"{path}-wal")
    return (info.st_ino, info.st_size, info.st_mtime_ns, has_log)


def _is_as_it_was(path: str, connection: _Aside) -> bool:
    return connection.state is None or connection.state == _state_of(path)


@contextlib.contextmanager
def _connected(path: str, how: str) -> Iterator[_Aside]:
    with translated(path, "read"):
        connection = sqlite3.connect(
            f"file:{quote(path)}?{how}",
            uri=True,
            timeout=_BUSY_S,
            isolation_level=None,
            factory=_Aside,
        )
        with contextlib.closing(connection):
            yield connection


@contextlib.contextmanager
def opened(path: str) -> Iterator[sqlite3.Connection]:
    """Open the file for reading in the process of the daemon, which has it open for writing.

    The files beside it are shared with the writer there: opened read-only by the first of two, they
    would be read-only for the second.

    Raises:
        NoHistory: it is not there, or nothing has been put into it yet.
        HistoryTooNew, HistoryFileError: it was replaced by something else.
    """
    with translated(path, "read"):
        _look_at(path)
        mend_index(path)
    with _connected(path, "mode=ro") as connection:
        with translated(path, "read"):
            check_version(connection, path)
            if not schema.version_of(connection):
                raise NoHistory(f"{path} is empty")
        yield connection


def mend_index(path: str | os.PathLike[str]) -> None:
    """Give `-shm` its least size back, if somebody has cut it under us.

    It is mapped: a look at what is not there any more kills the process. With zeros in it SQLite
    makes it anew from the log.
    """
    index = f"{os.fspath(path)}-shm"
    with contextlib.suppress(FileNotFoundError):
        if os.stat(index).st_size < _INDEX_BYTES:
            os.truncate(index, _INDEX_BYTES)


def _look_at(path: str) -> None:
    """Refuse what is no file: merely to open a pipe may take forever."""
    try:
        info = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise NoHistory(f"{path} does not exist: nothing has been kept there") from None
    if not stat.S_ISREG(info.st_mode):
        raise HistoryFileError(f"{path} is no file; remove it")


def first_id(connection: sqlite3.Connection, wanted: HandoffFilter, below: int = _NO_END) -> int:
    """Return the number at which the newest `wanted.limit` records below `below` begin."""
    if wanted.limit is None:
        return 0
    if wanted.limit == 0:
        return below
    where, values = _where(wanted)
    found = connection.execute(
        f"SELECT id FROM handoffs WHERE id < ?{where} ORDER BY id DESC LIMIT 1 OFFSET ?",  # noqa: S608
        (below, *values, wanted.limit - 1),
    ).fetchone()
    return 0 if found is None else int(found[0])


def page(
    connection: sqlite3.Connection,
    path: str,
    wanted: HandoffFilter,
    first: int,
    below: int = _NO_END,
    number: int = PAGE_RECORDS,
) -> list[RawRow]:
    """Return up to `number` records that are wanted, the oldest first.

    Args:
        first, below: numbers from the one on and up to the other, which is not among them.
    """
    where, values = _where(wanted)
    with translated(path, "read"):
        return connection.execute(
            "SELECT id, record FROM handoffs"  # noqa: S608 - the words are ours, the values bound
            f" WHERE id >= ? AND id < ?{where} ORDER BY id LIMIT ?",
            (first, below, *values, number),
        ).fetchall()


def _records(connection: sqlite3.Connection, path: str, wanted: HandoffFilter) -> Iterator[Row]:
    check_version(connection, path)
    if not schema.version_of(connection):
        return
    first = first_id(connection, wanted)
    yield from pages(connection, path, wanted, first)


def pages(
    connection: sqlite3.Connection,
    path: str,
    wanted: HandoffFilter,
    first: int,
    below: int = _NO_END,
) -> Iterator[Row]:
    """Yield what is wanted page by page; between two of them nothing of the file is held."""
    while rows := page(connection, path, wanted, first, below):
        for key, record in rows:
            yield key, fields_of(path, record)
        first = rows[-1][0] + 1


def check_version(connection: sqlite3.Connection, path: str | os.PathLike[str]) -> None:
    """Refuse the file of a later version.

    Raises:
        HistoryTooNew: it is one.
    """
    version = schema.version_of(connection)
    if version > schema.VERSION:
        raise too_new(path, version, schema.VERSION)


def time_ms_of(moment: dt.datetime) -> int:
    """Return milliseconds since 1970, the next whole one; the column `time_ms`."""
    since = moment - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    return math.ceil(since / dt.timedelta(milliseconds=1))


def _where(wanted: HandoffFilter) -> tuple[str, list[Any]]:
    """Return what follows another condition, and its values."""
    text = ""
    values: list[Any] = []
    for name in WORDS:
        word = getattr(wanted, name)
        if word is not None:
            text += f" AND {name} = ?"
            values.append(str(word))
    if wanted.since is not None:
        text += " AND time_ms >= ?"
        values.append(time_ms_of(wanted.since))
    return text, values


def fields_of(path: str, record: object) -> dict[str, Any]:
    """Return the fields of a record's JSON.

    Raises:
        HistoryDamaged: it is not what was written: a JSON object in ASCII, with its time.
    """
    if isinstance(record, str) and record.isascii():
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            fields = json.loads(record)
            parse_time(fields["time"])
            if isinstance(fields, dict):
                return fields
    raise damaged(path, "a record in it is not what was written")
