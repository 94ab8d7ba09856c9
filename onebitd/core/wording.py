"""A sentence in two wordings: one for the log and those who ask now, one for what stays on disk.

A provider, the decoder or a client may say anything, a prompt's text or its ids too. What they say
helps whoever looks into a failure, and is nothing to keep for weeks.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Self

ELSEWHERE: Final = "its words are in the log"
"""Stands for what another program said."""


class Wording(NamedTuple):
    """Why something was so. No dataclass: `onebitctl status` would have to import that first.

    Attributes:
        full: with the words of other programs.
        brief: onebitd's own words alone.
    """

    full: str
    brief: str

    @classmethod
    def of(cls, own: str, quoted: str = "") -> Self:
        """Return a sentence of ours, and what somebody else said behind it.

        >>> Wording.of("status 3", "bad prompt 'secret'")
        Wording(full="status 3: bad prompt 'secret'", brief='status 3; its words are in the log')
        >>> Wording.of("status 3").brief
        'status 3'
        """
        return cls(f"{own}: {quoted}", f"{own}; {ELSEWHERE}") if quoted else cls(own, own)

    def __add__(self, own: str) -> Wording:  # type: ignore[override]  # it is text
        """Go on in both with words of ours."""
        return Wording(self.full + own, self.brief + own)

    def behind(self, own: str) -> Wording:
        """Put words of ours before both."""
        return Wording(own + self.full, own + self.brief)
