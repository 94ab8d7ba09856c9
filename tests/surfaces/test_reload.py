"""The task that carries out reloads: one after the other, each to its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import structlog.testing
import trio
import trio.testing

from onebitd.core.config import Config
from onebitd.core.config_resolve import resolve
from onebitd.core.errors import ConfigError, OnebitError, RequestError
from onebitd.core.reload import Merged
from onebitd.surfaces.reload import Reading, Reloads


def reading(timeout_s: float = 120.0, *keys: str) -> Reading:
    """Return what a file with this provider.timeout_s says."""
    file = {"model": {"path": "/m"}, "provider": {"timeout_s": timeout_s}}
    return Reading(resolve(instance="x", file=file), keys, ())


class FakeDaemon:
    """Takes over whatever it is given, when it may."""

    def __init__(self) -> None:
        self.config: Config = reading().config
        self.keys: tuple[str, ...] = ()
        self.listens_on: Sequence[str] = ("127.0.0.1",)
        self.is_stopping = False
        self.may = trio.Event()
        self.may.set()
        self.inside = 0
        self.broken = False

    async def take_over(self, merged: Merged, keys: tuple[str, ...]) -> Sequence[str]:
        """Change, then wait, as for the lock; nobody else may be in here meanwhile."""
        assert self.inside == 0
        if self.broken:
            raise RuntimeError("planted")
        self.inside += 1
        self.config, self.keys = merged.config, keys
        try:
            await self.may.wait()
        finally:
            self.inside -= 1
        return ["a remark"] if not merged.changed else []


def reads(*results: Reading | Exception) -> Callable[[], Reading]:
    """Return a reader that gives or raises these, one after the other."""
    left = list(results)

    def read() -> Reading:
        result = left.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    return read


async def test_reloads_take_turns_and_leave_one_line_each() -> None:
    """The second reads the file when the first is over, and is held against its outcome."""
    daemon = FakeDaemon()
    reloads = Reloads(daemon, reads(reading(1), reading(1), reading(2)))
    with structlog.testing.capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            await nursery.start(reloads.run)
            daemon.may = trio.Event()
            answers: dict[int, list[str]] = {}

            async def ask(number: int) -> None:
                answers[number] = (await reloads.reload()).changed

            async with trio.open_nursery() as asking:
                for number in range(3):
                    asking.start_soon(ask, number)
                    await trio.testing.wait_all_tasks_blocked()
                daemon.may.set()
            nursery.cancel_scope.cancel()
    assert answers == {0: ["provider.timeout_s"], 1: [], 2: ["provider.timeout_s"]}
    assert [line["event"] for line in logs] == [
        "reloaded",
        "reloaded",
        "reload_warning",
        "reloaded",
    ]
    assert logs[1]["line"] == "nothing has changed"


async def test_reloads_fault_is_answered_and_the_next_is_carried_out() -> None:
    """A bad file, and a bug, end neither the task nor the daemon; the log has them."""
    daemon = FakeDaemon()
    reloads = Reloads(daemon, reads(ConfigError(["a", "b"]), reading(1), reading(2)))
    with structlog.testing.capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            await nursery.start(reloads.run)
            with pytest.raises(ConfigError) as caught:
                await reloads.reload()
            assert caught.value.problems == ("a", "b")
            daemon.broken = True
            with pytest.raises(OnebitError, match="the log says why"):
                await reloads.reload()
            daemon.broken = False
            assert (await reloads.reload()).changed == ["provider.timeout_s"]
            nursery.cancel_scope.cancel()
    events = [(line["event"], line["log_level"]) for line in logs]
    assert events == [
        ("reload_refused", "error"),
        ("internal_error", "error"),
        ("reloaded", "info"),
    ]
    assert logs[0]["problems"] == ["a", "b"]


async def test_reloads_stop_answers_all_who_wait_and_those_to_come() -> None:
    """Nobody hangs on a daemon that stops, whether its turn had come or not."""
    daemon = FakeDaemon()
    daemon.may = trio.Event()
    reloads = Reloads(daemon, reads(reading(1)))
    refused = []

    async def ask() -> None:
        with pytest.raises(RequestError) as caught:
            await reloads.reload()
        refused.append(caught.value.status)

    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(ask)
        async with trio.open_nursery() as serving:
            await serving.start(reloads.run)
            while not daemon.inside:  # noqa: ASYNC110 - a thread reads the file first
                await trio.sleep(0.001)
            serving.cancel_scope.cancel()
    await ask()
    assert refused == [503, 503, 503]


async def test_reloads_stop_does_not_wait_for_a_file_that_hangs() -> None:
    """A configuration on a server that is gone does not keep the daemon from stopping."""
    may, began = threading.Event(), threading.Event()

    def read() -> Reading:
        began.set()
        may.wait(20)
        return reading(1)

    daemon = FakeDaemon()
    reloads = Reloads(daemon, read)
    try:
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                await nursery.start(reloads.run)
                reloads.ask()
                while not began.is_set():  # noqa: ASYNC110 - it is set in a thread
                    await trio.sleep(0.001)
                nursery.cancel_scope.cancel()
    finally:
        may.set()
    assert daemon.config == reading().config
