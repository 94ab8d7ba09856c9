"""What the kernel says of GPUs, NPUs and the processor, read from the texts of sysfs files.

Formats: amdgpu's "GPU Power/Thermal Controls and Monitoring", hwmon's sysfs interface and the
runtime power management of devices, all in the kernel's documentation. A text that is not what it
should be says nothing: it is None here, never a guess.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Final

ASLEEP: Final = ("suspended", "suspending", "resuming")
"""Words of `power/runtime_status` with which nothing else of a device is read: it would wake."""
CLOCKS: Final = ("sclk", "mclk", "fclk")
"""Of the cores, the memory and the fabric."""

_LEVEL: Final = re.compile(r"\s*\w+:\s*([0-9]+(?:\.[0-9]+)?)\s*MHz\s*\*\s*", re.IGNORECASE)
_WORD: Final = re.compile(r"[A-Za-z0-9_-]{1,24}")
_NUMBER: Final = re.compile(r"-?[0-9]{1,18}")
_MOST_C: Final = 300.0
_MOST_W: Final = 10_000.0
_MOST_MHZ: Final = 100_000.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """One device at one moment; what it does not say is None, or not among the clocks.

    Attributes:
        kind: `gpu`, `npu` or `cpu`.
        name: `card0`, `accel0`, or the temperature sensor of a processor.
        driver: the kernel's.
        busy_percent: 0 to 100, the kernel's own average; 0 for a device that is suspended.
        memory_busy_percent: the same of its memory controller.
        clocks: MHz by name, those of `CLOCKS` or `npu`.
        temperature_c: the hottest of its sensors.
        power_state: `active`, `suspended` and so on, the runtime power management's word; PCI's
            `D0` where there is none.
        power_w: of the whole package where processor and GPU are one.
    """

    kind: str
    name: str
    driver: str
    busy_percent: float | None = None
    memory_busy_percent: float | None = None
    clocks: dict[str, float] = dataclasses.field(default_factory=dict)
    temperature_c: float | None = None
    power_state: str | None = None
    power_w: float | None = None


def sample(kind: str, name: str, driver: str, texts: Mapping[str, str]) -> DeviceSample:
    """Return what these texts say of a device.

    Args:
        kind, name, driver: as in the sample.
        texts: of those files that could be read, by their part: `busy`, `memory_busy`, a name of
            `CLOCKS`, one of those with `_hz`, `npu_mhz`, `temperature_1`, `temperature_2`,
            `power`, `runtime_status` and `pci_state`.
    """

    def text(part: str) -> str:
        return texts.get(part, "")

    state = power_state(text("runtime_status"), text("pci_state"))
    if state in ASLEEP:
        busy: float | None = 0.0 if state == "suspended" and kind == "gpu" else None
        return DeviceSample(
            kind=kind, name=name, driver=driver, busy_percent=busy, power_state=state
        )
    clocks = {}
    for clock in CLOCKS:
        mhz = current_level_mhz(text(clock))
        mhz = _scaled(text(f"{clock}_hz"), 1e6, 0.0, _MOST_MHZ) if mhz is None else mhz
        if mhz is not None:
            clocks[clock] = mhz
    npu_mhz = _scaled(text("npu_mhz"), 1.0, 0.0, _MOST_MHZ)
    if npu_mhz is not None:
        clocks["npu"] = npu_mhz
    sensors = (temperature_c(text(f"temperature_{number}")) for number in (1, 2))
    return DeviceSample(
        kind=kind,
        name=name,
        driver=driver,
        busy_percent=percent(text("busy")),
        memory_busy_percent=percent(text("memory_busy")),
        clocks=clocks,
        temperature_c=max((found for found in sensors if found is not None), default=None),
        power_state=state,
        power_w=power_w(text("power")),
    )


def percent(text: str) -> float | None:
    """Return a share in percent.

    >>> percent("37\\n"), percent("101"), percent("")
    (37.0, None, None)
    """
    return _scaled(text, 1.0, 0.0, 100.0)


def current_level_mhz(text: str) -> float | None:
    """Return the current one of a table of clock levels: the line with the star.

    >>> current_level_mhz("0: 600Mhz \\n1: 1100Mhz *\\n2: 2900Mhz \\n")
    1100.0
    """
    for line in text.splitlines():
        found = _LEVEL.fullmatch(line)
        if found is not None:
            mhz = float(found[1])
            return mhz if mhz <= _MOST_MHZ else None
    return None


def temperature_c(text: str) -> float | None:
    """Return a temperature that is given in thousandths of a degree Celsius."""
    return _scaled(text, 1e3, -100.0, _MOST_C)


def power_w(text: str) -> float | None:
    """Return a power that is given in millionths of a watt."""
    return _scaled(text, 1e6, 0.0, _MOST_W)


def power_state(runtime_status: str, pci_state: str) -> str | None:
    """Return the word of the runtime power management, or PCI's where that is not in use."""
    for text in (runtime_status, pci_state):
        word = text.strip()
        if _WORD.fullmatch(word) and word != "unsupported":
            return word
    return None


def busy_percent_between(before: tuple[float, str], now: tuple[float, str]) -> float | None:
    """Return the busy share between two readings of a counter of busy microseconds.

    Args:
        before, now: (seconds of the clock, text of the file).
    """
    first_us, last_us = (_scaled(text, 1.0, 0.0, 1e18) for _, text in (before, now))
    elapsed_s = now[0] - before[0]
    if first_us is None or last_us is None or last_us < first_us or elapsed_s <= 0:
        return None
    return min(100.0, (last_us - first_us) / elapsed_s / 1e4)


def _scaled(text: str, divisor: float, least: float, most: float) -> float | None:
    word = text.strip()
    if not _NUMBER.fullmatch(word):
        return None
    value = int(word) / divisor
    return value if least <= value <= most else None


class GpuBusy:
    """How busy the GPU was over some samples.

    Which card the decoder uses is not known here. So of several it is the busiest, each averaged
    by itself: a mean over cards would say that one which works alone was half idle.
    """

    __slots__ = ("_by_card",)

    def __init__(self) -> None:
        self._by_card: dict[str, tuple[float, int]] = {}

    def add(self, samples: Iterable[DeviceSample]) -> None:
        """Count what all devices said at one moment."""
        for one in samples:
            if one.kind == "gpu" and one.busy_percent is not None:
                total, count = self._by_card.get(one.name, (0.0, 0))
                self._by_card[one.name] = total + one.busy_percent, count + 1

    @property
    def percent(self) -> float | None:
        """The mean of the busiest card; None when no card said."""
        means = (total / count for total, count in self._by_card.values())
        return max(means, default=None)
