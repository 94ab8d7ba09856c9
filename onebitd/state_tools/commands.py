"""`onebitctl state show`, `check` and `diff`: read the files, print, and return the exit status."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from onebitd.core import state_check
from onebitd.core.errors import StateFileError, UsageError
from onebitd.core.state_baseline import learn_baseline
from onebitd.core.state_compare import (
    DEFAULT_SCALE_TOLERANCE,
    DEFAULT_TOLERANCE,
    LEAST_SCALE_POSITIONS,
    compare,
)
from onebitd.core.state_file import learn_layout, parse
from onebitd.core.state_layout import SLIDING, StateFile, layout_names
from onebitd.core.state_pairs import pair_up
from onebitd.state_tools import pages, plot
from onebitd.state_tools.files import OpenState, open_state, read_ids, read_model, write_whole
from onebitd.state_tools.values import range_of
from onebitd.surfaces.cli_service import say, tell

EXIT_FINE = 0
EXIT_NOT_FINE = 1
EXIT_UNREADABLE = 2


def show(path: str, *, ids: bool, values: bool, as_json: bool) -> int:
    """Print what a state file holds."""
    with open_state(path) as source:
        state = source.parse()
        with source.named():
            blocks = [block for section in state.sections for block in section.blocks]
            ranges = [range_of(source, block) for block in blocks] if values else []
    if as_json:
        found = pages.state_object(path, state, ids=ids)
        if values:
            found["values"] = [dataclasses.asdict(one) for one in ranges]
        say(json.dumps(found))
        return EXIT_FINE
    for line in pages.state_page(path, state, ids=ids):
        say(line)
    if values:
        for line in pages.range_lines(ranges):
            say(line)
    return EXIT_FINE


def check(
    path: str,
    *,
    tokens: str | None,
    like: str | None,
    model: str | None,
    swa_window: int | None,
    as_json: bool,
) -> int:
    """Check a state file as the daemon does; without `like` it is held against itself."""
    ids = None if tokens is None else read_ids(tokens)
    if swa_window is None and model is not None:
        swa_window = read_model(model).sliding_window
    layout = baseline = None
    if like is not None:
        with open_state(like) as example, example.named():
            own = example.parse()
            layout = learn_layout(example, own.tokens.tolist())
            baseline = learn_baseline(example, own)
    knows_window = swa_window is not None or model is not None
    if not knows_window:
        swa_window = 1  # nothing tells how much of a window there must be
    with open_state(path) as source:
        problem = None
        try:
            if layout is None or ids is None:
                state = parse(source, layout)
                layout = layout or state.layout
                ids = state.tokens.tolist() if ids is None else ids
            state_check.check(source, layout, ids, swa_window=swa_window, baseline=baseline)
        except StateFileError as error:
            problem = str(error)
    against = "the decoder's layout" if like else "itself alone: --like FILE names a decoder's own"
    if as_json:
        say(json.dumps({"file": path, "ok": problem is None, "problem": problem, "like": like}))
    elif problem is not None:
        tell(f"{path}: {problem}")
    else:
        say(f"{path}: fine, held against {against}")
        if layout and not knows_window and SLIDING in layout_names(layout.sections):
            tell("the length of the sliding window was not checked: give --model or --swa-window")
    return EXIT_FINE if problem is None else EXIT_NOT_FINE


@dataclass(frozen=True, slots=True)
class DiffOptions:
    """How to compare; None takes the default."""

    tolerance: float | None
    scale_tolerance: float | None
    head_dim: int | None
    model: str | None
    positions: range | None
    every: bool
    as_json: bool
    plot: str | None


def diff(a: str, b: str, options: DiffOptions) -> int:
    """Compare a state file with a reference."""
    head_dim = options.head_dim
    if head_dim is None and options.model is not None:
        head_dim = read_model(options.model).head_dim
        if head_dim is None:
            raise UsageError(f"{options.model}: does not say how large a head is; give --head-dim")
    row = DEFAULT_TOLERANCE if options.tolerance is None else options.tolerance
    scale = DEFAULT_SCALE_TOLERANCE if options.scale_tolerance is None else options.scale_tolerance
    with open_state(a) as mine, open_state(b) as other:
        states = mine.parse(), other.parse()
        try:
            found = compare(
                states[0],
                mine,
                states[1],
                other,
                tolerance=row,
                scale_tolerance=scale,
                head_dim=head_dim,
                positions=options.positions,
            )
            if options.plot is not None and found.compared_values:
                _plot(options, states, mine, other)
        except StateFileError as error:
            raise UsageError(f"{a} or {b}: {error}") from error
    if options.as_json:
        say(json.dumps(pages.diff_object(found, a, b, row, scale)))
    for note in found.notes:
        tell(note)
    if not found.compared_values:
        tell(f"nothing could be compared in {a} and {b}")
        return EXIT_UNREADABLE
    equal = found.within and all(tensor.max_abs == 0 for tensor in found.tensors)
    if not options.as_json and (options.every or not equal):
        for line in pages.diff_page(found, row, scale, every=options.every):
            say(line)
        heads = [tensor.head for tensor in found.tensors if tensor.part in ("K", "V")]
        if found.within and heads and all(head is None for head in heads):
            how = f"that takes {LEAST_SCALE_POSITIONS} positions, and rows of whole heads"
            how = "give --model or --head-dim" if head_dim is None else how
            tell(f"sizes of heads were not compared: {how}")
    return EXIT_FINE if found.within else EXIT_NOT_FINE


def _plot(
    options: DiffOptions, states: tuple[StateFile, StateFile], a: OpenState, b: OpenState
) -> None:
    pairs = pair_up(states[0], a, states[1], b, options.positions).pairs
    write_whole(str(options.plot), plot.heat_map(pairs, f"{a.path} against {b.path}"))
