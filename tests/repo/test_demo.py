"""`make demo` leaves nothing running and the machine's lock alone, and hands off every prompt."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from onebitd.core import paths
from tests.llama_builds import ROOT
from tests.tools import demo

DAEMON = """
import signal, sys, time
asked = 0
def again(number, frame):
    global asked
    asked += 1
    print("asked", flush=True)
    if asked == 2:
        sys.exit(0)
signal.signal(signal.SIGTERM, again)
print("up", flush=True)
while True:
    time.sleep(0.02)  # not pause(): a signal just before it would be seen only with the next one
"""
"""Stops at the second SIGTERM only, as onebitd does while a reply runs."""

STOPPER = f"""
import subprocess, sys
from tests.tools import demo
daemon = subprocess.Popen([sys.executable, "-c", {DAEMON!r}], stdout=subprocess.PIPE)
print(daemon.stdout.readline().decode(), end="", flush=True)
print(daemon.pid, flush=True)
import threading
def pass_on():
    for line in daemon.stdout:
        print(line.decode(), end="", flush=True)
threading.Thread(target=pass_on).start()
demo.stop(daemon)
print("gone", daemon.returncode, flush=True)
"""


def test_demo_second_interrupt_hurries_the_daemon_and_still_waits() -> None:
    """Ctrl-C while it stops: the daemon is asked again and seen to its end, without a traceback.

    The second one used to end the demo with a traceback and leave the daemon running.
    """
    with subprocess.Popen(
        [sys.executable, "-c", STOPPER],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "up\n"
        pid = int(process.stdout.readline())
        assert process.stdout.readline() == "asked\n"
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read().splitlines()
        assert process.stderr.read() == ""
        assert sorted(rest) == ["asked", "gone 0"]
    assert not Path(f"/proc/{pid}").exists()


def test_demo_device_lock_is_its_own_and_every_prompt_is_handed_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its configuration names a lock file below .venv/, in whatever directory the checkout is.

    And the policy: the default would try the provider twice and then leave it alone.
    """
    assert demo.LOCK.is_relative_to(ROOT / ".venv")
    odd = tmp_path / 'a "b" \U0001f600'
    monkeypatch.setattr(demo, "CONFIG", odd / "demo.toml")
    monkeypatch.setattr(demo, "LOCK", odd / "device.lock")
    demo.write_config()
    written = tomllib.loads(demo.CONFIG.read_text())
    assert written == {
        "handoff": {"policy": "always"},
        "lock": {"path": str(odd / "device.lock")},
    }
    assert written["lock"]["path"] != paths.DEVICE_LOCK
