"""What `onebitctl config`, `reload` and `lock` print: pure functions to lines of text.

They take plain mappings and read them with care: the daemon may be of another version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from onebitd.surfaces.cli_text import clean, part_of, wrap
from onebitd.surfaces.cli_width import columns_of

_HANGING: Final = " " * 4


def config_page(config: Mapping[str, Any], columns: int | None = None) -> str:
    """Return key, source and value of each setting; the value is last, as it may be long.

    Args:
        config: of the daemon.
        columns: that a line may have; a value that does not fit has lines of its own. None: as it
            is, a setting a line.
    """
    rows = []
    for key, entry in config.items():
        found = entry if isinstance(entry, Mapping) else {"value": entry}
        rows.append((clean(key), _value(found.get("value")), clean(str(found.get("source", "?")))))
    wide = max((len(key) for key, _, _ in rows), default=0)
    wide_source = max((len(source) for _, _, source in rows), default=0)
    lines = []
    for key, value, source in rows:
        line = f"{key:<{wide}}  {source:<{wide_source}}  {value}"
        if columns is None or columns_of(line) <= columns:
            lines.append(line)
        else:
            lines.append(f"{key:<{wide}}  {source}")
            lines += wrap(value, _HANGING, _HANGING, columns)
    return "\n".join(lines)


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
