"""What the decoder is started with: its program, its model's header, its devices, its argv.

Used by the daemon and by `--print-backend`, so that both say the same.
"""

from __future__ import annotations

import mmap
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from onebitd.adapters.process import SpawnError, find_program
from onebitd.core import backend_args, gguf_header
from onebitd.core.config import Config
from onebitd.core.errors import ConfigError
from onebitd.services.supervisor import Launch

_LIST_DEVICES_TIMEOUT_S: Final = 60.0


def slots_dir(config: Config, runtime: Path) -> Path:
    """Return where state files and ids files of this instance live."""
    if config.handoff.state_dir is None:
        return runtime / "slots"
    # A directory of its own, so that instances do not sweep each other's files.
    return Path(config.handoff.state_dir) / config.instance


def plan_launch(config: Config, runtime: Path, environ: Mapping[str, str]) -> Launch:
    """Find out all that the decoder's command line depends on.

    Raises:
        ConfigError: the model is not a GGUF file, or llama-server does not run.
    """
    backend = config.backend
    env = backend_args.decoder_environment(environ, backend.env, share=config.handoff.share)
    try:
        program = find_program(backend.llama_server, env.get("PATH"))
    except SpawnError as error:
        raise ConfigError([f"backend.llama_server: {error}"]) from error
    header = _read_header(config.model.path)
    devices: list[str] = []
    if backend.device in ("hybrid", "hrx"):
        devices = _list_devices(program, env)
    socket_path = runtime / "backend.sock"
    argv = backend_args.command_line(
        program=program,
        model=config.model.path,
        alias=config.model.alias,
        ctx_size=config.model.ctx_size,
        device=backend_args.device_args(backend.device, devices),
        socket=str(socket_path),
        slot_dir=str(slots_dir(config, runtime)),
        sliding_window=bool(header.sliding_window),
        extra=backend.args,
    )
    return Launch(
        argv,
        env,
        socket_path,
        devices,
        swa_window=header.sliding_window or None,
        head_dim=header.head_dim,
    )


def _read_header(model: str) -> gguf_header.GgufHeader:
    try:
        with open(model, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        return gguf_header.read(mapped)
    except (OSError, ValueError) as error:
        raise ConfigError([f"model.path: {model}: cannot be read: {error}"]) from error
    except gguf_header.GgufError as error:
        raise ConfigError([f"model.path: {model}: {error}"]) from error


def _list_devices(program: str, env: Mapping[str, str]) -> list[str]:
    try:
        done = subprocess.run(
            [program, "--list-devices"],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIST_DEVICES_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError([f"backend.llama_server: {program} --list-devices: {error}"]) from error
    return backend_args.parse_device_list((done.stdout + done.stderr).decode("utf-8", "replace"))
