"""The sockets of one daemon: opened by itself, or passed by the service manager."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from onebitd.adapters import listeners, peers
from onebitd.adapters.systemd import ServiceManager
from onebitd.core import paths
from onebitd.core.config import Config, HttpConfig, MetricsConfig
from onebitd.core.config_checks import is_loopback
from onebitd.core.errors import ConfigError, OnebitError, RequestError
from onebitd.core.origins import parse_listen

_BACKLOG: Final = 1024
_PASSED_NAMES: Final = ("http", "control")


@dataclasses.dataclass(frozen=True, slots=True)
class Listening:
    """Listening sockets, whoever serves them closes them.

    Attributes:
        control: the control socket.
        public: the public listener, one for each address.
        public_is_passed: the service manager has the public ones too: who connects while nobody
            serves them waits.
        addresses: what the public listener listens on, for people.
        hosts: those of its TCP addresses.
        metrics: the listener for scrapers, one for each address; none without metrics.listen.
        metrics_addresses: what that one listens on, for people.
    """

    control: Sequence[socket.socket]
    public: Sequence[socket.socket]
    public_is_passed: bool
    addresses: Sequence[str]
    hosts: Sequence[str]
    metrics: Sequence[socket.socket] = ()
    metrics_addresses: Sequence[str] = ()


def open_listeners(config: Config, manager: ServiceManager, runtime: Path) -> Listening:
    """Open what was not passed.

    Args:
        config: its [http] says where, unless sockets were passed.
        manager: has what was passed; that stays open, these are copies.
        runtime: of the instance; its lock is held.

    Raises:
        InstanceTaken: a port or the control socket is somebody else's.
        ConfigError: an address that cannot be had, or that asks for keys; a socket that nobody
            would serve.
    """
    passed = manager.listen_fds()
    strange = sorted(set(passed) - set(_PASSED_NAMES))
    if strange:
        raise ConfigError(
            [
                f"a socket named {name!r} was passed; its unit needs FileDescriptorName=http or"
                " FileDescriptorName=control"
                for name in strange
            ]
        )
    control = [listeners.adopt(os.dup(fd)) for fd in passed.get("control", [])]
    _check_control(control)
    # The port first: it may be taken, and then no control socket has to be removed again.
    public = [listeners.adopt(os.dup(fd)) for fd in passed.get("http", [])]
    is_passed = bool(public)
    if not is_passed:
        public = listeners.open_tcp(config.http.host, config.http.port, _BACKLOG)
    _check_exposure(config.http, public, is_passed=is_passed)
    try:
        metrics = _open_metrics(config.metrics)
    except OnebitError:
        for one in (*public, *control):
            one.close()
        raise
    if not control:
        mode = 0o660 if os.geteuid() == 0 or manager.present else 0o600
        control = [listeners.open_unix(runtime / paths.CONTROL_SOCKET, mode)]
    for one in (*public, *control, *metrics):
        listeners.set_options(one)
    tcp = [one for one in public if one.family != socket.AF_UNIX]
    return Listening(
        control,
        public,
        is_passed,
        [_address_of(listener) for listener in public],
        [one.getsockname()[0] for one in tcp],
        metrics,
        [_address_of(one) for one in metrics],
    )


def _open_metrics(metrics: MetricsConfig) -> list[socket.socket]:
    """Open the listener for scrapers, none where none is wanted."""
    where = None if metrics.listen is None else parse_listen(metrics.listen)
    if where is None:
        return []
    return listeners.open_tcp(*where, _BACKLOG, listeners.METRICS)


def admit_to_control(
    control: Sequence[socket.socket],
) -> Callable[[socket.socket], RequestError | None]:
    """Return what says why a client of the control socket is refused, None when it is served."""
    served = peers.served_on(control)

    def admit(client: socket.socket) -> RequestError | None:
        try:
            why = served.why_not(peers.peer_of(client))
        except OSError as error:
            why = f"the kernel does not say who connects: {error.strerror}"
        return None if why is None else RequestError(403, why, kind="permission_error")

    return admit


def turn_away(manager: ServiceManager, reason: str) -> None:
    """Answer who waits on the passed sockets: unanswered, they would have us started again."""
    passed = manager.listen_fds()
    listeners.turn_away(passed.get("control", []), f"onebitd has ended: {reason}")
    # What is wrong is for the operator alone.
    listeners.turn_away(passed.get("http", []), "onebitd has ended; its log says why")


def _check_control(control: Sequence[socket.socket]) -> None:
    """Refuse a socket on which the kernel does not say who asks; nothing is open after that."""
    if all(one.family == socket.AF_UNIX for one in control):
        return
    for one in control:
        one.close()
    raise ConfigError(
        [
            "the control socket that systemd passed is no Unix socket: everybody who reaches it"
            " could administer onebitd; its unit needs ListenStream= with a path"
        ]
    )


def _check_exposure(http: HttpConfig, public: Sequence[socket.socket], *, is_passed: bool) -> None:
    """Refuse an address that others reach, without keys; nothing is open after that.

    The configuration's own check knows what `http.host` says; this one, what it has become: a
    passed socket, or whatever `localhost` is in /etc/hosts.
    """
    if http.api_key_file is not None or http.allow_unauthenticated:
        return
    for listener in public:
        if listener.family == socket.AF_UNIX or is_loopback(listener.getsockname()[0]):
            continue
        name = _address_of(listener)
        what = "the socket that systemd passed" if is_passed else f"http.host {http.host}"
        for one in public:
            one.close()
        raise ConfigError(
            [
                f"http.api_key_file: required because {what}, {name}, is not on a loopback address;"
                " name a file with keys, or set http.allow_unauthenticated = true"
            ]
        )


def _address_of(listener: socket.socket) -> str:
    name: Any = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if listener.family == socket.AF_INET6 else name[0]
    return f"{host}:{name[1]}"
