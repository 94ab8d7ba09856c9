"""A supervisor over the stand-in decoder, for tests in this directory."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest
import trio

from onebitd.adapters.llama_server import LlamaServer, Restored
from onebitd.adapters.process import Guard
from onebitd.adapters.slot_files import SlotFiles
from onebitd.services.supervisor import BackendFacts, Launch, Supervisor
from tests.harness import STANDINS, descendants
from tests.llama_builds import short_temporary_directory
from tests.standins import tiny_state


class Home:
    """A directory with a model file, the slots, the decoder's socket and its knobs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.slots = SlotFiles(path / "slots")
        self.guard = Guard()
        self.model = path / "tiny.gguf"
        self.model.write_bytes(tiny_state.gguf())
        self.socket = path / "backend.sock"
        self._knobs = path / "knobs"
        self.turn()

    def turn(self, *knobs: str) -> None:
        """Set the stand-in's knobs from its next request on."""
        self._knobs.write_text(" ".join(knobs))

    def launch(self, *args: str, argv: Sequence[str] | None = None) -> Launch:
        """Return how to start the stand-in with more arguments, or any other program."""
        standin = [
            sys.executable,
            str(STANDINS / "llama_server.py"),
            *("-m", str(self.model), "--host", str(self.socket)),
            *("--slot-save-path", str(self.slots.path), "-c", "2048"),
            *("--knobs", str(self._knobs), "--count-file", str(self.path / "count")),
            *("--record", str(self.path / "requests")),
            *args,
        ]
        env = {"PATH": os.environ["PATH"]}
        return Launch(standin if argv is None else argv, env, self.socket, ["HRX0"], None)

    def supervisor(
        self,
        launch: Launch | None = None,
        *,
        load_timeout_s: float = 20.0,
        restart_max: int = 5,
        on_change: Callable[[], None] = lambda: None,
        clients_wait: bool = False,
    ) -> Supervisor:
        """Return a supervisor that does not run yet."""
        return Supervisor(
            launch or self.launch(),
            self.slots,
            self.guard,
            load_timeout_s=load_timeout_s,
            restart_max=restart_max,
            on_change=on_change,
            clients_wait=clients_wait,
        )


@contextlib.contextmanager
def home() -> Iterator[Home]:
    """Yield a home, and see that nothing that was started there is left."""
    with short_temporary_directory() as path:
        before = set(descendants(os.getpid()))
        found = Home(path)
        yield found
        found.guard.close()
        assert set(descendants(os.getpid())) == before
        assert not found.socket.exists()
        assert os.listdir(found.slots.path) == []


@contextlib.asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncIterator[BackendFacts]:
    """Run a supervisor until the block ends; yield what its first decoder said."""
    async with trio.open_nursery() as nursery:
        with trio.fail_after(30):
            await nursery.start(supervisor.run)
        assert supervisor.facts is not None
        yield supervisor.facts
        nursery.cancel_scope.cancel()


def lose_what_is_restored(patch: pytest.MonkeyPatch) -> None:
    """Have the decoder forget each restored prompt at once: it says so by what it evaluates."""
    real = LlamaServer.restore

    async def restore_and_lose(server: LlamaServer, name: str) -> Restored:
        restored = await real(server, name)
        await server.erase()
        return restored

    patch.setattr(LlamaServer, "restore", restore_and_lose)
