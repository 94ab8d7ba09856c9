"""The box itself: a real systemd, thrown away afterwards, whatever happens to the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.harness import wait_until
from tests.llama_builds import BUILDS, ROOT
from tests.systemd.box import Box, BoxFailed, CommandFailed, Suite, booted

BootBox = Callable[[], AbstractContextManager[Box]]
# A test process of its own: boots a box, says so, and waits to be killed.
HOLD_A_BOX = """
import sys
from pathlib import Path
from tests.systemd.box import booted
with booted(Path(sys.argv[1])) as box:
    client = box.spawn("sleep", sys.argv[2])
    print("booted", flush=True)
    sys.stdin.read()
"""


def processes_with(word: str) -> list[int]:
    """Return the processes of this machine that have `word` as an argument."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if word.encode() in arguments:
            found.append(int(folder.name))
    return found


def mounts() -> str:
    """Return the mounts that this process sees."""
    return Path("/proc/self/mountinfo").read_text()


def test_box_boots_the_systemd_of_its_suite(suite: Suite, box: Box) -> None:
    """Nothing failed during boot, and it is the version that the tests name."""
    assert box.run("systemctl", "is-system-running", "--wait").stdout == "running\n"
    assert box.run("systemctl", "--version").stdout.startswith(f"systemd {suite.systemd} ")
    version = box.run("python3", "--version").stdout
    assert version.startswith(f"Python {suite.python}.")


def test_box_unit_started_shows_and_writes_to_the_journal(box: Box) -> None:
    """A unit that was written is started; show() and journal() tell of it."""
    unit = "[Service]\nType=exec\nExecStart=sh -c 'echo \"a line\"; exec sleep 1000'\n"
    box.write("/run/systemd/system/probe.service", unit)
    box.run("systemctl", "daemon-reload")
    box.run("systemctl", "start", "probe")
    assert box.show("probe", "ActiveState", "Type") == {"ActiveState": "active", "Type": "exec"}
    (record,) = box.wait_until(lambda: box.journal("-u", "probe", "-t", "sh"), "the line")
    assert record["MESSAGE"] == "a line"
    assert record["_SYSTEMD_UNIT"] == "probe.service"
    box.run("systemctl", "stop", "probe")
    assert box.wait_until("! systemctl is-active probe", "stopped").stdout == "inactive\n"


def test_box_device_and_address_rules_are_enforced(box: Box) -> None:
    """The box may load the programs that DeviceAllow= and IPAddressDeny= are made of."""
    rules = ["DevicePolicy=strict", "DeviceAllow=/dev/full r", "IPAddressDeny=any"]
    service = ["systemd-run", "--wait", "--pipe", "--quiet", *(f"--property={x}" for x in rules)]
    assert box.run(*service, "head", "-c1", "/dev/full").stdout == "\0"
    assert "not permitted" in box.run(*service, "head", "-c1", "/dev/zero", check=False).stderr
    send = "import socket as s; s.socket(s.AF_INET, s.SOCK_DGRAM).sendto(b'', ('127.0.0.1', 9))"
    assert "PermissionError" in box.run(*service, "python3", "-c", send, check=False).stderr
    assert box.run("python3", "-c", send).status == 0


def test_box_run_tells_status_and_output(box: Box) -> None:
    """Standard streams, status and environment are the command's own."""
    done = box.run(
        "sh", "-c", "cat; echo $A-$HOME >&2; exit 3", input="in", check=False, env={"A": "b"}
    )
    assert (done.status, done.stdout, done.stderr) == (3, "in", "b-/root\n")
    assert box.run("no-such-program", check=False).status == 127


def test_box_run_that_fails_says_what_was_said(box: Box) -> None:
    """The failed command, its status and both outputs are in the error."""
    with pytest.raises(CommandFailed, match=r"(?s)echo why.*status 7.*why"):
        box.run("sh", "-c", "echo why >&2; exit 7")


def test_box_run_too_slow_is_killed(box: Box) -> None:
    """The error has what was said until then, and the command is gone in the box."""
    with pytest.raises(CommandFailed, match=r"(?s)did not end in 0.5 s.*begun"):
        box.run("sh", "-c", "echo begun; sleep 4711 & wait", timeout_s=0.5)
    box.wait_until("! pgrep -f 'sleep 471[1]'", "killed")


def test_box_run_as_has_uid_groups_and_home(box: Box) -> None:
    """A user's command is the user's, with groups that were added later."""
    box.run("useradd", "--create-home", "--groups", "video", "guest")
    whole = box.run_as("guest", "sh", "-c", "id -un; id -Gn; pwd; env").stdout
    assert whole.startswith("guest\nguest video\n")
    assert f"HOME={box.account('guest').home}\n" in whole
    box.run("userdel", "--remove", "guest")


def test_box_user_who_lingers_has_a_service_manager(box: Box) -> None:
    """`systemctl --user` works for a user without a session."""
    box.run("useradd", "--create-home", "bob")
    box.run("loginctl", "enable-linger", "bob")
    manager = f"user@{box.account('bob').uid}.service"
    box.wait_until(f"systemctl is-active {manager}", "the manager of bob")
    assert box.run_as("bob", "systemctl", "--user", "is-system-running").stdout == "running\n"
    box.run("loginctl", "disable-linger", "bob")
    box.wait_until(f"! systemctl is-active {manager}", "the manager of bob is gone")
    box.run("userdel", "--remove", "bob")


def test_box_files_written_are_read_back(box: Box) -> None:
    """Text and mode are as given, parents are made, and nothing reaches the root file system."""
    box.write("/srv/a/b", "t\u00e4xt\n", mode=0o640)
    assert box.read("/srv/a/b") == "t\u00e4xt\n"
    assert box.run("stat", "-c", "%a", "/srv/a/b").stdout == "640\n"
    assert box.exists("/srv/a/b")
    assert not box.exists("/srv/a/c")
    box.run("rm", "-r", "/srv/a")


def test_box_client_killed_takes_its_children_along(box: Box) -> None:
    """A background program reads and writes while the test goes on, and kill() ends all of it."""
    with box.spawn("sh", "-c", "read a; echo got $a; sleep 4712") as client:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write("x\n")
        client.stdin.flush()
        assert client.stdout.readline() == "got x\n"
        client.kill()
    box.wait_until("! pgrep -f 'sleep 471[2]'", "killed")


def test_box_binds_read_only_cannot_be_written(box: Box) -> None:
    """The checkout is there, and safe."""
    assert box.exists("/srv/checkout/pyproject.toml")
    assert "Read-only" in box.run("touch", "/srv/checkout/x", check=False).stderr


def test_box_runs_the_real_llama_server(box: Box) -> None:
    """The prebuilt build finds its libraries in the box."""
    BUILDS[0].require()
    assert "version" in box.run("/srv/llama/llama-server-b", "--version").stderr


def test_box_runs_the_stand_in_with_its_own_python(box: Box) -> None:
    """The stand-in needs nothing but the standard library."""
    stand_in = "/srv/checkout/tests/standins/llama_server.py"
    done = box.run("python3", stand_in, "--list-devices", env={"FAKE_LLAMA_DEVICES": "HRX0"})
    assert "HRX0" in done.stdout


def test_box_reboot_keeps_etc_and_loses_run(fresh_box: Box) -> None:
    """A power cycle: what was written stays, what ran does not, the journal has both boots."""
    fresh_box.write("/etc/kept", "kept")
    fresh_box.write("/run/lost", "lost")
    before = fresh_box.read("/proc/sys/kernel/random/boot_id"), fresh_box.journal("-n", "1", "-b")
    fresh_box.reboot()
    assert fresh_box.read("/etc/kept") == "kept"
    assert not fresh_box.exists("/run/lost")
    (last,) = before[1]
    assert last["__CURSOR"] in [record["__CURSOR"] for record in fresh_box.journal()]
    assert fresh_box.run("systemctl", "is-system-running", "--wait").stdout == "running\n"


def test_box_power_cut_keeps_what_was_written(fresh_box: Box) -> None:
    """Nothing is asked before the plug is pulled, and while it is off nothing can be run."""
    fresh_box.write("/etc/kept", "kept")
    fresh_box.power_cut()
    with pytest.raises(BoxFailed, match="off"):
        fresh_box.run("true")
    fresh_box.power_on()
    assert fresh_box.read("/etc/kept") == "kept"


def test_box_power_off_from_inside_is_noticed(fresh_box: Box) -> None:
    """An orderly end stops the units; the box can be switched on again."""
    unit = "[Service]\nType=exec\nExecStart=sleep 1000\nExecStop=touch /etc/stopped\n"
    fresh_box.write("/run/systemd/system/probe.service", unit)
    fresh_box.run("systemctl", "start", "probe")
    fresh_box.poweroff()
    fresh_box.power_on()
    assert fresh_box.exists("/etc/stopped")


def test_boxes_two_at_once_do_not_see_each_other(box: Box, fresh_box: Box) -> None:
    """Files, processes and loopback are each box's own."""
    box.write("/run/mine", "")
    assert not fresh_box.exists("/run/mine")
    with box.spawn("sleep", "4713") as client:
        box.wait_until("pgrep -f 'sleep 471[3]'", "started")
        assert fresh_box.run("pgrep", "-f", "sleep 471[3]", check=False).stdout == ""
        client.kill()
    box.run("rm", "/run/mine")


def test_box_that_cannot_boot_says_why(suite: Suite, tmp_path: Path) -> None:
    """A root file system without an init ends in an error with the console's words."""
    (tmp_path / "usr").mkdir()
    with pytest.raises(BoxFailed, match="systemd-nspawn ended with status"), booted(tmp_path):
        pass


def test_box_error_in_the_block_brings_the_journal(boot_box: BootBox) -> None:
    """Whoever reads the failure sees what the box said last."""

    def fail() -> None:
        with boot_box() as box:
            box.run("logger", "the last words")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        fail()
    assert "the last words" in caught.value.__notes__[0]


def test_box_ended_leaves_no_mount_and_no_process(boot_box: BootBox) -> None:
    """After the block the machine is as it was before."""
    before = mounts()
    with boot_box() as box:
        client = box.spawn("sleep", "4714.5")
        box.wait_until("pgrep -f 'sleep 4714[.]5'", "started")
        assert processes_with("4714.5")
    with client:
        assert client.wait(10) != 0
    assert processes_with("4714.5") == []
    assert mounts() == before


def test_box_of_a_killed_test_ends_with_it(suite: Suite) -> None:
    """SIGKILL asks nobody: its namespaces take every process along."""
    word = f"4715.{os.getpid()}"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_A_BOX, str(suite.rootfs), word],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"booted\n"
        wait_until(lambda: processes_with(word), "the client runs")
        tree = descendants(holder.pid)
        assert len(tree) > 5
        os.kill(holder.pid, signal.SIGKILL)
    wait_until(lambda: not [pid for pid in tree if Path(f"/proc/{pid}").exists()], "all are gone")


def descendants(pid: int) -> list[int]:
    """Return the processes below `pid`, children first."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    children = [int(word) for word in text.split()]
    return children + [below for child in children for below in descendants(child)]
