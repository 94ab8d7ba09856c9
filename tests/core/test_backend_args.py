"""llama-server's command line: refusals, and the exact argv."""

from __future__ import annotations

import math

import pytest

from onebitd.core import backend_args
from onebitd.core.backend_args import (
    cache_ram_mib,
    command_line,
    device_args,
    parse_device_list,
    refusals,
)

REFUSED = [
    ["-np", "2"],
    ["-np", "-1"],
    ["-np", "0"],
    ["-np"],
    ["--parallel", "4"],
    ["-np=2"],
    ["--parallel=2"],
    ["--mtp"],
    ["--nextn"],
    ["--eagle3"],
    ["--dflash"],
    ["--spec-default"],
    ["--spec-type", "draft-mtp"],
    ["--spec-draft-n-max", "3"],
    ["--no-spec-draft-backend-sampling"],
    ["-md", "d.gguf"],
    ["--model-draft", "d.gguf"],
    ["--model_draft", "d.gguf"],
    ["--spec-draft-model", "d.gguf"],
    ["-hfd", "a/b"],
    ["-devd", "none"],
    ["-ngld", "0"],
    ["--draft", "3"],
    ["--draft-max", "3"],
    ["--gpu-layers-draft", "1"],
    ["-lcs", "f"],
    ["--lookup-cache-dynamic", "f"],
    ["--mmproj", "p.gguf"],
    ["-mm", "p.gguf"],
    ["--mmproj-url", "u"],
    ["-mmu", "u"],
    ["--mmproj-auto"],
    ["--mmproj_offload"],
    ["-mmdev", "x"],
    ["--moe-slots", "3"],
    ["--moe_slots", "3"],
    ["--pm"],
    ["--embedding"],
    ["--embeddings"],
    ["--rerank"],
    ["--reranking"],
    ["--host", "192.0.2.1"],
    ["--port", "1"],
    ["--reuse-port"],
    ["--slot-save-path", "/x"],
    ["--slot_save_path", "/x"],
    ["--slots"],
    ["--no-slots"],
    ["--api-key", "k"],
    ["--api-key-file", "f"],
    ["--api-prefix", "/p"],
    ["--ssl-key-file", "f"],
    ["--ssl-cert-file", "f"],
    ["-m", "x.gguf"],
    ["--model", "x.gguf"],
    ["-mu", "u"],
    ["--model-url", "u"],
    ["-dr", "r"],
    ["--docker-repo", "r"],
    ["-hf", "a/b"],
    ["-hfr", "a/b"],
    ["--hf-repo", "a/b"],
    ["-hff", "f"],
    ["--hf-file", "f"],
    ["--gpt-oss-20b-default"],
    ["--fim-qwen-7b-spec"],
    ["--models-dir", "/d"],
    ["--models-preset", "f"],
    ["--models-max", "2"],
    ["--no-models-autoload"],
    ["-a", "n"],
    ["--alias", "n"],
    ["--props"],
    ["--sleep-idle-seconds", "5"],
    ["-h"],
    ["--help"],
    ["--usage"],
    ["--version"],
    ["-cl"],
    ["--cache-list"],
    ["--list-devices"],
    ["--completion-bash"],
]

ALLOWED = [
    ["-np", "1"],
    ["--parallel", "1"],
    ["--spec-type", "none"],
    ["--no-mmproj"],
    ["-c", "4096"],
    ["--ctx-size", "4096"],
    ["-fa", "on"],
    ["-ctk", "q8_0"],
    ["-kvu"],
    ["--metrics"],
    ["--path", "/srv/www"],
    ["--lora", "a.gguf"],
    ["--device", "none", "-ngl", "0"],
    ["--cache-ram", "512"],
    ["--swa-full"],
    ["--no-swa-full"],
    ["--threads", "-1"],
    ["--chat-template-kwargs", '{"a": "--host"}'],
    ["--no-host"],
    ["--models"],  # not a llama-server flag: llama-server says so better than we could
]


@pytest.mark.parametrize("args", REFUSED, ids=" ".join)
def test_refusals_forbidden_argument_is_named_with_place_reason_and_next_step(
    args: list[str],
) -> None:
    """Every spelling of a refused argument gives one line: where, what, why, what to do."""
    lines = refusals(["--threads", "2", *args], "after --")
    assert len(lines) == 1
    flag = args[0].partition("=")[0]
    assert lines[0].startswith(f"after --: {flag.replace('_', '-')}")
    assert " is refused: " in lines[0]
    assert "; " in lines[0]


@pytest.mark.parametrize("args", ALLOWED, ids=" ".join)
def test_refusals_other_argument_passes(args: list[str]) -> None:
    """What does not contradict a handoff is llama-server's own business."""
    assert refusals(args, "after --") == []


def test_refusals_parallel_shows_the_value_that_was_given() -> None:
    """The line names the flag with its value, since the value is what is wrong."""
    assert "-np 2 is refused" in refusals(["-np", "2"], "x")[0]


def test_refusals_several_are_all_reported_in_order() -> None:
    """One run finds every refused argument."""
    lines = refusals(["--mmproj", "p", "-np", "2", "--pm"], "backend.args")
    assert [line.split()[1] for line in lines] == ["--mmproj", "-np", "--pm"]


def test_refusals_second_context_size_only_when_one_is_set() -> None:
    """-c may come from the arguments, but not beside model.ctx_size."""
    assert refusals(["-c", "1"], "x") == []
    assert "model.ctx_size" in refusals(["--ctx_size", "1"], "x", ctx_size_is_set=True)[0]


@pytest.mark.parametrize(
    "name",
    [
        "LLAMA_ARG_MMPROJ",
        "LLAMA_ARG_MMPROJ_URL",
        "LLAMA_ARG_SPEC_DRAFT_MODEL",
        "LLAMA_ARG_SPEC_TYPE",
        "LLAMA_ARG_N_PARALLEL",
        "LLAMA_API_KEY",
        "AIP_MODE",
        "LLAMA_ARG_SSL_KEY_FILE",
        "LLAMA_ARG_EMBEDDINGS",
        "LLAMA_ARG_ENDPOINT_SLOTS",
        "LLAMA_ARG_HF_REPO",
        "LLAMA_ARG_MODELS_DIR",
    ],
)
def test_environment_refusals_back_door_is_named_without_its_value(name: str) -> None:
    """A variable of llama-server cannot smuggle in what a flag may not; no secret is shown."""
    lines = backend_args.environment_refusals({name: "s3cret", "GGML_X": "1"}, "backend.env")
    assert len(lines) == 1
    assert lines[0].startswith(f"backend.env: {name} is refused")
    assert "s3cret" not in lines[0]


def test_environment_refusals_harmless_variables_pass() -> None:
    """Threads, cache sizes and one slot are no fault."""
    env = {"LLAMA_ARG_THREADS": "2", "LLAMA_ARG_CACHE_RAM": "1", "LLAMA_ARG_N_PARALLEL": "1"}
    assert backend_args.environment_refusals(env, "x") == []


def test_decoder_environment_drops_inherited_back_doors_and_lets_extra_win() -> None:
    """The machine's own llama-server variables do not reach the decoder."""
    inherited = {"LLAMA_ARG_MMPROJ": "p", "PATH": "/bin", "A": "1"}
    assert backend_args.decoder_environment(inherited, {"A": "2"}) == {"PATH": "/bin", "A": "2"}


def argv(*extra: str, sliding_window: bool = False, **changes: object) -> list[str]:
    """Build a command line around `extra`."""
    given: dict[str, object] = {
        "program": "llama-server",
        "model": "/m/m.gguf",
        "alias": "m",
        "ctx_size": None,
        "device": [],
        "socket": "/run/x/backend.sock",
        "slot_dir": "/run/x/slots",
        "sliding_window": sliding_window,
        "extra": extra,
    }
    return command_line(**(given | changes))  # type: ignore[arg-type]


FIXED = [
    "llama-server",
    *("-m", "/m/m.gguf", "--alias", "m", "--host", "/run/x/backend.sock"),
    *("-np", "1", "--slot-save-path", "/run/x/slots"),
]


def test_command_line_plain_model_is_exactly_this() -> None:
    """One slot, a slot directory, a private socket and no prompt cache in RAM."""
    assert argv() == [*FIXED, "--cache-ram", "0"]


def test_command_line_everything_is_exactly_this() -> None:
    """Context size, sliding window, device and extra arguments stand in this order."""
    found = argv(
        "-fa", "on", sliding_window=True, ctx_size=4096, device=["--device", "HRX0"], program="/l"
    )
    expected = ["/l", *FIXED[1:], "-c", "4096", "--cache-ram", "0", "--swa-full"]
    assert found == [*expected, "--device", "HRX0", "-fa", "on"]


@pytest.mark.parametrize("flag", ["--cache-ram", "-cram", "--cache_ram"])
def test_command_line_cache_ram_in_the_arguments_replaces_ours(flag: str) -> None:
    """backend.args may say otherwise."""
    assert argv(flag, "64") == [*FIXED, flag, "64"]


@pytest.mark.parametrize(
    ("args", "mib"),
    [
        ((), 8192.0),
        (("--cache-ram", "0"), 0.0),
        (("-cram", "64"), 64.0),
        (("--cache_ram", "64"), 64.0),
        (("--cache-ram", "-1"), math.inf),
        (("--cache-ram", "0", "-cram", "32"), 32.0),
        (("--cache-ram", "much"), 8192.0),
        (("--cache-ram",), 8192.0),
    ],
)
def test_cache_ram_mib_is_what_the_decoder_takes(args: tuple[str, ...], mib: float) -> None:
    """Its own default without the flag, the last one of several, no limit below zero."""
    assert cache_ram_mib(["llama-server", *args]) == mib


def test_command_line_swa_full_is_not_doubled() -> None:
    """A user's own --swa-full counts, for any model, once."""
    for window in (True, False):
        assert argv("--swa-full", sliding_window=window) == [
            *FIXED,
            *("--cache-ram", "0", "--swa-full"),
        ]


@pytest.mark.parametrize("spelling", ["--no-swa-full", "--no_swa_full"])
def test_command_line_no_swa_full_is_obeyed_and_taken_out(spelling: str) -> None:
    """llama-server has no such flag and would refuse to start."""
    assert argv(spelling, "-v", sliding_window=True) == [*FIXED, "--cache-ram", "0", "-v"]


def test_command_line_one_slot_is_not_said_twice() -> None:
    """llama-server warns about a flag given twice."""
    assert argv("-np", "1", "-v", "--parallel", "1") == [*FIXED, "--cache-ram", "0", "-v"]


def test_command_line_device_in_the_arguments_replaces_ours() -> None:
    """A decoder on the CPU beside a provider: hybrid, with --device none in backend.args."""
    found = argv("-dev", "none", device=["--device", "HRX0"])
    assert found == [*FIXED, "--cache-ram", "0", "-dev", "none"]


def test_command_line_never_asks_for_the_models_own_draft_head() -> None:
    """Nothing in the line turns drafting on; llama-server's default is off."""
    assert not any("spec" in arg or "mtp" in arg or "draft" in arg for arg in argv())


@pytest.mark.parametrize(
    ("device", "listed", "expected"),
    [
        ("hybrid", ["HRX0"], ["--device", "HRX0"]),
        ("hybrid", ["Vulkan0", "HRX1", "HRX0"], ["--device", "HRX0"]),
        ("hybrid", ["HRX1"], ["--device", "HRX1"]),
        ("hybrid", ["Vulkan0", "HRXish"], []),
        ("hrx", ["HRX0"], ["--device", "HRX0"]),
        ("hrx", [], []),
        ("cpu", ["HRX0"], ["--device", "none", "-ngl", "0"]),
        ("Vulkan1", [], ["--device", "Vulkan1"]),
    ],
)
def test_device_args_each_kind(device: str, listed: list[str], expected: list[str]) -> None:
    """hybrid and hrx need a listed HRX device; a name goes through as it is."""
    assert device_args(device, listed) == expected


def test_parse_device_list_real_shapes() -> None:
    """Devices, none at all in both builds' words, log lines around, and a colon in a name."""
    text = (
        "load_backend: loaded Vulkan backend\nAvailable devices:\n"
        "  Vulkan0: NVIDIA RTX 2060 (6144 MiB, 5136 MiB free)\n"
        "ggml_x: found something: else\n"
        "  HRX0: Radeon 8060S: gfx1151 (65536 MiB, 65000 MiB free)\n"
        "  RPC0[127.0.0.1:50052]: 127.0.0.1:50052 (1 MiB, 1 MiB free)\n"
    )
    assert parse_device_list(text) == ["Vulkan0", "HRX0", "RPC0[127.0.0.1:50052]"]
    assert parse_device_list("Available devices:\n") == []
    assert parse_device_list("Available devices:\n  (none)\n") == []
    assert parse_device_list("error: invalid argument: --list-devices\n  x: y\n") == []
