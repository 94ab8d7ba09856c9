"""Clients that ask for what has one right answer, and now and then behave badly."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tests.e2e.standin_route import chat_prompt, said
from tests.standins import tiny_decoder

PATIENCE_S: Final = 60.0
"""An answer that takes longer is none."""
WORDS: Final = ("lamb", "fleece", "snow", "school", "rule", "day", "teacher", "eager", "love")
POLICIES: Final = ("always", None, "strict", "auto", *("never",) * 5)
BEHAVIOURS: Final = ("reads",) * 12 + ("leaves at once", "leaves in the middle", "reads slowly")


class Wrong(AssertionError):
    """A reply that is neither the right one nor a clear error."""


@dataclass(frozen=True)
class Ask:
    """One request, and what must come of it; `expected` is None where no text is known."""

    path: str
    document: dict[str, Any]
    headers: dict[str, str]
    expected: str | None
    behaviour: str

    @property
    def streams(self) -> bool:
        """Whether the reply is asked for as a stream."""
        return bool(self.document["stream"])


@dataclass(frozen=True)
class Seen:
    """What became of a request: begin and end (CLOCK_MONOTONIC), and the outcome in a few words."""

    begin: float
    end: float
    outcome: str


def make_ask(rng: random.Random, *, judged: bool = True) -> Ask:
    """Make up a request; some prompts come again, some go on where another ended."""
    content = " ".join(rng.choices(WORDS, k=rng.choice((1, 3, 8, 20))))
    count = rng.choice((1, 2, 4, 8))
    document: dict[str, Any] = {"max_tokens": count, "temperature": 0, "seed": 1}
    document["stream"] = rng.random() < 0.5
    policy = rng.choice(POLICIES)
    headers = {"Content-Type": "application/json", "Connection": "close"}
    if policy is not None:
        headers["X-Onebit-Handoff"] = policy
    if rng.random() < 0.3:
        path, prompt = "/v1/completions", content
        document["prompt"] = content
    else:
        path = "/v1/chat/completions"
        messages: list[dict[str, object]] = [{"role": "user", "content": content}]
        prompt = chat_prompt(content)
        if rng.random() < 0.3:
            reply = said(prompt, 2)
            messages += [{"role": "assistant", "content": reply}]
            messages += [{"role": "user", "content": rng.choice(WORDS)}]
            prompt = tiny_decoder.template(messages)
        document["messages"] = messages
    expected = said(prompt, count) if judged else None
    return Ask(path, document, headers, expected, rng.choice(BEHAVIOURS))


def carry_out(port: int, ask: Ask, rng: random.Random) -> str:
    """Send it, and return the outcome.

    Raises:
        Wrong: neither the right text nor a clear error came, or nothing in time.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("POST", ask.path, json.dumps(ask.document), ask.headers)
        if ask.behaviour == "leaves at once":
            time.sleep(rng.choice((0.0, 0.01, 0.1, 0.5)))
            return "left"
        response = connection.getresponse()
        if response.status != 200:
            return _refused(response.status, response.read())
        if ask.behaviour == "leaves in the middle":
            response.read(rng.randrange(1, 200))
            return "left"
        return _judge(ask, *_read(response, ask.behaviour == "reads slowly"))
    except TimeoutError as error:
        raise Wrong(f"no answer within {PATIENCE_S:g} s: {ask}") from error
    except http.client.HTTPException as error:
        raise Wrong(f"no reply at all ({error!r}): {ask}") from error
    finally:
        connection.close()


def _refused(status: int, body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        message, kind = error["message"], error["type"]
    except (ValueError, LookupError, TypeError):
        raise Wrong(f"status {status} without a reason: {body[:300]!r}") from None
    if not message or status < 400:
        raise Wrong(f"status {status}: {body[:300]!r}")
    return f"{status} {kind}"


def _read(response: http.client.HTTPResponse, slowly: bool) -> tuple[bytes, bool]:
    """Return the body, and whether it had its end."""
    body = bytearray()
    while True:
        try:
            piece = response.read1(64 if slowly else 1 << 16)
        except (http.client.IncompleteRead, ConnectionResetError):
            return bytes(body), False
        if not piece:
            # read1 does not tell a body that lacks its end from one that has it.
            return bytes(body), not response.length
        body += piece
        if slowly:
            time.sleep(0.005)


def _judge(ask: Ask, body: bytes, is_whole: bool) -> str:
    if not ask.streams:
        if not is_whole:
            return "broken off"
        text = _text_of(json.loads(body))
        if ask.expected not in (None, text):
            raise Wrong(f"{text!r} instead of {ask.expected!r}: {ask}")
        return "right"
    lines = [line[5:].strip() for line in body.split(b"\n") if line.startswith(b"data:")]
    is_done = lines[-1:] == [b"[DONE]"]
    documents = [json.loads(line) for line in lines if line != b"[DONE]"]
    errors = [one["error"] for one in documents if "error" in one]
    text = "".join(_text_of(one) for one in documents if "error" not in one)
    if errors:
        if is_done or not errors[0]["message"] or not (ask.expected or text).startswith(text):
            raise Wrong(f"an error inside a stream: {body[-600:]!r}, {ask}")
        return "error event"
    if not is_done or not is_whole or ask.expected not in (None, text):
        raise Wrong(f"{text!r} instead of {ask.expected!r}, {body[-300:]!r}: {ask}")
    return "right"


def _text_of(document: dict[str, Any]) -> str:
    found = ""
    for choice in document.get("choices", []):
        message = choice.get("delta") or choice.get("message") or choice
        found += message.get("content") or message.get("text") or ""
    return found


class Crowd:
    """So many clients at once, each with a seed of its own, until so many requests were sent.

    Args:
        port: of the daemon, asked for anew each time.
        seed, clients, requests: see there.
        judged: by the stand-in's known texts.

    Attributes:
        seen: what became of each request.
        wrong: what should not have been; the first stops everybody.
    """

    def __init__(
        self,
        port: Callable[[], int],
        seed: int,
        clients: int,
        requests: int,
        *,
        judged: bool = True,
    ) -> None:
        self._port = port
        self._judged = judged
        self._left = requests
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(seed * 1000 + number,), daemon=True)
            for number in range(clients)
        ]
        self.seen: list[Seen] = []
        self.wrong: list[str] = []

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    @property
    def is_busy(self) -> bool:
        """True until the last reply has come."""
        return any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """Send no more, and wait for what is in flight."""
        with self._lock:
            self._left = 0
        for thread in self._threads:
            thread.join(PATIENCE_S + 5)

    def _take(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0 and not self.wrong

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)  # noqa: S311 - the same requests each time
        while self._take():
            ask = make_ask(rng, judged=self._judged)
            begin = time.monotonic()
            try:
                outcome = carry_out(self._port(), ask, rng)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is what to show
                self.wrong.append(f"{type(error).__name__}: {error}")
                return
            self.seen.append(Seen(begin, time.monotonic(), outcome))


def outcomes_of(seen: Sequence[Seen]) -> list[str]:
    """Return the different outcomes, the right one first."""
    found = {one.outcome for one in seen}
    return sorted(found, key=lambda name: (name != "right", name))
