"""The metrics of one daemon, as a scraper reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import prometheus_client
import pytest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from onebitd.core.handoff import Outcome, Reason, Route
from onebitd.core.metrics import METRICS, Kind
from onebitd.services.history import History
from onebitd.services.metrics import KEPT_S, Metrics, Sparing
from tests.surfaces.control_server import make_record, make_status

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def new() -> Metrics:
    """Return the metrics of a daemon with nothing wrong."""
    return Metrics(make_status, lambda: 2)


def families(metrics: Metrics, accept: str | None = None) -> list[Family]:
    """Scrape and read."""
    content_type, body = metrics.exposition(accept)
    assert content_type.startswith("application/openmetrics" if accept else "text/plain")
    read: Any = read_openmetrics if accept else read_text
    return list(read(body.decode()))


def samples(found: Iterable[Family]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return value by name and labels; no series twice."""
    listed = [
        ((sample.name, frozenset(sample.labels.items())), sample.value)
        for family in found
        for sample in family.samples
    ]
    assert len(dict(listed)) == len(listed)
    return dict(listed)


def value_of(metrics: Metrics, name: str, **labels: str) -> float | None:
    """Return the value of one series, None when it is not there."""
    return samples(families(metrics)).get((name, frozenset(labels.items())))


@pytest.mark.parametrize("accept", [None, OPENMETRICS])
def test_exposition_has_each_metric_with_its_type(accept: str | None) -> None:
    """From the start on, in the table's order, and none that the table does not have."""
    found = families(new(), accept)
    ours = [family for family in found if family.name.startswith("onebitd_")]
    kinds = {"info": "gauge"}
    told = [(family.name, kinds.get(family.type, family.type)) for family in ours]
    info = "_info" if accept is None else ""
    names = {"onebitd_build_info": f"onebitd_build{info}"}
    assert told == [
        (names.get(metric.name, metric.name.removesuffix("_total")), metric.kind)
        for metric in METRICS
    ]
    others = {family.name for family in found} - {family.name for family in ours}
    assert all(name.startswith("process_") for name in others)
    assert {"process_start_time_seconds", "process_resident_memory_bytes"} <= others


def test_exposition_says_the_same_in_both_formats() -> None:
    """Whoever scrapes, and however."""
    metrics = new()
    metrics.count(make_record(first_byte_ms=7.0, route=Route.FILE))
    text, openmetrics = families(metrics), families(metrics, OPENMETRICS)
    ours = [
        {key: value for key, value in samples(found).items() if key[0].startswith("onebitd_")}
        for found in (text, openmetrics)
    ]
    assert ours[0] == ours[1]
    assert len(ours[0]) > 200


def test_count_adds_up_by_outcome_reason_and_route() -> None:
    """What `History.add` gets is counted, once each."""
    metrics, history = new(), History()
    history.listen(metrics.count)
    for number in range(3):
        history.add(make_record(number, route=Route.FILE))
    history.add(make_record(3, Outcome.FALLBACK, reason=Reason.PROVIDER_EXIT, route=Route.SHARED))
    name = "onebitd_handoffs_total"
    assert value_of(metrics, name, outcome="used", reason="none", route="file") == 3
    assert value_of(metrics, name, outcome="fallback", reason="provider_exit", route="shared") == 1
    assert value_of(metrics, name, outcome="skipped", reason="policy", route="none") == 0


def test_count_puts_a_time_on_a_bound_into_the_bucket_that_ends_there() -> None:
    """Buckets are cumulative, `le` means less or equal, and the last one has everything."""
    metrics = new()
    for lock_ms in (1.0, 1.01, 2.5, 200_000.0):
        metrics.count(make_record(lock_ms=lock_ms))
    name = "onebitd_lock_wait_seconds"
    bounds = ("0.001", "0.0025", "0.005", "120.0", "+Inf")
    found = [value_of(metrics, f"{name}_bucket", le=bound) for bound in bounds]
    assert found == [1, 3, 3, 3, 4]
    assert value_of(metrics, f"{name}_count") == 4
    assert value_of(metrics, f"{name}_sum") == pytest.approx(200.00451)


def test_count_takes_an_ending_that_nobody_foresaw() -> None:
    """It is there late, and not lost."""
    metrics, name = new(), "onebitd_handoffs_total"
    odd = {"outcome": "used", "reason": "internal", "route": "none"}
    assert value_of(metrics, name, **odd) is None
    metrics.count(make_record(reason=Reason.INTERNAL))
    assert value_of(metrics, name, **odd) == 1


def test_counters_and_histograms_begin_at_zero() -> None:
    """Prometheus sees no increase in the first value of a series: it has to be there before."""
    found = samples(families(new()))
    for metric in METRICS:
        if metric.kind is Kind.GAUGE:
            continue
        assert list(metric.all_labels())
        suffix = "_count" if metric.kind is Kind.HISTOGRAM else ""
        for labels in metric.all_labels():
            key = frozenset(zip(metric.labels, labels, strict=True))
            assert found[metric.name + suffix, key] == 0


def test_gauges_follow_the_status() -> None:
    """They are read when asked for, not when they change."""
    state, in_flight = "loading", 0
    metrics = Metrics(lambda: make_status(state=state), lambda: in_flight)
    assert value_of(metrics, "onebitd_state", state="loading") == 1
    state, in_flight = "ready", 5
    assert value_of(metrics, "onebitd_state", state="loading") == 0
    assert value_of(metrics, "onebitd_state", state="ready") == 1
    assert value_of(metrics, "onebitd_requests_in_flight") == 5


@pytest.mark.parametrize(
    ("build", "shown"),
    [('b1 "x"\\\n', 'b1 "x"\\\n'), ("b1\ud800", "b1?"), ("", "unknown")],
)
@pytest.mark.parametrize("accept", [None, OPENMETRICS])
def test_build_info_with_any_words_spoils_no_scrape(
    build: str, shown: str, accept: str | None
) -> None:
    """They are the decoder's: quotes, a line's end, half of a letter (which JSON can hold)."""
    status = make_status()
    status = dataclasses.replace(status, backend=dataclasses.replace(status.backend, build=build))
    found = families(Metrics(lambda: status, lambda: 0), accept)
    (info,) = (family for family in found if family.name.startswith("onebitd_build"))
    assert [sample.labels["llama_cpp"] for sample in info.samples] == [shown]


def test_metrics_of_two_daemons_do_not_meet() -> None:
    """Nothing is kept in the library's one registry for all."""
    before = {family.name for family in prometheus_client.REGISTRY.collect()}
    one, other = new(), new()
    one.count(make_record(reply_tokens=5))
    assert value_of(one, "onebitd_reply_tokens_total") == 5
    assert value_of(other, "onebitd_reply_tokens_total") == 0
    assert {family.name for family in prometheus_client.REGISTRY.collect()} == before


def test_exposition_holds_no_word_of_a_record_or_a_path() -> None:
    """No request id, prompt, program or model: whoever reaches the listener may read it."""
    metrics = new()
    record = make_record(detail="a secret prompt", provider="/opt/secret", path="/v1/secret")
    record.request_id = "secret-id"
    metrics.count(record)
    for accept in (None, OPENMETRICS):
        body = metrics.exposition(accept)[1].decode()
        assert "secret" not in body
        assert "/" not in body
        assert "qwen" not in body


def test_sparing_makes_one_for_all_who_ask_at_once_and_a_new_one_after() -> None:
    """Whoever floods the listener costs the loop no more than a few scrapes a second."""
    made: list[str | None] = []
    now = 100.0

    def make(accept: str | None) -> tuple[str, bytes]:
        made.append(accept)
        return "text", b"%d" % len(made)

    sparing = Sparing(make, lambda: now)
    assert [sparing.exposition(None)[1] for _ in range(5)] == [b"1"] * 5
    assert [sparing.exposition(OPENMETRICS)[1] for _ in range(5)] == [b"2"] * 5
    assert sparing.exposition("*/*")[1] == b"1"
    now += KEPT_S
    assert sparing.exposition(None)[1] == b"3"
    assert made == [None, OPENMETRICS, None]
