"""What `onebitctl try` and `bench` send to a daemon's public address, and what they read there.

For commands alone that wait for replies: http.client takes longer to import than `status` may take.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import socket
import time
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from onebitd.adapters.config_file import read_api_keys
from onebitd.client import AccessDenied, BadAnswer, ControlClient, NoDaemon, choose_socket
from onebitd.core.errors import ConfigError
from onebitd.core.handoff_filter import HandoffFilter

CONNECT_TIMEOUT_S: Final = 5.0
RECORD_TIMEOUT_S: Final = 5.0
"""How long the record of a reply that is complete is waited for: it is there at once."""

_POLL_S: Final = 0.02
_LOOKED_AT: Final = 500
"""The newest so many records; others' requests may have ended since ours."""
_LINE_BYTES: Final = 1 << 24
_KEY_SETTING: Final = "http.api_key_file"

Event = Mapping[str, Any]


def control_client(instance: str | None, path: str | None) -> ControlClient:
    """Return the client of the daemon that the command line names.

    Raises:
        ClientError, UsageError: see `choose_socket`.
    """
    return ControlClient(path or choose_socket(instance, os.environ, os.geteuid()))


def require_serving(status: Mapping[str, Any]) -> None:
    """Return if the daemon takes requests.

    Raises:
        BadAnswer: it is loading, restarting or stopping.
    """
    state = status.get("state")
    if state in ("loading", "restarting"):
        raise BadAnswer(f"the daemon is {state}: wait until `onebitctl status` says ready")
    if state == "draining":
        raise BadAnswer("the daemon is stopping and takes no more requests")
    if state not in ("ready", "degraded"):
        raise BadAnswer(f"the daemon is {state}: `onebitctl status` says why")


def address_in(listen: object) -> str:
    """Return where to connect to, by `listen` of a status: TCP before Unix, loopback for "any".

    >>> address_in(["unix:/run/x.sock", "0.0.0.0:8000"]), address_in(["[::]:8000"])
    ('127.0.0.1:8000', '[::1]:8000')

    Raises:
        BadAnswer: there is none.
    """
    found = list(map(str, listen)) if isinstance(listen, list) else []
    found.sort(key=lambda one: one.startswith("unix:"))
    if not found:
        raise BadAnswer("the daemon does not say where it listens: look at `onebitctl status`")
    host, colon, port = found[0].removeprefix("http://").rpartition(":")
    host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)  # noqa: S104 - read, not bound
    return f"{host}{colon}{port}"


def find_key(control: ControlClient, given: str | None) -> str | None:
    """Return the API key to show: of the file that is given, else the daemon's own first one.

    Raises:
        ConfigError: the file that is given has no key.
    """
    if given is not None:
        return read_api_keys(Path(given))[0]
    path = _key_file(control)
    if path is not None:
        with contextlib.suppress(ConfigError):
            return read_api_keys(Path(path))[0]
    return None


def _key_file(control: ControlClient) -> str | None:
    setting = control.config().get(_KEY_SETTING)
    path = setting.get("value") if isinstance(setting, dict) else None
    return path if isinstance(path, str) else None


def new_id(prefix: str) -> str:
    """Return a request id that nobody else has."""
    return f"{prefix}-{secrets.token_hex(8)}"


def record_of(control: ControlClient, request_id: str) -> dict[str, Any] | None:
    """Return the record of a request that is over; None if there is none, even after a moment."""
    deadline = time.monotonic() + RECORD_TIMEOUT_S
    wanted = HandoffFilter(limit=_LOOKED_AT)
    while True:
        records = control.handoffs(wanted)
        mine = next((one for one in records if one.get("request_id") == request_id), None)
        if mine is not None:
            return mine
        if time.monotonic() > deadline:
            return None
        time.sleep(_POLL_S)


class PublicClient:
    """Sends requests to the public address, each on a connection of its own.

    Args:
        address: see `address_in`.
        api_key: shown with each request, never in a message.
    """

    def __init__(self, address: str, api_key: str | None) -> None:
        self._address = address
        self._key = api_key

    def ask(self, path: str, document: Mapping[str, Any]) -> dict[str, Any]:
        """Post and return the JSON object of the reply.

        Raises:
            BadAnswer: it is an error, or none.
        """
        with self._post(path, document, {}) as response:
            found = _parsed(response.read())
        if found is None:
            raise BadAnswer(f"onebitd answered {path} on {self._address} with what is no JSON")
        return found

    def stream(
        self, path: str, document: Mapping[str, Any], headers: Mapping[str, str]
    ) -> Generator[Event]:
        """Post and yield each event of the streamed reply; `[DONE]` ends it.

        Closing the iterator closes the connection, and so ends the request.

        Raises:
            BadAnswer: the reply is an error, becomes one, or breaks off.
        """
        with self._post(path, {**document, "stream": True}, headers) as response:
            is_done = False
            for data in _data_lines(response):
                # Read to its very end: who leaves before has left before the reply was complete.
                is_done = is_done or data == b"[DONE]"
                event = None if is_done else _parsed(data)
                if event is None:
                    continue
                if event.get("error") is not None:
                    raise BadAnswer(f"onebitd broke off: {_message_in(event)}")
                yield event
        if not is_done:
            raise BadAnswer("the reply broke off: `onebitctl handoffs` says why")

    @contextlib.contextmanager
    def _post(
        self, path: str, document: Mapping[str, Any], headers: Mapping[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        key = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        sent = {"Host": "localhost", "Content-Type": "application/json", **key, **headers}
        connection = self._connected()
        with contextlib.closing(connection):
            try:
                connection.request("POST", path, json.dumps(document).encode(), _latin(sent))
                response = connection.getresponse()
                if response.status != 200:
                    raise self._refused(response)
                with response:
                    yield response
            except (http.client.HTTPException, ConnectionError) as exc:
                raise BadAnswer(
                    f"onebitd on {self._address} broke off: {str(exc) or type(exc).__name__}"
                ) from exc

    def _connected(self) -> http.client.HTTPConnection:
        connection = _Connection("localhost", timeout=CONNECT_TIMEOUT_S)
        try:
            connection.sock = _socket_to(self._address)
        except (OSError, ValueError) as exc:  # or what no address is
            why = getattr(exc, "strerror", None) or str(exc)
            raise NoDaemon(f"cannot connect to onebitd's {self._address}: {why}") from exc
        # A long prompt takes its time; who does not want to wait has Ctrl-C.
        connection.sock.settimeout(None)
        return connection

    def _refused(self, response: http.client.HTTPResponse) -> BadAnswer | AccessDenied:
        message = _message_in(_parsed(response.read(_LINE_BYTES)) or {}) or response.reason
        text = f"onebitd answered {response.status}: {message}"
        if response.status == 401:
            return AccessDenied(
                f"{text}; name a file that holds one of its keys with --api-key-file"
                f" ({_KEY_SETTING} may be for its own user alone)"
            )
        return BadAnswer(text)


class _Connection(http.client.HTTPConnection):
    """A connection whose socket is there before it is used."""

    sock: socket.socket

    def connect(self) -> None:
        """Nothing is left to do."""


def _socket_to(address: str) -> socket.socket:
    if address.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(CONNECT_TIMEOUT_S)
            connection.connect(address.removeprefix("unix:"))
        except BaseException:
            connection.close()
            raise
        return connection
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _data_lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield what follows each `data:`; a line is read whole, wherever the chunks end."""
    while line := response.readline(_LINE_BYTES):
        if line.startswith(b"data:"):
            yield line[5:].strip()


def _parsed(data: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _message_in(document: Mapping[str, Any]) -> str:
    error = document.get("error")
    return str(error.get("message", "")) if isinstance(error, dict) else str(error or "")


def _latin(headers: Mapping[str, str]) -> dict[str, bytes]:
    """Return header values as UTF-8: a key need not be ASCII, and is compared as bytes."""
    return {name: value.encode() for name, value in headers.items()}
