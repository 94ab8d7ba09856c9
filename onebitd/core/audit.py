"""Audits of live handoffs: which ones, in what steps, and what their outcome means.

An audit has the decoder evaluate a handed prompt itself and compares both caches. The effects are
in `services.audit`; here is every decision.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Final, Protocol

LEAST_STEP_TOKENS: Final = 64
"""llama.cpp computes fewer tokens at once in another way: its flash attention on the CPU sums in
another precision below 64, and GPUs multiply a few columns by other kernels. Measured on the CPU,
steps from 64 on give the bits of the whole prompt at once; with 8 to 48 the largest relative error
of a row is 0.15 (SmolLM2) and 9.7 (Gemma 3), which no corruption could be told from."""
STEP_S: Final = 0.05
"""A step that takes less than half of it is followed by a larger one."""
_BATCHES: Final = {"-ub": 512, "-b": 2048}
_BATCH_FLAGS: Final = {"--ubatch-size": "-ub", "--batch-size": "-b", "-ub": "-ub", "-b": "-b"}
"""llama.cpp's own defaults, and its names for both."""
_SCALE_SHARE: Final = 0.1
FIRST_QUIET_S: Final = 1.0
LAST_QUIET_S: Final = 60.0


class Measured(Protocol):
    """What is known of one tensor; `core.state_compare.TensorDiff` is one."""

    @property
    def part(self) -> str: ...
    @property
    def layer(self) -> int: ...
    @property
    def what(self) -> str: ...
    @property
    def row_error(self) -> float: ...
    @property
    def rms_error(self) -> float: ...
    @property
    def worst_pos(self) -> int: ...
    @property
    def first_off(self) -> int | None: ...
    @property
    def head_scale(self) -> float: ...
    @property
    def head(self) -> int | None: ...
    @property
    def cause(self) -> str | None: ...
    @property
    def within(self) -> bool: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What one audit found.

    Attributes:
        ok: every tensor is within the tolerances.
        layer, part, what: the tensor that is shown: the first that is off, else the worst.
        error: its largest relative row error.
        position: where it is first off, else where its error is largest.
        from_there: it is off from that position on, by rows that are above the tolerance.
        cause: a sentence, None when none fits.
        worst: the tensor with the largest row error of all that are off, and that error.
        off: how many tensors are off.
        of: how many were compared.
    """

    ok: bool
    layer: int
    part: str
    what: str
    error: float
    position: int
    from_there: bool
    cause: str | None
    worst: tuple[str, float]
    off: int
    of: int

    def words(self) -> str:
        """Return what was found, for a log line and a refusal."""
        if self.ok:
            return f"largest error {self.error:.2g} ({self.what}, position {self.position})"
        where = "from position {} on" if self.from_there else "at most, at position {}"
        words = f"{self.what} is off by {self.error:.2g} {where.format(self.position)}"
        if self.cause is not None:
            words += f": {self.cause}"
        if self.off > 1:
            words += f"; {self.off} of {self.of} tensors are off"
        if self.worst[0] != self.what:
            words += f", {self.worst[0]} most, by {self.worst[1]:.2g}"
        return words


def is_sampled(share: float, draw: float) -> bool:
    """Say whether a handoff is to be audited.

    Args:
        share: `handoff.audit`, from 0 (none) to 1 (all).
        draw: uniform, at least 0 and less than 1.
    """
    return draw < share


def ubatch_of(args: Sequence[str]) -> int:
    """Return how many tokens the decoder computes at once, from `backend.args`."""
    found = dict(_BATCHES)
    for flag, value in itertools.pairwise(args):
        if flag in _BATCH_FLAGS and value.isdecimal() and int(value) > 0:
            found[_BATCH_FLAGS[flag]] = int(value)
    return min(found.values())


def step_tokens(n_tokens: int, held: int, size: int, ubatch: int) -> int:
    """Return how many tokens the next step evaluates.

    No step goes past the end of a ubatch, as the decoder would fill them for the whole prompt, nor
    leaves less than `LEAST_STEP_TOKENS` of one for the step behind it.

    Args:
        n_tokens: of the whole prompt.
        held: tokens that the slot holds already, fewer than that.
        size: wanted.
        ubatch: see `ubatch_of`.
    """
    left = min(n_tokens, (held // ubatch + 1) * ubatch) - held
    return left if left < size + LEAST_STEP_TOKENS else size


def next_size(evaluated: int, took_s: float) -> int:
    """Return the size wanted next, after a step of so many tokens took so long."""
    fits = int(evaluated * STEP_S / max(took_s, 1e-6)) // LEAST_STEP_TOKENS * LEAST_STEP_TOKENS
    return max(LEAST_STEP_TOKENS, min(fits, 2 * evaluated))


def scale_tolerance(tolerance: float) -> float:
    """Return how far the scale of a head may be from 1, for `handoff.audit_tolerance`.

    What is wrong in all rows alike shows in the scale before it shows in any one row.
    """
    return tolerance * _SCALE_SHARE


def quiet_s(interruptions: int) -> float:
    """Return how long nobody must have been in line before an audit begins.

    Somebody who came in its middle comes again soon: each time it waits twice as long.
    """
    return float(min(LAST_QUIET_S, FIRST_QUIET_S * 2.0 ** min(interruptions, 30)))


def judge(tensors: Sequence[Measured], tolerance: float) -> Verdict | None:
    """Return the verdict on a comparison; None when no tensor was compared.

    Of what is off, the first layer is shown, not the worst: a fault spreads to the layers behind.

    Args:
        tensors: as compared.
        tolerance: `handoff.audit_tolerance`, with which they were.
    """
    if not tensors:
        return None
    off = [tensor for tensor in tensors if not tensor.within]
    off.sort(key=lambda tensor: (tensor.layer, tensor.part))
    shown = off[0] if off else max(tensors, key=lambda tensor: tensor.row_error)
    first = shown.worst_pos if shown.first_off is None else shown.first_off
    return Verdict(
        ok=not off,
        layer=shown.layer,
        part=shown.part,
        what=shown.what,
        error=shown.row_error,
        position=first,
        from_there=shown.first_off is not None,
        cause=shown.cause or _other_limit(shown, tolerance),
        worst=max(((one.what, one.row_error) for one in off or [shown]), key=lambda one: one[1]),
        off=len(off),
        of=len(tensors),
    )


def _other_limit(tensor: Measured, tolerance: float) -> str | None:
    """Say which limit a tensor is beyond, if no single row of it is above the tolerance."""
    if tensor.within or tensor.first_off is not None:
        return None
    if tensor.head is not None and abs(tensor.head_scale - 1) > scale_tolerance(tolerance):
        return f"head {tensor.head} is scaled by {tensor.head_scale:.4f}"
    return f"the root mean square of its rows' errors is {tensor.rms_error:.2g}"


@dataclasses.dataclass(frozen=True, slots=True)
class LastAudit:
    """The last audit, for `status`; `request_id` is that of the handoff.

    `error` is None where a value is no number, as JSON has none for that.
    """

    time: str
    request_id: str
    error: float | None
    layer: int
    part: str
    ok: bool


@dataclasses.dataclass(slots=True)
class Ledger:
    """What audits have found since the start, and against the provider since its last reset.

    Attributes:
        audited, drifted: since the start.
        given_up: handoffs that were chosen, and not audited in time.
        strikes: audits that found drift since the last reset. An honest one takes none away: what
            corrupts one handoff of twenty is found honest most of the time.
        drift: the last one found, in words; None without strikes.
        last: the last audit.
    """

    audited: int = 0
    drifted: int = 0
    given_up: int = 0
    strikes: int = 0
    drift: str | None = None
    last: LastAudit | None = None

    def add(self, verdict: Verdict, request_id: str, time: str) -> None:
        """Count an audit."""
        self.audited += 1
        if not verdict.ok:
            self.drifted += 1
            self.strikes += 1
            self.drift = verdict.words()
        error = verdict.error if math.isfinite(verdict.error) else None
        self.last = LastAudit(time, request_id, error, verdict.layer, verdict.part, verdict.ok)

    def forgive(self) -> int:
        """Take all strikes away; return how many there were."""
        strikes, self.strikes, self.drift = self.strikes, 0, None
        return strikes

    def out_of_service(self, strikes_allowed: int) -> str | None:
        """Return why the provider is not to be called, None while it may be."""
        if self.strikes < strikes_allowed:
            return None
        times = "1 audit" if self.strikes == 1 else f"{self.strikes} audits"
        return (
            f"{times} found drift, last {self.drift}; "
            "`onebitctl provider reset` puts it back into service"
        )

    def warning(self, strikes_allowed: int) -> str | None:
        """Return what is wrong with the provider, None without strikes."""
        if not self.strikes:
            return None
        if (why := self.out_of_service(strikes_allowed)) is not None:
            return f"the provider is out of service: {why}"
        return f"an audit found drift, {self.drift} (strike {self.strikes} of {strikes_allowed})"
