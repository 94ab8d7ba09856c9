"""What the gate replays: three traces of requests, and the pass that makes them repeatable.

The reference pass runs each trace once on a plain decoder. It keeps the state of every prompt, for
the provider that plays a second device, the reply to every turn, so that a chat goes on with the
same words whatever a policy does, and the rate at which the decoder evaluates prompts.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onebitd.core import provider_contract
from tests.llama_builds import LlamaClient
from tests.standins import paced_provider

CHATS = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

_NOUNS = "river garden engine letter window market forest harbour kitchen village road teacher"
_VERBS = "follows repairs paints describes crosses remembers measures opens sells watches"
_ADJECTIVES = "old quiet bright narrow heavy green broken famous simple distant warm empty"
_PLACES = "the bridge, the station, the lake, the tower, the school, the hill, the mill"
_TOKENS_PER_WORD = 1.05
_RATE_TOKENS = 100
"""Shorter evaluations say little about the rate."""


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        path: its endpoint.
        body: what is posted, all but `stream`.
    """

    path: str
    body: dict[str, Any]


Unit = tuple[Ask, ...]
"""Requests of which each is sent at the moment when the one before has its first byte."""


@dataclass(frozen=True)
class Trace:
    """Requests in their order.

    Attributes:
        name: for the tables.
        units: each begins when the one before has ended.
        prompt_tokens: of all prompts together.
    """

    name: str
    units: tuple[Unit, ...]
    prompt_tokens: int

    @property
    def keys(self) -> list[tuple[int, int]]:
        """Unit and place of each request, in order."""
        return [(u, i) for u, unit in enumerate(self.units) for i in range(len(unit))]


@dataclass(frozen=True)
class Sizes:
    """How long the traces are: prompts and replies in tokens, roughly.

    Attributes:
        singles: length of each single prompt.
        chats: turns of each chat; the last two of them take turns with each other.
        opening, turn, chat_reply: of a chat's first prompt, of what each turn adds, of a reply.
        chains: lengths of the prompts of each chain of overlapping requests.
        reply: of an overlapping request.
    """

    singles: tuple[int, ...] = (60, 280, 110, 400, 80, 200, 40)
    chats: tuple[int, ...] = (4, 3, 3)
    opening: int = 70
    turn: int = 30
    chat_reply: int = 16
    chains: tuple[tuple[int, ...], ...] = ((120, 220, 90), (160, 60, 280))
    reply: int = 56


SHORT = Sizes(
    singles=(40, 180, 80),
    chats=(3, 1, 1),
    opening=50,
    turn=25,
    chains=((80, 140, 60),),
    reply=48,
)
TINY = Sizes(singles=(20, 30), chats=(2, 1), opening=10, turn=10, chains=((20, 30),), reply=8)


def words(first: str, tokens: int, seed: int) -> str:
    """Return plain sentences of about so many tokens; two that differ in `first` share no start."""
    draw = random.Random(seed)  # noqa: S311 - the same prompts each time
    nouns, verbs, adjectives = _NOUNS.split(), _VERBS.split(), _ADJECTIVES.split()
    places = _PLACES.split(", ")
    found = [first]
    while len(found) < tokens / _TOKENS_PER_WORD:
        sentence = f"the {draw.choice(adjectives)} {draw.choice(nouns)} {draw.choice(verbs)}"
        sentence += f" the {draw.choice(adjectives)} {draw.choice(nouns)} near"
        found += f"{sentence} {draw.choice(places)} and".split()
    return " ".join(found[: max(1, round(tokens / _TOKENS_PER_WORD))])


@dataclass
class Reference:
    """The pass on a plain decoder.

    Args:
        client: a llama-server that is run as the daemons run theirs.
        states: where states are kept.

    Attributes:
        evaluated: (tokens, milliseconds) of what the decoder evaluated.
    """

    client: LlamaClient
    states: Path
    evaluated: list[tuple[int, float]] = field(default_factory=list)

    @property
    def ms_per_token(self) -> float:
        """The decoder's own prefill, over all prompts that say something about it."""
        known = [one for one in self.evaluated if one[0] >= _RATE_TOKENS] or self.evaluated
        return sum(ms for _, ms in known) / sum(tokens for tokens, _ in known)

    def keep(self, ids: Sequence[int]) -> None:
        """Evaluate a prompt less its last token, and keep its state."""
        handed = list(ids[:-1])
        timings = self.client.complete(handed, 0)["timings"]
        self.evaluated.append((timings["prompt_n"], timings["prompt_ms"]))
        assert self.client.slot_action("save", "s").status == 200
        name = paced_provider.state_name(provider_contract.format_tokens(handed))
        shutil.move(self.client.slots_dir / "s", self.states / name)

    def completion(self, prompt: str, max_tokens: int) -> tuple[Ask, int]:
        """Return a request of this prompt, and its tokens."""
        ids = self.client.tokenize(prompt)
        self.keep(ids)
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return Ask(COMPLETIONS, body), len(ids)

    def turn(self, messages: list[dict[str, str]], max_tokens: int) -> tuple[Ask, int, str]:
        """Return a request of these messages, its tokens, and the decoder's reply to it."""
        text = self.client.post("/apply-template", {"messages": messages})["prompt"]
        ids = self.client.tokenize(text)
        self.keep(ids)
        reply = self.client.complete(ids, max_tokens)["content"]
        body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0}
        return Ask(CHATS, body), len(ids), reply


def single_prompts(reference: Reference, sizes: Sizes) -> Trace:
    """Return prompts that have nothing to do with each other."""
    found = [
        reference.completion(words(f"Single{number}", tokens, number), 4)
        for number, tokens in enumerate(sizes.singles)
    ]
    return Trace("single prompts", tuple((ask,) for ask, _ in found), sum(n for _, n in found))


def turn_order(turns: Sequence[int]) -> Iterator[int]:
    """Yield whose turn it is: chat by chat, and the last two by turns."""
    for chat, count in enumerate(turns[:-2]):
        yield from [chat] * count
    left = {len(turns) - 2 + i: count for i, count in enumerate(turns[-2:])}
    while any(left.values()):
        for chat in left:
            if left[chat]:
                left[chat] -= 1
                yield chat


def chats(reference: Reference, sizes: Sizes) -> Trace:
    """Return chats whose every turn repeats what was said before."""
    messages: list[list[dict[str, str]]] = [
        [{"role": "system", "content": words(f"Chat{number}", sizes.opening, 100 + number)}]
        for number in range(len(sizes.chats))
    ]
    units: list[Unit] = []
    prompt_tokens = 0
    for chat in turn_order(sizes.chats):
        said = messages[chat]
        question = words(f"Question{len(units)}", sizes.turn, 200 + len(units))
        said.append({"role": "user", "content": question})
        ask, tokens, reply = reference.turn(list(said), sizes.chat_reply)
        said.append({"role": "assistant", "content": reply})
        units.append((ask,))
        prompt_tokens += tokens
    return Trace("multi-turn chats", tuple(units), prompt_tokens)


def overlapping(reference: Reference, sizes: Sizes) -> Trace:
    """Return chains of two clients in turn: each asks while the other's reply is generated."""
    units: list[Unit] = []
    prompt_tokens = 0
    for number, chain in enumerate(sizes.chains):
        asks = []
        for place, tokens in enumerate(chain):
            prompt = words(f"Chain{number}{'ABCDEFGH'[place]}", tokens, 300 + 10 * number + place)
            ask, n = reference.completion(prompt, sizes.reply)
            asks.append(ask)
            prompt_tokens += n
        units.append(tuple(asks))
    return Trace("two clients overlapping", tuple(units), prompt_tokens)


TRACES = {"singles": single_prompts, "chats": chats, "overlap": overlapping}
