"""`onebitctl status` beside a real systemd: instances that do not run, and those that rest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.systemd.box import SUITES, Box
from tests.systemd.instances import BIN, Instance, instance_in

CTL = f"{BIN}/onebitctl"
pytestmark = pytest.mark.parametrize(
    "suite", SUITES[:1], indirect=True, ids=lambda suite: suite.name
)
"""The older systemd is enough: what it says is plain text and JSON of long standing."""


@pytest.fixture(scope="module")
def three(installed: Box) -> Iterator[dict[str, Instance]]:
    """One serves; one rests behind its control socket; one cannot start, and has no socket."""
    with ExitStack() as stack:

        def made(name: str, port: int, **more: Any) -> Instance:
            return stack.enter_context(instance_in(installed, name, port, start=False, **more))

        serves, rests = made("serves", 8301), made("rests", 8302)
        broken = made("broken", 8303, model={"path": "/srv/no-such-model.gguf"})
        serves.systemctl("start")
        installed.run("systemctl", "start", rests.units[1])
        broken.systemctl("start", check=False)
        broken.wait_state("failed")
        installed.run("systemctl", "stop", broken.units[1], check=False)
        yield {"serves": serves, "rests": rests, "broken": broken}


def test_status_of_a_service_that_has_failed_says_how_it_ended(three: dict[str, Instance]) -> None:
    """systemd's words, the way to start it and the way to its log."""
    done = three["broken"].ctl("status", check=False)
    assert (done.status, done.stdout) == (3, "")
    assert "onebitctl: no onebitd runs for the instance broken: onebitd@broken" in done.stderr
    assert "(exit status 2, the command line or the configuration is wrong)" in done.stderr
    assert " ago (exit status" in done.stderr
    assert "`systemctl start onebitd@broken`" in done.stderr
    assert "`journalctl -u onebitd@broken`" in done.stderr


def test_status_all_tells_each_and_starts_none(three: dict[str, Instance]) -> None:
    """What rests goes on resting: looking at all of them is no use of any."""
    box = three["serves"].box
    done = box.run(CTL, "status", "--all", "--json", check=False)
    found = {one["instance"]: one for one in map(json.loads, done.stdout.splitlines())}
    assert done.status == 3
    assert found["serves"]["state"] in ("loading", "ready")
    assert found["serves"]["service_manager"]
    serves = three["serves"].service
    assert (found["serves"]["unit"], found["serves"]["user_unit"]) == (serves, False)
    assert found["rests"]["error"] == "rests, and is started by the first request"
    assert found["broken"]["unit"]["result"] == "exit-code"
    assert three["rests"].show("ActiveState") == {"ActiveState": "inactive"}
    page = box.run(CTL, "status", "--all", check=False).stdout
    assert [line.split()[0] for line in page.splitlines() if not line.startswith(" ")] == sorted(
        found
    )
