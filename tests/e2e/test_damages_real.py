"""Every damage that a real llama-server was seen to suffer from, refused before it is restored.

A real daemon and decoder for each kind of memory; the provider is tests/standins/damage.py, which
spoils a state that such a decoder saved. The kernel itself tells whether the decoder was given a
file: nothing comes into the slot directory that it could open.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.rig import RHYME
from tests.harness import HttpReply, RunningDaemon, running_onebitd, wait_until
from tests.llama_builds import BUILDS, MODELS, ROOT, LlamaBuild, LlamaModel, running_llama
from tests.standins.damage import DAMAGES, NOISE, OF_VERSION, PLACES, Damage, Place
from tests.tiny_models import TINY_MODELS, write

N = 59
"""Ids that are handed over; the last of 60 is the decoder's."""
MAX_TOKENS = 4
OPEN, MOVED_TO, CREATE = 0x20, 0x80, 0x100  # inotify(7)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder with one kind of memory.

    Attributes:
        kind: what damages call it.
        sections: of its state files.
        swa_full: what the daemon adds by itself.
    """

    kind: str
    model: str
    args: tuple[str, ...]
    sections: str
    swa_full: tuple[str, ...] = ()


FA_ON, FA_OFF = ("-fa", "on"), ("-fa", "off")
DECODERS = {
    decoder.kind: decoder
    for decoder in (
        Decoder("plain", "smollm2", FA_ON, "kv"),
        Decoder("q8_0", "smollm2", (*FA_ON, "-ctk", "q8_0", "-ctv", "q8_0"), "kv"),
        Decoder("transposed", "qwen2vl", FA_OFF, "kv"),
        Decoder("sliding", "lfm2-swa", FA_ON, "kv kv recr", ("--swa-full",)),
        Decoder("recurrent", "mamba", (), "recr"),
        Decoder("hybrid", "lfm2", FA_ON, "kv recr"),
    )
}
BUILD_B, BUILD_X = BUILDS
PAIRS = [
    (build, DECODERS[kind])
    for build, kind in (
        (BUILD_B, "plain"),
        (BUILD_X, "plain"),
        (BUILD_X, "q8_0"),  # X alone rotates, and records it
        (BUILD_B, "transposed"),
        (BUILD_X, "transposed"),
        (BUILD_B, "sliding"),
        (BUILD_B, "recurrent"),
        (BUILD_X, "hybrid"),  # X appends context checkpoints
    )
]


class Watch:
    """What the kernel saw in a directory: files opened, made, or moved in. Close it.

    Args:
        path: the slot directory. A provider's run has a directory of its own in it, which no
            name that llama-server takes can reach; that and the daemon's example are left out.
    """

    def __init__(self, path: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        mask = OPEN | MOVED_TO | CREATE
        if self._fd < 0 or libc.inotify_add_watch(self._fd, os.fsencode(path), mask) < 0:
            raise OSError(ctypes.get_errno(), f"cannot watch {path}")

    def take(self) -> list[tuple[str, int]]:
        """Return name and event of each, since the last call."""
        found = []
        try:
            data = os.read(self._fd, 1 << 20)
        except BlockingIOError:
            return []
        while data:
            _, mask, _, length = struct.unpack_from("iIII", data)
            name = data[16 : 16 + length].rstrip(b"\0").decode()
            data = data[16 + length :]
            if name and not name.startswith("run-") and not name.startswith("example."):
                found.append((name, mask))
        return found

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._fd)


@dataclasses.dataclass(frozen=True)
class Spoiled:
    """A daemon whose provider damages what it is told to, and what the replies must be.

    Attributes:
        expected: the decoder's own reply, cold, without a daemon.
        name: the file that says which damage.
    """

    daemon: RunningDaemon
    watch: Watch
    name: Path
    ids: list[int]
    expected: str
    pid: int
    files: list[str]

    def ask(self, damage: str, max_tokens: int = MAX_TOKENS) -> tuple[str, dict[str, Any]]:
        """Return the reply's text and the handoff's record, with this damage done."""
        self.watch.take()
        self.name.write_text(damage)
        reply = self.daemon.completion(self.ids, max_tokens=max_tokens, ignore_eos=True)
        assert reply.status == 200, reply
        return reply.text, wait_until(lambda: self._record(reply), "the handoff's record")

    def _record(self, reply: HttpReply) -> dict[str, Any] | None:
        found: list[dict[str, Any]] = self.daemon.control("/v1/handoffs?limit=1")["handoffs"]
        same = found and found[-1]["request_id"] == reply.headers["x-request-id"]
        return found[-1] if same else None

    def assert_refused(self, damage: str, reason: str, words: str) -> None:
        """The damage costs the handoff and nothing else, and the next handoff is used."""
        text, record = self.ask(damage)
        assert self.watch.take() == [], "the decoder could have been given the file"
        assert (record["outcome"], record["reason"]) == ("fallback", reason), record
        assert words in record["detail"]
        assert text == self.expected
        wait_until(lambda: self.daemon.slot_files() == self.files, "no file is left", 10)
        self.assert_healthy()

    def assert_healthy(self) -> None:
        """The same decoder is restored a good file and goes on from it."""
        text, record = self.ask("", 1)
        assert (record["outcome"], record.get("evaluated_tokens")) == ("used", 1), record
        assert self.expected.startswith(text)
        events = {mask for _, mask in self.watch.take()}
        assert {OPEN, MOVED_TO} <= events, "the watch does not see a restore"
        backend = self.daemon.status()["backend"]
        assert (backend["pid"], backend["restarts"]) == (self.pid, 0)


def good_state(
    build: LlamaBuild, model: LlamaModel, decoder: Decoder, path: Path
) -> tuple[list[int], str]:
    """Have a decoder alone save a good state to `path`; return the prompt and its cold reply."""
    with running_llama(build, model, *decoder.args, *decoder.swa_full) as client:
        rng = random.Random(N)  # noqa: S311 - a prompt is no secret
        ids = [rng.randrange(10, 96) for _ in range(N + 1)]
        if decoder.model == "smollm2":
            ids = client.tokenize(RHYME)
            assert len(ids) == N + 1
        body = {"prompt": ids, "max_tokens": MAX_TOKENS, "temperature": 0, "seed": 1}
        reply = client.post("/v1/completions", {**body, "ignore_eos": True})
        client.slot_action("erase", "")
        client.complete(ids[:-1], 0)
        assert client.slot_action("save", "good").status == 200
        path.write_bytes((client.slots_dir / "good").read_bytes())
    return ids, str(reply["choices"][0]["text"])


@contextlib.contextmanager
def running_spoiled(
    build: LlamaBuild, model: LlamaModel, decoder: Decoder, home: Path
) -> Iterator[Spoiled]:
    """Run a daemon with the provider that damages what it is told to, in an empty directory."""
    build.require()
    model.require()
    ids, expected = good_state(build, model, decoder, home / "good")
    # Imported, not run, so that Python keeps it compiled; nothing at all where it would only copy.
    provider = home / "provider"
    run = f"import sys; sys.path[:0] = ['{ROOT}']; from tests.standins import damage; damage.main()"
    provider.write_text(
        '#!/bin/sh\n[ -s "$DAMAGE_NAME" ] || exec cp "$DAMAGE_STATE" "$4"\n'
        f'exec "{sys.executable}" -I -S -c "{run}" "$@"\n'
    )
    provider.chmod(0o755)
    ext_bytes = {2: 8, 3: 12, 4: 12}[build.state_version] if decoder.kind == "transposed" else 0
    with running_onebitd(
        model=model.path,
        llama_server=build.program,
        provider=provider,
        backend_args=["-c", "2048", "-t", "1", *build.extra_args, *decoder.args],
        env={
            "DAMAGE_STATE": str(home / "good"),
            "DAMAGE_MEMORY": decoder.sections,
            "DAMAGE_EXT": str(ext_bytes),
            "DAMAGE_NAME": str(home / "name"),
        },
    ) as daemon:
        watch = Watch(daemon.runtime / "slots")
        pid, files = daemon.status()["backend"]["pid"], daemon.slot_files()
        try:
            found = Spoiled(daemon, watch, home / "name", ids, expected, pid, files)
            found.assert_healthy()
            yield found
        finally:
            watch.close()


class Running:
    """One daemon at a time: it stays until another decoder is asked for. A context manager."""

    def __init__(self, models: dict[str, LlamaModel], home: Path) -> None:
        self._models = models
        self._home = home
        self._stack = contextlib.ExitStack()
        self._now: tuple[LlamaBuild, Decoder, Spoiled] | None = None

    def get(self, build: LlamaBuild, decoder: Decoder) -> Spoiled:
        """Return the daemon of this decoder."""
        if self._now is None or self._now[:2] != (build, decoder):
            self.close()
            home = self._home / f"{build.name}-{decoder.kind}"
            home.mkdir(exist_ok=True)
            running = running_spoiled(build, self._models[decoder.model], decoder, home)
            self._now = (build, decoder, self._stack.enter_context(running))
        return self._now[2]

    def close(self) -> None:
        """Stop the daemon, and see that it leaves nothing."""
        self._now = None
        self._stack.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The daemon of the tests of this file; they come decoder by decoder."""
    folder = tmp_path_factory.mktemp("tiny-models")
    tiny = [write(model, folder) for model in TINY_MODELS]
    models = {model.name: model for model in (*MODELS, *tiny)}
    with contextlib.closing(Running(models, tmp_path_factory.mktemp("spoiled"))) as found:
        yield found


def cases(build: LlamaBuild, decoder: Decoder) -> list[Damage | Place]:
    """Return what this decoder's files are spoiled with."""
    again = (build, decoder.kind) == (BUILD_X, "plain")
    places = PLACES if (build, decoder.kind) == (BUILD_B, "plain") else []
    return [
        *(
            damage
            for damage in (OF_VERSION if again else DAMAGES)
            if decoder.kind in damage.memory and build.state_version >= damage.least_version
        ),
        *places,
    ]


@pytest.mark.parametrize(
    ("build", "decoder", "damage"),
    [
        pytest.param(build, decoder, damage, id=f"{build.name}-{decoder.kind}-{damage.name}")
        for build, decoder in PAIRS
        for damage in cases(build, decoder)
    ],
)
def test_damaged_state_is_refused_before_the_restore_and_costs_only_the_handoff(
    running: Running, build: LlamaBuild, decoder: Decoder, damage: Damage | Place
) -> None:
    """The record says what is wrong, the reply is the decoder's own, and the decoder lives."""
    spoiled = running.get(build, decoder)
    if damage.name == "unreadable" and os.geteuid() == 0:
        text, record = spoiled.ask(damage.name)  # nothing is, to root
        assert (record["outcome"], text) == ("used", spoiled.expected)
        return
    spoiled.assert_refused(damage.name, damage.reason, damage.words.format(n=N))


def test_noise_in_the_right_shape_is_restored_and_only_an_audit_finds_it(running: Running) -> None:
    """No check of the file can tell wrong values from right ones; the next handoff is right."""
    spoiled = running.get(*PAIRS[-1])
    text, record = spoiled.ask(NOISE.name)
    assert (record["outcome"], record["evaluated_tokens"]) == ("used", 1), record
    assert text != spoiled.expected
    spoiled.assert_healthy()
    text, _ = spoiled.ask("")
    assert text == spoiled.expected
