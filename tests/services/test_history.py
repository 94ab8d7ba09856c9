"""The last handoffs, the counters and the followers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import trio
import trio.testing

from onebitd.core.handoff import HandoffRecord, Outcome, Reason
from onebitd.core.handoff_filter import HandoffFilter, parse_time
from onebitd.core.handoff_summary import summarise
from onebitd.services.history import FOLLOWER_RECORDS, NOT_THE_PROVIDERS, Fields, History, encoded


def make_record(
    number: int = 0, outcome: Outcome | None = Outcome.USED, **more: Any
) -> HandoffRecord:
    """Return a record of minute `number`."""
    fields: dict[str, Any] = {
        "request_id": f"r{number}",
        "time": f"2026-05-01T{number // 60:02}:{number % 60:02}:00.000Z",
        "instance": "qwen",
        "model": "qwen",
        "path": "/v1/chat/completions",
        "stream": True,
        "outcome": outcome,
    }
    return HandoffRecord(**(fields | more))


def ids(records: list[dict[str, Any]]) -> list[str]:
    """Return the request ids."""
    return [record["request_id"] for record in records]


def test_history_more_records_than_its_limit_keeps_the_last_and_counts_all() -> None:
    """The list is bounded, the counters never lose a record."""
    history = History(limit=3)
    for number in range(5):
        history.add(make_record(number))
    history.add(make_record(5, Outcome.SKIPPED, reason=Reason.TOO_SHORT))
    assert ids(history.recent(HandoffFilter(limit=10))) == ["r3", "r4", "r5"]
    counts = history.counts()
    assert (counts.used, counts.skipped, counts.fallback) == (5, 1, 0)
    assert counts.by_reason == {"too_short": 1}


@pytest.mark.parametrize(
    ("limit", "outcome", "since", "expected"),
    [
        (2, None, None, ["r3", "r4"]),
        (0, None, None, []),
        (9, Outcome.USED, None, ["r0", "r2", "r4"]),
        (1, Outcome.FALLBACK, None, ["r3"]),
        (9, None, "2026-05-01T00:03:00Z", ["r3", "r4"]),
        (9, None, "2026-05-01T02:02:30+02:00", ["r3", "r4"]),
        (9, Outcome.USED, "2026-05-01T00:03:00Z", ["r4"]),
        (9, Outcome.CANCELLED, None, []),
    ],
)
def test_recent_with_filters_returns_the_newest_that_match_newest_last(
    limit: int, outcome: Outcome | None, since: str | None, expected: list[str]
) -> None:
    """Limit, outcome and time work alone and together; times compare as moments, not as text."""
    history = History()
    for number in range(5):
        history.add(make_record(number, Outcome.FALLBACK if number % 2 else Outcome.USED))
    moment = None if since is None else parse_time(since)
    wanted = HandoffFilter(limit=limit, outcome=outcome, since=moment)
    assert ids(history.recent(wanted)) == expected


def test_recent_result_changed_by_its_reader_leaves_the_history_alone() -> None:
    """A reader gets copies."""
    history = History()
    history.add(make_record())
    history.recent(HandoffFilter(limit=1))[0].clear()
    assert ids(history.recent(HandoffFilter(limit=1))) == ["r0"]


def test_add_record_without_an_outcome_is_refused() -> None:
    """An unfinished record would be counted nowhere: it is an error, and nothing is kept."""
    history = History()
    with pytest.raises(ValueError, match="r0 has no outcome"):
        history.add(make_record(outcome=None))
    assert history.recent(HandoffFilter(limit=1)) == []


@pytest.mark.parametrize("outcome", [Outcome.FALLBACK, Outcome.FAILED, Outcome.WASTED])
@pytest.mark.parametrize("reason", list(Reason))
def test_last_failure_each_reason_counts_only_if_it_speaks_of_the_handoff(
    reason: Reason, outcome: Outcome
) -> None:
    """A decoder that is down and a client that left are no failures of the provider's side."""
    history = History()
    history.add(make_record(7, outcome, reason=reason, detail="why"))
    expected = None
    if reason not in NOT_THE_PROVIDERS:
        expected = {"time": "2026-05-01T00:07:00.000Z", "reason": reason.value, "detail": "why"}
    assert history.last_failure == expected
    assert history.consecutive_failures == (expected is not None)


def test_consecutive_failures_only_a_used_handoff_ends_the_row() -> None:
    """A skipped or cancelled request says nothing; a used one proves the route works."""
    history = History()
    history.add(make_record(0, Outcome.FALLBACK, reason=Reason.LOCK_BUSY, detail="x"))
    history.add(make_record(1, Outcome.SKIPPED, reason=Reason.TOO_SHORT))
    history.add(make_record(2, Outcome.WASTED, evaluated_tokens=307))
    history.add(make_record(3, Outcome.CANCELLED, reason=Reason.CLIENT_GONE))
    assert history.consecutive_failures == 2
    history.add(make_record(4))
    assert history.consecutive_failures == 0
    assert history.last_failure == {
        "time": "2026-05-01T00:02:00.000Z",
        "reason": "wasted",
        "detail": "the decoder evaluated 307 prompt tokens itself",
    }


async def test_follow_records_added_later_arrive_in_order() -> None:
    """A follower gets every record from its entry on, and none from before."""
    history = History()
    history.add(make_record(0))
    async with history.follow() as receive:
        history.add(make_record(1))
        history.add(make_record(2))
        assert [(await anext(receive))["request_id"] for _ in range(2)] == ["r1", "r2"]


async def test_follow_waiting_follower_is_woken_by_the_next_record() -> None:
    """Nothing polls: the follower sleeps until there is something."""
    history = History()
    got: list[dict[str, Any]] = []

    async def read_one() -> None:
        async with history.follow() as receive:
            got.append(await anext(receive))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_one)
        await trio.testing.wait_all_tasks_blocked()
        assert got == []
        history.add(make_record(1))
    assert ids(got) == ["r1"]


async def test_follow_with_an_outcome_passes_only_that() -> None:
    """The filter applies before the buffer: others can neither arrive nor count as lost."""
    history = History()
    async with history.follow(HandoffFilter(outcome="fallback")) as receive:
        for number in range(FOLLOWER_RECORDS + 5):
            history.add(make_record(number))
        history.add(make_record(3, Outcome.FALLBACK))
        history.close()
        assert ids([record async for record in receive]) == ["r3"]


async def test_follow_slow_follower_is_told_how_many_it_lost_where_they_were() -> None:
    """Buffer full: later records are lost, counted, and reported between the kept and the new."""
    history = History()
    async with history.follow() as receive:
        for number in range(FOLLOWER_RECORDS + 7):
            history.add(make_record(number))
        first = await anext(receive)
        history.add(make_record(900))  # room again, but the gap comes first
        kept = [await anext(receive) for _ in range(FOLLOWER_RECORDS - 1)]
        assert ids([first, *kept]) == [f"r{number}" for number in range(FOLLOWER_RECORDS)]
        assert await anext(receive) == {"lost": 8}
        history.add(make_record(901))
        assert (await anext(receive))["request_id"] == "r901"


async def test_follow_slow_follower_does_not_cost_a_fast_one_anything() -> None:
    """Each follower has its own buffer."""
    history = History()
    async with history.follow() as slow, history.follow() as fast:
        for number in range(FOLLOWER_RECORDS + 2):
            history.add(make_record(number))
            assert (await anext(fast))["request_id"] == f"r{number}"
        assert (await anext(slow))["request_id"] == "r0"


async def test_follow_cancelled_follower_is_forgotten() -> None:
    """A cancel in the wait leaves no follower behind for which records would be kept."""
    history = History()
    with trio.CancelScope() as scope:
        async with history.follow() as receive:
            scope.cancel()
            await anext(receive)
    assert scope.cancelled_caught
    history.add(make_record(1))
    assert not history._followers


async def test_close_followers_read_what_waits_and_end() -> None:
    """A stop ends every stream cleanly, gap included; a second close and a late leave are fine."""
    history = History()
    async with history.follow() as receive:
        for number in range(FOLLOWER_RECORDS + 1):
            history.add(make_record(number))
        history.close()
        history.close()
        got = [record async for record in receive]
    assert len(got) == FOLLOWER_RECORDS + 1
    assert got[-1] == {"lost": 1}


class FakeArchive:
    """An archive with older records in memory; its pages have three."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.rows = [(number, make_record(number % 1000).fields()) for number in numbers]
        self.put_numbers: list[int] = []
        self.asked = 0

    def put(self, number: int, fields: Fields) -> None:
        """Take it over."""
        self.put_numbers.append(number)
        self.rows.append((number, fields))

    async def wait_loaded(self) -> None:
        """Be loaded."""
        await trio.lowlevel.checkpoint()

    def _below(self, wanted: HandoffFilter, below: int) -> list[tuple[int, Fields]]:
        found = [row for row in self.rows if row[0] < below and wanted.matches(row[1])]
        return found if wanted.limit is None else found[-wanted.limit :]

    async def first(self, wanted: HandoffFilter, below: int) -> int | None:
        """Return the first number."""
        self.asked += 1
        await trio.lowlevel.checkpoint()
        found = self._below(wanted, below)
        return found[0][0] if found else None

    async def page(
        self, wanted: HandoffFilter, first: int, below: int
    ) -> tuple[int, list[bytes]] | None:
        """Return three of them."""
        await trio.lowlevel.checkpoint()
        found = [row for row in self._below(wanted, below) if row[0] >= first][:3]
        return (found[-1][0] + 1, encoded(fields for _, fields in found)) if found else None

    async def summary(
        self, wanted: HandoffFilter, below: int, memory: Sequence[Fields]
    ) -> dict[str, Any]:
        """Summarise both."""
        await trio.lowlevel.checkpoint()
        return summarise([*(fields for _, fields in self._below(wanted, below)), *memory])


async def read_all(history: History, wanted: HandoffFilter) -> list[str]:
    """Return the request ids of all that a reading finds."""
    reading = history.reading(wanted)
    await reading.open()
    found = []
    while page := await reading.page():
        found += [json.loads(line)["request_id"] for line in page]
    return found


async def with_archive() -> tuple[History, FakeArchive]:
    """Return a history of four in memory: one of an earlier daemon, three of its own five."""
    archive = FakeArchive(range(-7, 1))
    history = History(limit=4)
    history.attach(archive)
    history.restore(archive.rows[-4:])
    for number in range(1, 4):
        history.add(make_record(number))
    return history, archive


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(None, 11), (11, 11), (20, 11), (10, 10), (8, 8), (5, 5), (4, 4), (1, 1), (0, 0)],
)
async def test_reading_further_back_than_memory_goes_on_in_the_archive(
    limit: int | None, expected: int
) -> None:
    """Both join without a gap or a repetition, and memory is enough where it is enough."""
    history, archive = await with_archive()
    everything = [f"r{number % 1000}" for number in range(-7, 4)]
    wanted = HandoffFilter(limit=limit)
    assert await read_all(history, wanted) == everything[len(everything) - expected :]
    assert archive.asked == (limit is None or limit > 4)
    assert archive.put_numbers == [1, 2, 3]
    summary = await history.summary(wanted)
    assert summary["count"] == expected


async def test_reading_begun_does_not_see_what_comes_later() -> None:
    """A record that is finished meanwhile is in memory, in the archive, and not in the answer."""
    history, _ = await with_archive()
    reading = history.reading(HandoffFilter())
    await reading.open()
    for number in range(4, 9):
        history.add(make_record(number))
    found = []
    while page := await reading.page():
        found += page
    assert len(found) == 11


async def test_restore_after_records_of_its_own_puts_the_older_before_them() -> None:
    """The load may take its time; it counts nothing, and there is room for so many only."""
    history = History(limit=3)
    history.add(make_record(5))
    history.restore([(-1, make_record(1).fields()), (0, make_record(2).fields())])
    assert ids(history.recent()) == ["r1", "r2", "r5"]
    assert history.counts().used == 1
    assert history.last_failure is None
    history.restore([(-2, make_record(0).fields())])
    assert ids(history.recent()) == ["r1", "r2", "r5"]


async def test_reading_where_memory_has_everything_asks_nobody() -> None:
    """The common question costs no thread."""
    archive = FakeArchive([])
    history = History(limit=3)
    history.attach(archive)
    history.restore([(0, make_record(0).fields())])
    history.add(make_record(1))
    assert await read_all(history, HandoffFilter(limit=20)) == ["r0", "r1"]
    assert archive.asked == 0
    history.add(make_record(2))
    assert await read_all(history, HandoffFilter(limit=20)) == ["r0", "r1", "r2"]
    assert archive.asked == 0
    history.add(make_record(3))
    assert await read_all(history, HandoffFilter(limit=2)) == ["r2", "r3"]
    assert archive.asked == 0
    assert await read_all(history, HandoffFilter(limit=20)) == ["r1", "r2", "r3"]
    assert archive.asked == 1
