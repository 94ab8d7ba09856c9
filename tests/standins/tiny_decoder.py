"""The stand-in decoder's model and its one slot, with llama-server's manners.

What llama-server does with its slot, as measured (tests/contract holds both against it):
- a task that finds the slot busy is put off; each release of the slot wakes one such task, one that
  asked for this slot by `id_slot` before all others;
- a slot action does not occupy the slot, so it wakes nobody when it is done;
- a restore empties the slot first, so a refused one leaves it empty.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.standins import tiny_state

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = len(SPECIALS) + 256
_PREFILL_STEP_S = 0.05

Gone = Callable[[], bool]


class Refused(Exception):
    """An error reply: status, type, message, and what else its object holds."""

    def __init__(self, status: int, kind: str, message: str, **more: object) -> None:
        super().__init__(message)
        self.status = status
        self.error = {"code": status, "message": message, "type": kind, **more}


class ClientLeft(Exception):
    """Nobody waits for this reply any more."""


def tokenize(text: str, parse_special: bool = True) -> list[int]:
    """Return an id for each special token (if they are to be found) and for each other byte."""
    ids = []
    while text:
        special = next((one for one in SPECIALS if text.startswith(one)), None)
        if special is not None and parse_special:
            ids.append(SPECIALS.index(special))
            text = text[len(special) :]
        else:
            ids += [len(SPECIALS) + byte for byte in text[0].encode()]
            text = text[1:]
    return ids


def piece(token: int) -> str:
    """Return the text of one token."""
    if token < len(SPECIALS):
        return SPECIALS[token]
    return bytes([token - len(SPECIALS)]).decode("latin-1")


def template(messages: Sequence[dict[str, object]]) -> str:
    """Return the chatml prompt of a conversation."""
    parts = []
    for message in messages:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(str(part["text"]) for part in content)
        parts.append(f"<|im_start|>{message['role']}\n{content}<|im_end|>\n")
    return "".join(parts) + "<|im_start|>assistant\n"


def said_after(digest: int) -> int:
    """The greedy next token: always a letter."""
    return len(SPECIALS) + ord("a") + digest % 26


class _Deferred:
    def __init__(self, wants_slot: bool) -> None:
        self.wants_slot = wants_slot
        self.woken = False


class Slot:
    """Slot 0: its tokens, its cache, and who may use it.

    Args:
        ctx_size: cells there are.
    """

    def __init__(self, ctx_size: int) -> None:
        self.ctx_size = ctx_size
        self.tokens: list[int] = []
        self.cells: list[int] = []
        self.busy = False
        self.stopping = False
        self._moved = threading.Condition()
        self._deferred: list[_Deferred] = []

    def _enter(self, wants_slot: bool, occupy: bool, gone: Gone) -> None:
        """Wait for a turn as llama-server's queue gives it; `_moved` is held."""
        if self.busy:
            me = _Deferred(wants_slot)
            self._deferred.append(me)
            while not me.woken or self.busy:
                self._moved.wait(0.02)
                if gone() or self.stopping:
                    if me in self._deferred:
                        self._deferred.remove(me)
                    raise ClientLeft
        self.busy = occupy

    def acquire(self, wants_slot: bool, gone: Gone) -> None:
        """Occupy the slot for a generation; ClientLeft when the client gives up first."""
        with self._moved:
            self._enter(wants_slot, True, gone)

    def release(self) -> None:
        """End a generation and wake one task."""
        with self._moved:
            self.busy = False
            first = next((one for one in self._deferred if one.wants_slot), None)
            if self._deferred:
                chosen = first or self._deferred[0]
                self._deferred.remove(chosen)
                chosen.woken = True
            self._moved.notify_all()

    def prefill(
        self, prompt: Sequence[int], reuse: bool, per_token_s: float, gone: Gone
    ) -> tuple[int, int]:
        """Evaluate a prompt in the occupied slot; return how much was cached and evaluated."""
        cached = 0
        while reuse and cached < min(len(self.tokens), len(prompt) - 1):
            if self.tokens[cached] != prompt[cached]:
                break
            cached += 1
        if cached > len(self.cells):
            self.tokens, self.cells = [], []
            raise Refused(500, "server_error", "Invalid input batch.")
        until = time.monotonic() + per_token_s * (len(prompt) - cached)
        while (left := until - time.monotonic()) > 0:
            if gone() or self.stopping:
                raise ClientLeft
            time.sleep(min(left, _PREFILL_STEP_S))
        before = self.cells[cached - 1] if cached else 0
        self.cells[cached:] = tiny_state.digests(prompt[cached:], before)
        self.tokens = list(prompt)
        return cached, len(prompt) - cached

    def generate(self, count: int, pause_s: Callable[[], float], gone: Gone) -> Iterator[int]:
        """Yield tokens, with a pause after each; all but the last are evaluated too."""
        for _ in range(max(1, count)):
            token = said_after(self.cells[-1])
            yield token
            time.sleep(pause_s())
            if gone() or self.stopping:
                raise ClientLeft
            if len(self.tokens) >= self.ctx_size:
                return
            self.tokens.append(token)
            self.cells.append(tiny_state.next_digest(self.cells[-1], token))
        del self.tokens[-1], self.cells[-1]

    def save(self, path: Path, gone: Gone) -> tuple[int, int]:
        """Write the slot's state; return its tokens and bytes."""
        with self._moved:
            self._enter(False, False, gone)
            data = tiny_state.build(self.tokens, self.cells)
            path.write_bytes(data)
            return len(self.tokens), len(data)

    def restore(self, path: Path, gone: Gone) -> tuple[int, int]:
        """Replace the slot's state; return its tokens and the bytes read."""
        with self._moved:
            self._enter(False, False, gone)
            self.tokens, self.cells = [], []
            try:
                state = tiny_state.parse(path.read_bytes())
            except (OSError, tiny_state.BadState) as error:
                raise Refused(
                    400,
                    "invalid_request_error",
                    "Unable to restore slot: No available space in KV cache or invalid slot save "
                    "file",
                ) from error
            if len(state.cells) > self.ctx_size:
                message = "Unable to restore slot: Restored prompt does not fit in the slot context"
                raise Refused(400, "invalid_request_error", message)
            self.tokens, self.cells = state.tokens, state.cells
            return len(state.tokens), state.n_read

    def erase(self, gone: Gone) -> int:
        """Empty the slot; return how many tokens it held."""
        with self._moved:
            self._enter(False, False, gone)
            count = len(self.tokens)
            self.tokens, self.cells = [], []
            return count
