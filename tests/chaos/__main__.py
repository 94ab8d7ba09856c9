"""`make chaos` and `make soak`: a daemon in a storm, and a daemon over a long time."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tests.chaos import soak
from tests.chaos.run import chaos


def read_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    storm = commands.add_parser("chaos", help="random clients while a seeded storm goes on")
    storm.add_argument("--requests", type=int, default=2000)
    storm.add_argument("--clients", type=int, default=8)
    storm.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    long = commands.add_parser("soak", help="ordinary clients for a long time")
    long.add_argument("--minutes", type=float, default=30.0)
    long.add_argument("--real", action="store_true", help="on the real decoder and model")
    return parser.parse_args(words)


def main() -> int:
    """Run what was asked for; 1 with the reason when it went wrong."""
    args = read_arguments()
    try:
        if args.command == "chaos":
            print(f"seed {args.seed}", flush=True)
            text = chaos(seed=args.seed, requests=args.requests, clients=args.clients).text()
        else:
            text = soak.soak(minutes=args.minutes, real=args.real).text()
    except AssertionError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
