"""A real systemd, booted in a container from a Debian root file system, driven from outside.

    with booted(suite.rootfs, binds_ro={wheels: "/srv/wheels"}) as box:
        box.run("systemctl", "start", "onebitd@qwen")
        assert box.show("onebitd@qwen", "ActiveState") == {"ActiveState": "active"}

Each box has its own overlay (in memory, gone at the end), its own loopback interface and no other
network. Several may run at once. It lives in private mount and PID namespaces that end with the
test process, also when that is killed. `make test` makes the root file systems
(tests/tools/fetch_boxes.py); `Suite.require()` says why a test cannot have one.

What a box does not have: limits of memory and tasks, hard limits above the host's, udev, sysctls
of its own, device classes that the host has not.
Standard library only: the fetcher uses this module before anything is installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.llama_builds import ROOT

BOXES_DIR = ROOT / ".venv" / "boxes"
PROGRAMS = ("systemd-nspawn", "unshare", "nsenter", "setpriv", "mount")
INIT = Path(__file__).with_name("box_init.py")
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "SHELL": "/bin/sh",
    "TERM": "dumb",
}
BOOT_S = 60.0
JOURNAL_TAIL = 80


class BoxFailed(Exception):
    """The box itself did not boot, or has gone; the message says why."""


class CommandFailed(AssertionError):
    """A command in the box ended with another status than 0, or did not end in time."""


def give_up(reason: str) -> NoReturn:
    """Skip the calling test; under CI=true fail it."""
    import pytest

    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@dataclass(frozen=True)
class Suite:
    """A Debian release: its name, the version of its python3 and of its systemd."""

    name: str
    python: str
    systemd: int

    @property
    def rootfs(self) -> Path:
        """The root file system that boxes of this suite start from."""
        return BOXES_DIR / self.name

    @property
    def wheels(self) -> Path:
        """The folder with onebitd's dependencies for its python3."""
        return BOXES_DIR / f"wheels-{self.python}"

    def require(self) -> None:
        """Skip (under CI fail) the calling test unless such a box can be booted here."""
        if os.geteuid() != 0:
            give_up("booting a systemd box needs root")
        for program in PROGRAMS:
            if shutil.which(program) is None:
                give_up(f"{program} is not installed; .ci/run names the package that has it")
        for path in (self.rootfs, self.wheels):
            if not path.exists():
                give_up(f"{path.relative_to(ROOT)} is missing: run make test as root")


SUITES = (Suite("bookworm", "3.11", 252), Suite("trixie", "3.13", 257))


@dataclass(frozen=True)
class Done:
    """How a command ended: its exit status (negative: the signal's number), and what it said."""

    status: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Account:
    """A line of the box's /etc/passwd."""

    name: str
    uid: int
    gid: int
    home: str


class Client(subprocess.Popen[str]):
    """A program that runs in the box while the test goes on.

    Signals go to it and to what it started. wait() then tells how the program that entered the box
    ended, which a signal ends at once: the end of stdout tells when the client is gone.
    """

    def send_signal(self, sig: int) -> None:
        """Send a signal to the whole process group; nothing when it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, sig)


class Box:
    """A booted box. `booted()` makes one and ends it.

    Commands enter its namespaces by nsenter(1) with a login's environment and nothing of the
    test's. They are in no unit of the box, but in a cgroup of it: D-Bus services refuse to serve
    who comes from outside.
    """

    def __init__(self, control: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self._control = control
        self._process = process
        self._leader: int | None = None  # a pidfd of the box's init
        self._clients = ""  # the cgroup of commands, as the process that made the box sees it

    # -- commands

    def run(
        self,
        *argv: str,
        input: str | None = None,  # noqa: A002 - as subprocess.run() calls it
        timeout_s: float = 60.0,
        check: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> Done:
        """Run a command as root and return how it ended.

        Raises CommandFailed when it takes longer than `timeout_s` (it is killed then), and when
        its status is not 0 unless `check` is false. 127: no such program.
        """
        return self._finish(self._as_root(argv, env), input, timeout_s, check)

    def run_as(
        self,
        user: str,
        *argv: str,
        input: str | None = None,  # noqa: A002 - as subprocess.run() calls it
        timeout_s: float = 60.0,
        check: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> Done:
        """Run a command as `user`, in its home and with the groups it has now; as run().

        XDG_RUNTIME_DIR is set when it exists, as it does for a user who lingers.
        """
        return self._finish(self._as_user(user, argv, env), input, timeout_s, check)

    def spawn(
        self, *argv: str, user: str | None = None, env: Mapping[str, str] | None = None
    ) -> Client:
        """Start a command as root or `user`; stdin, stdout and stderr are pipes.

        The caller waits for it and closes its pipes (`with`); kill() also ends what it started.
        """
        command = self._as_root(argv, env) if user is None else self._as_user(user, argv, env)
        return start(command)

    def account(self, user: str) -> Account:
        """Return what the box knows of a user; CommandFailed when there is none."""
        fields = self.run("getent", "passwd", user).stdout.rstrip("\n").split(":")
        return Account(fields[0], int(fields[2]), int(fields[3]), fields[5])

    # -- files

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file as root, its missing parents too; an existing one is replaced at once."""
        # install(1) alone takes the old one away first, and whoever reads it just then finds none.
        script = 'install -D -m "$1" /dev/stdin "$2.new" && mv -T -- "$2.new" "$2"'
        self.run("sh", "-c", script, "-", f"{mode:o}", path, input=text)

    def read(self, path: str) -> str:
        """Return the text of a file; CommandFailed when it cannot be read."""
        return self.run("cat", "--", path).stdout

    def exists(self, path: str) -> bool:
        """Return whether a name is there; a dangling symbolic link is."""
        return (
            self.run("sh", "-c", '[ -e "$1" ] || [ -L "$1" ]', "-", path, check=False).status == 0
        )

    # -- systemd

    def journal(self, *args: str) -> list[dict[str, Any]]:
        """Return the records that `journalctl -o json` prints for `args`, oldest first.

        A value is a string; a list of strings where a record has the field more than once.
        """
        self.run("journalctl", "--sync")
        done = self.run("journalctl", "--output=json", "--all", "--no-pager", *args)
        return [
            {name: text_of(value) for name, value in json.loads(line).items()}
            for line in done.stdout.splitlines()
        ]

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        """Return properties of a unit as `systemctl show` prints them; all when none is named."""
        wanted = [f"--property={name}" for name in properties]
        lines = self.run("systemctl", "show", *wanted, "--", unit).stdout.splitlines()
        return {name: value for name, _, value in (line.partition("=") for line in lines)}

    def wait_until(
        self, condition: Callable[[], Any] | str, what: str, timeout_s: float = 30.0
    ) -> Any:
        """Return the first true value of `condition`; AssertionError when there is none in time.

        A string is a shell command that is true when its status is 0; its Done is returned.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            found = self._try(condition) if isinstance(condition, str) else condition()
            if found:
                return found
            assert time.monotonic() < deadline, f"timed out waiting: {what}"
            time.sleep(0.1)  # a look is four programs

    def diagnosis(self) -> str:
        """Return the journal's last lines, for the report of a test that failed; never raises."""
        try:
            return self.run(
                *("journalctl", "--no-pager", f"--lines={JOURNAL_TAIL}", "--output=short-precise"),
                check=False,
                timeout_s=10,
            ).stdout
        except (BoxFailed, CommandFailed, OSError) as error:
            return f"the box does not tell its journal: {error}"

    # -- power

    def reboot(self, timeout_s: float = BOOT_S) -> None:
        """Shut down in order and boot again from the same overlay: what was written stays."""
        self._follow()
        self._await("ready", timeout_s, first=lambda: self._power("reboot"))

    def poweroff(self, timeout_s: float = BOOT_S) -> None:
        """Shut down in order; nothing runs until power_on()."""
        self._follow()
        self._await("off", timeout_s, first=lambda: self._power("poweroff"))

    def power_cut(self, timeout_s: float = BOOT_S) -> None:
        """Kill everything at once, as a plug that is pulled; power_on() boots again."""
        self._follow()
        self._await("off", timeout_s, first=lambda: self._control.send(b"cut"))

    def power_on(self, timeout_s: float = BOOT_S) -> None:
        """Boot the same overlay again."""
        self._await("ready", timeout_s, first=lambda: self._control.send(b"on"))

    # -- the inside of this class

    def wait_booted(self, timeout_s: float) -> None:
        """Return when the first boot is complete; BoxFailed."""
        self._await("ready", timeout_s)

    def close(self) -> None:
        """End the box and wait until nothing of it is left."""
        self._let_go()
        self._control.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _power(self, verb: str) -> None:
        # The command goes down with the box: how it ends says nothing.
        with contextlib.suppress(CommandFailed):
            self._finish(self._as_root(["systemctl", verb], None), None, 20, check=False)

    def _try(self, command: str) -> Done | None:
        done = self.run("sh", "-c", command, check=False)
        return done if done.status == 0 else None

    def _as_root(self, argv: Sequence[str], env: Mapping[str, str] | None) -> list[str]:
        login = {"HOME": "/root", "USER": "root", "LOGNAME": "root"}
        return [*self._enter(), *environment(login, env, "/root"), *argv]

    def _as_user(self, user: str, argv: Sequence[str], env: Mapping[str, str] | None) -> list[str]:
        account = self.account(user)
        login = {"HOME": account.home, "USER": account.name, "LOGNAME": account.name}
        runtime = f"/run/user/{account.uid}"
        if self.exists(runtime):
            login["XDG_RUNTIME_DIR"] = runtime
        home = account.home if self.exists(account.home) else "/"
        become = [f"--reuid={account.uid}", f"--regid={account.gid}", "--init-groups", "--"]
        return [*self._enter(), *environment(login, env, home), "setpriv", *become, *argv]

    def _enter(self) -> list[str]:
        """Return the words before a command that make it one of the box's."""
        self._follow()
        if self._leader is None:
            raise BoxFailed("the box is off")
        pid = pid_of(self._leader)
        kinds = ("mount", "uts", "ipc", "net", "pid", "cgroup")
        root = f"/proc/{pid}/root"
        flags = [f"--target={pid}", *(f"--{kind}" for kind in kinds), f"--root={root}"]
        procs = f"/proc/{self._process.pid}/root{self._clients}/cgroup.procs"
        join = ["sh", "-c", 'echo 0 >"$0" && exec "$@"', procs]
        return [*join, "nsenter", *flags, f"--wd={root}", "--"]

    @staticmethod
    def _finish(argv: Sequence[str], text: str | None, timeout_s: float, check: bool) -> Done:
        with start(argv) as client:
            try:
                stdout, stderr = client.communicate(text or "", timeout_s)
            except BaseException as error:
                client.kill()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                stdout, stderr = client.communicate()
                late = f"did not end in {timeout_s:g} s"
                raise CommandFailed(account_of(argv, late, stdout, stderr)) from None
        if check and client.returncode != 0:
            status = f"ended with status {client.returncode}"
            raise CommandFailed(account_of(argv, status, stdout, stderr))
        return Done(client.returncode, stdout, stderr)

    def _follow(self) -> None:
        """Take in what happened since: a test may have rebooted the box by itself."""
        while self._next_event(0.0) is not None:
            pass

    def _await(
        self, wanted: str, timeout_s: float, first: Callable[[], object] | None = None
    ) -> None:
        """Do `first` and wait for an event; BoxFailed when another ends the wait, or none comes."""
        if first is not None:
            first()
        deadline = time.monotonic() + timeout_s
        while True:
            event = self._next_event(max(0.0, deadline - time.monotonic()))
            if event is None:
                raise BoxFailed(f"not {wanted} after {timeout_s:g} s:\n{self._console()}")
            if event == wanted:
                return

    def _console(self) -> str:
        """Return the last lines of the box's console."""
        self._control.send(b"console")
        self._control.settimeout(5.0)
        with contextlib.suppress(OSError):
            return str(json.loads(self._control.recv(1 << 20)).get("detail", ""))
        return "(its console cannot be had)"

    def _next_event(self, timeout_s: float) -> str | None:
        """Return the next event's name, None when there is none in time; BoxFailed at the end."""
        self._control.settimeout(timeout_s)
        try:
            data, fds, _, _ = socket.recv_fds(self._control, 1 << 20, 1)
        except (BlockingIOError, TimeoutError):
            return None
        except OSError as error:
            raise BoxFailed(f"the box has gone: {error}") from error
        message = json.loads(data or b'{"event": "failed", "detail": "it was killed"}')
        event = str(message["event"])
        self._let_go()
        if event == "ready":
            (self._leader,) = fds
            os.set_inheritable(self._leader, False)
            self._clients = str(message["cgroup"])
        elif event == "failed":
            raise BoxFailed(f"the box has gone: {message['detail']}")
        return event

    def _let_go(self) -> None:
        if self._leader is not None:
            os.close(self._leader)
            self._leader = None


def text_of(value: Any) -> Any:
    """Return a journal field's value; what is not UTF-8 comes as a list of bytes."""
    if isinstance(value, list):
        if all(isinstance(item, int) for item in value):
            return bytes(value).decode(errors="replace")
        return [text_of(item) for item in value]
    return value


def environment(login: Mapping[str, str], extra: Mapping[str, str] | None, home: str) -> list[str]:
    """Return the env(1) command that gives a program a login's variables and nothing else."""
    variables = {**ENVIRONMENT, **login, **(extra or {})}
    words = [f"{name}={value}" for name, value in variables.items()]
    return ["env", "--ignore-environment", f"--chdir={home}", *words]


def start(argv: Sequence[str]) -> Client:
    """Start a command in a process group of its own, with pipes."""
    return Client(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )


def account_of(argv: Sequence[str], ending: str, stdout: str, stderr: str) -> str:
    """Return the message about a command that failed: the command, its end, what it said."""
    words = list(argv)
    command = shlex.join(words[words.index("env") :])
    return f"{command}\n{ending}\nstdout:\n{stdout[-4000:]}\nstderr:\n{stderr[-4000:]}"


def pid_of(pidfd: int) -> int:
    """Return the process id, as this process sees it, behind a pidfd; BoxFailed when it ended."""
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Pid" and int(value) > 0:
            return int(value)
    raise BoxFailed("the box's init has ended")


@contextlib.contextmanager
def booted(
    rootfs: Path,
    *,
    binds_ro: Mapping[Path, str] | None = None,
    binds: Mapping[Path, str] | None = None,
    timeout_s: float = BOOT_S,
) -> Iterator[Box]:
    """Boot a throwaway overlay of `rootfs`, yield the box when its boot is complete, and end it.

    `binds_ro` and `binds` show directories or files of the host in the box. Raises BoxFailed. An
    error that leaves the block takes the journal's last lines along as a note. Needs root.
    """
    shown = [
        *((os.fspath(host), path, "ro") for host, path in (binds_ro or {}).items()),
        *((os.fspath(host), path, "rw") for host, path in (binds or {}).items()),
    ]
    config = json.dumps({"rootfs": os.fspath(rootfs), "binds": shown})
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL", "--"),
                *("unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"),
                *("--mount-proc", "--", sys.executable, "-I", "-S", os.fspath(INIT), config),
            ],
            stdin=theirs.fileno(),
            start_new_session=True,  # Ctrl-C is for the tests, which then end the box
        )
    box = Box(ours, process)
    try:
        box.wait_booted(timeout_s)
        try:
            yield box
        except Exception as error:
            error.add_note(f"the box's journal ends with:\n{box.diagnosis()}")
            raise
    finally:
        box.close()
