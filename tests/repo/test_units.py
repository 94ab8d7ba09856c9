"""The systemd unit: systemd understands every line of it, and it does what onebitd(8) says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from onebitd.core.errors import BackendFailed, ConfigError, UsageError
from onebitd.surfaces import daemon_args
from tests.llama_builds import ROOT, require_program

UNITS = sorted((ROOT / "units").iterdir())
SERVICE = ROOT / "units" / "onebitd@.service"
TRUE = ("yes", "true", "on", "1")


def lines_of(path: Path) -> list[str]:
    """Return the settings of a unit, without comments and section names."""
    return [line for line in path.read_text().splitlines() if re.match(r"[A-Za-z]+=", line)]


def values(key: str) -> list[str]:
    """Return every value that the service gives a key."""
    return [line.partition("=")[2] for line in lines_of(SERVICE) if line.startswith(f"{key}=")]


def verify(unit: str, home: Path) -> tuple[int, str]:
    """Return status and output of `systemd-analyze verify` for the text of a service unit.

    The program is replaced by one that exists here. The man pages need not be installed: the
    test of `Documentation=` looks for them in man/.
    """
    require_program("systemd-analyze")
    path = home / SERVICE.name
    path.write_text(unit.replace("/usr/bin/onebitd ", "/bin/true "))
    done = subprocess.run(
        ["systemd-analyze", "--man=no", "verify", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_unit_service_passes_verify(tmp_path: Path) -> None:
    """Status 0 and not a word: an unknown key alone leaves the status at 0."""
    assert verify(SERVICE.read_text(), tmp_path) == (0, "")


def test_verify_unknown_key_is_noticed(tmp_path: Path) -> None:
    """The check above can fail: a misspelled key is named."""
    _, said = verify(SERVICE.read_text().replace("KillMode=", "KilMode="), tmp_path)
    assert "KilMode" in said


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
@pytest.mark.parametrize("key", ["PrivateTmp", "DynamicUser"])
def test_unit_any_does_not_hide_the_device_lock(unit: Path, key: str) -> None:
    """A private /tmp has a device lock of its own, and so two owners; both keys make one."""
    wrong = [line for line in lines_of(unit) if line.startswith(f"{key}=")]
    assert [line for line in wrong if line.partition("=")[2].lower() in TRUE] == []
    assert f"{key}=disconnected" not in wrong


def test_unit_service_starts_what_onebitd_parses() -> None:
    """The command line is one that the daemon takes."""
    (command,) = values("ExecStart")
    program, *args = command.replace("%i", "qwen").split()
    assert program == "/usr/bin/onebitd"
    assert daemon_args.parse(args).instance == "qwen"


def test_unit_service_directories_are_those_of_the_instance() -> None:
    """The daemon finds its runtime directory by the instance's name."""
    assert values("RuntimeDirectory") == values("StateDirectory") == ["onebitd/%i"]
    assert values("RuntimeDirectoryMode") == ["0750"]


def test_unit_service_restarts_but_not_on_a_bad_configuration() -> None:
    """Status 2 stays; a decoder that could not be kept running (4) is tried again."""
    assert values("Restart") == ["on-failure"]
    prevented = {int(word) for word in " ".join(values("RestartPreventExitStatus")).split()}
    assert {ConfigError.exit_status, UsageError.exit_status} == prevented
    assert BackendFailed.exit_status not in prevented


def test_unit_service_leaves_no_child_and_no_core_behind() -> None:
    """The daemon drains alone, its children die with it, and no core holds the model."""
    assert values("KillMode") == ["mixed"]
    assert values("OOMPolicy") == ["continue"]
    assert values("LimitCORE") == ["0"]


def test_unit_service_asks_for_no_reload() -> None:
    """This version has none: a reload that does nothing would be a lie."""
    assert values("ExecReload") == []
    assert values("Type") == ["notify"]


def test_unit_service_documentation_pages_exist() -> None:
    """Each page that the unit names is one of ours."""
    pages = re.findall(r"man:([\w.-]+)\((\d)\)", " ".join(values("Documentation")))
    assert pages
    for name, section in pages:
        assert (ROOT / "man" / f"{name}.{section}").is_file(), name
