"""How to get a Python package that is missing, which depends on whose the interpreter is."""

from __future__ import annotations

import shlex
import sys
from typing import Final

_SYSTEM: Final = "/usr/bin/"


def install_hint(
    package: str,
    otherwise: str,
    *,
    executable: str = sys.executable,
    environment: bool = sys.prefix != sys.base_prefix,
) -> str:
    """Return the command that gives an interpreter a package.

    Args:
        package: its name, for pip.
        otherwise: what helps with the system's interpreter, into which pip does not install.
        executable: the interpreter, by its path; this one unless given.
        environment: whether it is one of a virtual environment.
    """
    if not environment and executable.startswith(_SYSTEM):
        return otherwise
    return f"{shlex.quote(executable)} -m pip install {shlex.quote(package)}"
