"""Where the commands of the terminal tests are typed: a daemon, directories, and who asks it.

As root, a daemon here is open to a group, as that of a service is, and there are a member of the
group and a stranger, who are in no passwd but their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.e2e.standin_route import Route, quick_provider, running_route
from tests.e2e.terminal_relay import relayed
from tests.e2e.terminal_screens import Desk
from tests.e2e.terminal_users import of_group
from tests.harness import HttpReply, RunningDaemon, clean_environ, wait_until
from tests.llama_builds import ROOT

MEMBERS: Final = 54321
MEMBER: Final = 54322
STRANGER: Final = 54323
"""The group onebitd of these tests, and two users; a third group, render, has the devices."""
IS_ROOT: Final = os.geteuid() == 0
WITHOUT_SYSTEMD: Final = pytest.mark.skipif(
    Path("/run/systemd/system").is_dir() and not IS_ROOT,
    reason="where systemd runs the sentences are others; tests/systemd has them",
)
AS_ROOT: Final = pytest.mark.skipif(not IS_ROOT, reason="needs root to become another user")

_RUN: Final = "/run/user/1000"
# What runs on this machine besides is out of sight, systemd too; /etc names these users and groups.
_ALONE: Final = f"""
if [ -d /run/onebitd ]; then mount -t tmpfs tmpfs /run/onebitd; fi
if [ -d /run/systemd/system ]; then mount -t tmpfs tmpfs /run/systemd; fi
mount -t tmpfs tmpfs /mnt
echo 'root:x:0:0::/root:/bin/sh
member:x:{MEMBER}:{MEMBER}::/:/bin/sh
stranger:x:{STRANGER}:{STRANGER}::/:/bin/sh' >/mnt/passwd
echo 'root:x:0:
render:x:992:
onebitd:x:{MEMBERS}:' >/mnt/group
mount --bind /mnt/passwd /etc/passwd
mount --bind /mnt/group /etc/group
"""


@dataclasses.dataclass(frozen=True)
class Place:
    """A daemon, the directories of the user who asks, and the desk where it is asked.

    Attributes:
        route: the daemon on the stand-ins.
        home: home, runtime and state directory of who asks; the relay's socket is in it.
        desk: of the user who runs the tests; what the relay fixes is fixed here.
    """

    route: Route
    home: Path
    desk: Desk

    def as_member(self) -> Desk:
        """Return the desk of a member of the group; the daemon sees who it is."""
        return dataclasses.replace(self.desk, become=become(MEMBER, MEMBERS))

    @contextlib.contextmanager
    def at_the_socket(self) -> Iterator[Desk]:
        """Yield a desk with no relay between it and the daemon's own control socket."""
        with home_of_user() as home:
            (home / "onebitd").mkdir()
            (home / "onebitd" / "qwen").symlink_to(self.route.daemon.runtime)
            yield desk_of(home, dict(self.desk.shown))


@contextlib.contextmanager
def home_of_user() -> Iterator[Path]:
    """Yield a directory whose path is as long as what is shown for it."""
    with tempfile.TemporaryDirectory(prefix="o", dir="/tmp") as name:
        assert len(name) == len(_RUN)
        home = Path(name)
        home.chmod(0o755)
        yield home


def desk_of(home: Path, shown: dict[str, str]) -> Desk:
    """Return a desk whose home, runtime and state directory are one."""
    environ = clean_environ(home, XDG_RUNTIME_DIR=str(home), XDG_STATE_HOME=str(home / "state"))
    gone = ("RUNTIME_DIRECTORY", "STATE_DIRECTORY", "COLUMNS", "LINES", "NO_COLOR", "LC_ALL")
    kept = {name: value for name, value in environ.items() if name not in gone}
    more = {
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / "config"),
        "LANG": "C.UTF-8",
        "TERM": "xterm-256color",
        "TZ": "UTC",
    }
    return Desk(kept | more, {**shown, str(home): _RUN})


@contextlib.contextmanager
def desk_of_nobody(become: Sequence[str] = ()) -> Iterator[Desk]:
    """Yield a desk where no daemon runs."""
    with home_of_user() as home:
        yield dataclasses.replace(desk_of(home, {}), become=become)


def shown_of(daemon: RunningDaemon, home: Path, provider: Path) -> dict[str, str]:
    """Return what stands for the paths of a daemon on the stand-ins."""
    return {
        str(daemon.runtime.with_name("state")): "/var/lib/onebitd/qwen",
        str(daemon.runtime.with_name("test.toml")): "/etc/onebitd/qwen.toml",
        str(daemon.runtime): "/run/onebitd/qwen",
        str(provider): "/opt/npu/prefill",
        str(home / "tiny.gguf"): "/srv/models/qwen3-0.6b-q8_0.gguf",
        str(home / "npu.lock"): "/tmp/1bit-npu-device.lock",
        str(home): "/srv/test",
        str(Path(__file__).parents[1] / "standins" / "llama_server.py"): "/opt/llama/llama-server",
        '"test"': '"qwen"',
        str(MEMBERS): "onebitd",
    }


@contextlib.contextmanager
def place(directory: Path, **how: object) -> Iterator[Place]:
    """Run a daemon, a relay in front of it, and a desk; `how` is for `running_route`."""
    provider = quick_provider(directory)
    with contextlib.ExitStack() as stack:
        with of_group(MEMBERS) if IS_ROOT else contextlib.nullcontext():
            home = stack.enter_context(home_of_user())
            started = running_route(provider=provider, **how)  # type: ignore[arg-type]
            route = stack.enter_context(started)
            shown = shown_of(route.daemon, route.home, provider)
            wait_until((route.daemon.runtime / "control.sock").exists, "the control socket")
            stack.enter_context(relayed_to_group(home, route.daemon, shown))
        yield Place(route, home, desk_of(home, shown))


@contextlib.contextmanager
def relayed_to_group(home: Path, daemon: RunningDaemon, shown: dict[str, str]) -> Iterator[None]:
    """Run a relay that is open to whom the daemon's own control socket is open to."""
    control, runtime = daemon.runtime / "control.sock", home / "onebitd" / "qwen"
    daemon.runtime.parent.chmod(0o711)  # else the harness's directory would keep everybody out
    with relayed(runtime / control.name, control, shown):
        for ours, theirs in ((runtime, daemon.runtime), (runtime / control.name, control)):
            ours.chmod(theirs.stat().st_mode & 0o777)
        yield


def in_sight_of_nothing(more: str = "") -> list[str]:
    """Return what runs a command where no other daemon is; `more` is done before, in sh."""
    return ["unshare", "--mount", "sh", "-e", "-c", f'{_ALONE}{more}\nexec "$@"', "sh"]


@functools.cache
def become(uid: int, *groups: int, more: str = "") -> tuple[str, ...]:
    """Return what runs a command as a user of these groups, see `in_sight_of_nothing`."""
    ids = ",".join(map(str, groups))
    whose = [f"--groups={ids}"] if groups else ["--clear-groups"]
    setpriv = ["setpriv", f"--reuid={uid}", f"--regid={uid}", *whose]
    found = (*in_sight_of_nothing(more), *setpriv)
    import_all = [sys.executable, "-c", "import onebitd.surfaces.cli"]
    tried = subprocess.run(
        [*found, *import_all], env={"PYTHONPATH": str(ROOT)}, capture_output=True, check=False
    )
    if tried.returncode != 0 and os.environ.get("CI") != "true":
        pytest.skip(f"no other user can run this checkout: {tried.stderr.decode()[-200:]}")
    return found


def named(*words: str) -> list[str]:
    """Return a command line for the instance of these tests, whatever else runs here."""
    return [*words, "-i", "qwen"]


def ask(route: Route, number: int, prompt: str, policy: str = "always", **how: str) -> HttpReply:
    """Have one chat whose record ends with a number; `how` is for the stand-ins."""
    route.behave(**how)
    headers = {"X-Request-Id": f"req-{number:02}", "X-Onebit-Handoff": policy}
    return route.daemon.chat(prompt, headers=headers)


def phases(route: Route) -> list[str]:
    """Return where the requests in flight are, in the order of the line."""
    return [one["phase"] for one in route.daemon.control("/v1/requests")["requests"]]


def wait_until_known(daemon: RunningDaemon, *missing: str) -> None:
    """Wait until the daemon has learned all but that: it does so when it has time."""
    wait_until(
        lambda: daemon.status()["policy"]["missing"] == list(missing), f"all but {missing} is known"
    )
