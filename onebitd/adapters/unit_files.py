"""The files of `onebitctl install-units` on a disk: written, recognised and removed.

Nothing of anybody else is overwritten or removed: what is not as the manifest says stays, and is
named. No symbolic link in place of a file is followed; one in place of a directory is, within the
tree, if root made it. Files are replaced by renaming, and the manifest lists a file before it is
written, so that an installation which was interrupted can be run again or removed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from onebitd.adapters.accounts import user_name
from onebitd.core import unit_layout
from onebitd.core.unit_layout import Item, Manifest, UnitFilesError

MAX_FILE_BYTES: Final = 1 << 22
"""No file of ours is larger; a larger one is somebody else's."""

_MAX_LINKS: Final = 40
_FILE_MODE: Final = 0o644
_DIRECTORY_MODE: Final = 0o755


class Tree:
    """The file system below a directory, as seen by a machine whose root directory that is.

    Args:
        root: the directory; `/` for this machine. Nothing outside it is read or written, whatever
            links are in it.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root.resolve()

    def fingerprint(self, path: PurePosixPath) -> str | None:
        """Return what is there, in the manifest's words; None: nothing.

        Raises:
            UnitFilesError: a directory on the way is not safe to pass.
        """
        with _translated(path):
            place = self._locate(path)
            if place is None:
                return None
            try:
                mode = place.lstat().st_mode
            except FileNotFoundError:
                return None
            if stat.S_ISLNK(mode):
                return unit_layout.link_fingerprint(os.readlink(place))
            if not stat.S_ISREG(mode):
                return "directory" if stat.S_ISDIR(mode) else "special"
            return unit_layout.fingerprint(_content(place))

    def read(self, path: PurePosixPath) -> bytes | None:
        """Return the content of a regular file; None when there is none.

        Raises:
            UnitFilesError: it is something else, or cannot be read.
        """
        found = self.fingerprint(path)
        if found is None:
            return None
        if not found.startswith("file:"):
            raise UnitFilesError(f"{path} is no regular file: look at it and move it away")
        with _translated(path):
            place = self._locate(path)
            return None if place is None else _content(place)

    def names(self, path: PurePosixPath) -> list[str]:
        """Return the sorted names in a directory; none when there is no such directory."""
        with _translated(path):
            place = self._locate(path / "_")
            return sorted(os.listdir(place.parent)) if place is not None else []

    def write(
        self, path: PurePosixPath, item: Item, *, mode: int = _FILE_MODE, group: int = -1
    ) -> None:
        """Put an item in place, in one step; its directory exists.

        Args:
            path: where.
            item: what; it belongs to the caller's user.
            mode: of a file.
            group: of a file; -1: the caller's.
        """
        with _translated(path):
            place = self._existing(path)
            temporary = _temporary(place)
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()  # left by one that was interrupted; a link is not followed
            try:
                if item.is_link:
                    os.symlink(item.data.decode(), temporary)
                else:
                    _write_file(temporary, item.data, mode, group)
                os.rename(temporary, place)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise

    def remove(self, path: PurePosixPath) -> None:
        """Remove a file or link, and what an interrupted `write` left beside it."""
        with _translated(path):
            place = self._locate(path)
            if place is None:
                return
            for name in (_temporary(place), place):
                with contextlib.suppress(FileNotFoundError):
                    name.unlink()

    def remove_leftover(self, path: PurePosixPath) -> None:
        """Remove what an interrupted `write` left beside a path."""
        with _translated(path):
            place = self._locate(path)
            if place is not None:
                with contextlib.suppress(FileNotFoundError):
                    _temporary(place).unlink()

    def make_directory(self, path: PurePosixPath, mode: int = _DIRECTORY_MODE) -> None:
        """Make a directory, whose parent exists; nothing happens if it is there."""
        with _translated(path):
            place = self._existing(path)
            with contextlib.suppress(FileExistsError):
                os.mkdir(place)
                os.chmod(place, mode)  # whatever the umask is

    def remove_directory(self, path: PurePosixPath) -> None:
        """Remove a directory if it is empty; a link to one stays."""
        with _translated(path):
            place = self._locate(path)
            if place is not None:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    _rmdir_if_empty(place)

    def is_directory(self, path: PurePosixPath) -> bool:
        """Tell whether there is a directory, perhaps behind links.

        Raises:
            UnitFilesError: something else is there, or it is not safe to pass.
        """
        with _translated(path):
            return self._locate(path / "_") is not None

    @contextlib.contextmanager
    def locked_directory(self, path: PurePosixPath) -> Iterator[None]:
        """Hold the lock of a directory, which exists, for as long as the block takes.

        Raises:
            UnitFilesError: another process holds it.
        """
        with _translated(path):
            place = self._existing(path / "_").parent
            fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            with _translated(path):
                is_ours = _try_lock(fd, place)
            if not is_ours:
                raise UnitFilesError(
                    f"another install-units or uninstall-units is at work, with the lock of {path}:"
                    " run the command again when that one has ended"
                )
            yield
        finally:
            os.close(fd)

    def _existing(self, path: PurePosixPath) -> Path:
        place = self._locate(path)
        if place is None:
            raise UnitFilesError(f"{path.parent} is gone: run the command again")
        return place

    def _locate(self, path: PurePosixPath) -> Path | None:
        """Return the real place of a path, its last part as it is; None: its directory is missing.

        Links are taken within the tree, where os.path.realpath would leave it.
        """
        pending = [*path.parts[1:-1]][::-1]
        current, links = self.root, 0
        while pending:
            part = pending.pop()
            if part == "..":
                current = current.parent if current != self.root else current
                continue
            step = current / part
            try:
                info = step.lstat()
            except FileNotFoundError:
                return None
            _refuse_foreign(step, info)
            if stat.S_ISLNK(info.st_mode):
                links += 1
                if links > _MAX_LINKS:
                    raise UnitFilesError(f"{step}: too many symbolic links")
                target = PurePosixPath(os.readlink(step))
                if target.is_absolute():
                    current = self.root
                pending += [name for name in target.parts if name != "/"][::-1]
                continue
            current = step
        return current / path.name


@contextlib.contextmanager
def locked(tree: Tree, prefix: PurePosixPath) -> Iterator[frozenset[PurePosixPath]]:
    """Keep other runs away from a prefix, and yield the directories that were made for that.

    The lock is one of the manifest's directory, and ends with the process at the latest. What was
    made and is empty at the end is removed.

    Raises:
        UnitFilesError: another run has it, or the directory cannot be made.
    """
    directory = (prefix / unit_layout.MANIFEST).parent
    missing = [
        path
        for path in unit_layout.directories_of([directory / "_"])
        if not tree.is_directory(path)
    ]
    try:
        for path in missing:
            tree.make_directory(path)
        with tree.locked_directory(directory):
            yield frozenset(missing)
    finally:
        _remove_directories(tree, missing)


@dataclasses.dataclass(slots=True)
class Changes:
    """What a run did; `kept` are files that somebody changed, which were left."""

    written: int = 0
    unchanged: int = 0
    removed: int = 0
    kept: list[PurePosixPath] = dataclasses.field(default_factory=list)
    before: str = ""
    """Version that was installed before, or ""."""


def read_sources(data: Path) -> dict[PurePosixPath, bytes]:
    """Return the content of each file of ours below the prefix that the wheel went to.

    Raises:
        UnitFilesError: there are no units, or a file cannot be read.
    """
    found: dict[PurePosixPath, bytes] = {}
    for top in ("lib", "share"):
        for directory, _, files in os.walk(data / top):
            here = PurePosixPath(Path(directory).relative_to(data))
            if not unit_layout.source_directories([here]):
                continue
            for name in filter(unit_layout.is_ours, (here / file for file in files)):
                with _translated(PurePosixPath(data / name)):
                    found[name] = _content(data / name)
    if unit_layout.SYSTEM_UNITS / unit_layout.SERVICE_TEMPLATE not in found:
        raise UnitFilesError(
            f"there are no units below {data}: install onebitd there from its wheel or its source"
            " (`pip install .`), not in editable mode"
        )
    return found


def read_manifest(tree: Tree, prefix: PurePosixPath) -> Manifest | None:
    """Return the manifest below a prefix; None when nothing is installed there.

    Raises:
        UnitFilesError: it cannot be read or is damaged.
    """
    path = prefix / unit_layout.MANIFEST
    content = tree.read(path)
    if content is None:
        return None
    try:
        return unit_layout.parse(content, prefix=prefix)
    except UnitFilesError as error:
        raise UnitFilesError(
            f"{path}: {error}; or remove by hand what onebitd has below {prefix}, and this file"
        ) from error


def conflicts(tree: Tree, items: Mapping[PurePosixPath, Item], old: Manifest) -> list[str]:
    """Return a line for each place where something is that `install` did not write."""
    found = []
    for path in sorted(items):
        try:
            there = tree.fingerprint(path)
        except UnitFilesError as error:
            found.append(str(error))
            continue
        if there is None or old.owns(path, there):
            continue
        if path in old.entries and there.startswith("file:"):
            found.append(f"{path} was changed since it was installed")
        else:
            found.append(f"{path} is {_kind(there)} that install-units did not write")
    return found


def install(
    tree: Tree,
    items: Mapping[PurePosixPath, Item],
    *,
    prefix: PurePosixPath,
    version: str,
    made: frozenset[PurePosixPath] = frozenset(),
) -> Changes:
    """Write the items, remove what an older version had and this one has not, keep a manifest.

    Args:
        tree: where.
        items: see `unit_layout.plan`.
        prefix: what the items and the manifest are below.
        version: of onebitd.
        made: directories that were made already, see `locked`.

    Raises:
        UnitFilesError: something is in the way; then nothing was changed. Or a file could not be
            written; then the manifest knows what may be there.
    """
    old = read_manifest(tree, prefix) or Manifest()
    in_the_way = conflicts(tree, items, old)
    if in_the_way:
        raise UnitFilesError(_conflict_text(in_the_way))
    manifest = prefix / unit_layout.MANIFEST
    wanted = unit_layout.directories_of([*items, manifest])
    made |= old.directories | {path for path in wanted if not tree.is_directory(path)}
    made |= {manifest.parent}  # also when it is there: an interrupted run made it
    new = {path: frozenset({item.fingerprint}) for path, item in items.items()}
    both = {
        path: old.entries.get(path, frozenset()) | new.get(path, frozenset())
        for path in {*old.entries, *new}
    }
    for path in unit_layout.directories_of([manifest]):
        tree.make_directory(path)
    tree.write(manifest, Item(unit_layout.dump(Manifest(both, made, version))))
    for path in wanted:
        tree.make_directory(path)
    changes = Changes(before=old.version)
    for path, item in items.items():
        tree.remove_leftover(path)
        if tree.fingerprint(path) == item.fingerprint:
            changes.unchanged += 1
        else:
            tree.write(path, item)
            changes.written += 1
    _remove_entries(tree, old, old.entries.keys() - items.keys(), changes)
    _remove_directories(tree, made - set(wanted))
    tree.write(manifest, Item(unit_layout.dump(Manifest(new, made & set(wanted), version))))
    return changes


def uninstall(tree: Tree, manifest: Manifest, *, prefix: PurePosixPath) -> Changes:
    """Remove what the manifest lists and nobody changed, the directories made for it, and itself.

    Raises:
        UnitFilesError: a file could not be removed; the manifest is still there.
    """
    changes = Changes(before=manifest.version)
    _remove_entries(tree, manifest, manifest.entries, changes)
    path = prefix / unit_layout.MANIFEST
    tree.remove(path)
    _remove_directories(tree, manifest.directories)
    return changes


def remove_leftovers(tree: Tree, prefix: PurePosixPath) -> None:
    """Remove what a first installation left that was interrupted before it had a manifest."""
    path = prefix / unit_layout.MANIFEST
    tree.remove_leftover(path)
    tree.remove_directory(path.parent)


def _remove_entries(
    tree: Tree, manifest: Manifest, paths: Iterable[PurePosixPath], changes: Changes
) -> None:
    for path in sorted(paths):
        found = tree.fingerprint(path)
        if found is None or manifest.owns(path, found):
            tree.remove(path)
            changes.removed += found is not None
        else:
            tree.remove_leftover(path)
            changes.kept.append(path)


def _remove_directories(tree: Tree, paths: Iterable[PurePosixPath]) -> None:
    for path in sorted(paths, key=lambda path: -len(path.parts)):
        tree.remove_directory(path)


def _kind(found: str) -> str:
    if found.startswith("link:"):
        return f"a symbolic link (to {found.removeprefix('link:')})"
    return {"directory": "a directory", "special": "no regular file, and one"}.get(found, "a file")


def _conflict_text(lines: list[str]) -> str:
    return "\n".join(
        [
            *lines,
            "nothing was changed. Move these away and run the command again; what you changed in a"
            " unit belongs into a drop-in (`systemctl edit onebitd@NAME`)",
        ]
    )


def _temporary(place: Path) -> Path:
    return place.with_name(f".{place.name}.onebitctl")


def _write_file(path: Path, content: bytes, mode: int, group: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(content)
        file.flush()
        if group != -1:
            os.fchown(fd, -1, group)
        os.fchmod(fd, mode)
        os.fsync(fd)


def _content(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise UnitFilesError(f"{path} is no regular file: look at it and move it away")
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise UnitFilesError(f"{path} is no file of onebitd, it is too large: move it away")
    return content


def _try_lock(fd: int, place: Path) -> bool:
    """Take the lock of an open directory; False: another has it, or the directory has gone."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(fd), place.lstat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _rmdir_if_empty(place: Path) -> None:
    try:
        os.rmdir(place)
    except OSError:
        if not place.is_symlink() and place.is_dir() and not os.listdir(place):
            raise


def _refuse_foreign(step: Path, info: os.stat_result) -> None:
    """A directory that others may change is no place for what root runs."""
    if info.st_uid not in (0, os.geteuid()):
        raise UnitFilesError(f"{step} belongs to {user_name(info.st_uid)}: give it to root")
    if stat.S_ISLNK(info.st_mode):
        return
    if not stat.S_ISDIR(info.st_mode):
        raise UnitFilesError(f"{step} is no directory: move it away")
    if info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX:
        raise UnitFilesError(f"{step} may be written by everybody: chmod o-w it")


@contextlib.contextmanager
def _translated(path: PurePosixPath) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UnitFilesError(
            f"{error.filename or path}: {reason}; put that right and run the command again"
        ) from error
