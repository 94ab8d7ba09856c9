"""The llama-server builds and models that tests run for real, and one way to run them.

`make test` installs them below `.venv/llama/` (tests/tools/fetch_llama.py):

    .venv/llama/llama-server-b      build "B": a prebuilt llama-server, state version 2
    .venv/llama/llama-server-x      build "X": xllamacpp in tests/tools/xllama_server.py, version 4
    .venv/llama/llama-server        for demo and benchmarks: B, or X where B cannot run
    .venv/llama/models/NAME.gguf    the models

A test that needs one calls `LlamaBuild.require()` / `LlamaModel.require()` or uses the fixtures of
tests/e2e/conftest.py: what is missing skips the test, and fails it under CI=true.
Standard library only: the fetcher uses this module before anything is installed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LLAMA_DIR = ROOT / ".venv" / "llama"
CPU_ONLY = ("--device", "none", "-ngl", "0")

# Prompts whose greedy continuation is decided by at least 2.3 in log-probability at each of its
# first 16 tokens, on every build and model. A prompt evaluated in one batch and the same prompt
# evaluated as N-1 tokens and one more differ in the last bits (more so with flash attention), and
# on ordinary prose a near-tie then flips the text: with these, another text is a wrong cache.
RHYME = (
    "Mary had a little lamb, its fleece was white as snow, and everywhere that Mary went, the lamb "
    "was sure to go. "
) * 5 + "Mary had a little lamb,"
DAYS = (
    "The days of the week, again and again: "
    + "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, " * 8
).rstrip()


class LlamaFailed(Exception):
    """A llama-server did not start, or died; the message ends with its last lines."""


def _give_up(reason: str) -> None:
    """Skip the calling test; under CI=true fail it."""
    import pytest

    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def _require(path: Path, what: str) -> None:
    """Skip (under CI fail) the calling test when `path` is missing."""
    if not path.exists():
        _give_up(f"{what} is not installed ({path.relative_to(ROOT)}): run make test")


def require_program(name: str) -> None:
    """Skip (under CI fail) the calling test when a program of the system is missing."""
    if shutil.which(name) is None:
        _give_up(f"{name} is not installed; .ci/run names the package that has it")


@dataclass(frozen=True)
class LlamaBuild:
    """A llama-server program. `state_version` is the one its state files carry."""

    name: str
    program: Path
    state_version: int
    extra_args: tuple[str, ...] = CPU_ONLY

    @property
    def provider_env(self) -> dict[str, str]:
        """The environment in which onebit-prefill-llama runs this build, with one thread."""
        return {
            "ONEBIT_PREFILL_LLAMA_SERVER": os.fspath(self.program),
            "ONEBIT_PREFILL_LLAMA_ARGS": " ".join((*self.extra_args, "-t", "1")),
        }

    def require(self) -> None:
        """Skip (under CI fail) the calling test unless this build is installed."""
        _require(self.program, f"llama-server build {self.name}")


@dataclass(frozen=True)
class LlamaModel:
    """A GGUF file. `swa`: it has a sliding window, so handoffs need --swa-full."""

    name: str
    path: Path
    swa: bool

    def require(self) -> None:
        """Skip (under CI fail) the calling test unless this model is installed."""
        _require(self.path, f"model {self.name}")


BUILDS = (
    LlamaBuild("B", LLAMA_DIR / "llama-server-b", 2),
    LlamaBuild("X", LLAMA_DIR / "llama-server-x", 4),
)
MODELS = (
    LlamaModel("smollm2", LLAMA_DIR / "models" / "smollm2.gguf", swa=False),
    LlamaModel("gemma3", LLAMA_DIR / "models" / "gemma3.gguf", swa=True),
)
DEMO_PROGRAM = LLAMA_DIR / "llama-server"


class UnixConnection(http.client.HTTPConnection):
    """An HTTP connection over a Unix socket; close() it, as any other."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Open the socket; OSError when nobody listens."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.settimeout(self.timeout)
            self.sock.connect(os.fspath(self._path))
        except BaseException:
            self.sock.close()
            raise


@dataclass(frozen=True)
class Reply:
    """Status and body of one answer."""

    status: int
    body: bytes

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)


@dataclass(frozen=True)
class LlamaClient:
    """A running llama-server: its process, socket and directories, and requests to it.

    One connection per request. Whoever made the process (`running_llama`) stops it.
    """

    process: subprocess.Popen[bytes]
    socket: Path
    slots_dir: Path
    log: Path

    def request(
        self, method: str, path: str, body: object = None, timeout_s: float = 120.0
    ) -> Reply:
        """Send one request (`body` as JSON) and return the whole reply; OSError when it is gone."""
        data = None if body is None else json.dumps(body).encode()
        connection = UnixConnection(self.socket, timeout_s)
        try:
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return Reply(response.status, response.read())
        finally:
            connection.close()

    def get(self, path: str) -> Reply:
        """GET `path`."""
        return self.request("GET", path)

    def post(self, path: str, body: object) -> Any:
        """POST `body` and return the decoded reply; AssertionError unless the status is 200."""
        reply = self.request("POST", path, body)
        assert reply.status == 200, f"{path}: {reply.status} {reply.body[:500]!r}"
        return reply.json

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of `text`, BOS included where the model has one."""
        body = {"content": text, "add_special": True, "parse_special": True}
        return list(self.post("/tokenize", body)["tokens"])

    def complete(self, prompt: str | list[int], n_predict: int = 16, **more: object) -> Any:
        """Run a greedy /completion on slot 0 and return the reply."""
        body = {"prompt": prompt, "n_predict": n_predict, "id_slot": 0, "cache_prompt": True}
        return self.post("/completion", body | {"temperature": 0, "seed": 1} | more)

    def slot_action(self, action: str, filename: str) -> Reply:
        """Save, restore or erase slot 0; `filename` is relative to `slots_dir`."""
        return self.request("POST", f"/slots/0?action={action}", {"filename": filename})

    def tail(self, lines: int = 8) -> str:
        """Return the last lines the server logged."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def wait_ready(self, timeout_s: float) -> None:
        """Return once /health says ok; LlamaFailed when it exits or `timeout_s` passes."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            status = self.process.poll()
            if status is not None:
                raise LlamaFailed(f"llama-server ended with status {status}:\n{self.tail()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.request("GET", "/health", timeout_s=5.0).status == 200:
                    return
            time.sleep(0.02)
        raise LlamaFailed(f"llama-server was not ready after {timeout_s:.0f} s:\n{self.tail()}")


@contextlib.contextmanager
def short_temporary_directory() -> Iterator[Path]:
    """Yield a new 0700 directory whose path leaves room for a socket's name; removed at the end.

    pytest's tmp_path easily passes the 107 bytes that a Unix socket's path may have.
    """
    path = Path(tempfile.mkdtemp(prefix="llama-", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def stop_process(process: subprocess.Popen[bytes], grace_s: float = 5.0) -> int:
    """Ask the process to stop, kill it after `grace_s`, and return its wait status."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


@contextlib.contextmanager
def running_program(
    program: Path, args: tuple[str, ...], env: Mapping[str, str] | None = None, load_s: float = 60.0
) -> Iterator[LlamaClient]:
    """Run a llama-server program on a private socket and yield its client once it is ready.

    `args` come before the socket and slot directory that are added here. The process is stopped
    and its directory removed at the end, whatever happens. Raises LlamaFailed.
    """
    with short_temporary_directory() as home:
        slots_dir = home / "slots"
        slots_dir.mkdir()
        sock, log = home / "l.sock", home / "log"
        command = [os.fspath(program), *args, "--host", os.fspath(sock)]
        command += ["--slot-save-path", os.fspath(slots_dir)]
        with log.open("wb") as log_file:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=log_file,
                    env=None if env is None else dict(env),
                )
            except OSError as error:
                raise LlamaFailed(f"{program}: {error.strerror}") from error
        try:
            client = LlamaClient(process, sock, slots_dir, log)
            client.wait_ready(load_s)
            yield client
        finally:
            stop_process(process)


@contextlib.contextmanager
def running_llama(build: LlamaBuild, model: LlamaModel, *extra: str) -> Iterator[LlamaClient]:
    """Run `build` on `model` as a handoff decoder is run; yields its client when it is ready.

    One slot, a context of 2048, one thread, no RAM cache, --swa-full for a sliding window;
    `extra` arguments come after these and win. Everything it made is gone at the end.
    """
    args = ["-m", os.fspath(model.path), "-c", "2048", "-np", "1", "-t", "1", "--cache-ram", "0"]
    args += ["--swa-full"] if model.swa else []
    with running_program(build.program, (*args, *build.extra_args, *extra)) as client:
        yield client
