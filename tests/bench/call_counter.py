"""Counts the Python functions that a program's main thread enters, between two SIGUSR1.

Installed as a `sitecustomize.py` of its own (`installed_in`), so that it gets into a daemon that
knows nothing of it. The second signal writes one JSON object, calls by function, to the file that
BENCH_CALLS names. Standard library only.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

_counts: Counter[CodeType] = Counter()


def _count(frame: FrameType, event: str, argument: object) -> None:
    if event == "call":
        _counts[frame.f_code] += 1


def _toggle(number: int, frame: FrameType | None) -> None:
    if sys.getprofile() is None:
        _counts.clear()
        sys.setprofile(_count)
        return
    sys.setprofile(None)
    found: Counter[str] = Counter()
    for code, calls in _counts.items():
        found["/".join(Path(code.co_filename).parts[-2:]) + ":" + code.co_qualname] += calls
    path = Path(os.environ["BENCH_CALLS"])
    path.with_suffix(".new").write_text(json.dumps(found))
    path.with_suffix(".new").rename(path)


def installed_in(directory: Path, code: Path) -> dict[str, str]:
    """Return the environment in which a program counts its calls.

    Args:
        directory: empty; gets the module, and the counts as `calls`.
        code: where the program's own packages are.
    """
    shutil.copyfile(__file__, directory / "sitecustomize.py")
    return {"PYTHONPATH": f"{directory}:{code}", "BENCH_CALLS": str(directory / "calls")}


if __name__ == "sitecustomize":
    signal.signal(signal.SIGUSR1, _toggle)
