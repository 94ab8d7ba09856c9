"""Who listens on the port of an instance, by /proc alone."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from onebitd.adapters.lock_probe import command_of
from onebitd.core.own_unit import unit_in
from onebitd.doctor.finding import Finding, State, failed, ok
from onebitd.doctor.place import Place

NAME: Final = "port"
_LISTENS: Final = "0A"
_INTERPRETER: Final = re.compile(r"python[\d.]*|node|perl|ruby|(?:ba|da)?sh|java")


@dataclasses.dataclass(frozen=True, slots=True)
class Listener:
    """A listening TCP socket."""

    address: str
    port: int
    inode: int


@dataclasses.dataclass(frozen=True, slots=True)
class Owner:
    """A process that has a socket; `unit` is its service, "" if it is in none.

    `of_user`: that is one of a user's own service manager.
    """

    pid: int
    command: str
    unit: str = ""
    of_user: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Ours:
    """What is known of the running daemon.

    Attributes:
        pid: its own; None where it does not tell.
        addresses: where it says that it listens.
        runs: it may be there, whether it has answered or not.
    """

    pid: int | None = None
    addresses: tuple[str, ...] = ()
    runs: bool = False

    @classmethod
    def of(cls, status: Mapping[str, Any] | None, *, runs: bool) -> Ours:
        """Read it from `/v1/status`; None where nobody has answered."""
        told = status or {}
        pid, listen = told.get("pid"), told.get("listen")
        addresses = tuple(map(str, listen)) if isinstance(listen, list) else ()
        return cls(pid if type(pid) is int else None, addresses, runs)


def parse_table(text: str) -> list[Listener]:
    """Return the listening sockets of /proc/net/tcp or tcp6 (proc_net(5)).

    >>> parse_table("  0: 0100007F:1F40 00000000:0000 0A 0:0 0:0 0 0 0 4711 1")
    [Listener(address='127.0.0.1', port=8000, inode=4711)]
    """
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) < 10 or words[3] != _LISTENS:
            continue
        address, _, port = words[1].partition(":")
        found.append(Listener(_address(address), int(port, 16), int(words[9])))
    return found


def _address(text: str) -> str:
    """Return an address out of its words of 32 bits, each in the order of this machine's bytes."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def in_the_way(listeners: Collection[Listener], host: str, port: int) -> list[Listener]:
    """Return those that keep others from listening at an address.

    Args:
        host: an address, or `localhost`; another name counts as any address.
    """
    try:
        wanted = str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        wanted = "127.0.0.1" if host == "localhost" else ""
    every = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
    return [
        one
        for one in listeners
        if one.port == port
        and (not wanted or wanted in every or one.address in every or one.address == wanted)
    ]


def owners_of(inode: int, root: Path = Path("/")) -> Iterator[Owner]:
    """Yield the processes that have a socket open, as far as this one may see that."""
    proc = root / "proc"
    wanted = f"socket:[{inode}]"
    for name in sorted(filter(str.isdigit, os.listdir(proc)), key=int):
        try:
            descriptors = os.listdir(proc / name / "fd")
            if any(os.readlink(proc / name / "fd" / one) == wanted for one in descriptors):
                yield Owner(int(name), command_of(int(name)), *_unit_of(proc / name))
        except OSError:
            continue  # gone, or another user's


def _unit_of(process: Path) -> tuple[str, bool]:
    try:
        return unit_in((process / "cgroup").read_text()) or ("", False)
    except OSError:
        return "", False


def check(
    host: str,
    port: int,
    ours: Ours,
    place: Place,
    *,
    has_socket_unit: bool = False,
    root: Path = Path("/"),
) -> Finding:
    """Say whether the port is free, or has been taken.

    Args:
        ours: the running daemon, whose socket it may be.
        has_socket_unit: systemd holds a port for this instance, whatever the configuration says.
        root: in the place of `/`.
    """
    if has_socket_unit:
        return ok(NAME, f"systemd holds it, by onebitd-http@{place.instance}.socket")
    if port == 0:
        return ok(NAME, "any free port (http.port is 0)")
    listeners: list[Listener] = []
    for table in ("tcp", "tcp6"):
        try:
            listeners += parse_table((root / "proc/net" / table).read_text())
        except OSError:
            continue
    taken = in_the_way(listeners, host, port)
    where = f"{host}:{port}"
    if not taken:
        return ok(NAME, f"{where} is free")
    owners = [owner for one in taken for owner in owners_of(one.inode, root)]
    return judge(where, owners, ours, place)


def judge(
    where: str,
    owners: Collection[Owner],
    ours: Ours,
    place: Place,
) -> Finding:
    """Say who has the port; see `check`.

    >>> judge("127.0.0.1:80", [Owner(7, "nginx", "nginx.service")], Ours(), Place("q")).message
    '127.0.0.1:80 is taken by pid 7 (nginx): end it, or set another http.port'
    """
    unit = (place.unit, place.scope == "user")
    for owner in owners:
        if owner.pid == ours.pid or (owner.unit, owner.of_user) == unit:
            return ok(NAME, f"{where} is this instance's own (pid {owner.pid})")
    advice = "end it, or set another http.port"
    if not owners:
        number = where.rpartition(":")[2]
        if any(one.rpartition(":")[2] == number for one in ours.addresses):
            return ok(NAME, f"{where} is this instance's own (pid {ours.pid})")
        text = f"{where} is taken by a process that cannot be seen from here"
        fix = None if place.is_root else place.as_root
        if ours.runs and fix is not None:
            text += ", which may be this instance's own"
            return Finding(NAME, State.SKIPPED, text, fix)
        return failed(NAME, f"{text}: {advice}", fix)
    strangers = [owner for owner in owners if owner.pid != 1]
    if not strangers:
        text = f"{where} is held by systemd, for a socket unit of somebody else: {advice}"
        return failed(NAME, text, "systemctl list-sockets")
    owner = strangers[0]
    fix = f"{place.sudo}kill {owner.pid}"
    if owner.unit and not owner.of_user:
        fix = f"{place.sudo}systemctl stop {shlex.quote(owner.unit)}"
    elif owner.unit and not place.is_root:  # who is not that manager's user
        fix = f"systemctl --user stop {shlex.quote(owner.unit)}"
    name = program_name(owner.command)
    text = f"{where} is taken by pid {owner.pid}{f' ({name})' if name else ''}"
    return failed(NAME, f"{text}: {advice}", fix)


def program_name(command: str) -> str:
    """Return what a command line runs, without its other arguments, which may be secrets.

    >>> program_name("/usr/bin/python3 -m http.server 8000"), program_name("nginx: master process")
    ('python3 http.server', 'nginx')
    """
    words = command.split()
    if not words:
        return ""
    name = os.path.basename(words[0]).rstrip(":")
    if not _INTERPRETER.fullmatch(name):
        return name
    script = next((word for word in words[1:] if not word.startswith("-")), "")
    return f"{name} {os.path.basename(script)}".strip()
