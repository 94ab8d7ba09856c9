"""The state files of an audit, in the slot directory: made private, read without mapping them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from onebitd.adapters.pread import PreadSource
from onebitd.adapters.slot_files import SlotFiles


class AuditFiles:
    """Files that nobody but decoder and daemon has a name for.

    Args:
        slots: the directory; its sweep takes away what a crash leaves.
    """

    def __init__(self, slots: SlotFiles) -> None:
        self._slots = slots

    def reserve(self) -> str:
        """Make an empty file with mode 0600 for the decoder to save to; return its name.

        Raises:
            OSError: it cannot be made.
        """
        name = self._slots.new_name()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        os.close(os.open(self._slots.path / name, flags, 0o600))
        return name

    def remove(self, name: str) -> None:
        """Remove a file; it may be gone already."""
        self._slots.remove(name)

    def free_bytes(self) -> int:
        """Return how much fits, 0 when the directory is gone."""
        try:
            info = os.statvfs(self._slots.path)
        except OSError:
            return 0
        return info.f_bavail * info.f_frsize

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[PreadSource]:
        """Open a file for the block.

        Raises:
            OSError: it is gone.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._slots.path / name, flags)
        try:
            yield PreadSource(descriptor)
        finally:
            os.close(descriptor)
