"""What a start leaves behind in memory."""

from __future__ import annotations

import gc

from onebitd.adapters import memory


def test_settle_keeps_what_is_there_out_of_later_collections() -> None:
    """A stream does not stand still while the garbage collector looks at every module again."""
    before = gc.get_freeze_count()
    kept: list[object] = [[]]
    memory.settle()
    try:
        assert gc.get_freeze_count() > before
        assert not any(one is kept for one in gc.get_objects())
    finally:
        gc.unfreeze()
