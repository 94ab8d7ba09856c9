"""Where the directories of an instance are."""

from __future__ import annotations

import posixpath
import stat

import pytest

from onebitd.core import paths
from onebitd.core.config import SETTING_BY_KEY


@pytest.mark.parametrize(
    ("environ", "uid", "expected"),
    [
        ({"RUNTIME_DIRECTORY": "/run/onebitd/qwen"}, 998, "/run/onebitd/qwen"),
        ({"RUNTIME_DIRECTORY": "/run/a:/run/onebitd/qwen"}, 998, "/run/onebitd/qwen"),
        ({"RUNTIME_DIRECTORY": "/run/a:/run/b"}, 998, "/run/a"),
        ({"RUNTIME_DIRECTORY": "/run/a:/run/qwen/"}, 998, "/run/qwen"),
        ({"RUNTIME_DIRECTORY": "/run/one"}, 0, "/run/one"),
        ({"RUNTIME_DIRECTORY": ""}, 0, "/run/onebitd/qwen"),
        ({"XDG_RUNTIME_DIR": "/run/user/0"}, 0, "/run/onebitd/qwen"),
        ({"XDG_RUNTIME_DIR": "/run/user/7"}, 7, "/run/user/7/onebitd/qwen"),
        ({"XDG_RUNTIME_DIR": "relative"}, 7, "/tmp/onebitd-7/qwen"),
        ({}, 7, "/tmp/onebitd-7/qwen"),
    ],
)
def test_runtime_dir_each_environment_gives_the_documented_directory(
    environ: dict[str, str], uid: int, expected: str
) -> None:
    """systemd's word first, then root's directory, then the session's, then a private one."""
    assert paths.runtime_dir("qwen", environ, uid) == expected


@pytest.mark.parametrize(
    ("environ", "uid", "expected"),
    [
        ({"STATE_DIRECTORY": "/var/lib/onebitd/qwen"}, 998, "/var/lib/onebitd/qwen"),
        ({"STATE_DIRECTORY": "/x/other:/x/qwen", "HOME": "/h"}, 998, "/x/qwen"),
        ({"HOME": "/root"}, 0, "/var/lib/onebitd/qwen"),
        ({"XDG_STATE_HOME": "/h/s", "HOME": "/h"}, 7, "/h/s/onebitd/qwen"),
        ({"XDG_STATE_HOME": "s", "HOME": "/h"}, 7, "/h/.local/state/onebitd/qwen"),
        ({"HOME": "/h"}, 7, "/h/.local/state/onebitd/qwen"),
        ({"HOME": "", "XDG_RUNTIME_DIR": "/run/user/7"}, 7, "/run/user/7/onebitd/qwen"),
        ({}, 7, "/tmp/onebitd-7/qwen"),
    ],
)
def test_state_dir_each_environment_gives_the_documented_directory(
    environ: dict[str, str], uid: int, expected: str
) -> None:
    """systemd's word first, then root's directory, then the XDG ones."""
    assert paths.state_dir("qwen", environ, uid) == expected


@pytest.mark.parametrize("uid", [0, 7])
@pytest.mark.parametrize("environ", [{}, {"XDG_RUNTIME_DIR": "/run/user/7"}])
def test_runtime_roots_any_user_hold_what_their_daemon_uses(
    environ: dict[str, str], uid: int
) -> None:
    """A client looks where a daemon of the same user puts its socket, and where root's is."""
    roots = paths.runtime_roots(environ, uid)
    assert posixpath.dirname(paths.runtime_dir("qwen", environ, uid)) in roots
    assert "/run/onebitd" in roots


@pytest.mark.parametrize(
    ("mode", "owner", "private"),
    [
        (stat.S_IFDIR | 0o700, 7, True),
        (stat.S_IFDIR | 0o2700, 7, True),
        (stat.S_IFDIR | 0o755, 7, False),
        (stat.S_IFDIR | 0o720, 7, False),
        (stat.S_IFDIR | 0o700, 8, False),
        (stat.S_IFDIR | 0o700, 0, False),
        (stat.S_IFLNK | 0o700, 7, False),
        (stat.S_IFREG | 0o700, 7, False),
    ],
)
def test_is_private_only_our_own_closed_directory_passes(
    mode: int, owner: int, private: bool
) -> None:
    """A directory in /tmp that somebody else made, or may write to, is not trusted."""
    assert paths.is_private(mode, owner, uid=7) is private


def test_device_lock_is_the_default_of_the_setting() -> None:
    """`onebitctl lock` without a daemon looks at the file that a daemon would take."""
    assert SETTING_BY_KEY["lock.path"].default == paths.DEVICE_LOCK
