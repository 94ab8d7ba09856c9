"""The main job on real parts: the decoder's own reply after one evaluated prompt token."""

from __future__ import annotations

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
    LlamaClient,
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


@pytest.fixture(
    scope="module",
    params=[(build, model) for build in BUILDS for model in MODELS],
    ids=lambda pair: f"build-{pair[0].name}-{pair[1].name}",
)
def pair(request: pytest.FixtureRequest) -> tuple[LlamaBuild, LlamaModel]:
    """Each build with each model."""
    build, model = request.param
    build.require()
    model.require()
    return build, model


@pytest.fixture(scope="module")
def direct(pair: tuple[LlamaBuild, LlamaModel]) -> Iterator[LlamaClient]:
    """The decoder alone."""
    with running_llama(*pair) as client:
        yield client


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


def cold(direct: LlamaClient, path: str, body: dict[str, Any]) -> HttpReply:
    """Ask the decoder alone, with an empty slot."""
    direct.slot_action("erase", "")
    reply = direct.request("POST", path, body)
    content_type = "text/event-stream" if body.get("stream") else "application/json"
    return HttpReply(reply.status, {"content-type": content_type}, reply.body)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/completions", {"prompt": RHYME}),
    ],
    ids=["chat", "completion"],
)
def test_handoff_real_parts_same_text_and_one_token_evaluated(
    daemon: RunningDaemon, direct: LlamaClient, path: str, body: dict[str, Any], stream: bool
) -> None:
    """The reply equals the decoder's own, and the decoder evaluated only the last prompt token."""
    asked = {**body, **GREEDY, "stream": stream}
    expected = cold(direct, path, asked)
    before = len(daemon.handoffs())
    reply = daemon.request("POST", path, asked)
    assert (reply.status, expected.status) == (200, 200)
    assert reply.text == expected.text
    assert reply.text.strip()
    record = daemon.last_handoff(before + 1)
    assert record["outcome"] == "used", record
    assert record["evaluated_tokens"] == 1
    assert record["cached_tokens"] == record["handed_tokens"] == record["prompt_tokens"] - 1
    assert reply.headers["x-onebit-handoff"] == "file"


def test_handoff_ids_as_prompt_same_text(daemon: RunningDaemon, direct: LlamaClient) -> None:
    """A prompt given as token ids is handed over as it is."""
    ids = direct.tokenize(RHYME)
    asked = {"prompt": ids, **GREEDY}
    expected = cold(direct, "/v1/completions", asked)
    before = len(daemon.handoffs())
    reply = daemon.request("POST", "/v1/completions", asked)
    assert reply.text == expected.text
    record = daemon.last_handoff(before + 1)
    assert (record["outcome"], record["prompt_tokens"]) == ("used", len(ids))


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "Hi"}],
        [{"role": "user", "content": "<|im_start|>user <bos> héllo 漢字 <start_of_turn>"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  two  spaces "}],
        CHAT,
    ],
    ids=["short", "special-tokens", "system", "turns"],
)
def test_ids_handed_over_are_the_ids_the_decoder_evaluates(
    daemon: RunningDaemon, messages: list[dict[str, str]]
) -> None:
    """Whatever the template does with BOS, the decoder finds every handed id in its cache."""
    before = len(daemon.handoffs())
    body = {"messages": messages, "max_tokens": 1, "temperature": 0}
    assert daemon.request("POST", "/v1/chat/completions", body).status == 200
    record = daemon.last_handoff(before + 1)
    assert record["outcome"] == "used", record
    assert record["evaluated_tokens"] == 1


def test_handoff_client_sets_slot_fields_they_do_not_get_around_it(
    daemon: RunningDaemon,
) -> None:
    """An id_slot and cache_prompt of the client's change nothing."""
    before = len(daemon.handoffs())
    body = {"prompt": RHYME, **GREEDY, "id_slot": 5, "cache_prompt": True}
    assert daemon.request("POST", "/v1/completions", body).status == 200
    assert daemon.last_handoff(before + 1)["outcome"] == "used"


def test_handoff_after_a_cancelled_reply_restores_all_the_same(daemon: RunningDaemon) -> None:
    """A client that leaves in the middle of a long reply costs the next handoff nothing."""
    before = len(daemon.handoffs())
    connection = daemon.connect()
    body = {"prompt": DAYS, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}))
    connection.getresponse().read(10)
    connection.close()
    reply = daemon.request("POST", "/v1/completions", {"prompt": RHYME, **GREEDY})
    assert reply.status == 200
    records = daemon.handoffs()[before:]
    assert [record["outcome"] for record in records] == ["cancelled", "used"]
    assert records[0]["reason"] == "client_gone"


def test_handoff_sliding_window_without_swa_full_ends_wasted(
    llama_build: LlamaBuild, reference_provider: Path
) -> None:
    """Without --swa-full the decoder evaluates the prompt again; the record says so honestly."""
    model = next(model for model in MODELS if model.swa)
    model.require()
    with running_llama(llama_build, model) as direct:
        expected = cold(direct, "/v1/completions", {"prompt": RHYME, **GREEDY})
    with running_onebitd(
        model=model.path,
        llama_server=llama_build.program,
        provider=reference_provider,
        backend_args=["-c", "2048", "-t", "1", "--no-swa-full", *llama_build.extra_args],
        env=llama_build.provider_env,
    ) as daemon:
        reply = daemon.completion(RHYME, max_tokens=GREEDY["max_tokens"])
        assert reply.text == expected.text
        record = daemon.last_handoff()
        assert record["outcome"] == "wasted", record
        assert record["evaluated_tokens"] > 1


def test_prefill_decoder_alone_is_fallback_free_when_device_is_cpu(
    some_build: LlamaBuild, smollm2: LlamaModel, reference_provider: Path
) -> None:
    """With --device cpu no provider is ever called."""
    with running_onebitd(
        "--device",
        "cpu",
        model=smollm2.path,
        llama_server=some_build.program,
        provider=reference_provider,
        backend_args=["-c", "2048", "-t", "1"],
    ) as daemon:
        assert daemon.completion(RHYME).status == 200
        record = daemon.last_handoff()
        assert (record["outcome"], record["reason"]) == ("skipped", "policy")
        assert record["evaluated_tokens"] == record["prompt_tokens"] > 1


BOS_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}\n"
    "{{ message['content'] }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""As Gemma's own: the template writes a BOS, and the tokenizer adds one."""


def test_template_with_its_own_bos_hands_over_the_decoders_ids(
    llama_build: LlamaBuild, reference_provider: Path, tmp_path: Path
) -> None:
    """BOS is there once, not twice: the decoder finds every handed id, and counts as many."""
    model = next(model for model in MODELS if model.swa)
    model.require()
    template = tmp_path / "bos.jinja"
    template.write_text(BOS_TEMPLATE)
    body = {"messages": [{"role": "user", "content": DAYS}], **GREEDY}
    with running_llama(llama_build, model, "--chat-template-file", str(template)) as direct:
        expected = cold(direct, "/v1/chat/completions", body)
        prompt = direct.post("/apply-template", body)["prompt"]
        ids = direct.tokenize(prompt)
    bos = 2
    assert ids[:2].count(bos) == 1
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
        reply = daemon.request("POST", "/v1/chat/completions", body)
        record = daemon.last_handoff()
        assert (record["outcome"], record["evaluated_tokens"]) == ("used", 1), record
        assert record["prompt_tokens"] == len(ids) == expected.json["usage"]["prompt_tokens"]
        assert reply.text == expected.text
