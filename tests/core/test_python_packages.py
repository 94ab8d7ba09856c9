"""What a command says when a Python package is missing."""

from __future__ import annotations

import sys

import pytest

from onebitd.core.python_packages import install_hint


@pytest.mark.parametrize(
    ("executable", "environment", "said"),
    [
        ("/opt/onebitd/bin/python3", True, "/opt/onebitd/bin/python3 -m pip install maps"),
        ("/opt/x y/bin/python", True, "'/opt/x y/bin/python' -m pip install maps"),
        ("/usr/local/bin/python", False, "/usr/local/bin/python -m pip install maps"),
        ("/usr/bin/python3", False, "apt install python3-maps"),
    ],
    ids=["environment", "blank", "own-python", "system-python"],
)
def test_install_hint_for_an_interpreter_is_what_it_takes(
    executable: str, environment: bool, said: str
) -> None:
    """pip of that interpreter, quoted for a shell; the system's package for the system's Python."""
    hint = install_hint(
        "maps", "apt install python3-maps", executable=executable, environment=environment
    )
    assert hint == said


def test_install_hint_unless_told_is_about_this_interpreter() -> None:
    """Tests run in an environment of their own."""
    assert install_hint("maps", "apt") == f"{sys.executable} -m pip install maps"
