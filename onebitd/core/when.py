"""Moments as people type them: `2h`, `yesterday`, `14:30`, `2026-01-31 14:30`.

Pure: the present moment and the time zone are arguments.
"""

from __future__ import annotations

import datetime as dt
import re
from typing import Final

EXAMPLES: Final = "2h, 90m, 3d, today, yesterday, monday, 14:30, 2026-01-31, 2026-01-31T14:30:00Z"

_UNITS: Final = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86400),
    **dict.fromkeys(("w", "week", "weeks"), 604800),
}
_DAYS: Final = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_SHORT_DAYS: Final = tuple(name[:3] for name in _DAYS)
_AMOUNT: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?([a-z]+) ?", re.ASCII)
_CLOCK: Final = re.compile(r"(\d{1,2}):(\d\d)(?::(\d\d))?", re.ASCII)
_DATE_T: Final = re.compile(r"^(\d{4}-\d\d-\d\d)t", re.ASCII)
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_RFC_3339: Final = re.compile(
    r"(\d{4}-\d\d-\d\d)[tT ](\d\d:\d\d(?::\d\d(?:\.\d{1,6})?)?) ?([zZ]|[+-]\d\d:\d\d)", re.ASCII
)
_MIDNIGHT: Final = dt.time()


def parse_when(text: str, now: dt.datetime, zone: dt.tzinfo | None = None) -> dt.datetime:
    """Return the moment that a person means, in UTC.

        90s  5m  2h  3d  1w  1h30m  2 hours ago     so long before `now`; a day is 24 hours here
        now, today, yesterday, monday (or mon) ...  the start of the day; the last Monday, or today
        14:30, monday 14:30, 14:30:05               the last time that it was so late
        yesterday 14:30, 2026-01-31, 2026-01-31 14:30, 2026-01-31T14:30:00
        2026-01-31T14:30:00Z, 2026-01-31 14:30+01:00

    Args:
        text: what was typed; case and surrounding blanks do not count.
        now: the present, with a time zone.
        zone: the zone of days and clocks, None for that of the machine (TZ).

    A day's start or time that a change of the clocks leaves out is the moment that it would have
    been without the change; of a time that occurs twice, the first is meant.

    Raises:
        ValueError: it is nothing of these; the message shows examples.
    """
    word = " ".join(text.lower().split())
    try:
        moment = _ago(word, now) or _absolute(word) or _local(word, now, zone)
        if moment is not None:
            return moment.astimezone(dt.UTC)
    except (ValueError, OverflowError):
        pass  # of such a form, and no such day, hour, or too far from now
    raise ValueError(f"{text!r} is no time: write it like {EXAMPLES}")


def _ago(word: str, now: dt.datetime) -> dt.datetime | None:
    """Return the moment so long before now, or None for what is no duration."""
    if word == "now":
        return now
    rest = word.removesuffix("ago").removeprefix("-").strip()
    seconds = 0.0
    place = 0
    while place < len(rest):
        found = _AMOUNT.match(rest, place)
        if found is None or found[2] not in _UNITS:
            return None
        seconds += float(found[1]) * _UNITS[found[2]]
        place = found.end()
    # In UTC: in a local zone Python would subtract from the wall clock.
    return now.astimezone(dt.UTC) - dt.timedelta(seconds=seconds) if rest else None


def _absolute(word: str) -> dt.datetime | None:
    """Return the moment of a text that has its own zone, or None."""
    found = _RFC_3339.fullmatch(word)
    if found is None:
        return None
    day, clock, offset = found.groups()
    return dt.datetime.fromisoformat(f"{day}T{clock}{offset.upper().replace('Z', '+00:00')}")


def _local(word: str, now: dt.datetime, zone: dt.tzinfo | None) -> dt.datetime | None:
    """Return the moment of a day, a time of the day or both in the zone, or None."""
    here = now.astimezone(zone)
    day_word, _, clock_word = (_DATE_T.sub(r"\1 ", word)).partition(" ")
    if _CLOCK.fullmatch(day_word) and not clock_word:
        moment = _at(here.date(), _clock(day_word), zone)
        return moment if moment <= now else _at(_before(here.date()), _clock(day_word), zone)
    day = _day(day_word, here.date())
    if day is None or (clock_word and not _CLOCK.fullmatch(clock_word)):
        return None
    clock = _clock(clock_word) if clock_word else _MIDNIGHT
    moment = _at(day, clock, zone)
    if moment > now and day_word[:3] in _SHORT_DAYS:
        return _at(day - dt.timedelta(days=7), clock, zone)
    return moment


def _day(word: str, today: dt.date) -> dt.date | None:
    if _DATE.fullmatch(word):
        return dt.date.fromisoformat(word)
    if word == "today":
        return today
    if word == "yesterday":
        return _before(today)
    for number, name in enumerate(_DAYS):
        if word in (name, _SHORT_DAYS[number]):
            return today - dt.timedelta(days=(today.weekday() - number) % 7)
    return None


def _clock(word: str) -> dt.time:
    hour, minute, second = map(int, [*word.split(":"), "0"][:3])
    return dt.time(hour, minute, second)


def _before(day: dt.date) -> dt.date:
    return day - dt.timedelta(days=1)


def _at(day: dt.date, clock: dt.time, zone: dt.tzinfo | None) -> dt.datetime:
    """Return that wall clock's moment in UTC; a naive time is one of the machine's own zone."""
    naive = dt.datetime.combine(day, clock)
    if zone is not None:
        return naive.replace(tzinfo=zone).astimezone(dt.UTC)
    # Not by astimezone(): of a time that is left out it takes the offset of after the change.
    return dt.datetime.fromtimestamp(naive.timestamp(), dt.UTC)
