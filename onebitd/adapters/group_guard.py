"""The guard: a process that kills our children's process groups when the daemon is gone.

Run by path with `python -I -S`, so the standard library only. Its standard input is a pipe whose
other end only the daemon holds: whatever ends the daemon, SIGKILL included, ends the input. A
parent-death signal reaches the direct child alone, so a wrapper script's real server would live on
without this. Lines: `+PGID` a group to kill then, `-PGID` no longer.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    """Read lines until the end of the input, then kill every group that is still listed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        sign, group = line[:1], int(line[1:])
        if sign == b"+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    return 0


if __name__ == "__main__":
    sys.exit(main())
