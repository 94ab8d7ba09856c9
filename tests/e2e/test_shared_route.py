"""The shared route on stand-ins: its order and descriptors, and everything that goes wrong in it.

The design document's `hybrid_kvshare_route` checks, and the faults. The decoder is the stand-in
behind the front that exports memory; its reply follows from the rows that it adopts, so a reply
from rows that are not the prompt's is another text.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.standin_route import (
    PROVIDER,
    Background,
    Route,
    chat_prompt,
    leaves_nothing,
    quick_provider,
    read_lines,
    running_route,
    said,
)
from tests.harness import HttpReply, RunningDaemon, is_alive, wait_until
from tests.standins import tiny_decoder, tiny_state

CONFIG = """
[http]
keepalive_s = 0
[backend]
restart_max = 100
[provider]
elfs = "/opt/elfs"
timeout_s = 2
"""
SHARE = {"ONEBIT_KV_SHARE": "1"}
HELLO = "Hello there"
PROMPT = chat_prompt(HELLO)
IDS = tiny_decoder.tokenize(PROMPT)
N = len(IDS)
ASK, ADOPT, RESTORE, ERASE = (
    f"/slots/0?action={action}" for action in ("share", "adopt", "restore", "erase")
)
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Route]:
    """One daemon for the tests that do not end it."""
    program = quick_provider(tmp_path_factory.mktemp("provider"))
    with running_route(config=CONFIG, env=SHARE, front_regions=2, provider=program) as route:
        yield route


@pytest.fixture(scope="module")
def other_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Route]:
    """One for those that end its decoder: with each end the pause before the next start grows."""
    program = quick_provider(tmp_path_factory.mktemp("provider"))
    with running_route(config=CONFIG, env=SHARE, front_regions=2, provider=program) as route:
        yield route


@pytest.fixture
def route(daemon: Route) -> Iterator[Route]:
    """The daemon; afterwards nothing may be left, and the next handoff must be shared."""
    with leaves_nothing(daemon) as fresh:
        yield fresh
        assert_good(fresh)


@pytest.fixture
def dying(other_daemon: Route) -> Iterator[Route]:
    """As `route`, the other daemon."""
    with leaves_nothing(other_daemon) as fresh:
        yield fresh
        assert_good(fresh)


def assert_good(route: Route) -> None:
    """All is well again: the next handoff is shared."""
    route.behave()
    wait_ready(route)
    assert_shared(route, ask(route))
    assert not share_socket(route).exists()


def wait_ready(route: Route) -> int:
    """Wait for the decoder; return its pid."""

    def ready() -> int | None:
        backend = route.daemon.status()["backend"]
        return int(backend["pid"]) if backend["state"] == "ready" else None

    return int(wait_until(ready, "the decoder is ready"))


def share_socket(route: Route) -> Path:
    """Return where a handshake takes place."""
    return route.daemon.runtime / "share.sock"


def ask(route: Route, **more: Any) -> HttpReply:
    """Post the chat of this module, after another that leaves no prefix of it in the slot."""
    route.daemon.completion([7, 8, 9], max_tokens=1, headers={"X-Onebit-Handoff": "never"})
    route.forget()
    return route.daemon.chat(HELLO, **more)


def in_background(route: Route, **more: Any) -> Background:
    """Post the same from a thread."""
    return Background(ask, route, **more)


def wait_phase(route: Route, phase: str) -> None:
    """Wait until the request that has the slot is in this phase."""
    wait_until(lambda: route.daemon.status()["slot"]["phase"] == phase, f"phase {phase}")


@contextlib.contextmanager
def leaving_client(route: Route) -> Iterator[None]:
    """A client that posts the same chat and leaves at the end of the block."""
    body = {"messages": [{"role": "user", "content": HELLO}], "max_tokens": 8, "temperature": 0}
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    with socket.create_connection(("127.0.0.1", route.daemon.port), 60) as client:
        client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
        yield


def targets(route: Route) -> list[str]:
    """Return what the decoder was asked, but for the two harmless questions and what comes first.

    Each share begins with an erase, which `test_abandoned_reply_...` looks at.
    """
    asked = [one["target"] for one in route.backend()]
    asked = [target for target in asked if target not in ("/apply-template", "/tokenize")]
    following = [*asked, ""][1:]
    return [one for one, then in zip(asked, following, strict=True) if (one, then) != (ERASE, ASK)]


def run_end(route: Route) -> float:
    """Return when the one provider run that ended regularly did so."""
    (run,) = route.runs()
    ends = read_lines(route.home / "provider.end")
    (end,) = [one["end"] for one in ends if one["pid"] == run["pid"]]
    return float(end)


def asked_at(route: Route, target: str) -> dict[str, Any]:
    """Return the one request with this target, of erases the last."""
    found = [one for one in route.backend() if one["target"] == target]
    assert len(found) == 1 or target == ERASE
    return found[-1]


def not_shared_lines(route: Route, reply: HttpReply) -> list[dict[str, Any]]:
    """Return what the log says of a handshake that came to nothing."""
    wanted = reply.headers["x-request-id"]
    logged = route.daemon.log_records("share_not_used")
    return [one for one in logged if one["request_id"] == wanted]


def assert_used(route: Route, reply: HttpReply, way: str) -> dict[str, Any]:
    """See a handoff used on one of the routes; return its record."""
    record = route.record_of(reply)
    assert (reply.status, reply.text) == (200, said(PROMPT)), record
    assert (record["outcome"], record["route"]) == ("used", way), record
    assert reply.headers["x-onebit-handoff"] == way
    assert "x-onebit-reason" not in reply.headers
    assert (record["cached_tokens"], record["evaluated_tokens"]) == (N - 1, 1)
    assert route.counted() == {"used": 1}
    return record


def assert_shared(route: Route, reply: HttpReply) -> dict[str, Any]:
    """See it used through the memory, and nothing restored."""
    record = assert_used(route, reply, "shared")
    assert targets(route) == [ASK, ADOPT, CHAT]
    assert "restore_ms" not in record
    assert "state_bytes" not in record
    return record


def assert_by_file(
    route: Route, reply: HttpReply, reason: str | None, detail: str
) -> dict[str, Any]:
    """See it used by file, for this reason (if one is named), which one line in the log tells."""
    record = assert_used(route, reply, "file")
    assert record["share_ms"] == 0.0
    line = rf"hybrid: {N} prompt tokens: prefill 88\.1 ms, share 0\.000 ms, restore \d+\.\d ms, .*"
    assert re.fullmatch(line, route.line_of(reply))
    (said_so,) = not_shared_lines(route, reply)
    assert reason in (None, said_so["reason"])
    assert re.search(detail, said_so["line"]), said_so["line"]
    assert targets(route)[-2:] == [RESTORE, CHAT]
    assert ADOPT not in targets(route)
    (run,) = route.runs()
    assert "--out" in run["argv"]
    return record


def assert_fell_back(
    route: Route,
    reply: HttpReply,
    reason: str,
    detail: str,
    between: Sequence[str] = (ERASE,),
) -> dict[str, Any]:
    """See the decoder prefill by itself from a slot that was emptied, with no second handoff.

    Args:
        between: what the decoder was asked after the share and before the chat.
    """
    record = route.record_of(reply)
    assert (reply.status, reply.text) == (200, said(PROMPT)), record
    assert (record["outcome"], record["reason"]) == ("fallback", reason), record
    assert re.search(detail, record["detail"]), record["detail"]
    assert record["route"] == "shared"
    assert (record["cached_tokens"], record["evaluated_tokens"]) == (0, N)
    assert reply.headers["x-onebit-handoff"] == "fallback"
    assert reply.headers["x-onebit-reason"] == reason
    asked = [one for one in targets(route) if one.startswith(("/slots/", CHAT))]
    assert asked == [ASK, *between, CHAT]
    assert not_shared_lines(route, reply) == []
    assert len(route.runs()) <= 1
    assert route.counted() == {"fallback": 1, reason: 1}
    return record


def memory_of(pid: int) -> list[Path]:
    """Return a way to each region of the front's memory, in order."""
    found: dict[int, Path] = {}  # a mapping of Python's has a descriptor of its own
    for entry in sorted(Path(f"/proc/{pid}/fd").iterdir(), key=lambda entry: int(entry.name)):
        with contextlib.suppress(FileNotFoundError):
            if "memfd:share-front" in os.readlink(entry):
                found.setdefault(entry.stat().st_ino, entry)
    return list(found.values())


def memory_rows(route: Route) -> set[bytes]:
    """Return the different rows of the prompt's positions in the decoder's memory."""
    pid = route.daemon.status()["backend"]["pid"]
    regions = [entry.read_bytes() for entry in memory_of(pid)]
    header = json.loads(next(run["header"] for run in route.runs() if run["header"]))
    assert len(regions) == len(header["regions"])
    rows = set()
    for tensor in header["tensors"]:
        for position in range(N - 1):
            at = tensor["offset"] + position * tensor["row_size"]
            rows.add(regions[tensor["region"]][at : at + tensor["row_size"]])
    return rows


# --- the order -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_shared_handoff_evaluates_one_token_and_says_what_it_took(
    route: Route, stream: bool
) -> None:
    """Reply, headers, record, line and counters of the shared route."""
    reply = ask(route, stream=stream)
    record = assert_shared(route, reply)
    timing = reply.headers["server-timing"]
    names = [part.split(";dur=")[0] for part in timing.split(", ")]
    assert names == [
        *("queue", "template", "tokenize", "lock", "prefill", "provider", "share", "adopt")
    ]
    assert record["prefill_ms"] == 88.1
    assert record["handed_tokens"] == N - 1
    assert record["share_ms"] > 0
    assert record["adopt_ms"] > 0
    assert record["share_ms"] + record["lock_ms"] <= record["provider_at_ms"]
    assert record["provider_at_ms"] + record["provider_wall_ms"] <= record["handed_at_ms"]
    assert record["handed_at_ms"] + record["adopt_ms"] <= record["first_byte_ms"]
    line = (
        rf"hybrid: {N} prompt tokens: prefill 88\.1 ms, share \d+\.\d{{3}} ms, "
        rf"adopt \d+\.\d{{3}} ms, first byte \d+\.\d ms"
    )
    assert re.fullmatch(line, route.line_of(reply))
    assert route.daemon.status()["provider"]["shared"] == "on"


def test_shared_handoff_share_then_provider_then_adopt_each_after_the_other(route: Route) -> None:
    """The decoder is asked to share, then the provider runs, and only then it adopts."""
    assert_shared(route, ask(route))
    (run,) = route.runs()
    share, adopt = asked_at(route, ASK), asked_at(route, ADOPT)
    assert route.backend_end(share) <= run["start"]
    assert run_end(route) <= adopt["at"]
    assert route.backend_end(adopt) <= asked_at(route, CHAT)["at"]
    assert json.loads(share["body"]) == {"socket": str(share_socket(route))}
    body = json.loads(adopt["body"])
    assert body == {
        "tokens": IDS[:-1],
        "share_id": json.loads(run["header"])["share_id"],
        "leave_one_token": True,
    }
    assert run["ids"] == IDS[:-1]
    assert run["lock_held"] is True
    assert run["no_device_lock"] == "1"


def test_shared_provider_inherits_the_descriptors_and_nothing_else(route: Route) -> None:
    """Beside 0, 1 and 2 it has exactly what --fds names; a provider of the file route nothing."""
    assert_shared(route, ask(route))
    (run,) = route.runs()
    words = run["argv"][1:]
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert given.keys() == {"--tokens", "--model", "--layout", "--fds", "--elfs"}
    fds = [int(word) for word in given["--fds"].split(",")]
    assert len(fds) == 2
    assert run["fds"] == sorted([0, 1, 2, *fds])
    assert Path(given["--layout"]).parent == Path(given["--tokens"]).parent
    route.behave(front="--share-refuse mismatch")
    assert_by_file(route, ask(route), "share_refused", "mismatch")
    assert route.runs()[0]["fds"] == [0, 1, 2]


def test_share_socket_is_there_during_the_handshake_only_and_private(route: Route) -> None:
    """Mode 0600 while the decoder is asked; gone before the provider begins."""
    route.behave(front="--share-delay 0.3", provider="sleep:0.3")
    reply = in_background(route)
    wait_phase(route, "share")
    mode = wait_until(lambda: share_socket(route).exists(), "the socket") and share_socket(route)
    assert stat.S_IMODE(mode.stat().st_mode) == 0o600
    wait_until(route.runs, "a provider run")
    assert not share_socket(route).exists()
    assert_shared(route, reply.join())


@pytest.mark.parametrize("more_s", ["0", "0.3"])
def test_provider_late_but_done_its_work_is_adopted(route: Route, more_s: str) -> None:
    """Past its time limit, asked to end, it ends with status 0: nothing is thrown away."""
    route.behave(provider=f"late:{more_s}")
    record = assert_shared(route, ask(route))
    assert record["provider_wall_ms"] >= 2000
    assert run_end(route) <= asked_at(route, ADOPT)["at"]


def test_header_without_a_layout_is_passed_on_untouched(route: Route) -> None:
    """Decoder and provider may have a language of their own; the daemon then marks nothing."""
    route.behave(front="--share-layout none")
    assert_shared(route, ask(route))
    (run,) = route.runs()
    assert "layout" not in json.loads(run["header"])


@pytest.mark.parametrize("mode", ["child", "stranger-first"])
def test_handshake_with_a_descendant_or_after_a_stranger_is_good(route: Route, mode: str) -> None:
    """A helper of the decoder may hand over; whoever else connects is hung up on."""
    route.behave(front=f"--share-mode {mode}")
    assert_shared(route, ask(route))


# --- refusals: another route is still open -------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "detail"),
    [
        ("invalid", "Invalid action"),
        ("missing", "File Not Found"),
        ("unsupported", "ONEBIT_KV_SHARE was not set, or the KV backend cannot export"),
    ],
)
def test_decoder_that_cannot_share_is_asked_once_for_each_start(
    route: Route, how: str, detail: str
) -> None:
    """It is learned from the first answer, shown in the status, and asked anew after a restart."""
    route.behave(front=f"--share-refuse {how}")
    assert_by_file(route, ask(route), "share_refused", detail)
    assert targets(route) == [ASK, RESTORE, CHAT]
    for _ in range(2):
        assert_by_file(route, ask(route), "share_refused", detail)
        assert targets(route) == [RESTORE, CHAT]
    assert route.daemon.status()["provider"]["shared"] == "not supported by this decoder"
    route.behave()
    os.kill(wait_ready(route), signal.SIGKILL)
    wait_until(lambda: route.daemon.status()["provider"]["shared"] == "on", "a new decoder")
    wait_ready(route)
    assert_shared(route, ask(route))


def test_decoder_that_refuses_one_share_is_asked_again(route: Route) -> None:
    """A mismatch of parameters is no property of the program."""
    route.behave(front="--share-refuse mismatch:2")
    for _ in range(2):
        assert_by_file(route, ask(route), "share_refused", "params mismatch")
        assert targets(route) == [ASK, RESTORE, CHAT]
    assert route.daemon.status()["provider"]["shared"] == "on"
    assert_shared(route, ask(route))


@pytest.mark.parametrize(
    ("knob", "reason", "detail"),
    [
        ("mode garbage", "share_handshake", "length"),
        ("mode close", "share_handshake", "closed after 0 bytes"),
        ("mode close-after-length", "share_handshake", "closed after 4 bytes"),
        ("mode no-fds", "share_handshake", "no descriptor"),
        ("mode no-id", "share_handshake", "no share_id"),
        ("mode no-json", "share_handshake", "no JSON"),
        ("mode many-fds", "share_handshake", "150 descriptors, 64 at most"),
        ("mode late-fds", "share_handshake", "later than with the first byte"),
        ("mode trailing", "share_handshake", "behind its message"),
        ("layout overlap", "share_handshake", "overlap"),
        ("layout version", "share_handshake", "layout 2 is not known"),
    ],
    ids=lambda value: value.split()[-1] if value.startswith(("mode ", "layout ")) else "",
)
def test_handshake_gone_wrong_the_prompt_goes_by_file(
    route: Route, knob: str, reason: str, detail: str
) -> None:
    """Whatever the decoder sends, every descriptor is closed, and the file route is taken."""
    before = memory_descriptors(route)
    route.behave(front=f"--share-{knob}")
    assert_by_file(route, ask(route), reason, detail)
    assert memory_descriptors(route) == before == []
    assert not share_socket(route).exists()


def memory_descriptors(route: Route) -> list[str]:
    """Return the daemon's descriptors of the decoder's memory."""
    return [name for name in route.daemon.open_files() if "memfd" in name]


def test_handshake_decoder_killed_in_it_file_goes_to_the_new_one(dying: Route) -> None:
    """Nothing has begun by then, so the prompt is still handed over."""
    route = dying
    route.behave(front="--share-mode stall:1")
    pid = wait_ready(route)
    reply = in_background(route)
    wait_phase(route, "share")
    time.sleep(0.1)  # the decoder has connected, most likely; it is right either way
    os.kill(pid, signal.SIGKILL)
    # Its end shows on two sockets at the same time.
    ended = r"closed after 0 bytes|connection broke|decoder died"
    assert_by_file(route, reply.join(), None, ended)


def test_handshake_decoder_dies_instead_file_goes_to_the_new_one(dying: Route) -> None:
    """A decoder that a share kills takes no second one with it."""
    route = dying
    route.behave(front="--die-on share:1")
    assert_by_file(route, ask(route), "backend_down", "died as it was to share")


def test_share_of_a_client_that_left_is_not_taken_for_the_next_ones(route: Route) -> None:
    """Its message comes late, on the next one's socket: that one goes by file, and is right."""
    route.behave(front="--share-delay 0.5:1")
    with leaving_client(route):
        wait_phase(route, "share")
        wait_until(lambda: ASK in targets(route), "the share")
    reply = route.daemon.chat(HELLO)
    record = route.record_of(reply)
    assert (reply.text, record["outcome"], record["route"]) == (said(PROMPT), "used", "file")
    (said_so,) = not_shared_lines(route, reply)
    assert "is of share" in said_so["line"]


# --- faults once the provider has the memory -----------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "reason", "detail"),
    [
        ("exit:3", "provider_exit", "status 3: no XDNA device"),
        ("half,exit:1", "provider_exit", "status 1"),
        ("half,crash", "provider_exit", r"signal 9 \(SIGKILL\)"),
        ("half,hang", "provider_timeout", "no result within 2 s"),
        ("nothing", "bad_state", "layer 0 K, position 0: it was not written"),
        ("half", "bad_state", r"layer 0 K, position \d+: it was not written"),
        ("but:0", "bad_state", "layer 0 K, position 0: it was not written"),
        ("but:-1", "bad_state", f"layer 0 K, position {N - 2}: it was not written"),
        ("nan", "bad_state", f"layer 1 V, position {N - 2}: it holds a value that is not finite"),
    ],
    ids=lambda value: value if ":" in value or (len(value) < 17 and " " not in value) else "",
)
def test_provider_fails_with_the_memory_decoder_prefills_from_a_clean_slot(
    route: Route, mode: str, reason: str, detail: str
) -> None:
    """The reply is the plain one, nothing was adopted, and of the marks nothing is left."""
    route.behave(provider=mode)
    assert_fell_back(route, ask(route), reason, detail)
    (run,) = route.runs()
    assert not is_alive(run["pid"])
    assert memory_rows(route) == {bytes(tiny_state.ROW_BYTES)}
    assert memory_descriptors(route) == []


def test_provider_refuses_the_header_there_is_no_second_handoff(route: Route) -> None:
    """Rows of another size are the provider's to notice; by then it has had the descriptors."""
    route.behave(front="--share-layout rows")
    assert_fell_back(route, ask(route), "provider_exit", "status 6")


def test_provider_hangs_nothing_is_asked_of_the_slot_before_it_is_gone(route: Route) -> None:
    """It and its child write on until they are killed; the erase comes after that."""
    route.behave(provider="grandchild_writes,ignore_term")
    assert_fell_back(route, ask(route), "provider_timeout", "no result within 2 s")
    beats = read_lines(route.home / "provider.beat")
    assert max(one["at"] for one in beats) < asked_at(route, ERASE)["at"]
    assert memory_rows(route) == {bytes(tiny_state.ROW_BYTES)}


def test_provider_leaves_a_child_that_writes_it_is_killed_before_the_adopt(route: Route) -> None:
    """Whoever is left in its group writes no more when the decoder takes the cells."""
    route.behave(provider="grandchild_writes")
    assert_shared(route, ask(route))
    beats = read_lines(route.home / "provider.beat")
    assert max(one["at"] for one in beats) < asked_at(route, ADOPT)["at"]


@pytest.mark.parametrize(
    ("knob", "detail"),
    [
        ("--adopt-refuse 400", "told to refuse"),
        ("--adopt-refuse 500", "told to refuse"),
        ("--adopt-short", f"adopted {N - 2} of {N - 1} tokens"),
    ],
)
def test_adopt_refused_or_short_slot_is_emptied(route: Route, knob: str, detail: str) -> None:
    """What the decoder did not take whole is not decoded from."""
    route.behave(front=knob)
    assert_fell_back(route, ask(route), "adopt_refused", detail, (ADOPT, ERASE))
    assert memory_rows(route) == {bytes(tiny_state.ROW_BYTES)}


@pytest.mark.parametrize(
    ("moment", "detail", "between"),
    [
        ("after-share", "restarted after it had shared", ()),
        ("adopt", "died while it adopted", (ADOPT,)),
        ("after-restore", "died while it adopted", (ADOPT,)),
    ],
)
def test_decoder_dies_after_the_share_new_one_prefills(
    dying: Route, moment: str, detail: str, between: tuple[str, ...]
) -> None:
    """The memory is gone with it; no second handoff, and the reply is right."""
    route = dying
    route.behave(front=f"--die-on {moment}:1", provider="sleep:0.3")
    reply = ask(route)
    record = route.record_of(reply)
    assert (reply.text, record["outcome"]) == (said(PROMPT), "fallback")
    assert (record["reason"], record["evaluated_tokens"]) == ("backend_down", N)
    assert re.search(detail, record["detail"]), record["detail"]
    slot = [one for one in targets(route) if "action=" in one]
    assert [one for one in slot if one in (ASK, ADOPT, RESTORE)] == [ASK, *between]
    assert route.counted() == {"fallback": 1, "backend_down": 1}


def test_strict_request_failed_is_502_and_refused_share_is_not_failed(route: Route) -> None:
    """`strict` wants a handoff, whichever; one that fails is an error with its reason."""
    route.behave(provider="half,exit:3")
    reply = ask(route, headers={"X-Onebit-Handoff": "strict"})
    assert reply.status == 502
    assert "provider_exit: status 3: no XDNA device" in reply.json["error"]["message"]
    record = route.record_of(reply)
    assert (record["outcome"], record["reason"]) == ("failed", "provider_exit")
    assert targets(route) == [ASK, ERASE]
    route.behave(front="--share-refuse mismatch:1")
    reply = ask(route, headers={"X-Onebit-Handoff": "strict"})
    assert_by_file(route, reply, "share_refused", "mismatch")


# --- nobody else in the slot ---------------------------------------------------------------------


def test_provider_has_the_memory_nobody_else_gets_at_the_slot(route: Route) -> None:
    """Between the start of a run and its end no completion, restore, adopt, share or erase."""
    route.behave(provider="sleep:0.4")
    first = in_background(route)
    wait_until(route.runs, "a provider run")
    never = {"X-Onebit-Handoff": "never"}
    raw = {"prompt": "raw", "n_predict": 2}
    others = [
        Background(route.daemon.chat, "another"),
        Background(route.daemon.completion, "a plain one", headers=never),
        Background(route.daemon.request, "POST", "/completion", raw),
    ]
    assert first.join().text == said(PROMPT)
    assert others[0].join().text == said(chat_prompt("another"))
    assert others[1].join().text == said("a plain one")
    assert others[2].join().json["content"] == said("raw", 2)
    ends = {one["pid"]: one["end"] for one in read_lines(route.home / "provider.end")}
    windows = [(run["start"], ends[run["pid"]]) for run in route.runs()]
    assert len(windows) == 2
    for one in route.backend():
        if one["target"] in ("/apply-template", "/tokenize"):
            continue
        for start, end in windows:
            assert route.backend_end(one) <= start or end <= one["at"], one
    assert route.counted() == {"used": 2, "skipped": 1, "policy": 1}


def test_abandoned_reply_is_over_before_a_provider_writes(route: Route) -> None:
    """llama-server notices late that a client has left, and until then it writes to its cells."""
    route.behave(decoder="--token-delay 0.8")
    leaving = route.daemon.connect()
    body = json.dumps({"prompt": "left alone", "max_tokens": 50, "stream": False})
    leaving.request("POST", "/v1/completions", body, {"X-Onebit-Handoff": "never"})
    wait_until(lambda: "/v1/completions" in targets(route), "the decoder has it")
    abandoned = asked_at(route, "/v1/completions")
    leaving.close()
    reply = route.daemon.chat(HELLO)
    assert reply.headers["x-onebit-handoff"] == "shared"
    (run,) = route.runs()
    assert route.backend_end(abandoned) <= run["start"]


# --- clients that leave, and a daemon that stops -------------------------------------------------


@pytest.mark.parametrize("provider", ["half,hang", "half,ignore_term"])
def test_client_leaves_the_run_memory_is_cleared(route: Route, provider: str) -> None:
    """What the provider has written there is nobody's prompt any more."""
    route.behave(provider=provider)
    with leaving_client(route):
        wait_phase(route, "prefill")
        (run,) = wait_until(route.runs, "a provider run")
    wait_until(lambda: not route.daemon.status()["slot"]["busy"], "the slot is free", 5)
    assert not is_alive(run["pid"])
    assert not share_socket(route).exists()
    assert memory_descriptors(route) == []
    assert [target for target in targets(route) if "action=" in target] == [ASK, ERASE]
    assert memory_rows(route) == {bytes(tiny_state.ROW_BYTES)}


@pytest.mark.parametrize(
    ("phase", "front", "provider"),
    [
        ("share", "--share-mode never", ""),
        ("prefill", "", "half,ignore_term"),
        ("adopt", "--adopt-delay 60", ""),
    ],
)
def test_stop_of_the_daemon_in_a_handoff_leaves_nothing(
    phase: str, front: str, provider: str
) -> None:
    """SIGTERM ends handshake, provider or adoption, after the time for it."""
    config = CONFIG.replace("[http]", "[http]\ndrain_timeout_s = 0.2").replace("= 2\n", "= 60\n")
    with running_route(config=config, env=SHARE, front_regions=1) as route:
        route.behave(front=front, provider=provider)
        with leaving_client(route):
            wait_phase(route, phase)
            processes = route.daemon.children()
            assert route.daemon.stop(timeout_s=20) == 0
        assert not share_socket(route).exists()
        assert not any(map(is_alive, processes))
        (record,) = route.daemon.log_records("handoff")
        assert (record["outcome"], record["reason"]) == ("cancelled", "draining")


# --- many ----------------------------------------------------------------------------------------

QUICK = """#!/bin/sh
[ -e "{image}" ] && exec dd if="{image}" of="/dev/fd/$8" conv=notrunc status=none
exec "{provider}" "$@"
"""


def settled_files(daemon: RunningDaemon) -> list[str]:
    """Return the daemon's open files once the connections of past requests are closed."""

    def looks() -> Iterator[list[str]]:
        while True:
            yield daemon.open_files()
            time.sleep(0.02)

    for one, two, three in itertools.islice(triples(looks()), 300):
        if one == two == three:
            return one
    raise AssertionError("descriptors do not settle")


def triples(looks: Iterator[list[str]]) -> Iterator[tuple[list[str], list[str], list[str]]]:
    """Yield each look with the two after it."""
    one, two = next(looks), next(looks)
    for three in looks:
        yield one, two, three
        one, two = two, three


def test_a_hundred_shared_handoffs_leave_the_same_descriptors(tmp_path: Path) -> None:
    """The set of what the daemon has open is the same before and after, and so is every reply."""
    program, image = tmp_path / "quick", tmp_path / "image"
    program.write_text(QUICK.format(image=image, provider=PROVIDER))
    program.chmod(0o755)
    with running_route(config=CONFIG, env=SHARE, front_regions=1, provider=program) as route:
        assert_shared(route, ask(route))
        pid = route.daemon.status()["backend"]["pid"]
        (memory,) = memory_of(pid)
        image.write_bytes(memory.read_bytes())
        route.daemon.chat(HELLO)
        before = settled_files(route.daemon)
        route.forget()
        for _ in range(100):
            assert route.daemon.chat(HELLO).text == said(PROMPT)
        assert settled_files(route.daemon) == before
        counted: Callable[[], bool] = lambda: route.counted() == {"used": 100}  # noqa: E731
        wait_until(counted, "100 handoffs used")
        assert [one["target"] for one in route.backend()].count(ADOPT) == 100
