"""The measured first byte by prompt length, a line for each way; needs matplotlib."""

from __future__ import annotations

import io

from onebitd.core.bench_plan import DECODER
from onebitd.core.bench_report import Report, Spread, Verdict
from onebitd.state_tools.files import write_whole
from onebitd.state_tools.plot import load_matplotlib
from onebitd.surfaces.advice_plot import COLOURS


def write(path: str, found: Report, title: str) -> None:
    """Write a PNG.

    Raises:
        UsageError: matplotlib is not installed, or the file cannot be written.
    """
    write_whole(path, draw(found, title))


def draw(found: Report, title: str) -> bytes:
    """Return a PNG: medians as points, the middle half of the runs as bars across them.

    A dashed line stands where a route breaks even.
    """
    figure_module, canvas, _ = load_matplotlib()
    figure = figure_module.Figure(figsize=(9, 5.5), layout="constrained")
    canvas.FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name in dict.fromkeys(way.name for way in found.ways):
        points = [
            (way.tokens, way.first_byte)
            for way in found.ways
            if way.name == name and way.first_byte is not None
        ]
        if points:
            axes.errorbar(
                [tokens for tokens, _ in points],
                [spread.median for _, spread in points],
                yerr=_bars([spread for _, spread in points]),
                color=COLOURS[name],
                marker="o",
                linewidth=2,
                capsize=4,
                label=_label(name, found),
            )
    for judged in found.routes:
        for tokens in judged.even_tokens:
            axes.axvline(tokens, color=COLOURS[judged.route], linestyle="--", linewidth=1)
    axes.set_title(title, fontsize=10, parse_math=False)  # a model may be called $x
    axes.set_xlabel("prompt length in tokens")
    axes.set_ylabel("time to first byte in ms")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", fontsize=9)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=120)
    return out.getvalue()


def _bars(spreads: list[Spread]) -> list[list[float]]:
    """Return how far each bar goes down and up from the median."""
    return [[one.median - one.low for one in spreads], [one.high - one.median for one in spreads]]


def _label(name: str, found: Report) -> str:
    if name == DECODER:
        return "decoder alone"
    judged = next(one for one in found.routes if one.route == name)
    if judged.even_tokens:
        near = " and ".join(map(str, judged.even_tokens))
        return f"{name} route, breaks even near {near} tokens"
    if len(judged.verdicts) == 1 and Verdict.UNCLEAR not in judged.verdicts:
        return f"{name} route, {next(iter(judged.verdicts))} at every length measured"
    return f"{name} route"
