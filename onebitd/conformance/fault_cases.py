"""Faults: runs that must fail in good order, and runs that are stopped on their way."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Final

from onebitd.conformance import judge
from onebitd.conformance.bench import Bench, CaseRun
from onebitd.conformance.judge import Finding, Verdict
from onebitd.core import provider_contract

FAULT_CASES: Final[Mapping[str, str]] = {
    "bad-ids": "an ids file with a line that is no number",
    "empty-ids": "an empty ids file",
    "unknown-id": "an id that the vocabulary does not have",
    "no-model": "a model file that does not exist",
    "no-directory": "an --out that cannot be written",
    "sigterm": "SIGTERM in the middle of the long prompt",
    "sigkill": "SIGKILL in the middle of the long prompt",
    "together": "two runs at once, which onebitd never starts",
}

_SIGNAL_PLACES: Final = (0.5, 0.25, 0.0)
"""Where in a run a signal is sent, as a part of its usual time; earlier if it was over by then."""


class FaultCases:
    """Runs them.

    Args:
        short, long: ids of two prompts, the last one included.
    """

    def __init__(self, bench: Bench, short: Sequence[int], long: Sequence[int]) -> None:
        self._bench = bench
        self._short = short
        self._long = long
        self._long_s: float | None = None

    def run(self, case: str) -> None:
        """Run one and report on it."""
        if case in ("sigterm", "sigkill"):
            self._run_stopped(case, signal.Signals[case.upper()])
        elif case == "together":
            self._run_together(case)
        else:
            self._run_refused(case)

    def _run_refused(self, case: str) -> None:
        ids, model, out_name = (
            provider_contract.format_tokens(self._short[:-1]),
            None,
            None,
        )
        if case == "bad-ids":
            ids = b"1\nnot a number\n2\n"
        elif case == "empty-ids":
            ids = b""
        elif case == "no-model":
            model = str(self._bench.home / "no-such-model.gguf")
        elif case == "no-directory":
            out_name = f"no-directory/{provider_contract.STATE_FILE}"
        elif self._bench.model.n_vocab is None:
            text = "the model's file does not tell the size of its vocabulary"
            self._bench.report(Finding(case, "refusal", Verdict.NOTE, text))
            return
        else:
            ids += b"%d\n" % self._bench.model.n_vocab
        what = FAULT_CASES[case]
        self._bench.progress(f"{case}: the provider is given {what}")
        with CaseRun(self._bench, case, ids, model=model, out_name=out_name) as run:
            if out_name is not None:
                # A directory without write permission would not stop root.
                run.out.parent.write_bytes(b"")
            ended = run.to_end()
            for finding in judge.judge_processes(case, ended):
                self._bench.report(finding)
            out, timeout_s = os.path.lexists(run.out), self._bench.invocation.timeout_s
            self._bench.report(judge.judge_refusal(case, what, ended, timeout_s, out=out))

    def _run_stopped(self, case: str, signum: int) -> None:
        ids = self._long
        usual_s = self._long_s
        if usual_s is None:
            self._bench.progress(f"{case}: how long does the long prompt take?")
            with CaseRun(self._bench, case, provider_contract.format_tokens(ids[:-1])) as run:
                usual_s = self._long_s = run.to_end().wall_s
        for place in _SIGNAL_PLACES:
            self._bench.progress(f"{case}: the provider is sent {signal.Signals(signum).name}")
            with CaseRun(self._bench, case, provider_contract.format_tokens(ids[:-1])) as run:
                ended = run.to_end(signum=signum, after_s=usual_s * place)
                if not ended.signalled and place:
                    continue
                out = os.path.lexists(run.out)
                whole = out and self._bench.state_problem(run.out, ids[:-1]) is None
                for finding in judge.judge_stop(case, signum, ended, whole=whole, out=out):
                    self._bench.report(finding)
                return

    def _run_together(self, case: str) -> None:
        """Report on two runs at once: a device that only one can use is no fault."""
        self._bench.progress(f"{case}: two runs at once")
        ids = self._short
        text_ids = provider_contract.format_tokens(ids[:-1])
        faults, removed = [], False
        with (
            CaseRun(self._bench, f"{case}-1", text_ids) as one,
            CaseRun(self._bench, f"{case}-2", text_ids) as two,
        ):
            one.start()
            two.start()
            for number, run in enumerate((one, two), start=1):
                ended = run.finish()
                if ended.directory_problem:
                    text = f"run {number}: {ended.directory_problem}"
                    self._bench.report(Finding(case, "together", Verdict.FAIL, text))
                    removed = True
                elif ended.timed_out or ended.status:
                    said = f": {ended.last_words}" if ended.last_words else ""
                    faults.append(f"run {number} ended with {judge.exit_words(ended.status)}{said}")
                elif not os.path.lexists(run.out) or self._bench.state_problem(run.out, ids[:-1]):
                    faults.append(f"run {number} made no good file")
        if faults:
            self._bench.report(Finding(case, "together", Verdict.NOTE, "; ".join(faults)))
        elif not removed:
            self._bench.report(Finding(case, "together", Verdict.OK, "both made a good file"))
