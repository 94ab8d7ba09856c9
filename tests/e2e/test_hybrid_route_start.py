"""How onebitd starts or refuses to: flags, --print-backend, no provider, taken ports, bad decoders.

The part of the design document's `hybrid_route` checks that needs no handoff.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.standin_route import (
    DECODER,
    PROVIDER,
    chat_prompt,
    printed_backend,
    run_onebitd,
    running_route,
    said,
)
from tests.harness import running_onebitd, wait_until
from tests.llama_builds import short_temporary_directory
from tests.standins import tiny_state

# Each refused argument as it is written, and what the line about it must speak of.
REFUSED = {
    ("--parallel", "2"): "one slot",
    ("-np", "4"): "one slot",
    ("--mtp",): "draft",
    ("--dflash",): "draft",
    ("--spec-type", "ngram"): "draft",
    ("-md", "draft.gguf"): "draft",
    ("--mmproj", "p.gguf"): "KV cache",
    ("--moe-slots", "4"): "KV cache",
    ("--pm",): "KV cache",
    ("--embedding",): "generates no text",
    ("--embeddings",): "generates no text",
    ("--rerank",): "generates no text",
    ("--reranking",): "generates no text",
    ("--slot-save-path", "/x"): "handoff.state_dir",
    ("--slots",): "/slots",
    ("--no-slots",): "/slots",
    ("--api-key", "k"): "http.api_key_file",
}
REFUSED_AFTER_DASHES = REFUSED | {("--host", "::"): "http.host", ("--port", "1"): "http.port"}


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A directory with a model, short enough for sockets."""
    with short_temporary_directory() as path:
        (path / "tiny.gguf").write_bytes(tiny_state.gguf())
        yield path


@pytest.fixture
def runtime(home: Path) -> Iterator[Path]:
    """A runtime directory that nobody uses; nothing that ends by itself leaves sockets there."""
    path = home / "rt"
    yield path
    assert not any(one.is_socket() for one in path.glob("*"))


def words(home: Path) -> list[str]:
    """Return the least command line."""
    return ["-m", str(home / "tiny.gguf"), "--llama-server", str(DECODER), "--port", "0"]


def assert_refused(stderr: str, refused: dict[tuple[str, ...], str], where: str) -> None:
    """See one line for each argument, naming it, where it stands, and why."""
    for flag, why in refused.items():
        shown = flag[0] if flag[0] not in ("--parallel", "-np", "--spec-type") else " ".join(flag)
        start = re.escape(f"onebitd: {where}: {shown} is refused: ")
        lines = re.findall(rf"^{start}.*$", stderr, re.MULTILINE)
        assert len(lines) == 1, (shown, stderr)
        assert why in lines[0]


def test_refused_arguments_after_the_dashes_are_all_named_and_end_with_2(
    home: Path, runtime: Path
) -> None:
    """In one run, each with its line; nothing is started."""
    given = [word for flag in REFUSED_AFTER_DASHES for word in flag]
    done = run_onebitd(*words(home), "--", *given, runtime=runtime)
    assert (done.returncode, done.stdout) == (2, "")
    assert_refused(done.stderr, REFUSED_AFTER_DASHES, "after --")
    assert not runtime.exists()


def test_refused_arguments_among_onebitds_own_are_all_named_and_end_with_2(
    home: Path, runtime: Path
) -> None:
    """The same before `--`."""
    given = [word for flag in REFUSED for word in flag]
    done = run_onebitd(*words(home), *given, runtime=runtime)
    assert (done.returncode, done.stdout) == (2, "")
    assert_refused(done.stderr, REFUSED, "before --")


def test_refused_arguments_in_the_file_are_all_named_and_end_with_2(
    home: Path, runtime: Path
) -> None:
    """The same in backend.args, with the file's name; and a variable that means the same."""
    given = [word for flag in REFUSED_AFTER_DASHES for word in flag]
    path = home / "refused.toml"
    args = ", ".join(f'"{word}"' for word in given)
    path.write_text(
        f'[model]\npath = "{home / "tiny.gguf"}"\n[backend]\nllama_server = "{DECODER}"\n'
        f'args = [{args}]\nenv = {{ LLAMA_ARG_MMPROJ = "p.gguf" }}\n'
    )
    done = run_onebitd("--config", str(path), runtime=runtime)
    assert (done.returncode, done.stdout) == (2, "")
    assert_refused(done.stderr, REFUSED_AFTER_DASHES, f"{path}: backend.args")
    assert f"{path}: backend.env: LLAMA_ARG_MMPROJ is refused: " in done.stderr


def test_refused_argument_ends_print_backend_too(home: Path, runtime: Path) -> None:
    """What would not be started is not printed."""
    done = run_onebitd(*words(home), "--print-backend", "--", "--mtp", runtime=runtime)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--mtp is refused" in done.stderr


@pytest.mark.parametrize(
    ("device", "listed", "expected"),
    [
        (None, "HRX0", ["--device", "HRX0"]),
        ("hybrid", "Vulkan0,HRX0", ["--device", "HRX0"]),
        ("hybrid", "Vulkan0", []),
        ("hrx", "HRX0", ["--device", "HRX0"]),
        ("cpu", "HRX0", ["--device", "none", "-ngl", "0"]),
        ("Vulkan0", "HRX0", ["--device", "Vulkan0"]),
    ],
)
def test_print_backend_shows_the_device_that_the_decoder_gets(
    home: Path, runtime: Path, device: str | None, listed: str, expected: list[str]
) -> None:
    """HRX0 where llama-server lists it; else nothing, so the route runs anywhere."""
    given = [] if device is None else ["--device", device]
    argv = printed_backend(
        *words(home), *given, runtime=runtime, env={"FAKE_LLAMA_DEVICES": listed}
    )
    at = argv.index("--cache-ram") + 2
    assert argv[at:] == expected


def test_print_backend_shows_the_exact_command_line(home: Path, runtime: Path) -> None:
    """One slot, its directory, the private socket; more arguments last; shell-quoted."""
    more = ("--alias", "my model", "--ctx-size", "512", "--device", "cpu")
    argv = printed_backend(*words(home), *more, "--", "-t", "2", "-np", "1", runtime=runtime)
    assert argv == [
        str(DECODER),
        "-m",
        str(home / "tiny.gguf"),
        "--alias",
        "my model",
        "--host",
        str(runtime / "backend.sock"),
        "-np",
        "1",
        "--slot-save-path",
        str(runtime / "slots"),
        "-c",
        "512",
        "--cache-ram",
        "0",
        "--device",
        "none",
        "-ngl",
        "0",
        "-t",
        "2",
    ]
    assert not runtime.exists()


def test_daemon_without_a_provider_says_so_once_and_decodes_plainly() -> None:
    """One line at start; every request is the decoder's own, unchanged."""
    with running_route(provider=False) as route:
        body = b'{"messages":[{"role":"user","content":"Hello"}],"max_tokens":8}'
        replies = [route.daemon.request("POST", "/v1/chat/completions", body) for _ in range(2)]
        for reply in replies:
            assert reply.text == said(chat_prompt("Hello"))
            assert reply.headers["x-onebit-handoff"] == "skipped"
            assert reply.headers["x-onebit-reason"] == "no_provider"
            record = route.record_of(reply)
            assert (record["outcome"], record["reason"]) == ("skipped", "no_provider")
            assert "provider" not in record
        assert route.counted() == {"skipped": 2, "no_provider": 2}
        (line,) = route.daemon.log_records("no_provider")
        assert line["level"] == "warning"
        assert "no prefill provider is configured" in line["line"]
        assert [one["body"].encode() for one in route.backend()] == [body, body]
        assert route.daemon.status()["provider"]["state"] == "none"
        strict = route.daemon.chat("Hello", headers={"X-Onebit-Handoff": "strict"})
        assert strict.status == 502
        assert "no_provider" in strict.json["error"]["message"]


@pytest.mark.parametrize("device", ["cpu", "hrx"])
def test_device_without_the_hybrid_route_never_calls_the_provider(device: str) -> None:
    """Not even when a request demands it; and handoff.policy = "never" is overridden by one."""
    with running_route("--device", device, config='[handoff]\npolicy = "never"\n') as route:
        reply = route.daemon.chat("Hello", headers={"X-Onebit-Handoff": "always"})
        assert reply.text == said(chat_prompt("Hello"))
        assert route.record_of(reply)["detail"] == f"device {device} never calls a provider"
        assert route.counted() == {"skipped": 1, "policy": 1}
        assert route.runs() == []


def test_policy_never_hands_off_only_what_asks_for_it() -> None:
    """The header overrides the configuration for one request. The names come from variables."""
    env = {
        "ONEBIT_HYBRID_PREFILL": str(PROVIDER),
        "ONEBIT_HYBRID_ELFS": "/some/elfs",
        "NPU_NO_DEVICE_LOCK": "yes",
    }
    config = '[handoff]\npolicy = "never"\n'
    with running_route(config=config, provider=False, env=env) as route:
        reply = route.daemon.chat("Hello")
        record = route.record_of(reply)
        assert (record["outcome"], record["reason"]) == ("skipped", "policy")
        assert [one["target"] for one in route.backend()] == ["/v1/chat/completions"]
        for policy in ("auto", "always", "strict"):  # auto: nothing is known of the provider yet
            headers = {"X-Onebit-Handoff": policy}
            asked = route.daemon.completion(f"{policy}, please", headers=headers)
            assert route.record_of(asked)["outcome"] == "used"
        *_, run = route.runs()
        assert len(route.runs()) == 3
        assert run["argv"][0] == str(PROVIDER)
        assert run["argv"][-2:] == ["--elfs", "/some/elfs"]
        assert route.daemon.log_records("no_provider") == []


def test_second_daemon_of_the_instance_or_port_ends_with_3_and_names_the_holder() -> None:
    """Neither touches the first."""
    with running_route() as route, short_temporary_directory() as other:
        holder = str(route.daemon.process.pid)
        config = route.daemon.runtime.parent / "test.toml"
        again = run_onebitd(
            "--config", str(config), "--port", "0", *words(route.home), runtime=route.daemon.runtime
        )
        assert (again.returncode, again.stdout) == (3, "")
        assert holder in again.stderr
        assert "test" in again.stderr
        port = str(route.daemon.port)
        argv = ["-m", str(route.home / "tiny.gguf"), "--llama-server", str(DECODER)]
        taken = run_onebitd(*argv, "--port", port, runtime=other / "rt")
        assert (taken.returncode, taken.stdout) == (3, "")
        assert port in taken.stderr
        assert holder in taken.stderr
        assert route.record_of(route.daemon.chat("Hello"))["outcome"] == "used"


def test_port_of_another_program_ends_with_3(home: Path, runtime: Path) -> None:
    """It is named as far as it can be seen."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        argv = ["-m", str(home / "tiny.gguf"), "--llama-server", str(DECODER)]
        done = run_onebitd(*argv, "--port", str(port), runtime=runtime)
    assert done.returncode == 3
    assert str(port) in done.stderr
    assert str(os.getpid()) in done.stderr


@pytest.mark.parametrize(
    ("args", "said_why"),
    [
        (["--nope"], "error: invalid argument: --nope"),
        (["--crash-on", "load"], "GGML_ASSERT"),
    ],
)
def test_decoder_that_cannot_start_ends_onebitd_with_4_and_its_own_words(
    home: Path, runtime: Path, args: list[str], said_why: str
) -> None:
    """No restart is tried for a decoder that never was ready."""
    done = run_onebitd(*words(home), "--", *args, runtime=runtime)
    assert done.returncode == 4
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("onebitd: the decoder could not be started: ")
    assert said_why in last
    assert "--print-backend" in last


def test_decoder_that_dies_too_often_ends_onebitd_with_4() -> None:
    """Each request that kills it is answered 503; beyond backend.restart_max onebitd gives up."""
    with running_route(config="[backend]\nrestart_max = 1\n") as route:
        route.behave(decoder="--crash-on token")
        reply = route.daemon.chat("Hello", max_tokens=8)
        assert reply.status == 503
        assert route.daemon.process.wait(30) == 4
        assert "the decoder died 2 times within 300 s" in route.daemon.log_path.read_text()


@dataclass(frozen=True)
class SlowToList:
    """A decoder that lists its devices only when it is let."""

    home: Path

    @property
    def program(self) -> Path:
        """Its program."""
        path = self.home / "decoder"
        if not path.exists():
            os.mkfifo(self.home / "gate")
            path.write_text(
                "#!/bin/sh\n"
                f'case "$*" in *--list-devices*) : >"{self.home}/asked"; cat "{self.home}/gate";;'
                f' esac\nexec "{sys.executable}" {DECODER} "$@"\n'
            )
            path.chmod(0o755)
        return path

    def wait_asked(self) -> None:
        """Wait until it has been asked."""
        wait_until((self.home / "asked").exists, "llama-server is asked for its devices")

    def let(self) -> None:
        """Have it answer."""
        with (self.home / "gate").open("w"):
            pass


def test_who_connects_before_the_decoder_is_known_waits_and_is_answered(home: Path) -> None:
    """The port is open at once: a client that comes early gets an answer, not a refusal."""
    with short_temporary_directory() as directory:
        decoder = SlowToList(directory)
        host = "127.77.0.1"  # nobody else listens there
        with socket.create_server((host, 0)) as free:
            port = free.getsockname()[1]
        with running_onebitd(
            *("--host", host, "--port", str(port)),
            model=home / "tiny.gguf",
            llama_server=decoder.program,
            backend_args=["--load-delay", "60"],
            wait_ready=False,
        ) as daemon:
            decoder.wait_asked()
            client = http.client.HTTPConnection(host, port, timeout=60)
            client.request("GET", "/health")
            assert daemon.log_records("listening") == []
            decoder.let()
            reply = client.getresponse()
            assert (reply.status, json.loads(reply.read())["error"]["code"]) == (503, 503)
            client.close()


def test_signal_before_the_decoder_is_known_ends_it_in_order(home: Path) -> None:
    """The sockets are open by then: they are closed and removed, and the status is 0."""
    with short_temporary_directory() as directory:
        decoder = SlowToList(directory)
        with running_onebitd(
            model=home / "tiny.gguf", llama_server=decoder.program, wait_ready=False
        ) as daemon:
            decoder.wait_asked()
            assert (daemon.runtime / "control.sock").is_socket()
            assert daemon.stop() == 0
            assert len(daemon.log_records("stopped")) == 1
        decoder.let()


def test_signal_while_the_event_loop_is_imported_ends_it_in_order(home: Path) -> None:
    """The same before anything runs that could receive a signal."""
    with running_onebitd(
        model=home / "tiny.gguf", llama_server=DECODER, wait_ready=False
    ) as daemon:
        wait_until((daemon.runtime / "control.sock").is_socket, "it listens")
        assert daemon.stop() == 0
        assert len(daemon.log_records("stopping")) == 1


def test_llama_server_that_is_no_program_ends_with_2_and_leaves_no_socket(
    home: Path, runtime: Path
) -> None:
    """It is noticed when the sockets are open already."""
    (home / "text").write_text("not a program\n")
    (home / "text").chmod(0o755)
    argv = ["-m", str(home / "tiny.gguf"), "--llama-server", str(home / "text"), "--port", "0"]
    done = run_onebitd(*argv, runtime=runtime)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"onebitd: backend.llama_server: {home}/text --list-devices: ")
    assert (runtime / "onebitd.lock").exists()


def test_decoder_that_hangs_while_it_loads_is_given_up(home: Path, runtime: Path) -> None:
    """backend.load_timeout_s bounds the wait."""
    path = home / "hangs.toml"
    path.write_text("[backend]\nload_timeout_s = 1\n")
    argv = ["--config", str(path), *words(home), "--", "--hang-on", "health"]
    done = run_onebitd(*argv, runtime=runtime)
    assert done.returncode == 4
    assert "no answer within 1 s (backend.load_timeout_s)" in done.stderr


def test_health_says_503_while_the_model_loads_and_requests_too() -> None:
    """The public listener is there first."""
    with running_route(decoder=("--load-delay", "2"), wait_ready=False) as route:
        daemon = route.daemon

        def listening() -> str | None:
            records = daemon.log_records("listening") if daemon.log_path.exists() else []
            return records[0]["line"] if records else None

        line = wait_until(listening, "onebitd listens")
        daemon.port = int(re.findall(r":(\d+),", line)[0])
        health = daemon.request("GET", "/health")
        error = {"message": "Loading model", "type": "unavailable_error", "code": 503}
        assert (health.status, health.json) == (503, {"error": error})
        chat = daemon.chat("Hello")
        assert (chat.status, chat.json["error"]["type"]) == (503, "unavailable_error")
        assert int(chat.headers["retry-after"]) > 0
        daemon.wait_ready()
        assert daemon.request("GET", "/health").json == {"status": "ok"}
