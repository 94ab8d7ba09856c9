"""The shared route where time or the kernel must be played: stalls, and a run that does not die."""

# ruff: noqa: ASYNC110 - real processes and files, milliseconds each

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import structlog.testing
import trio

from onebitd.adapters import provider_process
from onebitd.adapters.process import Child
from onebitd.core.config import Policy
from onebitd.core.handoff import Route
from onebitd.services import share_route
from onebitd.services.supervisor import Supervisor
from tests.harness import STANDINS, is_alive
from tests.services.rig import Home, home, running
from tests.services.test_handoff import TOKENS, Rig
from tests.standins import share_front


@pytest.fixture
def place() -> Iterator[Home]:
    """A directory of this test's own."""
    with home() as made:
        yield made


class Sharing(Rig):
    """The pipeline before a decoder that shares."""

    def front(self, *knobs: str) -> None:
        """Set the front's knobs."""
        (self.place.path / "front").write_text(" ".join(knobs))

    def asked(self) -> list[dict[str, Any]]:
        """Return the requests that reached the front, of every decoder so far."""
        lines = (self.place.path / "asked").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def of_the_slot(self, pid: int) -> list[str]:
        """Return what was asked of one decoder's slot."""
        asked = [one["target"] for one in self.asked() if one["pid"] == pid]
        found = [target for target in asked if "action=" in target or "completion" in target]
        return [target.partition("action=")[2] or target for target in found]

    def memory_is_held(self) -> bool:
        """Say whether this process has a descriptor of the decoder's memory."""
        names = []
        for entry in os.scandir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                names.append(os.readlink(entry))
        return any("memfd:share-front" in name for name in names)


@contextlib.asynccontextmanager
async def sharing(place: Home, **settings: Any) -> AsyncIterator[Sharing]:
    """Run the front, the stand-in decoder behind it, and the pipeline."""
    program = share_front.launcher(
        place.path,
        STANDINS / "llama_server.py",
        knobs=place.path / "front",
        record=place.path / "asked",
    )
    plain = place.launch()
    launch = dataclasses.replace(
        plain,
        argv=[str(program), *plain.argv[2:]],
        env={**plain.env, "ONEBIT_KV_SHARE": "1"},
    )
    supervisor: Supervisor = place.supervisor(launch)
    async with running(supervisor), trio.open_nursery() as nursery:
        rig = Sharing(place, supervisor, {"handoff": {"share": True}, **settings})
        await nursery.start(rig.handoffs.runs.run)
        yield rig
        assert not (place.path / "share.sock").exists()
        assert not rig.memory_is_held()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("mode", "detail"),
    [
        ("never", "the decoder did not connect within 0.5 s"),
        ("silent", "the decoder did not connect within 0.5 s"),
        ("stall", "connected and sent 0 bytes, no whole message, within 0.5 s"),
        ("stall-half", r"connected and sent \d+ bytes, no whole message, within 0.5 s"),
        ("stranger", r"did not connect within 0.5 s; a connection of pid \d+ .* was refused"),
    ],
)
async def test_handshake_that_stalls_is_given_up_and_the_prompt_goes_by_file(
    place: Home, monkeypatch: pytest.MonkeyPatch, mode: str, detail: str
) -> None:
    """Nothing is waited for without end; descriptors that came are closed."""
    async with sharing(place) as rig:
        pid = rig.supervisor.pid
        assert pid is not None
        plain = await rig.ask(policy=Policy.NEVER)
        await rig.ask("something else between", policy=Policy.NEVER)
        rig.front(f"--share-mode {mode}")
        with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
            patch.setattr(share_route, "_HANDSHAKE_S", 0.5)
            asked = await rig.ask()
        (not_shared,) = [one for one in logs if one["event"] == "share_not_used"]
        assert not_shared["reason"] == "share_handshake"
        assert re.search(detail, not_shared["line"]), not_shared["line"]
        assert (asked.end, asked.text) == (("used", None), plain.text)
        assert (asked.record["route"], asked.record["share_ms"]) == ("file", 0.0)
        assert rig.of_the_slot(pid)[-2:] == ["restore", "/v1/completions"]
        assert rig.nothing_is_left()
        rig.front()
        # Not every request waits as long for a decoder that does not answer.
        assert rig.handoffs.shares.state(rig.handoffs.config).startswith("paused")
        assert (await rig.ask()).record["route"] == "file"
        monkeypatch.setattr(rig.handoffs.shares, "_paused_until", -math.inf)
        assert (await rig.ask()).record["route"] == "shared"


async def test_device_that_is_not_free_is_waited_for_as_long_as_the_decoder_would_take(
    place: Home,
) -> None:
    """The slot is idle meanwhile, so under `auto` nothing waits for lock.wait_s; no run begins."""
    async with sharing(place, lock={"wait_s": 60}) as rig:
        costs = rig.handoffs.keeper.costs
        for _ in range(2):
            costs.note_provider(Route.SHARED, 18, 5.0, overlapped=False, cold=False, now=1e9)
            costs.note_decoder(0, 19, 200.0, overlapped=False, now=1e9)
        with rig.lock_path.open("w") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            asked = await rig.ask(policy=Policy.AUTO)
        assert asked.end == ("skipped", "overtaken")
        assert "the device was not free after 2" in asked.record["detail"]
        assert asked.record["lock_ms"] < 30_000
        assert rig.provider_runs() == []
        assert rig.nothing_is_left()
        again = await rig.ask(policy=Policy.ALWAYS)
        assert (again.end, again.record["route"]) == (("used", None), "shared")
        assert again.text == asked.text


async def stuck_run(
    rig: Sharing, monkeypatch: pytest.MonkeyPatch, *, client_leaves: bool
) -> dict[str, Any]:
    """Ask, with a provider that no signal reaches; return its run's start line."""
    with monkeypatch.context() as patch:
        for name in ("_TERM_GRACE_S", "_CANCEL_GRACE_S", "_KILL_GRACE_S"):
            patch.setattr(provider_process, name, 0.05)
        real = Child.signal

        def spare_provider(child: Child, number: int) -> None:
            if not rig.provider_runs() or child.pid != rig.provider_runs()[-1]["pid"]:
                real(child, number)

        patch.setattr(Child, "signal", spare_provider)
        if client_leaves:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(rig.ask)
                while not rig.provider_runs():
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()
        else:
            asked = await rig.ask()
            assert asked.end == ("fallback", "provider_timeout")
            assert "cannot be killed" in asked.record["detail"]
            assert (asked.record["cached_tokens"], asked.record["evaluated_tokens"]) == (0, TOKENS)
    [run] = rig.provider_runs()
    return run


@pytest.mark.parametrize("client_leaves", [False, True], ids=["time-limit", "client-leaves"])
async def test_provider_that_cannot_be_killed_costs_the_decoder_and_not_its_count(
    place: Home, monkeypatch: pytest.MonkeyPatch, client_leaves: bool
) -> None:
    """It may write to that memory for ever: nothing is decoded from it, the next one is new."""
    async with sharing(place, provider={"timeout_s": 1}) as rig:
        plain = await rig.ask(policy=Policy.NEVER)
        await rig.ask("something else between", policy=Policy.NEVER)
        old = rig.supervisor.pid
        assert old is not None
        before = len(rig.of_the_slot(old))
        rig.mode("half,hang")
        run = await stuck_run(rig, monkeypatch, client_leaves=client_leaves)
        assert is_alive(run["pid"])
        assert rig.of_the_slot(old)[before:] == ["erase", "share"]
        assert rig.provider_state() == "stuck"
        rig.mode("ok")
        asked = await rig.ask()
        assert (asked.end, asked.text) == (("skipped", "breaker_open"), plain.text)
        assert "cannot be killed" in asked.record["detail"]
        assert rig.supervisor.pid not in (None, old)
        assert rig.supervisor.last_exit is not None
        assert "a provider that cannot be killed" in rig.supervisor.last_exit.reason
        assert rig.supervisor._recent_exits() == 0
        os.killpg(run["pid"], signal.SIGKILL)
        with trio.fail_after(30):
            while rig.provider_state() == "stuck":
                await trio.sleep(0.005)
        assert (await rig.ask()).record["route"] == "shared"
