"""`onebitd`: builds the objects, opens the nursery tree, starts and stops things in order.

Start: instance lock and listeners (`surfaces.start`), decoder, READY=1. Stop: reloads, audits, a
passed public socket, admission, STOPPING=1, drain, HTTP, decoder and providers, device lock,
control socket.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import structlog
import trio

from onebitd import __version__
from onebitd.adapters import descriptors, lock_probe, logsetup, memory, peers
from onebitd.adapters.config_file import readable_by_all
from onebitd.adapters.device_lock import DeviceLock
from onebitd.adapters.device_sysfs import SYSFS, DeviceReader
from onebitd.adapters.http_server import HttpServer
from onebitd.adapters.process import Guard
from onebitd.adapters.slot_files import SlotFiles
from onebitd.core import paths
from onebitd.core.backend_state import BackendState
from onebitd.core.config import Config
from onebitd.core.errors import BackendFailed, ConfigError, OnebitError
from onebitd.core.page_view import EVENTS_PATH
from onebitd.core.reload import Merged
from onebitd.services.admission import Admission
from onebitd.services.handoff import Handoffs
from onebitd.services.history import History
from onebitd.services.history_keeper import HistoryKeeper
from onebitd.services.metrics import Metrics, Sparing
from onebitd.services.supervisor import Launch, Supervisor
from onebitd.surfaces import reload
from onebitd.surfaces.control_http import create_control_app
from onebitd.surfaces.launch import plan_launch, slots_dir
from onebitd.surfaces.listening import admit_to_control
from onebitd.surfaces.metrics_http import MAX_CONNECTIONS as METRICS_CONNECTIONS
from onebitd.surfaces.metrics_http import MetricsApp
from onebitd.surfaces.page import Page, Sources
from onebitd.surfaces.public_http import PublicApp
from onebitd.surfaces.start import SIGNALS, Started
from onebitd.surfaces.status_view import StatusView

log = structlog.get_logger()

_DEBUG_HANG: Final = "ONEBIT_DEBUG_HANG"
_DEBUG_SYSFS: Final = "ONEBIT_DEBUG_SYSFS"
_ARRIVE_S: Final = 0.25
"""The request of a connection that was just accepted is on its way."""
_LAST_ANSWER_S: Final = 3.0
"""A request that was cut off still waits for what the decoder does to the slot; longer than this
only the decoder's own end ends that."""
_CONTROL_CONNECTIONS: Final = 64
_BESIDES: Final = 64
"""Descriptors for listeners, logs, the history, devices, the decoder's and the providers' pipes."""
_NOTIFY_EVERY_S: Final = 1.0
_EXTEND_S: Final = 30.0
_RELOAD_LOCK_S: Final = 30.0
"""A reload waits no longer for the device lock, whatever lock.wait_s: somebody waits for it."""


def serve(started: Started) -> None:
    """Serve until told to stop; the sockets are open already.

    Raises:
        ConfigError, BackendFailed: see the exit statuses.
    """
    config = started.config
    logsetup.configure(config.log.format, config.log.level)
    for line in started.warnings:
        log.warning("handoffs_will_fall_back", line=line)
    _raise_descriptor_limit(config.http.max_connections)
    environ = dict(os.environ)
    if environ.pop(_DEBUG_HANG, ""):
        signal.signal(signal.SIGUSR2, lambda _number, _frame: hang_on_purpose())
    sysfs = Path(environ.pop(_DEBUG_SYSFS, "") or SYSFS)
    daemon = Daemon(started, environ, sysfs)
    try:
        trio.run(daemon.run, strict_exception_groups=True)
    except BaseExceptionGroup as group:
        ours, _ = group.split(OnebitError)
        if ours is None:
            raise
        raise _first(ours) from group


def _raise_descriptor_limit(connections: int) -> None:
    wanted = descriptors_wanted(connections)
    allowed = descriptors.raise_limit(wanted)
    if allowed < wanted:
        log.warning(
            "few_descriptors",
            line=f"http.max_connections = {connections} may need {wanted} open files, and"
            f" {allowed} are allowed: set LimitNOFILE={wanted} in the unit, or lower it",
        )


def descriptors_wanted(connections: int) -> int:
    """Return how many descriptors may be open at once.

    One to each client of each listener, and one to the decoder for each of the public listener's.

    Args:
        connections: `http.max_connections`.
    """
    return 2 * connections + _CONTROL_CONNECTIONS + METRICS_CONNECTIONS + _BESIDES


def _requests_in_flight(paths_served: Iterable[str]) -> int:
    """Return how many requests are served, an open status page not being one."""
    return sum(path != EVENTS_PATH for path in paths_served)


def hang_on_purpose() -> NoReturn:
    """Never give the event loop another turn: a way to see what the watchdog does about that."""
    while True:
        time.sleep(3600)


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


class _Service:
    """A task of the tree that can be stopped by itself, in the order of the stop."""

    def __init__(self, run: Callable[..., Awaitable[None]]) -> None:
        self._run = run
        self._scope = trio.CancelScope()
        self._done = trio.Event()

    async def start(self, nursery: trio.Nursery) -> None:
        await nursery.start(self._main)

    def start_soon(self, nursery: trio.Nursery) -> None:
        nursery.start_soon(self._main)

    async def _main(self, *, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            with self._scope:
                await self._run(task_status=task_status)
        finally:
            self._done.set()

    async def stop(self) -> None:
        self._scope.cancel()
        await self._done.wait()


class Daemon:
    """One instance, from its lock to its last log line.

    Args:
        started: what it has been given on the way.
        environ: what its children inherit.
        sysfs: where the kernel's devices are.
    """

    def __init__(self, started: Started, environ: Mapping[str, str], sysfs: Path = SYSFS) -> None:
        config = self._config = started.config
        self._runtime = started.runtime
        self._manager = started.manager
        self._environ = environ
        self._sysfs = sysfs
        self._early_signals = started.signals
        self._stop_asked = trio.Event()
        self._hurry = trio.Event()
        self._failure: BackendFailed | None = None
        self._listening = started.listening
        self._keys = started.keys
        self._reloads = reload.Reloads(self, partial(reload.read, started.args, environ))
        self._history = History()
        self._kept: HistoryKeeper
        self._admission = Admission(config.http.max_pending)
        self._supervisor: Supervisor
        self._handoffs: Handoffs
        self._view: StatusView
        self._app: PublicApp
        self._server: HttpServer
        self._control_server: HttpServer
        self._metrics_server: HttpServer
        self._lock: DeviceLock | None = None

    @property
    def config(self) -> Config:
        """The effective configuration."""
        return self._config

    @property
    def keys(self) -> tuple[str, ...]:
        """The API keys that are asked for."""
        return self._keys

    @property
    def listens_on(self) -> Sequence[str]:
        """Hosts of the public listener."""
        return self._listening.hosts

    @property
    def is_stopping(self) -> bool:
        """True once it was told to stop."""
        return self._stop_asked.is_set()

    async def run(self) -> None:
        """Serve until told to stop.

        Raises:
            ConfigError, BackendFailed: see the exit statuses; alone or in a group.
        """
        async with trio.open_nursery() as nursery:
            await nursery.start(self._watch_signals)
            launch = await self._plan()
            if launch is not None:
                await self._serve(launch)
            nursery.cancel_scope.cancel()
        log.info("stopped", line="onebitd stopped")
        if self._failure is not None:
            raise self._failure
        self._manager.status("stopped")  # it stays with the unit

    async def _plan(self) -> Launch | None:
        """Return what the decoder is started with, or None when the daemon is to stop first."""
        if self._stop_asked.is_set():
            return None
        launch = None
        plan = partial(plan_launch, self._config, self._runtime, self._environ)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel_when, self._stop_asked, nursery.cancel_scope)
            launch = await trio.to_thread.run_sync(plan, abandon_on_cancel=True)
            nursery.cancel_scope.cancel()
        return launch

    async def _serve(self, launch: Launch) -> None:
        slots = SlotFiles(slots_dir(self._config, self._runtime))
        swept = slots.sweep()
        if swept:
            log.info("swept", entries=swept, path=str(slots.path))
        guard = Guard()
        try:
            self._build(launch, slots, guard)
            await self._run_services()
        finally:
            guard.close()
            slots.sweep()

    def _build(self, launch: Launch, slots: SlotFiles, guard: Guard) -> None:
        config = self._config
        self._supervisor = Supervisor(
            launch,
            slots,
            guard,
            load_timeout_s=config.backend.load_timeout_s,
            restart_max=config.backend.restart_max,
            on_change=self._tell_manager,
            clients_wait=self._listening.public_is_passed,
        )
        self._lock = DeviceLock(config.lock.path) if config.lock.enabled else None
        self._handoffs = Handoffs(
            config,
            self._supervisor,
            self._admission,
            slots,
            self._lock,
            guard,
            self._history,
            self._environ,
            DeviceReader(self._sysfs),
        )
        state = paths.state_dir(config.instance, self._environ, os.geteuid())
        self._kept = HistoryKeeper(self._history, Path(state), config.history)
        self._view = StatusView(
            config,
            self._supervisor,
            self._handoffs,
            self._admission,
            self._history,
            self._listening.addresses,
            service_manager=self._manager.present,
            unit=self._manager.unit(),
            listen_passed=self._listening.public_is_passed,
            history_problem=lambda: self._kept.problem,
        )

    def _build_surfaces(self) -> None:
        view, handoffs, config = self._view, self._handoffs, self._config
        sources = Sources(
            partial(view.status, weighed=False), view.look_at_lock, view.costs, handoffs.in_flight
        )
        page = Page(sources, enabled=config.http.page)
        # A scrape may come at any time: it waits for no kernel, and nothing is worked out for it.
        metrics = Metrics(
            partial(view.status, lock_probe.NOT_LOOKED_AT, weighed=False),
            lambda: _requests_in_flight(entry.path for entry in handoffs.in_flight.entries()),
        )
        self._history.listen(page.note)
        self._history.listen(metrics.count)
        self._app = PublicApp(handoffs, config.http, self._keys, lambda: view.draining, page)
        self._server = HttpServer(
            self._app, self._listening.public, max_connections=config.http.max_connections
        )
        control_app: Any = create_control_app(
            *(view, self._reloads.reload, handoffs.reset_provider),
            self._cancel_request,
            metrics=metrics.exposition,
        )
        self._control_server = HttpServer(
            control_app,
            self._listening.control,
            admit=admit_to_control(self._listening.control),
            max_connections=_CONTROL_CONNECTIONS,
        )
        self._metrics_server = HttpServer(
            MetricsApp(Sparing(metrics.exposition).exposition, lambda: self._config),
            self._listening.metrics,
            max_connections=METRICS_CONNECTIONS,
        )
        handoffs.audits.on_change = handoffs.breaker.on_change = self._tell_manager

    async def _run_services(self) -> None:
        self._build_surfaces()
        handoffs = self._handoffs
        public, control, scraping = (
            _Service(server.run)
            for server in (self._server, self._control_server, self._metrics_server)
        )
        running, auditing = _Service(handoffs.runs.run), _Service(handoffs.audits.run)
        breaking, learning = _Service(handoffs.breaker.run), _Service(handoffs.keeper.run)
        watching, sampling = _Service(handoffs.vitals.run), _Service(handoffs.telemetry.run)
        keeping, reloads = _Service(self._kept.run), _Service(self._reloads.run)
        decoder = _Service(self._run_decoder)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._notify)
            await reloads.start(nursery)
            await control.start(nursery)
            await scraping.start(nursery)
            await sampling.start(nursery)
            await public.start(nursery)
            for service in (running, auditing, breaking, learning, keeping, watching):
                service.start_soon(nursery)
            self._announce()
            decoder.start_soon(nursery)
            await self._stop_asked.wait()
            for service in (reloads, auditing, breaking, watching):
                await service.stop()
            if self._listening.public_is_passed:
                # Whoever comes now waits in the socket's backlog for the next onebitd.
                self._server.stop_accepting()
                await trio.sleep(_ARRIVE_S)
            await self._drain()
            with trio.move_on_after(_LAST_ANSWER_S):
                await public.stop()
            await decoder.stop()
            await public.stop()
            await running.stop()
            await learning.stop()
            self._history.close()
            await keeping.stop()
            await scraping.stop()
            await control.stop()
            nursery.cancel_scope.cancel()

    def _announce(self) -> None:
        config = self._config
        log.info(
            "listening",
            line=f"onebitd {__version__} listens on {', '.join(self._listening.addresses)}, "
            f"instance {config.instance}, model {config.model.alias}",
        )
        if self._listening.metrics:
            where = ", ".join(f"http://{one}/metrics" for one in self._listening.metrics_addresses)
            log.info("metrics", line=f"metrics are on {where}")
        for event, line in _remarks(config):
            log.warning(event, line=line)
        for open_door in filter(None, map(peers.loose_mode, self._listening.control)):
            log.warning("control_socket_open", line=open_door)

    async def take_over(self, merged: Merged, keys: tuple[str, ...]) -> Sequence[str]:
        """Have every part use a new configuration from now on; return warnings about it.

        Only the device lock may take its time, when it is to be held for the daemon's life.

        Raises:
            ConfigError: the log's format cannot be had; nothing has changed.
        """
        config, before = merged.config, self._config
        if config.log != before.log:
            try:
                logsetup.configure(config.log.format, config.log.level)
            except OSError as error:
                raise ConfigError([f"log.format: no way to the journal: {error}"]) from error
        if config.lock.path != before.lock.path and config.lock.enabled:
            self._lock = DeviceLock(config.lock.path)
        self._config, self._keys = config, keys
        self._admission.max_pending = config.http.max_pending
        self._supervisor.reconfigure(
            load_timeout_s=config.backend.load_timeout_s, restart_max=config.backend.restart_max
        )
        self._handoffs.reconfigure(config, self._lock)
        self._app.reconfigure(config.http, keys)
        self._server.max_connections = config.http.max_connections
        _raise_descriptor_limit(config.http.max_connections)
        self._view.reconfigure(config)
        self._kept.reconfigure(config.history)
        old = _remarks(before)
        remarks = [line for event, line in _remarks(config) if (event, line) not in old]
        why_not = await self._handoffs.runs.hold_for_life(min(config.lock.wait_s, _RELOAD_LOCK_S))
        if why_not is not None:
            remarks.append(f"lock.hold: {why_not.detail}")
        return remarks

    def _cancel_request(self, request_id: str) -> int:
        found = self._handoffs.in_flight.cancel(request_id)
        for entry in found:
            log.info("request_cancelled", request_id=request_id, path=entry.path)
        return len(found)

    async def _run_decoder(self, *, task_status: trio.TaskStatus[None]) -> None:
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._supervisor.run)
                self._tell_manager()
                self._manager.ready()
                memory.settle()
                task_status.started()
        except* BackendFailed as group:
            failure = _first(group)
            assert isinstance(failure, BackendFailed)  # noqa: S101 - what the clause selects
            self._failure = failure
            self._view.failed = True
            log.error("backend_failed", line=str(failure))
            self._stop_asked.set()

    async def _watch_signals(
        self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        with trio.open_signal_receiver(*SIGNALS) as signals:
            for number in self._early_signals:
                self._take_signal(number)
            task_status.started()
            async for number in signals:
                self._take_signal(number)

    def _take_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGHUP and not sys.stderr.isatty():
            self._reloads.ask()
        elif self._stop_asked.is_set():
            log.warning("hurry", line=f"{name} again: running replies are cut off")
            self._hurry.set()
        else:
            log.info("stopping", line=f"{name}: stopping; {self._what_it_waits_for()}")
            self._stop_asked.set()

    def _what_it_waits_for(self) -> str:
        if self._admission.holder is None:
            return "no reply is running"
        return (
            f"the running reply has {self._config.http.drain_timeout_s:g} s "
            "(http.drain_timeout_s), a second signal cuts it off"
        )

    async def _drain(self) -> None:
        """Let running replies finish, within the time for it; turn everybody else away."""
        self._view.draining = True
        self._admission.close(keep_waiting=self._listening.public_is_passed)
        self._manager.stopping(self._view.line())
        if self._failure is None:
            async with trio.open_nursery() as nursery:
                nursery.cancel_scope.deadline = (
                    trio.current_time() + self._config.http.drain_timeout_s
                )
                nursery.start_soon(self._cancel_when, self._hurry, nursery.cancel_scope)
                await self._admission.wait_empty()
                nursery.cancel_scope.cancel()
        self._handoffs.in_flight.cancel_all("draining")

    @staticmethod
    async def _cancel_when(event: trio.Event, scope: trio.CancelScope) -> None:
        await event.wait()
        scope.cancel()

    async def _notify(self) -> None:
        """Keep the service manager informed while something takes its time, and its watchdog fed.

        The watchdog is fed from this task, so only while the loop really turns.
        """
        interval_s = self._manager.watchdog_interval_s
        pause_s = _NOTIFY_EVERY_S if interval_s is None else min(_NOTIFY_EVERY_S, interval_s)
        if not self._manager.present:
            return
        while True:
            if self._view.draining or self._supervisor.state is not BackendState.READY:
                self._manager.extend_timeout(_EXTEND_S)
                self._tell_manager()
            if interval_s is not None:
                self._manager.watchdog()
            await trio.sleep(pause_s)

    def _tell_manager(self) -> None:
        self._manager.status(self._view.line())


def _remarks(config: Config) -> list[tuple[str, str]]:
    """Return (event, line) of what a configuration may well be, but was perhaps not meant to be."""
    remarks = []
    if config.provider.program is None:
        remarks.append(
            (
                "no_provider",
                "no prefill provider is configured (provider.program): "
                "the decoder prefills every prompt",
            )
        )
    file = config.http.api_key_file
    if file is not None and (line := readable_by_all(Path(file))):
        remarks.append(("api_keys_exposed", line))
    return remarks
