"""One chaos run: a crowd of clients in a storm, and the daemon afterwards."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.bench.measure import table
from tests.chaos.clients import Crowd, Seen, outcomes_of
from tests.chaos.storm import CALM, Gust, Place, Storm
from tests.e2e.standin_route import Route, quick_provider, running_route, said
from tests.harness import wait_until

GROWN_MOST_MIB: Final = 24
"""The interpreter's own heap settles within this; a leak in each of 2,000 requests does not."""
CONFIG: Final = """
[http]
max_pending = 64
keepalive_s = 0.3
[backend]
restart_max = 1000
[provider]
timeout_s = 0.7
"""


@dataclass(frozen=True)
class Report:
    """What a run has shown."""

    seed: int
    seen: Sequence[Seen]
    gusts: Sequence[Gust]
    counts: Counter[str]
    grown_mib: float

    @property
    def outcomes(self) -> Counter[str]:
        """How many requests ended in each way."""
        return Counter(one.outcome for one in self.seen)

    def text(self) -> str:
        """Return the tables: replies by fault, and the daemon's own outcomes and reasons."""
        names = outcomes_of(self.seen)
        faults = [CALM, *sorted({gust.name for gust in self.gusts})]
        by_fault = {fault: Counter[str]() for fault in faults}
        for one in self.seen:
            met = {g.name for g in self.gusts if g.begin <= one.end and one.begin <= g.end}
            for fault in met or {CALM}:
                by_fault[fault][one.outcome] += 1
        gusts = Counter(gust.name for gust in self.gusts)
        rows = [
            [fault, str(gusts[fault]), *(str(by_fault[fault][name]) for name in names)]
            for fault in faults
        ]
        rows.append(["all", str(len(self.gusts)), *(str(self.outcomes[name]) for name in names)])
        own = [[name, str(count)] for name, count in sorted(self.counts.items())]
        return "\n\n".join(
            (
                table(
                    f"Seed {self.seed}: replies of {len(self.seen)} requests by what went wrong"
                    " meanwhile\n(a request that met two faults is counted under both)",
                    ["fault", "times", *names],
                    rows,
                ),
                table("What the daemon counted", ["outcome or reason", "requests"], own),
                f"resident memory grew by {self.grown_mib:.1f} MiB",
            )
        )


def chaos(*, seed: int, requests: int, clients: int = 8) -> Report:
    """Run a daemon on the stand-ins through a storm.

    Raises:
        AssertionError: a reply that was neither right nor a clear error, or something was left.
    """
    with tempfile.TemporaryDirectory() as scratch, _little_disk() as disk:
        provider = quick_provider(Path(scratch))
        with running_route(
            config=CONFIG, lock="wait_s = 0.3", provider=provider, state_dir=disk
        ) as route:
            _warm_up(route)
            before_mib = _resident_mib(route)
            config = route.daemon.runtime.with_name("test.toml")
            crowd = Crowd(lambda: route.daemon.port, seed, clients, requests)
            storm = Storm(Place(route, config, disk), seed)
            crowd.start()
            storm.start()
            while crowd.is_busy and storm.failure is None:
                time.sleep(0.05)
            storm.stop()
            crowd.stop()
            assert not crowd.wrong, crowd.wrong[0]
            _assert_as_before(route)
            grown_mib = _resident_mib(route) - before_mib
            assert grown_mib < GROWN_MOST_MIB, f"memory grew by {grown_mib:.1f} MiB"
            return Report(seed, crowd.seen, storm.gusts, route.counted(), grown_mib)


def _warm_up(route: Route) -> None:
    """Have everything imported and allocated that a first request brings."""
    for number in range(40):
        for stream in (False, True):
            assert route.daemon.chat(f"warm {number}", stream=stream).status == 200
    route.forget()
    route.quiet = route.left_over()


def _assert_as_before(route: Route) -> None:
    """See that nothing is left, and that a handoff is used and right."""
    route.behave()
    route.daemon.wait_ready()
    left = {}

    def is_clean() -> bool:
        left.update(route.left_over())
        more = left["descriptors"] - route.quiet["descriptors"]
        same = [name for name in left if name != "descriptors"]
        return sum(more.values()) <= 2 and all(left[n] == route.quiet[n] for n in same)

    try:
        wait_until(is_clean, "all is as before", 20.0)
    except AssertionError:
        raise AssertionError(f"left: {left}, before: {route.quiet}") from None

    def hands_off() -> bool:
        # The provider's time is short; a busy machine may need more than one try.
        route.daemon.reset_provider()
        reply = route.daemon.completion("after the storm", headers={"X-Onebit-Handoff": "always"})
        assert (reply.status, reply.text) == (200, said("after the storm")), reply
        return bool(route.record_of(reply)["outcome"] == "used")

    wait_until(hands_off, "a handoff is used", 20.0)
    log = route.daemon.log_path.read_text(errors="replace")
    assert "Traceback" not in log, log[log.index("Traceback") - 1000 :][:5000]


def _resident_mib(route: Route) -> float:
    pages = Path(f"/proc/{route.daemon.process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@contextlib.contextmanager
def _little_disk() -> Iterator[Path | None]:
    """A file system of 4 MiB; None where mounting one is not allowed."""
    with tempfile.TemporaryDirectory(prefix="onebitd-chaos-") as directory:
        options = ["-t", "tmpfs", "-o", "size=4m,mode=700"]
        command = ["mount", *options, "onebitd-chaos", directory]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
            yield None
            return
        try:
            yield Path(directory)
        finally:
            subprocess.run(["umount", "-l", directory], check=True)
