"""The provider contract (onebit-provider(7)): its command line, its files, its result line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Final

from onebitd.core.config import NO_LOCK_VARIABLE

TOKENS_FILE: Final = "tokens.txt"
STATE_FILE: Final = "state.bin"
HEADER_FILE: Final = "layout.json"

LLAMA_SERVER_VARIABLE: Final = "ONEBIT_LLAMA_SERVER"
STATE_EXAMPLE_VARIABLE: Final = "ONEBIT_STATE_EXAMPLE"

_DETAIL_LIMIT: Final = 300


def file_route_argv(
    program: str, *, tokens_file: str, state_file: str, model: str, elfs: str | None
) -> list[str]:
    """Return the command line of a run on the file route."""
    argv = [program, "--tokens", tokens_file, "--out", state_file, "--model", model]
    return argv if elfs is None else [*argv, "--elfs", elfs]


def shared_route_argv(
    program: str,
    *,
    tokens_file: str,
    model: str,
    header_file: str,
    fds: Sequence[int],
    elfs: str | None,
) -> list[str]:
    """Return the command line of a run on the shared route.

    Args:
        header_file: the JSON message that the decoder sent.
        fds: numbers of the descriptors that the program inherits, in the order they arrived.
    """
    argv = [program, "--tokens", tokens_file, "--model", model, "--layout", header_file]
    argv += ["--fds", ",".join(map(str, fds))]
    return argv if elfs is None else [*argv, "--elfs", elfs]


def environment(
    inherited: Mapping[str, str],
    extra: Mapping[str, str],
    *,
    lock_held: bool,
    llama_server: str,
    state_example: str | None = None,
) -> dict[str, str]:
    """Return the provider's environment.

    With the device lock held for it, the engine must not take the same lock again: it would wait
    for its own parent for ever. A provider that runs a llama-server of its own finds the decoder's
    in ONEBIT_LLAMA_SERVER: state files of another build may be refused. One that writes the file
    itself finds one that the decoder saved in ONEBIT_STATE_EXAMPLE: the version and the types are
    read there. Without such a file the variable is not passed on: the daemon's own speaks of
    another decoder.
    """
    env = {**inherited, LLAMA_SERVER_VARIABLE: llama_server}
    env.pop(STATE_EXAMPLE_VARIABLE, None)
    if state_example is not None:
        env[STATE_EXAMPLE_VARIABLE] = state_example
    env.update(extra)
    if lock_held:
        env[NO_LOCK_VARIABLE] = "1"
    return env


def format_tokens(tokens: Sequence[int]) -> bytes:
    """Return the ids file: one decimal number a line."""
    return b"%d\n" * len(tokens) % tuple(tokens)  # no loop of ours over a million ids


def reported_prefill_ms(stdout_tail: bytes) -> float | None:
    """Return `prefill_ms` of a JSON object on the last line of stdout, None if there is none."""
    lines = stdout_tail.strip().splitlines()
    if not lines:
        return None
    try:
        found = json.loads(lines[-1])
    except (ValueError, RecursionError):
        return None
    value = found.get("prefill_ms") if isinstance(found, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and 0 <= value < 1e9 else None


def last_line(stderr_tail: bytes) -> str:
    """Return the last line of stderr that says something, printable and cut to a sentence."""
    for raw in reversed(stderr_tail.splitlines()):
        text = raw.decode("utf-8", "replace").strip()
        text = "".join(letter if letter.isprintable() else " " for letter in text).strip()
        if text:
            return text[:_DETAIL_LIMIT]
    return ""
