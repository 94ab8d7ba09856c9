"""Clients as they are: curl, openai, litellm, LangChain, and what two applications send."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.client_shapes import SHAPES, Shape
from tests.e2e.standin_route import Route, chat_prompt, leaves_nothing, running_route, said
from tests.harness import HttpReply, RunningDaemon, running_onebitd, wait_until
from tests.llama_builds import BUILDS, DAYS, MODELS, require_program
from tests.tools import fetch_clients

KEY = "sk-client"
HELLO = "Hello there"
CONFIG = """
[http]
api_key_file = "{keys}"
max_body_mib = 1
max_pending = 1
keepalive_s = 60
"""
CHAT = "/v1/chat/completions"
HELD = "--hold-on token"
NO_MODULES = "litellm and langchain-openai are not installed: python -m tests.tools.fetch_clients"


def keys_file(folder: Path) -> Path:
    """Write and return a file with the one key."""
    path = folder / "keys"
    path.touch(0o600)
    path.write_text(f"# for the test\n{KEY}\n")
    return path


class Program:
    """A program of tests/e2e/clients that imports its client beside the tests, and asks once."""

    def __init__(self, name: str) -> None:
        script = Path(__file__).with_name("clients") / f"{name}.py"
        env = {name: value for name, value in os.environ.items() if not name.endswith("_proxy")}
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # the next run imports in half the time
        env |= {"PYTHONPATH": str(fetch_clients.FOLDER), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )

    def ask(self, port: int) -> dict[str, Any]:
        """Have it make its calls, and return what it found."""
        told = json.dumps({"base_url": f"http://127.0.0.1:{port}/v1", "key": KEY})
        out, err = self._process.communicate(f"{told}\n", timeout=240)
        assert self._process.returncode == 0, err[-4000:]
        first, found = out.splitlines()[0], out.splitlines()[-1]
        assert first == "ready"
        return dict(json.loads(found))

    def close(self) -> None:
        """End it if it has not ended."""
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def programs() -> Iterator[dict[str, Program]]:
    """The heavy clients, started as soon as the module is: they import for seconds."""
    found = {}
    if fetch_clients.is_installed():
        found = {name: Program(name) for name in ("litellm_calls", "langchain_calls")}
    yield found
    for program in found.values():
        program.close()


@pytest.fixture(scope="module")
def daemon(
    tmp_path_factory: pytest.TempPathFactory, programs: dict[str, Program]
) -> Iterator[Route]:
    """One daemon on stand-ins, with a key and small limits."""
    config = CONFIG.format(keys=keys_file(tmp_path_factory.mktemp("clients")))
    with running_route("--alias", "tiny", config=config) as route:
        yield route


@pytest.fixture
def route(daemon: Route) -> Iterator[Route]:
    """The shared daemon, with nothing in it; afterwards nothing may be left."""
    with leaves_nothing(daemon) as fresh:
        yield fresh


def used(route: Route, request_id: str) -> dict[str, Any]:
    """See that a request was handed off; return its record."""
    record = route.record_of(request_id)
    assert record["outcome"] == "used", record
    return record


# --- curl ---------------------------------------------------------------------------------------


def curl(route: Route, path: str, *args: str, data: bytes | None = None) -> HttpReply:
    """Run curl with the key, and return the last reply; `data` is its standard input."""
    require_program("curl")
    done = subprocess.run(
        [
            *("curl", "-sS", "-i", "--max-time", "60", "--noproxy", "*"),
            *("-H", f"Authorization: Bearer {KEY}", "-H", "Content-Type: application/json"),
            *args,
            f"http://127.0.0.1:{route.daemon.port}{path}",
        ],
        input=data,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return parse(done.stdout)


def parse(raw: bytes) -> HttpReply:
    """Return the reply in what `curl -i` prints; `interim` counts the heads before the last."""
    interim = 0
    while True:
        head, _, raw = raw.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        status = int(first.split()[1])
        if status >= 200:
            return HttpReply(status, headers | {"interim": str(interim)}, raw)
        interim += 1


def chat_body(**more: Any) -> bytes:
    """Return the body of a greedy chat."""
    messages = [{"role": "user", "content": HELLO}]
    return json.dumps({"messages": messages, "temperature": 0, "max_tokens": 8, **more}).encode()


@pytest.mark.parametrize("http10", [False, True], ids=["http1.1", "http1.0"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_curl_gets_the_whole_reply(route: Route, stream: bool, http10: bool) -> None:
    """As a document and as a stream, also where the end of the connection is the only end."""
    args = ["-N", "--data-binary", "@-", *(["--http1.0"] if http10 else [])]
    reply = curl(route, CHAT, *args, data=chat_body(stream=stream))
    assert (reply.status, reply.text) == (200, said(chat_prompt(HELLO)))
    assert ("transfer-encoding" in reply.headers) == (stream and not http10)
    assert reply.body.endswith(b"data: [DONE]\n\n") == stream
    used(route, reply.headers["x-request-id"])


@pytest.mark.parametrize(
    "args",
    [
        ["--data-binary", "@-", "-H", "Expect: 100-continue"],
        ["-X", "POST", "-T", "-"],
        ["--data-binary", "@-", "-H", "Transfer-Encoding: chunked"],
        ["--data-binary", "@-", "--compressed"],
        ["--data-binary", "@-", "-H", "Authorization:", "-H", f"X-Api-Key: {KEY}"],
    ],
    ids=["expect", "upload", "chunked", "compressed", "x-api-key"],
)
def test_curl_sends_a_large_body_in_any_way(route: Route, args: list[str]) -> None:
    """The decoder gets the same bytes, in one piece of a length that is told."""
    sent = chat_body(metadata={"pad": "p" * 900_000})
    reply = curl(route, CHAT, *args, data=sent)
    assert (reply.status, reply.text) == (200, said(chat_prompt(HELLO)))
    assert reply.headers["interim"] == "1" or "Expect: 100-continue" not in args
    (got,) = route.backend(CHAT)
    assert got["body"].startswith(sent.decode().removesuffix("}"))
    assert int(got["headers"]["content-length"]) == len(got["body"])
    assert "transfer-encoding" not in got["headers"]
    assert "expect" not in got["headers"]
    used(route, reply.headers["x-request-id"])


@pytest.mark.parametrize(
    "args", [["--data-binary", "@-"], ["-X", "POST", "-T", "-"]], ids=["length", "chunked"]
)
def test_curl_body_above_the_limit_is_413_naming_it(route: Route, args: list[str]) -> None:
    """curl sees the answer, whether the length was told or not."""
    reply = curl(route, CHAT, *args, data=b"x" * (2 << 20))
    assert reply.status == 413
    assert "http.max_body_mib" in reply.json["error"]["message"]


def test_curl_head_of_health_has_no_body(route: Route) -> None:
    """A load balancer may ask that way."""
    reply = curl(route, "/health", "--head")
    assert (reply.status, reply.body) == (200, b"")


def test_curl_uses_one_connection_for_requests_in_a_row(route: Route) -> None:
    """Keep-alive works after a document, a stream and an error."""
    require_program("curl")
    url = f"http://127.0.0.1:{route.daemon.port}"
    common = ["-sS", "-o", "/dev/null", "-w", "%{http_code} %{num_connects}\n", "--noproxy", "*"]
    key = ["-H", f"Authorization: Bearer {KEY}"]
    words = ["curl"]
    for data in (chat_body(), chat_body(stream=True), None):
        asked = [url + CHAT, "-d", data.decode()] if data else [f"{url}/nothing"]
        words += [*common, *key, *asked, "--next"]
    words += [*common, f"{url}/v1/models"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["200 1", "200 0", "404 0", "401 0"]


# --- openai -------------------------------------------------------------------------------------


def openai_client(port: int, **more: Any) -> openai.OpenAI:
    """Return the client, without retries of its own unless asked for."""
    settings = {"api_key": KEY, "max_retries": 0, "timeout": 120, **more}
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", **settings)


@pytest.fixture
def client(route: Route) -> Iterator[openai.OpenAI]:
    """The client of the shared daemon."""
    with openai_client(route.daemon.port) as made:
        yield made


MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": HELLO}]


def test_openai_chat_whole_and_streamed_are_the_same(client: openai.OpenAI, route: Route) -> None:
    """Both ways, through the handoff, with headers for who looks and usage for who asks."""
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=MESSAGES, max_tokens=8, extra_headers={"X-Request-Id": "openai-1"}
    )
    whole = raw.parse()
    assert whole.choices[0].message.content == said(chat_prompt(HELLO))
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    assert raw.headers["x-onebit-handoff"] == "file"
    assert "restore;dur=" in raw.headers["server-timing"]
    assert raw.headers["x-request-id"] == used(route, "openai-1")["request_id"]
    parts = list(
        client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"X-Request-Id": "openai-2"},
        )
    )
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content
    assert [part.usage.completion_tokens for part in parts if part.usage] == [8]
    used(route, "openai-2")


def test_openai_async_client_streams_two_at_a_time(route: Route) -> None:
    """The second one waits in the line; each gets its own reply."""

    async def ask(client: openai.AsyncOpenAI, content: str) -> str:
        parts = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": content}], max_tokens=8, stream=True
        )
        said_so_far = [part.choices[0].delta.content async for part in parts if part.choices]
        return "".join(one or "" for one in said_so_far)

    async def both() -> tuple[str, str]:
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{route.daemon.port}/v1", api_key=KEY, max_retries=0
        ) as client:
            return await asyncio.gather(ask(client, "one"), ask(client, "two"))

    assert list(asyncio.run(both())) == [said(chat_prompt(name)) for name in ("one", "two")]
    assert route.counted()["used"] == 2


def test_openai_completion_and_models(client: openai.OpenAI, route: Route) -> None:
    """A completion is handed off too, and the model has the name that clients use."""
    reply = client.completions.create(
        model="tiny", prompt=HELLO, max_tokens=8, extra_headers={"X-Request-Id": "openai-text"}
    )
    assert reply.choices[0].text == said(HELLO)
    used(route, "openai-text")
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_openai_errors_are_its_own_classes(client: openai.OpenAI, route: Route) -> None:
    """Status and shape of each error are those that the client maps."""
    wrong = client.with_options(api_key="sk-wrong")
    with pytest.raises(openai.AuthenticationError, match="Invalid API Key"):
        wrong.completions.create(model="tiny", prompt="a")
    with pytest.raises(openai.APIStatusError, match=r"max_body_mib") as too_large:
        client.completions.create(model="tiny", prompt="a" * (2 << 20))
    assert too_large.value.status_code == 413
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="a")
    with pytest.raises(openai.PermissionDeniedError, match="slot actions belong to onebitd"):
        client.post("/../slots/0?action=erase", cast_to=object)
    with pytest.raises(openai.InternalServerError, match="not_text"):
        client.completions.create(
            model="tiny", prompt=["a", "b"], extra_headers={"X-Onebit-Handoff": "strict"}
        )


def test_openai_error_inside_a_stream_is_raised(client: openai.OpenAI, route: Route) -> None:
    """A decoder that dies in a reply ends it with an error event, which the client raises."""
    route.behave(decoder="--truncate-stream 3")
    with pytest.raises(openai.APIError) as caught:
        list(client.completions.create(model="tiny", prompt=HELLO, max_tokens=8, stream=True))
    assert not isinstance(caught.value, openai.APIConnectionError)
    route.behave()


def test_openai_comes_again_when_told_to(route: Route) -> None:
    """A full line is a 503 with Retry-After; the client waits for that long and is served."""
    route.behave(decoder=HELD)
    with contextlib.ExitStack() as stack:
        for _ in range(2):  # one has the slot, and one waits
            other = stack.enter_context(contextlib.closing(route.daemon.connect()))
            other.request("POST", CHAT, chat_body(), {"Authorization": f"Bearer {KEY}"})
            wait_until(lambda: route.daemon.status()["slot"]["busy"], "the slot is taken")
        wait_until(lambda: route.daemon.status()["queue"]["pending"], "the line is full")
        retried: list[int] = []

        def ask() -> None:
            with openai_client(route.daemon.port, max_retries=3) as client:
                raw = client.completions.with_raw_response.create(
                    model="tiny", prompt=HELLO, max_tokens=1
                )
                retried.append(raw.retries_taken)

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: route.counted()["queue_full"], "it was turned away")
        route.behave()
        thread.join(60)
    assert retried == [1]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_openai_client_that_times_out_leaves_the_slot_free(route: Route, stream: bool) -> None:
    """What the client gives up on is not computed to its end."""
    route.behave(decoder=HELD)
    request_id = f"late-{stream}"

    def ask() -> None:
        with openai_client(route.daemon.port, timeout=1.0) as client:
            reply = client.chat.completions.create(
                model="tiny",
                messages=MESSAGES,
                max_tokens=8,
                stream=stream,
                extra_headers={"X-Request-Id": request_id},
            )
            list(reply)

    # openai has no word for a stream that stops: its HTTP library's error comes out.
    with pytest.raises(Exception, match="timed out"):
        ask()
    assert route.record_of(request_id)["outcome"] == "cancelled"
    wait_until(lambda: not route.daemon.status()["slot"]["busy"], "the slot is free")


# --- litellm and LangChain ----------------------------------------------------------------------


def found_by(programs: dict[str, Program], name: str, route: Route) -> dict[str, Any]:
    """Return what a program got; skip (under CI fail) where its client is not installed."""
    if name not in programs:
        if os.environ.get("CI") == "true":
            pytest.fail(NO_MODULES)
        pytest.skip(NO_MODULES)
    return programs[name].ask(route.daemon.port)


def test_langchain_invokes_streams_and_binds_tools(
    programs: dict[str, Program], route: Route
) -> None:
    """ChatOpenAI works against it as it is."""
    found = found_by(programs, "langchain_calls", route)
    text = said(chat_prompt(HELLO), 16)  # it says max_completion_tokens; 16 is the stand-in's own
    assert (found["whole"], found["stream"], found["tools"]) == (text, text, text)
    for usage in (found["usage"], found["stream_usage"]):
        assert usage["output_tokens"] == 16
        assert usage["input_token_details"]["cache_read"] == usage["input_tokens"] - 1
    assert "Invalid API Key" in found["refused"]
    for name in ("whole", "stream", "tools"):
        used(route, f"langchain-{name}")
    tools = json.loads(route.backend(CHAT)[-1]["body"])["tools"]
    assert [one["function"]["name"] for one in tools] == ["weather"]


def test_litellm_completes_and_streams(programs: dict[str, Program], route: Route) -> None:
    """litellm's own client works against it as it is."""
    found = found_by(programs, "litellm_calls", route)
    text = said(chat_prompt(HELLO))
    assert (found["whole"], found["stream"], found["text"]) == (text, text, said("Hello"))
    assert (found["usage"], found["stream_usage"]) == (8, [8])
    assert "Invalid API Key" in found["refused"]
    for name in ("whole", "stream", "text"):
        used(route, f"litellm-{name}")


# --- what applications send ---------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_application_request_is_served_as_it_came(route: Route, shape: Shape) -> None:
    """Every field reaches the decoder, the reply is its own, and the prompt is handed off."""
    headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": shape.name, **shape.headers}
    method = "GET" if shape.body is None else "POST"
    reply = route.daemon.request(method, shape.path, shape.body, headers)
    assert reply.status == shape.status, reply.body
    if shape.outcome is None:
        assert not route.counted()
    else:
        record = route.record_of(shape.name)
        assert (record["outcome"], record.get("reason")) == (shape.outcome, shape.reason)
    (got,) = route.backend(shape.path)
    assert "authorization" not in got["headers"]
    if shape.body is None:
        return
    sent = json.loads(got["body"])
    assert {name: sent[name] for name in shape.body} == shape.body
    assert set(sent) - set(shape.body) <= {"id_slot", "cache_prompt"}
    if reply.status == 200 and shape.body["stream"]:
        assert reply.headers["content-type"] == "text/event-stream"
        asked = shape.body.get("stream_options", {}).get("include_usage", False)
        assert any("usage" in event for event in reply.events) >= asked


# --- the real decoder ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Real:
    """A daemon with a real decoder and the reference provider."""

    daemon: RunningDaemon

    def outcomes(self, since: int, count: int) -> list[str]:
        """Return the outcomes of the handoffs that came after the first `since`."""
        self.daemon.last_handoff(since + count)
        return [str(record["outcome"]) for record in self.daemon.handoffs()[since:]]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, reference_provider: Path) -> Iterator[Real]:
    """One daemon with the reference provider, an API key, and a small body limit."""
    build = next((build for build in BUILDS if build.program.exists()), BUILDS[0])
    build.require()
    MODELS[0].require()
    keys = keys_file(tmp_path_factory.mktemp("openai"))
    with running_onebitd(
        "--alias",
        "smol",
        model=MODELS[0].path,
        llama_server=build.program,
        provider=reference_provider,
        backend_args=["-c", "2048", "-t", "1", *build.extra_args],
        config=f'[http]\napi_key_file = "{keys}"\nmax_body_mib = 1\n',
        env=build.provider_env,
    ) as running:
        yield Real(running)


def test_openai_on_a_real_decoder(real: Real) -> None:
    """Chats and completions, whole and streamed, the responses API, and the decoder's errors."""
    before = len(real.daemon.handoffs())
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [
        {"role": "user", "content": f"Continue. {DAYS}"}
    ]
    with openai_client(real.daemon.port) as client:
        whole = client.chat.completions.create(
            model="smol", messages=messages, temperature=0, max_tokens=8
        )
        parts = client.chat.completions.create(
            model="smol", messages=messages, temperature=0, max_tokens=8, stream=True
        )
        streamed = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        assert streamed == whole.choices[0].message.content
        text = client.completions.create(model="smol", prompt=DAYS, temperature=0, max_tokens=8)
        pieces = client.completions.create(
            model="smol", prompt=DAYS, temperature=0, max_tokens=8, stream=True
        )
        assert "".join(piece.choices[0].text for piece in pieces) == text.choices[0].text
        assert real.outcomes(before, 4) == ["used"] * 4
        assert [model.id for model in client.models.list()] == ["smol"]
        answer = client.responses.create(model="smol", input="Hello", max_output_tokens=4)
        assert answer.output_text
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="exceeds the available context size"):
                client.completions.create(
                    model="smol", prompt=DAYS * 40, max_tokens=4, stream=stream
                )
        with pytest.raises(openai.APIStatusError, match="n") as refused:
            client.chat.completions.create(model="smol", messages=messages, n=3)
        assert refused.value.status_code >= 400


def test_curl_on_a_real_decoder(real: Real) -> None:
    """What the decoder may do otherwise: compress, and answer HEAD."""
    before = len(real.daemon.handoffs())
    route = Route(real.daemon, Path(), Path())
    asked = json.dumps({"prompt": DAYS, "temperature": 0, "max_tokens": 4}).encode()
    args = ["-H", "X-Onebit-Handoff: never", "--data-binary", "@-"]
    plain = curl(route, "/v1/completions", *args, data=asked)
    small = curl(route, "/v1/completions", "--compressed", *args, data=asked)
    assert plain.text == small.text
    assert real.outcomes(before, 2) == ["skipped", "skipped"]
    assert real.daemon.handoffs()[-1]["evaluated_tokens"] > 0  # its usage could be read
    assert curl(route, "/v1/models", "--head").body == b""
