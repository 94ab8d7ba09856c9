"""What each command says while the daemon is down, starting, degraded, or not to be asked.

The texts are in `tests/e2e/terminal/`, as those of tests/e2e/test_terminal.py, which has a daemon
that is well. What is the same in every command is held once, under all of them. `handoffs -f` is
left out where it would wait without a word for what never comes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from onebitd.adapters.history_store import HistoryStore, Keep
from tests.e2e.standin_route import Background, Route
from tests.e2e.terminal_doctor import (
    desk_of_doctor,
    doctor_beside,
    of_any_machine,
    write_config,
)
from tests.e2e.terminal_pins import pinned_record, pinned_text
from tests.e2e.terminal_place import (
    AS_ROOT,
    IS_ROOT,
    MEMBER,
    MEMBERS,
    STRANGER,
    WITHOUT_SYSTEMD,
    Place,
    ask,
    become,
    desk_of,
    desk_of_nobody,
    home_of_user,
    in_sight_of_nothing,
    named,
    place,
    wait_until_known,
)
from tests.e2e.terminal_screens import (
    ALL,
    AT_80,
    AT_160,
    FIVE,
    NO_COLOR,
    PIPED,
    hold,
    shots,
    shots_of_each,
)
from tests.harness import wait_until

RHYME = "Mary had a little lamb, its fleece was white as snow. "
ASKS = (
    *(["status"], ["handoffs"], ["handoffs", "--summary"], ["requests"], ["cancel", "req-01"]),
    *(["config"], ["reload"], ["advise"], ["try", "hello"], ["bench"], ["provider", "reset"]),
)
"""The commands that ask a daemon."""
FOLLOWS = ["handoffs", "-f"]


@pytest.fixture(scope="module")
def well(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A daemon that has handed over, failed and skipped."""
    with place(tmp_path_factory.mktemp("well")) as found:
        found.route.begin()
        ask(found.route, 1, RHYME * 3)
        ask(found.route, 2, RHYME * 4 + "The cat sat on the mat.", provider="exit:3")
        ask(found.route, 3, "Hello", "never")
        found.route.behave()
        found.route.daemon.last_handoff(3)
        found.route.daemon.reset_provider()  # there is nothing left to clear
        wait_until_known(found.route.daemon)
        yield found


# -- down


@WITHOUT_SYSTEMD
def test_no_daemon_is_exit_status_3_and_how_to_start_one() -> None:
    """Whichever command is asked; the lock needs none."""
    with desk_of_nobody(in_sight_of_nothing() if IS_ROOT else ()) as desk:
        status = shots(desk, named("status"), ALL)
        texts = shots_of_each(desk, [named(*words) for words in (*ASKS[1:], FOLLOWS)], FIVE)
        lines = [["status", "--all"]] if IS_ROOT else []
        lines += [["lock", "--path", "/tmp/nobody-s.lock"]]
        hold("down", status, *texts, *(shots(desk, words, FIVE) for words in lines))


@WITHOUT_SYSTEMD
def test_no_daemon_but_its_history_is_shown_and_named(well: Place) -> None:
    """The handoffs are those of the file, which is named on stderr; of a user's own daemon."""
    with home_of_user() as home:
        path = home / "state" / "onebitd" / "qwen" / "history.db"
        store = HistoryStore(path)
        store.open()
        text = json.dumps(list(map(pinned_record, well.route.daemon.handoffs()[:3])))
        records = json.loads(well.desk.as_shown(text))
        store.write(list(enumerate(records, 1)), Keep(1000, 0))
        store.close()
        desk = desk_of(home, dict(well.desk.shown))
        if IS_ROOT:  # whose history is that of a service
            for entry in (home, *home.rglob("*")):
                os.chown(entry, MEMBER, MEMBER)
            desk = dataclasses.replace(desk, become=become(MEMBER))
        listed = shots(desk, named("handoffs"))
        lines = [["handoffs", "--outcome", "wasted"], ["handoffs", "--summary"]]
        hold("down-history", listed, *(shots(desk, named(*words), FIVE) for words in lines))


# -- starting, degraded, and on the way elsewhere


@pytest.fixture(scope="module")
def starting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A daemon whose decoder takes an hour to load."""
    directory, decoder = tmp_path_factory.mktemp("starting"), ("--load-delay", "3600")
    with place(directory, decoder=decoder, wait_ready=False) as found:
        daemon = found.route.daemon
        wait_until(lambda: daemon.status()["backend"]["pid"] is not None, "the decoder")
        yield found


def test_starting_daemon_says_what_to_wait_for(starting: Place) -> None:
    """Exit status 1 where the decoder is needed, 0 where it is not, and no command hangs."""
    status = shots(starting.desk, named("status"))
    lines = [named(*words) for words in ASKS[1:] if words != ["config"]]
    texts = shots_of_each(starting.desk, lines, FIVE)
    texts.append(shots(starting.desk, named("config"), (AT_80, PIPED)))
    hold("starting", status, *texts)
    see_others(starting, status)


@pytest.fixture(scope="module")
def degraded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A daemon whose provider is no longer executable: for five minutes, nobody tries it again."""
    directory = tmp_path_factory.mktemp("degraded")
    with place(directory, lock="wait_s = 0.2") as found:
        (directory / "provider").chmod(0o644)
        for number in (1, 2, 3):
            ask(found.route, number, RHYME * number)
        degrade(found.route)
        wait_until_known(found.route.daemon, "provider")
        yield found


def degrade(route: Route) -> None:
    """Have the provider fail until it is not called any more, if it is called."""
    while route.daemon.status()["provider"]["breaker"] != "open":
        ask(route, 98, RHYME)


def degrade_anew(route: Route) -> None:
    """Have the five minutes begin, and the failures counted, from now on."""
    route.daemon.reset_provider()
    degrade(route)


def test_degraded_daemon_says_what_is_wrong_first(degraded: Place) -> None:
    """The breaker is open: why, until when, and what helps; the rest works as ever."""
    desk = degraded.desk
    status = shots(desk, named("status"))
    reads = [["handoffs"], ["handoffs", "--summary"], ["requests"], ["advise"], ["reload"]]
    texts = shots_of_each(desk, [named(*words) for words in reads], FIVE)
    texts.append(shots(desk, named(*FOLLOWS), FIVE, interrupt_at=b"09:41:21"))
    texts.append(shots(desk, named("cancel", "req-01"), FIVE))
    hold("degraded", status, *texts)
    # As it is in a daemon that is well.
    hold("config", shots(desk, named("config")))
    see_others(degraded, status)


def test_degraded_daemon_is_worked_with(degraded: Place) -> None:
    """A try tells why the decoder prefilled, a bench that it has nothing to compare with."""
    desk = degraded.desk
    degrade_anew(degraded.route)
    words = named("try", "--policy", "always", "--max-tokens", "2", "hello")
    desk.look(words, PIPED)  # from then on its prompt is in the slot
    texts = [shots(desk, words, FIVE, at_once=False)]
    # The public address says this, and where its lines end at 100 columns hangs on the seconds.
    strict, wide = named("try", "--policy", "strict", "hello"), (AT_80, AT_160, PIPED, NO_COLOR)
    texts.append(shots(desk, strict, wide, tidy=pinned_text))
    bench = named("bench", "--lengths", "16", "--repeat", "1", "--max-tokens", "2")
    texts.append(shots(desk, bench, (AT_80, PIPED), at_once=False))
    reset = named("provider", "reset")
    texts.append(shots(desk, reset, FIVE, before=lambda: degrade(degraded.route)))
    hold("degraded-work", *texts)


def see_others(found: Place, status: str) -> None:
    """See that a member has the status that root has, and a stranger nothing, in any state."""
    if not IS_ROOT:
        return
    assert shots(found.as_member(), named("status")) == status
    with found.at_the_socket() as desk:
        stranger = dataclasses.replace(desk, become=become(STRANGER))
        denied = shots(stranger, named("status"), (AT_80,))
        assert "\nexit status 4\n" in denied
        assert "is for the group onebitd" in " ".join(denied.split())


def test_restarting_daemon_says_that_the_decoder_ended(tmp_path: Path) -> None:
    """While the decoder loads again, and once it is back."""
    with place(tmp_path) as restarting:
        route = restarting.route
        route.behave(decoder="--hold-on health")
        os.kill(route.daemon.status()["backend"]["pid"], signal.SIGKILL)
        wait_until(lambda: route.daemon.status()["backend"]["state"] == "loading", "it loads")
        lines = [named("try", "hello"), named("bench")]
        texts = shots_of_each(restarting.desk, lines, (AT_80, PIPED))
        hold("restarting", shots(restarting.desk, named("status"), FIVE), *texts)
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
        lines = [named("try", "hello"), named("bench"), named("reload")]
        texts = shots_of_each(draining.desk, lines, (AT_80, PIPED))
        hold("draining", shots(draining.desk, named("status"), FIVE), *texts)
        route.behave()
        client.join()


# -- who may not, and who may, with no relay in between


@AS_ROOT
def test_stranger_is_told_the_group_to_join(well: Place) -> None:
    """Exit status 4, whichever command is asked of the daemon's own socket."""
    with well.at_the_socket() as desk:
        stranger = dataclasses.replace(desk, become=become(STRANGER))
        status = shots(stranger, named("status"), ALL)
        texts = shots_of_each(stranger, [named(*words) for words in (*ASKS[1:], FOLLOWS)], FIVE)
        everyone = shots(stranger, ["status", "--all"], FIVE)
        hold("stranger", status, *texts, everyone)


@AS_ROOT
def test_stranger_who_gets_to_the_socket_is_refused_by_the_daemon(well: Place) -> None:
    """Its mode was opened to all: the daemon asks the kernel who it is, and names the group."""
    with well.at_the_socket() as desk, opened_to_all(well):
        stranger = dataclasses.replace(desk, become=become(STRANGER))
        texts = [shots(stranger, words, FIVE) for words in (named("status"), ["status", "--all"])]
        lines = [named(*words) for words in (*ASKS[1:], FOLLOWS)]
        hold("stranger-at-the-socket", *texts, *shots_of_each(stranger, lines, (AT_80, PIPED)))


@contextlib.contextmanager
def opened_to_all(found: Place) -> Iterator[None]:
    """Let every user connect to the daemon's control socket."""
    runtime = found.route.daemon.runtime
    modes = {path: path.stat().st_mode & 0o777 for path in (runtime, runtime / "control.sock")}
    for path in modes:
        path.chmod(0o777)
    try:
        yield
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


@AS_ROOT
def test_member_at_the_socket_gets_what_root_gets(well: Place) -> None:
    """Every command, of the daemon's own socket: the same, but for figures of the moment."""
    lines = [*ASKS[:-3], ASKS[-1], ["status", "--all"]]
    lines[4] = ["cancel", "req-99"]
    with well.at_the_socket() as desk:
        root = dataclasses.replace(desk, become=in_sight_of_nothing())
        member = dataclasses.replace(desk, become=become(MEMBER, MEMBERS))
        words = [line if "--all" in line else named(*line) for line in lines]
        roots, members = (
            shots_of_each(one, words, (PIPED,), tidy=without_figures) for one in (root, member)
        )
        assert members == roots
        works = [
            named("try", "--policy", "always", "--max-tokens", "2", "hello"),
            named("bench", "--lengths", "16", "--repeat", "1", "--max-tokens", "2"),
        ]
        for line in works:
            assert "\nexit status 0\n" in shots(member, line, (PIPED,))


def without_figures(text: str) -> str:
    """Return a text without what changes from one moment to the next."""
    text = re.sub(r"(\d[\d.]* (d|h|min|ms|s)\s*)+", "a while ", text)
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.]*", "0", text))


# -- doctor


@WITHOUT_SYSTEMD
@AS_ROOT
def test_doctor_is_groups_of_checks_and_their_fixes() -> None:
    """What is wrong stands in the second line; each fix is a command. No daemon runs."""
    with desk_of_nobody() as nobody:
        home = Path(nobody.environ["HOME"])
        file = home / "config" / "onebitd" / "qwen.toml"
        write_config(file, home)
        desk = desk_of_doctor(nobody)
        words = ["doctor", "-i", "qwen", "--config", str(file)]
        well = shots(desk, words, (AT_80,), tidy=of_any_machine)
        member = desk_of_doctor(nobody, MEMBER, MEMBERS)
        others = shots(member, named("doctor", "--quick"), (AT_80,), tidy=of_any_machine)
        (home / "tiny.gguf").unlink()
        file.write_text(file.read_text().replace("/prefill", "/gone"))
        ill = shots(desk, [*words, "--quick"], FIVE, tidy=of_any_machine)
        file.write_text("[http]\nport = 80000\n")
        bad = shots(desk, [*words, "--quick"], (AT_80,), tidy=of_any_machine)
        file.chmod(0o600)
        denied = desk_of_doctor(nobody, STRANGER)
        strange = shots(denied, named("doctor", "--quick"), (AT_80,), tidy=of_any_machine)
        hold("doctor", *map(desk.as_shown, (well, ill, bad, others, strange)))


@WITHOUT_SYSTEMD
@AS_ROOT
def test_doctor_of_a_daemon_that_runs_has_what_it_says(
    well: Place, degraded: Place, starting: Place
) -> None:
    """Ready, starting or degraded, to root and a member; a stranger is told the group to join."""
    texts = [
        doctor_beside(well, terminals=(AT_80, PIPED)),
        doctor_beside(well, MEMBER, MEMBERS),
        doctor_beside(well, STRANGER),
        doctor_beside(starting),
    ]
    degrade_anew(degraded.route)
    hold("doctor-beside", *texts, doctor_beside(degraded))
