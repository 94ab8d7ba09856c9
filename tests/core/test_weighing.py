"""weigh(): which of two ways to the first byte is taken, when nothing but estimates is known."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebitd.core.costs import Costs
from onebitd.core.handoff import Reason, Route
from onebitd.core.plans import HandOff, Plan, Skip
from onebitd.core.weighing import (
    BUDGET_SHARE,
    EXPLORE_AFTER,
    HYSTERESIS,
    LEARN_FROM,
    Habits,
    Outlook,
    is_overtaken,
    weigh,
)

KNOWN = Outlook(
    route=Route.FILE,
    prompt_tokens=1000,
    decoder_ms=95.0,
    decoder_whole_ms=95.0,
    provider_ms=620.0,
    handover_ms=20.0,
    provider_runs=LEARN_FROM,
    decoder_replies=LEARN_FROM,
)
FASTER = dataclasses.replace(KNOWN, decoder_ms=1000.0, decoder_whole_ms=1000.0)


def word(plan: Plan) -> str:
    """Return `handoff`, or the reason of a skip."""
    return "handoff" if isinstance(plan, HandOff) else str(plan.reason)


@pytest.mark.parametrize(
    ("provider_runs", "decoder_replies", "first", "explored"),
    [
        (0, 0, "handoff", True),
        (1, 0, "policy", True),
        (1, 1, "handoff", True),
        (2, 1, "policy", True),
        (2, 2, "policy", False),
        (0, 9, "handoff", True),
        (9, 0, "policy", True),
    ],
)
def test_weigh_unknown_rates_are_tried_in_turn(
    provider_runs: int, decoder_replies: int, first: str, explored: bool
) -> None:
    """Provider, decoder, provider, decoder; then what they showed is weighed."""
    outlook = dataclasses.replace(
        KNOWN, provider_runs=provider_runs, decoder_replies=decoder_replies
    )
    if not provider_runs:
        outlook = dataclasses.replace(outlook, provider_ms=None)
    if not decoder_replies:
        outlook = dataclasses.replace(outlook, decoder_ms=None, decoder_whole_ms=None)
    plan = weigh(outlook)
    assert (word(plan), plan.explored) == (first, explored)


def test_weigh_later_turn_is_no_lesson() -> None:
    """A chat's second turn is decoded from the slot even when nothing at all is known."""
    plan = weigh(Outlook(Route.FILE, prompt_tokens=1000, cached_tokens=900))
    assert plan == Skip(Reason.ALREADY_CACHED, "900 of 1000 tokens are in its cache")


def test_weigh_nothing_known_the_first_run_takes_as_long_as_it_takes() -> None:
    """A cold start is slow; only the provider's own limit holds."""
    assert weigh(Outlook(Route.FILE, 1000)) == HandOff(Route.FILE, explored=True)


@pytest.mark.parametrize(("provider_ms", "limit_ms"), [(170.0, None), (171.0, 190.0)])
def test_weigh_second_run_after_a_slow_one_is_bounded(
    provider_ms: float, limit_ms: float | None
) -> None:
    """Was it slow for being cold, the next one is done within twice the decoder's time."""
    outlook = dataclasses.replace(KNOWN, provider_ms=provider_ms, provider_runs=1)
    assert weigh(outlook) == HandOff(Route.FILE, explored=True, limit_ms=limit_ms)


@pytest.mark.parametrize("missing", ["provider_ms", "decoder_ms"])
def test_weigh_estimate_that_lacks_in_spite_of_trying_is_the_decoders(missing: str) -> None:
    """No sample makes an estimate: it is not tried for ever."""
    changes: dict[str, Any] = {missing: None}
    assert word(weigh(dataclasses.replace(KNOWN, **changes))) == "policy"


def test_weigh_slower_provider_is_skipped_with_both_estimates() -> None:
    """The detail says what was compared."""
    expected = "640 ms on the provider, 95 ms on the decoder"
    assert weigh(KNOWN) == Skip(Reason.POLICY, expected)


def test_weigh_small_estimates_keep_a_decimal() -> None:
    """`0 ms` would say nothing."""
    outlook = dataclasses.replace(KNOWN, decoder_ms=2.34)
    assert "2.3 ms on the decoder" in outlook.comparison()


def test_weigh_faster_provider_gets_the_prompt_and_some_patience() -> None:
    """Half as much again, and the decoder's own time: a device that hangs costs no more."""
    assert weigh(FASTER) == HandOff(Route.FILE, limit_ms=1.5 * 620 + 1000)


@pytest.mark.parametrize(
    ("leaning", "decoder_ms", "hands_off"),
    [
        (None, 639, False),
        (None, 641, True),
        (True, 611, True),
        (True, 608, False),
        (False, 672, False),
        (False, 675, True),
    ],
)
def test_weigh_way_taken_last_is_left_only_for_one_clearly_faster(
    leaning: bool | None, decoder_ms: float, hands_off: bool
) -> None:
    """Hysteresis on both sides of 640 ms: 5 percent."""
    outlook = dataclasses.replace(KNOWN, decoder_ms=decoder_ms, leaning=leaning)
    assert isinstance(weigh(outlook), HandOff) is hands_off


def test_habits_leaning_is_kept_by_what_is_left_to_evaluate() -> None:
    """Short prompts may go to the decoder and long ones to the provider; a look leans nowhere."""
    habits = Habits()
    habits.note(FASTER, HandOff(Route.FILE))
    short = dataclasses.replace(KNOWN, prompt_tokens=1000, cached_tokens=900)
    habits.note(short, Skip(Reason.POLICY, ""))
    assert [habits.leaning(n, 0) for n in (1000, 1020, 100, 10)] == [True, True, False, None]
    habits.note(FASTER, Skip(Reason.POLICY, "", explored=True))
    assert habits.leaning(1000, 0) is True


def test_weigh_run_by_file_hides_behind_the_wait_for_the_slot() -> None:
    """While the slot is somebody else's, the provider costs nothing but the restore."""
    busy = dataclasses.replace(KNOWN, slot_wait_ms=700.0)
    assert (busy.by_provider_ms, busy.by_decoder_ms) == (720.0, 795.0)
    assert word(weigh(busy)) == "handoff"


def test_weigh_shared_route_hides_behind_nothing() -> None:
    """It writes into the slot itself, so the run begins when the slot is free."""
    busy = dataclasses.replace(KNOWN, route=Route.SHARED, slot_wait_ms=700.0)
    assert (busy.by_provider_ms, busy.by_decoder_ms) == (1340.0, 795.0)
    assert word(weigh(busy)) == "policy"


def test_weigh_displaced_conversation_counts_against_the_provider() -> None:
    """What comes back later has to be evaluated again; the detail says so."""
    even = dataclasses.replace(KNOWN, decoder_ms=700.0)
    assert word(weigh(even)) == "handoff"
    plan = weigh(dataclasses.replace(even, displaced_ms=100.0))
    assert isinstance(plan, Skip)
    assert plan.detail == (
        "640 ms on the provider, 700 ms on the decoder, 100 ms for what a handoff displaces"
    )


@pytest.mark.parametrize(
    ("cached", "whole_ms", "reason"),
    [
        (0, 95.0, Reason.POLICY),
        (100, 95.0, Reason.POLICY),
        (100, 700.0, Reason.ALREADY_CACHED),
        (500, 95.0, Reason.ALREADY_CACHED),
    ],
)
def test_weigh_skip_says_already_cached_where_the_cache_decides(
    cached: int, whole_ms: float, reason: Reason
) -> None:
    """Half of the prompt or more, or without it the provider would have been faster."""
    plan = weigh(dataclasses.replace(KNOWN, cached_tokens=cached, decoder_whole_ms=whole_ms))
    assert isinstance(plan, Skip)
    assert plan.reason is reason
    assert plan.detail.startswith("640 ms on the provider, 95 ms on the decoder")


READY = dataclasses.replace(KNOWN, provider_age=EXPLORE_AFTER, budget_ms=95.0)


@pytest.mark.parametrize(
    ("changes", "explores"),
    [
        ({}, True),
        ({"provider_age": EXPLORE_AFTER - 1}, False),
        ({"budget_ms": 94.9}, False),
        ({"slot_wait_ms": 300.0}, True),
        ({"cached_tokens": 500}, False),
        ({"route": Route.SHARED}, False),
        ({"route": Route.SHARED, "budget_ms": 545.0}, True),
        ({"provider_ms": 100.0, "budget_ms": 25.0}, True),
        ({"provider_ms": 100.0, "budget_ms": 24.9}, False),
        ({"displaced_ms": 400.0, "provider_ms": 70.0, "budget_ms": 94.0}, False),
    ],
)
def test_weigh_look_at_the_slower_provider_costs_what_is_saved_up(
    changes: dict[str, object], explores: bool
) -> None:
    """Seldom, never beyond the budget, no longer than the decoder, and not for a chat's next turn:
    cut off so soon, a run would show nothing."""
    plan = weigh(dataclasses.replace(READY, **changes))  # type: ignore[arg-type]
    assert (isinstance(plan, HandOff), plan.explored) == (explores, explores)
    if isinstance(plan, HandOff):
        assert plan.limit_ms == 95.0


@pytest.mark.parametrize(
    ("age", "budget_ms", "explores"),
    [(EXPLORE_AFTER, 360.0, True), (EXPLORE_AFTER, 359.0, False), (24, 1e9, False)],
)
def test_weigh_look_at_the_slower_decoder_costs_what_is_saved_up(
    age: int, budget_ms: float, explores: bool
) -> None:
    """It cannot be cut off, so the whole difference has to be there."""
    plan = weigh(dataclasses.replace(FASTER, decoder_age=age, budget_ms=budget_ms))
    assert (isinstance(plan, Skip), plan.explored) == (explores, explores)


@pytest.mark.parametrize(
    ("elapsed_ms", "provider_ms", "decoder_ms", "overtaken"),
    [
        (0.0, 1000.0, 500.0, True),
        (500.0, 1000.0, 500.0, False),
        (480.0, 1000.0, 500.0, True),
        (2000.0, 1000.0, 500.0, False),
        (2000.0, 1000.0, 15.0, True),
        (0.0, None, 500.0, False),
        (0.0, 1000.0, None, False),
    ],
)
def test_is_overtaken_compares_what_is_left(
    elapsed_ms: float, provider_ms: float | None, decoder_ms: float | None, overtaken: bool
) -> None:
    """What the run has done already is done; the restore is still to come."""
    now = dataclasses.replace(
        KNOWN, provider_ms=provider_ms, decoder_ms=decoder_ms, slot_wait_ms=1e9
    )
    assert is_overtaken(now, elapsed_ms) is overtaken


ms = st.floats(0, 1e9)
maybe_ms = st.none() | ms
outlooks = st.builds(
    Outlook,
    route=st.sampled_from(Route),
    prompt_tokens=st.integers(2, 1 << 20),
    cached_tokens=st.integers(0, 1 << 20),
    slot_wait_ms=ms,
    decoder_ms=maybe_ms,
    decoder_whole_ms=maybe_ms,
    provider_ms=maybe_ms,
    handover_ms=ms,
    displaced_ms=ms,
    provider_runs=st.integers(0, 3),
    decoder_replies=st.integers(0, 3),
    provider_age=st.integers(0, 50),
    decoder_age=st.integers(0, 50),
    leaning=st.none() | st.booleans(),
    budget_ms=ms,
)


@given(outlooks, ms)
def test_weigh_never_takes_the_clearly_slower_way_unexplored(
    outlook: Outlook, elapsed_ms: float
) -> None:
    """Whatever the estimates, nothing raises, and only what is marked explored may lose."""
    plan = weigh(outlook)
    is_overtaken(outlook, elapsed_ms)
    outlook.comparison()
    Habits(budget_ms=outlook.budget_ms).note(outlook, plan)
    provider, decoder = outlook.by_provider_ms, outlook.by_decoder_ms
    if plan.explored or provider is None or decoder is None:
        return
    if isinstance(plan, HandOff):
        assert provider + outlook.displaced_ms <= decoder * (1 + HYSTERESIS)
    elif min(outlook.provider_runs, outlook.decoder_replies) >= LEARN_FROM:
        assert decoder * (1 - HYSTERESIS) <= provider + outlook.displaced_ms


@given(outlooks)
def test_weigh_exploration_never_costs_more_than_the_budget(outlook: Outlook) -> None:
    """Once both rates are known, what a look may lose has been saved up before."""
    known = dataclasses.replace(outlook, provider_runs=9, decoder_replies=9)
    plan = weigh(known)
    provider, decoder = known.by_provider_ms, known.by_decoder_ms
    if not plan.explored or provider is None or decoder is None or known.decoder_ms is None:
        return
    loss = decoder - provider - known.displaced_ms
    if isinstance(plan, HandOff):
        loss = -loss if known.route is Route.SHARED else min(-loss, known.decoder_ms)
    assert loss <= known.budget_ms + 1e-6 * (provider + decoder + known.displaced_ms)


class Box:
    """Two devices that are made up, costs that are learned from them, and every decision.

    Args:
        provider, decoder: milliseconds per token of each.
    """

    def __init__(self, provider: float, decoder: float) -> None:
        self.provider, self.decoder = provider, decoder
        self.costs, self.habits = Costs(), Habits()
        self.now = 1.8e9
        self.total_ms = self.explored_ms = self.dearest_ms = 0.0

    def ask(self, tokens: int = 1000, cached: int = 0, route: Route = Route.FILE) -> Plan:
        """Decide for one prompt, play it, learn from it."""
        costs, left = self.costs, tokens - cached
        self.now += 10
        outlook = Outlook(
            route,
            tokens,
            cached,
            decoder_ms=costs.decoder_ms(cached, left, overlapped=False),
            decoder_whole_ms=costs.decoder_ms(0, tokens, overlapped=False),
            provider_ms=costs.provider_ms(route, tokens - 1, overlapped=False),
            provider_runs=costs.provider_tries(route),
            decoder_replies=costs.decoder_samples(),
            provider_age=self.habits.provider_age,
            decoder_age=self.habits.decoder_age,
            leaning=self.habits.leaning(tokens, cached),
            budget_ms=self.habits.budget_ms,
        )
        plan = weigh(outlook)
        self.habits.note(outlook, plan)
        spent_ms = self._play(plan, tokens, cached)
        best_ms = min(self.provider * tokens, self.decoder * left)
        self.total_ms += spent_ms
        if plan.explored and outlook.provider_runs >= 2 and outlook.decoder_replies >= 2:
            self.explored_ms += spent_ms - best_ms
            self.dearest_ms = max(self.dearest_ms, spent_ms - best_ms)
        return plan

    def _play(self, plan: Plan, tokens: int, cached: int) -> float:
        costs, left = self.costs, tokens - cached
        decoder_ms = self.decoder * left
        if isinstance(plan, HandOff):
            run_ms = self.provider * tokens
            if plan.limit_ms is None or run_ms <= plan.limit_ms:
                cold = costs.provider_tries(plan.route) == 0
                costs.note_provider(
                    plan.route, tokens - 1, run_ms, overlapped=False, cold=cold, now=self.now
                )
                return run_ms
            costs.note_provider_at_least(
                plan.route, tokens - 1, plan.limit_ms, overlapped=False, now=self.now
            )
            costs.note_decoder(cached, left, decoder_ms, overlapped=False, now=self.now)
            return plan.limit_ms + decoder_ms
        costs.note_decoder(cached, left, decoder_ms, overlapped=False, now=self.now)
        return decoder_ms

    def asked_until(self, wanted: str, most: int, tokens: int = 1000) -> int:
        """Ask until five in a row end so, no look among them; return how many that took."""
        in_row = 0
        for count in range(most):
            plan = self.ask(tokens)
            in_row = in_row + 1 if word(plan) == wanted and not plan.explored else 0
            if in_row == 5:
                return count
        raise AssertionError(f"not within {most} prompts: {self.habits}")


@pytest.mark.parametrize(("provider", "decoder"), [(2.0, 0.5), (0.5, 2.0)])
def test_weigh_fresh_box_takes_the_faster_way_from_the_fifth_prompt_on(
    provider: float, decoder: float
) -> None:
    """Four prompts of learning, the cold run included, and both rates are known."""
    box = Box(provider, decoder)
    plans = [box.ask() for _ in range(9)]
    better = "policy" if decoder < provider else "handoff"
    expected = ["handoff", "policy", "handoff", "policy", *[better] * 5]
    assert [word(plan) for plan in plans] == expected
    assert [plan.explored for plan in plans[:3] + plans[4:]] == [True] * 3 + [False] * 5


@pytest.mark.parametrize(
    ("provider", "decoder", "route"),
    [(2.0, 0.5, Route.FILE), (0.5, 2.0, Route.FILE), (2.0, 0.5, Route.SHARED)],
)
def test_weigh_looks_at_the_slower_way_stay_within_their_share(
    provider: float, decoder: float, route: Route
) -> None:
    """Over a long time they cost half a percent of it, and one look; and they do happen."""
    box = Box(provider, decoder)
    for index in range(1200):
        box.ask((300, 1000, 2000)[index % 3], route=route)
    assert 0 < box.explored_ms <= BUDGET_SHARE * box.total_ms + box.dearest_ms


@pytest.mark.parametrize("faster", [0.4, 0.1])
def test_weigh_provider_that_got_faster_is_noticed(faster: float) -> None:
    """A new driver, say: in a bounded number of prompts it gets them."""
    box = Box(2.0, 0.5)
    for _ in range(200):
        box.ask()
    box.provider = faster
    assert box.asked_until("handoff", 1200) > 5


def test_weigh_provider_that_got_faster_is_noticed_between_the_turns_of_chats() -> None:
    """Turns that are in the slot have no look to give away; one prompt in five is a fresh one."""
    box = Box(2.0, 0.5)
    for index in range(400):
        box.ask(1000, 950 if index % 5 else 0)
    box.provider = 0.2
    for index in range(1200):
        plan = box.ask(1000, 950 if index % 5 else 0)
        if isinstance(plan, HandOff) and not plan.explored:
            return
    raise AssertionError(box.habits)


def test_weigh_decoder_that_got_faster_is_noticed() -> None:
    """It was asked to do something else, say; then it gets its prompts back."""
    box = Box(0.5, 1.5)
    for _ in range(200):
        box.ask()
    box.decoder = 0.1
    assert box.asked_until("policy", 2500) > 5


def test_weigh_provider_that_got_slower_is_left_soon() -> None:
    """Its patience cuts a run off; a few of them are enough."""
    box = Box(0.5, 1.0)
    for _ in range(50):
        box.ask()
    box.provider = 50.0
    assert box.asked_until("policy", 40) <= 25


def test_weigh_provider_whose_runs_were_all_cut_off_is_known_to_be_slow() -> None:
    """A run that was stopped counts as tried: nobody waits for a third one."""
    box = Box(2.0, 0.5)
    for _ in range(2):
        box.costs.note_decoder(0, 1000, 500.0, overlapped=False, now=box.now)
        box.costs.note_provider_at_least(Route.FILE, 999, 1000.0, overlapped=False, now=box.now)
    plan = box.ask()
    assert (word(plan), plan.explored) == ("policy", False)
