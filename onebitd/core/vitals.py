"""Whether a decoder is well: when its silence is a hang, and when its errors ask for a probe.

Silence alone means nothing: a long prefill sends no byte for minutes. What tells the two apart is
work, and work is processor time, traffic with the disk, or a GPU's engine that was busy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

_LEAST_CPU_SHARE: Final = 0.005
"""Of one processor. Answers to /health, and a server's timers, take a tenth of that."""
_LEAST_CPU_S: Final = 0.02
_LEAST_DISK_BYTES: Final = 1 << 20
"""A model that was pushed out of memory comes back page by page, with hardly any processor time."""
_MAX_GAP_S: Final = 30.0
"""Looks are never so far apart, unless we were stopped ourselves: the decoder may have been too."""
_FIRST_LOOK_S: Final = 15.0
_NEXT_LOOK_S: Final = 5.0
_LOOKS: Final = 4
"""At least so many fit into `backend.hang_s`."""
_STATES: Final = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "stuck in a call"}

_NOT_ABLE: Final = 501
_LEAST_FAILED: Final = 500
URGENT: Final = 3
"""After so many errors in a row the next request waits for the probe."""
_FIRST_PAUSE_S: Final = 60.0
_LAST_PAUSE_S: Final = 480.0


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """What a decoder's processes have done since they began; each only grows.

    Attributes:
        cpu_s: seconds of processor time by process id, of all its threads.
        disk_bytes: read and written by process id; without those that cannot be read.
        gpu: busy time by engine, in whatever unit its driver counts.
        state: of the first process, a letter of proc_pid_stat(5).
    """

    cpu_s: Mapping[int, float]
    disk_bytes: Mapping[int, int]
    gpu: Mapping[str, int]
    state: str = "S"


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """One look at a decoder that owes answers.

    Attributes:
        at: when, in seconds.
        heard: how many pieces of its reply each open call has got, by its number.
        waiting: the numbers of those that wait for a byte.
        progress: None when it could not be read: nothing follows from such a look.
        health: whether /health answered.
    """

    at: float
    heard: Mapping[int, int]
    waiting: frozenset[int]
    progress: Progress | None
    health: bool


def look_pause_s(hang_s: float, *, is_silent: bool) -> float:
    """Return how long to wait for the next look.

    >>> look_pause_s(120, is_silent=False), look_pause_s(120, is_silent=True)
    (15.0, 5.0)
    """
    return min(_NEXT_LOOK_S if is_silent else _FIRST_LOOK_S, hang_s / _LOOKS)


class Stillness:
    """A stretch of time in which a call waited, no reply went on, and the decoder did no work.

    Attributes:
        is_silent: the last look found no reply that goes on: look again soon.
    """

    def __init__(self) -> None:
        self._since: Look | None = None
        self._last: Look | None = None
        self._waiting: frozenset[int] = frozenset()
        self._health = False
        self.is_silent = False

    def hang(self, look: Look, hang_s: float) -> str | None:
        """Take in a look; return why the decoder hangs, None as long as that cannot be said.

        Args:
            look: later than all before.
            hang_s: how long an honest decoder may do nothing.
        """
        since, last = self._since, self._last
        self._last = look
        still = self._waiting & look.waiting
        self.is_silent = last is not None and bool(still) and not _goes_on(last, look)
        if since is None or not self.is_silent:
            self._begin(look)
            return None
        before, now = since.progress, look.progress
        if before is None or now is None or _has_worked(before, now, hang_s):
            self._begin(look)
            return None
        self._waiting = still
        self._health = self._health or look.health
        still_s = look.at - since.at
        if still_s < hang_s:
            return None
        cpu_s = _grown(before.cpu_s, now.cpu_s)
        words = (
            f"it hung: no byte of an answer and {cpu_s:.2f} s of processor time in "
            f"{still_s:.0f} s, /health {'answered' if self._health else 'was silent'}"
        )
        state = _STATES.get(now.state)
        return words if state is None else f"{words}, its process is {state}"

    def _begin(self, look: Look) -> None:
        self._since = look
        self._waiting = look.waiting
        self._health = look.health


def _goes_on(last: Look, look: Look) -> bool:
    """Say whether a reply went on, or whether nobody can know."""
    if look.at - last.at > _MAX_GAP_S:
        return True
    return any(count > last.heard.get(number, count) for number, count in look.heard.items())


def _has_worked(before: Progress, now: Progress, hang_s: float) -> bool:
    least_cpu_s = max(_LEAST_CPU_S, _LEAST_CPU_SHARE * hang_s)
    if _grown(before.cpu_s, now.cpu_s) >= least_cpu_s:
        return True
    if _grown(before.disk_bytes, now.disk_bytes) >= _LEAST_DISK_BYTES:
        return True
    return any(value > before.gpu.get(engine, 0) for engine, value in now.gpu.items())


def _grown(before: Mapping[int, float], now: Mapping[int, float]) -> float:
    """Return by how much the sum has grown; what has ended counts for nothing, what is new whole.

    >>> _grown({1: 5.0, 2: 1.0}, {1: 6.0, 3: 0.5})
    1.5
    """
    return sum(value - min(value, before.get(key, 0)) for key, value in now.items())


def is_failure(status: int) -> bool:
    """Say whether a status may mean that the decoder is not well.

    >>> [status for status in (200, 400, 500, 501, 502) if is_failure(status)]
    [500, 502]
    """
    return status >= _LEAST_FAILED and status != _NOT_ABLE


class Suspicion:
    """Errors of a decoder in a row, and when they are worth a probe.

    A probe costs whoever comes next the beginning of a prompt that was in the slot. Some requests
    are answered with a 500 by a decoder that is well; so probes that found nothing come further and
    further apart.

    Attributes:
        failures: in a row.
        status: of the last.
    """

    def __init__(self) -> None:
        self.failures = 0
        self.status = 0
        self._not_before = 0.0
        self._pause_s = _FIRST_PAUSE_S

    def failed(self, status: int) -> None:
        """A request was answered so."""
        self.failures += 1
        self.status = status

    def worked(self) -> None:
        """A reply was generated: whatever failed before, failed by itself."""
        self.failures = 0

    def wait_s(self, now: float) -> float | None:
        """Return in how many seconds a probe is due, None without a suspicion."""
        return max(0.0, self._not_before - now) if self.failures else None

    def is_urgent(self, now: float) -> bool:
        """Say whether the next request has to wait for a probe."""
        return self.failures >= URGENT and now >= self._not_before

    def found_well(self, now: float) -> None:
        """A probe was answered."""
        self.failures = 0
        self._not_before = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)
