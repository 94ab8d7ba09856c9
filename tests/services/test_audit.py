"""Audits over the stand-in decoder and the stand-in provider."""

# ruff: noqa: ASYNC110 - real processes and files, milliseconds each

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio
import trio.testing

from onebitd.adapters.audit_files import AuditFiles
from onebitd.adapters.llama_server import LlamaServer
from onebitd.core import audit as audit_core
from onebitd.core import state_compare, state_file
from onebitd.core.config import Policy
from onebitd.core.config_resolve import resolve
from onebitd.core.errors import RequestError
from onebitd.core.state_layout import Layout
from onebitd.services import audit as audit_service
from onebitd.services.audit import Audits
from onebitd.services.supervisor import BackendFacts
from tests.core.state_files import Kv, Recr, build
from tests.harness import STANDINS
from tests.services.rig import Home, home, lose_what_is_restored
from tests.services.test_handoff import Rig, rigged
from tests.standins import spoiling_provider, tiny_decoder, tiny_state

PROMPT = "the quick brown fox " * 16
STEP, SAVE, ERASE, RESTORE = "/completion", "save", "erase", "restore"


@pytest.fixture
def place() -> Iterator[Home]:
    with home() as made:
        yield made


@pytest.fixture(autouse=True)
def little_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment without requests is short here."""
    monkeypatch.setattr(audit_core, "FIRST_QUIET_S", 0.02)
    monkeypatch.setattr(audit_core, "LAST_QUIET_S", 0.02)


@dataclasses.dataclass
class Auditing:
    """The pipeline with its audits."""

    rig: Rig
    how: Path

    @property
    def audits(self) -> Audits:
        """The unit under test."""
        return self.rig.handoffs.audits

    @property
    def layout(self) -> Layout:
        """The decoder's."""
        facts = self.rig.supervisor.facts
        assert facts is not None
        assert facts.layout is not None
        return facts.layout

    def spoil(self, how: str) -> None:
        """Say what the provider does to its state files from now on."""
        self.how.write_text(how)

    def targets(self) -> list[str]:
        """Return what the decoder was asked for so far, slot actions by their names."""
        return [target.rpartition("=")[2] for target in self.rig.decoder_targets()]

    async def wait_audited(self, count: int = 1) -> None:
        """Wait for so many audits, and until nothing of the last is left."""
        await wait_for(lambda: self.audits.status().audited == count, f"{count} audits")
        await self.wait_done()

    async def wait_done(self) -> None:
        """Wait until no file is left and the slot is nobody's."""
        rig = self.rig
        await wait_for(lambda: rig.admission.loan is None and rig.nothing_is_left(), "the end")


def files(place: Home) -> list[str]:
    """Return the names of files of handoffs and audits."""
    return [name for name in os.listdir(place.slots.path) if name != "example.state"]


async def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait until it holds."""
    with trio.fail_after(20):
        while not condition():
            await trio.sleep(0.005)
    assert condition(), what


@contextlib.asynccontextmanager
async def auditing(
    place: Home, *args: str, spoils: bool = False, **handoff: Any
) -> AsyncIterator[Auditing]:
    """Run decoder, pipeline and audits."""
    how = place.path / "how"
    settings: dict[str, Any] = {"handoff": {"audit": 1.0, **handoff}}
    if spoils:
        how.write_text("nothing")
        env = {
            "SPOIL_PROGRAM": str(STANDINS / "provider.py"),
            "SPOIL_HOW": f"@{how}",
            "SPOIL_COUNT": str(place.path / "spoiled"),
            "SPOIL_LAYER": "1",
        }
        program = str(spoiling_provider.install(place.path))
        settings["provider"] = {"program": program, "timeout_s": 20, "env": env}
    async with rigged(place, *args, **settings) as rig, trio.open_nursery() as nursery:
        await nursery.start(rig.handoffs.audits.run)
        yield Auditing(rig, how)
        nursery.cancel_scope.cancel()


async def test_audit_honest_handoff_is_recomputed_in_steps_and_the_slot_put_back(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aside, empty, evaluate, save, back: all files private, none left, and the count is told."""
    modes = []
    real = LlamaServer.save

    async def save(server: LlamaServer, name: str) -> int:
        saved = await real(server, name)
        modes.append(stat.S_IMODE((place.slots.path / name).stat().st_mode))
        return saved

    async with auditing(place) as it:
        monkeypatch.setattr(LlamaServer, "save", save)
        with structlog.testing.capture_logs() as logs:
            assert (await it.rig.ask(PROMPT)).end == ("used", None)
            await it.wait_audited()
        begun = it.targets().index(SAVE)
        steps = it.targets()[begun + 2 : -2]
        assert it.targets()[begun:] == [SAVE, ERASE, *steps, SAVE, RESTORE]
        assert set(steps) == {STEP}
        assert 2 <= len(steps) <= 5
        assert modes == [0o600, 0o600]
        [line] = [entry for entry in logs if entry["event"] == "audit"]
        assert (line["log_level"], line["ok"], line["request_id"]) == ("info", True, "r1")
        assert line["tokens"] == len(PROMPT) - 1
        status = it.audits.status()
        assert (status.audited, status.drifted, status.strikes) == (1, 0, 0)
        assert status.last is not None
        assert status.last.ok
        follow_up = await it.rig.ask(PROMPT, policy=Policy.NEVER)
        assert follow_up.record["cached_tokens"] == len(PROMPT) - 1


async def test_audit_share_of_zero_is_none(place: Home) -> None:
    """Without handoff.audit the decoder is asked nothing more."""
    async with auditing(place, audit=0.0) as it:
        assert (await it.rig.ask(PROMPT)).end == ("used", None)
        assert it.rig.nothing_is_left()
        before = it.targets()
        await trio.sleep(0.1)
        assert it.targets() == before


async def test_audit_drift_is_a_strike_and_the_last_one_takes_the_provider_out_of_service(
    place: Home,
) -> None:
    """Warning, status, `breaker_open` with layer and next step; a reset puts it back."""
    async with auditing(place, spoils=True, audit_strikes=2) as it:
        await it.rig.ask(PROMPT)
        await it.wait_audited(1)
        it.spoil("stale_row")
        with structlog.testing.capture_logs() as logs:
            for count in (2, 3):
                assert it.audits.out_of_service is None
                assert (await it.rig.ask(PROMPT)).end == ("used", None)
                await it.wait_audited(count)
        drifts = [entry for entry in logs if entry["event"] == "audit"]
        assert [(entry["log_level"], entry["layer"], entry["part"]) for entry in drifts] == [
            ("warning", 1, "K")
        ] * 2
        assert drifts[0]["position"] == (len(PROMPT) - 1) // 2
        assert "strike 1 of 2" in drifts[0]["line"]
        assert "provider_out_of_service" in [entry["event"] for entry in logs]

        runs, targets = len(it.rig.history.recent()), len(it.targets())
        asked = await it.rig.ask(PROMPT)
        assert (
            it.targets()[targets:][-2] == "erase"
        )  # the prompt is in the slot, from that provider
        await it.rig.ask(PROMPT)
        assert it.targets()[targets:].count("erase") == 1
        assert asked.end == ("skipped", "breaker_open")
        assert asked.status == 200
        assert "layer 1 K" in asked.record["detail"]
        assert "onebitctl provider reset" in asked.record["detail"]
        error = await it.rig.refused(PROMPT, policy=Policy.STRICT)
        assert (error.status, error.reason) == (502, "breaker_open")
        assert len(it.rig.history.recent()) == runs + 3

        it.spoil("nothing")
        reset = it.audits.reset()
        assert (reset.strikes, reset.breaker) == (2, "open")
        assert (it.audits.warning, it.audits.out_of_service) == (None, None)
        assert (await it.rig.ask(PROMPT)).end == ("used", None)
        again = it.audits.reset()
        assert (again.strikes, again.breaker) == (0, "closed")
        await it.wait_audited(4)


async def test_audit_drift_leaves_nothing_to_decode_from(place: Home) -> None:
    """The first strike already: a prompt that is not handed off would go on from that cache."""
    async with auditing(place, spoils=True) as it:
        it.spoil("shift_layer")
        await it.rig.ask(PROMPT)
        await it.wait_audited()
        assert it.audits.out_of_service is None
        asked = await it.rig.ask(PROMPT, policy=Policy.NEVER)
        assert asked.record["cached_tokens"] == 0
        asked = await it.rig.ask(PROMPT, policy=Policy.NEVER)
        assert asked.record["cached_tokens"] > 0
        await it.rig.ask(PROMPT)
        await it.wait_audited(2)
        assert (await it.rig.ask(PROMPT + "!")).end == ("used", None)
        asked = await it.rig.ask(PROMPT, policy=Policy.NEVER)
        assert asked.record["cached_tokens"] > 0  # what the next handoff brought is as good as any


async def test_audit_that_ends_after_another_provider_came_is_no_strike_of_it(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the old one handed over says nothing about the new one."""
    async with auditing(place, spoils=True) as it:
        it.spoil("shift_layer")
        real, compared = state_compare.compare, trio.Event()

        def compare(*args: Any, **options: Any) -> state_compare.StateDiff:
            found = real(*args, **options)
            before = it.rig.handoffs.config
            other = dataclasses.replace(before.provider, timeout_s=21)
            changed = dataclasses.replace(before, provider=other)
            trio.from_thread.run_sync(it.audits.reconfigure, changed)
            trio.from_thread.run_sync(compared.set)
            return found

        monkeypatch.setattr(state_compare, "compare", compare)
        await it.rig.ask(PROMPT)
        with trio.fail_after(20):
            await compared.wait()
        await it.wait_done()
        assert it.audits.warning is None


async def test_audit_that_could_not_compare_a_section_finds_nothing_fine(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long reply may push the prompt out of a window: that is no good word for its rows."""
    real, why = state_compare.compare, "section sliding window: no position to compare"

    def compare(*args: Any, **options: Any) -> state_compare.StateDiff:
        return dataclasses.replace(real(*args, **options), within=False, notes=(why,))

    monkeypatch.setattr(state_compare, "compare", compare)
    async with auditing(place) as it:
        with structlog.testing.capture_logs() as logs:
            await it.rig.ask(PROMPT)
            await wait_for(lambda: it.audits.status().given_up == 1, "given up")
        assert it.audits.status().audited == 0
        assert why in next(one["line"] for one in logs if one["event"] == "audit_given_up")


async def test_audit_slot_put_aside_of_a_decoder_that_is_gone_is_forgotten(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is of no use to the successor, and trying again at once would keep the loop busy."""
    tries = 0

    async def refuse(patience_s: float | None = None) -> BackendFacts:
        nonlocal tries
        tries += 1
        raise RequestError(503, "the decoder is not running")

    async with auditing(place, "--prefill-delay-per-token", "0.002") as it:
        await interrupted(it)
        ticket = it.rig.admission.enter("holder")
        await wait_for(lambda: it.rig.admission.loan is None, "the loan's end")
        config = it.rig.handoffs.config
        none = dataclasses.replace(config.handoff, audit=0.0)
        it.audits.reconfigure(dataclasses.replace(config, handoff=none))
        assert len(files(place)) == 1
        monkeypatch.setattr(it.rig.supervisor, "wait_ready", refuse)
        ticket.leave()
        await wait_for(lambda: files(place) == [], "no file")
        await trio.testing.wait_all_tasks_blocked()
        assert tries == 1


async def test_audit_fault_that_was_always_there_is_found_by_the_first_audit(place: Home) -> None:
    """One layer shifted by a position: every position of it is off, and that layer is named."""
    async with auditing(place, spoils=True) as it:
        it.spoil("shift_layer")
        await it.rig.ask(PROMPT)
        await it.wait_audited()
        last = it.audits.status().last
        assert last is not None
        assert (last.ok, last.layer, last.request_id) == (False, 1, "r1")
        assert "layer 1 K is off" in str(it.audits.warning)


async def interrupted(it: Auditing) -> float:
    """Hand off, wait for the audit's first steps; return that moment."""
    await it.rig.ask(PROMPT)
    await wait_for(lambda: it.targets().count(STEP) >= 1, "a step")
    return time.monotonic()


def steps_between(it: Auditing, begin: float, end: float) -> int:
    """Count the steps that the decoder was asked for between two moments."""
    lines = (it.rig.place.path / "requests").read_text().splitlines()
    asked = [json.loads(line) for line in lines]
    return sum(one["target"] == STEP and begin < one["at"] < end for one in asked)


@pytest.mark.parametrize("policy", [None, Policy.NEVER])
async def test_audit_request_that_comes_gets_the_slot_before_another_step(
    place: Home, policy: Policy | None
) -> None:
    """No step begins while it is in line; what the slot held is put back if it is of use to it;
    and the audit is made up for later."""
    async with auditing(place, "--prefill-delay-per-token", "0.002") as it:
        came = await interrupted(it)
        asked = await it.rig.ask(PROMPT, policy=policy)
        left = time.monotonic()
        assert steps_between(it, came, left) == 0
        assert asked.record["cached_tokens"] == len(PROMPT) - 1
        if policy is None:
            assert asked.end == ("used", None)
        restores_before = it.targets().count(RESTORE)
        assert restores_before == 2  # the first handoff's, and this one's or the slot's own
        await it.wait_audited()
        # Its own handoff was chosen too, and replaced the one that waited.
        assert it.audits.status().given_up == (1 if policy is None else 0)


async def test_audit_never_begins_while_a_request_has_the_slot(place: Home) -> None:
    """The decoder is its alone, however long it takes."""
    async with auditing(place) as it:
        ticket = it.rig.admission.enter("holder")
        await it.rig.supervisor.wait_ready()
        before = it.targets()
        it.audits.keep("r1", tiny_decoder.tokenize(PROMPT), it.layout, name=evidence(place))
        await trio.sleep(0.1)
        assert it.targets() == before
        ticket.leave()
        await it.wait_audited()


def evidence(place: Home, prompt: str = PROMPT) -> str:
    """Write the state file that an honest provider would; return its name."""
    name = place.slots.new_name()
    path = place.slots.path / name
    path.write_bytes(tiny_state.build(tiny_decoder.tokenize(prompt)))
    return name


async def test_audit_evidence_without_a_quiet_moment_is_dropped_in_time(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes room, so it has a life of its own."""
    monkeypatch.setattr(audit_service, "LIFE_S", 0.05)
    async with auditing(place) as it:
        ticket = it.rig.admission.enter("holder")
        it.audits.keep("r1", tiny_decoder.tokenize(PROMPT), it.layout, name=evidence(place))
        await wait_for(lambda: files(place) == [], "no file")
        assert it.audits.status().given_up == 1
        ticket.leave()


async def test_audit_newer_evidence_replaces_what_waits(place: Home) -> None:
    """At most one state file is kept for an audit."""
    async with auditing(place) as it:
        ticket = it.rig.admission.enter("holder")
        for number in range(3):
            prompt = PROMPT + str(number)
            name = evidence(place, prompt)
            it.audits.keep(f"r{number}", tiny_decoder.tokenize(prompt), it.layout, name=name)
        assert files(place) == [name]
        ticket.leave()
        await it.wait_audited()
        last = it.audits.status().last
        assert last is not None
        assert last.request_id == "r2"


async def test_audit_handoff_that_was_not_used_is_no_evidence(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is removed at its end."""
    lose_what_is_restored(monkeypatch)
    async with auditing(place) as it:
        assert (await it.rig.ask(PROMPT)).end == ("wasted", None)
        assert it.rig.nothing_is_left()


async def test_audit_that_is_stopped_in_its_middle_leaves_no_file(place: Home) -> None:
    """The line is closed: no step more; the task is cancelled: nothing is left in the slots."""
    async with auditing(place, "--prefill-delay-per-token", "0.002") as it:
        await interrupted(it)
        it.rig.admission.close()
        await wait_for(lambda: it.rig.admission.loan is None, "the loan's end")
        steps = it.targets().count(STEP)
        await trio.sleep(0.1)
        assert it.targets().count(STEP) == steps
        assert files(place) != []
    assert files(place) == []


async def test_audit_decoder_that_dies_in_its_middle_is_not_audited_again(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may have killed it is not tried on its successor, which serves as ever."""
    async with auditing(place) as it:
        real = LlamaServer.extend_slot

        async def extend(server: LlamaServer, tokens: Sequence[int]) -> tuple[int, int]:
            place.turn("--crash-on", "completion:1")
            return await real(server, tokens)

        with monkeypatch.context() as patched:
            patched.setattr(LlamaServer, "extend_slot", extend)
            await it.rig.ask(PROMPT)
            await wait_for(lambda: it.audits.status().given_up == 1, "given up")
        place.turn()
        await it.wait_done()
        # The audit knows of the end before the supervisor does: a request between is told of it.
        await wait_for(lambda: it.rig.supervisor.restarts == 1, "the decoder is replaced")
        assert (await it.rig.ask(PROMPT)).end == ("used", None)
        await it.wait_audited()
        assert it.rig.supervisor.restarts == 1


async def test_audit_full_disk_is_given_up_and_makes_room_for_handoffs(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An audit is never the reason of `no_space`."""
    async with auditing(place) as it:
        monkeypatch.setattr(AuditFiles, "free_bytes", lambda self: 1000)
        await it.rig.ask(PROMPT)
        await wait_for(lambda: it.audits.status().given_up == 1, "given up")
        await it.wait_done()
        ticket = it.rig.admission.enter("holder")
        it.audits.keep("r1", tiny_decoder.tokenize(PROMPT), it.layout, name=evidence(place))
        it.audits.make_room(1 << 20)
        assert files(place) == []
        ticket.leave()


async def test_audit_with_a_fault_in_its_own_code_ends_no_daemon(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is logged and given up, and the next one is made."""
    real = state_compare.compare

    def broken(*args: object, **more: object) -> None:
        monkeypatch.setattr(state_compare, "compare", real)
        raise ZeroDivisionError

    async with auditing(place) as it:
        monkeypatch.setattr(state_compare, "compare", broken)
        await it.rig.ask(PROMPT)
        await wait_for(lambda: it.audits.status().given_up == 1, "given up")
        await it.wait_done()
        await it.rig.ask(PROMPT)
        await it.wait_audited()


async def test_audit_on_the_shared_route_takes_its_evidence_from_the_slot(place: Home) -> None:
    """Right after the reply the slot holds what the provider wrote, and what followed it."""
    async with auditing(place) as it:
        await it.rig.ask(PROMPT, policy=Policy.NEVER)
        holder = it.rig.admission.last_holder
        assert holder is not None
        handed = tiny_decoder.tokenize(PROMPT)[:-1]
        it.audits.keep("r1", handed, it.layout, holder=holder)
        await it.wait_audited()
        last = it.audits.status().last
        assert last is not None
        assert last.ok


async def test_audit_on_the_shared_route_of_a_slot_that_was_used_since_is_given_up(
    place: Home,
) -> None:
    """What somebody else left there is no evidence."""
    async with auditing(place) as it:
        await it.rig.ask(PROMPT, policy=Policy.NEVER)
        holder = it.rig.admission.last_holder
        await it.rig.ask(PROMPT, policy=Policy.NEVER)  # the same, but not the provider's
        it.audits.keep("r1", tiny_decoder.tokenize(PROMPT), it.layout, holder=holder)
        await wait_for(lambda: it.audits.status().given_up == 1, "given up")
        await it.wait_done()


async def test_reconfigure_with_another_provider_forgets_strikes_and_evidence(
    place: Home,
) -> None:
    """A reload that changes anything else does not."""
    async with auditing(place, spoils=True) as it:
        it.spoil("stale_row")
        await it.rig.ask(PROMPT)
        await it.wait_audited()
        before = it.rig.handoffs.config
        strict = dataclasses.replace(before.handoff, audit_strikes=1)
        it.audits.reconfigure(dataclasses.replace(before, handoff=strict))
        assert it.audits.out_of_service is not None
        other = dataclasses.replace(before.provider, program="/another")
        it.audits.reconfigure(dataclasses.replace(before, provider=other))
        assert it.audits.warning is None


def test_wants_share_decides_and_recurrent_state_only_by_file() -> None:
    """A recurrent state has moved on by the end of the reply: the slot holds no evidence of it."""
    layouts: list[Layout] = [
        state_file.learn_layout(build([1, 2, 3], [Kv()]), [1, 2, 3]),
        state_file.learn_layout(build([1, 2, 3], [Kv(), Recr()]), [1, 2, 3]),
    ]
    config = resolve(instance="x", file={"model": {"path": "/m.gguf"}, "handoff": {"audit": 0.5}})
    nobody: Any = None
    draws = iter([0.4, 0.4, 0.4, 0.6, 0.6, 0.6])
    for chosen in (True, False):
        audits = Audits(config, nobody, nobody, nobody, nobody, draw=lambda: next(draws))
        assert audits.wants(in_slot=False, layout=layouts[1]) is chosen
        assert audits.wants(in_slot=True, layout=layouts[0]) is chosen
        assert not audits.wants(in_slot=True, layout=layouts[1])
