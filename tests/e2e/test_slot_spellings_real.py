"""No spelling of a request reaches a slot action of the real decoder behind onebitd's back."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.rig import BACKEND_ARGS
from tests.harness import RunningDaemon, raw_connection, running_onebitd
from tests.llama_builds import LlamaBuild, LlamaModel

PROMPT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all."
REACHED = (b"n_erased", b"n_saved", b"n_restored", b"Invalid action", b"Invalid slot ID")
"""What only llama-server's own handler of slot actions says."""
QUERIES = ("?action=erase", "?action=save&action=erase", "?%61ction=erase", "?action=nonsense")


def spellings() -> list[str]:
    """Return targets that somebody might read as /slots/0, with and without reason."""
    path = "/slots/0"
    found = [path, f"{path}/", f"{path}//", "/slots/", "/slots/00", "/slots/-1", "/slots/0abc"]
    found += [f"{path}{end}" for end in (";x=1", "%20", "%09", "%0a", "%0d%0a", "%00", "%2f", ".")]
    found += [f"{path}{end}" for end in ("%3f", "%23", "#", "#?", "%", "%0", "%zz", "&", "+", "~")]
    found += ["/slots/%0a0", "/slots%0a/0", "/slots/%200", "/slots/0%0a%0a", "/slots/0%e2%80%a8"]
    found += [path[:at] + f"%{ord(path[at]):02x}" + path[at + 1 :] for at in range(1, len(path))]
    found += [path[:at] + f"%{ord(path[at]):02X}" + path[at + 1 :] for at in (6, 7)]
    found += ["".join(f"%{ord(letter):02x}" for letter in path), "/%2573lots/0", "/%25%37%33lots/0"]
    found += ["/%u0073lots/0", "/%U0073lots/0", "/%u002573lots/0", "/slots%u002f0"]
    found += ["//slots/0", "///slots/0", "/slots//0", "/./slots/0", "/slots/./0", "/slots/0/."]
    found += ["/x/../slots/0", "/slots/x/../0", "/slots/0/../0", "/../slots/0", "/%2e/slots/0"]
    found += ["/x/%2e%2e/slots/0", "/x%2f..%2fslots/0", "/tokenize/../slots/0", "/.%2fslots/0"]
    found += ["/\\slots/0", "/slots\\0", "/%5cslots/0", "/SLOTS/0", "/Slots/0", "/slot\u0131/0"]
    found += ["/%c0%afslots/0", "/slots%c0%af0", "/%ef%bc%8fslots/0", "/slot%c5%bf/0", "/;/slots/0"]
    found += ["http://localhost/slots/0", "HTTP://localhost/slots/0", "//localhost/slots/0"]
    found += ["slots/0", "localhost:80/slots/0", "*", "/v1/slots/0", "/api/slots/0", "/v1//slots/0"]
    return found


def requests() -> Iterator[bytes]:
    """Yield raw requests: each spelling as a POST, some with every method and every query."""
    methods = ("POST", "post", "Post", "PUT", "PATCH", "DELETE", "GET", "HEAD", "OPTIONS", "TRACE")
    for target in spellings():
        yield _wire("POST", target, QUERIES[0])
    some = ("/slots/0", "/slots/0/", "/slots/0%0a", "/%73lots/0", "//slots/0", "/x/../slots/0")
    for method, target in itertools.product(methods, some):
        yield _wire(method, target, QUERIES[0])
    for target, query in itertools.product(some, QUERIES[1:]):
        yield _wire("POST", target, query)
    for name in ("X-HTTP-Method-Override", "X-Method-Override", "X-HTTP-Method"):
        yield _wire("GET", "/slots/0", QUERIES[0], f"{name}: POST")
    for name in ("X-Original-URL", "X-Rewrite-URL", "X-Forwarded-Prefix", "Location"):
        yield _wire("POST", "/tokenize", "", f"{name}: /slots/0?action=erase")
    for host in ("localhost/slots/0", "localhost/slots/0?", "/slots/0"):
        yield _wire("CONNECT", host, QUERIES[0])


def _wire(method: str, target: str, query: str, more: str = "X: y") -> bytes:
    line = f"{method} {target}{query} HTTP/1.1\r\nHost: localhost\r\n{more}\r\n"
    return line.encode() + b"Content-Length: 2\r\nConnection: close\r\n\r\n{}"


def _send(connection: socket.socket, wire: bytes) -> bytes:
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        connection.sendall(wire)
        while data := connection.recv(65536):
            answer += data
    return answer


def _send_to_decoder(daemon: RunningDaemon, wire: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20.0)
        connection.connect(str(Path(daemon.runtime) / "backend.sock"))
        return _send(connection, wire)


def test_slot_actions_no_spelling_reaches_the_real_decoder(
    parts: tuple[LlamaBuild, LlamaModel],
) -> None:
    """Hundreds of them, and what the slot holds is still there for the next request; sent to the
    decoder itself, some would have emptied it.
    """
    build, model = parts
    with running_onebitd(
        model=model.path,
        llama_server=build.program,
        backend_args=[*BACKEND_ARGS, *build.extra_args],
    ) as daemon:

        def reused() -> int:
            reply = daemon.completion(PROMPT, max_tokens=1)
            return int(reply.json["timings"]["cache_n"])

        reused()
        before = reused()
        assert before > 5
        files = daemon.slot_files()
        answers = []
        for wire in requests():
            with raw_connection(daemon.port, 20.0) as connection:
                answers.append((wire, _send(connection, wire)))
        assert len(answers) > 150
        for wire, answer in answers:
            assert not any(word in answer for word in REACHED), (wire, answer)
            assert answer.startswith(b"HTTP/1.1 "), (wire, answer)
        assert reused() == before
        assert daemon.slot_files() == files
        for target in ("/slots/0", "/slots/0/", "/%73lots/0", "/slots/0%0a"):
            assert reused() > 0
            assert b"n_erased" in _send_to_decoder(daemon, _wire("POST", target, QUERIES[0]))
            assert daemon.completion(PROMPT, max_tokens=1).json["timings"]["cache_n"] == 0
