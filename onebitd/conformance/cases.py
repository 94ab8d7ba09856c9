"""The cases of the kit, in the order in which they are run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from onebitd.conformance.bench import Bench
from onebitd.conformance.fault_cases import FAULT_CASES, FaultCases
from onebitd.conformance.prompt_cases import PROMPT_CASES, PromptCases

CASES: Final = (*PROMPT_CASES, *FAULT_CASES)


def run_cases(bench: Bench, cases: Sequence[str]) -> None:
    """Run these cases in their order; DecoderFailed when the decoder fails for good."""
    prompts = PromptCases(bench)
    faults: FaultCases | None = None
    for case in cases:
        if case in PROMPT_CASES:
            prompts.run(case)
            continue
        if faults is None:
            faults = FaultCases(bench, prompts.prompt("short"), prompts.prompt("long"))
        faults.run(case)
