"""What `onebitctl bench` runs, in which order, and the words its prompts are made of.

Pure: chance comes in as an argument.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Final

DECODER: Final = "decoder"
"""The way without a handoff; the others are called as their route."""

_ONSET_WORDS: Final = "b br d f g gr k kl l m n p pl r s st t tr v z"
_ONSETS: Final = tuple(_ONSET_WORDS.split())
_VOWELS: Final = ("a", "e", "i", "o", "u", "ai", "ei", "ou")
_CODAS: Final = ("", "", "n", "r", "l", "s", "m", "k")


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One request to be timed.

    Attributes:
        tokens: of its prompt.
        way: `DECODER`, or the route of its handoff.
        round: 0 for the one that warms up and does not count.
    """

    tokens: int
    way: str
    round: int


def schedule(lengths: Sequence[int], ways: Sequence[str], repeat: int) -> Iterator[Run]:
    """Yield the runs in their order, `repeat + 1` of each way at each length.

    Every round has each length and each way once, so that a box that grows warm, or is busier for
    a while, does so for all of them; the ways of a length follow each other closely, and each
    round has them the other way round, so that none is always the first.

    >>> [(run.way, run.round) for run in schedule([64], ["decoder", "file"], 1)]
    [('decoder', 0), ('file', 0), ('file', 1), ('decoder', 1)]
    """
    for number in range(repeat + 1):
        ordered = ways if number % 2 == 0 else ways[::-1]
        yield from (Run(tokens, way, number) for tokens in lengths for way in ordered)


def nonsense(words: int, chance: random.Random) -> str:
    """Return so many made-up words: no prompt that anybody sent, and none of the last ones."""
    return " ".join(_word(chance) for _ in range(words))


def exact_ids(
    tokens: int, chance: random.Random, tokenize: Callable[[str], list[int]]
) -> list[int]:
    """Return the ids of a prompt of exactly so many tokens.

    Args:
        tokens: at least 1.
        chance: goes on with each call, so that no two prompts have more than a few first tokens
            in common.
        tokenize: the decoder's own, with the special tokens at the start.
    """
    words = tokens // 3 + 8
    while True:
        ids = tokenize(nonsense(words, chance))
        if len(ids) >= tokens:
            return ids[:tokens]
        words *= 2


def _word(chance: random.Random) -> str:
    syllables = chance.randint(2, 4)
    return "".join(
        chance.choice(_ONSETS) + chance.choice(_VOWELS) + chance.choice(_CODAS)
        for _ in range(syllables)
    )
