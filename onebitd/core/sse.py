"""Sans-I/O watching of a reply that passes by: its first data, its timings, its last event.

The bytes themselves are relayed untouched by the caller; nothing here holds them back.
"""

from __future__ import annotations

import json
from typing import Any, Final, Protocol

_KEEP_JSON_BYTES: Final = 512 * 1024
"""A JSON reply longer than this (log probabilities of every token) is read from its tail: parsing
it would keep everybody else waiting."""
_TAIL_BYTES: Final = 64 * 1024
_MAX_EVENT_BYTES: Final = 4 * 1024 * 1024
"""An event longer than this is passed on but no longer looked at."""

_KEEP_EVENTS_BYTES: Final = 2 * 1024 * 1024
"""The text of a stream longer than this is not put together: some ten thousand tokens."""
_MOST_TOKENS: Final = 1 << 31
_MOST_MS: Final = 1e9
"""Eleven days: what is beyond is no measurement."""
_NOT_REPEATED: Final = ("reasoning_content", "tool_calls", "function_call")


class ReplyWatch(Protocol):
    """Looks at a reply's body as it goes by."""

    started: bool
    """True once a byte came that says the decoder has something to say (not a comment)."""

    events: int
    """How many `data:` lines came; of a JSON reply 1 once it has begun. About its tokens so far."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes, split anywhere."""

    def timings(self) -> dict[str, Any] | None:
        """Return the decoder's `timings` object, or None when the reply had none (yet)."""

    @property
    def is_whole(self) -> bool:
        """True once a stream has said that nothing follows; its end may still be to come."""

    @property
    def error_status(self) -> int | None:
        """The code of the error that a stream ended with, as far as it was kept; else None."""

    def text(self) -> str | None:
        """Return what the next turn of a conversation repeats of this reply, or None.

        None for what is more or other than one plain text: several choices, tool calls, reasoning
        (templates leave it out of later turns), errors, and what was too long to be kept.
        """

    @property
    def text_bytes(self) -> int:
        """How much `text` has to read: a megabyte takes tens of milliseconds."""


class EventWatch:
    """Watches text/event-stream: `data:` lines split by blank lines (WHATWG HTML, section 9.2).

    llama-server puts `timings` into the last JSON event, and with `timings_per_token` into each.
    """

    def __init__(self) -> None:
        self.started = False
        self.events = 0
        self._held = bytearray()  # the start of a line whose end has not come
        self._overlong = False
        self._last_with_timings: bytes | None = None
        self._latest = b""
        # Kept as they are: reading each as it passes would cost more than all else that is done.
        self._lines: list[bytes] | None = []
        self.text_bytes = 0

    def feed(self, data: bytes) -> None:
        """See ReplyWatch. What ends with a line, as nearly all that comes does, is never copied."""
        if self._held or self._overlong or not data.endswith(b"\n"):
            data = self._whole_lines(data)
        found = data.startswith(b"data:") + data.count(b"\ndata:")
        if not found:
            return
        self.started = True
        self.events += found
        self._latest = data
        if b'"timings"' in data:
            for line in data.split(b"\n"):
                if line.startswith(b"data:") and b'"timings"' in line:
                    self._last_with_timings = line[5:]
        if self._lines is not None:
            self._lines.append(data)
            self.text_bytes += len(data)
            if self.text_bytes > _KEEP_EVENTS_BYTES:
                self._lines = None

    def _whole_lines(self, data: bytes) -> bytes:
        """Return the lines that are complete now, and keep the rest."""
        if self._overlong:
            _, newline, data = data.partition(b"\n")
            self._overlong = not newline
        end = data.rfind(b"\n") + 1
        whole = b""
        if end:
            whole = bytes(self._held + data[:end])
            self._held.clear()
        self._held += data[end:]
        if len(self._held) > _MAX_EVENT_BYTES:
            self._lines = None
            self._held.clear()
            self._overlong = True
        return whole

    def timings(self) -> dict[str, Any] | None:
        """See ReplyWatch."""
        if self._last_with_timings is None:
            return None
        return _timings_of(self._last_with_timings)

    def text(self) -> str | None:
        """See ReplyWatch."""
        if self._lines is None:
            return None
        pieces: list[str] = []
        for line in b"".join(self._lines).split(b"\n"):
            if not line.startswith(b"data:"):
                continue
            event = line[5:]
            piece = "" if event.strip() == b"[DONE]" else _text_of(_parsed(event))
            if piece is None:
                return None
            pieces.append(piece)
        return "".join(pieces)

    @property
    def is_whole(self) -> bool:
        """See ReplyWatch."""
        return b"\ndata: [DONE]" in b"\n" + self._latest

    @property
    def error_status(self) -> int | None:
        """See ReplyWatch."""
        for line in b"".join((self._lines or [])[-2:]).split(b"\n"):
            if line.startswith(b"data:") and b'"error"' in line:
                error = (_parsed(line[5:]) or {}).get("error")
                code = error.get("code") if isinstance(error, dict) else None
                return code if type(code) is int else None
        return None


class JsonWatch:
    """Watches a JSON reply: kept whole up to a bound, else only its tail."""

    def __init__(self) -> None:
        self.started = False
        self.events = 0
        self._kept = bytearray()
        self._whole = True

    def feed(self, data: bytes) -> None:
        """See ReplyWatch."""
        if not data:
            return
        self.started = True
        self.events = 1
        self._kept += data
        if len(self._kept) > _KEEP_JSON_BYTES:
            self._whole = False
        if not self._whole and len(self._kept) > 2 * _TAIL_BYTES:
            del self._kept[:-_TAIL_BYTES]

    def timings(self) -> dict[str, Any] | None:
        """See ReplyWatch."""
        if self._whole and len(self._kept) <= _TAIL_BYTES:
            return _timings_of(bytes(self._kept))
        at = self._kept.rfind(b'"timings":')
        if at < 0:
            return None
        try:
            text = self._kept[at + len(b'"timings":') :][:_TAIL_BYTES]
            found, _ = json.JSONDecoder().raw_decode(text.decode("utf-8", "replace").lstrip())
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def text(self) -> str | None:
        """See ReplyWatch."""
        return _text_of(_parsed(bytes(self._kept))) if self._whole else None

    @property
    def is_whole(self) -> bool:
        """See ReplyWatch: no stream, and whoever waits for its end gets it."""
        return False

    @property
    def error_status(self) -> int | None:
        """See ReplyWatch."""
        return None

    @property
    def text_bytes(self) -> int:
        """See ReplyWatch."""
        return len(self._kept) if self._whole else 0


def watch_for(content_type: bytes) -> ReplyWatch:
    """Choose the watch for a reply by its Content-Type."""
    return EventWatch() if content_type.startswith(b"text/event-stream") else JsonWatch()


def _parsed(document: bytes) -> dict[str, Any] | None:
    try:
        parsed = json.loads(document)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def _timings_of(document: bytes) -> dict[str, Any] | None:
    found = (_parsed(document) or {}).get("timings")
    return found if isinstance(found, dict) else None


def _text_of(document: dict[str, Any] | None) -> str | None:
    """Return the text of a chat or completion object, whole or a chunk."""
    choices = None if document is None else document.get("choices")
    if not isinstance(choices, list) or len(choices) > 1:
        return None
    return _piece_of(choices[0]) if choices else ""  # none in the chunk that has the usage


def _piece_of(choice: object) -> str | None:
    if not isinstance(choice, dict):
        return None
    if isinstance(choice.get("text"), str):
        return str(choice["text"])
    message = choice.get("delta", choice.get("message"))
    if not isinstance(message, dict) or any(message.get(name) for name in _NOT_REPEATED):
        return None
    content = message.get("content")
    return "" if content is None else content if isinstance(content, str) else None


def reply_counts(timings: dict[str, Any] | None) -> tuple[int | None, float | None]:
    """Return how many tokens were generated and the milliseconds that took, None if not said."""
    return _count_in(timings, "predicted_n"), _ms_in(timings, "predicted_ms")


def predicted(timings: dict[str, Any] | None) -> tuple[int, float] | None:
    """Return both of `reply_counts`, None unless both were said."""
    count, ms = reply_counts(timings)
    return None if count is None or ms is None else (count, ms)


def prompt_ms(timings: dict[str, Any] | None) -> float | None:
    """Return the milliseconds that the decoder evaluated the prompt for, None if not said."""
    return _ms_in(timings, "prompt_ms")


def token_counts(timings: dict[str, Any] | None) -> tuple[int | None, int | None]:
    """Return (cached, evaluated) prompt tokens as the decoder counted them, None if it did not."""
    return _count_in(timings, "cache_n"), _count_in(timings, "prompt_n")


def _count_in(timings: dict[str, Any] | None, name: str) -> int | None:
    """Return a number of tokens; whatever else a decoder may have put there is none."""
    found = None if timings is None else timings.get(name)
    if isinstance(found, bool) or not isinstance(found, int):
        return None
    return found if 0 <= found <= _MOST_TOKENS else None


def _ms_in(timings: dict[str, Any] | None, name: str) -> float | None:
    found = None if timings is None else timings.get(name)
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    return float(found) if 0 <= found <= _MOST_MS else None


def error_event(message: str, status: int, kind: str) -> bytes:
    """Return an error as llama-server sends it inside a stream that has begun."""
    body = {"error": {"message": message, "type": kind, "code": status}}
    return b"data: " + json.dumps(body).encode() + b"\n\n"
