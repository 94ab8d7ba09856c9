"""The daemon's command line, and the one place where it meets the configuration file."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, Final, Literal, NoReturn

from onebitd import __version__
from onebitd.adapters.config_file import (
    SYSTEM_DIRECTORY,
    ConfigFileMissing,
    credentials,
    load,
    path_for,
)
from onebitd.adapters.config_file import check_files as check_files  # used along with load_config
from onebitd.core.backend_args import environment_refusals, refusals
from onebitd.core.config import INSTANCE_NAME, SETTINGS, Config
from onebitd.core.config_resolve import resolve
from onebitd.core.errors import ConfigError, UsageError

Action = Literal["serve", "print-backend", "check-config"]


@dataclasses.dataclass(frozen=True, slots=True)
class DaemonArgs:
    """The command line, read but not yet checked against the table of settings.

    Args:
        action: what to do.
        instance: value of --instance.
        config_path: value of --config, absolute.
        flags: key path to (flag as written, value), for `onebitd.core.config_resolve.resolve`.
        backend_args: everything after `--`.
    """

    action: Action
    instance: str | None
    config_path: Path | None
    flags: Mapping[str, tuple[str, Any]]
    backend_args: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Flag:
    """One flag that takes a value; `key` is empty for the two that choose the file."""

    names: tuple[str, ...]
    metavar: str
    key: str
    kind: type
    doc: str


_FLAGS: Final = (
    _Flag(
        ("--instance",),
        "NAME",
        "",
        str,
        f"read {SYSTEM_DIRECTORY}/NAME.toml (for a user other than root, "
        "$XDG_CONFIG_HOME/onebitd/NAME.toml first); optional when -m is given",
    ),
    _Flag(("--config",), "FILE", "", str, "read FILE; its stem is the instance's name"),
    _Flag(("-m", "--model"), "MODEL", "model.path", PurePath, "GGUF file to serve"),
    _Flag(
        ("--alias",),
        "NAME",
        "model.alias",
        str,
        "model name that clients see (default: the instance's name, else the file's stem)",
    ),
    _Flag(
        ("--device",),
        "DEVICE",
        "backend.device",
        str,
        "hybrid: HRX0 if llama-server lists it, prompts go to the provider (default); "
        "hrx: the same without provider; cpu: no offloading, no provider; "
        "any other NAME: llama-server's own --device",
    ),
    _Flag(
        ("--prefill-provider",), "PATH", "provider.program", PurePath, "prefill provider program"
    ),
    _Flag(
        ("--llama-server",),
        "PATH",
        "backend.llama_server",
        str,
        "llama-server program, a path or a name in PATH (default: llama-server)",
    ),
    _Flag(("--host",), "ADDR", "http.host", str, "public address (default: 127.0.0.1)"),
    _Flag(("--port",), "N", "http.port", int, "public port; 0 takes a free one (default: 8000)"),
    _Flag(
        ("--ctx-size",),
        "N",
        "model.ctx_size",
        int,
        "context size in tokens (default: llama-server's own choice)",
    ),
)

_SWITCHES: Final = {
    "--print-backend": "print the exact llama-server command line, shell-quoted, and exit",
    "--check-config": "print every problem of the configuration at once; exit with 0 or 2",
}

_FLAG_BY_NAME: Final = {name: flag for flag in _FLAGS for name in flag.names}
_KNOWN_SWITCHES: Final = frozenset({*_SWITCHES, "--version", "--help", "-h"})

_USAGE: Final = """\
onebitd [--instance NAME | --config FILE] [-m MODEL] [--alias NAME]
               [--device hybrid|hrx|cpu|NAME] [--prefill-provider PATH]
               [--llama-server PATH] [--host ADDR] [--port N] [--ctx-size N]
               [--print-backend | --check-config | --version]
               [-- LLAMA_SERVER_ARGUMENTS...]"""

_EPILOG: Final = """\
A flag beats the environment, which beats the file, which beats the default.
Arguments after -- are passed to llama-server, behind those of backend.args.

environment:
  ONEBIT_HYBRID_PREFILL  prefill provider program (provider.program)
  ONEBIT_HYBRID_ELFS     passed to the provider as --elfs (provider.elfs)
  ONEBIT_KV_SHARE        set, 0 too: use the shared route (handoff.share)
  ONEBIT_LLAMA_SERVER    llama-server program (backend.llama_server)
  NPU_NO_DEVICE_LOCK     set: take no NPU device lock

exit status:
  0  clean stop, or nothing wrong
  1  any other failure
  2  the command line or the configuration is wrong
  3  another onebitd has this instance or port
  4  the decoder could not be started or kept running

see also: onebitd(8), onebitd.toml(5), onebitctl(1)
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see onebitd --help")


def parse(argv: Sequence[str], *, cwd: Path | None = None) -> DaemonArgs:
    """Read the command line, without the program's name.

    Relative paths are made absolute against `cwd`, None meaning the process's working directory.

    Raises:
        UsageError: with one line for each refused or unknown argument, or for what else is wrong.
        SystemExit: status 0, after --help or --version has printed to stdout.
    """
    own, backend = _split(list(argv))
    problems = _strangers(own)
    if problems:
        raise UsageError("\n".join(problems))
    parsed = vars(_parser().parse_args(own))
    base = cwd or Path.cwd()
    flags: dict[str, tuple[str, Any]] = {}
    for flag in _FLAGS:
        given = parsed[_dest(flag)]
        if flag.key and given is not None:
            flags[flag.key] = (given[0], _converted(flag, given[0], given[1], base))
    instance, config = parsed["instance"], parsed["config"]
    if instance is not None and config is not None:
        raise UsageError("--instance and --config exclude each other: both choose the file to read")
    return DaemonArgs(
        action=parsed["action"] or "serve",
        instance=None if instance is None else instance[1],
        config_path=None if config is None else base / _not_empty("--config", config[1]),
        flags=MappingProxyType(flags),
        backend_args=tuple(backend),
    )


def load_config(
    args: DaemonArgs,
    environ: Mapping[str, str],
    *,
    directory: Path = SYSTEM_DIRECTORY,
    cwd: Path | None = None,
) -> Config:
    """Read the file that the command line chooses, and merge everything.

    Args:
        args: what `parse` returned.
        environ: the process environment; relative paths in it are taken from `cwd`, and its
            CREDENTIALS_DIRECTORY is where systemd's credentials are.
        directory: replaces /etc/onebitd.
        cwd: None means the process's working directory.

    Raises:
        ConfigError: every problem of file, environment, flags and llama-server arguments at once.
    """
    problems: list[str] = []
    flags = dict(args.flags)
    instance, path = _choose(args, environ, directory)
    file: dict[str, Any] = {}
    if path is not None:
        try:
            file = load(path)
        except ConfigFileMissing as error:
            if args.config_path is not None:
                problems += error.problems
            elif "model.path" not in flags:
                problems.append(f"{path}: no such file; write it, or name the model with -m MODEL")
        except ConfigError as error:
            problems += error.problems
    if problems:
        # Nothing that the unread file may well hold is reported as missing.
        flags.setdefault("model.path", ("-m", "/unread"))
        flags.setdefault("http.allow_unauthenticated", ("--host", True))
    name = str(path) if path is not None else ""
    problems += _backend_problems(args, file, name, ctx_size_is_set="model.ctx_size" in flags)
    if args.backend_args:
        in_file = _string_list(_in_file(file, "backend", "args"))
        if in_file is not None:
            flags["backend.args"] = ("--", [*in_file, *args.backend_args])
    return resolve(
        instance=instance,
        file=file,
        file_name=name,
        flags=flags,
        environ=_absolute_paths(environ, cwd or Path.cwd()),
        credentials=credentials(environ),
        extra_problems=problems,
    )


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split at the first `--`, which belongs to neither side."""
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def _strangers(own: Sequence[str]) -> list[str]:
    """Find what argparse must not see: it would read `-md FILE` as `-m d`."""
    problems: list[str] = []
    words = iter(enumerate(own))
    for index, word in words:
        name, has_value, _ = word.partition("=")
        if word in _KNOWN_SWITCHES or (has_value and name.startswith("--") and _known(name)):
            continue
        if _known(word):
            if index + 1 == len(own) or re.match(r"-[^0-9]", own[index + 1]):
                metavar = _FLAG_BY_NAME[word].metavar
                problems.append(f"{word}: needs a value, {word} {metavar}; see onebitd --help")
            else:
                next(words)
        elif word.startswith("-"):
            # Its value, if it has one, is no stranger of its own.
            value = [w for w in own[index + 1 : index + 2] if not has_value and w[:1] != "-"]
            problems += refusals([word, *value], "before --") or [
                f"{name}: unknown flag; see onebitd --help, and give llama-server's after --"
            ]
            if value:
                next(words)
        else:
            problems.append(f"{word}: unexpected argument; name the model with -m MODEL")
    return problems


def _known(name: str) -> bool:
    return name in _FLAG_BY_NAME


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="onebitd",
        usage=_USAGE,
        description="Serve one GGUF model: a prefill provider computes the prompt's KV cache,\n"
        "a private llama-server decodes from it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for flag in _FLAGS:
        parser.add_argument(
            *flag.names,
            metavar=flag.metavar,
            dest=_dest(flag),
            help=flag.doc,
            action=_KeepSpelling,
        )
    actions = parser.add_mutually_exclusive_group()
    for switch, doc in _SWITCHES.items():
        actions.add_argument(
            switch, action="store_const", const=switch.removeprefix("--"), dest="action", help=doc
        )
    actions.add_argument(
        "--version", action="version", version=f"onebitd {__version__}", help="print the version"
    )
    return parser


class _KeepSpelling(argparse.Action):
    """Store (flag as written, value): messages name the flag that the user typed."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        del parser
        setattr(namespace, self.dest, (option_string, values))


def _dest(flag: _Flag) -> str:
    return flag.names[-1].removeprefix("--").replace("-", "_")


def _converted(flag: _Flag, name: str, value: str, base: Path) -> str | int:
    if flag.kind is int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", value):
            raise UsageError(f"{name}: must be a whole number, not {value!r}; see onebitd --help")
        return int(value)
    is_path = flag.kind is PurePath or (flag.key == "backend.llama_server" and "/" in value)
    return str(base / _not_empty(name, value)) if is_path else value


def _not_empty(name: str, value: str) -> str:
    if not value:
        raise UsageError(f"{name}: must not be empty; see onebitd --help")
    return value


def _choose(
    args: DaemonArgs, environ: Mapping[str, str], directory: Path
) -> tuple[str | None, Path | None]:
    """Return the instance's name, if it has one yet, and the file to read, if there is one."""
    if args.config_path is not None:
        return args.config_path.stem, args.config_path
    if args.instance is None:
        return None, None
    if not INSTANCE_NAME.fullmatch(args.instance):
        # `resolve` says what is wrong with it; a name such as ../x must not choose a file.
        return args.instance, None
    return args.instance, path_for(args.instance, environ, directory=directory)


def _backend_problems(
    args: DaemonArgs, file: Mapping[str, Any], name: str, *, ctx_size_is_set: bool
) -> list[str]:
    ctx_size_is_set = ctx_size_is_set or _in_file(file, "model", "ctx_size") is not None
    in_file = _string_list(_in_file(file, "backend", "args")) or []
    found = refusals(in_file, f"{name}: backend.args", ctx_size_is_set=ctx_size_is_set)
    found += refusals(args.backend_args, "after --", ctx_size_is_set=ctx_size_is_set)
    env = _in_file(file, "backend", "env")
    if isinstance(env, Mapping):
        strings = {key: value for key, value in env.items() if isinstance(value, str)}
        found += environment_refusals(strings, f"{name}: backend.env")
    return found


def _in_file(file: Mapping[str, Any], section: str, key: str) -> object:
    table = file.get(section)
    return table.get(key) if isinstance(table, Mapping) else None


def _string_list(value: object) -> list[str] | None:
    """Return the file's list, empty when it has none; None when it is no list of strings."""
    if value is None:
        return []
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    return None


def _absolute_paths(environ: Mapping[str, str], cwd: Path) -> dict[str, str]:
    """Make the paths in our variables absolute: whoever sets one means it from where he stands."""
    found = dict(environ)
    for setting in SETTINGS:
        value = environ.get(setting.env) if setting.env else None
        if value and (setting.kind is PurePath or (setting.kind is str and "/" in value)):
            found[setting.env] = str(cwd / value)
    return found
