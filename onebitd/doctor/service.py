"""The service of an instance: found, and its checks run inside what its unit gives it.

They run in a transient service, by systemd-run(1), that has the unit's own lines. It ends when
nobody waits for it any more, and systemd removes its directory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final

import onebitd
from onebitd.adapters import systemd_tools
from onebitd.core import unit_sandbox
from onebitd.core.errors import OnebitError
from onebitd.doctor import unit
from onebitd.doctor.finding import BadReport, Finding, failed
from onebitd.doctor.place import Place
from onebitd.doctor.program import interpreter_of
from onebitd.doctor.request import Report, Request, report_from

_FIRST_STATUS_OF_SYSTEMD: Final = 200
"""From here on, a status says what systemd could not set up (systemd.exec(5))."""
_STATUSES: Final = {
    200: "CHDIR", 203: "EXEC", 216: "GROUP", 217: "USER", 218: "CAPABILITIES", 226: "NAMESPACE",
    228: "SECCOMP", 233: "RUNTIME_DIRECTORY", 243: "CREDENTIALS",
}  # fmt: skip
_UNKNOWN: Final = re.compile(r"[Uu]nknown assignment:? (\w+)=")
_PRIVATE_CODE: Final = re.compile(r'^sys\.path\.insert\(0, "([^"]+)"\)$', re.MULTILINE)
"""How a program of the Debian package finds modules that no other program imports."""
_PROGRAM_BYTES: Final = 4096
_START: Final = (
    "import sys; first, last = sys.argv[1:]; sys.path[:0] = [first] if first else [];"
    " sys.path.append(last); from onebitd.doctor.inside import main; sys.exit(main())"
)
"""The service's own onebitd does the checks; ours does where it has none."""
_LONGEST_S: Final = 3600
"""A last resort: the checks end when their reader does."""
_STOP_S: Final = 10


class NoService(OnebitError):
    """There is no unit to run the checks in, or this user may not; the message says which."""


@dataclasses.dataclass(frozen=True, slots=True)
class Service:
    """A unit of an instance, loaded by systemd.

    Attributes:
        place: whose manager has it.
        text: the unit and its drop-ins.
        shown: `unit.PROPERTIES`.
        may_enter: this user may run something in its place.
    """

    place: Place
    text: str
    shown: Mapping[str, str]
    may_enter: bool

    @property
    def runs(self) -> bool:
        """The daemon is there, or on its way."""
        return self.shown.get("ActiveState") not in ("inactive", "failed", None)

    @property
    def scope(self) -> list[str]:
        """What tells systemd's programs which manager is meant."""
        return ["--user"] if self.place.scope == "user" else []

    def specifiers(self, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Return what the manager of the unit makes of specifiers."""
        if self.place.scope == "user":
            return unit_sandbox.user_specifiers(environ, os.geteuid())
        return unit_sandbox.SYSTEM_SPECIFIERS

    def directories(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that name the service's directories."""
        name = self.place.instance
        return unit_sandbox.directories(self.text, name, self.specifiers(environ))

    def command(self, environ: Mapping[str, str]) -> tuple[str, list[str]]:
        """Return the daemon's program and its arguments, variables of the unit still in them.

        Without an onebitd in ExecStart=: what starts the instance.
        """
        name = self.place.instance
        words = unit_sandbox.command_line(self.text, name, self.specifiers(environ))
        return unit_sandbox.daemon_arguments(words) or ("", ["--instance", name])


def find(place: Place, environ: Mapping[str, str], uid: int) -> Service:
    """Return the service of an instance: the system's, or that of the user's own manager.

    Raises:
        NoService: there is none.
    """
    if not systemd_tools.is_booted():
        raise NoService("no systemd runs this machine")
    if uid != 0:
        own = _load(dataclasses.replace(place, scope="user"), may_enter=True)
        if own is not None and (_is_used(own) or _has_own_config(place.instance, environ)):
            return own
    of_system = _load(dataclasses.replace(place, scope="system"), may_enter=uid == 0)
    if of_system is None:
        raise NoService(f"there is no unit {place.unit}")
    return of_system


def _load(place: Place, *, may_enter: bool) -> Service | None:
    scope = ["--user"] if place.scope == "user" else []
    listed = ",".join(unit.PROPERTIES)
    done = systemd_tools.run("systemctl", *scope, "show", f"--property={listed}", place.unit)
    shown = unit.parse(done.stdout)
    if done.status != 0 or shown.get("LoadState") not in ("loaded", "masked"):
        return None
    text = systemd_tools.run("systemctl", *scope, "cat", place.unit).stdout
    return Service(place, text, shown, may_enter and shown["LoadState"] == "loaded")


def _is_used(service: Service) -> bool:
    enabled = service.shown.get("UnitFileState") in ("enabled", "enabled-runtime", "linked")
    return enabled or service.runs


def _has_own_config(instance: str, environ: Mapping[str, str]) -> bool:
    home = environ.get("HOME", "")
    base = environ.get("XDG_CONFIG_HOME") or f"{home}/.config"
    return os.path.isfile(f"{base}/onebitd/{instance}.toml")


def checking_command(program: str) -> list[str]:
    """Return the command that runs the checks as a program of onebitd is run.

    That is by its Python, with the options of its first line and the modules that it finds; ours
    where it is no script of Python's.
    """
    try:
        with open(program, "rb") as file:
            head = file.read(_PROGRAM_BYTES)
    except OSError:
        head = b""
    words, private = interpreter_of(head), None
    if words and os.path.basename(words[0]).startswith("python"):
        private = _PRIVATE_CODE.search(head.decode("utf-8", "replace"))
    else:
        words = [sys.executable]
    own = os.path.dirname(os.path.dirname(os.path.abspath(onebitd.__file__)))
    python = [words[0], *(option for word in words[1:] for option in word.split())]
    return [*python, "-P", "-c", _START, private[1] if private else "", own]


def run_inside(service: Service, request: Request, environ: Mapping[str, str]) -> Report:
    """Run the checks in the service's place.

    A failure to get there is a finding. Whatever happens, nothing runs afterwards.
    """
    lines = unit_sandbox.properties(
        service.text, service.place.instance, service.specifiers(environ)
    )
    command = checking_command(service.command(environ)[0])
    left: list[str] = []
    while True:
        done = _run(service, [line for line in lines if _key(line) not in left], command, request)
        unknown = _UNKNOWN.search(done.stderr)
        if unknown is None or unknown[1] in left or not done.status:
            break
        left.append(unknown[1])  # of a newer systemd than this one, which ignores it in a unit
    problem = _problem(service, done, command[0])
    if problem is not None:
        return Report([problem], {})
    return _read(service, done)


def _key(line: str) -> str:
    return line.partition("=")[0]


def _run(
    service: Service, lines: Sequence[str], checks: Sequence[str], request: Request
) -> systemd_tools.Done:
    name = f"onebitctl-doctor-{secrets.token_hex(4)}"
    command = [
        systemd_tools.find("systemd-run") or "systemd-run",
        *service.scope,
        *("--quiet", "--pipe", "--wait", "--collect", "--service-type=simple"),
        f"--unit={name}",
        *(f"--property={line}" for line in (*lines, *_own_lines(service, name))),
        "--",
        *checks,
    ]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is for us: we end the service, it then ends
        )
    except OSError as error:
        return systemd_tools.Done(127, "", f"{command[0]}: {error.strerror}")
    is_over = False
    try:
        said = _talk(process, json.dumps(request.to_json()).encode() + b"\n")
        is_over = True
        return said
    finally:
        if not is_over:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
            systemd_tools.run("systemctl", *service.scope, "--quiet", "stop", f"{name}.service")
            process.kill()
        process.wait()


def _talk(process: subprocess.Popen[bytes], request: bytes) -> systemd_tools.Done:
    """Send the request, leave stdin open, and read both outputs to their ends."""
    import threading

    assert process.stdin is not None  # noqa: S101 - opened as pipes
    assert process.stdout is not None  # noqa: S101
    assert process.stderr is not None  # noqa: S101
    errors: list[bytes] = []
    reader = threading.Thread(target=lambda out: errors.append(out.read()), args=[process.stderr])
    reader.daemon = True
    reader.start()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(request)
        process.stdin.flush()
    output = process.stdout.read()
    status = process.wait()
    reader.join()
    with contextlib.suppress(OSError):
        process.stdin.close()
    process.stdout.close()
    process.stderr.close()
    text = b"".join(errors).decode("utf-8", "replace")
    return systemd_tools.Done(status, output.decode("utf-8", "replace"), text)


def _own_lines(service: Service, name: str) -> list[str]:
    """Return what the checks need beside the unit's lines, and what ends them for sure."""
    lines = [
        f"RuntimeDirectory={name}",
        "RuntimeDirectoryMode=0700",
        f"RuntimeMaxSec={_LONGEST_S}s",
        f"TimeoutStopSec={_STOP_S}s",
        "LogRateLimitIntervalSec=30s",
    ]
    if service.place.scope == "system":
        # Which systemd lets the service itself write to, where they exist.
        for paths in service.directories({}).values():
            lines += [f"ReadWritePaths=-{path}" for path in paths.split(":")]
    return lines


def _problem(service: Service, done: systemd_tools.Done, python: str) -> Finding | None:
    """Say why the checks did not run; None if they did."""
    name = "service.sandbox"
    if done.status == 0:
        return None
    look = _cat_of(service)
    if done.status >= _FIRST_STATUS_OF_SYSTEMD:
        what = _STATUSES.get(done.status, "see systemd.exec(5)")
        text = f"systemd cannot give the service what its unit says ({done.status}/{what})"
        if done.status == 203:
            text += f": {python} cannot be executed in it"
        return failed(name, text, look)
    said = done.stderr.strip().splitlines()
    last = said[-1] if said else f"status {done.status}"
    return failed(name, f"the checks could not be run in the service's place: {last}", look)


def _read(service: Service, done: systemd_tools.Done) -> Report:
    try:
        return report_from(json.loads(done.stdout))
    except (ValueError, BadReport) as error:
        text = f"the checks in the service's place said nothing that makes sense: {error}"
        return Report([failed("service.sandbox", text, _cat_of(service))], {})


def _cat_of(service: Service) -> str:
    return " ".join(["systemctl", *service.scope, "cat", service.place.unit])
