"""The first byte by prompt length as curves, with the break-even marked; needs matplotlib."""

from __future__ import annotations

import io
from typing import Final

from onebitd.core.advice import Advice, Verdict
from onebitd.core.forecast import SHORTEST, Forecast
from onebitd.state_tools.files import write_whole
from onebitd.state_tools.plot import load_matplotlib

_POINTS: Final = 256
COLOURS: Final = {"decoder": "#444444", "file": "#0072b2", "shared": "#009e73"}
"""Apart from each other for colour-blind eyes, too."""


def write(path: str, forecast: Forecast, advice: Advice, title: str) -> None:
    """Write a PNG.

    Raises:
        UsageError: matplotlib is not installed, or the file cannot be written.
    """
    write_whole(path, draw(forecast, advice, title))


def draw(forecast: Forecast, advice: Advice, title: str) -> bytes:
    """Return a PNG with a curve for each way that is known."""
    figure_module, canvas, _ = load_matplotlib()
    figure = figure_module.Figure(figsize=(9, 5.5), layout="constrained")
    canvas.FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    lengths = _lengths(advice.last)
    expected = [forecast.first_byte(tokens) for tokens in lengths]
    decoder = [row.decoder_ms for row in expected]
    axes.plot(lengths, decoder, color=COLOURS["decoder"], linewidth=2, label="decoder alone")
    for verdict in advice.verdicts:
        colour = COLOURS[str(verdict.route)]
        values = [row.by(verdict.route) for row in expected]
        axes.plot(lengths, values, color=colour, linewidth=2, label=_label(verdict))
        for tokens in _edges(verdict):
            height = forecast.first_byte(tokens).decoder_ms
            axes.plot([tokens, tokens], [0, height], color=colour, linestyle="--", linewidth=1)
            axes.plot([tokens], [height], "o", color=colour)
    if advice.overlap is not None:
        behind = [forecast.behind_reply(tokens).file_ms for tokens in lengths]
        label = "file route, run hidden behind another reply\n(from when the slot is free)"
        axes.plot(lengths, behind, color=COLOURS["file"], linestyle=":", label=label)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("prompt length in tokens")
    axes.set_ylabel("time to first byte in ms")
    axes.set_xlim(0, advice.last)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize=9)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=120)
    return out.getvalue()


def _label(verdict: Verdict) -> str:
    edges = _edges(verdict)
    if not edges:
        return f"{verdict.route} route"
    return f"{verdict.route} route, breaks even at {' and '.join(map(str, edges))} tokens"


def _edges(verdict: Verdict) -> list[int]:
    """Return the lengths at which a route begins to win, or no longer does."""
    edges = {first for first, _ in verdict.wins} | {end + 1 for _, end in verdict.wins}
    return sorted(edge for edge in edges if SHORTEST < edge <= verdict.last)


def _lengths(last: int) -> list[int]:
    step = max((last - SHORTEST) / (_POINTS - 1), 1)
    found = {round(SHORTEST + step * number) for number in range(_POINTS)} | {last}
    return sorted(tokens for tokens in found if tokens <= last)
