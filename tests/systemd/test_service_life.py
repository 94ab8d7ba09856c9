"""The life of the service under a booted systemd: load, watch, stop, restart, power.

Every instance is written before the first one starts, with its drop-ins and one `systemctl
daemon-reload`: systemd forgets at a reload what a service asked for with EXTEND_TIMEOUT_USEC, and
the short limits that tests set would then end it. What takes long begins with the module and is
looked at when it is over.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from onebitd.core.config import SETTING_BY_KEY
from tests.llama_builds import BUILDS, MODELS
from tests.systemd.box import Box, Client
from tests.systemd.instances import (
    STANDIN_PROVIDER,
    Instance,
    chat_body,
    instance_in,
    remove_instances,
    write_instance,
)

LOCK = "/tmp/1bit-npu-device.lock"
CHAT = "/v1/chat/completions"
# Starts a unit and prints its status text until it is started.
START = """
systemctl start "$0" & starting=$!
while kill -0 $starting 2>/dev/null; do
    systemctl show --property=StatusText --value "$0"
    sleep 0.3
done
wait $starting; echo "start: $?"
"""
START_AND_CHAT = 'systemctl start "$0" && exec "$@"'
# Kills each decoder of an instance once, until the daemon has had enough.
START_AND_KILL = """
systemctl start "onebitd@$0"; killed=
while systemctl --quiet is-active "onebitd@$0"; do
    decoder=$(pgrep -f "llama_server.py .*/run/onebitd/$0/")
    if [ -n "$decoder" ] && [ "$decoder" != "$killed" ]; then
        kill -SEGV $decoder && killed=$decoder && echo $killed
    fi
    sleep 0.1
done
"""
# 40 clients, one each 100 ms, while the unit restarts; prints how that and each of them ended.
CLIENTS = """
import http.client, json, subprocess, sys, threading, time

unit, port = sys.argv[1], int(sys.argv[2])
body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2})
ends = ["nothing"] * 40

def ask(number):
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", body, headers)
        reply = connection.getresponse()
        reply.read()
        ends[number] = str(reply.status)
    except OSError as error:
        ends[number] = type(error).__name__

restart = subprocess.Popen(["systemctl", "restart", unit])
clients = [threading.Thread(target=ask, args=[number]) for number in range(len(ends))]
for client in clients:
    client.start()
    time.sleep(0.1)
for client in clients:
    client.join()
print(json.dumps({"restart": restart.wait(), "ends": ends}))
"""


@dataclass(frozen=True)
class Plan:
    """One instance on the stand-ins: arguments of the decoder, drop-ins, settings."""

    decoder: Sequence[str] = ()
    unit: str = ""
    http: str = ""
    env: str = ""
    provider: str = ""
    config: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


HTTP = "[Socket]\nListenStream=\nListenStream=127.0.0.1:{port}\n"
PLANS = {
    # Five daemons begin at once: before its first word each needs some of these 15 s.
    "slow": Plan(decoder=["--load-delay", "25"], unit="TimeoutStartSec=15s"),
    "never": Plan(
        decoder=["--load-delay", "600"],
        unit="TimeoutStartSec=15s",
        config={"backend": {"load_timeout_s": 20}},
    ),
    "doomed": Plan(),
    "patient": Plan(provider="sleep:65", config={"http": {"drain_timeout_s": 1}}),
    "busy": Plan(unit="WatchdogSec=5s", provider="sleep:16"),
    "states": Plan(decoder=["--load-delay", "1"]),
    "hung": Plan(unit="WatchdogSec=3s", env="ONEBIT_DEBUG_HANG=1\n"),
    "killed": Plan(provider="@/srv/knobs/killed.provider", config={"lock": {"path": LOCK}}),
    "broken": Plan(config={"http": {"prot": 8000}}, http=HTTP),
    "drained": Plan(unit="TimeoutStopSec=4s"),
    "ended": Plan(provider="ignore_term", config={"http": {"drain_timeout_s": 1}}),
    "front": Plan(decoder=["--load-delay", "3"], http=HTTP),
    "bare": Plan(decoder=["--load-delay", "3"], config={"handoff": {"policy": "never"}}),
    "lazy": Plan(decoder=["--load-delay", "2"], http=HTTP),
}
FIRST_PORT = 8100


def plan_settings(name: str, plan: Plan) -> dict[str, dict[str, object]]:
    """Return an instance's settings; each has a device lock of its own unless the plan has one."""
    env = {"FAKE_PREFILL_MODE": plan.provider or "ok"}
    settings: dict[str, dict[str, object]] = {
        "lock": {"path": f"/tmp/{name}.lock"},
        "provider": {"env": env},
    }
    for section, more in plan.config.items():
        settings.setdefault(section, {}).update(more)
    return settings


def write_plan(box: Box, name: str, port: int, plan: Plan) -> Instance:
    """Write the files of an instance."""
    settings: dict[str, Any] = plan_settings(name, plan)
    instance = write_instance(box, name, port, decoder=plan.decoder, **settings)
    if plan.unit:
        instance.drop_in(f"[Service]\n{plan.unit}\n")
    if plan.http:
        instance.drop_in(plan.http.format(port=port), unit=2)
    if plan.env:
        box.write(f"/etc/onebitd/{name}.env", plan.env)
    return instance


class Life:
    """The module's instances, by name, and what runs in the box meanwhile."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.instances = {
            name: write_plan(box, name, FIRST_PORT + number, plan)
            for number, (name, plan) in enumerate(PLANS.items())
        }
        box.run("systemctl", "daemon-reload")
        self._clients: dict[str, Client] = {}

    def __getitem__(self, name: str) -> Instance:
        return self.instances[name]

    def begin(self, name: str, script: str, *args: str) -> None:
        """Run a shell script that will be asked about with `wait_for`."""
        self._clients[name] = self.box.spawn("sh", "-c", script, *args)

    def wait_for(self, name: str) -> list[str]:
        """Wait for the end of a script; return the lines that it printed."""
        with self._clients.pop(name) as client:
            stdout, _ = client.communicate(timeout=120)
        return stdout.splitlines()

    def end(self) -> None:
        """End what still runs, and remove all instances."""
        for client in self._clients.values():
            client.kill()
            client.communicate()
        services = [instance.service for instance in self.instances.values()]
        self.box.run("systemctl", "kill", "--signal=KILL", *services, check=False)
        remove_instances(self.box, *self.instances.values())
        locks = [f"/tmp/{name}.lock" for name in self.instances]
        self.box.run("rm", "-f", *locks, "/srv/knobs/killed.provider", "/srv/knobs/llama.provider")


@pytest.fixture(scope="module", autouse=True)
def life(installed: Box) -> Iterator[Life]:
    """The instances; the slow ones have begun."""
    found = Life(installed)
    try:
        for name in ("slow", "never"):
            found.begin(name, START, found[name].service)
        found.begin("doomed", START_AND_KILL, "doomed")
        for name in ("patient", "busy"):
            chat = found[name].curl_argv(CHAT, chat_body("hello"), limit_s=110)
            found.begin(name, START_AND_CHAT, found[name].service, *chat)
        yield found
    finally:
        found.end()


@contextlib.contextmanager
def streaming(instance: Instance, tokens: int) -> Iterator[Client]:
    """Begin a streamed reply; yield its client when the first bytes are there."""
    body = chat_body("hello", stream=True, max_tokens=tokens)
    with instance.box.spawn(*instance.curl_argv(CHAT, body)) as client:
        assert client.stdout is not None
        assert client.stdout.readline().startswith("data: ")
        yield client


@contextlib.contextmanager
def prefilling(instance: Instance) -> Iterator[int]:
    """Begin a request whose provider does not come to an end; yield the provider's pid."""
    with instance.box.spawn(*instance.curl_argv(CHAT, chat_body("hello"))) as client:
        try:
            yield int(instance.box.wait_until(lambda: provider_pid(instance), "a provider"))
        finally:
            client.kill()
            client.communicate()


def provider_pid(instance: Instance) -> str:
    """Return the pid of an instance's provider, nothing when there is none."""
    pattern = f"{STANDIN_PROVIDER} .*/run/onebitd/{instance.name}/"
    return instance.box.run("pgrep", "-f", pattern, check=False).stdout


def told(instance: Instance, *words: str) -> list[str]:
    """Return the messages in an instance's journal that have all the words."""
    messages = [str(record.get("MESSAGE")) for record in instance.journal()]
    return [text for text in messages if all(word in text for word in words)]


def alive(box: Box, pids: Sequence[int]) -> list[int]:
    """Return which of the processes are there, be it as zombies."""
    found = box.run(
        "sh", "-c", "for pid; do [ ! -e /proc/$pid ] || echo $pid; done", "-", *map(str, pids)
    )
    return [int(line) for line in found.stdout.split()]


def cgroup_pids(instance: Instance) -> list[int]:
    """Return the processes in the service's control group."""
    cgroup = instance.show("ControlGroup")["ControlGroup"]
    text = instance.box.run("cat", f"/sys/fs/cgroup{cgroup}/cgroup.procs").stdout if cgroup else ""
    return [int(line) for line in text.split()]


def assert_nothing_left(instance: Instance, before: Sequence[int]) -> None:
    """No process of before is there, no decoder and no provider by name, no control group."""
    assert alive(instance.box, before) == []
    assert instance.children_by_name() == []
    assert cgroup_pids(instance) == []


def test_service_status_text_tells_each_state_of_the_decoder(life: Life) -> None:
    """Loading, ready with the address, restarting with the reason, ready again; not a restart."""
    states = life["states"]
    life.begin("states", START, states.service)
    states.wait_status_text("loading 1 s")
    *_, result = life.wait_for("states")
    assert result == "start: 0"
    ready = f"ready on 127.0.0.1:{states.port}"
    assert states.show("StatusText")["StatusText"] == ready
    before = states.show("MainPID", "NRestarts")

    states.box.run("kill", "-ABRT", str(states.decoder_pid()))

    assert states.wait_status_text("restarting") == "restarting the decoder: signal 6 (SIGABRT)"
    assert states.wait_status_text("ready") == ready
    assert "hello" not in states.chat("hello")
    assert states.show("MainPID", "NRestarts") == before


def test_service_decoder_is_the_victim_and_dumps_no_core(life: Life) -> None:
    """The kernel is to take the decoder before the daemon; killed, it comes back by itself."""
    states = life["states"]
    states.systemctl("start")
    decoder, daemon = states.decoder_pid(), states.main_pid()
    score = {pid: int(states.box.read(f"/proc/{pid}/oom_score_adj")) for pid in (decoder, daemon)}
    assert score[decoder] >= 300 > score[daemon]
    limits = states.box.read(f"/proc/{decoder}/limits").splitlines()
    (core,) = (line.split() for line in limits if line.startswith("Max core file size"))
    assert core[4:6] == ["0", "0"]
    restarts = states.status()["backend"]["restarts"]

    states.box.run("kill", "-KILL", str(decoder))

    states.wait_status_text("restarting")
    states.wait_status_text("ready")
    assert states.status()["backend"]["restarts"] == restarts + 1
    assert states.chat("hello")
    assert states.main_pid() == daemon
    assert states.show("NRestarts", "ActiveState") == {"NRestarts": "0", "ActiveState": "active"}
    assert not states.box.exists("/core")


def test_service_running_has_no_zombies(life: Life) -> None:
    """After a decoder that died and a provider that came and went, each was reaped."""
    states = life["states"]
    states.systemctl("start")
    states.box.run("kill", "-KILL", str(states.decoder_pid()))
    states.wait_status_text("restarting")
    states.wait_status_text("ready")
    assert states.chat("hello")
    assert states.handoffs()[-1]["outcome"] == "used"
    pids = ",".join(map(str, cgroup_pids(states)))
    kinds = states.box.run("ps", "-o", "stat=", "-p", pids).stdout.split()
    assert kinds
    assert not [kind for kind in kinds if kind.startswith("Z")]
    states.systemctl("stop")


def test_service_hung_loop_is_killed_with_its_stack_and_comes_back(life: Life) -> None:
    """The watchdog ends it, the journal says where it hung, and the next one serves."""
    hung = life["hung"]
    hung.systemctl("start")
    hung.chat("hello")
    before = cgroup_pids(hung)

    hung.box.run("kill", "-USR2", str(hung.main_pid()))

    hung.box.wait_until(lambda: hung.show("NRestarts")["NRestarts"] == "1", "a restart")
    hung.wait_state("active")
    assert told(hung, "Watchdog timeout (limit 3s)!")
    assert told(hung, "Failed with result 'watchdog'.")
    assert told(hung, "in hang_on_purpose")
    assert alive(hung.box, before) == []
    assert hung.chat("hello")
    assert hung.show("NRestarts") == {"NRestarts": "1"}
    hung.systemctl("stop")


def start_prefilling(instance: Instance) -> None:
    """Start an instance whose provider will take its time."""
    instance.box.write(f"/srv/knobs/{instance.name}.provider", "sleep:300")
    instance.systemctl("start")


def assert_killed_daemon_takes_its_children_along(instance: Instance) -> None:
    """Kill -9 the daemon of a started instance in a provider run; see it back, and its lock."""
    box = instance.box
    with prefilling(instance) as provider:
        decoder = instance.decoder_pid()
        before = cgroup_pids(instance)
        assert {decoder, provider} <= set(before)
        stale = box.read(LOCK)
        assert stale.startswith(f"onebitd pid={instance.main_pid()} ")
        box.write(f"/srv/knobs/{instance.name}.provider", "ok")

        box.run("kill", "-KILL", str(instance.main_pid()))

        box.wait_until(lambda: instance.show("SubState")["SubState"] == "auto-restart", "its end")
        assert_nothing_left(instance, before)
    instance.wait_state("active")
    assert instance.show("NRestarts") == {"NRestarts": "1"}
    assert box.read(LOCK) == ""
    assert told(instance, stale.strip())
    assert instance.chat("hello")


def test_service_daemon_killed_leaves_no_decoder_and_no_provider(life: Life) -> None:
    """kill -9 of the main process: its children go, the lock is free, the next one serves."""
    start_prefilling(life["killed"])
    assert_killed_daemon_takes_its_children_along(life["killed"])
    assert life["killed"].handoffs()[-1]["outcome"] == "used"
    life["killed"].systemctl("stop")


def test_service_bad_configuration_fails_once(life: Life) -> None:
    """Exit status 2 is no reason to try again: the start fails, and the journal has the problem."""
    broken = life["broken"]
    assert broken.systemctl("start", check=False).status != 0
    assert broken.show("ActiveState", "SubState", "ExecMainStatus", "NRestarts") == {
        "ActiveState": "failed",
        "SubState": "failed",
        "ExecMainStatus": "2",
        "NRestarts": "0",
    }
    assert told(broken, "http.prot")


def test_http_socket_client_starts_a_bad_configuration_once(life: Life) -> None:
    """The waiting client gets a 503: left in the queue it would start the service over and over."""
    broken = life["broken"]
    broken.box.run("systemctl", "start", broken.units[2])
    before = len(told(broken, "http.prot"))
    assert broken.request("/health")[0] == 503
    broken.wait_state("failed")
    assert broken.box.show(broken.units[2], "ActiveState") == {"ActiveState": "active"}
    assert len(told(broken, "http.prot")) == before + 1
    broken.box.run("systemctl", "stop", broken.units[2])


def test_service_slow_load_is_waited_for(life: Life) -> None:
    """A model that loads for longer than TimeoutStartSec= is started, and the status counts."""
    *texts, result = life.wait_for("slow")
    assert result == "start: 0"
    loading = [int(text.split()[1]) for text in texts if text.startswith("loading ")]
    assert loading == sorted(loading)
    assert loading[-1] > 15
    assert life["slow"].show("ActiveState", "NRestarts") == {
        "ActiveState": "active",
        "NRestarts": "0",
    }
    life["slow"].systemctl("stop")


def test_service_model_that_never_loads_fails_by_its_own_limit(life: Life) -> None:
    """backend.load_timeout_s ends what TimeoutStartSec= does not; `systemctl status` says it."""
    *_, result = life.wait_for("never")
    assert result == "start: 1"
    assert_failed_for_good(life["never"])
    why = "no answer within 20 s (backend.load_timeout_s)"
    assert told(life["never"], "the decoder could not be started", why)
    page = life["never"].systemctl("status", check=False).stdout
    assert f'Status: "failed, the decoder ended: {why}' in page


def assert_failed_for_good(instance: Instance) -> None:
    """Exit status 4, no restart, nothing left."""
    assert instance.show("ActiveState", "SubState", "Result", "ExecMainStatus", "NRestarts") == {
        "ActiveState": "failed",
        "SubState": "failed",
        "Result": "exit-code",
        "ExecMainStatus": "4",
        "NRestarts": "0",
    }
    assert_nothing_left(instance, [])


def test_service_decoder_killed_six_times_fails_for_good(life: Life) -> None:
    """Five restarts, no sixth: the unit fails with status 4, and the journal says why."""
    killed = life.wait_for("doomed")
    assert len(killed) == 6
    assert_failed_for_good(life["doomed"])
    assert told(life["doomed"], "the decoder died 6 times within 300 s", "SIGSEGV")
    page = life["doomed"].systemctl("status", check=False).stdout
    assert 'Status: "failed, the decoder ended: signal 11 (SIGSEGV)' in page


def test_service_long_prefill_is_no_hang(life: Life) -> None:
    """A provider that works for three times WatchdogSec= and more troubles no watchdog."""
    assert life.wait_for("busy")[-1] == "200"
    busy = life["busy"]
    assert busy.handoffs()[-1]["outcome"] == "used"
    assert busy.handoffs()[-1]["provider_wall_ms"] > 3 * 5000
    assert busy.show("NRestarts", "WatchdogUSec") == {"NRestarts": "0", "WatchdogUSec": "5s"}
    busy.systemctl("stop")


def test_service_stop_lets_a_streamed_reply_finish(life: Life) -> None:
    """The stop waits past TimeoutStopSec=, says so, and leaves what the man page says."""
    drained = life["drained"]
    drained.systemctl("start")
    drained.box.write(drained.knobs, "--token-delay 0.15")
    before = cgroup_pids(drained)
    with streaming(drained, tokens=50) as client:
        stop = drained.box.spawn("systemctl", "stop", drained.service)
        assert drained.wait_status_text("draining") == "draining 1 reply"
        text, _ = client.communicate(timeout=60)
    with stop:
        stop.communicate(timeout=60)
        assert stop.returncode == 0
    assert text.split("\n\n")[-2:] == ["data: [DONE]", "\n200"]
    assert drained.show("ActiveState", "Result", "StatusText") == {
        "ActiveState": "inactive",
        "Result": "success",
        "StatusText": "stopped",
    }
    assert_nothing_left(drained, before)
    directory = f"/run/onebitd/{drained.name}"
    assert drained.box.run("ls", directory).stdout.split() == [
        "control.sock",
        "onebitd.lock",
        "slots",
    ]
    assert drained.box.run("ls", "-A", f"{directory}/slots").stdout == ""


def test_service_stop_ends_a_provider_run(life: Life) -> None:
    """Beyond http.drain_timeout_s the run is killed, and the stop is a clean one all the same."""
    ended = life["ended"]
    ended.systemctl("start")
    with prefilling(ended):
        before = cgroup_pids(ended)
        ended.systemctl("stop")
    assert ended.show("ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}
    assert_nothing_left(ended, before)
    assert ended.box.read(f"/tmp/{ended.name}.lock") == ""
    assert ended.journal("ONEBIT_OUTCOME=cancelled")


def test_http_socket_lets_clients_wait_during_a_restart(life: Life) -> None:
    """40 clients around `systemctl restart`: all are served; without it some are refused."""
    front, bare = life["front"], life["bare"]
    front.box.run("systemctl", "start", front.units[2], front.service, bare.service)
    runs = [
        front.box.spawn("python3", "-c", CLIENTS, one.service, str(one.port))
        for one in (front, bare)
    ]
    found: list[dict[str, Any]] = []
    for run in runs:
        with run:
            found.append(json.loads(run.communicate(timeout=90)[0]))
    assert found[0] == {"restart": 0, "ends": ["200"] * 40}
    assert found[1]["restart"] == 0
    assert "ConnectionRefusedError" in found[1]["ends"]
    front.box.run("systemctl", "stop", front.units[2], front.service, bare.service)


def test_http_socket_first_request_starts_the_service_and_waits(life: Life) -> None:
    """Nothing runs until somebody asks; the backlog is the unit's, before and after."""
    lazy = life["lazy"]
    lazy.box.run("systemctl", "start", lazy.units[2])
    somaxconn = int(lazy.box.read("/proc/sys/net/core/somaxconn"))
    listener = ["LISTEN", "0", str(min(4096, somaxconn)), f"127.0.0.1:{lazy.port}"]
    assert listening(lazy)[:4] == listener
    assert lazy.show("ActiveState") == {"ActiveState": "inactive"}
    assert lazy.chat("hello")
    assert lazy.show("ActiveState") == {"ActiveState": "active"}
    assert listening(lazy)[:4] == listener


def listening(instance: Instance) -> list[str]:
    """Return what ss(8) says of an instance's listener, word by word."""
    return instance.box.run("ss", "-Hltn", f"sport = :{instance.port}").stdout.split()


def test_onebitctl_stop_closes_the_service_and_both_sockets(life: Life) -> None:
    """After it no request starts the service again: the port is closed."""
    lazy = life["lazy"]
    lazy.box.run("systemctl", "start", lazy.units[2], lazy.service)
    assert lazy.request("/health")[0] == 200
    lazy.ctl("stop")
    for unit in lazy.units:
        assert lazy.box.show(unit, "ActiveState") == {"ActiveState": "inactive"}
    assert lazy.request("/health")[0] == 0
    assert not lazy.box.exists("/run/onebitd/lazy/control.sock")


def test_unit_limits_outlast_what_onebitd_allows_itself(life: Life) -> None:
    """A daemon-reload takes back the time that was asked for: the unit's own is enough without."""
    shown = life["slow"].show("TimeoutStopUSec")
    page = life.box.run("systemctl", "cat", life["states"].service).stdout
    assert shown == {"TimeoutStopUSec": "1min 30s"}
    assert "TimeoutStartSec=12min" in page
    load_s = SETTING_BY_KEY["backend.load_timeout_s"].default
    drain_s = SETTING_BY_KEY["http.drain_timeout_s"].default
    assert (load_s, drain_s) < (12 * 60, 90)


@pytest.mark.real
def test_service_daemon_killed_leaves_no_real_llama_server(life: Life) -> None:
    """As with the stand-in, on the real decoder."""
    BUILDS[0].require()
    MODELS[0].require()
    provider = {
        "program": STANDIN_PROVIDER,
        "env": {"FAKE_PREFILL_MODE": "@/srv/knobs/llama.provider"},
    }
    with instance_in(life.box, "llama", 8200, real=True, start=False, provider=provider) as llama:
        start_prefilling(llama)
        assert_killed_daemon_takes_its_children_along(llama)


def test_service_provider_may_run_for_longer_than_a_minute(life: Life) -> None:
    """The thread that started it may not end under it, nor its parent-death signal fire."""
    assert life.wait_for("patient")[-1] == "200"
    record = life["patient"].handoffs()[-1]
    assert record["outcome"] == "used"
    assert record["provider_wall_ms"] > 65_000
    life["patient"].systemctl("stop")


def test_service_enabled_is_back_after_power_off_and_on(life: Life) -> None:
    """A reboot and a pulled plug: what is enabled runs and serves, a socket waits for a client."""
    box, killed, lazy = life.box, life["killed"], life["lazy"]
    box.run("systemctl", "enable", "--now", killed.service)
    box.run("systemctl", "enable", lazy.units[2])
    assert killed.chat("hello")

    box.reboot()

    assert_back(killed, lazy)
    box.write("/srv/knobs/killed.provider", "sleep:300")
    with prefilling(killed):
        assert box.read(LOCK)
        box.power_cut()
    box.power_on()
    box.write("/srv/knobs/killed.provider", "ok")
    assert_back(killed, lazy)


def assert_back(instance: Instance, lazy: Instance) -> None:
    """The boot started the one, and a handoff works; the other starts when it is asked."""
    assert instance.show("ActiveState", "NRestarts") == {"ActiveState": "active", "NRestarts": "0"}
    assert lazy.show("ActiveState") == {"ActiveState": "inactive"}
    assert instance.chat("hello")
    assert instance.handoffs()[-1]["outcome"] == "used"
    assert lazy.chat("hello")
