"""Which of the two exposition formats a scraper gets, by its Accept header."""

from __future__ import annotations

import enum
from typing import Final


class Format(enum.Enum):
    """A format; its value is the Content-Type."""

    TEXT = "text/plain; version=0.0.4; charset=utf-8"
    OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


_TYPES: Final = {"application/openmetrics-text": Format.OPENMETRICS, "text/plain": Format.TEXT}
_VERSIONS: Final = {Format.OPENMETRICS: ("1.0.0", "0.0.1"), Format.TEXT: ("0.0.4",)}


def format_for(accept: str | None) -> Format:
    """Return OpenMetrics for whom asks for it and not rather for text, text for everybody else.

    A version that is not spoken here is not what was asked for; a header that cannot be read asks
    for nothing.

    >>> format_for("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2").name
    'OPENMETRICS'
    >>> format_for("*/*") is format_for(None) is Format.TEXT
    True
    """
    wanted = {Format.OPENMETRICS: 0.0, Format.TEXT: 0.0}
    for entry in (accept or "").split(","):
        media, *rest = (part.strip().lower() for part in entry.split(";"))
        found = _TYPES.get(media)
        if found is None:
            continue
        parameters = dict(part.split("=", 1) for part in rest if "=" in part)
        if parameters.get("version", "").strip('"') in ("", *_VERSIONS[found]):
            wanted[found] = max(wanted[found], _quality(parameters.get("q", "1")))
    openmetrics = wanted[Format.OPENMETRICS]
    return Format.OPENMETRICS if 0.0 < openmetrics >= wanted[Format.TEXT] else Format.TEXT


def _quality(text: str) -> float:
    try:
        quality = float(text)
    except ValueError:
        return 0.0
    return quality if 0.0 <= quality <= 1.0 else 0.0
