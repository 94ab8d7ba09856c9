"""The hybrid route on stand-ins: what reaches the decoder, the lines, every fallback.

The design document's `hybrid_route` checks. Every test on the shared daemon ends with a look at
what it left: files, processes, descriptors, the slot, the lock.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.standin_route import (
    PROVIDER,
    Route,
    chat_prompt,
    leaves_nothing,
    running_route,
    said,
)
from tests.harness import HttpReply, is_alive, raw_connection
from tests.standins import tiny_decoder

CONFIG = """
[http]
keepalive_s = 0
[provider]
elfs = "/opt/elfs"
timeout_s = 4
"""
HELLO = "Hello there"
PROMPT = chat_prompt(HELLO)
IDS = tiny_decoder.tokenize(PROMPT)
N = len(IDS)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Route]:
    """One daemon for the tests that do not break it."""
    with running_route(config=CONFIG) as route:
        yield route


@pytest.fixture
def route(daemon: Route) -> Iterator[Route]:
    """The shared daemon, with nothing in it; afterwards nothing may be left."""
    with leaves_nothing(daemon) as fresh:
        yield fresh


def ask(route: Route, **more: Any) -> HttpReply:
    """Post the chat of this module, after another that leaves no prefix of it in the slot."""
    route.daemon.completion([7, 8, 9], max_tokens=1, headers={"X-Onebit-Handoff": "never"})
    route.forget()
    return route.daemon.chat(HELLO, **more)


def assert_used(route: Route, reply: HttpReply) -> dict[str, Any]:
    """See a handoff used: reply, headers, record, line, counter; return the record."""
    record = route.record_of(reply)
    assert (reply.status, reply.text) == (200, said(PROMPT))
    assert reply.headers["x-onebit-handoff"] == "file"
    assert "x-onebit-reason" not in reply.headers
    assert (record["outcome"], record["route"]) == ("used", "file")
    assert (record["cached_tokens"], record["evaluated_tokens"]) == (N - 1, 1)
    assert "reason" not in record
    assert route.counted() == {"used": 1}
    return record


def assert_fell_back(route: Route, reply: HttpReply, reason: str, detail: str) -> dict[str, Any]:
    """See a fallback: a right reply, its reason everywhere; return the record."""
    record = route.record_of(reply)
    assert (reply.status, reply.text) == (200, said(PROMPT))
    assert reply.headers["x-onebit-handoff"] == "fallback"
    assert reply.headers["x-onebit-reason"] == reason
    assert (record["outcome"], record["reason"]) == ("fallback", reason)
    assert re.search(detail, record["detail"]), record["detail"]
    assert (record["prompt_tokens"], record["cached_tokens"]) == (N, 0)
    assert record["evaluated_tokens"] == N
    logged = route.log_lines(record["request_id"])[0]
    assert logged["level"] == "warning"
    start = f"hybrid: {N} prompt tokens: fell back ({reason}: {record['detail']}), first byte "
    assert re.fullmatch(re.escape(start) + r"\d+\.\d ms", logged["line"])
    assert route.counted() == {"fallback": 1, reason: 1}
    return record


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_chat_with_a_provider_is_handed_off_and_evaluates_one_token(
    route: Route, stream: bool
) -> None:
    """The whole route: reply, headers, record, line and counter."""
    reply = ask(route, stream=stream, headers={"X-Request-Id": f"mine-{stream}"})
    record = assert_used(route, reply)
    assert reply.headers["x-request-id"] == f"mine-{stream}"
    names = [part.split(";dur=")[0] for part in reply.headers["server-timing"].split(", ")]
    assert names == [
        "queue",
        "template",
        "tokenize",
        "lock",
        "prefill",
        "provider",
        "check",
        "restore",
    ]
    assert (record["prompt_tokens"], record["handed_tokens"]) == (N, N - 1)
    assert record["prefill_ms"] == 88.1
    assert record["provider_wall_ms"] != 88.1
    assert record["provider"] == str(PROVIDER)
    assert record["path"] == "/v1/chat/completions"
    assert record["stream"] is stream
    assert record["instance"] == record["model"] == "test"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", record["time"])
    assert record["state_bytes"] > 0
    line = (
        rf"hybrid: {N} prompt tokens: prefill 88\.1 ms, restore \d+\.\d ms, first byte \d+\.\d ms"
    )
    assert re.fullmatch(line, route.line_of(reply))
    assert route.log_lines(record["request_id"])[0]["level"] == "info"


def test_chat_reaches_the_decoder_in_the_order_of_the_route(route: Route) -> None:
    """Template, tokenize, restore, chat; one after the other, with what each must carry."""
    reply = ask(route)
    assert_used(route, reply)
    seen = route.backend()
    assert [one["target"] for one in seen] == [
        "/apply-template",
        "/tokenize",
        "/slots/0?action=restore",
        "/v1/chat/completions",
    ]
    ends = [route.backend_end(one) for one in seen]
    assert all(end <= after["at"] for end, after in zip(ends, seen[1:], strict=False))
    template, tokenize, restore, chat = (json.loads(one["body"]) for one in seen)
    body = {name: value for name, value in chat.items() if name not in ("id_slot", "cache_prompt")}
    assert template == body
    assert tokenize == {"content": PROMPT, "add_special": True, "parse_special": True}
    assert restore.keys() == {"filename", "leave_one_token"}
    assert restore["leave_one_token"] is True
    assert "/" not in restore["filename"]
    assert (chat["id_slot"], chat["cache_prompt"]) == (0, True)
    assert not any(name.startswith("x-onebit") for name in seen[3]["headers"])


def test_decoder_is_started_with_one_slot_in_the_private_directory(route: Route) -> None:
    """-np 1, the slot directory of the instance, its socket, no RAM cache."""
    pid = route.daemon.status()["backend"]["pid"]
    argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
    runtime = route.daemon.runtime
    assert argv[argv.index("-np") + 1] == "1"
    assert argv[argv.index("--slot-save-path") + 1] == str(runtime / "slots")
    assert argv[argv.index("--host") + 1] == str(runtime / "backend.sock")
    assert argv[argv.index("--cache-ram") + 1] == "0"
    assert (runtime / "slots").stat().st_mode & 0o777 == 0o700
    assert (runtime / "backend.sock").stat().st_mode & 0o077 == 0


def test_provider_is_called_by_the_contract(route: Route) -> None:
    """Its arguments, its ids file, its group, and the lock held for it."""
    assert_used(route, ask(route))
    (run,) = route.runs()
    slots = route.daemon.runtime / "slots"
    options = dict(zip(run["argv"][1::2], run["argv"][2::2], strict=True))
    assert options.keys() == {"--tokens", "--out", "--model", "--elfs"}
    assert options["--elfs"] == "/opt/elfs"
    assert options["--model"] == str(route.home / "tiny.gguf")
    assert Path(options["--tokens"]).is_relative_to(slots)
    assert Path(options["--out"]).is_relative_to(slots)
    assert run["ids_file"] == "".join(f"{id_}\n" for id_ in IDS[:-1])
    assert run["pgid"] == run["pid"]
    assert run["no_device_lock"] == "1"
    assert run["lock_held"] is True


@pytest.mark.parametrize(
    ("body", "ids"),
    [
        ({"prompt": HELLO}, tiny_decoder.tokenize(HELLO)),
        ({"prompt": [HELLO]}, tiny_decoder.tokenize(HELLO)),
        ({"prompt": [10, 20, 30, 40]}, [10, 20, 30, 40]),
        ({"prompt": [1, "ab", 2]}, [1, *tiny_decoder.tokenize("ab"), 2]),
        ({"prompt": "<|im_start|>x"}, [1, *tiny_decoder.tokenize("x")]),
    ],
    ids=["text", "list-of-one", "ids", "mixed", "special"],
)
def test_completion_prompt_in_each_shape_is_handed_off_with_its_ids(
    route: Route, body: dict[str, Any], ids: list[int]
) -> None:
    """The provider gets the ids that the decoder will evaluate, less the last."""
    reply = route.daemon.request("POST", "/v1/completions", {**body, "max_tokens": 3})
    record = route.record_of(reply)
    assert reply.status == 200
    assert [run["ids"] for run in route.runs()] == [ids[:-1]]
    assert (record["outcome"], record["cached_tokens"]) == ("used", len(ids) - 1)
    asked = [one["target"] for one in route.backend()]
    ids_given = all(isinstance(item, int) for item in body["prompt"])
    assert ("/tokenize" in asked) is not ids_given
    assert "/apply-template" not in asked


def test_chat_that_names_a_slot_of_its_own_is_sent_to_slot_0(route: Route) -> None:
    """A client's id_slot and cache_prompt do not get around the handoff; the rest stays."""
    reply = ask(route, id_slot=7, cache_prompt=True, logit_bias=[[5, -1.5]])
    assert_used(route, reply)
    sent = json.loads(route.backend("/v1/chat/completions")[0]["body"])
    assert (sent["id_slot"], sent["cache_prompt"]) == (0, True)
    assert (sent["logit_bias"], sent["temperature"]) == ([[5, -1.5]], 0)


def test_chat_body_reaches_the_decoder_as_it_came_but_for_two_fields(route: Route) -> None:
    """Not re-encoded: numbers, order, spaces and escapes are the client's."""
    body = b'{ "messages":[{"role":"user","content":"caf\\u00e9 \xe2\x82\xac"}],"max_tokens":2,\n'
    body += b'  "temperature":1e-3 ,"x":12345678901234567890}'
    reply = route.daemon.request("POST", "/v1/chat/completions", body)
    assert route.record_of(reply)["outcome"] == "used"
    sent = route.backend("/v1/chat/completions")[0]["body"].encode()
    assert sent == body[:-1] + b',"id_slot":0,"cache_prompt":true}'


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("POST", "/slots/0?action=erase"),
        ("POST", "/slots/0?action=save"),
        ("POST", "/%73lots/0?action=restore"),
        ("POST", "/props"),
        ("POST", "/lora-adapters"),
        ("POST", "/models/load"),
        ("POST", "/models/unload"),
        ("DELETE", "/models/x"),
    ],
)
def test_what_would_change_the_decoder_behind_onebitds_back_is_forbidden(
    route: Route, method: str, target: str
) -> None:
    """403 with a reason, and nothing reaches the decoder."""
    reply = route.daemon.request(method, target, {"filename": "x"})
    error = reply.json["error"]
    assert (reply.status, error["code"], error["type"]) == (403, 403, "permission_error")
    assert "is not allowed: " in error["message"]
    assert route.backend() == []


@pytest.mark.parametrize(
    ("mode", "reason", "detail"),
    [
        ("exit:3", "provider_exit", r"^status 3: no XDNA device$"),
        ("crash", "provider_exit", r"signal 9 \(SIGKILL\)"),
        ("hang", "provider_timeout", r"within 4 s \(provider\.timeout_s\)"),
        ("ignore_term", "provider_timeout", r"within 4 s \(provider\.timeout_s\)"),
        ("no_file", "provider_no_file", "wrote no state file"),
        ("empty", "bad_state", "the file ends at byte 0|empty"),
        ("half", "bad_state", r"file ends at byte \d+, \d+ bytes? before the end"),
        ("short_by:1", "bad_state", r"1 bytes? before the end of layer 1 V"),
        ("trailing", "bad_state", "16 bytes too many"),
        ("wrong_tokens", "bad_state", "token 0 is not the one that was handed over"),
        ("whole_prompt", "bad_state", f"holds {N} tokens, {N - 1} were handed over"),
        ("wrong_version", "bad_state", "version"),
        ("shifted", "bad_state", "position"),
        ("nan", "bad_state", "NaN or an infinity"),
        ("rewrite:1/2/3", "bad_state", f"holds 3 tokens, {N - 1} were handed over"),
        ("symlink", "bad_state", "symbolic link"),
        ("fifo", "bad_state", "regular file"),
        ("directory", "bad_state", "regular file"),
        ("grandchild_holds_file", "bad_state", "open for writing"),
        ("flood,exit:3", "provider_exit", "status 3: no XDNA device"),
    ],
)
def test_provider_that_fails_is_replaced_by_the_decoders_own_prefill(
    route: Route, mode: str, reason: str, detail: str
) -> None:
    """A right reply and the reason; the slot never saw the state."""
    route.behave(provider=mode)
    reply = ask(route)
    assert_fell_back(route, reply, reason, detail)
    assert route.backend("/slots/0") == []
    assert "id_slot" not in json.loads(route.backend("/v1/chat/completions")[0]["body"])
    (run,) = route.runs()
    assert not is_alive(run["pid"])


@pytest.mark.parametrize(
    ("knobs", "reason", "detail", "actions"),
    [
        (
            "--restore-refuse",
            "restore_refused",
            r"Unable to restore slot.*\(status 400\)",
            ["restore", "erase"],
        ),
        (
            "--restore-short",
            "restore_short",
            rf"restored {N - 2} of {N - 1} tokens",
            ["restore", "erase"],
        ),
        (
            "--reply-500-after-restore",
            "bad_state",
            "failed on the restored prompt.*Invalid input batch",
            ["restore", "erase"],
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_restore_that_goes_wrong_empties_the_slot_before_anything_is_decoded(
    route: Route, knobs: str, reason: str, detail: str, actions: list[str], stream: bool
) -> None:
    """The reply equals a cold one, and the slot was made safe first."""
    route.behave(decoder=knobs)
    assert_fell_back(route, ask(route, stream=stream), reason, detail)
    seen = [one["target"].rpartition("=")[2] for one in route.backend("/slots/0")]
    assert seen == actions
    last = route.backend()[-1]
    assert last["target"] == "/v1/chat/completions"
    assert "id_slot" not in json.loads(last["body"])


def test_decoder_that_dies_in_a_restore_is_replaced_and_the_request_answered(
    route: Route,
) -> None:
    """The file is never tried again, and the new decoder prefills by itself."""
    before = route.daemon.status()["backend"]
    route.behave(decoder=f"--crash-on restore:1 --count-file {route.home / 'restore-count'}")
    reply = ask(route)
    assert_fell_back(route, reply, "backend_down", "died while it restored")
    after = route.daemon.status()["backend"]
    assert after["pid"] != before["pid"]
    assert after["restarts"] == before["restarts"] + 1
    assert "GGML_ASSERT" in after["last_exit"]["reason"]
    restores = [one for one in route.backend("/slots/0") if "restore" in one["target"]]
    assert len(restores) == 1


def test_lock_that_another_process_holds_makes_the_handoff_fall_back(route: Route) -> None:
    """`lock_busy` after lock.wait_s, without a provider run; the holder is named."""
    with route.lock_path.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        reply = ask(route)
        assert route.daemon.status()["lock"]["holder"]["pid"] == os.getpid()
    assert_fell_back(route, reply, "lock_busy", str(os.getpid()))
    assert route.runs() == []


@pytest.mark.parametrize("mode", ["flood", "garbage_result", "grandchild", "sleep:0.3"])
def test_provider_with_bad_manners_and_a_good_file_is_used(route: Route, mode: str) -> None:
    """Output without end, no result line, children left behind: none of it costs the handoff."""
    route.behave(provider=mode)
    record = assert_used(route, ask(route))
    if mode == "garbage_result":
        assert record["prefill_ms"] == pytest.approx(record["provider_wall_ms"], abs=50)
    else:
        assert record["prefill_ms"] == 88.1


def test_state_of_other_cells_is_what_the_decoder_would_go_on_from(route: Route) -> None:
    """The stand-ins can tell a wrong cache: without that the tests above would prove nothing."""
    right, wrong = said(PROMPT), said(chat_prompt(HELLO + "!"))
    assert right != wrong
    assert ask(route).text == right
    assert route.daemon.chat(HELLO + "!").text == wrong


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
NOT_HANDED_OFF: dict[str, tuple[str, bytes, dict[str, str], str, int]] = {
    "image": (
        "chat",
        json.dumps({"messages": [{"role": "user", "content": [IMAGE]}]}).encode(),
        {},
        "not_text",
        500,
    ),
    "n": ("chat", b'{"messages":[{"role":"user","content":"x"}], "n":2}', {}, "not_text", 400),
    "prompts": ("text", b'{"prompt": ["ab" ,"cd"],"max_tokens":1}', {}, "not_text", 200),
    "cache_prompt": (
        "text",
        b'{"prompt":"abc","cache_prompt":false,"id_slot":0 }',
        {},
        "not_text",
        200,
    ),
    "lora": ("text", b'{"prompt":"abc","lora":[{"id":0,"scale":1}]}', {}, "not_text", 200),
    "one-token": ("text", b'{"prompt":"a", "max_tokens":2}', {}, "too_short", 200),
    "too-long": (
        "text",
        b'{"prompt":"' + b"a" * 2048 + b'","stream":true}',
        {},
        "too_long",
        400,
    ),
    "no-json": ("chat", b"{not json", {}, "not_text", 500),
    "refused": ("chat", b'{"messages":"x"}', {}, "not_text", 400),
    "bad-ids": ("text", b'{"prompt":[-1,5]}', {}, "not_text", 400),
    "never": (
        "text",
        b'{"prompt":"abcdef", "id_slot":5}',
        {"X-Onebit-Handoff": "never"},
        "policy",
        200,
    ),
}


@pytest.mark.parametrize("case", NOT_HANDED_OFF)
def test_request_that_is_not_handed_off_is_forwarded_byte_for_byte(route: Route, case: str) -> None:
    """As it came, with its reason; no provider runs and no slot action is sent."""
    kind, body, headers, reason, status = NOT_HANDED_OFF[case]
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    sent = {"X-Mine": "kept", "User-Agent": "test/1", **headers}
    reply = route.daemon.request("POST", path, body, sent)
    record = route.record_of(reply)
    assert reply.status == status
    assert reply.headers["x-onebit-handoff"] == "skipped"
    assert reply.headers["x-onebit-reason"] == reason
    assert (record["outcome"], record["reason"]) == ("skipped", reason)
    assert record["detail"]
    assert f"not handed off ({reason}: " in route.line_of(reply)
    assert route.counted() == {"skipped": 1, reason: 1}
    (forwarded,) = route.backend(path)
    assert forwarded["body"].encode("utf-8", "surrogateescape") == body
    assert forwarded["headers"]["x-mine"] == "kept"
    assert forwarded["headers"]["user-agent"] == "test/1"
    assert "x-onebit-handoff" not in forwarded["headers"]
    assert route.runs() == []
    assert route.backend("/slots/0") == []


def test_prompt_that_does_not_fit_gets_the_decoders_own_words_in_strict_too(route: Route) -> None:
    """Its 400 says more than a failed handoff."""
    reply = route.daemon.completion("a" * 2048, headers={"X-Onebit-Handoff": "strict"})
    assert reply.status == 400
    assert reply.json["error"]["type"] == "exceed_context_size_error"
    assert (reply.json["error"]["n_prompt_tokens"], reply.json["error"]["n_ctx"]) == (2048, 2048)
    assert route.record_of(reply)["reason"] == "too_long"
    assert route.runs() == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_strict_handoff_that_fails_is_a_502_that_says_why(route: Route, stream: bool) -> None:
    """Nothing is decoded; outcome `failed`."""
    route.behave(provider="exit:3")
    reply = ask(route, stream=stream, headers={"X-Onebit-Handoff": "strict"})
    record = route.record_of(reply)
    error = reply.json["error"]
    assert (reply.status, error["code"], error["type"]) == (502, 502, "handoff_error")
    assert "provider_exit: status 3: no XDNA device" in error["message"]
    assert reply.headers["x-onebit-reason"] == "provider_exit"
    assert (record["outcome"], record["reason"]) == ("failed", "provider_exit")
    assert route.counted() == {"failed": 1, "provider_exit": 1}
    assert route.backend("/v1/chat/completions") == []
    assert route.log_lines(record["request_id"])[0]["level"] == "warning"


def test_strict_handoff_of_one_token_is_a_502(route: Route) -> None:
    """What cannot be handed off fails, when a handoff was demanded."""
    reply = route.daemon.completion("a", headers={"X-Onebit-Handoff": "strict"})
    assert reply.status == 502
    assert "too_short" in reply.json["error"]["message"]
    assert route.record_of(reply)["outcome"] == "failed"
    assert route.backend("/v1/completions") == []


@pytest.mark.parametrize("policy", ["always", "strict", "Strict"])
def test_policy_header_that_demands_handoffs_hands_off(route: Route, policy: str) -> None:
    """All of these hand off what can be handed off; the decoder does not see the header."""
    assert_used(route, ask(route, headers={"X-Onebit-Handoff": policy}))
    assert "x-onebit-handoff" not in route.backend("/v1/chat/completions")[0]["headers"]


def test_policy_header_of_another_word_is_a_400_that_lists_the_words(route: Route) -> None:
    """A typing error is not taken for a policy."""
    reply = route.daemon.chat(HELLO, headers={"X-Onebit-Handoff": "sometimes"})
    assert reply.status == 400
    message = reply.json["error"]["message"]
    assert all(word in message for word in ("sometimes", "auto", "always", "never", "strict"))
    assert route.backend() == []
    assert route.runs() == []


def test_head_that_the_decoder_cannot_be_given_is_a_400_and_no_failed_handoff(route: Route) -> None:
    """Three of them once were three failures of a provider that had run for nothing."""
    body = b'{"prompt": "one", "max_tokens": 4}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Odd: a\x01b\r\n"
    with raw_connection(route.daemon.port) as client:
        client.sendall(
            head + b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        reply = b"".join(iter(lambda: client.recv(65536), b""))
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert b"cannot be passed on" in reply
    assert (route.runs(), +route.counted()) == ([], Counter())


def test_failures_that_have_no_daemon_of_their_own_are_errors_when_so_configured() -> None:
    """handoff.on_failure = "error"; what the policy skips is no failure. And min_tokens."""
    config = '[handoff]\non_failure = "error"\nmin_tokens = 10\n'
    with running_route(config=config, env={"NPU_NO_DEVICE_LOCK": "1"}) as route:
        route.behave(provider="exit:3")
        reply = route.daemon.chat(HELLO)
        assert reply.status == 502
        assert "provider_exit" in reply.json["error"]["message"]
        assert route.record_of(reply)["outcome"] == "failed"
        assert route.backend("/v1/chat/completions") == []
        short = route.daemon.completion("abcdefghi")
        assert (short.status, short.headers["x-onebit-reason"]) == (200, "too_short")
        assert route.record_of(short)["detail"] == "9 prompt tokens, handoff.min_tokens is 10"
        route.behave()
        assert route.record_of(route.daemon.chat(HELLO))["outcome"] == "used"
        # NPU_NO_DEVICE_LOCK was set for the daemon: nobody takes the lock.
        assert not route.lock_path.exists()
        assert all(run["lock_held"] is None for run in route.runs())
        assert "lock_ms" not in route.record_of(route.daemon.chat(HELLO + "."))
        assert route.daemon.status()["lock"]["hold"] == "never"
        assert "--elfs" not in route.runs()[-1]["argv"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_state_directory_without_space_makes_the_handoff_fall_back(tmp_path: Path) -> None:
    """`no_space` before the provider runs; room made, it is used. The lock is held throughout."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(small)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode()}")
    try:
        with running_route(state_dir=small, lock='hold = "lifetime"') as route:
            assert route.daemon.status()["lock"]["held"] is True
            route.begin()
            (small / "filler").write_bytes(bytes(2_500_000))
            reply = route.daemon.chat(HELLO)
            assert_fell_back(route, reply, "no_space", f"{re.escape(str(small))}.* free")
            assert route.runs() == []
            (small / "filler").unlink()
            record = route.record_of(route.daemon.chat(HELLO + "!"))
            assert record["outcome"] == "used"
            (run,) = route.runs()
            assert (run["lock_held"], run["no_device_lock"]) == (True, "1")
            assert list((small / "test").iterdir()) == [route.example]
    finally:
        subprocess.run(["umount", str(small)], check=True)
