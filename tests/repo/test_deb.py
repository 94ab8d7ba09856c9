"""What is in the Debian package, and that its papers agree with the project."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import stat
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import onebitd
from tests.deb_build import built_deb, dpkg_deb
from tests.llama_builds import ROOT, require_program
from tests.repo.test_packaging import PROJECT

DEBIAN = ROOT / "units" / "debian"
PRIVATE = Path("usr/lib/onebitd")
PYTHONS = ("3.11", "3.12", "3.13")


@pytest.fixture(scope="module")
def deb() -> Path:
    """The package."""
    return built_deb()


@pytest.fixture(scope="module")
def tree(deb: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the package, those of its control archive in DEBIAN/."""
    path = tmp_path_factory.mktemp("deb") / "tree"
    dpkg_deb("--raw-extract", deb, path)
    return path


@pytest.fixture(scope="module")
def names(tree: Path) -> set[str]:
    """The names of the files."""
    files = (path for path in tree.rglob("*") if not path.is_dir())
    return {str(path.relative_to(tree)) for path in files if "DEBIAN" not in path.parts}


def script(name: str) -> ModuleType:
    """Import one of the packaging's own programs."""
    spec = importlib.util.spec_from_file_location(f"debian_{name}", DEBIAN / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fields(deb: Path) -> dict[str, str]:
    """Return the fields of the package's control file."""
    lines = dpkg_deb("--field", deb).splitlines()
    return {name: value for name, _, value in (line.partition(": ") for line in lines)}


def test_deb_version_is_that_of_pyproject(deb: Path) -> None:
    """File name, control field and module say the same, and one package is for every machine."""
    found = fields(deb)
    assert found["Version"] == onebitd.__version__ == PROJECT["project"]["version"]
    assert found["Architecture"] == "all"
    assert deb.name == f"onebitd_{onebitd.__version__}_all.deb"


@pytest.mark.parametrize(
    ("version", "debian"),
    [("1.2.0", "1.2.0"), ("1.2.0rc1", "1.2.0~rc1"), ("1.2.0.dev3", "1.2.0~dev3")],
)
def test_deb_version_of_an_early_release_sorts_before_it(version: str, debian: str) -> None:
    """Debian would take 1.2.0rc1 for newer than 1.2.0."""
    assert script("build").debian_version(version) == debian


ELSEWHERE = {"share/zsh/site-functions": "share/zsh/vendor-completions"}
"""What packages of Debian have in another place than `/usr/local`."""


def test_deb_carries_everything_that_is_installed(names: set[str]) -> None:
    """Programs, units, pages and all else that the wheel has for outside of the package."""
    shared = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["shared-data"]
    wanted = {f"usr/bin/{name}" for name in PROJECT["project"]["scripts"]}
    for source, target in shared.items():
        path = ROOT / source
        target = ELSEWHERE.get(target, target)
        if path.is_dir():
            wanted |= {f"usr/{target}/{file.name}" for file in path.iterdir()}
        else:
            wanted.add(f"usr/{target}" + (".gz" if "/man/" in target else ""))
    assert len(wanted) > 15
    assert wanted <= names


def test_deb_puts_nothing_where_other_programs_look_for_modules(names: set[str]) -> None:
    """The private packages are onebitd's alone, and all else is onebitd's by name."""
    assert not [name for name in names if "dist-packages" in name or "site-packages" in name]
    strange = [name for name in names if not name.startswith(f"{PRIVATE}/")]
    assert not [name for name in strange if "onebit" not in name]


def test_deb_holds_no_compiled_code(names: set[str]) -> None:
    """It runs on each Python and machine; byte code is made where it is installed."""
    assert not [name for name in names if re.search(r"\.so\b|\.pyc$|__pycache__", name)]


def test_deb_files_are_roots_and_not_writable(deb: Path) -> None:
    """Programs 0755, files 0644, and nothing else."""
    for line in dpkg_deb("--contents", deb).splitlines():
        mode, owner, rest = line.split(maxsplit=2)
        name = rest.split(maxsplit=3)[-1]
        runs = name.startswith("./usr/bin/") or name.endswith(("/", ".rtupdate"))
        assert mode[1:] == ("rwxr-xr-x" if runs else "rw-r--r--"), line
        assert owner == "root/root", line


def test_deb_does_not_name_the_machine_that_built_it(deb: Path, tree: Path) -> None:
    """Neither the checkout nor the build directory is in any file."""
    words = {str(ROOT), str(deb.parent.parent)}
    for path in tree.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert not [word for word in words if word.encode() in data], path


def carried(tree: Path) -> dict[str, importlib.metadata.Distribution]:
    """Return the private packages by name, onebitd too."""
    found = importlib.metadata.distributions(path=[str(tree / PRIVATE)])
    return {normal(one.metadata["Name"]): one for one in found}


def normal(name: str) -> str:
    """Return the one spelling of a distribution's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def from_debian(deb: Path) -> dict[str, str]:
    """Return the lowest version of each Python package that the package depends on."""
    found = re.findall(r"python3-([\w-]+) \(>= (?:\d+:)?([\d.]+)\)", fields(deb)["Depends"])
    return dict(found)


def requirements(packages: dict[str, Any], python: str) -> Iterator[tuple[str, Requirement]]:
    """Yield what each package requires under a version of Python, extras left out."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    for name, package in packages.items():
        for line in package.requires or []:
            wanted = Requirement(line)
            if wanted.marker is None or wanted.marker.evaluate(environment):
                yield name, wanted


@pytest.mark.parametrize("python", PYTHONS)
def test_deb_requirements_are_carried_or_depended_on(deb: Path, tree: Path, python: str) -> None:
    """Whatever is required, transitively, is there in a version that will do."""
    packages, debian = carried(tree), from_debian(deb)
    assert "onebitd" in packages
    versions = {**debian, **{name: one.version for name, one in packages.items()}}
    missing = [
        f"{name} requires {wanted}, there is {versions.get(normal(wanted.name))}"
        for name, wanted in requirements(packages, python)
        if normal(wanted.name) not in versions
        or not wanted.specifier.contains(versions[normal(wanted.name)], prereleases=True)
    ]
    assert not missing
    assert not [
        f"{name} requires Python {one.metadata['Requires-Python']}"
        for name, one in packages.items()
        if not SpecifierSet(one.metadata["Requires-Python"] or "").contains(f"{python}.2")
    ]
    assert set(debian) == script("unpack_wheels").FROM_DEBIAN


def test_deb_carries_no_package_that_nobody_requires(tree: Path) -> None:
    """What a dependency dropped is dropped here too."""
    packages = carried(tree)
    required = {normal(wanted.name) for _, wanted in requirements(packages, PYTHONS[0])}
    assert set(packages) - required == {"onebitd"}


def test_deb_copyright_names_every_private_package(tree: Path) -> None:
    """Each with its version, a licence, and the licence's text where the file says."""
    text = (tree / "usr/share/doc/onebitd/copyright").read_text()
    assert (ROOT / "LICENSE").read_text() in text
    for folder in (tree / PRIVATE).glob("*.dist-info"):
        package = importlib.metadata.Distribution.at(folder)
        if package.metadata["Name"] == "onebitd":
            continue
        line = rf"^ {package.metadata['Name']} {re.escape(package.version)}: .{{3,}}$"
        assert re.search(line, text, re.MULTILINE), folder.name
        assert list(folder.rglob("LICEN*")), folder.name


@pytest.mark.parametrize("name", sorted(PROJECT["project"]["scripts"]))
def test_deb_program_takes_modules_from_nobody_else(tree: Path, tmp_path: Path, name: str) -> None:
    """Neither the current directory nor the environment can put a module before the package's."""
    text = (tree / "usr/bin" / name).read_text()
    words = text.splitlines()[0].removeprefix("#!/usr/bin/python3 ")
    assert words in {"-I", "-IXfaulthandler"}
    here = tmp_path / name
    here.write_text(text.replace('"/usr/lib/onebitd"', repr(str(tree / PRIVATE))))
    (tmp_path / "onebitd.py").write_text("raise SystemExit('the wrong one')")
    done = subprocess.run(
        [sys.executable, words, str(here), "--version"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "the wrong one" not in done.stderr
    assert onebitd.__version__ in done.stdout


def test_deb_wheel_with_compiled_code_is_refused(tmp_path: Path) -> None:
    """A dependency that got an extension would bind the package to one Python: it is named."""
    with zipfile.ZipFile(tmp_path / "fast-1.0-cp311-cp311-linux_x86_64.whl", "w"):
        pass
    done = subprocess.run(
        [sys.executable, DEBIAN / "unpack_wheels.py", tmp_path, tmp_path / "root"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "fast-1.0-cp311-cp311-linux_x86_64.whl has compiled code" in done.stderr


def test_deb_build_without_debhelper_says_what_to_install(tmp_path: Path) -> None:
    """One line, with the command."""
    done = subprocess.run(
        [
            sys.executable,
            DEBIAN / "build.py",
            "--build-dir",
            tmp_path / "b",
            "--dist-dir",
            tmp_path,
        ],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("make deb: ")
    assert "apt install dpkg-dev debhelper dh-python" in line
    assert list(tmp_path.iterdir()) == []


def test_deb_maintainer_scripts_are_shell(tree: Path) -> None:
    """No placeholder is left, and sh can read them."""
    for name in ("postinst", "prerm", "postrm"):
        path = tree / "DEBIAN" / name
        assert "#DEBHELPER#" not in path.read_text()
        assert stat.S_IMODE(path.stat().st_mode) == 0o755
        assert subprocess.run(["sh", "-n", path], check=False).returncode == 0


def test_deb_has_no_errors_for_lintian(deb: Path) -> None:
    """Debian's own checker finds nothing wrong that is not overridden with a reason."""
    require_program("lintian")
    done = subprocess.run(
        ["lintian", "--no-cfg", "--allow-root", "--fail-on", "error", str(deb)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
