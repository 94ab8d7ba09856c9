"""Write the completions for zsh and fish from the parsers of the programs.

    python -m tests.tools.completions

Those for bash are written by hand: bash has no functions that would do the work. All are held
against the parsers by tests/repo/test_completions.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from onebitd.surfaces import cli, daemon_args
from tests.llama_builds import ROOT

FOLDER: Final = ROOT / "units" / "completions"
NOTE: Final = "# Written by `python -m tests.tools.completions`: change the parser, not this."

_DIRECTORIES: Final = {"DIR"}
_FILES: Final = {
    *("FILE", "PATH", "PNG", "GGUF", "MODEL", "IDS", "PROGRAM", "REFERENCE"),
    *("FILE.png", "FILE.gguf"),
}
_INSTANCES: Final = {"instance", "enable"}
_SUGGESTED: Final = {"device": ["hybrid", "hrx", "cpu"]}
"""Words for options that take others, too."""

Parser = argparse.ArgumentParser
Commands = dict[str, "Command"]


class Command:
    """A command with its parser and its place in the help page; a group has `members`."""

    def __init__(self, name: str, summary: str, parser: Parser) -> None:
        self.name = name
        self.summary = summary
        self.parser = parser
        self.members = {member.name: member for member in commands_of(parser)}

    @property
    def options(self) -> list[argparse.Action]:
        """What begins with a dash."""
        return [action for action in self.parser._actions if action.option_strings]

    @property
    def operands(self) -> list[argparse.Action]:
        """What does not, less the commands of a group."""
        return [
            action
            for action in self.parser._actions
            if not action.option_strings and not isinstance(action, argparse._SubParsersAction)
        ]


def commands_of(parser: Parser) -> Iterator[Command]:
    """Return the commands of a parser in the order of its help page."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {one.dest: one.help or "" for one in action._choices_actions}
            for name, child in action.choices.items():
                yield Command(name, summaries.get(name, ""), child)


def takes_value(action: argparse.Action) -> bool:
    """Tell whether something has to follow."""
    return action.nargs != 0


def kind_of(action: argparse.Action) -> str | Sequence[str]:
    """Return what a value is: its choices, or `instances`, `files`, `directories` or `other`."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    if action.dest in _SUGGESTED:
        return _SUGGESTED[action.dest]
    if action.dest in _INSTANCES:
        return "instances"
    if action.metavar in _DIRECTORIES:
        return "directories"
    return "files" if action.metavar in _FILES else "other"


def help_of(action: argparse.Action) -> str:
    """Return the first words of an option's help, which have to fit beside it."""
    text = action.help or ""
    for end in (" (", ";", ": "):
        text = text.partition(end)[0]
    return text.replace("%(prog)s", "the program").replace("%%", "%")


# --- zsh ---------------------------------------------------------------------------------------

_ZSH_INSTANCES: Final = """\
_{program}_instances() {{
    local -a found
    found=({places})
    found=(${{found:t:r}})
    compadd -a found
}}
"""
_RUNNING: Final = "/run/onebitd/*(N/) ${XDG_RUNTIME_DIR:-/run/onebitd}/onebitd/*(N/)"
_WRITTEN: Final = "/etc/onebitd/*.toml(N) ${XDG_CONFIG_HOME:-$HOME/.config}/onebitd/*.toml(N)"


def zsh(program: str, root: Command) -> str:
    """Return the completion function for zsh."""
    places = _WRITTEN if program == "onebitd" else f"{_RUNNING} {_WRITTEN}"
    lines = [
        f"#compdef {program}",
        NOTE,
        "",
        _ZSH_INSTANCES.format(program=program, places=places),
        *_zsh_function(f"_{program}", program, root),
        f'_{program} "$@"',
    ]
    return "\n".join(lines) + "\n"


def _zsh_function(name: str, program: str, command: Command) -> Iterator[str]:
    inner = {word: f"{name}_{word.replace('-', '_')}" for word in command.members}
    for word, member in command.members.items():
        yield from _zsh_function(inner[word], program, member)
    specs = [spec for action in command.options for spec in _zsh_option(program, action)]
    yield f"{name}() {{"
    if command.members:
        words = " ".join(
            f'{word}\\:"{_zsh_quoted(member.summary)}"' for word, member in command.members.items()
        )
        yield "    local curcontext=$curcontext state line"
        yield "    typeset -A opt_args"
        specs += [f"'1:command:(({words}))'", "'*:: :->command'"]
        yield from _zsh_arguments(["-C", *specs])
        yield "    [[ $state == command ]] || return"
        yield "    case $words[1] in"
        yield from (f"        {word}) {function} ;;" for word, function in inner.items())
        yield "    esac"
    else:
        specs += [
            f"'{position}:{action.dest}:{_zsh_action(program, action)}'"
            for position, action in enumerate(command.operands, 1)
        ]
        if program == "onebitd":
            specs.append("'*::argument of llama-server:_default'")
        yield from _zsh_arguments(specs)
    yield "}"
    yield ""


def _zsh_arguments(specs: Iterable[str]) -> Iterator[str]:
    yield "    _arguments -S \\"
    *head, last = specs
    yield from (f"        {spec} \\" for spec in head)
    yield f"        {last}"


def _zsh_option(program: str, action: argparse.Action) -> Iterator[str]:
    others = " ".join(action.option_strings)
    value = ""
    if takes_value(action):
        value = f":{(action.metavar or action.dest)!s}:{_zsh_action(program, action)}"
    for option in action.option_strings:
        # `--plot FILE` and `--plot=FILE`; a short option has its value behind a blank only.
        joint = "=" if value and option.startswith("--") else ""
        yield f"'({others}){option}{joint}[{_zsh_quoted(help_of(action))}]{value}'"


def _zsh_action(program: str, action: argparse.Action) -> str:
    kind = kind_of(action)
    if not isinstance(kind, str):
        return f"({' '.join(kind)})"
    return {
        "instances": f"_{program}_instances",
        "files": "_files",
        "directories": "_files -/",
        "other": " ",
    }[kind]


def _zsh_quoted(text: str) -> str:
    for special in "\\[]:":
        text = text.replace(special, f"\\{special}")
    return text.replace("'", "'\\''")


# --- fish --------------------------------------------------------------------------------------

_FISH_INSTANCES: Final = """\
function __{program}_instances
    set -l config $XDG_CONFIG_HOME
    test -n "$config"; or set config $HOME/.config
    for path in {places}
        string replace -r '\\.toml$' '' (basename $path)
    end | sort -u
end
"""
_FISH_RUNNING: Final = "/run/onebitd/*/ $XDG_RUNTIME_DIR/onebitd/*/"
_FISH_WRITTEN: Final = "/etc/onebitd/*.toml $config/onebitd/*.toml"

_FISH_COMMAND: Final = """\
# The command and, of a group, its member; options that stand before them are passed over.
function __{program}_command
    set -l words
    set -l skip 0
    for word in (commandline -opc)[2..-1]
        if test $skip = 1
            set skip 0
        else if contains -- $word {valued}
            set skip 1
        else if not string match -q -- '-*' $word
            set -a words $word
        end
    end
    if test (count $words) -gt 1; and contains -- $words[1] {groups}
        echo $words[1] $words[2]
    else
        echo $words[1]
    end
end
"""


def fish(program: str, root: Command) -> str:
    """Return the completions for fish."""
    places = _FISH_WRITTEN if program == "onebitd" else f"{_FISH_RUNNING} {_FISH_WRITTEN}"
    lines = [NOTE, "", _FISH_INSTANCES.format(program=program, places=places)]
    if root.members:
        valued = [
            option
            for action in root.options
            if takes_value(action)
            for option in action.option_strings
        ]
        groups = [word for word, member in root.members.items() if member.members] or ["''"]
        lines.append(
            _FISH_COMMAND.format(program=program, valued=" ".join(valued), groups=" ".join(groups))
        )
    lines.append(f"complete -c {program} -f")
    lines += _fish_command(program, root, "")
    return "\n".join(lines) + "\n"


def _fish_command(program: str, command: Command, name: str) -> Iterator[str]:
    head = f"complete -c {program}"
    if program != "onebitd":
        head += f' -n \'test "$(__{program}_command)" = "{name}"\''
    for word, member in command.members.items():
        yield f"{head} -a {word} -d {_fish_quoted(member.summary)}"
    for action in command.options:
        yield f"{head}{_fish_option(program, action)}"
    for action in command.operands:
        if kind_of(action) == "files":
            yield f"{head} -F"
            break
    for word, member in command.members.items():
        yield from _fish_command(program, member, f"{name} {word}".strip())


def _fish_option(program: str, action: argparse.Action) -> str:
    parts = [
        f" -l {option[2:]}" if option.startswith("--") else f" -s {option[1:]}"
        for option in action.option_strings
    ]
    if takes_value(action):
        kind = kind_of(action)
        values = {
            "instances": f" -x -a '(__{program}_instances)'",
            "files": " -r -F",
            "directories": " -x -a '(__fish_complete_directories)'",
            "other": " -x",
        }
        parts.append(values[kind] if isinstance(kind, str) else f" -x -a '{' '.join(kind)}'")
    text = help_of(action)
    return "".join(parts) + (f" -d {_fish_quoted(text)}" if text else "")


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def files() -> dict[str, str]:
    """Return the content of each file, by its name below `units/completions`."""
    roots = {
        "onebitctl": Command("onebitctl", "", cli.build_parser()),
        "onebitd": Command("onebitd", "", daemon_args._parser()),
    }
    shells: dict[str, Callable[[str, Command], str]] = {
        "zsh/_{}": zsh,
        "fish/{}.fish": fish,
    }
    return {
        name.format(program): write(program, root)
        for name, write in shells.items()
        for program, root in roots.items()
    }


def main() -> None:
    """Write the files that have changed."""
    for name, text in files().items():
        path = FOLDER / name
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            print(f"written: {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
