"""The files of install-units on a real file system, below a directory of the test."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from onebitd.adapters import unit_files
from onebitd.adapters.unit_files import Changes, Tree
from onebitd.core import unit_layout
from onebitd.core.unit_layout import Item, UnitFilesError

PREFIX = PurePosixPath("/usr/local")
UNIT = PREFIX / "lib/systemd/system/onebitd@.service"
PAGE = PREFIX / "share/man/man8/onebitd.8"
SAMPLE = PREFIX / "share/onebitd/onebitd.toml"
LINK = PREFIX / "bin/onebitd"
MANIFEST = PREFIX / unit_layout.MANIFEST
TARGET = "/opt/onebitd/bin/onebitd"


def items(version: str = "1") -> dict[PurePosixPath, Item]:
    """Return what a version wants to have installed."""
    return {
        UNIT: Item(f"unit {version}\n".encode()),
        PAGE: Item(b"page\n"),
        SAMPLE: Item(b"sample\n"),
        LINK: Item(TARGET.encode(), is_link=True),
    }


def install(root: Path, wanted: dict[PurePosixPath, Item] | None = None) -> Changes:
    """Install below a root directory."""
    return unit_files.install(Tree(root), wanted or items(), prefix=PREFIX, version="1.0")


def uninstall(root: Path) -> Changes:
    """Remove what is installed below a root directory."""
    tree = Tree(root)
    manifest = unit_files.read_manifest(tree, PREFIX)
    assert manifest is not None
    return unit_files.uninstall(tree, manifest, prefix=PREFIX)


def at(root: Path, path: PurePosixPath) -> Path:
    """Return where a path of the tree really is."""
    return root / path.relative_to("/")


def identity(path: Path) -> tuple[int, ...]:
    """Return what changes when a file is written, replaced or given away (reading it may not)."""
    info = path.lstat()
    return (info.st_ino, info.st_mode, info.st_nlink, info.st_uid, info.st_size, info.st_mtime_ns)


def everything(root: Path) -> dict[str, str]:
    """Return path and content of all there is below a root directory."""
    found = {}
    for path in root.rglob("*"):
        if path.is_symlink():
            found[str(path.relative_to(root))] = f"-> {path.readlink()}"
        else:
            found[str(path.relative_to(root))] = path.read_text() if path.is_file() else "/"
    return found


def test_install_fresh_tree_has_files_links_and_a_manifest(tmp_path: Path) -> None:
    """Whatever the umask, everybody can read what systemd and man look for."""
    before = os.umask(0o077)
    try:
        changes = install(tmp_path)
    finally:
        os.umask(before)
    assert (changes.written, changes.unchanged, changes.removed) == (4, 0, 0)
    assert at(tmp_path, UNIT).read_text() == "unit 1\n"
    assert os.readlink(at(tmp_path, LINK)) == TARGET
    assert stat.S_IMODE(at(tmp_path, UNIT).stat().st_mode) == 0o644
    assert stat.S_IMODE(at(tmp_path, UNIT).parent.stat().st_mode) == 0o755
    manifest = unit_files.read_manifest(Tree(tmp_path), PREFIX)
    assert manifest is not None
    assert {path: {item.fingerprint} for path, item in items().items()} == manifest.entries


def test_install_again_changes_nothing(tmp_path: Path) -> None:
    """A second run finds everything as it should be."""
    install(tmp_path)
    before = everything(tmp_path)
    changes = install(tmp_path)
    assert (changes.written, changes.unchanged, changes.before) == (0, 4, "1.0")
    assert everything(tmp_path) == before


def test_uninstall_leaves_the_tree_as_it_was(tmp_path: Path) -> None:
    """Directories that were there stay, also empty ones; those that were made go."""
    at(tmp_path, PREFIX / "lib/systemd").mkdir(parents=True)
    at(tmp_path, PREFIX / "share").mkdir()
    before = everything(tmp_path)
    install(tmp_path)
    assert uninstall(tmp_path).removed == 4
    assert everything(tmp_path) == before
    assert unit_files.read_manifest(Tree(tmp_path), PREFIX) is None


def test_install_newer_version_replaces_and_removes_what_it_owns(tmp_path: Path) -> None:
    """What the new version has no more goes, its directory with it."""
    install(tmp_path)
    wanted = items("2")
    del wanted[PAGE]
    wanted[PREFIX / "share/man/man7/onebitd.7"] = Item(b"new\n")
    changes = install(tmp_path, wanted)
    assert (changes.written, changes.unchanged, changes.removed) == (2, 2, 1)
    assert at(tmp_path, UNIT).read_text() == "unit 2\n"
    assert not at(tmp_path, PAGE.parent).exists()
    uninstall(tmp_path)
    assert everything(tmp_path) == {}


def change_file(root: Path) -> None:
    """An administrator edits the unit."""
    at(root, UNIT).write_text("unit 1\n# mine\n")


def plant_link(root: Path) -> None:
    """The unit is replaced by a link to something precious."""
    at(root, UNIT).unlink()
    (root / "precious").write_text("precious")
    at(root, UNIT).symlink_to(root / "precious")


def plant_directory(root: Path) -> None:
    """A directory stands in its place."""
    at(root, UNIT).unlink()
    at(root, UNIT).mkdir()


def plant_fifo(root: Path) -> None:
    """Something that blocks whoever opens it stands in its place."""
    at(root, UNIT).unlink()
    os.mkfifo(at(root, UNIT))


def redirect_link(root: Path) -> None:
    """The program's link leads somewhere else."""
    at(root, LINK).unlink()
    at(root, LINK).symlink_to("/usr/bin/true")


@pytest.mark.parametrize(
    "spoil", [change_file, plant_link, plant_directory, plant_fifo, redirect_link]
)
def test_install_over_what_is_not_ours_changes_nothing(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    """A newer version would replace all files, and replaces none."""
    install(tmp_path)
    spoil(tmp_path)
    before = {path: identity(at(tmp_path, path)) for path in items()}
    wanted = items("2") | {SAMPLE: Item(b"sample 2\n")}
    with pytest.raises(UnitFilesError, match="nothing was changed") as caught:
        install(tmp_path, wanted)
    assert str(LINK if spoil is redirect_link else UNIT) in str(caught.value)
    assert {path: identity(at(tmp_path, path)) for path in items()} == before
    if spoil is plant_link:
        assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize(
    "spoil", [change_file, plant_link, plant_directory, plant_fifo, redirect_link]
)
def test_uninstall_keeps_and_names_what_is_not_ours(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    """The rest goes, and so does the manifest."""
    install(tmp_path)
    spoil(tmp_path)
    kept = LINK if spoil is redirect_link else UNIT
    before = identity(at(tmp_path, kept))
    changes = uninstall(tmp_path)
    assert changes.kept == [kept]
    assert changes.removed == 3
    assert identity(at(tmp_path, kept)) == before
    assert [path for path in items() if os.path.lexists(at(tmp_path, path))] == [kept]
    assert not at(tmp_path, MANIFEST).exists()


def test_install_lists_all_that_is_in_the_way_at_once(tmp_path: Path) -> None:
    """Nobody wants to learn of them one by one."""
    for path in (UNIT, PAGE):
        at(tmp_path, path).parent.mkdir(parents=True)
        at(tmp_path, path).write_text("an administrator's\n")
    with pytest.raises(UnitFilesError) as caught:
        install(tmp_path)
    assert str(UNIT) in str(caught.value)
    assert str(PAGE) in str(caught.value)
    assert not at(tmp_path, MANIFEST).exists()
    assert not at(tmp_path, LINK.parent).exists()


def test_install_same_content_without_manifest_is_in_the_way(tmp_path: Path) -> None:
    """An administrator's own copy is not adopted, for it would be removed one day."""
    at(tmp_path, UNIT).parent.mkdir(parents=True)
    at(tmp_path, UNIT).write_text("unit 1\n")
    with pytest.raises(UnitFilesError, match="nothing was changed"):
        install(tmp_path)


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("upgrade", [False, True])
@pytest.mark.parametrize("writes", range(1, 7))
@pytest.mark.parametrize("then", ["install", "uninstall"])
def test_install_interrupted_can_be_run_again_or_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, writes: int, then: str, upgrade: bool
) -> None:
    """Wherever it is killed, also between a file and its rename."""
    if upgrade:
        install(tmp_path)
    new = items("2") | {SAMPLE: Item(b"sample 2\n"), PAGE: Item(b"page 2\n")}
    real, left = os.rename, writes

    def rename(source: Path, target: Path) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            monkeypatch.setattr(Path, "unlink", lambda *_args, **_named: None)  # no time for that
            raise Killed
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    try:
        install(tmp_path, new)
    except Killed:
        pass
    else:
        assert upgrade
        assert writes > 5
    monkeypatch.undo()
    if then == "install":
        install(tmp_path, new)
        assert at(tmp_path, UNIT).read_text() == "unit 2\n"
    if unit_files.read_manifest(Tree(tmp_path), PREFIX) is not None:
        uninstall(tmp_path)
    else:
        assert then == "uninstall"
        unit_files.remove_leftovers(Tree(tmp_path), PREFIX)
        assert not at(tmp_path, MANIFEST.parent).exists()
    assert [name for name, what in everything(tmp_path).items() if what != "/"] == []


def test_locked_twice_at_once_is_refused(tmp_path: Path) -> None:
    """The second run changes nothing; when the first has ended it can be run again."""
    with (
        unit_files.locked(Tree(tmp_path), PREFIX),
        pytest.raises(UnitFilesError, match="another install-units or uninstall-units is at work"),
        unit_files.locked(Tree(tmp_path), PREFIX),
    ):
        pass
    with unit_files.locked(Tree(tmp_path), PREFIX):
        pass


def test_locked_tree_of_a_run_that_failed_is_as_it_was(tmp_path: Path) -> None:
    """The directory was made for the lock alone."""
    at(tmp_path, UNIT).parent.mkdir(parents=True)
    at(tmp_path, UNIT).write_text("an administrator's\n")
    before = everything(tmp_path)
    with pytest.raises(UnitFilesError, match="nothing"), unit_files.locked(Tree(tmp_path), PREFIX):
        install(tmp_path)
    assert everything(tmp_path) == before


def test_locked_directories_of_the_lock_go_with_the_installation(tmp_path: Path) -> None:
    """They are in the manifest, like those that were made after it."""
    with unit_files.locked(Tree(tmp_path), PREFIX) as made:
        unit_files.install(Tree(tmp_path), items(), prefix=PREFIX, version="1.0", made=made)
    assert at(tmp_path, MANIFEST).exists()
    uninstall(tmp_path)
    assert everything(tmp_path) == {}


def test_locked_directory_that_was_removed_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between open and lock an uninstall-units has ended and another run has begun."""
    real = fcntl.flock

    def flock(fd: int, operation: int) -> None:
        at(tmp_path, MANIFEST.parent).rename(tmp_path / "gone")
        at(tmp_path, MANIFEST.parent).mkdir()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UnitFilesError, match="another"), unit_files.locked(Tree(tmp_path), PREFIX):
        pass


def test_install_planted_temporary_link_is_not_followed(tmp_path: Path) -> None:
    """The name that a file has before its rename can be known."""
    (tmp_path / "precious").write_text("precious")
    at(tmp_path, UNIT).parent.mkdir(parents=True)
    (at(tmp_path, UNIT).parent / f".{UNIT.name}.onebitctl").symlink_to(tmp_path / "precious")
    install(tmp_path)
    assert (tmp_path / "precious").read_text() == "precious"
    assert at(tmp_path, UNIT).read_text() == "unit 1\n"


def test_install_linked_directory_is_followed_within_the_tree(tmp_path: Path) -> None:
    """Some systems have /usr/local elsewhere; an absolute link means the tree's own root."""
    root = tmp_path / "image"
    (root / "var/usrlocal").mkdir(parents=True)
    (root / "usr").mkdir()
    (root / "usr/local").symlink_to("/var/usrlocal")
    before = everything(root)
    install(root)
    assert (root / "var/usrlocal/lib/systemd/system/onebitd@.service").read_text() == "unit 1\n"
    uninstall(root)
    assert everything(root) == before


def test_tree_linked_directory_does_not_lead_out(tmp_path: Path) -> None:
    """Neither with dots nor with an absolute link."""
    root = tmp_path / "image"
    root.mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_text("x")
    (root / "dots").symlink_to("../../../../outside")
    (root / "absolute").symlink_to(tmp_path / "outside")
    assert Tree(root).read(PurePosixPath("/dots/file")) is None
    assert Tree(root).read(PurePosixPath("/absolute/file")) is None


def test_tree_link_to_itself_is_refused(tmp_path: Path) -> None:
    """It is not followed for ever."""
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UnitFilesError, match="too many"):
        Tree(tmp_path).read(PurePosixPath("/loop/file"))


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another user")
def test_install_below_another_users_directory_is_refused(tmp_path: Path) -> None:
    """Who owns it could replace what root runs."""
    at(tmp_path, PREFIX / "lib").mkdir(parents=True)
    os.chown(at(tmp_path, PREFIX / "lib"), 65534, 65534)
    with pytest.raises(UnitFilesError, match="give it to root"):
        install(tmp_path)


def test_install_below_everybodys_directory_is_refused(tmp_path: Path) -> None:
    """Who may write there could replace what root runs."""
    at(tmp_path, PREFIX / "lib").mkdir(parents=True)
    at(tmp_path, PREFIX / "lib").chmod(0o777)
    with pytest.raises(UnitFilesError, match="chmod o-w"):
        install(tmp_path)


def test_install_damaged_manifest_is_told_with_its_path(tmp_path: Path) -> None:
    """It is not taken for none, or everything would look like an administrator's."""
    install(tmp_path)
    at(tmp_path, MANIFEST).write_text("{")
    with pytest.raises(UnitFilesError, match=rf"{MANIFEST}: it is damaged"):
        install(tmp_path)


def test_install_unwritable_place_is_told(tmp_path: Path) -> None:
    """The kernel's reason and the path, not a traceback."""
    at(tmp_path, PREFIX).parent.mkdir(parents=True)
    at(tmp_path, PREFIX).write_text("a file")
    with pytest.raises(UnitFilesError, match="no directory"):
        install(tmp_path)


def test_read_sources_takes_ours_and_leaves_the_rest(tmp_path: Path) -> None:
    """Other packages share the directories of an environment."""
    for name in (
        "lib/systemd/system/onebitd@.service",
        "lib/systemd/system/other.service",
        "share/man/man8/onebitd.8",
        "share/onebitd/drop-ins/lan.conf",
        "lib/python3/site-packages/onebitd@.service",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = unit_files.read_sources(tmp_path)
    assert sorted(map(str, found)) == [
        "lib/systemd/system/onebitd@.service",
        "share/man/man8/onebitd.8",
        "share/onebitd/drop-ins/lan.conf",
    ]


def test_read_sources_without_units_says_how_to_install(tmp_path: Path) -> None:
    """An editable installation has none."""
    with pytest.raises(UnitFilesError, match="not in editable mode"):
        unit_files.read_sources(tmp_path)
