"""The systemd units: systemd understands every line of them, and they do what onebitd(8) says."""

from __future__ import annotations

import posixpath
import re
import subprocess
from pathlib import Path

import pytest

from onebitd.core import paths
from onebitd.core.config import SETTING_BY_KEY
from onebitd.core.errors import BackendFailed, ConfigError, InstanceTaken, UsageError
from onebitd.surfaces import cli, daemon_args
from tests.llama_builds import ROOT, require_program

HOME = ROOT / "units"
SERVICE = HOME / "onebitd@.service"
USER_SERVICE = HOME / "user" / "onebitd@.service"
CONTROL_SOCKET = HOME / "onebitd@.socket"
HTTP_SOCKET = HOME / "onebitd-http@.socket"
SERVICES = (SERVICE, USER_SERVICE)
SYSTEM_UNITS = (SERVICE, CONTROL_SOCKET, HTTP_SOCKET)
DROP_INS = sorted((HOME / "drop-ins").glob("*.conf"))
TRUE = ("yes", "true", "on", "1")
MOST_EXPOSED = 1.8
LOAD_S = 300
"""What a large model may take to load from a slow disk."""


def lines_of(path: Path) -> list[str]:
    """Return the settings of a unit, without comments and section names."""
    return [line for line in path.read_text().splitlines() if re.match(r"[A-Za-z]+=", line)]


def values(unit: Path, key: str) -> list[str]:
    """Return every value that a unit gives a key."""
    return [line.partition("=")[2] for line in lines_of(unit) if line.startswith(f"{key}=")]


def lay_out(home: Path, **changed: str) -> list[str]:
    """Write the system's units with programs that exist here; return their paths.

    `changed` replaces the text of the service.
    """
    for unit in SYSTEM_UNITS:
        text = changed.get("service", unit.read_text()) if unit is SERVICE else unit.read_text()
        (home / unit.name).write_text(re.sub(r"/usr/bin/onebit\w+", "/bin/true", text))
    return [str(home / unit.name) for unit in SYSTEM_UNITS]


def analyze(*args: str) -> tuple[int, str]:
    """Return status and output of systemd-analyze."""
    require_program("systemd-analyze")
    done = subprocess.run(
        ["systemd-analyze", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def verify(*units: str) -> tuple[int, str]:
    """Return what `verify` says; the man pages need not be installed, a test below has them."""
    return analyze("--man=no", "verify", *units)


def exposure(unit: str) -> float:
    """Return the overall exposure that `systemd-analyze security` gives a service, 0 to 10."""
    status, said = analyze("security", "--offline=true", "--no-pager", unit)
    found = re.search(r"Overall exposure level for .*: ([0-9.]+)", said)
    assert found, (status, said)
    return float(found.group(1))


def test_units_system_pass_verify(tmp_path: Path) -> None:
    """Status 0 and not a word: an unknown key alone leaves the status at 0."""
    assert verify(*lay_out(tmp_path)) == (0, "")


@pytest.mark.parametrize("drop_in", DROP_INS, ids=lambda path: path.stem)
def test_unit_with_drop_in_passes_verify(drop_in: Path, tmp_path: Path) -> None:
    """Each drop-in, copied as its text says, is understood."""
    units = lay_out(tmp_path)
    place = tmp_path / f"{SERVICE.name}.d"
    place.mkdir()
    (place / drop_in.name).write_text(drop_in.read_text())
    assert verify(*units) == (0, "")


def test_verify_unknown_key_is_noticed(tmp_path: Path) -> None:
    """The check above can fail: a misspelled key is named."""
    text = SERVICE.read_text().replace("KillMode=", "KilMode=")
    _, said = verify(*lay_out(tmp_path, service=text))
    assert "KilMode" in said


def test_unit_service_exposure_does_not_rise(tmp_path: Path) -> None:
    """The sandbox is as tight as it was measured to be; a line taken away shows."""
    path, *_ = lay_out(tmp_path)
    found = exposure(path)
    print(f"systemd-analyze security: {found}")
    assert found <= MOST_EXPOSED
    text = SERVICE.read_text().replace("CapabilityBoundingSet=\n", "")
    assert exposure(lay_out(tmp_path, service=text)[0]) > MOST_EXPOSED


@pytest.mark.parametrize(
    "unit", [*SYSTEM_UNITS, USER_SERVICE, *DROP_INS], ids=lambda path: path.name
)
@pytest.mark.parametrize("key", ["PrivateTmp", "DynamicUser"])
def test_unit_any_does_not_hide_the_device_lock(unit: Path, key: str) -> None:
    """A private /tmp has a device lock of its own, and so two owners; both keys make one."""
    wrong = [line for line in lines_of(unit) if line.startswith(f"{key}=")]
    assert [line for line in wrong if line.partition("=")[2].lower() in TRUE] == []
    assert f"{key}=disconnected" not in wrong


@pytest.mark.parametrize("unit", SERVICES, ids=lambda path: path.parent.name)
def test_unit_service_starts_what_onebitd_parses(unit: Path) -> None:
    """The command line is one that the daemon takes."""
    (command,) = values(unit, "ExecStart")
    program, *args = command.replace("%i", "qwen").split()
    assert program == "/usr/bin/onebitd"
    assert daemon_args.parse(args).instance == "qwen"


@pytest.mark.parametrize("unit", SERVICES, ids=lambda path: path.parent.name)
def test_unit_service_reload_waits_for_the_answer(unit: Path) -> None:
    """A reload is a command that fails when it is refused, not a signal that is gone."""
    (command,) = values(unit, "ExecReload")
    program, *args = command.replace("%i", "qwen").split()
    assert program == "/usr/bin/onebitctl"
    parsed = cli.build_parser().parse_args(args)
    assert (parsed.instance, parsed.run) == ("qwen", cli.run_reload)
    assert values(unit, "Type") == ["notify"]


def test_unit_service_directories_are_those_of_the_instance() -> None:
    """The daemon finds its runtime directory by the instance's name."""
    assert values(SERVICE, "RuntimeDirectory") == values(SERVICE, "StateDirectory")
    assert values(SERVICE, "RuntimeDirectory") == ["onebitd/%i"]
    assert values(SERVICE, "RuntimeDirectoryMode") == ["0750"]
    # The socket's unit is not restarted with the service, and its file is in there.
    assert values(SERVICE, "RuntimeDirectoryPreserve") == ["yes"]


@pytest.mark.parametrize("unit", SERVICES, ids=lambda path: path.parent.name)
def test_unit_service_restarts_but_not_where_it_would_not_help(unit: Path) -> None:
    """A bad configuration stays bad; a decoder that was restarted in vain has failed.

    So does what systemd ends with where a drop-in names a directory (226) or credential (243) that
    is not there.
    """
    assert values(unit, "Restart") == ["on-failure"]
    prevented = {int(word) for word in " ".join(values(unit, "RestartPreventExitStatus")).split()}
    assert {
        ConfigError.exit_status,
        UsageError.exit_status,
        InstanceTaken.exit_status,
        BackendFailed.exit_status,
        *(226, 243),
    } == prevented


@pytest.mark.parametrize("unit", SERVICES, ids=lambda path: path.parent.name)
def test_unit_service_start_limit_outlasts_loads_of_a_large_model(unit: Path) -> None:
    """With a window shorter than the starts it counts, nothing would ever be limited."""
    (interval,) = values(unit, "StartLimitIntervalSec")
    (burst,) = values(unit, "StartLimitBurst")
    assert interval == "3h"
    assert int(burst) * (LOAD_S + 2) <= 3 * 3600


@pytest.mark.parametrize("unit", SERVICES, ids=lambda path: path.parent.name)
def test_unit_service_leaves_no_child_and_no_core_behind(unit: Path) -> None:
    """The daemon drains alone, its children die with it, and no core holds the model."""
    assert values(unit, "KillMode") == ["mixed"]
    assert values(unit, "OOMPolicy") == ["continue"]
    assert values(unit, "LimitCORE") == ["0"]


@pytest.mark.parametrize(
    "unit", [*SYSTEM_UNITS, USER_SERVICE], ids=lambda path: f"{path.parent.name}-{path.name}"
)
def test_unit_documentation_pages_exist(unit: Path) -> None:
    """Each page that a unit names is one of ours."""
    pages = re.findall(r"man:([\w.-]+)\((\d)\)", " ".join(values(unit, "Documentation")))
    assert pages
    for name, section in pages:
        assert (ROOT / "man" / f"{name}.{section}").is_file(), name


def test_unit_control_socket_is_where_onebitctl_looks() -> None:
    """Path, mode and group are those of interface and man page, and its service finds it."""
    (path,) = values(CONTROL_SOCKET, "ListenStream")
    expected = posixpath.join(paths.runtime_dir("%i", {}, 0), paths.CONTROL_SOCKET)
    assert path == expected
    assert values(CONTROL_SOCKET, "FileDescriptorName") == ["control"]
    assert values(CONTROL_SOCKET, "SocketMode") == ["0660"]
    assert values(CONTROL_SOCKET, "SocketGroup") == values(SERVICE, "Group")
    assert "onebitd@%i.socket" in values(SERVICE, "Requires")


def test_unit_http_socket_listens_where_the_daemon_would() -> None:
    """Turning the socket on changes who holds the port, not which one it is."""
    host, port = (SETTING_BY_KEY[key].default for key in ("http.host", "http.port"))
    assert values(HTTP_SOCKET, "ListenStream") == [f"{host}:{port}"]
    assert values(HTTP_SOCKET, "FileDescriptorName") == ["http"]
    assert values(HTTP_SOCKET, "Service") == ["onebitd@%i.service"]


@pytest.mark.parametrize("unit", [CONTROL_SOCKET, HTTP_SOCKET], ids=lambda path: path.name)
def test_unit_socket_outlives_a_restart_of_the_service(unit: Path) -> None:
    """PartOf= and BindsTo= would close it at each restart, and its clients would be refused."""
    assert values(unit, "PartOf") == values(unit, "BindsTo") == []


def test_tmpfiles_make_the_device_lock_for_all_its_users() -> None:
    """Root's file, usable by the group: what fs.protected_regular and the engine ask for."""
    (line,) = [
        line
        for line in (HOME / "tmpfiles.d" / "onebitd.conf").read_text().splitlines()
        if paths.DEVICE_LOCK in line
    ]
    assert line.split() == ["f", SETTING_BY_KEY["lock.path"].default, "0660", "root", "render", "-"]


def test_sysusers_make_every_user_and_group_that_the_units_name() -> None:
    """systemd does not start a service that names a group which does not exist."""
    text = (HOME / "sysusers.d" / "onebitd.conf").read_text()
    users = set(re.findall(r"^u (\S+)", text, re.MULTILINE))
    groups = set(re.findall(r"^[gu] (\S+)", text, re.MULTILINE))
    assert set(values(SERVICE, "User")) <= users
    named = " ".join(values(SERVICE, "Group") + values(SERVICE, "SupplementaryGroups")).split()
    assert set(named) <= groups


def test_drop_ins_are_all_in_the_man_page() -> None:
    """What is shipped is told, and what is told is shipped."""
    told = re.findall(
        r"^\.It Pa (\S+\.conf)$", (ROOT / "man" / "onebitd.8").read_text(), re.MULTILINE
    )
    assert sorted(told) == [path.name for path in DROP_INS]
