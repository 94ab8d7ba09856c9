"""Devices in a made-up sysfs, of real files, links and FIFOs."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio

from onebitd.adapters import device_sysfs
from onebitd.adapters.device_sysfs import MOST_ERRORS, DeviceReader
from onebitd.core.telemetry import DeviceSample
from tests.sysfs_tree import GPU, Sysfs

pytestmark = pytest.mark.trio


@pytest.fixture
def tree(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path / "sys")


async def test_sample_whole_machine_says_what_each_device_has(tree: Sysfs) -> None:
    """A card, an NPU and the processor; connectors, render nodes and strange cards are none."""
    tree.gpu("card1", busy="87")
    tree.entry("drm", "card1-DP-1", "amdgpu")
    tree.entry("drm", "renderD128", "amdgpu")
    tree.entry("drm", "card0", "simple-framebuffer")
    tree.npu("accel0", "amdxdna", {"power/runtime_status": "suspended"})
    tree.sensor("hwmon3", "k10temp", "55125")
    tree.sensor("hwmon4", "nvme", "40000")
    reader = DeviceReader(tree.root)
    assert reader.find()
    assert await reader.sample() == [
        DeviceSample(
            kind="gpu",
            name="card1",
            driver="amdgpu",
            busy_percent=87.0,
            memory_busy_percent=12.0,
            clocks={"sclk": 1100.0, "mclk": 1000.0, "fclk": 2000.0},
            temperature_c=61.0,
            power_state="active",
            power_w=54.0,
        ),
        DeviceSample(kind="npu", name="accel0", driver="amdxdna", power_state="suspended"),
        DeviceSample(kind="cpu", name="k10temp", driver="k10temp", temperature_c=55.125),
    ]
    assert not reader.failed


async def test_sample_several_cards_are_in_the_order_of_their_numbers(tree: Sysfs) -> None:
    """card10 comes after card2; two processors have two names."""
    for name in ("card10", "card2"):
        tree.gpu(name)
    for name in ("hwmon10", "hwmon9"):
        tree.sensor(name, "k10temp", "50000")
    reader = DeviceReader(tree.root)
    reader.find()
    names = [one.name for one in await reader.sample()]
    assert names == ["card2", "card10", "k10temp", "k10temp-2"]


@pytest.mark.parametrize("there", ["nothing", "no class", "sensor", "no driver"])
async def test_find_without_gpu_and_npu_finds_nothing(tree: Sysfs, there: str) -> None:
    """A processor's temperature alone is not worth a look a second."""
    if there != "nothing":
        (tree.root / "class").mkdir(parents=True)
    if there == "sensor":
        tree.sensor("hwmon0", "k10temp", "50000")
    if there == "no driver":
        (tree.root / "class/drm/card0/device").mkdir(parents=True)
        (tree.root / "class/accel/accel0").mkdir(parents=True)
    reader = DeviceReader(tree.root)
    assert not reader.find()
    assert await reader.sample() == []


async def test_sample_suspended_card_is_not_woken(tree: Sysfs) -> None:
    """Nothing but its state is opened: the other files are FIFOs here, which would block."""
    tree.gpu("card0")
    device = tree.device("card0")
    (device / "power/runtime_status").write_text("suspended\n")
    for name in GPU:
        if not name.startswith("power/"):
            (device / name).unlink()
            os.mkfifo(device / name)
    reader = DeviceReader(tree.root, answer_s=5.0)
    reader.find()
    [found] = await reader.sample()
    assert (found.power_state, found.busy_percent, found.clocks) == ("suspended", 0.0, {})
    assert not reader.failed


async def test_sample_file_that_fails_is_left_alone_after_some_errors(
    tree: Sysfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are read on; `find` gives it another chance."""
    tree.gpu("card0")
    busy = tree.device("card0") / "gpu_busy_percent"
    busy.unlink()
    busy.mkdir()  # EISDIR for everybody, root too
    opened: list[str] = []

    def note(path: Path, *how: Any, **more: Any) -> Any:
        opened.append(path.name)
        return open(path, *how, **more)

    monkeypatch.setattr(device_sysfs, "open", note, raising=False)
    reader = DeviceReader(tree.root)
    reader.find()
    for _ in range(MOST_ERRORS + 3):
        [found] = await reader.sample()
        assert (found.busy_percent, found.power_w) == (None, 54.0)
    assert opened.count("gpu_busy_percent") == MOST_ERRORS
    assert reader.failed
    busy.rmdir()
    busy.write_text("5\n")
    assert reader.find()
    assert [one.busy_percent for one in await reader.sample()] == [5.0]
    assert not reader.failed


async def test_sample_device_that_vanishes_is_a_failure(tree: Sysfs) -> None:
    """What is left says nothing; looked for again, it is not there."""
    tree.gpu("card0")
    reader = DeviceReader(tree.root)
    reader.find()
    tree.remove("card0")
    [found] = await reader.sample()
    assert found == DeviceSample(kind="gpu", name="card0", driver="amdgpu")
    assert reader.failed
    assert not reader.find()


async def test_sample_driver_that_does_not_answer_costs_one_thread_and_its_device_alone(
    tree: Sysfs,
) -> None:
    """The reading is given up, the device left alone until its driver has answered after all."""
    tree.gpu("card0")
    tree.gpu("card1")
    busy = tree.device("card0") / "gpu_busy_percent"
    busy.unlink()
    os.mkfifo(busy)
    reader = DeviceReader(tree.root, answer_s=0.3)
    reader.find()
    with structlog.testing.capture_logs() as logs:
        assert await reader.sample() == []
    assert [(one["event"], "card0" in one["line"]) for one in logs] == [("device_silent", True)]
    assert reader.failed
    threads = threading.active_count()
    for _ in range(3):
        assert [one.name for one in await reader.sample()] == ["card1"]
        reader.find()
    assert threading.active_count() <= threads + 1  # none but the one that reads now
    busy_end = await trio.to_thread.run_sync(lambda: os.open(busy, os.O_WRONLY))
    os.close(busy_end)
    busy.unlink()
    busy.write_text("7\n")
    with trio.fail_after(30):
        while len(await reader.sample()) < 2:
            pass
    assert [one.busy_percent for one in await reader.sample()] == [7.0, 87.0]


async def test_sample_npu_that_counts_busy_time_gets_a_share(tree: Sysfs) -> None:
    """From the second look on; a sleep in between, or an hour without a look, begins anew."""
    now = 100.0
    tree.npu(
        *("accel0", "intel_vpu"),
        {"npu_busy_time_us": "500", "npu_current_frequency_mhz": "1400", "power_state": "D0"},
    )
    reader = DeviceReader(tree.root, clock=lambda: now)
    reader.find()
    [first] = await reader.sample()
    assert (first.busy_percent, first.clocks, first.power_state) == (None, {"npu": 1400.0}, "D0")
    now = 101.0
    tree.write("accel0", "npu_busy_time_us", "400500")
    [second] = await reader.sample()
    assert second.busy_percent == pytest.approx(40.0)
    now += 3600.0
    tree.write("accel0", "npu_busy_time_us", "500500")
    [after] = await reader.sample()
    assert after.busy_percent is None
    now += 1.0
    tree.write("accel0", "npu_busy_time_us", "1500500")
    [last] = await reader.sample()
    assert last.busy_percent == pytest.approx(100.0)


async def test_find_fewer_than_there_were_is_a_failure_until_they_are_back(tree: Sysfs) -> None:
    """A card whose driver is bound anew may be away in the moment in which one looks."""
    tree.npu("accel0", "amdxdna", {"power/runtime_status": "active"})
    tree.gpu("card0")
    driver = tree.device("card0") / "driver"
    away = driver.rename(driver.with_name("away"))
    reader = DeviceReader(tree.root)
    found = []
    for move in ((), (away, driver), (driver, away), (), (away, driver)):
        if move:
            move[0].rename(move[1])
        assert reader.find()
        found.append(reader.failed)
    assert found == [False, False, True, True, False]
