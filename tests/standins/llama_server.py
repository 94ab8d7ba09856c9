#!/usr/bin/env python3
"""Plays llama-server on the Unix socket that --host names: one slot, no model, real manners.

Its text follows from its cache (tests/standins/tiny_state.py), so a wrong cache shows. Flags of
llama-server that do not matter here are passed over with their values. What it adds:

--record FILE              one JSON line for each request: n, at, method, target, headers, body, pid
                           and FILE.end one at its end: n, end, pid. Times are CLOCK_MONOTONIC.
--knobs FILE               more of the arguments below, read anew for each request
--for-pid N                in FILE: it is meant for this process, not for the next decoder
--load-delay S             answer 503 for this long after the start
--token-delay S            read anew for each token
--prefill-delay-per-token S
--ignore-sigterm
--crash-on WHAT[:TIMES]    abort at load, health, tokenize, apply-template, restore, completion (a
                           generation, before its head) or token (in its third token); with TIMES
                           only so often, counted in --count-file FILE
--hang-on WHAT[:TIMES]     say nothing more instead
--hold-on WHAT             say nothing, at one of these but load, until the client has left or the
                           knob is gone
--crash-after N            abort in place of generation N+1
--restore-short            n_restored one less than true
--restore-refuse           as for a file that is not good
--reply-500-after-restore  for the generation that comes next
--reply-500-on WHAT[:TIMES] a completion, or all but health
--garbage-on WHAT[:TIMES]  answer a completion with what is no HTTP
--close-on WHAT[:TIMES]    hang up on a completion without a word
--cut-body N               die after N bytes of a completion's JSON body
--truncate-stream N        hang up after N events
FAKE_LLAMA_DEVICES         environment: names for --list-devices, separated by commas

Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import parse_qs, urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.standins import tiny_decoder
from tests.standins.tiny_decoder import ClientLeft, Refused, Slot

BUILD = "b10434-standin"
_VALUED_WORDS = """
    -m --model --alias --host --slot-save-path -c --ctx-size -np --parallel --cache-ram -cram
    --device -dev -ngl -t --threads -tb -b -ub -fa -ctk -ctv --seed --temp -lv --chat-template
    --record --knobs --load-delay --token-delay --prefill-delay-per-token --crash-on --count-file
    --hang-on --hold-on --crash-after --truncate-stream --for-pid --reply-500-on --garbage-on
    --close-on --cut-body
"""
_SWITCH_WORDS = """
    --swa-full --metrics --no-webui --jinja --no-warmup --list-devices --ignore-sigterm
    --restore-short --restore-refuse --reply-500-after-restore
"""
_VALUED = frozenset(_VALUED_WORDS.split())
_SWITCHES = frozenset(_SWITCH_WORDS.split())
_HOUR_S = 3600
_ANSWERS_500 = "Invalid input batch."
_started = time.monotonic()


def log(level: str, who: str, text: str) -> None:
    """Write a line as llama.cpp does."""
    spent = int((time.monotonic() - _started) * 1e6)
    stamp = f"{spent // 60_000_000}.{spent // 1_000_000 % 60:02}.{spent // 1000 % 1000:03}"
    sys.stderr.write(f"{stamp}.{spent % 1000:03} {level} {who:>12}: {text}\n")
    sys.stderr.flush()


def crash(where: str) -> NoReturn:
    """Die as a failed assertion does."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stderr.write(f"/src/{where}.cpp:1: GGML_ASSERT(told_to_crash) failed\n")
    sys.stderr.flush()
    os.abort()


def read_args(words: Sequence[str]) -> dict[str, str]:
    """Return the arguments, switches with the value "1"; exits for one that llama-server lacks."""
    found: dict[str, str] = {}
    left = iter(words)
    for word in left:
        if word in _VALUED:
            value = next(left, None)
            if value is None:
                sys.exit(f"error while handling argument {word!r}: expected value for argument")
            found[word] = value
        elif word in _SWITCHES:
            found[word] = "1"
        else:
            sys.stderr.write(f"error: invalid argument: {word}\n")
            sys.exit(1)
    return found


def ids_of(prompt: object) -> list[int]:
    """Return the ids of one prompt: a string, or a flat list of ids and strings."""
    if isinstance(prompt, str):
        return tiny_decoder.tokenize(prompt)
    if not isinstance(prompt, list) or not prompt:
        raise Refused(400, "invalid_request_error", '"prompt" must not be empty')
    ids: list[int] = []
    for item in prompt:
        ids += tiny_decoder.tokenize(item) if isinstance(item, str) else [int(item)]
    if not all(0 <= token < tiny_decoder.VOCABULARY for token in ids):
        raise Refused(400, "invalid_request_error", "Prompt contains invalid tokens")
    return ids


def prompts_of(prompt: object) -> list[list[int]]:
    """Return the ids of each prompt in a completion body."""
    if isinstance(prompt, list) and prompt and not any(isinstance(one, int) for one in prompt):
        return [ids_of(one) for one in prompt]
    return [ids_of(prompt)]


class Server(ThreadingHTTPServer):
    """The listener, the slot, and the knobs."""

    daemon_threads = True
    block_on_close = False
    address_family = socket.AF_UNIX
    request_queue_size = 512

    def __init__(self, words: Sequence[str]) -> None:
        self._words = list(words)
        args = read_args(words)
        self.slot = Slot(int(args.get("-c", args.get("--ctx-size", "2048"))))
        self.alias = args.get("--alias", args.get("-m", "model"))
        self.ready_at = time.monotonic() + float(args.get("--load-delay", "0"))
        self.generations = 0
        self.just_restored = False
        self.requests = 0
        self.counted = threading.Lock()
        self.in_flight = 0
        super().__init__(args["--host"], Handler)  # type: ignore[arg-type]

    def server_bind(self) -> None:
        """Bind the path; HTTPServer's own way wants a host and a port."""
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = "localhost", 0

    def knobs(self) -> dict[str, str]:
        """Return all arguments as they are now."""
        args = read_args(self._words)
        with contextlib.suppress(KeyError, FileNotFoundError):
            more = read_args(Path(args["--knobs"]).read_text().split())
            if more.get("--for-pid") in (None, str(os.getpid())):
                args |= more
        return args

    def is_due(self, flag: str, what: str, args: dict[str, str]) -> bool:
        """Say whether --crash-on or another such flag means this moment."""
        name, _, times = args.get(flag, "").partition(":")
        if name != what:
            return False
        if not times:
            return True
        counter = Path(args["--count-file"])
        with self.counted:
            done = int(counter.read_text()) if counter.exists() else 0
            counter.write_text(str(done + 1))
        return done < int(times)

    def moment(
        self, what: str, args: dict[str, str], gone: Callable[[], bool] = lambda: False
    ) -> None:
        """Crash, hang or wait if told to."""
        if self.is_due("--crash-on", what, args):
            crash(what)
        if self.is_due("--hang-on", what, args):
            time.sleep(_HOUR_S)
        if args.get("--hold-on") == what:
            while self.knobs().get("--hold-on") == what and not self.slot.stopping:
                if gone():
                    raise ClientLeft
                time.sleep(0.005)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Server
    args: dict[str, str]
    body: bytes
    wbufsize = -1  # one write for head and body

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Write no access log."""

    def gone(self) -> bool:
        """Say whether the client has left."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        try:
            return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def version_string(self) -> str:
        """Return the Server header."""
        return "llama.cpp"

    def do_GET(self) -> None:
        """Answer a request of any method."""
        server = self.server
        self.body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.args = server.knobs()
        self.last_write = None
        with server.counted:
            server.requests += 1
            server.in_flight += 1
            number = server.requests
        self.record(number)
        try:
            self.answer()
        except Refused as refused:
            log("E", "srv", f"send_error: {refused}")
            self.reply({"error": refused.error}, refused.status)
        except (ClientLeft, BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with server.counted:
                server.in_flight -= 1
            self.record_end(number)

    do_POST = do_DELETE = do_PUT = do_OPTIONS = do_HEAD = do_PATCH = do_TRACE = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a head that cannot be read, as the real one's HTTP library does."""
        del code, explain
        self.close_connection = True
        self.command = self.command or "GET"
        self.args = self.server.knobs()
        self.reply({"error": {"code": 400, "message": message, "type": "bad_request"}}, 400)

    last_write: float | None = None
    """When the last bytes went out. Taken before they do: this thread may be late afterwards, and
    the client has then gone on already."""

    def record(self, number: int) -> None:
        """Write down what came."""
        self._append(
            "",
            {
                "n": number,
                "at": time.monotonic(),
                "method": self.command,
                "target": self.path,
                "headers": {name.lower(): value for name, value in self.headers.items()},
                "body": self.body.decode("utf-8", "surrogateescape"),
                "pid": os.getpid(),
            },
        )

    def record_end(self, number: int) -> None:
        """Write down that the request is done with."""
        end = self.last_write or time.monotonic()
        self._append(".end", {"n": number, "end": end, "pid": os.getpid()})

    def _append(self, suffix: str, document: dict[str, Any]) -> None:
        path = self.args.get("--record")
        if path:
            descriptor = os.open(path + suffix, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.write(descriptor, json.dumps(document).encode() + b"\n")
            os.close(descriptor)

    def reply(self, document: object, status: int = 200) -> None:
        """Send a JSON reply."""
        data = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Access-Control-Allow-Origin", "")
        if status >= 400:
            self.send_header("Connection", "close")
        self.last_write = time.monotonic()
        self.end_headers()
        if "--cut-body" in self.args and "completion" in self.path:
            self.wfile.write(data[: int(self.args["--cut-body"])])
            self.wfile.flush()
            crash("body")
        if self.command != "HEAD":
            self.wfile.write(data)
        self.wfile.flush()

    def fail(self, what: str) -> None:
        """Answer with an error, with garbage or not at all if told to."""
        server, args = self.server, self.args
        if server.is_due("--reply-500-on", what, args):
            raise Refused(500, "server_error", _ANSWERS_500)
        if server.is_due("--garbage-on", what, args):
            self.wfile.write(b"\x15\x03\x01\x00\x02\x02\x16\r\n\r\n")
            self.wfile.flush()
            raise ClientLeft
        if server.is_due("--close-on", what, args):
            raise ClientLeft

    def document(self) -> dict[str, Any]:
        """Return the body's JSON object."""
        try:
            found = json.loads(self.body)
        except ValueError as error:
            message = f"[json.exception.parse_error.101] parse error: {error}"
            raise Refused(500, "server_error", message) from error
        if not isinstance(found, dict):
            raise Refused(500, "server_error", "[json.exception.type_error.305]")
        return found

    def answer(self) -> None:
        """Find what is asked for."""
        if self.command == "OPTIONS":
            self.options()
            return
        target = urlsplit(self.path)
        if target.path in ("/health", "/v1/health"):
            self.server.moment("health", self.args, self.gone)
        if time.monotonic() < self.server.ready_at:
            raise Refused(503, "unavailable_error", "Loading model")
        if not target.path.endswith("/health"):
            self.fail("all")
        if self.command == "POST" and target.path.startswith("/slots/"):
            self.slot_action(parse_qs(target.query).get("action", [""])[0])
            return
        routes: dict[tuple[str, str], Callable[[], None]] = {
            ("GET", "/"): self.page,
            ("GET", "/health"): lambda: self.reply({"status": "ok"}),
            ("GET", "/v1/health"): lambda: self.reply({"status": "ok"}),
            ("GET", "/props"): self.props,
            ("GET", "/slots"): self.slots,
            ("GET", "/metrics"): self.metrics,
            ("GET", "/v1/models"): self.models,
            ("GET", "/lora-adapters"): lambda: self.reply([]),
            ("POST", "/apply-template"): self.apply_template,
            ("POST", "/tokenize"): self.tokenize,
            ("POST", "/detokenize"): self.detokenize,
            ("POST", "/completion"): self.completion,
            ("POST", "/v1/completions"): self.completions,
            ("POST", "/v1/chat/completions"): self.chat,
        }
        route = routes.get((self.command, target.path))
        if route is None:
            raise Refused(404, "not_found_error", "File Not Found")
        route()

    def options(self) -> None:
        """Let every page do everything, as llama-server does."""
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.send_header("Access-Control-Allow-Origin", self.headers.get("Origin", ""))
        self.send_header("Access-Control-Allow-Credentials", "true")
        self.send_header("Access-Control-Allow-Methods", "GET, POST, DELETE, OPTIONS")
        self.send_header("Access-Control-Allow-Headers", "*")
        self.end_headers()
        self.wfile.flush()

    def page(self) -> None:
        """Send the web page."""
        data = b"<!doctype html><title>llama.cpp</title>"
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()

    def props(self) -> None:
        """Say what is served."""
        self.reply(
            {
                "default_generation_settings": {"params": {}, "n_ctx": self.server.slot.ctx_size},
                "total_slots": 1,
                "model_alias": self.server.alias,
                "model_path": self.args.get("-m"),
                "build_info": BUILD,
            }
        )

    def slots(self) -> None:
        """Show the slot."""
        slot = self.server.slot
        self.reply([{"id": 0, "n_ctx": slot.ctx_size, "is_processing": slot.busy}])

    def metrics(self) -> None:
        """Refuse, or send something countable."""
        if "--metrics" not in self.args:
            message = "This server does not support metrics endpoint. Start it with `--metrics`"
            raise Refused(501, "not_supported_error", message)
        self.reply({"requests": self.server.requests})

    def models(self) -> None:
        """List the one model."""
        model = {"id": self.server.alias, "object": "model", "owned_by": "llamacpp"}
        self.reply({"object": "list", "data": [model]})

    def apply_template(self) -> None:
        """Answer with the prompt of a chat body."""
        self.server.moment("apply-template", self.args, self.gone)
        self.reply({"prompt": self.chat_prompt(self.document())})

    def chat_prompt(self, body: dict[str, Any]) -> str:
        """Return the templated prompt of a chat body."""
        messages = body.get("messages")
        if not isinstance(messages, list):
            raise Refused(400, "invalid_request_error", "'messages' is required")
        for message in messages:
            content = message.get("content")
            parts = content if isinstance(content, list) else []
            if any(part.get("type") != "text" for part in parts):
                raise Refused(500, "server_error", "image input is not supported - hint: mmproj")
        return tiny_decoder.template(messages)

    def tokenize(self) -> None:
        """Answer with the ids of a text."""
        self.server.moment("tokenize", self.args, self.gone)
        body = self.document()
        content = body.get("content", "")
        special = body.get("parse_special", True)
        parts = content if isinstance(content, list) else [content]
        ids: list[int] = []
        for part in parts:
            known = isinstance(part, str)
            ids += tiny_decoder.tokenize(part, special) if known else [int(part)]
        self.reply({"tokens": ids})

    def detokenize(self) -> None:
        """Answer with the text of ids."""
        tokens = self.document().get("tokens", [])
        self.reply({"content": "".join(map(tiny_decoder.piece, tokens))})

    def slot_action(self, action: str) -> None:
        """Save, restore or erase."""
        slot, server = self.server.slot, self.server
        directory = self.args.get("--slot-save-path")
        if directory is None:
            message = "This server does not support slots action. Start it with `--slot-save-path`"
            raise Refused(501, "not_supported_error", message)
        began = time.monotonic()
        if action == "erase":
            self.reply({"id_slot": 0, "n_erased": slot.erase(self.gone)})
            return
        if action not in ("save", "restore"):
            raise Refused(400, "invalid_request_error", "Invalid action")
        name = self.document().get("filename")
        if not isinstance(name, str):
            raise Refused(500, "server_error", "[json.exception.out_of_range.403] key 'filename'")
        if not is_valid_filename(name):
            raise Refused(400, "invalid_request_error", "Invalid filename")
        path = Path(directory) / name
        done: dict[str, Any] = {"id_slot": 0, "filename": name}
        if action == "save":
            done["n_saved"], done["n_written"] = slot.save(path, self.gone)
        else:
            server.moment("restore", self.args, self.gone)
            if "--restore-refuse" in self.args:
                path = path.with_name("restore-refuse")
            done["n_restored"], done["n_read"] = slot.restore(path, self.gone)
            done["n_restored"] -= "--restore-short" in self.args
            server.just_restored = True
        spent_ms = (time.monotonic() - began) * 1000
        self.reply(done | {"timings": {f"{action}_ms": round(spent_ms, 3)}})

    def completion(self) -> None:
        """Serve /completion."""
        body = self.document()
        if "prompt" not in body:
            raise Refused(400, "invalid_request_error", "key 'prompt' not found")
        Generation(self, "completion", body, prompts_of(body["prompt"])).run()

    def completions(self) -> None:
        """Serve /v1/completions."""
        body = self.document()
        if "prompt" not in body:
            raise Refused(400, "invalid_request_error", "key 'prompt' not found")
        Generation(self, "text_completion", body, prompts_of(body["prompt"])).run()

    def chat(self) -> None:
        """Serve /v1/chat/completions."""
        body = self.document()
        ids = tiny_decoder.tokenize(self.chat_prompt(body))
        if body.get("n", 1) not in (1, None):
            message = f"Field 'n': Value must be between 1 <= value <= 1, but got {body['n']}"
            raise Refused(400, "invalid_request_error", message)
        Generation(self, "chat.completion", body, [ids]).run()


def is_valid_filename(name: str) -> bool:
    """Judge a file name as llama-server's fs_validate_filename does."""
    if not name or len(name.encode()) > 255 or name != name.strip(" ") or name.endswith("."):
        return False
    bad = set('/\\:*?"<>|\ufffd\ufeff\uff0e\u2215\u2216')
    return ".." not in name and not any(letter in bad or ord(letter) < 32 for letter in name)


class Generation:
    """One reply: prompt evaluated, tokens said, in one of three shapes, streamed or not."""

    def __init__(
        self, handler: Handler, shape: str, body: dict[str, Any], prompts: list[list[int]]
    ) -> None:
        self._handler = handler
        self._server = handler.server
        self._args = handler.args
        self._shape = shape
        self._body = body
        self._prompts = [prompt or [0] for prompt in prompts]
        self._streams = body.get("stream") is True
        asked = body.get("max_tokens", body.get("n_predict"))
        self._count = 16 if asked is None or asked < 0 else int(asked)
        self._events = 0
        self._common = {
            "created": int(time.time()),
            "model": body.get("model", self._server.alias),
            "system_fingerprint": BUILD,
            "id": f"chatcmpl-{handler.server.requests:032}",
        }

    def run(self) -> None:
        """Wait for the slot, generate, reply."""
        server, slot, args = self._server, self._server.slot, self._args
        slot.acquire(self._body.get("id_slot") == 0, self._handler.gone)
        try:
            server.generations += 1
            if server.generations > int(args.get("--crash-after", "1000000000")):
                crash("completion")
            server.moment("completion", args, self._handler.gone)
            self._handler.fail("completion")
            restored, server.just_restored = server.just_restored, False
            if restored and "--reply-500-after-restore" in args:
                raise Refused(500, "server_error", _ANSWERS_500)
            for prompt in self._prompts:
                if len(prompt) >= slot.ctx_size:
                    raise Refused(
                        400,
                        "exceed_context_size_error",
                        f"request ({len(prompt)} tokens) exceeds the available context size "
                        f"({slot.ctx_size} tokens), try increasing it",
                        n_prompt_tokens=len(prompt),
                        n_ctx=slot.ctx_size,
                    )
            if self._streams:
                self._stream(self._prompts[0])
            else:
                self._handler.reply(self._whole())
        finally:
            slot.release()

    def _evaluate(self, prompt: list[int]) -> dict[str, Any]:
        per_token_s = float(self._args.get("--prefill-delay-per-token", "0"))
        reuse = self._body.get("cache_prompt", True) is not False
        began = time.monotonic()
        cached, evaluated = self._server.slot.prefill(
            prompt, reuse, per_token_s, self._handler.gone
        )
        spent_ms = max(0.001, (time.monotonic() - began) * 1000)
        return {
            "cache_n": cached,
            "prompt_n": evaluated,
            "prompt_ms": spent_ms,
            "prompt_per_token_ms": spent_ms / evaluated,
            "prompt_per_second": 1000 * evaluated / spent_ms,
        }

    def _tokens(self) -> Iterator[int]:
        tokens = self._server.slot.generate(self._count, self._pause_s, self._handler.gone)
        for index, token in enumerate(tokens):
            if index == 2:
                self._server.moment("token", self._args, self._handler.gone)
            yield token

    def _pause_s(self) -> float:
        """Return --token-delay; read anew where there is one, so that a test can let go."""
        if "--token-delay" in self._args:
            self._args = self._server.knobs()
        return float(self._args.get("--token-delay", "0"))

    @staticmethod
    def _predicted(timings: dict[str, Any], count: int, began: float) -> dict[str, Any]:
        spent_ms = max(0.001, (time.monotonic() - began) * 1000)
        return timings | {
            "predicted_n": count,
            "predicted_ms": spent_ms,
            "predicted_per_token_ms": spent_ms / max(1, count),
            "predicted_per_second": 1000 * count / spent_ms,
        }

    @staticmethod
    def _usage(timings: dict[str, Any]) -> dict[str, Any]:
        prompt = timings["cache_n"] + timings["prompt_n"]
        said = timings["predicted_n"]
        return {
            "completion_tokens": said,
            "prompt_tokens": prompt,
            "total_tokens": prompt + said,
            "prompt_tokens_details": {"cached_tokens": timings["cache_n"]},
        }

    def _whole(self) -> dict[str, Any]:
        choices = []
        timings: dict[str, Any] = {}
        for index, prompt in enumerate(self._prompts):
            timings = self._evaluate(prompt)
            began = time.monotonic()
            text = "".join(map(tiny_decoder.piece, self._tokens()))
            timings = self._predicted(timings, len(text), began)
            choice: dict[str, Any] = {"finish_reason": "length", "index": index}
            if self._shape == "chat.completion":
                choice["message"] = {"role": "assistant", "content": text}
            else:
                choice |= {"text": text, "logprobs": None}
            choices.append(choice)
        if self._shape == "completion":
            return self._last_completion(choices[0]["text"], timings)
        return {
            "choices": choices,
            **self._common,
            "object": self._shape,
            "usage": self._usage(timings),
            "timings": timings,
        }

    def _last_completion(self, text: str, timings: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": 0,
            "content": text,
            "tokens": [],
            "id_slot": 0,
            "stop": True,
            "model": self._server.alias,
            "tokens_predicted": timings["predicted_n"],
            "tokens_evaluated": timings["cache_n"] + timings["prompt_n"],
            "tokens_cached": len(self._server.slot.tokens),
            "stop_type": "limit",
            "timings": timings,
        }

    def _stream(self, prompt: list[int]) -> None:
        """Send the head first, as llama-server does; what goes wrong later is an event."""
        handler = self._handler
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.send_header("Access-Control-Allow-Origin", "")
        handler.end_headers()
        handler.wfile.flush()
        try:
            timings = self._evaluate(prompt)
        except Refused as refused:
            self._event({"error": refused.error})
            self._chunk(b"")
            return
        began = time.monotonic()
        count = 0
        if self._shape == "chat.completion":
            self._event(self._chunk_of({"role": "assistant", "content": None}, None))
        for token in self._tokens():
            count += 1
            self._event(self._partial(tiny_decoder.piece(token), count, prompt))
        self._finish(self._predicted(timings, count, began))

    def _partial(self, text: str, count: int, prompt: list[int]) -> dict[str, Any]:
        if self._shape == "chat.completion":
            return self._chunk_of({"content": text}, None)
        if self._shape == "text_completion":
            return self._text_chunk(text, None)
        return {
            "index": 0,
            "content": text,
            "tokens": [],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": count,
            "tokens_evaluated": len(prompt),
        }

    def _finish(self, timings: dict[str, Any]) -> None:
        if self._shape == "completion":
            self._event(self._last_completion("", timings))
            self._chunk(b"")
            return
        if self._shape == "text_completion":
            tail = {"usage": self._usage(timings), "timings": timings}
            self._event(self._text_chunk("", "length") | tail)
        else:
            last = self._chunk_of({}, "length")
            options = self._body.get("stream_options") or {}
            if options.get("include_usage"):
                self._event(last)
                last = last | {"choices": [], "usage": self._usage(timings)}
            self._event(last | {"timings": timings})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _chunk_of(self, delta: dict[str, Any], why: str | None) -> dict[str, Any]:
        choice = {"finish_reason": why, "index": 0, "delta": delta}
        return {"choices": [choice], **self._common, "object": "chat.completion.chunk"}

    def _text_chunk(self, text: str, why: str | None) -> dict[str, Any]:
        choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": why}
        return {"choices": [choice], **self._common, "object": "text_completion"}

    def _event(self, document: dict[str, Any]) -> None:
        if self._events == int(self._args.get("--truncate-stream", "-1")):
            self._handler.connection.shutdown(socket.SHUT_RDWR)
            raise ClientLeft
        self._events += 1
        data = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
        self._chunk(f"data: {data}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        self._handler.last_write = time.monotonic()
        self._handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self._handler.wfile.flush()


def list_devices() -> None:
    """Print what llama-server prints."""
    print("Available devices:")
    for name in filter(None, os.environ.get("FAKE_LLAMA_DEVICES", "").split(",")):
        print(f"  {name}: Stand-in device (65536 MiB, 65536 MiB free)")


def _stop_on_signals(server: Server, ignore_term: bool) -> threading.Event:
    """From the first signal on, the server stops; the second ends it at once."""
    stop = threading.Event()

    def take(number: int, frame: object) -> None:
        if number == signal.SIGTERM and ignore_term:
            return
        if stop.is_set():
            sys.stderr.write("Received second interrupt, terminating immediately.\n")
            sys.stderr.flush()
            os._exit(1)
        stop.set()

    wait_s = server.ready_at - time.monotonic()
    if wait_s > 0 and not ignore_term:
        time.sleep(wait_s)  # while it loads, a signal does what signals do
    signal.signal(signal.SIGTERM, take)
    signal.signal(signal.SIGINT, take)
    return stop


def main(words: Sequence[str]) -> int:
    """Serve until told to stop; return the exit status."""
    args = read_args(words)
    if "--list-devices" in args:
        list_devices()
        return 0
    model = Path(args.get("-m", args.get("--model", "")))
    if not model.is_file():
        log("E", "main", f"exiting due to model loading error: {model}")
        return 1
    try:
        server = Server(words)
    except OSError:
        log(
            "E",
            "start",
            f"couldn't bind HTTP server socket, hostname: {args['--host']}, port: 8080",
        )
        log("E", "main", "exiting due to HTTP server error")
        return 1
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    server.moment("load", args)
    stop = _stop_on_signals(server, "--ignore-sigterm" in args)
    log("I", "main", "server is listening")
    stop.wait()
    server.slot.stopping = True
    server.shutdown()
    while server.in_flight:
        time.sleep(0.01)
    log("I", "main", "cleaning up before exit...")
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
