"""llama-server over its private Unix socket: the few calls the daemon makes, and the relay's door.

A fresh connection for each request: connecting costs microseconds, and a whole class of
keep-alive races is gone. The socket is a plain one that does not block, waited for before it is
read: a stream of trio's would try first, and a token has never come yet. core.http1 writes and
reads what goes over it.
Source of the calls and their answers: llama.cpp tools/server/README.md, and the contract suite in
`tests/contract`, which holds them against the real program.
"""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Final

import trio
from trio.lowlevel import notify_closing, wait_readable, wait_writable

from onebitd.adapters.calls import Call, Calls
from onebitd.core.errors import (
    BackendError,
    BackendGone,
    BackendRefused,
    BackendTimeout,
    RequestError,
)
from onebitd.core.http1 import (
    BodyReader,
    FramingError,
    HeadError,
    Headers,
    HeadReader,
    ReplyHead,
    body_reader,
    request_head,
)

_READ_BYTES: Final = 64 * 1024
_NONBLOCKING_STREAM: Final = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
_MAX_ANSWER_BYTES: Final = 256 * 1024 * 1024
"""Largest JSON answer taken in one piece: the ids of a million-token prompt are a tenth of it."""
QUICK_TIMEOUT_S: Final = 60.0
"""Template and tokenize: milliseconds, but they share the decoder's cores with its decoding."""
_TEXT_BYTES_PER_S: Final = 16 * 1024
"""What is sent to be templated or tokenized may take longer in proportion: megabytes a second on an
idle machine, a hundredth of that here."""
SLOT_TIMEOUT_S: Final = 900.0
"""Restore, save, erase: tens of gigabytes from a slow disk, and before that the end of the batch
of a cancelled prefill. A decoder that hangs is the supervisor's affair, which looks at it."""
HEALTH_TIMEOUT_S: Final = 5.0

_PLAIN_LETTER: Final = 'root ::= "a"'
"""It says one token even when asked for none, and some builds answer 500 where that is only a part
of a UTF-8 character (measured on build 10068)."""

_FULL_S: Final = 0.01
"""How soon to knock again at a listening queue that is full: nothing tells when it no longer is."""


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    """The answer to a restore: tokens, bytes, milliseconds, as the decoder counted them."""

    n_restored: int
    n_read: int
    restore_ms: float | None


class Reply:
    """A reply whose head has come: `status`, `headers` (names in lower case), and its body.

    `ended` is True once all of the body has been returned, as far as is known without a read.
    The holder must call `close()`: that is how llama-server learns that nobody waits any more.
    """

    def __init__(
        self,
        connection: socket.socket,
        status: int,
        headers: Headers,
        body: BodyReader,
        rest: bytes,
        call: Call | None = None,
    ) -> None:
        self.status = status
        self.headers = headers
        self._connection = connection
        self._fd = connection.fileno()
        self._body = body
        self._rest = rest
        self.ended = False
        self._call = Calls().begin() if call is None else call
        self._call.waits = False

    async def read(self) -> bytes:
        """Return the next bytes of the body as they come, b"" at its end.

        What one read of the socket holds is returned in one piece, as soon as it is there.

        Raises:
            BackendGone: the connection broke before the body was complete.
        """
        data, self._rest = self._rest, b""
        try:
            while True:
                if data:
                    found = self._body.feed(data)
                    self.ended = self._body.done
                    if found:
                        # A stream's comments come from a timer, however dead the decoder is.
                        self._call.heard += found[:1] != b":"
                        return found
                if self._body.done:
                    return b""
                if self._fd < 0:
                    # Whoever closed it may have cancelled us: that is then what happened.
                    await trio.lowlevel.checkpoint_if_cancelled()
                    raise BackendGone("the reply is closed")
                data = b""
                self._call.waits = True
                await wait_readable(self._fd)
                self._call.waits = False
                if self._fd < 0:
                    continue  # closed when bytes had come already
                try:
                    data = self._connection.recv(_READ_BYTES)
                except BlockingIOError:
                    continue  # woken for nothing: the kernel may do that
                if not data:
                    self._body.feed_eof()
                    return b""
        except FramingError as error:
            raise BackendGone("the decoder's reply broke off", quoted=str(error)) from error
        except (OSError, trio.ClosedResourceError) as error:
            raise BackendGone("the decoder's connection broke in the middle of a reply") from error

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
        if self._call.waits:  # somebody else is in `read`, and has to be told
            _close(self._connection)
        else:
            self._connection.close()
        self._fd = -1
        self._call.end()


class LlamaServer:
    """A client of one running llama-server.

    Args:
        socket_path: its Unix socket.
        calls: where its calls are entered while they are under way.

    Every call raises BackendGone when the connection is refused or breaks, BackendTimeout when no
    answer comes in time, and BackendRefused with the decoder's words for an error status.
    """

    def __init__(self, socket_path: str, calls: Calls | None = None) -> None:
        self._socket_path = socket_path
        self._calls = Calls() if calls is None else calls

    async def open(self, method: bytes, target: bytes, headers: Headers, body: bytes) -> Reply:
        """Send a request and return its reply once the head has come; no time limit.

        Raises:
            RequestError: 400, HTTP/1.1 cannot carry this head (an HTTP/2 client sent it).

        A cancel, or an error, leaves nothing open.
        """
        call = self._calls.begin()
        try:
            return await self._open(method, target, headers, body, call)
        except BaseException:
            call.end()
            raise

    async def _open(
        self, method: bytes, target: bytes, headers: Headers, body: bytes, call: Call
    ) -> Reply:
        try:
            head = request_head(method, target, _framed(headers, method, body))
        except HeadError as error:
            raise RequestError(400, "the request cannot be passed on", quoted=str(error)) from error
        await trio.lowlevel.checkpoint_if_cancelled()
        connection = await self._connect()
        try:
            await _send(connection, head + body)
            reply, rest = await _read_head(connection)
            reader = body_reader(method, reply.status, reply.headers)
            return Reply(connection, reply.status, reply.headers, reader, rest, call)
        except (HeadError, FramingError) as error:
            _close(connection)
            raise BackendGone("the decoder's reply is not HTTP", quoted=str(error)) from error
        except OSError as error:
            _close(connection)
            raise BackendGone("the decoder closed the connection") from error
        except BaseException:
            _close(connection)
            raise

    async def _connect(self) -> socket.socket:
        while True:
            try:
                connection = socket.socket(socket.AF_UNIX, _NONBLOCKING_STREAM)
            except OSError as error:
                raise BackendError(f"no connection to the decoder: {error.strerror}") from error
            try:
                connection.connect(self._socket_path)
            except BlockingIOError:
                connection.close()
                await trio.sleep(_FULL_S)
            except OSError as error:
                connection.close()
                raise BackendGone(f"the decoder cannot be reached: {error.strerror}") from error
            else:
                return connection

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
        answer = await self._call("POST", "/apply-template", body, _text_timeout_s(body))
        prompt = answer.get("prompt")
        if not isinstance(prompt, str):
            raise BackendError("the decoder's /apply-template answered without a prompt")
        return prompt

    async def tokenize(self, content: str | Sequence[int | str]) -> list[int]:
        """Return the ids of a prompt, as the server itself tokenizes prompts (BOS once)."""
        asked = {"content": content, "add_special": True, "parse_special": True}
        body = json.dumps(asked).encode()
        answer = await self._call("POST", "/tokenize", body, _text_timeout_s(body))
        tokens = answer.get("tokens")
        # No loop in Python over what may be a million ids; a bool is no id.
        if not isinstance(tokens, list) or set(map(type, tokens)) - {int}:
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


async def _send(connection: socket.socket, data: bytes) -> None:
    """Send all of it, unless the decoder hangs up: it may have said why, so that is no error."""
    left = memoryview(data)
    try:
        while left:
            try:
                left = left[connection.send(left) :]
            except BlockingIOError:
                await wait_writable(connection)
    except (BrokenPipeError, ConnectionResetError):
        pass


async def _read_head(connection: socket.socket) -> tuple[ReplyHead, bytes]:
    """Return the reply's head and what came behind it."""
    reader = HeadReader()
    while True:
        await wait_readable(connection)
        try:
            data = connection.recv(_READ_BYTES)
        except BlockingIOError:
            continue
        if not data:
            raise BackendGone("the decoder closed the connection without a reply")
        head = reader.feed(data)
        if head is not None:
            return head, reader.rest


def _close(connection: socket.socket) -> None:
    if connection.fileno() >= 0:
        notify_closing(connection)
        connection.close()


def _framed(headers: Headers, method: bytes, body: bytes) -> list[tuple[bytes, bytes]]:
    framed = [*headers, (b"connection", b"close")]
    if not any(name == b"host" for name, _ in headers):
        framed.insert(0, (b"host", b"localhost"))  # an HTTP/1.0 client need not send one
    if body or method not in (b"GET", b"HEAD", b"OPTIONS", b"DELETE"):
        framed.append((b"content-length", str(len(body)).encode()))
    return framed


def _text_timeout_s(body: bytes) -> float:
    return QUICK_TIMEOUT_S + len(body) / _TEXT_BYTES_PER_S


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
