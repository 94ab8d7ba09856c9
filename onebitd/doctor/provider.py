"""The provider: whether it can be executed, and one run of one token as the daemon would do it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from onebitd.adapters import lock_probe
from onebitd.adapters.device_lock import DeviceLock
from onebitd.adapters.process import Guard
from onebitd.adapters.provider_process import run_provider
from onebitd.adapters.slot_files import RunFiles, SlotFiles
from onebitd.core import provider_contract, state_baseline, state_file
from onebitd.core.config import Config
from onebitd.core.errors import BackendError, ConfigError, HandoffError, StateFileError
from onebitd.core.handoff import Reason
from onebitd.core.state_data import Baseline
from onebitd.core.state_layout import Layout
from onebitd.doctor import lock as lock_check
from onebitd.doctor import program, sight
from onebitd.doctor.decoder import Running
from onebitd.doctor.finding import Finding, State, failed, ok, skipped, warning
from onebitd.doctor.place import Place, folded

TOKENS: Final = (1,)
_NAME: Final = "provider"
_RUN: Final = "provider.run"
_PROBE_TOKENS: Final = (1, 2, 3)
"""What a decoder's example holds; see `services.supervisor`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Judge:
    """What a state file is held against; all None where there is no decoder to ask.

    Attributes:
        example: a state file of the decoder, for the provider.
    """

    llama_server: str
    layout: Layout | None = None
    baseline: Baseline | None = None
    swa_window: int | None = None
    example: str | None = None


def check_program(config: Config, place: Place, environ: Mapping[str, str]) -> list[Finding]:
    """Look at the program and its directory, without running it."""
    path = config.provider.program
    if path is None:
        return [skipped(_NAME, "none is configured (provider.program): the decoder prefills")]
    search = config.provider.env.get("PATH", environ.get("PATH"))
    name = "provider.program"
    problem = program.check(name, "the provider", path, place, search)
    found = [problem or ok(name, path)]
    elfs = config.provider.elfs
    if elfs is not None:
        found.append(_check_elfs(elfs, place))
    return found


def _check_elfs(elfs: str, place: Place) -> Finding:
    name = "provider.elfs"
    step = sight.look(elfs, os.R_OK | os.X_OK)
    if step is None and not os.path.isdir(elfs):
        return failed(name, f"provider.elfs {elfs} is no directory", place.edit())
    if step is None:
        return ok(name, elfs)
    if sight.is_sandboxed(elfs, step):
        fix = sight.show_fix(place, f"{elfs}/x")
        return failed(name, sight.hidden_sentence("provider.elfs", elfs), fix)
    user = sight.own_name()
    fix = sight.access_fix(place, step, "rx") or place.edit()
    return failed(name, sight.sentence("provider.elfs", elfs, step, user), fix)


def judge_of(running: Running) -> Judge:
    """Return what a decoder that was started here takes."""
    facts = running.facts
    example = running.slots.example()
    return Judge(running.program, facts.layout, facts.baseline, running.swa_window, example)


def judge_from(example: str, llama_server: str, swa_window: int | None) -> Judge:
    """Return what the decoder of a running daemon takes, as far as its example tells."""
    try:
        saved = Path(example).read_bytes()
        layout = state_file.learn_layout(saved, _PROBE_TOKENS)
        baseline = state_baseline.learn_baseline(saved, state_file.parse(saved, layout))
    except (OSError, StateFileError):
        return Judge(llama_server)
    return Judge(llama_server, layout, baseline, swa_window, example)


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """What one run needs.

    Attributes:
        environ: what the provider inherits.
        directory: the slot directory, where the run's own is made; what is made is removed.
        judge: what its state file is held against.
        guard: ends it when this process ends.
        running: a decoder to restore the state into.
        daemon_pid: of the running daemon.
    """

    config: Config
    place: Place
    environ: Mapping[str, str]
    directory: Path
    judge: Judge
    guard: Guard
    running: Running | None = None
    daemon_pid: int | None = None


async def run(trial: Trial) -> Finding:
    """Run the provider on one token, under the device lock, and check what it wrote."""
    why_not = _why_not(trial.config, trial.place, trial.daemon_pid)
    if why_not is not None:
        return why_not
    try:
        slots = SlotFiles(trial.directory)
        files = slots.new_run(TOKENS)
    except (ConfigError, HandoffError) as error:
        return failed(_RUN, str(error), trial.place.edit())
    try:
        return await _run_locked(trial, slots, files)
    finally:
        files.remove()
        if trial.running is None:
            slots.sweep()
            with contextlib.suppress(OSError):  # something of somebody else's is in it
                slots.path.rmdir()


def _why_not(config: Config, place: Place, daemon_pid: int | None) -> Finding | None:
    """Say why the device must not be touched now; None when it may be."""
    lock = config.lock
    if not lock.enabled:
        return None
    found = lock_probe.probe(lock.path)
    if not found.usable:
        return skipped(_RUN, f"not run: the device lock {lock.path} cannot be taken")
    if not found.exists and any(Path("/dev/accel").glob("accel*")):
        # Made here it would stay, and removed again there could be two locks for a moment.
        text = f"not run: there is no device lock {lock.path} yet"
        return Finding(_RUN, State.SKIPPED, text, lock_check.make_fix(lock.path, place))
    is_daemon = found.holder is not None and found.holder.pid == daemon_pid
    if is_daemon and lock.hold == "lifetime":
        return skipped(_RUN, "not run: the daemon holds the device lock for its life")
    return None


async def _run_locked(trial: Trial, slots: SlotFiles, files: RunFiles) -> Finding:
    lock = trial.config.lock
    is_taken = lock.enabled and lock_probe.probe(lock.path).exists
    device = DeviceLock(lock.path, "onebitctl-doctor") if is_taken else None
    try:
        if device is not None:
            await device.wait_acquired(lock.wait_s)
        try:
            return await _run_once(trial, slots, files)
        finally:
            if device is not None:
                device.release()
    except HandoffError as error:
        if error.reason is Reason.LOCK_BUSY:
            return warning(_RUN, f"not run: {error.detail}", "onebitctl lock")
        if error.reason is Reason.LOCK_UNUSABLE:
            return failed(_RUN, error.detail, lock_check.check(lock, trial.place).fix)
        return failed(_RUN, f"one token: {error.detail}", _by_hand(trial.config))


async def _run_once(trial: Trial, slots: SlotFiles, files: RunFiles) -> Finding:
    config, judge = trial.config, trial.judge
    result = await run_provider(
        provider_contract.file_route_argv(
            config.provider.program or "",
            tokens_file=files.tokens_path,
            state_file=files.state_path,
            model=config.model.path,
            elfs=config.provider.elfs,
        ),
        env=provider_contract.environment(
            trial.environ,
            config.provider.env,
            lock_held=True,
            llama_server=judge.llama_server,
            state_example=judge.example,
        ),
        timeout_s=config.provider.timeout_s,
        guard=trial.guard,
        on_line=lambda _stream, _line: None,
        on_stuck=lambda _child: None,
    )
    text = f"one token in {result.wall_ms:.0f} ms"
    if judge.layout is None:
        if sight.look(files.state_path, os.F_OK) is not None:
            return failed(_RUN, f"{text}, and no state file", _by_hand(config))
        return ok(_RUN, f"{text}; its state file was not checked, for want of a decoder's")
    name, size = await files.take_state(judge.layout, TOKENS, judge.swa_window, judge.baseline)
    try:
        text += f", a state of {size} bytes in order"
        if trial.running is None:
            return ok(_RUN, text)
        restored = await trial.running.facts.server.restore(name)
        if restored.n_restored == len(TOKENS):
            return ok(_RUN, f"{text}, restored by the decoder")
        text += f", of which the decoder restores {restored.n_restored} tokens"
        return failed(_RUN, text, _conformance(config))
    except BackendError as error:
        text += f", which the decoder does not restore: {error}"
        return failed(_RUN, text, _conformance(config))
    finally:
        slots.remove(name)


def _conformance(config: Config) -> str:
    checked = f"onebitctl provider check {shlex.quote(config.provider.program or '')}"
    options = [f"--model {shlex.quote(config.model.path)}", *_elfs(config)]
    return _with_env(config, folded([checked, *options]))


def _by_hand(config: Config) -> str:
    words = provider_contract.file_route_argv(
        config.provider.program or "",
        tokens_file="/tmp/ids",  # noqa: S108 - in a command to read first
        state_file="/tmp/state",  # noqa: S108
        model=config.model.path,
        elfs=config.provider.elfs,
    )
    return _with_env(config, folded(["echo 1 >/tmp/ids &&", *map(shlex.quote, words)]))


def _elfs(config: Config) -> list[str]:
    return [] if config.provider.elfs is None else [f"--elfs {shlex.quote(config.provider.elfs)}"]


def _with_env(config: Config, command: str) -> str:
    """Return a command with a word on what else the daemon sets; values may be secrets."""
    names = ", ".join(sorted(config.provider.env))
    return f"# with these of provider.env set: {names}\n{command}" if names else command
