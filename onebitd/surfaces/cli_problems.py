"""What is wrong with a daemon, by its own words and by a look at its listener; and what helps.

Pure functions of `/v1/status`, a plain mapping that is read with care: the daemon may be of another
version. Its key `probe`, where it is there, is `adapters.listener_probe.Answered` as a mapping.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any, Final

from onebitd.surfaces.cli_text import ago, clean, duration, moment_of, part_of

RECENT_EXIT_S: Final = 600.0
"""A decoder that ended against its will counts as a fault for so long after its restart."""
MANY_FAILURES: Final = 3
"""So many handoffs tried in vain in a row count as a fault."""

SERVING: Final = ("ready", "degraded")

ADVICE: Final = {
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

BREAKER_ADVICE: Final = {
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


def find_problems(status: Mapping[str, Any], now: dt.datetime) -> list[str]:
    """Return a sentence for each thing that is wrong, with what to do; empty when all is well."""
    checks = (
        _state_problem,
        _listener_problem,
        _exit_problem,
        _provider_problem,
        _breaker_problem,
        _route_problem,
        _audit_problem,
        _lock_problem,
        _failure_problem,
        _history_problem,
    )
    return [clean(problem) for check in checks if (problem := check(status, now)) is not None]


def is_fine(status: Mapping[str, Any], now: dt.datetime) -> bool:
    """Tell whether the daemon is ready and nothing is wrong with it."""
    return status.get("state") == "ready" and not find_problems(status, now)


def _state_problem(status: Mapping[str, Any], now: dt.datetime) -> str | None:
    last_exit = part_of(part_of(status, "backend"), "last_exit")
    why = status.get("state_detail") or last_exit.get("reason")
    because = f" ({str(why).removeprefix('the decoder: ')})" if why else ""
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


def _listener_problem(status: Mapping[str, Any], now: dt.datetime) -> str | None:
    probe = part_of(status, "probe")
    answer = probe.get("status")
    if status.get("state") not in SERVING or not probe.get("tried", True) or answer == 200:
        return None
    if answer is None and not probe.get("error"):
        return None
    what = f"answers with status {answer}" if answer is not None else str(probe["error"])
    text = f"onebitd says that it is {status['state']}, and {probe.get('url', '?')} fails: {what}."
    if status.get("listen_passed"):
        unit = f"onebitd-http@{status.get('instance', '?')}.socket"
        look = f"systemctl {'--user ' if status.get('user_unit') else ''}status {unit}"
        return f"{text} systemd has this socket: look at `{look}`, and the log."
    return f"{text} What helps: look at its log ({_log_of(status)}), restart it if it hangs."


def _exit_problem(status: Mapping[str, Any], now: dt.datetime) -> str | None:
    last_exit = part_of(part_of(status, "backend"), "last_exit")
    moment = moment_of(last_exit.get("time"))
    if status.get("state") not in SERVING or moment is None:
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
    next_try_s = provider.get("breaker_next_try_s")
    if detail and "tried" in str(detail).rpartition("; ")[2]:
        pass  # it ends with when that will be
    elif next_try_s:
        text += f" It is tried again in {duration(next_try_s)}."
    elif next_try_s is not None:
        text += " A try of it is due or under way."
    advice = BREAKER_ADVICE.get(str(kind))
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
    advice = ADVICE.get(reason, "`onebitctl handoffs` shows each, the log holds more")
    if failure:
        text += f", the last with {reason}"
    return f"{text}: the decoder prefills instead, which is slower. What helps: {advice}."


def _history_problem(status: Mapping[str, Any], now: dt.datetime) -> str | None:
    why = status.get("history_problem")
    return f"Handoffs are not kept over a restart: {str(why).rstrip('.')}." if why else None


def _log_of(status: Mapping[str, Any]) -> str:
    """Say where the log is: a daemon that nothing manages writes where its starter looks."""
    if not status.get("service_manager"):
        return "the daemon's standard error"
    unit = str(status.get("unit") or f"onebitd@{status.get('instance', '?')}")
    scope = "--user " if status.get("user_unit") else ""
    return f"`journalctl {scope}-u {unit.removesuffix('.service')}`"
