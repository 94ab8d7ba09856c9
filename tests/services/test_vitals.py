"""The decoder's vital signs over a made-up decoder; hours pass in milliseconds."""

# ruff: noqa: ASYNC110 - on a clock that jumps

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import structlog
import trio
import trio.testing

from onebitd.adapters.calls import Call, Calls
from onebitd.adapters.llama_server import LlamaServer
from onebitd.core.errors import (
    BackendError,
    BackendGone,
    BackendRefused,
    BackendTimeout,
)
from onebitd.core.vitals import Progress
from onebitd.services.admission import Admission
from onebitd.services.supervisor import BackendFacts, Supervisor
from onebitd.services.vitals import Vitals

ANSWERS_500 = BackendRefused(500, "Invalid input batch.")


class FakeServer:
    """A decoder's answers; `probes` are the errors of the next ones, None for a good one."""

    def __init__(self, decoder: FakeDecoder) -> None:
        self._decoder = decoder
        self.probes: list[BackendError | None] = []
        self.probed: list[float] = []
        self.health: BackendError | None = None
        self.health_asked = 0

    async def fill_slot(self, tokens: list[int]) -> None:
        """Answer a probe."""
        assert len(tokens) == 1
        assert self._decoder.slot_is_ours()
        self.probed.append(trio.current_time())
        await trio.sleep(0.01)
        error = self.probes.pop(0) if self.probes else None
        if error is not None:
            raise error

    async def is_ready(self) -> bool:
        """Answer for /health."""
        self.health_asked += 1
        await trio.lowlevel.checkpoint()
        if self.health is not None:
            raise self.health
        return True


class FakeDecoder:
    """What Vitals sees of a supervisor, with knobs."""

    def __init__(self) -> None:
        self.calls = Calls()
        self.admission = Admission(64)
        self.killed: list[str] = []
        self.forgotten = 0
        self.progress: Progress | None = Progress({1: 1.0}, {}, {})
        self.reads = 0
        self.works = False
        self.pid = 1
        self.generation = 0
        self.facts: BackendFacts | None = None
        self._ready = trio.Event()
        self.start()

    def start(self) -> None:
        """Have a new decoder."""
        self.server = FakeServer(self)
        server = cast("LlamaServer", self.server)
        self.facts = BackendFacts(server, self.generation, 2048, None, None, None)
        self.generation += 1
        self._ready.set()

    def kill(self, reason: str) -> None:
        """See Supervisor."""
        self.killed.append(reason)
        self.facts = None
        self._ready = trio.Event()

    async def kill_unless_gone(
        self, facts: BackendFacts, reason: str, *, its_own_fault: bool
    ) -> None:
        """See Supervisor."""
        assert its_own_fault
        if self.facts is facts:
            self.kill(reason)

    async def wait_ready(self) -> BackendFacts:
        """See Supervisor."""
        await self._ready.wait()
        assert self.facts is not None
        return self.facts

    async def read(self, pid: int) -> Progress | None:
        """Return how far the process is."""
        assert pid == self.pid
        self.reads += 1
        if self.works and self.progress is not None:
            self.progress = Progress({1: self.progress.cpu_s[1] + 1}, {}, {})
        return self.progress

    def forget(self) -> None:
        """Count."""
        self.forgotten += 1

    def slot_is_ours(self) -> bool:
        """Say whether a probe may have the slot."""
        return self.admission.loan is not None or self.admission.holder is not None


class Place:
    """Vitals on a made-up decoder."""

    def __init__(self, hang_s: float) -> None:
        self.decoder = FakeDecoder()
        self.admission = self.decoder.admission
        self.vitals = Vitals(
            cast("Supervisor", self.decoder),
            self.admission,
            self.decoder.forget,
            hang_s,
            self.decoder.read,
        )

    @property
    def facts(self) -> BackendFacts:
        """Of the decoder that runs."""
        assert self.decoder.facts is not None
        return self.decoder.facts

    def fail(self, times: int = 1, status: int = 500) -> None:
        """Have so many requests answered with an error."""
        for _ in range(times):
            self.vitals.note_status(self.facts, status)


@contextlib.asynccontextmanager
async def watched(hang_s: float = 120.0) -> AsyncIterator[Place]:
    """Run it."""
    place = Place(hang_s)
    async with trio.open_nursery() as nursery:
        await nursery.start(place.vitals.run)
        yield place
        nursery.cancel_scope.cancel()


# --- errors in a row ------------------------------------------------------------------------


async def test_vitals_error_of_a_decoder_that_is_well_costs_one_probe(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """It is asked for one token while nobody has the slot, whose content is then forgotten."""
    async with watched() as place:
        with structlog.testing.capture_logs() as logs:
            place.fail()
            await trio.sleep(1)
        decoder = place.decoder
        assert (len(decoder.server.probed), decoder.forgotten, decoder.killed) == (1, 1, [])
        assert [one["event"] for one in logs] == ["backend_probed"]
        assert place.admission.loan is None
        await trio.sleep(1000)
        assert len(decoder.server.probed) == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ANSWERS_500,
            "it answers 500 to everything: 1 in a row, and 2 times one token"
            ": Invalid input batch. (status 500)",
        ),
        (
            BackendGone("the decoder closed the connection"),
            "it answers nothing of use: 1 in a row, and 2 times one token"
            ": the decoder closed the connection",
        ),
        (
            BackendTimeout("the decoder did not answer"),
            "it answers nothing of use: 1 in a row, and 2 times one token"
            ": the decoder did not answer",
        ),
    ],
)
async def test_vitals_error_and_two_bad_probes_replace_the_decoder(
    autojump_clock: trio.testing.MockClock, error: BackendError, said: str
) -> None:
    """Whatever its /health says; the reason is in last_exit."""
    async with watched() as place:
        place.decoder.server.probes = [error, error]
        place.fail()
        await trio.sleep(1)
        assert place.decoder.killed == [said]
        place.decoder.start()
        await trio.sleep(1000)
        assert len(place.decoder.killed) == 1
        assert place.decoder.server.probed == []


@pytest.mark.parametrize("second", [None, BackendRefused(501, "no completions")])
async def test_vitals_one_bad_probe_is_not_enough(
    autojump_clock: trio.testing.MockClock, second: BackendError | None
) -> None:
    """What a request left behind may fail once; a decoder that only embeds answers a 501."""
    async with watched() as place:
        place.decoder.server.probes = [ANSWERS_500, second]
        place.fail()
        await trio.sleep(1)
        assert place.decoder.killed == []
        assert len(place.decoder.server.probed) == 2


async def test_vitals_good_reply_before_the_quiet_moment_makes_the_probe_needless(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Clients that go on are served, and keep what the slot holds of their prompts."""
    async with watched() as place:
        ticket = place.admission.enter("r1")
        place.fail(2)
        await trio.sleep(1)
        place.vitals.note_status(place.facts, 200)
        ticket.leave()
        await trio.sleep(1000)
        assert place.decoder.server.probed == []


@pytest.mark.parametrize(
    ("status", "generated"), [(400, True), (200, False)], ids=["refused", "not-for-the-slot"]
)
async def test_vitals_reply_that_says_nothing_of_the_slot_clears_nothing(
    autojump_clock: trio.testing.MockClock, status: int, generated: bool
) -> None:
    """A decoder that is broken still refuses what it cannot read, and tokenizes."""
    async with watched() as place:
        ticket = place.admission.enter("r1")
        place.fail()
        place.vitals.note_status(place.facts, status, generated=generated)
        ticket.leave()
        await trio.sleep(1)
        assert len(place.decoder.server.probed) == 1


async def test_vitals_status_of_an_older_decoder_counts_for_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Its replies may end after its successor has begun."""
    async with watched() as place:
        old = place.facts
        place.decoder.start()
        place.vitals.note_status(place.facts, 200)
        place.vitals.note_status(old, 500)
        await trio.sleep(1)
        assert place.decoder.server.probed == []


async def test_vitals_provoked_errors_are_probed_ever_more_rarely(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """One client must not take every other's prefix cache."""
    async with watched() as place:
        for _ in range(3600):
            place.fail()
            await trio.sleep(1)
        probed = place.decoder.server.probed
        assert 5 <= len(probed) <= 12
        assert all(later - sooner >= 59 for sooner, later in itertools.pairwise(probed))


async def test_vitals_new_decoder_is_not_held_to_the_pauses_of_the_old(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Its first error is looked into within seconds."""
    async with watched() as place:
        place.fail()
        await trio.sleep(1)
        place.fail()  # waits for its minute
        await trio.sleep(1)
        place.decoder.start()
        place.decoder.server.probes = [ANSWERS_500, ANSWERS_500]
        place.fail()
        await trio.sleep(10)
        assert len(place.decoder.killed) == 1


async def test_vitals_loan_of_an_audit_is_waited_for(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The slot is in one hand at a time."""
    async with watched() as place:
        with place.admission.lend("audit"):
            place.fail()
            await trio.sleep(10)
            assert place.decoder.server.probed == []
        await trio.sleep(1)
        assert len(place.decoder.server.probed) == 1


async def test_vitals_line_that_closes_ends_the_probes(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A daemon that stops asks for nothing more."""
    async with watched() as place:
        place.admission.close()
        place.fail()
        await trio.sleep(1000)
        assert place.decoder.server.probed == []


async def test_make_sure_three_errors_in_a_row_the_next_request_waits_for_a_probe(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """In a line that is never empty no other moment would come."""
    async with watched() as place:
        ticket = place.admission.enter("r1")
        place.fail(2)
        assert await place.vitals.make_sure(place.facts) is place.facts
        assert place.decoder.server.probed == []
        place.fail()
        assert await place.vitals.make_sure(place.facts) is place.facts
        assert len(place.decoder.server.probed) == 1
        place.fail(9)
        await place.vitals.make_sure(place.facts)
        assert len(place.decoder.server.probed) == 1
        ticket.leave()


async def test_make_sure_decoder_that_fails_returns_its_successor(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The request goes on with the new one, and does not see the old one's errors."""
    async with watched() as place, trio.open_nursery() as nursery:
        ticket = place.admission.enter("r1")
        old = place.facts
        place.decoder.server.probes = [ANSWERS_500] * 2
        place.fail(3)
        found: list[BackendFacts] = []

        async def ask() -> None:
            found.append(await place.vitals.make_sure(old))

        nursery.start_soon(ask)
        await trio.sleep(1)
        assert len(place.decoder.killed) == 1
        assert found == []
        place.decoder.start()
        await trio.sleep(1)
        assert found == [place.facts]
        ticket.leave()


async def test_vitals_probe_of_a_decoder_that_dies_meanwhile_kills_no_successor(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The connection broke because it died."""
    async with watched() as place:
        server = place.decoder.server
        server.probes = [BackendGone("gone")] * 2
        place.fail()
        with trio.fail_after(10):
            while not server.probed:
                await trio.sleep(0.001)
        place.decoder.start()
        await trio.sleep(10)
        assert place.decoder.killed == []


async def test_vitals_fault_in_its_own_code_ends_no_daemon(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """It is logged, and the next suspicion is looked into."""
    async with watched() as place:
        place.decoder.server.probes = [cast("Any", ValueError("a fault"))]
        with structlog.testing.capture_logs() as logs:
            place.fail()
            await trio.sleep(10)
        assert "internal_error" in [one["event"] for one in logs]
        assert place.admission.loan is None
        assert len(place.decoder.server.probed) == 2


# --- silence --------------------------------------------------------------------------------


async def test_vitals_call_without_answer_of_an_idle_decoder_is_a_hang(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Found within a minute of its time, and not before it is over."""
    async with watched() as place:
        await trio.sleep(1000)
        place.decoder.calls.begin()
        began = trio.current_time()
        with trio.fail_after(400):
            while not place.decoder.killed:
                await trio.sleep(0.5)
        assert 120 <= trio.current_time() - began <= 150
        assert place.decoder.killed[0].startswith("it hung: no byte of an answer and 0.00 s of ")
        assert place.decoder.killed[0].endswith("/health answered")


async def test_vitals_health_that_is_silent_too_is_told(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Hung as a whole, or only what generates: the reason says which."""
    async with watched() as place:
        place.decoder.server.health = BackendTimeout("nothing")
        place.decoder.calls.begin()
        await trio.sleep(200)
        assert place.decoder.killed[0].endswith("/health was silent")


async def test_vitals_decoder_that_works_for_hours_is_left_alone(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A prefill without a byte is no hang."""
    async with watched() as place:
        place.decoder.works = True
        place.decoder.calls.begin()
        await trio.sleep(10_000)
        assert place.decoder.killed == []
        place.decoder.works = False
        await trio.sleep(200)
        assert len(place.decoder.killed) == 1


async def test_vitals_stream_that_goes_on_asks_no_health(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Looks are rare as long as tokens come, whatever is known of the process."""
    async with watched() as place:
        call = place.decoder.calls.begin()
        for _ in range(1000):
            call.heard += 1
            await trio.sleep(1)
        assert place.decoder.killed == []
        assert place.decoder.server.health_asked == 0
        assert place.decoder.reads <= 1000 / 15


async def test_vitals_client_that_does_not_read_is_no_hang_of_the_decoder(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Nobody waits for the decoder then."""
    async with watched() as place:
        call: Call = place.decoder.calls.begin()
        call.waits = False
        await trio.sleep(10_000)
        assert place.decoder.killed == []
        call.waits = True
        await trio.sleep(200)
        assert len(place.decoder.killed) == 1


async def test_vitals_process_that_cannot_be_read_is_left_alone(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Without its progress silence says nothing."""
    async with watched() as place:
        place.decoder.progress = None
        place.decoder.calls.begin()
        await trio.sleep(10_000)
        assert place.decoder.killed == []


async def test_vitals_hang_s_of_zero_looks_never_and_a_reload_changes_that(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """For a debugger; the call that waits by then is looked at from the reload on."""
    async with watched(0) as place:
        place.decoder.calls.begin()
        await trio.sleep(10_000)
        assert (place.decoder.killed, place.decoder.reads) == ([], 0)
        place.vitals.reconfigure(8)
        await trio.sleep(13)
        assert len(place.decoder.killed) == 1
        place.decoder.start()
        place.vitals.reconfigure(0)
        await trio.sleep(10_000)
        assert len(place.decoder.killed) == 1


async def test_vitals_decoder_that_loads_is_the_supervisors_affair(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """It has a time limit of its own."""
    async with watched() as place:
        place.decoder.facts = None
        place.decoder.calls.begin()
        await trio.sleep(10_000)
        assert (place.decoder.killed, place.decoder.reads) == ([], 0)


async def test_vitals_idle_decoder_wakes_nobody(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """No look, no timer: the daemon sleeps."""
    async with watched() as place:
        place.decoder.calls.begin().end()
        await trio.sleep(100)
        statistics = trio.lowlevel.current_statistics()
        assert statistics.seconds_to_next_deadline == float("inf")
        assert place.decoder.reads == 0
