#!/usr/bin/env python3
"""llama-server's command line around xllamacpp's real server, as a second llama.cpp build.

xllamacpp ships no program: its `Server` class runs llama.cpp's own HTTP server in this process,
with a newer state format (version 4) than the prebuilt llama-server. This script takes the
arguments of llama-server that onebitd and its tests pass and behaves like the program:

- an argument it does not know: `error: invalid argument: X` on stderr, exit 1;
- a start that fails: llama.cpp's own log on stderr, exit 1;
- SIGTERM, SIGINT: a clean stop and exit 0, while the model loads the default action; with a
  JSON request in flight the stop waits for that client, as llama-server's does. A second signal
  ends the process at once by its default action (llama-server: exit 1).

It needs an interpreter that finds xllamacpp and nothing else; the launcher that
tests/tools/fetch_llama.py writes provides one and execs, so that signals reach this process.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

Setter = Callable[[Any, str], None]

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
SPELLINGS = {
    "-m": "--model",
    "-a": "--alias",
    "-c": "--ctx-size",
    "-np": "--parallel",
    "-fa": "--flash-attn",
    "-ctk": "--cache-type-k",
    "-ctv": "--cache-type-v",
    "-t": "--threads",
    "-tb": "--threads-batch",
    "-b": "--batch-size",
    "-ub": "--ubatch-size",
    "-cram": "--cache-ram",
    "-ngl": "--gpu-layers",
    "--n-gpu-layers": "--gpu-layers",
    "-dev": "--device",
    "-lv": "--verbosity",
    "--log-verbosity": "--verbosity",
    "-n": "--predict",
    "--n-predict": "--predict",
    "-s": "--seed",
    "-ctxcp": "--ctx-checkpoints",
    "-kvu": "--kv-unified",
    "-fit": "--fit",
    "--no-ui": "--no-webui",
}


class BadValue(ValueError):
    """A value that its argument does not take."""


def _chat_template_file(params: Any, text: str) -> None:
    try:
        params.chat_template = Path(text).read_text()
    except OSError as error:
        raise BadValue(f"failed to open file '{text}'") from error


def _int(field: str) -> Setter:
    return lambda params, text: setattr(params, field, int(text))


def _text(field: str) -> Setter:
    return lambda params, text: setattr(params, field, text)


def _constant(field: str, value: object) -> Setter:
    return lambda params, _text: setattr(params, field, value)


def _ignore(_params: Any, _text: str) -> None:
    """Take an argument that makes no difference on a plain CPU in tests."""


def _model(params: Any, text: str) -> None:
    params.model.path = text


def _alias(params: Any, text: str) -> None:
    params.model_alias = {name.strip() for name in text.split(",") if name.strip()}


def _threads(params: Any, text: str) -> None:
    params.cpuparams.n_threads = int(text)


def _threads_batch(params: Any, text: str) -> None:
    params.cpuparams_batch.n_threads = int(text)


def _seed(params: Any, text: str) -> None:
    params.sampling.seed = int(text) & 0xFFFFFFFF


def _slot_save_path(params: Any, text: str) -> None:
    if not Path(text).is_dir():
        raise BadValue(f"not a directory: {text}")
    params.slot_save_path = text.rstrip("/") + "/"  # the class joins names without a separator


def _flash_attn(params: Any, text: str) -> None:
    import xllamacpp

    names = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}
    names |= {"1": "ENABLED", "0": "DISABLED", "-1": "AUTO"}
    if text not in names:
        raise BadValue(f"unknown value for --flash-attn: '{text}'")
    enum = xllamacpp.llama_flash_attn_type
    params.flash_attn_type = getattr(enum, f"LLAMA_FLASH_ATTN_TYPE_{names[text]}")


def _cache_type(field: str) -> Setter:
    def set_type(params: Any, text: str) -> None:
        import xllamacpp

        if text not in CACHE_TYPES:
            raise BadValue(f"Unsupported cache type: {text}")
        setattr(params, field, getattr(xllamacpp.ggml_type, f"GGML_TYPE_{text.upper()}"))

    return set_type


def _device(_params: Any, text: str) -> None:
    if text != "none":  # this build has the CPU alone, which is not a name llama-server takes
        raise BadValue(f"invalid device: {text}")


VALUED: dict[str, Setter] = {
    "--model": _model,
    "--alias": _alias,
    "--host": lambda params, text: setattr(params, "hostnames", [text]),
    "--port": _int("port"),
    "--ctx-size": _int("n_ctx"),
    "--parallel": _int("n_parallel"),
    "--slot-save-path": _slot_save_path,
    "--flash-attn": _flash_attn,
    "--cache-type-k": _cache_type("cache_type_k"),
    "--cache-type-v": _cache_type("cache_type_v"),
    "--threads": _threads,
    "--threads-batch": _threads_batch,
    "--threads-http": _int("n_threads_http"),
    "--batch-size": _int("n_batch"),
    "--ubatch-size": _int("n_ubatch"),
    "--cache-ram": _int("cache_ram_mib"),
    "--gpu-layers": _ignore,
    "--device": _device,
    "--verbosity": _int("verbosity"),
    "--predict": _int("n_predict"),
    "--seed": _seed,
    "--timeout": _int("timeout_read"),
    "--api-key": lambda params, text: setattr(params, "api_keys", text.split(",")),
    "--ctx-checkpoints": _int("n_ctx_checkpoints"),
    "--chat-template": _text("chat_template"),
    "--chat-template-file": _chat_template_file,
    "--cache-reuse": _int("n_cache_reuse"),
    "--fit": _ignore,
    "--log-colors": _ignore,
}
SWITCHES: dict[str, Setter] = {
    "--swa-full": _constant("swa_full", True),
    "--no-webui": _constant("ui", False),
    "--metrics": _constant("endpoint_metrics", True),
    "--props": _constant("endpoint_props", True),
    "--slots": _constant("endpoint_slots", True),
    "--no-slots": _constant("endpoint_slots", False),
    "--no-warmup": _constant("warmup", False),
    "--warmup": _constant("warmup", True),
    "--no-cache-prompt": _constant("cache_prompt", False),
    "--kv-unified": _constant("kv_unified", True),
    "--jinja": _constant("use_jinja", True),
    "--no-jinja": _constant("use_jinja", False),
    "--no-mmap": _ignore,
    "--no-log-timestamps": _ignore,
    "--log-prefix": _ignore,
    "--log-timestamps": _ignore,
    "--offline": _ignore,
}


def fail(message: str) -> NoReturn:
    """Print the line and leave with status 1, as llama-server does for every bad start."""
    print(message, file=sys.stderr, flush=True)
    sys.exit(1)


def apply(params: Any, argv: Sequence[str]) -> None:
    """Set on `params` (a CommonParams) what the arguments say; exits 1 on a bad one."""
    words = iter(argv)
    for word in words:
        name = SPELLINGS.get(word, word)
        if name in SWITCHES:
            SWITCHES[name](params, "")
            continue
        if name not in VALUED:
            fail(f"error: invalid argument: {word}")
        value = next(words, None)
        if value is None:
            fail(f'error while handling argument "{word}": expected value for argument')
        try:
            VALUED[name](params, value)
        except ValueError as error:
            fail(f'error while handling argument "{word}": {error}')


def print_version() -> None:
    """Print the two lines of `llama-server --version`, on stderr as it does."""
    import xllamacpp

    info = xllamacpp.BUILD_INFO
    print(f"version: {info['build_number']} ({info['commit']})", file=sys.stderr)
    print(f"built with {info['compiler']} for {info['build_target']}", file=sys.stderr)


def serve(params: Any) -> None:
    """Run the server until SIGTERM or SIGINT; exits 1 when it cannot start."""
    import xllamacpp

    try:
        server = xllamacpp.Server(params)
    except RuntimeError:  # the log above it says why, its own text never does
        sys.exit(1)
    wakeup, handler_end = os.pipe()  # not signal.pause(): that misses a signal just before it
    os.set_blocking(handler_end, False)
    signal.set_wakeup_fd(handler_end)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _signum, _frame: None)
    os.read(wakeup, 1)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    del server  # joins the server's threads, with the interpreter lock held


def main(argv: Sequence[str]) -> None:
    """Do what the arguments say."""
    import xllamacpp

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "--version" in argv:
        print_version()
        return
    if "--list-devices" in argv:
        print("Available devices:")  # the CPU is not one, so the list of this build is empty
        return
    params = xllamacpp.CommonParams()
    params.port = 8080  # llama-server's default; the class has 0
    params.fit_params = False  # it would shrink the context to what it thinks the memory holds
    apply(params, argv)
    if not params.model.path:
        fail("error: no model given; pass -m MODEL")
    serve(params)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # llama.cpp's static destructors have nothing left to do for us
