"""Start, stop and death of the daemon and its decoder, on the real llama-server.

What does not depend on the decoder, a second daemon, no provider, a decoder that never comes up or
dies too often, is in test_hybrid_route_start.py, on the stand-in.
"""

from __future__ import annotations

import json
import resource
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.rig import (
    DAYS,
    ENDLESS,
    MAX_TOKENS,
    RHYME,
    Prepared,
    RawClient,
    Rig,
    group_is_gone,
    running_rig,
    stalled_client,
)
from tests.e2e.standin_route import running_route
from tests.harness import (
    RunningDaemon,
    clean_environ,
    is_alive,
    running_onebitd,
    wait_until,
)
from tests.llama_builds import BUILDS, MODELS, LlamaBuild, LlamaModel

BUILD, MODEL = BUILDS[0], MODELS[0]


@pytest.fixture(scope="module")
def shared(
    prepared: Prepared,
    parts: tuple[LlamaBuild, LlamaModel],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Rig]:
    """One daemon for the tests that do not end it."""
    home = tmp_path_factory.mktemp("shared")
    with running_rig(
        prepared, *parts, home, config="[http]\nmax_pending = 1\nkeepalive_s = 0.3\n"
    ) as rig:
        yield rig


def script(path: Path, text: str) -> Path:
    """Write a shell script."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def forking_wrapper(build: LlamaBuild, home: Path) -> Path:
    """A script that runs the real llama-server as its child, with no exec and no traps."""
    return script(home / "wrapper", f'"{build.program}" "$@"\nstatus=$?\nexit $status')


def wait_exit(daemon: RunningDaemon, timeout_s: float = 30.0) -> tuple[int, str]:
    """Return the daemon's exit status and its log."""
    status = daemon.process.wait(timeout_s)
    return status, daemon.log_path.read_text(errors="replace")


def wait_draining(rig: Rig) -> None:
    """Wait until the daemon turns new requests away."""
    wait_until(lambda: rig.daemon.status()["state"] == "draining", "draining")


# --- stop -----------------------------------------------------------------------------------


def test_sigterm_running_stream_ends_whole_and_newcomers_get_503(
    prepared: Prepared, parts: tuple[LlamaBuild, LlamaModel], tmp_path: Path
) -> None:
    """A stop lets the running reply finish, turns others away with Retry-After, and exits 0."""
    with running_rig(prepared, *parts, tmp_path) as rig:
        body = {"prompt": RHYME, "stream": True, "max_tokens": 80, "ignore_eos": True}
        with (
            RawClient(rig, body, ["Connection: close"]) as client,
            RawClient(rig, {"prompt": DAYS}, ["Connection: close"]) as queued,
        ):
            client.wait_for(b"data: ")
            wait_until(
                lambda: [name[:6] for name in rig.daemon.slot_files()] == ["state-"],
                "one in the queue with its state file",
            )
            rig.daemon.process.send_signal(signal.SIGTERM)
            wait_draining(rig)
            refused = rig.ask(DAYS)
            assert refused.status == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert "stopping" in refused.json["error"]["message"]
            assert refused.headers["x-onebit-reason"] == "draining"
            assert rig.daemon.request("GET", "/health").status == 503
            assert queued.read_to_end().startswith(b"HTTP/1.1 503 ")
            assert client.read_to_end().count(b"data: [DONE]") == 1
        status, log = wait_exit(rig.daemon)
        assert (status, "Traceback" in log) == (0, False), log
        outcomes = [
            (record["outcome"], record.get("reason"))
            for record in rig.daemon.log_records("handoff")
        ]
        assert outcomes.count(("used", None)) == 1
        assert outcomes.count(("failed", "draining")) == 2


def test_second_sigterm_cuts_the_running_stream(
    prepared: Prepared, parts: tuple[LlamaBuild, LlamaModel], tmp_path: Path
) -> None:
    """Whoever asks twice does not want to wait; the client sees that its stream is not whole."""
    with running_rig(prepared, *parts, tmp_path) as rig:
        body = {"prompt": RHYME, "stream": True, **ENDLESS}
        with RawClient(rig, body, ["Connection: close"]) as client:
            client.wait_for(b"data: ")
            rig.daemon.process.send_signal(signal.SIGTERM)
            wait_draining(rig)
            rig.daemon.process.send_signal(signal.SIGINT)
            received = client.read_to_end()
        assert b"[DONE]" not in received
        assert b'"error"' in received
        assert wait_exit(rig.daemon)[0] == 0
        record = rig.daemon.log_records("handoff")[-1]
        assert (record["outcome"], record["reason"]) == ("cancelled", "draining")


def test_drain_timeout_ends_a_provider_run_and_the_daemon(
    prepared: Prepared, parts: tuple[LlamaBuild, LlamaModel], tmp_path: Path
) -> None:
    """A stop during a provider run: after drain_timeout_s the run is killed, the client told."""
    config = "[http]\ndrain_timeout_s = 1\n[provider]\ntimeout_s = 100\n"
    with running_rig(prepared, *parts, tmp_path, config=config) as rig:
        rig.set_mode("ignore_term")
        with RawClient(rig, {"prompt": RHYME}, ["Connection: close"]) as client:
            pid = rig.wait_run(0)
            assert rig.daemon.stop() == 0
            assert group_is_gone(pid)
            assert client.read_to_end().startswith(b"HTTP/1.1 503 ")


def test_stalled_client_does_not_hold_up_the_stop(
    prepared: Prepared, parts: tuple[LlamaBuild, LlamaModel], tmp_path: Path
) -> None:
    """A client that asked for much and reads nothing is cut off when the drain is over."""
    config = "[http]\ndrain_timeout_s = 1\n"
    with running_rig(prepared, *parts, tmp_path, config=config) as rig, stalled_client(rig):
        # Far below the 60 s after which a write gives up.
        assert rig.daemon.stop(timeout_s=15) == 0


def test_wrapper_script_its_server_is_stopped_too(
    prepared: Prepared, parts: tuple[LlamaBuild, LlamaModel], tmp_path: Path
) -> None:
    """A decoder program that forks the real server without exec leaves nothing on SIGTERM."""
    wrapper = forking_wrapper(parts[0], tmp_path)
    with running_rig(prepared, *parts, tmp_path, program=wrapper) as rig:
        rig.assert_good()
        processes = rig.daemon.children()
        assert len(processes) >= 3  # the guard, the script, the server
        assert rig.daemon.stop() == 0
        assert not any(map(is_alive, processes))


# --- death of the daemon --------------------------------------------------------------------


def test_sigkill_everything_dies_and_the_next_start_cleans_up(
    prepared: Prepared, parts: tuple[LlamaBuild, LlamaModel], tmp_path: Path
) -> None:
    """Whatever ends the daemon ends its decoder and provider, grandchildren included.

    What it could not remove itself, its sockets and state files, the next start removes.
    """
    wrapper = forking_wrapper(parts[0], tmp_path)
    with running_rig(prepared, *parts, tmp_path, program=wrapper) as rig:
        daemon = rig.daemon
        rig.provider.unlink()
        script(rig.provider, "sleep 600 &\nsleep 600")
        with RawClient(rig, {"prompt": RHYME}):
            rig.wait_phase("prefill")
            wait_until(lambda: len(daemon.children()) >= 6, "script, server, run, grandchild")
            processes = daemon.children()
            daemon.kill()
            wait_until(lambda: not any(map(is_alive, processes)), "the end of all of them", 5)
        assert (daemon.runtime / "control.sock").exists()
        assert (daemon.runtime / "backend.sock").exists()
        assert daemon.slot_files() != []
        with daemon.log_path.open("ab") as log_file:
            daemon.process = subprocess.Popen(
                daemon.process.args, stderr=log_file, env=clean_environ(daemon.runtime), cwd="/"
            )
        try:
            daemon.wait_ready()
            assert daemon.slot_files() == []
            assert daemon.log_records("swept")
        finally:
            assert daemon.stop() == 0
        left = [path.name for path in daemon.runtime.rglob("*")]
        assert sorted(left) == ["onebitd.lock", "slots"]


# --- a decoder that cannot be kept running --------------------------------------------------


def test_decoder_gets_a_wrong_argument_daemon_exits_4_with_its_words(
    parts: tuple[LlamaBuild, LlamaModel],
) -> None:
    """A decoder that never came up is not tried again; its own last words say why."""
    build, model = parts
    with running_onebitd(
        model=model.path,
        llama_server=build.program,
        backend_args=["--nope", *build.extra_args],
        wait_ready=False,
    ) as daemon:
        status, log = wait_exit(daemon)
    assert status == 4
    assert "invalid argument: --nope" in log.splitlines()[-1]


def test_decoder_cannot_load_the_model_daemon_exits_4(
    parts: tuple[LlamaBuild, LlamaModel], tmp_path: Path
) -> None:
    """A GGUF file that is cut off passes the check of its head and fails in the decoder."""
    build, model = parts
    cut = tmp_path / "cut.gguf"
    with model.path.open("rb") as file:
        cut.write_bytes(file.read(8 * 1024 * 1024))
    with running_onebitd(
        model=cut, llama_server=build.program, backend_args=build.extra_args, wait_ready=False
    ) as daemon:
        status, log = wait_exit(daemon)
    assert status == 4
    assert "could not be started: status 1: " in log.splitlines()[-1]
    assert "--print-backend" in log.splitlines()[-1]


# --- connections ----------------------------------------------------------------------------


def test_keep_alive_streamed_then_whole_on_one_connection(shared: Rig) -> None:
    """A connection serves one request after the other, a stream first."""
    texts = shared.prepared.texts
    connection = shared.daemon.connect()
    try:
        for stream in (True, False, True):
            body = {"prompt": RHYME, "stream": stream, "max_tokens": MAX_TOKENS, "temperature": 0}
            connection.request("POST", "/v1/completions", json.dumps(body))
            used = connection.sock
            reply = connection.getresponse()
            data = reply.read()
            assert reply.status == 200
            if not stream:
                assert json.loads(data)["choices"][0]["text"] == texts[RHYME]
            assert connection.sock is used
    finally:
        connection.close()
    shared.wait_slot_free()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("version", "extra"), [("1.0", ""), ("1.1", "Connection: close\r\n")], ids=["http-1.0", "close"]
)
def test_connection_that_is_not_kept_is_closed_after_the_reply(
    shared: Rig, version: str, extra: str, stream: bool
) -> None:
    """An HTTP/1.0 client, and one that says so, read to the end of the connection."""
    body = json.dumps({"prompt": RHYME, "stream": stream, "max_tokens": 2}).encode()
    head = (
        f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\n{extra}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", shared.daemon.port), 30) as client:
        client.sendall(head.encode() + body)
        received = b""
        while data := client.recv(65536):
            received += data
    assert b" 200 " in received.split(b"\r\n")[0]
    assert (b"data: [DONE]" if stream else b'"choices"') in received


def test_stream_that_waits_gets_comments_then_its_events(shared: Rig) -> None:
    """While the provider runs a streaming client sees comments, which are no events."""
    shared.heal()
    shared.set_mode("sleep:1")
    with RawClient(shared, {"prompt": RHYME, "stream": True}, ["Connection: close"]) as client:
        client.wait_for(b": waiting")
        shared.wait_phase("prefill")
        received = client.read_to_end()
    assert b"data: [DONE]" in received
    assert shared.daemon.handoffs()[-1]["outcome"] == "used"


def test_stream_that_waits_gets_a_failure_as_an_event(shared: Rig) -> None:
    """Once a stream has begun with comments, an error comes as its last event, not as a status."""
    shared.heal()
    shared.set_mode("sleep:1,exit:3")
    headers = ["Connection: close", "X-Onebit-Handoff: strict"]
    with shared.nothing_left():
        with RawClient(shared, {"prompt": RHYME, "stream": True}, headers) as client:
            received = client.read_to_end()
        assert received.startswith(b"HTTP/1.1 200 ")
        assert b": waiting" in received
        assert b"provider_exit: status 3: no XDNA device" in received
        assert b"[DONE]" not in received
    assert shared.daemon.handoffs()[-1]["outcome"] == "failed"
    shared.assert_good()


def test_sighup_is_survived(shared: Rig) -> None:
    """A signal that ends many programs does not end this one."""
    shared.daemon.process.send_signal(signal.SIGHUP)
    wait_until(lambda: shared.daemon.log_records("reloaded"), "a line about it")
    shared.assert_good()


def test_queue_full_is_refused_at_once_with_retry_after(shared: Rig) -> None:
    """One more than max_pending gets 503; those in the queue are not touched."""
    before = len(shared.daemon.handoffs())
    with (
        shared.nothing_left(),
        RawClient(shared, {"prompt": DAYS, "stream": True, **ENDLESS}) as holder,
        RawClient(shared, {"prompt": RHYME}, ["Connection: close"]) as queued,
    ):
        holder.wait_for(b"data: ")
        wait_until(lambda: shared.daemon.status()["queue"]["pending"] == 1, "one in the queue")
        reply = shared.ask(RHYME)
        assert reply.status == 503
        assert "http.max_pending" in reply.json["error"]["message"]
        assert int(reply.headers["retry-after"]) >= 1
        holder.leave()
        assert queued.read_to_end().startswith(b"HTTP/1.1 200 ")
    records = shared.daemon.handoffs()[before:]
    found = [(record["outcome"], record.get("reason")) for record in records]
    assert found == [("failed", "queue_full"), ("cancelled", "client_gone"), ("used", None)]


def test_clients_that_come_and_go_leave_no_connection(shared: Rig) -> None:
    """A client that closes a kept connection frees it at once; so does one that asks nothing.

    Such connections once stayed open for the keep-alive time, a descriptor each.
    """
    shared.wait_slot_free()
    before = shared.settled_files()

    def come_and_go() -> None:
        for _ in range(10):
            assert shared.daemon.request("GET", "/health").status == 200
            socket.create_connection(("127.0.0.1", shared.daemon.port), 10).close()

    threads = [threading.Thread(target=come_and_go) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared.settled_files() == before


# --- a loop that hangs ----------------------------------------------------------------------


def catches(pid: int, number: int) -> bool:
    """Say whether a process has a handler of its own for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    [mask] = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(mask, 16) >> (number - 1) & 1)


def wait_silent(manager: socket.socket) -> None:
    """Read datagrams until none has come for as long as the socket's timeout."""
    for _ in range(100):
        try:
            manager.recv(4096)
        except TimeoutError:
            return
    raise AssertionError("they go on")


def test_debug_hang_ends_the_watchdogs_food_and_its_sigabrt_shows_where(tmp_path: Path) -> None:
    """A loop that hangs does not say WATCHDOG=1, and what systemd then sends prints its stack."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        env = {
            "NOTIFY_SOCKET": str(tmp_path / "notify"),
            "WATCHDOG_USEC": "400000",
            "ONEBIT_DEBUG_HANG": "1",
            "PYTHONFAULTHANDLER": "1",
        }
        with running_route(env=env) as route:
            process, children = route.daemon.process, route.daemon.children()
            resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
            for child in children:
                assert b"ONEBIT_DEBUG_HANG" not in Path(f"/proc/{child}/environ").read_bytes()
            fed = 0
            while fed < 3:
                fed += manager.recv(4096) == b"WATCHDOG=1"
            process.send_signal(signal.SIGUSR2)
            manager.settimeout(2)  # ten times as long as it takes a loop that turns
            wait_silent(manager)
            assert process.poll() is None
            route.daemon.killed = True
            process.send_signal(signal.SIGABRT)
            status, log = wait_exit(route.daemon)
            assert status == -signal.SIGABRT
            stack = log[log.index("Fatal Python error: Aborted") :]
            assert "in hang_on_purpose" in stack
            wait_until(lambda: not any(map(is_alive, children)), "the end of its children", 10)


def test_debug_hang_variable_empty_or_not_set_signal_is_left_alone() -> None:
    """SIGUSR2 has no meaning for a daemon that nobody wants to hang."""
    with running_route(env={"ONEBIT_DEBUG_HANG": ""}) as route:
        assert catches(route.daemon.process.pid, signal.SIGTERM)
        assert not catches(route.daemon.process.pid, signal.SIGUSR2)
