"""The policy `auto` on the real decoder: it learns, it is right about the slot, and a provider that
hangs, or whose work is of no use, costs no more than what was agreed.

The provider is tests/standins/provider.py, a second device: it sleeps for what it takes, and its
states were saved by the decoder's own program before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
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
from tests.harness import ROOT, HttpReply, running_onebitd, wait_until
from tests.llama_builds import BUILDS, MODELS, LlamaBuild, LlamaClient, LlamaModel, running_llama
from tests.llama_builds import running_program as running_llama_program

AUTO = '[handoff]\npolicy = "auto"\n'
TRY_IDS = [1, 2, 3] * 11
"""What the breaker tries a provider with."""
LEARN = (RHYME, DAYS, RHYME, DAYS)
"""Two runs and two replies: nothing that the slot has, each time."""

WEEK = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
VERSE = " everywhere that Mary went, the lamb was sure to go. Mary had a little lamb,"
COUNTING = {"prompt": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10,", "stop": [" 31"], "max_tokens": 1500}
"""Its reply counts on, for some eighty tokens, and nothing in the request says for how long."""
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chat(said: list[str]) -> dict[str, Any]:
    """Return the body of a chat's next turn; the model copies what stands above.

    Args:
        said: by the user, the model, the user ...
    """
    example = ["You repeat the text of the user, word by word, nothing else.", WEEK, WEEK]
    roles = ["system"] + ["user", "assistant"] * (len(said) + 1)
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
        said = [lines[0], *(text for pair in zip(replies, lines[1:], strict=False) for text in pair)]
        said = [lines[0], replies[0], lines[3]] if turn == 3 else said[: 2 * turn + 1]
        made = chat(said) if self.path == CHATS else story(said)
        return {**made, "temperature": 0, "seed": 1, "max_tokens": 8}


TALKS = (
    Talk(CHATS, (WEEK, WEEK, WEEK, WEEK.replace("Sunday", "Tuesday"))),
    Talk(COMPLETIONS, (RHYME, VERSE, VERSE, VERSE.replace("everywhere", "anywhere"))),
)


@dataclasses.dataclass(frozen=True)
class Told:
    """What the decoder alone made of everything; `ms_per_token` is its own prefill."""

    prepared: Prepared
    talks: dict[str, Talk]
    count: str
    ms_per_token: float


@functools.cache
def tell(build: LlamaBuild, model: LlamaModel, states: Path) -> Told:
    """Have the decoder alone answer every request of this module, and save states."""
    prepared = prepare(build, model)
    shutil.copytree(prepared.states, states)
    talks: dict[str, Talk] = {}
    with running_llama(build, model, *BACKEND_ARGS) as client:

        def save(ids: list[int]) -> float:
            client.slot_action("erase", "")
            timings = client.complete(ids, 0)["timings"]
            assert client.slot_action("save", "s").status == 200
            shutil.copy(client.slots_dir / "s", states / f"{len(ids)}.bin")
            return float(timings["prompt_ms"] / timings["prompt_n"])

        save(TRY_IDS)
        talks = {talk.path: told(client, talk) for talk in TALKS}
        text = client.post("/apply-template", talks[CHATS].body(0))["prompt"]
        rate = save(client.tokenize(text)[:-1])
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

        def keep(name: str, prompt: list[int], text: str) -> None:
            ids[name], texts[name] = prompt, text
            client.slot_action("erase", "")
            client.complete(prompt[:-1], 0)
            assert client.slot_action("save", "s").status == 200
            shutil.copy(client.slots_dir / "s", states / f"{len(prompt) - 1}.bin")

        for prompt in (RHYME, DAYS):
            client.slot_action("erase", "")
            text = client.complete(prompt, MAX_TOKENS)["content"]
            keep(prompt, client.tokenize(prompt), text)
        client.slot_action("erase", "")
        body = TALKS[0].body(0)
        text = client.post(CHATS, body)["choices"][0]["message"]["content"]
        templated = client.post("/apply-template", body)["prompt"]
        keep(CHATS, client.tokenize(templated), text)
    assert len({len(one) for one in ids.values()}) == 3
    prepared = Prepared(states, ids, texts, b"")
    more = {"config": AUTO, "backend_args": (*BACKEND_ARGS, "--no-swa-full")}
    with running_rig(prepared, build, model, home, **more) as rig:
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
        record = ask_right(rig, prompt)
        assert record["outcome"] == "wasted", record
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
        assert ask_right(rig, RHYME)["outcome"] == "wasted"
    assert len(rig.runs()) == runs + 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", [CHATS, COMPLETIONS], ids=["chat", "completion"])
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


def learn(rig: Rig) -> list[dict[str, Any]]:
    """Show a daemon that knows nothing both ways; return the records."""
    return [ask_right(rig, prompt) for prompt in LEARN]


def decisions(records: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """Return how each was decided, and whether that was to learn something."""
    return [(record["outcome"], record.get("explored", False)) for record in records]


LEARNING = [("used", True), ("skipped", True), ("used", True), ("skipped", True)]


@dataclasses.dataclass(frozen=True)
class Learned:
    """A daemon that has learned, how it began, and the decoder's own replies."""

    rig: Rig
    records: list[dict[str, Any]]
    told: Told


@pytest.fixture(scope="module")
def fast(
    smollm2_told: Told,
    parts: tuple[LlamaBuild, LlamaModel],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Learned]:
    """A provider three times as fast as the decoder, and a file of costs that was damaged."""
    home = tmp_path_factory.mktemp("fast")
    (home / "costs").mkdir()
    (home / "costs" / COSTS_FILE).write_text('{"subject": {}, "costs": {"version": 1, "provi')
    config = AUTO + "[provider]\ntimeout_s = 30\n"
    env = {"STATE_DIRECTORY": str(home / "costs")}
    with running_rig(smollm2_told.prepared, *parts, home, config=config, env=env) as rig:
        rig.set_mode(f"per_token:{smollm2_told.ms_per_token / 3}")
        yield Learned(rig, learn(rig), smollm2_told)


@pytest.fixture(scope="module")
def slow(
    smollm2_told: Told,
    parts: tuple[LlamaBuild, LlamaModel],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Learned]:
    """A provider twenty times as slow, as was learned before; replies are long as a rule.

    Its time limit is a second, and a breaker that is open looks again after a moment.
    """
    home = tmp_path_factory.mktemp("slow")
    (home / "costs").mkdir()
    costs = seeded(smollm2_told.ms_per_token, 20 * smollm2_told.ms_per_token)
    document = {"subject": {}, "costs": costs.to_json()}
    (home / "costs" / COSTS_FILE).write_text(json.dumps(document))
    (home / "patched").mkdir()
    (home / "patched" / "sitecustomize.py").write_text(_SHORT_PAUSES)
    config = AUTO + "[provider]\ntimeout_s = 1\n"
    env = {"STATE_DIRECTORY": str(home / "costs"), "PYTHONPATH": f"{home / 'patched'}:{ROOT}"}
    with running_rig(smollm2_told.prepared, *parts, home, config=config, env=env) as rig:
        yield Learned(rig, [], smollm2_told)


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
    daemon, directory = fast.rig.daemon, fast.rig.log.parent / "costs"
    warnings = daemon.log_records("costs_damaged")
    assert [record["level"] for record in warnings] == ["warning"]
    file, copy = directory / COSTS_FILE, directory / f"{COSTS_FILE}.damaged"
    assert f"{file} is damaged: " in warnings[0]["line"]
    assert f"the file is kept as {copy}" in warnings[0]["line"]
    assert copy.read_text().endswith("provi")
    assert decisions(fast.records) == LEARNING
    wait_until(file.exists, "the new file")


def test_learned_costs_survive_a_kill_and_decide_the_next_prompt(
    smollm2_told: Told, parts: tuple[LlamaBuild, LlamaModel], tmp_path: Path
) -> None:
    """The next daemon does not learn anew what the killed one knew."""
    build, model = parts
    env = {"STATE_DIRECTORY": str(tmp_path / "costs")}
    file = tmp_path / "costs" / COSTS_FILE

    def is_learned() -> bool:
        with contextlib.suppress(OSError):
            costs = Costs.from_json(json.loads(file.read_text())["costs"])
            return costs.provider_tries(Route.FILE) == 2 == costs.decoder_samples()
        return False

    with running_rig(smollm2_told.prepared, *parts, tmp_path, config=AUTO, env=env) as rig:
        assert decisions(learn(rig)) == LEARNING
        wait_until(is_learned, "the figures in their file")
        rig.daemon.kill()
    assert file.stat().st_mode & 0o777 == 0o600
    with running_onebitd(
        model=model.path,
        llama_server=build.program,
        provider=rig.provider,
        backend_args=[*BACKEND_ARGS, *build.extra_args],
        config=AUTO,
        env={**provider_env(tmp_path), **env},
    ) as daemon:
        record = ask_right(dataclasses.replace(rig, daemon=daemon), RHYME)
        assert decisions([record]) == [("used", False)], record
        assert record["provider_estimate_ms"] < record["decoder_estimate_ms"]


# --- what the slot has --------------------------------------------------------------------------


def replied(rig: Rig, talk: Talk, turn: int, stream: bool) -> tuple[HttpReply, dict[str, Any]]:
    """Post one turn, see that its reply is the decoder's own; return it and the record."""
    before = len(rig.daemon.handoffs())
    reply = rig.daemon.request("POST", talk.path, {**talk.body(turn), "stream": stream})
    assert (reply.status, reply.text) == (200, talk.replies[turn])
    return reply, rig.daemon.last_handoff(before + 1)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", [CHATS, COMPLETIONS], ids=["chat", "completion"])
@pytest.mark.parametrize("pace", ["fast", "slow"])
def test_later_turns_are_decoded_from_the_slot_and_it_holds_what_was_believed(
    request: pytest.FixtureRequest, pace: str, path: str, stream: bool
) -> None:
    """However fast the provider is; also a reply that is wanted again, and an edited history."""
    learned: Learned = request.getfixturevalue(pace)
    rig, talk = learned.rig, learned.told.talks[path]
    rig.heal()
    rig.set_mode(f"per_token:{learned.told.ms_per_token / 3}")  # that of `slow` is not called
    assert ask_right(rig, DAYS, "always")["outcome"] == "used"  # the slot holds nothing of it
    _, record = replied(rig, talk, 0, stream)
    assert kinds([record]) == ({"used": 1} if pace == "fast" else {"skipped policy": 1}), record
    runs = len(rig.runs())
    for turn in (1, 2, 2, 3):
        _, record = replied(rig, talk, turn, stream)
        assert kinds([record]) == {"skipped already_cached": 1}, record
        print(pace, path, stream, turn, record)
        assert record["slot_tokens"] == record["cached_tokens"] > record["prompt_tokens"] / 2
        assert "explored" not in record
    assert len(rig.runs()) == runs


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
        ask_right(rig, (RHYME, DAYS)[number % 2 and number < bound], "always")
    records = rig.daemon.handoffs()[before:]
    expected = {"fallback provider_timeout": bound, "skipped breaker_open": 20 - bound}
    assert kinds(records) == expected
    assert all("provider_wall_ms" not in record for record in records[bound:])
    assert [run["ids"] == TRY_IDS for run in rig.runs()[runs : runs + bound]] == [False] * bound
    found = rig.daemon.status()["provider"]
    assert (found["breaker_class"], found["breaker"] != "closed") == ("timeout", True)
    assert records[0]["time"] < found["breaker_since"] < records[-1]["time"]
    assert 0 <= found["breaker_next_try_s"] <= 0.2
    assert ctl(rig, "status")[0] == 1

    runs = len(rig.runs())
    wait_until(lambda: len(rig.runs()) >= runs + 2, "two tries that nobody asked for")
    assert all(run["ids"] == TRY_IDS for run in rig.runs()[runs:])
    assert len(rig.daemon.handoffs()) == before + 20

    def asked_during_a_try() -> bool:
        wait_until(lambda: rig.daemon.status()["provider"]["breaker"] == "half_open", "a try")
        record = ask_right(rig, RHYME, "always")
        assert kinds([record]) == {"skipped breaker_open": 1}
        return "being tried now" in record["detail"]

    wait_until(asked_during_a_try, "a request beside a try")
    rig.set_mode("ok")
    wait_until(lambda: rig.daemon.status()["provider"]["breaker"] == "closed", "a good try")
    assert ask_right(rig, DAYS, "always")["outcome"] == "used"


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
        for number in range(20):
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


# --- nothing waits for nothing ------------------------------------------------------------------


def test_run_that_the_decoder_overtakes_is_stopped_and_disturbs_nobody(slow: Learned) -> None:
    """The reply in front ends sooner than expected: the next prompt goes to the decoder then."""
    rig = slow.rig
    rig.heal()
    rig.set_mode("sleep:60")
    before, runs = len(rig.daemon.handoffs()), len(rig.runs())
    with rig.nothing_left():
        with RawClient(rig, {**COUNTING, "stream": True}, ["Connection: close"]) as first:
            first.wait_for(b"data: ")
            second = in_background(partial(rig.ask, DAYS, stream=True))
            pgid = (rig.wait_run(runs), rig.runs()[runs]["pgid"])[1]
            ended = first.read_to_end()
        assert second().text == rig.prepared.texts[DAYS]
        assert group_is_gone(pgid)
        assert rig.daemon.slot_files() == []
    body = ended.partition(b"\r\n\r\n")[2]
    counted = HttpReply(200, {"content-type": "text/event-stream"}, body).text
    assert counted == slow.told.count
    rig.daemon.last_handoff(before + 2)
    front, behind = rig.daemon.handoffs()[before:]
    assert kinds([front, behind]) == {"skipped policy": 1, "skipped overtaken": 1}
    assert behind["detail"].startswith("the slot is free, "), behind
    assert behind["provider_estimate_ms"] < behind["decoder_estimate_ms"]
    assert "handed_tokens" not in behind
    assert behind["evaluated_tokens"] + behind["cached_tokens"] == len(rig.prepared.ids[DAYS])
    assert len(rig.runs()) == runs + 1
