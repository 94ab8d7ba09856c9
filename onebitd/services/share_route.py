"""The shared route: the provider writes into the decoder's own memory, and the decoder adopts it.

Its order: listen, ask the decoder to share, take its descriptors, run the provider with them, have
the decoder adopt. Until the provider has them nothing has happened, and the prompt can still go by
state file. From then on the slot holds whatever somebody else may have written: it is adopted, or
made safe.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Awaitable, Callable
from typing import Final

import structlog
import trio

from onebitd.adapters.share_listener import Shared, ShareListener, decoder_or_descendant
from onebitd.adapters.share_memory import SharedMemory
from onebitd.core import share_layout
from onebitd.core.config import Config
from onebitd.core.errors import (
    BackendError,
    BackendGone,
    BackendRefused,
    BackendTimeout,
    HandoffError,
)
from onebitd.core.handoff import HandoffRecord, Reason
from onebitd.core.wording import Wording
from onebitd.services.admission import Ticket
from onebitd.services.provider_runs import ProviderRuns, timed
from onebitd.services.race import Overtaken
from onebitd.services.supervisor import BackendFacts, Supervisor

log = structlog.get_logger()

SHARE_SOCKET: Final = "share.sock"
_HANDSHAKE_S: Final = 10.0
"""The decoder exports a few descriptors: milliseconds."""
_PAUSE_S: Final = 300.0
_ANSWER_S: Final = 1.0
"""Its answer may come so much later than its message."""
_UNKNOWN_ACTION: Final = (400, 404, 405)
_CANNOT_EXPORT: Final = 501


class ShareRoute:
    """Hands prompts over through the decoder's memory, one at a time.

    Args:
        supervisor: has the decoder.
        runs: runs the provider.
        make_safe: empties the slot, or has the decoder restarted.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        runs: ProviderRuns,
        make_safe: Callable[[BackendFacts, str], Awaitable[None]],
    ) -> None:
        self._supervisor = supervisor
        self._runs = runs
        self._socket_path = supervisor.directory / SHARE_SOCKET
        self._make_safe = make_safe
        self._refused: tuple[int, Wording] | None = None
        self._paused_until = -math.inf

    def refusal_of(self, facts: BackendFacts | None) -> Wording | None:
        """Return why this decoder is not asked to share: its own words, or a pause; else None."""
        if time.monotonic() < self._paused_until:
            why = f"it did not share within {_HANDSHAKE_S:g} s, and is asked again in a while"
            return Wording.of(why)
        if facts is None or self._refused is None or self._refused[0] != facts.generation:
            return None
        return self._refused[1]

    def state(self, config: Config) -> str:
        """Return what `status` says of the route."""
        if not config.handoff.share:
            return "off"
        if time.monotonic() < self._paused_until:
            return "paused, the decoder did not answer"
        if self.refusal_of(self._supervisor.facts) is not None:
            return "not supported by this decoder"
        return "on"

    async def hand_over(
        self,
        facts: BackendFacts,
        tokens: list[int],
        record: HandoffRecord,
        ticket: Ticket,
        config: Config,
        patience_ms: float = math.inf,
    ) -> HandoffError | Overtaken | float:
        """Have these tokens prefilled into the slot, which is the caller's, and adopted.

        Args:
            facts, tokens, record, ticket, config: as for `ProviderRuns.prefill`.
            patience_ms: how long the device is waited for: the slot is idle meanwhile.

        Returns:
            How long the provider's run took in milliseconds: the slot holds them. Or why nothing
            has begun, when another route is still open; or that the device was not free in time.

        Raises:
            HandoffError: no other route is open; the slot is empty, or the decoder restarts.

        A cancel leaves it so, too: nobody writes to the slot any more.
        """
        refusal = self.refusal_of(facts)
        if refusal is not None:
            record.share_ms = 0.0
            return HandoffError(Reason.SHARE_REFUSED, refusal)
        ticket.phase = "share"
        try:
            await self._empty(facts)
            with timed(record, "share_ms"):
                shared = await self._share(facts)
        except HandoffError as error:  # a decoder that died over it included: a file fits the next
            record.share_ms = 0.0
            return error
        with shared:
            try:
                layout = _checked_layout(shared, len(tokens))
            except HandoffError as error:
                record.share_ms = 0.0
                return error
            run_ms = await self._fill(
                *(facts, tokens, shared, layout, record, ticket, config, patience_ms)
            )
        await trio.lowlevel.checkpoint_if_cancelled()  # the client may have left in the adoption
        return run_ms

    async def _empty(self, facts: BackendFacts) -> None:
        """Wait until the decoder has done with the slot, and empty it.

        A client that left has given up the slot at once, but llama-server notices within a second
        only; until then it writes to the very cells that a provider is about to fill. An erase is
        carried out after that, and what was in the slot is lost anyway.
        """
        with trio.CancelScope(shield=True):
            try:
                await facts.server.erase()
            except BackendTimeout as error:
                self._supervisor.kill(f"it did not answer an erase: {error}")
                raise _gone(error.wording) from error
            except BackendGone as error:
                died = "the decoder died as its slot was emptied: "
                raise _gone(error.wording.behind(died)) from error
            except BackendError as error:
                why = error.wording.behind("its slot could not be emptied: ")
                raise HandoffError(Reason.SHARE_REFUSED, why) from error

    async def _share(self, facts: BackendFacts) -> Shared:
        """Do the handshake; the caller closes what came."""
        pid = self._supervisor.pid
        if pid is None or self._supervisor.facts is not facts:
            raise _gone("the decoder has gone before it shared")
        received: list[Shared | HandoffError] = []
        answered: list[int | None] = []
        kept = False
        deadline = trio.current_time() + _HANDSHAKE_S
        try:
            with ShareListener(self._socket_path) as listener:
                async with trio.open_nursery() as nursery:
                    # The listener's own limit comes first: it knows how far things got.
                    nursery.cancel_scope.deadline = deadline + _ANSWER_S

                    async def receive() -> None:
                        try:
                            received.append(
                                await listener.receive(decoder_or_descendant(pid), _HANDSHAKE_S)
                            )
                        except HandoffError as error:
                            received.append(error)
                            nursery.cancel_scope.cancel()  # its answer would change nothing

                    nursery.start_soon(receive)
                    try:
                        answered.append(await self._ask(facts))
                    except HandoffError as error:
                        received.append(error)
                        nursery.cancel_scope.cancel()
            shared = _agreed(received, answered)
            kept = True
            return shared
        except HandoffError:
            if trio.current_time() >= deadline:
                # Or every request would wait for it as long, with the slot in its hands.
                self._paused_until = time.monotonic() + _PAUSE_S
            raise
        finally:
            for one in received:
                if isinstance(one, Shared) and not kept:
                    one.close()

    async def _ask(self, facts: BackendFacts) -> int | None:
        """Ask the decoder to share; return the share's id if its answer names one.

        Raises:
            HandoffError: it does not share.
        """
        try:
            return await facts.server.share(str(self._socket_path))
        except BackendRefused as error:
            if error.status == _CANNOT_EXPORT or (
                error.status in _UNKNOWN_ACTION and _says_unknown(error)
            ):
                self._refused = (facts.generation, error.wording)
            raise HandoffError(Reason.SHARE_REFUSED, error.wording) from error
        except BackendTimeout as error:
            self._supervisor.kill(f"it did not answer a share: {error}")
            raise HandoffError(Reason.BACKEND_DOWN, error.wording) from error
        except BackendGone as error:
            died = "the decoder died as it was to share: "
            raise _gone(error.wording.behind(died)) from error
        except BackendError as error:
            raise HandoffError(Reason.SHARE_REFUSED, error.wording) from error

    async def _fill(
        self,
        facts: BackendFacts,
        tokens: list[int],
        shared: Shared,
        layout: share_layout.ShareLayout | None,
        record: HandoffRecord,
        ticket: Ticket,
        config: Config,
        patience_ms: float,
    ) -> float | Overtaken:
        memory = None if layout is None else SharedMemory(shared.fds, layout, len(tokens))
        begun = False
        waiting = trio.CancelScope(deadline=trio.current_time() + patience_ms / 1000.0)

        async def begin() -> None:
            nonlocal begun
            begun = True
            waiting.deadline = math.inf  # from now on somebody may write
            marked = False
            if memory is not None:
                marked = await trio.to_thread.run_sync(memory.mark)
            if not marked:
                log.debug("share_unmarked", detail="unwritten rows would not be noticed")

        good = False
        try:
            with waiting:
                run_ms = await self._runs.prefill_shared(
                    *(tokens, shared, begin, record, ticket, config)
                )
            if waiting.cancelled_caught:
                return Overtaken(
                    f"the device was not free after {patience_ms:.0f} ms",
                    elapsed_ms=None,
                    overran=self._runs.running is None,  # or it is at work for another request
                )
            if memory is not None:
                await self._check(memory)
            ticket.phase = "adopt"
            await self._adopt(facts, tokens, shared, record)
            good = True
            return run_ms
        finally:
            if begun and not good:
                await self._take_out(facts, memory)
                await trio.lowlevel.checkpoint_if_cancelled()  # the cancel is why, if there was one

    async def _check(self, memory: SharedMemory) -> None:
        fault = await trio.to_thread.run_sync(memory.fault)
        if fault is not None:
            raise HandoffError(Reason.BAD_STATE, f"the shared memory, {fault}")

    async def _take_out(self, facts: BackendFacts, memory: SharedMemory | None) -> None:
        """See that nothing is decoded from what a provider may have left half done."""
        if self._supervisor.facts is not facts:
            return  # it is nobody's memory any more
        with trio.CancelScope(shield=True):
            if self._runs.state == "stuck":
                self._supervisor.kill(
                    "a provider that cannot be killed may write to its memory", its_own_fault=False
                )
                return
            why = "a handoff through shared memory that failed"
            if memory is None or not await trio.to_thread.run_sync(memory.clear):
                # An erase empties the list of cells, not the cells.
                self._supervisor.kill(
                    f"its memory cannot be cleared after {why}", its_own_fault=False
                )
                return
            await self._make_safe(facts, why)

    async def _adopt(
        self, facts: BackendFacts, tokens: list[int], shared: Shared, record: HandoffRecord
    ) -> None:
        """Have the decoder take the cells over.

        Shielded: an adoption whose client has left is carried out all the same, so the slot must
        not change hands before its answer.
        """
        if self._supervisor.facts is not facts:
            raise _gone("the decoder restarted after it had shared")
        with trio.CancelScope(shield=True), timed(record, "adopt_ms", at="handed_at_ms"):
            try:
                adopted = await facts.server.adopt(tokens, shared.share_id)
            except BackendTimeout as error:
                self._supervisor.kill(f"it did not answer an adopt: {error}")
                raise HandoffError(Reason.BACKEND_DOWN, error.wording) from error
            except BackendGone as error:
                raise _gone("the decoder died while it adopted the prompt") from error
            except BackendError as error:
                raise HandoffError(Reason.ADOPT_REFUSED, error.wording) from error
            if adopted is not None and adopted != len(tokens):
                raise HandoffError(
                    Reason.ADOPT_REFUSED, f"the decoder adopted {adopted} of {len(tokens)} tokens"
                )


def _agreed(received: list[Shared | HandoffError], answered: list[int | None]) -> Shared:
    """Return what was shared, if message and answer say the same.

    Args:
        received: what came over the socket, or why nothing did; and why the decoder refused.
        answered: the share's id in its answer; empty without an answer.
    """
    for one in received:
        if isinstance(one, HandoffError):
            raise one
    if not received or not answered:
        raise HandoffError(
            Reason.SHARE_HANDSHAKE, f"the decoder did not answer within {_HANDSHAKE_S:g} s"
        )
    (shared,) = (one for one in received if isinstance(one, Shared))
    if answered[0] not in (None, shared.share_id):  # of an earlier request, which had left
        raise HandoffError(
            Reason.SHARE_HANDSHAKE,
            f"the decoder's message is of share {shared.share_id}, its answer of share"
            f" {answered[0]}",
        )
    return shared


def _gone(detail: str | Wording) -> HandoffError:
    return HandoffError(Reason.BACKEND_DOWN, detail)


def _says_unknown(error: BackendRefused) -> bool:
    """Tell a decoder that has no such action from one that refuses this request."""
    return error.status != 400 or "invalid action" in str(error).lower()


def _checked_layout(shared: Shared, n_tokens: int) -> share_layout.ShareLayout | None:
    try:
        layout = share_layout.parse(shared.header)
    except share_layout.ShareLayoutError as error:
        raise HandoffError(
            Reason.SHARE_HANDSHAKE, "the decoder's share message", quoted=str(error)
        ) from error
    if layout is None:
        return None
    if len(layout.regions) != len(shared.fds):
        raise HandoffError(
            Reason.SHARE_HANDSHAKE,
            f"the decoder described {len(layout.regions)} regions and sent {len(shared.fds)}"
            " descriptors",
        )
    for index, (fd, size) in enumerate(zip(shared.fds, layout.regions, strict=True)):
        if os.fstat(fd).st_size < size:
            raise HandoffError(
                Reason.SHARE_HANDSHAKE,
                f"region {index} of the decoder's is smaller than the {size} bytes it says",
            )
    if n_tokens > layout.n_cells:
        raise HandoffError(
            Reason.SHARE_REFUSED,
            f"the decoder shares {layout.n_cells} cells, the prompt needs {n_tokens}",
        )
    return layout
