"""Programs: whether they can be executed, with which interpreter, and what they lack."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from typing import Final

from onebitd.doctor import sight
from onebitd.doctor.finding import Finding, failed
from onebitd.doctor.place import Place

VERSION_S: Final = 60.0
_LIBRARY: Final = re.compile(r"error while loading shared libraries: ([^:\s]+): (.*)")
_SYMBOL_VERSION: Final = re.compile(r"version `([^']+)' not found")
_VERSION: Final = re.compile(r"^version: (\S+(?: \(\S+\))?)", re.MULTILINE)
_EXECUTABLE_MEMORY: Final = re.compile(
    r"cannot (?:enable|make) .*executable|cannot apply additional memory protection|PROT_EXEC", re.I
)
_HEAD_BYTES: Final = 256


def interpreter_of(head: bytes) -> list[str] | None:
    """Return the words of a script's first line, None for what is no script.

    >>> interpreter_of(b"#!/usr/bin/env python3 -I")
    ['/usr/bin/env', 'python3 -I']
    """
    if not head.startswith(b"#!"):
        return None
    line = head[2:].partition(b"\n")[0].decode("utf-8", "replace").strip()
    first, _, rest = line.partition(" ")
    return [first, rest.strip()] if rest.strip() else [first]


def missing_interpreter(head: bytes, path: str | None) -> str | None:
    """Return the program that a script asks for and that is not there; None when nothing is amiss.

    Args:
        head: the script's beginning.
        path: where env(1) looks; None: this process's.
    """
    words = interpreter_of(head)
    if not words or not words[0]:
        return None
    if shutil.which(words[0], path=path) is None:
        return words[0]
    if os.path.basename(words[0]) == "env" and len(words) > 1:
        asked = [word for word in words[1].split() if not word.startswith("-") and "=" not in word]
        if asked and shutil.which(asked[0], path=path) is None:
            return f"{asked[0]} (by {words[0]})"
    return None


def check(name: str, what: str, path: str, place: Place, search: str | None) -> Finding | None:
    """Say why a program cannot be executed, None when it can.

    Args:
        name: of the finding.
        what: what the message calls it.
        path: absolute.
        search: PATH of the program.
    """
    user = sight.own_name()
    step = sight.look(path, os.X_OK | os.R_OK) or sight.look(path, os.X_OK)
    if step is not None:
        if sight.is_sandboxed(path, step):
            return failed(name, sight.hidden_sentence(what, path), sight.show_fix(place, path))
        if step.path == path and step.mode and not step.mode & 0o111:
            fix = f"{place.sudo}chmod a+rx {shlex.quote(path)}"
            return failed(name, f"{what} {path} is not executable (mode {step.mode:04o})", fix)
        fix = sight.access_fix(place, step, "rx") or place.edit()
        return failed(name, sight.sentence(what, path, step, user), fix)
    if os.path.isdir(path):
        return failed(name, f"{what} {path} is a directory", place.edit())
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return None  # it may be executed all the same
    missing = missing_interpreter(head, search)
    if missing is not None:
        text = f"{what} {path}: its first line asks for {missing}, which {user} does not find"
        return failed(name, text, f"head -1 {shlex.quote(path)}")
    return None


def version_of(program: str, env: Mapping[str, str]) -> tuple[int, str]:
    """Run `PROGRAM --version`; return its status and what it said, 126 if it cannot be started."""
    try:
        done = subprocess.run(
            [program, "--version"],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=VERSION_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 126, str(getattr(error, "strerror", None) or error)
    return done.returncode, done.stdout.decode("utf-8", "replace")


def build_in(said: str) -> str | None:
    """Return the build in what `llama-server --version` says.

    >>> build_in("version: 10068 (1a2b3c4)\\nbuilt with cc")
    '10068 (1a2b3c4)'
    """
    found = _VERSION.search(said)
    return found[1] if found else None


def load_problem(name: str, program: str, status: int, said: str, place: Place) -> Finding | None:
    """Say why a program ended before it began: a library, a symbol, memory; None if it did not.

    Args:
        status, said: of a run that only asks for its version.
    """
    library = _LIBRARY.search(said)
    path = shlex.quote(program)
    if library is not None and "annot open shared object" in library[2]:
        text = f"{program} misses the library {library[1]}"
        return failed(name, text, f"ldd {path} | grep 'not found'")
    if place.inside and library is not None and _EXECUTABLE_MEMORY.search(library[2]):
        return failed(
            name,
            f"{program}: {library[1]} needs memory that is executable (MemoryDenyWriteExecute=)",
            place.drop_in("rocm", "MemoryDenyWriteExecute=no"),
        )
    if library is not None:
        return failed(name, f"{program}: {library[1]}: {library[2].strip()}", f"ldd {path}")
    symbol = _SYMBOL_VERSION.search(said)
    if symbol is not None:
        text = f"{program} was built for newer libraries: {symbol[1]} is not here"
        return failed(name, text, f"ldd {path} | grep 'not found'")
    if status < 0 or status in (126, 127):
        last = (said.strip().splitlines() or [f"status {status}"])[-1]
        how = f"ended by signal {-status}" if status < 0 else last[:200]
        return failed(name, f"{program} cannot be run: {how}", f"{path} --version")
    return None
