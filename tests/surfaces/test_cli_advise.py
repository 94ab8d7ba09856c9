"""`onebitctl advise`, by hand and from what a served daemon has learned."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from onebitd.core.config_resolve import resolve
from onebitd.core.costs import Costs
from onebitd.core.handoff import Route
from onebitd.services.admission import Admission
from onebitd.services.history import History
from onebitd.surfaces import cli
from onebitd.surfaces.status_view import StatusView
from tests.surfaces.control_server import FakeView, control_app, serve_unix

BY_HAND = (
    *("--provider-ms-per-token", "0.2", "--provider-fixed-ms", "90"),
    *("--decoder-ms-per-token", "0.31", "--decoder-fixed-ms", "11"),
    *("--restore-ms-per-mib", "0.5", "--kib-per-token", "112", "--adopt-ms", "0.6"),
)
SPLIT = ("--split", "--gpu-ms-per-row", "0.1", "--npu-ms-per-tile", "156")


def learned(provider_ms_per_token: float = 0.2) -> Costs:
    """Return what six handoffs and six replies taught just now."""
    costs, now = Costs(), time.time()
    for tokens in (100, 200, 400, 800, 1600, 3200):
        run = 90 + provider_ms_per_token * tokens
        costs.note_provider(Route.FILE, tokens, run, overlapped=False, cold=False, now=now)
        costs.note_state(tokens, tokens * 112 * 1024)
        costs.note_restore(tokens * 112 * 1024, 0.5 * tokens * 112 / 1024, now)
        costs.note_decoder(0, tokens, 11 + 0.31 * tokens, overlapped=False, now=now)
        costs.note_decoder(tokens, 1, 11.31, overlapped=False, now=now)
    costs.note_reply(100, 500.0, now)
    return costs


class Runs:
    """Runs `onebitctl advise` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Return exit status, stdout and stderr."""
        try:
            status = cli.main(["advise", *arguments])
        except SystemExit as exc:  # argparse's own
            status = int(str(exc.code))
        out, err = self._capsys.readouterr()
        return status, out, err

    def json(self, *arguments: str) -> Any:
        """Return the object printed."""
        status, out, err = self(*arguments, "--json")
        assert (status, err, out.count("\n")) == (0, "", 1)
        return json.loads(out)


@pytest.fixture
def advise(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Runs:
    """The command, where no daemon runs."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    return Runs(capsys)


class Served:
    """A daemon that says what it has learned, and the command that asks it."""

    def __init__(self, view: FakeView, socket: Path, advise: Runs) -> None:
        self.view = view
        self._ask = functools.partial(advise, "--socket", str(socket))

    async def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Run the command in a thread."""
        return await trio.to_thread.run_sync(self._ask, *arguments)


@pytest.fixture
async def served(advise: Runs) -> AsyncGenerator[Served]:
    """A daemon that has learned nothing yet."""
    with tempfile.TemporaryDirectory(prefix="ob") as name, trio.fail_after(60):
        view, socket = FakeView(), Path(name) / "control.sock"
        async with serve_unix(control_app(view), socket):
            yield Served(view, socket, advise)


# --- by hand ------------------------------------------------------------------------------------


def test_advise_by_hand_is_a_page_of_80_columns_and_needs_no_daemon(advise: Runs) -> None:
    """Break-even of both routes, the table with a mark on the soonest, the overlap; no colour."""
    status, out, err = advise(*BY_HAND)
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    assert "file     wins from 1629 tokens on" in out  # n > 90.055 / 0.0553125
    assert "shared   wins from 825 tokens on" in out  # n > 90.71 / 0.11
    rows = [line for line in out.splitlines() if line.strip().startswith(("512 ", "4096 "))]
    assert [row.split()[-4].rstrip(",") for row in rows[:2]] == ["decoder", "shared"]
    assert all(row.count("*") == 1 for row in rows)
    assert "overlap  behind somebody else's reply" in out


def test_advise_columns_are_below_each_other(advise: Runs) -> None:
    """Every row of a table has its decimal points and marks where the others have them."""
    _, out, _ = advise(*BY_HAND)
    tables = [part.split("\n\n")[0].splitlines() for part in out.split("  TOKENS")[1:]]
    assert [len(rows) for _, *rows in tables] == [8, 8]
    for head, *rows in tables:
        start = len("  TOKENS") + head.index("SOONEST")
        assert all(row[start - 2 : start] == "  " != row[start : start + 2] for row in rows)
        marks = [row.index("*") for row in rows]
        points = {at for row in rows for at in range(start) if row[at] == "."}
        assert {(at - start) % 11 for at in marks} == {7}  # each way has eleven columns
        assert {(at - start) % 11 for at in points} == {5}


@pytest.mark.parametrize(("variable", "plain"), [("OTHER", False), ("NO_COLOR", True)])
def test_advise_on_a_terminal_colours_what_is_soonest(
    advise: Runs, monkeypatch: pytest.MonkeyPatch, variable: str, plain: bool
) -> None:
    """Green for the winners, unless it is not wanted; nothing else of the page changes."""
    _, piped, _ = advise(*BY_HAND)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _, out, _ = advise(*BY_HAND)
    assert out.count("\x1b[32m") == (0 if plain else 16)
    assert re.sub(r"\x1b\[\d*m", "", out) == piped


def test_advise_json_has_the_figures_of_the_page(advise: Runs) -> None:
    """One object; times are not rounded, and given figures are told."""
    found = advise.json(*BY_HAND, "--lengths", "1000", "300")
    assert found["break_even"]["shared"]["wins"] == [[825, 8191]]
    assert [row["tokens"] for row in found["table"]] == [300, 1000]
    assert found["table"][1]["decoder_ms"] == pytest.approx(321.0)
    assert [row["best"] for row in found["table"]] == ["decoder", "shared"]
    assert [row["best"] for row in found["overlap"]["table"]] == ["file", "file"]
    assert found["given"]["kib_per_token"] == 112.0
    assert (found["needed"], found["missing"], found["model"]) == (None, {}, None)


def test_advise_provider_that_loses_says_how_fast_it_would_have_to_be(advise: Runs) -> None:
    """Never, by what factor, and the rate at which it breaks even at 1000 tokens."""
    status, out, _ = advise(*BY_HAND, "--provider-ms-per-token", "12")
    text = " ".join(out.split())
    assert status == 0
    assert "file never wins: " in text
    assert "x the decoder's time" in text
    assert "needed at 1000 tokens the provider's run takes 12078 ms; it breaks even at" in text
    assert "ms per token instead of 12 beside its 90.0 ms at any length" in text
    need = advise.json(*BY_HAND, "--provider-ms-per-token", "12")["needed"]
    assert need["limit_ms_per_token"] == pytest.approx((310 - 0.6 - 0.31 - 90 + 0.31) / 999, 0.01)


def test_advise_context_bounds_the_table_and_the_lengths(advise: Runs) -> None:
    """`--ctx-size` replaces the default; a prompt that does not fit is an error."""
    found = advise.json(*BY_HAND, "--ctx-size", "1024")
    assert [row["tokens"] for row in found["table"]] == [64, 128, 256, 512, 1023]
    assert advise.json(*BY_HAND, "--lengths", "20000")["ctx_size"] == 20001
    status, _, err = advise(*BY_HAND, "--ctx-size", "1024", "--lengths", "1024")
    assert status == 2
    assert "--lengths 1024: a prompt has from 2 to 1023 tokens" in err


def test_advise_by_hand_without_a_daemon_names_the_options_that_are_missing(advise: Runs) -> None:
    """Exit status 3, as any command; and how to do without."""
    status, out, err = advise("--provider-ms-per-token", "1")
    assert (status, out) == (3, "")
    assert "--decoder-ms-per-token and --restore-ms-per-mib with --kib-per-token" in err
    assert "--provider-ms-per-token" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--provider-ms-per-token", "fast"),
        ("--adopt-ms", "-1"),
        ("--lock-ms", "nan"),
        ("--kib-per-token", "inf"),
        ("--lengths", "0"),
        ("--lengths", "1", *BY_HAND),
        ("--split",),
        ("--split", "--gpu-ms-per-row", "1"),
        (*SPLIT, "--split-speedup", "1.1"),
        (*SPLIT, "--plot", "x.png"),
        (*SPLIT, "--lengths", "7"),
        (*SPLIT, "--gemm-share", "101"),
        (*SPLIT, "--gpu-ms-per-row", "0"),
        ("--split", "--split-speedup", "1.1", "--rows", "7"),
        ("--gemm-share", "0.4", *BY_HAND),
    ],
)
def test_advise_command_line_that_makes_no_sense_is_exit_2(
    advise: Runs, arguments: tuple[str, ...]
) -> None:
    """A sentence on stderr, nothing on stdout."""
    status, out, err = advise(*arguments)
    assert (status, out) == (2, "")
    assert err.count("onebitctl") >= 1


# --- from a daemon ------------------------------------------------------------------------------


async def test_advise_from_a_daemon_says_what_its_figures_rest_on(served: Served) -> None:
    """Model, context, runs and replies; a typical reply says what can be hidden."""
    served.view.learned = learned()
    status, out, err = await served()
    text = " ".join(out.split())
    assert (status, err) == (0, "")
    assert text.startswith("qwen3-4b, context of 8192 tokens learned from 6 provider runs on the")
    assert re.search(r"6 replies of the decoder \(last [\d.]+ s ago\)", text)
    assert "file wins from 16" in text
    assert "a typical reply here (100 tokens, 500 ms) hides the run of a prompt of up to" in text
    assert " but " not in text
    assert max(map(len, out.splitlines())) <= 80


async def test_advise_from_a_daemon_with_a_figure_by_hand_asks_what_if(served: Served) -> None:
    """The given rate replaces the learned one, the rest stays; the page says so."""
    served.view.learned = learned(provider_ms_per_token=12.0)
    assert "file     never wins" in (await served())[1]
    status, out, _ = await served("--provider-ms-per-token", "0.2")
    assert status == 0
    assert "by hand  provider-ms-per-token 0.2\n" in out
    assert "file     wins from 16" in out


async def test_advise_from_a_daemon_that_learned_nothing_says_how_to_teach_it(
    served: Served,
) -> None:
    """Exit status 1, what is missing, and the header to send; --json has the same."""
    status, out, err = await served()
    assert (status, err) == (1, "")
    text = " ".join(out.split())
    assert "learned from 0 provider runs on the file route, 0 replies of the decoder" in text
    assert "X-Onebit-Handoff: never, or give --decoder-ms-per-token" in text
    assert "X-Onebit-Handoff: always, or give --provider-ms-per-token" in text
    status, out, _ = await served("--json")
    found = json.loads(out)
    assert (status, sorted(found["missing"])) == (1, ["decoder", "provider"])
    assert found["samples"] == {"decoder": 0, "file": 0, "shared": 0}


async def test_advise_from_a_daemon_with_one_run_calls_it_a_guess(served: Served) -> None:
    """One run and one reply give a figure, and no trust in it."""
    costs, now = served.view.learned, time.time()
    costs.note_provider(Route.FILE, 500, 300.0, overlapped=False, cold=False, now=now)
    costs.note_decoder(0, 500, 200.0, overlapped=False, now=now)
    costs.note_restore(500 * 1024, 3.0, now)
    costs.note_state(500, 500 * 1024)
    status, out, _ = await served()
    assert status == 0
    assert "so little is known of the provider and the decoder that this is a guess" in out
    given = await served("--decoder-ms-per-token", "0.3")
    assert "so little is known of the provider that this is a guess" in given[1]


async def test_advise_from_a_daemon_of_another_version_is_one_sentence(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures that cannot be read are an error that names the socket."""
    answer = {**served.view.costs(), "costs": {"version": 99}}
    monkeypatch.setattr(served.view, "costs", lambda: answer)
    status, out, err = await served()
    assert (status, out) == (1, "")
    assert "control.sock cannot be read: " in err
    assert "version" in err


def test_status_view_costs_are_the_keepers_and_whose_they_are() -> None:
    """The context is the decoder's own once it has said it."""
    config = resolve(
        instance="qwen",
        file={"model": {"path": "/m.gguf"}, "provider": {"program": "/bin/npu"}},
    )
    costs = learned()
    supervisor: Any = SimpleNamespace(facts=SimpleNamespace(ctx_size=4096))
    handoffs: Any = SimpleNamespace(keeper=SimpleNamespace(costs=costs))
    view = StatusView(
        config, supervisor, handoffs, Admission(9), History(), [], service_manager=False
    )
    assert view.costs() == {
        "costs": costs.to_json(),
        "ctx_size": 4096,
        "provider": "/bin/npu",
        "share": False,
        "model": "qwen",
    }


# --- picture ------------------------------------------------------------------------------------


def test_advise_plot_writes_a_picture(advise: Runs, tmp_path: Path) -> None:
    """Beside the page, which is printed all the same."""
    picture = tmp_path / "advice.png"
    status, out, err = advise(*BY_HAND, "--plot", str(picture))
    assert (status, err) == (0, "")
    assert "wins from" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_advise_plot_without_matplotlib_says_what_installs_it(
    advise: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit status 2, and nothing is written."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = advise(*BY_HAND, "--plot", str(tmp_path / "x.png"))
    assert status == 2
    install = f"{sys.executable} -m pip install matplotlib"
    assert err == f"onebitctl: matplotlib is not installed: {install}\n"
    assert not list(tmp_path.glob("x.png*"))


@pytest.mark.parametrize("arguments", [BY_HAND, SPLIT])
def test_advise_without_a_picture_imports_neither_numpy_nor_the_daemon(
    arguments: tuple[str, ...],
) -> None:
    """It starts as fast as the other commands."""
    code = (
        "import sys; from onebitd.surfaces import cli; cli.main(sys.argv[1:]);"
        "print(sorted({'numpy', 'matplotlib', 'trio', 'quart', 'structlog'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, "advise", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# --- split --------------------------------------------------------------------------------------


def test_advise_split_is_a_page_of_80_columns(advise: Runs) -> None:
    """In sequence never, at the same time so many tiles, the ceiling, and each share's factor."""
    status, out, err = advise(*SPLIT, "--gemm-share", "39.8", "46.2%", "0.262")
    text = " ".join(out.split())
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "never better than the GPU alone. provider(m) + decoder(2048 - m)" in text
    assert "179 ms, 1.143x: 1 tile (256 rows) on the NPU while the GPU takes 1792" in text
    assert "ceiling 1.164x" in text
    assert [line.split() for line in out.splitlines()[-3:]] == [
        ["39.8%", "1.059x", "1.052x"],
        ["46.2%", "1.070x", "1.061x"],
        ["26.2%", "1.038x", "1.034x"],
    ]


def test_advise_split_json_has_both_splits(advise: Runs) -> None:
    """With rates both splits are there; with a ceiling alone they are null."""
    found = advise.json(*SPLIT, "--rows", "1024", "--gemm-share", "1")
    assert (found["rows"], found["ceiling"]) == (1024, pytest.approx(1.164, abs=5e-4))
    assert found["sequential"]["npu_rows"] == 0
    assert found["concurrent"]["npu_tiles"] == 0  # one tile takes longer than all of it
    assert found["end_to_end"][0]["at_ceiling"] == pytest.approx(found["ceiling"])
    found = advise.json("--split", "--split-speedup", "1.5", "--gemm-share", "50%")
    assert (found["sequential"], found["concurrent"]) == (None, None)
    assert found["end_to_end"] == [
        {"gemm_share": 0.5, "at_ceiling": pytest.approx(1.2), "in_tiles": None}
    ]


def test_advise_split_with_the_better_npu_hands_over_the_whole_prompt(advise: Runs) -> None:
    """In sequence that is the optimum, and no split either."""
    _, out, _ = advise("--split", "--gpu-ms-per-row", "1", "--npu-ms-per-tile", "156")
    assert "is least at m = 2048: the NPU's rate is better" in " ".join(out.split())
