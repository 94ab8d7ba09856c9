"""When something is written that changes often: soon after a change, and not for each one."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Final

import trio

WRITE_DELAY_S: Final = 0.5
"""What changes meanwhile goes into the same write."""
RETRY_S: Final = 10.0
LAST_WRITE_S: Final = 2.0


class LateWrites:
    """Calls a write soon after each touch, again after a failure, and once more at the end.

    Args:
        write: returns whether it has done all there was; False is tried again after a pause. A
            touch while it runs leads to another.
        every_s: also after so long without a touch.
        retry_s: that pause, `RETRY_S` if not given.
        at_once: the first write, which is due then, does not wait for others to share it.
    """

    def __init__(
        self,
        write: Callable[[], Awaitable[bool]],
        *,
        every_s: float = math.inf,
        retry_s: float | None = None,
        at_once: bool = False,
    ) -> None:
        self._write = write
        self._every_s = every_s
        self._retry_s = RETRY_S if retry_s is None else retry_s
        self._at_once = at_once
        self._touched = trio.Event()

    def touch(self) -> None:
        """Say that there is something to write; costs next to nothing."""
        self._touched.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write after each touch until cancelled, and then once more if it is due."""
        task_status.started()
        try:
            if self._at_once and not await self._once():
                await trio.sleep(self._retry_s)
            while True:
                with trio.move_on_after(self._every_s):
                    await self._touched.wait()
                await trio.sleep(WRITE_DELAY_S)
                if not await self._once():
                    await trio.sleep(self._retry_s)
        finally:
            # A disk that does not answer must not keep the daemon from its end.
            with trio.move_on_after(LAST_WRITE_S, shield=True):
                if self._touched.is_set():
                    await self._once()

    async def _once(self) -> bool:
        self._touched = trio.Event()
        done = False
        try:
            done = await self._write()
        finally:
            if not done:
                self.touch()
        return done
