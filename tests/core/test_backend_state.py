"""The decoder's states."""

from __future__ import annotations

import pytest

from onebitd.core.backend_state import (
    TRANSITIONS,
    BackendEvent,
    BackendState,
    IllegalTransition,
    after,
    backoff_s,
    may_restart,
)


def test_after_a_whole_life_ends_stopped() -> None:
    """Start, load, serve, crash, back off, start again, stop."""
    state = BackendState.STOPPED
    for event in (
        "start",
        "spawned",
        "ready",
        "exited",
        "start",
        "spawned",
        "ready",
        "stop",
        "exited",
    ):
        state = after(state, BackendEvent(event))
    assert state is BackendState.STOPPED


def test_after_every_state_can_be_reached_and_every_pair_is_legal_or_refused() -> None:
    """The table has no dead state, and everything else is a bug that says so."""
    assert set(TRANSITIONS.values()) | {BackendState.STOPPED} == set(BackendState)
    for state in BackendState:
        for event in BackendEvent:
            if (state, event) not in TRANSITIONS:
                with pytest.raises(IllegalTransition, match=event):
                    after(state, event)


@pytest.mark.parametrize(
    ("ago", "most", "may"),
    [
        ([0.0], 0, False),
        ([0.0], 1, True),
        ([0.0, 10, 20, 30, 40], 5, True),
        ([0.0, 10, 20, 30, 40, 50], 5, False),
        ([0.0, 301, 302, 303, 304, 305], 5, True),
    ],
)
def test_may_restart_counts_within_the_window(ago: list[float], most: int, may: bool) -> None:
    """restart_max restarts in 300 s, older ones forgotten."""
    assert may_restart(ago, most) is may


def test_backoff_grows_and_is_bounded() -> None:
    """Doubled from a quarter of a second to half a minute."""
    pauses = [backoff_s(count) for count in range(1, 40)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.25, 30.0)
