"""What both ways of a prompt are expected to take, as of now; and what each reply teaches.

This is where the estimates of `core.costs` meet the line, the slot and the provider: how long the
slot is still busy, how much of the prompt it will hold, and what the provider has to do first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import trio

from onebitd.core import backend_args
from onebitd.core.config import Config
from onebitd.core.costs import Costs
from onebitd.core.handoff import Route
from onebitd.core.plans import HandOff, Plan
from onebitd.core.slot_content import READ_AT_ONCE_BYTES, Content, Prompt, SlotMemory
from onebitd.core.state_layout import Layout
from onebitd.core.weighing import Habits, Outlook
from onebitd.services.admission import Admission, Ticket
from onebitd.services.cost_keeper import CostKeeper
from onebitd.services.provider_runs import ProviderRuns
from onebitd.services.supervisor import BackendFacts, Supervisor

_REPLY_LIMITS: Final = ("max_tokens", "max_completion_tokens", "n_predict")
_LOCK_FADES_S: Final = 60.0
"""The wait for the lock halves with each minute in which it was not measured: somebody else had the
device, and where that makes the decoder the better way nobody would find out that it is over."""
_STILL_SHARE: Final = 0.25
"""A reply that is longer than expected is expected to go on for this share of what it has taken."""


class Outlooks:
    """Looks ahead for one prompt after the other, and learns from each.

    Args:
        supervisor: has the decoder.
        admission: the line for its slot.
        runs: the provider's runs.
        keeper: has the learned costs.

    Attributes:
        memory: what the decoder's slot is believed to hold.
        habits: what earlier decisions leave to the next.
    """

    def __init__(
        self, supervisor: Supervisor, admission: Admission, runs: ProviderRuns, keeper: CostKeeper
    ) -> None:
        self._supervisor = supervisor
        self._admission = admission
        self._runs = runs
        self._keeper = keeper
        self._generation = -1
        self._lock_noted = trio.current_time()
        self._was_asked = False
        self.memory = SlotMemory()
        self.habits = Habits()

    @property
    def costs(self) -> Costs:
        """The learned costs."""
        return self._keeper.costs

    # Before a decision.

    def of(
        self, facts: BackendFacts, prompt: Prompt, route: Route, ticket: Ticket, config: Config
    ) -> Outlook:
        """Return the outlook of a prompt whose request is in the line.

        Args:
            facts: of the decoder that runs.
            prompt: N ids, of which a handoff would hand over N-1.
            route: that a handoff would take.
            ticket: its place; the prompt's own run, if it is on, counts from its start.
            config: of the request.
        """
        self._was_asked = True
        costs = self.costs
        count = len(prompt.ids)
        wait_ms, cached = self._slot_wait_ms(ticket), self.cached(facts, prompt, ticket)
        lost = self.memory.displaced(prompt)
        lost_ms = costs.decoder_ms(0, lost, overlapped=False) if lost else 0.0
        return Outlook(
            route=route,
            prompt_tokens=count,
            cached_tokens=cached,
            slot_wait_ms=wait_ms,
            decoder_ms=costs.decoder_ms(cached, count - cached, overlapped=False),
            decoder_whole_ms=costs.decoder_ms(0, count, overlapped=False),
            provider_ms=self._provider_ms(route, count - 1, wait_ms > 0, ticket, config),
            handover_ms=self._handover_ms(route, count, facts.layout),
            displaced_ms=(lost_ms or 0.0) * self.memory.returns_share,
            provider_runs=costs.provider_tries(route),
            decoder_replies=costs.decoder_samples(),
            provider_age=self.habits.provider_age,
            decoder_age=self.habits.decoder_age,
            leaning=self.habits.leaning(count, cached),
            budget_ms=self.habits.budget_ms,
        )

    async def read_reply(self) -> None:
        """Have the text of the reply in the slot at hand; a long one is read in a thread."""
        reply = self.memory.reply
        if reply is not None and reply.unread_bytes > READ_AT_ONCE_BYTES:
            await trio.to_thread.run_sync(lambda: reply.text)

    def cached(self, facts: BackendFacts, prompt: Prompt, ticket: Ticket) -> int:
        """Return how many of the prompt's tokens the slot will hold when it is the ticket's."""
        self.see(facts)
        ahead = self._admission.ahead_of(ticket)
        if ahead:
            last = ahead[-1].prompt
            found = 0 if last is None else Content(last).reusable(prompt)
        else:
            found = self.memory.reusable(prompt)
        return int(found * self.costs.reuse_share())

    def see(self, facts: BackendFacts) -> None:
        """A decoder that has just started holds nothing."""
        if facts.generation == self._generation:
            return
        self._generation = facts.generation
        self.memory.forget_all()
        mib = backend_args.cache_ram_mib(self._supervisor.argv)
        if facts.layout is None or mib == 0:
            self.memory.cached_tokens_max = 0
        else:
            self.memory.cached_tokens_max = _tokens_in(mib, facts.layout)

    def _provider_ms(
        self, route: Route, tokens: int, overlapped: bool, ticket: Ticket, config: Config
    ) -> float | None:
        """Return how long until the provider is done: its own run, and what that waits for."""
        costs = self.costs
        run_ms = costs.provider_ms(route, tokens, overlapped=overlapped)
        running = self._runs.running
        if run_ms is None or (running is not None and running.ticket is ticket):
            return run_ms
        wait_ms = 0.0
        if running is not None and running.ticket.run_ms is not None:
            wait_ms = max(0.0, running.ticket.run_ms - running.elapsed_ms)
        if config.lock.enabled and config.lock.hold == "handoff":
            wait_ms += self._lock_ms()
        return wait_ms + run_ms

    def _lock_ms(self) -> float:
        found = self.costs.lock_ms()
        since_s = trio.current_time() - self._lock_noted
        return 0.0 if found is None else found * 0.5 ** (since_s // _LOCK_FADES_S)

    def note_lock(self, ms: float) -> None:
        """Learn how long the device lock was waited for."""
        self.costs.note_lock(ms)
        self._lock_noted = trio.current_time()

    def _handover_ms(self, route: Route, count: int, layout: Layout | None) -> float:
        costs = self.costs
        one_ms = costs.decoder_ms(count - 1, 1, overlapped=False) or 0.0
        if route is Route.SHARED:
            return one_ms + (costs.adopt_ms() or 0.0)
        if layout is None:
            return one_ms
        return one_ms + (costs.restore_ms(layout.bytes_for(count - 1)) or 0.0)

    def _slot_wait_ms(self, ticket: Ticket) -> float:
        """Return how long until the slot is this ticket's."""
        total_ms = 0.0
        for other in self._admission.ahead_of(ticket):
            work_ms = other.work_ms
            if work_ms is None:
                work_ms = self.reply_ms(None)
            if other.granted is not None:
                spent_ms = (trio.current_time() - other.granted) * 1000.0
                work_ms = max(work_ms - spent_ms, _STILL_SHARE * min(spent_ms, work_ms))
            total_ms += work_ms
        return total_ms

    def reply_ms(self, document: Mapping[str, Any] | None) -> float:
        """Return how long a reply is expected to take, by the limit that its request sets."""
        tokens = self.costs.reply_tokens()
        if tokens is None:
            return 0.0
        limit = _reply_limit(document)
        expected = tokens if limit is None else min(tokens, limit)
        return self.costs.reply_ms(round(expected)) or 0.0

    def expect(
        self, ticket: Ticket, outlook: Outlook, plan: Plan, document: Mapping[str, Any] | None
    ) -> None:
        """Write onto a ticket what those behind it have to wait for.

        Args:
            ticket: whose way is decided.
            outlook: that it was decided by.
            plan: what was decided.
            document: the request's body.
        """
        hands_off = isinstance(plan, HandOff)
        first_byte_ms = outlook.by_provider_ms if hands_off else outlook.by_decoder_ms
        ticket.run_ms = outlook.provider_ms if hands_off else None
        ticket.work_ms = self.reply_ms(document)
        if first_byte_ms is not None:
            ticket.work_ms += first_byte_ms - outlook.slot_wait_ms

    def touch(self) -> None:
        """Something was learned."""
        self._keeper.touch()

    def refit(self) -> None:
        """Work out now what the next outlook needs: a request is over, and that one is on none.

        Where none was wanted since the last time, the next may never be.
        """
        if self._was_asked:
            self._was_asked = False
            self.costs.refit()


def _reply_limit(document: Mapping[str, Any] | None) -> int | None:
    for name in _REPLY_LIMITS:
        value = None if document is None else document.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None


def _tokens_in(mib: float, layout: Layout) -> int:
    many = 1024
    tokens = mib * (1 << 20) / (layout.bytes_for(many) / many)
    return int(min(tokens, 2.0**31)) if math.isfinite(tokens) else 2**31
