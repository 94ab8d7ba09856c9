"""The control socket's client: answers, errors and the search for instances."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import pytest
import trio

from onebitd import client
from onebitd.core import paths
from onebitd.core.errors import UsageError
from onebitd.core.handoff import Outcome
from onebitd.core.handoff_filter import HandoffFilter, parse_time
from tests.surfaces.control_server import FakeView, control_app, make_record, serve_unix

NOBODY = 65534


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """Return a directory whose name leaves room for a socket's (107 bytes in all)."""
    with tempfile.TemporaryDirectory(prefix="ob") as name:
        yield Path(name)


@contextlib.contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """Listen on a Unix socket."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        yield listener


@contextlib.contextmanager
def answering(path: Path, answer: bytes) -> Iterator[None]:
    """Answer one connection with these bytes and close it."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(answer)

    with listening(path) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join()


def reply(body: bytes, status: str = "200 OK") -> bytes:
    """Return a whole reply."""
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def test_client_real_server_answers_every_question(short_tmp: Path) -> None:
    """status, config, handoffs and follow against the real application and server."""
    view = FakeView()
    for number in range(3):
        view.history.add(make_record(number, Outcome.FALLBACK if number else Outcome.USED))
    path = short_tmp / "c"
    control = client.ControlClient(str(path))

    def follow_two() -> list[str]:
        with contextlib.closing(control.follow(HandoffFilter(limit=2))) as records:
            return [next(records)["request_id"] for _ in range(2)]

    with trio.fail_after(60):
        async with serve_unix(control_app(view), path):
            status = await trio.to_thread.run_sync(control.status)
            assert status == view.status().to_json()
            assert await trio.to_thread.run_sync(control.config) == view.config()
            wanted = HandoffFilter(limit=5, outcome="fallback")
            found = await trio.to_thread.run_sync(control.handoffs, wanted)
            assert [record["request_id"] for record in found] == ["r1", "r2"]
            wanted = HandoffFilter(since=parse_time("2026-05-01T14:00:02+02:00"))
            found = await trio.to_thread.run_sync(control.handoffs, wanted)
            assert [record["request_id"] for record in found] == ["r2"]
            summary = await trio.to_thread.run_sync(control.summary, HandoffFilter())
            assert summary["outcomes"] == {"used": 1, "fallback": 2}
            assert await trio.to_thread.run_sync(follow_two) == ["r1", "r2"]


async def test_client_error_answer_carries_the_daemons_words(short_tmp: Path) -> None:
    """What the daemon refuses is told in its own sentence."""
    path = short_tmp / "c"
    control = client.ControlClient(str(path))
    with trio.fail_after(60):
        async with serve_unix(control_app(FakeView()), path):
            with pytest.raises(client.BadAnswer, match="answered 400: limit=5000000: must"):
                await trio.to_thread.run_sync(control.handoffs, HandoffFilter(limit=5_000_000))


def test_client_no_socket_is_no_daemon(short_tmp: Path) -> None:
    """A missing socket: exit status 3, and its name."""
    with pytest.raises(client.NoDaemon, match=r"/c does not exist") as caught:
        client.ControlClient(str(short_tmp / "c")).status()
    assert caught.value.exit_status == 3


def test_client_socket_without_a_listener_is_no_daemon(short_tmp: Path) -> None:
    """What a killed daemon leaves behind is recognised."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(short_tmp / "c"))
    with pytest.raises(client.NoDaemon, match="nobody listens"):
        client.ControlClient(str(short_tmp / "c")).status()


def test_client_path_too_long_for_a_socket_is_no_daemon(short_tmp: Path) -> None:
    """The kernel's limit is told, not a traceback."""
    with pytest.raises(client.NoDaemon, match="too long"):
        client.ControlClient(str(short_tmp / ("x" * 120))).status()


def test_client_silent_daemon_is_a_timeout_that_names_the_socket(short_tmp: Path) -> None:
    """A hung daemon does not hang its client."""
    with (
        listening(short_tmp / "c"),
        pytest.raises(client.AnswerTimeout, match=r"/c within 0.05 s") as caught,
    ):
        client.ControlClient(str(short_tmp / "c"), timeout_s=0.05).status()
    assert caught.value.exit_status == 3


def test_client_status_that_comes_in_drops_is_a_timeout(short_tmp: Path) -> None:
    """A bound on each step is none on all of them."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n")
            while not over.wait(0.05):
                connection.sendall(b" ")

    over = threading.Event()
    with listening(short_tmp / "c") as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(client.AnswerTimeout):
            client.ControlClient(str(short_tmp / "c"), timeout_s=0.3).status()
        over.set()
        thread.join()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "not HTTP"),
        (b"", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}", "not HTTP"),
        (reply(b"hello"), "not JSON"),
        (reply(b"[]"), "not a JSON object"),
        (reply(b"{}"), "no list of handoffs"),
        (reply(b'{"handoffs": [{}, 1]}'), "no list of handoffs"),
        (reply(b"[" * 100_000), "not JSON"),
        (reply(b"<html>", "502 Bad Gateway"), "answered 502: Bad Gateway"),
        (reply(b'{"error": {"message": "why"}}', "503 x"), "answered 503: why"),
    ],
)
def test_client_answer_of_something_else_is_bad(short_tmp: Path, answer: bytes, words: str) -> None:
    """Whatever listens there, the client says what is wrong with its answer."""
    with (
        answering(short_tmp / "c", answer),
        pytest.raises(client.BadAnswer, match=words) as caught,
    ):
        client.ControlClient(str(short_tmp / "c")).handoffs(HandoffFilter(limit=1))
    assert caught.value.exit_status == 1


def test_client_refused_by_the_daemon_is_a_matter_of_permission(short_tmp: Path) -> None:
    """The socket's mode let us in, the daemon does not: exit status 4, in its words."""
    answer = reply(b'{"error": {"message": "join the group x"}}', "403 Forbidden")
    with (
        answering(short_tmp / "c", answer),
        pytest.raises(client.AccessDenied, match="join the group x") as caught,
    ):
        client.ControlClient(str(short_tmp / "c")).status()
    assert caught.value.exit_status == 4


def test_client_follow_connection_that_breaks_ends_the_iteration(short_tmp: Path) -> None:
    """A killed daemon is the end of the stream, not an error in the middle of it."""
    answer = b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\na\r\n{"a": 12}\n\r\n'
    with answering(short_tmp / "c", answer):
        control = client.ControlClient(str(short_tmp / "c"))
        assert list(control.follow(HandoffFilter())) == [{"a": 12}]


def _deny_group(path: Path) -> None:
    path.chmod(0o060)


def _deny_all(path: Path) -> None:
    path.chmod(0)


def _deny_directory(path: Path) -> None:
    path.parent.chmod(0o010)


@pytest.mark.parametrize(
    ("deny", "gid", "words"),
    [
        (_deny_group, 54321, "is for the group 54321: join it with `sudo usermod -aG 54321"),
        (_deny_directory, 54321, "is for the group 54321"),
        (_deny_all, 54321, "is for the user .* alone"),
        (_deny_group, 0, "is for the user .* alone"),
    ],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other groups")
def test_client_socket_of_others_is_denied_with_the_group_to_join(
    short_tmp: Path, deny: Callable[[Path], None], gid: int, words: str
) -> None:
    """Exit status 4 and the next step; where no group would help, the user who may."""
    short_tmp.chmod(0o755)
    path = short_tmp / "d" / "c"
    script = (
        "import os, sys; from onebitd import client\n"
        # Here and not in the spawn: this interpreter need not be readable to everybody.
        f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        f"try: client.ControlClient({str(path)!r}).status()\n"
        "except client.AccessDenied as exc: print(exc); sys.exit(exc.exit_status)\n"
    )
    with listening(path):
        for one in (path, path.parent):
            os.chown(one, 0, gid)
        deny(path)
        done = subprocess.run(
            [sys.executable, "-B", "-c", script],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 4, done.stderr
    assert re.search(words, done.stdout)


def test_find_instances_tells_running_from_stopped(short_tmp: Path) -> None:
    """Only a socket that takes a connection is a running instance; files are none at all."""
    root = PurePosixPath(short_tmp)
    (short_tmp / "file").touch()
    (short_tmp / "empty").mkdir()
    with listening(short_tmp / "live" / "control.sock"):
        with listening(short_tmp / "dead" / "control.sock"):
            pass
        found = client.find_instances([root, PurePosixPath("/nonexistent")])
        assert {instance.name: instance.state for instance in found} == {
            "live": "running",
            "dead": "stopped",
            "empty": "stopped",
        }
        only = client.find_instances([root], "live")
        assert [(one.name, one.socket) for one in only] == [("live", f"{root}/live/control.sock")]


def test_choose_socket_named_instance_is_found_in_the_session_directory(short_tmp: Path) -> None:
    """`-i NAME` finds a user's own daemon, and one that systemd put elsewhere."""
    path = short_tmp / "onebitd" / "test-own" / "control.sock"
    with listening(path):
        environ = {"XDG_RUNTIME_DIR": str(short_tmp)}
        assert client.choose_socket("test-own", environ, os.geteuid()) == str(path)
        environ = {"RUNTIME_DIRECTORY": str(path.parent)}
        assert client.choose_socket("test-own", environ, os.geteuid()) == str(path)


def twins(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return the sockets of a user's and of a system's instance of one name."""
    first, second = (short_tmp / side / "onebitd/twin/control.sock" for side in "ab")
    system = str(second.parents[1])
    monkeypatch.setattr(paths, "SYSTEM_RUNTIME", system)
    return first, second


def test_choose_socket_two_of_a_name_is_an_error_that_lists_both(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never guesses between a system's and a user's instance."""
    first, second = twins(short_tmp, monkeypatch)
    environ = {"XDG_RUNTIME_DIR": str(short_tmp / "a")}
    with listening(first), listening(second), pytest.raises(UsageError) as caught:
        client.choose_socket("twin", environ, os.geteuid())
    assert str(first) in str(caught.value)
    assert str(second) in str(caught.value)
    assert "--socket" in str(caught.value)


@pytest.mark.parametrize("side", [0, 1])
def test_choose_socket_program_of_a_service_asks_that_service(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, side: int
) -> None:
    """The command that reloads a user's service does not stumble over the system's of that name."""
    sockets = twins(short_tmp, monkeypatch)
    environ = {
        "XDG_RUNTIME_DIR": str(short_tmp / "a"),
        "RUNTIME_DIRECTORY": str(sockets[side].parent),
    }
    with listening(sockets[0]), listening(sockets[1]):
        assert client.choose_socket("twin", environ, os.geteuid()) == str(sockets[side])


@pytest.mark.parametrize(
    ("sockets", "booted", "words"),
    [
        (
            [],
            True,
            "`systemctl start onebitd@q` if it is a service (with --user if it is your own), else"
            " with `onebitd --instance q`",
        ),
        ([], False, "start it with `onebitd --instance q`"),
        (["/run/onebitd/q/control.sock"], True, "start it with `systemctl start onebitd@q`"),
        (["/run/onebitd/q/control.sock"], False, "start it with `onebitd --instance q`"),
        (["/run/user/7/onebitd/q/control.sock"], True, "start it with `onebitd --instance q`"),
        (
            ["/run/onebitd/q/control.sock", "/run/user/7/onebitd/q/control.sock"],
            True,
            "`systemctl start onebitd@q` if it is a service",
        ),
    ],
)
def test_no_daemon_names_systemctl_only_where_it_would_help(
    sockets: list[str], booted: bool, words: str
) -> None:
    """Not without systemd, and not for a directory that no service has."""
    found = [client.Instance("q", name, "stopped") for name in sockets]
    text = client._no_daemon("q", found, None, booted=booted, uid=7)
    assert words in text
    of_root = client._no_daemon("q", found, None, booted=booted, uid=0)
    assert of_root == text.replace(" (with --user if it is your own)", "")
    assert ("systemctl" in text) is ("systemctl" in words)


def test_choose_socket_stopped_instance_names_the_next_step(short_tmp: Path) -> None:
    """No daemon: how to start that very instance, which is a user's."""
    (short_tmp / "onebitd" / "qwen-test").mkdir(parents=True)
    environ = {"XDG_RUNTIME_DIR": str(short_tmp)}
    with pytest.raises(client.NoDaemon, match="`onebitd --instance qwen-test`"):
        client.choose_socket("qwen-test", environ, os.geteuid())


def test_choose_socket_directory_in_tmp_of_somebody_else_is_passed_over() -> None:
    """Whoever makes /tmp/onebitd-UID first must not be asked for our daemon's status."""
    uid = 4_000_000 + os.getpid()
    trap = Path(f"/tmp/onebitd-{uid}")
    try:
        with listening(trap / "evil" / "control.sock"):
            trap.chmod(0o700)  # ours, not that user's
            with pytest.raises(client.NoDaemon, match=f"{trap} was passed over"):
                client.choose_socket("evil", {}, uid)
            if os.geteuid() == 0:
                os.chown(trap, uid, -1)
                assert client.choose_socket("evil", {}, uid) == f"{trap}/evil/control.sock"
                trap.chmod(0o777)
                with pytest.raises(client.NoDaemon, match=f"{trap} was passed over"):
                    client.choose_socket("evil", {}, uid)
    finally:
        (trap / "evil" / "control.sock").unlink(missing_ok=True)
        (trap / "evil").rmdir()
        trap.rmdir()
