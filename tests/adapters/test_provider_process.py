"""onebitd.adapters.provider_process: one run of a real script."""

# ruff: noqa: ASYNC110 - real processes and files, milliseconds each

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from onebitd.adapters import provider_process
from onebitd.adapters.process import Child, Guard
from onebitd.adapters.provider_process import ProviderResult, run_provider
from onebitd.core.errors import HandoffError
from onebitd.core.handoff import Reason
from onebitd.services import supervisor
from tests.harness import is_alive

OWN_OOM_SCORE_ADJ = int(Path("/proc/self/oom_score_adj").read_text())
ENV = {"PATH": os.environ["PATH"]}


class Run:
    """Runs scripts; `lines` is what they said, `stuck` those that could not be killed."""

    def __init__(self, guard: Guard, home: Path) -> None:
        self._guard = guard
        self.home = home
        self.lines: list[tuple[str, bytes]] = []
        self.stuck: list[Child] = []

    async def __call__(self, script: str, timeout_s: float = 20.0) -> ProviderResult:
        """Run a shell script."""
        return await self.argv(["/bin/sh", "-c", script], timeout_s)

    async def argv(self, argv: list[str], timeout_s: float = 20.0) -> ProviderResult:
        """Run a program in the test's directory's name: $HOME."""
        return await run_provider(
            argv,
            env=ENV | {"HOME": str(self.home)},
            timeout_s=timeout_s,
            guard=self._guard,
            on_line=lambda name, line: self.lines.append((name, line)),
            on_stuck=self.stuck.append,
        )

    async def wait_pid(self) -> int:
        """Wait until the script has written a pid into $HOME/pid, and return it."""
        path = self.home / "pid"
        while not path.exists() or not path.read_text().endswith("\n"):
            await trio.sleep(0.005)
        return int(path.read_text())


@pytest.fixture
def run(guard: Guard, tmp_path: Path) -> Run:
    return Run(guard, tmp_path)


@asynccontextmanager
async def failing(reason: Reason) -> AsyncIterator[list[str]]:
    """Expect a HandoffError for this reason; its detail is in the list afterwards."""
    detail: list[str] = []
    with pytest.raises(HandoffError) as caught:
        yield detail
    assert caught.value.reason is reason
    detail.append(caught.value.detail)


@pytest.mark.parametrize(
    ("script", "reported"),
    [
        ("echo working; echo '{\"prefill_ms\": 88.1}'", 88.1),
        ("echo '{\"prefill_ms\": 88.1}'; echo done", None),
        ("true", None),
        ("printf '{\"prefill_ms\": 5}'", 5.0),
        ("echo '{\"prefill_ms\": 5}' >&2", None),
        ("echo '{\"prefill_ms\": NaN}'", None),
    ],
)
async def test_run_provider_that_ends_well_returns_its_own_figure_if_it_gave_one(
    run: Run, script: str, reported: float | None
) -> None:
    """Only a last line on standard output counts; the wall time is always there."""
    result = await run(script)
    assert result.reported_ms == reported
    assert result.wall_ms > 0
    assert run.stuck == []


async def test_run_provider_output_goes_to_the_log_line_by_line(run: Run) -> None:
    """Both streams, each line once, with the stream's name."""
    await run("echo one; echo two; echo three >&2")
    assert sorted(run.lines) == [("stderr", b"three"), ("stdout", b"one"), ("stdout", b"two")]


async def test_run_provider_is_a_likelier_victim_than_the_decoder(run: Run) -> None:
    """When memory runs out the provider goes first: that costs one prompt a fallback."""
    await run("cat /proc/self/oom_score_adj")
    [(_, line)] = run.lines
    assert int(line) == max(OWN_OOM_SCORE_ADJ, 400)
    assert provider_process._OOM_SCORE_ADJ > supervisor._OOM_SCORE_ADJ


@pytest.mark.parametrize(
    ("script", "detail"),
    [
        ("echo first >&2; echo 'no XDNA device' >&2; echo >&2; exit 3", "status 3: no XDNA device"),
        ("exit 1", "status 1"),
        ("echo on stdout; exit 2", "status 2"),
        ("kill -SEGV $$", "signal 11 (SIGSEGV)"),
        ("printf 'half a line' >&2; exit 4", "status 4: half a line"),
    ],
)
async def test_run_provider_failure_says_status_and_its_last_word(
    run: Run, script: str, detail: str
) -> None:
    """`detail` is the exit and the last line of standard error that says something."""
    async with failing(Reason.PROVIDER_EXIT) as found:
        await run(script)
    assert found == [detail]


async def test_run_provider_program_that_is_missing_is_named(run: Run) -> None:
    """The operator reads which file is not there."""
    async with failing(Reason.PROVIDER_EXIT) as found:
        await run.argv(["/nowhere/prefill"])
    assert found == ["program /nowhere/prefill does not exist"]


async def test_run_provider_interpreter_that_is_missing_is_a_failed_run(run: Run) -> None:
    """A script whose #! names nothing ends the run with a reason too."""
    program = run.home / "prefill"
    program.write_text("#!/nowhere/python\n")
    program.chmod(0o700)
    async with failing(Reason.PROVIDER_EXIT) as found:
        await run.argv([str(program)])
    assert str(program) in found[0]


async def test_run_provider_past_its_limit_is_ended_and_says_what_it_was_doing(run: Run) -> None:
    """Time limit: SIGTERM; the detail names the setting and the last line of standard error."""
    async with failing(Reason.PROVIDER_TIMEOUT) as found:
        await run("echo 'waiting for the device' >&2; exec sleep 3600", timeout_s=0.2)
    assert found == ["no result within 0.2 s (provider.timeout_s): waiting for the device"]


async def test_run_provider_past_its_limit_that_ignores_sigterm_is_killed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A provider that does not listen has a grace, then SIGKILL."""
    monkeypatch.setattr(provider_process, "_TERM_GRACE_S", 0.1)
    script = "trap '' TERM; echo $$ > $HOME/pid; while :; do sleep 0.01; done"
    async with failing(Reason.PROVIDER_TIMEOUT):
        await run(script, timeout_s=0.3)
    assert not is_alive(await run.wait_pid())
    assert run.stuck == []


@pytest.mark.parametrize("trap", ["", "trap '' TERM; "])
async def test_run_provider_cancelled_kills_the_group_within_a_second(run: Run, trap: str) -> None:
    """The client has left: provider and its children are gone, however deaf, and soon."""
    script = f"{trap}sleep 3600 & echo $! > $HOME/pid; wait; while :; do sleep 0.01; done"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, script)
        grandchild = await run.wait_pid()
        nursery.cancel_scope.cancel()
    assert not is_alive(grandchild)
    assert run.stuck == []
    assert provider_process._CANCEL_GRACE_S + provider_process._KILL_GRACE_S < 1.0


async def test_run_provider_grandchild_left_in_the_group_is_gone_afterwards(run: Run) -> None:
    """The result stands, and nothing that could still hold the device is left."""
    result = await run("sleep 3600 & echo $! > $HOME/pid; echo '{\"prefill_ms\": 1}'")
    assert result.reported_ms == 1.0
    assert not is_alive(await run.wait_pid())


async def test_run_provider_pipe_held_outside_the_group_does_not_hold_the_result(run: Run) -> None:
    """A process of another session may keep the pipes; the run is over all the same."""
    script = "setsid sleep 3600 & echo $! > $HOME/pid; sleep 0.1; echo '{\"prefill_ms\": 2}'"
    try:
        with trio.fail_after(10):
            result = await run(script)
        assert result.reported_ms == 2.0
    finally:
        os.kill(await run.wait_pid(), 9)


async def test_run_provider_flood_of_output_is_bounded_and_the_last_line_counts(run: Run) -> None:
    """3 MB of lines and an endless one: 20 lines a stream are kept, the result is found."""
    script = (
        "yes 'a line of a hundred bytes' | head -c 1500000\n"
        "yes error | head -c 1500000 >&2\n"
        "head -c 1000000 /dev/zero | tr '\\0' x; echo\n"
        "echo '{\"prefill_ms\": 3}'"
    )
    longest = 0
    count = 0

    def take(name: str, line: bytes) -> None:
        nonlocal longest, count
        longest, count = max(longest, len(line)), count + 1

    result = await run_provider(
        ["/bin/sh", "-c", script],
        env=ENV,
        timeout_s=60.0,
        guard=run._guard,
        on_line=take,
        on_stuck=run.stuck.append,
    )
    assert result.reported_ms == 3.0
    assert longest <= 8192
    assert count > 300_000


class Undead:
    """While in force, no signal reaches a child's group: it plays uninterruptible sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._real = Child.signal
        self.sent: list[int] = []
        monkeypatch.setattr(Child, "signal", lambda child, number: self.sent.append(number))
        for name in ("_TERM_GRACE_S", "_CANCEL_GRACE_S", "_KILL_GRACE_S"):
            monkeypatch.setattr(provider_process, name, 0.05)

    async def bury(self, child: Child) -> None:
        """End what was stuck."""
        self._real(child, 9)
        await child.wait_gone()


async def test_run_provider_that_cannot_be_killed_is_handed_over_and_reported(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller must know: it may still use the device."""
    undead = Undead(monkeypatch)
    async with failing(Reason.PROVIDER_TIMEOUT) as found:
        await run("exec sleep 3600", timeout_s=0.1)
    assert undead.sent == [15, 9]
    [child] = run.stuck
    assert found == [f"the provider (pid {child.pid}) cannot be killed"]
    assert is_alive(child.pid)
    await undead.bury(child)


async def test_run_provider_cancelled_that_cannot_be_killed_is_handed_over(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cancel goes on its way, and the run is not forgotten."""
    undead = Undead(monkeypatch)
    with trio.move_on_after(0.1) as scope:
        await run("exec sleep 3600")
    assert scope.cancelled_caught
    [child] = run.stuck
    await undead.bury(child)


async def test_run_provider_python_program_gets_the_contract(run: Run) -> None:
    """No input, a private umask, the given environment and nothing else."""
    script = (
        "import os, sys\n"
        "assert sys.stdin.read() == ''\n"
        "assert os.umask(0) == 0o077\n"
        "assert set(os.environ) <= {'PATH', 'HOME', 'LC_CTYPE'}, os.environ\n"
    )
    await run.argv([sys.executable, "-I", "-S", "-c", script])
