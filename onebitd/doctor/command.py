"""`onebitctl doctor`: has the checks run where the service runs, adds what is seen from outside."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Final

from onebitd.adapters import systemd_tools
from onebitd.adapters.config_file import path_for
from onebitd.client import AccessDenied, ClientError, ControlClient
from onebitd.core import paths
from onebitd.doctor import (
    by_hand,
    daemon,
    devices,
    finding,
    lock,
    page,
    port,
    service,
    sight,
    unit,
)
from onebitd.doctor.by_hand import Started
from onebitd.doctor.finding import Finding, State, failed, skipped
from onebitd.doctor.place import Place
from onebitd.doctor.request import Report, Request
from onebitd.doctor.service import NoService, Service
from onebitd.surfaces import cli_terminal

EXIT_DENIED: Final = 4
_ENDINGS: Final = (signal.SIGTERM, signal.SIGHUP)
_DENIED: Final = "permission denied"


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What was asked for; see onebitctl(1).

    Attributes:
        config: another configuration file than the instance's, absolute.
    """

    instance: str
    config: str | None
    here: bool
    quick: bool
    json: bool


def run(options: Options) -> int:
    """Run the checks and print the report; return the exit status.

    A KeyboardInterrupt ends what was started.
    """
    environ, uid = dict(os.environ), os.geteuid()
    file = options.config or str(path_for(options.instance, environ))
    place = Place(options.instance, is_root=uid == 0, config_file=file)
    found, why_here = _find(options, place, environ, uid)
    started = _started(found, place, environ) if options.config is None else None
    if started is not None:
        found, why_here = None, f"the daemon, pid {started.pid}, was started by hand"
        place = dataclasses.replace(place, config_file=started.config_file or file)
    if found is not None:
        place = found.place
    is_inside = found is not None and not why_here
    place = dataclasses.replace(place, inside=is_inside)
    request = _request(options, place, found, environ, started)
    _progress(f"checking {'inside ' + place.unit if is_inside else 'here'} ...")
    try:
        with _ended_in_order():
            if is_inside and found is not None:
                entered = dataclasses.replace(found, place=place)
                report = service.run_inside(entered, request, environ)
            else:
                report = _run_here(request, None if started is None else started.directory)
    finally:
        _progress("")
    checks = [_amended(one, report.facts, place) for one in report.findings]
    checks += _from_outside(found, report.facts, place, environ)
    checks = finding.in_order(checks)
    where = _where(place, why_here)
    if options.json:
        document = {
            "instance": place.instance,
            "where": "service" if is_inside else "here",
            "checks": [one.to_json() for one in checks],
        }
        cli_terminal.write(json.dumps(document) + "\n")
    else:
        text = page.page(where, checks, colour=cli_terminal.has_colour())
        cli_terminal.write(text + "\n")
    if not is_inside and uid != 0 and _is_denied(checks):
        return EXIT_DENIED
    return finding.exit_status(checks)


def _started(found: Service | None, place: Place, environ: Mapping[str, str]) -> Started | None:
    """Return how the daemon was started, if it runs and is not the service."""
    if found is not None and (found.runs or _rests(found.place)):
        return None
    status, _ = _ask(None, place, environ)
    pid = None if status is None else status.get("pid")
    return by_hand.started(pid) if type(pid) is int else None


def _run_here(request: Request, directory: str | None) -> Report:
    import trio

    from onebitd.doctor import inside  # with numpy and half of the daemon

    if directory is not None:  # from where its relative paths are meant
        with contextlib.suppress(OSError):
            os.chdir(directory)
    try:
        return trio.run(inside.examine, request, strict_exception_groups=True)
    except BaseExceptionGroup as group:
        if group.subgroup(KeyboardInterrupt) is None:
            raise
        raise KeyboardInterrupt from None


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end the block as Ctrl-C does, and this process after it."""
    caught: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        caught.append(number)
        signal.raise_signal(signal.SIGINT)  # whose handler knows when the event loop may be left

    before = {number: signal.signal(number, interrupt) for number in _ENDINGS}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if caught:
            os.kill(os.getpid(), caught[0])


def _find(
    options: Options, place: Place, environ: Mapping[str, str], uid: int
) -> tuple[Service | None, str]:
    """Return the service, if there is one, and why the checks run here; "" if they do not."""
    try:
        found = service.find(place, environ, uid)
    except NoService as reason:
        return None, str(reason)
    if options.here:
        return found, "--here"
    if not found.may_enter:
        if found.shown.get("LoadState") == "masked":
            return found, f"{found.place.unit} is masked"
        return found, f"only root may take the place of {found.place.unit}"
    return found, ""


def _where(place: Place, why_here: str) -> str:
    if not why_here:
        return f"{place.instance}: checked inside {place.unit}, as the service sees it"
    return f"{place.instance}: checked here, as {sight.own_name()}, not as a service ({why_here})"


def _request(
    options: Options,
    place: Place,
    found: Service | None,
    environ: Mapping[str, str],
    started: Started | None,
) -> Request:
    argv: Sequence[str] = ["--instance", options.instance]
    variables: Mapping[str, str] = {}
    if place.inside and found is not None:
        argv = found.command(environ)[1]
        variables = found.directories(environ)
    if started is not None:
        argv, variables = started.argv, started.environ
    if options.config is not None:
        argv = ["--config", options.config]
    runs = found is None or found.runs
    return Request(place, tuple(argv), variables, quick=options.quick, runs=runs)


def _amended(one: Finding, facts: Mapping[str, Any], place: Place) -> Finding:
    """Say of a file that is missing inside and is there outside that the sandbox hides it."""
    path = (facts.get("missing") or {}).get(one.name)
    if not place.inside or one.state is not State.FAILED or not path or not os.path.exists(path):
        return one
    what = one.message.partition(f" {path}")[0]
    return failed(one.name, sight.hidden_sentence(what, path), sight.show_fix(place, path))


def _from_outside(
    found: Service | None, facts: Mapping[str, Any], place: Place, environ: Mapping[str, str]
) -> list[Finding]:
    """Return what is checked from here: unit, daemon, ports, users of devices, the lock's place."""
    status, why_not = _ask(found, place, environ)
    findings = [*daemon.judge(status, why_not, place), *devices.check_users()]
    if facts:
        ours = [status["pid"]] if status is not None and "pid" in status else []
        findings += _ports(facts, ours, place)
    if place.inside:
        compared = lock.compare(facts.get("lock_directory"), place)
        findings += [compared] if compared is not None else []
    if found is None:
        findings.append(skipped("service", "there is no service"))
        return findings
    masked = unit.masked_drop_ins(place, unit.directories(place, environ))
    return [*findings, *unit.judge(found.shown, masked, facts, place)]


def _ports(facts: Mapping[str, Any], ours: Sequence[int], place: Place) -> list[Finding]:
    host, number = str(facts.get("host")), int(facts.get("port") or 0)
    has_unit = _has_socket_unit(place)
    found = [port.check(host, number, ours, place, has_socket_unit=has_unit)]
    host, colon, text = str(facts.get("metrics") or "").rpartition(":")
    if colon and text.isdigit():
        metrics = port.check(host, int(text), ours, place)
        message = metrics.message.replace("http.port", "metrics.listen")
        found.append(dataclasses.replace(metrics, name="port.metrics", message=message))
    return found


def _has_socket_unit(place: Place) -> bool:
    name = f"onebitd-http@{place.instance}.socket"
    return place.scope == "system" and _is_active(place, name)


def _rests(place: Place) -> bool:
    """Tell whether systemd holds the control socket: to ask there would start the service."""
    return _is_active(place, f"onebitd@{place.instance}.socket")


def _is_active(place: Place, unit_name: str) -> bool:
    user = ("--user",) if place.scope == "user" else ()
    return systemd_tools.run("systemctl", *user, "is-active", "--quiet", unit_name).status == 0


def _ask(
    found: Service | None, place: Place, environ: Mapping[str, str]
) -> tuple[dict[str, Any] | None, str]:
    """Return the daemon's status, or why it has none."""
    if found is not None and not found.runs:
        return None, "it does not run"
    given = {} if found is None else found.directories(environ)
    runtime = paths.runtime_dir(place.instance, {**environ, **given}, os.geteuid())
    try:
        return ControlClient(f"{runtime}/{paths.CONTROL_SOCKET}").status(), ""
    except AccessDenied as error:
        return None, str(error)
    except ClientError:
        return None, "it does not run"


def _is_denied(checks: Sequence[Finding]) -> bool:
    return any(
        one.name == "config" and one.state is State.FAILED and _DENIED in one.message
        for one in checks
    )


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
