"""What one request teaches, and what it does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from onebitd.core.errors import HandoffError
from onebitd.core.handoff import HandoffRecord, Outcome, Reason, Route
from onebitd.core.reuse import Reuse
from onebitd.core.slot_content import Prompt, SlotMemory
from onebitd.core.sse import JsonWatch
from onebitd.services import lessons as lessons_module
from onebitd.services.lessons import Lessons
from onebitd.services.provider_runs import Prefilled
from onebitd.services.race import Overtaken

TIMINGS = {"prompt_ms": 90.0, "predicted_n": 5, "predicted_ms": 50.0}
FAILURE = HandoffError(Reason.PROVIDER_EXIT, "status 1")


_TIMELESS = {"note_state", "note_lock", "note_adopt", "note_reuse"}


class Notes:
    """Takes whatever is learned, as a call's name and its figures but the time."""

    def __init__(self) -> None:
        self.calls: dict[str, tuple[Any, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        def note(*figures: Any, **more: Any) -> None:
            now = more.pop("now", None)
            if now is None and name not in _TIMELESS:
                figures, now = figures[:-1], figures[-1]
            assert name in _TIMELESS or now > 1e9
            self.calls[name.removeprefix("note_")] = (*figures, *more.values())

        return note


class Breaker:
    """Counts."""

    def __init__(self) -> None:
        self.failures: list[tuple[Reason, bool]] = []

    def note_failure(self, error: HandoffError, *, slept: bool) -> HandoffError:
        self.failures.append((error.reason, slept))
        return error


class Pupil:
    """One request's lessons, over things that only write down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, slept: bool = False) -> None:
        watch = SimpleNamespace(slept=lambda: slept)
        monkeypatch.setattr(lessons_module, "SuspendWatch", lambda: watch)
        self.notes, self.breaker, self.reuse = Notes(), Breaker(), Reuse()
        self.memory, self.touched = SlotMemory(), 0
        self.record = HandoffRecord("r", "", "test", "m", "/v1/completions", False)
        outlooks: Any = SimpleNamespace(
            costs=self.notes,
            memory=self.memory,
            touch=self._touch,
            note_lock=lambda ms: self.notes.note_lock(ms),
        )
        breaker: Any = self.breaker
        self.lessons = Lessons(outlooks, breaker, self.reuse, self.record)

    def _touch(self) -> None:
        self.touched += 1

    def reply(self, cached: int, evaluated: int, outcome: Outcome = Outcome.SKIPPED) -> None:
        """Let a reply of a prompt of 1000 tokens have ended."""
        self.record.outcome, self.record.prompt_tokens = outcome, 1000
        self.record.cached_tokens, self.record.evaluated_tokens = cached, evaluated


@pytest.fixture
def pupil(monkeypatch: pytest.MonkeyPatch) -> Pupil:
    """One that did not sleep."""
    return Pupil(monkeypatch)


def test_run_ended_teaches_the_run_and_the_lock(pupil: Pupil) -> None:
    """By file there is nothing to adopt."""
    pupil.record.lock_ms = 3.0
    pupil.lessons.run_ended(Route.FILE, 999, 700.0, overlapped=True, cold=False)
    assert pupil.notes.calls == {
        "provider": (Route.FILE, 999, 700.0, True, False),
        "lock": (3.0,),
    }
    assert pupil.touched == 1


def test_run_ended_shared_teaches_what_sharing_takes(pupil: Pupil) -> None:
    """Share and adopt together; without a lock, nothing of a lock."""
    pupil.record.share_ms, pupil.record.adopt_ms = 2.0, 5.0
    pupil.lessons.run_ended(Route.SHARED, 999, 700.0, overlapped=False, cold=True)
    assert pupil.notes.calls == {
        "provider": (Route.SHARED, 999, 700.0, False, True),
        "adopt": (7.0,),
    }


@pytest.mark.parametrize(
    ("elapsed_ms", "overran", "learned", "failures"),
    [
        (400.0, False, {"provider_at_least": (Route.FILE, 999, 400.0, True)}, []),
        (
            400.0,
            True,
            {"provider_at_least": (Route.FILE, 999, 400.0, True)},
            [(Reason.PROVIDER_TIMEOUT, False)],
        ),
        (None, False, {"lock": (9.0,)}, []),
        (None, True, {"lock": (9.0,)}, [(Reason.LOCK_BUSY, False)]),
    ],
)
def test_run_stopped_teaches_that_it_takes_longer(
    pupil: Pupil,
    elapsed_ms: float | None,
    overran: bool,
    learned: dict[str, Any],
    failures: list[Any],
) -> None:
    """One that had not begun teaches the lock's wait; one that was to win is a failure."""
    pupil.record.lock_ms = 9.0
    pupil.lessons.run_stopped(Overtaken("", elapsed_ms, overran), 999, overlapped=True)
    assert (pupil.notes.calls, pupil.breaker.failures) == (learned, failures)
    assert pupil.touched == 1


def test_replied_decoders_own_prefill_teaches_its_rate(pupil: Pupil) -> None:
    """Evaluated on top of cached, the reply, the front, and how much of the slot came true."""
    pupil.reply(200, 800)
    pupil.record.template_ms, pupil.record.tokenize_ms = 1.0, 2.0
    pupil.lessons.expected_tokens = 300
    pupil.lessons.run_beside = True
    pupil.lessons.replied(TIMINGS, None, 1)
    assert pupil.notes.calls == {
        "decoder": (200, 800, 90.0, True),
        "reply": (5, 50.0),
        "reuse": (300, 200),
        "front": (1000, 3.0),
    }
    assert (pupil.reuse.wasted_in_row, pupil.touched) == (0, 1)


def test_replied_more_reused_than_expected_came_true(pupil: Pupil) -> None:
    """The decoder has hands of its own."""
    pupil.reply(900, 100)
    pupil.lessons.expected_tokens = 300
    pupil.lessons.replied({}, None, 1)
    assert pupil.notes.calls == {"reuse": (300, 300)}


def test_replied_used_handoff_says_nothing_of_the_slot_before(pupil: Pupil) -> None:
    """Nor is it held against the decoder."""
    pupil.lessons.expected_tokens = 300
    pupil.reply(999, 1, Outcome.USED)
    pupil.lessons.replied(TIMINGS, 999, 1)
    assert pupil.notes.calls == {"decoder": (999, 1, 90.0, False), "reply": (5, 50.0)}
    assert pupil.reuse.wasted_in_row == 0


def test_replied_wasted_handoff_counts(pupil: Pupil) -> None:
    """The decoder evaluated it all again, which shows its rate."""
    pupil.reply(0, 1000, Outcome.WASTED)
    pupil.lessons.replied(TIMINGS, 999, 1)
    assert pupil.notes.calls["decoder"] == (0, 1000, 90.0, False)
    assert pupil.reuse.wasted_in_row == 1


def test_replied_without_timings_teaches_nothing(pupil: Pupil) -> None:
    """Nothing is invented."""
    pupil.reply(0, 1000, Outcome.WASTED)
    pupil.lessons.replied(None, 999, 1)
    assert (pupil.notes.calls, pupil.reuse.wasted_in_row, pupil.touched) == ({}, 0, 0)


def test_box_that_slept_teaches_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts and sizes are as true as ever."""
    pupil = Pupil(monkeypatch, slept=True)
    pupil.lessons.run_ended(Route.FILE, 999, 9e6, overlapped=False, cold=False)
    pupil.lessons.run_stopped(Overtaken("", 9e6, overran=True), 999, overlapped=False)
    pupil.lessons.restored(Prefilled("s", 4000, 9e6), 999, 9e6)
    pupil.reply(0, 1000, Outcome.WASTED)
    pupil.lessons.replied(TIMINGS, 999, 1)
    assert pupil.notes.calls == {"state": (999, 4000)}
    assert pupil.reuse.wasted_in_row == 1
    assert pupil.lessons.failed(FAILURE) is FAILURE
    assert pupil.breaker.failures == [(Reason.PROVIDER_EXIT, True)]


def test_restored_teaches_restore_and_size(pupil: Pupil) -> None:
    """In bytes."""
    pupil.lessons.restored(Prefilled("s", 4000, 700.0), 999, 12.0)
    assert pupil.notes.calls == {"restore": (4000, 12.0), "state": (999, 4000)}


def watched(data: bytes) -> JsonWatch:
    """Return a watch that saw this."""
    watch = JsonWatch()
    watch.feed(data)
    return watch


PROMPT = Prompt([1] * 100, "p" * 100)
OTHER = Prompt([2] * 100, "o" * 100)
NEXT = Prompt([*[1] * 100, *[3] * 10], "p" * 100 + "hello you")
REPLY = b'{"choices": [{"text": "hello"}], "timings": {"predicted_n": 6, "predicted_ms": 1}}'


@pytest.mark.parametrize(
    ("prompt", "status", "data", "holds_next", "holds_before"),
    [
        (PROMPT, 200, REPLY, 105, 0),
        (PROMPT, 200, b'{"choices": [{"te', 100, 0),
        (PROMPT, 200, b"", 0, 0),
        (PROMPT, 200, None, 0, 0),
        (None, 200, REPLY, 0, 0),
        (PROMPT, None, None, 0, 0),
        (PROMPT, 500, b"{}", 0, 0),
        (PROMPT, 400, b"{}", 0, 99),
        (None, 404, b"{}", 0, 99),
    ],
    ids=[
        *("whole", "broken-off", "not-begun", "not-watched", "unknown", "no-reply"),
        *("failed", "refused", "unknown-refused"),
    ],
)
def test_slot_left_says_what_the_slot_holds(
    pupil: Pupil,
    prompt: Prompt | None,
    status: int | None,
    data: bytes | None,
    holds_next: int,
    holds_before: int,
) -> None:
    """Prompt and reply; the prompt alone of one broken off; as before, where it was refused."""
    pupil.lessons.slot_left(OTHER, 200, watched(b"{}"), restored=False)
    watch = None if data is None else watched(data)
    pupil.lessons.slot_left(prompt, status, watch, restored=False)
    assert pupil.memory.reusable(NEXT) == holds_next
    assert pupil.memory.reusable(OTHER) == holds_before
