"""What `onebitctl status` prints: pure functions from what the daemon said to lines of text.

They take plain mappings and read them with care: the daemon may be of another version.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any, Final

from onebitd.surfaces.cli_text import (
    ago,
    clean,
    duration,
    mebibytes,
    moment_of,
    paint,
    part_of,
    wrap,
)

RECENT_EXIT_S: Final = 600.0
"""A decoder that ended against its will counts as a fault for so long after its restart."""
MANY_FAILURES: Final = 3
"""So many handoffs tried in vain in a row count as a fault."""

_LABEL_COLUMNS: Final = 10
_STATE_PAINTS: Final = {"ready": "green", "failed": "red"}
_SERVING: Final = ("ready", "degraded")

_ADVICE: Final = {
    "lock_busy": "wait for the program that `onebitctl lock` names, or raise lock.wait_s",
    "lock_unusable": "do what `onebitctl lock` says of the lock file",
    "provider_exit": "run the provider by hand, see onebit-provider(7), EXAMPLES",
    "provider_timeout": "find out what the provider waits for, or raise provider.timeout_s",
    "provider_no_file": "correct the provider: status 0 means that it wrote the state file",
    "bad_state": (
        "give provider and decoder the same model, llama.cpp build, flash attention and cache"
        " types; `onebitctl handoffs` shows where they differ"
    ),
    "restore_refused": "report it with the detail that `onebitctl handoffs` shows",
    "restore_short": "report it with the detail that `onebitctl handoffs` shows",
    "no_space": "make room where the state files live (handoff.state_dir)",
    "wasted": (
        "let the decoder keep what it is handed: --swa-full for a sliding window, --cache-ram 0;"
        " see onebitd(8), OUTCOMES"
    ),
}
"""What to do, by the reason of the last failure; an imperative, not another name for the fault."""

_BREAKER_ADVICE: Final = {
    "busy": "wait for the program that has the device, see `onebitctl lock`",
    "denied": "give the service what the detail says is missing, and restart it",
    "timeout": "find out what the provider waits for, or raise provider.timeout_s",
    "crash": "run the provider by hand, see onebit-provider(7), EXAMPLES",
    "wedged": "look at dmesg, the device may need a reset or the box a restart",
    "bad_state": "check the provider with `onebitctl provider check`",
    "suspended": "nothing to do, unless it stays so",
    "drift": "check the provider with `onebitctl provider check`",
}
"""What to do, by the class of the breaker."""


def status_page(status: Mapping[str, Any], now: dt.datetime, *, colour: bool) -> str:
    """Return the page of `onebitctl status`: what is wrong first, then the state, then the rest."""
    lines: list[str] = []
    for problem in find_problems(status, now):
        lines += [paint(line, "yellow", colour) for line in wrap(problem, "", "")]
    if lines:
        lines.append("")
    lines += _state_lines(status, colour)
    for label, values in _rows(status, now):
        for position, value in enumerate(values):
            head = label if position == 0 else ""
            indent = " " * _LABEL_COLUMNS
            lines += wrap(clean(value), head.ljust(_LABEL_COLUMNS), indent)
    return "\n".join(lines)


def find_problems(status: Mapping[str, Any], now: dt.datetime) -> list[str]:
    """Return a sentence for each thing that is wrong, with what to do; empty when all is well."""
    checks = (
        _state_problem,
        _exit_problem,
        _provider_problem,
        _breaker_problem,
        _route_problem,
        _audit_problem,
        _lock_problem,
        _failure_problem,
    )
    return [clean(problem) for check in checks if (problem := check(status, now)) is not None]


def is_fine(status: Mapping[str, Any], now: dt.datetime) -> bool:
    """Tell whether the daemon is ready and nothing is wrong with it."""
    return status.get("state") == "ready" and not find_problems(status, now)


def _state_lines(status: Mapping[str, Any], colour: bool) -> list[str]:
    state = clean(str(status.get("state", "?")))
    parts = [state]
    if status.get("state_detail"):
        parts[0] += f" ({status['state_detail']})"
    parts.append(f"up {duration(status.get('uptime_s'))}")
    parts += [str(address) for address in status.get("listen") or ()]
    head = clean(f"{status.get('instance', '?')}: ")
    first, *rest = wrap(clean(", ".join(parts)), head, " " * len(head))
    painted = head + paint(state, _STATE_PAINTS.get(state, "yellow"), colour)
    return [first.replace(head + state, painted, 1), *rest]


def _rows(status: Mapping[str, Any], now: dt.datetime) -> list[tuple[str, list[str]]]:
    rows = [
        ("model", _model_values(part_of(status, "model"))),
        ("decoder", _decoder_values(part_of(status, "backend"), now)),
        ("provider", _provider_values(part_of(status, "provider"))),
        ("lock", _lock_values(part_of(status, "lock"), status.get("pid"))),
        ("slot", _slot_values(part_of(status, "slot"))),
        ("queue", _queue_values(part_of(status, "queue"))),
        *_counter_rows(part_of(status, "handoffs")),
        *_audit_rows(part_of(status, "audit"), now),
    ]
    failure = part_of(part_of(status, "provider"), "last_error")
    if failure:
        rows.append(("last fail", [_failure_words(failure, now)]))
    return rows


def _model_values(model: Mapping[str, Any]) -> list[str]:
    facts = []
    if model.get("ctx_size") is not None:
        facts.append(f"context {model['ctx_size']} tokens")
    if model.get("state_version") is not None:
        facts.append(f"state version {model['state_version']}")
    if model.get("layout"):
        facts.append(str(model["layout"]))
    values = [f"{model.get('alias', '?')}, {model.get('path', '?')}"]
    return [*values, ", ".join(facts)] if facts else values


def _decoder_values(backend: Mapping[str, Any], now: dt.datetime) -> list[str]:
    facts = [str(backend.get("state", "?"))]
    if backend.get("pid") is not None:
        facts.append(f"pid {backend['pid']}")
    if backend.get("rss_bytes") is not None:
        facts.append(mebibytes(backend["rss_bytes"]))
    if backend.get("build"):
        facts.append(f"llama.cpp {backend['build']}")
    if backend.get("devices"):
        facts.append(f"on {', '.join(map(str, backend['devices']))}")
    values = [", ".join(facts)]
    restarts, last_exit = backend.get("restarts") or 0, part_of(backend, "last_exit")
    if restarts or last_exit:
        text = f"restarted {restarts} {'time' if restarts == 1 else 'times'}"
        if last_exit:
            text += f", last exit {ago(last_exit.get('time'), now)}: {last_exit.get('reason')}"
        values.append(text)
    return values


def _provider_values(provider: Mapping[str, Any]) -> list[str]:
    if not provider.get("program"):
        return ["none: the decoder prefills every prompt itself"]
    text = f"{provider.get('state', '?')}, {provider['program']}"
    if provider.get("breaker") not in (None, "closed"):
        kind = provider.get("breaker_class")
        text += f", breaker {str(provider['breaker']).replace('_', ' ')}"
        text += f" ({kind})" if kind else ""
    elif provider.get("route_off"):
        text += ", nothing is handed over"
    shared = provider.get("shared")
    return [text] if shared in (None, "off") else [text, f"shared: {shared}"]


def _lock_values(lock: Mapping[str, Any], daemon_pid: object) -> list[str]:
    if lock.get("hold") == "never":
        return ["not used (NPU_NO_DEVICE_LOCK)"]
    state = "free" if lock.get("usable", True) else "unusable"
    holder = part_of(lock, "holder")
    if lock.get("held") and holder and holder.get("pid") == daemon_pid:
        state = "held by this daemon"
    elif lock.get("held"):
        state = f"held by pid {holder['pid']}" if holder else "held by a process out of sight"
        if holder.get("command"):
            state += f" ({holder['command']})"
    hold = {"handoff": "taken around each provider run", "lifetime": "kept while onebitd runs"}
    how = hold.get(str(lock.get("hold")), str(lock.get("hold", "?")))
    return [f"{state}, {lock.get('path', '?')}, {how}"]


def _slot_values(slot: Mapping[str, Any]) -> list[str]:
    if not slot.get("busy"):
        return ["idle"]
    facts = ["busy"]
    if slot.get("phase"):
        facts.append(str(slot["phase"]))
    if slot.get("request_id"):
        facts.append(f"request {slot['request_id']}")
    if slot.get("age_s") is not None:
        facts.append(f"for {duration(slot['age_s'])}")
    return [", ".join(facts)]


def _queue_values(queue: Mapping[str, Any]) -> list[str]:
    return [f"{queue.get('pending', '?')} waiting, room for {queue.get('max', '?')}"]


def _counter_rows(handoffs: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    reasons = part_of(handoffs, "by_reason")
    counters = [f"{name} {count}" for name, count in handoffs.items() if name != "by_reason"]
    rows = [("handoffs", [", ".join(counters) or "?"])]
    if reasons:
        ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
        rows.append(("reasons", [", ".join(f"{name} {count}" for name, count in ordered)]))
    return rows


def _audit_rows(audit: Mapping[str, Any], now: dt.datetime) -> list[tuple[str, list[str]]]:
    if not (audit.get("audited") or audit.get("given_up") or audit.get("strikes")):
        return []
    text = f"{audit.get('audited', '?')} audited, {audit.get('drifted', '?')} drifted"
    if audit.get("given_up"):
        text += f", {audit['given_up']} given up"
    if audit.get("strikes"):
        text += f", strikes {audit['strikes']}"
    last = part_of(audit, "last")
    if not last:
        return [("audits", [text])]
    found = "fine" if last.get("ok") else "drift"
    error = last.get("error")
    shown = f"{error:.2g}" if isinstance(error, float) else "?"
    where = f"layer {last.get('layer', '?')} {last.get('part', '?')}"
    return [
        ("audits", [text, f"last {ago(last.get('time'), now)}: {found}, error {shown} in {where}"])
    ]


def _state_problem(status: Mapping[str, Any], now: dt.datetime) -> str | None:
    last_exit = part_of(part_of(status, "backend"), "last_exit")
    why = status.get("state_detail") or last_exit.get("reason")
    because = f" ({why})" if why else ""
    match status.get("state"):
        case "failed":
            return f"onebitd has failed{because}. Its log says more: {_log_of(status)}."
        case "restarting":
            return (
                f"The decoder is being restarted{because}; until it is ready, requests wait or get"
                f" 503. Its last words are in the log: {_log_of(status)}."
            )
        case "draining":
            return "onebitd is stopping: replies under way are finished, new requests get 503."
    return None


def _exit_problem(status: Mapping[str, Any], now: dt.datetime) -> str | None:
    last_exit = part_of(part_of(status, "backend"), "last_exit")
    moment = moment_of(last_exit.get("time"))
    if status.get("state") not in _SERVING or moment is None:
        return None
    if (now - moment).total_seconds() > RECENT_EXIT_S:
        return None
    return (
        f"The decoder ended unexpectedly {ago(last_exit.get('time'), now)}"
        f" ({last_exit.get('reason')}) and was restarted. Its last words are in the log:"
        f" {_log_of(status)}."
    )


def _provider_problem(status: Mapping[str, Any], now: dt.datetime) -> str | None:
    provider = part_of(status, "provider")
    if provider.get("state") == "stuck":
        return (
            "A run of the prefill provider cannot be killed; no prompt is handed off until it is"
            " gone. It hangs in the kernel: look at dmesg, the device may need a reset."
        )
    return None


def _breaker_problem(status: Mapping[str, Any], now: dt.datetime) -> str | None:
    provider = part_of(status, "provider")
    if provider.get("breaker") in (None, "closed"):
        return None
    kind, detail = provider.get("breaker_class"), provider.get("breaker_detail")
    text = "The prefill provider is not called for now"
    text += f": {detail}." if detail else f": its breaker is {provider['breaker']}."
    advice = _BREAKER_ADVICE.get(str(kind))
    if advice is not None:
        text += f" What helps: {advice}."
    return f"{text} `onebitctl provider reset` puts it back into service at once."


def _route_problem(status: Mapping[str, Any], now: dt.datetime) -> str | None:
    why = part_of(status, "provider").get("route_off")
    if not why:
        return None
    return (
        f"Nothing is handed over to this decoder: {why}."
        " After a change, `onebitctl provider reset` or a restart has it tried again."
    )


def _audit_problem(status: Mapping[str, Any], now: dt.datetime) -> str | None:
    strikes = part_of(status, "audit").get("strikes") or 0
    if not strikes:
        return None
    what = "An audit has" if strikes == 1 else f"{strikes} audits have"
    return (
        f"{what} found a prompt's cache that differs from the decoder's own; replies may have been"
        f" wrong. Each is in the log: {_log_of(status)}. When the cause is found,"
        " `onebitctl provider reset` clears this."
    )


def _lock_problem(status: Mapping[str, Any], now: dt.datetime) -> str | None:
    lock = part_of(status, "lock")
    if lock.get("hold") == "never":
        return None  # a file that nobody here takes is nobody's trouble
    return f"Device lock {lock.get('path')}: {lock['problem']}." if lock.get("problem") else None


def _failure_problem(status: Mapping[str, Any], now: dt.datetime) -> str | None:
    provider, counts = part_of(status, "provider"), part_of(status, "handoffs")
    if provider.get("breaker") not in (None, "closed") or provider.get("route_off"):
        return None  # which says it all
    in_a_row = provider.get("consecutive_failures") or 0
    failed = sum(counts.get(name) or 0 for name in ("fallback", "wasted", "failed"))
    tried = failed + (counts.get("used") or 0)
    if in_a_row >= MANY_FAILURES:
        text = f"The last {in_a_row} handoffs failed"
    elif in_a_row and tried >= 10 and failed * 2 > tried:
        text = f"{failed} of {tried} handoffs failed"
    else:
        return None
    failure = part_of(provider, "last_error")
    reason = failure.get("reason", "?")
    advice = _ADVICE.get(reason, "`onebitctl handoffs` shows each, the log holds more")
    if failure:
        text += f", the last with {reason}"
    return f"{text}: the decoder prefills instead, which is slower. What helps: {advice}."


def _failure_words(failure: Mapping[str, Any], now: dt.datetime) -> str:
    detail = f": {failure['detail']}" if failure.get("detail") else ""
    return f"{ago(failure.get('time'), now)}, {failure.get('reason', '?')}{detail}"


def _log_of(status: Mapping[str, Any]) -> str:
    """Say where the log is: a daemon that nothing manages writes where its starter looks."""
    if status.get("service_manager"):
        return f"`journalctl -u onebitd@{status.get('instance', '?')}`"
    return "the daemon's standard error"
