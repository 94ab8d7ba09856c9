"""The limit of open files (getrlimit(2)): raised for the daemon, and not for what it starts.

A program that uses select(2) must not be given descriptors beyond 1024 without having asked.
"""

from __future__ import annotations

import contextlib
import resource

_before: tuple[int, int] | None = None


def raise_limit(wanted: int) -> int:
    """Raise the soft limit to `wanted` descriptors, as far as the hard limit allows.

    Returns:
        The limit as it is then; what was higher stays so.
    """
    global _before
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return max(soft, wanted)
    raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        _before = _before or (soft, hard)
        return raised
    return soft


def give_back(pid: int) -> None:
    """Let a child that was just started have the limit that there was before."""
    if _before is not None:
        with contextlib.suppress(OSError):  # it has ended, or is another user's by now
            resource.prlimit(pid, resource.RLIMIT_NOFILE, _before)
