#!/usr/bin/env python3
"""Plays a prefill provider: `--tokens IDS --out STATE --model MODEL [--elfs DIR]`, or with
`--layout HEADER --fds N,...` in the place of `--out`.

The environment says how it behaves:

FAKE_PREFILL_MODE  a comma list, `@FILE` to read it from a file (a missing one: ok) at each run:
    ok                     a good state file (the default)
    sleep:S                first of all, sleep
    per_token:MS           and then for so long for each id
    exit:N                 end with status N, `no XDNA device` on stderr
    crash                  SIGKILL to itself
    hang                   sleep for ever
    ignore_term            ignore SIGTERM
    no_file, empty, half, short_by:N, trailing, wrong_tokens, whole_prompt (one id too many),
    wrong_version, shifted (positions), nan
                           what becomes of the state file
    rewrite:IDS            once it has its name, written over with that of other ids (1/2/3)
    linger:FILE            do not end before there is a file of this name
    symlink, fifo, directory
                           what lies in its place
    grandchild             leave a sleeping child in its process group
    grandchild_holds_file  a child of another session has the state file open for 2 s more
    flood                  10 MB on stdout and on stderr
    garbage_result         the last line of stdout is no JSON
    Where the memory is shared, what ends or stops a run comes after the writing, `exit:N`, `crash`,
    `hang`, `ignore_term`; and of it are left by
    half                   the first half of the positions
    but:P                  all positions but this, -1 is the last
    nothing, nan           no position; a number that is none
    late:S                 everything, but S seconds after a SIGTERM, and then status 0
    grandchild_writes      everything, which a child in the group writes again and again, with a
                           line in FAKE_PREFILL_LOG.beat each time
FAKE_PREFILL_COPY  a prepared state file to copy, or a directory with `N.bin` for N ids; without it
                   the file is one of the stand-in decoder (tests/standins/tiny_state.py)
FAKE_PREFILL_LOG   a file that gets one JSON line at each start: argv, no_device_lock (the variable
                   NPU_NO_DEVICE_LOCK), ids, ids_file (its text), pid, pgid, start, lock_held, fds
                   (what is open), header (text of the layout file); and
                   FILE.end one at each regular end: pid, end. Times are CLOCK_MONOTONIC.
FAKE_PREFILL_LOCK  a lock file: `lock_held` tells whether somebody has it

Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.standins import tiny_state
from tests.standins.share_rows import Rows, open_descriptors

_HOUR_S = 3600


def modes_from(text: str) -> dict[str, str]:
    """Return the modes of a comma list, each with what follows its colon."""
    if text.startswith("@"):
        path = Path(text[1:])
        text = path.read_text() if path.exists() else ""
    words = (word.strip() for word in text.split(","))
    return {name: value for name, _, value in (word.partition(":") for word in words) if name}


def append_line(path: str, document: Mapping[str, object]) -> None:
    """Append a line in one write, so that runs at the same time do not mix."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, json.dumps(document).encode() + b"\n")
    os.close(descriptor)


def lock_is_held(path: str | None) -> bool | None:
    """Say whether some process has the lock; None when there is no such file."""
    if path is None or not Path(path).exists():
        return None
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def state_for(ids: list[int], modes: Mapping[str, str]) -> bytes:
    """Return the state file's bytes, damaged as the modes say."""
    source = os.environ.get("FAKE_PREFILL_COPY")
    if source:
        path = Path(source)
        data = (path / f"{len(ids)}.bin" if path.is_dir() else path).read_bytes()
    else:
        shown = [id_ + 1 for id_ in ids] if "wrong_tokens" in modes else ids
        shown = [*shown, 1] if "whole_prompt" in modes else shown
        data = tiny_state.build(
            shown,
            version=3 if "wrong_version" in modes else tiny_state.VERSION,
            first_pos=5 if "shifted" in modes else 0,
        )
    if "nan" in modes:
        data = data[:-2] + b"\xff\x7e"
    if "half" in modes:
        data = data[: len(data) // 2]
    if "short_by" in modes:
        data = data[: -int(modes["short_by"])]
    return b"" if "empty" in modes else data + bytes(16 if "trailing" in modes else 0)


def write_state(out: Path, data: bytes, modes: Mapping[str, str]) -> None:
    """Put the state, or what plays it, under its name."""
    if "no_file" in modes:
        return
    if "fifo" in modes:
        os.mkfifo(out)
        return
    if "directory" in modes:
        out.mkdir()
        return
    real = out.with_name(out.name + ".tmp")
    real.write_bytes(data)
    if "symlink" in modes:
        out.symlink_to(real)
    else:
        real.rename(out)


def stay(out: Path, modes: Mapping[str, str]) -> None:
    """Do what some providers do while they close their device."""
    if "linger" in modes:
        while not Path(modes["linger"]).exists():
            time.sleep(0.005)
    if "rewrite" in modes:
        with out.open("r+b") as file:
            file.write(tiny_state.build([int(word) for word in modes["rewrite"].split("/")]))
            file.truncate()


def leave_children(out: Path, modes: Mapping[str, str]) -> None:
    """Fork what is to outlive this run."""
    if "grandchild" in modes and os.fork() == 0:
        time.sleep(_HOUR_S)
        os._exit(0)
    if "grandchild_holds_file" in modes:
        descriptor = os.open(out, os.O_RDWR)
        if os.fork() == 0:
            os.setsid()
            os.closerange(0, 3)
            time.sleep(2)
            os._exit(0)
        os.close(descriptor)


def flood() -> None:
    """Write 10 MB to each output: many lines, and some without an end in sight."""
    for stream in (sys.stdout.buffer, sys.stderr.buffer):
        with contextlib.suppress(BrokenPipeError):
            for _ in range(10):
                stream.write((b"x" * 99 + b"\n") * 1000)
                stream.write(b"y" * 900_000 + b"\n")
            stream.flush()


def wait_for_sigterm(more_s: float) -> None:
    """Wait until we are asked to end, and a little longer."""
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.pause()
    time.sleep(more_s)


def write_for_ever(rows: Rows, beat: str) -> None:
    """Leave a child that does not stop writing."""
    if os.fork() == 0:
        while True:
            rows.write({})
            append_line(beat, {"at": time.monotonic()})
            time.sleep(0.001)


def provide_shared(rows: Rows, modes: Mapping[str, str], log: str | None) -> int:
    """Write into the shared memory; return the exit status."""
    if "late" in modes:
        wait_for_sigterm(float(modes["late"] or 0))
    rows.write(modes)
    if "grandchild_writes" in modes:
        write_for_ever(rows, f"{log}.beat")
    if "hang" in modes or "ignore_term" in modes:
        time.sleep(_HOUR_S)
    if "crash" in modes:
        os.kill(os.getpid(), signal.SIGKILL)
    if "exit" in modes:
        print("no XDNA device", file=sys.stderr)
        return int(modes["exit"])
    if log:
        append_line(log + ".end", {"pid": os.getpid(), "end": time.monotonic()})
    print(json.dumps({"prefill_ms": 88.1}))
    return 0


def main() -> int:
    """Run once; return the exit status."""
    started = time.monotonic()
    descriptors = open_descriptors()
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--out")
    parser.add_argument("--layout")
    parser.add_argument("--fds")
    parser.add_argument("--model", required=True)
    parser.add_argument("--elfs")
    args = parser.parse_args()
    if (args.out is None) != (args.layout is not None and args.fds is not None):
        parser.error("either --out, or --layout with --fds")
    modes = modes_from(os.environ.get("FAKE_PREFILL_MODE", ""))
    text = Path(args.tokens).read_text("ascii")
    ids = [int(line) for line in text.splitlines()]
    log = os.environ.get("FAKE_PREFILL_LOG")
    if "ignore_term" in modes:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if log:
        append_line(
            log,
            {
                "argv": sys.argv,
                "no_device_lock": os.environ.get("NPU_NO_DEVICE_LOCK"),
                "ids": ids,
                "ids_file": text,
                "pid": os.getpid(),
                "pgid": os.getpgid(0),
                "start": started,
                "lock_held": lock_is_held(os.environ.get("FAKE_PREFILL_LOCK")),
                "fds": descriptors,
                "header": args.layout and Path(args.layout).read_text(),
            },
        )
    time.sleep(float(modes.get("sleep", 0)) + len(ids) * float(modes.get("per_token", 0)) / 1000)
    if args.layout is not None:
        fds = [int(word) for word in args.fds.split(",")]
        return provide_shared(Rows(args.layout, fds, ids), modes, log)
    if "hang" in modes or "ignore_term" in modes:
        time.sleep(_HOUR_S)
    if "flood" in modes:
        flood()
    if "crash" in modes:
        os.kill(os.getpid(), signal.SIGKILL)
    if "exit" in modes:
        print("npu: opening the device", file=sys.stderr)
        print("no XDNA device", file=sys.stderr)
        return int(modes["exit"])
    out = Path(args.out)
    write_state(out, state_for(ids, modes), modes)
    stay(out, modes)
    leave_children(out, modes)
    if log:
        append_line(log + ".end", {"pid": os.getpid(), "end": time.monotonic()})
    print("prefilled")
    print("{prefill_ms" if "garbage_result" in modes else json.dumps({"prefill_ms": 88.1}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
