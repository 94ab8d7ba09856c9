"""What `onebitctl advise --split` prints: pure functions to lines of text and to an object."""

from __future__ import annotations

import dataclasses
from typing import Any

from onebitd.core.split import (
    TILE_ROWS,
    Engines,
    Split,
    best_concurrent,
    best_sequential,
    end_to_end,
)
from onebitd.surfaces.cli_text import wrap

_LABEL: int = 13


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """What is asked: rows, both engines' rates unless only a ceiling was given, and shares."""

    rows: int
    engines: Engines | None
    ceiling: float
    shares: tuple[float, ...]


def page(question: Question) -> str:
    """Return the answer for people, at most 80 columns wide."""
    lines = []
    if question.engines is not None:
        lines += _engine_lines(question.rows, question.engines)
        words = (
            f"{question.ceiling:.3f}x (1 + {TILE_ROWS} g/t) if rows could be split freely, and both"
            " engines kept their rates"
        )
        lines += _labelled("ceiling", words)
    else:
        lines += _labelled("ceiling", f"{question.ceiling:.3f}x, as given")
    if question.shares:
        lines += ["", *_share_lines(question)]
    return "\n".join(lines)


def split_object(question: Question) -> dict[str, Any]:
    """Return the answer for programs; null where only a ceiling was given."""
    engines = question.engines
    sequential = concurrent = None
    if engines is not None:
        sequential = best_sequential(question.rows, engines)
        concurrent = best_concurrent(question.rows, engines)
    return {
        "rows": None if engines is None else question.rows,
        "tile_rows": TILE_ROWS,
        "gpu_ms_per_row": None if engines is None else engines.gpu_ms_per_row,
        "npu_ms_per_tile": None if engines is None else engines.npu_ms_per_tile,
        "gpu_ms": None if engines is None else engines.gpu_ms(question.rows),
        "npu_ms": None if engines is None else engines.npu_ms(question.rows),
        "sequential": _split_object(sequential),
        "concurrent": _split_object(concurrent),
        "ceiling": question.ceiling,
        "end_to_end": [
            {
                "gemm_share": share,
                "at_ceiling": end_to_end(share, question.ceiling),
                "in_tiles": None if concurrent is None else end_to_end(share, concurrent.speedup),
            }
            for share in question.shares
        ],
    }


def _split_object(split: Split | None) -> dict[str, Any] | None:
    return None if split is None else {**dataclasses.asdict(split), "npu_tiles": split.npu_tiles}


def _engine_lines(rows: int, engines: Engines) -> list[str]:
    gpu, npu = engines.gpu_ms_per_row, engines.npu_ms_per_row
    lines = [f"One prompt of {rows} rows on two engines", ""]
    lines += _labelled("GPU alone", f"{_ms(engines.gpu_ms(rows))}: {gpu:.4g} ms a row (g)")
    words = f"{_ms(engines.npu_ms(rows))}: {engines.npu_ms_per_tile:.4g} ms a tile (t) of"
    lines += _labelled("NPU alone", f"{words} {TILE_ROWS} rows, {npu:.4g} ms a row")
    lines += _labelled("in sequence", _sequential_words(rows, engines))
    lines += _labelled("concurrently", _concurrent_words(best_concurrent(rows, engines)))
    return lines


def _sequential_words(rows: int, engines: Engines) -> str:
    best = best_sequential(rows, engines)
    if best.npu_rows == 0:
        return (
            f"never better than the GPU alone. provider(m) + decoder({rows} - m) is least at"
            " m = 0: each row that the NPU takes costs more than the GPU would, and nothing runs"
            " meanwhile"
        )
    if best.gpu_rows == 0:
        return (
            f"provider(m) + decoder({rows} - m) is least at m = {rows}: the NPU's rate is better,"
            " so it takes the whole prompt, which is no split either"
        )
    return (
        f"provider(m) + decoder({rows} - m) is least at m = {best.npu_rows},"
        f" {_ms(best.ms)}: the NPU's rate is better; only the rest of {best.gpu_rows} rows, less"
        " than a tile, is cheaper on the GPU"
    )


def _concurrent_words(best: Split) -> str:
    if best.npu_rows == 0:
        return "not worth a single tile: it would take longer than the GPU for everything"
    tiles = f"{best.npu_tiles} {'tile' if best.npu_tiles == 1 else 'tiles'}"
    return (
        f"{_ms(best.ms)}, {best.speedup:.3f}x: {tiles} ({best.npu_rows} rows) on the NPU while the"
        f" GPU takes {best.gpu_rows}"
    )


def _share_lines(question: Question) -> list[str]:
    tiles = None
    if question.engines is not None:
        tiles = best_concurrent(question.rows, question.engines).speedup
    lines = [
        "End to end, when the split touches only a share of prefill:",
        "",
        "     SHARE  AT THE CEILING" + ("" if tiles is None else "  IN WHOLE TILES"),
    ]
    for share in question.shares:
        line = f"{share:>10.1%}  {end_to_end(share, question.ceiling):>13.3f}x"
        lines.append(line + ("" if tiles is None else f"  {end_to_end(share, tiles):>13.3f}x"))
    return lines


def _labelled(label: str, words: str) -> list[str]:
    return wrap(words, f"{label:<{_LABEL}} ", " " * (_LABEL + 1))


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"
