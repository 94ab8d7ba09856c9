"""The exposition formats of Prometheus, as prometheus-client writes them.

Its own counters and histograms are not used: they lock, add to every series one that says when it
began, and write to files where an environment variable says so. Here it turns sums that are there
already into text, from a registry of this daemon's own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric as LibraryMetric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from onebitd.core.exposition_format import Format
from onebitd.core.metrics import Kind, Metric

_INFO: Final = "_info"


@dataclasses.dataclass(slots=True)
class Distribution:
    """What a histogram has seen: how many in each bucket, the last without a bound; their sum."""

    counts: list[int]
    total: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """One metric with its series, by label values in the metric's order."""

    metric: Metric
    numbers: Mapping[tuple[str, ...], float]
    distributions: Mapping[tuple[str, ...], Distribution]


class Exposition(Collector):
    """Writes what a daemon says, with the metrics of its process that every exporter has.

    Args:
        families: called for each scrape.
    """

    def __init__(self, families: Callable[[], Iterable[Family]]) -> None:
        self._families = families
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self, wanted: Format) -> bytes:
        """Return the exposition as of now."""
        if wanted is Format.OPENMETRICS:
            return bytes(generate_openmetrics(self._registry))  # type: ignore[no-untyped-call]
        return generate_latest(self._registry)

    def collect(self) -> Iterator[LibraryMetric]:
        """Yield the families in the library's shape; it calls this."""
        return map(_in_librarys_shape, self._families())


def _in_librarys_shape(family: Family) -> LibraryMetric:
    """Return it; a label that is no text in UTF-8 would keep all the others from being told."""
    metric = family.metric
    names = list(metric.labels)
    if metric.name.endswith(_INFO):
        info = InfoMetricFamily(metric.name.removesuffix(_INFO), metric.doc)
        for values in family.numbers:
            info.add_metric([], dict(zip(names, map(_text, values), strict=True)))
        return info
    if metric.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(metric.name, metric.doc, labels=names)
        bounds = [*(str(bound) for bound in metric.buckets), "+Inf"]
        for labels, seen in family.distributions.items():
            below = zip(bounds, itertools.accumulate(seen.counts), strict=True)
            histogram.add_metric(labels, buckets=list(below), sum_value=seen.total)
        return histogram
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    found = kind(metric.name, metric.doc, labels=names)
    for labels, value in family.numbers.items():
        found.add_metric(labels, value)
    return found


def _text(label: str) -> str:
    return label.encode("utf-8", "replace").decode()
