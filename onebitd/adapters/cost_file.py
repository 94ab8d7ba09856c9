"""The file of learned costs: `costs.json` in the state directory.

It is replaced as a whole, so that a reader, and whoever comes after a kill, finds the old one or
the new one. It tells lengths of prompts and replies: its mode is 0600.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Final, NoReturn

from onebitd.adapters import private_file
from onebitd.core.errors import OnebitError

MOST_BYTES: Final = 1 << 20
"""A file larger than that is not one that we wrote."""


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
        self._writing = threading.Lock()

    def read(self) -> object:
        """Return the document, None when there is no file.

        Raises:
            ValueError: it is damaged; see `set_aside`.
            CostFileError: it cannot be read.
        """
        try:
            data = private_file.read(self.path, MOST_BYTES)
        except private_file.NoFile:
            raise CostFileError(f"{self.path} is no file; remove it") from None
        except OSError as error:
            raise self._unusable("read", error) from error
        if data is None:
            return None
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
                private_file.replace(self.path, document)
            except OSError as error:
                raise self._unusable("written", error) from error

    def _unusable(self, verb: str, error: OSError) -> CostFileError:
        return CostFileError(f"{self.path} cannot be {verb}: {error.strerror}")


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")
