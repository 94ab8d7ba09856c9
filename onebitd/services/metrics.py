"""The metrics of one daemon: counted as its handoffs end, and read from its status when asked."""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from onebitd.adapters.exposition import Distribution, Exposition, Family
from onebitd.core.control_api import Status
from onebitd.core.exposition_format import Format, format_for
from onebitd.core.handoff import HandoffRecord
from onebitd.core.metric_values import Value, values_now, values_of
from onebitd.core.metrics import METRIC_BY_NAME, METRICS, Kind, Metric

KEPT_S: Final = 0.2


class Metrics:
    """Counts records, and answers a scrape.

    Args:
        status: returns the daemon's status as of now; it does not wait.
        in_flight: returns how many requests are being served.
    """

    def __init__(self, status: Callable[[], Status], in_flight: Callable[[], int]) -> None:
        self._status = status
        self._in_flight = in_flight
        self._tally = _Tally(METRICS)
        self._exposition = Exposition(self._families)

    def count(self, record: HandoffRecord) -> None:
        """Count a finished record; for `History.listen`. Neither waits nor raises."""
        self._tally.take(values_of(record))

    def exposition(self, accept: str | None) -> tuple[str, bytes]:
        """Return content type and body of what a scraper gets.

        Args:
            accept: its Accept header.
        """
        wanted = format_for(accept)
        return wanted.value, self._exposition.text(wanted)

    def _families(self) -> Iterator[Family]:
        now = _Tally(())
        now.take(values_now(self._status(), self._in_flight()))
        for metric in METRICS:
            yield Family(
                metric,
                self._tally.numbers.get(metric.name, {}) | now.numbers.get(metric.name, {}),
                self._tally.distributions.get(metric.name, {}),
            )


class Sparing:
    """Makes no exposition so soon after another: for a listener that asks nobody who they are.

    One takes milliseconds of the event loop, which is that of every reply.

    Args:
        exposition: makes one.
        now: a clock, in seconds.
    """

    def __init__(
        self,
        exposition: Callable[[str | None], tuple[str, bytes]],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = exposition
        self._now = now
        self._made: dict[Format, tuple[float, tuple[str, bytes]]] = {}

    def exposition(self, accept: str | None) -> tuple[str, bytes]:
        """Return content type and body, at most `KEPT_S` old."""
        wanted, now = format_for(accept), self._now()
        made_at, made = self._made.get(wanted, (-math.inf, ("", b"")))
        if now - made_at >= KEPT_S:
            made = self._make(accept)
            self._made[wanted] = (now, made)
        return made


class _Tally:
    """Sums by metric and labels; every counter and histogram of these metrics is there."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self.numbers: dict[str, dict[tuple[str, ...], float]] = {}
        self.distributions: dict[str, dict[tuple[str, ...], Distribution]] = {}
        for metric in metrics:
            for labels in metric.all_labels():
                if metric.kind is Kind.HISTOGRAM:
                    self._distribution(metric, labels)
                elif metric.kind is Kind.COUNTER:
                    self.numbers.setdefault(metric.name, {})[labels] = 0.0

    def _distribution(self, metric: Metric, labels: tuple[str, ...]) -> Distribution:
        of_metric = self.distributions.setdefault(metric.name, {})
        found = of_metric.get(labels)
        if found is None:
            found = of_metric[labels] = Distribution([0] * (len(metric.buckets) + 1))
        return found

    def take(self, values: Iterable[Value]) -> None:
        """Add values to counters and gauges, and observe those of histograms."""
        for value in values:
            metric = METRIC_BY_NAME[value.name]
            if metric.kind is Kind.HISTOGRAM:
                found = self._distribution(metric, value.labels)
                found.counts[bisect.bisect_left(metric.buckets, value.value)] += 1
                found.total += value.value
            else:
                series = self.numbers.setdefault(metric.name, {})
                series[value.labels] = series.get(value.labels, 0.0) + value.value
