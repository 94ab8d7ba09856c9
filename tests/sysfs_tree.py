"""A made-up /sys with GPUs, NPUs and temperature sensors, laid out as the kernel does it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

GPU: Final = {
    "power/runtime_status": "active",
    "power_state": "D0",
    "gpu_busy_percent": "87",
    "mem_busy_percent": "12",
    "pp_dpm_sclk": "0: 600Mhz \n1: 1100Mhz *\n2: 2900Mhz ",
    "pp_dpm_mclk": "0: 400Mhz \n1: 1000Mhz *",
    "pp_dpm_fclk": "0: 2000Mhz *\n1: 1400Mhz ",
    "hwmon/hwmon7/temp1_input": "61000",
    "hwmon/hwmon7/power1_average": "54000000",
    "hwmon/hwmon7/freq1_input": "1111000000",
}
"""The files of an amdgpu device and what is in them."""


class Sysfs:
    """One machine.

    Args:
        root: of the tree.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()

    def device(self, name: str) -> Path:
        """Return the directory of a device."""
        return self.root / "devices" / name

    def write(self, name: str, file: str, text: str) -> None:
        """Write a file of a device, in one step, as the kernel would."""
        path = self.device(name) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        new = self.root / "new"
        new.write_text(f"{text}\n")
        new.replace(path)

    def entry(
        self, of_class: str, name: str, driver: str, files: Mapping[str, str] | None = None
    ) -> None:
        """Make a device with its driver, and its entry in a class."""
        device = self.device(name)
        device.mkdir(parents=True)
        (device / "driver").symlink_to(f"../../bus/pci/drivers/{driver}")
        for file, text in (files or {}).items():
            self.write(name, file, text)
        entry = self.root / "class" / of_class / name
        entry.mkdir(parents=True)
        (entry / "device").symlink_to(device)

    def gpu(self, name: str, busy: str = "87") -> None:
        """Make a card of amdgpu."""
        self.entry("drm", name, "amdgpu", GPU | {"gpu_busy_percent": busy})

    def npu(self, name: str, driver: str, files: Mapping[str, str]) -> None:
        """Make an NPU."""
        self.entry("accel", name, driver, files)

    def sensor(self, name: str, driver: str, millidegrees: str) -> None:
        """Make a temperature sensor with a device of its own."""
        self.entry("hwmon", name, driver)
        (self.root / "class" / "hwmon" / name / "temp1_input").write_text(f"{millidegrees}\n")

    def remove(self, name: str) -> None:
        """Take a device and its driver away."""
        shutil.rmtree(self.device(name))
