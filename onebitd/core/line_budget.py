"""How many lines of a talkative source may pass: a token bucket that counts what it refuses.

Pure: whoever asks brings the clock.
"""

from __future__ import annotations

from typing import Final

_BYTES_PER_TOKEN: Final = 256
"""A line costs one token, and one more for each of these: lines of 8 KiB fill a disk sooner."""
_RESUME_SHARE: Final = 0.1
"""An empty bucket gives nothing until this much is back: lines that belong together come together,
and there is one note about a hundred lost lines, not one beside each that gets through."""


class LineBudget:
    """A bucket of `burst` tokens, which fills up by `per_s` tokens a second.

    Args:
        burst: short lines that may come at once; at least 1.
        per_s: short lines a second after that, on the average; above 0.
    """

    def __init__(self, burst: int, per_s: float) -> None:
        self._burst = float(burst)
        self._per_s = per_s
        self._resume = max(1.0, burst * _RESUME_SHARE)
        self._tokens = self._burst
        self._filled_at_s: float | None = None
        self._dry = False
        self._left_out = 0

    @property
    def left_out(self) -> int:
        """How many lines were refused since `take_left_out`."""
        return self._left_out

    def admits(self, now_s: float, size_bytes: int) -> bool:
        """Say whether a line of this size may pass now; one that may not is counted.

        Args:
            now_s: of any clock that does not go back, seconds.
            size_bytes: of the line. A line that costs more than is there passes when anything is
                there, and the bucket is then in debt: no line is too long for ever.
        """
        if self._filled_at_s is not None:
            more = max(0.0, now_s - self._filled_at_s) * self._per_s
            self._tokens = min(self._burst, self._tokens + more)
        self._filled_at_s = now_s
        if self._tokens < (self._resume if self._dry else 1.0):
            self._dry = True
            self._left_out += 1
            return False
        self._dry = False
        self._tokens -= 1 + size_bytes // _BYTES_PER_TOKEN
        return True

    def take_left_out(self) -> int:
        """Return how many lines were refused since the last call, and count from 0 again."""
        count, self._left_out = self._left_out, 0
        return count
