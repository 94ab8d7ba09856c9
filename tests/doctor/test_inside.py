"""The checks that start something, on the stand-ins: what they find, and that nothing is left."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio

from onebitd.doctor import inside, outside, provider
from onebitd.doctor.finding import Finding, State, failed
from onebitd.doctor.place import Place
from onebitd.doctor.request import Request
from onebitd.surfaces import cli, cli_doctor, daemon_args
from tests.harness import STANDINS, wait_until
from tests.llama_builds import short_temporary_directory
from tests.standins import tiny_state
from tests.systemd.instances import toml

SESAME = "sesame-4711"


class Setup:
    """An instance on the stand-ins, in a directory of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.model = home / "tiny.gguf"
        self.model.write_bytes(tiny_state.gguf())
        self.lock = home / "npu.lock"
        self.lock.write_bytes(b"")
        (home / "states/q").mkdir(parents=True)
        (home / "states/q/state-of-the-daemon").touch()
        (home / "run").mkdir()
        self.config: dict[str, dict[str, object]] = {
            "model": {"path": str(self.model)},
            "http": {"port": 0},
            "backend": {"llama_server": str(STANDINS / "llama_server.py"), "args": []},
            "provider": {
                "program": str(STANDINS / "provider.py"),
                "env": {"SECRET": SESAME},
            },
            "handoff": {"state_dir": str(home / "states")},
            "lock": {"path": str(self.lock), "wait_s": 0.1},
        }

    @property
    def file(self) -> Path:
        """The configuration, as it is now."""
        path = self.home / "q.toml"
        path.write_text(toml(self.config))
        return path

    def examine(self, *, quick: bool = False) -> dict[str, Finding]:
        """Run the checks; return the findings by name, and see that nothing is left."""
        place = Place("q", config_file=str(self.file))
        environ = {
            "RUNTIME_DIRECTORY": "",
            "XDG_RUNTIME_DIR": str(self.home / "run"),
            "XDG_STATE_HOME": str(self.home / "state"),
        }
        before = sorted(self.home.rglob("*"))
        request = Request(place, ("--config", str(self.file)), environ, quick=quick)
        report = trio.run(inside.examine, request)
        assert sorted(self.home.rglob("*")) == before
        assert SESAME not in json.dumps(report.to_json())
        return {one.name: one for one in report.findings}


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    """The instance; the log is given back as it was."""
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    with short_temporary_directory() as home:
        yield Setup(home)
    structlog.reset_defaults()


def test_examine_of_a_healthy_instance_runs_decoder_and_provider(setup: Setup) -> None:
    """The slot is saved and restored, the provider's state is in order and restored."""
    found = setup.examine()
    assert {name for name, one in found.items() if one.state is State.FAILED} == set()
    assert found["decoder.slot"].state is State.OK
    assert found["provider.run"].state is State.OK
    assert found["provider.run"].message.endswith("restored by the decoder")
    assert found["decoder.share"].state is State.SKIPPED
    assert "2048 tokens" in found["state.space"].message


def test_examine_with_a_busy_lock_warns_and_names_the_holder(setup: Setup) -> None:
    """The lock is waited for as a handoff would, and not taken from whoever has it."""
    with setup.lock.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        found = setup.examine()["provider.run"]
    assert found.state is State.WARNING
    assert f"pid {os.getpid()}" in found.message


def test_examine_without_a_lock_file_makes_none_and_asks_for_the_shared_route(
    setup: Setup,
) -> None:
    """A lock file left behind would be the wrong user's; a decoder without shares gets files."""
    setup.lock.unlink()
    setup.config["handoff"]["share"] = True
    found = setup.examine()
    assert found["lock"].state is State.WARNING
    assert found["provider.run"].state is State.OK
    assert found["decoder.share"].state is State.WARNING
    assert "not supported" in found["decoder.share"].message


def test_examine_with_a_bad_provider_has_its_last_words(setup: Setup) -> None:
    """And how to run it by hand."""
    setup.config["provider"]["env"] = {"FAKE_PREFILL_MODE": "exit:3", "SECRET": SESAME}
    found = setup.examine()["provider.run"]
    assert found.state is State.FAILED
    assert "status 3: no XDNA device" in found.message
    assert found.fix is not None
    assert str(STANDINS / "provider.py") in found.fix


def test_examine_with_a_decoder_that_dies_in_its_load_has_its_last_words(setup: Setup) -> None:
    """The provider is not run then: nobody could judge its file."""
    setup.config["backend"]["args"] = ["--crash-on", "load"]
    found = setup.examine()
    assert found["decoder"].state is State.FAILED
    assert "could not be started" in found["decoder"].message
    assert found["provider.run"].state is State.SKIPPED


def test_examine_quick_starts_nothing_and_says_so(setup: Setup) -> None:
    """A load may take minutes."""
    setup.config["backend"]["args"] = ["--crash-on", "load"]
    found = setup.examine(quick=True)
    for name in ("decoder", "provider.run"):
        assert found[name].state is State.SKIPPED
        assert "--quick" in found[name].message


def test_examine_of_a_bad_configuration_has_all_its_faults(setup: Setup) -> None:
    """And the devices are looked at all the same."""
    setup.config["http"] = {"port": 70000}
    setup.config["lock"]["hold"] = "never"
    place = Place("q", config_file=str(setup.file))
    report = trio.run(inside.examine, Request(place, ("--config", str(setup.file)), {}))
    faults = [one.message for one in report.findings if one.name == "config"]
    assert len(faults) == 2
    assert any(one.name.startswith("device.") for one in report.findings)
    assert set(report.facts) == {"nodes"}


def test_examine_program_without_its_interpreter_names_it(setup: Setup) -> None:
    """The kernel would only say that there is no such file."""
    script = setup.home / "provider"
    script.write_text("#!/opt/gone/python3\n")
    script.chmod(0o755)
    setup.config["provider"]["program"] = str(script)
    found = setup.examine()["provider.program"]
    assert found.state is State.FAILED
    assert "/opt/gone/python3" in found.message


def test_doctor_prints_a_page_or_json_and_fails_with_one(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The place first, then the verdict; no colour where nobody sees it."""
    setup.model.unlink()
    monkeypatch.setenv("XDG_STATE_HOME", str(setup.home))
    words = ["doctor", "--config", str(setup.file), "--quick", "--here"]
    assert cli.main(words) == 1
    page = capsys.readouterr()
    lines = page.out.splitlines()
    assert page.err == ""
    assert lines[0].startswith("q: checked here, as ")
    assert " failed: model.file" in lines[1]
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in page.out
    assert cli.main([*words, "--json"]) == 1
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (found["instance"], found["where"]) == ("q", "here")
    assert {"name", "state", "message", "fix"} == set(found["checks"][0])


def test_doctor_in_a_directory_that_is_gone_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A relative name means nothing there; that is no fault of the answer."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert cli.main(["doctor", "--config", "q.toml"]) == 2
    assert "--config q.toml: No such file or directory" in capsys.readouterr().err


def test_doctor_of_the_only_configured_file_needs_the_name_of_an_instance(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that somebody has put aside gets into no command."""
    monkeypatch.setattr(cli_doctor, "_configured", lambda: ["q (copy)"])
    assert cli.main(["doctor", "--quick", "--here"]) == 2
    assert "'q (copy)' cannot be an instance" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_doctor_that_is_ended_leaves_nothing(setup: Setup, number: signal.Signals) -> None:
    """Ctrl-C in the middle of a load: no decoder, no directory, no traceback."""
    setup.config["backend"]["args"] = ["--load-delay", "600"]
    file, run = setup.file, setup.home / "run"
    with subprocess.Popen(
        [sys.executable, "-m", "onebitd.surfaces.cli", "doctor", "--here", "--config", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(run)},
    ) as process:
        try:
            wait_until(lambda: list(run.glob("*/backend.sock")), "the decoder loads")
            process.send_signal(number)
            said = process.communicate(timeout=30)
        finally:
            process.kill()
    assert said == ("", "")
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert list(run.iterdir()) == []
    assert subprocess.run(["pgrep", "-f", str(run)], check=False).returncode == 1


def test_amended_says_that_the_sandbox_hides_what_root_sees(tmp_path: Path) -> None:
    """A file that is missing inside and there outside, as below ProtectHome=tmpfs."""
    file = tmp_path / "m.gguf"
    file.touch()
    one = failed("model.file", f"the model {file}: there is no {tmp_path}", "vi")
    place = Place("q", "system", inside=True)
    amended = outside._shown(one, {"missing": {"model.file": str(file)}}, place)
    assert amended.message.startswith(f"the model {file} is hidden from the service")
    assert f"BindReadOnlyPaths={tmp_path}" in (amended.fix or "").replace("'", "")
    file.unlink()
    assert outside._shown(one, {"missing": {"model.file": str(file)}}, place) == one
    assert outside._shown(one, {}, place) == one


def test_provider_is_not_run_while_the_daemon_has_the_lock_for_life(setup: Setup) -> None:
    """The run would wait for its own daemon."""
    config = daemon_args.load_config(daemon_args.parse(["--config", str(setup.file)]), {})
    lifetime = dataclasses.replace(config, lock=dataclasses.replace(config.lock, hold="lifetime"))
    with setup.lock.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        found = provider._why_not(lifetime, Place("q"), os.getpid())
        assert found is not None
        assert found.state is State.SKIPPED
        assert provider._why_not(lifetime, Place("q"), None) is None
        assert provider._why_not(config, Place("q"), os.getpid()) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--socket", "/x", "doctor"), "use -i, not --socket"),
        (("doctor", "--config", "/does/not/exist.toml"), "no such file"),
        (("-i", "../x", "doctor"), "cannot be an instance"),
    ],
)
def test_doctor_usage_is_refused_with_two(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a line that names the option."""
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err
