"""The completions for zsh and fish, in a real one of each: they offer what the parsers take."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from onebitd.core.handoff import Outcome
from onebitd.surfaces import cli, daemon_args
from tests.llama_builds import require_program
from tests.repo.test_cli_docs import commands, first_words, options_of
from tests.tools import completions

FOLDER = completions.FOLDER
PATIENCE_S = 60.0

ZSH = """\
PROMPT=; fpath=({folder} $fpath); autoload -Uz compinit; compinit -u -D
compadd() {{
    local -a hits
    if ((! ${{@[(I)-[OAD]]}})); then builtin compadd -A hits "$@"; print -rl -- $hits >>{found}; fi
    builtin compadd "$@"
}}
ask() {{ _main_complete; print . >>{found} }}
zle -C ask list-choices ask; bindkey '^I' ask
"""
"""Writes what completion would offer to a file, and a dot at its end."""


def environment(home: Path) -> dict[str, str]:
    """Return a shell's environment in which nothing but `home` has instances of a user."""
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": str(home),
        "XDG_RUNTIME_DIR": str(home / "run"),
        "XDG_CONFIG_HOME": str(home),
        "TERM": "dumb",
    }


def zsh(line: str, home: Path) -> set[str]:
    """Return what an interactive zsh offers at the end of a line."""
    require_program("zsh")
    found = home / "found"
    found.unlink(missing_ok=True)
    script = home / "script"
    script.write_text(ZSH.format(folder=FOLDER / "zsh", found=found))
    child, terminal = pty.fork()
    if child == 0:
        os.execve("/usr/bin/zsh", ["zsh", "-f", "-i"], environment(home))  # noqa: S606 - no shell is asked
    try:
        os.write(terminal, f". {script}\n{line}\t".encode())
        deadline = time.monotonic() + PATIENCE_S
        while not (found.exists() and found.read_text().endswith(".\n")):
            assert time.monotonic() < deadline, f"zsh has nothing to say to {line!r}"
            if select.select([terminal], [], [], 0.02)[0]:
                os.read(terminal, 65536)
    finally:
        os.close(terminal)
        os.waitpid(child, 0)
    return set(found.read_text().splitlines()) - {".", ""}


def fish(line: str, home: Path) -> set[str]:
    """Return what fish offers at the end of a line."""
    require_program("fish")
    sources = "; ".join(f"source {path}" for path in sorted((FOLDER / "fish").iterdir()))
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"{sources}; complete -C $argv[1]", line],
        env=environment(home),
        cwd=home,
        capture_output=True,
        text=True,
        check=True,
    )
    return {offered.partition("\t")[0] for offered in done.stdout.splitlines()}


SHELLS = pytest.mark.parametrize("shell", [zsh, fish], ids=["zsh", "fish"])
Shell = Callable[[str, Path], set[str]]


def test_files_are_those_that_the_parsers_make() -> None:
    """Else: `python -m tests.tools.completions`."""
    written = {name: (FOLDER / name).read_text() for name in completions.files()}
    assert written == completions.files()


@SHELLS
def test_completion_commands_are_those_of_the_parser(shell: Shell, tmp_path: Path) -> None:
    """All of them, and none that does not exist; those of a group behind it."""
    assert shell("onebitctl ", tmp_path) == first_words()
    assert shell("onebitctl -i lock state ", tmp_path) == {"show", "check", "diff"}


@SHELLS
def test_completion_options_are_those_of_the_parser(shell: Shell, tmp_path: Path) -> None:
    """Of both programs, of a command and of one in a group."""
    for command in ("handoffs", "state show"):
        wanted = {one for one in options_of(commands()[command]) if one.startswith("--")}
        assert shell(f"onebitctl --socket x {command} --", tmp_path) == wanted
    wanted = {one for one in options_of(cli.build_parser()) if one.startswith("--")}
    assert shell("onebitctl --", tmp_path) == wanted
    wanted = {one for one in options_of(daemon_args._parser()) if one.startswith("--")}
    assert shell("onebitd --", tmp_path) == wanted


@SHELLS
def test_completion_values_are_what_there_is(shell: Shell, tmp_path: Path) -> None:
    """Outcomes, instances that run or are configured, words for devices."""
    (tmp_path / "run/onebitd/runs").mkdir(parents=True)
    (tmp_path / "onebitd").mkdir()
    (tmp_path / "onebitd/written.toml").touch()
    assert shell("onebitctl handoffs --outcome ", tmp_path) == set(Outcome)
    assert shell("onebitctl -i ", tmp_path) >= {"runs", "written"}
    assert shell("onebitctl status --instance ", tmp_path) >= {"runs", "written"}
    assert "runs" not in shell("onebitd --instance ", tmp_path)
    assert shell("onebitd --device ", tmp_path) == {"hybrid", "hrx", "cpu"}
