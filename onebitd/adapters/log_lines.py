"""One log event as a line: a JSON object, or text for a person; and what takes events.

The forms are described in `logsetup`.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import MutableMapping
from typing import Any, Protocol

_COLOUR = {"debug": "2", "info": "32", "warning": "33", "error": "31", "critical": "1;31"}
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")

STALL_MS = 20
"""How long a sink may keep its caller waiting for a reader that is only slow."""

Event = MutableMapping[str, Any]
"""One log call's event word, under `event`, and its fields."""


class Sink(Protocol):
    """Takes one event; returns nothing and raises nothing."""

    def emit(self, level: str, event: Event) -> None:
        """Write the event, or drop it."""


class Render(Protocol):
    """Makes one line, without its newline, of an event."""

    def __call__(self, level: str, event: Event) -> str:
        """Return the line."""


def render_json(level: str, event: Event) -> str:
    """Return the event as a JSON object in one line."""
    found = {"time": _now(), "level": level, "event": event.get("event", "")}
    found.update(event)  # `time` may be the caller's own, `level` is ours
    found["level"] = level
    try:
        return json.dumps(found, ensure_ascii=False, default=_plain, allow_nan=False)
    except (TypeError, ValueError):
        # A NaN, a key that is no string, a circle: rare, so looked for only after the failure.
        return json.dumps(_tame(found), ensure_ascii=False, default=_plain)


def render_text(level: str, event: Event) -> str:
    """Return the event for a person, with a time stamp, without colour."""
    return f"{_now()} {level:<8} {human(event)}"


def render_coloured(level: str, event: Event) -> str:
    """Return the event for a person at a terminal."""
    clock = time.strftime("%H:%M:%S")
    return f"\x1b[2m{clock}\x1b[0m \x1b[{_COLOUR.get(level, '0')}m{level:<8}\x1b[0m {human(event)}"


def human(event: Event) -> str:
    """Return what a person reads: `line` if there is one, else the event and its fields.

    Control characters are shown as escapes: what a child printed cannot drive the terminal. A
    traceback keeps its lines.
    """
    if "line" in event:
        text = _visible(str(event["line"]))
    else:
        words = [str(event.get("event", ""))]
        words += [
            f"{key}={_short(value)}"
            for key, value in event.items()
            if key not in ("event", "exception")
        ]
        text = _visible(" ".join(words))
    if "exception" in event:
        text += "\n" + "\n".join(_visible(line) for line in str(event["exception"]).splitlines())
    return text


def as_text(value: object) -> str:
    """Return a field's value as one string, JSON where it is a list or a table."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (dict, list, tuple)):
        try:
            return json.dumps(value, ensure_ascii=False, default=_plain)
        except (TypeError, ValueError):
            return str(value)
    return str(value)


def _now() -> str:
    moment = time.time()
    whole = math.floor(moment)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))
    return f"{stamp}.{int((moment - whole) * 1000):03d}Z"


def _plain(value: object) -> object:
    """Return something JSON can hold."""
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return str(value)


def _tame(value: object, depth: int = 0) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if depth > 8:
        return "..."
    if isinstance(value, dict):
        return {str(key): _tame(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_tame(item, depth + 1) for item in value]
    return value


def _short(value: object) -> str:
    text = as_text(value)
    if text == "" or any(char in text for char in ' "='):
        return json.dumps(text, ensure_ascii=False)
    return text


def _visible(text: str) -> str:
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
