"""What learned costs are about: this model, this decoder, this provider, as they are on disk."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping

from onebitd.core.config import Config


def subject_of(config: Config, decoder: str) -> dict[str, str]:
    """Return `model`, `decoder` and `provider`, each a text that changes when it does.

    A program or a model that was replaced has another size or time of change, and so other costs.

    Args:
        config: effective.
        decoder: llama-server's program, as it is started.
    """
    backend, provider = config.backend, config.provider
    words = [*backend.args, backend.device, str(config.model.ctx_size)]
    return {
        "model": _file(config.model.path),
        "decoder": f"{_file(shutil.which(decoder) or decoder)} {_digest(words, backend.env)}",
        "provider": "none"
        if provider.program is None
        else f"{_file(provider.program)} {_digest([str(provider.elfs)], provider.env)}",
    }


def _file(path: str) -> str:
    try:
        found = os.stat(path)
    except OSError:
        return path
    return f"{path} {found.st_size} {found.st_mtime_ns}"


def _digest(words: list[str], env: Mapping[str, str]) -> str:
    """The values of an environment may be secrets, and this goes into a file."""
    parts = [*words, *(f"{name}={value}" for name, value in sorted(env.items()))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
