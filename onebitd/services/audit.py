"""Audits: while nobody waits, the decoder recomputes a handed prompt, and both caches are compared.

The evidence is what the provider handed over: its own state file, or, on the shared route, what the
slot holds right after the reply. The decoder evaluates the same ids in steps, and before each
call to it the line is looked at: a request that comes has the slot after the call that is under
way. What the slot held before is put aside and put back: by the audit when it is over, or, when a
request cut it short, by that request if it has no cache of its own to restore.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import random
import time
from collections.abc import Awaitable, Callable
from typing import Final

import structlog
import trio

from onebitd.adapters.audit_files import AuditFiles
from onebitd.adapters.slot_files import SlotFiles
from onebitd.core import audit, state_compare, state_file
from onebitd.core.config import Config
from onebitd.core.control_api import AuditStatus, ProviderReset, rfc3339
from onebitd.core.errors import (
    BackendError,
    BackendGone,
    BackendTimeout,
    RequestError,
    StateFileError,
)
from onebitd.core.state_layout import KvSection, Layout
from onebitd.services.admission import Admission, Loan, Ticket
from onebitd.services.slot_aside import SlotAside
from onebitd.services.supervisor import BackendFacts, Supervisor

log = structlog.get_logger()

LIFE_S: Final = 600.0
"""Evidence that found no quiet moment for so long is dropped: it takes room."""
_SPARE_BYTES: Final = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Evidence:
    """One handoff that waits for its audit.

    Attributes:
        request_id: of the handoff.
        tokens: what was handed over.
        layout: of its state.
        name: the provider's state file; None while it is in the slot of `holder`.
        holder: whose slot it is in.
        deadline: when it is dropped, on trio's clock.
        interruptions: how often a request cut its audit short.
    """

    request_id: str
    tokens: tuple[int, ...]
    layout: Layout
    name: str | None
    holder: Ticket | None
    deadline: float
    interruptions: int = 0


class _GivenUp(Exception):
    """This handoff cannot be audited; the message says why."""


class Audits:
    """Audits handoffs one by one, and keeps what it found.

    Args:
        config: the effective configuration.
        supervisor: has the decoder.
        admission: the line for its slot.
        slots: where state files live.
        make_safe: empties the slot, or has the decoder restarted.
        draw: a uniform number from 0 to 1, for the choice of handoffs.

    Attributes:
        on_change: called when something changed that `status` shows as a fault.
        on_slot_lost: called when the slot will not hold again what it did before an audit.
    """

    def __init__(
        self,
        config: Config,
        supervisor: Supervisor,
        admission: Admission,
        slots: SlotFiles,
        make_safe: Callable[[BackendFacts, str], Awaitable[None]],
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._config = config
        self._supervisor = supervisor
        self._admission = admission
        self._files = AuditFiles(slots)
        self._slot = SlotAside(supervisor, self._files, make_safe, lambda: self.on_slot_lost())
        self._draw = draw
        self._ledger = audit.Ledger()
        self._evidence: Evidence | None = None
        self._compared: Evidence | None = None  # both states are there: its audit comes to an end
        self._news = trio.Event()
        self._waiting = trio.CancelScope()
        self._ended = False
        self.on_change: Callable[[], None] = lambda: None
        self.on_slot_lost: Callable[[], None] = lambda: None

    # What the daemon and its status ask.

    def reconfigure(self, config: Config) -> None:
        """Take over a new configuration; another provider begins without strikes."""
        before, self._config = self._config, config
        if before.provider != config.provider:
            self._drop()
            self.reset()
        if config.handoff.audit == 0:
            self._drop()

    @property
    def out_of_service(self) -> str | None:
        """Why the provider is not called any more, None while it is."""
        return self._ledger.out_of_service(self._config.handoff.audit_strikes)

    @property
    def warning(self) -> str | None:
        """What audits hold against the provider, None when that is nothing."""
        return self._ledger.warning(self._config.handoff.audit_strikes)

    def status(self) -> AuditStatus:
        """Return the `audit` part of `/v1/status`."""
        ledger = self._ledger
        return AuditStatus(
            audited=ledger.audited,
            drifted=ledger.drifted,
            given_up=ledger.given_up,
            strikes=ledger.strikes,
            last=ledger.last,
        )

    def reset(self) -> ProviderReset:
        """Forget all strikes: the provider is in service again."""
        breaker = "closed" if self.out_of_service is None else "open"
        strikes = self._ledger.forgive()
        if strikes:
            log.info("provider_reset", strikes=strikes, breaker=breaker)
            self.on_change()
        return ProviderReset(strikes=strikes, breaker=breaker)

    # What a request calls.

    def wants(self, *, in_slot: bool, layout: Layout) -> bool:
        """Choose whether the handoff that was just restored or adopted is kept as evidence.

        Args:
            in_slot: its evidence is to be taken from the slot after the reply.
            layout: of the decoder's state.
        """
        if self._ended or not audit.is_sampled(self._config.handoff.audit, self._draw()):
            return False
        # A recurrent state has moved on by the end of the reply.
        return not in_slot or all(isinstance(part, KvSection) for part in layout.sections)

    def keep(
        self,
        request_id: str,
        tokens: list[int],
        layout: Layout,
        *,
        name: str | None = None,
        holder: Ticket | None = None,
    ) -> None:
        """Take over the evidence of a handoff that was used; it replaces what waits.

        Args:
            request_id, tokens, layout, name, holder: see `Evidence`. The file is ours from now on.
        """
        if self._ended:
            if name is not None:
                self._files.remove(name)
            return
        if self._evidence is not None and self._evidence is not self._compared:
            self._ledger.given_up += 1
        self._drop()
        self._evidence = Evidence(
            request_id, tuple(tokens), layout, name, holder, trio.current_time() + LIFE_S
        )
        self._news.set()
        self._waiting.cancel()

    def make_room(self, wanted_bytes: int) -> None:
        """Give up what waits here if a handoff needs its room."""
        if self._evidence is None and not self._slot.is_held:
            return
        if self._files.free_bytes() < wanted_bytes + 2 * _SPARE_BYTES:
            self._drop()
            self._slot.drop()

    async def put_slot_back(self) -> None:
        """Have the slot, which is the caller's, hold what may be decoded from: see `SlotAside`."""
        await self._slot.make_usable()

    def forget_slot(self) -> None:
        """The slot holds another handoff: what it held before is of no use any more."""
        self._slot.drop()
        if self.out_of_service is None:
            self._slot.doubted = False

    # The work.

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Audit until cancelled; leaves no file."""
        try:
            task_status.started()
            while True:
                if self._evidence is None and not self._slot.is_held:
                    self._news = trio.Event()
                    await self._news.wait()
                await self._work()
        finally:
            self._ended = True
            self._drop()
            self._slot.drop()

    async def _work(self) -> None:
        """Do what there is to do, once there is a moment for it."""
        evidence = self._evidence
        is_in_slot = evidence is not None and evidence.name is None
        if not is_in_slot and not await self._found_quiet(evidence):
            return
        try:
            if evidence is None:
                facts = await self._supervisor.wait_ready()
                with self._admission.lend("") as loan:
                    if loan is not None:
                        await self._slot.put_back(facts)
            elif is_in_slot:
                await self._fetch(evidence)
            else:
                await self._audit(await self._supervisor.wait_ready(), evidence)
        except (RequestError, _GivenUp, BackendError, StateFileError, OSError) as error:
            if isinstance(error, BackendTimeout):
                self._supervisor.kill(f"it did not answer an audit: {error}")
            if evidence is None:
                self._slot.drop()  # its decoder is gone
            else:
                self._give_up(evidence, str(error))
        except Exception:
            # What serves goes on: a fault in here must not end it.
            log.exception("internal_error", path="audit")
            if evidence is not None:
                self._give_up(evidence, "a fault in onebitd; the log has it")

    async def _found_quiet(self, evidence: Evidence | None) -> bool:
        """Wait for a moment without requests; False when there is something else to do by then."""
        with trio.CancelScope() as self._waiting:
            if evidence is not None:
                self._waiting.deadline = evidence.deadline
            await self._wait_quiet(0 if evidence is None else evidence.interruptions)
        if self._evidence is not evidence:
            return False
        if evidence is not None and trio.current_time() >= evidence.deadline:
            self._give_up(evidence, "no quiet moment in time")
            return False
        return True

    async def _wait_quiet(self, interruptions: int) -> None:
        admission, quiet_s = self._admission, audit.quiet_s(interruptions)
        while True:
            await admission.wait_empty()
            if admission.is_closed:
                await trio.sleep_forever()
            left_s = admission.idle_since + quiet_s - time.monotonic()
            if left_s <= 0:
                return
            await trio.sleep(left_s)

    async def _fetch(self, evidence: Evidence) -> None:
        """Save what the reply left in the slot, unless somebody had the slot since.

        Raises:
            BackendError, _GivenUp, OSError: it cannot be done.
        """
        facts = self._supervisor.facts
        with self._admission.lend(evidence.request_id) as loan:
            untouched = loan is not None and self._admission.last_holder is evidence.holder
            if not untouched or facts is None:
                raise _GivenUp("the slot was used again at once")
            self._check_room(evidence.layout.bytes_for(len(evidence.tokens)))
            name, _ = await self._slot.save(facts)
        if self._evidence is evidence:
            self._evidence = dataclasses.replace(evidence, name=name, holder=None)
        else:
            self._files.remove(name)

    async def _audit(self, facts: BackendFacts, evidence: Evidence) -> None:
        began, provider = trio.current_time(), self._config.provider
        with self._admission.lend(evidence.request_id) as loan:
            if loan is None:
                return
            ours = await self._recompute(facts, evidence, loan)
        if ours is None:
            if self._evidence is evidence:
                again = evidence.interruptions + 1
                self._evidence = dataclasses.replace(evidence, interruptions=again)
            return
        self._compared = evidence
        try:
            diff = await trio.to_thread.run_sync(self._diff, evidence, ours, abandon_on_cancel=True)
        finally:
            self._compared = None
            self._files.remove(ours)
        if self._config.provider != provider:
            return  # a reload came: it says nothing about the new one
        verdict = audit.judge(diff.tensors, self._config.handoff.audit_tolerance)
        if verdict is None or (verdict.ok and not diff.within):
            raise _GivenUp("; ".join(diff.notes) or "there was nothing to compare")
        if self._evidence is evidence:
            self._drop()
        self._note(verdict, evidence, trio.current_time() - began)

    async def _recompute(self, facts: BackendFacts, evidence: Evidence, loan: Loan) -> str | None:
        """Have the decoder evaluate the ids; return its state file, None when it was interrupted.

        Raises:
            BackendError, _GivenUp, OSError: it cannot be done.
        """
        if facts.layout != evidence.layout:
            raise _GivenUp("the decoder came back with another state layout")
        self._check_room(2 * facts.layout.bytes_for(len(evidence.tokens)))
        await self._slot.put_aside(facts)
        if loan.is_wanted:
            return None
        await facts.server.erase()
        if not await self._evaluate(facts, evidence.tokens, loan) or loan.is_wanted:
            return None
        name, saved = await self._slot.save(facts)
        with self._slot.removing_on_error(name):
            if saved != len(evidence.tokens):
                raise _GivenUp(f"the decoder saved {saved} of {len(evidence.tokens)} tokens")
            if not loan.is_wanted:
                await self._slot.put_back(facts)
        return name

    async def _evaluate(self, facts: BackendFacts, tokens: tuple[int, ...], loan: Loan) -> bool:
        """Evaluate in steps; False when somebody came. No step begins after that."""
        held, wanted = 0, audit.LEAST_STEP_TOKENS
        ubatch = audit.ubatch_of(self._config.backend.args)
        while held < len(tokens):
            if loan.is_wanted:
                return False
            if self._supervisor.facts is not facts:
                raise BackendGone("the decoder restarted in the middle of an audit")
            size = audit.step_tokens(len(tokens), held, wanted, ubatch)
            began = trio.current_time()
            counts = await facts.server.extend_slot(tokens[: held + size])
            if counts != (held, size):
                raise _GivenUp(
                    f"the decoder took {counts[0]} tokens from its cache and evaluated {counts[1]},"
                    f" not {held} and {size}: it cannot evaluate a prompt in steps"
                )
            held += size
            wanted = audit.next_size(size, trio.current_time() - began)
        return True

    def _diff(self, evidence: Evidence, ours: str) -> state_compare.StateDiff:
        """Compare both states at the handed positions; blocks, one tensor in memory at a time."""
        handoff = self._config.handoff
        assert evidence.name is not None  # noqa: S101 - _work fetches it first
        with self._files.reading(evidence.name) as a, self._files.reading(ours) as b:
            theirs_read = state_file.parse(a, evidence.layout)
            ours_read = state_file.parse(b, evidence.layout)

            def compare(causes: bool) -> state_compare.StateDiff:
                return state_compare.compare(
                    theirs_read,
                    a,
                    ours_read,
                    b,
                    tolerance=handoff.audit_tolerance,
                    scale_tolerance=audit.scale_tolerance(handoff.audit_tolerance),
                    scale_positions=1,  # whoever is off by less than that tolerance is exact
                    head_dim=self._supervisor.head_dim,
                    positions=range(len(evidence.tokens)),
                    causes=causes,
                )

            diff = compare(False)
            return diff if all(tensor.within for tensor in diff.tensors) else compare(True)

    def _note(self, verdict: audit.Verdict, evidence: Evidence, took_s: float) -> None:
        """Count an audit and write its line."""
        was_open = self.out_of_service is not None
        self._ledger.add(verdict, evidence.request_id, rfc3339(dt.datetime.now(dt.UTC)))
        strikes = self._config.handoff.audit_strikes
        line = f"audit of handoff {evidence.request_id}: {verdict.words()}"
        if not verdict.ok:
            tolerance = self._config.handoff.audit_tolerance
            line += f" (strike {self._ledger.strikes} of {strikes}; audit_tolerance {tolerance:g})"
        write = log.info if verdict.ok else log.warning
        write(
            "audit",
            line=line,
            request_id=evidence.request_id,
            ok=verdict.ok,
            layer=verdict.layer,
            part=verdict.part,
            error=None if self._ledger.last is None else self._ledger.last.error,
            position=verdict.position,
            cause=verdict.cause,
            tokens=len(evidence.tokens),
            audit_ms=round(took_s * 1000.0, 3),
        )
        if verdict.ok:
            return
        self._slot.doubt()
        why = self.out_of_service
        if why is not None and not was_open:
            log.error("provider_out_of_service", line=f"the provider is out of service: {why}")
        self.on_change()

    def _check_room(self, wanted_bytes: int) -> None:
        free = self._files.free_bytes()
        if free < wanted_bytes + _SPARE_BYTES:
            raise _GivenUp(
                f"{free >> 20} MiB free for state files, {wanted_bytes >> 20} MiB wanted"
            )

    def _give_up(self, evidence: Evidence, why: str) -> None:
        self._ledger.given_up += 1
        log.info(
            "audit_given_up",
            request_id=evidence.request_id,
            line=f"handoff {evidence.request_id} was not audited: {why}",
        )
        if self._evidence is evidence:
            self._drop()

    def _drop(self) -> None:
        evidence, self._evidence = self._evidence, None
        if evidence is not None and evidence.name is not None:
            self._files.remove(evidence.name)
