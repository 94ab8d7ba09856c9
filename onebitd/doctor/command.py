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
from typing import Final

from onebitd.adapters.config_file import path_for
from onebitd.core import paths
from onebitd.doctor import (
    by_hand,
    daemon,
    finding,
    outside,
    page,
    service,
    sight,
)
from onebitd.doctor.by_hand import Started
from onebitd.doctor.finding import Finding, State
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
    socket = None if found is None else _socket(found, environ)
    started = None
    if options.config is None:
        started, socket = _started(found, place, environ, socket)
    if started is not None:
        found, why_here = None, f"the daemon, pid {started.pid}, was started by hand"
        place = dataclasses.replace(place, config_file=started.config_file or file)
    if found is not None:
        place = found.place
    is_inside = found is not None and not why_here
    place = dataclasses.replace(place, inside=is_inside)
    request = _request(options, place, found, environ, started, socket)
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
    for_service = found is not None and not options.here
    checks = outside.amended(report.findings, report.facts, place, for_service=for_service)
    checks += outside.check(found, report.facts, place, environ, socket)
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


def _socket(found: Service, environ: Mapping[str, str]) -> str:
    """Return where a service's control socket is when it runs."""
    return _socket_in({**environ, **found.directories(environ)}, found.place)


def _socket_in(environ: Mapping[str, str], place: Place) -> str:
    runtime = paths.runtime_dir(place.instance, environ, os.geteuid())
    return f"{runtime}/{paths.CONTROL_SOCKET}"


def _started(
    found: Service | None, place: Place, environ: Mapping[str, str], socket: str | None
) -> tuple[Started | None, str | None]:
    """Return how the daemon was started, if it runs and is not the service; and its socket.

    Only where nobody's service would be started by the question.
    """
    if found is not None and (found.runs or _rests(found.place)):
        return None, socket
    looked_at = [None] if socket is None else [_socket_in(environ, place), socket]
    for one in dict.fromkeys(looked_at):
        status, _ = daemon.ask(place.instance, environ, one)
        pid = None if status is None else status.get("pid")
        started = by_hand.started(pid) if type(pid) is int else None
        if started is not None:
            return started, one
    return None, socket


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
    socket: str | None,
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
    return Request(place, tuple(argv), variables, socket, quick=options.quick, runs=runs)


def _rests(place: Place) -> bool:
    """Tell whether systemd holds the control socket: to ask there would start the service."""
    return outside.is_active(place, f"onebitd@{place.instance}.socket")


def _is_denied(checks: Sequence[Finding]) -> bool:
    return any(
        one.name == "config" and one.state is State.FAILED and _DENIED in one.message
        for one in checks
    )


def _progress(text: str) -> None:
    if cli_terminal.can_move(sys.stderr):
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
