"""What the check accepts, the real decoder restores; and what it learns from real models holds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from onebitd.core.errors import StateFileError
from onebitd.core.state_baseline import learn_baseline
from onebitd.core.state_check import check
from onebitd.core.state_data import Baseline
from onebitd.core.state_file import learn_layout, parse
from onebitd.core.state_layout import Layout, Rows
from tests.llama_builds import (
    BUILDS,
    MODELS,
    RHYME,
    LlamaBuild,
    LlamaClient,
    LlamaModel,
    running_llama,
)

PROBE = [1, 2, 3]
RESTORES = 100


@dataclass(frozen=True)
class Probed:
    """A running decoder and what the daemon learns from it."""

    client: LlamaClient
    layout: Layout
    baseline: Baseline

    def check(self, state: bytes, ids: list[int]) -> None:
        """Check a state as the daemon does."""
        check(state, self.layout, ids, baseline=self.baseline)


def save(client: LlamaClient, ids: list[int]) -> bytes:
    """Have the decoder evaluate these ids, and return the state it saves."""
    client.slot_action("erase", "")
    client.complete(ids, 0)
    assert client.slot_action("save", "saved").status == 200
    return (client.slots_dir / "saved").read_bytes()


@pytest.fixture(
    scope="module",
    params=[
        (BUILDS[0], MODELS[0], ("-fa", "on")),
        (BUILDS[0], MODELS[0], ("-fa", "on", "-ctk", "q8_0", "-ctv", "q8_0")),
        (BUILDS[1], MODELS[1], ()),
    ],
    ids=["smollm2", "smollm2-q8_0", "gemma3"],
)
def probed(request: pytest.FixtureRequest) -> Iterator[Probed]:
    """Run a decoder and learn from it."""
    build: LlamaBuild
    model: LlamaModel
    build, model, arguments = request.param
    build.require()
    model.require()
    with running_llama(build, model, *arguments) as client:
        probe = save(client, PROBE)
        layout = learn_layout(probe, PROBE)
        yield Probed(client, layout, learn_baseline(probe, parse(probe, layout)))


def prompts(client: LlamaClient) -> dict[str, list[int]]:
    """Return prompts of very different kinds: common text, rare ids, one token, repetition."""
    rng = random.Random(3)  # noqa: S311 - the same ids in every run
    return {
        "rhyme": client.tokenize(RHYME)[:60],
        "code": client.tokenize("int main(){return 0;}\n\n\t[1.5e-7, {'a': None}]\n" * 3),
        "script": client.tokenize("日本語のテキスト 🎉🎉 العربية \u200b "),
        "any ids": [rng.randrange(40_000) for _ in range(60)],
        "control ids": list(range(40)),
        "one id": [rng.randrange(40_000)],
        "one id, repeated": [5] * 60,
        "blank": client.tokenize(" " * 200 + "\n" * 30),
    }


def test_check_honest_states_of_any_prompt_pass_the_baseline(probed: Probed) -> None:
    """Control tokens make the baseline; no text may look implausible beside them."""
    for name, ids in prompts(probed.client).items():
        try:
            probed.check(save(probed.client, ids), ids)
        except StateFileError as error:
            pytest.fail(f"{name}: {error}")


def test_check_rows_and_layers_that_were_not_written_are_refused(probed: Probed) -> None:
    """One row of zeros in a real state, and one tensor: each named."""
    ids = probed.client.tokenize(RHYME)[:30]
    whole = save(probed.client, ids)
    block = next(
        block
        for section in parse(whole, probed.layout).sections
        for block in section.blocks
        if block.what.endswith("layer 2 V")
    )
    assert isinstance(block.tensor, Rows)
    size = block.tensor.row_size
    for first, cells, sentence in [
        (17, 1, f"{block.what}, cell 17: every value is zero, as if it had not been written"),
        (0, 30, f"{block.what}: every value is zero; the decoder's own are not"),
    ]:
        damaged = bytearray(whole)
        at = block.offset + first * size
        damaged[at : at + cells * size] = bytes(cells * size)
        with pytest.raises(StateFileError) as caught:
            probed.check(bytes(damaged), ids)
        assert str(caught.value) == sentence


def test_restore_accepts_a_hundred_damaged_files_that_the_check_accepts() -> None:
    """Finite nonsense in the data is all that passes, and it is nothing that hurts the decoder."""
    build, model = BUILDS[0], MODELS[0]
    build.require()
    model.require()
    rng = random.Random(11)  # noqa: S311 - the same damage in every run
    with running_llama(build, model) as client:
        layout = learn_layout(save(client, PROBE), PROBE)
        ids = client.tokenize(RHYME)[:12]
        whole = save(client, ids)
        tried = restored = 0
        while restored < RESTORES:
            tried += 1
            damaged = bytearray(whole)
            for _ in range(rng.randint(1, 40)):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            try:
                check(damaged, layout, ids)
            except StateFileError:
                continue
            (client.slots_dir / "damaged").write_bytes(damaged)
            reply = client.slot_action("restore", "damaged")
            assert (reply.status, reply.json["n_restored"]) == (200, len(ids)), tried
            assert reply.json["n_read"] == len(damaged)
            restored += 1
        assert tried > restored, "nothing was refused: the damage is too small to tell"
        client.slot_action("erase", "")
        assert save(client, ids) == whole
        assert client.process.poll() is None
