"""The pipeline of one request over the stand-in decoder and the stand-in provider."""

# ruff: noqa: ASYNC110 - real processes and files, milliseconds each

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio
import trio.testing

from onebitd.adapters import llama_server, provider_process
from onebitd.adapters.device_lock import DeviceLock
from onebitd.adapters.device_sysfs import DeviceReader
from onebitd.adapters.process import Child
from onebitd.core import request, state_check, state_file
from onebitd.core.config import Policy
from onebitd.core.config_resolve import resolve
from onebitd.core.errors import BackendError, RequestError
from onebitd.core.handoff_filter import HandoffFilter
from onebitd.core.state_layout import Layout
from onebitd.services import provider_runs
from onebitd.services import supervisor as supervisor_module
from onebitd.services.admission import Admission
from onebitd.services.handoff import Handoffs
from onebitd.services.history import History
from onebitd.services.supervisor import Supervisor
from onebitd.services.telemetry import Telemetry, Watch
from tests.core.state_files import Kv, Recr, build
from tests.harness import STANDINS, is_alive
from tests.services.rig import Home, home, lose_what_is_restored, running

COMPLETIONS, CHAT = request.COMPLETIONS_PATH, request.CHAT_PATH
PROMPT = "the quick brown fox"
TOKENS = len(PROMPT)


@dataclasses.dataclass
class Asked:
    """What one request got: its record's fields, its reply, the headers onebitd adds."""

    record: dict[str, Any]
    status: int
    body: bytes
    headers: dict[bytes, bytes]

    @property
    def text(self) -> str:
        """The text of a completion."""
        return str(json.loads(self.body)["choices"][0]["text"])

    @property
    def end(self) -> tuple[str, str | None]:
        """Outcome and reason."""
        return self.record["outcome"], self.record.get("reason")


class Rig:
    """The pipeline, over a decoder that runs."""

    def __init__(self, place: Home, supervisor: Supervisor, settings: dict[str, Any]) -> None:
        self.place = place
        self.supervisor = supervisor
        self.runs = place.path / "runs"
        self.lock_path = place.path / "npu.lock"
        self._mode = place.path / "mode"
        file: dict[str, Any] = {
            "model": {"path": str(place.model)},
            "lock": {"path": str(self.lock_path), "wait_s": 0.2} | settings.pop("lock", {}),
            "handoff": {"policy": "always"} | settings.pop("handoff", {}),
            "provider": {
                "program": str(STANDINS / "provider.py"),
                "timeout_s": 20,
                "env": {
                    "FAKE_PREFILL_MODE": f"@{self._mode}",
                    "FAKE_PREFILL_LOG": str(self.runs),
                    "FAKE_PREFILL_LOCK": str(self.lock_path),
                },
            }
            | settings.pop("provider", {}),
            **settings,
        }
        config = resolve(instance="test", file=file, file_name="test.toml")
        self.history = History()
        self.admission = Admission(config.http.max_pending)
        self.lock = DeviceLock(self.lock_path)
        self.handoffs = Handoffs(
            config,
            supervisor,
            self.admission,
            place.slots,
            self.lock,
            place.guard,
            self.history,
            {"PATH": os.environ["PATH"], "STATE_DIRECTORY": str(place.path / "state")},
        )

    def mode(self, mode: str) -> None:
        """Set what the provider does from its next run on."""
        self._mode.write_text(mode)

    @contextlib.asynccontextmanager
    async def exchange(
        self,
        prompt: object = PROMPT,
        *,
        policy: Policy | None = None,
        path: str = COMPLETIONS,
        gone: Callable[[], bool] = lambda: False,
        by_operator: bool = False,
        **more: Any,
    ) -> AsyncIterator[Any]:
        """Begin a request and forward it; yields (exchange, reply)."""
        field: dict[str, Any] = {"prompt": prompt} if path == COMPLETIONS else {"messages": prompt}
        body = json.dumps({**field, "max_tokens": 5, **more}).encode()
        parsed = request.parse(path, body)
        self.handoffs.breaker.reset()  # one fault after the other is what many tests are about
        async with self.handoffs.exchange(
            path, parsed, policy, "r1", gone, lambda: by_operator
        ) as exchange:
            headers = [(b"host", b"x"), (b"content-type", b"application/json")]
            yield exchange, await exchange.open(b"POST", path.encode(), headers, body)

    async def ask(self, prompt: object = PROMPT, **how: Any) -> Asked:
        """Send a request and read its reply to the end."""
        data = b""
        with trio.fail_after(30):
            async with self.exchange(prompt, **how) as (exchange, reply):
                headers = dict(exchange.reply_headers())
                while piece := await reply.read():
                    exchange.observe(piece)
                    data += piece
        return Asked(self.last(), reply.status, data, headers)

    async def refused(self, prompt: object = PROMPT, **how: Any) -> RequestError:
        """Send a request that must end in an error of ours."""
        with trio.fail_after(30), pytest.raises(RequestError) as caught:
            await self.ask(prompt, **how)
        return caught.value

    def last(self) -> dict[str, Any]:
        """Return the last record."""
        return self.history.recent(HandoffFilter(limit=1))[0]

    def provider_runs(self) -> list[dict[str, Any]]:
        """Return what each provider run wrote at its start."""
        if not self.runs.exists():
            return []
        return [json.loads(line) for line in self.runs.read_text().splitlines()]

    def decoder_targets(self) -> list[str]:
        """Return the targets of the requests since the decoder was ready."""
        lines = (self.place.path / "requests").read_text().splitlines()
        targets = [json.loads(line)["target"] for line in lines]
        erased = targets.index("/slots/0?action=erase")
        return targets[erased + 1 :]

    def provider_state(self) -> str:
        """Read it out of the type checker's sight: it takes a property for a constant."""
        return self.handoffs.provider_state

    def nothing_is_left(self) -> bool:
        """Say whether slot, line, files and lock are as before."""
        return (
            os.listdir(self.place.slots.path) == ["example.state"]
            and self.admission.holder is None
            and not self.lock.held
            and self.handoffs.provider_state in ("idle", "none")
        )


@pytest.fixture
def place() -> Iterator[Home]:
    with home() as made:
        yield made


@contextlib.asynccontextmanager
async def rigged(place: Home, *args: str, **settings: Any) -> AsyncIterator[Rig]:
    """Run decoder and pipeline."""
    supervisor = place.supervisor(place.launch(*args))
    async with running(supervisor), trio.open_nursery() as nursery:
        rig = Rig(place, supervisor, settings)
        await nursery.start(rig.handoffs.runs.run)
        yield rig
        nursery.cancel_scope.cancel()


def assert_in_order(record: dict[str, Any]) -> None:
    """The moments of a record agree with its times: nothing begins before its turn."""
    reached = 0.0
    if "provider_at_ms" in record:
        assert record["provider_at_ms"] >= record["lock_ms"]
        reached = record["provider_at_ms"] + record["provider_wall_ms"]
        assert record["handed_at_ms"] >= round(reached + record["check_ms"], 3) - 0.003
        reached = record["handed_at_ms"]
    assert record["first_byte_ms"] >= reached
    assert record["total_ms"] >= record["first_byte_ms"]


async def test_exchange_prompt_is_handed_over_and_the_decoder_evaluates_one_token(
    place: Home,
) -> None:
    """The same text as without, all fields told, and nothing left behind."""
    async with rigged(place) as rig:
        reference = await rig.ask("another prompt first", policy=Policy.NEVER)
        reference = await rig.ask(policy=Policy.NEVER)
        await rig.ask("something else between", policy=Policy.NEVER)
        asked = await rig.ask()
        assert (asked.status, asked.end) == (200, ("used", None))
        assert asked.text == reference.text
        record = asked.record
        counts = {name: record[name] for name in record if name.endswith("_tokens")}
        assert counts == {
            "prompt_tokens": TOKENS,
            "handed_tokens": TOKENS - 1,
            "cached_tokens": TOKENS - 1,
            "evaluated_tokens": 1,
            "reply_tokens": record["reply_tokens"],
        }
        assert (record["reply_tokens"] > 0, record["decode_ms"] > 0) == (True, True)
        assert_in_order(record)
        assert record["route"] == "file"
        assert record["prefill_ms"] == 88.1
        assert record["provider"].endswith("provider.py")
        assert record["state_bytes"] > 0
        assert (record["request_id"], record["instance"], record["path"]) == (
            "r1",
            "test",
            COMPLETIONS,
        )
        for name in (
            "queue",
            "tokenize",
            "lock",
            "provider_wall",
            "check",
            "restore",
            "first_byte",
        ):
            assert record[f"{name}_ms"] >= 0, name
        assert "template_ms" not in record
        assert asked.headers[b"x-request-id"] == b"r1"
        assert asked.headers[b"x-onebit-handoff"] == b"file"
        assert b"x-onebit-reason" not in asked.headers
        timing = asked.headers[b"server-timing"]
        assert [part.partition(b";")[0] for part in timing.split(b", ")] == [
            b"queue",
            b"tokenize",
            b"lock",
            b"prefill",
            b"provider",
            b"check",
            b"restore",
        ]
        assert rig.nothing_is_left()


async def test_exchange_state_file_is_checked_while_its_provider_closes_down(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The provider waits for the check, as for a device that takes its time; nothing is read twice.

    Without an early check it waits until its time is up.
    """
    real, checked = state_check.plan, []

    def plan(*args: object, **more: object) -> object:
        checked.append(args)
        (place.path / "checked").touch()
        return real(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(state_check, "plan", plan)
    async with rigged(place) as rig:
        rig.mode(f"linger:{place.path}/checked")
        asked = await rig.ask()
        assert asked.end == ("used", None)
        assert rig.nothing_is_left()
    assert len(checked) == 1


async def test_exchange_provider_gets_the_ids_less_the_last_and_the_lock_held_for_it(
    place: Home,
) -> None:
    """The contract: ids, environment, the lock held while it runs and free right after."""
    async with rigged(place) as rig:
        await rig.ask("abc")
        [run] = rig.provider_runs()
        assert run["ids"] == [3 + byte for byte in b"ab"]
        assert run["no_device_lock"] == "1"
        assert run["lock_held"] is True
        assert run["pid"] == run["pgid"]
        assert rig.nothing_is_left()


async def test_exchange_chat_is_templated_by_the_decoder(place: Home) -> None:
    """Template, tokenize, restore, reply: four requests to the decoder."""
    async with rigged(place) as rig:
        asked = await rig.ask([{"role": "user", "content": "hi"}], path=CHAT)
        assert asked.end == ("used", None)
        assert asked.record["template_ms"] >= 0
        assert rig.decoder_targets() == [
            "/apply-template",
            "/tokenize",
            "/slots/0?action=restore",
            CHAT,
        ]


async def test_exchange_stream_is_used_too_and_its_first_byte_is_timed(place: Home) -> None:
    """The counts are in the last event."""
    async with rigged(place) as rig:
        asked = await rig.ask(stream=True)
        assert asked.end == ("used", None)
        assert asked.record["stream"] is True
        assert asked.record["first_byte_ms"] > 0


class WatchedTelemetry(Telemetry):
    """Writes down what a request tells its watch."""

    def __init__(self) -> None:
        super().__init__(DeviceReader(Path("/nonexistent")))
        self.told: list[str] = []

    def watch(self) -> Watch:
        told = self.told

        class Told(Watch):
            def first_byte(self) -> None:
                told.append("first byte")

            def end(self) -> float | None:
                told.append("end")
                return 42.0

        told.append("begin")
        return Told(set())


async def test_exchange_has_its_devices_watched_from_its_start_to_its_end(place: Home) -> None:
    """The reply's first byte once, and the end whatever that is; the figure is in the record."""
    async with rigged(place) as rig:
        telemetry = rig.handoffs.telemetry = WatchedTelemetry()
        assert (await rig.ask(stream=True)).record["gpu_busy_percent"] == 42.0
        assert telemetry.told == ["begin", "first byte", "end"]
        telemetry.told.clear()
        rig.mode("exit:3")
        await rig.refused(policy=Policy.STRICT)
        assert rig.last()["gpu_busy_percent"] == 42.0
        assert telemetry.told == ["begin", "end"]


async def test_exchange_prompt_of_ids_is_not_tokenized(place: Home) -> None:
    """The ids are there already."""
    async with rigged(place) as rig:
        assert (await rig.ask([10, 11, 12])).end == ("used", None)
        assert rig.decoder_targets() == ["/slots/0?action=restore", COMPLETIONS]


@pytest.mark.parametrize(
    ("prompt", "how", "reason"),
    [
        (PROMPT, {"policy": Policy.NEVER}, "policy"),
        ("x", {}, "too_short"),
        (["two", "prompts"], {}, "not_text"),
        (PROMPT, {"cache_prompt": False}, "not_text"),
    ],
)
async def test_exchange_prompt_that_is_not_handed_off_is_served_as_ever(
    place: Home, prompt: object, how: dict[str, Any], reason: str
) -> None:
    """No provider run, no lock; the header says why."""
    async with rigged(place) as rig:
        asked = await rig.ask(prompt, **how)
        assert (asked.status, asked.end) == (200, ("skipped", reason))
        assert asked.headers[b"x-onebit-handoff"] == b"skipped"
        assert asked.headers[b"x-onebit-reason"] == reason.encode()
        assert rig.provider_runs() == []
        assert not rig.lock_path.exists()
        assert "restore" not in str(rig.decoder_targets())


@pytest.mark.parametrize("policy", [None, Policy.STRICT])
async def test_exchange_prompt_too_long_gets_the_decoders_own_refusal(
    place: Home, policy: Policy | None
) -> None:
    """Its 400 with its words, strict or not, and no provider runs for it."""
    async with rigged(place) as rig:
        asked = await rig.ask("x" * 3000, policy=policy)
        assert (asked.status, asked.end) == (400, ("skipped", "too_long"))
        assert b"exceeds the available context size" in asked.body
        assert rig.provider_runs() == []


async def test_exchange_body_the_decoder_refuses_gets_the_decoders_own_refusal(
    place: Home,
) -> None:
    """A chat that cannot be templated is refused once more, by the reply itself."""
    async with rigged(place) as rig:
        asked = await rig.ask("no list", path=CHAT)
        assert (asked.status, asked.end) == (400, ("skipped", "not_text"))
        asked = await rig.ask([2**30, 1])
        assert asked.status == 400
        assert rig.nothing_is_left()


FAULTS = [
    ("exit:3", "provider_exit"),
    ("crash", "provider_exit"),
    ("no_file", "provider_no_file"),
    ("empty", "bad_state"),
    ("half", "bad_state"),
    ("trailing", "bad_state"),
    ("wrong_tokens", "bad_state"),
    ("whole_prompt", "bad_state"),
    ("wrong_version", "bad_state"),
    ("shifted", "bad_state"),
    ("nan", "bad_state"),
    ("symlink", "bad_state"),
    ("fifo", "bad_state"),
    ("grandchild_holds_file", "bad_state"),
]


async def test_exchange_every_fault_of_the_provider_falls_back_to_the_decoder(
    place: Home,
) -> None:
    """The same text as without a provider, the reason told, and nothing left behind."""
    async with rigged(place) as rig:
        reference = (await rig.ask(policy=Policy.NEVER)).text
        for mode, reason in FAULTS:
            rig.mode(mode)
            asked = await rig.ask()
            assert (mode, asked.end) == (mode, ("fallback", reason))
            assert (asked.status, asked.text) == (200, reference), mode
            assert asked.headers[b"x-onebit-handoff"] == b"fallback"
            assert asked.headers[b"x-onebit-reason"] == reason.encode()
            assert rig.nothing_is_left(), mode
        assert "no XDNA device" in str(rig.history.recent())
        assert "restore" not in str(rig.decoder_targets()), "none of them reached the decoder"


async def test_exchange_provider_that_takes_too_long_falls_back_to_the_decoder(place: Home) -> None:
    """provider.timeout_s is named; it is gone before the reply."""
    async with rigged(place, provider={"timeout_s": 0.5}) as rig:
        rig.mode("hang")
        asked = await rig.ask()
        assert (asked.status, asked.end) == (200, ("fallback", "provider_timeout"))
        assert "no result within 0.5 s (provider.timeout_s)" in asked.record["detail"]
        assert rig.nothing_is_left()


@pytest.mark.parametrize(
    ("mode", "knob", "reason"),
    [
        ("nan", None, "bad_state"),
        ("ok", "--restore-refuse", "restore_refused"),
        ("ok", "--restore-short", "restore_short"),
    ],
)
async def test_exchange_refused_state_is_kept_when_asked_for(
    place: Home, mode: str, knob: str | None, reason: str
) -> None:
    """With its ids and the sentence of the record; and not what was never refused."""
    async with rigged(place, handoff={"keep_bad_states": 1}) as rig:
        kept = rig.handoffs.bad_states.directory = place.path / "bad-states"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.handoffs.bad_states.run)
            assert (await rig.ask()).end == ("used", None)
            assert not kept.exists()
            rig.mode(mode)
            if knob is not None:
                place.turn(knob)
            asked = await rig.ask()
            assert asked.end == ("fallback", reason)
            with trio.fail_after(20):
                while not any(path.read_text() for path in kept.glob("*.txt")):
                    await trio.sleep(0.002)
            nursery.cancel_scope.cancel()
        ids, state, text = sorted(kept.iterdir())
        assert text.name.endswith("-r1.txt")
        assert text.read_text() == f"{reason}: {asked.record['detail']}\n"
        assert len(ids.read_text().split()) == asked.record["prompt_tokens"] - 1
        assert state.read_bytes().startswith(b"qsgg")
        assert rig.nothing_is_left()


@pytest.mark.parametrize("how", ["strict", "on_failure"])
async def test_exchange_failed_handoff_is_502_when_asked_for(place: Home, how: str) -> None:
    """By the request's policy or by the configuration: the error says reason and detail."""
    settings = {"handoff": {"on_failure": "error"}} if how == "on_failure" else {}
    policy = Policy.STRICT if how == "strict" else None
    async with rigged(place, **settings) as rig:
        assert (await rig.ask(policy=policy)).end == ("used", None)
        rig.mode("exit:3")
        error = await rig.refused(policy=policy)
        assert (error.status, error.kind, error.reason) == (502, "handoff_error", "provider_exit")
        assert "status 3: no XDNA device" in error.message
        assert (rig.last()["outcome"], rig.last()["reason"]) == ("failed", "provider_exit")
        assert rig.nothing_is_left()


async def test_exchange_skipped_handoff_is_502_only_when_strict(place: Home) -> None:
    """Strict means: handed off, or an error."""
    async with rigged(place, handoff={"on_failure": "error"}) as rig:
        assert (await rig.ask("x")).end == ("skipped", "too_short")
        error = await rig.refused("x", policy=Policy.STRICT)
        assert (error.status, error.reason) == (502, "too_short")


@pytest.mark.parametrize(
    ("knob", "reason"),
    [
        ("--restore-refuse", "restore_refused"),
        ("--restore-short", "restore_short"),
        ("--reply-500-after-restore", "bad_state"),
    ],
)
async def test_exchange_restore_that_goes_wrong_empties_the_slot_and_falls_back(
    place: Home, knob: str, reason: str
) -> None:
    """Erased before anything is decoded from it; the client gets a right text and 200."""
    async with rigged(place) as rig:
        reference = (await rig.ask(policy=Policy.NEVER)).text
        place.turn(knob)
        asked = await rig.ask()
        assert (asked.status, asked.end) == (200, ("fallback", reason))
        assert asked.text == reference
        targets = rig.decoder_targets()
        assert targets.index("/slots/0?action=erase") > targets.index("/slots/0?action=restore")
        assert targets[-1] == COMPLETIONS
        assert rig.supervisor.restarts == 0
        assert rig.nothing_is_left()


@pytest.mark.parametrize(
    "sections", [[Kv(v_trans=1)], [Kv(), Recr()]], ids=["v_trans", "recurrent"]
)
async def test_make_safe_layout_that_an_erase_does_not_heal_restarts_the_decoder(
    place: Home, sections: Sequence[Kv | Recr]
) -> None:
    """What is not a number stays behind an erase there: a new decoder starts clean."""
    layout = state_file.learn_layout(build([1, 2, 3], sections), [1, 2, 3])
    async with rigged(place) as rig:
        facts = rig.supervisor.facts
        assert facts is not None
        await rig.handoffs.make_safe(dataclasses.replace(facts, layout=layout), "a test")
        with trio.fail_after(30):
            await rig.supervisor.wait_restarted(facts.generation)
        assert rig.supervisor.last_exit is not None
        assert "cannot be trusted: a test" in rig.supervisor.last_exit.reason
        assert (await rig.ask()).end == ("used", None)


async def test_exchange_restore_without_an_answer_replaces_the_decoder(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows what its slot holds: killed; the new one serves the request."""
    monkeypatch.setattr(llama_server, "SLOT_TIMEOUT_S", 1.0)
    async with rigged(place, "--hang-on", "restore:1") as rig:
        asked = await rig.ask()
        assert (asked.status, asked.end) == (200, ("fallback", "backend_down"))
        assert rig.supervisor.restarts == 1
        assert rig.supervisor.last_exit is not None
        assert "did not answer a restore" in rig.supervisor.last_exit.reason
        assert rig.nothing_is_left()


@pytest.mark.parametrize("what", ["tokenize", "restore", "completion", "token"])
async def test_exchange_decoder_that_dies_once_is_replaced_under_the_request(
    place: Home, what: str
) -> None:
    """Before the client saw a byte: one new decoder serves it, from scratch."""
    async with rigged(place) as rig:
        reference = (await rig.ask(policy=Policy.NEVER)).text
        place.turn("--crash-on", f"{what}:1")
        asked = await rig.ask()
        assert (asked.status, asked.text) == (200, reference)
        assert asked.end == ("fallback", "backend_down")
        # What was done for the decoder that is gone was done all the same, and once.
        assert ("provider_at_ms" in asked.record) == (what != "tokenize")
        assert_in_order(asked.record)
        assert asked.record["evaluated_tokens"] > 1
        assert asked.record["reply_tokens"] > 0
        assert rig.supervisor.restarts == 1
        assert rig.nothing_is_left()


async def test_exchange_prompt_that_kills_every_decoder_is_given_up(place: Home) -> None:
    """Two tries, then 503: it must not take restart_max with it."""
    async with rigged(place) as rig:
        place.turn("--crash-on", "token")
        error = await rig.refused()
        assert (error.status, error.reason) == (503, "backend_down")
        assert error.retry_after_s is not None
        record = rig.last()
        assert (record["outcome"], record["reason"]) == ("failed", "backend_down")
        assert record["total_ms"] > record["handed_at_ms"]
        assert {"first_byte_ms", "reply_tokens", "decode_ms"} & set(record) == set()
        assert rig.nothing_is_left()


async def test_reopen_stream_that_broke_before_its_first_event_is_sent_by_a_new_decoder(
    place: Home,
) -> None:
    """Its head had come, nothing else: the handoff is lost, the request is not."""
    async with rigged(place, "--prefill-delay-per-token", "0.1") as rig:
        async with rig.exchange("abc", stream=True) as (exchange, reply):
            assert rig.supervisor.pid is not None
            os.kill(rig.supervisor.pid, signal.SIGKILL)
            with pytest.raises(BackendError) as caught:
                await reply.read()
            with trio.fail_after(30):
                reply = await exchange.reopen(caught.value)
                data = b""
                while piece := await reply.read():
                    exchange.observe(piece)
                    data += piece
        assert data.endswith(b"data: [DONE]\n\n")
        assert (rig.last()["outcome"], rig.last()["reason"]) == ("fallback", "backend_down")
        assert rig.nothing_is_left()


async def test_reopen_decoder_that_lives_and_hangs_up_is_502(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same decoder would do it again."""
    monkeypatch.setattr(supervisor_module, "_NOTICE_S", 0.05)
    async with rigged(place) as rig:
        place.turn("--truncate-stream", "0")

        async def ask() -> None:
            async with rig.exchange(stream=True) as (exchange, reply):
                with pytest.raises(BackendError) as broken:
                    await reply.read()
                await exchange.reopen(broken.value)

        with pytest.raises(RequestError, match="hung up") as caught:
            await ask()
        assert caught.value.status == 502
        assert (rig.last()["outcome"], rig.last()["reason"]) == ("failed", "backend_down")


async def test_exchange_handoff_the_decoder_made_no_use_of_is_wasted(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the decoder's own counts make a handoff used."""
    lose_what_is_restored(monkeypatch)
    async with rigged(place) as rig:
        asked = await rig.ask()
        assert (asked.status, asked.end) == (200, ("wasted", None))
        assert asked.record["evaluated_tokens"] == TOKENS


@pytest.mark.parametrize(
    ("gone", "by_operator", "reason"),
    [
        (True, False, "client_gone"),
        (False, True, "operator"),
        (True, True, "operator"),
        (False, False, "draining"),
    ],
)
async def test_exchange_cancelled_during_the_prefill_leaves_nothing(
    place: Home, gone: bool, by_operator: bool, reason: str
) -> None:
    """The provider is killed, lock and slot are free; the record says who gave up and where."""
    async with rigged(place) as rig:
        rig.mode("hang")
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                async with rig.exchange(gone=lambda: gone, by_operator=by_operator):
                    pass

            nursery.start_soon(ask)
            while not rig.provider_runs():
                await trio.sleep(0.005)
            [run] = rig.provider_runs()
            holder = rig.admission.holder
            assert holder is not None
            assert (holder.phase, rig.handoffs.provider_state) == ("prefill", "running")
            nursery.cancel_scope.cancel()
        assert not is_alive(run["pid"])
        assert (rig.last()["outcome"], rig.last()["reason"]) == ("cancelled", reason)
        if by_operator:
            assert rig.last()["detail"] == "the operator cancelled it in phase prefill"
        elif gone:
            assert rig.last()["detail"] == "the client left in phase prefill"
        assert rig.nothing_is_left()


async def test_exchange_cancelled_during_the_reply_closes_its_connection(place: Home) -> None:
    """The decoder notices, the slot is free, the record says cancelled."""
    async with rigged(place, "--token-delay", "0.05") as rig:
        with trio.move_on_after(10) as scope:
            async with rig.exchange(gone=lambda: True, stream=True, max_tokens=500) as (_, reply):
                await reply.read()
                scope.cancel()
                await reply.read()
        assert rig.last()["outcome"] == "cancelled"
        assert rig.last()["detail"] == "the client left in phase decode"
        assert rig.nothing_is_left()
        assert (await rig.ask()).end == ("used", None)


async def test_exchange_next_in_line_prefills_while_the_first_decodes(place: Home) -> None:
    """The overlap that two devices are for; the third waits without a run."""
    async with rigged(place, "--token-delay", "0.02") as rig, trio.open_nursery() as nursery:
        ended: list[str] = []

        async def ask(prompt: str) -> None:
            asked = await rig.ask(prompt)
            ended.append(prompt)
            assert asked.end == ("used", None)

        async with rig.exchange("first", stream=True, max_tokens=1000) as (_, reply):
            await reply.read()
            nursery.start_soon(ask, "second")
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(ask, "third!")
            while not any(name.startswith("state-") for name in os.listdir(place.slots.path)):
                await trio.sleep(0.005)
            await trio.sleep(0.1)
            assert len(rig.provider_runs()) == 2, "the third in line must not prefill yet"
            assert rig.admission.pending == 2
        while len(ended) < 2:
            await trio.sleep(0.005)
        assert ended == ["second", "third!"]
        assert [bytes(id_ - 3 for id_ in run["ids"]) for run in rig.provider_runs()] == [
            b"firs",
            b"secon",
            b"third",
        ]


async def test_exchange_lock_held_by_another_process_falls_back(place: Home) -> None:
    """lock.wait_s later the decoder prefills by itself, and no provider ran."""
    async with rigged(place) as rig:
        descriptor = os.open(rig.lock_path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            asked = await rig.ask()
        finally:
            os.close(descriptor)
        assert asked.end == ("fallback", "lock_busy")
        assert asked.record["lock_ms"] >= 200
        assert rig.provider_runs() == []
        assert (await rig.ask()).end == ("used", None)


async def test_handoffs_lifetime_lock_is_held_between_runs_and_given_back_at_the_end(
    place: Home,
) -> None:
    """lock.hold = "lifetime": nobody gets it while the daemon runs."""
    async with rigged(place, lock={"hold": "lifetime"}) as rig:
        assert lock_is_held(rig.lock_path)
        assert (await rig.ask()).end == ("used", None)
        assert rig.provider_runs()[0]["no_device_lock"] == "1"
        assert lock_is_held(rig.lock_path)
    assert not lock_is_held(rig.lock_path)


def changed(rig: Rig, **lock: Any) -> None:
    """Reconfigure the pipeline with other lock settings."""
    config = rig.handoffs.config
    config = dataclasses.replace(config, lock=dataclasses.replace(config.lock, **lock))
    if config.lock.path != rig.lock.path:
        rig.lock = DeviceLock(config.lock.path)
    rig.handoffs.reconfigure(config, rig.lock)


async def test_reconfigure_lock_for_life_is_taken_and_given_back(place: Home) -> None:
    """With nothing on, both take effect before the call is over."""
    async with rigged(place) as rig:
        runs = rig.handoffs.runs
        assert await runs.hold_for_life(0) is None
        assert not rig.lock_path.exists()
        changed(rig, hold="lifetime")
        assert await runs.hold_for_life(0) is None
        assert lock_is_held(rig.lock_path)
        other = place.path / "other.lock"
        changed(rig, path=str(other))
        assert not lock_is_held(rig.lock_path)
        assert await runs.hold_for_life(0) is None
        assert (await rig.ask()).end == ("used", None)
        assert lock_is_held(other)
        changed(rig, hold="handoff")
        assert not lock_is_held(other)
        assert (await rig.ask()).end == ("used", None)
        assert not lock_is_held(other)


async def test_reconfigure_during_a_run_leaves_it_its_lock(place: Home) -> None:
    """What is on keeps the device, under the name that it took it by, and frees that at its end."""
    other = place.path / "other.lock"
    async with rigged(place) as rig, trio.open_nursery() as nursery:
        rig.mode("sleep:1")
        nursery.start_soon(rig.ask)
        while rig.provider_state() != "running":
            await trio.sleep(0.01)
        changed(rig, path=str(other), hold="lifetime")
        why_not = await rig.handoffs.runs.hold_for_life(0.01)
        assert why_not is not None
        assert "a provider run is on" in why_not.detail
        assert lock_is_held(rig.lock_path)
        assert not other.exists()
        assert await rig.handoffs.runs.hold_for_life(30) is None
        assert (lock_is_held(rig.lock_path), lock_is_held(other)) == (False, True)
        changed(rig, hold="handoff")
        assert not lock_is_held(other)


async def test_reconfigure_during_a_run_with_the_same_lock_keeps_or_frees_it_at_its_end(
    place: Home,
) -> None:
    """Whether it is held for life is decided by what is configured when the run ends."""
    async with rigged(place) as rig:
        for hold in ("lifetime", "handoff"):
            rig.mode("sleep:0.5")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(rig.ask)
                while rig.provider_state() != "running":
                    await trio.sleep(0.01)
                changed(rig, hold=hold)
                assert await rig.handoffs.runs.hold_for_life(0) is None
                assert lock_is_held(rig.lock_path)
            assert lock_is_held(rig.lock_path) is (hold == "lifetime")


async def test_reconfigure_exchange_keeps_the_settings_that_it_began_with(place: Home) -> None:
    """Provider and meaning of a failure are of one piece for each request."""
    async with rigged(place, handoff={"on_failure": "error"}) as rig:
        config = rig.handoffs.config
        parsed = request.parse(COMPLETIONS, json.dumps({"prompt": PROMPT}).encode())
        exchange = rig.handoffs.exchange(COMPLETIONS, parsed, None, "r1", lambda: False)
        plain = dataclasses.replace(
            config,
            provider=dataclasses.replace(config.provider, program=None),
            handoff=dataclasses.replace(config.handoff, on_failure="fallback"),
        )
        rig.handoffs.reconfigure(plain, rig.lock)
        rig.mode("exit:3")
        with pytest.raises(RequestError, match="provider_exit"):
            async with exchange:
                await exchange.open(b"POST", COMPLETIONS.encode(), [], b'{"prompt": "x"}')
        assert (await rig.ask()).end == ("skipped", "no_provider")


def lock_is_held(path: Path) -> bool:
    """Say whether somebody has the flock: another open file of ours is like another process."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


async def test_handoffs_provider_that_cannot_be_killed_keeps_the_lock_until_it_is_gone(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may still use the device: no new run, no lock for others; requests are served."""
    real = Child.signal
    for name in ("_TERM_GRACE_S", "_KILL_GRACE_S"):
        monkeypatch.setattr(provider_process, name, 0.05)
    async with rigged(place, provider={"timeout_s": 2}) as rig:
        rig.mode("hang")
        with monkeypatch.context() as patch:
            patch.setattr(Child, "signal", lambda child, number: None)
            asked = await rig.ask()
            assert asked.end == ("fallback", "provider_timeout")
            assert "cannot be killed" in asked.record["detail"]
        assert rig.provider_state() == "stuck"
        assert lock_is_held(rig.lock_path)
        rig.mode("ok")
        asked = await rig.ask()
        assert (asked.status, asked.end) == (200, ("skipped", "breaker_open"))
        assert "cannot be killed" in asked.record["detail"]
        [run] = rig.provider_runs()
        os.killpg(run["pid"], signal.SIGKILL)
        with trio.fail_after(30):
            while rig.provider_state() == "stuck":
                await trio.sleep(0.005)
        assert not lock_is_held(rig.lock_path)
        assert (await rig.ask()).end == ("used", None)
    assert Child.signal is real


@pytest.mark.parametrize("why", ["queue_full", "draining"])
async def test_exchange_that_finds_no_place_in_the_line_is_recorded_as_failed(
    place: Home, why: str
) -> None:
    """503 with Retry-After, and the reason in the record."""
    async with rigged(place, http={"max_pending": 1}) as rig:
        tickets = [rig.admission.enter(name) for name in "ab"]
        if why == "draining":
            rig.admission.close()
        error = await rig.refused()
        assert (error.status, error.reason) == (503, why)
        assert (rig.last()["outcome"], rig.last()["reason"]) == ("failed", why)
        for ticket in tickets:
            ticket.leave()


async def test_exchange_no_room_for_the_state_falls_back(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """no_space, before any provider runs."""
    async with rigged(place) as rig:
        monkeypatch.setattr(Layout, "bytes_for", lambda layout, count: 1 << 60)
        assert (await rig.ask()).end == ("fallback", "no_space")
        assert rig.provider_runs() == []
        assert rig.nothing_is_left()


async def wait_for_event(logs: Sequence[Any], event: str) -> Any:
    """Wait until a line with this event has been logged; return it."""
    with trio.fail_after(30):
        while True:
            for entry in list(logs):
                if entry["event"] == event:
                    return entry
            await trio.sleep(0.005)


async def test_lifetime_lock_file_replaced_is_noticed_without_any_request(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file is locked: until then the next comer would have had the device as well."""
    monkeypatch.setattr(provider_runs, "_LOCK_CHECK_S", 0.02)
    with structlog.testing.capture_logs() as logs:
        async with rigged(place, lock={"hold": "lifetime"}) as rig:
            await trio.sleep(0.1)
            assert [entry for entry in logs if entry["event"].startswith("lock_")] == []
            rig.lock_path.unlink()
            rig.lock_path.touch(mode=0o660)
            entry = await wait_for_event(logs, "lock_taken")
            assert lock_is_held(rig.lock_path)
            assert rig.lock_path.read_text().startswith("onebitd pid=")
            assert (await rig.ask()).end == ("used", None)
        assert not lock_is_held(rig.lock_path)
    lost = [entry for entry in logs if entry["event"] == "lock_lost"]
    assert [entry["line"] for entry in lost] == [
        f"{rig.lock_path} was replaced; taking the new one"
    ]
    assert entry["log_level"] == "info"


async def test_lifetime_lock_lost_to_another_process_is_told_once_and_tried_again(
    place: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests fall back meanwhile; the lock is had as soon as the other one lets go."""
    monkeypatch.setattr(provider_runs, "_LOCK_CHECK_S", 0.02)
    with structlog.testing.capture_logs() as logs:
        async with rigged(place, lock={"hold": "lifetime"}) as rig:
            rig.lock_path.unlink()
            with rig.lock_path.open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                await wait_for_event(logs, "lock_not_taken")
                assert (await rig.ask()).end == ("fallback", "lock_busy")
                await trio.sleep(0.1)
            await wait_for_event(logs, "lock_taken")
            assert lock_is_held(rig.lock_path)
    events = [entry["event"] for entry in logs if entry["event"].startswith("lock_")]
    assert events == ["lock_lost", "lock_not_taken", "lock_taken"]


async def test_lifetime_lock_not_had_at_the_start_no_run_without_it(place: Home) -> None:
    """Every run that takes place has the lock and is told so; without it there is none."""
    with place.path.joinpath("npu.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        async with rigged(place, lock={"hold": "lifetime"}) as rig:
            assert (await rig.ask()).end == ("fallback", "lock_busy")
            assert rig.provider_runs() == []
            fcntl.flock(file, fcntl.LOCK_UN)
            assert (await rig.ask()).end == ("used", None)
            [run] = rig.provider_runs()
            assert (run["no_device_lock"], run["lock_held"]) == ("1", True)
            assert lock_is_held(rig.lock_path)


@pytest.mark.parametrize("hold", ["handoff", "lifetime"])
async def test_run_start_clears_the_line_of_a_dead_owner_and_says_so(
    place: Home, hold: str
) -> None:
    """What a crash left in the lock file is gone with the next start, not with the next prompt."""
    gone = await trio.lowlevel.open_process(["true"])
    await gone.wait()
    path = place.path / "npu.lock"
    path.write_text(f"onebitd pid={gone.pid} start=x\n")
    with structlog.testing.capture_logs() as logs:
        async with rigged(place, lock={"hold": hold}):
            assert f"pid={gone.pid} " not in path.read_text()
    [entry] = [entry for entry in logs if entry["event"] == "lock_line_cleared"]
    assert entry["log_level"] == "info"
    assert entry["owner_line"] == f"onebitd pid={gone.pid} start=x"
