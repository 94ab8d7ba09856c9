"""`onebitctl try`: one chat over the public address, and where the time to its first byte went.

What the other commands do not need is imported by the functions that do: those start faster.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TextIO

from onebitd.core.errors import UsageError
from onebitd.surfaces import cli_terminal
from onebitd.surfaces.cli_numbers import positive_int
from onebitd.surfaces.cli_terminal import write

if TYPE_CHECKING:
    from onebitd.surfaces.cli_public import Event

MAX_TOKENS: Final = 512
"""Of the reply, when nothing else is said: some models never end by themselves."""

_POLICIES: Final = ("auto", "always", "never", "strict")
_CHAT_PATH: Final = "/v1/chat/completions"
_SHOWN: Final = "\n\t\u200c\u200d"
"""Not printable, and harmless: these two hold letters and emoji together."""


def register(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    where: argparse.ArgumentParser,
) -> None:
    """Add the command to a parser; `where` has the options that name a daemon."""
    parser = commands.add_parser(
        "try",
        help="one chat, and where its time went",
        description="Have one chat with the model over the daemon's public address. The reply goes"
        " to standard output as it comes; what became of the handoff, to standard error.",
        epilog="Exit status: 0 the reply is complete; 1 the daemon answered with an error; 2 usage;"
        " 3 no daemon there; 4 permission denied.",
        parents=[where],
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--json", action="store_true", help="one object with the reply and its record")
    add("--system", metavar="TEXT", help="what the model is told first")
    add(
        "--max-tokens",
        metavar="N",
        type=positive_int,
        default=MAX_TOKENS,
        help=f"longest reply in tokens (default: {MAX_TOKENS})",
    )
    add(
        "--temperature",
        metavar="T",
        type=_temperature,
        help="0 for the likeliest reply (default: the decoder's)",
    )
    add(
        "--policy",
        metavar="POLICY",
        choices=_POLICIES,
        help=f"of the handoff: {', '.join(_POLICIES)} (default: the daemon's)",
    )
    add(
        "--api-key-file",
        metavar="FILE",
        help="file whose first key is the API key"
        " (default: the daemon's own file, when it can be read)",
    )
    add(
        "prompt",
        metavar="PROMPT",
        nargs="*",
        help="the words of the prompt; - or nothing: standard input",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Have the chat; the client's errors say what went wrong."""
    from onebitd.surfaces import cli_public as public

    prompt = _prompt(arguments.prompt)
    control = public.control_client(arguments.instance, arguments.socket)
    status = control.status()
    public.require_serving(status)
    address = public.address_in(status.get("listen"))
    client = public.PublicClient(address, public.find_key(control, arguments.api_key_file))
    request_id = public.new_id("try")
    headers = {"X-Request-Id": request_id}
    if arguments.policy is not None:
        headers["X-Onebit-Handoff"] = arguments.policy
    events = client.stream(_CHAT_PATH, _body(arguments, prompt), headers)
    try:
        if arguments.json:
            reply = _reply(events)
        else:
            _Printer().print_all(events)
    finally:
        events.close()  # the request ends with its connection
    record = public.record_of(control, request_id)
    if arguments.json:
        write(json.dumps({"reply": reply, "record": record}) + "\n")
    else:
        _tell_parts(record)
    return 0


def _prompt(words: list[str]) -> str:
    """Return the prompt; it is read from standard input for `-`, and for none that is piped."""
    if words and words != ["-"]:
        text = _utf8(" ".join(words), "the prompt")
    elif sys.stdin is not None and (words or not sys.stdin.isatty()):
        try:
            text = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError:
            raise UsageError("the prompt on standard input is not UTF-8") from None
    else:
        text = ""
    if not text.strip():
        raise UsageError("there is no prompt: write one behind `onebitctl try`, or pipe one in")
    return text


def _utf8(text: str, what: str) -> str:
    """Return a text of the command line, of which Python keeps bytes that are none as they are."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} on the command line is not UTF-8") from None
    return text


def _body(arguments: argparse.Namespace, prompt: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    if arguments.system is not None:
        system = _utf8(arguments.system, "--system")
        messages.insert(0, {"role": "system", "content": system})
    body: dict[str, Any] = {"messages": messages, "max_tokens": arguments.max_tokens}
    if arguments.temperature is not None:
        body["temperature"] = arguments.temperature
    return body


def _pieces(events: Iterator[Event]) -> Iterator[tuple[str, bool]]:
    """Yield each piece of text, and whether it is only what the model thinks to itself."""
    for event in events:
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            delta = choice.get("delta") if isinstance(choice, dict) else None
            if not isinstance(delta, dict):
                continue
            for name in ("reasoning_content", "content"):
                text = delta.get(name)
                if isinstance(text, str) and text:
                    yield text, name != "content"


def _reply(events: Iterator[Event]) -> str:
    """Return the whole reply, without what the model thinks to itself."""
    return "".join(text for text, is_thought in _pieces(events) if not is_thought)


class _Printer:
    """Writes a reply as it comes: harmless on a terminal, as it is into a file.

    What the model thinks to itself is shown on a terminal alone, dim, and is never part of the
    output.
    """

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._shows_thoughts = self._is_terminal and sys.stderr.isatty()
        self._thinks = False
        self._last = "\n"

    def print_all(self, events: Iterator[Event]) -> None:
        """Write it all; the last line gets an end, also when it is broken off."""
        try:
            for text, is_thought in _pieces(events):
                if is_thought:
                    self._think(text)
                else:
                    self._say(text)
        finally:
            self._end_thoughts()
            if self._last != "\n":
                write("\n")
            sys.stdout.flush()

    def _say(self, text: str) -> None:
        self._end_thoughts()
        self._last = text[-1]
        write(harmless(text) if self._is_terminal else text)
        sys.stdout.flush()

    def _think(self, text: str) -> None:
        if not self._shows_thoughts:
            return
        dim = "\x1b[2m" if not self._thinks and cli_terminal.has_colour(sys.stderr) else ""
        self._thinks = True
        write(dim + harmless(text), sys.stderr)
        sys.stderr.flush()

    def _end_thoughts(self) -> None:
        if self._thinks:
            self._thinks = False
            write("\x1b[0m\n" if cli_terminal.has_colour(sys.stderr) else "\n", sys.stderr)
            sys.stderr.flush()


def harmless(text: str) -> str:
    """Return a piece of text without what would move the cursor or turn the line around.

    >>> harmless("one\\n\\x1b[2Jtwo")
    'one\\n?[2Jtwo'
    """
    return "".join(
        letter
        if letter.isprintable() or letter in _SHOWN
        else " "
        if letter.isspace() and letter > "\x7f"
        else "?"
        for letter in text
        if letter != "\r"
    )


def _tell_parts(record: Mapping[str, Any] | None) -> None:
    """Write to standard error what became of the handoff."""
    from onebitd.surfaces import cli_text, try_pages

    stream = sys.stderr
    if record is None:
        write("onebitctl: the daemon has no record of this request\n", stream)
        return
    columns, colour = cli_text.PAGE_COLUMNS, False
    if stream.isatty():
        colour = cli_terminal.has_colour(stream)
        with contextlib.suppress(OSError):
            columns = os.get_terminal_size(stream.fileno()).columns or columns
    page = try_pages.parts_page(
        record, columns, colour=colour, blocks=_can_write(stream, try_pages.BLOCKS)
    )
    write(f"\n{page}\n", stream)


def _can_write(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _temperature(text: str) -> float:
    """Return a number from 0 to 100."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 100")
    return value
