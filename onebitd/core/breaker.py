"""The breaker: when failures in a row end a provider's service, and when it is tried again.

`LIMITS` has the numbers. Failures of any class in a row count together, against the least threshold
of the classes among them: a device that does two kinds of harm in turn is no better than one that
does one, and a request that pays a provider's whole time limit must stay rare, whatever came in
between. Which failures count, and as what, is in `core.failure_class`.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Final

from onebitd.core.failure_class import FailureClass, classify
from onebitd.core.wording import Wording

__all__ = ("LIMITS", "Breaker", "BreakerStatus", "FailureClass", "Limit", "State", "classify")


class State(enum.StrEnum):
    """Closed: the provider is called. Half open: it is being tried, and no request waits for it."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclasses.dataclass(frozen=True, slots=True)
class Limit:
    """When a class opens the breaker, and when the provider is tried again.

    Attributes:
        threshold: failures in a row.
        first_s, last_s: the first pause, and what it doubles up to.
    """

    threshold: int
    first_s: float
    last_s: float

    def pause_s(self, tries: int) -> float:
        """Return the pause after so many tries in vain."""
        return min(math.ldexp(self.first_s, min(tries, 30)), self.last_s)


LIMITS: Final = {
    # Cheap to meet and soon over. One or two may be the other program's turn on the device.
    FailureClass.BUSY: Limit(3, 5.0, 60.0),
    # Does not heal by itself, but for a device node that udev is about to hand over: hence two. It
    # is somebody's settings that have to change, and they look at what it says: no growing pause.
    FailureClass.DENIED: Limit(2, 300.0, 300.0),
    # By default each costs a request 120 s. One may be one odd prompt; a second is paid to know.
    FailureClass.TIMEOUT: Limit(2, 60.0, 3600.0),
    # Costs little, and one prompt may crash what others do not. A driver's reset takes seconds.
    FailureClass.CRASH: Limit(3, 10.0, 600.0),
    # Every further run would be stuck as well. Looking whether it is over starts none.
    FailureClass.WEDGED: Limit(1, 5.0, 60.0),
    # Heals when somebody changes a program or a model: an update, while the daemon runs.
    FailureClass.BAD_STATE: Limit(3, 60.0, 3600.0),
    # The driver brings the device up again within seconds, and nothing is known to be wrong.
    FailureClass.SUSPENDED: Limit(1, 5.0, 5.0),
}


@dataclasses.dataclass(frozen=True, slots=True)
class BreakerStatus:
    """The breaker as of now; all but `failures` are None when it is closed.

    Attributes:
        failures: in a row; those that opened it when it is not closed.
        since: when it opened, RFC 3339.
        next_try_s: until the next try, 0 while that is due or under way.
        detail: the sentence.
    """

    state: State = State.CLOSED
    failures: int = 0
    failure_class: FailureClass | None = None
    since: str | None = None
    next_try_s: float | None = None
    detail: str | None = None


class Breaker:
    """The state machine. Times are monotonic seconds, and given.

        closed --failures in a row--> open --the pause is over--> half open
           ^                           ^ |                          | |
           |                           +-|------the try failed------+ |
           +------------reset------------+-------the try was good------+

    After a good try it is on probation until a handoff was used: the next failure opens it again,
    and the pauses go on growing. A try is short; what fails only with long prompts must not cost
    two requests its time limit after each.

    Attributes:
        state: see `State`.
        failure_class: of the last failure that counted, None when none did since it was closed.
        failures: that counted, in a row.
        opened_at: when it opened.
        next_try_at: when it is to be tried again; infinite unless it is open.
    """

    def __init__(self) -> None:
        self._close()
        self._proved()

    def _close(self) -> None:
        self.state = State.CLOSED
        self.failure_class: FailureClass | None = None
        self.failures = 0
        self.opened_at = -math.inf
        self.next_try_at = math.inf
        self._kinds: set[FailureClass] = set()
        self._last_words = ""
        self._looks = 0  # in vain, whether what must be over before a try is

    def _proved(self) -> None:
        self._tries = 0  # in vain, or good and then not borne out
        self._on_probation = False

    def fail(self, kind: FailureClass, detail: str, now: float) -> bool:
        """Count a failed handoff; True when that opened the breaker, or made it wedged.

        One that comes when it is not closed had begun before: it changes nothing, unless the device
        turns out to be wedged.
        """
        if self.state is not State.CLOSED:
            if kind is not FailureClass.WEDGED or self.failure_class is kind:
                return False
            self._open(kind, detail, now, opened_at=self.opened_at)
            return True
        self.failures += 1
        self._kinds.add(kind)
        self.failure_class, self._last_words = kind, detail
        threshold = min(LIMITS[one].threshold for one in self._kinds)
        if self.failures < threshold and not self._on_probation:
            return False
        self._open(kind, detail, now, opened_at=now)
        return True

    def _open(self, kind: FailureClass, detail: str, now: float, *, opened_at: float) -> None:
        self.state = State.OPEN
        self._kinds.add(kind)
        self.failure_class, self._last_words = kind, detail
        self.opened_at = opened_at
        self.next_try_at = now + LIMITS[kind].pause_s(self._tries)

    def succeed(self) -> None:
        """A handoff was used: the count begins again.

        One that ends when it is not closed had begun before; only a try closes it then.
        """
        if self.state is State.CLOSED:
            self._close()
            self._proved()

    def is_due(self, now: float) -> bool:
        """Say whether it is time for a try."""
        return self.state is State.OPEN and now >= self.next_try_at

    def begin_try(self) -> None:
        """It is being tried."""
        self.state, self.next_try_at = State.HALF_OPEN, math.inf

    def end_try(self, kind: FailureClass | None, detail: str, now: float) -> None:
        """The try failed, with this class; without one it said nothing, and the pause stays."""
        if self.state is not State.HALF_OPEN or self.failure_class is None:
            return  # reset meanwhile
        if kind is not None:
            self._tries += 1
        known = self.failure_class if kind is None else kind
        self._open(
            known, self._last_words if kind is None else detail, now, opened_at=self.opened_at
        )

    def pass_try(self) -> bool:
        """The try was good; True when that closed the breaker."""
        if self.state is not State.HALF_OPEN:
            return False  # reset meanwhile
        self._close()
        self._tries += 1
        self._on_probation = True
        return True

    def postpone(self, now: float) -> None:
        """What must be over before a try is not: look again after the pause of the class."""
        if self.state is State.OPEN and self.failure_class is not None:
            self._looks += 1
            self.next_try_at = now + LIMITS[self.failure_class].pause_s(self._looks)

    def reset(self) -> bool:
        """Close it and forget everything; True when it was not closed."""
        was_closed = self.state is State.CLOSED
        self._close()
        self._proved()
        return not was_closed

    def wording(self, now: float) -> Wording | None:
        """Return why the provider is not called, None while it is.

        The full sentence has the last failure's detail, which may quote the provider.

        Args:
            now: for the times in it.
        """
        if self.state is State.CLOSED or self.failure_class is None:
            return None
        words = f"{self._how_often()}, not called for {_span(now - self.opened_at)}"
        next_try = f"; {self._next_try(now)}"
        return Wording(f"{words}, last: {self._last_words}{next_try}", words + next_try)

    def sentence(self, now: float) -> str | None:
        """Return the full one."""
        wording = self.wording(now)
        return None if wording is None else wording.full

    def _how_often(self) -> str:
        kinds = sorted(self._kinds)
        times = {0: "", 1: "", 2: " twice in a row"}.get(
            self.failures, f" {self.failures} times in a row"
        )
        if len(kinds) == 1:
            return f"{kinds[0]}{times}"
        others = ", ".join(kind for kind in kinds if kind != self.failure_class)
        return f"{self.failure_class}, with {others} before it"

    def _next_try(self, now: float) -> str:
        if self.state is State.HALF_OPEN:
            return "being tried now"
        left_s = self.next_try_at - now
        if self.failure_class is FailureClass.WEDGED:
            when = f"in {_span(left_s)}" if left_s > 0 else "now"
            return f"tried again once that is over, looked at {when}"
        return f"tried again in {_span(left_s)}" if left_s > 0 else "tried again in a quiet moment"


def _span(seconds: float) -> str:
    """Return `43 s`, `12 min` or `2 h`, rounded up."""
    whole = max(1, math.ceil(seconds))
    if whole < 120:
        return f"{whole} s"
    return f"{math.ceil(whole / 60)} min" if whole < 7200 else f"{math.ceil(whole / 3600)} h"
