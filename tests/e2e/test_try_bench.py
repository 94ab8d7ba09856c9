"""`onebitctl try` and `bench` on a whole daemon with the stand-in decoder and provider."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.standin_route import Route, chat_prompt, quick_provider, running_route, said
from tests.harness import clean_environ, wait_until

KEY = "the-key-of-this-test"
SLOW = "--prefill-delay-per-token 0.01"
"""A hundred tokens are a second: no provider stand-in takes so long, however busy the machine."""
USED = "handed over by the shared route"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Route]:
    """One daemon for all: it shares, and wants an API key."""
    directory = tmp_path_factory.mktemp("try")
    keys = directory / "keys"
    keys.write_text(f"# for tests\n{KEY}\nanother\n")
    keys.chmod(0o600)
    config = f'[http]\napi_key_file = "{keys}"\n'
    provider = quick_provider(directory)
    env = {"ONEBIT_KV_SHARE": "1"}
    with running_route(config=config, env=env, front_regions=1, provider=provider) as route:
        yield route


@pytest.fixture
def route(daemon: Route) -> Route:
    """The same, with both stand-ins at their best."""
    daemon.begin()
    return daemon


def argv(route: Route, *words: str) -> list[str]:
    """Return a command line of `onebitctl` for the daemon."""
    socket = str(route.daemon.runtime / "control.sock")
    return [sys.executable, "-m", "onebitd.surfaces.cli", "--socket", socket, *words]


def environ(route: Route) -> dict[str, str]:
    """Return an environment in which matplotlib leaves nothing in the daemon's directory."""
    return clean_environ(route.daemon.runtime, XDG_CONFIG_HOME=str(route.home))


def onebitctl(
    route: Route, *words: str, stdin: bytes | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `onebitctl`; no key of the daemon may be in what it says."""
    done = subprocess.run(
        argv(route, *words),
        env=environ(route),
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert KEY.encode() not in done.stdout + done.stderr
    out, err = done.stdout.decode(), done.stderr.decode()
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


def bench(route: Route, *words: str) -> tuple[dict[str, Any], int]:
    """Run `bench --json`; return what it found and its exit status."""
    done = onebitctl(route, "bench", "--json", "--max-tokens", "2", *words)
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found, done.returncode


def test_try_reply_is_stdout_and_the_parts_are_stderr(route: Route) -> None:
    """So that `try >file` holds the reply; the key is the daemon's own, found by itself."""
    done = onebitctl(route, "try", "--max-tokens", "8", "--temperature", "0", "hello", "there")
    assert (done.returncode, done.stdout) == (0, f"{said(chat_prompt('hello there'))}\n")
    bar, *_ = done.stderr.splitlines()[1:]
    assert re.fullmatch(r"q*t*l*p+r+d+", bar)
    assert len(bar) == 80
    told = " ".join(done.stderr.split())
    assert f"prompt tokens {USED}" in told
    assert "8 tokens generated at" in told


def test_try_piped_prompt_and_its_options_reach_the_decoder(route: Route) -> None:
    """From standard input, with a system prompt, a policy and a limit."""
    words = ("--system", "be brief", "--max-tokens", "3", "--policy", "never", "--json")
    for more in ((), ("-",)):
        route.begin()
        done = onebitctl(route, "try", *words, *more, stdin="Grüße\n".encode())
        assert (done.returncode, done.stderr) == (0, "")
        found = json.loads(done.stdout)
        assert len(found["reply"]) == 3
        assert (found["record"]["outcome"], found["record"]["reason"]) == ("skipped", "policy")
        (chat,) = route.backend("/v1/chat/completions")
        body = json.loads(chat["body"])
        assert body["messages"] == [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "Grüße\n"},
        ]
        assert body["max_tokens"] == 3


def test_try_handoff_that_failed_says_why(route: Route) -> None:
    """The reply is there all the same, unless the handoff was asked for strictly."""
    route.behave(provider="exit:3")
    done = onebitctl(route, "try", "--max-tokens", "2", "hello")
    assert done.returncode == 0
    told = " ".join(done.stderr.split())
    assert "Fell back to the decoder because provider_exit: status 3: no XDNA device" in told
    strict = onebitctl(route, "try", "--policy", "strict", "hello")
    assert (strict.returncode, strict.stdout) == (1, "")
    assert "502: the handoff failed (provider_exit: status 3: no XDNA device)" in strict.stderr


def test_try_without_a_key_that_fits_is_denied(route: Route, tmp_path: Path) -> None:
    """Exit status 4, and the option to use."""
    (tmp_path / "keys").write_text("wrong\n")
    done = onebitctl(route, "try", "--api-key-file", str(tmp_path / "keys"), "hello")
    assert (done.returncode, done.stdout) == (4, "")
    assert "401" in done.stderr
    assert "--api-key-file" in done.stderr
    (tmp_path / "keys").write_text("another\n")
    done = onebitctl(route, "try", "--json", "--max-tokens", "1", "--api-key-file",
                     str(tmp_path / "keys"), "hello")  # fmt: skip
    assert done.returncode == 0


def test_try_interrupted_ends_the_request(route: Route) -> None:
    """Ctrl-C frees the slot; what came stays, with its line ended. On a terminal."""
    route.behave(decoder="--token-delay 0.05")
    control, terminal = pty.openpty()
    words = argv(route, "try", "--max-tokens", "2000", "hello")
    process = subprocess.Popen(
        words, env=environ(route), stdin=terminal, stdout=terminal, stderr=subprocess.PIPE
    )
    os.close(terminal)
    shown = os.read(control, 100)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert process.stderr is not None
    with process.stderr:
        assert process.stderr.read() == b""
    shown += os.read(control, 10_000)
    os.close(control)
    assert re.fullmatch(rb"[a-z]+\r\n", shown)

    def cancelled() -> bool:
        last = route.daemon.handoffs()[-1]
        return (last["outcome"], last.get("reason")) == ("cancelled", "client_gone")

    wait_until(cancelled, "the request is cancelled")
    wait_until(lambda: not route.daemon.status()["slot"]["busy"], "the slot is free")


def test_bench_finds_where_the_provider_pays(route: Route) -> None:
    """Short prompts lose and long ones win; each prompt is new to the slot."""
    route.behave(decoder=SLOW)
    words = ("--lengths", "2,100", "--repeat", "2", "--max-tokens", "2", "--routes", "file")
    done = onebitctl(route, "bench", *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    verdict = r"^file +breaks even near \d+ tokens: it loses below and wins above; at 100"
    assert re.search(verdict, done.stdout, re.MULTILINE), done.stdout
    table = r"^ {3}100  decoder +\d{3,} +\d{3,}-\d{3,} .*\n +file +\*\d+"
    assert re.search(table, done.stdout, re.MULTILINE), done.stdout
    prompts = [json.loads(one["body"])["prompt"] for one in route.backend("/v1/completions")]
    assert sorted(map(len, prompts)) == [2] * 6 + [100] * 6
    long = [tuple(prompt[:20]) for prompt in prompts if len(prompt) == 100]
    assert len(set(long)) == len(long)
    asked = [{name.lower() for name in one["headers"]} for one in route.backend("/v1/completions")]
    assert not any("x-onebit-route" in names for names in asked)
    counted = route.counted()
    assert (counted["used"], counted["skipped"]) == (6, 6)


def test_bench_runs_each_way_in_turn(route: Route, tmp_path: Path) -> None:
    """Every run with its record and by its route; the decoder is timed without a handoff."""
    picture = tmp_path / "p.png"
    found, status = bench(route, "--lengths", "50", "--repeat", "1", "--plot", str(picture))
    assert status == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    ways = ["decoder", "file", "shared"]
    assert found["ways"] == ways
    runs = [(one["way"], one["round"], one["counts"]) for one in found["samples"]]
    warm, counted = [(way, 0, False) for way in ways], [(way, 1, True) for way in reversed(ways)]
    assert runs == warm + counted
    for one in found["samples"]:
        record = one["record"]
        assert record["prompt_tokens"] == 50
        if one["way"] == "decoder":
            assert (record["outcome"], record["reason"]) == ("skipped", "policy")
            assert record["cached_tokens"] < 10  # a letter or two may be those of the last prompt
        else:
            assert (record["outcome"], record["route"]) == ("used", one["way"])
        assert one["seen_ms"] > 0
    assert len({one["record"]["request_id"] for one in found["samples"]}) == len(runs)


def test_bench_handoffs_that_failed_are_listed_and_not_timed(route: Route) -> None:
    """A fallback is as fast as the decoder; it is no figure of the route, which is given up."""
    route.behave(provider="exit:3")
    found, status = bench(route, "--lengths", "8", "--routes", "file", "--repeat", "9")
    assert status == 1
    (failure,) = (one for one in found["failures"] if one["why"].startswith("provider_exit"))
    assert failure["why"] == "provider_exit: status 3: no XDNA device"
    assert found["medians"][1]["first_byte_ms"] is None
    assert found["routes"]["file"]["lengths"] == []
    assert len([one for one in found["samples"] if one["way"] == "file"]) == 3


def test_bench_beside_another_request_runs_again_and_says_so(route: Route) -> None:
    """A client whose reply goes on all the time is in the way of every run."""
    route.behave(decoder="--token-delay 0.02")
    other = subprocess.Popen(
        argv(route, "try", "--policy", "never", "--max-tokens", "2000", "hello"),
        env=environ(route),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_until(lambda: route.daemon.status()["slot"]["busy"], "the other one is served")
    measuring = subprocess.Popen(
        argv(
            *(route, "bench", "--json", "--lengths", "8", "--routes", "file", "--repeat", "1"),
            *("--max-tokens", "2"),
        ),
        env=environ(route),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    wait_until(lambda: route.daemon.status()["queue"]["pending"], "a run waits for it")
    other.send_signal(signal.SIGINT)
    out = measuring.communicate(timeout=60)[0]
    other.wait(60)
    found = json.loads(out)
    assert found["beside_others"] == 0
    bench_runs = [one for one in route.daemon.handoffs() if one["request_id"].startswith("bench-")]
    first = found["samples"][0]["record"]["request_id"]
    ids = [one["request_id"] for one in bench_runs]
    # The one that waited was run again, and only the next one counts.
    assert ids.index(first) > 0
    assert bench_runs[ids.index(first) - 1]["queue_ms"] > 1


def test_bench_interrupted_prints_what_there_is(route: Route) -> None:
    """Ctrl-C is no loss, and no request stays behind."""
    before = len(route.daemon.handoffs())
    process = subprocess.Popen(
        argv(route, "bench", "--lengths", "8", "--routes", "file", "--repeat", "900"),
        env=environ(route),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_until(lambda: len(route.daemon.handoffs()) > before + 4, "some runs")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")
    assert b"but      it was interrupted; these are the runs until then" in out
    assert re.search(rb"^     8  decoder +\*?[\d.]+", out, re.MULTILINE)
    wait_until(lambda: not route.daemon.status()["slot"]["busy"], "the slot is free")


def test_bench_length_that_does_not_fit_is_refused_at_once(route: Route) -> None:
    """Before anything runs."""
    done = onebitctl(route, "bench", "--lengths", "8,3000")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--lengths 3000: a prompt has from 2 to 2032 tokens" in done.stderr
    assert route.backend() == []


def test_route_header_shared_alone_never_goes_by_file(route: Route) -> None:
    """A decoder that cannot share prefills by itself then, with the reason; `file` needs none."""
    route.behave(front="--share-refuse unsupported")
    asked = {"Authorization": f"Bearer {KEY}", "X-Onebit-Handoff": "always"}
    replies = {
        name: route.daemon.completion("hello", headers={**asked, "X-Onebit-Route": name})
        for name in ("shared", "file")
    }
    shared, file = (route.record_of(replies[name]) for name in ("shared", "file"))
    assert (shared["outcome"], shared["reason"]) == ("fallback", "share_refused")
    assert (file["outcome"], file["route"]) == ("used", "file")
    assert len(route.runs()) == 1
    assert replies["shared"].text == replies["file"].text == said("hello")
    assert route.daemon.status()["provider"]["breaker"] == "closed"
