"""The key of an instance's prompt hashes: `history.key` in the state directory, 0600."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from onebitd.adapters import private_file
from onebitd.core.prompt_hash import KEY_BYTES


def load_key(path: Path) -> bytes:
    """Return the key in the file; a new one, put there, when it has none.

    Where no file can be kept, the key is new with each call.
    """
    with contextlib.suppress(OSError, private_file.NoFile):
        found = private_file.read(path, KEY_BYTES)
        if found is not None and len(found) == KEY_BYTES:
            return found
    key = os.urandom(KEY_BYTES)
    with contextlib.suppress(OSError):
        private_file.replace(path, key)
    return key


def remove_key(path: Path) -> None:
    """Remove the file, if it is there and may be removed."""
    with contextlib.suppress(OSError):
        path.unlink()
