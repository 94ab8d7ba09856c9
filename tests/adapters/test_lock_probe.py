"""onebitd.adapters.lock_probe against real locks of real second processes."""

from __future__ import annotations

import ast
import fcntl
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from onebitd.adapters import lock_probe

HOLDER = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(fd, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def lock_path() -> Iterator[Path]:
    """Make a lock file in a directory that another user can enter; pytest's own are private."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o711)
        path = Path(name, "npu.lock")
        path.touch()
        yield path


@pytest.fixture
def foreign_holder(lock_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that is not onebitd and holds the flock, with nothing written."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(lock_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        yield process
        process.kill()


def test_probe_no_file_is_free(tmp_path: Path) -> None:
    """A lock file that does not exist is a free lock, not a problem."""
    status = lock_probe.probe(tmp_path / "none")
    assert (status.exists, status.held, status.holder, status.problem) == (False, False, None, None)
    assert status.usable


def test_probe_no_directory_is_unusable(tmp_path: Path) -> None:
    """A file that cannot be created is no free lock."""
    status = lock_probe.probe(tmp_path / "none" / "lock")
    assert (status.exists, status.usable) == (False, False)
    assert status.problem is not None
    assert f"{tmp_path}/none does not exist: create it" in status.problem


def test_probe_unlocked_file_is_free(lock_path: Path) -> None:
    """A file that nobody locks is a free lock."""
    status = lock_probe.probe(lock_path)
    assert (status.exists, status.held, status.holder, status.problem) == (True, False, None, None)


def test_probe_foreign_flock_names_the_process(
    lock_path: Path, foreign_holder: subprocess.Popen[bytes]
) -> None:
    """A holder that wrote nothing into the file is found by pid and command line."""
    status = lock_probe.probe(lock_path)
    assert status.held
    assert not status.declared_only
    assert status.holder is not None
    assert status.holder.pid == foreign_holder.pid
    assert "LOCK_EX" in status.holder.command
    assert status.holder.owner_line is None
    assert status.holder.describe().startswith(f"pid {foreign_holder.pid} (python")


def test_probe_flock_beside_stale_line_names_the_flock(
    lock_path: Path, foreign_holder: subprocess.Popen[bytes]
) -> None:
    """The flock decides who holds it, whatever an owner line of somebody else says."""
    lock_path.write_text(f"other pid={os.getpid()} start=2026-01-01T00:00:00Z\n")
    status = lock_probe.probe(lock_path)
    assert status.holder is not None
    assert status.holder.pid == foreign_holder.pid
    assert status.holder.owner_line == f"other pid={os.getpid()} start=2026-01-01T00:00:00Z"
    assert status.holder.describe().startswith(f"pid {foreign_holder.pid} (python")


def test_probe_waiter_is_not_the_holder(
    lock_path: Path, foreign_holder: subprocess.Popen[bytes]
) -> None:
    """A process that waits in flock is not taken for the one that has it."""
    with subprocess.Popen(["flock", str(lock_path), "true"]) as waiter:
        deadline = time.monotonic() + 20
        while f"FLOCK  ADVISORY  WRITE {waiter.pid} " not in Path("/proc/locks").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        status = lock_probe.probe(lock_path)
        waiter.kill()
    assert status.holder is not None
    assert status.holder.pid == foreign_holder.pid


def test_probe_fcntl_lock_is_not_a_flock(lock_path: Path) -> None:
    """A POSIX record lock does not keep flock out, so it holds nothing."""
    with lock_path.open("r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert not lock_probe.probe(lock_path).held


def test_probe_of_a_free_lock_does_not_take_it(lock_path: Path) -> None:
    """Probing leaves no lock and no descriptor behind."""
    before = os.listdir("/proc/self/fd")
    lock_probe.probe(lock_path)
    assert os.listdir("/proc/self/fd") == before
    assert subprocess.run(["flock", "-n", str(lock_path), "true"], check=False).returncode == 0


def test_probe_declared_living_owner_is_held(lock_path: Path) -> None:
    """A script's line without a flock counts while its process lives."""
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        lock_path.write_text(f"ppl-ids pid={sleeper.pid} start=12:00:00\n")
        status = lock_probe.probe(lock_path)
        sleeper.kill()
    assert status.held
    assert status.declared_only
    assert status.holder is not None
    assert status.holder.describe() == f"pid {sleeper.pid} (ppl-ids)"
    assert status.holder.command == "sleep 60"


def test_probe_declared_dead_owner_is_free(lock_path: Path) -> None:
    """A line that outlived its process holds nothing."""
    with subprocess.Popen(["true"]) as process:
        pass
    lock_path.write_text(f"ppl-ids pid={process.pid} start=12:00:00\n")
    assert not lock_probe.probe(lock_path).held


def test_probe_declared_reused_pid_is_free(lock_path: Path) -> None:
    """A process that started long after the line was written is not the one that wrote it."""
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        lock_path.write_text(f"ppl-ids pid={sleeper.pid} start=12:00:00\n")
        old = time.time() - 3600
        os.utime(lock_path, (old, old))
        status = lock_probe.probe(lock_path)
        sleeper.kill()
    assert not status.held


def test_probe_lock_inherited_by_a_child_names_the_child(lock_path: Path) -> None:
    """When the process that locked is gone, the child that still has the descriptor is named."""
    script = (
        "import fcntl, os, subprocess, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDONLY)\n"
        "fcntl.flock(fd, fcntl.LOCK_EX)\n"
        "child = subprocess.Popen(['sleep', '60'], pass_fds=[fd], stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(lock_path)], stdout=subprocess.PIPE, check=True
    )
    child = int(done.stdout)
    try:
        status = lock_probe.probe(lock_path)
    finally:
        os.kill(child, 9)
    assert status.holder is not None
    assert status.holder.pid == child


@pytest.mark.parametrize("kind", ["symlink", "dangling", "fifo", "directory", "hardlink"])
def test_probe_not_a_plain_file_says_what(tmp_path: Path, kind: str) -> None:
    """Anything but a regular file with one name is a problem with a word for it."""
    path = tmp_path / "lock"
    target = tmp_path / "target"
    if kind == "symlink":
        target.touch()
        path.symlink_to(target)
    elif kind == "dangling":
        path.symlink_to(target)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        target.touch()
        os.link(target, path)
    word = {"dangling": "symbolic link", "symlink": "symbolic link", "hardlink": "hard link"}
    status = lock_probe.probe(path)
    assert status.problem is not None
    assert word.get(kind, kind) in status.problem
    assert not status.held
    assert not status.usable


def test_probe_without_privilege_sees_a_foreign_holder(
    lock_path: Path, foreign_holder: subprocess.Popen[bytes]
) -> None:
    """A user who may not even read the file learns who holds it."""
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    lock_path.chmod(0o600)
    script = (
        "import os, sys\n"
        "from onebitd.adapters import lock_probe\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "status = lock_probe.probe(sys.argv[1])\n"
        "print(status.held, status.holder.pid, status.usable, status.problem)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(lock_path)], stdout=subprocess.PIPE, check=True
    )
    held, pid, usable, problem = done.stdout.decode().split(" ", 3)
    assert (held, int(pid), usable) == ("True", foreign_holder.pid, "False")
    assert "it may not be opened by the user nobody" in problem


@pytest.mark.parametrize(
    ("mode", "gid", "words"),
    [
        (0o640, 0, "it belongs to root:root with mode 0640; let root remove it"),
        (0o660, 0, "root:root with mode 0660; let root remove it"),
        (0o660, 54321, "root:54321 with mode 0660; join the group 54321"),
        (0o600, 54321, "root:54321 with mode 0600; let root remove it"),
    ],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other groups")
def test_probe_file_of_others_is_unusable_and_says_who_may(
    lock_path: Path, mode: int, gid: int, words: str
) -> None:
    """Not free: owner, group and mode are told, and a group only where joining it helps."""
    os.chown(lock_path, 0, gid)
    lock_path.chmod(mode)
    script = (
        "import os, sys\n"
        "from onebitd.adapters import lock_probe\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "status = lock_probe.probe(sys.argv[1])\n"
        "print(status.held, status.usable, status.problem)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(lock_path)], stdout=subprocess.PIPE, check=True
    )
    assert done.stdout.startswith(b"False False it may not be opened by the user nobody: ")
    assert words in done.stdout.decode()


def seen_by_nobody(path: Path) -> lock_probe.LockStatus:
    """Return what a user sees who owns nothing there."""
    script = (
        "import os, sys\n"
        "from onebitd.adapters import lock_probe\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "status = lock_probe.probe(sys.argv[1])\n"
        "print(repr((status.held, status.usable, status.problem)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, check=True
    )
    held, usable, problem = ast.literal_eval(done.stdout.decode())
    return lock_probe.LockStatus(str(path), True, held, None, problem, usable=usable)


@pytest.mark.parametrize(
    ("directory", "mode", "owner", "words"),
    [
        (0, 0o1777, 0, None),
        (0, 0o0755, 0, None),
        (0, 0o0755, 54321, None),
        (65534, 0o1777, 65534, None),
        (65534, 0o0700, 65534, None),
        (0, 0o1777, 54321, "make root its owner (tmpfiles.d)"),
        (54321, 0o1777, 0, "belongs to 54321, who can replace it, and then two would hold the"),
        (54321, 0o0755, 54321, "belongs to 54321, who can replace it, and then two would hold"),
        (0, 0o0777, 0, "lets everybody replace it, and then two would hold the lock: chmod +t"),
    ],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")
def test_probe_file_that_others_can_replace_is_a_problem_but_usable(
    directory: int, mode: int, owner: int, words: str | None
) -> None:
    """Root and the user itself may; anybody else who could make it two locks is named."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o711)
        place = Path(name) / "place"
        place.mkdir()
        path = place / "lock"
        path.touch()
        path.chmod(0o666)
        os.chown(path, owner, owner)
        os.chown(place, directory, directory)
        place.chmod(mode)
        status = seen_by_nobody(path)
    assert status.usable
    assert not status.held
    if words is None:
        assert status.problem is None
    else:
        assert status.problem is not None
        assert words in status.problem


def test_command_of_long_one_ends_with_an_ellipsis() -> None:
    """What was cut off shows: 200 characters in all, the last of them the sign."""
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()", "x" * 300], stdin=subprocess.PIPE
    ) as process:
        deadline = time.monotonic() + 20
        while "xxx" not in (command := lock_probe.command_of(process.pid)):
            assert time.monotonic() < deadline  # the child has not called exec yet
            time.sleep(0.01)
        process.kill()
    assert len(command) == 200
    assert command.endswith("xxx…")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ppl-ids pid=12 start=10:00:00\n", ("ppl-ids", 12)),
        ("ppl-ab pid=12\n", ("ppl-ab", 12)),
        ("two words pid=7 start=x", ("two words", 7)),
        ("onebitd pid=-1 start=x", None),
        ("onebitd pid=0 start=x", None),
        ("onebitd pid=12x", None),
        ("pid=12", None),
        ("", None),
        ("onebitd pid=99999999999999 start=x", None),
    ],
)
def test_parse_owner_line_table(text: str, expected: tuple[str, int] | None) -> None:
    """Only `NAME pid=N` with a possible pid is an owner line."""
    assert lock_probe.parse_owner_line(text) == expected


def test_probe_owner_line_with_control_characters_is_made_harmless(lock_path: Path) -> None:
    """What a stranger wrote into the file cannot drive the reader's terminal."""
    lock_path.write_bytes(b"\x1b[2Jevil pid=%d start=x\n" % os.getppid())
    with lock_path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        status = lock_probe.probe(lock_path)
    assert status.holder is not None
    assert status.holder.owner_line is not None
    assert "\x1b" not in status.holder.owner_line
