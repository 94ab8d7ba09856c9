"""Fixtures for tests in a booted systemd, over Debian 12 and 13.

In each box: /srv/wheels (what an installation of onebitd takes from elsewhere), /srv/llama
(.venv/llama, when it is installed) and /srv/checkout (this repository), all read-only; and
/srv/kept, where a box leaves what the later boxes of its suite need not make again.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests import readme
from tests.llama_builds import LLAMA_DIR, ROOT
from tests.systemd.box import SUITES, Box, Suite, booted, give_up

OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/srv/wheels"}
"""What tells pip where to find, without a network, what it would fetch."""
INSTALL_UNITS = ("/opt/onebitd/bin/onebitctl", "install-units")
KEPT = "/srv/kept"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the end of the journal of each box that a failed test used to its report."""
    report = yield
    if report.failed:
        used: dict[str, object] = getattr(item, "funcargs", {})
        boxes = {id(value): value for value in used.values() if isinstance(value, Box)}
        for box in boxes.values():
            report.sections.append(("journal of the box", box.diagnosis()))
    return report


@pytest.fixture(scope="session", params=SUITES, ids=lambda suite: suite.name)
def suite(request: pytest.FixtureRequest) -> Suite:
    """Each Debian release in turn; skipped (under CI failed) where its box cannot be booted."""
    suite: Suite = request.param
    suite.require()
    return suite


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    if importlib.util.find_spec("hatchling") is None:
        give_up("hatchling is not installed: run make test")
    home = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps"),
            *("--no-build-isolation", "--wheel-dir", str(home), str(ROOT)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    (path,) = home.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def boot_box(
    suite: Suite, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], AbstractContextManager[Box]]]:
    """A function that boots another box of the suite, with what the boxes of all fixtures have."""
    shown = {suite.wheels: "/srv/wheels", ROOT: "/srv/checkout"}
    if LLAMA_DIR.exists():
        shown[LLAMA_DIR] = "/srv/llama"
    kept = tmp_path_factory.mktemp(f"kept-{suite.name}")
    yield lambda: booted(suite.rootfs, binds_ro=shown, binds={kept: KEPT})
    shutil.rmtree(kept)  # a hundred megabytes, too much to stay with pytest's last runs


@pytest.fixture(scope="session")
def box(boot_box: Callable[[], AbstractContextManager[Box]]) -> Iterator[Box]:
    """The one box that a suite's tests share: each leaves it as it was."""
    with boot_box() as booted_box:
        yield booted_box


@pytest.fixture
def fresh_box(boot_box: Callable[[], AbstractContextManager[Box]]) -> Iterator[Box]:
    """A box that nothing was done in yet, for this test alone."""
    with boot_box() as booted_box:
        yield booted_box


@pytest.fixture(scope="session")
def installed(box: Box) -> Box:
    """The shared box, with onebitd installed by the two commands, no instance enabled."""
    install(box)
    box.run(*INSTALL_UNITS)
    return box


def install(box: Box) -> None:
    """Have onebitd in /opt/onebitd of a box, and nothing outside of it.

    The first box of a suite gets it by the commands; later ones get a copy of what those made,
    which takes half a second instead of twenty.
    """
    if box.exists(f"{KEPT}/opt.tar"):
        box.run("tar", "-C", "/opt", "-xf", f"{KEPT}/opt.tar")
    else:
        install_by_commands(box)


def install_by_commands(box: Box) -> None:
    """Install onebitd in /opt/onebitd of a box: README's lines, typed in a checkout.

    pip compiles: the service may not write below /opt, and would do it at each start.
    """
    for line in readme.block("/usr/bin/python3 -m venv").commands:
        box.run("sh", "-c", f"cd /srv/checkout; {line}", env=OFFLINE, timeout_s=120)
    box.run("tar", "-C", "/opt", "-cf", f"{KEPT}/opt.new", "onebitd")
    box.run("mv", f"{KEPT}/opt.new", f"{KEPT}/opt.tar")
