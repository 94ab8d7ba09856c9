"""The table of metrics, and what records and statuses become in it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from onebitd.core.breaker import State
from onebitd.core.control_api import STATES, AuditStatus, BackendStatus, ProviderStatus, SlotStatus
from onebitd.core.exposition_format import Format, format_for
from onebitd.core.handoff import HandoffRecord, Outcome, Reason, Route
from onebitd.core.metric_values import Value, prompt_tokens_by_source, values_now, values_of
from onebitd.core.metrics import METRIC_BY_NAME, METRICS, PROVIDER_STATES, Kind, Metric
from onebitd.core.telemetry import DeviceSample
from tests.surfaces.control_server import make_record, make_status

HANDOFF_MS = {
    "queue_ms": 250.0,
    "lock_ms": 10.0,
    "prefill_ms": 500.0,
    "restore_ms": 40.0,
    "share_ms": 0.5,
    "adopt_ms": 2.0,
}
WHOLE: dict[str, Any] = {
    **HANDOFF_MS,
    "route": Route.FILE,
    "prompt_tokens": 101,
    "handed_tokens": 100,
    "cached_tokens": 100,
    "evaluated_tokens": 1,
    "evaluated_ms": 20.0,
    "first_byte_ms": 800.0,
    "total_ms": 2300.0,
    "reply_tokens": 30,
    "decode_ms": 1500.0,
    "state_bytes": 1 << 20,
}


def of(name: str, values: Any) -> dict[tuple[str, ...], float]:
    """Return the values of one metric by label."""
    found = [value for value in values if value.name == name]
    assert len({value.labels for value in found}) == len(found)
    return {value.labels: value.value for value in found}


@pytest.mark.parametrize(
    ("outcome", "handed", "cached", "evaluated", "sources"),
    [
        (Outcome.USED, 306, 306, 1, {"provider": 306, "decoder": 1}),
        (Outcome.WASTED, 306, 0, 307, {"decoder": 307}),
        (Outcome.WASTED, 306, 300, 7, {"provider": 300, "decoder": 7}),
        (Outcome.WASTED, 306, None, None, {}),
        (Outcome.SKIPPED, None, 0, 307, {"decoder": 307}),
        (Outcome.SKIPPED, None, 290, 17, {"slot": 290, "decoder": 17}),
        (Outcome.FALLBACK, None, 0, 307, {"decoder": 307}),
        (Outcome.FALLBACK, 306, 200, 107, {"slot": 200, "decoder": 107}),
        (Outcome.CANCELLED, 306, None, None, {}),
        (Outcome.CANCELLED, 306, 306, 1, {"provider": 306, "decoder": 1}),
        (Outcome.FAILED, None, None, None, {}),
    ],
)
def test_prompt_tokens_by_source_of_each_ending(
    outcome: Outcome,
    handed: int | None,
    cached: int | None,
    evaluated: int | None,
    sources: dict[str, int],
) -> None:
    """Who computed them, by the decoder's own counts; what it did not say is nobody's."""
    record = make_record(
        outcome=outcome, handed_tokens=handed, cached_tokens=cached, evaluated_tokens=evaluated
    )
    assert prompt_tokens_by_source(record) == sources


def test_values_of_a_used_handoff_are_in_base_units() -> None:
    """Seconds and bytes, each time once, by outcome where there is one."""
    assert set(values_of(make_record(**WHOLE))) == {
        Value("onebitd_handoffs_total", 1, ("used", "none", "file")),
        Value("onebitd_prompt_tokens_total", 100, ("provider",)),
        Value("onebitd_prompt_tokens_total", 1, ("decoder",)),
        Value("onebitd_reply_tokens_total", 30),
        Value("onebitd_queue_wait_seconds", 0.25),
        Value("onebitd_lock_wait_seconds", 0.01),
        Value("onebitd_provider_prefill_seconds", 0.5),
        Value("onebitd_restore_seconds", 0.04),
        Value("onebitd_share_seconds", 0.0005),
        Value("onebitd_adopt_seconds", 0.002),
        Value("onebitd_first_byte_seconds", 0.8, ("used",)),
        Value("onebitd_request_seconds", 2.3, ("used",)),
        Value("onebitd_prefill_tokens_per_second", 200.0, ("provider",)),
        Value("onebitd_decode_tokens_per_second", 20.0),
        Value("onebitd_state_bytes", 1 << 20),
    }


def test_values_of_a_record_with_nothing_else_count_it_alone() -> None:
    """A field that does not apply is not a zero."""
    record = make_record(outcome=Outcome.FAILED, reason=Reason.QUEUE_FULL, prompt_tokens=None)
    counted = Value("onebitd_handoffs_total", 1, ("failed", "queue_full", "none"))
    assert list(values_of(record)) == [counted]


@pytest.mark.parametrize(
    ("fields", "speeds"),
    [
        ({"evaluated_tokens": 64, "evaluated_ms": 320.0}, {("decoder",): 200.0}),
        ({"evaluated_tokens": 31, "evaluated_ms": 320.0}, {}),
        ({"evaluated_tokens": 64, "evaluated_ms": 0.0}, {}),
        ({"evaluated_tokens": 64}, {}),
        ({"handed_tokens": 32, "prefill_ms": 16.0}, {("provider",): 2000.0}),
        ({"handed_tokens": 31, "prefill_ms": 16.0}, {}),
        ({"handed_tokens": 64, "prefill_ms": 1e-300}, {}),
        ({"prefill_ms": 16.0}, {}),
        (
            {
                "handed_tokens": 64,
                "prefill_ms": 32.0,
                "evaluated_tokens": 65,
                "evaluated_ms": 325.0,
                "outcome": Outcome.WASTED,
            },
            {("provider",): 2000.0, ("decoder",): 200.0},
        ),
    ],
)
def test_values_of_a_prefill_have_the_speed_of_who_computed_it(
    fields: dict[str, Any], speeds: dict[tuple[str, ...], float]
) -> None:
    """The one token after a handoff, or a few after a cached prompt, say nothing about prefill."""
    assert of("onebitd_prefill_tokens_per_second", values_of(make_record(**fields))) == speeds


@pytest.mark.parametrize(
    ("reply_tokens", "decode_ms", "speeds"),
    [
        (2, 50.0, {(): 40.0}),
        (1, 0.001, {}),
        (1, 50.0, {}),
        (0, 50.0, {}),
        (30, 0.0, {}),
        (30, 1e-300, {}),
        (30, None, {}),
        (None, 50.0, {}),
    ],
)
def test_values_of_a_reply_of_one_token_have_no_speed(
    reply_tokens: int | None, decode_ms: float | None, speeds: dict[tuple[str, ...], float]
) -> None:
    """llama-server says a microsecond: that mean would be of such replies alone, for ever."""
    record = make_record(reply_tokens=reply_tokens, decode_ms=decode_ms)
    assert of("onebitd_decode_tokens_per_second", values_of(record)) == speeds


def test_values_of_a_file_where_the_shared_route_is_on_has_no_share_time() -> None:
    """A share_ms of 0 says that it was not asked for."""
    assert of("onebitd_share_seconds", values_of(make_record(share_ms=0.0))) == {}
    assert of("onebitd_share_seconds", values_of(make_record(share_ms=0.4))) == {(): 0.0004}


CARD = DeviceSample(
    kind="gpu",
    name="card1",
    driver="amdgpu",
    busy_percent=87.0,
    temperature_c=61.5,
    power_w=54.0,
)


def every_record() -> list[HandoffRecord]:
    """Return records with all outcomes, reasons and routes."""
    reasons, routes = (None, *Reason), (None, *Route)
    return [
        make_record(**{**WHOLE, "outcome": outcome, "reason": reason, "route": route})
        for outcome, reason, route in itertools.product(Outcome, reasons, routes)
    ]


def test_every_value_is_of_the_table_with_labels_from_its_closed_lists() -> None:
    """No record and no status can make a series that is not foreseen."""
    values = [value for record in every_record() for value in values_of(record)]
    for state in STATES:
        values += values_now(make_status(state=state, devices=[CARD]), 1)
    for value in values:
        lists = METRIC_BY_NAME[value.name].labels.values()
        assert len(value.labels) == len(lists)
        for one, some in zip(value.labels, lists, strict=True):
            assert not some or one in some, value
    assert {value.name for value in values} == {metric.name for metric in METRICS}


def test_values_now_of_devices_are_there_as_far_as_they_are_told() -> None:
    """In base units; a device that says nothing has no series, and no zero."""
    silent = DeviceSample(kind="npu", name="accel0", driver="amdxdna", power_state="suspended")
    values = list(values_now(make_status(devices=[CARD, silent]), 1))
    told = {value.name: value for value in values if value.name.startswith("onebitd_device_")}
    assert {name: (one.value, one.labels) for name, one in told.items()} == {
        "onebitd_device_busy_ratio": (0.87, ("card1", "gpu")),
        "onebitd_device_temperature_celsius": (61.5, ("card1", "gpu")),
        "onebitd_device_power_watts": (54.0, ("card1", "gpu")),
    }


def test_values_now_are_those_of_the_status() -> None:
    """Each gauge, and the counters that others keep."""
    status = make_status(
        state="degraded",
        backend=BackendStatus(4243, "ready", 3, None, "b10434", ["CPU"], 1000),
        provider=ProviderStatus("/p", "stuck", "half_open", 5, None, route_off="no use"),
        slot=SlotStatus(True, "decode", "r1", 0.1),
        audit=AuditStatus(audited=9, drifted=2, given_up=1, strikes=4),
    )
    values = list(values_now(status, 7))
    for name, states, current in (
        ("onebitd_state", STATES, "degraded"),
        ("onebitd_provider_state", PROVIDER_STATES, "stuck"),
        ("onebitd_provider_breaker_state", tuple(State), "half_open"),
    ):
        assert of(name, values) == {(state,): int(state == current) for state in states}
    assert of("onebitd_build_info", values) == {("0.1.0", "b10434"): 1}
    assert of("onebitd_audits_total", values) == {("passed",): 7, ("drifted",): 2, ("given_up",): 1}
    alone = {value.name: value.value for value in values if not value.labels}
    assert alone == {
        "onebitd_provider_consecutive_failures": 5,
        "onebitd_provider_route_off": 1,
        "onebitd_audit_strikes": 4,
        "onebitd_decoder_restarts_total": 3,
        "onebitd_decoder_resident_memory_bytes": 1000,
        "onebitd_slot_busy": 1,
        "onebitd_queue_requests": 0,
        "onebitd_queue_max_requests": 64,
        "onebitd_requests_in_flight": 7,
    }


def test_values_now_without_a_decoder_yet() -> None:
    """While the model loads there is no build and no memory; the series are there."""
    status = make_status(
        state="loading", backend=BackendStatus(None, "starting", 0, None, None, [], None)
    )
    values = list(values_now(status, 0))
    assert of("onebitd_build_info", values) == {("0.1.0", "unknown"): 1}
    assert of("onebitd_decoder_resident_memory_bytes", values) == {(): 0}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_metric_is_named_by_the_conventions(metric: Metric) -> None:
    """Counters end with _total and nothing else does; histograms with their unit, and ascend."""
    assert metric.name.startswith("onebitd_")
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    assert metric.doc.endswith(".")
    if metric.kind is Kind.HISTOGRAM:
        assert metric.name.endswith(("_seconds", "_bytes", "_tokens_per_second"))
        assert list(metric.buckets) == sorted(set(metric.buckets))
    else:
        assert not metric.buckets


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (None, Format.TEXT),
        ("", Format.TEXT),
        ("*/*", Format.TEXT),
        ("text/html,application/xhtml+xml,*/*;q=0.8", Format.TEXT),
        ("application/openmetrics-text", Format.OPENMETRICS),
        ("Application/OpenMetrics-Text; Version=1.0.0", Format.OPENMETRICS),
        ('application/openmetrics-text; version="0.0.1"', Format.OPENMETRICS),
        ("application/openmetrics-text; version=2.0.0", Format.TEXT),
        ("application/openmetrics-text;q=0", Format.TEXT),
        ("application/openmetrics-text;q=nan", Format.TEXT),
        ("application/openmetrics-text;q=x, text/plain", Format.TEXT),
        ("application/openmetrics-text, text/plain", Format.OPENMETRICS),
        ("application/openmetrics-text;q=0.2,text/plain;version=0.0.4;q=0.5", Format.TEXT),
        (
            "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1"
            ";q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            Format.OPENMETRICS,
        ),
        (
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
            "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;"
            "escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
            Format.OPENMETRICS,
        ),
        (";;=,,q=", Format.TEXT),
    ],
)
def test_format_for_an_accept_header(accept: str | None, wanted: Format) -> None:
    """What Prometheus sends gets OpenMetrics, what a browser or curl sends gets text."""
    assert format_for(accept) is wanted
