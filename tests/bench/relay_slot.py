"""Slot 0 of the relay benchmark's backend: a token for each byte, and no time for anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.standins import tiny_state


def ids_of(prompt: object) -> list[int]:
    """Return the ids of a prompt: a text's bytes, or ids as they are."""
    if isinstance(prompt, str):
        return list(prompt.encode())
    return [int(one) for one in prompt] if isinstance(prompt, list) else []


def template(document: dict[str, Any]) -> str:
    """Return the prompt of a chat: what was said, with nothing around it."""
    return "".join(message["content"] for message in document["messages"])


class Slot:
    """The slot.

    Args:
        directory: of state files.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tokens: list[int] = []

    def act(self, action: str, name: str) -> dict[str, Any]:
        """Save, restore or erase; return the answer."""
        path = self._directory / name
        if action == "save":
            path.write_bytes(tiny_state.build(self._tokens))
            return {"n_saved": len(self._tokens), "n_written": path.stat().st_size}
        if action == "restore":
            with path.open("rb") as file:
                count = int.from_bytes(file.read(12)[8:], "little")
                self._tokens = memoryview(file.read(4 * count)).cast("i").tolist()
            timings = {"restore_ms": 0.0}
            return {"n_restored": count, "n_read": path.stat().st_size, "timings": timings}
        count, self._tokens = len(self._tokens), []
        return {"n_erased": count}

    def evaluate(self, document: dict[str, Any]) -> dict[str, Any]:
        """Take the prompt of a request; return the reply's timings."""
        prompt = template(document) if "messages" in document else document.get("prompt", "")
        held, ids = self._tokens, ids_of(prompt)
        cached = min(len(held), len(ids) - 1) if ids[: len(held)] == held else 0
        self._tokens = ids
        found = {"cache_n": cached, "prompt_n": len(ids) - cached, "prompt_ms": 0.1}
        return found | {"predicted_n": 1, "predicted_ms": 0.1}
