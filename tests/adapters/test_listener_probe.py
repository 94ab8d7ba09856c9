"""The look at the public listener: whatever is there, it ends in time and says what it found."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from onebitd.adapters import listener_probe
from onebitd.adapters.listener_probe import Answered

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


@contextlib.contextmanager
def answering(listener: socket.socket, *parts: bytes, hold: bool = False) -> Iterator[None]:
    """Answer one connection so, and with `hold` leave it open; a listener that is ours ends."""
    done = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            request = connection.recv(65536)
            assert request.startswith(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
            for part in parts:
                connection.sendall(part)
            if hold:
                done.wait(30)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(30)
        listener.close()


def tcp(host: str = "127.0.0.1", family: int = socket.AF_INET) -> tuple[socket.socket, str]:
    """Return a listener and its address as a status has it."""
    listener = socket.socket(family)
    listener.bind((host, 0))
    listener.listen()
    shown = f"[{host}]" if ":" in host else host
    return listener, f"{shown}:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("parts", "hold", "status", "error"),
    [
        ([OK], False, 200, None),
        ([b"HTTP/1.1 50", b"3 Service Unavailable\r\n", b"\r\n"], True, 503, None),
        ([], False, None, "it closed the connection without an answer"),
        ([], True, None, "no answer within 0.3 s"),
        ([b"HTTP/1.1 2"], True, None, "no answer within 0.3 s"),
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], False, None, "what it answers is not HTTP"),
        ([b"x" * 9000], True, None, "what it answers is not HTTP"),
    ],
    ids=["ok", "in-parts", "closes", "silent", "stuck", "other-protocol", "flood"],
)
def test_ask_health_says_what_came(
    parts: list[bytes], hold: bool, status: int | None, error: str | None
) -> None:
    """A status, or why there is none; never longer than its bound."""
    listener, address = tcp()
    with answering(listener, *parts, hold=hold):
        found = listener_probe.ask_health(address, 0.3 if hold else 30.0)
    assert (found.url, found.status, found.error) == (f"http://{address}/health", status, error)
    assert (found.ms is not None) is (status is not None)
    assert found.tried


def test_ask_health_of_a_port_that_cannot_be_is_no_crash() -> None:
    """The daemon may say anything."""
    assert listener_probe.ask_health("127.0.0.1:99999").status is None


def test_ask_health_nobody_listens_is_the_kernels_word() -> None:
    """The address has been somebody's: the port is free again."""
    listener, address = tcp()
    listener.close()
    found = listener_probe.ask_health(address)
    assert found == Answered(f"http://{address}/health", None, None, "connection refused")


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "http://127.0.0.1"])  # noqa: S104 - asked only
def test_ask_health_of_a_wildcard_address_asks_this_machine(everywhere: str) -> None:
    """Nobody can connect to 0.0.0.0 on every system."""
    listener, address = tcp()
    with answering(listener, OK):
        found = listener_probe.ask_health(f"{everywhere}:{address.rpartition(':')[2]}")
    assert found.status == 200


def test_ask_health_over_ipv6_takes_the_brackets_away() -> None:
    """As the daemon shows such an address."""
    try:
        listener, address = tcp("::1", socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with answering(listener, OK):
        assert listener_probe.ask_health(address).status == 200


def test_ask_health_of_a_unix_socket(tmp_path: Path) -> None:
    """A public listener that systemd passed may be one."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.fspath(tmp_path / "s"))
    listener.listen()
    with answering(listener, OK):
        found = listener_probe.ask_health(f"unix:{tmp_path}/s")
    assert (found.url, found.status) == (f"unix:{tmp_path}/s", 200)
    gone = listener_probe.ask_health(f"unix:{tmp_path}/gone")
    assert gone.error == "no such file or directory"


@pytest.mark.parametrize("address", ["", "nonsense", "[fe80::1]:8000", "127.0.0.1:http"])
def test_ask_health_of_no_address_was_not_tried(address: str) -> None:
    """That says nothing of the daemon."""
    found = listener_probe.ask_health(address)
    assert (found.status, found.tried) == (None, False)


def test_ask_health_that_this_user_may_not_says_nothing_of_the_daemon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who may ask the control socket need not be who may use the public one."""

    def denied(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(listener_probe, "_status_from", denied)
    found = listener_probe.ask_health("unix:/run/x")
    assert (found.error, found.tried) == ("this user may not connect to it", False)
