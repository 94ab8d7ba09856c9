"""onebitd.services.provider_breaker: its times on a clock that jumps, and real providers' ends."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock

from onebitd.adapters import provider_process
from onebitd.adapters.process import Child, Guard
from onebitd.adapters.provider_process import run_provider
from onebitd.core.breaker import LIMITS, FailureClass, Limit, State
from onebitd.core.errors import HandoffError
from onebitd.core.handoff import Reason
from onebitd.services.provider_breaker import ProviderBreaker
from tests.harness import descendants

CRASHED = HandoffError(Reason.PROVIDER_EXIT, "signal 11 (SIGSEGV)")
HUNG = HandoffError(Reason.PROVIDER_TIMEOUT, "no result within 120 s (provider.timeout_s)")
DEVICE = Path("/dev/accel/accel0")


class Bench:
    """A breaker over a provider, a device and a line that are as the test says.

    Attributes:
        tries, ended: when the provider was tried, and when that ended.
        fault: what a try ends with; None when it is good.
        takes_s: how long a try takes.
        quiet: whether nobody needs the provider.
        stuck: whether a run cannot be killed.
        silent: the device that does not answer.
        asked: how often a device was asked.
        changes: how often `on_change` was called.
    """

    def __init__(self) -> None:
        self.tries: list[float] = []
        self.ended: list[float] = []
        self.fault: Exception | None = CRASHED
        self.takes_s = 0.0
        self.quiet = True
        self.stuck = False
        self.silent: Path | None = None
        self.asked = 0
        self.changes = 0
        self.breaker = ProviderBreaker(
            self._probe,
            lambda: self.stuck,
            may_probe=lambda: self.quiet,
            silent_node=self._silent_node,
            refusal=lambda detail: "join render" if "Permission" in detail else None,
        )
        self.breaker.on_change = self._note_change

    def _note_change(self) -> None:
        self.changes += 1

    async def _probe(self) -> None:
        self.tries.append(trio.current_time())
        try:
            await trio.sleep(self.takes_s)
        finally:
            self.ended.append(trio.current_time())
        if self.fault is not None:
            raise self.fault

    async def _silent_node(self) -> Path | None:
        self.asked += 1
        await trio.sleep(2.0 if self.silent else 0.0)
        return self.silent

    @property
    def state(self) -> State:
        """Of the breaker."""
        return self.breaker.status().state

    def fail(self, error: HandoffError, times: int = 1, *, slept: bool = False) -> None:
        """Note the same failure so often."""
        for _ in range(times):
            self.breaker.note_failure(error, slept=slept)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """Run a breaker; its tests name the clock that jumps, which is how they get it."""
    found = Bench()
    async with trio.open_nursery() as nursery:
        await nursery.start(found.breaker.run)
        yield found
        nursery.cancel_scope.cancel()


@pytest.fixture
def log() -> Iterator[list[Any]]:
    """Catch what is logged at info and above."""
    with capture_logs() as entries:
        yield entries


def events(log: list[Any]) -> list[tuple[str, str]]:
    """Return level and event of each line but the debugging ones."""
    return [(entry["log_level"], entry["event"]) for entry in log if entry["log_level"] != "debug"]


async def test_run_tries_again_in_the_background_until_it_is_good(
    autojump_clock: MockClock, bench: Bench, log: list[Any]
) -> None:
    """Pause, doubled at each try in vain; then requests are handed off again. One line each."""
    began = trio.current_time()
    bench.fail(CRASHED, 2)
    assert bench.breaker.status().state is State.CLOSED
    bench.fail(CRASHED)
    assert str(bench.breaker.out_of_service) == (
        "crash 3 times in a row, not called for 1 s, last: signal 11 (SIGSEGV); tried again in 10 s"
    )
    await trio.sleep(75)
    assert [moment - began for moment in bench.tries] == [10, 30, 70]
    bench.fault = None
    await trio.sleep(80)
    assert [moment - began for moment in bench.tries] == [10, 30, 70, 150]
    assert (bench.breaker.out_of_service, bench.breaker.brief) == (None, None)
    assert events(log) == [
        ("warning", "breaker_opened"),
        *[("info", "breaker_try_failed")] * 3,
        ("info", "breaker_closed"),
    ]
    assert (log[0]["failure_class"], log[0]["next_try_s"]) == ("crash", 10.0)
    assert bench.changes > 0
    await trio.sleep(1000)
    assert len(bench.tries) == 4


async def test_provider_that_always_hangs_costs_twenty_requests_two_limits(
    autojump_clock: MockClock, bench: Bench
) -> None:
    """Its 120 s delay the first two; the tries that follow delay nobody."""
    bench.fault, bench.takes_s = HUNG, 120.0
    waited_s = 0.0
    for _ in range(20):
        began = trio.current_time()
        if bench.breaker.out_of_service is None:
            await trio.sleep(120.0)
            bench.fail(HUNG)
        waited_s += trio.current_time() - began
        await trio.sleep(300)
    assert waited_s == 240.0
    assert len(bench.tries) >= 4


async def test_status_has_class_since_and_next_try(autojump_clock: MockClock, bench: Bench) -> None:
    """Null while it is closed; while it is being tried the next try is now."""
    bench.fail(CRASHED, 2)
    status = bench.breaker.status()
    assert (status.state, status.failures, status.failure_class) == (State.CLOSED, 2, None)
    assert (status.since, status.next_try_s, status.detail) == (None, None, None)
    bench.fail(HUNG)
    bench.takes_s = 50.0
    await trio.sleep(5)
    status = bench.breaker.status()
    assert (status.state, status.failure_class) == (State.OPEN, FailureClass.TIMEOUT)
    assert (status.next_try_s, status.failures) == (55.0, 3)
    since = status.since
    assert since is not None
    assert since.endswith("Z")
    await trio.sleep(60)
    status = bench.breaker.status()
    assert (status.state, status.next_try_s, status.since) == (State.HALF_OPEN, 0.0, since)
    assert str(status.detail).endswith("; being tried now")
    assert "no result within" not in str(bench.breaker.brief)


async def test_try_waits_for_a_moment_when_no_request_needs_the_provider(
    autojump_clock: MockClock, bench: Bench
) -> None:
    """Off the request path: it comes right after the last one."""
    bench.quiet = False
    bench.fail(CRASHED, 3)
    await trio.sleep(1000)
    assert bench.tries == []
    assert "in a quiet moment" in str(bench.breaker.out_of_service)
    bench.quiet = True
    await trio.sleep(1)
    assert len(bench.tries) == 1


async def test_note_success_begins_the_count_again(autojump_clock: MockClock, bench: Bench) -> None:
    """Only failures in a row open it."""
    for _ in range(4):
        bench.fail(CRASHED, 2)
        bench.breaker.note_success()
    assert bench.state is State.CLOSED


async def test_note_failure_of_somebody_else_does_not_count(
    autojump_clock: MockClock, bench: Bench
) -> None:
    """A full disk and a decoder that died are not the provider's; the error comes back as it is."""
    for reason in (Reason.NO_SPACE, Reason.BACKEND_DOWN, Reason.CLIENT_GONE, Reason.LOCK_UNUSABLE):
        error = HandoffError(reason, "Permission denied")
        for _ in range(5):
            assert bench.breaker.note_failure(error, slept=True) is error
    assert bench.breaker.status().failures == 0


async def test_note_failure_denied_tells_what_this_process_lacks(
    autojump_clock: MockClock, bench: Bench
) -> None:
    """In the request's own detail, and in the breaker's; tried again after five minutes."""
    denied = HandoffError(Reason.PROVIDER_EXIT, "status 1: Permission denied", slot_touched=True)
    told = bench.breaker.note_failure(denied, slept=False)
    assert (told.reason, told.slot_touched) == (Reason.PROVIDER_EXIT, True)
    assert told.detail == "status 1: Permission denied; join render"
    bench.fail(denied)
    assert "last: status 1: Permission denied; join render;" in str(bench.breaker.out_of_service)
    assert bench.breaker.status().next_try_s == 300.0
    bench.fault = denied
    await trio.sleep(301)
    assert "join render" in str(bench.breaker.out_of_service)


async def test_note_failure_of_a_box_that_slept_is_tried_after_five_seconds(
    autojump_clock: MockClock, bench: Bench
) -> None:
    """At once out of service, and back as soon as the driver is."""
    bench.fail(HUNG, slept=True)
    assert bench.breaker.status().failure_class is FailureClass.SUSPENDED
    bench.fault = None
    await trio.sleep(5.1)
    assert bench.state is State.CLOSED
    assert bench.asked == 0


async def test_timeout_with_a_silent_device_is_wedged_and_starts_nothing(
    autojump_clock: MockClock, bench: Bench, log: list[Any]
) -> None:
    """One hanging run is enough then; only when the device answers is the provider tried."""
    bench.silent = DEVICE
    bench.fail(HUNG)
    assert bench.state is State.CLOSED
    await trio.sleep(3)
    status = bench.breaker.status()
    assert (status.state, status.failure_class) == (State.OPEN, FailureClass.WEDGED)
    assert "/dev/accel/accel0 does not answer an open()" in str(status.detail)
    await trio.sleep(1000)
    assert (bench.tries, events(log)) == ([], [("warning", "breaker_opened")])
    bench.silent, bench.fault = None, None
    await trio.sleep(61)
    assert (len(bench.tries), bench.state) == (1, State.CLOSED)


async def test_timeout_with_a_device_that_answers_is_a_timeout(
    autojump_clock: MockClock, bench: Bench
) -> None:
    """It is asked once for each, and before each try."""
    bench.fail(HUNG)
    await trio.sleep(1)
    assert (bench.asked, bench.state) == (1, State.CLOSED)
    bench.fail(HUNG)
    await trio.sleep(61)
    assert (bench.asked, len(bench.tries)) == (3, 1)


async def test_run_that_is_stuck_is_wedged_without_any_failure_noted(
    autojump_clock: MockClock, bench: Bench
) -> None:
    """Its client may have left, and then nobody tells; it is tried again when it has gone."""
    bench.stuck = True
    assert "wedged" in str(bench.breaker.out_of_service)
    await trio.sleep(500)
    assert (bench.tries, bench.asked) == ([], 0)
    bench.stuck, bench.fault = False, None
    await trio.sleep(61)
    assert (len(bench.tries), bench.state) == (1, State.CLOSED)


@pytest.mark.parametrize("how", ["reset", "reconfigure"])
async def test_reset_closes_at_once_and_ends_a_try_that_is_on(
    autojump_clock: MockClock, bench: Bench, log: list[Any], how: str
) -> None:
    """Whoever asked has repaired it: the next request goes to the provider, not behind a try."""
    assert bench.breaker.reset() is False
    bench.takes_s, bench.fault = 1000.0, HUNG
    bench.fail(CRASHED, 3)
    await trio.sleep(11)
    assert bench.state is State.HALF_OPEN
    if how == "reset":
        assert bench.breaker.reset() is True
    else:
        bench.breaker.reconfigure()
    assert (bench.state, bench.breaker.out_of_service) == (State.CLOSED, None)
    await trio.sleep(1)
    assert len(bench.ended) == 1
    await trio.sleep(3000)
    assert (bench.state, bench.breaker.status().failures) == (State.CLOSED, 0)
    assert events(log) == [("warning", "breaker_opened"), ("info", "breaker_closed")]
    bench.fail(CRASHED, 3)
    await trio.sleep(11)
    assert len(bench.tries) == 2


async def test_try_that_meets_a_fault_of_ours_leaves_it_open(
    autojump_clock: MockClock, bench: Bench, log: list[Any]
) -> None:
    """What serves goes on; the provider has done nothing, so the pause stays."""
    bench.fault = RuntimeError("planted")
    bench.fail(CRASHED, 3)
    await trio.sleep(35)
    assert len(bench.tries) == 3
    assert ("error", "internal_error") in events(log)
    assert bench.breaker.status().failure_class is FailureClass.CRASH


# Real providers, on a real clock.


class Provider:
    """Runs a shell script as a provider, and tells a breaker how it ended."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self.stuck: Child | None = None
        self.script = ""
        self.breaker = ProviderBreaker(self._probe, lambda: self.stuck is not None)

    async def _probe(self) -> None:
        await self._run(20.0)

    async def _run(self, timeout_s: float) -> None:
        def note_stuck(child: Child) -> None:
            self.stuck = child

        await run_provider(
            ["/bin/sh", "-c", self.script],
            env={"PATH": os.environ["PATH"]},
            timeout_s=timeout_s,
            guard=self._guard,
            on_line=lambda _name, _line: None,
            on_stuck=note_stuck,
        )

    async def fail(self, script: str, timeout_s: float = 20.0) -> None:
        """Run it once, in vain."""
        self.script = script
        with pytest.raises(HandoffError) as caught:
            await self._run(timeout_s)
        self.breaker.note_failure(caught.value, slept=False)


@pytest.fixture
def provider() -> Iterator[Provider]:
    """Make one, and see that no process is left."""
    guard = Guard()
    before = set(descendants(os.getpid()))
    yield Provider(guard)
    assert set(descendants(os.getpid())) == before
    guard.close()


@pytest.mark.parametrize(
    ("script", "runs", "kind"),
    [
        ("echo 'open(/dev/accel/accel0): Permission denied' >&2; exit 1", 2, "denied"),
        ("echo 'CREATE_HWCTX: Device or resource busy' >&2; exit 1", 3, "busy"),
        ("echo 'Device or resource busy' >&2; kill -SEGV $$", 3, "crash"),
        ("exit 3", 3, "crash"),
        ("sleep 60", 2, "timeout"),
        ("trap '' TERM; sleep 60 & wait; wait; sleep 60", 2, "timeout"),
    ],
)
async def test_real_provider_that_goes_on_failing_opens_its_class(
    provider: Provider, script: str, runs: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each class, made by a program that ends like that."""
    monkeypatch.setattr(provider_process, "_TERM_GRACE_S", 0.1)
    for _ in range(runs):
        assert provider.breaker.out_of_service is None
        await provider.fail(script, 0.05 if kind == "timeout" else 20.0)
    status = provider.breaker.status()
    assert (status.state, status.failure_class) == (State.OPEN, kind)


async def test_real_provider_that_cannot_be_killed_is_wedged_until_it_has_gone(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No signal reaches it, as in uninterruptible sleep; when it ends, the provider is tried."""
    with monkeypatch.context() as patched:
        patched.setattr(Child, "signal", lambda *_: None)
        patched.setattr(provider_process, "_TERM_GRACE_S", 0.1)
        patched.setattr(provider_process, "_KILL_GRACE_S", 0.1)
        patched.setitem(LIMITS, FailureClass.WEDGED, Limit(1, 0.1, 0.1))
        await provider.fail("exec sleep 60", 0.05)
    status = provider.breaker.status()
    assert (status.state, status.failure_class) == (State.OPEN, FailureClass.WEDGED)
    assert "cannot be killed" in str(status.detail)
    provider.script = "exit 0"
    stuck, closed = provider.stuck, trio.Event()
    assert stuck is not None
    async with trio.open_nursery() as nursery:
        await nursery.start(provider.breaker.run)
        assert await stuck.stop(term_grace_s=0.0, kill_grace_s=20.0)
        provider.stuck = None
        provider.breaker.on_change = lambda: (
            closed.set() if provider.breaker.out_of_service is None else None
        )
        with trio.fail_after(30):
            await closed.wait()
        nursery.cancel_scope.cancel()
