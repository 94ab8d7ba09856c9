"""What `onebitctl bench` and `try` refuse, and what is shown while they run."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from onebitd.client import BadAnswer
from onebitd.core.errors import UsageError
from onebitd.state_tools import plot
from onebitd.surfaces import cli, cli_bench
from onebitd.surfaces.bench_pages import Bench
from tests.surfaces.test_try_pages import Terminal

STATUS: dict[str, Any] = {
    "state": "ready",
    "model": {"alias": "qwen3-4b", "ctx_size": 8192},
    "provider": {"program": "/usr/lib/onebit/npu-prefill", "shared": "off"},
}


def planned(status: dict[str, Any], *words: str) -> Bench:
    """Return what would be measured on a daemon of this status."""
    return cli_bench.plan(cli.build_parser("bench").parse_args(["bench", *words]), status)


def test_plan_defaults_are_all_that_the_daemon_takes() -> None:
    """The decoder and its routes; a degraded daemon is measured, too."""
    bench = planned(STATUS)
    assert (bench.lengths, bench.ways) == ((128, 512, 2048), ("decoder", "file"))
    assert (bench.repeat, bench.max_tokens) == (5, 16)
    shares = {**STATUS, "state": "degraded", "provider": {**STATUS["provider"], "shared": "on"}}
    assert planned(shares).ways == ("decoder", "file", "shared")
    assert planned(STATUS).seed != bench.seed


@pytest.mark.parametrize(
    ("ctx_size", "words", "lengths"),
    [
        (2064, (), (128, 512, 2048)),
        (2063, (), (128, 512)),
        (2063, ("--lengths", "2047, 8,8"), (8, 2047)),
        (64, ("--lengths", "2", "--max-tokens", "62"), (2,)),
    ],
)
def test_plan_lengths_fit_the_context_with_their_reply(
    ctx_size: int, words: tuple[str, ...], lengths: tuple[int, ...]
) -> None:
    """Defaults that do not fit are left out; those given are sorted, each once."""
    status = {**STATUS, "model": {"alias": "m", "ctx_size": ctx_size}}
    assert planned(status, *words).lengths == lengths


@pytest.mark.parametrize(
    ("ctx_size", "words", "wanted"),
    [
        (2063, ("--lengths", "8,2048"), "--lengths 2048: a prompt has from 2 to 2047 tokens"),
        (2063, ("--lengths", "1"), "--lengths 1: "),
        (100, (), "--lengths 128: a prompt has from 2 to 84 tokens with a context of 100"),
        (8192, ("--routes", "shared"), "--routes shared: it is off here; set handoff.share = true"),
    ],
)
def test_plan_that_cannot_be_kept_is_refused(
    ctx_size: int, words: tuple[str, ...], wanted: str
) -> None:
    """With the length or the route at fault, and what to do."""
    status = {**STATUS, "model": {"alias": "m", "ctx_size": ctx_size}}
    with pytest.raises(UsageError, match=re.escape(wanted)):
        planned(status, *words)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"state": "loading"}, "the daemon is loading"),
        ({"state": "ready", "model": None}, "how long its context is"),
        ({"provider": {"program": None}}, "no prefill provider"),
        ({"provider": None}, "no prefill provider"),
    ],
)
def test_plan_daemon_that_cannot_be_measured_says_why(change: dict[str, Any], wanted: str) -> None:
    """Not ready, or nothing to compare the decoder with: exit status 1."""
    with pytest.raises(BadAnswer, match=wanted) as raised:
        planned({**STATUS, **change})
    assert raised.value.exit_status == 1


@pytest.mark.parametrize(
    ("wanted", "shared", "routes"),
    [
        (None, "off", ("file",)),
        (None, "not supported by this decoder", ("file",)),
        (None, "on", ("file", "shared")),
        (None, "paused, tried again in 30 s", ("file", "shared")),
        (("shared",), "on", ("shared",)),
    ],
)
def test_plan_routes_are_those_that_the_daemon_takes(
    wanted: tuple[str, ...] | None, shared: str, routes: tuple[str, ...]
) -> None:
    """By the status's own word about the shared one."""
    assert cli_bench._possible(wanted, shared) == routes


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_one_line_of_a_terminal_and_goes_away(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    """A file or a pipe gets none of it."""
    err = Terminal(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stderr", err)
    progress = cli_bench._Progress(12)
    progress.tell("128 tokens, decoder")
    progress.tell("128 tokens, file")
    progress.end()
    if not is_terminal:
        assert err.written == ""
        return
    first, second, last = err.written.split("\r\x1b[K")[1:]
    assert first == "run 1 of 12: 128 tokens, decoder"
    assert re.fullmatch(r"run 2 of 12: 128 tokens, file, about .* left", second)
    assert last == ""


@pytest.mark.parametrize("command", [["try", "hello"], ["bench"]])
def test_command_without_a_daemon_is_status_3(
    command: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """And says how to start one, as the other commands do."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    assert cli.main(["-i", "no-such-instance", *command]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert "no onebitd runs for the instance no-such-instance" in err


def test_try_on_a_terminal_without_a_prompt_asks_for_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for one to be typed."""
    monkeypatch.setattr(sys, "stdin", Terminal(is_terminal=True))
    assert cli.main(["try"]) == 2
    assert "there is no prompt: write one behind `onebitctl try`" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["-"], []])
def test_try_prompt_that_is_piped_is_read_whole(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """With its lines."""
    from onebitd.surfaces import cli_try

    piped = io.TextIOWrapper(io.BytesIO("Grüße\nund mehr\n".encode()), "utf-8")
    monkeypatch.setattr(sys, "stdin", piped)
    assert cli_try._prompt(words) == "Grüße\nund mehr\n"


@pytest.mark.parametrize(
    ("stdin", "wanted"),
    [(b"", "no prompt"), (b" \n", "no prompt"), (b"\xff", "not UTF-8")],
)
def test_try_without_a_prompt_is_a_usage_error(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    stdin: bytes,
    wanted: str,
) -> None:
    """Nothing, blanks, or no text; no daemon is asked."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8"))
    assert cli.main(["-i", "no-such-instance", "try"]) == 2
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["try", "-"], "no prompt"),
        (["try"], "no prompt"),
        (["try", "on\udcff"], "the prompt on the command line is not UTF-8"),
    ],
)
def test_try_words_that_are_no_prompt_are_a_usage_error(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    wanted: str,
) -> None:
    """Also where the shell has closed standard input (`<&-`): Python then has none."""
    monkeypatch.setattr(sys, "stdin", None)
    assert cli.main(["-i", "no-such-instance", *words]) == 2
    assert wanted in capsys.readouterr().err


def test_bench_picture_that_cannot_be_written_is_told_before_it_measures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not after half an hour; a picture that can be is not touched until there is a new one."""
    monkeypatch.setattr(plot, "load_matplotlib", lambda: None)  # it takes a second
    words = ["-i", "no-such-instance", "bench", "--plot"]
    assert cli.main([*words, str(tmp_path / "gone" / "x.png")]) == 2
    assert "x.png: cannot be written: No such file or directory" in capsys.readouterr().err
    (tmp_path / "old.png").write_text("old")
    assert cli.main([*words, str(tmp_path / "old.png")]) == 3
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("old.png", "old")]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["bench", "--lengths", "8,x"], "no positive number"),
        (["bench", "--routes", "air"], "no list of file, shared"),
        (["try", "--temperature", "-1", "hello"], "no number from 0 to 100"),
        (["try", "--policy", "perhaps", "hello"], "invalid choice"),
    ],
)
def test_command_words_that_are_none_are_a_usage_error(
    capsys: pytest.CaptureFixture[str], words: list[str], wanted: str
) -> None:
    """Told by the parser."""
    with pytest.raises(SystemExit) as raised:
        cli.main(words)
    assert raised.value.code == 2
    assert wanted in capsys.readouterr().err
