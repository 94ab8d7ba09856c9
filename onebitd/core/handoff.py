"""The record of one handoff: its outcomes, its reasons, its fields and its log line.

The names are promises of `onebitd(8)`: the same in the log, on the control socket and in
`onebitctl handoffs --json`. A field that does not apply is absent, never invented.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Final

from onebitd.core.wording import Wording


class Outcome(enum.StrEnum):
    """How one request on the handoff route ended."""

    USED = "used"
    """Handed over, and the decoder then evaluated only the last token."""
    WASTED = "wasted"
    """Handed over, but the decoder evaluated the prompt again."""
    FALLBACK = "fallback"
    """A handoff was tried and failed; the decoder prefilled by itself."""
    SKIPPED = "skipped"
    """The decoder's own prefill was chosen: by the policy, by the request, or in a race."""
    FAILED = "failed"
    """The client got an error: a strict handoff failed, or the decoder could not answer."""
    CANCELLED = "cancelled"
    """It ended before its reply was complete: its client left, or it was cancelled."""


class Route(enum.StrEnum):
    """How the KV cache travels from the provider to the decoder."""

    FILE = "file"
    SHARED = "shared"


class Reason(enum.StrEnum):
    """Why a request was not handed off, fell back, failed or was cancelled; a closed list."""

    NO_PROVIDER = "no_provider"
    NOT_TEXT = "not_text"
    TOO_SHORT = "too_short"
    TOO_LONG = "too_long"
    POLICY = "policy"
    ALREADY_CACHED = "already_cached"
    OVERTAKEN = "overtaken"
    NOT_REUSED = "not_reused"
    LOCK_BUSY = "lock_busy"
    LOCK_UNUSABLE = "lock_unusable"
    PROVIDER_EXIT = "provider_exit"
    PROVIDER_TIMEOUT = "provider_timeout"
    PROVIDER_NO_FILE = "provider_no_file"
    BAD_STATE = "bad_state"
    RESTORE_REFUSED = "restore_refused"
    RESTORE_SHORT = "restore_short"
    SHARE_REFUSED = "share_refused"
    SHARE_HANDSHAKE = "share_handshake"
    ADOPT_REFUSED = "adopt_refused"
    BREAKER_OPEN = "breaker_open"
    NO_SPACE = "no_space"
    CLIENT_GONE = "client_gone"
    OPERATOR = "operator"
    BACKEND_DOWN = "backend_down"
    BACKEND_REFUSED = "backend_refused"
    UNSUPPORTED_MODEL = "unsupported_model"
    QUEUE_FULL = "queue_full"
    DRAINING = "draining"
    INTERNAL = "internal"


@dataclasses.dataclass(slots=True)
class HandoffRecord:
    """One request on the handoff route, filled in as it goes.

    Times are milliseconds. `first_byte_ms` and `total_ms` count from the start of the handoff: the
    moment the request had been read and entered the queue; so do `provider_at_ms` and
    `handed_at_ms`, when the provider was started and when the restore or the adoption was asked
    for. Waiting for the lock ended as the provider began, and decoding lasted from the first byte
    to `total_ms`, when the decoder was done with the reply, or given up. `evaluated_tokens`,
    `cached_tokens`, `reply_tokens` and `decode_ms` are the decoder's own words (`timings.prompt_n`,
    `cache_n`, `predicted_n`, `predicted_ms`). `prefill_ms` is the provider's own figure when it
    reported one, else equal to `provider_wall_ms`. `prompt_hash` is `core.prompt_hash`'s, the same
    for the same prompt of one instance. `slot_tokens` is how much of the
    prompt the slot was believed to hold, `decoder_estimate_ms` and `provider_estimate_ms` what the
    policy weighed against each other; `explored` that it tried the way it believed to be slower.
    """

    request_id: str
    time: str
    instance: str
    model: str
    path: str
    stream: bool
    outcome: Outcome | None = None
    route: Route | None = None
    reason: Reason | None = None
    detail: str | None = None
    prompt_tokens: int | None = None
    prompt_hash: str | None = None
    slot_tokens: int | None = None
    decoder_estimate_ms: float | None = None
    provider_estimate_ms: float | None = None
    explored: bool | None = None
    handed_tokens: int | None = None
    evaluated_tokens: int | None = None
    cached_tokens: int | None = None
    evaluated_ms: float | None = None
    queue_ms: float | None = None
    template_ms: float | None = None
    tokenize_ms: float | None = None
    lock_ms: float | None = None
    provider_at_ms: float | None = None
    prefill_ms: float | None = None
    provider_wall_ms: float | None = None
    check_ms: float | None = None
    share_ms: float | None = None
    adopt_ms: float | None = None
    restore_ms: float | None = None
    handed_at_ms: float | None = None
    first_byte_ms: float | None = None
    total_ms: float | None = None
    reply_tokens: int | None = None
    decode_ms: float | None = None
    state_bytes: int | None = None
    gpu_busy_percent: float | None = None
    provider: str | None = None
    started_s: float | None = dataclasses.field(default=None, repr=False, compare=False)
    """The monotonic clock at the start: not one of `FIELDS`."""
    brief: str | None = dataclasses.field(default=None, repr=False, compare=False)
    """`detail` without words of other programs: not one of `FIELDS`."""

    def set_detail(self, why: Wording | None) -> None:
        """Set `detail`, and what is kept of it."""
        self.detail, self.brief = (None, None) if why is None else (why.full, why.brief)

    def since_start_ms(self, now_s: float) -> float | None:
        """Return the time from the start, None for a trial run, which is nobody's request."""
        return None if self.started_s is None else (now_s - self.started_s) * 1000.0

    def fields(self) -> dict[str, Any]:
        """Return what applies, in declaration order; milliseconds rounded to the microsecond."""
        found: dict[str, Any] = {}
        for name in FIELDS:
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, float):
                value = round(value, 3)
            elif isinstance(value, enum.StrEnum):
                value = value.value
            found[name] = value
        return found

    def kept_fields(self) -> dict[str, Any]:
        """Return the fields as they are kept on disk: nothing that another program said.

        A detail of which it is not known what onebitd says itself is left out.
        """
        found = self.fields()
        if self.brief is not None:
            found["detail"] = self.brief
        else:
            found.pop("detail", None)
        return found

    def line(self) -> str:
        """Return the human text of this handoff, the engine's own line."""
        tokens = "?" if self.prompt_tokens is None else str(self.prompt_tokens)
        parts = [f"hybrid: {tokens} prompt tokens: "]
        if self.outcome in (Outcome.USED, Outcome.WASTED):
            parts.append(f"prefill {self.prefill_ms or 0.0:.1f} ms, ")
            if self.share_ms is not None:
                parts.append(f"share {self.share_ms:.3f} ms, ")
            if self.route is Route.SHARED:
                parts.append(f"adopt {self.adopt_ms or 0.0:.3f} ms")
            else:
                parts.append(f"restore {self.restore_ms or 0.0:.1f} ms")
            if self.outcome is Outcome.WASTED:
                evaluated = "?" if self.evaluated_tokens is None else self.evaluated_tokens
                parts.append(f", wasted: the decoder evaluated {evaluated} tokens again")
        else:
            parts.append(_VERBS.get(self.outcome, "unfinished"))
            if self.reason is not None:
                parts.append(
                    f" ({self.reason}: {self.detail})" if self.detail else f" ({self.reason})"
                )
        if self.first_byte_ms is not None:
            parts.append(f", first byte {self.first_byte_ms:.1f} ms")
        return "".join(parts)


FIELDS: Final = tuple(
    field.name
    for field in dataclasses.fields(HandoffRecord)
    if field.name not in ("started_s", "brief")
)
"""Names of the fields, in the order in which they are told."""

_VERBS: dict[Outcome | None, str] = {
    Outcome.FALLBACK: "fell back",
    Outcome.SKIPPED: "not handed off",
    Outcome.FAILED: "failed",
    Outcome.CANCELLED: "cancelled",
}


def outcome_of_reply(
    handed_tokens: int, cached_tokens: int | None, evaluated_tokens: int | None
) -> Outcome:
    """Decide whether a handoff that was restored was also used.

    Args:
        handed_tokens: tokens the provider prefilled (the prompt's, less its last).
        cached_tokens: `timings.cache_n` of the reply, None when the decoder did not say.
        evaluated_tokens: `timings.prompt_n` of the reply, None when the decoder did not say.

    Returns:
        USED only if the decoder says that it took every handed token from its cache and evaluated
        exactly one.
    """
    if cached_tokens == handed_tokens and evaluated_tokens == 1:
        return Outcome.USED
    return Outcome.WASTED


def decode_speed(reply_tokens: float | None, decode_ms: float | None) -> float | None:
    """Return the tokens a second of a reply, as the decoder counts them; None where that is none.

    A reply of one token has no speed: llama-server's clock starts with that token, and it says a
    microsecond, a million tokens a second (measured, build 10068).

    >>> decode_speed(48, 1600.0), decode_speed(1, 0.001)
    (30.0, None)
    """
    if reply_tokens is None or not decode_ms or reply_tokens < 2:
        return None
    speed = reply_tokens / decode_ms * 1000.0
    return speed if speed < _MOST_TOKENS_PER_S else None


def prefill_speed(tokens: float | None, took_ms: float | None) -> float | None:
    """Return the tokens a second of a prefill; None where that is none.

    >>> prefill_speed(300, 150.0), prefill_speed(1, 150.0)
    (2000.0, None)
    """
    # Less than a microsecond is no figure, and its speed would spoil a sum for ever.
    if tokens is None or not took_ms or took_ms <= 1e-3 or tokens < LEAST_SPEED_TOKENS:
        return None
    return tokens / took_ms * 1000.0


LEAST_SPEED_TOKENS: Final = 32
"""A shorter prefill has no speed worth telling: most of it is what any prefill begins with."""
_MOST_TOKENS_PER_S: Final = 1e9
