"""What `onebitctl handoffs`, `config` and `lock` print: pure functions to lines of text.

They take plain mappings and read them with care: the daemon may be of another version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from onebitd.surfaces.cli_text import clean, cut, local_time, milliseconds, paint, part_of

_OUTCOME_PAINTS: Final = {"used": "green", "skipped": "dim", "cancelled": "dim", "failed": "red"}
_COLUMNS: Final = (8, 9, 6, 6, 9, 9, 10)
_HEADINGS: Final = ("TIME", "OUTCOME", "PROMPT", "EVAL", "PREFILL", "RESTORE", "FIRST BYTE")
_LEFT_ALIGNED: Final = 2

WIDE_COLUMNS: Final = 100
"""From so many columns on, every reason and some of its detail fit behind the table's cells."""
_SECOND_LINE_INDENT: Final = " " * 10


def handoffs_header(width: int | None) -> str:
    """Return the heading of the handoffs table, cut to `width` columns unless that is None."""
    return cut(_cells(_HEADINGS) + "  REASON", width)


def handoff_row(record: Mapping[str, Any], width: int | None, *, colour: bool) -> str:
    """Return one handoff of the table, cut to `width` columns unless that is None.

    On a narrow terminal the reason gets a line of its own; the detail is cut, the reason never.
    """
    restore = record.get("restore_ms")
    if restore is None and record.get("adopt_ms") is not None:
        restore = record["adopt_ms"] + (record.get("share_ms") or 0.0)
    outcome = clean(str(record.get("outcome", "?")))
    cells = (
        local_time(record.get("time")),
        outcome,
        _count(record.get("prompt_tokens")),
        _count(record.get("evaluated_tokens")),
        milliseconds(record.get("prefill_ms")),
        milliseconds(restore),
        milliseconds(record.get("first_byte_ms")),
    )
    reason, detail = (clean(str(record.get(key) or "")) for key in ("reason", "detail"))
    words = ": ".join(filter(None, (reason, detail)))
    line = f"{_cells(cells)}  {words}".rstrip()
    if width is not None and len(line) > width:
        if words and width < WIDE_COLUMNS:
            second = cut(_SECOND_LINE_INDENT + words, max(width, _end_of(reason)))
            line = f"{cut(_cells(cells), width)}\n{second}"
        else:
            line = cut(line, width)
    painted = paint(outcome, _OUTCOME_PAINTS.get(outcome, "yellow"), colour)
    return line.replace(outcome, painted, 1)


def config_page(config: Mapping[str, Any]) -> str:
    """Return key, source and value of each setting; the value is last, as it may be long."""
    rows = []
    for key, entry in config.items():
        found = entry if isinstance(entry, Mapping) else {"value": entry}
        rows.append((clean(key), _value(found.get("value")), clean(str(found.get("source", "?")))))
    wide = max((len(key) for key, _, _ in rows), default=0)
    wide_source = max((len(source) for _, _, source in rows), default=0)
    return "\n".join(
        f"{key:<{wide}}  {source:<{wide_source}}  {value}" for key, value, source in rows
    )


def reload_line(answer: Mapping[str, Any]) -> str:
    """Return which settings a reload has changed."""
    changed = _texts(answer.get("changed"))
    if changed:
        return clean(f"reloaded: {', '.join(changed)}")
    return "nothing was taken over" if answer.get("needs_restart") else "nothing has changed"


def reload_remarks(answer: Mapping[str, Any]) -> list[str]:
    """Return what waits for a restart, and what will not work, a line each."""
    waiting = _texts(answer.get("needs_restart"))
    lines = [f"needs a restart: {', '.join(waiting)}"] if waiting else []
    return [*lines, *(f"warning: {text}" for text in _texts(answer.get("warnings")))]


def lock_page(lock: Mapping[str, Any]) -> str:
    """Return who holds the device lock."""
    holder = part_of(lock, "holder")
    if lock["held"] and not holder:
        state = "held by a process that cannot be seen from here"
    elif lock.get("declared_only"):
        state = f"claimed by pid {holder['pid']}, which wrote its name and took no lock"
    elif lock["held"]:
        state = f"held by pid {holder['pid']}"
    elif not lock.get("usable", True):
        state = "unusable"
    else:
        state = "free" if lock["exists"] else "free (no such file yet)"
    lines = [f"{lock['path']}: {state}"]
    for key, label in (("command", "command"), ("owner_line", "owner line")):
        if holder.get(key):
            lines.append(f"{label}: {holder[key]}")
    if lock["problem"]:
        lines.append(f"problem: {lock['problem']}")
    return "\n".join(map(clean, lines))


def _value(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return clean(" ".join(f"{name}={item}" for name, item in value.items())) or "-"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return clean(" ".join(map(str, value))) or "-"
    return clean(str(value))


def _texts(value: object) -> list[str]:
    return list(map(str, value)) if isinstance(value, list) else []


def _count(value: object) -> str:
    return "-" if value is None else clean(str(value))


def _end_of(reason: str) -> int:
    """Return the width that a second line needs for the reason and the sign of a cut."""
    return len(_SECOND_LINE_INDENT) + len(reason) + 2


def _cells(cells: Sequence[str]) -> str:
    return "  ".join(
        f"{cell:<{wide}}" if position < _LEFT_ALIGNED else f"{cell:>{wide}}"
        for position, (cell, wide) in enumerate(zip(cells, _COLUMNS, strict=True))
    )
