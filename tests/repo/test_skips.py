"""What tests/conftest.py makes of tests that are skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.llama_builds import ROOT

SKIPPED = """
import pytest
@pytest.fixture
def absent(): pytest.skip("promtool is not installed")
@pytest.mark.skipif(True, reason="needs root")
def test_marked(): pass
def test_in_setup(absent): pass
def test_in_the_middle(): pytest.skip("cannot mount here")
def test_of_the_machine(): pytest.skip("no IPv6 loopback here")
@pytest.mark.xfail(reason="known")
def test_known(): assert False
"""


@pytest.mark.parametrize(
    ("ci", "ended"),
    [("true", "1 failed, 1 skipped, 1 xfailed, 2 errors"), ("", "4 skipped, 1 xfailed")],
)
def test_skipped_test_fails_in_ci_unless_it_is_the_machine(
    tmp_path: Path, ci: str, ended: str
) -> None:
    """By mark, in a fixture, in the test itself: a suite that is green has been run."""
    (tmp_path / "test_some.py").write_text(SKIPPED)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [*(sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider")],
        cwd=tmp_path,
        env={**os.environ, "CI": ci, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f" {ended} in " in done.stdout, done
    said = "CI=true, where this is no reason to skip a test: needs root"
    assert (said in done.stdout) is (ci == "true"), done


def test_ci_run_says_that_it_is_ci() -> None:
    """Where the tests of the box are to fail when there is none."""
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert lines.index("export CI=true") < lines.index("exec make test </dev/null")
