"""Reload: read the configuration once more, and have the daemon take over what can be.

One task carries out all of them, one after the other, whoever asked: so none is left half done when
the client that asked for it goes away.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import structlog
import trio

from onebitd.adapters.config_file import check_files, is_fatal, read_api_keys
from onebitd.core.config import Config
from onebitd.core.control_api import ReloadAnswer
from onebitd.core.errors import ConfigError, OnebitError, RequestError
from onebitd.core.reload import Merged, merge
from onebitd.surfaces import daemon_args

log = structlog.get_logger()


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """What the files say: the configuration, its API keys, and faults that only cost handoffs."""

    config: Config
    keys: tuple[str, ...]
    warnings: tuple[str, ...]


def read(args: daemon_args.DaemonArgs, environ: Mapping[str, str]) -> Reading:
    """Read and check everything as a start does; blocks on files.

    Raises:
        ConfigError: every problem that --check-config prints, if one of them is fatal.
    """
    config = daemon_args.load_config(args, environ)
    faults = check_files(config, environ)
    if any(map(is_fatal, faults)):
        raise ConfigError(faults)
    file = config.http.api_key_file
    keys = () if file is None else read_api_keys(Path(file))
    return Reading(config, keys, tuple(faults))


class Running(Protocol):
    """The running daemon, as a reload sees it."""

    @property
    def config(self) -> Config:
        """The effective configuration."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The API keys that are asked for."""

    @property
    def listens_on(self) -> Sequence[str]:
        """Hosts of the public listener."""

    @property
    def is_stopping(self) -> bool:
        """True once it was told to stop."""

    async def take_over(self, merged: Merged, keys: tuple[str, ...]) -> Sequence[str]:
        """Make it effective, at once and as a whole, and return warnings about it.

        Raises:
            ConfigError: nothing has changed.
        """


@dataclasses.dataclass(slots=True)
class _Asked:
    """One reload that somebody waits for."""

    done: trio.Event = dataclasses.field(default_factory=trio.Event)
    answer: ReloadAnswer | OnebitError | None = None


class Reloads:
    """Carries out reloads; every one that was answered, good or bad, left one line in the log.

    Args:
        running: what is to change.
        read: see the function of this name; called in a thread.
    """

    def __init__(self, running: Running, read: Callable[[], Reading]) -> None:
        self._running = running
        self._read = read
        self._asked_send, self._asked = trio.open_memory_channel[_Asked](math.inf)
        self._ended = False

    async def reload(self) -> ReloadAnswer:
        """Have the configuration read again, after those who asked before.

        A cancel gives up the wait, not the reload.

        Raises:
            ConfigError: it is bad, and nothing has changed.
            RequestError: 503, the daemon is stopping.
        """
        asked = self.ask()
        await asked.done.wait()
        if isinstance(asked.answer, ReloadAnswer):
            return asked.answer
        raise asked.answer or _stopping()

    def ask(self) -> _Asked:
        """Ask for a reload without waiting for it."""
        asked = _Asked()
        if self._ended or self._running.is_stopping:
            asked.answer = _stopping()
            asked.done.set()
        else:
            self._asked_send.send_nowait(asked)
        return asked

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Carry them out until cancelled; those who still wait then are told why."""
        asked: _Asked | None = None
        try:
            task_status.started()
            async for asked in self._asked:
                try:
                    asked.answer = await self._reload()
                except OnebitError as error:
                    asked.answer = error
                except Exception:
                    # What runs goes on: a fault in here must not end it.
                    log.exception("internal_error", path="/v1/reload")
                    asked.answer = OnebitError("the reload failed; the log says why")
                asked.done.set()
        finally:
            self._ended = True
            if asked is not None:
                asked.done.set()
            while True:
                try:
                    self._asked.receive_nowait().done.set()
                except trio.WouldBlock:
                    break

    async def _reload(self) -> ReloadAnswer:
        running = self._running
        try:
            reading = await trio.to_thread.run_sync(self._read, abandon_on_cancel=True)
            if running.is_stopping:
                raise _stopping()
            merged = merge(
                running.config,
                reading.config,
                api_keys_differ=reading.keys != running.keys,
                listens_on=running.listens_on,
            )
            more = await running.take_over(merged, reading.keys)
        except ConfigError as error:
            log.error(
                "reload_refused",
                line=f"the configuration was not reloaded: {'; '.join(error.problems)}",
                problems=list(error.problems),
            )
            raise
        answer = ReloadAnswer(
            list(merged.changed), list(merged.needs_restart), [*reading.warnings, *more]
        )
        _log_reloaded(answer)
        return answer


def _log_reloaded(answer: ReloadAnswer) -> None:
    line = answer.summary()
    if answer.needs_restart:
        line += f"; needs a restart: {', '.join(answer.needs_restart)}"
    log.info("reloaded", line=line, changed=answer.changed, needs_restart=answer.needs_restart)
    for warning in answer.warnings:
        log.warning("reload_warning", line=warning)


def _stopping() -> RequestError:
    return RequestError(
        503, "onebitd is stopping; its next start reads the file", kind="unavailable_error"
    )
