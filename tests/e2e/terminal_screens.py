"""Runs `onebitctl` in terminals of many kinds, and holds what it looks like against a file.

`tests/e2e/terminal/NAME.txt` is what a person sees; write the files anew, after a change that is
meant, with

    python -m tests.e2e.terminal_screens --write [pytest's arguments, such as -k handoffs]

which says which of them have changed: read the difference before it is kept. What follows from the
run and not from the code is replaced in the text, see `SHOWN`, or in the daemon's answers, see
`terminal_pins`.
"""

from __future__ import annotations

import dataclasses
import difflib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import pyte

from tests.llama_builds import ROOT

DIRECTORY: Final = Path(__file__).parent / "terminal"
WRITE: Final = "ONEBITD_WRITE_SCREENS"
"""Set by `--write`: the files are written instead of compared."""

_SGR: Final = re.compile(r"\x1b\[([0-9;]*)m")
_NAMES: Final = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_COLOURS: Final = {
    "1": "bold",
    "2": "dim",
    **{f"3{number}": name for number, name in enumerate(_NAMES)},
    **{f"4{number}": f"on {name}" for number, name in enumerate(_NAMES)},
    **{f"9{number}": f"bright {name}" for number, name in enumerate(_NAMES)},
}
_PROGRESS: Final = re.compile(r"(?:\r\x1b\[K[^\r\n]*?)+(?=\r\x1b\[K)\r\x1b\[K")

SHOWN: Final = (
    (re.compile(r"answers in [\d.]+ ms"), "answers in 1.2 ms"),
    (re.compile(r"127\.0\.0\.1:\d{4,5}"), "127.0.0.1:8000"),
    (re.compile(r"status at \d\d:\d\d:\d\d"), "status at 09:42:17"),
    (re.compile(r"\b(2 min 59 s|3 min( \d s)?) ago"), "3 min ago"),
)
"""What changes in a text from run to run, and what stands for it; in sentences alone, where no
column has to keep its width."""


class Terminal(NamedTuple):
    """One way to run a command; `columns` is None where the output goes into a pipe."""

    name: str
    columns: int | None
    environ: Mapping[str, str] = {}
    is_plain: bool = False
    """Nothing but text is allowed."""
    is_ascii: bool = False


AT_80: Final = Terminal("80 columns", 80)
AT_100: Final = Terminal("100 columns", 100)
AT_160: Final = Terminal("160 columns", 160)
PIPED: Final = Terminal("piped", None, is_plain=True)
NO_COLOR: Final = Terminal("NO_COLOR, 80 columns", 80, {"NO_COLOR": "1"}, is_plain=True)
DUMB: Final = Terminal("TERM=dumb, 80 columns", 80, {"TERM": "dumb"}, is_plain=True)
LC_C: Final = Terminal("LC_ALL=C, 80 columns", 80, {"LC_ALL": "C"})
ASCII: Final = Terminal(
    "ASCII only, 80 columns",
    80,
    # Python takes LC_ALL=C for UTF-8 unless it is told not to.
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    is_ascii=True,
)
ALL: Final = (AT_80, AT_100, AT_160, PIPED, NO_COLOR, ASCII)
EVERY: Final = (*ALL, DUMB, LC_C)
WIDTHS: Final = (AT_80, AT_100, AT_160, PIPED)
FIVE: Final = (*WIDTHS, NO_COLOR)
"""For what says its sentences in every state and to everybody."""
FEW: Final = (AT_80, PIPED, ASCII)


class Screen(NamedTuple):
    """What a run left: the text as a person sees it, its colours, and the exit status."""

    text: str
    colours: tuple[str, ...]
    status: int


@dataclasses.dataclass(frozen=True)
class Desk:
    """Where an operator sits.

    Attributes:
        environ: of the commands; the terminal adds its own.
        shown: texts of this run, such as directories, and what stands for each, longest first.
        become: what runs the command as another user.
    """

    environ: Mapping[str, str]
    shown: Mapping[str, str]
    become: Sequence[str] = ()

    def look(
        self,
        words: Sequence[str],
        terminal: Terminal,
        stdin: bytes = b"",
        interrupt_at: bytes | None = None,
    ) -> Screen:
        """Run a command and check what every command has to keep to; for the rest see `typed`."""
        argv = [*self.become, sys.executable, "-m", "onebitd.surfaces.cli", *words]
        environ = {**self.environ, **terminal.environ}
        if terminal.columns is None:
            screen = _piped(argv, environ, stdin, interrupt_at)
        else:
            screen = _on_terminal(argv, environ, terminal, stdin, interrupt_at)
        if terminal.is_ascii:
            assert screen.text.isascii(), [one for one in screen.text if not one.isascii()]
        return screen._replace(text=self.as_shown(screen.text))

    def as_shown(self, text: str) -> str:
        """Replace what is of this run alone."""
        for real, shown in self.shown.items():
            text = text.replace(real, shown)
        for pattern, shown in SHOWN:
            text = pattern.sub(shown, text)
        return text


def shots(
    desk: Desk,
    words: Sequence[str],
    terminals: Sequence[Terminal] = ALL,
    *,
    tidy: Callable[[str], str] = str,
    at_once: bool = True,
    stdin: bytes = b"",
    interrupt_at: bytes | None = None,
    before: Callable[[], object] | None = None,
) -> str:
    """Return a command in each terminal as a text to hold.

    Args:
        desk: where it is typed.
        words: after `onebitctl`.
        terminals: a text that another one has had already is not repeated.
        tidy: replaces more of what changes.
        at_once: whether the command may run several times at once.
        stdin: what is typed into it.
        interrupt_at: Ctrl-C is typed as soon as a line with this is complete.
        before: done before each run, one at a time: what changes something then finds the same.
    """

    def take(terminal: Terminal) -> Screen:
        if before is not None:
            before()
        screen = desk.look(words, terminal, stdin, interrupt_at)
        return screen._replace(text=tidy(screen.text))

    with ThreadPoolExecutor(3 if at_once and before is None else 1) as pool:
        taken = list(pool.map(take, terminals))
    assert len({screen.status for screen in taken}) == 1, [screen.status for screen in taken]
    lines = [f"$ onebitctl {' '.join(words)}", f"exit status {taken[0].status}"]
    seen: dict[str, str] = {}
    for terminal, screen in zip(terminals, taken, strict=True):
        title = f"-- {terminal.name}"
        if screen.colours:
            title += f" ({', '.join(screen.colours)})"
        if screen.text in seen:
            lines.append(f"{title}: as {seen[screen.text]}")
            continue
        seen[screen.text] = terminal.name
        lines += [title, screen.text]
    return "\n".join(lines) + "\n"


def shots_of_each(
    desk: Desk,
    lines: Sequence[Sequence[str]],
    terminals: Sequence[Terminal] = (AT_80,),
    *,
    tidy: Callable[[str], str] = str,
) -> list[str]:
    """Return `shots` of several commands, two at a time; those that say the same, once."""
    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(lambda words: shots(desk, words, terminals, tidy=tidy), lines))
    typed_for: dict[str, list[str]] = {}
    for text in texts:
        command, _, rest = text.partition("\n")
        typed_for.setdefault(rest, []).append(command)
    return ["\n".join([*commands, rest]) for rest, commands in typed_for.items()]


def hold(name: str, *texts: str) -> None:
    """Compare with a file, or write it; see the module's docstring."""
    path, found = DIRECTORY / f"{name}.txt", "\n".join(texts)
    found = "".join(f"{line.rstrip()}\n" for line in found.splitlines())
    known = path.read_text("utf-8") if path.exists() else ""
    if os.environ.get(WRITE):
        if known != found:
            path.write_text(found, "utf-8")
            print(f"written anew: {path.relative_to(ROOT)}")
        return
    if known != found:
        difference = difflib.unified_diff(
            known.splitlines(), found.splitlines(), str(path.relative_to(ROOT)), "now", lineterm=""
        )
        raise AssertionError(
            "\n".join(difference)
            + "\nif this is meant: python -m tests.e2e.terminal_screens --write -k ..."
        )


def _piped(
    argv: Sequence[str], environ: Mapping[str, str], stdin: bytes, interrupt_at: bytes | None
) -> Screen:
    with subprocess.Popen(
        argv,
        env=environ,
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # communicate() reads past what a buffer has
    ) as process:
        seen = b""
        if interrupt_at is not None:
            assert process.stdout is not None
            while interrupt_at not in seen and (line := process.stdout.readline()):
                seen += line
            process.send_signal(signal.SIGINT)
        rest, told = process.communicate(stdin, 120)
    out, err = (seen + rest).decode(), told.decode()
    assert "\x1b" not in out + err, "ANSI sequences in a pipe"
    assert not out or out.endswith("\n"), out
    text = out.rstrip("\n")
    if err:
        text += ("\n" if text else "") + "-- standard error\n" + err.rstrip("\n")
    return Screen(text, (), process.returncode)


def _on_terminal(
    argv: Sequence[str],
    environ: Mapping[str, str],
    terminal: Terminal,
    stdin: bytes,
    interrupt_at: bytes | None,
) -> Screen:
    data, status = typed(argv, environ, terminal, stdin, interrupt_at)
    text = data.decode()
    assert "Traceback" not in text, text
    return Screen(*seen_on(_PROGRESS.sub("", text), terminal), status)


def typed(
    argv: Sequence[str],
    environ: Mapping[str, str],
    terminal: Terminal,
    stdin: bytes = b"",
    interrupt_at: bytes | None = None,
    lines: int = 50,
) -> tuple[bytes, int]:
    """Run on a terminal of that size; return all that came and the exit status.

    Args:
        argv: the command.
        environ: of it.
        terminal: its columns.
        stdin: what it reads.
        interrupt_at: SIGINT is sent as soon as this has come, and what came last ends.
        lines: of the terminal.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", lines, terminal.columns or 0, 0, 0))
    process = subprocess.Popen(
        argv, env=environ, cwd="/", stdin=subprocess.PIPE, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(stdin)
    data, is_interrupted = b"", False
    while True:
        try:
            more = os.read(ours, 65536)
        except OSError:  # EIO: the other end is closed
            break
        if not more:
            break
        data += more
        is_seen = interrupt_at is not None and interrupt_at in data
        if is_seen and not is_interrupted and data.endswith((b"\n", interrupt_at or b"\n")):
            process.send_signal(signal.SIGINT)
            is_interrupted = True
    os.close(ours)
    return data, process.wait(60)


def seen_on(text: str, terminal: Terminal) -> tuple[str, tuple[str, ...]]:
    """Return the text that a terminal shows and its colours; it is nothing but lines that fit."""
    assert text.endswith("\r\n") or not text, repr(text[-80:])
    plain = _SGR.sub("", text)
    assert "\x1b" not in plain, repr(plain)
    assert not (terminal.is_plain and plain != text), "colours where there must be none"
    # Room for lines that go on in the next, each cell of which costs the emulator time.
    screen = pyte.Screen(terminal.columns or 80, 2 * text.count("\n") + 8)
    pyte.Stream(screen).feed(text)
    shown = [line.rstrip() for line in screen.display]
    while shown and not shown[-1]:
        shown.pop()
    written = [line.rstrip() for line in plain.replace("\r\n", "\n").rstrip("\n").split("\n")]
    wide = [line for line in written if line not in shown]
    assert (shown or [""]) == written, f"lines that do not fit: {wide}"
    return "\n".join(shown), _colours(text)


def _colours(text: str) -> tuple[str, ...]:
    """Return the colours in use; each is taken back in its own line."""
    found = set()
    for line in text.split("\r\n"):
        is_on = False
        for codes in _SGR.findall(line):
            is_on = codes not in ("", "0")
            found |= {_COLOURS[code] for code in codes.split(";") if code not in ("", "0")}
        assert not is_on, f"the colour goes on: {line!r}"
    return tuple(sorted(found))


def main(words: Sequence[str]) -> int:
    """Write the files anew; return pytest's exit status."""
    import pytest

    if "--write" not in words:
        print("usage: python -m tests.e2e.terminal_screens --write [pytest's arguments]")
        return 2
    os.environ[WRITE] = "1"
    rest = [word for word in words if word != "--write"]
    tests = map(str, sorted(Path(__file__).parent.glob("test_terminal*.py")))
    return int(pytest.main(["-q", "-s", *tests, *rest]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
