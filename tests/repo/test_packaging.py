"""What is installed: the wheel's content, and the papers that go with the package."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

import onebitd
from onebitd.core import unit_layout
from tests.llama_builds import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
UNREACHABLE = ("No matching distribution found", "Could not find a version", "Connection")


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Build the wheel and return the names in it; skip when its build backend cannot be had."""
    home = tmp_path_factory.mktemp("wheel")
    isolation = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps"]
    done = subprocess.run(
        [*command, *isolation, "--wheel-dir", str(home), str(ROOT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        offline = not isolation and any(word in done.stdout for word in UNREACHABLE)
        if offline and os.environ.get("CI") != "true":
            pytest.skip("hatchling is not installed and cannot be fetched")
        pytest.fail(done.stdout, pytrace=False)
    (path,) = home.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        return wheel.namelist()


UNIT_PLACES = {
    "": "lib/systemd/system",
    "user": "lib/systemd/user",
    "sysusers.d": "lib/sysusers.d",
    "tmpfiles.d": "lib/tmpfiles.d",
    "completions": "share/bash-completion/completions",
    "completions/zsh": "share/zsh/site-functions",
    "completions/fish": "share/fish/vendor_completions.d",
    "drop-ins": "share/onebitd/drop-ins",
}


def unit_files() -> list[Path]:
    """Return every file below units/, relative to it, but for what builds the Debian package."""
    found = [path for path in (ROOT / "units").rglob("*") if path.is_file()]
    names = sorted(path.relative_to(ROOT / "units") for path in found)
    return [name for name in names if name.parts[0] != "debian"]


def data_files() -> list[str]:
    """Return where each page, unit and example belongs below the wheel's prefix."""
    found = [f"share/man/man{page.suffix[1:]}/{page.name}" for page in pages()]
    found += [
        f"{UNIT_PLACES[str(unit.parent).removeprefix('.')]}/{unit.name}" for unit in unit_files()
    ]
    return found + [f"share/onebitd/{example.name}" for example in (ROOT / "etc").iterdir()]


def test_wheel_carries_every_page_unit_and_example(wheel_names: list[str]) -> None:
    """Each arrives where its readers look, and nothing else comes along."""
    data = f"onebitd-{onebitd.__version__}.data/data/"
    carried = {name.removeprefix(data) for name in wheel_names if name.startswith(data)}
    assert len(data_files()) >= 18
    assert carried == set(data_files())


def test_install_units_takes_everything_that_the_wheel_carries() -> None:
    """A file that is added to the wheel does not stay behind in the environment."""
    left = [name for name in data_files() if not unit_layout.is_ours(PurePosixPath(name))]
    assert left == []


def test_wheel_carries_every_module_and_nothing_else(wheel_names: list[str]) -> None:
    """The package is whole, types included, and neither tests nor tools come along."""
    sources = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "onebitd").rglob("*")
        if path.suffix in (".py", ".html") or path.name == "py.typed"
    }
    prefix = f"onebitd-{onebitd.__version__}."
    inside = {name for name in wheel_names if not name.startswith(prefix)}
    assert inside == sources


def pages() -> list[Path]:
    """Return the man pages."""
    return sorted((ROOT / "man").iterdir())


def test_version_of_package_is_that_of_pyproject() -> None:
    """`onebitd --version` says what pip says."""
    assert onebitd.__version__ == PROJECT["project"]["version"]


def dependencies() -> list[str]:
    """Return the names of the runtime dependencies."""
    found = [re.match(r"[\w.-]+", line) for line in PROJECT["project"]["dependencies"]]
    return [match.group() for match in found if match]


@pytest.mark.parametrize("name", dependencies())
def test_runtime_dependency_has_its_reason(name: str) -> None:
    """DECISIONS.md says of each why it is there."""
    row = re.search(rf"^\| `{name}` \|(.+)\|$", (ROOT / "DECISIONS.md").read_text(), re.MULTILINE)
    assert row
    assert len(row.group(1)) > 40


def test_decisions_name_no_dependency_that_is_gone() -> None:
    """A dependency that was dropped leaves the table too."""
    text = (ROOT / "DECISIONS.md").read_text()
    table = text.partition("## Runtime dependencies\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([\w.-]+)` \|", table, re.MULTILINE)) == set(dependencies())


def test_changelog_has_unreleased_on_top() -> None:
    """Keep a Changelog: what comes next stands first, and not empty."""
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    body = (ROOT / "CHANGELOG.md").read_text().partition("## [Unreleased]\n")[2]
    assert re.match(r"\s*### (Added|Changed|Deprecated|Removed|Fixed|Security)\n\s*- ", body)


def test_license_is_mit_everywhere() -> None:
    """The file and the metadata say the same."""
    assert (ROOT / "LICENSE").read_text().startswith("MIT License\n")
    assert PROJECT["project"]["license"] == "MIT"
    assert PROJECT["project"]["license-files"] == ["LICENSE"]
