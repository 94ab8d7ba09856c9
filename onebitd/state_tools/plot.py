"""The error by layer and position as a heat map, K and V apart; needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from onebitd.core.errors import UsageError
from onebitd.core.python_packages import install_hint
from onebitd.core.state_compare import row_errors
from onebitd.core.state_pairs import Pair

_MOST_COLUMNS: Final = 1024
_RANGE: Final = (1e-4, 1.0)


def heat_map(pairs: Sequence[Pair], title: str) -> bytes:
    """Return a PNG: one panel for each section and part, a row a layer, positions to the right.

    A column of a long state is the worst of its positions.

    Raises:
        UsageError: matplotlib is not installed.
    """
    figure_module, canvas, colours = load_matplotlib()
    groups: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        groups.setdefault((pair.section, pair.part), []).append(pair)
    figure = figure_module.Figure(figsize=(10, 1 + 2.4 * len(groups)), layout="constrained")
    canvas.FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=9)
    image = None
    for number, ((section, part), members) in enumerate(groups.items(), 1):
        axes = figure.add_subplot(len(groups), 1, number)
        pos = members[0].pos
        image = axes.imshow(
            np.clip(np.stack([_columns(row_errors(pair)) for pair in members]), *_RANGE),
            aspect="auto",
            interpolation="nearest",
            cmap="viridis",
            norm=colours.LogNorm(*_RANGE),
            extent=(float(pos[0]) - 0.5, float(pos[-1]) + 0.5, len(members) - 0.5, -0.5),
        )
        axes.set_ylabel(f"{section} {part}: layer")
    if image is not None:
        figure.axes[-1].set_xlabel("position")
        figure.colorbar(image, ax=figure.axes, label="relative row error", extend="both")
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=120)
    return out.getvalue()


def _columns(errors: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return at most so many columns, each the largest of its errors."""
    if len(errors) <= _MOST_COLUMNS:
        return errors
    starts = np.linspace(0, len(errors), _MOST_COLUMNS, endpoint=False).astype(int)
    return np.asarray(np.maximum.reduceat(errors, starts))


def load_matplotlib() -> tuple[Any, Any, Any]:
    """Return the modules for figures, for a canvas that needs no display, and for colours.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        from matplotlib import colors, figure
        from matplotlib.backends import backend_agg
    except ImportError as error:
        hint = install_hint("matplotlib", "apt install python3-matplotlib")
        raise UsageError(f"matplotlib is not installed: {hint}") from error
    return figure, backend_agg, colors
