"""`onebitctl` as a program: a child against a served control socket."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import trio

from onebitd import __version__
from onebitd.core.control_api import ProviderReset, ReloadAnswer, RequestInFlight
from onebitd.core.errors import ConfigError
from onebitd.surfaces import cli
from tests.surfaces.cli_child import (
    INSTANCE,
    PROGRAM,
    Served,
    environment,
    modules_loaded,
    run,
    serving,
)

UNWANTED = ("trio", "httpx2", "quart", "hypercorn", "structlog", "numpy", "h11", "sdnotify")


@pytest.fixture
async def served() -> AsyncGenerator[Served]:
    """The control app on the socket of an instance."""
    async with serving() as found:
        yield found


async def test_status_ready_daemon_is_a_page_and_exit_0(served: Served) -> None:
    """The page goes to stdout, nothing to stderr, no colour to a pipe."""
    done = await served.run("status")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("qwen: ready, up 2 h 5 min\n")
    assert "\x1b" not in done.stdout


async def test_status_degraded_daemon_is_exit_1_with_the_sentence_first(served: Served) -> None:
    """A script needs only the exit status, a person only the first line; --json has it too."""
    served.view.changes = {"state": "restarting", "state_detail": "signal 11"}
    done = await served.run("status")
    assert done.returncode == 1
    assert done.stdout.startswith("The decoder is being restarted (signal 11)")
    done = await served.run("status", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout) == served.view.status().to_json() | {"probe": None}
    assert done.stdout.count("\n") == 1


async def test_provider_reset_prints_what_it_cleared(served: Served) -> None:
    """Strikes, and whether the provider was out of service; nothing to clear is fine too."""
    done = await served.run("provider", "reset")
    assert (done.returncode, done.stdout, done.stderr) == (0, "nothing to clear\n", "")
    served.view.resets.append(ProviderReset(3, "open", 2, "of no use"))
    done = await served.run("provider", "reset")
    said = (
        "cleared 3 strikes, 2 failures; the provider is back in service;"
        " prompts are handed over again\n"
    )
    assert (done.returncode, done.stdout) == (0, said)
    done = await served.run("provider", "reset", "--json")
    assert json.loads(done.stdout) == {
        "strikes": 3,
        "breaker": "open",
        "failures": 2,
        "route_off": "of no use",
    }


async def test_requests_are_a_table_and_cancel_ends_one(served: Served) -> None:
    """The id that the table shows is the one that cancel takes; one that is gone is status 1."""
    done = await served.run("requests")
    assert (done.returncode, done.stdout, done.stderr) == (0, "nothing is in flight\n", "")
    one = RequestInFlight("a'b", "POST", "/v1/chat/completions", "decode", 2.13, True, 307, 12)
    served.view.serving = [one, RequestInFlight("x" * 36, "GET", "/v1/\u4e16/models", "pass", 61.0)]
    done = await served.run("requests")
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert lines[1].split() == ["decode", "2.1", "s", "307", "12", one.path, "a'b"]
    done = await served.run("requests", "--json")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        one.to_json() for one in served.view.serving
    ]
    done = await served.run("requests", LC_ALL="C", PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 3)
    done = await served.run("cancel", "a'b")
    assert (done.returncode, done.stdout, done.stderr) == (0, "cancelled 1 request\n", "")
    done = await served.run("cancel", "--json", "a'b")
    assert (done.returncode, done.stdout) == (1, "")
    assert 'no request "a\'b" is in flight' in done.stderr
    served.view.serving *= 2
    done = await served.run("cancel", "--json", "x" * 36)
    assert json.loads(done.stdout) == {"cancelled": 2}


async def test_config_shows_values_and_sources(served: Served) -> None:
    """As a table, and as the daemon's own object."""
    done = await served.run("config")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split() for line in done.stdout.splitlines()][1] == [
        "http.port",
        "default",
        "8000",
    ]
    done = await served.run("config", "--json")
    assert json.loads(done.stdout) == served.view.config()


async def test_lock_asks_the_daemon_for_its_file_and_names_the_holder(served: Served) -> None:
    """The daemon's configured file, looked at from here: held is exit 0, with the pid."""
    file = served.runtime / "the.lock"
    file.write_text(f"bench pid={os.getpid()} start=1\n")
    status = served.view.status()
    lock: dict[str, Any] = status.to_json()["lock"] | {"path": str(file)}
    served.view.changes = {"lock": type(status.lock)(**lock)}
    held = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = await served.run("lock")
    finally:
        os.close(held)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{file}: held by pid {os.getpid()}\n")
    assert f"owner line: bench pid={os.getpid()}" in done.stdout
    file.write_text("")
    assert json.loads((await served.run("lock", "--json")).stdout)["held"] is False


async def test_lock_without_a_daemon_looks_at_the_named_file(tmp_path: Path) -> None:
    """No daemon is needed; a file that is none is exit 1."""
    done = await run("lock", "--path", str(tmp_path / "absent"))
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/absent: free (no such file yet)\n")
    done = await run("lock", "--path", str(tmp_path))
    assert done.returncode == 1
    assert "problem: it is a directory" in done.stdout


async def test_lock_named_daemon_that_does_not_run_says_which_file_it_looks_at() -> None:
    """The default file is shown, with the reason on stderr."""
    done = await run("-i", "no-such-test", "lock")
    assert done.stdout.startswith("/tmp/1bit-npu-device.lock: ")
    assert "no-such-test" in done.stderr
    assert "default lock file" in done.stderr


async def test_no_daemon_is_exit_3_with_the_next_step(tmp_path: Path) -> None:
    """One line on stderr, nothing on stdout."""
    done = await run("-i", "no-such-test", "status", XDG_RUNTIME_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("onebitctl: no onebitd runs for the instance no-such-test: ")
    assert done.stderr.endswith(" `onebitd --instance no-such-test`\n")
    booted = await trio.Path("/run/systemd/system").is_dir()
    assert ("`systemctl start onebitd@no-such-test` if it is" in done.stderr) is booted


async def test_instance_after_the_command_works_too(served: Served) -> None:
    """`onebitctl status -i NAME` is what people type."""
    done = await run("status", "-i", INSTANCE, XDG_RUNTIME_DIR=str(served.runtime))
    assert done.returncode == 0


@pytest.mark.skipif(
    any(Path("/run/onebitd").glob("*/control.sock")),
    reason="a system instance runs here and would be found as well",
)
async def test_without_an_instance_the_only_running_one_is_asked(served: Served) -> None:
    """One runs: it is meant. Two run: both are listed, exit 2. A dead one does not count."""
    dead = served.runtime / "onebitd" / "dead" / "control.sock"
    dead.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(dead))
        done = await run("status", XDG_RUNTIME_DIR=str(served.runtime))
        assert done.returncode == 0
        listener.listen()
        done = await run("status", XDG_RUNTIME_DIR=str(served.runtime))
        assert (done.returncode, done.stdout) == (2, "")
        assert f"dead ({dead}), {INSTANCE} ({served.socket})" in done.stderr


async def test_reload_prints_what_has_changed_and_remarks_on_stderr(served: Served) -> None:
    """A success, whatever still waits; --json is the daemon's object."""
    keys, waiting = ["provider.timeout_s", "log.level"], ["model.path"]
    served.view.reloaded = ReloadAnswer(keys, waiting, ["provider.program: /p: no such file"])
    done = await served.run("reload")
    assert (done.returncode, done.stdout) == (0, "reloaded: provider.timeout_s, log.level\n")
    assert done.stderr.splitlines() == [
        "onebitctl: needs a restart: model.path",
        "onebitctl: warning: provider.program: /p: no such file",
    ]
    done = await served.run("reload", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == served.view.reloaded.to_json()


async def test_reload_that_only_a_restart_carries_out_says_that_nothing_was_taken_over(
    served: Served,
) -> None:
    """The file has changed and the daemon has not: that is another thing than no change."""
    served.view.reloaded = ReloadAnswer([], ["http.port"], [])
    done = await served.run("reload")
    assert (done.returncode, done.stdout) == (0, "nothing was taken over\n")
    assert done.stderr == "onebitctl: needs a restart: http.port\n"
    served.view.reloaded = ReloadAnswer([], [], [])
    assert (await served.run("reload")).stdout == "nothing has changed\n"


async def test_reload_refused_is_exit_1_with_a_line_for_each_problem(served: Served) -> None:
    """`systemctl reload` fails with it, and the journal has the reasons."""
    served.view.reloaded = ConfigError(["x.toml: http.port: no\x1b[2J", "x.toml: a: unknown key"])
    for more in ([], ["--json"]):
        done = await served.run("reload", *more)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.splitlines() == [
            "onebitctl: x.toml: http.port: no?[2J",
            "onebitctl: x.toml: a: unknown key",
            "onebitctl: the configuration was not reloaded, nothing has changed",
        ]


async def test_reload_of_a_daemon_that_fails_or_has_none_is_exit_1(served: Served) -> None:
    """A fault of the daemon is no success either."""
    served.view.reloaded = RuntimeError("planted")
    done = await served.run("reload")
    assert (done.returncode, done.stdout) == (1, "")
    assert "answered 500: onebitd failed to answer; its log says why" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [(), ("stat",), ("restart",), ("handoffs", "-n", "1000001"), ("handoffs", "--outcome", "good")],
)
async def test_usage_error_is_exit_2_on_stderr(arguments: tuple[str, ...]) -> None:
    """What does not exist in this version is a usage error too."""
    done = await run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "onebitctl" in done.stderr


async def test_version_names_program_and_version() -> None:
    """`--version` is one line."""
    assert (await run("--version")).stdout == f"onebitctl {__version__}\n"


@pytest.mark.parametrize(
    ("environ", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
async def test_status_on_a_terminal_is_coloured_unless_no_color(
    served: Served, environ: dict[str, str], coloured: bool
) -> None:
    """Colour only where somebody can see it and nobody said no."""
    ours, theirs = pty.openpty()
    try:
        await trio.run_process(
            [*PROGRAM, "--socket", str(served.socket), "status"],
            env=environment({"TERM": "xterm", **environ}),
            stdout=theirs,
        )
        page = os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert "ready" in page
    assert ("\x1b[32mready\x1b[0m" in page) is coloured


async def test_full_disk_is_an_error_not_a_traceback(served: Served) -> None:
    """An answer that cannot be written is exit 1 with the kernel's reason."""
    full = os.open("/dev/full", os.O_WRONLY | os.O_CLOEXEC)
    try:
        done = await trio.run_process(
            [*PROGRAM, "--socket", str(served.socket), "config"],
            env=environment({}),
            stdout=full,
            capture_stderr=True,
            check=False,
        )
    finally:
        os.close(full)
    assert done.returncode == 1
    assert done.stderr.startswith(b"onebitctl: cannot write the answer: ")
    assert done.stderr.count(b"\n") == 1


async def test_import_pulls_in_nothing_of_the_daemon(served: Served) -> None:
    """It starts fast because it imports neither the daemon nor its web stack."""
    loaded = await modules_loaded(
        ["--socket", str(served.socket), "status"], ["lock", "--path", "/nonexistent"]
    )
    assert "onebitd.client" in loaded
    assert not {name.partition(".")[0] for name in loaded} & set(UNWANTED)
    assert not [
        name for name in loaded if name.startswith(("onebitd.services", "onebitd.core.config"))
    ]


async def test_status_imports_nothing_that_only_other_commands_need(served: Served) -> None:
    """It feels instant: each module of these costs about as much as an idle interpreter."""
    loaded = await modules_loaded(["--socket", str(served.socket), "status"])
    ours = {name for name in loaded if name.startswith("onebitd.surfaces.")}
    needed = ("problems", "recent", "status", "status_command", "terminal", "text")
    names = {"onebitd.surfaces.cli", *(f"onebitd.surfaces.cli_{name}" for name in needed)}
    assert ours == names
    unwanted = ("dataclasses", "http.client", "inspect", "ipaddress", "pathlib", "urllib.parse")
    assert not loaded & {*unwanted, "shutil", "signal", "subprocess", "threading"}


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ([], None),
        (["status"], "status"),
        (["-i", "lock", "status", "config"], "status"),
        (["--socket", "reload", "--instance=x", "-istop", "handoffs"], "handoffs"),
        (["--help", "lock"], "lock"),
        (["-i"], None),
        (["--", "lock"], None),
    ],
)
def test_command_of_a_command_line_is_its_first_word_that_is_no_value(
    words: list[str], command: str | None
) -> None:
    """What is asked for decides what is imported; a wrong guess would refuse a right command."""
    assert cli._command_of(words) == command


def test_parser_of_one_command_knows_it_as_the_whole_parser_does() -> None:
    """Leaving the others out changes nothing for it."""
    for command, parser in choices(cli.build_parser()).items():
        alone = choices(cli.build_parser(command))
        assert alone[command].format_help() == parser.format_help()
        assert len(alone) <= 4
    assert choices(cli.build_parser("bogus")).keys() == choices(cli.build_parser()).keys()


def choices(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of a parser's commands."""
    (found,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    return dict(found.choices)


@pytest.mark.parametrize(("closed", "status"), [(">&-", 0), (">&- 2>&-", 0), ("2>&-", 2)])
def test_cli_with_a_closed_stream_keeps_its_status(closed: str, status: int) -> None:
    """Python has None for a stream that the shell closed."""
    words = "state show /no/such/file" if status else "--version"
    done = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m onebitd.surfaces.cli {words} {closed}"],
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (status, b"")


def test_cli_whose_stderr_nobody_reads_keeps_its_status() -> None:
    """A message that cannot be written is no error of its own."""
    command = [sys.executable, "-m", "onebitd.surfaces.cli", "--socket", "/no/such", "status"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as child:
        assert child.stderr is not None
        child.stderr.close()
        assert child.wait(60) == 3


@pytest.mark.parametrize(("ignored", "status"), [(False, -signal.SIGINT), (True, 0)])
def test_cli_interrupted_while_it_is_imported_says_nothing(
    tmp_path: Path, ignored: bool, status: int
) -> None:
    """Ctrl-C in the first moment is no traceback; where SIGINT is ignored it stays so."""
    (tmp_path / "sitecustomize.py").write_text(
        "import builtins\n"
        "import signal\n"
        "was = builtins.__import__\n"
        "def interrupted(name, *rest):\n"
        "    if name == 'argparse':\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    return was(name, *rest)\n"
        "builtins.__import__ = interrupted\n"
    )
    run = "import sys; from onebitd.surfaces.cli_start import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", run, "--version"],
        env=environment({"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}),
        capture_output=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL
        ),
        check=False,
    )
    assert (done.returncode, done.stderr) == (status, b"")
