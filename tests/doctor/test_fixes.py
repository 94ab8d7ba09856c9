"""The commands that a report offers: each does what its sentence says, and all can be pasted."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from onebitd.adapters.lock_probe import LockStatus
from onebitd.core.config import Config, LockConfig
from onebitd.core.paths import DEVICE_LOCK
from onebitd.doctor import devices, inside, kept, lock, program, provider, sight, space, unit
from onebitd.doctor.devices import Node, Who
from onebitd.doctor.finding import Finding, State
from onebitd.doctor.place import Place
from onebitd.doctor.sight import Step
from onebitd.doctor.space import Room
from onebitd.surfaces import daemon_args
from tests.systemd.instances import toml

INSIDE = Place("q", "system", inside=True, config_file="/etc/onebitd/q.toml")
HERE = Place("q", config_file="/etc/onebitd/q.toml")
MINE = Place("q", "user", inside=True, config_file="/etc/onebitd/q.toml")
NPU = Node("/dev/accel/accel0", "accel", uid=0, gid=44, mode=0o660, can_open=False)
GPU = Node("/dev/dri/renderD128", "drm", uid=0, gid=1, mode=0o660, can_open=False)
SESAME = "sesame-4711"


def files(*found: Finding) -> list[str]:
    """Return the drop-ins that the commands of findings write."""
    return [name for one in found for name in re.findall(r"\S+\.conf", one.fix or "")]


@pytest.mark.parametrize("gids", [(990,), (990, 1, 44)], ids=["groups", "rules"])
def test_fixes_of_two_nodes_are_two_files(gids: tuple[int, ...]) -> None:
    """Whoever pastes both has both: the second does not overwrite the first."""
    found = devices.judge_nodes([NPU, GPU], Who("onebitd", 990, gids, -1), INSIDE)
    assert [one.state for one in found] == [State.FAILED] * 2
    assert len(set(files(*found))) == 2


def test_fixes_of_both_times_are_two_files() -> None:
    """Of the start and of the stop."""
    shown = {"TimeoutStopUSec": "1s", "TimeoutStartUSec": "1s", "WatchdogUSec": "30s"}
    facts = {"drain_timeout_s": 60.0, "load_timeout_s": 600.0}
    found = unit.judge(shown, [], facts, INSIDE)[1:]
    assert [one.name for one in found] == ["service.stop", "service.start"]
    assert len(set(files(*found))) == 2


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (INSIDE, "/etc/systemd/system/onebitd@q.service.d/zz-memlock.conf"),
        (MINE, "/etc/systemd/system/user@.service.d/zz-onebitd.conf"),
        (HERE, "sudo prlimit --memlock=unlimited --pid $$"),
        (Place("q", "user"), "sudo prlimit --memlock=unlimited --pid $$"),
    ],
)
def test_fix_of_memlock_is_where_the_limit_is(place: Place, words: str) -> None:
    """A user's own unit cannot go beyond the hard limit of that user's service manager."""
    fix = devices.judge_memlock(8 << 20, [NPU], place).fix or ""
    assert words in fix
    assert ("sudo loginctl terminate-user" in fix) == (place is MINE)
    assert ("LimitMEMLOCK=infinity" in fix) == place.inside


TMPFILES = "sudo systemd-tmpfiles --create onebitd.conf"
INSTALL = "sudo install -m 660 -g render /dev/null /srv/l"
OWN = "sudo chown root:render /srv/l && sudo chmod 660 /srv/l"
EDIT = "sudoedit /etc/onebitd/q.toml"


@pytest.mark.parametrize(
    ("path", "problem", "fix"),
    [
        (DEVICE_LOCK, "it is a directory: remove it", f"sudo rmdir -- {DEVICE_LOCK} && {TMPFILES}"),
        ("/srv/l", "it is a directory: remove it", f"sudo rmdir -- /srv/l && {INSTALL}"),
        ("/srv/l", "it is a fifo: remove it", f"sudo rm -f -- /srv/l && {INSTALL}"),
        (
            "/srv/l",
            "it is a symbolic link, and a lock must not be one: remove it",
            f"sudo rm -f -- /srv/l && {INSTALL}",
        ),
        (
            "/srv/l",
            "it is a hard link (2 names for one file): remove it",
            f"sudo rm -f -- /srv/l && {INSTALL}",
        ),
        ("/srv/l", "its directory /srv does not exist: create it, or set lock.path", EDIT),
        (
            "/srv/l",
            "its directory /srv belongs to ann, who can replace it, and then two would hold the"
            " lock: set lock.path to a file in a directory of root's",
            EDIT,
        ),
        (
            "/srv/l",
            "its directory /srv lets everybody replace it, and then two would hold the lock: chmod"
            " +t /srv, or set lock.path",
            "sudo chmod +t /srv",
        ),
        ("/srv/l", "it may not be created or reached in /srv by the user q; let root", INSTALL),
        ("/srv/l", "it may not be opened by the user q: it belongs to root:root; let root", OWN),
        ("/srv/l", "it belongs to ann, who can remove it, and then: make root its owner", OWN),
        ("/srv/l", "it belongs to uid 7: with fs.protected_regular = 2 an engine", OWN),
        ("/srv/l", "cannot look at it: Not a directory (ENOTDIR)", EDIT),
        ("/srv/l", "cannot read its owner line: Input/output error (EIO)", EDIT),
        ("/srv/l", "cannot tell who holds it: /proc/locks: No such file (ENOENT)", None),
    ],
)
def test_fix_of_the_lock_is_that_of_its_problem(path: str, problem: str, fix: str | None) -> None:
    """A directory is removed first, and a lock that others may hold stays the same file."""
    status = LockStatus(path, exists=True, held=False, holder=None, problem=problem, usable=False)
    found = lock.judge(status, INSIDE).fix
    assert (found and " ".join(found.replace("\\\n", " ").split())) == fix


@pytest.mark.parametrize(
    ("made", "fix"),
    [
        (lambda path: path.mkdir(), "sudo rmdir -- {path} && sudo install"),
        (os.mkfifo, "sudo rm -f -- {path} && sudo install"),
        (lambda path: path.symlink_to("/dev/null"), "sudo rm -f -- {path} && sudo install"),
        (lambda path: path.parent.rmdir(), EDIT),
        (lambda path: (path.touch(), path.parent.chmod(0o777)), "sudo chmod +t {path.parent}"),
    ],
    ids=["directory", "fifo", "link", "nowhere", "everybody's"],
)
def test_fix_of_the_lock_knows_the_words_of_the_probe(
    tmp_path: Path, made: Callable[[Path], object], fix: str
) -> None:
    """What is said of real files, so that no other wording takes the cure away."""
    path = tmp_path / "at" / "l"
    path.parent.mkdir()
    made(path)
    found = (
        lock.check(LockConfig(enabled=True, path=str(path), hold="handoff", wait_s=1.0), INSIDE).fix
        or ""
    )
    assert " ".join(found.replace("\\\n", " ").split()).startswith(fix.format(path=path))


def test_fix_of_a_lock_behind_a_shut_directory_is_about_that(tmp_path: Path) -> None:
    """Root could make the file, and the service would still not get at it."""
    status = LockStatus("/srv/l", exists=False, held=False, holder=None, problem="it may not be")
    shut = Step("/srv", "denied", "ann", "ann", 0o700, is_directory=True)
    assert lock.judge(status, INSIDE, shut).fix == "sudo chmod o+x /srv"
    hidden = LockStatus(
        "/run/user/l", exists=False, held=False, holder=None, problem="it may not be"
    )
    empty = Step("/run/user", "denied", "root", "root", 0, is_directory=True)
    assert lock.judge(hidden, INSIDE, empty).fix == EDIT


def configuration(home: Path) -> Config:
    """Return one whose paths have blanks in them, and whose provider has a secret."""
    file = home / "q.toml"
    file.write_text(
        toml(
            {
                "model": {"path": "/a b/m.gguf"},
                "provider": {
                    "program": "/a b/provider",
                    "elfs": "/a b/elfs",
                    "env": {"SECRET": SESAME},
                },
            }
        )
    )
    return daemon_args.load_config(daemon_args.parse(["--config", str(file)]), {})


def shut_state(home: Path) -> list[Finding]:
    """Return what is said of a state directory that cannot be written."""
    directory = home / "a b/onebitd/q"
    directory.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "access", lambda *_a, **_k: False)
        patch.setattr(os, "geteuid", lambda: 65534)
        environ = {"XDG_STATE_HOME": str(home / "a b")}
        return kept.check(configuration(home), environ, MINE)


def programs(home: Path) -> list[Finding]:
    """Return what is said of programs that cannot be executed."""
    (home / "a b").mkdir()
    found = []
    for name, mode in (("plain", 0o644), ("script", 0o755)):
        path = home / "a b" / name
        path.write_text("#!/opt/gone/python3\n")
        path.chmod(mode)
        found.append(program.check("provider.program", "the provider", str(path), INSIDE, None))
    said = ("libx.so: cannot open shared object file", "libx.so: odd")
    lines = (*(f"x: error while loading shared libraries: {one}" for one in said), "")
    found += [program.load_problem("decoder.program", "/a b/x", 127, one, INSIDE) for one in lines]
    return [one for one in found if one is not None]


def locks(_home: Path) -> list[str | None]:
    """Return what puts locks right."""
    problems = (
        "it is a fifo: remove it",
        "it belongs to ann",
        "chmod +t /a b",
        "may not be created",
    )
    return [lock._fix("/a b/l", problem, INSIDE) for problem in problems]


@pytest.mark.parametrize(
    ("made", "count"),
    [
        (lambda home: [provider._by_hand(configuration(home))], 1),
        (lambda home: [provider._conformance(configuration(home))], 1),
        (lambda home: [one.fix for one in shut_state(home)], 1),
        (lambda home: [one.fix for one in programs(home)], 5),
        (locks, 4),
        (lambda _: [unit.judge({}, ["/a b/x.conf"], {}, INSIDE)[1].fix], 1),
        (lambda _: [space._fix(Room("/a b/s", "tmpfs", "/a b", 0, 0), 1, INSIDE)], 1),
        (lambda _: [sight.access_fix(INSIDE, Step("/a b", "denied"), "r")], 1),
        (lambda _: [sight.show_fix(INSIDE, "/a b/m.gguf")], 1),
        (lambda _: [Place("q", config_file="/a b/q.toml").edit()], 1),
        (
            lambda _: [
                inside._config_fix(
                    "permission denied", Place("q", is_root=True, config_file="/a b")
                )
            ],
            1,
        ),
    ],
)
def test_fixes_take_paths_with_blanks(
    tmp_path: Path, made: Callable[[Path], list[str | None]], count: int
) -> None:
    """A shell sees each of them as one word."""
    found = made(tmp_path)
    assert len(found) == count
    for fix in found:
        assert fix is not None
        words = shlex.split(fix.replace("\\\n", " "), comments=True)
        assert [word for word in words if "a b" in word], fix
        assert not [word for word in words if word == "b" or word.startswith("b/")], fix


def test_fix_of_a_provider_runs_it_as_the_daemon_does(tmp_path: Path) -> None:
    """With its directory of compiled files, and with a word on variables, whose values it keeps."""
    for fix in (
        provider._by_hand(configuration(tmp_path)),
        provider._conformance(configuration(tmp_path)),
    ):
        assert "--elfs '/a b/elfs'" in fix
        assert fix.startswith("# with these of provider.env set: SECRET\n")
        assert SESAME not in fix


def test_fix_of_state_of_another_user_needs_root(tmp_path: Path) -> None:
    """Whoever may not write there may not make it their own either."""
    (found,) = shut_state(tmp_path)
    assert (found.fix or "").startswith("sudo chown -R ")


def test_fix_of_a_masked_drop_in_of_the_system_needs_root() -> None:
    """It may be in the way of a user's own unit too."""
    masked = ["/etc/systemd/user/onebitd@q.service.d/x.conf", "/a/x.conf"]
    _, first, second, *_ = unit.judge({}, masked, {}, MINE)
    assert (first.fix or "").startswith("sudo rm /etc")
    assert (second.fix or "").startswith("rm /a")
