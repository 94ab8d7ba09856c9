"""The examples in the docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import onebitd.doctor

MODULES = [f"onebitd.doctor.{one.name}" for one in pkgutil.iter_modules(onebitd.doctor.__path__)]


@pytest.mark.parametrize("name", [*MODULES, "onebitd.core.unit_sandbox"])
def test_docstrings_examples_are_true(name: str) -> None:
    """What a reader would try gives what is written there."""
    assert doctest.testmod(importlib.import_module(name)).failed == 0
