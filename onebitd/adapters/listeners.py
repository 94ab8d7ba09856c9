"""Listening sockets, opened by ourselves.

Hypercorn would remove a live Unix socket without asking, make its own with the umask's mode and
inheritable (measured, 0.18), so it gets `fd://N` of what is opened here.

`instance.InstanceLock` comes first: it makes the steps that look before they replace
(`open_unix`) safe against a second onebitd that starts at the same moment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Iterable, Iterator
from typing import Final

from onebitd.adapters.instance import stat_or_none
from onebitd.adapters.lock_probe import command_of
from onebitd.core.errors import ConfigError, InstanceTaken

UNIX_PATH_BYTES = 107
"""Longest socket path: sockaddr_un.sun_path holds 108 bytes with the final zero (unix(7))."""

_PORT_TRIES = 32
_TURN_AWAY_S = 0.5
_TURN_AWAY_MOST = 400
"""For two sockets below the usual limit of open files, 1024."""
_TURN_AWAY_READ_BYTES = 64 * 1024
_SEND_BUFFER_BYTES = 256 * 1024
"""Of the kernel, for each connection: what a client that does not read costs at most, twice over.
It would grow to megabytes; no stream of tokens needs them."""
_LISTEN = 0x0A
_TIME_WAIT = 0x06
_ADDRESS_MISSING = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    """What messages call an address: the settings of host and port, and how to have another one."""

    host: str = "http.host"
    port: str = "http.port"
    other_port: str = "--port or http.port"
    open_port: str = "choose one above 1023, or let systemd pass the socket"


PUBLIC: Final = Named()
METRICS: Final = Named(
    "metrics.listen", "metrics.listen", "metrics.listen", "choose one above 1023"
)


def open_tcp(
    host: str, port: int, backlog: int = 128, named: Named = PUBLIC
) -> list[socket.socket]:
    """Listen on every address of `host`, one socket each, all on one port.

    Args:
        host: an address, or a name: `localhost` gives both families where both exist.
        port: 0 lets the kernel choose; `getsockname()` of the first tells.
        backlog: for listen(2).
        named: for messages.

    Raises:
        InstanceTaken: the port is in use; names it and, where it can be seen, the holder.
        ConfigError: no such host or address, or a port that this user may not use.

    Resolves the name with the system's resolver, which may block: for the start, not the loop.
    The caller closes the sockets; they are not inheritable. After an error none is open.
    """
    addresses = _resolve(host, port, named)
    tries = _PORT_TRIES if port == 0 and len(addresses) > 1 else 1
    for left in range(tries - 1, -1, -1):
        try:
            return _bind_all(host, port, addresses, backlog, named)
        except InstanceTaken:
            if not left:  # the port chosen for one family may be in use in the other
                raise
    raise AssertionError("unreachable")


def open_unix(path: str | os.PathLike[str], mode: int, backlog: int = 128) -> socket.socket:
    """Listen on a Unix socket, replacing one that nobody listens on any more.

    At no moment may more users connect than `mode` says.

    Raises:
        InstanceTaken: somebody answers there.
        ConfigError: the path is too long, something else is there, or it may not be created.

    The caller closes the socket and calls `unlink_unix`. The directory must be ours
    (`instance.ensure_private_dir`), and the instance's lock held.
    """
    name = os.fspath(path)
    length = len(os.fsencode(name))
    if length > UNIX_PATH_BYTES:
        raise ConfigError(
            [
                f"the socket path {name} has {length} bytes and the kernel takes at most"
                f" {UNIX_PATH_BYTES}; choose a shorter runtime directory or instance name"
            ]
        )
    _clear_stale(name)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # bind(2) gives the new file this descriptor's mode less the umask: never too much, and no
        # process-wide umask to set. The umask may have taken too much, so chmod before listen.
        os.fchmod(sock.fileno(), mode)
        sock.bind(name)
        os.chmod(name, mode)
        sock.listen(backlog)
    except OSError as exc:
        sock.close()
        if exc.errno == errno.EADDRINUSE:
            raise InstanceTaken(
                f"another process has just opened the socket {name}; stop one of the two"
            ) from exc
        raise ConfigError([f"cannot open the socket {name}: {exc.strerror}"]) from exc
    return sock


def set_options(listener: socket.socket) -> None:
    """Set what connections inherit; they do when they come, before anybody accepts them."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    with contextlib.suppress(OSError):  # TCP only
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def unlink_unix(path: str | os.PathLike[str]) -> None:
    """Remove a socket file; anything else there, or nothing, is left alone."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.stat(path, follow_symlinks=False).st_mode):
            os.unlink(path)


def adopt(fd: int) -> socket.socket:
    """Take over a listening stream socket that the service manager passed.

    Raises:
        ConfigError: the descriptor is something else; it is left open and as it was.

    The caller closes the socket. It is made close-on-exec.
    """
    try:
        sock = socket.socket(fileno=fd)
    except OSError as exc:
        raise ConfigError([f"the passed descriptor {fd} is not a socket: {exc.strerror}"]) from exc
    wrong = None
    if sock.family not in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
        wrong = f"is of address family {sock.family}"
    elif sock.type != socket.SOCK_STREAM:
        wrong = "is not a stream socket; use ListenStream="
    elif not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        wrong = "does not listen; use Accept=no"
    if wrong is not None:
        sock.detach()
        raise ConfigError([f"the passed descriptor {fd} {wrong}"])
    sock.set_inheritable(False)
    return sock


def turn_away(fds: Iterable[int], message: str) -> None:
    """Answer every connection that waits on listening sockets with a 503, and close it.

    All of them are taken at once, so that one who says nothing keeps nobody waiting; takes a
    fraction of a second. The descriptors stay open. What goes wrong with a client is the client's
    affair.
    """
    body = json.dumps({"error": {"message": message, "type": "unavailable_error", "code": 503}})
    data = body.encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    poll = select.poll()
    silent = {one.fileno(): one for fd in fds for one in _accept_all(fd)}
    for one in silent.values():
        one.setblocking(False)
        poll.register(one, select.POLLIN)
    deadline = time.monotonic() + _TURN_AWAY_S
    while silent and (left_s := deadline - time.monotonic()) > 0:
        for number, _ in poll.poll(left_s * 1000):
            poll.unregister(number)
            _answer(silent.pop(number), head.encode() + data)
    for one in silent.values():
        _answer(one, head.encode() + data)


def _accept_all(fd: int) -> Iterator[socket.socket]:
    """Yield the connections that wait on a listening socket; the caller closes them."""
    with socket.socket(fileno=os.dup(fd)) as listener:
        listener.setblocking(False)
        for _ in range(_TURN_AWAY_MOST):
            try:
                yield listener.accept()[0]
            except ConnectionAbortedError:
                continue
            except OSError:
                return


def _answer(connection: socket.socket, reply: bytes) -> None:
    with contextlib.suppress(OSError), connection:
        # Unread, its request would make the close a reset, which may eat the reply.
        with contextlib.suppress(BlockingIOError):
            connection.recv(_TURN_AWAY_READ_BYTES)
        connection.send(reply)


def _resolve(
    host: str, port: int, named: Named
) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    try:
        infos = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (socket.gaierror, UnicodeError) as exc:
        why = exc.strerror if isinstance(exc, socket.gaierror) else str(exc)
        raise ConfigError([f"{named.host}: {host!r} cannot be resolved: {why}"]) from exc
    except OverflowError as exc:
        raise ConfigError([f"{named.port}: {port} is not a port number"]) from exc
    found: dict[tuple[socket.AddressFamily, tuple[str, int]], None] = {}
    for family, _, _, _, address in infos:
        if family in (socket.AF_INET, socket.AF_INET6):
            found[family, address] = None  # type: ignore[index]  # IPv6 has two more items
    return list(found)


def _bind_all(
    host: str,
    port: int,
    addresses: Iterable[tuple[socket.AddressFamily, tuple[str, int]]],
    backlog: int,
    named: Named = PUBLIC,
) -> list[socket.socket]:
    """Bind each address; one that this machine lacks is left out if another one works."""
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, address in addresses:
            try:
                sockets.append(_bind_one(family, address, port, backlog))
            except OSError as exc:
                if exc.errno not in _ADDRESS_MISSING:
                    raise _bind_error(host, port, address, exc, named) from exc
                missing = exc
                continue
            port = sockets[0].getsockname()[1]
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    if not sockets:
        why = missing.strerror if missing else "it has no address"
        raise ConfigError([f"{named.host}: cannot listen on {host}: {why}"]) from missing
    return sockets


def _bind_one(
    family: socket.AddressFamily, address: tuple[str, int], port: int, backlog: int
) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((address[0], port, *address[2:]))
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock


def _bind_error(
    host: str, port: int, address: tuple[str, int], exc: OSError, named: Named
) -> InstanceTaken | ConfigError:
    if exc.errno == errno.EADDRINUSE:
        holder = port_holder(port, address[0])
        who = f" by pid {holder[0]} ({holder[1]})" if holder else ""
        return InstanceTaken(
            f"port {port} on {address[0]} is taken{who}; stop what uses it, or choose another"
            f" port with {named.other_port}"
        )
    if exc.errno in (errno.EACCES, errno.EPERM):
        return ConfigError(
            [
                f"{named.port}: this user may not listen on port {port} of {host}: {exc.strerror};"
                f" {named.open_port}"
            ]
        )
    return ConfigError([f"{named.host}: cannot listen on {host} port {port}: {exc.strerror}"])


def port_holder(port: int, address: str | None = None) -> tuple[int, str] | None:
    """Return (pid, command) of a process that uses a local TCP port, None if it cannot be seen.

    Without privilege only processes of the same user are seen. `address` prefers the holder of
    that very address.
    """
    inodes = _port_inodes(port, address)
    wanted = {f"socket:[{inode}]": rank for rank, inode in enumerate(inodes)}
    best: tuple[int, int] | None = None
    for name in os.listdir("/proc") if wanted else ():
        if not name.isdigit():
            continue
        ranks = [wanted[link] for link in _links_of(name) if link in wanted]
        if ranks and (best is None or min(ranks) < best[0]):
            best = (min(ranks), int(name))
    return None if best is None else (best[1], command_of(best[1]))


def _links_of(pid: str) -> Iterator[str]:
    """Yield what the descriptors of a process point to; nothing of another user's process."""
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for number in numbers:
        with contextlib.suppress(OSError):  # closed meanwhile
            yield os.readlink(f"/proc/{pid}/fd/{number}")


def _port_inodes(port: int, address: str | None) -> list[int]:
    """Return the inodes of sockets on the port, likeliest first (proc(5), /proc/net/tcp)."""
    ranked: list[tuple[int, int]] = []
    exact = _proc_address(address)
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{table}", encoding="utf-8") as file:
                rows = [line.split() for line in file][1:]
        except OSError:
            continue
        for row in rows:
            local, state, inode = row[1], int(row[3], 16), int(row[9])
            where, _, number = local.partition(":")
            if int(number, 16) != port or state == _TIME_WAIT or inode == 0:
                continue
            ranked.append(((0 if state == _LISTEN else 2) + (where != exact), inode))
    return [inode for _, inode in sorted(ranked)]


def _proc_address(address: str | None) -> str | None:
    """Return an address as /proc/net/tcp writes it: 32-bit words in the machine's byte order."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            raw = socket.inet_pton(family, address or "")
        except OSError:
            continue
        words = struct.unpack(f"={len(raw) // 4}I", raw)
        return "".join(f"{word:08X}" for word in words)
    return None


def _clear_stale(name: str) -> None:
    """Remove the socket at the path if nobody listens on it."""
    info = stat_or_none(name)
    if info is None:
        return
    if not stat.S_ISSOCK(info.st_mode):
        raise ConfigError([f"cannot open the socket {name}: something else is there; remove it"])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(name)
        except ConnectionRefusedError:
            pass
        except FileNotFoundError:
            return
        except BlockingIOError:
            raise _alive(name, None) from None  # its backlog is full
        except OSError as exc:
            raise ConfigError(
                [f"cannot tell who has the socket {name}: {exc.strerror}; remove it if nobody does"]
            ) from exc
        else:
            raise _alive(name, client)
    try:
        os.unlink(name)
    except FileNotFoundError:
        pass
    except OSError as exc:
        raise ConfigError([f"cannot replace the old socket {name}: {exc.strerror}"]) from exc


def _alive(name: str, client: socket.socket | None) -> InstanceTaken:
    who = ""
    if client is not None:
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid = struct.unpack("=iII", credentials)[0]
        who = f" by pid {pid} ({command_of(pid)})" if pid > 0 else ""
    return InstanceTaken(f"the socket {name} is served{who}; stop it, or choose another instance")
