"""`onebitctl status` as a program: the look at the listener, --all, --watch, and nobody there."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import pytest
import trio

from onebitd import client
from onebitd.adapters.unit_states import UnitState
from onebitd.client import NoDaemon
from onebitd.core import paths
from onebitd.core.recent_handoffs import RecentHandoffs, Typical
from onebitd.surfaces import cli, cli_status_all, cli_status_command, cli_units_words
from onebitd.surfaces.cli_status_all import Seen
from tests.surfaces.cli_child import PROGRAM, environment, run
from tests.surfaces.control_server import FakeView, control_app, make_status, serve_unix

PATIENCE_S: Final = 60.0
NOW = dt.datetime(2026, 5, 1, 12, 10, 0, tzinfo=dt.UTC)
RECENT = RecentHandoffs(50, Typical(46, 307, 101.2, 640.0, 540.0, 24_840.0))


class Fake:
    """A control socket or a public listener, at `address`, that gives everybody an answer."""

    def __init__(self, listener: socket.socket, answer: Callable[[], tuple[int, Any]]) -> None:
        self._listener = listener
        self._answer = answer
        self.asked = 0
        self.address = ":".join(map(str, listener.getsockname()))
        listener.listen(16)
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):  # it may only have looked who listens
                if not connection.recv(65536):
                    continue
                self.asked += 1
                status, document = self._answer()
                body = json.dumps(document).encode()
                head = f"HTTP/1.1 {status} OK\r\nContent-Length: {len(body)}\r\n\r\n"
                connection.sendall(head.encode() + body)


def public(status: int = 200) -> Fake:
    """Return a public listener on a port of its own."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    return Fake(listener, lambda: (status, {"status": "ok"}))


def daemon(path: Path, **changes: Any) -> Fake:
    """Return a control socket with this status."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.fspath(path))
    return Fake(listener, lambda: (200, make_status(**changes).to_json()))


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A user's runtime directory, with a short name."""
    with tempfile.TemporaryDirectory(prefix="ob") as name:
        yield Path(name)


def control(runtime: Path, name: str) -> Path:
    """Return an instance's control socket."""
    return runtime / "onebitd" / name / "control.sock"


def status(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `onebitctl status` to its end."""
    return trio.run(partial(run, "status", *words, **environ))


# --- the look at the listener -------------------------------------------------------------------


def test_status_listener_that_answers_is_fine_and_in_the_json(runtime: Path) -> None:
    """What the daemon says of itself is not taken on trust: its health is asked for."""
    path = runtime / "s"
    with public() as listener, daemon(path, listen=[listener.address]):
        done = status("--socket", os.fspath(path))
        assert done.returncode == 0
        assert re.match(
            rf"qwen: ready, .*, {listener.address}, answers in \d+\.\d ms\n", done.stdout
        )
        done = status("--socket", os.fspath(path), "--json")
        assert listener.asked == 2
        probe = json.loads(done.stdout)["probe"]
    assert (probe["url"], probe["status"]) == (f"http://{listener.address}/health", 200)
    assert probe["ms"] > 0


def test_status_ready_daemon_whose_listener_is_gone_is_exit_1_and_says_where(
    runtime: Path,
) -> None:
    """The sentence names the address; of two addresses the one that fails is told."""
    path = runtime / "s"
    with public() as listener:
        gone = listener.address
    with public() as other, daemon(path, listen=[other.address, gone]):
        done = status("--socket", os.fspath(path), COLUMNS="160")
        probe = json.loads(status("--socket", os.fspath(path), "--json").stdout)["probe"]
    assert done.returncode == 1
    assert f"ready, and http://{gone}/health fails: connection refused." in done.stdout
    assert (probe["url"], probe["error"]) == (f"http://{gone}/health", "connection refused")


def test_status_listener_that_is_busy_is_asked_about_again_before_it_is_a_fault(
    runtime: Path,
) -> None:
    """A decoder that dies between the two questions is restarted, and not a daemon that lies."""
    states = iter(["ready", "restarting"])
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.fspath(runtime / "s"))
    with public(503) as busy:
        answer = partial(make_status, listen=[busy.address])
        with Fake(listener, lambda: (200, answer(state=next(states)).to_json())):
            done = status("--socket", os.fspath(runtime / "s"))
    assert done.stdout.startswith("The decoder is being restarted")
    assert "fails" not in done.stdout


# --- all ----------------------------------------------------------------------------------------


@pytest.fixture
def alone(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide what runs on this machine: --all means every instance, also those of others."""
    root = f"{runtime}/onebitd"
    monkeypatch.setattr(client, "search_roots", lambda *_: [root])
    monkeypatch.setattr(cli_status_all, "_units", lambda uid: [])


@pytest.mark.usefixtures("alone")
async def test_status_all_is_a_block_for_each_and_the_worst_exit_status(
    runtime: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silent daemon holds up nobody, and is told like the others."""
    views = {"gemma": FakeView(), "qwen": FakeView()}
    views["gemma"].changes = {"instance": "gemma", "state": "restarting", "state_detail": "oom"}
    views["qwen"].changes = {"recent": RECENT}
    monkeypatch.setenv("COLUMNS", "86")
    with trio.fail_after(PATIENCE_S):
        async with contextlib.AsyncExitStack() as stack:
            for instance, view in views.items():
                path = control(runtime, instance)
                path.parent.mkdir(parents=True)
                await stack.enter_async_context(serve_unix(control_app(view), path))
            silent = control(runtime, "mute")
            silent.parent.mkdir()
            deaf = stack.enter_context(socket.socket(socket.AF_UNIX))
            deaf.bind(os.fspath(silent))
            deaf.listen()
            ended = [
                await trio.to_thread.run_sync(cli.main, ["status", "--all", *words])
                for words in ([], ["--json"])
            ]
    assert ended == [3, 3]
    page, listed = capsys.readouterr().out.split("{", 1)
    lines = page.split("\n")
    assert lines[:3] == [
        "gemma     restarting, up 2 h 5 min",
        "          The decoder is being restarted (oom); until it is ready, requests wait or",
        "          get 503. Its last words are in the log: the daemon's standard error.",
    ]
    mute = " ".join(" ".join(lines[3:-3]).split())
    assert mute == f"mute onebitd does not answer on {silent} within 2 s: look at its log"
    assert lines[-3:] == [
        "qwen      ready, up 2 h 5 min",
        "          last 50: 46 used, first byte 101.2 ms, about 25 s saved; idle, 0 waiting",
        "",
    ]
    found = [json.loads(line) for line in f"{{{listed}".splitlines()]
    assert [one["instance"] for one in found] == ["gemma", "mute", "qwen"]
    assert (found[1]["state"], "does not answer" in found[1]["error"]) == (None, True)
    assert found[2]["recent"]["used"]["count"] == 46


def test_status_all_with_one_instance_named_is_a_usage_error() -> None:
    """Which of the two was meant nobody can know."""
    done = status("--all", "-i", "x")
    assert (done.returncode, done.stdout) == (2, "")
    assert "leave out -i and --socket" in done.stderr


@pytest.mark.usefixtures("alone")
def test_status_all_with_nobody_there_is_exit_3(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same words as without --all."""
    monkeypatch.setattr(client, "_safe_roots", lambda *_: ([], None))
    assert cli.main(["status", "--all"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("onebitctl: no onebitd runs here: start it with ")


FAILED = UnitState(
    *("broken", False, "failed", "failed", True, "exit-code", False, 4, NOW.timestamp() - 200)
)
RESTING = UnitState("asleep", listens=True)


def test_status_all_has_units_that_should_run_and_leaves_sleeping_ones_alone(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look at a service must not start it: its socket is not connected to."""
    path = control(runtime, "asleep")
    monkeypatch.setattr(paths, "SYSTEM_RUNTIME", f"{runtime}/onebitd")
    monkeypatch.setattr(cli_status_all, "_units", lambda uid: [FAILED, RESTING])
    monkeypatch.setattr(client, "search_roots", lambda *_: [f"{runtime}/onebitd"])
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        listener.settimeout(0)
        look = cli_status_all.look()
        with pytest.raises(BlockingIOError):
            listener.accept()
    page = cli_status_all.all_page(cli_status_all._see_all(NOW), NOW, colour=False, columns=100)
    assert page.split("\n") == [
        "asleep    rests, and is started by the first request",
        "broken    failed 3 min 20 s ago (exit status 4, the decoder could not be started or kept"
        " running);",
        "          `systemctl start onebitd@broken`, `journalctl -u onebitd@broken`",
    ]
    assert look.exit_status == 3
    assert [one.get("unit", {}).get("active") for one in look.documents] == ["inactive", "failed"]


def test_all_page_is_one_to_three_lines_each_within_its_columns() -> None:
    """However long a problem is, and however many there are."""
    provider = make_status().provider
    bad = {
        **make_status(recent=RECENT).to_json(),
        "probe": {"url": "http://x/health", "status": None, "error": "refused"},
        "provider": {
            **{name: getattr(provider, name) for name in provider.__dataclass_fields__},
            "breaker": "open",
            "breaker_detail": "word " * 60,
        },
    }
    denied = "permission denied: /run/onebitd/b/control.sock is for the group onebitd: join it with"
    seen = [Seen("a", "/a", bad, None, 1), Seen("b" * 20, "/b", None, f"{denied} `sudo x`", 4)]
    for columns in (60, 80, 160):
        page = cli_status_all.all_page(seen, NOW, colour=False, columns=columns)
        lines = page.split("\n")
        assert max(map(len, lines)) <= columns
        first = next(n for n, line in enumerate(lines) if line.startswith("b"))
        assert first == 3
        assert lines[2].endswith("…")
        assert len(lines) - first <= 3
    painted = cli_status_all.all_page(seen, NOW, colour=True, columns=80)
    assert "\x1b[32mready\x1b[0m, up" in painted
    assert "\x1b[31mpermission\x1b[0m denied" in painted


# --- watch --------------------------------------------------------------------------------------


class Watcher:
    """A child on a terminal of its own, and what the terminal shows."""

    def __init__(self, runtime: Path, *words: str) -> None:
        self.ours, theirs = pty.openpty()
        self.resize(24, 80)
        self.process = subprocess.Popen(
            [*PROGRAM, *words],
            env=environment({"XDG_RUNTIME_DIR": os.fspath(runtime), "TERM": "xterm"}),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        self.seen = ""

    def resize(self, lines: int, columns: int) -> None:
        """Give the terminal another size."""
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def until(self, pattern: str) -> str:
        """Read until what has come matches; return it to the match's end, the rest is for later."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := re.search(pattern, self.seen, re.DOTALL)) is None:
            left_s = max(0.0, deadline - time.monotonic())
            assert select.select([self.ours], [], [], left_s)[0], self.seen
            self.seen += os.read(self.ours, 65536).decode()
        seen, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return seen

    def rest(self) -> str:
        """Read what comes until the child has closed the terminal."""
        with contextlib.suppress(OSError):
            while data := os.read(self.ours, 65536):
                self.seen += data.decode()
        return self.seen

    def close(self) -> None:
        """End the child, if it has not ended."""
        self.process.kill()
        self.process.wait()
        os.close(self.ours)


@contextlib.contextmanager
def watching(runtime: Path, *words: str) -> Iterator[Watcher]:
    """Run `onebitctl WORDS` on a terminal."""
    found = Watcher(runtime, *words)
    try:
        yield found
    finally:
        found.close()


def test_watch_draws_in_place_survives_a_restart_and_gives_the_terminal_back(
    runtime: Path,
) -> None:
    """Daemon there, gone, there again; another size; Ctrl-C is 0 with the cursor shown."""
    path = control(runtime, "qwen")
    with watching(runtime, "-i", "qwen", "status", "--watch", "0.2") as child:
        with daemon(path, recent=RECENT):
            first = child.until(r"last 50.*qwen3-4b.*\x1b\[J")
            assert first.startswith("\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[H")
            again = child.until(r"\x1b\[J.*\x1b\[J")
            assert "\x1b[2J" not in first + again  # it would flicker
            child.resize(6, 160)
            child.process.send_signal(signal.SIGWINCH)
            child.until(r"provider\x1b\[0m  idle[^\n]*\x1b\[K\r\n[^\n]*…")
        child.until(r"no onebitd runs for the instance qwen: start it")
        with daemon(path):
            child.until(r"qwen: \x1b\[32mready")
            child.process.send_signal(signal.SIGINT)
            assert child.process.wait(PATIENCE_S) == 0
        assert child.rest().endswith("\x1b[?7h\x1b[?25h\x1b[?1049l")


def test_watch_that_is_stopped_or_terminated_gives_the_terminal_back(runtime: Path) -> None:
    """Ctrl-Z, `kill` and a closed session leave no terminal without a cursor."""
    entered, left = re.escape("\x1b[?1049h\x1b[?25l"), re.escape("\x1b[?25h\x1b[?1049l")
    with watching(runtime, "-i", "none", "status", "--watch", "600") as child:
        child.until(r"no onebitd runs for")
        child.process.send_signal(signal.SIGTSTP)
        child.until(left)
        with continued(child.process.pid):
            child.until(rf"{entered}.*no onebitd runs for")  # the page is drawn again at once
        child.process.terminate()
        assert child.process.wait(PATIENCE_S) == 128 + signal.SIGTERM
        assert re.search(rf"{left}$", child.rest())


@contextlib.contextmanager
def continued(pid: int) -> Iterator[None]:
    """Continue a process, whenever it stops."""
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(0.02):
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_watch_into_a_pipe_is_a_page_for_each_interval(
    runtime: Path, words: tuple[str, ...]
) -> None:
    """Pages with an empty line between them, objects with none; Ctrl-C is 0."""
    with daemon(control(runtime, "qwen")):
        child = subprocess.Popen(
            [*PROGRAM, "-i", "qwen", "status", "--watch", "0.1", *words],
            env=environment({"XDG_RUNTIME_DIR": os.fspath(runtime)}),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        with child, child.stdout as output:
            if words:
                shown = [json.loads(output.readline())["instance"] for _ in range(2)]
                assert shown == ["qwen", "qwen"]
            else:
                assert output.readline().startswith("qwen: ready")
                while output.readline() != "\n":
                    pass
                assert output.readline().startswith("qwen: ready")
            child.send_signal(signal.SIGINT)
            output.read()
            assert child.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon", "1e9"])
def test_watch_seconds_that_cannot_be_are_a_usage_error(seconds: str) -> None:
    """A busy loop, or one that never looks again, is nobody's wish."""
    with pytest.raises(argparse.ArgumentTypeError, match=r"from 0\.1 to 86400"):
        cli_status_command._seconds(seconds)


def watched(monkeypatch: pytest.MonkeyPatch, *units: UnitState) -> cli_status_command._Watched:
    """Return the looks of `status -i qwen` on a machine with these units and nobody there."""

    def choose(*_: object) -> str:
        raise NoDaemon("nobody: start one")

    monkeypatch.setattr(cli_status_command, "_units_of", lambda name: list(units))
    monkeypatch.setattr(client, "choose_socket", choose)
    return cli_status_command._Watched(argparse.Namespace(instance="qwen", socket=None))


def test_look_at_nobody_says_what_systemd_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state, its end, how to start it and where its log is; without a unit the plain words."""
    found = watched(monkeypatch, FAILED._replace(instance="qwen", exit_time=None)).look()
    assert found.exit_status == 3
    assert found.page(80, False) == (
        "no onebitd runs for the instance qwen: onebitd@qwen.service has failed (exit status 4, the"
        " decoder could not be started or kept running); start it with"
        " `systemctl start onebitd@qwen`, its log: `journalctl -u onebitd@qwen`"
    )
    assert watched(monkeypatch).look().page(80, False) == "nobody: start one"
    assert watched(monkeypatch).look().documents == [
        {"instance": "qwen", "state": None, "error": "nobody: start one"}
    ]


def test_look_of_what_cannot_be_understood_says_so_in_one_sentence() -> None:
    """A daemon of another version may mean something else by a name; it is no crash, and no 0."""
    now = dt.datetime.now(dt.UTC)
    status: dict[str, Any] = {"version": "9.0", "state": "resting", "uptime_s": "long"}
    found = cli_status_command.look_of(status, now)
    words = "does not understand what onebitd 9.0 says of itself"
    assert words in found.page(80, False)
    assert found.exit_status == 1
    page = cli_status_all.all_page(
        [Seen("qwen", "/s", status, None, 1)], now, colour=False, columns=200
    )
    assert words in page


def test_watch_does_not_start_a_service_that_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket is still there, and connecting to it would undo `systemctl stop`."""
    found = watched(monkeypatch, RESTING._replace(instance="qwen"))
    found._pid = 1 << 30  # no such process
    monkeypatch.setattr(client, "choose_socket", lambda *_: pytest.fail("it was connected to"))
    assert "rests, and is started by the first request" in found.look().page(80, False)


@pytest.mark.parametrize(
    ("unit", "words"),
    [
        (FAILED, "has failed 3 min 20 s ago (exit status 4, the decoder could not be started or"),
        (FAILED._replace(exit_status=2), "has failed 3 min 20 s ago (exit status 2, the command"),
        (FAILED._replace(exit_status=243), "has failed 3 min 20 s ago (exit status 243)"),
        (
            FAILED._replace(killed=True, exit_status=9, result="oom-kill"),
            "has failed 3 min 20 s ago (signal 9, oom-kill)",
        ),
        (FAILED._replace(exit_status=None, result="timeout"), "has failed (timeout)"),
        (
            FAILED._replace(active="activating", sub="auto-restart", exit_status=1),
            "waits for its next start 3 min 20 s ago (exit status 1)",
        ),
        (UnitState("x", active="activating", sub="start"), "is starting"),
        (UnitState("x", active="deactivating"), "is stopping"),
        (UnitState("x", active="active"), "runs, and has no control socket that can be found"),
        (UnitState("x", enabled=True), "is stopped"),
        (UnitState("x"), "is stopped, and not enabled"),
        (RESTING, "rests, and is started by the first request"),
    ],
)
def test_unit_words_say_state_and_last_exit(unit: UnitState, words: str) -> None:
    """What an operator would look up with systemctl status."""
    assert cli_units_words.unit_words(unit, NOW.timestamp()).startswith(words)


def test_why_nobody_runs_of_several_units_tells_each_and_helps_with_the_first() -> None:
    """And of a user's own manager with its switch; one that starts needs no start."""
    units = [FAILED._replace(of_user=True), UnitState("x", active="activating", sub="start")]
    text = cli_units_words.why_nobody_runs(None, units, NOW.timestamp())
    assert text.startswith("no onebitd runs here: onebitd@broken.service has failed")
    assert "; onebitd@x.service is starting. For broken; " in text
    assert text.endswith("`journalctl --user -u onebitd@broken`")
    alone = cli_units_words.why_nobody_runs("x", units[1:], NOW.timestamp())
    assert alone == (
        "no onebitd runs for the instance x: onebitd@x.service is starting;"
        " its log: `journalctl -u onebitd@x`"
    )
