"""llama-server's command line: what may not stand in it, and what onebitd puts there.

How llama-server reads arguments, measured with build 10068 and read off the argument names in
builds 10434 and 11549: a flag and its value are two arguments (`--flag=value` is an error), flags
are case-sensitive and never abbreviated or bundled, underscores in a long flag count as dashes,
the last of several equal flags wins with a warning, and most flags have a `LLAMA_ARG_` variable
which a flag beats.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Final

NO_SWA_FULL: Final = "--no-swa-full"
"""onebitd's own notation in `backend.args`: run a sliding-window model without `--swa-full`.

llama-server has no such flag (its default is off), so it is taken out and never passed on.
"""

SHARE_VARIABLE: Final = "ONEBIT_KV_SHARE"
"""Set and not empty: the decoder keeps its cache in memory that it can export."""

PARALLEL_FLAGS: Final = frozenset({"-np", "--parallel"})
CTX_SIZE_FLAGS: Final = frozenset({"-c", "--ctx-size"})
CACHE_RAM_FLAGS: Final = frozenset({"-cram", "--cache-ram"})
DEVICE_FLAGS: Final = frozenset({"-dev", "--device"})
_CACHE_RAM_DEFAULT_MIB: Final = 8192.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Refused:
    """One row of the table of refused arguments.

    Args:
        flags: a pattern that the whole flag must match, underscores already turned to dashes.
        variables: the same for environment variables of llama-server.
        why: the reason, as a clause.
        instead: what to do, as a clause.
        harmless: the one value with which the flag changes nothing and is let through.
    """

    flags: re.Pattern[str]
    variables: re.Pattern[str]
    why: str
    instead: str
    harmless: str | None = None


def _row(
    flags: str, variables: str, why: str, instead: str, *, harmless: str | None = None
) -> _Refused:
    return _Refused(re.compile(flags), re.compile(variables), why, instead, harmless)


_HANDED_OVER = "nothing but the prompt's KV cache is handed over"
_LEAVE_OUT = "leave it out"

_REFUSED: Final = (
    _row(
        r"-np|--parallel",
        r"LLAMA_ARG_N_PARALLEL",
        "the decoder has one slot, the one that handoffs are restored into",
        "leave it out, or run a second instance",
        harmless="1",
    ),
    _row(
        r"--spec-type",
        r"LLAMA_ARG_SPEC_TYPE",
        "a drafter would draft over a cache it did not compute",
        _LEAVE_OUT,
        harmless="none",
    ),
    _row(
        r"--mtp|--nextn|--eagle3|--dflash|--spec-.*|--no-spec-.*|--draft|--draft-.*|--.*-draft"
        r"|-(md|hfd|hfrd|td|tbd|Cd|Crd|Cbd|Crbd|otd|cmoed|ncmoed|devd|ngld|ctkd|ctvd|lcs|lcd)"
        r"|--lookup-cache-(static|dynamic)",
        r"LLAMA_ARG_(SPEC|DRAFT)_.*|LLAMA_ARG_N_GPU_LAYERS_DRAFT",
        "a drafter would draft over a cache it did not compute",
        _LEAVE_OUT,
    ),
    _row(
        r"-mm|-mmu|-mmdev|--mmproj|--mmproj-.*",
        r"LLAMA_ARG_MMPROJ|LLAMA_ARG_MMPROJ_(URL|AUTO)",
        f"{_HANDED_OVER}, so there are no images or audio here",
        "serve such a model with llama-server itself",
    ),
    _row(r"--moe-slots", r"LLAMA_ARG_MOE_SLOTS", _HANDED_OVER, _LEAVE_OUT),
    _row(r"--pm", r"LLAMA_ARG_PM", _HANDED_OVER, _LEAVE_OUT),
    _row(
        r"--embeddings?|--rerank|--reranking",
        r"LLAMA_ARG_EMBEDDINGS|LLAMA_ARG_RERANKING",
        "a server in that role generates no text",
        "serve embeddings and reranking with llama-server itself",
    ),
    _row(
        r"--host|--port|--reuse-port|--unix|--unix-.*",
        r"LLAMA_ARG_(HOST|PORT|REUSE_PORT)",
        "the decoder listens on its private Unix socket only",
        "set the public address with --host and --port before --, or http.host and http.port",
    ),
    _row(
        r"--slot-save-path",
        r"LLAMA_ARG_SLOT_SAVE_PATH",
        "onebitd sets it, since handoffs are restored from there",
        "set handoff.state_dir",
    ),
    _row(
        r"--slots|--no-slots",
        r"LLAMA_ARG_ENDPOINT_SLOTS",
        "onebitd decides what clients reach of /slots",
        _LEAVE_OUT,
    ),
    _row(
        r"--api-key|--api-key-file",
        r"LLAMA_API_KEY|LLAMA_ARG_API_KEY_FILE",
        "clients show their keys to onebitd, not to the decoder",
        "set http.api_key_file",
    ),
    _row(
        r"--ssl-.*",
        r"LLAMA_ARG_SSL_.*",
        "the decoder is reached through a private Unix socket only",
        "put a TLS proxy in front of onebitd",
    ),
    _row(
        r"--api-prefix",
        r"LLAMA_ARG_API_PREFIX",
        "onebitd asks the decoder for the paths without a prefix",
        "put the prefix into a proxy in front of onebitd",
    ),
    _row(
        r"(?!)",
        r"AIP_(MODE|HTTP_PORT|HEALTH_ROUTE|PREDICT_ROUTE)",
        "with it the decoder has an endpoint that reaches slot actions past onebitd",
        _LEAVE_OUT,
    ),
    _row(
        r"-m|--model",
        r"LLAMA_ARG_MODEL",
        "onebitd sets it",
        "use -m before --, or model.path",
    ),
    _row(
        r"-mu|--model-url|-dr|--docker-repo|-hf|-hfr|--hf-repo|-hff|--hf-file|--.*-(default|spec)",
        r"LLAMA_ARG_(MODEL_URL|DOCKER_REPO|HF_REPO|HF_FILE|HF_REPO_FILE)",
        "the decoder and the provider read the same model file, which onebitd sets",
        "download the file, then use -m before --, or model.path",
    ),
    _row(
        r"--models-.*|--no-models-.*",
        r"LLAMA_ARG_MODELS_.*",
        "the decoder serves one model",
        "run one onebitd instance for each model",
    ),
    _row(
        r"-a|--alias",
        r"LLAMA_ARG_ALIAS",
        "onebitd sets it",
        "use --alias before --, or model.alias",
    ),
    _row(
        r"--props",
        r"LLAMA_ARG_ENDPOINT_PROPS",
        "POST /props would change the decoder behind onebitd's back",
        "give the settings as arguments",
    ),
    _row(
        r"--sleep-idle-seconds",
        r"LLAMA_ARG_SLEEP_IDLE_SECONDS",
        "a sleeping decoder unloads the model, and restored tokens with it",
        "stop the instance when it is not needed",
    ),
    _row(
        r"-h|--help|--usage|--version|-cl|--cache-list|--list-devices.*|--completion-bash",
        r"(?!)",
        "llama-server prints something and exits",
        "run llama-server itself for that",
    ),
)


def refusals(args: Sequence[str], where: str, *, ctx_size_is_set: bool = False) -> list[str]:
    """Name every argument that llama-server must not be given here.

    Args:
        args: llama-server arguments as a user wrote them.
        where: where they stand, for the messages: `after --`, `FILE: backend.args`.
        ctx_size_is_set: the context size is set with --ctx-size or model.ctx_size, so that a
            second one among these arguments contradicts it.

    Returns:
        One line for each refused argument: where, the flag, why, and what to do instead.

    >>> refusals(["--threads", "4", "-np", "1"], "after --")
    []
    """
    found: list[str] = []
    for index, arg in enumerate(args):
        flag = _flag(arg)
        if flag is None:
            continue
        following = args[index + 1] if index + 1 < len(args) else None
        value = arg.partition("=")[2] if "=" in arg else following
        if ctx_size_is_set and flag in CTX_SIZE_FLAGS:
            found.append(
                _line(where, flag, "the context size is set already", "use model.ctx_size alone")
            )
            continue
        row = _row_of(flag)
        if row is not None and (row.harmless is None or value != row.harmless):
            shown = f"{flag} {value}" if row.harmless is not None and value is not None else flag
            found.append(_line(where, shown, row.why, row.instead))
    return found


def environment_refusals(env: Mapping[str, str], where: str) -> list[str]:
    """Name every variable that would give llama-server a refused argument by the back door.

    Args:
        env: the variables, as in `backend.env`.
        where: where they stand, for the messages.

    Returns:
        One line for each; the values, which may be secrets, are not shown.
    """
    found: list[str] = []
    for name, value in env.items():
        row = _variable_row(name)
        if row is not None and (row.harmless is None or value != row.harmless):
            found.append(_line(where, name, row.why, row.instead))
    return found


def decoder_environment(
    inherited: Mapping[str, str], extra: Mapping[str, str], *, share: bool = False
) -> dict[str, str]:
    """Return llama-server's environment: the daemon's, less what is refused, with `extra` on top.

    `share`: it is to keep its cache in memory that it can share; it looks for that at its start.

    A variable that the daemon's own environment holds for other llama-servers (a machine-wide
    `LLAMA_ARG_MMPROJ`, say) is no fault of this configuration, so it is dropped, not reported.
    """
    kept = {name: value for name, value in inherited.items() if _variable_row(name) is None}
    if share:
        kept[SHARE_VARIABLE] = "1"
    return kept | dict(extra)


def command_line(
    *,
    program: str,
    model: str,
    alias: str,
    ctx_size: int | None,
    device: Sequence[str],
    socket: str,
    slot_dir: str,
    sliding_window: bool,
    extra: Sequence[str],
) -> list[str]:
    """Return the decoder's exact argv.

    The GGUF's own multi-token head stays unused because nothing here asks for it: llama-server's
    `--spec-type` is `none` unless it is given. `--cache-ram 0` keeps a bad restored state from
    coming back after an erase; without `--swa-full` a restored prompt of a sliding-window model is
    silently evaluated again (both measured).

    Args:
        program: llama-server, as Popen finds it.
        model: GGUF file.
        alias: model name that clients see.
        ctx_size: tokens; None leaves it to llama-server.
        device: what `device_args` returned; dropped when `extra` names a device itself.
        socket: path of the private Unix socket; must end in `.sock`, or llama-server takes it for
            the name of a host.
        slot_dir: directory of state files.
        sliding_window: the GGUF says that the model has one.
        extra: arguments that `refusals` found nothing in. `--cache-ram N` replaces the 0,
            `--no-swa-full` is obeyed and taken out, `-np 1` is dropped since it stands there.
    """
    kept: list[str] = []
    flags: set[str] = set()
    swa_full = sliding_window
    skip = False
    for arg in extra:
        flag = _flag(arg)
        if skip:
            skip = False
        elif flag in PARALLEL_FLAGS:
            skip = "=" not in arg
        elif flag == NO_SWA_FULL:
            swa_full = False
        elif flag == "--swa-full":
            swa_full = True
        else:
            kept.append(arg)
            flags.add(flag or "")
    argv = [program, "-m", model, "--alias", alias, "--host", socket]
    argv += ["-np", "1", "--slot-save-path", slot_dir]
    if ctx_size is not None:
        argv += ["-c", str(ctx_size)]
    if not flags & CACHE_RAM_FLAGS:
        argv += ["--cache-ram", "0"]
    if swa_full:
        argv.append("--swa-full")
    if not flags & DEVICE_FLAGS:
        argv += device
    return argv + kept


def cache_ram_mib(argv: Sequence[str]) -> float:
    """Return the size of the decoder's own prompt cache in MiB; infinity for no limit.

    >>> cache_ram_mib(["llama-server", "--cache-ram", "0"])
    0.0
    >>> cache_ram_mib(["llama-server", "-cram", "-1"])
    inf
    """
    size = _CACHE_RAM_DEFAULT_MIB
    for arg, value in itertools.pairwise(argv):
        if _flag(arg) in CACHE_RAM_FLAGS:
            with contextlib.suppress(ValueError):
                size = float(value)
    return math.inf if size < 0 else size


def device_args(device: str, listed_devices: Sequence[str]) -> list[str]:
    """Turn onebitd's `--device` into llama-server's arguments.

    `hybrid` and `hrx` take the first listed HRX device, HRX0 where there is one, and leave the
    choice to llama-server where there is none. `cpu` offloads nothing (`--device none -ngl 0`),
    also in a build with a GPU backend. Any other name goes through as it is, and llama-server
    refuses one it does not know.

    >>> device_args("hybrid", ["Vulkan0", "HRX0"]), device_args("hrx", [])
    (['--device', 'HRX0'], [])
    """
    if device in ("hybrid", "hrx"):
        hrx = sorted(name for name in listed_devices if re.fullmatch(r"HRX\d+", name))
        return ["--device", hrx[0]] if hrx else []
    if device == "cpu":
        return ["--device", "none", "-ngl", "0"]
    return ["--device", device]


_DEVICE_LINE = re.compile(r"\s+(\S+): ")


def parse_device_list(text: str) -> list[str]:
    """Read the device names out of what `llama-server --list-devices` prints.

    After the line `Available devices:` each device has an indented line, `NAME: description (MiB
    total, MiB free)`; a name may hold a colon (`RPC0[127.0.0.1:50052]`). Without a device there is
    no line (build 10068) or `(none)` (build 10434). Log lines before the heading and between the
    devices are passed over; a text without the heading lists nothing.

    >>> parse_device_list("Available devices:\\n  HRX0: Radeon 8060S (1 MiB, 1 MiB free)\\n")
    ['HRX0']
    """
    _, heading, after = text.partition("Available devices:")
    if not heading:
        return []
    matches = (_DEVICE_LINE.match(line) for line in after.splitlines())
    return [match.group(1) for match in matches if match]


def _flag(arg: str) -> str | None:
    """Return the flag an argument is, as llama-server compares it; None for a value."""
    if not arg.startswith("-"):
        return None
    name = arg.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def _row_of(flag: str) -> _Refused | None:
    return next((row for row in _REFUSED if row.flags.fullmatch(flag)), None)


def _variable_row(name: str) -> _Refused | None:
    return next((row for row in _REFUSED if row.variables.fullmatch(name)), None)


def _line(where: str, flag: str, why: str, instead: str) -> str:
    return f"{where}: {flag} is refused: {why}; {instead}"
