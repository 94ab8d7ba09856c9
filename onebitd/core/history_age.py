"""How late it is, for what goes by its age: a clock that jumped is not believed at once.

A machine may start with any time, and a wrong one ahead would make everything too old. What is
gone does not come back, so such a time has to hold for a day first.
"""

from __future__ import annotations

from typing import Final

HOLD_MS: Final = 86_400_000
"""A jump counts after both clocks have gone on evenly for so long."""
SLACK_MS: Final = 86_400_000
"""Going off by no more than this is no jump."""


class AgeClock:
    """The time by which records grow old, in milliseconds since 1970.

    Args:
        known_ms: a time that it certainly was, see `known_from`.
        steady_ms: of a clock that nobody sets and that goes on while the box sleeps.
    """

    def __init__(self, known_ms: int, steady_ms: int) -> None:
        self._known = known_ms, steady_ms
        self._doubt: tuple[int, int] | None = None

    def now_ms(self, wall_ms: int, steady_ms: int) -> int:
        """Return the time to go by: after a jump the one by which less is too old.

        Args:
            wall_ms, steady_ms: what the two clocks say now.
        """
        due = self._known[0] + steady_ms - self._known[1]
        if abs(wall_ms - due) > SLACK_MS:
            if self._doubt is None or _apart(self._doubt, wall_ms, steady_ms) > SLACK_MS:
                self._doubt = wall_ms, steady_ms
            if steady_ms - self._doubt[1] < HOLD_MS:
                return min(wall_ms, due)
        self._known, self._doubt = (wall_ms, steady_ms), None
        return wall_ms


def _apart(doubt: tuple[int, int], wall_ms: int, steady_ms: int) -> int:
    """Return by how much one clock has gone farther than the other since then."""
    return abs(wall_ms - doubt[0] - (steady_ms - doubt[1]))


def known_from(newest_ms: int, first_ms: int, before_ms: int | None) -> int:
    """Return a time that it certainly was when the records were written.

    Those of less than a day, long after all others, may come from a clock that was ahead.

    Args:
        newest_ms: when the newest record began.
        first_ms: when the oldest of those began that are less than `HOLD_MS` before it.
        before_ms: when the newest of all others began; None when there are none.
    """
    if before_ms is not None and first_ms - before_ms > SLACK_MS:
        return before_ms
    return newest_ms
