"""`onebitctl doctor` in a booted Debian: what works by hand and fails as a service is found.

What the service must not see is put where only its user, its sandbox or its groups keep it out, so
that root finds nothing wrong with it; and the commands that the report offers are pasted.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onebitd.core import unit_sandbox
from tests.llama_builds import ROOT
from tests.systemd.box import SUITES, Box, Done
from tests.systemd.instances import (
    BIN,
    STANDIN_PROVIDER,
    TINY_MODEL,
    Instance,
    configuration,
    instance_in,
    remove_instances,
    toml,
    write_instance,
)

NEWEST = pytest.mark.parametrize("suite", SUITES[-1:], indirect=True, ids=lambda suite: suite.name)
"""For what does not depend on the release: what systemd-run takes of a unit is tried on each."""
ALICE = "/home" + "/alice"
SHUT = "/srv/shut"
HIDDEN_MODEL = f"{ALICE}/models/tiny.gguf"
HIDDEN_PROVIDER = f"{SHUT}/provider"
PROVIDER = f'#!/bin/sh\nexec {STANDIN_PROVIDER} "$@"\n'
NPU, GPU = "/dev/accel/accel0", "/dev/dri/renderD128"
TAKEN_BACK = "[Service]\nBindPaths=/srv:/mnt\nBindPaths=\nLimitNOFILE=\nNice=\n"
SESAME = "sesame-4711"
# Of a container the host's hard limit is above the unit's.
NOT_HERE = {"device.memlock"}
ONLY_INSIDE = {
    "model.file",
    "provider.program",
    "lock.shared",
    "device.accel0",
    "device.renderD128",
}


def doctor(instance: Instance, *options: str) -> Done:
    """Run the command as root."""
    return instance.ctl("doctor", *options, check=False)


def report(instance: Instance, *options: str) -> tuple[int, dict[str, Any]]:
    """Return exit status and report."""
    done = doctor(instance, "--json", *options)
    assert done.stderr == ""
    assert SESAME not in done.stdout
    found: dict[str, Any] = json.loads(done.stdout)
    return done.status, found


def states(found: dict[str, Any]) -> dict[str, str]:
    """Return the state of each check by its name."""
    return {one["name"]: one["state"] for one in found["checks"]}


def failed(found: dict[str, Any]) -> set[str]:
    """Return the names of what has failed, but for what cannot be had in a box."""
    return {name for name, state in states(found).items() if state == "failed"} - NOT_HERE


def traces(box: Box) -> str:
    """Return everything that a run might leave behind, without what the daemon writes itself."""
    script = (
        "systemctl list-units --all --plain --no-legend --no-pager 'onebitctl*' 'run-*.service';"
        " find /run/onebitctl* /run/onebitd /var/lib/onebitd /var/cache/onebitd /tmp -mindepth 1"
        " 2>/dev/null | grep -Ev '/systemd-private-|/history.db|/costs.json' | sort;"
        " pgrep -a -f 'standins/|onebitd.doctor' | grep -v pgrep"
    )
    return box.run("sh", "-c", script, check=False).stdout


@pytest.fixture(scope="module")
def well(installed: Box) -> Iterator[Instance]:
    """An instance with nothing wrong, that does not run yet."""
    with instance_in(
        installed, "well", 8601, start=False, provider={"env": {"SECRET": SESAME}}
    ) as instance:
        instance.box.run("systemctl", "enable", "--quiet", instance.service)
        yield instance


@pytest.fixture(scope="module")
def ill(installed: Box) -> Iterator[Instance]:
    """An instance that root would have no trouble with, and its service a lot."""
    box = installed
    instance = write_instance(
        box,
        "ill",
        8602,
        model={"path": HIDDEN_MODEL},
        provider={"program": HIDDEN_PROVIDER},
    )
    had_devices = {path for path in ("/dev/accel", "/dev/dri") if box.exists(path)}
    box.run("useradd", "--create-home", "alice")
    box.run("groupadd", "npu")
    box.run("chmod", "0700", ALICE)
    box.run("install", "-D", "-m", "644", TINY_MODEL, HIDDEN_MODEL)
    box.write(HIDDEN_PROVIDER, PROVIDER, 0o755)
    box.run("chmod", "0700", SHUT)
    for node, mode in ((NPU, "660"), (GPU, "666")):
        box.run("sh", "-c", f"mkdir -p {node.rpartition('/')[0]}")
        box.run("mknod", f"--mode={mode}", node, "c", "10", "237")
    box.run("chgrp", "npu", NPU)
    instance.drop_in("[Service]\nPrivateTmp=yes\n")
    box.run("systemctl", "daemon-reload")
    try:
        yield instance
    finally:
        remove_instances(box, instance)
        box.run("rm", "-rf", SHUT, NPU, GPU)
        for path in {"/dev/accel", "/dev/dri"} - had_devices:
            box.run("rmdir", path)
        box.run("userdel", "--remove", "alice")
        box.run("groupdel", "npu")


@NEWEST
def test_doctor_of_a_service_at_rest_loads_the_model_and_does_not_start_it(
    well: Instance,
) -> None:
    """Decoder and provider are really run, as the service; nothing of it is left, none started."""
    well.box.run("systemctl", "start", well.units[1])  # who asks its socket starts the service
    before = traces(well.box)
    status, found = report(well)
    assert (status, found["instance"], found["where"]) == (0, "well", "service")
    assert failed(found) == set()
    said = {one["name"]: one["message"] for one in found["checks"]}
    assert said["provider.run"].endswith("restored by the decoder")
    assert states(found)["decoder.slot"] == "ok"
    assert said["daemon"] == "it does not run"
    assert traces(well.box) == before
    assert well.show("ActiveState") == {"ActiveState": "inactive"}


def test_doctor_of_a_running_service_asks_the_daemon(well: Instance) -> None:
    """No second model is loaded; the provider is run beside it; nothing of it is left."""
    well.systemctl("start")
    pid, decoder = well.main_pid(), well.decoder_pid()
    before = traces(well.box)
    done = doctor(well)
    assert done.status == 0, done.stdout
    lines = done.stdout.splitlines()
    assert lines[0] == f"well: checked inside {well.service}, as the service sees it"
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in done.stdout
    assert SESAME not in done.stdout
    assert "127.0.0.1:8601 is this instance's own" in done.stdout
    assert "in order" in done.stdout
    assert traces(well.box) == before
    assert (well.main_pid(), well.decoder_pid()) == (pid, decoder)
    well.systemctl("stop")


def test_doctor_every_line_of_unit_and_drop_ins_is_taken_by_systemd_run(well: Instance) -> None:
    """None is refused, which doctor would leave out: the checks then were in another sandbox."""
    box = well.box
    drop_ins = sorted((ROOT / "units" / "drop-ins").glob("*.conf"))
    texts = [box.run("systemctl", "cat", well.service).stdout, *map(Path.read_text, drop_ins)]
    text = "\n".join([*texts, TAKEN_BACK]).replace("/home/USER/models", "/srv")
    lines = unit_sandbox.properties(text, well.name)
    assert {"User=onebitd", "SystemCallFilter=~capset:0", "MemoryDenyWriteExecute=no"} <= {*lines}
    keys = [line for line in lines if line.startswith("LoadCredential=")]
    box.write(keys[0].rpartition(":")[2], "key\n", 0o600)
    try:
        done = box.run(
            *("systemd-run", "--quiet", "--pipe", "--wait", "--collect", "--service-type=simple"),
            *(f"--property={line}" for line in lines),
            *("sh", "-c", "id -un && cat $CREDENTIALS_DIRECTORY/*"),
        )
    finally:
        box.run("rm", keys[0].rpartition(":")[2])
    assert (done.stdout, done.stderr) == ("onebitd\nkey\n", "")


@NEWEST
def test_doctor_finds_what_the_service_alone_does_not_see_and_how_to_show_it(
    ill: Instance,
) -> None:
    """Home, mode, private /tmp, group, device rule, port; pasting its commands cures all of it."""
    box = ill.box
    with box.spawn("python3", "-c", TAKE_PORT) as taker, contextlib.ExitStack() as at_end:
        at_end.callback(taker.send_signal, signal.SIGKILL)
        assert taker.stdout is not None
        assert taker.stdout.readline() == "listening\n"
        status, inside = report(ill)
        assert (status, inside["where"]) == (1, "service")
        assert failed(inside) == {*ONLY_INSIDE, "port"}
        status, here = report(ill, "--here")
        assert (status, here["where"]) == (1, "here")
        assert failed(here) == {"port"}

        for one in inside["checks"]:
            if one["state"] in ("failed", "warning") and one["name"] not in NOT_HERE:
                box.run("bash", "-ec", one["fix"].replace(f"restart {ill.service}", "--version"))
        taker.wait(10)
    status, cured = report(ill)
    names = {"provider.run", "lock", *ONLY_INSIDE, "port"} - {"device.renderD128"}
    assert {name: states(cured)[name] for name in names} == dict.fromkeys(names, "ok")
    # Past the unit's rule; no driver is behind this node.
    assert failed(cured) == set()


TAKE_PORT = """
import signal, socket
with socket.create_server(("127.0.0.1", 8602)):
    print("listening", flush=True)
    signal.pause()
"""


@NEWEST
def test_doctor_names_what_systemd_cannot_give(well: Instance) -> None:
    """A directory that a drop-in names is missing: the service cannot start, nor can the checks."""
    well.drop_in("[Service]\nBindReadOnlyPaths=/does/not/exist\n")
    well.box.run("systemctl", "daemon-reload")
    try:
        status, found = report(well, "--quick")
    finally:
        well.box.run("rm", f"/etc/systemd/system/{well.service}.d/test.conf")
        well.box.run("systemctl", "daemon-reload")
    assert status == 1
    (one,) = (one for one in found["checks"] if one["state"] == "failed")
    assert one["name"] == "service.sandbox"
    assert "226/NAMESPACE" in one["message"]


@NEWEST
def test_doctor_ctrl_c_ends_everything_that_it_started(well: Instance) -> None:
    """In the middle of a load: no unit, no process, no file is left."""
    before = traces(well.box)
    well.box.write(well.knobs, "--load-delay 600\n")
    try:
        with (
            well.box.spawn(f"{BIN}/onebitctl", "-i", well.name, "doctor") as client,
            contextlib.ExitStack() as at_end,
        ):
            at_end.callback(client.send_signal, signal.SIGKILL)
            well.box.wait_until(lambda: "--slot-save-path" in traces(well.box), "the decoder loads")
            client.send_signal(signal.SIGINT)
            stdout, _ = client.communicate(timeout=30)
    finally:
        well.box.write(well.knobs, "")
    assert stdout == ""
    assert traces(well.box) == before


@NEWEST
def test_doctor_of_a_stranger_says_that_only_root_may(well: Instance, ill: Instance) -> None:
    """Checked as that user, whom the configuration is closed to: 4, and what to do."""
    del ill  # has made alice
    argv = (f"{BIN}/onebitctl", "-i", well.name, "doctor", "--quick")
    done = well.box.run_as("alice", *argv, check=False)
    assert done.status == 4
    first = shlex.split(done.stdout.splitlines()[0].replace("(", "").replace(")", ""))
    assert first[:5] == ["well:", "checked", "here,", "as", "alice,"]
    assert "only root may take the place of" in " ".join(done.stdout.split())


@NEWEST
def test_doctor_of_a_member_beside_the_running_service_asks_the_daemon(
    well: Instance, ill: Instance
) -> None:
    """No second model is loaded, its port is its own, and what is shut to a member is no fault."""
    del ill  # has made alice
    box = well.box
    box.run("usermod", "--append", "--groups", "onebitd", "alice")
    well.systemctl("start")
    before = traces(box)
    try:
        argv = (f"{BIN}/onebitctl", "-i", well.name, "doctor", "--json")
        done = box.run_as("alice", *argv, check=False)
        assert traces(box) == before
    finally:
        well.systemctl("stop")
        box.run("gpasswd", "--delete", "alice", "onebitd")
    found = json.loads(done.stdout)
    assert (done.status, failed(found), found["where"]) == (0, set(), "here")
    said = {one["name"]: one for one in found["checks"]}
    assert said["decoder"]["state"] == "ok"
    assert "is this instance's own" in said["port"]["message"]
    for name in ("device.accel0", "lock"):
        assert said[name]["state"] == "warning"
        assert said[name]["fix"] == "sudo onebitctl -i well doctor"


@NEWEST
def test_doctor_of_a_users_own_service_needs_no_root(ill: Instance) -> None:
    """Run by the user's own service manager, with that user's files and commands without sudo."""
    box = ill.box  # has made alice
    box.run("loginctl", "enable-linger", "alice")
    try:
        uid = box.account("alice").uid
        box.wait_until(lambda: box.exists(f"/run/user/{uid}/bus"), "the user's service manager")
        file = f"{ALICE}/.config/onebitd/mine.toml"
        box.write(file, toml(configuration("mine", 8603, real=False)))
        box.run("chown", "-R", "alice:", f"{ALICE}/.config")
        argv = (f"{BIN}/onebitctl", "doctor", "--quick", "--json")
        done = box.run_as("alice", *argv, check=False)
        left = box.run("ls", f"/run/user/{uid}").stdout
    finally:
        box.run("loginctl", "disable-linger", "alice")
        box.wait_until(lambda: not box.exists(f"/run/user/{uid}"), "the end of the manager")
    found = json.loads(done.stdout)
    assert (found["instance"], found["where"]) == ("mine", "service")
    assert failed(found) == {"device.accel0", "lock"}
    said = {one["name"]: one for one in found["checks"]}
    assert said["model.file"]["message"].endswith("readable by alice")
    assert "sudo usermod -aG npu alice" in said["device.accel0"]["fix"]
    assert "sudo usermod -aG render alice" in said["lock"]["fix"]
    assert said["service"]["fix"] == "systemctl --user enable onebitd@mine.service"
    assert "onebitctl" not in left
