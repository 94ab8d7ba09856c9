"""The arithmetic of the gate and of the overlap, and one small run of each."""

from __future__ import annotations

import pytest

from onebitd.core import provider_contract
from tests.bench import gate, overlap, traces, verdict
from tests.bench.client import Seen
from tests.bench.seats import AGAIN, NEVER, SLOW
from tests.bench.traces import Ask, Trace
from tests.bench.verdict import Measured
from tests.llama_builds import BUILDS, MODELS
from tests.standins import paced_provider

ASK = Ask("/v1/completions", {})
TWO = Trace("two", ((ASK, ASK),), 100)


def seen(name: str, *first_byte_ms: float) -> list[Seen]:
    """Return requests `name0`, `name1`… with these times to first byte."""
    return [
        Seen(f"{name}{i}", 100.0, 100.0 + ms / 1000, 200.0, 5) for i, ms in enumerate(first_byte_ms)
    ]


def measured(pace: str, auto_ways: tuple[str, str]) -> Measured:
    """Return a trace in which the decoder is better for the first request, and then worse."""
    found = Measured(TWO)
    found.note(NEVER, 0, seen("n", 100.0, 400.0), counts=True)
    found.note(AGAIN, 0, seen("a", 110.0, 390.0), counts=True)
    found.note(("always", pace), 0, seen("w", 200.0, 300.0), counts=False)
    found.note(("oracle", pace), 0, seen("o", 100.0, 300.0), counts=True)
    found.note(("auto", pace), 0, seen("x", 104.0, 320.0), counts=True)
    for number, outcome in enumerate(auto_ways):
        found.records[f"x{number}"] = {"outcome": outcome, "reason": "policy"}
        if outcome == "used":
            found.records[f"x{number}"] = {"outcome": outcome}
    return found


def test_oracle_takes_the_better_way_of_each_request() -> None:
    """It knows what both ways took, and nothing else."""
    assert measured("1x", ("skipped", "used")).best_ways("1x", 0) == ["never", "always"]


@pytest.mark.parametrize(
    ("ways", "ratio"),
    [
        (("skipped", "used"), 1.0),
        (("used", "used"), 500 / 400),
        (("skipped", "skipped"), 500 / 400),
    ],
    ids=["right", "first wrong", "second wrong"],
)
def test_by_choice_values_each_choice_with_its_ways_median(
    ways: tuple[str, str], ratio: float
) -> None:
    """What chance did to auto's own requests does not count there."""
    assert measured("1x", ways).by_choice("1x") == pytest.approx(ratio)


def test_bars_are_auto_over_the_oracle_and_at_the_slow_pace_over_never() -> None:
    """424 ms are too much for the oracle's 400, and little for never's 500."""
    over_oracle, over_never = verdict.bars_of(measured(SLOW, ("skipped", "used")), [SLOW])
    assert over_oracle.ratio == pytest.approx(1.06)
    assert over_never.ratio == pytest.approx(0.848)
    assert (over_oracle.limit, over_never.limit) == (1.05, 1.02)
    assert (over_oracle.by_choice, over_never.by_choice) == pytest.approx((1.0, 0.8))
    assert (over_oracle.is_met, over_never.is_met) == (False, True)
    assert len(verdict.bars_of(measured("4x", ("used", "used")), ["4x"])) == 1


def test_page_tells_wrong_choices_and_the_noise() -> None:
    """Who reads it sees where auto lost, and how much of it could be chance."""
    text = verdict.page(measured("1x", ("used", "used")), ["1x"])
    assert "never again / never: 1.000; by chance a ratio is off by 0.028" in text
    assert "auto at 1x: 2 used" in text
    assert "100 ms: ? tokens, ? in the slot: used; decoder 100 ms, provider 200 ms" in text


@pytest.mark.parametrize(("ratio", "status"), [(1.05, 0), (1.051, 1)], ids=["met", "missed"])
def test_gate_exit_status_is_1_when_a_bar_is_missed(
    ratio: float, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script need not read what is printed."""
    bars = [verdict.Bar("this", 1.0, 1.02, 1.0, 0.0), verdict.Bar("that", ratio, 1.05, 1.0, 0.0)]
    monkeypatch.setattr(gate, "run", lambda *_: bars)
    assert gate.main([]) == status
    assert capsys.readouterr().out.count("MISSED that") == status


def test_percentile_is_one_of_the_values() -> None:
    """The nearest rank: of few values p95 is the largest."""
    assert verdict.nearest_rank([3.0, 1.0, 2.0], 50) == 2.0
    assert verdict.nearest_rank([3.0, 1.0, 2.0], 95) == 3.0


def test_run_inside_a_reply_counts_only_what_lies_in_it() -> None:
    """Before the first byte the other request is not being decoded."""
    record = {"time": "1970-01-01T00:00:10.000Z", "tokenize_ms": 400.0, "lock_ms": 600.0}
    span = overlap.run_span(record | {"provider_wall_ms": 2000.0})
    assert span == (11.0, 13.0)
    assert overlap.inside(span, [(9.0, 11.5), (12.0, 12.5), (20.0, 30.0)]) == 0.5


def test_chats_take_turns_at_the_end() -> None:
    """One chat by itself, then two that throw each other out of the slot."""
    assert list(traces.turn_order([3, 2, 1])) == [0, 0, 0, 1, 2, 1]


def test_state_name_differs_with_the_ids() -> None:
    """A provider never hands over another prompt's state."""
    one, other = (provider_contract.format_tokens(ids) for ids in ([1, 2, 3], [1, 2, 4]))
    assert paced_provider.state_name(one).startswith("3-")
    assert paced_provider.state_name(one) != paced_provider.state_name(other)


def test_overlap_row_compares_with_never_and_says_what_lay_inside() -> None:
    """Twice the requests in the same time, each run half inside the other client's reply."""

    def reply(name: str, asked: float, first_byte: float, ended: float) -> Seen:
        return Seen(name, asked, first_byte, ended, 50)

    never = overlap.Looped([reply("n0", 0.0, 2.0, 6.0)], 60.0)
    both = [reply("a0", 0.0, 1.0, 4.0), reply("a1", 3.0, 5.0, 8.0)]
    used = {"outcome": "used", "prompt_tokens": 100, "provider_wall_ms": 2000.0}
    records = {
        "n0": {"outcome": "skipped", "prompt_tokens": 100},
        "a0": used | {"time": "1970-01-01T00:00:06.000Z"},
        "a1": used | {"time": "1970-01-01T00:00:03.000Z"},
    }
    row = overlap.row_of(("always", "1x"), overlap.Looped(both, 60.0), never, records)
    figures = ["2.0", "2.00", "5", "1500", "0.75", "2 of 2", "75%", "50%", "1"]
    assert row == ["always", *figures]
    assert overlap.row_of(NEVER, never, never, records)[-4:] == ["0 of 1", "-", "-", "0"]


def test_gate_small_run_prints_its_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """The whole of it, with every handoff used that was told to be one."""
    BUILDS[0].require()
    MODELS[0].require()
    words = ["--rounds", "1", "--learning", "1", "--traces", "overlap", "--paces", "4x"]
    bars = gate.run(gate.read_arguments(words), traces.TINY)
    assert [bar.limit for bar in bars] == [verdict.ORACLE_BAR]
    out = capsys.readouterr().out
    assert "two clients overlapping: 2 requests" in out
    assert "auto at 4x: " in out
    assert "not as told" not in out
