"""The breaker around the provider: counts, asks the device, tries again in the background.

Every decision is `core.breaker`'s; here are its effects: the log, the clock, and the task that
tries the provider while no request needs it.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import structlog
import trio

from onebitd.adapters import device_access
from onebitd.adapters.suspend_clock import SuspendWatch
from onebitd.core.breaker import Breaker, BreakerStatus, FailureClass, State, classify
from onebitd.core.control_api import rfc3339
from onebitd.core.errors import HandoffError
from onebitd.core.wording import Wording

log = structlog.get_logger()

_QUIET_POLL_S: Final = 0.5
_ASKED_BEFORE_A_TRY: Final = (FailureClass.TIMEOUT, FailureClass.WEDGED)


async def _no_node() -> Path | None:
    return None


class ProviderBreaker:
    """Says whether the provider is to be called.

    Args:
        probe: one whole try of the provider, bounded in time; raises HandoffError when it failed.
            It is cancelled when the breaker is reset.
        is_stuck: says whether a run that cannot be killed is still there.
        may_probe: says whether no request needs the provider, or what else a try takes.
        silent_node: returns a device that does not answer, None when all do.
        refusal: returns a sentence on what this process lacks, for what a refused provider said.

    Attributes:
        on_change: called when something changed that `status` shows.
    """

    def __init__(
        self,
        probe: Callable[[], Awaitable[None]],
        is_stuck: Callable[[], bool],
        *,
        may_probe: Callable[[], bool] = lambda: True,
        silent_node: Callable[[], Awaitable[Path | None]] = _no_node,
        refusal: Callable[[str], str | None] = device_access.refusal,
    ) -> None:
        self._probe = probe
        self._is_stuck = is_stuck
        self._may_probe = may_probe
        self._silent_node = silent_node
        self._refusal = refusal
        self._breaker = Breaker()
        self._since: str | None = None
        self._news = trio.Event()
        self._device_is_asked = False
        self._trying = trio.CancelScope()
        self.on_change: Callable[[], None] = lambda: None

    # What a request and the status ask.

    @property
    def wording(self) -> Wording | None:
        """Why the provider is not called, None while it is."""
        self._see_stuck()
        return self._breaker.wording(trio.current_time())

    @property
    def out_of_service(self) -> str | None:
        """The sentence with the provider's words, for those who run it."""
        wording = self.wording
        return None if wording is None else wording.full

    @property
    def brief(self) -> str | None:
        """The sentence without the provider's words, which may quote a prompt: for everybody."""
        wording = self.wording
        return None if wording is None else wording.brief

    def status(self) -> BreakerStatus:
        """Return what `status` shows."""
        sentence, breaker = self.out_of_service, self._breaker
        if breaker.state is State.CLOSED:
            return BreakerStatus(failures=breaker.failures)
        left_s = breaker.next_try_at - trio.current_time() if breaker.state is State.OPEN else 0.0
        return BreakerStatus(
            breaker.state,
            breaker.failures,
            breaker.failure_class,
            self._since,
            round(max(0.0, left_s), 3),
            sentence,
        )

    # What a request tells.

    def note_failure(self, error: HandoffError, *, slept: bool) -> HandoffError:
        """Count a failed handoff, if it was the provider's.

        Args:
            error: why it failed.
            slept: the box was suspended meanwhile.

        Returns:
            The same, with what this process lacks in its detail where something was denied.
        """
        kind, error = self._judged(error, slept=slept)
        if kind is None:
            return error
        if kind is FailureClass.TIMEOUT:
            self._device_is_asked = True
            self._news.set()
        self._fail(kind, error.detail)
        return error

    def note_success(self) -> None:
        """A handoff was used: the count begins again. Only a try closes a breaker that is open."""
        self._breaker.succeed()

    def reset(self) -> bool:
        """Close it at once; True when it was not closed."""
        was_open = self._breaker.reset()
        self._device_is_asked = False
        self._trying.cancel()
        if was_open:
            self._note_closed("reset")
        return was_open

    def reconfigure(self) -> None:
        """Another provider: what the last one did says nothing about it."""
        self.reset()

    # The work.

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Ask devices and try the provider when it is time, until cancelled."""
        task_status.started()
        while True:
            await self._wait_work()
            if self._device_is_asked:
                await self._ask_device()
            if self._breaker.is_due(trio.current_time()):
                await self._try_again()

    async def _wait_work(self) -> None:
        while not self._device_is_asked and not self._breaker.is_due(trio.current_time()):
            with trio.move_on_at(self._breaker.next_try_at):
                await self._news.wait()
            self._news = trio.Event()
            await trio.lowlevel.checkpoint()

    async def _ask_device(self) -> None:
        """A provider that hung may have hung in its device's driver; the next one would, too."""
        self._device_is_asked = False
        await self._device_answers()

    async def _device_answers(self) -> bool:
        node = await self._silent_node()
        if node is not None:
            self._fail(FailureClass.WEDGED, f"{node} does not answer an open()")
        return node is None

    async def _try_again(self) -> None:
        """Try the provider, if what made it wedged is over and nobody needs it."""
        breaker = self._breaker
        if self._is_stuck():
            breaker.postpone(trio.current_time())
        elif not self._may_probe():
            await trio.sleep(_QUIET_POLL_S)
        elif breaker.failure_class in _ASKED_BEFORE_A_TRY and not await self._device_answers():
            breaker.postpone(trio.current_time())
        elif breaker.state is State.OPEN:  # still: the device took its time
            await self._run_probe()

    async def _run_probe(self) -> None:
        breaker = self._breaker
        breaker.begin_try()
        self.on_change()
        watch = SuspendWatch()
        log.debug("breaker_half_open", line="the provider is tried again")
        kind: FailureClass | None = None
        detail = ""
        with trio.CancelScope() as self._trying:
            try:
                await self._probe()
            except HandoffError as error:
                kind, error = self._judged(error, slept=watch.slept())
                detail = error.detail
            except Exception:
                log.exception("internal_error", path="breaker")
            else:
                if breaker.pass_try():
                    self._note_closed("a try was good")
                return
        if breaker.state is State.HALF_OPEN:
            self._note_try_failed(kind, detail)

    def _judged(
        self, error: HandoffError, *, slept: bool
    ) -> tuple[FailureClass | None, HandoffError]:
        kind = classify(error.reason, error.detail, slept=slept)
        if kind is not None and self._is_stuck():
            kind = FailureClass.WEDGED
        if kind is not FailureClass.DENIED or (more := self._refusal(error.detail)) is None:
            return kind, error
        why = error.why + f"; {more}"
        return kind, HandoffError(error.reason, why, slot_touched=error.slot_touched)

    def _see_stuck(self) -> None:
        """A run whose client has left may be stuck, too, and then no failure was noted."""
        if self._breaker.failure_class is not FailureClass.WEDGED and self._is_stuck():
            self._fail(FailureClass.WEDGED, "a run of the provider cannot be killed")

    def _fail(self, kind: FailureClass, detail: str) -> None:
        was_open = self._breaker.state is not State.CLOSED
        if not self._breaker.fail(kind, detail, trio.current_time()):
            return
        if not was_open:
            self._since = rfc3339(dt.datetime.now(dt.UTC))
        self._trying.cancel()
        self._log_opened()

    def _log_opened(self) -> None:
        now, breaker = trio.current_time(), self._breaker
        log.warning(
            "breaker_opened",
            failure_class=breaker.failure_class,
            failures=breaker.failures,
            next_try_s=round(breaker.next_try_at - now, 3),
            line=f"the provider is not called for now: {breaker.sentence(now)}",
        )
        self._news.set()
        self.on_change()

    def _note_try_failed(self, kind: FailureClass | None, detail: str) -> None:
        breaker = self._breaker
        before = breaker.failure_class
        breaker.end_try(kind, detail, trio.current_time())
        if breaker.failure_class is not before:
            self._log_opened()
            return
        now = trio.current_time()
        log.info(
            "breaker_try_failed",
            failure_class=breaker.failure_class,
            next_try_s=round(breaker.next_try_at - now, 3),
            line=f"the provider was tried in vain: {breaker.sentence(now)}",
        )
        self.on_change()

    def _note_closed(self, why: str) -> None:
        self._since = None
        log.info("breaker_closed", why=why, line=f"the provider is called again: {why}")
        self._news.set()
        self.on_change()
