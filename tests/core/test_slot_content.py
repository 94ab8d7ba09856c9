"""What the decoder's slot is believed to hold, and how much of the next prompt that is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebitd.core.slot_content import Content, Prompt, Reply, SlotMemory, common_prefix


def prompt_of(text: str) -> Prompt:
    """Return a prompt with one token for each character."""
    return Prompt([ord(letter) for letter in text], text)


def replied(text: str | None, tokens: int | None = None) -> Reply:
    """Return a reply, of as many tokens as characters unless said otherwise."""
    return Reply(len(text or "") if tokens is None else tokens, lambda: text)


few = st.lists(st.integers(0, 2), max_size=12)


@given(few, few, few)
def test_common_prefix_is_what_a_look_at_each_gives(
    same: list[int], one: list[int], other: list[int]
) -> None:
    """Halving finds the same length as counting."""
    a, b = same + one, same + other
    naive = 0
    while naive < min(len(a), len(b)) and a[naive] == b[naive]:
        naive += 1
    assert common_prefix(a, b) == naive


FIRST = "user: what is a page fault? you: "
ANSWER = "a trap to the kernel."


@pytest.mark.parametrize(
    ("later", "tokens"),
    [
        (FIRST + ANSWER + " user: and a minor one? you: ", len(FIRST) + len(ANSWER) - 1),
        (FIRST + ANSWER.strip(".") + " user: more", len(FIRST) + len(ANSWER) - 2),
        (FIRST + "something edited", len(FIRST)),
        (FIRST, len(FIRST) - 1),
        (FIRST[:-5], len(FIRST) - 6),
        ("user: what is a lock? you: ", len("user: what is a ")),
        ("x", 0),
        ("", 0),
    ],
    ids=[
        "turn-two",
        "trimmed-reply",
        "edited-reply",
        "regenerate",
        "shorter",
        "other",
        "x",
        "none",
    ],
)
def test_reusable_counts_the_prompt_and_what_repeats_the_reply(later: str, tokens: int) -> None:
    """The reply's last token is in no cache, and a prompt's last token is always evaluated."""
    content = Content(prompt_of(FIRST), replied(ANSWER))
    assert content.reusable(prompt_of(later)) == tokens


def test_reusable_reply_is_counted_in_its_own_tokens() -> None:
    """A token is more than a letter: half of the text is half of the tokens."""
    content = Content(prompt_of(FIRST), replied("ab" * 10, tokens=9))
    assert content.reusable(prompt_of(FIRST + "ab" * 5 + "!")) == len(FIRST) + 4
    assert content.tokens == len(FIRST) + 8


@pytest.mark.parametrize("text", [None, ""])
def test_reusable_reply_without_a_text_is_not_counted(text: str | None) -> None:
    """Tool calls, say; the prompt itself still is."""
    content = Content(prompt_of(FIRST), replied(text, tokens=20))
    assert content.reusable(prompt_of(FIRST + "whatever comes")) == len(FIRST)


def test_reusable_prompt_of_ids_has_no_text_to_compare() -> None:
    """Only its ids count."""
    ids = prompt_of(FIRST).ids
    content = Content(Prompt(ids), replied(ANSWER))
    assert content.reusable(prompt_of(FIRST + ANSWER)) == len(FIRST)
    assert Content(prompt_of(FIRST), replied(ANSWER)).reusable(Prompt([*ids, 1, 2])) == len(FIRST)


def test_reply_text_is_read_once_and_only_when_a_prompt_goes_on() -> None:
    """Putting a stream together takes time, and most replies are never come back for."""
    reads = []
    content = Content(prompt_of(FIRST), Reply(5, lambda: reads.append(1) or "hello"))  # type: ignore[func-returns-value]
    content.reusable(prompt_of("another"))
    assert reads == []
    for _ in range(3):
        content.reusable(prompt_of(FIRST + "hello you"))
    assert reads == [1]


def chat(name: str, tokens: int = 100) -> Prompt:
    """Return the first turn of a conversation of its own."""
    return prompt_of(name * tokens)


def test_memory_nothing_noted_holds_nothing() -> None:
    """Nor does one that was told to forget, or whose decoder is another one."""
    memory = SlotMemory(1000)
    assert (memory.reusable(chat("a")), memory.displaced(chat("a"))) == (0, 0)
    memory.note(Content(chat("a")), restored=False)
    memory.note(Content(chat("b")), restored=False)
    memory.forget()
    assert (memory.reusable(chat("b")), memory.reusable(chat("a"))) == (0, 99)
    memory.forget_all()
    assert memory.reusable(chat("a")) == 0


def test_memory_without_a_prompt_cache_only_the_slot_counts() -> None:
    """Another conversation is lost, whoever prefills; so a handoff displaces nothing."""
    memory = SlotMemory()
    memory.note(Content(chat("a")), restored=False)
    assert memory.displaced(chat("b")) == 0
    memory.note(Content(chat("b")), restored=False)
    assert (memory.reusable(chat("b")), memory.reusable(chat("a"))) == (99, 0)


def test_memory_prompt_cache_brings_an_earlier_conversation_back() -> None:
    """The decoder puts what it leaves aside, and takes it back."""
    memory = SlotMemory(1000)
    for name in "abc":
        memory.note(Content(chat(name)), restored=False)
    assert [memory.reusable(chat(name)) for name in "abcd"] == [99, 99, 99, 0]


def test_memory_prompt_cache_is_bounded_oldest_first() -> None:
    """250 tokens of others: two of these conversations."""
    memory = SlotMemory(250)
    for name in "abcd":
        memory.note(Content(chat(name)), restored=False)
    assert [memory.reusable(chat(name)) for name in "abcd"] == [0, 99, 99, 99]


def test_memory_conversation_that_was_taken_back_is_not_in_the_cache_twice() -> None:
    """Its place is free again for others."""
    memory = SlotMemory(250)
    for name in "abab":
        memory.note(Content(chat(name)), restored=False)
    memory.note(Content(chat("c")), restored=False)
    assert [memory.reusable(chat(name)) for name in "abc"] == [99, 99, 99]


def test_memory_start_in_common_is_no_earlier_turn() -> None:
    """Templates begin alike."""
    memory = SlotMemory(1000)
    memory.note(Content(prompt_of("system" + "a" * 100)), restored=False)
    memory.note(Content(chat("b")), restored=False)
    assert memory.reusable(prompt_of("system" + "c" * 100)) == 0


def test_memory_handoff_takes_the_place_of_what_was_there() -> None:
    """A restore puts nothing aside: what was in the slot is lost."""
    memory = SlotMemory(1000)
    memory.note(Content(chat("a")), restored=False)
    memory.note(Content(chat("b")), restored=True)
    assert [memory.reusable(chat(name)) for name in "ab"] == [0, 99]


@pytest.mark.parametrize(
    ("size", "prompt", "lost"),
    [
        (1000, chat("b"), 100),
        (1000, chat("a", 200), 0),
        (1000, prompt_of("a" * 50 + "b" * 50), 0),
        (1000, prompt_of("a" * 49 + "b" * 50), 100),
        (99, chat("b"), 0),
    ],
    ids=["another", "next-turn", "half", "less-than-half", "too-large-for-the-cache"],
)
def test_displaced_is_what_the_decoder_itself_would_have_kept(
    size: int, prompt: Prompt, lost: int
) -> None:
    """Another conversation, as long as it fits the decoder's cache."""
    memory = SlotMemory(size)
    memory.note(Content(chat("a")), restored=False)
    assert memory.displaced(prompt) == lost


def test_returns_share_follows_what_comes_back() -> None:
    """Single prompts teach that nothing does, two chats in turn that everything does."""
    memory = SlotMemory(100_000)
    for index in range(60):
        memory.note(Content(chat(chr(300 + index))), restored=False)
    single = memory.returns_share
    for index in range(60):
        memory.note(Content(chat("ab"[index % 2])), restored=False)
    assert single < 0.01
    assert memory.returns_share > 0.9


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 90), st.booleans())))
def test_memory_any_order_of_prompts_stays_bounded(
    steps: list[tuple[str, int, bool]],
) -> None:
    """Shares are shares, and never more than a prompt less its last token is reused."""
    memory = SlotMemory(150)
    for name, tokens, restored in steps:
        prompt = chat(name, tokens)
        assert 0 <= memory.reusable(prompt) <= tokens - 1
        assert 0 <= memory.displaced(prompt) <= 150
        memory.note(Content(prompt, replied("z" * tokens)), restored=restored)
        assert 0 <= memory.returns_share <= 1
