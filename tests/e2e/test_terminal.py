"""What each command looks like, at 80, 100 and 160 columns, in a pipe, to root and to others.

The texts are in `tests/e2e/terminal/`; `tests/e2e/terminal_screens.py` says how they are made and
written anew. Each is of a real daemon, on the stand-in decoder but for the last tests.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
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

from onebitd.adapters.history_store import HistoryStore, Keep
from onebitd.surfaces.cli import build_parser
from tests.e2e.rig import DAYS as RIG_DAYS
from tests.e2e.rig import RHYME as RIG_RHYME
from tests.e2e.rig import Prepared, running_rig
from tests.e2e.standin_route import DECODER, PATH, Background, Route, quick_provider, running_route
from tests.e2e.terminal_pins import pinned_record
from tests.e2e.terminal_relay import relayed
from tests.e2e.terminal_screens import (
    ALL,
    AT_80,
    AT_100,
    AT_160,
    DIRECTORY,
    EVERY,
    FEW,
    NO_COLOR,
    PIPED,
    WIDTHS,
    Desk,
    Terminal,
    hold,
    seen_on,
    shots,
    shots_of_each,
    typed,
)
from tests.harness import HttpReply, RunningDaemon, clean_environ, raw_connection, wait_until
from tests.llama_builds import ROOT, LlamaBuild, LlamaModel

RHYME = "Mary had a little lamb, its fleece was white as snow. "
MEMBERS, MEMBER, STRANGER = 54321, 54322, 54323
"""A group, and users that are in no passwd."""
RUN = "/run/user/1000"
IS_ROOT = os.geteuid() == 0
WITHOUT_SYSTEMD = pytest.mark.skipif(
    Path("/run/systemd/system").is_dir(),
    reason="where systemd runs the sentences are others; tests/systemd has them",
)


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


@contextlib.contextmanager
def home_of_user() -> Iterator[Path]:
    """Yield a directory whose path is as long as what is shown for it."""
    with tempfile.TemporaryDirectory(prefix="o", dir="/tmp") as name:
        assert len(name) == len(RUN)
        yield Path(name)


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
    return Desk(kept | more, {**shown, str(home): RUN, str(MEMBERS): "onebitd"})


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
    with home_of_user() as home, running_route(provider=provider, **how) as route:  # type: ignore[arg-type]
        shown = shown_of(route.daemon, route.home, provider)
        path = home / "onebitd" / "qwen" / "control.sock"
        with relayed(path, route.daemon.runtime / "control.sock", shown):
            yield Place(route, home, desk_of(home, shown))


def ask(route: Route, number: int, prompt: str, policy: str = "always", **how: str) -> HttpReply:
    """Have one chat whose record ends with a number; `how` is for the stand-ins."""
    route.behave(**how)
    named = {"X-Request-Id": f"req-{number:02}", "X-Onebit-Handoff": policy}
    return route.daemon.chat(prompt, headers=named)


def phases(route: Route) -> list[str]:
    """Return where the requests in flight are, in the order of the line."""
    return [one["phase"] for one in route.daemon.control("/v1/requests")["requests"]]


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
    route.daemon.last_handoff(10)
    wait_until_known(route.daemon)


def wait_until_known(daemon: RunningDaemon, *missing: str) -> None:
    """Wait until the daemon has learned all but that: it does so when it has time."""
    wait_until(
        lambda: daemon.status()["policy"]["missing"] == list(missing), f"all but {missing} is known"
    )


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A daemon that has had each outcome."""
    with place(tmp_path_factory.mktemp("day"), lock="wait_s = 0.2") as found:
        have_a_day(found.route)
        yield found


def named(*words: str) -> list[str]:
    """Return a command line for the instance of these tests, whatever else runs here."""
    return [*words, "-i", "qwen"]


def test_handoffs_are_a_table_that_fits(day: Place) -> None:
    """One line each from 100 columns on, two at 80; every reason is whole."""
    hold("handoffs", shots(day.desk, named("handoffs"), EVERY))


def test_handoffs_filters_leave_what_is_wanted(day: Place) -> None:
    """By outcome, reason, route and time; none is a sentence."""
    lines: list[Sequence[str]] = [
        ("--outcome", "used"),
        ("--reason", "provider_exit"),
        ("--route", "file", "-n", "2"),
        ("--since", "2h", "--outcome", "failed"),
        ("--outcome", "wasted"),
    ]
    texts = shots_of_each(day.desk, [named("handoffs", *words) for words in lines], (AT_100,))
    hold("handoffs-filters", *texts)


def test_handoffs_summary_is_tables_that_fit(day: Place) -> None:
    """Counts, reasons with their meaning, and the parts."""
    hold("handoffs-summary", shots(day.desk, named("handoffs", "--summary")))


def test_handoffs_csv_is_the_same_everywhere(day: Place) -> None:
    """Programs read it: the terminal's width counts for nothing."""
    hold("handoffs-csv", shots(day.desk, named("handoffs", "--csv", "-n", "3"), (PIPED,)))


def test_handoffs_followed_show_what_comes_until_interrupted(day: Place) -> None:
    """The last ones at once, and Ctrl-C is exit status 0."""
    words = named("handoffs", "-f", "-n", "2")
    data, status = typed(argv_of(words), day.desk.environ, AT_100, interrupt_at=b"\r\n09:42:10")
    shown = day.desk.as_shown(on_screen(data, AT_100))
    hold("handoffs-follow", f"$ onebitctl {' '.join(words)}\nexit status {status}\n{shown}\n")


def test_status_of_a_ready_daemon_is_a_page_that_fits(day: Place) -> None:
    """What is wrong first, then the state, what happens and what it is made of."""
    hold("status", shots(day.desk, named("status"), EVERY))


@pytest.mark.parametrize("terminal", [AT_80, AT_100, AT_160])
def test_status_watched_is_drawn_in_place(day: Place, terminal: Terminal) -> None:
    """The page on the alternate screen; Ctrl-C is exit status 0 and gives the terminal back."""
    words = named("status", "--watch", "60")
    data, status = typed(
        argv_of(words), day.desk.environ, terminal, interrupt_at=b"\x1b[J", lines=40
    )
    assert data.startswith(b"\x1b[?1049h")
    assert data.endswith(b"\x1b[?7h\x1b[?25h\x1b[?1049l")
    shown = day.desk.as_shown(on_screen(data, terminal, 40))
    hold(
        f"status-watch-{terminal.columns}",
        f"$ onebitctl {' '.join(words)}\nexit status {status}\n-- {terminal.name}\n{shown}\n",
    )


def test_config_is_three_columns_that_fit(day: Place) -> None:
    """A value that does not fit has lines of its own on a terminal; a pipe a setting a line."""
    hold("config", shots(day.desk, named("config")))


def test_lock_says_who_holds_it(day: Place) -> None:
    """Free, and held."""
    lock = day.home / "some.lock"
    words = named("lock", "--path", str(lock))
    free = shots(day.desk, words, FEW)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        held = shots(day.desk, words, FEW, tidy=without_pids)
    hold("lock", day.desk.as_shown(free), day.desk.as_shown(held))


def test_advise_is_tables_that_fit(day: Place) -> None:
    """From what the daemon has learned."""
    hold("advise", shots(day.desk, named("advise")))


def without_pids(text: str) -> str:
    """Return a text in which this test run is no longer to be seen."""
    text = re.sub(r"pid \d+", "pid 3977", text)
    return re.sub(r"(?ms)^command: .*?(?=^\S+: |\Z)", "command: ...", text)


def argv_of(words: Sequence[str]) -> list[str]:
    """Return the whole command line of a command."""
    return [sys.executable, "-m", "onebitd.surfaces.cli", *words]


def on_screen(data: bytes, terminal: Terminal, lines: int = 50) -> str:
    """Return what a terminal shows after all of that."""
    assert terminal.columns is not None
    screen = pyte.Screen(terminal.columns, lines)
    pyte.Stream(screen).feed(data.decode())
    return "\n".join(line.rstrip() for line in screen.display).rstrip()


def test_help_of_each_command_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns; what is in it is held by the tests of the man pages."""
    with desk_of_nobody() as desk:
        hold("help", shots(desk, ["--help"], (AT_80, AT_100, PIPED), tidy=of_any_python))
    monkeypatch.setenv("COLUMNS", "80")
    for parser in with_commands(build_parser()):
        lines = parser.format_help().splitlines()
        assert max(map(len, lines)) <= 80, parser.prog


def of_any_python(text: str) -> str:
    """Return a text of argparse without what differs between its versions."""
    text = text.replace("-i INSTANCE, --instance INSTANCE", "-i, --instance INSTANCE")
    text = re.sub(r"(?ms)\(choose\s+from.*?\)$", "(choose from ...)", text)
    return re.sub(r"(?ms)^usage: .*?(?=^onebitctl)", "usage: ...\n", text)


def with_commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those of its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from with_commands(command)


@contextlib.contextmanager
def desk_of_nobody() -> Iterator[Desk]:
    """Yield a desk where no daemon runs."""
    with home_of_user() as home:
        yield desk_of(home, {})


def test_errors_of_usage_are_sentences(day: Place) -> None:
    """Exit status 2, the option and what it takes."""
    lines = [
        ["statsu"],
        ["status", "--all", "-i", "qwen"],
        ["status", "--watch", "never"],
        ["handoffs", "--reason", "gremlins"],
        ["handoffs", "--since", "someday"],
        ["handoffs", "-n", "many"],
        ["handoffs", "--summary", "--csv"],
        ["cancel"],
        ["bench", "-i", "qwen", "--lengths", "8,90000"],
        ["bench", "-i", "qwen", "--routes", "shared"],
        ["try", "-i", "qwen", "--max-tokens", "0", "hello"],
        ["advise", "-i", "qwen", "--lengths", "0"],
        ["doctor", "--config", "/nowhere.toml"],
        ["doctor", "--socket", "/nowhere.sock"],
        ["state"],
    ]
    first = shots(day.desk, lines[0], FEW, tidy=of_any_python)
    hold("errors-usage", first, *shots_of_each(day.desk, lines[1:], tidy=of_any_python))


def test_errors_of_the_daemon_are_sentences(day: Place) -> None:
    """What is not there is named."""
    lines = [["cancel", "-i", "qwen", "req-99"]]
    hold("errors-daemon", *(shots(day.desk, words, FEW) for words in lines))


NEEDS_DAEMON = (
    *(["status"], ["handoffs"], ["handoffs", "--summary"], ["handoffs", "-f"], ["requests"]),
    *(["cancel", "req-01"], ["config"], ["reload"], ["advise"], ["try", "hello"], ["bench"]),
    ["provider", "reset"],
)


@WITHOUT_SYSTEMD
def test_no_daemon_is_exit_status_3_and_how_to_start_one() -> None:
    """Whichever command is asked; the lock needs none."""
    with desk_of_nobody() as desk:
        texts = shots_of_each(desk, [named(*words) for words in NEEDS_DAEMON[1:]])
        lock = shots(desk, ["lock", "--path", "/tmp/nobody-s.lock"], FEW)
        hold("down", shots(desk, named("status"), ALL), *texts, lock)


@WITHOUT_SYSTEMD
def test_no_daemon_but_its_history_is_shown_and_named(day: Place) -> None:
    """The handoffs are those of the file, which is named on stderr; of a user's own daemon."""
    with home_of_user() as home:
        path = home / "state" / "onebitd" / "qwen" / "history.db"
        store = HistoryStore(path)
        store.open()
        text = json.dumps(list(map(pinned_record, day.route.daemon.handoffs())))
        records = json.loads(day.desk.as_shown(text))
        store.write(list(enumerate(records, 1)), Keep(1000, 0))
        store.close()
        desk = desk_of(home, dict(day.desk.shown))
        if IS_ROOT:  # whose history is that of a service
            for entry in (home, *home.rglob("*")):
                os.chown(entry, MEMBER, MEMBER)
            desk = dataclasses.replace(desk, become=become(MEMBER))
        listed = shots(desk, named("handoffs", "-n", "3"))
        lines = [["handoffs", "--outcome", "wasted"], ["handoffs", "--summary"], ["status"]]
        hold("down-history", listed, *(shots(desk, named(*words), (AT_80,)) for words in lines))


@WITHOUT_SYSTEMD
@pytest.mark.skipif(not IS_ROOT, reason="its sentences name the user")
def test_doctor_is_groups_of_checks_and_their_fixes(day: Place) -> None:
    """What is wrong stands in the second line; each fix is a command."""
    with home_of_user() as home, tempfile.TemporaryDirectory(prefix="st", dir="/dev/shm") as states:
        file = home / "qwen.toml"
        file.write_text(doctors_config(day, home, states))
        more = {
            "RUNTIME_DIRECTORY": str(day.route.daemon.runtime),
            "STATE_DIRECTORY": str(home),
            "PATH": PATH,
        }
        desk = desk_of(home, {states: "/dev/shm/qwen-slots"})
        desk = dataclasses.replace(desk, environ={**desk.environ, **more})
        words = ["doctor", "--here", "-i", "qwen", "--config", str(file)]
        well = shots(desk, words, (AT_80, PIPED), tidy=of_any_machine)
        (home / "tiny.gguf").unlink()
        file.write_text(file.read_text().replace("/prefill", "/gone"))
        ill = shots(desk, [*words, "--quick"], (AT_80, NO_COLOR), tidy=of_any_machine)
        file.write_text("[http]\nport = 80000\n")
        bad = shots(desk, [*words, "--quick"], (AT_80,), tidy=of_any_machine)
        hold("doctor", *map(desk.as_shown, (well, ill, bad)))


def doctors_config(day: Place, home: Path, states: str) -> str:
    """Return the configuration of a daemon like that of these tests, all of it in `home`."""
    (home / "tiny.gguf").write_bytes((day.route.home / "tiny.gguf").read_bytes())
    (home / "llama-server").symlink_to(DECODER)
    quick_provider(home).rename(home / "prefill")
    return (
        f'[model]\npath = "{home}/tiny.gguf"\n'
        f'[backend]\nllama_server = "{home}/llama-server"\n'
        f'[provider]\nprogram = "{home}/prefill"\n'
        f'[handoff]\nstate_dir = "{states}"\n'
        f'[lock]\npath = "{home}/npu.lock"\n'
        f"[http]\nport = {day.route.daemon.port}\n"
    )


def of_any_machine(text: str) -> str:
    """Return a doctor's report without what it says of this machine's devices and memory."""
    text = re.sub(r"(?ms)^devices$.*?(?=^\S)", "devices\n  ...\n", text)
    text = re.sub(r"(?ms)^  (..) (\S+ \(tmpfs\): ).*?(?=^  \S|^\S)", r"  \1 \2...\n", text)
    return re.sub(r"\b\d[\d.]* (ms|s)\b", r"1 \1", re.sub(r"\b(pid|kill) \d+", r"\1 4100", text))


@contextlib.contextmanager
def watched_by_group(day: Place) -> Iterator[None]:
    """Open the daemon's control socket to a group, as a service's is."""
    opened = [(day.home, 0o755), (day.home / "onebitd", 0o755), (day.runtime, 0o750)]
    for path, mode in [*opened, (day.runtime / "control.sock", 0o660)]:
        os.chown(path, 0, MEMBERS)
        path.chmod(mode)
    try:
        yield
    finally:
        day.home.chmod(0o700)


def become(uid: int, *groups: int) -> list[str]:
    """Return what runs a command as a user of these groups."""
    ids = ",".join(map(str, groups))
    more = [f"--groups={ids}"] if groups else ["--clear-groups"]
    # What runs on this machine besides is out of sight.
    hide = 'if [ -d /run/onebitd ]; then mount -t tmpfs tmpfs /run/onebitd; fi; exec "$@"'
    alone = ["unshare", "--mount", "sh", "-c", hide, "sh"]
    found = [*alone, "setpriv", f"--reuid={uid}", f"--regid={uid}", *more]
    import_all = [sys.executable, "-c", "import onebitd.surfaces.cli"]
    tried = subprocess.run(
        [*found, *import_all], env={"PYTHONPATH": str(ROOT)}, capture_output=True, check=False
    )
    if tried.returncode != 0 and os.environ.get("CI") != "true":
        pytest.skip(f"no other user can run this checkout: {tried.stderr.decode()[-200:]}")
    return found


@pytest.mark.skipif(not IS_ROOT, reason="needs root to become another user")
def test_member_of_the_group_sees_what_root_sees(day: Place) -> None:
    """The same texts as root's, in every command that asks."""
    with watched_by_group(day):
        member = dataclasses.replace(day.desk, become=become(MEMBER, MEMBERS))
        lines = [named(name) for name in ("status", "handoffs", "requests", "config", "advise")]
        roots, members = (shots_of_each(desk, lines) for desk in (day.desk, member))
        assert members == roots
        assert all("\nexit status 0\n" in text for text in members)


@pytest.mark.skipif(not IS_ROOT, reason="needs root to become another user")
def test_stranger_is_told_the_group_to_join(day: Place) -> None:
    """Exit status 4, whichever command is asked."""
    with watched_by_group(day):
        stranger = dataclasses.replace(day.desk, become=become(STRANGER))
        texts = shots_of_each(stranger, [named(*words) for words in NEEDS_DAEMON[1:]])
        everyone = shots(stranger, ["status", "--all"], FEW)
        hold("stranger", shots(stranger, named("status"), ALL), *texts, everyone)


@pytest.mark.skipif(not IS_ROOT, reason="needs a user whose runtime directories are known")
def test_status_of_all_is_a_block_each(day: Place) -> None:
    """As a member of the group, who has no other daemons than these."""
    with watched_by_group(day):
        member = dataclasses.replace(day.desk, become=become(MEMBER, MEMBERS))
        hold("status-all", shots(member, ["status", "--all"]))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A daemon to work with; what its tests show does not tell what came before."""
    with place(tmp_path_factory.mktemp("work")) as found:
        yield found


def test_requests_are_a_table_and_can_be_cancelled(work: Place) -> None:
    """Two in flight, then none; a client that is cancelled gets an error."""
    work.route.begin()
    nothing = shots(work.desk, named("requests"), FEW)
    work.route.behave(decoder="--hold-on completion")
    first = Background(ask, work.route, 1, RHYME, decoder="--hold-on completion")
    wait_until(lambda: work.route.daemon.status()["slot"]["phase"] == "decode", "it is held")
    held = {"decoder": "--hold-on completion", "provider": "hang"}
    second = Background(ask, work.route, 2, RHYME * 2, **held)
    wait_until(lambda: phases(work.route) == ["decode", "prefill"], "the next is prefilled")
    both = shots(work.desk, named("requests"))
    cancelled = shots(work.desk, named("cancel", "req-02"), (AT_80,))
    wait_until(lambda: phases(work.route) == ["decode"], "one is left")
    again = shots(work.desk, named("cancel", "req-02"), FEW)
    work.route.behave()
    for client in (first, second):
        client.join()
    hold("requests", nothing, both, cancelled, again)


def test_reload_and_reset_say_what_they_did(work: Place) -> None:
    """Nothing; what is taken over and what is not; what is wrong."""
    work.route.begin()
    file = work.route.daemon.runtime.with_name("test.toml")
    before = file.read_text()
    texts = [shots(work.desk, named("reload"), FEW)]
    changes = (
        before.replace('level = "info"', 'level = "warning"').replace("wait_s = 1", "wait_s = 2"),
        before + '[http]\nport = 8001\nmax_pending = "many"\nmax_pendign = 3\n',
    )
    for changed in changes:
        file.write_text(changed)
        texts.append(shots(work.desk, named("reload"), (AT_80,)))
        if changed is not changes[0]:
            texts.append(shots(work.desk, named("reload"), FEW))
    file.write_text(before)
    shots(work.desk, named("reload"), (PIPED,))
    reset = shots(work.desk, named("provider", "reset"), FEW)
    hold("reload", *texts, reset)


def test_try_is_the_reply_and_its_parts(work: Place) -> None:
    """The words of the model, a bar, and what became of the handoff."""
    work.route.begin()
    words = named("try", "--max-tokens", "12", "--policy", "always", "What do lambs eat?")
    used = shots(work.desk, words, at_once=False)
    work.route.behave(provider="exit:3")
    failed = shots(work.desk, words, (AT_80,))
    strict = shots(work.desk, named("try", "--policy", "strict", "hello"), (AT_80, PIPED))
    work.route.begin()
    never = named("try", "--policy", "never", "--max-tokens", "2", "hello")
    hold("try", used, failed, strict, shots(work.desk, never, (AT_80,)))


def test_bench_is_a_verdict_and_a_table(work: Place) -> None:
    """When the provider loses and where it breaks even."""
    work.route.begin()
    words = named("bench", "--lengths", "16,512", "--repeat", "3", "--max-tokens", "2")
    hold("bench", shots(work.desk, words, (AT_80, PIPED), at_once=False))


def test_starting_daemon_says_what_to_wait_for(tmp_path: Path) -> None:
    """Exit status 1, and no command hangs."""
    decoder = ("--load-delay", "3600")
    with place(tmp_path, decoder=decoder, wait_ready=False) as starting:
        control = starting.route.daemon.runtime / "control.sock"
        wait_until(control.exists, "the control socket")
        wait_until(
            lambda: starting.route.daemon.status()["backend"]["pid"] is not None, "the decoder"
        )
        lines = [["handoffs"], ["handoffs", "--summary"], ["requests"], ["advise"], ["bench"]]
        lines.append(["try", "hello"])
        texts = shots_of_each(starting.desk, [named(*words) for words in lines])
        hold("starting", shots(starting.desk, named("status")), *texts)


def test_degraded_daemon_says_what_is_wrong_first(tmp_path: Path) -> None:
    """The breaker is open: why, until when, and what helps."""
    with place(tmp_path) as degraded:
        for number in range(1, 7):
            ask(degraded.route, number, RHYME * number, provider="exit:3")
        wait_until(
            lambda: degraded.route.daemon.status()["provider"]["breaker"] == "open", "it is open"
        )
        wait_until_known(degraded.route.daemon, "provider")
        texts = [shots(degraded.desk, named("status"), WIDTHS)]
        texts.append(shots(degraded.desk, named("handoffs"), (AT_80, AT_160)))
        reset = shots(degraded.desk, named("provider", "reset"), (AT_80,))
        hold("degraded", *texts, reset)


def test_restarting_daemon_says_that_the_decoder_ended(tmp_path: Path) -> None:
    """While the decoder loads again, and once it is back."""
    with place(tmp_path) as restarting:
        route = restarting.route
        route.behave(decoder="--hold-on health")
        os.kill(route.daemon.status()["backend"]["pid"], signal.SIGKILL)
        wait_until(lambda: route.daemon.status()["backend"]["state"] == "loading", "it loads")
        hold("restarting", shots(restarting.desk, named("status"), WIDTHS))
        route.behave()


def test_draining_daemon_says_that_it_stops(tmp_path: Path) -> None:
    """A reply is let come to its end; new requests are turned away."""
    with place(tmp_path) as draining:
        route = draining.route
        client = Background(ask, route, 1, RHYME, decoder="--hold-on completion")
        wait_until(lambda: route.daemon.status()["slot"]["phase"] == "decode", "it is held")
        wait_until_known(route.daemon, "decoder")
        route.daemon.process.send_signal(signal.SIGTERM)
        wait_until(lambda: route.daemon.status()["state"] == "draining", "it drains")
        texts = [shots(draining.desk, named("status"), WIDTHS)]
        texts += [shots(draining.desk, named(*words), FEW) for words in (["try", "hello"],)]
        route.behave()
        client.join()
        hold("draining", *texts)


def test_real_decoder_says_the_same(
    prepared: Prepared, parts: tuple[LlamaBuild, LlamaModel], tmp_path: Path
) -> None:
    """Status, handoffs and a try on a llama-server: its words, the same pages."""
    with home_of_user() as home, running_rig(prepared, *parts, tmp_path) as rig:
        rig.set_mode("ok")
        for number, prompt, policy in ((1, RIG_RHYME, "always"), (2, RIG_DAYS, "never")):
            names = {"X-Request-Id": f"req-{number:02}", "X-Onebit-Handoff": policy}
            assert rig.daemon.completion(prompt, headers=names, max_tokens=6).status == 200
        wait_until_known(rig.daemon)
        shown = {
            **shown_of(rig.daemon, tmp_path, rig.provider),
            str(parts[0].program): "/opt/llama/llama-server",
            str(parts[1].path): "/srv/models/smollm2-135m.gguf",
            str(rig.daemon.runtime.with_name("npu.lock")): "/tmp/1bit-npu-device.lock",
        }
        path = home / "onebitd" / "qwen" / "control.sock"
        with relayed(path, rig.daemon.runtime / "control.sock", shown):
            desk = desk_of(home, shown)
            texts = [shots(desk, named("status")), shots(desk, named("handoffs"), (AT_80, AT_100))]
            words = named("try", "--policy", "never", "--max-tokens", "4", "Say nothing.")
            desk.look(words, PIPED)  # from then on its prompt is in the slot
            texts.append(shots(desk, words, (AT_80,), tidy=without_reply))
        hold("real", *texts)


def without_reply(text: str) -> str:
    """Return what `try` prints without the words of the model."""
    return "...\n\n" + text.partition("\n\n")[2]


@pytest.mark.parametrize(
    ("terminal", "text"),
    [
        (AT_80, "x" * 81),
        (AT_80, "字" * 41),
        (AT_80, "\x1b[32mready"),
        (AT_80, "ready\x1b[2K"),
        (NO_COLOR, "\x1b[32mready\x1b[0m"),
    ],
)
def test_checks_of_a_screen_notice_what_must_not_be(terminal: Terminal, text: str) -> None:
    """A line that wraps, a colour without end, the cursor moved, colours for who wants none."""
    with pytest.raises(AssertionError):
        seen_on(f"{text}\r\n", terminal)
    assert seen_on("\x1b[32mfine\x1b[0m\r\n", AT_80) == ("fine", ("green",))


def test_texts_are_each_held_by_a_test() -> None:
    """No file is left behind by a test that is gone."""
    source = Path(__file__).read_text()
    for path in DIRECTORY.glob("*.txt"):
        name = re.sub(r"-\d+$", "-", path.stem)
        assert f'"{name}' in source, f"{path} is nobody's"
