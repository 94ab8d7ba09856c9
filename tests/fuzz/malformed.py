"""Requests that no client should send, from a seed: the same ones each time.

Each is the bytes of one connection. They begin as an honest request and are then damaged in one of
the ways that `WAYS` names, so that most of them get past the first check.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Honest:
    """A request as a client would send it; `document` goes as JSON."""

    method: str
    target: str
    document: object = None


PUBLIC: Final[Sequence[Honest]] = (
    Honest("GET", "/health"),
    Honest("GET", "/v1/models"),
    Honest("GET", "/props"),
    Honest("GET", "/slots"),
    Honest("GET", "/nothing/here?a=b"),
    Honest("POST", "/tokenize", {"content": "one two", "add_special": True}),
    Honest("POST", "/apply-template", {"messages": [{"role": "user", "content": "one"}]}),
    Honest("POST", "/v1/completions", {"prompt": "one two three", "max_tokens": 1}),
    Honest("POST", "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 1, "stream": True}),
    Honest("POST", "/completion", {"prompt": "one", "n_predict": 1, "id_slot": 0}),
    Honest(
        "POST",
        "/v1/chat/completions",
        {
            "model": "m",
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}],
            "max_tokens": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    Honest("POST", "/slots/0?action=erase", {}),
)
CONTROL: Final[Sequence[Honest]] = (
    Honest("GET", "/v1/status"),
    Honest("GET", "/v1/config"),
    Honest("GET", "/v1/costs"),
    Honest("GET", "/v1/requests"),
    Honest("GET", "/v1/handoffs?limit=3&outcome=used&since=2026-01-01T00:00:00Z"),
    Honest("POST", "/v1/requests/cancel", {"request_id": "abc"}),
    Honest("POST", "/v1/provider/reset", {}),
    Honest("POST", "/v1/reload", {}),
)

_ODD_BYTES: Final = (
    *(b"\x00", b"\r", b"\n", b"\r\n", b"\r\n\r\n", b"\t", b" ", b"\x7f", b"\xff", b"\xc3\x28"),
    *(b":", b",", b";", b"%", b"%00", b"%0d%0a", b"%u0073", b"#", b"..", b"//", b"\\", b"{", b"]"),
    *(b'"', b"'", b"0", b"-1", b"9" * 30, b"A" * 300, b"\xf0\x9f\x98\x80", b"${x}", b"%s%n"),
)
_ODD_VALUES: Final[Sequence[Any]] = (
    *(None, True, False, 0, -1, 1, 1.5, 1e308, -1e308, 2**31, 2**63, 2**64, 10**40),
    *("", " ", "\x00", "\ud800", "\u202e", "one", "x" * 5000, [], {}, [[]], [None], [1, "a"]),
    *([[1], [2]], {"a": {}}, [-1], [2**40], [1.5], ["a", "b"], {"prompt_string": "a"}),
)
_METHODS: Final = (
    *(b"GET", b"POST", b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"TRACE", b"CONNECT"),
    *(b"PRI", b"get", b"P OST", b"", b"G\x00T", b"VERYLONG" * 40, b"GET/", b"\xffGET"),
)
_TARGETS: Final = (
    *(b"*", b"", b"/", b"//", b"/..", b"/../slots/0", b"/%2e%2e/", b"/\xff", b"/%", b"/%zz"),
    *(b"http://localhost/health", b"http://[::1/health", b"localhost:80", b"/" + b"a" * 70_000),
    *(b"/?" + b"&" * 9000, b"/health#x", b"/health\x00", b"/v1/handoffs?limit=%00"),
    *(b"/v1/handoffs?limit=-1", b"/v1/handoffs?since=0", b"/v1/handoffs?outcome=", b"/v1/\xc3\xa9"),
)
_VERSIONS: Final = (b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/9.9", b"HTTP/1.1.1")
_HEADER_LINES: Final = (
    *(b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: +5", b"Content-Length: 0x5"),
    *(b"Content-Length: 99999999999999999999", b"Content-Length: 5, 5", b"Content-Length:"),
    *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: x"),
    *(b"Transfer-Encoding : chunked", b"Transfer-Encoding:\tchunked", b"TE: trailers"),
    *(b"Host: evil.example", b"Host: ", b"Host: a b", b"Host: [::1", b"Host: 127.0.0.1:99999"),
    *(b"Origin: null", b"Origin: http://evil.example", b"Origin: \xff", b"Origin: http://[::1"),
    *(b"Expect: 100-continue", b"Expect: nothing", b"Connection: upgrade", b"Connection: close"),
    *(b"Upgrade: websocket", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQAAP__"),
    *(b"X-Onebit-Handoff: maybe", b"X-Onebit-Handoff: \xff", b"X-Request-Id: " + b"i" * 5000),
    *(b"X-Request-Id: a\x00b", b"Authorization: Bearer", b"Authorization: \xff", b"X-Api-Key:"),
    *(b"Content-Type: text/plain", b"Content-Type: application/json; charset=utf-16"),
    *(b"Content-Encoding: gzip", b"Range: bytes=0-1", b"Sec-Fetch-Site: cross-site", b": empty"),
    *(b"no colon", b" folded: line", b"Na me: x", b"Name\x00: x", b"N: " + b"v" * 70_000),
)
_CHUNKED_BODIES: Final = (
    *(b"5\r\n{}   \r\n0\r\n\r\n", b"2\r\n{}\r\n0\r\n\r\n", b"2;a=b\r\n{}\r\n0\r\nX: y\r\n\r\n"),
    *(b"-2\r\n{}\r\n0\r\n\r\n", b"0x2\r\n{}\r\n0\r\n\r\n", b"2\n{}\n0\n\n", b"zz\r\n", b"\r\n"),
    *(b"FFFFFFFFFFFFFFFFFF\r\n{}", b"2\r\n{}X\r\n0\r\n\r\n", b"2\r\n{", b"2" * 20_000, b"0\r\n"),
)


def _head(line: bytes, headers: Headers) -> bytes:
    fields = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
    return line + b"\r\n" + fields + b"\r\n"


def _parts(request: Honest) -> tuple[bytes, Headers, bytes]:
    body = b"" if request.document is None else json.dumps(request.document).encode()
    headers: Headers = [(b"Host", b"localhost"), (b"Connection", b"close")]
    if body:
        headers += [(b"Content-Type", b"application/json")]
        headers += [(b"Content-Length", str(len(body)).encode())]
    return f"{request.method} {request.target} HTTP/1.1".encode(), headers, body


def _damaged_bytes(rng: random.Random, data: bytes, times: int) -> bytes:
    changed = bytearray(data)
    for _ in range(times):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0:
                changed[at:at] = rng.choice(_ODD_BYTES)
            case 1:
                del changed[at : at + rng.randrange(1, 9)]
            case 2:
                changed[at : at + 1] = bytes([rng.randrange(256)])
            case _:
                changed[at:at] = changed[at : at + rng.randrange(1, 40)]
    return bytes(changed)


def _bytes(rng: random.Random, request: Honest) -> bytes:
    line, headers, body = _parts(request)
    return _damaged_bytes(rng, _head(line, headers) + body, rng.randrange(1, 5))


def _cut(rng: random.Random, request: Honest) -> bytes:
    line, headers, body = _parts(request)
    whole = _head(line, headers) + body
    return whole[: rng.randrange(len(whole))]


def _request_line(rng: random.Random, request: Honest) -> bytes:
    _, headers, body = _parts(request)
    method, target = request.method.encode(), request.target.encode()
    version = b"HTTP/1.1"
    match rng.randrange(3):
        case 0:
            method = rng.choice(_METHODS)
        case 1:
            target = rng.choice(_TARGETS)
        case _:
            version = rng.choice(_VERSIONS)
    return _head(b" ".join((method, target, version)), headers) + body


def _header_lines(rng: random.Random, request: Honest) -> bytes:
    line, headers, body = _parts(request)
    lines = [name + b": " + value for name, value in headers]
    for _ in range(rng.randrange(1, 4)):
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(_HEADER_LINES))
    if rng.random() < 0.1:
        lines += [b"X-%d: y" % number for number in range(rng.choice((90, 200, 5000)))]
    end = rng.choice((b"\r\n", b"\r\n", b"\r\n", b"\n"))
    return line + end + end.join(lines) + end + end + body


def _chunks(rng: random.Random, request: Honest) -> bytes:
    line, headers, _ = _parts(request)
    kept = [one for one in headers if one[0] != b"Content-Length"]
    head = _head(line, [*kept, (b"Transfer-Encoding", b"chunked")])
    return head + rng.choice(_CHUNKED_BODIES)


def _document(rng: random.Random, request: Honest) -> bytes:
    """Put a value of the wrong type, or a stranger's key, somewhere into the document."""
    document = json.loads(json.dumps(request.document)) if request.document else {}
    for _ in range(rng.randrange(1, 4)):
        place: Any = document
        while isinstance(place, list | dict) and place and rng.random() < 0.4:
            key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if not isinstance(place[key], list | dict):
                break
            place = place[key]
        if isinstance(place, dict):
            key = rng.choice([*place, "stream", "n", "tools", "stop", "unknown", "\ud800"])
            place[key] = copy.deepcopy(rng.choice(_ODD_VALUES))
        else:
            place.append(copy.deepcopy(rng.choice(_ODD_VALUES)))
    return _with_body(request, json.dumps(document).encode())


def _json_text(rng: random.Random, request: Honest) -> bytes:
    """Damage the text of the document; its length stays told truly."""
    text = json.dumps(request.document or {}).encode()
    odd = (
        *(b"", b"null", b"[]", b"{", b'{"a":NaN}', b"\xff\xfe{\x00}\x00", b'{"a":1e999}'),
        *(b"[" * 100_000, b'{"a":' * 5000, b'"\xed\xa0\x80"', b"{} {}", b'{"stream":tru'),
        b'{"prompt":"a","prompt":[1],"messages":[],"messages":3}',
    )
    if rng.random() < 0.5:
        return _with_body(request, rng.choice(odd))
    return _with_body(request, _damaged_bytes(rng, text, rng.randrange(1, 4)))


def _length(rng: random.Random, request: Honest) -> bytes:
    """Tell a wrong length."""
    line, headers, body = _parts(request)
    wrong = max(0, len(body) + rng.choice((-5, -1, 1, 7, 1 << 20)))
    kept = [one for one in headers if one[0] != b"Content-Length"]
    return _head(line, [*kept, (b"Content-Length", str(wrong).encode())]) + body


def _with_body(request: Honest, body: bytes) -> bytes:
    line, headers, _ = _parts(request)
    kept = [one for one in headers if one[0] != b"Content-Length"]
    return _head(line, [*kept, (b"Content-Length", str(len(body)).encode())]) + body


def _pipelined(rng: random.Random, request: Honest) -> bytes:
    line, headers, body = _parts(request)
    kept = [one for one in headers if one[0] != b"Connection"]
    return (_head(line, kept) + body) * 2 + _bytes(rng, request)


def _noise(rng: random.Random, request: Honest) -> bytes:
    del request
    return rng.randbytes(rng.choice((1, 20, 300, 70_000)))


WAYS: Final[Mapping[str, Callable[[random.Random, Honest], bytes]]] = {
    "bytes": _bytes,
    "cut": _cut,
    "request line": _request_line,
    "header lines": _header_lines,
    "chunks": _chunks,
    "document": _document,
    "JSON text": _json_text,
    "length": _length,
    "pipelined": _pipelined,
    "noise": _noise,
}

WHOLE: Final = frozenset({"document", "JSON text"})
"""Ways that leave a request that a server need not wait for the rest of."""


def malformed(seed: int, count: int, honest: Sequence[Honest]) -> Iterator[tuple[str, bytes]]:
    """Yield so many connections' bytes, each with the way it was damaged."""
    rng = random.Random(seed)  # noqa: S311 - the same requests each time
    ways = list(WAYS.items())
    for number in range(count):
        name, damage = ways[number % len(ways)]
        yield name, damage(rng, rng.choice(honest))
