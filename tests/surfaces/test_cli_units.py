"""install-units, uninstall-units, stop and disable: what is asked of systemd, and what is said."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from onebitd.adapters import systemd_tools, unit_files
from onebitd.adapters.unit_files import Tree
from onebitd.core.errors import OnebitError
from onebitd.core.unit_layout import Item
from onebitd.surfaces import cli, cli_service, cli_units
from onebitd.surfaces.cli_units import Installation, Site
from tests.llama_builds import ROOT

TOOLS = ("journalctl", "systemctl", "systemd-sysusers", "systemd-tmpfiles", "systemd-run")
TOOL = """\
#!/bin/sh
printf '%s\\n' "${0##*/} $*" >>"$TOOLS_LOG"
case "$*" in *-) cat >"$TOOLS_LOG.${0##*/}" ;; esac
. "$TOOLS_ANSWERS"
"""
UNIT = "usr/local/lib/systemd/system/onebitd@.service"


class Tools:
    """systemd's programs, which note how they are called and answer what a test says."""

    def __init__(self, home: Path) -> None:
        self.log = home / "log"
        self.answers = home / "answers"
        self.answer("")

    def answer(self, script: str) -> None:
        """Set what each call does; `$0` and `$*` are the program and its arguments."""
        self.answers.write_text(script)

    def calls(self) -> list[str]:
        """Return the calls since the last time."""
        found = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.write_text("")
        return found


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    """Programs of that name come first in PATH."""
    home = tmp_path / "tools"
    home.mkdir()
    for name in TOOLS:
        (home / name).write_text(TOOL)
        (home / name).chmod(0o755)
    found = Tools(home)
    monkeypatch.setenv("TOOLS_LOG", str(found.log))
    monkeypatch.setenv("TOOLS_ANSWERS", str(found.answers))
    monkeypatch.setenv("PATH", f"{home}:{os.environ['PATH']}")
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The tree of a machine that has the group of the service."""
    found = tmp_path / "root"
    (found / "etc").mkdir(parents=True)
    (found / "etc/group").write_text(f"root:x:0:\nonebitd:x:{os.getegid()}:\n")
    return found


@pytest.fixture
def venv(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A virtual environment in that tree, as the wheel fills it."""
    data = root / "opt/onebitd"
    for source, place in {
        "units/onebitd@.service": "lib/systemd/system/onebitd@.service",
        "units/sysusers.d/onebitd.conf": "lib/sysusers.d/onebitd.conf",
        "units/tmpfiles.d/onebitd.conf": "lib/tmpfiles.d/onebitd.conf",
        "man/onebitd.8": "share/man/man8/onebitd.8",
        "etc/onebitd.toml": "share/onebitd/onebitd.toml",
    }.items():
        (data / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / source, data / place)
    running = Installation(
        data=data,
        programs=PurePosixPath(data / "bin"),
        parts=(PurePosixPath(data), PurePosixPath("/usr/bin/python3.11")),
        is_environment=True,
    )
    monkeypatch.setattr(Installation, "running", classmethod(lambda _cls: running))
    return data


def run(*arguments: str) -> int:
    """Run onebitctl in this process."""
    return cli.main(arguments)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="systemd-sysusers needs root")


def test_install_units_below_a_root_names_paths_as_seen_from_there(
    root: Path, venv: Path, tools: Tools, capsys: pytest.CaptureFixture[str]
) -> None:
    """An image boots with them; the running system is left alone."""
    assert run("install-units", "--root", str(root)) == 0
    text = (root / UNIT).read_text()
    assert "ExecStart=/opt/onebitd/bin/onebitd --instance %i\n" in text
    assert "/usr/bin/onebit" not in text
    assert "/usr/local/share/onebitd/drop-ins" in text
    assert os.readlink(root / "usr/local/bin/onebitctl") == "/opt/onebitd/bin/onebitctl"
    assert not [call for call in tools.calls() if f"--root={root}" not in call]
    out, err = capsys.readouterr()
    assert "onebitd 0.1.0: files below /usr/local: 9 written\n" in out
    assert err == ""
    assert venv.is_dir()


@needs_root
def test_install_units_feeds_systemd_exactly_our_files(
    root: Path, venv: Path, tools: Tools
) -> None:
    """Nobody else's sysusers.d and tmpfiles.d are carried out along with them."""
    assert run("install-units", "--root", str(root)) == 0
    assert tools.calls() == [
        f"systemd-sysusers --root={root} -",
        f"systemd-tmpfiles --root={root} --create -",
    ]
    for name in ("sysusers", "tmpfiles"):
        fed = tools.log.with_name(f"log.systemd-{name}").read_text()
        assert fed == (venv / f"lib/{name}.d/onebitd.conf").read_text()


@needs_root
@pytest.mark.usefixtures("venv")
def test_install_units_failing_tool_is_status_1_with_its_words(
    root: Path, tools: Tools, capsys: pytest.CaptureFixture[str]
) -> None:
    """A lock file that somebody has planted, for example; the files are in place all the same."""
    tools.answer('case $0 in *tmpfiles) echo "lock is not a regular file" >&2; exit 73;; esac')
    assert run("install-units", "--root", str(root)) == 1
    assert "lock is not a regular file" in capsys.readouterr().err
    assert (root / UNIT).exists()


@pytest.mark.usefixtures("venv", "tools")
def test_install_units_conflict_is_one_line_each_and_status_1(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line can be read, and nothing was called."""
    for name in ("onebitd", "onebitctl"):
        (root / "usr/local/bin").mkdir(parents=True, exist_ok=True)
        (root / "usr/local/bin" / name).write_text("mine")
    assert run("install-units", "--root", str(root)) == 1
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert [line.split()[1] for line in lines[:2]] == [
        "/usr/local/bin/onebitctl",
        "/usr/local/bin/onebitd",
    ]
    assert "nothing was changed" in lines[2]
    assert not (root / UNIT).exists()


def unfit(**changes: object) -> Callable[[Installation], Installation]:
    """Return what makes an installation one that cannot work."""

    def change(before: Installation) -> Installation:
        values = {name: getattr(before, name) for name in Installation.__dataclass_fields__}
        return Installation(**{**values, **changes})

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (unfit(is_environment=False), "not run from a virtual environment"),
        (unfit(parts=(PurePosixPath("/root"),)), "/root is out of the service's sight"),
        (unfit(parts=(PurePosixPath("/opt/v"), PurePosixPath("/home"))), "/usr/bin/python3 -m"),
        (unfit(programs=PurePosixPath("/opt/my venv/bin")), "cannot hold"),
    ],
)
@pytest.mark.usefixtures("venv", "tools")
def test_install_units_of_an_unfit_environment_is_refused(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Installation], Installation],
    words: str,
) -> None:
    """A service that could not start is not installed; the message says how to do it."""
    running = change(Installation.running())
    monkeypatch.setattr(Installation, "running", classmethod(lambda _cls: running))
    assert run("install-units", "--root", str(root)) == 2
    assert words in capsys.readouterr().err
    assert not (root / "usr").exists()


@pytest.mark.usefixtures("venv", "tools")
def test_install_units_beside_a_package_is_refused(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two sets of units of the same names: the second would hide the first."""
    (root / "usr/lib/systemd/system").mkdir(parents=True)
    (root / "usr/lib/systemd/system/onebitd@.service").write_text("of the package")
    assert run("install-units", "--root", str(root)) == 2
    assert "a package has installed onebitd" in capsys.readouterr().err
    assert not (root / "usr/local").exists()


@pytest.mark.usefixtures("venv", "tools")
def test_install_units_names_an_administrators_unit_that_comes_first(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the new unit seems to have no effect."""
    (root / "etc/systemd/system").mkdir(parents=True)
    (root / "etc/systemd/system/onebitd@.service").write_text("an older one")
    assert run("install-units", "--root", str(root)) == 0
    assert "/etc/systemd/system/onebitd@.service comes before /usr/" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prefix", "relative"], "--prefix"),
        (["--prefix", "/"], "--prefix"),
        (["--root", "/does/not/exist"], "--root"),
        (["--enable", "../etc"], "cannot be an instance"),
        (["--prefix", "/opt/units", "--enable", "qwen"], "systemd does not look"),
    ],
)
@pytest.mark.usefixtures("venv", "tools")
def test_install_units_bad_option_is_status_2(
    root: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    """Before anything is changed."""
    assert run("install-units", "--root", str(root), *arguments) == 2
    assert words in capsys.readouterr().err
    assert not (root / "usr").exists()


@pytest.mark.parametrize("command", ["install-units", "uninstall-units"])
def test_units_on_this_machine_without_root_is_status_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """The message says what to type."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert run(command) == 4
    assert "sudo /" in capsys.readouterr().err


# --- enable -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("venv")
def test_install_units_enable_writes_the_example_for_the_group_alone(
    root: Path, tools: Tools, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may hold a provider's secrets; the instance is enabled and not started."""
    (root / "etc/onebitd").mkdir()
    assert run("install-units", "--root", str(root), "--enable", "qwen") == 0
    config = root / "etc/onebitd/qwen.toml"
    assert config.read_text() == (ROOT / "etc/onebitd.toml").read_text()
    assert config.stat().st_mode & 0o777 == 0o640
    assert config.stat().st_gid == os.getegid()
    calls = [call for call in tools.calls() if call.startswith("systemctl")]
    assert calls == [f"systemctl --root={root} --quiet enable onebitd@qwen.service"]
    said = capsys.readouterr().out
    keys = "model.path, backend.llama_server and, for handoffs, provider.program"
    assert f"set at least {keys} in it" in said


@pytest.mark.usefixtures("venv", "tools")
def test_install_units_enable_keeps_a_configuration(root: Path) -> None:
    """It is an administrator's."""
    (root / "etc/onebitd").mkdir()
    (root / "etc/onebitd/qwen.toml").write_text("mine")
    assert run("install-units", "--root", str(root), "--enable", "qwen") == 0
    assert (root / "etc/onebitd/qwen.toml").read_text() == "mine"


def live_site(root: Path) -> Site:
    """Return what a running machine would be, with the files of a test."""
    (root / "etc/onebitd").mkdir()
    (root / "etc/onebitd/qwen.toml").write_text("mine")
    return Site(root, PurePosixPath("/usr/local"), Tree(root), booted=True)


SHOWN = (
    "case $* in cat*) printf '[Service]\\nUser=onebitd\\nEnvironmentFile=-/e/%%i.env\\n';; esac;"
)


def test_enable_checks_as_the_service_does_before_it_starts(root: Path, tools: Tools) -> None:
    """The user, the files and the settings of the unit and its drop-ins."""
    tools.answer(SHOWN)
    site = live_site(root)
    cli_units._enable(site, "qwen", Item(b""))
    assert tools.calls() == [
        "systemctl cat onebitd@qwen.service",
        "systemd-run --quiet --pipe --wait --collect --property=User=onebitd"
        " --property=EnvironmentFile=-/e/qwen.env --"
        " /usr/local/bin/onebitd --instance qwen --check-config",
        f"systemctl --root={root} --quiet enable onebitd@qwen.service",
        "systemctl start onebitd@qwen.service",
    ]
    assert site.problems == 0


def test_enable_of_a_bad_configuration_starts_nothing(
    root: Path, tools: Tools, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each problem is a line of the message."""
    tools.answer('case $0 in *run) printf "onebitd: one\\nonebitd: two\\n" >&2; exit 2;; esac')
    site = live_site(root)
    cli_units._enable(site, "qwen", Item(b""))
    assert [call.split()[0] for call in tools.calls()] == ["systemctl", "systemd-run"]
    err = capsys.readouterr().err
    assert "onebitctl: onebitd: one\nonebitctl: onebitd: two\n" in err
    assert site.problems == 1


def test_enable_of_a_service_that_fails_tells_what_it_said(
    root: Path, tools: Tools, capsys: pytest.CaptureFixture[str]
) -> None:
    """systemctl only says where to look, and while a restart is due `systemctl status` has none."""
    tools.answer(
        SHOWN + "case $* in *InvocationID*) echo 123abc;; *_INVOCATION_ID=123abc)"
        ' echo "port 8000 is taken";; start*) echo "Job failed." >&2; exit 1;; esac'
    )
    site = live_site(root)
    cli_units._enable(site, "qwen", Item(b""))
    err = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("onebitctl: ") for line in err] == [
        "systemctl start onebitd@qwen.service: Job failed.",
        "it said:",
        "port 8000 is taken",
    ]
    assert site.problems == 1


def test_enable_of_a_unit_that_systemd_does_not_find_runs_nothing_as_root(
    root: Path, tools: Tools
) -> None:
    """Without its lines the check would see what the service does not."""
    tools.answer("case $* in cat*) exit 1;; esac")
    site = live_site(root)
    cli_units._enable(site, "qwen", Item(b""))
    assert tools.calls() == ["systemctl cat onebitd@qwen.service"]
    assert site.problems == 1


def test_enable_where_a_drop_in_cannot_be_followed_says_so(
    root: Path, tools: Tools, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory of models that does not exist is no fault of the configuration."""
    tools.answer("case $0 in *run) exit 226;; esac")
    cli_units._enable(live_site(root), "qwen", Item(b""))
    assert "the unit and its drop-ins say: status 226 (systemd.exec(5)" in capsys.readouterr().err


# --- uninstall ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("venv", "tools")
def test_uninstall_units_takes_away_what_was_brought(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Links that enable an instance go too; configurations and drop-ins stay."""
    before = {path for path in root.rglob("*") if "opt" not in path.parts}
    run("install-units", "--root", str(root))
    wants = root / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir(parents=True)
    (wants / "onebitd@qwen.service").symlink_to(f"/{UNIT}")
    (wants / "other@qwen.service").symlink_to("/usr/lib/systemd/system/other@.service")
    drop_in = root / "etc/systemd/system/onebitd@qwen.service.d"
    drop_in.mkdir()
    (root / "etc/onebitd").mkdir()
    capsys.readouterr()
    assert run("uninstall-units", "--root", str(root)) == 0
    assert [path.name for path in wants.iterdir()] == ["other@qwen.service"]
    out = capsys.readouterr().out
    assert "disabled onebitd@qwen.service\n" in out
    assert f"kept: /etc/onebitd, /{drop_in.relative_to(root)}, the user onebitd\n" in out
    shutil.rmtree(root / "etc/systemd")
    (root / "etc/onebitd").rmdir()
    assert {path for path in root.rglob("*") if "opt" not in path.parts} == before


@pytest.mark.usefixtures("tools")
def test_uninstall_units_of_nothing_is_status_0(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was asked for is so."""
    assert run("uninstall-units", "--root", str(root)) == 0
    assert "has installed nothing below /usr/local" in capsys.readouterr().out


@pytest.mark.usefixtures("venv")
@pytest.mark.parametrize("command", ["install-units", "uninstall-units"])
def test_units_command_while_another_is_at_work_is_refused(
    root: Path, tools: Tools, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Neither files nor services are touched by two at once."""
    run("install-units", "--root", str(root))
    tools.calls()
    with unit_files.locked(Tree(root), PurePosixPath("/usr/local")):
        assert run(command, "--root", str(root)) == 1
    assert "another install-units or uninstall-units is at work" in capsys.readouterr().err
    assert tools.calls() == []
    assert (root / UNIT).exists()


@pytest.mark.usefixtures("venv", "tools")
def test_uninstall_units_of_a_first_install_that_was_killed_leaves_nothing(root: Path) -> None:
    """Before its manifest had a name it left a temporary file."""
    before = {path for path in root.rglob("*") if "opt" not in path.parts}
    left = root / "usr/local/share/onebitd/.manifest.json.onebitctl"
    left.parent.mkdir(parents=True)
    left.write_text("{")
    assert run("uninstall-units", "--root", str(root)) == 0
    after = {path for path in root.rglob("*") if "opt" not in path.parts}
    assert {path.relative_to(root) for path in after - before} == {
        Path("usr"),
        Path("usr/local"),
        Path("usr/local/share"),
    }


@pytest.mark.usefixtures("venv", "tools")
def test_uninstall_units_of_a_damaged_manifest_removes_nothing(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root would remove whatever stands in it."""
    run("install-units", "--root", str(root))
    manifest = root / "usr/local/share/onebitd/manifest.json"
    document = json.loads(manifest.read_text())
    document["entries"]["/etc/group"] = document["entries"][f"/{UNIT}"]
    manifest.write_text(json.dumps(document))
    assert run("uninstall-units", "--root", str(root)) == 1
    assert "manifest.json: it is damaged" in capsys.readouterr().err
    assert (root / UNIT).exists()
    assert (root / "etc/group").exists()


def test_stop_all_that_fails_removes_nothing(root: Path, tools: Tools) -> None:
    """No unit is taken away under a service that still runs."""
    tools.answer(
        'case $* in list-units*) echo "onebitd@q.service loaded active running x";'
        " echo onebitd@other.timer;; stop*) echo refused >&2; exit 1;; esac"
    )
    with pytest.raises(OnebitError, match=r"nothing was removed.*refused"):
        cli_units._stop_all(live_site(root))
    assert tools.calls()[-1] == "systemctl stop onebitd@q.service"


# --- stop and disable ---------------------------------------------------------------------------

ACTIVE = 'case $* in *show*) echo "ActiveState=active"; echo "UnitFileState=disabled";; esac;'
THREE = "onebitd@q.service onebitd@q.socket onebitd-http@q.socket"


@pytest.fixture
def booted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is run by systemd."""
    monkeypatch.setattr(systemd_tools, "BOOTED", str(tmp_path))


@pytest.mark.usefixtures("booted")
@pytest.mark.parametrize(
    ("command", "call"), [("stop", f"stop {THREE}"), ("disable", f"disable --now {THREE}")]
)
def test_stop_and_disable_mean_the_sockets_too(
    tools: Tools,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    call: str,
) -> None:
    """In one transaction: a socket that is left would start the service again."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    tools.answer(ACTIVE)
    assert run("-i", "q", command) == 0
    assert tools.calls()[-1] == f"systemctl --quiet {call}"
    assert capsys.readouterr().out.startswith(f"stopped {THREE}")


@pytest.mark.usefixtures("booted")
@pytest.mark.parametrize("state", ["inactive", "failed"])
def test_stop_of_what_does_not_run_says_so(
    tools: Tools, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    """A typing error in the name is noticed."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    tools.answer(f"case $* in *show*) echo ActiveState={state};; esac")
    assert run("-i", "q", "stop") == 0
    assert capsys.readouterr().out == "onebitd@q.service did not run\n"


@pytest.mark.usefixtures("booted")
@pytest.mark.parametrize(("theirs", "ours"), [(4, 4), (1, 1), (5, 1)])
def test_stop_refused_by_systemd_passes_its_words_on(
    tools: Tools, capsys: pytest.CaptureFixture[str], theirs: int, ours: int
) -> None:
    """4 is permission denied, for systemctl as for onebitctl."""
    tools.answer(f'case $* in *stop*) echo "Access denied" >&2; exit {theirs};; esac')
    assert run("-i", "q", "stop") == ours
    assert capsys.readouterr() == ("", "onebitctl: Access denied\n")


@pytest.mark.usefixtures("booted")
@pytest.mark.parametrize("shown", ["ActiveState=active", "UnitFileState=enabled"])
def test_stop_of_a_users_own_service_asks_the_users_manager(
    tools: Tools, monkeypatch: pytest.MonkeyPatch, shown: str
) -> None:
    """It has no sockets; another user's instance of the same name is not meant."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    tools.answer(f"case $* in *--user*show*) echo {shown};; esac")
    assert run("-i", "q", "stop") == 0
    assert tools.calls()[-1] == "systemctl --user --quiet stop onebitd@q.service"


@pytest.mark.usefixtures("booted")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["stop", "-i", "../q"], "cannot be an instance"),
        (["--socket", "/run/x", "stop"], "use -i"),
    ],
)
def test_stop_of_no_instance_is_status_2(
    tools: Tools, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    """systemctl is not asked."""
    assert run(*arguments) == 2
    assert words in capsys.readouterr().err
    assert tools.calls() == []


def test_stop_without_systemd_says_how_else(
    tools: Tools, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a container there is no service."""
    monkeypatch.setattr(systemd_tools, "BOOTED", "/does/not/exist")
    assert run("-i", "q", "stop") == cli_service.EXIT_FAILED
    assert "Ctrl-C" in capsys.readouterr().err
    assert tools.calls() == []
