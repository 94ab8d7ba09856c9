"""`onebitctl state show`, `check` and `diff` on files that the tests build."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onebitd.core import state_compare
from onebitd.state_tools import commands
from onebitd.surfaces import cli, cli_state
from tests.core import state_faults as faults
from tests.core import state_files as sf

TOKENS = [11, 22, 33, 44, 55, 66, 77, 88]
KV = sf.Kv(layers=3, width=64)


def filled(*sections: sf.Kv | sf.Recr, tokens: Sequence[int] = TOKENS) -> bytes:
    """Return a file whose tensors have values of their own."""
    file = sf.build(tokens, sections)
    for number, (what, block) in enumerate(faults.blocks_of(file).items()):
        shape = (block.cells, faults.rows_of(file, what).shape[1])
        rows = np.random.default_rng(number).standard_normal(shape)
        file = faults.put(file, what, rows.astype(np.float32))
    return file


class Runs:
    """Runs `onebitctl state` in this process, in a directory of its own."""

    def __init__(self, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.home = home
        self._capsys = capsys

    def file(self, name: str, data: bytes) -> str:
        """Write a file and return its path."""
        path = self.home / name
        path.write_bytes(data)
        return str(path)

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Return exit status, stdout and stderr."""
        status = cli.main(["state", *arguments])
        out, err = self._capsys.readouterr()
        return status, out, err

    def json(self, *arguments: str) -> Any:
        """Return the object printed."""
        return json.loads(self(*arguments, "--json")[1])


@pytest.fixture
def state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Runs:
    """The command, and a place for files."""
    return Runs(tmp_path, capsys)


# --- diff ---------------------------------------------------------------------------------------


def test_diff_of_equal_files_is_silent_and_fine(state: Runs) -> None:
    """No output and exit status 0; --json and --all are answered all the same."""
    a, b = state.file("a", filled(KV)), state.file("b", filled(KV))
    assert state("diff", a, b) == (0, "", "")
    found = state.json("diff", a, b)
    assert (found["within"], found["worst"], len(found["tensors"])) == (True, "layer 0 K", 6)
    status, out, _ = state("diff", a, b, "--all")
    assert (status, out.count("layer ")) == (0, 7)


def test_diff_of_a_faulty_file_names_layer_position_and_suspicion(state: Runs) -> None:
    """Exit status 1, the tensor that is off and no other, and what may be wrong."""
    good = filled(KV)
    bad = faults.plant(good, "layer 1 V", faults.zeroed(5, 5))
    a, b = state.file("a", bad), state.file("b", good)
    status, out, err = state("diff", a, b, "--head-dim", "32")
    assert (status, err) == (1, "")
    heading, row, *rest = out.splitlines()
    assert heading.split()[:3] == ["TENSOR", "MAX", "ABS"]
    assert row.split()[:3] == ["layer", "1", "V"]
    assert row.split()[-3:] == ["1", "5", "5"]
    assert "  suspected: rows were not written: position 5 is all zero" in rest
    assert rest[-1] == ("6 tensors at 8 positions, worst row error 1 (layer 1 V): 1 not within 0.5")
    assert max(map(len, out.splitlines())) <= 80
    found = state.json("diff", a, b)
    assert found["within"] is False
    (tensor,) = [tensor for tensor in found["tensors"] if not tensor["within"]]
    assert (tensor["what"], tensor["first_off"]) == ("layer 1 V", 5)
    assert "position 5" in tensor["cause"]


def test_diff_within_the_tolerance_shows_the_worst_tensor(state: Runs) -> None:
    """Exit status 0, and how near it was; a smaller tolerance fails it, without a made-up cause."""
    good = filled(KV)
    a = state.file("a", faults.plant(good, "layer 2 K", faults.drifted(0.02)))
    b = state.file("b", good)
    status, out, err = state("diff", a, b)
    assert status == 0
    assert "layer 2 K" in out
    assert out.splitlines()[-1].endswith(": within 0.5")
    assert "give --model or --head-dim" in err
    status, out, err = state("diff", a, b, "--tolerance", "0.01")
    assert (status, err) == (1, "")
    assert "suspected: no known cause fits" in out


def test_diff_of_a_head_a_hundredth_too_large_is_off_when_heads_are_known(state: Runs) -> None:
    """The scale of a head has a tolerance of its own, and takes 16 positions."""
    good = filled(KV, tokens=range(16))
    a = state.file("a", faults.plant(good, "layer 2 V", faults.scaled_head(1, 32, 1.01)))
    b = state.file("b", good)
    assert state("diff", a, b)[0] == 0
    status, out, _ = state("diff", a, b, "--head-dim", "32")
    assert status == 1
    assert "head 1 has 1.01 times the reference's size" in out
    assert "suspected: head 1 is scaled by 1.01" in out
    assert state("diff", a, b, "--head-dim", "32", "--scale-tolerance", "0.02")[0] == 0
    status, _, err = state("diff", a, b, "--head-dim", "32", "--positions", ":15")
    assert (status, "sizes of heads were not compared: that takes 16 positions" in err) == (0, True)


def test_diff_positions_restricts_the_rows(state: Runs) -> None:
    """A range leaves out what is wrong behind it; a range outside leaves nothing."""
    good = filled(KV)
    a = state.file("a", faults.plant(good, "layer 1 V", faults.zeroed(5, 5)))
    b = state.file("b", good)
    assert state("diff", a, b, "--positions", "0:5") == (0, "", "")
    assert state("diff", a, b, "--positions", ":6")[0] == 1
    assert state("diff", a, b, "--positions", "5:")[0] == 1
    status, _, err = state("diff", a, b, "--positions", "90:99")
    assert status == 2
    assert "nothing could be compared" in err


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (filled(KV, tokens=TOKENS[::-1]), "the tokens differ from number 0 on"),
        (filled(sf.Kv(layers=2, width=64)), "3 K and 3 V tensors in the first file, 2 K and 2 V"),
        (filled(sf.Kv(layers=3, width=32)), "layer 0 K: 64 values a row"),
    ],
)
def test_diff_that_compares_nothing_is_loud_and_exit_2(
    state: Runs, other: bytes, says: str
) -> None:
    """Two files with nothing in common are not within anything."""
    a, b = state.file("a", filled(KV)), state.file("b", other)
    status, out, err = state("diff", a, b)
    assert (status, out) == (2, "")
    assert says in err
    assert f"nothing could be compared in {a} and {b}" in err
    assert state.json("diff", a, b)["within"] is False


def test_diff_where_a_section_is_missing_is_exit_1_and_says_so(state: Runs) -> None:
    """What agrees does not make up for what is not there."""
    a, b = state.file("a", filled(KV)), state.file("b", filled(KV, KV))
    status, out, err = state("diff", a, b)
    assert status == 1
    assert "section sliding window: the second file alone has cells" in err
    assert out.splitlines()[-1].endswith("but not everything could be compared")


def test_diff_json_has_null_for_what_is_no_number(state: Runs) -> None:
    """An infinite error is no JSON number."""
    good = filled(KV)
    a = state.file("a", faults.plant(good, "layer 1 V", faults.spoiled(3, np.nan)))
    found = state.json("diff", a, state.file("b", good))
    (tensor,) = [tensor for tensor in found["tensors"] if not tensor["within"]]
    assert (tensor["row_error"], tensor["max_abs"], tensor["worst_pos"]) == (None, None, 3)


def test_diff_plot_writes_a_picture(state: Runs) -> None:
    """A PNG of all sections, for a file that is off and one that is equal."""
    good = filled(KV, sf.Kv(2, width=32, last=4))
    a = state.file("a", faults.plant(good, "layer 1 V", faults.zeroed(5, 5)))
    b, picture = state.file("b", good), state.home / "error.png"
    for file, status in ((a, 1), (b, 0)):
        assert state("diff", file, b, "--plot", str(picture))[0] == status
        data = picture.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert int.from_bytes(data[16:20], "big") >= 1000
    assert sorted(path.name for path in state.home.iterdir()) == ["a", "b", "error.png"]


def test_diff_plot_without_matplotlib_says_what_installs_it(
    state: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing, and the command that installs it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    a = state.file("a", filled(KV))
    status, out, err = state("diff", a, a, "--plot", str(state.home / "x.png"))
    assert (status, out) == (2, "")
    install = f"{sys.executable} -m pip install matplotlib"
    assert err == f"onebitctl: matplotlib is not installed: {install}\n"
    assert not (state.home / "x.png").exists()


def test_diff_plot_that_cannot_be_written_is_one_error(state: Runs) -> None:
    """A directory that is not there is named, and nothing is left."""
    a = state.file("a", filled(KV))
    status, _, err = state("diff", a, a, "--plot", str(state.home / "none" / "x.png"))
    assert status == 2
    assert "x.png: cannot be written: No such file" in err


def test_diff_plot_replaces_files_only(state: Runs) -> None:
    """A link stays a link, and what is no file (a device, say) is what it was."""
    a = state.file("a", filled(KV))
    link, fifo = state.home / "l.png", state.home / "fifo"
    link.symlink_to(state.home / "x.png")
    os.mkfifo(fifo)
    assert state("diff", a, a, "--plot", str(link))[0] == 0
    assert link.is_symlink()
    assert (state.home / "x.png").read_bytes().startswith(b"\x89PNG")
    status, _, err = state("diff", a, a, "--plot", str(fifo))
    assert status == 2
    assert "fifo: not a regular file" in err
    assert fifo.is_fifo()


def test_diff_of_a_file_that_shrinks_meanwhile_is_an_error_not_a_crash(
    state: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else may still truncate it."""
    a, b = state.file("a", filled(KV)), state.file("b", filled(KV))

    def shrinking(*arguments: Any, **options: Any) -> Any:
        os.truncate(a, 700)
        return state_compare.compare(*arguments, **options)

    monkeypatch.setattr(commands, "compare", shrinking)
    status, out, err = state("diff", a, b)
    assert (status, out) == (2, "")
    assert "the file became shorter than" in err


# --- files that cannot be read --------------------------------------------------------------------


@pytest.mark.parametrize("command", ["show", "check", "diff"])
def test_state_file_that_cannot_be_read_is_one_error_and_exit_2(state: Runs, command: str) -> None:
    """Missing, a directory, a FIFO, a device: named, and nothing is waited for."""
    fifo = state.home / "fifo"
    os.mkfifo(fifo)
    good = [state.file("good", filled(KV))] if command == "diff" else []
    for path, says in (
        (state.home / "none", "cannot be opened: No such file"),
        (state.home, "not a regular file"),
        (fifo, "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
    ):
        status, out, err = state(command, str(path), *good)
        assert (status, out) == (2, "")
        assert err.startswith(f"onebitctl: {path}: {says}")
        assert err.count("\n") == 1


def test_state_file_without_permission_is_one_error(
    state: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says whose fault it is."""
    path = state.file("a", filled(KV))

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))  # root may read everything

    monkeypatch.setattr(os, "open", refuse)
    status, _, err = state("show", path)
    assert status == 2
    assert "Permission denied" in err


def test_show_and_diff_of_what_is_no_state_file_are_exit_2(state: Runs) -> None:
    """The reader's own sentence, behind the name."""
    text, good = state.file("text", b"Not a state.\n" * 50), state.file("good", filled(KV))
    for arguments in (("show", text), ("diff", text, good), ("diff", good, text)):
        status, out, err = state(*arguments)
        assert (status, out) == (2, "")
        assert err.startswith(f"onebitctl: {text}: not a state file")


# --- show -----------------------------------------------------------------------------------------


def test_show_tells_what_a_file_holds_but_not_the_prompt(state: Runs) -> None:
    """Header, sections, types, row sizes, positions; ids only when asked for."""
    path = state.file("a", filled(KV, sf.Kv(2, width=32, last=4, v_trans=1)))
    status, out, err = state("show", path)
    assert (status, err) == (0, "")
    for words in (
        "state version 2",
        "8, listed plain",
        "attention: 3 layers, K f16, V f16",
        "8, positions 0 to 7",
        "3 of f16, 128 bytes a row",
        "sliding window: 2 layers, K f16, V f16, V transposed",
        "4, positions 4 to 7",
        "2 of f16, 32 channels of 2-byte elements",
    ):
        assert words in out
    assert "11 22 33" not in out
    assert "ids          11 22 33 44 55 66 77 88" in state("show", path, "--ids")[1]


def test_show_json_is_the_same_for_programs(state: Runs) -> None:
    """One object, with every tensor's place."""
    data = filled(KV)
    found = state.json("show", state.file("a", data))
    assert (found["version"], found["tokens"], found["bytes"]) == (2, 8, len(data))
    assert "ids" not in found
    (section,) = found["sections"]
    assert (section["section"], section["cells"], section["last_position"]) == ("attention", 8, 7)
    block = faults.blocks_of(data)["layer 1 V"]
    (tensor,) = [tensor for tensor in section["tensors"] if tensor["what"] == "layer 1 V"]
    assert tensor == {
        "what": "layer 1 V",
        "part": "V",
        "layer": 1,
        "type": "f16",
        "offset": block.offset,
        "bytes": block.n_bytes,
        "row_size": 128,
    }
    assert state.json("show", str(state.home / "a"), "--ids")["ids"] == TOKENS


def test_show_values_tells_ranges_zero_rows_and_what_is_no_number(state: Runs) -> None:
    """The figures are those of the rows."""
    data = faults.plant(filled(KV), "layer 1 V", faults.zeroed(2, 3))
    data = faults.plant(data, "layer 2 K", faults.spoiled(4, np.nan))
    path = state.file("a", data)
    found = {one["what"]: one for one in state.json("show", path, "--values")["values"]}
    rows = faults.rows_of(data, "layer 1 V").astype(float)
    assert found["layer 1 V"] == {
        "what": "layer 1 V",
        "minimum": pytest.approx(rows.min()),
        "maximum": pytest.approx(rows.max()),
        "rms": pytest.approx(np.sqrt(np.mean(rows**2))),
        "zero_rows": 2,
        "not_finite": 0,
    }
    assert found["layer 2 K"]["not_finite"] == 1
    assert found["layer 2 K"]["maximum"] == pytest.approx(
        np.nanmax(faults.rows_of(data, "layer 2 K"))
    )
    line = next(x for x in state("show", path, "--values")[1].splitlines() if "1 V " in x)
    assert line.split()[-2:] == ["2", "0"]


# --- check ----------------------------------------------------------------------------------------


def test_check_of_a_good_file_is_fine(state: Runs) -> None:
    """By itself, and with a decoder's file and the tokens; what it was held against is said."""
    path, like = state.file("a", filled(KV)), state.file("like", filled(KV, tokens=[1, 2, 3]))
    ids = state.file("ids", b"".join(b"%d\n" % token for token in TOKENS))
    status, out, err = state("check", path)
    assert (status, err) == (0, "")
    assert "held against itself alone: --like FILE" in out
    status, out, err = state("check", path, "--like", like, "--tokens", ids)
    assert (status, out, err) == (0, f"{path}: fine, held against the decoder's layout\n", "")
    assert state.json("check", path)["ok"] is True


def test_check_of_a_bad_file_says_what_the_daemon_would(state: Runs) -> None:
    """Exit status 1 and the sentence, with or without a decoder's file."""
    like = state.file("like", filled(KV, tokens=[1, 2, 3]))
    ids = state.file("ids", b"11\n22\n33\n44\n55\n66\n77\n99\n")
    good = filled(KV)
    other = sf.build(TOKENS, [sf.Kv(3, width=64, k_type=sf.F32)])
    for data, arguments, says in (
        (good[:-1], (), "1 byte before the end of layer 2 V"),
        (faults.plant(good, "layer 1 K", faults.spoiled(3, np.nan)), (), "layer 1 K: a NaN or"),
        (sf.build(TOKENS, [sf.Kv(3, width=64, pos=[*range(7), 9])]), (), "cell 7: position 9, 7"),
        (other, ("--like", like), "layer 0 K: type f32, the decoder has f16"),
        (good, ("--like", like, "--tokens", ids), "token 7 is not the one that was handed over"),
        (b"text" * 99, ("--like", like), "not a state file"),
    ):
        path = state.file("a", data)
        status, out, err = state("check", path, *arguments)
        assert (status, out) == (1, "")
        assert err.startswith(f"onebitctl: {path}: ")
        assert says in err
        found = state.json("check", path, *arguments)
        assert (found["ok"], says in found["problem"]) == (False, True)


def test_check_like_a_decoders_own_looks_at_the_values_as_the_daemon_does(state: Runs) -> None:
    """A row that was not written, or a size no model computes, is refused in the daemon's words."""
    like = state.file("like", filled(KV, tokens=[1, 2, 3]))
    for fault, says in (
        (faults.zeroed(7, 7), "layer 1 V, cell 7: every value is zero"),
        (lambda rows: rows * 5000, "layer 1 V: a value of"),
    ):
        path = state.file("a", faults.plant(filled(KV), "layer 1 V", fault))
        assert state("check", path)[0] == 0
        status, _, err = state("check", path, "--like", like)
        assert status == 1
        assert says in err


def test_check_of_a_window_of_unknown_length_takes_any_tail_and_says_so(state: Runs) -> None:
    """With a decoder's file too: whoever knows the length is asked for it."""
    sections = (KV, sf.Kv(2, width=32, last=4))
    like = state.file("like", filled(KV, sf.Kv(2, width=32), tokens=[1, 2, 3]))
    path = state.file("a", filled(*sections))
    status, _, err = state("check", path, "--like", like)
    assert (status, "give --model or --swa-window" in err) == (0, True)
    status, _, err = state("check", path, "--like", like, "--swa-window", "4")
    assert (status, err) == (0, "")
    assert state("check", path, "--like", like, "--swa-window", "5")[0] == 1


def test_check_like_reads_a_file_that_alone_is_ambiguous(state: Runs) -> None:
    """One token, whose id is in its cell, may be taken for a number of layers."""
    shape = sf.Kv(3, width=64, ext_bytes=12)
    path = state.file("a", sf.build([7], [shape], version=4))
    like = state.file("like", sf.build([1, 2, 3], [shape], version=4))
    assert "2 ways" in state("check", path)[2]
    assert state("check", path, "--like", like)[0] == 0


def test_check_window_needs_as_many_cells_as_the_model_looks_back(state: Runs) -> None:
    """A tail of a sliding window is enough if it is as long as the window."""
    path = state.file("a", filled(KV, sf.Kv(2, width=32, last=4)))
    assert state("check", path)[0] == 0
    assert state("check", path, "--swa-window", "4")[0] == 0
    status, _, err = state("check", path, "--swa-window", "5")
    assert status == 1
    assert "sliding window: 4 cells, 5 to 8 expected" in err


def test_check_with_other_files_that_are_bad_is_exit_2(state: Runs) -> None:
    """It is not the file that is at fault."""
    path = state.file("a", filled(KV))
    ids, text = state.file("ids", b"11\nx\n"), state.file("text", b"text" * 99)
    for arguments, says in (
        (("--tokens", ids), f"{ids}: line 2 is no token id"),
        (("--like", text), f"{text}: not a state file"),
        (("--model", text), f"{text}: not a GGUF file"),
        (("--like", str(state.home / "none")), "cannot be opened"),
    ):
        status, out, err = state("check", path, *arguments)
        assert (status, out) == (2, "")
        assert says in err


# --- the command line -----------------------------------------------------------------------------


def test_diff_defaults_in_the_help_are_those_of_the_comparison() -> None:
    """The help cannot import them."""
    assert cli_state.TOLERANCE == state_compare.DEFAULT_TOLERANCE
    assert cli_state.SCALE_TOLERANCE == state_compare.DEFAULT_SCALE_TOLERANCE


@pytest.mark.parametrize(
    "arguments",
    [
        ("diff", "a"),
        ("diff", "a", "b", "--positions", "5"),
        ("diff", "a", "b", "--tolerance", "0"),
        ("diff", "a", "b", "--tolerance", "nan"),
        ("diff", "a", "b", "--head-dim", "-3"),
        ("check", "a", "--swa-window", "none"),
        ("show",),
        (),
    ],
)
def test_state_usage_errors_are_exit_2(state: Runs, arguments: tuple[str, ...]) -> None:
    """argparse says what is wrong with the command line."""
    with pytest.raises(SystemExit) as ended:
        state(*arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize("arguments", [["status", "--help"], ["state", "diff", "--help"]])
def test_help_is_printed_without_numpy(arguments: list[str]) -> None:
    """Only running a command that reads state files imports it."""
    script = (
        "import sys; from onebitd.surfaces.cli import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit: print(*sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert "onebitd" in loaded
    assert not loaded & {"numpy", "matplotlib", "mmap"}


@pytest.mark.parametrize(
    "arguments",
    [["state", "show", "x"], ["provider", "check", "x", "--model", "x"]],
    ids=["state-show", "provider-check"],
)
@pytest.mark.parametrize(
    ("event", "status", "said"),
    [
        ("raise ModuleNotFoundError(name, name=name)", 2, "pip install numpy"),
        ("signal.raise_signal(signal.SIGINT)", 130, ""),
    ],
    ids=["missing", "ctrl-c"],
)
def test_import_of_numpy_that_fails_or_is_interrupted_is_no_traceback(
    arguments: list[str], event: str, status: int, said: str
) -> None:
    """Without numpy one line says what to install; Ctrl-C meanwhile is quiet."""
    script = (
        "import signal, sys; from onebitd.surfaces.cli import main\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == 'numpy': {event}\n"
        f"sys.meta_path.insert(0, Finder()); sys.exit(main({arguments!r}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    assert len(done.stderr.splitlines()) == bool(said)
    assert said in done.stderr
