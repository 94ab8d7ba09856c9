"""State files that llama.cpp itself writes: every kind of memory, on both builds.

What the core says about them, what the decoder makes of them, and the whole handoff.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import random
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onebitd.core import gguf_header
from onebitd.core.errors import StateFileError
from onebitd.core.policy import erase_heals
from onebitd.core.state_check import check
from onebitd.core.state_file import learn_layout, parse
from onebitd.core.state_layout import SLIDING, KvSection, Layout, StateFile
from onebitd.core.state_write import rewrite, write_state
from tests.e2e.rig import RHYME, running_rig
from tests.e2e.rig import prepare as prepare_rig
from tests.e2e.test_faults import state_waits
from tests.harness import running_onebitd
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
        builds: names of those that it is tried with; what differs from build to build is in both.
    """

    model: str
    args: tuple[str, ...]
    sections: str
    reused: bool = True
    builds: str = "BX"

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
    Setup("smollm2", (*FA_ON, *K_Q8_0), "kv", builds="X"),  # which rotates it
    Setup("gemma3", ("--swa-full",), "kv kv"),
    Setup("gemma3", (), "kv kv", reused=False, builds="X"),
    Setup("gemma3", FA_OFF, "kv kv", reused=False, builds="B"),
    *(Setup("qwen3", args, "kv") for args in (FA_ON, FA_OFF, (*FA_OFF, *K_Q8_0))),
    *(Setup("qwen2vl", args, "kv") for args in (FA_ON, FA_OFF)),
    *(Setup("deepseek2", args, "kv") for args in (FA_ON, FA_OFF)),
    *(Setup("lfm2", args, "kv recr") for args in (FA_ON, FA_OFF)),
    *(Setup("lfm2-swa", (*args, "--swa-full"), "kv kv recr") for args in (FA_ON, FA_OFF)),
    Setup("lfm2-swa", (*FA_OFF, *K_Q8_0, "--swa-full"), "kv kv recr", builds="X"),
    # Small batches make the ring of the window so small that 700 tokens go round it.
    Setup("lfm2-swa", (*FA_ON, "-b", "64", "-ub", "64"), "kv kv recr", reused=False),
    Setup("mamba", (), "recr"),
    *(Setup("qwen35", args, "kv recr") for args in (FA_ON, FA_OFF)),
]


def pairs(setups: Sequence[Setup]) -> list[tuple[LlamaBuild, Setup]]:
    """Return each build with the setups that are tried with it."""
    return [(build, setup) for build in BUILDS for setup in setups if build.name in setup.builds]


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


@pytest.fixture(
    scope="module",
    params=pairs(SETUPS),
    ids=lambda pair: f"{pair[0].name}-{pair[1].name}",
)
def decoder(request: pytest.FixtureRequest, models: dict[str, LlamaModel]) -> Iterator[Decoder]:
    """Each setup on each build."""
    build, setup = request.param
    with running(build, models[setup.model], setup) as found:
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


# --- the whole way ------------------------------------------------------------------------------


HANDOFFS = [
    Setup("qwen3", FA_OFF, "kv", builds="B"),
    Setup("qwen2vl", (*FA_OFF, *K_Q8_0), "kv", builds="X"),
    Setup("deepseek2", FA_ON, "kv", builds="B"),
    # Each of these is handed over on the other build in test_damages_real.py.
    Setup("lfm2", FA_ON, "kv recr", builds="B"),
    Setup("lfm2-swa", FA_OFF, "kv kv recr", builds="X"),  # the daemon adds --swa-full itself
    Setup("mamba", (), "recr", builds="X"),
]
CATS = "The cat sat on the mat, and then the dog lay down beside it in the sun."
DOGS = "A dog sat on the mat, and then the cat lay down beside it in the sun."


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


@pytest.mark.parametrize(("build", "setup"), pairs(HANDOFFS), ids=lambda part: part.name)
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


def with_nan_values(state: bytes) -> bytes:
    """Return the state with every V a NaN."""
    values = np.frombuffer(state, np.uint8).copy()
    for block in parse(state).sections[0].blocks:
        if block.what.endswith("V"):
            values[block.offset : block.offset + block.n_bytes] = np.frombuffer(
                struct.pack("<H", 0x7E00) * (block.n_bytes // 2), np.uint8
            )
    return values.tobytes()


def test_restore_gone_wrong_with_transposed_values_decoder_is_restarted(tmp_path: Path) -> None:
    """Where erasing leaves NaNs behind, a restore that went wrong is followed by a new decoder."""
    build, model = BUILDS[0], BIG["smollm2"]
    build.require()
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
