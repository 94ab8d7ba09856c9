"""The commented example and the man page are held against the table of settings."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path, PurePath
from typing import Any

import pytest

from onebitd.core.config import SETTING_BY_KEY, SETTINGS, Config, Setting
from onebitd.core.config_resolve import resolve

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "etc" / "onebitd.toml"
MAN_PAGE = ROOT / "man" / "onebitd.toml.5"


def resolved(text: str) -> Config:
    """Resolve the text of a configuration file."""
    return resolve(instance="x", file=tomllib.loads(text), file_name="etc/onebitd.toml")


def uncommented() -> str:
    """Return the example with each commented key turned on; prose has a space after its #."""
    return re.sub(r"^#(?=[a-z_]+ = )", "", EXAMPLE.read_text(), flags=re.MULTILINE)


def flat(document: dict[str, Any]) -> dict[str, Any]:
    """Return key path to value."""
    return {f"{s}.{key}": value for s, table in document.items() for key, value in table.items()}


def test_example_as_shipped_is_the_defaults() -> None:
    """Only model.path is set, so the file changes nothing else."""
    config = resolved(EXAMPLE.read_text())
    given = {key for key, source in config.sources.items() if source != "default"}
    assert given == {"model.path"}
    plain = resolve(instance="x", file={"model": {"path": config.model.path}})
    assert config.values() == plain.values()


def test_example_with_every_key_turned_on_is_valid_and_still_the_defaults() -> None:
    """Each key stands there, with its default; what has none shows an example."""
    config = resolved(uncommented())
    found = flat(tomllib.loads(uncommented()))
    assert set(found) == set(SETTING_BY_KEY)
    for setting in SETTINGS:
        if setting.default is not None:
            assert config.values()[setting.key] == setting.default, setting.key
            assert found[setting.key] == setting.default, setting.key


def comment_above(key: str) -> str:
    """Return the comment that explains a key of the example, on one line."""
    section, _, name = key.partition(".")
    body = EXAMPLE.read_text().split(f"[{section}]\n")[1].split("\n[")[0]
    block = next(b for b in body.split("\n\n") if re.search(rf"^#?{name} = ", b, re.MULTILINE))
    lines = [line for line in block.splitlines() if not re.match(r"#?[a-z_]+ = ", line)]
    return re.sub(r"\s+", " ", " ".join(line.lstrip("#") for line in lines))


def shown(number: float) -> str:
    """Write a bound as the documentation does."""
    return str(int(number)) if number == int(number) else str(number)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_example_explains_each_key(setting: Setting) -> None:
    """Unit, range, choices, variable, and that there is no default where there is none."""
    comment = comment_above(setting.key)
    assert comment.strip()
    if setting.minimum is not None and setting.maximum is not None:
        assert f"{shown(setting.minimum)} to {shown(setting.maximum)}" in comment
    assert setting.unit.lower() in comment.lower()
    for choice in setting.choices:
        assert f'"{choice}"' in comment
    assert setting.env in comment
    if setting.default is None and setting.key != "model.path":
        assert "Default: not set" in comment


def man_entry(key: str) -> str:
    """Return the man page's entry of a key, on one line."""
    text = MAN_PAGE.read_text()
    found = re.search(rf"^\.It Ic {re.escape(key)}\n(.*?)^\.(It|El)\b", text, re.M | re.S)
    assert found, f"{key} is not in {MAN_PAGE.name}"
    return re.sub(r"\s+", " ", found.group(1))


def test_man_page_has_exactly_the_keys_in_the_tables_order() -> None:
    """No key is missing, and none is described that does not exist."""
    found = re.findall(r"^\.It Ic (\S+)$", MAN_PAGE.read_text(), re.MULTILINE)
    assert found == [setting.key for setting in SETTINGS]
    mentioned = re.findall(r"^\.Ic ([a-z]+\.[a-z_]+)", MAN_PAGE.read_text(), re.MULTILINE)
    assert set(mentioned) <= set(SETTING_BY_KEY)


TYPE_WORDS = {
    PurePath: "Path",
    str: "String",
    bool: "Boolean",
    int: "Whole number",
    float: "Number",
    list: "List of strings",
    dict: "Table of strings",
}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_man_page_gives_type_default_range_and_variable(setting: Setting) -> None:
    """What the table says of a key, the manual says too."""
    entry = man_entry(setting.key)
    assert entry.startswith("One of" if setting.choices else TYPE_WORDS[setting.kind])
    if setting.key == "model.path":
        assert "required" in entry
    elif setting.default is None:
        assert "default: not set" in entry
    else:
        default = setting.default
        word = default if isinstance(default, str) else json.dumps(default).removesuffix(".0")
        assert f"efault: .Ql {word} ." in entry
    if setting.minimum is not None and setting.maximum is not None:
        assert f"{shown(setting.minimum)} to {shown(setting.maximum)}" in entry
    for choice in setting.choices:
        assert f".Ql {choice} " in entry
    if setting.unit:
        assert setting.unit in entry
    if setting.env:
        assert f".Ev {setting.env} " in entry


def test_documents_name_the_settings_that_need_a_restart() -> None:
    """A reader of the manual or of the example knows before a reload what it will not do."""
    text = MAN_PAGE.read_text().split(".Sh RELOAD\n")[1].split("\n.Sh ")[0]
    keys = [setting.key for setting in SETTINGS if not setting.reload]
    assert re.findall(r"^\.Ic (\S+)", text, re.MULTILINE) == keys
    words = re.sub(r"\s*\n#\s*", " ", EXAMPLE.read_text())
    found = re.search(r"needs a restart instead: (.*?)\.\s", words)
    assert found
    assert found.group(1) == (
        "[model], host and port, [backend] but its three limits, share, state_dir, metrics"
    )
    sections = [key for key in keys if key.partition(".")[0] not in ("model", "backend")]
    assert sections == [
        *("http.host", "http.port", "handoff.share", "handoff.state_dir", "metrics.listen")
    ]
    limits = [s.key for s in SETTINGS if s.key.startswith("backend.") and s.reload]
    assert limits == ["backend.load_timeout_s", "backend.restart_max", "backend.hang_s"]
    assert not [s.key for s in SETTINGS if s.key.startswith("model.") and s.reload]


def test_man_page_examples_are_valid_configurations() -> None:
    """Nobody copies a fault from the manual: the examples, joined, resolve."""
    blocks = re.findall(r"^\.Bd -literal.*?\n(.*?)^\.Ed", MAN_PAGE.read_text(), re.M | re.S)
    assert len(blocks) == 2
    assert resolved("\n".join(blocks)).sources["http.host"] == "file"


def test_man_page_passes_mandoc() -> None:
    """mandoc's linter has nothing to say about it."""
    mandoc = shutil.which("mandoc")
    if mandoc is None:
        assert os.environ.get("CI") != "true", "mandoc is not installed"
        pytest.skip("mandoc is not installed")
    done = subprocess.run(
        [mandoc, "-T", "lint", "-W", "warning", str(MAN_PAGE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
