"""Provider runs: one at a time, under the device lock, from ids to a checked state file."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, TypeAlias

import structlog
import trio

from onebitd.adapters.bad_states import BadStates
from onebitd.adapters.device_lock import DeviceLock
from onebitd.adapters.directory_watch import DirectoryWatch
from onebitd.adapters.process import Child, Guard
from onebitd.adapters.provider_process import run_provider
from onebitd.adapters.share_listener import Shared
from onebitd.adapters.slot_files import RunFiles, SlotFiles
from onebitd.core import provider_contract
from onebitd.core.config import Config
from onebitd.core.errors import HandoffError
from onebitd.core.handoff import HandoffRecord, Reason
from onebitd.core.state_data import Baseline
from onebitd.core.state_layout import Layout
from onebitd.core.wording import Wording
from onebitd.services.admission import Ticket
from onebitd.services.child_output import ChildOutput

log = structlog.get_logger()

_LOCK_CHECK_S: Final = 10.0
"""How often to see whether a lock that is held for life is still the file at its path."""

ProviderState: TypeAlias = Literal["none", "idle", "running", "stuck"]


@dataclasses.dataclass(frozen=True, slots=True)
class Prefilled:
    """A run that ended well.

    Attributes:
        name: of the checked state file in the slot directory, which is the caller's to remove.
        size: of the file in bytes.
        run_ms: from the start of the program to the end of the check.
    """

    name: str
    size: int
    run_ms: float


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    """The run that is on: whose it is, and when its program was started (trio.current_time())."""

    ticket: Ticket
    began: float

    @property
    def elapsed_ms(self) -> float:
        """Since its start."""
        return (trio.current_time() - self.began) * 1000.0


class ProviderRuns:
    """Runs the provider for one request after the other.

    Args:
        config: the effective configuration.
        slots: where state files live.
        lock: the device lock, None when none is to be taken.
        guard: kills a provider when the daemon dies.
        environ: what a provider inherits.
        swa_window: the model's sliding window in tokens, None without one.
        llama_server: the decoder's program, for a provider that runs one too.
        bad_states: keeps refused state files.
    """

    def __init__(
        self,
        config: Config,
        slots: SlotFiles,
        lock: DeviceLock | None,
        guard: Guard,
        environ: Mapping[str, str],
        swa_window: int | None,
        llama_server: str,
        bad_states: BadStates,
    ) -> None:
        self._config = config
        self._slots = slots
        self._bad_states = bad_states
        self._lock = lock
        self._guard = guard
        self._environ = environ
        self._swa_window = swa_window
        self._llama_server = llama_server
        self._watch = DirectoryWatch()  # of the one run
        self._turn = trio.Lock()  # one run at a time, in the line's order
        self._in_use: DeviceLock | None = None  # the lock that the run or the stuck one has
        self._stuck: Child | None = None
        self.running: Running | None = None  # the last one, while its turn lasts
        self.ended_well = 0  # runs of this provider since the start
        self._running = False
        self._ended = False
        self._stuck_event = trio.Event()
        self._output = ChildOutput("provider_output", "provider", "provider")

    @property
    def state(self) -> ProviderState:
        """For `status`: what the provider is doing."""
        if self._stuck is not None:
            return "stuck"
        if self._running:
            return "running"
        return "none" if self._config.provider.program is None else "idle"

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the lock for the daemon's life if so configured, and reap runs that got stuck."""
        self._watch.open()
        try:
            self._clear_stale_line()
            why_not = await self.hold_for_life(self._config.lock.wait_s)
            if why_not is not None:
                log.warning("lock_not_taken", reason=why_not.reason, detail=why_not.detail)
            task_status.started()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_for_life)
                nursery.start_soon(self._reap_stuck)
                nursery.start_soon(self._bad_states.run)
        finally:
            self._ended = True
            self._watch.close()
            for lock in (self._lock, self._in_use):
                if lock is not None:
                    lock.release()

    async def _reap_stuck(self) -> None:
        while True:
            await self._stuck_event.wait()
            self._stuck_event = trio.Event()
            if self._stuck is not None:
                await self._stuck.wait_gone()
                log.warning("provider_gone", pid=self._stuck.pid)
                self._stuck = None
                self._end_use()

    def _clear_stale_line(self) -> None:
        line = None if self._lock is None else self._lock.clear_stale()
        if line is not None:
            log.info(
                "lock_line_cleared",
                owner_line=line,
                line=f"cleared the line of a process that is gone: {line}",
            )

    async def _keep_for_life(self) -> None:
        """See now and then that a lock which is to be held for the daemon's life really is.

        Whoever removes the file lets the next comer lock a new one, and then two have the device;
        and a lock that could not be had at the start may be free by now.
        """
        while True:
            await trio.sleep(_LOCK_CHECK_S)
            lock = self._lock
            if lock is None or not self._is_for_life(lock) or lock.still_ours():
                continue
            async with self._turn:  # the run that is on has seen to it itself
                was_lost = _drop_if_lost(lock)
            why_not = await self.hold_for_life(0.0)
            if why_not is None and lock.held:
                log.info("lock_taken", line=f"{lock.path} is held for the daemon's life")
            elif why_not is not None and was_lost:
                log.warning("lock_not_taken", reason=why_not.reason, detail=why_not.detail)

    def reconfigure(self, config: Config, lock: DeviceLock | None) -> None:
        """Take over a new configuration; a run that is on keeps its settings and its lock.

        Args:
            config: effective from now on.
            lock: the one that runs take from now on; another object only for another path.

        A lock that is held for the daemon's life and is not to be any more is given back here;
        `hold_for_life` takes one that is.
        """
        before, self._lock = self._lock, lock
        if self._config.provider != config.provider:
            self.ended_well = 0
        self._config = config
        if before is not None and before is not self._in_use and not self._is_for_life(before):
            before.release()

    def _is_for_life(self, lock: DeviceLock) -> bool:
        keeps = self._config.lock.hold == "lifetime" and not self._ended
        return keeps and lock is self._lock

    async def hold_for_life(self, patience_s: float) -> HandoffError | None:
        """Take the lock, if it is to be held for the daemon's life and is not held yet.

        Waits for the run that is on, and for other holders, no longer than `patience_s` in all.

        Returns:
            Why the lock could not be taken; the next run then tries again and keeps it.
        """
        lock = self._lock
        if lock is None or lock.held or not self._is_for_life(lock):
            return None
        deadline = trio.current_time() + patience_s
        if not await self._got_turn(deadline):
            # A run that has the lock keeps it from now on.
            return None if lock.held else _taken_by_next_run(lock)
        try:  # requests wait for the turn, not for the lock behind it
            if not lock.held:
                await lock.wait_acquired(max(0.0, deadline - trio.current_time()))
            if not self._is_for_life(lock):
                lock.release()  # a reload or the end came in between
        except HandoffError as error:
            return error
        finally:
            self._turn.release()
        return None

    async def _got_turn(self, deadline: float) -> bool:
        await trio.lowlevel.checkpoint_if_cancelled()
        with contextlib.suppress(trio.WouldBlock):
            self._turn.acquire_nowait()  # no turn of the loop where nobody is in the way
            return True
        with trio.move_on_at(deadline) as waiting:
            await self._turn.acquire()
        return not waiting.cancelled_caught

    def _end_use(self) -> None:
        """The run's lock is free, unless it is held for the daemon's life."""
        lock, self._in_use = self._in_use, None
        if lock is not None and not self._is_for_life(lock):
            lock.release()

    def _note_stuck(self, child: Child) -> None:
        self._stuck = child
        self._stuck_event.set()
        log.error(
            "provider_stuck",
            pid=child.pid,
            line=f"the provider (pid {child.pid}) cannot be killed; no new run starts until it is "
            "gone, and the device lock stays with it",
        )

    async def prefill(
        self,
        tokens: list[int],
        layout: Layout,
        record: HandoffRecord,
        ticket: Ticket,
        config: Config,
        baseline: Baseline | None = None,
        refusal: Callable[[], Wording | None] = lambda: None,
    ) -> Prefilled:
        """Have the provider prefill these tokens; the caller removes the state file.

        Args:
            tokens: what it is to prefill.
            layout, baseline: what the state file must match.
            record: gets the times.
            ticket: its phase is set.
            config: what the request began with: its provider runs. The lock is the one that is
                configured by the time of the run.
            refusal: asked when the turn has come: why the provider is not to be called any more.

        Raises:
            HandoffError: with the reason.
        """
        ticket.phase = "lock"
        async with self._its_turn():
            self._refuse_if_stuck()
            why_not = refusal()
            if why_not is not None:
                raise HandoffError(Reason.BREAKER_OPEN, why_not)
            self._slots.check_space(layout.bytes_for(len(tokens)))
            with self._run_files(tokens) as run:
                argv = provider_contract.file_route_argv(
                    _program(config),
                    tokens_file=run.tokens_path,
                    state_file=run.state_path,
                    model=config.model.path,
                    elfs=config.provider.elfs,
                )
                wanted = (layout, tokens, self._swa_window, baseline)
                early = run.early_check(self._watch, *wanted)
                try:
                    async with early.running():
                        await self._run_locked(argv, record, ticket, config)
                        with timed(record, "check_ms"):
                            name, size = await run.take_state(*wanted, early=early)
                        return Prefilled(name, size, self._note_ended_well())
                except HandoffError as error:
                    if error.reason is Reason.BAD_STATE:
                        self._bad_states.take(
                            Path(run.state_path),
                            tokens,
                            str(error),
                            record.request_id,
                            config.handoff.keep_bad_states,
                        )
                    raise

    async def prefill_shared(
        self,
        tokens: list[int],
        shared: Shared,
        begin: Callable[[], Awaitable[None]],
        record: HandoffRecord,
        ticket: Ticket,
        config: Config,
    ) -> float:
        """Have the provider prefill these tokens into memory that the decoder shares.

        Args:
            tokens, record, ticket, config: as for `prefill`.
            shared: the decoder's descriptors; the caller closes them.
            begin: called before the provider gets them.

        Returns:
            The milliseconds from the start of the program to its end.

        Raises:
            HandoffError: with the reason. Whatever happens, the run is over by then, unless
                `state` says that it is stuck.
        """
        ticket.phase = "lock"
        async with self._its_turn():
            self._refuse_if_stuck()
            with self._run_files(tokens) as run:
                argv = provider_contract.shared_route_argv(
                    _program(config),
                    tokens_file=run.tokens_path,
                    model=config.model.path,
                    header_file=run.write_header(shared.header),
                    fds=shared.fds,
                    elfs=config.provider.elfs,
                )
                await self._run_locked(argv, record, ticket, config, begin=begin, fds=shared.fds)
                return self._note_ended_well()

    @contextlib.asynccontextmanager
    async def _its_turn(self) -> AsyncIterator[None]:
        await self._got_turn(math.inf)
        try:
            yield
        finally:
            self.running = None
            self._turn.release()

    def _note_ended_well(self) -> float:
        assert self.running is not None  # noqa: S101 - a program was started
        self.ended_well += 1
        return self.running.elapsed_ms

    def _refuse_if_stuck(self) -> None:
        if self._stuck is not None:
            raise HandoffError(
                Reason.PROVIDER_TIMEOUT,
                f"an earlier provider run (pid {self._stuck.pid}) cannot be killed",
            )

    @contextlib.contextmanager
    def _run_files(self, tokens: list[int]) -> Iterator[RunFiles]:
        run = self._slots.new_run(tokens)
        try:
            yield run
        finally:
            run.remove()

    async def _run_locked(
        self,
        argv: Sequence[str],
        record: HandoffRecord,
        ticket: Ticket,
        config: Config,
        *,
        begin: Callable[[], Awaitable[None]] | None = None,
        fds: Sequence[int] = (),
    ) -> None:
        lock = self._in_use = self._lock
        try:
            if lock is not None:
                with timed(record, "lock_ms"):
                    _drop_if_lost(lock)
                    if not lock.held:
                        await lock.wait_acquired(self._config.lock.wait_s)
            if begin is not None:
                await begin()
            await self._run_provider(argv, fds, record, ticket, config)
        finally:
            if self._stuck is None:
                self._end_use()

    async def _run_provider(
        self,
        argv: Sequence[str],
        fds: Sequence[int],
        record: HandoffRecord,
        ticket: Ticket,
        config: Config,
    ) -> None:
        ticket.phase = "prefill"
        self._running = True
        self.running = Running(ticket, trio.current_time())
        try:
            with timed(record, "provider_wall_ms", at="provider_at_ms"):
                result = await run_provider(
                    argv,
                    env=provider_contract.environment(
                        self._environ,
                        config.provider.env,
                        lock_held=self._in_use is not None,
                        llama_server=self._llama_server,
                        state_example=self._slots.example(),
                    ),
                    timeout_s=config.provider.timeout_s,
                    guard=self._guard,
                    on_line=self._take_line,
                    on_stuck=self._note_stuck,
                    pass_fds=fds,
                    late_counts=bool(fds),
                )
        finally:
            self._running = False
            self._output.end()
        record.prefill_ms = result.wall_ms if result.reported_ms is None else result.reported_ms

    def _take_line(self, stream: str, line: bytes) -> None:
        self._output.write("debug", line, stream=stream)


def _program(config: Config) -> str:
    program = config.provider.program
    assert program is not None  # noqa: S101 - plan() hands off only with a provider
    return program


def _drop_if_lost(lock: DeviceLock) -> bool:
    """Give up a held lock whose file is not the one at its path any more; say whether it was so."""
    if not lock.held or lock.still_ours():
        return False
    log.warning("lock_lost", line=f"{lock.path} was replaced; taking the new one")
    lock.release()
    return True


def _taken_by_next_run(lock: DeviceLock) -> HandoffError:
    return HandoffError(
        Reason.LOCK_BUSY, f"a provider run is on: the next one takes {lock.path} and keeps it"
    )


class timed:
    """Adds the time spent inside to a `_ms` field of the record, whatever happens inside.

    With `at`, that field gets when it began, and the first one the time since then alone.
    """

    __slots__ = ("_field", "_record", "_started")

    def __init__(self, record: HandoffRecord, field: str, *, at: str | None = None) -> None:
        self._record, self._field = record, field
        self._started = time.monotonic()
        if at is not None:
            setattr(record, at, record.since_start_ms(self._started))
            setattr(record, field, None)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        record, field = self._record, self._field
        spent_ms = (time.monotonic() - self._started) * 1000.0
        setattr(record, field, (getattr(record, field) or 0.0) + spent_ms)
