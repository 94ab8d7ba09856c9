"""When a decoder is taken at its word that it has no use for what is handed over."""

from __future__ import annotations

import pytest

from onebitd.core.reuse import WASTED_MAX, Reuse
from onebitd.core.state_layout import KvSection, Layout, RecrSection, Rows

ROW = Rows(1, 384)
KV = KvSection(ext_bytes=0, v_trans=False, n_rot_k=None, n_rot_v=None, k=(ROW,), v=(ROW,))
RECURRENT = RecrSection(n_layer=1, rows=(ROW, ROW))
PLAIN = Layout(2, packed_tokens=False, sections=(KV,))


def wasted(times: int, generation: int = 1) -> Reuse:
    """Return what so many wasted handoffs leave."""
    reuse = Reuse()
    for _ in range(times):
        reuse.note(generation, 1000, 1000)
    return reuse


def test_refusal_comes_with_the_third_in_a_row() -> None:
    """Two may be chance."""
    assert [wasted(n).refusal(1, PLAIN, swa_full=False) is None for n in range(5)] == [
        *[True] * WASTED_MAX,
        *[False] * 2,
    ]


@pytest.mark.parametrize(("evaluated", "counts"), [(1, False), (500, False), (501, True)])
def test_note_handoff_is_wasted_when_most_of_it_was_evaluated_again(
    evaluated: int, counts: bool
) -> None:
    """One that was used begins the count anew."""
    reuse = wasted(WASTED_MAX - 1)
    reuse.note(1, 1000, evaluated)
    assert (reuse.refusal(1, PLAIN, swa_full=False) is not None) is counts
    assert (reuse.wasted_in_row > 0) is counts


def test_refusal_another_decoder_is_tried() -> None:
    """Its count is its own, too."""
    reuse = wasted(WASTED_MAX)
    assert reuse.refusal(2, PLAIN, swa_full=False) is None
    reuse.note(2, 1000, 1000)
    assert (reuse.wasted_in_row, reuse.refusal(2, PLAIN, swa_full=False)) == (1, None)


def test_forgive_says_whether_the_route_was_off() -> None:
    """And it is on again."""
    reuse = wasted(WASTED_MAX)
    assert (reuse.forgive(), reuse.forgive(), wasted(1).forgive()) == (True, False, False)
    assert reuse.refusal(1, PLAIN, swa_full=False) is None


@pytest.mark.parametrize(
    ("layout", "swa_full", "ending"),
    [
        (None, False, "after each of 3 handoffs"),
        (PLAIN, False, "after each of 3 handoffs"),
        (
            Layout(2, packed_tokens=False, sections=(KV, KV)),
            False,
            "its model has a sliding window, and needs --swa-full (backend.args)",
        ),
        (Layout(2, packed_tokens=False, sections=(KV, KV)), True, "after each of 3 handoffs"),
        (
            Layout(2, packed_tokens=False, sections=(KV, RECURRENT)),
            False,
            "this build does not keep the state of a recurrent model",
        ),
    ],
)
def test_refusal_names_the_flag_that_would_help(
    layout: Layout | None, swa_full: bool, ending: str
) -> None:
    """Where there is one."""
    refusal = wasted(WASTED_MAX).refusal(1, layout, swa_full=swa_full)
    assert refusal is not None
    assert refusal.startswith("the decoder evaluated the prompt again")
    assert refusal.endswith(ending)
