"""What `onebitctl try` says about a reply's handoff: pure functions to lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from onebitd.core.first_byte import parts_of
from onebitd.core.handoff import Outcome, decode_speed, prefill_speed
from onebitd.surfaces import cli_bar
from onebitd.surfaces.cli_text import clean, milliseconds, wrap

BLOCKS: Final = "▏█"
"""What a bar of blocks is made of."""

_MOST_COLUMNS: Final = 100
_LEAST_COLUMNS: Final = 20
_HANDED: Final = {
    "file": "handed over by state file",
    "shared": "handed over by the shared route",
}


def parts_page(record: Mapping[str, Any], columns: int, *, colour: bool, blocks: bool) -> str:
    """Return a bar of the parts of the first byte, their times, and one sentence.

    Args:
        record: of the reply's handoff; it may be of another version.
        columns: of the terminal.
        colour, blocks: see `cli_bar.bar`.
    """
    width = max(_LEAST_COLUMNS, min(columns, _MOST_COLUMNS))
    parts = parts_of(record)
    lines = []
    if parts:
        lines.append(cli_bar.bar(parts, width, colour=colour, blocks=blocks))
        if colour and blocks:
            lines.append(cli_bar.legend(colour=colour, blocks=blocks))
        shown = [f"{name} {milliseconds(ms)}" for name, ms in parts.items() if ms >= 0.01]
        lines += wrap(", ".join(shown), "", "", width)
    lines += wrap(clean(sentence(record)), "", "", width)
    return "\n".join(lines)


def sentence(record: Mapping[str, Any]) -> str:
    """Return what became of the handoff, how fast, and what the reply took."""
    words = [_became(record), *_reply_words(record)]
    first = _number(record, "first_byte_ms")
    if first is not None:
        words.insert(1, f"first byte after {milliseconds(first)}")
    text = ", ".join(filter(None, words))
    return f"{text[:1].upper()}{text[1:]}."


def _became(record: Mapping[str, Any]) -> str:
    outcome = record.get("outcome")
    tokens = record.get("prompt_tokens", "?")
    if outcome == Outcome.USED:
        how = _HANDED.get(str(record.get("route")), "handed over")
        return f"{tokens} prompt tokens {how}, prefilled {_run_words(record)}"
    if outcome == Outcome.WASTED:
        again = record.get("evaluated_tokens", "?")
        return f"the handoff was wasted: the decoder evaluated {again} tokens again"
    verbs = {
        Outcome.FALLBACK: "fell back to the decoder",
        Outcome.SKIPPED: "not handed off",
        Outcome.FAILED: "failed",
        Outcome.CANCELLED: "cancelled",
    }
    verb = next((text for name, text in verbs.items() if name == outcome), "unfinished")
    return f"{verb}{_why(record)}{_own_words(record)}"


def _why(record: Mapping[str, Any]) -> str:
    reason, detail = record.get("reason"), record.get("detail")
    if reason is None:
        return ""
    return f" because {reason}: {detail}" if detail else f" because {reason}"


def _own_words(record: Mapping[str, Any]) -> str:
    """Return what the decoder evaluated by itself, and what the slot had already."""
    evaluated, cached = _number(record, "evaluated_tokens"), _number(record, "cached_tokens")
    if evaluated is None:
        return ""
    rate = _shown(prefill_speed(evaluated, parts_of(record).get("decoder")))
    has = f" ({cached:.0f} were there)" if cached else ""
    what = "prompt token" if evaluated == 1 else "prompt tokens"
    return f"; the decoder evaluated {evaluated:.0f} {what}{has}{rate and ' at ' + rate}"


def _run_words(record: Mapping[str, Any]) -> str:
    ms, handed = _number(record, "prefill_ms"), _number(record, "handed_tokens")
    rate = _shown(prefill_speed(handed, ms))
    return f"in {milliseconds(ms)}" + (f" at {rate}" if rate else "")


def _reply_words(record: Mapping[str, Any]) -> list[str]:
    count = _number(record, "reply_tokens")
    if count is None:
        return []
    rate = _shown(decode_speed(count, _number(record, "decode_ms")))
    words = f"{count:.0f} {'token' if count == 1 else 'tokens'} generated"
    return [f"{words} at {rate}" if rate else words]


def _shown(rate: float | None) -> str:
    if rate is None:
        return ""
    return f"{rate:.0f} tokens/s" if rate >= 100 else f"{rate:.1f} tokens/s"


def _number(record: Mapping[str, Any], name: str) -> float | None:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < 1e15 else None
