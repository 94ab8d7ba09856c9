"""`onebitctl try` and `bench` on the real decoder and its tokenizer, with a real provider."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from onebitd.surfaces import cli
from tests.harness import RunningDaemon, running_onebitd
from tests.llama_builds import BUILDS, MODELS

TOKENS = 48


@pytest.fixture(scope="module")
def daemon(reference_provider: Path) -> Iterator[RunningDaemon]:
    """One daemon for both."""
    build, model = BUILDS[0], MODELS[0]
    build.require()
    model.require()
    with running_onebitd(
        model=model.path,
        llama_server=build.program,
        provider=reference_provider,
        backend_args=("-c", "512", "-t", "1", *build.extra_args),
        env=build.provider_env,
    ) as daemon:
        yield daemon


def onebitctl(daemon: RunningDaemon, *words: str) -> tuple[int, str, str]:
    """Run `onebitctl`; return exit status, stdout and stderr."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    socket = str(daemon.runtime / "control.sock")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(["--socket", socket, *words])
    said = [stream.detach().getvalue().decode() for stream in (out, err)]
    return status, said[0], said[1]


def test_try_real_chat_is_answered_and_explained(daemon: RunningDaemon) -> None:
    """The reply that the decoder gives without all this, and a handoff that was used."""
    prompt = "What is the capital of France?"
    words = ("--max-tokens", "6", "--temperature", "0", "--policy", "always", prompt)
    status, out, err = onebitctl(daemon, "try", *words)
    alone = daemon.chat(prompt, max_tokens=6, headers={"X-Onebit-Handoff": "never"})
    assert (status, out) == (0, f"{alone.text}\n")
    told = " ".join(err.split())
    assert "prompt tokens handed over by state file, prefilled in" in told
    assert "6 tokens generated at" in told


def test_bench_real_runs_have_the_length_and_nothing_in_the_slot(daemon: RunningDaemon) -> None:
    """Exactly so many tokens, of which the slot has one or two; the handoffs are used."""
    words = ("--lengths", str(TOKENS), "--repeat", "1", "--max-tokens", "4", "--json")
    status, out, err = onebitctl(daemon, "bench", *words)
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["failures"] == []
    records = [one["record"] for one in found["samples"]]
    assert [record["prompt_tokens"] for record in records] == [TOKENS] * 4
    assert [record["reply_tokens"] for record in records] == [4] * 4
    alone = [one["record"] for one in found["samples"] if one["way"] == "decoder"]
    assert all(record["cached_tokens"] <= 4 for record in alone)
    for way in found["medians"]:
        assert way["first_byte_ms"]["median"] > 0
        assert way["decode_tokens_per_s"] > 0
    assert found["medians"][1]["provider_ms"] > found["medians"][1]["restore_ms"] > 0
    # One run of each shows no difference, however slow a provider that loads the model is.
    assert [pair["verdict"] for pair in found["routes"]["file"]["lengths"]] == ["unclear"]
