"""onebitd.adapters.llama_server against a scripted server on a real Unix socket."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from onebitd.adapters import llama_server
from onebitd.adapters.llama_server import LlamaServer
from onebitd.core.errors import (
    BackendError,
    BackendGone,
    BackendRefused,
    BackendTimeout,
    RequestError,
)
from tests.llama_builds import short_temporary_directory

Script = Callable[[trio.SocketStream], Awaitable[None]]


class Scripted:
    """A server whose every connection is one script; `requests` is what came, head and body."""

    def __init__(self, path: Path, script: Script) -> None:
        self.client = LlamaServer(str(path))
        self.requests: list[tuple[bytes, bytes]] = []
        self.closed = trio.Event()
        self._script = script

    async def serve(self, stream: trio.SocketStream) -> None:
        """Read one request, play the script, wait for the client's end."""
        async with stream:
            data = b""
            while b"\r\n\r\n" not in data:
                data += bytes(await stream.receive_some())
            head, _, body = data.partition(b"\r\n\r\n")
            length = [
                int(line.partition(b":")[2])
                for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length:")
            ]
            while length and len(body) < length[0]:
                body += bytes(await stream.receive_some())
            self.requests.append((head, body))
            try:
                await self._script(stream)
                while await stream.receive_some():
                    pass
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            self.closed.set()


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[Scripted]:
    """Serve a script; the client must have closed its connection at the end."""
    with short_temporary_directory() as home:
        listener = trio.socket.socket(socket.AF_UNIX)
        await listener.bind(str(home / "s"))
        listener.listen(8)
        scripted = Scripted(home / "s", script)
        async with trio.open_nursery() as nursery:
            await nursery.start(
                trio.serve_listeners, scripted.serve, [trio.SocketListener(listener)]
            )
            yield scripted
            if scripted.requests:
                with trio.fail_after(10):
                    await scripted.closed.wait()
            nursery.cancel_scope.cancel()


def answer(*parts: bytes) -> Script:
    """Send these pieces, each by itself."""

    async def script(stream: trio.SocketStream) -> None:
        for part in parts:
            await stream.send_all(part)
            await trio.sleep(0.002)

    return script


def answer_and_hang_up(*parts: bytes) -> Script:
    """Send these pieces and close."""

    async def script(stream: trio.SocketStream) -> None:
        await answer(*parts)(stream)
        await stream.aclose()

    return script


async def silence(stream: trio.SocketStream) -> None:
    """Say nothing."""


def reply(body: object, status: int = 200) -> bytes:
    """Return a whole JSON reply."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data


def chunked(*parts: bytes) -> list[bytes]:
    """Return a chunked reply in pieces."""
    head = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"
    )
    return [head, *(b"%x\r\n%s\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n"]


@pytest.fixture(autouse=True)
def no_descriptor_left() -> Iterator[None]:
    """Every test closes what it opened."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


Call = Callable[[LlamaServer], Awaitable[Any]]

CALLS: list[tuple[Call, bytes, dict[str, Any] | None, object, object]] = [
    (LlamaServer.is_ready, b"GET /health", None, {"status": "ok"}, True),
    (LlamaServer.props, b"GET /props", None, {"n": 1}, {"n": 1}),
    (
        lambda server: server.apply_template(b'{"messages": []}'),
        b"POST /apply-template",
        {"messages": []},
        {"prompt": "p"},
        "p",
    ),
    (
        lambda server: server.tokenize("a\u20ac"),
        b"POST /tokenize",
        {"content": "a\u20ac", "add_special": True, "parse_special": True},
        {"tokens": [1, 2]},
        [1, 2],
    ),
    (
        lambda server: server.restore("state-1"),
        b"POST /slots/0?action=restore",
        {"filename": "state-1", "leave_one_token": True},
        {"n_restored": 3, "n_read": 99, "timings": {"restore_ms": 1.5}},
        llama_server.Restored(3, 99, 1.5),
    ),
    (
        lambda server: server.restore("state-1"),
        b"POST /slots/0?action=restore",
        None,
        {"n_restored": 3, "n_read": 99},
        llama_server.Restored(3, 99, None),
    ),
    (
        lambda server: server.save("x"),
        b"POST /slots/0?action=save",
        {"filename": "x"},
        {"n_saved": 5},
        5,
    ),
    (LlamaServer.erase, b"POST /slots/0?action=erase", {}, {"n_erased": 5}, None),
    (
        lambda server: server.fill_slot((1, 2)),
        b"POST /completion",
        {
            "prompt": [1, 2],
            "n_predict": 0,
            "grammar": 'root ::= "a"',
            "id_slot": 0,
            "cache_prompt": False,
        },
        {"content": ""},
        None,
    ),
]


@pytest.mark.parametrize(("call", "target", "sent", "said", "result"), CALLS)
async def test_llama_server_call_sends_what_the_decoder_knows_and_returns_its_answer(
    call: Call, target: bytes, sent: dict[str, Any] | None, said: object, result: object
) -> None:
    """The request line, the JSON body, one connection that is closed, the answer."""
    async with serving(answer(reply(said))) as scripted:
        assert await call(scripted.client) == result
    [(head, body)] = scripted.requests
    assert head.startswith(target + b" HTTP/1.1\r\n")
    assert b"\r\nconnection: close" in head.lower()
    if sent is not None:
        assert json.loads(body) == sent


@pytest.mark.parametrize("piece", [1, 7, 1000])
async def test_llama_server_chunked_answer_is_put_together_however_it_arrives(piece: int) -> None:
    """Chunk borders, reads and heads have nothing to do with each other."""
    data = b"".join(chunked(b'{"prompt":', b' "hello', b'"}'))
    parts = [data[at : at + piece] for at in range(0, len(data), piece)]
    async with serving(answer(*parts)) as scripted:
        assert await scripted.client.apply_template(b"{}") == "hello"


async def test_llama_server_answer_until_close_is_taken_whole() -> None:
    """No length and no chunks: the end of the connection is the end of the answer."""
    async with serving(
        answer_and_hang_up(b"HTTP/1.1 200 OK\r\n\r\n", b'{"tokens"', b":[4]}")
    ) as one:
        assert await one.client.tokenize("x") == [4]


async def test_llama_server_interim_answer_is_passed_over() -> None:
    """100 Continue is not the answer."""
    async with serving(answer(b"HTTP/1.1 100 Continue\r\n\r\n", reply({"tokens": []}))) as one:
        assert await one.client.tokenize("") == []


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (
            400,
            {"error": {"code": 400, "message": "prompt too long", "type": "x"}},
            "prompt too long",
        ),
        (500, {"error": "just a text"}, "just a text"),
        (501, b"<html>no</html>", "<html>no</html>"),
        (404, b"", ""),
        (503, {"error": {"message": "Loading model"}}, "Loading model"),
        (500, b"[" * 100_000, "[" * 200),
    ],
)
async def test_llama_server_error_status_carries_the_decoders_own_words(
    status: int, body: object, message: str
) -> None:
    """BackendRefused: status and message, or the start of whatever it sent."""
    async with serving(answer(reply(body, status))) as scripted:
        with pytest.raises(BackendRefused) as caught:
            await scripted.client.tokenize("x")
    assert (caught.value.status, caught.value.message) == (status, message)


@pytest.mark.parametrize("status", [503, 500])
async def test_llama_server_is_ready_503_means_loading_and_nothing_else_does(status: int) -> None:
    """A decoder that answers 500 to /health is not one to wait for."""
    async with serving(answer(reply({"error": {"message": "no"}}, status))) as scripted:
        if status == 503:
            assert await scripted.client.is_ready() is False
        else:
            with pytest.raises(BackendRefused):
                await scripted.client.is_ready()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (LlamaServer.props, [1]),
        (LlamaServer.props, b"not JSON"),
        (lambda server: server.apply_template(b""), {"prompt": 5}),
        (lambda server: server.tokenize(""), {"tokens": [1, "2"]}),
        (lambda server: server.tokenize(""), {"tokens": [True]}),
        (lambda server: server.tokenize(""), {"tokens": {"0": 1}}),
        (lambda server: server.restore("x"), {"n_restored": 1}),
        (lambda server: server.restore("x"), {"n_restored": "1", "n_read": 2}),
        (lambda server: server.save("x"), {}),
    ],
)
async def test_llama_server_answer_of_another_kind_is_an_error_of_the_decoder(
    call: Call, said: object
) -> None:
    """Neither gone, nor late, nor a refusal: it says something we do not understand."""
    async with serving(answer(reply(said))) as scripted:
        with pytest.raises(BackendError) as caught:
            await call(scripted.client)
    assert type(caught.value) is BackendError


WHOLE = b"".join(chunked(b'{"prompt":', b'"hello"}'))


@pytest.mark.parametrize("cut", range(0, len(WHOLE), 3))
async def test_llama_server_answer_broken_off_anywhere_is_gone(cut: int) -> None:
    """After any byte, in head, size, chunk or trailer: BackendGone, and never a short answer."""
    async with serving(answer_and_hang_up(WHOLE[:cut])) as scripted:
        with pytest.raises(BackendGone):
            await scripted.client.apply_template(b"{}")


async def test_llama_server_answer_shorter_than_its_length_is_gone() -> None:
    """The same with a Content-Length."""
    async with serving(answer_and_hang_up(reply({"prompt": "hello"})[:-1])) as scripted:
        with pytest.raises(BackendGone, match="broke off"):
            await scripted.client.apply_template(b"{}")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03 hello\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabcd\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000,
    ],
)
async def test_llama_server_answer_that_is_not_http_is_gone(garbage: bytes) -> None:
    """Whatever listens there is not a decoder that can be talked to."""
    async with serving(answer_and_hang_up(garbage)) as scripted:
        with pytest.raises(BackendGone):
            await scripted.client.props()


@pytest.mark.parametrize("there", [True, False])
async def test_llama_server_nobody_listens_is_gone(there: bool) -> None:
    """No socket, or one that its process left behind: the error says it cannot be reached."""
    with short_temporary_directory() as place:
        if there:
            with socket.socket(socket.AF_UNIX) as left:
                left.bind(str(place / "s"))
        with pytest.raises(BackendGone, match="cannot be reached"):
            await LlamaServer(str(place / "s")).props()


@pytest.mark.parametrize(
    "script",
    [
        silence,
        answer(b"HTTP/1.1 200 OK\r\n"),
        answer(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"),
    ],
    ids=["silent", "half_head", "half_body"],
)
async def test_llama_server_no_answer_in_time_is_a_timeout(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call has its limit, named with the target; the connection is closed."""
    for name in ("QUICK_TIMEOUT_S", "SLOT_TIMEOUT_S", "HEALTH_TIMEOUT_S"):
        monkeypatch.setattr(llama_server, name, 0.05)
    for call, target in (
        (LlamaServer.props, "/props"),
        (LlamaServer.erase, r"/slots/0\?action=erase"),
        (LlamaServer.is_ready, "/health"),
    ):
        async with serving(script) as scripted:
            with pytest.raises(BackendTimeout, match=f"did not answer {target} within 0.05 s"):
                await call(scripted.client)


async def test_llama_server_huge_answer_is_refused_before_it_fills_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading stops at the bound; the decoder notices that nobody listens."""
    monkeypatch.setattr(llama_server, "_MAX_ANSWER_BYTES", 1 << 20)
    sent = 0

    async def endless(stream: trio.SocketStream) -> None:
        nonlocal sent
        await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            await stream.send_all(b" " * 65536)
            sent += 65536

    async with serving(endless) as scripted:
        with pytest.raises(BackendError, match="the decoder's answer is over 1 MiB"):
            await scripted.client.props()
    assert sent < 8 << 20


@pytest.mark.parametrize(
    ("method", "body", "framed"),
    [
        (b"GET", b"", False),
        (b"HEAD", b"", False),
        (b"DELETE", b"", False),
        (b"POST", b"", True),
        (b"POST", b"abc", True),
        (b"PUT", b"", True),
        (b"DELETE", b"abc", True),
    ],
)
async def test_open_request_is_framed_by_its_length(
    method: bytes, body: bytes, framed: bool
) -> None:
    """A body has a Content-Length, and so has a method that should have one; headers pass."""
    async with serving(answer(reply(b""))) as scripted:
        headers = [(b"host", b"example"), (b"x-one", b"1"), (b"x-one", b"2")]
        got = await scripted.client.open(method, b"/a?b=%20c", headers, body)
        assert got.status == 200
        got.close()
    [(head, came)] = scripted.requests
    first, *lines = head.split(b"\r\n")
    assert first == method + b" /a?b=%20c HTTP/1.1"
    assert came == body
    wanted = [b"host: example", b"x-one: 1", b"x-one: 2", b"connection: close"]
    wanted += [b"content-length: %d" % len(body)] if framed else []
    assert [line.lower() for line in lines] == wanted


async def test_open_reply_is_readable_while_it_runs_and_its_headers_are_untouched() -> None:
    """Each piece comes out as it comes in; names are in lower case, values as sent."""
    gates = [trio.Event() for _ in range(2)]
    head, first, second, end = chunked(b"data: 1\n\n", b"data: 2\n\n")

    async def script(stream: trio.SocketStream) -> None:
        await stream.send_all(head + first)
        await gates[0].wait()
        await stream.send_all(second)
        await gates[1].wait()
        await stream.send_all(end)

    async with serving(script) as scripted:
        got = await scripted.client.open(b"POST", b"/x", [(b"host", b"x")], b"{}")
        assert dict(got.headers)[b"content-type"] == b"text/event-stream"
        for gate, data in zip(gates, (b"data: 1\n\n", b"data: 2\n\n"), strict=True):
            assert await got.read() == data
            gate.set()
        assert [await got.read(), await got.read()] == [b"", b""]
        got.close()


@pytest.mark.parametrize(
    ("method", "head"),
    [
        (b"HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"),
        (b"GET", b"HTTP/1.1 204 No Content\r\n\r\n"),
        (b"GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n"),
    ],
)
async def test_open_reply_without_a_body_ends_at_once(method: bytes, head: bytes) -> None:
    """Nothing is waited for that will not come."""
    async with serving(answer(head)) as scripted:
        got = await scripted.client.open(method, b"/", [(b"host", b"x")], b"")
        with trio.fail_after(10):
            assert await got.read() == b""
        got.close()


async def test_reply_close_tells_the_decoder_and_may_be_repeated() -> None:
    """The decoder sees the end of the connection; a read afterwards fails as gone."""
    async with serving(answer(*chunked(b"data: 1\n\n")[:2])) as scripted:
        got = await scripted.client.open(b"GET", b"/", [(b"host", b"x")], b"")
        assert await got.read() == b"data: 1\n\n"
        got.close()
        with trio.fail_after(10):
            await scripted.closed.wait()
        got.close()
        with pytest.raises(BackendGone):
            await got.read()


async def test_reply_closed_by_whoever_cancels_its_reader_is_cancelled_not_gone() -> None:
    """Or the client would hear of a broken decoder; without a cancel that is what it hears."""
    async with serving(answer(*chunked(b"data: 1\n\n")[:2])) as scripted:
        got = await scripted.client.open(b"GET", b"/", [(b"host", b"x")], b"")
        assert await got.read() == b"data: 1\n\n"
        with trio.CancelScope() as scope:
            scope.cancel()
            got.close()
            await got.read()
        assert scope.cancelled_caught


async def test_reply_closed_when_bytes_had_come_already_is_cancelled_not_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its reader has been woken by them, and comes to run after the cancel."""
    gate = trio.Event()

    async def script(stream: trio.SocketStream) -> None:
        head, first, second, _ = chunked(b"data: 1\n\n", b"data: 2\n\n")
        await stream.send_all(head + first)
        await gate.wait()
        await stream.send_all(second)

    async with serving(script) as scripted:
        got = await scripted.client.open(b"GET", b"/", [(b"host", b"x")], b"")
        assert await got.read() == b"data: 1\n\n"
        with trio.CancelScope() as scope:

            async def woken(fd: int) -> None:
                await trio.lowlevel.wait_readable(fd)
                scope.cancel()
                got.close()

            monkeypatch.setattr(llama_server, "wait_readable", woken)
            gate.set()
            await got.read()
        assert scope.cancelled_caught


async def test_reply_whose_reader_is_woken_for_nothing_takes_nothing_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The half of a chunk that was there before has been taken."""
    head, first, end = chunked(b"data: 1\n\n")
    gate = trio.Event()

    async def script(stream: trio.SocketStream) -> None:
        await stream.send_all(head + first[:1])
        await gate.wait()
        await stream.send_all(first[1:] + end)

    async with serving(script) as scripted:
        got = await scripted.client.open(b"GET", b"/", [(b"host", b"x")], b"")

        async def woken(fd: int) -> None:
            if gate.is_set():
                await trio.lowlevel.wait_readable(fd)
            gate.set()

        monkeypatch.setattr(llama_server, "wait_readable", woken)
        assert await got.read_all() == b"data: 1\n\n"
        got.close()


async def test_reply_that_ended_says_so_without_another_read() -> None:
    """With a length, once all of it was returned; never before."""
    async with serving(answer(reply(b"{}")[:-1], b"}")) as scripted:
        got = await scripted.client.open(b"GET", b"/", [(b"host", b"x")], b"")
        assert (await got.read(), got.ended) == (b"{", False)
        assert (await got.read(), got.ended) == (b"}", True)
        got.close()


async def test_open_large_body_arrives_whole_at_a_slow_reader() -> None:
    """More than a socket's buffer takes goes out as there is room."""
    body = bytes(range(256)) * 8192
    async with serving(answer(reply({}))) as scripted:
        (await scripted.client.open(b"POST", b"/", [(b"host", b"x")], body)).close()
    assert scripted.requests[0][1] == body


async def test_open_decoder_that_answers_before_the_body_and_hangs_up_is_heard() -> None:
    """A refusal of a body that is too large must not look like a dead decoder."""
    with short_temporary_directory() as home:
        listener = trio.socket.socket(socket.AF_UNIX)
        await listener.bind(str(home / "s"))
        listener.listen(1)
        with listener:
            async with trio.open_nursery() as nursery:

                async def refuse() -> None:
                    accepted, _ = await listener.accept()
                    with accepted:
                        await accepted.send(reply({"error": "too large"}, 413))

                nursery.start_soon(refuse)
                client = LlamaServer(str(home / "s"))
                got = await client.open(b"POST", b"/", [(b"host", b"x")], b"x" * (8 << 20))
                assert got.status == 413
                assert b"too large" in await got.read_all()
                got.close()


async def test_open_waits_while_the_listening_queue_is_full() -> None:
    """A decoder that accepts slowly is not gone (the bug: it was said to have hung up)."""
    with short_temporary_directory() as home, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(home / "s"))
        listener.listen(0)
        waiting = socket.socket(socket.AF_UNIX)
        with waiting:
            waiting.connect(str(home / "s"))
            async with trio.open_nursery() as nursery:

                async def accept_both() -> None:
                    await trio.sleep(0.05)
                    listener.accept()[0].close()
                    with await trio.to_thread.run_sync(lambda: listener.accept()[0]) as accepted:
                        accepted.sendall(reply({"n": 1}))

                nursery.start_soon(accept_both)
                with trio.fail_after(20):
                    assert await LlamaServer(str(home / "s")).props() == {"n": 1}


async def test_llama_server_long_text_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte is templated and tokenized in the time it needs while the decoder is busy."""
    monkeypatch.setattr(llama_server, "QUICK_TIMEOUT_S", 0.02)
    monkeypatch.setattr(llama_server, "_TEXT_BYTES_PER_S", 10)

    async def late(stream: trio.SocketStream) -> None:
        await trio.sleep(0.1)
        await stream.send_all(reply({"prompt": "p", "tokens": [1]}))

    async with serving(late) as scripted:
        assert await scripted.client.apply_template(b"x" * 500) == "p"
        assert await scripted.client.tokenize("x" * 500) == [1]


@pytest.mark.parametrize("script", [silence, answer(b"HTTP/1.1 200 OK\r\n")])
async def test_open_cancelled_closes_its_connection(script: Script) -> None:
    """A client that left takes its connection to the decoder with it."""
    async with serving(script) as scripted:
        with trio.move_on_after(0.05) as scope:
            await scripted.client.open(b"POST", b"/", [(b"host", b"x")], b"{}")
        assert scope.cancelled_caught
        with trio.fail_after(10):
            await scripted.closed.wait()


async def test_open_cancelled_at_once_leaves_no_descriptor() -> None:
    """Even while it connects."""
    before = len(os.listdir("/proc/self/fd"))
    async with serving(silence) as scripted:
        served = len(os.listdir("/proc/self/fd"))
        with trio.CancelScope() as scope:
            scope.cancel()
            await scripted.client.open(b"GET", b"/", [(b"host", b"x")], b"")
        assert scope.cancelled_caught
        assert len(os.listdir("/proc/self/fd")) == served
    assert len(os.listdir("/proc/self/fd")) == before


async def test_open_without_a_host_gets_one() -> None:
    """An HTTP/1.0 client need not send a Host; the decoder's library wants one."""
    async with serving(answer(reply({}))) as scripted:
        (await scripted.client.open(b"GET", b"/", [], b"")).close()
    assert b"host: localhost\r\n" in scripted.requests[0][0].lower()


async def test_open_request_that_http_cannot_carry_is_not_the_decoders_death() -> None:
    """A line break in any part of the head is the client's fault: 400, and nothing is sent."""
    host = (b"host", b"x")
    async with serving(answer(reply({}))) as scripted:
        for method, target, headers in (
            (b"GET", b"/", [host, (b"x", b"a\r\nb: c")]),
            (b"GET", b"/", [(b"host", b"a b\n")]),
            (b"GET", b"/", [host, (b"x\0", b"a")]),
            (b"GET", b"/ HTTP/1.1\r\nx: y\r\n\r\n", [host]),
            (b"GET /\r\n", b"/", [host]),
        ):
            with pytest.raises(RequestError, match="cannot be passed on") as caught:
                await scripted.client.open(method, target, headers, b"")
            assert caught.value.status == 400
    assert scripted.requests == []
