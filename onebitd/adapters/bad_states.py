"""The last state files that were refused (`bad-states/`), for whoever works on the provider.

A refused file is taken out of its run at once, by a rename. It reaches the directory, which is
usually on another file system, from a task of its own: no request waits for the disk. They hold
prompts, so that the directory is 0700 and the files are 0600.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import structlog
import trio

from onebitd.adapters.slot_files import SlotFiles
from onebitd.core import provider_contract

log = structlog.get_logger()

_STATE: Final = ".state"
_SUFFIXES: Final = (_STATE, ".ids", ".txt")
_UNFINISHED: Final = ".part"
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_-]")
_MOST_OF_AN_ID: Final = 64
_SPACE_RESERVE_BYTES: Final = 64 << 20
"""Not for us: the log and the rest of the machine live on that disk too."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Refused:
    """A refused file that waits in the slot directory to be moved."""

    name: str
    stem: str
    tokens: Sequence[int]
    sentence: str
    request_id: str
    most: int


class BadStates:
    """Keeps refused state files.

    Args:
        directory: made when the first file is kept.
        slots: where refused files wait.
    """

    def __init__(self, directory: Path, slots: SlotFiles) -> None:
        self.directory = directory
        self._slots = slots
        self._waiting: _Refused | None = None
        self._arrived = trio.Event()
        self._has_warned = False

    def take(
        self, path: Path, tokens: Sequence[int], sentence: str, request_id: str, most: int
    ) -> None:
        """Take a refused file away to be kept; never raises, and does not wait for the disk.

        Of several that come while another one is written, the newest is kept.

        Args:
            path: in the slot directory or below; whatever is no regular file stays there.
            tokens: what the provider was given.
            sentence: why it was refused.
            request_id: as the client sent it, maybe.
            most: how many files are kept; 0 keeps none.
        """
        if not most:
            return
        name = self._slots.new_name()
        try:
            info = path.lstat()
            if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
                return
            path.rename(self._slots.path / name)
        except OSError:
            return  # no file, or not ours any more
        now = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        stem = f"{now}-{_UNSAFE.sub('_', request_id)[:_MOST_OF_AN_ID]}"
        self._forget_waiting()
        self._waiting = _Refused(name, stem, tuple(tokens), sentence, request_id, most)
        self._arrived.set()

    async def run(self) -> None:
        """Write what was taken, until cancelled; what then still waits is removed."""
        try:
            while True:
                await self._arrived.wait()
                self._arrived = trio.Event()
                refused, self._waiting = self._waiting, None
                if refused is not None:
                    await self._keep(refused)
        finally:
            self._forget_waiting()

    def _forget_waiting(self) -> None:
        if self._waiting is not None:
            self._slots.remove(self._waiting.name)
            self._waiting = None

    async def _keep(self, refused: _Refused) -> None:
        source = self._slots.path / refused.name
        try:
            # A cancel leaves the thread to itself: its unfinished file goes with the next one.
            await trio.to_thread.run_sync(
                _write, source, self.directory, refused, abandon_on_cancel=True
            )
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning(
                    "bad_state_not_kept",
                    request_id=refused.request_id,
                    line=f"{self.directory} cannot hold a refused state file: {error.strerror}; "
                    "make room, or set handoff.keep_bad_states = 0",
                )
            return
        finally:
            self._slots.remove(refused.name)
        self._has_warned = False
        path = str(self.directory / f"{refused.stem}{_STATE}")
        log.info(
            "bad_state_kept",
            request_id=refused.request_id,
            path=path,
            line=f"the refused state file is kept: {path}",
        )


def _write(source: Path, directory: Path, refused: _Refused) -> None:
    """Move one file in, with its ids and reason; makes room by removing the oldest ones."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = directory.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        raise NotADirectoryError(0, "it is not a directory of ours")
    directory.chmod(0o700)
    _prune(directory, refused.most - 1)
    target = directory / f"{refused.stem}{_STATE}"
    texts = {
        ".ids": provider_contract.format_tokens(refused.tokens),
        ".txt": refused.sentence.encode() + b"\n",
    }
    try:
        _move(source, target)
        for suffix, text in texts.items():
            with _private(target.with_suffix(suffix)) as descriptor:
                _write_all(descriptor, text)
    except OSError:
        for suffix in (*_SUFFIXES, _UNFINISHED):
            target.with_suffix(suffix).unlink(missing_ok=True)
        raise


def _prune(directory: Path, most: int) -> None:
    """Remove what is unfinished, and the oldest files beyond so many."""
    names = sorted(entry.name for entry in directory.iterdir())
    states = [name for name in names if name.endswith(_STATE)]
    old = {name.removesuffix(_STATE) for name in states[: max(0, len(states) - most)]}
    for name in names:
        stem, dot, last = name.rpartition(".")
        known = dot + last in _SUFFIXES and (stem in old or f"{stem}{_STATE}" not in states)
        if known or name.endswith(_UNFINISHED):
            (directory / name).unlink(missing_ok=True)


def _move(source: Path, target: Path) -> None:
    source.chmod(0o600)
    with contextlib.suppress(OSError):  # another file system
        source.rename(target)
        return
    unfinished = target.with_suffix(_UNFINISHED)
    with source.open("rb") as file, _private(unfinished) as descriptor:
        left = os.fstat(file.fileno()).st_size
        room = os.fstatvfs(descriptor)
        if room.f_bavail * room.f_frsize < left + _SPACE_RESERVE_BYTES:
            raise OSError(0, f"no room for {left >> 20} MiB")
        while left > 0:  # a file that shrinks or grows meanwhile is its writer's affair
            sent = os.sendfile(descriptor, file.fileno(), None, left)
            if not sent:
                break
            left -= sent
    unfinished.rename(target)


@contextlib.contextmanager
def _private(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
