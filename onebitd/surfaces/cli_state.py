"""`onebitctl state`: what is in state files, whether one may be restored, how far two are apart.

What reads them needs numpy, and is imported by the functions that run a command: the other
commands start faster.
"""

from __future__ import annotations

import argparse
from typing import Final

from onebitd.surfaces.cli_numbers import positive_float, positive_int

TOLERANCE: Final = 0.5
SCALE_TOLERANCE: Final = 0.006
_MOST: Final = 1 << 31


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the group to a parser."""
    summary = "look into state files, check and compare them; needs no daemon"
    group = commands.add_parser(
        "state",
        help=summary,
        description="Look into state files of llama.cpp, check them, and compare two. Needs no"
        " daemon.",
        epilog="Exit status: 0 fine; 1 check: refused, diff: not within the tolerance; 2 usage,"
        " unreadable, or nothing could be compared.",
        allow_abbrev=False,
    )
    actions = group.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _register_show(actions)
    _register_check(actions)
    _register_diff(actions)


def run_show(arguments: argparse.Namespace) -> int:
    """Print what a state file holds."""
    from onebitd.state_tools import commands

    return commands.show(
        arguments.file, ids=arguments.ids, values=arguments.values, as_json=arguments.json
    )


def run_check(arguments: argparse.Namespace) -> int:
    """Check a state file as the daemon does; 1 if it would be refused."""
    from onebitd.state_tools import commands

    return commands.check(
        arguments.file,
        tokens=arguments.tokens,
        like=arguments.like,
        model=arguments.model,
        swa_window=arguments.swa_window,
        as_json=arguments.json,
    )


def run_diff(arguments: argparse.Namespace) -> int:
    """Compare two state files; 1 if they are not within the tolerance."""
    from onebitd.state_tools import commands

    options = commands.DiffOptions(
        tolerance=arguments.tolerance,
        scale_tolerance=arguments.scale_tolerance,
        head_dim=arguments.head_dim,
        model=arguments.model,
        positions=arguments.positions,
        every=arguments.all,
        as_json=arguments.json,
        plot=arguments.plot,
    )
    return commands.diff(arguments.file, arguments.reference, options)


def _register_show(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    show = _action(actions, "show", "what a state file holds", "Show what a state file holds.")
    add = show.add_argument
    add("file", metavar="FILE", help="state file")
    add("--ids", action="store_true", help="list the token ids, too: they are the prompt")
    add("--values", action="store_true", help="read all values, and tell the range of each tensor")
    show.set_defaults(run=run_show)


def _register_check(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    check = _action(
        actions,
        "check",
        "whether the daemon would take a state file",
        "Check a state file as the daemon does before the decoder sees it, and say what is wrong"
        " with it.",
    )
    add = check.add_argument
    add("file", metavar="FILE", help="state file")
    add("--tokens", metavar="IDS", help="ids file that it must hold (default: its own)")
    add(
        "--like",
        metavar="FILE",
        help="a state file that the decoder saved, such as the daemon's slots/example.state"
        " (default: held against itself)",
    )
    add("--model", metavar="GGUF", help="the model, which tells the size of a sliding window")
    add(
        "--swa-window",
        metavar="N",
        type=positive_int,
        help="the size of the sliding window in tokens, without --model",
    )
    check.set_defaults(run=run_check)


def _register_diff(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    diff = _action(
        actions,
        "diff",
        "how far a state file is from a reference, and why",
        "Compare the values of a state file with those of a reference, and say what may be wrong"
        " where they differ. Equal files print nothing.",
    )
    add = diff.add_argument
    add("file", metavar="FILE", help="state file to judge")
    add("reference", metavar="REFERENCE", help="state file that is right")
    add(
        "--tolerance",
        metavar="E",
        type=positive_float,
        help="the largest relative error of a row that passes; their root mean square may be a"
        f" third (default: {TOLERANCE:g})",
    )
    add(
        "--scale-tolerance",
        metavar="E",
        type=positive_float,
        help="how far the size of a head may be from the reference's, relatively (default:"
        f" {SCALE_TOLERANCE:g})",
    )
    add("--model", metavar="GGUF", help="the model, which tells how many values a head has")
    add("--head-dim", metavar="N", type=positive_int, help="so many, without --model")
    add("--positions", metavar="A:B", type=_positions, help="only positions A to B - 1")
    add("--all", action="store_true", help="list every tensor, not just those that are off")
    add("--plot", metavar="PNG", help="draw the error by layer and position; needs matplotlib")
    diff.set_defaults(run=run_diff)


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    description: str,
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=summary, description=description, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="stable output for programs")
    return parser


def _positions(text: str) -> range:
    first, colon, last = text.partition(":")
    words = (first or "0", last or str(_MOST - 1))
    if not colon or not all(w.isascii() and w.isdigit() and len(w) <= 10 for w in words):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of positions such as 10:20")
    return range(int(words[0]), int(words[1]))
