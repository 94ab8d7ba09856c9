"""onebitd.adapters.slot_files on a real file system, with files that providers could leave."""

# ruff: noqa: ASYNC110, ASYNC220, ASYNC240 - real files, microseconds each

from __future__ import annotations

import os
import resource
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from onebitd.adapters import state_reader
from onebitd.adapters.slot_files import RunFiles, SlotFiles
from onebitd.core import state_check, state_cursor, state_file
from onebitd.core.errors import ConfigError, HandoffError
from onebitd.core.handoff import Reason
from tests.core.state_files import Kv, build

TOKENS = [5, 6, 7, 8]
GOOD = build(TOKENS, [Kv()])
LAYOUT = state_file.learn_layout(build([1, 2, 3], [Kv()]), [1, 2, 3])


def mode_of(path: Path) -> int:
    """Return the permission bits."""
    return stat.S_IMODE(path.stat().st_mode)


def descriptors() -> int:
    """Count this process's open descriptors."""
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[SlotFiles]:
    """Make a directory, and see that no descriptor was left open."""
    before = descriptors()
    yield SlotFiles(tmp_path / "slots")
    assert descriptors() == before


@pytest.fixture
def run(slots: SlotFiles) -> RunFiles:
    return slots.new_run(TOKENS)


def names(slots: SlotFiles) -> list[str]:
    """Return what is in the directory."""
    return sorted(os.listdir(slots.path))


async def refusal(run: RunFiles) -> HandoffError:
    """Take the state, which must be refused; return the error."""
    with pytest.raises(HandoffError) as caught:
        await run.take_state(LAYOUT, TOKENS, None)
    return caught.value


def test_slot_files_directory_is_private_whatever_it_was(tmp_path: Path) -> None:
    """It is made with its parents, or made private."""
    made = SlotFiles(tmp_path / "a" / "slots")
    assert mode_of(made.path) == 0o700
    made.path.chmod(0o777)
    SlotFiles(made.path)
    assert mode_of(made.path) == 0o700


@pytest.mark.parametrize("kind", ["file", "symlink", "below_a_file"])
def test_slot_files_path_that_is_no_directory_of_ours_is_a_configuration_error(
    tmp_path: Path, kind: str
) -> None:
    """Nothing is followed or replaced; the message names the path."""
    path = tmp_path / "slots"
    if kind == "file":
        path.touch()
    elif kind == "symlink":
        path.symlink_to(tmp_path)
    else:
        path.touch()
        path = path / "below"
    with pytest.raises(ConfigError, match=str(path)):
        SlotFiles(path)


def test_slot_files_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    """Somebody who owns it could put any state there."""
    if os.geteuid() != 0:
        pytest.skip("needs root to give a directory away")
    os.chown(tmp_path, 12345, 12345)
    os.seteuid(12346)
    try:
        with pytest.raises(ConfigError, match=r"cannot hold state files|not a directory of user"):
            SlotFiles(tmp_path)
    finally:
        os.seteuid(0)


def test_sweep_removes_what_is_ours_and_nothing_else(slots: SlotFiles) -> None:
    """Runs and state files go; a stranger's file stays; no link is followed."""
    outside = slots.path.parent / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    run = slots.new_run([1])
    Path(run.state_path).write_bytes(b"x")
    (slots.path / slots.new_name()).touch()
    (slots.path / "run-link").symlink_to(outside)
    (slots.path / "saved-by-hand").touch()
    assert slots.sweep() == 3
    assert names(slots) == ["saved-by-hand"]
    assert (outside / "precious").exists()
    assert slots.sweep() == 0


def test_new_run_makes_a_private_directory_with_the_ids(slots: SlotFiles) -> None:
    """One decimal number a line; only we may read it; two runs do not share anything."""
    run, other = slots.new_run([3, 14, 159]), slots.new_run([])
    ids = Path(run.tokens_path)
    assert ids.read_bytes() == b"3\n14\n159\n"
    assert (mode_of(ids), mode_of(ids.parent)) == (0o600, 0o700)
    assert Path(run.state_path).parent == ids.parent
    assert Path(other.tokens_path).parent != ids.parent
    run.remove()
    run.remove()
    assert names(slots) == [Path(other.tokens_path).parent.name]


def test_new_run_without_room_for_the_ids_says_so_and_leaves_nothing(slots: SlotFiles) -> None:
    """The write fails half-way: no_space, and the directory is gone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(HandoffError, match="cannot write the ids file") as caught:
            slots.new_run(range(1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.reason is Reason.NO_SPACE
    assert names(slots) == []


def test_new_run_directory_that_vanished_is_a_failed_handoff(slots: SlotFiles) -> None:
    """Whoever removed it does not break the request."""
    slots.path.rmdir()
    with pytest.raises(HandoffError) as caught:
        slots.new_run([1])
    assert caught.value.reason is Reason.NO_SPACE


def test_check_space_more_than_there_is_names_the_setting(slots: SlotFiles) -> None:
    """What fits passes; what does not is no_space, with the directory and the numbers."""
    slots.check_space(1024)
    with pytest.raises(HandoffError, match=rf"{slots.path} has \d+ MiB free, the state needs"):
        slots.check_space(1 << 60)


def test_slot_files_read_only_file_system_fails_the_handoff_only(tmp_path: Path) -> None:
    """A directory remounted read-only: no_space for a run, silence for a remove."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    slots = SlotFiles(tmp_path / "slots")
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(slots.path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("cannot mount here")
    try:
        with pytest.raises(HandoffError, match="has 0 MiB free"):
            slots.check_space(0)
        name = slots.new_name()
        (slots.path / name).touch()
        subprocess.run(["mount", "-o", "remount,ro", str(slots.path)], check=True)
        with pytest.raises(HandoffError, match="Read-only file system") as caught:
            slots.new_run([1])
        assert caught.value.reason is Reason.NO_SPACE
        slots.remove(name)
    finally:
        subprocess.run(["umount", str(slots.path)], check=True)


async def test_take_state_good_file_is_moved_into_place_private(
    slots: SlotFiles, run: RunFiles
) -> None:
    """It gets the returned name, mode 0600 and its size; the run's directory can go."""
    path = Path(run.state_path)
    path.write_bytes(GOOD)
    path.chmod(0o644)
    name, size = await run.take_state(LAYOUT, TOKENS, None)
    run.remove()
    assert size == len(GOOD)
    assert names(slots) == [name]
    taken = slots.path / name
    assert (taken.read_bytes(), mode_of(taken)) == (GOOD, 0o600)
    slots.remove(name)
    slots.remove(name)
    assert names(slots) == []


async def test_take_state_no_file_is_the_providers_fault(run: RunFiles) -> None:
    """Status 0 and nothing written has a reason of its own."""
    error = await refusal(run)
    assert error.reason is Reason.PROVIDER_NO_FILE
    assert "wrote no state file" in error.detail


def place_symlink(path: Path) -> None:
    """Put a link to a good file elsewhere."""
    elsewhere = path.with_name("elsewhere")
    elsewhere.write_bytes(GOOD)
    path.symlink_to(elsewhere)


def place_hard_link(path: Path) -> None:
    """Give the good file a second name."""
    path.write_bytes(GOOD)
    path.with_name("second").hardlink_to(path)


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (place_symlink, "a symbolic link"),
        (os.mkfifo, "not a regular file with one name"),
        (Path.mkdir, "not a regular file with one name"),
        (place_hard_link, "not a regular file with one name"),
        (Path.touch, ""),
        (lambda path: path.write_bytes(GOOD[:-1]), ""),
        (lambda path: path.write_bytes(GOOD + b"\0"), ""),
        (lambda path: path.write_bytes(build([5, 6, 7, 9], [Kv()])), "token"),
        (lambda path: path.write_bytes(build(TOKENS, [Kv(layers=3)])), ""),
    ],
    ids=["symlink", "fifo", "dir", "hard_link", "empty", "short", "long", "tokens", "layout"],
)
async def test_take_state_anything_else_than_a_good_file_is_refused(
    slots: SlotFiles, run: RunFiles, place: Callable[[Path], object], says: str
) -> None:
    """It stays in the run's directory, nothing waits for a writer, and nothing is left open."""
    place(Path(run.state_path))
    with trio.fail_after(10):
        error = await refusal(run)
    assert error.reason is Reason.BAD_STATE
    assert says in error.detail
    run.remove()
    assert names(slots) == []


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR])
async def test_take_state_file_that_is_still_open_for_writing_is_refused(
    slots: SlotFiles, run: RunFiles, flags: int
) -> None:
    """Checked today, changed tomorrow: a process that got away has it open."""
    path = Path(run.state_path)
    path.write_bytes(GOOD)
    with subprocess.Popen(["sleep", "3600"], stdout=(writer := os.open(path, flags))) as holder:
        os.close(writer)
        error = await refusal(run)
        holder.kill()
    assert error.reason is Reason.BAD_STATE
    assert "open for writing" in error.detail
    await run.take_state(LAYOUT, TOKENS, None)
    assert names(slots) != []


async def test_take_state_file_open_for_reading_elsewhere_is_taken(run: RunFiles) -> None:
    """A reader changes nothing."""
    path = Path(run.state_path)
    path.write_bytes(GOOD)
    with path.open("rb"):  # noqa: ASYNC230 - see above
        assert (await run.take_state(LAYOUT, TOKENS, None))[1] == len(GOOD)


class PausedCheck:
    """Holds the check's thread until it is let go, and knows when it has begun and ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.ended = threading.Event()
        real = state_check.plan

        def plan(source: state_cursor.Source, *args: object, **more: object) -> object:
            self.begun.set()
            self.go.wait(20)
            try:
                return real(source, *args, **more)  # type: ignore[arg-type]
            finally:
                self.ended.set()

        monkeypatch.setattr(state_check, "plan", plan)
        monkeypatch.setattr(state_reader, "_AT_ONCE_BYTES", -1)


async def test_take_state_file_exchanged_during_the_check_is_refused_and_removed(
    slots: SlotFiles, run: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was checked is not what was moved: it does not stay where the decoder would read it."""
    paused = PausedCheck(monkeypatch)
    path = Path(run.state_path)
    path.write_bytes(GOOD)
    errors: list[HandoffError] = []

    async def take() -> None:
        errors.append(await refusal(run))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        await trio.to_thread.run_sync(paused.begun.wait, 20)
        other = path.with_name("other")
        other.write_bytes(GOOD)
        other.rename(path)
        paused.go.set()
    assert errors[0].reason is Reason.BAD_STATE
    assert "changed while it was checked" in errors[0].detail
    run.remove()
    assert names(slots) == []


async def test_take_state_file_removed_during_the_check_is_refused(
    run: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rename has nothing to move: bad_state, not a crash."""
    paused = PausedCheck(monkeypatch)
    path = Path(run.state_path)
    path.write_bytes(GOOD)
    errors: list[HandoffError] = []

    async def take() -> None:
        errors.append(await refusal(run))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        await trio.to_thread.run_sync(paused.begun.wait, 20)
        path.unlink()
        paused.go.set()
    assert "cannot be taken over" in errors[0].detail


async def test_take_state_cancelled_during_the_check_leaves_nothing(
    slots: SlotFiles, run: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller is free at once; the thread closes its file when it is done."""
    paused = PausedCheck(monkeypatch)
    Path(run.state_path).write_bytes(GOOD)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run.take_state, LAYOUT, TOKENS, None)
        await trio.to_thread.run_sync(paused.begun.wait, 20)
        nursery.cancel_scope.cancel()
    assert not paused.ended.is_set()
    run.remove()
    assert names(slots) == []
    paused.go.set()
    with trio.fail_after(20):
        await trio.to_thread.run_sync(paused.ended.wait, 20)
        while any("state.bin" in os.readlink(f"/proc/self/fd/{fd}") for fd in open_files()):
            await trio.sleep(0.005)


def open_files() -> list[str]:
    """Return the numbers of the descriptors that are files with a name."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.lexists(path) and os.readlink(path).startswith("/"):
            found.append(name)
    return found


async def test_take_state_cancelled_before_its_thread_starts_leaves_no_descriptor(
    run: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: the thread never came to close the copy that was made for it."""
    monkeypatch.setattr(state_reader, "_AT_ONCE_BYTES", -1)
    Path(run.state_path).write_bytes(GOOD)
    before = descriptors()
    with trio.CancelScope() as scope:
        scope.cancel()
        await run.take_state(LAYOUT, TOKENS, None)
    assert scope.cancelled_caught
    assert descriptors() == before
