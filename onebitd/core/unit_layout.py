"""What `onebitctl install-units` puts where, and the manifest of what it wrote. Pure.

The wheel carries units, man pages and the like below its prefix. In a virtual environment nobody
looks there, so they are copied below another prefix, with the program's paths in them rewritten,
and the programs are linked into its bin/.

The manifest is JSON: `{"format": 1, "version": V, "entries": {PATH: [FINGERPRINT...]},
"directories": [PATH...]}`. Paths are absolute, as they are on the machine that boots from the
tree. An entry lists every content that is or may be ours: several while an installation is under
way, one afterwards. What has another content is somebody else's.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Final

from onebitd.core.errors import OnebitError

PROGRAMS: Final = ("onebitd", "onebitctl", "onebit-prefill-llama", "onebit-prefill-numpy")
SYSTEM_UNITS: Final = PurePosixPath("lib/systemd/system")
SYSUSERS: Final = PurePosixPath("lib/sysusers.d/onebitd.conf")
TMPFILES: Final = PurePosixPath("lib/tmpfiles.d/onebitd.conf")
SAMPLE: Final = PurePosixPath("share/onebitd/onebitd.toml")
MANIFEST: Final = PurePosixPath("share/onebitd/manifest.json")
SERVICE_TEMPLATE: Final = "onebitd@.service"
_TEMPLATES: Final = (SERVICE_TEMPLATE, "onebitd@.socket", "onebitd-http@.socket")

_PLACES: Final = (
    ("lib/systemd/system", "onebitd*@.*"),
    ("lib/systemd/user", "onebitd*@.*"),
    ("lib/sysusers.d", "onebitd.conf"),
    ("lib/tmpfiles.d", "onebitd.conf"),
    ("share/man/man?", "onebit*"),
    ("share/bash-completion/completions", "onebit*"),
    ("share/zsh/site-functions", "_onebit*"),
    ("share/fish/vendor_completions.d", "onebit*"),
    ("share/onebitd", "*"),
    ("share/onebitd/drop-ins", "*"),
)
_ADMIN_PLACES: Final = {
    "lib/systemd/system": "/etc/systemd/system",
    "lib/systemd/user": "/etc/systemd/user",
    "lib/sysusers.d": "/etc/sysusers.d",
    "lib/tmpfiles.d": "/etc/tmpfiles.d",
}
_REWRITTEN: Final = ("lib/systemd/", "share/onebitd/")
_PROGRAM_PATH: Final = re.compile(rf"/usr/bin/({'|'.join(PROGRAMS)})(?![\w.-])")
_SHARE_PATH: Final = re.compile(r"/usr/share/onebitd(?![\w.-])")
_PLAIN_PATH: Final = re.compile(r"/[A-Za-z0-9_.+@/-]*")
_FINGERPRINT: Final = re.compile(r"file:[0-9a-f]{64}|link:/.*")
_INSTANCE_UNIT: Final = re.compile(
    r"(?:onebitd|onebitd-http)@([A-Za-z0-9][A-Za-z0-9_.-]*)\.(?:service|socket)"
)
_HIDDEN: Final = ("/home", "/root", "/run/user")
_MANIFEST_FORMAT: Final = 1


class UnitFilesError(OnebitError):
    """The units cannot be installed or removed; the message names the file and the next step."""


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """A file with its content, or a symbolic link with its target in `data`."""

    data: bytes
    is_link: bool = False

    @property
    def fingerprint(self) -> str:
        """What the manifest says of it."""
        return link_fingerprint(self.data.decode()) if self.is_link else fingerprint(self.data)


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """What was written, by path; `directories` are those that were made for it."""

    entries: Mapping[PurePosixPath, frozenset[str]] = dataclasses.field(default_factory=dict)
    directories: frozenset[PurePosixPath] = frozenset()
    version: str = ""

    def owns(self, path: PurePosixPath, found: str) -> bool:
        """Tell whether what was found at a path is what was written there."""
        return found in self.entries.get(path, ())


def fingerprint(content: bytes) -> str:
    """Return what the manifest says of a file."""
    return f"file:{hashlib.sha256(content).hexdigest()}"


def link_fingerprint(target: str) -> str:
    """Return what the manifest says of a symbolic link."""
    return f"link:{target}"


def source_directories(names: Iterable[PurePosixPath]) -> list[PurePosixPath]:
    """Return those of the directories, relative to a prefix, that may hold files of ours."""
    places = [place for place, _ in _PLACES]
    return [name for name in names if any(fnmatch.fnmatch(str(name), place) for place in places)]


def is_ours(name: PurePosixPath) -> bool:
    """Tell whether a file, relative to the prefix that the wheel went to, is one to install."""
    return name != MANIFEST and any(
        fnmatch.fnmatch(str(name.parent), place) and fnmatch.fnmatch(name.name, pattern)
        for place, pattern in _PLACES
    )


def plan(
    sources: Mapping[PurePosixPath, bytes], *, prefix: PurePosixPath, programs: PurePosixPath
) -> dict[PurePosixPath, Item]:
    """Return what is to be written, by absolute path.

    Args:
        sources: content of each file of ours, by its path relative to the wheel's prefix.
        prefix: what it goes below.
        programs: the directory that holds onebitd and onebitctl.
    """
    found = {
        prefix / name: Item(_rewritten(name, content, prefix, programs))
        for name, content in sources.items()
    }
    for program in PROGRAMS:
        target = str(programs / program).encode()
        found[prefix / "bin" / program] = Item(target, is_link=True)
    return found


def _rewritten(
    name: PurePosixPath, content: bytes, prefix: PurePosixPath, programs: PurePosixPath
) -> bytes:
    if not str(name).startswith(_REWRITTEN):
        return content
    text = _PROGRAM_PATH.sub(lambda found: f"{programs}/{found[1]}", content.decode())
    return _SHARE_PATH.sub(lambda _: f"{prefix}/share/onebitd", text).encode()


def directories_of(paths: Iterable[PurePosixPath]) -> list[PurePosixPath]:
    """Return every directory that holds one of the paths, outer ones first, without the root."""
    found = {parent for path in paths for parent in path.parents if parent.name}
    return sorted(found, key=lambda path: (len(path.parts), path))


def admin_path(name: PurePosixPath) -> PurePosixPath | None:
    """Return where an administrator's file comes before ours of that name; None: nowhere."""
    place = _ADMIN_PLACES.get(str(name.parent))
    return None if place is None else PurePosixPath(place) / name.name


def is_plain_path(path: PurePosixPath) -> bool:
    """Tell whether a path can stand in a unit, a script's first line and a link as it is."""
    return _PLAIN_PATH.fullmatch(str(path)) is not None and ".." not in path.parts


def hidden_from_service(paths: Iterable[PurePosixPath]) -> PurePosixPath | None:
    """Return the first path that ProtectHome=yes hides from the service."""
    for path in paths:
        if any(path.is_relative_to(place) for place in _HIDDEN):
            return path
    return None


# --- the manifest -------------------------------------------------------------------------------


def dump(manifest: Manifest) -> bytes:
    """Return the manifest as it is stored."""
    document = {
        "format": _MANIFEST_FORMAT,
        "version": manifest.version,
        "entries": {str(path): sorted(manifest.entries[path]) for path in sorted(manifest.entries)},
        "directories": sorted(map(str, manifest.directories)),
    }
    return (json.dumps(document, indent=1) + "\n").encode()


def parse(content: bytes, *, prefix: PurePosixPath) -> Manifest:
    """Read a manifest, and believe nothing in it that `plan` could not have put there.

    Raises:
        UnitFilesError: it is damaged, or of another format.
    """
    try:
        document = json.loads(content)
        if document["format"] != _MANIFEST_FORMAT:
            raise UnitFilesError(
                f"its format is {document['format']!r}, not {_MANIFEST_FORMAT}: use the onebitctl"
                " that wrote it"
            )
        entries = {
            _checked(path, prefix): frozenset(map(_checked_fingerprint, prints))
            for path, prints in document["entries"].items()
        }
        directories = frozenset(map(_checked_directory, document["directories"]))
        return Manifest(entries, directories, str(document["version"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnitFilesError(f"it is damaged ({error})") from None


def _checked(path: object, prefix: PurePosixPath) -> PurePosixPath:
    found = PurePosixPath(str(path))
    name = found.relative_to(prefix)
    is_program = name.parent == PurePosixPath("bin") and name.name in PROGRAMS
    if ".." in found.parts or not (is_program or is_ours(name)):
        raise ValueError(f"{path} is no file of onebitd")
    return found


def _checked_fingerprint(text: object) -> str:
    if not isinstance(text, str) or not _FINGERPRINT.fullmatch(text):
        raise ValueError(f"{text!r} is no fingerprint")
    return text


def _checked_directory(path: object) -> PurePosixPath:
    found = PurePosixPath(str(path))
    if not found.is_absolute() or ".." in found.parts:
        raise ValueError(f"{path} is no directory of onebitd")
    return found


# --- units --------------------------------------------------------------------------------------


def unit_names(instance: str) -> list[str]:
    """Return the units of an instance: the service and its sockets."""
    return [template.replace("@", f"@{instance}") for template in _TEMPLATES]


def instance_of(unit: str) -> str | None:
    """Return the instance that a unit's name belongs to; None: it is no instance of ours."""
    found = _INSTANCE_UNIT.fullmatch(unit)
    return found[1] if found else None
