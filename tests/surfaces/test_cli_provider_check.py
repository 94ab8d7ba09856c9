"""`onebitctl provider check` without a decoder: its refusals, its verdicts, its page."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from onebitd.conformance import command, judge, page, prompts, space
from onebitd.conformance.bench import Bench, CaseRun, ModelFacts
from onebitd.conformance.cases import CASES
from onebitd.conformance.decoder import Reply, Token
from onebitd.conformance.judge import Finding, Verdict
from onebitd.conformance.provider_run import Ended, Invocation, ProviderRun, file_problem
from onebitd.conformance.watch import DirectoryWatch
from onebitd.core import state_file
from onebitd.core.errors import UsageError
from onebitd.core.state_baseline import learn_baseline
from onebitd.core.state_compare import StateDiff, TensorDiff
from tests.core import state_faults as faults
from tests.core.state_files import Kv
from tests.llama_builds import ROOT
from tests.surfaces.test_cli_state import TOKENS, filled
from tests.tiny_models import TINY_MODELS, write

CLEAN = Ended(
    status=0,
    timed_out=False,
    wall_s=1.5,
    grace_s=None,
    signalled=False,
    was_there=True,
    in_place=False,
    left_running=(),
    escaped=(),
    leftovers=(),
    stdout=b'{"prefill_ms": 88.1}\n',
    stderr=b"no XDNA device\n",
)
TERMED = dataclasses.replace(CLEAN, status=-15, signalled=True, grace_s=0.1)
TENSOR = TensorDiff(
    section="attention",
    part="V",
    layer=7,
    what="layer 7 V",
    positions=40,
    max_abs=0.1,
    mean_abs=0.01,
    cosine=0.99,
    row_error=0.1,
    worst_pos=12,
    first_off=None,
    head_scale=1.0,
    head=None,
    cause=None,
    within=True,
    rms_error=0.05,
)


def run(*arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run `onebitctl provider check`."""
    return subprocess.run(
        [sys.executable, "-m", "onebitd.surfaces.cli", "provider", "check", *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **extra},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# --- the command line -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no-such-provider", "--model", "M"], "no-such-provider: not found or not executable"),
        (["/bin/true", "--model", "/does/not/exist"], "--model /does/not/exist: No such file"),
        (["/bin/true", "--model", "TEXT"], "not a GGUF file"),
        (["/bin/true", "--model", "M", "--only", "shrot"], "--only shrot: the cases are short,"),
        (["/bin/true", "--model", "M", "--llama-server", "none"], "give --llama-server PATH"),
        (["/bin/true", "--model", "M", "--llama-args=-np 4"], "-np"),
        (["/bin/true", "--model", "M", "--llama-args='"], "--llama-args: No closing quotation"),
        (["/bin/true", "--model", "M", "--ctx-size", "12"], "--ctx-size 12: give 128 or more"),
        (["/bin/true", "--model", "M", "--keep", "KEPT"], "is not empty; name a new directory"),
        (["/bin/true", "--model", "M", "--timeout", "0"], "--timeout"),
        (["/bin/true"], "--model"),
    ],
)
def test_provider_check_bad_command_line_is_one_sentence_and_status_2(
    tmp_path: Path, words: list[str], said: str
) -> None:
    """The option and what is wrong with it are named; nothing is started."""
    (tmp_path / "TEXT").write_text("a model, honestly")
    (tmp_path / "KEPT").mkdir()
    (tmp_path / "KEPT" / "old").touch()
    model = write(next(one for one in TINY_MODELS if one.name == "qwen3"), tmp_path).path
    known = {"M": str(model), "TEXT": str(tmp_path / "TEXT"), "KEPT": str(tmp_path / "KEPT")}
    words = [known.get(word, word) for word in words]
    if "--llama-server" not in words:
        words = [*words, "--llama-server", "/bin/true"]

    done = run(*words)

    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr.splitlines()[-1]


def test_provider_check_temporary_directory_of_no_use_is_named(tmp_path: Path) -> None:
    """Another one is not taken without a word."""
    model = write(next(one for one in TINY_MODELS if one.name == "qwen3"), tmp_path).path
    words = ("/bin/true", "--model", str(model), "--llama-server", "/bin/true")
    done = run(*words, TMPDIR=f"{tmp_path}/none")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"TMPDIR={tmp_path}/none: no such directory" in done.stderr


def test_space_that_is_short_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory, what is free, what is needed; just enough is enough."""
    free = space.MARGIN_BYTES + 4096
    found = types.SimpleNamespace(f_bavail=free // 4096, f_frsize=4096, f_blocks=free)
    monkeypatch.setattr(os, "statvfs", lambda _: found)
    space.require(tmp_path, 4096)
    with pytest.raises(UsageError, match=f"{tmp_path}: 16388 KiB are free .* TMPDIR"):
        space.require(tmp_path, 4097)


def test_provider_check_home_that_is_gone_is_named(tmp_path: Path) -> None:
    """Whatever error comes of it; any other error stays what it is."""
    gone = tmp_path / "slots"
    with (
        pytest.raises(command.HomeGone, match="own directory is gone"),
        command._home_is_there(gone),
    ):
        os.listdir(gone)
    with pytest.raises(FileNotFoundError), command._home_is_there(tmp_path):
        os.listdir(tmp_path / "other")


def test_stop_signals_leave_an_ignored_sighup_ignored() -> None:
    """As nohup(1) starts a program; SIGTERM still stops it."""
    code = (
        "import signal; from onebitd.prefill_llama import StopSignals;"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN); StopSignals();"
        "signal.raise_signal(signal.SIGHUP); print('goes on', flush=True);"
        "signal.raise_signal(signal.SIGTERM); print('not here')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "goes on\n"
    assert "Stopped: 15" in done.stderr


def test_provider_check_help_needs_no_numpy() -> None:
    """`onebitctl` starts without what the kit is made of."""
    code = (
        "import sys; from onebitd.surfaces import cli; cli.build_parser();"
        "print([name for name in sys.modules if 'numpy' in name or 'conformance' in name])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def bench(home: Path, **facts: Any) -> Bench:
    """Return a bench without a decoder, which keeps everything below `home`."""
    (home / "slots").mkdir()
    nobody = dict.fromkeys(field.name for field in dataclasses.fields(Bench))
    decoder = types.SimpleNamespace(slots=home / "slots")
    return Bench(**{**nobody, "decoder": decoder, "keep": home / "kept", **facts})


def test_bench_state_problem_is_what_the_daemon_would_say_of_the_values_too(
    tmp_path: Path,
) -> None:
    """A row that was not written is refused as in service."""
    shape = Kv(3, width=64)
    own, path = filled(shape, tokens=[1, 2, 3]), tmp_path / "a.state"
    state = state_file.parse(own)
    facts = {"layout": state.layout, "baseline": learn_baseline(own, state)}
    kit = bench(tmp_path, **facts, model=ModelFacts(None, None, None))
    path.write_bytes(filled(shape))
    assert kit.state_problem(path, TOKENS) is None
    path.write_bytes(faults.plant(filled(shape), "layer 1 V", faults.zeroed(5, 5)))
    assert "layer 1 V, cell 5: every value is zero" in str(kit.state_problem(path, TOKENS))


def test_case_run_keeps_what_can_be_kept(tmp_path: Path) -> None:
    """A provider that left a FIFO is judged on, and the rest of its files is there."""
    invocation = Invocation("/bin/true", "m.gguf", None, {}, str(tmp_path), 5.0)
    with CaseRun(bench(tmp_path, invocation=invocation), "short", b"1\n") as run:
        os.mkfifo(run.out)
    assert [path.name for path in (tmp_path / "kept" / "short").iterdir()] == ["tokens.txt"]


# --- verdicts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"status": 3, "stderr": b""}, "ended with status 3, and stderr is empty"),
        ({"status": 3}, "ended with status 3: no XDNA device"),
        ({"status": -signal.SIGSEGV}, "ended with SIGSEGV: no XDNA device"),
        ({"timed_out": True}, "no end within 5 s (--timeout): no XDNA device"),
    ],
)
def test_judge_exit_names_status_or_signal_and_the_last_words(
    change: dict[str, Any], said: str
) -> None:
    """What the author sees of a run that failed, also when it said nothing."""
    assert judge.judge_exit("short", CLEAN, 5).verdict is Verdict.OK
    finding = judge.judge_exit("short", dataclasses.replace(CLEAN, **change), 5)
    assert (finding.verdict, finding.text) == (Verdict.FAIL, said)


@pytest.mark.parametrize(
    ("stdout", "verdict", "said"),
    [
        (b'{"prefill_ms": 88.1}\n', Verdict.OK, "prefill 88.1 ms, 454 tokens/s"),
        (b'{"prefill_ms": 88100}\n', Verdict.FAIL, "is it in milliseconds?"),
        (b"done\n", Verdict.NOTE, 'no {"prefill_ms": MS} on the last line of stdout'),
    ],
)
def test_judge_speed_time_longer_than_the_run_fails(
    stdout: bytes, verdict: Verdict, said: str
) -> None:
    """A time in another unit is told; none at all is a note."""
    ended = dataclasses.replace(CLEAN, stdout=stdout)
    finding = judge.judge_speed("short", ended, 40, 20.0)
    assert finding.verdict is verdict
    assert said in finding.text


def test_judge_stop_clean_end_is_ok() -> None:
    """Nothing left, within the grace: fine."""
    (found,) = judge.judge_stop("sigterm", signal.SIGTERM, TERMED, whole=False, out=False)
    assert found.verdict is Verdict.OK


@pytest.mark.parametrize(
    ("change", "out", "whole", "verdict", "said"),
    [
        ({"timed_out": True}, False, False, Verdict.FAIL, "still ran 2 s after SIGTERM"),
        ({"grace_s": 1.2}, False, False, Verdict.NOTE, "kills it after 0.4 s"),
        ({"left_running": ("pid 7 (sh)",)}, False, False, Verdict.FAIL, "pid 7 (sh) running"),
        ({"leftovers": (".tmp",)}, False, False, Verdict.FAIL, "SIGTERM left .tmp"),
        ({"status": 0}, False, False, Verdict.FAIL, "status 0 after SIGTERM without a whole file"),
        ({}, True, False, Verdict.FAIL, "a file at --out that is not whole"),
        ({}, True, True, Verdict.NOTE, "a whole file at --out and SIGTERM"),
        ({"signalled": False}, False, False, Verdict.NOTE, "ended before SIGTERM could be sent"),
        ({"escaped": ("pid 7 (npud)",)}, False, False, Verdict.NOTE, "session of its own"),
    ],
)
def test_judge_stop_what_is_left_decides(
    change: dict[str, object], out: bool, whole: bool, verdict: Verdict, said: str
) -> None:
    """A half file, a process or a temporary name is a failure; slowness is a note."""
    ended = dataclasses.replace(TERMED, **change)  # type: ignore[arg-type]
    (found,) = judge.judge_stop("sigterm", signal.SIGTERM, ended, whole=whole, out=out)
    assert found.verdict is verdict
    assert said in found.text


def test_judge_stop_after_sigkill_temporary_names_are_a_note() -> None:
    """Nobody can remove them then; onebitd does."""
    ended = dataclasses.replace(TERMED, status=-9, leftovers=(".tmp",))
    (found,) = judge.judge_stop("sigkill", signal.SIGKILL, ended, whole=False, out=False)
    assert (found.verdict, "SIGKILL left .tmp" in found.text) == (Verdict.NOTE, True)


@pytest.mark.parametrize(
    ("change", "out", "said"),
    [
        ({"status": 0}, False, "ended with status 0"),
        ({"status": 3, "stderr": b"\n"}, False, "an empty stderr; say why on its last line"),
        ({"status": 3}, True, "there is a file at --out all the same"),
        ({"status": -9, "timed_out": True}, False, "no end within 9 s"),
        ({"status": 3, "leftovers": ("a.tmp",)}, False, "left a.tmp"),
        ({"status": 3}, False, None),
    ],
)
def test_judge_refusal_wants_a_status_a_reason_and_no_file(
    change: dict[str, object], out: bool, said: str | None
) -> None:
    """The three things that onebitd goes by."""
    ended = dataclasses.replace(CLEAN, **change)  # type: ignore[arg-type]
    found = judge.judge_refusal("bad-ids", "an ids file", ended, 9, out=out)
    assert found.verdict is (Verdict.OK if said is None else Verdict.FAIL)
    assert (said or "status 3, no XDNA device") in found.text


def reply(*tokens: tuple[int, dict[int, float]]) -> Reply:
    """Return a reply of tokens with their log-probabilities."""
    return Reply(tuple(Token(one, f"t{one}", known) for one, known in tokens), 9, 1)


FIRST = (1, {1: -0.1, 2: -3.0})


@pytest.mark.parametrize(
    ("second", "drift", "verdict"),
    [
        ((5, {5: -0.5, 6: -0.55}), 0.0, Verdict.NOTE),
        ((5, {5: -0.5, 6: -1.5}), 0.0, Verdict.FAIL),
        ((5, {5: -0.5, 6: -1.0}), 0.3, Verdict.NOTE),
        ((5, {5: -0.5, 6: -4.0}), 5.0, Verdict.FAIL),  # such a drift explains nothing
        ((5, {5: -0.5, 7: -1.0}), 0.3, Verdict.FAIL),
    ],
)
def test_judge_reply_that_differs_is_a_note_only_where_the_decoder_wavered(
    second: tuple[int, dict[int, float]], drift: float, verdict: Verdict
) -> None:
    """Its own margin between the two tokens decides, against the drift that was measured."""
    ours = reply(FIRST, second)
    theirs = reply((1, {1: -0.1 - drift, 2: -3.0}), (6, {6: -0.4}))
    found = judge.judge_reply("short", ours, theirs, 0.5)
    assert (found.verdict, found.figures["first_different"]) == (verdict, 1)


def test_judge_reply_that_ends_early_fails() -> None:
    """A prefix of the decoder's reply is another reply."""
    found = judge.judge_reply("short", reply(FIRST, FIRST), reply(FIRST), 0.5)
    assert found.verdict is Verdict.FAIL
    assert "has 1 tokens, the decoder's own 2" in found.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"row_error": 0.9, "cause": "RoPE is not applied"},
            "0.9 at position 12, tolerance 0.5; R",
        ),
        ({"rms_error": 0.3}, "the root mean square of its row errors is 0.3, 0.17 allowed"),
        ({"head_scale": 1.01, "head": 1}, "head 1 is 1.0100 times the decoder's"),
    ],
)
def test_judge_values_names_what_is_off(change: dict[str, object], said: str) -> None:
    """Row, sum of rows, or head: the sentence is about the one that is beyond its limit."""
    off = dataclasses.replace(TENSOR, within=False, **change)  # type: ignore[arg-type]
    found = judge.judge_values("short", StateDiff((TENSOR, off), (), 9, within=False), 0.5)
    assert found.verdict is Verdict.FAIL
    assert found.text.startswith("layer 7 V: ")
    assert said in found.text
    assert (found.figures["tensors"], found.figures["tensors_off"]) == (2, 1)


def test_judge_values_nothing_compared_fails() -> None:
    """No news is no good news."""
    found = judge.judge_values("short", StateDiff((), ("other tokens",), 0, within=False), 0.5)
    assert (found.verdict, "other tokens" in found.text) == (Verdict.FAIL, True)


def test_judge_restore_prompt_that_is_evaluated_again_fails() -> None:
    """A handoff that the decoder does not use is none."""
    unused = Reply((), 0, 10)
    found = judge.judge_restore("short", 9, 100, (9, 100), unused)
    assert found.verdict is Verdict.FAIL
    assert "used 0 of 9 tokens and evaluated 10" in found.text


# --- what is seen ---------------------------------------------------------------------------


def test_directory_watch_tells_a_rename_from_writing_in_place(tmp_path: Path) -> None:
    """Whatever the time between two writes."""
    watch = DirectoryWatch(tmp_path)
    try:
        (tmp_path / "renamed.tmp").write_bytes(b"whole")
        (tmp_path / "renamed.tmp").rename(tmp_path / "renamed")
        (tmp_path / "linked.tmp").write_bytes(b"whole")
        os.link(tmp_path / "linked.tmp", tmp_path / "linked")
        (tmp_path / "written").write_bytes(b"whole")
        assert watch.works
        assert not watch.written_in_place("renamed")
        assert not watch.written_in_place("linked")
        assert watch.written_in_place("written")
    finally:
        watch.close()


def test_provider_run_is_called_as_the_daemon_calls_it(tmp_path: Path) -> None:
    """Absolute paths in a directory of its own, `--elfs` only where it is given."""
    for number, elfs in enumerate((None, "/opt/elfs")):
        invocation = Invocation("/opt/prefill", "/m.gguf", elfs, {}, "mark", 9)
        home = tmp_path / str(number)
        run = ProviderRun(invocation, home, b"1\n2\n")
        words = ["/opt/prefill", "--tokens", f"{home}/tokens.txt", "--out", f"{home}/state.bin"]
        words += ["--model", "/m.gguf", *(["--elfs", elfs] if elfs else [])]
        assert run.command == words
        assert run.tokens.read_bytes() == b"1\n2\n"


def ended_run(home: Path, script: str) -> Ended:
    """Run a provider made of lines of shell to its end."""
    program = home / "provider"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    invocation = Invocation(str(program), "m.gguf", None, {**os.environ}, str(home / "mark"), 60.0)
    provider = ProviderRun(invocation, home / "run", b"1\n")
    signals: Any = types.SimpleNamespace(held=contextlib.nullcontext)
    try:
        provider.start(signals)
        return provider.finish()
    finally:
        provider.close()


def test_provider_run_that_floods_is_kept_to_its_last_words(tmp_path: Path) -> None:
    """No file grows, and the last line is still there."""
    flood = "yes | head -c 3000000"
    ended = ended_run(tmp_path, f"{flood}; echo end; {flood} >&2; echo why >&2")
    assert (len(ended.stdout), ended.stdout[-6:]) == (64 * 1024, b"y\nend\n")
    assert (len(ended.stderr), ended.last_words) == (64 * 1024, "why")
    assert {path.name for path in tmp_path.rglob("*")} == {"provider", "run", "tokens.txt"}


def test_provider_run_that_removes_its_directory_is_a_failure(tmp_path: Path) -> None:
    """In every case: after a success, a refusal and a signal."""
    ended = ended_run(tmp_path, 'rm -r "${4%/*}"')
    assert str(ended.directory_problem).startswith("it removed its run directory")
    stopped = dataclasses.replace(TERMED, directory_problem=ended.directory_problem)
    for found in (
        *judge.judge_processes("short", ended),
        *judge.judge_stop("sigterm", signal.SIGTERM, stopped, whole=False, out=False),
    ):
        assert (found.verdict, found.text) == (Verdict.FAIL, ended.directory_problem)


def test_file_problem_names_what_onebitd_would_not_take(tmp_path: Path) -> None:
    """A link, a second name, a FIFO, a file that somebody still writes."""
    good = tmp_path / "good"
    good.write_bytes(b"state")
    assert file_problem(good) is None
    (tmp_path / "link").symlink_to(good)
    assert file_problem(tmp_path / "link") == "is a symbolic link"
    os.mkfifo(tmp_path / "fifo")
    assert file_problem(tmp_path / "fifo") == "is not a regular file"
    with good.open("ab"):
        assert file_problem(good) == "is still open for writing in some process"
    os.link(good, tmp_path / "second")
    assert "has 2 names" in str(file_problem(good))


# --- prompts and page -----------------------------------------------------------------------


def test_long_ids_are_as_many_as_asked_for() -> None:
    """However many letters a token has."""
    for letters in (1, 3, 40):
        found = prompts.long_ids(lambda text: list(range(len(text) // letters)), 700)  # noqa: B023
        assert found == list(range(700))


def test_page_row_is_wrapped_below_its_sentence_and_never_cut() -> None:
    """All words are there, in a column of their own, whatever the width."""
    finding = Finding("no-directory", "refusal", Verdict.FAIL, "word " * 40)
    lines = page.row(finding, 80, colour=False).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("no-directory  refusal    FAIL  word")
    assert {line[:31].strip() for line in lines[1:]} == {""}
    assert " ".join(lines).count("word") == 40
    assert page.row(finding, None, colour=False).count("\n") == 0


def test_page_as_json_has_no_number_that_json_has_not() -> None:
    """Infinity and NaN are null."""
    finding = Finding("short", "values", Verdict.FAIL, "off", {"row_error": math.inf, "layer": 3})
    found = page.as_json({"program": "p"}, [finding])
    assert found["checks"][0] == {
        "case": "short",
        "check": "values",
        "verdict": "fail",
        "text": "off",
        "row_error": None,
        "layer": 3,
    }
    assert (found["conforming"], found["failed"], found["notes"]) == (False, 1, 0)


def test_page_verdict_line_counts_and_names_the_cases() -> None:
    """The last line is enough for whoever reads only that."""
    fine = Finding("short", "exit", Verdict.OK, "")
    note = Finding("sigkill", "stop", Verdict.NOTE, "")
    bad = Finding("long", "values", Verdict.FAIL, "")
    assert page.verdict_line("p", [fine, note]) == "p conforms: 1 check is ok, 1 note"
    assert page.verdict_line("p", [fine, bad, note]) == (
        "p does NOT conform: 1 failed, 1 ok, 1 note; see long"
    )


def test_man_page_names_every_case() -> None:
    """A name that scripts give to --only is a promise."""
    text = (ROOT / "man" / "onebitctl.1").read_text()
    assert [case for case in CASES if f".It Li {case} Ta" not in text] == []
