"""Which time counts for what grows old, when the clock jumps."""

from __future__ import annotations

import pytest

from onebitd.core.history_age import AgeClock, known_from

HOUR = 3_600_000
DAY = 24 * HOUR
NOW = 20_000 * DAY
"""When the newest record began."""
BOOT = 5 * DAY
"""What the steady clock says as the file is opened."""

Look = tuple[float, float, float]
"""Hours since the opening; by how many hours the clock is ahead of that, and what counts is."""


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param([(0, 0, 0), (1, 0, 0), (30 * 24, 0, 0)], id="idle for a month"),
        pytest.param([(0, 0.1, 0.1), (9, 23, 23), (9.5, 23, 23)], id="within a day"),
        pytest.param([(1, 9e5, 0), (2, 9e5, 0), (3, 0, 0), (99, 0, 0)], id="ahead and back"),
        pytest.param([(1, 9e5, 0), (24.9, 9e5, 0), (25, 9e5, 9e5), (26, 9e5, 9e5)], id="held"),
        pytest.param([(1, 9e5, 0), (20, 5e5, 0), (30, 5e5, 0), (44, 5e5, 5e5)], id="jumps again"),
        pytest.param([(1, 9e5, 0), (20, 0, 0), (21, 9e5, 0), (40, 9e5, 0)], id="ahead twice"),
        pytest.param([(0, 1440, 0), (23, 1440, 0), (24, 1440, 1440)], id="off for 60 days"),
        pytest.param([(0, -4e5, -4e5), (1, -4e5, -4e5), (2, 0, 0)], id="boots at 1970"),
        pytest.param([(1, -3, -3), (2, 0, 0)], id="a little back"),
        pytest.param(
            [(1, 9e5, 0), (25, 9e5, 9e5), (30, 0, 0), (54, 0, 0), (55, 9e5, 0), (56, 0, 0)],
            id="held and put right",
        ),
    ],
)
def test_now_ms_of_a_clock_that_jumps_ahead_is_the_old_one_for_a_day(looks: list[Look]) -> None:
    """Of two times the one by which less is too old, until the other has held for a day."""
    clock = AgeClock(NOW, BOOT)
    for hours, ahead, expected in looks:
        passed = round(hours * HOUR)
        found = clock.now_ms(NOW + passed + round(ahead * HOUR), BOOT + passed)
        assert (found - NOW - passed) / HOUR == expected, hours


def test_now_ms_of_an_empty_file_begun_in_1970_goes_on_there_for_a_day() -> None:
    """What was written before the time came over the net does not go as soon as it does."""
    clock = AgeClock(0, 0)
    assert clock.now_ms(HOUR, HOUR) == HOUR
    assert clock.now_ms(NOW, HOUR) == HOUR
    assert clock.now_ms(NOW + DAY, DAY + HOUR) == NOW + DAY


@pytest.mark.parametrize(
    ("first", "before", "known"),
    [
        (NOW, None, NOW),
        (NOW - HOUR, NOW - 25 * HOUR, NOW),
        (NOW - HOUR, NOW - 26 * HOUR, NOW - 26 * HOUR),
        (NOW - 24 * HOUR + 1, NOW - 48 * HOUR, NOW - 48 * HOUR),
        (NOW, 0, 0),
    ],
)
def test_known_from_records_far_after_the_others_is_that_of_the_others(
    first: int, before: int | None, known: int
) -> None:
    """A restart in a wrong hour finds what was written in it, and does not go by that."""
    assert known_from(NOW, first, before) == known
