"""`make deb`: builds dist/onebitd_VERSION_all.deb with Debian's own tools.

A tree below .venv/deb gets what the wheel is made of, this directory as its debian/, and the wheels
of onebitd and all that it requires; dpkg-buildpackage then works without a network. pip's own
configuration says where wheels come from (PIP_NO_INDEX=1 PIP_FIND_LINKS=DIR for a directory). Runs
outside git and not as root too. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from email.utils import formatdate
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parent.parent
SOURCES: Final = (
    "CHANGELOG.md", "DECISIONS.md", "LICENSE", "README.md", "pyproject.toml",
    "etc", "man", "onebitd", "units",
)  # fmt: skip
PYTHON: Final = "/usr/bin/python3"


class BuildFailed(Exception):
    """The package cannot be built; the message says why and what to do."""


def main() -> int:
    """Build the package and print its path; return the exit status."""
    parser = argparse.ArgumentParser(prog="make deb", description="Build the Debian package.")
    parser.add_argument("--build-dir", type=Path, default=ROOT / ".venv" / "deb")
    parser.add_argument("--dist-dir", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    try:
        print(build(args.build_dir, args.dist_dir))
    except BuildFailed as error:
        print(f"make deb: {error}", file=sys.stderr)
        return 1
    return 0


def build(build_dir: Path, dist_dir: Path) -> Path:
    """Build the package below `build_dir` and return it in `dist_dir`; BuildFailed."""
    require_tools()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = debian_version(project["version"])
    if build_dir.exists():
        shutil.rmtree(build_dir)
    tree = build_dir / f"onebitd-{version}"
    assemble(tree, version)
    collect_wheels(tree, build_dir / "pip", project["requires-python"].removeprefix(">="))
    # -d: require_tools() has looked, and no compiler is needed here.
    run(["dpkg-buildpackage", "-b", "-us", "-uc", "-d"], cwd=tree, env=clean_environment())
    dist_dir.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(build_dir / f"onebitd_{version}_all.deb", dist_dir))


def require_tools() -> None:
    """Raise BuildFailed, with the command that installs them, if build dependencies are missing."""
    if shutil.which("dpkg-checkbuilddeps") is None:
        raise BuildFailed(f"not found: dpkg-buildpackage; apt install dpkg-dev {wanted()}")
    # -I: without build-essential, which is a compiler.
    done = subprocess.run(
        ["dpkg-checkbuilddeps", "-I", str(HERE / "control")],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        missing = done.stderr.strip().rpartition(": ")[2]
        raise BuildFailed(f"not installed: {missing}; apt install {wanted()}")


def wanted() -> str:
    """Return the packages that bring the build dependencies."""
    return "debhelper dh-python python3 python3-venv"


def debian_version(version: str) -> str:
    """Return Debian's spelling: 1.0rc1 and 1.0.dev3 come before 1.0, so 1.0~rc1 and 1.0~dev3."""
    return re.sub(r"[._-]?(a|b|rc|dev)(?=\d)", r"~\1", version)


def assemble(tree: Path, version: str) -> None:
    """Make the tree that dpkg-buildpackage works in."""
    tree.mkdir(parents=True)
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    debian = tree / "debian"
    shutil.copytree(tree / "units" / "debian", debian)
    (debian / "changelog").write_text(changelog(version, maintainer(debian / "control")))
    with (debian / "copyright").open("a") as file:
        file.write((ROOT / "LICENSE").read_text() + "\n")


def maintainer(control: Path) -> str:
    """Return the maintainer's name and address."""
    found = re.search(r"^Maintainer: (.+)$", control.read_text(), re.MULTILINE)
    if found is None:
        raise BuildFailed(f"{control} names no maintainer")
    return found.group(1)


def changelog(version: str, author: str) -> str:
    """Return the one entry that dpkg-buildpackage asks for: what changed is in CHANGELOG.md."""
    return (
        f"onebitd ({version}) unstable; urgency=medium\n\n"
        "  * What changed is in /usr/share/doc/onebitd/changelog.gz.\n\n"
        f" -- {author}  {formatdate(source_date(), localtime=False)}\n"
    )


def source_date() -> int:
    """Return the time of the sources: SOURCE_DATE_EPOCH, the last commit, or the changelog's."""
    with contextlib.suppress(KeyError, ValueError):
        return int(os.environ["SOURCE_DATE_EPOCH"])
    with contextlib.suppress(OSError, subprocess.CalledProcessError, ValueError):
        done = subprocess.run(
            ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"],
            capture_output=True,
            text=True,
            check=True,
        )
        return int(done.stdout)
    return int((ROOT / "CHANGELOG.md").stat().st_mtime)


def collect_wheels(tree: Path, venv: Path, lowest: str) -> None:
    """Put the wheels of onebitd and all that it requires into the tree; BuildFailed.

    Args:
        tree: what dpkg-buildpackage works in.
        venv: where to make the environment that pip runs in.
        lowest: the oldest Python that the package is for; a newer one takes the same wheels.
    """
    run([PYTHON, "-m", "venv", str(venv)])
    python = str(venv / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    wheels = tree / "wheels"
    # --use-pep517: not with whatever setuptools is in there.
    run([*pip, "wheel", "--use-pep517", "--wheel-dir", str(wheels), str(tree)])
    if run([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).strip() == lowest:
        return
    # These may be too new for it. Those that were built here are found again.
    built = wheels.rename(tree / "wheels-built")
    own = [str(path) for path in built.glob("onebitd-*.whl")]
    choice = ["--python-version", lowest, "--only-binary", ":all:", "--find-links", str(built)]
    run([*pip, "download", *choice, "--dest", str(wheels), *own])


def clean_environment() -> Mapping[str, str]:
    """Return the environment without what this run of make tells its children."""
    return {k: v for k, v in os.environ.items() if k not in {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}}


def run(
    argv: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> str:
    """Run a command and return what it said; BuildFailed with that."""
    done = subprocess.run(
        argv,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise BuildFailed(f"{' '.join(argv)} failed:\n{done.stdout}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
