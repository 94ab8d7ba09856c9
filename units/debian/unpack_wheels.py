"""Puts wheels where the package wants them; called by debian/rules.

    unpack_wheels.py WHEELS DESTDIR

onebitd and its pure Python dependencies go to usr/lib/onebitd, which no other program imports from;
programs to usr/bin, what onebitd's wheel carries for elsewhere (units, man pages, ...) below usr.
A dependency with compiled code would bind the package to one version of Python: it has to come from
Debian, and is in FROM_DEBIAN. Prints what is carried along and its licences, for debian/copyright.
Standard library only.
"""

from __future__ import annotations

import configparser
import email
import email.message
import sys
import zipfile
from pathlib import Path, PurePosixPath
from typing import Final

PRIVATE: Final = "usr/lib/onebitd"
FROM_DEBIAN: Final = frozenset({"numpy", "markupsafe"})
"""Distributions, as wheels spell them in lower case, that debian/control depends on."""
PROGRAM: Final = """\
#!/usr/bin/python3 {options}
import sys

sys.path.insert(0, "/{private}")

from {module} import {function}

sys.exit({function}())
"""
# Isolated: neither the environment nor a user's site-packages can put a module before ours. That
# ignores PYTHONFAULTHANDLER too, with which the unit asks for the stack of a hung loop.
OPTIONS: Final = {"onebitd": "-IXfaulthandler"}
DEFAULT_OPTIONS: Final = "-I"


def main(wheels: Path, destdir: Path) -> int:
    """Unpack all wheels of the directory; return the exit status."""
    print("The package carries these, unchanged but for their tests, in /" + PRIVATE + ".")
    print("The texts of their licences are beside them, in NAME-VERSION.dist-info; that of the")
    print("Apache License, Version 2.0, is in /usr/share/common-licenses/Apache-2.0 too.\n")
    for path in sorted(wheels.glob("*.whl")):
        name = path.name.partition("-")[0].lower()
        if name in FROM_DEBIAN:
            continue
        if not path.name.endswith("-none-any.whl"):
            print(f"{path.name} has compiled code: it has to come from Debian", file=sys.stderr)
            return 1
        with zipfile.ZipFile(path) as wheel:
            unpack(wheel, destdir)
            if name == "onebitd":
                write_programs(wheel, destdir)
            else:
                print(describe(wheel))
    return 0


def unpack(wheel: zipfile.ZipFile, destdir: Path) -> None:
    """Write the files of one wheel that have a destination."""
    for info in wheel.infolist():
        target = destination(PurePosixPath(info.filename))
        if info.is_dir() or target is None:
            continue
        path = destdir / target
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(wheel.read(info))
        path.chmod(0o644)


def destination(name: PurePosixPath) -> PurePosixPath | None:
    """Return where a file of a wheel goes, relative to the root; None: nowhere."""
    if name.parts[0].endswith(".data"):
        if name.parts[1] != "data":
            raise SystemExit(f"{name}: no place is known for it")
        return relocated(PurePosixPath("usr", *name.parts[2:]))
    # RECORD says what pip would have to remove: that is dpkg's work here.
    if "_tests" in name.parts or name.match("*.dist-info/RECORD"):
        return None
    return PRIVATE / name


def relocated(name: PurePosixPath) -> PurePosixPath:
    """Return where Debian wants a file whose place in other systems is `name`."""
    # zsh on Debian looks for what packages bring in a directory of its own.
    if name.parent == PurePosixPath("usr/share/zsh/site-functions"):
        return PurePosixPath("usr/share/zsh/vendor-completions", name.name)
    return name


def write_programs(wheel: zipfile.ZipFile, destdir: Path) -> None:
    """Write a start script for each of the wheel's console scripts."""
    parser = configparser.ConfigParser()
    parser.read_string(read(wheel, "entry_points.txt"))
    for name, target in parser["console_scripts"].items():
        module, _, function = target.partition(":")
        path = destdir / "usr/bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        options = OPTIONS.get(name, DEFAULT_OPTIONS)
        path.write_text(
            PROGRAM.format(options=options, private=PRIVATE, module=module, function=function)
        )
        path.chmod(0o755)


def read(wheel: zipfile.ZipFile, name: str) -> str:
    """Return a file of the wheel's dist-info."""
    (found,) = (
        entry
        for entry in wheel.namelist()
        if entry.endswith(f".dist-info/{name}") and entry.count("/") == 1
    )
    return wheel.read(found).decode()


def describe(wheel: zipfile.ZipFile) -> str:
    """Return name, version and licence of what is in a wheel, as one line."""
    metadata = email.message_from_string(read(wheel, "METADATA"))
    return f" {metadata['Name']} {metadata['Version']}: {licence(metadata)}"


def licence(metadata: email.message.Message) -> str:
    """Return the licence's short name: the expression, else the classifier, else the field."""
    if metadata["License-Expression"]:
        return str(metadata["License-Expression"])
    prefix = "License :: OSI Approved :: "
    classifiers = [str(line) for line in metadata.get_all("Classifier", [])]
    named = [line.removeprefix(prefix) for line in classifiers if line.startswith(prefix)]
    return " or ".join(named) or str(metadata["License"]).splitlines()[0]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
