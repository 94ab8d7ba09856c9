"""The page of `onebitctl status`: layout, and what counts as wrong."""

from __future__ import annotations

import dataclasses
import datetime as dt
import re
from pathlib import Path
from typing import Any

import pytest

from onebitd.core.breaker import FailureClass
from onebitd.core.control_api import (
    AuditStatus,
    BackendStatus,
    LastExit,
    LockStatus,
    PolicyStatus,
    ProviderStatus,
    QueueStatus,
    SlotStatus,
)
from onebitd.core.handoff import Outcome, Reason
from onebitd.core.recent_handoffs import RecentHandoffs, Typical
from onebitd.core.telemetry import DeviceSample
from onebitd.services.history import History
from onebitd.surfaces import cli_problems, cli_recent, cli_status, cli_text
from tests.surfaces.control_server import make_record, make_status

NOW = dt.datetime(2026, 5, 1, 12, 10, 0, tzinfo=dt.UTC)
PAGES = Path(__file__).parent / "status_pages"
"""What each state looks like in 80, 100 and 160 columns."""
URL = "http://127.0.0.1:8000/health"


def status_of(**changes: Any) -> dict[str, Any]:
    """Return a status as the client reads it."""
    return make_status(**changes).to_json()


def backend(**changes: Any) -> BackendStatus:
    """Return a healthy decoder with changes."""
    return dataclasses.replace(make_status().backend, **changes)


def provider(**changes: Any) -> ProviderStatus:
    """Return a healthy provider with changes."""
    return dataclasses.replace(make_status().provider, **changes)


def history_of(**counts: int) -> History:
    """Return a history with so many records of each outcome."""
    history = History()
    for outcome, count in counts.items():
        for number in range(count):
            history.add(make_record(number, Outcome(outcome)))
    return history


LAST_ERROR = {
    "time": "2026-05-01T12:09:00.000Z",
    "reason": "provider_exit",
    "detail": "status 3: no XDNA device",
}


def ready(**changes: Any) -> dict[str, Any]:
    """Return the status of a daemon that has served a while, and whose listener answers."""
    history = history_of(used=120, skipped=2)
    history.add(make_record(3, Outcome.FALLBACK, reason=Reason.PROVIDER_EXIT))
    fields = {
        "history": history,
        "listen": ["127.0.0.1:8000"],
        "provider": provider(last_error=LAST_ERROR),
        "recent": RecentHandoffs(
            50,
            Typical(46, 307, 101.2, 640.0, 540.0, 24_840.0),
            Typical(1, 512, 1210.0, 1100.0, -110.0, -110.0),
            Typical(2, 40, 97.3, 630.0, 533.0, 1066.0),
        ),
        "policy": PolicyStatus(
            "auto", "file", wins=[[180, 8191]], last=8191, best_tokens=8191, best_factor=5.21
        ),
        "service_manager": True,
    }
    probe = changes.pop("probe", answered(200))
    return status_of(**(fields | changes)) | {"probe": probe}


def fresh(**changes: Any) -> dict[str, Any]:
    """Return the status of a daemon that has not served anybody yet."""
    nothing = {
        "history": History(),
        "provider": provider(),
        "recent": RecentHandoffs(),
        "policy": PolicyStatus("auto", "file", missing=["decoder", "provider"]),
    }
    return ready(**(nothing | changes))


def answered(status: int | None, error: str | None = None, *, tried: bool = True) -> dict[str, Any]:
    """Return what the look at the listener found."""
    ms = None if status is None else 1.23
    return {"url": URL, "status": status, "ms": ms, "error": error, "tried": tried}


KILLED = LastExit("2026-05-01T12:09:20.000Z", "signal 9 (SIGKILL)")

STATES: dict[str, dict[str, Any]] = {
    "ready": ready(slot=SlotStatus(True, "decode", "3f9a", 2.13), queue=QueueStatus(3, 64)),
    "devices": ready(
        devices=[
            DeviceSample(
                kind="gpu",
                name="card0",
                driver="amdgpu",
                busy_percent=87.0,
                clocks={"sclk": 2400.0, "mclk": 1000.0},
            ),
            DeviceSample(kind="npu", name="accel0", driver="amdxdna", power_state="active"),
            DeviceSample(
                kind="cpu", name="k10temp", driver="k10temp", temperature_c=61.4, power_w=95.2
            ),
        ]
    ),
    "fresh": fresh(listen_passed=True, uptime_s=12.0),
    "loading": fresh(
        state="loading",
        state_detail="12 s",
        uptime_s=12.6,
        backend=BackendStatus(4243, "LOADING", 0, None, None, [], 312_000_000),
        probe=answered(503),
    ),
    "restarting": ready(
        state="restarting",
        state_detail="the decoder: signal 9 (SIGKILL)",
        backend=backend(pid=None, state="BACKOFF", restarts=2, last_exit=KILLED, rss_bytes=None),
        probe=answered(503),
    ),
    "restarted": ready(backend=backend(restarts=1, last_exit=KILLED)),
    "draining": ready(
        state="draining", state_detail="2 replies", slot=SlotStatus(True, "decode", "3f9a", 14.0)
    ),
    "failed": ready(
        state="failed",
        state_detail="the decoder: status 1: failed to load model",
        backend=backend(
            pid=None,
            state="FAILED",
            restarts=5,
            last_exit=LastExit(KILLED.time, "status 1: failed to load model"),
            rss_bytes=None,
        ),
        probe=answered(None, "connection refused"),
    ),
    "breaker": ready(
        state="degraded",
        provider=provider(
            breaker="open",
            consecutive_failures=2,
            last_error=LAST_ERROR | {"reason": "provider_timeout", "detail": "120 s"},
            breaker_class="timeout",
            breaker_since="2026-05-01T12:09:00.000Z",
            breaker_next_try_s=42.4,
            breaker_detail="timeout twice in a row",
        ),
    ),
    "route-off": ready(
        state="degraded",
        provider=provider(route_off="its model has a sliding window, and needs --swa-full"),
    ),
    "drift": ready(
        state="degraded",
        audit=AuditStatus(9, 2, 1, 2),
        provider=provider(
            breaker="open", breaker_class="drift", breaker_detail="2 audits in a row found drift"
        ),
    ),
    "lock": ready(
        lock=LockStatus(
            *("/tmp/1bit-npu-device.lock", True, {"pid": 99, "command": "bench --npu"}, "handoff"),
            problem="it is a symbolic link, which is never followed: remove it",
            usable=False,
        )
    ),
    "silent": ready(probe=answered(None, "no answer within 2 s")),
    "silent-socket": ready(probe=answered(None, "no answer within 2 s"), listen_passed=True),
    "loses": ready(
        recent=RecentHandoffs(3, Typical(1, 307, 900.0, 640.0, -260.0, -260.0), skipped=Typical(2)),
        policy=PolicyStatus("auto", "file", [], [], 8191, 8191, 0.42),
        history_problem="/var/lib/onebitd/qwen/history.db: no space left on device",
    ),
}


@pytest.mark.parametrize("state", STATES)
def test_status_page_of_each_state_is_the_looked_at_page(state: str) -> None:
    """At 80, 100 and 160 columns; somebody has looked at each, and nothing passes the width."""
    shown = []
    for columns in (80, 100, 160):
        page = cli_status.status_page(STATES[state], NOW, colour=False, columns=columns)
        assert max(map(len, page.split("\n"))) <= columns
        shown.append(f"--- {columns} columns\n{page}\n")
    assert "".join(shown) == (PAGES / f"{state}.txt").read_text()
    fine = state in ("ready", "fresh", "devices")
    assert cli_problems.is_fine(STATES[state], NOW) is fine


def test_status_pages_that_were_looked_at_belong_to_a_state() -> None:
    """One that is left behind would be looked at by nobody."""
    assert {path.stem for path in PAGES.glob("*")} == STATES.keys()


@pytest.mark.parametrize("columns", [1, 40, 57, 139, 140, 250])
def test_status_page_stays_within_any_width(columns: int) -> None:
    """A narrow terminal wraps or cuts, and a very wide one is used."""
    for status in STATES.values():
        page = cli_status.status_page(status, NOW, colour=False, columns=columns)
        assert max(map(len, page.split("\n"))) <= max(columns, 40)


def test_status_page_colours_do_not_move_anything() -> None:
    """Without its escapes the coloured page is the plain one, side by side too."""
    for status in STATES.values():
        for columns in (80, 160):
            plain, painted = (
                cli_status.status_page(status, NOW, colour=colour, columns=columns)
                for colour in (False, True)
            )
            assert re.sub(r"\x1b\[[0-9]*m", "", painted) == plain
            assert "\x1b" in painted


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policy": "always"}, ["always: every prompt is handed over", "as learned: a handoff"]),
        ({"policy": "never"}, ["never: no prompt is handed over", "as learned: a handoff"]),
        ({"wins": [[2, 900]]}, ["by state file pays from 2 to 900 tokens, 5.2 times"]),
        ({"wins": [[2, 8191]], "route": "shared"}, ["by the shared route pays at every length"]),
        ({"wins": [[9, 20], [40, 8191]]}, ["from 9 to 20 tokens and from 40 tokens on"]),
        ({"missing": ["restore"]}, ["auto: learning; not known yet: the cost of a restore"]),
        (
            {"policy": "never", "missing": ["provider"]},
            ["never: no prompt is", "learning; not known yet: the provider's rate"],
        ),
    ],
)
def test_policy_words_say_what_it_does_and_why(changes: dict[str, Any], words: list[str]) -> None:
    """By what was learned, or that nothing was."""
    found = cli_recent.policy_words(STATES["ready"]["policy"] | changes)
    assert len(found) == len(words)
    assert all(word in line for word, line in zip(words, found, strict=True))


@pytest.mark.parametrize(
    ("probe", "state", "problem"),
    [
        (answered(200), "ready", None),
        (None, "ready", None),
        (answered(None, "this user may not", tried=False), "ready", None),
        (answered(503), "loading", None),
        (answered(503), "restarting", None),
        (
            answered(503),
            "ready",
            f"says that it is ready, and {URL} fails: answers with status 503",
        ),
        (answered(None, "connection refused"), "degraded", f"{URL} fails: connection refused."),
    ],
)
def test_find_problems_listener_that_fails_a_ready_daemon_is_one(
    probe: dict[str, Any] | None, state: str, problem: str | None
) -> None:
    """A daemon that does not claim to serve has said why already."""
    found = [
        text
        for text in cli_problems.find_problems(ready(probe=probe, state=state), NOW)
        if URL in text
    ]
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]


@pytest.mark.parametrize(
    ("next_try_s", "words"),
    [(42.4, "tried again in 42 s"), (0.0, "due or under way"), (None, "What helps")],
)
def test_find_problems_breaker_tells_its_next_try(next_try_s: float | None, words: str) -> None:
    """Waiting may be all that there is to do."""
    found = provider(breaker="open", breaker_class="drift", breaker_next_try_s=next_try_s)
    (problem,) = cli_problems.find_problems(ready(provider=found), NOW)
    assert words in problem
    assert ("again in" in problem) is bool(next_try_s)


@pytest.mark.parametrize("shared", ["on", "not supported by this decoder"])
def test_status_page_shared_route_has_a_line_below_the_provider(shared: str) -> None:
    """It says whether the decoder takes part, and a decoder that cannot is no fault."""
    status = status_of(provider=provider(shared=shared))
    lines = cli_status.status_page(status, NOW, colour=False).split("\n")
    assert lines[lines.index("provider  idle, /usr/lib/onebit/npu-prefill") + 1] == (
        f"          shared: {shared}"
    )
    assert cli_problems.is_fine(status, NOW)


@pytest.mark.parametrize(
    "found",
    [
        provider(),
        provider(shared="off"),
        ProviderStatus(None, "none", "closed", 0, None, shared="on"),
    ],
    ids=["default", "off", "no-provider"],
)
def test_status_page_shared_route_that_is_off_has_no_line(found: ProviderStatus) -> None:
    """Nobody has to read about what nobody turned on, or what no provider can use."""
    assert "shared" not in cli_status.status_page(status_of(provider=found), NOW, colour=False)


def test_status_page_daemon_without_the_shared_field_has_no_line() -> None:
    """A daemon of an earlier version does not send it."""
    status = status_of()
    del status["provider"]["shared"]
    page = cli_status.status_page(status, NOW, colour=False)
    assert "\nprovider  idle, /usr/lib/onebit/npu-prefill\ndecoder " in page


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state": "failed", "state_detail": "it ended 5 times"}, "failed (it ended 5 times)"),
        (
            {"state": "restarting", "backend": backend(last_exit=LastExit("x", "signal 11"))},
            "being restarted (signal 11); until it is ready, requests wait or get 503",
        ),
        ({"state": "draining"}, "onebitd is stopping"),
        (
            {"backend": backend(restarts=1, last_exit=LastExit("2026-05-01T12:05:00Z", "sig 9"))},
            "ended unexpectedly 5 min ago (sig 9) and was restarted",
        ),
        ({"provider": provider(state="stuck")}, "cannot be killed"),
        ({"provider": provider(breaker="open")}, "its breaker is open"),
        (
            {"provider": provider(breaker="open", breaker_detail="timeout twice in a row")},
            "not called for now: timeout twice in a row. `onebitctl provider reset`",
        ),
        (
            {
                "provider": provider(
                    breaker="open",
                    breaker_detail="crash, last: tried x; y; tried again in 7 s",
                    breaker_next_try_s=7,
                )
            },
            "tried again in 7 s. `onebitctl provider reset`",
        ),
        *(
            ({"provider": provider(breaker="half_open", breaker_class=kind)}, advice)
            for kind, advice in cli_problems.BREAKER_ADVICE.items()
        ),
        (
            {
                "state": "degraded",
                "provider": provider(route_off="its model has a sliding window, and needs --swa"),
            },
            "Nothing is handed over to this decoder: its model has a sliding window, and needs",
        ),
        ({"audit": AuditStatus(9, 1, 0, 1), "state": "degraded"}, "An audit has found"),
        ({"audit": AuditStatus(9, 2, 0, 2), "state": "degraded"}, "2 audits have found"),
        ({"lock": LockStatus("/l", False, None, "handoff", "it is a fifo")}, "/l: it is a fifo"),
        (
            {"provider": provider(consecutive_failures=3, last_error=LAST_ERROR)},
            "The last 3 handoffs failed, the last with provider_exit",
        ),
        (
            {
                "provider": provider(
                    consecutive_failures=4, last_error=LAST_ERROR | {"reason": "lock_busy"}
                )
            },
            "the program that `onebitctl lock` names",
        ),
        (
            {
                "history": history_of(used=4, fallback=6),
                "provider": provider(consecutive_failures=1, last_error=LAST_ERROR),
            },
            "6 of 10 handoffs failed",
        ),
    ],
)
def test_status_page_something_wrong_says_so_first(changes: dict[str, Any], words: str) -> None:
    """The first lines are the sentence, the exit status is 1, and the page stays in its columns."""
    status = status_of(**changes)
    page = cli_status.status_page(status, NOW, colour=False)
    head, _, rest = page.partition("\n\n")
    assert words in " ".join(head.split())
    assert rest.startswith("qwen: ")
    assert max(map(len, page.split("\n"))) <= cli_text.PAGE_COLUMNS
    assert not cli_problems.is_fine(status, NOW)


@pytest.mark.parametrize("reason", ["bad_state", "provider_exit", "provider_timeout", "wasted"])
def test_status_page_failures_in_a_row_say_what_to_do(reason: str) -> None:
    """What helps is an act, not the fault in other words."""
    failing = provider(consecutive_failures=3, last_error=LAST_ERROR | {"reason": reason})
    (problem,) = cli_problems.find_problems(status_of(provider=failing), NOW)
    help_ = problem.partition("What helps: ")[2]
    assert help_.split()[0] in {"give", "run", "find", "let"}


def test_status_page_breaker_that_is_open_is_one_problem_and_has_its_class_in_the_row() -> None:
    """The failures in a row are what opened it: they are not told twice."""
    found = provider(
        breaker="half_open", breaker_class="crash", consecutive_failures=9, last_error=LAST_ERROR
    )
    status = status_of(provider=found, state="degraded")
    assert len(cli_problems.find_problems(status, NOW)) == 1
    page = cli_status.status_page(status, NOW, colour=False)
    assert "provider  idle, /usr/lib/onebit/npu-prefill, breaker half open (crash)\n" in page


def test_status_page_route_that_is_off_is_in_the_row_of_the_provider() -> None:
    """The provider is idle for a reason."""
    page = cli_status.status_page(status_of(provider=provider(route_off="x")), NOW, colour=False)
    assert "provider  idle, /usr/lib/onebit/npu-prefill, nothing is handed over\n" in page


def test_status_advice_for_the_breaker_is_there_for_each_class() -> None:
    """And for audits, which open it too."""
    assert set(cli_problems.BREAKER_ADVICE) == {*FailureClass, "drift"}


@pytest.mark.parametrize("reason", cli_problems.ADVICE)
def test_status_advice_is_for_a_reason_that_exists(reason: str) -> None:
    """A misspelled reason would never be found."""
    assert reason in [*Reason, Outcome.WASTED]


@pytest.mark.parametrize(
    ("managed", "unit", "user_unit", "where"),
    [
        (True, None, False, "`journalctl -u onebitd@qwen`"),
        (True, "onebitd@qwen.service", False, "`journalctl -u onebitd@qwen`"),
        (True, "onebitd@qwen.service", True, "`journalctl --user -u onebitd@qwen`"),
        (True, "chat.service", True, "`journalctl --user -u chat`"),
        (False, None, False, "the daemon's standard error"),
    ],
)
@pytest.mark.parametrize(
    "changes",
    [
        {"state": "failed"},
        {"state": "restarting"},
        {"backend": backend(restarts=1, last_exit=LastExit("2026-05-01T12:05:00Z", "sig 9"))},
    ],
)
def test_status_page_log_is_where_the_daemon_writes_it(
    changes: dict[str, Any], managed: bool, unit: str | None, user_unit: bool, where: str
) -> None:
    """The journal of the service that it is, and only of a daemon that is under a manager."""
    status = status_of(service_manager=managed, unit=unit, user_unit=user_unit, **changes)
    (problem,) = cli_problems.find_problems(status, NOW)
    assert problem.endswith((f"log: {where}.", f"says more: {where}."))
    assert ("journalctl" in problem) is managed


def test_status_page_socket_of_a_user_is_looked_at_with_their_own_manager() -> None:
    """`systemctl status` without --user knows nothing of a user's socket."""
    silent = {"probe": answered(None, "no answer within 2 s"), "listen_passed": True}
    for user_unit, look in ((False, "systemctl status"), (True, "systemctl --user status")):
        (problem,) = cli_problems.find_problems(ready(**silent, user_unit=user_unit), NOW)
        assert f"`{look} onebitd-http@qwen.socket`" in problem


def lock_row(**changes: Any) -> str:
    """Return the page's words on the lock."""
    lock = dataclasses.replace(make_status().lock, **changes)
    page = cli_status.status_page(status_of(lock=lock), NOW, colour=False)
    return re.sub(r"\s+", " ", page.partition("\nlock      ")[2].partition("\nmodel")[0])


def test_status_page_lock_of_this_daemon_says_so() -> None:
    """Its own run is not shown like a stranger."""
    holder = {"pid": make_status().pid, "command": "/usr/bin/onebitd --instance qwen"}
    assert lock_row(held=True, holder=holder).startswith("held by this daemon, /tmp/")
    assert lock_row(held=True, holder=holder | {"pid": 7}).startswith("held by pid 7 (/usr/bin/")


def test_status_page_lock_that_is_not_used_has_no_problem() -> None:
    """Under NPU_NO_DEVICE_LOCK a bad lock file is nobody's trouble."""
    unused = LockStatus("/l", False, None, "never", "it is a fifo", usable=False)
    status = status_of(lock=unused)
    assert cli_problems.find_problems(status, NOW) == []
    page = cli_status.status_page(status, NOW, colour=False)
    assert "\nlock      not used (NPU_NO_DEVICE_LOCK)\n" in page


def test_status_page_loading_is_not_fine_and_not_wrong() -> None:
    """A model that loads is no fault, and not ready either."""
    status = status_of(state="loading", state_detail="50 %", backend=backend(state="LOADING"))
    page = cli_status.status_page(status, NOW, colour=False)
    assert page.startswith("The model is being loaded; until it is ready")
    assert "\nqwen: loading (50 %), up " in page
    assert not cli_problems.is_fine(status, NOW)


def test_status_page_long_values_wrap_under_their_column() -> None:
    """Nothing passes column 80, nothing is left out."""
    long = "/var/lib/models/" + "x" * 120 + ".gguf"
    model = dataclasses.replace(make_status().model, path=long)
    page = cli_status.status_page(status_of(model=model), NOW, colour=False)
    assert max(map(len, page.split("\n"))) <= cli_text.PAGE_COLUMNS
    assert long in page.replace("\n          ", "")


@pytest.mark.parametrize("status", [{}, {"state": "ready", "backend": None, "handoffs": {}}])
def test_status_page_daemon_of_another_version_is_still_shown(status: dict[str, Any]) -> None:
    """Missing and unknown fields are no traceback."""
    assert "decoder   ?" in cli_status.status_page(status, NOW, colour=False)


def test_status_page_hostile_text_cannot_move_the_cursor() -> None:
    """Details quote other programs; their escapes are made harmless."""
    error = LAST_ERROR | {"detail": "a\x1b[2Jb\nc"}
    page = cli_status.status_page(status_of(provider=provider(last_error=error)), NOW, colour=False)
    assert "a?[2Jb c" in page
