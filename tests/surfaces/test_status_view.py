"""The state in one line, for the service manager."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from onebitd.core.audit import LastAudit
from onebitd.core.backend_state import BackendState
from onebitd.core.breaker import BreakerStatus, FailureClass, State
from onebitd.core.config_resolve import resolve
from onebitd.core.control_api import AuditStatus, LastExit, PolicyStatus
from onebitd.core.costs import Costs
from onebitd.core.handoff import Route
from onebitd.core.recent_handoffs import LOOKED_AT
from onebitd.core.wording import Wording
from onebitd.services.admission import Admission
from onebitd.services.history import History
from onebitd.services.share_route import ShareRoute
from onebitd.surfaces import status_view as status_view_module
from onebitd.surfaces.status_view import StatusView
from tests.surfaces.control_server import make_record

ABORTED = "signal 6 (SIGABRT): GGML_ASSERT('a secret prompt') failed"
KILLED = "no answer within 600 s (backend.load_timeout_s) (signal 9 (SIGKILL))"


def view(
    state: BackendState,
    *,
    last: str = "",
    waiting: int = 0,
    draining: bool = False,
    failed: bool = False,
    warning: str | None = None,
    why_open: str | None = None,
    route_off: str | None = None,
) -> StatusView:
    """Return the view of a daemon in this state, for 12 seconds."""
    supervisor = SimpleNamespace(
        state=state,
        state_since=time.monotonic() - 12.1,
        last_exit=LastExit("2026-01-31T12:00:00.000Z", last) if last else None,
    )
    admission = Admission(9)
    for number in range(waiting):
        admission.enter(f"r{number}")
    config = resolve(instance="x", file={"model": {"path": "/m.gguf"}})
    handoffs = SimpleNamespace(
        audits=SimpleNamespace(warning=warning),
        breaker=SimpleNamespace(
            brief=why_open, out_of_service=why_open and f"{why_open}: a secret prompt"
        ),
        route_off=route_off,
    )
    parts: list[Any] = [config, supervisor, handoffs, admission, History(), ["127.0.0.1:8000"]]
    found = StatusView(*parts, service_manager=True)
    found.draining, found.failed = draining, failed
    return found


@pytest.mark.parametrize(
    ("state", "more", "line"),
    [
        ("LOADING", {}, "loading 12 s"),
        ("READY", {}, "ready on 127.0.0.1:8000"),
        ("READY", {"last": ABORTED}, "ready on 127.0.0.1:8000"),
        ("READY", {"warning": "drift"}, "degraded, drift; ready on 127.0.0.1:8000"),
        (
            "READY",
            {"why_open": "crash"},
            "degraded, the provider is not called: crash; ready on 127.0.0.1:8000",
        ),
        (
            "READY",
            {"warning": "drift", "route_off": "it needs --swa-full"},
            "degraded, drift; nothing is handed over: it needs --swa-full; ready on 127.0.0.1:8000",
        ),
        ("READY", {"warning": "drift", "draining": True}, "stopping"),
        ("LOADING", {"last": "status 3"}, "restarting the decoder: status 3"),
        ("LOADING", {"last": KILLED}, f"restarting the decoder: {KILLED}"),
        ("READY", {"waiting": 2, "draining": True}, "draining 2 replies"),
        ("READY", {"waiting": 1, "draining": True}, "draining 1 reply"),
        ("READY", {"draining": True}, "stopping"),
        ("FAILED", {"last": ABORTED}, "failed, the decoder ended: signal 6 (SIGABRT)"),
        (
            "STOPPED",
            {"last": KILLED, "draining": True, "failed": True},
            f"failed, the decoder ended: {KILLED}",
        ),
        ("STOPPED", {"failed": True}, "failed"),
    ],
)
def test_line_tells_the_state_and_no_prompt(state: str, more: dict[str, Any], line: str) -> None:
    """`systemctl status` is for everybody; what the decoder said last is not in it."""
    assert view(BackendState[state], **more).line() == line


def test_state_detail_has_the_decoders_last_words_for_the_operator() -> None:
    """The control socket is for its group only, and there they help."""
    assert view(BackendState.BACKOFF, last=ABORTED).state() == (
        "restarting",
        f"the decoder: {ABORTED}",
    )


def test_state_is_degraded_while_the_breaker_is_open_with_the_providers_last_words() -> None:
    """For the operator, like the decoder's."""
    assert view(BackendState.READY, why_open="crash").state() == (
        "degraded",
        "the provider is not called: crash: a secret prompt",
    )


def status_view(tmp_path: Path, handoffs: dict[str, Any], file: dict[str, Any]) -> StatusView:
    """Return the view of a daemon that is ready, with these handoffs and settings."""
    supervisor: Any = SimpleNamespace(
        state=BackendState.READY,
        state_since=0.0,
        last_exit=None,
        directory=tmp_path,
        facts=SimpleNamespace(
            generation=1, ctx_size=512, layout=None, unsupported="why", build="b1"
        ),
        pid=7,
        restarts=1,
        devices=[],
        rss_bytes=lambda: None,
    )
    fields = {
        "provider_state": "idle",
        "shares": ShareRoute(supervisor, cast("Any", None), cast("Any", None)),
        "audits": SimpleNamespace(warning=None, out_of_service=None, status=AuditStatus),
        "breaker": SimpleNamespace(brief=None, out_of_service=None, status=BreakerStatus),
        "route_off": None,
        "keeper": SimpleNamespace(costs=Costs()),
        "telemetry": SimpleNamespace(latest=tuple),
    }
    config = resolve(
        instance="x",
        file={"model": {"path": "/m.gguf"}, "lock": {"path": str(tmp_path / "lock")}, **file},
    )
    fake: Any = SimpleNamespace(**(fields | handoffs))
    return StatusView(config, supervisor, fake, Admission(9), History(), [], service_manager=False)


def breaker_of(found: StatusView) -> dict[str, Any]:
    """Return what the control socket says of the breaker."""
    provider = found.status().to_json()["provider"]
    return {name: provider[name] for name in provider if name.startswith(("breaker", "route"))}


SINCE = "2026-01-31T12:00:00.000Z"


def test_status_breaker_closed_has_null_for_all_but_its_state(tmp_path: Path) -> None:
    """A field that does not apply is there and null."""
    assert breaker_of(status_view(tmp_path, {}, {})) == {
        "breaker": "closed",
        "breaker_class": None,
        "breaker_since": None,
        "breaker_next_try_s": None,
        "breaker_detail": None,
        "route_off": None,
    }


def test_status_breaker_open_has_class_since_next_try_and_sentence(tmp_path: Path) -> None:
    """Everything that an operator or a metric asks of it; and the route's own reason."""
    status = BreakerStatus(State.HALF_OPEN, 3, FailureClass.BAD_STATE, SINCE, 0.0, "why")
    breaker = SimpleNamespace(brief="why", out_of_service="why", status=lambda: status)
    found = status_view(tmp_path, {"breaker": breaker, "route_off": "no use"}, {})
    assert breaker_of(found) == {
        "breaker": "half_open",
        "breaker_class": "bad_state",
        "breaker_since": SINCE,
        "breaker_next_try_s": 0.0,
        "breaker_detail": "why",
        "route_off": "no use",
    }


def test_status_breaker_that_audits_opened_has_the_class_drift(tmp_path: Path) -> None:
    """It has no next try: a reset alone ends it."""
    last = LastAudit(SINCE, "r1", 0.5, 3, "k", ok=False)
    audits = SimpleNamespace(
        warning="drift", out_of_service="3 audits", status=lambda: AuditStatus(3, 3, 0, 3, last)
    )
    assert breaker_of(status_view(tmp_path, {"audits": audits}, {})) == {
        "breaker": "open",
        "breaker_class": "drift",
        "breaker_since": SINCE,
        "breaker_next_try_s": None,
        "breaker_detail": "3 audits",
        "route_off": None,
    }


@pytest.mark.parametrize(
    ("share", "refused_by", "shared"),
    [
        (False, None, "off"),
        (False, 1, "off"),
        (True, None, "on"),
        (True, 1, "not supported by this decoder"),
        (True, 0, "on"),
    ],
    ids=["off", "off-and-refused", "on", "refused", "refused-before-the-restart"],
)
def test_status_provider_shared_is_the_route_as_this_decoder_has_it(
    tmp_path: Path, share: bool, refused_by: int | None, shared: str
) -> None:
    """`provider.shared` on the control socket; what an earlier decoder refused is forgotten."""
    found = status_view(tmp_path, {}, {"handoff": {"share": share}})
    if refused_by is not None:
        found._handoffs.shares._refused = (refused_by, Wording.of("it cannot export"))
    assert found.status().to_json()["provider"]["shared"] == shared


# --- what the last handoffs were like, and what the policy makes of them -------------------------


def learned() -> Costs:
    """Return costs of a provider that wins from some length on."""
    costs = Costs()
    for tokens in (100, 300, 700, 1500):
        costs.note_provider(
            Route.FILE, tokens, 40 + tokens * 0.2, overlapped=False, cold=False, now=1.0
        )
        costs.note_decoder(0, tokens, tokens * 2.0, overlapped=False, now=1.0)
        costs.note_decoder(tokens, 1, 2.0, overlapped=False, now=1.0)
        costs.note_restore(tokens * 30_000, tokens * 0.02, 1.0)
        costs.note_state(tokens, tokens * 30_000)
    return costs


WITH_PROVIDER = {"provider": {"program": "/bin/npu"}}


def test_status_policy_is_null_without_a_provider(tmp_path: Path) -> None:
    """Nothing can be handed over, whatever the policy."""
    assert status_view(tmp_path, {}, {}).status().policy is None


def test_status_policy_tells_what_is_missing_until_it_is_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worked out now and then, and at once after a change of the configuration."""
    monkeypatch.setattr(status_view_module, "_POLICY_KEPT_S", 3600.0)
    keeper = SimpleNamespace(costs=Costs())
    found = status_view(tmp_path, {"keeper": keeper}, WITH_PROVIDER)
    assert found.status().policy == PolicyStatus("auto", "file", ["decoder", "provider"])
    keeper.costs = learned()
    assert found.status().policy == PolicyStatus("auto", "file", ["decoder", "provider"])
    found.reconfigure(found._config)
    policy = found.status().policy
    assert policy is not None
    (stretch,) = policy.wins
    assert 2 < stretch[0] < 100
    assert (stretch[1], policy.last, policy.missing) == (511, 511, [])
    assert policy.best_factor is not None
    assert policy.best_factor > 2


def test_status_policy_of_a_route_that_is_not_known_yet_is_told_without_figures(
    tmp_path: Path,
) -> None:
    """What the file route costs says nothing about the shared one."""
    keeper = SimpleNamespace(costs=learned())
    found = status_view(tmp_path, {"keeper": keeper}, WITH_PROVIDER | {"handoff": {"share": True}})
    assert found.status().policy == PolicyStatus("auto", "shared")


def test_status_recent_has_the_last_records_only(tmp_path: Path) -> None:
    """The first ones do not count for ever, and what they would have taken is from the costs."""
    found = status_view(tmp_path, {"keeper": SimpleNamespace(costs=learned())}, {})
    for first_byte_ms in (1.0, *[100.0] * LOOKED_AT):
        found.history.add(make_record(first_byte_ms=first_byte_ms))
    recent = found.status().recent
    assert (recent.count, recent.used.count) == (LOOKED_AT, LOOKED_AT)
    assert recent.used.first_byte_ms == 100.0
    assert recent.used.saved_sum_ms == pytest.approx(LOOKED_AT * (2 * 307 - 100), rel=0.1)


def test_status_history_problem_is_that_of_now(tmp_path: Path) -> None:
    """Once it works again, nothing is wrong any more."""
    problems = ["no space left"]
    found = status_view(tmp_path, {}, {})
    found._history_problem = lambda: next(iter(problems), None)
    assert found.status().history_problem == "no space left"
    problems.clear()
    assert found.status().to_json()["history_problem"] is None
