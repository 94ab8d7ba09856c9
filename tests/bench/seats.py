"""Who takes part: a daemon and a decoder of its own for each policy and pace of the provider."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench import client, traces
from tests.harness import RunningDaemon, running_onebitd
from tests.llama_builds import CPU_ONLY, DEMO_PROGRAM, MODELS, running_program
from tests.standins import paced_provider

PACES = {"0.25x": 0.25, "1x": 1.0, "4x": 4.0}
SLOW = "0.25x"
FIXED_MS = 60.0
"""What a run of the provider takes for no token at all."""
DECODER = ("-c", "2048", "-t", "1", *CPU_ONLY)
Seat = tuple[str, str]
"""A policy and a pace; never has no pace."""
NEVER: Seat = ("never", "")
AGAIN: Seat = ("never again", "")
_CONFIGURED = {"oracle": "always", "never again": "never"}


@dataclass
class Daemons:
    """The daemons of one trace, by seat."""

    by_seat: dict[Seat, RunningDaemon]

    def replay(
        self, seat: Seat, unit: traces.Unit, ways: Sequence[str | None] | None = None
    ) -> list[client.Seen]:
        """Run one unit on a seat's daemon; `ways` is each request's X-Onebit-Handoff."""
        return client.replay(self.by_seat[seat], unit, ways or [None] * len(unit))


@contextlib.contextmanager
def running_daemons(
    directory: Path, states: Path, ms_per_token: float, seats: Sequence[Seat]
) -> Iterator[Daemons]:
    """Run a daemon for each seat; what it learns and its state files are new, and gone at the end.

    Args:
        directory: on the file system that is to hold the state files.
        states: see paced_provider.
        ms_per_token: the decoder's own.
    """
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory)))
        program = paced_provider.install(home)
        found: dict[Seat, RunningDaemon] = {}
        for number, (policy, pace) in enumerate(seats):
            own = home / str(number)
            own.mkdir()
            variables = {
                "PACED_STATES": str(states),
                "PACED_FIXED_MS": str(FIXED_MS),
                "PACED_MS_PER_TOKEN": str(ms_per_token / PACES.get(pace, 1.0)),
            }
            env = ", ".join(f"{name} = {json.dumps(value)}" for name, value in variables.items())
            found[policy, pace] = stack.enter_context(
                running_onebitd(
                    model=MODELS[0].path,
                    llama_server=DEMO_PROGRAM,
                    provider=program,
                    backend_args=DECODER,
                    config=f'[handoff]\npolicy = "{_CONFIGURED.get(policy, policy)}"\n'
                    f'state_dir = "{own}/slots"\n[provider]\nenv = {{ {env} }}\n',
                    env={"XDG_STATE_HOME": str(own / "state")},
                    wait_ready=False,
                )
            )
        for daemon in found.values():
            daemon.wait_ready()
        yield Daemons(found)


def progress(text: str) -> None:
    """Say on stderr where it is."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def state_directory() -> Iterator[Path]:
    """Yield a directory in memory, gone at the end; SIGTERM ends the program as it should."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    directory = Path(tempfile.mkdtemp(prefix="onebitd-gate-", dir="/dev/shm"))
    try:
        (directory / "states").mkdir()
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def reference_pass(states: Path) -> Iterator[traces.Reference]:
    """Run the plain decoder that the traces are made with."""
    arguments = ("-m", str(MODELS[0].path), "-np", "1", "--cache-ram", "0", *DECODER)
    with running_program(DEMO_PROGRAM, arguments) as plain:
        yield traces.Reference(plain, states)
