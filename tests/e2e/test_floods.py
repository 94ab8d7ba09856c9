"""Children that write as fast as they can: the log stays readable and the daemon answers."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.standin_route import DECODER, PATH, PROVIDER, Background, said
from tests.harness import RunningDaemon, running_onebitd, wait_until
from tests.standins import tiny_state

PROMPT = "the flood"
FLOOD = "a line like so many others"
MOST_LINES = 3000
"""More than 500 at once and 20 a second for as long as such a test can take; a flood is 100 times
that."""


class Flooded:
    """A daemon whose children are scripts around the stand-ins."""

    def __init__(self, home: Path, *, provider: str = "", decoder: str = "") -> None:
        self.home = home
        self.gate = home / "gate"
        self.model = home / "tiny.gguf"
        self.model.write_bytes(tiny_state.gguf())
        self.provider = self._script("provider", provider, PROVIDER)
        self.decoder = self._script("decoder", decoder, DECODER)

    def _script(self, name: str, text: str, standin: Path) -> Path:
        path = self.home / name
        run = f"exec {shlex.quote(sys.executable)} {standin}"
        path.write_text(
            "#!/bin/sh\n"
            f'standin() {{ {run} "$@"; }}\n'
            f"gate={self.gate}\n"
            f'case "$*" in *--list-devices*) standin "$@";; esac\n'
            f'{text}\nstandin "$@"\n'
        )
        path.chmod(0o755)
        return path

    @contextlib.contextmanager
    def running(self, log_level: str) -> Iterator[RunningDaemon]:
        """Run onebitd until the block ends."""
        with running_onebitd(
            model=self.model,
            llama_server=self.decoder,
            provider=self.provider,
            env={"PATH": PATH},
            log_level=log_level,
        ) as daemon:
            yield daemon


def assert_answers(daemon: RunningDaemon) -> None:
    """See that health and status come, twenty times over."""
    for _ in range(20):
        assert daemon.request("GET", "/health").status == 200
        daemon.status()


def logged_handoff(daemon: RunningDaemon) -> dict[str, Any]:
    """Wait for the one line about a handoff that the log must have."""
    [record] = wait_until(lambda: daemon.log_records("handoff"), "a handoff's line")
    assert isinstance(record, dict)
    return record


def left_out(daemon: RunningDaemon, source: str) -> int:
    """Return how many lines the log says are missing."""
    records = daemon.log_records("output_suppressed")
    for record in records:
        assert record["line"].startswith(f"{record['count']} line")
        assert record["line"].endswith(f"of the {record['source']} were left out")
    return sum(record["count"] for record in records if record["source"] == source)


def lines_of(daemon: RunningDaemon, event: str, text: str) -> list[dict[str, Any]]:
    """Return the records of an event that have this in their line."""
    return [record for record in daemon.log_records(event) if text in record["line"]]


@pytest.mark.parametrize("log_level", ["debug", "info"])
def test_provider_flood_leaves_the_daemon_answering_and_the_handoff_in_the_log(
    tmp_path: Path, log_level: str
) -> None:
    """While a provider writes without end others are served; some of its lines are logged."""
    script = f"yes '{FLOOD}' >&2 &\nuntil [ -e $gate ]; do sleep 0.05; done"
    flooded = Flooded(tmp_path, provider=script)
    with flooded.running(log_level) as daemon:
        asked = Background(daemon.completion, PROMPT)
        wait_until(lambda: daemon.status()["slot"]["phase"] == "prefill", "a provider run")
        assert_answers(daemon)
        assert daemon.status()["slot"]["phase"] == "prefill"
        flooded.gate.touch()
        reply = asked.join()
        assert (reply.status, reply.text) == (200, said(PROMPT))
        assert logged_handoff(daemon)["outcome"] == "used"
        found = lines_of(daemon, "provider_output", FLOOD)
        if log_level == "debug":
            assert 100 <= len(found) <= MOST_LINES
            assert found[0]["stream"] == "stderr"
            assert left_out(daemon, "provider") > 10 * MOST_LINES
        else:
            assert found == []
            assert left_out(daemon, "provider") == 0


def test_provider_flood_its_last_words_are_the_handoffs_detail(tmp_path: Path) -> None:
    """What the log leaves out is not lost for the reason."""
    script = f"yes '{FLOOD}' | head -n 180000 >&2\necho no XDNA device >&2\nexit 3"
    with Flooded(tmp_path, provider=script).running("debug") as daemon:
        reply = daemon.completion(PROMPT)
        assert (reply.status, reply.text) == (200, said(PROMPT))
        assert logged_handoff(daemon)["detail"] == "status 3: no XDNA device"
        assert lines_of(daemon, "provider_output", "no XDNA device") == []
        assert left_out(daemon, "provider") > 10 * MOST_LINES


def test_decoder_flood_of_errors_leaves_the_daemon_answering_and_the_handoff_in_the_log(
    tmp_path: Path,
) -> None:
    """At log level warning too: a decoder's errors are limited, and its last one is `last_exit`."""
    script = f"""
    yes '0.00.001.002 E srv: {FLOOD}' & flood=$!
    standin "$@" & server=$!
    until [ -e $gate ]; do sleep 0.05; done
    rm $gate
    kill $flood
    wait $flood
    echo  # the flood may have been killed in the middle of a line
    echo '0.00.001.003 E srv: the disk is on fire'
    kill -9 $server
    exit 7
    """
    flooded = Flooded(tmp_path, provider="exit 3", decoder=script)
    with flooded.running("warning") as daemon:
        assert_answers(daemon)
        reply = daemon.completion(PROMPT)
        assert (reply.status, reply.text) == (200, said(PROMPT))
        record = logged_handoff(daemon)
        assert (record["outcome"], record["reason"]) == ("fallback", "provider_exit")
        flooded.gate.touch()
        exited = wait_until(lambda: daemon.log_records("backend_exited"), "the decoder's end")
        assert exited[0]["detail"] == "status 7: srv: the disk is on fire"
        assert daemon.status()["backend"]["last_exit"]["reason"] == exited[0]["detail"]
        found = lines_of(daemon, "backend_output", FLOOD)
        assert 100 <= len(found) <= MOST_LINES
        assert {record["level"] for record in found} == {"error"}
        assert left_out(daemon, "decoder") > 10 * MOST_LINES
        notes = daemon.log_records("output_suppressed")
        assert {record["level"] for record in notes} == {"warning"}


def test_decoder_flood_of_details_does_not_hide_its_errors(tmp_path: Path) -> None:
    """At log level debug a thousand details leave room for the error behind them."""
    script = f"""
    yes '0.00.001.002 I srv: {FLOOD}' | head -n 5000
    echo '0.00.001.003 E srv: the disk is on fire'
    """
    with Flooded(tmp_path, decoder=script).running("debug") as daemon:
        [error] = lines_of(daemon, "backend_output", "the disk is on fire")
        assert error["level"] == "error"
        assert len(lines_of(daemon, "backend_output", FLOOD)) <= MOST_LINES
        assert daemon.completion(PROMPT).status == 200
        assert logged_handoff(daemon)["outcome"] == "used"
