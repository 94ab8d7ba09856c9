"""onebitd.core.breaker and failure_class: every class by real last words, the machine by tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from onebitd.core.breaker import LIMITS, Breaker, FailureClass, State, classify
from onebitd.core.handoff import Reason

BUSY, DENIED, TIMEOUT, CRASH = (
    FailureClass.BUSY,
    FailureClass.DENIED,
    FailureClass.TIMEOUT,
    FailureClass.CRASH,
)
WEDGED, BAD_STATE, SUSPENDED = (
    FailureClass.WEDGED,
    FailureClass.BAD_STATE,
    FailureClass.SUSPENDED,
)


@pytest.mark.parametrize(
    ("detail", "kind"),
    [
        ("status 1: open(/dev/accel/accel0): Permission denied", DENIED),
        ("status 1: PermissionError: [Errno 13] Permission denied: '/dev/accel/accel0'", DENIED),
        ("status 1: ioctl: Operation not permitted", DENIED),
        ("status 2: Failed to open KFD, err=-13", DENIED),
        ("status 2: open failed (err=1)", DENIED),
        ("status 126: setpriv: failed to execute /opt/prefill: Permission denied", DENIED),
        ("program /opt/prefill is not an executable file; check its mode", DENIED),
        ("program /opt/prefill cannot be started: Permission denied", DENIED),
        (
            "status 1: mmap(addr=0x7932, len=67108864, prot=3, flags=8209, offset=436) failed"
            " (err=-11): Resource temporarily unavailable",
            DENIED,
        ),
        (
            "signal 6 (SIGABRT):   what():  mmap(len=16777216, prot=3, flags=8193) failed (err=11):"
            " Resource temporarily unavailable",
            DENIED,
        ),
        ("status 1: mlock: Cannot allocate memory", DENIED),
        ("status 1: cannot lock memory, raise RLIMIT_MEMLOCK", DENIED),
        ("status 1: failed to pin pages", DENIED),
        (
            "status 1: DRM_IOCTL_AMDXDNA_CREATE_HWCTX IOCTL failed (err=16):"
            " Device or resource busy",
            BUSY,
        ),
        ("signal 6 (SIGABRT):   what():  create_hw_context: err=-16", BUSY),
        ("status 1: OSError: [Errno 16] Device or resource busy: '/dev/accel/accel0'", BUSY),
        ("status 1: CREATE_HWCTX failed: requested partition is busy (num_tiles=8)", BUSY),
        ("status 1: CREATE_HWCTX failed: no free partition available (num_tiles=8)", BUSY),
        ("status 1: no free hw context", BUSY),
        ("status 1: all NPU contexts are exhausted", BUSY),
        ("status 1: fork: Resource temporarily unavailable", BUSY),
        ("status 3: no XDNA device", CRASH),
        ("status 1: No such device with index '0'", CRASH),
        ("status 1: DRM_IOCTL_AMDXDNA_EXEC_CMD IOCTL failed (err=-5): Input/output error", CRASH),
        ("status 1: CREATE_BO failed (err=-1)", CRASH),
        ("status 1: step 13 of 16 failed", CRASH),
        ("status 1", CRASH),
        ("signal 11 (SIGSEGV)", CRASH),
        ("signal 9 (SIGKILL): device busy, waiting", CRASH),
        ("program /opt/prefill does not exist", CRASH),
    ],
)
def test_classify_exit_is_told_by_the_providers_last_words(detail: str, kind: FailureClass) -> None:
    """errno texts, XRT's and amdxdna's words; a fault signal is a crash whatever it said before."""
    assert classify(Reason.PROVIDER_EXIT, detail, slept=False) is kind


@pytest.mark.parametrize(
    ("reason", "detail", "kind"),
    [
        (Reason.LOCK_BUSY, "pid 12 (flm) has /tmp/lock", BUSY),
        (Reason.PROVIDER_TIMEOUT, "no result within 120 s (provider.timeout_s)", TIMEOUT),
        (Reason.PROVIDER_TIMEOUT, "no result within 120 s: EBUSY, waiting", TIMEOUT),
        (Reason.PROVIDER_TIMEOUT, "the provider (pid 77) cannot be killed: bye", WEDGED),
        (Reason.PROVIDER_TIMEOUT, "an earlier provider run (pid 7) cannot be killed", WEDGED),
        (Reason.PROVIDER_TIMEOUT, "no result within 1 s: the provider cannot be killed", TIMEOUT),
        (Reason.BAD_STATE, "layer 3: permission denied is what its name says", BAD_STATE),
        (Reason.PROVIDER_NO_FILE, "", BAD_STATE),
        (Reason.RESTORE_REFUSED, "", BAD_STATE),
        (Reason.RESTORE_SHORT, "", BAD_STATE),
        (Reason.ADOPT_REFUSED, "", BAD_STATE),
    ],
)
def test_classify_other_reasons_of_the_provider_need_no_words(
    reason: Reason, detail: str, kind: FailureClass
) -> None:
    """What a request has paid is what counts; words in a detail do not make it another class."""
    assert classify(reason, detail, slept=False) is kind


@pytest.mark.parametrize("slept", [False, True])
def test_classify_failures_that_are_not_the_providers_are_none(slept: bool) -> None:
    """A full disk, a client that left or a dead decoder say nothing about the provider."""
    theirs = {
        *(Reason.LOCK_BUSY, Reason.PROVIDER_EXIT, Reason.PROVIDER_TIMEOUT, Reason.BAD_STATE),
        *(Reason.PROVIDER_NO_FILE, Reason.RESTORE_REFUSED, Reason.RESTORE_SHORT),
        Reason.ADOPT_REFUSED,
    }
    for reason in Reason:
        found = classify(reason, "Permission denied", slept=slept)
        assert (found is not None) == (reason in theirs), reason


def test_classify_box_that_slept_is_suspended_unless_the_run_is_stuck() -> None:
    """What fails over a suspend says little; a process that cannot be killed is still there."""
    assert classify(Reason.PROVIDER_EXIT, "signal 11 (SIGSEGV)", slept=True) is SUSPENDED
    assert classify(Reason.PROVIDER_TIMEOUT, "no result within 9 s", slept=True) is SUSPENDED
    stuck = "the provider (pid 77) cannot be killed"
    assert classify(Reason.PROVIDER_TIMEOUT, stuck, slept=True) is WEDGED


@pytest.mark.parametrize(
    ("failures", "opens_at"),
    [
        ([BUSY] * 3, 3),
        ([DENIED] * 2, 2),
        ([TIMEOUT] * 2, 2),
        ([CRASH] * 3, 3),
        ([BAD_STATE] * 3, 3),
        ([WEDGED], 1),
        ([SUSPENDED], 1),
        ([CRASH, BUSY, BAD_STATE], 3),
        ([CRASH, TIMEOUT], 2),
        ([TIMEOUT, BUSY], 2),
        ([CRASH, SUSPENDED], 2),
    ],
)
def test_fail_in_a_row_opens_at_the_least_threshold_among_them(
    failures: Sequence[FailureClass], opens_at: int
) -> None:
    """Mixed classes count together; the pause is that of the last one."""
    breaker = Breaker()
    opened = [breaker.fail(kind, "x", 100.0) for kind in failures]
    assert opened == [False] * (opens_at - 1) + [True]
    assert (breaker.state, breaker.failure_class) == (State.OPEN, failures[-1])
    assert breaker.next_try_at == 100.0 + LIMITS[failures[-1]].first_s


def test_succeed_in_between_begins_the_count_again() -> None:
    """Failures count in a row only."""
    breaker = Breaker()
    for _ in range(5):
        assert not breaker.fail(TIMEOUT, "x", 1.0)
        breaker.succeed()
    assert (breaker.state, breaker.failures) == (State.CLOSED, 0)


def opened(kind: FailureClass) -> Breaker:
    """Return a breaker that this class has just opened, at 0."""
    breaker = Breaker()
    while not breaker.fail(kind, "why", 0.0):
        pass
    return breaker


@pytest.mark.parametrize(
    ("kind", "pauses"),
    [
        (BUSY, [5, 10, 20, 40, 60, 60]),
        (DENIED, [300, 300, 300]),
        (TIMEOUT, [60, 120, 240, 480, 960, 1920, 3600, 3600]),
        (CRASH, [10, 20, 40, 80, 160, 320, 600, 600]),
        (BAD_STATE, [60, 120, 240, 480, 960, 1920, 3600]),
        (SUSPENDED, [5, 5, 5]),
    ],
)
def test_end_try_in_vain_opens_again_with_the_next_longer_pause(
    kind: FailureClass, pauses: list[float]
) -> None:
    """Each try in vain doubles the pause, up to the last; and it is one breaker all the while."""
    breaker, now = opened(kind), 0.0
    for pause in pauses:
        assert breaker.next_try_at == now + pause
        assert not breaker.is_due(now + pause - 0.1)
        now += pause
        assert breaker.is_due(now)
        breaker.begin_try()
        assert (breaker.state, breaker.is_due(now)) == (State.HALF_OPEN, False)
        breaker.end_try(kind, "still", now)
    assert (breaker.state, breaker.opened_at) == (State.OPEN, 0.0)
    for _ in range(2000):
        breaker.begin_try()
        breaker.end_try(kind, "still", now)
    assert breaker.next_try_at == now + pauses[-1]


def test_end_try_that_said_nothing_about_the_provider_keeps_the_pause() -> None:
    """A decoder that restarted under the try is no reason to wait longer."""
    breaker = opened(TIMEOUT)
    breaker.begin_try()
    breaker.end_try(None, "the decoder died", 60.0)
    assert (breaker.state, breaker.failure_class) == (State.OPEN, TIMEOUT)
    assert breaker.next_try_at == 120.0
    assert "why" in str(breaker.sentence(60.0))


def test_end_try_of_another_class_goes_on_with_that_class() -> None:
    """A provider that hung and now crashes is tried again as one that crashes."""
    breaker = opened(TIMEOUT)
    breaker.begin_try()
    breaker.end_try(CRASH, "signal 11", 60.0)
    assert (breaker.failure_class, breaker.next_try_at) == (CRASH, 80.0)
    assert "crash, with timeout before it" in str(breaker.sentence(60.0))


def test_pass_try_closes_on_probation_until_a_handoff_was_used() -> None:
    """A short try that is good does not let two long prompts pay the limit again and again."""
    breaker = opened(TIMEOUT)
    breaker.begin_try()
    assert breaker.pass_try()
    assert (breaker.state, breaker.failures, breaker.failure_class) == (State.CLOSED, 0, None)
    assert breaker.fail(TIMEOUT, "x", 200.0)
    assert breaker.next_try_at == 320.0
    breaker.begin_try()
    breaker.pass_try()
    breaker.succeed()
    assert not breaker.fail(TIMEOUT, "x", 400.0)
    assert breaker.fail(TIMEOUT, "x", 400.0)
    assert breaker.next_try_at == 460.0


def test_results_of_runs_that_began_before_it_opened_change_nothing() -> None:
    """Only a try, or a reset, closes a breaker that is open, and nothing but a try prolongs it."""
    breaker = opened(CRASH)
    assert not breaker.fail(CRASH, "late", 5.0)
    breaker.succeed()
    assert (breaker.state, breaker.failures, breaker.next_try_at) == (State.OPEN, 3, 10.0)
    breaker.begin_try()
    breaker.succeed()
    assert breaker.state is State.HALF_OPEN


@pytest.mark.parametrize("half_open", [False, True])
def test_fail_wedged_while_not_closed_takes_over(half_open: bool) -> None:
    """The device that turns out not to answer is what has to be over first."""
    breaker = opened(TIMEOUT)
    if half_open:
        breaker.begin_try()
    assert breaker.fail(WEDGED, "accel0", 30.0)
    assert not breaker.fail(WEDGED, "accel0", 31.0)
    assert (breaker.state, breaker.failure_class) == (State.OPEN, WEDGED)
    assert (breaker.opened_at, breaker.next_try_at) == (0.0, 35.0)


def test_postpone_looks_again_less_and_less_often_and_costs_no_try() -> None:
    """While it is wedged, looking is all; the tries after it begin with the first pause."""
    breaker, now = opened(WEDGED), 5.0
    for pause in (10.0, 20.0, 40.0, 60.0, 60.0):
        breaker.postpone(now)
        assert breaker.next_try_at == now + pause
        now += pause
    breaker.begin_try()
    breaker.end_try(CRASH, "x", now)
    assert breaker.next_try_at == now + 20.0


@pytest.mark.parametrize("state", list(State))
def test_reset_closes_at_once_and_forgets_everything(state: State) -> None:
    """It says whether there was something to close; a try that is on then ends for nothing."""
    breaker = opened(CRASH) if state is not State.CLOSED else Breaker()
    if state is State.HALF_OPEN:
        breaker.begin_try()
    if state is State.CLOSED:
        breaker.fail(CRASH, "x", 0.0)
    assert breaker.reset() is (state is not State.CLOSED)
    assert (breaker.state, breaker.failures) == (State.CLOSED, 0)
    assert breaker.next_try_at == math.inf
    breaker.end_try(CRASH, "x", 1.0)
    assert not breaker.pass_try()
    assert breaker.state is State.CLOSED
    assert not breaker.fail(CRASH, "x", 2.0)


@pytest.mark.parametrize(
    ("kind", "now", "sentence"),
    [
        (
            TIMEOUT,
            17.0,
            "timeout twice in a row, not called for 17 s, last: why; tried again in 43 s",
        ),
        (
            TIMEOUT,
            90.0,
            "timeout twice in a row, not called for 90 s, last: why; tried again in a quiet moment",
        ),
        (DENIED, 1.0, "denied twice in a row, not called for 1 s, last: why; tried again in 5 min"),
        (CRASH, 0.0, "crash 3 times in a row, not called for 1 s, last: why; tried again in 10 s"),
        (
            WEDGED,
            2.0,
            "wedged, not called for 2 s, last: why;"
            " tried again once that is over, looked at in 3 s",
        ),
    ],
)
def test_sentence_has_class_since_when_last_failure_and_next_try(
    kind: FailureClass, now: float, sentence: str
) -> None:
    """All that an operator asks, in one sentence; without the words that may quote a prompt too."""
    breaker = opened(kind)
    assert breaker.sentence(now) == sentence
    wording = breaker.wording(now)
    assert wording is not None
    assert wording.brief == sentence.replace(", last: why", "")


def test_sentence_closed_is_none_and_half_open_says_so() -> None:
    """Nothing to say while the provider is called."""
    breaker = Breaker()
    breaker.fail(CRASH, "x", 0.0)
    assert breaker.sentence(1.0) is None
    breaker = opened(CRASH)
    breaker.begin_try()
    assert str(breaker.sentence(20.0)).endswith("; being tried now")
