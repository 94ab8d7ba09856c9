"""Who may ask a service what: the commands that look, as root, as a member, as a stranger.

The sockets, files and credentials are a real service's.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.systemd.box import SUITES, Box, Done
from tests.systemd.instances import BIN, Instance, instance_in

pytestmark = pytest.mark.parametrize(
    "suite", SUITES[:1], indirect=True, ids=lambda suite: suite.name
)
"""Groups, modes and peer credentials are the kernel's: one release is enough."""
DENIED = (
    "onebitctl: permission denied: /run/onebitd/asked/control.sock is for the group onebitd:"
    " join it with `sudo usermod -aG onebitd $USER` and log in again, or use sudo"
)
OF_THE_DAEMON = {
    "requests": (0, "nothing is in flight\n"),
    "config": (0, "handoff.policy              file     always\n"),
    "advise": (1, "Too little is known yet to advise. Missing:\n"),
    "provider reset": (0, "nothing to clear\n"),
}
"""What the daemon answers; `status` and `handoffs` are asked in test_install.py."""


@pytest.fixture(scope="module")
def asked(installed: Box) -> Iterator[Instance]:
    """A service that has handed off once, and accounts of a member and a stranger."""
    box = installed
    box.run("useradd", "--create-home", "--groups", "onebitd", "member")
    box.run("useradd", "--create-home", "stranger")
    try:
        with instance_in(box, "asked", 8401) as instance:
            instance.chat("hello")
            yield instance
    finally:
        for name in ("member", "stranger"):
            box.run("userdel", "--remove", name)


def ask(instance: Instance, user: str, command: str) -> Done:
    """Run onebitctl as a user."""
    argv = (f"{BIN}/onebitctl", "-i", instance.name, *command.split())
    return instance.box.run_as(user, *argv, check=False)


def test_commands_of_a_member_are_answered_by_the_service(asked: Instance) -> None:
    """Each with its status; and the doctor, who is not the service, has the daemon's word."""
    for command, (status, words) in OF_THE_DAEMON.items():
        done = ask(asked, "member", command)
        assert (done.status, done.stderr) == (status, ""), (command, done)
        assert words in done.stdout, (command, done)
    done = ask(asked, "member", "doctor --quick")
    assert (done.status, done.stderr) == (0, ""), done
    said = " ".join(done.stdout.split())
    assert said.startswith("asked: checked here, as member, not as a service (only root may take")
    assert "ok /etc/onebitd/asked.toml is fine" in said
    assert f"daemon ok ready, pid {asked.main_pid()}, version " in said


def test_commands_of_a_stranger_are_denied_with_the_way_in(asked: Instance) -> None:
    """Exit status 4 and the group to join; nothing of configuration or daemon is told."""
    for command in OF_THE_DAEMON:
        done = ask(asked, "stranger", command)
        assert (done.status, done.stdout, done.stderr) == (4, "", f"{DENIED}\n"), command
    done = ask(asked, "stranger", "doctor --quick")
    assert (done.status, done.stderr) == (4, ""), done
    said = " ".join(done.stdout.split())
    assert said.startswith("asked: checked here, as stranger, not as a service (only root may take")
    assert "x /etc/onebitd/asked.toml: permission denied; " in said
    assert f"daemon - {DENIED.removeprefix('onebitctl: ')}" in said
    assert "tiny.gguf" not in said


def test_lock_of_a_member_and_a_stranger_names_the_group_of_the_devices(asked: Instance) -> None:
    """The file is for the group render; a stranger, whom no daemon tells its path, is told that."""
    for user, begins in (("member", ""), ("stranger", f"{DENIED}; this is the default lock")):
        done = ask(asked, user, "lock")
        assert (done.status, done.stdout) == (
            1,
            "/tmp/1bit-npu-device.lock: unusable\n"
            f"problem: it may not be opened by the user {user}: it belongs to root:render with mode"
            " 0660; join the group render\n",
        )
        assert done.stderr.startswith(begins)
        assert bool(done.stderr) is bool(begins)
    asked.box.run("usermod", "--append", "--groups", "render", "member")
    done = ask(asked, "member", "lock")
    assert (done.status, done.stdout) == (0, "/tmp/1bit-npu-device.lock: free\n")
