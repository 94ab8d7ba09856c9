"""Runs a whole onebitd for a test, and proves afterwards that it left nothing behind."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.llama_builds import ROOT, UnixConnection, short_temporary_directory

STANDINS = ROOT / "tests" / "standins"


def wait_until(
    condition: Callable[[], Any], what: str, timeout_s: float = 30.0, every_s: float = 0.01
) -> Any:
    """Return the first true value of `condition`; AssertionError when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"timed out waiting: {what}"
        time.sleep(every_s)


@dataclass(frozen=True)
class HttpReply:
    """A whole reply; header names in lower case, the last of equal ones wins."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The JSON of each SSE event but `[DONE]`."""
        lines = [line[5:].strip() for line in self.body.split(b"\n") if line.startswith(b"data:")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]

    @property
    def text(self) -> str:
        """The text of a chat or completion reply, streamed or not."""
        streamed = self.headers.get("content-type", "").startswith("text/event-stream")
        documents = self.events if streamed else [self.json]
        words = []
        for document in documents:
            for choice in document.get("choices", []):
                message = choice.get("delta") or choice.get("message") or choice
                words.append(message.get("content") or message.get("text") or "")
        return "".join(words)


@dataclass
class RunningDaemon:
    """A running onebitd: requests to it, its control socket, its log, its children."""

    process: subprocess.Popen[bytes]
    runtime: Path
    log_path: Path
    port: int = 0
    killed: bool = field(default=False)

    def connect(self, timeout_s: float = 120.0) -> http.client.HTTPConnection:
        """Return a connection to the public listener; the caller closes it."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 120.0,
    ) -> HttpReply:
        """Send one request (`body` as JSON unless it is bytes) and return the whole reply."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection = self.connect(timeout_s)
        try:
            connection.request(
                method, path, data, {"Content-Type": "application/json", **(headers or {})}
            )
            return _read(connection)
        finally:
            connection.close()

    def chat(
        self, content: str, *, headers: Mapping[str, str] | None = None, **more: Any
    ) -> HttpReply:
        """Post a greedy chat of one user message."""
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "seed": 1}
        return self.request(
            "POST", "/v1/chat/completions", {"max_tokens": 8, **body, **more}, headers
        )

    def completion(
        self, prompt: object, *, headers: Mapping[str, str] | None = None, **more: Any
    ) -> HttpReply:
        """Post a greedy completion."""
        body = {"prompt": prompt, "temperature": 0, "seed": 1, "max_tokens": 8, **more}
        return self.request("POST", "/v1/completions", body, headers)

    def control(self, path: str, method: str = "GET") -> Any:
        """GET a path of the control socket; AssertionError unless 200."""
        connection = UnixConnection(self.runtime / "control.sock", 10.0)
        try:
            connection.request(method, path)
            reply = _read(connection)
        finally:
            connection.close()
        assert reply.status == 200, reply
        return reply.json

    def status(self) -> Any:
        """Return /v1/status."""
        return self.control("/v1/status")

    def reset_provider(self) -> None:
        """Have the provider called again, whatever it has done in earlier tests."""
        self.control("/v1/provider/reset", "POST")

    def handoffs(self) -> list[dict[str, Any]]:
        """Return the records so far, oldest first."""
        return list(self.control("/v1/handoffs?limit=1000")["handoffs"])

    def last_handoff(self, count: int = 1) -> dict[str, Any]:
        """Wait until `count` records are there, and return the last."""
        found: list[dict[str, Any]] = wait_until(
            lambda: (all_ := self.handoffs()) if len(self.handoffs()) >= count else None,
            f"{count} handoff records",
        )
        return found[-1]

    def log_records(self, event: str | None = None) -> list[dict[str, Any]]:
        """Return the JSON log records, or those with this event name."""
        records = []
        for line in self.log_path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if event is None or record.get("event") == event:
                    records.append(record)
        return records

    def children(self) -> list[int]:
        """Return the pids of every live process that descends from the daemon."""
        return descendants(self.process.pid)

    def slot_files(self) -> list[str]:
        """Return the names in the slot directory, but for the decoder's example, which stays."""
        names = [path.name for path in (self.runtime / "slots").iterdir()]
        return sorted(name for name in names if name != "example.state")

    def open_files(self) -> list[str]:
        """Return what the daemon's descriptors point at, sorted.

        What it learned is written now and then: such a write is let come to its end. The history on
        disk is opened when it has time, and read in between: it is left out.
        """
        deadline = time.monotonic() + 5
        while True:
            found = []
            for entry in Path(f"/proc/{self.process.pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    found.append(str(entry.readlink()))
            writes = any(name.endswith("/costs.json.new") for name in found)
            if not writes or time.monotonic() > deadline:
                return sorted(name for name in found if "/history.db" not in name)
            time.sleep(0.01)

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL the daemon, as nothing can be prepared for."""
        self.killed = True
        self.process.kill()
        self.process.wait()

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until the decoder can be used."""

        def ready() -> bool:
            assert self.process.poll() is None, f"onebitd ended:\n{self.log_path.read_text()}"
            with contextlib.suppress(OSError, http.client.HTTPException, AssertionError):
                status = self.status()
                self.port = int(status["listen"][0].rpartition(":")[2])
                return bool(status["state"] == "ready")
            return False

        # It takes a second, and a daemon that is asked all the time takes longer.
        wait_until(ready, "onebitd ready", timeout_s, every_s=0.04)


def _read(connection: http.client.HTTPConnection) -> HttpReply:
    response = connection.getresponse()
    headers = {name.lower(): value for name, value in response.getheaders()}
    return HttpReply(response.status, headers, response.read())


def descendants(pid: int) -> list[int]:
    """Return the live descendants of a process, zombies left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            stat = (entry / "stat").read_text()
            state, parent = stat.rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.name))
    found, left = [], [pid]
    while left:
        for child in children.get(left.pop(), []):
            found.append(child)
            left.append(child)
    return found


def is_alive(pid: int) -> bool:
    """Say whether a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def onebitd_argv(*args: str) -> list[str]:
    """Return the command line of the onebitd of this checkout."""
    return [sys.executable, "-m", "onebitd", *args]


def clean_environ(runtime: Path, **more: str) -> dict[str, str]:
    """Return an environment in which only this test's settings count."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ONEBIT", "LLAMA_", "XDG_", "NPU_", "NOTIFY", "LISTEN_"))
    }
    return kept | {
        "PYTHONPATH": str(ROOT),
        "RUNTIME_DIRECTORY": str(runtime),
        "STATE_DIRECTORY": str(runtime.with_name("state")),
        "XDG_CONFIG_HOME": str(runtime / "config"),
        **more,
    }


def handing_off(config: str) -> str:
    """Return a TOML configuration in which every prompt is handed off, unless it has a policy.

    The default policy weighs both ways, and a provider on the decoder's own cores loses.
    """
    if re.search(r"(?m)^policy\b", config):
        return config
    if "[handoff]\n" in config:
        return config.replace("[handoff]\n", '[handoff]\npolicy = "always"\n', 1)
    return f'{config}\n[handoff]\npolicy = "always"\n'


_SOCKET_LAUNCHER = """
import os, sys
count = int(sys.argv[1])
for index, fd in enumerate(map(int, sys.argv[2 : 2 + count])):
    os.dup2(fd, 3 + index)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.argv[2 + count], sys.argv[2 + count :])
"""


@contextlib.contextmanager
def with_sockets(
    argv: Sequence[str], passed: Mapping[str, socket.socket]
) -> Iterator[tuple[list[str], dict[str, str], list[int]]]:
    """Yield a command line that runs `argv` with sockets from descriptor 3 on, as systemd does.

    Beside it what goes into its environment, and the descriptors that it must inherit.
    """
    with contextlib.ExitStack() as stack:
        high = []
        for sock in passed.values():
            high.append(fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD, 100))
            stack.callback(os.close, high[-1])
        if not high:
            yield list(argv), {}, []
            return
        env = {"LISTEN_FDS": str(len(high)), "LISTEN_FDNAMES": ":".join(passed)}
        words = [sys.executable, "-c", _SOCKET_LAUNCHER, str(len(high)), *map(str, high)]
        yield [*words, *argv], env, high


@contextlib.contextmanager
def running_onebitd(
    *args: str,
    model: Path,
    llama_server: Path,
    provider: Path | None = None,
    backend_args: Sequence[str] = (),
    config: str = "",
    env: Mapping[str, str] | None = None,
    wait_ready: bool = True,
    log_level: str = "info",
    passed: Mapping[str, socket.socket] | None = None,
) -> Iterator[RunningDaemon]:
    """Run onebitd on a free port with a lock file of its own, and check what it leaves.

    Args:
        args: more flags.
        config: more TOML; it must not hold [log] or [lock] path. `handoff.policy` is `always`
            unless it says otherwise.
        wait_ready: wait until the decoder answers.
        log_level: of its JSON log.
        passed: listening sockets by FileDescriptorName=, as systemd would pass them; they stay
            the caller's.

    At the end it is stopped with SIGTERM (unless it has ended, or the test killed it), and none
    of its processes, state files or sockets may be left.
    """
    with short_temporary_directory() as home:
        runtime = home / "rt"
        config_path = home / "test.toml"
        config_path.write_text(
            f'[log]\nformat = "json"\nlevel = "{log_level}"\n[model]\npath = "{model}"\n'
            + handing_off(config)
        )
        if "[lock]" not in config:
            with config_path.open("a") as file:
                file.write(f'\n[lock]\npath = "{home / "npu.lock"}"\nwait_s = 5\n')
        argv = onebitd_argv("--config", str(config_path), "--port", "0")
        argv += ["--llama-server", str(llama_server), *args]
        if provider is not None:
            argv += ["--prefill-provider", str(provider)]
        argv += ["--", *backend_args]
        log_path = home / "log"
        with log_path.open("wb") as log_file, with_sockets(argv, passed or {}) as start:
            process = subprocess.Popen(
                start[0],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                env=clean_environ(runtime, **(env or {}), **start[1]),
                cwd="/",
                pass_fds=start[2],
            )
        daemon = RunningDaemon(process, runtime, log_path)
        seen: list[int] = []
        try:
            if wait_ready:
                daemon.wait_ready()
            yield daemon
            seen = daemon.children() if process.poll() is None else []
        except BaseException:
            print(log_path.read_text(errors="replace")[-8000:])
            raise
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        wait_until(lambda: not any(map(is_alive, seen)), "the daemon's processes are gone", 10)
        if not daemon.killed:
            left = [path.name for path in runtime.rglob("*") if path.name != "onebitd.lock"]
            assert [name for name in left if name != "slots"] == [], left


@contextlib.contextmanager
def raw_connection(port: int, timeout_s: float = 30.0) -> Iterator[socket.socket]:
    """Yield a plain TCP connection to the public listener."""
    with socket.create_connection(("127.0.0.1", port), timeout_s) as connection:
        yield connection


def send_raw(port: int, wire: bytes) -> bytes:
    """Send raw bytes to the public listener, and return all that comes until it closes."""
    with raw_connection(port, 10.0) as connection:
        connection.sendall(wire)
        answer = b""
        while data := connection.recv(65536):
            answer += data
        return answer
