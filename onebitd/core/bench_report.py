"""What the runs of `onebitctl bench` show: medians with their spread, and where a route pays.

Pure statistics. Times are milliseconds, lengths are tokens of a prompt.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from onebitd.core.bench_plan import DECODER, Run
from onebitd.core.first_byte import parts_of
from onebitd.core.handoff import Outcome, decode_speed

BESIDE_OTHERS_MS: Final = 3.0
"""A request that waited longer for the slot was behind somebody else's."""

HOPELESS_RUNS: Final = 3
_COLUMNS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("lock", "provider"), "provider_ms"),
    "restore": "restore_ms",
    **dict.fromkeys(("queue", "tokens", "decoder"), "rest_ms"),
}
"""Where each part of a first byte is counted in the table."""


class Verdict(enum.StrEnum):
    """How a route does against the decoder at one length."""

    WINS = "wins"
    LOSES = "loses"
    UNCLEAR = "unclear"
    """The spread is larger than the difference, or one run alone shows no spread."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One run, and what the daemon recorded of it.

    Attributes:
        run: what was to be done.
        record: the fields of its handoff.
        seen_ms: from the client's sending to the first byte of the reply, by the client's clock.
        beside_others: other requests were served at the time.
    """

    run: Run
    record: Mapping[str, Any]
    seen_ms: float
    beside_others: bool

    @property
    def failure(self) -> str | None:
        """Why it is no figure for its way, a word and a sentence; None when it is one."""
        record, way = self.record, self.run.way
        if record.get("first_byte_ms") is None:
            return _why(record)
        outcome, route = record.get("outcome"), record.get("route")
        if way == DECODER:
            return None if outcome == Outcome.SKIPPED else _why(record)
        return None if outcome == Outcome.USED and route == way else _why(record)


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """Several values; the quartiles are between values where that is where they fall."""

    count: int
    median: float
    low: float
    """The first quartile: a quarter of the values is below."""
    high: float
    """The third quartile."""
    least: float
    most: float


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """What was measured of one way at one length.

    Attributes:
        tokens, name: the length, and `DECODER` or the route.
        first_byte: None when no run of it counts.
        provider_ms: median of the wait for the lock and the provider's run.
        restore_ms: median of the check and the restore, or of sharing and adopting.
        rest_ms: median of all else: the decoder's own evaluation, and onebitd's own work.
        decode_per_s: median of the tokens a second after the first byte.
    """

    tokens: int
    name: str
    first_byte: Spread | None
    provider_ms: float | None = None
    restore_ms: float | None = None
    rest_ms: float | None = None
    decode_per_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """A route beside the decoder at one length, both measured."""

    tokens: int
    decoder_ms: float
    route_ms: float
    verdict: Verdict

    @property
    def saved_ms(self) -> float:
        """How much sooner the route's first byte is; below 0 it is later."""
        return self.decoder_ms - self.route_ms


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
    """Where a route pays.

    Attributes:
        route: its name.
        pairs: the lengths at which both ways were measured, ascending.
        even_tokens: between lengths where it wins and such where it loses, the interpolated
            lengths at which both take the same time.
        beyond_tokens: of a route that loses at every length, the length at which it would break
            even if both went on as between the two longest ones; None if they do not meet.
    """

    route: str
    pairs: tuple[Pair, ...]
    even_tokens: tuple[int, ...]
    beyond_tokens: int | None

    @property
    def verdicts(self) -> set[Verdict]:
        """The verdicts that occur."""
        return {pair.verdict for pair in self.pairs}


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Runs of one way that are no figures, for one reason; `why` is what the first one said."""

    way: str
    why: str
    count: int
    lengths: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """All of it: each way at each length in the order of the plan, the routes, what failed.

    `beside_others` is how many of the runs that count were beside other requests.
    """

    ways: tuple[Way, ...]
    routes: tuple[Judged, ...]
    failures: tuple[Failure, ...]
    beside_others: int


def report(samples: Sequence[Sample], lengths: Sequence[int], ways: Sequence[str]) -> Report:
    """Work out the report; runs of round 0 count for nothing but their failures.

    Args:
        samples: in any order, of some lengths perhaps none yet.
        lengths, ways: of the plan; `DECODER` is one of the ways.
    """
    good = [one for one in samples if one.run.round > 0 and one.failure is None]
    found = [
        _way(tokens, name, [one for one in good if (one.run.tokens, one.run.way) == (tokens, name)])
        for tokens in lengths
        for name in ways
    ]
    return Report(
        tuple(found),
        tuple(judge(name, found) for name in ways if name != DECODER),
        _failures(samples, ways),
        sum(one.beside_others for one in good),
    )


def is_hopeless(way: str, samples: Iterable[Sample]) -> bool:
    """Say whether the first `HOPELESS_RUNS` of a way have all failed: more tell nothing new."""
    mine = [one.failure is not None for one in samples if one.run.way == way]
    return len(mine) >= HOPELESS_RUNS and all(mine)


def spread(values: Iterable[float]) -> Spread | None:
    """Return median and quartiles, None of no values.

    >>> spread([5, 1, 3, 2, 4])
    Spread(count=5, median=3, low=2.0, high=4.0, least=1, most=5)
    """
    ordered = sorted(values)
    if not ordered:
        return None
    low = high = ordered[0]
    if len(ordered) > 1:
        low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
    return Spread(len(ordered), statistics.median(ordered), low, high, ordered[0], ordered[-1])


def compare(decoder: Spread, route: Spread) -> Verdict:
    """Say which is sooner: a difference of medians counts when it is above either's middle half."""
    difference = decoder.median - route.median
    widest = max(decoder.high - decoder.low, route.high - route.low)
    if min(decoder.count, route.count) < 2 or abs(difference) <= widest:
        return Verdict.UNCLEAR
    return Verdict.WINS if difference > 0 else Verdict.LOSES


def judge(route: str, ways: Iterable[Way]) -> Judged:
    """Say where a route pays, of the ways that were measured."""
    found = {(way.tokens, way.name): way.first_byte for way in ways}
    pairs = []
    for tokens in sorted({tokens for tokens, _ in found}):
        decoder, other = found.get((tokens, DECODER)), found.get((tokens, route))
        if decoder is not None and other is not None:
            verdict = compare(decoder, other)
            pairs.append(Pair(tokens, decoder.median, other.median, verdict))
    beyond = None
    if len(pairs) > 1 and all(pair.verdict is Verdict.LOSES for pair in pairs):
        beyond = _meeting(pairs[-2], pairs[-1])
    return Judged(route, tuple(pairs), tuple(_changes(pairs)), beyond)


def _changes(pairs: Sequence[Pair]) -> list[int]:
    """Return where the medians cross between a length with one clear verdict and one with another.

    Lengths of no clear verdict between the two are points of the line, but end none.
    """
    clear = [at for at, pair in enumerate(pairs) if pair.verdict is not Verdict.UNCLEAR]
    found = []
    for start, end in itertools.pairwise(clear):
        if pairs[start].verdict is pairs[end].verdict:
            continue
        for before, after in itertools.pairwise(pairs[start : end + 1]):
            if (before.saved_ms > 0) is not (after.saved_ms > 0):
                crossing = _meeting(before, after)
                if crossing is not None:
                    found.append(crossing)
                    break
    return found


def _meeting(before: Pair, after: Pair) -> int | None:
    """Return where the line through two points of saved time is 0; None if it moves away."""
    slope = (after.saved_ms - before.saved_ms) / (after.tokens - before.tokens)
    if slope == 0 or (before.saved_ms < 0 and after.saved_ms < 0 and slope < 0):
        return None
    return round(after.tokens - after.saved_ms / slope)


def _way(tokens: int, name: str, samples: Sequence[Sample]) -> Way:
    columns: dict[str, list[float]] = {"provider_ms": [], "restore_ms": [], "rest_ms": []}
    rates = []
    for one in samples:
        sums: dict[str, float] = {}
        for part, ms in parts_of(one.record).items():
            sums[_COLUMNS[part]] = sums.get(_COLUMNS[part], 0.0) + ms
        for column, ms in sums.items():
            if ms > 0:
                columns[column].append(ms)
        rate = decode_speed(one.record.get("reply_tokens"), one.record.get("decode_ms"))
        if rate is not None:
            rates.append(rate)
    return Way(
        tokens,
        name,
        spread([float(one.record["first_byte_ms"]) for one in samples]),
        **{column: _median(values) for column, values in columns.items()},
        decode_per_s=_median(rates),
    )


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _failures(samples: Iterable[Sample], ways: Sequence[str]) -> tuple[Failure, ...]:
    """Return what failed, by way and by the first word of why; the first such sentence stands."""
    found: dict[tuple[str, str], list[Sample]] = {}
    for one in samples:
        if one.failure is not None:
            word = one.failure.partition(":")[0]
            found.setdefault((one.run.way, word), []).append(one)
    ordered = sorted(found.items(), key=lambda entry: ways.index(entry[0][0]))
    return tuple(
        Failure(
            way,
            some[0].failure or "",
            len(some),
            tuple(sorted({one.run.tokens for one in some})),
        )
        for (way, _), some in ordered
    )


def _why(record: Mapping[str, Any]) -> str:
    """Return outcome or reason with its detail, from a record that may be of another version."""
    word = record.get("reason") or record.get("outcome") or "no outcome"
    detail = record.get("detail")
    if record.get("outcome") == Outcome.WASTED:
        detail = f"the decoder evaluated {record.get('evaluated_tokens', '?')} tokens again"
        word = Outcome.WASTED.value
    elif record.get("outcome") == Outcome.USED:
        detail = f"it went by the {record.get('route', '?')} route"
    return f"{word}: {detail}" if detail else str(word)
