"""Reads GPUs, NPUs and the processor's temperature from sysfs.

Files only: no device node, no tool. To read one asks the driver, and so may block for as long as
that hangs, or wake a device that sleeps. The first is why it is done in a thread that can be left
behind, the second why a device's runtime status comes before all else: that file, and the
directories and links of `find`, ask no device anything.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import structlog
import trio

from onebitd.core import telemetry
from onebitd.core.telemetry import DeviceSample

log = structlog.get_logger()

SYSFS: Final = Path("/sys")
ANSWER_S: Final = 2.0
"""All files together take some milliseconds, unless a driver hangs."""
MOST_ERRORS: Final = 3
"""In a row; then a file is left alone until devices are looked for again."""
_MOST_DEVICES: Final = 16
_BUSY_WITHIN_S: Final = 5.0
"""An older look says nothing about now: requests come in bursts."""
_MOST_BYTES: Final = 4096

_STATE: Final = {"runtime_status": "power/runtime_status", "pci_state": "power_state"}
_AMDGPU: Final = {
    "busy": "gpu_busy_percent",
    "memory_busy": "mem_busy_percent",
    **{clock: f"pp_dpm_{clock}" for clock in telemetry.CLOCKS},
}
_AMDGPU_HWMON: Final = {
    "temperature_1": ("temp1_input",),
    "temperature_2": ("temp2_input",),
    "power": ("power1_average", "power1_input"),
    "sclk_hz": ("freq1_input",),
    "mclk_hz": ("freq2_input",),
}
_NPU: Final = {"busy_us": "npu_busy_time_us", "npu_mhz": "npu_current_frequency_mhz"}
_SENSORS: Final = ("k10temp", "zenpower", "coretemp")
"""Drivers whose first temperature is the processor's."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Device:
    kind: str
    name: str
    driver: str
    files: Mapping[str, Path]


@dataclasses.dataclass(slots=True)
class _Round:
    """One reading of all devices, and the one that it is at."""

    device: _Device | None = None
    given_up: bool = False


class DeviceReader:
    """The devices of one machine.

    Args:
        sysfs: in the place of `/sys`.
        answer_s: time for one reading of all of them.
        clock: seconds, monotonic.

    Attributes:
        failed: look again: something could not be read since devices were looked for, or fewer
            were found than have been there.
    """

    def __init__(
        self,
        sysfs: Path = SYSFS,
        *,
        answer_s: float = ANSWER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sysfs = sysfs
        self._answer_s = answer_s
        self._clock = clock
        self._devices: tuple[_Device, ...] = ()
        self._most = 0
        self._errors: dict[Path, int] = {}
        self._busy_us: dict[str, tuple[float, str]] = {}
        self._stuck: set[str] = set()
        self._lock = threading.Lock()  # of `_stuck` and of a round; never held over a read
        self.failed = False

    def find(self) -> bool:
        """Look for devices, and say whether there are any; takes about a millisecond.

        A processor's temperature alone is none.
        """
        self._errors.clear()
        found = [*_gpus(self._sysfs), *_npus(self._sysfs)][:_MOST_DEVICES]
        self.failed = len(found) < self._most
        self._most = max(self._most, len(found))
        self._devices = (*found, *_sensors(self._sysfs)) if found else ()
        return bool(found)

    async def sample(self) -> list[DeviceSample]:
        """Read every device, in a thread that is left behind if a driver does not answer.

        Such a device is left alone until it has answered after all: there is never more than one
        thread for each.
        """
        reading = _Round()
        with trio.move_on_after(self._answer_s):
            return await trio.to_thread.run_sync(
                self._read, reading, abandon_on_cancel=True, thread_name="devices"
            )
        with self._lock:
            reading.given_up = self.failed = True
            device = reading.device
            if device is not None:
                self._stuck.add(device.name)
        if device is not None:
            log.warning(
                "device_silent",
                line=f"the driver {device.driver} did not answer within {self._answer_s:g} s:"
                f" {device.name} is not read until it has",
            )
        return []

    def _read(self, reading: _Round) -> list[DeviceSample]:
        taken = []
        for device in self._devices:
            if self._begin(reading, device):
                one = self._read_device(device)
                if self._is_in_time(reading, device):
                    taken.append(one)
        return taken

    def _begin(self, reading: _Round, device: _Device) -> bool:
        with self._lock:
            if reading.given_up or device.name in self._stuck:
                return False
            reading.device = device
            return True

    def _is_in_time(self, reading: _Round, device: _Device) -> bool:
        with self._lock:
            reading.device = None
            if reading.given_up:
                self._stuck.discard(device.name)
            return not reading.given_up

    def _read_device(self, device: _Device) -> DeviceSample:
        texts: dict[str, str] = {}
        self._take(device, "runtime_status", texts)
        state = telemetry.power_state(texts.get("runtime_status", ""), "")
        if state is None:
            self._take(device, "pci_state", texts)
        if state not in telemetry.ASLEEP:
            for part in device.files.keys() - _STATE.keys():
                self._take(device, part, texts)
        found = telemetry.sample(device.kind, device.name, device.driver, texts)
        busy_us = texts.get("busy_us")
        if busy_us is None:
            self._busy_us.pop(device.name, None)
            return found
        now = (self._clock(), busy_us)
        before, self._busy_us[device.name] = self._busy_us.get(device.name), now
        if before is None or now[0] - before[0] > _BUSY_WITHIN_S:
            return found
        return dataclasses.replace(found, busy_percent=telemetry.busy_percent_between(before, now))

    def _take(self, device: _Device, part: str, texts: dict[str, str]) -> None:
        path = device.files.get(part)
        if path is None or self._errors.get(path, 0) >= MOST_ERRORS:
            return
        try:
            with open(path, "rb", buffering=0) as file:
                text = file.read(_MOST_BYTES)
        except OSError:
            self._errors[path] = self._errors.get(path, 0) + 1
            self.failed = True
            return
        self._errors.pop(path, None)
        texts[part] = (text or b"").decode("ascii", "replace")


def _gpus(sysfs: Path) -> Iterator[_Device]:
    for name, device in _class(sysfs, "drm", r"card\d+"):
        if _driver(device) == "amdgpu":
            files = _present(device, _STATE | _AMDGPU)
            for monitor in _listed(device / "hwmon", r"hwmon\d+"):
                files |= _first_present(monitor, _AMDGPU_HWMON)
            yield _Device("gpu", name, "amdgpu", files)


def _npus(sysfs: Path) -> Iterator[_Device]:
    for name, device in _class(sysfs, "accel", r"accel\d+"):
        driver = _driver(device)
        if driver is not None:
            yield _Device("npu", name, driver, _present(device, _STATE | _NPU))


def _sensors(sysfs: Path) -> Iterator[_Device]:
    seen: collections.Counter[str] = collections.Counter()
    for monitor in _listed(sysfs / "class" / "hwmon", r"hwmon\d+"):
        driver = _driver(monitor / "device")
        if driver in _SENSORS:
            seen[driver] += 1  # a second processor has a sensor of the same name
            name = driver if seen[driver] == 1 else f"{driver}-{seen[driver]}"
            yield _Device("cpu", name, driver, _present(monitor, {"temperature_1": "temp1_input"}))


def _class(sysfs: Path, name: str, pattern: str) -> Iterator[tuple[str, Path]]:
    """Yield name and device directory of the entries of a class, in the order of their numbers."""
    for entry in _listed(sysfs / "class" / name, pattern):
        yield entry.name, entry / "device"


def _listed(directory: Path, pattern: str) -> list[Path]:
    try:
        names = [name for name in os.listdir(directory) if re.fullmatch(pattern, name)]
    except OSError:
        return []
    return [directory / name for name in sorted(names, key=lambda name: (len(name), name))]


def _driver(device: Path) -> str | None:
    with contextlib.suppress(OSError):
        return os.path.basename(os.readlink(device / "driver"))
    return None


def _present(directory: Path, wanted: Mapping[str, str]) -> dict[str, Path]:
    return _first_present(directory, {part: (name,) for part, name in wanted.items()})


def _first_present(directory: Path, wanted: Mapping[str, tuple[str, ...]]) -> dict[str, Path]:
    """Return the first file that is there for each part."""
    found = {}
    for part, names in wanted.items():
        path = next((directory / name for name in names if (directory / name).exists()), None)
        if path is not None:
            found[part] = path
    return found
