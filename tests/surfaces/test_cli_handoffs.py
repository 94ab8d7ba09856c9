"""`onebitctl handoffs`: its table at every width, its summary, its filters, its history file."""

from __future__ import annotations

import csv
import datetime as dt
import io
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import tempfile
import termios
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest
import trio

from onebitd.adapters.history_store import HistoryStore, Keep
from onebitd.client import AccessDenied, NoDaemon
from onebitd.core.errors import UsageError
from onebitd.core.first_byte import PARTS, parts_of
from onebitd.core.handoff import FIELDS, Outcome, Reason, Route
from onebitd.core.handoff_summary import summarise
from onebitd.surfaces import cli_bar, cli_handoff_summary
from onebitd.surfaces.cli_handoff_csv import csv_lines
from onebitd.surfaces.cli_handoff_table import (
    ONE_LINE_COLUMNS,
    WIDE_COLUMNS,
    Layout,
    short_ms,
    table,
)
from onebitd.surfaces.cli_history_file import choose_history
from onebitd.surfaces.cli_width import columns_of, cut
from tests.surfaces.cli_child import (
    INSTANCE,
    PROGRAM,
    Served,
    environment,
    modules_loaded,
    run,
    serving,
)
from tests.surfaces.control_server import make_record

TODAY = dt.date(2026, 5, 1)
USED = make_record(
    1,
    route=Route.FILE,
    evaluated_tokens=1,
    handed_tokens=306,
    queue_ms=0.2,
    template_ms=0.9,
    tokenize_ms=0.5,
    lock_ms=0.1,
    prefill_ms=61.3,
    provider_wall_ms=68.1,
    restore_ms=6.4,
    first_byte_ms=88.3,
    reply_tokens=40,
    decode_ms=1320.0,
    gpu_busy_percent=34.0,
)
FALLBACK = make_record(
    2,
    Outcome.FALLBACK,
    reason=Reason.PROVIDER_EXIT,
    detail="status 3: no XDNA device 通道\x1b[2J was found on this machine",
    evaluated_tokens=307,
    queue_ms=300.0,
    lock_ms=2.0,
    provider_wall_ms=240.0,
    first_byte_ms=1520.0,
)
SKIPPED = make_record(
    86,
    Outcome.SKIPPED,
    reason=Reason.UNSUPPORTED_MODEL,
    detail="it has no cache to hand over",
    prompt_tokens=131072,
    evaluated_tokens=131072,
    first_byte_ms=123456.0,
)
CANCELLED = make_record(90, Outcome.CANCELLED, reason=Reason.CLIENT_GONE)
SHARED = make_record(
    100,
    time="2026-05-02T09:00:00.000Z",
    route=Route.SHARED,
    share_ms=0.4,
    adopt_ms=0.05,
    evaluated_tokens=1,
    handed_tokens=306,
    queue_ms=30.0,
    lock_ms=7.0,
    prefill_ms=61.3,
    provider_wall_ms=68.1,
    first_byte_ms=140.0,
)
RECORDS = (USED, FALLBACK, SKIPPED, CANCELLED, SHARED)

AT_80 = """\
first byte: q queue  t tokens  l lock  p provider  r restore  d decoder
TIME      OUTCOME    PROMPT    EVAL  PREFILL  RESTORE  1ST BYTE  PARTS
12:00:01  used          307       1  61.3 ms  6.40 ms   88.3 ms  pppppppppppprdd
12:00:02  fallback      307     307        -        -    1.52 s  qqqppdddddddddd
          provider_exit: status 3: no XDNA device 通道?[2J was found on this ma…
12:01:26  skipped    131072  131072        -        -     123 s  ddddddddddddddd
          unsupported_model: it has no cache to hand over
12:01:30  cancelled     307       -        -        -         -
          client_gone
Sat 2026-05-02
09:00:00  used          307       1  61.3 ms  0.45 ms    140 ms  qqqlpppppppdddd
"""

AT_100 = """\
first byte: q queue  t tokens  l lock  p provider  r restore  d decoder
TIME      OUTCOME    PROMPT    EVAL  PREFILL  RESTORE  1ST BYTE  PARTS       REASON
12:00:01  used          307       1  61.3 ms  6.40 ms   88.3 ms  pppppppprd
12:00:02  fallback      307     307        -        -    1.52 s  qqppdddddd  provider_exit: status…
12:01:26  skipped    131072  131072        -        -     123 s  dddddddddd  unsupported_model: it…
12:01:30  cancelled     307       -        -        -         -              client_gone
Sat 2026-05-02
09:00:00  used          307       1  61.3 ms  0.45 ms    140 ms  qqlpppppdd
"""

AT_160 = """\
first byte: q queue  t tokens  l lock  p provider  r restore  d decoder
TIME      OUTCOME    PROMPT    EVAL  PREFILL  RESTORE  1ST BYTE  PREFILL/S  DECODE/S  ROUTE     GPU\
  PARTS                 REASON
12:00:01  used          307       1  61.3 ms  6.40 ms   88.3 ms       4992      30.3  file     34 %\
  pppppppppppppppprddd
12:00:02  fallback      307     307        -        -    1.52 s          -         -  -           -\
  qqqqpppddddddddddddd  provider_exit: status 3: no XDNA dev…
12:01:26  skipped    131072  131072        -        -     123 s          -         -  -           -\
  dddddddddddddddddddd  unsupported_model: it has no cache t…
12:01:30  cancelled     307       -        -        -         -          -         -  -           -\
                        client_gone
Sat 2026-05-02
09:00:00  used          307       1  61.3 ms  0.45 ms    140 ms       4992         -  shared      -\
  qqqqlppppppppppddddd
"""

PIPED = AT_100.replace(
    "provider_exit: status…",
    "provider_exit: status 3: no XDNA device 通道?[2J was found on this machine",
).replace("unsupported_model: it…", "unsupported_model: it has no cache to hand over")

SUMMARY_AT_100 = """\
5 handoffs, Fri 2026-05-01 12:00:01 to Sat 2026-05-02 09:00:00

OUTCOME              COUNT    SHARE  1ST BYTE p50, p95
used                     2   40.0 %  88.3 ms    140 ms
fallback                 1   20.0 %   1.52 s    1.52 s
skipped                  1   20.0 %    123 s     123 s
cancelled                1   20.0 %        -         -

REASON             OUTCOME      COUNT    SHARE  1ST BYTE p50, p95  MEANING
provider_exit      fallback         1   20.0 %   1.52 s    1.52 s  the provider failed
client_gone        cancelled        1   20.0 %        -         -  the client left
unsupported_model  skipped          1   20.0 %    123 s     123 s  not possible with this model

                                  all                used            fallback             skipped
PART                    p50       p95       p50       p95       p50       p95       p50       p95
queue               30.0 ms    300 ms   0.20 ms   30.0 ms    300 ms    300 ms         -         -
template            0.90 ms   0.90 ms   0.90 ms   0.90 ms         -         -         -         -
tokenize            0.50 ms   0.50 ms   0.50 ms   0.50 ms         -         -         -         -
lock                2.00 ms   7.00 ms   0.10 ms   7.00 ms   2.00 ms   2.00 ms         -         -
prefill             61.3 ms   61.3 ms   61.3 ms   61.3 ms         -         -         -         -
provider wall       68.1 ms    240 ms   68.1 ms   68.1 ms    240 ms    240 ms         -         -
restore             6.40 ms   6.40 ms   6.40 ms   6.40 ms         -         -         -         -
share               0.40 ms   0.40 ms   0.40 ms   0.40 ms         -         -         -         -
adopt               0.05 ms   0.05 ms   0.05 ms   0.05 ms         -         -         -         -
first byte           140 ms     123 s   88.3 ms    140 ms    1.52 s    1.52 s     123 s     123 s

tokens           prompt 132300, handed 612, evaluated 131381, cached 0, reply 40
tokens/s, p50    prefill by the provider 4991.8, decode 30.3
"""


@pytest.fixture
async def served() -> AsyncGenerator[Served]:
    """The control app on the socket of an instance."""
    async with serving() as found:
        yield found


@pytest.fixture(autouse=True)
def zone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are shown in UTC, and no service of this machine is looked at."""
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setattr("onebitd.core.paths.SYSTEM_STATE", "/nonexistent/onebitd")


def drawn(
    width: int | None, *records: dict[str, Any], colour: bool = False, blocks: bool = True
) -> str:
    """Return the table of the records, or of those above."""
    shown = records or tuple(record.fields() for record in RECORDS)
    found = table(shown, lambda: Layout(width, colour, blocks), TODAY)
    return "".join(f"{line}\n" for lines in found for line in lines)


def plain(text: str) -> str:
    """Return a text without its colours."""
    return re.sub(r"\x1b\[[\d;]*m", "", text)


@pytest.mark.parametrize(
    ("width", "text"), [(80, AT_80), (100, AT_100), (160, AT_160), (None, PIPED)]
)
def test_handoffs_table_at_each_width_is_the_documented_text(width: int | None, text: str) -> None:
    """Two lines a handoff at 80 columns, one at 100, rates and route at 160, all in a pipe."""
    assert drawn(width) == text
    assert width is None or max(map(columns_of, text.splitlines())) <= width


@pytest.mark.parametrize("width", [30, 45, 54, 62, 63, 73, 79, 99, 100, 139, 140, 400])
@pytest.mark.parametrize("colour", [False, True])
def test_handoffs_table_at_any_width_fits_and_keeps_every_reason_whole(
    width: int, colour: bool
) -> None:
    """The detail is what is cut, by the columns that it takes; the first byte is always there."""
    records = [
        make_record(outcome=Outcome.FALLBACK, reason=reason, detail="通" * 200, first_byte_ms=9.0)
        for reason in Reason
    ]
    text = plain(drawn(width, *(record.fields() for record in records), colour=colour))
    assert max(map(columns_of, text.splitlines())) <= width
    assert text.count("9.00 ms") == len(records)
    for reason in Reason:
        assert re.search(rf"(?m)(^ {{10}}|  ){reason}(: ?通*…|:…|)$", text), reason
    assert "…" in text
    assert (len(text.splitlines()) > 2 * len(records)) is (width < ONE_LINE_COLUMNS)
    assert ("DECODE/S" in text) is (width >= WIDE_COLUMNS)


def test_handoffs_table_in_ascii_has_nothing_else() -> None:
    """An encoding without blocks gets letters and another sign for what was cut."""
    text = drawn(100, FALLBACK.fields() | {"detail": "x" * 99}, blocks=False)
    assert text.isascii()
    assert text.endswith("  qqppdddddd  provider_exit: xxxxxxx~\n")
    coloured = drawn(100, FALLBACK.fields() | {"detail": "x" * 99}, colour=True, blocks=False)
    assert plain(coloured) == text
    assert "\x1b[33mqq\x1b[0m\x1b[35mpp\x1b[0m\x1b[34mdddddd\x1b[0m" in coloured


def test_handoffs_table_in_colour_has_a_bar_of_blocks_by_eighths() -> None:
    """Each part has its colour; where one part ends in a column, the next is behind it."""
    record = make_record(queue_ms=10.0, provider_wall_ms=55.0, first_byte_ms=80.0).fields()
    text = drawn(100, record, colour=True)
    parts = ("[33m█", "[33;45m▎", "[35m██████", "[35;44m▏", "[34m█")
    bar = "".join(f"\x1b{part}\x1b[0m" for part in parts)
    assert text.endswith(f"   80.0 ms  {bar}\n")
    assert "\x1b[32mused     \x1b[0m" in text
    assert text.startswith("first byte: \x1b[33m█\x1b[0m queue  \x1b[36m█\x1b[0m tokens  ")


@pytest.mark.parametrize("width", [1, 8, 20])
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: str(record.outcome))
def test_bar_of_any_record_is_as_wide_as_asked(record: Any, width: int) -> None:
    """A table stays aligned whatever a first byte was made of."""
    for colour, blocks in ((False, True), (True, True), (True, False)):
        parts = parts_of(record.fields())
        assert len(plain(cli_bar.bar(parts, width, colour=colour, blocks=blocks))) == width


def test_bar_three_parts_in_one_column_are_the_first_and_the_largest_of_the_others() -> None:
    """A character has two colours."""
    parts = {"queue": 2.0, "lock": 2.0, "decoder": 4.0}
    assert cli_bar.bar(parts, 1, colour=True, blocks=True) == "\x1b[33;44m▎\x1b[0m"


def test_bar_letters_and_colours_are_one_for_each_part() -> None:
    """Nobody could tell two parts apart otherwise."""
    assert len({name[0] for name in PARTS}) == len(PARTS)
    assert cli_bar._COLOURS.keys() == set(PARTS)
    assert len(set(cli_bar._COLOURS.values())) == len(PARTS)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"first_byte_ms": 50.0}, {"decoder": 50.0}),
        (
            {"first_byte_ms": 50.0, "queue_ms": 5, "template_ms": 1, "tokenize_ms": 2},
            {"queue": 5.0, "tokens": 3.0, "decoder": 42.0},
        ),
        (
            {"first_byte_ms": 50.0, "prefill_ms": 20.0, "share_ms": 1.0, "adopt_ms": 2.0},
            {"provider": 20.0, "restore": 3.0, "decoder": 27.0},
        ),
        (
            {"first_byte_ms": 50.0, "queue_ms": 75.0, "provider_wall_ms": 25.0},
            {"queue": 37.5, "provider": 12.5},
        ),
        (
            {
                "first_byte_ms": 50.0,
                "provider_at_ms": 2.0,
                "provider_wall_ms": 20.0,
                "check_ms": 9.0,
                "handed_at_ms": 26.0,
                "restore_ms": 6.0,
            },
            {"provider": 20.0, "restore": 10.0, "decoder": 20.0},
        ),
        ({"first_byte_ms": 50.0, "queue_ms": "1", "lock_ms": True}, {"decoder": 50.0}),
    ],
    ids=["none", "decoder", "waiting", "shared", "race", "check", "strange"],
)
def test_parts_of_a_first_byte_add_up_to_it(
    fields: dict[str, Any], expected: dict[str, float]
) -> None:
    """What no part took is the decoder's; what overlaps is shared out."""
    found = parts_of(fields)
    assert {name: ms for name, ms in found.items() if ms} == pytest.approx(expected)
    assert sum(found.values()) == pytest.approx(50.0 if fields else 0.0)


def test_handoffs_table_day_stands_where_it_changes_and_first_unless_it_is_today() -> None:
    """A time without its date is of today."""
    text = drawn(100, USED.fields() | {"time": "2026-04-30T23:00:00Z"}, USED.fields())
    assert [line for line in text.splitlines() if line.endswith(("-30", "-01"))] == [
        "Thu 2026-04-30",
        "Fri 2026-05-01",
    ]
    assert "2026" not in drawn(100, USED.fields())


def test_handoffs_table_terminal_of_another_width_has_a_heading_of_its_own() -> None:
    """With `-f` a window may be made narrower; each line fits, under the columns that it has."""
    widths = iter([100, 100, 60, 100])
    found = table([USED.fields()] * 4, lambda: Layout(next(widths), False, True), TODAY)
    lines = [line for some in found for line in some]
    shown = [drawn(width, USED.fields()).splitlines() for width in (100, 60)]
    assert lines == [*shown[0], shown[0][-1], *shown[1], *shown[0]]


def test_handoffs_table_reply_of_one_token_has_no_speed() -> None:
    """The decoder's million tokens a second, for the one that it had already, are not shown."""
    for count, shown in ((1, "-"), (3, "60.0")):
        fields = {
            "prompt_tokens": 9,
            "reply_tokens": count,
            "decode_ms": 0.001 if count == 1 else 50,
        }
        line = drawn(160, {"outcome": "skipped", **fields}).splitlines()[-1]
        assert line.split()[:9] == ["-", "skipped", "9", "-", "-", "-", "-", "-", shown]


def test_handoffs_table_of_another_version_is_still_shown() -> None:
    """Fields that are missing, or of another kind, are no traceback."""
    odd = dict.fromkeys(FIELDS, "x\x1b") | {"outcome": "transmogrified", "route": ["a", "b", "c"]}
    for width in (60, 100, 160):
        text = drawn(width, {"outcome": None}, odd)
        assert "transmog~" in text
        assert "\x1b" not in text


@pytest.mark.parametrize("time", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-12:00"])
def test_handoffs_time_that_no_calendar_has_is_shown_as_none(time: str) -> None:
    """In UTC it would be of the year 0, or 10000: no traceback, and no day."""
    record = USED.fields() | {"time": time}
    assert drawn(100, record).splitlines()[-1].startswith("-         used ")
    page = cli_handoff_summary.summary_page(summarise([record]), 80, colour=False)
    assert page[0] == "1 handoff, ?"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, "-"), ("7", "-"), (True, "-"), (-1, "-"), (0, "0.00 ms"), (0.412, "0.41 ms")),
        *((9.994, "9.99 ms"), (9.996, "10.0 ms"), (99.96, "100 ms"), (999.4, "999 ms")),
        *((999.6, "1.00 s"), (9996, "10.0 s"), (99960, "100 s"), (123456, "123 s"), (1e9, ">1 d")),
    ],
)
def test_short_ms_has_three_digits_in_seven_columns(value: object, text: str) -> None:
    """A column of them stays a column."""
    assert short_ms(value) == text
    assert len(text) <= 7


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        *(("abcdef", 6, "abcdef"), ("abcdef", 5, "abcd…"), ("ab cdef", 4, "ab…"), ("abc", 0, "")),
        *(("通道通道", 8, "通道通道"), ("通道通道", 7, "通道通…"), ("通道通道", 6, "通道…")),
        ("e\u0301" * 4, 3, "e\u0301e\u0301…"),
    ],
)
def test_cut_counts_columns_and_not_letters(text: str, width: int, shown: str) -> None:
    """Wide letters take two, accents none."""
    assert cut(text, width) == shown
    assert columns_of(shown) <= width


def test_summary_page_is_the_documented_text() -> None:
    """Outcomes, reasons and what they mean, parts by outcome, tokens and rates."""
    found = summarise(record.fields() for record in RECORDS)
    for width in (None, 100):
        lines = cli_handoff_summary.summary_page(found, width, colour=False)
        assert "".join(f"{line}\n" for line in lines) == SUMMARY_AT_100


@pytest.mark.parametrize("width", [80, 100, 160])
def test_summary_page_fits_and_names_every_outcome_and_reason(width: int) -> None:
    """The tables of parts are as many as it takes, and no meaning is cut."""
    records = [
        make_record(outcome=outcome, reason=reason, first_byte_ms=5.0, prompt_hash="a").fields()
        for outcome in Outcome
        for reason in Reason
    ]
    lines = cli_handoff_summary.summary_page(summarise(records), width, colour=True)
    text = plain("\n".join(lines))
    assert max(map(len, text.splitlines())) <= width
    assert text.count("\nfirst byte ") == text.count("\nPART ")
    for reason in Reason:
        assert re.search(rf"(?m)^{reason} .*  {cli_handoff_summary.MEANINGS[reason]}$", text)
    for outcome in ("all", *Outcome):
        assert re.search(rf"(?m)^ +.*\b{outcome}\b.*$\n^PART", text), outcome
    repeats = len(records) - 1
    assert text.endswith(f"repeats          {repeats} had a prompt that was there before")


def test_summary_page_of_nothing_or_another_version_is_no_traceback() -> None:
    """A daemon that has just started has none."""
    assert cli_handoff_summary.summary_page(summarise([]), 80, colour=False) == ["no handoffs"]
    odd = {"count": 2, "outcomes": {"x\x1b": "?"}, "reasons": {"y": None}, "rates": []}
    text = "\n".join(cli_handoff_summary.summary_page(odd, 80, colour=False))
    assert text.startswith("2 handoffs, ? to ?\n")


def test_summary_meanings_are_there_for_each_reason_and_no_other() -> None:
    """A new reason needs a word here too."""
    assert cli_handoff_summary.MEANINGS.keys() == set(Reason)


def test_csv_is_every_field_in_order_and_nothing_for_a_spreadsheet_to_run() -> None:
    """RFC 4180; what is absent is empty; a formula of a client's making is a text."""
    shown = '=HYPERLINK("http://x"), "y"'
    record = make_record(request_id=shown, detail="a\n+b", first_byte_ms=1.5).fields()
    lines = list(csv_lines([record, {"outcome": "used", "future": 1}]))
    assert all(line.endswith("\r\n") and line.count("\n") == 1 for line in lines)
    assert lines[0] == ",".join(FIELDS) + "\r\n"
    first, second = csv.DictReader(io.StringIO("".join(lines), newline=""))
    assert first["request_id"] == f"'{shown}"
    assert (first["detail"], first["stream"], first["first_byte_ms"]) == ("a +b", "true", "1.5")
    assert (first["reason"], first["restore_ms"]) == ("", "")
    assert {name for name, value in second.items() if value} == {"outcome"}


@pytest.mark.parametrize("text", ["=1", "+1", "-1", "@x", " =1", "\t=1", "\uff1d1"])
def test_csv_text_that_starts_like_a_formula_gets_an_apostrophe(text: str) -> None:
    """Numbers of ours do not, they are numbers."""
    (_, line) = csv_lines([{"detail": text, "queue_ms": 1.0}])
    assert f",'{text.replace(chr(9), ' ')}," in line
    assert ",1.0," in line


def history_at(root: Path, *names: str) -> dict[str, str]:
    """Make empty history files of instances; return the environment that has them."""
    for name in names:
        directory = root / "onebitd" / name
        directory.mkdir(parents=True)
        (directory / "history.db").touch()
    return {"XDG_STATE_HOME": str(root), "HOME": "/nonexistent"}


GONE = NoDaemon("no onebitd runs here")
NOBODY = 65534


def test_choose_history_only_one_is_taken_and_several_are_listed(tmp_path: Path) -> None:
    """As for a daemon: the only one, or a list and how to name one."""
    environ = history_at(tmp_path, "a")
    assert choose_history(None, environ, NOBODY, GONE) == str(tmp_path / "onebitd/a/history.db")
    history_at(tmp_path, "b")
    assert choose_history("b", environ, NOBODY, GONE) == str(tmp_path / "onebitd/b/history.db")
    with pytest.raises(UsageError, match=r"no onebitd runs here; .*: a \(/.*\), b \(/.*with -i"):
        choose_history(None, environ, NOBODY, GONE)


def test_choose_history_none_is_the_error_of_no_daemon(tmp_path: Path) -> None:
    """Who never had a daemon is told how to start one, and of no file."""
    for name in (None, "a"):
        with pytest.raises(NoDaemon) as caught:
            choose_history(name, {"XDG_STATE_HOME": str(tmp_path)}, NOBODY, GONE)
        assert caught.value is GONE


def test_choose_history_directory_of_somebody_else_is_exit_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read it, and the message says so."""

    def deny(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "stat", deny)
    with pytest.raises(AccessDenied, match=r"may not look for its history in /.*/a: use sudo"):
        choose_history("a", {"XDG_STATE_HOME": str(tmp_path)}, NOBODY, GONE)


def test_choose_history_fallback_directory_that_is_not_private_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may have put a file there."""
    monkeypatch.setattr("onebitd.core.paths.fallback_root", lambda uid: str(tmp_path))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "history.db").touch()
    tmp_path.chmod(0o755)
    with pytest.raises(NoDaemon):
        choose_history("a", {}, os.geteuid() or NOBODY, GONE)


@pytest.fixture
def left(tmp_path: Path) -> dict[str, str]:
    """The environment in which an instance has left a history and does not run."""
    path = tmp_path / "onebitd" / INSTANCE / "history.db"
    store = HistoryStore(path)
    store.open()
    rows = [(number, record.fields()) for number, record in enumerate(RECORDS, start=1)]
    store.write(rows, Keep(1000, 0))
    store.close()
    return {
        "XDG_STATE_HOME": str(tmp_path),
        "STATE_DIRECTORY": str(path.parent),
        "XDG_RUNTIME_DIR": str(tmp_path / "none"),
    }


async def test_handoffs_without_a_daemon_are_those_of_the_history_file(
    left: dict[str, str],
) -> None:
    """The table, the filters and the summary as ever, exit 0, and on stderr where it is from."""
    file = f"{left['XDG_STATE_HOME']}/onebitd/{INSTANCE}/history.db"
    done = await run("-i", INSTANCE, "handoffs", COLUMNS="100", **left)
    assert (done.returncode, done.stdout.replace("Fri 2026-05-01\n", "", 1)) == (0, AT_100)
    assert done.stderr.startswith(f"onebitctl: no onebitd runs for the instance {INSTANCE}: start")
    assert done.stderr.endswith(f"; this is from its history file, {file}\n")
    assert done.stderr.count("\n") == 1
    for wanted in (("--route", "shared"), ("--since", "2026-05-02 08:59:59")):
        done = await run("-i", INSTANCE, "handoffs", "--json", *wanted, **left)
        assert [json.loads(line) for line in done.stdout.splitlines()] == [SHARED.fields()]
    done = await run("-i", INSTANCE, "handoffs", "--summary", **left)
    assert (done.returncode, done.stdout) == (0, SUMMARY_AT_100)
    done = await run("-i", INSTANCE, "handoffs", "-f", **left)
    assert (done.returncode, done.stdout) == (3, "")
    assert "history" not in done.stderr


async def test_handoffs_without_a_daemon_damaged_file_is_exit_1(left: dict[str, str]) -> None:
    """It names the file, and is no traceback."""
    file = Path(left["STATE_DIRECTORY"]) / "history.db"
    file.write_bytes(b"no database" * 500)
    done = await run("-i", INSTANCE, "handoffs", **left)
    assert (done.returncode, done.stdout) == (1, "")
    assert str(file) in done.stderr
    assert done.stderr.count("\n") == 1


async def test_handoffs_without_a_daemon_named_by_its_socket_is_exit_3(
    left: dict[str, str],
) -> None:
    """Whose history would that be?"""
    done = await run("--socket", "/nonexistent", "handoffs", **left)
    assert (done.returncode, done.stdout) == (3, "")


async def test_handoffs_import_only_what_they_need(served: Served) -> None:
    """The command line stays light: no SQLite while a daemon answers, no CSV for a table."""
    served.view.history.add(USED)
    loaded = await modules_loaded(["--socket", str(served.socket), "handoffs"])
    assert "onebitd.surfaces.cli_handoff_table" in loaded
    unwanted = {"sqlite3", "csv", "unicodedata", "pathlib", "http.client", "trio", "asyncio"}
    assert not loaded & (unwanted | {"onebitd.core.handoff_summary", "onebitd.core.when"})


async def test_handoffs_daemon_that_knows_no_such_parameter_has_its_sentence_shown() -> None:
    """One of an earlier version refuses a filter that it does not have."""
    body = b'{"error": {"message": "unknown parameter \'reason\': there are limit"}}'
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n" % len(body)
    with tempfile.TemporaryDirectory(prefix="ob") as name, socket.socket(socket.AF_UNIX) as ours:
        ours.bind(f"{name}/c")
        ours.listen()

        def answer() -> None:
            with ours.accept()[0] as theirs:
                theirs.recv(65536)
                theirs.sendall(head + body)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, answer)
            done = await run("--socket", f"{name}/c", "handoffs", "--reason", "policy")
    assert (done.returncode, done.stdout) == (1, "")
    assert "answered 400: unknown parameter 'reason': there are limit" in done.stderr


async def test_handoffs_of_a_daemon_are_a_table_and_filters_are_its_own(served: Served) -> None:
    """One heading, newest last; $COLUMNS counts in a pipe; every filter is applied."""
    for record in RECORDS:
        served.view.history.add(record)
    done = await served.run("handoffs", COLUMNS="100")
    assert (done.returncode, done.stderr) == (0, "")
    first_day = "Fri 2026-05-01\n"
    assert done.stdout.replace(first_day, "", 1) == AT_100
    assert done.stdout.index(first_day) < done.stdout.index("12:00:01")
    done = await served.run("handoffs", "--reason", "client_gone", "--outcome", "cancelled")
    assert done.stdout.splitlines()[-1].endswith("  client_gone")
    assert done.stdout.count("\n") == 4
    done = await served.run("handoffs", "--since", "2026-05-02", "--route", "shared", "--json")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [SHARED.fields()]
    done = await served.run("handoffs", "--reason", "draining")
    assert (done.returncode, done.stdout) == (0, "no such handoffs\n")


async def test_handoffs_summary_csv_and_json_of_a_daemon(served: Served) -> None:
    """The daemon counts them all; of a number of them, they are counted here."""
    for record in RECORDS:
        served.view.history.add(record)
    done = await served.run("handoffs", "--summary")
    assert (done.returncode, done.stdout, done.stderr) == (0, SUMMARY_AT_100, "")
    done = await served.run("handoffs", "--summary", "--json", "-n", "2")
    last = [record.fields() for record in RECORDS[-2:]]
    assert json.loads(done.stdout) == json.loads(json.dumps(summarise(last)))
    done = await served.run("handoffs", "--csv", "-n", "2")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["outcome"] for row in rows] == ["cancelled", "used"]
    done = await served.run("handoffs", "--json", "-n", "2")
    assert [json.loads(line) for line in done.stdout.splitlines()] == last


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--since", "soon"), "'soon' is no time: write it like 2h, "),
        (("--since", "2099-01-01"), "'2099-01-01' is still to come"),
        (("--reason", "bad"), "--reason"),
        (("--route", "air"), "--route"),
        (("--json", "--csv"), "not allowed with"),
        (("--summary", "-f"), "a summary cannot be followed"),
        (("--summary", "--csv"), "a summary cannot be written as CSV"),
    ],
)
def test_handoffs_usage_error_is_exit_2_and_says_what_is_possible(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anybody is asked."""
    from onebitd.surfaces import cli

    try:
        status = cli.main(["handoffs", *arguments])
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else -1
    assert status == 2
    assert words in capsys.readouterr().err


async def test_handoffs_on_a_terminal_fit_it_and_are_coloured_unless_no_color(
    served: Served,
) -> None:
    """The terminal's own width, colours for outcomes and parts, and none with NO_COLOR."""
    for record in RECORDS:
        served.view.history.add(record)
    for environ, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        ours, theirs = pty.openpty()
        ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        try:
            await trio.run_process(
                [*PROGRAM, "--socket", str(served.socket), "handoffs"],
                env=environment({"TERM": "xterm", "COLUMNS": "160", **environ}),
                stdout=theirs,
            )
            page = os.read(ours, 65536).decode().replace("\r\n", "\n")
        finally:
            os.close(ours)
            os.close(theirs)
        assert ("\x1b[33mfallback \x1b[0m" in page) is coloured
        assert max(map(columns_of, plain(page).splitlines())) == 80
        if not coloured:
            assert page.replace("Fri 2026-05-01\n", "", 1) == AT_80


class Follower:
    """A child that follows; its lines as they come."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self._data = b""

    async def line(self) -> str:
        """Return the next line of stdout."""
        assert self.process.stdout is not None
        while b"\n" not in self._data:
            more = await self.process.stdout.receive_some()
            assert more, "the child ended"
            self._data += more
        found, _, self._data = self._data.partition(b"\n")
        return found.decode()


@asynccontextmanager
async def following(served: Served, *arguments: str) -> AsyncGenerator[Follower]:
    """Run `onebitctl handoffs -f`; kill it at the end if it still runs."""
    process = await trio.lowlevel.open_process(
        [*PROGRAM, "--socket", str(served.socket), "handoffs", "-f", *arguments],
        env=environment({}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    async with process.stdout, process.stderr:
        try:
            yield Follower(process)
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()


async def test_handoffs_follow_passes_records_live_and_ends_quietly_with_ctrl_c(
    served: Served,
) -> None:
    """The past first, each new line at once if it is wanted, SIGINT is exit 0 without a word."""
    served.view.history.add(make_record(0, reason=Reason.POLICY))
    async with following(served, "--json", "--reason", "policy") as child:
        assert json.loads(await child.line())["request_id"] == "r0"
        for number in (1, 2):
            served.view.history.add(make_record(9, reason=Reason.DRAINING))
            served.view.history.add(make_record(number, reason=Reason.POLICY))
            assert json.loads(await child.line())["request_id"] == f"r{number}"
        child.process.send_signal(signal.SIGINT)
        assert await child.process.wait() == 0
        assert child.process.stderr is not None
        assert await child.process.stderr.receive_some() == b""


async def test_handoffs_follow_daemon_that_stops_is_exit_3(served: Served) -> None:
    """A script that watches learns that there is nothing to watch any more."""
    async with following(served, "-n", "1") as child:
        served.view.history.add(make_record(0))
        assert (await child.line()).startswith("first byte: q queue")
        assert (await child.line()).startswith("TIME")
        assert (await child.line()) == "Fri 2026-05-01"
        assert (await child.line()).startswith("12:00:00  used")
        served.view.history.close()
        assert await child.process.wait() == 3
        assert child.process.stderr is not None
        assert b"ended the connection" in await child.process.stderr.receive_some()


async def test_handoffs_reader_that_leaves_is_quiet(served: Served) -> None:
    """`onebitctl handoffs | head` prints no traceback."""
    for number in range(1000):
        served.view.history.add(make_record(number, detail="x" * 200))
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = await trio.run_process(
            [*PROGRAM, "--socket", str(served.socket), "handoffs", "-n", "1000"],
            env=environment({}),
            stdout=write_end,
            capture_stderr=True,
            check=False,
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")
