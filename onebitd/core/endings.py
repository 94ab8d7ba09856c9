"""Which outcome, reason and route can come together in the record of a request that has ended.

What a counter by all three needs to know before anything has happened: most combinations cannot be.
The reasons are given where they come up, and each has a place here: what a handoff fails with, why
none is tried, and what ends a request whatever it was at. `None` stands for no reason or no route.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from onebitd.core.handoff import Outcome, Reason, Route


class Ending(NamedTuple):
    """How a request on the handoff route can end."""

    outcome: Outcome
    reason: Reason | None
    route: Route | None


_NONE: Final = (None,)
_FILE: Final = (Route.FILE,)
_SHARED: Final = (Route.SHARED,)
_EITHER: Final = (Route.FILE, Route.SHARED)
_ANY: Final = (None, *_EITHER)

Routes = tuple[Route | None, ...]

FAILURES: Final[Mapping[Reason, Routes]] = {
    Reason.LOCK_BUSY: _EITHER,
    Reason.LOCK_UNUSABLE: _EITHER,
    Reason.PROVIDER_EXIT: _EITHER,
    Reason.PROVIDER_TIMEOUT: _EITHER,
    Reason.NO_SPACE: _EITHER,
    Reason.BAD_STATE: _EITHER,
    Reason.PROVIDER_NO_FILE: _FILE,
    Reason.RESTORE_REFUSED: _FILE,
    Reason.RESTORE_SHORT: _FILE,
    # Else the file is the way out; these end one that may take the shared route only.
    Reason.SHARE_REFUSED: _SHARED,
    Reason.SHARE_HANDSHAKE: _SHARED,
    Reason.ADOPT_REFUSED: _SHARED,
    Reason.BACKEND_DOWN: _ANY,  # none: while it read the prompt
}
"""What a handoff fails with. The decoder prefills instead, or the client gets the error."""

SKIPS: Final = (
    Reason.NO_PROVIDER,
    Reason.NOT_TEXT,
    Reason.TOO_SHORT,
    Reason.TOO_LONG,
    Reason.POLICY,
    Reason.ALREADY_CACHED,
    Reason.OVERTAKEN,
    Reason.NOT_REUSED,
    Reason.BREAKER_OPEN,
    Reason.UNSUPPORTED_MODEL,
    Reason.BACKEND_REFUSED,
)
"""Why no handoff was tried, or was given up for the decoder's own prefill."""

DECODERS_ANSWER: Final = frozenset({Reason.TOO_LONG, Reason.BACKEND_REFUSED})
"""Skips that are no error of a strict request's: it gets the decoder's own words."""

_ERRORS: Final[Mapping[Reason, Routes]] = {
    Reason.QUEUE_FULL: _NONE,
    Reason.DRAINING: _ANY,
    Reason.INTERNAL: _ANY,
    Reason.BACKEND_REFUSED: _EITHER,  # what was handed over
}
"""What else a client gets as an error."""

_BREAKS: Final = (Reason.CLIENT_GONE, Reason.OPERATOR, Reason.DRAINING)


def possible_endings() -> Iterator[Ending]:
    """Yield each once."""
    for outcome in (Outcome.USED, Outcome.WASTED):
        yield from (Ending(outcome, None, route) for route in _EITHER)
    strict = {reason: _NONE for reason in SKIPS if reason not in DECODERS_ANSWER}
    by_outcome: Mapping[Outcome, Mapping[Reason, Routes]] = {
        Outcome.FALLBACK: FAILURES,
        Outcome.SKIPPED: dict.fromkeys(SKIPS, _NONE),
        Outcome.FAILED: {**FAILURES, **strict, **_ERRORS},
        Outcome.CANCELLED: dict.fromkeys(_BREAKS, _ANY),
    }
    for outcome, reasons in by_outcome.items():
        for reason, routes in reasons.items():
            for route in routes:
                yield Ending(outcome, reason, route)
