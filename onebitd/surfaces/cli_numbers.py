"""Numbers on `onebitctl`'s command line, for argparse."""

from __future__ import annotations

import argparse


def positive_int(text: str) -> int:
    """Return a number from 1 to the largest that llama.cpp counts positions with."""
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and 0 < int(text) < 1 << 31):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def positive_float(text: str) -> float:
    """Return a positive, finite number."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return value
