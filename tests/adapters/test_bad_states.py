"""onebitd.adapters.bad_states on real file systems."""

# ruff: noqa: ASYNC110 - real files and a thread, which tell no event

from __future__ import annotations

import os
import stat
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs

from onebitd.adapters import bad_states
from onebitd.adapters.bad_states import BadStates
from onebitd.adapters.slot_files import SlotFiles

TOKENS = [5, 6, 7]
SENTENCE = "bad_state: layer 7 K: row size 512, the decoder has 1024"
NO_ROOM = 1 << 62


@pytest.fixture(params=["same file system", "another one"])
def slots(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SlotFiles]:
    """Make a slot directory; from one on another file system nothing can be renamed away."""
    found = SlotFiles(tmp_path / "slots")
    if request.param != "same file system":
        real = Path.rename

        def rename(self: Path, target: Path) -> Path:
            if self.parent == found.path and target.parent != found.path:
                raise OSError(18, "Invalid cross-device link")
            return real(self, target)

        monkeypatch.setattr(Path, "rename", rename)
    yield found
    assert os.listdir(found.path) == []


@pytest.fixture
def kept(slots: SlotFiles, tmp_path: Path) -> BadStates:
    return BadStates(tmp_path / "state" / "bad-states", slots)


def refuse(kept: BadStates, data: bytes, request_id: str, most: int = 2) -> None:
    """Have a refused file of this content taken."""
    path = kept._slots.path / "run-x"
    path.write_bytes(data)
    path.chmod(0o644)
    kept.take(path, TOKENS, SENTENCE, request_id, most)
    assert not path.exists()


@asynccontextmanager
async def running(kept: BadStates) -> AsyncIterator[None]:
    """Run the task that writes."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kept.run)
        yield
        nursery.cancel_scope.cancel()


async def wait_names(kept: BadStates, wanted: list[str]) -> None:
    """Wait until the directory has just these files, their times left out."""
    with trio.fail_after(20):
        while names(kept) != wanted or kept._waiting is not None:
            await trio.sleep(0.002)


async def wait_logged(lines: Sequence[object]) -> None:
    """Wait until something was said."""
    with trio.fail_after(20):
        while not lines:
            await trio.sleep(0.002)


def names(kept: BadStates) -> list[str]:
    """Return the files without their times, sorted by time."""
    if not kept.directory.exists():
        return []
    return [name.partition("-")[2] for name in sorted(os.listdir(kept.directory))]


def of(*request_ids: str) -> list[str]:
    """Return the files that are kept of these requests."""
    return [f"{one}.{suffix}" for one in request_ids for suffix in ("ids", "state", "txt")]


async def test_take_keeps_file_ids_and_reason_for_its_owner_alone(kept: BadStates) -> None:
    """Three private files named after time and request; the log says where."""
    with capture_logs() as lines:
        async with running(kept):
            refuse(kept, b"damaged", "r1")
            await wait_logged(lines)
    assert names(kept) == of("r1")
    found = {path.suffix: path for path in kept.directory.iterdir()}
    assert found[".state"].read_bytes() == b"damaged"
    assert found[".ids"].read_text() == "5\n6\n7\n"
    assert found[".txt"].read_text() == SENTENCE + "\n"
    assert {stat.S_IMODE(path.stat().st_mode) for path in found.values()} == {0o600}
    assert stat.S_IMODE(kept.directory.stat().st_mode) == 0o700
    said = [(line["event"], line["log_level"], line["path"]) for line in lines]
    assert said == [("bad_state_kept", "info", str(found[".state"]))]


async def test_take_keeps_the_last_ones(kept: BadStates) -> None:
    """Older ones go with their ids and reasons, and what an earlier daemon left unfinished."""
    async with running(kept):
        for number in range(4):
            refuse(kept, b"x", f"r{number}")
            await wait_names(kept, of(*(f"r{n}" for n in range(max(0, number - 1), number + 1))))
        (kept.directory / "20000101T000000.000000Z-old.part").touch()
        (kept.directory / "notes").touch()
        refuse(kept, b"x", "r4", most=1)
        await wait_names(kept, [*of("r4"), ""])
    assert (kept.directory / "notes").exists()


async def test_take_nothing_asked_for_keeps_nothing(kept: BadStates) -> None:
    """The default: the file stays where it is, for the run to remove."""
    path = kept._slots.path / "run-x"
    path.touch()
    kept.take(path, TOKENS, SENTENCE, "r1", 0)
    path.unlink()
    kept.take(path, TOKENS, SENTENCE, "no such file", 5)
    assert not kept.directory.exists()


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory", "hard link"])
async def test_take_what_is_no_plain_file_is_left(
    kept: BadStates, kind: str, tmp_path: Path
) -> None:
    """No link is followed, nothing blocks."""
    path, other = kept._slots.path / "run-x", tmp_path / "other"
    other.write_bytes(b"precious")
    if kind == "symlink":
        path.symlink_to(other)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.hardlink_to(other)
    kept.take(path, TOKENS, SENTENCE, "r1", 5)
    assert kept._waiting is None
    path.rmdir() if kind == "directory" else path.unlink()
    assert other.read_bytes() == b"precious"


async def test_take_request_id_of_a_client_stays_a_file_name(kept: BadStates) -> None:
    """A client chooses its request's id; it does not choose a path."""
    async with running(kept):
        refuse(kept, b"x", "../../etc/pass wd\n" + "y" * 200)
        await wait_names(kept, of("______etc_pass_wd_" + "y" * 46))


async def test_take_while_one_is_written_keeps_the_newest(
    kept: BadStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A provider that fails each request does not fill the slot directory."""
    begun, go = threading.Event(), threading.Event()
    real = bad_states._write

    def write(*args: object) -> None:
        begun.set()
        go.wait(20)
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(bad_states, "_write", write)
    async with running(kept):
        refuse(kept, b"x", "r0")
        await trio.to_thread.run_sync(begun.wait, 20)
        for number in range(1, 4):
            refuse(kept, b"x", f"r{number}")
        assert len(os.listdir(kept._slots.path)) == 2
        go.set()
        await wait_names(kept, of("r0", "r3"))


async def test_take_disk_that_is_full_warns_once_and_leaves_nothing(
    kept: BadStates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request fails of it; the next success allows the next warning."""
    monkeypatch.setattr(bad_states, "_write_all", full)
    with capture_logs() as lines:
        async with running(kept):
            for number in range(3):
                refuse(kept, b"x", f"r{number}")
                with trio.fail_after(20):
                    while os.listdir(kept._slots.path):
                        await trio.sleep(0.002)
                await wait_logged(lines)  # the file is gone a moment before the line is there
    assert [line["event"] for line in lines] == ["bad_state_not_kept"]
    assert "cannot hold a refused state file: No space left on device" in lines[0]["line"]
    assert names(kept) == []


def full(descriptor: int, data: bytes) -> None:
    """Stand for a write to a full disk."""
    raise OSError(28, "No space left on device")


async def test_take_file_that_would_fill_the_disk_is_not_copied(
    kept: BadStates, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Some room is left to others; a rename needs none."""
    monkeypatch.setattr(bad_states, "_SPACE_RESERVE_BYTES", NO_ROOM)
    with capture_logs() as lines:
        async with running(kept):
            refuse(kept, b"x", "r1")
            await wait_logged(lines)
    renamed = "same file system" in request.node.name
    assert lines[0]["event"] == ("bad_state_kept" if renamed else "bad_state_not_kept")
    assert names(kept) == (of("r1") if renamed else [])


async def test_take_directory_that_is_a_link_is_not_followed(
    kept: BadStates, tmp_path: Path
) -> None:
    """Prompts do not go where somebody else points."""
    kept.directory.parent.mkdir()
    (tmp_path / "elsewhere").mkdir()
    kept.directory.symlink_to(tmp_path / "elsewhere")
    with capture_logs() as lines:
        async with running(kept):
            refuse(kept, b"x", "r1")
            await wait_logged(lines)
    assert "not a directory of ours" in lines[0]["line"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


async def test_run_cancelled_removes_what_still_waits(kept: BadStates) -> None:
    """A stop does not wait for the disk, and leaves no prompt in the slot directory."""
    async with running(kept):
        refuse(kept, b"x", "r1")  # the task has no turn before it is cancelled
    assert kept._waiting is None
