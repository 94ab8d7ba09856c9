"""Provider runs: one at a time, under the device lock, from ids to a checked state file."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias

import structlog
import trio

from onebitd.adapters.device_lock import DeviceLock
from onebitd.adapters.process import Child, Guard
from onebitd.adapters.provider_process import run_provider
from onebitd.adapters.slot_files import RunFiles, SlotFiles
from onebitd.core import provider_contract
from onebitd.core.config import Config
from onebitd.core.errors import HandoffError
from onebitd.core.handoff import HandoffRecord, Reason
from onebitd.core.state_layout import Layout
from onebitd.services.admission import Ticket

log = structlog.get_logger()

ProviderState: TypeAlias = Literal["none", "idle", "running", "stuck"]


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
    ) -> None:
        self._config = config
        self._slots = slots
        self._lock = lock
        self._guard = guard
        self._environ = environ
        self._swa_window = swa_window
        self._llama_server = llama_server
        self._turn = trio.Lock()  # one run at a time, in the line's order
        self._stuck: Child | None = None
        self._running = False
        self._stuck_event = trio.Event()

    @property
    def state(self) -> ProviderState:
        """For `status`: what the provider is doing."""
        if self._config.provider.program is None:
            return "none"
        if self._stuck is not None:
            return "stuck"
        return "running" if self._running else "idle"

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Hold the lock for the daemon's life if so configured, and reap runs that got stuck."""
        lock = self._lock
        try:
            if lock is not None and self._config.lock.hold == "lifetime":
                try:
                    async with self._turn:  # requests wait for this, not for the lock behind it
                        await lock.wait_acquired(self._config.lock.wait_s)
                except HandoffError as error:
                    log.warning("lock_not_taken", reason=error.reason, detail=error.detail)
            task_status.started()
            while True:
                await self._stuck_event.wait()
                self._stuck_event = trio.Event()
                if self._stuck is not None:
                    await self._stuck.wait_gone()
                    log.warning("provider_gone", pid=self._stuck.pid)
                    self._stuck = None
                    self._release_lock()
        finally:
            if lock is not None and lock.held:
                lock.release()

    def _release_lock(self) -> None:
        lock = self._lock
        if lock is not None and lock.held and self._config.lock.hold == "handoff":
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
        self, tokens: list[int], layout: Layout, record: HandoffRecord, ticket: Ticket
    ) -> tuple[str, int]:
        """Have the provider prefill these tokens; the caller removes the state file.

        Returns:
            The checked state file's name in the slot directory, and its size in bytes.

        Raises:
            HandoffError: with the reason.
        """
        ticket.phase = "lock"
        async with self._turn:
            if self._stuck is not None:
                raise HandoffError(
                    Reason.PROVIDER_TIMEOUT,
                    f"an earlier provider run (pid {self._stuck.pid}) cannot be killed",
                )
            self._slots.check_space(layout.bytes_for(len(tokens)))
            run = self._slots.new_run(tokens)
            try:
                await self._run_locked(run, record, ticket)
                with timed(record, "check_ms"):
                    return await run.take_state(layout, tokens, self._swa_window)
            finally:
                run.remove()

    async def _run_locked(self, run: RunFiles, record: HandoffRecord, ticket: Ticket) -> None:
        config = self._config
        lock = self._lock
        if lock is not None:
            with timed(record, "lock_ms"):
                if lock.held and not lock.still_ours():
                    log.warning("lock_lost", line=f"{lock.path} was replaced; taking the new one")
                    lock.release()
                if not lock.held:
                    await lock.wait_acquired(config.lock.wait_s)
        try:
            await self._run_provider(run, record, ticket)
        finally:
            if self._stuck is None:
                self._release_lock()

    async def _run_provider(self, run: RunFiles, record: HandoffRecord, ticket: Ticket) -> None:
        config = self._config
        program = config.provider.program
        assert program is not None  # noqa: S101 - plan() hands off only with a provider
        ticket.phase = "prefill"
        self._running = True
        try:
            with timed(record, "provider_wall_ms"):
                result = await run_provider(
                    provider_contract.file_route_argv(
                        program,
                        tokens_file=run.tokens_path,
                        state_file=run.state_path,
                        model=config.model.path,
                        elfs=config.provider.elfs,
                    ),
                    env=provider_contract.environment(
                        self._environ,
                        config.provider.env,
                        lock_held=self._lock is not None,
                        llama_server=self._llama_server,
                    ),
                    timeout_s=config.provider.timeout_s,
                    guard=self._guard,
                    on_line=_log_provider_line,
                    on_stuck=self._note_stuck,
                )
        finally:
            self._running = False
        record.prefill_ms = result.wall_ms if result.reported_ms is None else result.reported_ms


@contextlib.contextmanager
def timed(record: HandoffRecord, field: str) -> Iterator[None]:
    """Add the time spent inside to a `_ms` field of the record, whatever happens inside."""
    started = time.monotonic()
    try:
        yield
    finally:
        setattr(
            record, field, (getattr(record, field) or 0.0) + (time.monotonic() - started) * 1000.0
        )


def _log_provider_line(name: str, line: bytes) -> None:
    log.debug("provider_output", stream=name, line=f"provider: {line.decode('utf-8', 'replace')}")
