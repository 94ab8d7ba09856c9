"""Both APIs as OpenAPI documents: what a fuzzer of APIs needs to make up requests.

Shapes are loose on purpose where llama-server is the judge of them.
"""

from __future__ import annotations

from typing import Any, Final

TEXT: Final = {"type": "string"}
COUNT: Final = {"type": "integer", "minimum": 0, "maximum": 3}
ANSWERS: Final = {"default": {"description": "a JSON object"}}
MESSAGES: Final = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": ["system", "user", "assistant", "tool"]},
            "content": {"anyOf": [TEXT, {"type": "array", "items": {"type": "object"}}]},
        },
    },
}
PROMPT: Final = {
    "anyOf": [
        TEXT,
        {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 50_000}},
        {"type": "array", "items": {"anyOf": [TEXT, {"type": "integer"}]}},
    ]
}


def _post(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    policy = {"name": "X-Onebit-Handoff", "in": "header", "schema": TEXT}
    return {"post": {"requestBody": body, "parameters": [policy], "responses": ANSWERS}}


def _get(**query: dict[str, Any]) -> dict[str, Any]:
    parameters = [{"name": name, "in": "query", "schema": kind} for name, kind in query.items()]
    return {"get": {"parameters": parameters, "responses": ANSWERS}}


def _document(title: str, paths: dict[str, Any]) -> dict[str, Any]:
    return {"openapi": "3.0.3", "info": {"title": title, "version": "1"}, "paths": paths}


GENERATION: Final = {"max_tokens": COUNT, "stream": {"type": "boolean"}, "temperature": COUNT}
PUBLIC: Final = _document(
    "onebitd",
    {
        "/health": _get(),
        "/v1/models": _get(),
        "/props": _get(),
        "/slots": _get(fail_on_no_slot=COUNT),
        "/v1/chat/completions": _post({"messages": MESSAGES, **GENERATION}, ["messages"]),
        "/v1/completions": _post({"prompt": PROMPT, **GENERATION}, ["prompt"]),
        "/completion": _post({"prompt": PROMPT, "n_predict": COUNT}, ["prompt", "n_predict"]),
        "/tokenize": _post({"content": TEXT, "add_special": {"type": "boolean"}}, ["content"]),
        "/apply-template": _post({"messages": MESSAGES}, ["messages"]),
    },
)
CONTROL: Final = _document(
    "onebitd control",
    {
        "/v1/status": _get(),
        "/v1/config": _get(),
        "/v1/costs": _get(),
        "/v1/requests": _get(),
        "/v1/handoffs": _get(
            limit={"type": "integer", "minimum": 0, "maximum": 1000},
            outcome={"enum": ["used", "wasted", "fallback", "skipped", "failed", "cancelled"]},
            since={"type": "string", "format": "date-time"},
        ),
        "/v1/requests/cancel": _post({"request_id": TEXT}, ["request_id"]),
        "/v1/provider/reset": _post({}, []),
        "/v1/reload": _post({}, []),
    },
)
