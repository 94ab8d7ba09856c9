"""`onebitctl install-units` and `uninstall-units` in a booted Debian: from nothing to nothing."""

from __future__ import annotations

import base64
import contextlib
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import onebitd
from tests.llama_builds import BUILDS, CPU_ONLY, MODELS
from tests.systemd.box import Box
from tests.systemd.conftest import INSTALL_UNITS, install, install_by_commands
from tests.systemd.instances import (
    BIN,
    REAL_DECODER,
    REAL_MODEL,
    Instance,
    configuration,
    instance_in,
    toml,
    write_instance,
)

NEWER = f"{onebitd.__version__}+next"
NEW_LINE = "# A line of the next version.\n"
UNITS = "/usr/local/lib/systemd/system"
UNIT = f"{UNITS}/onebitd@.service"
USER_UNIT = "/usr/local/lib/systemd/user/onebitd@.service"
SHARE = "/usr/local/share/onebitd"
MANIFEST = f"{SHARE}/manifest.json"
PROGRAMS = ("onebitd", "onebitctl", "onebit-prefill-llama", "onebit-prefill-numpy")
PAGES = ("onebitd.8", "onebitctl.1", "onebitd.toml.5", "onebit-provider.7")
LOCK = "/tmp/1bit-npu-device.lock"
CONFIG = "/etc/onebitd/{}.toml"
# What the machine itself writes, and where this harness and the environment are.
NOT_LOOKED_AT = (
    *("/dev", "/opt", "/proc", "/run", "/srv", "/sys", "/tmp", "/root", "/var/cache/man"),
    *("/var/lib/systemd", "/var/log", "/var/tmp"),
)
ACCOUNT_FILES = {
    "/etc/.pwd.lock",
    *(f"/etc/{name}-" for name in ("passwd", "group", "shadow", "gshadow", "subuid", "subgid")),
}
COMPLETE = """
. /usr/share/bash-completion/bash_completion
COMP_WORDS=(onebitctl inst) COMP_CWORD=1 COMP_LINE='onebitctl inst' COMP_POINT=14
if type _comp_load >/dev/null 2>&1; then _comp_load onebitctl; else _completion_loader onebitctl; fi
complete -p onebitctl && _onebitctl onebitctl inst onebitctl && printf '%s\\n' "${COMPREPLY[@]}"
"""
# Ends install-units by SIGKILL instead of its Nth rename, or of its Nth call of a program.
KILLED = """
import os, signal, subprocess
from onebitd.adapters import systemd_tools
from onebitd.surfaces import cli
def kill_at(module, name, nth):
    real, calls = getattr(module, name), iter(range(1, 1000))
    def wrapped(*args, **named):
        if next(calls) == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **named)
    setattr(module, name, wrapped)
kill_at({0}, {1!r}, {2})
cli.main(["install-units"])
"""


def files(box: Box) -> set[str]:
    """Return all names in the box that an installation could have to do with."""
    skipped = " -o ".join(f"-path {path}" for path in NOT_LOOKED_AT)
    found = box.run("sh", "-c", rf"find / \( {skipped} \) -prune -o -print").stdout
    return set(found.split("\n")) - ACCOUNT_FILES


def contents(box: Box, *folders: str) -> str:
    """Return what is in these folders: links with their targets, files with a sum of them."""
    script = (
        'find "$@" \\( -type l -printf "%p -> %l\\n" \\) -o \\( -type f -exec sha256sum {} + \\)'
        " -o -print | sort"
    )
    return box.run("sh", "-c", script, "-", *folders, check=False).stdout


def edit(box: Box, name: str, values: Mapping[str, object]) -> None:
    """Give keys of a configuration a value, in the first line that has or suggests them."""
    text = box.read(CONFIG.format(name))
    for key, line in zip(values, toml({"": values}).splitlines()[1:], strict=True):
        before, suggestion, after = re.split(rf"(?m)^(#?{key} = .*)$", text, maxsplit=1)
        text = before + line + after
        assert suggestion
    box.run("tee", CONFIG.format(name), input=text)  # owner and mode stay


def real_settings(port: int) -> dict[str, object]:
    """Return what has to be set in the sample for the real decoder, small and slow enough."""
    return {
        "path": REAL_MODEL,
        "ctx_size": 512,
        "port": port,
        "llama_server": REAL_DECODER,
        "args": [*CPU_ONLY, "-t", "1"],
        "program": f"{BIN}/onebit-prefill-llama",
        "env": {"ONEBIT_PREFILL_LLAMA_ARGS": " ".join((*CPU_ONLY, "-t", "1"))},
    }


@pytest.fixture
def prepared(fresh_box: Box) -> Box:
    """A box of this test alone that has the environment in /opt, and no units yet."""
    install(fresh_box)
    return fresh_box


@pytest.fixture(scope="session")
def newer_wheel(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a next version: another text in the unit, one drop-in of another name."""
    before, stem = onebitd.__version__, f"onebitd-{NEWER}"
    path = tmp_path_factory.mktemp("newer") / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(path, "w") as new:
        records = []
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("/RECORD"):
                continue
            if name.endswith(("/METADATA", "onebitd/__init__.py")):
                data = data.replace(before.encode(), NEWER.encode(), 1)
            elif name.endswith("/lib/systemd/system/onebitd@.service"):
                data += NEW_LINE.encode()
            name = name.replace(f"onebitd-{before}", stem).replace("/lan.conf", "/network.conf")
            new.writestr(name, data)
            records.append(f"{name},,\n")
        record = f"{stem}.dist-info/RECORD"
        new.writestr(record, "".join([*records, f"{record},,\n"]))
    return path


def upgrade_environment(box: Box, wheel: Path) -> None:
    """Put the package of a wheel in the place of the one in /opt/onebitd."""
    there = f"/srv/{wheel.name}"
    encoded = base64.b64encode(wheel.read_bytes()).decode()
    box.run("sh", "-c", 'base64 -d >"$1"', "-", there, input=encoded)
    box.run(f"{BIN}/pip", "install", "--no-index", "--no-deps", there, timeout_s=120)


# --- the two commands ---------------------------------------------------------------------------


def test_install_by_two_commands_serves_and_uninstall_leaves_nothing(fresh_box: Box) -> None:
    """On a fresh Debian: two instances of the real decoder, handoffs, a power cycle, and back."""
    BUILDS[0].require()
    MODELS[0].require()
    box = fresh_box
    at_first = files(box)

    install_by_commands(box)
    done = box.run(*INSTALL_UNITS, "--enable", "qwen", "--enable", "swift")

    assert done.stderr == ""
    assert "wrote /etc/onebitd/qwen.toml: set at least model.path" in done.stdout
    qwen, swift = Instance(box, "qwen", 8000), Instance(box, "swift", 8001)
    sample = box.read(f"{SHARE}/onebitd.toml")
    for instance in (qwen, swift):
        config = CONFIG.format(instance.name)
        assert box.read(config) == sample
        assert box.run("stat", "-c", "%U:%G %a", config).stdout == "root:onebitd 640\n"
        edit(box, instance.name, real_settings(instance.port))
        instance.systemctl("start")
    assert_is_found_by_all(box)
    for instance in (qwen, swift):
        assert_hands_off(instance)
    assert_only_root_and_the_group_are_told(box, qwen)

    box.reboot()
    for instance in (qwen, swift):
        instance.wait_state("active")
        assert instance.chat("Hello", headers=("X-Onebit-Handoff: never",))
        assert instance.handoffs()[-1]["outcome"] == "skipped"

    said = box.run("onebitctl", "uninstall-units").stdout
    assert_nothing_is_left(box, at_first, said)
    assert box.run("pgrep", "-u", "onebitd", check=False).stdout == ""
    assert (
        f"installed nothing below {'/usr/local'}"
        in box.run(f"{BIN}/onebitctl", "uninstall-units").stdout
    )


def assert_is_found_by_all(box: Box) -> None:
    """Programs, pages and completions are where the system looks, the units say nothing odd."""
    for program in PROGRAMS:
        assert box.run("readlink", f"/usr/local/bin/{program}").stdout == f"{BIN}/{program}\n"
    for page in PAGES:
        name, _, section = page.rpartition(".")
        assert box.run("man", "-w", section, name).stdout.endswith(f"/man{section}/{page}\n")
    assert "ONEBITD(8)" in box.run("man", "onebitd", env={"MANPAGER": "cat"}).stdout
    bash = box.run("bash", "--norc", "-i", "-c", COMPLETE)
    assert bash.stdout == "complete -F _onebitctl onebitctl\ninstall-units\n", bash.stderr
    done = box.run("systemd-analyze", "verify", *Instance(box, "qwen", 0).units)
    assert done.stdout + done.stderr == ""


def assert_hands_off(instance: Instance) -> None:
    """A chat is answered, and the decoder had one token to evaluate."""
    question = "What is the capital of France? Answer in one short sentence."
    assert "Paris" in instance.chat(question)
    (record,) = instance.handoffs()
    assert (record["outcome"], record["evaluated_tokens"]) == ("used", 1), record
    assert record["instance"] == instance.name
    assert instance.status()["state"] == "ready"


def assert_only_root_and_the_group_are_told(box: Box, instance: Instance) -> None:
    """A member sees what root sees; anybody else is refused with the way in."""
    box.run("useradd", "--groups", "onebitd", "member")
    box.run("useradd", "stranger")
    for command in ("status", "handoffs"):
        ask = ("onebitctl", "-i", instance.name, command)
        assert box.run(*ask).stdout
        assert box.run_as("member", *ask).stdout
        done = box.run_as("stranger", *ask, check=False)
        assert (done.status, done.stdout) == (4, "")
        assert "is for the group onebitd: join it" in done.stderr
    box.run("userdel", "member")
    box.run("userdel", "stranger")


def assert_nothing_is_left(box: Box, at_first: set[str], said: str) -> None:
    """Of all that was there, only what uninstall-units itself says that it kept."""
    kept = ("/etc/onebitd", "/var/lib/onebitd", "/var/cache/onebitd")
    assert f"kept: {', '.join(kept)}, the user onebitd\n" in said
    left = files(box) - at_first
    assert {path for path in left if not path.startswith(kept)} == set()
    assert at_first - files(box) == set()
    assert CONFIG.format("qwen") in left
    assert not box.exists("/run/onebitd")
    assert box.run("systemctl", "list-units", "--all", "--no-legend", "onebitd*").stdout == ""
    known = box.run("systemctl", "list-unit-files", "--no-legend", "onebitd*", check=False)
    assert known.stdout == ""
    assert box.run("systemctl", "is-system-running").stdout == "running\n"


# --- an upgrade, and what an administrator did --------------------------------------------------


def test_install_units_of_a_newer_version_leaves_what_runs(
    prepared: Box, newer_wheel: Path
) -> None:
    """Files are replaced, removed and added; an instance is new only when it is restarted."""
    box = prepared
    box.run(*INSTALL_UNITS)
    with instance_in(box, "qwen", 8000) as qwen:
        pid = qwen.main_pid()
        upgrade_environment(box, newer_wheel)
        said = box.run("onebitctl", "install-units").stdout

        assert f"onebitd {NEWER} in the place of {onebitd.__version__}: files below /usr" in said
        assert "2 written, 28 unchanged, 1 removed\n" in said
        assert f"still on what they were started with: {qwen.service} " in said
        assert box.read(UNIT).endswith(NEW_LINE)
        drop_ins = box.run("ls", f"{SHARE}/drop-ins").stdout.split()
        assert "network.conf" in drop_ins
        assert "lan.conf" not in drop_ins
        assert qwen.main_pid() == pid
        assert qwen.status()["version"] == onebitd.__version__

        qwen.systemctl("restart")
        assert qwen.status()["version"] == NEWER
        assert box.run("onebitctl", "install-units").stdout.endswith("0 written, 30 unchanged\n")


def test_install_units_where_an_administrator_was_changes_nothing(prepared: Box) -> None:
    """Every file in the way is named; what was edited survives uninstall-units, and is named."""
    box = prepared
    at_first = files(box)
    box.run(*INSTALL_UNITS)
    box.run("sh", "-c", f"echo '# mine' >>{UNIT}; ln -sf /bin/true /usr/local/bin/onebitd")
    box.run("sh", "-c", f"echo '# new' >>/opt/onebitd/{Path(USER_UNIT).relative_to('/usr/local')}")
    before = contents(box, "/usr/local", "/etc/systemd")

    done = box.run("onebitctl", "install-units", "--enable", "qwen", check=False)

    assert (done.status, done.stdout) == (1, "")
    assert done.stderr.splitlines()[:2] == [
        "onebitctl: /usr/local/bin/onebitd is a symbolic link (to /bin/true) that install-units did"
        " not write",
        f"onebitctl: {UNIT} was changed since it was installed",
    ]
    assert "nothing was changed. Move these away" in done.stderr
    assert contents(box, "/usr/local", "/etc/systemd") == before
    assert not box.exists(CONFIG.format("qwen"))

    done = box.run("onebitctl", "uninstall-units")

    kept = ("/usr/local/bin/onebitd", UNIT)
    assert done.stderr.splitlines() == [
        f"onebitctl: {path} was changed since it was installed, and was kept" for path in kept
    ]
    assert box.read(UNIT).endswith("# mine\n")
    there = {str(path) for path in (*Path(UNIT).parents, Path(UNIT))} | set(kept)
    left = files(box) - at_first - there
    assert {path for path in left if not path.startswith("/etc/onebitd")} == set()


@pytest.mark.parametrize(
    ("function", "points"),
    [
        ("os.rename", {1: "removed", 2: "run again", 12: "removed", 23: "run again"}),
        ("systemd_tools.run", {2: "run again", 4: "removed"}),
    ],
)
def test_install_units_killed_can_be_run_again_or_removed(
    prepared: Box, function: str, points: Mapping[int, str]
) -> None:
    """Wherever SIGKILL meets it: before and after its manifest, and while it asks systemd."""
    box = prepared
    box.run(*INSTALL_UNITS)
    complete = contents(box, "/usr/local")
    box.run("onebitctl", "uninstall-units")
    at_first = files(box)
    for nth, then in points.items():
        script = KILLED.format(*function.split("."), nth)
        assert box.run(f"{BIN}/python", "-c", script, check=False).status in (-9, 137), nth
        if then == "run again":
            box.run(*INSTALL_UNITS)
            assert contents(box, "/usr/local") == complete, nth
        box.run(f"{BIN}/onebitctl", "uninstall-units")
        assert files(box) == at_first, nth


def test_install_units_twice_at_once_is_refused(prepared: Box) -> None:
    """Whoever comes second changes nothing and is told so."""
    box = prepared
    box.run(*INSTALL_UNITS)
    before = contents(box, "/usr/local")
    with box.spawn("flock", SHARE, "sh", "-c", "echo held; exec sleep 1000") as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        for command in ("install-units", "uninstall-units"):
            done = box.run("onebitctl", command, check=False)
            assert (done.status, done.stdout) == (1, "")
            assert "another install-units or uninstall-units is at work" in done.stderr
        first.kill()
    assert contents(box, "/usr/local") == before


# --- where it does not belong -------------------------------------------------------------------


def test_install_units_that_could_not_work_is_refused(prepared: Box) -> None:
    """Not root, out of the service's sight, no environment, beside a package: nothing happens."""
    box = prepared
    box.run("useradd", "alice")
    at_first = files(box)
    done = box.run_as("alice", *INSTALL_UNITS, check=False)
    assert done.status == 4
    assert "only root can do that here: run it with sudo and the path of the program" in done.stderr

    cli = ("onebitd.surfaces.cli", "install-units")
    script = 'mkdir "$0"; mount --bind /opt/onebitd "$0"; exec "$0"/bin/python -m "$@"'
    done = box.run("unshare", "--mount", "sh", "-c", script, "/home/USER", *cli, check=False)
    assert done.status == 2
    assert "/home/USER is out of the service's sight (ProtectHome=yes)" in done.stderr
    box.run("rmdir", "/home/USER")

    (packages,) = box.run("sh", "-c", "echo /opt/onebitd/lib/python3*/site-packages").stdout.split()
    systems = ("/usr/bin/python3", "-m", *cli)
    done = box.run(*systems, env={"PYTHONPATH": packages}, check=False)
    assert done.status == 2
    assert "does not run from a virtual environment" in done.stderr

    packaged = "/usr/lib/systemd/system/onebitd@.service"
    box.write(packaged, "[Service]\nExecStart=/bin/true\n")
    done = box.run(*INSTALL_UNITS, check=False)
    assert done.status == 2
    assert f"a package has installed onebitd ({packaged})" in done.stderr
    box.run("rm", packaged)
    assert files(box) == at_first


def test_install_units_without_systemd_is_ready_for_the_next_boot(prepared: Box) -> None:
    """In a container that is being made, for example: what cannot be done is said."""
    box = prepared
    script = f"mount -t tmpfs tmpfs /run && exec {' '.join(INSTALL_UNITS)} --enable qwen"
    done = box.run("unshare", "--mount", "sh", "-c", script)
    assert "no systemd runs this machine: systemctl daemon-reload was left out" in done.stdout
    assert done.stderr == ""
    box.write(CONFIG.format("qwen"), "")  # the sample's model is not there
    write_instance(box, "qwen", 8000)
    box.reboot()
    Instance(box, "qwen", 8000).wait_state("active")


def test_install_units_into_an_image_leaves_this_machine_alone(prepared: Box) -> None:
    """An image with the environment at the same place has everything, enablement too."""
    box = prepared
    box.run("mkdir", "-p", "/srv/img/etc")
    at_first = files(box)
    said = box.run(*INSTALL_UNITS, "--root", "/srv/img", "--enable", "qwen").stdout
    assert "wrote /etc/onebitd/qwen.toml: set at least" in said
    systemctl = ("systemctl", "--root=/srv/img")
    assert box.run(*systemctl, "is-enabled", "onebitd@qwen").stdout == "enabled\n"
    assert f"ExecStart={BIN}/onebitd --instance %i\n" in box.read(f"/srv/img{UNIT}")
    assert box.run("readlink", "/srv/img/usr/local/bin/onebitctl").stdout == f"{BIN}/onebitctl\n"
    (group,) = re.findall(r"(?m)^onebitd:.*?:(\d+):", box.read("/srv/img/etc/group"))
    stat = box.run("stat", "-c", "%u:%g %a", f"/srv/img{CONFIG.format('qwen')}").stdout
    assert stat == f"0:{group} 640\n"
    assert files(box) == at_first
    assert box.run("systemctl", "cat", "onebitd@qwen", check=False).status != 0

    box.run(*INSTALL_UNITS[:1], "uninstall-units", "--root", "/srv/img")
    assert not box.exists("/srv/img/usr")
    left = box.run("find", "/srv/img/etc/systemd", "-name", "onebit*").stdout
    assert left == ""


# --- what a newcomer meets ----------------------------------------------------------------------


@contextlib.contextmanager
def sample_instance(box: Box, name: str) -> Iterator[Instance]:
    """Yield an instance with the sample configuration, as install-units --enable leaves it."""
    with instance_in(box, name, 8000, start=False) as instance:
        box.run("rm", CONFIG.format(name))
        box.run(*INSTALL_UNITS, "--enable", name)
        yield instance


def test_service_whose_configuration_is_wrong_says_what_to_do(installed: Box) -> None:
    """`systemctl status` and install-units have a line for each fault; there is no restart."""
    box = installed
    box.run("install", "-D", "-m", "600", "/srv/checkout/README.md", "/srv/models/secret.gguf")
    with sample_instance(box, "fresh") as fresh:
        settings = configuration("fresh", 8000, real=False)
        decoder = settings["backend"]["llama_server"]
        missing = "model.path: /srv/models/model.gguf: no such file or directory; name a GGUF file"
        assert fresh.systemctl("start", check=False).status == 1
        assert fresh.show("ActiveState", "ExecMainStatus", "NRestarts") == {
            "ActiveState": "failed",
            "ExecMainStatus": "2",
            "NRestarts": "0",
        }
        assert missing in box.run("systemctl", "status", fresh.service, check=False).stdout
        # The control socket is open: who asks has it started once more, and hears why it ended.
        asked = fresh.ctl("status", check=False)
        assert (asked.status, missing in asked.stderr) == (1, True)
        fresh.wait_state("failed")
        starts = box.journal(
            "-u", fresh.service, "ONEBIT_INSTANCE=fresh", "SYSLOG_IDENTIFIER=onebitd"
        )
        assert len([record for record in starts if missing in record["MESSAGE"]]) == 2
        for values, line in (
            ({}, missing),
            ({"path": "/srv/models/secret.gguf"}, "secret.gguf: permission denied"),
            ({"path": settings["model"]["path"]}, "backend.llama_server: no program llama-server"),
        ):
            edit(box, "fresh", values)
            done = box.run("onebitctl", "install-units", "--enable", "fresh", check=False)
            assert done.status == 1
            assert line in done.stderr
        edit(box, "fresh", {"llama_server": decoder})
        said = box.run("onebitctl", "install-units", "--enable", "fresh").stdout
        assert f"{fresh.service} runs, and starts at boot\n" in said
    box.run("rm", "-r", "/srv/models")


def test_service_whose_port_is_taken_names_the_other_instance(installed: Box) -> None:
    """It stays so until somebody does something about it: there is no restart."""
    with (
        instance_in(installed, "first", 8000) as first,
        instance_in(installed, "second", 8000, start=False) as second,
    ):
        done = installed.run("onebitctl", "install-units", "--enable", "second", check=False)
        assert done.status == 1
        assert (
            f"onebitd: port 8000 on 127.0.0.1 is taken by pid {first.main_pid()} (" in done.stderr
        )
        assert "choose another port with --port or http.port" in done.stderr
        assert second.show("ExecMainStatus", "NRestarts", "ActiveState") == {
            "ExecMainStatus": "3",
            "NRestarts": "0",
            "ActiveState": "failed",
        }


def test_http_socket_takes_the_port_of_a_stopped_service(installed: Box) -> None:
    """The commands of onebitd(8) in their order; while the service runs, systemd refuses."""
    with instance_in(installed, "qwen", 8000) as qwen:
        http = qwen.units[2]
        assert installed.run("systemctl", "start", http, check=False).status == 1
        qwen.ctl("stop")
        installed.run("systemctl", "enable", "--now", http)
        qwen.systemctl("start")
        assert qwen.chat("Hello")
        assert qwen.ctl("stop").stdout == f"stopped {' '.join(qwen.units)}\n"
