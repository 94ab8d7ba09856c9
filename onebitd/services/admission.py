"""The queue for the one slot: first come, first served, bounded, refused at once when full.

While nobody is in it, the slot may be lent to work that no client waits for. Such a loan takes no
place in the line: nobody is counted, or refused, because of it, and whoever comes has the slot as
soon as the borrower sees that it is wanted.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Final

import trio

from onebitd.core.errors import RequestError
from onebitd.core.handoff import Reason
from onebitd.core.slot_content import Prompt

_RETRY_AFTER_S: Final = 2
_AHEAD: Final = 2
"""The holder of the slot and the next in line may prefill: that overlap is what two devices are
for; one run ahead bounds what state files take."""


class Ticket:
    """A place in the line.

    Attributes:
        phase: where its request is, for `status`.
        granted: since when the slot is its (trio.current_time()), None until then.
        prompt: what it will leave in the slot, None as long as that is not known.
        work_ms: how long it is expected to need the slot, None when nothing is known.
        run_ms: how long its provider run is expected to take, None without one.
    """

    def __init__(self, admission: Admission, request_id: str) -> None:
        self._admission = admission
        self._moved = trio.Event()
        self.request_id = request_id
        self.phase = "queued"
        self.entered = time.monotonic()
        self.granted: float | None = None
        self.prompt: Prompt | None = None
        self.work_ms: float | None = None
        self.run_ms: float | None = None

    @property
    def place(self) -> int:
        """0 for the holder of the slot, 1 for the next, and so on."""
        return self._admission.place_of(self)

    async def wait_may_prefill(self) -> None:
        """Wait until at most one request is in front."""
        await self._wait_place(_AHEAD)

    async def wait_slot(self) -> None:
        """Wait until the slot is this request's, and nobody else's until `leave`."""
        await self._wait_place(1)

    async def _wait_place(self, place: int) -> None:
        admission = self._admission
        while True:
            here = admission.place_of(self)
            if admission.is_closed and here > 0 and not admission.keeps_waiting:
                raise _draining()
            if here < place and not (place == 1 and admission.loan is not None):
                if place == 1:
                    admission.last_holder = self
                    if self.granted is None:
                        self.granted = trio.current_time()
                return
            moved = self._moved
            await moved.wait()

    def leave(self) -> None:
        """Give up the place, or the slot; may be called twice."""
        self._admission.remove(self)

    def notice(self) -> None:
        """Wake whoever waits: the line has moved."""
        self._moved.set()
        self._moved = trio.Event()


class Loan:
    """The slot in the hands of work that can stop between any two steps."""

    def __init__(self, admission: Admission, request_id: str) -> None:
        self._admission = admission
        self.request_id = request_id
        self.entered = time.monotonic()

    @property
    def is_wanted(self) -> bool:
        """True as soon as a request is in the line, or there will be none: give the slot back."""
        return self._admission.holder is not None or self._admission.is_closed


class Admission:
    """The line.

    Args:
        max_pending: how many may wait behind the one that has the slot; may be set at any time,
            and turns away newcomers only.

    Attributes:
        loan: who has borrowed the slot.
        last_holder: the last request whose slot it was; None once it was lent since.
        idle_since: since when nobody is in the line (time.monotonic); of no use while somebody is.
    """

    def __init__(self, max_pending: int) -> None:
        self.max_pending = max_pending
        self._line: list[Ticket] = []
        self.is_closed = False
        self.keeps_waiting = False
        self.loan: Loan | None = None
        self.last_holder: Ticket | None = None
        self.idle_since = -math.inf
        self._empty = trio.Event()
        self._empty.set()

    @property
    def holder(self) -> Ticket | None:
        """The request that has the slot, None when it is free."""
        return self._line[0] if self._line else None

    @property
    def pending(self) -> int:
        """How many wait behind the holder."""
        return max(0, len(self._line) - 1)

    def enter(self, request_id: str) -> Ticket:
        """Take the last place in the line; the caller must `leave` it.

        Raises:
            RequestError: 503 with Retry-After when the line is full or closed.
        """
        if self.is_closed:
            raise _draining()
        if self._line and self.pending >= self.max_pending:
            raise RequestError(
                503,
                f"{self.pending} requests are waiting for the slot already (http.max_pending)",
                kind="unavailable_error",
                retry_after_s=_RETRY_AFTER_S,
                reason=Reason.QUEUE_FULL,
            )
        ticket = Ticket(self, request_id)
        self._line.append(ticket)
        if len(self._line) == 1:
            self._empty = trio.Event()
        return ticket

    def ahead_of(self, ticket: Ticket) -> list[Ticket]:
        """Return who is in front, the holder of the slot first."""
        return self._line[: self._line.index(ticket)]

    def place_of(self, ticket: Ticket) -> int:
        """Return 0 for the holder of the slot, 1 for the next, and so on."""
        return self._line.index(ticket)

    def remove(self, ticket: Ticket) -> None:
        """Take a ticket out of the line, wherever it is."""
        if ticket in self._line:
            self._line.remove(ticket)
            for other in self._line:
                other.notice()
            if not self._line:
                self.idle_since = time.monotonic()
                self._empty.set()

    @contextlib.contextmanager
    def lend(self, request_id: str) -> Iterator[Loan | None]:
        """Lend the slot for the block; yields None when there is nothing to lend.

        Args:
            request_id: whose it is, for `status`.
        """
        if self.holder is not None or self.is_closed or self.loan is not None:
            yield None
            return
        self.loan = Loan(self, request_id)
        try:
            yield self.loan
        finally:
            self.loan, self.last_holder = None, None
            for ticket in self._line:
                ticket.notice()

    def close(self, *, keep_waiting: bool = False) -> None:
        """Admit nobody any more; the holder goes on.

        Args:
            keep_waiting: those in the line keep their places, instead of being turned away.
        """
        self.is_closed = True
        self.keeps_waiting = keep_waiting
        for ticket in self._line:
            ticket.notice()

    async def wait_empty(self) -> None:
        """Wait until the line is empty."""
        await self._empty.wait()


def _draining() -> RequestError:
    return RequestError(
        503,
        "onebitd is stopping; try again when it is back",
        kind="unavailable_error",
        retry_after_s=_RETRY_AFTER_S,
        reason=Reason.DRAINING,
    )
