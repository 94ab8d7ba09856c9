"""The decoder that a provider is judged by: a llama-server of its own, run as onebitd runs it.

One slot, slot files in a private directory, no RAM cache, `--swa-full` for a sliding window. It
lives on a private Unix socket and dies with this process.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from onebitd import prefill_llama
from onebitd.core import backend_args, state_baseline, state_file
from onebitd.core.errors import OnebitError, StateFileError
from onebitd.core.state_data import Baseline
from onebitd.core.state_layout import Layout

EXAMPLE_NAME: Final = "example.state"
PROBE_TOKENS: Final = (1, 2, 3)
LOAD_TIMEOUT_S: Final = 600.0
REQUEST_TIMEOUT_S: Final = 600.0
N_PROBS: Final = 10
"""Of how many tokens the log-probability is asked for at each place of a reply."""


class DecoderFailed(OnebitError):
    """The decoder cannot be started or went away: nothing can be judged."""

    exit_status = 3


class DecoderDied(DecoderFailed):
    """It ended while it was asked something."""


class DecoderRefused(OnebitError):
    """It answered with an error status; the message is its own."""


@dataclass(frozen=True)
class DecoderSetup:
    """How the decoder is started.

    Attributes:
        program: llama-server, a path.
        args: more arguments for it, which come last.
        ctx_size: its context in tokens.
        sliding_window: the model has one.
    """

    program: str
    model: str
    args: tuple[str, ...]
    ctx_size: int
    sliding_window: bool


@dataclass(frozen=True)
class Token:
    """One generated token, and what the decoder thought there.

    Attributes:
        logprobs: natural logarithms by token id, of the most likely ones.
    """

    id: int
    text: str
    logprobs: Mapping[int, float]


@dataclass(frozen=True)
class Reply:
    """A greedy reply; `cached` and `evaluated` are the decoder's count of the prompt's tokens."""

    tokens: tuple[Token, ...]
    cached: int
    evaluated: int


class Decoder:
    """A running decoder. Made by `start`; whoever has it calls `close`.

    Every method raises DecoderDied when it is gone; `restart` gets another one then.
    """

    def __init__(self, setup: DecoderSetup, home: Path, signals: prefill_llama.StopSignals) -> None:
        self.slots = home / "slots"
        self.slots.mkdir(mode=0o700, exist_ok=True)
        self._setup = setup
        self._signals = signals
        self._socket_directory: str | None = None
        socket = str(home / "llama.sock")
        if len(os.fsencode(socket)) > prefill_llama.SUN_PATH_MAX_BYTES:
            try:
                self._socket_directory = prefill_llama.make_socket_directory(os.environ)
            except prefill_llama.PrefillError as error:
                raise DecoderFailed(str(error)) from error
            socket = os.path.join(self._socket_directory, "s.sock")
        self._socket = socket
        self._server: prefill_llama.Server | None = None
        self.build: str | None = None
        self.n_ctx = 0

    @property
    def example(self) -> str:
        """A state file of a few tokens that it saved itself."""
        return str(self.slots / EXAMPLE_NAME)

    def start(self) -> None:
        """Start it and return when it is ready; DecoderFailed says why not."""
        setup = self._setup
        command = backend_args.command_line(
            program=setup.program,
            model=setup.model,
            alias="conformance",
            ctx_size=setup.ctx_size,
            device=(),
            socket=self._socket,
            slot_dir=str(self.slots),
            sliding_window=setup.sliding_window,
            extra=setup.args,
        )
        paths = prefill_llama.Paths(str(self.slots), EXAMPLE_NAME, self._socket, None)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._socket)
        try:
            with self._signals.held():
                self._server = prefill_llama.Server(command, paths)
            prefill_llama.wait_ready(self._server, command, time.monotonic() + LOAD_TIMEOUT_S)
        except prefill_llama.PrefillError as error:
            raise DecoderFailed(f"the decoder cannot be started: {error}") from error
        props = self._ask("GET", "/props", None)
        build, settings = props.get("build_info"), props.get("default_generation_settings")
        self.build = build if isinstance(build, str) else None
        self.n_ctx = int(settings["n_ctx"]) if isinstance(settings, dict) else setup.ctx_size

    def restart(self) -> None:
        """Start it again, after it died or to be rid of what it holds."""
        self._kill()
        self.start()

    def _kill(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server = None

    def close(self) -> None:
        """End it and remove its socket; the files in `slots` are the caller's."""
        self._kill()
        with contextlib.suppress(OSError):
            os.unlink(self._socket)
        if self._socket_directory is not None:
            with contextlib.suppress(OSError):
                os.rmdir(self._socket_directory)

    def learn_layout(self) -> tuple[Layout, Baseline]:
        """Return what its state files are like, and leave one of them at `example`."""
        try:
            self.prefill(PROBE_TOKENS)
            self.save(EXAMPLE_NAME)
            saved = Path(self.example).read_bytes()
            layout = state_file.learn_layout(saved, PROBE_TOKENS)
            return layout, state_baseline.learn_baseline(saved, state_file.parse(saved, layout))
        except DecoderRefused as error:
            raise DecoderFailed(f"the decoder cannot save its slot: {error}") from error
        except StateFileError as error:
            raise DecoderFailed(
                f"the decoder's own state file cannot be read: {error}; no provider can be judged"
            ) from error

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text as onebitd asks for them, BOS included where there is one."""
        body = {"content": text, "add_special": True, "parse_special": True}
        return [int(token) for token in self._ask("POST", "/tokenize", body).get("tokens", [])]

    def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str | None:
        """Return what the model's chat template makes of messages, None if it refuses."""
        try:
            found = self._ask("POST", "/apply-template", {"messages": list(messages)})
        except DecoderRefused:
            return None
        text = found.get("prompt")
        return text if isinstance(text, str) else None

    def prefill(self, ids: Sequence[int]) -> float:
        """Empty the slot, evaluate the ids and return the milliseconds that took."""
        self.erase()
        body = prefill_llama.prompt_body(ids)
        return float(self._ask("POST", "/completion", body)["timings"]["prompt_ms"])

    def save(self, name: str) -> Path:
        """Save the slot (mode 0600) and return the path."""
        self._ask("POST", "/slots/0?action=save", {"filename": name})
        return self.slots / name

    def restore(self, name: str) -> tuple[int, int]:
        """Restore the slot from a file in `slots`; return the tokens and bytes it speaks of."""
        found = self._ask("POST", "/slots/0?action=restore", {"filename": name})
        return int(found.get("n_restored", -1)), int(found.get("n_read", -1))

    def erase(self) -> None:
        """Empty the slot."""
        self._ask("POST", "/slots/0?action=erase", None)

    def reply(self, ids: Sequence[int], n_predict: int) -> Reply:
        """Go on greedily from the slot as it is."""
        body = {"prompt": list(ids), "n_predict": n_predict, "id_slot": 0, "cache_prompt": True}
        body |= {"temperature": 0, "seed": 1, "n_probs": N_PROBS, "return_tokens": True}
        found = self._ask("POST", "/completion", body)
        tokens = tuple(
            Token(
                int(one["id"]),
                str(one["token"]),
                {int(top["id"]): float(top["logprob"]) for top in one["top_logprobs"]},
            )
            for one in found.get("completion_probabilities", [])
        )
        timings = found["timings"]
        return Reply(tokens, int(timings["cache_n"]), int(timings["prompt_n"]))

    def _ask(self, method: str, path: str, body: object) -> dict[str, Any]:
        """Send one request; DecoderRefused, or DecoderDied with its last words."""
        server = self._server
        if server is None:
            raise DecoderDied("the decoder does not run")
        try:
            status, answer = server.request(method, path, body, REQUEST_TIMEOUT_S)
        except TimeoutError as error:
            raise DecoderFailed(
                f"the decoder did not answer {path} within {REQUEST_TIMEOUT_S:g} s"
            ) from error
        except OSError as error:
            server.wait_exit(1.0)
            raise DecoderDied(
                f"the decoder died (status {server.exit_status()}): {server.last_words()}"
            ) from error
        if status != 200:
            found = answer.get("error")
            message = found.get("message") if isinstance(found, dict) else answer
            raise DecoderRefused(f"status {status}: {message}")
        return answer
