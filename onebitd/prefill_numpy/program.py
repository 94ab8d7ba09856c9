"""The program: its command line, and one run from the ids to the state file.

The contract is in onebit-provider(7). What it asks of every provider (ids, signals, exit statuses,
the last line of each stream) is the same code as in `onebitd.prefill_llama`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from onebitd.core import provider_contract
from onebitd.core.state_layout import Layout
from onebitd.core.state_sections import VERSIONS
from onebitd.core.state_write import write_state
from onebitd.prefill_llama import (
    EXIT_LAYOUT,
    EXIT_PREFILL,
    EXIT_START,
    EXIT_USAGE,
    EXIT_WRITE,
    PrefillError,
    StopSignals,
    check_model,
    contract_parser,
    fill_share,
    open_share,
    parse_contract,
    read_ids,
    run_program,
)
from onebitd.prefill_numpy import layout as layouts
from onebitd.prefill_numpy.engine import LayerRows, prefill
from onebitd.prefill_numpy.model_file import ModelFile
from onebitd.prefill_numpy.shape import ARCHITECTURES, Shape, read_shape

if TYPE_CHECKING:
    from onebitd.prefill_share import Share

PROGRAM = "onebit-prefill-numpy"
EXAMPLE_VARIABLE = provider_contract.STATE_EXAMPLE_VARIABLE

EPILOG = f"""\
environment (a flag wins over its variable):
  {EXAMPLE_VARIABLE}   --like
  OPENBLAS_NUM_THREADS   threads of the matrix products

exit status:
  0  all is written, and the last line on stdout is {{"prefill_ms": MS}}
  {EXIT_USAGE}  usage, or a bad ids file, header file or model file
  {EXIT_START}  an architecture that is not known here, or no package gguf
  {EXIT_PREFILL}  the prefill failed
  {EXIT_WRITE}  STATE_FILE or the shared memory could not be written
  {EXIT_LAYOUT}  this engine cannot write the decoder's kind of cache; nothing was written

The last line on stderr says why.
"""


@dataclass(frozen=True)
class Options:
    """What one run does.

    Either `out` is set, the file route, or `layout` and `fds` are, the shared route.
    """

    tokens: str
    out: str | None
    layout: str | None
    fds: tuple[int, ...]
    model: str
    like: str | None
    state_version: int


def parse_options(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Return the options of a command line, with defaults from the environment.

    Exits 2 with one line on stderr for a bad one, 0 for --help and --version.
    """
    known = ", ".join(ARCHITECTURES)
    what = f"Prefill a prompt with numpy, for models of {known}"
    parser = contract_parser(PROGRAM, what, EPILOG)
    add = parser.add_argument
    add(
        "--like",
        metavar="STATE_FILE",
        default=environ.get(EXAMPLE_VARIABLE) or None,
        help="a state file that the decoder saved for the same model: version, types and "
        "transposition are read there (default: what onebitd says; without either f16 and flash "
        "attention)",
    )
    add(
        "--state-version",
        type=int,
        choices=VERSIONS,
        default=VERSIONS[-1],
        help="the version of the decoder's state files, when no file shows it (default: "
        "%(default)s)",
    )
    found = parse_contract(parser, argv)
    return Options(
        tokens=found.tokens,
        out=found.out,
        layout=found.layout,
        fds=found.fds or (),
        model=found.model,
        like=found.like,
        state_version=found.state_version,
    )


@dataclass(frozen=True)
class Prefilled:
    """What was computed, and all that is needed to write it down."""

    layout: Layout
    shape: Shape
    ids: Sequence[int]
    cache: Sequence[LayerRows]

    def write(
        self, write: Callable[[bytes | bytearray | memoryview], object], *, all_cells: bool
    ) -> None:
        """Write the state file.

        Args:
            all_cells: the layers with a sliding window keep every position. Otherwise the window
                and one more, with which llama-server goes on in any case; a window alone is enough
                only with --swa-full.
        """
        swa_cells = None if all_cells else self.shape.window + 1
        data = layouts.tensor_data(self.layout, self.shape, self.cache, len(self.ids), swa_cells)
        write_state(write, self.layout, self.ids, data, swa_cells=swa_cells)


def run(options: Options, signals: StopSignals) -> float:
    """Carry out one run and return `prefill_ms`; PrefillError or Stopped, and nothing is left.

    Everything that can be refused is refused before anything is computed.
    """
    ids = read_ids(options.tokens)
    check_model(options.model)
    model = ModelFile(options.model)
    shape = read_shape(model)
    if options.like is None:
        layout = layouts.default_layout(shape, options.state_version)
    else:
        layout = layouts.read_layout(options.like, shape)
    share = open_share(options.layout, options.fds, len(ids))
    with claimed(options.out, signals) as file_name:
        started = time.monotonic()
        try:
            with np.errstate(all="ignore"):  # damaged weights; what is not finite is found below
                cache = prefill(model, shape, ids, layouts.layer_types(layout, shape))
        except MemoryError as error:
            raise PrefillError(EXIT_PREFILL, f"there is no memory for {len(ids)} ids") from error
        prefill_ms = (time.monotonic() - started) * 1000.0
        prefilled = Prefilled(layout, shape, ids, cache)
        if share is not None:
            write_share(prefilled, share, signals)
        elif options.out is not None:
            write_file(prefilled, file_name, options.out)
    return prefill_ms


@contextlib.contextmanager
def claimed(out: str | None, signals: StopSignals) -> Iterator[str]:
    """Make an empty file beside STATE_FILE, and remove it at the end unless it was renamed.

    A directory that is missing or cannot be written to is found out here, not after the prefill.
    Raises PrefillError (status 5). On the shared route there is no file.
    """
    if out is None:
        yield ""
        return
    directory = os.path.dirname(os.path.abspath(out))
    name = os.path.join(directory, f".onebit-prefill-{os.urandom(6).hex()}.state")
    if os.path.isdir(out):
        raise PrefillError(EXIT_WRITE, f"--out {out}: is a directory; give a file name")
    try:
        with signals.held():
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                os.close(os.open(name, flags, 0o600))
            except OSError as error:
                raise PrefillError(
                    EXIT_WRITE,
                    f"--out {out}: cannot create a file in {directory}: {error.strerror}",
                ) from error
        yield name
    finally:
        signals.ignore()
        with contextlib.suppress(OSError):
            os.unlink(name)


def write_file(prefilled: Prefilled, name: str, out: str) -> None:
    """Write the state to its temporary name and rename it to `out`; PrefillError (status 5)."""
    try:
        with open(name, "wb") as file:
            prefilled.write(file.write, all_cells=False)
        os.replace(name, out)
    except OSError as error:
        raise PrefillError(EXIT_WRITE, f"--out {out}: {error.strerror}") from error


def write_share(prefilled: Prefilled, share: Share, signals: StopSignals) -> None:
    """Write the rows into the decoder's memory, by way of a state file that has no name."""
    try:
        with open(os.memfd_create("onebit-prefill"), "w+b") as file:
            prefilled.write(file.write, all_cells=True)
            file.flush()
            fill_share(share, file.fileno(), prefilled.ids, signals)
    except OSError as error:
        raise PrefillError(EXIT_WRITE, f"memory for the state: {error.strerror}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    options = parse_options(sys.argv[1:] if argv is None else argv, os.environ)
    return run_program(PROGRAM, lambda signals: run(options, signals))
