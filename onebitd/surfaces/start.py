"""`onebitd` until it listens: arguments, configuration, instance lock, sockets.

Only then is the rest imported, which takes ten times as long: who connects meanwhile waits in the
backlog and is answered. So nothing here may import the event loop or the web stack.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from onebitd.adapters import listeners
from onebitd.adapters.config_file import check_files, is_fatal, read_api_keys
from onebitd.adapters.instance import InstanceLock, ensure_private_dir
from onebitd.adapters.systemd import ServiceManager
from onebitd.core import paths
from onebitd.core.config import Config
from onebitd.core.errors import ConfigError, OnebitError, UsageError
from onebitd.surfaces import daemon_args
from onebitd.surfaces.listening import Listening, open_listeners, turn_away

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What the daemon is told with."""


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """What there is when the sockets are open; all of it is released by whoever made it.

    Attributes:
        args: the command line, for reading the configuration again.
        config: as it was read.
        warnings: lines about it that somebody should see.
        keys: the API keys.
        runtime: the instance's directory; its lock is held.
        manager: what is told of the daemon's state.
        listening: the sockets.
        signals: those of SIGNALS that have come already, and go on coming until somebody else
            receives them.
    """

    args: daemon_args.DaemonArgs
    config: Config
    warnings: Sequence[str]
    keys: tuple[str, ...]
    runtime: Path
    manager: ServiceManager
    listening: Listening
    signals: list[int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `onebitd`; return its exit status (onebitd(8), EXIT STATUS)."""
    manager: ServiceManager | None = None
    try:
        manager = ServiceManager()
        args = daemon_args.parse(sys.argv[1:] if argv is None else argv)
        config = daemon_args.load_config(args, os.environ)
        problems = check_files(config)
        if args.action == "check-config":
            if problems:
                raise ConfigError(problems)
            print(f"onebitd: configuration of instance {config.instance} is fine")  # noqa: T201
            return 0
        fatal = [line for line in problems if is_fatal(line)]
        if fatal:
            raise ConfigError(fatal)
        runtime = Path(paths.runtime_dir(config.instance, os.environ, os.geteuid()))
        if args.action == "print-backend":
            _print_backend(config, runtime)
            return 0
        _serve(args, config, problems, runtime, manager)
    except OnebitError as error:
        if manager is not None:
            turn_away(manager, str(error))
        for line in str(error).splitlines():
            print(f"onebitd: {line}", file=sys.stderr)  # noqa: T201
        if isinstance(error, UsageError | ConfigError) and len(str(error).splitlines()) > 1:
            print("onebitd: see onebitd(8) and onebitd.toml(5)", file=sys.stderr)  # noqa: T201
        return error.exit_status
    finally:
        if manager is not None:
            manager.close()
    return 0


def _print_backend(config: Config, runtime: Path) -> None:
    from onebitd.surfaces.launch import plan_launch

    print(shlex.join(plan_launch(config, runtime, os.environ).argv))  # noqa: T201


def _serve(
    args: daemon_args.DaemonArgs,
    config: Config,
    warnings: Sequence[str],
    runtime: Path,
    manager: ServiceManager,
) -> None:
    file = config.http.api_key_file
    keys = () if file is None else read_api_keys(Path(file))
    with (
        _kept_signals() as signals,
        _locked(config, runtime, manager),
        _open(config, runtime, manager) as listening,
    ):
        from onebitd.surfaces import daemon

        daemon.serve(Started(args, config, warnings, keys, runtime, manager, listening, signals))


@contextlib.contextmanager
def _kept_signals() -> Iterator[list[int]]:
    """Keep the signals that come before the event loop: what is open must be closed in order."""
    kept: list[int] = []

    def keep(number: int, _frame: FrameType | None) -> None:
        kept.append(number)

    before = {number: signal.signal(number, keep) for number in SIGNALS}
    try:
        yield kept
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _locked(config: Config, runtime: Path, manager: ServiceManager) -> Iterator[None]:
    """Hold the instance, in a directory that is there then."""
    mode = 0o750 if os.geteuid() == 0 or manager.present else 0o700
    fallback = Path(paths.fallback_root(os.geteuid()))
    if fallback in runtime.parents:
        # Below /tmp: whoever owned that directory could put another one in ours' place.
        ensure_private_dir(fallback, 0o700)
    ensure_private_dir(runtime, mode)
    lock = InstanceLock(runtime / "onebitd.lock", config.instance)
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _open(config: Config, runtime: Path, manager: ServiceManager) -> Iterator[Listening]:
    """Listen; whatever becomes of it, no socket is left in the directory."""
    listening = open_listeners(config, manager, runtime)
    try:
        yield listening
    finally:
        for one in (*listening.public, *listening.control, *listening.metrics):
            one.close()
        if not manager.listen_fds().get("control"):
            listeners.unlink_unix(runtime / paths.CONTROL_SOCKET)
