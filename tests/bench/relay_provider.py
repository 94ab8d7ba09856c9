"""A provider that takes next to no time: a C program where there is a compiler.

It moves a state file that was made before, so there must be a new one for each run: `Shelf`.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from onebitd.core import provider_contract
from tests.standins import paced_provider

SOURCE = Path(__file__).with_name("rename_provider.c")


def install(directory: Path) -> tuple[Path, str]:
    """Put the provider into a directory; return its path, and what it is."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return paced_provider.install(directory), "python -IS provider"
    program = directory / "rename-provider"
    subprocess.run([compiler, "-O2", "-o", str(program), str(SOURCE)], check=True)
    return program, "C provider"


class Shelf:
    """States that were made before, and copies of them for the provider to take.

    Args:
        directory: on the file system of the state files.
    """

    def __init__(self, directory: Path) -> None:
        self.offered = directory / "offered"
        self._kept = directory / "kept"
        self.offered.mkdir()
        self._kept.mkdir()

    def settings(self) -> str:
        """Return the [provider] table for a configuration."""
        variables = f'PACED_STATES = "{self.offered}", PACED_FIXED_MS = "0"'
        return f'[provider]\nenv = {{ {variables}, PACED_MS_PER_TOKEN = "0" }}\n'

    def keep(self, tokens: Sequence[int], state: Path) -> None:
        """Take a state file of these ids."""
        shutil.move(state, self.kept(tokens))

    def kept(self, tokens: Sequence[int]) -> Path:
        """Return where the state of these ids is."""
        return self._kept / paced_provider.state_name(provider_contract.format_tokens(tokens))

    def offer(self, tokens: Sequence[int]) -> None:
        """Have a new copy ready for one run."""
        kept = self.kept(tokens)
        shutil.copyfile(kept, self.offered / kept.name)
