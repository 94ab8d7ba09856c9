"""The inner half of a box: process 1 of the namespaces that tests/systemd/box.py makes.

Started with a JSON object as its one argument:

    {"rootfs": DIR, "binds": [[DIR_OR_FILE, PATH_IN_THE_BOX, "ro" or "rw"], ...]}

and a SOCK_SEQPACKET socket as its standard input. It boots the root file system below a throwaway
overlay and tells what happens, one JSON object a packet:

    {"event": "ready", "cgroup": DIR}  with a pidfd of the box's init: its boot jobs are done;
                                       commands that enter the box go into DIR
    {"event": "off", "status": N}      it was powered off
    {"event": "failed", "detail": S}   it cannot be booted; nothing follows

It obeys `on` (boot the same overlay again) and `cut` (as if the plug was pulled). When the other
side closes the socket the box ends. Mounts and processes end with this process, however it ends;
the one thing outside is a cgroup directory, which a later box removes when this one could not.
Standard library only.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

HOME = Path("/run/box")
CGROUPS = Path("/sys/fs/cgroup")
OURS = "onebitd-box."
REBOOT = 133  # nspawn's way to say so under --keep-unit
# systemd-nspawn forbids what a machine has: bpf(2) is how DeviceAllow= and IPAddressAllow= work,
# mlock(2) what a model that must stay in memory needs.
SYSCALLS = "bpf @memlock"
CONSOLE_TAIL = 60


class NoBoot(Exception):
    """The box cannot be booted; the message says why."""


def mount(*args: str | os.PathLike[str]) -> None:
    """Run mount(8) in this process's own mount namespace; NoBoot."""
    done = subprocess.run(["mount", *args], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoBoot(done.stderr.strip())


def mount_bind(source: str, target: Path) -> None:
    """Show the directory or file `source` at `target`, which must not exist."""
    if os.path.isdir(source):
        target.mkdir()
    else:
        target.touch()
    mount("--bind", source, target)


def mount_all(rootfs: str, sources: Sequence[str]) -> None:
    """Mount what the box consists of below /run/box; NoBoot.

    /run and /tmp become tmpfs in which systemd-nspawn leaves its own things. The sources are bound
    first: they may be below /tmp, and there they have names that no option has to quote.
    """
    mount("-t", "tmpfs", "-o", "mode=0755", "box", "/run")
    for name in ("upper", "work", "root", "binds"):
        (HOME / name).mkdir(parents=True)
    mount_bind(rootfs, HOME / "lower")
    for number, source in enumerate(sources):
        mount_bind(source, HOME / "binds" / str(number))
    mount("-t", "tmpfs", "-o", "mode=1777", "box", "/tmp")
    layers = f"lowerdir={HOME}/lower,upperdir={HOME}/upper,workdir={HOME}/work"
    mount("-t", "overlay", "-o", layers, "box", HOME / "root")
    # The host may have v1 there, or a read-only view; cgroup2 cannot be mounted on itself.
    away = ["umount", "--recursive", "--lazy", os.fspath(CGROUPS)]
    subprocess.run(away, capture_output=True, check=False)
    mount("-t", "cgroup2", "box", CGROUPS)


def populated(cgroup: Path) -> bool:
    """Return whether a process lives in this cgroup or below."""
    return "populated 1" in (cgroup / "cgroup.events").read_text()


def remove_cgroup(cgroup: Path) -> None:
    """Remove a cgroup that has no process any more, from its leaves up; what is in use stays."""
    for folder, _, _ in sorted(os.walk(cgroup), key=lambda entry: -len(entry[0])):
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def remove_forgotten_cgroups() -> None:
    """Remove those of boxes that were killed."""
    for cgroup in CGROUPS.glob(OURS + "*"):
        with contextlib.suppress(OSError):
            if not populated(cgroup):
                remove_cgroup(cgroup)


def enter_own_cgroup() -> Path:
    """Make the cgroup of this box, move this process into it and return it; NoBoot.

    Another box may remove it before it has a process: then it is made again.
    """
    cgroup = CGROUPS / f"{OURS}{time.monotonic_ns():x}"
    for attempt in range(50):
        try:
            (cgroup / "init").mkdir(parents=True, exist_ok=True)
            (cgroup / "init" / "cgroup.procs").write_text("0")
        except OSError as error:  # ENOENT, or ENODEV: removed between open and write
            if attempt == 49:
                raise NoBoot(f"cannot use the cgroup {cgroup}: {error}") from error
        else:
            break
    return cgroup


def box_cgroup(leader: int) -> Path:
    """Return the cgroup that the box sees as its root; its init is in `init.scope` below."""
    lines = Path(f"/proc/{leader}/cgroup").read_text().splitlines()
    (path,) = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    return (CGROUPS / path).parent


def tail(path: Path) -> str:
    """Return the end of the console's log, escape sequences removed."""
    text = re.sub(r"\x1b\[[0-9;?!]*[A-Za-z]|\r", "", path.read_text(errors="replace"))
    return "\n".join(text.splitlines()[-CONSOLE_TAIL:])


class Inside:
    """One box: at most one running systemd-nspawn, and who is told about it."""

    def __init__(self, control: socket.socket, nspawn_args: Sequence[str], cgroup: Path) -> None:
        self._control = control
        self._args = nspawn_args
        self._cgroup = cgroup
        self._boots = 0
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._leader = 0
        self._ready = False
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(os.fspath(HOME / "notify"))
        self._notify.setblocking(False)

    def tell(self, fds: Sequence[int] = (), **event: Any) -> None:
        """Send one event, file descriptors with it."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._control.sendmsg([json.dumps(event).encode()], ancillary)

    def boot(self) -> None:
        """Start systemd-nspawn, in a cgroup of its own: it leaves its two subgroups behind."""
        while self._read_notify():
            pass  # what the previous boot said
        self._boots += 1
        self._leader, self._ready = 0, False
        cgroup = self._cgroup / f"boot-{self._boots}"
        cgroup.mkdir()
        with (HOME / "console").open("wb") as console:
            self._nspawn = subprocess.Popen(
                ["systemd-nspawn", *self._args],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env={
                    "PATH": os.environ.get("PATH", os.defpath),
                    "NOTIFY_SOCKET": os.fspath(HOME / "notify"),
                },
                preexec_fn=lambda: (cgroup / "cgroup.procs").write_text("0"),
            )

    def cut(self) -> None:
        """Kill all that runs: systemd-nspawn alone would leave the box's init for a while."""
        if self._nspawn is not None:
            (self._cgroup / f"boot-{self._boots}" / "cgroup.kill").write_text("1")

    def run(self) -> None:
        """Boot, and tell and obey until the other side has closed the socket."""
        self.boot()
        while True:
            poll = select.poll()
            poll.register(self._control, select.POLLIN)
            poll.register(self._notify, select.POLLIN)
            pidfd = None
            if self._nspawn is not None:
                pidfd = os.pidfd_open(self._nspawn.pid)
                poll.register(pidfd, select.POLLIN)
            readable = [fd for fd, _ in poll.poll()]
            if pidfd is not None:
                os.close(pidfd)
            if self._notify.fileno() in readable:
                self._heard(self._read_notify())
            if pidfd in readable:
                self._ended()
            if self._control.fileno() in readable and not self._obey():
                return

    def close(self) -> None:
        """End the box and remove its cgroup."""
        self.cut()
        if self._nspawn is not None:
            self._nspawn.wait()
        (CGROUPS / "cgroup.procs").write_text("0")
        give_up = time.monotonic() + 5
        while populated(self._cgroup) and time.monotonic() < give_up:
            time.sleep(0.005)
        remove_cgroup(self._cgroup)

    def _read_notify(self) -> dict[str, str]:
        """Return the next message for NOTIFY_SOCKET, empty when there is none."""
        try:
            lines = self._notify.recv(65536).decode(errors="replace").splitlines()
        except BlockingIOError:
            return {}
        return {name: value for name, _, value in (line.partition("=") for line in lines)}

    def _heard(self, fields: dict[str, str]) -> None:
        """Take in a message of systemd-nspawn; READY=1 comes again after each daemon-reload."""
        self._leader = int(fields.get("X_NSPAWN_LEADER_PID", self._leader))
        if fields.get("READY") != "1" or not self._leader or self._ready:
            return
        self._ready = True
        clients = box_cgroup(self._leader) / "outside"
        clients.mkdir()
        pidfd = os.pidfd_open(self._leader)
        self.tell([pidfd], event="ready", cgroup=os.fspath(clients))
        os.close(pidfd)

    def _ended(self) -> None:
        assert self._nspawn is not None
        status = self._nspawn.wait()
        self._nspawn = None
        if status == REBOOT:
            self.boot()
        elif self._ready:
            self.tell(event="off", status=status)
        else:
            raise NoBoot(
                f"systemd-nspawn ended with status {status}; the console's last lines:\n"
                + tail(HOME / "console")
            )

    def _obey(self) -> bool:
        """Do what the other side says; False when it has gone."""
        order = self._control.recv(64)
        if order == b"on" and self._nspawn is None:
            self.boot()
        elif order == b"cut":
            self.cut()
        elif order == b"console":
            self.tell(event="console", detail=tail(HOME / "console"))
        return order != b""


def nspawn_args(binds: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return the arguments of systemd-nspawn for a box with these binds.

    Not registered and in no unit of its own: it must work where the host has no systemd.
    """
    options = {"ro": "--bind-ro", "rw": "--bind"}
    return [
        *("--quiet", "--boot", f"--directory={HOME}/root", "--machine=box"),
        *("--register=no", "--keep-unit", "--private-network", "--notify-ready=yes"),
        *("--console=read-only", "--link-journal=no", "--resolv-conf=off", "--timezone=off"),
        f"--system-call-filter={SYSCALLS}",
        *(
            f"{options[mode]}={HOME}/binds/{number}:{target}"
            for number, (_, target, mode) in enumerate(binds)
        ),
    ]


def main() -> NoReturn:
    """Be the box until the socket closes."""
    config = json.loads(sys.argv[1])
    control = socket.socket(fileno=0)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    inside = None
    try:
        mount_all(config["rootfs"], [source for source, _, _ in config["binds"]])
        remove_forgotten_cgroups()
        cgroup = enter_own_cgroup()
        inside = Inside(control, nspawn_args(config["binds"]), cgroup)
        inside.run()
    except (NoBoot, OSError) as error:
        with contextlib.suppress(OSError):
            control.send(json.dumps({"event": "failed", "detail": str(error)}).encode())
    finally:
        if inside is not None:
            inside.close()
    sys.exit(0)


if __name__ == "__main__":
    main()
