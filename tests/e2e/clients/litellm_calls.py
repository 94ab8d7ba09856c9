"""Asks through litellm. Says `ready`, reads `{"base_url", "key"}`, and writes what it got as JSON.

Each request has an X-Request-Id by which the test finds its record.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

MODEL = "openai/tiny"
MESSAGES = [{"role": "user", "content": "Hello there"}]


def main() -> None:
    """Make the calls."""
    print("ready", flush=True)
    told = json.loads(sys.stdin.readline())
    common: dict[str, Any] = {"model": MODEL, "api_base": told["base_url"], "max_retries": 0}
    common |= {"temperature": 0, "max_tokens": 8, "timeout": 60}

    def chat(name: str, key: str = told["key"], **more: Any) -> Any:
        headers = {"X-Request-Id": f"litellm-{name}"}
        return litellm.completion(
            messages=MESSAGES, api_key=key, extra_headers=headers, **common, **more
        )

    found: dict[str, Any] = {}
    whole = chat("whole")
    found["whole"] = whole.choices[0].message.content
    found["usage"] = whole.usage.completion_tokens
    parts = list(chat("stream", stream=True, stream_options={"include_usage": True}))
    found["stream"] = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    found["stream_usage"] = [
        part.usage.completion_tokens for part in parts if getattr(part, "usage", None)
    ]
    try:
        chat("refused", key="sk-wrong")
    except litellm.AuthenticationError as error:
        found["refused"] = str(error)
    text = litellm.text_completion(
        prompt="Hello",
        api_key=told["key"],
        extra_headers={"X-Request-Id": "litellm-text"},
        **{**common, "model": "text-completion-openai/tiny"},
    )
    found["text"] = text.choices[0].text
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
