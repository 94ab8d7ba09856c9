"""What `GET /metrics` shows: one table of names, types, labels and buckets.

Names follow the conventions of Prometheus: base units, and the unit as the name's end. Every label
is from a closed list, or the name of a device, so that the number of series is bounded; "none"
stands for what does not apply, since a label that is empty is one that is absent. `onebitd(8)`, the
dashboard and the alert rules are held against this table. Values are made in `core.metric_values`.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterator, Mapping
from typing import Final

from onebitd.core.breaker import State
from onebitd.core.control_api import STATES
from onebitd.core.endings import possible_endings
from onebitd.core.handoff import Outcome, Reason, Route

NONE: Final = "none"

SOURCES: Final = ("provider", "decoder", "slot")
"""Where tokens of a prompt were computed; `slot`: the decoder had them from an earlier request."""
PROVIDER_STATES: Final = ("none", "idle", "running", "stuck")
AUDIT_RESULTS: Final = ("passed", "drifted", "given_up")
DEVICE_KINDS: Final = ("gpu", "npu", "cpu")

SECONDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)
REPLY_SECONDS: Final = (*SECONDS, 300.0, 600.0, 1800.0)
"""A reply of some thousand tokens takes minutes, and so does waiting for one to end."""
PREFILL_SPEEDS: Final = (
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0),
    *(1000.0, 2500.0, 5000.0, 10_000.0, 25_000.0),
)
DECODE_SPEEDS: Final = (
    *(1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 50.0, 75.0),
    *(100.0, 150.0, 200.0, 300.0, 500.0, 1000.0),
)
BYTES: Final = tuple(float(4**power) for power in range(8, 18))
"""64 KiB to 16 GiB."""


class Kind(enum.StrEnum):
    """The type of a metric, in the words of the exposition format."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """One row.

    All series of a counter or a histogram are there from the start, at zero: Prometheus sees no
    increase in the first value of one that was not there before, and what counts up in a burst, as
    failures do, would be missed.

    Attributes:
        name: in full, with `_total` where it is a counter.
        kind: its type.
        doc: the HELP line.
        labels: name to the closed list of its values, in the order of the values of a sample. An
            empty list: one value at a time, of the software itself; or one for each device.
        buckets: upper bounds of a histogram, without infinity.
        only: the label values that can come together, where not all can.
    """

    name: str
    kind: Kind
    doc: str
    labels: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    only: tuple[tuple[str, ...], ...] = ()

    def all_labels(self) -> Iterator[tuple[str, ...]]:
        """Yield the label values of every series that it can have."""
        yield from self.only or itertools.product(*self.labels.values())


def label(word: enum.StrEnum | None) -> str:
    """Return a word as a label value.

    >>> label(Route.FILE), label(None)
    ('file', 'none')
    """
    return NONE if word is None else word.value


_OUTCOME: Final = {"outcome": tuple(Outcome)}
_DEVICE: Final = {"device": (), "kind": DEVICE_KINDS}

METRICS: Final = (
    Metric(
        "onebitd_build_info",
        Kind.GAUGE,
        "Versions of onebitd and of the llama.cpp that decodes; always 1.",
        {"version": (), "llama_cpp": ()},
    ),
    Metric("onebitd_state", Kind.GAUGE, "1 for the daemon's own state.", {"state": STATES}),
    Metric(
        "onebitd_handoffs_total",
        Kind.COUNTER,
        "Requests on the handoff route that have ended.",
        {
            "outcome": tuple(Outcome),
            "reason": (NONE, *Reason),
            "route": (NONE, *Route),
        },
        only=tuple(tuple(map(label, ending)) for ending in possible_endings()),
    ),
    Metric(
        "onebitd_prompt_tokens_total",
        Kind.COUNTER,
        "Tokens of prompts, by where they were computed.",
        {"source": SOURCES},
    ),
    Metric("onebitd_reply_tokens_total", Kind.COUNTER, "Tokens that the decoder generated."),
    Metric(
        "onebitd_first_byte_seconds",
        Kind.HISTOGRAM,
        "From the whole request to the first byte of its reply.",
        _OUTCOME,
        SECONDS,
    ),
    Metric(
        "onebitd_request_seconds",
        Kind.HISTOGRAM,
        "From the whole request to the end of its reply.",
        _OUTCOME,
        REPLY_SECONDS,
    ),
    Metric(
        "onebitd_queue_wait_seconds",
        Kind.HISTOGRAM,
        "Waiting for a place in the line and for the slot.",
        buckets=REPLY_SECONDS,
    ),
    Metric(
        "onebitd_lock_wait_seconds",
        Kind.HISTOGRAM,
        "Waiting for the device lock.",
        buckets=SECONDS,
    ),
    Metric(
        "onebitd_provider_prefill_seconds",
        Kind.HISTOGRAM,
        "Prefill by the provider.",
        buckets=SECONDS,
    ),
    Metric(
        "onebitd_restore_seconds",
        Kind.HISTOGRAM,
        "The decoder reads a state file.",
        buckets=SECONDS,
    ),
    Metric(
        "onebitd_share_seconds",
        Kind.HISTOGRAM,
        "On the shared route: from asking the decoder for its memory to having it.",
        buckets=SECONDS,
    ),
    Metric(
        "onebitd_adopt_seconds",
        Kind.HISTOGRAM,
        "On the shared route: the decoder adopts what was written.",
        buckets=SECONDS,
    ),
    Metric(
        "onebitd_prefill_tokens_per_second",
        Kind.HISTOGRAM,
        "Speed of prefills of 32 tokens or more, by who computed them.",
        {"source": ("provider", "decoder")},
        PREFILL_SPEEDS,
    ),
    Metric(
        "onebitd_decode_tokens_per_second",
        Kind.HISTOGRAM,
        "Speed at which replies of two tokens or more were generated.",
        buckets=DECODE_SPEEDS,
    ),
    Metric("onebitd_state_bytes", Kind.HISTOGRAM, "Size of state files.", buckets=BYTES),
    Metric(
        "onebitd_provider_state",
        Kind.GAUGE,
        "1 for what the provider is doing; stuck: a run that cannot be ended.",
        {"state": PROVIDER_STATES},
    ),
    Metric(
        "onebitd_provider_breaker_state",
        Kind.GAUGE,
        "1 for the breaker's state; open: the provider is not called.",
        {"state": tuple(State)},
    ),
    Metric(
        "onebitd_provider_consecutive_failures",
        Kind.GAUGE,
        "Handoffs tried in vain since the last one that was used.",
    ),
    Metric(
        "onebitd_provider_route_off",
        Kind.GAUGE,
        "1 while nothing is handed over, as the decoder made no use of what was.",
    ),
    Metric(
        "onebitd_audits_total",
        Kind.COUNTER,
        "Handoffs chosen for an audit, by what came of it.",
        {"result": AUDIT_RESULTS},
    ),
    Metric(
        "onebitd_audit_strikes",
        Kind.GAUGE,
        "Audits that found drift since the last reset of the provider.",
    ),
    Metric("onebitd_decoder_restarts_total", Kind.COUNTER, "Restarts of the decoder."),
    Metric(
        "onebitd_decoder_resident_memory_bytes",
        Kind.GAUGE,
        "Resident memory of the decoder; 0 while there is none.",
    ),
    Metric("onebitd_slot_busy", Kind.GAUGE, "1 while the decoder's slot is in use."),
    Metric("onebitd_queue_requests", Kind.GAUGE, "Requests that wait for the slot."),
    Metric("onebitd_queue_max_requests", Kind.GAUGE, "How many may wait (http.max_pending)."),
    Metric(
        "onebitd_requests_in_flight", Kind.GAUGE, "Requests that are being served, of any kind."
    ),
    Metric(
        "onebitd_device_busy_ratio",
        Kind.GAUGE,
        "Busy share of a GPU or NPU, 0 to 1; only while requests on the handoff route run.",
        _DEVICE,
    ),
    Metric(
        "onebitd_device_temperature_celsius",
        Kind.GAUGE,
        "Hottest sensor of a GPU, NPU or processor; only while such requests run.",
        _DEVICE,
    ),
    Metric(
        "onebitd_device_power_watts",
        Kind.GAUGE,
        "Power of a GPU, or of its whole package; only while such requests run.",
        _DEVICE,
    ),
)

METRIC_BY_NAME: Final[Mapping[str, Metric]] = {metric.name: metric for metric in METRICS}
