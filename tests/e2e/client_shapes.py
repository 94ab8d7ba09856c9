"""Requests as two applications send them: what Open WebUI and Continue put into heads and bodies.

Written down from what their public sources do when they talk to a server of the OpenAI API.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PROMPT = "Why is the sky blue?"


@dataclass(frozen=True)
class Shape:
    """One request.

    Attributes:
        outcome: that of its record; None where the request is passed on without one.
        reason: of a record with another outcome than used.
        status: of the reply.
    """

    name: str
    path: str
    body: Mapping[str, Any] | None
    headers: Mapping[str, str]
    outcome: str | None = "used"
    reason: str | None = None
    status: int = 200


# Who asks is told where the administrator wants it; names are percent-encoded.
_OPEN_WEBUI = {
    "Accept": "*/*",
    "Accept-Encoding": "gzip, deflate, br",
    "User-Agent": "Python/3.11 aiohttp/3.13.2",
    "X-OpenWebUI-User-Name": "J%C3%BCrgen",
    "X-OpenWebUI-User-Id": "6d1f4f2e-60a8-4b62-8f5f-6a2f0d7f2a11",
    "X-OpenWebUI-User-Email": "user@example.com",
    "X-OpenWebUI-User-Role": "admin",
    "X-OpenWebUI-Chat-Id": "0b7c3f0e-8a0d-4b52-9d61-6a8e7b1f5c22",
    "X-OpenWebUI-Message-Id": "9c1a7d53-33a5-4a3c-8f3b-1a3f8b0e7d33",
}
_CONTINUE = {"Accept": "*/*", "User-Agent": "node-fetch", "api-key": "sk-client"}

_SYSTEM = {"role": "system", "content": "You are helpful."}
_USER = {"role": "user", "content": PROMPT}
_PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file",
        "parameters": {
            "type": "object",
            "required": ["path"],
            "properties": {"path": {"type": "string"}},
        },
    },
}
_SAMPLING = {"temperature": 0.5, "top_p": 0.9, "frequency_penalty": 0, "presence_penalty": 0}

SHAPES = (
    Shape("open-webui-models", "/v1/models", None, _OPEN_WEBUI, outcome=None),
    Shape(
        "open-webui-chat",
        "/v1/chat/completions",
        {
            "stream": True,
            "model": "tiny",
            "messages": [_SYSTEM, _USER],
            "stream_options": {"include_usage": True},
            **_SAMPLING,
        },
        _OPEN_WEBUI,
    ),
    # A title, tags and follow-up questions are asked for after the first reply.
    Shape(
        "open-webui-title",
        "/v1/chat/completions",
        {"model": "tiny", "messages": [_USER], "stream": False, "max_completion_tokens": 1000},
        _OPEN_WEBUI,
    ),
    # With a file's text, or once there has been a picture, contents are lists of parts.
    Shape(
        "open-webui-parts",
        "/v1/chat/completions",
        {
            "stream": True,
            "model": "tiny",
            "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
            "stream_options": {"include_usage": True},
        },
        _OPEN_WEBUI,
    ),
    Shape(
        "open-webui-picture",
        "/v1/chat/completions",
        {
            "stream": True,
            "model": "tiny",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, _PICTURE]}],
            "stream_options": {"include_usage": True},
        },
        _OPEN_WEBUI,
        outcome="skipped",
        reason="not_text",
        status=500,  # the decoder's own words: it has no projector
    ),
    Shape("continue-models", "/v1/models", None, _CONTINUE, outcome=None),
    Shape(
        "continue-chat",
        "/v1/chat/completions",
        {
            "messages": [_SYSTEM, _USER, {"role": "assistant", "content": " "}, _USER],
            "model": "tiny",
            "max_tokens": 12,
            "stream": True,
            "stop": ["<|im_end|>"],
            **_SAMPLING,
        },
        _CONTINUE,
    ),
    Shape(
        "continue-agent",
        "/v1/chat/completions",
        {
            "messages": [_SYSTEM, _USER],
            "model": "tiny",
            "max_tokens": 12,
            "stream": True,
            "tools": [_TOOL],
            "parallel_tool_calls": False,
            "stream_options": {"include_usage": True},
        },
        _CONTINUE,
    ),
    # Autocomplete: the template of the model's own fill-in-the-middle tokens is filled in there.
    Shape(
        "continue-autocomplete",
        "/v1/completions",
        {
            "model": "tiny",
            "max_tokens": 12,
            "temperature": 0.01,
            "stream": True,
            "stop": ["<|endoftext|>", "\n\n"],
            "prompt": "<|fim_prefix|>def f():\n<|fim_suffix|>\n<|fim_middle|>",
        },
        _CONTINUE,
    ),
    # Its provider "openai" where the model is one of Mistral's; llama-server has no such path.
    Shape(
        "continue-fim",
        "/v1/fim/completions",
        {"model": "tiny", "prompt": "def f():\n", "suffix": "\n", "max_tokens": 12, "stream": True},
        _CONTINUE,
        outcome=None,
        status=404,
    ),
    # Its provider "llama.cpp" asks for llama-server's own endpoint, which is no handoff route.
    Shape(
        "continue-llama-cpp",
        "/completion",
        {"prompt": PROMPT, "stream": True, "n_predict": 12, "temperature": 0.5, "stop": ["\n"]},
        _CONTINUE,
        outcome=None,
    ),
)
