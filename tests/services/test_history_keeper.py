"""The history on disk: written soon, off the loop, in nobody's way, whatever the disk does."""

# ruff: noqa: ASYNC110, ASYNC240 - real files, milliseconds each

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio

from onebitd.adapters import history_reading as reading
from onebitd.adapters.history_key import load_key
from onebitd.adapters.history_store import (
    HistoryDamaged,
    HistoryFileError,
    HistoryStore,
    read_records,
)
from onebitd.core.config import HistoryConfig
from onebitd.core.control_api import rfc3339
from onebitd.core.handoff import HandoffRecord, Outcome
from onebitd.core.handoff_filter import HandoffFilter
from onebitd.core.wording import Wording
from onebitd.services import history_keeper, late_writes
from onebitd.services.history import History
from onebitd.services.history_keeper import HistoryKeeper

SETTINGS = HistoryConfig(1000, 30.0)
ROOT = str(Path(__file__).parents[2])


def record_of(number: int, outcome: Outcome = Outcome.USED, **more: Any) -> HandoffRecord:
    """Return a finished record of now."""
    now = rfc3339(dt.datetime.now(dt.UTC))
    record = HandoffRecord(f"r{number}", more.pop("time", now), "i", "m", "/", True, **more)
    record.outcome, record.brief = outcome, record.detail
    return record


class Kept:
    """A history of up to four in memory, its keeper and the file."""

    def __init__(self, state: Path, settings: HistoryConfig = SETTINGS, limit: int = 4) -> None:
        self.history = History(limit=limit)
        self.path = state / "history.db"
        self.ahead = dt.timedelta()  # is what the clock says, of what it should
        now = lambda: dt.datetime.now(dt.UTC) + self.ahead  # noqa: E731
        self.keeper = HistoryKeeper(self.history, state, settings, now)

    def add(self, first: int, last: int, **more: Any) -> None:
        """Add records of these numbers, the last one too."""
        for number in range(first, last + 1):
            self.history.add(record_of(number, **more))

    def in_file(self) -> list[int]:
        """Return the numbers of what is in the file; [] when it cannot be read just now."""
        path = str(self.path)
        with contextlib.suppress(HistoryFileError), reading.opened(path) as connection:
            found = reading.pages(connection, path, HandoffFilter(), 0)
            return [int(fields["request_id"][1:]) for _, fields in found]
        return []

    async def read(self, **wanted: Any) -> list[int]:
        """Return the numbers of what a client finds."""
        await self.history.wait_loaded()
        past = self.history.reading(HandoffFilter(**wanted))
        await past.open()
        found = []
        while page := await past.page():
            found += [int(json.loads(line)["request_id"][1:]) for line in page]
        return found

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the keeper until the end of the block."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.keeper.run)
            yield
            nursery.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_writes, "WRITE_DELAY_S", 0.01)
    monkeypatch.setattr(history_keeper, "RETRY_S", 0.02)


async def wait_until(fact: Callable[[], bool]) -> None:
    """Look every hundredth second, for ten seconds at most."""
    with trio.fail_after(10):
        while not fact():
            await trio.sleep(0.01)


def lines(logs: list[structlog.typing.EventDict]) -> list[tuple[str, str]]:
    """Return level and event of each line."""
    return [(entry["log_level"], entry["event"]) for entry in logs]


async def test_keeper_writes_soon_and_the_rest_at_the_end(tmp_path: Path) -> None:
    """What is there within moments does not need a good end; what comes last is not lost."""
    kept = Kept(tmp_path / "state")
    async with kept.running():
        kept.add(1, 6)
        await wait_until(lambda: kept.in_file() == [1, 2, 3, 4, 5, 6])
        kept.add(7, 8)
    assert sorted(file.name for file in kept.path.parent.iterdir()) == ["history.db", "history.key"]
    assert kept.in_file() == list(range(1, 9))
    assert {stat.S_IMODE(file.stat().st_mode) for file in kept.path.parent.iterdir()} == {0o600}


async def test_keeper_writes_no_words_of_others_and_memory_has_them(tmp_path: Path) -> None:
    """What comes from the file, older or of an earlier daemon, has onebitd's own words alone."""

    async def details(history: History) -> list[str]:
        past = history.reading(HandoffFilter())
        await past.open()
        found = []
        while page := await past.page():
            found += [json.loads(line)["detail"] for line in page]
        return found

    own, full = "status 3; its words are in the log", "status 3: my secret"
    kept = Kept(tmp_path, limit=2)
    async with kept.running():
        for number in range(3):
            record = record_of(number, Outcome.FALLBACK)
            record.set_detail(Wording.of("status 3", "my secret"))
            kept.history.add(record)
        await wait_until(lambda: len(kept.in_file()) == 3)
        assert await details(kept.history) == [own, full, full]
    later = Kept(tmp_path, limit=2)
    async with later.running():
        await later.history.wait_loaded()
        assert await details(later.history) == [own, own, own]


async def test_keeper_next_daemon_shows_the_last_ones_and_counts_from_zero(tmp_path: Path) -> None:
    """Memory begins with the file's end, everything older is read from the file."""
    before = Kept(tmp_path)
    async with before.running():
        before.add(1, 9)
    kept = Kept(tmp_path)
    async with kept.running():
        kept.add(10, 11)
        assert await kept.read() == list(range(1, 12))
        assert await kept.read(limit=3) == [9, 10, 11]
        assert await kept.read(limit=7) == list(range(5, 12))
        assert kept.history.counts().used == 2
        assert (await kept.history.summary(HandoffFilter()))["count"] == 11
        assert (await kept.history.summary(HandoffFilter(limit=8)))["count"] == 8
    assert kept.in_file() == list(range(1, 12))


async def test_keeper_many_at_once_are_written_in_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A burst larger than a batch is written whole, in its order."""
    monkeypatch.setattr(history_keeper, "BATCH_RECORDS", 10)
    kept = Kept(tmp_path)
    async with kept.running():
        kept.add(1, 35)
        await wait_until(lambda: kept.in_file() == list(range(1, 36)))


async def test_keeper_bounded_by_count_and_age_and_by_a_reload(tmp_path: Path) -> None:
    """Old ones go, by number and by time; a smaller setting works at once, 0 removes the file."""
    kept = Kept(tmp_path, HistoryConfig(5, 1.0))
    old = rfc3339(dt.datetime.now(dt.UTC) - dt.timedelta(days=2))
    async with kept.running():
        kept.history.add(record_of(0, time=old))
        kept.add(1, 3)
        await wait_until(lambda: kept.in_file() == [1, 2, 3])
        kept.add(4, 9)
        await wait_until(lambda: kept.in_file() == [5, 6, 7, 8, 9])
        kept.keeper.reconfigure(HistoryConfig(2, 1.0))
        await wait_until(lambda: kept.in_file() == [8, 9])
        with structlog.testing.capture_logs() as logs:
            kept.keeper.reconfigure(HistoryConfig(0, 1.0))
            await wait_until(lambda: not kept.path.exists())
            await wait_until(lambda: bool(logs))
        assert lines(logs) == [("info", "history_removed")]
        kept.add(10, 11)
        assert await kept.read() == [8, 9, 10, 11]
        kept.keeper.reconfigure(HistoryConfig(9, 1.0))
        kept.add(12, 12)
        await wait_until(lambda: kept.in_file() == [12])


async def test_keeper_loads_only_what_is_to_be_kept(tmp_path: Path) -> None:
    """After a long pause, or with a smaller setting, what is to go is not shown once more."""
    before = Kept(tmp_path)
    old = rfc3339(dt.datetime.now(dt.UTC) - dt.timedelta(hours=20))
    async with before.running():
        before.add(1, 2, time=old)
        before.add(3, 6)
    for settings, expected in (
        (HistoryConfig(9, 0.5), [3, 4, 5, 6]),
        (HistoryConfig(2, 9), [5, 6]),
    ):
        kept = Kept(tmp_path, settings, limit=20)
        async with kept.running():
            assert await kept.read() == expected


async def test_keeper_clock_that_jumps_by_years_deletes_nothing(tmp_path: Path) -> None:
    """While it runs, at a start, and when it is put right; in the file and in memory."""
    kept = Kept(tmp_path)
    async with kept.running():
        kept.add(1, 3)
        await wait_until(lambda: kept.in_file() == [1, 2, 3])
        kept.ahead = dt.timedelta(days=40 * 365)
        kept.add(4, 4)
        kept.add(5, 5, time=rfc3339(dt.datetime.now(dt.UTC) + kept.ahead))
        await wait_until(lambda: kept.in_file() == [1, 2, 3, 4, 5])
    for ahead in (kept.ahead, dt.timedelta(days=-20000), dt.timedelta()):
        kept = Kept(tmp_path, limit=9)
        kept.ahead = ahead
        async with kept.running():
            await kept.history.wait_loaded()
            assert [fields["request_id"] for fields in in_memory(kept)] == [
                *("r1", "r2", "r3", "r4", "r5")
            ]
        assert kept.in_file() == [1, 2, 3, 4, 5]


def in_memory(kept: Kept) -> list[dict[str, Any]]:
    """Return the fields of the records that memory has."""
    return [fields for _, fields in kept.history._records]


async def test_keeper_that_begins_to_keep_hashes_as_the_next_one_will(tmp_path: Path) -> None:
    """A reload takes the key of the file; one that ends the keeping takes it away."""
    kept = Kept(tmp_path, HistoryConfig(0, 30.0))
    async with kept.running():
        kept.keeper.reconfigure(HistoryConfig(100, 30.0))
        key = kept.history.hash_key
        kept.keeper.reconfigure(HistoryConfig(200, 30.0))
        assert kept.history.hash_key == key
    after = Kept(tmp_path)
    assert after.history.hash_key == key
    async with after.running():
        after.keeper.reconfigure(HistoryConfig(0, 30.0))
        await wait_until(lambda: not list(tmp_path.iterdir()))
    (tmp_path / "history.key").write_bytes(key)
    Kept(tmp_path, HistoryConfig(0, 30.0))
    assert not list(tmp_path.iterdir())


async def test_keeper_that_keeps_nothing_makes_no_file(tmp_path: Path) -> None:
    """`history.max_records = 0`: not even a key or a directory."""
    kept = Kept(tmp_path / "state", HistoryConfig(0, 30.0))
    async with kept.running():
        kept.add(1, 9)
        assert await kept.read() == [6, 7, 8, 9]
    assert not (tmp_path / "state").exists()


CHILD = """
import pathlib, sys, time, trio
sys.path.insert(0, {root!r})
from tests.services.test_history_keeper import Kept

async def main():
    kept = Kept(pathlib.Path(sys.argv[1]))
    async with kept.running():
        number = 0
        while True:
            number += 1
            kept.add(number, number)
            print(number, time.monotonic(), flush=True)
            await trio.sleep(0.01)

trio.run(main)
"""


def test_keeper_killed_loses_at_most_the_last_second(tmp_path: Path) -> None:
    """SIGKILL, with the real pauses: what was finished a second before it is in the file."""
    argv = [sys.executable, "-c", CHILD.format(root=ROOT), str(tmp_path)]
    said: list[list[str]] = []
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            while len(said) < 150:
                said.append(child.stdout.readline().split())
        finally:
            child.send_signal(signal.SIGKILL)
        said += [line.split() for line in child.stdout]
    end = float(said[-1][1])
    old = [int(number) for number, moment in said if float(moment) < end - 1.0]
    found = [
        int(one["request_id"][1:])
        for one in read_records(str(tmp_path / "history.db"), HandoffFilter())
    ]
    assert old
    assert found == list(range(1, len(found) + 1))
    assert len(found) >= old[-1]


def damage(path: Path) -> None:
    """Overwrite all but the first pages."""
    with path.open("r+b") as file:
        file.seek(4 * 4096)
        file.write(b"\xff" * (path.stat().st_size - file.tell()))


@pytest.mark.parametrize("where", ["start", "load", "read"])
async def test_keeper_damaged_file_is_set_aside_with_one_warning(
    tmp_path: Path, where: str
) -> None:
    """Whoever finds it: a new file is begun, nothing in memory or on its way is lost."""
    before = Kept(tmp_path)
    async with before.running():
        before.add(1, 300, detail="x" * 400)
    assert before.path.stat().st_size > 20 * 4096
    kept = Kept(tmp_path)
    with structlog.testing.capture_logs() as logs:
        if where == "start":
            kept.path.write_bytes(b"x" * 5000)
        elif where == "load":
            damage(kept.path)
        async with kept.running():
            await kept.history.wait_loaded()
            if where == "read":
                damage(kept.path)
                with pytest.raises(HistoryDamaged):
                    await kept.read()
            kept.add(301, 302)
            await wait_until(lambda: kept.in_file()[-2:] == [301, 302])
    damaged = [file.name for file in tmp_path.iterdir() if ".damaged-" in file.name]
    assert len([name for name in damaged if not name.endswith("-wal")]) == 1
    warnings = [entry for entry in logs if entry["event"] == "history_damaged"]
    assert len(warnings) == 1
    assert f"is kept as {tmp_path}/history.db.damaged-" in warnings[0]["line"]
    assert str(kept.path) in warnings[0]["line"]


async def test_keeper_file_of_a_later_version_is_told_and_left_alone(tmp_path: Path) -> None:
    """Serving goes on in memory; the file is what it was."""
    before = Kept(tmp_path)
    async with before.running():
        before.add(1, 3)
    data = before.path.read_bytes()
    before.path.write_bytes(data[:60] + (99).to_bytes(4, "big") + data[64:])
    data = before.path.read_bytes()
    kept = Kept(tmp_path)
    with structlog.testing.capture_logs() as logs:
        async with kept.running():
            kept.add(4, 9)
            assert await kept.read() == [6, 7, 8, 9]
            await wait_until(lambda: bool(logs))
            await trio.sleep(0.1)
    assert lines(logs) == [("warning", "history_not_written"), ("warning", "history_lost")]
    assert "has format 99" in logs[0]["line"]
    assert kept.path.read_bytes() == data


class Disk:
    """A store's disk that fails or hangs when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.why: str | None = None
        self.writes = 0
        self.hanging = threading.Event()
        self.hanging.set()
        real = HistoryStore.write

        def write(store: HistoryStore, *args: Any) -> bool:
            self.writes += 1
            self.hanging.wait(20)
            why = self.why
            if why is not None:
                store.close()
                raise HistoryFileError(why)
            return real(store, *args)

        monkeypatch.setattr(HistoryStore, "write", write)

    def has_written(self, number: int) -> bool:
        """Whether it was tried so often."""
        return self.writes >= number


async def test_keeper_full_disk_is_told_once_per_kind_and_everything_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warned once, tried again, written when there is room; in between memory serves."""
    disk = Disk(monkeypatch)
    kept = Kept(tmp_path)
    with structlog.testing.capture_logs() as logs:
        async with kept.running():
            kept.add(1, 2)
            await wait_until(lambda: kept.in_file() == [1, 2])
            for why in ("no room", "no right", "no room"):
                disk.why, tried = why, disk.writes
                kept.add(3, 4)
                await wait_until(partial(disk.has_written, tried + 3))
            assert kept.in_file() == [1, 2]
            assert await kept.read(limit=4) == [3, 4, 3, 4]
            disk.why = None
            await wait_until(lambda: kept.in_file() == [1, 2, 3, 4, 3, 4, 3, 4])
            await wait_until(lambda: len(logs) == 3)
            disk.why = "no room"
            kept.add(5, 5)
            await wait_until(lambda: len(logs) == 4)
    assert lines(logs) == [
        *[("warning", "history_not_written")] * 2,
        ("info", "history_written_again"),
        ("warning", "history_not_written"),
        ("warning", "history_lost"),
    ]
    assert "no room; until it can" in logs[0]["line"]
    assert "1 handoffs are not in" in logs[4]["line"]


async def test_keeper_what_waits_is_bounded_and_the_lost_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full for days costs no memory: the oldest are lost, and told."""
    monkeypatch.setattr(history_keeper, "MAX_PENDING", 10)
    disk = Disk(monkeypatch)
    disk.why = "no room"
    kept = Kept(tmp_path)
    with structlog.testing.capture_logs() as logs:
        async with kept.running():
            kept.add(1, 25)
            assert len(kept.keeper._pending) == 10
            await wait_until(lambda: disk.writes >= 2)
            disk.why = None
            await wait_until(lambda: kept.in_file() == list(range(16, 26)))
            await wait_until(lambda: len(logs) == 3)
    assert lines(logs) == [
        *[("warning", "history_lost"), ("warning", "history_not_written")],
        ("info", "history_written_again"),
    ]
    assert "15 handoffs are lost by now" in logs[1]["line"]
    assert "15 handoffs of the meantime are lost" in logs[2]["line"]


async def test_keeper_disk_that_hangs_holds_up_neither_the_loop_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Questions are answered from memory, and the daemon ends in bounded time."""
    monkeypatch.setattr(late_writes, "LAST_WRITE_S", 0.05)
    monkeypatch.setattr(history_keeper, "_CLOSE_S", 0.05)
    disk = Disk(monkeypatch)
    kept = Kept(tmp_path)
    with trio.fail_after(15), structlog.testing.capture_logs() as logs:
        async with kept.running():
            await kept.history.wait_loaded()
            disk.hanging.clear()
            kept.add(1, 3)
            await wait_until(lambda: disk.writes >= 1)
            assert await kept.read() == [1, 2, 3]
    assert lines(logs) == [("warning", "history_lost")]
    disk.hanging.set()


async def test_keeper_file_removed_by_somebody_is_made_again(tmp_path: Path) -> None:
    """`rm history.db` while it runs: the next records are in a new file."""
    kept = Kept(tmp_path)
    async with kept.running():
        kept.add(1, 2)
        await wait_until(lambda: kept.in_file() == [1, 2])
        for file in tmp_path.glob("history.db*"):
            file.unlink()
        kept.add(3, 3)
        await wait_until(lambda: kept.in_file() == [3])
        assert await kept.read() == [1, 2, 3]


async def test_keeper_directory_that_cannot_be_is_one_warning(tmp_path: Path) -> None:
    """A file in its place: memory has the handoffs, and nobody waits."""
    (tmp_path / "file").touch()
    kept = Kept(tmp_path / "file" / "state")
    with structlog.testing.capture_logs() as logs:
        async with kept.running():
            kept.add(1, 2)
            assert await kept.read() == [1, 2]
            await wait_until(lambda: bool(logs))
            await trio.sleep(0.1)
    assert lines(logs) == [("warning", "history_not_written"), ("warning", "history_lost")]


def test_load_key_is_kept_and_private(tmp_path: Path) -> None:
    """The same key with each start, so that hashes of before and after compare."""
    path = tmp_path / "state" / "history.key"
    key = load_key(path)
    assert len(key) == 32
    assert load_key(path) == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_key(tmp_path / "other" / "history.key") != key


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33])
def test_load_key_damaged_is_replaced(tmp_path: Path, content: bytes) -> None:
    """A key that is none makes way for a new one."""
    path = tmp_path / "history.key"
    path.write_bytes(content)
    key = load_key(path)
    assert len(key) == 32
    assert path.read_bytes() == key


def test_load_key_that_cannot_be_kept_is_one_of_the_process(tmp_path: Path) -> None:
    """Hashes compare within one run then; nothing fails."""
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "history.key"
    assert len(load_key(path)) == 32
    assert load_key(path) != load_key(path)
    os.mkfifo(tmp_path / "pipe")
    assert len(load_key(tmp_path / "pipe")) == 32
