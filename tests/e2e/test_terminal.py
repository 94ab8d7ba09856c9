"""What each command looks like, at 80, 100 and 160 columns, in a pipe, to root and to the group.

The texts are in `tests/e2e/terminal/`; `tests/e2e/terminal_screens.py` says how they are made and
written anew. Each is of a real daemon, on the stand-in decoder but for the last tests, that is
well; tests/e2e/test_terminal_states.py has the others, and who is refused.
"""

from __future__ import annotations

import argparse
import fcntl
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyte
import pytest

from onebitd.surfaces.cli import build_parser
from tests.e2e.rig import DAYS as RIG_DAYS
from tests.e2e.rig import RHYME as RIG_RHYME
from tests.e2e.rig import Prepared, running_rig
from tests.e2e.standin_route import Background, Route
from tests.e2e.terminal_pins import FIXED
from tests.e2e.terminal_place import (
    AS_ROOT,
    Place,
    ask,
    desk_of,
    desk_of_nobody,
    home_of_user,
    named,
    phases,
    place,
    shown_of,
    wait_until_known,
)
from tests.e2e.terminal_relay import pinned_document, relayed
from tests.e2e.terminal_screens import (
    ALL,
    AT_80,
    AT_100,
    AT_160,
    DIRECTORY,
    EVERY,
    FEW,
    FIVE,
    NO_COLOR,
    PIPED,
    Desk,
    Terminal,
    hold,
    seen_on,
    shots,
    shots_of_each,
    typed,
)
from tests.harness import raw_connection, wait_until
from tests.llama_builds import LlamaBuild, LlamaModel

RHYME = "Mary had a little lamb, its fleece was white as snow. "


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


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A daemon that has had each outcome."""
    with place(tmp_path_factory.mktemp("day"), lock="wait_s = 0.2") as found:
        have_a_day(found.route)
        yield found


WHO = ("root", pytest.param("member", marks=AS_ROOT))


def desk_for(who: str, found: Place) -> Desk:
    """Return the desk of root, or whoever runs the tests, or of a member of the group.

    Both are held against the same texts.
    """
    return found.as_member() if who == "member" else found.desk


@pytest.fixture(scope="module", params=WHO)
def reader(request: pytest.FixtureRequest, day: Place) -> Desk:
    """A desk to look at that day from."""
    return desk_for(request.param, day)


def test_handoffs_are_a_table_that_fits(reader: Desk) -> None:
    """One line each from 100 columns on, two at 80; every reason is whole."""
    hold("handoffs", shots(reader, named("handoffs"), EVERY))


def test_handoffs_filters_leave_what_is_wanted(reader: Desk) -> None:
    """By outcome, reason, route and time; none is a sentence."""
    lines: list[Sequence[str]] = [
        ("--outcome", "used"),
        ("--reason", "provider_exit"),
        ("--route", "file", "-n", "2"),
        ("--since", "2h", "--outcome", "failed"),
        ("--outcome", "wasted"),
    ]
    texts = shots_of_each(reader, [named("handoffs", *words) for words in lines], (AT_100,))
    wide = (AT_80, AT_160, PIPED, NO_COLOR)
    texts += shots_of_each(reader, [named("handoffs", *words) for words in lines[-2:]], wide)
    hold("handoffs-filters", *texts)


def test_handoffs_summary_is_tables_that_fit(reader: Desk) -> None:
    """Counts, reasons with their meaning, and the parts."""
    hold("handoffs-summary", shots(reader, named("handoffs", "--summary")))


def test_handoffs_csv_is_the_same_everywhere(reader: Desk) -> None:
    """Programs read it: the terminal's width counts for nothing."""
    hold("handoffs-csv", shots(reader, named("handoffs", "--csv", "-n", "3"), (PIPED,)))


def test_handoffs_followed_show_what_comes_until_interrupted(reader: Desk) -> None:
    """The last ones at once, and Ctrl-C is exit status 0."""
    words = named("handoffs", "-f", "-n", "2")
    hold("handoffs-follow", shots(reader, words, FIVE, interrupt_at=b"09:42:10"))


def test_status_of_a_ready_daemon_is_a_page_that_fits(reader: Desk) -> None:
    """What is wrong first, then the state, what happens and what it is made of."""
    hold("status", shots(reader, named("status"), EVERY))


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


def test_config_is_three_columns_that_fit(reader: Desk) -> None:
    """A value that does not fit has lines of its own on a terminal; a pipe a setting a line."""
    hold("config", shots(reader, named("config")))


def test_lock_says_who_holds_it(day: Place) -> None:
    """Free, and held."""
    lock = day.home / "some.lock"
    words = named("lock", "--path", str(lock))
    free = shots(day.desk, words)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        held = shots(day.desk, words, tidy=without_pids)
    hold("lock", day.desk.as_shown(free), day.desk.as_shown(held))


def test_advise_is_tables_that_fit(reader: Desk) -> None:
    """From what the daemon has learned."""
    hold("advise", shots(reader, named("advise")))


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
    hold("errors-daemon", *(shots(day.desk, words) for words in lines))


@AS_ROOT
def test_status_of_all_is_a_block_each(day: Place) -> None:
    """As a member of the group, who has no other daemons than these."""
    hold("status-all", shots(day.as_member(), ["status", "--all"]))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A daemon to work with; what its tests show does not tell what came before."""
    with place(tmp_path_factory.mktemp("work")) as found:
        yield found


@pytest.fixture(scope="module", params=WHO)
def worker(request: pytest.FixtureRequest, work: Place) -> Desk:
    """A desk to work from."""
    return desk_for(request.param, work)


def test_requests_are_a_table_and_can_be_cancelled(work: Place, worker: Desk) -> None:
    """Two in flight, then none; a client that is cancelled gets an error."""
    work.route.begin()
    nothing = shots(worker, named("requests"), FEW)
    work.route.behave(decoder="--hold-on completion")
    first = Background(ask, work.route, 1, RHYME, decoder="--hold-on completion")
    wait_until(lambda: work.route.daemon.status()["slot"]["phase"] == "decode", "it is held")
    held = {"decoder": "--hold-on completion", "provider": "hang"}
    second = Background(ask, work.route, 2, RHYME * 2, **held)
    wait_until(lambda: phases(work.route) == ["decode", "prefill"], "the next is prefilled")
    both = shots(worker, named("requests"))
    cancelled = shots(worker, named("cancel", "req-02"), (AT_80,))
    wait_until(lambda: phases(work.route) == ["decode"], "one is left")
    again = shots(worker, named("cancel", "req-02"), ALL)
    work.route.behave()
    for client in (first, second):
        client.join()
    hold("requests", nothing, both, cancelled, again)


def test_reload_and_reset_say_what_they_did(work: Place, worker: Desk) -> None:
    """Nothing; what is taken over and what is not; what is wrong."""
    work.route.begin()
    file = work.route.daemon.runtime.with_name("test.toml")
    before = file.read_text()
    texts = [shots(worker, named("reload"))]

    def change() -> None:
        file.write_text(before)
        work.route.daemon.control("/v1/reload", "POST")
        file.write_text(changed)

    changed = before.replace('level = "info"', 'level = "warning"').replace(
        "wait_s = 1", "wait_s = 2"
    )
    texts.append(shots(worker, named("reload"), before=change))
    file.write_text(before + '[http]\nport = 8001\nmax_pending = "many"\nmax_pendign = 3\n')
    texts.append(shots(worker, named("reload")))
    file.write_text(before)
    shots(worker, named("reload"), (PIPED,))
    reset = shots(worker, named("provider", "reset"))
    hold("reload", *texts, reset)


def test_try_is_the_reply_and_its_parts(work: Place) -> None:
    """The words of the model, a bar, and what became of the handoff."""
    work.route.begin()
    words = named("try", "--max-tokens", "12", "--policy", "always", "What do lambs eat?")
    used = shots(work.desk, words, at_once=False)
    work.route.behave(provider="exit:3")
    failed = shots(work.desk, words, (AT_80, PIPED), at_once=False)
    strict = named("try", "--policy", "strict", "hello")
    refused = shots(work.desk, strict, FIVE, before=work.route.daemon.reset_provider)
    work.route.begin()
    never = named("try", "--policy", "never", "--max-tokens", "2", "hello")
    hold("try", used, failed, refused, shots(work.desk, never, (AT_80,)))


def test_bench_is_a_verdict_and_a_table(work: Place) -> None:
    """When the provider loses and where it breaks even."""
    work.route.begin()
    words = named("bench", "--lengths", "16,512", "--repeat", "2", "--max-tokens", "2")
    hold("bench", shots(work.desk, words, FIVE, at_once=False))


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
            rig.daemon.status()["backend"]["build"]: "b10434",
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
    "path",
    ["/v1/status", "/v1/handoffs", "/v1/handoffs/summary", "/v1/costs", "/v1/config"],
)
def test_pins_replace_nothing_but_figures_of_the_run(day: Place, path: str) -> None:
    """Outcomes, reasons, counts and tokens in the texts are what the daemon said."""
    real = day.route.daemon.control(path)
    for name, was, now in differences(real, pinned_document(path, real)):
        if name in ("detail", "breaker_detail", "state_detail"):
            was, now = (re.sub(r"\d[\d.]* (ms|s|min)|pid \d+", "", text) for text in (was, now))
            assert was == now
        else:
            assert FIXED.fullmatch(name), f"{name}: {was} became {now}"


def differences(was: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the name and both values of all that differs in two documents of one shape."""
    if isinstance(was, dict) and isinstance(now, dict) and was.keys() == now.keys():
        for key, value in was.items():
            yield from differences(value, now[key], key)
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for index, value in enumerate(was):
            is_sample = isinstance(value, (int, float)) and len(was) > 1
            names = {2: "sample_ms", 3: "sample_moment"} if len(was) > 3 else {0: "value_ms"}
            yield from differences(value, now[index], names.get(index, "") if is_sample else name)
    elif was != now:
        yield name, was, now


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
    tests = Path(__file__).parent.glob("test_terminal*.py")
    source = "".join(path.read_text() for path in tests)
    for path in DIRECTORY.glob("*.txt"):
        name = re.sub(r"-\d+$", "-", path.stem)
        assert f'"{name}' in source, f"{path} is nobody's"
