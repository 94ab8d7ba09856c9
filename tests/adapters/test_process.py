"""onebitd.adapters.process with real children."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import tracemalloc
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from onebitd.adapters import process
from onebitd.adapters.process import (
    Child,
    Guard,
    SpawnError,
    describe_exit,
    find_program,
    pump_lines,
    spawn,
)
from tests.harness import is_alive, wait_until

ROOT = Path(__file__).parents[2]
PYTHON = [sys.executable, "-I", "-S", "-c"]
SHELL = ["/bin/sh", "-c"]
ENV = {"PATH": os.environ["PATH"]}
IGNORES_TERM = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(3600)
"""


@pytest.fixture
def guard() -> Iterator[Guard]:
    made = Guard()
    yield made
    made.close()


async def read_line(child: Child) -> bytes:
    """Return the first line that a child says."""
    data = b""
    async with child.stdout as stream:
        while b"\n" not in data:
            more = bytes(await stream.receive_some(4096))
            assert more, data
            data += more
    return data.partition(b"\n")[0]


async def output_of(argv: Sequence[str], guard: Guard, pass_fds: Sequence[int] = ()) -> str:
    """Run a program to its end and return what it wrote to standard output."""
    lines: list[bytes] = []
    child = spawn(argv, env=ENV, guard=guard, merge_output=True, pass_fds=pass_fds)
    with trio.fail_after(20):
        await pump_lines(child.stdout, lines.append)
        await child.wait_gone()
    return b"\n".join(lines).decode()


async def lines_of(*parts: bytes) -> list[bytes]:
    """Return the lines that pump_lines makes of these writes."""
    send, receive = trio.testing.memory_stream_one_way_pair()
    lines: list[bytes] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pump_lines, receive, lines.append)
        for part in parts:
            await send.send_all(part)
            await trio.testing.wait_all_tasks_blocked()
        await send.aclose()
    return lines


async def test_spawn_child_leads_a_session_and_group_of_its_own(guard: Guard) -> None:
    """A signal to our group does not reach it, and one to its group reaches all of its own."""
    script = "import os; print(os.getpid(), os.getpgid(0), os.getsid(0), os.getcwd())"
    pid, pgid, sid, cwd = (await output_of([*PYTHON, script], guard)).split()
    assert pid == pgid == sid
    assert int(pid) != os.getpid()
    assert cwd == "/"


async def test_spawn_child_inherits_only_the_passed_descriptors_and_dev_null(
    guard: Guard, tmp_path: Path
) -> None:
    """A lock file and a socket of ours, inheritable or not, do not reach the child."""
    ours, theirs = socket.socketpair()
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    os.set_inheritable(lock, True)
    passed = os.open(tmp_path / "passed", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    script = (
        "import os, json; found = {}\n"
        "for name in os.listdir('/proc/self/fd'):\n"
        "    try: found[name] = os.readlink('/proc/self/fd/' + name)\n"
        "    except OSError: pass\n"
        "print(json.dumps(found))"
    )
    try:
        found = json.loads(await output_of([*PYTHON, script], guard, [passed]))
    finally:
        for descriptor in (lock, passed):
            os.close(descriptor)
        ours.close()
        theirs.close()
    found = {name: target for name, target in found.items() if "/proc/" not in target}
    assert set(found) == {"0", "1", "2", str(passed)}
    assert found["0"] == "/dev/null"
    assert found[str(passed)] == str(tmp_path / "passed")


async def test_spawn_child_has_a_private_umask_and_exactly_the_given_environment(
    guard: Guard,
) -> None:
    """Its files are for its user alone; nothing of our environment leaks in."""
    os.environ["ONEBIT_TEST_LEAK"] = "1"
    try:
        said = await output_of([*SHELL, "umask; echo [$ONEBIT_TEST_LEAK]"], guard)
    finally:
        del os.environ["ONEBIT_TEST_LEAK"]
    assert said.split() == ["0077", "[]"]


def read_oom_score_adj(pid: int | str) -> int:
    """Return what the kernel adds to the badness of a process."""
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


async def test_spawn_oom_score_adj_is_raised_without_privilege_and_ours_comes_back() -> None:
    """As in the service: from below 0, which only systemd may set (where that can be tried)."""
    if os.getuid() != 0:
        pytest.skip("needs root to give up a capability")
    script = """
import os, trio
from onebitd.adapters import process
own = "/proc/self/oom_score_adj"
before = open(own).read()
try:
    with open(own, "w") as file:
        file.write("-101")
except PermissionError:
    print("no privilege")

async def main():
    guard = process.Guard()
    child = process.spawn(["/bin/cat", own], env={}, guard=guard, oom_score_adj=300)
    await process.pump_lines(child.stdout, lambda line: print(line.decode()))
    await child.wait_gone()
    print("as before:", open(own).read() == before)
    guard.close()

trio.run(main)
"""
    drop = 'echo -100 >/proc/self/oom_score_adj; exec setpriv --bounding-set -sys_resource "$@"'
    argv = [*SHELL, drop, "sh", sys.executable, "-c", script]
    done = await trio.run_process(argv, capture_stdout=True, capture_stderr=True, cwd=ROOT)
    assert done.stdout.decode().splitlines() == ["no privilege", "300", "as before: True"]


@pytest.mark.parametrize("above", [0, 7, 1000], ids=["equal", "above", "far above"])
async def test_spawn_oom_score_adj_is_raised_for_the_child_and_its_children(
    guard: Guard, above: int
) -> None:
    """Whatever was inherited, the child is at least that likely a victim; so is a grandchild."""
    own = read_oom_score_adj("self")
    wanted = min(1000, own + above)
    script = "cat /proc/self/oom_score_adj & cat /proc/$$/oom_score_adj; wait"
    child = spawn([*SHELL, script], env=ENV, guard=guard, oom_score_adj=wanted)
    assert read_oom_score_adj("self") == own
    lines: list[bytes] = []
    await pump_lines(child.stdout, lines.append)
    await child.wait_gone()
    assert lines == [str(wanted).encode()] * 2


@pytest.mark.parametrize("setpriv", ["exit 127", None])
async def test_guard_where_setpriv_does_not_work_programs_start_without_it(
    setpriv: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system call filter without capset makes setpriv fail; that must not stop every child."""
    if setpriv is not None:
        (tmp_path / "setpriv").write_text(f"#!/bin/sh\n{setpriv}\n")
        (tmp_path / "setpriv").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    guard = Guard()
    try:
        assert guard.death_signal == []
        child = spawn(["/bin/sh", "-c", "exit 3"], env=ENV, guard=guard)
        assert await child.wait() == 3
        await child.wait_gone()
    finally:
        guard.close()


async def test_spawn_oom_score_adj_never_lowers_what_was_inherited(guard: Guard) -> None:
    """A daemon that somebody made a likely victim does not make its children safer than itself."""
    own = read_oom_score_adj("self")
    child = spawn([*SHELL, "exec sleep 3600"], env=ENV, guard=guard, oom_score_adj=own - 1)
    try:
        assert read_oom_score_adj(child.pid) == own
    finally:
        await child.stop(term_grace_s=5, kill_grace_s=5)


async def test_spawn_oom_score_adj_that_proc_does_not_take_is_no_failure(
    guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where /proc is read-only the program runs all the same."""
    real = open

    def refusing(path: str, mode: str = "r") -> object:
        if path.endswith("oom_score_adj") and "w" in mode:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return real(path, mode)

    monkeypatch.setattr(process, "open", refusing, raising=False)
    child = spawn([*SHELL, "echo well"], env=ENV, guard=guard, oom_score_adj=1000)
    assert await read_line(child) == b"well"
    await child.wait_gone()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("missing", "does not exist"),
        ("not_executable", "is not an executable file; check its mode"),
        ("directory", "is not an executable file"),
    ],
)
async def test_spawn_program_that_cannot_run_is_named_with_the_reason(
    guard: Guard, tmp_path: Path, kind: str, says: str
) -> None:
    """No child exists afterwards, and the message names the program (setpriv does not hide it)."""
    program = tmp_path / "decoder"
    if kind == "not_executable":
        program.write_text("#!/bin/sh\n")
        program.chmod(0o600)
    elif kind == "directory":
        program.mkdir()
    with pytest.raises(SpawnError, match=f"{program} {says}"):
        spawn([str(program)], env=ENV, guard=guard)


def test_find_program_looks_on_path_and_names_what_is_missing(tmp_path: Path) -> None:
    """A bare name is looked up on the given PATH; a miss says what to do."""
    program = tmp_path / "decoder"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    assert find_program("decoder", str(tmp_path)) == str(program)
    assert find_program(str(program)) == str(program)
    with pytest.raises(SpawnError, match="nowhere is not on PATH; install it"):
        find_program("nowhere", str(tmp_path))


async def test_child_wait_cancelled_leaves_it_running(guard: Guard) -> None:
    """Giving up the wait is not giving up the child."""
    child = spawn([*SHELL, "exec sleep 3600"], env=ENV, guard=guard)
    with trio.move_on_after(0.05) as scope:
        await child.wait()
    assert scope.cancelled_caught
    assert child.returncode is None
    assert is_alive(child.pid)
    assert await child.stop(term_grace_s=5, kill_grace_s=5)
    assert child.returncode == -signal.SIGTERM


async def test_child_wait_several_waiters_all_get_the_status(guard: Guard) -> None:
    """Whoever waits, before or after the end, gets the same answer."""
    child = spawn([*SHELL, "exit 7"], env=ENV, guard=guard)
    found: list[int] = []

    async def wait() -> None:
        found.append(await child.wait())

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(wait)
    assert [*found, await child.wait()] == [7] * 4
    await child.wait_gone()


async def test_child_stop_polite_child_gets_sigterm_and_its_grace(
    guard: Guard, tmp_path: Path
) -> None:
    """A child that cleans up at SIGTERM is let to."""
    script = """
import signal, sys, pathlib
def leave(*_):
    pathlib.Path(sys.argv[1]).write_text("cleaned")
    sys.exit(5)
signal.signal(signal.SIGTERM, leave)
print("ready", flush=True)
signal.pause()
"""
    child = spawn([*PYTHON, script, str(tmp_path / "done")], env=ENV, guard=guard)
    assert await read_line(child) == b"ready"
    assert await child.stop(term_grace_s=20, kill_grace_s=5)
    assert child.returncode == 5
    assert (tmp_path / "done").read_text() == "cleaned"


async def test_child_stop_child_that_ignores_sigterm_is_killed(guard: Guard) -> None:
    """After the grace comes SIGKILL."""
    child = spawn([*PYTHON, IGNORES_TERM], env=ENV, guard=guard)
    assert await read_line(child) == b"ready"
    assert await child.stop(term_grace_s=0.05, kill_grace_s=20)
    assert child.returncode == -signal.SIGKILL


async def test_child_stop_is_carried_out_although_cancelled(guard: Guard) -> None:
    """A cancel does not leave a stop half done."""
    child = spawn([*PYTHON, IGNORES_TERM], env=ENV, guard=guard)
    assert await read_line(child) == b"ready"
    with trio.CancelScope() as scope:
        scope.cancel()
        assert await child.stop(term_grace_s=0.05, kill_grace_s=20)
    assert not is_alive(child.pid)


async def test_child_stop_grandchild_left_behind_is_killed_with_the_group(guard: Guard) -> None:
    """The leader has ended by itself: the rest of its group goes too, reaped by init or not."""
    child = spawn([*SHELL, "sleep 3600 & echo $!"], env=ENV, guard=guard)
    grandchild = int(await read_line(child))
    assert await child.wait() == 0
    assert is_alive(grandchild)
    assert not child.group_is_gone()
    assert await child.stop(term_grace_s=0, kill_grace_s=20)
    assert not is_alive(grandchild)
    assert child.group_is_gone()


async def test_child_group_is_gone_zombie_member_counts_as_gone(guard: Guard) -> None:
    """What nobody reaps does not run (the bug: a container without an init never saw an end)."""
    # The leader's child joins a second group of which, killed and unreaped, it is the only member.
    script = """
import os, signal, time
pid = os.fork()
if not pid:
    os.setpgid(0, 0)
    os.kill(os.getpid(), signal.SIGKILL)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
print(pid, flush=True)
time.sleep(3600)
"""
    child = spawn([*PYTHON, script], env=ENV, guard=guard)
    zombie = int(await read_line(child))
    leader, child.pid = child.pid, zombie
    try:
        os.killpg(zombie, 0)  # the kernel still knows the group
        assert child.group_is_gone()
    finally:
        child.pid = leader
    assert await child.stop(term_grace_s=0, kill_grace_s=20)


async def test_child_ended_leaves_no_descriptor(guard: Guard) -> None:
    """Pipes and the pidfd are closed with the end."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await output_of([*SHELL, "echo x"], guard)
    child = spawn([*SHELL, "exec sleep 3600"], env=ENV, guard=guard)
    await child.stop(term_grace_s=5, kill_grace_s=5)
    assert len(os.listdir("/proc/self/fd")) == before


def is_gone(pid: int) -> bool:
    """Say whether nothing of a process runs any more."""
    return not is_alive(pid)


DAEMON = """
import os, sys, trio
from onebitd.adapters.process import Guard, spawn

async def main():
    guard = Guard()
    script = sys.argv[1]
    child = spawn(["/bin/sh", "-c", script], env=dict(os.environ), guard=guard)
    stream = child.stdout
    data = b""
    while data.count(b"\\n") < int(sys.argv[2]):
        data += await stream.receive_some(4096)
    print(child.pid, data.decode().replace("\\n", " "), guard._process.pid, flush=True)
    await trio.sleep_forever()

trio.run(main)
"""


def killed_daemon(script: str, pids: int) -> list[int]:
    """Run a daemon with one child, SIGKILL it; return the pids of child, its own, the guard."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DAEMON), script, str(pids)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    found = [int(word) for word in process.stdout.readline().split()]
    try:
        assert len(found) == pids + 2
        assert all(map(is_alive, found))
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
    return found


def test_guard_daemon_is_killed_child_and_grandchild_die() -> None:
    """SIGKILL of the daemon leaves nothing: not the child, not what a wrapper script started."""
    found = killed_daemon("sleep 3600 & echo $!; wait", 1)
    for pid in found:
        wait_until(partial(is_gone, pid), f"process {pid} of {found} is gone", 10)


def test_spawn_guard_is_dead_too_child_still_dies_with_the_daemon() -> None:
    """The parent-death signal needs no guard: both are killed, and the child goes."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DAEMON), "echo; exec sleep 3600", "1"],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    child, guard_pid = map(int, process.stdout.readline().split())
    os.kill(guard_pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(guard_pid), "the guard is gone", 10)
    assert is_alive(child)
    process.kill()
    process.stdout.close()
    process.wait()
    wait_until(lambda: not is_alive(child), "the child is gone", 10)


def test_guard_group_removed_is_not_killed_at_the_end() -> None:
    """A number that was given back may be somebody else's."""
    with subprocess.Popen(["sleep", "3600"], start_new_session=True) as stranger:
        guard = Guard()
        guard.add(stranger.pid)
        guard.remove(stranger.pid)
        guard.close()
        assert stranger.poll() is None
        again = Guard()
        again.add(stranger.pid)
        again.close()
        assert stranger.wait(10) == -signal.SIGKILL


async def test_guard_that_is_dead_is_no_reason_to_stop(guard: Guard) -> None:
    """Children still start and end."""
    guard._process.kill()
    guard._process.wait()
    assert await output_of([*SHELL, "echo well"], guard) == "well"


async def test_pump_lines_splits_anywhere_and_gives_the_last_line_without_its_end() -> None:
    """Chunks are not lines; binary bytes pass; CR LF ends a line."""
    assert await lines_of(b"a\nb", b"c\r\n\xff\x00\n\nla", b"st") == [
        b"a",
        b"bc",
        b"\xff\x00",
        b"",
        b"last",
    ]
    assert await lines_of() == []


@pytest.mark.parametrize("sizes", [[20_000], [9000, 9000, 9000], [100] * 200])
async def test_pump_lines_overlong_line_is_cut_and_its_rest_dropped(sizes: list[int]) -> None:
    """One cut line comes out, and the next line is whole."""
    parts = [b"x" * size for size in sizes]
    assert await lines_of(b"first\n", *parts, b"tail\nnext\n") == [b"first", b"x" * 8192, b"next"]
    assert await lines_of(*parts) == [b"x" * 8192]


async def test_pump_lines_endless_line_keeps_memory_bounded(guard: Guard) -> None:
    """64 MB without a newline cost no memory to speak of."""
    script = "head -c 64000000 /dev/zero | tr '\\0' x; echo; echo end"
    child = spawn([*SHELL, script], env=ENV, guard=guard)
    lines: list[bytes] = []
    tracemalloc.start()
    try:
        await pump_lines(child.stdout, lines.append)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    await child.wait_gone()
    assert lines == [b"x" * 8192, b"end"]
    assert peak < 2_000_000


async def test_pump_lines_flood_others_get_their_turn_after_a_few_lines(guard: Guard) -> None:
    """A child that writes as fast as it can does not keep the loop for itself.

    One read of the shortest lines holds 32000 of them; they were handed over in one go once.
    """
    child = spawn([*SHELL, "exec yes"], env=ENV, guard=guard)
    seen = 0
    in_one_go: list[int] = []

    def take(_line: bytes) -> None:
        nonlocal seen
        seen += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(pump_lines, child.stdout, take)
        while seen < 100_000:
            before = seen
            await trio.lowlevel.checkpoint()
            in_one_go.append(seen - before)
        nursery.cancel_scope.cancel()
    assert await child.stop(term_grace_s=5, kill_grace_s=5)
    assert max(in_one_go) <= 1000, max(in_one_go)


async def test_pump_lines_cancelled_in_a_flood_hands_over_what_it_has_read() -> None:
    """A cancel comes between two reads: the last words of a read are not lost."""
    send, receive = trio.testing.memory_stream_one_way_pair()
    lines: list[bytes] = []
    with trio.CancelScope() as scope:

        def take(line: bytes) -> None:
            lines.append(line)
            scope.cancel()

        await send.send_all(b"x\n" * 5000 + b"last words\n")
        await pump_lines(receive, take)
    assert scope.cancelled_caught
    assert len(lines) == 5001
    assert lines[-1] == b"last words"


async def test_pump_lines_cancelled_late_still_hands_over_the_last_words(guard: Guard) -> None:
    """A loop that was held up until after the deadline reads what is in the pipe all the same."""
    child = spawn([*SHELL, "sleep 3600 & echo last words; printf unended"], env=ENV, guard=guard)
    stdout = child.stdout
    await child.wait()
    lines: list[bytes] = []
    with trio.CancelScope() as scope:
        scope.cancel()
        await pump_lines(stdout, lines.append)
    assert scope.cancelled_caught
    assert lines == [b"last words", b"unended"]
    assert await child.stop(term_grace_s=0, kill_grace_s=20)


async def test_pump_lines_pipe_held_by_a_grandchild_can_be_given_up(guard: Guard) -> None:
    """The end of the child is not the end of its pipe; a cancel ends the pump, lines are kept."""
    child = spawn([*SHELL, "echo said; sleep 3600 &"], env=ENV, guard=guard)
    lines: list[bytes] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pump_lines, child.stdout, lines.append)
        await child.wait()
        await trio.sleep(0.05)
        assert nursery.child_tasks, "the pipe is still open"
        nursery.cancel_scope.cancel()
    assert lines == [b"said"]
    assert await child.stop(term_grace_s=0, kill_grace_s=20)


@pytest.mark.parametrize(
    ("returncode", "text"),
    [
        (0, "status 0"),
        (3, "status 3"),
        (-6, "signal 6 (SIGABRT)"),
        (-9, "signal 9 (SIGKILL)"),
        (-40, "signal 40"),
    ],
)
def test_describe_exit_names_status_or_signal(returncode: int, text: str) -> None:
    """A person reads what happened."""
    assert describe_exit(returncode) == text
