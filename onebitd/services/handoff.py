"""The pipeline of the handoff route: template, tokenize, plan, provider, restore, forward.

`Handoffs` holds what lasts; an `Exchange` is one request in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import trio

from onebitd.adapters.accel_probe import AccelProbe
from onebitd.adapters.bad_states import BadStates
from onebitd.adapters.cost_subject import subject_of
from onebitd.adapters.device_lock import DeviceLock
from onebitd.adapters.device_sysfs import DeviceReader
from onebitd.adapters.process import Guard
from onebitd.adapters.slot_files import SlotFiles
from onebitd.core import paths, policy, request
from onebitd.core.breaker import State
from onebitd.core.config import Config, Policy
from onebitd.core.control_api import ProviderReset
from onebitd.core.errors import (
    BackendError,
    BackendGone,
    HandoffError,
)
from onebitd.core.handoff import HandoffRecord, Reason, Route
from onebitd.core.reuse import Reuse
from onebitd.core.wording import Wording
from onebitd.services.admission import Admission, Ticket
from onebitd.services.audit import Audits
from onebitd.services.cost_keeper import CostKeeper
from onebitd.services.exchange import Exchange
from onebitd.services.file_route import FileRoute
from onebitd.services.history import History
from onebitd.services.in_flight import InFlight
from onebitd.services.outlooks import Outlooks
from onebitd.services.provider_breaker import ProviderBreaker
from onebitd.services.provider_runs import ProviderRuns, ProviderState
from onebitd.services.share_route import ShareRoute
from onebitd.services.supervisor import BackendFacts, Supervisor
from onebitd.services.telemetry import Devices, Telemetry
from onebitd.services.vitals import Vitals

COSTS_FILE: Final = "costs.json"
_TRY_TOKENS: Final = (1, 2, 3) * 11
"""What a provider is tried with: ids that every vocabulary has."""


class Handoffs:
    """What the requests of one daemon share.

    Args:
        config: the effective configuration.
        supervisor: the decoder.
        admission: the line for its slot.
        slots: where state files live.
        lock: the device lock, None when none is to be taken.
        guard: kills a provider when the daemon dies.
        history: gets every record.
        environ: what a provider inherits.
        devices: of this machine, by default those in sysfs.
    """

    def __init__(
        self,
        config: Config,
        supervisor: Supervisor,
        admission: Admission,
        slots: SlotFiles,
        lock: DeviceLock | None,
        guard: Guard,
        history: History,
        environ: Mapping[str, str],
        devices: Devices | None = None,
    ) -> None:
        self.config = config
        self.supervisor = supervisor
        self.admission = admission
        self.slots = slots
        self.history = history
        self.in_flight = InFlight()
        state = Path(paths.state_dir(config.instance, environ, os.geteuid()))
        self.bad_states = BadStates(state / "bad-states", slots)
        self.runs = ProviderRuns(
            *(config, slots, lock, guard, environ, supervisor.swa_window, supervisor.program),
            self.bad_states,
        )
        self.files = FileRoute(supervisor, slots, self.bad_states, self.make_safe)
        self.shares = ShareRoute(supervisor, self.runs, self.make_safe)
        self.audits = Audits(config, supervisor, admission, slots, self.make_safe)
        self.keeper = CostKeeper(state / COSTS_FILE, subject_of(config, supervisor.program))
        self.outlooks = Outlooks(supervisor, admission, self.runs, self.keeper)
        self.audits.on_slot_lost = self.outlooks.memory.forget
        self.vitals = Vitals(
            *(supervisor, admission, self.outlooks.memory.forget, config.backend.hang_s)
        )
        self.telemetry = Telemetry(DeviceReader() if devices is None else devices)
        self.reuse = Reuse()
        self.breaker = ProviderBreaker(
            self._try_provider,
            lambda: self.runs.state == "stuck",
            may_probe=lambda: self.runs.state == "idle",
            silent_node=AccelProbe(guard).silent_node,
        )

    def reconfigure(self, config: Config, lock: DeviceLock | None) -> None:
        """Take over a new configuration; exchanges that have begun keep theirs.

        See `ProviderRuns.reconfigure` for the lock.
        """
        before, self.config = self.config, config
        self.runs.reconfigure(config, lock)
        self.audits.reconfigure(config)
        self.vitals.reconfigure(config.backend.hang_s)
        self.keeper.set_subject(subject_of(config, self.supervisor.program))
        self.reuse.forgive()
        if before.provider != config.provider:
            self.breaker.reconfigure()

    @property
    def provider_state(self) -> ProviderState:
        """For `status`: what the provider is doing."""
        return self.runs.state

    @property
    def out_of_service(self) -> Wording | None:
        """Why the provider is not called, None while it is.

        Its last words may quote somebody else's prompt.
        """
        drift = self.audits.out_of_service
        return self.breaker.wording if drift is None else Wording.of(drift)

    @property
    def route_off(self) -> str | None:
        """Why nothing is handed over to this decoder any more, None as long as it is."""
        facts = self.supervisor.facts
        if facts is None:
            return None
        swa_full = "--swa-full" in self.supervisor.argv
        return self.reuse.refusal(facts.generation, facts.layout, swa_full=swa_full)

    def reset_provider(self) -> ProviderReset:
        """Put the provider back into service, and hand over to this decoder again."""
        route_off, before = self.route_off, self.breaker.status()
        self.reuse.forgive()
        self.breaker.reset()
        cleared = self.audits.reset()
        breaker = cleared.breaker if before.state is State.CLOSED else before.state.value
        return ProviderReset(cleared.strikes, breaker, before.failures, route_off)

    async def _try_provider(self) -> None:
        """Have the provider prefill a few tokens by the file route, for nobody.

        Raises:
            HandoffError: why it failed.
        """
        facts = self.supervisor.facts
        if facts is None or facts.layout is None:
            raise HandoffError(Reason.BACKEND_DOWN, "there is no decoder to try the provider for")
        record = HandoffRecord("", "", self.config.instance, self.config.model.alias, "", False)
        ticket = Ticket(self.admission, "")
        wanted = (list(_TRY_TOKENS), facts.layout, record, ticket, self.config, facts.baseline)
        self.slots.remove((await self.runs.prefill(*wanted)).name)

    def exchange(
        self,
        path: str,
        parsed: request.ParsedRequest,
        wanted: Policy | None,
        request_id: str,
        client_gone: Callable[[], bool],
        by_operator: Callable[[], bool] = lambda: False,
        route: Route | None = None,
    ) -> Exchange:
        """Begin one request; use it as an async context manager.

        Args:
            path: of the request.
            parsed: its body.
            wanted: the policy that its header asks for, None for the configured one.
            request_id: for the record.
            client_gone, by_operator: tell a cancel by the client, or by the operator, from one by
                us.
            route: the only one that a handoff of it may take, None for what the configuration says.
        """
        policy_of_request = wanted or self.config.handoff.policy
        asked = (path, parsed, policy_of_request, request_id)
        return Exchange(self, *asked, client_gone, by_operator, route)

    async def make_safe(self, facts: BackendFacts, why: str) -> None:
        """Empty the slot after a restore that went wrong, before anything is decoded from it.

        Erasing heals, but for two kinds of cache (measured on llama.cpp): transposed values and
        recurrent state keep what is not a number over an erase. Those decoders are restarted.
        """
        self.outlooks.memory.forget()
        with trio.CancelScope(shield=True):
            if facts.layout is None or not policy.erase_heals(facts.layout):
                self.supervisor.kill(f"its slot cannot be trusted: {why}", its_own_fault=False)
                return
            try:
                await facts.server.erase()
            except BackendGone as error:
                # If it died, the next one starts empty; but it may only have hung up.
                await self.supervisor.kill_unless_gone(
                    facts, f"its slot could not be erased after {why}: {error}"
                )
            except BackendError as error:
                self.supervisor.kill(f"its slot could not be erased after {why}: {error}")
