"""Configuration: one table of settings, and `resolve`, which finds every fault at once.

Each setting is resolved in this order: command-line flag, environment variable, configuration
file, default. The table is the only place where a key, its type, default, range and unit stand;
the commented example in `etc/`, `onebitd.toml(5)` and `onebitctl config` are held against it.
"""

from __future__ import annotations

import dataclasses
import enum
import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Final

from onebitd.core.errors import ConfigError


class Policy(enum.StrEnum):
    """`handoff.policy`, and with `STRICT` the values of the X-Onebit-Handoff header."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"
    STRICT = "strict"


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """`[model]`: what is served."""

    path: str
    alias: str
    ctx_size: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class HttpConfig:
    """`[http]`: the public listener."""

    host: str
    port: int
    api_key_file: str | None
    allow_unauthenticated: bool
    allowed_hosts: tuple[str, ...]
    allowed_origins: tuple[str, ...]
    max_body_mib: int
    max_pending: int
    keepalive_s: float
    drain_timeout_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class BackendConfig:
    """`[backend]`: the decoder."""

    llama_server: str
    device: str
    args: tuple[str, ...]
    env: Mapping[str, str]
    load_timeout_s: float
    restart_max: int


@dataclasses.dataclass(frozen=True, slots=True)
class ProviderConfig:
    """`[provider]`: the prefill provider; `program` None means there is none."""

    program: str | None
    elfs: str | None
    env: Mapping[str, str]
    timeout_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class HandoffConfig:
    """`[handoff]`: when a prompt is handed off, and what a failure means."""

    policy: Policy
    on_failure: str
    min_tokens: int
    share: bool
    state_dir: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class LockConfig:
    """`[lock]`: the NPU device lock; `enabled` is False under NPU_NO_DEVICE_LOCK."""

    enabled: bool
    path: str
    hold: str
    wait_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class LogConfig:
    """`[log]`."""

    format: str
    level: str


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """The effective configuration of one instance.

    `sources` says for each key path where its value came from: `flag --port`,
    `environment ONEBIT_KV_SHARE`, `file` or `default`.
    """

    instance: str
    model: ModelConfig
    http: HttpConfig
    backend: BackendConfig
    provider: ProviderConfig
    handoff: HandoffConfig
    lock: LockConfig
    log: LogConfig
    sources: Mapping[str, str]

    def values(self) -> dict[str, Any]:
        """Return every key path with its effective value, in the order of the table."""
        found: dict[str, Any] = {}
        for setting in SETTINGS:
            section, _, name = setting.key.partition(".")
            value = getattr(getattr(self, section), name)
            found[setting.key] = list(value) if isinstance(value, tuple) else value
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table.

    Args:
        key: path in the configuration file.
        kind: what the file may hold: str, int, float (an int will do), bool, list of strings,
            table of strings, or a path (a string; `~` and relative paths are refused).
        default: None means "not set".
        doc: one line for the man page's reader.
        unit: of a number, for the documentation.
        minimum, maximum: inclusive range of a number.
        choices: closed list of a string.
        env: environment variable that beats the file.
        secret_values: the values (not the keys) are hidden by `onebitctl config`.
    """

    key: str
    kind: type
    default: Any
    doc: str
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    env: str = ""
    secret_values: bool = False


SETTINGS: Final[tuple[Setting, ...]] = (
    Setting("model.path", PurePath, None, "GGUF file to serve"),
    Setting("model.alias", str, None, "model name that clients see"),
    Setting(
        "model.ctx_size",
        int,
        None,
        "context size; llama-server's own choice when not set",
        unit="tokens",
        minimum=1,
        maximum=2**31 - 1,
    ),
    Setting("http.host", str, "127.0.0.1", "address or name that the public listener binds"),
    Setting(
        "http.port",
        int,
        8000,
        "port of the public listener; 0 takes a free one",
        minimum=0,
        maximum=65535,
    ),
    Setting("http.api_key_file", PurePath, None, "file with one API key a line"),
    Setting(
        "http.allow_unauthenticated",
        bool,
        False,
        "serve a host that is not loopback without API keys",
    ),
    Setting("http.allowed_hosts", list, [], "host names beyond loopback ones in a Host header"),
    Setting("http.allowed_origins", list, [], "origins of web pages that may use the API"),
    Setting(
        "http.max_body_mib", int, 64, "largest request body", unit="MiB", minimum=1, maximum=4096
    ),
    Setting(
        "http.max_pending",
        int,
        64,
        "requests that may wait for the slot",
        unit="requests",
        minimum=1,
        maximum=100_000,
    ),
    Setting(
        "http.keepalive_s",
        float,
        10.0,
        "a stream silent this long before its first byte gets SSE comments; 0: never",
        unit="seconds",
        minimum=0,
        maximum=3600,
    ),
    Setting(
        "http.drain_timeout_s",
        float,
        60.0,
        "how long a stop lets running replies finish",
        unit="seconds",
        minimum=0,
        maximum=86_400,
    ),
    Setting(
        "backend.llama_server",
        str,
        "llama-server",
        "llama-server program",
        env="ONEBIT_LLAMA_SERVER",
    ),
    Setting("backend.device", str, "hybrid", "hybrid, hrx, cpu or a llama-server device name"),
    Setting("backend.args", list, [], "extra llama-server arguments"),
    Setting(
        "backend.env", dict, {}, "extra environment variables of llama-server", secret_values=True
    ),
    Setting(
        "backend.load_timeout_s",
        float,
        600.0,
        "how long the model may take to load",
        unit="seconds",
        minimum=1,
        maximum=86_400,
    ),
    Setting(
        "backend.restart_max",
        int,
        5,
        "restarts of the decoder within 300 s, beyond which onebitd exits with status 4",
        unit="restarts",
        minimum=0,
        maximum=1000,
    ),
    Setting("provider.program", PurePath, None, "prefill provider", env="ONEBIT_HYBRID_PREFILL"),
    Setting(
        "provider.elfs",
        PurePath,
        None,
        "directory passed to the provider as --elfs",
        env="ONEBIT_HYBRID_ELFS",
    ),
    Setting(
        "provider.env", dict, {}, "extra environment variables of the provider", secret_values=True
    ),
    Setting(
        "provider.timeout_s",
        float,
        120.0,
        "how long one prompt may take",
        unit="seconds",
        minimum=0.001,
        maximum=86_400,
    ),
    Setting(
        "handoff.policy",
        str,
        "auto",
        "which prompts are handed off",
        choices=("auto", "always", "never"),
    ),
    Setting(
        "handoff.on_failure",
        str,
        "fallback",
        "fallback: the decoder prefills; error: the client gets a 502 with the reason",
        choices=("fallback", "error"),
    ),
    Setting(
        "handoff.min_tokens",
        int,
        1,
        "shorter prompts are not handed off",
        unit="tokens",
        minimum=1,
        maximum=2**31 - 1,
    ),
    Setting("handoff.share", bool, False, "use the shared route", env="ONEBIT_KV_SHARE"),
    Setting(
        "handoff.state_dir",
        PurePath,
        None,
        "directory of state files; the runtime directory when not set; tmpfs wanted",
    ),
    Setting(
        "lock.path",
        PurePath,
        "/tmp/1bit-npu-device.lock",  # noqa: S108 - the fleet's path
        "NPU device lock",
    ),
    Setting(
        "lock.hold",
        str,
        "handoff",
        "handoff: taken around each provider run; lifetime: held while the daemon runs",
        choices=("handoff", "lifetime"),
    ),
    Setting(
        "lock.wait_s",
        float,
        30.0,
        "how long a handoff waits for the lock",
        unit="seconds",
        minimum=0,
        maximum=86_400,
    ),
    Setting(
        "log.format",
        str,
        "auto",
        "how log records are written",
        choices=("auto", "json", "text", "journal"),
    ),
    Setting(
        "log.level",
        str,
        "info",
        "least level that is logged",
        choices=("debug", "info", "warning", "error"),
    ),
)

SETTING_BY_KEY: Final[Mapping[str, Setting]] = {setting.key: setting for setting in SETTINGS}

INSTANCE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""What an instance may be called: it becomes a directory and part of a unit's name."""

NO_LOCK_VARIABLE: Final = "NPU_NO_DEVICE_LOCK"
"""Set: take no device lock. The engine's own variable."""

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def resolve(
    *,
    instance: str | None,
    file: Mapping[str, Any] | None = None,
    file_name: str = "",
    flags: Mapping[str, tuple[str, Any]] | None = None,
    environ: Mapping[str, str] | None = None,
    extra_problems: Sequence[str] = (),
) -> Config:
    """Merge the sources of settings into one checked configuration.

    Args:
        instance: name given with --instance or taken from the configuration file's name; None
            when there is neither, then the model file's stem names it.
        file: the parsed TOML document.
        file_name: for messages.
        flags: key path to (flag, value), for the flags that were given.
        environ: the process environment.
        extra_problems: faults found by others, reported along with ours.

    Raises:
        ConfigError: with one line for each fault, each naming the key path and where it stands.
    """
    problems = list(extra_problems)
    found: dict[str, Any] = {}
    sources: dict[str, str] = {}
    in_file = _flatten(file or {}, file_name, problems)
    for setting in SETTINGS:
        value, source = _pick(setting, in_file, flags or {}, environ or {})
        where = (
            f"{file_name}: {setting.key}"
            if source == "file"
            else (setting.key if source == "default" else source.split(" ", 1)[1])
        )
        if source != "default":
            value = _checked(setting, value, where, problems)
        found[setting.key] = value
        sources[setting.key] = source
    _check_together(found, sources, problems)
    name = _instance_name(instance, found["model.path"], problems)
    if found["model.alias"] is None:
        found["model.alias"] = (
            name if instance is not None else PurePath(found["model.path"] or name).stem or name
        )
    if problems:
        raise ConfigError(problems)
    return _build(name, found, sources, lock_enabled=NO_LOCK_VARIABLE not in (environ or {}))


def is_loopback(host: str) -> bool:
    """Say whether binding `host` reaches this machine only.

    >>> is_loopback("127.0.0.2"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _pick(
    setting: Setting,
    in_file: Mapping[str, Any],
    flags: Mapping[str, tuple[str, Any]],
    environ: Mapping[str, str],
) -> tuple[Any, str]:
    if setting.key in flags:
        flag, value = flags[setting.key]
        return value, f"flag {flag}"
    if setting.env and environ.get(setting.env):
        value = environ[setting.env]
        # Set and non-empty turns a switch on; "0" too, as the engine reads it.
        return (True if setting.kind is bool else value), f"environment {setting.env}"
    if setting.key in in_file:
        return in_file[setting.key], "file"
    return setting.default, "default"


def _flatten(file: Mapping[str, Any], file_name: str, problems: list[str]) -> dict[str, Any]:
    known_sections = {setting.key.partition(".")[0] for setting in SETTINGS}
    flat: dict[str, Any] = {}
    for section, table in file.items():
        if section not in known_sections:
            problems.append(
                f"{file_name}: {section}: unknown key; the sections are "
                f"{', '.join(sorted(known_sections))}"
            )
            continue
        if not isinstance(table, Mapping):
            problems.append(f"{file_name}: {section}: must be a table, [{section}]")
            continue
        for name, value in table.items():
            key = f"{section}.{name}"
            if key in SETTING_BY_KEY:
                flat[key] = value
            else:
                problems.append(f"{file_name}: {key}: unknown key{_near(key)}")
    return flat


def _near(key: str) -> str:
    """Return a hint when a known key differs only in spelling."""
    squeezed = key.replace("-", "_").replace("__", "_").lower()
    for known in SETTING_BY_KEY:
        if squeezed == known or sorted(squeezed) == sorted(known):
            return f"; did you mean {known}?"
    return ""


def _checked(setting: Setting, value: Any, where: str, problems: list[str]) -> Any:
    fault = _CHECKS[setting.kind](setting, value)
    if fault:
        problems.append(f"{where}: {fault}")
        return setting.default
    return value


def _check_string(setting: Setting, value: Any) -> str:
    if not isinstance(value, str):
        return f"must be a string, not {_type_name(value)}"
    if setting.choices and value not in setting.choices:
        return f"must be one of {', '.join(setting.choices)}, not {value!r}"
    if not value.strip():
        return "must not be empty"
    if any(ord(letter) < 0x20 or ord(letter) == 0x7F for letter in value):
        return "must not hold control characters"
    return ""


def _check_path(setting: Setting, value: Any) -> str:
    fault = _check_string(setting, value)
    if fault:
        return fault
    if not PurePath(value).is_absolute():
        return f"must be an absolute path, not {value!r}"
    return ""


def _check_number(setting: Setting, value: Any) -> str:
    wanted = "a whole number" if setting.kind is int else "a number"
    allowed = (int,) if setting.kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed):
        return f"must be {wanted}, not {_type_name(value)}"
    unit = f" {setting.unit}" if setting.unit else ""
    low, high = setting.minimum, setting.maximum
    # Written so that NaN, which compares false with everything, is refused too.
    if low is not None and not value >= low:
        return f"must be at least {low:g}{unit}, not {value}"
    if high is not None and not value <= high:
        return f"must be at most {high:g}{unit}, not {value}"
    return ""


def _check_bool(setting: Setting, value: Any) -> str:
    del setting
    return "" if isinstance(value, bool) else f"must be true or false, not {_type_name(value)}"


def _check_list(setting: Setting, value: Any) -> str:
    del setting
    if not isinstance(value, list | tuple):
        return f"must be a list of strings, not {_type_name(value)}"
    for index, item in enumerate(value):
        if not isinstance(item, str):
            return f"item {index} must be a string, not {_type_name(item)}"
        if "\0" in item:
            return f"item {index} must not hold a NUL character"
    return ""


def _check_table(setting: Setting, value: Any) -> str:
    del setting
    if not isinstance(value, Mapping):
        return f"must be a table of strings, not {_type_name(value)}"
    for name, item in value.items():
        if not _ENV_NAME.fullmatch(name):
            return f"{name!r} is not the name of an environment variable"
        if not isinstance(item, str):
            return f"{name} must be a string, not {_type_name(item)}"
        if "\0" in item:
            return f"{name} must not hold a NUL character"
    return ""


_CHECKS: Final[Mapping[type, Callable[[Setting, Any], str]]] = {
    str: _check_string,
    PurePath: _check_path,
    int: _check_number,
    float: _check_number,
    bool: _check_bool,
    list: _check_list,
    dict: _check_table,
}

_TYPE_NAMES: Final = {
    bool: "a boolean",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "a table",
}


def _type_name(value: Any) -> str:
    return _TYPE_NAMES.get(type(value), type(value).__name__)


def _check_together(
    found: Mapping[str, Any], sources: Mapping[str, str], problems: list[str]
) -> None:
    # A key that was given and is faulty has its own line already: only "not given" counts here.
    if sources["model.path"] == "default":
        problems.append("model.path: not set; name the GGUF file there or with -m MODEL")
    if (
        not is_loopback(found["http.host"])
        and sources["http.api_key_file"] == "default"
        and not found["http.allow_unauthenticated"]
    ):
        problems.append(
            f"http.api_key_file: required because http.host {found['http.host']} is not a loopback "
            "address; name a file with one key a line, or set http.allow_unauthenticated = true"
        )
    program = found["backend.llama_server"]
    if "/" in program and not PurePath(program).is_absolute():
        problems.append(
            f"backend.llama_server: must be an absolute path or a name to look up in PATH, not "
            f"{program!r}"
        )
    if "," in (found["model.alias"] or ""):
        # llama-server takes --alias as a list.
        problems.append(f"model.alias: must not hold a comma, not {found['model.alias']!r}")


def _instance_name(instance: str | None, model_path: str | None, problems: list[str]) -> str:
    if instance is None:
        stem = Path(model_path).stem if model_path else "default"
        return re.sub(r"[^A-Za-z0-9_.-]", "-", stem).lstrip("_.-")[:64] or "default"
    if not INSTANCE_NAME.fullmatch(instance):
        problems.append(
            f"instance {instance!r}: a name is 1 to 64 letters, digits, '_', '.' and "
            "'-', and starts with a letter or digit"
        )
    return instance


def _build(
    name: str, found: Mapping[str, Any], sources: Mapping[str, str], *, lock_enabled: bool
) -> Config:
    def section(prefix: str) -> dict[str, Any]:
        values = {}
        for setting in SETTINGS:
            if setting.key.startswith(prefix + "."):
                value = found[setting.key]
                if setting.kind is list:
                    value = tuple(value)
                elif setting.kind is float:
                    value = float(value)
                elif setting.kind is dict:
                    value = dict(value)
                values[setting.key.partition(".")[2]] = value
        return values

    handoff = section("handoff")
    return Config(
        instance=name,
        model=ModelConfig(**section("model")),
        http=HttpConfig(**section("http")),
        backend=BackendConfig(**section("backend")),
        provider=ProviderConfig(**section("provider")),
        handoff=HandoffConfig(**handoff | {"policy": Policy(handoff["policy"])}),
        lock=LockConfig(enabled=lock_enabled, **section("lock")),
        log=LogConfig(**section("log")),
        sources=dict(sources),
    )
