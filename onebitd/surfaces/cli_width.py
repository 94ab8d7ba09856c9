"""Text in columns of a terminal, where a letter may take two, or none."""

from __future__ import annotations

from typing import Final

ELLIPSIS: Final = "…"


def columns_of(text: str) -> int:
    """Return how many columns a text takes; it has no control characters (`cli_text.clean`)."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def cut(text: str, width: int | None, ellipsis: str = ELLIPSIS) -> str:
    """Return the text, shortened to `width` columns with an ellipsis; None: as it is."""
    if width is None or columns_of(text) <= width:
        return text
    room = width - len(ellipsis)
    if room < 0:
        return ellipsis[: max(width, 0)]
    kept = 0
    for letter in text:
        room -= _columns(letter)
        if room < 0:
            break
        kept += 1
    return text[:kept].rstrip() + ellipsis


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Return the text with blanks up to `width` columns; `right` puts them in front of it."""
    blanks = " " * (width - columns_of(text))
    return blanks + text if right else text + blanks


def _columns(letter: str) -> int:
    if letter.isascii():
        return 1
    import unicodedata  # a second library to load, for the few who need it

    if unicodedata.combining(letter) or unicodedata.category(letter) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1
