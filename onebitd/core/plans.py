"""What is decided about one prompt: a handoff, or none."""

from __future__ import annotations

import dataclasses

from onebitd.core.handoff import Reason, Route


@dataclasses.dataclass(frozen=True, slots=True)
class HandOff:
    """Hand the prompt, less its last token, to the provider.

    `explored`: the decoder is believed to be faster, or nothing is known. `limit_ms`: when the run
    has taken so long and the slot is free, the decoder does it; None: whatever the provider's own
    time limit allows.
    """

    route: Route
    explored: bool = False
    limit_ms: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Skip:
    """Let the decoder prefill; `detail` is a sentence. `explored`: the provider may be faster."""

    reason: Reason
    detail: str
    explored: bool = False


Plan = HandOff | Skip
