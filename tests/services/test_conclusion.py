"""How a request ended, by what happened to it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import trio

from onebitd.core import policy
from onebitd.core.errors import BackendGone, BackendRefused, HandoffError, RequestError
from onebitd.core.handoff import HandoffRecord, Reason
from onebitd.core.wording import Wording
from onebitd.services.conclusion import Ending, conclude

NOTHING = Ending(
    error=None,
    phase="prefill",
    by_operator=False,
    client_gone=False,
    strict_detail=None,
    broken_off=None,
    failure=None,
    skip=None,
    handed=None,
    status=None,
    timings=None,
)
FULL = {"cache_n": 306, "prompt_n": 1, "predicted_n": 8, "predicted_ms": 40.5}
FAILURE = HandoffError(Reason.PROVIDER_EXIT, "status 3")


def ended(**happened: Any) -> HandoffRecord:
    record = HandoffRecord("r", "", "test", "m", "/v1/completions", False)
    conclude(record, dataclasses.replace(NOTHING, **happened))
    return record


def cancelled() -> trio.Cancelled:
    """Return one that trio itself has raised: nobody else can make any."""
    found: list[trio.Cancelled] = []

    async def main() -> None:
        with trio.move_on_after(0):
            try:
                await trio.sleep_forever()
            except trio.Cancelled as error:
                found.append(error)
                raise

    trio.run(main)
    return found[0]


CANCEL = cancelled()


@pytest.mark.parametrize(
    ("happened", "end"),
    [
        ({"handed": 306, "status": 200, "timings": FULL}, ("used", None)),
        ({"handed": 305, "status": 200, "timings": FULL}, ("wasted", None)),
        ({"handed": 306, "status": 400}, ("failed", "backend_refused")),
        ({"failure": FAILURE, "status": 200}, ("fallback", "provider_exit")),
        ({"skip": policy.Skip(Reason.POLICY, "x"), "status": 200}, ("skipped", "policy")),
        ({"skip": policy.Skip(Reason.POLICY, "x"), "status": 500}, ("skipped", "policy")),
        # It was handed over and decoded from, and still: the client has half a reply.
        (
            {"handed": 306, "broken_off": BackendGone("x"), "status": 200},
            ("failed", "backend_down"),
        ),
        ({"error": BackendGone("x"), "failure": FAILURE}, ("failed", "backend_down")),
        ({"error": ValueError("x"), "handed": 306}, ("failed", "internal")),
        ({"error": RequestError(429, "x", reason=Reason.QUEUE_FULL)}, ("failed", "queue_full")),
        ({"error": RequestError(400, "x")}, ("failed", "internal")),
        ({"error": CANCEL, "client_gone": True}, ("cancelled", "client_gone")),
        # The client of a request that the operator ended leaves, too.
        (
            {"error": CANCEL, "client_gone": True, "by_operator": True},
            ("cancelled", "operator"),
        ),
        # A client that leaves with the last event has its reply.
        (
            {"error": CANCEL, "client_gone": True, "whole": True, "handed": 306, "timings": FULL},
            ("used", None),
        ),
        ({"error": CANCEL, "whole": True}, ("cancelled", "draining")),
        ({"error": CANCEL}, ("cancelled", "draining")),
        ({"error": BaseExceptionGroup("x", [CANCEL, CANCEL])}, ("cancelled", "draining")),
        ({"error": BaseExceptionGroup("x", [CANCEL, KeyError()])}, ("failed", "internal")),
        ({}, ("failed", "internal")),
    ],
)
def test_conclude_first_thing_that_happened_decides(
    happened: dict[str, Any], end: tuple[str, str | None]
) -> None:
    """Errors before replies, replies before handoffs; each outcome and its reason."""
    record = ended(**happened)
    assert (record.outcome, record.reason) == end
    assert (record.detail is None) == (end[0] in ("used", "wasted"))


def test_conclude_takes_the_decoders_figures_whatever_the_end() -> None:
    """What a cancelled stream had said by then is known; the prompt's length follows from it."""
    record = ended(error=CANCEL, client_gone=True, timings=FULL)
    assert (record.reply_tokens, record.decode_ms) == (8, 40.5)
    assert (record.cached_tokens, record.evaluated_tokens, record.prompt_tokens) == (306, 1, 307)
    assert record.detail == "the client left in phase prefill"


def test_conclude_without_figures_invents_none() -> None:
    """A reply that says nothing about its prompt is told as such."""
    record = ended(handed=306, status=200)
    assert record.detail == "the decoder's reply said nothing about its prompt"
    assert {"reply_tokens", "decode_ms", "prompt_tokens"} & set(record.fields()) == set()


def test_conclude_strict_detail_takes_the_place_of_what_the_client_is_told() -> None:
    """The client's message may be briefer than what the log is told."""
    told = RequestError(502, "the handoff failed", reason=Reason.PROVIDER_EXIT)
    record = ended(error=told, strict_detail=Wording.of("status 3", "no device"))
    assert record.detail == "status 3: no device"


QUOTED = "it says 'my secret'"


@pytest.mark.parametrize(
    ("happened", "brief"),
    [
        (
            {"failure": HandoffError(Reason.PROVIDER_EXIT, "status 3", quoted=QUOTED)},
            "status 3; its words are in the log",
        ),
        (
            {"failure": HandoffError(Reason.BAD_STATE, BackendRefused(400, "my secret").wording)},
            "the decoder refused it with status 400; its words are in the log",
        ),
        (
            {"skip": policy.Skip(Reason.NOT_TEXT, "n is my secret", brief="n is not 1")},
            "n is not 1",
        ),
        (
            {"broken_off": BackendGone("the reply broke off", quoted=QUOTED)},
            "the reply broke off; its words are in the log",
        ),
        (
            {"error": BackendRefused(500, "my secret")},
            "the decoder refused it with status 500; its words are in the log",
        ),
        (
            {"error": RequestError(400, "it cannot be passed on", quoted=QUOTED)},
            "it cannot be passed on; its words are in the log",
        ),
        (
            {
                "error": RequestError(502, "the handoff failed: my secret"),
                "strict_detail": Wording.of("status 3", "my secret"),
            },
            "status 3; its words are in the log",
        ),
        ({"error": KeyError("my secret")}, "KeyError; its words are in the log"),
    ],
)
def test_conclude_what_is_kept_has_no_words_of_others(happened: Any, brief: str) -> None:
    """They may quote a prompt: whoever asks now is told them, the disk is not."""
    record = ended(**happened)
    assert "my secret" in str(record.detail)
    assert record.brief == brief


@pytest.mark.parametrize("handed", [None, 306])
def test_conclude_own_words_are_kept_as_they_are(handed: int | None) -> None:
    """Most sentences are onebitd's own."""
    for happened in (
        {"error": CANCEL, "client_gone": True},
        {"error": CANCEL, "by_operator": True},
        {"error": CANCEL},
        {"status": 400},
        {"status": 200},
        {"skip": policy.Skip(Reason.POLICY, "the policy is never")},
        {"failure": FAILURE},
    ):
        record = ended(handed=handed, **happened)
        assert record.brief == record.detail
