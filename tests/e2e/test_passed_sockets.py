"""Sockets that a service manager holds: clients wait through loads and restarts."""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from onebitd.core.errors import ConfigError
from tests.e2e.standin_route import (
    DECODER,
    Background,
    Route,
    chat_prompt,
    run_onebitd,
    running_route,
    said,
)
from tests.harness import wait_until
from tests.standins import tiny_state

BACKLOG = 200


@pytest.fixture
def public() -> Iterator[socket.socket]:
    """A listening socket, as `onebitd-http@.socket` makes one."""
    with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listener:
        yield listener


def backlog_of(listener: socket.socket) -> int:
    """Return the kernel's backlog of a listening socket: tcpi_sacked in tcp(7)'s TCP_INFO."""
    info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
    return int(struct.unpack_from("=I", info, 28)[0])


def is_loading(route: Route) -> bool:
    """Tell whether the decoder still loads."""
    return bool(route.daemon.status()["state"] == "loading")


def has_another_decoder(route: Route, pid: int) -> bool:
    """Tell whether a decoder runs that is not this one."""
    return route.daemon.status()["backend"]["pid"] not in (pid, None)


def test_passed_http_request_during_the_load_waits_for_it(public: socket.socket) -> None:
    """A client that asks while the model loads gets its answer, /health says that it loads."""
    with running_route(
        decoder=["--load-delay", "2"], passed={"http": public}, wait_ready=False
    ) as route:
        daemon = route.daemon
        daemon.port = public.getsockname()[1]
        # Before a process serves it even: it is the kernel that takes the connection.
        early = Background(daemon.chat, "early")
        wait_until(lambda: (daemon.runtime / "control.sock").exists(), "the control socket")
        assert is_loading(route)
        assert daemon.request("GET", "/health").status == 503
        late = Background(daemon.chat, "late")
        for request, prompt in ((early, "early"), (late, "late")):
            reply = request.join()
            assert (reply.status, reply.text) == (200, said(chat_prompt(prompt)))


def test_passed_http_request_while_the_decoder_restarts_waits_for_it(
    public: socket.socket,
) -> None:
    """A decoder that takes longer to come back than requests usually wait costs nobody an error."""
    with running_route(decoder=["--load-delay", "1"], passed={"http": public}) as route:
        daemon = route.daemon
        for _ in range(3):  # each death makes the next pause longer
            pid = daemon.status()["backend"]["pid"]
            subprocess.run(["kill", "-KILL", str(pid)], check=True)
            wait_until(partial(has_another_decoder, route, pid), "another one")
        assert daemon.status()["state"] == "restarting"
        assert daemon.chat("patience").text == said(chat_prompt("patience"))


def test_passed_http_stop_serves_the_line_and_leaves_newcomers_in_the_backlog(
    public: socket.socket,
) -> None:
    """Over a stop and the next start no client is refused, and nobody sees a 503."""
    with running_route(passed={"http": public}) as route:
        daemon = route.daemon
        route.behave(decoder="--token-delay 0.1")
        inside = [Background(daemon.chat, f"inside {number}") for number in range(4)]
        wait_until(lambda: daemon.status()["queue"]["pending"] == 3, "one runs, three wait")
        daemon.process.send_signal(signal.SIGTERM)
        wait_until(lambda: daemon.status()["state"] == "draining", "draining")
        outside = Background(daemon.chat, "outside")
        for number, request in enumerate(inside):
            reply = request.join()
            assert (reply.status, reply.text) == (200, said(chat_prompt(f"inside {number}")))
        assert daemon.process.wait(30) == 0
    with running_route(passed={"http": public}):
        reply = outside.join()
        assert (reply.status, reply.text) == (200, said(chat_prompt("outside")))


def test_passed_http_backlog_stays_as_the_unit_made_it(public: socket.socket) -> None:
    """The unit's Backlog= is what holds the waiting clients; a second listen() would change it."""
    assert backlog_of(public) == BACKLOG
    with running_route(passed={"http": public}) as route:
        assert route.daemon.chat("hello").status == 200
        assert backlog_of(public) == BACKLOG


def test_passed_control_socket_is_served_and_stays(public: socket.socket) -> None:
    """The control socket of the manager is used, and its file is not ours to remove."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "control.sock"
        with socket.socket(socket.AF_UNIX) as control:
            control.bind(str(path))
            control.listen(16)
            with running_route(
                passed={"control": control, "http": public}, wait_ready=False
            ) as route:
                daemon = route.daemon
                wait_until((daemon.runtime / "onebitd.lock").exists, "its runtime directory")
                (daemon.runtime / "control.sock").symlink_to(path)
                daemon.wait_ready()
                assert daemon.status()["listen"] == [f"127.0.0.1:{public.getsockname()[1]}"]
                (daemon.runtime / "control.sock").unlink()
                assert daemon.stop() == 0
            assert path.is_socket()


def test_passed_sockets_of_a_start_that_fails_answer_who_waits_and_are_left_empty(
    tmp_path: Path,
) -> None:
    """A connection left waiting would have systemd start us again, and again.

    The operator at the control socket hears what is wrong, the public that something is.
    """
    with (
        socket.create_server(("127.0.0.1", 0)) as public,
        socket.socket(socket.AF_UNIX) as control,
        contextlib.ExitStack() as clients,
    ):
        control.bind(str(tmp_path / "control.sock"))
        control.listen(16)
        waiting = [
            (clients.enter_context(socket.create_connection(public.getsockname())), "public"),
            (clients.enter_context(socket.create_connection(public.getsockname())), "public"),
            (clients.enter_context(socket.socket(socket.AF_UNIX)), "control"),
        ]
        waiting[2][0].connect(str(tmp_path / "control.sock"))
        for client, _ in waiting:
            client.sendall(b"GET /v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n")
        done = run_onebitd(
            *("-m", str(tmp_path / "none.gguf"), "--llama-server", str(DECODER)),
            runtime=tmp_path / "rt",
            passed={"http": public, "control": control},
        )
        assert done.returncode == ConfigError.exit_status, done.stderr
        for client, kind in waiting:
            client.settimeout(10)
            reply = b"".join(iter(lambda client=client: client.recv(65536), b""))  # type: ignore[misc]
            assert reply.startswith(b"HTTP/1.1 503 ")
            assert (b"none.gguf" in reply) == (kind == "control")
        for listener in (public, control):
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()


def start_with(name: str, host: str, runtime: Path) -> subprocess.CompletedProcess[str]:
    """Run onebitd with one passed socket, for what ends by itself."""
    model = runtime / "tiny.gguf"
    model.write_bytes(tiny_state.gguf())
    with socket.create_server((host, 0)) as listener:
        return run_onebitd(
            *("-m", str(model), "--llama-server", str(DECODER)),
            runtime=runtime,
            passed={name: listener},
        )


def test_passed_http_beyond_loopback_without_keys_is_refused(tmp_path: Path) -> None:
    """A socket unit may listen anywhere, and http.host then says nothing about who comes."""
    done = start_with("http", "0.0.0.0", tmp_path)  # noqa: S104 - nobody is served
    assert done.returncode == ConfigError.exit_status, done.stderr
    assert "http.api_key_file: required because the socket that systemd passed" in done.stderr


def test_passed_socket_with_a_name_of_its_own_is_refused(tmp_path: Path) -> None:
    """A socket that nobody would serve leaves its clients hanging; say what the unit lacks."""
    done = start_with("onebitd-http@qwen.socket", "127.0.0.1", tmp_path)
    assert done.returncode == ConfigError.exit_status, done.stderr
    assert "FileDescriptorName=http" in done.stderr
