"""What the last handoffs were like, and what the policy makes of it: the glance of a status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from onebitd.surfaces.cli_text import Line, cut, duration, milliseconds, part_of

_ROWS: Final = (
    ("used", "used"),
    ("failed", "in vain"),
    ("skipped", "skipped"),
)
_HEADINGS: Final = ("COUNT", "PROMPT", "FIRST BYTE", "OTHER WAY", "SAVED")
_COLUMNS: Final = (5, 6, 10, 9, 9)
_LABEL_COLUMNS: Final = 8

_MISSING: Final = {
    "decoder": "the decoder's rate",
    "provider": "the provider's rate",
    "restore": "the cost of a restore",
}
_ROUTES: Final = {"file": "by state file", "shared": "by the shared route"}


def recent_lines(recent: Mapping[str, Any], columns: int) -> list[Line]:
    """Return the table of typical figures, a row for each way that was taken; none without any.

    The other way is the one not taken for the same prompts, as it was expected to be.
    """
    count = recent.get("count")
    rows = [(label, part_of(recent, name)) for name, label in _ROWS]
    if not count or not any(row.get("count") for _, row in rows):
        return []
    head = _table_line(f"last {count}", _HEADINGS)
    lines = [Line(cut(head, columns), ((0, min(len(head), columns), "dim"),))]
    for label, row in rows:
        if not row.get("count"):
            continue
        cells = (
            str(row["count"]),
            str(row.get("prompt_tokens") or "-"),
            milliseconds(row.get("first_byte_ms")),
            _about(row.get("other_ms")),
            _signed(row.get("saved_ms")),
        )
        paints = ((0, len(label), "yellow"),) if label == "in vain" else ()
        lines.append(Line(cut(_table_line(label, cells), columns), paints))
    saved = part_of(recent, "used").get("saved_sum_ms")
    if isinstance(saved, (int, float)):
        lines.append(Line(cut(_sum_words(saved, part_of(recent, "used")), columns)))
    return [*lines, Line("")]


def policy_words(policy: Mapping[str, Any]) -> list[str]:
    """Return what becomes of the prompts to come, and why; none where there is no provider."""
    if not policy:
        return []
    name = policy.get("policy", "?")
    why = _why(policy)
    if name == "auto":
        return [f"auto: {why}"]
    what = {"always": "every prompt is handed over", "never": "no prompt is handed over"}
    learned = why if _missing(policy) else f"as learned: {why}"
    return [f"{name}: {what.get(str(name), '?')}", learned]


def _why(policy: Mapping[str, Any]) -> str:
    missing = _missing(policy)
    if missing:
        return f"learning; not known yet: {missing}"
    route = _ROUTES.get(str(policy.get("route")), "")
    best = f"{policy['best_factor']:.1f} times as fast at {policy.get('best_tokens')} tokens"
    wins = _stretches(policy.get("wins") or (), policy.get("last"))
    if not wins:
        slower = f"the decoder is faster at every length; a handoff {route} is at best {best}"
        return f"{slower} (`onebitctl advise` says why)"
    return f"a handoff {route} pays {wins}, {best}"


def _missing(policy: Mapping[str, Any]) -> str:
    """Return what is to be learned before a handoff can be weighed, "" when nothing is."""
    missing = [_MISSING.get(str(word), str(word)) for word in policy.get("missing") or ()]
    if not missing and policy.get("best_factor") is None:
        return "what this route costs"
    return ", ".join(missing)


def _stretches(wins: Sequence[Any], last: object) -> str:
    """Return e.g. `from 180 tokens on`, `up to 900 tokens`."""
    found = []
    for stretch in wins:
        first, end = stretch
        if end == last:
            found.append(f"from {first} tokens on" if first > 2 else "at every length")
        else:
            found.append(f"from {first} to {end} tokens")
    return " and ".join(found)


def _sum_words(saved_ms: float, used: Mapping[str, Any]) -> str:
    total = duration(abs(saved_ms) / 1000.0)
    many = used.get("count")
    handoffs = "the handoff" if many == 1 else f"the {many} handoffs"
    if saved_ms < 0:
        return f"          {handoffs} took about {total} longer than the decoder would have"
    return f"          {handoffs} saved about {total} of waiting"


def _table_line(label: str, cells: Sequence[str]) -> str:
    shown = (f"{cell:>{wide}}" for cell, wide in zip(cells, _COLUMNS, strict=True))
    return "  ".join([f"{label:<{_LABEL_COLUMNS}}", *shown])


def _about(value: object) -> str:
    if not isinstance(value, (int, float)):
        return "-"
    return f"~{value:.0f} ms" if 10 <= value < 1000 else f"~{milliseconds(value)}"


def _signed(value: object) -> str:
    if not isinstance(value, (int, float)):
        return "-"
    return _about(abs(value)).replace("~", "-" if value < 0 else "")
