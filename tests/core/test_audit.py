"""Every decision of the audits: the choice, the steps, the verdict, the strikes."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebitd.core import audit
from onebitd.core.audit import LEAST_STEP_TOKENS, Ledger, Verdict
from onebitd.core.state_compare import TensorDiff

FINE = TensorDiff(
    section="attention",
    part="K",
    layer=0,
    what="layer 0 K",
    positions=9,
    max_abs=0.0,
    mean_abs=0.0,
    cosine=1.0,
    row_error=0.001,
    worst_pos=3,
    first_off=None,
    head_scale=1.0,
    head=0,
    cause=None,
    within=True,
)


TOLERANCE = 0.05


def tensor(layer: int, part: str, error: float = 0.001, **more: object) -> TensorDiff:
    """Return the measures of one tensor; an error of 0.1 and more is off."""
    changes: dict[str, object] = {
        "layer": layer,
        "part": part,
        "what": f"layer {layer} {part}",
        "row_error": error,
        "within": error < 0.1,
        "first_off": None if error < 0.1 else 2,
    }
    return dataclasses.replace(FINE, **(changes | more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("share", "draw", "chosen"),
    [
        (0.0, 0.0, False),
        (1.0, 0.999999, True),
        (0.25, 0.249, True),
        (0.25, 0.25, False),
    ],
)
def test_is_sampled_share_decides_the_uniform_draw(share: float, draw: float, chosen: bool) -> None:
    """None at 0, all at 1, and in between as many as the share says."""
    assert audit.is_sampled(share, draw) is chosen


@given(
    n_tokens=st.integers(1, 3000),
    ubatch=st.sampled_from([16, 64, 100, 512, 2048]),
    times=st.lists(st.floats(0.0001, 2.0), min_size=1, max_size=50),
)
def test_step_tokens_fill_ubatches_as_the_whole_prompt_would(
    n_tokens: int, ubatch: int, times: list[float]
) -> None:
    """However long steps take: whole ubatches end where they would, and no step is too small."""
    held, size, ends, number = 0, LEAST_STEP_TOKENS, set(), 0
    while held < n_tokens:
        step = audit.step_tokens(n_tokens, held, size, ubatch)
        end_of_ubatch = min(n_tokens, held // ubatch * ubatch + ubatch)
        assert held + step <= end_of_ubatch
        assert step >= min(LEAST_STEP_TOKENS, end_of_ubatch - held // ubatch * ubatch)
        held += step
        ends.add(held)
        size = audit.next_size(step, times[number % len(times)])
        number += 1
    assert ends >= {*range(ubatch, n_tokens, ubatch), n_tokens}


def test_next_size_grows_while_steps_are_quick_and_shrinks_at_once() -> None:
    """From the least step on: at most double, in whole least steps, never below it."""
    assert audit.next_size(64, 0.010) == 128
    assert audit.next_size(128, 0.045) == 128
    assert audit.next_size(512, 0.200) == 128
    assert audit.next_size(64, 9.0) == 64


@pytest.mark.parametrize(
    ("args", "ubatch"),
    [
        ([], 512),
        (["-ub", "128"], 128),
        (["--ubatch-size", "1024"], 1024),
        (["-b", "256"], 256),
        (["-ub", "128", "-ub", "64", "--batch-size", "4096"], 64),
        (["-ub"], 512),
        (["-ub", "zero"], 512),
    ],
)
def test_ubatch_of_arguments_is_llama_cpps_own_reading(args: list[str], ubatch: int) -> None:
    """The last one counts, a smaller batch limits it, what is no number is not ours to judge."""
    assert audit.ubatch_of(args) == ubatch


def test_quiet_s_doubles_with_each_interruption_up_to_a_minute() -> None:
    """Who came once comes again soon."""
    assert [audit.quiet_s(n) for n in (0, 1, 2, 6, 10_000)] == [1.0, 2.0, 4.0, 60.0, 60.0]


def test_judge_all_within_shows_the_worst() -> None:
    """The largest error is what an honest audit is about."""
    found = audit.judge([tensor(0, "K"), tensor(1, "V", 0.004), tensor(1, "K", 0.002)], TOLERANCE)
    assert found is not None
    assert (found.ok, found.layer, found.part, found.error) == (True, 1, "V", 0.004)
    assert found.words() == "largest error 0.004 (layer 1 V, position 3)"


def test_judge_faults_shows_the_first_layer_that_is_off() -> None:
    """A fault in one layer spreads to those behind it, where it may be larger."""
    faults = [tensor(5, "K", 2.0), tensor(3, "V", 0.4), tensor(4, "K", 0.9), tensor(2, "K")]
    found = audit.judge(faults, TOLERANCE)
    assert found is not None
    assert (found.ok, found.layer, found.part, found.error) == (False, 3, "V", 0.4)
    assert (found.position, found.off, found.of) == (2, 3, 4)
    said = (
        "layer 3 V is off by 0.4 from position 2 on; 3 of 4 tensors are off, layer 5 K most, by 2"
    )
    assert found.words() == said


def test_judge_scaled_head_is_named_when_no_row_is_off() -> None:
    """One percent on one head is less than a row's tolerance, and still a fault."""
    scaled = tensor(7, "K", 0.01, within=False, head_scale=1.0098, head=2)
    found = audit.judge([tensor(6, "K"), scaled], TOLERANCE)
    assert found is not None
    assert (found.ok, found.layer, found.cause) == (False, 7, "head 2 is scaled by 1.0098")
    assert found.words() == "layer 7 K is off by 0.01 at most, at position 3: " + str(found.cause)


def test_judge_many_small_errors_are_not_taken_for_a_scaled_head() -> None:
    """A head that is within its tolerance is not what is off."""
    noisy = tensor(7, "K", 0.09, within=False, head_scale=1.004, head=2, rms_error=0.04)
    found = audit.judge([noisy], TOLERANCE)
    assert found is not None
    assert found.cause == "the root mean square of its rows' errors is 0.04"


def test_judge_nothing_compared_is_no_verdict() -> None:
    """Silence about an empty comparison would be taken for a good one."""
    assert audit.judge([], TOLERANCE) is None


def verdict(ok: bool) -> Verdict:
    """Return a verdict on layer 3 K."""
    found = audit.judge([tensor(3, "K", 0.01 if ok else 0.5)], TOLERANCE)
    assert found is not None
    return found


def test_ledger_strikes_are_not_taken_away_by_honest_audits() -> None:
    """One bad handoff of twenty is a bad provider; the third strike is the last."""
    ledger = Ledger()
    for ok in (False, True, True, False, True):
        ledger.add(verdict(ok), "r", "t")
        assert ledger.out_of_service(3) is None
    assert (ledger.audited, ledger.drifted, ledger.strikes) == (5, 2, 2)
    assert ledger.last == audit.LastAudit("t", "r", 0.01, 3, "K", True)
    ledger.add(verdict(False), "r", "t")
    why = ledger.out_of_service(3)
    assert why is not None
    assert "3 audits found drift, last layer 3 K is off by 0.5" in why
    assert "onebitctl provider reset" in why


def test_ledger_error_that_is_no_number_is_none() -> None:
    """JSON has no infinity: a status that says one cannot be read."""
    ledger = Ledger()
    found = audit.judge([tensor(3, "K", float("inf"))], TOLERANCE)
    assert found is not None
    ledger.add(found, "r", "t")
    assert ledger.last is not None
    assert (ledger.last.error, ledger.last.ok) == (None, False)


def test_ledger_forgiven_has_no_strikes_and_keeps_its_counts() -> None:
    """What a reset clears, and what it does not."""
    ledger = Ledger()
    assert ledger.forgive() == 0
    ledger.add(verdict(False), "r", "t")
    assert "strike 1 of 3" in str(ledger.warning(3))
    assert "out of service" in str(ledger.warning(1))
    assert ledger.forgive() == 1
    assert (ledger.out_of_service(1), ledger.warning(1)) == (None, None)
    assert (ledger.audited, ledger.drifted) == (1, 1)
