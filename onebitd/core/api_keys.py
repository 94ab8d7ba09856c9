"""API keys, kept as digests: what is compared has one length, and no key shows anywhere."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
from collections.abc import Iterable, Sequence
from typing import Final

_DIGEST_BYTES: Final = 32

Headers = Iterable[tuple[bytes, bytes]]


class ApiKeys:
    """The keys that clients must show one of; false when none are configured.

    Args:
        keys: as the file has them; none: everybody may ask.
        secret: 16 to 64 random bytes of this process, so that nobody can choose what the digest of
            a guess has in common with that of a key.
    """

    def __init__(self, keys: Sequence[str], secret: bytes) -> None:
        self._secret = secret
        self._digests: list[bytes] = []
        for key in keys:
            self._digests.append(self._digest(key.encode()))
            if not key.isascii():
                # Some HTTP clients write headers in this encoding.
                with contextlib.suppress(UnicodeEncodeError):
                    self._digests.append(self._digest(key.encode("latin-1")))

    def __bool__(self) -> bool:
        return bool(self._digests)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def allow(self, headers: Headers) -> bool:
        """Say whether one of the keys is among those that a request shows.

        Each key shown is compared with each key known, whole digests, so the time tells neither
        how close one came nor to which.

        Args:
            headers: of the request, names in lower case.
        """
        if not self._digests:
            return True
        matches = 0
        for shown in shown_keys(headers):
            digest = self._digest(shown)
            for known in self._digests:
                matches += hmac.compare_digest(digest, known)
        return matches > 0

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, digest_size=_DIGEST_BYTES, key=self._secret).digest()


def shown_keys(headers: Headers) -> list[bytes]:
    """Return what a request shows as keys: in each Authorization of Bearer, in each X-Api-Key.

    >>> shown_keys([(b"authorization", b"bearer  a"), (b"x-api-key", b"b")])
    [b'a', b'b']
    """
    shown: list[bytes] = []
    for name, value in headers:
        if name == b"x-api-key":
            shown.append(value.strip())
        elif name == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer":
                shown.append(token.strip())
    return [key for key in shown if key]
