"""One request sent to onebitd and to its own decoder, and what is different about the replies.

Everything that the decoder says has to reach a client as it came: status, fields in their order,
body bytes. What no two replies have in common is masked first: ids, moments, durations.
"""

from __future__ import annotations

import dataclasses
import http.client
import itertools
import json
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Headers = list[tuple[bytes, bytes]]

CONNECTION_FIELDS = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"date"}
)
"""Fields of one hop. Content-Length is compared apart: masked bodies differ in length."""
OWN_FIELDS = frozenset({b"x-request-id", b"x-onebit-handoff", b"x-onebit-reason", b"server-timing"})
"""What onebitd may add to a reply of the handoff route, and nothing to any other."""

_NUMBERS = (
    *(b"created", b"created_at", b"completed_at", b"time_ms", b"id_task"),
    *(b"prompt_ms", b"prompt_per_token_ms", b"prompt_per_second"),
    *(b"predicted_ms", b"predicted_per_token_ms", b"predicted_per_second"),
)
_MASKS = (
    (re.compile(rb'("(?:' + b"|".join(_NUMBERS) + rb')":)(?:-?[0-9.][0-9.e+-]*|null)'), rb"\1TIME"),
    (re.compile(rb'"((?:[a-z]+[-_])?)[A-Za-z0-9]{32}"'), rb'"\1ID"'),
    (re.compile(rb"(multipart-data-)[0-9a-zA-Z]+"), rb"\1ID"),
    (re.compile(rb"(?m)^(llamacpp:\w*seconds\w*) \S+$"), rb"\1 TIME"),
)


@dataclasses.dataclass(frozen=True)
class Request:
    """A request as it goes over the wire.

    Attributes:
        body: JSON unless it is bytes; None sends no body and no Content-Length.
        headers: lines beside Host, Content-Type, Content-Length and Connection; an
            `X-Onebit-Handoff` is left out where it goes to the decoder.
        chunked: send the body in chunks of a few bytes.
        version: of HTTP; 1.0 sends no Host.
    """

    method: str
    target: str
    body: Any = None
    headers: tuple[str, ...] = ()
    chunked: bool = False
    version: str = "1.1"

    @property
    def data(self) -> bytes:
        """The body's bytes."""
        if self.body is None or isinstance(self.body, bytes):
            return self.body or b""
        return json.dumps(self.body).encode()

    def wire(self) -> bytes:
        """Return the whole request."""
        lines = [f"{self.method} {self.target} HTTP/{self.version}"]
        lines += ["Host: localhost"] if self.version == "1.1" else []
        body = self.data
        if self.body is not None:
            given = any(line.lower().startswith("content-type:") for line in self.headers)
            lines += [] if given else ["Content-Type: application/json"]
            framing = f"Content-Length: {len(body)}"
            lines.append("Transfer-Encoding: chunked" if self.chunked else framing)
        lines += ["Connection: close", *self.headers, "", ""]
        return "\r\n".join(lines).encode("utf-8") + (_in_chunks(body) if self.chunked else body)


def _in_chunks(body: bytes) -> bytes:
    pieces = [body[at : at + 7] for at in range(0, len(body), 7)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in [*pieces, b""])


@dataclasses.dataclass(frozen=True)
class Answer:
    """A whole reply: names of fields in lower case, in the order in which they came."""

    method: str
    status: int
    headers: Headers
    body: bytes

    def field(self, name: bytes) -> bytes | None:
        """Return the value of the first field of this name."""
        return dict(reversed(self.headers)).get(name)

    def relayed_headers(self) -> Headers:
        """Return the fields that are the decoder's own words."""
        return [
            (name, value)
            for name, value in self.headers
            if name not in CONNECTION_FIELDS and name not in OWN_FIELDS
        ]

    def added_headers(self) -> set[bytes]:
        """Return the names of the fields that are onebitd's."""
        return {name for name, _ in self.headers if name in OWN_FIELDS}


def send(connection: socket.socket, request: Request) -> Answer:
    """Send a request and read the reply to its end, as its framing says where that is.

    Raises:
        http.client.HTTPException: the reply is cut off, or no HTTP.
    """
    connection.settimeout(60)
    connection.sendall(request.wire())
    reply = http.client.HTTPResponse(connection, method=request.method)
    try:
        reply.begin()
        body = reply.read()
        fields = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in reply.getheaders()
        ]
        return Answer(request.method, reply.status, fields, body)
    finally:
        reply.close()


def ask_decoder(path: Path, request: Request) -> Answer:
    """Ask the decoder itself, on its private socket."""
    kept = [line for line in request.headers if not line.lower().startswith("x-onebit-")]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.fspath(path))
        return send(connection, dataclasses.replace(request, headers=tuple(kept)))


def ask_onebitd(port: int, request: Request) -> Answer:
    """Ask the public listener."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        return send(connection, request)


def masked(body: bytes) -> bytes:
    """Return the body with ids, moments and durations replaced by words.

    >>> masked(b'{"created":17,"prompt_ms":1.5e-3,"n":2}')
    b'{"created":TIME,"prompt_ms":TIME,"n":2}'
    """
    for pattern, word in _MASKS:
        body = pattern.sub(word, body)
    return body


def differences(direct: Answer, through: Answer, *, missing: Sequence[bytes] = ()) -> list[str]:
    """Return what differs, each as a sentence; empty when a client could not tell the two apart.

    Args:
        direct: the decoder's reply.
        through: onebitd's to the same request.
        missing: fields of the decoder's that are not expected here.
    """
    found = []
    if through.status != direct.status:
        found.append(f"status {through.status}, directly {direct.status}")
    wanted = [field for field in direct.relayed_headers() if field[0] not in missing]
    if [(name, masked(value)) for name, value in through.relayed_headers()] != [
        (name, masked(value)) for name, value in wanted
    ]:
        found.append(f"fields {through.relayed_headers()}, directly {wanted}")
    if masked(through.body) != masked(direct.body):
        found.append(f"body {_around(masked(through.body), masked(direct.body))}")
    return found + _framing_differences(direct, through)


def _framing_differences(direct: Answer, through: Answer) -> list[str]:
    """Lengths: of the body where there is one, else (HEAD, 304) of the one there would be."""
    ours, theirs = through.field(b"content-length"), direct.field(b"content-length")
    if (ours is None) != (theirs is None):
        return [f"content-length {ours!r}, directly {theirs!r}"]
    if ours is None:
        return []
    if through.method == "HEAD" or through.status in (204, 304):
        return [] if ours == theirs else [f"content-length {ours!r}, directly {theirs!r}"]
    right = b"%d" % len(through.body)
    return [] if ours == right else [f"content-length {ours!r} of a body of {right!r}"]


def _around(ours: bytes, theirs: bytes) -> str:
    """Show both bodies from shortly before their first difference."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))
    same = sum(1 for _ in pairs)
    start = max(same - 60, 0)
    return (
        f"from byte {same}: {ours[start : same + 200]!r}, directly {theirs[start : same + 200]!r}"
    )
