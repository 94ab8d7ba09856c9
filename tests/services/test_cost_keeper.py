"""The file of learned costs: read at start, written soon after each touch, in nobody's way."""

# ruff: noqa: ASYNC110, ASYNC221, ASYNC240 - real files, milliseconds each

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import structlog.testing
import trio
import trio.testing

from onebitd.core.costs import Costs
from onebitd.core.handoff import Route
from onebitd.services.cost_keeper import CostKeeper
from onebitd.services.late_writes import RETRY_S

SUBJECT = {"model": "/m.gguf 123", "decoder": "b10434", "provider": "/usr/bin/npu"}
NOW = 1.8e9


@contextlib.asynccontextmanager
async def running(keeper: CostKeeper) -> AsyncIterator[None]:
    """Run the keeper until the end of the block."""
    async with trio.open_nursery() as nursery:
        await nursery.start(keeper.run)
        yield
        nursery.cancel_scope.cancel()


async def wait_until(fact: Callable[[], bool]) -> None:
    """Look every hundredth second, for ten seconds at most."""
    with trio.fail_after(10):
        while not fact():
            await trio.sleep(0.01)


def learn(keeper: CostKeeper, tokens: int = 500) -> None:
    """Learn one run and one reply, and say so."""
    keeper.costs.note_provider(Route.FILE, tokens, 900.0, overlapped=False, cold=False, now=NOW)
    keeper.costs.note_decoder(0, tokens, 90.0, overlapped=False, now=NOW)
    keeper.touch()


async def kept(path: Path, subject: dict[str, str] | None = None) -> None:
    """Leave a file of an earlier daemon."""
    keeper = CostKeeper(path, SUBJECT if subject is None else subject)
    learn(keeper)
    async with running(keeper):
        pass


def lines(logs: list[structlog.typing.EventDict]) -> list[tuple[str, str]]:
    """Return level and event of each line."""
    return [(entry["log_level"], entry["event"]) for entry in logs]


async def test_keeper_end_writes_what_was_learned_for_the_next_start(tmp_path: Path) -> None:
    """The last write is made at the end; the next daemon knows everything, and nobody else."""
    path = tmp_path / "state" / "costs.json"
    keeper = CostKeeper(path, SUBJECT)
    async with running(keeper):
        learn(keeper)
    again = CostKeeper(path, SUBJECT)
    assert again.costs.to_json() == keeper.costs.to_json()
    assert again.costs.provider_samples(Route.FILE) == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == ["costs.json"]


async def test_keeper_touched_writes_within_a_second_and_not_for_each_touch(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    """Touches that follow each other share a write; a new one after it has its own."""
    mock_clock.autojump_threshold = 0.05
    path = tmp_path / "costs.json"
    keeper = CostKeeper(path, SUBJECT)
    async with running(keeper):
        for count in (3, 6):
            for _ in range(3):
                learn(keeper)
            await trio.sleep(1)
            document = json.loads(path.read_text())
            assert len(document["costs"]["provider"]["file"]) == count
        before = path.stat().st_ino
        await trio.sleep(60)
        assert path.stat().st_ino == before


CHILD = """
import sys, pathlib, trio
from onebitd.core.handoff import Route
from onebitd.services.cost_keeper import CostKeeper

async def main():
    keeper = CostKeeper(pathlib.Path(sys.argv[1]), {"model": "m"})
    async with trio.open_nursery() as nursery:
        await nursery.start(keeper.run)
        for tokens in range(1, 1 << 30):
            keeper.costs.note_decoder(0, tokens, 1.0, overlapped=False, now=1.8e9)
            keeper.touch()
            print(tokens, flush=True)
            await trio.sleep(0.002)

trio.run(main)
"""


@pytest.mark.parametrize("more", [0, 150])
def test_keeper_killed_leaves_a_whole_file_with_what_was_touched_before(
    tmp_path: Path, more: int
) -> None:
    """SIGKILL amid learning: the file is one of the last writes, and the next daemon reads it."""
    path = tmp_path / "costs.json"
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        try:
            # What the file has by the time of the kill was touched before it, and must stay.
            while not path.exists():
                assert child.stdout.readline()
            for _ in range(more):
                assert child.stdout.readline()
            written = json.loads(path.read_text())["costs"]["decoder"][-1][0]
        finally:
            child.send_signal(signal.SIGKILL)
        child.stdout.read()
    assert child.returncode == -signal.SIGKILL
    with structlog.testing.capture_logs() as logs:
        keeper = CostKeeper(path, {"model": "m"})
    assert not logs
    assert keeper.costs.to_json()["decoder"][-1][0] >= written > 0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"subject": {}, "costs": {}}',
        b'{"subject": [], "costs": {"version": 1}}',
        b'{"subject": {"model": 5}, "costs": null}',
        b'{"subject": {}, "costs": NaN}',
        b"[" * 100_000,
        b"9" * 10_000,
        b" " * (1 << 20) + b"{}",
    ],
    ids=lambda content: repr(content[:40]),
)
async def test_keeper_damaged_file_is_set_aside_with_one_warning(
    tmp_path: Path, content: bytes
) -> None:
    """It learns anew, and whoever wants to know finds the file as it was."""
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    with structlog.testing.capture_logs() as logs:
        keeper = CostKeeper(path, SUBJECT)
        async with running(keeper):
            learn(keeper)
    assert lines(logs) == [("warning", "costs_damaged")]
    assert "costs.json.damaged" in logs[0]["line"]
    assert (tmp_path / "costs.json.damaged").read_bytes() == content
    assert stat.S_IMODE((tmp_path / "costs.json.damaged").stat().st_mode) == 0o600
    assert CostKeeper(path, SUBJECT).costs.decoder_samples() == 1


async def test_keeper_file_cut_short_anywhere_is_damaged_or_whole(tmp_path: Path) -> None:
    """No prefix of a good file is read as something else."""
    path = tmp_path / "costs.json"
    await kept(path)
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with structlog.testing.capture_logs() as logs:
            keeper = CostKeeper(path, SUBJECT)
        assert lines(logs) == [("warning", "costs_damaged")]
        assert keeper.costs.to_json() == Costs().to_json()


@pytest.mark.parametrize(
    ("change", "runs", "replies"),
    [
        ({}, 1, 1),
        ({"provider": "/usr/bin/other"}, 0, 1),
        ({"decoder": "b11549"}, 0, 0),
        ({"model": "/m.gguf 124"}, 0, 0),
        ({"model": "/n.gguf", "provider": "/usr/bin/other"}, 0, 0),
    ],
    ids=["same", "provider", "decoder", "model", "two"],
)
@pytest.mark.parametrize("when", ["at start", "later"])
async def test_keeper_other_subject_forgets_what_is_about_another(
    tmp_path: Path, change: dict[str, str], runs: int, replies: int, when: str
) -> None:
    """Another provider: its runs; another model or decoder: everything; one line of level info."""
    path = tmp_path / "costs.json"
    await kept(path)
    with structlog.testing.capture_logs() as logs:
        if when == "at start":
            keeper = CostKeeper(path, SUBJECT | change)
        else:
            keeper = CostKeeper(path, {})  # not known yet
            assert keeper.costs.provider_samples(Route.FILE) == 1
            keeper.set_subject(SUBJECT | change)
        keeper.set_subject(SUBJECT | change)
        async with running(keeper):
            pass
    assert lines(logs) == ([("info", "costs_forgotten")] if change else [])
    for found in (keeper, CostKeeper(path, SUBJECT | change)):
        assert found.costs.provider_samples(Route.FILE) == runs
        assert found.costs.decoder_samples() == replies


async def test_keeper_that_cannot_write_warns_once_until_it_can(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    """Something in the way costs one warning, whatever is learned; then all of it is written."""
    mock_clock.autojump_threshold = 0.05
    path = tmp_path / "costs.json"
    keeper = CostKeeper(path, SUBJECT)
    path.mkdir()
    (path / "in the way").touch()
    with structlog.testing.capture_logs() as logs:
        async with running(keeper):
            for tokens in (100, 200, 300):
                learn(keeper, tokens)
                await trio.sleep(60)
            assert lines(logs) == [("warning", "costs_not_written")]
            assert str(path) in logs[0]["line"]
            (path / "in the way").unlink()
            path.rmdir()
            await trio.sleep(RETRY_S + 2)
            assert lines(logs)[1:] == [("info", "costs_written_again")]
            assert path.is_file()
            path.unlink()
            path.mkdir()
            learn(keeper)
            await trio.sleep(60)
            assert lines(logs)[2:] == [("warning", "costs_not_written")]
    assert lines(logs)[3:] == []
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["costs.json"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
async def test_keeper_full_disk_keeps_the_old_file_and_recovers(tmp_path: Path) -> None:
    """A write that finds no room leaves what was there; when there is room again it is made."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("this container may not mount")
    try:
        path = tmp_path / "costs.json"
        await kept(path)
        before = path.read_bytes()
        filler = tmp_path / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        keeper = CostKeeper(path, SUBJECT)
        with structlog.testing.capture_logs() as logs:
            async with running(keeper):
                learn(keeper)
                await wait_until(lambda: bool(logs))
            assert lines(logs) == [("warning", "costs_not_written")]
            assert path.read_bytes() == before
            filler.unlink()
            async with running(keeper):
                await wait_until(lambda: len(logs) > 1)
        assert lines(logs)[1:] == [("info", "costs_written_again")]
        assert CostKeeper(path, SUBJECT).costs.provider_samples(Route.FILE) == 2
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize("kind", ["directory", "fifo", "link"])
async def test_keeper_path_that_is_no_file_is_left_alone_with_a_warning(
    tmp_path: Path, kind: str
) -> None:
    """Nothing is read through a link or a pipe, and the start does not wait for one."""
    path = tmp_path / "costs.json"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        await kept(tmp_path / "elsewhere.json")
        path.symlink_to(tmp_path / "elsewhere.json")
    with structlog.testing.capture_logs() as logs:
        keeper = CostKeeper(path, SUBJECT)
    assert lines(logs) == [("warning", "costs_not_read")]
    assert keeper.costs.to_json() == Costs().to_json()


async def test_keeper_leftover_of_a_killed_writer_is_replaced(tmp_path: Path) -> None:
    """Half a new file, or a link in its place, is not written through."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "costs.json.new").symlink_to(precious)
    await kept(tmp_path / "costs.json")
    assert precious.read_text() == "mine"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["costs.json", "precious"]
