"""What counts as wrong, and that each surface has a sentence for it."""

from __future__ import annotations

import copy
import datetime as dt
from typing import Any, get_args

import pytest

from onebitd.core import page_view, problems
from onebitd.core.problems import Kind, find_problems
from onebitd.surfaces import cli_problems

NOW = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)
PRIVATE = "hunter2"
"""Stands for whatever a page that anybody may see must not tell."""

LAST_EXIT = {"time": "2026-01-31T11:59:00.000Z", "reason": f"status 3: {PRIVATE}"}
BREAKER = {
    "breaker": "half_open",
    "breaker_class": "crash",
    "breaker_detail": f"last: {PRIVATE}",
    "breaker_next_try_s": 0.0,
}
REASON = {"last_error": {"reason": "no_space", "detail": PRIVATE}}
LOCK = {"path": f"/{PRIVATE}", "problem": PRIVATE, "usable": False}
PROBE = {"url": f"http://{PRIVATE}", "tried": True, "ms": None, "status": None, "error": PRIVATE}

WRONG: list[tuple[Kind, dict[str, Any], dict[str, Any]]] = [
    (
        "failed",
        {"state": "failed", "backend": {"last_exit": LAST_EXIT}},
        {"why": LAST_EXIT["reason"], "exit": LAST_EXIT["reason"]},
    ),
    ("failed", {"state": "failed", "state_detail": PRIVATE}, {"why": PRIVATE, "exit": None}),
    ("restarting", {"state": "restarting"}, {"why": None, "exit": None}),
    ("draining", {"state": "draining"}, {}),
    ("listener", {"probe": PROBE}, {"url": PROBE["url"], "status": None, "error": PRIVATE}),
    (
        "listener",
        {"state": "degraded", "probe": {"status": 503}},
        {"url": None, "status": 503, "error": None},
    ),
    (
        "exit",
        {"backend": {"last_exit": LAST_EXIT}},
        {"reason": LAST_EXIT["reason"], "ago_s": 60.0},
    ),
    (
        "exit",
        {"backend": {"last_exit": {"time": "2026-01-31T11:50:00Z"}}},
        {"reason": "?", "ago_s": problems.RECENT_EXIT_S},
    ),
    ("stuck", {"provider": {"state": "stuck"}}, {}),
    (
        "breaker",  # its failures are what opened it
        {"provider": {**BREAKER, "consecutive_failures": 9}},
        {"breaker": "half_open", "class": "crash", "detail": f"last: {PRIVATE}", "next_try_s": 0.0},
    ),
    (
        "route",
        {"provider": {"route_off": PRIVATE, "consecutive_failures": 9}},
        {"why": PRIVATE},
    ),
    ("audit", {"audit": {"strikes": 2}}, {"strikes": 2}),
    ("lock", {"lock": LOCK}, LOCK),
    (
        "failures",
        {"provider": {"consecutive_failures": 3, **REASON}},
        {"failed": 3, "tried": None, "reason": "no_space"},
    ),
    (
        "failures",
        {
            "provider": {"consecutive_failures": 1},
            "handoffs": {"used": 4, "fallback": 3, "wasted": 2, "failed": 1, "skipped": 99},
        },
        {"failed": 6, "tried": 10, "reason": None},
    ),
    ("history", {"history_problem": PRIVATE}, {"why": PRIVATE}),
]


def status_of(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the status of a daemon that is well, but for some changes."""
    well: dict[str, Any] = {
        "state": "ready",
        "backend": {"state": "ready", "last_exit": None},
        "provider": {"state": "idle", "breaker": "closed", "consecutive_failures": 0},
        "lock": {"path": "/lock", "hold": "handoff", "problem": None, "usable": True},
        "handoffs": {"used": 3},
        "audit": {"strikes": 0},
    }
    return well | {
        name: {**well.get(name, {}), **value} if isinstance(value, dict) else value
        for name, value in changes.items()
    }


@pytest.mark.parametrize(("kind", "changes", "facts"), WRONG)
def test_find_problems_of_one_fault_are_its_kind_and_facts(
    kind: Kind, changes: dict[str, Any], facts: dict[str, Any]
) -> None:
    """Nothing else comes with it, and both surfaces say it, the page without anybody's words."""
    status = status_of(changes)
    assert find_problems(status, NOW) == [(kind, facts)]
    (sentence,) = cli_problems.find_problems(status, NOW)
    shown = page_view.SENTENCES[kind](facts)
    assert sentence.endswith(".")
    assert shown.endswith(".")
    assert PRIVATE not in shown
    assert "None" not in sentence + shown


def test_find_problems_kinds_are_all_in_the_table_and_have_sentences() -> None:
    """A new kind needs a case above, and words on both surfaces."""
    assert {kind for kind, *_ in WRONG} == set(get_args(Kind))
    assert list(cli_problems.SENTENCES) == list(page_view.SENTENCES) == list(get_args(Kind))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"state": "loading", "probe": {"status": 503}},
        {"probe": {"status": 200}},
        {"probe": None},
        {"probe": PROBE | {"tried": False}},
        {"backend": {"last_exit": LAST_EXIT | {"time": "2026-01-31T11:49:59.000Z"}}},
        {"backend": {"last_exit": LAST_EXIT | {"time": "2026-01-31T11:59:00"}}},
        {"provider": {"consecutive_failures": 2, **REASON}},
        {"provider": {"consecutive_failures": 0}, "handoffs": {"used": 1, "fallback": 20}},
        {"provider": {"consecutive_failures": 1}, "handoffs": {"used": 5, "fallback": 5}},
        {"provider": {"consecutive_failures": 1}, "handoffs": {"used": 1, "fallback": 8}},
        {"lock": LOCK | {"hold": "never"}},
    ],
)
def test_find_problems_of_what_is_no_fault_are_none(changes: dict[str, Any]) -> None:
    """What is over, happened once or twice, or is nobody's trouble does not raise an alarm."""
    assert find_problems(status_of(changes), NOW) == []


def everything() -> dict[str, Any]:
    """Return the status of a daemon that serves, and with which nothing is right."""
    found: dict[str, Any] = {}
    for _, changes, _ in WRONG:
        if "state" not in changes:
            for name, value in changes.items():
                found[name] = found.get(name, {}) | value if isinstance(value, dict) else value
    return status_of(found)


def test_find_problems_come_in_the_order_of_their_weight() -> None:
    """A screen that is too small loses what is at the end."""
    weights = [kind for kind in get_args(Kind) if kind not in ("failed", "restarting", "draining")]
    weights.remove("failures")  # the breaker says it all
    assert [kind for kind, _ in find_problems(everything(), NOW)] == weights


@pytest.mark.parametrize("odd", [None, True, -1, 1.5, "x", [], ["x"], {}, {"x": 1}])
def test_find_problems_of_another_version_are_found_without_an_odd_field(odd: Any) -> None:
    """A field that is not there or is something else costs what it says, not the page."""
    for status in (everything(), *(status_of(changes) for _, changes, _ in WRONG)):
        for name, value in status.items():
            names = [(), *((inner,) for inner in value)] if isinstance(value, dict) else [()]
            for path in names:
                other = copy.deepcopy(status)
                table = other[name] if path else other
                table[path[0] if path else name] = odd
                assert cli_problems.find_problems(other, NOW) is not None
    assert find_problems({}, NOW) == []
