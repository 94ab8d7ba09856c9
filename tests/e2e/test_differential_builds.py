"""The differential suite on the other llama-server builds: a few requests of every kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.differential_cases import CASES, QUICK, Case
from tests.e2e.differential_rig import Both, running_both
from tests.llama_builds import BUILDS

SOME = [case for case in CASES if case.name in QUICK]


@pytest.fixture(scope="module", params=BUILDS[1:], ids=lambda build: f"build-{build.name}")
def both(request: pytest.FixtureRequest) -> Iterator[Both]:
    """A daemon on each build but the first."""
    with running_both(request.param) as running:
        yield running


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.id)
def test_passed_reply_other_build_same_as_the_decoders(both: Both, case: Case) -> None:
    """What another llama-server answers is passed on as it is, too."""
    assert both.wrong_when_passed(case) == []


@pytest.mark.parametrize(
    "case", [case for case in SOME if case.by_handoff], ids=lambda case: case.id
)
def test_handed_off_reply_other_build_same_as_the_decoders(both: Both, case: Case) -> None:
    """After a handoff to another llama-server, too, every byte is the decoder's."""
    assert both.wrong_when_handed_off(case) == []
