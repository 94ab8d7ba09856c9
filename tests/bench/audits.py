"""A soak of the audits: many handoffs, every one audited, and what the audits found.

An honest provider must raise no alarm, one that spoils each twentieth handoff must be found out
each time. Both run against a real decoder; prompts differ in length and content.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.measure import median, table
from tests.harness import RunningDaemon, running_onebitd, wait_until
from tests.llama_builds import DEMO_PROGRAM, MODELS, LlamaModel, short_temporary_directory
from tests.standins import spoiling_provider

EVERY = 20
"""One bad handoff of so many."""
PROVIDERS = {
    "onebit-prefill-llama": ("onebitd.prefill_llama", None),
    "onebit-prefill-numpy": ("onebitd.prefill_numpy.program", 1.0),
}
"""Module, and the tolerance that it needs on a quantized model (None: the default)."""
_NEVER_OUT = 1_000_000
_WORDS = """
the quick brown fox jumps over a lazy dog while seven grey wizards boil tea in May 1815 and
der Winter war lang il neige encore def f(x): return x ** 2 # Zeile 12 naïve café Ω ≈ 3.14
"""


@dataclass
class Soaked:
    """What the audits of one provider found.

    Attributes:
        errors: of honest handoffs, the largest relative row error of each.
        alarms: honest handoffs that were called drift.
        found: spoiled handoffs that were, with the right layer.
        missed: spoiled handoffs that were not.
        failed: handoffs that came to nothing, so that there was nothing to audit.
        audit_ms: what each audit took.
    """

    errors: list[float] = field(default_factory=list)
    alarms: int = 0
    found: int = 0
    missed: int = 0
    failed: int = 0
    audit_ms: list[float] = field(default_factory=list)

    def row(self, name: str) -> list[str]:
        """Return a row of the table."""
        return [
            name,
            str(len(self.errors)),
            str(self.failed),
            str(self.alarms),
            f"{max(self.errors, default=0.0):.4g}",
            f"{self.found} of {self.found + self.missed}",
            f"{median(self.audit_ms):.0f}",
        ]


HEAD = (
    "provider",
    "honest",
    "no handoff",
    "false alarms",
    "largest error",
    "spoiled found",
    "audit, ms",
)


def prompts(count: int, seed: int, longest: int) -> Iterator[str]:
    """Yield prompts of 2 to `longest` words, half of them short."""
    draw = random.Random(seed)  # noqa: S311 - the same prompts each time
    for _ in range(count):
        n_words = draw.randint(3, draw.choice((30, longest)))
        yield " ".join(draw.choices(_WORDS.split(), k=n_words))


def soak(
    model: LlamaModel,
    decoder: Sequence[str],
    provider: str,
    handoffs: int,
    *,
    how: str = "honest",
    layer: int = 0,
    head_dim: int = 64,
    tolerance: float | None = None,
    longest: int = 200,
) -> Soaked:
    """Hand off many prompts, audit each, and count.

    Args:
        decoder: its arguments.
        provider: the module of a provider.
        how: what each twentieth handoff suffers, see spoiling_provider; `honest` for nothing.
        tolerance: handoff.audit_tolerance, None for its default.
    """
    said = "" if tolerance is None else f"audit_tolerance = {tolerance}\n"
    found = Soaked()
    with short_temporary_directory() as home:
        env = {
            "ONEBIT_PREFILL_LLAMA_SERVER": str(DEMO_PROGRAM),
            "ONEBIT_PREFILL_LLAMA_ARGS": " ".join(_without_context(decoder)),
            "SPOIL_PROGRAM": str(_program(home, provider)),
            "SPOIL_HOW": how,
            "SPOIL_EVERY": str(EVERY),
            "SPOIL_FIRST": str(EVERY - 1),
            "SPOIL_COUNT": str(home / "count"),
            "SPOIL_LAYER": str(layer),
            "SPOIL_HEAD_DIM": str(head_dim),
        }
        with running_onebitd(
            model=model.path,
            llama_server=DEMO_PROGRAM,
            provider=spoiling_provider.install(home),
            backend_args=decoder,
            config=f"[handoff]\naudit = 1.0\naudit_strikes = {_NEVER_OUT}\n{said}",
            env=env,
        ) as daemon:
            for number, prompt in enumerate(prompts(handoffs, 1, longest)):
                spoiled = how != "honest" and number % EVERY == EVERY - 1
                _one(daemon, prompt, number, layer if spoiled else None, found)
    return found


def _program(home: Path, module: str) -> Path:
    """Write the provider of this checkout as a program, whatever is installed."""
    path = home / module.rpartition(".")[2]
    path.write_text(
        f"#!{sys.executable}\nimport sys\nfrom {module} import main\nsys.exit(main())\n"
    )
    path.chmod(0o755)
    return path


def _without_context(decoder: Sequence[str]) -> list[str]:
    words = list(decoder)
    with contextlib.suppress(ValueError):
        at = words.index("-c")
        del words[at : at + 2]
    return words


def _one(daemon: RunningDaemon, prompt: str, number: int, layer: int | None, found: Soaked) -> None:
    reply = daemon.completion(prompt, max_tokens=1)
    assert reply.status == 200, reply.body
    record = daemon.last_handoff(min(number + 1, 1000))
    if record["outcome"] != "used":
        print(record["detail"], file=sys.stderr, flush=True)
        found.failed += 1
        return
    wait_until(
        lambda: daemon.status()["audit"]["audited"] + found.failed > number,
        f"audit {number}: {daemon.log_records('audit_given_up')}",
        120,
    )
    audit = daemon.log_records("audit")[-1]
    found.audit_ms.append(audit["audit_ms"])
    if layer is None:
        found.errors.append(audit["error"])
        found.alarms += not audit["ok"]
        if not audit["ok"]:
            print(audit["line"], file=sys.stderr, flush=True)
    elif not audit["ok"] and audit["layer"] == layer:
        found.found += 1
    else:
        found.missed += 1
        print(audit["line"], file=sys.stderr, flush=True)
    if number % EVERY == EVERY - 1:
        largest = max(found.errors)
        print(f"{number + 1} handoffs, largest error {largest:.4g}", file=sys.stderr, flush=True)


def soak_row(name: str, decoder: Sequence[str], handoffs: int, how: str, longest: int) -> list[str]:
    """Soak one provider on the small model; return its row."""
    module, tolerance = PROVIDERS[name]
    soaked = soak(
        MODELS[0],
        decoder,
        module,
        handoffs,
        how=how,
        layer=7,
        tolerance=tolerance,
        longest=longest,
    )
    return soaked.row(name)


def audit_table(rows: Sequence[Sequence[str]]) -> str:
    """Return the table of all providers."""
    title = "Audits, every handoff audited: honest ones, and each twentieth spoiled"
    return table(title, HEAD, rows)
