"""What the page at /onebit/ is told, and what it is not."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from typing import Any

import pytest

from onebitd.core import page_view
from onebitd.core.audit import LastAudit
from onebitd.core.control_api import (
    AuditStatus,
    BackendStatus,
    HandoffCounts,
    LastExit,
    LockStatus,
    ModelStatus,
    ProviderStatus,
    QueueStatus,
    RequestInFlight,
    SlotStatus,
    Status,
)
from onebitd.core.costs import Costs
from onebitd.core.handoff import HandoffRecord, Outcome, Reason, Route
from onebitd.core.page_spans import SPAN_NAMES, open_span, spans

NOW = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)
PRIVATE = "hunter2"
"""Stands for whatever the page must not tell."""

STATUS = Status(
    version="1.2",
    instance="qwen",
    pid=7,
    uptime_s=60.0,
    state="ready",
    state_detail=None,
    listen=["127.0.0.1:8000"],
    model=ModelStatus("qwen", f"/srv/{PRIVATE}/model.gguf", 4096, 2, f"layout {PRIVATE}"),
    backend=BackendStatus(11, "ready", 0, None, "b1", ["HRX0"], 1_234_567_890),
    provider=ProviderStatus(f"/opt/{PRIVATE}/npu", "idle", "closed", 0, None),
    lock=LockStatus(f"/{PRIVATE}/lock", False, None, "handoff", None),
    slot=SlotStatus(False, None, None, None),
    queue=QueueStatus(0, 64),
    handoffs=HandoffCounts(used=3, by_reason={"policy": 1}),
)


def secretive(**changes: Any) -> Status:
    """Return a status in which everything that may quote somebody does."""
    exit_ = LastExit("2026-01-31T11:59:00.000Z", f"signal 6 (SIGABRT): {PRIVATE}")
    last = {"time": "2026-01-31T11:59:00.000Z", "reason": "provider_exit", "detail": PRIVATE}
    provider = dataclasses.replace(
        STATUS.provider,
        breaker="open",
        last_error=last,
        consecutive_failures=4,
        shared=f"paused, {PRIVATE}",
        breaker_class="crash",
        breaker_next_try_s=30.0,
        breaker_detail=f"last: {PRIVATE}",
        route_off=f"because {PRIVATE}",
    )
    return dataclasses.replace(
        STATUS,
        state="degraded",
        state_detail=f"the provider is not called: {PRIVATE}",
        backend=dataclasses.replace(STATUS.backend, restarts=1, last_exit=exit_),
        provider=provider,
        lock=LockStatus(
            f"/{PRIVATE}/lock", True, {"pid": 9, "command": PRIVATE}, "handoff", PRIVATE, False
        ),
        slot=SlotStatus(True, "prefill", PRIVATE, 1.0),
        audit=AuditStatus(audited=2, drifted=1, strikes=1),
        **changes,
    )


def record(**fields: Any) -> HandoffRecord:
    """Return a finished record whose private fields are secrets."""
    private = {"detail": PRIVATE, "provider": f"/opt/{PRIVATE}/npu"}
    return HandoffRecord(
        PRIVATE,
        "2026-01-31T12:00:00.000Z",
        "qwen",
        "qwen",
        fields.pop("path", "/v1/chat/completions"),
        False,
        **{"outcome": Outcome.USED, **private, **fields},
    )


def test_status_view_of_a_daemon_in_trouble_quotes_nobody() -> None:
    """Whoever may use the API sees it: no last words, no paths, no ids, no names of others."""
    shown = page_view.status_view(secretive(), NOW)
    assert PRIVATE not in json.dumps(shown)
    assert shown["model"]["file"] == "model.gguf"
    assert shown["provider"]["program"] == "npu"
    assert shown["provider"]["next_try"] == NOW.timestamp() + 30
    assert shown["provider"]["shared"] == "paused"
    assert shown["lock"]["state"] == "held by another program"
    assert shown["decoder"]["last_exit"]["reason"] == "signal 6 (SIGABRT)"


def test_handoff_and_request_views_hide_ids_details_and_unknown_paths() -> None:
    """A client chooses its id and its path; a detail may quote a prompt."""
    shown = page_view.handoff_view(record(reason=Reason.PROVIDER_EXIT), 12)
    assert PRIVATE not in json.dumps(shown)
    assert (shown["n"], shown["reason"]) == (12, "provider_exit")
    assert shown["at"] == NOW.timestamp() * 1000
    asked = RequestInFlight(PRIVATE, PRIVATE, f"/{PRIVATE}", "pass", 1.0)
    other = page_view.request_view(asked, None, 13, 1000)
    assert other == {"n": 13, "at": 1000, "path": "another path", "phase": "pass"}
    live = page_view.request_view(
        dataclasses.replace(asked, path="/v1/completions", phase="queued"),
        record(outcome=None, template_ms=2.0),
        14,
        1000,
    )
    assert PRIVATE not in json.dumps(live)
    assert (live["path"], live["open"]) == ("/v1/completions", ["queue", 2.0])


def test_status_view_does_not_change_by_itself() -> None:
    """It is sent when something happens, not with every second that passes."""
    later = dataclasses.replace(STATUS, uptime_s=61.0, slot=SlotStatus(False, None, None, 9.0))
    assert page_view.status_view(STATUS, NOW) == page_view.status_view(
        later, NOW + dt.timedelta(seconds=1)
    )


def test_problems_of_a_daemon_that_is_fine_are_none() -> None:
    """The page then says so."""
    assert page_view.find_problems(STATUS, NOW) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state": "loading"}, "The model is being loaded"),
        ({"state": "restarting"}, "The decoder is being restarted"),
        ({"state": "draining"}, "onebitd is stopping"),
        ({"state": "failed"}, "The decoder cannot be kept running"),
        ({"provider": {"state": "stuck"}}, "cannot be killed"),
        (
            {"provider": {"breaker": "open", "breaker_class": "busy"}},
            "The prefill provider is not called for now (busy)",
        ),
        ({"provider": {"route_off": "x"}}, "Nothing is handed over"),
        ({"audit": {"strikes": 2}}, "2 audits have found"),
        ({"lock": {"problem": "mode 0600"}}, "The device lock is not as it should be"),
        ({"lock": {"problem": "mode 0600", "usable": False}}, "The device lock cannot be taken"),
        (
            {"provider": {"consecutive_failures": 3, "last_error": {"reason": "no_space"}}},
            "The last 3 handoffs failed, the last with no_space",
        ),
        (
            {
                "provider": {"consecutive_failures": 1, "last_error": {"reason": "no_space"}},
                "handoffs": {"used": 4, "fallback": 6},
            },
            "6 of 10 handoffs failed, the last with no_space: the decoder prefills",
        ),
        (
            {"backend": {"last_exit": LastExit("2026-01-31T11:55:00.000Z", "status 3: boo")}},
            "The decoder ended unexpectedly (status 3) and was restarted",
        ),
        ({"history_problem": f"the disk with {PRIVATE} is full"}, "not kept over a restart"),
    ],
)
def test_problems_each_get_one_sentence(changes: dict[str, Any], words: str) -> None:
    """What is wrong stands first on the page, and nothing else with it."""
    parts = {
        name: dataclasses.replace(getattr(STATUS, name), **value)
        if isinstance(value, dict)
        else value
        for name, value in changes.items()
    }
    (problem,) = page_view.find_problems(dataclasses.replace(STATUS, **parts), NOW)
    assert words in problem
    assert PRIVATE not in problem


def test_status_view_of_a_lock_that_nobody_takes_says_so() -> None:
    """Whatever its file is like."""
    lock = dataclasses.replace(STATUS.lock, hold="never", problem="mode 0600")
    shown = page_view.status_view(dataclasses.replace(STATUS, lock=lock), NOW)
    assert shown["lock"]["state"] == "not used"
    assert shown["problems"] == []


FILE = {
    "template_ms": 2.0,
    "tokenize_ms": 1.0,
    "queue_ms": 15.0,
    "lock_ms": 5.0,
    "provider_at_ms": 20.0,
    "provider_wall_ms": 50.0,
    "check_ms": 1.0,
    "handed_at_ms": 75.0,
    "restore_ms": 4.0,
    "first_byte_ms": 90.0,
    "total_ms": 120.0,
}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, []),
        (
            FILE,
            [
                ("front", 0, 3),
                ("queue", 3, 15),
                ("lock", 15, 20),
                ("provider", 20, 70),
                ("check", 70, 71),
                ("queue", 71, 74),
                ("handover", 75, 79),
                ("prompt", 79, 90),
                ("decode", 90, 120),
            ],
        ),
        (
            {"queue_ms": 10.0, "share_ms": 2.0, "lock_ms": 1.0, "provider_at_ms": 13.0}
            | {"provider_wall_ms": 20.0, "handed_at_ms": 33.0, "adopt_ms": 0.5}
            | {"first_byte_ms": 40.0, "total_ms": 50.0},
            [
                ("queue", 0, 10),
                ("handover", 10, 12),
                ("lock", 12, 13),
                ("provider", 13, 33),
                ("handover", 33, 33.5),
                ("prompt", 33.5, 40),
                ("decode", 40, 50),
            ],
        ),
        (
            {"template_ms": 1.0, "queue_ms": 9.0, "first_byte_ms": 60.0, "total_ms": 80.0},
            [("front", 0, 1), ("queue", 1, 10), ("prompt", 10, 60), ("decode", 60, 80)],
        ),
        # Waiting for another run of our own is not in lock_ms, and is waiting for the device.
        (
            {"lock_ms": 1.0, "provider_at_ms": 30.0, "provider_wall_ms": 10.0, "total_ms": 40.0},
            [("lock", 0, 30), ("provider", 30, 40)],
        ),
        # An older record does not say when its steps began.
        (
            {"queue_ms": 5.0, "lock_ms": 1.0, "provider_wall_ms": 10.0, "restore_ms": 2.0}
            | {"first_byte_ms": 20.0},
            [
                ("queue", 0, 5),
                ("lock", 5, 6),
                ("provider", 6, 16),
                ("handover", 16, 18),
                ("prompt", 18, 20),
            ],
        ),
        (
            {
                "stream": False,
                "restore_ms": 2.0,
                "handed_at_ms": 0.0,
                "decode_ms": 8000.0,
                "first_byte_ms": 8050.0,
                "total_ms": 8051.0,
            },
            [("handover", 0.0, 2.0), ("prompt", 2.0, 50.0), ("decode", 50.0, 8051.0)],
        ),
        (
            {
                "stream": False,
                "queue_ms": 4.0,
                "decode_ms": 9.0,
                "first_byte_ms": 8.0,
                "total_ms": 8.5,
            },
            [("queue", 0.0, 4.0), ("decode", 4.0, 8.5)],
        ),
    ],
)
def test_spans_follow_each_other_as_the_record_says(
    fields: dict[str, float], expected: list[tuple[str, float, float]]
) -> None:
    """One run of the provider is seen beside the reply before it, at the right time."""
    assert [(one.name, one.begin_ms, one.end_ms) for one in spans(fields)] == expected
    assert {name for name, *_ in expected} <= set(SPAN_NAMES)


@pytest.mark.parametrize(
    ("fields", "phase", "expected"),
    [
        ({}, "queued", ["queue", 0.0]),
        ({"template_ms": 2.0}, "tokenize", ["front", 2.0]),
        ({"template_ms": 2.0}, "lock", ["lock", 2.0]),
        ({"lock_ms": 1.0, "provider_at_ms": 30.0}, "prefill", ["provider", 30.0]),
        (
            {"provider_at_ms": 30.0, "provider_wall_ms": 5.0},
            "prefill",
            ["check", 35.0],
        ),
        ({"provider_at_ms": 3.0, "provider_wall_ms": 5.0}, "restore", ["handover", 8.0]),
        ({"queue_ms": 4.0}, "decode", ["prompt", 4.0]),
        ({"queue_ms": 4.0, "first_byte_ms": 9.0}, "decode", ["decode", 9.0]),
        ({"queue_ms": 4.0}, "ending", None),
    ],
)
def test_open_span_is_the_step_that_a_request_is_in(
    fields: dict[str, float], phase: str, expected: list[Any] | None
) -> None:
    """It is drawn up to now."""
    assert open_span(fields, spans(fields), phase) == expected


def learned() -> Costs:
    """Return costs by which a handoff pays for long prompts."""
    costs = Costs()
    for step in range(12):
        tokens = 100 * (step + 1)
        costs.note_provider(
            Route.FILE, tokens, 60 + 0.1 * tokens, overlapped=False, cold=False, now=step
        )
        costs.note_decoder(0, tokens, 0.6 * tokens, overlapped=False, now=step)
        costs.note_restore(tokens * 1000, 2.0, step)
        costs.note_state(tokens, tokens * 1000)
    return costs


def test_costs_view_has_the_curves_and_where_they_cross() -> None:
    """With it the break-even point is drawn."""
    answer = {"costs": learned().to_json(), "ctx_size": 2048, "provider": f"/{PRIVATE}"}
    shown = page_view.costs_view(answer)
    assert PRIVATE not in json.dumps(shown)
    assert shown["missing"] == []
    assert (shown["tokens"][0], shown["tokens"][-1], shown["last"]) == (2, 2047, 2047)
    assert shown["shared"] is None
    ((first, last),) = shown["wins"]["file"]
    assert 100 < first < 160
    assert last == 2047
    for tokens, decoder, handed in zip(
        shown["tokens"], shown["decoder"], shown["file"], strict=True
    ):
        assert (handed < decoder) is (tokens >= first)


def test_costs_view_of_nothing_learned_says_what_is_missing() -> None:
    """Nothing is drawn then."""
    shown = page_view.costs_view({"costs": Costs().to_json(), "ctx_size": None, "provider": None})
    assert shown["missing"] == ["decoder", "provider"]
    assert (shown["decoder"], shown["file"], shown["wins"]) == (None, None, {})
    assert shown["has_provider"] is False


@pytest.mark.parametrize(
    ("path", "is_ours"),
    [
        ("/onebit", True),
        ("/onebit/", True),
        ("/onebit/events", True),
        ("/onebit/x/../../v1/models", True),
        ("/onebits", False),
        ("/", False),
    ],
)
def test_shows_is_true_for_what_the_decoder_must_not_see(path: str, is_ours: bool) -> None:
    """All of it is ours, whether there is a page or not."""
    assert page_view.shows(path) is is_ours


def test_page_view_knows_the_audit_without_its_words() -> None:
    """Only how many there were."""
    last = LastAudit("2026-01-31T12:00:00.000Z", PRIVATE, 1.0, 3, "k", False)
    status = dataclasses.replace(STATUS, audit=AuditStatus(audited=1, drifted=1, last=last))
    shown = page_view.status_view(status, NOW)
    assert shown["audit"] == {"audited": 1, "drifted": 1, "strikes": 0}
