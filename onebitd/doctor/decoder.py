"""The decoder: what a running daemon knows of it, or else what it says when it is started.

It is started as the daemon starts it, with the model, in a directory of its own, by the daemon's
own supervisor; it is gone when `started` is left.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import trio

from onebitd.adapters.process import Guard, SpawnError, find_program
from onebitd.adapters.share_listener import ShareListener, decoder_or_descendant
from onebitd.adapters.slot_files import SlotFiles
from onebitd.core import backend_args
from onebitd.core.config import Config
from onebitd.core.errors import (
    BackendError,
    BackendFailed,
    BackendRefused,
    ConfigError,
    HandoffError,
)
from onebitd.doctor import program, sight
from onebitd.doctor.finding import Finding, failed, ok, skipped, warning
from onebitd.doctor.place import Place
from onebitd.services.supervisor import BackendFacts, Supervisor
from onebitd.surfaces.cli_text import part_of
from onebitd.surfaces.launch import plan_launch, slots_dir

_SHARE_S: Final = 10.0
_CANNOT_SHARE: Final = (400, 404, 405, 501)


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    """A decoder that was started here.

    Attributes:
        program: its path.
        facts: what it told of itself.
        swa_window: of its model.
        slots: its slot directory.
    """

    program: str
    facts: BackendFacts
    swa_window: int | None
    slots: SlotFiles


def check_program(
    config: Config, place: Place, environ: Mapping[str, str]
) -> tuple[list[Finding], str | None]:
    """Look at the program, and have it say its version; return its path if it can be run."""
    name = "decoder.program"
    env = backend_args.decoder_environment(environ, config.backend.env, share=config.handoff.share)
    search = env.get("PATH")
    wanted = config.backend.llama_server
    if "/" in wanted:
        problem = program.check(name, "llama-server", wanted, place, search)
        if problem is not None:
            return [problem], None
    try:
        path = find_program(wanted, search)
    except SpawnError as error:
        text = f"backend.llama_server: {error} (PATH of {sight.own_name()}: {search})"
        return [failed(name, text, place.edit())], None
    problem = program.check(name, "llama-server", path, place, search)
    if problem is not None:
        return [problem], None
    status, said = program.version_of(path, env)
    problem = program.load_problem(name, path, status, said, place)
    if problem is not None:
        return [problem], None
    build = program.build_in(said)
    return [ok(name, f"{path}{f', build {build}' if build else ''}")], path


def from_status(status: Mapping[str, Any]) -> list[Finding]:
    """Return what a running daemon knows of its decoder."""
    backend, model = part_of(status, "backend"), part_of(status, "model")
    if backend.get("build") is None:
        state = backend.get("state", "unknown")
        return [warning("decoder", f"the daemon's decoder is not ready yet (it is {state})")]
    shared = part_of(status, "provider").get("shared", "unknown")
    return [
        ok("decoder", _facts(backend["build"], model.get("ctx_size"), backend.get("devices"))),
        _slot_finding(model.get("state_version"), model.get("layout")),
        _shared(str(shared)),
    ]


def _facts(build: object, ctx_size: object, devices: object) -> str:
    listed = ", ".join(map(str, devices)) if isinstance(devices, list | tuple) else ""
    return f"build {build}, context {ctx_size}, devices: {listed or 'the CPU'}"


def _slot_finding(version: object, layout: object) -> Finding:
    name = "decoder.slot"
    if version is None:
        return warning(name, f"no prompt can be handed over: {layout or 'its state is not known'}")
    return ok(name, f"it saves, restores and erases its slot; its states: {layout}")


def _shared(state: str) -> Finding:
    name = "decoder.share"
    if state == "off":
        return skipped(name, "the shared route is off (handoff.share)")
    if state == "on":
        return ok(name, "the shared route is on")
    return warning(name, f"the shared route is {state}: prompts go by file")


@contextlib.asynccontextmanager
async def started(
    config: Config,
    place: Place,
    environ: Mapping[str, str],
    home: Path,
    guard: Guard,
    findings: list[Finding],
) -> AsyncIterator[Running | None]:
    """Start the decoder; adds what it says to `findings`, and gives it while the block runs.

    Args:
        config: its instance names the slot directory, which is made and removed.
        environ: what it inherits.
        home: a private directory for its socket.
    """
    try:
        launch = await trio.to_thread.run_sync(plan_launch, config, home, environ)
        slots = SlotFiles(slots_dir(config, home))
    except ConfigError as error:
        findings += [failed("decoder", line, place.edit()) for line in error.problems]
        yield None
        return
    supervisor = Supervisor(
        launch, slots, guard, load_timeout_s=config.backend.load_timeout_s, restart_max=0
    )
    try:
        async with trio.open_nursery() as nursery:
            running = None
            try:
                await nursery.start(_run, supervisor)
            except BackendFailed as error:
                findings.append(failed("decoder", _reason(str(error)), _by_hand(place)))
            if supervisor.facts is not None:
                findings += await _told(config, supervisor, supervisor.facts, slots, home)
                window = launch.swa_window
                running = Running(launch.argv[0], supervisor.facts, window, slots)
            yield running
            nursery.cancel_scope.cancel()
    finally:
        slots.sweep()
        with contextlib.suppress(OSError):
            slots.path.rmdir()


async def _run(
    supervisor: Supervisor, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Run it; once it was ready, its end is for whoever asks it something."""
    has_started = False

    class Started:
        def started(self, value: None = None) -> None:
            nonlocal has_started
            has_started = True
            task_status.started(value)

    try:
        await supervisor.run(task_status=Started())
    except BackendFailed:
        if not has_started:
            raise


def _reason(text: str) -> str:
    return text.partition("; onebitd --print-backend")[0]


def _by_hand(place: Place) -> str:
    return f"onebitd --instance {place.instance} --print-backend"


async def _told(
    config: Config, supervisor: Supervisor, facts: BackendFacts, slots: SlotFiles, home: Path
) -> list[Finding]:
    layout = facts.layout
    found = [ok("decoder", _facts(facts.build, facts.ctx_size, supervisor.devices))]
    if layout is None:
        found.append(_slot_finding(None, facts.unsupported))
    else:
        problem = await _restore_problem(facts, slots)
        slot = _slot_finding(layout.version, layout.describe())
        found.append(slot if problem is None else warning("decoder.slot", problem))
    if not config.handoff.share:
        return [*found, _shared("off")]
    return [*found, _shared(await _share_state(supervisor, facts, home))]


async def _restore_problem(facts: BackendFacts, slots: SlotFiles) -> str | None:
    """Have it restore what it saved; the actions of its start were to save and to erase."""
    example = slots.example()
    if example is None:
        return "its state file was gone before it could be restored"
    try:
        restored = await facts.server.restore(Path(example).name)
        await facts.server.erase()
    except BackendError as error:
        return f"it saves its slot and cannot restore it: {error}"
    return None if restored.n_restored > 0 else "it restores nothing of what it has saved"


async def _share_state(supervisor: Supervisor, facts: BackendFacts, home: Path) -> str:
    pid = supervisor.pid
    if pid is None:
        return "unknown, the decoder has ended"
    path = str(home / "share.sock")
    outcome = ["on"]

    async def ask(scope: trio.CancelScope) -> None:
        try:
            await facts.server.share(path)
        except BackendRefused as error:
            unknown = error.status in _CANNOT_SHARE
            outcome[0] = "not supported by this decoder" if unknown else f"refused ({error})"
            scope.cancel()
        except BackendError as error:
            outcome[0] = f"not to be had ({error})"
            scope.cancel()

    try:
        with ShareListener(path) as listener:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, nursery.cancel_scope)
                (await listener.receive(decoder_or_descendant(pid), _SHARE_S)).close()
                nursery.cancel_scope.cancel()
    except* HandoffError as group:
        outcome[0] = f"not to be had ({_first(group.exceptions)})"
    return outcome[0]


def _first(errors: Sequence[BaseException]) -> BaseException:
    error = errors[0]
    return _first(error.exceptions) if isinstance(error, BaseExceptionGroup) else error
