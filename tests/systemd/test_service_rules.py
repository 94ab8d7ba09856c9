"""What a running service may do and tells: journal, reload, lock, sandbox, keys, a user's service.

The instances are started once, together; each test leaves them with the configuration that they
had. What the provider of one does beyond the stand-in is a shell script that a test gives it
(`Rules.script`), so it runs in the service's own sandbox.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest

from tests.llama_builds import BUILDS, MODELS, ROOT
from tests.systemd.box import Box, Client, Done, Suite
from tests.systemd.instances import (
    BIN,
    STANDIN_PROVIDER,
    TINY_MODEL,
    Instance,
    chat_body,
    configuration,
    instance_in,
    remove_instances,
    toml,
    write_instance,
)

CHAT = "/v1/chat/completions"
ALICE = "/home" + "/alice"
LOCK = "/tmp/1bit-npu-device.lock"
OWN_LOCK = "/var/lib/onebitd/lifetime/own.lock"
DROP_INS = "/usr/local/share/onebitd/drop-ins"
USER_UNIT = "/usr/local/lib/systemd/user/onebitd@.service"
CREDENTIALS = "/etc/onebitd/credentials"
KEY = "open-sesame-4711"
WITH_KEY = (f"Authorization: Bearer {KEY}",)
EVERYWHERE = "0.0.0.0"  # noqa: S104 - who may reach it is what is tested
# An address of the box that is not a loopback one.
LAN = "192.0.2.1"
SCRIPTS = "/srv/scripts"
PROVIDER = f"{SCRIPTS}/provider"
RUNS = "/tmp/onebit-runs.log"
FLOOD_LINES = 150_000
MOST_LINES = 3000
"""More than 500 at once and 20 a second for as long as a test can take."""
EXPOSURE = {"bench": 1.8, "opened": 1.9, "keys": 1.8, "private": 1.4, "lifetime": 1.8}
"""The most that `systemd-analyze security` may say, by instance; lan.conf costs 0.1."""
SCRIPTED_PROVIDER = f"""\
#!/bin/sh
export FAKE_PREFILL_LOG={RUNS} FAKE_PREFILL_LOCK={LOCK}
script={SCRIPTS}/${{RUNTIME_DIRECTORY##*/}}.sh
[ ! -e "$script" ] || . "$script"
exec {STANDIN_PROVIDER} "$@"
"""
# The engine's way: create it if it has to be, wait for the lock, say who has it.
ENGINE = f"""
import fcntl, os, sys
fd = os.open("{LOCK}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
fcntl.flock(fd, fcntl.LOCK_EX)
os.write(fd, b"engine pid=%d start=2026-01-31T12:00:00Z\\n" % os.getpid())
print("held", flush=True)
sys.stdin.read()
os.ftruncate(fd, 0)
"""
HOLDERS = {
    "flock": ("flock", LOCK, "sh", "-c", "echo held; cat"),
    "engine": ("python3", "-c", ENGINE),
}
# Tries what a service must not do, and prints how each ended: "ok", or the error's name.
PROBE = f"""
import errno, json, mmap, os, socket, sys

def attempt(function, *args):
    try:
        found = function(*args)
        return "ok" if found is None else found
    except TimeoutError:
        return "timeout"
    except OSError as error:
        return errno.errorcode[error.errno]

def write(path):
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))

def connect(host, port):
    with socket.create_connection((host, port), timeout=1):
        pass

def send(host):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.sendto(b"", (host, 9))

def open_device(path):
    os.close(os.open(path, os.O_RDWR))

def map_executable():
    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()

with open("/proc/self/mountinfo") as file:
    mounts = [line.split()[4:6] for line in file]
print(json.dumps({{
    "writable_mounts": sorted({{path for path, flags in mounts if flags.split(",")[0] == "rw"}}),
    "homes": {{path: attempt(os.listdir, path) for path in ("/home", "{ALICE}", "/root")}},
    "write": {{path: attempt(write, path) for path in sys.argv[1].split(",")}},
    "executable_memory": attempt(map_executable),
    "devices": {{path: attempt(open_device, path) for path in ("/dev/null", "/dev/other")}},
    "send": {{host: attempt(send, host) for host in ("127.0.0.1", "{LAN}")}},
    "connect": {{peer: attempt(connect, *peer.rsplit(":")) for peer in sys.argv[2].split(",")}},
    "netlink": attempt(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).close()),
}}))
"""


@dataclass(frozen=True)
class Rules:
    """The running instances, all on the stand-in decoder and the scripted provider.

    bench: as shipped. opened: lan.conf, home-models.conf and rocm.conf. keys: api-key.conf, and the
    HTTP socket on every address. private: private-network.conf. lifetime: a lock of its own, held
    for life, whose file was replaced right after the start; and a port on every address.
    """

    bench: Instance
    opened: Instance
    keys: Instance
    private: Instance
    lifetime: Instance

    @property
    def all(self) -> tuple[Instance, ...]:
        """Every one of them."""
        return (self.bench, self.opened, self.keys, self.private, self.lifetime)


def settings(**more: Mapping[str, object]) -> dict[str, Any]:
    """Return settings for the scripted provider and a log of everything, and these over them."""
    found: dict[str, Any] = {"provider": {"program": PROVIDER}, "log": {"level": "debug"}}
    for section, values in more.items():
        found.setdefault(section, {}).update(values)
    return found


@contextlib.contextmanager
def script(instance: Instance, text: str) -> Iterator[None]:
    """Have the provider of an instance run this first; `exit` in it ends the run."""
    path = f"{SCRIPTS}/{instance.name}.sh"
    instance.box.write(path, text + "\n")
    try:
        yield
    finally:
        instance.box.run("rm", path)


@contextlib.contextmanager
def gated(instance: Instance) -> Iterator[str]:
    """Have provider runs wait for a file; yield its path."""
    gate = f"{SCRIPTS}/{instance.name}.go"
    try:
        with script(instance, f"until [ -e {gate} ]; do sleep 0.05; done"):
            yield gate
            instance.box.write(gate, "")
    finally:
        instance.box.run("rm", "-f", gate)


@contextlib.contextmanager
def configured(instance: Instance, **more: Mapping[str, object]) -> Iterator[None]:
    """Have these settings in the file for the block; afterwards the former are reloaded."""
    path = f"/etc/onebitd/{instance.name}.toml"
    before = instance.box.read(path)
    config = configuration(instance.name, instance.port, real=False, **settings(**more))
    instance.box.run("tee", path, input=toml(config))  # which keeps owner and mode
    try:
        yield
    finally:
        instance.box.run("tee", path, input=before)
        instance.systemctl("reload")


@contextlib.contextmanager
def reloaded(instance: Instance, **more: Mapping[str, object]) -> Iterator[None]:
    """Have these settings for the block, by reload."""
    with configured(instance, **more):
        instance.systemctl("reload")
        yield


def use_drop_ins(instance: Instance, *names: str, user: str = "") -> None:
    """Copy shipped drop-ins as their texts say; the caller has systemd read them."""
    for name in names:
        text = instance.box.read(f"{DROP_INS}/{name}.conf").replace("/home/USER", f"/home/{user}")
        instance.box.write(f"/etc/systemd/system/{instance.service}.d/{name}.conf", text)


def use_http_socket(instance: Instance, address: str) -> None:
    """Give the HTTP socket this address and the instance's port."""
    text = f"[Socket]\nListenStream=\nListenStream={address}:{instance.port}\n"
    instance.drop_in(text, unit=2)


def write_key(instance: Instance) -> None:
    """Write the API key where the drop-ins look for it."""
    instance.box.write(f"{CREDENTIALS}/{instance.name}.api-key", f"{KEY}\n", 0o600)


@contextlib.contextmanager
def background(
    instance: Instance, content: str, *, headers: Sequence[str] = (), **more: Any
) -> Iterator[Client]:
    """Run a chat in the background; the block ends it if it has not ended."""
    argv = instance.curl_argv(CHAT, chat_body(content, **more), headers=headers)
    with instance.box.spawn(*argv) as client:
        try:
            yield client
        finally:
            client.kill()


def reply_of(client: Client) -> str:
    """Wait for a background chat and return its body; AssertionError unless 200."""
    stdout, stderr = client.communicate(timeout=60)
    text, _, code = stdout.rpartition("\n")
    assert code == "200", (stdout, stderr)
    return text


def wait_phase(instance: Instance, phase: str) -> None:
    """Wait until the request that has the slot is in this phase."""
    instance.box.wait_until(
        lambda: instance.status()["slot"]["phase"] == phase, f"{instance.name}: phase {phase}"
    )


def setting(instance: Instance, key: str) -> dict[str, Any]:
    """Return value and source of one setting."""
    found: dict[str, Any] = json.loads(instance.ctl("config", "--json").stdout)[key]
    return found


def handoff_of(instance: Instance, content: str, headers: Sequence[str] = ()) -> dict[str, Any]:
    """Chat, and return the record of that handoff."""
    instance.chat(content, headers=headers)
    return instance.handoffs()[-1]


def probed(instance: Instance, peers: Sequence[str], headers: Sequence[str] = ()) -> dict[str, Any]:
    """Run PROBE as a provider, which has the sandbox of all of the service; return its findings."""
    directories = [f"/{where}/onebitd/{instance.name}" for where in ("run", "var/lib", "var/cache")]
    writes = ["/srv/scripts/anybody", "/var/tmp/x", "/run/lock/x", "/tmp/x"]
    writes += [f"{directory}/x" for directory in directories]
    report = f"{directories[1]}/probe"
    words = shlex.join([f"{SCRIPTS}/probe.py", ",".join(writes), ",".join(peers)])
    with script(instance, f"python3 {words} >{report} 2>&1"):
        assert handoff_of(instance, "look around", headers)["outcome"] == "used"
    found: dict[str, Any] = json.loads(instance.box.read(report))
    return found


@pytest.fixture(scope="module")
def rules(installed: Box) -> Iterator[Rules]:
    """The instances; and alice, who is in the group onebitd, and mallory, who is in none."""
    box = installed
    for user, groups in {"alice": ["--groups", "onebitd"], "mallory": []}.items():
        box.run("useradd", "--create-home", *groups, user)
    box.run("chmod", "0700", ALICE)
    box.run("ip", "address", "add", f"{LAN}/32", "dev", "lo")
    box.run("mknod", "--mode=666", "/dev/other", "c", "10", "237")
    box.write(PROVIDER, SCRIPTED_PROVIDER, 0o755)
    box.write(f"{SCRIPTS}/probe.py", PROBE)
    box.write(f"{SCRIPTS}/anybody", "", 0o666)
    everywhere = {"host": EVERYWHERE, "allow_unauthenticated": True}
    made = Rules(
        bench=write_instance(box, "bench", 8200, **settings()),
        opened=write_instance(
            box,
            "opened",
            8201,
            **settings(
                model={"path": f"{ALICE}/models/tiny.gguf"},
                http={"host": EVERYWHERE},
            ),
        ),
        keys=write_instance(box, "keys", 8202, **settings()),
        private=write_instance(box, "private", 8000, **settings()),
        lifetime=write_instance(
            box,
            "lifetime",
            8204,
            **settings(lock={"path": OWN_LOCK, "hold": "lifetime"}, http=everywhere),
        ),
    )
    try:
        box.run("install", "-D", "-m", "644", TINY_MODEL, f"{ALICE}/models/tiny.gguf")
        use_drop_ins(made.opened, "lan", "home-models", "rocm", user="alice")
        use_drop_ins(made.keys, "api-key")
        use_drop_ins(made.private, "private-network")
        use_http_socket(made.keys, EVERYWHERE)
        for instance in (made.opened, made.keys):
            write_key(instance)
        box.run("systemctl", "daemon-reload")
        box.run("systemctl", "start", made.keys.units[2], *(one.service for one in made.all))
        box.wait_until(lambda: made.lifetime.status()["lock"]["held"], "the lock for life")
        box.run("rm", OWN_LOCK)
        box.run(*("install", "-o", "onebitd", "-g", "render", "-m", "660", "/dev/null", OWN_LOCK))
        yield made
    finally:
        remove_instances(box, *made.all)
        box.run("ip", "address", "del", f"{LAN}/32", "dev", "lo")
        box.run("rm", "-rf", SCRIPTS, RUNS, f"{RUNS}.end", "/dev/other")
        box.run("sh", "-c", f"rm -f {CREDENTIALS}/*")
        for user in ("alice", "mallory"):
            box.run("userdel", "--remove", user)


# -- journal


def test_journal_fallback_is_found_by_its_fields(rules: Rules) -> None:
    """`journalctl -u onebitd@X ONEBIT_OUTCOME=fallback` has the reason and the human line."""
    with script(rules.bench, "export FAKE_PREFILL_MODE=exit:3"):
        record = handoff_of(rules.bench, "this one falls back")
    found = rules.bench.journal("ONEBIT_OUTCOME=fallback", "ONEBIT_REASON=provider_exit")
    entry = found[-1]
    assert entry["ONEBIT_REQUEST_ID"] == record["request_id"]
    assert entry["ONEBIT_DETAIL"] == "status 3: no XDNA device"
    assert entry["PRIORITY"] == "4"
    assert entry["SYSLOG_IDENTIFIER"] == "onebitd"
    assert entry["ONEBIT_INSTANCE"] == "bench"
    assert re.fullmatch(
        rf"hybrid: {record['prompt_tokens']} prompt tokens: fell back"
        r" \(provider_exit: status 3: no XDNA device\), first byte [0-9.]+ ms",
        entry["MESSAGE"],
    )
    assert rules.bench.journal("ONEBIT_OUTCOME=fallback", "ONEBIT_REASON=restore_short") == []


def test_journal_used_handoff_has_its_times_and_no_word_of_the_prompt(rules: Rules) -> None:
    """Every field of the record is there, at level info; what was asked and said is nowhere."""
    flower = "pelargonium"
    reply = rules.bench.chat(f"do you know {flower}")
    record = rules.bench.handoffs()[-1]
    (entry,) = rules.bench.journal(f"ONEBIT_REQUEST_ID={record['request_id']}")
    assert entry["ONEBIT_OUTCOME"] == "used"
    assert entry["ONEBIT_PREFILL_MS"] == "88.1"
    assert entry["PRIORITY"] == "6"
    assert re.fullmatch(
        rf"hybrid: {record['prompt_tokens']} prompt tokens: prefill 88.1 ms,"
        r" restore [0-9.]+ ms, first byte [0-9.]+ ms",
        entry["MESSAGE"],
    )
    missing = {f"ONEBIT_{name.upper()}" for name in record} - set(entry)
    assert missing == set()
    everything = json.dumps(rules.bench.box.journal())
    assert record["request_id"] in everything
    assert flower not in everything
    assert reply not in everything


def test_journal_log_format_json_has_one_object_a_message(rules: Rules) -> None:
    """What is configured counts: the message is JSON, and the unit's own field still is there."""
    with reloaded(rules.bench, log={"format": "json"}):
        record = handoff_of(rules.bench, "as JSON")
        rules.bench.box.run("journalctl", "--sync")
    (entry,) = (
        one for one in rules.bench.journal("_TRANSPORT=stdout") if record["request_id"] in str(one)
    )
    logged = json.loads(entry["MESSAGE"])
    assert (logged["event"], logged["outcome"]) == ("handoff", "used")
    assert entry["SYSLOG_IDENTIFIER"] == "onebitd"
    assert entry["ONEBIT_INSTANCE"] == "bench"


def left_out(notes: list[dict[str, Any]]) -> int:
    """Return how many lines the notes say are missing."""
    return sum(int(one["ONEBIT_COUNT"]) for one in notes)


def assert_limited(rules: Rules, line: str, source: str) -> None:
    """See that few lines of a flood are in the journal, and a note about all others."""
    records = rules.bench.journal()
    lines = [one for one in records if line in one["MESSAGE"]]
    assert 100 <= len(lines) <= MOST_LINES
    notes = [one for one in records if one.get("ONEBIT_SOURCE") == source]
    assert re.fullmatch(rf"[0-9]+ lines of the {source} were left out", notes[-1]["MESSAGE"])
    assert left_out(notes) >= FLOOD_LINES - MOST_LINES
    journald = rules.bench.box.journal("SYSLOG_IDENTIFIER=systemd-journald")
    assert [one["MESSAGE"] for one in journald if "Suppressed" in one["MESSAGE"]] == []


def test_journal_flood_of_a_provider_leaves_the_handoffs_line(rules: Rules) -> None:
    """150,000 lines at log level debug: some of them, a note, and the handoff's record."""
    line = "the provider goes on and on"
    with script(rules.bench, f"yes {line!r} | head -n {FLOOD_LINES} >&2"):
        record = handoff_of(rules.bench, "under a flood")
    (entry,) = rules.bench.journal(f"ONEBIT_REQUEST_ID={record['request_id']}")
    assert entry["ONEBIT_OUTCOME"] == "used"
    assert_limited(rules, line, "provider")


def test_journal_flood_of_the_decoders_errors_leaves_the_handoffs_line(rules: Rules) -> None:
    """The same at log level warning, from the decoder, while it serves a request."""
    line = "the decoder goes on and on"
    with reloaded(rules.bench, log={"level": "warning"}):
        stderr = f"/proc/{rules.bench.decoder_pid()}/fd/2"
        flood = f"yes '0.00.001.002 E srv: {line}' | head -n {FLOOD_LINES} >{stderr}"
        with (
            rules.bench.box.spawn("sh", "-c", flood) as client,
            script(rules.bench, "export FAKE_PREFILL_MODE=exit:3"),
        ):
            record = handoff_of(rules.bench, "under errors")
            assert client.wait(60) == 0

        def noted() -> bool:
            # The note comes with the next line that there is room for again.
            rules.bench.box.run("sh", "-c", f"echo '0.00.001.003 E srv: and on' >{stderr}")
            notes = rules.bench.journal("ONEBIT_SOURCE=decoder")
            return left_out(notes) >= FLOOD_LINES - MOST_LINES

        rules.bench.box.wait_until(noted, "what was left out")
    (entry,) = rules.bench.journal(f"ONEBIT_REQUEST_ID={record['request_id']}")
    assert entry["ONEBIT_OUTCOME"] == "fallback"
    assert_limited(rules, line, "decoder")


# -- reload


def test_reload_good_changes_settings_and_leaves_decoder_and_stream_alone(rules: Rules) -> None:
    """The answer comes when it is done; what runs goes on as if nothing had been."""
    bench = rules.bench
    expected = bench.chat("a long story", max_tokens=40)
    decoder, main = bench.decoder_pid(), bench.main_pid()
    bench.box.write(bench.knobs, "--token-delay 0.1")
    with background(bench, "a long story", max_tokens=40, stream=True) as client:
        wait_phase(bench, "decode")
        with reloaded(bench, provider={"timeout_s": 7}):
            assert setting(bench, "provider.timeout_s") == {"value": 7.0, "source": "file"}
            assert bench.status()["slot"]["phase"] == "decode"
            bench.box.write(bench.knobs, "")
            assert streamed_text(reply_of(client)) == expected
            assert (bench.decoder_pid(), bench.main_pid()) == (decoder, main)
            assert bench.show("ActiveState", "NRestarts") == {
                "ActiveState": "active",
                "NRestarts": "0",
            }
    assert setting(bench, "provider.timeout_s") == {"value": 120.0, "source": "default"}


def streamed_text(events: str) -> str:
    """Return the text of a streamed chat."""
    chunks = [line[6:] for line in events.splitlines() if line.startswith("data: {")]
    deltas = [json.loads(chunk)["choices"] for chunk in chunks]
    return "".join(one[0]["delta"].get("content") or "" for one in deltas if one)


def test_reload_bad_file_fails_the_command_and_changes_nothing(rules: Rules) -> None:
    """`systemctl reload` ends with an error, the journal has each reason, the service goes on."""
    bench = rules.bench
    main = bench.main_pid()
    with configured(bench, provider={"timeout_s": "soon"}, lock={"hold": "now"}):
        assert bench.systemctl("reload", check=False).status != 0
        assert bench.show("ActiveState", "SubState") == {
            "ActiveState": "active",
            "SubState": "running",
        }
        by_hand = bench.ctl("reload", check=False)
        assert by_hand.status == 1
        for key in ("provider.timeout_s", "lock.hold"):
            assert key in by_hand.stderr
            assert setting(bench, key)["source"] == "default"
        assert bench.main_pid() == main
        assert handoff_of(bench, "still there")["outcome"] == "used"
    (_, told) = bench.journal("ONEBIT_EVENT=reload_refused")[-2:]
    assert told["PRIORITY"] == "3"
    assert "lock.hold: must be" in told["MESSAGE"]
    # What the command printed, which is where `systemctl reload` points at.
    printed = [one["MESSAGE"] for one in bench.journal("_TRANSPORT=stdout")]
    assert any(line.startswith("onebitctl: ") and "lock.hold" in line for line in printed)


def test_reload_names_what_needs_a_restart(rules: Rules) -> None:
    """It succeeds, says which settings wait, and these keep their values."""
    bench = rules.bench
    with configured(bench, model={"ctx_size": 1024}, handoff={"min_tokens": 2}):
        by_hand = bench.ctl("reload")
        assert "handoff.min_tokens" in by_hand.stdout
        assert "model.ctx_size" in by_hand.stderr
        assert setting(bench, "model.ctx_size")["value"] is None
        bench.systemctl("reload")
    told = bench.journal("ONEBIT_EVENT=reloaded")
    assert any("needs a restart: model.ctx_size" in one["MESSAGE"] for one in told)


def test_reload_by_sighup_is_the_same(rules: Rules) -> None:
    """Good and bad: the settings change, or the journal says why not; the service goes on."""
    bench = rules.bench
    hangup = ["systemctl", "kill", "--signal=HUP", "--kill-who=main", bench.service]
    with configured(bench, provider={"timeout_s": 9}):
        bench.box.run(*hangup)
        bench.box.wait_until(
            lambda: setting(bench, "provider.timeout_s")["value"] == 9, "the new setting"
        )
    with configured(bench, provider={"timeout_s": -9}):
        refused = len(bench.journal("ONEBIT_EVENT=reload_refused"))
        bench.box.run(*hangup)
        bench.box.wait_until(
            lambda: bench.journal("ONEBIT_EVENT=reload_refused")[refused:], "the refusal"
        )
        assert bench.show("ActiveState") == {"ActiveState": "active"}


# -- the device lock


def lock_facts(box: Box, path: str = LOCK) -> str:
    """Return owner, group, mode and type of a lock file."""
    return box.run("stat", "--format=%U:%G %a %F", path).stdout.rstrip("\n")


def restore_lock(box: Box) -> None:
    """Have the lock file be what a boot makes of it."""
    box.run("rm", "-rf", LOCK)
    box.run("systemd-tmpfiles", "--create", "--prefix=/tmp")
    assert lock_facts(box) == "root:render 660 regular empty file"


def test_lock_file_is_made_at_install_and_at_boot(
    installed: Box, boot_box: Callable[[], AbstractContextManager[Box]]
) -> None:
    """Root's, for the group render, by systemd-tmpfiles."""
    assert lock_facts(installed) == "root:render 660 regular empty file"
    with boot_box() as box:
        for kind in ("sysusers.d", "tmpfiles.d"):
            text = (ROOT / "units" / kind / "onebitd.conf").read_text()
            box.write(f"/usr/local/lib/{kind}/onebitd.conf", text)
        box.run("systemd-sysusers")
        box.reboot()
        assert lock_facts(box) == "root:render 660 regular empty file"


def test_lock_is_the_machines_own_file(rules: Rules) -> None:
    """No private /tmp, no user of its own: what the service locks is what everybody sees."""
    box = rules.bench.box
    for instance in rules.all:
        assert instance.show("PrivateTmp", "DynamicUser") == {
            "PrivateTmp": "no",
            "DynamicUser": "no",
        }
        inside = f"/proc/{instance.main_pid()}/root{LOCK}"
        inodes = box.run("stat", "--format=%d:%i", LOCK, inside).stdout.split()
        assert inodes[0] == inodes[1]


@pytest.mark.parametrize("holder", HOLDERS)
def test_lock_service_and_others_take_turns(rules: Rules, holder: str) -> None:
    """Neither has it while the other does, and each gets it afterwards."""
    bench = rules.bench
    with contextlib.ExitStack() as stack:
        gate = stack.enter_context(gated(bench))
        first = stack.enter_context(background(bench, "the first"))
        wait_phase(bench, "prefill")
        other = stack.enter_context(running_holder(bench.box, holder))
        assert bench.box.run("flock", "--nonblock", LOCK, "true", check=False).status == 1
        assert bench.status()["lock"]["held"]
        bench.box.write(gate, "")
        reply_of(first)
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with background(bench, "the second") as second:
            wait_phase(bench, "lock")
            assert re.search(f"(?s)held by .*{holder}", bench.ctl("lock").stdout)
            assert second.poll() is None
            assert other.stdin is not None
            other.stdin.close()
            reply_of(second)
    assert [one["outcome"] for one in bench.handoffs()[-2:]] == ["used", "used"]
    assert bench.box.read(LOCK) == ""


@contextlib.contextmanager
def running_holder(box: Box, name: str) -> Iterator[Client]:
    """Run another program that takes the lock, says so, and gives it back when its stdin ends."""
    with box.spawn(*HOLDERS[name]) as client:
        try:
            yield client
        finally:
            client.kill()


def test_lock_two_instances_take_turns(rules: Rules) -> None:
    """Six prompts for two services at once: no two providers run at the same time."""
    box = rules.bench.box
    box.run("rm", "-f", RUNS, f"{RUNS}.end")
    slow = "export FAKE_PREFILL_MODE=sleep:0.2"
    with script(rules.bench, slow), script(rules.opened, slow), contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(background(instance, f"prompt {number}", headers=WITH_KEY))
            for number in range(3)
            for instance in (rules.bench, rules.opened)
        ]
        for client in clients:
            reply_of(client)
    starts = [json.loads(line) for line in box.read(RUNS).splitlines()]
    ends = {one["pid"]: one["end"] for one in map(json.loads, box.read(f"{RUNS}.end").splitlines())}
    assert len(starts) == 6
    assert all(one["lock_held"] and one["no_device_lock"] == "1" for one in starts)
    spans = sorted((one["start"], ends[one["pid"]]) for one in starts)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_lock_file_is_not_aged_out(rules: Rules) -> None:
    """A cleaning of /tmp by age takes an ordinary old file and leaves the lock where it is."""
    box = rules.bench.box
    before = box.run("stat", "--format=%i", LOCK).stdout
    box.write("/etc/tmpfiles.d/tmp.conf", "q /tmp 1777 root root 1s\n")
    box.run("touch", "--date=2 days ago", "/tmp/an-old-file", LOCK)
    box.wait_until(
        "systemd-tmpfiles --clean --prefix=/tmp && ! [ -e /tmp/an-old-file ]", "the cleaning"
    )
    assert box.run("stat", "--format=%i", LOCK).stdout == before
    box.run("rm", "/etc/tmpfiles.d/tmp.conf")


@pytest.mark.parametrize(
    ("plant", "says"),
    [
        ("ln -s /etc/passwd $LOCK", "symbolic link"),
        ("mkfifo $LOCK", "not a regular file|a fifo"),
        ("echo precious > /tmp/precious; ln /tmp/precious $LOCK", "hard link"),
        ("mkdir $LOCK", "directory"),
        ("install -o mallory -g mallory -m 600 /dev/null $LOCK", "belongs to mallory:mallory"),
    ],
    ids=["symlink", "fifo", "hard-link", "directory", "foreign"],
)
def test_lock_planted_file_is_refused_with_what_to_do(rules: Rules, plant: str, says: str) -> None:
    """The handoff falls back, `onebitctl lock` says the same, and nobody's file is touched."""
    bench = rules.bench
    box = bench.box
    passwd = box.read("/etc/passwd")
    try:
        box.run("rm", LOCK)
        box.run("sh", "-c", plant, env={"LOCK": LOCK})
        record = handoff_of(bench, "with a strange lock")
        assert (record["outcome"], record["reason"]) == ("fallback", "lock_unusable")
        assert re.search(says, record["detail"])
        assert "remove it" in record["detail"]
        # As the service's user: root may open what others may not.
        done = box.run_as("onebitd", f"{BIN}/onebitctl", "lock", check=False)
        assert done.status == 1
        assert re.search(says, done.stdout)
        assert "remove it" in done.stdout
        assert box.read("/etc/passwd") == passwd
        if "hard" in says:
            assert box.read(LOCK) == "precious\n"
    finally:
        box.run("rm", "-f", "/tmp/precious")
        restore_lock(box)
    assert handoff_of(bench, "and a good one")["outcome"] == "used"


# -- who may ask


def test_control_socket_of_a_running_service_is_for_root_and_its_group(rules: Rules) -> None:
    """root and a member read everything; anybody else is told which group to join."""
    bench = rules.bench
    for command in ("status", "handoffs"):
        for user in ("root", "alice"):
            done = as_user(bench, user, command)
            assert done.status == 0, done
            assert done.stdout
        done = as_user(bench, "mallory", command)
        assert (done.status, done.stdout) == (4, "")
        assert "is for the group onebitd: join it with `sudo usermod -aG onebitd" in done.stderr


def as_user(instance: Instance, user: str, *command: str) -> Done:
    """Run onebitctl for an instance as somebody."""
    words = (f"{BIN}/onebitctl", "-i", instance.name, *command)
    return instance.box.run_as(user, *words, check=False)


def test_control_socket_of_a_stopped_service_is_for_root_and_its_group(rules: Rules) -> None:
    """Whoever may ask starts the service by it; anybody else starts nothing."""
    box = rules.bench.box
    with instance_in(box, "asleep", 8205, start=False) as asleep:
        box.run("systemctl", "start", asleep.units[1])
        socket = f"/run/onebitd/{asleep.name}/control.sock"
        assert lock_facts(box, socket) == "root:onebitd 660 socket"
        done = as_user(asleep, "mallory", "status")
        assert done.status == 4
        assert "the group onebitd" in done.stderr
        assert asleep.show("ActiveState") == {"ActiveState": "inactive"}
        as_user(asleep, "alice", "status")  # 3 where the start takes longer than it waits
        asleep.wait_state("active")
        assert as_user(asleep, "alice", "status").status in (0, 1)
        assert as_user(asleep, "alice", "handoffs").status == 0
        asleep.ctl("stop")
        done = as_user(asleep, "alice", "status")
        assert done.status == 3
        assert not box.exists(socket)


def test_files_of_a_service_are_nobody_elses(rules: Rules) -> None:
    """Directories have owner and mode as promised, and others can read none of what is in them."""
    box = rules.bench.box
    expected = {
        "/etc/onebitd": "root:onebitd 750",
        CREDENTIALS: "root:root 700",
        f"{CREDENTIALS}/keys.api-key": "root:root 600",
        "/etc/onebitd/bench.toml": "root:onebitd 640",
        "/run/onebitd/bench": "onebitd:onebitd 750",
        "/run/onebitd/bench/control.sock": "onebitd:onebitd 660",
        "/run/onebitd/bench/slots": "onebitd:onebitd 700",
        "/var/lib/onebitd/bench": "onebitd:onebitd 750",
        "/var/cache/onebitd/bench": "onebitd:onebitd 750",
    }
    lines = box.run("stat", "--format=%n %U:%G %a", *expected).stdout.splitlines()
    assert dict(line.split(" ", 1) for line in lines) == expected
    parents = ["/run/onebitd", "/var/lib/onebitd", "/var/cache/onebitd"]
    found = box.run("find", *parents, "/etc/onebitd", "!", "-type", "l", "-perm", "/007").stdout
    assert found.split() == parents
    inner = ["find", "/run/onebitd/bench", "-mindepth", "1", "!", "-name", "control.sock"]
    assert box.run(*inner, "-perm", "/070").stdout == ""


# -- sandbox


def test_sandbox_exposure_does_not_rise(
    rules: Rules, suite: Suite, capsys: pytest.CaptureFixture[str]
) -> None:
    """`systemd-analyze security` says at most 1.8 as shipped; all figures are printed."""
    figures = {}
    for instance in rules.all:
        text = rules.bench.box.run("systemd-analyze", "security", instance.service).stdout
        figures[instance.name] = float(re.findall(r"level for \S+: ([0-9.]+) ", text)[0])
    with capsys.disabled():
        print(f"\n{suite.name}: exposure {figures}")
    assert all(figure <= EXPOSURE[name] for name, figure in figures.items()), figures


def test_units_installed_verify_prints_nothing(rules: Rules) -> None:
    """No unknown key, no missing program, no missing manual page."""
    box = rules.bench.box
    units = box.run("find", "/usr/local/lib/systemd", "-name", "onebitd*").stdout.split()
    assert len(units) == 4
    assert box.run("systemd-analyze", "verify", *units) == Done(0, "", "")


def test_sandbox_of_a_provider_holds(rules: Rules) -> None:
    """As shipped: no homes, nothing to write but its own, no W+X, loopback only, no odd device."""
    bench = rules.bench
    found = probed(bench, [f"127.0.0.1:{rules.keys.port}", f"{LAN}:{rules.keys.port}"])
    own = [f"/{where}/onebitd/bench" for where in ("run", "var/cache", "var/lib")]
    assert found["homes"] == {
        "/home": "EACCES",
        ALICE: "EACCES",
        "/root": "EACCES",
    }
    assert found["write"] == {
        "/srv/scripts/anybody": "EROFS",
        "/var/tmp/x": "EROFS",
        "/run/lock/x": "EROFS",
        "/tmp/x": "ok",
        **{f"{path}/x": "ok" for path in own},
    }
    systems = ("/dev", "/proc", "/sys/fs/cgroup", "/run/host")
    mounts = [path for path in found["writable_mounts"] if not path.startswith(systems)]
    assert mounts == sorted([*own, "/tmp"])
    assert found["executable_memory"] in ("EPERM", "EACCES")
    assert found["devices"] == {"/dev/null": "ok", "/dev/other": "EPERM"}
    assert found["send"] == {"127.0.0.1": "ok", LAN: "EPERM"}
    assert found["connect"] == {
        f"127.0.0.1:{rules.keys.port}": "ok",
        f"{LAN}:{rules.keys.port}": "timeout",
    }
    assert found["netlink"] == "EAFNOSUPPORT"


def test_sandbox_every_process_has_no_capability_and_gets_none(rules: Rules) -> None:
    """Daemon, decoder and running provider: no capability, no new privileges, filtered calls."""
    bench = rules.bench
    with gated(bench) as gate, background(bench, "hold it") as client:
        wait_phase(bench, "prefill")
        cgroup = f"/sys/fs/cgroup{bench.show('ControlGroup')['ControlGroup']}"
        each = f'cat {cgroup}/cgroup.procs | while read p; do cat "/proc/$p/status"; echo; done'
        texts = bench.box.run("sh", "-c", each).stdout.rstrip("\n").split("\n\n")
        provider = [line for line in bench.processes() if PROVIDER in line]
        bench.box.write(gate, "")
        reply_of(client)
    assert len(provider) == 1
    assert len(texts) >= 4
    for text in texts:
        status = dict(line.split(":\t", 1) for line in text.splitlines())
        # What systemd 257 leaves inheritable is nothing to inherit with these empty.
        assert {status[f"Cap{kind}"] for kind in ("Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
        assert status["NoNewPrivs"] == "1"
        assert status["Seccomp"] == "2"
        assert "\t0\t" not in status["Uid"]


# -- drop-ins


def test_drop_ins_open_what_they_name_and_nothing_else(rules: Rules) -> None:
    """lan, home-models and rocm: a model in a closed home, W+X memory, other addresses."""
    opened = rules.opened
    box = opened.box
    assert lock_facts(box, ALICE) == "alice:alice 700 directory"
    found = probed(opened, [f"{LAN}:{rules.keys.port}"], WITH_KEY)
    assert found["homes"].pop("/root") in ([], "EACCES")
    assert found["homes"] == {"/home": ["alice"], ALICE: ["models"]}
    assert found["executable_memory"] == "ok"
    assert found["send"] == {"127.0.0.1": "ok", LAN: "ok"}
    assert found["connect"] == {f"{LAN}:{rules.keys.port}": "ok"}
    assert found["devices"] == {"/dev/null": "ok", "/dev/other": "EPERM"}
    assert found["write"]["/srv/scripts/anybody"] == "EROFS"
    assert from_lan(opened) == 401
    assert from_lan(opened, *WITH_KEY) == 200


def from_lan(instance: Instance, *headers: str, limit_s: int = 10) -> int:
    """Return the status of a request to the address that is not a loopback one; 0: none."""
    argv = instance.curl_argv("/v1/models", headers=headers, limit_s=limit_s)
    argv[-1] = argv[-1].replace("127.0.0.1", LAN)
    return int(instance.box.run(*argv, check=False).stdout[-3:])


def test_lan_port_without_the_drop_in_is_not_reached(rules: Rules) -> None:
    """Whatever the configuration says: a port of the service's own is there for loopback only."""
    assert rules.lifetime.request("/health")[0] == 200
    assert from_lan(rules.lifetime, limit_s=1) == 0


def test_keys_as_a_credential_are_asked_for_and_shown_to_nobody(rules: Rules) -> None:
    """api-key.conf: 401 without; the key is in no file of others, no answer and no log line."""
    keys = rules.keys
    box = keys.box
    assert keys.request("/v1/models")[0] == 401
    assert keys.request("/v1/models", headers=WITH_KEY)[0] == 200
    # A socket that was passed has no rules of the service's: keys are what protects it.
    assert from_lan(keys) == 401
    assert from_lan(keys, *WITH_KEY) == 200
    credential = f"/run/credentials/{keys.service}/api-key"
    assert setting(keys, "http.api_key_file") == {
        "value": credential,
        "source": "credential api-key",
    }
    for path in (credential, f"{CREDENTIALS}/keys.api-key"):
        for user in ("alice", "mallory"):
            assert "denied" in box.run_as(user, "cat", path, check=False).stderr
    told = keys.ctl("config").stdout + keys.ctl("status", "--json").stdout
    assert "api-key" in told
    assert KEY not in told + json.dumps(keys.journal())


def test_keys_missing_credential_fails_the_start_once(rules: Rules) -> None:
    """The unit has failed with 243/CREDENTIALS, is not tried again, and starts once the file is."""
    box = rules.bench.box
    with instance_in(box, "keyless", 8206, start=False) as keyless:
        use_drop_ins(keyless, "api-key")
        box.run("systemctl", "daemon-reload")
        assert keyless.systemctl("start", check=False).status == 1
        assert keyless.show("ActiveState", "ExecMainStatus") == {
            "ActiveState": "failed",
            "ExecMainStatus": "243",
        }
        assert "status=243/CREDENTIALS" in keyless.systemctl("status", check=False).stdout
        write_key(keyless)
        keyless.systemctl("start")
        assert keyless.request("/v1/models")[0] == 401


def test_lan_socket_without_keys_is_refused_with_what_to_do(rules: Rules) -> None:
    """Exit status 2, and a line that names the socket and the setting; nothing is served."""
    box = rules.bench.box
    with instance_in(box, "naked", 8207, start=False) as naked:
        use_http_socket(naked, EVERYWHERE)
        box.run("systemctl", "daemon-reload")
        box.run("systemctl", "start", naked.units[2])
        assert naked.systemctl("start", check=False).status == 1
        assert naked.show("ActiveState", "ExecMainStatus", "NRestarts") == {
            "ActiveState": "failed",
            "ExecMainStatus": "2",
            "NRestarts": "0",
        }
        said = " ".join(one["MESSAGE"] for one in naked.journal())
        assert "http.api_key_file: required because the socket that systemd passed" in said
        assert f"0.0.0.0:{naked.port}" in said


def test_private_network_is_reached_and_reaches_nothing(rules: Rules) -> None:
    """Chats come in by the HTTP socket, over a restart too; no other service can be reached."""
    private = rules.private
    peers = [f"127.0.0.1:{rules.keys.port}", f"{LAN}:{rules.keys.port}"]
    found = probed(private, peers)
    assert found["connect"] == {peers[0]: "ECONNREFUSED", peers[1]: "ENETUNREACH"}
    with background(private, "before, or after") as client:
        private.systemctl("restart")
        reply_of(client)
    assert handoff_of(private, "after the restart")["outcome"] == "used"


def test_lock_held_for_life_and_replaced_is_noticed(rules: Rules) -> None:
    """Within ten seconds the journal has `lock_lost`, and the file that is there now is locked."""
    lifetime = rules.lifetime
    (lost,) = lifetime.box.wait_until(lambda: lifetime.journal("ONEBIT_EVENT=lock_lost"), "lost")
    assert lost["PRIORITY"] == "4"
    assert OWN_LOCK in lost["MESSAGE"]
    lifetime.box.wait_until(
        lambda: lifetime.box.run("flock", "-n", OWN_LOCK, "true", check=False).status == 1, "taken"
    )
    assert lifetime.status()["lock"]["held"]
    assert f"onebitd pid={lifetime.main_pid()} " in lifetime.box.read(OWN_LOCK)


# -- a user's service


@dataclass(frozen=True)
class Mine:
    """The service of a user who lingers, and is in no group; `runtime` is the user's directory."""

    instance: Instance
    user: str
    runtime: str

    def run(self, *argv: str, check: bool = True) -> Done:
        """Run a command as the user."""
        return self.instance.box.run_as(self.user, *argv, check=check)

    def systemctl(self, verb: str, check: bool = True) -> Done:
        """Tell the user's service manager."""
        return self.run("systemctl", "--user", verb, self.instance.service, check=check)

    def configure(self, **more: Any) -> None:
        """Write the configuration: the real decoder and the reference provider."""
        path = f"/home/{self.user}/.config/onebitd/{self.instance.name}.toml"
        config = configuration(self.instance.name, self.instance.port, real=True, **more)
        self.instance.box.write(path, toml(config))
        self.instance.box.run("chown", "-R", f"{self.user}:", f"/home/{self.user}/.config")


@pytest.fixture
def mine(installed: Box) -> Iterator[Mine]:
    """A user with a service manager, and nothing started in it."""
    BUILDS[0].require()
    MODELS[0].require()
    box = installed
    box.run("useradd", "--create-home", "carol")
    box.run("loginctl", "enable-linger", "carol")
    uid = box.account("carol").uid
    manager = f"user@{uid}.service"
    try:
        box.wait_until(f"systemctl is-active {manager}", "carol's manager")
        yield Mine(Instance(box, "mine", 8210), "carol", f"/run/user/{uid}")
    finally:
        box.run("loginctl", "disable-linger", "carol")
        box.wait_until("! pgrep -u carol", "carol's processes are gone")
        box.run("userdel", "--remove", "carol")


def test_users_service_serves_reloads_and_leaves_nothing(mine: Mine) -> None:
    """On the real llama-server, without root: a refused lock is told, and stop ends it all."""
    instance = mine.instance
    mine.configure(log={"level": "debug"})
    verify = mine.run("systemd-analyze", "--user", "verify", USER_UNIT)
    assert (verify.stdout, verify.stderr) == ("", "")
    mine.systemctl("start")
    assert instance.chat("Say pelargonium")
    (first,) = handoffs_of(mine)
    assert (first["outcome"], first["reason"]) == ("fallback", "lock_unusable")
    assert "join the group render" in first["detail"]
    status = mine.run(f"{BIN}/onebitctl", "status", check=False)
    assert status.status == 1
    assert "join the group render" in status.stdout
    decoder = json.loads(mine.run(f"{BIN}/onebitctl", "status", "--json", check=False).stdout)
    assert (decoder["unit"], decoder["user_unit"]) == (instance.service, True)

    mine.configure(log={"level": "debug"}, lock={"path": f"{mine.runtime}/lock"})
    mine.systemctl("reload")
    assert instance.chat("Say pelargonium")
    assert handoffs_of(mine)[-1]["outcome"] == "used"
    status = mine.run(f"{BIN}/onebitctl", "status")
    assert str(decoder["backend"]["pid"]) in status.stdout
    mine.configure(lock={"hold": "now"})
    assert mine.systemctl("reload", check=False).status != 0
    assert mine.systemctl("is-active").stdout == "active\n"

    records = instance.box.journal(f"_UID={instance.box.account(mine.user).uid}")
    assert [one["ONEBIT_OUTCOME"] for one in records if "ONEBIT_OUTCOME" in one] == [
        "fallback",
        "used",
    ]
    assert "pelargonium" not in json.dumps(records).lower()

    mine.systemctl("stop")
    assert not instance.box.exists(f"{mine.runtime}/onebitd/mine")
    left = instance.box.run("pgrep", "-u", mine.user, "-f", "onebit|llama", check=False)
    assert left.stdout == ""


def handoffs_of(mine: Mine) -> list[dict[str, Any]]:
    """Return the records of the last handoffs, as the user sees them."""
    lines = mine.run(f"{BIN}/onebitctl", "handoffs", "--json").stdout.splitlines()
    return [json.loads(line) for line in lines]
