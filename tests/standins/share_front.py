#!/usr/bin/env python3
"""Stands in front of a real llama-server and gives it the shared route of the fork.

Started like llama-server, with the same command line. The real one (SHARE_FRONT_SERVER) runs behind
it on a socket of its own; every request is passed on byte for byte, replies come back as they
stream, and a client that leaves is gone for the real one too. What it answers itself:

POST /slots/0?action=share {"socket": PATH}
    exports one memfd region or more that are laid out as the decoder's cache (header: see
    onebitd.core.share_layout), over the socket, and replies {"id_slot", "share_id"}. The memory is
    the same for all shares of a process, as a cache is. Its layout is learned from the real server
    at the first share: three tokens are evaluated, saved and erased.
POST /slots/0?action=adopt {"tokens", "share_id"}
    makes a sequence state of the rows that lie in that memory, has the real server restore it, and
    replies {"id_slot", "n_adopted"}. A share is adopted once, and only the last one.

What it cannot share is a 501: a transposed V cache (no flash attention), a recurrent state, a
sliding window without --swa-full or in an architecture whose pattern of layers is not known here.
Without ONEBIT_KV_SHARE in its environment (set and not empty) it is a 501 too, as with the fork.

Environment, or arguments that the real server does not get:

SHARE_FRONT_SERVER                    the real llama-server
SHARE_FRONT_REGIONS                   regions, so descriptors, that the layers are spread over (1)
SHARE_FRONT_RECORD, --front-record F  JSON lines for requests and their ends, as the stand-in's
SHARE_FRONT_KNOBS, --front-knobs F    a file with more of these, read anew for each request:

--share-refuse WHAT      invalid (upstream, 400), missing (404), unsupported (501), mismatch (500)
--share-mode WHAT        never (no connection, no reply), silent (no connection, a reply),
                         stall (connects, says nothing), stall-half (descriptors, half the
                         message), garbage, close, close-after-length, no-fds, no-id, no-json,
                         many-fds (300 in two messages), late-fds, trailing, child (a child
                         connects), stranger (a process that is no descendant does), stranger-first
                         (and then the front); stalls end when the other side hangs up
--share-layout WHAT      none, overlap, version, rows (a row_size 2 too small)
--adopt-refuse STATUS
--adopt-short
--die-on MOMENT          share, after-share (its reply is out), adopt (its request is in),
                         after-restore (the reply is not out): SIGKILL to itself
--share-delay S, --adopt-delay S

A value may end in `:TIMES`: so often only, counted in files beside the knobs' file.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import parse_qs, urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from onebitd.core import gguf_header, state_file
from onebitd.core.errors import OnebitError
from onebitd.core.share_layout import LAYOUT
from onebitd.core.state_layout import KvSection
from tests.llama_builds import UnixConnection
from tests.standins.share_export import Memory, hand_over, layer_numbers
from tests.standins.tiny_decoder import Refused

PROBE = (1, 2, 3)
_READ_BYTES = 1 << 16
_HEAD_BYTES = 1 << 20
_LONG_S = 3600.0
_LAST_BYTES_S = 1.0
_DIRECTORY = "share-front-"
# The parent-death signal survives exec; the front's main thread, which starts it, lives on.
_BEHIND = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]): os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def launcher(
    directory: Path,
    server: Path,
    *,
    knobs: Path | None = None,
    record: Path | None = None,
    **env: str,
) -> Path:
    """Write a program that starts the front with this interpreter, and return its path.

    Args:
        server: the real llama-server.
        knobs, record: files, see above; they need not exist.
        env: more variables, e.g. `SHARE_FRONT_REGIONS="2"`.
    """
    variables = {"SHARE_FRONT_SERVER": os.fspath(server), **env}
    for name, path in (("KNOBS", knobs), ("RECORD", record)):
        if path is not None:
            variables[f"SHARE_FRONT_{name}"] = os.fspath(path)
    words = [f"{name}={value}" for name, value in variables.items()]
    path = directory / "share-front"
    command = shlex.join(["env", *words, sys.executable, os.path.abspath(__file__)])
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)
    return path


class Knobs:
    """The knobs' file; what it says is read at each question."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._counting = threading.Lock()

    def get(self, name: str, only: str | None = None) -> str | None:
        """Return the value of a knob that is set and still due; "1" for one without a value.

        Args:
            only: any other value is not asked for, and not counted.
        """
        words: list[str] = []
        if self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                words = Path(self._path).read_text().split()
        if f"--{name}" not in words:
            return None
        at = words.index(f"--{name}") + 1
        word = words[at] if at < len(words) and not words[at].startswith("--") else "1"
        value, _, times = word.partition(":")
        if only not in (None, value) or (times and not self._is_due(name, int(times))):
            return None
        return value

    def _is_due(self, name: str, times: int) -> bool:
        counter = Path(f"{self._path}.{name}")
        with self._counting:
            done = int(counter.read_text()) if counter.exists() else 0
            counter.write_text(str(done + 1))
        return done < times


@dataclass(frozen=True)
class Options:
    """The command line, and what of the environment matters.

    Attributes:
        words: for the real server, without its socket and its slot directory.
        host, slots, model: the values of llama-server's arguments.
    """

    server: str
    words: tuple[str, ...]
    host: str
    slots: Path | None
    model: str
    swa_full: bool
    knobs: str | None
    record: str | None
    regions: int

    @staticmethod
    def read(words: Sequence[str], environ: Mapping[str, str]) -> Options:
        """Read the command line."""
        rest: list[str] = []
        found = {
            "--front-knobs": environ.get("SHARE_FRONT_KNOBS"),
            "--front-record": environ.get("SHARE_FRONT_RECORD"),
            "--host": None,
            "--slot-save-path": None,
            "-m": None,
        }
        left = iter(words)
        for word in left:
            name = "-m" if word == "--model" else word
            if name not in found:
                rest.append(word)
                continue
            found[name] = next(left, None)
            if name == "-m":
                rest += [word, found[name] or ""]
        server = environ.get("SHARE_FRONT_SERVER", "llama-server")
        slots = found["--slot-save-path"]
        return Options(
            server=shutil.which(server) or server,
            words=tuple(rest),
            host=found["--host"] or "",
            slots=None if slots is None else Path(slots),
            model=found["-m"] or "",
            swa_full="--swa-full" in rest,
            knobs=found["--front-knobs"],
            record=found["--front-record"],
            regions=int(environ.get("SHARE_FRONT_REGIONS", "1")),
        )


class Real:
    """The llama-server behind the front: its process, its socket, its slot directory."""

    def __init__(self, options: Options) -> None:
        _sweep()
        self.home = Path(tempfile.mkdtemp(prefix=f"{_DIRECTORY}{os.getpid()}-", dir="/tmp"))
        self.slots = self.home / "slots"
        self.slots.mkdir()
        self.socket = self.home / "real.sock"
        words = [*options.words, "--host", str(self.socket), "--slot-save-path", str(self.slots)]
        behind = [sys.executable, "-I", "-S", "-c", _BEHIND, str(os.getpid())]
        # A group of its own: a signal for our group reaches it once, from us.
        self.process = subprocess.Popen([*behind, options.server, *words], process_group=0)

    def post(self, path: str, body: object) -> tuple[int, Any]:
        """Post JSON; return status and JSON. Refused (500) when it is gone."""
        connection = UnixConnection(self.socket, _LONG_S)
        try:
            headers = {"Content-Type": "application/json"}
            method = "GET" if body is None else "POST"
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except (OSError, ValueError) as error:
            raise Refused(500, "server_error", f"{path}: {error}") from error
        finally:
            connection.close()

    def ask(self, path: str, body: object) -> Any:
        """Post, or get when there is no body; an error reply becomes ours."""
        status, reply = self.post(path, body)
        if status != 200:
            error = reply.get("error", {})
            raise Refused(status, error.get("type", "server_error"), error.get("message", "?"))
        return reply

    def close(self) -> None:
        """Remove its directory."""
        shutil.rmtree(self.home, ignore_errors=True)


def _sweep() -> None:
    """Remove what killed fronts left."""
    for path in Path("/tmp").glob(f"{_DIRECTORY}*"):
        pid = path.name.removeprefix(_DIRECTORY).partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)


class Front:
    """The listener, the real server, and what was shared."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.knobs = Knobs(options.knobs)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(options.host)
        self.listener.listen(512)
        self.real = Real(options)
        self.requests = 0
        self.counted = threading.Lock()
        self.connections: set[threading.Thread] = set()
        self._slot = threading.Lock()
        self._memory: Memory | None = None
        self._window: int | None = None
        self._last_share = 0
        self._open_share: int | None = None

    def serve(self) -> None:
        """Take connections for ever."""
        while True:
            client, _ = self.listener.accept()
            threading.Thread(target=Connection(self, client).run, daemon=True).start()

    def share(self, body: Mapping[str, Any], client: socket.socket) -> dict[str, Any]:
        """Export the memory; Refused."""
        self._moment("share")
        self._refuse_share()
        path = body.get("socket")
        if not isinstance(path, str):
            raise Refused(400, "invalid_request_error", 'share: "socket" must be a path')
        with self._slot:  # one after the other, as llama-server's loop
            time.sleep(float(self.knobs.get("share-delay") or 0))
            memory = self._learned()
            self._last_share += 1
            share_id = self._open_share = self._last_share
            header = self._spoilt(memory.header(share_id))
            mode = self.knobs.get("share-mode") or "good"
            try:
                hand_over(path, header, memory.fds, mode, client)
            except OSError as error:
                raise Refused(500, "server_error", f"share: {path}: {error.strerror}") from error
        return {"id_slot": 0, "share_id": share_id}

    def _refuse_share(self) -> None:
        what = self.knobs.get("share-refuse")
        if what == "invalid":
            raise Refused(400, "invalid_request_error", "Invalid action")
        if what == "missing":
            raise Refused(404, "not_found_error", "File Not Found")
        if what == "mismatch":
            raise Refused(500, "server_error", "share: params mismatch: -c 2048, was 4096")
        if what == "unsupported" or not os.environ.get("ONEBIT_KV_SHARE"):
            raise _cannot("ONEBIT_KV_SHARE was not set, or the KV backend cannot export its memory")

    def _spoilt(self, header: dict[str, Any]) -> dict[str, Any]:
        """Return the header with what --share-layout does to it."""
        what = self.knobs.get("share-layout")
        if what == "none":
            del header["layout"]
        elif what == "version":
            header["layout"] = LAYOUT + 1
        elif what == "overlap":
            header["tensors"][1]["offset"] = header["tensors"][0]["offset"]
        elif what == "rows":
            header["tensors"][0]["row_size"] -= 2
        return header

    def _learned(self) -> Memory:
        """Return the memory; made at the first time."""
        if self._memory is not None:
            return self._memory
        n_cells = self.real.ask("/props", None)["default_generation_settings"]["n_ctx"]
        probe = {"prompt": PROBE, "n_predict": 0, "id_slot": 0, "cache_prompt": False}
        self.real.ask("/completion", probe)
        saved = self.real.slots / ".share-front-probe"
        try:
            self.real.ask("/slots/0?action=save", {"filename": saved.name})
            layout = state_file.learn_layout(saved.read_bytes(), PROBE)
            with open(self.options.model, "rb") as file:
                header = gguf_header.read(file.read())
        except (OnebitError, OSError) as error:
            raise _cannot(str(error)) from error
        finally:
            saved.unlink(missing_ok=True)
            self.real.ask("/slots/0?action=erase", {})
        sections = [part for part in layout.sections if isinstance(part, KvSection)]
        if len(sections) != len(layout.sections):
            raise _cannot("this model has a recurrent state")
        if any(section.v_trans for section in sections):
            raise _cannot("the V cache is transposed: flash attention is off")
        if len(sections) > 1 and not self.options.swa_full:
            raise _cannot("the sliding window's cache has no cell for each position: --swa-full")
        layers = layer_numbers(header, sections)
        if layers is None:
            raise _cannot(
                f"which layers have a sliding window in a {header.architecture} is unknown"
            )
        self._window = header.sliding_window
        self._memory = Memory(layout, layers, n_cells, self.options.regions)
        return self._memory

    def adopt(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Take the memory's rows for the slot's; Refused."""
        self._moment("adopt")
        time.sleep(float(self.knobs.get("adopt-delay") or 0))
        status = self.knobs.get("adopt-refuse")
        if status is not None:
            raise Refused(int(status), "invalid_request_error", "adopt: told to refuse")
        tokens, share_id = body.get("tokens"), body.get("share_id")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise Refused(400, "invalid_request_error", 'adopt: "tokens" must be a list of ids')
        with self._slot:
            if self._memory is None or share_id is None or share_id != self._open_share:
                message = f"adopt: share {share_id} is not open, the last one is {self._open_share}"
                raise Refused(400, "invalid_request_error", message)
            if not 0 < len(tokens) <= self._memory.n_cells:
                message = f"adopt: {len(tokens)} tokens for {self._memory.n_cells} cells"
                raise Refused(400, "invalid_request_error", message)
            self._open_share = None
            n_adopted = self._restore(self._memory, tokens)
        self._moment("after-restore")
        return {"id_slot": 0, "n_adopted": n_adopted - bool(self.knobs.get("adopt-short"))}

    def _restore(self, memory: Memory, tokens: Sequence[int]) -> int:
        path = self.real.slots / ".share-front-adopt"
        try:
            path.write_bytes(memory.state(tokens, self._window))
            return int(
                self.real.ask("/slots/0?action=restore", {"filename": path.name})["n_restored"]
            )
        except struct.error as error:
            raise Refused(400, "invalid_request_error", f"adopt: {error}") from error
        finally:
            path.unlink(missing_ok=True)

    def link(self, body: Mapping[str, Any]) -> None:
        """Let a name in the real server's slot directory mean the file in the client's.

        The link stays; a name that the real one would refuse is left to it.
        """
        name = body.get("filename")
        if self.options.slots is None or not isinstance(name, str) or "/" in name or "\0" in name:
            return
        with contextlib.suppress(OSError):  # it is there, or is no name
            os.symlink(os.path.abspath(self.options.slots / name), self.real.slots / name)

    def _moment(self, what: str) -> None:
        if self.knobs.get("die-on", what) is not None:
            os.kill(os.getpid(), signal.SIGKILL)

    def after_share(self) -> None:
        """Die, if told to, with the reply to a share on its way."""
        self._moment("after-share")

    def record(self, suffix: str, document: Mapping[str, Any]) -> None:
        """Append a line in one write."""
        if self.options.record is None:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        descriptor = os.open(self.options.record + suffix, flags, 0o600)
        os.write(descriptor, json.dumps({**document, "pid": os.getpid()}).encode() + b"\n")
        os.close(descriptor)


def _cannot(why: str) -> Refused:
    return Refused(501, "not_supported_error", f"This server cannot share its cache: {why}")


@dataclass
class Request:
    """One request as it came."""

    raw: bytes
    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> dict[str, Any]:
        """The body's object, empty if it is none."""
        with contextlib.suppress(ValueError):
            found = json.loads(self.body)
            if isinstance(found, dict):
                return found
        return {}

    @property
    def action(self) -> str | None:
        """The slot action it asks for."""
        target = urlsplit(self.target)
        if self.method != "POST" or not target.path.startswith("/slots/"):
            return None
        return parse_qs(target.query).get("action", [""])[0]


def take_request(held: bytearray) -> Request | None:
    """Take a whole request from the front of what was read; None while there is none."""
    head, found, _ = bytes(held).partition(b"\r\n\r\n")
    if not found:
        if len(held) > _HEAD_BYTES:
            raise OSError("a head without an end")
        return None
    start, *lines = head.decode("latin-1").split("\r\n")
    fields = (line.partition(":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in fields}
    if "transfer-encoding" in headers:
        raise OSError("a chunked request, which nobody sends here")
    size = len(head) + 4 + int(headers.get("content-length", "0"))
    if len(held) < size:
        return None
    method, target, *_ = [*start.split(" "), "", ""]
    raw = bytes(held[:size])
    del held[:size]
    return Request(raw, method, target, headers, raw[len(head) + 4 :])


class Connection:
    """One client, and the connection to the real server that is its own."""

    def __init__(self, front: Front, client: socket.socket) -> None:
        self._front = front
        self._client = client
        self._behind: socket.socket | None = None
        self._number: int | None = None
        self._last_write = 0.0

    def run(self) -> None:
        """Serve it until either side hangs up."""
        held = bytearray()
        self._front.connections.add(threading.current_thread())
        try:
            while self._step(held):
                pass
        except (OSError, ValueError):
            pass
        finally:
            for end in (self._behind, self._client):
                if end is not None:
                    end.close()
            self._record_end()
            self._front.connections.discard(threading.current_thread())

    def _step(self, held: bytearray) -> bool:
        """Pass on what has come from one side; False at an end."""
        poll = select.poll()
        poll.register(self._client, select.POLLIN)
        if self._behind is not None:
            poll.register(self._behind, select.POLLIN)
        ready = {fd for fd, _ in poll.poll()}
        if self._behind is not None and self._behind.fileno() in ready:
            data = self._behind.recv(_READ_BYTES)
            self._last_write = time.monotonic()
            self._client.sendall(data)
            return bool(data)
        data = self._client.recv(_READ_BYTES)
        held += data
        while data and (request := take_request(held)) is not None:
            self._record(request)
            if not self._answer(request):
                return False
        return bool(data)

    def _answer(self, request: Request) -> bool:
        action = request.action
        if action in ("share", "adopt"):
            return self._answer_here(request, action)
        if action in ("save", "restore"):
            self._front.link(request.document)
        if self._behind is None:
            behind = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                behind.connect(str(self._front.real.socket))
            except OSError:
                behind.close()
                return self._reply(503, {"error": LOADING})
            self._behind = behind
        self._behind.sendall(request.raw)
        return True

    def _answer_here(self, request: Request, action: str) -> bool:
        front = self._front
        try:
            if action == "adopt":
                return self._reply(200, front.adopt(request.document))
            reply = front.share(request.document, self._client)
        except Refused as refused:
            return self._reply(refused.status, {"error": refused.error})
        goes_on = self._reply(200, reply)
        front.after_share()
        return goes_on

    def _reply(self, status: int, document: object) -> bool:
        data = json.dumps(document).encode()
        head = f"HTTP/1.1 {status} -\r\nServer: llama.cpp\r\n"
        head += f"Content-Type: application/json; charset=utf-8\r\nContent-Length: {len(data)}\r\n"
        head += "Connection: close\r\n" if status >= 400 else ""
        self._last_write = time.monotonic()
        self._client.sendall(head.encode() + b"\r\n" + data)
        return status < 400

    def _record(self, request: Request) -> None:
        self._record_end()
        front = self._front
        with front.counted:
            front.requests += 1
            self._number = front.requests
        front.record(
            "",
            {
                "n": self._number,
                "at": time.monotonic(),
                "method": request.method,
                "target": request.target,
                "headers": request.headers,
                "body": request.body.decode("utf-8", "surrogateescape"),
            },
        )

    def _record_end(self) -> None:
        if self._number is not None:
            end = self._last_write or time.monotonic()
            self._front.record(".end", {"n": self._number, "end": end})
            self._number = None


LOADING = {"message": "Loading model", "type": "unavailable_error", "code": 503}


def leave(front: Front, status: int) -> NoReturn:
    """End as the real server did, once what it had still said is passed on."""
    deadline = time.monotonic() + _LAST_BYTES_S
    for thread in list(front.connections):
        thread.join(max(0.0, deadline - time.monotonic()))
    front.real.close()
    sys.stderr.flush()
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status if status >= 0 else 1)


def main(words: Sequence[str]) -> int:
    """Serve until the real server ends."""
    options = Options.read(words, os.environ)
    if {"--list-devices", "--version", "--help", "-h"} & set(words):
        os.execv(options.server, [options.server, *options.words])  # noqa: S606 - it takes over
    if not options.host.endswith(".sock"):
        sys.exit("share_front: --host must be the path of a Unix socket, *.sock")
    try:
        front = Front(options)
    except OSError as error:
        sys.stderr.write(
            f"start: couldn't bind HTTP server socket, hostname: {options.host}, port: 8080\n"
            f"main: exiting due to HTTP server error ({error.strerror})\n"
        )
        return 1

    def forward(number: int, frame: object) -> None:
        front.real.process.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, forward)
    threading.Thread(target=front.serve, daemon=True).start()
    leave(front, front.real.process.wait())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
