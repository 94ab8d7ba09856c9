"""The policy `auto` over the stand-in decoder and the stand-in provider."""

# ruff: noqa: ASYNC110 - real processes and files, milliseconds each

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import trio

from onebitd.core import cost_samples
from onebitd.core.config import Policy
from onebitd.core.costs import Costs
from onebitd.core.handoff import Route
from onebitd.services import late_writes
from tests.harness import is_alive
from tests.services.rig import Home, home, lose_what_is_restored
from tests.services.test_handoff import CHAT, Asked, Rig, rigged
from tests.services.test_share_route import sharing

AUTO = {"handoff": {"policy": "auto"}}
LENGTH = 40
SLOWER = ("--prefill-delay-per-token", "0.003")
"""The decoder, and yet faster than a provider with `sleep:0.4`."""


@pytest.fixture
def place() -> Iterator[Home]:
    """A directory of this test's own."""
    with home() as made:
        yield made


def fresh(letter: str) -> str:
    """Return a prompt that has nothing in common with those of other letters."""
    return letter * LENGTH


async def ask_each(rig: Rig, letters: str) -> list[Asked]:
    """Ask a prompt of each letter, one after the other."""
    return [await rig.ask(fresh(letter)) for letter in letters]


def words(asked: list[Asked]) -> list[str]:
    """Return the reason of each, or the outcome of those that have none."""
    return [str(one.end[1] or one.end[0]) for one in asked]


def teach(
    rig: Rig, *, provider_ms: float, decoder_ms: float, reply_ms: float = 1.0, tokens: int = LENGTH
) -> None:
    """Let this be what was learned, of prompts and replies of about this length."""
    costs, now = Costs(), time.time()
    for _ in range(4):
        for route in Route:
            costs.note_provider(
                route, tokens - 1, provider_ms, overlapped=False, cold=False, now=now
            )
        costs.note_decoder(0, tokens, decoder_ms, overlapped=False, now=now)
        costs.note_decoder(tokens - 1, 1, 0.5, overlapped=False, now=now)
        costs.note_reply(20, reply_ms, now)
    rig.handoffs.keeper.costs = costs


async def wait_run(rig: Rig) -> dict[str, Any]:
    """Wait for the one provider run; return what it wrote at its start."""
    with trio.fail_after(20):
        while not rig.provider_runs():
            await trio.sleep(0.005)
    [run] = rig.provider_runs()
    return run


async def test_auto_slower_provider_is_tried_and_then_left_alone(place: Home) -> None:
    """Its second run is cut off; from the fourth prompt on both estimates say why it is not."""
    async with rigged(place, *SLOWER, **AUTO) as rig:
        rig.mode("sleep:0.4")
        asked = await ask_each(rig, "abcdef")
        assert words(asked) == ["used", "policy", "overtaken", "policy", "policy", "policy"]
        assert [one.record.get("explored") for one in asked] == [True] * 3 + [None] * 3
        assert len(rig.provider_runs()) <= 2
        last = asked[-1].record
        assert "ms on the provider, " in last["detail"]
        assert last["detail"].endswith("ms on the decoder")
        assert last["provider_estimate_ms"] > last["decoder_estimate_ms"] > 0
        assert (last["slot_tokens"], "route" in last) == (0, False)
        assert rig.nothing_is_left()


async def test_auto_prompt_that_comes_at_once_finds_the_costs_worked_out(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are fitted when a request is over, not on the next one's way to its first token."""
    fits = Mock(wraps=cost_samples._fit)
    monkeypatch.setattr(cost_samples, "_fit", fits)
    monkeypatch.setattr(late_writes, "WRITE_DELAY_S", 60.0)
    async with rigged(place, **AUTO) as rig:
        await ask_each(rig, "ab")
        fits.reset_mock()
        async with rig.exchange(fresh("c")) as (_, reply):
            assert not fits.called
            await reply.read_all()


async def test_auto_slower_decoder_is_tried_and_then_spared(place: Home) -> None:
    """The first four prompts in turn, then the provider has them."""
    async with rigged(place, "--prefill-delay-per-token", "0.06", **AUTO) as rig:
        asked = await ask_each(rig, "abcde")
        assert words(asked) == ["used", "policy", "used", "policy", "used"]
        assert [one.record.get("explored") for one in asked] == [True] * 4 + [None]


async def test_auto_second_turn_is_decoded_from_the_slot(place: Home) -> None:
    """Whatever is known, and by however much the provider is faster; the belief is exact."""
    async with rigged(place, **AUTO) as rig:
        chat = [{"role": "user", "content": "what is a page fault, in a few words of your own?"}]
        first = await rig.ask(chat, path=CHAT)
        assert first.end == ("used", None)
        said = "".join(piece["message"]["content"] for piece in reply_of(first)["choices"])
        chat += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
        teach(rig, provider_ms=500.0, decoder_ms=600.0)
        second = await rig.ask(chat, path=CHAT)
        assert second.end == ("skipped", "already_cached")
        assert second.record["slot_tokens"] == second.record["cached_tokens"]
        handed = first.record["handed_tokens"]
        assert second.record["slot_tokens"] == handed + 1 + len(said) - 1
        assert second.headers[b"x-onebit-reason"] == b"already_cached"
        assert "tokens are in its cache" in second.record["detail"]


def reply_of(asked: Asked) -> dict[str, Any]:
    """Return a JSON reply."""
    found: dict[str, Any] = json.loads(asked.body)
    return found


@contextlib.asynccontextmanager
async def one_in_front(rig: Rig) -> AsyncIterator[trio.Event]:
    """Let somebody else have the slot until the event is set."""
    let_go, begun = trio.Event(), trio.Event()

    async def hold() -> None:
        more: dict[str, Any] = {"stream": True, "max_tokens": 1000}
        async with rig.exchange("somebody else", policy=Policy.NEVER, **more) as (_, reply):
            await reply.read()
            begun.set()
            await let_go.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold)
        await begun.wait()
        yield let_go


async def test_auto_run_that_is_overtaken_leaves_nothing(place: Home) -> None:
    """It hid behind a reply that ended sooner than expected: the decoder is there first now."""
    async with (
        rigged(place, "--token-delay", "0.02", **AUTO) as rig,
        trio.open_nursery() as nursery,
    ):
        teach(rig, provider_ms=10_000.0, decoder_ms=20.0, reply_ms=60_000.0)
        rig.mode("sleep:30")
        asked: list[Asked] = []

        async def ask() -> None:
            asked.append(await rig.ask(fresh("q")))

        async with one_in_front(rig) as let_go:
            nursery.start_soon(ask)
            run = await wait_run(rig)
            assert is_alive(run["pid"])
            let_go.set()
        with trio.fail_after(20):
            while not asked:
                await trio.sleep(0.005)
        [one] = asked
        assert one.end == ("skipped", "overtaken")
        assert one.record["detail"].startswith("the slot is free, ")
        assert (one.record["evaluated_tokens"], one.status) == (LENGTH, 200)
        assert "route" not in one.record
        assert not is_alive(run["pid"])
        assert rig.nothing_is_left()
        assert rig.handoffs.breaker.status().failures == 0


async def test_auto_run_beside_a_busy_slot_is_used(place: Home) -> None:
    """The provider that loses on its own wins where it overlaps; nobody is disturbed."""
    async with (
        rigged(place, "--token-delay", "0.02", **AUTO) as rig,
        trio.open_nursery() as nursery,
    ):
        teach(rig, provider_ms=500.0, decoder_ms=100.0, reply_ms=60_000.0)
        asked: list[Asked] = []

        async def ask() -> None:
            asked.append(await rig.ask(fresh("q")))

        async with one_in_front(rig) as let_go:
            nursery.start_soon(ask)
            with trio.fail_after(20):
                while not any(n.startswith("state-") for n in os.listdir(place.slots.path)):
                    await trio.sleep(0.005)
            let_go.set()
        with trio.fail_after(20):
            while not asked:
                await trio.sleep(0.005)
        assert asked[0].end == ("used", None)
        assert rig.nothing_is_left()


async def test_auto_run_that_was_to_win_and_hangs_is_left_and_counted(place: Home) -> None:
    """It costs its patience, not its time limit, and the breaker knows of it."""
    async with rigged(place, **AUTO) as rig:
        teach(rig, provider_ms=20.0, decoder_ms=300.0)
        rig.mode("hang")
        asked = await rig.ask(fresh("q"))
        assert asked.end == ("skipped", "overtaken")
        assert asked.record["detail"].startswith("the provider was not done after ")
        assert rig.handoffs.breaker.status().failures == 1
        assert rig.nothing_is_left()


async def test_auto_client_that_leaves_the_race_leaves_nothing(place: Home) -> None:
    """Provider, lock, files and slot, as after any cancel; nothing is learned."""
    async with rigged(place, **AUTO) as rig:
        teach(rig, provider_ms=20.0, decoder_ms=60_000.0)
        before = rig.handoffs.keeper.costs.to_json()
        rig.mode("hang")
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                async with rig.exchange(fresh("q"), gone=lambda: True):
                    pass

            nursery.start_soon(ask)
            run = await wait_run(rig)
            nursery.cancel_scope.cancel()
        assert not is_alive(run["pid"])
        assert rig.last()["detail"] == "the client left in phase prefill"
        assert rig.nothing_is_left()
        assert rig.handoffs.keeper.costs.to_json() == before
        assert rig.handoffs.outlooks.habits.provider_age == 0


async def test_route_off_after_three_wasted_handoffs_and_on_again(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its reason, until a reset, a reload, or another decoder; `always` does not help."""

    def turned_off(rig: Rig) -> str | None:
        return rig.handoffs.route_off

    async with rigged(place) as rig:
        with monkeypatch.context() as patch:
            lose_what_is_restored(patch)
            assert words(await ask_each(rig, "abcd")) == ["wasted"] * 3 + ["not_reused"]
            off = turned_off(rig)
            assert off is not None
            assert rig.last()["detail"] == off
            assert rig.handoffs.reset_provider().route_off == off
            assert words(await ask_each(rig, "efgh")) == ["wasted"] * 3 + ["not_reused"]
            rig.handoffs.reconfigure(rig.handoffs.config, rig.lock)
            assert words(await ask_each(rig, "ijkl")) == ["wasted"] * 3 + ["not_reused"]
        facts = rig.supervisor.facts
        assert facts is not None
        rig.supervisor.kill("the test wants another one", its_own_fault=False)
        with trio.fail_after(20):
            await rig.supervisor.wait_restarted(facts.generation)
        assert turned_off(rig) is None
        assert words(await ask_each(rig, "m")) == ["used"]


async def test_auto_shared_run_is_never_stopped(place: Home) -> None:
    """It takes longer than any patience, and still it ends by itself: it writes into the slot."""
    async with sharing(place, handoff={"policy": "auto", "share": True}) as rig:
        teach(rig, provider_ms=10.0, decoder_ms=100.0)
        rig.mode("sleep:0.4")
        asked = await rig.ask(fresh("q"))
        assert (asked.end, asked.record["route"]) == (("used", None), "shared")
        assert (place.path / "runs.end").exists()
        assert rig.nothing_is_left()


async def test_auto_shared_run_that_lost_its_reason_in_the_line_is_not_begun(
    place: Home,
) -> None:
    """It is weighed once more when the slot is its own."""
    async with (
        sharing(place, handoff={"policy": "auto", "share": True}) as rig,
        trio.open_nursery() as nursery,
    ):
        teach(rig, provider_ms=10.0, decoder_ms=100.0)
        asked: list[Asked] = []

        async def ask() -> None:
            asked.append(await rig.ask(fresh("q")))

        async with one_in_front(rig) as let_go:
            nursery.start_soon(ask)
            with trio.fail_after(20):
                while rig.admission.pending == 0 or rig.handoffs.outlooks.habits.decoder_age == 0:
                    await trio.sleep(0.005)
            teach(rig, provider_ms=10.0, decoder_ms=1.0)
            let_go.set()
        with trio.fail_after(20):
            while not asked:
                await trio.sleep(0.005)
        assert asked[0].end == ("skipped", "overtaken")
        assert rig.provider_runs() == []
        assert rig.nothing_is_left()


async def test_auto_what_was_learned_outlives_the_daemon(place: Home) -> None:
    """The next one does not begin by trying."""

    async def run_with_keeper(rig: Rig, letters: str) -> list[Asked]:
        async with trio.open_nursery() as nursery:
            await nursery.start(rig.handoffs.keeper.run)
            asked = await ask_each(rig, letters)
            nursery.cancel_scope.cancel()
        return asked

    async with rigged(place, *SLOWER, **AUTO) as rig:
        rig.mode("sleep:0.4")
        asked = await run_with_keeper(rig, "abcd")
        assert asked[0].record["explored"] is True
        learned = rig.handoffs.keeper.costs.to_json()
    async with rigged(place, *SLOWER, **AUTO) as rig:
        assert rig.handoffs.keeper.costs.to_json() == learned
        [one] = await run_with_keeper(rig, "e")
        assert (one.end, one.record.get("explored")) == (("skipped", "policy"), None)


async def test_auto_another_provider_is_tried_anew(place: Home) -> None:
    """What the one before it took says nothing of it, its runs that were cut off included."""
    async with rigged(place, *SLOWER, **AUTO) as rig:
        rig.mode("sleep:0.4")
        assert words(await ask_each(rig, "abcd"))[-1] == "policy"
        config = rig.handoffs.config
        env = {**config.provider.env, "WHICH": "another"}
        provider = dataclasses.replace(config.provider, env=env)
        rig.handoffs.reconfigure(dataclasses.replace(config, provider=provider), rig.lock)
        rig.mode("")
        asked = await rig.ask(fresh("e"))
        assert (asked.end, asked.record["explored"]) == (("used", None), True)
