"""What `onebitctl try` shows: the reply, harmless on a terminal, and the parts of its handoff."""

from __future__ import annotations

import io
import math
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from onebitd.surfaces import cli_try, try_pages

USED: dict[str, Any] = {
    "outcome": "used",
    "route": "file",
    "prompt_tokens": 308,
    "handed_tokens": 307,
    "evaluated_tokens": 1,
    "cached_tokens": 307,
    "queue_ms": 0.001,
    "template_ms": 1.5,
    "tokenize_ms": 0.5,
    "lock_ms": 0.1,
    "provider_wall_ms": 90.0,
    "prefill_ms": 88.1,
    "restore_ms": 6.0,
    "first_byte_ms": 103.2,
    "reply_tokens": 64,
    "decode_ms": 1600.0,
}
DECODED: dict[str, Any] = {
    "prompt_tokens": 308,
    "evaluated_tokens": 300,
    "cached_tokens": 8,
    "first_byte_ms": 250.0,
    "reply_tokens": 1,
}


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        (
            USED,
            "308 prompt tokens handed over by state file, prefilled in 88.1 ms at 3485 tokens/s,"
            " first byte after 103.2 ms, 64 tokens generated at 40.0 tokens/s.",
        ),
        (
            {**USED, "route": "shared"},
            "308 prompt tokens handed over by the shared route, prefilled in 88.1 ms at 3485"
            " tokens/s, first byte after 103.2 ms, 64 tokens generated at 40.0 tokens/s.",
        ),
        (
            {**USED, "outcome": "wasted", "evaluated_tokens": 308},
            "The handoff was wasted: the decoder evaluated 308 tokens again, first byte after 103.2"
            " ms, 64 tokens generated at 40.0 tokens/s.",
        ),
        (
            {
                **DECODED,
                "outcome": "fallback",
                "reason": "provider_exit",
                "detail": "status 3: no XDNA device",
            },
            "Fell back to the decoder because provider_exit: status 3: no XDNA device; the decoder"
            " evaluated 300 prompt tokens (8 were there) at 1200 tokens/s, first byte after 250.0"
            " ms, 1 token generated.",
        ),
        (
            {**DECODED, "outcome": "skipped", "reason": "policy", "cached_tokens": 0},
            "Not handed off because policy; the decoder evaluated 300 prompt tokens at 1200"
            " tokens/s, first byte after 250.0 ms, 1 token generated.",
        ),
        # The time of few tokens is what any prefill begins with.
        (
            {**DECODED, "outcome": "skipped", "reason": "policy", "evaluated_tokens": 1},
            "Not handed off because policy; the decoder evaluated 1 prompt token (8 were there),"
            " first byte after 250.0 ms, 1 token generated.",
        ),
        (
            {**USED, "prompt_tokens": 32, "handed_tokens": 31},
            "32 prompt tokens handed over by state file, prefilled in 88.1 ms,"
            " first byte after 103.2 ms, 64 tokens generated at 40.0 tokens/s.",
        ),
        ({"outcome": "cancelled", "reason": "operator"}, "Cancelled because operator."),
        ({"outcome": "failed", "reason": "internal", "detail": "x"}, "Failed because internal: x."),
        # Of another version, or damaged.
        ({"outcome": "new", "first_byte_ms": "soon", "prompt_tokens": None}, "Unfinished."),
        ({}, "Unfinished."),
        ({"reply_tokens": 1, "decode_ms": 0.001}, "Unfinished, 1 token generated."),
        (dict.fromkeys(("first_byte_ms", "reply_tokens"), 10**400), "Unfinished."),
        (dict.fromkeys(("first_byte_ms", "reply_tokens"), -1), "Unfinished."),
        (dict.fromkeys(("first_byte_ms", "reply_tokens"), math.nan), "Unfinished."),
    ],
)
def test_sentence_of_a_record_says_what_became_of_it(record: dict[str, Any], wanted: str) -> None:
    """Whether a handoff was used, why not, and how fast each part was."""
    assert try_pages.sentence(record) == wanted


def test_parts_page_at_80_columns_is_a_bar_times_and_a_sentence() -> None:
    """Without colours, each column of the bar has the first letter of its part."""
    assert try_pages.parts_page(USED, 80, colour=False, blocks=True) == (
        "tt" + "p" * 69 + "r" * 5 + "d" * 4 + "\n"
        "tokens 2.00 ms, lock 0.10 ms, provider 90.0 ms, restore 6.00 ms, decoder 5.10 ms\n"
        "308 prompt tokens handed over by state file, prefilled in 88.1 ms at 3485\n"
        "tokens/s, first byte after 103.2 ms, 64 tokens generated at 40.0 tokens/s."
    )


@pytest.mark.parametrize(("columns", "width"), [(80, 80), (100, 100), (160, 100), (5, 20)])
@pytest.mark.parametrize("colour", [False, True])
def test_parts_page_is_as_wide_as_the_terminal_and_no_wider(
    columns: int, width: int, colour: bool
) -> None:
    """The bar fills it, up to what can be read; with colours the signs are explained."""
    page = try_pages.parts_page(USED, columns, colour=colour, blocks=True)
    plain = re.sub(r"\x1b\[[\d;]+m", "", page).splitlines()
    assert len(plain[0]) == width
    if columns >= 80:
        assert max(map(len, plain)) <= width
    assert ("█ provider" in page.replace("\x1b[0m", "")) is colour
    assert ("\x1b" in page) is colour


def test_parts_page_of_a_handoff_without_a_first_byte_is_a_sentence() -> None:
    """There is nothing to draw; and what others wrote moves no cursor."""
    record = {"outcome": "failed", "reason": "internal", "detail": "a\x1b[2Jb\nc"}
    page = try_pages.parts_page(record, 80, colour=False, blocks=True)
    assert page == "Failed because internal: a?[2Jb c."


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("one\ntwo\tthree", "one\ntwo\tthree"),
        ("\x1b[2J\x07\x00\x9b1m", "?[2J???1m"),
        ("one\r\ntwo\rthree", "one\ntwothree"),
        ("Grüße 日本語 👩\u200d🔬 a\u200cb", "Grüße 日本語 👩\u200d🔬 a\u200cb"),
        ("\u202eevil\u2066", "?evil?"),
        ("a\xa0b\u2028c", "a b c"),
    ],
)
def test_harmless_text_keeps_letters_and_nothing_that_moves(text: str, wanted: str) -> None:
    """Lines, tabs and joined letters stay; escapes and turned text do not."""
    assert cli_try.harmless(text) == wanted


class Terminal(io.TextIOWrapper):
    """A stream that says whether it is a terminal."""

    def __init__(self, *, is_terminal: bool, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding, newline="")
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        """Say so."""
        return self._is_terminal

    @property
    def written(self) -> str:
        """What came."""
        self.flush()
        data = self.buffer
        assert isinstance(data, io.BytesIO)
        return data.getvalue().decode(self.encoding)


def said(*pieces: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return the events of a streamed chat."""
    yield {"choices": [{"delta": {"role": "assistant", "content": None}}]}
    for piece in pieces:
        yield {"choices": [{"delta": piece}]}
    yield {"choices": [], "usage": {}}


REPLY = ({"content": "one\x1b[2J"}, {"content": ""}, {"content": " two"})
THOUGHT = ({"reasoning_content": "hm"}, {"reasoning_content": "\x1b..."}, {"content": "yes\n"})


@pytest.mark.parametrize(
    ("pieces", "is_terminal", "out", "err"),
    [
        (REPLY, True, "one?[2J two\n", ""),
        (REPLY, False, "one\x1b[2J two\n", ""),
        (THOUGHT, True, "yes\n", "\x1b[2mhm?...\x1b[0m\n"),
        (THOUGHT, False, "yes\n", ""),
        ((), True, "", ""),
    ],
)
def test_printer_reply_goes_to_stdout_alone(
    monkeypatch: pytest.MonkeyPatch,
    pieces: tuple[dict[str, Any], ...],
    is_terminal: bool,
    out: str,
    err: str,
) -> None:
    """Neutralised on a terminal, as it is into a file; thoughts are for eyes only."""
    streams = Terminal(is_terminal=is_terminal), Terminal(is_terminal=is_terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    cli_try._Printer().print_all(said(*pieces))
    assert (streams[0].written, streams[1].written) == (out, err)


def test_reply_for_programs_is_what_stdout_would_have() -> None:
    """`try --json` gives the answer, as it came, and not the model's thoughts before it."""
    assert cli_try._reply(said(*THOUGHT)) == "yes\n"
    assert cli_try._reply(said(*REPLY)) == "one\x1b[2J two"


def test_printer_reply_that_breaks_off_ends_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message that follows stands on a line of its own; thoughts leave no colour behind."""
    out, err = Terminal(is_terminal=True), Terminal(is_terminal=True)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)

    def breaks_off(piece: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from said(piece)
        raise KeyboardInterrupt

    monkeypatch.setenv("NO_COLOR", "1")
    for piece in ({"reasoning_content": "hm"}, {"content": "one"}):
        with pytest.raises(KeyboardInterrupt):
            cli_try._Printer().print_all(breaks_off(piece))
    assert (out.written, err.written) == ("one\n", "hm\n")


def test_printer_letters_that_the_terminal_lacks_are_question_marks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No reply ends in a traceback."""
    out = Terminal(is_terminal=True, encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    cli_try._Printer().print_all(said({"content": "Grüße"}))
    assert out.written == "Gr??e\n"
