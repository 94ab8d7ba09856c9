"""The record of a handoff: fields, line, outcome."""

from __future__ import annotations

import pytest

from onebitd.core.handoff import (
    FIELDS,
    HandoffRecord,
    Outcome,
    Reason,
    Route,
    outcome_of_reply,
)
from onebitd.core.wording import Wording


def record(**fields: object) -> HandoffRecord:
    base = {
        "request_id": "r1",
        "time": "2026-01-31T12:00:00.000Z",
        "instance": "qwen",
        "model": "qwen",
        "path": "/v1/completions",
        "stream": False,
        "prompt_tokens": 307,
    }
    return HandoffRecord(**{**base, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("why", "shown", "kept"),
    [
        (None, None, None),
        (Wording.of("status 3"), "status 3", "status 3"),
        (
            *(Wording.of("status 3", "my secret"), "status 3: my secret"),
            "status 3; its words are in the log",
        ),
    ],
)
def test_record_kept_fields_have_the_detail_without_words_of_others(
    why: Wording | None, shown: str | None, kept: str | None
) -> None:
    """The log and the control socket have them, the disk has not; everything else is the same."""
    one = record(outcome=Outcome.FALLBACK, reason=Reason.PROVIDER_EXIT)
    one.set_detail(why)
    fields, on_disk = one.fields(), one.kept_fields()
    assert (fields.pop("detail", None), on_disk.pop("detail", None)) == (shown, kept)
    assert fields == on_disk
    assert "brief" not in fields


def test_record_kept_fields_leave_a_detail_out_that_nobody_has_looked_at() -> None:
    """Who sets a detail and says nothing about whose words it has does no harm."""
    one = record(detail="status 3: my secret")
    assert "detail" in one.fields()
    assert "detail" not in one.kept_fields()


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {
                "outcome": Outcome.USED,
                "route": Route.FILE,
                "prefill_ms": 88.1,
                "restore_ms": 6.4,
                "first_byte_ms": 101.2,
            },
            "hybrid: 307 prompt tokens: prefill 88.1 ms, restore 6.4 ms, first byte 101.2 ms",
        ),
        (
            {
                "outcome": Outcome.USED,
                "route": Route.SHARED,
                "prefill_ms": 88.1,
                "share_ms": 0.412,
                "adopt_ms": 0.051,
                "first_byte_ms": 95.0,
            },
            "hybrid: 307 prompt tokens: prefill 88.1 ms, share 0.412 ms, adopt 0.051 ms, "
            "first byte 95.0 ms",
        ),
        (
            {
                "outcome": Outcome.FALLBACK,
                "reason": Reason.PROVIDER_EXIT,
                "detail": "status 3: no XDNA device",
                "first_byte_ms": 97.3,
            },
            "hybrid: 307 prompt tokens: fell back (provider_exit: status 3: no XDNA device), "
            "first byte 97.3 ms",
        ),
        (
            {"outcome": Outcome.SKIPPED, "reason": Reason.POLICY, "detail": "the policy is never"},
            "hybrid: 307 prompt tokens: not handed off (policy: the policy is never)",
        ),
        (
            {
                "outcome": Outcome.WASTED,
                "route": Route.FILE,
                "prefill_ms": 88.1,
                "restore_ms": 6.4,
                "evaluated_tokens": 307,
            },
            "hybrid: 307 prompt tokens: prefill 88.1 ms, restore 6.4 ms, wasted: the decoder "
            "evaluated 307 tokens again",
        ),
        (
            {"outcome": Outcome.CANCELLED, "reason": Reason.CLIENT_GONE, "prompt_tokens": None},
            "hybrid: ? prompt tokens: cancelled (client_gone)",
        ),
    ],
)
def test_line_is_the_engines_line(fields: dict[str, object], line: str) -> None:
    """The human text of each outcome."""
    assert record(**fields).line() == line


def test_fields_what_does_not_apply_is_absent() -> None:
    """No nulls, no invented zeros; words as plain strings, times to the microsecond."""
    found = record(outcome=Outcome.USED, restore_ms=6.40001, queue_ms=0.0).fields()
    assert found["outcome"] == "used"
    assert type(found["outcome"]) is str
    assert found["restore_ms"] == 6.4
    assert found["queue_ms"] == 0.0
    assert "reason" not in found
    assert "adopt_ms" not in found
    assert set(record(started_s=12.5).fields()) <= set(FIELDS)
    assert "started_s" not in FIELDS


@pytest.mark.parametrize(("started_s", "since_ms"), [(12.5, 1500.0), (14.0, 0.0), (None, None)])
def test_since_start_a_trial_run_has_no_start(
    started_s: float | None, since_ms: float | None
) -> None:
    """A record that is nobody's request gets no moments."""
    assert record(started_s=started_s).since_start_ms(14.0) == since_ms


@pytest.mark.parametrize(
    ("cached", "evaluated", "outcome"),
    [
        (306, 1, Outcome.USED),
        (306, 2, Outcome.WASTED),
        (305, 2, Outcome.WASTED),
        (0, 307, Outcome.WASTED),
        (305, 1, Outcome.WASTED),
        (None, None, Outcome.WASTED),
    ],
)
def test_outcome_of_reply_used_only_if_the_last_token_alone_was_evaluated(
    cached: int | None, evaluated: int | None, outcome: Outcome
) -> None:
    """The decoder's own figures decide."""
    assert outcome_of_reply(306, cached, evaluated) is outcome
