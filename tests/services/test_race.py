"""A provider's run against the decoder, in a time that is played."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import MockClock

from onebitd.core.errors import HandoffError, RequestError
from onebitd.core.handoff import Reason, Route
from onebitd.core.plans import HandOff
from onebitd.core.weighing import Outlook
from onebitd.services.admission import Admission, Ticket
from onebitd.services.provider_runs import Prefilled, Running
from onebitd.services.race import Overtaken, race

MADE = Prefilled("state-1", 100, 1000.0)
NOW = Outlook(Route.FILE, 1000, decoder_ms=500.0, provider_ms=1000.0, handover_ms=20.0)
WORTH_IT = dataclasses.replace(NOW, decoder_ms=2000.0)


class Race:
    """One request with its run; `line` is where others may be in front.

    Args:
        run_s: the program's time.
        device_s: it waits so long for the device first.
    """

    def __init__(self, run_s: float, device_s: float = 0.0) -> None:
        self.line = Admission(8)
        self.run_s, self.device_s = run_s, device_s
        self.error: Exception | None = None
        self.running: Running | None = None
        self.cancelled_after_s: float | None = None
        self.discarded: list[Prefilled] = []
        self.took_s = 0.0

    async def prefill(self, ticket: Ticket) -> Prefilled:
        """Play the run."""
        began = trio.current_time()
        try:
            await trio.sleep(self.device_s)
            self.running = Running(ticket, trio.current_time())
            await trio.sleep(self.run_s)
        except trio.Cancelled:
            self.cancelled_after_s = trio.current_time() - began
            raise
        finally:
            self.running = None
        if self.error is not None:
            raise self.error
        return MADE

    async def run(
        self,
        plan: HandOff,
        outlook: Outlook,
        *,
        slot_s: float = 0.0,
        prefill: Callable[[Ticket], Awaitable[Prefilled]] | None = None,
    ) -> Prefilled | Overtaken:
        """Race, with the slot free after `slot_s`."""
        began = trio.current_time()
        first = self.line.enter("first") if slot_s else None
        ticket = self.line.enter("ours")
        async with trio.open_nursery() as nursery:
            if first is not None:

                async def leave(first: Ticket) -> None:
                    await trio.sleep(slot_s)
                    first.leave()

                nursery.start_soon(leave, first)
            with trio.fail_after(1e6):
                result = await race(
                    lambda: (prefill or self.prefill)(ticket),
                    plan,
                    ticket,
                    lambda: outlook,
                    lambda: self.running,
                    self.discarded.append,
                )
            self.took_s = trio.current_time() - began
            nursery.cancel_scope.cancel()
        return result


async def test_race_run_that_is_worth_it_is_waited_for(autojump_clock: MockClock) -> None:
    """The slot is free all the time, and the run still wins."""
    one = Race(1.0)
    assert await one.run(HandOff(Route.FILE, limit_ms=9e9), WORTH_IT) == MADE
    assert one.took_s == pytest.approx(1.0)


async def test_race_slot_that_frees_first_and_a_faster_decoder_stop_the_run(
    autojump_clock: MockClock,
) -> None:
    """400 ms into a run of 1000, with 500 to go to the decoder: it is stopped there and then."""
    one = Race(1.0)
    stopped = await one.run(HandOff(Route.FILE), NOW, slot_s=0.4)
    assert isinstance(stopped, Overtaken)
    assert stopped.elapsed_ms == pytest.approx(400.0)
    assert stopped.overran is False
    assert stopped.detail == (
        "the slot is free, 620 ms more on the provider, 500 ms on the decoder"
    )
    assert one.cancelled_after_s == pytest.approx(0.4)


async def test_race_run_that_is_nearly_done_when_the_slot_frees_goes_on(
    autojump_clock: MockClock,
) -> None:
    """700 ms into a run of 1000, the decoder would take longer than what is left."""
    one = Race(1.0)
    assert await one.run(HandOff(Route.FILE), NOW, slot_s=0.7) == MADE
    assert one.took_s == pytest.approx(1.0)


async def test_race_run_beside_a_busy_slot_is_never_stopped(autojump_clock: MockClock) -> None:
    """However slow: it costs nobody anything."""
    one = Race(50.0)
    assert await one.run(HandOff(Route.FILE, limit_ms=1.0), NOW, slot_s=60.0) == MADE


async def test_race_exploration_is_cut_off_at_its_limit(autojump_clock: MockClock) -> None:
    """It is expected to lose, and how much is bounded; that is no fault of the provider."""
    one = Race(3.0)
    stopped = await one.run(HandOff(Route.FILE, explored=True, limit_ms=500.0), NOW)
    assert stopped == Overtaken(
        "the provider was not done after 500 ms, 500 ms on the decoder",
        pytest.approx(500.0),  # type: ignore[arg-type]
        overran=False,
    )


async def test_race_run_that_was_to_win_and_hangs_overran(autojump_clock: MockClock) -> None:
    """Its patience is over, and the breaker is to hear of it."""
    one = Race(1e5)
    stopped = await one.run(HandOff(Route.FILE, limit_ms=3500.0), WORTH_IT)
    assert isinstance(stopped, Overtaken)
    assert stopped.elapsed_ms == pytest.approx(3500.0)
    assert stopped.overran is True
    assert one.took_s == pytest.approx(3.5)


async def test_race_first_run_of_all_has_no_limit(autojump_clock: MockClock) -> None:
    """Nothing is known; only the provider's own limit ends it."""
    one = Race(1000.0)
    unknown = Outlook(Route.FILE, 1000)
    assert await one.run(HandOff(Route.FILE, explored=True), unknown) == MADE


async def test_race_device_that_is_not_free_is_waited_for_as_long_as_the_decoder_takes(
    autojump_clock: MockClock,
) -> None:
    """Somebody else has the lock: the run has not begun."""
    one = Race(1.0, device_s=1e5)
    stopped = await one.run(HandOff(Route.FILE, limit_ms=9000.0), WORTH_IT)
    assert isinstance(stopped, Overtaken)
    assert (stopped.elapsed_ms, stopped.overran) == (None, True)
    assert stopped.detail.startswith("the device was not free after 20")
    assert one.took_s == pytest.approx(2.0, abs=0.11)


async def test_race_run_is_let_begin_however_fast_the_decoder_is(
    autojump_clock: MockClock,
) -> None:
    """Given up before its start it would teach nothing, and be tried with each prompt again."""
    one = Race(1.0, device_s=0.02)
    fast = dataclasses.replace(NOW, decoder_ms=0.1)
    stopped = await one.run(HandOff(Route.FILE, explored=True, limit_ms=0.2), fast)
    assert isinstance(stopped, Overtaken)
    assert stopped.elapsed_ms is not None
    assert one.took_s < 0.05


async def test_race_device_at_work_for_another_request_is_no_fault(
    autojump_clock: MockClock,
) -> None:
    """It is given up just the same, and no breaker hears of it."""
    one = Race(1.0, device_s=1e5)
    one.running = Running(one.line.enter("another"), trio.current_time())
    one.line = Admission(8)
    stopped = await one.run(HandOff(Route.FILE, limit_ms=9000.0), WORTH_IT)
    assert isinstance(stopped, Overtaken)
    assert (stopped.elapsed_ms, stopped.overran) == (None, False)


async def test_race_run_that_begins_late_has_its_whole_limit(autojump_clock: MockClock) -> None:
    """The wait for the device is not its own time."""
    one = Race(2.9, device_s=1.9)
    assert await one.run(HandOff(Route.FILE, limit_ms=3000.0), WORTH_IT) == MADE


@pytest.mark.parametrize("in_front", [False, True])
async def test_race_failed_run_raises_its_own_error(
    autojump_clock: MockClock, in_front: bool
) -> None:
    """Not a group of errors, and at once, whoever has the slot."""
    one = Race(0.1)
    one.error = HandoffError(Reason.PROVIDER_EXIT, "status 1")
    if in_front:
        one.line.enter("first")
    ticket = one.line.enter("ours")
    with pytest.raises(HandoffError) as caught, trio.fail_after(1):
        await race(
            lambda: one.prefill(ticket),
            HandOff(Route.FILE),
            ticket,
            lambda: WORTH_IT,
            lambda: one.running,
            one.discarded.append,
        )
    assert caught.value is one.error


async def test_race_line_that_closes_stops_the_run(autojump_clock: MockClock) -> None:
    """Its request is turned away: a stop must not wait for what nobody gets."""
    one = Race(1.0)
    one.line.enter("first")
    ticket = one.line.enter("ours")
    async with trio.open_nursery() as nursery:

        async def close() -> None:
            await trio.sleep(0.5)
            one.line.close()

        nursery.start_soon(close)
        with pytest.raises(RequestError):
            await race(
                lambda: one.prefill(ticket),
                HandOff(Route.FILE, limit_ms=1.0),
                ticket,
                lambda: NOW,
                lambda: one.running,
                one.discarded.append,
            )
    assert one.cancelled_after_s == pytest.approx(0.5)
    assert one.discarded == []


async def test_race_cancel_stops_the_run(autojump_clock: MockClock) -> None:
    """The client left."""
    one = Race(1.0)
    with trio.move_on_after(0.3) as scope:
        await one.run(HandOff(Route.FILE), WORTH_IT)
    assert scope.cancelled_caught
    assert one.cancelled_after_s == pytest.approx(0.3)
    assert one.discarded == []


async def test_race_run_that_ends_in_the_moment_of_a_cancel_is_discarded(
    autojump_clock: MockClock,
) -> None:
    """Its state file has nobody else to remove it."""
    one = Race(1.0)
    with trio.CancelScope() as scope:

        async def prefill(ticket: Ticket) -> Prefilled:
            await trio.sleep(1.0)
            scope.cancel()
            return MADE

        await one.run(HandOff(Route.FILE), WORTH_IT, prefill=prefill)
    assert scope.cancelled_caught
    assert one.discarded == [MADE]


async def test_race_run_that_ends_while_it_is_stopped_wins(autojump_clock: MockClock) -> None:
    """It is there, so it is taken."""

    async def prefill(ticket: Ticket) -> Prefilled:
        with trio.CancelScope(shield=True):
            await trio.sleep(0.6)
        return MADE

    one = Race(1.0)
    limit = HandOff(Route.FILE, explored=True, limit_ms=0.0)
    assert await one.run(limit, NOW, prefill=prefill) == MADE
    assert one.discarded == []
