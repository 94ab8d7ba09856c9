"""Sampling at 1 Hz while requests run; minutes pass in milliseconds."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing

from onebitd.core.telemetry import DeviceSample
from onebitd.services.telemetry import KEPT_S, LOOK_AGAIN_S, PERIOD_S, Telemetry

pytestmark = pytest.mark.trio


class FakeDevices:
    """One GPU, as busy as the test says.

    Attributes:
        sampled: when it was read.
        found: when it was looked for.
    """

    def __init__(self, *, there: bool = True, takes_s: float = 0.001) -> None:
        self.there = there
        self.takes_s = takes_s
        self.busy = 10.0
        self.failed = False
        self.sampled: list[float] = []
        self.found: list[float] = []

    def find(self) -> bool:
        self.found.append(trio.current_time())
        self.failed = False
        return self.there

    async def sample(self) -> list[DeviceSample]:
        self.sampled.append(trio.current_time())
        await trio.sleep(self.takes_s)
        return [DeviceSample(kind="gpu", name="card0", driver="amdgpu", busy_percent=self.busy)]


@contextlib.asynccontextmanager
async def running(devices: FakeDevices) -> AsyncIterator[Telemetry]:
    telemetry = Telemetry(devices)
    async with trio.open_nursery() as nursery:
        await nursery.start(telemetry.run)
        yield telemetry
        nursery.cancel_scope.cancel()


async def test_sampler_runs_once_a_second_while_somebody_watches(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """From the first request's start; after the last one's end never again."""
    devices = FakeDevices()
    async with running(devices) as telemetry:
        await trio.sleep(100.0)
        assert devices.sampled == []
        began = trio.current_time()
        watch = telemetry.watch()
        await trio.sleep(5.5)
        assert [round(at - began, 3) for at in devices.sampled] == [0, 1, 2, 3, 4, 5]
        watch.end()
        await trio.sleep(1000.0)
        assert len(devices.sampled) == 6
        telemetry.watch()
        await trio.sleep(0.1)
        assert len(devices.sampled) == 7


async def test_sampler_is_shared_by_requests_that_run_together(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Each has a figure of its own time, from the same samples."""
    devices = FakeDevices()
    async with running(devices) as telemetry:
        first = telemetry.watch()
        await trio.sleep(1.5)  # 10 and 10
        devices.busy = 70.0
        second = telemetry.watch()
        await trio.sleep(1.0)  # 70 for both; the second begins with the 10 of half a second ago
        assert second.end() == pytest.approx(40.0)
        assert first.end() == pytest.approx(30.0)
        assert len(devices.sampled) == 3


async def test_watch_counts_up_to_the_first_byte_alone(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """What the decoder did with the GPU for the reply is not what the provider had to share."""
    devices = FakeDevices()
    async with running(devices) as telemetry:
        watch = telemetry.watch()
        await trio.sleep(1.5)
        watch.first_byte()
        devices.busy = 100.0
        await trio.sleep(3.0)
        assert len(devices.sampled) > 3  # for the status
        assert watch.end() == pytest.approx(10.0)
        assert watch.end() == pytest.approx(10.0)


async def test_watch_of_a_short_request_has_the_sample_of_its_start(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """It was asked for at the start, even if it comes after the first byte."""
    devices = FakeDevices(takes_s=0.05)
    async with running(devices) as telemetry:
        watch = telemetry.watch()
        await trio.sleep(0.01)
        watch.first_byte()
        await trio.sleep(0.2)
        devices.busy = 90.0
        assert watch.end() == pytest.approx(10.0)
        at_once = telemetry.watch()
        assert at_once.end() == pytest.approx(10.0)
        assert len(devices.sampled) == 1


async def test_latest_is_told_as_long_as_it_is_fresh(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """An idle daemon does not show what was seconds ago."""
    devices = FakeDevices()
    async with running(devices) as telemetry:
        assert telemetry.latest() == ()
        watch = telemetry.watch()
        await trio.sleep(0.5)
        watch.end()
        await trio.sleep(KEPT_S - 1.0)
        assert [one.name for one in telemetry.latest()] == ["card0"]
        await trio.sleep(1.0)
        assert telemetry.latest() == ()


async def test_nothing_runs_where_there_is_no_device(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The task has ended, requests wake nobody, and the record has no figure."""
    devices = FakeDevices(there=False)
    telemetry = Telemetry(devices)
    async with trio.open_nursery() as nursery:
        await nursery.start(telemetry.run)
    before = trio.lowlevel.current_statistics().tasks_living
    watch = telemetry.watch()
    await trio.sleep(3600.0)
    assert trio.lowlevel.current_statistics().tasks_living == before
    assert watch.end() is None
    assert (len(devices.found), devices.sampled, telemetry.latest()) == (1, [], ())


async def test_devices_are_looked_for_again_with_the_first_request_after_a_failure(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Not in the middle of one, not without a failure, and once a minute at most."""
    devices = FakeDevices()
    async with running(devices) as telemetry:
        for fails, pause_s, looks in (
            (False, LOOK_AGAIN_S, 1),
            (True, 10.0, 1),
            (True, 1.0, 2),  # the failure before is seen now
            (False, 1.0, 2),  # a minute is not over
            (False, LOOK_AGAIN_S, 2),
            (False, LOOK_AGAIN_S, 3),
            (False, LOOK_AGAIN_S, 3),
        ):
            watch = telemetry.watch()
            await trio.sleep(3 * PERIOD_S)
            assert len(devices.found) == looks
            devices.failed |= fails
            watch.end()
            await trio.sleep(pause_s)


async def test_devices_that_are_gone_are_sampled_again_when_they_are_back(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Until then nobody reads them, and they are looked for no more often than otherwise."""
    devices = FakeDevices()
    async with running(devices) as telemetry:
        await trio.sleep(LOOK_AGAIN_S)
        devices.there, devices.failed = False, True
        for pause_s, looks in ((1.0, 2), (LOOK_AGAIN_S, 2), (1.0, 3)):
            watch = telemetry.watch()
            await trio.sleep(3 * PERIOD_S)
            assert watch.end() is None
            assert (len(devices.found), devices.sampled) == (looks, [])
            await trio.sleep(pause_s)
        devices.there = True
        for pause_s, percent in ((LOOK_AGAIN_S, None), (0.0, 10.0)):
            watch = telemetry.watch()
            await trio.sleep(3 * PERIOD_S)
            assert watch.end() == percent
            await trio.sleep(pause_s)
