"""When silence is a hang, and when errors ask for a probe: tables."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from onebitd.core.vitals import (
    Look,
    Progress,
    Stillness,
    Suspicion,
    is_failure,
    look_pause_s,
)

HANG_S = 20.0
STEP_S = 5.0


@dataclass
class Seen:
    """What a look at the decoder finds; by default one call, which waits, and no work at all."""

    heard: dict[int, int] = field(default_factory=lambda: {1: 0})
    waiting: frozenset[int] = frozenset({1})
    cpu_s: dict[int, float] = field(default_factory=lambda: {10: 4.0})
    disk: dict[int, int] = field(default_factory=dict)
    gpu: dict[str, int] = field(default_factory=dict)
    state: str = "S"
    readable: bool = True
    health: bool = False
    gap_s: float = STEP_S


def reasons(*seen: Seen, hang_s: float = HANG_S) -> list[str | None]:
    """Return what each look leads to."""
    stillness, at, found = Stillness(), 100.0, []
    for one in seen:
        at += one.gap_s
        progress = Progress(one.cpu_s, one.disk, one.gpu, one.state) if one.readable else None
        look = Look(at, one.heard, one.waiting, progress, one.health)
        found.append(stillness.hang(look, hang_s))
    return found


def is_hang(*seen: Seen) -> bool:
    """Say whether one of the looks found a hang."""
    return any(reasons(*seen))


def test_stillness_silent_and_idle_for_the_whole_time_is_a_hang_and_not_sooner() -> None:
    """The looks are 5 s apart: the fifth is the first that has seen 20 s of nothing."""
    found = reasons(*[Seen() for _ in range(5)])
    assert found[:4] == [None] * 4
    assert found[4] == (
        "it hung: no byte of an answer and 0.00 s of processor time in 20 s, /health was silent"
    )


@pytest.mark.parametrize(
    ("state", "health", "end"),
    [
        ("T", False, "/health was silent, its process is stopped by a signal"),
        ("t", False, "/health was silent, its process is stopped by a debugger"),
        ("D", True, "/health answered, its process is stuck in a call"),
        ("S", True, "/health answered"),
    ],
)
def test_stillness_reason_tells_what_was_seen(state: str, health: bool, end: str) -> None:
    """Whoever reads `last_exit` knows where to look next."""
    found = reasons(*[Seen(state=state, health=health) for _ in range(5)])[-1]
    assert found is not None
    assert found.endswith(end)


def long(**changes: list[object]) -> list[Seen]:
    """Return many looks; each keyword has what that field is, look by look, the last for ever."""
    found = []
    for index in range(40):
        now = {name: values[min(index, len(values) - 1)] for name, values in changes.items()}
        found.append(Seen(**now))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("what", "seen"),
    [
        ("a prefill on the processor", long(cpu_s=[{10: 4 + 5.0 * n} for n in range(40)])),
        ("hardly any processor time", long(cpu_s=[{10: 4 + 0.03 * n} for n in range(40)])),
        ("a child of a script works", long(cpu_s=[{10: 4.0, 11: 5.0 * n} for n in range(40)])),
        ("children come and go", long(cpu_s=[{10: 4.0, 20 + n: 0.2} for n in range(40)])),
        ("a GPU works", long(gpu=[{"gfx": 7 + n} for n in range(40)])),
        ("a model comes from disk", long(disk=[{10: n << 20} for n in range(40)])),
        ("a stream goes on", long(heard=[{1: n} for n in range(40)])),
        ("another one goes on", long(heard=[{1: 0, 2: n} for n in range(40)])),
        ("the client does not read", long(waiting=[frozenset()])),
        ("nothing can be read", long(readable=[False])),
        (
            "one call after the other",
            long(
                heard=[{n: 0} for n in range(40)],
                waiting=[frozenset({n}) for n in range(40)],
            ),
        ),
        ("we were stopped ourselves", long(gap_s=[31.0])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_stillness_decoder_that_works_is_never_a_hang(what: str, seen: list[Seen]) -> None:
    """However long it takes, whatever there is to see of it."""
    assert not is_hang(*seen), what


@pytest.mark.parametrize(
    ("what", "seen"),
    [
        ("its timers run", long(cpu_s=[{10: 4 + 0.002 * n} for n in range(40)])),
        ("it logs a line", long(disk=[{10: 4096 * n} for n in range(40)])),
        ("engines as before", long(gpu=[{"gfx": 7}])),
        ("a child ended", long(cpu_s=[{10: 4.0, 11: 9.0}, {10: 4.0}])),
        ("others are answered", long(heard=[{1: 0, 100 + n: 1} for n in range(40)])),
        ("another does not read", long(heard=[{1: 0, 2: 5}])),
        ("after a prefill", long(cpu_s=[{10: 5.0 * min(n, 10)} for n in range(40)])),
        ("after half a stream", long(heard=[{1: min(n, 10)} for n in range(40)])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_stillness_signs_that_mean_nothing_hide_no_hang(what: str, seen: list[Seen]) -> None:
    """What a server does without its decoder, or did before, is no work."""
    assert is_hang(*seen), what


def test_stillness_silent_flag_asks_for_looks_that_are_closer() -> None:
    """Silence alone does, work or not; a stream that goes on does not."""
    stillness, progress = Stillness(), Progress({}, {}, {})
    flags = []
    for index, heard in enumerate((0, 1, 2, 2, 2, 3)):
        look = Look(5.0 * index, {1: heard}, frozenset({1}), progress, health=True)
        stillness.hang(look, HANG_S)
        flags.append(stillness.is_silent)
    assert flags == [False, False, False, True, True, False]


@pytest.mark.parametrize(
    ("hang_s", "is_silent", "pause_s"),
    [(120, False, 15), (120, True, 5), (8, False, 2), (8, True, 2), (86_400, True, 5)],
)
def test_look_pause_is_short_where_the_limit_is(
    hang_s: float, is_silent: bool, pause_s: float
) -> None:
    """A small `backend.hang_s` is found in about its time."""
    assert look_pause_s(hang_s, is_silent=is_silent) == pause_s


def test_is_failure_what_is_not_supported_or_wrong_with_the_request_is_none() -> None:
    """A decoder without metrics, or with embeddings only, is well."""
    assert [
        status for status in (200, 204, 400, 404, 500, 501, 502, 503) if is_failure(status)
    ] == [
        500,
        502,
        503,
    ]


def test_suspicion_one_error_is_due_three_are_urgent_and_a_reply_clears() -> None:
    """A probe at the next quiet moment; before the next request when it goes on."""
    suspicion = Suspicion()
    assert suspicion.wait_s(0.0) is None
    suspicion.failed(500)
    suspicion.failed(500)
    assert (suspicion.wait_s(0.0), suspicion.is_urgent(0.0)) == (0.0, False)
    suspicion.failed(500)
    assert suspicion.is_urgent(0.0)
    suspicion.worked()
    assert (suspicion.wait_s(0.0), suspicion.is_urgent(0.0)) == (None, False)


def test_suspicion_probes_that_find_nothing_come_further_apart() -> None:
    """A client that provokes errors takes the others' prefix cache a few times an hour at most."""
    suspicion, now, waits = Suspicion(), 0.0, []
    for _ in range(6):
        for _ in range(5):
            suspicion.failed(500)
        wait_s = suspicion.wait_s(now)
        assert wait_s is not None
        assert suspicion.is_urgent(now) is (wait_s == 0)
        waits.append(wait_s)
        now += wait_s
        assert suspicion.is_urgent(now)
        suspicion.found_well(now)
    assert waits == [0, 60, 120, 240, 480, 480]
