"""What the page at /onebit/ is told: of status, records, requests and costs, what anybody may see.

Whoever may use the API may look at the page, so everything is chosen by name: no prompt, no
`detail` (it may quote one), no id that a client has chosen, no path but a file's name, and of the
paths that were asked for only those that everybody knows.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final

from onebitd.core import problems
from onebitd.core.advice import judge
from onebitd.core.control_api import LastExit, RequestInFlight, Status
from onebitd.core.costs import Costs
from onebitd.core.forecast import SHORTEST, Forecast, Given
from onebitd.core.handoff import HandoffRecord, Route
from onebitd.core.page_spans import open_span, spans
from onebitd.core.problems import Facts, Kind

PAGE_PATHS: Final = ("/onebit", "/onebit/")
EVENTS_PATH: Final = "/onebit/events"
CURVE_POINTS: Final = 41
DEFAULT_CTX: Final = 8192

_RECORD_FIELDS: Final = (
    *("outcome", "route", "reason", "stream", "explored"),
    *("prompt_tokens", "handed_tokens", "cached_tokens", "evaluated_tokens", "reply_tokens"),
    *("queue_ms", "lock_ms", "prefill_ms", "provider_wall_ms", "check_ms", "restore_ms"),
    *("share_ms", "adopt_ms", "first_byte_ms", "decode_ms", "total_ms"),
    *("state_bytes", "gpu_busy_percent"),
)
_KNOWN_PATHS: Final = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/chat/completions", "/completions"),
        *("/completion", "/infill", "/v1/messages", "/v1/responses", "/responses"),
        *("/embedding", "/embeddings", "/v1/embeddings", "/rerank", "/v1/rerank"),
        *("/tokenize", "/detokenize", "/apply-template", "/v1/messages/count_tokens"),
        *("/", "/props", "/slots", "/metrics", "/models", "/v1/models", "/lora-adapters"),
    }
)
_MIB: Final = 1 << 20


def shows(path: str) -> bool:
    """Say whether a percent-decoded path belongs to the page: nothing there is for the decoder."""
    return path == PAGE_PATHS[0] or path.startswith(PAGE_PATHS[1])


def status_view(status: Status, now: dt.datetime) -> dict[str, Any]:
    """Return the state for the page, the sentences on what is wrong first.

    Args:
        status: the daemon's own words for it.
        now: aware.

    Nothing in it changes by itself with each second, so that it is sent when something happens.
    """
    backend, provider, lock, slot = status.backend, status.provider, status.lock, status.slot
    last_exit = backend.last_exit
    counts = dataclasses.asdict(status.handoffs)
    reasons = counts.pop("by_reason")
    return {
        "version": status.version,
        "instance": status.instance,
        "state": status.state,
        "problems": find_problems(status, now),
        "since": round(now.timestamp() - status.uptime_s),
        "model": {
            "alias": status.model.alias,
            "file": _name(status.model.path),
            "ctx_size": status.model.ctx_size,
            "state_version": status.model.state_version,
        },
        "decoder": {
            "state": backend.state,
            "build": backend.build,
            "devices": list(backend.devices),
            "restarts": backend.restarts,
            "rss_mib": None if backend.rss_bytes is None else _coarse(backend.rss_bytes / _MIB),
            "last_exit": None
            if last_exit is None
            else {"time": last_exit.time, "reason": last_exit.brief},
        },
        "provider": {
            "program": _name(provider.program),
            "state": provider.state,
            "breaker": provider.breaker,
            "class": provider.breaker_class,
            "next_try": _moment(now, provider.breaker_next_try_s),
            "shared": provider.shared.partition(",")[0],
            "route_off": provider.route_off is not None,
            "failures": provider.consecutive_failures,
        },
        "lock": {
            "state": _lock_state(status),
            "hold": lock.hold,
        },
        "slot": {"busy": slot.busy, "phase": slot.phase},
        "queue": {"pending": status.queue.pending, "max": status.queue.max},
        "outcomes": counts,
        "reasons": reasons,
        "audit": {
            "audited": status.audit.audited,
            "drifted": status.audit.drifted,
            "strikes": status.audit.strikes,
        },
    }


def find_problems(status: Status, now: dt.datetime) -> list[str]:
    """Return a sentence for each thing that is wrong or keeps requests waiting; none when well."""
    found = problems.find_problems(status.to_json(), now)
    loading = ["The model is being loaded; until the decoder is ready, requests get 503."]
    return [
        *(loading if status.state == "loading" else []),
        *(SENTENCES[kind](facts) for kind, facts in found),
    ]


def handoff_view(record: HandoffRecord, number: int) -> dict[str, Any]:
    """Return a finished record for the page.

    Args:
        record: has an outcome.
        number: stands for its id.

    Returns:
        `n`, `at` (the start, milliseconds of the epoch), `path`, `spans` and what applies of the
        record's own fields, of the same names.
    """
    fields = record.fields()
    return {
        "n": number,
        "at": _epoch_ms(record.time),
        "path": _path(record.path),
        **{name: fields[name] for name in _RECORD_FIELDS if name in fields},
        "spans": [span.to_json() for span in spans(fields)],
    }


def request_view(
    request: RequestInFlight, record: HandoffRecord | None, number: int, began_ms: int
) -> dict[str, Any]:
    """Return a request in flight for the page.

    Args:
        request: as of now.
        record: of its handoff, as far as it has come; None off the handoff route.
        number: stands for its id; its handoff has the same one later.
        began_ms: milliseconds of the epoch.

    Returns:
        `n`, `at`, `path`, `phase`, the counts of tokens that are known; on the handoff route
        `spans` that are over and `open`, the name and the beginning of the one that is not.
    """
    found: dict[str, Any] = {
        "n": number,
        "at": began_ms,
        "path": _path(request.path),
        "phase": request.phase,
        "stream": request.stream,
        "prompt_tokens": request.prompt_tokens,
        "reply_tokens": request.reply_tokens,
    }
    if record is not None:
        fields = record.fields()
        found["at"] = _epoch_ms(record.time)
        known = spans(fields)
        found["spans"] = [span.to_json() for span in known]
        found["open"] = open_span(fields, known, request.phase)
    return {name: value for name, value in found.items() if value is not None}


def costs_view(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the learned curves and where they cross. It takes some ten milliseconds.

    Args:
        answer: what `/v1/costs` says.

    Returns:
        `missing` (words of `Forecast.missing`), and unless something is: `last`, the longest
        prompt; `tokens`, prompt lengths; `decoder`, `file` and `shared`, the milliseconds to the
        first byte at each, null for a route that is not known; `wins`, the first and last length
        of each stretch where a route beats the decoder, and `best`, at which length by how much
        it does best. `samples` says what it rests on.
    """
    costs = Costs.from_json(answer.get("costs"))
    forecast = Forecast(costs, Given())
    missing = list(forecast.missing())
    found: dict[str, Any] = {
        "missing": missing,
        "has_provider": answer.get("provider") is not None,
        "samples": {
            "decoder": costs.decoder_samples(),
            **{str(route): costs.provider_samples(route) for route in Route},
        },
    }
    ctx_size = answer.get("ctx_size")
    last = max((ctx_size if isinstance(ctx_size, int) else DEFAULT_CTX) - 1, SHORTEST + 1)
    tokens = curve_lengths(last)
    rows = [forecast.first_byte(count) for count in tokens]
    found |= {
        "last": last,
        "tokens": tokens,
        "decoder": _curve([row.decoder_ms for row in rows]),
        "file": _curve([row.file_ms for row in rows]),
        "shared": _curve([row.shared_ms for row in rows]),
        "wins": {},
        "best": {},
    }
    if not missing:
        for route in forecast.routes():
            verdict = judge(route, forecast.first_byte, last)
            found["wins"][str(route)] = [list(stretch) for stretch in verdict.wins]
            found["best"][str(route)] = [verdict.best_tokens, round(verdict.best_factor, 3)]
    return found


def curve_lengths(last: int) -> list[int]:
    """Return prompt lengths for a curve, from the shortest to the last, evenly on a log scale.

    >>> curve_lengths(9)
    [2, 3, 4, 5, 6, 7, 8, 9]
    """
    ratio = last / SHORTEST
    steps = CURVE_POINTS - 1
    return sorted({round(SHORTEST * ratio ** (step / steps)) for step in range(CURVE_POINTS)})


def _curve(values: Sequence[float | None]) -> list[float] | None:
    known = [round(value, 3) for value in values if value is not None]
    return known if len(known) == len(values) else None


def _because(facts: Facts) -> str:
    return "" if facts["exit"] is None else f" ({_brief(facts['exit'])})"


def _brief(reason: object) -> str:
    return LastExit("", str(reason)).brief


def _breaker(facts: Facts) -> str:
    kind = "" if facts["class"] is None else f" ({facts['class']})"
    return (
        f"The prefill provider is not called for now{kind}: the decoder prefills instead."
        " `onebitctl status` says what helps."
    )


def _audit(facts: Facts) -> str:
    what = "An audit has" if facts["strikes"] == 1 else f"{facts['strikes']} audits have"
    return f"{what} found a prompt's cache that differs from the decoder's own."


def _failures(facts: Facts) -> str:
    failed, tried, reason = facts["failed"], facts["tried"], facts["reason"]
    text = f"The last {failed} handoffs" if tried is None else f"{failed} of {tried} handoffs"
    last = f", the last with {reason}" if reason else ""
    return f"{text} failed{last}: the decoder prefills instead, which is slower."


SENTENCES: Final[Mapping[Kind, Callable[[Facts], str]]] = {
    "failed": lambda facts: (
        f"The decoder cannot be kept running{_because(facts)}; onebitd ends. Its log says why."
    ),
    "restarting": lambda facts: (
        f"The decoder is being restarted{_because(facts)}; until it is ready, requests wait or"
        " get 503."
    ),
    "draining": lambda _: (
        "onebitd is stopping: replies under way are finished, new requests get 503."
    ),
    "listener": lambda _: "The listener does not answer; `onebitctl status` says why.",
    "exit": lambda facts: (
        f"The decoder ended unexpectedly ({_brief(facts['reason'])}) and was restarted."
    ),
    "stuck": lambda _: (
        "A run of the prefill provider cannot be killed; no prompt is handed off until it is gone."
        " It hangs in the kernel."
    ),
    "breaker": _breaker,
    "route": lambda _: (
        "Nothing is handed over: this decoder makes no use of what it is handed."
        " `onebitctl status` says why."
    ),
    "audit": _audit,
    "lock": lambda facts: (
        f"The device lock {'is not as it should be' if facts['usable'] else 'cannot be taken'};"
        " `onebitctl lock` says why."
    ),
    "failures": _failures,
    "history": lambda _: "Handoffs are not kept over a restart; `onebitctl status` says why.",
}
"""What is said of each kind, with nothing in it that may quote somebody or name a path."""


def _lock_state(status: Status) -> str:
    lock = status.lock
    if lock.hold == "never":
        return "not used"
    if lock.held:
        ours = lock.holder is not None and lock.holder.get("pid") == status.pid
        return "held by this daemon" if ours else "held by another program"
    return "free" if lock.usable else "unusable"


def _name(path: str | None) -> str | None:
    return None if path is None else PurePath(path).name


def _path(path: str) -> str:
    return path if path in _KNOWN_PATHS else "another path"


def _coarse(value: float) -> int:
    """Two digits are enough, and do not change all the time."""
    return int(float(f"{value:.2g}"))


def _moment(now: dt.datetime, after_s: float | None) -> int | None:
    return None if after_s is None else round(now.timestamp() + after_s)


def _epoch_ms(time: str) -> int:
    return round(dt.datetime.fromisoformat(time).timestamp() * 1000)
