"""`onebitctl state diff` on states of a real llama-server: honest ones pass, planted faults do not.

The faults are those of a provider: each is put into one layer of a real file, which a real
llama-server computed in other batches or with another attention than the reference, so that an
honest drift lies over everything.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onebitd.core.state_layout import Rows
from onebitd.core.state_values import encode
from onebitd.surfaces import cli
from tests.core import state_faults as faults
from tests.core import state_files as sf
from tests.llama_builds import BUILDS, MODELS, ROOT, LlamaModel, running_llama

TEXT = (ROOT / "LICENSE").read_text()
SMOLLM2, GEMMA3 = MODELS
N_TOKENS = 200
Fault = Callable[["Kind", bytes], bytes]


@dataclass(frozen=True)
class Kind:
    """A model, how llama-server runs it, and the layer that faults go into.

    Attributes:
        other: arguments under which it computes the same states, but for a drift.
        dim, base, halves: of its heads and their RoPE in that layer.
    """

    model: LlamaModel
    args: tuple[str, ...]
    other: tuple[str, ...]
    layer: str
    dim: int
    base: float
    halves: bool

    def bare(self, rows: Any) -> Any:
        """Take RoPE away from keys of this layer."""
        return faults.rope(rows, self.dim, self.base, halves=self.halves, times=-1)

    def rope(self, rows: Any, **how: Any) -> Any:
        """Apply another RoPE instead."""
        how = {"base": self.base, "halves": self.halves, **how}
        return faults.rope(self.bare(rows), self.dim, **how)


KINDS = {
    # Without --swa-full the cache of the window is a ring, of which the last 512 rows are saved.
    "smollm2": Kind(SMOLLM2, ("-fa", "on"), ("-fa", "off"), "layer 11", 64, 1e5, False),
    "gemma3": Kind(GEMMA3, (), ("-b", "64", "-ub", "64"), "sliding window layer 4", 256, 1e4, True),
}


@dataclass(frozen=True)
class States:
    """A state of a decoder, and one of the same prompt that differs by an honest drift."""

    kind: Kind
    reference: bytes
    drifted: bytes


@pytest.fixture(scope="module", params=KINDS)
def states(request: pytest.FixtureRequest) -> States:
    """Each kind, saved by two runs of one build."""
    kind = KINDS[request.param]
    BUILDS[0].require()
    kind.model.require()
    saved = []
    for args in (kind.args, kind.other):
        with running_llama(BUILDS[0], kind.model, *args) as client:
            client.complete(client.tokenize(TEXT)[:N_TOKENS], 0)
            assert client.slot_action("save", "s").status == 200
            saved.append((client.slots_dir / "s").read_bytes())
    return States(kind, *saved)


@pytest.fixture
def diff(
    states: States, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, Any]]:
    """Run `onebitctl state diff` on a file and the reference; exit status and the object."""

    def run(file: bytes, *arguments: str) -> tuple[int, Any]:
        a, b = tmp_path / "a", tmp_path / "b"
        a.write_bytes(file)
        b.write_bytes(states.reference)
        model = ("--model", str(states.kind.model.path))
        status = cli.main(["state", "diff", str(a), str(b), "--json", *model, *arguments])
        return status, json.loads(capsys.readouterr().out)

    return run


def in_k(fault: Callable[[Kind, Any], Any]) -> Fault:
    """Plant a fault into the keys of the layer."""
    return lambda kind, file: faults.plant(file, f"{kind.layer} K", lambda rows: fault(kind, rows))


def in_v(fault: Callable[[Kind, Any], Any]) -> Fault:
    """Plant a fault into the values of the layer."""
    return lambda kind, file: faults.plant(file, f"{kind.layer} V", lambda rows: fault(kind, rows))


def bits_in_k(make: Callable[[Any], bytes]) -> Fault:
    """Write the keys of the layer in another way."""
    return lambda kind, file: faults.put_bytes(
        file, f"{kind.layer} K", make(faults.rows_of(file, f"{kind.layer} K"))
    )


def exchanged(kind: Kind, file: bytes) -> bytes:
    """Write V as K and K as V."""
    k, v = f"{kind.layer} K", f"{kind.layer} V"
    rows_k, rows_v = faults.rows_of(file, k), faults.rows_of(file, v)
    return faults.put(faults.put(file, k, rows_v), v, rows_k)


def transposed_wrongly(kind: Kind, file: bytes) -> bytes:
    """Write V in the order that the file does not say."""
    what = f"{kind.layer} V"
    rows = faults.rows_of(file, what)
    if isinstance(faults.blocks_of(file)[what].tensor, Rows):
        rows = np.ascontiguousarray(rows.T)
    return faults.put_bytes(file, what, encode(sf.F16, rows))


def next_layers(kind: Kind, file: bytes) -> bytes:
    """Write each layer's keys into the next one."""
    prefix = kind.layer.rpartition(" ")[0]
    new = file
    for number in range(1, 10):
        rows = faults.rows_of(file, f"{prefix} {number - 1} K")
        new = faults.put(new, f"{prefix} {number} K", rows)
    return new


def heads(fault: Callable[[int], faults.Fault]) -> Callable[[Kind, Any], Any]:
    """Plant a fault of heads, the size of which the kind has."""
    return lambda kind, rows: fault(kind.dim)(rows)


PLANTED: dict[str, tuple[Fault, str, str]] = {
    "rope-not-applied": (in_k(lambda kind, rows: kind.bare(rows)), "K", "RoPE is not applied"),
    "rope-twice": (in_k(lambda kind, rows: kind.rope(rows, times=2)), "K", "applied twice"),
    "rope-base": (
        in_k(lambda kind, rows: kind.rope(rows, base=7 * kind.base)),
        "K",
        "another base",
    ),
    "rope-pairs": (
        in_k(lambda kind, rows: kind.rope(rows, halves=not kind.halves)),
        "K",
        "the wrong pairs",
    ),
    "k-and-v": (exchanged, "K V", "K and V are exchanged"),
    "v-order": (transposed_wrongly, "V", "transposed"),
    "shifted": (in_k(lambda kind, rows: faults.shifted(1)(rows)), "K", "shifted by 1 position"),
    "shifted-v": (in_v(lambda kind, rows: faults.shifted(-3)(rows)), "V", "shifted by 3 positions"),
    "bf16": (bits_in_k(lambda rows: encode(sf.BF16, rows)), "K", "bf16 bits in a tensor of f16"),
    "f32": (bits_in_k(lambda rows: encode(sf.F32, rows)), "K", "f32 bits in a tensor of f16"),
    "bytes": (bits_in_k(lambda rows: rows.astype(">f2").tobytes()), "K", "big-endian"),
    "not-written": (in_v(lambda kind, rows: faults.zeroed(9, 9)(rows)), "V", "position 9 is all"),
    "scaled": (in_k(heads(lambda dim: faults.scaled_head(0, dim, 1.015))), "K", "scaled by 1.0"),
    "layer": (
        lambda kind, file: faults.put(
            file,
            f"{kind.layer} V",
            faults.rows_of(file, f"{kind.layer.rpartition(' ')[0]} 2 V"),
        ),
        "V",
        "layer 2 V",
    ),
}
MANY_HEADS: dict[str, tuple[Fault, str, str]] = {
    "heads-exchanged": (
        in_k(heads(lambda dim: faults.exchanged_heads(0, 2, dim))),
        "K",
        "heads 0 and 2 are exchanged",
    ),
    "heads-rolled": (in_v(heads(faults.rolled_heads)), "V", "heads are rotated"),
}


def test_diff_of_honest_real_states_is_within_the_default_tolerance(
    states: States, diff: Callable[..., tuple[int, Any]]
) -> None:
    """Other batches and another attention pass, and nothing is suspected of a smaller tolerance."""
    assert diff(states.reference)[0] == 0
    status, found = diff(states.drifted)
    assert (status, found["within"]) == (0, True)
    assert max(tensor["row_error"] for tensor in found["tensors"]) > 0
    status, found = diff(states.drifted, "--tolerance", "0.001")
    assert status == 1
    assert [t["cause"] for t in found["tensors"] if t["cause"]] == []


def test_diff_names_each_planted_fault_in_its_layer_of_a_real_state(
    states: States, diff: Callable[..., tuple[int, Any]]
) -> None:
    """Exit status 1, no other tensor is off, and the fault is named, in spite of the drift."""
    kind = states.kind
    several = MANY_HEADS if kind.model is SMOLLM2 else {}
    for name, (plant, parts, words) in (PLANTED | several).items():
        status, found = diff(plant(kind, states.drifted))
        causes = {t["what"]: t["cause"] for t in found["tensors"] if not t["within"]}
        assert (name, status) == (name, 1)
        assert list(causes) == [f"{kind.layer} {part}" for part in parts.split()], name
        for cause in causes.values():
            assert words in (cause or ""), (name, cause)


def test_diff_of_layers_that_are_shifted_says_so_of_a_real_state(
    states: States, diff: Callable[..., tuple[int, Any]]
) -> None:
    """Each layer's keys in the next one's place is one fault, not nine."""
    status, found = diff(next_layers(states.kind, states.drifted))
    causes = [t["cause"] for t in found["tensors"] if not t["within"]]
    assert (status, len(causes)) == (1, 9)
    assert all("9 K tensors are shifted by 1 layer" in str(cause) for cause in causes)
