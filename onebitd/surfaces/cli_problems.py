"""What `onebitctl` says of what is wrong with a daemon, and what helps.

Pure functions of `/v1/status`; what counts as wrong is in `core.problems`.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping
from typing import Any, Final

from onebitd.core import problems
from onebitd.core.problems import Facts, Kind
from onebitd.surfaces.cli_text import clean, duration

SERVING: Final = problems.SERVING

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
    found = problems.find_problems(status, now)
    return [clean(SENTENCES[kind](facts, status)) for kind, facts in found]


def is_fine(status: Mapping[str, Any], now: dt.datetime) -> bool:
    """Tell whether the daemon is ready and nothing is wrong with it."""
    return status.get("state") == "ready" and not problems.find_problems(status, now)


def _because(facts: Facts) -> str:
    return f" ({str(facts['why']).removeprefix('the decoder: ')})" if facts["why"] else ""


def _listener(facts: Facts, status: Mapping[str, Any]) -> str:
    answer, url = facts["status"], facts["url"] or "?"
    what = facts["error"] if answer is None else f"answers with status {answer}"
    text = f"onebitd says that it is {status['state']}, and {url} fails: {what}."
    if status.get("listen_passed"):
        unit = f"onebitd-http@{status.get('instance', '?')}.socket"
        look = f"systemctl {'--user ' if status.get('user_unit') else ''}status {unit}"
        return f"{text} systemd has this socket: look at `{look}`, and the log."
    return f"{text} What helps: look at its log ({_log_of(status)}), restart it if it hangs."


def _breaker(facts: Facts, status: Mapping[str, Any]) -> str:
    detail, next_try_s = facts["detail"], facts["next_try_s"]
    text = "The prefill provider is not called for now"
    text += f": {detail}." if detail else f": its breaker is {facts['breaker']}."
    if detail and "tried" in str(detail).rpartition("; ")[2]:
        pass  # it ends with when that will be
    elif next_try_s:
        text += f" It is tried again in {duration(next_try_s)}."
    elif next_try_s is not None:
        text += " A try of it is due or under way."
    advice = BREAKER_ADVICE.get(str(facts["class"]))
    if advice is not None:
        text += f" What helps: {advice}."
    return f"{text} `onebitctl provider reset` puts it back into service at once."


def _audit(facts: Facts, status: Mapping[str, Any]) -> str:
    what = "An audit has" if facts["strikes"] == 1 else f"{facts['strikes']} audits have"
    return (
        f"{what} found a prompt's cache that differs from the decoder's own; replies may have been"
        f" wrong. Each is in the log: {_log_of(status)}. When the cause is found,"
        " `onebitctl provider reset` clears this."
    )


def _failures(facts: Facts, status: Mapping[str, Any]) -> str:
    failed, tried, reason = facts["failed"], facts["tried"], facts["reason"]
    text = f"The last {failed} handoffs" if tried is None else f"{failed} of {tried} handoffs"
    last = f", the last with {reason}" if reason else ""
    advice = ADVICE.get(str(reason), "`onebitctl handoffs` shows each, the log holds more")
    text += f" failed{last}: the decoder prefills instead, which is slower."
    return f"{text} What helps: {advice}."


SENTENCES: Final[Mapping[Kind, Callable[[Facts, Mapping[str, Any]], str]]] = {
    "failed": lambda facts, status: (
        f"onebitd has failed{_because(facts)}. Its log says more: {_log_of(status)}."
    ),
    "restarting": lambda facts, status: (
        f"The decoder is being restarted{_because(facts)}; until it is ready, requests wait or get"
        f" 503. Its last words are in the log: {_log_of(status)}."
    ),
    "draining": lambda *_: (
        "onebitd is stopping: replies under way are finished, new requests get 503."
    ),
    "listener": _listener,
    "exit": lambda facts, status: (
        f"The decoder ended unexpectedly {duration(facts['ago_s'])} ago ({facts['reason']}) and was"
        f" restarted. Its last words are in the log: {_log_of(status)}."
    ),
    "stuck": lambda *_: (
        "A run of the prefill provider cannot be killed; no prompt is handed off until it is gone."
        " It hangs in the kernel: look at dmesg, the device may need a reset."
    ),
    "breaker": _breaker,
    "route": lambda facts, _: (
        f"Nothing is handed over to this decoder: {facts['why']}."
        " After a change, `onebitctl provider reset` or a restart has it tried again."
    ),
    "audit": _audit,
    "lock": lambda facts, _: f"Device lock {facts['path']}: {facts['problem']}.",
    "failures": _failures,
    "history": lambda facts, _: (
        f"Handoffs are not kept over a restart: {str(facts['why']).rstrip('.')}."
    ),
}
"""What is said of each kind, by its facts and by the whole status."""


def _log_of(status: Mapping[str, Any]) -> str:
    """Say where the log is: a daemon that nothing manages writes where its starter looks."""
    if not status.get("service_manager"):
        return "the daemon's standard error"
    unit = str(status.get("unit") or f"onebitd@{status.get('instance', '?')}")
    scope = "--user " if status.get("user_unit") else ""
    return f"`journalctl {scope}-u {unit.removesuffix('.service')}`"
