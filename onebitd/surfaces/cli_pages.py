"""What `onebitctl` prints: pure functions from what the daemon said to lines of text.

They take plain mappings and read them with care: the daemon may be of another version.
"""

from __future__ import annotations

import datetime as dt
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final

PAGE_COLUMNS: Final = 80
RECENT_EXIT_S: Final = 600.0
"""A decoder that ended against its will counts as a fault for so long after its restart."""
MANY_FAILURES: Final = 3
"""So many handoffs tried in vain in a row count as a fault."""

_LABEL_COLUMNS: Final = 10
_PAINTS: Final = {"green": "32", "yellow": "33", "red": "31", "dim": "2", "bold": "1"}
_STATE_PAINTS: Final = {"ready": "green", "failed": "red"}
_OUTCOME_PAINTS: Final = {"used": "green", "skipped": "dim", "cancelled": "dim", "failed": "red"}
_COLUMNS: Final = (8, 9, 6, 6, 9, 9, 10)
_HEADINGS: Final = ("TIME", "OUTCOME", "PROMPT", "EVAL", "PREFILL", "RESTORE", "FIRST BYTE")
_LEFT_ALIGNED: Final = 2

_ADVICE: Final = {
    "lock_busy": "`onebitctl lock` names who has the device",
    "lock_unusable": "`onebitctl lock` says what is wrong with the lock file",
    "no_space": "make room where the state files live (handoff.state_dir)",
    "bad_state": "provider, model and decoder do not fit together",
    "wasted": "the decoder evaluates what it was handed again, see onebitd(8)",
}


def status_page(status: Mapping[str, Any], now: dt.datetime, *, colour: bool) -> str:
    """Return the page of `onebitctl status`: what is wrong first, then the state, then the rest."""
    lines: list[str] = []
    for problem in find_problems(status, now):
        lines += [paint(line, "yellow", colour) for line in _wrap(problem, "", "")]
    if lines:
        lines.append("")
    lines += _state_lines(status, colour)
    for label, values in _rows(status, now):
        for position, value in enumerate(values):
            head = label if position == 0 else ""
            indent = " " * _LABEL_COLUMNS
            lines += _wrap(clean(value), head.ljust(_LABEL_COLUMNS), indent)
    return "\n".join(lines)


def find_problems(status: Mapping[str, Any], now: dt.datetime) -> list[str]:
    """Return a sentence for each thing that is wrong, with what to do; empty when all is well."""
    checks = (_state_problem, _exit_problem, _provider_problem, _lock_problem, _failure_problem)
    return [clean(problem) for check in checks if (problem := check(status, now)) is not None]


def is_fine(status: Mapping[str, Any], now: dt.datetime) -> bool:
    """Tell whether the daemon is ready and nothing is wrong with it."""
    return status.get("state") == "ready" and not find_problems(status, now)


def handoffs_header(width: int | None) -> str:
    """Return the heading of the handoffs table, cut to `width` columns unless that is None."""
    return cut(_cells(_HEADINGS) + "  REASON", width)


def handoff_row(record: Mapping[str, Any], width: int | None, *, colour: bool) -> str:
    """Return one line of the handoffs table, cut to `width` columns unless that is None."""
    restore = record.get("restore_ms")
    if restore is None and record.get("adopt_ms") is not None:
        restore = record["adopt_ms"] + (record.get("share_ms") or 0.0)
    outcome = clean(str(record.get("outcome", "?")))
    cells = (
        local_time(record.get("time")),
        outcome,
        _count(record.get("prompt_tokens")),
        _count(record.get("evaluated_tokens")),
        milliseconds(record.get("prefill_ms")),
        milliseconds(restore),
        milliseconds(record.get("first_byte_ms")),
    )
    reason = ": ".join(clean(str(record[key])) for key in ("reason", "detail") if record.get(key))
    line = cut(f"{_cells(cells)}  {reason}".rstrip(), width)
    painted = paint(outcome, _OUTCOME_PAINTS.get(outcome, "yellow"), colour)
    return line.replace(outcome, painted, 1)


def config_page(config: Mapping[str, Any]) -> str:
    """Return key, value and source of each setting, aligned."""
    rows = []
    for key, entry in config.items():
        found = entry if isinstance(entry, Mapping) else {"value": entry}
        rows.append((clean(key), _value(found.get("value")), clean(str(found.get("source", "?")))))
    wide = max((len(key) for key, _, _ in rows), default=0)
    # One long value must not push every source out of sight.
    wide_value = min(max((len(value) for _, value, _ in rows), default=0), 36)
    return "\n".join(
        f"{key:<{wide}}  {value:<{wide_value}}  {source}" for key, value, source in rows
    )


def lock_page(lock: Mapping[str, Any]) -> str:
    """Return who holds the device lock."""
    holder = _part(lock, "holder")
    if lock["held"] and not holder:
        state = "held by a process that cannot be seen from here"
    elif lock.get("declared_only"):
        state = f"claimed by pid {holder['pid']}, which wrote its name and took no lock"
    elif lock["held"]:
        state = f"held by pid {holder['pid']}"
    else:
        state = "free" if lock["exists"] or lock["problem"] else "free (no such file yet)"
    lines = [f"{lock['path']}: {state}"]
    for key, label in (("command", "command"), ("owner_line", "owner line")):
        if holder.get(key):
            lines.append(f"{label}: {holder[key]}")
    if lock["problem"]:
        lines.append(f"problem: {lock['problem']}")
    return "\n".join(map(clean, lines))


def duration(seconds: float | None) -> str:
    """Return `2.1 s`, `3 min 20 s`, `2 h 5 min` or `4 d 3 h`."""
    if seconds is None:
        return "?"
    if seconds < 60:
        return f"{max(seconds, 0.0):.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    whole = int(seconds)
    for size, unit, part, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit} {rest} {small}" if rest else f"{whole // size} {unit}"
    rest = whole % 60
    return f"{whole // 60} min {rest} s" if rest else f"{whole // 60} min"


def mebibytes(size_bytes: int) -> str:
    """Return `812 MiB`, from 10 GiB on `12.3 GiB`."""
    size = size_bytes / 2**20
    return f"{size:.0f} MiB" if size < 10240 else f"{size / 1024:.1f} GiB"


def milliseconds(value: float | None) -> str:
    """Return `0.41 ms`, `88.1 ms`, `1.52 s` or `-`."""
    if value is None:
        return "-"
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def local_time(text: object) -> str:
    """Return a record's time as HH:MM:SS of the local zone, or `-`."""
    moment = _moment(text)
    return "-" if moment is None else moment.astimezone().strftime("%H:%M:%S")


def clean(text: str) -> str:
    """Return the text without what would move the cursor or break the line.

    Details quote other programs' output.
    """
    return "".join(
        letter if letter.isprintable() else " " if letter.isspace() else "?" for letter in text
    )


def cut(line: str, width: int | None) -> str:
    """Return the line, shortened to `width` columns with an ellipsis."""
    if width is None or len(line) <= width:
        return line
    return line[: max(width - 1, 0)].rstrip() + "…"


def paint(text: str, name: str, colour: bool) -> str:
    """Return the text in a colour, or as it is when `colour` is False."""
    return f"\x1b[{_PAINTS[name]}m{text}\x1b[0m" if colour else text


def _state_lines(status: Mapping[str, Any], colour: bool) -> list[str]:
    state = clean(str(status.get("state", "?")))
    parts = [state]
    if status.get("state_detail"):
        parts[0] += f" ({status['state_detail']})"
    parts.append(f"up {duration(status.get('uptime_s'))}")
    parts += [str(address) for address in status.get("listen") or ()]
    head = clean(f"{status.get('instance', '?')}: ")
    first, *rest = _wrap(clean(", ".join(parts)), head, " " * len(head))
    painted = head + paint(state, _STATE_PAINTS.get(state, "yellow"), colour)
    return [first.replace(head + state, painted, 1), *rest]


def _rows(status: Mapping[str, Any], now: dt.datetime) -> list[tuple[str, list[str]]]:
    rows = [
        ("model", _model_values(_part(status, "model"))),
        ("decoder", _decoder_values(_part(status, "backend"), now)),
        ("provider", _provider_values(_part(status, "provider"))),
        ("lock", _lock_values(_part(status, "lock"))),
        ("slot", _slot_values(_part(status, "slot"))),
        ("queue", _queue_values(_part(status, "queue"))),
        *_counter_rows(_part(status, "handoffs")),
    ]
    failure = _part(_part(status, "provider"), "last_error")
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
    restarts, last_exit = backend.get("restarts") or 0, _part(backend, "last_exit")
    if restarts or last_exit:
        text = f"restarted {restarts} {'time' if restarts == 1 else 'times'}"
        if last_exit:
            text += f", last exit {_ago(last_exit.get('time'), now)}: {last_exit.get('reason')}"
        values.append(text)
    return values


def _provider_values(provider: Mapping[str, Any]) -> list[str]:
    if not provider.get("program"):
        return ["none: the decoder prefills every prompt itself"]
    text = f"{provider.get('state', '?')}, {provider['program']}"
    if provider.get("breaker") not in (None, "closed"):
        text += f", breaker {provider['breaker']}"
    return [text]


def _lock_values(lock: Mapping[str, Any]) -> list[str]:
    state = "free"
    if lock.get("held"):
        holder = _part(lock, "holder")
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
    reasons = _part(handoffs, "by_reason")
    counters = [f"{name} {count}" for name, count in handoffs.items() if name != "by_reason"]
    rows = [("handoffs", [", ".join(counters) or "?"])]
    if reasons:
        ordered = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
        rows.append(("reasons", [", ".join(f"{name} {count}" for name, count in ordered)]))
    return rows


def _state_problem(status: Mapping[str, Any], now: dt.datetime) -> str | None:
    instance = status.get("instance", "?")
    last_exit = _part(_part(status, "backend"), "last_exit")
    why = status.get("state_detail") or last_exit.get("reason")
    because = f" ({why})" if why else ""
    match status.get("state"):
        case "failed":
            return f"onebitd has failed{because}. Its log says more: {_journal(instance)}"
        case "restarting":
            return (
                f"The decoder is being restarted{because}; until it is ready, requests get 503."
                f" Its last words are in the log: {_journal(instance)}"
            )
        case "draining":
            return "onebitd is stopping: replies under way are finished, new requests get 503."
    return None


def _exit_problem(status: Mapping[str, Any], now: dt.datetime) -> str | None:
    last_exit = _part(_part(status, "backend"), "last_exit")
    moment = _moment(last_exit.get("time"))
    if status.get("state") != "ready" or moment is None:
        return None
    if (now - moment).total_seconds() > RECENT_EXIT_S:
        return None
    return (
        f"The decoder ended unexpectedly {_ago(last_exit.get('time'), now)}"
        f" ({last_exit.get('reason')}) and was restarted. Its last words are in the log:"
        f" {_journal(status.get('instance', '?'))}"
    )


def _provider_problem(status: Mapping[str, Any], now: dt.datetime) -> str | None:
    provider = _part(status, "provider")
    if provider.get("state") == "stuck":
        return (
            "A run of the prefill provider cannot be killed; no prompt is handed off until it is"
            " gone. It hangs in the kernel: look at dmesg, the device may need a reset."
        )
    if provider.get("breaker") not in (None, "closed"):
        return f"The prefill provider is not called for now: its breaker is {provider['breaker']}."
    return None


def _lock_problem(status: Mapping[str, Any], now: dt.datetime) -> str | None:
    lock = _part(status, "lock")
    return f"Device lock {lock.get('path')}: {lock['problem']}." if lock.get("problem") else None


def _failure_problem(status: Mapping[str, Any], now: dt.datetime) -> str | None:
    provider, counts = _part(status, "provider"), _part(status, "handoffs")
    in_a_row = provider.get("consecutive_failures") or 0
    failed = sum(counts.get(name) or 0 for name in ("fallback", "wasted", "failed"))
    tried = failed + (counts.get("used") or 0)
    if in_a_row >= MANY_FAILURES:
        text = f"The last {in_a_row} handoffs failed"
    elif in_a_row and tried >= 10 and failed * 2 > tried:
        text = f"{failed} of {tried} handoffs failed"
    else:
        return None
    failure = _part(provider, "last_error")
    reason = failure.get("reason", "?")
    advice = _ADVICE.get(reason, "`onebitctl handoffs` shows each, the log holds more")
    if failure:
        text += f", the last with {reason}"
    return f"{text}: the decoder prefills instead, which is slower. What helps: {advice}."


def _failure_words(failure: Mapping[str, Any], now: dt.datetime) -> str:
    detail = f": {failure['detail']}" if failure.get("detail") else ""
    return f"{_ago(failure.get('time'), now)}, {failure.get('reason', '?')}{detail}"


def _journal(instance: object) -> str:
    return f"journalctl -u onebitd@{instance}"


def _ago(text: object, now: dt.datetime) -> str:
    moment = _moment(text)
    return "at ?" if moment is None else f"{duration((now - moment).total_seconds())} ago"


def _moment(text: object) -> dt.datetime | None:
    try:
        moment = dt.datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else None


def _part(mapping: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = mapping.get(key)
    return found if isinstance(found, Mapping) else {}


def _value(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return clean(" ".join(f"{name}={item}" for name, item in value.items())) or "-"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return clean(" ".join(map(str, value))) or "-"
    return clean(str(value))


def _count(value: object) -> str:
    return "-" if value is None else clean(str(value))


def _cells(cells: Sequence[str]) -> str:
    return "  ".join(
        f"{cell:<{wide}}" if position < _LEFT_ALIGNED else f"{cell:>{wide}}"
        for position, (cell, wide) in enumerate(zip(cells, _COLUMNS, strict=True))
    )


def _wrap(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text,
        PAGE_COLUMNS,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
    ) or [first.rstrip()]
