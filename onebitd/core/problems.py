"""What is wrong with a daemon, by its own words and by a look at its listener: kinds and facts.

The status is a mapping that is read with care: it may be of a daemon of another version. Each
surface has a sentence of its own for each kind. Facts may quote other programs and name paths: a
surface that anybody may look at chooses among them by name.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any, Final, Literal

RECENT_EXIT_S: Final = 600.0
"""A decoder that ended against its will counts as a fault for so long after its restart."""
MANY_FAILURES: Final = 3
"""So many handoffs tried in vain in a row count as a fault."""
MANY_TRIED: Final = 10
"""From so many on, failures that outnumber the successes do, while the last one was a failure."""

SERVING: Final = ("ready", "degraded")

Facts = Mapping[str, Any]
Kind = Literal[
    "failed",
    "restarting",
    "draining",
    "listener",
    "exit",
    "stuck",
    "breaker",
    "route",
    "audit",
    "lock",
    "failures",
    "history",
]


def find_problems(status: Mapping[str, Any], now: dt.datetime) -> list[tuple[Kind, Facts]]:
    """Return what is wrong, the weightiest first; nothing when all is well, or not loaded yet.

    Args:
        status: `/v1/status`; its key `probe`, where it is there, is
            `adapters.listener_probe.Answered` as a mapping.
        now: aware.

    Returns:
        Kinds with these facts, each None where it is not known:

            failed, restarting  why, exit: what the daemon says, and how the decoder last ended
            listener            url; status and error, of which one is None
            exit                reason, ago_s
            breaker             breaker, class, detail, next_try_s
            route, history      why
            audit               strikes
            lock                path, problem, usable
            failures            failed; tried, None if all failed of late; reason of the last
    """
    state, provider = status.get("state"), _part(status, "provider")
    why = _why(status)
    breaker, route = _breaker(provider), _given(why=provider.get("route_off"))
    says_it_all = breaker or route
    facts: dict[Kind, Facts | None] = {
        "failed": why if state == "failed" else None,
        "restarting": why if state == "restarting" else None,
        "draining": {} if state == "draining" else None,
        "listener": _listener(_part(status, "probe")) if state in SERVING else None,
        "exit": _exit(_part(status, "backend"), now) if state in SERVING else None,
        "stuck": {} if provider.get("state") == "stuck" else None,
        "breaker": breaker,
        "route": route,
        "audit": _given(strikes=_number(_part(status, "audit").get("strikes"))),
        "lock": _lock(_part(status, "lock")),
        "failures": None if says_it_all else _failures(provider, _part(status, "handoffs")),
        "history": _given(why=status.get("history_problem")),
    }
    return [(kind, found) for kind, found in facts.items() if found is not None]


def _why(status: Mapping[str, Any]) -> Facts:
    reason = _part(_part(status, "backend"), "last_exit").get("reason")
    return {"why": status.get("state_detail") or reason, "exit": reason}


def _listener(probe: Mapping[str, Any]) -> Facts | None:
    answer, error = probe.get("status"), probe.get("error")
    if not probe.get("tried", True) or answer == 200 or (answer is None and not error):
        return None
    return {"url": probe.get("url"), "status": answer, "error": error}


def _exit(backend: Mapping[str, Any], now: dt.datetime) -> Facts | None:
    last_exit = _part(backend, "last_exit")
    try:
        moment = dt.datetime.fromisoformat(str(last_exit.get("time")))
        ago_s = (now - moment).total_seconds()
    except (OverflowError, TypeError, ValueError):
        return None  # there was none, or none that says when
    facts = {"reason": last_exit.get("reason", "?"), "ago_s": ago_s}
    return None if ago_s > RECENT_EXIT_S else facts


def _breaker(provider: Mapping[str, Any]) -> Facts | None:
    if provider.get("breaker") in (None, "closed"):
        return None
    next_try_s = provider.get("breaker_next_try_s")
    return {
        "breaker": provider["breaker"],
        "class": provider.get("breaker_class"),
        "detail": provider.get("breaker_detail"),
        "next_try_s": None if next_try_s is None else _number(next_try_s),
    }


def _lock(lock: Mapping[str, Any]) -> Facts | None:
    if lock.get("hold") == "never" or not lock.get("problem"):
        return None  # a file that nobody here takes is nobody's trouble
    usable = lock.get("usable", True)
    return {"path": lock.get("path"), "problem": lock["problem"], "usable": usable}


def _failures(provider: Mapping[str, Any], counts: Mapping[str, Any]) -> Facts | None:
    in_a_row = _number(provider.get("consecutive_failures"))
    failed = sum(_number(counts.get(name)) for name in ("fallback", "wasted", "failed"))
    tried = failed + _number(counts.get("used"))
    reason = _part(provider, "last_error").get("reason")
    if in_a_row >= MANY_FAILURES:
        return {"failed": in_a_row, "tried": None, "reason": reason}
    if in_a_row and tried >= MANY_TRIED and failed * 2 > tried:
        return {"failed": failed, "tried": tried, "reason": reason}
    return None


def _given(**fact: object) -> Facts | None:
    """Return the facts if there is anything in them."""
    return fact if any(fact.values()) else None


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else 0


def _part(mapping: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = mapping.get(key)
    return found if isinstance(found, Mapping) else {}
