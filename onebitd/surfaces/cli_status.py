"""What `onebitctl status` prints: pure functions from what the daemon said to lines of text.

They take plain mappings and read them with care: the daemon may be of another version. The most
important comes first: a screen that is too small loses what is at the end.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any, Final

from onebitd.surfaces.cli_problems import SERVING, find_problems
from onebitd.surfaces.cli_recent import policy_words, recent_lines
from onebitd.surfaces.cli_text import (
    Line,
    ago,
    clean,
    duration,
    mebibytes,
    paint,
    part_of,
    wrap,
)

TWO_COLUMNS: Final = 140
"""From so many columns on, what happens and what it is made of stand side by side."""

_GAP: Final = 3
_TEXT_COLUMNS: Final = 110
"""Sentences are not made longer lines of than the eye follows."""
_LABEL_COLUMNS: Final = 10
_STATE_PAINTS: Final = {"ready": "green", "failed": "red"}
_LOADING: Final = (
    "The model is being loaded; until it is ready, requests wait or get 503. The log tells what the"
    " decoder does meanwhile."
)


def status_page(
    status: Mapping[str, Any], now: dt.datetime, *, colour: bool, columns: int = 80
) -> str:
    """Return the page of `onebitctl status`: what is wrong first, then the state, then the rest.

    Args:
        status: `/v1/status`, with `probe` where the listener was asked.
        now: for how long ago things were.
        colour: whether there are any.
        columns: that a line may have; at least 40 are taken.
    """
    columns = max(columns, 40)
    lines = problem_lines(status, now, columns, colour=colour)
    if lines:
        lines.append("")
    lines += _state_lines(status, columns, colour)
    two = columns >= TWO_COLUMNS
    width = (columns - _GAP) // 2 if two else columns
    happening = recent_lines(part_of(status, "recent"), width)
    if happening:
        lines.append("")
    happening += _row_lines(_rows_of_what_happens(status, now), width)
    made_of = _row_lines(_rows_of_parts(status, now), width)
    past = _row_lines(_rows_of_the_past(status, now), width)
    shown = _side_by_side([*happening, *past], made_of, width) if two else None
    lines += [line.shown(colour) for line in shown or [*happening, *made_of, *past]]
    return "\n".join(lines)


def problem_lines(
    status: Mapping[str, Any], now: dt.datetime, columns: int, *, colour: bool
) -> list[str]:
    """Return the sentences about what is wrong, and about what is to be waited for."""
    columns = min(columns, _TEXT_COLUMNS)
    found = [
        paint(line, "yellow", colour)
        for problem in find_problems(status, now)
        for line in wrap(problem, "", "  ", columns)
    ]
    if status.get("state") == "loading":
        found += wrap(_LOADING, "", "  ", columns)
    return found


def answer_words(status: Mapping[str, Any]) -> str | None:
    """Return how the public listener answered, None when it was not asked."""
    probe = part_of(status, "probe")
    if not probe or not probe.get("tried", True):
        return None
    if probe.get("status") == 200:
        ms = probe.get("ms")
        return f"answers in {ms:.1f} ms" if isinstance(ms, float) else "answers"
    return "does not answer" if probe.get("status") is None else f"answers {probe['status']}"


def addresses(status: Mapping[str, Any]) -> str:
    """Return where it listens, for people."""
    found = ", ".join(str(address) for address in status.get("listen") or ())
    return f"{found} (systemd's socket)" if found and status.get("listen_passed") else found


def state_words(status: Mapping[str, Any]) -> str:
    """Return the state, and what the daemon has to say about it unless a sentence has that."""
    state = str(status.get("state", "?"))
    detail = status.get("state_detail")
    is_told = state in (*SERVING, "failed", "restarting")
    return f"{state} ({detail})" if detail and not is_told else state


def _state_lines(status: Mapping[str, Any], columns: int, colour: bool) -> list[str]:
    state = clean(str(status.get("state", "?")))
    parts = [state_words(status), f"up {duration(status.get('uptime_s'))}"]
    parts += filter(None, (addresses(status), answer_words(status)))
    head = clean(f"{status.get('instance', '?')}: ")
    first, *rest = wrap(clean(", ".join(parts)), head, " " * len(head), columns)
    painted = head + paint(state, _STATE_PAINTS.get(state, "yellow"), colour)
    return [first.replace(head + state, painted, 1), *rest]


_Rows = list[tuple[str, list[str]]]


def _rows_of_what_happens(status: Mapping[str, Any], now: dt.datetime) -> _Rows:
    rows = [("slot", [_slot_words(part_of(status, "slot"), part_of(status, "queue"))])]
    words = policy_words(part_of(status, "policy"))
    return [*rows, ("policy", words)] if words else rows


def _rows_of_parts(status: Mapping[str, Any], now: dt.datetime) -> _Rows:
    return [
        ("provider", _provider_values(part_of(status, "provider"))),
        ("decoder", _decoder_values(part_of(status, "backend"), now)),
        ("lock", _lock_values(part_of(status, "lock"), status.get("pid"))),
        *_device_rows(status.get("devices")),
        ("model", _model_values(part_of(status, "model"))),
    ]


def _rows_of_the_past(status: Mapping[str, Any], now: dt.datetime) -> _Rows:
    rows = [
        *_counter_rows(part_of(status, "handoffs")),
        *_audit_rows(part_of(status, "audit"), now),
    ]
    failure = part_of(part_of(status, "provider"), "last_error")
    if failure:
        rows.append(("last fail", [_failure_words(failure, now)]))
    return rows


def _row_lines(rows: _Rows, columns: int) -> list[Line]:
    lines = []
    for label, values in rows:
        for position, value in enumerate(values):
            head = label if position == 0 else ""
            indent = " " * _LABEL_COLUMNS
            wrapped = wrap(clean(value), head.ljust(_LABEL_COLUMNS), indent, columns)
            lines += [Line(text, ((0, len(head), "dim"),)) for text in wrapped[:1]]
            lines += [Line(text) for text in wrapped[1:]]
    return lines


def _side_by_side(left: Sequence[Line], right: Sequence[Line], width: int) -> list[Line]:
    lines = []
    for number in range(max(len(left), len(right))):
        one = left[number] if number < len(left) else Line("")
        other = right[number] if number < len(right) else Line("")
        lines.append(one.beside(other, width + _GAP))
    return lines


def _model_values(model: Mapping[str, Any]) -> list[str]:
    facts = []
    if model.get("ctx_size") is not None:
        facts.append(f"context {model['ctx_size']} tokens")
    if model.get("state_version") is not None:
        facts.append(f"state version {model['state_version']}")
    if model.get("layout"):
        facts.append(str(model["layout"]).removeprefix(f"v{model.get('state_version')}: "))
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


def _slot_words(slot: Mapping[str, Any], queue: Mapping[str, Any]) -> str:
    facts = ["idle"]
    if slot.get("busy"):
        facts = ["busy"]
        if slot.get("phase"):
            facts.append(str(slot["phase"]))
        if slot.get("request_id"):
            facts.append(f"request {slot['request_id']}")
        if slot.get("age_s") is not None:
            facts.append(f"for {duration(slot['age_s'])}")
    waiting = f"{queue.get('pending', '?')} waiting, room for {queue.get('max', '?')}"
    return f"{', '.join(facts)}; {waiting}"


def _device_rows(devices: object) -> _Rows:
    found = [one for one in (devices if isinstance(devices, list) else ()) if _is_table(one)]
    values = [_device_words(one) for one in found]
    return [("devices", values)] if values else []


def _device_words(device: Mapping[str, Any]) -> str:
    """Return e.g. `gpu card0, 87 % busy, 2400 MHz, 61 °C, 95 W`."""
    facts = [f"{device.get('kind', '?')} {device.get('name', '?')}"]
    if device.get("busy_percent") is not None:
        facts.append(f"{device['busy_percent']:.0f} % busy")
    elif device.get("power_state"):
        facts.append(str(device["power_state"]))
    clocks = part_of(device, "clocks")
    if clocks:
        name, mhz = max(clocks.items(), key=lambda item: float(item[1]))
        facts.append(f"{name} {mhz:.0f} MHz")
    if device.get("temperature_c") is not None:
        facts.append(f"{device['temperature_c']:.0f} °C")
    if device.get("power_w") is not None:
        facts.append(f"{device['power_w']:.0f} W")
    return ", ".join(facts)


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping)


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


def _failure_words(failure: Mapping[str, Any], now: dt.datetime) -> str:
    detail = f": {failure['detail']}" if failure.get("detail") else ""
    return f"{ago(failure.get('time'), now)}, {failure.get('reason', '?')}{detail}"
