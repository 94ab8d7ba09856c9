"""`make bench`: what a handoff costs, side by side with the decoder alone, in one run.

The HTTP side is held against its goals, beside nginx and plainer designs. Both routes are compared
too, on the same prompts. The machine's speed cancels out of the ratios; absolute figures are this
machine's, now.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench import audits, check, gate, overlap, records, relay_tables, routes
from tests.bench.measure import Streamed, median, stream, table
from tests.harness import RunningDaemon, running_onebitd
from tests.llama_builds import (
    CPU_ONLY,
    DEMO_PROGRAM,
    MODELS,
    ROOT,
    LlamaClient,
    UnixConnection,
    running_program,
)

COMPLETIONS = "/v1/completions"
BENCH_PARTS = (*relay_tables.TABLES, "handoff", "streaming", "shared", "check", "records")
SOAK_PARTS = ("audit",)
"""Only when asked for: hours, not minutes."""
COMMANDS = {"gate": gate.main, "overlap": overlap.main}
"""With a command line of their own."""
PARTS = ("queue", "template", "tokenize", "lock", "provider_wall", "check", "restore")
CONTEXT = 4096
DECODER = ("-c", str(CONTEXT), "-t", "1", *CPU_ONLY)
"""One thread each: two spinning threads on a shared machine measure the machine."""


def prompt_of(client: LlamaClient, tokens: int) -> list[int]:
    """Return a prompt of exactly so many ids."""
    text = "The quick brown fox jumps over the lazy dog and runs into the deep green forest. "
    ids = client.tokenize(text * (tokens // 10 + 1))
    assert len(ids) >= tokens
    return ids[:tokens]


def chat_of(client: LlamaClient, tokens: int) -> str:
    """Return a user message that makes a chat of about so many prompt tokens."""
    text = "The quick brown fox jumps over the lazy dog and runs into the deep green forest. "
    per_repeat = len(client.tokenize(text * 11)) - len(client.tokenize(text))
    return text * max(1, round((tokens - 40) * 10 / per_repeat))


def direct_stream(client: LlamaClient, path: str, body: dict[str, Any]) -> Streamed:
    """Ask the decoder alone, from an empty slot."""
    client.slot_action("erase", "")
    return stream(UnixConnection(client.socket, 600.0), path, body)


def handoff_rows(
    daemon: RunningDaemon, direct: LlamaClient, lengths: list[int], rounds: int
) -> tuple[list[list[str]], list[list[str]]]:
    """Measure the first byte by prompt length: cold, and through the handoff, interleaved."""
    rows, parts_rows = [], []
    path = "/v1/chat/completions"
    for length in lengths:
        message = chat_of(direct, length)
        cold: list[float] = []
        ours: list[float] = []
        tax: list[float] = []
        last_token: list[float] = []
        parts: dict[str, list[float]] = {name: [] for name in PARTS}
        prompt_tokens = 0
        for number in range(rounds):
            print(f"{length} tokens, round {number + 1} of {rounds}", file=sys.stderr, flush=True)
            # A prefix of its own, so that nothing is found in the slot of the round before.
            content = f"Round {number} of {length}. {message}"
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
            body |= {"temperature": 0}
            cold.append(direct_stream(direct, path, body).first_byte_ms)
            before = len(daemon.handoffs())
            seen = stream(daemon.connect(600.0), path, body)
            record = daemon.last_handoff(before + 1)
            assert record["outcome"] == "used", record
            prompt_tokens = record["prompt_tokens"]
            for name in PARTS:
                parts[name].append(record.get(f"{name}_ms", 0.0))
            last_token.append(seen.timings["prompt_ms"])
            ours.append(seen.first_byte_ms)
            tax.append(
                seen.first_byte_ms
                - record["provider_wall_ms"]
                - record["restore_ms"]
                - seen.timings["prompt_ms"]
            )
        rows.append(
            [
                str(prompt_tokens),
                f"{median(cold):.1f}",
                f"{median(ours):.1f}",
                f"{median(ours) / median(cold):.2f}",
                f"{median(tax):.1f}",
                f"{median(tax) / median(cold):.3f}",
            ]
        )
        parts_rows.append(
            [str(prompt_tokens)]
            + [f"{median(parts[name]):.2f}" for name in PARTS]
            + [f"{median(last_token):.1f}"]
            + [f"{median(parts['check']) / median(parts['restore']):.2f}"]
        )
    return rows, parts_rows


def streaming_row(
    daemon: RunningDaemon, direct: LlamaClient, rounds: int, tokens: int
) -> list[str]:
    """Measure streaming: tokens per second, and the added time to first byte, passed through."""
    prompt = prompt_of(direct, 32)
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= {"cache_prompt": False}
    ours: list[Streamed] = []
    alone: list[Streamed] = []
    for _ in range(rounds):
        alone.append(direct_stream(direct, COMPLETIONS, body))
        ours.append(stream(daemon.connect(600.0), COMPLETIONS, body))
    rate, rate_alone = (
        median(one.tokens_per_second for one in ours),
        median(one.tokens_per_second for one in alone),
    )
    first, first_alone = (
        median(one.first_byte_ms for one in ours),
        median(one.first_byte_ms for one in alone),
    )
    return [
        f"{tokens} tokens",
        f"{rate_alone:.1f}",
        f"{rate:.1f}",
        f"{rate / rate_alone:.3f}",
        f"{first_alone:.1f}",
        f"{first - first_alone:.2f}",
    ]


def against_decoder(parts: Sequence[str], args: argparse.Namespace, state_dir: Path) -> None:
    """Print the tables that compare with the decoder alone."""
    model = MODELS[0].path
    arguments = ("-m", str(model), "-np", "1", "--cache-ram", "0", *DECODER)
    with (
        running_program(DEMO_PROGRAM, arguments) as direct,
        running_onebitd(
            model=model,
            llama_server=DEMO_PROGRAM,
            provider=Path(sys.executable).with_name("onebit-prefill-llama"),
            backend_args=DECODER,
            config=f'[handoff]\nstate_dir = "{state_dir}"\n',
            env={
                "ONEBIT_PREFILL_LLAMA_SERVER": str(DEMO_PROGRAM),
                "ONEBIT_PREFILL_LLAMA_ARGS": " ".join(("-t", "1", *CPU_ONLY)),
            },
        ) as daemon,
    ):
        if "handoff" in parts:
            rows, times = handoff_rows(daemon, direct, args.lengths, args.rounds)
            say(
                table(
                    "Chat, time to first byte; tax = first byte less provider, restore and the "
                    "decoder's own prompt time",
                    ["prompt", "decoder cold", "handoff", "ratio", "tax", "tax/cold"],
                    rows,
                )
            )
            say(
                table(
                    "The handoff's parts (the provider starts a llama-server each time);\n"
                    "check: what is left of it when the provider has ended",
                    [
                        "prompt",
                        *(name.removesuffix("_wall") for name in PARTS),
                        "last token",
                        "check/restore",
                    ],
                    times,
                )
            )
        if "streaming" in parts:
            say(
                table(
                    "Streaming, passed through",
                    ["reply", "alone tok/s", "onebitd", "ratio", "first byte alone", "added"],
                    [streaming_row(daemon, direct, args.rounds, args.stream_tokens)],
                )
            )


def say(text: str) -> None:
    """Print a paragraph."""
    print(text, end="\n\n", flush=True)


def _part(word: str) -> str:
    if word not in (*BENCH_PARTS, *SOAK_PARTS):
        known = ", ".join((*BENCH_PARTS, *SOAK_PARTS))
        raise argparse.ArgumentTypeError(f"{word!r} is none of {known}")
    return word


def read_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument(
        "parts",
        nargs="*",
        type=_part,  # with choices=, argparse refuses to be given none
        default=BENCH_PARTS,
        metavar="PART",
        help=f"what to measure: {', '.join(BENCH_PARTS)}; without any, all of it;"
        f" {', '.join(SOAK_PARTS)} only by name",
    )
    parser.add_argument("--rounds", type=int, default=3, help="repeats of each figure")
    parser.add_argument("--lengths", type=int, nargs="+", default=[300, 1000, 3500])
    parser.add_argument("--stream-tokens", type=int, default=128)
    parser.add_argument("--handoffs", type=int, default=300, help="of the audit soak")
    parser.add_argument(
        "--provider",
        choices=list(audits.PROVIDERS),
        help="of the audit soak; without it, all",
    )
    parser.add_argument("--spoil", default="honest", help="of the audit soak: what goes wrong")
    parser.add_argument("--longest", type=int, default=200, help="of the audit soak, in words")
    parser.add_argument("--quick", action="store_true", help="next to nothing of each: a test run")
    parser.add_argument(
        "--code",
        type=Path,
        default=ROOT,
        help="of relay, idle and tax: the directory that the package onebitd is taken from",
    )
    args = parser.parse_args(words)
    if args.quick:
        args.rounds, args.lengths, args.stream_tokens = 1, [100], 16
    return args


def main() -> int:
    """Run the benchmark and print its tables."""
    if sys.argv[1:] and sys.argv[1] in COMMANDS:
        return COMMANDS[sys.argv[1]](sys.argv[2:])
    args = read_arguments()
    tmpfs = Path(tempfile.mkdtemp(prefix="onebitd-bench-", dir="/dev/shm"))
    say(f"medians of {args.rounds} rounds, milliseconds, state files in tmpfs")
    try:
        for part in relay_tables.TABLES:
            if part in args.parts:
                wanted = relay_tables.Wanted(args.code, args.quick, args.rounds, args.lengths)
                say(relay_tables.TABLES[part](wanted))
        against = [part for part in args.parts if part in ("handoff", "streaming")]
        if against:
            against_decoder(against, args, tmpfs)
        if "shared" in args.parts:
            rows = routes.compare_routes(
                MODELS[0].path, DECODER, tmpfs, chat_of, args.lengths, args.rounds
            )
            say(routes.comparison_table(rows))
        if "check" in args.parts:
            say(check.check_table(MODELS[0].path, tmpfs, args.rounds))
        if "records" in args.parts:
            say(records.records_table(tmpfs, args.rounds))
        if "audit" in args.parts:
            names = [args.provider] if args.provider else list(audits.PROVIDERS)
            soaked = [
                audits.soak_row(name, DECODER, args.handoffs, args.spoil, args.longest)
                for name in names
            ]
            say(audits.audit_table(soaked))
    finally:
        shutil.rmtree(tmpfs, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
