"""What onebitd relies on in llama-server, held against real builds and against the stand-in.

One suite for all of them: the real programs keep the stand-in honest, and the stand-in's tests may
then speak for the real ones.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from onebitd.core import state_check, state_file
from tests.e2e.rig import DAYS
from tests.harness import STANDINS
from tests.llama_builds import (
    BUILDS,
    MODELS,
    LlamaBuild,
    LlamaClient,
    LlamaModel,
    Reply,
    UnixConnection,
    running_llama,
    short_temporary_directory,
)
from tests.standins import tiny_state

STANDIN = LlamaBuild("standin", STANDINS / "llama_server.py", 2, ())
ALL_BUILDS = (STANDIN, *BUILDS)
CTX_SIZE = 2048
LONG_REPLY = 1500
"""Tokens: half a minute of decoding, so that a reply that is not stopped is noticed."""
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Say <|im_start|> once, café."}],
    "max_tokens": 4,
    "temperature": 0,
    "id_slot": 0,
    "cache_prompt": True,
}
TIMINGS = {
    "cache_n",
    "prompt_n",
    "prompt_ms",
    "prompt_per_token_ms",
    "prompt_per_second",
    "predicted_n",
    "predicted_ms",
    "predicted_per_token_ms",
    "predicted_per_second",
}


def model_for(build: LlamaBuild, home: Path) -> LlamaModel:
    """Return the model that a build runs here."""
    build.require()
    if build is not STANDIN:
        MODELS[0].require()
        return MODELS[0]
    path = home / "tiny.gguf"
    path.write_bytes(tiny_state.gguf())
    return LlamaModel("tiny", path, swa=False)


def build_id(build: LlamaBuild) -> str:
    """Name a build in a test's id."""
    return build.name


@pytest.fixture(scope="module", params=ALL_BUILDS, ids=build_id)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaClient]:
    """Each server in turn, ready, with slot 0 in whatever state the last test left it."""
    build: LlamaBuild = request.param
    home = tmp_path_factory.mktemp("contract")
    slow = ("--token-delay", "0.02") if build is STANDIN else ()
    with running_llama(build, model_for(build, home), *slow) as client:
        yield client


def events(body: bytes) -> list[Any]:
    """Return what each `data:` line holds, `[DONE]` as a string."""
    lines = [line[6:] for line in body.decode().split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def erase(server: LlamaClient) -> None:
    """Empty the slot."""
    assert server.request("POST", "/slots/0?action=erase", {}).status == 200


def save_state_of(server: LlamaClient, ids: Sequence[int], name: str) -> int:
    """Have the server evaluate ids, save the slot and empty it; return the file's size."""
    server.complete(list(ids), 0, cache_prompt=False)
    reply = server.slot_action("save", name)
    assert reply.status == 200, reply
    erase(server)
    return (server.slots_dir / name).stat().st_size


def chat_ids(server: LlamaClient) -> list[int]:
    """Return the ids of CHAT the way onebitd finds them."""
    return server.tokenize(server.post("/apply-template", CHAT)["prompt"])


def test_template_and_tokenize_of_a_chat_name_what_the_decoder_evaluates(
    server: LlamaClient,
) -> None:
    """The ids onebitd hands to a provider are those that slot 0 then holds."""
    ids = chat_ids(server)
    reply = server.post("/v1/chat/completions", CHAT | {"max_tokens": 0})
    saved = server.slot_action("save", "ids").json
    state = (server.slots_dir / "ids").read_bytes()
    assert len(ids) > 10
    assert all(type(id_) is int for id_ in ids)
    assert reply["usage"]["prompt_tokens"] == saved["n_saved"] == len(ids)
    layout = state_file.learn_layout(state, tuple(ids))
    state_check.check(state, layout, tuple(ids), swa_window=None)  # holds exactly these ids


def test_tokenize_with_special_tokens_as_text_gives_other_ids(server: LlamaClient) -> None:
    """`parse_special` decides, so onebitd sends it."""
    body = {"content": "<|im_start|>a", "add_special": True, "parse_special": False}
    as_text = server.post("/tokenize", body)["tokens"]
    assert len(server.tokenize("<|im_start|>a")) < len(as_text)


@pytest.mark.parametrize("shape", ["text", "ids", "mixed"])
def test_completion_prompt_in_each_shape_has_the_ids_that_tokenize_gives(
    server: LlamaClient, shape: str
) -> None:
    """A string, a list of ids, and a mix of both are what /tokenize says they are."""
    ids = server.tokenize("one two three")
    prompt: object = {"text": "one two three", "ids": ids, "mixed": [ids[0], " two", " three"]}[
        shape
    ]
    body = {"content": prompt, "add_special": True, "parse_special": True}
    expected = ids if shape == "ids" else server.post("/tokenize", body)["tokens"]
    reply = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 0, "id_slot": 0})
    assert server.slot_action("save", "shape").json["n_saved"] == len(expected)
    assert reply["usage"]["prompt_tokens"] == len(expected)
    state = (server.slots_dir / "shape").read_bytes()
    layout = state_file.learn_layout(state, tuple(expected))
    state_check.check(state, layout, tuple(expected), swa_window=None)


def test_probe_of_three_tokens_saves_a_state_that_tells_the_layout(
    server: LlamaClient,
) -> None:
    """n_predict 0 evaluates the prompt and leaves nothing else in the slot."""
    reply = server.complete([1, 2, 3], 0, cache_prompt=False)
    assert reply["id_slot"] == 0
    saved = server.slot_action("save", "probe").json
    data = (server.slots_dir / "probe").read_bytes()
    assert (saved["n_saved"], saved["n_written"]) == (3, len(data))
    state_file.learn_layout(data, (1, 2, 3))


def test_slot_actions_answer_with_the_fields_onebitd_reads(server: LlamaClient) -> None:
    """save, erase and restore count tokens and bytes; an unknown key in the body is ignored."""
    size = save_state_of(server, range(5, 25), "fields")
    body = {"filename": "fields", "leave_one_token": True, "nobody_knows": {"this": [1]}}
    restored = server.post("/slots/0?action=restore", body)
    assert (restored["id_slot"], restored["filename"]) == (0, "fields")
    assert (restored["n_restored"], restored["n_read"]) == (20, size)
    assert restored["timings"]["restore_ms"] >= 0
    saved = server.post("/slots/0?action=save", {"filename": "again"})
    assert (saved["n_saved"], saved["n_written"]) == (20, size)
    assert saved["timings"]["save_ms"] >= 0
    assert server.request("POST", "/slots/0?action=erase").json == {"id_slot": 0, "n_erased": 20}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_chat_after_a_restore_of_all_but_the_last_evaluates_one_token(
    server: LlamaClient, stream: bool
) -> None:
    """The handoff's whole worth: cache_n is N-1 and prompt_n is 1."""
    ids = chat_ids(server)
    save_state_of(server, ids[:-1], "chat")
    assert server.slot_action("restore", "chat").json["n_restored"] == len(ids) - 1
    reply = server.request("POST", "/v1/chat/completions", CHAT | {"stream": stream})
    assert reply.status == 200
    last = events(reply.body)[-2] if stream else reply.json
    assert last["timings"].keys() >= TIMINGS
    assert (last["timings"]["cache_n"], last["timings"]["prompt_n"]) == (len(ids) - 1, 1)


def test_completion_after_a_restore_says_what_a_cold_one_says(server: LlamaClient) -> None:
    """A restored cache is as good as one of its own."""
    ids = server.tokenize(DAYS)
    body = {"prompt": DAYS, "max_tokens": 8, "temperature": 0, "id_slot": 0, "cache_prompt": True}
    erase(server)
    cold = server.post("/v1/completions", body)
    save_state_of(server, ids[:-1], "days")
    server.slot_action("restore", "days")
    warm = server.post("/v1/completions", body)
    assert (cold["timings"]["cache_n"], cold["timings"]["prompt_n"]) == (0, len(ids))
    assert (warm["timings"]["cache_n"], warm["timings"]["prompt_n"]) == (len(ids) - 1, 1)
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == len(ids) - 1


def test_request_with_cache_prompt_false_throws_the_restored_prompt_away(
    server: LlamaClient,
) -> None:
    """Why such a request is not handed off."""
    ids = chat_ids(server)
    save_state_of(server, ids[:-1], "thrown")
    server.slot_action("restore", "thrown")
    reply = server.post("/v1/chat/completions", CHAT | {"cache_prompt": False})
    assert (reply["timings"]["cache_n"], reply["timings"]["prompt_n"]) == (0, len(ids))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:40],
        lambda data: b"ggsX" + data[4:],
        lambda data: data[:4] + b"\x09" + data[5:],
        None,
    ],
    ids=["empty", "cut", "magic", "version", "missing"],
)
def test_restore_of_a_bad_file_is_refused_and_leaves_the_slot_empty(
    server: LlamaClient, damage: Any
) -> None:
    """A 400 in llama-server's words, and the next prompt is evaluated from its start."""
    save_state_of(server, range(5, 25), "good")
    data = (server.slots_dir / "good").read_bytes()
    bad = server.slots_dir / "bad"
    bad.unlink(missing_ok=True)
    if damage is not None:
        bad.write_bytes(damage(data))
    server.slot_action("restore", "good")
    reply = server.slot_action("restore", "bad")
    assert reply.status == 400
    assert reply.json["error"]["code"] == 400
    assert reply.json["error"]["type"] == "invalid_request_error"
    assert reply.json["error"]["message"].startswith("Unable to restore slot")
    after = server.complete(list(range(5, 25)), 1)
    assert (after["timings"]["cache_n"], after["timings"]["prompt_n"]) == (0, 20)


def test_restore_of_a_file_with_more_behind_it_reads_only_the_state(server: LlamaClient) -> None:
    """n_read counts the bytes used, so onebitd can tell."""
    size = save_state_of(server, range(5, 25), "tail")
    with (server.slots_dir / "tail").open("ab") as file:
        file.write(bytes(16))
    restored = server.slot_action("restore", "tail").json
    assert (restored["n_restored"], restored["n_read"]) == (20, size)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ["/v1/completions", "/completion"])
def test_prompt_as_long_as_the_context_is_refused_before_anything_is_streamed(
    server: LlamaClient, path: str, stream: bool
) -> None:
    """N >= n_ctx is a real 400 with both counts."""
    body = {"prompt": [5] * CTX_SIZE, "stream": stream, "id_slot": 0}
    reply = server.request("POST", path, body)
    error = reply.json["error"]
    assert (reply.status, error["code"]) == (400, 400)
    assert error["type"] == "exceed_context_size_error"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (CTX_SIZE, CTX_SIZE)


@pytest.mark.parametrize("action", ["share", "adopt", "", "RESTORE"])
def test_unknown_slot_action_is_refused_with_one_text(server: LlamaClient, action: str) -> None:
    """How onebitd would know that the shared route is not there."""
    reply = server.request("POST", f"/slots/0?action={action}", {"socket": "/x", "filename": "x"})
    error = {"code": 400, "message": "Invalid action", "type": "invalid_request_error"}
    assert (reply.status, reply.json) == (400, {"error": error})


@pytest.mark.parametrize(
    "name", ["", "../x", "a/b", "a\\b", "a:b", " a", "a ", "a.", "a\x01", "a*", "x" * 256]
)
def test_slot_file_name_that_could_leave_the_directory_is_refused(
    server: LlamaClient, name: str
) -> None:
    """llama-server joins the name to its directory, and takes no path."""
    reply = server.slot_action("save", name)
    error = {"code": 400, "message": "Invalid filename", "type": "invalid_request_error"}
    assert (reply.status, reply.json) == (400, {"error": error})


@pytest.mark.parametrize("name", ["state-0123456789abcdef", ".dot", "in ner", "ä", "x" * 255])
def test_slot_file_name_of_letters_is_taken(server: LlamaClient, name: str) -> None:
    """The names that onebitd makes are among those."""
    server.complete([5, 6, 7], 0)
    assert server.slot_action("save", name).status == 200
    assert (server.slots_dir / name).exists()


@contextlib.contextmanager
def open_stream(server: LlamaClient, path: str, body: object) -> Iterator[http.client.HTTPResponse]:
    """Send a request and yield its reply, the body unread; at the end the client leaves."""
    connection = UnixConnection(server.socket, 60.0)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    try:
        with connection.getresponse() as reply:
            yield reply
    finally:
        connection.close()


def test_chat_stream_has_the_frame_that_onebitd_relays(server: LlamaClient) -> None:
    """Chunked text/event-stream, one `data:` line an event, timings in the last, then [DONE]."""
    with open_stream(server, "/v1/chat/completions", CHAT | {"stream": True}) as reply:
        assert reply.status == 200
        assert reply.headers["Content-Type"] == "text/event-stream"
        assert reply.headers["Transfer-Encoding"] == "chunked"
        assert reply.headers["Content-Length"] is None
        body = reply.read()
    for block in body.decode().rstrip("\n").split("\n\n"):
        assert block.startswith("data: ")
        assert "\n" not in block
    *chunks, done = events(body)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["choices"][0]["finish_reason"] in ("length", "stop")
    assert [index for index, chunk in enumerate(chunks) if "timings" in chunk] == [len(chunks) - 1]
    assert "usage" not in chunks[-1]


def test_chat_stream_with_usage_asked_for_has_timings_in_the_usage_chunk(
    server: LlamaClient,
) -> None:
    """The extra chunk without choices carries both."""
    more = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, done = events(server.request("POST", "/v1/chat/completions", CHAT | more).body)
    assert done == "[DONE]"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens"] == len(chat_ids(server))
    assert chunks[-1]["timings"].keys() >= TIMINGS
    assert not any("timings" in chunk for chunk in chunks[:-1])


def test_completion_stream_has_timings_and_usage_in_its_last_chunk(server: LlamaClient) -> None:
    """/v1/completions needs no option for its usage."""
    body = {"prompt": "one two three", "max_tokens": 3, "stream": True, "temperature": 0}
    *chunks, done = events(server.request("POST", "/v1/completions", body).body)
    assert done == "[DONE]"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["timings"].keys() >= TIMINGS
    assert chunks[-1]["usage"]["completion_tokens"] == 3


def test_plain_completion_stream_ends_without_done(server: LlamaClient) -> None:
    """/completion says `stop` instead."""
    body = {"prompt": [5, 6, 7], "n_predict": 3, "stream": True}
    *partial, last = events(server.request("POST", "/completion", body).body)
    assert [event["stop"] for event in partial] == [False] * len(partial)
    assert last["stop"] is True
    assert last["timings"].keys() >= TIMINGS
    assert last["tokens_evaluated"] == 3


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_client_that_leaves_in_the_middle_of_a_reply_frees_the_slot(
    server: LlamaClient, stream: bool
) -> None:
    """A closed connection is how onebitd stops a generation; the next task gets the slot."""
    body = {
        "prompt": [5, 6, 7],
        "n_predict": LONG_REPLY,
        "ignore_eos": True,
        "stream": stream,
        "id_slot": 0,
    }
    if stream:
        with open_stream(server, "/completion", body) as reply:
            assert reply.readline().startswith(b"data: ")
    else:
        connection = UnixConnection(server.socket, 60.0)
        connection.request("POST", "/completion", json.dumps(body))
        wait_busy(server)
        connection.close()
    after = server.request("POST", "/slots/0?action=erase", {}, timeout_s=20.0)
    assert after.status == 200
    assert after.json["n_erased"] < LONG_REPLY


def wait_busy(server: LlamaClient) -> None:
    """Return once the slot works on something."""
    deadline = time.monotonic() + 20
    while not server.get("/slots").json[0]["is_processing"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_slot_action_during_a_reply_waits_for_its_end_and_leaves_it_alone(
    server: LlamaClient,
) -> None:
    """A deferred action: the stream is whole, and the erase finds what the stream left."""
    body = {"prompt": [5, 6, 7], "n_predict": 20, "ignore_eos": True, "stream": True, "id_slot": 0}
    with open_stream(server, "/completion", body) as reply:
        first = reply.readline()
        action = UnixConnection(server.socket, 60.0)
        action.request("POST", "/slots/0?action=erase", "{}")
        rest = first + reply.read()
        erased = json.loads(action.getresponse().read())
        action.close()
    assert events(rest)[-1]["tokens_predicted"] == 20
    assert erased["n_erased"] == 3 + 19


def test_health_is_answered_while_a_reply_runs(server: LlamaClient) -> None:
    """It does not wait for the slot."""
    body = {"prompt": [5, 6, 7], "n_predict": LONG_REPLY, "ignore_eos": True, "stream": True}
    with open_stream(server, "/completion", body) as reply:
        assert reply.readline().startswith(b"data: ")
        assert server.request("GET", "/health", timeout_s=20.0).json == {"status": "ok"}
        assert server.request("GET", "/v1/health", timeout_s=20.0).status == 200


def test_props_tell_context_and_build(server: LlamaClient) -> None:
    """Where onebitd reads how much fits."""
    props = server.get("/props").json
    assert props["default_generation_settings"]["n_ctx"] == CTX_SIZE
    assert props["total_slots"] == 1
    assert isinstance(props["build_info"], str)


@pytest.mark.parametrize(
    ("path", "body", "statuses"),
    [
        ("/v1/chat/completions", b"not json", (400, 500)),
        ("/v1/completions", b"not json", (400, 500)),
        ("/v1/chat/completions", {}, (400, 500)),
        ("/v1/completions", {}, (400,)),
        ("/v1/completions", {"prompt": [10_000_000]}, (400,)),
        ("/v1/completions", {"prompt": [-1]}, (400,)),
        ("/v1/chat/completions", CHAT | {"n": 2}, (400,)),
        ("/nothing/here", {}, (404,)),
    ],
    ids=["chat-text", "text", "chat-empty", "empty", "id-large", "id-negative", "n-2", "path"],
)
def test_request_that_cannot_be_served_gets_an_error_object(
    server: LlamaClient, path: str, body: Any, statuses: tuple[int, ...]
) -> None:
    """The shape of every error: message, type, and the status once more as code."""
    connection = UnixConnection(server.socket, 60.0)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    error = json.loads(reply.read())["error"]
    connection.close()
    assert reply.status in statuses
    assert error["code"] == reply.status
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)


def test_chat_with_an_image_is_refused_by_template_and_chat_alike(server: LlamaClient) -> None:
    """Without a projector both say no."""
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    template = server.request("POST", "/apply-template", body)
    chat = server.request("POST", "/v1/chat/completions", body)
    assert template.status == chat.status >= 400


@contextlib.contextmanager
def starting(build: LlamaBuild, home: Path, *more: str) -> Iterator[LlamaClient]:
    """Start a server and do not wait for it; it is killed at the end if it still runs."""
    model = model_for(build, home)
    slots = home / "slots"
    slots.mkdir(exist_ok=True)
    argv = [str(build.program), "-m", str(model.path), "-c", "256", "-t", "1", *build.extra_args]
    argv += ["--host", str(home / "l.sock"), "--slot-save-path", str(slots), *more]
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield LlamaClient(process, home / "l.sock", slots, home / "log")
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("build", ALL_BUILDS, ids=build_id)
def test_server_that_loads_answers_503_until_it_is_ready_and_ends_with_0_on_sigterm(
    build: LlamaBuild,
) -> None:
    """What the supervisor sees of a decoder's life, and the socket that it leaves behind."""
    slow = ("--load-delay", "0.5") if build is STANDIN else ()
    error = {"message": "Loading model", "type": "unavailable_error", "code": 503}
    seen: list[Reply] = []
    with short_temporary_directory() as home, starting(build, home, *slow) as client:
        deadline = time.monotonic() + 60
        while not seen or seen[-1].status != 200:
            assert time.monotonic() < deadline
            with contextlib.suppress(OSError, http.client.HTTPException):
                seen.append(client.get("/health"))
            time.sleep(0.01)
        assert seen[-1].json == {"status": "ok"}
        assert all((one.status, one.json) == (503, {"error": error}) for one in seen[:-1])
        assert len(seen) > 1 or build is not STANDIN
        time.sleep(0.2)  # its signal handlers come after its first 200
        client.process.send_signal(signal.SIGTERM)
        assert client.process.wait(20) == 0
        assert client.socket.exists()


@pytest.mark.parametrize("build", ALL_BUILDS, ids=build_id)
def test_server_whose_socket_path_exists_ends_with_1(build: LlamaBuild) -> None:
    """Why onebitd unlinks the socket before each start."""
    with short_temporary_directory() as home:
        (home / "l.sock").write_bytes(b"")
        with starting(build, home) as client:
            assert client.process.wait(60) == 1


@pytest.mark.parametrize("build", [STANDIN, BUILDS[0]], ids=build_id)
def test_server_with_an_argument_it_does_not_know_ends_with_1_and_says_so(
    build: LlamaBuild,
) -> None:
    """The line that ends up in onebitd's own error message."""
    with short_temporary_directory() as home, starting(build, home, "--nope") as client:
        assert client.process.wait(60) == 1
        assert "error: invalid argument: --nope" in client.tail()


@pytest.mark.parametrize("build", [STANDIN, BUILDS[0]], ids=build_id)
def test_list_devices_prints_a_heading_and_ends_with_0(build: LlamaBuild) -> None:
    """What `--device hybrid` is decided by."""
    build.require()
    env = {"PATH": os.environ["PATH"], "FAKE_LLAMA_DEVICES": ""}
    done = subprocess.run(
        [build.program, "--list-devices"], env=env, capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 0
    assert b"Available devices:" in done.stdout + done.stderr
