"""A daemon that runs without a service is judged by what it was really started with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onebitd.doctor import by_hand
from tests.harness import STANDINS, running_onebitd
from tests.standins import tiny_state


@pytest.mark.parametrize(
    ("argv", "file"),
    [
        ((), None),
        (("--config", "q.toml"), "/srv/q.toml"),
        (("--port", "1", "--config=/etc/q.toml"), "/etc/q.toml"),
        (("--", "--config", "q.toml"), None),
    ],
)
def test_config_file_is_that_of_the_flag(argv: tuple[str, ...], file: str | None) -> None:
    """Absolute; llama-server's arguments are none of ours."""
    assert by_hand.Started(1, argv, {}, "/srv").config_file == file


def test_started_of_something_else_is_none(tmp_path: Path) -> None:
    """A pid may be another program's by now, or nobody's."""
    assert by_hand.started(os.getpid()) is None
    assert by_hand.started(1, str(tmp_path)) is None


def test_doctor_of_a_daemon_run_by_hand_checks_the_file_it_was_given(tmp_path: Path) -> None:
    """`--config` and the flags after it count, not a file of the instance's name in /etc."""
    model = tmp_path / "tiny.gguf"
    model.write_bytes(tiny_state.gguf())
    with running_onebitd(
        model=model,
        llama_server=STANDINS / "llama_server.py",
        provider=STANDINS / "provider.py",
    ) as daemon:
        words = [sys.executable, "-m", "onebitd.surfaces.cli", "-i", "test", "doctor"]
        done = subprocess.run(
            [*words, "--quick", "--json"],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "RUNTIME_DIRECTORY": str(daemon.runtime)},
        )
        found: dict[str, Any] = json.loads(done.stdout)
        checks = {one["name"]: one for one in found["checks"]}
        assert checks["config"]["state"] == "ok", checks["config"]
        assert str(daemon.runtime.parent / "test.toml") in checks["config"]["message"]
        assert checks["provider.program"]["state"] == "ok", checks["provider.program"]
        assert str(daemon.process.pid) in checks["daemon"]["message"]
