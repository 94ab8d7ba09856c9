"""The page of `onebitctl handoffs --summary`: a pure function from a summary to lines of text.

The shape of a summary is `core.handoff_summary.summarise`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from onebitd.core.handoff_summary import PARTS, TOKENS
from onebitd.surfaces.cli_handoff_table import OUTCOME_PAINTS, short_ms
from onebitd.surfaces.cli_text import clean, moment_of, paint, part_of
from onebitd.surfaces.cli_width import cut, pad

MEANINGS: Final = {
    "no_provider": "no provider is configured",
    "not_text": "not one text prompt",
    "too_short": "below handoff.min_tokens",
    "too_long": "does not fit the context",
    "policy": "the decoder was to prefill",
    "already_cached": "the decoder had it in its cache",
    "overtaken": "the decoder was there first",
    "not_reused": "the decoder makes no use of it",
    "lock_busy": "another program has the device",
    "lock_unusable": "the lock file cannot be used",
    "provider_exit": "the provider failed",
    "provider_timeout": "the provider took too long",
    "provider_no_file": "the provider wrote no file",
    "bad_state": "the provider's state is faulty",
    "restore_refused": "the decoder refused the state",
    "restore_short": "the decoder took a part only",
    "share_refused": "the decoder did not share",
    "share_handshake": "sharing was not agreed on",
    "adopt_refused": "the decoder did not adopt it",
    "breaker_open": "the provider is out of service",
    "no_space": "no room for the state file",
    "client_gone": "the client left",
    "operator": "cancelled by hand",
    "backend_down": "the decoder was not there",
    "backend_refused": "the decoder answered an error",
    "unsupported_model": "not possible with this model",
    "queue_full": "too many requests were waiting",
    "draining": "onebitd was stopping",
    "internal": "a fault of onebitd's own",
}
"""What each reason means, in a few words; `onebitd(8)` says what to do about it."""

_LABEL_COLUMNS: Final = 17
_PAIR_COLUMNS: Final = 18
_FIRST_BYTE: Final = "1ST BYTE p50, p95"
_WITH_TIMES_COLUMNS: Final = 100
_GAP: Final = "  "


def summary_page(summary: Mapping[str, Any], width: int | None, *, colour: bool) -> list[str]:
    """Return the lines of the page; those of its tables fit into `width` columns, from 80 on.

    Args:
        summary: see `core.handoff_summary.summarise`; of another version, perhaps.
        width: columns, None for 100.
        colour: paint headings and outcomes.
    """
    count = summary.get("count")
    if not isinstance(count, int) or count < 1:
        return ["no handoffs"]
    columns = 100 if width is None else max(width, 80)
    lines = [_span(summary, count)]
    for block in (
        list(_outcomes(summary, count, colour=colour)),
        list(_reasons(summary, count, columns, colour=colour)),
        list(_parts(summary, columns, colour=colour)),
        list(_totals(summary)),
    ):
        if block:
            lines += ["", *block]
    return lines


def _span(summary: Mapping[str, Any], count: int) -> str:
    moments = [moment_of(summary.get(name)) for name in ("first_time", "last_time")]
    first, last = (None if one is None else one.astimezone() for one in moments)
    since = "?" if first is None else f"{first:%a %Y-%m-%d %H:%M:%S}"
    if count == 1:
        return f"1 handoff, {since}"
    until = "?" if last is None else f"{last:%a %Y-%m-%d %H:%M:%S}"
    if first is not None and last is not None and first.date() == last.date():
        until = f"{last:%H:%M:%S}"
    return f"{count} handoffs, {since} to {until}"


def _outcomes(summary: Mapping[str, Any], count: int, *, colour: bool) -> Iterator[str]:
    yield paint(_row("OUTCOME", ("COUNT", "SHARE", _FIRST_BYTE), (7, 7, 17)), "bold", colour)
    for outcome, number in part_of(summary, "outcomes").items():
        parts = part_of(part_of(part_of(summary, "by_outcome"), outcome), "parts")
        cells = (str(number), _share(number, count), _pair(parts, "first_byte_ms"))
        yield _painted(_row(outcome, cells, (7, 7, 17)), outcome, colour)


def _reasons(
    summary: Mapping[str, Any], count: int, columns: int, *, colour: bool
) -> Iterator[str]:
    """Yield a line for each reason and outcome; the times stand where there is room for them."""
    reasons = part_of(summary, "reasons")
    if not reasons:
        return
    widths = (-9, 7, 7, 17) if columns >= _WITH_TIMES_COLUMNS else (-9, 7, 7)
    heading = _row("REASON", ("OUTCOME", "COUNT", "SHARE", _FIRST_BYTE), widths)
    yield paint(f"{heading}{_GAP}MEANING", "bold", colour)
    for reason in reasons:
        meaning = MEANINGS.get(reason, "see onebitd(8)")
        for outcome, found in _of_reason(summary, reason):
            number = found.get("count")
            pair = _pair(part_of(found, "parts"), "first_byte_ms")
            row = _row(reason, (outcome, str(number), _share(number, count), pair), widths)
            yield f"{row}{_GAP}{meaning}"


def _of_reason(summary: Mapping[str, Any], reason: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for outcome in part_of(summary, "by_outcome"):
        of_outcome = part_of(part_of(summary, "by_outcome"), outcome)
        found = part_of(part_of(of_outcome, "by_reason"), reason)
        if found:
            yield clean(outcome), found


def _parts(summary: Mapping[str, Any], columns: int, *, colour: bool) -> Iterator[str]:
    """Yield p50 and p95 of each part, the outcomes side by side, in as many tables as it takes."""
    by_outcome = part_of(summary, "by_outcome")
    tables = {name: part_of(part_of(by_outcome, name), "parts") for name in by_outcome}
    if len(tables) > 1:
        tables = {"all": part_of(summary, "parts"), **tables}
    tables = {name: parts for name, parts in tables.items() if parts}
    fitting = (columns - _LABEL_COLUMNS) // (_PAIR_COLUMNS + len(_GAP))
    names = list(tables)
    for start in range(0, len(names), fitting):
        if start:
            yield ""
        shown = names[start : start + fitting]
        widths = [_PAIR_COLUMNS] * len(shown)
        yield paint(_row("", shown, widths), "bold", colour)
        yield paint(_row("PART", ["p50       p95"] * len(shown), widths), "bold", colour)
        for part in PARTS:
            if any(part in tables[name] for name in shown):
                cells = [_pair(tables[name], part) for name in shown]
                yield _row(part.removesuffix("_ms").replace("_", " "), cells, widths)


def _totals(summary: Mapping[str, Any]) -> Iterator[str]:
    tokens, rates = part_of(summary, "tokens"), part_of(summary, "rates")
    words = [f"{name.removesuffix('_tokens')} {tokens[name]}" for name in TOKENS if name in tokens]
    if words:
        yield f"{'tokens':<{_LABEL_COLUMNS}}{', '.join(words)}"
    found = []
    for name, what in (("prefill", "prefill by the provider"), ("decode", "decode")):
        rate = part_of(rates, f"{name}_tokens_per_s").get("p50")
        if isinstance(rate, (int, float)):
            found.append(f"{what} {rate:.1f}")
    if found:
        yield f"{'tokens/s, p50':<{_LABEL_COLUMNS}}{', '.join(found)}"
    repeats = summary.get("repeats")
    if repeats:
        yield f"{'repeats':<{_LABEL_COLUMNS}}{repeats} had a prompt that was there before"


def _row(label: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return cells behind a label, those of a negative width to the left; as many as widths."""
    shown = [
        pad(cell, abs(wide), right=wide > 0) for cell, wide in zip(cells, widths, strict=False)
    ]
    return _GAP.join([pad(cut(clean(label), _LABEL_COLUMNS), _LABEL_COLUMNS), *shown])


def _pair(parts: Mapping[str, Any], part: str) -> str:
    found = part_of(parts, part)
    return f"{short_ms(found.get('p50')):>7}   {short_ms(found.get('p95')):>7}"


def _share(number: object, count: int) -> str:
    return f"{number / count:.1%}".replace("%", " %") if isinstance(number, int) else "?"


def _painted(line: str, outcome: str, colour: bool) -> str:
    if not colour or not line.startswith(outcome):
        return line
    return paint(outcome, OUTCOME_PAINTS.get(outcome, "yellow"), colour) + line[len(outcome) :]
