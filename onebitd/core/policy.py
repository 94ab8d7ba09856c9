"""plan(): whether one prompt is handed off, by what is known and by estimates; a pure function."""

from __future__ import annotations

import dataclasses
from typing import Final

from onebitd.core.config import Policy
from onebitd.core.handoff import Reason, Route
from onebitd.core.plans import HandOff, Plan, Skip
from onebitd.core.state_layout import KvSection, Layout
from onebitd.core.weighing import Outlook, weigh
from onebitd.core.wording import Wording

__all__ = ["HandOff", "Knowledge", "Plan", "Skip", "erase_heals", "plan", "plan_without_prompt"]

_UNSUPPORTED: Final = "this decoder's state cannot be handed over; `onebitctl status` says why"


@dataclasses.dataclass(frozen=True, slots=True)
class Knowledge:
    """What is known before a prompt has been looked at.

    Args:
        policy: effective for this request.
        has_provider: a provider program is named.
        device: `backend.device`; `cpu` and `hrx` never call a provider.
        unsupported: why this decoder's state cannot be handed over, None when it can.
        min_tokens: shorter prompts are not handed off.
        out_of_service: why the provider is not to be called, None when it may be.
        not_reused: why what is handed over is of no use to this decoder, None as long as it is.
    """

    policy: Policy
    has_provider: bool
    device: str
    unsupported: str | None
    min_tokens: int
    out_of_service: Wording | None = None
    not_reused: str | None = None


def plan_without_prompt(known: Knowledge) -> Skip | None:
    """Return why no prompt at all would be handed off, or None: saves template and tokenize."""
    if known.device in ("hrx", "cpu"):
        return Skip(Reason.POLICY, f"device {known.device} never calls a provider")
    if not known.has_provider:
        return Skip(Reason.NO_PROVIDER, "no prefill provider is configured")
    if known.policy is Policy.NEVER:
        return Skip(Reason.POLICY, "the policy is never")
    if known.unsupported is not None:
        # It may quote the decoder.
        return Skip(Reason.UNSUPPORTED_MODEL, known.unsupported, brief=_UNSUPPORTED)
    if known.out_of_service is not None:
        return Skip.because(Reason.BREAKER_OPEN, known.out_of_service)
    if known.not_reused is not None:
        return Skip(Reason.NOT_REUSED, known.not_reused)
    return None


def plan(
    known: Knowledge, prompt_tokens: int, ctx_size: int | None, outlook: Outlook | None = None
) -> Plan:
    """Decide for one prompt.

    Args:
        known: see Knowledge.
        prompt_tokens: N, the prompt's last token included.
        ctx_size: the decoder's context of one slot, None when it did not say.
        outlook: what both ways are expected to take, for the policy `auto`; None hands off
            whatever can be.

    Returns:
        HandOff for N of at least two that fits with room for one new token: the decoder refuses
        N >= ctx_size with its own 400, which must reach the client before any provider runs.
    """
    skip = plan_without_prompt(known)
    if skip is not None:
        return skip
    if prompt_tokens < 2:
        return Skip(Reason.TOO_SHORT, "a prompt of one token has nothing to hand over")
    if prompt_tokens < known.min_tokens:
        return Skip(
            Reason.TOO_SHORT,
            f"{prompt_tokens} prompt tokens, handoff.min_tokens is {known.min_tokens}",
        )
    if ctx_size is not None and prompt_tokens >= ctx_size:
        return Skip(Reason.TOO_LONG, f"{prompt_tokens} prompt tokens, the context holds {ctx_size}")
    if outlook is not None:
        if known.policy is Policy.AUTO:
            return weigh(outlook)
        return HandOff(outlook.route)
    return HandOff(Route.FILE)


def erase_heals(layout: Layout) -> bool:
    """Say whether erasing the slot is enough after a restore that went wrong.

    Measured on llama.cpp: values that are not finite stay behind an erase in a transposed V cache
    (flash attention off) and in recurrent state, and reach later prompts from there.
    """
    return all(
        isinstance(section, KvSection) and not section.v_trans for section in layout.sections
    )
