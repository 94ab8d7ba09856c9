"""The table of settings and `resolve`."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebitd.core.config import SETTING_BY_KEY, SETTINGS, Config, Policy
from onebitd.core.config_checks import is_loopback
from onebitd.core.config_resolve import resolve
from onebitd.core.errors import ConfigError


def resolved(*changes: tuple[str, Any], **more: Any) -> Config:
    """Resolve a file that names a model, with (key, value) changes."""
    file: dict[str, dict[str, Any]] = {"model": {"path": "/m/model.gguf"}}
    for key, value in changes:
        section, _, name = key.partition(".")
        file.setdefault(section, {})[name] = value
    return resolve(**({"instance": "a", "file": file, "file_name": "a.toml"} | more))


def problems(*changes: tuple[str, Any], **more: Any) -> list[str]:
    """Resolve a bad configuration and return its lines."""
    with pytest.raises(ConfigError) as caught:
        resolved(*changes, **more)
    return list(caught.value.problems)


def test_resolve_defaults_are_the_tables() -> None:
    """Nothing given but a model: every other key has its default, and says so."""
    config = resolved()
    values = config.values()
    for setting in SETTINGS:
        if setting.key not in ("model.path", "model.alias"):
            assert values[setting.key] == setting.default, setting.key
            assert config.sources[setting.key] == "default"
    assert config.sources["model.path"] == "file"
    assert config.lock.enabled
    assert config.handoff.policy is Policy.AUTO


FLAG = {"provider.program": ("--prefill-provider", "/flag")}
ENVIRON = {"ONEBIT_HYBRID_PREFILL": "/env"}
FILE = ("provider.program", "/file")


@pytest.mark.parametrize(
    ("flags", "environ", "changes", "value", "source"),
    [
        (FLAG, ENVIRON, [FILE], "/flag", "flag --prefill-provider"),
        ({}, ENVIRON, [FILE], "/env", "environment ONEBIT_HYBRID_PREFILL"),
        ({}, {}, [FILE], "/file", "file"),
        ({}, {}, [], None, "default"),
        (FLAG, {}, [], "/flag", "flag --prefill-provider"),
        ({}, {"ONEBIT_HYBRID_PREFILL": ""}, [FILE], "/file", "file"),
    ],
)
def test_resolve_precedence_is_flag_environment_file_default(
    flags: dict[str, tuple[str, Any]],
    environ: dict[str, str],
    changes: list[tuple[str, Any]],
    value: str | None,
    source: str,
) -> None:
    """The first source that has the key wins; an empty variable is not set."""
    config = resolved(*changes, flags=flags, environ=environ)
    assert config.provider.program == value
    assert config.sources["provider.program"] == source


@pytest.mark.parametrize(("value", "on"), [("1", True), ("0", True), ("no", True), ("", False)])
def test_resolve_kv_share_is_on_when_set_and_not_empty(value: str, on: bool) -> None:
    """ONEBIT_KV_SHARE=0 turns it on, as the engine reads it."""
    assert resolved(environ={"ONEBIT_KV_SHARE": value}).handoff.share is on


@pytest.mark.parametrize("value", ["", "0", "1"])
def test_resolve_no_device_lock_counts_when_set_at_all(value: str) -> None:
    """NPU_NO_DEVICE_LOCK: set, even to nothing, takes no lock."""
    assert not resolved(environ={"NPU_NO_DEVICE_LOCK": value}).lock.enabled


@pytest.mark.parametrize(
    ("key", "variable"), [(s.key, s.env) for s in SETTINGS if s.env and s.kind is not bool]
)
def test_resolve_bad_value_in_a_variable_names_the_variable(key: str, variable: str) -> None:
    """A fault in the environment is not blamed on the file."""
    lines = problems((key, "/fine"), environ={variable: "a\nb"})
    assert lines == [f"{variable}: must not hold control characters"]


def wrong_types(kind: type) -> list[Any]:
    """Give values of every TOML type that a key of this kind does not take."""
    samples: list[Any] = [True, 1, 1.5, "s", ["s"], {"A": "s"}, dt.date(2026, 1, 1)]
    taken = {
        bool: (bool,),
        int: (int,),
        float: (int, float),
        list: (list,),
        dict: (dict,),
    }.get(kind, (str,))
    return [v for v in samples if not isinstance(v, taken) or (v is True and kind is not bool)]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_resolve_wrong_type_is_named_with_its_key(setting: Any) -> None:
    """No value of another type gets through, and a boolean is no number."""
    for value in wrong_types(setting.kind):
        lines = problems((setting.key, value))
        assert len(lines) == 1, (value, lines)
        assert lines[0].startswith(f"a.toml: {setting.key}: must be ")


@pytest.mark.parametrize(
    "setting", [s for s in SETTINGS if s.kind in (int, float)], ids=lambda s: s.key
)
def test_resolve_range_is_inclusive_and_names_its_bound(setting: Any) -> None:
    """Both ends of a range are allowed, a step beyond them is not, nor are NaN and infinity."""
    for value in (setting.minimum, setting.maximum):
        resolved((setting.key, setting.kind(value)))
    step = 1 if setting.kind is int else 0.0001
    assert "must be at least" in problems((setting.key, setting.minimum - step))[0]
    assert "must be at most" in problems((setting.key, setting.maximum + 1))[0]
    if setting.kind is float:
        assert problems((setting.key, math.nan))
        assert problems((setting.key, math.inf))
        assert setting.unit in problems((setting.key, -1))[0]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("handoff.policy", "strict", "must be one of auto, always, never, not 'strict'"),
        ("log.format", "xml", "must be one of"),
        ("model.path", "m.gguf", "must be an absolute path"),
        ("provider.elfs", "~/elfs", "must be an absolute path"),
        ("provider.program", "prefill", "must be an absolute path, not 'prefill'; PATH is not"),
        ("backend.llama_server", "bin/llama-server", "must be an absolute path or a name"),
        ("backend.llama_server", " ", "must not be empty"),
        ("http.host", "", "must not be empty"),
        ("model.alias", "a\tb", "must not hold control characters"),
        ("model.alias", "a,b", "must not hold a comma"),
        ("backend.args", ["a", 1], "item 1 must be a string, not a whole number"),
        ("backend.args", ["a\0"], "item 0 must not hold a NUL"),
        ("backend.env", {"A B": "x"}, "'A B' is not the name of an environment variable"),
        ("backend.env", {"A": 1}, "A must be a string, not a whole number"),
        ("provider.env", {"A": "\0"}, "A must not hold a NUL"),
    ],
)
def test_resolve_bad_value_says_what_is_allowed(key: str, value: Any, words: str) -> None:
    """Each fault is one line with the key and the rule that it breaks."""
    lines = problems((key, value))
    assert len(lines) == 1
    assert key in lines[0]
    assert words in lines[0]


def test_resolve_unknown_keys_are_named_with_a_guess() -> None:
    """A dash for an underscore is the common slip."""
    assert problems(("http.max-pending", 1)) == [
        "a.toml: http.max-pending: unknown key; did you mean http.max_pending?"
    ]
    assert problems(("http.nonsense", 1)) == ["a.toml: http.nonsense: unknown key"]
    lines = problems(file={"modle": {"path": "/m"}, "http": 3, "model": {"path": "/m"}})
    assert lines[0].startswith("a.toml: modle: unknown key; the sections are backend, ")
    assert lines[1] == "a.toml: http: must be a table, [http]"


def test_resolve_reports_everything_at_once() -> None:
    """Faults of others, of the file, of a variable, of a flag and of the name in one error."""
    lines = problems(
        ("http.port", -1),
        ("x.y", 1),
        instance="a/b",
        flags={"backend.device": ("--device", "")},
        environ={"ONEBIT_HYBRID_ELFS": "rel"},
        extra_problems=["one from elsewhere"],
    )
    assert [line.split(": ")[0] for line in lines] == [
        *("one from elsewhere", "a.toml", "a.toml", "--device", "ONEBIT_HYBRID_ELFS"),
        "instance 'a/b'",
    ]


def test_resolve_without_model_says_how_to_name_one() -> None:
    """The one required key; a faulty one is not reported as missing as well."""
    assert problems(file={}) == [
        "model.path: not set; name the GGUF file with -m MODEL, or write a configuration, see "
        "onebitd.toml(5)"
    ]
    assert len(problems(("model.path", 1))) == 1
    lines = problems(file={}, extra_problems=["after --: -mm is refused: x; y"])
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("instance", "path", "alias", "name", "shown"),
    [
        ("qwen", "/m/Q3.gguf", None, "qwen", "qwen"),
        ("qwen", "/m/Q3.gguf", "mine", "qwen", "mine"),
        (None, "/m/Q3 x.gguf", None, "Q3-x", "Q3 x"),
        (None, "/m/.hidden.gguf", None, "hidden", ".hidden"),
        (None, "/m/ä.gguf", None, "default", "ä"),
        (None, "/", None, "default", "default"),
    ],
)
def test_resolve_names_instance_and_alias(
    instance: str | None, path: str, alias: str | None, name: str, shown: str
) -> None:
    """The alias is what is given, else the instance's name, else the file's stem."""
    changes: list[tuple[str, Any]] = [("model.path", path)]
    if alias is not None:
        changes.append(("model.alias", alias))
    config = resolved(*changes, instance=instance)
    assert (config.instance, config.model.alias) == (name, shown)


@pytest.mark.parametrize("name", ["", ".", "-a", "a b", "a/b", "ä", "a" * 65, "a\n"])
def test_resolve_bad_instance_name_is_refused(name: str) -> None:
    """The name becomes a directory and part of a unit's name."""
    assert "a name is 1 to 64" in problems(instance=name)[0]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "box", "box.lan", "0", "127.1"])  # noqa: S104
def test_resolve_host_that_may_be_reached_from_elsewhere_needs_keys(host: str) -> None:
    """All addresses, and every name that is not certain to stay on this machine."""
    assert f"required because http.host {host} is not" in problems(("http.host", host))[0]


@pytest.mark.parametrize("entry", ["*", "", "https://chat.lan", "a b", "chat.lan/x", "*.lan"])
def test_resolve_allowed_host_that_is_none_is_named(entry: str) -> None:
    """It would never match, and its author would look for the fault elsewhere."""
    good = ["chat.lan", "b\u00fccher.lan:80", "[2001:db8::7]"]
    [line] = problems(("http.allowed_hosts", [*good, entry]))
    assert line.startswith(f"http.allowed_hosts: {entry!r} is no host")


@pytest.mark.parametrize("entry", ["*", "null", "", "chat.lan", "https://chat.lan/x", "https://*"])
def test_resolve_allowed_origin_that_is_none_is_named(entry: str) -> None:
    """Least of all may `null` or `*` let every page in."""
    good = ["https://chat.lan", "http://desk.lan:3000/", "app://x.y", "https://b\u00fccher.lan"]
    [line] = problems(("http.allowed_origins", [*good, entry]))
    assert line.startswith(f"http.allowed_origins: {entry!r} is no origin")


@pytest.mark.parametrize(
    "listen", ["127.0.0.1:9464", "[::1]:0", "localhost:65535", "0.0.0.0:9464", "Box.lan:1"]
)
def test_resolve_metrics_listen_takes_an_address_with_a_port(listen: str) -> None:
    """Any address, without keys: nothing private is said there."""
    assert resolved(("metrics.listen", listen)).metrics.listen == listen


@pytest.mark.parametrize(
    "listen",
    [
        "9464",
        ":9464",
        "127.0.0.1",
        "127.0.0.1:",
        "::1:9464",
        "127.0.0.1:65536",
        "http://a:1",
        "a b:1",
    ],
)
def test_resolve_metrics_listen_that_is_none_is_named(listen: str) -> None:
    """The line shows how both families are written."""
    [line] = problems(("metrics.listen", listen))
    assert line.startswith(
        f"metrics.listen: {listen!r} is no address with a port; write 127.0.0.1:"
    )
    assert "[::1]:9464" in line


def test_resolve_open_host_needs_keys_or_a_word() -> None:
    """A public address without keys must be meant."""
    assert "required because http.host 192.0.2.1" in problems(("http.host", "192.0.2.1"))[0]
    assert (
        resolved(("http.host", "192.0.2.1"), ("http.api_key_file", "/k")).http.host == "192.0.2.1"
    )
    assert (
        resolved(("http.host", "2001:db8::1"), ("http.allow_unauthenticated", True)).http.host
        == "2001:db8::1"
    )
    # A key file that is given and faulty is one fault, not two.
    assert len(problems(("http.host", "192.0.2.1"), ("http.api_key_file", "k"))) == 1


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("a.localhost", True),
        ("0.0.0.0", False),  # noqa: S104 - a string to classify
        ("::", False),
        ("192.168.1.2", False),
        ("localhost.example.net", False),
        ("example.net", False),
    ],
)
def test_is_loopback(host: str, expected: bool) -> None:
    """Only what cannot be reached from elsewhere is loopback."""
    assert is_loopback(host) is expected


TOML_VALUES = st.recursive(
    st.none().map(lambda _: True)
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.booleans()
    | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)
SECTIONS = sorted({setting.key.partition(".")[0] for setting in SETTINGS})
NAMES = sorted({setting.key.partition(".")[2] for setting in SETTINGS})
TOML_FILES = st.dictionaries(
    st.sampled_from(SECTIONS) | st.text(max_size=4),
    TOML_VALUES | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), TOML_VALUES),
    max_size=5,
)


@given(file=TOML_FILES, instance=st.none() | st.text(max_size=5), path=st.text(max_size=8))
def test_resolve_any_mapping_gives_config_or_config_error(
    file: dict[str, Any], instance: str | None, path: str
) -> None:
    """No TOML document raises anything but ConfigError, which says something."""
    flags = {"model.path": ("-m", f"/{path}")}
    problems: tuple[str, ...] = ()
    config = None
    try:
        config = resolve(instance=instance, file=file, file_name="f", flags=flags)
    except ConfigError as error:
        problems = error.problems
    assert (config is None) == bool(problems)
    assert all(problems)
    if config is not None:
        assert set(config.values()) == set(SETTING_BY_KEY)
        assert config.model.alias
