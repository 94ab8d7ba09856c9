"""The state in one line, for the service manager."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onebitd.core.backend_state import BackendState
from onebitd.core.config_resolve import resolve
from onebitd.core.control_api import AuditStatus, LastExit
from onebitd.services.admission import Admission
from onebitd.services.history import History
from onebitd.services.share_route import ShareRoute
from onebitd.surfaces.status_view import StatusView

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
    handoffs = SimpleNamespace(audits=SimpleNamespace(warning=warning))
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
    nobody: Any = None
    route = ShareRoute(supervisor, nobody, nobody)
    if refused_by is not None:
        route._refused = (refused_by, "it cannot export")
    file = {"model": {"path": "/m.gguf"}, "lock": {"path": str(tmp_path / "lock")}}
    config = resolve(instance="x", file={**file, "handoff": {"share": share}})
    audits = SimpleNamespace(warning=None, out_of_service=None, status=AuditStatus)
    handoffs: Any = SimpleNamespace(provider_state="idle", shares=route, audits=audits)
    found = StatusView(
        config, supervisor, handoffs, Admission(9), History(), [], service_manager=False
    )
    assert found.status().to_json()["provider"]["shared"] == shared
