"""The prompts that a provider is run on: ordinary, long and awkward ones, as token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

SHORT: Final = (
    "The days of the week, again and again: Monday, Tuesday, Wednesday, Thursday, Friday, "
    "Saturday, Sunday, Monday, Tuesday,"
)
"""Its continuation is decided, so a reply that differs is no tie."""
NON_ASCII: Final = (
    "Grüße aus Köln: 日本語のテキスト, Ελληνικά, русский, עברית, 한국어, 🦙🌊 and a naïve café."
)
LONG_TOKENS: Final = 400
WINDOW_MARGIN: Final = 64
"""The long prompt is so many tokens longer than a sliding window, so that rows leave the window."""
MESSAGES: Final = (
    {"role": "system", "content": "You are a terse assistant."},
    {"role": "user", "content": "Which months have thirty days?"},
)

# Of coprime lengths, so that no sentence comes twice. A text that repeats itself is no measure:
# what one rounding does to a row of it can be larger than the row, in llama.cpp itself (measured).
_WHO: Final = (
    "the keeper", "a tired sailor", "her brother", "the baker", "an old teacher", "our neighbour",
    "the young engineer", "the postman", "a curious child", "the captain", "my aunt",
)  # fmt: skip
_DID: Final = (
    "carried", "painted", "repaired", "forgot", "described", "found", "sold", "borrowed", "hid",
    "admired", "measured", "cleaned", "drew",
)  # fmt: skip
_WHAT: Final = (
    "a green lantern", "two wooden boats", "the letter", "a map of the coast", "the broken clock",
    "seven apples", "a heavy door", "the blue bicycle", "an empty bottle", "the garden wall",
    "a silver spoon", "three old photographs", "the kitchen table", "a long rope",
    "the church bell", "some dry bread", "a small radio",
)  # fmt: skip
_WHERE: Final = (
    "near the harbour", "before breakfast", "in the rain", "behind the school", "after the storm",
    "at the end of winter", "without a word", "on the train to the north", "for the last time",
    "while the others slept", "under the bridge", "in a quiet street", "with great care",
    "by mistake", "every second Sunday", "across the river", "on a borrowed horse",
    "in the workshop", "from memory",
)  # fmt: skip


def long_text(sentences: int) -> str:
    """Return a text of so many sentences, up to 46189 of which no two are the same."""
    lists = (_WHO, _DID, _WHAT, _WHERE)
    return " ".join(
        " ".join(words[number % len(words)] for words in lists).capitalize() + "."
        for number in range(sentences)
    )


def long_ids(tokenize: Callable[[str], list[int]], n_tokens: int) -> list[int]:
    """Return exactly so many ids of a long text, its start included."""
    sentences = 1 + n_tokens // 10
    ids = tokenize(long_text(sentences))
    while len(ids) < n_tokens:
        sentences *= 2
        ids = tokenize(long_text(sentences))
    return ids[:n_tokens]


def long_length(n_ctx: int, sliding_window: int | None) -> int:
    """Return the length of the long prompt: several hundred, and more than the window if it fits.

    >>> long_length(2048, None), long_length(2048, 512), long_length(256, 512)
    (400, 576, 224)
    """
    wanted = max(LONG_TOKENS, (sliding_window or 0) + WINDOW_MARGIN)
    return min(wanted, n_ctx - 32)


def special_ids(
    tokenize: Callable[[str], list[int]],
    chat_text: Callable[[Sequence[dict[str, str]]], str | None],
) -> list[int]:
    """Return the ids of a chat as the model's template writes it, special tokens included."""
    text = chat_text(MESSAGES)
    return tokenize(text) if text else []
