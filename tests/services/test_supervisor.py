"""The supervisor with real child processes: the stand-in decoder and small scripts."""

# ruff: noqa: ASYNC110 - real processes, milliseconds each

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import trio
import trio.testing

from onebitd.adapters.process import Child
from onebitd.core import state_file
from onebitd.core.backend_state import BackendState
from onebitd.core.errors import BackendFailed, RequestError
from onebitd.core.handoff import Reason
from onebitd.core.policy import erase_heals
from onebitd.core.state_layout import Layout
from onebitd.services import supervisor as module
from onebitd.services.supervisor import BackendFacts, Supervisor
from tests.harness import is_alive
from tests.services.rig import Home, home, running

SHELL = ["/bin/sh", "-c"]


@pytest.fixture
def place() -> Iterator[Home]:
    with home() as made:
        yield made


def state_of(supervisor: Supervisor) -> BackendState:
    """Read the state out of the type checker's sight: it takes an attribute for a constant."""
    return supervisor.state


def layout_of_example(place: Home) -> Layout:
    """Return the layout of the state that providers are shown."""
    path = place.slots.example()
    assert path is not None
    return state_file.parse(Path(path).read_bytes()).layout


async def failure(supervisor: Supervisor) -> str:
    """Run a supervisor that must fail; return what it says."""
    with trio.fail_after(30):
        with pytest.raises(BackendFailed) as caught:
            await supervisor.run()
    assert supervisor.pid is None
    return str(caught.value)


async def test_supervisor_decoder_that_starts_becomes_ready_and_tells_its_layout(
    place: Home,
) -> None:
    """READY with context, build and the layout learned from a state the decoder saved itself."""
    states: list[BackendState] = []
    supervisor = place.supervisor(on_change=lambda: states.append(supervisor.state))
    assert state_of(supervisor) is BackendState.STOPPED
    async with running(supervisor) as facts:
        assert state_of(supervisor) is BackendState.READY
        assert (facts.generation, facts.ctx_size) == (0, 2048)
        assert facts.build == "b10434-standin"
        assert facts.unsupported is None
        assert facts.layout is not None
        assert (facts.layout.version, erase_heals(facts.layout)) == (2, True)
        assert supervisor.pid is not None
        assert is_alive(supervisor.pid)
        rss = supervisor.rss_bytes()
        assert rss is not None
        assert rss > 1_000_000
        assert supervisor.devices == ["HRX0"]
        assert await supervisor.wait_ready(0.0) is facts
        assert os.listdir(place.slots.path) == ["example.state"], "the probe's state file is kept"
        assert layout_of_example(place) == facts.layout
        assert await facts.server.save("probe") == 0, "and its slot erased"
        place.slots.remove("probe")
    assert list(dict.fromkeys(states)) == [
        BackendState.STARTING,
        BackendState.LOADING,
        BackendState.READY,
        BackendState.STOPPING,
        BackendState.STOPPED,
    ]
    assert [supervisor.facts, supervisor.pid, supervisor.rss_bytes()] == [None] * 3
    assert os.listdir(place.slots.path) == [], "the example goes with its decoder"


async def test_supervisor_socket_of_an_earlier_decoder_is_in_nobodys_way(place: Home) -> None:
    """llama-server leaves its socket behind and does not start where one lies."""
    place.socket.touch()
    async with running(place.supervisor()):
        assert place.socket.is_socket()


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (
            "echo 'loading'; echo 'error: no such model' >&2; echo bye; exit 1",
            "error: no such model",
        ),
        ("echo '0.00.001.002 E srv: cannot bind' >&2; exit 1", "status 1: srv: cannot bind"),
        (
            "echo 'x.cpp:1: error GGML_ASSERT(a) failed'; echo 'abort in libc'; kill -ABRT $$",
            "signal 6 (SIGABRT)",
        ),
        ("exit 0", "could not be started: status 0;"),
    ],
)
async def test_supervisor_decoder_that_never_gets_ready_fails_with_its_last_error_line(
    place: Home, script: str, says: str
) -> None:
    """No restart: what never worked will not work; the message says where to look."""
    supervisor = place.supervisor(place.launch(argv=[*SHELL, script]))
    message = await failure(supervisor)
    assert says in message
    assert "onebitd --print-backend" in message
    assert supervisor.restarts == 0
    assert supervisor.last_exit is not None


async def test_supervisor_first_assertion_is_the_cause_whatever_follows(place: Home) -> None:
    """The backtrace behind an assertion has words like error too; the cause stands first."""
    script = "echo 'GGML_ASSERT(n > 0) failed'; echo 'backtrace: error'; exit 134"
    message = await failure(place.supervisor(place.launch(argv=[*SHELL, script])))
    assert "GGML_ASSERT(n > 0) failed" in message


@pytest.mark.parametrize("kind", ["missing", "bad_interpreter"])
async def test_supervisor_program_that_cannot_run_is_named(place: Home, kind: str) -> None:
    """The operator reads which file it is."""
    program = place.path / "llama-server"
    if kind == "bad_interpreter":
        program.write_text("#!/nowhere/sh\n")
        program.chmod(0o700)
    message = await failure(place.supervisor(place.launch(argv=[str(program)])))
    assert str(program) in message


async def test_supervisor_load_that_takes_too_long_is_given_up(place: Home) -> None:
    """backend.load_timeout_s is named, and the decoder is gone."""
    supervisor = place.supervisor(place.launch("--load-delay", "60"), load_timeout_s=1.0)
    message = await failure(supervisor)
    assert "no answer within 1 s (backend.load_timeout_s) (signal 9 (SIGKILL))" in message


async def test_supervisor_slow_load_is_waited_for(place: Home) -> None:
    """503 while it loads is not a fault."""
    async with running(place.supervisor(place.launch("--load-delay", "0.5"))):
        pass


async def test_supervisor_decoder_that_hangs_up_while_it_starts_is_not_waited_for_for_ever(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives, answers /health and breaks everything else off: given up (the bug: it hung)."""
    monkeypatch.setattr(module, "_NOTICE_S", 0.1)
    script = (
        "import socket, sys\n"
        "listener = socket.socket(socket.AF_UNIX)\n"
        "listener.bind(sys.argv[1]); listener.listen()\n"
        "while True:\n"
        "    peer, _ = listener.accept()\n"
        "    if b'/health' in peer.recv(65536):\n"
        "        peer.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\n{}')\n"
        "    peer.close()\n"
    )
    argv = [sys.executable, "-I", "-S", "-c", script, str(place.socket)]
    message = await failure(place.supervisor(place.launch(argv=argv)))
    assert "not usable after its start" in message


async def test_supervisor_decoder_without_slots_serves_but_takes_no_handoff(place: Home) -> None:
    """A decoder that cannot save its slot is ready, and says why nothing is handed to it."""
    launch = place.launch()
    at = list(launch.argv).index("--slot-save-path")
    argv = [*launch.argv[:at], *launch.argv[at + 2 :]]
    async with running(place.supervisor(place.launch(argv=argv))) as facts:
        assert facts.layout is None
        assert facts.unsupported is not None
        assert "cannot save its slot" in facts.unsupported
        assert place.slots.example() is None


async def crash(supervisor: Supervisor) -> BackendFacts:
    """Kill the decoder and wait for the next one."""
    assert supervisor.facts is not None
    assert supervisor.pid is not None
    generation = supervisor.facts.generation
    os.kill(supervisor.pid, signal.SIGSEGV)
    with trio.fail_after(30):
        return await supervisor.wait_restarted(generation)


async def test_supervisor_decoder_that_crashes_is_restarted(place: Home) -> None:
    """A new generation with a new process; what happened is on record."""
    supervisor = place.supervisor()
    async with running(supervisor) as first:
        pid = supervisor.pid
        second = await crash(supervisor)
        assert (first.generation, second.generation, supervisor.restarts) == (0, 1, 1)
        assert supervisor.pid != pid
        assert supervisor.last_exit is not None
        assert supervisor.last_exit.reason == "signal 11 (SIGSEGV)"
        assert (await crash(supervisor)).generation == 2


async def test_wait_restarted_while_the_new_one_loads_leaves_it_alone(place: Home) -> None:
    """A new decoder has no socket yet; that is no reason to kill it."""
    supervisor = place.supervisor()
    async with running(supervisor) as first:
        supervisor.kill("a test")
        with trio.fail_after(30):
            while supervisor.state is not BackendState.LOADING:
                await trio.sleep(0.001)
            assert not place.socket.exists()
            second = await supervisor.wait_restarted(first.generation)
        assert (second.generation, supervisor.restarts) == (1, 1)


async def test_wait_restarted_socket_removed_under_a_living_decoder_replaces_it(
    place: Home,
) -> None:
    """Nobody can reach it any more, so it is no use that it lives."""
    supervisor = place.supervisor()
    async with running(supervisor) as first:
        place.socket.unlink()
        with trio.fail_after(30):
            second = await supervisor.wait_restarted(first.generation)
        assert second.generation == 1
        assert supervisor.last_exit is not None
        assert supervisor.last_exit.reason.startswith("its socket was removed")


async def test_supervisor_state_is_backoff_between_decoders(place: Home) -> None:
    """A pause before each restart; requests that wait are not refused during it."""
    states: list[BackendState] = []
    supervisor = place.supervisor(on_change=lambda: states.append(supervisor.state))
    async with running(supervisor):
        await crash(supervisor)
    assert states[3:6] == [BackendState.BACKOFF, BackendState.STARTING, BackendState.LOADING]


async def test_supervisor_end_of_a_decoder_is_told_as_soon_as_it_is_seen(place: Home) -> None:
    """Whoever asks while its last words are still on their way hears how it ended."""
    supervisor = place.supervisor()
    told: list[str | None] = []

    def note() -> None:
        if state_of(supervisor) is BackendState.BACKOFF:
            told.append(None if supervisor.last_exit is None else supervisor.last_exit.brief)

    async with running(supervisor):
        supervisor._on_change = note
        await crash(supervisor)
    assert told == ["signal 11 (SIGSEGV)"]


@pytest.mark.parametrize("restart_max", [0, 1])
async def test_supervisor_decoder_that_dies_too_often_is_given_up(
    place: Home, restart_max: int
) -> None:
    """Beyond restart_max: BackendFailed with count and cause, FAILED, and nobody waits any more."""
    supervisor = place.supervisor(restart_max=restart_max)
    waited: list[RequestError] = []

    async def wait() -> None:
        with pytest.raises(RequestError) as caught:
            await supervisor.wait_restarted(restart_max)
        waited.append(caught.value)

    with trio.fail_after(30):
        with pytest.RaisesGroup(BackendFailed) as caught:
            async with trio.open_nursery() as nursery:
                await nursery.start(supervisor.run)
                for _ in range(restart_max):
                    await crash(supervisor)
                nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.shield = True
                assert supervisor.pid is not None
                os.kill(supervisor.pid, signal.SIGKILL)
                while not waited:
                    await trio.sleep(0.005)
    [error] = caught.value.exceptions
    assert f"died {restart_max + 1} times" in str(error)
    assert "signal 9 (SIGKILL)" in str(error)
    assert state_of(supervisor) is BackendState.FAILED
    assert waited[0].status == 503
    with pytest.raises(RequestError, match="not running"):
        await supervisor.wait_ready()


async def test_supervisor_kill_restarts_for_a_reason_that_is_kept(place: Home) -> None:
    """Only the first reason counts; the exit says both why and how."""
    supervisor = place.supervisor()
    supervisor.kill("there is none yet")
    async with running(supervisor) as facts:
        supervisor.kill("its slot cannot be trusted")
        supervisor.kill("another reason")
        with trio.fail_after(30):
            await supervisor.wait_restarted(facts.generation)
        assert supervisor.last_exit is not None
        assert supervisor.last_exit.reason == "its slot cannot be trusted (signal 9 (SIGKILL))"


async def test_wait_ready_first_load_is_refused_with_retry_after_when_there_is_no_patience(
    place: Home,
) -> None:
    """Nobody knows how long a first load takes: 503 now, or wait for however long it takes."""
    supervisor = place.supervisor(place.launch("--load-delay", "0.7"))
    with pytest.raises(RequestError, match="Loading model"):
        await supervisor.wait_ready(5.0)  # the loop has not come to its start yet
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        await trio.testing.wait_all_tasks_blocked()
        assert supervisor.expected_ready_s() is None
        with pytest.raises(RequestError, match="Loading model") as caught:
            await supervisor.wait_ready(15.0)
        error = caught.value
        assert (error.status, error.reason) == (503, Reason.BACKEND_DOWN)
        assert error.retry_after_s == 5
        with trio.fail_after(30):
            assert await supervisor.wait_ready() is supervisor.facts
        nursery.cancel_scope.cancel()
    with pytest.raises(RequestError, match="not running"):
        await supervisor.wait_ready()


@pytest.mark.parametrize("clients_wait", [True, False])
async def test_wait_ready_for_client_waits_for_a_load_only_where_clients_are_held(
    place: Home, clients_wait: bool
) -> None:
    """Clients of a passed socket wait from before the first start; others hear 503 at once."""
    supervisor = place.supervisor(place.launch("--load-delay", "0.7"), clients_wait=clients_wait)
    got: list[BackendFacts | RequestError] = []

    async def ask() -> None:
        try:
            got.append(await supervisor.wait_ready_for_client())
        except RequestError as error:
            got.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await nursery.start(supervisor.run)
        await trio.testing.wait_all_tasks_blocked()
        assert got == [supervisor.facts] if clients_wait else isinstance(got[0], RequestError)
        nursery.cancel_scope.cancel()


async def test_wait_ready_restart_that_will_be_short_is_waited_for(place: Home) -> None:
    """The last load tells how long; too long for the patience is refused, and says how long."""
    supervisor = place.supervisor()
    async with running(supervisor) as facts:
        assert supervisor.pid is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        while state_of(supervisor) is not BackendState.BACKOFF:
            await trio.sleep(0.002)
        expected_s = supervisor.expected_ready_s()
        assert expected_s is not None
        assert 0 < expected_s < 15
        with pytest.raises(RequestError, match="restarting") as caught:
            await supervisor.wait_ready(0.001)
        assert caught.value.retry_after_s is not None
        assert caught.value.retry_after_s >= 1
        with trio.fail_after(30):
            assert (await supervisor.wait_ready(15.0)).generation == facts.generation + 1


async def test_wait_restarted_decoder_that_only_hung_up_is_not_waited_for(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives on: 502 after a moment, not a wait for ever."""
    monkeypatch.setattr(module, "_NOTICE_S", 0.05)
    supervisor = place.supervisor()
    async with running(supervisor) as facts:
        with pytest.raises(RequestError, match="hung up on this request") as caught:
            await supervisor.wait_restarted(facts.generation)
        assert (caught.value.status, caught.value.reason) == (502, Reason.BACKEND_DOWN)


async def test_supervisor_cancelled_while_it_loads_stops_the_child(place: Home) -> None:
    """A stop does not wait for a load."""
    supervisor = place.supervisor(place.launch("--load-delay", "60"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        while supervisor.pid is None:
            await trio.sleep(0.005)
        pid = supervisor.pid
        nursery.cancel_scope.cancel()
    assert not is_alive(pid)
    assert state_of(supervisor) is BackendState.STOPPED


async def test_supervisor_decoder_that_ignores_sigterm_is_killed(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its grace."""
    monkeypatch.setattr(module, "_STOP_TERM_GRACE_S", 0.1)
    supervisor = place.supervisor(place.launch("--ignore-sigterm"))
    async with running(supervisor):
        pid = supervisor.pid
    assert pid is not None
    assert not is_alive(pid)


async def test_supervisor_grandchild_that_holds_the_pipe_does_not_hide_the_end(
    place: Home,
) -> None:
    """A wrapper's child may hold the pipe open; it is killed with the group."""
    script = "sleep 3600 & echo 'error: wrapper failed'; exit 9"
    message = await failure(place.supervisor(place.launch(argv=[*SHELL, script])))
    assert "status 9: error: wrapper failed" in message


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("0.00.001.002 E srv: boom", "error"),
        ("0.00.001.002 W srv: careful", "warning"),
        ("0.00.001.002 I srv: hello", "debug"),
        ("0.00.001.002 D srv: detail", "debug"),
        ("no prefix, an error", "debug"),
        ("0.00.001.002 W srv: CORS is on", "debug"),
        ("0.00.001.002 W srv: ---------------", "debug"),
    ],
)
async def test_supervisor_decoders_lines_are_logged_at_their_own_level(
    place: Home, line: str, level: str
) -> None:
    """Its letter decides; warnings that do not apply here are details."""
    with structlog.testing.capture_logs() as logs:
        launch = place.launch(argv=[*SHELL, f"echo '{line}'; exit 1"])
        await failure(place.supervisor(launch))
    found = [(entry["log_level"], entry["line"]) for entry in logs if "output" in entry["event"]]
    assert found == [(level, f"llama-server: {line}")]


def oom_score_adj(pid: int | None) -> int:
    """Return what the kernel adds to the badness of a process."""
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


async def test_supervisor_decoder_is_the_preferred_victim_when_memory_runs_out(place: Home) -> None:
    """The daemon survives it and starts a new one; it does not take that over from the unit."""
    supervisor = place.supervisor()
    async with running(supervisor):
        found = oom_score_adj(supervisor.pid)
    assert found == max(oom_score_adj(os.getpid()), 300)


async def test_supervisor_flood_of_lines_is_cut_short_and_counted_at_its_end(place: Home) -> None:
    """500 lines, then how many more there were; the last error is the reason all the same."""
    flood = "yes '0.00.001.002 E srv: boom' | head -n 20000"
    script = f"{flood}; echo '0.00.001.003 E srv: the last word'; exit 1"
    with structlog.testing.capture_logs() as logs:
        message = await failure(place.supervisor(place.launch(argv=[*SHELL, script])))
    assert "status 1: srv: the last word" in message
    lines = [entry for entry in logs if entry["event"] == "backend_output"]
    notes = [entry for entry in logs if entry["event"] == "output_suppressed"]
    assert 500 <= len(lines) < 5000
    assert len(lines) + sum(note["count"] for note in notes) == 20001
    assert notes[-1]["line"] == f"{notes[-1]['count']} lines of the decoder were left out"
    assert {(note["source"], note["log_level"]) for note in notes} == {("decoder", "warning")}


async def test_kill_decoder_that_does_not_die_is_left_behind_and_replaced(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits in the kernel for a device outlives SIGKILL; requests do not wait for it."""
    monkeypatch.setattr(module, "_STOP_KILL_GRACE_S", 0.2)
    supervisor = place.supervisor()
    async with running(supervisor) as facts:
        stuck = supervisor._child
        assert stuck is not None
        with structlog.testing.capture_logs() as logs, trio.fail_after(30):
            with monkeypatch.context() as patched:
                patched.setattr(Child, "signal", lambda self, number: None)
                supervisor.kill("it hung: a test")
                while not supervisor.last_exit:
                    await trio.sleep(0.01)
            assert is_alive(stuck.pid)
            found = await supervisor.wait_restarted(facts.generation)
        assert found.generation == facts.generation + 1
        assert supervisor.pid != stuck.pid
        assert supervisor.last_exit.reason == "it hung: a test (it does not die)"
        assert "backend_stuck" in [one["event"] for one in logs]
        assert await stuck.stop(term_grace_s=0, kill_grace_s=10)
