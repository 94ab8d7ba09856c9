"""A real decoder stops when its client leaves, and when the operator says so."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.rig import ENDLESS, LONG, RHYME, Prepared, RawClient, Rig, running_rig
from tests.harness import clean_environ, wait_until
from tests.llama_builds import LlamaBuild, LlamaModel

IDLE_S = 0.15
"""Its processor time stands still for so long: a token takes a tenth of it."""
NEVER = "X-Onebit-Handoff: never"


@pytest.fixture(scope="module")
def rig(
    prepared: Prepared,
    parts: tuple[LlamaBuild, LlamaModel],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Rig]:
    """One daemon for all."""
    with running_rig(prepared, *parts, tmp_path_factory.mktemp("rig")) as rig:
        yield rig


@dataclasses.dataclass(frozen=True)
class Moment:
    """What the decoder is at: a prompt, or a reply that nobody could wait for."""

    name: str
    body: dict[str, Any]
    headers: tuple[str, ...] = ()


MOMENTS = [
    Moment("prefill", {"prompt": LONG, "stream": True, **ENDLESS}, (NEVER,)),
    Moment("stream", {"prompt": RHYME, "stream": True, **ENDLESS}),
    Moment("json", {"prompt": RHYME, **ENDLESS}),
]


def onebitctl(rig: Rig, *words: str) -> str:
    """Run `onebitctl` on the daemon; return what it prints."""
    where = ("--socket", str(rig.daemon.runtime / "control.sock"))
    done = subprocess.run(
        [sys.executable, "-m", "onebitd.surfaces.cli", *words, *where],
        env=clean_environ(rig.daemon.runtime),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def spent_s(pid: int) -> int:
    """Return the processor time of a process, in ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def wait_idle(pid: int) -> None:
    """Wait until a process does nothing."""

    def is_idle() -> bool:
        before = spent_s(pid)
        time.sleep(IDLE_S)
        return spent_s(pid) == before

    wait_until(is_idle, "the decoder is idle", 10.0)


@pytest.mark.parametrize("end", ["leaves", "cancelled"])
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.name)
def test_request_that_ends_early_stops_the_real_decoder(rig: Rig, moment: Moment, end: str) -> None:
    """It works for nobody any more, and the next prompt is handed over and answered right."""
    rig.heal()
    name, before = f"{moment.name}-{end}", len(rig.daemon.handoffs())
    headers = [*moment.headers, f"X-Request-Id: {name}", "Connection: close"]
    with rig.nothing_left(), RawClient(rig, moment.body, headers) as client:
        rig.wait_phase("decode")
        decoder = rig.wait_decoder()
        if moment.name == "stream":
            client.wait_for(b"data: ")
        else:
            at_work = spent_s(decoder) + 10
            wait_until(lambda: spent_s(decoder) > at_work, "the decoder is at work")
        if end == "leaves":
            client.leave()
        else:
            assert name in onebitctl(rig, "requests")
            assert onebitctl(rig, "cancel", name) == "cancelled 1 request\n"
            assert_told(client.read_to_end(), streamed="stream" in moment.body)
        rig.wait_slot_free()
        wait_idle(decoder)
    record = rig.daemon.last_handoff(before + 1)
    reason, who = ("client_gone", "the client left")
    if end == "cancelled":
        reason, who = ("operator", "the operator cancelled it")
    assert (record["outcome"], record["reason"]) == ("cancelled", reason), record
    assert record["detail"] == f"{who} in phase decode"
    rig.assert_good(RHYME)
    assert rig.wait_decoder() == decoder


def assert_told(received: bytes, *, streamed: bool) -> None:
    """A stream ends with the error as an event; anything else is a 503."""
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 " if streamed else b"HTTP/1.1 503 ")
    lines = [line for line in body.split(b"\n") if b'"error"' in line]
    (error,) = [json.loads(line.removeprefix(b"data: "))["error"] for line in lines]
    assert (error["type"], error["code"]) == ("cancelled_error", 503)
    assert b"[DONE]" not in body
