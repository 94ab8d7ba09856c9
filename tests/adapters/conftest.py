"""What tests of programs that are started have in common."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from onebitd.adapters.process import Guard
from tests.harness import descendants


@pytest.fixture
def guard() -> Iterator[Guard]:
    """Make a guard, and see that no process and no descriptor of a run is left."""
    made = Guard()
    children, files = set(descendants(os.getpid())), len(os.listdir("/proc/self/fd"))
    yield made
    assert set(descendants(os.getpid())) == children
    assert len(os.listdir("/proc/self/fd")) == files
    made.close()
