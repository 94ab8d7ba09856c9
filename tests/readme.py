"""README's code blocks, as its reader would take them.

A test types a block as it stands: it gets the text from here, by the block's beginning, and takes
each of its lines.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from tests.llama_builds import ROOT

_FENCE = re.compile(r"^(#+ [^\n]*)$|^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PROMPT = re.compile(r"^[#$] ")


@dataclass(frozen=True)
class Block:
    """One block: `heading` it stands under, `language`, and what is between the fences."""

    heading: str
    language: str
    text: str

    @property
    def name(self) -> str:
        """Its first line without prompt and remark."""
        return strip_remark(_PROMPT.sub("", self.text.splitlines()[0]))

    @property
    def commands(self) -> list[str]:
        """What is typed at the prompts, lines that go on joined; not what is printed.

        A command goes on behind a backslash, and while one of its quotes is open.
        """
        found: list[str] = []
        open_command = ""
        for line in self.text.splitlines():
            if open_command:
                open_command += "\n" + line
            elif _PROMPT.match(line):
                open_command = strip_remark(_PROMPT.sub("", line))
            else:
                continue
            if not open_command.endswith("\\") and open_command.count("'") % 2 == 0:
                found.append(open_command)
                open_command = ""
        return found

    @property
    def printed(self) -> list[str]:
        """The lines that no command is on: what the reader is to see."""
        typed = {line for command in self.commands for line in command.splitlines()}
        lines = (line for line in self.text.splitlines() if not _PROMPT.match(line))
        return [line for line in lines if line not in typed]


def strip_remark(command: str) -> str:
    """Return a command without the remark behind it, which stands two blanks away."""
    return re.sub(r"\s{2,}# .*$", "", command)


def blocks() -> list[Block]:
    """Return all blocks that have a language, in their order."""
    found: list[Block] = []
    heading = ""
    for match in _FENCE.finditer((ROOT / "README.md").read_text()):
        if match[1]:
            heading = match[1].lstrip("# ")
        else:
            found.append(Block(heading, match[2], match[3]))
    return found


def block(name: str) -> Block:
    """Return the block whose first command begins so."""
    (found,) = (one for one in blocks() if one.name.startswith(name))
    return found


def asked_for() -> tuple[str, ...]:
    """Return the names by which tests ask for blocks, each once; they ask with a literal."""
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text()
        if "readme.block(" in text:
            found |= {name for node in ast.walk(ast.parse(text)) for name in _name_in(node)}
    return tuple(sorted(found))


def _name_in(node: ast.AST) -> list[str]:
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="readme"), attr="block"),
            args=[ast.Constant(value=str(name))],
        ):
            return [name]
    return []
