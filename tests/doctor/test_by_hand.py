"""A daemon that runs without a service is judged by what it was really started with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio

from onebitd.client import AnswerTimeout
from onebitd.core import paths
from onebitd.core.errors import UsageError
from onebitd.doctor import by_hand, command, daemon, decoder, inside
from onebitd.doctor.finding import State
from onebitd.doctor.place import Place
from onebitd.doctor.request import Request
from onebitd.doctor.service import Service
from tests.harness import STANDINS, RunningDaemon, running_onebitd
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


PROGRAMS = (
    *("--llama-server", str(STANDINS / "llama_server.py")),
    *("--prefill-provider", str(STANDINS / "provider.py")),
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """A daemon on the stand-ins."""
    model = tmp_path_factory.mktemp("model") / "tiny.gguf"
    model.write_bytes(tiny_state.gguf())
    with running_onebitd(
        model=model,
        llama_server=STANDINS / "llama_server.py",
        provider=STANDINS / "provider.py",
    ) as daemon:
        yield daemon


def test_doctor_of_a_daemon_run_by_hand_checks_the_file_it_was_given(
    running: RunningDaemon,
) -> None:
    """`--config` and the flags after it count, not a file of the instance's name in /etc."""
    words = [sys.executable, "-m", "onebitd.surfaces.cli", "-i", "test", "doctor"]
    done = subprocess.run(
        [*words, "--quick", "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "RUNTIME_DIRECTORY": str(running.runtime)},
    )
    found: dict[str, Any] = json.loads(done.stdout)
    checks = {one["name"]: one for one in found["checks"]}
    assert checks["config"]["state"] == "ok", checks["config"]
    assert str(running.runtime.parent / "test.toml") in checks["config"]["message"]
    assert checks["provider.program"]["state"] == "ok", checks["provider.program"]
    assert str(running.process.pid) in checks["daemon"]["message"]


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "looked for"])
def test_examine_of_a_member_beside_the_systems_daemon_loads_no_second_model(
    running: RunningDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    """Its socket is not where the member's own would be; the model may fill the memory."""
    (tmp_path / "system").mkdir()
    (tmp_path / "system/test").symlink_to(running.runtime)
    monkeypatch.setattr(paths, "SYSTEM_RUNTIME", str(tmp_path / "system"))
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    monkeypatch.setattr(decoder, "started", lambda *_: pytest.fail("a second model is loaded"))
    file = str(running.runtime.parent / "test.toml")
    request = Request(
        Place("test", "system", config_file=file),
        ("--config", file, *PROGRAMS),
        {"XDG_RUNTIME_DIR": str(tmp_path)},
        str(running.runtime / "control.sock") if is_told else None,
    )
    report = trio.run(inside.examine, request)
    structlog.reset_defaults()
    found = {one.name: one for one in report.findings}
    assert found["decoder"].state is State.OK
    assert found["state.directory"].state is State.SKIPPED
    assert str(running.runtime if is_told else tmp_path) in found["state.space"].message


@pytest.mark.parametrize("error", [AnswerTimeout("it hangs"), UsageError("more than one runs")])
def test_examine_beside_a_daemon_that_does_not_tell_loads_no_second_model(
    running: RunningDaemon, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A daemon that hangs has its model in memory all the same."""
    monkeypatch.setattr(daemon, "ask", lambda *_: (None, error))
    monkeypatch.setattr(decoder, "started", lambda *_: pytest.fail("a second model is loaded"))
    file = str(running.runtime.parent / "test.toml")
    argv = ("--config", file, *PROGRAMS)
    report = trio.run(inside.examine, Request(Place("test", config_file=file), argv, {}))
    structlog.reset_defaults()
    (found,) = (one for one in report.findings if one.name == "decoder")
    assert (found.state, str(error) in found.message) == (State.SKIPPED, True)


OWN = "/run/user/7/onebitd/q/control.sock"
ITS = "/run/onebitd/q/control.sock"


@pytest.mark.parametrize(
    ("state", "rests", "asked"),
    [
        (None, False, [None]),
        ("inactive", False, [OWN, ITS]),
        ("inactive", True, []),
        ("active", False, []),
    ],
)
def test_started_asks_no_socket_that_would_start_a_service(
    monkeypatch: pytest.MonkeyPatch, state: str | None, rests: bool, asked: list[str | None]
) -> None:
    """A daemon run by hand may be in the service's place, the user's own, or anywhere."""
    seen: list[str | None] = []
    monkeypatch.setattr(os, "geteuid", lambda: 7)
    monkeypatch.setattr(command, "_rests", lambda _: rests)

    def ask(_name: str, _environ: object, socket: str | None) -> tuple[None, None]:
        seen.append(socket)
        return None, None

    monkeypatch.setattr(daemon, "ask", ask)
    place = Place("q", "system")
    found = None if state is None else Service(place, "", {"ActiveState": state}, may_enter=False)
    socket = None if found is None else ITS
    environ = {"XDG_RUNTIME_DIR": "/run/user/7"}
    assert command._started(found, place, environ, socket) == (None, socket)
    assert seen == asked
