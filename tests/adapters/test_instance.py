"""onebitd.adapters.instance on the real kernel: locks and directories."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from onebitd.adapters import instance
from onebitd.core.errors import ConfigError, InstanceTaken

HOLD_INSTANCE = """
import sys
from onebitd.adapters.instance import InstanceLock
lock = InstanceLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_instance_lock_second_daemon_is_told_the_first(tmp_path: Path) -> None:
    """A second onebitd of the instance gets InstanceTaken with pid and instance name."""
    path = tmp_path / "qwen" / "onebitd.lock"
    path.parent.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_INSTANCE, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            with pytest.raises(InstanceTaken) as caught:
                instance.InstanceLock(path).acquire()
        finally:
            process.kill()
    assert f"another onebitd (pid {process.pid}) serves instance qwen" in str(caught.value)
    lock = instance.InstanceLock(path)
    lock.acquire()
    assert path.read_text() == f"{os.getpid()}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    lock.release()
    lock.release()
    assert path.read_text() == ""
    assert not lock.held


def test_instance_lock_one_directory_for_two_names_tells_the_directory(tmp_path: Path) -> None:
    """RUNTIME_DIRECTORY puts both into one directory: the other need not be of this name."""
    path = tmp_path / "shared" / "onebitd.lock"
    path.parent.mkdir()
    first = instance.InstanceLock(path, "qwen")
    first.acquire()
    with pytest.raises(InstanceTaken) as caught:
        instance.InstanceLock(path, "llama").acquire()
    first.release()
    assert f"uses the runtime directory {path.parent}, which instance llama" in str(caught.value)
    assert "serves instance" not in str(caught.value)


def test_instance_lock_is_not_inherited(tmp_path: Path) -> None:
    """A child that outlives the daemon does not keep the instance."""
    path = tmp_path / "onebitd.lock"
    lock = instance.InstanceLock(path, "qwen")
    lock.acquire()
    with subprocess.Popen(["sleep", "60"], close_fds=False) as child:
        lock.release()
        again = instance.InstanceLock(path, "qwen")
        again.acquire()
        again.release()
        child.kill()


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory", "no directory"])
def test_instance_lock_odd_file_is_a_config_error(tmp_path: Path, kind: str) -> None:
    """What is no plain file is refused, not followed and not waited for."""
    path = tmp_path / "onebitd.lock"
    if kind == "symlink":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path = tmp_path / "none" / "onebitd.lock"
    lock = instance.InstanceLock(path)
    with pytest.raises(ConfigError, match="cannot use the lock file"):
        lock.acquire()
    assert not lock.held
    assert not (tmp_path / "elsewhere").exists()


def test_ensure_private_dir_makes_parents_and_exact_mode(tmp_path: Path) -> None:
    """A missing directory gets its mode whatever the umask, and its parents 0755."""
    path = tmp_path / "a" / "b" / "c"
    old = os.umask(0o027)
    try:
        instance.ensure_private_dir(path, 0o750)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o750
    instance.ensure_private_dir(path, 0o700)
    assert stat.S_IMODE(path.stat().st_mode) == 0o750


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("symlink", "is a symbolic link"),
        ("file", "is not a directory"),
        ("group-writable", "can be written by others (mode 0770)"),
        ("sticky", "can be written by others (mode 1777)"),
        ("foreign", "belongs to uid 65534"),
        ("under a file", "cannot make the directory"),
    ],
)
def test_ensure_private_dir_untrusted_is_a_config_error(
    tmp_path: Path, kind: str, words: str
) -> None:
    """What others could tamper with is refused with what is wrong."""
    path = tmp_path / "d"
    if kind == "symlink":
        (tmp_path / "real").mkdir()
        path.symlink_to(tmp_path / "real")
    elif kind == "file":
        path.touch()
    elif kind == "under a file":
        path.touch()
        path = path / "e"
    else:
        path.mkdir()
        path.chmod({"group-writable": 0o770, "sticky": 0o1777}.get(kind, 0o700))
        if kind == "foreign":
            if os.getuid() != 0:
                pytest.skip("needs root to give a directory away")
            os.chown(path, 65534, 65534)
    with pytest.raises(ConfigError) as caught:
        instance.ensure_private_dir(path, 0o700)
    assert words in str(caught.value)
