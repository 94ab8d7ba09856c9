"""plan(): when a prompt is handed off."""

from __future__ import annotations

import dataclasses

import pytest

from onebitd.core.config import Policy
from onebitd.core.handoff import Reason, Route
from onebitd.core.policy import (
    HandOff,
    Knowledge,
    Skip,
    erase_heals,
    plan,
    plan_without_prompt,
)
from onebitd.core.state_layout import KvSection, Layout, RecrSection, Rows
from onebitd.core.weighing import Outlook, weigh
from onebitd.core.wording import Wording

KNOWN = Knowledge(
    policy=Policy.AUTO, has_provider=True, device="hybrid", unsupported=None, min_tokens=1
)


def test_plan_skip_has_a_sentence_without_words_of_decoder_and_provider() -> None:
    """What they said helps whoever asks now, and is not for the disk."""
    last = Wording("crash, last: 'my secret'", "crash")
    for changes in ({"unsupported": "it says: 'my secret'"}, {"out_of_service": last}):
        decided = plan_without_prompt(dataclasses.replace(KNOWN, **changes))
        assert decided is not None
        assert "my secret" in decided.why.full
        assert decided.why.full == decided.detail
        assert decided.why.brief
        assert "secret" not in decided.why.brief


@pytest.mark.parametrize("policy", [Policy.AUTO, Policy.ALWAYS, Policy.STRICT])
@pytest.mark.parametrize("tokens", [2, 100, 4095])
def test_plan_whatever_can_be_handed_off_is(policy: Policy, tokens: int) -> None:
    """Without an outlook, auto hands off like always."""
    known = dataclasses.replace(KNOWN, policy=policy)
    assert plan(known, tokens, 4096) == HandOff(Route.FILE)


@pytest.mark.parametrize(
    ("changes", "tokens", "ctx", "reason"),
    [
        ({"has_provider": False}, 100, 4096, Reason.NO_PROVIDER),
        ({"policy": Policy.NEVER}, 100, 4096, Reason.POLICY),
        ({"device": "cpu"}, 100, 4096, Reason.POLICY),
        ({"device": "hrx"}, 100, 4096, Reason.POLICY),
        ({"unsupported": "why"}, 100, 4096, Reason.UNSUPPORTED_MODEL),
        ({"out_of_service": Wording.of("it hangs")}, 100, 4096, Reason.BREAKER_OPEN),
        ({"not_reused": "evaluated again"}, 100, 4096, Reason.NOT_REUSED),
        ({}, 1, 4096, Reason.TOO_SHORT),
        ({}, 0, 4096, Reason.TOO_SHORT),
        ({"min_tokens": 101}, 100, 4096, Reason.TOO_SHORT),
        ({}, 4096, 4096, Reason.TOO_LONG),
        ({}, 5000, 4096, Reason.TOO_LONG),
    ],
)
def test_plan_skips_with_its_reason(
    changes: dict[str, object], tokens: int, ctx: int, reason: Reason
) -> None:
    """Each cause of a skip has its word."""
    decided = plan(dataclasses.replace(KNOWN, **changes), tokens, ctx)  # type: ignore[arg-type]
    assert isinstance(decided, Skip)
    assert decided.reason is reason
    assert decided.detail


SLOW = Outlook(
    Route.SHARED,
    prompt_tokens=100,
    decoder_ms=95.0,
    decoder_whole_ms=95.0,
    provider_ms=640.0,
    provider_runs=9,
    decoder_replies=9,
)
FAST = dataclasses.replace(SLOW, provider_ms=9.0)


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("outlook", [SLOW, FAST])
def test_plan_only_auto_weighs(policy: Policy, outlook: Outlook) -> None:
    """`always`, `strict` and `never` stand above what both ways take."""
    decided = plan(dataclasses.replace(KNOWN, policy=policy), 100, 4096, outlook)
    match policy:
        case Policy.NEVER:
            assert decided == Skip(Reason.POLICY, "the policy is never")
        case Policy.AUTO if outlook is SLOW:
            expected = "640 ms on the provider, 95 ms on the decoder"
            assert decided == Skip(Reason.POLICY, expected)
        case Policy.AUTO:
            assert decided == weigh(outlook)
        case _:
            assert decided == HandOff(Route.SHARED)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"min_tokens": 101}, Reason.TOO_SHORT),
        ({"out_of_service": Wording.of("it hangs")}, Reason.BREAKER_OPEN),
        ({"not_reused": "evaluated again"}, Reason.NOT_REUSED),
        ({"unsupported": "why"}, Reason.UNSUPPORTED_MODEL),
    ],
)
@pytest.mark.parametrize("policy", [Policy.AUTO, Policy.ALWAYS, Policy.STRICT])
def test_plan_what_cannot_be_handed_off_is_not_weighed(
    policy: Policy, changes: dict[str, object], reason: Reason
) -> None:
    """A provider that is ever so fast changes nothing."""
    known = dataclasses.replace(KNOWN, policy=policy, **changes)  # type: ignore[arg-type]
    decided = plan(known, 100, 4096, FAST)
    assert isinstance(decided, Skip)
    assert decided.reason is reason


def test_plan_unknown_context_leaves_the_limit_to_the_decoder() -> None:
    """A decoder that did not say its context is asked."""
    assert plan(KNOWN, 10**6, None) == HandOff(Route.FILE)


def test_plan_without_prompt_nothing_against_it_is_none() -> None:
    """Template and tokenize are worth their time then."""
    assert plan_without_prompt(KNOWN) is None


ROW = Rows(1, 384)
KV = KvSection(ext_bytes=0, v_trans=False, n_rot_k=None, n_rot_v=None, k=(ROW,), v=(ROW,))


@pytest.mark.parametrize(
    ("sections", "heals"),
    [
        ((KV,), True),
        ((KV, KV), True),
        ((dataclasses.replace(KV, v_trans=True),), False),
        ((KV, RecrSection(n_layer=1, rows=(ROW, ROW))), False),
    ],
)
def test_erase_heals_only_plain_caches(
    sections: tuple[KvSection | RecrSection, ...], heals: bool
) -> None:
    """Transposed values and recurrent state outlive an erase."""
    assert erase_heals(Layout(2, packed_tokens=False, sections=sections)) is heals
