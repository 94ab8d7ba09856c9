"""Sans-I/O watching of a reply that passes by: its first data, its timings, its last event.

The bytes themselves are relayed untouched by the caller; nothing here holds them back.
"""

from __future__ import annotations

import json
from typing import Any, Final, Protocol

_KEEP_JSON_BYTES: Final = 4 * 1024 * 1024
"""A JSON reply longer than this (log probabilities of every token) is read from its tail."""
_TAIL_BYTES: Final = 64 * 1024
_MAX_EVENT_BYTES: Final = 4 * 1024 * 1024
"""An event longer than this is passed on but no longer looked at."""


class ReplyWatch(Protocol):
    """Looks at a reply's body as it goes by."""

    started: bool
    """True once a byte came that says the decoder has something to say (not a comment)."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes, split anywhere."""

    def timings(self) -> dict[str, Any] | None:
        """Return the decoder's `timings` object, or None when the reply had none (yet)."""


class EventWatch:
    """Watches text/event-stream: `data:` lines split by blank lines (WHATWG HTML, section 9.2).

    llama-server puts `timings` into the last JSON event, and with `timings_per_token` into each.
    """

    def __init__(self) -> None:
        self.started = False
        self._held = bytearray()
        self._overlong = False
        self._last_with_timings: bytes | None = None

    def feed(self, data: bytes) -> None:
        """See ReplyWatch."""
        self._held += data
        while (end := self._held.find(b"\n")) >= 0:
            line = bytes(self._held[:end])
            del self._held[: end + 1]
            if self._overlong:
                self._overlong = False
            else:
                self._take_line(line)
        if len(self._held) > _MAX_EVENT_BYTES:
            self._held.clear()
            self._overlong = True

    def _take_line(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            self.started = True
            if b'"timings"' in line:
                self._last_with_timings = line[5:]

    def timings(self) -> dict[str, Any] | None:
        """See ReplyWatch."""
        if self._last_with_timings is None:
            return None
        return _timings_of(self._last_with_timings)


class JsonWatch:
    """Watches a JSON reply: kept whole up to a bound, else only its tail."""

    def __init__(self) -> None:
        self.started = False
        self._kept = bytearray()
        self._whole = True

    def feed(self, data: bytes) -> None:
        """See ReplyWatch."""
        if not data:
            return
        self.started = True
        self._kept += data
        if len(self._kept) > _KEEP_JSON_BYTES:
            self._whole = False
        if not self._whole and len(self._kept) > 2 * _TAIL_BYTES:
            del self._kept[:-_TAIL_BYTES]

    def timings(self) -> dict[str, Any] | None:
        """See ReplyWatch."""
        if self._whole:
            return _timings_of(bytes(self._kept))
        at = self._kept.rfind(b'"timings":')
        if at < 0:
            return None
        try:
            text = self._kept[at + len(b'"timings":') :].decode("utf-8", "replace").lstrip()
            found, _ = json.JSONDecoder().raw_decode(text)
        except ValueError:
            return None
        return found if isinstance(found, dict) else None


def watch_for(content_type: bytes) -> ReplyWatch:
    """Choose the watch for a reply by its Content-Type."""
    return EventWatch() if content_type.startswith(b"text/event-stream") else JsonWatch()


def _timings_of(document: bytes) -> dict[str, Any] | None:
    try:
        parsed = json.loads(document)
    except (ValueError, RecursionError):
        return None
    found = parsed.get("timings") if isinstance(parsed, dict) else None
    return found if isinstance(found, dict) else None


def token_counts(timings: dict[str, Any] | None) -> tuple[int | None, int | None]:
    """Return (cached, evaluated) prompt tokens as the decoder counted them, None if it did not."""
    if timings is None:
        return None, None
    cached, evaluated = timings.get("cache_n"), timings.get("prompt_n")
    return (
        cached if isinstance(cached, int) else None,
        evaluated if isinstance(evaluated, int) else None,
    )


def error_event(message: str, status: int, kind: str) -> bytes:
    """Return an error as llama-server sends it inside a stream that has begun."""
    body = {"error": {"message": message, "type": kind, "code": status}}
    return b"data: " + json.dumps(body).encode() + b"\n\n"
