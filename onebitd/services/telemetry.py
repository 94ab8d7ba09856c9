"""Looks at GPU and NPU once a second, as long as a request is on the handoff route.

Without a request nothing runs: no timer, no thread. Without a device nothing ever does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Protocol

import trio

from onebitd.core.telemetry import DeviceSample, GpuBusy

PERIOD_S: Final = 1.0
KEPT_S: Final = 10.0
"""An older sample is not told any more."""
LOOK_AGAIN_S: Final = 60.0
"""After a failure devices are looked for again, with a new request; not more often than this. It
may find none, of a driver that is just being bound anew: that counts as a failure, too."""


class Devices(Protocol):
    """What is sampled; see `adapters.device_sysfs`."""

    failed: bool

    def find(self) -> bool:
        """Look for devices, and say whether there are any."""

    async def sample(self) -> list[DeviceSample]:
        """Read them all; takes its time, but an end."""


class Watch:
    """What the devices did in one request's time, from its start to its first byte.

    Later samples do not count, unless there was none before: the first one was asked for at the
    request's start, and what it says is the kernel's average of a while before it.
    """

    __slots__ = ("_busy", "_is_over", "_taken", "_watches")

    def __init__(self, watches: set[Watch]) -> None:
        self._watches = watches
        self._busy = GpuBusy()
        self._taken = 0
        self._is_over = False

    def take(self, samples: Sequence[DeviceSample]) -> None:
        """Count what all devices said at one moment."""
        if not (self._is_over and self._taken):
            self._taken += 1
            self._busy.add(samples)

    def first_byte(self) -> None:
        """The reply has begun."""
        self._is_over = True

    def end(self) -> float | None:
        """The request is over; return how busy the GPU was, see `GpuBusy`. May be called twice."""
        self._watches.discard(self)
        return self._busy.percent


class Telemetry:
    """Samples for all requests at once.

    Args:
        devices: of this machine.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._watches: set[Watch] = set()
        self._wanted = trio.Event()
        self._has_devices = False
        self._are_gone = False
        self._found_at = -math.inf
        self._latest: tuple[float, Sequence[DeviceSample]] = (-math.inf, ())

    def watch(self) -> Watch:
        """Begin a request's time; the caller must `end` it."""
        watch = Watch(self._watches)
        if self._has_devices:
            at, samples = self._latest
            if trio.current_time() - at <= PERIOD_S:
                watch.take(samples)
            self._watches.add(watch)
            self._wanted.set()
        return watch

    def latest(self) -> Sequence[DeviceSample]:
        """Return the last samples, none when they are old."""
        at, samples = self._latest
        return samples if trio.current_time() - at <= KEPT_S else ()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Sample while somebody watches, until cancelled; over at once where there is no device."""
        self._find()
        self._has_devices = not self._are_gone
        task_status.started()
        while self._has_devices:
            await self._wanted.wait()
            failed = self._are_gone or self._devices.failed
            if failed and trio.current_time() - self._found_at >= LOOK_AGAIN_S:
                self._find()
            while self._watches and not self._are_gone:
                next_at = trio.current_time() + PERIOD_S
                samples = await self._devices.sample()
                self._latest = trio.current_time(), samples
                for watch in self._watches:
                    watch.take(samples)
                await trio.sleep_until(next_at)
            self._wanted = trio.Event()

    def _find(self) -> None:
        self._are_gone = not self._devices.find()
        self._found_at = trio.current_time()
