"""The line for the slot: who waits, who may go, who is turned away."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from onebitd.core.errors import RequestError
from onebitd.core.handoff import Reason
from onebitd.services.admission import Admission, Ticket


class Line:
    """Tickets that wait in tasks; `news` says what they have reached."""

    def __init__(self, nursery: trio.Nursery, max_pending: int = 64) -> None:
        self.admission = Admission(max_pending)
        self._got: set[str] = set()
        self._nursery = nursery

    async def enter(self, name: str) -> Ticket:
        """Enter and wait for the slot in a task of its own."""
        ticket = self.admission.enter(name)
        self._nursery.start_soon(self._wait, ticket)
        await trio.testing.wait_all_tasks_blocked()
        return ticket

    async def _wait(self, ticket: Ticket) -> None:
        name = ticket.request_id
        try:
            await ticket.wait_may_prefill()
            self._got.add(f"{name} may prefill")
            await ticket.wait_slot()
            self._got.add(f"{name} has the slot")
        except RequestError as error:
            self._got.add(f"{name} {error.reason}")
            ticket.leave()

    async def news(self) -> set[str]:
        """Return what happened since the last call; trio wakes tasks in no order of its own."""
        await trio.testing.wait_all_tasks_blocked()
        news, self._got = self._got, set()
        return news


def place_names(admission: Admission) -> tuple[str | None, int]:
    """Return who has the slot, and how many wait."""
    holder = admission.holder
    return (None if holder is None else holder.request_id), admission.pending


async def test_admission_requests_get_the_slot_in_the_order_they_came(
    nursery: trio.Nursery,
) -> None:
    """First come, first served; the second in line may prefill, the third may not."""
    line = Line(nursery)
    tickets = [await line.enter(name) for name in "abc"]
    assert await line.news() == {"a may prefill", "a has the slot", "b may prefill"}
    assert place_names(line.admission) == ("a", 2)
    assert [line.admission.place_of(ticket) for ticket in tickets] == [0, 1, 2]
    tickets[0].leave()
    assert await line.news() == {"b has the slot", "c may prefill"}
    tickets[1].leave()
    assert await line.news() == {"c has the slot"}
    tickets[2].leave()
    assert place_names(line.admission) == (None, 0)


async def test_admission_free_slot_is_had_without_waiting() -> None:
    """An empty line costs no turn of the loop."""
    ticket = Admission(0).enter("a")
    with trio.CancelScope() as scope:
        scope.cancel()
        await ticket.wait_may_prefill()
        await ticket.wait_slot()
    assert not scope.cancelled_caught


async def test_ticket_leave_from_the_middle_moves_only_those_behind(
    nursery: trio.Nursery,
) -> None:
    """A client that gives up in the line frees its place; leaving twice is leaving once."""
    line = Line(nursery)
    tickets = [await line.enter(name) for name in "abcd"]
    await line.news()
    tickets[1].leave()
    tickets[1].leave()
    assert await line.news() == {"c may prefill"}
    assert place_names(line.admission) == ("a", 2)
    tickets[0].leave()
    assert await line.news() == {"c has the slot", "d may prefill"}


@pytest.mark.parametrize("max_pending", [0, 1, 3])
def test_admission_full_line_refuses_at_once_and_says_which_setting(max_pending: int) -> None:
    """The holder does not count as waiting; 503 with Retry-After, and room again after a leave."""
    admission = Admission(max_pending)
    tickets = [admission.enter(str(number)) for number in range(max_pending + 1)]
    with pytest.raises(RequestError, match=r"http\.max_pending") as caught:
        admission.enter("one more")
    error = caught.value
    assert (error.status, error.reason) == (503, Reason.QUEUE_FULL)
    assert error.retry_after_s is not None
    assert admission.pending == max_pending
    tickets[-1].leave()
    admission.enter("one more")


async def test_admission_closed_turns_waiters_away_and_lets_the_holder_finish(
    nursery: trio.Nursery,
) -> None:
    """Draining: whoever has the slot goes on, whoever waits or comes is told to come back."""
    line = Line(nursery)
    holder = await line.enter("a")
    for name in "bc":
        await line.enter(name)
    await line.news()
    line.admission.close()
    assert await line.news() == {"b draining", "c draining"}
    assert place_names(line.admission) == ("a", 0)
    await holder.wait_slot()
    with pytest.raises(RequestError) as caught:
        line.admission.enter("d")
    assert (caught.value.status, caught.value.reason) == (503, Reason.DRAINING)


async def test_admission_closed_with_its_waiters_kept_serves_them_in_order(
    nursery: trio.Nursery,
) -> None:
    """Whoever is in the line keeps its place, and nobody new gets in."""
    line = Line(nursery)
    holder = await line.enter("a")
    for name in "bc":
        await line.enter(name)
    await line.news()
    line.admission.close(keep_waiting=True)
    assert await line.news() == set()
    with pytest.raises(RequestError) as caught:
        line.admission.enter("d")
    assert caught.value.reason == Reason.DRAINING
    holder.leave()
    assert await line.news() == {"b has the slot", "c may prefill"}
    assert place_names(line.admission) == ("b", 1)


async def test_admission_wait_empty_ends_with_the_last_leave(nursery: trio.Nursery) -> None:
    """An empty line is empty at once; a line that filled again is waited for again."""
    admission = Admission(4)
    await admission.wait_empty()
    tickets = [admission.enter(name) for name in "ab"]
    empty = trio.Event()

    async def wait() -> None:
        await admission.wait_empty()
        empty.set()

    nursery.start_soon(wait)
    tickets[0].leave()
    await trio.testing.wait_all_tasks_blocked()
    assert not empty.is_set()
    tickets[1].leave()
    await empty.wait()
    admission.enter("c")
    with trio.move_on_after(0) as scope:
        await admission.wait_empty()
    assert scope.cancelled_caught


async def test_ticket_wait_cancelled_keeps_its_place_until_it_leaves() -> None:
    """A cancel of the wait is no leave: the exit of the request is."""
    admission = Admission(4)
    first, second, third = (admission.enter(name) for name in "abc")
    with trio.move_on_after(0) as scope:
        await second.wait_slot()
    assert scope.cancelled_caught
    assert admission.place_of(third) == 2
    second.leave()
    first.leave()
    await third.wait_slot()
    assert admission.holder is third


async def test_admission_slot_is_lent_only_while_nobody_is_in_line(nursery: trio.Nursery) -> None:
    """A request has it, it is lent already, or the line is closed: nothing to lend."""
    admission = Admission(1)
    ticket = admission.enter("a")
    with admission.lend("x") as loan:
        assert loan is None
    ticket.leave()
    with admission.lend("x") as loan, admission.lend("y") as second:
        assert (loan is not None, second) == (True, None)
    admission.close()
    with admission.lend("x") as loan:
        assert loan is None


async def test_admission_request_that_comes_during_a_loan_has_the_slot_right_after_it(
    nursery: trio.Nursery,
) -> None:
    """The borrower sees it; the request may prefill meanwhile, and gets the slot when it ends."""
    line = Line(nursery)
    with line.admission.lend("x") as loan:
        assert loan is not None
        wanted = [loan.is_wanted]
        ticket = await line.enter("a")
        wanted.append(loan.is_wanted)
        assert wanted == [False, True]
        assert await line.news() == {"a may prefill"}
        assert line.admission.last_holder is None
    assert await line.news() == {"a has the slot"}
    assert line.admission.last_holder is ticket


async def test_admission_loan_takes_no_place_in_the_line(nursery: trio.Nursery) -> None:
    """As many may wait as without it, and the line counts as empty."""
    line = Line(nursery, max_pending=1)
    with line.admission.lend("x") as loan:
        await line.admission.wait_empty()
        assert place_names(line.admission) == (None, 0)
        for name in "ab":
            await line.enter(name)
        with pytest.raises(RequestError) as caught:
            line.admission.enter("c")
        assert caught.value.reason is Reason.QUEUE_FULL
        line.admission.close()
        assert loan is not None
        assert loan.is_wanted
