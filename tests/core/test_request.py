"""Bodies of chats and completions: what can be handed off, and what is sent on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebitd.core import request
from onebitd.core.request import CHAT_PATH, COMPLETIONS_PATH, Chat, Ids, NotText, Prompt, Text

USER = {"role": "user", "content": "hi"}


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [USER], **more}


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (CHAT_PATH, chat(), Chat()),
        (CHAT_PATH, chat(n=1, cache_prompt=True, lora=[]), Chat()),
        (
            CHAT_PATH,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
            Chat(),
        ),
        (
            CHAT_PATH,
            {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]},
            Chat(),
        ),
        (COMPLETIONS_PATH, {"prompt": "a"}, Text("a")),
        (COMPLETIONS_PATH, {"prompt": ""}, Text("")),
        (COMPLETIONS_PATH, {"prompt": ["only"]}, Text("only")),
        (COMPLETIONS_PATH, {"prompt": [1, 2]}, Ids((1, 2))),
        (COMPLETIONS_PATH, {"prompt": [1, "a", 2]}, Text([1, "a", 2])),
    ],
)
def test_parse_text_prompt_can_be_handed_off(
    path: str, body: dict[str, Any], expected: Prompt
) -> None:
    """Each shape that /tokenize turns into the decoder's own ids is taken."""
    assert request.parse(path, json.dumps(body).encode()).prompt == expected


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        (CHAT_PATH, chat(n=2), "n is 2"),
        (CHAT_PATH, chat(cache_prompt=False), "cache_prompt"),
        (CHAT_PATH, chat(lora=[{"id": 0, "scale": 1}]), "LoRA"),
        (
            CHAT_PATH,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            "image_url",
        ),
        (
            CHAT_PATH,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}
                ]
            },
            "input_audio",
        ),
        (CHAT_PATH, {"messages": [{"role": "user", "content": ["bare"]}]}, "not text"),
        (CHAT_PATH, {"messages": "hi"}, "not a list"),
        (CHAT_PATH, {}, "not a list"),
        (COMPLETIONS_PATH, {"prompt": "a", "image_data": [{}]}, "images"),
        (COMPLETIONS_PATH, {"prompt": ["a", "b"]}, "2 prompts"),
        (COMPLETIONS_PATH, {"prompt": [[1], [2]]}, "flat list"),
        (COMPLETIONS_PATH, {"prompt": []}, "neither"),
        (COMPLETIONS_PATH, {"prompt": [1.5]}, "flat list"),
        (COMPLETIONS_PATH, {"prompt": [True]}, "flat list"),
        (COMPLETIONS_PATH, {"prompt": [-1]}, "flat list"),
        (COMPLETIONS_PATH, {"prompt": [2**31]}, "flat list"),
        (COMPLETIONS_PATH, {"prompt": {"prompt_string": "a"}}, "neither"),
        (COMPLETIONS_PATH, {}, "neither"),
    ],
)
def test_parse_anything_else_says_why(path: str, body: dict[str, Any], word: str) -> None:
    """What cannot be handed off has a sentence that names the cause."""
    prompt = request.parse(path, json.dumps(body).encode()).prompt
    assert isinstance(prompt, NotText)
    assert word in prompt.detail


@pytest.mark.parametrize(
    "body",
    [
        chat(n="my secret"),
        {"messages": [{"role": "user", "content": [{"type": "my secret"}]}]},
        {"messages": [{"role": "user", "content": [{"type": {"my": "secret"}}]}]},
    ],
)
def test_parse_a_clients_words_are_in_one_of_two_sentences(body: dict[str, Any]) -> None:
    """Whoever puts a prompt into the wrong field does not have it kept on disk."""
    prompt = request.parse(CHAT_PATH, json.dumps(body).encode()).prompt
    assert isinstance(prompt, NotText)
    assert "secret" in prompt.detail
    assert prompt.brief
    assert "secret" not in prompt.brief


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b'"a"', b"\xff", b"[" * 100_000])
def test_parse_not_an_object_is_the_decoders_to_refuse(body: bytes) -> None:
    """A broken body is no error here, and never raises."""
    parsed = request.parse(CHAT_PATH, body)
    assert isinstance(parsed.prompt, NotText)
    assert parsed.json is None
    assert not parsed.stream


@given(st.binary(max_size=200), st.sampled_from([CHAT_PATH, COMPLETIONS_PATH]))
def test_parse_any_bytes_never_raises(body: bytes, path: str) -> None:
    """Whatever a client sends, parsing answers."""
    request.parse(path, body)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=12), _JSON, max_size=5), st.sampled_from(["", " ", "\n\n"]))
def test_with_slot_any_object_changes_nothing_else(document: dict[str, Any], tail: str) -> None:
    """The body sent on is the client's, plus the two fields."""
    body = (json.dumps(document) + tail).encode()
    sent = json.loads(request.with_slot(body, document))
    assert sent == {**document, "id_slot": 0, "cache_prompt": True}


def test_with_slot_plain_body_keeps_every_byte() -> None:
    """Order, spacing and number formats stay as the client wrote them."""
    body = b'{ "b":1.50,\n "a" : 1e2 }'
    sent = request.with_slot(body, json.loads(body))
    assert sent == b'{ "b":1.50,\n "a" : 1e2 ,"id_slot":0,"cache_prompt":true}'


def test_with_slot_fields_of_the_client_are_replaced_not_repeated() -> None:
    """An id_slot of the client's does not stand beside ours."""
    body = b'{"id_slot": 7, "prompt": "a"}'
    sent = request.with_slot(body, json.loads(body))
    assert sent.count(b"id_slot") == 1
    assert json.loads(sent)["id_slot"] == 0


def test_with_slot_utf16_body_is_written_anew() -> None:
    """A body in another encoding is not cut in the middle of a character."""
    body = json.dumps({"prompt": "a"}).encode("utf-16-be")
    sent = request.with_slot(body, json.loads(body))
    assert json.loads(sent) == {"prompt": "a", "id_slot": 0, "cache_prompt": True}


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_parse_number_that_is_none_is_the_decoders_to_refuse(number: str) -> None:
    """What Python takes and the decoder does not goes on as it came, without a handoff."""
    parsed = request.parse(COMPLETIONS_PATH, f'{{"prompt": "a", "x": {number}}}'.encode())
    assert isinstance(parsed.prompt, NotText)


def test_parse_endless_id_list_is_not_looked_through() -> None:
    """A list longer than any context is no prompt to hand over."""
    body = json.dumps({"prompt": [1] * ((1 << 22) + 1)}).encode()
    assert isinstance(request.parse(COMPLETIONS_PATH, body).prompt, NotText)
