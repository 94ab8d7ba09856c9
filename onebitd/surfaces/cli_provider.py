"""`onebitctl provider`: the provider of a daemon, and provider programs. See `onebitctl(1)`.

What the other commands do not need is imported by the functions that do: those start faster.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from typing import Any, Final

from onebitd.surfaces import cli_text
from onebitd.surfaces.cli_numbers import positive_float, positive_int
from onebitd.surfaces.cli_service import say

CTX_SIZE: Final = 2048
TIMEOUT_S: Final = 120.0
LOGPROB_TOLERANCE: Final = 0.5


def register(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    where: argparse.ArgumentParser,
) -> None:
    """Add the group to a parser; `where` has the options that name a daemon."""
    summary = "the prefill provider: judge one, or put it back into service"
    group = commands.add_parser(
        "provider",
        help=summary,
        description="Judge a prefill provider program, or put the one of a daemon back into"
        " service.",
        allow_abbrev=False,
    )
    actions = group.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _register_check(actions)
    _register_reset(actions, where)


def _register_check(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    check = actions.add_parser(
        "check",
        help="run a provider program through the conformance kit; needs no daemon",
        description="Run a prefill provider on short, long and awkward prompts and on faults, and"
        " hold its files, values and replies against a llama-server's own. Needs no daemon.",
        epilog="Exit status: 0 it conforms; 1 it does not; 2 usage; 3 the llama-server cannot be"
        " started or kept running.",
        allow_abbrev=False,
    )
    add = check.add_argument
    add("program", metavar="PROGRAM", help="the provider")
    add("--model", metavar="GGUF", required=True, help="model")
    add("--elfs", metavar="DIR", help="passed to the provider")
    add(
        "--llama-server",
        metavar="PATH",
        help="the decoder to judge by (default: $ONEBIT_LLAMA_SERVER, else llama-server)",
    )
    add(
        "--llama-args",
        metavar="ARGS",
        default="",
        help="more arguments for it in one string, joined with =: --llama-args='-t 4 -fa off'",
    )
    add(
        "--ctx-size",
        metavar="N",
        type=positive_int,
        default=CTX_SIZE,
        help="its context in tokens, and so the longest prompt (default: %(default)s)",
    )
    add(
        "--timeout",
        metavar="S",
        type=positive_float,
        default=TIMEOUT_S,
        help="limit for one run of the provider in seconds (default: %(default)g)",
    )
    add(
        "--tolerance",
        metavar="E",
        type=positive_float,
        help="the largest relative error of a row that passes (default: as for state diff)",
    )
    add(
        "--scale-tolerance",
        metavar="E",
        type=positive_float,
        help="how far the scale of a head may be from 1 (default: as for state diff)",
    )
    add(
        "--logprob-tolerance",
        metavar="D",
        type=positive_float,
        default=LOGPROB_TOLERANCE,
        help="the largest difference of a log-probability of the first token that passes"
        " (default: %(default)g)",
    )
    add("--only", metavar="CASE,...", type=_names, default=(), help="run these cases only")
    add("--keep", metavar="DIR", help="keep the files of each case in this new directory")
    add("--json", action="store_true", help="stable output for programs")
    check.set_defaults(run=run_check)


def run_check(arguments: argparse.Namespace) -> int:
    """Run the conformance kit; 0 if the provider conforms, 1 if it does not."""
    from onebitd.conformance import command  # with numpy: the other commands start without it

    return command.run(
        command.Options(
            program=arguments.program,
            model=arguments.model,
            elfs=arguments.elfs,
            llama_server=arguments.llama_server,
            llama_args=arguments.llama_args,
            ctx_size=arguments.ctx_size,
            timeout_s=arguments.timeout,
            tolerance=arguments.tolerance,
            scale_tolerance=arguments.scale_tolerance,
            logprob_tolerance=arguments.logprob_tolerance,
            only=arguments.only,
            keep=arguments.keep,
            json=arguments.json,
        )
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _register_reset(
    actions: argparse._SubParsersAction[argparse.ArgumentParser],
    where: argparse.ArgumentParser,
) -> None:
    reset = actions.add_parser(
        "reset",
        help="call it again after failures or drift, and forget them",
        description="Put the prefill provider back into service after failures, after audits found"
        " drift, or after its handoffs were of no use, and forget these.",
        parents=[where],
        allow_abbrev=False,
    )
    reset.add_argument("--json", action="store_true", help="stable output for programs")
    reset.set_defaults(run=run_reset)


def run_reset(arguments: argparse.Namespace) -> int:
    """Clear what is held against the provider, and print what that was."""
    from onebitd.client import ControlClient, choose_socket

    path = arguments.socket or choose_socket(arguments.instance, os.environ, os.geteuid())
    answer = ControlClient(path).reset_provider()
    say(json.dumps(answer) if arguments.json else reset_line(answer))
    return 0


def reset_line(answer: Mapping[str, Any]) -> str:
    """Return what a reset has cleared, as one line for people.

    >>> reset_line({"strikes": 3, "breaker": "open"})
    'cleared 3 strikes; the provider is back in service'
    >>> reset_line({"strikes": 1, "breaker": "closed", "failures": 2, "route_off": None})
    'cleared 1 strike, 2 failures'
    >>> reset_line({"strikes": 0, "breaker": "closed", "failures": 0, "route_off": "of no use"})
    'prompts are handed over again'
    >>> reset_line({"strikes": 0, "breaker": "closed"})
    'nothing to clear'
    """
    was_open = answer.get("breaker") not in (None, "closed")
    counts = [(answer.get(f"{name}s") or 0, name) for name in ("strike", "failure")]
    counted = [f"{count} {name}{'' if count == 1 else 's'}" for count, name in counts if count]
    parts = [f"cleared {', '.join(counted)}"] if counted else []
    if was_open:
        parts.append("the provider is back in service")
    if answer.get("route_off"):
        parts.append("prompts are handed over again")
    return cli_text.clean("; ".join(parts) or "nothing to clear")
