"""The requests that are being served: who they are, how far they are, and how to end one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import trio

from onebitd.core.control_api import RequestInFlight

if TYPE_CHECKING:
    from onebitd.services.admission import Ticket
    from onebitd.services.exchange import Exchange

CancelledBy: TypeAlias = Literal["operator", "draining"]

ENDING: Final = "ending"
"""The phase of a request that was cancelled and is not over: what it did to the slot is undone, or
its client is told."""


class Entry:
    """One request, from its head to its end.

    Attributes:
        scope: around all that is done for it.
        exchange: on the handoff route, once its body was read.
        ticket: its place in the line, where it has one outside the handoff route.
        cancelled_by: who ended it, None while nobody has. A client that left ends its own.
    """

    def __init__(
        self, method: str, path: str, request_id: str, has_left: Callable[[], bool]
    ) -> None:
        self.method = method
        self.path = path
        self.request_id = request_id
        self.scope = trio.CancelScope()
        self.exchange: Exchange | None = None
        self.ticket: Ticket | None = None
        self.cancelled_by: CancelledBy | None = None
        self._has_left = has_left
        self._release: Callable[[], None] = lambda: None
        self._phase = "head"
        self._began = time.monotonic()

    @property
    def phase(self) -> str:
        """Where it is: `head`, `body`, `pass`, that of its ticket, or ENDING."""
        if self.scope.cancel_called:
            return ENDING
        if self.exchange is not None:
            return self.exchange.phase
        return self._phase if self.ticket is None else self.ticket.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase = phase

    def cancel(self, by: CancelledBy) -> None:
        """End it; may be called twice. The first cause counts, a client that has left included.

        A reply that runs lets go of decoder and slot at once, even if its client takes nothing;
        what must not be left half done comes to its end first: a restore, an adoption, a provider
        that is being killed.
        """
        if self.cancelled_by is None and not self._has_left():
            self.cancelled_by = by
        self.scope.cancel()
        self._release()

    @contextlib.contextmanager
    def releasing(self, release: Callable[[], None]) -> Iterator[None]:
        """Have a cancel during the block give up at once what is held for it.

        Args:
            release: lets go of the decoder and of the place in the line; may be called twice.
        """
        self._release = release
        try:
            yield
        finally:
            self._release = lambda: None

    def describe(self) -> RequestInFlight:
        """Return what is told of it, as of now."""
        exchange = self.exchange
        return RequestInFlight(
            request_id=self.request_id,
            method=self.method,
            path=self.path,
            phase=self.phase,
            age_s=round(time.monotonic() - self._began, 3),
            stream=None if exchange is None else exchange.record.stream,
            prompt_tokens=None if exchange is None else exchange.record.prompt_tokens,
            reply_tokens=None if exchange is None else exchange.reply_tokens,
        )


class InFlight:
    """All of them, in the order in which they came. Nothing here waits."""

    def __init__(self) -> None:
        self._entries: dict[Entry, None] = {}

    @contextlib.contextmanager
    def open(
        self,
        method: str,
        path: str,
        request_id: str,
        has_left: Callable[[], bool] = lambda: False,
    ) -> Iterator[Entry]:
        """List a request for the block, which a cancel ends.

        Args:
            method, path: of it.
            request_id: its client may have chosen it, and another may have chosen the same.
            has_left: says whether the client has left.
        """
        entry = Entry(method, path, request_id, has_left)
        self._entries[entry] = None
        try:
            with entry.scope:
                yield entry
        finally:
            del self._entries[entry]

    def entries(self) -> list[Entry]:
        """Return them, the oldest first."""
        return list(self._entries)

    def cancel(self, request_id: str) -> list[Entry]:
        """End every request of this id, for the operator; return them."""
        found = [entry for entry in self._entries if entry.request_id == request_id]
        for entry in found:
            entry.cancel("operator")
        return found

    def cancel_all(self, by: CancelledBy) -> None:
        """End everything."""
        for entry in self.entries():
            entry.cancel(by)
