"""The list of requests in flight: its order, its phases, and who ended what."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import trio

from onebitd.services.admission import Admission
from onebitd.services.in_flight import ENDING, InFlight

HEAD = ("POST", "/v1/completions")


async def test_entries_are_listed_while_they_are_open_oldest_first() -> None:
    """An error takes one out as well."""
    requests = InFlight()
    with requests.open(*HEAD, "a"):
        with contextlib.suppress(ValueError), requests.open(*HEAD, "b"):
            assert [entry.request_id for entry in requests.entries()] == ["a", "b"]
            raise ValueError
        assert [entry.request_id for entry in requests.entries()] == ["a"]
    assert requests.entries() == []


async def test_entry_phase_is_its_own_until_it_has_a_place_in_the_line() -> None:
    """Then its ticket's, and at last that it was ended."""
    requests, admission = InFlight(), Admission(1)
    with requests.open(*HEAD, "a") as entry:
        assert entry.phase == "head"
        entry.phase = "body"
        assert entry.describe().phase == "body"
        ticket = entry.ticket = admission.enter("a")
        assert entry.phase == "queued"
        ticket.phase = "decode"
        assert entry.describe().phase == "decode"
        entry.cancel("operator")
        assert entry.describe().phase == ENDING


async def test_cancel_ends_all_of_an_id_and_says_which() -> None:
    """The others go on; an id that is not there ends nothing."""
    requests, went_on = InFlight(), False
    with (
        requests.open(*HEAD, "a") as first,
        requests.open(*HEAD, "b") as other,
        requests.open(*HEAD, "a") as second,
    ):
        assert requests.cancel("c") == []
        assert requests.cancel("a") == [first, second]
        assert other.cancelled_by is None
        await trio.lowlevel.checkpoint()
        went_on = True
    assert not went_on
    assert first.scope.cancelled_caught  # the outermost one has it
    assert (first.cancelled_by, second.cancelled_by) == ("operator", "operator")


@pytest.mark.parametrize(
    ("has_left", "causes", "found"),
    [
        (lambda: False, ("operator", "draining"), "operator"),
        (lambda: False, ("draining", "operator"), "draining"),
        (lambda: True, ("operator",), None),
    ],
)
async def test_cancel_twice_the_first_cause_counts(
    has_left: Callable[[], bool], causes: tuple[str, ...], found: str | None
) -> None:
    """A client that has left was the first."""
    requests = InFlight()
    with requests.open(*HEAD, "a", has_left) as entry:
        for by in causes:
            if by == "operator":
                requests.cancel("a")
            else:
                requests.cancel_all("draining")
    assert entry.cancelled_by == found
    assert entry.scope.cancel_called


async def test_cancel_releases_at_once_only_where_that_may_be_done() -> None:
    """Inside the block, before the cancelled task has its next turn; not before or after it."""
    requests = InFlight()
    released: list[str] = []
    with requests.open(*HEAD, "before") as before:
        before.cancel("operator")
    with requests.open(*HEAD, "a") as entry:
        with entry.releasing(lambda: released.append("a")):
            requests.cancel("a")
            assert released == ["a"]
        entry.cancel("operator")
    assert released == ["a"]
