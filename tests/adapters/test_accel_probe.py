"""onebitd.adapters.accel_probe: a FIFO without a writer is a device that does not answer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from onebitd.adapters.accel_probe import AccelProbe
from onebitd.adapters.process import Child, Guard
from tests.harness import descendants

SOON_S = 0.2
LATE_S = 30.0
"""Never reached: whoever answers does so at once, on a busy box too."""


def accel(dev: Path, *names: str) -> list[Path]:
    """Make the directory, and return these nodes in it."""
    (dev / "accel").mkdir()
    return [dev / "accel" / name for name in names]


async def test_silent_node_without_a_device_is_none(guard: Guard, tmp_path: Path) -> None:
    """A box without an NPU is asked nothing."""
    assert await AccelProbe(guard, tmp_path, answer_s=SOON_S).silent_node() is None


async def test_silent_node_is_the_one_that_keeps_who_opens_it(guard: Guard, tmp_path: Path) -> None:
    """An error is an answer, a file is one; a FIFO keeps the child, which is ended."""
    good, bad, denied = accel(tmp_path, "accel0", "accel1", "accel2")
    good.touch()
    denied.symlink_to("/nowhere/at/all")
    assert await AccelProbe(guard, tmp_path, answer_s=LATE_S).silent_node() is None
    good.unlink()
    os.mkfifo(bad)
    assert await AccelProbe(guard, tmp_path, answer_s=SOON_S).silent_node() == bad


async def test_silent_node_cancelled_leaves_nothing(guard: Guard, tmp_path: Path) -> None:
    """The daemon's end does not wait for the device; the fixture sees what is left."""
    [bad] = accel(tmp_path, "accel0")
    os.mkfifo(bad)
    with trio.move_on_after(SOON_S) as scope:
        await AccelProbe(guard, tmp_path, answer_s=LATE_S).silent_node()
    assert scope.cancelled_caught


async def test_silent_node_child_that_cannot_be_killed_is_left_behind_once(
    guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In uninterruptible sleep nothing reaches it: no second one joins it until it has ended."""
    [bad] = accel(tmp_path, "accel0")
    os.mkfifo(bad)
    before = set(descendants(os.getpid()))
    probe = AccelProbe(guard, tmp_path, answer_s=SOON_S)
    with monkeypatch.context() as patched:
        patched.setattr(Child, "signal", lambda *_: None)
        assert await probe.silent_node() == bad
        left = set(descendants(os.getpid())) - before
        assert len(left) == 1
        bad.rename(tmp_path / "moved")
        assert await probe.silent_node() == bad
        assert set(descendants(os.getpid())) - before == left
    writer = await trio.to_thread.run_sync(os.open, tmp_path / "moved", os.O_WRONLY)
    os.close(writer)  # what it waited for
    with trio.fail_after(20):
        while await probe.silent_node() is not None:
            pass  # it takes its moment
