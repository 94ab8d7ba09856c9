"""Every way in which a handoff fails, made to happen for real: the reply is right all the same.

Each test asserts the client's reply, the record and its log line, the counter, that nothing is
left behind, and that the next handoff is used again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.rig import (
    DAYS,
    ENDLESS,
    LONG,
    RHYME,
    Prepared,
    RawClient,
    Rig,
    group_is_gone,
    kill,
    running_rig,
    stalled_client,
    tiny_state_of,
    with_other_ids,
)
from tests.harness import HttpReply, wait_until
from tests.llama_builds import BUILDS, MODELS, LlamaBuild, LlamaModel

BUILD, MODEL = BUILDS[0], MODELS[0]


@pytest.fixture(scope="module")
def shared(
    prepared: Prepared,
    parts: tuple[LlamaBuild, LlamaModel],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Rig]:
    """One daemon for the faults that do not end it or its decoder."""
    home = tmp_path_factory.mktemp("shared")
    lock = f'[lock]\npath = "{home / "npu.lock"}"\nwait_s = 1\n'
    with running_rig(
        prepared, *parts, home, config=lock, env={"FAKE_PREFILL_LOCK": str(home / "npu.lock")}
    ) as rig:
        rig.assert_good(RHYME)
        rig.assert_good()
        yield rig


@pytest.fixture
def rig(shared: Rig) -> Iterator[Rig]:
    """The shared daemon; at the end of the test its next handoff must be used."""
    shared.heal()
    yield shared
    shared.assert_good()


@pytest.fixture
def own_rig(
    prepared: Prepared, parts: tuple[LlamaBuild, LlamaModel], tmp_path: Path
) -> Iterator[Rig]:
    """A daemon of this test's own, because its decoder is going to die."""
    with running_rig(prepared, *parts, tmp_path) as rig:
        yield rig
        rig.wait_decoder()
        rig.assert_good()


def in_background(ask: Callable[[], HttpReply]) -> Callable[[], HttpReply]:
    """Send a request from a thread; the result waits for its reply."""
    replies: list[HttpReply] = []
    thread = threading.Thread(target=lambda: replies.append(ask()), daemon=True)
    thread.start()

    def result() -> HttpReply:
        thread.join(60)
        assert replies, "no reply"
        return replies[0]

    return result


# --- the provider ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Fault:
    """What the provider does, and what the record must say."""

    name: str
    mode: str
    reason: str
    detail: str
    damage: Callable[[Rig], bytes] | None = None
    stream: bool = False


PROVIDER_FAULTS = [
    Fault("exits", "exit:3", "provider_exit", "status 3: no XDNA device"),
    Fault("exits-streamed", "exit:3", "provider_exit", "status 3: no XDNA device", stream=True),
    Fault("crashes", "crash", "provider_exit", "signal 9 (SIGKILL)"),
    Fault("hangs", "hang", "provider_timeout", "within 3 s", stream=True),
    Fault("ignores-sigterm", "ignore_term", "provider_timeout", "within 3 s"),
    Fault("writes-nothing", "no_file", "provider_no_file", "wrote no state file", stream=True),
    Fault("half-a-file", "half", "bad_state", "", stream=True),
    Fault("symlink", "symlink", "bad_state", "symbolic link", stream=True),
    Fault("still-open", "grandchild_holds_file", "bad_state", "open for writing", stream=True),
    Fault("nan", "nan", "bad_state", "a NaN or an infinity"),
    Fault("floods-and-exits", "flood,exit:3", "provider_exit", "no XDNA device"),
    Fault(
        "other-model",
        "ok",
        "bad_state",
        "",
        damage=lambda rig: tiny_state_of(rig.prepared.ids[RHYME][:-1]),
    ),
    Fault(
        "other-prompt", "ok", "bad_state", "", damage=lambda rig: rig.state_of(DAYS), stream=True
    ),
    Fault("one-id-too-many", "ok", "bad_state", "", damage=lambda rig: rig.prepared.whole),
    Fault(
        "wrong-id",
        "ok",
        "bad_state",
        "",
        damage=lambda rig: with_other_ids(rig.state_of(RHYME), rig.prepared.ids[RHYME][:-1]),
    ),
]


@pytest.mark.parametrize("fault", PROVIDER_FAULTS, ids=lambda fault: fault.name)
def test_provider_fails_the_decoder_prefills(rig: Rig, fault: Fault) -> None:
    """Whatever the provider does, the client gets the cold reply, and the record says why."""
    counted, before = rig.by_reason(fault.reason), len(rig.daemon.handoffs())
    rig.set_mode(fault.mode)
    if fault.damage is not None:
        rig.set_state(fault.damage(rig))
    with rig.nothing_left():
        reply = rig.ask(RHYME, stream=fault.stream)
    assert (reply.status, reply.text) == (200, rig.prepared.texts[RHYME])
    assert reply.headers["x-onebit-handoff"] == "fallback"
    assert reply.headers["x-onebit-reason"] == fault.reason
    record = rig.daemon.last_handoff(before + 1)
    rig.assert_fell_back(record, fault.reason, fault.detail, counted)
    assert record["evaluated_tokens"] > 1
    status = rig.daemon.status()["provider"]
    assert status["consecutive_failures"] == 1
    assert (status["last_error"]["reason"], status["state"]) == (fault.reason, "idle")


@pytest.mark.parametrize("mode", ["flood", "grandchild", "garbage_result"])
def test_provider_is_a_nuisance_its_handoff_is_used(rig: Rig, mode: str) -> None:
    """Output without end, a child left in the group or a broken result line spoil no handoff."""
    rig.set_mode(mode)
    before = len(rig.daemon.handoffs())
    with rig.nothing_left():
        reply = rig.ask(RHYME)
    assert reply.text == rig.prepared.texts[RHYME]
    record = rig.daemon.last_handoff(before + 1)
    assert record["outcome"] == "used", record


@pytest.mark.parametrize("how", ["missing", "not-executable"])
def test_provider_program_taken_away_falls_back_and_names_it(rig: Rig, how: str) -> None:
    """A program that is deleted or loses its mode while the daemon runs costs the handoff only."""
    counted, before = rig.by_reason("provider_exit"), len(rig.daemon.handoffs())
    rig.provider.rename(rig.provider.with_name("kept"))
    if how == "not-executable":
        rig.provider.write_text("#!/bin/sh\nexit 0\n")
        rig.provider.chmod(0o644)
    try:
        with rig.nothing_left():
            reply = rig.ask(RHYME)
    finally:
        rig.provider.unlink(missing_ok=True)
        rig.provider.with_name("kept").rename(rig.provider)
    assert (reply.status, reply.text) == (200, rig.prepared.texts[RHYME])
    said = "does not exist" if how == "missing" else "not an executable file"
    record = rig.daemon.last_handoff(before + 1)
    rig.assert_fell_back(record, "provider_exit", said, counted)
    assert str(rig.provider) in record["detail"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_strict_request_provider_fails_client_gets_the_reason(rig: Rig, stream: bool) -> None:
    """With `strict` a failed handoff is a 502 that says why, and is recorded as failed."""
    rig.set_mode("exit:3")
    before = len(rig.daemon.handoffs())
    with rig.nothing_left():
        reply = rig.ask(RHYME, policy="strict", stream=stream)
    assert reply.status == 502
    assert "provider_exit: status 3: no XDNA device" in reply.json["error"]["message"]
    record = rig.daemon.last_handoff(before + 1)
    assert (record["outcome"], record["reason"]) == ("failed", "provider_exit")


@pytest.mark.parametrize(
    ("prompt", "policy", "reason", "status"),
    [
        ([1], None, "too_short", 200),
        ([1] * 2048, None, "too_long", 400),
        (["Monday,", "Tuesday,"], None, "not_text", 200),
        (RHYME, "never", "policy", 200),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_prompt_not_handed_off_provider_is_not_called(
    rig: Rig, prompt: object, policy: str | None, reason: str, status: int
) -> None:
    """What cannot or shall not be handed off goes to the decoder as it came, with its reason."""
    counted, before, runs = rig.by_reason(reason), len(rig.daemon.handoffs()), len(rig.runs())
    headers = {} if policy is None else {"X-Onebit-Handoff": policy}
    with rig.nothing_left():
        reply = rig.daemon.completion(prompt, max_tokens=2, headers=headers)
    assert reply.status == status, reply
    assert (reply.headers["x-onebit-handoff"], reply.headers["x-onebit-reason"]) == (
        "skipped",
        reason,
    )
    record = rig.daemon.last_handoff(before + 1)
    assert (record["outcome"], record["reason"]) == ("skipped", reason)
    assert rig.daemon.log_records("handoff")[-1]["level"] == "info"
    assert rig.by_reason(reason) == counted + 1
    assert len(rig.runs()) == runs
    if status == 400:
        assert reply.json["error"]["type"] == "exceed_context_size_error"


# --- the state file, after it was checked ---------------------------------------------------


@contextlib.contextmanager
def state_waits(rig: Rig) -> Iterator[tuple[Path, Callable[[], HttpReply]]]:
    """Yield RHYME's checked state file while another reply keeps the slot, and the reply to come.

    What the body does to the file, the decoder meets in its restore.
    """
    with RawClient(rig, {"prompt": DAYS, "stream": True, **ENDLESS}) as holder:
        holder.wait_for(b"data: ")
        reply = in_background(lambda: rig.ask(RHYME))

        def waiting() -> list[str]:
            return [name for name in rig.daemon.slot_files() if name.startswith("state-")]

        found = wait_until(waiting, "a checked state file")
        wait_until(lambda: len(rig.daemon.slot_files()) == 1, "the run's directory is gone")
        yield rig.daemon.runtime / "slots" / found[0], reply
        holder.leave()
        reply()


def test_restore_refused_slot_is_made_safe_and_reply_is_cold(rig: Rig) -> None:
    """A file that the decoder refuses after all: the reply equals a cold one."""
    counted = rig.by_reason("restore_refused")
    with rig.nothing_left():
        with state_waits(rig) as (path, reply):
            path.unlink()
        assert reply().text == rig.prepared.texts[RHYME]
    record = rig.daemon.handoffs()[-1]
    rig.assert_fell_back(record, "restore_refused", "Unable to restore slot", counted)
    assert record["evaluated_tokens"] == record["prompt_tokens"]


def test_restore_short_slot_is_made_safe_and_reply_is_cold(rig: Rig) -> None:
    """A restore of other tokens than were handed over is seen, and nothing is decoded from it."""
    counted = rig.by_reason("restore_short")
    with rig.nothing_left():
        with state_waits(rig) as (path, reply):
            # One token more than was handed over: all of it would be found in the slot.
            path.write_bytes(rig.prepared.whole)
        assert reply().text == rig.prepared.texts[RHYME]
    record = rig.daemon.handoffs()[-1]
    rig.assert_fell_back(record, "restore_short", "the decoder restored", counted)
    assert record["evaluated_tokens"] == record["prompt_tokens"]


def test_restore_kills_the_decoder_new_one_answers(own_rig: Rig) -> None:
    """A file that aborts the decoder is not tried again; the new decoder answers the request."""
    rig = own_rig
    counted = rig.by_reason("backend_down")
    with rig.nothing_left(new_decoder=True):
        with state_waits(rig) as (path, reply):
            path.write_bytes(rig.state_of(RHYME)[:-1])
        assert reply().text == rig.prepared.texts[RHYME]
    record = rig.daemon.handoffs()[-1]
    rig.assert_fell_back(record, "backend_down", "died while it restored", counted)
    backend = rig.daemon.status()["backend"]
    assert backend["restarts"] == 1
    assert "SIGABRT" in backend["last_exit"]["reason"]


# --- the device lock ------------------------------------------------------------------------


@contextlib.contextmanager
def lock_held_outside(path: str) -> Iterator[subprocess.Popen[bytes]]:
    """A second process has the lock until the end, or until it is killed."""
    program = (
        "import fcntl, sys, time\n"
        "file = open(sys.argv[1], 'a')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print(flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            holder.stdout.readline()
            yield holder
        finally:
            holder.kill()


def test_lock_held_outside_falls_back_and_names_the_holder(rig: Rig) -> None:
    """A lock that does not come free in time: no provider runs, and the record names who has it."""
    counted, runs = rig.by_reason("lock_busy"), len(rig.runs())
    with lock_held_outside(rig.daemon.status()["lock"]["path"]) as holder, rig.nothing_left():
        reply = rig.ask(RHYME)
        assert reply.text == rig.prepared.texts[RHYME]
        record = rig.daemon.handoffs()[-1]
        rig.assert_fell_back(record, "lock_busy", f"pid {holder.pid}", counted)
        assert "python" in record["detail"]
        assert record["lock_ms"] >= 1000
    assert len(rig.runs()) == runs


def test_lock_released_in_time_handoff_is_used(rig: Rig) -> None:
    """A holder that lets go while the request waits costs it only the wait."""
    before = len(rig.daemon.handoffs())
    with rig.nothing_left():
        with lock_held_outside(rig.daemon.status()["lock"]["path"]) as holder:
            reply = in_background(lambda: rig.ask(RHYME))
            rig.wait_phase("lock")
            holder.kill()
        assert reply().text == rig.prepared.texts[RHYME]
    assert rig.daemon.last_handoff(before + 1)["outcome"] == "used"
    run = rig.runs()[-1]
    assert (run["lock_held"], run["no_device_lock"]) == (True, "1")


def test_lock_replaced_by_a_link_falls_back(rig: Rig) -> None:
    """A symbolic link in the lock's place is not followed; the target stays as it is."""
    counted = rig.by_reason("lock_unusable")
    path = Path(rig.daemon.status()["lock"]["path"])
    victim = path.with_name("victim")
    victim.write_text("precious\n")
    path.unlink(missing_ok=True)
    path.symlink_to(victim)
    try:
        with rig.nothing_left():
            assert rig.ask(RHYME, stream=True).text == rig.prepared.texts[RHYME]
    finally:
        path.unlink()
    rig.assert_fell_back(rig.daemon.handoffs()[-1], "lock_unusable", "symbolic link", counted)
    assert victim.read_text() == "precious\n"


def is_locked(path: Path) -> bool:
    """Say whether some process has the lock."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_lock_for_life_is_held_from_start_and_free_after_sigkill(
    prepared: Prepared, parts: tuple[LlamaBuild, LlamaModel], tmp_path: Path
) -> None:
    """`lock.hold = "lifetime"`: held between handoffs too, and the kernel frees it at the end."""
    path = tmp_path / "npu.lock"
    lock = f'[lock]\npath = "{path}"\nhold = "lifetime"\nwait_s = 1\n'
    env = {"FAKE_PREFILL_LOCK": str(path)}
    with running_rig(prepared, *parts, tmp_path, config=lock, env=env) as rig:
        assert is_locked(path)
        assert rig.daemon.status()["lock"]["holder"]["pid"] == rig.daemon.process.pid
        rig.assert_good(RHYME)
        assert (rig.runs()[-1]["lock_held"], rig.runs()[-1]["no_device_lock"]) == (True, "1")
        assert is_locked(path)
        rig.set_mode("hang")
        with RawClient(rig, {"prompt": DAYS}):
            rig.wait_run(1)
            rig.daemon.kill()
            wait_until(lambda: not is_locked(path), "the lock is free")


def test_no_device_lock_variable_no_lock_is_taken(
    prepared: Prepared, parts: tuple[LlamaBuild, LlamaModel], tmp_path: Path
) -> None:
    """With NPU_NO_DEVICE_LOCK set, somebody else's lock does not matter."""
    path = tmp_path / "npu.lock"
    lock = f'[lock]\npath = "{path}"\nwait_s = 1\n'
    env = {"NPU_NO_DEVICE_LOCK": "1"}
    with (
        lock_held_outside(str(path)),
        running_rig(prepared, *parts, tmp_path, config=lock, env=env) as rig,
    ):
        rig.assert_good(RHYME)
        assert "lock_ms" not in rig.daemon.handoffs()[-1]


# --- a full state directory -----------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root")
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "onebitd-test", str(path)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this environment forbids mounting")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_state_directory_full_falls_back(
    prepared: Prepared, parts: tuple[LlamaBuild, LlamaModel], tmp_path: Path, small_disk: Path
) -> None:
    """No room: no provider is called. Room that runs out in the middle: the provider says so."""
    home = tmp_path / "home"
    home.mkdir()
    config = f'[handoff]\nstate_dir = "{small_disk}"\n'
    with running_rig(prepared, *parts, home, config=config) as rig:
        slots = next(path for path in small_disk.iterdir())
        rig.assert_good(RHYME)
        good = rig.provider.read_text()
        filling = 'head -c 3500000 /dev/zero >"$(dirname "$4")/scratch"\n'
        rig.provider.write_text(good.replace("exec", f"{filling}exec", 1))
        assert rig.ask(RHYME).text == rig.prepared.texts[RHYME]
        rig.assert_fell_back(rig.daemon.handoffs()[-1], "provider_exit", "No space left", 0)
        assert [path.name for path in slots.iterdir()] == ["example.state"]
        filler, runs = small_disk / "filler", len(rig.runs())
        filler.write_bytes(bytes(2_500_000))
        assert rig.ask(DAYS).text == rig.prepared.texts[DAYS]
        rig.assert_fell_back(rig.daemon.handoffs()[-1], "no_space", "handoff.state_dir", 0)
        assert len(rig.runs()) == runs
        filler.unlink()
        rig.provider.write_text(good)
        rig.assert_good()


# --- a decoder that dies --------------------------------------------------------------------


def assert_restarted(rig: Rig, restarts: int = 1) -> None:
    """The status shows the last exit, with its time and reason."""
    rig.wait_decoder()
    backend = rig.daemon.status()["backend"]
    assert backend["restarts"] == restarts
    assert "SIGKILL" in backend["last_exit"]["reason"]
    assert backend["last_exit"]["time"].endswith("Z")


def test_decoder_killed_idle_next_request_waits_for_the_new_one(own_rig: Rig) -> None:
    """A request that comes during a short restart waits for it and is handed over."""
    rig = own_rig

    def refused() -> HttpReply | None:
        health = rig.daemon.request("GET", "/health")
        return health if health.status == 503 else None

    with rig.nothing_left(new_decoder=True):
        kill(rig.wait_decoder())
        health: HttpReply = wait_until(refused, "the end is noticed")
        assert health.json["error"]["type"] == "unavailable_error"
        assert "SIGKILL" in health.json["error"]["message"]
        reply = rig.ask(RHYME)
    assert (reply.status, reply.text) == (200, rig.prepared.texts[RHYME])
    assert_restarted(rig)
    assert rig.daemon.handoffs()[-1]["outcome"] == "used"
    assert rig.daemon.request("GET", "/health").json == {"status": "ok"}


def test_decoder_killed_during_the_provider_run_handoff_goes_to_the_new_one(own_rig: Rig) -> None:
    """A state file fits the next decoder as well."""
    rig = own_rig
    rig.set_mode("sleep:1")
    with rig.nothing_left(new_decoder=True):
        reply = in_background(lambda: rig.ask(RHYME, stream=True))
        rig.wait_run(0)
        kill(rig.wait_decoder())
        assert reply().text == rig.prepared.texts[RHYME]
    assert_restarted(rig)
    assert rig.daemon.handoffs()[-1]["outcome"] == "used"


def test_decoder_killed_during_the_restore_new_one_answers_cold(own_rig: Rig) -> None:
    """A restore without an answer: the file is not tried again, the reply is right."""
    rig = own_rig
    rig.set_mode("sleep:1")
    with rig.nothing_left(new_decoder=True):
        reply = in_background(lambda: rig.ask(RHYME))
        rig.wait_run(0)
        pid = rig.wait_decoder()
        kill(pid, signal.SIGSTOP)
        rig.wait_phase("restore")
        kill(pid)
        assert reply().text == rig.prepared.texts[RHYME]
    record = rig.daemon.handoffs()[-1]
    rig.assert_fell_back(record, "backend_down", "died while it restored", 0)
    assert record["evaluated_tokens"] == record["prompt_tokens"]
    assert_restarted(rig)


def test_decoder_killed_before_the_first_byte_new_one_answers(own_rig: Rig) -> None:
    """A reply without a byte so far is begun again on the new decoder, cold."""
    rig = own_rig
    body = {"max_tokens": 120, "ignore_eos": True, "temperature": 0, "seed": 1, "prompt": RHYME}
    with rig.nothing_left(new_decoder=True):
        reply = in_background(lambda: rig.daemon.request("POST", "/v1/completions", body))
        rig.wait_phase("decode")
        kill(rig.wait_decoder())
        found = reply()
    assert found.status == 200
    assert found.text.startswith(rig.prepared.texts[RHYME])
    record = rig.daemon.handoffs()[-1]
    rig.assert_fell_back(record, "backend_down", "the decoder", 0)
    assert found.headers["x-onebit-reason"] == "backend_down"
    assert_restarted(rig)


def test_decoder_killed_before_the_first_event_stream_goes_on(own_rig: Rig) -> None:
    """A stream that has begun without an event gets its events from the new decoder."""
    rig = own_rig
    rig.set_mode("exit:3")
    with (
        rig.nothing_left(new_decoder=True),
        RawClient(rig, {"prompt": LONG, "stream": True}, ["Connection: close"]) as client,
    ):
        client.wait_for(b"\r\n\r\n")
        kill(rig.wait_decoder())
        received = client.read_to_end()
    assert b"data: [DONE]" in received
    assert b'"error"' not in received
    record = rig.daemon.handoffs()[-1]
    assert (record["outcome"], record["reason"]) == ("fallback", "provider_exit")
    assert_restarted(rig)


def test_decoder_killed_mid_stream_client_sees_an_error(own_rig: Rig) -> None:
    """A stream that has lost its decoder never ends as if it were complete."""
    rig = own_rig
    body = {"prompt": RHYME, "stream": True, **ENDLESS}
    with (
        rig.nothing_left(new_decoder=True),
        RawClient(rig, body, ["Connection: close"]) as client,
    ):
        client.wait_for(b"data: ")
        kill(rig.wait_decoder())
        received = client.read_to_end()
    assert b"[DONE]" not in received
    assert b'"error"' in received
    events = [line for line in received.split(b"\n") if line.startswith(b"data: ")]
    assert json.loads(events[-1][6:])["error"]["code"] == 500
    record = rig.daemon.handoffs()[-1]
    assert (record["outcome"], record["reason"]) == ("failed", "backend_down"), record
    assert_restarted(rig)


def test_decoder_killed_mid_reply_of_another_endpoint_body_is_broken(own_rig: Rig) -> None:
    """A request outside the handoff route gets no clean end either, and leaves the slot."""
    rig = own_rig
    body = {"prompt": RHYME, "n_predict": 400, "ignore_eos": True}
    reply = in_background(lambda: rig.daemon.request("POST", "/completion", body))
    rig.wait_phase("decode")
    kill(rig.wait_decoder())
    assert reply().status == 502
    rig.wait_slot_free()
    assert_restarted(rig)


def test_decoder_killed_mid_body_reply_is_not_whole(own_rig: Rig) -> None:
    """A JSON reply that has lost its decoder ends with its connection, short of its length."""
    rig = own_rig
    with rig.nothing_left(new_decoder=True), stalled_client(rig) as (client, received):
        kill(rig.wait_decoder())
        with contextlib.suppress(ConnectionResetError):
            while data := client.recv(65536):
                received += data
    head, _, body = received.partition(b"\r\n\r\n")
    declared = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    assert len(body) < int(declared[0].partition(b":")[2])
    assert_restarted(rig)


# --- several clients ------------------------------------------------------------------------


def test_three_clients_at_once_all_right_and_runs_overlap_decoding(rig: Rig) -> None:
    """Two handoffs and a plain request: right replies, and a run while another reply decodes."""
    before, runs = len(rig.daemon.handoffs()), len(rig.runs())
    rig.set_mode("sleep:0.5")
    with rig.nothing_left():
        replies = [
            (prompt, in_background(partial(rig.ask, prompt, policy=policy)))
            for prompt, policy in ((RHYME, None), (DAYS, None), (RHYME, "never"))
        ]
        for prompt, reply in replies:
            assert reply().text == rig.prepared.texts[prompt]
    outcomes = sorted(record["outcome"] for record in rig.daemon.handoffs()[before:])
    assert outcomes == ["skipped", "used", "used"]
    with RawClient(rig, {"prompt": RHYME, "stream": True, **ENDLESS}) as holder:
        holder.wait_for(b"data: ")
        reply = in_background(lambda: rig.ask(DAYS))
        pid = rig.wait_run(runs + 3)
        assert rig.daemon.status()["slot"]["phase"] == "decode"
        wait_until(lambda: group_is_gone(pid), "the end of the run")
        assert rig.daemon.status()["slot"]["phase"] == "decode"
        holder.leave()
        assert reply().text == rig.prepared.texts[DAYS]


def test_handoffs_in_a_row_leave_descriptors_and_memory_flat(rig: Rig) -> None:
    """Thirty handoffs cost no descriptor and no memory."""

    def rss_bytes() -> int:
        statm = Path(f"/proc/{rig.daemon.process.pid}/statm").read_text()
        return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def five() -> None:
        for _ in range(5):
            for prompt in (RHYME, DAYS):
                assert rig.ask(prompt).text == rig.prepared.texts[prompt]

    with rig.nothing_left():
        five()
        before = rss_bytes()
        five()
        five()
        assert rss_bytes() < before + 8 * 1024 * 1024
