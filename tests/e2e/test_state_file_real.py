"""State files that llama.cpp itself writes: every kind of memory, on both builds.

What the core says about them, what the decoder makes of them, the whole handoff, and what becomes
of a real file that was damaged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import random
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onebitd.core import gguf_header
from onebitd.core.errors import StateFileError
from onebitd.core.policy import erase_heals
from onebitd.core.state_check import check
from onebitd.core.state_file import learn_layout, parse
from onebitd.core.state_layout import SLIDING, Block, KvSection, Layout, Rows, StateFile
from onebitd.core.state_write import rewrite, write_state
from tests.e2e.rig import RHYME, running_rig
from tests.e2e.rig import prepare as prepare_rig
from tests.e2e.test_faults import state_waits
from tests.harness import STANDINS, running_onebitd
from tests.llama_builds import (
    BUILDS,
    MODELS,
    LlamaBuild,
    LlamaClient,
    LlamaModel,
    running_llama,
)
from tests.tiny_models import TINY_MODELS, write
from tests.tiny_qwen35 import QWEN35

PROBE = [1, 2, 3]
FA_ON, FA_OFF = ("-fa", "on"), ("-fa", "off")
K_Q8_0 = ("-ctk", "q8_0")
Q8_0 = (*FA_ON, *K_Q8_0, "-ctv", "q8_0")
TINY = {model.name: model for model in (*TINY_MODELS, QWEN35)}
BIG = {model.name: model for model in MODELS}


@dataclasses.dataclass(frozen=True)
class Setup:
    """A decoder: a model and the arguments that shape its memory.

    Attributes:
        sections: what its state files hold, in short.
        reused: a restored state is used; without --swa-full a sliding window's is not.
    """

    model: str
    args: tuple[str, ...]
    sections: str
    reused: bool = True

    @property
    def name(self) -> str:
        """Its name in test ids."""
        return "".join((self.model, *self.args))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The prompts' lengths; a real model evaluates 700 tokens for several seconds."""
        return (3, 60, 700) if self.model in TINY else (3, 60)


SETUPS = [
    Setup("smollm2", FA_ON, "kv"),
    Setup("smollm2", FA_OFF, "kv"),
    Setup("smollm2", Q8_0, "kv"),
    *(Setup("smollm2", (*args, *K_Q8_0), "kv") for args in (FA_ON, FA_OFF)),
    Setup("gemma3", ("--swa-full",), "kv kv"),
    Setup("gemma3", ("--swa-full", *Q8_0), "kv kv"),
    Setup("gemma3", (), "kv kv", reused=False),
    Setup("gemma3", FA_OFF, "kv kv", reused=False),
    *(Setup("qwen3", args, "kv") for args in (FA_ON, FA_OFF)),
    *(Setup("qwen2vl", args, "kv") for args in (FA_ON, FA_OFF)),
    *(Setup("deepseek2", args, "kv") for args in (FA_ON, FA_OFF)),
    *(Setup("lfm2", args, "kv recr") for args in (FA_ON, FA_OFF)),
    *(Setup("lfm2-swa", (*args, "--swa-full"), "kv kv recr") for args in (FA_ON, FA_OFF)),
    # Small batches make the ring of the window so small that 700 tokens go round it.
    Setup("lfm2-swa", (*FA_ON, "-b", "64", "-ub", "64"), "kv kv recr", reused=False),
    Setup("mamba", (), "recr"),
    *(Setup("qwen35", args, "kv recr") for args in (FA_ON, FA_OFF)),
]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LlamaModel]:
    """Every model by name, the tiny ones written afresh; the others may not be installed."""
    folder = tmp_path_factory.mktemp("tiny-models")
    # Here --swa-full is a setup's own affair.
    big = {name: dataclasses.replace(model, swa=False) for name, model in BIG.items()}
    return big | {name: write(model, folder) for name, model in TINY.items()}


def prompt(model: str, n_tokens: int) -> list[int]:
    """Return ids that are no control tokens, the same ones in every run."""
    if n_tokens == len(PROBE):
        return PROBE
    most = 40_000 if model in BIG else 96
    rng = random.Random(n_tokens)  # noqa: S311 - a prompt is no secret
    return [rng.randrange(10, most) for _ in range(n_tokens)]


def save(client: LlamaClient, ids: list[int], filename: str = "saved") -> bytes:
    """Have the decoder evaluate these ids, and return the state it saves."""
    client.slot_action("erase", "")
    client.complete(ids, 0)
    reply = client.slot_action("save", filename)
    assert (reply.status, reply.json["n_saved"]) == (200, len(ids))
    return (client.slots_dir / filename).read_bytes()


def window_of(model: LlamaModel) -> int | None:
    """Return the sliding window as the daemon finds it."""
    with (
        model.path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view,
    ):
        return gguf_header.read(view).sliding_window


@dataclasses.dataclass(frozen=True)
class Saved:
    """The states that a decoder saved, by their number of tokens, and what is known of it."""

    build: LlamaBuild
    setup: Setup
    states: dict[int, bytes]
    layout: Layout
    window: int | None

    def ids(self, n_tokens: int) -> list[int]:
        """Return the prompt of that length."""
        return prompt(self.setup.model, n_tokens)

    def check(self, state: bytes, n_tokens: int = 60) -> None:
        """Check a state as the daemon does."""
        check(state, self.layout, self.ids(n_tokens), swa_window=self.window)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A running decoder and what it saved."""

    saved: Saved
    client: LlamaClient


@contextlib.contextmanager
def running(build: LlamaBuild, model: LlamaModel, setup: Setup) -> Iterator[Decoder]:
    """Yield the decoder of a setup with its states."""
    build.require()
    model.require()
    with running_llama(build, model, *setup.args) as client:
        states = {size: save(client, prompt(setup.model, size)) for size in setup.sizes}
        layout = learn_layout(states[len(PROBE)], PROBE)
        yield Decoder(Saved(build, setup, states, layout, window_of(model)), client)


@dataclasses.dataclass(frozen=True)
class Library:
    """What each decoder saved; one that has not run yet is run."""

    models: dict[str, LlamaModel]
    known: dict[tuple[LlamaBuild, Setup], Saved] = dataclasses.field(default_factory=dict)

    def get(self, build: LlamaBuild, setup: Setup) -> Saved:
        """Return what the decoder of this setup saved."""
        if (build, setup) not in self.known:
            with running(build, self.models[setup.model], setup) as decoder:
                self.known[build, setup] = decoder.saved
        return self.known[build, setup]


@pytest.fixture(scope="session")
def library(models: dict[str, LlamaModel]) -> Library:
    """The states that the decoders of this file saved."""
    return Library(models)


@pytest.fixture(
    scope="module",
    params=[(build, setup) for build in BUILDS for setup in SETUPS],
    ids=lambda pair: f"{pair[0].name}-{pair[1].name}",
)
def decoder(request: pytest.FixtureRequest, library: Library) -> Iterator[Decoder]:
    """Each setup on each build."""
    build, setup = request.param
    with running(build, library.models[setup.model], setup) as found:
        library.known[build, setup] = found.saved
        yield found


def plainly_listed(state: bytes) -> bytes:
    """Return the state with a plain token list, as a provider may write it."""
    ids = parse(state).tokens.tolist()
    (n_words,) = struct.unpack_from("<I", state, 8)
    return with_ids(state[:8], ids) + state[12 + 4 * n_words :]


def with_ids(start: bytes, words: Sequence[int]) -> bytes:
    """Return the start of a state, magic and version, with a token block."""
    return start + struct.pack(f"<I{len(words)}i", len(words), *words)


def kinds(layout: Layout) -> str:
    """Return the sections in short: `kv recr`."""
    return " ".join("kv" if isinstance(part, KvSection) else "recr" for part in layout.sections)


def test_layout_of_a_real_state_is_what_the_decoder_was_started_with(decoder: Decoder) -> None:
    """Three tokens tell version, sections, cache types and whether V is transposed."""
    layout, setup = decoder.saved.layout, decoder.saved.setup
    assert layout.version == decoder.saved.build.state_version
    assert kinds(layout) == setup.sections
    attention = [part for part in layout.sections if isinstance(part, KvSection)]
    assert {part.v_trans for part in attention} == ({"off" in setup.args} if attention else set())
    for flag, tensors in (("-ctk", [p.k for p in attention]), ("-ctv", [p.v for p in attention])):
        types = {tensor.type for layers in tensors for tensor in layers}
        assert types <= {8 if flag in setup.args else 1}
    assert any(part.v for part in attention) is (setup.model not in ("deepseek2", "mamba"))
    extension = (8 if layout.version == 2 else 12) if setup.model in ("qwen2vl", "qwen35") else 0
    assert {part.ext_bytes for part in attention} <= {extension}
    heals = "off" not in setup.args and "recr" not in setup.sections
    assert erase_heals(layout) is heals


def test_real_states_of_any_length_pass_and_read_alike(decoder: Decoder) -> None:
    """The layout of three tokens holds for every later state of that decoder."""
    saved = decoder.saved
    for n_tokens, state in saved.states.items():
        saved.check(state, n_tokens)
        read = parse(state)
        assert read.layout == saved.layout
        assert read.tokens.tolist() == saved.ids(n_tokens)
        if read.n_checkpoints is None and saved.window is None:
            packed = 16 if read.packed else 0
            assert len(state) == saved.layout.bytes_for(n_tokens) + packed
    if "-ub" in saved.setup.args:
        positions = parse(saved.states[700]).sections[1].cells.pos
        assert positions[0] > positions.min(), "the ring of the window did not turn"


def rewritten(read: StateFile, source: bytes | mmap.mmap) -> bytes:
    """Return a file that was read, written again."""
    out = bytearray()
    assert rewrite(out.extend, read, source) == len(out)
    return bytes(out)


def written_anew(state: bytes) -> bytes:
    """Return a new state with the tokens and the data of a state, as a provider writes it."""
    read = parse(state)
    blocks = (block for part in read.sections for block in part.blocks)
    data = (state[block.offset : block.offset + block.n_bytes] for block in blocks)
    window = [len(part.cells.pos) for part in read.sections if part.what == SLIDING]
    out = bytearray()
    tokens = read.tokens.tolist()
    swa_cells = window[0] if window else None
    assert write_state(out.extend, read.layout, tokens, data, swa_cells=swa_cells) == len(out)
    return bytes(out)


def test_real_states_are_written_again_byte_for_byte(decoder: Decoder, tmp_path: Path) -> None:
    """A saved file, read through a map, and a new one from its data, are the decoder's own."""
    saved, path = decoder.saved, tmp_path / "state"
    for state in saved.states.values():
        path.write_bytes(state)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            read = parse(view)
            assert rewritten(read, view) == state
            assert rewritten(parse(view, saved.layout), view) == state
            plain = rewritten(dataclasses.replace(read, packed=False), view)
        assert plain == plainly_listed(state)
        appendix = read.size - read.sections_end
        new = written_anew(state)
        assert len(new) == len(plain) - appendix
        ring = any(np.diff(part.cells.pos).min(initial=1) < 0 for part in read.sections)
        assert (new == plain[: len(new)]) is not ring


def restore(client: LlamaClient, state: bytes, n_tokens: int) -> None:
    """Put a state of so many tokens into the slot."""
    client.slot_action("erase", "")
    (client.slots_dir / "other").write_bytes(state)
    reply = client.slot_action("restore", "other")
    assert (reply.status, reply.json["n_restored"]) == (200, n_tokens), reply
    assert reply.json["n_read"] == len(state)


def test_real_state_listed_plainly_is_accepted_and_used(decoder: Decoder) -> None:
    """With a plain token list, and written anew: restored, and the last token alone evaluated."""
    saved, client, ids = decoder.saved, decoder.client, decoder.saved.ids(60)
    plain = plainly_listed(saved.states[60])
    asked = [*ids, ids[7]]
    client.slot_action("erase", "")
    client.complete(ids, 0)
    expected = client.complete(asked, 6)
    # The same, unless the decoder appends context checkpoints.
    for state in dict.fromkeys((plain, written_anew(plain))):
        saved.check(state)
        restore(client, state, len(ids))
        reply = client.complete(asked, 6)
        evaluated = (reply["timings"]["cache_n"], reply["timings"]["prompt_n"])
        if saved.setup.reused:
            assert evaluated == (len(ids), 1)
        else:
            assert evaluated[1] > 1
        assert reply["content"] == expected["content"]
    if saved.setup.reused and saved.setup.model in TINY:
        # A wrong cache does change the text. Nothing else tells it, so no check can.
        restore(client, forged(save(client, ids[::-1]), ids), len(ids))
        assert client.complete(asked, 6)["content"] != expected["content"]


def forged(state: bytes, ids: list[int]) -> bytes:
    """Return a state of as many other tokens, listed as these ones."""
    return with_ids(state[:8], ids) + plainly_listed(state)[12 + 4 * len(ids) :]


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.name)
@pytest.mark.parametrize(
    "setup",
    [
        Setup("qwen3", (*FA_OFF, *K_Q8_0), "kv"),
        Setup("lfm2-swa", (*FA_ON, "--swa-full"), "kv kv recr"),
    ],
    ids=lambda setup: setup.name,
)
def test_real_state_of_the_second_slot_is_written_again_and_used(
    models: dict[str, LlamaModel], build: LlamaBuild, setup: Setup
) -> None:
    """Slots with caches of their own save a stream each, of which the saved slot's has cells."""
    build.require()
    ids = prompt(setup.model, 60)
    with running_llama(build, models[setup.model], "-np", "2", *setup.args) as client:

        def act(action: str, **more: str) -> Any:
            return client.post(f"/slots/1?action={action}", more)

        expected = client.complete([*ids, ids[7]], 6, id_slot=1)
        client.complete(ids, 0, id_slot=1, cache_prompt=False)
        act("save", filename="saved")
        state = (client.slots_dir / "saved").read_bytes()
        read = parse(state)
        assert (read.n_stream, kinds(read.layout)) == (2, setup.sections)
        streams = [part for part in read.sections if isinstance(part.shape, KvSection)]
        assert [part.stream for part in streams] == [0, 1] * setup.sections.count("kv")
        for part in streams:
            assert part.cells.seq_id.tolist() == [1] * 60 * part.stream
        assert rewritten(read, state) == rewritten(parse(state, read.layout), state) == state
        with pytest.raises(StateFileError, match="2 streams, a decoder with one slot has 1"):
            check(state, read.layout, ids)

        act("erase")
        plain = rewritten(dataclasses.replace(read, packed=False), state)
        (client.slots_dir / "other").write_bytes(plain)
        assert act("restore", filename="other")["n_restored"] == 60
        reply = client.complete([*ids, ids[7]], 6, id_slot=1)
        assert (reply["timings"]["cache_n"], reply["timings"]["prompt_n"]) == (60, 1)
        assert reply["content"] == expected["content"]


# --- damage -----------------------------------------------------------------------------------


class Real:
    """A real state of 60 tokens, listed plainly, and the places in it that a test spoils.

    Attributes:
        data: the whole file.
        at_cells: where the first cell begins; one takes 12 bytes, its position first.
        at_shape: where v_trans, n_layer and (version 4) n_rot_k, n_rot_v follow the cells.
        at_next: where the next section begins; recurrent: count, pos, n_seq_id, s_trans, n_layer.
    """

    def __init__(self, saved: Saved, library: Library) -> None:
        self.saved = saved
        self.library = library
        self.data = plainly_listed(saved.states[60])
        self.ids = saved.ids(60)
        self.read: StateFile = parse(self.data)
        first = self.read.sections[0]
        self.at_cells = 12 + 4 * 60 + 8
        self.at_shape = self.at_cells + 12 * 60
        blocks = first.blocks if isinstance(first.shape, KvSection) else ()
        self.at_next = blocks[-1].offset + blocks[-1].n_bytes if blocks else 12 + 4 * 60

    def block(self, what: str) -> Block:
        """Return the first tensor whose name ends so."""
        found = [block for part in self.read.sections for block in part.blocks]
        return next(block for block in found if block.what.endswith(what))

    def recr_row(self, number: int) -> Block:
        """Return a row of the recurrent state: the R rows come first, then as many S rows."""
        return self.read.sections[-1].blocks[number]

    @property
    def n_states(self) -> int:
        """How many layers have a recurrent state."""
        return len(self.read.sections[-1].blocks) // 2

    def put(self, at: int, layout: str, *values: int) -> bytes:
        """Return the file with these values at a place."""
        new = struct.pack(f"<{layout}", *values)
        return self.data[:at] + new + self.data[at + len(new) :]

    def with_words(self, words: Sequence[int]) -> bytes:
        """Return the file with another token block."""
        return with_ids(self.data[:8], words) + self.data[12 + 4 * 60 :]

    def with_positions(self, change: Callable[[list[int]], object]) -> bytes:
        """Return the file with other positions in its first section."""
        positions = list(range(60))
        change(positions)
        data = bytearray(self.data)
        for cell, pos in enumerate(positions):
            struct.pack_into("<i", data, self.at_cells + 12 * cell, pos)
        return bytes(data)

    def with_cells(self, kept: slice) -> bytes:
        """Return the file with some of the cells of its first section, consistently."""
        count = len(range(60)[kept])
        cells = self.data[self.at_cells : self.at_shape]
        parts = [self.data[: self.at_cells - 4], struct.pack("<I", count), _rows(cells, 12, kept)]
        if not count:
            return b"".join(parts[:2]) + self.data[self.at_next :]
        blocks = self.read.sections[0].blocks
        parts.append(self.data[self.at_shape : blocks[0].offset - 12])
        for block in blocks:
            assert isinstance(block.tensor, Rows)
            rows = self.data[block.offset : block.offset + block.n_bytes]
            parts += [self.data[block.offset - 12 : block.offset]]
            parts += [_rows(rows, block.tensor.row_size, kept)]
        return b"".join(parts) + self.data[self.at_next :]

    def of(self, model: str, args: tuple[str, ...], build: LlamaBuild | None = None) -> bytes:
        """Return the state of 60 tokens of another decoder."""
        setup = next(setup for setup in SETUPS if (setup.model, setup.args) == (model, args))
        return plainly_listed(self.library.get(build or self.saved.build, setup).states[60])

    @property
    def other_build(self) -> LlamaBuild:
        """The other build."""
        return next(build for build in BUILDS if build != self.saved.build)


def _rows(data: bytes, size: int, kept: slice) -> bytes:
    return b"".join(data[size * cell : size * (cell + 1)] for cell in range(60)[kept])


def _packed(ids: Sequence[int], version: int = 1, says: int = 60, n_media: int = 0) -> list[int]:
    return [-1, version, says, *ids, n_media]


def _swap(positions: list[int]) -> None:
    positions[20], positions[21] = positions[21], positions[20]


@dataclasses.dataclass(frozen=True)
class Damage:
    """What is done to a real file, and words of the sentence that refuses it."""

    name: str
    make: Callable[[Real], bytes]
    words: str
    model: str = "smollm2"
    least_version: int = 2


INT_MAX = 2**31 - 1
NAN = 0x7E00
DAMAGES = [
    Damage("empty", lambda real: b"", "ends at byte 0"),
    Damage("cut-in-header", lambda real: real.data[:10], "the header"),
    Damage("cut-in-tokens", lambda real: real.data[:99], "the list of 60 tokens"),
    Damage("cut-in-cells", lambda real: real.data[: real.at_cells + 100], "60 cells do not fit"),
    Damage("cut-in-n_layer", lambda real: real.data[: real.at_shape + 6], "the header of section"),
    Damage("cut-in-k-header", lambda real: real.data[: real.block("K").offset - 5], "layer 0 K"),
    Damage("cut-in-k", lambda real: real.data[: real.block("29 K").offset + 9], "layer 29 K"),
    Damage("cut-in-v", lambda real: real.data[: real.block("7 V").offset + 9], "layer 7 V"),
    Damage("cut-in-last-row", lambda real: real.data[:-100], "100 bytes before the end of layer"),
    Damage("one-byte-short", lambda real: real.data[:-1], "1 byte before the end of layer 29 V"),
    Damage("magic", lambda real: real.put(0, "I", 0x67677372), "not a state file"),
    Damage("whole-session-magic", lambda real: real.put(0, "I", 0x6767736E), "not a state file"),
    Damage("version", lambda real: real.put(4, "I", 9), "state version 9"),
    Damage("version-3", lambda real: real.put(4, "I", 3), "state version 3, the decoder has"),
    Damage("text", lambda real: b"Not a state at all.\n" * 999, "not a state file"),
    Damage("zeros", lambda real: bytes(len(real.data)), "not a state file"),
    Damage("random", lambda real: random.Random(1).randbytes(99_999), "not a state file"),  # noqa: S311
    Damage("n_layer-less", lambda real: real.put(real.at_shape + 4, "I", 29), "layers 29"),
    Damage("n_layer-more", lambda real: real.put(real.at_shape + 4, "I", 31), "layers 31"),
    Damage(
        "row-size", lambda real: real.put(real.block("3 K").offset - 8, "Q", 386), "row size 386"
    ),
    Damage(
        "k-type", lambda real: real.put(real.block("3 K").offset - 12, "i", 8), "3 K: type q8_0"
    ),
    Damage(
        "v-type", lambda real: real.put(real.block("5 V").offset - 12, "i", 30), "5 V: type bf16"
    ),
    Damage("v_trans-flag", lambda real: real.put(real.at_shape, "I", 1), "v_trans 1"),
    Damage("fa-off", lambda real: real.of("smollm2", FA_OFF), "v_trans 1, the decoder has 0"),
    Damage("q8_0", lambda real: real.of("smollm2", Q8_0), "the decoder has"),
    Damage("other-build", lambda real: real.of("smollm2", FA_ON, real.other_build), "version"),
    Damage("other-model", lambda real: real.of("qwen3", FA_ON), "token 0 is"),
    Damage("no-stream", lambda real: real.put(real.at_cells - 8, "I", 0), "0 streams"),
    Damage("two-streams", lambda real: real.put(real.at_cells - 8, "I", 2), "2 streams"),
    Damage("huge-stream", lambda real: real.put(real.at_cells - 8, "I", 1 << 31), "streams"),
    *(
        Damage(
            f"count-{count:#x}",
            lambda real, count=count: real.put(real.at_cells - 4, "I", count),  # type: ignore[misc]
            f"{count} cells, 60 expected",
        )
        for count in (0, 59, 61, 120, 99_999, 0x7FFFFFFF, 0xFFFFFFFF)
    ),
    *(
        Damage(
            f"n_seq_id-{number:#x}",
            lambda real, number=number: real.put(real.at_cells + 124, "I", number),  # type: ignore[misc]
            f"cell 10: n_seq_id {number}",
        )
        for number in (0, 2, 0xFFFFFFFF)
    ),
    Damage("no-cells", lambda real: real.with_cells(slice(0)), "0 cells, 60 expected"),
    Damage("no-tokens", lambda real: real.with_words([]), "holds 0 tokens"),
    Damage("no-tokens-packed", lambda real: real.with_words(_packed([], says=0)), "token"),
    Damage("n_words-less", lambda real: real.put(8, "I", 59), "holds 59 tokens"),
    Damage("n_words-more", lambda real: real.put(8, "I", 61), "holds 61 tokens"),
    Damage("n_words-huge", lambda real: real.put(8, "I", 1 << 30), "too many for 60 tokens"),
    Damage(
        "packed-version", lambda real: real.with_words(_packed(real.ids, 2)), "the packed token"
    ),
    Damage("packed-short", lambda real: real.with_words(_packed(real.ids, says=61)), "says 61 ids"),
    Damage("packed-long", lambda real: real.with_words(_packed(real.ids, says=59)), "says 59 ids"),
    Damage(
        "packed-media", lambda real: real.with_words(_packed(real.ids, n_media=1)), "without media"
    ),
    Damage("id-beyond-vocabulary", lambda real: real.put(12 + 80, "i", 10**6), "token 20 is 1000"),
    Damage("id-negative", lambda real: real.put(12 + 80, "i", -5), "token 20 is -5"),
    Damage("id-minus-one", lambda real: real.put(12 + 80, "i", -1), "token 20 is -1"),
    Damage("ids-beyond-context", lambda real: real.with_words([7] * 3000), "too many for 60"),
    Damage("ids-of-another-prompt", lambda real: real.with_words(real.ids[::-1]), "token 0 is"),
    Damage("fewer-ids", lambda real: real.with_words(real.ids[:-1]), "holds 59 tokens"),
    Damage("more-ids", lambda real: real.with_words([*real.ids, 77]), "holds 61 tokens"),
    Damage("last-cells-missing", lambda real: real.with_cells(slice(0, 50)), "50 cells"),
    Damage("first-cells-missing", lambda real: real.with_cells(slice(1, 60)), "59 cells"),
    Damage(
        "positions-shifted",
        lambda real: real.with_positions(lambda pos: pos.__setitem__(slice(None), range(5, 65))),
        "position 5, 0 expected",
    ),
    Damage(
        "positions-reversed",
        lambda real: real.with_positions(list.reverse),
        "position 59, 0 expected",
    ),
    Damage("positions-swapped", lambda real: real.with_positions(_swap), "position 21, 20"),
    Damage(
        "positions-all-0",
        lambda real: real.with_positions(lambda pos: pos.__setitem__(slice(None), [0] * 60)),
        "position 0, 1 expected",
    ),
    Damage(
        "positions-gap",
        lambda real: real.with_positions(lambda pos: pos.__setitem__(slice(9, 60), range(10, 61))),
        "position 10, 9 expected",
    ),
    Damage(
        "positions-all-negative",
        lambda real: real.with_positions(lambda pos: pos.__setitem__(slice(None), [-5] * 60)),
        "position -5, 0 expected",
    ),
    Damage(
        "positions-a-million-on",
        lambda real: real.with_positions(
            lambda pos: pos.__setitem__(slice(None), range(10**6, 10**6 + 60))
        ),
        "position 1000000, 0 expected",
    ),
    Damage(
        "last-position-twice",
        lambda real: real.with_positions(lambda pos: pos.__setitem__(59, 58)),
        "position 58, 59 expected",
    ),
    Damage(
        "first-position-negative",
        lambda real: real.with_positions(lambda pos: pos.__setitem__(0, -1)),
        "position -1, 0 expected",
    ),
    Damage(
        "position-int-max",
        lambda real: real.with_positions(lambda pos: pos.__setitem__(30, INT_MAX)),
        f"position {INT_MAX}, 30 expected",
    ),
    Damage("nan-in-k", lambda real: real.put(real.block("4 K").offset + 2 * 192, "H", NAN), "NaN"),
    Damage("infinity-in-v", lambda real: real.put(len(real.data) - 2, "H", 0x7C00), "infinity"),
    Damage("trailing-16", lambda real: real.data + bytes(16), "16 bytes too many"),
    Damage("trailing-1m", lambda real: real.data + bytes(1 << 20), "1048576 bytes too many"),
    Damage(
        "n_rot",
        lambda real: real.put(real.at_shape + 8, "I", 64),
        "n_rot_k 64, the decoder has 0",
        least_version=4,
    ),
    # A sliding window.
    Damage("swa-count", lambda real: real.put(real.at_next + 4, "I", 59), "59 cells", "gemma3"),
    Damage(
        "swa-position",
        lambda real: real.put(real.at_next + 8, "i", -5),
        "sliding window, cell 0: position -5",
        "gemma3",
    ),
    Damage("swa-nan", lambda real: _nan_at_end(real), "sliding window layer 14 V: a NaN", "gemma3"),
    # Recurrent state, alone and beside attention.
    *(
        damage
        for model in ("lfm2", "mamba")
        for damage in (
            Damage(
                "recr-cut-in-r",
                lambda real: real.data[: real.recr_row(1).offset + 9],
                "before the end of recurrent state, R 1",
                model,
            ),
            Damage(
                "recr-cut-in-s-header",
                lambda real: _cut_before_s(real),
                "header of recurrent",
                model,
            ),
            Damage("recr-none", lambda real: _without_recr(real), "0 cells", model),
            Damage("recr-two", lambda real: real.put(real.at_next, "I", 2), "2 cells", model),
            Damage(
                "recr-huge",
                lambda real: real.put(real.at_next, "I", 0x7FFFFFFF),
                "2147483647 cells",
                model,
            ),
            Damage(
                "recr-n_seq_id",
                lambda real: real.put(real.at_next + 8, "I", 1),
                "n_seq_id 1",
                model,
            ),
            Damage(
                "recr-n_layer", lambda real: real.put(real.at_next + 16, "I", 5), "layers 5", model
            ),
            Damage(
                "recr-earlier",
                lambda real: real.put(real.at_next + 4, "i", 57),
                "position 57",
                model,
            ),
            Damage(
                "recr-negative",
                lambda real: real.put(real.at_next + 4, "i", -1),
                "position -1",
                model,
            ),
            Damage(
                "recr-int-max",
                lambda real: real.put(real.at_next + 4, "i", INT_MAX),
                f"position {INT_MAX}",
                model,
            ),
            Damage(
                "recr-nan",
                lambda real: real.put(real.recr_row(0).offset, "I", 0x7FC00000),
                "NaN",
                model,
            ),
        )
    ),
    Damage("hybrid-no-attention", lambda real: real.with_cells(slice(0)), "0 cells", "lfm2"),
    Damage("mamba-one-byte-short", lambda real: _whole(real)[:-1], "1 byte before", "mamba"),
]


def _whole(real: Real) -> bytes:
    """Return the file without its context checkpoints, which build X appends."""
    last = real.read.sections[-1].blocks[-1]
    return real.data[: last.offset + last.n_bytes]


def _nan_at_end(real: Real) -> bytes:
    block = real.read.sections[-1].blocks[-1]
    return real.put(block.offset + block.n_bytes - 2, "H", NAN)


def _cut_before_s(real: Real) -> bytes:
    return real.data[: real.recr_row(real.n_states).offset - 5]


def _without_recr(real: Real) -> bytes:
    return real.data[: real.at_next] + struct.pack("<III", 0, 0, 4)


FIRST_SETUP = {setup.model: setup for setup in reversed(SETUPS)}


@pytest.mark.parametrize(
    ("build", "damage"),
    [
        pytest.param(build, damage, id=f"{build.name}-{damage.model}-{damage.name}")
        for build in BUILDS
        for damage in DAMAGES
        if build.state_version >= damage.least_version
    ],
)
def test_damaged_real_state_is_refused_in_words(
    library: Library, build: LlamaBuild, damage: Damage
) -> None:
    """What would hurt the decoder is refused before it sees it, by a sentence that says where."""
    saved = library.get(build, FIRST_SETUP[damage.model])
    real = Real(saved, library)
    damaged = damage.make(real)
    saved.check(real.data)
    assert damaged != real.data
    with pytest.raises(StateFileError) as caught:
        saved.check(damaged)
    assert damage.words in str(caught.value)


# --- the whole way ------------------------------------------------------------------------------


HANDOFFS = [
    Setup("smollm2", FA_OFF, "kv"),
    Setup("smollm2", Q8_0, "kv"),
    Setup("qwen2vl", FA_ON, "kv"),
    Setup("deepseek2", FA_ON, "kv"),
    Setup("lfm2", FA_ON, "kv recr"),
    Setup("lfm2-swa", FA_OFF, "kv kv recr"),  # the daemon adds --swa-full itself
    Setup("mamba", (), "recr"),
]
CATS = "The cat sat on the mat, and then the dog lay down beside it in the sun."
DOGS = "A dog sat on the mat, and then the cat lay down beside it in the sun."
each_build = pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.name)


def body_of(text: str, *, chat: bool = False) -> dict[str, Any]:
    """Return a greedy request for a reply of twelve tokens."""
    asked = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    return {"temperature": 0, "seed": 1, "max_tokens": 12, "ignore_eos": True, **asked}


def cold(client: LlamaClient, path: str, body: dict[str, Any]) -> str:
    """Return the decoder's own reply, from an empty slot."""
    client.slot_action("erase", "")
    reply = client.post(path, body)["choices"][0]
    return str(reply["message"]["content"] if "message" in reply else reply["text"])


def stepwise(client: LlamaClient, text: str) -> str:
    """Return the decoder's own reply when it evaluates the last prompt token by itself."""
    ids = client.tokenize(text)
    client.slot_action("erase", "")
    client.complete(ids[:-1], 0)
    reply = client.post("/v1/completions", body_of(text))
    assert reply["timings"]["prompt_n"] == 1
    return str(reply["choices"][0]["text"])


@each_build
@pytest.mark.parametrize("setup", HANDOFFS, ids=lambda setup: setup.name)
def test_handoff_any_memory_same_text_and_one_token_evaluated(
    models: dict[str, LlamaModel], reference_provider: Path, build: LlamaBuild, setup: Setup
) -> None:
    """Whatever the decoder's memory is, its reply after a handoff is the one it gives alone."""
    build.require()
    model = models[setup.model]
    model.require()
    args = (*build.extra_args, *setup.args)
    tiny = setup.model in TINY
    text = CATS if tiny else RHYME
    swa_full = ("--swa-full",) if window_of(model) else ()
    with running_llama(build, model, *setup.args, *swa_full) as client:
        expected = [cold(client, "/v1/completions", body_of(text))]
        if tiny:
            expected += [cold(client, "/v1/chat/completions", body_of(text, chat=True))]
            assert cold(client, "/v1/completions", body_of(DOGS)) != expected[0]
    with running_onebitd(
        model=model.path,
        llama_server=build.program,
        provider=reference_provider,
        backend_args=["-c", "2048", "-t", "1", *args],
        env={
            "ONEBIT_PREFILL_LLAMA_SERVER": str(build.program),
            "ONEBIT_PREFILL_LLAMA_ARGS": " ".join((*args, "-t", "1", *swa_full)),
        },
    ) as daemon:
        replies = [daemon.request("POST", "/v1/completions", body_of(text))]
        if tiny:
            chat = body_of(text, chat=True)
            replies.append(daemon.request("POST", "/v1/chat/completions", chat))
        records = daemon.handoffs()
    for record in records:
        assert record["outcome"] == "used", record
        assert record["evaluated_tokens"] == 1
        assert record["cached_tokens"] == record["handed_tokens"] == record["prompt_tokens"] - 1
    texts = [reply.text for reply in replies]
    assert all(texts)
    if texts != expected:
        # One batch and N-1 tokens plus one differ in the last bits, and a near tie may tip: then
        # the right reply is what the decoder says after N-1 tokens of its own.
        with running_llama(build, model, *setup.args, *swa_full) as client:
            expected = [stepwise(client, text)] * len(texts)
    assert texts == expected


def copying_provider(home: Path) -> tuple[Path, dict[str, str]]:
    """Return a provider that copies `home/N.bin` for N ids, and its environment."""
    provider = home / "provider"
    provider.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -I -S {STANDINS / "provider.py"} "$@"\n'
    )
    provider.chmod(0o755)
    return provider, {"FAKE_PREFILL_COPY": str(home)}


@each_build
def test_damaged_real_states_never_reach_the_decoder(
    library: Library, build: LlamaBuild, tmp_path: Path
) -> None:
    """A provider that spoils every file costs a hybrid decoder nothing but the handoffs."""
    setup = FIRST_SETUP["lfm2"]
    saved = library.get(build, setup)
    real = Real(saved, library)
    provider, env = copying_provider(tmp_path)
    asked = {**body_of("", chat=False), "prompt": [*real.ids, real.ids[7]]}
    with running_onebitd(
        model=library.models["lfm2"].path,
        llama_server=build.program,
        provider=provider,
        backend_args=["-c", "2048", "-t", "1", *build.extra_args, *setup.args],
        env=env,
    ) as daemon:

        def reply_to(state: bytes) -> tuple[str, dict[str, Any]]:
            before = len(daemon.handoffs())
            (tmp_path / "60.bin").write_bytes(state)
            reply = daemon.request("POST", "/v1/completions", asked)
            assert reply.status == 200, reply
            return reply.text, daemon.last_handoff(before + 1)

        pid = daemon.status()["backend"]["pid"]
        right, record = reply_to(real.data)
        assert (record["outcome"], record["evaluated_tokens"]) == ("used", 1)
        for damage in DAMAGES:
            if damage.model == "lfm2":
                text, record = reply_to(damage.make(real))
                assert (record["outcome"], record["reason"]) == ("fallback", "bad_state"), damage
                assert damage.words in record["detail"]
                assert "restore_ms" not in record
                assert text == right
        backend = daemon.status()["backend"]
        assert (backend["pid"], backend["restarts"]) == (pid, 0)


def with_nan_values(state: bytes) -> bytes:
    """Return the state with every V a NaN."""
    values = np.frombuffer(state, np.uint8).copy()
    for block in parse(state).sections[0].blocks:
        if block.what.endswith("V"):
            values[block.offset : block.offset + block.n_bytes] = np.frombuffer(
                struct.pack("<H", NAN) * (block.n_bytes // 2), np.uint8
            )
    return values.tobytes()


@each_build
def test_restore_gone_wrong_with_transposed_values_decoder_is_restarted(
    build: LlamaBuild, tmp_path: Path
) -> None:
    """Where erasing leaves NaNs behind, a restore that went wrong is followed by a new decoder."""
    build.require()
    model = BIG["smollm2"]
    model.require()
    transposed = dataclasses.replace(build, extra_args=(*build.extra_args, *FA_OFF))
    prepared = prepare_rig(transposed, model)
    with running_llama(transposed, model) as client:
        # The cells behind the end of the prompt that follows keep what they held, and make its
        # reply noise: what is restored has to be longer.
        bad = with_nan_values(save(client, prompt("smollm2", len(prepared.ids[RHYME]) + 40)))
    with running_rig(prepared, transposed, model, tmp_path) as rig:
        pid = rig.wait_decoder()
        with state_waits(rig) as (path, reply):
            path.write_bytes(bad)
        assert reply().text == prepared.texts[RHYME]
        record = rig.daemon.handoffs()[-1]
        assert (record["outcome"], record["reason"]) == ("fallback", "restore_short"), record
        assert record["evaluated_tokens"] == record["prompt_tokens"]
        assert rig.wait_decoder() != pid
        backend = rig.daemon.status()["backend"]
        assert backend["restarts"] == 1
        assert "its slot cannot be trusted" in backend["last_exit"]["reason"]
        rig.assert_good()
