"""The policy `auto` on the real decoder: it learns, it is right about the slot, and a provider that
hangs, or whose work is of no use, costs no more than what was agreed.

The provider is tests/standins/provider.py, a second device: it sleeps for what it takes, and its
states were saved by the decoder's own program before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from onebitd.core.breaker import LIMITS, FailureClass
from onebitd.core.costs import Costs
from onebitd.core.handoff import Route
from onebitd.services.handoff import COSTS_FILE
from onebitd.surfaces import cli
from tests.e2e.rig import (
    BACKEND_ARGS,
    DAYS,
    MAX_TOKENS,
    RHYME,
    Prepared,
    RawClient,
    Rig,
    group_is_gone,
    kill,
    prepare,
    provider_env,
    running_rig,
)
from tests.e2e.test_faults import in_background
from tests.harness import HttpReply, running_onebitd, wait_until
from tests.llama_builds import (
    BUILDS,
    MODELS,
    ROOT,
    LlamaBuild,
    LlamaClient,
    LlamaModel,
    running_llama,
)
from tests.llama_builds import RHYME as LONG_RHYME
from tests.llama_builds import running_program as running_llama_program

AUTO = '[handoff]\npolicy = "auto"\n'
LIMIT = "[provider]\ntimeout_s = 100\n"
PACE = 0.4
"""Of a fast provider: enough to win all of a prompt and to lose what a turn adds to it, also on a
machine that is busier when the decoder is measured, or when it is used."""
NEVER = {"X-Onebit-Handoff": "never"}
TRY_IDS = [1, 2, 3] * 11
"""What the breaker tries a provider with."""
LEARN = (RHYME, DAYS, RHYME, DAYS)
"""Two runs and two replies: nothing that the slot has, each time."""

WEEK = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
VERSE = " everywhere that Mary went, the lamb was sure to go. Mary had a little lamb,"
COUNTING = {"prompt": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10,", "stop": [" 26"], "max_tokens": 1500}
"""Its reply counts on, for some sixty tokens, and nothing in the request says for how long."""
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chat(said: list[str]) -> dict[str, Any]:
    """Return the body of a chat's next turn; the model copies what stands above.

    Args:
        said: by the user, the model, the user ...
    """
    example = ["You repeat the text of the user, word by word, nothing else.", *[WEEK] * 6]
    roles = ["system"] + ["user", "assistant"] * (len(said) + 3)
    texts = [*example, *said]
    return {"messages": [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]}


def story(said: list[str]) -> dict[str, Any]:
    """Return the body of a completion that goes on where the last one ended."""
    return {"prompt": "".join(said)}


@dataclasses.dataclass(frozen=True)
class Talk:
    """Three turns on an endpoint, each of which repeats what was said before.

    Attributes:
        lines: the client's part, and an edited second turn.
        replies: to each turn, of the decoder alone; to the edited one at the end.
    """

    path: str
    lines: tuple[str, str, str, str]
    replies: tuple[str, ...] = ()

    def body(self, turn: int) -> dict[str, Any]:
        """Return what turn 0, 1 or 2 posts; 3 is turn 1 with another text."""
        replies, lines = self.replies, self.lines
        said = [
            lines[0],
            *(text for pair in zip(replies, lines[1:], strict=False) for text in pair),
        ]
        said = [lines[0], replies[0], lines[3]] if turn == 3 else said[: 2 * turn + 1]
        made = chat(said) if self.path == CHATS else story(said)
        return {**made, "temperature": 0, "seed": 1, "max_tokens": 8}


TALKS = (
    Talk(CHATS, (WEEK, WEEK, WEEK, WEEK.replace("Sunday", "Tuesday"))),
    Talk(COMPLETIONS, (LONG_RHYME, VERSE, VERSE, VERSE.replace("everywhere", "anywhere"))),
)


@dataclasses.dataclass(frozen=True)
class Told:
    """What the decoder alone made of everything; `ms_per_token` is its own prefill."""

    prepared: Prepared
    talks: dict[str, Talk]
    count: str
    ms_per_token: float


def save(client: LlamaClient, ids: list[int], states: Path) -> float:
    """Save the state of a prompt, evaluated cold; return the milliseconds for each token."""
    client.slot_action("erase", "")
    timings = client.complete(ids, 0)["timings"]
    assert client.slot_action("save", "s").status == 200
    shutil.move(client.slots_dir / "s", states / f"{len(ids)}.bin")
    return float(timings["prompt_ms"] / timings["prompt_n"])


def tell(build: LlamaBuild, model: LlamaModel, states: Path) -> Told:
    """Have the decoder alone answer every request of this module, and save states."""
    prepared = prepare(build, model)
    shutil.copytree(prepared.states, states)
    with running_llama(build, model, *BACKEND_ARGS) as client:
        save(client, TRY_IDS, states)
        talks: dict[str, Talk] = {}
        for talk in TALKS:
            body = talk.body(0)
            text = body.get("prompt") or client.post("/apply-template", body)["prompt"]
            rate = save(client, client.tokenize(text)[:-1], states)
            talks[talk.path] = told(client, talk)
        client.slot_action("erase", "")
        count = client.post(COMPLETIONS, {**COUNTING, "temperature": 0})["choices"][0]["text"]
    return Told(dataclasses.replace(prepared, states=states), talks, count, rate)


def told(client: LlamaClient, talk: Talk) -> Talk:
    """Return the talk with the decoder's replies."""
    for turn in range(4):
        reply = client.post(talk.path, talk.body(turn))
        choice = reply["choices"][0]
        text = choice["message"]["content"] if talk.path == CHATS else choice["text"]
        assert text.strip()
        talk = dataclasses.replace(talk, replies=(*talk.replies, text))
    return talk


@pytest.fixture(scope="module")
def smollm2_told(
    parts: tuple[LlamaBuild, LlamaModel], tmp_path_factory: pytest.TempPathFactory
) -> Told:
    """Replies and states of the model without a sliding window."""
    return tell(*parts, tmp_path_factory.mktemp("told") / "states")


def ctl(rig: Rig, *words: str) -> tuple[int, str]:
    """Run onebitctl; return exit status and output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = cli.main([*words, "--socket", str(rig.daemon.runtime / "control.sock")])
    return status, out.getvalue()


def ask_right(rig: Rig, prompt: str, policy: str | None = None) -> dict[str, Any]:
    """Ask for a completion, see that it is right, and return its record."""
    before = len(rig.daemon.handoffs())
    reply = rig.ask(prompt, policy=policy)
    assert (reply.status, reply.text) == (200, rig.prepared.texts[prompt])
    return rig.daemon.last_handoff(before + 1)


def kinds(records: list[dict[str, Any]]) -> Counter[str]:
    """Count records by outcome and reason."""
    return Counter(f"{record['outcome']} {record.get('reason', '')}".strip() for record in records)


# --- a decoder that does not use what it gets ---------------------------------------------------


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rig, dict[str, str]]]:
    """A model with a sliding window on a decoder that keeps no more than that; its chat replies."""
    build, model = BUILDS[0], MODELS[1]
    build.require()
    model.require()
    home = tmp_path_factory.mktemp("windowed")
    states = home / "told"
    states.mkdir()
    ids: dict[str, list[int]] = {}
    texts: dict[str, str] = {}
    args = ("-m", str(model.path), "-np", "1", "--cache-ram", "0", *BACKEND_ARGS)
    with running_llama_program(build.program, (*args, *build.extra_args)) as client:
        for prompt in (RHYME, DAYS):
            ids[prompt] = client.tokenize(prompt)
            save(client, ids[prompt][:-1], states)
            texts[prompt] = client.complete(ids[prompt], MAX_TOKENS)["content"]
        body = TALKS[0].body(0)
        ids[CHATS] = client.tokenize(client.post("/apply-template", body)["prompt"])
        save(client, ids[CHATS][:-1], states)
        texts[CHATS] = client.post(CHATS, body)["choices"][0]["message"]["content"]
    assert len({len(one) for one in ids.values()}) == 3
    prepared = Prepared(states, ids, texts, b"")
    words = (*BACKEND_ARGS, "--no-swa-full")
    with running_rig(prepared, build, model, home, config=AUTO, backend_args=words) as rig:
        yield rig, texts


def test_route_of_a_model_with_a_sliding_window_is_off_after_three_wasted_handoffs(
    windowed: tuple[Rig, dict[str, str]],
) -> None:
    """It is told which flag helps, nothing more is handed over, and a new decoder is tried."""
    rig, _ = windowed
    rig.daemon.reset_provider()
    before = len(rig.daemon.handoffs())
    for prompt in (RHYME, DAYS, RHYME):
        assert rig.daemon.status()["provider"]["route_off"] is None
        record = ask_right(rig, prompt, "always")  # by itself, it may have learned better by then
        assert record["outcome"] == "wasted", str(record)
        assert record["evaluated_tokens"] == record["prompt_tokens"]
    runs = len(rig.runs())
    record = ask_right(rig, DAYS)
    assert kinds(rig.daemon.handoffs()[before:]) == {"wasted": 3, "skipped not_reused": 1}
    assert "sliding window, and needs --swa-full" in record["detail"]
    assert len(rig.runs()) == runs
    assert rig.daemon.status()["provider"]["route_off"] == record["detail"]
    status, page = ctl(rig, "status")
    assert status == 1
    assert "--swa-full" in " ".join(page.split())
    with rig.nothing_left(new_decoder=True):
        kill(rig.wait_decoder())
        wait_until(lambda: rig.daemon.status()["backend"]["restarts"] == 1, "a new decoder")
        rig.wait_decoder()
        assert rig.daemon.status()["provider"]["route_off"] is None
        assert ask_right(rig, RHYME, "always")["outcome"] == "wasted"
    assert len(rig.runs()) == runs + 1


@pytest.mark.parametrize(
    ("path", "stream"),
    [(CHATS, True), (COMPLETIONS, False)],
    ids=["chat-streamed", "completion-whole"],
)
def test_handoff_of_no_use_is_wasted_on_every_endpoint(
    windowed: tuple[Rig, dict[str, str]], path: str, stream: bool
) -> None:
    """By the decoder's own figures, streamed and not."""
    rig, texts = windowed
    rig.daemon.reset_provider()
    before = len(rig.daemon.handoffs())
    body = TALKS[0].body(0) if path == CHATS else {**story([RHYME]), "temperature": 0, "seed": 1}
    expected = texts[CHATS] if path == CHATS else texts[RHYME]
    limit = {"max_tokens": body["max_tokens"] if path == CHATS else MAX_TOKENS}
    reply = rig.daemon.request(
        "POST", path, {**body, **limit, "stream": stream}, {"X-Onebit-Handoff": "always"}
    )
    assert (reply.status, reply.text) == (200, expected)
    record = rig.daemon.last_handoff(before + 1)
    assert (record["outcome"], record["stream"]) == ("wasted", stream), record
    assert record["cached_tokens"] + record["evaluated_tokens"] == record["prompt_tokens"]
    assert record["evaluated_tokens"] > 1
    assert reply.headers["x-onebit-handoff"] == "file"


# --- what is learned ----------------------------------------------------------------------------


def decisions(records: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """Return how each was decided, and whether that was to learn something."""
    return [(record["outcome"], record.get("explored", False)) for record in records]


@dataclasses.dataclass(frozen=True)
class Learned:
    """A daemon that has learned.

    Attributes:
        mode: of its provider, as it was learned.
        told: the decoder's own replies.
        records: of what was learned from, and of the first prompt after a kill.
        warnings: about the file of costs.
    """

    rig: Rig
    mode: str
    told: Told
    records: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    warnings: list[dict[str, Any]] = dataclasses.field(default_factory=list)


@pytest.fixture(scope="module")
def fast(
    smollm2_told: Told,
    parts: tuple[LlamaBuild, LlamaModel],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Learned]:
    """A provider that is faster than the decoder; the daemon that learned so was killed.

    That one found a damaged file of costs.
    """
    build, model = parts
    home = tmp_path_factory.mktemp("fast")
    costs, mode = home / "costs", f"per_token:{smollm2_told.ms_per_token * PACE}"
    costs.mkdir()
    (costs / COSTS_FILE).write_text(_CUT_SHORT)
    env = {"STATE_DIRECTORY": str(costs)}

    def is_kept() -> bool:
        with contextlib.suppress(OSError):
            kept = Costs.from_json(json.loads((costs / COSTS_FILE).read_text())["costs"])
            return kept.provider_tries(Route.FILE) == 2 == kept.decoder_samples()
        return False

    config = AUTO + LIMIT
    with running_rig(smollm2_told.prepared, *parts, home, config=config, env=env) as rig:
        rig.set_mode(mode)
        records = [ask_right(rig, prompt) for prompt in LEARN]
        warnings = rig.daemon.log_records("costs_damaged")
        wait_until(is_kept, "the figures in their file")
        rig.daemon.kill()
    with running_onebitd(
        model=model.path,
        llama_server=build.program,
        provider=rig.provider,
        backend_args=[*BACKEND_ARGS, *build.extra_args],
        config=config,
        env={**provider_env(home), **env},
    ) as daemon:
        again = dataclasses.replace(rig, daemon=daemon)
        records.append(ask_right(again, RHYME))
        yield Learned(again, mode, smollm2_told, records, warnings)


_CUT_SHORT = '{"subject": {}, "costs": {"version": 1, "provi'


@contextlib.contextmanager
def running_slow(
    told: Told, parts: tuple[LlamaBuild, LlamaModel], home: Path, limit: str
) -> Iterator[Learned]:
    """Run a daemon whose provider is twenty times as slow, and whose replies are long as a rule.

    It has learned so before. A breaker that is open looks again after a moment.
    """
    costs, patched = home / "costs", home / "patched"
    costs.mkdir()
    patched.mkdir()
    provider_ms = 20 * told.ms_per_token
    document = {"subject": {}, "costs": seeded(told.ms_per_token, provider_ms).to_json()}
    (costs / COSTS_FILE).write_text(json.dumps(document))
    (patched / "sitecustomize.py").write_text(_SHORT_PAUSES)
    env = {"STATE_DIRECTORY": str(costs), "PYTHONPATH": f"{patched}:{ROOT}"}
    with running_rig(told.prepared, *parts, home, config=AUTO + limit, env=env) as rig:
        rig.set_mode(mode := f"per_token:{provider_ms}")
        yield Learned(rig, mode, told)


@pytest.fixture(scope="module")
def slow(
    smollm2_told: Told,
    parts: tuple[LlamaBuild, LlamaModel],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Learned]:
    """A slow provider, whose time limit is a second."""
    home = tmp_path_factory.mktemp("slow")
    limit = "[provider]\ntimeout_s = 1\n"
    with running_slow(smollm2_told, parts, home, limit) as learned:
        yield learned


_SHORT_PAUSES = """
from dataclasses import replace
from onebitd.core.breaker import LIMITS
for kind, limit in LIMITS.items():
    LIMITS[kind] = replace(limit, first_s=0.2, last_s=0.2)
"""


def seeded(decoder_ms: float, provider_ms: float) -> Costs:
    """Return what a daemon has learned from such a decoder and provider, by token."""
    costs, now = Costs(), time.time()
    for tokens in (40, 80, 160, 40, 80, 160):
        costs.note_decoder(0, tokens, tokens * decoder_ms, overlapped=False, now=now)
        ms = tokens * provider_ms
        costs.note_provider(Route.FILE, tokens, ms, overlapped=False, cold=False, now=now)
        costs.note_reply(2000, 2000 * 2 * decoder_ms, now)
    return costs


def test_damaged_costs_are_put_aside_with_one_warning_and_learned_anew(fast: Learned) -> None:
    """The warning names the file and its copy; every request is served meanwhile."""
    file = fast.rig.log.parent / "costs" / COSTS_FILE
    copy = file.with_name(f"{COSTS_FILE}.damaged")
    assert [record["level"] for record in fast.warnings] == ["warning"]
    assert f"{file} is damaged: " in fast.warnings[0]["line"]
    assert f"the file is kept as {copy}" in fast.warnings[0]["line"]
    assert copy.read_text() == _CUT_SHORT
    by_provider, by_decoder = ("used", True), ("skipped", True)
    assert decisions(fast.records[:4]) == [by_provider, by_decoder, by_provider, by_decoder]


def test_learned_costs_survive_a_kill_and_decide_the_next_prompt(fast: Learned) -> None:
    """The next daemon does not learn anew what the killed one knew."""
    assert fast.rig.daemon.log_records("costs_damaged") == []
    record = fast.records[4]
    assert decisions([record]) == [("used", False)], record
    assert record["provider_estimate_ms"] < record["decoder_estimate_ms"]
    assert (fast.rig.log.parent / "costs" / COSTS_FILE).stat().st_mode & 0o777 == 0o600


# --- what the slot has --------------------------------------------------------------------------


def replied(rig: Rig, talk: Talk, turn: int, stream: bool) -> tuple[HttpReply, dict[str, Any]]:
    """Post one turn, see that its reply is the decoder's own; return it and the record."""
    before = len(rig.daemon.handoffs())
    reply = rig.daemon.request("POST", talk.path, {**talk.body(turn), "stream": stream})
    assert (reply.status, reply.text) == (200, talk.replies[turn])
    return reply, rig.daemon.last_handoff(before + 1)


@pytest.mark.parametrize(
    ("pace", "path", "stream"),
    [
        pytest.param("fast", CHATS, True, id="fast-chat-streamed"),
        pytest.param("fast", COMPLETIONS, False, id="fast-completion-whole"),
        pytest.param("slow", CHATS, True, id="slow-chat-streamed"),
    ],
)
def test_later_turns_are_decoded_from_the_slot_and_it_holds_what_was_believed(
    request: pytest.FixtureRequest, pace: str, path: str, stream: bool
) -> None:
    """However fast the provider is; also a reply that is wanted again, and an edited history."""
    learned: Learned = request.getfixturevalue(pace)
    rig, talk = learned.rig, learned.told.talks[path]
    rig.heal()
    rig.set_mode(learned.mode)
    before = len(rig.daemon.handoffs())
    rig.daemon.completion("Hello", max_tokens=1, headers=NEVER)  # the slot holds nothing of it
    rig.daemon.last_handoff(before + 1)
    _, record = replied(rig, talk, 0, stream)
    assert kinds([record]) == ({"used": 1} if pace == "fast" else {"skipped policy": 1}), record
    runs = len(rig.runs())
    for turn in (1, 2, 2, 3):
        _, record = replied(rig, talk, turn, stream)
        assert kinds([record]) == {"skipped already_cached": 1}, str(record)
        assert record["slot_tokens"] == record["cached_tokens"] > record["prompt_tokens"] / 2
        assert "explored" not in record
    assert len(rig.runs()) == runs


# --- nothing waits for nothing ------------------------------------------------------------------


def test_run_that_the_decoder_overtakes_is_stopped_and_disturbs_nobody(
    smollm2_told: Told, parts: tuple[LlamaBuild, LlamaModel], tmp_path: Path
) -> None:
    """The reply in front ends sooner than expected: the next prompt goes to the decoder then."""
    with running_slow(smollm2_told, parts, tmp_path, LIMIT) as slow:
        overtake(slow.rig, slow.told.count)


def overtake(rig: Rig, count: str) -> None:
    """Have the decoder overtake a provider's run behind the reply that counts."""
    with rig.nothing_left():
        with RawClient(rig, {**COUNTING, "stream": True}, ["Connection: close"]) as first:
            first.wait_for(b"data: ")
            second = in_background(partial(rig.ask, DAYS, stream=True))
            rig.wait_run(0)
            pgid = rig.runs()[0]["pgid"]
            ended = first.read_to_end()
        assert second().text == rig.prepared.texts[DAYS]
        assert group_is_gone(pgid)
        assert rig.daemon.slot_files() == []
    body = ended.partition(b"\r\n\r\n")[2]
    counted = HttpReply(200, {"content-type": "text/event-stream"}, body).text
    assert counted == count
    rig.daemon.last_handoff(2)
    front, behind = rig.daemon.handoffs()
    assert kinds([front, behind]) == {"skipped policy": 1, "skipped overtaken": 1}
    assert behind["detail"].startswith("the slot is free, "), behind
    assert behind["provider_estimate_ms"] < behind["decoder_estimate_ms"]
    assert "handed_tokens" not in behind
    assert behind["evaluated_tokens"] + behind["cached_tokens"] == len(rig.prepared.ids[DAYS])
    assert len(rig.runs()) == 1


# --- a provider that hangs ----------------------------------------------------------------------


def test_provider_that_always_hangs_is_waited_for_by_no_more_than_the_breakers_bound(
    slow: Learned,
) -> None:
    """Twenty requests are answered right; it is tried again beside them, and closes by itself."""
    rig, bound = slow.rig, LIMITS[FailureClass.TIMEOUT].threshold
    rig.heal()
    rig.set_mode("hang")
    before, runs = len(rig.daemon.handoffs()), len(rig.runs())
    for number in range(20):
        prompt = DAYS if number == 1 else RHYME
        assert rig.ask(prompt, policy="always").text == rig.prepared.texts[prompt]
    rig.daemon.last_handoff(before + 20)
    records = rig.daemon.handoffs()[before:]
    expected = {"fallback provider_timeout": bound, "skipped breaker_open": 20 - bound}
    assert kinds(records) == expected
    assert all("provider_wall_ms" not in record for record in records[bound:])
    assert [len(run["ids"]) + 1 for run in rig.runs()[runs : runs + bound]] == [
        record["prompt_tokens"] for record in records[:bound]
    ]
    found = rig.daemon.status()["provider"]
    assert (found["breaker_class"], found["breaker"] != "closed") == ("timeout", True)
    assert records[0]["time"] < found["breaker_since"] < records[-1]["time"]
    assert 0 <= found["breaker_next_try_s"] <= 0.2
    assert ctl(rig, "status")[0] == 1
    tries_go_on_beside_requests(rig)
    rig.set_mode("ok")
    wait_until(lambda: rig.daemon.status()["provider"]["breaker"] == "closed", "a good try")
    assert ask_right(rig, DAYS, "always")["outcome"] == "used"


def tries_go_on_beside_requests(rig: Rig) -> None:
    """Nobody asks for the tries of the breaker, and nobody waits for one."""
    before, runs = len(rig.daemon.handoffs()), len(rig.runs())
    wait_until(lambda: len(rig.runs()) > runs, "a try that nobody asked for")
    assert rig.runs()[runs]["ids"] == TRY_IDS
    assert len(rig.daemon.handoffs()) == before

    def asked_during_a_try() -> bool:
        wait_until(lambda: rig.daemon.status()["provider"]["breaker"] == "half_open", "a try")
        record = ask_right(rig, RHYME, "always")
        assert kinds([record]) == {"skipped breaker_open": 1}
        assert "lock_ms" not in record
        return "being tried now" in record["detail"]

    wait_until(asked_during_a_try, "a request beside a try")


def test_provider_that_hangs_under_auto_is_waited_for_no_longer_than_it_was_worth(
    fast: Learned,
) -> None:
    """One that was expected to win is given up long before its time limit, and not for ever."""
    rig, bound = fast.rig, LIMITS[FailureClass.TIMEOUT].threshold
    rig.heal()
    ask_right(rig, DAYS, "always")
    rig.set_mode("hang")
    before, runs = len(rig.daemon.handoffs()), len(rig.runs())
    with rig.nothing_left():
        for number in range(5):
            ask_right(rig, (RHYME, DAYS)[number % 2])
    found = kinds(rig.daemon.handoffs()[before:])
    assert 1 <= found["skipped overtaken"] <= bound, found
    assert len(rig.runs()) - runs == found["skipped overtaken"]
    assert set(found) <= {f"skipped {why}" for why in ("overtaken", "breaker_open", "policy")}
    assert "was not done after" in rig.daemon.handoffs()[before]["detail"]


def test_provider_that_was_stopped_is_ended_at_its_limit_with_its_group(slow: Learned) -> None:
    """A process that does not even take SIGTERM is gone, and the line says why."""
    rig = slow.rig
    rig.heal()
    rig.set_mode("hang")
    counted, before = rig.by_reason("provider_timeout"), len(rig.daemon.handoffs())
    with rig.nothing_left():
        runs = len(rig.runs())
        reply = in_background(partial(rig.ask, RHYME, policy="always"))
        kill(rig.wait_run(runs), signal.SIGSTOP)
        assert reply().text == rig.prepared.texts[RHYME]
        record = rig.daemon.last_handoff(before + 1)
        rig.assert_fell_back(record, "provider_timeout", "no result within 1 s", counted)
        assert group_is_gone(rig.runs()[runs]["pgid"])
