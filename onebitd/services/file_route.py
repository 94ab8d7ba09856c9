"""The file route's last step: a checked state file goes into slot 0.

The run that makes it is `ProviderRuns.prefill`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import trio

from onebitd.adapters.bad_states import BadStates
from onebitd.adapters.slot_files import SlotFiles
from onebitd.core.config import Config
from onebitd.core.errors import (
    BackendError,
    BackendGone,
    BackendRefused,
    BackendTimeout,
    HandoffError,
)
from onebitd.core.handoff import HandoffRecord, Reason
from onebitd.services.provider_runs import Prefilled, timed
from onebitd.services.supervisor import BackendFacts, Supervisor


class FileRoute:
    """Restores state files, one at a time.

    Args:
        supervisor: has the decoder.
        slots: where state files live.
        bad_states: keeps those that it refuses.
        make_safe: empties the slot, or has the decoder restarted.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        slots: SlotFiles,
        bad_states: BadStates,
        make_safe: Callable[[BackendFacts, str], Awaitable[None]],
    ) -> None:
        self._supervisor = supervisor
        self._slots = slots
        self._bad_states = bad_states
        self._make_safe = make_safe

    async def restore(
        self,
        facts: BackendFacts,
        prefilled: Prefilled,
        tokens: list[int],
        record: HandoffRecord,
        config: Config,
    ) -> float:
        """Restore a state file into slot 0, which is the caller's.

        Args:
            facts: of the decoder that runs.
            prefilled: the file, which stays the caller's.
            tokens: that it holds.
            record: gets the decoder's own time for it.
            config: of the request.

        Returns:
            How long it took, in milliseconds.

        Raises:
            HandoffError: the slot is empty, or the decoder restarts.
        """
        started = time.monotonic()
        try:
            await self._restore(facts, prefilled, len(tokens), record)
        except HandoffError as error:
            if error.reason in (Reason.RESTORE_REFUSED, Reason.RESTORE_SHORT):
                self._bad_states.take(
                    self._slots.path / prefilled.name,
                    tokens,
                    str(error),
                    record.request_id,
                    config.handoff.keep_bad_states,
                )
            raise
        return (time.monotonic() - started) * 1000.0

    async def _restore(
        self, facts: BackendFacts, prefilled: Prefilled, count: int, record: HandoffRecord
    ) -> None:
        """Shielded: a restore whose client has left is carried out all the same, so the slot must
        not change hands before its answer.
        """
        with trio.CancelScope(shield=True), timed(record, "restore_ms", at="handed_at_ms"):
            try:
                restored = await facts.server.restore(prefilled.name)
            except BackendRefused as error:
                await self._make_safe(facts, "a refused restore")
                raise HandoffError(Reason.RESTORE_REFUSED, error.wording) from error
            except BackendTimeout as error:
                self._supervisor.kill(f"it did not answer a restore: {error}")
                raise HandoffError(Reason.BACKEND_DOWN, error.wording) from error
            except BackendGone as error:
                raise HandoffError(
                    Reason.BACKEND_DOWN, "the decoder died while it restored the state"
                ) from error
            except BackendError as error:
                await self._make_safe(facts, "an unreadable answer to a restore")
                raise HandoffError(Reason.RESTORE_REFUSED, error.wording) from error
            if restored.n_restored != count or restored.n_read != prefilled.size:
                await self._make_safe(facts, "a short restore")
                raise HandoffError(
                    Reason.RESTORE_SHORT,
                    f"the decoder restored {restored.n_restored} of {count} tokens and read "
                    f"{restored.n_read} of {prefilled.size} bytes",
                )
        if restored.restore_ms is not None:
            record.restore_ms = restored.restore_ms
