"""Which outcome, reason and route can come together: held against what the code says of each."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterator

import pytest
import trio

from onebitd.core import policy
from onebitd.core.endings import DECODERS_ANSWER, FAILURES, SKIPS, possible_endings
from onebitd.core.errors import BackendGone, HandoffError, RequestError
from onebitd.core.handoff import Outcome, Reason, Route
from onebitd.services.conclusion import Ending, conclude
from onebitd.services.history import NOT_THE_PROVIDERS
from tests.llama_builds import ROOT
from tests.surfaces.control_server import make_record

POSSIBLE = list(possible_endings())
SENT = {"cache_n": 306, "prompt_n": 1}


def test_possible_endings_have_every_outcome_reason_and_route() -> None:
    """A new word is forgotten nowhere, and no ending is there twice."""
    outcomes, reasons, routes = (set(words) for words in zip(*POSSIBLE, strict=True))
    assert outcomes == set(Outcome)
    assert reasons == {None, *Reason}
    assert routes == {None, *Route}
    assert len(POSSIBLE) == len(set(POSSIBLE)) < 100


@functools.cache
def given() -> list[tuple[frozenset[str], Reason]]:
    """Return each reason that a call in the package is given, with the words of the call's name."""
    found = []
    texts = (file.read_text() for file in sorted((ROOT / "onebitd").rglob("*.py")))
    trees = [ast.parse(text) for text in texts if "Reason." in text]
    for node in itertools.chain.from_iterable(map(ast.walk, trees)):
        if not isinstance(node, ast.Call):
            continue
        arguments = [*node.args[:1], *(one.value for one in node.keywords if one.arg == "reason")]
        found += [
            (frozenset(ast.unparse(node.func).split(".")), Reason[one.attr])
            for one in arguments
            if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "Reason"
        ]
    return found


def raised(*calls: str) -> set[Reason]:
    """Return the reasons that are given to calls of these names anywhere in the package."""
    return {reason for names, reason in given() if names & set(calls)}


def test_possible_endings_know_where_each_reason_is_raised() -> None:
    """As a failed handoff, as a skip, or as a client's error: all that the code says, no other."""
    tries = {Reason.BREAKER_OPEN}  # which its caller makes a skip
    assert raised("HandoffError", "_lost") - tries == set(FAILURES)
    assert raised("Skip") == set(SKIPS)
    errors = {reason for outcome, reason, _ in POSSIBLE if outcome is Outcome.FAILED}
    assert raised("RequestError") <= errors


def every_conclusion() -> Iterator[tuple[Outcome | None, Reason | None, Route | None]]:
    """Yield what `conclude` makes of everything that can be known at an end."""
    failed = [(reason, route) for reason, routes in FAILURES.items() for route in routes]
    anywhere = [None, *Route]
    known: list[tuple[dict[str, object], Route | None]] = []
    for reason, route in failed:
        known.append(({"failure": HandoffError(reason, "why")}, route))
        strict = RequestError(502, "the handoff failed", reason=reason)
        known.append(({"failure": HandoffError(reason, "why"), "error": strict}, route))
    for reason in SKIPS:
        skip: dict[str, object] = {"skip": policy.Skip(reason, "why")}
        known.append((skip, None))
        if reason not in DECODERS_ANSWER:
            known.append(({**skip, "error": RequestError(502, "no", reason=reason)}, None))
    full = RequestError(503, "full", reason=Reason.QUEUE_FULL)
    known.append(({"error": full}, None))
    for route, handed in itertools.product(Route, ({}, {"timings": SENT})):
        known.append(({"handed": 306, **handed}, route))
        known.append(({"handed": 306, "status": 400}, route))
    cancel = trio.Cancelled._create()
    for route, (gone, operator) in itertools.product(anywhere, [(0, 0), (1, 0), (0, 1)]):
        left = {"client_gone": bool(gone), "by_operator": bool(operator)}
        known.append(({"error": cancel, **left}, route))
    closed = RequestError(503, "stopping", reason=Reason.DRAINING)
    for route, error in itertools.product(anywhere, (closed, BackendGone("gone"), OSError("no"))):
        known.append(({"error": error}, route))
    known += [({"broken_off": BackendGone("gone")}, route) for route in anywhere]
    nothing = dict.fromkeys(("error", "strict_detail", "broken_off", "failure", "skip", "handed"))
    plain = {**nothing, "phase": "decode", "by_operator": False, "client_gone": False}
    for some, route in known:
        record = make_record(route=route)
        conclude(record, Ending(**{**plain, "status": 200, "timings": None, **some}))  # type: ignore[arg-type]
        yield record.outcome, record.reason, record.route


def test_possible_endings_are_those_that_a_request_is_concluded_with() -> None:
    """Each comes of something that can be known at an end, and nothing else comes of that."""
    assert set(every_conclusion()) == {tuple(one) for one in POSSIBLE}


def test_reasons_without_a_try_are_not_held_against_the_provider() -> None:
    """A strict request that is too short, or a full queue: three in a row once were three failures
    of the provider's to `status` and to the alert.
    """
    untried = {reason for _, reason, route in POSSIBLE if route is None}
    assert untried - {None} <= NOT_THE_PROVIDERS


@pytest.mark.parametrize("reason", sorted(DECODERS_ANSWER))
def test_strict_errors_leave_the_decoders_own_words_alone(reason: Reason) -> None:
    """A prompt that it cannot read, or that does not fit, is no failed handoff."""
    assert (Outcome.FAILED, reason, None) not in POSSIBLE
    assert (Outcome.SKIPPED, reason, None) in POSSIBLE
