"""Where the kit works, and whether the files of its cases have room there.

On a full disk the decoder's own files are cut short, and a good provider would be blamed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from onebitd.core.errors import UsageError

MARGIN_BYTES: Final = 16 << 20
"""Room for short states, ids files and what a provider puts beside its file."""


def temporary_directory(environ: Mapping[str, str]) -> Path:
    """Return the directory for temporary files; UsageError when it is of no use.

    `tempfile` would take another one without a word when TMPDIR cannot be used.
    """
    named = environ.get("TMPDIR")
    if not named:
        try:
            return Path(tempfile.gettempdir())
        except OSError as error:
            raise UsageError("no directory for temporary files; set TMPDIR to one") from error
    if not os.path.isdir(named):
        raise UsageError(f"TMPDIR={named}: no such directory; make it, or set TMPDIR to another")
    if not os.access(named, os.W_OK | os.X_OK):
        raise UsageError(f"TMPDIR={named}: cannot be written to; set TMPDIR to another directory")
    return Path(os.path.abspath(named))


def require(directory: Path, n_bytes: int) -> None:
    """See that so many bytes, and a margin, are free in a directory; UsageError names it."""
    found = os.statvfs(directory)
    free, needed = found.f_bavail * found.f_frsize, n_bytes + MARGIN_BYTES
    if found.f_blocks and free < needed:  # some file systems do not tell
        smaller = ", or give a smaller --ctx-size" if n_bytes else ""
        raise UsageError(
            f"{directory}: {free >> 10} KiB are free and the cases need {-(-needed >> 10)} KiB; "
            f"make room or set TMPDIR to another directory{smaller}"
        )
