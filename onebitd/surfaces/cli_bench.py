"""`onebitctl bench`: the decoder alone against each route, on this very box and model.

What the other commands do not need is imported by the functions that do: those start faster.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from onebitd.core.errors import OnebitError, UsageError
from onebitd.core.handoff import Route
from onebitd.surfaces import cli_terminal
from onebitd.surfaces.cli_numbers import positive_int
from onebitd.surfaces.cli_text import PAGE_COLUMNS, clean, cut, duration

if TYPE_CHECKING:
    from onebitd.client import ControlClient
    from onebitd.core.bench_plan import Run
    from onebitd.core.bench_report import Sample
    from onebitd.surfaces.bench_pages import Bench
    from onebitd.surfaces.cli_public import PublicClient

LENGTHS: Final = (128, 512, 2048)
REPEAT: Final = 5
MAX_TOKENS: Final = 16
SHORTEST: Final = 2
TRIES: Final = 3
"""A run beside other requests is run again, and the last one counts whatever it was beside."""

EXIT_FINE: Final = 0
EXIT_NOTHING: Final = 1
EXIT_INTERRUPTED: Final = 130

_PATH: Final = "/v1/completions"


def register(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    where: argparse.ArgumentParser,
) -> None:
    """Add the command to a parser; `where` has the options that name a daemon."""
    parser = commands.add_parser(
        "bench",
        help="the decoder alone against each route, measured here",
        description="Measure the time to the first byte on the running daemon: the decoder alone"
        " against a handoff on each route, at several prompt lengths, in turns. Says where a"
        " handoff loses and where it breaks even. Other requests are served meanwhile; they spoil"
        " the figures.",
        epilog="Exit status: 0 measured; 1 no handoff could be, or the daemon answered with an"
        " error; 2 usage; 3 no daemon there; 4 permission denied; 130 interrupted, what was"
        " measured until then is printed.",
        parents=[where],
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--json", action="store_true", help="one object with every run and the medians")
    add(
        "--lengths",
        metavar="N,...",
        type=_lengths,
        help="prompt lengths in tokens (default: those of"
        f" {','.join(map(str, LENGTHS))} that fit the context)",
    )
    add(
        "--repeat",
        metavar="N",
        type=positive_int,
        default=REPEAT,
        help=f"runs of each way at each length that count (default: {REPEAT})",
    )
    add(
        "--routes",
        metavar="ROUTE,...",
        type=_routes,
        help=f"of {', '.join(Route)} (default: those that the daemon takes)",
    )
    add(
        "--max-tokens",
        metavar="N",
        type=positive_int,
        default=MAX_TOKENS,
        help=f"tokens of each reply (default: {MAX_TOKENS})",
    )
    add(
        "--api-key-file",
        metavar="FILE",
        help="file whose first key is the API key"
        " (default: the daemon's own file, when it can be read)",
    )
    add("--plot", metavar="PNG", help="draw the medians by prompt length; needs matplotlib")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; what was measured until an error or Ctrl-C is printed, too."""
    from onebitd.core import bench_report
    from onebitd.surfaces import bench_pages as pages
    from onebitd.surfaces import cli_public as public

    if arguments.plot is not None:
        from onebitd.state_tools.files import check_writable
        from onebitd.state_tools.plot import load_matplotlib

        load_matplotlib()  # that it is missing is told before, not after
        check_writable(arguments.plot)
    control = public.control_client(arguments.instance, arguments.socket)
    status = control.status()
    bench = plan(arguments, status)
    address = public.address_in(status.get("listen"))
    client = public.PublicClient(address, public.find_key(control, arguments.api_key_file))
    series = _Series(bench, control, client)
    error: OnebitError | None = None
    try:
        series.run()
    except KeyboardInterrupt:
        bench = dataclasses.replace(bench, interrupted=True)
    except OnebitError as exc:
        if not series.samples:
            raise
        bench, error = dataclasses.replace(bench, interrupted=True), exc
    finally:
        series.progress.end()
    found = bench_report.report(series.samples, bench.lengths, bench.ways)
    if arguments.json:
        text = json.dumps(pages.bench_object(bench, found, series.samples))
    else:
        text = pages.bench_page(bench, found, colour=cli_terminal.has_colour())
    cli_terminal.write(f"{text}\n")
    sys.stdout.flush()
    if error is not None:
        raise error
    if arguments.plot is not None:
        from onebitd.surfaces import bench_plot

        bench_plot.write(arguments.plot, found, pages.title(bench))
    if bench.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FINE if any(judged.pairs for judged in found.routes) else EXIT_NOTHING


def plan(arguments: argparse.Namespace, status: Mapping[str, Any]) -> Bench:
    """Return what is to be measured, after asking whether this daemon can do it.

    Raises:
        BadAnswer: it is not ready, or has no provider.
        UsageError: a length that does not fit its context, or a route that it does not take.
    """
    from onebitd.client import BadAnswer
    from onebitd.core.bench_plan import DECODER
    from onebitd.surfaces.bench_pages import Bench
    from onebitd.surfaces.cli_public import require_serving
    from onebitd.surfaces.cli_text import part_of

    require_serving(status)
    model = part_of(status, "model")
    ctx_size = model.get("ctx_size")
    if not isinstance(ctx_size, int):
        raise BadAnswer("the daemon does not say how long its context is")
    provider = part_of(status, "provider")
    if not provider.get("program"):
        raise BadAnswer(
            "the daemon has no prefill provider, so there is nothing to compare: set"
            " provider.program"
        )
    lengths = _fitting(arguments.lengths, arguments.max_tokens, ctx_size)
    routes = _possible(arguments.routes, str(provider.get("shared", "off")))
    return Bench(
        model=str(model.get("alias")),
        provider=str(provider["program"]),
        ctx_size=ctx_size,
        lengths=lengths,
        ways=(DECODER, *routes),
        repeat=arguments.repeat,
        max_tokens=arguments.max_tokens,
        seed=secrets.token_hex(8),
    )


class _Series:
    """Runs the plan, one request after the other.

    Attributes:
        samples: what was measured so far.
        progress: on standard error.
    """

    def __init__(self, bench: Bench, control: ControlClient, client: PublicClient) -> None:
        from onebitd.core.bench_plan import schedule

        self._bench = bench
        self._control = control
        self._client = client
        self._chance = random.Random(bench.seed)  # noqa: S311 - words, no secrets
        self._plan = schedule(bench.lengths, bench.ways, bench.repeat)
        self.samples: list[Sample] = []
        each = bench.repeat + 1
        self.progress = _Progress(each * len(bench.lengths) * len(bench.ways))

    def run(self) -> None:
        """Run all of it; a way that never works is given up, and all are when no route is left."""
        from onebitd.core.bench_report import is_hopeless

        for run in self._plan:
            hopeless = [way for way in self._bench.ways if is_hopeless(way, self.samples)]
            if set(self._bench.ways[1:]) <= set(hopeless):
                return
            if run.way in hopeless:
                self.progress.tell(f"{run.way}: given up")
                continue
            self.progress.tell(f"{run.tokens} tokens, {run.way}")
            sample = self._timed(run)
            for _ in range(TRIES - 1):
                if not sample.beside_others:
                    break
                sample = self._timed(run)
            self.samples.append(sample)

    def _timed(self, run: Run) -> Sample:
        """Send one request and return what it took; a prompt is sent once only."""
        from onebitd.client import BadAnswer
        from onebitd.core.bench_plan import DECODER, exact_ids
        from onebitd.core.bench_report import BESIDE_OTHERS_MS, Sample
        from onebitd.surfaces import cli_public as public

        ids = exact_ids(run.tokens, self._chance, self._tokenized)
        request_id = public.new_id("bench")
        headers = {"X-Request-Id": request_id, "X-Onebit-Handoff": "never"}
        if run.way != DECODER:
            headers |= {"X-Onebit-Handoff": "always", "X-Onebit-Route": run.way}
        others = self._has_others(request_id)
        sent, seen = time.monotonic(), None
        for event in self._client.stream(_PATH, self._body(ids), headers):
            if seen is None and event.get("choices"):
                seen = time.monotonic()
        record = public.record_of(self._control, request_id)
        if record is None or seen is None:
            raise BadAnswer("the daemon has no record of a request that it answered")
        others = others or self._has_others(request_id)
        others = others or (record.get("queue_ms") or 0.0) > BESIDE_OTHERS_MS
        return Sample(run, record, (seen - sent) * 1000.0, others)

    def _body(self, ids: Sequence[int]) -> dict[str, Any]:
        reply = {"max_tokens": self._bench.max_tokens, "temperature": 0, "ignore_eos": True}
        return {"prompt": list(ids), **reply}

    def _tokenized(self, text: str) -> list[int]:
        from onebitd.client import BadAnswer

        asked = {"content": text, "add_special": True}
        ids = self._client.ask("/tokenize", asked).get("tokens")
        if not isinstance(ids, list):
            raise BadAnswer("the decoder's /tokenize answered without tokens")
        return ids

    def _has_others(self, request_id: str) -> bool:
        return any(one.get("request_id") != request_id for one in self._control.requests())


class _Progress:
    """One line on standard error that is written over, when it is a terminal."""

    def __init__(self, runs: int) -> None:
        self._runs = runs
        self._done = -1
        self._began = time.monotonic()
        self._is_shown = cli_terminal.can_move(sys.stderr)

    def tell(self, what: str) -> None:
        """Say that the next run begins."""
        self._done += 1
        if self._is_shown:
            line = f"run {self._done + 1} of {self._runs}: {clean(what)}{self._left()}"
            sys.stderr.write(f"\r\x1b[K{cut(line, self._columns() - 1)}")
            sys.stderr.flush()

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(sys.stderr.fileno()).columns or PAGE_COLUMNS
        except OSError:
            return PAGE_COLUMNS

    def _left(self) -> str:
        if not self._done:
            return ""
        spent_s = time.monotonic() - self._began
        return f", about {duration(spent_s / self._done * (self._runs - self._done))} left"

    def end(self) -> None:
        """Take the line away."""
        if self._is_shown and self._done >= 0:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _fitting(wanted: tuple[int, ...] | None, max_tokens: int, ctx_size: int) -> tuple[int, ...]:
    """Return the lengths, of which the context takes each with its reply."""
    longest = ctx_size - max_tokens
    lengths = wanted or tuple(one for one in LENGTHS if one <= longest) or LENGTHS[:1]
    for tokens in lengths:
        if not SHORTEST <= tokens <= longest:
            raise UsageError(
                f"--lengths {tokens}: a prompt has from {SHORTEST} to {max(longest, 0)} tokens with"
                f" a context of {ctx_size} and a reply of {max_tokens}"
            )
    return lengths


def _possible(wanted: tuple[str, ...] | None, shared: str) -> tuple[str, ...]:
    """Return the routes; `shared` is the status's word about that one."""
    can_share = shared == "on" or shared.startswith("paused")
    if wanted is None:
        return (Route.FILE.value, Route.SHARED.value) if can_share else (Route.FILE.value,)
    if Route.SHARED.value in wanted and not can_share:
        how = "set handoff.share = true" if shared == "off" else "measure the file route alone"
        raise UsageError(f"--routes shared: it is {shared} here; {how}")
    return wanted


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(sorted({positive_int(word.strip()) for word in text.split(",")}))


def _routes(text: str) -> tuple[str, ...]:
    words = {word.strip() for word in text.split(",")}
    if not words <= set(Route):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of {', '.join(Route)}")
    return tuple(route.value for route in Route if route in words)
