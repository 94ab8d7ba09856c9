"""What must not spoil the policy `auto`: a decoder that restarts, a reload, nonsense, an audit."""

# ruff: noqa: ASYNC110 - real processes, milliseconds each

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
import trio

from onebitd.adapters.audit_files import AuditFiles
from onebitd.adapters.slot_files import RunFiles
from onebitd.core import audit, sse
from onebitd.core.breaker import LIMITS, FailureClass, State
from onebitd.core.config import Config, Policy
from onebitd.core.costs import Costs
from onebitd.core.errors import HandoffError
from onebitd.core.handoff import Reason
from onebitd.core.handoff_filter import HandoffFilter
from onebitd.core.slot_content import Prompt
from onebitd.services.slot_aside import SlotAside
from tests.services.rig import Home, home
from tests.services.test_audit import auditing
from tests.services.test_handoff import PROMPT, Rig, rigged
from tests.services.test_share_route import sharing


@pytest.fixture
def place() -> Iterator[Home]:
    with home() as made:
        yield made


def slot_holds(rig: Rig, text: str) -> int:
    """Return how many tokens of a prompt the slot is believed to hold."""
    prompt = Prompt([3 + byte for byte in text.encode()], text)
    return rig.handoffs.outlooks.memory.reusable(prompt)


async def wait_restarted(rig: Rig) -> None:
    """Have the decoder killed, and wait for the next one."""
    facts = rig.supervisor.facts
    assert facts is not None
    rig.supervisor.kill("of the test", its_own_fault=False)
    await rig.supervisor.wait_restarted(facts.generation)


async def test_exchange_decoder_that_restarted_while_it_waited_was_believed_to_hold_nothing(
    place: Home,
) -> None:
    """Or the next prompts would be thought to be in the slot by half, for nothing it did."""
    async with rigged(place) as rig, trio.open_nursery() as nursery:
        await rig.ask(PROMPT, policy=Policy.AUTO)
        in_front = rig.admission.enter("in front")
        nursery.start_soon(lambda: rig.ask(PROMPT + " jumps", policy=Policy.AUTO))
        with trio.fail_after(10):
            while rig.admission.pending == 0 or rig.decoder_targets()[-1] != "/tokenize":
                await trio.sleep(0.005)
            await wait_restarted(rig)
        in_front.leave()
        await rig.admission.wait_empty()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert rig.last()["cached_tokens"] == 0
        assert rig.handoffs.keeper.costs.reuse_share() == 1.0


def with_provider(config: Config, **changed: Any) -> Config:
    """Return a configuration with another `[provider]`."""
    return dataclasses.replace(config, provider=dataclasses.replace(config.provider, **changed))


@pytest.mark.parametrize("mode", ["exit:3", "ok"])
async def test_exchange_run_of_a_provider_that_was_replaced_says_nothing_about_the_next(
    place: Home, mode: str
) -> None:
    """Neither its failure nor what it took; the request itself goes on as it began."""
    async with rigged(place) as rig, trio.open_nursery() as nursery:
        handoffs = rig.handoffs
        rig.mode(f"sleep:0.4,{mode}")
        nursery.start_soon(lambda: rig.ask(PROMPT, policy=Policy.AUTO))
        with trio.fail_after(10):
            while not rig.provider_runs():
                await trio.sleep(0.005)
            handoffs.reconfigure(with_provider(handoffs.config, elfs="/other"), rig.lock)
            while rig.admission.holder is not None:
                await trio.sleep(0.005)
        assert rig.last()["outcome"] == ("used" if mode == "ok" else "fallback")
        assert handoffs.breaker.status().failures == 0
        assert handoffs.keeper.costs.to_json()["provider"] == {"file": [], "shared": []}


async def test_exchange_strict_does_not_tell_a_client_what_the_provider_said_of_others(
    place: Home,
) -> None:
    """Its last words may quote a prompt; the record, for the operator, has them."""
    async with rigged(place) as rig:
        rig.handoffs.breaker.reset = lambda: False  # type: ignore[method-assign] # of the rig
        for _ in range(3):
            error = HandoffError(Reason.PROVIDER_EXIT, "status 3: bad prompt 'my secret'")
            rig.handoffs.breaker.note_failure(error, slept=False)
        assert rig.handoffs.breaker.status().state is State.OPEN
        refused = await rig.refused(PROMPT, policy=Policy.STRICT)
        assert refused.reason is Reason.BREAKER_OPEN
        assert "crash 3 times in a row" in refused.message
        assert "secret" not in refused.message
        assert "secret" in rig.last()["detail"]


@pytest.mark.parametrize("stream", [False, True])
async def test_exchange_figures_of_a_decoder_that_cannot_be_spoil_nothing(
    place: Home, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The reply is whole, the slot free, and what is kept of the costs can be read again."""
    real, odd = sse._timings_of, [10**400, -1, True, "7", float("nan"), float("inf")]
    names = ("cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms")

    def timings_of(document: bytes) -> dict[str, Any] | None:
        return None if real(document) is None else dict.fromkeys(names, odd[-1])

    async with rigged(place) as rig:
        monkeypatch.setattr(sse, "_timings_of", timings_of)
        while odd:
            asked = await rig.ask(PROMPT, policy=Policy.NEVER, stream=stream)
            assert (asked.status, asked.end) == (200, ("skipped", "policy"))
            assert rig.nothing_is_left()
            odd.pop()
        kept = json.dumps(rig.handoffs.keeper.costs.to_json(), allow_nan=False)
        costs = Costs.from_json(json.loads(kept))
        assert (costs.decoder_samples(), costs.reply_tokens()) == (0, None)


async def test_audit_that_found_drift_leaves_nothing_that_the_slot_is_believed_to_hold(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is emptied before the next reply; what is not there is no reason to decode."""
    monkeypatch.setattr(audit, "FIRST_QUIET_S", 0.02)
    async with auditing(place, spoils=True) as it:
        it.spoil("shift_layer")
        await it.rig.ask(PROMPT)
        assert slot_holds(it.rig, PROMPT) > 0
        await it.wait_audited()
        assert slot_holds(it.rig, PROMPT) == 0


async def test_slot_put_aside_that_is_given_up_is_not_in_the_slot_any_more(place: Home) -> None:
    """An audit has used the slot since; where nothing was put aside, nothing is lost."""
    async with rigged(place) as rig:
        await rig.ask(PROMPT)
        lost: list[str] = []
        files = AuditFiles(place.slots)
        aside = SlotAside(
            rig.supervisor, files, rig.handoffs.make_safe, lambda: lost.append("lost")
        )
        aside.drop()
        assert lost == []
        assert rig.supervisor.facts is not None
        await aside.put_aside(rig.supervisor.facts)
        aside.drop()
        assert lost == ["lost"]
        assert rig.nothing_is_left()


@pytest.mark.parametrize("wanted", [Policy.AUTO, Policy.ALWAYS])
async def test_exchange_client_that_leaves_as_the_state_file_is_taken_over_leaves_no_file(
    place: Home, monkeypatch: pytest.MonkeyPatch, wanted: Policy
) -> None:
    """Between the check's end and the run's the file has its place, and nobody knows its name."""
    real = RunFiles.take_state

    async def take_state(run: RunFiles, *args: Any, **more: Any) -> tuple[str, int]:
        taken = await real(run, *args, **more)
        leaving.cancel()
        return taken

    monkeypatch.setattr(RunFiles, "take_state", take_state)
    async with rigged(place) as rig:
        with trio.CancelScope() as leaving:
            await rig.ask(PROMPT, policy=wanted, gone=lambda: True)
        assert leaving.cancelled_caught
        assert rig.last()["reason"] == "client_gone"
        assert rig.nothing_is_left()


async def test_exchange_decoder_that_says_it_took_longer_than_the_reply_is_not_believed(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour for a prompt, twice, and the decoder would never be tried again."""
    real = sse._timings_of
    hour = {"prompt_ms": 3.6e6, "prompt_n": 1000, "predicted_ms": 3.6e6}
    async with rigged(place) as rig:
        monkeypatch.setattr(sse, "_timings_of", lambda document: {**(real(document) or {}), **hour})
        await rig.ask(PROMPT, policy=Policy.NEVER)
        costs = rig.handoffs.keeper.costs
        assert (costs.decoder_samples(), costs.reply_tokens()) == (0, None)
        monkeypatch.undo()
        await rig.ask("another prompt of some length", policy=Policy.NEVER)
        assert costs.decoder_samples() == 1


@pytest.mark.parametrize("route", ["file", "shared"])
async def test_requests_that_come_at_once_do_not_all_wait_for_a_provider_that_hangs(
    place: Home, route: str
) -> None:
    """Who waited for its turn asks again: no more of them than the breaker allows try it."""
    made = rigged if route == "file" else sharing
    bound = LIMITS[FailureClass.TIMEOUT].threshold
    async with made(place, provider={"timeout_s": 0.5}) as rig:
        rig.handoffs.breaker.reset = lambda: False  # type: ignore[method-assign] # of the rig
        rig.mode("hang")
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(rig.ask, f"prompt number {number}")
        last = rig.history.recent(HandoffFilter(limit=8))
        ends = [(record["outcome"], record["reason"]) for record in last]
        assert sorted(ends) == [
            *[("fallback", "provider_timeout")] * bound,
            *[("skipped", "breaker_open")] * (8 - bound),
        ]
