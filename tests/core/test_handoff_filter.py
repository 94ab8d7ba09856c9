"""The filter of handoffs, and the times in it."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from onebitd.core.handoff_filter import HandoffFilter, parse_time

RECORD = {
    "time": "2026-05-01T12:00:00.500Z",
    "outcome": "fallback",
    "reason": "lock_busy",
    "route": "file",
}


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, True),
        ({"limit": 0}, True),
        ({"outcome": "fallback", "reason": "lock_busy", "route": "file"}, True),
        ({"outcome": "used"}, False),
        ({"reason": "bad_state"}, False),
        ({"route": "shared"}, False),
        ({"since": parse_time("2026-05-01T12:00:00.500Z")}, True),
        ({"since": parse_time("2026-05-01T14:00:00.500+02:00")}, True),
        ({"since": parse_time("2026-05-01T12:00:00.501Z")}, False),
    ],
)
def test_filter_matches_what_is_wanted(wanted: dict[str, Any], expected: bool) -> None:
    """Words and time together; times compare as moments; the limit says nothing about one."""
    assert HandoffFilter(**wanted).matches(RECORD) is expected


def test_filter_wants_a_field_that_the_record_has_not_is_no_match() -> None:
    """A used handoff has no reason."""
    record = {"time": RECORD["time"], "outcome": "used"}
    assert not HandoffFilter(reason="lock_busy").matches(record)
    assert not HandoffFilter(route="file").matches(record)


def test_filter_parameters_are_what_is_given() -> None:
    """What the daemon is asked with."""
    since = dt.datetime(2026, 5, 1, tzinfo=dt.UTC)
    wanted = HandoffFilter(limit=0, outcome="used", reason="policy", route="file", since=since)
    assert wanted.parameters() == {
        "limit": "0",
        "outcome": "used",
        "reason": "policy",
        "route": "file",
        "since": "2026-05-01T00:00:00+00:00",
    }
    assert HandoffFilter().parameters() == {}


@pytest.mark.parametrize("text", ["", "yesterday", "2026-05-01", "2026-05-01T00:00:00", "12:00Z"])
def test_parse_time_not_a_moment_is_an_error_that_shows_one(text: str) -> None:
    """A time without its zone is refused too: nobody guesses."""
    with pytest.raises(ValueError, match="RFC 3339 time such as 2026-"):
        parse_time(text)


def test_parse_time_zulu_is_utc() -> None:
    """The daemon's own format, and fractions."""
    found = parse_time("2026-01-31T12:00:00.5Z")
    assert found == dt.datetime(2026, 1, 31, 12, 0, 0, 500_000, tzinfo=dt.UTC)
