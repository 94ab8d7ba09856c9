"""A provider's run against the decoder: nothing waits for what would come later anyway.

While the slot is somebody else's the run costs nobody anything. From the moment that the slot is
free the decoder could do it instead, and the run goes on only as long as it is expected to win.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Awaitable, Callable

import trio

from onebitd.core.errors import HandoffError, RequestError
from onebitd.core.plans import HandOff
from onebitd.core.weighing import Outlook, is_overtaken
from onebitd.services.admission import Ticket
from onebitd.services.provider_runs import Prefilled, Running

_LOOK_MS = 50.0
"""How often to see whether a run that waits for the device has begun: at first more often."""
_BEGIN_MS = 50.0
"""Files, a lock that is free, and a program take a moment, however fast the decoder is; a run that
is given up before it began has taught nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Overtaken:
    """The run was stopped, or not even begun.

    Attributes:
        detail: a sentence that says why.
        elapsed_ms: how long the program had run; None when it had not begun.
        overran: it, or the device's other users, took longer than a run that was expected to win
            may.
    """

    detail: str
    elapsed_ms: float | None
    overran: bool


async def race(
    prefill: Callable[[], Awaitable[Prefilled]],
    plan: HandOff,
    ticket: Ticket,
    outlook: Callable[[], Outlook],
    running: Callable[[], Running | None],
    discard: Callable[[Prefilled], None],
) -> Prefilled | Overtaken:
    """Run the provider until it is done, or until the decoder would be sooner.

    Args:
        prefill: the run.
        plan: that it follows from.
        ticket: its request's place in the line.
        outlook: as of the moment of the call.
        running: the run that is on.
        discard: takes what a run made that ended in the moment of a cancel.

    Raises:
        HandoffError, RequestError: those of `prefill`; RequestError, the line was closed.

    A run that is stopped leaves nothing behind, as after a cancel.
    """
    done: list[Prefilled | Exception] = []
    stopped: list[Overtaken] = []
    closed: list[RequestError] = []

    async def run() -> None:
        try:
            done.append(await prefill())
        except (HandoffError, RequestError) as error:
            done.append(error)
        nursery.cancel_scope.cancel()

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            try:
                stopped.append(await _wait_overtaken(plan, ticket, outlook, running))
            except RequestError as error:  # the line was closed: nobody gets what this run makes
                closed.append(error)
            nursery.cancel_scope.cancel()
        if closed:
            raise closed[0]
    except BaseException:
        for made in done:
            if isinstance(made, Prefilled):
                discard(made)
        raise
    for result in done:  # it may have ended in the same moment
        if isinstance(result, Exception):
            raise result
        return result
    return stopped[0]


async def _wait_overtaken(
    plan: HandOff,
    ticket: Ticket,
    outlook: Callable[[], Outlook],
    running: Callable[[], Running | None],
) -> Overtaken:
    await ticket.wait_slot()
    free_since = trio.current_time()
    while True:
        now = outlook()
        run = running()
        elapsed_ms = None if run is None or run.ticket is not ticket else run.elapsed_ms
        since_ms = (trio.current_time() - free_since) * 1000.0
        # An exploration is expected to lose; how much it may is its limit.
        if not plan.explored and is_overtaken(now, elapsed_ms or 0.0):
            left_ms = max(0.0, (now.provider_ms or 0.0) - (elapsed_ms or 0.0)) + now.handover_ms
            return Overtaken(
                f"the slot is free, {left_ms:.0f} ms more on the provider,"
                f" {now.decoder_ms or 0.0:.0f} ms on the decoder",
                elapsed_ms,
                overran=False,
            )
        left_ms = _left_ms(plan, now, elapsed_ms, since_ms)
        if left_ms <= 0:
            what = "the device was not free" if elapsed_ms is None else "the provider was not done"
            spent_ms = since_ms if elapsed_ms is None else elapsed_ms
            return Overtaken(
                f"{what} after {spent_ms:.0f} ms, {now.decoder_ms or 0.0:.0f} ms on the decoder",
                elapsed_ms,
                # Another request's run is the device at work.
                overran=not plan.explored and (run is None or elapsed_ms is not None),
            )
        if elapsed_ms is None:
            left_ms = min(left_ms, _LOOK_MS, max(2.0, since_ms / 2))
        await trio.sleep(left_ms / 1000.0)


def _left_ms(plan: HandOff, now: Outlook, elapsed_ms: float | None, since_ms: float) -> float:
    """Return for how much longer the run is worth waiting for."""
    if plan.limit_ms is None or now.decoder_ms is None:
        return math.inf
    if elapsed_ms is None:
        return device_patience_ms(now) - since_ms
    return plan.limit_ms - elapsed_ms


def device_patience_ms(now: Outlook) -> float:
    """Return how long the device is waited for: what the decoder would take in its place."""
    return math.inf if now.decoder_ms is None else max(now.decoder_ms, _BEGIN_MS)
