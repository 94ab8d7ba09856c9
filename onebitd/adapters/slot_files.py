"""The private directory of state files and ids files (`slots/`), and one run's files in it.

Each provider run gets a directory of its own, so that whatever the provider leaves (temporary
names too) goes with it. The state file is opened once without following links, checked on that
descriptor, and renamed to the name that the decoder is given.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import trio

from onebitd.adapters import leases
from onebitd.adapters.directory_watch import DirectoryWatch
from onebitd.adapters.early_check import EarlyCheck
from onebitd.adapters.state_reader import OPEN_FLAGS, OpenFile, has_one_name, is_small
from onebitd.core import provider_contract
from onebitd.core.errors import ConfigError, HandoffError, StateFileError
from onebitd.core.handoff import Reason
from onebitd.core.state_data import Baseline
from onebitd.core.state_layout import Layout

_RUN_PREFIX: Final = "run-"
_STATE_PREFIX: Final = "state-"
_EXAMPLE_NAME: Final = "example.state"
_SPACE_RESERVE_BYTES: Final = 1024 * 1024


class SlotFiles:
    """The directory; `path` is the decoder's --slot-save-path.

    Args:
        path: made with mode 0700 if it is missing.

    Raises:
        ConfigError: it cannot be made, or is not a directory of ours.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._name = str(path)  # a path's own operators cost more than the system calls
        self._example: bytes | None = None
        self._example_path = f"{path}/{_EXAMPLE_NAME}"
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = path.lstat()
            if not stat.S_ISDIR(info.st_mode) or info.st_uid not in (os.geteuid(), 0):
                raise ConfigError([f"{path}: not a directory of user {os.geteuid()}; remove it"])
            path.chmod(0o700)
        except OSError as error:
            raise ConfigError(
                [f"{path}: cannot hold state files: {error.strerror}; check handoff.state_dir"]
            ) from error

    def sweep(self) -> int:
        """Remove what an earlier daemon left here; return how many entries that were."""
        count = 0
        try:
            entries = list(self.path.iterdir())
        except OSError:
            return 0  # somebody removed the directory, so there is nothing to remove
        for entry in entries:
            if entry.name.startswith((_RUN_PREFIX, _STATE_PREFIX, _EXAMPLE_NAME)):
                _remove(entry)
                count += 1
        return count

    def ensure(self) -> None:
        """Make the directory again if somebody removed it; a failure shows when it is used."""
        with contextlib.suppress(OSError):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def new_name(self) -> str:
        """Return a file name that nobody here has yet."""
        return f"{_STATE_PREFIX}{secrets.token_hex(8)}"

    def remove(self, name: str) -> None:
        """Remove a state file; it may be gone already."""
        _remove(f"{self._name}/{name}")

    def keep_example(self, name: str) -> None:
        """Keep a state file of the running decoder for providers to read; without one they guess.

        Args:
            name: of a file here, which is renamed.
        """
        self._example = None
        with contextlib.suppress(OSError):
            (self.path / name).chmod(0o600)  # llama-server's umask may be any
            (self.path / name).replace(self._example_path)
            self._example = Path(self._example_path).read_bytes()

    def drop_example(self) -> None:
        """Remove the example: the decoder that wrote it is gone."""
        self._example = None
        _remove(self._example_path)

    def example(self) -> str | None:
        """Return the path of the decoder's example, None while there is none.

        It is written again if somebody removed it: the decoder will not until it restarts.
        """
        path = self._example_path
        if os.path.isfile(path):
            return path
        if self._example is not None:
            with contextlib.suppress(OSError):
                self.ensure()
                _write_private(path, self._example)
        return path if os.path.isfile(path) else None

    def check_space(self, wanted_bytes: int) -> None:
        """See that a state file of this size fits.

        Raises:
            HandoffError: `no_space`.
        """
        try:
            info = self._statvfs()
        except OSError as error:
            raise HandoffError(
                Reason.NO_SPACE, f"{self.path} cannot hold a state file: {error.strerror}"
            ) from error
        free = info.f_bavail * info.f_frsize
        if free < wanted_bytes + _SPACE_RESERVE_BYTES:
            raise HandoffError(
                Reason.NO_SPACE,
                f"{self.path} has {free >> 20} MiB free, the state needs {wanted_bytes >> 20} MiB; "
                "make room or set handoff.state_dir",
            )

    def _statvfs(self) -> os.statvfs_result:
        try:
            return os.statvfs(self._name)
        except FileNotFoundError:
            self.ensure()
            return os.statvfs(self._name)

    def new_run(self, tokens: Sequence[int]) -> RunFiles:
        """Make one run's directory with its ids file; the caller removes it.

        Raises:
            HandoffError: `no_space`, whatever keeps the ids from being written.
        """
        run = RunFiles(self, f"{self._name}/{_RUN_PREFIX}{secrets.token_hex(8)}")
        try:
            os.mkdir(run.directory, mode=0o700)
            _write_private(run.tokens_path, provider_contract.format_tokens(tokens))
        except OSError as error:
            run.remove()
            raise HandoffError(
                Reason.NO_SPACE, f"cannot write the ids file in {self.path}: {error.strerror}"
            ) from error
        return run


class RunFiles:
    """One run's directory; `remove()` takes it away with all that is in it.

    Attributes:
        directory: its path.
        tokens_path: of the ids file.
        state_path: where the provider writes its state file.
    """

    def __init__(self, slots: SlotFiles, directory: str) -> None:
        self._slots = slots
        self.directory = directory
        self.tokens_path = f"{directory}/{provider_contract.TOKENS_FILE}"
        self.state_path = f"{directory}/{provider_contract.STATE_FILE}"

    def write_header(self, header: bytes) -> str:
        """Write the decoder's share message for the provider; return its path.

        Raises:
            HandoffError: `no_space`, whatever keeps it from being written.
        """
        path = f"{self.directory}/{provider_contract.HEADER_FILE}"
        try:
            _write_private(path, header)
        except OSError as error:
            raise HandoffError(
                Reason.NO_SPACE, f"cannot write the layout file {path}: {error.strerror}"
            ) from error
        return path

    def early_check(
        self,
        watch: DirectoryWatch,
        layout: Layout,
        tokens: Sequence[int],
        swa_window: int | None,
        baseline: Baseline | None = None,
    ) -> EarlyCheck:
        """Return what checks the state file beside the provider's end, for `take_state`.

        Args:
            watch: see `EarlyCheck`; the rest as for `state_check.check`.
        """
        what = (layout, tuple(tokens), swa_window, baseline)
        return EarlyCheck(self.state_path, watch, lambda file: file.check(*what))

    async def take_state(
        self,
        layout: Layout,
        tokens: Sequence[int],
        swa_window: int | None,
        baseline: Baseline | None = None,
        *,
        early: EarlyCheck | None = None,
    ) -> tuple[str, int]:
        """Check the provider's state file, a big one off the event loop, and move it into place.

        Args: as for `state_check.check`, and what `early_check` returned for the same, if it was
            running beside the provider: a file that it vouches for is not read again.

        Returns:
            The name in the slot directory, and the size in bytes. The caller removes the file.

        Raises:
            HandoffError: `provider_no_file` or `bad_state`.

        A cancel leaves the check to end by itself in its thread, soon; the file stays in the run's
        directory.
        """
        if early is not None:
            await early.wait_ended()
        descriptor = _open_state(self.state_path)
        try:
            identity = os.fstat(descriptor)
            if early is None or not early.vouches_for(identity):
                await _check(os.dup(descriptor), layout, tuple(tokens), swa_window, baseline)
            name = self._slots.new_name()
            target = f"{self._slots.path}/{name}"
            os.fchmod(descriptor, 0o600)
            os.rename(self.state_path, target)
            moved = os.lstat(target)
        except OSError as error:
            raise HandoffError(
                Reason.BAD_STATE, f"the state file cannot be taken over: {error.strerror}"
            ) from error
        finally:
            os.close(descriptor)
        if (moved.st_dev, moved.st_ino, moved.st_size) != (
            identity.st_dev,
            identity.st_ino,
            identity.st_size,
        ):
            self._slots.remove(name)
            raise HandoffError(Reason.BAD_STATE, "the state file was changed while it was checked")
        return name, moved.st_size

    def remove(self) -> None:
        """Remove the directory and everything in it."""
        try:  # all that there is once a good state was taken
            os.unlink(self.tokens_path)
            os.rmdir(self.directory)
        except OSError:
            _remove(self.directory)


def _open_state(path: str) -> int:
    try:
        descriptor = os.open(path, OPEN_FLAGS)
    except FileNotFoundError:
        raise HandoffError(
            Reason.PROVIDER_NO_FILE, "the provider ended with status 0 and wrote no state file"
        ) from None
    except OSError as error:
        what = "a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise HandoffError(Reason.BAD_STATE, f"cannot open the state file: {what}") from error
    try:
        if not has_one_name(os.fstat(descriptor)):
            raise HandoffError(
                Reason.BAD_STATE, "the state file is not a regular file with one name"
            )
        # It could change while it is read, or after. On file systems without leases the end of the
        # provider's process group has to do.
        if leases.has_writer(descriptor):
            raise HandoffError(
                Reason.BAD_STATE, "some process still has the state file open for writing"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


async def _check(
    descriptor: int,
    layout: Layout,
    tokens: tuple[int, ...],
    swa_window: int | None,
    baseline: Baseline | None,
) -> None:
    """Check a file, a big one in another thread; closes the descriptor, whatever happens."""
    file = OpenFile(descriptor)
    check = functools.partial(file.check, layout, tokens, swa_window, baseline)
    try:
        if is_small(file.size):
            check()
        else:
            await trio.to_thread.run_sync(check, abandon_on_cancel=True)
    except StateFileError as error:
        raise HandoffError(Reason.BAD_STATE, error.wording) from error
    except OSError as error:
        raise HandoffError(
            Reason.BAD_STATE, f"the state file cannot be read: {error.strerror}"
        ) from error
    finally:
        file.give_up()


def _write_private(path: str, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
    finally:
        os.close(descriptor)


def _remove(path: str | Path) -> None:
    """Remove what can be removed; the rest is for the next sweep, and no request's fault."""
    try:
        os.unlink(path)
    except IsADirectoryError:
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        pass
