"""The first byte to expect of a prompt: by the decoder alone, by state file, by the shared route.

From what a daemon has learned, with figures by hand in its place. Times are milliseconds; prompts
are counted with their last token, which the decoder always evaluates itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

from onebitd.core.costs import Costs
from onebitd.core.handoff import Route

SHORTEST: Final = 2
"""A prompt of one token has nothing to hand over."""

_MIB: Final = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """Figures given by hand; each takes the place of what was learned, None leaves it."""

    provider_ms_per_token: float | None = None
    provider_fixed_ms: float | None = None
    decoder_ms_per_token: float | None = None
    decoder_fixed_ms: float | None = None
    restore_ms_per_mib: float | None = None
    kib_per_token: float | None = None
    adopt_ms: float | None = None
    lock_ms: float | None = None

    def is_enough(self) -> bool:
        """Say whether nothing has to be known besides: both rates and one route's own work."""
        by_file = self.restore_ms_per_mib is not None and self.kib_per_token is not None
        rates = self.provider_ms_per_token is not None and self.decoder_ms_per_token is not None
        return rates and (by_file or self.adopt_ms is not None)

    def named(self) -> dict[str, float]:
        """Return those that were given, by name."""
        return {
            name: value for name, value in dataclasses.asdict(self).items() if value is not None
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """The first byte of one prompt by each way; None where that way's costs are not known."""

    tokens: int
    decoder_ms: float | None
    file_ms: float | None
    shared_ms: float | None

    def by(self, route: Route) -> float | None:
        """Return the first byte by a handoff's route."""
        return self.file_ms if route is Route.FILE else self.shared_ms

    def best_handoff(self) -> Route | None:
        """Return the faster of the routes that are known."""
        known = [(ms, route) for route in Route if (ms := self.by(route)) is not None]
        return min(known, key=lambda pair: pair[0])[1] if known else None

    def best(self) -> str | None:
        """Return `decoder`, `file` or `shared`; None unless it is known what the decoder takes."""
        route = self.best_handoff()
        if self.decoder_ms is None or route is None:
            return None
        handed_ms = self.by(route)
        assert handed_ms is not None  # noqa: S101 - a route that is best is known
        return str(route) if handed_ms < self.decoder_ms else "decoder"


class Forecast:
    """What a prompt is expected to take, from learned figures with given ones put over them.

    Args:
        costs: what was learned; empty when no daemon was asked.
        given: figures by hand.
    """

    def __init__(self, costs: Costs, given: Given) -> None:
        self._costs = costs
        self._given = given

    def first_byte(self, tokens: int) -> Expected:
        """Return what a prompt takes that finds the slot free."""
        front = self._costs.front_ms(tokens) or 0.0
        return Expected(
            tokens,
            _sum(front, self.decoder_ms(0, tokens)),
            _sum(front, self.lock_ms(), self.run_ms(Route.FILE, tokens - 1), self._end(tokens)),
            _sum(front, self._shared(tokens)),
        )

    def behind_reply(self, tokens: int) -> Expected:
        """Return what a prompt takes from the moment on at which somebody else's reply ends.

        That reply outlasts the provider's run (`hidden_ms`), of which nothing is left to wait for
        by state file. The shared route begins then: its provider writes into the slot itself.
        """
        known = self.run_ms(Route.FILE, tokens - 1) is not None
        return Expected(
            tokens,
            self.decoder_ms(0, tokens),
            self._end(tokens) if known else None,
            self._shared(tokens),
        )

    def hidden_ms(self, tokens: int) -> float | None:
        """Return how long the other reply must go on for all of the file route's run to hide."""
        return _sum(self.lock_ms(), self.run_ms(Route.FILE, tokens - 1, overlapped=True))

    def run_ms(self, route: Route, tokens: int, *, overlapped: bool = False) -> float | None:
        """Return the provider's run on so many tokens.

        A shared route that was never used, but whose adopting was given by hand, is taken to run
        as the file route does.
        """

        def learned(n: int) -> float | None:
            found = self._costs.provider_ms(route, n, overlapped=overlapped)
            if found is None and route is Route.SHARED and self._given.adopt_ms is not None:
                return self._costs.provider_ms(Route.FILE, n, overlapped=overlapped)
            return found

        given = self._given
        return _line(tokens, given.provider_fixed_ms, given.provider_ms_per_token, learned)

    def decoder_ms(self, cached: int, evaluated: int) -> float | None:
        """Return the decoder's evaluation of tokens on top of those that it holds."""

        def learned(n: int) -> float | None:
            return self._costs.decoder_ms(cached, n, overlapped=False)

        given = self._given
        return _line(evaluated, given.decoder_fixed_ms, given.decoder_ms_per_token, learned)

    def restore_ms(self, tokens: int) -> float | None:
        """Return the restore of a state file of so many tokens."""
        each = self.bytes_per_token()
        if each is None:
            return None
        if self._given.restore_ms_per_mib is not None:
            return self._given.restore_ms_per_mib * each * tokens / _MIB
        return self._costs.restore_ms(round(each * tokens))

    def bytes_per_token(self) -> float | None:
        """Return the size of a state file for each of its tokens."""
        if self._given.kib_per_token is not None:
            return self._given.kib_per_token * 1024
        return self._costs.bytes_per_token()

    def adopt_ms(self) -> float | None:
        """Return sharing and adopting, once for a handoff."""
        given = self._given.adopt_ms
        return self._costs.adopt_ms() if given is None else given

    def lock_ms(self) -> float:
        """Return the wait for the device lock; none where nothing is known of it."""
        given = self._given.lock_ms
        return self._costs.lock_ms() or 0.0 if given is None else given

    def typical_reply(self) -> tuple[float, float] | None:
        """Return tokens and time of a typical reply."""
        tokens = self._costs.reply_tokens()
        ms = None if tokens is None else self._costs.reply_ms(round(tokens))
        return None if tokens is None or ms is None else (tokens, ms)

    def routes(self) -> tuple[Route, ...]:
        """Return the routes whose costs are all known."""
        expected = self.first_byte(SHORTEST)
        return tuple(route for route in Route if expected.by(route) is not None)

    def missing(self) -> tuple[str, ...]:
        """Return what has to be learned or given before anything can be said; none if enough is.

        The words: `decoder`, `provider`, `restore`.
        """
        found = [] if self.decoder_ms(0, SHORTEST) is not None else ["decoder"]
        runs = [route for route in Route if self.run_ms(route, 1) is not None]
        if not runs:
            found.append("provider")
        elif not (Route.FILE in runs and self.restore_ms(1) is not None) and not (
            Route.SHARED in runs and self.adopt_ms() is not None
        ):
            found.append("restore")
        return tuple(found)

    def _end(self, tokens: int) -> float | None:
        """Return what follows a run that wrote a state file: the restore and one token."""
        return _sum(self.restore_ms(tokens - 1), self.decoder_ms(tokens - 1, 1))

    def _shared(self, tokens: int) -> float | None:
        """Return all of the shared route once the slot is free and the prompt tokenized."""
        run = self.run_ms(Route.SHARED, tokens - 1)
        return _sum(self.lock_ms(), run, self.adopt_ms(), self.decoder_ms(tokens - 1, 1))


def _line(
    tokens: int,
    fixed: float | None,
    per_token: float | None,
    learned: Callable[[int], float | None],
) -> float | None:
    """Return the time for tokens; a part that was not given is that of the learned curve."""
    if per_token is not None:
        base = fixed_part(learned) if fixed is None else fixed
        return (base or 0.0) + per_token * tokens
    ms = learned(tokens)
    if ms is None or fixed is None:
        return ms
    return max(ms - (fixed_part(learned) or 0.0), 0.0) + fixed


def fixed_part(curve: Callable[[int], float | None]) -> float | None:
    """Return the part of a curve that does not depend on the tokens."""
    one, two = curve(1), curve(2)
    return None if one is None or two is None else max(2 * one - two, 0.0)


def _sum(*parts: float | None) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None
