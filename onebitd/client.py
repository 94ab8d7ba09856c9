"""Client of the control socket, and the search for running instances.

Standard library and core only, blocking: it starts fast and pulls in nothing of the daemon. Every
error is a `ClientError` whose message names the socket and the next step; its `exit_status` is the
one `onebitctl` promises.
"""

from __future__ import annotations

import contextlib
import grp
import json
import math
import os
import pwd
import socket
import stat
import time
from collections.abc import Container, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from onebitd.core import paths
from onebitd.core.errors import OnebitError, UsageError
from onebitd.core.http1 import FramingError, body_reader

if TYPE_CHECKING:  # a status is there without
    from onebitd.core.handoff_filter import HandoffFilter

TIMEOUT_S: Final = 5.0
"""How long a connect or a read may take without progress."""

RELOAD_TIMEOUT_S: Final = 100.0
"""The same for a reload, which may wait for the device lock, and for a reload before it."""

HISTORY_TIMEOUT_S: Final = 60.0
"""The same for handoffs of the past, of which there may be millions."""

_PROBE_TIMEOUT_S: Final = 1.0
_READ_BYTES: Final = 1 << 16
_HEAD_BYTES: Final = 1 << 16
_BODY_BYTES: Final = 1 << 26
_HISTORY_BYTES: Final = 1 << 31
_SYSTEMD: Final = "/run/systemd/system"
"""A directory exactly where systemd runs the machine (sd_booted(3))."""


class ClientError(OnebitError):
    """A question to the control socket has no good answer."""


class NoDaemon(ClientError):
    """Nobody listens there."""

    exit_status = 3


class AnswerTimeout(ClientError):
    """Somebody listens there, and does not answer in time."""

    exit_status = 3


class AccessDenied(ClientError):
    """The socket is not ours to use; the message names the group that may."""

    exit_status = 4


class BadAnswer(ClientError):
    """The answer is an error, or nothing that a control socket says."""


class Refused(BadAnswer):
    """The daemon did not do what it was asked; `problems` has a line for each reason it gave."""

    def __init__(self, message: str, problems: Sequence[str]) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class ControlClient:
    """Asks one daemon; every call opens a connection of its own and closes it.

    Args:
        socket_path: the control socket.
        timeout_s: bound on connecting, and on waiting for more of an answer.
    """

    def __init__(self, socket_path: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._path = socket_path
        self._timeout_s = timeout_s
        self._most_bytes = _BODY_BYTES
        self._deadline = math.inf

    def status(self) -> dict[str, Any]:
        """Return `/v1/status`; `timeout_s` bounds all of it."""
        asked = ControlClient(self._path, timeout_s=self._timeout_s)
        asked._deadline = time.monotonic() + self._timeout_s
        return asked._object("/v1/status")

    def config(self) -> dict[str, Any]:
        """Return `/v1/config`: `{key: {"value", "source"}}`."""
        return self._object("/v1/config")

    def costs(self) -> dict[str, Any]:
        """Return `/v1/costs`: what was learned of both ways, and the context it is about."""
        return self._object("/v1/costs")

    def reload(self) -> dict[str, Any]:
        """Have the configuration read again; return `{"changed", "needs_restart", "warnings"}`.

        Raises:
            Refused: the configuration is bad and nothing has changed.
        """
        client = ControlClient(self._path, timeout_s=max(self._timeout_s, RELOAD_TIMEOUT_S))
        return client._object("/v1/reload", "POST")

    def reset_provider(self) -> dict[str, Any]:
        """Clear what is held against the provider; return `control_api.ProviderReset`'s fields."""
        return self._object("/v1/provider/reset", "POST")

    def requests(self) -> list[dict[str, Any]]:
        """Return the requests that are being served, `control_api.RequestInFlight`'s fields."""
        return self._list("/v1/requests", "requests")

    def cancel(self, request_id: str) -> int:
        """End every request of this id; return how many there were.

        Raises:
            BadAnswer: none is in flight.
        """
        answer = self._object("/v1/requests/cancel", "POST", {"request_id": request_id})
        number = answer.get("cancelled")
        if not isinstance(number, int):
            raise self._bad("it does not say how many were cancelled")
        return number

    def handoffs(self, wanted: HandoffFilter) -> list[dict[str, Any]]:
        """Return the last records that are wanted, newest last; 20 without a limit."""
        return self._patient()._list(_target("/v1/handoffs", wanted), "handoffs")

    def summary(self, wanted: HandoffFilter) -> dict[str, Any]:
        """Return `core.handoff_summary.summarise` of every record that is wanted."""
        return self._patient()._object(_target("/v1/handoffs/summary", wanted))

    def follow(self, wanted: HandoffFilter) -> Generator[dict[str, Any]]:
        """Yield the last `limit` records and then each new one; ends when the daemon does.

        `{"lost": N}` stands where the daemon dropped records that were not read in time. Closing
        the iterator closes the connection.
        """
        with self._ask(_target("/v1/handoffs", wanted, follow="1")) as answer:
            answer.wait_for_ever()
            while line := self._line(answer):
                yield self._parse(line)

    def _patient(self) -> ControlClient:
        """Return a client that waits while a large file is searched."""
        client = ControlClient(self._path, timeout_s=max(self._timeout_s, HISTORY_TIMEOUT_S))
        client._most_bytes = _HISTORY_BYTES
        return client

    def _list(self, target: str, name: str) -> list[dict[str, Any]]:
        found = self._object(target).get(name)
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise self._bad(f"there is no list of {name} in it")
        return found

    def _object(
        self, target: str, method: str = "GET", document: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        with self._ask(target, method, document) as answer, self._translated():
            body = answer.read(self._most_bytes)
        return self._parse(body)

    @contextlib.contextmanager
    def _ask(
        self, target: str, method: str = "GET", document: Mapping[str, Any] | None = None
    ) -> Iterator[_Answer]:
        with self._translated():
            connection = _connect(self._path, self._timeout_s)
        with contextlib.closing(connection):
            with self._translated():
                answer = _Answer(connection, target, method, document, self._deadline)
            if answer.status != 200:
                raise self._refused(answer)
            yield answer

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn what the kernel and the framing raise into our errors."""
        try:
            yield
        except PermissionError:
            raise AccessDenied(describe_denied(self._path)) from None
        except (FileNotFoundError, NotADirectoryError):
            raise NoDaemon(f"no onebitd there: {self._path} does not exist") from None
        except ConnectionRefusedError:
            raise NoDaemon(f"no onebitd there: nobody listens on {self._path}") from None
        except TimeoutError:
            raise AnswerTimeout(
                f"onebitd does not answer on {self._path} within {self._timeout_s:g} s:"
                " look at its log"
            ) from None
        except FramingError as exc:
            raise self._bad(f"it is not HTTP ({exc})") from exc
        except OSError as exc:
            raise NoDaemon(f"cannot talk to onebitd on {self._path}: {exc}") from exc

    def _line(self, answer: _Answer) -> bytes:
        try:
            with self._translated():
                return answer.readline()
        except BadAnswer:
            return b""  # the daemon ended in the middle of a line

    def _parse(self, data: bytes) -> dict[str, Any]:
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            raise self._bad("it is not JSON") from None
        if not isinstance(found, dict):
            raise self._bad("it is not a JSON object")
        return found

    def _refused(self, answer: _Answer) -> ClientError:
        with self._translated():
            body = answer.read()
        error: Mapping[str, Any] = {}
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            error = dict(json.loads(body)["error"])
        text = f"onebitd on {self._path} answered {answer.status}: "
        text += str(error.get("message", answer.reason))
        problems: object = error.get("problems")
        if isinstance(problems, list):
            return Refused(text, list(map(str, problems)))
        return AccessDenied(text) if answer.status == 403 else BadAnswer(text)

    def _bad(self, why: str) -> BadAnswer:
        return BadAnswer(f"no answer of an onebitd from {self._path}: {why}")


class _Answer:
    """The answer to one request: its status, and its body as it comes.

    Written by hand because http.client alone takes as long to import as all the rest of
    `onebitctl` (it brings ssl and email), and a command line must feel instant.
    """

    def __init__(
        self,
        connection: socket.socket,
        target: str,
        method: str,
        document: Mapping[str, Any] | None = None,
        deadline: float = math.inf,
    ) -> None:
        self._connection = connection
        self._deadline = deadline
        self._held = bytearray()
        body = b"" if document is None else json.dumps(document).encode("ascii")
        request = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        if body:
            request += "Content-Type: application/json\r\n"
        if method != "GET":
            request += f"Content-Length: {len(body)}\r\n"
        connection.sendall(f"{request}\r\n".encode("ascii") + body)
        while (end := self._held.find(b"\r\n\r\n")) < 0:
            if len(self._held) > _HEAD_BYTES:
                raise FramingError("its head has no end")
            data = self._receive()
            if not data:
                raise FramingError("it ended before its head did")
            self._held += data
        head = bytes(self._held[:end]).decode("latin-1").split("\r\n")
        rest = bytes(self._held[end + 4 :])
        version, _, status = head[0].partition(" ")
        if not version.startswith("HTTP/1.") or not status[:3].isdigit():
            raise FramingError("its first line is no status line")
        self.status = int(status[:3])
        self.reason = status[3:].strip()
        fields = (line.partition(":") for line in head[1:])
        headers = [
            (name.lower().encode("latin-1"), value.strip().encode("latin-1"))
            for name, _, value in fields
        ]
        self._reader = body_reader(method.encode("ascii"), self.status, headers)
        self._held = bytearray(self._reader.feed(rest))

    def wait_for_ever(self) -> None:
        """Lift the time limit: the next record may be hours away."""
        self._connection.settimeout(None)

    def read(self, most_bytes: int = _BODY_BYTES) -> bytes:
        """Return the rest of the body."""
        while self._more():
            if len(self._held) > most_bytes:
                raise FramingError("it is too large")
        return bytes(self._held)

    def readline(self) -> bytes:
        """Return the next line with its end, or b"" at the end of the body."""
        while (end := self._held.find(b"\n")) < 0:
            if len(self._held) > _BODY_BYTES:
                raise FramingError("it is too large")
            if not self._more():
                return b""
        line = bytes(self._held[: end + 1])
        del self._held[: end + 1]
        return line

    def _receive(self) -> bytes:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if left_s < (self._connection.gettimeout() or math.inf):
            self._connection.settimeout(left_s)
        return self._connection.recv(_READ_BYTES)

    def _more(self) -> bool:
        if self._reader.done:
            return False
        data = self._receive()
        if data:
            self._held += self._reader.feed(data)
        else:
            self._reader.feed_eof()
        return True


class Instance(NamedTuple):
    """An instance's directory; `state` is `running`, `stopped` or `denied`."""

    name: str
    socket: str
    state: str


def find_instances(
    roots: Sequence[str | os.PathLike[str]],
    name: str | None = None,
    *,
    passed_over: Container[str] = (),
) -> list[Instance]:
    """Look for instances in the runtime roots, by connecting to each one's socket.

    Args:
        roots: see `core.paths.runtime_roots`; unsafe ones must have been left out.
        name: only instances of this name.
        passed_over: sockets that are left alone, as a connection would start their service.
    """
    found = []
    for root in roots:
        try:
            names = sorted(os.listdir(root))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError:
            found.append(Instance(name or "?", str(root), "denied"))
            continue
        for entry in names:
            directory = os.path.join(root, entry)
            path = os.path.join(directory, paths.CONTROL_SOCKET)
            if path in passed_over:
                continue
            if name in (None, entry) and os.path.isdir(directory):
                found.append(Instance(entry, path, _probe(path)))
    return found


def search_roots(environ: Mapping[str, str], uid: int) -> list[str]:
    """Return the runtime roots that are safe to look into."""
    return _safe_roots(environ, uid)[0]


def choose_socket(name: str | None, environ: Mapping[str, str], uid: int) -> str:
    """Return the control socket of the instance `name`, or of the only one that runs.

    Raises:
        NoDaemon: none runs.
        AccessDenied: none that we may ask, and at least one that we may not.
        UsageError: more than one runs; the message lists them.
    """
    roots, unsafe = _safe_roots(environ, uid)
    if name is not None:
        given = os.path.dirname(paths.runtime_dir(name, environ, uid))
        if given != paths.fallback_root(uid):
            roots = list(dict.fromkeys([given, *roots]))
    found = find_instances(roots, name)
    running = [instance for instance in found if instance.state == "running"]
    if name is not None and environ.get("RUNTIME_DIRECTORY"):
        # A program of a service asks that service, whatever else has its name on this machine.
        own = os.path.join(paths.runtime_dir(name, environ, uid), paths.CONTROL_SOCKET)
        running = [one for one in running if one.socket == own] or running
    if len(running) == 1:
        return running[0].socket
    if running:
        listed = ", ".join(f"{instance.name} ({instance.socket})" for instance in running)
        how = "its socket with --socket" if name else "with -i, or its socket with --socket"
        raise UsageError(f"more than one onebitd runs: {listed}; name one {how}")
    denied = [instance for instance in found if instance.state == "denied"]
    if denied:
        raise AccessDenied(describe_denied(denied[0].socket))
    raise NoDaemon(_no_daemon(name, found, unsafe, booted=os.path.isdir(_SYSTEMD), uid=uid))


def describe_denied(path: str) -> str:
    """Say what stands in the way to a socket, and which group or user may pass."""
    blocker = path
    while True:
        try:
            info = os.stat(blocker)
            break
        except OSError:
            blocker = os.path.dirname(blocker)
    wanted = stat.S_IXGRP if stat.S_ISDIR(info.st_mode) else stat.S_IWGRP
    if info.st_mode & wanted and info.st_gid != 0:
        group = _group_name(info.st_gid)
        return (
            f"permission denied: {path} is for the group {group}: join it with"
            f" `sudo usermod -aG {group} $USER` and log in again, or use sudo"
        )
    return f"permission denied: {path} is for the user {_user_name(info.st_uid)} alone"


def _safe_roots(environ: Mapping[str, str], uid: int) -> tuple[list[str], str | None]:
    """Return the roots to look into, and the one that is not safe to, if it exists."""
    fallback = paths.fallback_root(uid)
    roots = [root for root in paths.runtime_roots(environ, uid) if root != fallback]
    try:
        info = os.lstat(fallback)
    except OSError:
        return roots, None
    if paths.is_private(info.st_mode, info.st_uid, uid):
        return [*roots, fallback], None
    return roots, fallback


def _no_daemon(
    name: str | None, found: Sequence[Instance], unsafe: str | None, *, booted: bool, uid: int
) -> str:
    """Say that none runs, and how `uid` starts one; `booted`: systemd runs this machine.

    A stopped service leaves no directory, one below /run/onebitd is most likely of a service, and
    any other is of a daemon that a user runs.
    """
    names = [name] if name else sorted({instance.name for instance in found})
    one = names[0] if len(names) == 1 else "NAME"
    what = f"no onebitd runs for the instance {name}" if name else "no onebitd runs here"
    service, by_hand = f"`systemctl start onebitd@{one}`", f"`onebitd --instance {one}`"
    of_root = [instance.socket.startswith(f"{paths.SYSTEM_RUNTIME}/") for instance in found]
    if not booted or (found and not any(of_root)):
        how = by_hand
    elif found and all(of_root):
        how = service
    else:
        own = "" if uid == 0 else " (with --user if it is your own)"
        how = f"{service} if it is a service{own}, else with {by_hand}"
    text = f"{what}: start it with {how}"
    if len(names) > 1:
        text += f" (NAME: {', '.join(names)})"
    if unsafe is not None:
        text += f"; {unsafe} was passed over, it is not a directory of yours with mode 0700"
    return text


def _probe(path: str) -> str:
    try:
        _connect(path, _PROBE_TIMEOUT_S).close()
    except PermissionError:
        return "denied"
    except TimeoutError:
        return "running"
    except OSError:
        return "stopped"
    return "running"


def _connect(path: str, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


def _target(path: str, wanted: HandoffFilter, **more: str) -> str:
    from urllib.parse import urlencode  # half as slow as all the rest of a status

    return f"{path}?{urlencode(wanted.parameters() | more)}"


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
