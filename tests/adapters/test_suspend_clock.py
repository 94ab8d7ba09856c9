"""onebitd.adapters.suspend_clock: the two clocks."""

from __future__ import annotations

import pytest

from onebitd.adapters.suspend_clock import SuspendWatch, slept_so_far_s


@pytest.mark.parametrize(
    ("more_s", "slept"), [(0.0, False), (0.9, False), (1.1, True), (1e5, True)]
)
def test_slept_is_true_when_the_clocks_moved_apart_by_more_than_a_second(
    more_s: float, slept: bool
) -> None:
    """Reading one clock after the other is no suspend."""
    readings = iter([7.0, 7.0 + more_s])
    assert SuspendWatch(lambda: next(readings)).slept() is slept


def test_slept_on_a_box_that_is_awake_is_false() -> None:
    """The kernel's own clocks: boot time is never behind, and does not run away."""
    assert slept_so_far_s() > -0.1
    assert not SuspendWatch().slept()
