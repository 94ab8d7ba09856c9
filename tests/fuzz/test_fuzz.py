"""Whatever is sent, the daemon says what is wrong with it, and goes on serving."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import socket
import socketserver
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.standin_route import DECODER, quick_provider, said
from tests.fuzz import openapi
from tests.fuzz.malformed import CONTROL, PUBLIC, WAYS, Honest, malformed
from tests.fuzz.sender import exchange
from tests.harness import RunningDaemon, running_onebitd, wait_until
from tests.llama_builds import ROOT
from tests.standins import tiny_state
from tests.tools import fetch_clients

SEED = 20260601
CONNECTIONS = int(os.environ.get("FUZZ_CONNECTIONS", "1200"))
"""In all; `make fuzz` has more."""
EXAMPLES = max(6, CONNECTIONS // 500)
"""Generated requests for each endpoint and kind."""
PUBLIC_COUNT = CONNECTIONS * 7 // 10
CONTROL_COUNT = CONNECTIONS - PUBLIC_COUNT
ANSWERED = {"bytes", "header lines", "document", "JSON text", "request line"}
"""Ways after which most connections still get a reply."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """One daemon on the stand-ins; what is well-formed enough goes the whole way."""
    home = tmp_path_factory.mktemp("fuzz")
    model = home / "tiny.gguf"
    model.write_bytes(tiny_state.gguf())
    with running_onebitd(
        model=model,
        llama_server=DECODER,
        provider=quick_provider(home),
        config='[http]\nmax_body_mib = 1\n[handoff]\npolicy = "never"\n',
    ) as running:
        yield running


def fuzz(
    daemon: RunningDaemon,
    connect: Callable[[], socket.socket],
    count: int,
    honest: Sequence[Honest],
) -> Counter[str]:
    """Send so many; return how many connections of each way were answered."""
    answered: Counter[str] = Counter()
    unexplained = []
    for way, sent, answers in exchange(connect, malformed(SEED, count, honest)):
        answered[way] += bool(answers)
        unexplained += [
            (way, sent[:300], answer.status, answer.body[:200])
            for answer in answers
            if answer.status >= 500 and (not answer.reason or "its log says why" in answer.reason)
        ]
    assert not unexplained, unexplained[:3]
    assert set(answered) == set(WAYS)
    assert daemon.process.poll() is None
    return answered


def settle(daemon: RunningDaemon) -> list[str]:
    """Wait until nothing is in flight; return what its descriptors point at."""

    def is_quiet() -> bool:
        status = daemon.status()
        return not status["slot"]["busy"] and status["queue"]["pending"] == 0

    wait_until(is_quiet, "nothing is in flight")
    return daemon.open_files()


def assert_serves_and_has_nothing_to_hide(daemon: RunningDaemon) -> None:
    """A handoff works as ever, and the log tells of no fault of the daemon's own."""
    daemon.reset_provider()
    reply = daemon.completion("after all that", headers={"X-Onebit-Handoff": "strict"})
    assert reply.status == 200, reply
    assert reply.text == said("after all that")
    text = daemon.log_path.read_text(errors="replace")
    assert "Traceback" not in text, text[text.index("Traceback") - 2000 :][:6000]
    assert not daemon.log_records("internal_error")


def test_public_listener_malformed_requests_are_refused_with_their_reason(
    daemon: RunningDaemon,
) -> None:
    """No 5xx but with its reason, no traceback, no descriptor lost; and it still serves."""
    assert_serves_and_has_nothing_to_hide(daemon)
    before = settle(daemon)
    address = ("127.0.0.1", daemon.port)
    answered = fuzz(daemon, lambda: socket.create_connection(address), PUBLIC_COUNT, PUBLIC)
    assert min(answered[way] for way in ANSWERED) > PUBLIC_COUNT / len(WAYS) / 2, answered
    wait_until(lambda: len(settle(daemon)) <= len(before), "its descriptors are as before")
    assert_serves_and_has_nothing_to_hide(daemon)


def test_control_socket_malformed_requests_are_refused_with_their_reason(
    daemon: RunningDaemon,
) -> None:
    """The same for the control API."""
    before = settle(daemon)

    def connect() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(daemon.runtime / "control.sock"))
        return sock

    answered = fuzz(daemon, connect, CONTROL_COUNT, CONTROL)
    assert min(answered[way] for way in ANSWERED) > CONTROL_COUNT / len(WAYS) / 2, answered
    wait_until(lambda: len(settle(daemon)) <= len(before), "its descriptors are as before")
    assert_serves_and_has_nothing_to_hide(daemon)


# --- with somebody else's fuzzer ---------------------------------------------------------------


@contextlib.contextmanager
def tcp_door_to(path: Path) -> Iterator[int]:
    """Forward a port to a Unix socket: the fuzzer speaks TCP only. Yields the port."""

    class Door(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.socket(socket.AF_UNIX) as inside, contextlib.suppress(OSError):
                inside.connect(str(path))
                ways = {self.request: inside, inside: self.request}
                while True:
                    for sock in select.select(list(ways), [], [])[0]:
                        data = sock.recv(1 << 16)
                        if not data:
                            return
                        ways[sock].sendall(data)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Door) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def schemathesis(document: Mapping[str, Any], port: int, examples: int, tmp_path: Path) -> None:
    """Have schemathesis make up requests from a document; it must find nothing."""
    if not fetch_clients.is_installed():
        give_up = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        give_up("schemathesis is not installed: python -m tests.tools.fetch_clients")
    schema = tmp_path / "openapi.json"
    schema.write_text(json.dumps(document))
    command = [sys.executable, "-m", "schemathesis.cli", "run", str(schema)]
    command += ["--url", f"http://127.0.0.1:{port}", "--seed", "1", "--no-color"]
    command += ["--max-examples", str(examples), "--checks", "explained", "--mode", "all"]
    command += ["--phases", "examples,fuzzing", "--generation-database", "none"]
    command += ["--suppress-health-check", "all"]  # how long making up a request takes is no fault
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    env |= {"PYTHONPATH": f"{fetch_clients.FOLDER}:{ROOT}"}
    env |= {"SCHEMATHESIS_HOOKS": "tests.fuzz.schemathesis_checks"}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    cases = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert cases is not None, done.stdout
    assert int(cases[1]) == int(cases[2]) > 3 * examples, done.stdout


def test_public_api_schemathesis_finds_no_unexplained_error(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    """Requests made from the API's shapes, right and wrong ones."""
    schemathesis(openapi.PUBLIC, daemon.port, EXAMPLES, tmp_path)
    assert_serves_and_has_nothing_to_hide(daemon)


def test_control_api_schemathesis_finds_no_unexplained_error(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    """The same for the control API."""
    with tcp_door_to(daemon.runtime / "control.sock") as port:
        schemathesis(openapi.CONTROL, port, EXAMPLES, tmp_path)
    assert_serves_and_has_nothing_to_hide(daemon)
