"""What the control socket and the service manager are told about the daemon, as of now."""

from __future__ import annotations

import collections
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from onebitd import __version__
from onebitd.adapters import lock_probe
from onebitd.core import advice, recent_handoffs
from onebitd.core.backend_state import BackendState
from onebitd.core.breaker import BreakerStatus, State
from onebitd.core.config import SETTING_BY_KEY, Config
from onebitd.core.control_api import (
    BackendStatus,
    LockStatus,
    ModelStatus,
    PolicyStatus,
    ProviderStatus,
    QueueStatus,
    RequestInFlight,
    SlotStatus,
    Status,
)
from onebitd.core.forecast import SHORTEST, Forecast, Given
from onebitd.core.handoff import HandoffRecord, Route
from onebitd.core.own_unit import OwnUnit
from onebitd.services.admission import Admission
from onebitd.services.handoff import Handoffs
from onebitd.services.history import History
from onebitd.services.supervisor import Supervisor

_POLICY_KEPT_S: Final = 1.0
"""To work out where a handoff pays takes some milliseconds of the event loop."""
_SECRET_FLAG: Final = re.compile(r"token$|-hft$|key$|secret|password")


class StatusView:
    """Reads the services; waits for nothing and changes nothing.

    Attributes:
        draining: set once the daemon is stopping.
        failed: set once there will be no decoder any more, which is why the daemon stops.
        history: the handoffs since the start.
    """

    def __init__(
        self,
        config: Config,
        supervisor: Supervisor,
        handoffs: Handoffs,
        admission: Admission,
        history: History,
        listen: Sequence[str],
        *,
        service_manager: bool,
        unit: OwnUnit | None = None,
        listen_passed: bool = False,
        history_problem: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._config = config
        self._supervisor = supervisor
        self._handoffs = handoffs
        self._admission = admission
        self._listen = list(listen)
        self._service_manager = service_manager
        self._unit = unit
        self._listen_passed = listen_passed
        self._history_problem = history_problem
        self._last: collections.deque[HandoffRecord] = collections.deque(
            maxlen=recent_handoffs.LOOKED_AT
        )
        history.listen(self._last.append)
        self._policy: tuple[float, PolicyStatus] | None = None
        self._started = time.monotonic()
        self.history = history
        self.draining = False
        self.failed = False

    def reconfigure(self, config: Config) -> None:
        """Show a new configuration from now on."""
        self._config = config
        self._policy = None

    def line(self) -> str:
        """Return the state as one line, for `systemctl status`.

        It may be shown to everybody, so the last words of decoder and provider, which may quote a
        prompt, stay out of it.
        """
        state, detail = self.state()
        if state == "draining" and self._admission.holder is None:
            return "stopping"
        if state in ("ready", "degraded"):
            where = f"ready on {', '.join(self._listen)}"
            fault = self._fault(self._handoffs.breaker.brief)
            return where if fault is None else f"degraded, {fault}; {where}"
        last_exit = self._supervisor.last_exit
        if state == "restarting" and last_exit is not None:
            return f"restarting the decoder: {last_exit.brief}"
        if state == "failed" and last_exit is not None:
            return f"failed, the decoder ended: {last_exit.brief}"
        return f"{state} {detail}" if detail else state

    def state(self) -> tuple[str, str | None]:
        """Return the state, one of control_api.STATES, and what is to be said about it."""
        supervisor = self._supervisor
        since_s = time.monotonic() - supervisor.state_since
        last_exit = supervisor.last_exit
        why = None if last_exit is None else f"the decoder: {last_exit.reason}"
        if self.failed or supervisor.state is BackendState.FAILED:
            return "failed", why
        if self.draining:
            replies = self._admission.pending + (self._admission.holder is not None)
            return "draining", f"{replies} {'reply' if replies == 1 else 'replies'}"
        if supervisor.state is BackendState.READY:
            fault = self._fault(self._handoffs.breaker.out_of_service)
            return "ready" if fault is None else "degraded", fault
        if why is not None:
            return "restarting", why
        return "loading", f"{since_s:.0f} s"

    def _fault(self, breaker: str | None) -> str | None:
        """Return what keeps the daemon from handing over, or should; None when that is nothing."""
        called = None if breaker is None else f"the provider is not called: {breaker}"
        off = self._handoffs.route_off
        route = None if off is None else f"nothing is handed over: {off}"
        return "; ".join(filter(None, (self._handoffs.audits.warning, called, route))) or None

    def look_at_lock(self) -> lock_probe.LockStatus:
        """Look at the device lock's file. Any thread may: /proc/locks takes the kernel its time."""
        return lock_probe.probe(self._config.lock.path)

    def status(self, lock: lock_probe.LockStatus | None = None, *, weighed: bool = True) -> Status:
        """Return the whole of `/v1/status`, as of now.

        Args:
            lock: what `look_at_lock` found a moment ago; without, it is looked at now.
            weighed: with `policy`, which may take some milliseconds to work out.
        """
        config, supervisor = self._config, self._supervisor
        facts = supervisor.facts
        state, detail = self.state()
        return Status(
            version=__version__,
            instance=config.instance,
            pid=os.getpid(),
            uptime_s=round(time.monotonic() - self._started, 3),
            state=state,
            state_detail=detail,
            listen=self._listen,
            model=ModelStatus(
                alias=config.model.alias,
                path=config.model.path,
                ctx_size=config.model.ctx_size if facts is None else facts.ctx_size,
                state_version=None
                if facts is None or facts.layout is None
                else facts.layout.version,
                layout=None
                if facts is None
                else facts.unsupported
                if facts.layout is None
                else facts.layout.describe(),
            ),
            backend=BackendStatus(
                pid=supervisor.pid,
                state=supervisor.state.value,
                restarts=supervisor.restarts,
                last_exit=supervisor.last_exit,
                build=None if facts is None else facts.build,
                devices=supervisor.devices,
                rss_bytes=supervisor.rss_bytes(),
            ),
            provider=self._provider_status(),
            lock=self._lock_status(lock or self.look_at_lock()),
            slot=self._slot_status(),
            queue=QueueStatus(self._admission.pending, self._admission.max_pending),
            handoffs=self.history.counts(),
            service_manager=self._service_manager,
            audit=self._handoffs.audits.status(),
            listen_passed=self._listen_passed,
            recent=recent_handoffs.look_at(self._last, self._alone_ms),
            policy=self._policy_status() if weighed else None,
            history_problem=self._history_problem(),
            devices=list(self._handoffs.telemetry.latest()),
            unit=None if self._unit is None else self._unit.name,
            user_unit=self._unit is not None and self._unit.of_user,
        )

    def _alone_ms(self, tokens: int) -> float | None:
        return self._handoffs.keeper.costs.decoder_ms(0, tokens, overlapped=False)

    def _policy_status(self) -> PolicyStatus | None:
        if self._config.provider.program is None:
            return None
        now = time.monotonic()
        if self._policy is None or now - self._policy[0] > _POLICY_KEPT_S:
            self._policy = (now, self._policy_now())
        return self._policy[1]

    def _policy_now(self) -> PolicyStatus:
        handoffs, config, facts = self._handoffs, self._config, self._supervisor.facts
        shared = handoffs.shares.state(config) == "on"
        route = Route.SHARED if shared else Route.FILE
        policy = config.handoff.policy.value
        forecast = Forecast(handoffs.keeper.costs, Given())
        ctx_size = config.model.ctx_size if facts is None else facts.ctx_size
        missing = list(forecast.missing())
        if missing or route not in forecast.routes() or ctx_size is None:
            return PolicyStatus(policy, route.value, missing)
        found = advice.judge(route, forecast.first_byte, max(ctx_size - 1, SHORTEST))
        return PolicyStatus(
            policy,
            route.value,
            wins=[list(stretch) for stretch in found.wins],
            last=found.last,
            best_tokens=found.best_tokens,
            best_factor=round(found.best_factor, 3),
        )

    def _provider_status(self) -> ProviderStatus:
        handoffs = self._handoffs
        breaker, drift = handoffs.breaker.status(), handoffs.audits.out_of_service
        if drift is not None:
            last = handoffs.audits.status().last
            since = None if last is None else last.time
            breaker = BreakerStatus(State.OPEN, breaker.failures, since=since, detail=drift)
        return ProviderStatus(
            program=self._config.provider.program,
            state=handoffs.provider_state,
            breaker=breaker.state.value,
            consecutive_failures=self.history.consecutive_failures,
            last_error=self.history.last_failure,
            shared=handoffs.shares.state(self._config),
            breaker_class=breaker.failure_class if drift is None else "drift",
            breaker_since=breaker.since,
            breaker_next_try_s=breaker.next_try_s,
            breaker_detail=breaker.detail,
            route_off=handoffs.route_off,
        )

    def _lock_status(self, found: lock_probe.LockStatus) -> LockStatus:
        lock = self._config.lock
        holder = found.holder
        return LockStatus(
            path=lock.path,
            held=found.held,
            holder=None if holder is None else {"pid": holder.pid, "command": holder.command},
            hold=lock.hold if lock.enabled else "never",
            problem=found.problem,
            usable=found.usable,
        )

    def _slot_status(self) -> SlotStatus:
        holder, loan = self._admission.holder, self._admission.loan
        if loan is not None:
            age_s = round(time.monotonic() - loan.entered, 3)
            return SlotStatus(
                busy=True, phase="audit", request_id=loan.request_id or None, age_s=age_s
            )
        if holder is None:
            return SlotStatus(busy=False, phase=None, request_id=None, age_s=None)
        return SlotStatus(
            busy=True,
            phase=holder.phase,
            request_id=holder.request_id,
            age_s=round(time.monotonic() - holder.entered, 3),
        )

    def requests(self) -> list[RequestInFlight]:
        """Return the requests that are being served, the oldest first."""
        return [entry.describe() for entry in self._handoffs.in_flight.entries()]

    def config(self) -> dict[str, dict[str, Any]]:
        """Return every setting with its value and source; values that may be secret hidden."""
        shown: dict[str, dict[str, Any]] = {}
        for key, value in self._config.values().items():
            if SETTING_BY_KEY[key].secret_values:
                value = dict.fromkeys(value, "(hidden)")
            elif key == "backend.args":
                value = _without_secrets(value)
            shown[key] = {"value": value, "source": self._config.sources[key]}
        return shown

    def costs(self) -> dict[str, Any]:
        """Return what was learned of provider and decoder, and what it is about."""
        config, facts = self._config, self._supervisor.facts
        return {
            "costs": self._handoffs.keeper.costs.to_json(),
            "ctx_size": config.model.ctx_size if facts is None else facts.ctx_size,
            "provider": config.provider.program,
            "share": config.handoff.share,
            "model": config.model.alias,
        }


def _without_secrets(args: Sequence[str]) -> list[str]:
    """Hide the value behind each flag whose name says that it is a secret."""
    shown: list[str] = []
    hide = False
    for arg in args:
        shown.append("(hidden)" if hide else arg)
        hide = arg.startswith("-") and _SECRET_FLAG.search(arg) is not None
    return shown
