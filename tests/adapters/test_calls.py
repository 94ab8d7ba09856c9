"""The calls to a decoder that are under way, over a socket that the test answers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from onebitd.adapters.calls import Calls
from onebitd.adapters.llama_server import LlamaServer
from onebitd.core.errors import BackendGone
from tests.llama_builds import short_temporary_directory

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def path() -> Iterator[Path]:
    with short_temporary_directory() as directory:
        yield directory / "l.sock"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def test_calls_stream_waits_and_is_heard_as_its_pieces_come(path: Path) -> None:
    """It waits for the head and each piece, not while its reader does something else."""
    calls = Calls()
    server = LlamaServer(str(path), calls)
    with socket.socket(socket.AF_UNIX) as listener, trio.fail_after(10):
        listener.bind(str(path))
        listener.listen()
        replies, waited = [], []

        async def ask() -> None:
            replies.append(await server.open(b"POST", b"/completion", [], b"{}"))

        async def read() -> None:
            waited.append(await replies[0].read())

        assert not calls
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            assert calls.waiting() == {0}
            theirs, _ = listener.accept()
            theirs.sendall(HEAD)
        assert (calls.heard(), calls.waiting()) == ({0: 0}, frozenset())
        with theirs:
            for data, heard in ((b"data: 1\n\n", 1), (b":\n\n", 1), (b"data: 2\n\n", 2)):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(read)
                    await trio.testing.wait_all_tasks_blocked()
                    assert calls.waiting() == {0}
                    theirs.sendall(chunk(data))
                assert waited[-1] == data
                assert (calls.heard(), calls.waiting()) == ({0: heard}, frozenset())
        replies[0].close()
        replies[0].close()
        assert not calls


async def test_calls_that_fail_or_are_cancelled_are_over(path: Path) -> None:
    """Nothing is owed any more."""
    calls = Calls()
    server = LlamaServer(str(path), calls)
    with pytest.raises(BackendGone):
        await server.is_ready()
    assert not calls
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with trio.move_on_after(0.05):
            await server.is_ready()
    assert not calls


async def test_calls_wait_any_comes_back_with_the_first() -> None:
    """Whoever looks at a decoder that owes nothing sleeps."""
    calls, woken = Calls(), []

    async def wait() -> None:
        await calls.wait_any()
        woken.append(bool(calls))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        assert not woken
        calls.begin()
    assert woken == [True]
