"""The storm at the size of a test run, and the judges of it."""

from __future__ import annotations

import pytest

from tests.chaos import soak
from tests.chaos.run import chaos


@pytest.mark.parametrize(("seed", "requests"), [(7, 450), (11, 200)])
def test_chaos_every_reply_is_right_or_a_clear_error_and_nothing_is_left(
    seed: int, requests: int
) -> None:
    """A long storm and a short one of another kind; after each all is as before."""
    report = chaos(seed=seed, requests=requests)
    print(report.text())
    assert len(report.seen) == requests
    assert report.outcomes["right"] > requests / 2
    assert report.counts["used"] > requests / 40
    assert {gust.name for gust in report.gusts} >= {"decoder is killed", "provider misbehaves"}


def test_soak_of_seconds_has_its_slopes() -> None:
    """The long run works at all; its verdict needs minutes."""
    report = soak.soak(minutes=0.1, real=False, strict=False)
    assert len(report.samples) >= 4
    assert report.requests > 10


@pytest.mark.parametrize(
    ("values", "grows"),
    [
        ([50.0, 50.1, 49.9, 50.0, 50.2, 49.9, 50.1, 50.0] * 4, False),
        ([50.0 + 0.1 * n for n in range(32)], True),
        ([40.0 + 10.0 * (n > 2) for n in range(32)], False),
    ],
)
def test_slope_of_noise_is_none_and_of_a_leak_is_one(values: list[float], grows: bool) -> None:
    """A rise at the start is warming up; one that goes on is a leak."""
    times = [60.0 * n for n in range(len(values))]
    assert soak.rises(times, values) == grows
