"""What the differential suite asks: every endpoint of llama-server, its options, and what is wrong.

The endpoints, their aliases, options and the shapes of the example bodies are those of llama.cpp's
tools/server/README.md. Generating requests are greedy and short; each is sent whole and streamed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.e2e.differential import Request

ENDPOINTS = (
    *("GET /health", "POST /completion", "POST /tokenize", "POST /detokenize"),
    *("POST /apply-template", "POST /embedding", "POST /reranking", "POST /infill"),
    *("GET /props", "POST /props", "POST /embeddings", "GET /slots", "GET /metrics"),
    *("POST /slots/{id_slot}?action=save", "POST /slots/{id_slot}?action=restore"),
    *("POST /slots/{id_slot}?action=erase", "GET /lora-adapters", "POST /lora-adapters"),
    *("GET /v1/models", "POST /v1/completions", "POST /v1/chat/completions"),
    *("POST /v1/chat/completions/control", "POST /v1/responses", "POST /v1/embeddings"),
    *("POST /v1/responses/input_tokens", "POST /v1/chat/completions/input_tokens"),
    *("POST /v1/messages", "POST /v1/messages/count_tokens", "POST /v1/systemone"),
    *("GET /tools", "GET /models", "POST /models/load", "POST /models/unload"),
    *("GET /models/sse", "POST /models", "DELETE /models"),
)
"""Every heading of the README that names an endpoint, and the tools it speaks of."""

PAGE, NOWHERE, HTTP = "the page", "no endpoint", "HTTP itself"
OTHER_SUBJECTS = (PAGE, NOWHERE, HTTP)


@dataclasses.dataclass(frozen=True)
class Case:
    """One request of the suite.

    Attributes:
        subject: the endpoint it is a case of, in the words of ENDPOINTS or OTHER_SUBJECTS.
        status: what the decoder must answer, so that a case is known to show what it says; several
            where builds differ.
        generates: the decoder evaluates a prompt for it.
        by_handoff: it is compared after a handoff, too.
        missing: fields of the decoder's reply that onebitd is known not to pass on.
        leftovers: the reply shows counts of the one before; the decoder is asked once more, first.
    """

    subject: str
    name: str
    request: Request
    status: tuple[int, ...] = (200,)
    generates: bool = False
    by_handoff: bool = False
    missing: tuple[bytes, ...] = ()
    leftovers: bool = False

    @property
    def id(self) -> str:
        """Name the case in a test's report."""
        return f"{self.subject.replace(' ', '-')}-{self.name}"


WORDS = "One, two, three,"
GREEDY: dict[str, Any] = {"temperature": 0, "seed": 1}
BRIEF = [{"role": "system", "content": "Copy."}, {"role": "user", "content": "a b c"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "Say what time it is.",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
    },
}
PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
    "YPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
IMAGE = {
    "role": "user",
    "content": [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": PIXEL}},
    ],
}
REFUSED = (400, 500, 501)
"""What a decoder answers to a body it cannot read: builds differ between the first two."""


def _post(
    subject: str, name: str, body: object, *, target: str = "", headers: tuple[str, ...] = ()
) -> Case:
    target = target or subject.partition(" ")[2]
    return Case(subject, name, Request("POST", target, body, headers))


def _refused(subject: str, name: str, body: object, *, target: str = "") -> Case:
    return dataclasses.replace(_post(subject, name, body, target=target), status=REFUSED)


def _unknown(subject: str, name: str, method: str, target: str, body: object = None) -> Case:
    return Case(subject, name, Request(method, target, body), status=(404,))


def _get(subject: str, name: str, target: str = "", headers: tuple[str, ...] = ()) -> Case:
    target = target or subject.partition(" ")[2]
    return Case(subject, name, Request("GET", target, headers=headers))


def _generating(
    subject: str,
    base: dict[str, Any],
    options: dict[str, dict[str, Any]],
    *,
    whole_only: tuple[str, ...] = (),
    by_handoff: tuple[str, ...] = (),
    target: str = "",
) -> list[Case]:
    """Return two cases for each set of options, whole and streamed, or one.

    Args:
        subject: of all of them.
        base: the body without the options.
        options: by name; they win over `base`.
        whole_only: names of those that change nothing about how a stream is told.
        by_handoff: names of those that are compared after a handoff, too.
        target: other than the subject's path.
    """
    cases = []
    for name, option in options.items():
        ways = {name: False} if name in whole_only else {name: False, f"{name}-streamed": True}
        for full_name, stream in ways.items():
            body = {**base, **option, "stream": stream}
            case = _post(subject, full_name, body, target=target)
            leftovers = subject == COMPLETION and "return_progress" in option
            case = dataclasses.replace(case, generates=True, leftovers=leftovers)
            cases.append(dataclasses.replace(case, by_handoff=name in by_handoff))
    return cases


COMPLETION = "POST /completion"
NATIVE = _generating(
    COMPLETION,
    {"prompt": WORDS, "n_predict": 2, **GREEDY},
    {
        "plain": {},
        "ids": {"prompt": [504, 28, 827]},
        "mixed": {"prompt": [504, " and", 28]},
        "prompt-string": {"prompt": {"prompt_string": WORDS}},
        "two-prompts": {"prompt": ["One,", "Two,"]},
        "no-tokens": {"n_predict": 0},
        "no-cache": {"cache_prompt": False, "id_slot": 0},
        "stop-word": {"n_predict": 8, "stop": [" five", "six"]},
        "probabilities": {"n_probs": 3, "min_keep": 1},
        "probabilities-after": {"n_probs": 2, "post_sampling_probs": True},
        "tokens": {"return_tokens": True},
        "fields": {"response_fields": ["content", "generation_settings/n_predict", "nothing"]},
        "timings": {"timings_per_token": True, "sse_ping_interval": -1},
        "progress": {"return_progress": True},
        "grammar": {"grammar": 'root ::= " yes" | " no"'},
        "schema": {"json_schema": PERSON},
        "bias": {"logit_bias": [[827, 5.0], [" four", False]], "ignore_eos": True},
        "samplers": {
            "samplers": ["top_k", "typ_p", "top_p", "min_p", "temperature"],
            "temperature": 0.7,
            "seed": 7,
            "top_k": 20,
            "top_p": 0.9,
            "min_p": 0.02,
            "typical_p": 0.95,
            "dynatemp_range": 0.1,
            "dynatemp_exponent": 1.1,
            "n_keep": 1,
            "n_indent": 0,
        },
        "penalties": {
            "repeat_penalty": 1.2,
            "repeat_last_n": 8,
            "presence_penalty": 0.1,
            "frequency_penalty": 0.1,
            "dry_multiplier": 0.8,
            "dry_base": 1.75,
            "dry_allowed_length": 2,
            "dry_penalty_last_n": 16,
            "dry_sequence_breakers": [";"],
            "xtc_probability": 0.1,
            "xtc_threshold": 0.1,
        },
        "mirostat": {"mirostat": 2, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "temperature": 0.8},
        "time-limit": {"t_max_predict_ms": 60_000, "n_cache_reuse": 0, "n_cmpl": 1, "lora": []},
    },
    whole_only=(
        *("ids", "mixed", "prompt-string", "no-tokens", "no-cache", "grammar", "schema", "bias"),
        *("samplers", "penalties", "mirostat", "time-limit"),
    ),
)

COMPLETIONS = "POST /v1/completions"
OPENAI_COMPLETIONS = _generating(
    COMPLETIONS,
    {"model": "any", "prompt": WORDS, "max_tokens": 2, **GREEDY},
    {
        "plain": {},
        "ids": {"prompt": [504, 28, 827]},
        "mixed": {"prompt": [504, " and", 28]},
        "one-in-a-list": {"prompt": [WORDS]},
        "two-prompts": {"prompt": ["One,", "Two,"]},
        "probabilities": {"logprobs": 2},
        "stop-word": {"max_tokens": 8, "stop": " five"},
        "usage": {"stream_options": {"include_usage": True}},
        "options": {"echo": False, "suffix": None, "best_of": 1, "n": 1, "user": "someone"},
        "native": {"n_probs": 1, "timings_per_token": True, "return_tokens": True},
        "progress": {"return_progress": True},
        "no-cache": {"cache_prompt": False},
        "other-letters": {"prompt": "naïve 漢字 🙂"},
    },
    whole_only=("ids", "mixed", "one-in-a-list", "options", "no-cache"),
    by_handoff=(
        *("plain", "ids", "mixed", "one-in-a-list", "probabilities", "stop-word", "usage"),
        *("progress", "other-letters"),
    ),
)

CHAT = "POST /v1/chat/completions"
CHATS = _generating(
    CHAT,
    {"model": "any", "messages": BRIEF, "max_tokens": 2, **GREEDY},
    {
        "plain": {},
        "json": {"response_format": {"type": "json_object"}},
        "schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": PERSON}}},
        "tools": {
            "tools": [TOOL],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
        },
        "tool-wanted": {
            "tools": [TOOL],
            "tool_choice": "required",
            "max_tokens": 8,
            "grammar_lazy": False,
        },
        "bias": {"logit_bias": {"827": -1, " four": 1.5}, "top_k": 5},
        "probabilities": {"logprobs": True, "top_logprobs": 2},
        "usage": {"stream_options": {"include_usage": True}, "timings_per_token": True},
        "reasoning": {
            "reasoning_format": "none",
            "reasoning_effort": "none",
            "chat_template_kwargs": {"enable_thinking": False},
            "reasoning_control": True,
        },
        "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a b"}]}]},
        "prefilled": {"messages": [*BRIEF, {"role": "assistant", "content": "a b"}]},
        "progress": {"return_progress": True, "max_completion_tokens": 2},
    },
    whole_only=("json", "schema", "bias", "reasoning", "parts", "prefilled"),
    by_handoff=(*("plain", "schema", "tools", "probabilities", "usage", "prefilled", "progress"),),
)

RESPONSES = "POST /v1/responses"
MESSAGES = "POST /v1/messages"
CONVERTED = [
    *_generating(
        RESPONSES,
        {"model": "any", "max_output_tokens": 2, **GREEDY},
        {
            "plain": {"instructions": "Copy.", "input": "a b c"},
            "items": {
                "input": [
                    {"role": "developer", "content": "Copy."},
                    {"role": "user", "content": "a b c"},
                ],
            },
        },
        whole_only=("items",),
    ),
    *_generating(
        MESSAGES,
        {"model": "any", "max_tokens": 2, **GREEDY, "system": "Copy.", "messages": BRIEF[1:]},
        {
            "plain": {},
            "options": {"top_p": 0.9, "top_k": 5, "stop_sequences": ["zzz"]},
            "blocks": {"system": [{"type": "text", "text": "Copy."}]},
            "tools": {
                "tools": [{"name": "clock", "input_schema": {"type": "object", "properties": {}}}],
                "tool_choice": {"type": "auto"},
            },
        },
        whole_only=("options", "blocks"),
    ),
    *_generating(
        CHAT, {"messages": BRIEF, "max_tokens": 2}, {"bare": GREEDY}, target="/chat/completions"
    ),
    *_generating(
        COMPLETIONS, {"prompt": WORDS, "max_tokens": 2}, {"bare": GREEDY}, target="/completions"
    ),
    *_generating(
        COMPLETION, {"prompt": WORDS, "n_predict": 2}, {"plural": GREEDY}, target="/completions"
    ),
]

TEXT_TOOLS = [
    _post("POST /tokenize", "plain", {"content": "Hello, world"}),
    _post("POST /tokenize", "pieces", {"content": "é🙂 <|im_start|>", "with_pieces": True}),
    _post(
        "POST /tokenize",
        "options",
        {"content": "<|im_start|>a", "add_special": True, "parse_special": False},
    ),
    _post("POST /tokenize", "nothing", {}),
    _post("POST /tokenize", "large", {"content": "word " * 30_000, "with_pieces": True}),
    _post("POST /detokenize", "plain", {"tokens": [504, 28, 827]}),
    _post("POST /detokenize", "nothing", {"tokens": []}),
    _post("POST /apply-template", "plain", {"messages": BRIEF}),
    _post("POST /apply-template", "tools", {"messages": BRIEF, "tools": [TOOL]}),
    _refused("POST /apply-template", "no-messages", {}),
    _post("POST /v1/responses/input_tokens", "plain", {"input": "a b"}),
    _post("POST /v1/chat/completions/input_tokens", "plain", {"messages": BRIEF}),
    _post("POST /v1/messages/count_tokens", "plain", {"messages": BRIEF[1:]}),
    dataclasses.replace(
        _post("POST /v1/messages/count_tokens", "wrong", {"messages": 5}), status=(200, *REFUSED)
    ),
    _post("POST /v1/chat/completions/control", "nobody", {"id": "x", "action": "reasoning_end"}),
]

_POOLED = (*REFUSED, 404)
NOT_THIS_MODEL = [
    dataclasses.replace(case, status=_POOLED)
    for case in (
        _post("POST /embedding", "plain", {"content": "a"}),
        _post("POST /embeddings", "plain", {"input": "a", "encoding_format": "float"}),
        _post("POST /v1/embeddings", "one", {"input": "a", "model": "any"}),
        _post("POST /v1/embeddings", "two", {"input": ["a", "b"], "model": "any"}),
        _post("POST /reranking", "plain", {"query": "a", "documents": ["b"]}),
        _post("POST /reranking", "short", {"query": "a", "documents": ["b"]}, target="/rerank"),
        _post(
            "POST /reranking",
            "versioned",
            {"model": "any", "query": "a", "top_n": 1, "documents": ["b", "c"]},
            target="/v1/rerank",
        ),
        _post("POST /reranking", "long", {"query": "a"}, target="/v1/reranking"),
        _post("POST /infill", "plain", {"input_prefix": "a", "input_suffix": "b", "prompt": ""}),
        _post(
            "POST /infill",
            "extra",
            {
                "input_prefix": "",
                "input_suffix": "",
                "input_extra": [{"filename": "f", "text": "t"}],
            },
        ),
        _post(
            "POST /v1/systemone",
            "plain",
            {"state": "a", "questions": {"q": {"type": "noul", "instructions": "b"}}},
        ),
        _post("POST /v1/chat/completions/control", "wrong", {"id": 5}),
    )
]

_OF_THE_DECODER = (b"server", b"access-control-allow-origin")
STATE = [
    # onebitd's own answer: it knows more than whether the decoder is ready.
    dataclasses.replace(_get("GET /health", "short"), missing=_OF_THE_DECODER),
    dataclasses.replace(_get("GET /health", "versioned", "/v1/health"), missing=_OF_THE_DECODER),
    _get("GET /props", "plain"),
    _get("GET /props", "query", "/props?model=any&autoload=false"),
    _get("GET /slots", "plain"),
    _get("GET /slots", "query", "/slots?fail_on_no_slot=1"),
    _get("GET /metrics", "plain"),
    _get("GET /lora-adapters", "plain"),
    _get("GET /v1/models", "plain"),
    _get("GET /models", "plain"),
    dataclasses.replace(_get("GET /tools", "plain"), status=(403, 404)),
    dataclasses.replace(_get("GET /models/sse", "plain"), status=(404,)),
]

_LONG = "word " * 1200
WRONG = [
    *(
        _refused(subject, name, body, target=target)
        for subject, target in ((CHAT, ""), (COMPLETIONS, ""), (COMPLETION, ""), (MESSAGES, ""))
        for name, body in (
            ("no-json", b'{"prompt":'),
            ("empty", b""),
            ("list", []),
            ("nothing", {}),
        )
    ),
    *(_refused(COMPLETIONS, f"prompt-{prompt}", {"prompt": prompt}) for prompt in (5, None, True)),
    _refused(COMPLETIONS, "prompt-empty-list", {"prompt": []}),
    _refused(COMPLETIONS, "bad-ids", {"prompt": [-1, 10**6], "max_tokens": 1}),
    _refused(COMPLETIONS, "too-long", {"prompt": _LONG}),
    _refused(COMPLETIONS, "too-long-streamed", {"prompt": _LONG, "stream": True}),
    _refused(COMPLETIONS, "grammar", {"prompt": WORDS, "grammar": "root ::= ("}),
    _refused(COMPLETIONS, "grammar-streamed", {"prompt": "a", "grammar": "root :", "stream": True}),
    _refused(COMPLETIONS, "n", {"prompt": WORDS, "n": 2}),
    _refused(COMPLETION, "too-long", {"prompt": _LONG}),
    _refused(COMPLETION, "bad-schema", {"prompt": WORDS, "json_schema": {"type": "nonsense"}}),
    _refused(COMPLETION, "types", {"prompt": WORDS, "n_predict": "many"}),
    _refused(CHAT, "messages-text", {"messages": "hello"}),
    _refused(CHAT, "message-text", {"messages": ["hello"]}),
    _refused(CHAT, "no-content", {"messages": [{"role": "user"}]}),
    _refused(CHAT, "too-long", {"messages": [{"role": "user", "content": _LONG}]}),
    _refused(CHAT, "image", {"messages": [IMAGE]}),
    _refused(CHAT, "image-streamed", {"messages": [IMAGE], "stream": True}),
    _refused(CHAT, "format", {"messages": BRIEF, "response_format": {"type": "poem"}}),
    _refused(CHAT, "bad-tools", {"messages": BRIEF, "tools": "clock"}),
    _refused(CHAT, "n", {"messages": BRIEF, "n": 2}),
    _refused(RESPONSES, "nothing", {}),
    _refused(RESPONSES, "follow-up", {"input": "a", "previous_response_id": "resp_1"}),
    _refused("POST /tokenize", "no-json", b"hello"),
    _refused("POST /detokenize", "text", {"tokens": "a"}),
]

_ASSET = ("Accept-Encoding: gzip",)
UNKNOWN = [
    _unknown(NOWHERE, "plain", "GET", "/nowhere"),
    _unknown(NOWHERE, "under-v1", "GET", "/v1/nowhere"),
    _unknown(NOWHERE, "under-v1-posted", "POST", "/v1/nowhere", {"prompt": WORDS}),
    _unknown(NOWHERE, "below-completions", "POST", "/v1/completions/1", {"prompt": WORDS}),
    _unknown(NOWHERE, "below-chat", "GET", "/v1/chat/completions/chatcmpl-1"),
    _unknown(NOWHERE, "one-model", "GET", "/v1/models/test"),
    _unknown(NOWHERE, "openai-files", "GET", "/v1/files"),
    _unknown(NOWHERE, "openai-images", "POST", "/v1/images/generations", {"prompt": "a"}),
    _unknown(NOWHERE, "upper-case", "POST", "/V1/completions", {"prompt": WORDS}),
    _unknown(NOWHERE, "slash-after", "GET", "/v1/models/"),
    _unknown(NOWHERE, "slash-after-posted", "POST", "/v1/completions/", {"prompt": WORDS}),
    _unknown(NOWHERE, "slashes-before", "GET", "//v1/models"),
    _unknown(NOWHERE, "dots", "GET", "/v1/../v1/models"),
    _unknown(NOWHERE, "of-ollama", "GET", "/api/tags"),
    _unknown(NOWHERE, "slot", "GET", "/slots/0"),
    _unknown(PAGE, "asset", "GET", "/_app/none.js"),
    _unknown(HTTP, "get-of-a-post", "GET", "/v1/chat/completions"),
    _unknown(HTTP, "post-of-a-get", "POST", "/metrics", {}),
    _unknown(HTTP, "put", "PUT", "/v1/models", {}),
    _unknown(HTTP, "patch", "PATCH", "/props", {}),
    _unknown(HTTP, "delete", "DELETE", "/v1/completions"),
    _unknown(HTTP, "head-of-a-post", "HEAD", "/v1/completions"),
    _unknown(HTTP, "head-of-nothing", "HEAD", "/nowhere"),
]
PLAIN = Request("GET", "/v1/models")
WIRE = [
    Case(HTTP, "head", Request("HEAD", "/v1/models")),
    Case(HTTP, "head-props", Request("HEAD", "/props")),
    Case(HTTP, "options", Request("OPTIONS", "/v1/chat/completions")),
    Case(HTTP, "escaped-path", Request("GET", "/v1/%6dodels")),
    Case(HTTP, "query", Request("GET", "/v1/models?a=%20b&c")),
    Case(HTTP, "body-of-a-get", Request("GET", "/v1/models", {"a": 1})),
    Case(HTTP, "version-1.0", dataclasses.replace(PLAIN, version="1.0")),
    Case(
        HTTP,
        "version-1.0-posted",
        Request("POST", "/tokenize", {"content": "a"}, version="1.0"),
    ),
    Case(HTTP, "range", dataclasses.replace(PLAIN, headers=("Range: bytes=0-9",)), (200, 206)),
    Case(HTTP, "bad-range", dataclasses.replace(PLAIN, headers=("Range: bytes=9",)), (200, 416)),
    Case(HTTP, "gzip", dataclasses.replace(PLAIN, headers=("Accept-Encoding: gzip, br, zstd",))),
    Case(HTTP, "twice", dataclasses.replace(PLAIN, headers=("X-A: 1", "X-A: 2", "Cookie: a=b"))),
    Case(HTTP, "chunked", Request("POST", "/tokenize", {"content": "a b c"}, chunked=True)),
    Case(
        HTTP, "chunked-chat", Request("POST", "/apply-template", {"messages": BRIEF}, chunked=True)
    ),
    Case(
        HTTP,
        "expecting",
        Request("POST", "/tokenize", {"content": "a"}, ("Expect: 100-continue",)),
    ),
    Case(
        HTTP,
        "plain-text",
        Request("POST", "/tokenize", {"content": "a"}, ("Content-Type: text/plain",)),
    ),
    Case(
        HTTP,
        "form",
        Request(
            "POST", "/tokenize", b"content=a", ("Content-Type: application/x-www-form-urlencoded",)
        ),
        REFUSED,
    ),
    Case(
        HTTP,
        "gzip-body",
        Request("POST", "/tokenize", b"\x1f\x8b", ("Content-Encoding: gzip",)),
        (400, 415, 500),
    ),
]
PAGES = [
    Case(PAGE, "unzipped", Request("GET", "/"), (200, 404, 415)),
    Case(PAGE, "root", Request("GET", "/", headers=_ASSET), (200, 404)),
    Case(PAGE, "index", Request("GET", "/index.html", headers=_ASSET), (200, 404)),
    Case(PAGE, "head", Request("HEAD", "/", headers=_ASSET), (200, 404)),
    Case(PAGE, "part", Request("GET", "/", headers=(*_ASSET, "Range: bytes=5-9")), (206, 404)),
    Case(PAGE, "parts", Request("GET", "/", headers=(*_ASSET, "Range: bytes=0-1,4-5")), (206, 404)),
    Case(
        PAGE, "behind", Request("GET", "/", headers=(*_ASSET, "Range: bytes=99999999-")), (416, 404)
    ),
]

CASES = (
    *(*STATE, *TEXT_TOOLS, *NOT_THIS_MODEL, *NATIVE, *OPENAI_COMPLETIONS, *CHATS, *CONVERTED),
    *(*WRONG, *UNKNOWN, *WIRE, *PAGES),
)


@dataclasses.dataclass(frozen=True)
class Shut:
    """A request that never reaches the decoder; `why` is in the answer."""

    subject: str
    request: Request
    why: str


_ONE_MODEL = "onebitd serves one model"
_SLOTS = "slot actions belong to onebitd"
SHUT = (
    *(
        Shut(
            f"POST /slots/{{id_slot}}?action={action}",
            Request("POST", f"/slots/0?action={action}", {"filename": "f"}),
            _SLOTS,
        )
        for action in ("save", "restore", "erase")
    ),
    Shut(NOWHERE, Request("POST", "/slots/0?action=share", {"socket": "/s"}), _SLOTS),
    Shut(NOWHERE, Request("POST", "/%73lots/0?action=erase", {}), _SLOTS),
    Shut("POST /props", Request("POST", "/props", {}), "come from onebitd's configuration"),
    Shut("POST /lora-adapters", Request("POST", "/lora-adapters", []), "shared by all clients"),
    Shut("POST /models/load", Request("POST", "/models/load", {"model": "m"}), _ONE_MODEL),
    Shut("POST /models/unload", Request("POST", "/models/unload", {"model": "m"}), _ONE_MODEL),
    Shut("POST /models/unload", Request("POST", "/v1/models/unload", {}), _ONE_MODEL),
    Shut("POST /models", Request("POST", "/models", {"model": "m"}), _ONE_MODEL),
    Shut("DELETE /models", Request("DELETE", "/models?model=m"), _ONE_MODEL),
    Shut(NOWHERE, Request("GET", "/v1/streams/lookup"), "not kept for anybody"),
)
"""Nothing reaches the slot or the decoder's settings behind onebitd's back."""

QUICK = frozenset({"plain", "plain-streamed", "head", "no-json", "too-long", "image", "unzipped"})
"""Names of the cases that are asked of every build."""
