"""Tells whether the box was suspended: CLOCK_BOOTTIME goes on then, CLOCK_MONOTONIC does not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

_LEAST_SLEEP_S: Final = 1.0
"""Less is no suspend: the two clocks are read one after the other, and the box may be busy."""


def slept_so_far_s() -> float:
    """Return for how many seconds the box has been suspended since it booted (clock_gettime(2))."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


class SuspendWatch:
    """Made at the start of something that a suspend may spoil; asked when it has failed.

    Args:
        read: seconds of suspend since the boot.
    """

    def __init__(self, read: Callable[[], float] = slept_so_far_s) -> None:
        self._read = read
        self._before_s = read()

    def slept(self) -> bool:
        """Say whether the box was suspended since this was made."""
        return self._read() - self._before_s > _LEAST_SLEEP_S
