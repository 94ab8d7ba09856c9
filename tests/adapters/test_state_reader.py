"""onebitd.adapters.state_reader: threads that look at one file."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from onebitd.adapters import state_reader
from onebitd.adapters.state_reader import OpenFile
from onebitd.core import state_check, state_data, state_file
from onebitd.core.errors import StateFileError
from tests.core.state_files import Kv, build

TOKENS = list(range(40))
SECTION = Kv(layers=4, width=512)
GOOD = build(TOKENS, [SECTION])
PROBE = [1, 2, 3]
LAYOUT = state_file.learn_layout(build(PROBE, [SECTION]), PROBE)


def opened(tmp_path: Path, data: bytes) -> OpenFile:
    """Return the file with this in it, open."""
    path = tmp_path / "state"
    path.write_bytes(data)
    return OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))


@pytest.fixture(params=[0, 3], ids=["alone", "with_three_helpers"])
def helpers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Have so many helpers look at pieces of 4 KiB, whatever the machine."""
    monkeypatch.setattr(state_reader, "_helpers", lambda _size: request.param)
    monkeypatch.setattr(state_data, "CHUNK_BYTES", 4096)
    return int(request.param)


def test_check_good_file_passes_and_is_closed(tmp_path: Path, helpers: int) -> None:
    """Every piece is judged once; no thread and no descriptor is left."""
    file = opened(tmp_path, GOOD)
    before, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    file.check(LAYOUT, TOKENS, None, None)
    assert threading.active_count() == before
    assert len(os.listdir("/proc/self/fd")) == fds - 1
    assert file.take() is None


def test_check_tells_the_refusal_that_comes_first_in_the_file(tmp_path: Path, helpers: int) -> None:
    """However the threads share the pieces."""
    whole = bytearray(GOOD)
    blocks = state_file.parse(GOOD).sections[0].blocks
    for block in blocks[2:]:
        whole[block.offset + 640 : block.offset + 642] = b"\0\x7c"
    for _ in range(20):
        with pytest.raises(StateFileError, match="layer 2 K: a NaN or an infinity"):
            opened(tmp_path, bytes(whole)).check(LAYOUT, TOKENS, None, None)


def test_check_file_that_shrinks_is_refused(
    tmp_path: Path, helpers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that comes back short is a refusal, in whichever thread."""
    real = state_check.plan

    def plan(*args: object, **more: object) -> object:
        made = real(*args, **more)  # type: ignore[arg-type]
        os.truncate(tmp_path / "state", len(GOOD) - 1)
        return made

    monkeypatch.setattr(state_check, "plan", plan)
    with pytest.raises(StateFileError, match="became shorter"):
        opened(tmp_path, GOOD).check(LAYOUT, TOKENS, None, None)


def test_check_other_header_is_told_by_every_thread_alike(tmp_path: Path, helpers: int) -> None:
    """Who finds it reads the file from the front once more, beside the others."""
    whole = bytearray(GOOD)
    for block in state_file.parse(GOOD).sections[0].blocks[1:]:
        whole[block.offset - 12] = 30
    for _ in range(20):
        with pytest.raises(StateFileError) as caught:
            opened(tmp_path, bytes(whole)).check(LAYOUT, TOKENS, None, None)
        assert str(caught.value) == "layer 1 K: type bf16, the decoder has f16"


def test_check_without_threads_to_be_had_does_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on threads is no reason to fail."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(state_reader, "_helpers", lambda _size: 3)
    monkeypatch.setattr(threading.Thread, "start", start)
    opened(tmp_path, GOOD).check(LAYOUT, TOKENS, None, None)


def test_give_up_before_the_check_closes_the_file(tmp_path: Path) -> None:
    """The thread that comes too late does nothing."""
    fds = len(os.listdir("/proc/self/fd"))
    file = opened(tmp_path, b"nonsense")
    file.give_up()
    file.check(LAYOUT, TOKENS, None, None)
    assert len(os.listdir("/proc/self/fd")) == fds


def test_give_up_during_the_check_ends_it_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of a file that nobody waits for is not read."""
    judged: list[object] = []
    file = opened(tmp_path, GOOD)

    def judge(self: state_check.Plan, piece: object, data: object) -> None:
        judged.append(piece)
        file.give_up()

    monkeypatch.setattr(state_data, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(state_check.Plan, "judge", judge)
    file.check(LAYOUT, TOKENS, None, None)
    assert len(judged) == 1


@pytest.mark.parametrize(("n_bytes", "most"), [(0, 0), (31 << 20, 0), (33 << 20, 1), (1 << 40, 3)])
def test_helpers_are_as_many_as_size_and_processors_allow(
    n_bytes: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file is not worth a thread."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))
    assert state_reader._helpers(n_bytes) == most
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3})
    assert state_reader._helpers(n_bytes) == 0
