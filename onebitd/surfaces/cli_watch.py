"""`onebitctl status --watch`: one look after the other, in place on a terminal."""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Final

from onebitd.surfaces import cli_terminal
from onebitd.surfaces.cli_text import Line, clean, cut, paint, wrap

if TYPE_CHECKING:
    from onebitd.surfaces.cli_status_command import Look

_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l"
"""The alternate screen, no cursor, and no line that goes on in the next."""
_LEAVE: Final = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_HOME: Final = "\x1b[H"
_END_OF_LINE: Final = "\x1b[K\n"
_REST: Final = "\x1b[K\x1b[J"


def run(look: Callable[[], Look], every_s: float, *, as_json: bool) -> int:
    """Show a look every so many seconds until Ctrl-C, which is 0.

    On a terminal each is drawn over the last one; elsewhere an empty line is between two, and with
    `as_json` each has lines of its own.
    """
    try:
        if as_json:
            _run_lines(look, every_s)
        elif cli_terminal.can_move():
            _run_screen(look, every_s)
        else:
            _run_pages(look, every_s)
    except KeyboardInterrupt:
        return 0
    return 0


def _run_lines(look: Callable[[], Look], every_s: float) -> None:
    while True:
        for document in look().documents:
            cli_terminal.write(json.dumps(document) + "\n")
        sys.stdout.flush()
        _wait(every_s)


def _run_pages(look: Callable[[], Look], every_s: float) -> None:
    first = True
    while True:
        found = look()
        size = cli_terminal.size()
        page = _page_of(found, size.columns, colour=cli_terminal.has_colour())
        cli_terminal.write(f"{page}\n" if first else f"\n{page}\n")
        sys.stdout.flush()
        first = False
        _wait(every_s)


def _run_screen(look: Callable[[], Look], every_s: float) -> None:
    with _screen():
        while True:
            found, at = look(), dt.datetime.now().astimezone()
            _draw(found, at, every_s)
            while _wait(every_s):  # resized: the same look again, in its new size
                _draw(found, at, every_s)


def _draw(found: Look, at: dt.datetime, every_s: float) -> None:
    size, colour = cli_terminal.size(), cli_terminal.has_colour()
    head = cut(f"onebitctl status at {at:%H:%M:%S}, every {every_s:g} s; Ctrl-C ends", size.columns)
    lines = [paint(head, "dim", colour), ""]
    lines += _page_of(found, size.columns, colour=colour).split("\n")
    rows = size.lines or len(lines)
    if len(lines) > rows:
        lines = [*lines[: max(rows - 1, 1)], paint(cut("…", size.columns), "dim", colour)]
    cli_terminal.write(_HOME + _END_OF_LINE.join(lines) + _REST)
    sys.stdout.flush()


def _page_of(found: Look, columns: int, *, colour: bool) -> str:
    page = found.page(columns, colour)
    if found.error is None:
        return page
    return "\n".join(
        Line(text, ((0, len(text), "red"),)).shown(colour)
        for text in wrap(clean(page), "", "  ", min(columns, 110))
    )


def _wait(seconds: float) -> bool:
    """Wait; return True as soon as the terminal has another size."""
    return signal.sigtimedwait({signal.SIGWINCH}, seconds) is not None


@contextmanager
def _screen() -> Iterator[None]:
    """Have the alternate screen, and give it back: at the end, on SIGTERM, and while stopped."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH})

    def enter() -> None:
        cli_terminal.write(_ENTER)
        sys.stdout.flush()

    def leave() -> None:
        cli_terminal.write(_LEAVE)
        sys.stdout.flush()

    def at_once(text: str) -> None:
        # The stream may be in the middle of a write, and lets nobody in.
        with suppress(OSError):
            os.write(sys.stdout.fileno(), text.encode("ascii"))

    def stop(number: int, frame: FrameType | None) -> None:
        at_once(_LEAVE)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)  # goes on here once it is continued
        signal.signal(signal.SIGTSTP, stop)
        at_once(_ENTER)
        os.kill(os.getpid(), signal.SIGWINCH)  # draw again

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTSTP, stop)
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGHUP, end)
    enter()
    try:
        yield
    finally:
        leave()
