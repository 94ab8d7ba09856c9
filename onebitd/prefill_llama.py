"""onebit-prefill-llama: the reference prefill provider, for any GGUF and any llama.cpp device.

    onebit-prefill-llama --tokens IDS_FILE --out STATE_FILE --model MODEL [--elfs DIR]
    onebit-prefill-llama --tokens IDS_FILE --layout HEADER_FILE --fds N[,N...] --model MODEL ...

It starts a llama-server of its own on a private Unix socket and has it evaluate the ids, on
a machine without an NPU. The file route saves the slot beside STATE_FILE and renames it into place.
The shared route saves it into memory that has no name and writes its rows into the decoder's own
memory (`onebitd.prefill_share`). Both are only good for a decoder of the same llama.cpp, with
the same KV cache types and flash attention; these are left at llama-server's defaults and are set
by `--llama-args`.

What a run leaves behind: on success STATE_FILE (mode 0600) and nothing else; after an error,
SIGTERM, SIGINT or SIGHUP nothing; after SIGKILL on the file route at most `.onebit-prefill-*` files
in STATE_FILE's directory, on the shared route nothing, unless it comes before llama-server listens:
then a directory with a socket at most. The llama-server stays in this program's process group and
dies with it in every case; a wrapper script in its place must exec it, and keep its descriptors.

This module imports the standard library alone and nothing of the daemon, so that it starts fast
and can be copied as a starting point for another provider; what the shared route needs more is
imported when that is asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import math
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import onebitd

if TYPE_CHECKING:
    from onebitd.prefill_share import Share

PROGRAM = "onebit-prefill-llama"
EXIT_USAGE = 2
EXIT_START = 3
EXIT_PREFILL = 4
EXIT_WRITE = 5
EXIT_LAYOUT = 6

MAX_ID = 2**31 - 1  # llama_token is an int32
MAX_IDS_FILE_BYTES = 64 * 2**20
CTX_STEP = 256  # llama.cpp rounds a context up to this
SUN_PATH_MAX_BYTES = 107
LOG_TAIL_BYTES = 16 * 1024
KILL_WAIT_S = 5.0
PLAIN_LETTER = 'root ::= "a"'
DEFAULT_TIMEOUT_S = 600.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# Reads the server's pid from its standard input, then waits for the end of this program.
WATCHER = 'trap "" TERM INT HUP; read -r pid && { read -r _; kill -9 "$pid"; } 2>/dev/null'

EPILOG = f"""\
environment (a flag wins over its variable):
  ONEBIT_PREFILL_LLAMA_SERVER    --llama-server; without it ONEBIT_LLAMA_SERVER
  ONEBIT_PREFILL_LLAMA_ARGS      --llama-args, split like a shell does
  ONEBIT_PREFILL_LLAMA_DEVICE    --device
  ONEBIT_PREFILL_LLAMA_CTX_SIZE  --ctx-size
  ONEBIT_PREFILL_LLAMA_TIMEOUT   --timeout

exit status:
  0  all is written, and the last line on stdout is {{"prefill_ms": MS}}
  {EXIT_USAGE}  usage, or a bad ids file, header file or model path
  {EXIT_START}  llama-server could not start
  {EXIT_PREFILL}  the prefill failed
  {EXIT_WRITE}  STATE_FILE or the shared memory could not be written
  {EXIT_LAYOUT}  the shared memory is not laid out for this state; nothing was written

The last line on stderr says why.
"""


class PrefillError(Exception):
    """The run cannot go on; one line for stderr, and the exit status that goes with it."""

    def __init__(self, exit_status: int, message: str) -> None:
        super().__init__(message)
        self.exit_status = exit_status


class Stopped(BaseException):
    """A stop signal arrived; raised in the main thread, past every `except Exception`."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class StopSignals:
    """Turns SIGTERM, SIGINT and SIGHUP into `Stopped`, but not in the middle of a fork.

    A handler that raised inside Popen would lose the new child's pid. SIGHUP stays ignored where
    it was: under nohup(1).
    """

    def __init__(self) -> None:
        self._held = False
        self._pending: int | None = None
        for signum in STOP_SIGNALS:
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, self._handle)

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        self._pending = signum
        if not self._held:
            self._held = True  # once: a second signal must not cut the clean-up short
            raise Stopped(signum)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold a signal that arrives in the block back until its end."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._pending is not None:
            raise Stopped(self._pending)

    def ignore(self) -> None:
        """Ignore further stop signals: the clean-up that runs now is bounded by itself."""
        for signum in STOP_SIGNALS:
            signal.signal(signum, signal.SIG_IGN)


@dataclass(frozen=True)
class Options:
    """What one run does; `ctx_size` 0 means as large as the ids need.

    Either `out` is set, the file route, or `layout` and `fds` are, the shared route.
    """

    tokens: str
    out: str | None
    layout: str | None
    fds: tuple[int, ...]
    model: str
    llama_server: str
    llama_args: tuple[str, ...]
    device: str | None
    ctx_size: int
    timeout_s: float


class Parser(argparse.ArgumentParser):
    """argparse whose error is one line, the last on stderr."""

    def error(self, message: str) -> NoReturn:
        """Leave with status 2."""
        self.exit(EXIT_USAGE, f"{self.prog}: {message}; see {self.prog} --help\n")


def _ctx_size(text: str) -> int:
    value = int(text)
    if not 0 <= value <= MAX_ID:
        raise ValueError(text)
    return value


def parse_fds(text: str) -> tuple[int, ...]:
    """Return the numbers in a value of --fds; ValueError when they cannot be descriptors."""
    found = tuple(int(word) for word in text.split(","))
    if min(found) < 3 or max(found) > MAX_ID or len(set(found)) != len(found):
        raise ValueError(text)  # 0 to 2 are the standard streams
    return found


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(text)
    return value


def contract_parser(program: str, what: str, epilog: str) -> Parser:
    """Return a parser with the contract's own flags; `what` begins the description."""
    parser = Parser(
        prog=program,
        description=f"{what},\nand write the state file (--out), or the rows into a decoder's "
        "memory\n(--layout and --fds).",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"{program} {onebitd.__version__}")
    add("--tokens", required=True, metavar="IDS_FILE", help="token ids, one decimal number a line")
    route = parser.add_mutually_exclusive_group(required=True)
    route.add_argument("--out", metavar="STATE_FILE", help="the state file to write")
    route.add_argument(
        "--layout", metavar="HEADER_FILE", help="the header of the memory to write to instead"
    )
    add("--fds", type=parse_fds, metavar="FDS", help="its inherited descriptors, commas between")
    add("--model", required=True, help="the GGUF file")
    add("--elfs", metavar="DIR", help="taken for the contract's sake; not used")
    return parser


def parse_contract(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; --layout and --fds come together or not at all."""
    found = parser.parse_args(argv)
    if (found.layout is None) != (found.fds is None):
        parser.error("--layout and --fds belong together")
    return found


def parse_options(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Return the options of a command line, with defaults from the environment.

    Exits 2 with one line on stderr for a bad one, 0 for --help and --version.
    """
    env = {key: value for key, value in environ.items() if value}
    parser = contract_parser(PROGRAM, "Prefill a prompt with a llama-server of its own", EPILOG)
    add = parser.add_argument
    add(
        "--llama-server",
        metavar="PROGRAM",
        default=env.get("ONEBIT_PREFILL_LLAMA_SERVER")
        or env.get("ONEBIT_LLAMA_SERVER", "llama-server"),
        help="the llama-server to run (default: %(default)s)",
    )
    add(
        "--llama-args",
        metavar="ARGS",
        default=env.get("ONEBIT_PREFILL_LLAMA_ARGS", ""),
        help="more arguments for it in one string, joined with = because it begins with a dash: "
        "--llama-args='-t 4 -ctk q8_0'; give the decoder's -fa, -ctk, -ctv and rope arguments here",
    )
    add(
        "--device",
        metavar="NAME",
        default=env.get("ONEBIT_PREFILL_LLAMA_DEVICE"),
        help="its --device; none: compute on the CPU (default: its own choice)",
    )
    add(
        "--ctx-size",
        type=_ctx_size,
        metavar="N",
        default=env.get("ONEBIT_PREFILL_LLAMA_CTX_SIZE", "0"),
        help="its context (default: what the ids need; a model whose rope factors depend on the "
        "context's size wants the decoder's)",
    )
    add(
        "--timeout",
        type=_seconds,
        metavar="S",
        default=env.get("ONEBIT_PREFILL_LLAMA_TIMEOUT", str(DEFAULT_TIMEOUT_S)),
        help="limit for the whole run in seconds (default: %(default)s)",
    )
    found = parse_contract(parser, argv)
    try:
        llama_args = tuple(shlex.split(found.llama_args))
    except ValueError as error:
        parser.error(f"--llama-args (ONEBIT_PREFILL_LLAMA_ARGS): {error}")
    return Options(
        tokens=found.tokens,
        out=found.out,
        layout=found.layout,
        fds=found.fds or (),
        model=found.model,
        llama_server=found.llama_server,
        llama_args=llama_args,
        device=found.device,
        ctx_size=found.ctx_size,
        timeout_s=found.timeout,
    )


def read_ids(path: str) -> list[int]:
    """Return the ids in a file, one decimal number a line; PrefillError names the bad line."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise PrefillError(EXIT_USAGE, f"ids file {path}: not a regular file")
            data = file.read(MAX_IDS_FILE_BYTES + 1)
    except OSError as error:
        raise PrefillError(EXIT_USAGE, f"ids file {path}: {error.strerror}") from error
    if len(data) > MAX_IDS_FILE_BYTES:
        raise PrefillError(
            EXIT_USAGE, f"ids file {path}: larger than {MAX_IDS_FILE_BYTES} bytes, not a prompt"
        )
    ids = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        word = line.strip()
        if not word and number > data.count(b"\n"):
            continue  # what follows the last newline
        if not word.isdigit() or len(word) > 10 or int(word) > MAX_ID:
            shown = word[:40].decode("utf-8", "replace")
            raise PrefillError(
                EXIT_USAGE,
                f"ids file {path}, line {number}: {shown!r} is not a token id; "
                f"one decimal number from 0 to {MAX_ID} a line is expected",
            )
        ids.append(int(word))
    if not ids:
        raise PrefillError(EXIT_USAGE, f"ids file {path}: empty; there is nothing to prefill")
    return ids


def check_model(path: str) -> None:
    """Raise PrefillError unless the model is a file that can be opened."""
    try:
        with open(path, "rb", opener=open_at_once) as file:
            why = None if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else "not a regular file"
    except OSError as error:
        why = error.strerror
    if why is not None:
        raise PrefillError(EXIT_USAGE, f"model {path}: {why}; --model takes a readable GGUF file")


def open_at_once(path: str, flags: int) -> int:
    """Open a file as `open`'s opener; a FIFO without a writer does not hold it up."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def choose_ctx_size(wanted: int, n_ids: int) -> int:
    """Return the context to ask for: llama-server takes a prompt only if it is shorter.

    One that has no room behind the token it makes all the same, it calls truncated.
    """
    if wanted == 0:
        return -(-(n_ids + 2) // CTX_STEP) * CTX_STEP
    if wanted <= n_ids:
        raise PrefillError(
            EXIT_USAGE, f"--ctx-size {wanted}: the prompt has {n_ids} ids; give {n_ids + 1} or more"
        )
    return wanted


def find_program(name: str) -> str:
    """Return the path of a program as execvp would find it; PrefillError when there is none."""
    folders = [""] if "/" in name else os.get_exec_path()
    for folder in folders:
        path = os.path.join(folder, name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    raise PrefillError(
        EXIT_START,
        f"llama-server program {name}: not found or not executable; name it with --llama-server "
        "or ONEBIT_PREFILL_LLAMA_SERVER",
    )


@dataclass(frozen=True)
class Paths:
    """The temporary names of one run.

    On the file route `saved` is in STATE_FILE's directory, `socket` most often. On the shared route
    `saved` is a descriptor's name, the same in this program and in llama-server.
    """

    directory: str
    saved_name: str
    socket: str
    socket_directory: str | None  # one of its own, made and removed by this run
    saved_fd: int | None = None  # memory, closed by `remove_paths`

    @property
    def saved(self) -> str:
        """Where llama-server saves the slot."""
        return os.path.join(self.directory, self.saved_name)


def claim_paths(out: str, environ: Mapping[str, str]) -> Paths:
    """Choose the temporary names, and create the file that the slot is saved into.

    Creating it here tells a missing or read-only directory at once, not after the prefill.
    Raises PrefillError (status 5).
    """
    out = os.path.abspath(out)
    directory = os.path.dirname(out)
    stem = f".onebit-prefill-{os.urandom(6).hex()}"
    if os.path.isdir(out):
        raise PrefillError(EXIT_WRITE, f"--out {out}: is a directory; give a file name")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        os.close(os.open(os.path.join(directory, stem + ".state"), flags, 0o600))
    except OSError as error:
        raise PrefillError(
            EXIT_WRITE, f"--out {out}: cannot create a file in {directory}: {error.strerror}"
        ) from error
    socket_path, own = os.path.join(directory, stem + ".sock"), None
    if len(os.fsencode(socket_path)) > SUN_PATH_MAX_BYTES:
        try:
            own = make_socket_directory(environ)
        except PrefillError:
            os.unlink(os.path.join(directory, stem + ".state"))
            raise
        socket_path = os.path.join(own, "s.sock")
    return Paths(directory, stem + ".state", socket_path, own)


def make_socket_directory(environ: Mapping[str, str]) -> str:
    """Make a directory for the socket alone and return its path; PrefillError (status 3)."""
    base = environ.get("XDG_RUNTIME_DIR") or "/tmp"  # noqa: S108 - what is made there is 0700
    path = os.path.join(base, f"onebit-prefill-{os.urandom(6).hex()}")
    try:
        os.mkdir(path, 0o700)
    except OSError as error:
        raise PrefillError(
            EXIT_START, f"socket directory {path}: {error.strerror}; set XDG_RUNTIME_DIR"
        ) from error
    return path


def claim_memory(environ: Mapping[str, str]) -> Paths:
    """Make memory for the slot to be saved into, and a directory for the socket.

    llama-server opens it by the name of the descriptor that it inherits, so there is no file that
    anybody could see or a SIGKILL could leave. Raises PrefillError.
    """
    try:
        saved_fd = os.memfd_create("onebit-prefill")
    except OSError as error:
        raise PrefillError(EXIT_START, f"memory for the slot: {error.strerror}") from error
    try:
        own = make_socket_directory(environ)
    except PrefillError:
        os.close(saved_fd)
        raise
    return Paths("/proc/self/fd", str(saved_fd), os.path.join(own, "s.sock"), own, saved_fd)


def remove_paths(paths: Paths) -> None:
    """Remove whatever of the temporary names is there."""
    if paths.saved_fd is not None:
        os.close(paths.saved_fd)
    for path in (paths.saved, paths.socket) if paths.saved_fd is None else (paths.socket,):
        with contextlib.suppress(OSError):
            os.unlink(path)
    if paths.socket_directory is not None:
        with contextlib.suppress(OSError):
            os.rmdir(paths.socket_directory)


def server_command(options: Options, program: str, paths: Paths, ctx_size: int) -> list[str]:
    """Return the llama-server command line.

    --swa-full is always given: builds 10068 to 11549 ignore it, with a warning, for a model that
    has no sliding window. `--llama-args` come last and win.
    """
    command = [program, "--model", options.model, "--host", paths.socket]
    command += ["--slot-save-path", paths.directory, "--parallel", "1", "--cache-ram", "0"]
    command += ["--swa-full", "--ctx-size", str(ctx_size)]
    if options.device:
        command += ["--device", options.device]
    return [*command, *options.llama_args]


def death_signal_prefix() -> list[str]:
    """Return setpriv's words for a parent-death signal; none where it is missing or refused.

    setpriv(1) sets its capabilities whatever it is asked for, which a service's system call filter
    may not allow (measured, util-linux 2.38).
    """
    try:
        words = [find_program("setpriv"), "--pdeathsig", "KILL", "--"]
        done = subprocess.run(
            [*words, "/bin/true"], stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except (PrefillError, OSError):
        return []
    return words if done.returncode == 0 else []


class Server:
    """A private llama-server: started by the constructor, ended by `kill`, in our process group.

    It dies with this program: by setpriv's parent-death signal, or where that cannot be had by a
    watching shell that sees its standard input end.
    """

    def __init__(self, command: Sequence[str], paths: Paths) -> None:
        self._socket_path = paths.socket
        self._hide_socket = paths.saved_fd is not None
        self._socket_fd: int | None = None
        self._tail = b""
        self._watcher: subprocess.Popen[bytes] | None = None
        env = {key: value for key, value in os.environ.items() if key != "LLAMA_API_KEY"}
        prefix = death_signal_prefix()
        try:
            if not prefix:
                self._watcher = subprocess.Popen(["/bin/sh", "-c", WATCHER], stdin=subprocess.PIPE)
            self._process = subprocess.Popen(
                [*prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=env,
                pass_fds=() if paths.saved_fd is None else (paths.saved_fd,),
            )
        except OSError as error:
            raise PrefillError(EXIT_START, f"{command[0]}: {error.strerror}") from error
        self._tell_watcher()
        self._pump_thread = threading.Thread(target=self._pump, daemon=True)
        self._pump_thread.start()

    def _tell_watcher(self) -> None:
        """Give the watching shell, if there is one, the pid that it is to end."""
        if self._watcher is None or self._watcher.stdin is None:
            return
        try:
            self._watcher.stdin.write(b"%d\n" % self._process.pid)
            self._watcher.stdin.flush()
        except OSError as error:
            self.kill()
            raise PrefillError(EXIT_START, f"/bin/sh: {error.strerror}; is it usable?") from error

    def _pump(self) -> None:
        """Read the server's output to its end and keep the last of it."""
        assert self._process.stdout is not None  # noqa: S101 - opened as a pipe above
        with self._process.stdout as output:
            while chunk := os.read(output.fileno(), 65536):
                self._tail = (self._tail + chunk)[-LOG_TAIL_BYTES:]

    def exit_status(self) -> int | None:
        """Return the exit status if it has ended, a signal as a negative number."""
        return self._process.poll()

    def wait_exit(self, timeout_s: float) -> None:
        """Give a server whose connection broke the time to be seen dead."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def last_words(self) -> str:
        """Return the line of its output that best says what went wrong."""
        if self.exit_status() is not None:
            self._pump_thread.join(1.0)
        lines = [line.strip() for line in self._tail.decode("utf-8", "replace").splitlines()]
        lines = [line for line in lines if line and "show complete usage" not in line]
        errors = [line for line in lines if "error" in line.lower() or " E " in line]
        causes = [line for line in errors if "exiting due to" not in line]
        return (causes or errors or lines or ["it said nothing"])[-1]

    def _address(self) -> str:
        """Return where it listens; OSError when it does not yet.

        On the shared route its socket loses its name as soon as it is there: connect(2) takes
        a descriptor's name all the same, and a SIGKILL leaves nothing.
        """
        if not self._hide_socket:
            return self._socket_path
        if self._socket_fd is None:
            self._socket_fd = os.open(self._socket_path, os.O_PATH | os.O_CLOEXEC)
            os.unlink(self._socket_path)
            os.rmdir(os.path.dirname(self._socket_path))
        return f"/proc/self/fd/{self._socket_fd}"

    def request(
        self, method: str, path: str, body: object, timeout_s: float
    ) -> tuple[int, dict[str, Any]]:
        """Send one request and return its status and JSON object; OSError.

        HTTP/1.0 by hand: http.client would bring in ssl and email, half of this program's start.
        """
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(self._address())
            connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        status, raw = split_answer(answer)
        try:
            decoded = json.loads(raw)
        except ValueError:
            decoded = None
        return status, decoded if isinstance(decoded, dict) else {"text": repr(raw[:200])}

    def kill(self) -> None:
        """End it at once and collect it; its work is saved or worthless by now."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_WAIT_S)
        if self._watcher is not None:
            self._watcher.kill()
            self._watcher.communicate()
            self._watcher = None
        if self._socket_fd is not None:
            os.close(self._socket_fd)
            self._socket_fd = None


def split_answer(answer: bytes) -> tuple[int, bytes]:
    """Return status and body of a whole HTTP answer; ConnectionError when it was cut short."""
    head, _, body = answer.partition(b"\r\n\r\n")
    start, *fields = head.split(b"\r\n")
    words = start.split()
    sizes = [field[15:].strip() for field in fields if field[:15].lower() == b"content-length:"]
    if len(words) < 2 or not words[1].isdigit() or (sizes and sizes[0] != b"%d" % len(body)):
        raise ConnectionError("the connection ended within an answer")
    return int(words[1]), body


def remaining_s(deadline: float, exit_status: int, phase: str) -> float:
    """Return the seconds left, or raise PrefillError: `--timeout` is over while `phase`."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise PrefillError(exit_status, f"--timeout is over while {phase}; give it more seconds")
    return left


def wait_ready(server: Server, command: Sequence[str], deadline: float) -> None:
    """Return once the model is loaded; PrefillError (status 3) when it will not be."""
    while True:
        left = remaining_s(deadline, EXIT_START, "llama-server loads the model")
        status = server.exit_status()
        if status is not None:
            raise PrefillError(
                EXIT_START,
                f"{command[0]} ended while it started (status {status}): {server.last_words()}; "
                f"run it by hand: {shlex.join(command)}",
            )
        with contextlib.suppress(OSError):
            if server.request("GET", "/health", None, left)[0] == 200:
                return
        time.sleep(0.01)


def ask(server: Server, path: str, body: object, deadline: float, phase: str) -> dict[str, Any]:
    """POST and return the reply; PrefillError (status 4) names what llama-server said."""
    left = remaining_s(deadline, EXIT_PREFILL, phase)
    try:
        status, reply = server.request("POST", path, body, left)
    except TimeoutError as error:
        raise PrefillError(
            EXIT_PREFILL, f"--timeout is over while {phase}; give it more seconds"
        ) from error
    except OSError as error:
        server.wait_exit(1.0)
        raise PrefillError(
            EXIT_PREFILL,
            f"llama-server went away while {phase} (status {server.exit_status()}): "
            f"{server.last_words()}",
        ) from error
    if status != 200:
        error_object = reply.get("error")
        message = error_object.get("message") if isinstance(error_object, dict) else reply
        raise PrefillError(EXIT_PREFILL, f"llama-server answered {status} while {phase}: {message}")
    return reply


def prompt_body(ids: Sequence[int]) -> dict[str, object]:
    """Return the body of a completion that leaves these ids in slot 0 and nothing else.

    llama-server makes one token all the same. The grammar keeps it to a letter: build 10068 answers
    500 when it is a part of a character (measured; the slot holds the prompt even then).
    """
    body: dict[str, object] = {"prompt": list(ids), "n_predict": 0, "grammar": PLAIN_LETTER}
    return {**body, "id_slot": 0, "cache_prompt": True}


def prefill(server: Server, ids: Sequence[int], deadline: float) -> float:
    """Evaluate the ids in slot 0 and return the milliseconds that took."""
    phase = f"it prefilled {len(ids)} ids"
    reply = ask(server, "/completion", prompt_body(ids), deadline, phase)
    evaluated = reply.get("tokens_evaluated")
    if evaluated != len(ids) or reply.get("truncated"):
        raise PrefillError(
            EXIT_PREFILL, f"llama-server took {evaluated} of {len(ids)} ids as the prompt"
        )
    timings = reply.get("timings")
    return float(timings["prompt_ms"]) if isinstance(timings, dict) else math.nan


def save(server: Server, paths: Paths, n_ids: int, deadline: float) -> None:
    """Save slot 0; PrefillError when that failed or is not whole, OSError.

    On a full disk build 10068 answers 200 with n_written 0 and leaves a short file.
    """
    body = {"filename": paths.saved_name}
    reply = ask(server, "/slots/0?action=save", body, deadline, "it saved the slot")
    size = os.stat(paths.saved).st_size
    if reply.get("n_saved") != n_ids or reply.get("n_written") != size:
        raise PrefillError(
            EXIT_WRITE,
            f"the saved slot is not whole: the file has {size} bytes, llama-server speaks of "
            f"{reply.get('n_written')} bytes and {reply.get('n_saved')} of {n_ids} tokens",
        )


def write_file(server: Server, paths: Paths, n_ids: int, out: str, deadline: float) -> None:
    """Save slot 0 and rename the file to `out`; PrefillError (status 5) when it is not whole."""
    try:
        save(server, paths, n_ids, deadline)
        os.chmod(paths.saved, 0o600)
        os.replace(paths.saved, out)
    except PrefillError as error:
        free = free_bytes(paths.directory)
        raise PrefillError(
            EXIT_WRITE, f"--out {out}: {error}; {free} bytes are free in {paths.directory}"
        ) from error
    except OSError as error:
        raise PrefillError(EXIT_WRITE, f"--out {out}: {error.strerror}") from error


def free_bytes(directory: str) -> int:
    """Return the bytes that can still be written in a directory: a full disk's usual sign."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def open_share(layout: str | None, fds: Sequence[int], n_ids: int) -> Share | None:
    """Return the memory to write to, None on the file route; PrefillError (status 2 or 6)."""
    if layout is None:
        return None
    from onebitd import prefill_share

    try:
        return prefill_share.open_share(layout, fds, n_ids)
    except prefill_share.ShareMismatch as error:
        raise PrefillError(EXIT_LAYOUT, f"--layout {layout}: {error}") from error
    except OSError as error:
        what = f"--layout {layout}"
        if error.errno == errno.EBADF:
            what = f"--fds: descriptor {error.filename}"
        raise PrefillError(EXIT_USAGE, f"{what}: {error.strerror}") from error


def write_share(
    server: Server,
    paths: Paths,
    ids: Sequence[int],
    share: Share,
    signals: StopSignals,
    deadline: float,
) -> None:
    """Save slot 0 and write its rows into the decoder's memory; PrefillError."""
    try:
        save(server, paths, len(ids), deadline)
    except OSError as error:
        raise PrefillError(EXIT_WRITE, f"the shared memory: {error.strerror}") from error
    server.kill()  # gives the memory of its model and its cache back, before more is touched
    fill_share(share, int(paths.saved_name), ids, signals)


def fill_share(share: Share, state_fd: int, ids: Sequence[int], signals: StopSignals) -> None:
    """Write the rows of a state file into the decoder's memory; PrefillError.

    Up to the first byte a stop signal ends the run with nothing written. From then on it finishes:
    rows half written help nobody, and the rest takes less than a stop's grace.
    """
    from onebitd import prefill_share
    from onebitd.core.errors import StateFileError

    try:
        prefill_share.write_state(share, state_fd, ids, signals.ignore)
    except prefill_share.ShareMismatch as error:
        raise PrefillError(EXIT_LAYOUT, str(error)) from error
    except StateFileError as error:
        raise PrefillError(EXIT_PREFILL, f"the saved slot: {error}") from error
    except OSError as error:
        raise PrefillError(EXIT_WRITE, f"the shared memory: {error.strerror}") from error


def run(options: Options, signals: StopSignals) -> float:
    """Carry out one run and return `prefill_ms`; PrefillError or Stopped, and nothing is left."""
    deadline = time.monotonic() + options.timeout_s
    ids = read_ids(options.tokens)
    check_model(options.model)
    ctx_size = choose_ctx_size(options.ctx_size, len(ids))
    program = find_program(options.llama_server)
    share = open_share(options.layout, options.fds, len(ids))
    cleanups: list[Callable[[], None]] = []
    try:
        with signals.held():
            if options.out is None:
                paths = claim_memory(os.environ)
            else:
                paths = claim_paths(options.out, os.environ)
            cleanups.append(lambda: remove_paths(paths))
            command = server_command(options, program, paths, ctx_size)
            server = Server(command, paths)
            cleanups.append(server.kill)
        wait_ready(server, command, deadline)
        prefill_ms = prefill(server, ids, deadline)
        if share is not None:
            write_share(server, paths, ids, share, signals, deadline)
        elif options.out is not None:
            write_file(server, paths, len(ids), options.out, deadline)
        return prefill_ms
    finally:
        try:
            signals.ignore()
        finally:
            for cleanup in reversed(cleanups):
                cleanup()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    options = parse_options(sys.argv[1:] if argv is None else argv, os.environ)
    return run_program(PROGRAM, lambda signals: run(options, signals))


def run_program(name: str, work: Callable[[StopSignals], float]) -> int:
    """Do a provider's work and end as the contract has it.

    Args:
        work: returns `prefill_ms`, or NaN when that is not known.

    Returns:
        the exit status; after a stop signal it does not return.
    """
    signals = StopSignals()
    os.umask(0o077)  # whatever is made is for this user alone
    try:
        prefill_ms = work(signals)
    except PrefillError as error:
        line = " ".join(str(error).split())
        sys.stderr.write(f"{name}: {line}\n")
        return error.exit_status
    except Stopped as stop:
        signal.signal(stop.signum, signal.SIG_DFL)
        os.kill(os.getpid(), stop.signum)  # so that the parent sees what ended this program
        return 128 + stop.signum
    result = {} if math.isnan(prefill_ms) else {"prefill_ms": round(prefill_ms, 3)}
    with contextlib.suppress(OSError):  # nobody reads stdout: the state is whole all the same
        os.write(sys.stdout.fileno(), json.dumps(result).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
