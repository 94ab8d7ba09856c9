"""Causal attention over the keys so far, with a window or without.

The scores of all queries with all keys would be n * n numbers a head. They are made for one head of
the keys and for so many queries at a time as fit `MAX_SCORES`; each block of queries looks at no
key behind its last query, and at none before its first query's window.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from onebitd.prefill_numpy.model_file import Floats

MAX_SCORES: Final = 1 << 22
"""Scores at a time: 16 MiB of float32, which the last-level cache of a desktop still helps with."""


def attend(
    queries: Floats, keys: Floats, values: Floats, start: int, *, scale: float, window: int
) -> Floats:
    """Return what each query gathers from the values.

    Args:
        queries: shape (n, heads, head_k), those of positions `start` and following.
        keys, values: of positions 0 to `start` + n - 1, shape (positions, kv heads, head_k or
            head_v). Each of their heads serves `heads / kv heads` heads of the queries, in order.
        scale: multiplies the scores.
        window: a query sees itself and so many less one before it; 0: everything before it.

    Returns:
        shape (n, heads * head_v).
    """
    n, n_head, head_k = queries.shape
    n_kv, head_v = values.shape[1:]
    group = n_head // n_kv
    out = np.empty((n, n_kv, group, head_v), np.float32)
    grouped = queries.reshape(n, n_kv, group, head_k)
    step = max(1, MAX_SCORES // (group * len(keys)))
    for at in range(0, n, step):
        stop = min(n, at + step)
        first = max(0, start + at - window + 1) if window else 0
        last = start + stop
        hidden = _hidden(start + at, last, first, window)
        for head in range(n_kv):
            block = grouped[at:stop, head].reshape(-1, head_k)
            scores: Floats = np.matmul(block * np.float32(scale), keys[first:last, head].T)
            scores = scores.reshape(stop - at, group, last - first)
            scores[np.broadcast_to(hidden[:, None], scores.shape)] = -np.inf
            _softmax(scores)
            found = scores.reshape(-1, last - first) @ values[first:last, head]
            out[at:stop, head] = found.reshape(stop - at, group, head_v)
    return out.reshape(n, n_head * head_v)


def _hidden(start: int, stop: int, first: int, window: int) -> np.typing.NDArray[np.bool_]:
    """Return which keys from `first` on the queries from `start` on do not see."""
    distance = np.arange(start, stop)[:, None] - np.arange(first, stop)
    hidden = distance < 0
    return hidden | (distance >= window) if window else hidden


def _softmax(scores: Floats) -> None:
    """Turn the last axis into weights, in place; each row has a score that is not hidden."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
