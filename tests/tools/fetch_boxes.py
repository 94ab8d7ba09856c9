"""Make the root file systems of tests/systemd and the wheels that are installed in them.

    python -m tests.tools.fetch_boxes

    .venv/boxes/bookworm, trixie            minimal Debian, each with systemd and python3
    .venv/boxes/wheels-3.11, wheels-3.13    what `pip install .` takes, for their python3

What is there is left alone as long as its recipe (the constants below) is the same. Each is made
as NAME.part, its log in NAME.log, and renamed when it is whole. Debian comes from wherever
mmdebstrap takes it by default, the wheels through pip. Only root can make a root file system, and
only on Linux with mmdebstrap: where that is not so, the tests that need one are skipped, so this
says why and ends with status 0; under CI=true with 1.
Standard library only.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import tomllib
import uuid
from collections.abc import Sequence
from pathlib import Path

from tests.llama_builds import ROOT
from tests.systemd.box import BOXES_DIR, PROGRAMS, SUITES, Suite

# python3-numpy and python3-markupsafe: the compiled modules that onebitd's .deb depends on.
# libpam-systemd, dbus-user-session: user services. libgomp1: the prebuilt llama-server.
PACKAGES = [
    *("bash-completion", "curl", "dbus", "dbus-user-session", "iproute2", "libgomp1"),
    *("libpam-systemd", "libstdc++6", "man-db", "procps", "psmisc", "python3"),
    *("python3-markupsafe", "python3-numpy", "python3-venv", "systemd", "systemd-sysv"),
    "util-linux",
]
# Only while it is made: what is installed in a box later is installed whole.
DPKG_OPTIONS = (
    "force-unsafe-io",
    *(f"path-exclude=/usr/share/{folder}/*" for folder in ("doc", "locale", "man")),
)
# Units that want the network, a terminal, or an hour's silence.
MASKED = [
    *("apt-daily.timer", "apt-daily-upgrade.timer", "console-getty.service"),
    *("dpkg-db-backup.timer", "e2scrub_all.timer", "fstrim.timer", "man-db.timer"),
]
FILES = {
    "etc/hostname": "box\n",
    "etc/hosts": "127.0.0.1 localhost box\n::1 localhost\n",
    "etc/resolv.conf": "",
    # Kept over a reboot, so that a test can read what the last boot said.
    "etc/systemd/journald.conf.d/box.conf": "[Journal]\nStorage=persistent\n",
    # Younger than /usr: no boot has to rebuild caches.
    "etc/.updated": "",
    "var/.updated": "",
}
STAMP = "etc/box-recipe.json"  # in a root file system; in a wheel folder its last part


class FetchError(Exception):
    """Something cannot be made; the message is one line, and names the log when there is one."""


def say(line: str) -> None:
    """Report progress: the first time takes a minute."""
    print(f"fetch_boxes: {line}", file=sys.stderr, flush=True)


def obstacle() -> str | None:
    """Return why no root file system can be made or booted here, None when nothing is known."""
    if sys.platform != "linux":
        return "not Linux"
    if os.geteuid() != 0:
        return "not root"
    missing = [name for name in ("mmdebstrap", *PROGRAMS) if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


def is_current(folder: Path, stamp: Path, recipe: object) -> bool:
    """Return whether `folder` was made whole, and by this recipe."""
    try:
        return bool(json.loads((folder / stamp).read_text()) == recipe)
    except (OSError, ValueError):
        return False


def put_in_place(part: Path, folder: Path, stamp: Path, recipe: object) -> None:
    """Stamp what is complete and give it its name; what had the name is removed."""
    (part / stamp).write_text(json.dumps(recipe))
    old = folder.with_name(folder.name + ".old")
    remove(old)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    remove(old)


def remove(folder: Path) -> None:
    """Remove a folder if it exists; FetchError."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise FetchError(f"{folder} cannot be removed: {error.strerror}") from error


class Rootfs:
    """One root file system in the making: start() and then finish()."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self._part = suite.rootfs.with_name(suite.name + ".part")
        self._log = suite.rootfs.with_name(suite.name + ".log")
        options = [f"--dpkgopt={option}" for option in DPKG_OPTIONS]
        self._command = [
            *("mmdebstrap", "--mode=root", "--format=directory", "--variant=minbase"),
            *("--include=" + ",".join(PACKAGES), *options, suite.name),
        ]
        self._recipe = {"command": self._command, "masked": MASKED, "files": FILES}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start to make it, unless it is there. What runs ends with this process."""
        if is_current(self._suite.rootfs, Path(STAMP), self._recipe):
            return
        say(f"making a Debian {self._suite.name} for the systemd tests")
        remove(self._part)
        # Its own mount and PID namespace: whatever the packages' scripts start or mount ends too.
        alone = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork"]
        alone += ["--kill-child", "--mount-proc", "--"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*alone, *self._command, os.fspath(self._part)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def finish(self) -> None:
        """Wait for it, make it a box's and put it in place; FetchError."""
        if self._process is None:
            return
        if self._process.wait() != 0:
            raise FetchError(f"Debian {self._suite.name} could not be made: see {self._log}")
        furnish(self._part)
        put_in_place(self._part, self._suite.rootfs, Path(STAMP), self._recipe)


def furnish(root: Path) -> None:
    """Give a fresh root file system the files that make it the machine of a test."""
    # Of the host, or for the installation alone.
    for name in ("etc/apt/apt.conf.d/99mmdebstrap", "etc/dpkg/dpkg.cfg.d/99mmdebstrap", *FILES):
        (root / name).unlink(missing_ok=True)
    # Without an identity each boot would be the first one, which enables units by preset.
    for name, text in {**FILES, "etc/machine-id": f"{uuid.uuid4().hex}\n"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for unit in MASKED:
        path = root / "etc/systemd/system" / unit
        path.unlink(missing_ok=True)
        path.symlink_to("/dev/null")


def pip(*args: str, log: Path) -> None:
    """Run pip, its output in `log`; FetchError."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *args]
    with log.open("ab") as output:
        done = subprocess.run(command, stdout=output, stderr=output, check=False)
    if done.returncode != 0:
        raise FetchError(f"onebitd's dependencies could not be fetched: see {log}")


def fetch_wheels(suites: Sequence[Suite]) -> None:
    """Fill the wheel folder of each suite that has none for today's pyproject.toml; FetchError."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted: list[str] = [
        *document["project"]["dependencies"],
        *document["build-system"]["requires"],
    ]
    recipe = {"dependencies": wanted, "machine": platform.machine()}
    stamp = Path(Path(STAMP).name)
    due = [suite for suite in suites if not is_current(suite.wheels, stamp, recipe)]
    if not due:
        return
    say(f"fetching wheels for Python {', '.join(suite.python for suite in due)}")
    log = BOXES_DIR / "wheels.log"
    log.unlink(missing_ok=True)
    # A package without a wheel is built into one here: for all Pythons, as it has no compiled code.
    built = BOXES_DIR / "wheels-built.part"
    remove(built)
    pip("wheel", "--wheel-dir", str(built), *wanted, log=log)
    for suite in due:
        part = suite.wheels.with_name(suite.wheels.name + ".part")
        remove(part)
        pip(
            *("download", "--only-binary", ":all:", "--find-links", str(built)),
            *("--implementation", "cp", "--python-version", suite.python, *platforms()),
            *("--dest", str(part), *wanted),
            log=log,
        )
        put_in_place(part, suite.wheels, stamp, recipe)
    remove(built)


def platforms() -> list[str]:
    """Return pip's arguments for the wheels that run on both suites (glibc 2.36 and later)."""
    machine = platform.machine()
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(36, 16, -1)]
    return [word for tag in (*tags, f"manylinux2014_{machine}") for word in ("--platform", tag)]


def make_all() -> None:
    """Make what is missing, both root file systems and the wheels at the same time; FetchError."""
    BOXES_DIR.mkdir(parents=True, exist_ok=True)
    with (BOXES_DIR / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two makes at once: the second finds everything there
        systems = [Rootfs(suite) for suite in SUITES]
        for system in systems:
            system.start()
        fetch_wheels(SUITES)
        for system in systems:
            system.finish()


def main() -> int:
    """Make what is missing; 0, or 1 with one line on stderr."""
    reason = obstacle()
    if reason is not None:
        say(f"the systemd tests are left out: {reason}")
        return 1 if os.environ.get("CI") == "true" else 0
    try:
        make_all()
    except FetchError as error:
        say(f"error: {error}; check the network, then run make again")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
