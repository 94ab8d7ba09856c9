"""What every test needs: an environment in which nobody's own settings are visible.

Under CI=true what would be skipped fails: nobody reads the list of what was left out. The
exceptions are below.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

FOREIGN_PREFIXES = ("ONEBIT_", "LLAMA_ARG_", "LISTEN_")
FOREIGN_NAMES = ("NPU_NO_DEVICE_LOCK", "NOTIFY_SOCKET", "LLAMA_API_KEY", "WATCHDOG_USEC")
MAY_BE_SKIPPED = (
    # of a machine, whatever is installed
    *("no IPv6 loopback", "no socket on ", "this machine has no IPv6 loopback"),
    *("/proc/PID/io cannot be read here", "there is no disk under the temporary directory"),
    "net.ipv4.ip_unprivileged_port_start lets everybody",
    # of a llama-server, or of a copy of the sources
    *("this build has no page", "not a git checkout"),
)
"""How the reasons begin with which a test is skipped in CI, too."""


def pytest_configure(config: pytest.Config) -> None:
    """Drop the variables that onebitd, its children or systemd's protocols would listen to."""
    for name in list(os.environ):
        if name.startswith(FOREIGN_PREFIXES) or name in FOREIGN_NAMES:
            del os.environ[name]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Have a test fail whose reason to be skipped is none in CI."""
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple) and os.environ.get("CI") == "true":
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(MAY_BE_SKIPPED):
            report.outcome = "failed"
            report.longrepr = f"CI=true, where this is no reason to skip a test: {reason}"
    return report
