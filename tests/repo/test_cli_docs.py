"""`onebitctl(1)` and `--help` say what the parser takes, all of it and nothing else."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from onebitd.core.handoff import Outcome
from onebitd.core.handoff_filter import MAX_LIMIT
from onebitd.core.problems import MANY_FAILURES, MANY_TRIED, RECENT_EXIT_S
from onebitd.services.history import FOLLOWER_RECORDS
from onebitd.surfaces import cli, cli_handoff_table, cli_handoffs

PAGE = Path(__file__).parents[2] / "man" / "onebitctl.1"


def commands(parser: argparse.ArgumentParser | None = None) -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command; one of a group is called `state show`."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in (parser or cli.build_parser())._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                inner = commands(child)
                found |= {f"{name} {word}": leaf for word, leaf in inner.items()} or {name: child}
    return found


def first_words() -> set[str]:
    """Return the names of commands and groups."""
    return {name.split()[0] for name in commands()}


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Return every option string of a parser."""
    return {option for action in parser._actions for option in action.option_strings}


def all_options() -> set[str]:
    """Return every option string of the program."""
    return options_of(cli.build_parser()).union(*map(options_of, commands().values()))


def macro_words(macro: str) -> set[str]:
    """Return what stands after a macro of mdoc, at the start of a line or inside one."""
    return set(re.findall(rf"(?:^\.|\s){macro} ([\w-]+)", PAGE.read_text(), re.MULTILINE))


def rendered() -> str:
    """Return the page as text."""
    if shutil.which("mandoc") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("mandoc is missing")
        pytest.skip("mandoc is missing")
    page = subprocess.run(
        ["mandoc", "-T", "ascii", os.fspath(PAGE)], capture_output=True, text=True, check=True
    )
    return re.sub(r".\x08", "", page.stdout)


def test_man_page_options_are_those_of_the_parser() -> None:
    """Every flag is described, and none that does not exist."""
    assert {f"-{word}" for word in macro_words("Fl")} == all_options()


def test_man_page_commands_are_those_of_the_parser() -> None:
    """Every command is described, in the order of --help, and none that does not exist."""
    item = r"^\.It Cm ([\w -]+?)(?: (?:Op )?Ar .*)?$"
    described = re.findall(item, PAGE.read_text(), re.MULTILINE)
    assert described == list(commands())
    assert macro_words("Cm") - {outcome.value for outcome in Outcome} == first_words()


def test_man_page_rendered_names_every_option_command_and_outcome() -> None:
    """What the reader sees has them, too; a macro error could hide one."""
    text = re.sub(r"\s+", " ", rendered())
    for word in [*all_options(), *commands(), *Outcome]:
        assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text), word


def test_man_page_examples_parse() -> None:
    """An example that the program refuses is worse than none."""
    examples = re.findall(r"^\.Dl \$ onebitctl (.*?)(?: \|.*)?$", PAGE.read_text(), re.MULTILINE)
    assert len(examples) >= 4
    for example in examples:
        cli.build_parser().parse_args(example.split())


def test_man_page_numbers_are_those_of_the_program() -> None:
    """Limits, defaults and exit statuses in the page are the constants."""
    text = re.sub(r"\s+", " ", rendered())
    assert f"0 to {MAX_LIMIT}. The default is {cli_handoffs.LISTED_RECORDS}" in text
    assert f"it is {cli_handoffs.FOLLOWED_RECORDS};" in text
    assert f"From {cli_handoff_table.WIDE_COLUMNS} columns on" in text
    assert f"fewer than {cli_handoff_table.ONE_LINE_COLUMNS} columns" in text
    assert f"more than {FOLLOWER_RECORDS} handoffs behind" in text
    assert f"less than {RECENT_EXIT_S / 60:.0f} minutes ago" in text
    assert (MANY_FAILURES, MANY_TRIED) == (3, 10)
    assert "three or more failed handoffs in a row; and failures" in text
    assert "from ten handoffs on" in text
    statuses = re.findall(r"^\.It (\d+)$", PAGE.read_text(), re.MULTILINE)
    assert statuses == ["0", "1", "2", "3", "4", "130", "141"]


def test_man_page_passes_lint() -> None:
    """mandoc has nothing to say about it."""
    rendered()
    done = subprocess.run(
        ["mandoc", "-T", "lint", "-W", "warning", os.fspath(PAGE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


COMMANDS = (
    "status",
    "handoffs",
    "requests",
    "cancel",
    "config",
    "reload",
    "lock",
    "advise",
    "bench",
    "try",
    "doctor",
    "provider check",
    "provider reset",
    "state show",
    "state check",
    "state diff",
    "stop",
    "disable",
    "install-units",
    "uninstall-units",
)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_names_every_option_with_a_text(command: str) -> None:
    """`--help` lists each option of the command, and each has words."""
    parser = commands()[command] if command else cli.build_parser()
    text = parser.format_help()
    for option in options_of(parser):
        assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text), option
    assert all(action.help for action in parser._actions if action.option_strings)


def test_help_lists_every_command() -> None:
    """The top page names all commands; the parametrized test above covers them all."""
    text = cli.build_parser().format_help()
    assert all(re.search(rf"^    {name} ", text, re.MULTILINE) for name in first_words())
    assert tuple(commands()) == COMMANDS


def test_help_describes_the_program_as_the_man_page_does() -> None:
    """One sentence, in both places."""
    found = re.search(r"^\.Nd (.+)$", PAGE.read_text(), re.MULTILINE)
    assert found
    said = cli.build_parser().description
    assert said is not None
    assert said.removesuffix(".").lower() == found.group(1).lower()


@pytest.mark.parametrize("command", ["stop", "disable"])
def test_help_of_a_service_command_offers_no_socket(command: str) -> None:
    """A service is named by its instance; the command would refuse a socket."""
    assert options_of(commands()[command]) == {"-h", "--help", "-i", "--instance"}
