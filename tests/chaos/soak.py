"""A long run of ordinary clients: memory and descriptors must not grow."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.bench.measure import table
from tests.chaos.clients import Crowd
from tests.e2e.standin_route import quick_provider, running_route
from tests.harness import RunningDaemon, running_onebitd
from tests.llama_builds import CPU_ONLY, DEMO_PROGRAM, MODELS

SAMPLES: Final = 60
NOISE_TIMES: Final = 3.0
"""A rise over the run of so many times the scatter around the line is no noise."""
LEAST_MIB: Final = 1.0
LEAST_FILES: Final = 2.0
CLIENTS: Final = 4
DECODER: Final = ("-c", "2048", "-t", "1", *CPU_ONLY)


@dataclass(frozen=True)
class Sample:
    """The daemon at one moment: seconds since the begin, MiB resident, descriptors, threads."""

    at_s: float
    rss_mib: float
    files: int
    threads: int


@dataclass(frozen=True)
class Soaked:
    """What a soak has shown."""

    samples: Sequence[Sample]
    requests: int

    def text(self) -> str:
        """Return ten of the samples as a table."""
        shown = self.samples[:: max(1, len(self.samples) // 10)]
        rows = [
            [f"{one.at_s / 60:.1f}", f"{one.rss_mib:.1f}", str(one.files), str(one.threads)]
            for one in (*shown, self.samples[-1])
        ]
        title = f"{self.requests} requests in {self.samples[-1].at_s / 60:.1f} minutes"
        return table(title, ["minute", "RSS MiB", "descriptors", "threads"], rows)


def rises(times: Sequence[float], values: Sequence[float], least: float = LEAST_MIB) -> bool:
    """Say whether the second half of a run rises by more than its noise and than `least`.

    Theil and Sen's slope: a few steps, as allocators make them, do not bend it.
    """
    times, values = times[len(times) // 2 :], values[len(values) // 2 :]
    pairs = [
        (values[j] - values[i]) / (times[j] - times[i])
        for i in range(len(times))
        for j in range(i + 1, len(times))
    ]
    slope = statistics.median(pairs)
    middle = statistics.median(v - slope * t for t, v in zip(times, values, strict=True))
    scatter = statistics.median(
        abs(v - slope * t - middle) for t, v in zip(times, values, strict=True)
    )
    risen = slope * (times[-1] - times[0])
    return risen > max(least, NOISE_TIMES * scatter)


def soak(*, minutes: float, real: bool, strict: bool = True) -> Soaked:
    """Run clients for so long, and look at the daemon all the while.

    Args:
        minutes: how long.
        real: on the real decoder, whose replies are not judged; else on the stand-ins.
        strict: fail when memory, descriptors or threads rise.

    Raises:
        AssertionError: a wrong reply, or something rose.
    """
    with _daemon(real) as daemon:
        crowd = Crowd(lambda: daemon.port, 1, CLIENTS, 1 << 40, judged=not real)
        begin = time.monotonic()
        crowd.start()
        samples = []
        pause_s = minutes * 60.0 / SAMPLES
        while (now := time.monotonic() - begin) < minutes * 60.0 and crowd.is_busy:
            samples.append(_look(daemon, now))
            time.sleep(max(0.05, pause_s))
        crowd.stop()
        assert not crowd.wrong, crowd.wrong[0]
        samples.append(_look(daemon, time.monotonic() - begin))
        found = Soaked(samples, len(crowd.seen))
        if strict:
            _assert_flat(found)
        return found


def _assert_flat(found: Soaked) -> None:
    times = [one.at_s for one in found.samples]
    for name, least in (("rss_mib", LEAST_MIB), ("files", LEAST_FILES), ("threads", LEAST_FILES)):
        values = [float(getattr(one, name)) for one in found.samples]
        assert not rises(times, values, least), f"{name} rises:\n{found.text()}"


def _look(daemon: RunningDaemon, at_s: float) -> Sample:
    proc = Path(f"/proc/{daemon.process.pid}")
    pages = int((proc / "statm").read_text().split()[1])
    rss_mib = pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
    return Sample(at_s, rss_mib, len(list((proc / "fd").iterdir())), _count(proc / "task"))


def _count(directory: Path) -> int:
    return len(list(directory.iterdir()))


@contextlib.contextmanager
def _daemon(real: bool) -> Iterator[RunningDaemon]:
    with tempfile.TemporaryDirectory() as scratch:
        if real:
            with running_onebitd(
                model=MODELS[0].path,
                llama_server=DEMO_PROGRAM,
                provider=Path(sys.executable).with_name("onebit-prefill-llama"),
                backend_args=DECODER,
                env={
                    "ONEBIT_PREFILL_LLAMA_SERVER": str(DEMO_PROGRAM),
                    "ONEBIT_PREFILL_LLAMA_ARGS": " ".join(DECODER[2:]),
                },
            ) as daemon:
                yield daemon
        else:
            with running_route(provider=quick_provider(Path(scratch))) as route:
                yield route.daemon
