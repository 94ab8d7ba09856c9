"""`resolve`: flags, environment, file and defaults become one configuration or a list of faults.

Every fault is found at once. The order of the sources is in the docstring of `config`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from onebitd.core.config import (
    INSTANCE_NAME,
    NO_LOCK_VARIABLE,
    SETTING_BY_KEY,
    SETTINGS,
    BackendConfig,
    Config,
    HandoffConfig,
    HistoryConfig,
    HttpConfig,
    LockConfig,
    LogConfig,
    MetricsConfig,
    ModelConfig,
    Policy,
    ProviderConfig,
    Setting,
)
from onebitd.core.config_checks import check_together, checked
from onebitd.core.errors import ConfigError


def resolve(
    *,
    instance: str | None,
    file: Mapping[str, Any] | None = None,
    file_name: str = "",
    flags: Mapping[str, tuple[str, Any]] | None = None,
    environ: Mapping[str, str] | None = None,
    credentials: Mapping[str, str] | None = None,
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
        credentials: name to path, of the systemd credentials that are there.
        extra_problems: faults found by others, reported along with ours.

    Raises:
        ConfigError: with one line for each fault, each naming the key path and where it stands.
    """
    problems = list(extra_problems)
    found: dict[str, Any] = {}
    sources: dict[str, str] = {}
    in_file = _flatten(file or {}, file_name, problems)
    for setting in SETTINGS:
        value, source = _pick(setting, in_file, flags or {}, environ or {}, credentials or {})
        where = (
            f"{file_name}: {setting.key}"
            if source == "file"
            else (setting.key if source == "default" else source.split(" ", 1)[1])
        )
        if source != "default":
            value = checked(setting, value, where, problems)
        found[setting.key] = value
        sources[setting.key] = source
    check_together(found, sources, problems)
    name = _instance_name(instance, found["model.path"], problems)
    if found["model.alias"] is None:
        found["model.alias"] = (
            name if instance is not None else PurePath(found["model.path"] or name).stem or name
        )
    if problems:
        raise ConfigError(problems)
    return _build(name, found, sources, lock_enabled=NO_LOCK_VARIABLE not in (environ or {}))


def _pick(
    setting: Setting,
    in_file: Mapping[str, Any],
    flags: Mapping[str, tuple[str, Any]],
    environ: Mapping[str, str],
    credentials: Mapping[str, str],
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
    if setting.credential in credentials:
        return credentials[setting.credential], f"credential {setting.credential}"
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
        metrics=MetricsConfig(**section("metrics")),
        history=HistoryConfig(**section("history")),
        log=LogConfig(**section("log")),
        sources=dict(sources),
    )
