"""onebitd.core.line_budget: what passes, what is counted, and when it passes again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebitd.core.line_budget import LineBudget


def passed(budget: LineBudget, now_s: float, count: int, size_bytes: int = 10) -> int:
    """Offer so many lines at one moment; return how many pass."""
    return sum(budget.admits(now_s, size_bytes) for _ in range(count))


def test_line_budget_burst_passes_and_the_rest_is_counted() -> None:
    """As many short lines as the bucket holds, and a number for the others."""
    budget = LineBudget(20, 1.0)
    assert passed(budget, 0.0, 25) == 20
    assert budget.left_out == 5
    assert budget.take_left_out() == 5
    assert budget.take_left_out() == 0


def test_line_budget_quiet_source_gets_everything_through() -> None:
    """A source that keeps to its rate never loses a line, however long it goes on."""
    budget = LineBudget(5, 2.0)
    assert all(budget.admits(second / 2, 100) for second in range(1000))
    assert budget.left_out == 0


def test_line_budget_after_a_pause_the_bucket_is_full_and_no_fuller() -> None:
    """Time is not saved up beyond the burst."""
    budget = LineBudget(20, 1.0)
    passed(budget, 0.0, 30)
    assert passed(budget, 1e6, 30) == 20


def test_line_budget_empty_passes_nothing_until_a_tenth_is_back() -> None:
    """Under a flood lines come in groups of a tenth of the burst, not one by one."""
    budget = LineBudget(100, 10.0)
    passed(budget, 0.0, 200)
    groups = [passed(budget, tenth / 10, 50) for tenth in range(1, 31)]
    assert groups == ([0] * 9 + [10]) * 3


def test_line_budget_small_bucket_gives_one_at_a_time() -> None:
    """A tenth of little is still one whole line."""
    budget = LineBudget(1, 1.0)
    assert [budget.admits(now, 1) for now in (0.0, 0.5, 1.0, 1.5, 2.0)] == [
        True,
        False,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(("size_bytes", "count"), [(0, 66), (255, 66), (256, 33), (8192, 2)])
def test_line_budget_long_line_costs_more(size_bytes: int, count: int) -> None:
    """256 bytes more are one token more; the last of the burst may go into debt."""
    budget = LineBudget(66, 1.0)
    assert passed(budget, 0.0, 100, size_bytes) == count


def test_line_budget_line_dearer_than_the_bucket_passes_and_is_paid_off() -> None:
    """A line that is too long for any bucket is not lost for ever; the next one waits for it."""
    budget = LineBudget(2, 1.0)
    assert budget.admits(0.0, 2560)
    assert not budget.admits(8.0, 1)
    assert budget.admits(10.0, 1)


def test_line_budget_clock_that_stands_or_goes_back_gives_nothing() -> None:
    """No lines are won by a clock that misbehaves."""
    budget = LineBudget(3, 1.0)
    assert passed(budget, 5.0, 10) == 3
    assert passed(budget, 4.0, 10) == 0


@given(
    st.integers(1, 50),
    st.floats(0.1, 100),
    st.lists(st.tuples(st.floats(0, 5), st.integers(0, 20_000)), max_size=200),
)
def test_line_budget_whatever_comes_stays_within_burst_and_rate(
    burst: int, per_s: float, lines: list[tuple[float, int]]
) -> None:
    """Every line passes or is counted, and no more tokens are spent than there were."""
    budget = LineBudget(burst, per_s)
    now_s, spent, count, last = 0.0, 0, 0, 0
    for pause_s, size_bytes in lines:
        now_s += pause_s
        if budget.admits(now_s, size_bytes):
            last = 1 + size_bytes // 256
            spent, count = spent + last, count + 1
    assert count + budget.take_left_out() == len(lines)
    assert spent - last <= burst + per_s * now_s + 1e-6
