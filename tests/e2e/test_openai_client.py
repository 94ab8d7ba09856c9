"""The official openai client against onebitd on real parts, errors included."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.harness import RunningDaemon, running_onebitd
from tests.llama_builds import BUILDS, DAYS, MODELS


@pytest.fixture(scope="module")
def daemon(
    tmp_path_factory: pytest.TempPathFactory, reference_provider: Path
) -> Iterator[RunningDaemon]:
    """One daemon with the reference provider, an API key, and a small body limit."""
    build = next((build for build in BUILDS if build.program.exists()), BUILDS[0])
    build.require()
    MODELS[0].require()
    home = tmp_path_factory.mktemp("openai")
    keys = home / "keys"
    keys.write_text("# for the test\nsk-test\n")
    keys.chmod(0o600)
    with running_onebitd(
        "--alias",
        "smol",
        model=MODELS[0].path,
        llama_server=build.program,
        provider=reference_provider,
        backend_args=["-c", "2048", "-t", "1", *build.extra_args],
        config=f'[http]\napi_key_file = "{keys}"\nmax_body_mib = 1\n',
        env=build.provider_env,
    ) as running:
        yield running


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[openai.OpenAI]:
    """The client, without retries of its own."""
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{daemon.port}/v1", api_key="sk-test", max_retries=0, timeout=120
    ) as made:
        yield made


def test_chat_whole_and_streamed_are_the_same(client: openai.OpenAI, daemon: RunningDaemon) -> None:
    """A chat works both ways, through the handoff."""
    before = len(daemon.handoffs())
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [
        {"role": "user", "content": f"Continue. {DAYS}"}
    ]
    whole = client.chat.completions.create(
        model="smol", messages=messages, temperature=0, max_tokens=8
    )
    parts = client.chat.completions.create(
        model="smol", messages=messages, temperature=0, max_tokens=8, stream=True
    )
    streamed = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert streamed == whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    daemon.last_handoff(before + 2)
    records = daemon.handoffs()[before:]
    assert [record["outcome"] for record in records] == ["used", "used"]


def test_completion_whole_and_streamed_are_the_same(
    client: openai.OpenAI, daemon: RunningDaemon
) -> None:
    """A completion works both ways, through the handoff."""
    before = len(daemon.handoffs())
    whole = client.completions.create(model="smol", prompt=DAYS, temperature=0, max_tokens=8)
    parts = client.completions.create(
        model="smol", prompt=DAYS, temperature=0, max_tokens=8, stream=True
    )
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    daemon.last_handoff(before + 2)
    assert [record["outcome"] for record in daemon.handoffs()[before:]] == ["used", "used"]


def test_models_list_names_the_alias(client: openai.OpenAI) -> None:
    """The model is listed under the name that clients use."""
    assert [model.id for model in client.models.list()] == ["smol"]


def test_raw_response_carries_the_handoffs_headers(client: openai.OpenAI) -> None:
    """A client that looks can see how its prompt was computed."""
    raw = client.completions.with_raw_response.create(
        model="smol", prompt=DAYS, max_tokens=1, extra_headers={"X-Request-Id": "my-request-1"}
    )
    assert raw.headers["x-onebit-handoff"] == "file"
    assert raw.headers["x-request-id"] == "my-request-1"
    assert "restore;dur=" in raw.headers["server-timing"]


def test_wrong_key_is_an_authentication_error(daemon: RunningDaemon) -> None:
    """401 in the shape the client knows."""
    with (
        openai.OpenAI(
            base_url=f"http://127.0.0.1:{daemon.port}/v1", api_key="sk-wrong", max_retries=0
        ) as wrong,
        pytest.raises(openai.AuthenticationError, match="Invalid API Key"),
    ):
        wrong.completions.create(model="smol", prompt="a")


def test_prompt_beyond_the_context_is_the_decoders_bad_request(client: openai.OpenAI) -> None:
    """The decoder's own 400 reaches the client, streamed or not, and no provider ran."""
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="exceeds the available context size"):
            client.completions.create(model="smol", prompt=DAYS * 40, max_tokens=4, stream=stream)


def test_bad_parameter_is_an_error_with_the_decoders_words(client: openai.OpenAI) -> None:
    """What the decoder refuses is refused in its own words."""
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(
            model="smol", messages=[{"role": "user", "content": "hi"}], n=3
        )
    assert "n" in str(caught.value)
    assert caught.value.status_code >= 400


def test_body_too_large_is_413_naming_the_limit(client: openai.OpenAI) -> None:
    """The limit is named, so that an operator knows what to raise."""
    with pytest.raises(openai.APIStatusError, match=r"max_body_mib") as caught:
        client.completions.create(model="smol", prompt="a" * (2 << 20))
    assert caught.value.status_code == 413


def test_strict_handoff_that_cannot_be_is_an_error(client: openai.OpenAI) -> None:
    """X-Onebit-Handoff: strict turns a request that cannot be handed off into a 502."""
    with pytest.raises(openai.InternalServerError, match="not_text"):
        client.completions.create(
            model="smol",
            prompt=["a", "b"],
            max_tokens=1,
            extra_headers={"X-Onebit-Handoff": "strict"},
        )
