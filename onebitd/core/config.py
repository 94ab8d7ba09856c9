"""Configuration: one table of settings, and what `config_resolve.resolve` makes of it.

Each setting is resolved in this order: command-line flag, environment variable, configuration
file, default. The table is the only place where a key, its type, default, range and unit stand;
the commented example in `etc/`, `onebitd.toml(5)` and `onebitctl config` are held against it.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Final


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
    max_connections: int
    keepalive_s: float
    drain_timeout_s: float
    page: bool


@dataclasses.dataclass(frozen=True, slots=True)
class BackendConfig:
    """`[backend]`: the decoder."""

    llama_server: str
    device: str
    args: tuple[str, ...]
    env: Mapping[str, str]
    load_timeout_s: float
    restart_max: int
    hang_s: float


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
    keep_bad_states: int
    audit: float
    audit_tolerance: float
    audit_strikes: int


@dataclasses.dataclass(frozen=True, slots=True)
class LockConfig:
    """`[lock]`: the NPU device lock; `enabled` is False under NPU_NO_DEVICE_LOCK."""

    enabled: bool
    path: str
    hold: str
    wait_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class MetricsConfig:
    """`[metrics]`: a listener for scrapers; `listen` None means there is none."""

    listen: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class HistoryConfig:
    """`[history]`: how many handoffs are kept on disk, and for how long."""

    max_records: int
    max_age_days: float


@dataclasses.dataclass(frozen=True, slots=True)
class LogConfig:
    """`[log]`."""

    format: str
    level: str


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """The effective configuration of one instance.

    `sources` says for each key path where its value came from: `flag --port`,
    `environment ONEBIT_KV_SHARE`, `file`, `credential api-key` or `default`.
    """

    instance: str
    model: ModelConfig
    http: HttpConfig
    backend: BackendConfig
    provider: ProviderConfig
    handoff: HandoffConfig
    lock: LockConfig
    metrics: MetricsConfig
    history: HistoryConfig
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
        credential: name of the systemd credential whose file is the value where nothing else is.
        reload: a reload changes it; else it needs a restart.
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
    credential: str = ""
    reload: bool = False
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
    Setting(
        "http.api_key_file",
        PurePath,
        None,
        "file with one API key a line",
        credential="api-key",
        reload=True,
    ),
    Setting(
        "http.allow_unauthenticated",
        bool,
        False,
        "serve a host that is not loopback without API keys",
        reload=True,
    ),
    Setting(
        "http.allowed_hosts",
        list,
        [],
        "host names beyond loopback ones in a Host header",
        reload=True,
    ),
    Setting(
        "http.allowed_origins", list, [], "origins of web pages that may use the API", reload=True
    ),
    Setting(
        "http.max_body_mib",
        int,
        64,
        "largest request body",
        unit="MiB",
        minimum=1,
        maximum=4096,
        reload=True,
    ),
    Setting(
        "http.max_pending",
        int,
        64,
        "requests that may wait for the slot",
        unit="requests",
        minimum=1,
        maximum=100_000,
        reload=True,
    ),
    Setting(
        "http.max_connections",
        int,
        512,
        "connections of clients to the public listener",
        unit="connections",
        minimum=1,
        maximum=100_000,
        reload=True,
    ),
    Setting(
        "http.keepalive_s",
        float,
        10.0,
        "a stream silent this long before its first byte gets SSE comments; 0: never",
        unit="seconds",
        minimum=0,
        maximum=3600,
        reload=True,
    ),
    Setting(
        "http.drain_timeout_s",
        float,
        60.0,
        "how long a stop lets running replies finish",
        unit="seconds",
        minimum=0,
        maximum=86_400,
        reload=True,
    ),
    Setting("http.page", bool, True, "serve the page at /onebit/", reload=True),
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
        "backend.env",
        dict,
        {},
        "extra environment variables of llama-server",
        secret_values=True,
    ),
    Setting(
        "backend.load_timeout_s",
        float,
        600.0,
        "how long the model may take to load",
        unit="seconds",
        minimum=1,
        maximum=86_400,
        reload=True,
    ),
    Setting(
        "backend.restart_max",
        int,
        5,
        "restarts of the decoder within 300 s, beyond which onebitd exits with status 4",
        unit="restarts",
        minimum=0,
        maximum=1000,
        reload=True,
    ),
    Setting(
        "backend.hang_s",
        float,
        120.0,
        "a decoder that neither answers nor works for this long is restarted; 0: never",
        unit="seconds",
        minimum=0,
        maximum=86_400,
        reload=True,
    ),
    Setting(
        "provider.program",
        PurePath,
        None,
        "prefill provider",
        env="ONEBIT_HYBRID_PREFILL",
        reload=True,
    ),
    Setting(
        "provider.elfs",
        PurePath,
        None,
        "directory passed to the provider as --elfs",
        env="ONEBIT_HYBRID_ELFS",
        reload=True,
    ),
    Setting(
        "provider.env",
        dict,
        {},
        "extra environment variables of the provider",
        secret_values=True,
        reload=True,
    ),
    Setting(
        "provider.timeout_s",
        float,
        120.0,
        "how long one prompt may take",
        unit="seconds",
        minimum=0.001,
        maximum=86_400,
        reload=True,
    ),
    Setting(
        "handoff.policy",
        str,
        "auto",
        "which prompts are handed off",
        choices=("auto", "always", "never"),
        reload=True,
    ),
    Setting(
        "handoff.on_failure",
        str,
        "fallback",
        "fallback: the decoder prefills; error: the client gets a 502 with the reason",
        choices=("fallback", "error"),
        reload=True,
    ),
    Setting(
        "handoff.min_tokens",
        int,
        1,
        "shorter prompts are not handed off",
        unit="tokens",
        minimum=1,
        maximum=2**31 - 1,
        reload=True,
    ),
    Setting("handoff.share", bool, False, "use the shared route", env="ONEBIT_KV_SHARE"),
    Setting(
        "handoff.state_dir",
        PurePath,
        None,
        "directory of state files; the runtime directory when not set; tmpfs wanted",
    ),
    Setting(
        "handoff.keep_bad_states",
        int,
        0,
        "so many refused state files are kept for looking into",
        unit="files",
        minimum=0,
        maximum=100,
        reload=True,
    ),
    Setting(
        "handoff.audit",
        float,
        0.0,
        "share of the handoffs that the decoder recomputes while it is idle, and compares",
        minimum=0,
        maximum=1,
        reload=True,
    ),
    Setting(
        "handoff.audit_tolerance",
        float,
        0.05,
        "largest relative error of a row of the cache that an audit passes",
        minimum=0,
        maximum=1000,
        reload=True,
    ),
    Setting(
        "handoff.audit_strikes",
        int,
        3,
        "so many audits that found drift take the provider out of service",
        unit="audits",
        minimum=1,
        maximum=1_000_000,
        reload=True,
    ),
    Setting(
        "lock.path",
        PurePath,
        "/tmp/1bit-npu-device.lock",  # noqa: S108 - the fleet's path
        "NPU device lock",
        reload=True,
    ),
    Setting(
        "lock.hold",
        str,
        "handoff",
        "handoff: taken around each provider run; lifetime: held while the daemon runs",
        choices=("handoff", "lifetime"),
        reload=True,
    ),
    Setting(
        "lock.wait_s",
        float,
        30.0,
        "how long a handoff waits for the lock",
        unit="seconds",
        minimum=0,
        maximum=86_400,
        reload=True,
    ),
    Setting(
        "metrics.listen",
        str,
        None,
        "address and port of a listener that serves /metrics and nothing else",
    ),
    Setting(
        "history.max_records",
        int,
        50_000,
        "so many handoffs are kept on disk, the newest; 0: none",
        unit="records",
        minimum=0,
        maximum=10_000_000,
        reload=True,
    ),
    Setting(
        "history.max_age_days",
        float,
        30.0,
        "older handoffs are deleted from disk",
        unit="days",
        minimum=0.01,
        maximum=36_500,
        reload=True,
    ),
    Setting(
        "log.format",
        str,
        "auto",
        "how log records are written",
        choices=("auto", "json", "text", "journal"),
        reload=True,
    ),
    Setting(
        "log.level",
        str,
        "info",
        "least level that is logged",
        choices=("debug", "info", "warning", "error"),
        reload=True,
    ),
)

SETTING_BY_KEY: Final[Mapping[str, Setting]] = {setting.key: setting for setting in SETTINGS}

INSTANCE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""What an instance may be called: it becomes a directory and part of a unit's name."""

NO_LOCK_VARIABLE: Final = "NPU_NO_DEVICE_LOCK"
"""Set: take no device lock. The engine's own variable."""
