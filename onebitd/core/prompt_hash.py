"""A keyed hash of a prompt's token ids: tells that a prompt came again, and nothing of what it was.

Without the key nobody can try prompts against it; each instance has a key of its own, so that
equal prompts of two instances are not seen to be equal.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

KEY_BYTES: Final = 32
_DIGEST_BYTES: Final = 8
_ID_MASK: Final = 0xFFFFFFFF


def prompt_hash(ids: Sequence[int], key: bytes) -> str:
    """Return 16 hex digits: BLAKE2b with the key over the ids, 32 bits each, little-endian.

    Args:
        ids: of the whole prompt. What does not fit 32 bits, as no vocabulary has it, is cut.
        key: `KEY_BYTES` random bytes.
    """
    try:
        numbers = array("I", ids)
    except OverflowError:
        numbers = array("I", [number & _ID_MASK for number in ids])
    if sys.byteorder == "big":
        numbers.byteswap()
    return blake2b(numbers.tobytes(), key=key, digest_size=_DIGEST_BYTES).hexdigest()
