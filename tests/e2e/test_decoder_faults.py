"""A decoder that fails without ending: errors to everything, silence, no HTTP, half a reply.

Stand-ins play it but for the last tests, which stop a real llama-server in its tracks, and have it
evaluate a prompt for longer than a hang may last.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.e2e.rig import BACKEND_ARGS, ENDLESS, LONG, MAX_TOKENS, RHYME, Prepared
from tests.e2e.standin_route import Background, Route, leaves_nothing, running_route, said
from tests.harness import HttpReply, RunningDaemon, raw_connection, running_onebitd, wait_until
from tests.llama_builds import LlamaBuild, LlamaModel

HANG_S = 1.5
SHORT_HANG_S = 0.5
CONFIG = f"""
[http]
keepalive_s = 0.2
[backend]
hang_s = {HANG_S}
restart_max = 20
[handoff]
policy = "never"
"""
PROMPT = "Hello there"
COMPLETIONS = "/v1/completions"


@contextlib.contextmanager
def posted(port: int, more: dict[str, Any]) -> Iterator[socket.socket]:
    """Post a completion on a connection of its own, which ends with the reply."""
    body = json.dumps({"temperature": 0, "seed": 1, "max_tokens": 8, **more}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with raw_connection(port) as client:
        client.sendall(f"{head}Connection: close\r\n\r\n".encode() + body)
        yield client


def read_to_end(client: socket.socket) -> bytes:
    """Read until the other end closes."""
    received = b""
    while data := client.recv(65536):
        received += data
    return received


@pytest.fixture(scope="module")
def first() -> Iterator[Route]:
    """One daemon for some tests; the pause before a restart grows with each."""
    with running_route(config=CONFIG, provider=False) as route:
        yield route


@pytest.fixture(scope="module")
def second() -> Iterator[Route]:
    """And one for the others."""
    with running_route(config=CONFIG, provider=False) as route:
        yield route


class Decoder:
    """The decoder as it was at the start of a test."""

    def __init__(self, route: Route) -> None:
        self.route = route
        self.before = route.daemon.status()["backend"]

    def behave(self, knobs: str) -> None:
        """Turn its knobs, which its successor will not have."""
        count = self.route.home / f"count-{self.before['pid']}"
        self.route.behave(decoder=f"--for-pid {self.before['pid']} --count-file {count} {knobs}")

    def ask(self, prompt: str = PROMPT, **more: Any) -> HttpReply:
        """Post a completion."""
        return self.route.daemon.completion(prompt, **more)

    def ask_in_line(self, count: int) -> list[Background]:
        """Post so many completions, each when the one before has its place in the line."""
        asked = []
        for number in range(count):
            asked.append(Background(self.ask, f"{PROMPT} {number}"))
            wait_until(partial(self._is_pending, number), "its place in the line")
        return asked

    def _is_pending(self, count: int) -> bool:
        return bool(self.route.daemon.status()["queue"]["pending"] == count)

    def generated(self) -> list[str]:
        """Return the prompts that reached a decoder, in order."""
        return [json.loads(one["body"])["prompt"] for one in self.route.backend(COMPLETIONS)]

    def assert_right(self, reply: HttpReply, prompt: str = PROMPT) -> None:
        """See a whole, right reply."""
        assert (reply.status, reply.text) == (200, said(prompt))

    def wait_replaced(self, *why: str) -> None:
        """Wait for its one successor, and see why it had to go."""

        def backend() -> Any:
            found = self.route.daemon.status()["backend"]
            is_new = found["restarts"] > self.before["restarts"]
            return found if is_new and found["state"] == "ready" else None

        found = wait_until(backend, "another decoder")
        assert found["restarts"] == self.before["restarts"] + 1
        for words in why:
            assert words in found["last_exit"]["reason"]

    def wait_probed(self) -> None:
        """Wait until it was found well."""
        wait_until(lambda: self.route.daemon.log_records("backend_probed"), "a probe")
        assert self.route.daemon.status()["backend"] == self.before | {
            "rss_bytes": self.route.daemon.status()["backend"]["rss_bytes"]
        }


@pytest.fixture
def one(first: Route) -> Iterator[Decoder]:
    """A decoder of the first daemon."""
    with leaves_nothing(first):
        yield Decoder(first)


@pytest.fixture
def two(second: Route) -> Iterator[Decoder]:
    """A decoder of the second daemon."""
    with leaves_nothing(second):
        yield Decoder(second)


# --- errors to everything -------------------------------------------------------------------


def test_decoder_that_fails_one_request_is_probed_and_kept(one: Decoder) -> None:
    """Some requests are answered with a 500 by a decoder that is well."""
    one.behave("--reply-500-on completion:1")
    assert one.ask().status == 500
    one.wait_probed()
    one.assert_right(one.ask())


def test_decoder_that_answers_500_to_everything_is_replaced(two: Decoder) -> None:
    """Its /health says ok; the client gets its error, and the next client a reply."""
    two.behave("--reply-500-on all")
    failed = two.ask()
    assert (failed.status, failed.json["error"]["message"]) == (500, "Invalid input batch.")
    two.wait_replaced("it answers 500 to everything: 1 in a row, and 2 times one token")
    two.assert_right(two.ask())


def test_decoder_that_fails_three_requests_in_a_line_is_replaced_before_the_next(
    two: Decoder,
) -> None:
    """A line that is never empty needs no quiet moment: whoever is next waits for the probe."""
    two.behave("--hold-on completion")
    asked = two.ask_in_line(5)
    two.behave("--reply-500-on all")
    replies = [each.join() for each in asked]
    assert [reply.status for reply in replies] == [200, 500, 500, 500, 200]
    for number in (0, 4):
        two.assert_right(replies[number], f"{PROMPT} {number}")
    two.wait_replaced("it answers 500 to everything: 3 in a row")


# --- silence --------------------------------------------------------------------------------


def test_decoder_that_stops_answering_is_replaced_and_the_line_goes_on(two: Decoder) -> None:
    """/health answers still; the request that met it is tried again, the others come after it."""
    two.behave("--hang-on completion:1")
    asked = two.ask_in_line(4)
    for number, each in enumerate(asked):
        two.assert_right(each.join(), f"{PROMPT} {number}")
    two.wait_replaced("it hung: no byte of an answer", "/health answered", "SIGKILL")
    assert two.generated() == [f"{PROMPT} {number}" for number in (0, 0, 1, 2, 3)]


# --- the end of its process -----------------------------------------------------------------


def test_decoder_that_dies_with_three_waiting_all_are_answered_in_order(one: Decoder) -> None:
    """The one that has the slot is tried again, the others had nothing to lose."""
    one.behave("--hold-on completion")
    asked = one.ask_in_line(4)
    os.kill(one.before["pid"], signal.SIGKILL)
    for number, each in enumerate(asked):
        one.assert_right(each.join(), f"{PROMPT} {number}")
    one.wait_replaced("SIGKILL")
    assert one.generated() == [f"{PROMPT} {number}" for number in (0, 0, 1, 2, 3)]


def test_decoder_that_dies_after_comments_the_stream_goes_on(one: Decoder) -> None:
    """The head and comments are with the client; it gets every event from the new decoder."""
    one.behave("--prefill-delay-per-token 3")
    with posted(one.route.daemon.port, {"prompt": PROMPT, "stream": True}) as client:
        received = b""
        while received.count(b": waiting") < 2:
            received += client.recv(65536)
        os.kill(one.before["pid"], signal.SIGKILL)
        received += read_to_end(client)
    assert received.startswith(b"HTTP/1.1 200 ")
    events = [line for line in received.split(b"\n") if line.startswith(b"data: {")]
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in events]
    assert "".join(texts) == said(PROMPT)
    assert b"data: [DONE]" in received
    one.wait_replaced("SIGKILL")


def test_decoder_that_dies_in_a_json_body_the_client_sees_it_cut(one: Decoder) -> None:
    """Bytes that are with the client cannot be taken back; they never look like a whole reply."""
    one.behave("--cut-body 40")
    with posted(one.route.daemon.port, {"prompt": PROMPT}) as client:
        received = read_to_end(client)
    head_part, _, body_part = received.partition(b"\r\n\r\n")
    assert head_part.startswith(b"HTTP/1.1 200 ")
    assert len(body_part) == 40
    one.wait_replaced("GGML_ASSERT")
    record = one.route.daemon.handoffs()[-1]
    assert (record["outcome"], record["reason"]) == ("failed", "backend_down")


# --- what is no reply -----------------------------------------------------------------------


def test_decoder_that_answers_garbage_is_a_502_and_is_probed(one: Decoder) -> None:
    """It lives, so it is not waited for, and one such answer is not enough to end it."""
    probed = len(one.route.daemon.log_records("backend_probed"))
    one.behave("--garbage-on completion:1")
    reply = one.ask()
    assert (reply.status, reply.json["error"]["message"]) == (
        502,
        "the decoder hung up on this request",
    )
    wait_until(lambda: len(one.route.daemon.log_records("backend_probed")) == probed + 1, "a probe")
    one.assert_right(one.ask())
    assert one.route.daemon.status()["backend"]["pid"] == one.before["pid"]


def test_decoder_that_hangs_up_on_everything_is_replaced(two: Decoder) -> None:
    """Two seconds are left to it to turn out dead; then it is a 502, and it has to go."""
    two.behave("--close-on all")
    assert two.ask().status == 502
    two.wait_replaced("it answers nothing of use: 1 in a row, and 2 times one token")
    two.assert_right(two.ask())


def test_decoder_that_ends_a_stream_too_soon_the_client_sees_an_error(one: Decoder) -> None:
    """A stream that has lost its end never ends as if it were whole."""
    one.behave("--truncate-stream 3")
    reply = one.ask(stream=True)
    assert reply.status == 200
    assert len(reply.events) == 4
    assert reply.events[-1]["error"]["code"] == 500
    assert b"[DONE]" not in reply.body
    record = one.route.record_of(reply)
    assert (record["outcome"], record["reason"]) == ("failed", "backend_down")


# --- the real one ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(parts: tuple[LlamaBuild, LlamaModel]) -> Iterator[RunningDaemon]:
    """A daemon on a real decoder that may hang for a moment only."""
    build, model = parts
    with running_onebitd(
        model=model.path,
        llama_server=build.program,
        backend_args=[*BACKEND_ARGS, *build.extra_args],
        config=f"[backend]\nhang_s = {SHORT_HANG_S}\n",
    ) as daemon:
        yield daemon


def test_real_decoder_prefills_for_longer_than_a_hang_may_last_and_is_let(
    real: RunningDaemon,
) -> None:
    """Not a byte of the reply for twice `backend.hang_s` and more, and yet no restart."""
    reply = real.completion(LONG, max_tokens=2)
    assert reply.status == 200
    assert reply.json["timings"]["prompt_ms"] > 2000 * SHORT_HANG_S
    assert real.status()["backend"]["restarts"] == 0


def test_real_decoder_stopped_in_a_stream_is_replaced_and_the_next_reply_right(
    real: RunningDaemon, prepared: Prepared
) -> None:
    """The client of the stream gets an error event; the reason names the stopped process."""
    with posted(real.port, {"prompt": RHYME, "stream": True, **ENDLESS}) as stream:
        received = b""
        while b"data: " not in received:
            received += stream.recv(65536)
        os.kill(real.status()["backend"]["pid"], signal.SIGSTOP)
        following = Background(partial(real.completion, RHYME, max_tokens=MAX_TOKENS))
        received += read_to_end(stream)
    assert b'data: {"error"' in received
    assert b"[DONE]" not in received
    reply = following.join()
    assert (reply.status, reply.text) == (200, prepared.texts[RHYME])
    backend = real.status()["backend"]
    assert backend["restarts"] == 1
    assert (
        "/health was silent, its process is stopped by a signal" in (backend["last_exit"]["reason"])
    )
