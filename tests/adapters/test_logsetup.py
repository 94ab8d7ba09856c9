"""onebitd.adapters.logsetup on real descriptors: pipes, a terminal, a bound journal socket."""

from __future__ import annotations

import array
import contextlib
import datetime as dt
import fcntl
import io
import json
import logging
import os
import pty
import re
import socket
import struct
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
import structlog

from onebitd.adapters import logsetup
from onebitd.core.errors import ConfigError


@pytest.fixture(autouse=True)
def _take_back() -> Iterator[None]:
    yield
    logsetup.shutdown()
    structlog.reset_defaults()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[socket.socket]:
    """Play the journal's end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "journal"))
        sock.setblocking(False)
        yield sock


class Pipe:
    """A pipe whose writing end is the log's stream."""

    def __init__(self) -> None:
        reader, writer = os.pipe()
        self.reader = open(reader, "rb", buffering=0)  # noqa: SIM115 - the fixture closes it
        self.stream: TextIO = open(writer, "w")  # noqa: SIM115 - the fixture closes it
        os.set_blocking(reader, False)

    def text(self) -> str:
        return (self.reader.read(1 << 20) or b"").decode()

    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text().splitlines()]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.reader.close()
    made.stream.close()


def parse_entry(data: bytes) -> dict[str, str]:
    """Read an entry of the journal's native protocol by its own rules."""
    found: dict[str, str] = {}
    while data:
        head, _, rest = data.partition(b"\n")
        if b"=" in head:
            name, _, value = head.partition(b"=")
        else:
            name, (length,) = head, struct.unpack_from("<Q", rest)
            value, rest = rest[8 : 8 + length], rest[8 + length :]
            assert rest[:1] == b"\n"
            rest = rest[1:]
        found[name.decode()] = value.decode()
        data = rest
    return found


def test_json_one_object_a_line_in_order(pipe: Pipe) -> None:
    """time, level and event come first, then the fields as they were given."""
    logsetup.configure("json", "info", stream=pipe.stream)
    structlog.get_logger().info("handoff", line="hybrid: ü", prompt_tokens=307, b=None, a=[1.5])
    (text,) = pipe.text().splitlines()
    found = json.loads(text)
    assert list(found) == ["time", "level", "event", "line", "prompt_tokens", "b", "a"]
    assert found["level"] == "info"
    assert found["event"] == "handoff"
    assert found["line"] == "hybrid: ü"
    assert found["a"] == [1.5]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found["time"])
    age = dt.datetime.now(dt.UTC) - dt.datetime.fromisoformat(found["time"])
    assert dt.timedelta(0) <= age < dt.timedelta(minutes=1)


def test_json_fields_named_time_and_level(pipe: Pipe) -> None:
    """A handoff's own `time` stays; the line's level cannot be forged."""
    logsetup.configure("json", "info", stream=pipe.stream)
    structlog.get_logger().warning("handoff", time="2026-01-01T00:00:00Z", level="debug")
    (found,) = pipe.objects()
    assert (found["time"], found["level"]) == ("2026-01-01T00:00:00Z", "warning")


def test_json_odd_values_are_still_one_valid_line(pipe: Pipe) -> None:
    """NaN, bytes, sets, objects, circles, lone surrogates and newlines make valid JSON."""
    logsetup.configure("json", "info", stream=pipe.stream)
    circle: dict[str, Any] = {}
    circle["self"] = circle
    log = structlog.get_logger()
    log.info("odd", nan=float("nan"), inf=[float("inf")], path=Path("/x"), raw=b"\xff", s={1})
    log.info("circle", circle=circle, keys={1: 2})
    log.info("text", surrogate="\udc80", newline="a\nb")
    found = pipe.objects()
    assert found[0]["nan"] == "nan"
    assert found[0]["inf"] == ["inf"]
    assert found[0]["path"] == "/x"
    assert found[0]["s"] == [1]
    assert found[1]["event"] == "circle"
    assert found[2]["surrogate"] == "\udc80"
    assert found[2]["newline"] == "a\nb"


def test_text_line_is_the_message(pipe: Pipe) -> None:
    """`line` is what a person reads; without one the event and its fields."""
    logsetup.configure("text", "info", stream=pipe.stream)
    log = structlog.get_logger()
    log.info("handoff", line="hybrid: 307 prompt tokens", prompt_tokens=307)
    log.warning("lock_lost", path="/tmp/a b", held=True, n=1.5, none="")
    first, second = pipe.text().splitlines()
    assert re.fullmatch(r"\S+Z info     hybrid: 307 prompt tokens", first)
    assert second.endswith(' warning  lock_lost path="/tmp/a b" held=true n=1.5 none=""')


def test_text_control_characters_cannot_drive_the_terminal(pipe: Pipe) -> None:
    """Escape sequences and newlines from a child are shown, not obeyed."""
    logsetup.configure("text", "info", stream=pipe.stream)
    structlog.get_logger().info("x", line="a\x1b[2Jb\nc\x9b")
    assert pipe.text().endswith(" a\\x1b[2Jb\\x0ac\\x9b\n")


def test_exception_is_in_every_format(pipe: Pipe, journal: socket.socket, tmp_path: Path) -> None:
    """The traceback follows the text, is a field in JSON and in the journal."""
    for kind in ("text", "json", "journal"):
        logsetup.configure(
            kind, "info", stream=pipe.stream, journal_socket=str(tmp_path / "journal")
        )
        try:
            raise ValueError("boom")
        except ValueError:
            structlog.get_logger().exception("failed", n=1)
    text = pipe.text()
    assert "failed n=1\nTraceback (most recent call last):\n" in text
    assert "\nValueError: boom\n" in text
    assert json.loads(text.splitlines()[-1])["exception"].endswith("ValueError: boom")
    entry = parse_entry(journal.recv(1 << 20))
    assert entry["ONEBIT_EXCEPTION"].endswith("\nValueError: boom")
    assert entry["PRIORITY"] == "3"


def read_terminal(environ: dict[str, str]) -> str:
    leader, follower = pty.openpty()
    with open(leader, "rb", buffering=0) as reader, open(follower, "w") as stream:
        logsetup.configure("auto", "info", stream=stream, environ=environ)
        structlog.get_logger().error("gone", n=1)
        return reader.read(4096).decode()


def test_auto_terminal_is_coloured_text() -> None:
    """On a terminal the level has its colour."""
    assert "\x1b[31merror   \x1b[0m gone n=1" in read_terminal({"TERM": "xterm"})


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_auto_terminal_without_colour_is_plain_text(environ: dict[str, str]) -> None:
    """NO_COLOR and a dumb terminal get text without escapes."""
    text = read_terminal(environ)
    assert "error    gone n=1" in text
    assert "\x1b" not in text


def test_auto_pipe_is_json(pipe: Pipe) -> None:
    """Neither journal nor terminal: JSON, also when JOURNAL_STREAM names another stream."""
    logsetup.configure("auto", "info", stream=pipe.stream, environ={"JOURNAL_STREAM": "1:2"})
    structlog.get_logger().info("x")
    assert pipe.objects()[0]["event"] == "x"


def test_auto_journal_stream_is_the_journal(
    pipe: Pipe, journal: socket.socket, tmp_path: Path
) -> None:
    """When the stream is what systemd connected, entries go to the journal with their fields."""
    info = os.fstat(pipe.stream.fileno())
    logsetup.configure(
        "auto",
        "info",
        stream=pipe.stream,
        environ={"JOURNAL_STREAM": f"{info.st_dev}:{info.st_ino}"},
        journal_socket=str(tmp_path / "journal"),
    )
    structlog.get_logger().warning(
        "handoff",
        line="hybrid: fell back",
        request_id="r42",
        prefill_ms=12.5,
        detail="two\nlines",
        stream=True,
        odd_nämé=1,
        nothing=None,
    )
    assert parse_entry(journal.recv(65536)) == {
        "MESSAGE": "hybrid: fell back",
        "PRIORITY": "4",
        "SYSLOG_IDENTIFIER": "onebitd",
        "ONEBIT_EVENT": "handoff",
        "ONEBIT_REQUEST_ID": "r42",
        "ONEBIT_PREFILL_MS": "12.5",
        "ONEBIT_DETAIL": "two\nlines",
        "ONEBIT_STREAM": "true",
        "ONEBIT_ODD_N_M_": "1",
    }
    assert pipe.text() == ""


def test_journal_huge_entry_arrives_as_a_sealed_file(
    pipe: Pipe, journal: socket.socket, tmp_path: Path
) -> None:
    """Beyond the datagram limit the entry travels in a memfd that nobody can change."""
    logsetup.configure(
        "journal", "info", stream=pipe.stream, journal_socket=str(tmp_path / "journal")
    )
    before = len(os.listdir("/proc/self/fd"))
    structlog.get_logger().info("big", body="x" * 3_000_000)
    data, ancillary, _, _ = journal.recvmsg(1024, socket.CMSG_SPACE(4))
    assert data == b""
    (fd,) = array.array("i", ancillary[0][2])
    try:
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == (
            fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        )
        entry = parse_entry(os.pread(fd, os.fstat(fd).st_size, 0))
    finally:
        os.close(fd)
    assert len(entry["ONEBIT_BODY"]) == 3_000_000
    assert len(os.listdir("/proc/self/fd")) == before


def test_journal_gone_falls_back_to_json_and_comes_back(pipe: Pipe, tmp_path: Path) -> None:
    """While nobody serves the journal lines go to stderr; after its restart entries flow again."""
    path = tmp_path / "journal"
    logsetup.configure("journal", "info", stream=pipe.stream, journal_socket=str(path))
    log = structlog.get_logger()
    log.info("absent")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(path))
        log.info("present")
        assert parse_entry(sock.recv(65536))["ONEBIT_EVENT"] == "present"
    log.info("refused")
    assert [found["event"] for found in pipe.objects()] == ["absent", "refused"]


def test_journal_that_does_not_read_never_blocks(
    pipe: Pipe, journal: socket.socket, tmp_path: Path
) -> None:
    """A full queue costs entries; reading again brings new ones and the loss."""
    logsetup.configure(
        "journal", "info", stream=pipe.stream, journal_socket=str(tmp_path / "journal")
    )
    log = structlog.get_logger()
    for number in range(5000):
        log.info("fill", number=number)
    found = 0
    with contextlib.suppress(BlockingIOError):
        while journal.recv(65536):
            found += 1
    assert 0 < found < 5000
    log.info("after")
    assert parse_entry(journal.recv(65536))["ONEBIT_EVENT"] == "after"
    assert parse_entry(journal.recv(65536))["ONEBIT_COUNT"] == str(5000 - found)


def test_level_filters_and_can_change_for_bound_loggers(pipe: Pipe) -> None:
    """A level change reaches loggers that were bound before it, in both directions."""
    logsetup.configure("json", "info", stream=pipe.stream)
    bound = structlog.get_logger().bind(instance="qwen")
    bound.debug("hidden")
    logsetup.set_level("debug")
    assert logsetup.get_level() == "debug"
    bound.debug("seen")
    logsetup.set_level("error")
    bound.warning("hidden")
    bound.error("seen")
    found = pipe.objects()
    assert [(item["event"], item["level"]) for item in found] == [
        ("seen", "debug"),
        ("seen", "error"),
    ]
    assert found[0]["instance"] == "qwen"


def test_level_below_is_an_empty_call(pipe: Pipe) -> None:
    """A filtered-out call does not even look at its values."""

    class Explosive:
        def __str__(self) -> str:
            raise AssertionError("rendered")

    logsetup.configure("text", "info", stream=pipe.stream)
    structlog.get_logger().debug("x", value=Explosive())
    assert pipe.text() == ""


def test_value_that_cannot_be_rendered_does_not_raise(pipe: Pipe) -> None:
    """A field whose str() fails costs that line's fields, not the caller."""

    class Explosive:
        def __str__(self) -> str:
            raise RuntimeError("no")

    for kind in ("json", "text"):
        logsetup.configure(kind, "info", stream=pipe.stream)
        structlog.get_logger().info("x", value=Explosive())
    first, second = pipe.text().splitlines()
    assert json.loads(first)["event"] == "log_failed"
    assert second.endswith("log_failed of=x")


def test_stream_without_reader_does_not_raise(pipe: Pipe) -> None:
    """EPIPE ends in silence."""
    logsetup.configure("json", "info", stream=pipe.stream)
    pipe.reader.close()
    structlog.get_logger().info("x")


def test_stream_on_full_disk_does_not_raise() -> None:
    """ENOSPC ends in silence."""
    with open("/dev/full", "w") as stream:
        logsetup.configure("text", "info", stream=stream)
        structlog.get_logger().info("x")


def test_stream_closed_does_not_raise() -> None:
    """A closed stream, with a descriptor or without, ends in silence."""
    memory = io.StringIO()
    logsetup.configure("json", "info", stream=memory)
    log = structlog.get_logger()
    log.info("x")
    assert json.loads(memory.getvalue())["event"] == "x"
    memory.close()
    log.info("y")
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    with open(os.devnull, "w") as file:
        logsetup.configure("json", "info", stream=file)
        number = file.fileno()
    # The number now belongs to another file, which must not get our lines.
    os.dup2(writer, number)
    log.info("z")
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)
    for fd in (reader, writer, number):
        os.close(fd)


def test_stream_full_drops_lines_says_how_many_and_tears_none(pipe: Pipe) -> None:
    """A non-blocking stderr that nobody reads costs whole lines; the loss is told afterwards."""
    os.set_blocking(pipe.stream.fileno(), False)
    logsetup.configure("json", "info", stream=pipe.stream)
    log = structlog.get_logger()
    for number in range(400):
        log.info("fill", number=number, padding="x" * 1000)
    seen = pipe.text()
    log.info("after")
    lines = (seen + pipe.text()).splitlines()
    numbers: list[int] = []
    rest: list[dict[str, Any]] = []
    torn = 0
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            torn += 1
            continue
        if found["event"] == "fill":
            numbers.append(found["number"])
        else:
            rest.append(found)
    assert numbers == list(range(len(numbers)))
    assert 0 < len(numbers) < 400
    assert torn <= 1  # the one that the pipe cut; nothing is glued to it
    assert rest[0]["event"] == "log_lines_lost"
    assert rest[0]["count"] == 400 - len(numbers)
    assert rest[1]["event"] == "after"


def test_library_records_come_in_from_warning_on(pipe: Pipe) -> None:
    """A library's warning has its logger's name; its info does not come in."""
    logsetup.configure("json", "debug", stream=pipe.stream)
    logging.getLogger("hypercorn.error").info("hidden")
    logging.getLogger("hypercorn.error").warning("bad %s", "thing")
    logging.getLogger("hypercorn.error").error("gone")
    found = pipe.objects()
    assert [(item["level"], item["logger"], item["line"]) for item in found] == [
        ("warning", "hypercorn.error", "bad thing"),
        ("error", "hypercorn.error", "gone"),
    ]


def test_library_record_with_bad_format_does_not_raise(pipe: Pipe) -> None:
    """A library's broken format string is logged as it is."""
    logsetup.configure("json", "info", stream=pipe.stream)
    alone = logging.Logger("alone")
    alone.handlers = [
        handler
        for handler in logging.getLogger().handlers
        if type(handler).__module__ == logsetup.__name__
    ]
    alone.error("broken %d", "format")
    assert pipe.objects()[0]["line"] == "broken %d"


def test_library_warnings_come_in(pipe: Pipe) -> None:
    """warnings.warn of a library becomes a log line."""
    logsetup.configure("json", "info", stream=pipe.stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old thing", DeprecationWarning, stacklevel=1)
    (found,) = pipe.objects()
    assert found["logger"] == "py.warnings"
    assert "old thing" in found["line"]


def test_configure_twice_does_not_double(pipe: Pipe) -> None:
    """Configuring again replaces: one handler, one line."""
    logsetup.configure("json", "info", stream=pipe.stream)
    logsetup.configure("json", "info", stream=pipe.stream)
    logging.getLogger("x").warning("once")
    assert len(pipe.objects()) == 1


def test_configure_unknown_words_are_config_errors() -> None:
    """A wrong format or level names its key and the words that exist."""
    with pytest.raises(ConfigError, match=r"log\.format: 'xml' is none of auto, json"):
        logsetup.configure("xml", "info")
    with pytest.raises(ConfigError, match=r"log\.level: 'loud' is none of debug"):
        logsetup.configure("json", "loud")


def test_process_whose_stderr_is_gone_still_exits_clean() -> None:
    """After lost lines the interpreter's exit flushes nothing and complains about nothing."""
    script = (
        "import structlog\n"
        "from onebitd.adapters import logsetup\n"
        "logsetup.configure('auto', 'info')\n"
        "for n in range(100):\n"
        "    structlog.get_logger().info('x', n=n)\n"
        "print('done')\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", script], stderr=writer, stdout=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stdout) == (0, b"done\n")
