"""What the ways to a first token cost here, learned from every request.

Times are milliseconds; `now` is `time.time()` of whoever has measured. Estimates need no clock:
what is old counts less as soon as something newer is known, and is the best there is until then.

The document of `to_json`, version 1:

    provider       {file, shared}: rows of a length     of tokens
    restore        rows of a length                     of bytes
    decoder        rows of a length                     of evaluated tokens, at a depth
    decoder_one    rows of a length                     of depth + 1: one evaluated token
    front, reply   rows of a length                     of tokens
    adopt, lock    rows of a value                      milliseconds
    reply_tokens   rows of a value                      tokens
    reuse          rows of a value                      share, 0 to 1
    state          rows of a value                      bytes per token

A row of a length is [length, depth, ms, when, flags], flags the sum of 1 (overlapped), 2 (cold) and
4 (stopped: it takes longer than that); a row of a value is [value, weight]. Oldest first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from onebitd.core.cost_curve import Terms
from onebitd.core.cost_samples import COLD, OVERLAPPED, STOPPED, LearnedCost, Recent, Sample
from onebitd.core.handoff import Route

VERSION: Final = 1
LEAST_EVALUATED: Final = 16
"""A reply that evaluated fewer tokens says little about the decoder's rate."""
BUSY_PROVIDER: Final = 1.15
"""How much longer a run takes while the decoder generates, until it was seen here: a GPU at work
leaves the NPU 87 % of its bandwidth."""
MOST_TOKENS: Final = 1 << 31


class Costs:
    """Everything that was learned about one model on one decoder with one provider.

    Estimates are never negative, never fall with a length that grows, and are None when nothing is
    known. Figures that cannot be (negative, no number, no token) are ignored.
    """

    def __init__(self) -> None:
        self._provider = {route: _provider_cost() for route in Route}
        self._restore = LearnedCost(_straight)
        self._decoder = LearnedCost(_at_depth, most=48)
        self._decoder_one = LearnedCost(_straight, flat=True)
        self._front = LearnedCost(_straight)
        self._reply = LearnedCost(_straight)
        self._adopt = Recent()
        self._lock = Recent()
        self._reply_tokens = Recent()
        self._reuse = Recent()
        self._state = Recent()

    # What is learned

    def note_provider(
        self, route: Route, tokens: int, ms: float, *, overlapped: bool, cold: bool, now: float
    ) -> None:
        """Learn a whole run that ended well, without its wait for the lock.

        Args:
            route: its state file is checked in that time; on the shared route there is none.
            tokens: that were prefilled.
            ms: how long it took.
            overlapped: the decoder was generating for somebody else meanwhile.
            cold: the first run since the daemon started; counts until there is another.
            now: seconds.
        """
        flags = _flags(overlapped, COLD if cold else 0)
        self._provider[route].note(_tokens(tokens), ms, now, flags=flags)

    def note_provider_at_least(
        self, route: Route, tokens: int, ms: float, *, overlapped: bool, now: float
    ) -> None:
        """Learn that a run takes longer than `ms`: it was stopped then."""
        flags = _flags(overlapped, STOPPED)
        self._provider[route].note(_tokens(tokens), ms, now, flags=flags)

    def note_restore(self, n_bytes: int, ms: float, now: float) -> None:
        """Learn how long the restore of a state file took."""
        self._restore.note(n_bytes, ms, now)

    def note_adopt(self, ms: float) -> None:
        """Learn how long share and adopt took, together."""
        self._adopt.note(ms)

    def note_lock(self, ms: float) -> None:
        """Learn how long the device lock was waited for."""
        self._lock.note(ms)

    def note_decoder(
        self, cached: int, evaluated: int, ms: float, *, overlapped: bool, now: float
    ) -> None:
        """Learn from the decoder's own figures of one reply.

        Args:
            cached: tokens that it had already: the depth at which it began.
            evaluated: tokens that it evaluated on top of them.
            ms: how long that took.
            overlapped: a provider ran meanwhile.
            now: seconds.
        """
        flags = _flags(overlapped)
        if cached < 0:
            return
        if evaluated == 1:  # bound by memory, not by arithmetic: it says nothing about a prompt
            self._decoder_one.note(_tokens(cached) + 1, ms, now, flags=flags)
        else:
            self._decoder.note(_tokens(evaluated), ms, now, depth=_tokens(cached), flags=flags)

    def note_front(self, tokens: int, ms: float, now: float) -> None:
        """Learn how long template and tokenize took for a prompt of so many tokens."""
        self._front.note(_tokens(tokens), ms, now)

    def note_reply(self, tokens: int, ms: float, now: float) -> None:
        """Learn how many tokens were generated, and how long that took."""
        if tokens >= 1:
            self._reply_tokens.note(float(_tokens(tokens)))
            self._reply.note(_tokens(tokens), ms, now)

    def note_reuse(self, expected: int, actual: int) -> None:
        """Learn how many tokens the slot was believed to hold, and how many it really gave."""
        if expected >= 1 and actual >= 0:
            self._reuse.note(min(1.0, actual / expected), expected / (expected + 64))

    def note_state(self, tokens: int, n_bytes: int) -> None:
        """Learn the size of a state file."""
        if tokens >= 1 and n_bytes >= 1:
            self._state.note(n_bytes / tokens)

    def forget_provider(self) -> None:
        """Forget what runs cost: the provider is another one."""
        self._provider = {route: _provider_cost() for route in Route}

    # What is known

    def provider_ms(self, route: Route, tokens: int, *, overlapped: bool) -> float | None:
        """Return how long a run takes; where all were stopped, what they took at least."""
        return self._provider[route].estimate(_tokens(tokens), overlapped=overlapped)

    def restore_ms(self, n_bytes: int) -> float | None:
        """Return how long a restore of so many bytes takes."""
        return self._restore.estimate(n_bytes)

    def adopt_ms(self) -> float | None:
        """Return how long share and adopt take."""
        return self._adopt.middle()

    def lock_ms(self) -> float | None:
        """Return the wait for the device lock that is to be expected."""
        return self._lock.mean()

    def decoder_ms(self, cached: int, evaluated: int, *, overlapped: bool) -> float | None:
        """Return how long the decoder evaluates so many tokens on top of the cached ones.

        None for more than one as long as only single ones were seen: each used handoff shows one.
        """
        depth, evaluated = _tokens(cached), max(1, _tokens(evaluated))
        many = self._decoder.estimate(evaluated, depth, overlapped=overlapped)
        one = self._decoder_one.estimate(depth + 1, overlapped=overlapped)
        if evaluated == 1 and one is not None:
            return one
        if one is None:
            one = self._reply.estimate(1)  # a token that was generated was evaluated, too
        if many is None:
            return one if evaluated == 1 else None
        return many if one is None else max(many, one)

    def front_ms(self, tokens: int) -> float | None:
        """Return how long template and tokenize take."""
        return self._front.estimate(_tokens(tokens))

    def reply_tokens(self) -> float | None:
        """Return how long a reply usually is."""
        return self._reply_tokens.middle()

    def reply_ms(self, tokens: int) -> float | None:
        """Return how long it takes to generate so many tokens."""
        return self._reply.estimate(_tokens(tokens))

    def reuse_share(self) -> float:
        """Return which share of what the slot is believed to hold is really reused, 0 to 1."""
        found = self._reuse.mean()
        return 1.0 if found is None else min(1.0, found)

    def bytes_per_token(self) -> float | None:
        """Return the size of a state file for each token in it."""
        return self._state.middle()

    def provider_samples(self, route: Route) -> int:
        """Return how many runs that ended well are known; cold ones count if all are."""
        return len(self._provider[route].ended_well())

    def provider_tries(self, route: Route) -> int:
        """Return how many runs are known in all, cold and stopped ones too."""
        return len(self._provider[route])

    def decoder_samples(self) -> int:
        """Return how many replies are known that evaluated at least 16 tokens."""
        return len(self._decoder.ended_well(LEAST_EVALUATED))

    def provider_age_s(self, route: Route, now: float) -> float | None:
        """Return seconds since the newest of the runs that are counted."""
        return _age_s(self._provider[route].ended_well(), now)

    def decoder_age_s(self, now: float) -> float | None:
        """Return seconds since the newest of the replies that are counted."""
        return _age_s(self._decoder.ended_well(LEAST_EVALUATED), now)

    def refit(self) -> None:
        """Work out now what the next estimate would have to: some milliseconds."""
        for cost in (*self._provider.values(), *self._parts().values()):
            if isinstance(cost, LearnedCost):
                cost.estimate(1)

    # The file

    def to_json(self) -> dict[str, Any]:
        """Return everything that was learned, for `from_json`; at most some tens of KiB."""
        document: dict[str, Any] = {"version": VERSION}
        document["provider"] = {str(route): cost.rows() for route, cost in self._provider.items()}
        for name, part in self._parts().items():
            document[name] = part.rows()
        return document

    @classmethod
    def from_json(cls, document: object) -> Costs:
        """Return what `to_json` was called on.

        Raises:
            ValueError: the document is damaged, or of another version; a sentence says where.
        """
        costs = cls()
        if not isinstance(document, Mapping):
            raise ValueError("the learned costs are no object")
        if document.get("version") != VERSION:
            raise ValueError(f"the learned costs are not of version {VERSION}")
        provider = document.get("provider")
        if not isinstance(provider, Mapping):
            raise ValueError("provider: no object")
        for route, cost in costs._provider.items():
            _load(cost, provider, str(route), "provider.")
        for name, part in costs._parts().items():
            _load(part, document, name, "")
        return costs

    def _parts(self) -> dict[str, LearnedCost | Recent]:
        return {
            "restore": self._restore,
            "decoder": self._decoder,
            "decoder_one": self._decoder_one,
            "front": self._front,
            "reply": self._reply,
            "adopt": self._adopt,
            "lock": self._lock,
            "reply_tokens": self._reply_tokens,
            "reuse": self._reuse,
            "state": self._state,
        }


def _load(
    part: LearnedCost | Recent, document: Mapping[str, object], name: str, parent: str
) -> None:
    try:
        part.load(document.get(name))
    except ValueError as error:
        raise ValueError(f"{parent}{name}: {error}") from error


def _age_s(samples: Sequence[Sample], now: float) -> float | None:
    return max(0.0, now - max(s.when for s in samples)) if samples else None


def _tokens(count: int) -> int:
    return min(MOST_TOKENS, max(0, count))


def _flags(overlapped: bool, more: int = 0) -> int:
    return more | (OVERLAPPED if overlapped else 0)


def _provider_cost() -> LearnedCost:
    return LearnedCost(_bent, overlap=BUSY_PROVIDER, most=64)


def _straight(length: int, depth: int) -> Terms:
    return 1.0, float(length), 0.0


def _bent(length: int, depth: int) -> Terms:
    return 1.0, float(length), length * (length / 2)


def _at_depth(length: int, depth: int) -> Terms:
    return 1.0, float(length), length * (depth + length / 2)
