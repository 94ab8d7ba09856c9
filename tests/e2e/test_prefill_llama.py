"""onebit-prefill-llama with real llama-servers: its state files, its refusals, what it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from onebitd import prefill_llama
from tests.e2e.rig import RHYME
from tests.llama_builds import (
    BUILDS,
    CPU_ONLY,
    MODELS,
    ROOT,
    LlamaBuild,
    LlamaClient,
    LlamaModel,
    UnixConnection,
    require_program,
    running_llama,
)

LONG_PROMPT_IDS = 1800  # seconds of prefill on one thread: time to kill something


def command(out: Path, ids_file: Path, build: LlamaBuild, model: Path, *more: str) -> list[str]:
    """Return the provider's command line on the CPU with one thread."""
    words = [sys.executable, "-m", "onebitd.prefill_llama", "--tokens", str(ids_file)]
    words += ["--out", str(out), "--model", str(model), "--llama-server", str(build.program)]
    return [*words, "--llama-args", " ".join((*CPU_ONLY, "-t", "1")), *more]


def run(words: list[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a provider to its end."""
    return subprocess.run(
        words,
        cwd=ROOT,
        env=None if env is None else os.environ | env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def write_ids(path: Path, ids: list[int]) -> Path:
    """Write an ids file as the contract has it."""
    path.write_text("".join(f"{number}\n" for number in ids))
    return path


def processes_about(needle: Path) -> list[int]:
    """Return the pids of all processes with `needle` in their command line, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.fsencode(needle) in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Return once the condition holds; fails the test after half a minute."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def last_line(text: str) -> str:
    """Return what a daemon takes as the detail of a failure."""
    return text.splitlines()[-1]


@pytest.fixture
def ids_file(tmp_path: Path) -> Path:
    """A good ids file of 20 ids."""
    return write_ids(tmp_path / "ids", list(range(10, 30)))


# --- a good run ------------------------------------------------------------------------------


def check_used(client: LlamaClient, ids: list[int], cold_text: str) -> None:
    """Restore `slots_dir/state` and assert that the prompt then costs one token, same text."""
    restored = client.slot_action("restore", "state")
    assert restored.status == 200, restored.body
    assert restored.json["n_restored"] == len(ids) - 1
    assert restored.json["n_read"] == (client.slots_dir / "state").stat().st_size
    warm = client.complete(ids)
    assert (warm["timings"]["cache_n"], warm["timings"]["prompt_n"]) == (len(ids) - 1, 1)
    assert warm["content"] == cold_text


@pytest.mark.parametrize(
    ("llama_build", "llama_model"),
    [(BUILDS[0], MODELS[0]), (BUILDS[1], MODELS[1])],
    ids=lambda part: part.name,
)
def test_provider_on_every_build_and_model_hands_over_all_but_one_token(
    llama_build: LlamaBuild, llama_model: LlamaModel, tmp_path: Path
) -> None:
    """A decoder that restores the provider's file evaluates one token and says the same.

    Each build with each model: test_hybrid_e2e.py, through the daemon.
    """
    llama_build.require()
    llama_model.require()
    with running_llama(llama_build, llama_model) as client:
        ids = client.tokenize(RHYME)
        assert len(ids) > 50
        cold = client.complete(ids)
        assert cold["timings"]["prompt_n"] == len(ids)
        assert client.slot_action("erase", "unused").status == 200
        ids_file = write_ids(tmp_path / "ids", ids[:-1])
        out = client.slots_dir / "state"

        done = run(command(out, ids_file, llama_build, llama_model.path))

        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert json.loads(last_line(done.stdout))["prefill_ms"] > 0
        assert [path.name for path in client.slots_dir.iterdir()] == ["state"]
        assert stat.S_IMODE(out.stat().st_mode) == 0o600
        assert int.from_bytes(out.read_bytes()[4:8], "little") == llama_build.state_version
        check_used(client, ids, cold["content"])


def test_provider_prompt_that_goes_on_with_a_part_of_a_character_is_prefilled(
    llama_build: LlamaBuild, smollm2: LlamaModel, tmp_path: Path
) -> None:
    """llama-server makes a token even when asked for none, and fails if it is no character."""
    with running_llama(llama_build, smollm2) as client:
        ids = client.tokenize("\U0001f642" * 8)
    for n_ids in (len(ids) - 5, len(ids) - 1):
        ids_file = write_ids(tmp_path / "ids", ids[:n_ids])
        done = run(command(tmp_path / "state", ids_file, llama_build, smollm2.path))
        assert done.returncode == 0, done.stderr


def test_provider_configured_by_environment_uses_program_arguments_and_device(
    some_build: LlamaBuild, smollm2: LlamaModel, ids_file: Path, tmp_path: Path
) -> None:
    """With the contract's own flags alone, program, arguments and device come from variables."""
    env = {
        "ONEBIT_PREFILL_LLAMA_SERVER": str(some_build.program),
        "ONEBIT_PREFILL_LLAMA_ARGS": "-ngl 0 -t 1 -ctk 'q8_0' -fa on",
        "ONEBIT_PREFILL_LLAMA_DEVICE": "none",
        "LLAMA_API_KEY": "would lock the provider out of its own server",
    }
    out = tmp_path / "state"
    words = [sys.executable, "-m", "onebitd.prefill_llama", "--tokens", str(ids_file)]
    words += ["--out", str(out), "--model", str(smollm2.path), "--elfs", str(tmp_path)]
    done = run(words, env)
    assert done.returncode == 0, done.stderr
    quantized = out.stat().st_size
    assert run(words, env | {"ONEBIT_PREFILL_LLAMA_ARGS": "-ngl 0 -t 1"}).returncode == 0
    assert quantized < out.stat().st_size, "-ctk q8_0 did not reach llama-server"


def test_provider_with_a_long_out_path_puts_its_socket_elsewhere_and_removes_it(
    some_build: LlamaBuild, smollm2: LlamaModel, ids_file: Path, tmp_path: Path, short_path: Path
) -> None:
    """A directory too long for a Unix socket's path works, and the other place is left empty."""
    folder = tmp_path / ("d" * 120)
    folder.mkdir()
    words = command(folder / "state", ids_file, some_build, smollm2.path)
    done = run(words, {"XDG_RUNTIME_DIR": str(short_path)})
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.iterdir()] == ["state"]
    assert list(short_path.iterdir()) == []


# --- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(b"", "empty", id="empty"),
        pytest.param(b"1\n\n2\n", "line 2", id="blank-line"),
        pytest.param(b"1\ntwo\n", "line 2: 'two'", id="garbage"),
        pytest.param(b"1\n-2\n", "line 2: '-2'", id="negative"),
        pytest.param(b"2147483648\n", "'2147483648'", id="past-int32"),
        pytest.param(b"9" * 5000, "line 1", id="huge-number"),
        pytest.param(b"1 2 3\n", "'1 2 3'", id="several-on-a-line"),
        pytest.param(b"\xff\xfe\x00", "line 1", id="binary"),
        pytest.param(b"[1, 2]", "'[1, 2]'", id="json"),
        pytest.param("\u0661\n".encode(), "line 1", id="other-digits"),
    ],
)
def test_provider_given_a_bad_ids_file_exits_2_and_names_it(
    content: bytes, said: str, tmp_path: Path
) -> None:
    """An ids file that is not one decimal id a line is refused before anything is started."""
    ids_file = tmp_path / "ids"
    ids_file.write_bytes(content)
    done = run(command(tmp_path / "state", ids_file, BUILDS[0], tmp_path / "model"))
    assert done.returncode == 2
    assert f"ids file {ids_file}" in last_line(done.stderr)
    assert said in last_line(done.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["ids"]


def test_provider_given_a_missing_or_special_ids_file_exits_2(tmp_path: Path) -> None:
    """A missing file, a directory and a FIFO are refused, none of them blocks."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path, said in (
        (tmp_path / "nope", "No such file"),
        (tmp_path, "Is a directory"),
        (fifo, "not a regular file"),
    ):
        done = run(command(tmp_path / "state", path, BUILDS[0], tmp_path / "model"))
        assert done.returncode == 2, path
        assert f"ids file {path}" in last_line(done.stderr)
        assert said in last_line(done.stderr)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--nope"], "unrecognized arguments: --nope"),
        (["--ctx-size", "20"], "--ctx-size 20: the prompt has 20 ids; give 21 or more"),
        (["--ctx-size", "x"], "--ctx-size"),
        (["--timeout", "0"], "--timeout"),
        (["--timeout", "nan"], "--timeout"),
        (["--llama-args", "'open"], "--llama-args"),
    ],
)
def test_provider_given_a_bad_flag_exits_2_and_names_it(
    more: list[str], said: str, ids_file: Path, tmp_path: Path
) -> None:
    """A bad flag is one line that names the flag, before anything is started."""
    model = tmp_path / "model"
    model.touch()
    done = run(command(tmp_path / "state", ids_file, BUILDS[0], model, *more))
    assert done.returncode == 2
    assert said in last_line(done.stderr)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("n_ids", "ctx_size"), [(1, 256), (254, 256), (255, 512), (256, 512), (510, 512), (511, 768)]
)
def test_ctx_size_chosen_has_room_behind_the_token_that_is_made(n_ids: int, ctx_size: int) -> None:
    """llama-server calls a prompt truncated that fills its context with that token; every prompt of
    a multiple of 256 tokens failed so."""
    assert prefill_llama.choose_ctx_size(0, n_ids) == ctx_size


def test_provider_given_a_missing_model_exits_2_and_names_it(
    ids_file: Path, tmp_path: Path
) -> None:
    """A model that cannot be read is told by its path, not by llama-server's log."""
    done = run(command(tmp_path / "state", ids_file, BUILDS[0], tmp_path / "no.gguf"))
    assert done.returncode == 2
    assert f"model {tmp_path / 'no.gguf'}: No such file" in last_line(done.stderr)


def test_provider_without_the_program_exits_3_and_names_flag_and_variable(
    ids_file: Path, tmp_path: Path
) -> None:
    """A llama-server that is not there is told with the two ways to name one."""
    words = command(tmp_path / "state", ids_file, BUILDS[0], ids_file)
    done = run([*words, "--llama-server", "no-such-llama"])
    assert done.returncode == 3
    assert "no-such-llama" in last_line(done.stderr)
    assert "--llama-server or ONEBIT_PREFILL_LLAMA_SERVER" in last_line(done.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["ids"]


def test_provider_whose_server_never_gets_ready_exits_3_at_its_time_limit(
    ids_file: Path, tmp_path: Path, short_path: Path
) -> None:
    """A program that neither serves nor ends is killed when --timeout is over."""
    program = short_path / "sleeper"
    program.write_text(f'#!/bin/sh\nexec sleep 1000 # {short_path} "$@"\n')
    program.chmod(0o755)
    words = command(short_path / "state", ids_file, BUILDS[0], ids_file, "--timeout", "0.5")
    done = run([*words, "--llama-server", str(program)])
    assert done.returncode == 3
    assert "--timeout" in last_line(done.stderr)
    assert processes_about(short_path) == []
    assert [path.name for path in short_path.iterdir()] == ["sleeper"]


def test_provider_given_a_model_that_is_no_gguf_exits_3_with_the_servers_line(
    llama_build: LlamaBuild, ids_file: Path, tmp_path: Path
) -> None:
    """What llama-server said about the model is in the last line, on every build."""
    done = run(command(tmp_path / "state", ids_file, llama_build, ids_file))
    assert done.returncode == 3
    assert "load" in last_line(done.stderr)
    assert str(ids_file) in last_line(done.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["ids"]


def test_provider_given_an_argument_llama_server_refuses_exits_3_with_its_line(
    llama_build: LlamaBuild, smollm2: LlamaModel, ids_file: Path, tmp_path: Path
) -> None:
    """--llama-args that llama-server does not know come back in its own words."""
    words = command(tmp_path / "state", ids_file, llama_build, smollm2.path)
    done = run([*words, "--llama-args=--nope"])
    assert done.returncode == 3
    assert "error: invalid argument: --nope" in last_line(done.stderr)


def test_provider_given_ids_outside_the_vocabulary_exits_4_with_the_servers_message(
    llama_build: LlamaBuild, smollm2: LlamaModel, tmp_path: Path
) -> None:
    """Ids of another model are the prefill's failure, and leave no file."""
    ids_file = write_ids(tmp_path / "ids", [1, 2, 2_000_000_000])
    done = run(command(tmp_path / "state", ids_file, llama_build, smollm2.path))
    assert done.returncode == 4
    assert "invalid tokens" in last_line(done.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["ids"]


def test_provider_whose_out_is_impossible_exits_5_before_it_starts_anything(
    ids_file: Path, tmp_path: Path
) -> None:
    """A missing directory, a directory as the file and a read-only place are told at once."""
    for out, said in (
        (tmp_path / "no" / "state", "No such file or directory"),
        (tmp_path, "is a directory"),
        (Path("/proc/state"), "cannot create a file in /proc"),
    ):
        words = command(out, ids_file, BUILDS[0], ids_file, "--llama-server", "/bin/true")
        done = run(words)
        assert done.returncode == 5, done.stderr
        assert f"--out {out}" in last_line(done.stderr)
        assert said in last_line(done.stderr)


def test_provider_on_a_full_disk_exits_5_and_leaves_nothing(
    llama_build: LlamaBuild, smollm2: LlamaModel, tmp_path: Path
) -> None:
    """A state that does not fit is an error, also where llama-server says that it was saved."""
    ids_file = write_ids(tmp_path / "ids", list(range(10, 100)))
    full = tmp_path / "full"
    full.mkdir()
    prepare = f"mount -t tmpfs -o size=1m tmpfs {full}"
    require_program("unshare")
    unshare = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    if run([*unshare, prepare]).returncode != 0:
        pytest.skip("this machine allows no mount namespace")
    script = f'{prepare}; "$@"; status=$?; ls -A {full} >&2; exit $status'
    words = command(full / "state", ids_file, llama_build, smollm2.path)
    done = run([*unshare, script, "sh", *words])
    assert done.returncode == 5, done.stderr
    assert f"--out {full / 'state'}" in last_line(done.stderr), "a file was left behind"
    assert "0 bytes are free" in last_line(done.stderr)


# --- being killed ----------------------------------------------------------------------------


def slot_is_busy(out_dir: Path) -> bool:
    """Ask the provider's private llama-server whether the prefill has begun."""
    for sock in out_dir.glob(".onebit-prefill-*.sock"):
        connection = UnixConnection(sock, 30)
        try:
            connection.request("GET", "/slots")
            response = connection.getresponse()
            body = response.read()
        except OSError:
            return False
        finally:
            connection.close()
        return response.status == 200 and bool(json.loads(body)[0]["is_processing"])
    return False


@contextlib.contextmanager
def provider_at_work(
    build: LlamaBuild, model: LlamaModel, out_dir: Path, **env: str
) -> Iterator[subprocess.Popen[str]]:
    """Yield a provider, leader of its own group, in the middle of a long prefill."""
    ids_file = write_ids(out_dir / "ids", [50 + n % 1000 for n in range(LONG_PROMPT_IDS)])
    args = " ".join((*CPU_ONLY, "-t", "1", "-b", "64", "-ub", "64"))  # /slots waits for a batch
    process = subprocess.Popen(
        command(out_dir / "state", ids_file, build, model.path, "--llama-args", args),
        cwd=ROOT,
        env=os.environ | env,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(lambda: slot_is_busy(out_dir), "the prefill did not begin")
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(
    ("signum", "llama_build"),
    [(signal.SIGTERM, BUILDS[0]), (signal.SIGINT, BUILDS[1])],
    ids=["term", "int"],
)
def test_provider_stopped_during_the_prefill_leaves_no_file_and_no_process(
    signum: signal.Signals, llama_build: LlamaBuild, smollm2: LlamaModel, short_path: Path
) -> None:
    """A stop signal ends it with that signal, its llama-server gone and its files removed."""
    llama_build.require()
    with provider_at_work(llama_build, smollm2, short_path) as process:
        process.send_signal(signum)
        process.wait(30)
        assert process.returncode == -signum
        assert processes_about(short_path) == []
        assert [path.name for path in short_path.iterdir()] == ["ids"]


@pytest.mark.parametrize("setpriv", ["there", "missing", "refused"])
def test_provider_killed_during_the_prefill_takes_its_server_with_it(
    setpriv: str, smollm2: LlamaModel, short_path: Path, tmp_path: Path
) -> None:
    """SIGKILL leaves no process, with setpriv and without, and files only beside --out."""
    build = BUILDS[0]
    build.require()
    path = os.fspath(tmp_path)
    if setpriv == "there":
        require_program("setpriv")
        path = os.environ["PATH"]
    elif setpriv == "refused":
        (tmp_path / "setpriv").write_text("#!/bin/sh\nexit 127\n")
        (tmp_path / "setpriv").chmod(0o755)
    with provider_at_work(build, smollm2, short_path, PATH=path) as process:
        assert len(processes_about(short_path)) == 2
        process.kill()
        process.wait(30)
        wait_until(lambda: processes_about(short_path) == [], "llama-server outlived its provider")
        left = {p.name for p in short_path.iterdir() if not p.name.startswith(".onebit-prefill-")}
        assert left == {"ids"}


def test_provider_stopped_twice_while_the_model_loads_leaves_no_file_and_no_process(
    some_build: LlamaBuild, smollm2: LlamaModel, ids_file: Path, short_path: Path
) -> None:
    """Signals right after the start, and a second on the heels of the first, change nothing."""
    words = command(short_path / "state", ids_file, some_build, smollm2.path)
    process = subprocess.Popen(words, cwd=ROOT, start_new_session=True)
    try:
        wait_until(lambda: any(short_path.iterdir()), "the run did not begin")
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        process.wait(30)
        assert process.returncode in (-signal.SIGTERM, -signal.SIGINT)
        assert processes_about(short_path) == []
        assert list(short_path.iterdir()) == []
    finally:
        process.kill()
        process.wait()


def test_provider_whose_group_is_killed_leaves_no_process(
    some_build: LlamaBuild, smollm2: LlamaModel, short_path: Path
) -> None:
    """Its llama-server is in its process group, so a kill of the group ends both."""
    with provider_at_work(some_build, smollm2, short_path) as process:
        groups = {os.getpgid(pid) for pid in processes_about(short_path)}
        assert groups == {process.pid}
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        wait_until(lambda: processes_about(short_path) == [], "something outlived the group")


def test_provider_whose_server_dies_during_the_prefill_exits_4_and_names_the_signal(
    llama_build: LlamaBuild, smollm2: LlamaModel, short_path: Path
) -> None:
    """A llama-server that goes away is told with its exit status, and nothing is left."""
    with provider_at_work(llama_build, smollm2, short_path) as process:
        (server,) = set(processes_about(short_path)) - {process.pid}
        os.kill(server, signal.SIGKILL)
        _, stderr = process.communicate(timeout=30)
        assert process.returncode == 4
        assert "went away while it prefilled 1800 ids (status -9)" in last_line(stderr)
        assert [path.name for path in short_path.iterdir()] == ["ids"]
