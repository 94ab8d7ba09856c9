"""What one request teaches: about costs, about the provider, and about what the slot holds now."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from onebitd.adapters.suspend_clock import SuspendWatch
from onebitd.core import sse
from onebitd.core.errors import HandoffError
from onebitd.core.handoff import HandoffRecord, Reason, Route
from onebitd.core.reuse import Reuse
from onebitd.core.slot_content import Content, Prompt, Reply
from onebitd.services.outlooks import Outlooks
from onebitd.services.provider_breaker import ProviderBreaker
from onebitd.services.provider_runs import Prefilled
from onebitd.services.race import Overtaken


class Lessons:
    """Takes what a request shows into account; no times from a moment in which the box slept.

    Args:
        outlooks: has the costs and the slot's memory.
        breaker: counts failures.
        reuse: counts what was handed over in vain.
        record: of the request.
        is_ours: says whether the request's provider is still the configured one: what another did
            is not held against it.

    Attributes:
        expected_tokens: of the prompt that the slot was believed to hold when it was forwarded.
        run_beside: somebody else's provider run was on while the decoder worked.
        forwarded: when the decoder got the request (time.monotonic()); no work of its took longer.
    """

    def __init__(
        self,
        outlooks: Outlooks,
        breaker: ProviderBreaker,
        reuse: Reuse,
        record: HandoffRecord,
        is_ours: Callable[[], bool] = lambda: True,
    ) -> None:
        self._outlooks = outlooks
        self._breaker = breaker
        self._reuse = reuse
        self._record = record
        self._is_ours = is_ours
        self._sleep = SuspendWatch()
        self._counted: HandoffError | None = None
        self.expected_tokens = 0
        self.run_beside = False
        self.forwarded = -math.inf

    def failed(self, error: HandoffError) -> HandoffError:
        """Count a failed handoff, once; return it, perhaps with more to say."""
        if error is not self._counted and self._is_ours():
            error = self._counted = self._breaker.note_failure(error, slept=self._sleep.slept())
        return error

    def succeeded(self) -> None:
        """The decoder took what was handed over."""
        if self._is_ours():
            self._breaker.note_success()

    def run_ended(
        self, route: Route, tokens: int, run_ms: float, *, overlapped: bool, cold: bool
    ) -> None:
        """A provider run has ended well; see `Costs.note_provider`."""
        if self._sleep.slept() or not self._is_ours():
            return
        costs, record, now = self._outlooks.costs, self._record, time.time()
        costs.note_provider(route, tokens, run_ms, overlapped=overlapped, cold=cold, now=now)
        if record.lock_ms is not None:
            self._outlooks.note_lock(record.lock_ms)
        if route is Route.SHARED:
            costs.note_adopt((record.share_ms or 0.0) + (record.adopt_ms or 0.0))
        self._outlooks.touch()

    def run_stopped(self, stopped: Overtaken, tokens: int, *, overlapped: bool) -> None:
        """A run was stopped: it takes longer than that. One that overran may well hang."""
        if self._sleep.slept() or not self._is_ours():
            return
        now, reason = time.time(), Reason.PROVIDER_TIMEOUT
        costs = self._outlooks.costs
        if stopped.elapsed_ms is not None:
            costs.note_provider_at_least(
                Route.FILE, tokens, stopped.elapsed_ms, overlapped=overlapped, now=now
            )
        else:
            reason = Reason.LOCK_BUSY
            if self._record.lock_ms is not None:
                self._outlooks.note_lock(self._record.lock_ms)
        if stopped.overran:
            self._breaker.note_failure(HandoffError(reason, stopped.detail), slept=False)
        self._outlooks.touch()

    def restored(self, prefilled: Prefilled, tokens: int, took_ms: float) -> None:
        """A state file was restored."""
        if not self._sleep.slept():
            self._outlooks.costs.note_restore(prefilled.size, took_ms, time.time())
        self._outlooks.costs.note_state(tokens, prefilled.size)

    def replied(self, timings: dict[str, Any] | None, handed: int | None, generation: int) -> None:
        """A reply has ended, with status 200.

        Args:
            timings: the decoder's own.
            handed: tokens that were handed over and not lost since.
            generation: of the decoder.
        """
        if timings is None:
            return
        record = self._record
        cached, evaluated = record.cached_tokens, record.evaluated_tokens
        by_handoff = handed is not None and self._is_ours()
        if by_handoff and record.prompt_tokens and evaluated is not None:
            self._reuse.note(generation, record.prompt_tokens, evaluated)
        if self._sleep.slept():
            return
        costs, now, ms = self._outlooks.costs, time.time(), sse.prompt_ms(timings)
        spent_ms = (time.monotonic() - self.forwarded) * 1000.0
        if cached is not None and evaluated and ms is not None and ms <= spent_ms:
            costs.note_decoder(cached, evaluated, ms, overlapped=self.run_beside, now=now)
        generated = sse.predicted(timings)
        if generated is not None and generated[1] <= spent_ms:
            costs.note_reply(*generated, now)
        if handed is None and self.expected_tokens and cached is not None:
            expected = self.expected_tokens
            costs.note_reuse(expected, min(cached, expected))
        if record.tokenize_ms is not None and record.prompt_tokens:
            front_ms = record.tokenize_ms + (record.template_ms or 0.0)
            costs.note_front(record.prompt_tokens, front_ms, now)
        self._outlooks.touch()

    def slot_left(
        self,
        prompt: Prompt | None,
        status: int | None,
        watch: sse.ReplyWatch | None,
        *,
        restored: bool,
    ) -> None:
        """The request gives the slot back, after it was forwarded.

        Args:
            prompt: that it was about, None when that is not known.
            status: of the reply, None without one.
            watch: that saw the reply.
            restored: the prompt came by a handoff.
        """
        memory = self._outlooks.memory
        if status is not None and 400 <= status < 500:
            return  # nothing was evaluated
        if prompt is None or status is None or status >= 500 or watch is None:
            memory.forget()
            return
        timings = watch.timings()
        if timings is not None:
            generated = sse.predicted(timings)
            reply = None if generated is None else Reply(generated[0], watch.text, watch.text_bytes)
            memory.note(Content(prompt, reply), restored=restored)
        elif watch.started:
            memory.note(Content(prompt), restored=restored)
        else:
            memory.forget()
