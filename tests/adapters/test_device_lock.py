"""onebitd.adapters.device_lock against real second processes."""

# ruff: noqa: ASYNC110, ASYNC220, ASYNC221, ASYNC240 - real processes and files, milliseconds each

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from onebitd.adapters import lock_probe
from onebitd.adapters.device_lock import DeviceLock
from onebitd.core.errors import HandoffError
from onebitd.core.handoff import Reason

ENGINE = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_CREAT | os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
fcntl.flock(fd, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""
"""Opens and locks as the engine does, and writes nothing."""


@pytest.fixture
def lock_path(tmp_path: Path) -> Path:
    return tmp_path / "npu.lock"


@pytest.fixture
def shared_dir() -> Iterator[Path]:
    """Make a directory that another user can enter; pytest's own ones are private."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o711)
        yield Path(name)


@pytest.fixture
def engine(lock_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(lock_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        yield process
        process.kill()


def outsider_gets_it(path: Path) -> bool:
    """Ask another process whether the lock can be had right now."""
    return subprocess.run(["flock", "-n", str(path), "true"], check=False).returncode == 0


def is_held(lock: DeviceLock) -> bool:
    """Read `held` out of the type checker's sight: it takes an attribute for a constant."""
    return lock.held


def open_fds() -> set[str]:
    """Return what this process's descriptors point to, by name."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return found


async def test_lock_held_keeps_flock_out_and_release_lets_it_in(lock_path: Path) -> None:
    """While it is held, flock(1) of another process fails; after release it succeeds."""
    lock = DeviceLock(lock_path)
    await lock.wait_acquired(0)
    assert is_held(lock)
    assert not outsider_gets_it(lock_path)
    lock.release()
    assert not is_held(lock)
    assert outsider_gets_it(lock_path)


async def test_lock_busy_with_an_engine_names_it(
    lock_path: Path, engine: subprocess.Popen[bytes]
) -> None:
    """When the time is up the error says LOCK_BUSY and which process has the device."""
    with pytest.raises(HandoffError) as caught:
        await DeviceLock(lock_path).wait_acquired(0.02)
    assert caught.value.reason is Reason.LOCK_BUSY
    assert f"held by pid {engine.pid} (python" in caught.value.detail
    assert "0.02 s" in caught.value.detail


async def test_lock_held_makes_an_engine_wait_until_release(lock_path: Path) -> None:
    """An engine that starts meanwhile waits in flock and gets it at release."""
    lock = DeviceLock(lock_path)
    await lock.wait_acquired(0)
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(lock_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        with trio.fail_after(20):
            while f"WRITE {process.pid} " not in Path("/proc/locks").read_text():
                await trio.sleep(0.01)
        holder = lock_probe.probe(lock_path).holder
        assert holder is not None
        assert holder.pid == os.getpid()
        lock.release()
        assert await trio.to_thread.run_sync(process.stdout.readline) == b"locked\n"
        process.kill()


async def test_lock_holder_killed_waiter_gets_it(
    lock_path: Path, engine: subprocess.Popen[bytes]
) -> None:
    """A holder that dies by SIGKILL frees the lock for the one that waits."""
    lock = DeviceLock(lock_path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lock.wait_acquired, 20)
        await trio.testing.wait_all_tasks_blocked()
        assert not is_held(lock)
        engine.send_signal(signal.SIGKILL)
    assert is_held(lock)
    lock.release()


async def test_lock_file_replaced_while_waiting_takes_the_new_one(
    lock_path: Path, engine: subprocess.Popen[bytes]
) -> None:
    """Removed and made again while it waits: the lock is the file that the path names now."""
    lock = DeviceLock(lock_path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lock.wait_acquired, 20)
        await trio.testing.wait_all_tasks_blocked()
        assert engine.poll() is None
        lock_path.unlink()
        lock_path.touch()
    assert lock.still_ours()
    assert not outsider_gets_it(lock_path)
    lock.release()


async def test_lock_file_replaced_between_open_and_flock_is_opened_again(lock_path: Path) -> None:
    """A flock on a file that was removed just before is given up for the one at the path."""

    class Raced(DeviceLock):
        raced = False

        def _flock(self, fd: int) -> bool:
            if not self.raced:
                self.raced = True
                lock_path.unlink()
                lock_path.touch()
            return super()._flock(fd)

    lock = Raced(lock_path)
    async with lock.held_for(0):
        assert lock.raced
        assert lock.still_ours()
        assert not outsider_gets_it(lock_path)
    assert str(lock_path) not in "".join(open_fds())


async def test_lock_file_replaced_while_held_is_noticed(lock_path: Path) -> None:
    """Removing the file under the holder turns still_ours to False, and release stays calm."""
    lock = DeviceLock(lock_path)
    assert not lock.still_ours()
    await lock.wait_acquired(0)
    assert lock.still_ours()
    lock_path.unlink()
    assert not lock.still_ours()
    lock_path.touch()
    assert not lock.still_ours()
    lock.release()
    assert lock_path.read_bytes() == b""


async def test_lock_cancelled_while_waiting_leaves_nothing(
    lock_path: Path, engine: subprocess.Popen[bytes]
) -> None:
    """A cancelled wait leaves no descriptor, no lock and no taken turn."""
    lock = DeviceLock(lock_path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lock.wait_acquired, 20)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert str(lock_path) not in open_fds()
    engine.kill()
    engine.wait()
    await lock.wait_acquired(0)
    lock.release()


async def test_lock_released_leaves_no_descriptor(lock_path: Path) -> None:
    """Neither a released lock nor a failed attempt keeps the file open."""
    lock = DeviceLock(lock_path)
    async with lock.held_for(0):
        assert str(lock_path) in open_fds()
    assert str(lock_path) not in open_fds()
    with lock_path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(HandoffError):
            await lock.wait_acquired(0)
        assert (
            sum(name == str(lock_path) for name in map(_target, os.listdir("/proc/self/fd"))) == 1
        )


def _target(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:
        return ""


async def test_lock_tasks_are_served_in_order(lock_path: Path) -> None:
    """Tasks of this process get the lock first come, first served, one at a time."""
    lock = DeviceLock(lock_path)
    order: list[int] = []
    inside = 0

    async def run(number: int) -> None:
        nonlocal inside
        async with lock.held_for(20):
            inside += 1
            assert inside == 1
            order.append(number)
            await trio.sleep(0.002)
            inside -= 1

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(run, number)
            await trio.testing.wait_all_tasks_blocked(0.0005)
    assert order == [0, 1, 2, 3, 4]


async def test_lock_second_task_times_out_says_who(lock_path: Path) -> None:
    """A task that waits for another task of the same daemon is told so."""
    lock = DeviceLock(lock_path)
    async with lock.held_for(0):
        with pytest.raises(HandoffError, match="another run of this daemon") as caught:
            await lock.wait_acquired(0.01)
    assert caught.value.reason is Reason.LOCK_BUSY
    await lock.wait_acquired(0)
    lock.release()


async def test_lock_body_raises_releases(lock_path: Path) -> None:
    """An exception in the body gives the lock back."""
    lock = DeviceLock(lock_path)
    with pytest.raises(ValueError, match="body"):
        async with lock.held_for(0):
            raise ValueError("body")
    assert outsider_gets_it(lock_path)


async def test_lock_owner_line_is_written_and_cleared(lock_path: Path) -> None:
    """The line has the fleet's form while the lock is held, and the file is empty afterwards."""
    lock_path.write_text("a much longer line of somebody who died pid=999999999 start=x\n" * 3)
    lock = DeviceLock(lock_path)
    async with lock.held_for(0):
        line = lock_path.read_text()
        # What the fleet's scripts do to recognise a line: grep "NAME pid=N " (with the blank).
        grep = subprocess.run(
            ["grep", "-qE", f"^onebitd pid={os.getpid()} start=[0-9-]+T[0-9:]+Z$", str(lock_path)],
            check=False,
        )
        assert grep.returncode == 0, line
        assert line.count("\n") == 1
    assert lock_path.read_bytes() == b""


async def test_lock_line_overwritten_by_another_is_left_alone(lock_path: Path) -> None:
    """Release empties only our own line."""
    lock = DeviceLock(lock_path)
    async with lock.held_for(0):
        lock_path.write_text("ppl-ids pid=1 start=x\n")
    assert lock_path.read_text() == "ppl-ids pid=1 start=x\n"


async def test_lock_declared_owner_is_waited_for_without_the_flock(lock_path: Path) -> None:
    """A script that declared itself is waited for, and the engine it runs can have the flock."""
    lock = DeviceLock(lock_path)
    with subprocess.Popen(["sleep", "60"]) as script:
        lock_path.write_text(f"ppl-ids pid={script.pid} start=12:00:00\n")
        with pytest.raises(HandoffError, match=rf"held by pid {script.pid} \(ppl-ids\)"):
            await lock.wait_acquired(0.02)
        assert outsider_gets_it(lock_path)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lock.wait_acquired, 20)
            await trio.testing.wait_all_tasks_blocked()
            lock_path.write_text("")  # the script leaves
        assert is_held(lock)
        lock.release()
        script.kill()


async def test_lock_declared_owner_is_not_even_tried(lock_path: Path) -> None:
    """While a declared owner lives no flock is attempted: it could fail the engine's own."""

    class Counting(DeviceLock):
        tries = 0

        def _flock(self, fd: int) -> bool:
            self.tries += 1
            return super()._flock(fd)

    lock_path.write_text(f"ppl-ids pid={os.getppid()} start=12:00:00\n")
    lock = Counting(lock_path)
    with pytest.raises(HandoffError):
        await lock.wait_acquired(0.02)
    assert lock.tries == 0


async def test_lock_declared_owner_dead_is_taken(lock_path: Path) -> None:
    """The line of a process that was killed does not keep anybody out."""
    with subprocess.Popen(["true"]) as script:
        pass
    lock_path.write_text(f"ppl-ids pid={script.pid} start=12:00:00\n")
    async with DeviceLock(lock_path).held_for(0):
        assert lock_path.read_text().startswith("onebitd pid=")


async def test_lock_is_not_inherited_by_a_child(lock_path: Path) -> None:
    """A child that outlives us does not keep the lock, even when it inherits what it can."""
    lock = DeviceLock(lock_path)
    await lock.wait_acquired(0)
    child = subprocess.Popen(
        ["sh", "-c", "ls -l /proc/self/fd; sleep 60"], close_fds=False, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None
        listing = b""
        while b" 0 ->" not in listing:
            listing += os.read(child.stdout.fileno(), 65536)
        child.kill()
    assert str(lock_path).encode() not in listing
    lock.release()


async def test_lock_file_of_the_engine_0644_is_locked_without_a_line(shared_dir: Path) -> None:
    """A file that may only be read can still be locked; the line is left out."""
    lock_path = shared_dir / "npu.lock"
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    lock_path.write_text("")
    lock_path.chmod(0o644)
    script = (
        "import os, subprocess, sys, trio\n"
        "from onebitd.adapters.device_lock import DeviceLock\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "async def main():\n"
        "    async with DeviceLock(sys.argv[1]).held_for(0):\n"
        "        print(subprocess.run(['flock', '-n', sys.argv[1], 'true']).returncode)\n"
        "        print(repr(open(sys.argv[1]).read()))\n"
        "trio.run(main)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(lock_path)], stdout=subprocess.PIPE, check=True
    )
    assert done.stdout == b"1\n''\n"


@pytest.mark.parametrize("kind", ["forbidden file", "forbidden directory"])
async def test_lock_without_permission_is_unusable(shared_dir: Path, kind: str) -> None:
    """A file or directory that this user may not use is LOCK_UNUSABLE and says what to do."""
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    path = shared_dir / "lock"
    if kind == "forbidden file":
        path.touch()
        path.chmod(0o600)
    script = (
        "import os, sys, trio\n"
        "from onebitd.adapters.device_lock import DeviceLock\n"
        "from onebitd.core.errors import HandoffError\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try:\n"
        "    trio.run(DeviceLock(sys.argv[1]).wait_acquired, 0)\n"
        "except HandoffError as exc:\n"
        "    print(exc)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, check=True
    )
    assert done.stdout.startswith(b"lock_unusable: ")
    words = {
        "forbidden file": "may not be opened by the user nobody: it belongs to root:root with mode"
        " 0600; let root remove it while nothing uses it, or create it for all",
        "forbidden directory": f"may not be created or reached in {shared_dir} by the user nobody;"
        " let root create it for all",
    }
    assert words[kind] in done.stdout.decode()
    assert "onebitd(8), DEVICE LOCK" in done.stdout.decode()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("symlink", "is a symbolic link; remove it"),
        ("dangling", "is a symbolic link; remove it"),
        ("fifo", "is not a regular file; remove it"),
        ("socket", "is a socket or a fifo; remove it"),
        ("directory", "is a directory; remove it"),
        ("hardlink", "has 2 names (hard links); remove it, or set lock.path"),
        ("no directory", "its directory does not exist; create it, or set lock.path"),
    ],
)
async def test_lock_not_a_plain_file_is_refused(tmp_path: Path, kind: str, words: str) -> None:
    """Whatever a stranger planted there is refused with what to do, and not touched."""
    path = tmp_path / "lock"
    target = tmp_path / "target"
    if kind == "symlink":
        target.write_text("keep")
        path.symlink_to(target)
    elif kind == "dangling":
        path.symlink_to(target)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(path))
    elif kind == "directory":
        path.mkdir()
    elif kind == "hardlink":
        target.write_text("keep")
        os.link(target, path)
    else:
        path = tmp_path / "none" / "lock"
    with pytest.raises(HandoffError) as caught:
        await DeviceLock(path).wait_acquired(5)
    assert caught.value.reason is Reason.LOCK_UNUSABLE
    assert words in caught.value.detail
    if target.exists():
        assert target.read_text() == "keep"
    else:
        assert not target.is_symlink()
    assert str(path) not in open_fds()


@pytest.mark.parametrize("umask", [0o007, 0o077])
async def test_lock_created_file_has_its_mode_and_stays(lock_path: Path, umask: int) -> None:
    """A file that had to be created gets mode 0660 whatever the umask, and is not removed.

    With a umask of 027 it was 0640, and no other user could take the lock ever after.
    """
    old = os.umask(umask)
    try:
        async with DeviceLock(lock_path).held_for(0):
            assert lock_path.stat().st_mode & 0o777 == 0o660
    finally:
        os.umask(old)
    assert lock_path.exists()


class Opens:
    """Records how the lock's file is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flags: list[int] = []
        self._real = os.open
        monkeypatch.setattr(os, "open", self)

    def __call__(self, path: str | os.PathLike[str], flags: int, mode: int = 0o777) -> int:
        """Note it and open."""
        self.flags.append(flags)
        return self._real(path, flags, mode)


@pytest.mark.parametrize("exists", [True, False])
async def test_lock_is_opened_without_o_creat_and_created_with_o_excl(
    lock_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    """With fs.protected_regular O_CREAT fails on another user's file; a plain open does not."""
    if exists:
        lock_path.touch()
    opens = Opens(monkeypatch)
    async with DeviceLock(lock_path).held_for(0):
        pass
    assert not opens.flags[0] & os.O_CREAT
    assert [bool(flags & os.O_CREAT) for flags in opens.flags[1:]] == ([] if exists else [True])
    for flags in opens.flags:
        assert flags & os.O_NOFOLLOW
        assert flags & os.O_CLOEXEC
        assert bool(flags & os.O_CREAT) == bool(flags & os.O_EXCL)


TURNS = 12
BY_A_DAEMON = """
import os, sys, trio
from onebitd.adapters.device_lock import DeviceLock

async def main():
    lock = DeviceLock(sys.argv[1])
    for _ in range(int(sys.argv[3])):
        async with lock.held_for(60):
            os.mkdir(sys.argv[2])
            assert open(sys.argv[1]).read().startswith(f"onebitd pid={os.getpid()} ")
            await trio.sleep(0.002)
            os.rmdir(sys.argv[2])
        await trio.sleep(0.004)

trio.run(main)
"""
BY_AN_ENGINE_THAT_DECLARES_ITSELF = """
import fcntl, os, sys, time
for _ in range(int(sys.argv[3])):
    fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o660)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.pwrite(fd, f"engine pid={os.getpid()} start=2026-01-31T12:00:00Z\\n".encode(), 0)
    os.mkdir(sys.argv[2])
    time.sleep(0.002)
    os.rmdir(sys.argv[2])
    os.ftruncate(fd, 0)
    os.close(fd)
    time.sleep(0.02)
"""
BY_FLOCK_1 = """
for turn in $(seq "$3"); do
    flock "$1" sh -c 'mkdir "$0" && sleep 0.002 && rmdir "$0"' "$2" || exit 1
    sleep 0.02
done
"""


def test_lock_daemons_an_engine_and_flock_1_take_turns(lock_path: Path) -> None:
    """Two daemons, the engine's way to open it and flock(1): never two at once, each its turns."""
    inside = lock_path.with_name("inside")  # mkdir fails when somebody else is inside
    arguments = [str(lock_path), str(inside), str(TURNS)]
    python = [sys.executable, "-c"]
    commands = [
        [*python, BY_A_DAEMON],
        [*python, BY_A_DAEMON],
        [*python, BY_AN_ENGINE_THAT_DECLARES_ITSELF],
        ["sh", "-c", BY_FLOCK_1, "sh"],
    ]
    processes = [subprocess.Popen([*command, *arguments]) for command in commands]
    try:
        assert [process.wait(120) for process in processes] == [0, 0, 0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert not inside.exists()
    assert lock_path.read_bytes() == b""


def dead_pid() -> int:
    """Return the number of a process that is gone."""
    with subprocess.Popen(["true"]) as process:
        pass
    return process.pid


async def test_clear_stale_line_of_a_dead_process_is_cleared_and_told(lock_path: Path) -> None:
    """The file is empty afterwards, still there, and nobody has it."""
    line = f"onebitd pid={dead_pid()} start=2026-01-31T12:00:00Z"
    lock_path.write_text(line + "\n")
    inode = lock_path.stat().st_ino
    assert DeviceLock(lock_path).clear_stale() == line
    assert lock_path.read_bytes() == b""
    assert lock_path.stat().st_ino == inode
    assert outsider_gets_it(lock_path)
    assert str(lock_path) not in open_fds()
    assert DeviceLock(lock_path).clear_stale() is None


async def test_clear_stale_own_number_was_an_earlier_process(lock_path: Path) -> None:
    """In a container every start has the same number: the line is none of this process's."""
    lock_path.write_text(f"onebitd pid={os.getpid()} start=x\n")
    lock = DeviceLock(lock_path)
    assert lock.clear_stale() is not None
    async with lock.held_for(0):
        assert lock.clear_stale() is None
        assert lock_path.read_text().startswith("onebitd pid=")


@pytest.mark.parametrize(
    "text",
    ["", "\n", "no owner line\n", "[http]\nport = 1\n", f"ppl-ids pid={os.getppid()} start=x\n"],
    ids=["empty", "blank", "text", "toml", "living owner"],
)
async def test_clear_stale_what_is_no_line_of_a_dead_process_stays(
    lock_path: Path, text: str
) -> None:
    """Least of all the declaration of a script that is at it; the flock is not even tried."""

    class Untried(DeviceLock):
        def _is_at_path(self, fd: int) -> bool:
            raise AssertionError("the lock was taken")

    lock_path.write_text(text)
    assert Untried(lock_path).clear_stale() is None
    assert lock_path.read_text() == text


async def test_clear_stale_lock_that_is_held_is_left_alone_at_once(
    lock_path: Path, engine: subprocess.Popen[bytes]
) -> None:
    """An engine writes no line: the dead one in the file is not ours to clear while it runs."""
    line = f"onebitd pid={dead_pid()} start=x\n"
    lock_path.write_text(line)
    assert engine.poll() is None
    assert DeviceLock(lock_path).clear_stale() is None  # it would hang here if it waited
    assert lock_path.read_text() == line


@pytest.mark.parametrize(
    "kind", ["missing", "symlink", "fifo", "directory", "hardlink", "no directory"]
)
async def test_clear_stale_touches_nothing_but_a_plain_file(tmp_path: Path, kind: str) -> None:
    """It creates nothing, follows nothing, waits for nothing, and says nothing."""
    path, target = tmp_path / "lock", tmp_path / "target"
    line = f"onebitd pid={dead_pid()} start=x\n"
    target.write_text(line)
    if kind == "symlink":
        path.symlink_to(target)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "hardlink":
        os.link(target, path)
    elif kind == "no directory":
        path = tmp_path / "none" / "lock"
    before = sorted(entry.name for entry in tmp_path.iterdir())
    assert DeviceLock(path).clear_stale() is None
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before
    assert target.read_text() == line


@pytest.mark.parametrize(
    "text",
    ["[http]\nport = 1\n", "\n\nsome notes\n", " \n" * 200, "GGUF\0\0\0\3"],
    ids=["toml", "blank first line", "long", "binary"],
)
async def test_lock_file_with_somebodys_text_is_locked_and_not_emptied(
    lock_path: Path, text: str
) -> None:
    """A lock.path that names a file by mistake does not cost its contents (it did once)."""
    lock_path.write_text(text)
    async with DeviceLock(lock_path).held_for(0):
        assert not outsider_gets_it(lock_path)
        assert lock_path.read_text() == text
    assert lock_path.read_text() == text


async def test_lock_file_of_nuls_gets_its_line(lock_path: Path) -> None:
    """What a crash of the machine leaves of a short file is no text of anybody's."""
    lock_path.write_bytes(bytes(50))
    async with DeviceLock(lock_path).held_for(0):
        assert lock_path.read_text().startswith("onebitd pid=")
    assert lock_path.read_bytes() == b""


async def test_lock_file_made_again_by_tmpfiles_is_taken_by_a_member_of_its_group(
    shared_dir: Path,
) -> None:
    """root:GROUP 0660 in a sticky directory, removed and made again under a holder: all works."""
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    shared_dir.chmod(0o1777)
    path = shared_dir / "npu.lock"
    script = (
        "import os, sys, trio\n"
        "from onebitd.adapters.device_lock import DeviceLock\n"
        "os.setgroups([54321]); os.setgid(65534); os.setuid(65534)\n"
        "async def main():\n"
        "    lock = DeviceLock(sys.argv[1])\n"
        "    async with lock.held_for(0):\n"
        "        print('held', flush=True)\n"
        "        sys.stdin.readline()\n"
        "        print(lock.still_ours(), flush=True)\n"
        "    async with lock.held_for(0):\n"
        "        print(lock.still_ours(), open(sys.argv[1]).read().split()[0], flush=True)\n"
        "trio.run(main)\n"
    )

    def create() -> None:
        path.touch()
        os.chown(path, 0, 54321)
        path.chmod(0o660)

    create()
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        path.unlink()
        create()
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.stdout.read() == b"False\nTrue onebitd\n"
    info = path.stat()
    assert (info.st_uid, info.st_gid, info.st_mode & 0o7777) == (0, 54321, 0o660)
