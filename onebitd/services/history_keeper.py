"""Keeps the handoffs of the past in a file: written soon after each, read where memory ends.

The file never harms serving: the loop only ever appends to a list, one thread call at a time
writes, and what cannot be written waits, a bounded number, until it can or is lost with a warning.
"""

from __future__ import annotations

import collections
import datetime as dt
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog
import trio

from onebitd.adapters import history_reading as reading
from onebitd.adapters.history_key import load_key, remove_key
from onebitd.adapters.history_store import (
    HistoryDamaged,
    HistoryFileError,
    HistoryGrown,
    HistoryNotOpen,
    HistoryStore,
    Keep,
    NoHistory,
)
from onebitd.core import paths
from onebitd.core.config import HistoryConfig
from onebitd.core.handoff_filter import HandoffFilter
from onebitd.core.handoff_summary import summarise
from onebitd.core.history_age import AgeClock
from onebitd.services.history import Fields, History
from onebitd.services.late_writes import LateWrites

log = structlog.get_logger()
_T = TypeVar("_T")

KEY_FILE: Final = "history.key"
MAX_PENDING: Final = 4096
"""Records that wait for the file; beyond it the oldest are lost."""
BATCH_RECORDS: Final = 1000
PRUNE_EVERY_S: Final = 600.0
"""Records grow old without a new one, too."""
RETRY_S: Final = 3.0
LOAD_WAIT_S: Final = 2.0
"""A question right after the start waits so long for what the file has."""
_READERS: Final = 2
_CLOSE_S: Final = 2.0
_DAY_MS: Final = 86_400_000
_PRUNE_PAUSE_S: Final = 0.05
_GENTLE_RECORDS: Final = 20
_GENTLE_S: Final = 0.0001


class HistoryKeeper:
    """Has the file; the history passes it each record and asks it for older ones.

    A record has a number in the history, 1 for the first of this daemon, and one in the file; both
    count up together, so that what memory has and what the file has join without a gap.

    Args:
        history: of this daemon; the keeper attaches itself.
        state: directory of the file.
        settings: how much is kept.
        now: the time, UTC.
        steady_s: the time since the box booted, in seconds; see `core.history_age`.
    """

    def __init__(
        self,
        history: History,
        state: Path,
        settings: HistoryConfig,
        now: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC),
        steady_s: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self._history = history
        self._store = HistoryStore(Path(paths.history_file(str(state))))
        self._settings = settings
        self._now = now
        self._steady_s = steady_s
        self._age: AgeClock | None = None
        self._key = state / KEY_FILE
        self._pending: collections.deque[tuple[int, Fields]] = collections.deque()
        self._lost = 0
        self._offset: int | None = None
        """A record's number in the file less that in the history; None until it was opened."""
        self._written = 0
        self._loaded = trio.Event()
        self._is_restored = False
        self._told: set[str] = set()
        self._problem: str | None = None
        self._files = 1  # that were begun
        self._found_damage: HistoryDamaged | None = None
        self._writes = LateWrites(self._write, every_s=PRUNE_EVERY_S, retry_s=RETRY_S, at_once=True)
        self._readers = trio.CapacityLimiter(_READERS)
        self._take_key()
        history.attach(self)

    def reconfigure(self, settings: HistoryConfig) -> None:
        """Keep so much from now on; what is too much goes soon, in small steps."""
        before, self._settings = self._settings, settings
        if bool(before.max_records) is not bool(settings.max_records):
            self._take_key()
        self._writes.touch()

    def _take_key(self) -> None:
        """Have the key of the file, before the first record for it; it goes with the file."""
        if self._settings.max_records:
            self._history.hash_key = load_key(self._key)
        else:
            remove_key(self._key)

    def put(self, number: int, fields: Fields) -> None:
        """Have a record written soon; it must not change any more. Never waits.

        Args:
            number: in the history.
            fields: `HandoffRecord.kept_fields`, without words of other programs.
        """
        if not self._settings.max_records:
            return
        if len(self._pending) >= MAX_PENDING:
            self._pending.popleft()
            self._lost += 1
            if self._lost == 1:
                line = f"{MAX_PENDING} handoffs wait for {self._store.path}: older ones are lost"
                log.warning("history_lost", line=line)
        self._pending.append((number, fields))
        self._writes.touch()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Load the last records, then write until cancelled, and what is left at the end."""
        task_status.started()
        try:
            await self._writes.run()
        finally:
            with trio.move_on_after(_CLOSE_S, shield=True):
                await _in_thread(partial(self._store.close, for_good=True))
            if lost := self._lost + len(self._pending):
                log.warning("history_lost", line=f"{lost} handoffs are not in {self._store.path}")

    async def _write(self) -> bool:
        """Bring the file up to date; False when it cannot be, and is to be tried again."""
        try:
            try:
                await self._bring_up_to_date()
            except HistoryDamaged as error:
                await self._set_aside(error)
                await self._bring_up_to_date()
            except HistoryGrown:
                await self._bring_up_to_date()  # our numbers go on behind theirs
        except HistoryFileError as error:
            self._loaded.set()
            if not isinstance(error, HistoryNotOpen):
                self._warn(error)
            return False
        self._be_well()
        return True

    async def _bring_up_to_date(self) -> None:
        if not self._settings.max_records:
            await self._remove()
            return
        if (found := self._found_damage) is not None:
            self._found_damage = None
            raise found
        if not self._store.is_open:
            await self._open()
        is_more = True
        while is_more:
            batch = list(itertools.islice(self._pending, BATCH_RECORDS))
            rows = [(number + (self._offset or 0), fields) for number, fields in batch]
            is_more = await _in_thread(partial(self._store.write, rows, self._keep()))
            if batch:
                self._written = batch[-1][0]
            while self._pending and self._pending[0][0] <= self._written:
                self._pending.popleft()
            if is_more:
                await trio.sleep(_PRUNE_PAUSE_S)
            is_more |= len(batch) == BATCH_RECORDS

    async def _open(self) -> None:
        last = await _in_thread(self._store.open)
        # Numbers go on even if the file is a new one, or another one.
        self._offset = max(self._offset or 0, last - self._written)
        if self._age is None:
            wall_ms, steady_ms = self._clocks_ms()
            known_ms = self._store.known_ms
            self._age = AgeClock(wall_ms if known_ms is None else known_ms, steady_ms)
        if not self._is_restored:
            rows = await _in_thread(partial(self._store.last, self._keep(self._history.limit)))
            offset = self._offset
            self._history.restore([(key - offset, fields) for key, fields in rows])
            self._is_restored = True
            self._loaded.set()

    def _keep(self, most: int = sys.maxsize) -> Keep:
        clocks = self._clocks_ms()
        now_ms = clocks[0] if self._age is None else self._age.now_ms(*clocks)
        oldest_ms = now_ms - round(self._settings.max_age_days * _DAY_MS)
        return Keep(min(most, self._settings.max_records), oldest_ms, now_ms)

    def _clocks_ms(self) -> tuple[int, int]:
        return reading.time_ms_of(self._now()), int(self._steady_s() * 1000)

    async def _remove(self) -> None:
        self._pending.clear()
        self._loaded.set()
        if await _in_thread(self._store.remove):
            log.info("history_removed", line=f"history.max_records = 0: {self._store.path} removed")

    async def _set_aside(self, error: HistoryDamaged) -> None:
        stamp = f"{self._now():%Y%m%dT%H%M%S.%fZ}"
        kept = await _in_thread(partial(self._store.set_aside, stamp))
        self._files += 1
        line = f"{error}; a new history is begun, and the file is kept as {kept}"
        log.warning("history_damaged", line=line)

    @property
    def problem(self) -> str | None:
        """What is in the way of the file now; None when nothing is."""
        return self._problem

    def _warn(self, error: HistoryFileError) -> None:
        """Say once what is in the way, until it works again."""
        self._problem = text = str(error)
        if text not in self._told:
            self._told.add(text)
            if self._lost:
                text += f"; {self._lost} handoffs are lost by now"
            line = f"{text}; until it can, the last {MAX_PENDING} handoffs wait in memory"
            log.warning("history_not_written", line=line)

    def _be_well(self) -> None:
        if self._told:
            self._told.clear()
            self._problem = None
            lost, self._lost = self._lost, 0
            line = f"{self._store.path} is written again"
            line += f"; {lost} handoffs of the meantime are lost" if lost else ""
            log.info("history_written_again", line=line)

    async def wait_loaded(self) -> None:
        """Wait until the history has what the file has, for a bounded time."""
        with trio.move_on_after(LOAD_WAIT_S):
            await self._loaded.wait()
        self._loaded.set()  # nobody else waits for a disk that does not answer

    async def first(self, wanted: HandoffFilter, below: int) -> int | None:
        """Return where the records of the file begin that are wanted; None when there are none.

        Args:
            wanted: with its limit.
            below: number of the oldest record that is not asked for.
        """

        if self._offset is None or not self._settings.max_records:
            return None
        path, offset = str(self._store.path), self._offset

        def look() -> int:
            with reading.opened(path) as connection:
                return reading.first_id(connection, wanted, below + offset)

        try:
            return await self._read(look) - offset
        except HistoryFileError:
            return None

    async def page(
        self, wanted: HandoffFilter, first: int, below: int
    ) -> tuple[int, list[bytes]] | None:
        """Return where to go on, and the JSON of the next records from `first` on; None at the end.

        Raises:
            HistoryFileError: the file cannot be read any more.
        """

        def look() -> tuple[int, list[bytes]] | None:
            with reading.opened(path) as connection:
                rows = reading.page(connection, path, wanted, first + offset, below + offset)
            if not rows:
                return None
            lines = []
            for _, record in _gently(rows):
                reading.fields_of(path, record)  # what is sent on is looked at first
                lines.append(record.encode("ascii"))
            return rows[-1][0] + 1 - offset, lines

        path, offset = str(self._store.path), self._offset or 0
        return await self._read(look)

    async def summary(
        self, wanted: HandoffFilter, below: int, memory: Sequence[Fields]
    ) -> dict[str, Any]:
        """Return the summary of what the file has below a number, and of `memory`."""
        gone = False

        def work() -> dict[str, Any]:
            return summarise(itertools.chain(older(), memory))

        def older() -> Iterator[Fields]:
            if offset is None or first is None:
                return
            with reading.opened(path) as connection:
                found = reading.pages(connection, path, wanted, first + offset, below + offset)
                for _, fields in _gently(found):
                    if gone:
                        return
                    yield fields

        first = await self.first(wanted, below)
        path, offset = str(self._store.path), self._offset
        try:
            return await self._read(work)
        except HistoryFileError:
            return await trio.to_thread.run_sync(summarise, memory)
        finally:
            gone = True

    async def _read(self, work: Callable[[], _T]) -> _T:
        file = self._files
        try:
            return await trio.to_thread.run_sync(
                work, abandon_on_cancel=True, limiter=self._readers
            )
        except HistoryFileError as error:
            if file == self._files:
                self._complain(error)
            raise

    def _complain(self, error: HistoryFileError) -> None:
        """A reader found it: the writer is to look after it."""
        if not isinstance(error, NoHistory):  # which the writer finds and tells itself
            self._warn(error)
        if isinstance(error, HistoryDamaged):
            self._found_damage = error
        self._writes.touch()


def _gently(rows: Iterable[_T]) -> Iterator[_T]:
    """Let the event loop's thread go first now and then: else it waits 5 ms for each turn."""
    for number, row in enumerate(rows):
        if not number % _GENTLE_RECORDS:
            time.sleep(_GENTLE_S)
        yield row


async def _in_thread(work: Callable[[], _T]) -> _T:
    # Whoever comes after a call that nobody waited for any more waits for it in the store.
    return await trio.to_thread.run_sync(work, abandon_on_cancel=True)
