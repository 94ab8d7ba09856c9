"""What was measured of a trace: choices, ratios, the tables, and whether the bars are met."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.bench import client
from tests.bench.measure import median, table
from tests.bench.seats import AGAIN, NEVER, SLOW, Seat
from tests.bench.traces import Trace

ORACLE_BAR = 1.05
NEVER_BAR = 1.02
Key = tuple[int, int]
"""A request: its unit, and its place in there."""


@dataclass
class Measured:
    """What was measured of one trace.

    Attributes:
        tried: every time to first byte by seat and request, the uncounted pass included.
        counted: those of the counted rounds.
        requests: the ids of `auto`'s counted requests, by pace.
        records: of `auto`'s requests, by id.
    """

    trace: Trace
    tried: dict[Seat, dict[Key, list[float]]] = field(default_factory=dict)
    counted: dict[Seat, dict[Key, list[float]]] = field(default_factory=dict)
    requests: dict[str, list[tuple[Key, str]]] = field(default_factory=dict)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    oddities: collections.Counter[str] = field(default_factory=collections.Counter)

    def note(self, seat: Seat, unit: int, seen: Sequence[client.Seen], *, counts: bool) -> None:
        """Keep the times of one unit."""
        for into in (self.tried, self.counted) if counts else (self.tried,):
            for place, one in enumerate(seen):
                times = into.setdefault(seat, {}).setdefault((unit, place), [])
                times.append(one.first_byte_ms)
        if counts and seat[0] == "auto":
            ids = self.requests.setdefault(seat[1], [])
            ids += [((unit, place), one.request_id) for place, one in enumerate(seen)]

    def best_ways(self, pace: str, unit: int) -> list[str]:
        """Return the oracle's choice for each request of a unit."""
        never, always = self.tried[NEVER], self.tried["always", pace]
        keys = [key for key in self.trace.keys if key[0] == unit]
        return ["never" if median(never[key]) <= median(always[key]) else "always" for key in keys]

    def medians(self, seat: Seat) -> list[float]:
        """Return the median of each request, in order."""
        # Always at the slow pace is not run again and again: it takes longest and decides nothing.
        times = self.counted.get(seat) or self.tried[seat]
        return [median(times[key]) for key in self.trace.keys]

    def by_choice(self, pace: str, *, least: bool = True) -> float:
        """Return what auto's choices take by the medians, over the least that any choices take.

        Args:
            pace: of the provider.
            least: False for over what never takes.
        """
        never, always = self.tried[NEVER], self.tried["always", pace]
        chosen = base = 0.0
        for key, id_ in self.requests[pace]:
            decoder_ms, provider_ms = median(never[key]), median(always[key])
            chosen += decoder_ms if self.way_of(id_) == "decoder" else provider_ms
            base += min(decoder_ms, provider_ms) if least else decoder_ms
        return chosen / base

    def raw(self) -> Iterator[dict[str, Any]]:
        """Yield all that was measured, for a JSON file."""
        for (policy, pace), times in self.tried.items():
            named = {f"{unit}.{place}": one for (unit, place), one in times.items()}
            yield {"trace": self.trace.name, "policy": policy, "pace": pace, "first_byte_ms": named}
        for pace, requests in self.requests.items():
            for (unit, place), id_ in requests:
                yield {"pace": pace, "request": f"{unit}.{place}", "record": self.records[id_]}

    def way_of(self, request_id: str) -> str:
        """Return which way an auto request really went."""
        record = self.records[request_id]
        return "provider" if record["outcome"] in ("used", "wasted") else "decoder"


def nearest_rank(values: Iterable[float], percent: float) -> float:
    """Return a percentile that is one of the values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def word_for(record: Mapping[str, Any]) -> str:
    """Return what became of a request, in a word or two."""
    reason = record.get("reason")
    word = record["outcome"] if reason is None else f"{record['outcome']} {reason}"
    return f"{word} (explored)" if record.get("explored") else word


def cell_row(found: Measured, pace: str) -> list[str]:
    """Return the table's row of one pace: ratios to the oracle."""
    oracle = found.medians(("oracle", pace))
    others = [found.medians(seat) for seat in (NEVER, ("always", pace), ("auto", pace))]
    row = [pace, f"{sum(oracle) / 1000:.2f}"]
    row += [f"{sum(one) / sum(oracle):.3f}" for one in others]
    row.append(f"{found.by_choice(pace):.3f}")
    for percent in (50, 95):
        base = nearest_rank(oracle, percent)
        row += [f"{nearest_rank(one, percent) / base:.2f}" for one in others]
    return row


HEAD = (
    *("provider", "oracle, s", "never", "always", "auto", "by choice"),
    *("p50 never", "always", "auto", "p95 never", "always", "auto"),
)


def noise_of(found: Measured) -> float:
    """Return the standard deviation of the ratio of two policies that choose the same.

    Never ran twice: what differs there from request to request is chance, and adds up by squares.
    """
    never, again = found.medians(NEVER), found.medians(AGAIN)
    squares = sum((b - a) ** 2 for a, b in zip(never, again, strict=True))
    return math.sqrt(squares) / sum(never)


def losses(found: Measured, pace: str, most: int = 3) -> list[str]:
    """Return what auto's worst choices were, by what the better way takes."""
    lines = []
    for key, id_ in found.requests[pace]:
        took = {
            "decoder": median(found.tried[NEVER][key]),
            "provider": median(found.tried["always", pace][key]),
        }
        way, record = found.way_of(id_), found.records[id_]
        lost = took[way] - min(took.values())
        if lost > 0:
            said = [
                f"{name} estimated {record[f'{name}_estimate_ms']:.0f}"
                for name in took
                if f"{name}_estimate_ms" in record
            ]
            lines.append(
                (
                    lost,
                    f"    {lost:.0f} ms: {record.get('prompt_tokens', '?')} tokens,"
                    f" {record.get('slot_tokens', '?')} in the slot: {word_for(record)};"
                    f" decoder {took['decoder']:.0f} ms, provider {took['provider']:.0f} ms;"
                    f" {', '.join(said) or 'nothing estimated'}",
                )
            )
    return [line for _, line in sorted(lines, reverse=True)[:most]]


def page(found: Measured, paces: Sequence[str]) -> str:
    """Return all that is printed of one trace."""
    trace = found.trace
    title = (
        f"{trace.name}: {len(trace.keys)} requests, {trace.prompt_tokens} prompt tokens;"
        f" time to first byte, ratios to the oracle's: sum, p50, p95"
    )
    lines = [table(title, HEAD, [cell_row(found, pace) for pace in paces])]
    twice = sum(found.medians(AGAIN)) / sum(found.medians(NEVER))
    lines.append(
        f"never again / never: {twice:.3f}; by chance a ratio is off by {noise_of(found):.3f}"
    )
    for pace in paces:
        words = collections.Counter(word_for(found.records[id_]) for _, id_ in found.requests[pace])
        did = ", ".join(f"{count} {word}" for word, count in words.most_common())
        lines.append(f"auto at {pace}: {did}")
        worst = losses(found, pace)
        lines += ["  worst choices, by the medians of both ways:", *worst] if worst else []
    lines += [f"not as told: {count} x {what}" for what, count in found.oddities.items()]
    return "\n".join(lines)


@dataclass(frozen=True)
class Bar:
    """One thing that must be so.

    Attributes:
        what: is judged.
        ratio: as measured.
        limit: of the ratio.
        by_choice: the same ratio without what chance did.
        noise: see noise_of.
    """

    what: str
    ratio: float
    limit: float
    by_choice: float
    noise: float

    @property
    def is_met(self) -> bool:
        """By what was measured."""
        return self.ratio <= self.limit

    def line(self) -> str:
        """Return a line for the reader."""
        word = "met   " if self.is_met else "MISSED"
        bar = f"{self.ratio:.3f}, at most {self.limit}"
        return f"{word} {self.what}: {bar} (by choice {self.by_choice:.3f}, noise {self.noise:.3f})"


def bars_of(found: Measured, paces: Sequence[str]) -> list[Bar]:
    """Judge one trace."""
    bars = []
    noise = noise_of(found)
    for pace in paces:
        auto, where = sum(found.medians(("auto", pace))), f"{found.trace.name}, {pace}: auto"
        oracle, never = sum(found.medians(("oracle", pace))), sum(found.medians(NEVER))
        ratio = auto / oracle
        bars.append(Bar(f"{where} / oracle", ratio, ORACLE_BAR, found.by_choice(pace), noise))
        if pace == SLOW:
            choice = found.by_choice(pace, least=False)
            bars.append(Bar(f"{where} / never", auto / never, NEVER_BAR, choice, noise))
    return bars
