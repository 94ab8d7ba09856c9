"""onebitd.adapters.http_server: how many, how large, how slow, and what beyond."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from typing import Any

import pytest
import trio
import trio.testing

from onebitd.adapters import descriptors, http_connection
from onebitd.core.errors import RequestError
from tests.adapters.http_rig import Served, Talk, error_in, reply, serving

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
WAIT = b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n"


async def busy(served: Served) -> Talk:
    """Open a connection with a reply that runs."""
    talk = await served.connect(WAIT)
    await talk.until(b"begun")
    return talk


async def kept(served: Served) -> Talk:
    """Open a connection that has had its reply, and does nothing."""
    talk = await served.connect(GET)
    assert (await talk.reply())[0] == 200
    await trio.testing.wait_all_tasks_blocked()
    return talk


async def test_http_server_full_says_503_at_once_and_serves_again_when_one_has_left() -> None:
    """Retry-After, the public shape, the end; the application is not asked; nobody is cut off."""
    async with serving(max_connections=2) as served:
        first, second = [await busy(served) for _ in range(2)]
        silent = await served.connect()  # who says nothing holds nobody up
        for sent in (GET, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 300000\r\n\r\n"):
            talk = await served.connect(sent)
            await talk.stream.send_all(b"x" * 300_000)
            came = await talk.rest()
            assert came.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
            assert b"\r\nretry-after: 5\r\n" in came
            error = error_in(came)
            assert "http.max_connections" in error["message"]
            assert (error["type"], error["code"]) == ("unavailable_error", 503)
        assert served.app.ended == []
        await first.stream.aclose()
        with trio.fail_after(10):
            await served.app.disconnected.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert b"200" in await served.get("/")
        assert error_in(await silent.rest())["code"] == 503
        served.server.max_connections = 1
        assert (await served.get("/")).startswith(b"HTTP/1.1 503 ")
        await second.stream.send_all(b"still here")


async def test_http_server_full_closes_what_was_idle_longest() -> None:
    """A kept connection makes room, the oldest first; one that waits for its reply does not."""
    async with serving(max_connections=3) as served:
        running = await busy(served)
        first, second = [await kept(served) for _ in range(2)]
        third = await kept(served)
        assert await first.rest() == b""
        await second.stream.send_all(GET)
        assert (await second.reply())[0] == 200
        await trio.testing.wait_all_tasks_blocked()
        assert b"200" in await served.get("/")
        assert await third.rest() == b""
        await second.stream.send_all(WAIT)
        await second.until(b"begun")
        await busy(served)
        assert (await served.get("/")).startswith(b"HTTP/1.1 503 ")
        await running.stream.send_all(b"still here")


async def test_http_server_full_does_not_close_a_connection_whose_request_has_come() -> None:
    """Not even when it was not read yet."""
    async with serving() as served:
        talk = await kept(served)
        os.write(talk.stream.socket.fileno(), GET)  # and no turn for the server
        assert not served.server._make_room()
        assert (await talk.reply())[0] == 200
        await trio.testing.wait_all_tasks_blocked()
        assert served.server._make_room()
        assert await talk.rest() == b""


async def test_http_server_limit_that_was_lowered_is_reached_as_soon_as_somebody_comes() -> None:
    """Every kept connection beyond it is closed; the bug: one for each newcomer, so never."""
    async with serving() as served:
        running = await busy(served)
        idle = [await kept(served) for _ in range(5)]
        served.server.max_connections = 3
        assert b"200" in await served.get("/")
        for talk in idle[:4]:
            assert await talk.rest() == b""
        await idle[4].stream.send_all(GET)
        assert (await idle[4].reply())[0] == 200
        assert "/wait" not in served.app.ended
        await running.stream.aclose()


async def test_http_server_client_that_is_not_admitted_gets_that_answer_only() -> None:
    """`admit` decides before anything was read."""
    refused = RequestError(403, "not you", kind="permission_error")
    async with serving(admit=lambda sock: refused) as served:
        came = await served.get("/")
        assert came.startswith(b"HTTP/1.1 403 Forbidden\r\n")
        assert error_in(came)["message"] == "not you"
        assert served.app.ended == []


async def test_http_server_hundred_fields_are_fine() -> None:
    """The limit is one that no client meets by accident."""
    async with serving() as served:
        fields = b"".join(b"a%d: b\r\n" % number for number in range(98))
        head = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + fields + b"\r\n"
        talk = await served.connect(head)
        assert (await talk.rest()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("before", "goes_on"),
    [((), True), ((GET,), True), ((GET + b"GE",), True), ((GET, GET + b"GE"), False)],
    ids=["first", "second", "pipelined", "pipelined_and_silent"],
)
async def test_http_server_head_that_does_not_come_whole_in_time_gets_408(
    before: tuple[bytes, ...], goes_on: bool
) -> None:
    """A byte now and then does not help, whatever was served before; others are served."""
    async with serving(head_timeout_s=0.2) as served:
        talk = await served.connect()
        for sent in before:
            await talk.stream.send_all(sent)
            assert (await talk.reply())[0] == 200

        async def trickle() -> None:
            try:
                for byte in b"GET / HTTP/1.1\r\nHost: " + b"x" * 1000:
                    await talk.stream.send_all(bytes([byte]))
                    await trio.sleep(0.01)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass

        async with trio.open_nursery() as nursery:
            if goes_on:
                nursery.start_soon(trickle)
            assert b"200" in await served.get("/")
            with trio.fail_after(10):
                await talk.until(b"}}")
            nursery.cancel_scope.cancel()
        came = await talk.rest()
        assert came.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert error_in(came)["code"] == 408


async def test_http_server_connection_that_says_nothing_is_closed_without_a_word() -> None:
    """head_timeout_s from the accept: whoever opens a connection in advance gets no 408."""
    async with serving(head_timeout_s=0.1) as served:
        talk = await served.connect()
        assert await talk.rest() == b""


async def test_http_server_head_time_limits_neither_body_nor_reply_nor_idleness() -> None:
    """Only heads are held against it."""
    async with serving(head_timeout_s=0.1) as served:
        talk = await served.connect(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n")
        await trio.sleep(0.2)
        await talk.stream.send_all(b"ab")
        assert (await talk.reply())[2] == b"POST /  ab"
        await trio.sleep(0.2)
        await talk.stream.send_all(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await talk.until(b"\r\n\r\n")
        await trio.sleep(0.2)
        served.app.go.set()
        assert (await talk.reply())[2] == b"12345"


async def test_http_server_body_that_nobody_takes_ends_with_the_reply() -> None:
    """The client reads the reply, not a reset; the bug: the connection stayed for ever."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await reply(send, b"no, thanks")

    async with serving(app) as served:
        talk = await served.connect(
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n"
        )
        await talk.stream.send_all(b"x" * 3_000_000)  # many clients read nothing before that
        assert (await talk.rest()).endswith(b"no, thanks")
        await talk.stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert not served.server._connections


async def test_http_server_body_in_tiny_chunks_leaves_others_their_turns() -> None:
    """What one read brings is not worked off at a stretch; the bug: a fifth of a second for it."""
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            await trio.lowlevel.checkpoint()
            for connection in served.server._connections:
                most = max(most, len(connection._requests.inbox._pieces))

    async with serving() as served, trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        talk = await served.connect(head + b"1\r\nx\r\n" * 9000 + b"0\r\n\r\n")
        assert (await talk.reply())[2].count(b"x") == 9000
        nursery.cancel_scope.cancel()
    assert 0 < most < 500


async def test_http_server_pipeline_that_goes_on_is_not_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long it is; what counts is that the server still takes some of it."""
    monkeypatch.setattr(http_connection, "_READ_AHEAD_BYTES", 500)
    monkeypatch.setattr(http_connection, "_FULL_S", 0.4)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await trio.sleep(0.05)
        await reply(send, b"done")

    async with serving(app) as served:
        talk = await served.connect(GET * 30)
        for _ in range(30):
            assert (await talk.reply())[2] == b"done"


async def test_http_server_stalled_readers_cost_what_the_kernel_holds_for_them() -> None:
    """20 of them, of an endless stream: the application gets rid of a bounded number of bytes."""
    sent: dict[str, int] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            sent[scope["path"]] = sent.get(scope["path"], 0) + 65536

    async with serving(app) as served:
        for number in range(20):
            await served.connect(f"GET /{number} HTTP/1.1\r\nHost: x\r\n\r\n".encode(), 4096)
        before: dict[str, int] = {"": 0}
        while before != sent or len(sent) < 20:
            before = dict(sent)
            await trio.testing.wait_all_tasks_blocked(0.1)
        # Twice the 256 KiB asked for, what the client's side takes, and the write that waits.
        assert max(sent.values()) <= (512 + 64 + 64) * 1024
        await served.stop()


async def test_http_server_reader_that_is_slow_but_reads_is_not_cut_off() -> None:
    """write_timeout_s is for 64 KiB, not for all of a large reply."""
    body = b"y" * 3_000_000

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await reply(send, body)

    async with serving(app, write_timeout_s=0.5) as served:
        talk = await served.connect(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 65536)
        count = 0
        with trio.fail_after(30):
            while count < len(body):
                await trio.sleep(0.02)
                came = await talk.stream.receive_some(65536)
                assert came
                count += len(came)


HARD_PRESSED = """
import resource, socket, sys, trio
from onebitd.adapters.http_server import HttpServer

async def app(scope, receive, send):
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if scope["path"] == "/wait":
        while (await receive())["type"] != "http.disconnect":
            pass
    await send({"type": "http.response.body", "body": b"ok", "more_body": False})

listener = socket.create_server(("127.0.0.1", 0), backlog=200)
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
print(listener.getsockname()[1], flush=True)
trio.run(HttpServer(app, [listener]).run)
"""


async def test_http_server_without_descriptors_waits_and_goes_on() -> None:
    """Idle connections make room; where none is idle, newcomers wait until somebody leaves."""
    process = subprocess.Popen(  # noqa: ASYNC220 - a moment, in a test
        [sys.executable, "-c", HARD_PRESSED], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    served = Served(("127.0.0.1", int(process.stdout.readline())), None, None)  # type: ignore[arg-type]
    try:
        for _ in range(40):
            await kept(served)
        waiting = [await served.connect(WAIT) for _ in range(40)]
        with trio.fail_after(30):
            first = await trio.to_thread.run_sync(process.stderr.readline)
        assert b"Too many open files" in first
        late = await served.connect(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        for talk in waiting:
            await talk.stream.aclose()
        assert (await late.rest()).endswith(b"ok")
        assert process.poll() is None
    finally:
        served.hang_up()
        process.kill()
        _, told = process.communicate()
    assert told.count(b"\n") < 20, "one line when it begins"


RAISED = """
import subprocess, sys, trio
from onebitd.adapters import descriptors
from onebitd.adapters.process import Guard, spawn

print(descriptors.raise_limit(300), descriptors.raise_limit(200), descriptors.raise_limit(2000))
guard = Guard()
script = 'until test "$(ulimit -Sn)" = 100; do sleep 0.01; done; ulimit -Hn'

async def main():
    child = spawn(["/bin/sh", "-c", script], env={"PATH": "/bin:/usr/bin"}, guard=guard)
    async with child.stdout as stdout:
        print((await stdout.receive_some()).decode())
    await child.wait_gone()

trio.run(main)
guard.close()
"""


def test_descriptors_limit_is_raised_for_us_alone() -> None:
    """As far as the hard limit goes; a child gets back what was."""

    def low() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 500))

    done = subprocess.run(
        [sys.executable, "-c", RAISED],
        preexec_fn=low,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["300", "300", "500", "500"]


def test_descriptors_limit_that_is_enough_is_left_alone() -> None:
    """Nothing is set, and what there is comes back."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert descriptors.raise_limit(1) == before[0]
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
