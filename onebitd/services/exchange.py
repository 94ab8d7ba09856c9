"""One request on the handoff route, from its place in the line to its log line.

Whatever fails on the way ends in the decoder's own prefill, with its reason (or, asked for, in an
error that says it).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import structlog
import trio

from onebitd.adapters.llama_server import Reply
from onebitd.core import policy, request, sse
from onebitd.core.config import Policy
from onebitd.core.control_api import rfc3339
from onebitd.core.endings import DECODERS_ANSWER
from onebitd.core.errors import (
    BackendError,
    BackendGone,
    BackendRefused,
    HandoffError,
    RequestError,
)
from onebitd.core.handoff import HandoffRecord, Outcome, Reason, Route
from onebitd.core.http1 import Headers
from onebitd.core.prompt_hash import prompt_hash
from onebitd.core.slot_content import Prompt
from onebitd.core.state_layout import Layout
from onebitd.core.weighing import Outlook, is_overtaken
from onebitd.core.wording import Wording
from onebitd.services.admission import Ticket
from onebitd.services.conclusion import Ending, conclude
from onebitd.services.lessons import Lessons
from onebitd.services.provider_runs import Prefilled, timed
from onebitd.services.race import Overtaken, device_patience_ms, race
from onebitd.services.supervisor import BackendFacts
from onebitd.services.telemetry import Watch

if TYPE_CHECKING:
    from onebitd.services.handoff import Handoffs

log = structlog.get_logger()

_RETRY_AFTER_S: Final = 5
_TIMED: Final = (
    *("queue", "template", "tokenize", "lock", "prefill", "provider", "check"),
    *("restore", "share", "adopt"),
)
"""Parts named in Server-Timing; `provider` is the run's wall time."""
_HUNG_UP: Final = 502
"""Stands for a reply that was none."""
_TRIES: Final = 2
"""A prompt that kills the decoder is tried on one new decoder, not on every one."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Evidence:
    """What an audit needs of a handoff; `name` is its state file, None on the shared route."""

    tokens: list[int]
    layout: Layout
    name: str | None


class Exchange:
    """One request on the handoff route; it keeps the settings that it begins with.

    `async with` takes care of its place in the line, its reply's connection, its one log line and
    its counters, whatever happens inside.

    Attributes:
        record: filled in as it goes.
        watch: looks at the reply's bytes; fed by `observe`.
    """

    def __init__(
        self,
        handoffs: Handoffs,
        path: str,
        parsed: request.ParsedRequest,
        wanted: Policy,
        request_id: str,
        client_gone: Callable[[], bool],
        by_operator: Callable[[], bool],
        route: Route | None = None,
    ) -> None:
        config = self._config = handoffs.config
        self._handoffs = handoffs
        self._parsed = parsed
        self._policy = wanted
        self._route = route
        self._ticket: Ticket | None = None
        self._reply: Reply | None = None
        self._failure: HandoffError | None = None
        self._skip: policy.Skip | None = None
        self._handed: int | None = None
        self._client_gone = client_gone
        self._by_operator = by_operator
        self._forwarded: tuple[bytes, bytes, Headers, bytes] | None = None
        self._generation = -1
        self._tries = 0
        self._strict_detail: Wording | None = None
        self._broken_off: BackendError | None = None
        self._evidence: _Evidence | None = None
        self._prompt: Prompt | None = None
        self._known: policy.Knowledge | None = None
        self._slot_is_noted = False
        self._devices: Watch | None = None
        self.watch: sse.ReplyWatch | None = None
        self.record = HandoffRecord(
            request_id=request_id,
            time=rfc3339(dt.datetime.now(dt.UTC)),
            instance=config.instance,
            model=config.model.alias,
            path=path,
            stream=parsed.stream,
            provider=config.provider.program,
            started_s=time.monotonic(),
        )
        self.lessons = Lessons(
            *(handoffs.outlooks, handoffs.breaker, handoffs.reuse, self.record),
            is_ours=lambda: handoffs.config.provider == config.provider,
        )

    async def __aenter__(self) -> Self:
        self._devices = self._handoffs.telemetry.watch()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._devices is not None:
            self.record.gpu_busy_percent = self._devices.end()
        self.free_slot()
        conclude(self.record, self._ending(error))
        self._pass_evidence_on()
        if self._reply is not None and self._reply.status == 200:
            self.lessons.replied(self._timings, self._handed, self._generation)
        record = self.record
        good = record.outcome in (Outcome.USED, Outcome.SKIPPED, Outcome.CANCELLED)
        write = log.info if good else log.warning
        write("handoff", line=record.line(), **record.fields())
        self._handoffs.history.add(record)
        self._handoffs.outlooks.refit()

    async def open(self, method: bytes, target: bytes, headers: Headers, body: bytes) -> Reply:
        """Hand over if it can be done, forward the request, return the reply's head.

        The reply is closed by the context manager.

        Raises:
            RequestError: what the client gets instead of a reply.
        """
        handoffs = self._handoffs
        ticket = self._ticket = handoffs.admission.enter(self.record.request_id)
        facts = await handoffs.supervisor.wait_ready_for_client()
        try:
            await self._hand_over(facts, ticket, body)
        except HandoffError as error:
            self._failure = self.lessons.failed(error)
            self._raise_if_strict(self._failure.reason, self._failure.why)
        # A restore or an adoption is carried out whatever happens to the request meanwhile.
        await trio.lowlevel.checkpoint_if_cancelled()
        skip = self._skip
        # A prompt that does not fit, or that the decoder cannot read, gets the decoder's own words.
        strict = self._policy is Policy.STRICT
        if strict and skip is not None and skip.reason not in DECODERS_ANSWER:
            why = skip.why
            others = skip.reason is Reason.BREAKER_OPEN  # it may quote their prompts
            self._raise_if_strict(skip.reason, why, why.brief if others else None)
        with self._waiting("queue_ms", ticket):
            await ticket.wait_slot()
        if self._handed is None:
            await handoffs.audits.put_slot_back()
        ticket.phase = "decode"
        self.lessons.run_beside = handoffs.runs.running is not None
        self._forwarded = (method, target, headers, body)
        return await self._forward()

    async def reopen(self, error: BackendError) -> Reply:
        """Forward once more, after the decoder broke off before it said anything.

        Raises:
            RequestError: it was the second time.
        """
        if self._reply is not None:
            self._reply.close()
        await self._wait_replaced(error)
        return await self._forward()

    def _raise_if_strict(self, reason: Reason, why: Wording, told: str | None = None) -> None:
        """Refuse the request if a failed handoff is an error; `told` is what its client may see."""
        strict = self._policy is Policy.STRICT
        if strict or self._config.handoff.on_failure == "error":
            self._strict_detail = why  # the record has a field for the reason already
            raise RequestError(
                502,
                f"the handoff failed ({reason}: {told or why.full})",
                kind="handoff_error",
                reason=reason,
            )

    async def _hand_over(self, facts: BackendFacts, ticket: Ticket, body: bytes) -> None:
        """Do what comes before the request itself; `_handed` or `_skip` says what that was."""
        config = self._config
        known = policy.Knowledge(
            policy=self._policy,
            has_provider=config.provider.program is not None,
            device=config.backend.device,
            unsupported=facts.unsupported,
            min_tokens=config.handoff.min_tokens,
            out_of_service=self._handoffs.out_of_service,
            not_reused=self._handoffs.route_off,
        )
        self._skip = policy.plan_without_prompt(known)
        if self._skip is not None:
            return
        prompt = await self._tokens(facts, ticket, body)
        if prompt is None:
            return
        self._prompt = ticket.prompt = prompt
        await self._handoffs.outlooks.read_reply()
        self.record.prompt_tokens = len(prompt.ids)
        self.record.prompt_hash = prompt_hash(prompt.ids, self._handoffs.history.hash_key)
        plan: policy.Plan = policy.plan(known, len(prompt.ids), facts.ctx_size)
        self._known = known
        share = config.handoff.share and self._route is not Route.FILE
        if isinstance(plan, policy.HandOff):
            may_share = share and self._handoffs.shares.refusal_of(facts) is None
            plan = self._weighed(facts, ticket, Route.SHARED if may_share else Route.FILE)
        if isinstance(plan, policy.HandOff) and share:
            if await self._by_share(facts, ticket, list(prompt.ids[:-1]), plan):
                return
            if plan.route is Route.SHARED:
                plan = self._weighed(facts, ticket, Route.FILE)
        if isinstance(plan, policy.Skip):
            self._skip_it(plan)
            return
        self.record.route = Route.FILE
        await self._by_file(facts, ticket, list(prompt.ids[:-1]), plan)

    def _is_out_of_service(self) -> bool:
        """Say whether the provider failed others while this prompt waited; `_skip` says so then."""
        why = self._handoffs.out_of_service
        if why is not None:
            self._skip_it(policy.Skip.because(Reason.BREAKER_OPEN, why))
        return why is not None

    def _skip_it(self, plan: policy.Skip) -> None:
        self._skip, self.record.route = plan, None

    def _weighed(self, facts: BackendFacts, ticket: Ticket, route: Route) -> policy.Plan:
        """Decide between the two ways of a prompt that can be handed off."""
        outlooks, record, prompt = self._handoffs.outlooks, self.record, self._prompt
        assert prompt is not None  # noqa: S101 - it was tokenized
        assert self._known is not None  # noqa: S101 - it can be handed off
        outlook = outlooks.of(facts, prompt, route, ticket, self._config)
        plan = policy.plan(self._known, len(prompt.ids), facts.ctx_size, outlook)
        if self._policy is Policy.AUTO:
            outlooks.habits.note(outlook, plan)
            record.slot_tokens = outlook.cached_tokens
            record.decoder_estimate_ms = outlook.by_decoder_ms
            record.provider_estimate_ms = outlook.by_provider_ms
            record.explored = plan.explored or None
        outlooks.expect(ticket, outlook, plan, self._parsed.json)
        return plan

    def _outlook_now(self, ticket: Ticket, facts: BackendFacts, route: Route) -> Outlook:
        assert self._prompt is not None  # noqa: S101 - it was tokenized
        facts = self._handoffs.supervisor.facts or facts
        return self._handoffs.outlooks.of(facts, self._prompt, route, ticket, self._config)

    async def _tokens(self, facts: BackendFacts, ticket: Ticket, body: bytes) -> Prompt | None:
        """Return what the decoder will evaluate, or None with `_skip` saying why not."""
        prompt = self._parsed.prompt
        try:
            match prompt:
                case request.NotText(detail, brief):
                    self._skip = policy.Skip(Reason.NOT_TEXT, detail, brief=brief)
                    return None
                case request.Ids(ids):
                    return Prompt(ids)
                case request.Text(content):
                    return await self._tokenize(facts, ticket, content)
                case request.Chat():
                    ticket.phase = "template"
                    with timed(self.record, "template_ms"):
                        text = await facts.server.apply_template(body)
                    return await self._tokenize(facts, ticket, text)
        except BackendRefused as error:
            # The request itself is at fault; the decoder says so once more to the client.
            # Its words are not for the record: they quote what it could not parse.
            refused = f"the decoder refused the {ticket.phase} step with status {error.status}"
            self._skip = policy.Skip(Reason.BACKEND_REFUSED, refused)
            return None
        except BackendError as error:
            raise HandoffError(Reason.BACKEND_DOWN, error.wording) from error

    async def _tokenize(
        self, facts: BackendFacts, ticket: Ticket, content: str | list[int | str]
    ) -> Prompt:
        ticket.phase = "tokenize"
        with timed(self.record, "tokenize_ms"):
            ids = await facts.server.tokenize(content)
        return Prompt(ids, content if isinstance(content, str) else None)

    async def _by_share(
        self, facts: BackendFacts, ticket: Ticket, tokens: list[int], plan: policy.HandOff
    ) -> bool:
        """Hand over through the decoder's memory; False when nothing of that has begun."""
        shares, outlooks = self._handoffs.shares, self._handoffs.outlooks
        self.record.route = Route.SHARED
        refusal = shares.refusal_of(facts)
        why_not: HandoffError | Overtaken | float
        if refusal is not None:
            # Judged once: a pause may end at any moment, and the slot is not ours here.
            self.record.share_ms = 0.0
            why_not = HandoffError(Reason.SHARE_REFUSED, refusal)
        else:
            # It is the slot's own memory that the provider writes to: nobody else may be in it.
            had_to_wait = ticket.place > 0
            with self._waiting("queue_ms", ticket):
                await ticket.wait_slot()
            facts = await self._handoffs.supervisor.wait_ready()
            if self._is_out_of_service():
                return True
            if had_to_wait and self._policy is Policy.AUTO and not plan.explored:
                now = self._outlook_now(ticket, facts, Route.SHARED)
                if is_overtaken(now, 0.0):
                    self._skip_it(policy.Skip(Reason.OVERTAKEN, now.comparison()))
                    return True
            cold = self._handoffs.runs.ended_well == 0
            outlooks.memory.forget()
            patience_ms = math.inf
            if plan.limit_ms is not None:
                patience_ms = device_patience_ms(self._outlook_now(ticket, facts, Route.SHARED))
            why_not = await shares.hand_over(
                *(facts, tokens, self.record, ticket, self._config, patience_ms)
            )
        if isinstance(why_not, Overtaken):
            self._skip_it(policy.Skip(Reason.OVERTAKEN, why_not.detail))
            overran = why_not.overran and not plan.explored
            stopped = dataclasses.replace(why_not, overran=overran)
            self.lessons.run_stopped(stopped, len(tokens), overlapped=False)
            return True
        if isinstance(why_not, float):
            self.lessons.run_ended(Route.SHARED, len(tokens), why_not, overlapped=False, cold=cold)
            audits, layout = self._handoffs.audits, facts.layout
            audits.forget_slot()
            if layout is not None and audits.wants(in_slot=True, layout=layout):
                self._evidence = _Evidence(tokens, layout, None)
            self._handed = self.record.handed_tokens = len(tokens)
            self._generation = facts.generation
            return True
        if self._route is Route.SHARED:
            raise why_not
        log.info(
            "share_not_used",
            request_id=self.record.request_id,
            reason=why_not.reason,
            line=f"not shared, by file instead ({why_not.reason}: {why_not.detail})",
        )
        return False

    async def _by_file(
        self, facts: BackendFacts, ticket: Ticket, tokens: list[int], plan: policy.HandOff
    ) -> None:
        handoffs = self._handoffs
        layout = facts.layout
        assert layout is not None  # noqa: S101 - plan() skips a decoder without one
        has_to_wait = ticket.place > 1
        with self._waiting("queue_ms", ticket):
            await ticket.wait_may_prefill()
        if has_to_wait and self._policy is Policy.AUTO:
            again = self._weighed(handoffs.supervisor.facts or facts, ticket, Route.FILE)
            if isinstance(again, policy.Skip):
                self._skip_it(again)
                return
            plan = again
        if self._is_out_of_service():
            return
        handoffs.audits.make_room(layout.bytes_for(len(tokens)))
        prefilled = await self._prefill(facts, layout, ticket, tokens, plan)
        if prefilled is None:
            return
        name, self.record.state_bytes = prefilled.name, prefilled.size
        try:
            with self._waiting("queue_ms", ticket):
                await ticket.wait_slot()
            facts = await handoffs.supervisor.wait_ready()
            if facts.layout != layout:
                raise HandoffError(
                    Reason.BAD_STATE, "the decoder came back with another state layout"
                )
            ticket.phase = "restore"
            handoffs.outlooks.memory.forget()
            took_ms = await handoffs.files.restore(
                facts, prefilled, tokens, self.record, self._config
            )
            self.lessons.restored(prefilled, len(tokens), took_ms)
            if handoffs.audits.wants(in_slot=False, layout=layout):
                self._evidence = _Evidence(tokens, layout, name)
        finally:
            if self._evidence is None:
                handoffs.slots.remove(name)
        handoffs.audits.forget_slot()
        self._handed = self.record.handed_tokens = len(tokens)
        self._generation = facts.generation

    async def _prefill(
        self,
        facts: BackendFacts,
        layout: Layout,
        ticket: Ticket,
        tokens: list[int],
        plan: policy.HandOff,
    ) -> Prefilled | None:
        """Run the provider; None when the decoder was faster, with `_skip` saying so."""
        runs = self._handoffs.runs
        overlapped, cold = ticket.place > 0, runs.ended_well == 0

        async def work() -> Prefilled:
            wanted = (self.record, ticket, self._config, facts.baseline)
            try:
                return await runs.prefill(
                    *(tokens, layout, *wanted), refusal=lambda: self._handoffs.out_of_service
                )
            except HandoffError as error:
                # Counted at once: whoever has waited for this run's end asks next.
                raise self.lessons.failed(error) from error

        result: Prefilled | Overtaken
        try:
            if self._policy is not Policy.AUTO:
                result = await work()
            else:
                outlook = partial(self._outlook_now, ticket, facts, Route.FILE)
                slots = self._handoffs.slots
                result = await race(
                    *(work, plan, ticket, outlook),
                    running=lambda: runs.running,
                    discard=lambda made: slots.remove(made.name),
                )
        except HandoffError as error:
            if error.reason is not Reason.BREAKER_OPEN:
                raise
            self._skip_it(policy.Skip.because(Reason.BREAKER_OPEN, error.why))
            return None
        if isinstance(result, Prefilled):
            self.lessons.run_ended(
                Route.FILE, len(tokens), result.run_ms, overlapped=overlapped, cold=cold
            )
            return result
        self._skip_it(policy.Skip(Reason.OVERTAKEN, result.detail))
        self.lessons.run_stopped(result, len(tokens), overlapped=overlapped)
        return None

    async def _forward(self) -> Reply:
        """Send the request itself; once more to a new decoder when this one dies under it."""
        assert self._forwarded is not None  # noqa: S101 - open() comes first
        method, target, headers, body = self._forwarded
        while True:
            facts = await self._handoffs.supervisor.wait_ready()
            # What was restored into a decoder that is gone is gone with it.
            if self._handed is not None and facts.generation != self._generation:
                self._lost(Reason.BACKEND_DOWN, "the decoder restarted after the restore")
            if self._handed is None:
                facts = await self._handoffs.vitals.make_sure(facts)
            self._generation = facts.generation
            self.lessons.expected_tokens = self._expected(facts)
            self.lessons.forwarded = time.monotonic()
            document = self._parsed.json
            sent = body
            if self._handed is not None and document is not None:
                sent = request.with_slot(body, document)
            try:
                reply = self._reply = await facts.server.open(method, target, headers, sent)
            except BackendGone as error:
                await self._wait_replaced(error)
                continue
            if self._handed is not None and reply.status < 500:
                self.lessons.succeeded()
            if self._handed is None or reply.status < 500:
                break
            # A state that passed every check and still breaks the decoder: prefill after all.
            detail = await _error_text(reply)
            reply.close()
            why = Wording.of("the decoder failed on the restored prompt", detail)
            self._lost(Reason.BAD_STATE, why)
            if self.record.route is Route.SHARED:
                # Nobody has looked at every value there.
                self._handoffs.supervisor.kill(
                    f"it failed on an adopted prompt: {detail}", its_own_fault=False
                )
            else:
                await self._handoffs.make_safe(facts, "an error after a restore")
        self.watch = sse.watch_for(dict(reply.headers).get(b"content-type", b""))
        return reply

    def _expected(self, facts: BackendFacts) -> int:
        """Return how many of the prompt's tokens this decoder is believed to hold by itself."""
        outlooks, prompt = self._handoffs.outlooks, self._prompt
        outlooks.see(facts)
        if self._handed is not None or prompt is None:
            return 0
        return outlooks.memory.reusable(prompt)

    async def _wait_replaced(self, error: BackendError) -> None:
        self._tries += 1
        why = error.wording.behind("the decoder died under this request: ")
        self._lost(Reason.BACKEND_DOWN, why)
        if self._tries == _TRIES:
            raise RequestError(
                503,
                f"the decoder died under this request, {_TRIES} times",
                kind="server_error",
                retry_after_s=_RETRY_AFTER_S,
                reason=Reason.BACKEND_DOWN,
            ) from error
        try:
            await self._handoffs.supervisor.wait_restarted(self._generation)
        except RequestError:
            self._note_status(_HUNG_UP)
            raise

    def _lost(self, reason: Reason, why: str | Wording) -> None:
        """The handoff, if there was one, is of no use any more."""
        if self._failure is None and (self._handed is not None or self._skip is None):
            self._failure = HandoffError(reason, why)
        self._handed = None

    def observe(self, data: bytes) -> None:
        """Look at bytes of the reply on their way to the client."""
        watch = self.watch
        if watch is None:
            return
        watch.feed(data)
        if watch.started and self.record.first_byte_ms is None:
            self.record.first_byte_ms = self.record.since_start_ms(time.monotonic())
            if self._devices is not None:
                self._devices.first_byte()
            self.lessons.run_beside |= self._handoffs.runs.running is not None

    def free_slot(self) -> None:
        """The decoder is done with this request: the next one need not wait for our client."""
        if self.record.total_ms is None:
            self.record.total_ms = self.record.since_start_ms(time.monotonic())
        if self._reply is not None:
            self._reply.close()
        if self._ticket is not None:
            try:
                if self._ticket.granted is not None and not self._slot_is_noted:
                    self._slot_is_noted = True
                    self._note_slot()
            finally:
                self._ticket.leave()

    def _note_slot(self) -> None:
        """Remember what this request leaves in the slot, which is still its own."""
        if self._forwarded is None:
            return  # what a restore did has been said already
        facts = self._handoffs.supervisor.facts
        is_same = facts is not None and facts.generation == self._generation
        status = None if self._reply is None else self._reply.status
        self.lessons.slot_left(
            self._prompt if is_same else None,
            status,
            self.watch,
            restored=self._handed is not None,
        )
        if status == 200 and self.watch is not None:
            # A stream's head says nothing about how it went on.
            status = 200 if self._timings is not None else self.watch.error_status
        if status is not None:
            self._note_status(status)

    def _note_status(self, status: int) -> None:
        """Have the decoder's errors counted."""
        facts = self._handoffs.supervisor.facts
        if facts is not None and facts.generation == self._generation:
            self._handoffs.vitals.note_status(facts, status)

    @property
    def phase(self) -> str:
        """Where it is, a word of `onebitd(8)`."""
        return "queued" if self._ticket is None else self._ticket.phase

    @property
    def reply_tokens(self) -> int | None:
        """How many events of the streamed reply have come; None for a reply in one piece."""
        if self.watch is None or not self.record.stream:
            return None
        return self.watch.events

    @property
    def _timings(self) -> dict[str, Any] | None:
        return None if self.watch is None else self.watch.timings()

    def note_broken_off(self, error: BackendError) -> None:
        """The decoder broke off in the middle of the reply; the client has seen that."""
        self._broken_off = error
        self._note_status(_HUNG_UP)

    def _pass_evidence_on(self) -> None:
        """Only what was really decoded from is worth an audit."""
        audits, evidence, record = self._handoffs.audits, self._evidence, self.record
        if evidence is None:
            return
        if record.outcome is Outcome.USED:
            audits.keep(
                record.request_id,
                evidence.tokens,
                evidence.layout,
                name=evidence.name,
                holder=self._ticket,
            )
        elif evidence.name is not None:
            self._handoffs.slots.remove(evidence.name)

    def reply_headers(self) -> list[tuple[bytes, bytes]]:
        """Return what onebitd adds to the reply's head: identity, way, reason, timings."""
        record = self.record
        added = [(b"x-request-id", record.request_id.encode("latin-1"))]
        reason: Reason | None = None
        if self._handed is not None:
            way: str = (record.route or Route.FILE).value
        elif self._failure is not None:
            way, reason = "fallback", self._failure.reason
        else:
            way, reason = "skipped", self._skip.reason if self._skip is not None else record.reason
        added.append((b"x-onebit-handoff", way.encode()))
        if reason is not None:
            added.append((b"x-onebit-reason", reason.value.encode()))
        parts = []
        for name in _TIMED:
            value = getattr(record, "provider_wall_ms" if name == "provider" else f"{name}_ms")
            if value is not None:
                parts.append(f"{name};dur={value:.3f}")
        if parts:
            added.append((b"server-timing", ", ".join(parts).encode()))
        return added

    def _ending(self, error: BaseException | None) -> Ending:
        return Ending(
            error=error,
            phase=self.phase,
            by_operator=self._by_operator(),
            client_gone=self._client_gone(),
            strict_detail=self._strict_detail,
            broken_off=self._broken_off,
            failure=self._failure,
            skip=self._skip,
            handed=self._handed,
            status=None if self._reply is None else self._reply.status,
            timings=self._timings,
            whole=self.watch is not None and self.watch.is_whole,
        )

    @contextlib.contextmanager
    def _waiting(self, field: str, ticket: Ticket) -> Iterator[None]:
        before = ticket.phase
        ticket.phase = "queued"
        with timed(self.record, field):
            yield
        ticket.phase = before


async def _error_text(reply: Reply) -> str:
    with contextlib.suppress(BackendError), trio.move_on_after(2.0):
        return (await reply.read_all())[:200].decode("utf-8", "replace")
    return f"status {reply.status}"
