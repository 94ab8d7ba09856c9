"""Asks an accelerator's device node whether it still answers an open(2).

A driver that hangs keeps whoever opens its node in uninterruptible sleep, where nothing reaches it,
SIGKILL included. So a small child opens it, one that can be left behind; a thread of ours would be
lost, and with it the daemon's end.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

import trio

from onebitd.adapters.process import Child, Guard, SpawnError, pump_lines, spawn

ANSWER_S: Final = 2.0
"""An open that wakes a sleeping NPU and loads its firmware takes a few hundred milliseconds."""
_START_S: Final = 10.0
"""Until the child is about to open; one that takes longer says nothing about the device."""
_KILL_GRACE_S: Final = 0.5
_NODES: Final = "accel/accel*"
# Whatever the open says is an answer. Reading is enough, and a FIFO then waits for a writer.
_OPEN_IT: Final = (
    "import os, sys\n"
    "print(flush=True)\n"
    "try:\n"
    "    os.close(os.open(sys.argv[1], os.O_RDONLY | os.O_CLOEXEC))\n"
    "except OSError:\n"
    "    pass\n"
)


class AccelProbe:
    """Opens `/dev/accel/accel*`, one after the other.

    Args:
        guard: kills a child when the daemon dies.
        dev: in the place of `/dev`.
        answer_s: time for each.
    """

    def __init__(
        self, guard: Guard, dev: Path = Path("/dev"), *, answer_s: float = ANSWER_S
    ) -> None:
        self._guard = guard
        self._dev = dev
        self._answer_s = answer_s
        self._left: tuple[Child, Path] | None = None  # a child that could not be killed

    async def silent_node(self) -> Path | None:
        """Return a node that does not answer, None when all do or there is none.

        A child that hangs there for good is left behind, and nothing is opened again until it has
        ended: there is never more than one.
        """
        if self._left is not None:
            child, node = self._left
            if not await _is_gone(child):
                return node
            self._left = None
        for node in sorted(self._dev.glob(_NODES)):
            if not await self._answers(node):
                return node
        return None

    async def _answers(self, node: Path) -> bool:
        program = [sys.executable, "-I", "-S", "-c", _OPEN_IT, os.fspath(node)]
        try:
            child = spawn(program, env={}, guard=self._guard, merge_output=True)
        except SpawnError:
            return True  # nothing is known of the node then
        begun = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pump_lines, child.stdout, lambda _line: begun.set())
            try:
                with trio.move_on_after(_START_S) as starting:
                    await begun.wait()
                with trio.move_on_after(self._answer_s) as opening:
                    await child.wait()
            finally:
                if not await child.stop(term_grace_s=0.0, kill_grace_s=_KILL_GRACE_S):
                    self._left = (child, node)
                nursery.cancel_scope.cancel()
        return starting.cancelled_caught or not opening.cancelled_caught


async def _is_gone(child: Child) -> bool:
    with trio.move_on_after(0.1):
        await child.wait_gone()
        return True
    return False
