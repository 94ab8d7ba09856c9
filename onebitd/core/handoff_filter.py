"""Which handoffs somebody wants to see; the same for the daemon's memory, its file and the client.

Pure, and light enough for `onebitctl`.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Mapping
from typing import Any, Final

from onebitd.core.handoff import Outcome, Reason, Route

MAX_LIMIT: Final = 1_000_000
"""The most records that one answer has."""
WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "outcome": tuple(Outcome),
    "reason": tuple(Reason),
    "route": tuple(Route),
}
"""Fields of a record that are compared with a word, and the words that they may be."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HandoffFilter:
    """What is wanted of the handoffs; None: everything.

    Attributes:
        limit: the newest so many of those that match; None is up to whoever is asked.
        outcome, reason, route: words of `core.handoff`.
        since: only those that began at this moment or later; it has a time zone.
    """

    limit: int | None = None
    outcome: str | None = None
    reason: str | None = None
    route: str | None = None
    since: dt.datetime | None = None

    def matches(self, fields: Mapping[str, Any]) -> bool:
        """Tell whether a record is wanted; the limit is not looked at.

        Args:
            fields: of `HandoffRecord.fields`.
        """
        for name in WORDS:
            wanted = getattr(self, name)
            if wanted is not None and fields.get(name) != wanted:
                return False
        return self.since is None or parse_time(fields["time"]) >= self.since

    def parameters(self) -> dict[str, str]:
        """Return what is wanted as parameters of `/v1/handoffs`.

        >>> HandoffFilter(limit=5, outcome="used").parameters()
        {'limit': '5', 'outcome': 'used'}
        """
        found = {name: getattr(self, name) for name in ("limit", *WORDS)}
        if self.since is not None:
            found["since"] = self.since.isoformat()
        return {name: str(value) for name, value in found.items() if value is not None}


def parse_time(text: str) -> dt.datetime:
    """Read an RFC 3339 time.

    Raises:
        ValueError: it is none, or it has no time zone.
    """
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ValueError(f"{text!r} is no RFC 3339 time such as 2026-01-31T12:00:00Z")
    return moment
