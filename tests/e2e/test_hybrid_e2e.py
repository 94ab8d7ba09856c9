"""The main job on real parts: the decoder's own reply after one evaluated prompt token."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.rig import DAYS, RHYME
from tests.harness import HttpReply, RunningDaemon, running_onebitd
from tests.llama_builds import (
    BUILDS,
    MODELS,
    LlamaBuild,
    LlamaModel,
    running_llama,
)

CHAT = [
    {"role": "system", "content": "You repeat the text of the user, word by word, nothing else."},
    {"role": "user", "content": DAYS},
    {"role": "assistant", "content": DAYS},
    {"role": "user", "content": DAYS},
]
"""A chat whose greedy reply is decided: the models copy what stands above."""

GREEDY = {"temperature": 0, "seed": 1, "max_tokens": 12}
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASKED: dict[str, dict[str, Any]] = {CHATS: {"messages": CHAT}, COMPLETIONS: {"prompt": RHYME}}


PAIRS = [(build, model) for model in MODELS for build in BUILDS]
"""Each model with each build. What has nothing to do with the model is tried with the first one:
the other's vocabulary takes seconds to load, for the decoder and for each provider run."""
NEVER = {"X-Onebit-Handoff": "never"}


def name_of(pair: tuple[LlamaBuild, LlamaModel]) -> str:
    """Return how a pair is called in test ids."""
    return f"build-{pair[0].name}-{pair[1].name}"


@pytest.fixture(scope="module", params=PAIRS, ids=name_of)
def pair(request: pytest.FixtureRequest) -> tuple[LlamaBuild, LlamaModel]:
    """A build and a model that are installed."""
    build, model = request.param
    build.require()
    model.require()
    return build, model


any_model = pytest.mark.parametrize("pair", PAIRS[:2], ids=name_of, indirect=True, scope="module")


@dataclasses.dataclass(frozen=True)
class Alone:
    """What a decoder alone makes of the two prompts, each from an empty slot.

    Attributes:
        texts: the reply to CHAT and to RHYME, by endpoint.
        ids: of RHYME.
    """

    texts: dict[str, str]
    ids: list[int]


@functools.cache
def alone(build: LlamaBuild, model: LlamaModel) -> Alone:
    """Ask the decoder, once a test run."""
    with running_llama(build, model) as client:
        texts = {}
        for path, asked in ASKED.items():
            client.slot_action("erase", "")
            reply = client.request("POST", path, {**asked, **GREEDY})
            assert reply.status == 200
            texts[path] = HttpReply(200, {}, reply.body).text
        return Alone(texts, client.tokenize(RHYME))


@pytest.fixture(scope="module")
def told(pair: tuple[LlamaBuild, LlamaModel]) -> Alone:
    """What the decoder alone says."""
    return alone(*pair)


@pytest.fixture(scope="module")
def daemon(
    pair: tuple[LlamaBuild, LlamaModel], reference_provider: Path
) -> Iterator[RunningDaemon]:
    """The same decoder behind onebitd, with the reference provider."""
    build, model = pair
    with running_onebitd(
        model=model.path,
        llama_server=build.program,
        provider=reference_provider,
        backend_args=["-c", "2048", "-t", "1", *build.extra_args],
        env=build.provider_env,
    ) as running:
        yield running


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS], ids=["chat", "completion"])
def test_handoff_real_parts_same_text_and_one_token_evaluated(
    daemon: RunningDaemon, told: Alone, pair: tuple[LlamaBuild, LlamaModel], path: str
) -> None:
    """The reply equals the decoder's own, and the decoder evaluated only the last prompt token.

    Each build and each model has both endpoints, one of them streamed, in turn.
    """
    build, model = pair
    stream = (build.name == "B") ^ model.swa ^ (path == CHATS)
    before = len(daemon.handoffs())
    reply = daemon.request("POST", path, {**ASKED[path], **GREEDY, "stream": stream})
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/event-stream") is stream
    assert reply.text == told.texts[path]
    assert reply.text.strip()
    record = daemon.last_handoff(before + 1)
    assert record["outcome"] == "used", record
    assert record["evaluated_tokens"] == 1
    assert record["cached_tokens"] == record["handed_tokens"] == record["prompt_tokens"] - 1
    # A stream that had to wait for long has begun with comments, before anybody knew.
    assert reply.headers.get("x-onebit-handoff", "file" if stream else "none") == "file"


def test_ids_handed_over_are_the_ids_the_decoder_evaluates(
    daemon: RunningDaemon, pair: tuple[LlamaBuild, LlamaModel]
) -> None:
    """Whatever the template does with BOS, the decoder finds every handed id in its cache.

    So it does with the chat of many turns above.
    """
    special = "<|im_start|>user <bos> héllo 漢字 <start_of_turn>"
    asked = [[{"role": "user", "content": special}]]
    if pair[0] is BUILDS[0]:
        asked += [[{"role": "user", "content": "Hi"}]]
    else:
        system = {"role": "system", "content": "Be brief."}
        asked += [[system, {"role": "user", "content": "  two  spaces "}]]
    for messages in asked:
        before = len(daemon.handoffs())
        body = {"messages": messages, "max_tokens": 1, "temperature": 0}
        assert daemon.request("POST", CHATS, body).status == 200
        record = daemon.last_handoff(before + 1)
        assert (record["outcome"], record["evaluated_tokens"]) == ("used", 1), (messages, record)


@any_model
def test_handoff_ids_as_prompt_same_text(daemon: RunningDaemon, told: Alone) -> None:
    """A prompt given as token ids is handed over as it is."""
    before = len(daemon.handoffs())
    reply = daemon.request("POST", COMPLETIONS, {"prompt": told.ids, **GREEDY})
    assert reply.text == told.texts[COMPLETIONS]
    record = daemon.last_handoff(before + 1)
    assert (record["outcome"], record["prompt_tokens"]) == ("used", len(told.ids))


@any_model
def test_handoff_client_sets_slot_fields_they_do_not_get_around_it(
    daemon: RunningDaemon,
) -> None:
    """An id_slot and cache_prompt of the client's change nothing."""
    before = len(daemon.handoffs())
    body = {"prompt": RHYME, **GREEDY, "id_slot": 5, "cache_prompt": True}
    assert daemon.request("POST", COMPLETIONS, body).status == 200
    assert daemon.last_handoff(before + 1)["outcome"] == "used"


@any_model
def test_handoff_after_a_cancelled_reply_restores_all_the_same(daemon: RunningDaemon) -> None:
    """A client that leaves in the middle of a long reply costs the next handoff nothing."""
    before = len(daemon.handoffs())
    connection = daemon.connect()
    body = {"prompt": DAYS, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    connection.request("POST", COMPLETIONS, json.dumps({**body, "stream": True}))
    connection.getresponse().read(10)
    connection.close()
    reply = daemon.request("POST", COMPLETIONS, {"prompt": RHYME, **GREEDY})
    assert reply.status == 200
    records = daemon.handoffs()[before:]
    assert [record["outcome"] for record in records] == ["cancelled", "used"]
    assert records[0]["reason"] == "client_gone"


def test_handoff_sliding_window_without_swa_full_ends_wasted(reference_provider: Path) -> None:
    """Without --swa-full the decoder evaluates the prompt again; the record says so honestly.

    Build B does so in test_never_lose.py.
    """
    build, model = BUILDS[1], next(model for model in MODELS if model.swa)
    build.require()
    model.require()
    with running_onebitd(
        model=model.path,
        llama_server=build.program,
        provider=reference_provider,
        backend_args=["-c", "2048", "-t", "1", "--no-swa-full", *build.extra_args],
        env=build.provider_env,
    ) as daemon:
        reply = daemon.completion(RHYME, max_tokens=GREEDY["max_tokens"])
        assert reply.text == alone(build, model).texts[COMPLETIONS]
        record = daemon.last_handoff()
        assert record["outcome"] == "wasted", record
        assert record["evaluated_tokens"] > 1


BOS_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}\n"
    "{{ message['content'] }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""As Gemma's own: the template writes a BOS, and the tokenizer adds one."""


@pytest.mark.parametrize("llama_build", BUILDS[-1:], indirect=True, ids=lambda build: build.name)
def test_template_with_its_own_bos_hands_over_the_decoders_ids(
    llama_build: LlamaBuild, reference_provider: Path, tmp_path: Path
) -> None:
    """BOS is there once, not twice: the decoder finds every handed id, and counts as many."""
    model = next(model for model in MODELS if model.swa)
    model.require()
    template = tmp_path / "bos.jinja"
    template.write_text(BOS_TEMPLATE)
    body = {"messages": [{"role": "user", "content": DAYS}], **GREEDY}
    with running_onebitd(
        model=model.path,
        llama_server=llama_build.program,
        provider=reference_provider,
        backend_args=[
            *("-c", "2048", "-t", "1", "--chat-template-file", str(template)),
            *llama_build.extra_args,
        ],
        env=llama_build.provider_env,
    ) as daemon:
        prompt = daemon.request("POST", "/apply-template", body).json["prompt"]
        words = {"content": prompt, "add_special": True, "parse_special": True}
        ids = daemon.request("POST", "/tokenize", words).json["tokens"]
        bos = 2
        assert ids[:2].count(bos) == 1
        expected = daemon.request("POST", CHATS, body, NEVER)
        cold = daemon.last_handoff(1)
        assert (cold["outcome"], cold["evaluated_tokens"]) == ("skipped", len(ids)), cold
        reply = daemon.request("POST", CHATS, body)
        record = daemon.last_handoff(2)
        assert (record["outcome"], record["evaluated_tokens"]) == ("used", 1), record
        assert record["prompt_tokens"] == len(ids) == expected.json["usage"]["prompt_tokens"]
        assert reply.text == expected.text
