"""What both ways of a prompt are expected to take: the line, the slot and the provider's queue."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import trio
from trio.testing import MockClock

from onebitd.core import cost_samples
from onebitd.core.config import Config
from onebitd.core.config_resolve import resolve
from onebitd.core.costs import Costs
from onebitd.core.handoff import Reason, Route
from onebitd.core.plans import HandOff, Skip
from onebitd.core.slot_content import Content, Prompt
from onebitd.core.state_layout import KvSection, Layout, Rows
from onebitd.core.weighing import Outlook
from onebitd.services.admission import Admission, Ticket
from onebitd.services.outlooks import Outlooks
from onebitd.services.provider_runs import Running

AT = 1.8e9
ROW = Rows(1, 512)
KV = KvSection(ext_bytes=0, v_trans=False, n_rot_k=None, n_rot_v=None, k=(ROW,), v=(ROW,))
LAYOUT = Layout(2, packed_tokens=False, sections=(KV,))
FACTS: Any = SimpleNamespace(generation=1, layout=LAYOUT)


def prompt_of(letter: str, tokens: int = 1000) -> Prompt:
    """Return a prompt of one letter again and again."""
    return Prompt([ord(letter)] * tokens, letter * tokens)


class Desk:
    """Outlooks over a decoder of 1 ms a token, a provider of 2 ms, and replies of 40 x 10 ms."""

    def __init__(
        self, *args: str, learned: bool = True, hold: str = "handoff", enabled: bool = True
    ) -> None:
        file = {"model": {"path": "/m.gguf"}, "lock": {"hold": hold}}
        environ = {} if enabled else {"NPU_NO_DEVICE_LOCK": "1"}
        self.config: Config = resolve(
            instance="test", file=file, file_name="test.toml", environ=environ
        )
        self.costs = Costs()
        self.line = Admission(8)
        self.runs = SimpleNamespace(running=None)
        self.touched = 0
        supervisor: Any = SimpleNamespace(argv=["llama-server", *(args or ("--cache-ram", "0"))])
        keeper: Any = SimpleNamespace(costs=self.costs, touch=self._touch)
        runs: Any = self.runs
        self.outlooks = Outlooks(supervisor, self.line, runs, keeper)
        for tokens in (500, 1000, 2000) if learned else ():
            self.costs.note_decoder(0, tokens, tokens, overlapped=False, now=AT)
            self.costs.note_provider(
                Route.FILE, tokens, 2 * tokens, overlapped=False, cold=False, now=AT
            )
            self.costs.note_reply(40, 400, AT)

    def _touch(self) -> None:
        self.touched += 1

    def of(self, ticket: Ticket, prompt: Prompt, route: Route = Route.FILE) -> Outlook:
        """Return the outlook of a prompt."""
        return self.outlooks.of(FACTS, prompt, route, ticket, self.config)

    def holder(self, **expected: Any) -> Ticket:
        """Let somebody have the slot since now."""
        ticket = self.line.enter("holder")
        ticket.granted = trio.current_time()
        for name, value in expected.items():
            setattr(ticket, name, value)
        return ticket


async def test_of_nothing_learned_is_all_unknown() -> None:
    """And that is what the policy learns by."""
    desk = Desk(learned=False)
    found = desk.of(desk.line.enter("r"), prompt_of("a"))
    assert (found.provider_ms, found.decoder_ms, found.slot_wait_ms) == (None, None, 0.0)
    assert (found.provider_runs, found.decoder_replies) == (0, 0)


async def test_of_free_slot_is_what_the_devices_take() -> None:
    """Both ways, and what the estimates rest on; runs that were cut off count."""
    desk = Desk()
    desk.costs.note_provider_at_least(Route.FILE, 1000, 900.0, overlapped=False, now=AT)
    desk.costs.note_restore(LAYOUT.bytes_for(999), 30.0, AT)
    desk.costs.note_decoder(999, 1, 5.0, overlapped=False, now=AT)
    found = desk.of(desk.line.enter("r"), prompt_of("a"))
    assert found.decoder_ms == pytest.approx(1000, rel=0.1)
    assert found.provider_ms == pytest.approx(2000, rel=0.1)
    assert found.handover_ms == pytest.approx(35, rel=0.2)
    assert (found.slot_wait_ms, found.cached_tokens, found.displaced_ms) == (0.0, 0, 0.0)
    assert (found.provider_runs, found.decoder_replies) == (4, 3)


async def test_refit_after_an_outlook_leaves_the_next_nothing_to_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was learned is worked out between two requests; where no outlook was wanted, never."""
    fits = Mock(wraps=cost_samples._fit)
    monkeypatch.setattr(cost_samples, "_fit", fits)
    desk = Desk()
    desk.outlooks.refit()
    assert not fits.called
    before = desk.of(desk.line.enter("r"), prompt_of("a"))
    desk.costs.note_decoder(0, 1000, 3000.0, overlapped=False, now=AT)
    desk.costs.note_decoder(0, 1000, 3000.0, overlapped=False, now=AT)
    desk.outlooks.refit()
    fits.reset_mock()
    found = desk.of(desk.line.enter("s"), prompt_of("b"))
    assert not fits.called
    assert (found.decoder_ms or 0) > (before.decoder_ms or 0)


async def test_of_shared_route_hands_over_by_adoption() -> None:
    """No file is restored; and what is known of one route is not known of the other."""
    desk = Desk()
    desk.costs.note_restore(LAYOUT.bytes_for(999), 30.0, AT)
    desk.costs.note_adopt(7.0)
    desk.costs.note_decoder(999, 1, 5.0, overlapped=False, now=AT)
    found = desk.of(desk.line.enter("r"), prompt_of("a"), Route.SHARED)
    assert found.handover_ms == pytest.approx(12, rel=0.1)
    assert (found.provider_ms, found.provider_runs) == (None, 0)


async def test_of_slot_wait_is_what_is_left_of_those_in_front(autojump_clock: MockClock) -> None:
    """The holder has been at it for a while; the next one has not begun."""
    desk = Desk()
    desk.holder(work_ms=1000.0)
    desk.line.enter("next").work_ms = 300.0
    ours = desk.line.enter("ours")
    waits = [desk.of(ours, prompt_of("a")).slot_wait_ms]
    for _ in range(2):
        await trio.sleep(0.6)
        waits.append(desk.of(ours, prompt_of("a")).slot_wait_ms)
    assert waits == pytest.approx([1300, 700, 550])


async def test_of_request_nothing_is_known_of_takes_as_long_as_a_reply() -> None:
    """It has not been looked at yet."""
    desk = Desk()
    desk.holder()
    found = desk.of(desk.line.enter("ours"), prompt_of("a"))
    assert found.slot_wait_ms == pytest.approx(400, rel=0.1)


async def test_of_provider_at_work_for_another_is_waited_for(autojump_clock: MockClock) -> None:
    """What is left of that run; our own counts from its start, without a wait."""
    desk = Desk()
    other, ours = desk.holder(run_ms=3000.0), desk.line.enter("ours")
    idle = desk.of(ours, prompt_of("a")).provider_ms
    desk.runs.running = Running(other, trio.current_time())
    await trio.sleep(1.0)
    behind = desk.of(ours, prompt_of("a")).provider_ms
    desk.runs.running = Running(ours, trio.current_time())
    own = desk.of(ours, prompt_of("a")).provider_ms
    assert idle is not None
    assert behind == pytest.approx(idle + 2000)
    assert own == idle


@pytest.mark.parametrize(
    ("lock", "waits"), [({}, True), ({"hold": "lifetime"}, False), ({"enabled": False}, False)]
)
async def test_of_device_lock_that_is_taken_anew_costs_its_wait(
    lock: dict[str, Any], waits: bool
) -> None:
    """One that is held for the daemon's life costs nothing."""
    desk = Desk(**lock)
    ours = desk.line.enter("ours")
    before = desk.of(ours, prompt_of("a")).provider_ms
    for _ in range(5):
        desk.costs.note_lock(100.0)
    after = desk.of(ours, prompt_of("a")).provider_ms
    assert before is not None
    assert after == pytest.approx(before + (100 if waits else 0))


async def test_of_device_lock_that_was_not_measured_for_a_while_is_thought_free_again(
    autojump_clock: MockClock,
) -> None:
    """Or a device that was somebody else's for a minute would be avoided for a hundred prompts."""
    desk = Desk()
    ticket, waits = desk.line.enter("asks"), []
    desk.outlooks.note_lock(800.0)
    for _ in range(3):
        provider_ms = desk.of(ticket, prompt_of("a")).provider_ms
        assert provider_ms is not None
        waits.append(provider_ms - 1998)
        await trio.sleep(61)
    assert waits == pytest.approx([800, 400, 200], abs=5)
    desk.outlooks.note_lock(800.0)
    assert desk.of(ticket, prompt_of("a")).provider_ms == pytest.approx(2798, abs=5)


async def test_cached_is_what_the_one_in_front_will_leave() -> None:
    """Not what the slot holds now."""
    desk = Desk()
    desk.outlooks.see(FACTS)
    desk.outlooks.memory.note(Content(prompt_of("b")), restored=False)
    front, ours = desk.line.enter("front"), desk.line.enter("ours")
    unknown = desk.outlooks.cached(FACTS, prompt_of("a"), ours)
    front.prompt = prompt_of("a", 900)
    found = [desk.outlooks.cached(FACTS, prompt_of(name), ours) for name in "ab"]
    front.leave()
    later = [desk.outlooks.cached(FACTS, prompt_of(name), ours) for name in "ab"]
    assert (unknown, found, later) == (0, [900, 0], [0, 999])


async def test_cached_is_believed_as_far_as_it_came_true() -> None:
    """A decoder that reuses half of what it holds is taken at its word."""
    desk = Desk()
    ours = desk.line.enter("ours")
    desk.outlooks.see(FACTS)
    desk.outlooks.memory.note(Content(prompt_of("a")), restored=False)
    for _ in range(12):
        desk.costs.note_reuse(1000, 500)
    assert desk.outlooks.cached(FACTS, prompt_of("a"), ours) == pytest.approx(499, abs=2)


async def test_see_decoder_that_restarted_holds_nothing() -> None:
    """Its slot is empty, and so is its prompt cache."""
    desk = Desk("--cache-ram", "64")
    ours = desk.line.enter("ours")
    desk.outlooks.see(FACTS)
    for name in "ab":
        desk.outlooks.memory.note(Content(prompt_of(name)), restored=False)
    before = [desk.outlooks.cached(FACTS, prompt_of(name), ours) for name in "ab"]
    again: Any = SimpleNamespace(generation=2, layout=LAYOUT)
    after = [desk.outlooks.cached(again, prompt_of(name), ours) for name in "ab"]
    assert (before, after) == ([999, 999], [0, 0])


@pytest.mark.parametrize(
    ("args", "low", "high"),
    [
        (("--cache-ram", "0"), 0, 0),
        (("--cache-ram", "1"), 900, 1030),
        (("--cache-ram", "-1"), 2**31, 2**31),
        (("-fa", "on"), 7 * 1024**2, 8 * 1024**2 + 1),
    ],
)
async def test_see_prompt_cache_is_as_large_as_the_decoder_was_told(
    args: tuple[str, ...], low: int, high: int
) -> None:
    """1 KiB for each token of this layout, and what a cell takes."""
    desk = Desk(*args)
    desk.outlooks.see(FACTS)
    assert low <= desk.outlooks.memory.cached_tokens_max <= high


async def test_of_conversation_that_a_handoff_would_displace_costs_its_prefill() -> None:
    """As often as one was come back for."""
    desk = Desk("--cache-ram", "64")
    ours = desk.line.enter("ours")
    desk.outlooks.see(FACTS)
    desk.outlooks.memory.note(Content(prompt_of("b", 2000)), restored=False)
    found = desk.of(ours, prompt_of("a"))
    share = desk.outlooks.memory.returns_share
    assert found.displaced_ms == pytest.approx(2000 * share, rel=0.1)


@pytest.mark.parametrize(
    ("document", "ms"),
    [
        (None, 400),
        ({}, 400),
        ({"max_tokens": 10}, 100),
        ({"max_completion_tokens": 10}, 100),
        ({"n_predict": 10}, 100),
        ({"max_tokens": 4000}, 400),
        ({"n_predict": -1}, 400),
        ({"max_tokens": True}, 400),
        ({"max_tokens": "10"}, 400),
        ({"max_tokens": None}, 400),
    ],
)
async def test_reply_ms_is_bounded_by_the_requests_own_limit(
    document: dict[str, Any] | None, ms: float
) -> None:
    """40 tokens are usual; whatever else a body holds says nothing."""
    assert Desk().outlooks.reply_ms(document) == pytest.approx(ms, rel=0.1)


async def test_reply_ms_nothing_known_is_nothing() -> None:
    """The wait is then what the prompts take."""
    assert Desk(learned=False).outlooks.reply_ms({"max_tokens": 10}) == 0.0


async def test_expect_tells_those_behind_what_to_wait_for() -> None:
    """What is left once the slot is its own: a run that hides behind the wait is not counted."""
    desk = Desk()
    ticket = desk.line.enter("r")
    outlook = dataclasses.replace(
        desk.of(ticket, prompt_of("a")),
        slot_wait_ms=5000.0,
        provider_ms=2000.0,
        handover_ms=30.0,
        decoder_ms=1000.0,
    )
    reply_ms = desk.outlooks.reply_ms(None)
    desk.outlooks.expect(ticket, outlook, HandOff(Route.FILE), None)
    assert ticket.run_ms == 2000.0
    assert ticket.work_ms == pytest.approx(reply_ms + 30)
    desk.outlooks.expect(ticket, outlook, Skip(Reason.POLICY, ""), None)
    assert [ticket.run_ms, ticket.work_ms] == [None, pytest.approx(reply_ms + 1000)]
    unknown = dataclasses.replace(outlook, decoder_ms=None)
    desk.outlooks.expect(ticket, unknown, Skip(Reason.POLICY, ""), None)
    assert ticket.work_ms == pytest.approx(reply_ms)
