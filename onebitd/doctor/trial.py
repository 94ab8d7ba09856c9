"""The checks that start something: the decoder with its model, and the provider."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onebitd.adapters.process import Guard
from onebitd.core import paths
from onebitd.core.config import Config
from onebitd.core.state_layout import Layout
from onebitd.doctor import decoder, provider
from onebitd.doctor.finding import Finding, skipped
from onebitd.doctor.place import Place
from onebitd.surfaces.launch import slots_dir

_MANY_TOKENS = 1024


class Trials:
    """Starts decoder and provider once, and ends them.

    Args:
        environ: what they inherit.
        home: a private directory for the decoder's socket.
        program: the decoder's, an absolute path.
        swa_window: of the model.
        findings: gets what they say.
    """

    def __init__(
        self,
        config: Config,
        place: Place,
        environ: Mapping[str, str],
        home: Path,
        program: str,
        swa_window: int | None,
        findings: list[Finding],
    ) -> None:
        self._config = config
        self._place = place
        self._environ = environ
        self._home = home
        self._program = program
        self._swa_window = swa_window
        self._findings = findings
        # An instance of another name has other directories, below handoff.state_dir too.
        self._other = dataclasses.replace(
            config, instance=f"{config.instance}.doctor-{secrets.token_hex(4)}"
        )

    async def run(self, status: Mapping[str, Any] | None) -> float | None:
        """Start what does not run already.

        Args:
            status: of the running daemon, whose decoder is taken at its word.

        Returns:
            The bytes that a token takes in a state file, None where that was not learned.
        """
        with self._no_directory_left():
            guard = Guard()
            try:
                if status is None:
                    return await self._start_both(guard)
                self._findings += decoder.from_status(status)
                return await self._beside(status, guard)
            finally:
                guard.close()

    @contextlib.contextmanager
    def _no_directory_left(self) -> Iterator[None]:
        directory = self._config.handoff.state_dir
        was_there = directory is None or os.path.isdir(directory)
        try:
            yield
        finally:
            if directory is not None and not was_there:
                with contextlib.suppress(OSError):
                    os.rmdir(directory)

    async def _start_both(self, guard: Guard) -> float | None:
        async with decoder.started(
            self._other, self._place, self._environ, self._home, guard, self._findings
        ) as running:
            if running is None:
                if self._config.provider.program is not None:
                    self._findings.append(skipped("provider.run", "not run: there is no decoder"))
                return None
            await self._provide(guard, provider.judge_of(running), running=running)
            return _bytes_per_token(running.facts.layout)

    async def _beside(self, status: Mapping[str, Any], guard: Guard) -> float | None:
        runtime = Path(paths.runtime_dir(self._config.instance, self._environ, os.geteuid()))
        example = str(slots_dir(self._config, runtime) / "example.state")
        judge = provider.judge_from(example, self._program, self._swa_window)
        pid = status.get("pid")
        await self._provide(guard, judge, daemon_pid=pid if isinstance(pid, int) else None)
        return _bytes_per_token(judge.layout)

    async def _provide(
        self,
        guard: Guard,
        judge: provider.Judge,
        *,
        running: decoder.Running | None = None,
        daemon_pid: int | None = None,
    ) -> None:
        if self._config.provider.program is None:
            return
        trial = provider.Trial(
            config=self._config,
            place=self._place,
            environ=self._environ,
            directory=slots_dir(self._other, self._home),
            judge=judge,
            guard=guard,
            running=running,
            daemon_pid=daemon_pid,
        )
        self._findings.append(await provider.run(trial))


def _bytes_per_token(layout: Layout | None) -> float | None:
    """Return what one more token takes, beside what a state takes anyway."""
    if layout is None:
        return None
    return (layout.bytes_for(_MANY_TOKENS + 1) - layout.bytes_for(1)) / _MANY_TOKENS
