"""What can be wrong with the history file, and SQLite's words for it put into ours."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from typing import Final

from onebitd.adapters.accounts import user_name
from onebitd.core.errors import OnebitError


class HistoryFileError(OnebitError):
    """The file cannot be read or written; the message names it and why."""


class NoHistory(HistoryFileError):
    """There is no such file: no daemon of this instance has kept anything yet."""

    exit_status = 3


class HistoryDenied(HistoryFileError):
    """This user may not read it, or not write it."""

    exit_status = 4


class HistoryDamaged(HistoryFileError):
    """What is in it is not what a daemon wrote."""


class HistoryTooNew(HistoryFileError):
    """A later onebitd wrote it."""


class HistoryNotOpen(HistoryFileError):
    """The store is closed: another call has found why, and says so."""


class HistoryGrown(HistoryFileError):
    """Another program has added records: their numbers are taken."""


_WORDS: Final = {
    sqlite3.SQLITE_BUSY: "another program has locked it",
    sqlite3.SQLITE_LOCKED: "another program has locked it",
    sqlite3.SQLITE_READONLY: "it, its directory or its file system is read-only",
    sqlite3.SQLITE_IOERR: "input/output error",
    sqlite3.SQLITE_FULL: "no room is left on its disk",
    sqlite3.SQLITE_CANTOPEN: "it, or a file beside it, cannot be opened",
    sqlite3.SQLITE_INTERRUPT: "the search was given up",
}
_DAMAGE: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR})
"""The last is a table that is not there or another one: every statement here is right."""


@contextlib.contextmanager
def translated(path: str | os.PathLike[str], verb: str) -> Iterator[None]:
    """Turn what SQLite and the kernel raise into our errors; `verb`: `read` or `written`."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", -1) & 0xFF
        # Python finds by itself, and has no code for it, that a text is no UTF-8.
        if code in _DAMAGE or (code == 0xFF and isinstance(error, sqlite3.OperationalError)):
            raise damaged(path, str(error)) from error
        why = _WORDS.get(code, str(error))
        raise HistoryFileError(f"{path} cannot be {verb}: {why}") from error
    except PermissionError as error:
        raise HistoryDenied(_denied(path, verb)) from error
    except OSError as error:
        raise HistoryFileError(f"{path} cannot be {verb}: {error.strerror}") from error


def damaged(path: str | os.PathLike[str], why: str) -> HistoryDamaged:
    """Return the error of a file that is not what a daemon wrote."""
    return HistoryDamaged(f"{path} is damaged: {why}")


def too_new(path: str | os.PathLike[str], version: int, known: int) -> HistoryTooNew:
    """Return the error of a file of a later version."""
    return HistoryTooNew(
        f"{path} has format {version}, and this onebitd knows formats up to {known}:"
        " a later one wrote it; use that one, or move the file away"
    )


def _denied(path: str | os.PathLike[str], verb: str) -> str:
    owner = ""
    with contextlib.suppress(OSError):
        owner = f": it belongs to {user_name(os.stat(path).st_uid)}"
    return f"permission denied: {path} cannot be {verb}{owner}; use sudo, or be that user"
