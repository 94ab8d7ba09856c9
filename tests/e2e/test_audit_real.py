"""Audits on the real decoder: a provider that spoils some of its handoffs is found out."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onebitd.surfaces import cli
from tests.e2e.rig import DAYS, RHYME
from tests.harness import RunningDaemon, running_onebitd, wait_until
from tests.llama_builds import LlamaBuild, LlamaModel
from tests.standins import spoiling_provider

LAYER = 7
HONEST = "honest"


class Audited:
    """A daemon that audits every handoff, and the provider's next mood."""

    def __init__(self, daemon: RunningDaemon, how: Path) -> None:
        self.daemon = daemon
        self._how = how

    def hand_off(self, how: str, prompt: str = RHYME) -> dict[str, Any]:
        """Have one prompt handed over, audited if it was used; return its record."""
        self._how.write_text(how)
        done = self.daemon.status()["audit"]["audited"]
        count = len(self.daemon.handoffs())
        reply = self.daemon.completion(prompt, max_tokens=2)
        assert reply.status == 200, reply
        record = self.daemon.last_handoff(count + 1)
        if record["outcome"] == "used":
            wait_until(lambda: self.audit()["audited"] > done, f"the audit after {how}", 60)
            wait_until(lambda: self.daemon.slot_files() == [], "no state file is left")
        return record

    def audit(self) -> dict[str, Any]:
        """Return what `status` says of audits."""
        found: dict[str, Any] = self.daemon.status()["audit"]
        assert found["given_up"] == 0, self.daemon.log_records("audit_given_up")
        return found

    def ctl(self, *words: str) -> tuple[int, str]:
        """Run onebitctl; return exit status and output."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            status = cli.main([*words, "--socket", str(self.daemon.runtime / "control.sock")])
        return status, out.getvalue()


@pytest.fixture
def audited(
    some_build: LlamaBuild, smollm2: LlamaModel, reference_provider: Path, tmp_path: Path
) -> Iterator[Audited]:
    """The reference provider behind one that spoils."""
    how = tmp_path / "how"
    env = {
        **some_build.provider_env,
        "SPOIL_PROGRAM": str(reference_provider),
        "SPOIL_HOW": f"@{how}",
        "SPOIL_COUNT": str(tmp_path / "count"),
        "SPOIL_LAYER": str(LAYER),
        "SPOIL_HEAD_DIM": "64",
    }
    with running_onebitd(
        model=smollm2.path,
        llama_server=some_build.program,
        provider=spoiling_provider.install(tmp_path),
        backend_args=("-c", "2048", "-t", "1", *some_build.extra_args),
        config="[handoff]\naudit = 1.0\n",
        env=env,
    ) as daemon:
        yield Audited(daemon, how)


def test_audit_spoiled_handoffs_are_found_named_and_end_the_providers_service(
    audited: Audited,
) -> None:
    """Honest ones are fine to the bit; a stale row, a shifted layer and a head that is one percent
    off are each a strike that names the layer; the third ends its service until the reset."""
    daemon = audited.daemon
    assert audited.hand_off(HONEST)["outcome"] == "used"
    last = audited.audit()["last"]
    assert (last["ok"], last["error"]) == (True, 0.0)
    assert daemon.status()["state"] == "ready"
    assert audited.hand_off("zero_row")["reason"] == "bad_state"

    for strikes, how in enumerate(("stale_row", "shift_layer", "scale_head"), 1):
        assert audited.hand_off(how)["outcome"] == "used"
        found = audited.audit()
        assert (found["strikes"], found["last"]["ok"]) == (strikes, False)
        assert (found["last"]["layer"], found["last"]["part"]) == (LAYER, "K")
        if strikes == 1:
            assert audited.hand_off(HONEST, DAYS)["outcome"] == "used"
            again = audited.audit()
            assert (again["strikes"], again["last"]["ok"], again["last"]["error"]) == (1, True, 0.0)

    warned = [record for record in daemon.log_records("audit") if record["level"] == "warning"]
    assert [record["layer"] for record in warned] == [LAYER] * 3
    assert "layer 7 K" in daemon.log_records("provider_out_of_service")[0]["line"]
    status = daemon.status()
    assert (status["state"], status["provider"]["breaker"]) == ("degraded", "open")
    assert daemon.request("GET", "/health").status == 200
    assert audited.ctl("status")[0] == 1
    record = audited.hand_off(HONEST)
    assert (record["outcome"], record["reason"]) == ("skipped", "breaker_open")
    assert "layer 7 K" in record["detail"]

    assert audited.ctl("provider", "reset") == (
        0,
        "cleared 3 strikes; the provider is back in service\n",
    )
    assert audited.ctl("provider", "reset") == (0, "nothing to clear\n")
    record = audited.hand_off(HONEST)
    assert record["outcome"] == "used"
    status = daemon.status()
    assert (status["state"], status["provider"]["breaker"]) == ("ready", "closed")
    # What the slot held before an audit is there again: a later turn can build on it.
    never = {"X-Onebit-Handoff": "never"}
    timings = daemon.completion(RHYME, max_tokens=2, headers=never).json["timings"]
    assert timings["cache_n"] >= record["handed_tokens"]
