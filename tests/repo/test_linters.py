"""The linters are tests: a newcomer learns the house's rules from a failing test."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.llama_builds import ROOT

LINT_IMPORTS = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def run_tool(module: str, *args: str) -> None:
    """Run a Python tool at the root; skip without it (fail under CI), fail with its output."""
    if importlib.util.find_spec(module) is None:
        reason = f"{module} is not installed: pip install --group lint"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, *args],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "160"},
    )
    if done.returncode != 0:
        pytest.fail(f"{module} {' '.join(args[2:])}\n{done.stdout}", pytrace=False)


def test_ruff_check_whole_tree_has_nothing_to_say() -> None:
    """Every rule of pyproject.toml holds, in package and tests."""
    run_tool("ruff", "-m", "ruff", "check")


def test_ruff_format_whole_tree_changes_nothing() -> None:
    """Every file is formatted."""
    run_tool("ruff", "-m", "ruff", "format", "--check")


def test_mypy_strict_package_and_tests_are_typed() -> None:
    """mypy's strict mode passes on package and tests."""
    run_tool("mypy", "-m", "mypy", "--strict")


def test_import_linter_arrows_point_down() -> None:
    """The layers of the package hold, and what must not be imported is not."""
    run_tool("importlinter", "-c", LINT_IMPORTS)
