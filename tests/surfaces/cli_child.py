"""`onebitctl` as a child of the tests, against a served control socket."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

import trio

from tests.surfaces.control_server import FakeView, control_app, serve_unix

REPO = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "onebitd.surfaces.cli"]
INSTANCE = "onebitctl-test"


class Served:
    """A served control app, and how to reach it from a child."""

    def __init__(self, runtime: Path, view: FakeView) -> None:
        self.runtime = runtime
        self.socket = runtime / "onebitd" / INSTANCE / "control.sock"
        self.view = view

    async def run(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run `onebitctl -i INSTANCE ARGUMENTS` to its end."""
        return await run("-i", INSTANCE, *arguments, XDG_RUNTIME_DIR=str(self.runtime), **environ)


@contextlib.asynccontextmanager
async def serving() -> AsyncGenerator[Served]:
    """Serve the control app on the socket of an instance."""
    with tempfile.TemporaryDirectory(prefix="ob") as name, trio.fail_after(120):
        found = Served(Path(name), FakeView())
        found.socket.parent.mkdir(parents=True)
        async with serve_unix(control_app(found.view), found.socket):
            yield found


def environment(environ: dict[str, str]) -> dict[str, str]:
    """Return a bare environment with additions."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {**kept, "PYTHONPATH": str(REPO), "LC_ALL": "C.UTF-8", "TZ": "UTC", **environ}


async def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `onebitctl ARGUMENTS` to its end."""
    done = await trio.run_process(
        [*PROGRAM, *arguments],
        env=environment(environ),
        capture_stdout=True,
        capture_stderr=True,
        check=False,
    )
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


async def modules_loaded(*commands: list[str]) -> set[str]:
    """Return the names of all modules that are loaded once these commands have run."""
    lines = ["import sys; from onebitd.surfaces.cli import main"]
    lines += [f"main({words!r})" for words in commands]
    done = await trio.run_process(
        [sys.executable, "-c", "\n".join([*lines, "print(*sys.modules, file=sys.stderr)"])],
        env=environment({}),
        capture_stdout=True,
        capture_stderr=True,
    )
    return set(done.stderr.decode().split())
