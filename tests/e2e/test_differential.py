"""onebitd against its own decoder: what a client is told must be the decoder's words, byte by byte.

Both replies come from one llama-server process: once through the public listener, once on the
decoder's private socket, with the slot in the same state before each.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.differential import Answer, Request, differences
from tests.e2e.differential_cases import CASES, ENDPOINTS, OTHER_SUBJECTS, SHUT, Case, Shut
from tests.e2e.differential_rig import Both, running_both
from tests.e2e.rig import DAYS
from tests.harness import HttpReply
from tests.llama_builds import BUILDS


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    """A daemon on the first build."""
    with running_both(BUILDS[0]) as running:
        yield running


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_passed_reply_any_request_same_as_the_decoders(both: Both, case: Case) -> None:
    """Without a handoff a client gets the decoder's status, fields and bytes, whatever it asks."""
    assert both.wrong_when_passed(case) == []


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.by_handoff], ids=lambda case: case.id
)
def test_handed_off_reply_same_as_the_decoders_after_the_same_prefill(
    both: Both, case: Case
) -> None:
    """After a handoff every byte is what the decoder says when it evaluated the prompt itself."""
    assert both.wrong_when_handed_off(case) == []


def test_handed_off_reply_decided_text_same_as_a_cold_decoders(both: Both) -> None:
    """Where one token is far ahead of the others, the text is the one without any handoff, too."""
    body = {"prompt": DAYS, "max_tokens": 8, "temperature": 0, "seed": 1, "stream": True}
    request = Request("POST", "/v1/completions", body)
    both.prepare_state(both.ids_of(request)[:-1])
    both.empty_slot()
    direct = both.direct(request)
    both.empty_slot()
    through = both.through(request)
    assert through.field(b"x-onebit-handoff") == b"file"
    assert text_of(through) == text_of(direct)
    assert "day" in text_of(through)


@pytest.mark.parametrize(
    "shut", SHUT, ids=lambda shut: f"{shut.request.method}-{shut.request.target}"
)
def test_shut_endpoint_answers_403_with_its_reason(both: Both, shut: Shut) -> None:
    """What would act behind onebitd's back is refused, and the answer says why."""
    answer = both.through(shut.request)
    assert answer.status == 403
    error = json.loads(answer.body)["error"]
    assert (error["type"], error["code"]) == ("permission_error", 403)
    assert shut.why in error["message"]


def test_page_known_to_the_client_not_sent_again(both: Both) -> None:
    """A client that names the page's tag gets the decoder's 304, and no byte of a body."""
    gzip = ("Accept-Encoding: gzip",)
    tag = both.direct(Request("GET", "/", headers=gzip)).field(b"etag")
    if tag is None:
        pytest.skip("this build has no page")
    known = Request("GET", "/", headers=(*gzip, f"If-None-Match: {tag.decode()}"))
    direct, through = both.direct(known), both.through(known)
    assert direct.status == 304
    assert differences(direct, through) == []


def test_head_of_what_is_polled_same_as_the_decoders_get(both: Both) -> None:
    """The decoder is asked for the whole, as it serves a GET within the next second, too."""
    target = "/slots?head"
    whole = both.direct(Request("GET", target))
    head = dataclasses.replace(whole, method="HEAD", body=b"")
    assert differences(head, both.through(Request("HEAD", target))) == []


@pytest.mark.parametrize("target", ["/v1/models", "/metrics?pages", "/nowhere"])
def test_reply_to_a_page_only_its_origin_is_different(both: Both, target: str) -> None:
    """A page gets the decoder's reply, and its own origin as the one that may read it."""
    for origin in ("http://localhost:1", "http://localhost:2"):
        asked = Request("GET", target, headers=(f"Origin: {origin}",))
        direct, through = without_cors(both.direct(asked)), both.through(asked)
        assert differences(direct, without_cors(through)) == []
        allowed = [value for name, value in through.headers if name == ALLOWED]
        assert allowed == [origin.encode()]


def test_cases_every_endpoint_of_the_decoder_has_one() -> None:
    """No endpoint of the list is left out, and no case is of anything that is not listed."""
    covered = {case.subject for case in CASES} | {shut.subject for shut in SHUT}
    assert set(ENDPOINTS) - covered == set()
    assert covered - set(ENDPOINTS) <= set(OTHER_SUBJECTS)
    names = [case.id for case in CASES]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_cases_every_generating_endpoint_has_both_ways(stream: bool) -> None:
    """What the decoder can stream is asked for whole and streamed."""
    ways = {
        case.subject for case in CASES if case.generates and case.request.body["stream"] is stream
    }
    wanted = ("completion", "v1/completions", "v1/chat/completions", "v1/responses", "v1/messages")
    assert ways == {f"POST /{path}" for path in wanted}


DIRECT = Answer("GET", 200, [(b"server", b"a"), (b"content-length", b"2")], b"{}")


@pytest.mark.parametrize(
    "changed",
    [
        {"status": 201},
        {"body": b"[]"},
        {"headers": [(b"content-length", b"2")]},
        {"headers": [(b"server", b"b"), (b"content-length", b"2")]},
        {"headers": [(b"server", b"a"), (b"x-more", b"1"), (b"content-length", b"2")]},
        {"headers": [(b"server", b"a"), (b"server", b"a"), (b"content-length", b"2")]},
        {"headers": [(b"server", b"a"), (b"content-length", b"3")]},
        {"headers": [(b"server", b"a")]},
        {"method": "HEAD", "headers": [(b"server", b"a"), (b"content-length", b"0")]},
    ],
    ids=str,
)
def test_differences_anything_changed_found(changed: dict[str, Any]) -> None:
    """A reply that a client could tell from the decoder's is told from it here."""
    assert differences(DIRECT, DIRECT) == []
    assert len(differences(DIRECT, dataclasses.replace(DIRECT, **changed))) == 1


ALLOWED = b"access-control-allow-origin"


def without_cors(answer: Answer) -> Answer:
    """Return the reply without what is for browsers of other origins."""
    kept = [
        (name, value)
        for name, value in answer.headers
        if name != b"vary" and not name.startswith(b"access-control-")
    ]
    return dataclasses.replace(answer, headers=kept)


def text_of(answer: Answer) -> str:
    """Return the text of a completion, whole or streamed."""
    return HttpReply(answer.status, headers_of(answer), answer.body).text


def headers_of(answer: Answer) -> dict[str, str]:
    """Return the fields as text."""
    return {name.decode(): value.decode() for name, value in answer.headers}
