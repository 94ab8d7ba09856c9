"""Typical figures of the last handoffs: by how they ended, against the way not taken."""

from __future__ import annotations

from typing import Any

import pytest

from onebitd.core.handoff import HandoffRecord, Outcome
from onebitd.core.recent_handoffs import RecentHandoffs, Typical, look_at


def record(outcome: Outcome = Outcome.USED, **fields: Any) -> HandoffRecord:
    """Return a record of a stream with 300 tokens."""
    known: dict[str, Any] = {"prompt_tokens": 300, "stream": True} | fields
    return HandoffRecord(
        request_id="r", time="t", instance="i", model="m", path="/p", outcome=outcome, **known
    )


def rate(tokens: int) -> float:
    """Return what a decoder of 2 ms a token takes."""
    return 2.0 * tokens


def test_look_at_nothing_is_all_none() -> None:
    """Before the first request there is nothing typical."""
    assert look_at([], rate) == RecentHandoffs()


def test_look_at_counts_by_outcome_and_leaves_cancelled_out_of_the_rows() -> None:
    """Three ways of failing are one row."""
    found = look_at([record(outcome) for outcome in Outcome], rate)
    assert found.count == len(Outcome)
    assert (found.used.count, found.failed.count, found.skipped.count) == (1, 3, 1)


def test_look_at_takes_medians_that_were_measured() -> None:
    """The lower of two middles; one slow first byte does not move it."""
    first_bytes = (90.0, 100.0, 110.0, 9000.0)
    found = look_at([record(first_byte_ms=ms) for ms in first_bytes], rate).used
    assert found == Typical(4, 300, 100.0, 600.0, 490.0, 510.0 + 500.0 + 490.0 - 8400.0)


@pytest.mark.parametrize(
    ("fields", "other_ms"),
    [
        ({}, 600.0),
        ({"queue_ms": 50.0, "template_ms": 3.0, "tokenize_ms": 2.0}, 655.0),
        ({"decoder_estimate_ms": 95.0, "template_ms": 3.0, "queue_ms": 50.0}, 98.0),
        ({"prompt_tokens": None}, None),
    ],
    ids=["learned", "learned-with-what-both-wait-for", "weighed", "unknown-length"],
)
def test_look_at_other_way_of_a_used_one_is_the_decoder(
    fields: dict[str, Any], other_ms: float | None
) -> None:
    """As it was weighed then, which knows what the slot held; else by what is known now."""
    assert look_at([record(**fields)], rate).used.other_ms == other_ms


def test_look_at_other_way_of_a_skipped_one_is_the_provider() -> None:
    """Only where it was weighed: a prompt that cannot be handed over has no other way."""
    skipped = record(Outcome.SKIPPED, provider_estimate_ms=700.0, first_byte_ms=95.0)
    found = look_at([skipped, record(Outcome.SKIPPED, first_byte_ms=95.0)], rate).skipped
    assert found == Typical(2, 300, 95.0, 700.0, 605.0, 605.0)


@pytest.mark.parametrize(
    ("fields", "first_byte_ms"),
    [({"decode_ms": 400.0}, 100.0), ({"decode_ms": 600.0}, 0.0), ({}, None)],
)
def test_look_at_reply_in_one_piece_is_without_its_generation(
    fields: dict[str, Any], first_byte_ms: float | None
) -> None:
    """Its first byte comes with its last: that is no figure of a prompt."""
    found = look_at([record(stream=False, first_byte_ms=500.0, **fields)], rate)
    assert found.used.first_byte_ms == first_byte_ms


def test_look_at_decoder_of_unknown_rate_saves_nothing_that_is_known() -> None:
    """Nothing is invented."""
    found = look_at([record(first_byte_ms=100.0)], lambda tokens: None).used
    assert found == Typical(1, 300, 100.0, None, None, None)
