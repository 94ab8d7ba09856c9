"""One handoff as spans on a time axis, from the fields of its record; milliseconds from its start.

A record says when the provider began, when the restore or the adoption did, when the first byte
came and when the reply was over; of the other steps it says how long they took. They follow each
other, so that is enough to place them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

SPAN_NAMES: Final = (
    *("front", "queue", "lock", "provider", "check", "handover", "prompt", "decode"),
)
"""In the order in which they are drawn. `front`: template and tokenize; `handover`: restore, or
share and adopt; `prompt`: the decoder evaluates what is left of the prompt, up to the first byte;
`decode`: the rest of the reply."""

_OF_PHASE: Final = {
    "queued": "queue",
    "template": "front",
    "tokenize": "front",
    "lock": "lock",
    "prefill": "provider",
    "restore": "handover",
    "share": "handover",
    "adopt": "handover",
}
_LEAST_MS: Final = 1e-3


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One step, from `begin_ms` to `end_ms`; `name` is one of `SPAN_NAMES`."""

    name: str
    begin_ms: float
    end_ms: float

    def to_json(self) -> list[str | float]:
        """Return `[name, begin, end]`."""
        return [self.name, round(self.begin_ms, 3), round(self.end_ms, 3)]


class _Row:
    """The spans so far; each begins where the last one ended, or later."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.end_ms = 0.0

    def add(self, name: str, took_ms: float, begin_ms: float | None = None) -> None:
        begin_ms = self.end_ms if begin_ms is None else max(begin_ms, self.end_ms)
        if took_ms >= _LEAST_MS:
            self.spans.append(Span(name, begin_ms, begin_ms + took_ms))
            self.end_ms = begin_ms + took_ms

    def add_until(self, name: str, end_ms: float | None, most_ms: float | None = None) -> None:
        if end_ms is None or end_ms <= self.end_ms:
            return
        took_ms = end_ms - self.end_ms
        self.add(name, took_ms if most_ms is None else min(took_ms, most_ms))


def spans(fields: Mapping[str, Any]) -> list[Span]:
    """Return what a record tells, in time, none overlapping another.

    Args:
        fields: of a record, finished or not; what is absent is left out.
    """
    row = _Row()
    row.add("front", _ms(fields, "template_ms") + _ms(fields, "tokenize_ms"))
    waited_ms = _ms(fields, "queue_ms")
    if "provider_wall_ms" in fields or "provider_at_ms" in fields:
        waited_ms -= _before_provider(row, fields, waited_ms)
        row.add("provider", _ms(fields, "provider_wall_ms"), fields.get("provider_at_ms"))
        row.add("check", _ms(fields, "check_ms"))
    handed_at_ms = fields.get("handed_at_ms")
    if handed_at_ms is None:
        row.add("queue", waited_ms)
    else:
        row.add_until("queue", handed_at_ms, waited_ms)
    row.add("handover", _ms(fields, "restore_ms") + _ms(fields, "adopt_ms"), handed_at_ms)
    first_byte_ms = fields.get("first_byte_ms")
    if first_byte_ms is not None and not fields.get("stream", True):
        # A reply in one piece begins when it is whole: before it came, its tokens were decoded.
        first_byte_ms = max(first_byte_ms - _ms(fields, "decode_ms"), row.end_ms)
    row.add_until("prompt", first_byte_ms)
    if first_byte_ms is not None:
        row.add_until("decode", fields.get("total_ms"))
    return row.spans


def open_span(
    fields: Mapping[str, Any], known: Sequence[Span], phase: str
) -> list[str | float] | None:
    """Return `[name, begin]` of the step that an unfinished handoff is in, None when it has none.

    Args:
        fields: of its record so far.
        known: its spans so far.
        phase: a word of `onebitd(8)`.
    """
    end_ms = known[-1].end_ms if known else 0.0
    if phase == "decode":
        first_byte_ms = fields.get("first_byte_ms")
        name = "prompt" if first_byte_ms is None else "decode"
        return [name, round(end_ms if first_byte_ms is None else float(first_byte_ms), 3)]
    if phase not in _OF_PHASE:
        return None
    name = _OF_PHASE[phase]
    begin_ms = end_ms
    if name == "provider":
        begin_ms = max(end_ms, _ms(fields, "provider_at_ms"))
        if "provider_wall_ms" in fields:
            name = "check"  # the phase goes on until the state file was looked at
    return [name, round(begin_ms, 3)]


def _before_provider(row: _Row, fields: Mapping[str, Any], waited_ms: float) -> float:
    """Place what comes before the provider's run; return how much of the queueing that was."""
    began_ms = fields.get("provider_at_ms")
    lock_ms, share_ms = _ms(fields, "lock_ms"), _ms(fields, "share_ms")
    if began_ms is None:
        row.add("queue", waited_ms)
        row.add("handover", share_ms)
        row.add("lock", lock_ms)
        return waited_ms
    before = row.end_ms
    row.add_until("queue", began_ms - lock_ms - share_ms, waited_ms)
    queued_ms = row.end_ms - before
    row.add("handover", min(share_ms, max(began_ms - lock_ms - row.end_ms, 0.0)))
    # Waiting for another run of our own comes before the lock, and is waiting for the device too.
    row.add_until("lock", began_ms)
    return queued_ms


def _ms(fields: Mapping[str, Any], name: str) -> float:
    found = fields.get(name)
    return 0.0 if found is None else float(found)
