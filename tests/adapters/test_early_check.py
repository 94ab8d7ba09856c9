"""onebitd.adapters.early_check on a real file system, with a second process as the provider."""

# ruff: noqa: ASYNC110, ASYNC220, ASYNC240 - real files, microseconds each

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from onebitd.adapters import state_reader
from onebitd.adapters.directory_watch import DirectoryWatch
from onebitd.adapters.early_check import EarlyCheck
from onebitd.adapters.slot_files import RunFiles, SlotFiles
from onebitd.core import state_check, state_file
from onebitd.core.errors import HandoffError
from onebitd.core.handoff import Reason
from tests.core.state_files import Kv, build

TOKENS = [5, 6, 7, 8]
GOOD = build(TOKENS, [Kv()])
WRONG = build([5, 6, 7, 9], [Kv()])
LAYOUT = state_file.learn_layout(build([1, 2, 3], [Kv()]), [1, 2, 3])
WANTED = (LAYOUT, TOKENS, None)
REWRITER = """
import sys
sys.stdin.readline()
with open(sys.argv[1], "r+b") as file:
    file.write(open(sys.argv[2], "rb").read())
"""


def descriptors() -> int:
    """Count this process's open descriptors."""
    return len(os.listdir("/proc/self/fd"))


def is_leased(path: Path) -> bool:
    """Say whether somebody has a lease on the file, without asking for it (proc_locks(5))."""
    held = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    inodes = [line[5].rpartition(":")[2] for line in held if line[1] == "LEASE"]
    return str(path.stat().st_ino) in inodes


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[SlotFiles]:
    """Make a directory, and see that no descriptor was left open."""
    before = descriptors()
    yield SlotFiles(tmp_path / "slots")
    assert descriptors() == before


@pytest.fixture
def run(slots: SlotFiles) -> RunFiles:
    return slots.new_run(TOKENS)


@pytest.fixture
def watch(slots: SlotFiles) -> Iterator[DirectoryWatch]:
    made = DirectoryWatch()
    yield made
    made.close()


@pytest.fixture
def early(run: RunFiles, watch: DirectoryWatch) -> EarlyCheck:
    return run.early_check(watch, *WANTED)


class Checks:
    """Counts the checks that began, and holds them until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.begun, self.go = threading.Event(), threading.Event()
        self.go.set()
        self.ended = threading.Event()
        real = state_check.plan

        def plan(*args: object, **more: object) -> object:
            self.count += 1
            self.begun.set()
            self.go.wait(20)
            try:
                return real(*args, **more)  # type: ignore[arg-type]
            finally:
                self.ended.set()

        monkeypatch.setattr(state_check, "plan", plan)
        monkeypatch.setattr(state_reader, "_AT_ONCE_BYTES", -1)

    async def wait_begun(self) -> None:
        with trio.fail_after(20):
            assert await trio.to_thread.run_sync(self.begun.wait, 20)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Checks:
    return Checks(monkeypatch)


def place(run: RunFiles, data: bytes = GOOD) -> Path:
    """Do what a provider does: write the file under another name and rename it."""
    path = Path(run.state_path)
    other = path.with_name("unfinished")
    other.write_bytes(data)
    other.rename(path)
    return path


async def taken(run: RunFiles, early: EarlyCheck) -> tuple[str, int]:
    with trio.fail_after(20):
        return await run.take_state(*WANTED, early=early)


async def refusal(run: RunFiles, early: EarlyCheck) -> HandoffError:
    """Take the state, which must be refused; return the error."""
    with pytest.raises(HandoffError) as caught:
        await taken(run, early)
    return caught.value


async def test_early_check_of_a_good_file_is_the_only_one(
    run: RunFiles, slots: SlotFiles, early: EarlyCheck, checks: Checks
) -> None:
    """It begins before the provider has ended, and the file is not read again."""
    async with early.running():
        path = place(run)
        await checks.wait_begun()
        assert is_leased(path)
        name, size = await taken(run, early)
    assert (checks.count, size) == (1, len(GOOD))
    assert (slots.path / name).read_bytes() == GOOD
    assert not is_leased(slots.path / name)


async def test_take_state_waits_for_an_early_check_that_is_on(
    run: RunFiles, early: EarlyCheck, checks: Checks
) -> None:
    """A provider that ends at once leaves the rest of the check to be waited for."""
    checks.go.clear()
    async with early.running():
        place(run)
        await checks.wait_begun()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(taken, run, early)
            await trio.testing.wait_all_tasks_blocked()
            assert Path(run.state_path).exists()
            checks.go.set()
    assert checks.count == 1
    assert not Path(run.state_path).exists()


@pytest.mark.parametrize("is_late", [False, True], ids=["early", "late"])
async def test_check_of_a_small_file_takes_no_thread(
    is_late: bool,
    run: RunFiles,
    early: EarlyCheck,
    checks: Checks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is over before a thread would have begun."""
    monkeypatch.setattr(state_reader, "_AT_ONCE_BYTES", len(GOOD))
    monkeypatch.setattr(trio.to_thread, "run_sync", None)
    async with early.running():
        path = place(run)
        if not is_late:
            await trio.testing.wait_all_tasks_blocked()
            assert checks.ended.is_set()
            assert is_leased(path)
        await taken(run, early)
    assert checks.count == 1


async def test_early_check_that_comes_too_late_does_not_begin(
    run: RunFiles, early: EarlyCheck, checks: Checks
) -> None:
    """The provider was faster than the watch: one check, after its end."""
    async with early.running():
        place(run)
        await taken(run, early)
        await trio.testing.wait_all_tasks_blocked()
    assert checks.count == 1


async def test_early_check_of_a_refused_file_leaves_the_sentence_to_the_final_check(
    run: RunFiles, early: EarlyCheck, checks: Checks
) -> None:
    """Two checks, one answer, as without the first."""
    async with early.running():
        place(run, WRONG)
        await checks.wait_begun()
        error = await refusal(run, early)
    assert error.reason is Reason.BAD_STATE
    assert "token" in error.detail
    assert checks.count == 2


@pytest.mark.parametrize(
    ("first", "then"), [(GOOD, WRONG), (WRONG, GOOD)], ids=["spoilt", "mended"]
)
async def test_provider_that_writes_to_its_file_again_is_let_in_and_the_final_file_counts(
    first: bytes, then: bytes, run: RunFiles, early: EarlyCheck, checks: Checks
) -> None:
    """The kernel would hold it up for 45 s (lease-break-time); what it wrote is checked."""
    second = Path(run.state_path).with_name("second")
    second.write_bytes(then)
    command = [sys.executable, "-c", REWRITER, run.state_path, str(second)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as rewriter:
        async with early.running():
            path = place(run, first)
            await checks.wait_begun()
            assert is_leased(path)
            assert rewriter.stdin is not None
            rewriter.stdin.close()
            with trio.fail_after(20):
                await trio.to_thread.run_sync(rewriter.wait, abandon_on_cancel=True)
            if then is GOOD:
                await taken(run, early)
            else:
                assert "token" in (await refusal(run, early)).detail
    assert checks.count == 2


async def test_writer_that_does_not_wait_is_no_obstacle(
    run: RunFiles, early: EarlyCheck, checks: Checks
) -> None:
    """It asked for the file just before the provider ended, and went away: another check."""
    async with early.running():
        path = place(run)
        await checks.wait_begun()
        with pytest.raises(BlockingIOError):
            os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        await taken(run, early)
    assert checks.count == 2


async def test_file_that_replaces_the_checked_one_is_checked_itself(
    run: RunFiles, early: EarlyCheck, checks: Checks
) -> None:
    """The early check vouches for a file, not for a name."""
    async with early.running():
        place(run)
        await checks.wait_begun()
        place(run, WRONG)
        assert "token" in (await refusal(run, early)).detail
    assert checks.count == 2


def place_with_a_second_name(run: RunFiles) -> Callable[[], object]:
    other = Path(run.state_path).with_name("other")
    other.write_bytes(GOOD)
    other.with_name("second").hardlink_to(other)
    other.rename(run.state_path)
    return other.with_name("second").unlink


def place_a_link(run: RunFiles) -> Callable[[], object]:
    real = Path(run.state_path).with_name("real")
    real.write_bytes(GOOD)
    link = real.with_name("link")
    link.symlink_to(real)
    link.rename(run.state_path)
    return lambda: real.rename(run.state_path)


def place_while_open(run: RunFiles) -> Callable[[], object]:
    other = Path(run.state_path).with_name("other")
    writer = other.open("wb")
    writer.write(GOOD)
    other.rename(run.state_path)
    return writer.close


@pytest.mark.parametrize("leave", [place_with_a_second_name, place_a_link, place_while_open])
async def test_file_that_somebody_could_still_change_is_not_checked_early(
    leave: Callable[[RunFiles], Callable[[], object]],
    run: RunFiles,
    early: EarlyCheck,
    checks: Checks,
) -> None:
    """No lease, no early check; the final file is looked at as ever."""
    async with early.running():
        mend = leave(run)
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert checks.count == 0
        mend()
        await taken(run, early)
    assert checks.count == 1


async def test_without_inotify_the_check_comes_after_the_provider(
    run: RunFiles, early: EarlyCheck, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's instances may be used up."""
    monkeypatch.setattr(DirectoryWatch, "add", lambda *_args: None)
    async with early.running():
        place(run)
        await trio.testing.wait_all_tasks_blocked(0.02)
        await taken(run, early)
    assert checks.count == 1


async def test_block_that_fails_ends_the_check_and_keeps_its_error(
    run: RunFiles, early: EarlyCheck, checks: Checks
) -> None:
    """A provider that fails after all: its reason comes out as it is, and no lease stays."""
    failed = HandoffError(Reason.PROVIDER_EXIT, "status 3")
    checks.go.clear()
    path = Path(run.state_path)

    async def failing_run() -> None:
        async with early.running():
            place(run)
            await checks.wait_begun()
            raise failed

    with pytest.raises(HandoffError) as caught:
        await failing_run()
    assert caught.value is failed
    assert not is_leased(path)
    await end_of_thread(checks, path)


async def test_block_that_is_cancelled_leaves_nothing(
    run: RunFiles, early: EarlyCheck, checks: Checks
) -> None:
    """The client left: the caller is free at once, the thread closes its copy when it is done."""
    checks.go.clear()
    with trio.CancelScope() as scope:
        async with early.running():
            path = place(run)
            await checks.wait_begun()
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert not checks.ended.is_set()
    assert not is_leased(path)
    await end_of_thread(checks, path)


async def end_of_thread(checks: Checks, path: Path) -> None:
    """Let the check's thread go, and wait until it has closed its file."""
    checks.go.set()
    with trio.fail_after(20):
        while str(path) in map(target_of, os.listdir("/proc/self/fd")):
            await trio.sleep(0.005)


def target_of(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
