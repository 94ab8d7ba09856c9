"""What onebitd adds on the real decoder: template and tokenize, a handoff's tax, plain decoding.

Everything is compared with requests to the daemon's own decoder, on its private socket, while the
daemon has nothing to do: the same process, the same memory, the same minute.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench import relay_provider
from tests.bench.measure import Streamed, median, stream
from tests.bench.relay_load import connect, is_whole, post
from tests.bench.relay_rows import Row, at_least, at_most, told
from tests.harness import RunningDaemon, running_onebitd
from tests.llama_builds import CPU_ONLY, DEMO_PROGRAM, MODELS, LlamaClient, UnixConnection

CHATS = "/v1/chat/completions"
DECODER = ("-c", "4096", "-t", "1", *CPU_ONLY)
TAX_GOALS_MS = {1000: 5.0, 3500: 12.0}
"""By prompt tokens."""


@dataclass(frozen=True)
class RealExtent:
    """How much is measured: prompt lengths in tokens, repeats, tokens of a plain reply."""

    lengths: Sequence[int] = (300, 1000, 3500)
    rounds: int = 5
    reply: int = 128


@dataclass(frozen=True)
class Chat:
    """A chat whose handoff is prepared: its body, and the ids that are handed over."""

    body: dict[str, Any]
    handed: list[int]


class Real:
    """The daemon on the real decoder, and the decoder itself.

    Args:
        daemon: nobody else asks it.
        shelf: of its provider.
        slots: its directory of state files.
    """

    def __init__(self, daemon: RunningDaemon, shelf: relay_provider.Shelf, slots: Path) -> None:
        self.daemon = daemon
        self.shelf = shelf
        self.slots = slots
        socket = daemon.runtime / "backend.sock"
        self.decoder = LlamaClient(daemon.process, socket, slots, daemon.log_path)

    def raw_ms(self, path: str, body: object) -> tuple[float, Any]:
        """Ask the decoder as cheaply as Python can; return the time taken, and the answer."""
        asked = post(path, body, "Connection: close").encode()
        began = time.monotonic()
        with connect(str(self.decoder.socket)) as sock:
            sock.sendall(asked)
            reply = b""
            while not is_whole(reply):
                data = sock.recv(1 << 18)
                assert data, f"the reply broke off: {reply[:200]!r}"
                reply += data
        took_ms = (time.monotonic() - began) * 1000
        return took_ms, json.loads(reply.partition(b"\r\n\r\n")[2])

    def template_ms(self, body: dict[str, Any]) -> tuple[float, list[int]]:
        """Template and tokenize a chat; return the time taken, and the ids."""
        template_ms, answer = self.raw_ms("/apply-template", body)
        asked = {"content": answer["prompt"], "add_special": True, "parse_special": True}
        tokenize_ms, answer = self.raw_ms("/tokenize", asked)
        return template_ms + tokenize_ms, answer["tokens"]

    def prepare(self, length: int) -> Chat:
        """Have the decoder make the state of a chat of about so many tokens, and keep it."""
        sentence = "The quick brown fox jumps over the lazy dog and runs into the green forest. "
        message = f"{length}: " + sentence * max(1, round((length - 40) / 16))
        body = {"messages": [{"role": "user", "content": message}], "max_tokens": 2}
        body |= {"temperature": 0, "stream": True}
        handed = self.template_ms(body)[1][:-1]
        self.decoder.slot_action("erase", "")
        asked = {"prompt": handed, "n_predict": 0, "id_slot": 0, "temperature": 0}
        assert self.decoder.request("POST", "/completion", asked, 600.0).status == 200
        assert self.decoder.slot_action("save", "bench").status == 200
        self.shelf.keep(handed, self.slots / "bench")
        return Chat(body, handed)

    def restored(self, chat: Chat) -> Streamed:
        """Restore the state and ask the decoder itself."""
        shutil.copyfile(self.shelf.kept(chat.handed), self.slots / "bench")
        self.decoder.slot_action("erase", "")
        assert self.decoder.slot_action("restore", "bench").status == 200
        (self.slots / "bench").unlink()
        return stream(UnixConnection(self.decoder.socket, 600.0), CHATS, chat.body)

    def handed_over(self, chat: Chat) -> tuple[Streamed, dict[str, Any]]:
        """Ask onebitd; return what came, and the handoff's record."""
        self.decoder.slot_action("erase", "")
        self.shelf.offer(chat.handed)
        before = len(self.daemon.handoffs())
        seen = stream(self.daemon.connect(600.0), CHATS, chat.body)
        record = self.daemon.last_handoff(before + 1)
        assert record["outcome"] == "used", record
        return seen, record


def real_rows(code: Path, extent: RealExtent) -> list[Row]:
    """Measure on the real decoder."""
    with ExitStack() as stack:
        home = Path(tempfile.mkdtemp(prefix="onebitd-bench-", dir="/dev/shm"))
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        shelf = relay_provider.Shelf(home)
        program, name = relay_provider.install(home)
        daemon = stack.enter_context(
            running_onebitd(
                model=MODELS[0].path,
                llama_server=DEMO_PROGRAM,
                provider=program,
                backend_args=DECODER,
                config=f'[handoff]\nstate_dir = "{home}"\n{shelf.settings()}',
                env={"PYTHONPATH": str(code)},
            )
        )
        real = Real(daemon, shelf, home / daemon.status()["instance"])
        rows: list[Row] = []
        for length in extent.lengths:
            rows += chat_rows(real, length, extent.rounds, name)
        return [*rows, decode_row(real, extent)]


def chat_rows(real: Real, length: int, rounds: int, provider: str) -> list[Row]:
    """Measure what comes before the decoder's own work, and the whole tax."""
    chat = real.prepare(length)
    pairs = []
    alone = []
    for _ in range(rounds):
        raw = real.template_ms(chat.body)[0]
        alone.append(real.restored(chat).first_byte_ms)
        pairs.append((raw, *real.handed_over(chat)))
    records = [record for _, _, record in pairs]
    raw_ms = median(raw for raw, _, _ in pairs)
    ids_ms = median(record["template_ms"] + record["tokenize_ms"] for record in records)
    own_ms = median(alone)
    taxes = [seen.first_byte_ms - record["restore_ms"] - own_ms for _, seen, record in pairs]
    parts = {
        name: median(record.get(f"{name}_ms", 0.0) for record in records)
        for name in ("queue", "lock", "provider_wall", "check", "restore")
    }
    count = records[0]["prompt_tokens"]
    told_parts = ", ".join(f"{name} {part:.1f}" for name, part in parts.items())
    note = f"{told_parts}; the decoder's own {own_ms:.1f} ms"
    what, tax_ms = f"handoff tax, {count} tokens, {provider}", median(taxes)
    goal = TAX_GOALS_MS.get(length)
    return [
        at_most(
            f"template + tokenize, {count} tokens / raw client's",
            ids_ms / raw_ms,
            1.5,
            "x",
            f"{ids_ms:.2f} ms, {raw_ms:.2f} ms",
        ),
        told(what, tax_ms, " ms", note)
        if goal is None
        else at_most(what, tax_ms, goal, " ms", note),
        told("  without what is left of the check", tax_ms - parts["check"], " ms"),
    ]


def decode_row(real: Real, extent: RealExtent) -> Row:
    """Measure a plain reply's tokens per second."""
    body = {"prompt": "Once upon a time", "max_tokens": extent.reply, "temperature": 0}
    body |= {"ignore_eos": True, "cache_prompt": False}
    ours, alone = [], []
    for _ in range(extent.rounds):
        alone.append(stream(UnixConnection(real.decoder.socket, 600.0), "/v1/completions", body))
        connection = real.daemon.connect(600.0)
        ours.append(stream(connection, "/v1/completions", body, {"X-Onebit-Handoff": "never"}))
    rate, rate_alone = (median(one.tokens_per_second for one in all_) for all_ in (ours, alone))
    note = f"{rate:.1f}/s, {rate_alone:.1f}/s"
    return at_least("plain decode, tokens a second / direct", rate / rate_alone, 0.98, "x", note)
