"""onebit-prefill-numpy against real llama-servers: what it computes, and what it leaves behind.

On float32 weights two engines that compute the same agree to the rounding of the cache. On
quantized ones they do not, as llama.cpp rounds activations too: there the drift is measured, and
has to stay what it was.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest

from onebitd.core import state_compare, state_file
from onebitd.core.state_compare import StateDiff
from tests.e2e.rig import RHYME
from tests.e2e.test_prefill_llama import last_line, run, wait_until, write_ids
from tests.e2e.test_prefill_share import (
    Memory,
    assert_memory_holds,
    exported,
    provide,
    rows_of_file,
)
from tests.float_models import write_float_copy
from tests.harness import running_onebitd
from tests.llama_builds import BUILDS, MODELS, LlamaBuild, LlamaClient, LlamaModel, running_llama
from tests.tiny_models import (
    HEAD,
    LAYERS,
    TINY_MODELS,
    VOCABULARY,
    WIDTH,
    TinyModel,
    _Writer,
    write,
)

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
EXACT_ROW, EXACT_RMS = 0.01, 0.002
"""Largest relative row error and its root mean square over a tensor, on float32 weights: f16 rounds
by up to 0.0005, and what it rounds is computed with again in every further layer."""
DRIFT_ROW, DRIFT_RMS = 0.3, 0.12
"""The same on quantized weights; llama.cpp with other batches is as far from itself."""


def command(out: Path, ids_file: Path, model: Path, *more: str) -> list[str]:
    """Return the provider's command line."""
    words = [sys.executable, "-m", "onebitd.prefill_numpy", "--tokens", str(ids_file)]
    return [*words, "--out", str(out), "--model", str(model), *more]


def computed(out: Path, ids: list[int], model: Path, example: Path | None) -> None:
    """Run the provider as the daemon does; it must succeed, silently, and leave one file."""
    ids_file = write_ids(out.parent.parent / "ids", ids)
    env = ONE_THREAD | ({} if example is None else {"ONEBIT_STATE_EXAMPLE": str(example)})
    before = set(out.parent.iterdir())
    done = run(command(out, ids_file, model), env)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(last_line(done.stdout))["prefill_ms"] > 0
    assert set(out.parent.iterdir()) - before == {out}
    assert stat.S_IMODE(out.stat().st_mode) == 0o600


def difference(found: Path, reference: Path) -> StateDiff:
    """Compare two state files."""
    a, b = found.read_bytes(), reference.read_bytes()
    return state_compare.compare(state_file.parse(a), a, state_file.parse(b), b, causes=False)


def saved(client: LlamaClient, ids: list[int], name: str) -> Path:
    """Have the decoder evaluate ids, and return the state that it saves."""
    client.slot_action("erase", "")
    client.complete(ids, 0)
    assert client.slot_action("save", name).status == 200
    return client.slots_dir / name


def handed_over(
    client: LlamaClient, model: LlamaModel, ids: list[int], n_predict: int
) -> StateDiff:
    """Assert that the decoder goes on from the provider's state as from its own; compare them."""
    example = saved(client, [1, 2, 3], "example")
    reference = saved(client, ids[:-1], "reference")
    expected = client.complete(ids, n_predict)["content"]  # its last token evaluated by itself
    computed(client.slots_dir / "state", ids[:-1], model.path, example)
    assert client.slot_action("erase", "").status == 200
    restored = client.slot_action("restore", "state")
    assert (restored.status, restored.json["n_restored"]) == (200, len(ids) - 1)
    reply = client.complete(ids, n_predict)
    assert (reply["timings"]["cache_n"], reply["timings"]["prompt_n"]) == (len(ids) - 1, 1)
    assert reply["content"] == expected
    return difference(client.slots_dir / "state", reference)


def assert_close(diff: StateDiff, row: float, rms: float) -> None:
    """Every tensor of every layer is there and within the bounds; the worst are shown."""
    assert diff.notes == ()
    for tensor in sorted(diff.tensors, key=lambda t: t.row_error)[-3:]:
        print(f"{tensor.what}: row {tensor.row_error:.5f}, rms {tensor.rms_error:.5f}")
    assert max(tensor.row_error for tensor in diff.tensors) < row
    assert max(tensor.rms_error for tensor in diff.tensors) < rms


# --- the same numbers ---------------------------------------------------------------------------


@pytest.fixture(scope="session")
def float_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for copies of the real models with float32 layers."""
    return tmp_path_factory.mktemp("float-models")


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_numpy_on_float32_weights_agrees_with_llama_cpp_to_the_rounding_of_the_cache(
    model: LlamaModel, float_models: Path
) -> None:
    """Every row of K and V of every layer is the decoder's own, and so is the reply."""
    build = BUILDS[0]
    build.require()
    model.require()
    exact = write_float_copy(model, float_models / f"{model.name}.gguf")
    with running_llama(build, exact, "-fa", "on") as client:
        diff = handed_over(client, exact, client.tokenize(RHYME), 8)
    exact.path.unlink()
    assert_close(diff, EXACT_ROW, EXACT_RMS)
    assert len({(tensor.section, tensor.layer) for tensor in diff.tensors}) in (18, 30)


def test_numpy_on_quantized_weights_drifts_as_far_as_is_said() -> None:
    """What llama.cpp rounds and numpy does not is seen in every layer, and bounded."""
    build, model = BUILDS[1], MODELS[1]  # the other model's: test_conformance.py
    build.require()
    model.require()
    with running_llama(build, model, "-fa", "on") as client:
        diff = handed_over(client, model, client.tokenize(RHYME), 8)
    assert_close(diff, DRIFT_ROW, DRIFT_RMS)
    assert all(tensor.rms_error > EXACT_RMS for tensor in diff.tensors if tensor.layer > 0)


def _llama_scaled(out: _Writer) -> None:
    """Fill a llama model with biases and both ways of stretching positions."""
    out.heads()
    out.keys.add_rope_dimension_count(HEAD)
    out.keys.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    out.keys.add_rope_scaling_factor(2.0)
    out.random("rope_freqs.weight", HEAD // 2, scale=0.3, mean=2.0)
    out.ones("output_norm.weight", WIDTH)
    out.random("output.weight", WIDTH, len(VOCABULARY))
    for layer in range(LAYERS):
        out.random(f"blk.{layer}.attn_norm.weight", WIDTH, mean=1.0)
        out.attention(layer, bias=True)
        out.random(f"blk.{layer}.attn_output.bias", WIDTH)
        out.feed_forward(layer)


TINY = (
    next(model for model in TINY_MODELS if model.name == "qwen3"),
    TinyModel("llama-scaled", "llama", "plain attention", _llama_scaled),
)
CACHES = (("-fa", "on"), ("-fa", "off"), ("-fa", "on", "-ctk", "bf16", "-ctv", "bf16"))
"""What the example's file tells apart: V as rows or transposed, and the types."""


@pytest.mark.parametrize("tiny", TINY, ids=lambda tiny: tiny.name)
@pytest.mark.parametrize("cache", CACHES, ids=" ".join)
def test_numpy_on_any_cache_agrees_with_the_decoder(
    tiny: TinyModel, cache: tuple[str, ...], tmp_path: Path
) -> None:
    """qwen3 and llama, biases and stretched positions, for each kind of cache it can write."""
    build = BUILDS[CACHES.index(cache) % len(BUILDS)]
    build.require()
    model = write(tiny, tmp_path)
    ids = [10 + (n * 37) % 80 for n in range(700)]  # more than one chunk of the engine
    with running_llama(build, model, *cache) as client:
        diff = handed_over(client, model, ids, 4)
    scale = 8 if "bf16" in cache else 1  # has three bits less
    assert_close(diff, scale * EXACT_ROW, scale * EXACT_RMS)


# --- with the daemon ----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def numpy_provider(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The provider of this checkout as a program."""
    path = tmp_path_factory.mktemp("provider") / "onebit-prefill-numpy"
    path.write_text(
        f"#!{sys.executable}\n"
        "import sys\nfrom onebitd.prefill_numpy import main\nsys.exit(main())\n"
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("build", "model"),
    [(BUILDS[0], MODELS[1]), (BUILDS[1], MODELS[0])],
    ids=lambda part: part.name,
)
def test_numpy_behind_the_daemon_one_token_evaluated_and_the_decoders_reply(
    build: LlamaBuild, model: LlamaModel, numpy_provider: Path
) -> None:
    """Whatever the decoder's version and cache: the daemon's example tells the provider."""
    build.require()
    model.require()
    cache = ("-fa", "off") if model.name == "smollm2" else ()
    with running_onebitd(
        model=model.path,
        llama_server=build.program,
        provider=numpy_provider,
        backend_args=["-c", "2048", "-t", "1", *build.extra_args, *cache],
        env=ONE_THREAD,
    ) as daemon:

        def ask(prompt: str, policy: str) -> str:
            messages = [{"role": "user", "content": prompt}]
            body = {"messages": messages, "max_tokens": 6, "temperature": 0, "seed": 1}
            headers = {"X-Onebit-Handoff": policy}
            reply = daemon.request("POST", "/v1/chat/completions", body, headers=headers)
            assert reply.status == 200, reply
            return reply.text

        plain = ask(RHYME, "never")
        ask("Hi", "never")  # nothing of the first prompt is in the slot then
        assert ask(RHYME, "strict") == plain
        record = daemon.last_handoff(3)
    assert (record["outcome"], record["route"], record["evaluated_tokens"]) == ("used", "file", 1)
    assert record["cached_tokens"] == record["handed_tokens"] == record["prompt_tokens"] - 1
    assert record["prefill_ms"] < record["provider_wall_ms"]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    """A decoder's memory for SmolLM2's cache."""
    with exported(tmp_path / "header") as found:
        yield found


def test_numpy_on_the_shared_route_writes_the_rows_of_its_file(
    memory: Memory, smollm2: LlamaModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lands in the decoder's memory is what the file route writes, and nothing else."""
    ids_file = write_ids(tmp_path / "ids", list(range(10, 50)))
    out = tmp_path / "state"
    monkeypatch.setenv(*next(iter(ONE_THREAD.items())))  # more threads add up in another order
    assert run(command(out, ids_file, smollm2.path)).returncode == 0
    words = [sys.executable, "-m", "onebitd.prefill_numpy", "--tokens", str(ids_file)]
    words += ["--layout", str(memory.header_file), "--fds", ",".join(map(str, memory.fds))]
    done = provide([*words, "--model", str(smollm2.path)], memory, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert_memory_holds(memory, rows_of_file(out.read_bytes()))


# --- refusals, and what is left -----------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    """A model that is evaluated in no time."""
    return write(TINY[0], tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (["--model", "{tmp}/no.gguf"], 2, "no.gguf: No such file"),
        (["--model", "{tmp}/ids"], 2, "not a GGUF file"),
        (["--model", "{tmp}/empty"], 2, "{tmp}/empty: the file is empty"),
        (["--tokens", "{tmp}/far"], 2, "token id 4000: the model has 103"),
        (["--state-version", "7"], 2, "--state-version"),
        (["--out", "{tmp}/no/state"], 5, "No such file or directory"),
        (["--like", "{tmp}/ids"], 6, "{tmp}/ids: not a state file"),
        (["--like", "{tmp}/gone"], 6, "ONEBIT_STATE_EXAMPLE) {tmp}/gone: No such file"),
        (["--like", "{tmp}/fifo"], 6, "{tmp}/fifo: not a regular file"),
        (["--model", "{tmp}/fifo"], 2, "{tmp}/fifo: not a regular file"),
    ],
    ids=[
        *("no-model", "no-gguf", "empty", "id", "version", "out", "like-no-state", "like-missing"),
        *("like-fifo", "model-fifo"),
    ],
)
def test_numpy_given_what_it_cannot_use_says_so_in_one_line_and_leaves_nothing(
    flags: list[str], status: int, said: str, tiny_qwen3: LlamaModel, tmp_path: Path
) -> None:
    """Each refusal has its status, and its last line names the object."""
    home = tmp_path / "home"
    home.mkdir()
    write_ids(tmp_path / "ids", [10, 11, 12])
    write_ids(tmp_path / "far", [10, 4000])
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "fifo")
    words = command(home / "state", tmp_path / "ids", tiny_qwen3.path)
    done = run([*words, *(flag.format(tmp=tmp_path) for flag in flags)])
    assert done.returncode == status, done.stderr
    assert said.format(tmp=tmp_path) in last_line(done.stderr)
    assert done.stdout == ""
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        ("blk.0.attn_v.weight", "layer 0 V: a value is not finite"),
        # A norm makes zeros of what overflows in it, and those are finite.
        ("token_embd.weight", "layer 0, attn_norm: what it is applied to is not finite"),
    ],
)
def test_numpy_on_damaged_weights_says_so_in_one_line(
    damaged: str, said: str, tmp_path: Path
) -> None:
    """Weights that overflow give no warnings of numpy's beside the reason."""
    model = write(TINY[0], tmp_path).path
    for tensor in gguf.GGUFReader(model, "r+").tensors:
        if tensor.name == damaged:
            tensor.data[:] = 3e38
    done = run(command(tmp_path / "state", write_ids(tmp_path / "ids", [10, 11]), model))
    assert done.returncode == 4, done.stderr
    assert said in last_line(done.stderr)
    assert len(done.stderr.splitlines()) == 1


def test_numpy_without_the_gguf_package_says_what_installs_it(
    tiny_qwen3: LlamaModel, tmp_path: Path
) -> None:
    """The package is an extra: the line has a command for this very interpreter."""
    code = "import sys; sys.modules['gguf'] = None\n"
    code += "from onebitd.prefill_numpy import main\nsys.exit(main())"
    words = command(tmp_path / "state", write_ids(tmp_path / "ids", [10]), tiny_qwen3.path)
    done = run([sys.executable, "-c", code, *words[3:]])
    assert done.returncode == 3
    assert last_line(done.stderr).endswith(f": {sys.executable} -m pip install gguf")
    assert len(done.stderr.splitlines()) == 1


def test_numpy_that_cannot_write_all_of_it_leaves_nothing(
    tiny_qwen3: LlamaModel, tmp_path: Path
) -> None:
    """A full disk, played by a limit on the file's size."""
    home = tmp_path / "home"
    home.mkdir()
    words = command(home / "state", write_ids(tmp_path / "ids", [10] * 100), tiny_qwen3.path)
    done = run(["prlimit", "--fsize=8192", "--", *words])
    assert done.returncode == 5, done.stderr
    assert f"--out {home / 'state'}: File too large" in last_line(done.stderr)
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["term", "kill"])
def test_numpy_stopped_in_the_middle_leaves_no_state(
    number: signal.Signals, smollm2: LlamaModel, tmp_path: Path
) -> None:
    """SIGTERM leaves nothing, SIGKILL a temporary name at most; it ends by the signal."""
    home = tmp_path / "home"
    home.mkdir()
    ids_file = write_ids(tmp_path / "ids", [10 + n % 1000 for n in range(1800)])
    words = command(home / "state", ids_file, smollm2.path)
    process = subprocess.Popen(words, env=os.environ | ONE_THREAD, stderr=subprocess.PIPE)
    try:
        wait_until(lambda: list(home.iterdir()) != [], "the temporary file")
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, said) == (-number, b"")
    left = [path.name for path in home.iterdir()]
    if number == signal.SIGTERM:
        assert left == []
    assert all(name.startswith(".onebit-prefill-") for name in left)
