"""The file of learned costs: `costs.json` in the state directory.

It is replaced as a whole, so that a reader, and whoever comes after a kill, finds the old one or
the new one. It tells lengths of prompts and replies: its mode is 0600.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import threading
from pathlib import Path
from typing import Final, NoReturn

from onebitd.core.errors import OnebitError

MOST_BYTES: Final = 1 << 20
"""A file larger than that is not one that we wrote."""
_OPEN_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class CostFileError(OnebitError):
    """The file cannot be read or written; the message names it and why."""


class CostFile:
    """Reads and replaces one file.

    Args:
        path: its directory is made when it is first written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._damaged = path.with_name(f"{path.name}.damaged")
        self._new = path.with_name(f"{path.name}.new")
        self._writing = threading.Lock()

    def read(self) -> object:
        """Return the document, None when there is no file.

        Raises:
            ValueError: it is damaged; see `set_aside`.
            CostFileError: it cannot be read.
        """
        try:
            descriptor = os.open(self.path, _OPEN_FLAGS)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unusable("read", error) from error
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise CostFileError(f"{self.path} is no file; remove it")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                data = file.read(MOST_BYTES + 1)
        except OSError as error:
            raise self._unusable("read", error) from error
        finally:
            os.close(descriptor)
        if len(data) > MOST_BYTES:
            raise ValueError("it is far too large")
        try:
            return json.loads(data, parse_constant=_refuse_constant)
        except RecursionError:
            raise ValueError("it is nested without end") from None
        except ValueError as error:  # also bytes that are no text
            raise ValueError(f"it is no JSON: {error}") from None

    def set_aside(self) -> Path:
        """Rename the file and return its new name; an older one of that name is replaced.

        Whoever damaged it may have opened it to others.

        Raises:
            CostFileError: the directory does not allow it.
        """
        try:
            self.path.chmod(0o600)
            self.path.rename(self._damaged)
        except OSError as error:
            raise self._unusable("set aside", error) from error
        return self._damaged

    def write(self, document: bytes) -> None:
        """Replace the file; may be called in a thread, and a second call waits for the first.

        Raises:
            CostFileError: it cannot be written; the old file is as it was.
        """
        with self._writing:
            try:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._new.unlink(missing_ok=True)  # of a daemon that was killed
                self._replace(document)
            except OSError as error:
                with contextlib.suppress(OSError):
                    self._new.unlink()
                raise self._unusable("written", error) from error

    def _replace(self, document: bytes) -> None:
        descriptor = os.open(self._new, _NEW_FLAGS, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(document)
            file.flush()
            # Else the new name could survive a power cut, and what it names not.
            os.fdatasync(descriptor)
        self._new.rename(self.path)

    def _unusable(self, verb: str, error: OSError) -> CostFileError:
        return CostFileError(f"{self.path} cannot be {verb}: {error.strerror}")


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")
