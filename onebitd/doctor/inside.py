"""The checks that have to run as the service does: with its user, its groups, limits and sandbox.

`onebitctl doctor` starts this module there, with a request of one line of JSON on stdin, which
stays open as long as somebody waits for the report; that is one line of JSON on stdout:
`{"checks": [...], "facts": {...}}`. Without a service it is called in the command's own process.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import structlog
import trio

from onebitd.adapters.config_file import check_files
from onebitd.client import NoDaemon
from onebitd.core import paths, unit_sandbox
from onebitd.core.config import Config
from onebitd.core.errors import ConfigError, UsageError
from onebitd.doctor import daemon, decoder, devices, kept, lock, model, provider, sight, space
from onebitd.doctor.finding import Finding, State, failed, ok, skipped
from onebitd.doctor.place import Place, folded
from onebitd.doctor.request import Report, Request, request_from
from onebitd.doctor.trial import Trials
from onebitd.surfaces import daemon_args
from onebitd.surfaces.launch import slots_dir

_CHECKED_ELSEWHERE: Final = ("model.path:", "provider.program:", "provider.elfs:", "lock.path:")
_LLAMA_SERVER: Final = "backend.llama_server:"
_PROGRAMS: Final = ("decoder.program", "provider.program")


def main() -> int:
    """Read the request, print the report; ends early when stdin does."""
    request = request_from(json.loads(sys.stdin.buffer.readline()))
    report = trio.run(_while_wanted, request, strict_exception_groups=True)
    if report is None:
        return 1
    sys.stdout.write(json.dumps(report.to_json()) + "\n")
    return 0


async def _while_wanted(request: Request) -> Report | None:
    report = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_cancel_at_end_of, 0, nursery.cancel_scope)
        report = await examine(request)
        nursery.cancel_scope.cancel()
    return report


async def _cancel_at_end_of(descriptor: int, scope: trio.CancelScope) -> None:
    while True:
        await trio.lowlevel.wait_readable(descriptor)
        if not os.read(descriptor, 4096):
            scope.cancel()
            return


async def examine(request: Request) -> Report:
    """Run the checks, one after the other.

    A cancel ends what was started, and leaves nothing behind.
    """
    _drop_log_lines()
    environ = {**os.environ, **request.environ}
    here = request.place
    nodes = devices.read_nodes()
    report = Report([], {"nodes": [one.path for one in nodes]})
    config = _load(request, environ, report.findings)
    report.findings += devices.check(nodes, devices.Who.this_process(), here)
    if config is None:
        report.findings.append(skipped("model", "the configuration says what it is"))
        return report
    report.facts.update(_facts(config))
    found, header = model.check(config.model.path, config.model.ctx_size, here)
    report.findings += found
    program_found, program = decoder.check_program(config, here, environ)
    report.findings += program_found
    provider_found = provider.check_program(config, here, environ)
    report.findings += provider_found
    report.findings.append(lock.check(config.lock, here))
    status, denied = _ask_daemon(config, request, environ) if request.runs else (None, None)
    is_sound = not any(one.state is State.FAILED for one in (*found, *provider_found))
    why_not = None if is_sound and program is not None else "not started: see above"
    if denied is not None:
        why_not = f"a daemon runs, and does not tell: {denied}"
    if request.quick:
        why_not = "--quick: no model was loaded, and no provider run"
    learned = None
    if why_not is not None:
        report.findings += _not_started(config, why_not)
    elif program is not None and header is not None:
        window = header.header.sliding_window
        with _home(environ) as home:
            trials = Trials(config, here, environ, home, program, window, report.findings)
            learned = await trials.run(status)
    size = learned or (None if header is None else header.bytes_per_token)
    runtime = Path(paths.runtime_dir(config.instance, environ, os.geteuid()))
    if request.socket is not None:
        runtime = Path(request.socket).parent
    ctx_size = _ctx_size(config, status, header)
    if config.provider.program is not None:
        where = str(slots_dir(config, runtime))
        report.findings.append(space.check(where, ctx_size, size, here))
    report.findings += kept.check(config, environ, here)
    return report


def _not_started(config: Config, why: str) -> list[Finding]:
    names = ["decoder"] if config.provider.program is None else ["decoder", "provider.run"]
    return [skipped(name, why) for name in names]


def _drop_log_lines() -> None:
    """Keep the log of what is used here off stdout: the findings say what is to be said."""

    def drop(*_: object) -> NoReturn:
        raise structlog.DropEvent

    structlog.configure(processors=[drop], cache_logger_on_first_use=False)


def _load(request: Request, environ: Mapping[str, str], findings: list[Finding]) -> Config | None:
    here = request.place
    try:
        argv = unit_sandbox.with_variables(request.argv, environ) if here.inside else request.argv
        config = daemon_args.load_config(daemon_args.parse(argv), environ)
        problems = check_files(config, environ)
    except UsageError as error:
        fix = f"{here.systemctl} cat {here.unit}" if here.inside else None
        findings += [failed("config", line, fix) for line in str(error).splitlines()]
        return None
    except ConfigError as error:
        findings += [failed("config", line, _config_fix(line, here)) for line in error.problems]
        return None
    left = [one for one in problems if not one.startswith((*_CHECKED_ELSEWHERE, _LLAMA_SERVER))]
    findings += [failed("config", line, here.edit()) for line in left]
    if not left:
        findings.append(ok("config", f"{here.config_file or 'the command line'} is fine"))
    return config


def _config_fix(line: str, here: Place) -> str:
    if "permission denied" not in line or not here.config_file:
        return here.edit()
    if not here.inside and not here.is_root:
        return here.as_root
    file = shlex.quote(here.config_file)
    return folded([f"{here.sudo}chgrp onebitd {file} &&", f"{here.sudo}chmod 640 {file}"])


def _facts(config: Config) -> dict[str, Any]:
    files = {
        "model.file": config.model.path,
        "decoder.program": config.backend.llama_server,
        "provider.program": config.provider.program,
        "provider.elfs": config.provider.elfs,
    }
    named = {name: path for name, path in files.items() if path and path.startswith("/")}
    return {
        "host": config.http.host,
        "port": config.http.port,
        "metrics": config.metrics.listen,
        "drain_timeout_s": config.http.drain_timeout_s,
        "load_timeout_s": config.backend.load_timeout_s,
        "lock_directory": lock.directory_of(config.lock),
        "missing": {name: path for name, path in named.items() if _why(path) == "missing"},
        "denied": {
            name: path
            for name, path in {**named, "lock": config.lock.path}.items()
            if _why(path, os.X_OK if name in _PROGRAMS else os.R_OK) == "denied"
        },
    }


def _why(path: str, wanted: int = os.F_OK) -> str | None:
    step = sight.look(path, wanted)
    return None if step is None else step.why


def _ask_daemon(
    config: Config, request: Request, environ: Mapping[str, str]
) -> tuple[dict[str, Any] | None, str | None]:
    """Return the status of the running daemon, or why one that runs does not tell."""
    status, why_not = daemon.ask(config.instance, environ, request.socket)
    if why_not is None or isinstance(why_not, NoDaemon):
        return status, None
    return None, str(why_not)


def _ctx_size(
    config: Config, status: Mapping[str, Any] | None, header: model.Model | None
) -> int | None:
    told = status.get("model") if status is not None else None
    size = told.get("ctx_size") if isinstance(told, Mapping) else None
    trained = None if header is None else header.header.context_length
    return size or config.model.ctx_size or trained


@contextlib.contextmanager
def _home(environ: Mapping[str, str]) -> Iterator[Path]:
    """Give a private directory for a socket, whose path may not be long.

    Inside a service that is below the directory that systemd made for these checks.
    """
    import tempfile

    own = (os.environ.get("RUNTIME_DIRECTORY"), environ.get("XDG_RUNTIME_DIR"))
    parent = next((path for path in own if path and os.path.isdir(path)), None)
    with tempfile.TemporaryDirectory(prefix="onebitctl-doctor-", dir=parent) as directory:
        yield Path(directory)


if __name__ == "__main__":
    sys.exit(main())
