"""onebit-prefill-llama on the shared route, with real llama-servers and memfds as the memory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from onebitd.core import state_file
from onebitd.core.state_layout import KvSection, type_name
from tests.e2e.test_prefill_llama import (
    LONG_PROMPT_IDS,
    last_line,
    processes_about,
    run,
    wait_until,
    write_ids,
)
from tests.llama_builds import CPU_ONLY, ROOT, LlamaBuild, LlamaModel, UnixConnection

IDS = [10 + n for n in range(40)]
FILL = 0xA5
N_LAYER = 30
ROW_SIZE = 384  # of SmolLM2's cache in f16, K and V alike
MAIN = "from onebitd.prefill_llama import main; sys.exit(main())"


@dataclass(frozen=True)
class Memory:
    """A decoder's memory: two memfds, K in the one and V in the other, and the header's file."""

    header_file: Path
    header: dict[str, Any]
    fds: tuple[int, int]

    def untouched(self) -> bool:
        """Tell whether not one byte was written."""
        return all(not self.read(index).strip(bytes([FILL])) for index in (0, 1))

    def read(self, region: int, offset: int = 0, n_bytes: int | None = None) -> bytes:
        """Return bytes of a region, without a number all of them."""
        size = self.header["regions"][region]["size"] if n_bytes is None else n_bytes
        return os.pread(self.fds[region], size, offset)


@contextlib.contextmanager
def exported(header_file: Path, *, n_cells: int = 64, row_size: int = ROW_SIZE) -> Iterator[Memory]:
    """Yield memory for SmolLM2's cache, filled with one byte; closed at the end."""
    stride = -(-n_cells * row_size // 4096) * 4096
    tensors = [
        {"name": f"cache_{kind}_l{layer}", "type": "f16", "row_size": row_size}
        | {"region": "kv".index(kind), "offset": layer * stride}
        for layer in range(N_LAYER)
        for kind in "kv"
    ]
    regions = [{"size": N_LAYER * stride}] * 2
    header = {"share_id": 1, "layout": 1, "n_cells": n_cells, "regions": regions}
    header["tensors"] = tensors
    header_file.write_text(json.dumps(header))
    fds = os.memfd_create("exported-k"), os.memfd_create("exported-v")
    try:
        for fd in fds:
            os.write(fd, bytes([FILL]) * (N_LAYER * stride))
        yield Memory(header_file, header, fds)
    finally:
        for fd in fds:
            os.close(fd)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    """A decoder's memory."""
    with exported(tmp_path / "header") as found:
        yield found


def command(
    memory: Memory, ids_file: Path, build: LlamaBuild, model: LlamaModel, *more: str
) -> list[str]:
    """Return the provider's command line on the CPU with one thread."""
    words = [sys.executable, "-m", "onebitd.prefill_llama", "--tokens", str(ids_file)]
    words += ["--layout", str(memory.header_file), "--fds", ",".join(map(str, memory.fds))]
    words += ["--model", str(model.path), "--llama-server", str(build.program)]
    return [*words, "--llama-args", " ".join((*CPU_ONLY, "-t", "1")), *more]


def provide(
    words: list[str], memory: Memory, runtime_dir: Path, temporary_dir: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a provider that inherits the memory; all that it could leave would be in these places."""
    return subprocess.run(
        words,
        cwd=ROOT,
        env=os.environ
        | {"XDG_RUNTIME_DIR": str(runtime_dir), "TMPDIR": str(temporary_dir or runtime_dir)},
        pass_fds=memory.fds,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def rows_of_file(state: bytes) -> dict[str, bytes]:
    """Return the rows of each tensor of a state file."""
    (section,) = state_file.parse(state).sections
    assert isinstance(section.shape, KvSection)
    n_layer = len(section.shape.k)
    rows = {}
    for index, block in enumerate(section.blocks):
        assert type_name(block.tensor.type) == "f16"
        name = f"cache_{'kv'[index // n_layer]}_l{index % n_layer}"
        rows[name] = state[block.offset : block.offset + block.n_bytes]
    return rows


def assert_memory_holds(memory: Memory, rows: dict[str, bytes]) -> None:
    """Assert that each tensor has these rows from position 0 on, and all else is as it was."""
    assert set(rows) == {tensor["name"] for tensor in memory.header["tensors"]}
    left = [bytearray(memory.read(0)), bytearray(memory.read(1))]
    for tensor in memory.header["tensors"]:
        wanted = rows[tensor["name"]]
        place = slice(tensor["offset"], tensor["offset"] + len(wanted))
        assert left[tensor["region"]][place] == wanted, tensor["name"]
        left[tensor["region"]][place] = bytes([FILL]) * len(wanted)
    assert all(not data.strip(bytes([FILL])) for data in left)


def file_route_rows(
    tmp_path: Path, build: LlamaBuild, model: LlamaModel, *more: str
) -> dict[str, bytes]:
    """Return the rows that the same provider writes on the file route."""
    words = [sys.executable, "-m", "onebitd.prefill_llama", "--out", str(tmp_path / "state")]
    words += ["--tokens", str(write_ids(tmp_path / "file-ids", IDS)), "--model", str(model.path)]
    words += ["--llama-server", str(build.program)]
    done = run([*words, "--llama-args", " ".join((*CPU_ONLY, "-t", "1")), *more])
    assert done.returncode == 0, done.stderr
    return rows_of_file((tmp_path / "state").read_bytes())


def test_provider_on_the_shared_route_writes_the_rows_of_the_state_file(
    llama_build: LlamaBuild, smollm2: LlamaModel, memory: Memory, tmp_path: Path, short_path: Path
) -> None:
    """K and V of every layer are there as on the file route, and there is no file at all."""
    rows = file_route_rows(tmp_path, llama_build, smollm2)
    ids_file = write_ids(tmp_path / "ids", IDS)

    done = provide(command(memory, ids_file, llama_build, smollm2), memory, short_path)

    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(last_line(done.stdout))["prefill_ms"] > 0
    assert_memory_holds(memory, rows)
    assert list(short_path.iterdir()) == []


def test_provider_without_flash_attention_writes_the_same_places(
    some_build: LlamaBuild, smollm2: LlamaModel, memory: Memory, tmp_path: Path, short_path: Path
) -> None:
    """A state with V transposed reaches the memory with a row for each position."""
    ids_file = write_ids(tmp_path / "ids", IDS)
    words = command(memory, ids_file, some_build, smollm2)
    words[-1] += " -fa off"
    done = provide(words, memory, short_path)
    assert (done.returncode, done.stderr) == (0, "")
    on = file_route_rows(tmp_path, some_build, smollm2)
    # Nothing is attended to before the first layer's values: they are the same either way.
    assert memory.read(1, 0, len(on["cache_v_l0"])) == on["cache_v_l0"]
    last = memory.header["tensors"][-1]
    assert memory.read(1, last["offset"], len(IDS) * ROW_SIZE).count(FILL) < 1000


# --- refusals ------------------------------------------------------------------------------------


def test_provider_whose_state_does_not_fit_exits_6_and_writes_nothing(
    some_build: LlamaBuild, smollm2: LlamaModel, tmp_path: Path, short_path: Path
) -> None:
    """A decoder with another cache type is told by tensor and both values, all untouched."""
    ids_file = write_ids(tmp_path / "ids", IDS)
    with exported(tmp_path / "header") as memory:
        words = command(memory, ids_file, some_build, smollm2)
        words[-1] += " -fa on -ctv q8_0"
        done = provide(words, memory, short_path)
        assert done.returncode == 6
        assert "cache_v_l0: type f16 in the header, q8_0 in the state" in last_line(done.stderr)
        assert memory.untouched()
        assert list(short_path.iterdir()) == []


def test_provider_whose_memory_is_too_small_exits_6_before_it_starts_anything(
    some_build: LlamaBuild, smollm2: LlamaModel, tmp_path: Path, short_path: Path
) -> None:
    """What the header and the descriptors tell is refused without a prefill."""
    ids_file = write_ids(tmp_path / "ids", IDS)
    with exported(tmp_path / "header", n_cells=len(IDS) - 1) as memory:
        words = command(memory, ids_file, some_build, smollm2, "--llama-server", "/bin/false")
        done = provide(words, memory, short_path)
        assert done.returncode == 6
        assert f"--layout {memory.header_file}: n_cells: 39 in the header, the prompt has 40" in (
            last_line(done.stderr)
        )
        assert memory.untouched()


@pytest.mark.parametrize(
    ("route", "said"),
    [
        ([], "one of the arguments --out --layout is required"),
        (["--out", "state", "--layout", "header", "--fds", "3"], "not allowed with argument"),
        (["--layout", "header"], "--layout and --fds belong together"),
        (["--out", "state", "--fds", "3"], "--layout and --fds belong together"),
        (["--layout", "header", "--fds", "3,x"], "--fds"),
        (["--layout", "header", "--fds", ""], "--fds"),
        (["--layout", "header", "--fds", "3,3"], "--fds"),
        (["--layout", "header", "--fds", "1"], "--fds"),
        (["--layout", "no-header", "--fds", "3"], "--layout no-header: No such file"),
        (["--layout", "header", "--fds", "999"], "--fds: descriptor 999: Bad file descriptor"),
    ],
)
def test_provider_given_not_exactly_one_route_exits_2(
    route: list[str], said: str, tmp_path: Path
) -> None:
    """A route is --out, or --layout with --fds; what is wrong with it is named in one line."""
    write_ids(tmp_path / "ids", IDS)
    header = {"layout": 1, "n_cells": 64, "regions": [{"size": 24576}], "tensors": []}
    tensor = {"name": "cache_k_l0", "type": "f16", "row_size": 384, "region": 0, "offset": 0}
    header["tensors"] = [tensor]
    (tmp_path / "header").write_text(json.dumps(header))
    words = [sys.executable, "-c", f"import sys; {MAIN}", "--tokens", "ids", "--model", "ids"]
    done = subprocess.run(
        [*words, "--llama-server", "/bin/false", *route],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert said in last_line(done.stderr)
    assert {path.name for path in tmp_path.iterdir()} == {"ids", "header"}


# --- being stopped and killed --------------------------------------------------------------------


def socket_without_a_name(pid: int) -> Path | None:
    """Return a way to the socket of a provider's llama-server, once it has lost its name."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(entry).endswith("/s.sock (deleted)"):
                return entry
    return None


def slot_is_busy(pid: int) -> bool:
    """Ask the provider's private llama-server whether the prefill has begun."""
    path = socket_without_a_name(pid)
    if path is None:
        return False
    connection = UnixConnection(path, 30)
    try:
        connection.request("GET", "/slots")
        response = connection.getresponse()
        body = response.read()
    except OSError:
        return False
    finally:
        connection.close()
    return response.status == 200 and bool(json.loads(body)[0]["is_processing"])


@contextlib.contextmanager
def provider_at_work(
    build: LlamaBuild, model: LlamaModel, memory: Memory, ids_file: Path, runtime_dir: Path
) -> Iterator[subprocess.Popen[str]]:
    """Yield a provider, leader of its own group, in the middle of a long prefill."""
    words = command(memory, ids_file, build, model)
    words[-1] += " -b 64 -ub 64"  # /slots waits for a batch
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env=os.environ | {"XDG_RUNTIME_DIR": str(runtime_dir), "TMPDIR": str(runtime_dir)},
        pass_fds=memory.fds,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(lambda: slot_is_busy(process.pid), "the prefill did not begin")
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def open_files(pid: int) -> str:
    """Return what a process has open, one a line."""
    lines = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            lines.append(os.readlink(entry))
    return "\n".join(lines)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_provider_ended_during_the_prefill_leaves_no_process_no_file_and_no_byte(
    signum: signal.Signals,
    llama_build: LlamaBuild,
    smollm2: LlamaModel,
    tmp_path: Path,
    short_path: Path,
) -> None:
    """A stop and a kill leave nothing; its llama-server never had the decoder's memory."""
    ids = [50 + n % 1000 for n in range(LONG_PROMPT_IDS)]
    ids_file = write_ids(tmp_path / "ids", ids)
    with (
        exported(tmp_path / "header", n_cells=len(ids)) as memory,
        provider_at_work(llama_build, smollm2, memory, ids_file, short_path) as process,
    ):
        (server,) = set(processes_about(short_path)) - {process.pid}
        assert "exported" in open_files(process.pid)
        assert "exported" not in open_files(server)
        assert list(short_path.iterdir()) == []
        process.send_signal(signum)
        process.wait(30)
        assert process.returncode == -signum
        wait_until(lambda: processes_about(short_path) == [], "llama-server outlived its provider")
        assert list(short_path.iterdir()) == []
        assert memory.untouched()


def test_provider_stopped_while_it_writes_finishes_and_exits_0(
    some_build: LlamaBuild, smollm2: LlamaModel, memory: Memory, tmp_path: Path, short_path: Path
) -> None:
    """Between the first byte and the last a stop signal is not heard: its work is whole."""
    rows = file_route_rows(tmp_path, some_build, smollm2)
    program = tmp_path / "provider.py"
    program.write_text(
        textwrap.dedent(
            f"""\
            import os, signal, sys
            from onebitd import prefill_share

            write_rows = prefill_share.write_rows

            def stopped_meanwhile(*args):
                write_rows(*args)
                os.kill(os.getpid(), signal.SIGTERM)

            prefill_share.write_rows = stopped_meanwhile
            {MAIN}
            """
        )
    )
    words = command(memory, write_ids(tmp_path / "ids", IDS), some_build, smollm2)
    words[1:3] = [str(program)]
    done = subprocess.run(
        words,
        env=os.environ | {"XDG_RUNTIME_DIR": str(short_path), "PYTHONPATH": str(ROOT)},
        pass_fds=memory.fds,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert_memory_holds(memory, rows)
    assert list(short_path.iterdir()) == []
