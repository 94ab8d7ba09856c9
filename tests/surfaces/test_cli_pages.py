"""The pages of `onebitctl`: layout, numbers, and what counts as wrong."""

from __future__ import annotations

import dataclasses
import datetime as dt
import re
from typing import Any

import pytest

from onebitd.core.breaker import FailureClass
from onebitd.core.control_api import (
    AuditStatus,
    BackendStatus,
    LastExit,
    LockStatus,
    ProviderStatus,
    SlotStatus,
)
from onebitd.core.handoff import Outcome, Reason, Route
from onebitd.services.history import History
from onebitd.surfaces import cli_pages as pages
from onebitd.surfaces import cli_status, cli_text
from tests.surfaces.control_server import make_record, make_status

NOW = dt.datetime(2026, 5, 1, 12, 10, 0, tzinfo=dt.UTC)


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


def test_status_page_nothing_wrong_is_the_documented_page() -> None:
    """State in one line, then decoder, provider, lock, slot, queue and counters."""
    history = history_of(used=120, skipped=2)
    history.add(make_record(3, Outcome.FALLBACK, reason=Reason.PROVIDER_EXIT))
    status = status_of(
        history=history,
        provider=provider(last_error=LAST_ERROR),
        slot=SlotStatus(True, "decode", "3f9a", 2.13),
    )
    assert cli_status.status_page(status, NOW, colour=False).split("\n") == [
        "qwen: ready, up 2 h 5 min, http://127.0.0.1:8000",
        "model     qwen3-4b, /models/qwen3-4b-q4_k_m.gguf",
        "          context 8192 tokens, state version 2, kv, 36 layers",
        "decoder   ready, pid 4243, 812 MiB, llama.cpp b10068, on CPU",
        "provider  idle, /usr/lib/onebit/npu-prefill",
        "lock      free, /tmp/1bit-npu-device.lock, taken around each provider run",
        "slot      busy, decode, request 3f9a, for 2.1 s",
        "queue     0 waiting, room for 64",
        "handoffs  used 120, wasted 0, fallback 1, skipped 2, failed 0, cancelled 0",
        "reasons   provider_exit 1",
        "last fail 1 min ago, provider_exit: status 3: no XDNA device",
    ]
    assert cli_status.is_fine(status, NOW)


@pytest.mark.parametrize("shared", ["on", "not supported by this decoder"])
def test_status_page_shared_route_has_a_line_below_the_provider(shared: str) -> None:
    """It says whether the decoder takes part, and a decoder that cannot is no fault."""
    status = status_of(provider=provider(shared=shared))
    lines = cli_status.status_page(status, NOW, colour=False).split("\n")
    assert lines[lines.index("provider  idle, /usr/lib/onebit/npu-prefill") + 1] == (
        f"          shared: {shared}"
    )
    assert cli_status.is_fine(status, NOW)


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
    assert "\nprovider  idle, /usr/lib/onebit/npu-prefill\nlock " in page


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
        *(
            ({"provider": provider(breaker="half_open", breaker_class=kind)}, advice)
            for kind, advice in cli_status._BREAKER_ADVICE.items()
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
    assert words in " ".join(head.split("\n"))
    assert rest.startswith("qwen: ")
    assert max(map(len, page.split("\n"))) <= cli_text.PAGE_COLUMNS
    assert not cli_status.is_fine(status, NOW)


@pytest.mark.parametrize("reason", ["bad_state", "provider_exit", "provider_timeout", "wasted"])
def test_status_page_failures_in_a_row_say_what_to_do(reason: str) -> None:
    """What helps is an act, not the fault in other words."""
    failing = provider(consecutive_failures=3, last_error=LAST_ERROR | {"reason": reason})
    (problem,) = cli_status.find_problems(status_of(provider=failing), NOW)
    help_ = problem.partition("What helps: ")[2]
    assert help_.split()[0] in {"give", "run", "find", "let"}


def test_status_page_breaker_that_is_open_is_one_problem_and_has_its_class_in_the_row() -> None:
    """The failures in a row are what opened it: they are not told twice."""
    found = provider(
        breaker="half_open", breaker_class="crash", consecutive_failures=9, last_error=LAST_ERROR
    )
    status = status_of(provider=found, state="degraded")
    assert len(cli_status.find_problems(status, NOW)) == 1
    page = cli_status.status_page(status, NOW, colour=False)
    assert "provider  idle, /usr/lib/onebit/npu-prefill, breaker half open (crash)\n" in page


def test_status_page_route_that_is_off_is_in_the_row_of_the_provider() -> None:
    """The provider is idle for a reason."""
    page = cli_status.status_page(status_of(provider=provider(route_off="x")), NOW, colour=False)
    assert "provider  idle, /usr/lib/onebit/npu-prefill, nothing is handed over\n" in page


def test_status_advice_for_the_breaker_is_there_for_each_class() -> None:
    """And for audits, which open it too."""
    assert set(cli_status._BREAKER_ADVICE) == {*FailureClass, "drift"}


@pytest.mark.parametrize("reason", cli_status._ADVICE)
def test_status_advice_is_for_a_reason_that_exists(reason: str) -> None:
    """A misspelled reason would never be found."""
    assert reason in [*Reason, Outcome.WASTED]


@pytest.mark.parametrize(
    ("managed", "where"),
    [(True, "`journalctl -u onebitd@qwen`"), (False, "the daemon's standard error")],
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
    changes: dict[str, Any], managed: bool, where: str
) -> None:
    """journalctl is named only for a daemon that runs under a service manager."""
    (problem,) = cli_status.find_problems(status_of(service_manager=managed, **changes), NOW)
    assert problem.endswith((f"log: {where}.", f"says more: {where}."))
    assert ("journalctl" in problem) is managed


def lock_row(**changes: Any) -> str:
    """Return the page's words on the lock."""
    lock = dataclasses.replace(make_status().lock, **changes)
    page = cli_status.status_page(status_of(lock=lock), NOW, colour=False)
    return re.sub(r"\s+", " ", page.partition("\nlock      ")[2].partition("\nslot")[0])


def test_status_page_lock_of_this_daemon_says_so() -> None:
    """Its own run is not shown like a stranger."""
    holder = {"pid": make_status().pid, "command": "/usr/bin/onebitd --instance qwen"}
    assert lock_row(held=True, holder=holder).startswith("held by this daemon, /tmp/")
    assert lock_row(held=True, holder=holder | {"pid": 7}).startswith("held by pid 7 (/usr/bin/")


def test_status_page_lock_that_is_not_used_has_no_problem() -> None:
    """Under NPU_NO_DEVICE_LOCK a bad lock file is nobody's trouble."""
    unused = LockStatus("/l", False, None, "never", "it is a fifo", usable=False)
    status = status_of(lock=unused)
    assert cli_status.find_problems(status, NOW) == []
    page = cli_status.status_page(status, NOW, colour=False)
    assert "\nlock      not used (NPU_NO_DEVICE_LOCK)\n" in page


def test_pages_lock_that_cannot_be_taken_is_not_free() -> None:
    """A file that this user may not open is unusable, and the problem says what to do."""
    problem = "it may not be opened by the user x: it belongs to root:root with mode 0640; do y"
    assert lock_row(problem=problem, usable=False).startswith("unusable, /tmp/")
    page = pages.lock_page(
        {
            "path": "/l",
            "exists": True,
            "held": False,
            "holder": None,
            "problem": problem,
            "usable": False,
        }
    )
    assert page.split("\n") == ["/l: unusable", f"problem: {problem}"]


@pytest.mark.parametrize(
    "changes",
    [
        {"backend": backend(restarts=1, last_exit=LastExit("2026-05-01T11:50:00Z", "sig 9"))},
        {"provider": provider(consecutive_failures=2, last_error=LAST_ERROR)},
        {"history": history_of(used=1, fallback=20), "provider": provider()},
        {"provider": ProviderStatus(None, "none", "closed", 0, None)},
    ],
)
def test_find_problems_past_or_single_faults_are_none(changes: dict[str, Any]) -> None:
    """What is over, or happened once or twice, does not raise an alarm."""
    assert cli_status.find_problems(status_of(**changes), NOW) == []


def test_status_page_loading_is_not_fine_and_not_wrong() -> None:
    """A model that loads is no fault, and not ready either."""
    status = status_of(state="loading", state_detail="50 %", backend=backend(state="LOADING"))
    page = cli_status.status_page(status, NOW, colour=False)
    assert page.startswith("qwen: loading (50 %), up ")
    assert not cli_status.is_fine(status, NOW)


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
    assert "decoder   ?" in cli_status.status_page(status, NOW, colour=True)


def test_status_page_hostile_text_cannot_move_the_cursor() -> None:
    """Details quote other programs; their escapes are made harmless."""
    error = LAST_ERROR | {"detail": "a\x1b[2Jb\nc"}
    page = cli_status.status_page(status_of(provider=provider(last_error=error)), NOW, colour=False)
    assert "a?[2Jb c" in page


def test_handoff_row_file_route_is_aligned_under_its_header() -> None:
    """Counts and times end under their headings."""
    record = make_record(
        evaluated_tokens=1, prefill_ms=88.1, restore_ms=6.4, first_byte_ms=1012.0
    ).fields()
    header, row = pages.handoffs_header(None), pages.handoff_row(record, None, colour=False)
    assert header.split() == [
        "TIME",
        "OUTCOME",
        "PROMPT",
        "EVAL",
        "PREFILL",
        "RESTORE",
        "FIRST",
        "BYTE",
        "REASON",
    ]
    assert row.split()[1:] == ["used", "307", "1", "88.1", "ms", "6.40", "ms", "1.01", "s"]
    for heading, value in (("PROMPT", "307"), ("PREFILL", "88.1 ms"), ("FIRST BYTE", "1.01 s")):
        assert header.index(heading) + len(heading) == row.index(value) + len(value)


def test_handoff_row_shared_route_restore_is_share_and_adopt() -> None:
    """The column holds what the transfer cost, whatever the route."""
    record = make_record(route=Route.SHARED, share_ms=0.4, adopt_ms=0.05).fields()
    assert "0.45 ms" in pages.handoff_row(record, None, colour=False)


def test_handoff_row_long_detail_is_cut_to_the_width_only_when_there_is_one() -> None:
    """A terminal gets one line a handoff, a pipe gets everything."""
    record = make_record(
        outcome=Outcome.FALLBACK, reason=Reason.BAD_STATE, detail="x" * 200
    ).fields()
    row = pages.handoff_row(record, 100, colour=False)
    assert len(row) == 100
    assert row.endswith("x…")
    assert "bad_state: " + "x" * 200 in pages.handoff_row(record, None, colour=False)
    assert len(pages.handoffs_header(100)) <= 100


@pytest.mark.parametrize("width", [20, 71, 80, 99])
def test_handoff_row_narrow_terminal_keeps_the_whole_reason(width: int) -> None:
    """The reason goes to a second, indented line and is never cut; the detail may be."""
    for reason in Reason:
        record = make_record(
            outcome=Outcome.FALLBACK, reason=reason, detail="word " + "x" * 200
        ).fields()
        first, second = pages.handoff_row(record, width, colour=False).split("\n")
        assert second.startswith(f"{' ' * 10}{reason}:")
        assert second.endswith("…")
        assert len(first) <= width
        assert len(second) <= max(width, 10 + len(reason) + 2)


def test_handoff_row_narrow_terminal_short_reason_stays_on_its_line() -> None:
    """What fits is one line on any terminal."""
    record = make_record(outcome=Outcome.SKIPPED, reason=Reason.POLICY).fields()
    assert "\n" not in pages.handoff_row(record, 80, colour=False)
    assert "\n" not in pages.handoff_row(make_record().fields(), 40, colour=False)


@pytest.mark.parametrize("reason", Reason)
def test_handoff_row_wide_terminal_shows_every_reason_whole(reason: Reason) -> None:
    """One line a handoff, from the documented width on."""
    record = make_record(outcome=Outcome.FALLBACK, reason=reason, detail="x" * 200).fields()
    row = pages.handoff_row(record, pages.WIDE_COLUMNS, colour=False)
    assert f"  {reason}: x" in row
    assert len(row) == pages.WIDE_COLUMNS


def test_config_page_is_key_source_value() -> None:
    """Unset, lists, tables and booleans read like what they are; a long value moves no column."""
    page = pages.config_page(
        {
            "a.b": {"value": None, "source": "default"},
            "long.key": {"value": ["-t", "4"], "source": "file"},
            "c": {"value": True, "source": "flag --c"},
            "d": {"value": {"A": "1"}, "source": "file"},
        }
    )
    assert [line.split() for line in page.split("\n")] == [
        ["a.b", "default", "-"],
        ["long.key", "file", "-t", "4"],
        ["c", "flag", "--c", "true"],
        ["d", "file", "A=1"],
    ]
    for words in (("def", "fi", "fl", "fi"), ("  -", "  -t", "  true", "  A=1")):
        starts = [line.index(word) for line, word in zip(page.split("\n"), words, strict=True)]
        assert len(set(starts)) == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "?"),
        (-3, "0.0 s"),
        (0.42, "0.4 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (60, "1 min"),
        (200, "3 min 20 s"),
        (3600, "1 h"),
        (7512, "2 h 5 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_duration_reads_like_a_person_would_say_it(seconds: float | None, text: str) -> None:
    """Two units at most."""
    assert cli_text.duration(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 MiB"), (851_443_712, "812 MiB"), (13_207_024_435, "12.3 GiB")]
)
def test_mebibytes_switches_to_gibibytes_when_large(size: int, text: str) -> None:
    """Three or four digits at most."""
    assert cli_text.mebibytes(size) == text
