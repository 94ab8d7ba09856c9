"""The supervisor: the only writer of the decoder's state; starts, watches, restarts, stops it."""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import structlog
import trio

from onebitd.adapters.calls import Calls
from onebitd.adapters.llama_server import LlamaServer
from onebitd.adapters.process import (
    Child,
    Guard,
    SpawnError,
    describe_exit,
    pump_lines,
    spawn,
)
from onebitd.adapters.slot_files import SlotFiles
from onebitd.core import state_baseline, state_file
from onebitd.core.backend_state import (
    RESTART_WINDOW_S,
    BackendEvent,
    BackendState,
    after,
    backoff_s,
    may_restart,
)
from onebitd.core.control_api import LastExit, rfc3339
from onebitd.core.errors import (
    BackendError,
    BackendFailed,
    BackendGone,
    BackendRefused,
    BackendTimeout,
    RequestError,
    StateFileError,
)
from onebitd.core.handoff import Reason
from onebitd.core.state_data import Baseline
from onebitd.core.state_layout import Layout
from onebitd.services.child_output import ChildOutput, Level

log = structlog.get_logger()

_PROBE_TOKENS: Final = (1, 2, 3)
"""Three tokens are enough for the layout to parse in exactly one way."""
_HEALTH_FIRST_POLL_S: Final = 0.02
_HEALTH_LAST_POLL_S: Final = 0.5
_OOM_SCORE_ADJ: Final = 300
"""The daemon is small and survives its decoder; a decoder is tens of gigabytes and comes back."""
_STOP_TERM_GRACE_S: Final = 5.0
_STOP_KILL_GRACE_S: Final = 5.0
_LAST_WORDS_S: Final = 0.5
_NOTICE_S: Final = 2.0
"""A broken connection to a decoder that still runs after this long is the decoder's own doing."""
PATIENCE_S: Final = 15.0
"""A request waits this long for a restart that is expected to end within it."""
_FIRST_LOAD_RETRY_S: Final = 5
_ERROR_LINE: Final = re.compile(
    rb"error|failed to|GGML_ASSERT|terminate called|exception|abort", re.I
)
_LEVEL: Final = re.compile(rb"^\d+\.\d+\.\d+\.\d+ ([DIWE]) ")
"""llama.cpp's log prefix: time since start, then one letter of level."""
_HARMLESS: Final = re.compile(
    rb"CORS|security risk|more info: https|: -{5,}$|AMX is not ready|cache-idle-slots|got exception"
)
"""Warnings that do not apply: the Unix socket is private, and --cache-ram 0 is on purpose. And one
that must stay at debug: what the decoder could not parse, it quotes, and that is a prompt."""


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """How the decoder is started.

    Args:
        argv: the exact command line.
        env: its whole environment.
        socket_path: where it listens.
        devices: what `--list-devices` named.
        swa_window: of a model with a sliding window, in tokens.
        head_dim: values of one head of its attention, None where that is not known.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    socket_path: Path
    devices: Sequence[str]
    swa_window: int | None
    head_dim: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class BackendFacts:
    """What a running decoder told about itself.

    `layout` is what every state file must match; None when it could not be learned, and then
    `unsupported` says why. `generation` counts decoder starts. `baseline` is what the data of the
    decoder's own state is like.
    """

    server: LlamaServer
    generation: int
    ctx_size: int | None
    build: str | None
    layout: Layout | None
    unsupported: str | None
    baseline: Baseline | None = None


class Supervisor:
    """Owns the llama-server child.

    Args:
        launch: how to start it.
        slots: its --slot-save-path.
        guard: kills it when the daemon dies.
        load_timeout_s: how long a model may take to load.
        restart_max: restarts within 300 s; beyond that `run` raises BackendFailed.
        on_change: called after each change of state.
        clients_wait: requests wait for however long a load or restart takes, as long as their
            clients do; False: only for a restart that is expected to end soon.

    Attributes:
        calls: those to the decoder that are under way.
    """

    def __init__(
        self,
        launch: Launch,
        slots: SlotFiles,
        guard: Guard,
        *,
        load_timeout_s: float,
        restart_max: int,
        on_change: Callable[[], None] = lambda: None,
        clients_wait: bool = False,
    ) -> None:
        self._launch = launch
        self._patience_s = None if clients_wait else PATIENCE_S
        self._slots = slots
        self._guard = guard
        self._load_timeout_s = load_timeout_s
        self._restart_max = restart_max
        self._on_change = on_change
        self._output = ChildOutput("backend_output", "llama-server", "decoder")
        self._changed = trio.Event()
        self._child: Child | None = None
        self._exit_times: deque[float] = deque(maxlen=1001)
        self._last_error_line = b""
        self._kill_reason: str | None = None
        self._kill_counts = True
        self._killed = trio.Event()
        self._load_started = 0.0
        self._last_load_s: float | None = None
        self.state = BackendState.STOPPED
        self.state_since = time.monotonic()
        self.facts: BackendFacts | None = None
        self.restarts = 0
        self.last_exit: LastExit | None = None
        self.calls = Calls()

    def reconfigure(self, *, load_timeout_s: float, restart_max: int) -> None:
        """Change the two limits; a load that has begun keeps its own."""
        self._load_timeout_s = load_timeout_s
        self._restart_max = restart_max

    @property
    def pid(self) -> int | None:
        """The decoder's process id, None while there is none."""
        return None if self._child is None else self._child.pid

    @property
    def devices(self) -> list[str]:
        """The devices that its program listed."""
        return list(self._launch.devices)

    @property
    def directory(self) -> Path:
        """The private directory that its socket is in."""
        return self._launch.socket_path.parent

    @property
    def program(self) -> str:
        """The decoder's program."""
        return self._launch.argv[0]

    @property
    def argv(self) -> Sequence[str]:
        """The decoder's command line."""
        return self._launch.argv

    @property
    def swa_window(self) -> int | None:
        """The model's sliding window in tokens, None without one."""
        return self._launch.swa_window

    @property
    def head_dim(self) -> int | None:
        """Values of one head of the model's attention, None where that is not known."""
        return self._launch.head_dim

    def rss_bytes(self) -> int | None:
        """Return the decoder's resident memory, None while it does not run."""
        if self._child is None:
            return None
        try:
            pages = int(Path(f"/proc/{self._child.pid}/statm").read_text("ascii").split()[1])
        except (OSError, ValueError, IndexError):
            return None
        return pages * 4096

    def _move(self, event: BackendEvent) -> None:
        self.state = after(self.state, event)
        self.state_since = time.monotonic()
        self._changed.set()
        self._changed = trio.Event()
        self._on_change()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the decoder running until cancelled; then stop it.

        Reports started once the decoder is ready for the first time.

        Raises:
            BackendFailed: it never became ready, or died more often than restart_max allows.
        """
        ever_ready = False

        def started() -> None:
            nonlocal ever_ready
            if not ever_ready:
                ever_ready = True
                task_status.started()

        try:
            while True:
                self._move(BackendEvent.START)
                reason = await self._run_once(started)
                self._note_exit(reason)
                if not ever_ready:
                    raise BackendFailed(
                        f"the decoder could not be started: {reason}; "
                        "onebitd --print-backend shows its command line, log.level debug its output"
                    )
                now = time.monotonic()
                if not may_restart([now - then for then in self._exit_times], self._restart_max):
                    self._move(BackendEvent.GIVE_UP)
                    raise BackendFailed(
                        f"the decoder died {self._restart_max + 1} times within "
                        f"{RESTART_WINDOW_S:g} s, last: {reason}"
                    )
                await trio.sleep(backoff_s(max(1, self._recent_exits())))
                self.restarts += 1
        finally:
            if self.state is BackendState.BACKOFF:
                self._move(BackendEvent.STOP)
            self._launch.socket_path.unlink(missing_ok=True)

    def _recent_exits(self) -> int:
        now = time.monotonic()
        return sum(1 for then in self._exit_times if now - then < RESTART_WINDOW_S)

    async def _run_once(self, started: Callable[[], None]) -> str:
        """Start the decoder and wait for its end; return why it ended."""
        self._begin_attempt()
        try:
            child = spawn(
                self._launch.argv,
                env=self._launch.env,
                guard=self._guard,
                merge_output=True,
                oom_score_adj=_OOM_SCORE_ADJ,
            )
        except SpawnError as error:
            self._move(BackendEvent.EXITED)
            return str(error)
        self._child = child
        self._move(BackendEvent.SPAWNED)
        log.info("backend_started", pid=child.pid)
        pumping = trio.CancelScope(shield=True)  # to its end: a full pipe would block its stop
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._pump, child.stdout, pumping)
            try:
                async with trio.open_nursery() as alive:
                    alive.start_soon(self._make_ready, child, started)
                    alive.start_soon(self._leave_if_stuck, alive.cancel_scope)
                    await child.wait()
                    alive.cancel_scope.cancel()
            finally:
                await self._end(child)
                # Its last words are in the pipe; a grandchild may hold the pipe open for ever.
                pumping.deadline = trio.current_time() + _LAST_WORDS_S
        return self._why_ended(child)

    def _why_ended(self, child: Child) -> str:
        """Return what is known by now; its last words may still be on their way."""
        stuck = child.returncode is None
        exit_text = "it does not die" if stuck else describe_exit(child.returncode or 0)
        if self._kill_reason is not None:
            return f"{self._kill_reason} ({exit_text})"
        said = self._last_error_line.decode("utf-8", "replace").strip()
        return f"{exit_text}: {said}" if said else exit_text

    async def _leave_if_stuck(self, scope: trio.CancelScope) -> None:
        """Wait no longer for a decoder that was killed and does not die."""
        await self._killed.wait()
        await trio.sleep(_STOP_KILL_GRACE_S)
        scope.cancel()

    async def _pump(self, output: trio.abc.ReceiveStream, scope: trio.CancelScope) -> None:
        with scope:
            await pump_lines(output, self._take_line)
        self._output.end()

    def _begin_attempt(self) -> None:
        self.facts = None
        self._last_error_line = b""
        self._kill_reason = None
        self._kill_counts = True
        self._killed = trio.Event()
        self._load_started = time.monotonic()
        self._slots.ensure()
        # llama-server never removes its socket, and does not start where one lies.
        self._launch.socket_path.unlink(missing_ok=True)

    async def _end(self, child: Child) -> None:
        """Bring child and group to an end, whatever the reason."""
        self.facts = None
        self._slots.drop_example()
        unwanted = child.returncode is not None or self._killed.is_set()
        if child.returncode is not None:
            # Who asks before its last words are there must not be told of an older end, or of none.
            self.last_exit = LastExit(rfc3339(dt.datetime.now(dt.UTC)), self._why_ended(child))
        if not unwanted:
            self._move(BackendEvent.STOP)
        gone = await child.stop(
            term_grace_s=0.0 if unwanted else _STOP_TERM_GRACE_S, kill_grace_s=_STOP_KILL_GRACE_S
        )
        if not gone:
            log.error("backend_stuck", pid=child.pid, detail="it does not die; left behind")
        self._child = None
        self._move(BackendEvent.EXITED)

    async def _make_ready(self, child: Child, started: Callable[[], None]) -> None:
        server = LlamaServer(str(self._launch.socket_path), self.calls)
        load_timeout_s = self._load_timeout_s
        try:
            with trio.fail_after(load_timeout_s):
                await self._wait_healthy(server)
            facts = await self._learn(server)
        except trio.TooSlowError:
            self.kill(f"no answer within {load_timeout_s:g} s (backend.load_timeout_s)")
            return
        except BackendError as error:
            if isinstance(error, BackendGone):
                await trio.sleep(_NOTICE_S)  # a dead child ends the nursery meanwhile
            self.kill(f"not usable after its start: {error}")
            return
        self.facts = facts
        self._last_load_s = time.monotonic() - self._load_started
        self._move(BackendEvent.READY)
        log.info(
            "backend_ready",
            pid=child.pid,
            load_s=round(self._last_load_s, 3),
            ctx_size=facts.ctx_size,
            build=facts.build,
            layout=None if facts.layout is None else facts.layout.describe(),
        )
        if facts.unsupported is not None:
            log.warning("handoff_unsupported", detail=facts.unsupported)
        started()

    async def _wait_healthy(self, server: LlamaServer) -> None:
        pause_s = _HEALTH_FIRST_POLL_S
        while True:
            try:
                if await server.is_ready():
                    return
            except (BackendGone, BackendTimeout):
                pass  # not listening yet; a dead child ends the nursery
            await trio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _HEALTH_LAST_POLL_S)

    async def _learn(self, server: LlamaServer) -> BackendFacts:
        """Ask the decoder what it is, and learn its state layout from a state it saved itself."""
        props = await server.props()
        layout: Layout | None = None
        baseline: Baseline | None = None
        unsupported: str | None = None
        name = self._slots.new_name()
        try:
            await server.fill_slot(_PROBE_TOKENS)
            await server.save(name)
            saved = await trio.to_thread.run_sync((self._slots.path / name).read_bytes)
            layout = state_file.learn_layout(saved, _PROBE_TOKENS)
            baseline = state_baseline.learn_baseline(saved, state_file.parse(saved, layout))
            self._slots.keep_example(name)
        except StateFileError as error:
            unsupported = f"the decoder's own state file cannot be read: {error}"
        except (BackendGone, BackendTimeout):
            raise
        except (BackendError, OSError) as error:
            unsupported = f"the decoder cannot save its slot: {error}"
        finally:
            self._slots.remove(name)
        try:
            await server.erase()
        except BackendRefused as error:  # it serves all the same, by itself
            unsupported = unsupported or f"the decoder cannot erase its slot: {error}"
        build = props.get("build_info")
        return BackendFacts(
            server=server,
            generation=self.restarts,
            ctx_size=_ctx_size(props),
            build=build if isinstance(build, str) else None,
            layout=layout,
            unsupported=unsupported,
            baseline=baseline,
        )

    def _take_line(self, line: bytes) -> None:
        found = _LEVEL.match(line)
        letter = found.group(1) if found else b"D"
        harmless = _HARMLESS.search(line) is not None
        looks_bad = letter == b"E" or (not found and _ERROR_LINE.search(line) is not None)
        if looks_bad and not harmless and not self._last_error_line.startswith(b"GGML_ASSERT"):
            # The first assertion is the cause; the backtrace behind it is not.
            self._last_error_line = line[found.end() if found else 0 :][:300]
        level: Level = "debug"
        if not harmless and letter in (b"E", b"W"):
            level = "error" if letter == b"E" else "warning"
        self._output.write(level, line)

    def _note_exit(self, reason: str) -> None:
        now = dt.datetime.now(dt.UTC)
        self.last_exit = LastExit(rfc3339(now), reason)
        if self._kill_counts:
            self._exit_times.append(time.monotonic())
        log.error("backend_exited", detail=reason, line=f"the decoder ended: {reason}")

    def kill(self, reason: str, *, its_own_fault: bool = True) -> None:
        """Have the decoder ended and started afresh, for this reason.

        Args:
            reason: for the log and `last_exit`.
            its_own_fault: False when only its slot cannot be trusted any more: that does not count
                towards `restart_max`, or a bad provider could end the daemon.
        """
        if self._child is not None and self._kill_reason is None:
            self._kill_reason = reason
            self._kill_counts = its_own_fault
            self.facts = None
            self._killed.set()
            self._child.signal(signal.SIGKILL)

    async def kill_unless_gone(
        self, facts: BackendFacts, reason: str, *, its_own_fault: bool = False
    ) -> None:
        """Have a decoder that broke a connection ended, if it does not turn out to have died."""
        with trio.move_on_after(_NOTICE_S):
            while self.facts is facts:
                changed = self._changed
                await changed.wait()
        if self.facts is facts:
            self.kill(reason, its_own_fault=its_own_fault)

    async def wait_ready(self, patience_s: float | None = None) -> BackendFacts:
        """Wait until the decoder can be used.

        Args:
            patience_s: give up at once when a restart is not expected to end within this time;
                None waits for however long it takes.

        Raises:
            RequestError: 503 with Retry-After.
        """
        deadline = None if patience_s is None else time.monotonic() + patience_s
        while self.state is not BackendState.READY or self.facts is None:
            left_s = math.inf if deadline is None else deadline - time.monotonic()
            expected_s = self.expected_ready_s()
            ended = self.state in (
                BackendState.FAILED,
                BackendState.STOPPED,
                BackendState.STOPPING,
            )
            if ended and self._load_started:  # before the first start: it will be there in a moment
                raise _unavailable("the decoder is not running", None)
            if deadline is not None and (expected_s is None or expected_s > left_s or left_s <= 0):
                raise _unavailable(
                    "Loading model" if self.last_exit is None else "the decoder is restarting",
                    expected_s,
                )
            changed = self._changed
            with trio.move_on_after(left_s):
                await changed.wait()
        return self.facts

    async def wait_ready_for_client(self) -> BackendFacts:
        """Wait for the decoder as long as a request is meant to.

        Raises:
            RequestError: 503 with Retry-After.
        """
        return await self.wait_ready(self._patience_s)

    async def wait_restarted(self, generation: int) -> BackendFacts:
        """Wait for a decoder newer than `generation`, whose connection broke.

        Raises:
            RequestError: 503; there is none, or the old one still runs and only hangs up.
        """
        with trio.move_on_after(_NOTICE_S):
            while self.facts is not None and self.facts.generation == generation:
                changed = self._changed
                await changed.wait()
        if self.facts is not None and self.facts.generation == generation:
            if self._launch.socket_path.exists():
                raise RequestError(
                    502,
                    "the decoder hung up on this request",
                    kind="server_error",
                    reason=Reason.BACKEND_DOWN,
                )
            self.kill("its socket was removed")
        return await self.wait_ready()

    def expected_ready_s(self) -> float | None:
        """Return in how many seconds a restart should be over, None when there is no telling."""
        if self.state is BackendState.READY:
            return 0.0
        if self._last_load_s is None:
            return None
        pause_s = backoff_s(max(1, self._recent_exits()))
        if self.state is BackendState.BACKOFF:
            since = time.monotonic() - self.state_since
            return max(0.0, pause_s - since) + self._last_load_s
        return max(0.1, self._last_load_s - (time.monotonic() - self._load_started))


def _unavailable(message: str, expected_s: float | None) -> RequestError:
    retry = _FIRST_LOAD_RETRY_S if expected_s is None else max(1, math.ceil(expected_s))
    return RequestError(
        503,
        message,
        kind="unavailable_error",
        retry_after_s=retry,
        reason=Reason.BACKEND_DOWN,
    )


def _ctx_size(props: Mapping[str, Any]) -> int | None:
    settings = props.get("default_generation_settings")
    value = settings.get("n_ctx") if isinstance(settings, dict) else None
    return value if isinstance(value, int) and value > 0 else None
