#!/usr/bin/env python3
"""Plays a prefill provider whose state file is damaged: `--tokens IDS --out STATE --model MODEL`.

It copies a good file that the decoder itself saved for as many ids, listed plainly, and does one
named thing to it. The environment says which:

DAMAGE_STATE   the good state file
DAMAGE_MEMORY  what it holds: "kv", "kv kv", "kv recr", "kv kv recr" or "recr"
DAMAGE_EXT     bytes that each attention cell has beside position, count and sequence: 0, 8 or 12
DAMAGE_NAME    a file with the name of a damage of `DAMAGES` or `PLACES`; empty: none

Standard library only, so that a run takes some 50 ms.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.standins.damaged_state import (
    Q8_BLOCK,
    State,
    of_other_build,
    of_shallower_model,
    of_wider_model,
    packed,
    quantized,
    s_row,
    swapped,
    transposed,
    unquantized,
    untransposed,
    with_one,
    with_random_values,
    with_second_stream,
    with_two_recr,
    without_recr,
)

INT_MAX = 2**31 - 1

_Make: TypeAlias = Callable[[State], bytes]


@dataclass(frozen=True)
class Damage:
    """What is done to a good file, and the words in which the daemon must refuse it.

    Attributes:
        words: part of the record's detail; `{n}` stands for the number of ids handed over.
        memory: of the decoders that are tried with it; see `tests/e2e/test_damages_real.py`.
        least_version: of the state format.
    """

    name: str
    make: _Make
    words: str
    memory: tuple[str, ...] = ("plain",)
    least_version: int = 2
    reason: str = "bad_state"


HYBRID, SLIDING, RECURRENT = "hybrid", "sliding", "recurrent"
STATES = (HYBRID, RECURRENT)

_SIZE = [
    Damage("empty", lambda s: b"", "ends at byte 0"),
    Damage("cut-in-header", lambda s: s.data[:10], "the header"),
    Damage("cut-in-tokens", lambda s: s.data[:99], "the list of {n} tokens"),
    Damage("cut-in-cells", lambda s: s.data[: s.kv.cells + 100], "{n} cells do not fit"),
    Damage("cut-in-n_layer", lambda s: s.data[: s.kv.shape + 6], "the header of section"),
    Damage("cut-in-k-header", lambda s: s.data[: s.k(0).at - 5], "layer 0 K"),
    Damage("cut-in-k", lambda s: s.data[: s.k(29).at + 9], "layer 29 K"),
    Damage("cut-in-v-header", lambda s: s.data[: s.v(3).at - 5], "layer 3 V"),
    Damage("cut-in-v", lambda s: s.data[: s.v(7).at + 9], "layer 7 V"),
    Damage("cut-in-last-row", lambda s: s.data[:-100], "100 bytes before the end of layer 29 V"),
    Damage("one-byte-short", lambda s: s.data[:-1], "1 byte before the end of layer 29 V"),
    Damage("trailing-16", lambda s: s.data + bytes(16), "16 bytes too many"),
    Damage("trailing-1m", lambda s: s.data + bytes(1 << 20), "1048576 bytes too many"),
]
_HEAD = [
    Damage("magic", lambda s: s.put(0, "I", 0x67677372), "not a state file"),
    Damage("whole-session-magic", lambda s: s.put(0, "I", 0x6767736E), "not a state file"),
    Damage("text", lambda s: b"Not a state at all.\n" * 999, "not a state file"),
    Damage("zeros", lambda s: bytes(len(s.data)), "not a state file"),
    Damage("random", lambda s: random.Random(1).randbytes(99_999), "not a state file"),  # noqa: S311
    Damage("version-9", lambda s: s.put(4, "I", 9), "state version 9"),
    Damage("version-3", lambda s: s.put(4, "I", 3), "state version 3, the decoder has"),
    Damage("other-build", of_other_build, "state version"),
]
_TOKENS = [
    Damage("no-tokens", lambda s: s.with_words([]), "holds 0 tokens, {n} were"),
    Damage("no-tokens-packed", lambda s: s.with_words([-1, 1, 0, 0]), "token"),
    Damage("n_words-less", lambda s: s.put(8, "I", s.n - 1), "holds 58 tokens, {n} were"),
    Damage("n_words-more", lambda s: s.put(8, "I", s.n + 1), "holds 60 tokens, {n} were"),
    Damage("n_words-huge", lambda s: s.put(8, "I", 1 << 30), "too many for {n} tokens"),
    Damage("packed-version", lambda s: packed(s, version=2), "the packed token list"),
    Damage("packed-short", lambda s: packed(s, more=1), "says 60 ids"),
    Damage("packed-long", lambda s: packed(s, more=-1), "says 58 ids"),
    Damage("packed-media", lambda s: packed(s, n_media=1), "text without media"),
    Damage("id-beyond-vocabulary", lambda s: s.put(92, "i", 10**6), "token 20 is not the one"),
    Damage("id-negative", lambda s: s.put(92, "i", -5), "token 20 is not the one"),
    Damage("id-minus-one", lambda s: s.put(92, "i", -1), "token 20 is not the one"),
    Damage("ids-beyond-context", lambda s: s.with_words([7] * 3000), "too many for {n} tokens"),
    Damage("ids-of-another-prompt", lambda s: s.with_words(s.ids[::-1]), "token 0 is"),
    Damage("fewer-ids", lambda s: s.with_words(s.ids[:-1]), "holds 58 tokens, {n} were"),
    Damage("more-ids", lambda s: s.with_words([*s.ids, 77]), "holds 60 tokens, {n} were"),
]
_SHAPE = [
    Damage("no-stream", lambda s: s.put(s.kv.at, "I", 0), "0 streams"),
    Damage("two-streams", lambda s: s.put(s.kv.at, "I", 2), "2 streams"),
    Damage("second-stream-empty", with_second_stream, "2 streams"),
    Damage("huge-stream", lambda s: s.put(s.kv.at, "I", 1 << 31), "2147483648 streams"),
    Damage("v_trans-flag", lambda s: s.put(s.kv.shape, "I", 1), "v_trans 1, the decoder has 0"),
    Damage("flash-attention-off", transposed, "v_trans 1, the decoder has 0"),
    Damage("flash-attention-on", untransposed, "v_trans 0, the decoder has 1", ("transposed",)),
    Damage("q8_0", quantized, "the decoder has"),
    Damage("f16", unquantized, "the decoder has", ("q8_0",)),
    Damage("n_layer-less", lambda s: s.put(s.kv.shape + 4, "I", 29), "layers 29, the decoder has"),
    Damage("n_layer-more", lambda s: s.put(s.kv.shape + 4, "I", 31), "layers 31, the decoder has"),
    Damage("shallower-model", of_shallower_model, "layers 24, the decoder has 30"),
    Damage("wider-model", of_wider_model, "row size 768, the decoder has 384"),
    Damage("row-size", lambda s: s.put(s.k(3).at - 8, "Q", 386), "layer 3 K: row size 386"),
    Damage("k-type", lambda s: s.put(s.k(3).head, "i", 8), "layer 3 K: type q8_0"),
    Damage("v-type", lambda s: s.put(s.v(5).head, "i", 30), "layer 5 V: type bf16"),
    Damage(
        "n_rot", lambda s: s.put(s.kv.shape + 8, "I", 64), "n_rot_k 64, the decoder has 0",
        least_version=4,
    ),
    Damage(
        "no-n_rot", lambda s: s.put(s.kv.shape + 12, "I", 0), "n_rot_v 0, the decoder has",
        ("q8_0",), least_version=4,
    ),
]  # fmt: skip
_CELLS = [
    Damage("count-none", lambda s: s.put(s.kv.at + 4, "I", 0), "0 cells, {n} expected"),
    Damage("count-less", lambda s: s.put(s.kv.at + 4, "I", s.n - 1), "58 cells, {n} expected"),
    Damage("count-more", lambda s: s.put(s.kv.at + 4, "I", s.n + 1), "60 cells, {n} expected"),
    Damage("count-twice", lambda s: s.put(s.kv.at + 4, "I", 2 * s.n), "118 cells, {n} expected"),
    Damage("count-beyond-cache", lambda s: s.put(s.kv.at + 4, "I", 99_999), "99999 cells, {n}"),
    Damage("count-int-max", lambda s: s.put(s.kv.at + 4, "I", INT_MAX), "2147483647 cells, {n}"),
    Damage("count-u32-max", lambda s: s.put(s.kv.at + 4, "i", -1), "4294967295 cells, {n}"),
    Damage("n_seq_id-0", lambda s: s.put(s.kv.cells + 124, "I", 0), "cell 10: n_seq_id 0"),
    Damage("n_seq_id-2", lambda s: s.put(s.kv.cells + 124, "I", 2), "cell 10: n_seq_id 2"),
    Damage(
        "n_seq_id-huge", lambda s: s.put(s.kv.cells + 124, "i", -1), "cell 10: n_seq_id 4294967295"
    ),
    Damage("no-cells", lambda s: s.with_cells([]), "0 cells, {n} expected", ("plain", HYBRID)),
    Damage("last-cells-missing", lambda s: s.with_cells(range(50)), "50 cells, {n} expected"),
    Damage("first-cell-missing", lambda s: s.with_cells(range(1, s.n)), "58 cells, {n} expected"),
    Damage(
        "cells-beyond-context",
        lambda s: s.with_cells([*range(s.n), *[s.n - 1] * 3000]),
        "3059 cells, {n} expected",
        (HYBRID,),
    ),
]
_POSITIONS = [
    Damage(name, lambda s, make=make: s.with_positions(make(s)), words)  # type: ignore[misc]
    for name, make, words in (
        ("positions-plus-5", lambda s: range(5, s.n + 5), "cell 0: position 5, 0 expected"),
        ("positions-reversed", lambda s: range(s.n)[::-1], "cell 0: position 58, 0 expected"),
        ("positions-swapped", swapped, "cell 20: position 21, 20 expected"),
        ("positions-all-0", lambda s: [0] * s.n, "cell 1: position 0, 1 expected"),
        (
            "positions-gap",
            lambda s: [*range(9), *range(10, s.n + 1)],
            "cell 9: position 10, 9 expected",
        ),
        (
            "last-position-twice",
            lambda s: with_one(s, s.n - 1, s.n - 2),
            "cell 58: position 57, 58 expected",
        ),
        ("first-position-negative", lambda s: with_one(s, 0, -1), "cell 0: position -1, 0"),
        ("positions-all-negative", lambda s: [-5] * s.n, "cell 0: position -5, 0 expected"),
        ("position-int-max", lambda s: with_one(s, 30, INT_MAX), "cell 30: position 2147483647"),
        (
            "positions-a-million-on",
            lambda s: range(10**6, 10**6 + s.n),
            "cell 0: position 1000000, 0 expected",
        ),
    )
]
_VALUES = [
    Damage(
        "nan-in-k",
        lambda s: s.put(s.k(4).at + 2 * 192, "H", 0x7E00),
        "layer 4 K: a NaN or an infinity",
    ),
    Damage(
        "infinity-in-k", lambda s: s.put(s.k(0).at, "H", 0xFC00), "layer 0 K: a NaN or an infinity"
    ),
    Damage(
        "nan-in-v",
        lambda s: s.put(s.v(9).at + 2 * 500, "H", 0xFE01),
        "layer 9 V: a NaN or an infinity",
    ),
    Damage(
        "infinity-in-v",
        lambda s: s.put(s.v(29).end - 2, "H", 0x7C00),
        "layer 29 V: a NaN or an infinity",
    ),
    Damage("zero-k", lambda s: s.with_zeros(s.k(11)), "layer 11 K: every value is zero"),
    Damage(
        "unwritten-cell",
        lambda s: s.with_zeros(s.v(12), cell=17),
        "layer 12 V, cell 17: every value is zero",
    ),
    Damage(
        "unwritten-cell-of-blocks",
        lambda s: s.with_zeros(s.k(12), cell=17),
        "layer 12 K, cell 17: every value is zero",
        ("q8_0",),
    ),
    Damage("huge-value", lambda s: s.put(s.v(6).at, "H", 0x7BFF), "layer 6 V: a value of 6.55e+04"),
    Damage(
        "nan-in-channel",
        lambda s: s.put(s.v(1).end - 2, "H", 0x7E00),
        "layer 1 V: a NaN or an infinity",
        ("transposed",),
    ),
    Damage(
        "nan-in-scale-of-k",
        lambda s: s.put(s.k(7).at + 340, "H", 0x7E00),
        "layer 7 K: a NaN or an infinity",
        ("q8_0",),
    ),
    Damage(
        "infinity-in-scale-of-v",
        lambda s: s.put(s.v(29).end - Q8_BLOCK, "H", 0x7C00),
        "layer 29 V: a NaN or an infinity",
        ("q8_0",),
    ),
]
_COORDINATES = [
    Damage(
        f"{name}-elsewhere",
        lambda s, at=at: s.put(s.kv.cells + 5 * s.kv.cell_bytes + at, "i", 3000),  # type: ignore[misc]
        f"cell 5: {words}",
        ("transposed",),
        least_version,
    )
    for name, at, words, least_version in (
        ("x", 8, "x 3000", 2),
        ("y", 12, "y 3000", 2),
        ("token", 16, "not the token that was handed over", 3),
    )
]
_SLIDING = [
    Damage(
        "window-count",
        lambda s: s.put(s.sections[1].at + 4, "I", s.n - 1),
        "section sliding window: 58 cells",
        (SLIDING,),
    ),
    Damage(
        "window-empty",
        lambda s: s.data[: s.sections[1].at + 4] + bytes(4) + s.data[s.sections[1].end :],
        "section sliding window: 0 cells",
        (SLIDING,),
    ),
    Damage(
        "window-position",
        lambda s: s.with_positions([-5], s.sections[1]),
        "sliding window, cell 0: position -5",
        (SLIDING,),
    ),
    Damage(
        "window-nan",
        lambda s: s.put(s.sections[1].tensors[-1].end - 2, "H", 0x7E00),
        " V: a NaN or an infinity",
        (SLIDING,),
    ),
]
_RECURRENT = [
    Damage("recr-cut-in-r", lambda s: s.data[: s.last.tensors[1].at + 9], "state, R 1", STATES),
    Damage("recr-cut-in-s-header", lambda s: s.data[: s_row(s).at - 5], "recurrent state", STATES),
    Damage(
        "recr-cut-in-s",
        lambda s: s.data[: s_row(s, 2).at + 9],
        "end of recurrent state, S 2",
        (RECURRENT,),
    ),
    Damage("recr-1-byte-short", lambda s: s.data[: s.end - 1], "recurrent state, S", STATES),
    Damage("recr-none", without_recr, "recurrent state: 0 cells", STATES),
    Damage("recr-two", with_two_recr, "recurrent state: 2 cells", STATES),
    Damage("recr-huge", lambda s: s.put(s.last.at, "I", INT_MAX), "2147483647 cells", STATES),
    Damage("recr-u32-max", lambda s: s.put(s.last.at, "i", -1), "4294967295 cells", STATES),
    Damage("recr-n_seq_id", lambda s: s.put(s.last.at + 8, "I", 1), "n_seq_id 1", STATES),
    Damage("recr-n_layer", lambda s: s.put(s.last.at + 16, "I", 5), "layers 5", STATES),
    Damage("recr-earlier", lambda s: s.put(s.last.cells, "i", s.n - 2), "position 57", STATES),
    Damage("recr-negative", lambda s: s.put(s.last.cells, "i", -1), "position -1", STATES),
    Damage("recr-int-max", lambda s: s.put(s.last.cells, "i", INT_MAX), "position 214748", STATES),
    Damage(
        "recr-nan-in-r",
        lambda s: s.put(s.last.tensors[0].at, "I", 0x7FC00000),
        "recurrent state, R 0: a NaN",
        STATES,
    ),
    Damage(
        "recr-nan-in-s",
        lambda s: s.put(s_row(s, 3).end - 4, "I", 0xFF800000),
        "recurrent state, S 3: a NaN",
        (RECURRENT,),
    ),
]
DAMAGES = [
    *_SIZE, *_HEAD, *_TOKENS, *_SHAPE, *_CELLS, *_POSITIONS, *_VALUES, *_COORDINATES, *_SLIDING,
    *_RECURRENT,
]  # fmt: skip
"""Everything that can be seen in the file."""

OF_VERSION = [*_HEAD, *_SHAPE]
"""Of those what another version of the format tells otherwise, or in another place."""

NOISE = Damage("noise", with_random_values, "")
"""What cannot: finite values in the right shape. Only recomputing them tells."""


def _unreadable(out: Path, good: Path) -> None:
    out.write_bytes(good.read_bytes())
    out.chmod(0)


@dataclass(frozen=True)
class Place:
    """What lies where the state file should, and the words in which it must be refused.

    Attributes:
        put: is given the path that the file should have, and that of a good file elsewhere.
    """

    name: str
    put: Callable[[Path, Path], object]
    words: str
    reason: str = "bad_state"


PLACES = [
    Place("missing", lambda out, good: None, "wrote no state file", "provider_no_file"),
    Place("directory", lambda out, good: out.mkdir(), "not a regular file"),
    Place("dangling-link", lambda out, good: out.symlink_to("nowhere"), "a symbolic link"),
    Place("link-to-a-good-file-outside", lambda out, good: out.symlink_to(good), "a symbolic link"),
    Place("link-to-dev-null", lambda out, good: out.symlink_to("/dev/null"), "a symbolic link"),
    Place("fifo", lambda out, good: os.mkfifo(out), "not a regular file"),
    Place("hard-link", lambda out, good: out.hardlink_to(good), "one name"),
    Place("unreadable", _unreadable, "Permission denied"),
]


def main() -> int:
    """Run once; return the exit status."""
    parser = argparse.ArgumentParser()
    for name in ("--tokens", "--out", "--model"):
        parser.add_argument(name, required=True)
    parser.add_argument("--elfs")
    out = Path(parser.parse_args().out)
    environ = os.environ
    good = Path(environ["DAMAGE_STATE"])
    name = Path(environ["DAMAGE_NAME"]).read_text()
    for place in PLACES:
        if place.name == name:
            place.put(out, good)
            return 0
    data = good.read_bytes()
    if name:
        damage = next(damage for damage in (*DAMAGES, NOISE) if damage.name == name)
        data = damage.make(State(data, environ["DAMAGE_MEMORY"], int(environ["DAMAGE_EXT"])))
    out.write_bytes(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
