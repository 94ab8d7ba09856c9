"""Whether a decoder uses what is handed over to it, by its own figures."""

from __future__ import annotations

import dataclasses
from typing import Final

from onebitd.core.state_layout import KvSection, Layout

WASTED_MAX: Final = 3
"""Wasted handoffs in a row after which the decoder is taken at its word."""


@dataclasses.dataclass(slots=True)
class Reuse:
    """Whether this decoder uses what is handed over.

    Attributes:
        wasted_in_row: handoffs after which it evaluated the prompt all over again.
    """

    wasted_in_row: int = 0
    _generation: int = -1

    def note(self, generation: int, prompt_tokens: int, evaluated_tokens: int) -> None:
        """Take the decoder's own figures of a reply to a handoff into account.

        Args:
            generation: which start of the decoder it was; another one begins anew.
            prompt_tokens, evaluated_tokens: of the prompt, and how many of them it evaluated.
        """
        if generation != self._generation:
            self._generation, self.wasted_in_row = generation, 0
        wasted = evaluated_tokens * 2 > prompt_tokens
        self.wasted_in_row = self.wasted_in_row + 1 if wasted else 0

    def forgive(self) -> bool:
        """Try again; say whether that changes anything."""
        was_off, self.wasted_in_row = self.wasted_in_row >= WASTED_MAX, 0
        return was_off

    def refusal(self, generation: int, layout: Layout | None, *, swa_full: bool) -> str | None:
        """Return why nothing is handed over to this decoder any more, None as long as it is.

        Args:
            generation: of the decoder that runs.
            layout: of its state.
            swa_full: it was started with `--swa-full`.
        """
        if generation != self._generation or self.wasted_in_row < WASTED_MAX:
            return None
        why = f"the decoder evaluated the prompt again after each of {self.wasted_in_row} handoffs"
        kinds = () if layout is None else layout.sections
        attention = [part for part in kinds if isinstance(part, KvSection)]
        if len(attention) > 1 and not swa_full:
            return f"{why}: its model has a sliding window, and needs --swa-full (backend.args)"
        if len(attention) < len(kinds):
            return f"{why}: this build does not keep the state of a recurrent model"
        return why
