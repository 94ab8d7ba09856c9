"""What a reload may change: the running configuration and the one wanted become the effective one.

Which keys are live is said by the table of settings (`Setting.reload`). The others keep the value
that they run with, so that what `onebitctl config` shows stays true until the restart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from onebitd.core.config import SETTINGS, Config
from onebitd.core.config_checks import is_loopback
from onebitd.core.errors import ConfigError

KEYS_KEY: Final = "http.api_key_file"
_SECTIONS: Final = (
    *("model", "http", "backend", "provider", "handoff", "lock", "metrics", "history", "log"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Merged:
    """The outcome: `config` is effective from now on; both lists are in the table's order."""

    config: Config
    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]


def merge(
    running: Config,
    wanted: Config,
    *,
    api_keys_differ: bool = False,
    listens_on: Sequence[str] = (),
) -> Merged:
    """Take over from `wanted` what can change while the daemon runs.

    Args:
        running: the effective configuration so far.
        wanted: what a start would make of file, flags and environment now.
        api_keys_differ: the key file's content is another; then its key has changed, whatever its
            path.
        listens_on: hosts of the public listener, which a socket passed by systemd may set.

    Raises:
        ConfigError: with the address that stays until a restart, nobody would need an API key.
    """
    before, after = running.values(), wanted.values()
    sources = dict(wanted.sources)
    taken: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    changed: list[str] = []
    needs_restart: list[str] = []
    for setting in SETTINGS:
        key = setting.key
        differs = before[key] != after[key] or (key == KEYS_KEY and api_keys_differ)
        if setting.reload:
            section, _, name = key.partition(".")
            taken[section][name] = getattr(getattr(wanted, section), name)
        if differs and setting.reload:
            changed.append(key)
        elif differs:
            needs_restart.append(key)
            sources[key] = running.sources[key]
    sections: dict[str, Any] = {
        section: dataclasses.replace(getattr(running, section), **values)
        for section, values in taken.items()
    }
    config = dataclasses.replace(running, sources=sources, **sections)
    _refuse_open_door(config, listens_on)
    return Merged(config, tuple(changed), tuple(needs_restart))


def _refuse_open_door(config: Config, listens_on: Sequence[str]) -> None:
    """The new file may be fine by itself, with a loopback address that is not bound yet."""
    http = config.http
    if http.api_key_file is not None or http.allow_unauthenticated:
        return
    for host in (http.host, *listens_on):
        if not is_loopback(host):
            raise ConfigError(
                [
                    f"http.api_key_file: required as long as onebitd listens on {host}, which a "
                    "reload does not change; name a file with keys, or restart onebitd"
                ]
            )
