"""The hash of a prompt's ids."""

from __future__ import annotations

import hashlib
import struct

import pytest

from onebitd.core.prompt_hash import prompt_hash

KEY, OTHER = b"k" * 32, b"o" * 32


def test_prompt_hash_is_keyed_blake2b_of_little_endian_ids() -> None:
    """Whoever has the key can compute it from the documentation alone."""
    ids = [1, 2, 151_643, 2**32 - 1]
    data = struct.pack("<4I", *ids)
    assert prompt_hash(ids, KEY) == hashlib.blake2b(data, key=KEY, digest_size=8).hexdigest()
    assert prompt_hash(tuple(ids), KEY) == prompt_hash(ids, KEY)


@pytest.mark.parametrize("ids", [[], [1, 2], [2, 1, 3], [1, 2, 3, 0], [258, 3], [-1], [2**40, 7]])
def test_prompt_hash_another_prompt_or_key_is_another_hash(ids: list[int]) -> None:
    """Order and length count, ids that nobody has do no harm, and instances do not compare."""
    assert prompt_hash(ids, KEY) != prompt_hash([1, 2, 3], KEY)
    assert prompt_hash(ids, KEY) != prompt_hash(ids, OTHER)
    assert prompt_hash(ids, KEY) == prompt_hash(ids, KEY)
    assert len(prompt_hash(ids, KEY)) == 16
