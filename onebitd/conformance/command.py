"""`onebitctl provider check`: builds the kit, runs it, prints its findings, leaves nothing."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from onebitd import prefill_llama
from onebitd.conformance import page, prompts, space, watch
from onebitd.conformance.bench import Bench, Limits, ModelFacts
from onebitd.conformance.cases import CASES, run_cases
from onebitd.conformance.decoder import Decoder, DecoderFailed, DecoderSetup
from onebitd.conformance.judge import Finding
from onebitd.conformance.provider_run import Invocation
from onebitd.core import backend_args, gguf_header, provider_contract, state_compare
from onebitd.core.errors import OnebitError, UsageError
from onebitd.core.gguf_header import GgufError, GgufHeader
from onebitd.core.state_layout import Layout

LEAST_CTX_SIZE: Final = 128
_ERASE_LINE: Final = "\r\x1b[K"


@dataclass(frozen=True)
class Options:
    """What `provider check` was asked for; see onebitctl(1).

    Attributes:
        llama_server: None takes ONEBIT_LLAMA_SERVER, then llama-server.
        tolerance, scale_tolerance: None takes the default of `state_compare`.
        only: cases; all when it is empty.
    """

    program: str
    model: str
    elfs: str | None
    llama_server: str | None
    llama_args: str
    ctx_size: int
    timeout_s: float
    tolerance: float | None
    scale_tolerance: float | None
    logprob_tolerance: float
    only: tuple[str, ...]
    keep: str | None
    json: bool


def run(options: Options) -> int:
    """Run the kit; returns 0 if the provider conforms, else 1.

    Raises:
        UsageError: the program, the model or an option is of no use.
        DecoderFailed: the decoder cannot be started or kept running (exit status 3).
        KeyboardInterrupt: after a SIGINT, with everything gone. After SIGTERM or SIGHUP this
            process ends by that signal.
    """
    plan = _Plan.of(options, os.environ)
    output = _Output(options)
    handlers = {signum: signal.getsignal(signum) for signum in prefill_llama.STOP_SIGNALS}
    umask = os.umask(0o077)
    try:
        signals = prefill_llama.StopSignals()
        facts = _check(plan, signals, output)
    except prefill_llama.Stopped as stop:
        output.progress("")
        if stop.signum == signal.SIGINT:
            raise KeyboardInterrupt from None
        signal.signal(stop.signum, signal.SIG_DFL)
        os.kill(os.getpid(), stop.signum)
        raise
    finally:
        os.umask(umask)
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    output.end(facts)
    return 0 if page.conforming(output.findings) else 1


@dataclass(frozen=True)
class _Plan:
    """The options, checked against what there is."""

    options: Options
    program: str
    model: str
    llama_server: str
    llama_args: tuple[str, ...]
    header: GgufHeader
    cases: tuple[str, ...]
    keep: Path | None
    temporary: Path

    @classmethod
    def of(cls, options: Options, environ: Mapping[str, str]) -> _Plan:
        """Raises UsageError, which names the option and the next step."""
        program = shutil.which(options.program)
        if program is None:
            raise UsageError(f"{options.program}: not found or not executable; check its mode")
        server = options.llama_server or environ.get("ONEBIT_LLAMA_SERVER") or "llama-server"
        llama_server = shutil.which(server)
        if llama_server is None:
            raise UsageError(f"llama-server program {server}: not found; give --llama-server PATH")
        try:
            llama_args = tuple(shlex.split(options.llama_args))
        except ValueError as error:
            raise UsageError(f"--llama-args: {error}") from error
        refused = backend_args.refusals(llama_args, "--llama-args", ctx_size_is_set=True)
        if refused:
            raise UsageError("; ".join(refused))
        if options.ctx_size < LEAST_CTX_SIZE:
            raise UsageError(f"--ctx-size {options.ctx_size}: give {LEAST_CTX_SIZE} or more")
        unknown = [case for case in options.only if case not in CASES]
        if unknown:
            raise UsageError(f"--only {unknown[0]}: the cases are {', '.join(CASES)}")
        wanted = {*options.only, *(["short"] if "repeat" in options.only else [])}
        temporary = space.temporary_directory(environ)
        space.require(temporary, 0)
        return cls(
            options=options,
            program=os.path.abspath(program),
            model=os.path.abspath(options.model),
            llama_server=os.path.abspath(llama_server),
            llama_args=llama_args,
            header=_read_header(options.model),
            cases=tuple(case for case in CASES if not wanted or case in wanted),
            keep=None if options.keep is None else _new_directory(Path(options.keep)),
            temporary=temporary,
        )


def _read_header(path: str) -> GgufHeader:
    try:
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        ):
            return gguf_header.read(mapped)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "empty"
        raise UsageError(f"--model {path}: {why}; it takes a readable GGUF file") from error
    except GgufError as error:
        raise UsageError(f"--model {path}: {error}") from error


def _new_directory(path: Path) -> Path:
    """Make the directory for what is kept; it may be there, and then must be empty."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise UsageError(f"--keep {path}: is not empty; name a new directory")
    except OSError as error:
        raise UsageError(f"--keep {path}: {error.strerror}") from error
    return path.absolute()


def _check(plan: _Plan, signals: prefill_llama.StopSignals, output: _Output) -> dict[str, Any]:
    """Run the cases and return the facts for --json; everything made here is gone afterwards."""
    options, header = plan.options, plan.header
    started = time.monotonic()
    with _home(signals, plan.temporary) as home:
        setup = DecoderSetup(
            program=plan.llama_server,
            model=plan.model,
            args=plan.llama_args,
            ctx_size=min(options.ctx_size, header.context_length or options.ctx_size),
            sliding_window=header.sliding_window is not None,
        )
        output.progress("the decoder loads the model")
        with contextlib.closing(Decoder(setup, home, signals)) as decoder:
            decoder.start()
            try:
                layout, baseline = decoder.learn_layout()
            except DecoderFailed:
                space.require(plan.temporary, 0)  # that is why, if it is full by now
                raise
            space.require(plan.temporary, _most_bytes(plan, decoder, layout))
            tolerance, scale = options.tolerance, options.scale_tolerance
            output.head(plan, decoder, layout)
            limits = Limits(
                state_compare.DEFAULT_TOLERANCE if tolerance is None else tolerance,
                state_compare.DEFAULT_SCALE_TOLERANCE if scale is None else scale,
                options.logprob_tolerance,
            )
            bench = Bench(
                decoder=decoder,
                layout=layout,
                baseline=baseline,
                invocation=_invocation(plan, decoder, home),
                model=ModelFacts(header.sliding_window, header.n_vocab, header.head_dim),
                limits=limits,
                home=home,
                keep=plan.keep,
                signals=signals,
                report=output.report,
                progress=output.progress,
            )
            with _home_is_there(decoder.slots):
                run_cases(bench, plan.cases)
            return {
                "program": plan.program,
                "model": plan.model,
                "llama_server": plan.llama_server,
                "build": decoder.build,
                "ctx_size": decoder.n_ctx,
                "layout": layout.describe(),
                "tolerance": limits.tolerance,
                "scale_tolerance": limits.scale_tolerance,
                "logprob_tolerance": limits.logprob_tolerance,
                "cases": list(plan.cases),
                "elapsed_s": round(time.monotonic() - started, 3),
            }


def _most_bytes(plan: _Plan, decoder: Decoder, layout: Layout) -> int:
    """Return the size of the two states, provider's and decoder's, of the longest case."""
    n_ctx = decoder.n_ctx
    longest = n_ctx
    if "context" not in plan.cases:
        longest = prompts.long_length(n_ctx, plan.header.sliding_window)
    return 2 * layout.bytes_for(longest)


class HomeGone(DecoderFailed):
    """The kit's own directory was removed: nothing more can be judged."""


@contextlib.contextmanager
def _home_is_there(slots: Path) -> Iterator[None]:
    """Tell whatever goes wrong because the kit's directory is gone as just that; HomeGone."""
    try:
        yield
    except (OSError, OnebitError) as error:
        if slots.is_dir():
            raise
        raise HomeGone(
            f"{slots}: the kit's own directory is gone, and so nothing more can be judged; "
            "did the provider remove more than its run directory?"
        ) from error


def _invocation(plan: _Plan, decoder: Decoder, home: Path) -> Invocation:
    environ = provider_contract.environment(
        os.environ,
        {},
        lock_held=True,
        llama_server=plan.llama_server,
        state_example=decoder.example,
    )
    options = plan.options
    elfs = None if options.elfs is None else os.path.abspath(options.elfs)
    return Invocation(plan.program, plan.model, elfs, environ, str(home), options.timeout_s)


@contextlib.contextmanager
def _home(signals: prefill_llama.StopSignals, parent: Path) -> Iterator[Path]:
    """Make the kit's private directory; at the end kill what runs had left, and remove it."""
    with signals.held():
        home = Path(tempfile.mkdtemp(prefix="onebit-check-", dir=parent))  # made 0700
    try:
        yield home
    finally:
        signals.ignore()
        for pid in watch.processes_with(str(home)):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(home, ignore_errors=True)


@dataclass
class _Output:
    """The table, as it grows, or the object at the end; progress on a terminal's stderr."""

    options: Options
    findings: list[Finding] = field(default_factory=list)
    width: int | None = field(default_factory=page.columns)
    colour: bool = field(default_factory=page.has_colour)

    def head(self, plan: _Plan, decoder: Decoder, layout: Layout) -> None:
        """Print what the provider is judged by, unless --json is asked for."""
        if not self.options.json:
            self.progress("")
            text = f"{plan.llama_server} ({decoder.build}), context {decoder.n_ctx}"
            sys.stdout.write(f"decoder: {text}, {layout.describe()}\n")

    def report(self, finding: Finding) -> None:
        """Take a finding, and print it unless --json is asked for."""
        self.findings.append(finding)
        if not self.options.json:
            self.progress("")
            line = page.row(finding, self.width, colour=self.colour)
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    def progress(self, text: str) -> None:
        """Show what is being done, until the next call, on a terminal."""
        if sys.stderr.isatty():
            sys.stderr.write(_ERASE_LINE + text)
            sys.stderr.flush()

    def end(self, facts: dict[str, Any]) -> None:
        """Print the verdict."""
        self.progress("")
        if self.options.json:
            sys.stdout.write(json.dumps(page.as_json(facts, self.findings)) + "\n")
        else:
            sys.stdout.write(page.verdict_line(self.options.program, self.findings) + "\n")
