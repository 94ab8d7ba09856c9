"""Files that an operator writes: the configuration, the API keys, and what it points at."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import shutil
import stat
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from onebitd.adapters import lock_probe
from onebitd.adapters.accounts import user_name
from onebitd.core import gguf_header
from onebitd.core.config import SETTINGS, Config
from onebitd.core.errors import ConfigError

MAX_FILE_BYTES: Final = 1 << 20
"""A configuration or key file larger than this is the wrong file."""

SYSTEM_DIRECTORY: Final = Path("/etc/onebitd")

_GGUF_MAGIC: Final = b"GGUF"
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_ONLY_HANDOFFS_NEED: Final = ("provider.", "lock.")
"""Keys whose faults are worth a warning, but keep nobody from serving."""


class ConfigFileMissing(ConfigError):
    """There is no such configuration file."""


def path_for(
    instance: str,
    environ: Mapping[str, str],
    *,
    directory: Path = SYSTEM_DIRECTORY,
    euid: int | None = None,
) -> Path:
    """Return the configuration file of an instance, whether it exists or not.

    That is `/etc/onebitd/NAME.toml`. For a user other than root `$XDG_CONFIG_HOME/onebitd/
    NAME.toml` comes first when it is a file (`~/.config` when that variable is not set), so that
    one may run an instance without writing to /etc. Root never reads from a home directory.

    Args:
        instance: a name that `onebitd.core.config.INSTANCE_NAME` matches.
        environ: for XDG_CONFIG_HOME and HOME; relative ones are ignored, as XDG asks.
        directory: replaces /etc/onebitd.
        euid: effective user id; None asks the kernel.
    """
    if (os.geteuid() if euid is None else euid) != 0:
        home = environ.get("HOME", "")
        base = environ.get("XDG_CONFIG_HOME") or (f"{home}/.config" if home else "")
        own = Path(base) / "onebitd" / f"{instance}.toml"
        if own.is_absolute() and os.path.isfile(own):
            return own
    return directory / f"{instance}.toml"


def load(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        ConfigFileMissing: there is none.
        ConfigError: it cannot be read, is not a regular file of at most 1 MiB, not UTF-8 or not
            TOML; one line that names the file and, for a syntax error, line and column.
    """
    data = _read(
        path, "name an existing file with --config, or the model with -m; see onebitd.toml(5)"
    )
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError([f"{path}: not UTF-8 in line {line}; save it as UTF-8 text"]) from error
    try:
        return tomllib.loads(text)
    # Not only TOMLDecodeError: int() refuses a number of thousands of digits with a plain
    # ValueError, and arrays nested by the thousand exhaust the parser's stack.
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"{path}: not valid TOML: {_first_line(error)}"]) from error


def read_api_keys(path: Path) -> tuple[str, ...]:
    """Read API keys, one a line; blank lines and lines that start with `#` are skipped.

    Blanks around a key, the line ends of Windows and the mark that its editors put first are no
    part of one.

    Raises:
        ConfigError: the file cannot be read, holds no key, or one that no client could send. The
            message holds no key.
    """
    data = _read(path, "write one key a line into it, or correct http.api_key_file")
    try:
        lines = [line.strip() for line in data.decode("utf-8-sig").split("\n")]
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: not UTF-8; write one key a line into it"]) from error
    for number, line in enumerate(lines, 1):
        if not line.startswith("#") and _CONTROL.search(line):
            raise ConfigError(
                [f"{path}: line {number} holds a control character, which no client can send"]
            )
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError([f"{path}: holds no API key; write one key a line into it"])
    return keys


def readable_by_all(path: Path) -> str:
    """Say that every user of the machine may read or write a key file, and what to do; else "".

    A directory that shuts others out above it is as good as the file's own mode.
    """
    try:
        mode = path.stat().st_mode
        shut = any(not parent.stat().st_mode & stat.S_IXOTH for parent in path.absolute().parents)
    except OSError:
        return ""
    if shut or not mode & (stat.S_IROTH | stat.S_IWOTH):
        return ""
    return (
        f"http.api_key_file: {path}: every user of this machine may "
        f"{'read' if mode & stat.S_IROTH else 'write'} it (mode {stat.S_IMODE(mode):04o}); "
        f"chmod o-rwx {path}"
    )


def credentials(environ: Mapping[str, str]) -> dict[str, str]:
    """Return name and path of each systemd credential that a setting can come from.

    One that is there and cannot be looked at counts too: whoever reads it says why, and API keys
    that an operator passed are never silently left out.

    Args:
        environ: for CREDENTIALS_DIRECTORY (systemd.exec(5)); a relative one is ignored.
    """
    directory = Path(environ.get("CREDENTIALS_DIRECTORY", ""))
    found: dict[str, str] = {}
    if not directory.is_absolute():
        return found
    for name in filter(None, (setting.credential for setting in SETTINGS)):
        try:
            os.lstat(directory / name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            pass
        found[name] = str(directory / name)
    return found


def is_fatal(fault: str) -> bool:
    """Tell whether a line of `check_files` keeps the daemon from serving; others are warnings."""
    return not fault.startswith(_ONLY_HANDOFFS_NEED)


def check_files(config: Config, environ: Mapping[str, str] | None = None) -> list[str]:
    """Find what is wrong with the files that a configuration names.

    Args:
        config: a resolved configuration.
        environ: where PATH is taken from, unless `backend.env` sets one; None: the process's.

    Returns:
        One line for each fault, naming the key path, the file and the next step. What is found
        may have changed by the time the file is used.
    """
    search = config.backend.env.get("PATH", (environ or os.environ).get("PATH"))
    found = [_model_fault(config.model.path), _program_fault(config.backend.llama_server, search)]
    if config.provider.program is not None:
        found.append(_provider_fault(config.provider.program))
    if config.provider.elfs is not None:
        found.append(_directory_fault("provider.elfs", Path(config.provider.elfs)))
    if config.http.api_key_file is not None:
        found.append(_api_keys_fault(Path(config.http.api_key_file)))
    if config.handoff.state_dir is not None:
        found.append(_parent_fault("handoff.state_dir", Path(config.handoff.state_dir)))
    if config.lock.enabled:
        found.append(_lock_fault(Path(config.lock.path)))
    return [fault for fault in found if fault]


def _model_fault(name: str) -> str:
    try:
        with _open_regular(Path(name)) as file:
            magic = file.read(len(_GGUF_MAGIC))
            if magic != _GGUF_MAGIC:
                return (
                    f"model.path: {name}: not a GGUF file (it does not start with GGUF); name one"
                )
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                gguf_header.read(mapped)
    except gguf_header.GgufError as error:
        return f"model.path: {name}: {error}"
    except OSError as error:
        user = user_name(os.geteuid())
        return f"model.path: {name}: {_words(error)}; name a GGUF file that user {user} may read"
    except ConfigError as error:
        return f"model.path: {error}; name a GGUF file"
    return ""


def _program_fault(name: str, search: str | None) -> str:
    key = "backend.llama_server"
    if "/" not in name:
        if shutil.which(name, path=search) is None:
            return (
                f"{key}: no program {name} in PATH; install llama-server, or name its file with "
                "--llama-server PATH"
            )
        return ""
    return _executable_fault(key, Path(name), "name the llama-server program")


def _provider_fault(name: str) -> str:
    next_step = "name a prefill provider by its path (PATH is not searched), or none at all"
    return _executable_fault("provider.program", Path(name), next_step)


def _executable_fault(key: str, path: Path, next_step: str) -> str:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return f"{key}: {path}: {_words(error)}; {next_step}"
    if stat.S_ISDIR(mode):
        return f"{key}: {path}: is a directory; {next_step}"
    if not stat.S_ISREG(mode) or not os.access(path, os.X_OK):
        return f"{key}: {path}: not executable; chmod +x it, or {next_step}"
    return ""


def _directory_fault(key: str, path: Path) -> str:
    try:
        is_directory = stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        return f"{key}: {path}: {_words(error)}; name an existing directory"
    return "" if is_directory else f"{key}: {path}: not a directory; name one"


def _parent_fault(key: str, path: Path) -> str:
    """The object itself is made at start; only the directory that it is made in must be there."""
    fault = _directory_fault(key, path.parent)
    return f"{fault} to hold {path.name}" if fault else ""


def _lock_fault(path: Path) -> str:
    """What would make every handoff fall back; that somebody holds the lock is no fault."""
    fault = _parent_fault("lock.path", path)
    if fault:
        return fault
    lock = lock_probe.probe(path)
    return "" if lock.usable else f"lock.path: {path}: {lock.problem}"


def _api_keys_fault(path: Path) -> str:
    try:
        read_api_keys(path)
    except ConfigError as error:
        return f"http.api_key_file: {error}"
    return ""


def _read(path: Path, when_missing: str) -> bytes:
    try:
        with _open_regular(path) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigFileMissing([f"{path}: no such file; {when_missing}"]) from error
    except PermissionError as error:
        raise ConfigError(
            [f"{path}: permission denied; let the user that onebitd runs as read it"]
        ) from error
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {_words(error)}"]) from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError([f"{path}: larger than 1 MiB; is it the right file?"])
    return data


@contextlib.contextmanager
def _open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file; a FIFO or device, which could block for ever, is a ConfigError."""
    # O_NONBLOCK lets the open of a FIFO return; on a regular file it changes nothing.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            kind = "a directory, not a file" if stat.S_ISDIR(mode) else "not a regular file"
            raise ConfigError([f"{path}: {kind}"])
        yield file


def _words(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _first_line(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return str(error).partition("\n")[0]
