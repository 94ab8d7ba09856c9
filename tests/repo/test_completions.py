"""The completions, in a real bash: they offer what the parsers take, and what there is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from onebitd.core.handoff import Outcome, Reason, Route
from onebitd.surfaces import cli, daemon_args
from tests.llama_builds import ROOT, require_program
from tests.repo.test_cli_docs import commands, first_words, options_of

COMPLETIONS = ROOT / "units" / "completions"
HELPERS = (
    Path("/usr/share/bash-completion/bash_completion"),
    Path("/etc/bash_completion"),
)
BASH = ("bash", "--norc", "--noprofile", "-c")
PROGRAMS = ("onebitctl", "onebitd")
SCRIPT = """\
helpers=$1 file=$2; shift 2
if [[ $helpers ]]; then . "$helpers"; fi
set -u
. "$file"
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*" COMP_POINT=${#COMP_LINE}
"_$1"
((${#COMPREPLY[@]} == 0)) || printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(*words: str, home: Path | None = None, helpers: Path | None = None) -> list[str]:
    """Return what a command line is completed with, its last word being the unfinished one.

    Args:
        words: as bash splits them, where `=` is a word of its own.
        home: has the instances: those that run in run/onebitd, the configured ones in onebitd/.
        helpers: the bash-completion package's file, or None for a bash without it.
    """
    require_program("bash")
    where = str(home or "/does/not/exist")
    done = subprocess.run(
        [*BASH, SCRIPT, "bash", str(helpers or ""), str(COMPLETIONS / words[0]), *words],
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": where,
            "XDG_RUNTIME_DIR": f"{where}/run",
            "XDG_CONFIG_HOME": where,
        },
        cwd=home or "/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = done.stdout.splitlines()
    assert len(found) == len(set(found))
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_completion_file_is_bash_and_registers_itself(name: str) -> None:
    """bash has nothing to say about it, and knows afterwards which function to call."""
    require_program("bash")
    done = subprocess.run(
        ["bash", "--norc", "-euc", '. "$1"; complete -p "$2"', "bash", COMPLETIONS / name, name],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == (f"complete -F _{name} {name}\n", "")


def test_onebitctl_completion_commands_are_those_of_the_parser() -> None:
    """All of them, and none that does not exist."""
    assert set(completed("onebitctl", "")) == first_words()
    assert completed("onebitctl", "hand") == ["handoffs"]
    for group in {name.split()[0] for name in commands() if " " in name}:
        members = {name.split()[1] for name in commands() if name.startswith(f"{group} ")}
        assert set(completed("onebitctl", group, "")) == members


def test_onebitctl_completion_options_before_a_command_are_those_of_the_parser() -> None:
    """Without a command, those of the program."""
    assert set(completed("onebitctl", "-")) == options_of(cli.build_parser())


@pytest.mark.parametrize("command", commands())
def test_onebitctl_completion_options_of_a_command_are_those_of_its_parser(command: str) -> None:
    """Also behind options that stand before the command."""
    wanted = options_of(commands()[command])
    words = command.split()
    assert set(completed("onebitctl", *words, "-")) == wanted
    assert set(completed("onebitctl", "-i", "lock", *words, "-")) == wanted
    assert set(completed("onebitctl", "--instance", "=", "lock", *words, "-")) == wanted


def test_onebitctl_completion_outcomes_are_those_of_the_code() -> None:
    """Written with a blank or with an equals sign."""
    assert completed("onebitctl", "handoffs", "--outcome", "") == list(Outcome)
    assert completed("onebitctl", "handoffs", "--outcome", "=") == list(Outcome)
    assert completed("onebitctl", "handoffs", "--outcome", "=", "fal") == ["fallback"]
    assert completed("onebitctl", "handoffs", "--reason", "") == list(Reason)
    assert completed("onebitctl", "handoffs", "--route", "") == list(Route)
    assert "yesterday" in completed("onebitctl", "handoffs", "--since", "")
    assert completed("onebitctl", "handoffs", "-n", "") == []


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """One instance runs, one is configured, one is both; a model and a directory lie there."""
    for name in ("runs", "both"):
        (tmp_path / "run/onebitd" / name).mkdir(parents=True)
    (tmp_path / "onebitd").mkdir()
    for name in ("both.toml", "written.toml", "notes.txt"):
        (tmp_path / "onebitd" / name).touch()
    (tmp_path / "model.gguf").touch()
    (tmp_path / "model.txt").touch()
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [["-i", ""], ["--instance", "="], ["status", "-i", ""], ["install-units", "--enable", ""]],
)
def test_onebitctl_completion_instances_are_those_there_are(home: Path, words: list[str]) -> None:
    """Running or configured, each once; a file whose name is no instance's is passed over."""
    assert {"runs", "both", "written"} <= set(completed("onebitctl", *words, home=home))
    assert completed("onebitctl", "-i", "wri", home=home) == ["written"]
    (home / "onebitd" / "$(touch expanded).toml").touch()
    assert completed("onebitctl", "-i", "wri", home=home) == ["written"]
    assert not (home / "expanded").exists()


def test_onebitd_completion_options_are_those_of_the_parser() -> None:
    """All of them, and none that does not exist."""
    actions = daemon_args._parser()._actions
    wanted = {option for action in actions for option in action.option_strings} | {"--"}
    assert set(completed("onebitd", "")) == set(completed("onebitd", "-")) == wanted


def test_onebitd_completion_values_are_what_there_is(home: Path) -> None:
    """Configured instances, models, and the words for devices."""
    assert {"both", "written"} <= set(completed("onebitd", "--instance", "", home=home))
    assert "runs" not in completed("onebitd", "--instance", "", home=home)
    assert completed("onebitd", "-m", "model", home=home) == ["model.gguf"]
    assert completed("onebitd", "-m", "on", home=home) == ["onebitd"]
    assert completed("onebitd", "--config", "onebitd/b", home=home) == ["onebitd/both.toml"]
    assert completed("onebitd", "--device", "=") == ["hybrid", "hrx", "cpu"]
    assert completed("onebitd", "--port", "") == []


def test_onebitd_completion_behind_the_dashes_is_left_to_llama_server() -> None:
    """Our flags mean nothing there."""
    assert completed("onebitd", "-m", "model.gguf", "--", "-") == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_completion_with_the_bash_completion_package_is_the_same(name: str) -> None:
    """Its functions are not needed, and do not change anything."""
    helpers = next((path for path in HELPERS if path.is_file()), None)
    if helpers is None:
        if os.environ.get("CI") == "true":
            pytest.fail("the package bash-completion is missing")
        pytest.skip("the package bash-completion is missing")
    assert completed(name, "-", helpers=helpers) == completed(name, "-")
