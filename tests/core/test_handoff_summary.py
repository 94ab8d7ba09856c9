"""Summaries of handoffs, against what the same records say when they are counted by hand."""

from __future__ import annotations

import collections
import json
import math
import statistics
from typing import Any
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from onebitd.core import handoff_summary
from onebitd.core.handoff import FIELDS, Outcome, Reason
from onebitd.core.handoff_summary import PARTS, TOKENS, percentile, summarise

TIMES = st.floats(min_value=0, max_value=1e6, allow_subnormal=False)
RECORDS = st.fixed_dictionaries(
    {"outcome": st.sampled_from(Outcome).map(str)},
    optional={
        "reason": st.sampled_from(list(Reason)[:3]).map(str),
        "prompt_hash": st.sampled_from(["a" * 16, "b" * 16]),
        "prompt_tokens": st.integers(min_value=0, max_value=10**6),
        **dict.fromkeys(PARTS, TIMES),
    },
)


def record(outcome: str, **fields: Any) -> dict[str, Any]:
    """Return a record of an outcome."""
    return {"time": "2026-05-01T12:00:00.000Z", "outcome": outcome, **fields}


def test_summarise_records_is_the_documented_shape() -> None:
    """Every key, every order, every figure."""
    found = summarise(
        [
            record("skipped", reason="policy", prompt_tokens=5, first_byte_ms=30),
            record("used", time="2026-05-01T11:00:00.000Z", prompt_hash="a", first_byte_ms=1.5),
            record(
                "used",
                time="2026-05-01T13:00:00.000Z",
                prompt_hash="a",
                prompt_tokens=101,
                handed_tokens=100,
                prefill_ms=50.0,
                first_byte_ms=2.5,
                reply_tokens=30,
                decode_ms=600.0,
            ),
        ]
    )
    first_byte = {"count": 2, "p50": 1.5, "p95": 2.5}
    prefill = {"count": 1, "p50": 50.0, "p95": 50.0}
    skipped = {"first_byte_ms": {"count": 1, "p50": 30, "p95": 30}}
    assert found == {
        "count": 3,
        "first_time": "2026-05-01T11:00:00.000Z",
        "last_time": "2026-05-01T13:00:00.000Z",
        "outcomes": {"used": 2, "skipped": 1},
        "reasons": {"policy": 1},
        "repeats": 1,
        "tokens": {
            "prompt_tokens": 106,
            "handed_tokens": 100,
            "evaluated_tokens": 0,
            "cached_tokens": 0,
            "reply_tokens": 30,
        },
        "rates": {
            "prefill_tokens_per_s": {"count": 1, "p50": 2000.0, "p95": 2000.0},
            "decode_tokens_per_s": {"count": 1, "p50": 50.0, "p95": 50.0},
        },
        "parts": {"prefill_ms": prefill, "first_byte_ms": {"count": 3, "p50": 2.5, "p95": 30}},
        "by_outcome": {
            "used": {
                "count": 2,
                "reasons": {},
                "parts": {"prefill_ms": prefill, "first_byte_ms": first_byte},
                "by_reason": {},
            },
            "skipped": {
                "count": 1,
                "reasons": {"policy": 1},
                "parts": skipped,
                "by_reason": {"policy": {"count": 1, "parts": skipped}},
            },
        },
    }
    assert list(found["outcomes"]) == ["used", "skipped"]
    assert json.loads(json.dumps(found)) == found


def test_summarise_nothing_has_every_key() -> None:
    """A reader needs no special case for a daemon that has just started."""
    found = summarise([])
    assert found == {
        "count": 0,
        "first_time": None,
        "last_time": None,
        "outcomes": {},
        "reasons": {},
        "repeats": 0,
        "tokens": dict.fromkeys(TOKENS, 0),
        "rates": {},
        "parts": {},
        "by_outcome": {},
    }


def test_summarise_what_is_no_figure_is_left_out_of_it_alone() -> None:
    """Lost records and values of another version spoil nothing."""
    bad: list[Any] = ["7", True, None, -1.0, math.nan, math.inf, 10**400, [], {}]
    records = [record("used", first_byte_ms=value, prompt_tokens=value) for value in bad]
    found = summarise([{"lost": 3}, *records, record("later", first_byte_ms=4.0)])
    assert found["outcomes"] == {"used": len(bad), "later": 1}
    assert found["parts"] == {"first_byte_ms": {"count": 1, "p50": 4.0, "p95": 4.0}}
    assert found["tokens"]["prompt_tokens"] == 0
    assert found["repeats"] == 0


def test_summarise_rate_without_end_is_none() -> None:
    """JSON has no infinity; nor has a reply of one token a speed, for which a decoder says 1 us."""
    records = [record("used", reply_tokens=10**30, decode_ms=ms) for ms in (1e-300, 1e31)]
    records += [record("used", reply_tokens=1, decode_ms=0.001)]
    records += [record("used", handed_tokens=10**200, prefill_ms=1e-200)]
    spread = {"count": 1, "p50": 100.0, "p95": 100.0}
    assert summarise(records)["rates"] == {"decode_tokens_per_s": spread}


def test_summarise_parts_are_fields_of_a_record() -> None:
    """A misspelled part would never be found."""
    assert {*PARTS, *TOKENS} <= set(FIELDS)


@given(st.lists(RECORDS, max_size=40))
def test_summarise_any_records_agree_with_counting_them_by_hand(
    records: list[dict[str, Any]],
) -> None:
    """Counts, reasons, repeats and percentiles of all, of each outcome and of each reason."""
    found = summarise(iter(records))
    assert found["outcomes"] == dict(collections.Counter(one["outcome"] for one in records))
    assert found["count"] == len(records)
    hashes = [one["prompt_hash"] for one in records if "prompt_hash" in one]
    assert found["repeats"] == len(hashes) - len(set(hashes))
    assert found["parts"] == spreads(records)
    for outcome, part in found["by_outcome"].items():
        mine = [one for one in records if one["outcome"] == outcome]
        reasons = collections.Counter(one["reason"] for one in mine if "reason" in one)
        assert part["reasons"] == dict(reasons)
        assert list(part["reasons"].values()) == sorted(reasons.values(), reverse=True)
        assert part["parts"] == spreads(mine)
        for reason, leaf in part["by_reason"].items():
            assert leaf["count"] == reasons[reason]
            assert leaf["parts"] == spreads([one for one in mine if one.get("reason") == reason])


@given(st.lists(TIMES, min_size=1, max_size=60), st.integers(min_value=1, max_value=100))
def test_percentile_is_the_least_value_that_so_many_do_not_exceed(
    values: list[float], percent: int
) -> None:
    """By nearest rank, as the documentation says; the p50 is the low median."""
    found = percentile(sorted(values), percent)
    enough = [one for one in values if sum(x <= one for x in values) * 100 >= percent * len(values)]
    assert found == min(enough)
    assert percentile(sorted(values), 50) == statistics.median_low(values)


def spreads(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what `summarise` is to say of the parts of some records, in the plainest way."""
    found = {}
    for part in PARTS:
        values = sorted(one[part] for one in records if part in one)
        if values:
            p95 = next(x for x in values if sum(y <= x for y in values) * 100 >= 95 * len(values))
            p50 = round(statistics.median_low(values), 3)
            found[part] = {"count": len(values), "p50": p50, "p95": round(p95, 3)}
    return found


@given(st.lists(TIMES, min_size=1, max_size=40), st.integers(min_value=1, max_value=9))
def test_summarise_many_records_are_sorted_in_parts_to_the_same_end(
    times: list[float], at_once: int
) -> None:
    """A long sort would hold up the whole daemon; the percentiles are the same to the last bit."""
    with mock.patch.object(handoff_summary, "_SORTED_AT_ONCE", at_once):
        found = summarise(record("used", total_ms=time) for time in times)["parts"]["total_ms"]
    ordered = sorted(times)
    assert found == {
        "count": len(times),
        "p50": round(percentile(ordered, 50), 3),
        "p95": round(percentile(ordered, 95), 3),
    }
