"""The file of past handoffs: a real SQLite file, its readers in other processes, full disks."""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import json
import os
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onebitd.adapters import history_reading as reading
from onebitd.adapters import history_schema as schema
from onebitd.adapters import history_store
from onebitd.adapters.history_store import (
    KEPT_DAMAGED,
    PRUNE_RECORDS,
    HistoryDamaged,
    HistoryDenied,
    HistoryFileError,
    HistoryGrown,
    HistoryStore,
    HistoryTooNew,
    Keep,
    NoHistory,
    read_records,
)
from onebitd.core.handoff_filter import HandoffFilter, parse_time

ALL = Keep(1_000_000, 0)
START = dt.datetime(2026, 5, 1, tzinfo=dt.UTC)


def fields_of(number: int, outcome: str = "used", **more: Any) -> dict[str, Any]:
    """Return the fields of a record of second `number`."""
    time = (START + dt.timedelta(seconds=number)).isoformat(timespec="milliseconds")
    record = {"request_id": f"r{number}", "time": time.replace("+00:00", "Z"), "outcome": outcome}
    return record | more


def rows(first: int, last: int, **more: Any) -> list[reading.Row]:
    """Return the records of these numbers, the last one too."""
    return [(number, fields_of(number, **more)) for number in range(first, last + 1)]


@contextlib.contextmanager
def stored(path: Path, records: list[reading.Row] | None = None) -> Iterator[HistoryStore]:
    """Yield an open store that has these records."""
    store = HistoryStore(path)
    store.open()
    try:
        store.write(records or [], ALL)
        yield store
    finally:
        store.close()


def time_of(number: int) -> int:
    """Return when record `number` began, as the file has it."""
    return reading.time_ms_of(parse_time(fields_of(number)["time"]))


def numbers(path: Path, **wanted: Any) -> list[int]:
    """Return the numbers of the records that `read_records` finds."""
    found = read_records(str(path), HandoffFilter(**wanted))
    return [int(record["request_id"][1:]) for record in found]


def listing(path: Path) -> dict[str, tuple[int, bytes]]:
    """Return what is beside the file and in it."""
    found = sorted(path.parent.iterdir())
    return {file.name: (file.stat().st_mtime_ns, file.read_bytes()) for file in found}


def test_store_closed_and_opened_again_has_everything_and_counts_on(tmp_path: Path) -> None:
    """What one daemon wrote is there for the next, in its order, every field as it was."""
    path = tmp_path / "state" / "history.db"
    with stored(path, rows(1, 3, detail="\ud800 ü", first_byte_ms=1.5)):
        pass
    store = HistoryStore(path)
    assert store.open() == 3
    assert store.last(Keep(2, 0)) == rows(2, 3, detail="\ud800 ü", first_byte_ms=1.5)
    store.close()
    assert [file.name for file in path.parent.iterdir()] == ["history.db"]


def test_store_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    """Mode 0600 for all three and 0700 for the directory; a file that was opened up is closed."""
    path = tmp_path / "state" / "history.db"
    with stored(path, rows(1, 1)):
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    assert modes == {"history.db": 0o600, "history.db-shm": 0o600, "history.db-wal": 0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o644)
    with stored(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_store_written_twice_has_each_record_once(tmp_path: Path) -> None:
    """A write that nobody waited for may have happened: it is made again without harm."""
    with stored(tmp_path / "h.db", rows(1, 3)) as store:
        store.write(rows(2, 5), ALL)
        assert [key for key, _ in store.last(Keep(10, 0))] == [1, 2, 3, 4, 5]


def test_store_more_than_are_kept_loses_the_oldest_step_by_step(tmp_path: Path) -> None:
    """By count and by age, so many at once, until nothing is left to do."""
    path = tmp_path / "h.db"
    with stored(path, rows(1, 3 * PRUNE_RECORDS)) as store:
        assert store.write([], Keep(PRUNE_RECORDS // 2, 0)) is True
        assert len(numbers(path)) == 2 * PRUNE_RECORDS
        steps = 1
        while store.write([], Keep(PRUNE_RECORDS // 2, 0)):
            steps += 1
        assert steps < 20
        assert numbers(path) == list(range(2 * PRUNE_RECORDS + PRUNE_RECORDS // 2 + 1, 3001))
        assert store.write([], Keep(10_000, time_of(2990))) is False
        assert numbers(path) == list(range(2990, 3001))


def test_store_record_of_a_wrong_clock_goes_with_those_around_it(tmp_path: Path) -> None:
    """One of 1970, or of 2100, is neither too old at once nor the measure of the others."""
    path = tmp_path / "h.db"
    wrong = (3, fields_of(3, time="1970-01-01T00:00:00.000Z"))
    ahead = (1, fields_of(1, time="2100-01-01T00:00:00.000Z"))
    given = [ahead, (2, fields_of(2)), wrong, (4, fields_of(4))]
    with stored(path, given) as store:
        keep = Keep(9, time_of(2), time_of(9))
        assert store.write([], keep) is False
        assert store.last(keep) == given
        keep = Keep(9, time_of(4), time_of(9))
        assert store.last(keep) == [ahead, given[3]]
        assert store.write([], keep) is False
        assert numbers(path) == [1, 4]
        assert store.write([], Keep(9, time_of(5), time_of(9))) is False
        assert numbers(path) == [1]


@pytest.mark.parametrize(("hours", "known"), [((0, 20, 40), 40), ((0, 20, 9000, 9001), 20)])
def test_store_opened_knows_a_time_that_no_wrong_clock_said(
    tmp_path: Path, hours: tuple[int, ...], known: int
) -> None:
    """That of the newest record, unless those of its day are alone and far from all others."""
    path = tmp_path / "h.db"
    records = [(number, fields_of(3600 * hour)) for number, hour in enumerate(hours, 1)]
    with stored(path) as store:
        assert store.known_ms is None
        store.write(records, ALL)
        store.open()
        assert store.known_ms == time_of(3600 * known)


def test_store_records_deleted_by_another_program_are_not_counted(tmp_path: Path) -> None:
    """At the limit, what is written then stays; and a lower limit is come to."""
    path = tmp_path / "h.db"
    with stored(path, rows(1, 10)) as store:
        store.write([], Keep(10, 0))
        with contextlib.closing(sqlite3.connect(path)) as other, other:
            other.execute("DELETE FROM handoffs")
        assert store.write(rows(11, 13), Keep(10, 0)) is False
        assert numbers(path) == [11, 12, 13]
        assert store.write(rows(14, 14), Keep(2, 0)) is False
        assert numbers(path) == [13, 14]


def test_store_pruned_file_becomes_smaller(tmp_path: Path) -> None:
    """Room that is not needed any more is given back to the file system."""
    path = tmp_path / "h.db"
    with stored(path, rows(1, 2000, detail="x" * 2000)) as store:
        pass
    before = path.stat().st_size
    store.open()
    steps = 1
    while store.write([], Keep(10, 0)):
        steps += 1
    store.close()
    assert steps < 20, "many pages with each step"
    assert path.stat().st_size < before / 2
    assert numbers(path) == list(range(1991, 2001))


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({"limit": 2}, [5, 6]),
        ({"limit": 0}, []),
        ({"limit": 99}, [1, 2, 3, 4, 5, 6]),
        ({"outcome": "fallback"}, [4, 5, 6]),
        ({"outcome": "fallback", "reason": "lock_busy"}, [5]),
        ({"route": "shared"}, [6]),
        ({"limit": 1, "outcome": "used"}, [3]),
        ({"since": START + dt.timedelta(seconds=5)}, [5, 6]),
        ({"since": START + dt.timedelta(seconds=4, microseconds=1)}, [5, 6]),
        ({"since": parse_time("2026-05-01T02:00:05+02:00"), "limit": 1}, [6]),
        ({"outcome": "cancelled"}, []),
    ],
)
def test_read_records_finds_what_the_filter_matches(
    tmp_path: Path, wanted: dict[str, Any], expected: list[int]
) -> None:
    """The file's answer is that of the filter itself, the newest last."""
    given = rows(1, 3)
    given += [(4, fields_of(4, "fallback", reason="bad_state", route="file"))]
    given += [(5, fields_of(5, "fallback", reason="lock_busy"))]
    given += [(6, fields_of(6, "fallback", reason="bad_state", route="shared"))]
    with stored(tmp_path / "h.db", given):
        assert numbers(tmp_path / "h.db", **wanted) == expected
    filter_ = HandoffFilter(**wanted)
    matching = [key for key, fields in given if filter_.matches(fields)]
    limit = filter_.limit
    assert expected == (matching if limit is None else matching[-limit:] if limit else [])


def test_read_records_more_than_a_page_come_in_order(tmp_path: Path) -> None:
    """Pages join without a gap or a repetition."""
    count = 2 * reading.PAGE_RECORDS + 3
    with stored(tmp_path / "h.db", rows(1, count)):
        assert numbers(tmp_path / "h.db") == list(range(1, count + 1))


WRITER = """
import itertools, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from onebitd.adapters.history_store import HistoryStore, Keep
from tests.adapters.test_history_store import fields_of
store = HistoryStore(Path(sys.argv[1]))
last = store.open()
for number in itertools.count(last + 1):
    store.write([(number, fields_of(number))], Keep(10**6, 0))
    print(number, flush=True)
    time.sleep(0.001)
    if len(sys.argv) > 2 and number >= int(sys.argv[2]):
        sys.stdin.read()
"""
ROOT = str(Path(__file__).parents[2])


@contextlib.contextmanager
def writer(path: Path, *args: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process that writes one record after the other, and kill it at the end."""
    argv = [sys.executable, "-c", WRITER.format(root=ROOT), str(path), *args]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.send_signal(signal.SIGKILL)


def wait_for(child: subprocess.Popen[str], number: int) -> None:
    """Read what the writer says until it has written so many."""
    assert child.stdout is not None
    for line in child.stdout:
        if int(line) >= number:
            return
    raise AssertionError("the writer ended")


def test_read_records_after_a_kill_finds_all_that_was_written_and_leaves_no_trace(
    tmp_path: Path,
) -> None:
    """The log of a killed daemon is read, and stays as it was: the next daemon needs it."""
    path = tmp_path / "h.db"
    with writer(path, "40") as child:
        wait_for(child, 40)
    before = listing(path)
    assert list(before) == ["h.db", "h.db-shm", "h.db-wal"]
    assert numbers(path) == list(range(1, 41))
    assert listing(path) == before
    with stored(path):
        assert numbers(path) == list(range(1, 41))


def test_read_records_while_another_process_writes_is_always_whole(tmp_path: Path) -> None:
    """No gap, nothing less than before, whenever one looks; the writer is not disturbed."""
    path = tmp_path / "h.db"
    with writer(path) as child:
        wait_for(child, 1)
        seen = 0
        for _ in range(60):
            found = numbers(path)
            assert found == list(range(1, len(found) + 1))
            assert len(found) >= seen
            seen = len(found)
        wait_for(child, seen + 5)


def test_read_records_closed_file_on_a_read_only_directory_is_read(tmp_path: Path) -> None:
    """A mounted backup will do; nothing is created beside it."""
    directory = tmp_path / "state"
    path = directory / "h.db"
    with stored(path, rows(1, 3)):
        pass
    with read_only(directory):
        assert numbers(path) == [1, 2, 3]
    with writer(path, "5") as child:
        wait_for(child, 5)
    with read_only(directory):
        assert numbers(path) == [1, 2, 3, 4, 5]


@contextlib.contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """Mount the directory over itself, read-only, or take the right to write away."""
    if os.geteuid() == 0:
        subprocess.run(["mount", "--bind", directory, directory], check=True)
        try:
            subprocess.run(["mount", "-o", "remount,ro,bind", directory, directory], check=True)
            yield
        finally:
            subprocess.run(["umount", directory], check=True)
    else:
        directory.chmod(0o500)
        try:
            yield
        finally:
            directory.chmod(0o700)


def test_read_records_no_file_says_so_and_makes_none(tmp_path: Path) -> None:
    """Exit status 3, as without a daemon."""
    with pytest.raises(NoHistory, match="does not exist") as caught:
        read_records(str(tmp_path / "none" / "h.db"), HandoffFilter())
    assert caught.value.exit_status == 3
    assert not list(tmp_path.iterdir())


def test_read_records_empty_file_has_no_records(tmp_path: Path) -> None:
    """A daemon killed as it made the file."""
    (tmp_path / "h.db").touch()
    assert numbers(tmp_path / "h.db") == []


def test_read_records_of_another_user_is_a_denial_that_names_the_owner(tmp_path: Path) -> None:
    """Exit status 4 for a stranger, and what to do."""
    path = tmp_path / "h.db"
    with stored(path, rows(1, 1)):
        pass
    program = (
        f"import os, sys; sys.path.insert(0, {ROOT!r})\n"
        "from onebitd.adapters.history_store import *\n"
        "from onebitd.core.handoff_filter import HandoffFilter\n"
        "if os.geteuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try: read_records(sys.argv[1], HandoffFilter())\n"
        "except HistoryDenied as error: print(error); sys.exit(error.exit_status)\n"
    )
    if os.geteuid() == 0:
        for directory in [tmp_path, *tmp_path.parents][:-2]:
            directory.chmod(0o755)
    else:
        path.chmod(0)
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (4, "")
    assert "permission denied" in done.stdout
    assert "use sudo" in done.stdout


def damage(path: Path, how: str) -> None:
    """Damage a file with records."""
    data = bytearray(path.read_bytes())
    if how == "garbage":
        data = bytearray(b"no database, however one looks at it" * 100)
    elif how == "cut":
        del data[5000:]
    elif how == "pages":
        data[4096:] = b"\xff" * (len(data) - 4096)
    elif how == "record":
        data = data.replace(b'{"request_id":"r2"', b'["request_id","r2" ')
    elif how == "time":
        data = data.replace(b'"time":"2026-05-01T00:00:09', b'"time":"2026-O5-01T00:00:09')
    elif how == "text":
        data = data.replace(b'"request_id":"r9"', b'"request_id":"\xff9"')
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["garbage", "cut", "pages", "record", "time", "text"])
def test_store_damaged_file_is_told_set_aside_and_begun_anew(tmp_path: Path, how: str) -> None:
    """Opening, loading or writing finds it; the old file is kept, the new one works."""
    path = tmp_path / "h.db"
    with stored(path, rows(1, 60)):
        pass
    damage(path, how)
    with pytest.raises(HistoryDamaged, match=r"h\.db is damaged: ") as caught:
        numbers(path)
    assert caught.value.exit_status == 1
    store = HistoryStore(path)
    with pytest.raises(HistoryDamaged):  # noqa: PT012 - whichever of them finds it first
        store.open()
        store.last(Keep(1000, 0))
    assert not store.is_open
    aside = store.set_aside("1")
    assert aside.name == "h.db.damaged-1"
    assert stat.S_IMODE(aside.stat().st_mode) == 0o600
    assert store.open() == 0
    store.write(rows(7, 7), ALL)
    store.close()
    assert numbers(path) == [7]


def test_store_damaged_files_kept_are_few(tmp_path: Path) -> None:
    """A disk that damages every file does not fill itself; logs go with their files."""
    path = tmp_path / "h.db"
    for number in range(KEPT_DAMAGED + 2):
        path.write_bytes(b"x" * 5000)
        (tmp_path / "h.db-wal").write_bytes(b"y")
        (tmp_path / "h.db-shm").write_bytes(b"z")
        HistoryStore(path).set_aside(f"2026-{number}")
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        *("h.db.damaged-2026-2", "h.db.damaged-2026-2-wal"),
        *("h.db.damaged-2026-3", "h.db.damaged-2026-3-wal"),
    ]
    assert HistoryStore(path).remove()
    assert not list(tmp_path.iterdir())
    assert not HistoryStore(path).remove()


def test_store_damaged_file_goes_when_its_records_are_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept for looking into is kept no longer than the rest; its log counts, too."""
    path = tmp_path / "h.db"
    names = ("h.db.damaged-1", "h.db.damaged-2", "h.db.damaged-2-wal")
    for name in names:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time_of(3) / 1000, time_of(3) / 1000))
    os.utime(tmp_path / names[2], (time_of(7) / 1000, time_of(7) / 1000))

    def kept(oldest: int) -> list[str]:
        store.write([], Keep(9, time_of(oldest)))
        return sorted(file.name for file in tmp_path.glob("*.damaged-*"))

    with stored(path) as store:
        assert kept(5) == list(names), "it was looked a moment ago"
        monkeypatch.setattr(history_store, "_LOOK_EVERY_S", 0.0)
        assert kept(3) == list(names)
        assert kept(5) == list(names[1:])
        assert kept(8) == []


def test_store_file_of_a_later_version_is_left_alone(tmp_path: Path) -> None:
    """Neither the writer nor a reader touches what it does not know."""
    path = tmp_path / "h.db"
    with stored(path, rows(1, 1)):
        pass
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    before = path.read_bytes()
    with pytest.raises(HistoryTooNew, match=f"format {schema.VERSION + 1}") as caught:
        HistoryStore(path).open()
    assert caught.value.exit_status == 1
    with pytest.raises(HistoryTooNew):
        numbers(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("begun", [0, 1, 2])
def test_migrate_from_each_version_ends_at_the_last(begun: int) -> None:
    """Only the missing steps are made, in their order, and the version is that of the last."""
    steps = (
        ("CREATE TABLE t (a INTEGER)", "INSERT INTO t VALUES (1)"),
        ("ALTER TABLE t ADD COLUMN b INTEGER", "UPDATE t SET b = a + 1"),
        ("UPDATE t SET a = a * 10 + b",),
    )
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        schema.migrate(connection, steps[:begun])
        schema.migrate(connection, steps)
        schema.migrate(connection, steps)
        assert connection.execute("SELECT * FROM t").fetchall() == [(12, 2)]
        assert schema.version_of(connection) == 3


def test_migrate_failing_step_leaves_the_version_before_it(tmp_path: Path) -> None:
    """Half a step is none: the next start tries it again."""
    steps = (("CREATE TABLE t (a INTEGER)",), ("INSERT INTO t VALUES (1)", "NONSENSE"))
    with contextlib.closing(sqlite3.connect(tmp_path / "x", isolation_level=None)) as connection:
        with pytest.raises(sqlite3.OperationalError):
            schema.migrate(connection, steps)
        assert schema.version_of(connection) == 1
        assert connection.execute("SELECT count(*) FROM t").fetchone() == (0,)


def test_store_file_removed_by_somebody_is_noticed(tmp_path: Path) -> None:
    """Nothing is written into a file that has no name any more."""
    path = tmp_path / "h.db"
    with stored(path, rows(1, 2)) as store:
        path.unlink()
        with pytest.raises(NoHistory, match="not there any more"):
            store.write(rows(3, 3), ALL)
        assert store.open() == 0
        store.write(rows(3, 3), ALL)
        assert numbers(path) == [3]


@pytest.mark.parametrize("how", ["removed", "cut", "another"])
def test_store_log_spoilt_by_somebody_is_noticed_before_more_goes_into_it(
    tmp_path: Path, how: str
) -> None:
    """SQLite would go on, and fill the file with zeros or lose it all in a kill."""
    path, log = tmp_path / "h.db", tmp_path / "h.db-wal"
    with stored(path, rows(1, 2)) as store:
        if how == "cut":
            os.truncate(log, 0)
        else:
            log.unlink()
        if how == "another":
            log.touch()
        with pytest.raises(NoHistory, match="log"):
            store.write(rows(3, 3), ALL)
        store.open()
        store.write(rows(3, 4), ALL)
        assert numbers(path)[-2:] == [3, 4]
    assert numbers(path)[-2:] == [3, 4]


def test_store_index_cut_by_somebody_does_not_kill_the_daemon(tmp_path: Path) -> None:
    """It is mapped memory: a look beyond its end is SIGBUS, for the writer and for a reader."""
    program = (
        "import os, sys\nfrom pathlib import Path\n"
        "from onebitd.adapters import history_reading as reading\n"
        "from tests.adapters.test_history_store import ALL, HandoffFilter, HistoryStore, rows\n"
        "path = sys.argv[1]\nstore = HistoryStore(Path(path))\nstore.open()\n"
        "store.write(rows(1, 2), ALL)\nos.truncate(f'{path}-shm', 0)\n"
        "with reading.opened(path) as connection:\n"
        "    assert len(list(reading.pages(connection, path, HandoffFilter(), 0))) == 2\n"
        "os.truncate(f'{path}-shm', 0)\nstore.write(rows(3, 4), ALL)\nstore.close()\n"
    )
    path = tmp_path / "h.db"
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert numbers(path) == [1, 2, 3, 4]


def test_store_records_of_another_program_are_not_taken_for_ours(tmp_path: Path) -> None:
    """Of two writers none loses a record because the other has its number."""
    path = tmp_path / "h.db"
    with stored(path, rows(1, 2)) as one, stored(path) as other:
        other.write(rows(3, 4), ALL)
        with pytest.raises(HistoryGrown):
            one.write(rows(3, 3), ALL)
        assert one.open() == 4
        one.write(rows(5, 5), ALL)
        assert numbers(path) == [1, 2, 3, 4, 5]


def test_store_file_that_cannot_shrink_is_pruned_to_an_end(tmp_path: Path) -> None:
    """One that other programs have made, out of a backup, keeps its free pages."""
    path = tmp_path / "h.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA auto_vacuum = NONE")
        schema.migrate(connection)
    with stored(path, rows(1, 2500, detail="x" * 2000)) as store:
        steps = 0
        while store.write([], Keep(3, 0)):
            steps += 1
            assert steps < 10
    assert numbers(path) == [2498, 2499, 2500]


def test_opened_reads_no_pipe_no_empty_file_and_no_later_version(tmp_path: Path) -> None:
    """What came into the place of the file is not taken for a damaged one, and nothing hangs."""
    path = tmp_path / "h.db"
    found = []
    for make in (Path.touch, os.mkfifo, later):
        path.unlink(missing_ok=True)
        make(path)
        with pytest.raises(HistoryFileError) as caught, reading.opened(str(path)):
            pass
        found.append(caught.type)
    assert found == [NoHistory, HistoryFileError, HistoryTooNew]


def later(path: Path) -> None:
    """Make a file of a later version."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")


@pytest.mark.parametrize("what", ["directory", "link to a directory", "pipe"])
def test_store_what_is_no_file_is_refused(tmp_path: Path, what: str) -> None:
    """A clear word instead of SQLite's, and no hang."""
    path = tmp_path / "h.db"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    else:
        path.symlink_to(tmp_path)
    with pytest.raises(HistoryFileError, match="is no file; remove it"):
        HistoryStore(path).open()
    with pytest.raises(HistoryFileError, match="is no file; remove it"):
        numbers(path)


def write_for_ever(store: HistoryStore) -> None:
    """Write large records from number 6 on."""
    for number in itertools.count(6, 10):
        store.write(rows(number, number + 9, detail="x" * 3000), ALL)


def test_store_full_disk_is_an_error_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    """The file stays whole, what was written stays readable, and the rest is written later."""
    path = tmp_path / "h.db"
    with stored(path, rows(1, 5)) as store:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
        try:
            with pytest.raises(HistoryFileError, match="cannot be written: ") as caught:
                write_for_ever(store)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not isinstance(caught.value, HistoryDamaged)
        before = numbers(path)
        assert before[:5] == [1, 2, 3, 4, 5]
        assert before == list(range(1, len(before) + 1))
        assert store.open() == before[-1]
        store.write(rows(before[-1] + 1, before[-1] + 1), ALL)
        assert numbers(path) == [*before, before[-1] + 1]


def test_store_full_file_system_says_that_there_is_no_room(tmp_path: Path) -> None:
    """The same on a real file system without room, in its own words."""
    if os.geteuid() != 0:
        pytest.skip("needs root for a small tmpfs")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)]
    subprocess.run(mount, check=True)
    try:
        path = disk / "h.db"
        with stored(path, rows(1, 5)) as store:
            with pytest.raises(HistoryFileError, match="no room is left on its disk"):
                write_for_ever(store)
            before = numbers(path)
            assert before == list(range(1, len(before) + 1))
        subprocess.run(["mount", "-o", "remount,size=2m", disk], check=True)
        with stored(path, rows(1000, 1000)):
            assert numbers(path) == [*before, 1000]
    finally:
        subprocess.run(["umount", disk], check=True)


def test_store_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """Read-only from the start, and while it runs."""
    directory = tmp_path / "state"
    directory.mkdir()
    with read_only(directory), pytest.raises(HistoryFileError, match=r"h\.db cannot be opened"):
        HistoryStore(directory / "h.db").open()
    with stored(directory / "h.db", rows(1, 2)) as store:
        pass
    if os.geteuid() != 0:
        return
    with read_only(directory):
        with pytest.raises(HistoryFileError, match=r"read-only|cannot be opened"):
            store.open()
        assert numbers(directory / "h.db") == [1, 2]


def test_store_record_is_json_with_the_columns_that_are_searched(tmp_path: Path) -> None:
    """Whoever looks with sqlite3(1) finds the documented table."""
    path = tmp_path / "h.db"
    with stored(path, rows(1, 1, reason="lock_busy", route="file")):
        pass
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        row = dict(connection.execute("SELECT * FROM handoffs").fetchone())
        assert tuple(connection.execute("PRAGMA auto_vacuum").fetchone()) == (2,)
    record = json.loads(row.pop("record"))
    assert record == fields_of(1, reason="lock_busy", route="file")
    moment = round(parse_time(record["time"]).timestamp() * 1000)
    assert row == {
        "id": 1,
        "time_ms": moment,
        "outcome": "used",
        "reason": "lock_busy",
        "route": "file",
    }
    assert HistoryDenied.exit_status == 4
