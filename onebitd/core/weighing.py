"""The policy `auto`: which of two ways to the first byte is the shorter one.

Pure functions of estimates: no clock, no I/O. What is estimated, and how, is in `core.costs`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Final

from onebitd.core.handoff import Reason, Route
from onebitd.core.plans import HandOff, Plan, Skip

LEARN_FROM: Final = 2
"""Runs and replies that are wanted before the two ways are weighed against each other."""
HYSTERESIS: Final = 0.05
"""The way that was taken last for prompts of this size is left only for one so much faster."""
BUDGET_SHARE: Final = 0.005
"""Of the time that prompts take, what may be spent on the way believed to be slower."""
_BUDGET_MAX_MS: Final = 60_000.0
EXPLORE_AFTER: Final = 25
"""Decisions that have to lie between two looks at the slower way."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outlook:
    """What is known about both ways of one prompt. Milliseconds; None: not known.

    Args:
        route: that a handoff would take.
        prompt_tokens: N.
        cached_tokens: of the prompt, that the decoder will not have to evaluate.
        slot_wait_ms: until the slot is this prompt's.
        decoder_ms: the decoder evaluates what it does not have.
        decoder_whole_ms: it evaluates all of the prompt.
        provider_ms: the wait for the provider and the device, and the run.
        handover_ms: restore, or share and adopt, and the one token.
        displaced_ms: what losing another conversation of the decoder's is expected to cost.
        provider_runs, decoder_replies: how many the estimates rest on; a cold run counts, and one
            that was cut off.
        provider_age, decoder_age: decisions since one of them was last added.
        leaning: what was decided last for a prompt of about this size: True a handoff.
        budget_ms: what may be spent on exploration.
    """

    route: Route
    prompt_tokens: int
    cached_tokens: int = 0
    slot_wait_ms: float = 0.0
    decoder_ms: float | None = None
    decoder_whole_ms: float | None = None
    provider_ms: float | None = None
    handover_ms: float = 0.0
    displaced_ms: float = 0.0
    provider_runs: int = 0
    decoder_replies: int = 0
    provider_age: int = 0
    decoder_age: int = 0
    leaning: bool | None = None
    budget_ms: float = 0.0

    @property
    def by_decoder_ms(self) -> float | None:
        """Until the first byte, from now on, without a handoff."""
        return None if self.decoder_ms is None else self.slot_wait_ms + self.decoder_ms

    @property
    def by_provider_ms(self) -> float | None:
        """Until the first byte, from now on, with one; a run to a file hides behind the wait."""
        if self.provider_ms is None:
            return None
        if self.route is Route.FILE:
            return max(self.slot_wait_ms, self.provider_ms) + self.handover_ms
        return self.slot_wait_ms + self.provider_ms + self.handover_ms

    @property
    def is_mostly_cached(self) -> bool:
        """The decoder has half of the prompt or more."""
        return self.cached_tokens * 2 >= self.prompt_tokens

    def comparison(self) -> str:
        """Return e.g. `640 ms on the provider, 95 ms on the decoder`."""
        provider, decoder = self.by_provider_ms, self.by_decoder_ms
        parts = [] if provider is None else [f"{_ms(provider)} on the provider"]
        parts += [] if decoder is None else [f"{_ms(decoder)} on the decoder"]
        if self.cached_tokens:
            parts.append(f"{self.cached_tokens} of {self.prompt_tokens} tokens are in its cache")
        if self.displaced_ms and provider is not None and provider < (decoder or 0.0):
            parts.append(f"{_ms(self.displaced_ms)} for what a handoff displaces")
        return ", ".join(parts)


def weigh(outlook: Outlook) -> Plan:
    """Decide between the two ways of one prompt under the policy `auto`.

    What is left of an earlier turn is decoded from the slot while the rates are not known. They
    become known by trying: the provider first, the decoder next, and both once more. From then on
    the faster way is taken, and now and then the other one, as far as the budget goes.
    """
    provider, decoder = outlook.by_provider_ms, outlook.by_decoder_ms
    learned = outlook.provider_runs >= LEARN_FROM and outlook.decoder_replies >= LEARN_FROM
    if provider is None or decoder is None or not learned:
        return _learn(outlook)
    margin = 1.0
    if outlook.leaning is not None:
        margin = 1.0 + HYSTERESIS if outlook.leaning else 1.0 - HYSTERESIS
    if provider + outlook.displaced_ms < decoder * margin:
        cost = _exploration_ms(outlook, by_provider=False)
        if outlook.decoder_age >= EXPLORE_AFTER and cost <= outlook.budget_ms:
            return Skip(Reason.POLICY, f"a look at the decoder: {outlook.comparison()}", True)
        return HandOff(outlook.route, limit_ms=_patience_ms(outlook))
    # What is left of a turn is soon decoded: a run that is cut off then has shown nothing.
    if outlook.provider_age >= EXPLORE_AFTER and not outlook.is_mostly_cached:
        cost = _exploration_ms(outlook, by_provider=True)
        if cost <= outlook.budget_ms:
            return HandOff(outlook.route, explored=True, limit_ms=outlook.decoder_ms)
    return _skip(outlook)


def _learn(outlook: Outlook) -> Plan:
    if outlook.is_mostly_cached:
        return _skip(outlook)
    if outlook.decoder_replies < min(LEARN_FROM, outlook.provider_runs):
        return Skip(Reason.POLICY, "the decoder's own rate is not known yet", explored=True)
    if outlook.provider_runs >= LEARN_FROM:  # and so has the decoder: it is an estimate that lacks
        return _skip(outlook)
    limit_ms = None
    provider, decoder = outlook.by_provider_ms, outlook.decoder_ms
    if provider is not None and decoder is not None and provider > 2 * decoder:
        # The first run was slow. If that was a cold start, the next one is done within this.
        limit_ms = 2 * decoder
    return HandOff(outlook.route, explored=True, limit_ms=limit_ms)


def _skip(outlook: Outlook) -> Skip:
    provider, whole = outlook.by_provider_ms, outlook.decoder_whole_ms
    tips = (
        outlook.cached_tokens > 0
        and provider is not None
        and whole is not None
        and provider < outlook.slot_wait_ms + whole
    )
    if outlook.is_mostly_cached or tips:
        cached = f"{outlook.cached_tokens} of {outlook.prompt_tokens} tokens are in its cache"
        return Skip(Reason.ALREADY_CACHED, outlook.comparison() or cached)
    return Skip(Reason.POLICY, outlook.comparison() or "the decoder is faster")


def _exploration_ms(outlook: Outlook, *, by_provider: bool) -> float:
    """Return what taking the slower way is expected to cost at most: a run by file is cut off."""
    provider, decoder = outlook.by_provider_ms, outlook.by_decoder_ms
    assert provider is not None  # noqa: S101 - both are known when this is asked
    assert decoder is not None  # noqa: S101
    loss = provider + outlook.displaced_ms - decoder
    if not by_provider:
        return -loss
    if outlook.route is Route.SHARED:  # never stopped: it writes into the slot
        return loss
    return min(loss, decoder - outlook.slot_wait_ms)


def _patience_ms(outlook: Outlook) -> float:
    """Return how long a run may take that was expected to win: one in vain costs no more again.

    A device that hangs is as slow as that, not as its time limit.
    """
    assert outlook.provider_ms is not None  # noqa: S101
    assert outlook.decoder_ms is not None  # noqa: S101
    return 1.5 * outlook.provider_ms + outlook.decoder_ms


def is_overtaken(outlook: Outlook, elapsed_ms: float) -> bool:
    """Say whether the decoder would be sooner than a run that is on, now that the slot is free.

    Args:
        outlook: as of now; `slot_wait_ms` is of no account.
        elapsed_ms: how long the run has taken, 0 as long as it has not begun.
    """
    provider, decoder = outlook.provider_ms, outlook.decoder_ms
    if provider is None or decoder is None:
        return False
    left_ms = max(0.0, provider - elapsed_ms) + outlook.handover_ms
    return left_ms > decoder * (1.0 + HYSTERESIS)


@dataclasses.dataclass(slots=True)
class Habits:
    """What earlier decisions leave to the next ones.

    Attributes:
        budget_ms: for exploration: a share of the time that prompts took.
        provider_age, decoder_age: decisions since that way was last taken.
    """

    budget_ms: float = 0.0
    provider_age: int = 0
    decoder_age: int = 0
    _leanings: dict[int, bool] = dataclasses.field(default_factory=dict)

    def leaning(self, prompt_tokens: int, cached_tokens: int) -> bool | None:
        """Return what was decided last for a prompt with about as much to evaluate."""
        return self._leanings.get(_size_class(prompt_tokens - cached_tokens))

    def note(self, outlook: Outlook, decided: Plan) -> None:
        """Take a decision of `weigh` into account."""
        hands_off = isinstance(decided, HandOff)
        provider, decoder = outlook.by_provider_ms, outlook.by_decoder_ms
        if provider is not None and decoder is not None:
            if decided.explored:
                cost = _exploration_ms(outlook, by_provider=hands_off)
                self.budget_ms = max(0.0, self.budget_ms - max(0.0, cost))
            else:
                self.budget_ms = min(
                    _BUDGET_MAX_MS, self.budget_ms + BUDGET_SHARE * min(provider, decoder)
                )
                size = _size_class(outlook.prompt_tokens - outlook.cached_tokens)
                self._leanings[size] = hands_off
        self.provider_age = 0 if hands_off else self.provider_age + 1
        took_decoder = not hands_off and not outlook.is_mostly_cached
        self.decoder_age = 0 if took_decoder else self.decoder_age + 1


def _size_class(tokens: int) -> int:
    """Half octaves: break-even lies in one or two of them."""
    return int(2 * math.log2(max(1, tokens)))


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"
