"""How a request on the handoff route ended: its outcome, its reason and the decoder's figures."""

from __future__ import annotations

import dataclasses
from typing import Any

import trio

from onebitd.core import policy, sse
from onebitd.core.errors import BackendError, HandoffError, OnebitError, RequestError
from onebitd.core.handoff import HandoffRecord, Outcome, Reason, outcome_of_reply
from onebitd.core.wording import Wording


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What is known of a request when it ends.

    Attributes:
        error: that it ended with, None for none.
        phase: that it was in.
        by_operator, client_gone: whose a cancel was; neither: the daemon's own.
        strict_detail: why the handoff failed, where that is the client's error.
        broken_off: what ended the reply in the middle.
        failure: of the handoff.
        skip: why none was tried.
        handed: how many tokens the decoder was handed, None when it prefilled by itself.
        status: of the reply, None without one.
        timings: the decoder's, None when it said none.
        whole: the client has all of the reply's events. It may leave at the last of them and not
            wait for the connection's own end, as some clients do.
    """

    error: BaseException | None
    phase: str
    by_operator: bool
    client_gone: bool
    strict_detail: Wording | None
    broken_off: BackendError | None
    failure: HandoffError | None
    skip: policy.Skip | None
    handed: int | None
    status: int | None
    timings: dict[str, Any] | None
    whole: bool = False


def conclude(record: HandoffRecord, ending: Ending) -> None:
    """Write outcome, reason and the decoder's figures into the record."""
    record.cached_tokens, record.evaluated_tokens = sse.token_counts(ending.timings)
    record.evaluated_ms = sse.prompt_ms(ending.timings)
    record.reply_tokens, record.decode_ms = sse.reply_counts(ending.timings)
    if (
        record.prompt_tokens is None
        and record.cached_tokens is not None
        and record.evaluated_tokens is not None
    ):
        record.prompt_tokens = record.cached_tokens + record.evaluated_tokens
    if ending.error is not None and not _left_with_everything(ending.error, ending):
        record.outcome, record.reason, why = _of_error(ending.error, ending)
        record.set_detail(why)
    elif (handed := _decoded_from(ending)) is not None:
        record.outcome = outcome_of_reply(handed, record.cached_tokens, record.evaluated_tokens)
        if record.evaluated_tokens is None:
            record.set_detail(Wording.of("the decoder's reply said nothing about its prompt"))
    else:
        record.outcome, record.reason, why = _of_reply(ending)
        record.set_detail(why)


def _decoded_from(ending: Ending) -> int | None:
    """Return how many handed tokens the reply was decoded from, None when there was no such."""
    went_well = ending.broken_off is None and ending.failure is None
    return ending.handed if went_well and (ending.status or 0) < 400 else None


def _left_with_everything(error: BaseException, ending: Ending) -> bool:
    return ending.whole and ending.client_gone and not ending.by_operator and _is_cancel(error)


def _of_error(error: BaseException, ending: Ending) -> tuple[Outcome, Reason, Wording]:
    if isinstance(error, RequestError):
        why = ending.strict_detail or error.wording
        return Outcome.FAILED, error.reason or Reason.INTERNAL, why
    if _is_cancel(error):
        if ending.by_operator:
            where = f"the operator cancelled it in phase {ending.phase}"
            return Outcome.CANCELLED, Reason.OPERATOR, Wording.of(where)
        if ending.client_gone:
            where = f"the client left in phase {ending.phase}"
            return Outcome.CANCELLED, Reason.CLIENT_GONE, Wording.of(where)
        stopped = Wording.of("onebitd stopped before its end")
        return Outcome.CANCELLED, Reason.DRAINING, stopped
    reason = Reason.BACKEND_DOWN if isinstance(error, BackendError) else Reason.INTERNAL
    return Outcome.FAILED, reason, _wording_of(error)


def _wording_of(error: BaseException) -> Wording:
    """Nobody knows what an error of a library says: a KeyError its key, for instance."""
    if isinstance(error, OnebitError):
        return error.wording
    kind, text = type(error).__name__, str(error)
    return Wording(text or kind, Wording.of(kind, text).brief)


def _of_reply(ending: Ending) -> tuple[Outcome, Reason, Wording]:
    if ending.broken_off is not None:
        return Outcome.FAILED, Reason.BACKEND_DOWN, ending.broken_off.wording
    if ending.failure is not None:
        return Outcome.FALLBACK, ending.failure.reason, ending.failure.why
    if ending.handed is not None:
        why = Wording.of(f"the decoder refused the request with status {ending.status}")
        return Outcome.FAILED, Reason.BACKEND_REFUSED, why
    if ending.skip is not None:
        return Outcome.SKIPPED, ending.skip.reason, ending.skip.why
    return Outcome.FAILED, Reason.INTERNAL, Wording.of("the request ended before it began")


def _is_cancel(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_is_cancel(inner) for inner in error.exceptions)
    return isinstance(error, trio.Cancelled)
