"""The shared route: the provider writes into the decoder's own memory, and the decoder adopts it.

Its order: listen, ask the decoder to share, take its descriptors, run the provider with them, have
the decoder adopt. Until the provider has them nothing has happened, and the prompt can still go by
state file. From then on the slot holds whatever somebody else may have written: it is adopted, or
made safe.
"""

from __future__ import annotations

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
from onebitd.services.admission import Ticket
from onebitd.services.provider_runs import ProviderRuns, timed
from onebitd.services.supervisor import BackendFacts, Supervisor

log = structlog.get_logger()

SHARE_SOCKET: Final = "share.sock"
_HANDSHAKE_S: Final = 10.0
"""The decoder exports a few descriptors: milliseconds."""
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
        self._refused: tuple[int, str] | None = None

    def refusal_of(self, facts: BackendFacts | None) -> str | None:
        """Return why this decoder shares nothing, as it said itself; None until it has."""
        if facts is None or self._refused is None or self._refused[0] != facts.generation:
            return None
        return self._refused[1]

    def state(self, config: Config) -> str:
        """Return what `status` says of the route."""
        if not config.handoff.share:
            return "off"
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
    ) -> HandoffError | None:
        """Have these tokens prefilled into the slot, which is the caller's, and adopted.

        Returns:
            None when the slot holds them. Why nothing has begun, when another route is still open.

        Raises:
            HandoffError: it had begun; the slot is empty, or the decoder restarts.

        A cancel leaves it so, too: nobody writes to the slot any more.
        """
        refusal = self.refusal_of(facts)
        if refusal is not None:
            record.share_ms = 0.0
            return HandoffError(Reason.SHARE_REFUSED, refusal)
        ticket.phase = "share"
        try:
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
            await self._fill(facts, tokens, shared, layout, record, ticket, config)
        await trio.lowlevel.checkpoint_if_cancelled()  # the client may have left in the adoption
        return None

    async def _share(self, facts: BackendFacts) -> Shared:
        """Do the handshake; the caller closes what came."""
        pid = self._supervisor.pid
        if pid is None or self._supervisor.facts is not facts:
            raise _gone("the decoder has gone before it shared")
        received: list[Shared | HandoffError] = []
        answered: int | None = None
        kept = False
        try:
            with ShareListener(self._socket_path) as listener:
                async with trio.open_nursery() as nursery:

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
                        answered = await self._ask(facts)
                    except HandoffError as error:
                        received.append(error)
                        nursery.cancel_scope.cancel()
            outcome = received[0]
            if isinstance(outcome, HandoffError):
                raise outcome
            if len(received) > 1:  # a message, and then a refusal
                assert isinstance(received[1], HandoffError)  # noqa: S101 - one receiver, one asker
                raise received[1]
            if answered not in (None, outcome.share_id):  # an earlier request's, which had left
                raise HandoffError(
                    Reason.SHARE_HANDSHAKE,
                    f"the decoder's message is of share {outcome.share_id}, its answer of share "
                    f"{answered}",
                )
            kept = True
            return outcome
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
                self._refused = (facts.generation, str(error))
            raise HandoffError(Reason.SHARE_REFUSED, str(error)) from error
        except BackendTimeout as error:
            self._supervisor.kill(f"it did not answer a share: {error}")
            raise HandoffError(Reason.BACKEND_DOWN, str(error)) from error
        except BackendGone as error:
            raise _gone(f"the decoder died as it was to share: {error}") from error
        except BackendError as error:
            raise HandoffError(Reason.SHARE_REFUSED, str(error)) from error

    async def _fill(
        self,
        facts: BackendFacts,
        tokens: list[int],
        shared: Shared,
        layout: share_layout.ShareLayout | None,
        record: HandoffRecord,
        ticket: Ticket,
        config: Config,
    ) -> None:
        memory = None if layout is None else SharedMemory(shared.fds, layout, len(tokens))
        begun = False

        async def begin() -> None:
            nonlocal begun
            begun = True
            marked = False
            if memory is not None:
                marked = await trio.to_thread.run_sync(memory.mark)
            if not marked:
                log.debug("share_unmarked", detail="unwritten rows would not be noticed")

        good = False
        try:
            await self._runs.prefill_shared(tokens, shared, begin, record, ticket, config)
            if memory is not None:
                await self._check(memory)
            ticket.phase = "adopt"
            await self._adopt(facts, tokens, shared, record)
            good = True
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
            if memory is not None:
                await trio.to_thread.run_sync(memory.clear)
            await self._make_safe(facts, "a handoff through shared memory that failed")

    async def _adopt(
        self, facts: BackendFacts, tokens: list[int], shared: Shared, record: HandoffRecord
    ) -> None:
        """Have the decoder take the cells over.

        Shielded: an adoption whose client has left is carried out all the same, so the slot must
        not change hands before its answer.
        """
        if self._supervisor.facts is not facts:
            raise _gone("the decoder restarted after it had shared")
        with trio.CancelScope(shield=True), timed(record, "adopt_ms"):
            try:
                adopted = await facts.server.adopt(tokens, shared.share_id)
            except BackendTimeout as error:
                self._supervisor.kill(f"it did not answer an adopt: {error}")
                raise HandoffError(Reason.BACKEND_DOWN, str(error)) from error
            except BackendGone as error:
                raise _gone("the decoder died while it adopted the prompt") from error
            except BackendError as error:
                raise HandoffError(Reason.ADOPT_REFUSED, str(error)) from error
            if adopted is not None and adopted != len(tokens):
                raise HandoffError(
                    Reason.ADOPT_REFUSED, f"the decoder adopted {adopted} of {len(tokens)} tokens"
                )


def _gone(detail: str) -> HandoffError:
    return HandoffError(Reason.BACKEND_DOWN, detail)


def _says_unknown(error: BackendRefused) -> bool:
    """Tell a decoder that has no such action from one that refuses this request."""
    return error.status != 400 or "invalid action" in str(error).lower()


def _checked_layout(shared: Shared, n_tokens: int) -> share_layout.ShareLayout | None:
    try:
        layout = share_layout.parse(shared.header)
    except share_layout.ShareLayoutError as error:
        raise HandoffError(
            Reason.SHARE_HANDSHAKE, f"the decoder's share message: {error}"
        ) from error
    if layout is None:
        return None
    if len(layout.regions) != len(shared.fds):
        raise HandoffError(
            Reason.SHARE_HANDSHAKE,
            f"the decoder described {len(layout.regions)} regions and sent {len(shared.fds)}"
            " descriptors",
        )
    if n_tokens > layout.n_cells:
        raise HandoffError(
            Reason.SHARE_REFUSED,
            f"the decoder shares {layout.n_cells} cells, the prompt needs {n_tokens}",
        )
    return layout
