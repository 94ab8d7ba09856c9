"""llama-server over its private Unix socket: the few calls the daemon makes, and the relay's door.

A fresh connection for each request: connecting costs microseconds, and a whole class of
keep-alive races is gone. h11 writes and reads heads; bodies are unframed by core.http1.
Source of the calls and their answers: llama.cpp tools/server/README.md, and the contract suite in
`tests/contract`, which holds them against the real program.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import h11
import trio

from onebitd.core.errors import (
    BackendError,
    BackendGone,
    BackendRefused,
    BackendTimeout,
    RequestError,
)
from onebitd.core.http1 import BodyReader, FramingError, body_reader

_READ_BYTES: Final = 64 * 1024
_MAX_HEAD_BYTES: Final = 64 * 1024
_MAX_ANSWER_BYTES: Final = 256 * 1024 * 1024
"""Largest JSON answer taken in one piece: the ids of a million-token prompt are a tenth of it."""
QUICK_TIMEOUT_S: Final = 60.0
"""Template and tokenize: milliseconds, but they share the decoder's cores with its decoding."""
SLOT_TIMEOUT_S: Final = 120.0
"""Restore, save, erase: a restore that waits for a cancelled prefill's batch to end included."""
HEALTH_TIMEOUT_S: Final = 5.0

_PLAIN_LETTER: Final = 'root ::= "a"'
"""It says one token even when asked for none, and some builds answer 500 where that is only a part
of a UTF-8 character (measured on build 10068)."""

Headers = Sequence[tuple[bytes, bytes]]


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    """The answer to a restore: tokens, bytes, milliseconds, as the decoder counted them."""

    n_restored: int
    n_read: int
    restore_ms: float | None


class Reply:
    """A reply whose head has come: `status`, `headers` (names in lower case), and its body.

    The holder must call `close()`: that is how llama-server learns that nobody waits any more.
    """

    def __init__(
        self,
        stream: trio.SocketStream,
        status: int,
        headers: Headers,
        body: BodyReader,
        rest: bytes,
    ) -> None:
        self.status = status
        self.headers = headers
        self._stream = stream
        self._body = body
        self._rest = rest

    async def read(self) -> bytes:
        """Return the next bytes of the body as they come, b"" at its end.

        Raises:
            BackendGone: the connection broke before the body was complete.
        """
        try:
            while True:
                data, self._rest = self._rest, b""
                if data:
                    found = self._body.feed(data)
                    if found:
                        return found
                if self._body.done:
                    return b""
                data = await self._stream.receive_some(_READ_BYTES)
                if not data:
                    self._body.feed_eof()
                    return b""
                self._rest = data
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise BackendGone("the decoder's connection broke in the middle of a reply") from error
        except FramingError as error:
            raise BackendGone(f"the decoder's reply broke off: {error}") from error

    async def read_all(self) -> bytes:
        """Return the whole body.

        Raises:
            BackendGone: see read().
            BackendError: it is larger than any honest answer.
        """
        whole = bytearray()
        while data := await self.read():
            whole += data
            if len(whole) > _MAX_ANSWER_BYTES:
                raise BackendError(f"the decoder's answer is over {_MAX_ANSWER_BYTES >> 20} MiB")
        return bytes(whole)

    def close(self) -> None:
        """Close the connection; may be called twice."""
        self._stream.socket.close()


class LlamaServer:
    """A client of one running llama-server.

    Args:
        socket_path: its Unix socket.

    Every call raises BackendGone when the connection is refused or breaks, BackendTimeout when no
    answer comes in time, and BackendRefused with the decoder's words for an error status.
    """

    def __init__(self, socket_path: str) -> None:
        self._socket_path = socket_path

    async def open(self, method: bytes, target: bytes, headers: Headers, body: bytes) -> Reply:
        """Send a request and return its reply once the head has come; no time limit.

        Raises:
            RequestError: 400, HTTP/1.1 cannot carry this head (an HTTP/2 client sent it).

        A cancel, or an error, leaves nothing open.
        """
        stream = await self._connect()
        try:
            connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
            head = connection.send(
                h11.Request(method=method, target=target, headers=_framed(headers, method, body))
            )
            sent = (head or b"") + body
            return await _exchange(stream, connection, sent, method)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            stream.socket.close()
            raise BackendGone("the decoder closed the connection") from error
        except h11.LocalProtocolError as error:
            stream.socket.close()
            raise RequestError(400, f"the request cannot be passed on: {error}") from error
        except h11.RemoteProtocolError as error:
            stream.socket.close()
            raise BackendGone(f"the decoder's reply is not HTTP: {error}") from error
        except BaseException:
            stream.socket.close()
            raise

    async def _connect(self) -> trio.SocketStream:
        try:
            connection = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
        except OSError as error:
            raise BackendError(f"no connection to the decoder: {error.strerror}") from error
        try:
            await connection.connect(self._socket_path)
        except OSError as error:
            connection.close()
            raise BackendGone(f"the decoder cannot be reached: {error.strerror}") from error
        except BaseException:
            connection.close()
            raise
        return trio.SocketStream(connection)

    async def is_ready(self) -> bool:
        """Ask `/health`: True when the model is loaded, False while it loads."""
        try:
            await self._call("GET", "/health", None, HEALTH_TIMEOUT_S)
        except BackendRefused as error:
            if error.status == 503:
                return False
            raise
        return True

    async def props(self) -> dict[str, Any]:
        """Return `/props`: build_info, default_generation_settings.n_ctx and more."""
        return await self._call("GET", "/props", None, QUICK_TIMEOUT_S)

    async def apply_template(self, body: bytes) -> str:
        """Return the templated prompt of a chat body, sent as the client sent it."""
        answer = await self._call("POST", "/apply-template", body, QUICK_TIMEOUT_S)
        prompt = answer.get("prompt")
        if not isinstance(prompt, str):
            raise BackendError("the decoder's /apply-template answered without a prompt")
        return prompt

    async def tokenize(self, content: str | Sequence[int | str]) -> list[int]:
        """Return the ids of a prompt, as the server itself tokenizes prompts (BOS once)."""
        body = json.dumps({"content": content, "add_special": True, "parse_special": True})
        answer = await self._call("POST", "/tokenize", body.encode(), QUICK_TIMEOUT_S)
        tokens = answer.get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise BackendError("the decoder's /tokenize answered without a list of ids")
        return tokens

    async def restore(self, name: str) -> Restored:
        """Restore a state file into slot 0.

        `leave_one_token` tells a decoder that knows it to keep the handoff as a checkpoint; others
        ignore it.
        """
        body = {"filename": name, "leave_one_token": True}
        answer = await self._slot_action("restore", body)
        timings = answer.get("timings")
        restore_ms = timings.get("restore_ms") if isinstance(timings, dict) else None
        return Restored(
            _count(answer, "n_restored"),
            _count(answer, "n_read"),
            float(restore_ms) if isinstance(restore_ms, int | float) else None,
        )

    async def save(self, name: str) -> int:
        """Save slot 0 under this name in the slot directory; return how many tokens it held."""
        return _count(await self._slot_action("save", {"filename": name}), "n_saved")

    async def share(self, socket_path: str) -> int | None:
        """Have the decoder export its cache: it connects to this socket and sends descriptors.

        Returns:
            the share's id, None when the answer does not name it.
        """
        answer = await self._slot_action("share", {"socket": socket_path})
        share_id = answer.get("share_id")
        return share_id if type(share_id) is int else None

    async def adopt(self, tokens: Sequence[int], share_id: int) -> int | None:
        """Have slot 0 take what was written into its shared cells as these tokens.

        Returns:
            how many tokens it says that it took, None when it does not say.
        """
        body = {"tokens": list(tokens), "share_id": share_id, "leave_one_token": True}
        answer = await self._slot_action("adopt", body)
        for name in ("n_adopted", "n_restored"):
            if isinstance(answer.get(name), int):
                return _count(answer, name)
        return None

    async def erase(self) -> None:
        """Empty slot 0."""
        await self._slot_action("erase", {})

    async def fill_slot(self, tokens: Sequence[int]) -> None:
        """Have slot 0 evaluate these ids and nothing else of consequence."""
        await self._fill(tokens, cache_prompt=False)

    async def extend_slot(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Have slot 0 evaluate what these ids have more than the ids it holds.

        Returns:
            how many ids it took from its cache, and how many it evaluated.
        """
        answer = await self._fill(tokens, cache_prompt=True)
        timings = answer.get("timings")
        counts = timings if isinstance(timings, dict) else {}
        return _count(counts, "cache_n"), _count(counts, "prompt_n")

    async def _fill(self, tokens: Sequence[int], *, cache_prompt: bool) -> dict[str, Any]:
        body = {"prompt": list(tokens), "n_predict": 0, "grammar": _PLAIN_LETTER}
        body |= {"id_slot": 0, "cache_prompt": cache_prompt}
        return await self._call("POST", "/completion", json.dumps(body).encode(), SLOT_TIMEOUT_S)

    async def _slot_action(self, action: str, body: Mapping[str, Any]) -> dict[str, Any]:
        target = f"/slots/0?action={action}"
        return await self._call("POST", target, json.dumps(body).encode(), SLOT_TIMEOUT_S)

    async def _call(
        self, method: str, target: str, body: bytes | None, timeout_s: float
    ) -> dict[str, Any]:
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        with trio.move_on_after(timeout_s):
            reply = await self.open(method.encode(), target.encode(), headers, body or b"")
            try:
                raw = await reply.read_all()
            finally:
                reply.close()
            return _parsed(target, reply.status, raw)
        raise BackendTimeout(f"the decoder did not answer {target} within {timeout_s:g} s")


async def _exchange(
    stream: trio.SocketStream, connection: h11.Connection, sent: bytes, method: bytes
) -> Reply:
    await stream.send_all(sent)
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            data = await stream.receive_some(_READ_BYTES)
            if not data:
                raise BackendGone("the decoder closed the connection without a reply")
            connection.receive_data(data)
        elif isinstance(event, h11.Response):
            headers = [(bytes(name), bytes(value)) for name, value in event.headers]
            rest, _ = connection.trailing_data
            try:
                reader = body_reader(method, event.status_code, headers)
            except FramingError as error:
                raise BackendGone(f"the decoder's reply is not HTTP: {error}") from error
            return Reply(stream, event.status_code, headers, reader, rest)


def _framed(headers: Headers, method: bytes, body: bytes) -> list[tuple[bytes, bytes]]:
    framed = [*headers, (b"connection", b"close")]
    if not any(name == b"host" for name, _ in headers):
        framed.append((b"host", b"localhost"))  # an HTTP/1.0 client need not send one
    if body or method not in (b"GET", b"HEAD", b"OPTIONS", b"DELETE"):
        framed.append((b"content-length", str(len(body)).encode()))
    return framed


def _parsed(target: str, status: int, raw: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(raw)
    except (ValueError, RecursionError):
        answer = None
    if status != 200:
        raise BackendRefused(status, _error_message(answer, raw))
    if not isinstance(answer, dict):
        raise BackendError(f"the decoder's answer to {target} is not a JSON object")
    return answer


def _error_message(answer: object, raw: bytes) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    if isinstance(message, str) and message:
        return message[:500]
    return raw[:200].decode("utf-8", "replace")


def _count(answer: Mapping[str, Any], name: str) -> int:
    value = answer.get(name)
    if not isinstance(value, int):
        raise BackendError(f"the decoder's answer has no {name}")
    return value
