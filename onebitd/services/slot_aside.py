"""What the slot held before an audit: put aside, put back, and not decoded from if it drifts."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import trio

from onebitd.adapters.audit_files import AuditFiles
from onebitd.core.errors import BackendError, BackendGone, BackendTimeout
from onebitd.services.supervisor import BackendFacts, Supervisor


@dataclasses.dataclass(frozen=True, slots=True)
class _Saved:
    name: str
    n_tokens: int
    facts: BackendFacts


class SlotAside:
    """The slot's content while the decoder recomputes a prompt in it.

    Args:
        supervisor: has the decoder.
        files: where it is saved.
        make_safe: empties the slot, or has the decoder restarted.
        lost: called when the slot will not hold again what it did before.

    Attributes:
        doubted: the slot may hold a cache that was found to drift.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        files: AuditFiles,
        make_safe: Callable[[BackendFacts, str], Awaitable[None]],
        lost: Callable[[], None],
    ) -> None:
        self._supervisor = supervisor
        self._files = files
        self._make_safe = make_safe
        self._lost = lost
        self._saved: _Saved | None = None
        self.doubted = False

    @property
    def is_held(self) -> bool:
        """Whether something waits to be put back."""
        return self._saved is not None

    async def put_aside(self, facts: BackendFacts) -> None:
        """Save what the slot holds; an audit that was cut short has done so already.

        Raises:
            BackendError, OSError: it cannot be saved.
        """
        if self._saved is not None and self._saved.facts is not facts:
            self.drop()  # its decoder is gone
        if self._saved is not None:
            return
        name, n_tokens = await self.save(facts)
        if n_tokens:
            self._saved = _Saved(name, n_tokens, facts)
        else:
            self._files.remove(name)

    async def save(self, facts: BackendFacts) -> tuple[str, int]:
        """Save the slot; return the file, which is the caller's, and how many tokens it holds."""
        name = self._files.reserve()
        with self.removing_on_error(name):
            return name, await facts.server.save(name)

    @contextmanager
    def removing_on_error(self, name: str) -> Iterator[None]:
        """Remove a file if the block does not end well."""
        try:
            yield
        except BaseException:
            self._files.remove(name)
            raise

    async def put_back(self, facts: BackendFacts) -> None:
        """Restore what was put aside, if it is this decoder's; shielded as every restore is."""
        saved, self._saved = self._saved, None
        if saved is None:
            return
        with trio.CancelScope(shield=True):
            try:
                if saved.facts is not facts:
                    return
                restored = await facts.server.restore(saved.name)
                if restored.n_restored != saved.n_tokens:
                    await self._make_safe(facts, "a short restore after an audit")
            except BackendTimeout as error:
                self._supervisor.kill(f"it did not answer a restore: {error}")
            except BackendGone:
                pass  # its successor starts empty
            except BackendError:
                await self._make_safe(facts, "a refused restore after an audit")
            finally:
                self._files.remove(saved.name)

    async def make_usable(self) -> None:
        """Have the slot hold what may be decoded from; the slot is the caller's.

        That is what was put aside, but nothing of a provider whose cache has just been found to
        drift: the prompt's beginning would be taken from it. It never fails: at worst the slot is
        empty, as after a restart.
        """
        facts = self._supervisor.facts
        if facts is None:
            return
        if not self.doubted:
            await self.put_back(facts)
            return
        self.drop()
        with trio.CancelScope(shield=True):
            try:
                await facts.server.erase()  # what it holds is wrong, but finite: that heals
            except BackendError:
                await self._make_safe(facts, "an audit that found drift")
        self.doubted = False

    def doubt(self) -> None:
        """What the slot holds, or did before, was found to drift."""
        self.drop()
        self.doubted = True
        self._lost()

    def drop(self) -> None:
        """What was put aside is of no use any more."""
        saved, self._saved = self._saved, None
        if saved is not None:
            self._files.remove(saved.name)
            self._lost()
