"""Break-even and expected first bytes, from learned figures and from figures by hand."""

from __future__ import annotations

import dataclasses

import pytest

from onebitd.core.advice import advise, judge, needed, table_lengths
from onebitd.core.costs import Costs
from onebitd.core.forecast import SHORTEST, Forecast, Given
from onebitd.core.handoff import Route

NOW = 1_800_000_000.0
BY_HAND = Given(
    provider_ms_per_token=0.2,
    provider_fixed_ms=90.0,
    decoder_ms_per_token=0.31,
    decoder_fixed_ms=11.0,
    restore_ms_per_mib=0.5,
    kib_per_token=112.0,
    adopt_ms=0.6,
    lock_ms=2.0,
)


def by_hand(**changes: float | None) -> Forecast:
    """Return a forecast that rests on figures by hand alone."""
    return Forecast(Costs(), dataclasses.replace(BY_HAND, **changes))


def taught(*, bend: float = 0.0, shared: bool = True) -> Costs:
    """Return costs that were fed with runs and replies of the rates of BY_HAND.

    The provider's runs grow by `bend` with the square of their tokens.
    """
    costs = Costs()
    for tokens in (50, 100, 200, 400, 700, 1000, 1500, 2000, 3000, 4000):
        run = 90 + 0.2 * tokens + bend * tokens * tokens
        for route in (Route.FILE, Route.SHARED) if shared else (Route.FILE,):
            costs.note_provider(route, tokens, run, overlapped=False, cold=False, now=NOW)
        size = tokens * 112 * 1024
        costs.note_state(tokens, size)
        costs.note_restore(size, 0.5 * size / 2**20, NOW)
        costs.note_decoder(0, tokens, 11 + 0.31 * tokens, overlapped=False, now=NOW)
        costs.note_decoder(tokens, 1, 11.31, overlapped=False, now=NOW)
        costs.note_lock(2.0)
        if shared:
            costs.note_adopt(0.6)
    costs.note_reply(100, 500.0, NOW)
    return costs


def test_first_byte_by_hand_is_the_sum_of_its_parts() -> None:
    """Lock, run, restore or adopt, and one token; the prompt's last one is not handed over."""
    found = by_hand().first_byte(1001)
    assert found.decoder_ms == pytest.approx(11 + 0.31 * 1001)
    assert found.file_ms == pytest.approx(2 + 90 + 200 + 0.5 * 112000 / 1024 + 11.31)
    assert found.shared_ms == pytest.approx(2 + 90 + 200 + 0.6 + 11.31)
    assert (found.best(), found.best_handoff()) == ("shared", Route.SHARED)
    assert by_hand().first_byte(100).best() == "decoder"


def test_first_byte_learned_is_that_of_the_same_figures_by_hand() -> None:
    """What the daemon learned from such runs gives what they give by hand."""
    for tokens in (100, 1000, 4000):
        learned = dataclasses.asdict(Forecast(taught(), Given()).first_byte(tokens))
        assert learned == pytest.approx(dataclasses.asdict(by_hand().first_byte(tokens)), rel=0.02)


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("provider_ms_per_token", {"file_ms", "shared_ms"}),
        ("provider_fixed_ms", {"file_ms", "shared_ms"}),
        ("decoder_ms_per_token", {"decoder_ms", "file_ms", "shared_ms"}),
        ("decoder_fixed_ms", {"decoder_ms", "file_ms", "shared_ms"}),
        ("restore_ms_per_mib", {"file_ms"}),
        ("kib_per_token", {"file_ms"}),
        ("adopt_ms", {"shared_ms"}),
        ("lock_ms", {"file_ms", "shared_ms"}),
    ],
)
def test_figure_by_hand_takes_the_place_of_the_learned_one(name: str, ways: set[str]) -> None:
    """A larger one makes exactly the ways slower that have such a part."""
    costs = taught()
    before = dataclasses.asdict(Forecast(costs, Given()).first_byte(1000))
    dear = Given(**{name: 1000.0 * getattr(BY_HAND, name)})
    after = dataclasses.asdict(Forecast(costs, dear).first_byte(1000))
    assert {way for way in before if after[way] > before[way] * 1.001} == ways
    assert {way for way in before if after[way] != before[way]} == ways


def gain(forecast: Forecast, route: Route, tokens: int) -> float:
    """Return how much sooner the route is than the decoder."""
    found = forecast.first_byte(tokens)
    handed = found.by(route)
    assert found.decoder_ms is not None
    assert handed is not None
    return found.decoder_ms - handed


@pytest.mark.parametrize("route", Route)
def test_judge_break_even_is_the_first_length_that_wins(route: Route) -> None:
    """One token less loses; every longer prompt wins."""
    forecast = by_hand()
    ((first, last),) = judge(route, forecast.first_byte, 8191).wins
    assert SHORTEST < first < last == 8191
    assert gain(forecast, route, first - 1) <= 0 < gain(forecast, route, first)


def test_judge_route_that_loses_everywhere_has_no_stretch() -> None:
    """Its factor stays below 1, and is told for the best length and the last."""
    found = judge(Route.FILE, by_hand(provider_ms_per_token=12.0).first_byte, 8191)
    assert found.wins == ()
    assert found.last_factor <= found.best_factor < 1


def test_judge_route_that_wins_everywhere_is_always() -> None:
    """From the shortest prompt on."""
    cheap = by_hand(provider_fixed_ms=0.0, lock_ms=0.0, adopt_ms=0.0)
    assert judge(Route.SHARED, cheap.first_byte, 8191).always


def test_judge_route_that_bends_upwards_wins_in_between() -> None:
    """A provider whose runs grow faster than the decoder's has a longest prompt, too."""
    forecast = Forecast(taught(bend=1.5e-5), Given())
    found = judge(Route.SHARED, forecast.first_byte, 8191)
    ((first, last),) = found.wins
    assert 800 < first < 1500 < 5000 < last < 8000
    assert first <= found.best_tokens <= last
    edges = (first - 1, first, last, last + 1)
    assert [gain(forecast, Route.SHARED, at) > 0 for at in edges] == [False, True, True, False]


def test_overlap_hides_the_run_of_the_file_route_alone() -> None:
    """Restore and one token are left; on the shared route everything is still to come."""
    forecast = by_hand()
    found, free = forecast.behind_reply(1001), forecast.first_byte(1001)
    assert found.file_ms == pytest.approx(0.5 * 112000 / 1024 + 11.31)
    assert (found.decoder_ms, found.shared_ms) == (free.decoder_ms, free.shared_ms)
    assert forecast.hidden_ms(1001) == pytest.approx(2 + 90 + 200)


def test_overlap_of_a_typical_reply_hides_prompts_up_to_a_length() -> None:
    """The longest whose run, slowed by the decoder at work, ends within the reply's time."""
    forecast = Forecast(taught(), Given())
    overlap = advise(forecast, [100], 8191).overlap
    assert overlap is not None
    assert overlap.reply_tokens == 100
    assert overlap.reply_ms == pytest.approx(500.0)
    longest = overlap.reply_hides_tokens
    assert longest is not None
    times = forecast.hidden_ms(longest), forecast.hidden_ms(longest + 1)
    assert times[0] is not None
    assert times[1] is not None
    assert times[0] <= 500 < times[1]
    free = forecast.run_ms(Route.FILE, longest - 1)
    assert free is not None
    assert times[0] > free * 1.1


@pytest.mark.parametrize("route", Route)
def test_needed_rate_breaks_even_there(route: Route) -> None:
    """A provider with the rate that is asked for takes as long as the decoder."""
    slow = by_hand(provider_ms_per_token=12.0)
    found = needed(slow, route, 1000)
    assert found is not None
    assert found.run_ms == pytest.approx(90 + 12 * 999)
    assert found.fixed_ms == 90.0
    assert found.ms_per_token == pytest.approx(12.0)
    expected = by_hand(provider_ms_per_token=found.limit_ms_per_token).first_byte(1000)
    assert expected.by(route) == pytest.approx(expected.decoder_ms)


def test_needed_is_nothing_where_the_route_wins_and_no_rate_where_none_helps() -> None:
    """A fixed cost, or what follows the run, may be more than the decoder takes for everything."""
    assert needed(by_hand(), Route.SHARED, 1000) is None
    start = needed(by_hand(provider_fixed_ms=400.0), Route.FILE, 1000)
    assert start is not None
    assert (start.limit_ms > 0, start.limit_ms_per_token) == (True, None)
    restore = needed(by_hand(restore_ms_per_mib=50.0), Route.FILE, 1000)
    assert restore is not None
    assert (restore.limit_ms < 0, restore.limit_ms_per_token) == (True, None)


def test_advise_with_a_route_that_wins_needs_nothing() -> None:
    """Only when all lose at 1000 tokens; then the closest one is told."""
    assert advise(by_hand(), [64], 8191).needed is None
    found = advise(by_hand(provider_ms_per_token=12.0), [64], 8191).needed
    assert found is not None
    assert (found.route, found.tokens) == (Route.SHARED, 1000)


def test_advise_without_the_file_route_has_no_overlap() -> None:
    """The shared route alone hides nothing."""
    found = advise(by_hand(restore_ms_per_mib=None), [64], 8191)
    assert found.overlap is None
    assert [verdict.route for verdict in found.verdicts] == [Route.SHARED]


@pytest.mark.parametrize(
    ("costs", "given", "words"),
    [
        (Costs(), Given(), ("decoder", "provider")),
        (Costs(), Given(decoder_ms_per_token=1.0), ("provider",)),
        (Costs(), Given(provider_ms_per_token=1.0), ("decoder", "restore")),
        (taught(shared=False), Given(), ()),
        (Costs(), BY_HAND, ()),
        (Costs(), dataclasses.replace(BY_HAND, kib_per_token=None), ()),
        (Costs(), dataclasses.replace(BY_HAND, kib_per_token=None, adopt_ms=None), ("restore",)),
    ],
)
def test_missing_names_what_nothing_tells(
    costs: Costs, given: Given, words: tuple[str, ...]
) -> None:
    """Nothing is missing once the decoder and one whole route are known."""
    assert Forecast(costs, given).missing() == words


@pytest.mark.parametrize(
    ("without", "enough"),
    [
        ((), True),
        (("provider_fixed_ms", "decoder_fixed_ms", "lock_ms", "adopt_ms"), True),
        (("kib_per_token",), True),
        (("kib_per_token", "adopt_ms"), False),
        (("provider_ms_per_token",), False),
        (("decoder_ms_per_token",), False),
    ],
)
def test_given_is_enough_with_both_rates_and_one_route(
    without: tuple[str, ...], enough: bool
) -> None:
    """So much needs no daemon; fixed costs and the lock are 0 when they are not given."""
    given = dataclasses.replace(BY_HAND, **dict.fromkeys(without))
    assert given.is_enough() is enough
    assert (Forecast(Costs(), given).missing() == ()) is enough


def test_shared_route_never_used_is_taken_to_run_as_the_file_route_when_adopting_is_given() -> None:
    """A question about a decoder that can share, before there is one."""
    costs = taught(shared=False)
    assert Forecast(costs, Given()).routes() == (Route.FILE,)
    forecast = Forecast(costs, Given(adopt_ms=0.6))
    assert forecast.routes() == (Route.FILE, Route.SHARED)
    assert forecast.run_ms(Route.SHARED, 500) == forecast.run_ms(Route.FILE, 500)


@pytest.mark.parametrize(
    ("ctx_size", "lengths"), [(512, [64, 128, 256, 511]), (65, [64]), (33, [32]), (2, [2])]
)
def test_table_lengths_end_with_the_longest_prompt(ctx_size: int, lengths: list[int]) -> None:
    """A prompt leaves room for one token."""
    assert table_lengths(ctx_size) == lengths
