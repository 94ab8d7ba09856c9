"""What `onebitctl advise` prints: pure functions to lines of text, and to objects for programs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from onebitd.core.advice import Advice, Needed, Overlap, Verdict
from onebitd.core.forecast import Expected
from onebitd.core.handoff import Route
from onebitd.surfaces.cli_text import clean, duration, paint, wrap

if TYPE_CHECKING:
    from onebitd.surfaces.cli_advise import Sources

_LABEL_COLUMNS: Final = 8
_CELL_COLUMNS: Final = 11
_ENOUGH_SAMPLES: Final = 2
"""With fewer, a rate is a guess."""


def title(sources: Sources, ctx_size: int) -> str:
    """Return whose figures these are, in one line."""
    model = sources.answer.get("model")
    whose = clean(str(model)) if model else "figures by hand"
    return f"{whose}, context of {ctx_size} tokens"


def advice_page(sources: Sources, advice: Advice, ctx_size: int, *, colour: bool) -> str:
    """Return the answer for people, at most 80 columns wide."""
    lines = [paint(title(sources, ctx_size), "bold", colour), *_origin_lines(sources)]
    remark = _remark(sources)
    if remark is not None:
        lines += _labelled("but", remark)
    lines.append("")
    for verdict in advice.verdicts:
        lines += _labelled(str(verdict.route), _verdict_words(verdict))
    if advice.overlap is not None:
        lines += _labelled("overlap", _overlap_words(advice.overlap))
    if advice.needed is not None:
        lines += _labelled("needed", _needed_words(advice.needed))
    lines += ["", *wrap("Time to first byte in ms when the slot is free, * the soonest:", "", "")]
    lines += _table(advice.table, colour)
    if advice.overlap is not None:
        lines += ["", *_overlap_table(advice.overlap, colour)]
    return "\n".join(lines)


def missing_page(sources: Sources, missing: tuple[str, ...]) -> str:
    """Return what is not known yet, and how to get it."""
    lines = [*_origin_lines(sources), "", "Too little is known yet to advise. Missing:"]
    for words in _missing_words(sources, missing).values():
        lines += wrap(words, "- ", "  ")
    return "\n".join(lines)


def missing_object(sources: Sources, missing: tuple[str, ...]) -> dict[str, Any]:
    """Return the same for programs; `missing` maps each word to what to do."""
    return {**_origin_object(sources), "missing": _missing_words(sources, missing)}


def advice_object(sources: Sources, advice: Advice, ctx_size: int) -> dict[str, Any]:
    """Return the answer for programs: times in ms, null where a route is not known."""
    overlap = advice.overlap
    return {
        **_origin_object(sources),
        "ctx_size": ctx_size,
        "missing": {},
        "break_even": {str(v.route): _verdict_object(v) for v in advice.verdicts},
        "table": list(map(_expected_object, advice.table)),
        "overlap": None
        if overlap is None
        else {
            "break_even": _verdict_object(overlap.verdict),
            "reply_tokens": overlap.reply_tokens,
            "reply_ms": overlap.reply_ms,
            "reply_hides_tokens": overlap.reply_hides_tokens,
            "table": [
                {**_expected_object(row), "hidden_ms": ms}
                for row, ms in zip(overlap.table, overlap.hidden_ms, strict=True)
            ],
        },
        "needed": None if advice.needed is None else dataclasses.asdict(advice.needed),
    }


def _origin_object(sources: Sources) -> dict[str, Any]:
    answer, costs = sources.answer, sources.costs
    return {
        "model": answer.get("model"),
        "provider": answer.get("provider"),
        "share": answer.get("share"),
        "ctx_size": sources.ctx_size,
        "samples": {
            "decoder": costs.decoder_samples(),
            **{str(route): costs.provider_samples(route) for route in Route},
        },
        "given": sources.given.named(),
    }


def _origin_lines(sources: Sources) -> list[str]:
    """Say what the figures rest on."""
    lines = []
    if sources.answer:
        lines += _labelled("learned", _learned_words(sources))
    given = sources.given.named()
    if given:
        words = [f"{name.replace('_', '-')} {value:g}" for name, value in given.items()]
        lines += _labelled("by hand", ", ".join(words))
    return lines


def _learned_words(sources: Sources) -> str:
    costs, now = sources.costs, sources.now
    parts = []
    for route in Route:
        runs = costs.provider_samples(route)
        if runs or route is Route.FILE or sources.answer.get("share"):
            words = f"{runs} provider {_plural(runs, 'run')} on the {route} route"
            parts.append(words + _age(costs.provider_age_s(route, now)))
    replies = costs.decoder_samples()
    words = f"{replies} {_plural(replies, 'reply', 'replies')} of the decoder"
    parts.append(words + _age(costs.decoder_age_s(now)))
    return f"from {', '.join(parts)}"


def _remark(sources: Sources) -> str | None:
    """Return a warning when a rate rests on too little to trust."""
    costs, given = sources.costs, sources.given
    rests = {
        "provider": (max(map(costs.provider_samples, Route)), given.provider_ms_per_token),
        "decoder": (costs.decoder_samples(), given.decoder_ms_per_token),
    }
    few = [name for name, (n, by_hand) in rests.items() if n < _ENOUGH_SAMPLES and by_hand is None]
    return (
        f"so little is known of the {' and the '.join(few)} that this is a guess" if few else None
    )


def _age(seconds: float | None) -> str:
    return "" if seconds is None else f" (last {duration(seconds)} ago)"


def _missing_words(sources: Sources, missing: tuple[str, ...]) -> dict[str, str]:
    words = {
        "decoder": "how long the decoder takes for a prompt: send two prompts of some hundred"
        " tokens that begin differently, with the header X-Onebit-Handoff: never, or give"
        " --decoder-ms-per-token",
        "provider": "how long the provider takes for a prompt: send two prompts of different"
        " length that begin differently, with the header X-Onebit-Handoff: always, or give"
        " --provider-ms-per-token",
        "restore": "how long the decoder takes for a state file: send a prompt with the header"
        " X-Onebit-Handoff: always, or give --restore-ms-per-mib and --kib-per-token (for the"
        " shared route --adopt-ms)",
    }
    if sources.answer and sources.answer.get("provider") is None:
        words["provider"] = (
            "a prefill provider: set provider.program, or give --provider-ms-per-token of one that"
            " you think of"
        )
    return {name: words[name] for name in missing}


def _verdict_words(verdict: Verdict) -> str:
    best, at = verdict.best_factor, f"at {verdict.best_tokens} tokens"
    if not verdict.wins:
        words = f"never wins: {at} it takes {_times(1 / best)} the decoder's time"
        if verdict.best_tokens == verdict.last:
            return f"{words}, and more with fewer"
        return f"{words}, at {verdict.last} tokens {_times(1 / verdict.last_factor)}"
    return f"{_where(verdict)}; {at} it is {_times(best)} as fast as the decoder"


def _where(verdict: Verdict) -> str:
    """Say where a route wins that does so somewhere."""
    if verdict.always:
        return "wins at any length"
    stretches = [
        f"from {first} tokens on" if end == verdict.last else f"from {first} to {end} tokens"
        for first, end in verdict.wins
    ]
    return f"wins {' and '.join(stretches)}"


def _overlap_words(overlap: Overlap) -> str:
    verdict = overlap.verdict
    if not verdict.wins:
        best = _times(1 / verdict.best_factor)
        return (
            "worth nothing: with a run that costs no time the file route still takes at least"
            f" {best} the decoder's time"
        )
    words = f"behind somebody else's reply that outlasts its run, the file route {_where(verdict)}"
    if overlap.reply_hides_tokens is None:
        return words
    tokens, hides = overlap.reply_tokens or 0.0, overlap.reply_hides_tokens
    reply = f"a typical reply here ({tokens:.0f} tokens, {_ms(overlap.reply_ms or 0.0)})"
    if hides == 0:
        return f"{words}; {reply} is too short to hide any"
    if hides == verdict.last:
        return f"{words}; {reply} hides any run"
    return f"{words}; {reply} hides the run of a prompt of up to {hides} tokens"


def _needed_words(need: Needed) -> str:
    where = f"at {need.tokens} tokens the provider's run takes {_ms(need.run_ms)}"
    if need.limit_ms <= 0:
        return (
            f"{where}; no provider could break even there on the {need.route} route: what else it"
            f" costs takes {_ms(-need.limit_ms)} more than the decoder needs for the whole prompt"
        )
    if need.limit_ms_per_token is None:
        return (
            f"{where}, and to break even it may take {_ms(need.limit_ms)}; no rate does that, as"
            f" {_ms(need.fixed_ms)} of it are there at any length"
        )
    faster = f"{_rate(need.limit_ms_per_token)} ms per token instead of {_rate(need.ms_per_token)}"
    beside = f" beside its {_ms(need.fixed_ms)} at any length" if need.fixed_ms >= 0.05 else ""
    return (
        f"{where}; it breaks even at {_ms(need.limit_ms)}, which takes {faster}{beside}: "
        f"{_times(need.ms_per_token / need.limit_ms_per_token)} as fast"
    )


def _verdict_object(verdict: Verdict) -> dict[str, Any]:
    found = dataclasses.asdict(verdict)
    del found["route"]
    return {**found, "wins": [list(stretch) for stretch in verdict.wins]}


def _expected_object(expected: Expected) -> dict[str, Any]:
    return {**dataclasses.asdict(expected), "best": expected.best()}


def _table(rows: tuple[Expected, ...], colour: bool) -> list[str]:
    routes = _known(rows)
    cells = [f"{_row_cells(row, routes, colour)}  {_soonest(row)}" for row in rows]
    return [paint(f"{_heads(routes)}  SOONEST", "bold", colour), *cells]


def _overlap_table(overlap: Overlap, colour: bool) -> list[str]:
    intro = (
        "The same behind somebody else's reply, from the moment on at which the slot is free. The"
        " file route's run is over by then if that reply still takes as long as the last column"
        " says:"
    )
    routes = _known(overlap.table)
    head = f"{_heads(routes)}  {'SOONEST':<24}{'REPLY TAKES':>11}"
    lines = [*wrap(intro, "", ""), paint(head, "bold", colour)]
    for row, hidden in zip(overlap.table, overlap.hidden_ms, strict=True):
        cells = _row_cells(row, routes, colour)
        lines.append(f"{cells}  {_soonest(row):<24}{_number(hidden):>11}".rstrip())
    return lines


def _heads(routes: list[Route]) -> str:
    words = ["DECODER", *(str(route).upper() for route in routes)]
    return f"{'TOKENS':>8}" + "".join(f"{word:>{_CELL_COLUMNS - 2}}  " for word in words)


def _known(rows: tuple[Expected, ...]) -> list[Route]:
    return [route for route in Route if rows[0].by(route) is not None]


def _row_cells(row: Expected, routes: list[Route], colour: bool) -> str:
    best = row.best()
    ways = [("decoder", row.decoder_ms), *((str(route), row.by(route)) for route in routes)]
    cells = [f"{row.tokens:>8}"]
    for name, ms in ways:
        text = _number(ms) + ("* " if name == best else "  ")
        cells.append(paint(text, "green", colour and name == best))
    return "".join(cells)


def _soonest(row: Expected) -> str:
    """Return the winner and how far it is ahead of the best of the other kind."""
    route = row.best_handoff()
    if route is None or row.decoder_ms is None:
        return "-"
    handed_ms = max(row.by(route) or 0.0, 1e-9)
    factor = row.decoder_ms / handed_ms
    if row.best() == "decoder":
        return f"decoder, {_times(1 / max(factor, 1e-9))} as fast"
    return f"{route}, {_times(factor)} as fast"


def _number(ms: float | None) -> str:
    """Return a cell whose decimal points are below each other; the last column is for a mark."""
    if ms is None:
        return f"{'-':>{_CELL_COLUMNS - 4}}  "
    return f"{ms:>{_CELL_COLUMNS - 2}.1f}" if ms < 99.95 else f"{ms:>{_CELL_COLUMNS - 4}.0f}  "


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 99.95 else f"{value:.1f} ms"


def _rate(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _times(factor: float) -> str:
    """Return a factor with three digits: `1.04x`, `12.5x`, `230x`."""
    if factor < 10:
        return f"{factor:.2f}x"
    return f"{factor:.1f}x" if factor < 100 else f"{factor:.0f}x"


def _plural(number: int, one: str, many: str = "") -> str:
    return one if number == 1 else many or f"{one}s"


def _labelled(label: str, words: str) -> list[str]:
    return wrap(words, f"{label:<{_LABEL_COLUMNS}} ", " " * (_LABEL_COLUMNS + 1))
