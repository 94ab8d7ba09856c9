"""Gives what changes from run to run in a daemon's answers fixed values, to hold pages against.

The documents are a real daemon's: outcomes, reasons, counts, tokens, states and sentences stay. By
rule there are replaced:

- times in milliseconds: by figures of a small machine that fit together, made from the tokens;
- moments: a record's is given by the number at the end of its request id, those of a status lie
  some time back;
- pids, resident size, age and uptime;
- what is learned: the time of a sample follows from its tokens.

`FIXED` has the names, and tests/e2e/test_terminal.py sees that no other value is replaced.
Whatever a daemon leaves out stays left out. Paths are none of this module's business.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping
from typing import Any, Final

DAEMON_PID: Final = 4100
BACKEND_PID: Final = 4132
FIRST_MOMENT: Final = dt.datetime(2026, 1, 30, 9, 41, tzinfo=dt.UTC)
HOURS_AGO_S: Final = 2 * 3600 + 5 * 60 + 30
"""Shown as `2 h 5 min`, however slow the machine."""
MINUTES_AGO_S: Final = 180.5

FIXED: Final = re.compile(
    r".*_(ms|s|sum_ms|per_s|moment)|pid|rss_bytes|time|first_time|last_time|p50|p95"
    r"|wins|best_tokens|best_factor|prompt_hash"
)
"""The names of what is replaced. In `detail`, `breaker_detail` and `state_detail` it is numbers
with their unit alone, and in `costs` the third and fourth of each sample."""

_SUMMARY: Final = {
    "queue_ms": 0.02,
    "template_ms": 1.21,
    "tokenize_ms": 0.84,
    "lock_ms": 0.05,
    "prefill_ms": 164.0,
    "provider_wall_ms": 199.0,
    "check_ms": 0.42,
    "share_ms": 0.41,
    "adopt_ms": 0.05,
    "restore_ms": 4.9,
    "evaluated_ms": 24.0,
    "first_byte_ms": 231.0,
    "total_ms": 512.0,
    "prefill_tokens_per_s": 1104.0,
    "decode_tokens_per_s": 28.6,
}
"""The middle of each figure in a summary; 95 of 100 are within three times of it."""

_IN_SENTENCES: Final = (
    (r"\b\d[\d.]* ms\b", "412 ms"),
    (r"\bpid \d+\b", "pid 3977"),
    (r"not called for \d+ (s|min)\b", "not called for 3 s"),
    (r"tried again in \d+ (s|min)\b", "tried again in 5 min"),
)


def pinned_status(status: Mapping[str, Any], now: dt.datetime) -> dict[str, Any]:
    """Return `/v1/status` with its figures fixed."""
    found = dict(status)
    pid = found["pid"]
    found |= {"pid": DAEMON_PID, "uptime_s": 754.2}
    if found.get("state_detail"):
        found["state_detail"] = re.sub(r"^\d+ s$", "12 s", str(found["state_detail"]))
    backend = dict(found["backend"])
    backend |= {
        name: value
        for name, value in (("pid", BACKEND_PID), ("rss_bytes", 812 << 20))
        if backend.get(name) is not None
    }
    if backend.get("last_exit"):
        backend["last_exit"] = _moved(backend["last_exit"], now, MINUTES_AGO_S)
    provider = dict(found["provider"])
    if provider.get("last_error"):
        provider["last_error"] = _moved(provider["last_error"], now, HOURS_AGO_S)
    if provider.get("breaker_detail"):
        provider["breaker_detail"] = pinned_text(provider["breaker_detail"])
    if provider.get("breaker_next_try_s"):
        provider["breaker_next_try_s"] = 280.0
    lock, holder = dict(found["lock"]), found["lock"].get("holder")
    if holder:
        lock["holder"] = {**holder, "pid": DAEMON_PID if holder["pid"] == pid else 3977}
    slot = dict(found["slot"])
    if slot.get("age_s") is not None:
        slot["age_s"] = 3.4
    found |= {"backend": backend, "provider": provider, "lock": lock, "slot": slot}
    recent = {
        name: _pinned_recent(name, value) if isinstance(value, Mapping) else value
        for name, value in (found.get("recent") or {}).items()
    }
    policy = dict(found.get("policy") or {})
    if policy.get("best_factor") is not None:
        last = policy["last"]
        policy |= {"wins": [[180, last]], "best_tokens": last, "best_factor": 4.2}
    return {**found, "recent": recent, "policy": policy}


def pinned_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a handoff's record with its figures fixed."""
    number = re.search(r"^req-(\d+)$", str(record["request_id"]))
    moment = FIRST_MOMENT + dt.timedelta(seconds=7 * int(number[1]) if number else 0)
    found = dict(record)
    found["time"] = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    tokens = found.get("prompt_tokens") or 0
    times = {"queue_ms": 0.02, "template_ms": 1.2, "tokenize_ms": 0.8, "lock_ms": 0.05}
    times |= {"provider_at_ms": 2.1, "prefill_ms": 40.1 + 0.62 * tokens, "check_ms": 0.4}
    times["provider_wall_ms"] = times["prefill_ms"] + 35.2
    times["handed_at_ms"] = times["provider_at_ms"] + times["provider_wall_ms"] + 0.7
    times |= {"restore_ms": 2.9 + 0.011 * tokens, "share_ms": 0.41, "adopt_ms": 0.05}
    given = {name: ms for name, ms in times.items() if found.get(name) is not None}
    spent = 2.1 + sum(given.get(name, 0.0) for name in ("provider_wall_ms", "restore_ms"))
    evaluated = tokens if found.get("outcome") != "used" and tokens else 1
    given |= {"evaluated_ms": 3.9 * evaluated, "first_byte_ms": spent + 3.9 * evaluated + 9.6}
    given["decode_ms"] = 34.9 * (found.get("reply_tokens") or 0)
    given["total_ms"] = given["first_byte_ms"] + given["decode_ms"]
    given |= {"decoder_estimate_ms": 96.3, "provider_estimate_ms": 412.0}
    for name, ms in given.items():
        if found.get(name) is not None:
            found[name] = round(ms, 3)
    if found.get("prompt_hash"):
        found["prompt_hash"] = f"{0xC364510A00000000 + tokens:016x}"
    if found.get("detail"):
        found["detail"] = pinned_text(str(found["detail"]))
    return found


def pinned_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return a summary with its figures fixed."""
    found = {key: _pinned_figures(entry, key) for key, entry in summary.items()}
    for name, second in (("first_time", 7), ("last_time", 7 * int(summary.get("count") or 1))):
        if found.get(name) is not None:
            moment = FIRST_MOMENT + dt.timedelta(seconds=second)
            found[name] = moment.isoformat().replace("+00:00", "Z")
    return found


def pinned_costs(document: Mapping[str, Any], now: dt.datetime) -> dict[str, Any]:
    """Return `/v1/costs` with the times of its samples fixed."""
    at = int(now.timestamp() - HOURS_AGO_S)

    def samples(found: list[list[float]], each_ms: float, fixed_ms: float) -> list[list[float]]:
        return [[one[0], one[1], fixed_ms + each_ms * one[0], at, *one[4:]] for one in found]

    costs = dict(document["costs"])
    costs["provider"] = {
        name: samples(found, 0.62, 75.3) for name, found in costs["provider"].items()
    }
    rates = {"decoder": (3.9, 9.6), "decoder_one": (0.001, 13.5), "front": (0.001, 2.0)}
    for name, rate in (rates | {"restore": (0.0002, 2.9), "reply": (34.9, 0.0)}).items():
        costs[name] = samples(costs[name], *rate)
    costs["lock"] = [[0.05, *one[1:]] for one in costs["lock"]]
    return {**document, "costs": costs}


def pinned_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request in flight with its age fixed."""
    return {**request, "age_s": 3.4 if request["phase"] != "queued" else 1.2}


def pinned_text(text: str) -> str:
    """Return a daemon's sentence, with other times and pids in it."""
    for pattern, shown in _IN_SENTENCES:
        text = re.sub(pattern, shown, text)
    return text


def _moved(entry: Mapping[str, Any], now: dt.datetime, ago_s: float) -> dict[str, Any]:
    found = {**entry, "time": (now - dt.timedelta(seconds=ago_s)).isoformat()}
    return {name: pinned_text(text) if name == "detail" else text for name, text in found.items()}


def _pinned_recent(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    tokens = row.get("prompt_tokens") or 0
    handed, alone = 92.0 + 0.63 * tokens, 9.6 + 3.9 * tokens
    times = {
        "used": {"first_byte_ms": handed, "other_ms": alone},
        "failed": {"first_byte_ms": handed + alone, "other_ms": alone},
        "skipped": {"first_byte_ms": alone, "other_ms": handed},
    }[name]
    times["saved_ms"] = times["other_ms"] - times["first_byte_ms"]
    times["saved_sum_ms"] = times["saved_ms"] * row["count"]
    return {**row, **{name: ms for name, ms in times.items() if row.get(name) is not None}}


def _pinned_figures(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        if name in _SUMMARY and "p50" in value:
            return {**value, "p50": _SUMMARY[name], "p95": round(_SUMMARY[name] * 2.7, 3)}
        return {key: _pinned_figures(entry, key) for key, entry in value.items()}
    return value
