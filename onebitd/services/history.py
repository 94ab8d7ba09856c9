"""The last handoffs, the counters since the start, and those who follow along."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, Protocol, Self

import trio

from onebitd.core.control_api import HandoffCounts
from onebitd.core.endings import SKIPS
from onebitd.core.handoff import HandoffRecord, Outcome, Reason
from onebitd.core.handoff_filter import HandoffFilter
from onebitd.core.handoff_summary import summarise
from onebitd.core.prompt_hash import KEY_BYTES

Fields = dict[str, Any]
"""`HandoffRecord.fields`; whoever has those of the history does not change them."""

FOLLOWER_RECORDS: Final = 256
"""Records that wait for one follower before it starts to lose some."""

NOT_THE_PROVIDERS: Final = frozenset(
    {
        *SKIPS,  # an error of a strict request's, for which nothing was tried
        *(Reason.BACKEND_DOWN, Reason.BACKEND_REFUSED, Reason.QUEUE_FULL),
        *(Reason.CLIENT_GONE, Reason.OPERATOR, Reason.DRAINING),
        Reason.INTERNAL,
    }
)
"""Reasons of a failure that say nothing about the way from the provider to the decoder."""

_FAILURES: Final = frozenset({Outcome.WASTED, Outcome.FALLBACK, Outcome.FAILED})
_EVERYTHING: Final = HandoffFilter()
_PAGE_RECORDS: Final = 50
"""So many are encoded at once in the event loop: well below a millisecond."""


class Archive(Protocol):
    """Where older records are; `services.history_keeper` is one. Numbers are the history's."""

    def put(self, number: int, fields: Fields) -> None:
        """Take a record over, `HandoffRecord.kept_fields` of it; neither waits nor raises."""

    async def wait_loaded(self) -> None:
        """Wait until the history has the last records of an earlier daemon, but not for long."""

    async def first(self, wanted: HandoffFilter, below: int) -> int | None:
        """Return where the wanted records below a number begin; None when there are none."""

    async def page(
        self, wanted: HandoffFilter, first: int, below: int
    ) -> tuple[int, list[bytes]] | None:
        """Return where to go on, and the JSON of the next records; None after the last."""

    async def summary(
        self, wanted: HandoffFilter, below: int, memory: Sequence[Fields]
    ) -> dict[str, Any]:
        """Return the summary of the wanted records below a number, and of those of `memory`."""


class History:
    """What happened on the handoff route: the last records, the counters since the start.

    Every method but the follower's iteration and those that ask the archive is synchronous: there
    is no moment at which a reader sees a record counted and not listed.

    Attributes:
        limit: records in memory; the counters never forget.
        hash_key: of `core.prompt_hash`.
    """

    def __init__(self, limit: int = 1000) -> None:
        self.limit = limit
        self.hash_key = os.urandom(KEY_BYTES)
        self._records: collections.deque[tuple[int, Fields]] = collections.deque(maxlen=limit)
        self._number = 0
        self._is_whole = True
        self._archive: Archive | None = None
        self._outcomes: collections.Counter[Outcome] = collections.Counter()
        self._reasons: collections.Counter[Reason] = collections.Counter()
        self._followers: set[Follower] = set()
        self._listeners: list[Callable[[HandoffRecord], None]] = []
        self._last_failure: dict[str, str] | None = None
        self._consecutive_failures = 0

    def attach(self, archive: Archive) -> None:
        """Have each record to come kept, and older ones than memory has found."""
        self._archive = archive

    def restore(self, rows: Sequence[tuple[int, Fields]]) -> None:
        """Put records of an earlier daemon before those of this one, as many as there is room for.

        They are not counted: the counters are those since the start.

        Args:
            rows: number, 0 or less, and fields; oldest first. If there are `limit` of them, the
                archive has more.
        """
        room = self.limit - len(self._records)
        taken = rows[-room:] if room > 0 else []
        self._is_whole &= len(rows) < self.limit and len(taken) == len(rows)
        self._records.extendleft(reversed(taken))

    def add(self, record: HandoffRecord) -> None:
        """Count a finished record, keep its fields and pass them to the followers; never waits.

        Raises:
            ValueError: the record has no outcome yet.
        """
        if record.outcome is None:
            raise ValueError(f"handoff {record.request_id} has no outcome")
        fields = record.fields()
        self._outcomes[record.outcome] += 1
        if record.reason is not None:
            self._reasons[record.reason] += 1
        self._judge(record, record.outcome)
        self._number += 1
        self._is_whole &= len(self._records) < self.limit
        self._records.append((self._number, fields))
        if self._archive is not None:
            self._archive.put(self._number, record.kept_fields())
        for follower in self._followers:
            follower.offer(fields)
        for listener in self._listeners:
            listener(record)

    def listen(self, listener: Callable[[HandoffRecord], None]) -> None:
        """Call `listener` with each record to come, from `add`; it neither waits nor raises."""
        self._listeners.append(listener)

    def counts(self) -> HandoffCounts:
        """Return the counters since the start, reasons in alphabetical order."""
        return HandoffCounts(
            **{outcome.value: self._outcomes[outcome] for outcome in Outcome},
            by_reason={reason.value: self._reasons[reason] for reason in sorted(self._reasons)},
        )

    def recent(self, wanted: HandoffFilter = _EVERYTHING) -> list[Fields]:
        """Return copies of the last records that are wanted, newest last, as far as memory goes."""
        return [dict(fields) for fields in self._found(wanted)]

    def _found(self, wanted: HandoffFilter) -> list[Fields]:
        found = [fields for _, fields in self._records if wanted.matches(fields)]
        if wanted.limit is None:
            return found
        return found[-wanted.limit :] if wanted.limit > 0 else []

    async def wait_loaded(self) -> None:
        """Wait until the last records of an earlier daemon are there, but not for long."""
        if self._archive is not None:
            await self._archive.wait_loaded()

    def reading(self, wanted: HandoffFilter) -> Reading:
        """Begin to read what is wanted, of this moment, however far back it goes."""
        found = self._found(wanted)
        below = self._records[0][0] if self._records else self._number + 1
        archive = None if self._is_whole else self._archive
        return Reading(archive, wanted, found, below)

    async def summary(self, wanted: HandoffFilter) -> dict[str, Any]:
        """Return `core.handoff_summary.summarise` of what is wanted, however far back it goes."""
        await self.wait_loaded()
        return await self.reading(wanted).summary()

    @property
    def last_failure(self) -> dict[str, str] | None:
        """`time`, `reason` and `detail` of the last handoff that was tried in vain, or None.

        Failures that are the decoder's or the client's (`NOT_THE_PROVIDERS`) are left out. A
        wasted handoff has the reason `wasted` when it has no other.
        """
        return None if self._last_failure is None else dict(self._last_failure)

    @property
    def consecutive_failures(self) -> int:
        """Handoffs tried in vain since the last one that was used."""
        return self._consecutive_failures

    def follow(self, wanted: HandoffFilter = _EVERYTHING) -> Follower:
        """Return a follower of the records added from its entry on.

            async with history.follow() as receive:
                async for fields in receive: ...

        Entering does not wait, so `reading` called right after it misses and repeats nothing.

        Args:
            wanted: which of them; its limit does not matter.
        """
        return Follower(self._followers, wanted)

    def close(self) -> None:
        """End every follower's iteration once it has read what waits for it; for the stop."""
        for follower in tuple(self._followers):
            follower.end()

    def _judge(self, record: HandoffRecord, outcome: Outcome) -> None:
        if outcome is Outcome.USED:
            self._consecutive_failures = 0
        if outcome not in _FAILURES or record.reason in NOT_THE_PROVIDERS:
            return
        self._consecutive_failures += 1
        self._last_failure = {
            "time": record.time,
            "reason": str(record.reason or outcome),
            "detail": record.detail or _detail_of(record),
        }


class Reading:
    """Records of one moment, the oldest first: the archive's, then those in memory.

    Args:
        archive: None when memory has everything.
        wanted: what was asked for.
        recent: what memory has of it.
        below: number of the oldest record in memory.
    """

    def __init__(
        self, archive: Archive | None, wanted: HandoffFilter, recent: list[Fields], below: int
    ) -> None:
        if wanted.limit is not None:
            wanted = dataclasses.replace(wanted, limit=wanted.limit - len(recent))
        self._archive = archive if wanted.limit != 0 else None
        self._wanted = wanted
        self._recent = recent
        self._below = below
        self._first: int | None = None

    async def open(self) -> None:
        """Look where the archive's records begin; without it there are those in memory alone."""
        if self._archive is not None:
            self._first = await self._archive.first(self._wanted, self._below)

    @property
    def is_short(self) -> bool:
        """Whether the next page is the last."""
        return self._first is None and len(self._recent) <= _PAGE_RECORDS

    async def page(self) -> list[bytes]:
        """Return the JSON of each of the next records, [] after the last.

        Raises:
            OnebitError: the archive cannot be read any more.
        """
        if self._archive is not None and self._first is not None:
            found = await self._archive.page(self._wanted, self._first, self._below)
            if found is not None:
                self._first = found[0]
                return found[1]
            self._first = None
        page, self._recent = self._recent[:_PAGE_RECORDS], self._recent[_PAGE_RECORDS:]
        return encoded(page)

    async def summary(self) -> dict[str, Any]:
        """Return the summary of all of it."""
        if self._archive is not None:
            return await self._archive.summary(self._wanted, self._below, self._recent)
        return await trio.to_thread.run_sync(summarise, self._recent)


def encoded(records: Iterable[Fields]) -> list[bytes]:
    """Return each record as JSON in one line."""
    return [json.dumps(fields).encode("ascii") for fields in records]


class Follower(AsyncIterator[dict[str, Any]]):
    """One follower: an async context manager and the async iterator of records in it.

    The daemon never waits for it. When `FOLLOWER_RECORDS` wait unread, further ones are lost to
    it until it has read them all; the next item is then `{"lost": N}`, and it goes on from there.
    Leaving, by a cancel too, forgets the follower at once; no task belongs to it.
    """

    def __init__(self, registry: set[Follower], wanted: HandoffFilter) -> None:
        self._registry = registry
        self._wanted = wanted
        self._lost = 0
        self._send, self._receive = trio.open_memory_channel[dict[str, Any]](FOLLOWER_RECORDS)

    async def __aenter__(self) -> Self:
        self._registry.add(self)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()
        self._receive.close()

    async def __anext__(self) -> dict[str, Any]:
        if self._lost and not self._receive.statistics().current_buffer_used:
            await trio.lowlevel.checkpoint()
            lost, self._lost = self._lost, 0
            return {"lost": lost}
        try:
            return dict(await self._receive.receive())
        except trio.EndOfChannel:
            raise StopAsyncIteration from None

    def offer(self, fields: dict[str, Any]) -> None:
        """Pass a record on if it is wanted and there is room, else count it as lost."""
        if not self._wanted.matches(fields):
            return
        if not self._lost:
            try:
                self._send.send_nowait(fields)
            except trio.WouldBlock:
                self._lost = 1
        else:
            self._lost += 1

    def end(self) -> None:
        """Take no more records; what waits can still be read."""
        self._registry.discard(self)
        self._send.close()


def _detail_of(record: HandoffRecord) -> str:
    if record.outcome is Outcome.WASTED and record.evaluated_tokens is not None:
        return f"the decoder evaluated {record.evaluated_tokens} prompt tokens itself"
    return "no detail was given"
