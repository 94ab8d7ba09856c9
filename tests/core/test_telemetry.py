"""What the texts of sysfs say of a device, and what they do not."""

from __future__ import annotations

import pytest

from onebitd.core import telemetry
from onebitd.core.telemetry import DeviceSample, GpuBusy

LEVELS = "0: 600Mhz \n1: 1100Mhz \n2: 2900Mhz "


@pytest.mark.parametrize(
    ("text", "mhz"),
    [
        ("0: 600Mhz *\n1: 1100Mhz \n2: 2900Mhz \n", 600.0),
        ("0: 600Mhz \n1: 1100Mhz *\n2: 2900Mhz \n", 1100.0),
        ("0: 600Mhz \n1: 1100Mhz \n2: 2900Mhz *", 2900.0),
        ("S: 19Mhz *\n0: 600Mhz \n1: 2900Mhz \n", 19.0),  # the deep sleep of some cards
        ("0:600MHz*", 600.0),
        (f"{LEVELS}\n", None),
        ("0: 2.5GT/s, x8 619Mhz *\n", None),
        ("0: 600Mhz * *\n", None),
        ("0: 600 *\n", None),
        ("*\n", None),
        ("", None),
        ("0: 99999999999Mhz *\n", None),
    ],
)
def test_current_level_is_the_line_with_the_star(text: str, mhz: float | None) -> None:
    """At any line; a table without one says nothing."""
    assert telemetry.current_level_mhz(text) == mhz


@pytest.mark.parametrize(
    ("text", "busy", "temperature", "watts"),
    [
        ("37\n", 37.0, 0.037, 0.000037),
        ("0", 0.0, 0.0, 0.0),
        ("100", 100.0, 0.1, 0.0001),
        ("101", None, 0.101, 0.000101),
        ("-5000", None, -5.0, None),
        ("65535000", None, None, 65.535),
        ("12500000000000", None, None, None),
        ("9" * 4000, None, None, None),
        ("3 7", None, None, None),
        ("nan", None, None, None),
        ("0x10", None, None, None),
        ("\u0663", None, None, None),
        ("", None, None, None),
        ("-", None, None, None),
    ],
)
def test_numbers_that_cannot_be_are_none(
    text: str, busy: float | None, temperature: float | None, watts: float | None
) -> None:
    """A share, a temperature and a power have bounds; odd contents never raise."""
    assert telemetry.percent(text) == busy
    assert telemetry.temperature_c(text) == temperature
    assert telemetry.power_w(text) == watts


@pytest.mark.parametrize(
    ("runtime_status", "pci_state", "word"),
    [
        ("active\n", "D0\n", "active"),
        ("suspended\n", "D3cold\n", "suspended"),
        ("unsupported\n", "D0\n", "D0"),
        ("", "D3hot\n", "D3hot"),
        ("", "", None),
        ("unsupported", "", None),
        ("two words", "x" * 99, None),
    ],
)
def test_power_state_is_the_runtime_word_or_pcis(
    runtime_status: str, pci_state: str, word: str | None
) -> None:
    """Where runtime power management is not in use, the bus still knows a state."""
    assert telemetry.power_state(runtime_status, pci_state) == word


@pytest.mark.parametrize(
    ("before", "now", "busy"),
    [
        ((10.0, "1000000"), (11.0, "1250000\n"), 25.0),
        ((10.0, "0"), (10.5, "9000000"), 100.0),  # the clocks are not the same
        ((10.0, "5"), (11.0, "5"), 0.0),
        ((10.0, "9"), (11.0, "5"), None),  # the driver began anew
        ((10.0, "5"), (10.0, "9"), None),
        ((10.0, ""), (11.0, "9"), None),
    ],
)
def test_busy_between_two_readings_of_a_counter(
    before: tuple[float, str], now: tuple[float, str], busy: float | None
) -> None:
    """Busy microseconds over elapsed ones; no share where there is no difference to take."""
    assert telemetry.busy_percent_between(before, now) == busy


def test_sample_of_a_whole_gpu_has_every_figure() -> None:
    """The hottest sensor counts, a clock's level before the sensor's frequency."""
    found = telemetry.sample(
        "gpu",
        "card1",
        "amdgpu",
        {
            "runtime_status": "active\n",
            "busy": "87\n",
            "memory_busy": "12\n",
            "sclk": "0: 600Mhz \n1: 2900Mhz *\n",
            "sclk_hz": "2755000000\n",
            "mclk": "no table\n",
            "mclk_hz": "1000000000\n",
            "temperature_1": "61000\n",
            "temperature_2": "74000\n",
            "power": "54000000\n",
        },
    )
    assert found == DeviceSample(
        kind="gpu",
        name="card1",
        driver="amdgpu",
        busy_percent=87.0,
        memory_busy_percent=12.0,
        clocks={"sclk": 2900.0, "mclk": 1000.0},
        temperature_c=74.0,
        power_state="active",
        power_w=54.0,
    )


@pytest.mark.parametrize(
    ("kind", "state", "busy"),
    [("gpu", "suspended", 0.0), ("gpu", "resuming", None), ("npu", "suspended", None)],
)
def test_sample_of_a_sleeping_device_has_its_state_alone(
    kind: str, state: str, busy: float | None
) -> None:
    """A suspended GPU is idle for certain; texts from before it slept do not count."""
    found = telemetry.sample(kind, "x", "y", {"runtime_status": state, "busy": "50", "power": "1"})
    assert found == DeviceSample(
        kind=kind, name="x", driver="y", busy_percent=busy, power_state=state
    )


def test_sample_without_texts_says_nothing() -> None:
    """No nulls turned into zeros."""
    found = telemetry.sample("npu", "accel0", "amdxdna", {})
    assert found == DeviceSample(kind="npu", name="accel0", driver="amdxdna")


def gpu(name: str, busy: float | None) -> DeviceSample:
    return DeviceSample(kind="gpu", name=name, driver="amdgpu", busy_percent=busy)


@pytest.mark.parametrize(
    ("taken", "busy"),
    [
        ([], None),
        ([[]], None),
        ([[gpu("card0", None)]], None),
        ([[DeviceSample(kind="npu", name="accel0", driver="v", busy_percent=90.0)]], None),
        ([[gpu("card0", 0.0)]], 0.0),
        ([[gpu("card0", 20.0)], [gpu("card0", 40.0)]], 30.0),
        ([[gpu("card0", 20.0)], [gpu("card0", None)], []], 20.0),
        # The busiest card, not a mix of moments at which one or the other was.
        ([[gpu("card0", 90.0), gpu("card1", 0.0)], [gpu("card0", 0.0), gpu("card1", 60.0)]], 45.0),
        ([[gpu("card0", 0.0), gpu("card1", 80.0)]], 80.0),
    ],
)
def test_gpu_busy_is_the_mean_of_the_busiest_card(
    taken: list[list[DeviceSample]], busy: float | None
) -> None:
    """Over its own samples; nothing where no card said."""
    found = GpuBusy()
    for samples in taken:
        found.add(samples)
    assert found.percent == busy
