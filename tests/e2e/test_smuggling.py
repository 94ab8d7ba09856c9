"""Requests that two readers could cut differently, on raw sockets: one request or a refusal.

A proxy in front of onebitd, onebitd, and the decoder behind it must agree where each request ends.
Every case has a second request in tow, for `/smuggled`: where the first is refused, the connection
must end there; where it is served, what follows must be what its framing says, and nothing else.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator

import pytest

from tests.e2e.standin_route import Route, running_route
from tests.harness import raw_connection, wait_until

BODY = b'{"content": "a"}'
CHUNKED = b"10\r\n" + BODY + b"\r\n0\r\n\r\n"
TOW = b"GET /smuggled HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")


@pytest.fixture(scope="module")
def shared() -> Iterator[Route]:
    """One daemon on the stand-in decoder, which writes down what reaches it."""
    with running_route(provider=False) as route:
        yield route


@pytest.fixture
def route(shared: Route) -> Iterator[Route]:
    """The shared daemon; afterwards it must serve the next one as ever."""
    shared.forget()
    yield shared
    assert shared.daemon.request("POST", "/tokenize", BODY).status == 200


def exchange(route: Route, wire: bytes) -> tuple[list[int], bool, bytes]:
    """Send raw bytes and nothing more; return the statuses, whether it closed, and all that came.

    What is still open after the last reply is closed here: by then the bytes have been judged.
    """
    with raw_connection(route.daemon.port, 10.0) as connection:
        connection.sendall(wire)
        answer, closed = b"", False
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            while True:
                data = connection.recv(65536)
                if not data:
                    closed = True
                    break
                answer += data
                connection.settimeout(0.3)
        return [int(found) for found in STATUS.findall(answer)], closed, answer


def head(*fields: bytes, line: bytes = b"POST /tokenize HTTP/1.1") -> bytes:
    """Return a request's head, with a host."""
    return b"\r\n".join([line, b"Host: localhost", *fields, b"", b""])


LENGTH = b"Content-Length: %d" % len(BODY)
CODED = b"Transfer-Encoding: chunked"

REFUSED = {
    # Two framings.
    "cl-te": head(LENGTH, CODED) + CHUNKED,
    "te-cl": head(CODED, LENGTH) + CHUNKED,
    "cl-0-te": head(b"Content-Length: 0", CODED) + CHUNKED,
    "cl-short-te": head(b"Content-Length: 4", CODED) + CHUNKED,
    "te-1.0": head(CODED, line=b"POST /tokenize HTTP/1.0") + CHUNKED,
    # A coding that is not quite chunked.
    "te-identity": head(b"Transfer-Encoding: identity", LENGTH) + BODY,
    "te-list": head(b"Transfer-Encoding: chunked, identity") + CHUNKED,
    "te-list-2": head(b"Transfer-Encoding: identity, chunked") + CHUNKED,
    "te-gzip": head(b"Transfer-Encoding: gzip, chunked") + CHUNKED,
    "te-x": head(b"Transfer-Encoding: xchunked", LENGTH) + BODY,
    "te-quoted": head(b'Transfer-Encoding: "chunked"') + CHUNKED,
    "te-vt": head(b"Transfer-Encoding: \x0bchunked") + CHUNKED,
    "te-semicolon": head(b"Transfer-Encoding: chunked;q=1") + CHUNKED,
    "te-twice": head(CODED, CODED) + CHUNKED,
    "te-twice-other": head(CODED, b"Transfer-Encoding: x") + CHUNKED,
    "te-empty": head(b"Transfer-Encoding: ", LENGTH) + BODY,
    "te-space-colon": head(b"Transfer-Encoding : chunked", LENGTH) + BODY,
    "te-tab-colon": head(b"Transfer-Encoding\t: chunked", LENGTH) + BODY,
    "te-folded-name": head(b"X: y\r\n\x0bTransfer-Encoding: chunked", LENGTH) + BODY,
    # A length that is none, or two.
    "cl-two": head(LENGTH, b"Content-Length: 3") + BODY,
    "cl-list": head(b"Content-Length: 16, 3") + BODY,
    "cl-negative": head(b"Content-Length: -1") + BODY,
    "cl-plus": head(b"Content-Length: +16") + BODY,
    "cl-hex": head(b"Content-Length: 0x10") + BODY,
    "cl-space": head(b"Content-Length: 1 6") + BODY,
    "cl-float": head(b"Content-Length: 16.0") + BODY,
    "cl-exponent": head(b"Content-Length: 1e1") + BODY,
    "cl-underscore": head(b"Content-Length: 1_6") + BODY,
    "cl-empty": head(b"Content-Length: ") + BODY,
    "cl-letter": head(b"Content-Length: x") + BODY,
    "cl-arabic": head("Content-Length: \u0661\u0666".encode()) + BODY,
    "cl-huge": head(b"Content-Length: " + b"9" * 40) + BODY,
    "cl-space-colon": head(b"Content-Length : 16") + BODY,
    # Bytes that are none of a header's.
    "nul-value": head(b"X: a\x00b", LENGTH) + BODY,
    "nul-name": head(b"X\x00: a", LENGTH) + BODY,
    "cr-value": head(b"X: a\rContent-Length: 3", LENGTH) + BODY,
    "cr-cr-lf": head(b"X: a\r", LENGTH) + BODY,
    "no-colon": head(b"X", LENGTH) + BODY,
    "empty-name": head(b": a", LENGTH) + BODY,
    "space-first": b"POST /tokenize HTTP/1.1\r\n Host: localhost\r\n" + LENGTH + b"\r\n\r\n" + BODY,
    "two-hosts": head(b"Host: localhost", LENGTH) + BODY,
    "no-host": b"POST /tokenize HTTP/1.1\r\n" + LENGTH + b"\r\n\r\n" + BODY,
    "two-origins": head(b"Origin: http://localhost", b"Origin: http://localhost", LENGTH) + BODY,
    # Request lines.
    "line-blank": b"\r\n" + head(LENGTH) + BODY,
    "line-two-spaces": head(LENGTH, line=b"POST  /tokenize HTTP/1.1") + BODY,
    "line-tab": head(LENGTH, line=b"POST\t/tokenize HTTP/1.1") + BODY,
    "line-no-version": head(LENGTH, line=b"POST /tokenize") + BODY,
    "line-0.9": b"GET /tokenize\r\n",
    "line-version": head(LENGTH, line=b"POST /tokenize HTTP/1.2") + BODY,
    "line-version-2": head(LENGTH, line=b"POST /tokenize HTTP/2.0") + BODY,
    "line-http-lower": head(LENGTH, line=b"POST /tokenize http/1.1") + BODY,
    "line-cr": head(LENGTH, line=b"POST /tokenize\rX: y HTTP/1.1") + BODY,
    "line-nul": head(LENGTH, line=b"POST /token\x00ize HTTP/1.1") + BODY,
    # Chunks.
    "chunk-negative": head(CODED) + b"-1\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk-plus": head(CODED) + b"+10\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk-0x": head(CODED) + b"0x10\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk-space": head(CODED) + b" 10\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk-empty": head(CODED) + b"\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk-digits": head(CODED) + b"0" * 21 + b"10\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk-long-line": head(CODED) + b"10;" + b"x" * 300_000 + b"\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk-bare-lf": head(CODED) + b"10\n" + BODY + b"\n0\n\n",
    "chunk-lf-in-extension": head(CODED) + b"10;a\nb\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk-too-much": head(CODED) + b"f\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk-no-crlf": head(CODED) + b"10\r\n" + BODY + b"0\r\n\r\n",
    "trailer-te": head(CODED) + b"10\r\n" + BODY + b"\r\n0\r\nTransfer-Encoding: x\r\n\r\n",
    "trailer-bad": head(CODED) + b"10\r\n" + BODY + b"\r\n0\r\nX : y\r\n\r\n",
}

SERVED = {
    "plain": head(LENGTH) + BODY,
    "chunked": head(CODED) + CHUNKED,
    "te-case": head(b"tRANSFER-eNCODING: CHUNKED") + CHUNKED,
    "te-blanks": head(b"Transfer-Encoding:  \t chunked \t") + CHUNKED,
    "cl-zeros": head(b"Content-Length: 0016") + BODY,
    "cl-same-twice": head(LENGTH, LENGTH) + BODY,
    "cl-same-list": head(b"Content-Length: 16, 16") + BODY,
    "chunk-extension": head(CODED) + b'10;a=b;c="d"\r\n' + BODY + b"\r\n0;e\r\n\r\n",
    "chunk-zeros": head(CODED) + b"0010\r\n" + BODY + b"\r\n000\r\n\r\n",
    "chunks": head(CODED) + b"8\r\n" + BODY[:8] + b"\r\n8\r\n" + BODY[8:] + b"\r\n0\r\n\r\n",
    "trailers": head(CODED, b"Trailer: X, Content-Length")
    + b"10\r\n"
    + BODY
    + b"\r\n0\r\nX: y\r\nContent-Length: 3\r\nHost: evil.example\r\n\r\n",
    "obs-fold": head(b"X: a\r\n b\r\n\tc", LENGTH) + BODY,
    "bare-lf-head": head(LENGTH).replace(b"\r\n", b"\n") + BODY,
    "connection-names-length": head(b"Connection: content-length, host", LENGTH) + BODY,
    "connection-names-coding": head(b"Connection: transfer-encoding", CODED) + CHUNKED,
    "lower-method": head(LENGTH, line=b"post /tokenize HTTP/1.1") + BODY,
    "upgrade-h2c": head(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", LENGTH) + BODY,
    "expect": head(b"Expect: 100-continue", LENGTH) + BODY,
    "override": head(b"X-HTTP-Method-Override: DELETE", LENGTH) + BODY,
    "rewrite": head(b"X-Original-URL: /slots/0?action=erase", LENGTH) + BODY,
}


@pytest.mark.parametrize("name", REFUSED)
def test_request_of_two_meanings_is_refused_and_the_connection_ends(
    route: Route, name: str
) -> None:
    """One answer of 400 (or 413, 431, 501), nothing behind it, and nothing at the decoder."""
    statuses, closed, answer = exchange(route, REFUSED[name] + TOW)
    assert len(statuses) == 1, answer
    assert statuses[0] in (400, 413, 431, 501), answer
    assert closed
    assert b"smuggled" not in answer.partition(b"\r\n\r\n")[0]
    assert [one["target"] for one in route.backend()] == []


@pytest.mark.parametrize("name", SERVED)
def test_odd_request_is_one_request_and_the_next_one_is_the_next(route: Route, name: str) -> None:
    """The decoder gets exactly one well-framed request for it, then the one in tow."""
    statuses, _, answer = exchange(route, SERVED[name] + TOW)
    if name == "expect":
        statuses.remove(100)
    assert statuses == [200, 404], answer
    first, second = route.backend()
    assert (first["method"], first["target"]) == ("POST", "/tokenize")
    assert first["body"].encode() == BODY
    assert (second["method"], second["target"]) == ("GET", "/smuggled")
    headers = first["headers"]
    assert headers["content-length"] == str(len(BODY))
    assert not {"transfer-encoding", "trailer", "upgrade", "expect", "te"} & headers.keys()
    assert "evil.example" not in headers.values()


@pytest.mark.parametrize(
    "begun",
    [
        head(b"Content-Length: 1000") + BODY,
        head(CODED) + b"10\r\n" + BODY[:5],
        head(CODED) + b"ffffffffffffffffffff\r\n" + BODY,
        head(CODED) + b"10\r\n" + BODY + b"\r\n",
        head(CODED) + b"10\r\n" + BODY + b"\r\n0\r\n",
        head(LENGTH)[:-2],
        b"POST /tokenize HTT",
    ],
)
def test_request_that_never_ends_reaches_nobody(route: Route, begun: bytes) -> None:
    """Half a request is none: cut off in its head, its body or its trailer."""
    with raw_connection(route.daemon.port, 10.0) as connection:
        connection.sendall(begun)
        connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while data := connection.recv(65536):
                assert not data.startswith(b"HTTP/1.1 2")
    wait_until(lambda: not route.daemon.control("/v1/requests")["requests"], "it is over", 10.0)
    assert route.backend() == []


def test_body_is_no_request_whatever_it_says(route: Route) -> None:
    """A request inside a body stays there."""
    inside = b'{"content": "x", "y": "\\r\\n\\r\\n"}' + b" " * 4 + b"\r\n\r\n" + TOW
    wire = head(b"Content-Length: %d" % len(inside), b"Connection: close") + inside
    statuses, _, _ = exchange(route, wire)
    assert len(statuses) == 1
    assert [one["target"] for one in route.backend()] == ["/tokenize"]


def test_refused_request_with_its_body_is_no_two_requests(route: Route) -> None:
    """A 403 leaves the body of what it refuses unread by nobody but us."""
    body = TOW
    first = head(b"Content-Length: %d" % len(body), line=b"POST /slots/0?action=erase HTTP/1.1")
    statuses, _, answer = exchange(route, first + body + TOW.replace(b"smuggled", b"v1/models"))
    assert statuses in ([403, 200], [403]), answer
    assert all(one["target"] == "/v1/models" for one in route.backend())


@pytest.mark.parametrize(
    "value",
    [b"a b", b"a\x80b", b"x" * 129, b"\xe9", b"a\tb", b"a\x0cb", b"a\rX-Evil: 1", b"a\x00"],
)
def test_request_id_that_is_no_word_is_never_repeated(route: Route, value: bytes) -> None:
    """Neither in a header nor in the log: it gets one of ours, or the request none at all."""
    fields = (b"X-Request-Id: " + value, LENGTH, b"Connection: close")
    statuses, _, answer = exchange(route, head(*fields) + BODY)
    assert statuses in ([200], [400])
    assert value not in answer
    assert b"evil" not in answer.partition(b"\r\n\r\n")[0].lower()


@pytest.mark.parametrize(
    "target",
    [
        b"/v1/models%0d%0aX-Evil:%201",
        b"/v1/models%0d%0a%0d%0aGET%20/smuggled%20HTTP/1.1%0d%0aHost:%20x%0d%0a%0d%0a",
        b"/%20HTTP/1.1%0d%0aX:y",
    ],
)
def test_encoded_line_ends_in_a_target_stay_encoded(route: Route, target: bytes) -> None:
    """The decoder gets the target byte for byte, in one request."""
    statuses, _, answer = exchange(
        route, head(b"Connection: close", line=b"GET " + target + b" HTTP/1.1")
    )
    assert statuses == [404]
    assert b"x-evil" not in answer.lower()
    assert [one["target"] for one in route.backend()] == [target.decode()]
    assert "x-evil" not in route.backend()[0]["headers"]
