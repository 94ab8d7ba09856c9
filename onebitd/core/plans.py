"""What is decided about one prompt: a handoff, or none."""

from __future__ import annotations

import dataclasses

from onebitd.core.handoff import Reason, Route
from onebitd.core.wording import Wording


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
    """Let the decoder prefill.

    Attributes:
        reason: why, in a word.
        detail: why, in a sentence.
        explored: the provider may be faster.
        brief: the sentence without words of other programs or of the client; None: it has none.
    """

    reason: Reason
    detail: str
    explored: bool = False
    brief: str | None = None

    @classmethod
    def because(cls, reason: Reason, why: Wording) -> Skip:
        """Return one whose sentence has two wordings."""
        return cls(reason, why.full, brief=why.brief)

    @property
    def why(self) -> Wording:
        """Both wordings of the sentence."""
        return Wording(self.detail, self.detail if self.brief is None else self.brief)


Plan = HandOff | Skip
