"""What keeping and counting handoffs costs the event loop, for each of them, and for a scrape.

The history's own list is the measure: a record has to go there anyway. The least of all rounds
counts, as what else the machine does can only add to it.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import random
import time
from collections.abc import Callable
from pathlib import Path

import trio

from onebitd.core.config import HistoryConfig
from onebitd.core.control_api import rfc3339
from onebitd.core.handoff import HandoffRecord, Outcome, Route
from onebitd.core.prompt_hash import KEY_BYTES, prompt_hash
from onebitd.services.history import History
from onebitd.services.history_keeper import HistoryKeeper
from onebitd.services.metrics import Metrics
from tests.bench.measure import table
from tests.surfaces.control_server import make_status

RECORDS = 2000
PROMPT_TOKENS = 3500
SCRAPES = 50


def records(number: int) -> list[HandoffRecord]:
    """Return handoffs with every field that one by file has."""
    dice = random.Random(1)  # noqa: S311 - figures, no secrets
    start = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    found = []
    for count in range(number):
        record = HandoffRecord(
            request_id=f"r{count}",
            time=rfc3339(start + dt.timedelta(seconds=count)),
            instance="bench",
            model="model",
            path="/v1/chat/completions",
            stream=True,
            outcome=Outcome.USED,
            route=Route.FILE,
            prompt_tokens=307,
            handed_tokens=306,
            evaluated_tokens=1,
            cached_tokens=306,
            reply_tokens=40,
            state_bytes=3_600_000,
            provider="provider",
        )
        for field in dataclasses.fields(record):
            if field.name.endswith("_ms"):
                setattr(record, field.name, round(dice.uniform(0.1, 900.0), 3))
        found.append(record)
    return found


def per_record_us(history: History, some: list[HandoffRecord]) -> float:
    """Return the microseconds of one record."""
    start = time.perf_counter()
    for record in some:
        history.add(record)
    return (time.perf_counter() - start) / len(some) * 1e6


async def kept_us(home: Path, some: list[HandoffRecord]) -> float:
    """Return the microseconds of a record that goes to the file, too."""
    history = History()
    keeper = HistoryKeeper(history, home, HistoryConfig(max_records=RECORDS, max_age_days=36500.0))
    async with trio.open_nursery() as nursery:
        await nursery.start(keeper.run)
        found = per_record_us(history, some)
        nursery.cancel_scope.cancel()
    return found


def bytes_per_record(home: Path, number: int) -> float:
    """Return the bytes of one of so many records in the file, its share of indexes included."""
    return (home / "history.db").stat().st_size / number


def least_us(rounds: int, act: Callable[[], object], times: int) -> float:
    """Return the least microseconds of one call."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(times):
            act()
        found.append((time.perf_counter() - start) / times * 1e6)
    return min(found)


def records_table(home: Path, rounds: int) -> str:
    """Measure, and return the table."""
    some = records(RECORDS)
    alone = min(per_record_us(History(), some) for _ in range(rounds))
    metrics = Metrics(make_status, lambda: 0)
    history = History()
    history.listen(metrics.count)
    counted = min(per_record_us(history, some) for _ in range(rounds))
    folders = [home / f"round-{number}" for number in range(rounds)]
    for folder in folders:
        folder.mkdir()
    kept = min(trio.run(kept_us, folder, some) for folder in folders)
    n_bytes = bytes_per_record(folders[0], RECORDS)
    ids, key = list(range(140_000, 140_000 + PROMPT_TOKENS)), bytes(KEY_BYTES)
    hashed = least_us(rounds, lambda: prompt_hash(ids, key), 200)
    scraped = least_us(rounds, lambda: metrics.exposition(None), SCRAPES)
    rows = [
        ["a record in the list", f"{alone:.1f}", "1.00"],
        ["... counted in the metrics", f"{counted:.1f}", f"{counted / alone:.2f}"],
        ["... kept in the file", f"{kept:.1f}", f"{kept / alone:.2f}"],
        [f"hash of {PROMPT_TOKENS} ids", f"{hashed:.1f}", f"{hashed / alone:.2f}"],
        ["a scrape", f"{scraped:.0f}", f"{scraped / alone:.0f}"],
    ]
    costs = table("what a handoff's record costs the event loop", ("", "us", "ratio"), rows)
    return f"{costs}\n\na record takes {n_bytes:.0f} bytes in the file"
