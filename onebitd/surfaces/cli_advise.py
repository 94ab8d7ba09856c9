"""`onebitctl advise`: when a handoff pays, from a daemon's figures or from figures by hand.

What the other commands do not need is imported by the functions that do: those start faster.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from onebitd.client import BadAnswer, ControlClient, NoDaemon, choose_socket
from onebitd.core.errors import UsageError
from onebitd.surfaces import cli_terminal
from onebitd.surfaces.cli_numbers import positive_int

if TYPE_CHECKING:
    from onebitd.core.costs import Costs
    from onebitd.core.forecast import Given

CTX_SIZE: Final = 8192
"""The context when no daemon tells it."""
SPLIT_ROWS: Final = 2048

EXIT_FINE: Final = 0
EXIT_TOO_LITTLE: Final = 1

_MOST: Final = 1e9
_GIVEN: Final = {
    "provider_ms_per_token": ("MS", "the provider's run, for each token"),
    "provider_fixed_ms": ("MS", "and whatever the prompt's length: its start, for example"),
    "decoder_ms_per_token": ("MS", "the decoder's own evaluation, for each token"),
    "decoder_fixed_ms": ("MS", "and whatever the number of tokens"),
    "restore_ms_per_mib": ("MS", "restoring a state file, for each MiB"),
    "kib_per_token": ("KIB", "size of a state file, for each token"),
    "adopt_ms": ("MS", "shared route: sharing and adopting, once for a prompt"),
    "lock_ms": ("MS", "wait for the device lock"),
}
_SPLIT_OPTIONS: Final = (
    *("gpu_ms_per_row", "npu_ms_per_tile", "split_speedup", "rows", "gemm_share"),
)
_ADVICE_OPTIONS: Final = (*_GIVEN, "lengths", "ctx_size", "plot")


def register(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    where: argparse.ArgumentParser,
) -> None:
    """Add the command to a parser; `where` has the options that name a daemon."""
    parser = commands.add_parser(
        "advise",
        help="when a handoff pays, by prompt length",
        description="Show from which prompt length on a handoff beats the decoder, and the time to"
        " the first byte to expect. The figures are what the daemon has learned; those given by"
        " hand replace them, and when all that is needed is given no daemon is asked.",
        epilog="Exit status: 0 answered; 1 too little is known yet; 2 usage; 3 no daemon there; 4"
        " permission denied.",
        parents=[where],
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="stable output for programs")
    _register_advice(parser)
    _register_split(parser)
    parser.set_defaults(run=run)


def _register_advice(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--lengths",
        metavar="N",
        nargs="+",
        type=positive_int,
        help="prompt lengths to list (default: 64, 128, 256 ... up to the context)",
    )
    add(
        "--ctx-size",
        metavar="N",
        type=positive_int,
        help=f"context in tokens (default: the daemon's, or {CTX_SIZE} when none is asked)",
    )
    add("--plot", metavar="PNG", help="draw the time by prompt length; needs matplotlib")
    by_hand = parser.add_argument_group("figures by hand")
    for name, (unit, text) in _GIVEN.items():
        by_hand.add_argument(_flag(name), metavar=unit, type=_figure, help=text)


def _register_split(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("one prompt on two engines; needs no daemon")
    add = group.add_argument
    add("--split", action="store_true", help="what splitting a prompt between GPU and NPU is worth")
    add("--gpu-ms-per-row", metavar="G", type=_rate, help="the GPU's time for a row")
    add("--npu-ms-per-tile", metavar="T", type=_rate, help="the NPU's time for a tile of 256 rows")
    add(
        "--split-speedup",
        metavar="S",
        type=_rate,
        help="the ceiling of the speed-up, instead of these two",
    )
    add(
        "--rows",
        metavar="M",
        type=positive_int,
        help=f"rows of the prompt (default: {SPLIT_ROWS})",
    )
    add(
        "--gemm-share",
        metavar="SHARE",
        nargs="+",
        type=_share,
        help="the part of prefill that a split can touch: 0.398, or 39.8%%; more than one are"
        " listed",
    )


def run(arguments: argparse.Namespace) -> int:
    """Answer; 1 when too little is known to."""
    _refuse_mixed(arguments)
    return _run_split(arguments) if arguments.split else _run_advice(arguments)


@dataclasses.dataclass(frozen=True, slots=True)
class Sources:
    """What the figures rest on, and whose they are; no daemon: `answer` is empty."""

    costs: Costs
    given: Given
    answer: Mapping[str, Any]
    now: float

    @property
    def ctx_size(self) -> int | None:
        """The daemon's context, None when it did not say."""
        found = self.answer.get("ctx_size")
        return found if isinstance(found, int) and found > 2 else None


def _run_advice(arguments: argparse.Namespace) -> int:
    from onebitd.core.advice import advise, table_lengths
    from onebitd.core.forecast import SHORTEST, Forecast
    from onebitd.surfaces import advice_pages as pages

    sources = _find_sources(arguments)
    forecast = Forecast(sources.costs, sources.given)
    missing = forecast.missing()
    if missing:
        found = pages.missing_object(sources, missing)
        _print(json.dumps(found) if arguments.json else pages.missing_page(sources, missing))
        return EXIT_TOO_LITTLE
    lengths = sorted(set(arguments.lengths or ()))
    ctx_size = arguments.ctx_size or sources.ctx_size or max([CTX_SIZE, *(n + 1 for n in lengths)])
    last = max(ctx_size - 1, SHORTEST)
    for length in lengths:
        if not SHORTEST <= length <= last:
            raise UsageError(
                f"--lengths {length}: a prompt has from {SHORTEST} to {last} tokens with a context"
                f" of {ctx_size}; --ctx-size N asks about another"
            )
    advice = advise(forecast, lengths or table_lengths(ctx_size), last)
    if arguments.plot is not None:
        from onebitd.surfaces import advice_plot

        advice_plot.write(arguments.plot, forecast, advice, pages.title(sources, ctx_size))
    if arguments.json:
        _print(json.dumps(pages.advice_object(sources, advice, ctx_size)))
    else:
        _print(pages.advice_page(sources, advice, ctx_size, colour=cli_terminal.has_colour()))
    return EXIT_FINE


def _find_sources(arguments: argparse.Namespace) -> Sources:
    from onebitd.core.costs import Costs
    from onebitd.core.forecast import Forecast, Given

    given = Given(**{name: getattr(arguments, name) for name in _GIVEN})
    now = time.time()
    if given.is_enough():
        return Sources(Costs(), given, {}, now)
    try:
        path = arguments.socket or choose_socket(arguments.instance, os.environ, os.geteuid())
        answer = ControlClient(path).costs()
    except NoDaemon as exc:
        options = _options_for(Forecast(Costs(), given).missing())
        raise NoDaemon(f"{exc}; `advise` needs none when it is given {options}") from None
    try:
        costs = Costs.from_json(answer.get("costs"))
    except ValueError as exc:
        raise BadAnswer(f"the figures of the onebitd on {path} cannot be read: {exc}") from exc
    return Sources(costs, given, answer, now)


def _options_for(missing: tuple[str, ...]) -> str:
    words = [_flag(f"{name}_ms_per_token") for name in ("provider", "decoder") if name in missing]
    if "restore" in missing or "provider" in missing:
        words.append("--restore-ms-per-mib with --kib-per-token (or --adopt-ms)")
    return " and ".join(words)


def _run_split(arguments: argparse.Namespace) -> int:
    from onebitd.core.split import Engines
    from onebitd.surfaces import split_pages as pages

    engines = None
    if arguments.gpu_ms_per_row is not None and arguments.npu_ms_per_tile is not None:
        engines = Engines(arguments.gpu_ms_per_row, arguments.npu_ms_per_tile)
    if (engines is None) is (arguments.split_speedup is None):
        raise UsageError(
            "--split needs --gpu-ms-per-row and --npu-ms-per-tile, or instead of both"
            " --split-speedup"
        )
    question = pages.Question(
        arguments.rows or SPLIT_ROWS,
        engines,
        engines.ceiling if engines is not None else arguments.split_speedup,
        tuple(arguments.gemm_share or ()),
    )
    _print(json.dumps(pages.split_object(question)) if arguments.json else pages.page(question))
    return EXIT_FINE


def _refuse_mixed(arguments: argparse.Namespace) -> None:
    """Refuse options that the question at hand would silently leave aside."""
    for name in _ADVICE_OPTIONS if arguments.split else _SPLIT_OPTIONS:
        if getattr(arguments, name) is not None:
            how = "says nothing with" if arguments.split else "goes with"
            raise UsageError(f"{_flag(name)} {how} --split")
    if arguments.split_speedup is not None:
        for name in ("gpu_ms_per_row", "npu_ms_per_tile", "rows"):
            if getattr(arguments, name) is not None:
                raise UsageError(f"{_flag(name)} says nothing with --split-speedup")


def _figure(text: str) -> float:
    """Return a number from 0 to a billion."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to {_MOST:g}")
    return value


def _rate(text: str) -> float:
    value = _figure(text)
    if value < 1 / _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return value


def _share(text: str) -> float:
    """Return a fraction; a number above 1, or one with a percent sign, is percent."""
    value = _figure(text.removesuffix("%"))
    if text.endswith("%") or value > 1:
        value /= 100
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is more than the whole")
    return value


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _print(text: str) -> None:
    cli_terminal.write(f"{text}\n")
