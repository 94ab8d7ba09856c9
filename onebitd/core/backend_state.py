"""The decoder's life as a table: which event leads from which state to which.

STOPPED --start--> STARTING --spawned--> LOADING --ready--> READY
   ^                  |                     |                 |
   |                  `-----------exited----+--------exited---+--> BACKOFF --start--> STARTING
   `----exited---- STOPPING <----stop-------+-----------------'       |
                                                                      `--give_up--> FAILED
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final


class BackendState(enum.StrEnum):
    """Where the decoder is."""

    STOPPED = "stopped"
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    BACKOFF = "backoff"
    FAILED = "failed"


class BackendEvent(enum.StrEnum):
    """What happens to it."""

    START = "start"
    SPAWNED = "spawned"
    READY = "ready"
    EXITED = "exited"
    STOP = "stop"
    GIVE_UP = "give_up"


_S, _E = BackendState, BackendEvent

TRANSITIONS: Final[dict[tuple[BackendState, BackendEvent], BackendState]] = {
    (_S.STOPPED, _E.START): _S.STARTING,
    (_S.STARTING, _E.SPAWNED): _S.LOADING,
    (_S.STARTING, _E.EXITED): _S.BACKOFF,
    (_S.STARTING, _E.STOP): _S.STOPPING,
    (_S.LOADING, _E.READY): _S.READY,
    (_S.LOADING, _E.EXITED): _S.BACKOFF,
    (_S.LOADING, _E.STOP): _S.STOPPING,
    (_S.READY, _E.EXITED): _S.BACKOFF,
    (_S.READY, _E.STOP): _S.STOPPING,
    (_S.STOPPING, _E.EXITED): _S.STOPPED,
    (_S.BACKOFF, _E.START): _S.STARTING,
    (_S.BACKOFF, _E.STOP): _S.STOPPED,
    (_S.BACKOFF, _E.GIVE_UP): _S.FAILED,
    (_S.FAILED, _E.STOP): _S.FAILED,
    (_S.STOPPED, _E.STOP): _S.STOPPED,
}


class IllegalTransition(RuntimeError):
    """A bug in the supervisor: an event that cannot happen in this state."""


def after(state: BackendState, event: BackendEvent) -> BackendState:
    """Return the state that `event` leads to.

    Raises:
        IllegalTransition: the table has no such row.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"{event} while {state}") from None


RESTART_WINDOW_S: Final = 300.0
"""Restarts older than this no longer count against `backend.restart_max`."""

_BACKOFF_FIRST_S: Final = 0.25
_BACKOFF_LAST_S: Final = 30.0


def may_restart(exits_ago_s: Sequence[float], restart_max: int) -> bool:
    """Say whether one more restart stays within `restart_max` in RESTART_WINDOW_S.

    Args:
        exits_ago_s: how long ago each unwanted exit was, the newest (0.0) included.
        restart_max: restarts allowed in the window.
    """
    return sum(1 for ago in exits_ago_s if ago < RESTART_WINDOW_S) <= restart_max


def backoff_s(recent_exits: int) -> float:
    """Return the pause before the next start: doubled with each recent exit, bounded.

    >>> [backoff_s(n) for n in (1, 2, 3)], backoff_s(50)
    ([0.25, 0.5, 1.0], 30.0)
    """
    return float(min(_BACKOFF_LAST_S, _BACKOFF_FIRST_S * 2.0 ** min(recent_exits - 1, 10)))
