"""A chat or completion body: can it be handed off, and if not why.

The rules are those measured on llama-server: which prompt shapes `/tokenize` turns into the ids
that the decoder will evaluate, and which fields throw a handoff away.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, Final

CHAT_PATH: Final = "/v1/chat/completions"
COMPLETIONS_PATH: Final = "/v1/completions"
HANDOFF_PATHS: Final = (CHAT_PATH, COMPLETIONS_PATH)

_MAX_LISTED: Final = 1 << 22
_LAST_ID: Final = 2**31 - 1
"""Token ids are int32 in llama.cpp."""
_TEXT_PARTS: Final = frozenset({"text", "refusal", "thinking", "reasoning"})


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
    """The template decides the prompt: the body goes to `/apply-template` as it came."""


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """A prompt that `/tokenize` takes: a string, or a flat list of ids and strings."""

    content: str | list[int | str]


@dataclasses.dataclass(frozen=True, slots=True)
class Ids:
    """A prompt that is a list of token ids already."""

    ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class NotText:
    """Cannot be handed off.

    Attributes:
        detail: a sentence.
        brief: the sentence without words of the client's; None: it has none.
    """

    detail: str
    brief: str | None = None


Prompt = Chat | Text | Ids | NotText


@dataclasses.dataclass(frozen=True, slots=True)
class ParsedRequest:
    """What a body on the handoff route asks for."""

    prompt: Prompt
    stream: bool
    json: Mapping[str, Any] | None
    """The parsed object, None when the body is not a JSON object."""


def parse(path: str, body: bytes) -> ParsedRequest:
    """Read a request body; never fails: what cannot be understood is the decoder's to refuse."""
    try:
        document = json.loads(body, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return ParsedRequest(NotText("the body is not JSON"), stream=False, json=None)
    if not isinstance(document, dict):
        return ParsedRequest(NotText("the body is not a JSON object"), stream=False, json=None)
    prompt = _refused_by_field(document) or (
        _chat(document) if path == CHAT_PATH else _completion(document)
    )
    return ParsedRequest(prompt, stream=document.get("stream") is True, json=document)


def _finite(text: str) -> float:
    """Refuse what JSON has no word for (NaN) and what a double cannot hold (1e999).

    Python takes both and the decoder neither: it must get the body as it came, and say so.
    """
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is not a finite number")
    return value


def _refused_by_field(body: Mapping[str, Any]) -> NotText | None:
    """Fields that would make the decoder ignore or misread a restored prompt."""
    if body.get("cache_prompt", True) is False:
        return NotText("cache_prompt is false")
    if body.get("n", 1) not in (1, None):
        return NotText(f"n is {str(body['n'])[:20]}", "n is not 1")
    if body.get("lora"):
        return NotText("the request sets LoRA adapters of its own")
    if body.get("image_data") or body.get("multimodal_data"):
        return NotText("the prompt has images or audio")
    return None


def _chat(body: Mapping[str, Any]) -> Prompt:
    messages = body.get("messages")
    if not isinstance(messages, list):
        return NotText("messages is not a list")
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            continue
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if not isinstance(kind, str) or kind not in _TEXT_PARTS:
                of_type = f"a message has a part of type {str(kind)[:40]}, not text"
                return NotText(of_type, "a message has a part that is not text")
    return Chat()


def _completion(body: Mapping[str, Any]) -> Prompt:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return Text(prompt)
    if not isinstance(prompt, list) or not prompt:
        return NotText("the prompt is neither a string nor a list of token ids")
    if len(prompt) > _MAX_LISTED:
        return NotText(f"a prompt of {len(prompt)} items is longer than any context")
    kinds = set(map(type, prompt))  # no loop of ours over what may be a million ids
    if kinds == {int} and min(prompt) >= 0 and max(prompt) <= _LAST_ID:
        return Ids(tuple(prompt))
    if len(prompt) == 1 and isinstance(prompt[0], str):
        return Text(prompt[0])
    if kinds == {str}:
        return NotText(f"{len(prompt)} prompts at once")
    if all(_is_id(item) or isinstance(item, str) for item in prompt):
        return Text(list(prompt))
    return NotText("the prompt is not one flat list of token ids and strings")


def _is_id(item: object) -> bool:
    """A bool is no id."""
    return isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= _LAST_ID


def with_slot(body: bytes, document: Mapping[str, Any]) -> bytes:
    """Return the body that makes the decoder look for the prompt in slot 0.

    The two fields are put in front of the closing brace, so that every other byte stays as the
    client sent it; only a body that has such fields already is written anew.
    """
    if "id_slot" in document or "cache_prompt" in document:
        return json.dumps({**document, "id_slot": 0, "cache_prompt": True}).encode()
    head = body.rstrip()
    if not head.endswith(b"}") or b"\0" in body:  # json.loads also reads UTF-16 and UTF-32
        return json.dumps({**document, "id_slot": 0, "cache_prompt": True}).encode()
    comma = b"," if document else b""
    return head[:-1] + comma + b'"id_slot":0,"cache_prompt":true}'
