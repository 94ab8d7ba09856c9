"""What other programs say is set apart from what onebitd says, where it comes in."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "onebitd"
TELLS_WHY = {
    *("HandoffError", "RequestError", "BackendError", "BackendGone", "BackendTimeout"),
    *("Skip", "Overtaken", "NotText", "_gone", "_failed", "_refused", "_lost"),
}
"""What is called with a sentence that may come to be a handoff's detail."""


def quoted_errors(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of each caught error that is formatted into such a sentence."""
    for handler in ast.walk(tree):
        if not isinstance(handler, ast.ExceptHandler) or handler.name is None:
            continue
        for call in ast.walk(handler):
            if isinstance(call, ast.Call) and _name_of(call.func) in TELLS_WHY:
                for argument in call.args:
                    if _formats(argument, handler.name):
                        yield call.lineno, handler.name


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _formats(argument: ast.expr, name: str) -> bool:
    for node in ast.walk(argument):
        value: ast.expr | None = None
        if isinstance(node, ast.FormattedValue):
            value = node.value
        elif isinstance(node, ast.Call) and _name_of(node.func) in ("str", "repr") and node.args:
            value = node.args[0]
        if isinstance(value, ast.Name) and value.id == name:
            return True
    return False


@pytest.mark.parametrize(
    ("code", "is_bad"),
    [
        ("HandoffError(reason, f'refused: {error}')", True),
        ("HandoffError(reason, str(error))", True),
        ("policy.Skip(reason, 'a' + str(error))", True),
        ("self._lost(reason, f'{error!r}')", True),
        ("HandoffError(reason, error.wording)", False),
        ("HandoffError(reason, 'refused', quoted=str(error))", False),
        ("HandoffError(reason, f'refused: {error.strerror}')", False),
        ("log.warning(f'{error}')", False),
    ],
)
def test_quoting_rule_tells_own_words_from_others(code: str, is_bad: bool) -> None:
    """The rule below finds what it is there for."""
    tree = ast.parse(f"try:\n    pass\nexcept E as error:\n    {code}\n")
    assert bool(list(quoted_errors(tree))) is is_bad


def test_quoting_no_sentence_has_an_errors_text_as_onebitds_own_words() -> None:
    """Its detail would be kept for weeks, whatever a provider or the decoder says in it.

    Give the error's `wording`, or its text as `quoted`.
    """
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for package in ("adapters", "core", "services")
        for path in sorted((ROOT / package).glob("*.py"))
        if " as e" in (text := path.read_text())
        for line, name in quoted_errors(ast.parse(text))
    ]
    assert found == []
