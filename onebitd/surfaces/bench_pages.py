"""What `onebitctl bench` prints: pure functions to lines of text, and to an object for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

from onebitd.core.bench_plan import DECODER
from onebitd.core.bench_report import Judged, Pair, Report, Sample, Spread, Verdict, Way
from onebitd.surfaces.cli_text import clean, milliseconds, paint, wrap

_HEADINGS: Final = (
    *("TOKENS", "WAY", "MEDIAN", "MIDDLE HALF", "PROVIDER"),
    *("RESTORE", "REST", "RATIO", "TOK/S"),
)
_COLUMNS: Final = (6, 7, 8, 11, 8, 7, 6, 5, 5)
_WORDS: Final = ("WAY",)
_LABEL_COLUMNS: Final = 9
_SHOWN_LENGTHS: Final = 6


@dataclasses.dataclass(frozen=True, slots=True)
class Bench:
    """What was to be measured, and whose it is.

    Attributes:
        seed: the prompts' words follow from it.
        interrupted: it ended before its plan.
    """

    model: str
    provider: str | None
    ctx_size: int
    lengths: tuple[int, ...]
    ways: tuple[str, ...]
    repeat: int
    max_tokens: int
    seed: str
    interrupted: bool = False


def title(bench: Bench) -> str:
    """Return whose figures these are, in one line."""
    return clean(f"{bench.model}, context of {bench.ctx_size} tokens, {_runs(bench)} of each way")


def bench_page(bench: Bench, found: Report, *, colour: bool) -> str:
    """Return the answer for people, at most 80 columns wide."""
    lines = [paint(title(bench), "bold", colour)]
    if bench.provider:
        lines += _labelled("provider", bench.provider)
    if bench.interrupted:
        lines += _labelled("but", "it was interrupted; these are the runs until then")
    lines += ["", *wrap("Time to the first byte in ms and its parts, * the soonest:", "", "")]
    lines += [*_table(found, colour), ""]
    for judged in found.routes:
        lines += _labelled(judged.route, route_words(judged, bench))
    words = decode_words(found)
    if words:
        lines += _labelled("decode", words)
    for failure in found.failures:
        where = ", ".join(map(str, failure.lengths[:_SHOWN_LENGTHS]))
        number = f"{failure.count} {_plural(failure.count, 'run')} at {where} tokens"
        lines += _labelled("failed", f"{failure.way}, {number}: {failure.why}")
    if found.beside_others:
        number = f"{found.beside_others} {_plural(found.beside_others, 'run')}"
        words = f"{number} beside other requests, again and again; they count like the others"
        lines += _labelled("others", words)
    return "\n".join(lines)


def bench_object(bench: Bench, found: Report, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return all of it for programs; what does not apply is null."""
    decoder = {way.tokens: way.first_byte for way in found.ways if way.name == DECODER}
    return {
        **dataclasses.asdict(bench),
        "medians": [_way_object(way, decoder.get(way.tokens)) for way in found.ways],
        "routes": {judged.route: _judged_object(judged) for judged in found.routes},
        "failures": [dataclasses.asdict(failure) for failure in found.failures],
        "beside_others": found.beside_others,
        "samples": list(map(_sample_object, samples)),
    }


def route_words(judged: Judged, bench: Bench) -> str:
    """Return where a route pays, in one sentence or a few."""
    pairs, verdicts = judged.pairs, judged.verdicts
    if not pairs:
        return "there is no figure of it"
    if verdicts == {Verdict.UNCLEAR}:
        lengths = _at([pair.tokens for pair in pairs])
        return f"no difference that {_runs(bench)} of each way can show, {lengths}"
    parts = []
    if judged.even_tokens:
        parts.append(_even_words(judged))
    elif Verdict.LOSES not in verdicts:
        parts.append(f"wins {_where(pairs, Verdict.WINS)}")
    elif Verdict.WINS not in verdicts:
        parts.append(f"loses {_where(pairs, Verdict.LOSES)}{_beyond_words(judged, bench)}")
    else:
        parts.append(f"wins {_where(pairs, Verdict.WINS)} and loses {_where(pairs, Verdict.LOSES)}")
    unclear = [pair.tokens for pair in pairs if pair.verdict is Verdict.UNCLEAR]
    if unclear:
        parts.append(f"no difference that {_runs(bench)} can show {_at(unclear)}")
    parts.append(_gain_words(pairs[-1]))
    return "; ".join(filter(None, parts))


def decode_words(found: Report) -> str:
    """Return the speed of the reply behind each way, at the longest prompt that has one."""
    for tokens in sorted({way.tokens for way in found.ways}, reverse=True):
        rates = [
            (way.name, way.decode_per_s)
            for way in found.ways
            if way.tokens == tokens and way.decode_per_s is not None
        ]
        if len(rates) > 1 and rates[0][0] == DECODER:
            others = ", ".join(f"{rate:.1f} behind a handoff ({name})" for name, rate in rates[1:])
            return f"{rates[0][1]:.1f} tokens/s behind the decoder's own prefill, {others}"
    return ""


def _even_words(judged: Judged) -> str:
    first = next(pair for pair in judged.pairs if pair.verdict is not Verdict.UNCLEAR)
    near = " and ".join(map(str, judged.even_tokens))
    if len(judged.even_tokens) > 1:
        return f"breaks even near {near} tokens, and {first.verdict} below the first"
    below, above = ("loses", "wins") if first.verdict is Verdict.LOSES else ("wins", "loses")
    return f"breaks even near {near} tokens: it {below} below and {above} above"


def _beyond_words(judged: Judged, bench: Bench) -> str:
    beyond = judged.beyond_tokens
    if beyond is None or beyond > bench.ctx_size:
        return ""
    return f" (if both go on as they end, it breaks even near {beyond})"


def _gain_words(last: Pair) -> str:
    """Return what the longest prompt gains or loses, unless that is not clear."""
    if last.verdict is Verdict.UNCLEAR:
        return ""
    at, decoder = f"at {last.tokens} tokens it", f"the decoder's {milliseconds(last.decoder_ms)}"
    if last.saved_ms < 0:
        return f"{at} costs {milliseconds(-last.saved_ms)} more than {decoder}"
    share = last.saved_ms / last.decoder_ms
    return f"{at} saves {milliseconds(last.saved_ms)} of {decoder} ({share:.0%})"


def _where(pairs: Sequence[Pair], verdict: Verdict) -> str:
    lengths = [pair.tokens for pair in pairs if pair.verdict is verdict]
    if len(lengths) == len(pairs) > 1:
        return f"at every length measured, {lengths[0]} to {lengths[-1]} tokens"
    return _at(lengths)


def _at(lengths: Sequence[int]) -> str:
    *most, last = map(str, lengths)
    return f"at {', '.join(most)} and {last} tokens" if most else f"at {last} tokens"


def _table(found: Report, colour: bool) -> list[str]:
    lines = [paint(_cells(_HEADINGS), "bold", colour)]
    for tokens in dict.fromkeys(way.tokens for way in found.ways):
        rows = [way for way in found.ways if way.tokens == tokens]
        decoder = next((way.first_byte for way in rows if way.name == DECODER), None)
        medians = [way.first_byte.median for way in rows if way.first_byte is not None]
        best = min(medians) if len(medians) > 1 else None
        for number, way in enumerate(rows):
            line = _cells(_row(way, decoder, str(tokens) if number == 0 else "", best))
            is_best = way.first_byte is not None and way.first_byte.median == best
            lines.append(paint(line, "green", colour) if is_best else line)
    return lines


def _row(way: Way, decoder: Spread | None, tokens: str, best: float | None) -> list[str]:
    one = way.first_byte
    if one is None:
        return [tokens, way.name, *["-"] * (len(_HEADINGS) - 2)]
    ratio = "" if way.name == DECODER or decoder is None else f"{decoder.median / one.median:.2f}"
    return [
        tokens,
        way.name,
        f"{'*' if one.median == best else ''}{_ms(one.median)}",
        f"{_ms(one.low)}-{_ms(one.high)}" if one.count > 1 else "-",
        _ms(way.provider_ms),
        _ms(way.restore_ms),
        _ms(way.rest_ms),
        ratio,
        "-" if way.decode_per_s is None else _ms(way.decode_per_s),
    ]


def _cells(cells: Sequence[str]) -> str:
    return "  ".join(
        f"{cell:<{wide}}" if name in _WORDS else f"{cell:>{wide}}"
        for cell, name, wide in zip(cells, _HEADINGS, _COLUMNS, strict=True)
    ).rstrip()


def _ms(value: float | None) -> str:
    """Return three figures or whole numbers: two of these fit side by side.

    >>> _ms(9.87654), _ms(98.7654), _ms(987.654), _ms(None)
    ('9.88', '98.8', '988', '-')
    """
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def _labelled(label: str, words: str) -> list[str]:
    return wrap(clean(words), f"{label:<{_LABEL_COLUMNS}}", " " * _LABEL_COLUMNS)


def _runs(bench: Bench) -> str:
    return f"{bench.repeat} {_plural(bench.repeat, 'run')}"


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"


def _way_object(way: Way, decoder: Spread | None) -> dict[str, Any]:
    one = way.first_byte
    ratio = None if one is None or decoder is None else decoder.median / one.median
    return {
        "tokens": way.tokens,
        "way": way.name,
        "first_byte_ms": None if one is None else dataclasses.asdict(one),
        "provider_ms": way.provider_ms,
        "restore_ms": way.restore_ms,
        "rest_ms": way.rest_ms,
        "ratio": ratio,
        "decode_tokens_per_s": way.decode_per_s,
    }


def _judged_object(judged: Judged) -> dict[str, Any]:
    return {
        "lengths": [
            {**dataclasses.asdict(pair), "verdict": pair.verdict.value, "saved_ms": pair.saved_ms}
            for pair in judged.pairs
        ],
        "even_tokens": list(judged.even_tokens),
        "beyond_tokens": judged.beyond_tokens,
    }


def _sample_object(sample: Sample) -> Mapping[str, Any]:
    return {
        **dataclasses.asdict(sample.run),
        "counts": sample.run.round > 0 and sample.failure is None,
        "failure": sample.failure,
        "beside_others": sample.beside_others,
        "seen_ms": round(sample.seen_ms, 3),
        "record": dict(sample.record),
    }
