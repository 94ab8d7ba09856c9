"""What the last handoffs were like: the glance of `onebitctl status`.

Pure. Times are milliseconds. A median is one of the measured values, never one between two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from onebitd.core.handoff import HandoffRecord, Outcome

LOOKED_AT: Final = 50
"""So many records the daemon keeps for this."""

_FAILED: Final = (Outcome.FALLBACK, Outcome.WASTED, Outcome.FAILED)


@dataclasses.dataclass(frozen=True, slots=True)
class Typical:
    """Medians over some records; None where none of them has the figure.

    Args:
        count: of the records.
        prompt_tokens: of the prompt.
        first_byte_ms: from the request to the first byte of the reply; of a reply in one piece
            without the time that its generation took.
        other_ms: what the way that was not taken was expected to need for the same prompt: the
            decoder alone, or for skipped ones the provider.
        saved_ms: of each prompt, the other way's time less its own; below 0 when it lost.
        saved_sum_ms: of all of them together.
    """

    count: int = 0
    prompt_tokens: int | None = None
    first_byte_ms: float | None = None
    other_ms: float | None = None
    saved_ms: float | None = None
    saved_sum_ms: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RecentHandoffs:
    """The last requests on the handoff route, `count` of them, by how they ended.

    Cancelled ones count, and have no row: they say nothing about either way.
    """

    count: int = 0
    used: Typical = dataclasses.field(default_factory=Typical)
    failed: Typical = dataclasses.field(default_factory=Typical)
    """Tried in vain: fallback, wasted and failed."""
    skipped: Typical = dataclasses.field(default_factory=Typical)


def look_at(
    records: Iterable[HandoffRecord], decoder_ms: Callable[[int], float | None]
) -> RecentHandoffs:
    """Return typical figures of finished records.

    Args:
        records: in any order.
        decoder_ms: what the decoder is expected to take for a whole prompt of so many tokens, None
            when that is not known; for records in which nobody weighed it.
    """
    found = list(records)

    def typical(*outcomes: Outcome) -> Typical:
        return _typical([one for one in found if one.outcome in outcomes], decoder_ms)

    return RecentHandoffs(
        len(found), typical(Outcome.USED), typical(*_FAILED), typical(Outcome.SKIPPED)
    )


def _typical(
    records: Sequence[HandoffRecord], decoder_ms: Callable[[int], float | None]
) -> Typical:
    pairs = [(_first_byte_ms(one), _other_ms(one, decoder_ms)) for one in records]
    saved = [other - own for own, other in pairs if own is not None and other is not None]
    tokens = _median([one.prompt_tokens for one in records])
    return Typical(
        len(records),
        None if tokens is None else int(tokens),
        _median([own for own, _ in pairs]),
        _median([other for _, other in pairs]),
        _median(saved),
        round(sum(saved), 3) if saved else None,
    )


def _first_byte_ms(record: HandoffRecord) -> float | None:
    if record.stream or record.first_byte_ms is None:
        return record.first_byte_ms
    return None if record.decode_ms is None else max(record.first_byte_ms - record.decode_ms, 0.0)


def _other_ms(record: HandoffRecord, decoder_ms: Callable[[int], float | None]) -> float | None:
    """Return the first byte, from the request on, by the way that was not taken."""
    front_ms = (record.template_ms or 0.0) + (record.tokenize_ms or 0.0)
    if record.outcome is Outcome.SKIPPED:
        weighed = record.provider_estimate_ms
    else:
        weighed = record.decoder_estimate_ms
        if weighed is None and record.prompt_tokens is not None:
            alone = decoder_ms(record.prompt_tokens)
            weighed = None if alone is None else alone + (record.queue_ms or 0.0)
    return None if weighed is None else front_ms + weighed


def _median(values: Sequence[float | None]) -> float | None:
    known = sorted(value for value in values if value is not None)
    return round(known[(len(known) - 1) // 2], 3) if known else None
