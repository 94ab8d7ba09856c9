"""Reload of the configuration in the real daemon, on the stand-in decoder and provider."""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.standin_route import (
    PROVIDER,
    Background,
    Route,
    is_locked,
    run_onebitd,
    running_route,
    said,
)
from tests.harness import HttpReply, RunningDaemon, clean_environ, wait_until
from tests.llama_builds import UnixConnection

PROMPT = "Fox, socks, box, knox: "
SLOW = "--token-delay 0.05"
OTHER_LOCK = ('npu.lock"\nwait_s', 'other.lock"\nwait_s')


class Reloader:
    """A running daemon, its configuration file, and the ways to have it read again."""

    def __init__(self, route: Route) -> None:
        self.route = route
        self.daemon: RunningDaemon = route.daemon
        self.file = route.daemon.runtime.parent / "test.toml"
        self.pid = 0
        self._text = self.file.read_text()

    def write(self, *pairs: tuple[str, str], more: str = "") -> None:
        """Write the file as it was at the start, with replacements and with more at its end."""
        text = self._text
        for old, new in pairs:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        self.file.write_text(text + more)

    def ask(self) -> tuple[int, Any]:
        """POST /v1/reload; return the status and the JSON."""
        connection = UnixConnection(self.daemon.runtime / "control.sock", 60.0)
        try:
            connection.request("POST", "/v1/reload")
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def reload(self, *, restart: tuple[str, ...] = (), warnings: int = 0) -> list[str]:
        """Reload; return the changed keys."""
        status, answer = self.ask()
        assert status == 200, answer
        assert answer["needs_restart"] == list(restart)
        assert len(answer["warnings"]) == warnings, answer
        return list(answer["changed"])

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `onebitctl --socket ... ARGUMENTS`."""
        return onebitctl("--socket", str(self.daemon.runtime / "control.sock"), *arguments)

    def value(self, key: str) -> Any:
        """Return the effective value of a setting."""
        return self.daemon.control("/v1/config")[key]["value"]

    def stream(self, **more: Any) -> Background:
        """Ask for a streamed completion and wait until its reply runs."""
        prompt = {"stream": True, "max_tokens": 30, **more}
        running = Background(self.daemon.completion, PROMPT, **prompt)
        wait_until(
            lambda: self.daemon.status()["slot"]["phase"] == "decode", "the reply runs", 20.0
        )
        return running


def onebitctl(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `onebitctl ARGUMENTS` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "onebitd.surfaces.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=clean_environ(Path("/nonexistent"), **environ),
    )


@contextlib.contextmanager
def reloading(*args: str, **how: Any) -> Iterator[Reloader]:
    """Run a daemon; see at the end that the reloads have not touched the decoder."""
    with running_route(*args, **how) as route:
        found = Reloader(route)
        if how.get("wait_ready", True):
            found.pid = route.daemon.status()["backend"]["pid"]
        yield found
        if found.pid:
            backend = route.daemon.status()["backend"]
            assert (backend["pid"], backend["restarts"]) == (found.pid, 0)


@pytest.fixture(scope="module")
def shared() -> Iterator[Reloader]:
    """One daemon for the tests that do not end it."""
    settings = '[http]\nmax_pending = 7\n[provider]\ntimeout_s = 20\nprogram = "PROGRAM"\n'
    settings = settings.replace("PROGRAM", str(PROVIDER))
    with reloading(provider=False, config=settings) as found:
        yield found


@pytest.fixture
def daemon(shared: Reloader) -> Iterator[Reloader]:
    """The shared daemon, which is given its first configuration back."""
    shared.route.begin()
    yield shared
    shared.route.behave()
    shared.write()
    assert shared.ask()[0] == 200
    assert shared.daemon.completion(PROMPT).text == said(PROMPT)


def assert_whole(reply: HttpReply, count: int = 30) -> None:
    """The streamed reply is the model's, to its last byte."""
    assert (reply.status, reply.text) == (200, said(PROMPT, count))
    assert reply.body.count(b"data: [DONE]") == 1
    assert reply.body.endswith(b"data: [DONE]\n\n")


# --- what changes, and what does not ------------------------------------------------------------


def test_reload_during_a_stream_leaves_it_whole_and_the_decoder_alone(daemon: Reloader) -> None:
    """Everything that can change at once, in the middle of a reply."""
    home = daemon.route.home
    (home / "keys").write_text("sesame\n")
    daemon.route.behave(decoder=SLOW)
    plain = daemon.daemon.completion(PROMPT, stream=True, max_tokens=30)
    running = daemon.stream()
    daemon.write(
        ("max_pending = 7", f'max_pending = 9\napi_key_file = "{home}/keys"\nkeepalive_s = 1'),
        ("timeout_s = 20", "timeout_s = 19"),
        OTHER_LOCK,
        ('level = "info"', 'level = "debug"'),
        ('policy = "always"', 'policy = "never"'),
        more="[backend]\nload_timeout_s = 5\nrestart_max = 1\n",
    )
    changed = daemon.reload()
    assert changed == [
        "http.api_key_file",
        "http.max_pending",
        "http.keepalive_s",
        "backend.load_timeout_s",
        "backend.restart_max",
        "provider.timeout_s",
        "handoff.policy",
        "lock.path",
        "log.level",
    ]
    assert daemon.daemon.status()["slot"]["busy"], "the reply was over before the reload"
    reply = running.join()
    assert_whole(reply)
    assert [one["choices"] for one in reply.events] == [one["choices"] for one in plain.events]
    assert daemon.daemon.status()["queue"]["max"] == 9
    assert daemon.daemon.request("GET", "/v1/models").status == 401
    asked = daemon.daemon.completion(PROMPT, headers={"X-Api-Key": "sesame"})
    assert asked.headers["x-onebit-reason"] == "policy"


def test_reload_nothing_has_changed_says_so(daemon: Reloader) -> None:
    """The same file once more is a success that names no key."""
    assert daemon.reload() == []
    done = daemon.run("reload")
    assert (done.returncode, done.stdout, done.stderr) == (0, "nothing has changed\n", "")


def test_reload_bad_file_changes_nothing_and_says_every_reason(daemon: Reloader) -> None:
    """One good change beside two faults stays without effect; all faults are told everywhere."""
    before = daemon.daemon.control("/v1/config")
    daemon.write(
        ("max_pending = 7", "max_pending = 8\nkeepalive = 3"), ("timeout_s = 20", "timeout_s = -1")
    )
    status, answer = daemon.ask()
    assert status == 422
    problems = answer["error"]["problems"]
    assert len(problems) == 2
    assert "http.keepalive: unknown key" in problems[0]
    assert "provider.timeout_s: must be at least 0.001" in problems[1]
    assert daemon.daemon.control("/v1/config") == before
    assert daemon.daemon.status()["queue"]["max"] == 7
    done = daemon.run("reload")
    assert (done.returncode, done.stdout) == (1, "")
    for problem in problems:
        assert f"onebitctl: {problem}\n" in done.stderr
    record = daemon.daemon.log_records("reload_refused")[-1]
    assert (record["level"], record["problems"]) == ("error", problems)


def test_reload_file_that_is_no_toml_or_gone_changes_nothing(daemon: Reloader) -> None:
    """The commonest accident in an editor, and a file that was moved away."""
    before = daemon.daemon.control("/v1/config")
    daemon.write(more="[http\n")
    assert "not valid TOML" in daemon.ask()[1]["error"]["problems"][0]
    daemon.file.unlink()
    status, answer = daemon.ask()
    assert status == 422
    assert "no such file" in answer["error"]["problems"][0]
    assert daemon.daemon.control("/v1/config") == before


def test_reload_provider_that_is_missing_is_a_warning_as_at_a_start(daemon: Reloader) -> None:
    """It only costs handoffs; the answer and the log say it."""
    daemon.write((str(PROVIDER), "/nonexistent/provider"))
    status, answer = daemon.ask()
    assert (status, answer["changed"]) == (200, ["provider.program"])
    assert "provider.program: /nonexistent/provider: no such file" in answer["warnings"][0]
    assert daemon.daemon.log_records("reload_warning")[-1]["line"] == answer["warnings"][0]
    done = daemon.run("reload")
    assert (done.returncode, done.stdout) == (0, "nothing has changed\n")
    assert "onebitctl: warning: provider.program: /nonexistent/provider: " in done.stderr
    reply = daemon.daemon.completion(PROMPT)
    assert (reply.text, reply.headers["x-onebit-handoff"]) == (said(PROMPT), "fallback")


def test_reload_what_needs_a_restart_is_named_and_not_applied(daemon: Reloader) -> None:
    """The configuration shown stays that of the running process, key by key, with its source."""
    model = daemon.route.home / "other.gguf"
    model.write_bytes((daemon.route.home / "tiny.gguf").read_bytes())
    old = daemon.daemon.control("/v1/config")
    daemon.write(
        ("tiny.gguf", "other.gguf"),
        ("max_pending = 7", 'max_pending = 8\nhost = "127.0.0.2"'),
        ('policy = "always"', 'policy = "always"\nstate_dir = "/tmp/onebitd-other"'),
        more='[backend]\nenv = { A = "b" }\n',
    )
    restart = ("model.path", "http.host", "backend.env", "handoff.state_dir")
    assert daemon.reload(restart=restart) == ["http.max_pending"]
    assert daemon.reload(restart=restart) == []
    new = daemon.daemon.control("/v1/config")
    assert new.pop("http.max_pending") == {"value": 8, "source": "file"}
    assert old.pop("http.max_pending") == {"value": 7, "source": "file"}
    assert new == old
    assert daemon.daemon.status()["model"]["path"].endswith("tiny.gguf")
    done = daemon.run("reload")
    assert (done.returncode, done.stdout) == (0, "nothing was taken over\n")
    assert done.stderr == f"onebitctl: needs a restart: {', '.join(restart)}\n"


def test_reload_flag_beats_the_file_as_at_the_start(daemon: Reloader) -> None:
    """The port that a flag gave is not the file's business, changed or not."""
    daemon.write(("max_pending = 7", "max_pending = 7\nport = 1"))
    assert daemon.reload() == []
    assert daemon.daemon.control("/v1/config")["http.port"] == {"value": 0, "source": "flag --port"}


def test_reload_command_prints_what_has_changed(daemon: Reloader) -> None:
    """A line for people, an object for programs."""
    daemon.write(("timeout_s = 20", "timeout_s = 21"), ('level = "info"', 'level = "debug"'))
    done = daemon.run("reload")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "reloaded: provider.timeout_s, log.level\n"
    daemon.write()
    done = daemon.run("reload", "--json")
    keys = ["provider.timeout_s", "log.level"]
    assert json.loads(done.stdout) == {"changed": keys, "needs_restart": [], "warnings": []}


def test_reload_without_a_daemon_is_exit_3(tmp_path: Path) -> None:
    """A reload that reached nobody has failed."""
    done = onebitctl("--socket", str(tmp_path / "control.sock"), "reload")
    assert (done.returncode, done.stdout) == (3, "")


# --- the settings that change -------------------------------------------------------------------


def wrapper(path: Path) -> str:
    """Make another provider that does the same; return its path."""
    path.write_text(f'#!/bin/sh\nexec "{PROVIDER}" "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_reload_provider_run_that_is_on_ends_well_and_the_next_is_the_new_one(
    daemon: Reloader,
) -> None:
    """A running exchange keeps its provider and its lock; the next has both new ones."""
    daemon.route.behave(provider="sleep:1.5")
    running = Background(daemon.daemon.completion, PROMPT)
    wait_until(lambda: daemon.daemon.status()["provider"]["state"] == "running", "a run")
    new = wrapper(daemon.route.home / "provider-b")
    daemon.write((str(PROVIDER), new), OTHER_LOCK)
    assert daemon.reload() == ["provider.program", "lock.path"]
    assert is_locked(daemon.route.lock_path)
    record = daemon.route.record_of(running.join())
    assert (record["outcome"], record["provider"]) == ("used", str(PROVIDER))
    wait_until(lambda: not is_locked(daemon.route.lock_path), "the old lock is given back")
    daemon.route.behave(provider="sleep:0.5")
    running = Background(daemon.daemon.completion, PROMPT + "again")
    other = daemon.route.home / "other.lock"
    wait_until(lambda: is_locked(other), "the new lock is taken")
    assert not is_locked(daemon.route.lock_path)
    record = daemon.route.record_of(running.join())
    assert (record["outcome"], record["provider"]) == ("used", new)
    assert not is_locked(other)


def test_reload_provider_taken_away_and_given_back(daemon: Reloader) -> None:
    """Without one the decoder prefills, and the answer remarks that."""
    daemon.write((f'program = "{PROVIDER}"\n', ""))
    assert daemon.reload(warnings=1) == ["provider.program"]
    assert daemon.daemon.completion(PROMPT).headers["x-onebit-reason"] == "no_provider"
    assert daemon.daemon.status()["provider"]["state"] == "none"
    daemon.write()
    assert daemon.reload() == ["provider.program"]
    assert daemon.daemon.completion(PROMPT).headers["x-onebit-handoff"] == "file"


def test_reload_api_keys_added_changed_and_removed_take_effect(daemon: Reloader) -> None:
    """Each time with the next request; the keys' file counts as its key."""
    keys = daemon.route.home / "keys"
    keys.write_text("one\n")
    daemon.write(("max_pending = 7", f'max_pending = 7\napi_key_file = "{keys}"'))

    def statuses() -> list[int]:
        tried: tuple[dict[str, str], ...] = ({}, {"X-Api-Key": "one"}, {"X-Api-Key": "two"})
        return [daemon.daemon.request("GET", "/v1/models", headers=head).status for head in tried]

    assert statuses() == [200, 200, 200]
    assert daemon.reload() == ["http.api_key_file"]
    assert statuses() == [401, 200, 401]
    keys.write_text("two\n")
    assert daemon.reload() == ["http.api_key_file"]
    assert statuses() == [401, 401, 200]
    keys.write_text("# none\n")
    assert daemon.ask()[0] == 422
    assert statuses() == [401, 401, 200]
    assert "two" not in daemon.daemon.log_path.read_text()
    daemon.write()
    assert daemon.reload() == ["http.api_key_file"]
    assert statuses() == [200, 200, 200]


def test_reload_limits_and_guards_of_the_listener_take_effect(daemon: Reloader) -> None:
    """Hosts, origins and the size of a body."""
    big = {"prompt": "x" * (1 << 20), "max_tokens": 1}
    there = {"Host": "llm.example.net", "Origin": "https://chat.example.net"}
    assert daemon.daemon.request("GET", "/v1/models", headers=there).status == 403
    daemon.write(
        (
            "max_pending = 7",
            'max_pending = 7\nmax_body_mib = 1\nallowed_hosts = ["llm.example.net"]\n'
            'allowed_origins = ["https://chat.example.net"]',
        )
    )
    keys = ["http.allowed_hosts", "http.allowed_origins", "http.max_body_mib"]
    assert daemon.reload() == keys
    assert daemon.daemon.request("GET", "/v1/models", headers=there).status == 200
    assert daemon.daemon.request("POST", "/v1/completions", big).status == 413


def test_reload_log_level_and_format_take_effect(daemon: Reloader) -> None:
    """Loggers that were bound long ago follow too."""
    daemon.route.behave(provider="exit:3")
    daemon.daemon.completion(PROMPT)
    assert daemon.daemon.log_records("provider_output") == []
    daemon.write(('level = "info"', 'level = "debug"'))
    assert daemon.reload() == ["log.level"]
    daemon.daemon.completion(PROMPT)
    assert "no XDNA device" in daemon.daemon.log_records("provider_output")[-1]["line"]
    daemon.write(('format = "json"', 'format = "text"'))
    assert daemon.reload() == ["log.format", "log.level"]
    text = daemon.daemon.log_path.read_text()
    assert re.search(r"^\S+ +\w+ +reloaded: log.format, log.level$", text, re.M | re.I), text[-500:]


def test_reload_lock_hold_takes_and_gives_back_the_lock(daemon: Reloader) -> None:
    """`lifetime` holds it from now on, between runs and over them; `handoff` frees it."""
    lock, other = daemon.route.lock_path, daemon.route.home / "other.lock"
    more_lock = ("\nwait_s = 1", '\nhold = "lifetime"\nwait_s = 1')
    assert not is_locked(lock)
    daemon.write(more_lock)
    assert daemon.reload() == ["lock.hold"]
    assert is_locked(lock)
    assert daemon.daemon.completion(PROMPT).headers["x-onebit-handoff"] == "file"
    assert is_locked(lock)
    assert daemon.daemon.status()["lock"]["hold"] == "lifetime"
    daemon.write(more_lock, ('npu.lock"\nhold', 'other.lock"\nhold'))
    assert daemon.reload() == ["lock.path"]
    assert (is_locked(lock), is_locked(other)) == (False, True)
    daemon.write()
    assert daemon.reload() == ["lock.path", "lock.hold"]
    assert (is_locked(lock), is_locked(other)) == (False, False)


def test_reload_lock_that_is_busy_is_a_warning_and_taken_by_a_later_run(daemon: Reloader) -> None:
    """It waits lock.wait_s for the other holder, says who that is, and serves on."""
    lock = daemon.route.lock_path
    lock.touch()
    daemon.write(("wait_s = 1", 'wait_s = 0\nhold = "lifetime"'))
    with lock.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        status, answer = daemon.ask()
        assert (status, answer["changed"]) == (200, ["lock.hold", "lock.wait_s"])
        assert "lock.hold: the device lock" in answer["warnings"][0]
        assert "is held by" in answer["warnings"][0]
    assert daemon.daemon.completion(PROMPT).headers["x-onebit-handoff"] == "file"
    assert is_locked(lock)


# --- when, and by whom --------------------------------------------------------------------------


def test_sighup_reloads_and_logs_the_outcome(daemon: Reloader) -> None:
    """Good and bad, one line each; the daemon goes on."""

    def hup(event: str) -> dict[str, Any]:
        before = len(daemon.daemon.log_records(event))
        daemon.daemon.process.send_signal(signal.SIGHUP)
        found = wait_until(lambda: daemon.daemon.log_records(event)[before:], event)
        assert len(found) == 1
        return dict(found[0])

    daemon.write(("timeout_s = 20", "timeout_s = 22"), ("tiny.gguf", "tiny2.gguf"))
    (daemon.route.home / "tiny2.gguf").write_bytes((daemon.route.home / "tiny.gguf").read_bytes())
    record = hup("reloaded")
    assert record["level"] == "info"
    assert (record["changed"], record["needs_restart"]) == (["provider.timeout_s"], ["model.path"])
    assert record["line"] == "reloaded: provider.timeout_s; needs a restart: model.path"
    assert daemon.value("provider.timeout_s") == 22
    daemon.write(("timeout_s = 20", "timeout_s = 0"))
    record = hup("reload_refused")
    assert record["level"] == "error"
    assert "provider.timeout_s: must be at least" in record["problems"][0]
    assert daemon.value("provider.timeout_s") == 22


def test_reload_two_at_once_take_turns(daemon: Reloader) -> None:
    """The second begins when the first has got its lock, or given up: neither is mixed up."""
    lock = daemon.route.lock_path
    lock.touch()
    daemon.write(("wait_s = 1", 'wait_s = 2\nhold = "lifetime"'))
    with lock.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        first: list[Any] = []
        waiting = threading.Thread(target=lambda: first.append(daemon.ask()))
        waiting.start()
        wait_until(lambda: daemon.value("lock.hold") == "lifetime", "the first is on")
        daemon.write(("timeout_s = 20", "timeout_s = 23"))
        second = daemon.ask()
        waiting.join()
    ((status, answer),) = first
    assert (status, answer["changed"]) == (200, ["lock.hold", "lock.wait_s"])
    assert len(answer["warnings"]) == 1
    assert second[0] == 200
    assert second[1]["changed"] == ["provider.timeout_s", "lock.hold", "lock.wait_s"]
    assert second[1]["warnings"] == []
    logged = [record["changed"] for record in daemon.daemon.log_records("reloaded")[-2:]]
    assert logged == [answer["changed"], second[1]["changed"]]


def test_reload_client_that_leaves_does_not_stop_it(daemon: Reloader) -> None:
    """A reload is never left half done: it is logged although nobody waits for it any more."""
    lock = daemon.route.lock_path
    lock.touch()
    before = len(daemon.daemon.log_records("reloaded"))
    daemon.write(("wait_s = 1", 'wait_s = 1.5\nhold = "lifetime"'))
    with lock.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        connection = UnixConnection(daemon.daemon.runtime / "control.sock", 60.0)
        connection.request("POST", "/v1/reload")
        wait_until(lambda: daemon.value("lock.hold") == "lifetime", "the reload is on")
        connection.close()
        wait_until(lambda: len(daemon.daemon.log_records("reloaded")) > before, "its line")
        wait_until(lambda: daemon.daemon.log_records("reload_warning"), "why there is no lock")
    assert "is held by" in daemon.daemon.log_records("reload_warning")[-1]["line"]


def test_reload_while_the_model_loads_works_and_the_load_goes_on() -> None:
    """A long load is when one notices what is wrong in the file."""
    with reloading(wait_ready=False, decoder=("--load-delay", "3")) as daemon:

        def loading() -> bool:
            with contextlib.suppress(OSError):
                return bool(daemon.daemon.status()["backend"]["state"] == "loading")
            return False

        wait_until(loading, "the model loads")
        daemon.write(("wait_s = 1", "wait_s = 2"))
        assert daemon.reload() == ["lock.wait_s"]
        assert daemon.daemon.status()["state"] == "loading"
        daemon.daemon.wait_ready()
        assert daemon.daemon.status()["backend"]["restarts"] == 0
        assert daemon.daemon.completion(PROMPT).text == said(PROMPT)


def test_reload_while_draining_is_refused() -> None:
    """The next start reads the file anyway; the running reply ends whole."""
    with running_route() as route:
        daemon = Reloader(route)
        route.behave(decoder=SLOW)
        running = daemon.stream()
        daemon.daemon.process.send_signal(signal.SIGTERM)
        wait_until(lambda: daemon.daemon.status()["state"] == "draining", "draining")
        daemon.write(("wait_s = 1", "wait_s = 2"))
        status, answer = daemon.ask()
        assert status == 503
        assert answer["error"]["type"] == "unavailable_error"
        done = daemon.run("reload")
        assert (done.returncode, done.stdout) == (1, "")
        assert "onebitd is stopping" in done.stderr
        assert daemon.value("lock.wait_s") == 1
        assert_whole(running.join())
        assert daemon.daemon.process.wait(30) == 0


# --- API keys as a credential -------------------------------------------------------------------


def test_credential_is_the_key_file_where_no_other_is_named(tmp_path: Path) -> None:
    """Its source is told; the file's own key wins with a reload, and loses with the next."""
    (tmp_path / "api-key").write_text("sesame\n")
    with reloading(env={"CREDENTIALS_DIRECTORY": str(tmp_path)}) as daemon:
        shown = daemon.daemon.control("/v1/config")["http.api_key_file"]
        assert shown == {"value": f"{tmp_path}/api-key", "source": "credential api-key"}
        assert daemon.daemon.request("GET", "/v1/models").status == 401
        head = {"Authorization": "Bearer sesame"}
        assert daemon.daemon.request("GET", "/v1/models", headers=head).status == 200
        keys = daemon.route.home / "keys"
        keys.write_text("other\n")
        daemon.write(more=f'[http]\napi_key_file = "{keys}"\n')
        assert daemon.reload() == ["http.api_key_file"]
        assert daemon.daemon.request("GET", "/v1/models", headers=head).status == 401
        daemon.write()
        assert daemon.reload() == ["http.api_key_file"]
        assert daemon.daemon.request("GET", "/v1/models", headers=head).status == 200


def test_credential_that_is_empty_is_exit_2_with_its_name(tmp_path: Path) -> None:
    """It never means "no key is asked for"."""
    (tmp_path / "api-key").write_text("\n")
    env = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    model = tmp_path / "m.gguf"
    done = run_onebitd("-m", str(model), "--check-config", runtime=tmp_path / "rt", env=env)
    assert done.returncode == 2
    assert f"onebitd: http.api_key_file: {tmp_path}/api-key: holds no API key" in done.stderr
