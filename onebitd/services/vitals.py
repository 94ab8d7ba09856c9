"""The decoder's vital signs, beside the end of its process: errors in a row, and silence.

A decoder may answer every request with an error while its `/health` says ok, or stop answering at
all. The first is asked for one token while nobody has the slot; the second is looked at as long as
it owes an answer. Either is killed, and so restarted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import structlog
import trio

from onebitd.adapters.calls import Calls
from onebitd.adapters.process_progress import ProgressReader
from onebitd.core.errors import BackendError, BackendGone, BackendRefused
from onebitd.core.vitals import Look, Progress, Stillness, Suspicion, is_failure, look_pause_s
from onebitd.services.admission import Admission
from onebitd.services.supervisor import BackendFacts, Supervisor

log = structlog.get_logger()

_PROBE_TOKENS: Final = (1,)
_PROBES: Final = 2
"""One error may still be a leftover of the request before."""
_PROBE_PAUSE_S: Final = 0.1
_LENT_PAUSE_S: Final = 0.5
_WAIT_S: Final = 5.0
_FAULT_PAUSE_S: Final = 2.0


class Vitals:
    """Watches one decoder after the other.

    Args:
        supervisor: has the decoder.
        admission: the line for its slot.
        forget_slot: called when the slot does not hold any more what it did.
        hang_s: `backend.hang_s`.
        read: the progress of a process.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        admission: Admission,
        forget_slot: Callable[[], None],
        hang_s: float,
        read: Callable[[int], Awaitable[Progress | None]] | None = None,
    ) -> None:
        self._supervisor = supervisor
        self._admission = admission
        self._forget_slot = forget_slot
        self._hang_s = hang_s
        self._read = ProgressReader().read if read is None else read
        self._reconfigured = trio.Event()
        self._suspicion = Suspicion()
        self._suspected = trio.Event()
        self._generation = -1

    def reconfigure(self, hang_s: float) -> None:
        """Take over a new `backend.hang_s`."""
        self._hang_s = hang_s
        self._reconfigured.set()
        self._reconfigured = trio.Event()

    # What a request calls.

    def note_status(self, facts: BackendFacts, status: int, *, generated: bool = True) -> None:
        """Take note of how a request was answered that was forwarded as it came.

        Args:
            facts: of the decoder that answered it.
            status: of its reply; 502 where that was none.
            generated: it was one for the slot, so a good reply says that the slot is well.
        """
        self._see(facts)
        if facts.generation != self._generation:
            return
        if is_failure(status):
            self._suspicion.failed(status)
            self._suspected.set()
        elif generated and status < 400:
            self._suspicion.worked()

    async def make_sure(self, facts: BackendFacts) -> BackendFacts:
        """Probe a decoder that has failed too often; the slot is the caller's.

        Returns:
            what is known of the decoder, or of the one that had to take its place.

        Raises:
            RequestError: there is none.
        """
        self._see(facts)
        if facts.generation == self._generation and self._suspicion.is_urgent(trio.current_time()):
            await self._probe(facts)
            return await self._supervisor.wait_ready()
        return facts

    def _see(self, facts: BackendFacts) -> None:
        """A decoder that has just started has done nothing wrong yet."""
        if facts.generation > self._generation:
            self._generation = facts.generation
            self._suspicion = Suspicion()

    # The work.

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._forever, self._probe_when_idle)
            nursery.start_soon(self._forever, self._look_while_it_owes)
            task_status.started()

    async def _forever(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except Exception:
                # What serves goes on: a fault in here must not end it.
                log.exception("internal_error", path="vitals")
                await trio.sleep(_FAULT_PAUSE_S)

    async def _probe_when_idle(self) -> None:
        """Wait for a suspicion, then for a moment without requests, and probe."""
        await self._suspected.wait()
        wait_s = self._suspicion.wait_s(trio.current_time())
        if wait_s is None:
            self._suspected = trio.Event()
            return
        if wait_s > 0:
            await trio.sleep(min(wait_s, _WAIT_S))  # another decoder may be there by then
            return
        await self._admission.wait_empty()
        if self._admission.is_closed:
            await trio.sleep_forever()
        facts = self._supervisor.facts
        if facts is not None:
            self._see(facts)
        if facts is None or self._suspicion.wait_s(trio.current_time()) != 0:
            self._suspected = trio.Event()
            return
        with self._admission.lend("") as loan:
            if loan is not None:
                await self._probe(facts)
        if loan is None:
            await trio.sleep(_LENT_PAUSE_S)  # an audit has it

    async def _probe(self, facts: BackendFacts) -> None:
        """Have the decoder evaluate one token, and kill it if it cannot; the slot is ours."""
        failures, status = self._suspicion.failures, self._suspicion.status
        self._forget_slot()
        error: BackendError | None = None
        for _ in range(_PROBES):
            error = await self._try(facts)
            if error is None or self._supervisor.facts is not facts:
                break
            await trio.sleep(_PROBE_PAUSE_S)
        if self._supervisor.facts is not facts:
            return
        if error is None:
            self._suspicion.found_well(trio.current_time())
            log.info(
                "backend_probed",
                line=f"the decoder answered {status}, but evaluates a token as it should",
                failures=failures,
            )
            return
        how = "answers nothing of use"
        if isinstance(error, BackendRefused):
            how = f"answers {error.status} to everything"
        reason = f"it {how}: {failures} in a row, and {_PROBES} times one token: {error}"
        if isinstance(error, BackendGone):  # perhaps it has died just now
            await self._supervisor.kill_unless_gone(facts, reason, its_own_fault=True)
        else:
            self._supervisor.kill(reason)

    async def _try(self, facts: BackendFacts) -> BackendError | None:
        try:
            await facts.server.fill_slot(_PROBE_TOKENS)
        except BackendRefused as error:
            return error if is_failure(error.status) else None
        except BackendError as error:
            return error
        return None

    async def _look_while_it_owes(self) -> None:
        """Wait until the decoder owes an answer; look at it as long as it does."""
        if not self._hang_s:
            await self._reconfigured.wait()
            return
        calls, stillness = self._supervisor.calls, Stillness()
        await calls.wait_any()
        while calls and self._hang_s:
            await trio.sleep(look_pause_s(self._hang_s, is_silent=stillness.is_silent))
            facts, pid = self._supervisor.facts, self._supervisor.pid
            if facts is None or pid is None:
                return  # it loads, or is being replaced: the supervisor's affair
            self._see(facts)
            look = await self._look(facts, pid, calls, ask=stillness.is_silent)
            why = stillness.hang(look, self._hang_s)
            if why is not None and self._supervisor.facts is facts:
                self._supervisor.kill(why)
                return

    async def _look(self, facts: BackendFacts, pid: int, calls: Calls, *, ask: bool) -> Look:
        at, heard, waiting = trio.current_time(), calls.heard(), calls.waiting()
        progress = await self._read(pid) if waiting else None
        limit_s = look_pause_s(self._hang_s, is_silent=True)
        return Look(at, heard, waiting, progress, ask and await _answers_health(facts, limit_s))


async def _answers_health(facts: BackendFacts, limit_s: float) -> bool:
    with trio.move_on_after(limit_s):
        try:
            await facts.server.is_ready()
        except BackendRefused:
            return True
        except BackendError:
            return False
        return True
    return False
