"""The provider of forty lines in onebit-provider(7), as it stands there, before a real decoder."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness import RunningDaemon, running_onebitd
from tests.llama_builds import BUILDS, MODELS, ROOT, LlamaClient, running_llama

PAGE = ROOT / "man" / "onebit-provider.7"
BUILD, MODEL = BUILDS[0], MODELS[0]
PROMPT = "The sun rises in the east and sets in the west, day after day after day, and so it"
LINES = 40


def listing() -> str:
    """Return the program, as a reader of the page sees it."""
    found = re.search(
        r"^\.Bd -literal[^\n]*\n(#!/usr/bin/python3\n.*?)^\.Ed", PAGE.read_text(), re.M | re.S
    )
    assert found
    return found.group(1).replace("\\e", "\\").replace("\\&", "")


@dataclass(frozen=True)
class Warm:
    """The daemon with that provider, and the llama-server that the provider asks."""

    daemon: RunningDaemon
    server: LlamaClient
    provider: Path
    home: Path


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """Both of one build, on the same model."""
    BUILD.require()
    MODEL.require()
    provider = tmp_path_factory.mktemp("warm") / "prefill-warm"
    provider.write_text(listing())
    provider.chmod(0o700)
    with running_llama(BUILD, MODEL) as server:
        home = server.socket.parent
        (home / "socket").symlink_to(server.socket)
        with running_onebitd(
            model=MODEL.path,
            llama_server=BUILD.program,
            provider=provider,
            backend_args=("-c", "2048", "-t", "1", *BUILD.extra_args),
            config=f'[provider]\nenv = {{ PREFILL_WARM = "{home}" }}\n',
        ) as daemon:
            yield Warm(daemon, server, provider, home)


def test_example_has_forty_lines() -> None:
    """The page says so."""
    assert len([line for line in listing().splitlines() if line.strip()]) <= LINES
    assert "in forty lines" in PAGE.read_text()


@pytest.mark.real
def test_example_is_used_and_the_reply_is_the_decoders_own(warm: Warm) -> None:
    """One token is evaluated, the text is that of a plain reply, nothing is left of the state."""
    plain = warm.daemon.completion(PROMPT, max_tokens=6, headers={"X-Onebit-Handoff": "never"})
    handed = warm.daemon.completion(PROMPT, max_tokens=6)
    assert handed.text == plain.text
    record = warm.daemon.last_handoff(2)
    assert (record["outcome"], record["evaluated_tokens"]) == ("used", 1), record
    assert record["prefill_ms"] < record["provider_wall_ms"]
    assert list(warm.server.slots_dir.iterdir()) == []


@pytest.mark.real
def test_example_says_what_is_wrong(warm: Warm, tmp_path: Path) -> None:
    """Another model, or no server: a status that is not 0, and a last line that says so."""
    ids = tmp_path / "ids"
    ids.write_text("1\n2\n")
    files = (warm.provider, "--tokens", ids, "--out", tmp_path / "out")
    words = [*map(str, files), "--model", "/other.gguf"]
    for home, said in ((warm.home, "does not serve /other.gguf"), (tmp_path, "FileNotFoundError")):
        done = subprocess.run(
            words, env={"PREFILL_WARM": str(home)}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert said in done.stderr.splitlines()[-1]
        assert not (tmp_path / "out").exists()
