"""`onebitctl provider check`: it passes what is right, and fails each fault for its own reason."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from onebitd.conformance.cases import CASES
from onebitd.conformance.watch import processes_with
from tests.harness import wait_until
from tests.llama_builds import (
    BUILDS,
    MODELS,
    ROOT,
    LlamaBuild,
    LlamaModel,
    short_temporary_directory,
)
from tests.tiny_models import TINY_MODELS, write

BUILD_B, BUILD_X = BUILDS
SMOLLM2, GEMMA3 = MODELS
BROKEN = ROOT / "tests" / "standins" / "broken_providers.py"


@dataclass(frozen=True)
class Report:
    """What one run of the kit said."""

    status: int
    found: dict[str, Any]

    def failures(self) -> dict[tuple[str, str], str]:
        """Return the sentence of each failed check, by case and check."""
        return {
            (one["case"], one["check"]): one["text"]
            for one in self.found["checks"]
            if one["verdict"] == "fail"
        }

    def of(self, case: str, check: str) -> dict[str, Any]:
        """Return one check."""
        (one,) = (
            one for one in self.found["checks"] if (one["case"], one["check"]) == (case, check)
        )
        return dict(one)


@dataclass(frozen=True)
class Bench:
    """Programs made for the kit, and its temporary directory, which must end up empty."""

    programs: Path
    temporary: Path

    def program(self, name: str, *command: object, first: str = "") -> Path:
        """Make a program that runs a command with its own arguments, after lines of shell."""
        path = self.programs / name
        words = " ".join(f"'{word}'" for word in command)
        path.write_text(f'#!/bin/sh\n{first}\nexec {words} "$@"\n')
        path.chmod(0o755)
        return path

    def command(self, program: Path, build: LlamaBuild, model: LlamaModel, *more: str) -> list[str]:
        """Return the kit's command line; one thread, small context."""
        build.require()
        model.require()
        words = [sys.executable, "-m", "onebitd.surfaces.cli", "provider", "check", str(program)]
        words += ["--model", str(model.path), "--llama-server", str(build.program), "--json"]
        args = " ".join((*build.extra_args, "-t", "1"))
        return [*words, f"--llama-args={args}", "--ctx-size", "256", *more]

    def environment(self, build: LlamaBuild, extra: Mapping[str, str]) -> dict[str, str]:
        """Return the kit's environment."""
        own = {"TMPDIR": str(self.temporary), "PYTHONPATH": str(ROOT)}
        return {**os.environ, **build.provider_env, **own, **extra}

    def check(
        self, program: Path, build: LlamaBuild, model: LlamaModel, *more: str, **extra: str
    ) -> Report:
        """Run the kit to its end; nothing of it is left, whatever it found."""
        done = subprocess.run(
            self.command(program, build, model, *more),
            env=self.environment(build, extra),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.stderr == "", done.stderr
        self.assert_nothing_left()
        return Report(done.returncode, json.loads(done.stdout))

    def assert_nothing_left(self) -> None:
        """See that no file, socket or process of a run is there any more."""
        assert list(self.temporary.iterdir()) == []
        assert processes_with(str(self.temporary)) == []


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Two directories for one run of the kit."""
    with short_temporary_directory() as temporary:
        yield Bench(tmp_path, temporary)


@pytest.fixture
def llama_provider(bench: Bench) -> Path:
    """The reference provider of this checkout."""
    return bench.program("prefill-llama", sys.executable, "-m", "onebitd.prefill_llama")


@pytest.fixture
def broken(bench: Bench) -> Path:
    """The provider that is broken in the way that BROKEN_PROVIDER says."""
    # By the shell: a signal may come before the interpreter has read its first line.
    deaf = f"""\
if [ "$BROKEN_PROVIDER" = ignores_sigterm ]; then
    trap 'sleep 30' TERM
    '{sys.executable}' '{BROKEN}' "$@" &
    wait $!
    exit
fi"""
    return bench.program("broken", sys.executable, BROKEN, first=deaf)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    """A model of 1 MB, for faults that have nothing to do with values."""
    qwen3 = next(model for model in TINY_MODELS if model.name == "qwen3")
    return write(qwen3, tmp_path_factory.mktemp("tiny"))


# --- what is right --------------------------------------------------------------------------


def test_kit_reference_provider_conforms_in_every_case(
    bench: Bench, llama_provider: Path, tiny: LlamaModel
) -> None:
    """Nothing fails, every case is there, and each says what it is about."""
    report = bench.check(llama_provider, BUILD_B, tiny)

    assert report.failures() == {}
    assert (report.status, report.found["conforming"], report.found["failed"]) == (0, True, 0)
    assert list(dict.fromkeys(one["case"] for one in report.found["checks"])) == list(CASES)
    assert report.found["ctx_size"] == 256
    assert report.of("context", "speed")["handed_tokens"] == 254
    assert report.of("one-token", "restore")["cached_tokens"] == 1
    assert report.of("repeat", "repeat")["verdict"] == "ok"
    assert report.of("unknown-id", "refusal")["status"] == 4
    assert report.of("together", "together")["verdict"] == "ok"


def test_kit_reference_provider_agrees_with_the_decoder_to_the_bit(
    bench: Bench, llama_provider: Path
) -> None:
    """The same program with the same arguments: no difference in values, chances or reply."""
    report = bench.check(llama_provider, BUILD_B, SMOLLM2, "--only", "short")

    assert report.failures() == {}
    assert report.status == 0
    assert report.found["layout"].startswith("v2: attention 30 layers")
    assert report.of("short", "values")["row_error"] == 0
    assert report.of("short", "logprobs")["logprob_difference"] == 0
    assert report.of("short", "reply")["tokens"] == 16


def test_kit_reference_provider_with_sliding_window_and_other_build_conforms(
    bench: Bench, llama_provider: Path
) -> None:
    """Two caches, a window and another state version make no difference."""
    report = bench.check(llama_provider, BUILD_X, GEMMA3, "--only", "special")

    assert report.failures() == {}
    assert report.status == 0
    assert report.found["layout"].startswith("v4: attention 3 layers")
    assert report.of("special", "restore")["evaluated_tokens"] == 1


@pytest.mark.parametrize("model", [GEMMA3], ids=lambda model: model.name)
def test_kit_numpy_provider_conforms_at_its_tolerance(bench: Bench, model: LlamaModel) -> None:
    """An engine that is not llama.cpp drifts on a quantized file; its author says how far."""
    program = bench.program("prefill-numpy", sys.executable, "-m", "onebitd.prefill_numpy")
    tolerances = ("--scale-tolerance", "0.02", "--logprob-tolerance", "1")
    report = bench.check(program, BUILD_B, model, "--only", "short", *tolerances)

    assert report.failures() == {}
    assert report.status == 0
    assert 0 < report.of("short", "values")["row_error"] < 0.35


# --- what is not ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "check", "said"),
    [
        ("one_short", "state", ["bad_state: holds 26 tokens, 27 were handed over"]),
        ("no_rope", "values", ["RoPE is not applied; 30 of 60 tensors are off"]),
        ("swapped_kv", "values", ["layer 3 K: row error", "K and V are exchanged"]),
        ("head_scaled", "values", ["layer 7 V: head 1 is 1.0100 times the decoder's"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kit_wrong_values_fail_with_their_cause(
    bench: Bench, broken: Path, mode: str, check: str, said: list[str]
) -> None:
    """The layer and what is wrong with it are named."""
    report = bench.check(broken, BUILD_B, SMOLLM2, "--only", "short", BROKEN_PROVIDER=mode)

    assert (report.status, report.found["conforming"]) == (1, False)
    sentence = report.failures()["short", check]
    assert all(words in sentence for words in said), sentence
    others = {name for _, name in report.failures()} - {check}
    assert others <= ({"logprobs", "reply"} if check == "values" else set())


IN_FILE = ("short", "file")
PROCESSES = ("short", "processes")


@pytest.mark.parametrize(
    ("mode", "only", "said"),
    [
        (
            "early_exit",
            "short",
            {PROCESSES: "running in its process group", IN_FILE: "ended with status 0"},
        ),
        ("in_place", "short", {IN_FILE: "was written under its own name"}),
        ("leaves_temporary", "short", {IN_FILE: "left prefill.tmp beside the state file"}),
        ("leaves_child", "short", {PROCESSES: "(sleep) running in its process group"}),
        ("no_file", "short", {IN_FILE: "wrote no file at --out"}),
        ("ignores_sigterm", "sigterm", {("sigterm", "stop"): "still ran 2 s after SIGTERM"}),
        (
            "any_ids",
            "bad-ids,empty-ids,unknown-id",
            {
                ("bad-ids", "refusal"): "ended with status 0",
                ("empty-ids", "refusal"): "ended with status 0",
                ("unknown-id", "refusal"): "there is a file at --out all the same",
            },
        ),
    ],
)
def test_kit_broken_contract_fails_for_its_reason(
    bench: Bench,
    broken: Path,
    tiny: LlamaModel,
    mode: str,
    only: str,
    said: dict[tuple[str, str], str],
) -> None:
    """Each fault is told where it is, and nothing else is blamed."""
    report = bench.check(broken, BUILD_B, tiny, "--only", only, BROKEN_PROVIDER=mode)

    failures = report.failures()
    assert report.status == 1
    assert failures.keys() == said.keys()
    assert all(text in failures[where] for where, text in said.items()), failures


def test_kit_file_that_differs_from_run_to_run_is_a_note(
    bench: Bench, broken: Path, tiny: LlamaModel
) -> None:
    """Determinism is reported, with how far the two are apart, and not asked for."""
    report = bench.check(broken, BUILD_B, tiny, "--only", "repeat", BROKEN_PROVIDER="dithers")

    assert report.status == 0
    repeat = report.of("repeat", "repeat")
    assert repeat["verdict"] == "note"
    assert "layer 0 V, position 0" in repeat["text"]
    assert 0 < repeat["row_error"] < 0.01


# --- its own end ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)]
)
def test_kit_stopped_in_the_middle_leaves_nothing(
    bench: Bench, broken: Path, tiny: LlamaModel, signum: int, status: int
) -> None:
    """Decoder, provider, its child, socket and files go with it."""
    kit = subprocess.Popen(
        bench.command(broken, BUILD_B, tiny, "--only", "short"),
        env=bench.environment(BUILD_B, {"BROKEN_PROVIDER": "hangs"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        mark = str(bench.temporary / "onebit-check")
        wait_until(lambda: len(processes_with(mark)) >= 2, "the provider and its child run")
        kit.send_signal(signum)
        out, err = kit.communicate(timeout=60)
    finally:
        kit.kill()
        kit.wait()

    assert (kit.returncode, out, err) == (status, b"", b"")
    bench.assert_nothing_left()


def test_kit_decoder_that_cannot_start_is_status_3(
    bench: Bench, broken: Path, tiny: LlamaModel
) -> None:
    """Nothing was judged, which is neither a pass nor a failure of the provider."""
    command = bench.command(broken, BUILD_B, tiny)
    command += ["--llama-server", str(bench.program("no-llama", "/bin/false"))]
    done = subprocess.run(
        command,
        env=bench.environment(BUILD_B, {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stdout) == (3, "")
    assert "the decoder cannot be started" in done.stderr
    bench.assert_nothing_left()


def test_kit_keep_has_the_files_of_each_case(
    bench: Bench, llama_provider: Path, tiny: LlamaModel, tmp_path: Path
) -> None:
    """What was handed over, both state files, and what the program said; for the user alone."""
    kept = tmp_path / "kept"
    report = bench.check(
        llama_provider, BUILD_B, tiny, "--only", "one-token,bad-ids", "--keep", str(kept)
    )

    assert report.status == 0
    names = {path.name for path in (kept / "one-token").iterdir()}
    assert names == {"tokens.txt", "state.bin", "reference.state", "stdout", "stderr"}
    assert len((kept / "one-token" / "tokens.txt").read_text().split()) == 1
    assert "is not a token id" in (kept / "bad-ids" / "stderr").read_text()
    assert not [path for path in kept.rglob("*") if path.stat().st_mode & 0o077]
