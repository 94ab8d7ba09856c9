"""What each command looks like, at 80, 100 and 160 columns, in a pipe, to root and to others.

The texts are in `tests/e2e/terminal/`; `tests/e2e/terminal_screens.py` says how they are made and
written anew. Each is of a real daemon, on the stand-in decoder but for the last tests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyte
import pytest

from onebitd.adapters.history_store import HistoryStore
from tests.e2e.standin_route import Background, Route, quick_provider, running_route
from tests.e2e.terminal_pins import pinned_record
from tests.e2e.terminal_relay import relayed
from tests.e2e.terminal_screens import (
    ALL,
    AT_80,
    AT_100,
    DIRECTORY,
    FEW,
    PIPED,
    WIDTHS,
    Desk,
    Terminal,
    hold,
    shots,
    typed,
)
from tests.harness import RunningDaemon, clean_environ, raw_connection, running_onebitd, wait_until
from tests.llama_builds import LlamaBuild, LlamaModel, short_temporary_directory

RHYME = "Mary had a little lamb, its fleece was white as snow. "
MEMBERS, MEMBER, STRANGER = 54321, 54322, 54323
"""A group, and users that are in no passwd."""
IS_ROOT = os.geteuid() == 0


@dataclasses.dataclass(frozen=True)
class Place:
    """A daemon, the directories of the user who asks, and the desk where it is asked."""

    route: Route
    home: Path
    desk: Desk

    @property
    def runtime(self) -> Path:
        """Where the relay's socket is."""
        return self.home / "onebitd" / "qwen"


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
    return Desk(kept | more, {**shown, str(home): "/run/user/1000", str(MEMBERS): "onebitd"})


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
    }


@contextlib.contextmanager
def place(directory: Path, **how: object) -> Iterator[Place]:
    """Run a daemon, a relay in front of it, and a desk."""
    provider = quick_provider(directory)
    with short_temporary_directory() as home, running_route(provider=provider, **how) as route:  # type: ignore[arg-type]
        shown = shown_of(route.daemon, route.home, provider)
        path = home / "onebitd" / "qwen" / "control.sock"
        with relayed(path, route.daemon.runtime / "control.sock", shown):
            yield Place(route, home, desk_of(home, shown))


def ask(route: Route, number: int, prompt: str, policy: str = "always", **how: str) -> None:
    """Have one chat whose record ends with a number; `how` is for the stand-ins."""
    route.behave(**how)
    named = {"X-Request-Id": f"req-{number:02}", "X-Onebit-Handoff": policy}
    route.daemon.chat(prompt, headers=named)


def leave(route: Route, number: int, prompt: str) -> None:
    """Leave while the decoder is at work."""
    route.behave(decoder="--hold-on completion")
    body = b'{"prompt": "%s", "max_tokens": 8}' % prompt.encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: req-{number:02}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with raw_connection(route.daemon.port) as client:
        client.sendall(head.encode() + body)
        wait_until(lambda: route.daemon.status()["slot"]["phase"] == "decode", "it is held")
    route.daemon.last_handoff(number)
    route.behave()


def have_a_day(route: Route) -> None:
    """Have each outcome, always the same."""
    route.begin()
    ask(route, 1, RHYME * 3)
    ask(route, 2, RHYME * 11)
    ask(route, 3, "Hello", "never")
    ask(route, 4, RHYME + "The cat sat on the mat.", provider="exit:3")
    ask(route, 5, "The days of the week, again and again", "strict", provider="half")
    ask(route, 6, RHYME * 20, decoder="--restore-short")
    route.daemon.reset_provider()
    ask(route, 7, RHYME * 30)
    leave(route, 8, "A client that does not wait for its reply")
    with route.lock_path.open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ask(route, 9, "Somebody else has the NPU " * 5)
    ask(route, 10, RHYME * 30 + "And then?")
    assert len(route.daemon.last_handoff(10)) > 0


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A daemon that has had each outcome."""
    config = "[provider]\ntimeout_s = 60\n"
    with place(tmp_path_factory.mktemp("day"), config="", lock="wait_s = 0.2") as found:
        del config
        have_a_day(found.route)
        yield found


def named(*words: str) -> list[str]:
    """Return a command line for the instance of these tests, whatever else runs here."""
    return [*words, "-i", "qwen"]


def test_handoffs_are_a_table_that_fits(day: Place) -> None:
    """One line each from 100 columns on, two at 80; every reason is whole."""
    hold("handoffs", shots(day.desk, named("handoffs")))


def test_handoffs_filters_leave_what_is_wanted(day: Place) -> None:
    """By outcome, reason, route and time; none is a sentence."""
    lines: list[Sequence[str]] = [
        ("--outcome", "used"),
        ("--reason", "provider_exit"),
        ("--route", "file", "-n", "2"),
        ("--since", "2h", "--outcome", "failed"),
        ("--outcome", "wasted"),
    ]
    texts = [shots(day.desk, named("handoffs", *words), (AT_100, PIPED)) for words in lines]
    hold("handoffs-filters", *texts)


def test_handoffs_summary_is_tables_that_fit(day: Place) -> None:
    """Counts, reasons with their meaning, and the parts."""
    hold("handoffs-summary", shots(day.desk, named("handoffs", "--summary")))


def test_handoffs_csv_is_the_same_everywhere(day: Place) -> None:
    """Programs read it: the terminal's width counts for nothing."""
    hold("handoffs-csv", shots(day.desk, named("handoffs", "--csv", "-n", "3"), (PIPED,)))


def test_handoffs_followed_show_what_comes_until_interrupted(day: Place) -> None:
    """The last ones at once, and Ctrl-C is exit status 0."""
    argv = [sys.executable, "-m", "onebitd.surfaces.cli", *named("handoffs", "-f", "-n", "2")]
    data, status = typed(argv, day.desk.environ, AT_100, interrupt_at=b"too_short")
    del data, status


def test_requests_and_config_and_lock(day: Place) -> None:
    """Placeholder."""
    hold("config", shots(day.desk, named("config"), ALL))
    hold("requests-none", shots(day.desk, named("requests"), FEW))
