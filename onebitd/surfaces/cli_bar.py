"""The parts of a first byte as a bar of a table: coloured blocks, or a letter for each part."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Final

from onebitd.core.first_byte import PARTS

_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
_COLOURS: Final = {
    "queue": 3,
    "tokens": 6,
    "lock": 1,
    "provider": 5,
    "restore": 2,
    "decoder": 4,
}
"""The colour of each part, one of the eight that every terminal has."""

_RESET: Final = "\x1b[0m"


def bar(parts: Mapping[str, float], width: int, *, colour: bool, blocks: bool) -> str:
    """Return a bar of exactly `width` columns, whose whole length is the sum of the parts.

    Args:
        parts: how much each has, by `core.first_byte.PARTS`; none at all is a blank bar.
        width: columns, at least 1.
        colour: paint it.
        blocks: the encoding has block characters; in colour, they show parts by eighths of a
            column. Without, each column has the letter of its part.
    """
    if not sum(parts.values()):
        return " " * width
    if colour and blocks:
        return _blocks(_edges(parts, width * 8), width)
    names = _names_by_column(_edges(parts, width), width)
    if not colour:
        return "".join(name[0] for name in names)
    return _painted([(f"3{_COLOURS[name]}", name[0]) for name in names])


def legend(*, colour: bool, blocks: bool) -> str:
    """Return what the colours or letters of a bar mean."""
    words = []
    for name in PARTS:
        sign = "█" if blocks and colour else name[0]
        words.append(
            f"\x1b[3{_COLOURS[name]}m{sign}{_RESET} {name}" if colour else f"{sign} {name}"
        )
    return "  ".join(words)


def _edges(parts: Mapping[str, float], steps: int) -> list[tuple[str, int]]:
    """Return where each part ends, in steps of the bar's length; the last ends at `steps`.

    The ends are rounded and not the lengths, so that the lengths add up.
    """
    total = sum(parts.values())
    passed = 0.0
    edges = []
    for name in PARTS:
        passed += parts.get(name, 0.0)
        edges.append((name, round(passed / total * steps)))
    return edges


def _names_by_column(edges: list[tuple[str, int]], width: int) -> list[str]:
    return [next(name for name, end in edges if end > column) for column in range(width)]


def _blocks(edges: list[tuple[str, int]], width: int) -> str:
    """Return a block character for each column: its first part, before the largest of the others.

    A character has two colours, so the least of three parts in one column is not seen.
    """
    drawn = []
    for column in range(width):
        (first, share), *others = _inside(edges, column * 8)
        colours = f"3{_COLOURS[first]}"
        if others:
            colours += f";4{_COLOURS[max(others, key=lambda found: found[1])[0]]}"
        drawn.append((colours, _EIGHTHS[share]))
    return _painted(drawn)


def _painted(signs: Iterable[tuple[str, str]]) -> str:
    """Return signs, each with its colours, which are set where they change."""
    painted = ""
    for colours, group in itertools.groupby(signs, key=lambda sign: sign[0]):
        painted += f"\x1b[{colours}m{''.join(sign for _, sign in group)}{_RESET}"
    return painted


def _inside(edges: list[tuple[str, int]], start: int) -> list[tuple[str, int]]:
    """Return the parts of the eight steps from `start`, and how many each has there."""
    found = []
    at = start
    for name, end in edges:
        share = min(end, start + 8) - at
        if share > 0:
            found.append((name, share))
            at += share
    return found
