"""Prompts: the provider's file for each is checked, compared, restored and decoded from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from onebitd.conformance import judge, prompts
from onebitd.conformance.bench import Bench, CaseRun
from onebitd.conformance.decoder import DecoderDied, DecoderRefused, Reply
from onebitd.conformance.judge import Finding, Verdict
from onebitd.conformance.provider_run import Ended, OpenState, file_problem
from onebitd.core import provider_contract, state_compare, state_file
from onebitd.core.errors import StateFileError
from onebitd.core.state_compare import StateDiff

PROMPT_CASES: Final[Mapping[str, str]] = {
    "short": "a sentence",
    "one-token": "one token is handed over",
    "special": "a chat with the model's special tokens",
    "non-ascii": "many scripts, and emoji",
    "repeat": "the short prompt again: is the file the same?",
    "long": "several hundred tokens",
    "prefix": "the first half of the long prompt",
    "context": "the longest prompt that the decoder takes",
}

REPLY_TOKENS: Final = 16
_REFERENCE: Final = "reference.state"


@dataclass(frozen=True)
class _Reference:
    """What the decoder itself makes of a prompt."""

    state: Path
    reply: Reply
    prefill_ms: float


class PromptCases:
    """Runs them; one that goes wrong ends where the next look would say nothing new."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._prompts: dict[str, list[int]] = {}
        self._reference_ids: list[int] = []
        self._reference: _Reference | None = None
        self._first_file: Path | None = None

    def prompt(self, case: str) -> list[int]:
        """Return the ids of a prompt case, the last one included; none where it cannot be made."""
        name = "short" if case == "repeat" else case
        if name not in self._prompts:
            self._prompts[name] = self._make_prompt(name)
        return self._prompts[name]

    def _make_prompt(self, name: str) -> list[int]:
        decoder, most = self._bench.decoder, self._bench.decoder.n_ctx - 1
        if name == "special":
            return prompts.special_ids(decoder.tokenize, decoder.chat_text)[:most]
        if name == "non-ascii":
            return decoder.tokenize(prompts.NON_ASCII)[:most]
        if name == "context":
            return prompts.long_ids(decoder.tokenize, most)
        if name == "long":
            length = prompts.long_length(decoder.n_ctx, self._bench.model.sliding_window)
            return prompts.long_ids(decoder.tokenize, length)
        if name == "prefix":
            whole = self.prompt("long")
            return whole[: len(whole) // 2]
        ids = decoder.tokenize(prompts.SHORT)[:most]
        return ids[:2] if name == "one-token" else ids

    def run(self, case: str) -> None:
        """Run one and report on it."""
        ids = self.prompt(case)
        if len(ids) < 2:
            self._bench.report(Finding(case, "exit", Verdict.NOTE, "the model has no such tokens"))
            return
        self._bench.progress(f"{case}: the provider prefills {len(ids) - 1} tokens")
        with CaseRun(self._bench, case, provider_contract.format_tokens(ids[:-1])) as run:
            ended = run.to_end()
            if self._took_well(case, run, ended):
                self._compare(case, run, ended, ids)

    def _took_well(self, case: str, run: CaseRun, ended: Ended) -> bool:
        """Report on the end of a run, and say whether there is a file to look into."""
        found = judge.judge_exit(case, ended, self._bench.invocation.timeout_s)
        self._bench.report(found)
        for finding in judge.judge_processes(case, ended):
            self._bench.report(finding)
        if found.verdict is Verdict.FAIL or ended.directory_problem:
            return False
        is_there = os.path.lexists(run.out)
        problem = file_problem(run.out) if is_there else None
        for finding in judge.judge_file(case, ended, problem, is_there=is_there):
            self._bench.report(finding)
        return is_there and problem is None

    def _compare(self, case: str, run: CaseRun, ended: Ended, ids: Sequence[int]) -> None:
        if not self._check_state(case, run.out, ids[:-1]):
            return
        self._bench.progress(f"{case}: the decoder evaluates {len(ids)} tokens")
        reference = self._refer(ids)
        run.reference = reference.state
        diff = self._diff(run.out, reference.state)
        self._bench.report(judge.judge_values(case, diff, self._bench.limits.tolerance))
        self._restore(case, run.out, ids, reference)
        self._bench.report(judge.judge_speed(case, ended, len(ids) - 1, reference.prefill_ms))
        self._same_again(case, run.out)

    def _check_state(self, case: str, path: Path, handed: Sequence[int]) -> bool:
        problem = self._bench.state_problem(path, handed)
        if problem is not None:
            self._bench.report(Finding(case, "state", Verdict.FAIL, f"bad_state: {problem}"))
            return False
        size = path.stat().st_size
        text = f"{size} bytes, laid out as the decoder's own"
        self._bench.report(Finding(case, "state", Verdict.OK, text, {"state_bytes": size}))
        return True

    def _refer(self, ids: Sequence[int]) -> _Reference:
        """Have the decoder evaluate the ids itself, unless the last case's were the same."""
        if self._reference is None or self._reference_ids != list(ids):
            prefill_ms = self._bench.decoder.prefill(ids[:-1])
            state = self._bench.decoder.save(_REFERENCE)
            reply = self._bench.decoder.reply(ids, self._reply_tokens(ids))
            self._reference, self._reference_ids = _Reference(state, reply, prefill_ms), list(ids)
        return self._reference

    def _reply_tokens(self, ids: Sequence[int]) -> int:
        return max(1, min(REPLY_TOKENS, self._bench.decoder.n_ctx - len(ids)))

    def _diff(self, path: Path, reference: Path) -> StateDiff:
        limits, layout = self._bench.limits, self._bench.layout
        ours, theirs = OpenState(reference), OpenState(path)
        try:
            return state_compare.compare(
                state_file.parse(theirs, layout),
                theirs,
                state_file.parse(ours, layout),
                ours,
                tolerance=limits.tolerance,
                scale_tolerance=limits.scale_tolerance,
                head_dim=self._bench.model.head_dim,
            )
        except StateFileError as error:
            return StateDiff((), (str(error),), 0, within=False)
        finally:
            ours.close()
            theirs.close()

    def _restore(self, case: str, path: Path, ids: Sequence[int], reference: _Reference) -> None:
        """Have the decoder go on from the provider's file."""
        name = f"state-{case}"
        os.link(path, self._bench.decoder.slots / name)
        try:
            self._bench.decoder.erase()
            restored = self._bench.decoder.restore(name)
            reply = self._bench.decoder.reply(ids, self._reply_tokens(ids))
        except DecoderRefused as error:
            text = f"the decoder refused the file: {error}"
            self._bench.report(Finding(case, "restore", Verdict.FAIL, text))
            return
        except DecoderDied as error:
            self._bench.report(Finding(case, "restore", Verdict.FAIL, f"given the file, {error}"))
            self._bench.decoder.restart()
            return
        finally:
            (self._bench.decoder.slots / name).unlink()
        size = path.stat().st_size
        self._bench.report(judge.judge_restore(case, len(ids) - 1, size, restored, reply))
        allowed = self._bench.limits.logprob_tolerance
        self._bench.report(judge.judge_logprobs(case, reference.reply, reply, allowed))
        self._bench.report(judge.judge_reply(case, reference.reply, reply, allowed))

    def _same_again(self, case: str, path: Path) -> None:
        """Keep the short prompt's file, and hold that of its repetition against it."""
        if case == "short":
            self._first_file = self._bench.home / "first.state"
            os.link(path, self._first_file)
        elif case == "repeat" and self._first_file is not None:
            if _same_bytes(self._first_file, path):
                text, figures = "byte for byte the same file", {"row_error": 0.0}
                self._bench.report(Finding(case, "repeat", Verdict.OK, text, figures))
                return
            worst = self._diff(path, self._first_file).worst
            if worst is None:
                text = "the same prompt gave another file, which cannot be compared"
                self._bench.report(Finding(case, "repeat", Verdict.NOTE, text))
                return
            text = (
                f"the same prompt gave another file: row error {worst.row_error:.2g} "
                f"({worst.what}, position {worst.worst_pos})"
            )
            figures = {"row_error": worst.row_error}
            self._bench.report(Finding(case, "repeat", Verdict.NOTE, text, figures))


def _same_bytes(one: Path, other: Path) -> bool:
    if one.stat().st_size != other.stat().st_size:
        return False
    with one.open("rb") as left, other.open("rb") as right:
        while data := left.read(1 << 20):
            if data != right.read(1 << 20):
                return False
    return True
