"""What every test needs: an environment in which nobody's own settings are visible."""

from __future__ import annotations

import os

import pytest

FOREIGN_PREFIXES = ("ONEBIT_", "LLAMA_ARG_", "LISTEN_")
FOREIGN_NAMES = ("NPU_NO_DEVICE_LOCK", "NOTIFY_SOCKET", "LLAMA_API_KEY", "WATCHDOG_USEC")


def pytest_configure(config: pytest.Config) -> None:
    """Drop the variables that onebitd, its children or systemd's protocols would listen to."""
    for name in list(os.environ):
        if name.startswith(FOREIGN_PREFIXES) or name in FOREIGN_NAMES:
            del os.environ[name]
