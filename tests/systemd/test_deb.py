"""The Debian package in a booted Debian: install, upgrade, remove, purge."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import onebitd
from tests import readme
from tests.deb_build import built_deb, newer_deb
from tests.llama_builds import ROOT
from tests.standins import tiny_state
from tests.systemd.box import Box, Suite, booted

NEWER = f"{onebitd.__version__}+next"
PORTS = {"qwen": 8000, "swift": 8001}
CONFIG = """\
[model]
path = "/srv/deb/tiny.gguf"
[http]
port = {port}
[backend]
llama_server = "/srv/checkout/tests/standins/llama_server.py"
[provider]
program = "/srv/checkout/tests/standins/provider.py"
[handoff]
policy = "always"
"""
EDITOR = """\
#!/bin/sh
# What a reader writes; the file stays whose it is.
exec cat >"$1" /srv/qwen.toml
"""
LOCK = "/tmp/1bit-npu-device.lock"
# What Debian's own programs write when a package comes and goes.
NOT_OURS = (
    *("/dev", "/proc", "/run", "/srv", "/sys", "/tmp", "/var/cache/apt", "/var/cache/debconf"),
    *("/var/cache/ldconfig", "/var/cache/man", "/var/lib/apt", "/var/lib/dpkg", "/var/lib/systemd"),
    "/var/log",
)
ACCOUNT_FILES = {
    "/etc/.pwd.lock",
    *(f"/etc/{x}-" for x in ("passwd", "group", "shadow", "gshadow")),
}


@pytest.fixture(scope="module")
def debs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package in dist/, a newer one, and a model for the stand-in."""
    folder = tmp_path_factory.mktemp("debs")
    deb = built_deb()
    folder.chmod(0o755)  # the service reads the model
    (folder / "dist").mkdir()
    shutil.copy(deb, folder / "dist")
    newer = newer_deb(deb, NEWER, tmp_path_factory.mktemp("newer"))
    shutil.copy(newer, folder / "newer.deb")
    (folder / "tiny.gguf").write_bytes(tiny_state.gguf())
    return folder


@pytest.fixture
def bare(suite: Suite, debs: Path) -> Iterator[Box]:
    """A box without onebitd; the packages are in /srv/deb."""
    with booted(suite.rootfs, binds_ro={debs: "/srv/deb", ROOT: "/srv/checkout"}) as box:
        yield box


def apt(box: Box, *args: str) -> str:
    """Run apt-get and return what it said."""
    environment = {"DEBIAN_FRONTEND": "noninteractive"}
    done = box.run("apt-get", "--yes", "--quiet", *args, env=environment, timeout_s=120)
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def type_in(box: Box, *lines: str) -> None:
    """Type lines of README's block where dist/ is; each has to succeed."""
    for line in lines:
        environment = {"DEBIAN_FRONTEND": "noninteractive"}
        box.run("sh", "-c", f"cd /srv/deb; {line}", env=environment, timeout_s=120)


def start_instances(box: Box, *lines: str) -> None:
    """Have qwen by README's lines, and swift with its public port as a socket unit."""
    box.write("/srv/qwen.toml", CONFIG.format(port=PORTS["qwen"]))
    box.write("/usr/local/bin/editor", EDITOR, 0o755)
    type_in(box, *lines)
    made = box.run("stat", "-c", "%U:%G %a", "/etc/onebitd/qwen.toml").stdout
    assert made == "root:onebitd 640\n"
    box.write("/etc/onebitd/swift.toml", CONFIG.format(port=PORTS["swift"]))
    box.write(
        "/etc/systemd/system/onebitd-http@swift.socket.d/port.conf",
        f"[Socket]\nListenStream=\nListenStream=127.0.0.1:{PORTS['swift']}\n",
    )
    box.run("systemctl", "daemon-reload")
    box.run("systemctl", "enable", "--now", "onebitd-http@swift.socket")
    box.run("systemctl", "enable", "--now", "onebitd@swift")


def status(box: Box, name: str) -> dict[str, object]:
    """Return what `onebitctl status` says of an instance."""
    document = json.loads(box.run("onebitctl", "-i", name, "status", "--json").stdout)
    assert isinstance(document, dict)
    return document


def chat(box: Box, name: str) -> str:
    """Send a chat to an instance and return the headers and the reply."""
    body = json.dumps({"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 4})
    url = f"http://127.0.0.1:{PORTS[name]}/v1/chat/completions"
    headers = ("--header", "Content-Type: application/json")
    return box.run("curl", "-sSi", *headers, "--data", body, url).stdout


def paths(box: Box) -> set[str]:
    """Return all names in the box that onebitd's package could have to do with."""
    skipped = " -o ".join(f"-path {path}" for path in NOT_OURS)
    return set(box.run("sh", "-c", rf"find / \( {skipped} \) -prune -o -print").stdout.split("\n"))


def units(box: Box, which: str) -> str:
    """Return onebitd's units that systemd knows, one a line."""
    command = ("systemctl", "list-units", which, "--plain", "--no-legend", "onebitd*")
    return box.run(*command).stdout


def test_deb_installed_two_instances_serve_and_an_upgrade_restarts_them(bare: Box) -> None:
    """README's lines; handoffs with Debian's own numpy; a newer package's code runs at once."""
    _, install, *configure = readme.block("make deb").commands  # the first one: built_deb()
    type_in(bare, install)
    assert bare.run("stat", "-c", "%U:%G %a", "/etc/onebitd", LOCK).stdout.split("\n")[:2] == [
        "root:onebitd 750",
        "root:render 660",
    ]
    assert bare.run("id", "-Gn", "onebitd").stdout.split() == ["onebitd", "video", "render"]
    assert bare.run("sh", "-c", "ls /usr/lib/onebitd/onebitd/surfaces/__pycache__/cli.*.pyc").stdout
    start_instances(bare, *configure)
    assert bare.exists("/usr/bin/onebit-prefill-llama")
    for name in PORTS:
        assert "x-onebit-handoff: file" in chat(bare, name)
        assert status(bare, name)["version"] == onebitd.__version__
    checked = bare.run("onebitctl", "-i", "qwen", "doctor").stdout.splitlines()
    assert checked[0] == "qwen: checked inside onebitd@qwen.service, as the service sees it"
    sockets = ("onebitd@qwen.socket", "onebitd@swift.socket", "onebitd-http@swift.socket")
    properties = ("ActiveState", "ActiveEnterTimestampMonotonic")
    before = {name: bare.show(f"onebitd@{name}", "MainPID") for name in PORTS}
    opened = [bare.show(unit, *properties) for unit in sockets]

    apt(bare, "install", "/srv/deb/newer.deb")

    for name in PORTS:
        assert status(bare, name)["version"] == NEWER
        assert bare.show(f"onebitd@{name}", "MainPID") != before[name]
        assert "x-onebit-handoff: file" in chat(bare, name)
    assert [bare.show(unit, *properties) for unit in sockets] == opened
    assert {one["ActiveState"] for one in opened} == {"active"}


def test_deb_removed_stops_everything_and_purged_leaves_what_others_wrote(bare: Box) -> None:
    """remove keeps configuration and state; purge keeps the files that the package did not make."""
    at_first = paths(bare)
    _, install, *configure = readme.block("make deb").commands
    type_in(bare, install)
    start_instances(bare, *configure)
    bare.run("systemctl", "stop", "onebitd@qwen", "onebitd@qwen.socket")  # was there, runs no more
    assert bare.exists("/run/onebitd/swift/control.sock")
    assert bare.exists("/run/onebitd/qwen")

    with bare.spawn("flock", LOCK, "sh", "-c", "echo held; exec sleep 1000") as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        apt(bare, "remove", "onebitd")
        assert bare.exists(LOCK)
        holder.kill()

    assert bare.run("pgrep", "-u", "onebitd", check=False).stdout == ""
    assert units(bare, "--state=active,activating,deactivating,failed") == ""
    assert bare.run("ss", "-Hltn", "sport", "=", f":{PORTS['swift']}").stdout == ""
    assert not bare.exists("/run/onebitd")
    assert not bare.exists("/usr/lib/onebitd")
    kept = ["/etc/onebitd/qwen.toml", "/etc/onebitd/credentials", "/var/lib/onebitd/swift"]
    enabled = "/etc/systemd/system/multi-user.target.wants/onebitd@qwen.service"
    for path in (*kept, enabled):
        assert bare.exists(path), path

    apt(bare, "purge", "onebitd")

    assert paths(bare) - at_first - ACCOUNT_FILES == {
        "/etc/onebitd",
        "/etc/onebitd/qwen.toml",
        "/etc/onebitd/swift.toml",
        "/etc/systemd/system/onebitd-http@swift.socket.d",
        "/etc/systemd/system/onebitd-http@swift.socket.d/port.conf",
        "/usr/local/bin/editor",
    }
    assert units(bare, "--all") == ""
    assert not bare.exists(LOCK)
    assert bare.run("systemctl", "is-system-running").stdout == "running\n"
