"""The table of `onebitctl requests`."""

from __future__ import annotations

from typing import Any

from onebitd.surfaces.cli_requests import NOTHING, requests_table

WIDE = 100


def make(**changes: Any) -> dict[str, Any]:
    """Return a request as the daemon tells it."""
    return {
        "request_id": "0c66b1f2-9f3c-4d63-8a57-77d4f4a3e0aa",
        "method": "POST",
        "path": "/v1/chat/completions",
        "phase": "template",
        "age_s": 3599.9,
        "stream": True,
        "prompt_tokens": 131072,
        "reply_tokens": 100000,
        **changes,
    }


def test_requests_table_columns_are_aligned_and_fit() -> None:
    """The widest values that are to be expected, with a UUID for an id, stay within 100 columns."""
    lines = requests_table([make(), make(phase="pass", age_s=0.04, prompt_tokens=None)])
    assert all(len(line) <= WIDE for line in lines)
    assert {line.index(" /v1/chat/") for line in lines[1:]} == {lines[0].index(" PATH")}
    assert {line.rindex(" 0c66b1f2") for line in lines[1:]} == {lines[0].rindex(" ID")}
    assert lines[1].split()[:5] == ["template", "59", "min", "59", "s"]
    assert lines[2].split()[:5] == ["pass", "0.0", "s", "-", "100000"]


def test_requests_table_long_path_is_cut_and_id_is_not() -> None:
    """`onebitctl cancel` takes the id whole."""
    (_, line) = requests_table([make(path="/v1/" + "x" * 60, request_id="r" * 128)])
    assert line.endswith("  " + "r" * 128)
    assert "/v1/xxxxxxxxxxxxxxx…  r" in line


def test_requests_table_shows_nothing_that_moves_the_cursor() -> None:
    """A path is decoded from what a client sent; the daemon may be of another version."""
    (_, line) = requests_table([{"path": "/\x1b[2J\r\n", "request_id": "\x07"}])
    assert line.isprintable()
    assert line.split()[0] == "?"


def test_requests_table_without_requests_says_so() -> None:
    """One line, no heading."""
    assert requests_table([]) == [NOTHING]
