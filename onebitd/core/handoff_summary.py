"""What many handoffs have in common: counts, and how long each part took.

Pure: an iterable of records goes in, a plain dict comes out, the body of
`GET /v1/handoffs/summary` and what `onebitctl handoffs --summary --json` prints.
"""

from __future__ import annotations

import array
import collections
import math
import struct
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from onebitd.core.handoff import Outcome, Reason, decode_speed, prefill_speed

PARTS: Final = (
    *("queue_ms", "template_ms", "tokenize_ms", "lock_ms", "prefill_ms", "provider_wall_ms"),
    *("check_ms", "restore_ms", "share_ms", "adopt_ms", "evaluated_ms", "first_byte_ms"),
    "total_ms",
)
"""The fields of a record whose times are summarised, in this order."""

TOKENS: Final = (
    *("prompt_tokens", "handed_tokens", "evaluated_tokens", "cached_tokens", "reply_tokens"),
)
"""The fields of a record that are added up, in this order."""

_ABSURD: Final = 1e300
_SORTED_AT_ONCE: Final = 4096
"""No other thread runs while a list is sorted: more would be felt in a reply that is streamed."""
_RATES: Final = ("prefill_tokens_per_s", "decode_tokens_per_s")


def summarise(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return counts, times and rates of records, read once and not kept.

    Args:
        records: fields of `HandoffRecord` in any order of time; what is absent or no number is
            left out of that figure alone. What has no outcome, such as `{"lost": N}`, is no record.

    Returns:
        Everything below is always there, a table without entries is empty:

            count           records
            first_time      RFC 3339 time of the oldest, None without any
            last_time       RFC 3339 time of the newest, None without any
            outcomes        {outcome: records}, in the order of `Outcome`, those that occur
            reasons         {reason: records}, the most frequent first
            repeats         records whose prompt_hash another record before them had
            tokens          {field: sum} of each of `TOKENS`
            rates           {"prefill_tokens_per_s": SPREAD, "decode_tokens_per_s": SPREAD}
            parts           {part: SPREAD} of all records
            by_outcome      {outcome: {"count", "reasons", "parts",
                                       "by_reason": {reason: {"count", "parts"}}}}

        A SPREAD is `{"count", "p50", "p95"}`: so many records had the figure, and its percentiles
        in milliseconds (parts) or tokens a second (rates). A part that no record has is left out;
        so is a rate. Percentiles are by nearest rank: the p95 is the smallest measured value that
        at least 95 % of all do not exceed, never one between two. The rate of the prefill is of
        the provider's runs on 32 tokens or more, `handed_tokens` over `prefill_ms`.

    Memory: eight bytes for each time of each record, and the prompt hashes.
    """
    tally = _Tally()
    for record in records:
        if record.get("outcome") is not None:
            tally.add(record)
    return tally.summary()


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile of values in ascending order, at least one.

    It is the smallest of them that at least `percent` of all (0 to 100) do not exceed.
    """
    rank = math.ceil(len(ordered) * percent / 100)
    return ordered[max(rank, 1) - 1]


class _Leaf:
    """The records of one outcome and one reason."""

    def __init__(self) -> None:
        self.count = 0
        self.times: dict[str, array.array[float]] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        self.count += 1
        for part in PARTS:
            value = _number(record.get(part))
            if value is None:
                continue
            if part not in self.times:
                self.times[part] = array.array("d")
            self.times[part].append(value)


class _Tally:
    """What was read so far."""

    def __init__(self) -> None:
        self._leaves: dict[tuple[str, str | None], _Leaf] = {}
        self._first: str | None = None
        self._last: str | None = None
        self._tokens = dict.fromkeys(TOKENS, 0)
        self._rates = {name: array.array("d") for name in _RATES}
        self._hashes: set[str] = set()
        self._repeats = 0

    def add(self, record: Mapping[str, Any]) -> None:
        reason = record.get("reason")
        key = (str(record["outcome"]), None if reason is None else str(reason))
        if key not in self._leaves:
            self._leaves[key] = _Leaf()
        self._leaves[key].add(record)
        self._note_time(record.get("time"))
        for field in TOKENS:
            self._tokens[field] += int(_number(record.get(field)) or 0)
        for name, rate in zip(_RATES, _rates_of(record), strict=True):
            if rate is not None:
                self._rates[name].append(rate)
        prompt_hash = record.get("prompt_hash")
        if isinstance(prompt_hash, str):
            self._repeats += prompt_hash in self._hashes
            self._hashes.add(prompt_hash)

    def summary(self) -> dict[str, Any]:
        leaves = self._leaves
        by_outcome = {name: _of_outcome(leaves, name) for name in _outcomes(leaves)}
        return {
            "count": sum(leaf.count for leaf in leaves.values()),
            "first_time": self._first,
            "last_time": self._last,
            "outcomes": {name: found["count"] for name, found in by_outcome.items()},
            "reasons": _reasons(leaves, None),
            "repeats": self._repeats,
            "tokens": self._tokens,
            "rates": {name: _spread(values) for name, values in self._rates.items() if values},
            "parts": _parts(leaves.values()),
            "by_outcome": by_outcome,
        }

    def _note_time(self, time: object) -> None:
        """Keep the oldest and the newest; all are UTC of one length, and sort as text."""
        if isinstance(time, str):
            self._first = time if self._first is None else min(self._first, time)
            self._last = time if self._last is None else max(self._last, time)


def _of_outcome(leaves: Mapping[tuple[str, str | None], _Leaf], outcome: str) -> dict[str, Any]:
    mine = {reason: leaf for (name, reason), leaf in leaves.items() if name == outcome}
    reasons = _reasons(leaves, outcome)
    return {
        "count": sum(leaf.count for leaf in mine.values()),
        "reasons": reasons,
        "parts": _parts(mine.values()),
        "by_reason": {
            reason: {"count": mine[reason].count, "parts": _parts([mine[reason]])}
            for reason in reasons
        },
    }


def _outcomes(leaves: Iterable[tuple[str, str | None]]) -> list[str]:
    """Return the outcomes that occur in the order of the table, then those of other versions."""
    found = {outcome for outcome, _ in leaves}
    known = [outcome.value for outcome in Outcome if outcome in found]
    return [*known, *sorted(found.difference(known))]


def _reasons(leaves: Mapping[tuple[str, str | None], _Leaf], outcome: str | None) -> dict[str, int]:
    """Return {reason: records} of one outcome, or of all; the most frequent first."""
    counted = _counts(leaves, outcome)
    places = {reason.value: place for place, reason in enumerate(Reason)}
    named = [reason for reason in counted if reason is not None]
    named.sort(key=lambda reason: (-counted[reason], places.get(reason, len(places)), reason))
    return {reason: counted[reason] for reason in named}


def _counts(
    leaves: Mapping[tuple[str, str | None], _Leaf], outcome: str | None
) -> collections.Counter[str | None]:
    counted: collections.Counter[str | None] = collections.Counter()
    for (name, reason), leaf in leaves.items():
        if outcome in (None, name):
            counted[reason] += leaf.count
    return counted


def _parts(leaves: Iterable[_Leaf]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    some = list(leaves)
    for part in PARTS:
        values: array.array[float] = array.array("d")
        for leaf in some:
            values.extend(leaf.times.get(part, ()))
        if values:
            found[part] = _spread(values)
    return found


def _spread(values: array.array[float]) -> dict[str, Any]:
    starts = range(0, len(values), _SORTED_AT_ONCE)
    # Arrays: to free as many floats takes as long as a sort.
    runs = [array.array("d", sorted(values[at : at + _SORTED_AT_ONCE])) for at in starts]
    return {
        "count": len(values),
        "p50": round(_percentile_of_runs(runs, 50), 3),
        "p95": round(_percentile_of_runs(runs, 95), 3),
    }


def _percentile_of_runs(runs: Sequence[Sequence[float]], percent: float) -> float:
    """Return what `percentile` would of all values; each run is sorted, none is negative."""
    if len(runs) == 1:
        return percentile(runs[0], percent)
    rank = max(math.ceil(sum(map(len, runs)) * percent / 100), 1)
    # The bits of floats that are not negative are in the order of the floats.
    low, high = 0, _bits_of(max(run[-1] for run in runs))
    while low < high:
        middle = (low + high) // 2
        value = _float_of(middle)
        if sum(bisect_right(run, value) for run in runs) >= rank:
            high = middle
        else:
            low = middle + 1
    return _float_of(low)


def _bits_of(value: float) -> int:
    return int.from_bytes(struct.pack(">d", value), "big")


def _float_of(bits: int) -> float:
    (value,) = struct.unpack(">d", bits.to_bytes(8, "big"))
    return float(value)


def _rates_of(record: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Return the tokens a second of the provider's prefill and of the decoder's reply."""
    handed, prefill_ms = _number(record.get("handed_tokens")), _number(record.get("prefill_ms"))
    prefill = prefill_speed(handed, prefill_ms)
    decode = decode_speed(_number(record.get("reply_tokens")), _number(record.get("decode_ms")))
    return (prefill if prefill is not None and prefill < _ABSURD else None), decode


def _number(value: object) -> float | None:
    """Return a number that can be counted with, or None; records may be of another version."""
    if type(value) is not float and type(value) is not int:  # a bool is no number
        return None
    return value if 0 <= value < _ABSURD else None  # neither is nan
