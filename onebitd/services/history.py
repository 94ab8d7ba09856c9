"""The last handoffs, the counters since the start, and those who follow along."""

from __future__ import annotations

import collections
import datetime as dt
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Final, Self

import trio

from onebitd.core.control_api import HandoffCounts
from onebitd.core.handoff import HandoffRecord, Outcome, Reason

FOLLOWER_RECORDS: Final = 256
"""Records that wait for one follower before it starts to lose some."""

NOT_THE_PROVIDERS: Final = frozenset(
    {
        *(Reason.BACKEND_DOWN, Reason.BACKEND_REFUSED),
        *(Reason.CLIENT_GONE, Reason.OPERATOR, Reason.DRAINING),
    }
)
"""Reasons of a failure that say nothing about the way from the provider to the decoder."""

_FAILURES: Final = frozenset({Outcome.WASTED, Outcome.FALLBACK, Outcome.FAILED})


class History:
    """What happened on the handoff route since the start; in memory, gone with the daemon.

    Every method but the follower's iteration is synchronous: there is no moment at which a reader
    sees a record counted and not listed.

    Args:
        limit: records kept; the counters never forget.
    """

    def __init__(self, limit: int = 1000) -> None:
        self._records: collections.deque[dict[str, Any]] = collections.deque(maxlen=limit)
        self._outcomes: collections.Counter[Outcome] = collections.Counter()
        self._reasons: collections.Counter[Reason] = collections.Counter()
        self._followers: set[Follower] = set()
        self._listeners: list[Callable[[HandoffRecord], None]] = []
        self._last_failure: dict[str, str] | None = None
        self._consecutive_failures = 0

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
        self._records.append(fields)
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

    def recent(
        self, limit: int, outcome: Outcome | None = None, since: dt.datetime | None = None
    ) -> list[dict[str, Any]]:
        """Return copies of the last records, newest last.

        Args:
            limit: at most so many of those that match.
            outcome: only records that ended so.
            since: only records of this moment or later; with a time zone, see `parse_time`.
        """
        found = [
            dict(fields)
            for fields in self._records
            if (outcome is None or fields["outcome"] == outcome)
            and (since is None or parse_time(fields["time"]) >= since)
        ]
        return found[-limit:] if limit > 0 else []

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

    def follow(self, outcome: Outcome | None = None) -> Follower:
        """Return a follower of the records added from its entry on.

            async with history.follow() as receive:
                async for fields in receive: ...

        Entering does not wait, so `recent` called right after it misses and repeats nothing.

        Args:
            outcome: only records that end so.
        """
        return Follower(self._followers, outcome)

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


class Follower(AsyncIterator[dict[str, Any]]):
    """One follower: an async context manager and the async iterator of records in it.

    The daemon never waits for it. When `FOLLOWER_RECORDS` wait unread, further ones are lost to
    it until it has read them all; the next item is then `{"lost": N}`, and it goes on from there.
    Leaving, by a cancel too, forgets the follower at once; no task belongs to it.
    """

    def __init__(self, registry: set[Follower], outcome: Outcome | None) -> None:
        self._registry = registry
        self._outcome = outcome
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
        if self._outcome is not None and fields["outcome"] != self._outcome:
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


def parse_time(text: str) -> dt.datetime:
    """Read an RFC 3339 time.

    Raises:
        ValueError: it is none, or it has no time zone.
    """
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ValueError(f"{text!r} is no RFC 3339 time such as 2026-01-31T12:00:00Z")
    return moment


def _detail_of(record: HandoffRecord) -> str:
    if record.outcome is Outcome.WASTED and record.evaluated_tokens is not None:
        return f"the decoder evaluated {record.evaluated_tokens} prompt tokens itself"
    return "no detail was given"
