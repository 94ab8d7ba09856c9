"""The Debian package, built once for the tests that look into it and those that install it.

It is built by README's line, typed in a copy of this checkout.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests import readme
from tests.llama_builds import ROOT

NO_TOOLS = ("not found:", "not installed:")
NOT_SOURCES = (".*", "__pycache__", "build", "dist", "tests")
OF_MAKE = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
UNREACHABLE = ("No matching distribution found", "Could not find a version", "Connection")


@functools.cache
def built_deb() -> Path:
    """Build the package of this checkout and return it; it is gone when the tests are over.

    Skips the calling test where it cannot be built: no Debian, no debhelper, no way to get wheels.
    Under CI=true it fails.
    """
    home = tempfile.TemporaryDirectory(prefix="onebitd-deb-")
    atexit.register(home.cleanup)
    checkout = Path(home.name) / "checkout"
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(*NOT_SOURCES))
    done = subprocess.run(
        ["sh", "-c", readme.block("make deb").commands[0]],
        cwd=checkout,
        env={name: value for name, value in os.environ.items() if name not in OF_MAKE},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        obstacles = NO_TOOLS + UNREACHABLE
        if os.environ.get("CI") != "true" and any(word in done.stderr for word in obstacles):
            pytest.skip(done.stderr.splitlines()[0])
        pytest.fail(done.stderr, pytrace=False)
    (path,) = checkout.glob("dist/*.deb")
    return path


def dpkg_deb(*args: str | Path) -> str:
    """Run dpkg-deb and return what it printed."""
    done = subprocess.run(["dpkg-deb", *map(str, args)], capture_output=True, text=True, check=True)
    return done.stdout


def newer_deb(deb: Path, version: str, folder: Path) -> Path:
    """Return a package in `folder` that differs from `deb` by its version, onebitd's own too."""
    tree = folder / "tree"
    dpkg_deb("--raw-extract", deb, tree)
    for name, pattern, line in (
        ("DEBIAN/control", r"^Version: .+$", f"Version: {version}"),
        (
            "usr/lib/onebitd/onebitd/__init__.py",
            r"^__version__ = .+$",
            f'__version__ = "{version}"',
        ),
    ):
        text, count = re.subn(pattern, line, (tree / name).read_text(), flags=re.MULTILINE)
        assert count == 1, name
        (tree / name).write_text(text)
    path = folder / f"onebitd_{version}_all.deb"
    dpkg_deb("--root-owner-group", "-Znone", "--build", tree, path)  # nobody sends it anywhere
    return path
