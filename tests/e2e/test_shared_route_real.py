"""The shared route with a real model: its reply is the file route's and the decoder's own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.rig import DAYS, RHYME
from tests.harness import HttpReply, RunningDaemon, running_onebitd
from tests.llama_builds import (
    BUILDS,
    MODELS,
    LlamaBuild,
    LlamaModel,
    running_llama,
    short_temporary_directory,
)
from tests.standins.share_front import launcher

pytestmark = pytest.mark.real

SMOLLM2, GEMMA3 = MODELS
CHAT = [
    {"role": "system", "content": "You repeat the text of the user, word by word, nothing else."},
    {"role": "user", "content": DAYS},
    {"role": "assistant", "content": DAYS},
    {"role": "user", "content": DAYS},
]
GREEDY = {"temperature": 0, "seed": 1, "max_tokens": 12}
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REQUESTS = {CHATS: {"messages": CHAT, **GREEDY}, COMPLETIONS: {"prompt": RHYME, **GREEDY}}
ASKED = {
    "B": [(COMPLETIONS, False), (CHATS, True)],
    "X": [(CHATS, False), (COMPLETIONS, True)],
}
IN_CLOSE_WRITE, IN_MOVED_TO, IN_CREATE, IN_IGNORED, IN_ISDIR = 0x8, 0x80, 0x100, 0x8000, 0x40000000
_EVENT = struct.Struct("iIII")


class Watch:
    """What appears below a directory, in directories that appear too: inotify(7), in a thread."""

    def __init__(self, path: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._fd >= 0, os.strerror(ctypes.get_errno())
        self._paths: dict[int, Path] = {}
        self._names: set[str] = set()
        self._add(path)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            if select.select([self._fd], [], [], 0.05)[0]:
                self._take(os.read(self._fd, 1 << 16))

    def _add(self, path: Path) -> None:
        mask = IN_CREATE | IN_MOVED_TO | IN_CLOSE_WRITE
        number = self._libc.inotify_add_watch(self._fd, os.fsencode(path), mask)
        if number >= 0:  # it may be gone again
            self._paths[number] = path
            with contextlib.suppress(FileNotFoundError):
                self._names |= {entry.name for entry in path.iterdir()}

    def names(self) -> set[str]:
        """Return the names of the files and directories so far, without the numbers in them.

        The decoder's example is left out: it is no prompt's.
        """
        names = set(self._names) - {"example.state"}
        return {re.sub(r"-[0-9a-f]{16}$", "-", name) for name in names}

    def _take(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            number, mask, _, length = _EVENT.unpack_from(data, at)
            at += _EVENT.size + length
            name = data[at - length : at].rstrip(b"\0").decode()
            if mask & IN_IGNORED:  # that directory is gone
                continue
            self._names.add(name)
            if mask & IN_ISDIR and number in self._paths:
                self._add(self._paths[number] / name)

    def close(self) -> None:
        """Let go of it."""
        self._ended.set()
        self._thread.join()
        os.close(self._fd)


@dataclass
class Sharing:
    """A daemon whose decoder shares, and the knobs of that."""

    daemon: RunningDaemon
    knobs: Path

    def ask(self, path: str, *, stream: bool = False) -> tuple[HttpReply, dict[str, Any]]:
        """Post one of the requests; return the reply and its record."""
        before = len(self.daemon.handoffs())
        reply = self.daemon.request("POST", path, {**REQUESTS[path], "stream": stream})
        assert reply.status == 200
        return reply, self.daemon.last_handoff(before + 1)


@contextlib.contextmanager
def sharing(build: LlamaBuild, model: LlamaModel, provider: Path) -> Iterator[Sharing]:
    """Run onebitd on a real llama-server behind the front, with the reference provider."""
    with short_temporary_directory() as home:
        knobs = home / "knobs"
        with running_onebitd(
            model=model.path,
            llama_server=launcher(home, build.program, knobs=knobs),
            provider=provider,
            backend_args=["-c", "2048", "-t", "1", *build.extra_args],
            env={"ONEBIT_KV_SHARE": "1", **build.provider_env},
        ) as daemon:
            yield Sharing(daemon, knobs)


def plain_texts(build: LlamaBuild, model: LlamaModel, *paths: str) -> dict[str, str]:
    """Have the decoder alone answer requests, each from an empty slot."""
    texts = {}
    with running_llama(build, model) as direct:
        for path in paths:
            direct.slot_action("erase", "")
            reply = direct.request("POST", path, REQUESTS[path])
            texts[path] = HttpReply(reply.status, {}, reply.body).text
    return texts


@pytest.fixture(scope="module", params=BUILDS, ids=lambda build: f"build-{build.name}")
def build(request: pytest.FixtureRequest) -> LlamaBuild:
    """Each build in turn."""
    found: LlamaBuild = request.param
    found.require()
    return found


def assert_shared(reply: HttpReply, record: dict[str, Any], text: str) -> None:
    """The same text, from one evaluated token, through the memory."""
    assert reply.text == text
    assert (record["outcome"], record["route"]) == ("used", "shared"), record
    assert record["evaluated_tokens"] == 1
    assert record["cached_tokens"] == record["handed_tokens"] == record["prompt_tokens"] - 1
    assert reply.headers["x-onebit-handoff"] == "shared"


def test_shared_route_real_model_replies_as_the_file_route_and_no_state_file_appears(
    build: LlamaBuild, reference_provider: Path
) -> None:
    """Chat and completion, whole and streamed: one token evaluated, ids and layout the only files.

    The prompt before is another one each time, so nothing is found in the slot.
    """
    SMOLLM2.require()
    plain = plain_texts(build, SMOLLM2, CHATS, COMPLETIONS)
    assert all(text.strip() for text in plain.values())
    with sharing(build, SMOLLM2, reference_provider) as rig:
        watch = Watch(rig.daemon.runtime / "slots")
        try:
            for path, stream in ASKED[build.name]:
                assert_shared(*rig.ask(path, stream=stream), plain[path])
            assert watch.names() == {"run-", "tokens.txt", "layout.json"}
            rig.knobs.write_text("--share-refuse mismatch")
            path = ASKED[build.name][0][0]
            reply, record = rig.ask(path)
            assert reply.text == plain[path]
            assert (record["outcome"], record["route"]) == ("used", "file"), record
            assert watch.names() > {"state.bin", "state-"}
        finally:
            watch.close()
        assert rig.daemon.slot_files() == []


def test_shared_route_sliding_window_short_prompt_replies_as_plain(
    some_build: LlamaBuild, reference_provider: Path
) -> None:
    """A model with a sliding window, whose prompt fits into it."""
    GEMMA3.require()
    plain = plain_texts(some_build, GEMMA3, COMPLETIONS)
    with sharing(some_build, GEMMA3, reference_provider) as rig:
        assert_shared(*rig.ask(COMPLETIONS), plain[COMPLETIONS])
