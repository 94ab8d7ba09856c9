"""Where the time to a first byte went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

PARTS: Final = ("queue", "tokens", "lock", "provider", "restore", "decoder")
"""The parts of a first byte in the order in which they happen; their first letters differ."""


def parts_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return how many milliseconds of a record's first byte each part took.

    `queue` is every wait for the slot and for the provider, `tokens` the template and the
    tokenizer, `lock` the wait for the device, `provider` its run, `restore` what brought its result
    into the decoder: the rest of the check, the restore, or sharing and adopting. `decoder` is what
    remains: the last token, or the whole prompt where the decoder prefilled; and the tokens of a
    reply that came in one piece.

    Args:
        record: fields of `HandoffRecord`; what is absent or no number took no time.

    Returns:
        All of `PARTS`, with `first_byte_ms` as their sum; nothing when there was no first byte. In
        a race the provider's run and the waiting overlap: then each part has its share.
    """
    first_byte_ms = _ms(record, "first_byte_ms")
    if not first_byte_ms:
        return {}
    found = {
        "queue": _ms(record, "queue_ms"),
        "tokens": _ms(record, "template_ms") + _ms(record, "tokenize_ms"),
        "lock": _ms(record, "lock_ms"),
        "provider": _ms(record, "provider_wall_ms") or _ms(record, "prefill_ms"),
        "restore": _checked_ms(record)
        + sum(_ms(record, name) for name in ("share_ms", "restore_ms", "adopt_ms")),
    }
    spent = sum(found.values())
    if spent > first_byte_ms:
        found = {name: ms * (first_byte_ms / spent) for name, ms in found.items()}
        spent = first_byte_ms
    return {**found, "decoder": first_byte_ms - spent}


def _checked_ms(record: Mapping[str, Any]) -> float:
    """Return how long the check went on after the provider had ended; it begins during the run."""
    if "handed_at_ms" not in record or "provider_at_ms" not in record:
        return 0.0
    ended_ms = _ms(record, "provider_at_ms") + _ms(record, "provider_wall_ms")
    return min(_ms(record, "check_ms"), max(_ms(record, "handed_at_ms") - ended_ms, 0.0))


def _ms(record: Mapping[str, Any], name: str) -> float:
    value = record.get(name)
    if type(value) is not float and type(value) is not int:  # a bool is no number
        return 0.0
    return float(value) if 0 <= value < 1e12 else 0.0
