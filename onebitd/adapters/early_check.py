"""The check of a state file beside the end of its provider, which takes tens of milliseconds.

It begins when the file is renamed to its final name, and under a read lease that is kept: then
nobody can have written to the file since, and what was found is still true when the provider has
ended. Where there is no lease or no inotify to be had, there is no early check.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from typing import Final

import trio

from onebitd.adapters import leases
from onebitd.adapters.directory_watch import MOVED_TO, DirectoryWatch
from onebitd.adapters.state_reader import OPEN_FLAGS, OpenFile, has_one_name, is_small
from onebitd.core.errors import StateFileError

_LOOK_S: Final = 0.05
"""How long a provider that wants to write to its file again may be held up. The kernel tells by a
signal only, and signals belong to the whole process."""


class EarlyCheck:
    """One run's early check; it begins and ends inside `running`.

    It only ever says that a file is in order: refusals are for the check of the final file.

    Args:
        path: the final name.
        watch: nobody else waits for it meanwhile; it stays the caller's.
        check: reads the file, a big one in another thread; StateFileError or OSError refuse it.
    """

    def __init__(self, path: str, watch: DirectoryWatch, check: Callable[[OpenFile], None]) -> None:
        self._path = path
        self._watch = watch
        self._check = check
        self._leased: int | None = None
        self._is_late = False
        self._has_passed = False
        self._ended = trio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watch for the file while the block runs.

        Whatever ends the block ends the check and gives the lease back; an exception comes out as
        it is. A thread that is still reading ends by itself, soon.
        """
        failure: Exception | None = None
        number = self._watch.add(os.path.dirname(self._path), MOVED_TO)
        try:
            async with trio.open_nursery() as nursery:
                if number is not None:
                    nursery.start_soon(self._run, number)
                try:
                    yield
                except Exception as error:  # noqa: BLE001 - the nursery would wrap it in a group
                    failure = error
                # What the block has done is done: a cancel that comes now is for whoever is next.
                nursery.cancel_scope.shield = True
                nursery.cancel_scope.cancel()
        finally:
            self._give_way()
            if number is not None:
                self._watch.remove(number)
        if failure is not None:
            raise failure

    async def wait_ended(self) -> None:
        """Wait for the end of a check that has begun; one that has not does not begin any more."""
        self._is_late = True
        if self._leased is not None:
            await self._ended.wait()
        if not self._is_leased():
            self._give_way()

    def vouches_for(self, info: os.stat_result) -> bool:
        """Tell whether this file was found in order and nobody can have changed it since."""
        if self._leased is None or not self._has_passed or not self._is_leased():
            return False
        mine = os.fstat(self._leased)
        return (mine.st_dev, mine.st_ino, mine.st_size) == (info.st_dev, info.st_ino, info.st_size)

    async def _run(self, number: int) -> None:
        awaited = (number, os.path.basename(self._path))
        while awaited not in [(event.number, event.name) for event in self._watch.read()]:
            await trio.lowlevel.wait_readable(self._watch.fileno())
        if self._is_late:
            return
        leased = self._leased = _open_leased(self._path)
        if leased is None:
            return
        if is_small(os.fstat(leased).st_size):
            await self._look(leased)
            await self._keep_lease()
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look, leased)
            await self._keep_lease()
            nursery.cancel_scope.cancel()

    async def _keep_lease(self) -> None:
        """Give the lease back as soon as somebody wants to write to the file."""
        while self._is_leased():  # noqa: ASYNC110 - the kernel sets no trio.Event
            await trio.sleep(_LOOK_S)
        self._give_way()

    async def _look(self, leased: int) -> None:
        try:
            file = OpenFile(os.dup(leased))
            try:
                if is_small(file.size):
                    self._check(file)
                else:
                    await trio.to_thread.run_sync(self._check, file, abandon_on_cancel=True)
            finally:
                file.give_up()
            self._has_passed = True
        except (StateFileError, OSError, MemoryError, RuntimeError):
            pass  # the check of the final file says it; RuntimeError: no thread was to be had
        finally:
            self._ended.set()

    def _is_leased(self) -> bool:
        return self._leased is not None and leases.is_held(self._leased)

    def _give_way(self) -> None:
        leased, self._leased = self._leased, None
        if leased is not None:
            with contextlib.suppress(OSError):  # a thread may have a copy of the descriptor
                leases.give_back(leased)
            os.close(leased)


def _open_leased(path: str) -> int | None:
    """Open the file and take a lease on it; None for whatever is not as it should be."""
    try:
        descriptor = os.open(path, OPEN_FLAGS)
    except OSError:
        return None
    try:
        if has_one_name(os.fstat(descriptor)):
            leases.take(descriptor)
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None
