"""What a check has found: its state, a sentence, and the command that puts it right. Pure."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from onebitd.core.errors import OnebitError


class State(enum.StrEnum):
    """How a check ended; `SKIPPED` with the reason as its message."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


GROUPS: Final = {
    "config": "configuration",
    "model": "model",
    "decoder": "decoder",
    "provider": "provider",
    "lock": "device lock",
    "device": "devices",
    "port": "HTTP port",
    "state": "state",
    "service": "service",
    "daemon": "daemon",
}
"""The first word of each name, in the order of the page, and its heading."""

_WORST_FIRST: Final = (State.FAILED, State.WARNING, State.SKIPPED, State.OK)


class BadReport(OnebitError):
    """What the checks inside the service have printed is no report."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One check.

    Attributes:
        name: a group of GROUPS, alone or with a part of it behind a dot: `model.file`.
        message: one sentence, without secrets.
        fix: shell commands that put it right, a line each; None where there is nothing to do.
    """

    name: str
    state: State
    message: str
    fix: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict."""
        return {
            "name": self.name,
            "state": self.state.value,
            "message": self.message,
            "fix": self.fix,
        }


def ok(name: str, message: str) -> Finding:
    """Return that nothing is wrong."""
    return Finding(name, State.OK, message)


def warning(name: str, message: str, fix: str | None = None) -> Finding:
    """Return that something may cost handoffs, or is not as it should be."""
    return Finding(name, State.WARNING, message, fix)


def failed(name: str, message: str, fix: str | None = None) -> Finding:
    """Return that something cannot work."""
    return Finding(name, State.FAILED, message, fix)


def skipped(name: str, why: str) -> Finding:
    """Return that nothing was looked at, and why."""
    return Finding(name, State.SKIPPED, why)


def from_json(found: object) -> Finding:
    """Read what `to_json` made.

    Raises:
        BadReport: it is no finding.
    """
    if not isinstance(found, Mapping):
        raise BadReport(f"{found!r} is no check")
    fix = found.get("fix")
    try:
        return Finding(
            str(found["name"]),
            State(found["state"]),
            str(found["message"]),
            None if fix is None else str(fix),
        )
    except (KeyError, ValueError) as error:
        raise BadReport(f"{found!r} is no check") from error


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Return them group by group; within one as they came."""
    places = {group: place for place, group in enumerate(GROUPS)}
    return sorted(findings, key=lambda one: places.get(one.name.partition(".")[0], len(places)))


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Return them by their states, the failed ones first."""
    return sorted(findings, key=lambda one: _WORST_FIRST.index(one.state))


def exit_status(findings: Sequence[Finding]) -> int:
    """Return 1 if a check has failed, else 0."""
    return int(any(one.state is State.FAILED for one in findings))


def summary(findings: Sequence[Finding]) -> str:
    """Return one line: how many are wrong, and which, the worst first.

    >>> summary([ok("config", "fine"), warning("lock", "odd"), failed("port", "taken")])
    '1 of 3 checks failed: port; 1 warning: lock'
    >>> summary([ok("config", "fine"), skipped("lock", "off")])
    'all is well: 1 check, 1 skipped'
    """
    by_state = {
        state: [one.name for one in findings if one.state is state] for state in _WORST_FIRST
    }
    bad, odd, left = by_state[State.FAILED], by_state[State.WARNING], by_state[State.SKIPPED]
    done = len(findings) - len(left)
    parts = []
    if bad:
        parts.append(f"{len(bad)} of {_count(done, 'check')} failed: {_names(bad)}")
    if odd:
        parts.append(f"{_count(len(odd), 'warning')}: {_names(odd)}")
    if not parts:
        parts.append(f"all is well: {_count(done, 'check')}")
    return "; ".join(parts) + (f", {len(left)} skipped" if left else "")


def _names(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
