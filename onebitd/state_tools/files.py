"""The files that `onebitctl state` reads.

State files are read with pread: a page that is truncated away under a mapping is a SIGBUS.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from onebitd.adapters.pread import PreadSource
from onebitd.core import gguf_header
from onebitd.core.errors import StateFileError, UsageError
from onebitd.core.state_file import parse
from onebitd.core.state_layout import StateFile

_MOST_IDS_BYTES: Final = 1 << 26


class OpenState(PreadSource):
    """An open state file as a source for the core; `path` is what messages call it."""

    def __init__(self, path: str, descriptor: int) -> None:
        super().__init__(descriptor)
        self.path = path

    def __getitem__(self, index: slice) -> bytes:
        try:
            return super().__getitem__(index)
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be read: {error.strerror}") from error

    def parse(self) -> StateFile:
        """Read everything but the values.

        Raises:
            UsageError: it is no state file that can be read.
        """
        with self.named():
            return parse(self)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Turn what the core says about the file into an error that names it."""
        try:
            yield
        except StateFileError as error:
            raise UsageError(f"{self.path}: {error}") from error


@contextlib.contextmanager
def open_state(path: str) -> Iterator[OpenState]:
    """Yield a state file, open for reading.

    Raises:
        UsageError: it is missing, no regular file, or must not be read.
    """
    descriptor = _open_regular(path)
    try:
        yield OpenState(path, descriptor)
    finally:
        os.close(descriptor)


def read_ids(path: str) -> list[int]:
    """Return the ids of an ids file: one decimal number a line, as a provider gets it.

    Raises:
        UsageError: it cannot be read, or a line is no token id.
    """
    descriptor = _open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(_MOST_IDS_BYTES + 1)
    if len(data) > _MOST_IDS_BYTES:
        raise UsageError(f"{path}: more than {_MOST_IDS_BYTES >> 20} MiB are no ids file")
    ids = []
    for number, line in enumerate(data.splitlines(), 1):
        word = line.strip()
        if not word.isdigit() or len(word) > 10 or int(word) >= 1 << 31:
            raise UsageError(f"{path}: line {number} is no token id; one decimal number a line")
        ids.append(int(word))
    return ids


def read_model(path: str) -> gguf_header.GgufHeader:
    """Return what a GGUF says about its model.

    Raises:
        UsageError: it is missing or no GGUF that can be read.
    """
    with os.fdopen(_open_regular(path), "rb") as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                return gguf_header.read(mapped)
        except (gguf_header.GgufError, OSError, ValueError) as error:
            raise UsageError(f"{path}: {error}") from error


def write_whole(path: str, data: bytes) -> None:
    """Write a file of the user's, in one piece as far as others can see.

    A symbolic link stays one, and what is no regular file is left alone.

    Raises:
        UsageError: it cannot be written.
    """
    _write_then(path, data, lambda part, target: part.replace(target))


def check_writable(path: str) -> None:
    """Find out before long work whether `write_whole` could write there; the file stays as it is.

    Raises:
        UsageError: it could not.
    """
    _write_then(path, b"", lambda part, _: part.unlink())


def _write_then(path: str, data: bytes, finish: Callable[[Path, Path], object]) -> None:
    target = Path(os.path.realpath(path))
    if os.path.lexists(target) and not target.is_file():
        raise UsageError(f"{path}: not a regular file; it is left as it is")
    part = Path(f"{target}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        finish(part, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error


def _open_regular(path: str) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "the name has a NUL byte"
        raise UsageError(f"{path}: cannot be opened: {why}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UsageError(f"{path}: not a regular file")
    return descriptor
