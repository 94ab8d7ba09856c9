"""What a service is allowed and given, read from its unit, for a run that has to be like it. Pure.

A transient service of systemd-run(1) gets these lines as properties: user, groups, limits, sandbox,
environment and resources, drop-ins included. What it must not get is left out: its directories,
which systemd would chown and remove at its end, while the service itself uses them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Final

_KEYS: Final = frozenset(
    {
        # who it is, and its settings
        "CapabilityBoundingSet", "AmbientCapabilities", "DynamicUser", "Environment",
        "EnvironmentFile", "Group", "LoadCredential", "LoadCredentialEncrypted",
        "PassEnvironment", "SecureBits", "SetCredential", "SetCredentialEncrypted", "Slice",
        "SupplementaryGroups", "UMask", "UnsetEnvironment", "User", "WorkingDirectory",
        # what it sees
        "BindPaths", "BindReadOnlyPaths", "ExecPaths", "ExtensionDirectories", "InaccessiblePaths",
        "NoExecPaths", "PrivateDevices", "PrivateIPC", "PrivateMounts", "PrivateNetwork",
        "PrivateTmp", "PrivateUsers", "ProcSubset", "ProtectHome", "ProtectProc", "ProtectSystem",
        "ReadOnlyPaths", "ReadWritePaths", "RootDirectory", "RootImage", "TemporaryFileSystem",
        # what it may do
        "DeviceAllow", "DevicePolicy", "IPAddressAllow", "IPAddressDeny", "KeyringMode",
        "LockPersonality", "MemoryDenyWriteExecute", "NoNewPrivileges", "ProtectClock",
        "ProtectControlGroups", "ProtectHostname", "ProtectKernelLogs", "ProtectKernelModules",
        "ProtectKernelTunables", "RestrictAddressFamilies", "RestrictNamespaces",
        "RestrictRealtime", "RestrictSUIDSGID", "SystemCallArchitectures", "SystemCallErrorNumber",
        "SystemCallFilter",
        # how much of what it may have
        "AllowedCPUs", "AllowedMemoryNodes", "CPUAffinity", "CPUQuota", "LimitAS", "LimitCORE",
        "LimitCPU", "LimitDATA", "LimitFSIZE", "LimitMEMLOCK", "LimitNOFILE", "LimitNPROC",
        "LimitRSS", "LimitSTACK", "MemoryHigh", "MemoryMax", "MemorySwapMax", "NUMAMask",
        "NUMAPolicy", "Nice", "OOMPolicy", "OOMScoreAdjust", "TasksMax",
    }
)  # fmt: skip
_ALL_BY_DEFAULT: Final = "CapabilityBoundingSet"
_DIRECTORIES: Final = {
    "RuntimeDirectory": "%t",
    "StateDirectory": "%S",
    "CacheDirectory": "%C",
}
_OWN_VARIABLES: Final = {
    "RuntimeDirectory": "RUNTIME_DIRECTORY",
    "StateDirectory": "STATE_DIRECTORY",
    "CacheDirectory": "CACHE_DIRECTORY",
}
_SPECIFIER: Final = re.compile(r"%([A-Za-z%])")
_PREFIXES: Final = "@-:+!"
_ALONE: Final = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}|\$(\$)")
SYSTEM_SPECIFIERS: Final = {
    "%t": "/run", "%S": "/var/lib", "%C": "/var/cache", "%L": "/var/log", "%E": "/etc",
    "%h": "/root", "%T": "/tmp", "%V": "/var/tmp",  # noqa: S108 - names, nothing is made there
}  # fmt: skip
"""Those of systemd.unit(5) that do not depend on the unit's name, for the system's manager."""


def user_specifiers(variables: Mapping[str, str], uid: int) -> dict[str, str]:
    """Return the same for the manager of a user, by its variables."""
    home = variables.get("HOME", "/")
    return {
        **SYSTEM_SPECIFIERS,
        "%t": variables.get("XDG_RUNTIME_DIR", f"/run/user/{uid}"),
        "%S": variables.get("XDG_STATE_HOME", f"{home}/.local/state"),
        "%C": variables.get("XDG_CACHE_HOME", f"{home}/.cache"),
        "%E": variables.get("XDG_CONFIG_HOME", f"{home}/.config"),
        "%h": home,
    }


def properties(
    unit: str, instance: str, specifiers: Mapping[str, str] = SYSTEM_SPECIFIERS
) -> list[str]:
    """Return the lines of a service that decide what it sees, may do, has, and is set to.

    An empty value takes earlier lines of its key back, and is not returned where the default is
    nothing: systemd-run(1) does not take an empty one for each key.

    Args:
        unit: what `systemctl cat` prints: the unit and its drop-ins, in order.
        instance: of the template.
        specifiers: values of the other specifiers; one that is not known stays.
    """
    found: list[tuple[str, str]] = []
    for key, value in _service_lines(unit):
        if not value:
            found = [line for line in found if line[0] != key]
        if key in _KEYS and (value or key == _ALL_BY_DEFAULT):
            found.append((key, _expanded(value, instance, specifiers)))
    return [f"{key}={value}" for key, value in found]


def directories(
    unit: str, instance: str, specifiers: Mapping[str, str] = SYSTEM_SPECIFIERS
) -> dict[str, str]:
    """Return the variables by which systemd tells a service its directories (systemd.exec(5)).

    Their values are paths with colons between; see `properties` for the arguments.
    """
    found: dict[str, list[str]] = {}
    for key, value in _service_lines(unit):
        if key not in _DIRECTORIES:
            continue
        names = _expanded(value, instance, specifiers).split()
        found[key] = [*found.get(key, []), *names] if names else []
    return {
        _OWN_VARIABLES[key]: ":".join(
            f"{specifiers[_DIRECTORIES[key]]}/{name.partition(':')[0]}" for name in names
        )
        for key, names in found.items()
        if names
    }


def command_line(
    unit: str, instance: str, specifiers: Mapping[str, str] = SYSTEM_SPECIFIERS
) -> list[str]:
    """Return the words of the last ExecStart=, without its prefixes; empty if there is none.

    Variables in it stay as they are: `with_variables` is for whoever knows them.
    """
    found: list[str] = []
    for key, value in _service_lines(unit):
        if key == "ExecStart":
            text = _expanded(value, instance, specifiers).lstrip(_PREFIXES)
            try:
                found = shlex.split(text)
            except ValueError:
                found = text.split()
    return found


def daemon_arguments(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """Return program and arguments of onebitd in a command line; None if it is not in there.

    >>> daemon_arguments(["/usr/bin/nice", "-n5", "/opt/x/onebitd", "--instance", "q"])
    ('/opt/x/onebitd', ['--instance', 'q'])
    """
    for place, word in enumerate(words):
        if word.rpartition("/")[2] == "onebitd":
            return word, list(words[place + 1 :])
    return None


def with_variables(words: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Return words of ExecStart= with variables put in, as systemd does it (systemd.service(5)).

    >>> with_variables(["-m", "${M}", "$MORE", "$$5"], {"M": "/a b", "MORE": "--port 80"})
    ['-m', '/a b', '--port', '80', '$5']
    """
    found: list[str] = []
    for word in words:
        alone = _ALONE.fullmatch(word)
        if alone:
            found += variables.get(alone[1], "").split()
        else:
            found.append(_VARIABLE.sub(lambda one: variables.get(one[1] or "", one[2] or ""), word))
    return found


def _service_lines(unit: str) -> list[tuple[str, str]]:
    section, found = "", []
    for line in re.sub(r"\\\n", " ", unit).splitlines():
        if line.startswith("["):
            section = line.strip()
        key, equals, value = line.partition("=")
        if section == "[Service]" and equals and not line.lstrip().startswith(("#", ";")):
            found.append((key.strip(), value.strip()))
    return found


def _expanded(text: str, instance: str, specifiers: Mapping[str, str]) -> str:
    own = {
        "%i": instance,
        "%I": instance,
        "%n": f"onebitd@{instance}.service",
        "%N": f"onebitd@{instance}",
        "%p": "onebitd",
        "%P": "onebitd",
        "%%": "%",
    }
    return _SPECIFIER.sub(lambda one: own.get(one[0], specifiers.get(one[0], one[0])), text)
