"""The tables of the HTTP side, each held against its goals."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench import relay, relay_handoff, relay_idle, relay_leave, relay_real, relay_traced
from tests.bench.relay_fronts import QUICK, Extent, running_fronts
from tests.bench.relay_rows import Row, rows_table

QUICK_REPLY = 16


@dataclass(frozen=True)
class Wanted:
    """What is to be measured.

    Attributes:
        code: where the package onebitd is.
        quick: next to nothing of each.
        rounds, lengths: of the real decoder; the lengths in prompt tokens.
    """

    code: Path
    quick: bool
    rounds: int
    lengths: Sequence[int]

    @property
    def extent(self) -> Extent:
        """How much of what needs no decoder."""
        return QUICK if self.quick else Extent()


def relay_table(wanted: Wanted) -> str:
    """Measure the relay, and handoffs that take no time but the daemon's own."""
    code, extent = wanted.code, wanted.extent
    rows: list[Row] = []
    with running_fronts(code) as fronts:
        _say("calls")
        rows += relay_traced.call_rows(fronts, code)
        _say("paced streams")
        rows += relay.paced_rows(fronts, extent)
        _say("rates")
        rows += relay.speed_rows(fronts, extent)
        _say("clients that leave")
        rows += relay_leave.leave_rows(fronts, code, extent)
    _say("handoffs")
    rows += relay_handoff.handoff_rows(code, extent)
    title = (
        "Relay: plain is the plainest ASGI application under hypercorn, pump the least that trio "
        "can do;\nin brackets what the ratio is of, onebitd's first"
    )
    return rows_table(title, rows)


def idle_table(wanted: Wanted) -> str:
    """Measure a daemon that does nothing, its start, and `onebitctl status`."""
    _say("idle")
    return rows_table("Idle, start, command", relay_idle.idle_rows(wanted.code, wanted.extent))


def tax_table(wanted: Wanted) -> str:
    """Measure what onebitd adds on the real decoder."""
    _say("the real decoder")
    extent = relay_real.RealExtent(wanted.lengths, wanted.rounds)
    if wanted.quick:
        extent = dataclasses.replace(extent, reply=QUICK_REPLY)
    title = (
        "On the real decoder; tax: first byte less restore and the decoder's own time after one\n"
        "(a provider that takes no time leaves all of the check to be waited for)"
    )
    return rows_table(title, relay_real.real_rows(wanted.code, extent))


TABLES: Mapping[str, Callable[[Wanted], str]] = {
    "relay": relay_table,
    "idle": idle_table,
    "tax": tax_table,
}
"""By part of the benchmark."""


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
