"""The pages of `onebitctl`, but for its status: layout and numbers."""

from __future__ import annotations

import pytest

from onebitd.surfaces import cli_pages as pages
from onebitd.surfaces import cli_text


def test_pages_lock_that_cannot_be_taken_is_not_free() -> None:
    """A file that this user may not open is unusable, and the problem says what to do."""
    problem = "it may not be opened by the user x: it belongs to root:root with mode 0640; do y"
    page = pages.lock_page(
        {
            "path": "/l",
            "exists": True,
            "held": False,
            "holder": None,
            "problem": problem,
            "usable": False,
        }
    )
    assert page.split("\n") == ["/l: unusable", f"problem: {problem}"]


def test_config_page_is_key_source_value() -> None:
    """Unset, lists, tables and booleans read like what they are; a long value moves no column."""
    page = pages.config_page(
        {
            "a.b": {"value": None, "source": "default"},
            "long.key": {"value": ["-t", "4"], "source": "file"},
            "c": {"value": True, "source": "flag --c"},
            "d": {"value": {"A": "1"}, "source": "file"},
        }
    )
    assert [line.split() for line in page.split("\n")] == [
        ["a.b", "default", "-"],
        ["long.key", "file", "-t", "4"],
        ["c", "flag", "--c", "true"],
        ["d", "file", "A=1"],
    ]
    for words in (("def", "fi", "fl", "fi"), ("  -", "  -t", "  true", "  A=1")):
        starts = [line.index(word) for line, word in zip(page.split("\n"), words, strict=True)]
        assert len(set(starts)) == 1


def test_config_page_value_that_does_not_fit_has_lines_of_its_own() -> None:
    """At words; what fits stays beside its key, and nothing is cut."""
    config = {
        "a": {"value": "short", "source": "file"},
        "long.key": {"value": ["--record", "/var/tmp/record", "--threads", "4"], "source": "file"},
    }
    assert pages.config_page(config, 40).split("\n") == [
        "a         file  short",
        "long.key  file",
        "    --record /var/tmp/record --threads 4",
    ]
    *_, last = pages.config_page(config).split("\n")
    assert last == "long.key  file  --record /var/tmp/record --threads 4"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "?"),
        (-3, "0.0 s"),
        (0.42, "0.4 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (60, "1 min"),
        (200, "3 min 20 s"),
        (3600, "1 h"),
        (7512, "2 h 5 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_duration_reads_like_a_person_would_say_it(seconds: float | None, text: str) -> None:
    """Two units at most."""
    assert cli_text.duration(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 MiB"), (851_443_712, "812 MiB"), (13_207_024_435, "12.3 GiB")]
)
def test_mebibytes_switches_to_gibibytes_when_large(size: int, text: str) -> None:
    """Three or four digits at most."""
    assert cli_text.mebibytes(size) == text
