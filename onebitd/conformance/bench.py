"""What every case has at hand, and one run of the provider within a case."""

from __future__ import annotations

import dataclasses
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from onebitd import prefill_llama
from onebitd.conformance.decoder import Decoder
from onebitd.conformance.judge import Finding
from onebitd.conformance.provider_run import Ended, Invocation, OpenState, ProviderRun, file_problem
from onebitd.core import state_check
from onebitd.core.errors import StateFileError, UsageError
from onebitd.core.state_data import Baseline
from onebitd.core.state_layout import Layout


@dataclass(frozen=True)
class Limits:
    """What the author states: how far the provider's values may be from the decoder's."""

    tolerance: float
    scale_tolerance: float
    logprob_tolerance: float


@dataclass(frozen=True)
class ModelFacts:
    """What the cases need of the model's header."""

    sliding_window: int | None
    n_vocab: int | None
    head_dim: int | None


@dataclass(frozen=True)
class Bench:
    """What the cases work with.

    Attributes:
        layout, baseline: what the decoder's own state files are like.
        keep: a directory that gets the files of each case, or None.
        report: gets each finding when it is made.
        progress: gets what is being done, as words.
    """

    decoder: Decoder
    layout: Layout
    baseline: Baseline
    invocation: Invocation
    model: ModelFacts
    limits: Limits
    home: Path
    keep: Path | None
    signals: prefill_llama.StopSignals
    report: Callable[[Finding], None]
    progress: Callable[[str], None]

    def state_problem(self, path: Path, handed: Sequence[int]) -> str | None:
        """Return why onebitd would not give a file of these tokens to the decoder, else None."""
        problem = file_problem(path)
        if problem is not None:
            return f"the file {problem}"
        source = OpenState(path)
        try:
            state_check.check(
                source,
                self.layout,
                handed,
                swa_window=self.model.sliding_window,
                baseline=self.baseline,
            )
        except StateFileError as error:
            return str(error)
        finally:
            source.close()
        return None


class CaseRun:
    """A provider run within the kit: its directory, its files, and where they are kept."""

    def __init__(
        self,
        bench: Bench,
        case: str,
        ids: bytes,
        *,
        model: str | None = None,
        out_name: str | None = None,
    ) -> None:
        self._bench = bench
        self._case = case
        self._slots = bench.decoder.slots
        self._before = set(os.listdir(self._slots))
        directory = self._slots / f"run-{case}"
        self._run = ProviderRun(
            bench.invocation,
            directory,
            ids,
            model=model,
            out=None if out_name is None else directory / out_name,
        )
        self.out = self._run.out
        self.reference: Path | None = None  # the decoder's own file, to be kept with the case's

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._run.close()
        if self._bench.keep is not None:
            self._save(self._bench.keep / self._case)
        if self._run.directory.is_symlink() or self._run.directory.is_file():
            self._run.directory.unlink(missing_ok=True)
        shutil.rmtree(self._run.directory, ignore_errors=True)

    def to_end(self, *, signum: int | None = None, after_s: float = 0.0) -> Ended:
        """Run it and return what it did; see ProviderRun.finish."""
        self.start()
        return self.finish(signum=signum, after_s=after_s)

    def start(self) -> None:
        """Start it."""
        self._run.start(self._bench.signals)

    def finish(self, *, signum: int | None = None, after_s: float = 0.0) -> Ended:
        """Wait for its end; see ProviderRun.finish."""
        ended = self._run.finish(signum=signum, after_s=after_s)
        beside = {
            name
            for name in set(os.listdir(self._slots)) - self._before
            if not name.startswith("run-")
        }
        if not beside:
            return ended
        names = (*ended.leftovers, *sorted(f"../{name}" for name in beside))
        return dataclasses.replace(ended, leftovers=names)

    def _save(self, target: Path) -> None:
        """Copy the run's files, its output and the decoder's own file to a directory."""
        try:
            self._copy(target)
        except OSError as error:  # of several files, copytree has a list instead of strerror
            why = error.strerror or "not every file can be copied"
            raise UsageError(f"--keep {target}: {why}") from error

    def _copy(self, target: Path) -> None:
        shutil.rmtree(target, ignore_errors=True)
        if self._run.directory.is_dir():  # unless the provider removed it
            shutil.copytree(self._run.directory, target, symlinks=True, ignore=_special_files)
        target.mkdir(exist_ok=True)
        target.chmod(0o700)
        for stream, said in self._run.output().items():
            (target / stream).write_bytes(said)
        if self.reference is not None:
            shutil.copyfile(self.reference, target / "reference.state")


def _special_files(directory: str, names: list[str]) -> list[str]:
    """Return the FIFOs, sockets and devices, which have nothing that could be kept."""
    kept = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
    modes = {name: os.lstat(os.path.join(directory, name)).st_mode for name in names}
    return [name for name, mode in modes.items() if stat.S_IFMT(mode) not in kept]
