"""Asks through LangChain. Says `ready`, reads `{"base_url", "key"}`, and writes what it got.

Each request has an X-Request-Id by which the test finds its record.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from langchain_openai import ChatOpenAI

SAID = "Hello there"


def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"rain in {city}"


def main() -> None:
    """Make the calls."""
    print("ready", flush=True)
    told = json.loads(sys.stdin.readline())

    def chat(name: str, key: str = told["key"]) -> ChatOpenAI:
        return ChatOpenAI(
            model="tiny",
            base_url=told["base_url"],
            api_key=key,
            temperature=0,
            max_tokens=8,
            max_retries=0,
            timeout=60,
            stream_usage=True,
            default_headers={"X-Request-Id": f"langchain-{name}"},
        )

    found: dict[str, Any] = {}
    whole = chat("whole").invoke(SAID)
    found["whole"] = whole.content
    found["usage"] = whole.usage_metadata
    total = None
    for part in chat("stream").stream(SAID):
        total = part if total is None else total + part
    assert total is not None
    found["stream"], found["stream_usage"] = total.content, total.usage_metadata
    found["tools"] = chat("tools").bind_tools([weather]).invoke(SAID).content
    try:
        chat("refused", key="sk-wrong").invoke(SAID)
    except openai.AuthenticationError as error:
        found["refused"] = str(error)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
