"""The table of `onebitctl handoffs`: pure functions from records to lines of text.

Records are read with care: the daemon, or the file, may be of another version.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from onebitd.core.first_byte import parts_of
from onebitd.core.handoff import decode_speed, prefill_speed
from onebitd.surfaces import cli_bar
from onebitd.surfaces.cli_text import clean, local_time, moment_of, paint
from onebitd.surfaces.cli_width import ELLIPSIS, columns_of, cut, pad

ONE_LINE_COLUMNS: Final = 100
"""From so many columns on a handoff is one line, with every reason whole."""

WIDE_COLUMNS: Final = 140
"""From so many columns on there are rates, the route and the GPU too."""

OUTCOME_PAINTS: Final = {"used": "green", "skipped": "dim", "cancelled": "dim", "failed": "red"}
"""The colour of each outcome; of the others it is yellow."""

_INDENT: Final = " " * 10
_GAP: Final = "  "
_NARROWEST_BAR: Final = 8
_FIRST_TO_GO: Final = ("EVAL", "RESTORE", "PREFILL", "PROMPT")
"""Columns that a narrow terminal does without, one after the other."""


class _Column(NamedTuple):
    heading: str
    width: int
    cell: Callable[[Mapping[str, Any]], str]
    right: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """How the table is drawn.

    Attributes:
        width: columns of the terminal, None where nothing is to be cut.
        colour: paint outcomes and parts.
        blocks: the encoding has block characters and the ellipsis.
    """

    width: int | None
    colour: bool
    blocks: bool

    @property
    def bar_width(self) -> int:
        """Columns of the bar, 0 where there is no room for one."""
        if self.width is None or ONE_LINE_COLUMNS <= self.width < WIDE_COLUMNS:
            return 10
        if self.width >= WIDE_COLUMNS:
            return 20
        room = self.width - _width_of(self._columns) - len(_GAP)
        return min(room, 20) if room >= _NARROWEST_BAR else 0

    @property
    def ellipsis(self) -> str:
        """What stands for what was cut off."""
        return ELLIPSIS if self.blocks else "~"

    @property
    def _columns(self) -> Sequence[_Column]:
        if self.width is not None and self.width >= WIDE_COLUMNS:
            return _WIDE
        columns: Sequence[_Column] = _COLUMNS
        for heading in _FIRST_TO_GO:
            if self.width is None or _width_of(columns) <= self.width:
                break
            columns = tuple(one for one in columns if one.heading != heading)
        return columns

    def header(self) -> list[str]:
        """Return the legend of the bars and the heading of the table."""
        line = _GAP.join(pad(one.heading, one.width, right=one.right) for one in self._columns)
        if self.bar_width:
            line += _GAP + pad("PARTS", self.bar_width)
        if self.width is None or self.width >= ONE_LINE_COLUMNS:
            line += f"{_GAP}REASON"
        lines = [paint(line.rstrip(), "bold", self.colour)]
        if self.bar_width:
            signs = cli_bar.legend(colour=self.colour, blocks=self.blocks)
            lines.insert(0, f"first byte: {signs}")
        return lines

    def row(self, record: Mapping[str, Any]) -> list[str]:
        """Return one handoff: a line, or two where its reason needs one of its own.

        The detail is cut, the reason never is.
        """
        cells = [pad(one.cell(record), one.width, right=one.right) for one in self._columns]
        used = columns_of(_GAP.join(cells))
        paints = OUTCOME_PAINTS.get(cells[1].rstrip(), "yellow")
        cells[1] = paint(cells[1], paints, self.colour)
        if self.bar_width:
            parts = parts_of(record)
            cells.append(cli_bar.bar(parts, self.bar_width, colour=self.colour, blocks=self.blocks))
            used += len(_GAP) + self.bar_width
        line = _GAP.join(cells)
        reason, words = _words(record)
        if not words:
            return [line.rstrip()]
        if self.width is None:
            return [f"{line}{_GAP}{words}"]
        if self.width >= ONE_LINE_COLUMNS:
            return [f"{line}{_GAP}{self._cut(words, reason, self.width - used - len(_GAP))}"]
        return [line.rstrip(), _INDENT + self._cut(words, reason, self.width - len(_INDENT))]

    def _cut(self, words: str, reason: str, room: int) -> str:
        """Return the words, the reason whole: what is left for its detail may be nothing."""
        if columns_of(words) <= room:
            return words
        least = columns_of(reason) + len(f":{self.ellipsis}")
        return cut(words, room, self.ellipsis) if room >= least else reason


def table(
    records: Iterator[Mapping[str, Any]] | Sequence[Mapping[str, Any]],
    layout: Callable[[], Layout],
    today: dt.date,
) -> Iterator[list[str]]:
    """Yield the lines of each record as it comes, with the heading before the first.

    It stands again where the layout has changed: a terminal may be given another width meanwhile.

    A line with the date stands before the first record unless that is of today, and wherever the
    date changes. What has no outcome is passed over.

    Args:
        records: oldest first.
        layout: asked how each is drawn.
        today: the date of now, of the machine's own zone, as all that is shown.
    """
    day: dt.date | None = today
    drawn: Layout | None = None
    for record in records:
        if "outcome" not in record:
            continue
        now = layout()
        lines = [] if now == drawn else now.header()
        drawn = now
        moment = moment_of(record.get("time"))
        if moment is not None and moment.astimezone().date() != day:
            day = moment.astimezone().date()
            lines.append(paint(f"{day:%a %Y-%m-%d}", "bold", now.colour))
        yield [*lines, *now.row(record)]


def short_ms(value: object) -> str:
    """Return a time by three digits, in at most seven columns: `0.41 ms`, `88.1 ms`, `1.52 s`."""
    ms = _number(value)
    if ms is None:
        return "-"
    for below, text in ((9.995, f"{ms:.2f} ms"), (99.95, f"{ms:.1f} ms"), (999.5, f"{ms:.0f} ms")):
        if ms < below:
            return text
    s = ms / 1000
    for below, text in ((9.995, f"{s:.2f} s"), (99.95, f"{s:.1f} s"), (99999, f"{s:.0f} s")):
        if s < below:
            return text
    return ">1 d"


def _words(record: Mapping[str, Any]) -> tuple[str, str]:
    """Return the reason, and the reason with its detail; empty texts where there is none."""
    reason, detail = (clean(str(record.get(key) or "")) for key in ("reason", "detail"))
    return reason, ": ".join(filter(None, (reason, detail)))


def _outcome(record: Mapping[str, Any]) -> str:
    return cut(clean(str(record.get("outcome", "?"))), 9, "~")


def _count(name: str) -> Callable[[Mapping[str, Any]], str]:
    def cell(record: Mapping[str, Any]) -> str:
        number = _number(record.get(name))
        return "-" if number is None else f"{number:.0f}"

    return cell


def _restore(record: Mapping[str, Any]) -> str:
    """Return what bringing the state into the decoder took, by either route."""
    found = [record.get(name) for name in ("restore_ms", "adopt_ms")]
    if found == [None, None]:
        return "-"
    return short_ms(sum(_number(ms) or 0.0 for ms in (*found, record.get("share_ms"))))


def _prefill_rate(record: Mapping[str, Any]) -> str:
    return _rate(
        prefill_speed(_number(record.get("handed_tokens")), _number(record.get("prefill_ms")))
    )


def _decode_rate(record: Mapping[str, Any]) -> str:
    return _rate(
        decode_speed(_number(record.get("reply_tokens")), _number(record.get("decode_ms")))
    )


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1f}" if rate < 99.95 else f"{rate:.0f}"


def _gpu(record: Mapping[str, Any]) -> str:
    percent = _number(record.get("gpu_busy_percent"))
    return "-" if percent is None else f"{percent:.0f} %"


def _number(value: object) -> float | None:
    if type(value) is not float and type(value) is not int:  # a bool is no number
        return None
    return float(value) if 0 <= value < 1e15 else None


_COLUMNS: Final = (
    _Column("TIME", 8, lambda record: local_time(record.get("time")), right=False),
    _Column("OUTCOME", 9, _outcome, right=False),
    _Column("PROMPT", 6, _count("prompt_tokens")),
    _Column("EVAL", 6, _count("evaluated_tokens")),
    _Column("PREFILL", 7, lambda record: short_ms(record.get("prefill_ms"))),
    _Column("RESTORE", 7, _restore),
    _Column("1ST BYTE", 8, lambda record: short_ms(record.get("first_byte_ms"))),
)
_WIDE: Final = (
    *_COLUMNS,
    _Column("PREFILL/S", 9, _prefill_rate),
    _Column("DECODE/S", 8, _decode_rate),
    _Column("ROUTE", 6, lambda record: cut(clean(str(record.get("route") or "-")), 6, "~"), False),
    _Column("GPU", 5, _gpu),
)


def _width_of(columns: Sequence[_Column]) -> int:
    return sum(one.width for one in columns) + len(_GAP) * (len(columns) - 1)
