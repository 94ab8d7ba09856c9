"""How the checks are started in the service's place: by its Python, and with its onebitd."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import onebitd
from onebitd.doctor import service


def package(directory: Path, said: str) -> Path:
    """Make an onebitd whose checks only say a word."""
    inside = directory / "onebitd/doctor/inside.py"
    inside.parent.mkdir(parents=True)
    inside.write_text(f"def main():\n    print({said!r})\n    return 0\n")
    (directory / "onebitd/__init__.py").touch()
    return directory


@pytest.mark.parametrize(
    ("program", "environ", "said"),
    [
        # As the Debian package has it: no path but the program's own leads to its modules.
        ('#!{python} -IS\nimport sys\nsys.path.insert(0, "{theirs}")\n', {}, "theirs"),
        ("#!{python}\n", {"PYTHONPATH": "{theirs}"}, "theirs"),
        ("#!{python} -IS\n", {}, "ours"),
        ("#!{python} -IS\n", {"PYTHONPATH": "{theirs}"}, "ours"),
    ],
    ids=["private", "environment", "none", "isolated"],
)
def test_checks_are_those_of_the_service_or_else_ours(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    environ: dict[str, str],
    said: str,
) -> None:
    """What its program would import is what is run, with its options; ours only fills in."""
    theirs, ours = package(tmp_path / "a b", "theirs"), package(tmp_path / "ours", "ours")
    monkeypatch.setattr(onebitd, "__file__", str(ours / "onebitd/__init__.py"))
    known = {"python": sys.executable, "theirs": str(theirs)}
    script = tmp_path / "onebitd"
    script.write_text(program.format_map(known))
    given = {name: value.format_map(known) for name, value in environ.items()}
    done = subprocess.run(
        service.checking_command(str(script)),
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.defpath, **given},
        cwd=tmp_path,
    )
    assert (done.stdout, done.stderr, done.returncode) == (f"{said}\n", "", 0)


@pytest.mark.parametrize("head", [None, b"\x7fELF", b"#!/bin/sh\n"])
def test_checks_of_a_program_that_is_no_script_of_python_run_by_ours(
    tmp_path: Path, head: bytes | None
) -> None:
    """A wrapper, or one that cannot be read."""
    script = tmp_path / "onebitd"
    if head is not None:
        script.write_bytes(head)
    command = service.checking_command(str(script))
    assert command[0] == sys.executable
    assert command[-1] == str(Path(onebitd.__file__).parents[1])
