"""What the kit makes of what it has seen: findings, each a verdict and a sentence to act on.

Pure functions; the names of cases, checks and figures are promises of onebitctl(1).
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

from onebitd.conformance.decoder import Reply
from onebitd.conformance.provider_run import CANCEL_GRACE_S, TERM_GRACE_S, Ended
from onebitd.core import provider_contract
from onebitd.core.state_compare import RMS_PART, StateDiff, TensorDiff

CLOSE_CALL: Final = 0.1
"""Log-probabilities of two tokens so near to each other that any rounding may swap them."""
DRIFT_FACTOR: Final = 2.0
"""A tie is also as close as the first token's log-probabilities are off, times this: each of two
may have moved by that."""
_SHOWN_NAMES: Final = 4

Figures: TypeAlias = Mapping[str, int | float | str | None]


class Verdict(StrEnum):
    """`note` is worth reading and breaks nothing."""

    OK = "ok"
    FAIL = "fail"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One line of the table. `figures` are the numbers behind the sentence."""

    case: str
    check: str
    verdict: Verdict
    text: str
    figures: Figures = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """Return it as the object that --json prints; a figure that is no number is null."""
        figures = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in self.figures.items()
        }
        found = {"case": self.case, "check": self.check, "verdict": self.verdict.value}
        return {**found, "text": self.text, **figures}


def listed(names: Sequence[str]) -> str:
    """Return the first few of some names, and how many more there are."""
    more = len(names) - _SHOWN_NAMES
    shown = ", ".join(names[:_SHOWN_NAMES])
    return f"{shown} and {more} more" if more > 0 else shown


def exit_words(status: int) -> str:
    """Return `status 3` or `SIGSEGV`."""
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def judge_exit(case: str, ended: Ended, timeout_s: float) -> Finding:
    """Judge the end of a run that should have been a success."""
    said = f": {ended.last_words}" if ended.last_words else ", and stderr is empty"
    figures: Figures = {"status": ended.status, "wall_ms": round(ended.wall_s * 1000, 1)}
    if ended.timed_out:
        text = f"no end within {timeout_s:g} s (--timeout){said}"
        return Finding(case, "exit", Verdict.FAIL, text, figures)
    if ended.status:
        text = f"ended with {exit_words(ended.status)}{said}"
        return Finding(case, "exit", Verdict.FAIL, text, figures)
    return Finding(case, "exit", Verdict.OK, "status 0", figures)


def judge_processes(case: str, ended: Ended) -> list[Finding]:
    """Judge what a run has left running or taken away; nothing is said about a clean one."""
    found = []
    if ended.directory_problem:
        found.append(Finding(case, "file", Verdict.FAIL, ended.directory_problem))
    if ended.left_running:
        text = (
            f"it ended and left {listed(ended.left_running)} running in its process group; "
            "wait for every child before you exit"
        )
        found.append(Finding(case, "processes", Verdict.FAIL, text))
    if ended.escaped:
        text = (
            f"{listed(ended.escaped)} runs on in a session of its own; "
            "onebitd does not end it, not even with the daemon"
        )
        found.append(Finding(case, "processes", Verdict.NOTE, text))
    return found


def judge_file(case: str, ended: Ended, problem: str | None, *, is_there: bool) -> list[Finding]:
    """Judge where the state file was and how it came there, after status 0."""
    faults = []
    if not ended.was_there:
        faults.append(
            "it ended with status 0 before there was a file at --out; "
            "exit when the whole of it is written"
            if is_there
            else "it ended with status 0 and wrote no file at --out"
        )
    elif problem is not None:
        faults.append(f"the file at --out {problem}")
    if ended.in_place:
        faults.append(
            "the file was written under its own name, so half of it can be taken for a whole; "
            "write to another name in that directory, then rename"
        )
    if ended.leftovers:
        faults.append(f"left {listed(ended.leftovers)} beside the state file; remove it")
    if faults:
        return [Finding(case, "file", Verdict.FAIL, text) for text in faults]
    return [Finding(case, "file", Verdict.OK, "whole when it appeared, nothing beside it")]


def judge_values(case: str, diff: StateDiff, tolerance: float) -> Finding:
    """Judge how far the values are from the decoder's own."""
    worst = diff.worst
    if worst is None or not diff.compared_values:
        why = "; ".join(diff.notes) or "there are no values"
        return Finding(case, "values", Verdict.FAIL, f"nothing could be compared: {why}")
    figures: Figures = {
        "layer": worst.layer,
        "part": worst.part,
        "section": worst.section,
        "row_error": worst.row_error,
        "rms_error": worst.rms_error,
        "max_abs": worst.max_abs,
        "cosine": worst.cosine,
        "position": worst.worst_pos,
        "head_scale": worst.head_scale,
        "cause": worst.cause,
        "tensors": len(diff.tensors),
        "tensors_off": sum(not tensor.within for tensor in diff.tensors),
    }
    if diff.within:
        text = (
            f"{len(diff.tensors)} tensors, largest row error {worst.row_error:.2g} "
            f"({worst.what}, position {worst.worst_pos}), tolerance {tolerance:g}"
        )
        return Finding(case, "values", Verdict.OK, text, figures)
    return Finding(case, "values", Verdict.FAIL, _off_sentence(diff, worst, tolerance), figures)


def _off_sentence(diff: StateDiff, worst: TensorDiff, tolerance: float) -> str:
    off = [tensor for tensor in diff.tensors if not tensor.within]
    if not off:
        return "; ".join(diff.notes)
    named = next((tensor for tensor in off if tensor.cause), worst)
    text = f"{named.what}: row error {named.row_error:.2g} at position {named.worst_pos}"
    text += f", tolerance {tolerance:g}"
    if named.row_error <= tolerance < RMS_PART * named.rms_error:
        text = f"{named.what}: the root mean square of its row errors is {named.rms_error:.2g}"
        text += f", {tolerance / RMS_PART:.2g} allowed"
    elif named.row_error <= tolerance:
        text = f"{named.what}: head {named.head} is {named.head_scale:.4f} times the decoder's"
    if named.cause:
        text += f"; {named.cause}"
    if len(off) > 1:
        text += f"; {len(off)} of {len(diff.tensors)} tensors are off, the first is {off[0].what}"
    return "; ".join((text, *diff.notes))


def judge_restore(
    case: str, n_handed: int, size: int, restored: tuple[int, int], reply: Reply
) -> Finding:
    """Judge what the decoder made of the file, and whether it evaluated one token only."""
    n_restored, n_read = restored
    figures: Figures = {
        "n_restored": n_restored,
        "n_read": n_read,
        "cached_tokens": reply.cached,
        "evaluated_tokens": reply.evaluated,
    }
    faults = []
    if n_restored != n_handed:
        faults.append(f"the decoder restored {n_restored} of {n_handed} tokens")
    if n_read != size:
        faults.append(f"the decoder read {n_read} of the file's {size} bytes")
    if (reply.cached, reply.evaluated) != (n_handed, 1):
        faults.append(
            f"the decoder used {reply.cached} of {n_handed} tokens and evaluated {reply.evaluated}"
        )
    if faults:
        return Finding(case, "restore", Verdict.FAIL, "; ".join(faults), figures)
    text = f"{_tokens(n_restored)} restored, 1 evaluated"
    return Finding(case, "restore", Verdict.OK, text, figures)


def logprob_difference(ours: Reply, theirs: Reply) -> float | None:
    """Return how far the first token's log-probabilities are apart, None without common tokens."""
    if not ours.tokens or not theirs.tokens:
        return None
    one, other = ours.tokens[0].logprobs, theirs.tokens[0].logprobs
    return max(
        (abs(one[token] - other[token]) for token in one.keys() & other.keys()), default=None
    )


def judge_logprobs(case: str, reference: Reply, reply: Reply, tolerance: float) -> Finding:
    """Judge the log-probabilities of the first generated token."""
    found = logprob_difference(reference, reply)
    if found is None:
        text = "the likeliest first tokens have none in common with the decoder's own"
        return Finding(case, "logprobs", Verdict.FAIL, text, {"logprob_difference": None})
    figures: Figures = {"logprob_difference": found}
    text = f"the first token's log-probabilities differ by at most {found:.3g}"
    if found > tolerance:
        text += f", tolerance {tolerance:g} (--logprob-tolerance)"
        return Finding(case, "logprobs", Verdict.FAIL, text, figures)
    return Finding(case, "logprobs", Verdict.OK, text, figures)


def judge_reply(case: str, reference: Reply, reply: Reply, tolerance: float) -> Finding:
    """Judge the greedy reply: equal, or at first different where the decoder itself wavered.

    Args:
        tolerance: of log-probabilities; a larger difference explains nothing.
    """
    ours, theirs = reference.tokens, reply.tokens
    same = 0
    while same < min(len(ours), len(theirs)) and ours[same].id == theirs[same].id:
        same += 1
    if same == len(ours) == len(theirs):
        figures: Figures = {"tokens": same, "first_different": None, "margin": None}
        return Finding(case, "reply", Verdict.OK, f"{_tokens(same)} generated, all equal", figures)
    if same == min(len(ours), len(theirs)):
        text = f"the greedy reply has {len(theirs)} tokens, the decoder's own {len(ours)}"
        return Finding(case, "reply", Verdict.FAIL, text, {"first_different": same})
    margin = _margin(ours[same].logprobs, ours[same].id, theirs[same].id)
    drift = min(logprob_difference(reference, reply) or 0.0, tolerance)
    figures = {"tokens": len(ours), "first_different": same, "margin": margin}
    text = (
        f"token {same} of the greedy reply is {theirs[same].text!r}, the decoder's own is "
        f"{ours[same].text!r}"
    )
    if margin is None:
        return Finding(case, "reply", Verdict.FAIL, f"{text}, by far the likelier", figures)
    text += f", {margin:.3g} above it in log-probability"
    if margin <= max(CLOSE_CALL, DRIFT_FACTOR * drift):
        return Finding(case, "reply", Verdict.NOTE, f"{text}: a tie, no more", figures)
    return Finding(case, "reply", Verdict.FAIL, text, figures)


def _tokens(count: int) -> str:
    return f"{count} token{'s'[: count != 1]}"


def _margin(logprobs: Mapping[int, float], chosen: int, other: int) -> float | None:
    if chosen not in logprobs or other not in logprobs:
        return None
    return logprobs[chosen] - logprobs[other]


def judge_speed(case: str, ended: Ended, n_handed: int, decoder_ms: float) -> Finding:
    """Judge what the provider says of its time; how long it took is for the author to judge."""
    wall_ms = ended.wall_s * 1000.0
    reported_ms = provider_contract.reported_prefill_ms(ended.stdout)
    took_ms = wall_ms if reported_ms is None else reported_ms
    figures: Figures = {
        "wall_ms": round(wall_ms, 1),
        "prefill_ms": reported_ms,
        "handed_tokens": n_handed,
        "tokens_per_second": round(n_handed * 1000.0 / took_ms, 1) if took_ms else None,
        "decoder_prefill_ms": round(decoder_ms, 1),
        "ratio": round(took_ms / decoder_ms, 3) if decoder_ms else None,
    }
    text = f"{_tokens(n_handed)}: run {wall_ms:.0f} ms"
    if reported_ms is not None:
        text += f", prefill {reported_ms:.1f} ms"
    if took_ms:
        text += f", {n_handed * 1000.0 / took_ms:.0f} tokens/s"
    text += f"; the decoder itself {decoder_ms:.1f} ms"
    if reported_ms is None:
        text += '; no {"prefill_ms": MS} on the last line of stdout'
        return Finding(case, "speed", Verdict.NOTE, text, figures)
    if reported_ms > wall_ms:
        text += "; prefill_ms is longer than the whole run: is it in milliseconds?"
        return Finding(case, "speed", Verdict.FAIL, text, figures)
    return Finding(case, "speed", Verdict.OK, text, figures)


def judge_refusal(case: str, what: str, ended: Ended, timeout_s: float, *, out: bool) -> Finding:
    """Judge a run that had to fail, for it was given `what`.

    Args:
        out: something lies at --out afterwards.
    """
    faults = []
    if ended.timed_out:
        faults.append(f"no end within {timeout_s:g} s (--timeout); refuse it at once")
    elif ended.status == 0:
        faults.append("ended with status 0; end with another one, or onebitd takes it as a success")
    elif not ended.last_words:
        faults.append(
            f"ended with {exit_words(ended.status)} and an empty stderr; say why on its last line"
        )
    if out:
        faults.append("there is a file at --out all the same")
    if ended.leftovers:
        faults.append(f"left {listed(ended.leftovers)}")
    figures: Figures = {"status": ended.status, "detail": ended.last_words}
    if faults:
        return Finding(case, "refusal", Verdict.FAIL, f"{what}: {'; '.join(faults)}", figures)
    text = f"{what}: {exit_words(ended.status)}, {ended.last_words}"
    return Finding(case, "refusal", Verdict.OK, text, figures)


def judge_stop(case: str, signum: int, ended: Ended, *, whole: bool, out: bool) -> list[Finding]:
    """Judge a run that got a signal on its way.

    Args:
        whole: what lies at --out is a whole state file.
    """
    name = signal.Signals(signum).name
    figures: Figures = {"status": ended.status}
    if ended.grace_s is not None:
        figures = {**figures, "grace_ms": round(ended.grace_s * 1000.0, 1)}
    if not ended.signalled:
        text = f"it ended before {name} could be sent; a longer prompt is needed to see more"
        return [Finding(case, "stop", Verdict.NOTE, text, figures)]
    faults = [ended.directory_problem] if ended.directory_problem else []
    notes = []
    if ended.timed_out:
        faults.append(
            f"still ran {TERM_GRACE_S:g} s after {name} and had to be killed; end at once, "
            "without a file"
        )
    elif signum == signal.SIGTERM and (ended.grace_s or 0.0) > CANCEL_GRACE_S:
        notes.append(
            f"it took {ended.grace_s:.2f} s to end after {name}; when a client leaves, onebitd "
            f"kills it after {CANCEL_GRACE_S:g} s"
        )
    if ended.left_running:
        faults.append(f"left {listed(ended.left_running)} running in its process group")
    if out and not whole:
        faults.append(f"{name} left a file at --out that is not whole")
    elif out and ended.status:
        notes.append(f"{name} left a whole file at --out and {exit_words(ended.status)}")
    if ended.status == 0 and not whole and not ended.timed_out:
        faults.append(f"ended with status 0 after {name} without a whole file")
    if ended.leftovers and not ended.timed_out:
        left = f"{name} left {listed(ended.leftovers)}"
        if signum == signal.SIGKILL:
            notes.append(f"{left}; onebitd removes it with the run's directory")
        else:
            faults.append(f"{left}; remove it")
    if ended.escaped:
        notes.append(f"{listed(ended.escaped)} runs on in a session of its own")
    if not faults and not notes:
        notes_text = f"ended {1000.0 * (ended.grace_s or 0.0):.0f} ms after {name}, nothing left"
        return [Finding(case, "stop", Verdict.OK, notes_text, figures)]
    return [
        *(Finding(case, "stop", Verdict.FAIL, text, figures) for text in faults),
        *(Finding(case, "stop", Verdict.NOTE, text, figures) for text in notes),
    ]
