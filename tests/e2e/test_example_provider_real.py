"""The provider of forty lines in onebit-provider(7), as it stands there, before a real decoder.

As the provider of the service it is in tests/systemd/test_example_provider.py.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import provider_page
from tests.harness import RunningDaemon, running_onebitd
from tests.llama_builds import (
    BUILDS,
    MODELS,
    LlamaClient,
    short_temporary_directory,
    stop_process,
)

BUILD, MODEL = BUILDS[0], MODELS[0]
PROMPT = "The sun rises in the east and sets in the west, day after day after day, and so it"
LINES = 40


def here(text: str, home: Path) -> str:
    """Return what the page says with the paths that this test has."""
    places = {
        provider_page.HOME: home,
        provider_page.LLAMA_SERVER: BUILD.program,
        provider_page.MODEL: MODEL.path,
        provider_page.PROGRAM: home / "prefill-warm",
    }
    for there, path in places.items():
        text = text.replace(there, str(path))
    return text


@contextlib.contextmanager
def served(home: Path) -> Iterator[LlamaClient]:
    """Type the page's commands, as this user; the CPU and a small context are added."""
    mkdir, remove, server = (
        [here(word, home) for word in words[words.index("--") + 1 if "--" in words else 0 :]]
        for words in provider_page.commands()
    )
    subprocess.run(mkdir, check=True)
    (home / "server.sock").touch()  # as a former run leaves it
    subprocess.run(remove, check=True)
    log = home / "log"
    with log.open("wb") as said:
        words = [*server, *BUILD.extra_args, "-t", "1", "-c", "2048"]
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    try:
        client = LlamaClient(process, home / "server.sock", home / "slots", log)
        client.wait_ready(60)
        yield client
    finally:
        stop_process(process)


@dataclass(frozen=True)
class Warm:
    """The daemon with that provider, and the llama-server that the provider asks."""

    daemon: RunningDaemon
    server: LlamaClient
    provider: Path
    home: Path


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    """Both of one build, on the same model, by the page's own lines."""
    BUILD.require()
    MODEL.require()
    with short_temporary_directory() as parent:
        home = parent / "warm"
        with served(home) as server:
            provider = home / "prefill-warm"
            provider.write_text(provider_page.provider())
            provider.chmod(0o700)
            with running_onebitd(
                model=MODEL.path,
                llama_server=BUILD.program,
                backend_args=("-c", "2048", "-t", "1", *BUILD.extra_args),
                config=here(provider_page.configuration(), home),
            ) as daemon:
                yield Warm(daemon, server, provider, home)


def test_example_has_forty_lines() -> None:
    """The page says so."""
    program = provider_page.provider()
    assert len([line for line in program.splitlines() if line.strip()]) <= LINES
    assert "in forty lines" in provider_page.PAGE.read_text()


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
