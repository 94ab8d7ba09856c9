"""Moments as people type them, in a zone whose clocks change."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import time
import zoneinfo
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebitd.core.when import EXAMPLES, parse_when

BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")
NOW = dt.datetime(2026, 5, 6, 12, 10, tzinfo=dt.UTC)
"""A Wednesday, 14:10 in Berlin."""


@pytest.fixture(params=["argument", "machine"])
def zone(request: pytest.FixtureRequest) -> Iterator[dt.tzinfo | None]:
    """Berlin, as an argument and as the zone of the machine."""
    if request.param == "argument":
        yield BERLIN
        return
    before = os.environ.get("TZ")
    os.environ["TZ"] = "CET-1CEST,M3.5.0,M10.5.0/3"
    time.tzset()
    try:
        yield None
    finally:
        if before is None:
            del os.environ["TZ"]
        else:
            os.environ["TZ"] = before
        time.tzset()


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("30s", "2026-05-06T12:09:30"),
        ("90m", "2026-05-06T10:40:00"),
        ("2h", "2026-05-06T10:10:00"),
        ("3d", "2026-05-03T12:10:00"),
        ("1w", "2026-04-29T12:10:00"),
        ("1h30m", "2026-05-06T10:40:00"),
        ("1.5h", "2026-05-06T10:40:00"),
        (" 2 Hours  ago ", "2026-05-06T10:10:00"),
        ("-2h", "2026-05-06T10:10:00"),
        ("now", "2026-05-06T12:10:00"),
        ("today", "2026-05-05T22:00:00"),
        ("yesterday", "2026-05-04T22:00:00"),
        ("yesterday 9:30", "2026-05-05T07:30:00"),
        ("wednesday", "2026-05-05T22:00:00"),
        ("Thu", "2026-04-29T22:00:00"),
        ("monday 08:00", "2026-05-04T06:00:00"),
        ("wednesday 14:10", "2026-05-06T12:10:00"),
        ("wed 14:11", "2026-04-29T12:11:00"),
        ("14:10", "2026-05-06T12:10:00"),
        ("14:11", "2026-05-05T12:11:00"),
        ("2:05:09", "2026-05-06T00:05:09"),
        ("2026-01-31", "2026-01-30T23:00:00"),
        ("2026-01-31 14:30", "2026-01-31T13:30:00"),
        ("2026-01-31T14:30:05", "2026-01-31T13:30:05"),
        ("2026-01-31T14:30:00Z", "2026-01-31T14:30:00"),
        ("2026-01-31 14:30:00.25+05:30", "2026-01-31T09:00:00.250000"),
    ],
)
def test_parse_when_what_people_type_is_that_moment(
    text: str, moment: str, zone: dt.tzinfo | None
) -> None:
    """Durations, days, clocks and dates in the zone of the reader, zones of their own."""
    found = parse_when(text, NOW, zone)
    assert found == dt.datetime.fromisoformat(moment).replace(tzinfo=dt.UTC)
    assert found.utcoffset() == dt.timedelta(0)


@pytest.mark.parametrize(
    ("now", "text", "moment"),
    [
        ("2026-03-29T10:00", "today", "2026-03-28T23:00"),
        ("2026-03-29T10:00", "24h", "2026-03-28T10:00"),
        ("2026-03-29T10:00", "yesterday 12:00", "2026-03-28T11:00"),
        ("2026-03-29T10:00", "2026-03-29 02:30", "2026-03-29T01:30"),
        ("2026-03-29T10:00", "2:30", "2026-03-29T01:30"),
        ("2026-10-25T10:00", "yesterday", "2026-10-23T22:00"),
        ("2026-10-25T10:00", "today", "2026-10-24T22:00"),
        ("2026-10-25T10:00", "2026-10-25 02:30", "2026-10-25T00:30"),
        ("2026-10-25T10:00", "1d", "2026-10-24T10:00"),
        ("2026-10-25T10:00", "sunday 11:30", "2026-10-18T09:30"),
    ],
)
def test_parse_when_clocks_change_days_and_durations_stay_what_they_are(
    now: str, text: str, moment: str, zone: dt.tzinfo | None
) -> None:
    """A day starts at its midnight; 24 hours are 24 hours; a time that occurs twice is the first.

    The machine's zone used to put a time that is left out an hour too early.
    """
    here = dt.datetime.fromisoformat(now).replace(tzinfo=dt.UTC)
    assert parse_when(text, here, zone) == dt.datetime.fromisoformat(moment).replace(tzinfo=dt.UTC)


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "2", "h", "2x", "ago", "-", "2h 3", "tomorrow", "today today", "24:00", "1:60"),
        *("2026-02-30", "20260131", "2026-01-31 14", "2026-01-31T14:30:00+25:00", "99999999w"),
        *("0001-01-01T00:00:00+14:00", "1e3h", "٣h", "2h\x00"),
    ],
)
def test_parse_when_anything_else_is_an_error_with_examples(text: str) -> None:
    """Whoever mistypes it learns what can be typed."""
    with pytest.raises(ValueError, match=r"is no time: write it like 2h, ") as caught:
        parse_when(text, NOW, BERLIN)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", EXAMPLES.split(", "))
def test_parse_when_every_example_of_the_error_can_be_typed(text: str) -> None:
    """An example that is refused is worse than none; and all lie in the past."""
    assert parse_when(text, NOW, BERLIN) <= NOW


@given(st.text(max_size=24))
def test_parse_when_any_text_is_a_moment_or_a_value_error(text: str) -> None:
    """Nothing else escapes."""
    with contextlib.suppress(ValueError):
        assert parse_when(text, NOW, BERLIN).tzinfo is dt.UTC
