"""One provider run: its group started, pumped, bounded in time and memory, and ended."""

from __future__ import annotations

import dataclasses
import enum
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import trio

from onebitd.adapters.process import Child, Guard, SpawnError, describe_exit, pump_lines, spawn
from onebitd.core import provider_contract
from onebitd.core.errors import HandoffError
from onebitd.core.handoff import Reason

_TERM_GRACE_S: Final = 2.0
"""A provider past its time limit may clean up for this long before SIGKILL."""
_CANCEL_GRACE_S: Final = 0.4
"""When nobody waits for the result any more, less: the slot must be free within a second."""
_KILL_GRACE_S: Final = 0.5
_KEPT_LINES: Final = 20
_OOM_SCORE_ADJ: Final = 400
"""Above the decoder's: of two that are equally big the provider goes first. Its end costs one
prompt a fallback; the decoder's costs the running reply and minutes of loading."""
_PUMP_TAIL_S: Final = 0.2
"""How long output may trail the end of the group: a pipe can outlive it in somebody's hands."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProviderResult:
    """A run that ended with status 0. Times in milliseconds; `reported_ms` is its own figure."""

    wall_ms: float
    reported_ms: float | None


class _End(enum.Enum):
    BY_ITSELF = "by itself"
    TIMED_OUT = "timed out"
    STUCK = "stuck"


async def run_provider(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    timeout_s: float,
    guard: Guard,
    on_line: Callable[[str, bytes], None],
    on_stuck: Callable[[Child], None],
    pass_fds: Sequence[int] = (),
    late_counts: bool = False,
) -> ProviderResult:
    """Run the provider once, to its end.

    Args:
        argv: see provider_contract.
        env: its whole environment.
        timeout_s: its time limit.
        guard: kills its group if the daemon dies.
        on_line: called with ("stdout" | "stderr", line) for the log.
        on_stuck: given the run when not even SIGKILL ended it; it may still use the device.
        pass_fds: descriptors that it inherits, beside its three pipes nothing else.
        late_counts: a run past its time limit that ends with status 0 when it is asked to has done
            its work.

    Raises:
        HandoffError: `provider_exit` (status, or it could not be started) or `provider_timeout`.

    A cancel kills the group and returns within a second; nothing of the run is left, unless
    `on_stuck` was called.
    """
    started = time.monotonic()
    try:
        child = spawn(argv, env=env, guard=guard, oom_score_adj=_OOM_SCORE_ADJ, pass_fds=pass_fds)
    except SpawnError as error:
        raise HandoffError(Reason.PROVIDER_EXIT, error.wording) from error
    stdout: deque[bytes] = deque(maxlen=_KEPT_LINES)
    stderr: deque[bytes] = deque(maxlen=_KEPT_LINES)

    def keep(name: str, kept: deque[bytes]) -> Callable[[bytes], None]:
        def take(line: bytes) -> None:
            kept.append(line)
            on_line(name, line)

        return take

    async with trio.open_nursery() as nursery:
        nursery.start_soon(pump_lines, child.stdout, keep("stdout", stdout))
        if child.stderr is not None:
            nursery.start_soon(pump_lines, child.stderr, keep("stderr", stderr))
        end = await _wait_ended(child, timeout_s, on_stuck)
        wall_ms = (time.monotonic() - started) * 1000.0
        nursery.cancel_scope.deadline = trio.current_time() + _PUMP_TAIL_S
    said = provider_contract.last_line(b"\n".join(stderr)) or ""
    if end is _End.STUCK:
        raise HandoffError(
            Reason.PROVIDER_TIMEOUT,
            f"the provider (pid {child.pid}) cannot be killed",
            quoted=said,
        )
    if end is _End.TIMED_OUT and not (late_counts and child.returncode == 0):
        raise HandoffError(
            Reason.PROVIDER_TIMEOUT,
            f"no result within {timeout_s:g} s (provider.timeout_s)",
            quoted=said,
        )
    if child.returncode:
        raise HandoffError(Reason.PROVIDER_EXIT, describe_exit(child.returncode), quoted=said)
    return ProviderResult(wall_ms, provider_contract.reported_prefill_ms(b"\n".join(stdout)))


async def _wait_ended(child: Child, timeout_s: float, on_stuck: Callable[[Child], None]) -> _End:
    """Wait for the end, or bring it about."""
    end = _End.TIMED_OUT
    try:
        with trio.move_on_after(timeout_s):
            await child.wait()
            end = _End.BY_ITSELF
    except trio.Cancelled:
        if not await child.stop(term_grace_s=_CANCEL_GRACE_S, kill_grace_s=_KILL_GRACE_S):
            on_stuck(child)
        raise
    # Whatever the leader left behind in its group goes too.
    grace_s = _TERM_GRACE_S if end is _End.TIMED_OUT else 0.0
    if not await child.stop(term_grace_s=grace_s, kill_grace_s=_KILL_GRACE_S):
        on_stuck(child)
        return _End.STUCK
    return end
