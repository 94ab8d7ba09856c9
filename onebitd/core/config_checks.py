"""What is wrong with the value of a setting: of one by itself, and of several together.

The check of a kind returns the fault as the end of a sentence, "" when there is none.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, Final

from onebitd.core.config import Setting
from onebitd.core.origins import configured_host, configured_origin, parse_listen

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


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


def checked(setting: Setting, value: Any, where: str, problems: list[str]) -> Any:
    """Return the value, or the default after a line about its fault was added to `problems`.

    Args:
        where: the line's start: where the value stands, and its key path or flag or variable.
    """
    fault = _CHECKS[setting.kind](setting, value)
    if fault:
        problems.append(f"{where}: {fault}")
        return setting.default
    return value


def check_together(
    found: Mapping[str, Any], sources: Mapping[str, str], problems: list[str]
) -> None:
    """Add a line to `problems` for each fault of several settings together.

    Args:
        found: every key path with its value.
        sources: every key path with where its value came from, `default` if nowhere.
    """
    # A key that was given and is faulty has its own line already: only "not given" counts here.
    if sources["model.path"] == "default":
        problems.append(
            "model.path: not set; name the GGUF file with -m MODEL, or write a configuration, see "
            "onebitd.toml(5)"
        )
    if (
        not is_loopback(found["http.host"])
        and sources["http.api_key_file"] == "default"
        and not found["http.allow_unauthenticated"]
    ):
        problems.append(
            f"http.api_key_file: required because http.host {found['http.host']} is not a loopback "
            "address; name a file with one key a line, or set http.allow_unauthenticated = true"
        )
    problems += [
        f"http.allowed_hosts: {entry!r} is no host; write a name, as in chat.lan or chat.lan:8000"
        for entry in found["http.allowed_hosts"]
        if configured_host(entry) is None
    ]
    problems += [
        f"http.allowed_origins: {entry!r} is no origin; write scheme, name and port (if it has "
        "one) of each page's address, as in https://chat.lan"
        for entry in found["http.allowed_origins"]
        if configured_origin(entry) is None
    ]
    program = found["backend.llama_server"]
    if "/" in program and not PurePath(program).is_absolute():
        problems.append(
            f"backend.llama_server: must be an absolute path or a name to look up in PATH, not "
            f"{program!r}"
        )
    listen = found["metrics.listen"]
    if listen is not None and parse_listen(listen) is None:
        problems.append(
            f"metrics.listen: {listen!r} is no address with a port; write 127.0.0.1:9464, or "
            "[::1]:9464 for IPv6"
        )
    if "," in (found["model.alias"] or ""):
        # llama-server takes --alias as a list.
        problems.append(f"model.alias: must not hold a comma, not {found['model.alias']!r}")


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
        # A bare name works for llama_server, so people try it for the provider too.
        searched = setting.key == "provider.program" and "/" not in value
        return f"must be an absolute path, not {value!r}" + searched * "; PATH is not searched"
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
