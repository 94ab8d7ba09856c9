"""What `onebitctl try` and `bench` read from a public address, byte by byte."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from onebitd.client import AccessDenied, BadAnswer, ControlClient, NoDaemon
from onebitd.core.errors import ConfigError, RequestError
from onebitd.core.handoff import Route
from onebitd.surfaces import cli_public, cli_try, public_http
from onebitd.surfaces.cli_public import PublicClient, address_in
from onebitd.surfaces.relay import Client

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


@contextlib.contextmanager
def answering(*pieces: bytes, path: str | None = None) -> Iterator[tuple[str, list[bytes]]]:
    """Serve one connection: read a request, send each piece by itself, close. Yield the address.

    It is a Unix socket at `path`, if there is one. The list gets the request.
    """
    asked: list[bytes] = []
    family = socket.AF_INET if path is None else socket.AF_UNIX
    with socket.socket(family) as listener:
        listener.bind(("127.0.0.1", 0) if path is None else path)
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(10)
                data = b""
                while b"\r\n\r\n" not in data or not data.endswith(b"}"):
                    data += connection.recv(1 << 16)
                asked.append(data)
                for piece in pieces:
                    connection.sendall(piece)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        name = listener.getsockname()
        yield f"127.0.0.1:{name[1]}" if path is None else f"unix:{path}", asked
        thread.join(10)


def event(text: str) -> bytes:
    """Return one event of a streamed chat."""
    document = {"choices": [{"delta": {"content": text}}]}
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"


def refusal(status: int, message: str) -> bytes:
    """Return an error reply."""
    body = json.dumps({"error": {"message": message}}).encode()
    return b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def texts(address: str, api_key: str | None = None) -> list[str]:
    """Ask and return the text of each event."""
    stream = PublicClient(address, api_key).stream("/v1/chat/completions", {"a": 1}, {})
    return [one["choices"][0]["delta"]["content"] for one in stream]


def test_stream_letter_split_over_pieces_comes_whole() -> None:
    """A byte at a time: letters, lines and events are put together; comments are passed over."""
    wire = b": keep-alive\n\n" + event("Grüße ") + event("日本語 👩") + b"data: [DONE]\n\n"
    with answering(HEAD, *(wire[at : at + 1] for at in range(len(wire)))) as (address, asked):
        assert texts(address, "the key") == ["Grüße ", "日本語 👩"]
    head = asked[0].split(b"\r\n\r\n")[0].lower()
    assert b"authorization: bearer the key" in head
    assert b"host: localhost" in head
    assert asked[0].endswith(b'{"a": 1, "stream": true}')


@pytest.mark.parametrize(
    ("pieces", "wanted"),
    [
        ((HEAD, event("one")), "the reply broke off"),
        ((HEAD, event("one"), b'data: {"error":{"message":"died"}}\n\n'), "broke off: died"),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n", event("one")), "broke off"),
        ((b"",), "broke off"),
        ((b"garbage\r\n\r\n",), "broke off"),
        (
            (refusal(503, "Loading model"),),
            "answered 503: Loading model",
        ),
        ((b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 2\r\n\r\nno",), "502: Bad Gateway"),
    ],
)
def test_stream_that_is_no_whole_reply_is_an_error(pieces: Sequence[bytes], wanted: str) -> None:
    """Cut off, ended by an error event, refused: never taken for a reply."""
    with answering(*pieces) as (address, _), pytest.raises(BadAnswer, match=wanted) as raised:
        texts(address)
    assert raised.value.exit_status == 1


def test_stream_event_that_says_nothing_is_passed_over() -> None:
    """An error that is null is none, and what cannot be read ends no command in a traceback."""
    odd = b'data: {"error": null, "choices": 5}\n\ndata: ' + b"[" * 100_000 + b"\n\n"
    with answering(HEAD, odd, event("one"), b"data: [DONE]\n\n") as (address, _):
        events = PublicClient(address, None).stream("/v1/chat/completions", {"a": 1}, {})
        assert [text for text, _ in cli_try._pieces(events)] == ["one"]


def test_stream_key_that_is_refused_says_which_option_to_use() -> None:
    """And shows no key."""
    reply = refusal(401, "Invalid API Key")
    with answering(reply) as (address, _), pytest.raises(AccessDenied) as raised:
        texts(address, "the key")
    assert "--api-key-file" in str(raised.value)
    assert "the key" not in str(raised.value)


def test_stream_nobody_there_is_no_daemon() -> None:
    """Exit status 3, as for the control socket."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = "127.0.0.1:{1}".format(*listener.getsockname())
    with pytest.raises(NoDaemon, match="cannot connect"):
        texts(address)
    for strange in ("x", "x:y", f"{'ä' * 100}:1", f"unix:/{'a' * 200}"):
        with pytest.raises(NoDaemon, match="cannot connect to onebitd's"):
            texts(strange)
    with pytest.raises(NoDaemon, match="/does/not/exist"):
        texts("unix:/does/not/exist")


def test_stream_over_a_unix_socket_is_the_same(tmp_path: Path) -> None:
    """As systemd may pass one."""
    path = os.fspath(tmp_path / "http.sock")
    with answering(HEAD + event("hi") + b"data: [DONE]\n\n", path=path) as (address, _):
        assert texts(address) == ["hi"]


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        (["127.0.0.1:8000"], "127.0.0.1:8000"),
        (["http://127.0.0.1:8000"], "127.0.0.1:8000"),
        (["0.0.0.0:80"], "127.0.0.1:80"),
        (["[::]:80"], "[::1]:80"),
        (["[fd00::1]:80"], "[fd00::1]:80"),
        (["192.0.2.1:80", "127.0.0.1:80"], "192.0.2.1:80"),
        (["unix:/run/a.sock"], "unix:/run/a.sock"),
        (["unix:/run/a.sock", "127.0.0.1:80"], "127.0.0.1:80"),
    ],
)
def test_address_in_a_status_is_one_to_connect_to(listen: list[str], address: str) -> None:
    """ "Any" is loopback, TCP comes before Unix."""
    assert address_in(listen) == address


@pytest.mark.parametrize("listen", [[], None, "x"])
def test_address_in_nothing_is_an_error(listen: object) -> None:
    """A daemon of another version may not say."""
    with pytest.raises(BadAnswer, match="where it listens"):
        address_in(listen)


class Config:
    """A control client that knows one setting."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def config(self) -> dict[str, Any]:
        """Return it."""
        value = None if self._path is None else str(self._path)
        return {"http.api_key_file": {"value": value, "source": "file"}}


def test_find_key_is_the_given_file_or_the_daemons_own(tmp_path: Path) -> None:
    """The given one must be good; the daemon's may be for itself alone."""
    own, given = tmp_path / "own", tmp_path / "given"
    own.write_text("# ours\nfirst\nsecond\n")
    given.write_text("mine\n")

    def find(path: Path | None, option: Path | None) -> str | None:
        control = cast("ControlClient", Config(path))
        return cli_public.find_key(control, None if option is None else str(option))

    assert find(own, None) == "first"
    assert find(own, given) == "mine"
    assert find(None, None) is None
    assert find(tmp_path / "gone", None) is None
    with pytest.raises(ConfigError):
        find(own, tmp_path / "gone")


def client_with(*routes: bytes) -> Client:
    """Return a request with such headers X-Onebit-Route."""

    class Head:
        headers = tuple((b"x-onebit-route", route) for route in routes)

    return cast("Client", Head())


@pytest.mark.parametrize(
    ("header", "wanted"),
    [(b"", None), (b"file", Route.FILE), (b" Shared ", Route.SHARED)],
)
def test_route_header_names_a_route(header: bytes, wanted: Route | None) -> None:
    """In any case; without one it is the configuration's."""
    assert public_http._wanted_route(client_with(header), may_share=True) is wanted


def test_route_header_that_is_there_twice_is_refused() -> None:
    """As one with both values in it (RFC 9110, section 5.3): neither of the two wins unseen."""
    with pytest.raises(RequestError, match="'file, shared' is none of file, shared"):
        public_http._wanted_route(client_with(b"file", b"shared"), may_share=True)


def test_route_header_that_cannot_be_met_is_refused() -> None:
    """Nonsense, and a daemon that does not share: 400 that says what to do."""
    with pytest.raises(RequestError, match="none of file, shared") as raised:
        public_http._wanted_route(client_with(b"air"), may_share=True)
    assert raised.value.status == 400
    with pytest.raises(RequestError, match=r"handoff\.share = true") as raised:
        public_http._wanted_route(client_with(b"shared"), may_share=False)
    assert raised.value.status == 400
    assert public_http._wanted_route(client_with(b"file"), may_share=False) is Route.FILE
