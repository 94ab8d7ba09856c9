"""Which settings a reload changes, and what the effective configuration then is."""

from __future__ import annotations

from typing import Any

import pytest

from onebitd.core.config import SETTINGS, Config, Setting
from onebitd.core.config_resolve import resolve
from onebitd.core.errors import ConfigError
from onebitd.core.reload import merge

OTHER: dict[str, Any] = {
    "model.path": "/other.gguf",
    "model.alias": "other",
    "http.host": "127.0.0.2",
    "http.api_key_file": "/keys",
    "http.allowed_origins": ["https://other.lan"],
    "backend.llama_server": "/bin/other",
    "backend.device": "cpu",
    "provider.program": "/bin/provider",
    "provider.elfs": "/elfs",
    "handoff.policy": "never",
    "handoff.on_failure": "error",
    "handoff.state_dir": "/states",
    "handoff.audit": 0.5,
    "lock.path": "/lock",
    "lock.hold": "lifetime",
    "metrics.listen": "127.0.0.1:9464",
    "log.format": "json",
    "log.level": "debug",
}
RESTART = (
    *("model.path", "model.alias", "model.ctx_size", "http.host", "http.port"),
    *("backend.llama_server", "backend.device", "backend.args", "backend.env"),
    *("handoff.share", "handoff.state_dir", "metrics.listen"),
)


def other_value(setting: Setting) -> Any:
    """Return a valid value that is not the default."""
    if setting.key in OTHER:
        return OTHER[setting.key]
    by_kind: dict[type, Any] = {bool: not setting.default, list: ["x"], dict: {"A": "b"}}
    return by_kind[setting.kind] if setting.kind in by_kind else setting.kind(7)


def resolved(*pairs: tuple[str, Any], **how: Any) -> Config:
    """Resolve a file with these keys."""
    file: dict[str, Any] = {"model": {"path": "/m.gguf"}}
    for key, value in pairs:
        section, _, name = key.partition(".")
        file.setdefault(section, {})[name] = value
    return resolve(instance="x", file=file, file_name="x.toml", **how)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_merge_takes_over_each_live_key_and_keeps_each_other(setting: Setting) -> None:
    """Value and source stay together: both new, or both of the running process."""
    running, wanted = resolved(), resolved((setting.key, other_value(setting)))
    merged = merge(running, wanted)
    effective = wanted if setting.reload else running
    assert merged.changed == ((setting.key,) if setting.reload else ())
    assert merged.needs_restart == (() if setting.reload else (setting.key,))
    assert merged.config.values() == effective.values()
    assert merged.config.sources == effective.sources
    assert merge(merged.config, wanted).changed == ()


def test_settings_that_need_a_restart_are_these() -> None:
    """What the decoder was started with, where the listener is, and where state files are."""
    assert tuple(setting.key for setting in SETTINGS if not setting.reload) == RESTART


def test_merge_same_values_from_elsewhere_change_nothing_but_the_source() -> None:
    """A key that moved into the file with its old value has not changed."""
    running, wanted = resolved(), resolved(("http.port", 8000), ("lock.wait_s", 30))
    merged = merge(running, wanted)
    assert (merged.changed, merged.needs_restart) == ((), ())
    assert merged.config.sources["http.port"] == merged.config.sources["lock.wait_s"] == "file"


def test_merge_other_keys_in_the_same_file_are_a_change_of_the_file() -> None:
    """Rotated keys have no other name in the configuration."""
    config = resolved(("http.api_key_file", "/keys"))
    assert merge(config, config, api_keys_differ=True).changed == ("http.api_key_file",)


def test_merge_no_lock_of_the_start_stays() -> None:
    """NPU_NO_DEVICE_LOCK is the environment's, which is that of the start."""
    running = resolved(environ={"NPU_NO_DEVICE_LOCK": "1"})
    wanted = resolved(("lock.path", "/l"), environ={"NPU_NO_DEVICE_LOCK": "1"})
    assert not merge(running, wanted).config.lock.enabled


def test_merge_address_that_stays_without_keys_is_refused() -> None:
    """The file may be right for the next start; until then everybody would get in."""
    keys = ("http.api_key_file", "/keys")
    running, wanted = resolved(("http.host", "0.0.0.0"), keys), resolved()  # noqa: S104
    with pytest.raises(ConfigError) as caught:
        merge(running, wanted)
    assert "as long as onebitd listens on 0.0.0.0" in caught.value.problems[0]
    assert merge(running, resolved(keys)).needs_restart == ("http.host",)
    with pytest.raises(ConfigError, match=r"listens on 192\.0\.2\.1"):
        merge(resolved(keys), wanted, listens_on=["127.0.0.1", "192.0.2.1"])
    assert merge(resolved(keys), wanted, listens_on=["127.0.0.1", "::1"]).changed
