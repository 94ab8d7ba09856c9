"""What the control socket says, but for handoffs, settings and costs; for both ends.

The daemon fills the dataclasses and sends `to_json`; `onebitctl` reads plain mappings, so that it
also understands a daemon of another version. Fields that do not apply are null.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from typing import TYPE_CHECKING, Any, Final

from onebitd.core.audit import LastAudit
from onebitd.core.recent_handoffs import RecentHandoffs

if TYPE_CHECKING:
    from onebitd.core.telemetry import DeviceSample  # what `status` prints needs none of it

STATES: Final = ("loading", "ready", "degraded", "restarting", "draining", "failed")
"""The daemon's own state, the first word of `onebitctl status`. Degraded: ready, and an audit has
found drift since the last reset of the provider, its breaker is not closed, or nothing is handed
over because the decoder makes no use of it."""


def rfc3339(moment: dt.datetime) -> str:
    """Return a UTC time to the millisecond, as every time here is written.

    >>> rfc3339(dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC))
    '2026-01-31T12:00:00.000Z'
    """
    return moment.astimezone(dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclasses.dataclass(frozen=True, slots=True)
class ModelStatus:
    """What is served; `state_version` is the decoder's state file version, learned at its start."""

    alias: str
    path: str
    ctx_size: int | None
    state_version: int | None
    layout: str | None
    """One line: the layout of a state file, or why this model cannot be handed over."""


@dataclasses.dataclass(frozen=True, slots=True)
class LastExit:
    """How the decoder last ended, against its will."""

    time: str
    reason: str

    @property
    def brief(self) -> str:
        """The reason without the decoder's last words, which may quote a prompt.

        >>> LastExit("", "signal 6 (SIGABRT): GGML_ASSERT(ids of 'my secret') failed").brief
        'signal 6 (SIGABRT)'
        """
        return self.reason.partition(":")[0]


@dataclasses.dataclass(frozen=True, slots=True)
class BackendStatus:
    """The decoder; `state` is one of `core.backend_state`."""

    pid: int | None
    state: str
    restarts: int
    last_exit: LastExit | None
    build: str | None
    devices: list[str]
    rss_bytes: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class ProviderStatus:
    """The prefill provider; `state` is `none`, `idle`, `running` or `stuck`.

    `breaker` is `closed`, `open` or `half_open`; `open` also while audits keep the provider out of
    service, with the class `drift`. `shared` is the shared route: `off`, `on`, `not supported by
    this decoder` or `paused, ...`.

    Attributes:
        breaker_class: one of `core.failure_class`, or `drift`; this and the next three are None
            while it is closed.
        breaker_since: when it opened, RFC 3339.
        breaker_next_try_s: until the provider is tried again, 0 while it is; None for `drift`,
            which ends by a reset only.
        breaker_detail: the sentence that a skipped request has as its detail.
        route_off: why nothing is handed over to this decoder any more, None as long as it is.
    """

    program: str | None
    state: str
    breaker: str
    consecutive_failures: int
    last_error: dict[str, str] | None
    """`time`, `reason` and `detail` of the last failed handoff, None when there was none."""
    shared: str = "off"
    breaker_class: str | None = None
    breaker_since: str | None = None
    breaker_next_try_s: float | None = None
    breaker_detail: str | None = None
    route_off: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class LockStatus:
    """The NPU device lock; `holder` is `{pid, command}` whoever it is, None when free.

    `hold` is `never` when no lock is taken. `usable` is False when `problem` keeps the daemon from
    taking it.
    """

    path: str
    held: bool
    holder: dict[str, Any] | None
    hold: str
    problem: str | None
    usable: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class SlotStatus:
    """Slot 0 and the request that has it; `phase` is where that request is."""

    busy: bool
    phase: str | None
    request_id: str | None
    age_s: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class QueueStatus:
    """Requests that wait for the slot."""

    pending: int
    max: int


@dataclasses.dataclass(frozen=True, slots=True)
class HandoffCounts:
    """Requests on the handoff route since the start, by outcome and by reason."""

    used: int = 0
    wasted: int = 0
    fallback: int = 0
    skipped: int = 0
    failed: int = 0
    cancelled: int = 0
    by_reason: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class AuditStatus:
    """Handoffs that the decoder recomputed, since the start; `strikes` since the last reset.

    `given_up` counts those that were chosen and could not be audited.
    """

    audited: int = 0
    drifted: int = 0
    given_up: int = 0
    strikes: int = 0
    last: LastAudit | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyStatus:
    """What `handoff.policy` does with the prompts to come, by what was learned so far.

    Attributes:
        policy: `auto`, `always` or `never`.
        route: that a handoff takes, `file` or `shared`.
        missing: what is not known yet, words of `core.forecast`: `decoder`, `provider`, `restore`;
            the next three are None and `wins` is empty as long as there is one.
        wins: the first and last prompt length of each stretch where a handoff beats the decoder.
        last: the longest prompt that was looked at.
        best_tokens: the length at which a handoff does best.
        best_factor: the decoder's time over the handoff's there; below 1 it always loses.
    """

    policy: str
    route: str
    missing: list[str] = dataclasses.field(default_factory=list)
    wins: list[list[int]] = dataclasses.field(default_factory=list)
    last: int | None = None
    best_tokens: int | None = None
    best_factor: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """The whole of `/v1/status`; `service_manager`: it runs under one, which has its log.

    Attributes:
        unit: the service of systemd that it is, None where it is none.
        user_unit: that service belongs to a user's own service manager.
        listen_passed: the service manager has the public sockets: who connects while the daemon
            does not run is not refused, and waits.
        recent: figures of the last handoffs.
        policy: what becomes of the next prompts, None without a provider.
        history_problem: why handoffs are not kept over a restart, a sentence; None when they are,
            or need not be.
        devices: GPUs and NPUs as of the last sample; none when that is older than some seconds,
            as they are sampled only while a request is on the handoff route.
    """

    version: str
    instance: str
    pid: int
    uptime_s: float
    state: str
    state_detail: str | None
    listen: list[str]
    model: ModelStatus
    backend: BackendStatus
    provider: ProviderStatus
    lock: LockStatus
    slot: SlotStatus
    queue: QueueStatus
    handoffs: HandoffCounts
    service_manager: bool = False
    audit: AuditStatus = dataclasses.field(default_factory=AuditStatus)
    listen_passed: bool = False
    recent: RecentHandoffs = dataclasses.field(default_factory=RecentHandoffs)
    policy: PolicyStatus | None = None
    history_problem: str | None = None
    devices: list[DeviceSample] = dataclasses.field(default_factory=list)
    unit: str | None = None
    user_unit: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts and lists, in the order of the declaration."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, slots=True)
class RequestInFlight:
    """One of `/v1/requests`: a request that is being served.

    Attributes:
        request_id: the client's own, if it sent one; others may have the same.
        path: percent-decoded.
        phase: where it is, a word of `onebitd(8)`.
        stream: whether it asked for a stream; this and the next two are None off the handoff
            route, and as long as they are not known.
        prompt_tokens: of its prompt.
        reply_tokens: events of the stream so far; None for a reply in one piece.
    """

    request_id: str
    method: str
    path: str
    phase: str
    age_s: float
    stream: bool | None = None
    prompt_tokens: int | None = None
    reply_tokens: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict, in the order of the declaration."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, slots=True)
class ProviderReset:
    """What `POST /v1/provider/reset` cleared, as it was before.

    Attributes:
        strikes: of audits.
        breaker: `closed`, `open` or `half_open`.
        failures: in a row that the breaker had counted.
        route_off: why nothing was handed over to this decoder, None when that was not so.
    """

    strikes: int
    breaker: str
    failures: int = 0
    route_off: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict, in the order of the declaration."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, slots=True)
class ReloadAnswer:
    """What `POST /v1/reload` did: key paths that have changed, and that wait for a restart.

    `warnings` are lines about what keeps handoffs, not the daemon, from working.
    """

    changed: list[str]
    needs_restart: list[str]
    warnings: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return plain lists, in the order of the declaration."""
        return dataclasses.asdict(self)

    def summary(self) -> str:
        """Return one line for people.

        >>> ReloadAnswer(["log.level"], [], []).summary()
        'reloaded: log.level'
        >>> ReloadAnswer([], ["http.port"], []).summary()
        'nothing was taken over'
        """
        if self.changed:
            return f"reloaded: {', '.join(self.changed)}"
        return "nothing was taken over" if self.needs_restart else "nothing has changed"
