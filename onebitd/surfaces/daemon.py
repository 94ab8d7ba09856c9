"""`onebitd`: builds the objects, opens the nursery tree, starts and stops things in order.

Start: instance lock, listeners, decoder, READY=1. Stop: reloads, audits, a passed public socket,
admission, STOPPING=1, drain, HTTP, decoder and providers, device lock, control socket.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import structlog
import trio

from onebitd import __version__
from onebitd.adapters import descriptors, listeners, logsetup, peers
from onebitd.adapters.config_file import check_files, is_fatal, read_api_keys, readable_by_all
from onebitd.adapters.device_lock import DeviceLock
from onebitd.adapters.http_server import HttpServer
from onebitd.adapters.instance import InstanceLock, ensure_private_dir
from onebitd.adapters.process import Guard
from onebitd.adapters.slot_files import SlotFiles
from onebitd.adapters.systemd import ServiceManager
from onebitd.core import paths
from onebitd.core.backend_state import BackendState
from onebitd.core.config import Config
from onebitd.core.errors import BackendFailed, ConfigError, OnebitError, UsageError
from onebitd.core.reload import Merged
from onebitd.services.admission import Admission
from onebitd.services.handoff import Handoffs
from onebitd.services.history import History
from onebitd.services.supervisor import Launch, Supervisor
from onebitd.surfaces import daemon_args, reload
from onebitd.surfaces.control_http import create_control_app
from onebitd.surfaces.launch import plan_launch, slots_dir
from onebitd.surfaces.listening import (
    Listening,
    admit_to_control,
    open_listeners,
    turn_away,
)
from onebitd.surfaces.public_http import PublicApp
from onebitd.surfaces.status_view import StatusView

log = structlog.get_logger()

_DEBUG_HANG: Final = "ONEBIT_DEBUG_HANG"
_ARRIVE_S: Final = 0.25
"""The request of a connection that was just accepted is on its way."""
_LAST_ANSWER_S: Final = 3.0
"""A request that was cut off still waits for what the decoder does to the slot; longer than this
only the decoder's own end ends that."""
_CONTROL_CONNECTIONS: Final = 64
_NOTIFY_EVERY_S: Final = 1.0
_EXTEND_S: Final = 30.0
_RELOAD_LOCK_S: Final = 30.0
"""A reload waits no longer for the device lock, whatever lock.wait_s: somebody waits for it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `onebitd`; return its exit status (onebitd(8), EXIT STATUS)."""
    manager: ServiceManager | None = None
    try:
        manager = ServiceManager()
        args = daemon_args.parse(sys.argv[1:] if argv is None else argv)
        config = daemon_args.load_config(args, os.environ)
        problems = check_files(config)
        if args.action == "check-config":
            if problems:
                raise ConfigError(problems)
            print(f"onebitd: configuration of instance {config.instance} is fine")  # noqa: T201
            return 0
        fatal = [line for line in problems if is_fatal(line)]
        if fatal:
            raise ConfigError(fatal)
        runtime = Path(paths.runtime_dir(config.instance, os.environ, os.geteuid()))
        if args.action == "print-backend":
            launch = plan_launch(config, runtime, os.environ)
            print(shlex.join(launch.argv))  # noqa: T201
            return 0
        _serve(args, config, runtime, manager, warnings=problems)
    except OnebitError as error:
        if manager is not None:
            turn_away(manager, str(error))
        for line in str(error).splitlines():
            print(f"onebitd: {line}", file=sys.stderr)  # noqa: T201
        if isinstance(error, UsageError | ConfigError) and len(str(error).splitlines()) > 1:
            print("onebitd: see onebitd(8) and onebitd.toml(5)", file=sys.stderr)  # noqa: T201
        return error.exit_status
    finally:
        if manager is not None:
            manager.close()
    return 0


def _serve(
    args: daemon_args.DaemonArgs,
    config: Config,
    runtime: Path,
    manager: ServiceManager,
    *,
    warnings: Sequence[str],
) -> None:
    logsetup.configure(config.log.format, config.log.level)
    for line in warnings:
        log.warning("handoffs_will_fall_back", line=line)
    _raise_descriptor_limit(config.http.max_connections)
    environ = dict(os.environ)
    if environ.pop(_DEBUG_HANG, ""):
        signal.signal(signal.SIGUSR2, lambda _number, _frame: hang_on_purpose())
    daemon = Daemon(config, runtime, manager, environ, partial(reload.read, args, environ))
    try:
        trio.run(daemon.run, strict_exception_groups=True)
    except BaseExceptionGroup as group:
        ours, _ = group.split(OnebitError)
        if ours is None:
            raise
        raise _first(ours) from group


def _raise_descriptor_limit(connections: int) -> None:
    # One to the client and one to the decoder each, and what the daemon needs besides.
    wanted = 2 * connections + _CONTROL_CONNECTIONS
    allowed = descriptors.raise_limit(wanted)
    if allowed < wanted:
        log.warning(
            "few_descriptors",
            line=f"http.max_connections = {connections} may need {wanted} open files, and"
            f" {allowed} are allowed: set LimitNOFILE={wanted} in the unit, or lower it",
        )


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
        config: as it was read at the start.
        runtime: its directory.
        manager: what is told of its state.
        environ: what its children inherit.
        read: reads the configuration again.
    """

    def __init__(
        self,
        config: Config,
        runtime: Path,
        manager: ServiceManager,
        environ: Mapping[str, str],
        read: Callable[[], reload.Reading],
    ) -> None:
        self._config = config
        self._runtime = runtime
        self._manager = manager
        self._environ = environ
        self._stop_asked = trio.Event()
        self._hurry = trio.Event()
        self._failure: BackendFailed | None = None
        self._listening: Listening
        self._keys: tuple[str, ...] = ()
        self._reloads = reload.Reloads(self, read)
        self._history = History()
        self._admission = Admission(config.http.max_pending)
        self._supervisor: Supervisor
        self._handoffs: Handoffs
        self._view: StatusView
        self._app: PublicApp
        self._server: HttpServer
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
            InstanceTaken, ConfigError, BackendFailed: see the exit statuses.
        """
        config, runtime = self._config, self._runtime
        if config.http.api_key_file is not None:
            self._keys = read_api_keys(Path(config.http.api_key_file))
        mode = 0o750 if os.geteuid() == 0 or self._manager.present else 0o700
        fallback = Path(paths.fallback_root(os.geteuid()))
        if fallback in runtime.parents:
            # Below /tmp: whoever owned that directory could put another one in ours' place.
            ensure_private_dir(fallback, 0o700)
        ensure_private_dir(runtime, mode)
        instance_lock = InstanceLock(runtime / "onebitd.lock", config.instance)
        instance_lock.acquire()
        try:
            launch = await trio.to_thread.run_sync(plan_launch, config, runtime, self._environ)
            slots = SlotFiles(slots_dir(config, runtime))
            swept = slots.sweep()
            if swept:
                log.info("swept", entries=swept, path=str(slots.path))
            self._listening = open_listeners(config, self._manager, runtime)
            guard = Guard()
            try:
                self._build(launch, slots, guard)
                await self._run_services()
            finally:
                guard.close()
                slots.sweep()
                if not self._manager.listen_fds().get("control"):
                    listeners.unlink_unix(runtime / paths.CONTROL_SOCKET)
        finally:
            instance_lock.release()
        if self._failure is not None:
            raise self._failure

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
        )
        self._view = StatusView(
            config,
            self._supervisor,
            self._handoffs,
            self._admission,
            self._history,
            self._listening.addresses,
            service_manager=self._manager.present,
        )

    async def _run_services(self) -> None:
        app = self._app = PublicApp(
            self._handoffs, self._config.http, self._keys, lambda: self._view.draining
        )
        audits, breaker, keeper = (
            self._handoffs.audits,
            self._handoffs.breaker,
            self._handoffs.keeper,
        )
        audits.on_change = breaker.on_change = self._tell_manager
        control_app: Any = create_control_app(
            *(self._view, self._reloads.reload, self._handoffs.reset_provider),
            self._cancel_request,
        )
        self._server = HttpServer(
            app, self._listening.public, max_connections=self._config.http.max_connections
        )
        public = _Service(self._server.run)
        control_server = HttpServer(
            control_app,
            self._listening.control,
            admit=admit_to_control(self._listening.control),
            max_connections=_CONTROL_CONNECTIONS,
        )
        control = _Service(control_server.run)
        handoffs = _Service(self._handoffs.runs.run)
        auditing = _Service(audits.run)
        breaking, learning = _Service(breaker.run), _Service(keeper.run)
        watching = _Service(self._handoffs.vitals.run)
        decoder = _Service(self._run_decoder)
        reloads = _Service(self._reloads.run)
        async with trio.open_nursery() as nursery:
            await nursery.start(self._watch_signals)
            nursery.start_soon(self._notify)
            await reloads.start(nursery)
            await control.start(nursery)
            await public.start(nursery)
            handoffs.start_soon(nursery)
            auditing.start_soon(nursery)
            breaking.start_soon(nursery)
            learning.start_soon(nursery)
            watching.start_soon(nursery)
            self._announce()
            decoder.start_soon(nursery)
            await self._stop_asked.wait()
            await reloads.stop()
            await auditing.stop()
            await breaking.stop()
            await watching.stop()
            if self._listening.public_is_passed:
                # Whoever comes now waits in the socket's backlog for the next onebitd.
                self._server.stop_accepting()
                await trio.sleep(_ARRIVE_S)
            await self._drain()
            with trio.move_on_after(_LAST_ANSWER_S):
                await public.stop()
            await decoder.stop()
            await public.stop()
            await handoffs.stop()
            await learning.stop()
            self._history.close()
            await control.stop()
            nursery.cancel_scope.cancel()
        if self._failure is None:
            self._manager.status("stopped")  # it stays with the unit
        log.info("stopped", line="onebitd stopped")

    def _announce(self) -> None:
        config = self._config
        log.info(
            "listening",
            line=f"onebitd {__version__} listens on {', '.join(self._listening.addresses)}, "
            f"instance {config.instance}, model {config.model.alias}",
        )
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
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            task_status.started()
            async for number in signals:
                name = signal.Signals(number).name
                if number == signal.SIGHUP and not sys.stderr.isatty():
                    self._reloads.ask()
                    continue
                if self._stop_asked.is_set():
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
