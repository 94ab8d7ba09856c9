"""What slot 0 of the decoder is believed to hold, and how much of the next prompt that is.

llama-server evaluates only what comes after the longest common prefix of a prompt and its slot.
The ids of a generated reply are not in its answer, but its text is, and the next turn of a chat
repeats that text: it is compared as text, and counted in the tokens that the decoder said it took.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final

_KEPT: Final = 16
"""Conversations that are remembered to be in the decoder's own prompt cache."""
_BEGINS: Final = 64
"""A prompt with fewer tokens in common with an earlier one is not its next turn: most have the
start of the template, or a system prompt, in common."""
_RETURNS_WEIGHT: Final = 0.1
READ_AT_ONCE_BYTES: Final = 64 * 1024
"""A longer reply takes milliseconds to read."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the decoder evaluates it.

    Args:
        ids: its token ids.
        text: what they are the tokens of, None where a client sent ids.
    """

    ids: Sequence[int]
    text: str | None = None


class Reply:
    """What was generated after a prompt.

    Args:
        tokens: generated; the last of them is in no cache, since nothing came after it.
        read: returns its text, or None when it is not known, or not what the next turn repeats.
            Called once, and only when a prompt may go on where this one ended.
        unread_bytes: how much it has to read for that.
    """

    def __init__(self, tokens: int, read: Callable[[], str | None], unread_bytes: int = 0) -> None:
        self.tokens = tokens
        self.unread_bytes = unread_bytes
        self._read: Callable[[], str | None] | None = read
        self._text: str | None = None

    @property
    def text(self) -> str | None:
        """The text, None when there is none to compare with."""
        read = self._read
        if read is not None:
            self._text = read()
            self._read, self.unread_bytes = None, 0
        return self._text

    def drop_text(self) -> None:
        """Keep no bytes of it any more."""
        self._text, self._read, self.unread_bytes = None, None, 0


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """A prompt and its reply, in a slot."""

    prompt: Prompt
    reply: Reply | None = None

    @property
    def tokens(self) -> int:
        """How many tokens that is."""
        generated = 0 if self.reply is None else max(0, self.reply.tokens - 1)
        return len(self.prompt.ids) + generated

    def reusable(self, prompt: Prompt) -> int:
        """Return how many tokens of a prompt need not be evaluated; its last one always is."""
        common = common_prefix(self.prompt.ids, prompt.ids)
        if common == len(self.prompt.ids):
            common += self._repeated(prompt)
        return max(0, min(common, len(prompt.ids) - 1))

    def _repeated(self, prompt: Prompt) -> int:
        """Return how many tokens of the reply stand after our prompt in another one."""
        reply, ours, theirs = self.reply, self.prompt.text, prompt.text
        if reply is None or ours is None or theirs is None or not theirs.startswith(ours):
            return 0
        text = reply.text
        if not text:
            return 0
        same = common_prefix(theirs[len(ours) : len(ours) + len(text)], text)
        return max(0, reply.tokens - 1) * same // len(text)


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the length of the longest common prefix.

    >>> common_prefix([1, 2, 3, 4], [1, 2, 4])
    2
    >>> common_prefix("abc", "abc and more")
    3
    """
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # a[:low] is common, a[:high] is not
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


class SlotMemory:
    """Follows what the decoder's slot holds, and what its own prompt cache (`--cache-ram`) does.

    Args:
        cached_tokens_max: how many tokens the decoder's prompt cache takes, 0 without one.

    Attributes:
        returns_share: of the prompts that left a conversation, how many a later one came back for;
            what displacing one from the decoder's cache is weighed with.
    """

    def __init__(self, cached_tokens_max: int = 0) -> None:
        self.cached_tokens_max = cached_tokens_max
        self.returns_share = 0.5
        self._slot: Content | None = None
        self._earlier: list[Content] = []  # oldest first

    def forget(self) -> None:
        """Nothing is known about the slot any more."""
        self._slot = None

    def forget_all(self) -> None:
        """It is another decoder."""
        self._slot = None
        self._earlier.clear()

    def note(self, content: Content, *, restored: bool) -> None:
        """The slot holds this from now on.

        Args:
            content: of the slot.
            restored: it came by a handoff, which takes the place of what was there; the decoder
                itself would have put that into its own prompt cache first.
        """
        before, self._slot = self._slot, content
        if before is None or not self.cached_tokens_max:
            return
        returned = self._best_earlier(content.prompt)
        common = before.reusable(content.prompt)
        if common * 2 < before.tokens:
            came_back = returned is not None and returned[1] > common
            self.returns_share += _RETURNS_WEIGHT * (came_back - self.returns_share)
            if not restored:
                self._earlier.append(before)
                if before.reply is not None and before.reply.unread_bytes > READ_AT_ONCE_BYTES:
                    before.reply.drop_text()  # sixteen of those would be a lot to keep
        if returned is not None and returned[1] > common and not restored:
            self._earlier.remove(returned[0])
        while len(self._earlier) > _KEPT or self._earlier_tokens > self.cached_tokens_max:
            del self._earlier[0]

    @property
    def _earlier_tokens(self) -> int:
        return sum(content.tokens for content in self._earlier)

    def _best_earlier(self, prompt: Prompt) -> tuple[Content, int] | None:
        found = [(content, content.reusable(prompt)) for content in self._earlier]
        best = max(found, key=lambda pair: pair[1], default=None)
        return best if best is not None and best[1] >= _BEGINS else None

    @property
    def reply(self) -> Reply | None:
        """What was generated after the prompt in the slot, None when that is not known."""
        return None if self._slot is None else self._slot.reply

    def reusable(self, prompt: Prompt) -> int:
        """Return how many tokens of a prompt the decoder has somewhere in its hands."""
        slot = 0 if self._slot is None else self._slot.reusable(prompt)
        earlier = self._best_earlier(prompt)
        return slot if earlier is None else max(slot, earlier[1])

    def displaced(self, prompt: Prompt) -> int:
        """Return how many tokens of another conversation a handoff of this prompt would lose.

        Zero without a prompt cache: the decoder's own prefill would lose them just the same.
        """
        slot = self._slot
        if slot is None or not self.cached_tokens_max or slot.tokens > self.cached_tokens_max:
            return 0
        return slot.tokens if slot.reusable(prompt) * 2 < slot.tokens else 0
