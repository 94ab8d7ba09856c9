"""Values for the metrics of `core.metrics`: what one record adds, and what a status says.

Pure functions. A field that a record lacks is not counted: nothing is invented.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from onebitd.core.breaker import State
from onebitd.core.control_api import STATES, Status
from onebitd.core.handoff import HandoffRecord, Outcome, decode_speed, prefill_speed
from onebitd.core.metrics import PROVIDER_STATES, label

_UNKNOWN: Final = "unknown"


class Value(NamedTuple):
    """What a series gets: a counter's or a gauge's value, or what a histogram observes.

    Attributes:
        name: of a metric of the table.
        value: in the metric's unit.
        labels: in the table's order.
    """

    name: str
    value: float
    labels: tuple[str, ...] = ()


_SECONDS: Final = (
    ("queue_ms", "onebitd_queue_wait_seconds"),
    ("lock_ms", "onebitd_lock_wait_seconds"),
    ("prefill_ms", "onebitd_provider_prefill_seconds"),
    ("restore_ms", "onebitd_restore_seconds"),
    ("adopt_ms", "onebitd_adopt_seconds"),
)


def prompt_tokens_by_source(record: HandoffRecord) -> dict[str, int]:
    """Return where the tokens of a prompt were computed, those that are known to have been.

    By the decoder's own counts, so only of replies whose end was seen. What it found in its slot
    is the provider's where a handoff put it there, and else of an earlier request. A provider's
    work that the decoder did again was not used, and does not count.

    >>> of = dict.fromkeys(("request_id", "time", "instance", "model", "path"), "")
    >>> counts = {"handed_tokens": 306, "cached_tokens": 306, "evaluated_tokens": 1}
    >>> prompt_tokens_by_source(HandoffRecord(**of, stream=True, outcome=Outcome.USED, **counts))
    {'provider': 306, 'decoder': 1}
    """
    cached, evaluated = record.cached_tokens, record.evaluated_tokens
    found = {}
    if cached:
        # A handoff that was lost on the way ends as a fallback.
        by_provider = record.handed_tokens is not None and record.outcome is not Outcome.FALLBACK
        found["provider" if by_provider else "slot"] = cached
    if evaluated:
        found["decoder"] = evaluated
    return found


def values_of(record: HandoffRecord) -> Iterator[Value]:
    """Yield what a finished record adds to counters, and what histograms observe of it."""
    outcome = label(record.outcome)
    yield Value("onebitd_handoffs_total", 1, (outcome, label(record.reason), label(record.route)))
    for source, tokens in prompt_tokens_by_source(record).items():
        yield Value("onebitd_prompt_tokens_total", tokens, (source,))
    if record.reply_tokens:
        yield Value("onebitd_reply_tokens_total", record.reply_tokens)
    for field, name in _SECONDS:
        took_ms = getattr(record, field)
        if took_ms is not None:
            yield Value(name, took_ms / 1000.0)
    if record.share_ms:  # 0 stands for a shared route that was not tried
        yield Value("onebitd_share_seconds", record.share_ms / 1000.0)
    if record.first_byte_ms is not None:
        yield Value("onebitd_first_byte_seconds", record.first_byte_ms / 1000.0, (outcome,))
    if record.total_ms is not None:
        yield Value("onebitd_request_seconds", record.total_ms / 1000.0, (outcome,))
    if record.state_bytes is not None:
        yield Value("onebitd_state_bytes", record.state_bytes)
    yield from _speeds(record)


def _speeds(record: HandoffRecord) -> Iterator[Value]:
    prefills = (
        ("provider", record.handed_tokens, record.prefill_ms),
        ("decoder", record.evaluated_tokens, record.evaluated_ms),
    )
    for source, tokens, took_ms in prefills:
        speed = prefill_speed(tokens, took_ms)
        if speed is not None:
            yield Value("onebitd_prefill_tokens_per_second", speed, (source,))
    speed = decode_speed(record.reply_tokens, record.decode_ms)
    if speed is not None:
        yield Value("onebitd_decode_tokens_per_second", speed)


def values_now(status: Status, in_flight: int) -> Iterator[Value]:
    """Yield gauges, and the counters that others keep.

    Args:
        status: as of now.
        in_flight: requests that are being served.
    """
    build = status.backend.build or _UNKNOWN
    yield Value("onebitd_build_info", 1, (status.version, build))
    yield from _one_of("onebitd_state", STATES, status.state)
    yield from _one_of("onebitd_provider_state", PROVIDER_STATES, status.provider.state)
    yield from _one_of("onebitd_provider_breaker_state", State, status.provider.breaker)
    failures = status.provider.consecutive_failures
    yield Value("onebitd_provider_consecutive_failures", failures)
    yield Value("onebitd_provider_route_off", int(status.provider.route_off is not None))
    audit = status.audit
    yield Value("onebitd_audits_total", audit.audited - audit.drifted, ("passed",))
    yield Value("onebitd_audits_total", audit.drifted, ("drifted",))
    yield Value("onebitd_audits_total", audit.given_up, ("given_up",))
    yield Value("onebitd_audit_strikes", audit.strikes)
    yield Value("onebitd_decoder_restarts_total", status.backend.restarts)
    yield Value("onebitd_decoder_resident_memory_bytes", status.backend.rss_bytes or 0)
    yield Value("onebitd_slot_busy", int(status.slot.busy))
    yield Value("onebitd_queue_requests", status.queue.pending)
    yield Value("onebitd_queue_max_requests", status.queue.max)
    yield Value("onebitd_requests_in_flight", in_flight)
    for device in status.devices:
        labels = (device.name, device.kind)
        if device.busy_percent is not None:
            yield Value("onebitd_device_busy_ratio", device.busy_percent / 100.0, labels)
        if device.temperature_c is not None:
            yield Value("onebitd_device_temperature_celsius", device.temperature_c, labels)
        if device.power_w is not None:
            yield Value("onebitd_device_power_watts", device.power_w, labels)


def _one_of(name: str, states: Iterable[str], current: str) -> Iterator[Value]:
    for state in states:
        yield Value(name, int(state == current), (str(state),))
