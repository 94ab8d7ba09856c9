"""When a handoff pays: where it breaks even with the decoder, and how far off it is if never.

Pure arithmetic on a Forecast. Times are milliseconds, lengths are tokens of a prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final

from onebitd.core.forecast import SHORTEST, Expected, Forecast, fixed_part
from onebitd.core.handoff import Route

NEEDED_TOKENS: Final = 1000
"""The prompt for which it is said how fast the provider would have to be."""

_FIRST_LENGTH: Final = 64
_SCAN_POINTS: Final = 96


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """Where a route beats the decoder.

    Args:
        route: of the handoff.
        wins: the first and last prompt length of each stretch where it does, in order.
        last: the longest prompt that was looked at.
        best_tokens: the length at which it does best.
        best_factor: the decoder's time over the route's there; below 1 it always loses.
        last_factor: the same for the longest prompt.
    """

    route: Route
    wins: tuple[tuple[int, int], ...]
    last: int
    best_tokens: int
    best_factor: float
    last_factor: float

    @property
    def always(self) -> bool:
        """Say whether it wins at every length."""
        return self.wins == ((SHORTEST, self.last),)


@dataclasses.dataclass(frozen=True, slots=True)
class Needed:
    """How fast the provider must become to break even with one prompt.

    Args:
        route: of the handoff.
        tokens: of the prompt.
        run_ms: what its run takes now.
        limit_ms: what it may take; 0 or less when the rest alone takes longer than the decoder.
        fixed_ms: the part of the run that no faster engine makes shorter.
        ms_per_token: its rate now, the fixed part aside.
        limit_ms_per_token: the rate at which it breaks even, None when no rate does.
    """

    route: Route
    tokens: int
    run_ms: float
    limit_ms: float
    fixed_ms: float
    ms_per_token: float
    limit_ms_per_token: float | None

    @property
    def excess_ms(self) -> float:
        """How much too long the run is."""
        return self.run_ms - self.limit_ms


@dataclasses.dataclass(frozen=True, slots=True)
class Overlap:
    """A prompt that comes while the decoder still generates for somebody else; file route only.

    Args:
        table: first bytes from the moment on at which the slot is free.
        hidden_ms: for each row, how long the other reply must still take to hide the whole run.
        verdict: where the file route then wins.
        reply_tokens: tokens of a typical reply, None when that is not known.
        reply_ms: the time it takes.
        reply_hides_tokens: the longest prompt whose run a typical reply hides; 0 for none.
    """

    table: tuple[Expected, ...]
    hidden_ms: tuple[float, ...]
    verdict: Verdict
    reply_tokens: float | None
    reply_ms: float | None
    reply_hides_tokens: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Advice:
    """All of it: the table, a verdict for each known route, the overlap, and what is needed.

    `needed` is about the route that comes closest, and None when one wins at `NEEDED_TOKENS`.
    """

    last: int
    table: tuple[Expected, ...]
    verdicts: tuple[Verdict, ...]
    overlap: Overlap | None
    needed: Needed | None


def advise(forecast: Forecast, lengths: Sequence[int], last: int) -> Advice:
    """Work out the advice; nothing may be missing from the forecast.

    Args:
        forecast: knows the decoder and at least one route.
        lengths: of the table's rows.
        last: the longest prompt that the context takes.
    """
    routes = forecast.routes()
    verdicts = tuple(judge(route, forecast.first_byte, last) for route in routes)
    wanted = [needed(forecast, route, min(NEEDED_TOKENS, last)) for route in routes]
    losing = [found for found in wanted if found is not None]
    return Advice(
        last,
        tuple(map(forecast.first_byte, lengths)),
        verdicts,
        _overlap(forecast, lengths, last) if Route.FILE in routes else None,
        # No route wins there: the closest one is told.
        min(losing, key=lambda found: found.excess_ms) if len(losing) == len(routes) else None,
    )


def judge(route: Route, expected: Callable[[int], Expected], last: int) -> Verdict:
    """Find where a route beats the decoder, from the shortest prompt to one of `last` tokens.

    Args:
        route: known to `expected`, as is the decoder.
        expected: `Forecast.first_byte` or `Forecast.behind_reply`.
        last: at least SHORTEST.
    """

    def factor(tokens: int) -> float:
        found = expected(tokens)
        decoder_ms, handed_ms = found.decoder_ms, found.by(route)
        if decoder_ms is None or handed_ms is None:
            raise ValueError(f"the costs of the decoder or of the {route} route are not known")
        return decoder_ms / max(handed_ms, 1e-9)

    points = _scan(last)
    factors = [factor(point) for point in points]
    best = max(range(len(points)), key=factors.__getitem__)
    wins: list[tuple[int, int]] = []
    start = SHORTEST if factors[0] > 1.0 else None
    for before, after, was, now in zip(points, points[1:], factors, factors[1:], strict=False):
        if (was > 1.0) is (now > 1.0):
            continue
        change = _first_like(lambda n: factor(n) > 1.0, before, after)
        if start is None:
            start = change
        else:
            wins.append((start, change - 1))
            start = None
    if start is not None:
        wins.append((start, last))
    return Verdict(route, tuple(wins), last, points[best], factors[best], factors[-1])


def needed(forecast: Forecast, route: Route, tokens: int) -> Needed | None:
    """Return how fast the provider must become at a prompt length; None where it wins already."""
    expected = forecast.first_byte(tokens)
    decoder_ms, handed_ms = expected.decoder_ms, expected.by(route)
    run_ms = forecast.run_ms(route, tokens - 1)
    if decoder_ms is None or handed_ms is None or run_ms is None or handed_ms < decoder_ms:
        return None
    fixed = min(fixed_part(lambda n: forecast.run_ms(route, n)) or 0.0, run_ms)
    limit = decoder_ms - (handed_ms - run_ms)
    rate = (limit - fixed) / (tokens - 1)
    return Needed(
        *(route, tokens, run_ms, limit, fixed, (run_ms - fixed) / (tokens - 1)),
        rate if rate > 0 else None,
    )


def table_lengths(ctx_size: int) -> list[int]:
    """Return prompt lengths for a table: doubled from 64 on, and the longest that fits.

    >>> table_lengths(400)
    [64, 128, 256, 399]
    """
    lengths = []
    length = _FIRST_LENGTH
    while length < ctx_size - 1:
        lengths.append(length)
        length *= 2
    return [*lengths, max(ctx_size - 1, SHORTEST)]


def _overlap(forecast: Forecast, lengths: Sequence[int], last: int) -> Overlap:
    reply = forecast.typical_reply()
    hides = None
    if reply is not None:
        hides = _longest(lambda n: (forecast.hidden_ms(n) or 0.0) <= reply[1], last)
    return Overlap(
        tuple(map(forecast.behind_reply, lengths)),
        tuple(forecast.hidden_ms(tokens) or 0.0 for tokens in lengths),
        judge(Route.FILE, forecast.behind_reply, last),
        None if reply is None else reply[0],
        None if reply is None else reply[1],
        hides,
    )


def _longest(fits: Callable[[int], bool], last: int) -> int:
    """Return the longest prompt that fits, 0 when the shortest does not; longer takes longer."""
    if not fits(SHORTEST):
        return 0
    return last if fits(last) else _first_like(fits, SHORTEST, last) - 1


def _scan(last: int) -> Sequence[int]:
    """Return lengths from the shortest to the last, closer together at the start."""
    ratio = last / SHORTEST
    steps = _SCAN_POINTS - 1
    return sorted({round(SHORTEST * ratio ** (step / steps)) for step in range(_SCAN_POINTS)})


def _first_like(test: Callable[[int], bool], before: int, after: int) -> int:
    """Return the first length that tests as `after` does, which `before` does not."""
    wanted = test(after)
    while after - before > 1:
        middle = (before + after) // 2
        if test(middle) is wanted:
            after = middle
        else:
            before = middle
    return after
