"""The calls to the decoder that are under way, as far as its liveness is concerned.

Kept by the client of the decoder, since only it knows whether somebody waits for the decoder or for
a client that does not read. What it costs: a few attribute stores for each piece of a reply.
"""

from __future__ import annotations

import itertools

import trio


class Call:
    """One call, from its first byte sent to the end of its reply.

    Attributes:
        number: no other call has it.
        waits: somebody waits for the decoder right now.
        heard: pieces of its reply so far, without comments in streams: a server sends those from
            a timer, however dead the rest of it is.
    """

    __slots__ = ("_calls", "heard", "number", "waits")

    def __init__(self, calls: Calls, number: int) -> None:
        self._calls = calls
        self.number = number
        self.waits = True
        self.heard = 0

    def end(self) -> None:
        """It is over; may be called twice."""
        self._calls.remove(self)


class Calls:
    """All of them."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._open: set[Call] = set()
        self._any = trio.Event()

    def begin(self) -> Call:
        """Begin one; the caller must `end` it."""
        call = Call(self, next(self._numbers))
        if not self._open:
            self._any.set()
        self._open.add(call)
        return call

    def remove(self, call: Call) -> None:
        """See `Call.end`."""
        self._open.discard(call)

    def __bool__(self) -> bool:
        """Say whether there is one."""
        return bool(self._open)

    def heard(self) -> dict[int, int]:
        """Return `heard` of each by its number."""
        return {call.number: call.heard for call in self._open}

    def waiting(self) -> frozenset[int]:
        """Return the numbers of those that wait for the decoder."""
        return frozenset(call.number for call in self._open if call.waits)

    async def wait_any(self) -> None:
        """Wait until there is one."""
        while not self._open:
            self._any = trio.Event()
            await self._any.wait()
