"""A daemon on the real decoder whose provider misbehaves on demand, for the fault tests.

The provider is tests/standins/provider.py. It copies state files that the decoder itself saved
before (`prepare`), whole or damaged, so that no test waits for a real prefill.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from tests.harness import STANDINS, HttpReply, RunningDaemon, is_alive, running_onebitd, wait_until
from tests.llama_builds import LlamaBuild, LlamaModel, running_llama
from tests.standins import tiny_state

RHYME = (
    "Mary had a little lamb, its fleece was white as snow, and everywhere that Mary went, the lamb "
    "was sure to go. "
) * 2 + "Mary had a little lamb,"
DAYS = (
    "The days of the week, again and again: "
    + "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, " * 3
).rstrip()
"""Two prompts with a decided continuation, as in llama_builds, but short: a cold prefill takes
seconds on a slow machine, and a fault test waits for one."""
LONG = "The cat sat on the mat and the dog lay on the rug. " * 30
"""A prompt that is evaluated for many seconds."""
MAX_TOKENS = 6
BACKEND_ARGS = ("-c", "2048", "-t", "1", "-b", "128", "-ub", "128")
"""Small batches: llama-server notices only between two that its client has left."""
ENDLESS = {"max_tokens": 1500, "ignore_eos": True}


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What the decoder alone made of the two prompts.

    Attributes:
        states: a directory with `N.bin` for N ids, see the provider stand-in.
        ids: of each prompt, its last one included.
        texts: the cold greedy reply to each prompt.
        whole: the state file of RHYME with its last token evaluated too.
    """

    states: Path
    ids: dict[str, list[int]]
    texts: dict[str, str]
    whole: bytes


@functools.cache
def prepare(build: LlamaBuild, model: LlamaModel) -> Prepared:
    """Have the decoder alone answer both prompts cold, and save their states; once a test run."""
    states = Path(tempfile.mkdtemp(prefix="onebitd-states-"))
    atexit.register(shutil.rmtree, states, ignore_errors=True)
    ids: dict[str, list[int]] = {}
    texts: dict[str, str] = {}
    with running_llama(build, model, *BACKEND_ARGS) as client:

        def state_of(tokens: list[int]) -> bytes:
            client.slot_action("erase", "")
            client.complete(tokens, 0)
            assert client.slot_action("save", "s").status == 200
            return (client.slots_dir / "s").read_bytes()

        for prompt in (RHYME, DAYS):
            ids[prompt] = client.tokenize(prompt)
            client.slot_action("erase", "")
            texts[prompt] = client.complete(prompt, MAX_TOKENS)["content"]
            (states / f"{len(ids[prompt]) - 1}.bin").write_bytes(state_of(ids[prompt][:-1]))
        whole = state_of(ids[RHYME])
    assert len(ids[RHYME]) != len(ids[DAYS])
    return Prepared(states, ids, texts, whole)


def with_other_ids(state: bytes, ids: Sequence[int]) -> bytes:
    """Return the state with one id in the middle of its token block changed."""
    at = state.index(struct.pack(f"<{len(ids)}i", *ids)) + 4 * (len(ids) // 2)
    (old,) = struct.unpack_from("<i", state, at)
    return state[:at] + struct.pack("<i", old + 1) + state[at + 4 :]


@dataclasses.dataclass
class Rig:
    """A daemon, the knobs of its provider, and what the replies must be."""

    daemon: RunningDaemon
    prepared: Prepared
    provider: Path
    mode_file: Path
    states: Path
    log: Path

    def set_mode(self, mode: str) -> None:
        """Choose how the provider behaves from its next start on."""
        self.mode_file.write_text(mode)

    def set_state(self, data: bytes) -> None:
        """Let the provider copy this for RHYME."""
        (self.states / f"{len(self.prepared.ids[RHYME]) - 1}.bin").write_bytes(data)

    def state_of(self, prompt: str) -> bytes:
        """Return the good state file of a prompt."""
        name = f"{len(self.prepared.ids[prompt]) - 1}.bin"
        return (self.prepared.states / name).read_bytes()

    def heal(self) -> None:
        """Let the provider be good again, and be called."""
        self.set_mode("ok")
        self.set_state(self.state_of(RHYME))
        self.daemon.reset_provider()

    def ask(self, prompt: str, *, stream: bool = False, policy: str | None = None) -> HttpReply:
        """Post a greedy completion."""
        headers = {} if policy is None else {"X-Onebit-Handoff": policy}
        return self.daemon.completion(prompt, stream=stream, max_tokens=MAX_TOKENS, headers=headers)

    def runs(self) -> list[dict[str, Any]]:
        """Return what each provider run logged at its start."""
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def by_reason(self, reason: str) -> int:
        """Return the counter of a reason."""
        return int(self.daemon.status()["handoffs"]["by_reason"].get(reason, 0))

    def wait_phase(self, phase: str) -> None:
        """Wait until the request that has the slot is in this phase."""
        wait_until(lambda: self.daemon.status()["slot"]["phase"] == phase, f"phase {phase}")

    def wait_run(self, after: int) -> int:
        """Wait for the provider run number `after` (counted from 0); return its pid."""
        return int(wait_until(lambda: self.runs()[after:], "a provider run")[0]["pid"])

    def wait_slot_free(self, timeout_s: float = 10.0) -> None:
        """Wait until no request has the slot or waits for it."""

        def free() -> bool:
            status = self.daemon.status()
            return not status["slot"]["busy"] and not status["queue"]["pending"]

        wait_until(free, "the slot is free", timeout_s)

    def wait_decoder(self) -> int:
        """Wait until the decoder is ready; return its pid."""
        wait_until(lambda: self.daemon.status()["backend"]["state"] == "ready", "decoder ready")
        return int(self.daemon.status()["backend"]["pid"])

    def assert_good(self, prompt: str = DAYS) -> None:
        """Everything works: the next handoff is used, and the reply is right."""
        self.heal()
        before = len(self.daemon.handoffs())
        reply = self.ask(prompt)
        assert (reply.status, reply.text) == (200, self.prepared.texts[prompt])
        record = self.daemon.last_handoff(before + 1)
        assert (record["outcome"], record.get("evaluated_tokens")) == ("used", 1), record

    def settled_files(self) -> list[str]:
        """Return the daemon's open files once the connections of past requests are closed."""
        seen: list[list[str]] = [[]]

        def settled() -> bool:
            seen.append(self.daemon.open_files())
            time.sleep(0.02)
            return len(seen) > 3 and seen[-1] == seen[-2] == seen[-3]

        wait_until(settled, "descriptors that stay", 10)
        return seen[-1]

    @contextlib.contextmanager
    def nothing_left(self, *, new_decoder: bool = False) -> Iterator[None]:
        """Check that what happens inside leaves no process, descriptor, file or busy slot.

        Args:
            new_decoder: the decoder is replaced inside; the daemon then has as many descriptors
                of each kind as before, else the very same.
        """

        def shown(files: list[str]) -> list[str]:
            return [re.sub(r"\d+", "N", name) for name in files] if new_decoder else files

        files, runs = shown(self.settled_files()), len(self.runs())
        yield
        self.wait_slot_free()
        self.wait_decoder()
        for run in self.runs()[runs:]:
            wait_until(partial(group_is_gone, run["pgid"]), "the provider's group", 10)
        wait_until(lambda: self.daemon.slot_files() == [], "the slot directory is empty", 10)
        with contextlib.suppress(AssertionError):
            wait_until(lambda: shown(self.daemon.open_files()) == files, "the descriptors", 10)
        after = shown(self.settled_files())
        more, fewer = Counter(after) - Counter(files), Counter(files) - Counter(after)
        assert after == files, f"descriptors left: {dict(more)}, lost: {dict(fewer)}"

    def assert_fell_back(
        self, record: dict[str, Any], reason: str, detail: str, counted_before: int
    ) -> None:
        """The record, the log line and the counter of a fallback agree."""
        assert (record["outcome"], record["reason"]) == ("fallback", reason), record
        assert detail in record["detail"], record
        assert self.by_reason(reason) == counted_before + 1
        assert self.daemon.status()["handoffs"]["by_reason"][reason] >= 1
        logged = [
            line
            for line in self.daemon.log_records("handoff")
            if line["request_id"] == record["request_id"]
        ]
        assert len(logged) == 1
        assert logged[0]["level"] == "warning"
        assert logged[0]["reason"] == reason
        assert f"fell back ({reason}: " in logged[0]["line"]


def group_is_gone(pgid: int) -> bool:
    """Say whether no live process of the group is left; zombies do not count."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                if stat[2] == str(pgid) and stat[0] != "Z":
                    return False
    return True


def provider_env(home: Path) -> dict[str, str]:
    """Return where the provider stand-in reads and writes in the `home` of a rig."""
    return {
        "FAKE_PREFILL_MODE": f"@{home / 'mode'}",
        "FAKE_PREFILL_COPY": str(home / "states"),
        "FAKE_PREFILL_LOG": str(home / "runs"),
    }


@contextlib.contextmanager
def running_rig(
    prepared: Prepared,
    build: LlamaBuild,
    model: LlamaModel,
    home: Path,
    *,
    config: str = "",
    program: Path | None = None,
    backend_args: Sequence[str] = BACKEND_ARGS,
    env: dict[str, str] | None = None,
    wait_ready: bool = True,
) -> Iterator[Rig]:
    """Run a daemon with the provider stand-in; `home` holds what the stand-in reads and writes.

    Args:
        config: more TOML; `[provider] timeout_s` is 3 unless it says otherwise.
        program: runs instead of the build's llama-server.
        backend_args: for it, beside the build's own.
        env: more variables.
        wait_ready: see running_onebitd.
    """
    states, provider = home / "states", home / "provider"
    states.mkdir()
    for file in prepared.states.iterdir():
        (states / file.name).write_bytes(file.read_bytes())
    # Without site-packages it starts in a quarter of the time.
    provider.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -I -S {STANDINS / "provider.py"} "$@"\n'
    )
    provider.chmod(0o755)
    if "[provider]" not in config:
        config += "\n[provider]\ntimeout_s = 3\n"
    with running_onebitd(
        model=model.path,
        llama_server=program or build.program,
        provider=provider,
        backend_args=[*backend_args, *build.extra_args],
        config=config,
        env={**provider_env(home), **(env or {})},
        wait_ready=wait_ready,
    ) as daemon:
        yield Rig(daemon, prepared, provider, home / "mode", states, home / "runs")


@contextlib.contextmanager
def stalled_client(rig: Rig) -> Iterator[tuple[socket.socket, bytes]]:
    """Yield a client that asked for a reply of megabytes and takes no more than its first bytes."""
    body = json.dumps({"content": "word " * 200_000, "with_pieces": True}).encode()
    head = (
        "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.settimeout(60)
        stalled.connect(("127.0.0.1", rig.daemon.port))
        stalled.sendall(head.encode() + body)
        first = stalled.recv(1024)
        assert first.startswith(b"HTTP/1.1 200 ")
        yield stalled, first


class RawClient:
    """A client on a plain socket, which leaves whenever it likes; a context manager."""

    def __init__(self, rig: Rig, body: dict[str, Any], headers: Sequence[str] = ()) -> None:
        self.socket = socket.create_connection(("127.0.0.1", rig.daemon.port), 60.0)
        self.received = b""
        self.post(body, headers)

    def post(self, body: dict[str, Any], headers: Sequence[str] = ()) -> None:
        """Send one completion request."""
        data = json.dumps({"temperature": 0, "seed": 1, "max_tokens": MAX_TOKENS, **body}).encode()
        head = ["POST /v1/completions HTTP/1.1", "Host: localhost", f"Content-Length: {len(data)}"]
        lines = [*head, "Content-Type: application/json", *headers, "", ""]
        self.socket.sendall("\r\n".join(lines).encode() + data)

    def wait_for(self, text: bytes) -> None:
        """Read until `text` has come."""
        while text not in self.received:
            data = self.socket.recv(65536)
            assert data, f"the connection ended before {text!r}: {self.received!r}"
            self.received += data

    def read_to_end(self) -> bytes:
        """Read until the other end closes or resets; return everything received."""
        with contextlib.suppress(ConnectionResetError):
            while data := self.socket.recv(65536):
                self.received += data
        return self.received

    def leave(self) -> None:
        """Close the connection."""
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def tiny_state_of(ids: Sequence[int]) -> bytes:
    """Return a whole, valid state file of another model for these ids."""
    return tiny_state.build(list(ids))


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process of this test's daemon, and wait for its end if it is SIGKILL."""
    os.kill(pid, number)
    if number == signal.SIGKILL:
        wait_until(lambda: not is_alive(pid), f"the end of {pid}")
