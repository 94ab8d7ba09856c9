"""README's two commands and what a newcomer types while the demo serves, as they stand there.

What it says of installing is tried in a booted Debian: tests/systemd/test_readme.py.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

import pytest

from onebitd.core.handoff import Outcome, Reason
from tests import readme
from tests.harness import wait_until
from tests.llama_builds import BUILDS, CPU_ONLY, MODELS, ROOT, require_program
from tests.tiny_models import TINY_MODELS, write

PATIENCE_S = 120.0
ADDRESS = "127.0.0.1:8000"
"""Where README has the demo; it takes another port when that one is taken."""
CTL = ".venv/bin/onebitctl -i demo"
"""What README says to type for onebitctl, in the demo."""


@functools.cache
def runtime() -> str:
    """Return a directory for the demo's sockets: in root's own, other tests would find it."""
    path = tempfile.mkdtemp(prefix="onebitd-", dir="/tmp")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def environment() -> dict[str, str]:
    """Return a newcomer's: nothing of a make that runs this test, a shell's own PATH."""
    left_out = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTEST_ARGS", "ONCE", "PORT")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    runs = {"XDG_RUNTIME_DIR": runtime(), "RUNTIME_DIRECTORY": f"{runtime()}/onebitd/demo"}
    return {**kept, **runs}


def shell(
    command: str, cwd: Path = ROOT, path: Sequence[Path] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a line as it is typed in the checkout, or elsewhere, `path` before the own PATH."""
    environ = environment()
    return subprocess.run(
        ["sh", "-c", command],
        cwd=cwd,
        env={**environ, "PATH": ":".join((*map(str, path), environ["PATH"]))},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@dataclass
class Demo:
    """`make demo` while it serves, at `address`; `output` is what it has printed so far."""

    process: subprocess.Popen[str]
    lines: Queue[str]
    output: list[str]
    address: str = ""

    def read_until(self, words: str) -> str:
        """Return the first line with these words; AssertionError when it ends before."""
        while True:
            try:
                self.output.append(self.lines.get(timeout=PATIENCE_S))
            except Empty:
                pytest.fail(f"no {words!r} in:\n{''.join(self.output)}")
            assert self.output[-1], f"the demo ended:\n{''.join(self.output)}"
            if words in self.output[-1]:
                return self.output[-1]


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    """The demo as it is started, and ended by Ctrl-C."""
    require_program("curl")
    BUILDS[0].require()
    MODELS[0].require()
    command, once = readme.block("make demo").commands
    assert once == f"{command} ONCE=1"
    with subprocess.Popen(
        ["sh", "-c", f"exec {command}"],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        lines: Queue[str] = Queue()
        assert process.stdout is not None
        Thread(target=read_all, args=(iter(process.stdout), lines), daemon=True).start()
        running = Demo(process, lines, [])
        try:
            running.address = running.read_until("serving on http://").split("/")[2]
            yield running
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
                process.wait(PATIENCE_S)


def read_all(source: Iterator[str], lines: Queue[str]) -> None:
    """Pass each line on, and an empty one at the end."""
    for line in source:
        lines.put(line)
    lines.put("")


def test_readme_every_block_is_typed_by_a_test() -> None:
    """A block that is new or begins otherwise is in the hands of no test, and fails this one."""
    asked = readme.asked_for()
    assert {one.name for one in readme.blocks() if not one.name.startswith(asked)} == set()
    assert {name for name in asked if readme.block(name).name.startswith(name)} == set(asked)


def test_readme_demo_of_a_clean_checkout_begins_as_make_test_does(tmp_path: Path) -> None:
    """A checkout without `.venv`: the same environment, made by the same rule, and no step more.

    Where this suite is run on a clean checkout, as .ci/run does, that rule has just been tried.
    """
    require_program("make")
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (command, _) = readme.block("make demo").commands
    steps = [
        shell(line, cwd=tmp_path).stdout.splitlines()
        for line in (f"{command} -n", "make -n test PYTEST_ARGS=tests")
    ]
    demos, tests_ = steps
    assert "-m venv .venv" in demos[1]
    assert demos[:-2] == tests_[: len(demos) - 2]
    fetch, run = demos[-2:]
    assert fetch.endswith("-m tests.tools.fetch_llama demo")
    assert run.endswith("tests/tools/demo.py")


@pytest.mark.real
def test_readme_demo_says_what_the_handoff_did(demo: Demo) -> None:
    """The reply, the handoff, and one token for the decoder."""
    said = "".join(demo.output)
    assert re.search(r"^reply .*Paris", said, re.MULTILINE), said
    assert re.search(r"^handoff used, way file$", said, re.MULTILINE), said
    assert re.search(r"^decoder evaluated_tokens 1 of \d+ prompt tokens", said, re.MULTILINE), said


@pytest.mark.real
def test_readme_second_terminal_shows_reply_handoff_and_status(demo: Demo) -> None:
    """One chat and what became of it, its row, and the page to look at first."""
    chat, handoffs, status = map(shell, readme.block(".venv/bin/onebitctl").commands)
    assert (chat.returncode, "Paris" in chat.stdout) == (0, True), chat
    assert "handed over by state file" in " ".join(chat.stderr.split())
    assert (handoffs.returncode, handoffs.stderr) == (0, ""), handoffs
    assert re.search(r"^\S+ +used +\d+ +1 ", handoffs.stdout, re.MULTILINE), handoffs
    assert (status.returncode, status.stderr) == (0, ""), status
    assert status.stdout.startswith("demo: ready")


@pytest.mark.real
def test_readme_page_is_where_it_says(demo: Demo) -> None:
    """A browser finds it at that address."""
    (address,) = set(re.findall(r"`http://(\S+)(?=/onebit/`)", (ROOT / "README.md").read_text()))
    assert address == ADDRESS
    with urllib.request.urlopen(f"http://{demo.address}/onebit/", timeout=PATIENCE_S) as reply:
        assert reply.headers.get_content_type() == "text/html"


def test_readme_man_pages_are_those_of_the_checkout() -> None:
    """Each page of its table is there, and the one that it shows how to read."""
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"`(onebit[\w.-]*)\((\d)\)`", text))
    assert {path.name for path in (ROOT / "man").iterdir()} == {".".join(page) for page in named}
    (shown,) = re.findall(r"`man -l (\S+)`", text)
    assert (ROOT / shown).is_file()


@pytest.mark.real
def test_readme_curl_shows_the_headers_that_it_says(demo: Demo) -> None:
    """The example as it stands, and each line of the answer; dots stand for anything."""
    example = readme.block("curl -i")
    (command,) = example.commands
    done = shell(command.replace(ADDRESS, demo.address))
    assert done.returncode == 0, done.stderr
    expected = "\n".join(example.printed)
    for line in re.sub(r",\n\s+", ", ", expected).splitlines():
        pattern = re.escape(line).replace(re.escape("..."), ".*")
        assert re.search(rf"^{pattern}\s*$", done.stdout, re.MULTILINE | re.IGNORECASE), line
    assert "Paris" in done.stdout


@pytest.mark.real
def test_readme_python_client_is_answered(demo: Demo, tmp_path: Path) -> None:
    """The example as it stands, in the Python that it names."""
    script = tmp_path / "example.py"
    script.write_text(readme.block("from openai").text.replace(ADDRESS, demo.address))
    done = shell(f".venv/bin/python {script}")
    assert (done.returncode, "Paris" in done.stdout) == (0, True), done


@pytest.mark.real
def test_readme_commands_that_look_are_fine(demo: Demo) -> None:
    """Each line of that block; the one that follows is left with Ctrl-C."""
    for command in readme.block("onebitctl status").commands:
        words = command.replace("onebitctl", CTL, 1)
        if command.endswith("-f"):
            with subprocess.Popen(
                words.split(), cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
            ) as process:
                assert process.stdout is not None
                assert any("OUTCOME" in line for line in process.stdout)
                process.send_signal(signal.SIGINT)
                assert process.wait(PATIENCE_S) == 0
            continue
        done = shell(words)
        assert (done.returncode, done.stderr) == (0, ""), (command, done)


@pytest.mark.real
def test_readme_bench_and_advise_say_what_a_handoff_is_worth(demo: Demo) -> None:
    """The lines as they stand, with one short length; what they find depends on the machine."""
    bench, advise = readme.block("onebitctl bench").commands
    done = shell(f"{bench.replace('onebitctl', CTL, 1)} --lengths 32 --repeat 1 --max-tokens 1")
    assert (done.returncode, "RATIO" in done.stdout) == (0, True), done
    done = shell(advise.replace("onebitctl", CTL, 1))
    assert (done.returncode, "Time to first byte" in done.stdout) == (0, True), done


@pytest.mark.real
def test_readme_record_of_a_handoff_is_drawn_as_it_says(demo: Demo) -> None:
    """Legend and columns; a pipe has one column more, for the reason that a terminal has below."""
    example = readme.block("onebitctl handoffs -n 1")
    (command,) = example.commands
    done = shell(command.replace("onebitctl", CTL, 1))
    assert (done.returncode, done.stderr) == (0, ""), done
    legend, header, row, reason = example.printed
    shown = done.stdout.splitlines()
    assert (shown[0], shown[1].split()) == (legend, [*header.split(), "REASON"])
    assert row.split()[1] == Outcome.SKIPPED
    assert reason.split(":")[0].strip() == Reason.POLICY


@pytest.mark.real
def test_readme_instruments_find_a_provider_right(tmp_path: Path) -> None:
    """The four lines as they stand, where the files that they name are; with a tiny model."""
    BUILDS[0].require()
    tiny = write(next(one for one in TINY_MODELS if one.name == "qwen3"), tmp_path)
    tiny.path.rename(tmp_path / "model.gguf")
    programs = tmp_path / "bin"
    programs.mkdir()
    cpu = shlex.join(CPU_ONLY)
    for path, first, line in (
        (programs / "llama-server", "", f'exec {BUILDS[0].program} "$@" {cpu} -t 1'),
        (
            tmp_path / "my-provider",
            f"export ONEBIT_PREFILL_LLAMA_SERVER={programs}/llama-server\n",
            f'exec {ROOT}/.venv/bin/onebit-prefill-llama "$@"',
        ),
    ):
        path.write_text(f"#!/bin/sh\n{first}{line}\n")
        path.chmod(0o755)

    said = []
    for command in readme.block("onebitctl provider check").commands:
        done = shell(command, tmp_path, (programs, ROOT / ".venv" / "bin"))
        assert (done.returncode, done.stderr) == (0, ""), (command, done)
        said.append(done.stdout)
    judged, shown, compared, checked = said
    assert "./my-provider conforms: " in judged.splitlines()[-1]
    assert "layer 0 K" in shown
    assert compared == ""  # no difference, no line
    assert checked == "out/short/state.bin: fine, held against the decoder's layout\n"


@pytest.mark.real
def test_readme_demo_ends_with_ctrl_c_and_leaves_nothing(demo: Demo) -> None:
    """make ends by the signal itself; there is no daemon any more. The last of this module."""
    os.killpg(demo.process.pid, signal.SIGINT)
    assert demo.process.wait(PATIENCE_S) in (0, -signal.SIGINT)
    assert demo.read_until("stopping")
    wait_until(lambda: shell(f"{CTL} status").returncode == 3, "the daemon is gone", 10)
